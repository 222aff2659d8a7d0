"""Where history is kept."""
