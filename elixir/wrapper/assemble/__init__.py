"""From a model and a plan to chunks that hold its weights."""
