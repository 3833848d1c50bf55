"""The reference planner: which bytes live on which tier, and why."""
