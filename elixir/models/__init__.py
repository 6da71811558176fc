"""Models by name, config or function, on meta, with a default training step."""
