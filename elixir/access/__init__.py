"""Intercepts reads and writes of weights, for the tracer and the runtime."""
