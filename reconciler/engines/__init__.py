"""What is known about each serving engine, as pure functions."""
