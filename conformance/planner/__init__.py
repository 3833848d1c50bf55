"""Plans are held against the machine."""
