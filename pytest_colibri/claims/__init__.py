"""What plans and engines assert, and retract."""
