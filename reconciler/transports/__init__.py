"""Ways to run a fixed command on a host."""
