"""The things under test: the embedded reference, or any program that speaks the protocol."""
