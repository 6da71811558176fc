"""Assembles chunks that hold a model's weights under a plan."""
