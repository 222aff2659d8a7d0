"""Where specs come from."""
