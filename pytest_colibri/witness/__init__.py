"""Observers that do not trust the engine."""
