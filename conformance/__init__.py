"""The conformance suite: what every planner and engine is held to, on every machine."""
