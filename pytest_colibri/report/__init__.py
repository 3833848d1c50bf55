"""Verdicts for people and machines to read."""
