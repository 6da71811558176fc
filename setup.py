"""For tools that still ask for it; everything is declared in pyproject.toml."""

from setuptools import setup

setup()
