"""What readers see: plain functions from values to text."""
