"""Bytes that one optimizer step of one rank moves over the links: the count that a plan predicts and a run is compared
with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class ChunkRoute(NamedTuple):
    """The way of one chunk's bytes: the homes of its weights and states, and whether it has gradients."""

    weight_bytes: int
    """Bytes of the gathered weights, and of a whole gradient."""
    shard_bytes: int
    resident: bool
    weight_on_device: bool
    state_on_device: bool
    trainable: bool
    gradient: bool
    """Whether any of its parameters gets a gradient."""
    stepped: bool = True
    """Whether the rank's shard holds a part of any parameter, so that there is something to step."""
    turned_bytes: int = 0
    """See `Plan.turned_bytes`."""
    exchanged_bytes: int = 0
    """See `elixir.plan.matrices.exchanged_bytes`."""
    file_bytes: int = 0
    """Bytes that each load reads from files."""


@dataclass(frozen=True)
class Backwards:
    """The backwards of one optimizer step."""

    count: int
    """Number of them, and of micro-batches: after each, gradients are reduced and sent to the home of the states."""
    partial: int = 0
    """Number of the first ones, whose gradients are not summed over the replicas."""

    @classmethod
    def of(cls, count: int, accumulation: int = 1) -> Backwards:
        """A step of so many backwards that was planned for `accumulation` of them: replicas sum from that one on."""
        return cls(count, min(count, accumulation - 1))

    @property
    def summed(self) -> int:
        """How often replicas sum gradients that are reduced at that moment."""
        return self.count - self.partial

    @property
    def finished(self) -> bool:
        """Whether replicas sum what is at home before the optimizer's step, since no backward did."""
        return bool(self.partial) and not self.summed


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that one rank moves in one optimizer step."""

    host_to_device_bytes: int
    device_to_host_bytes: int
    """Gradients, matrices that were made orthogonal, and activations. Evictions are clean and move nothing."""
    network_bytes: int
    """Received from other ranks of the replica, when weights are gathered, gradients reduced, and matrices made
    orthogonal."""
    file_bytes: int
    """Read from files in which frozen weights live."""
    replicas_bytes: int = 0
    """Received from other replicas, when gradients are summed over them."""


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that each of `ranks` receives in a ring that sums buffers of `nbytes`."""
    return 2 * (ranks - 1) * nbytes // ranks


def step_traffic(
    routes: Iterable[ChunkRoute],
    loads: Mapping[int, int],
    backwards: Backwards,
    *,
    stepped: bool = True,
    replicas: int = 1,
    swap_bytes: int = 0,
) -> StepTraffic:
    """Counts the bytes of one optimizer step.

    Args:
        routes: of every chunk, by index.
        loads: per chunk, how often it comes into a block in all micro-batches (`Schedule.step`).
        backwards: of the step.
        stepped: False if the optimizer skipped the step, so that no weights are new.
        replicas: of the model, each sharded over as many ranks.
        swap_bytes: of activations that move to the host in each micro-batch, and back.
    """
    host_to_device = device_to_host = backwards.count * swap_bytes
    network = files = across = 0
    for index, route in enumerate(routes):
        from_others = route.weight_bytes - route.shard_bytes
        loaded = loads.get(index, 0)
        network += loaded * from_others
        files += loaded * route.file_bytes
        if not route.weight_on_device:
            host_to_device += loaded * route.shard_bytes
        if not route.trainable:
            continue
        if route.gradient:
            network += backwards.count * from_others
            if not route.state_on_device:
                device_to_host += backwards.count * route.shard_bytes
            if replicas > 1:
                across += (backwards.summed + backwards.finished) * all_reduce_bytes(route.shard_bytes, replicas)
                if not route.state_on_device:  # what was added up goes along
                    host_to_device += bool(backwards.partial) * route.shard_bytes
                    device_to_host += backwards.finished * route.shard_bytes
        if not stepped:
            continue
        if route.resident:
            network += from_others  # the new weights of the other ranks' shards
        if route.gradient:
            host_to_device += route.turned_bytes
            device_to_host += route.turned_bytes
            network += route.exchanged_bytes
        if route.gradient and route.stepped and route.weight_on_device and not route.state_on_device:
            host_to_device += route.shard_bytes
    return StepTraffic(host_to_device, device_to_host, network, files, across)
