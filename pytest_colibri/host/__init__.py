"""The facts of a machine, probed live or emulated from recordings."""
