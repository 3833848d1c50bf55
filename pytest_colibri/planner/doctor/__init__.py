"""The doctor: looks at a machine, a model folder and an engine's binary, and changes nothing."""
