"""`Work`: one training step and the machine that runs it, as the arithmetic of other runtimes reads them;
`Prediction`: the outcome of that arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from elixir.hardware.profile import HardwareProfile
from elixir.optimizer_states import MASTER_BYTES
from elixir.step_trace import Access, ParamInfo, StepTrace, enclosing
from elixir.units import dtype_bytes, format_bytes, format_seconds

MOMENTS_BYTES = 8
"""Bytes of Adam's two moments of an element, in float32."""
ADAM_TRAFFIC_BYTES = 28
"""Bytes of host memory that Adam reads and writes for an element: gradient, weight and moments in float32."""
ROOT = ""
"""The name of the group of parameters that lie in no unit."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a runtime is asked to train."""

    runtime: str
    """``ddp``, ``fsdp2`` or ``deepspeed``."""
    micro: int = 1
    """Samples of a micro-batch, on one rank."""
    accumulation: int = 1
    """Micro-batches of an optimizer step."""
    checkpoint: bool = False
    """Whether all layers run again in backward."""
    offload: bool = False
    """Whether optimizer states, and what else the runtime moves with them, live on the host."""
    keep: bool = False
    """FSDP2: whether gathered weights stay from forward to backward (``reshard_after_forward=False``)."""
    stage: int = 0
    """DeepSpeed: the stage of ZeRO."""
    weights_offload: bool = False
    """DeepSpeed: whether weights live on the host as well (``offload_param``), which takes stage 3."""
    ratio: float = 1.0
    """DeepSpeed: the part of the states that is offloaded (``ratio`` of ``offload_optimizer``)."""

    def __str__(self) -> str:
        words = {"ddp": "DDP", "fsdp2": "FSDP2", "deepspeed": f"ZeRO-{self.stage}"}[self.runtime]
        words += " keep" if self.keep else ""
        words += " offload" if self.offload else ""
        words += " of weights too" if self.weights_offload else ""
        words += f", ratio {self.ratio:g}" if self.ratio < 1 else ""
        words += ", checkpointed" if self.checkpoint else ""
        return f"{words}, {self.accumulation} x {self.micro}"


