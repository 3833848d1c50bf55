"""Hardware profiles: what a machine is and is claimed to do."""
