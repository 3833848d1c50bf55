"""Engines are held to what they announce."""
