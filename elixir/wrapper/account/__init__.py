"""The account of a step: counts, clock, report."""
