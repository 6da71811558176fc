"""One optimizer step: inputs, norm, updates per chunk."""
