"""A hardware conformance suite for mixture-of-experts inference engines, as a pytest plugin."""

__version__ = "0.1.0"
