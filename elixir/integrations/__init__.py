"""Elixir inside of other frameworks: `transformers.Trainer`, Accelerate and Lightning.

Each is a module that is imported by its name, such as ``elixir.integrations.accelerate``, and needs that framework.
"""
