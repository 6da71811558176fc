"""Adam for shards and whole models: the rule, the moments, the step, compiled or not."""
