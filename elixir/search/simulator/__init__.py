"""Seconds: rates of a machine, collectives, events of a step, their replay. It knows no search."""

from __future__ import annotations

from elixir.search.simulator.collectives import Cluster, gather_s
from elixir.search.simulator.events import WorkTimes
from elixir.search.simulator.in_backward import can_step, out_of_place_share, worth_stepping
from elixir.search.simulator.rates import (
    ADAM_TRAFFIC_BYTES,
    ARITHMETIC_NUMEL_PER_S,
    DEVICE_ROUNDING_BYTES,
    Rates,
    adam_share,
    main_dtype,
    say_if_network_unknown,
    with_link_speed,
)
from elixir.search.simulator.replay import RESOURCES, Span
from elixir.search.simulator.step import SimulatedCost, Simulation, simulate_step

__all__ = [
    "ADAM_TRAFFIC_BYTES",
    "ARITHMETIC_NUMEL_PER_S",
    "DEVICE_ROUNDING_BYTES",
    "RESOURCES",
    "Cluster",
    "Rates",
    "SimulatedCost",
    "Simulation",
    "Span",
    "WorkTimes",
    "adam_share",
    "can_step",
    "gather_s",
    "main_dtype",
    "out_of_place_share",
    "say_if_network_unknown",
    "simulate_step",
    "with_link_speed",
    "worth_stepping",
]
