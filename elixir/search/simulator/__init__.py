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
from elixir.search.simulator.uncertainty import (
    MEASURED_RANGE,
    SLOW_HOST_ADAM,
    SLOW_LINK,
    extremes,
    with_host_speed,
    worst_case,
)

__all__ = [
    "ADAM_TRAFFIC_BYTES",
    "ARITHMETIC_NUMEL_PER_S",
    "DEVICE_ROUNDING_BYTES",
    "MEASURED_RANGE",
    "RESOURCES",
    "SLOW_HOST_ADAM",
    "SLOW_LINK",
    "Cluster",
    "Rates",
    "SimulatedCost",
    "Simulation",
    "Span",
    "WorkTimes",
    "adam_share",
    "can_step",
    "extremes",
    "gather_s",
    "main_dtype",
    "out_of_place_share",
    "say_if_network_unknown",
    "simulate_step",
    "with_host_speed",
    "with_link_speed",
    "worst_case",
    "worth_stepping",
]
