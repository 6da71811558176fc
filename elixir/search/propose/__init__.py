"""The search: shapes and what they need, a judge of candidates, and one climb; and how a candidate becomes a plan."""
