"""Values that a trace knows although its tensors are on meta, and refusals to guess the others."""
