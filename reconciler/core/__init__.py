"""Decisions, as functions from values to values."""
