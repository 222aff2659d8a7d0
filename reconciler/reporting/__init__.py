"""Telling others: comments and statuses on forges, notes in git, notifications. Never in the way of a rollout."""
