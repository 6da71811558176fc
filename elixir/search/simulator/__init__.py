"""Seconds: rates of a machine, collectives, events of a step, their replay. It knows no search."""
