"""Questions asked of a planner: sweep, explain."""
