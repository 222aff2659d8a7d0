"""What is known about each GPU vendor, as pure functions."""
