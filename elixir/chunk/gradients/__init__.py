"""Gradients on their way from autograd to the home of the optimizer states, and their memory."""
