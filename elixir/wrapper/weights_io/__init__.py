"""Weights in and out under the model's names: state dicts and gathered()."""