@dataclass(frozen=True)
class Prediction:
    """One step under a setting, on one rank."""

    setting: Setting
    device_bytes: int
    """Highest allocated bytes of one device."""
    parts: Mapping[str, int]
    """Kinds of these at that moment, and their bytes."""
    host_bytes: int
    """Host memory of all ranks of one machine that the runtime keeps: pinned buffers, masters, states."""
    seconds: Mapping[str, float]
    """Parts of the step's seconds; they add up to `step_s`."""
    sources: tuple[str, ...] = ()
    """Places in the runtime's release that say so: files and lines."""

    @property
    def step_s(self) -> float:
        """Seconds of one optimizer step."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.parts.items() if size)
        times = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in self.seconds.items() if seconds)
        return (
            f"{self.setting}: {format_bytes(self.device_bytes)} of each device ({parts}), "
            f"{format_bytes(self.host_bytes)} of each host, {format_seconds(self.step_s)} a step ({times})"
        )


@dataclass(frozen=True)
class Group:
    """Parameters that a runtime gathers together: those of a unit of the model, or all that lie in none."""

    name: str
    trained: int
    """Elements that are trained, each parameter padded to a whole number for each rank."""
    nbytes: int
    """Bytes of its weights as the step computes with them, likewise."""
    trained_bytes: int
    """Bytes of whole gradients, in the dtype of compute, likewise."""
    kept_bytes: int
    """Bytes of its weights as all ranks together keep them: trained ones in float32, others as they are."""


@dataclass(frozen=True)
class Work:
    """One step on one rank of several.

    Args:
        trace: of one micro-batch, in the dtype in which the runtime computes.
        hardware: the machine.
        world_size: number of ranks.
        access_s: compute seconds of every access of the trace.
        master_bytes: bytes of a trained weight as it is kept and stepped.
        gather_s: seconds in which all ranks gather, or reduce, so many bytes; None: those of a ring, without latency.
    """

    trace: StepTrace
    hardware: HardwareProfile
    world_size: int = 1
    access_s: Sequence[float] = field(default=(), repr=False)
    master_bytes: int = MASTER_BYTES
    gather_s: Callable[[float], float] | None = field(default=None, repr=False)

    @cached_property
    def _units(self) -> frozenset[str]:
        return frozenset(unit.name for unit in self.trace.units)

    def group_of(self, name: str) -> str:
        """The name of the group in which a module or a parameter lies."""
        return enclosing(name, self._units) or ROOT

    @cached_property
    def groups(self) -> dict[str, Group]:
        """All groups that hold parameters, by name, in the order of the model."""
        members: dict[str, list[ParamInfo]] = {}
        for parameter in self.trace.parameters:
            members.setdefault(self.group_of(parameter.name), []).append(parameter)
        return {name: self._group(name, each) for name, each in members.items()}

    def _group(self, name: str, members: Sequence[ParamInfo]) -> Group:
        sizes = [(each, self.padded(each)) for each in members]
        return Group(
            name,
            sum(size for each, size in sizes if each.trainable),
            sum(size * dtype_bytes(each.dtype) for each, size in sizes),
            sum(size * dtype_bytes(each.dtype) for each, size in sizes if each.trainable),
            sum(size * (self.master_bytes if each.trainable else dtype_bytes(each.dtype)) for each, size in sizes),
        )

    def padded(self, parameter: ParamInfo) -> int:
        """Elements of a parameter whose first dimension is filled up to a multiple of the ranks."""
        rows = parameter.shape[0] if parameter.shape else 1
        return -(-rows // self.world_size) * self.world_size * (parameter.numel // rows if rows else 0)

    @property
    def trained(self) -> int:
        """Elements that are trained."""
        return sum(each.numel for each in self.trace.parameters if each.trainable)

    @property
    def ranks_here(self) -> int:
        """Ranks that share a machine."""
        return self.hardware.ranks_per_host(self.world_size)

    def compute_s(self, *, backward: bool | None = None) -> float:
        """Seconds of the device's own work in forward, in backward with what runs again there, or in both."""
        phases = {None: ("forward", "recompute", "backward"), True: ("recompute", "backward"), False: ("forward",)}
        pairs = zip(self.trace.accesses, self.access_s, strict=True)
        return sum(seconds for access, seconds in pairs if access.phase in phases[backward])

    def runs(self) -> Iterator[tuple[str, bool, int, int]]:
        """Successive accesses of one group on one side of the step: its name, whether it is backward, the first access
        and the one after the last."""
        begin = 0
        keys = [(self.group_of(each.module), each.phase != "forward") for each in self.trace.accesses]
        for index in range(1, len(keys) + 1):
            if index == len(keys) or keys[index] != keys[begin]:
                yield (*keys[begin], begin, index)
                begin = index

    def gradients_before(self) -> list[int]:
        """By access: bytes of complete gradients, in the dtype of the trace's weights, when it begins."""
        done = [0] * (len(self.trace.accesses) + 1)
        for each in self.trace.parameters:
            if each.trainable and each.grad_access is not None:
                done[each.grad_access + 1] += each.numel * dtype_bytes(each.dtype)
        return list(accumulate(done[:-1]))

    def gradients_made(self) -> dict[str, int]:
        """By group: the bytes that it adds to `gradients_before`."""
        made = dict.fromkeys(self.groups, 0)
        for each in self.trace.parameters:
            if each.trainable and each.grad_access is not None:
                made[self.group_of(each.name)] += each.numel * dtype_bytes(each.dtype)
        return made

    def highest(self, kept: Callable[[int, Access], Mapping[str, int]]) -> dict[str, int]:
        """The parts of memory at the moment of the highest total, over forward and backward.

        Args:
            kept: what the runtime holds during an access, next to inputs, activations and workspace.
        """
        best: dict[str, int] = {}
        for index, access in enumerate(self.trace.accesses):
            parts = {**kept(index, access), "activations": access.live_bytes}
            if sum(parts.values()) > sum(best.values()):
                best = parts
        return best

    def link_s(self, nbytes: float, *, to_host: bool = False) -> float:
        """Seconds of a copy between the host and this rank's device, next to those of the other ranks."""
        key = "device_to_host" if to_host else "host_to_device"
        rate = getattr(self.hardware, f"{key}_bytes_per_s")
        return float(nbytes / min(rate, self.hardware.host_memory_bytes_per_s / self.ranks_here))

    def ring_s(self, nbytes: float, *, passes: int = 1) -> float:
        """Seconds in which all ranks gather, or reduce, so many bytes; an all-reduce takes two passes."""
        if self.gather_s is not None:
            return passes * self.gather_s(nbytes) if self.world_size > 1 and nbytes else 0.0
        ranks, rate = self.world_size, self.hardware.device_to_device_bytes_per_s
        if ranks > self.ranks_here:  # the ring passes each machine's network once
            rate = min(rate, self.hardware.network_bytes_per_s or rate)
        return passes * nbytes * (ranks - 1) / ranks / rate

    def adam_s(self, numel: float, *, on_host: bool) -> float:
        """Seconds of Adam over so many elements of this rank, by the profile's rate."""
        if on_host:
            return numel * self.ranks_here / self.hardware.host_adam_numel_per_s
        return numel / self.hardware.device_adam_numel_per_s
