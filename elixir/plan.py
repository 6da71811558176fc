"""`Plan`: what goes where, and when. Plain data: no tensor, no device, no process group.

A plan packs parameters into chunks, gives each chunk a home for its weights and one for its gradients and optimizer
states, and says how many rCache blocks the streamed chunks share. All bytes are per rank unless a name says otherwise.

Every class here checks its values: what exists can be run. An `InputError` names the field that stands in the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from elixir.artifact import Artifact, digest
from elixir.errors import ArtifactError, InputError
from elixir.moments import MomentKind, StateSize, moments_size
from elixir.plan_versions import DISK_LINKS, upgraded
from elixir.schedule import StepSchedule, required_chunks
from elixir.units import dtype_bytes, format_bytes, format_seconds

Home = Literal["device", "host"]
StateHome = Literal["device", "host", "disk"]
Phase = Literal["forward", "recompute", "backward"]

PARAM_ALIGNMENT_BYTES = 512
"""Parameters start at multiples of this inside a chunk: other offsets change the bits some kernels give."""
LINKS = ("host_to_device", "device_to_host", "network", *DISK_LINKS)
ADAM_FAMILIES = ("Adam", "AdamW")
"""Optimizers whose states are the two moments that `elixir.moments` knows in several kinds."""


@dataclass(frozen=True)
class ParamSlot:
    """Where one parameter lies inside its chunk."""

    name: str
    offset: int
    """In elements from the start of the chunk."""
    numel: int

    def __post_init__(self) -> None:
        _check_at_least(0, "offset", self.offset)
        _check_at_least(0, "numel", self.numel)


@dataclass(frozen=True)
class ChunkPlan:
    """Parameters that travel together in one flat buffer, sharded evenly over the ranks."""

    dtype: str
    """Torch name of the dtype of its weights and gradients, such as ``bfloat16``."""
    trainable: bool
    """False for a chunk of frozen parameters, which has no gradients and no states."""
    numel: int
    """Elements of the buffer, padding included; a multiple of the world size."""
    parameters: tuple[ParamSlot, ...]
    weight_home: Home
    """Where the rank's shard of the weights lives."""
    state_home: StateHome
    """Where the shard of gradients, master weights and optimizer states lives; for a frozen chunk, its weight home. With
    ``disk``, master weights and states are read from there for their update and written back; gradients wait on the host.
    """
    resident: bool
    """True: gathered on the device for the whole step, in memory of its own. False: gathered into rCache blocks."""
    grad_rank: int | None = None
    """Its place among the chunks in the order in which their gradients are complete; None where it gets none. Ranks
    reduce gradients in this order, whatever their data does."""
    grad_entry: int | None = None
    """Index of the entry of `Plan.order` during which its last gradient arrives; None where it gets none. Between the
    gathers of this entry and those of the next is the place of its reduction, the same on all ranks."""
    steps_in_backward: bool = False
    """Whether the host updates it as soon as its gradients are there, beside the rest of backward; else with
    `ElixirOptimizer.step`."""

    def __post_init__(self) -> None:
        _check_at_least(1, "numel", self.numel)
        itemsize, end = _itemsize(self.dtype), 0
        for index, slot in enumerate(self.parameters):
            field = f"parameters[{index}].offset"
            if slot.offset * itemsize % PARAM_ALIGNMENT_BYTES:
                raise InputError(
                    f"field '{field}': {slot.name!r} starts at byte {slot.offset * itemsize} of its chunk, which is no "
                    f"multiple of {PARAM_ALIGNMENT_BYTES}"
                )
            if slot.offset < end:
                raise InputError(f"field '{field}': {slot.name!r} starts at {slot.offset}, inside what ends at {end}")
            end = slot.offset + slot.numel
            if end > self.numel:
                raise InputError(
                    f"field '{field}': {slot.name!r} ends at element {end} of a chunk that has {self.numel}"
                )
        self._check_homes()

    def _check_homes(self) -> None:
        if self.resident and self.weight_home != "device":
            raise InputError("field 'weight_home' must be 'device' for a chunk that is resident there, found 'host'")
        if not self.trainable and self.state_home != self.weight_home:
            raise InputError(
                f"field 'state_home' must be the weight home {self.weight_home!r} for a frozen chunk, which has no "
                f"states, found {self.state_home!r}"
            )
        if self.state_home == "device" and self.weight_home == "host":
            raise InputError("field 'weight_home' must be 'device' where the states are updated there, found 'host'")
        if self.steps_in_backward and (not self.trainable or self.state_home != "host" or self.grad_entry is None):
            raise InputError(
                "field 'steps_in_backward' is for trainable chunks with gradients whose states live on the host, found "
                f"state_home {self.state_home!r}, trainable {self.trainable}, grad_entry {self.grad_entry}"
            )

    @property
    def update_home(self) -> Home:
        """The memory in which its gradients wait and its shard is updated: `state_home`; for the disk, the host."""
        return "host" if self.state_home == "disk" else self.state_home

    @property
    def returns_rounded(self) -> bool:
        """Whether the host steps float32 masters of weights that live on the device in fewer bits."""
        low_precision = dtype_bytes(self.dtype) < MASTER_BYTES
        return self.trainable and low_precision and self.weight_home == "device" and self.update_home == "host"

    @property
    def used_numel(self) -> int:
        """Elements that are parameters, padding and alignment gaps not counted."""
        return sum(slot.numel for slot in self.parameters)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the gathered weights."""
        return self.numel * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class ChunkUse:
    """One entry of the recorded order: chunks used together, as often in a row as nothing else is."""

    phase: Phase
    chunks: tuple[int, ...]
    """Indices into `Plan.chunks`, resident ones included."""
    pin_until: int
    """Index of the last entry during which these may not be evicted."""


@dataclass(frozen=True)
class PlanPrediction:
    """What the planner expects of one steady training step, for a run to compare itself with.

    Where a step has several batches, `moved_bytes`, `loads` and `hits` are of the first, which finds the rCache empty.
    """

    device_peak_bytes: int
    device_parts: dict[str, int]
    """The device peak by what holds it; sums to `device_peak_bytes`."""
    host_peak_bytes: int
    """Of all ranks of one machine together."""
    host_parts: dict[str, int]
    """The host peak by what holds it; sums to `host_peak_bytes`."""
    moved_bytes: dict[str, int]
    """Bytes per rank and step over each of `LINKS`."""
    loads: int
    """Gathers into rCache blocks per step."""
    hits: int
    """Uses of streamed chunks that found them in a block already."""
    seconds: dict[str, float]
    """Predicted time by part; ``total`` is the step."""
    disk_peak_bytes: int = 0
    """Master weights and optimizer states on the disk of one machine, of all its ranks together."""

    def __post_init__(self) -> None:
        for name, parts, peak in (
            ("device_parts", self.device_parts, self.device_peak_bytes),
            ("host_parts", self.host_parts, self.host_peak_bytes),
        ):
            for part, amount in parts.items():
                _check_at_least(0, f"{name}.{part}", amount)
            if sum(parts.values()) != peak:
                raise InputError(f"field '{name}' must sum to the peak of {peak} bytes, found {sum(parts.values())}")
        if sorted(self.moved_bytes) != sorted(LINKS):
            raise InputError(f"field 'moved_bytes' must have the links {list(LINKS)}, found {sorted(self.moved_bytes)}")
        for link, amount in self.moved_bytes.items():
            _check_at_least(0, f"moved_bytes.{link}", amount)
        for name in ("loads", "hits", "disk_peak_bytes"):
            _check_at_least(0, name, getattr(self, name))
        if "total" not in self.seconds:
            raise InputError(f"field 'seconds' must have the step's 'total', found {sorted(self.seconds)}")
        for part, seconds in self.seconds.items():
            _check_at_least(0, f"seconds.{part}", seconds)


@dataclass(frozen=True)
class Plan(Artifact):
    """The outcome of a search, and all that a run needs to know."""

    artifact: ClassVar[str] = "plan"
    schema_version: ClassVar[int] = 6

    model_name: str
    model_fingerprint: str
    hardware_name: str
    hardware_fingerprint: str
    world_size: int
    dtype: str
    """Dtype the parameters and floating inputs are cast to, or ``as built``."""
    optimizer: str
    """Optimizer family the states were counted for, such as ``Adam``."""
    state_size: StateSize
    """Bytes of optimizer states of a trainable chunk's shard, master weights not included."""
    overlap: bool
    """Whether transfers run beside compute, with prefetch."""
    placement: Literal["auto", "cuda", "cpu"]
    block_numel: int
    """`block_bytes` in elements of the most common dtype."""
    block_bytes: int
    """Size of one rCache or gradient block, the same for all; 0 where there is neither."""
    block_count: int
    prefetch_depth: int
    """How many chunks ahead of their use are fetched."""
    grad_block_count: int
    """Blocks of `block_bytes` that gradients on their way to the host, or to their reduction, are gathered in."""
    chunks: tuple[ChunkPlan, ...]
    order: tuple[ChunkUse, ...]
    device_budget_bytes: int
    host_budget_bytes: int
    predicted: PlanPrediction
    accumulation: int = 1
    """Batches per optimizer step that it was searched for; it runs with any number, but memory and time are of this."""
    disk_budget_bytes: int = 0
    """Of the disk of one machine; 0: the plan may not use it."""
    moments: MomentKind = "float32"
    """How Adam's moments are kept; ``float32`` for every other optimizer, as their states are."""
    may_step_in_backward: bool = False
    """Whether the search might let chunks be updated while backward still runs; `ChunkPlan.steps_in_backward` says which are."""

    @classmethod
    def from_dict(cls, data: Any, *, source: str = "input") -> Plan:
        """Build a plan from what `to_dict` gave, now or by one of the schema versions that `upgraded` knows."""
        if isinstance(data, dict) and data.get("artifact") == cls.artifact:
            version = data.get("schema_version")
            if type(version) is int:
                data = upgraded(data, version, source)
        return super().from_dict(data, source=source)

    @property
    def uses_disk(self) -> bool:
        """Whether any chunk's states live there."""
        return any(chunk.state_home == "disk" for chunk in self.chunks)

    @property
    def steps_in_backward(self) -> bool:
        """Whether any chunk is updated while backward still runs."""
        return any(chunk.steps_in_backward for chunk in self.chunks)

    def __post_init__(self) -> None:
        _check_at_least(1, "world_size", self.world_size)
        _check_at_least(1, "accumulation", self.accumulation)
        for name in _COUNTS:
            _check_at_least(0, name, getattr(self, name))
        if self.dtype != "as built":
            _itemsize(self.dtype)
        if self.moments != "float32":
            self._check_moments()
        if self.steps_in_backward and not self.may_step_in_backward:
            raise InputError("field 'may_step_in_backward' must be true where a chunk steps in backward, found false")
        if self.may_step_in_backward:
            check_step_in_backward(self.dtype, self.accumulation)
        self._check_chunks()
        self._check_order()

    def _check_moments(self) -> None:
        check_adam(self.optimizer, self.moments)
        expected = moments_size(self.moments)
        if self.state_size != expected:
            raise InputError(
                f"field 'state_size' must be {expected} for moments in {self.moments}, found {self.state_size}"
            )
        for index, chunk in enumerate(self.chunks):
            if chunk.trainable and _itemsize(chunk.dtype) > MASTER_BYTES:
                raise InputError(
                    f"field 'chunks[{index}].dtype': moments in {self.moments} go with float32 master weights, found "
                    f"{chunk.dtype}; plan with moments='float32'"
                )

    def _check_chunks(self) -> None:
        seen: dict[str, int] = {}
        for index, chunk in enumerate(self.chunks):
            if chunk.numel % self.world_size:
                raise InputError(
                    f"field 'chunks[{index}].numel' must be a multiple of the world size {self.world_size}, so that it "
                    f"can be sharded evenly, found {chunk.numel}"
                )
            if not chunk.resident and chunk.weight_bytes > self.block_bytes:
                raise InputError(
                    f"field 'block_bytes' must hold chunk {index}, which is streamed and takes {chunk.weight_bytes} "
                    f"bytes, found {self.block_bytes}"
                )
            for slot in chunk.parameters:
                if slot.name in seen:
                    raise InputError(
                        f"field 'chunks[{index}].parameters': {slot.name!r} is in chunk {seen[slot.name]} already"
                    )
                seen[slot.name] = index
        if self.grad_block_count and not self.block_bytes:
            raise InputError(
                f"field 'block_bytes' must be above 0 for {self.grad_block_count} gradient blocks, found 0"
            )

    def _check_order(self) -> None:
        for index, entry in enumerate(chunk.grad_entry for chunk in self.chunks):
            if entry is not None and not 0 <= entry < len(self.order):
                raise InputError(
                    f"field 'chunks[{index}].grad_entry' must be from 0 to {len(self.order) - 1}, found {entry}"
                )
        for index, use in enumerate(self.order):
            for chunk in use.chunks:
                if not 0 <= chunk < len(self.chunks):
                    raise InputError(
                        f"field 'order[{index}].chunks' refers to chunk {chunk}, there are {len(self.chunks)}"
                    )
            if not index <= use.pin_until < len(self.order):
                raise InputError(
                    f"field 'order[{index}].pin_until' must be from {index} to {len(self.order) - 1}, "
                    f"found {use.pin_until}"
                )
        needed = self.schedule().min_blocks
        if self.block_count < needed:
            raise InputError(
                f"field 'block_count' must be {needed} or larger, so that all chunks that the order needs at once, with "
                f"{self.prefetch_depth} fetched ahead, lie in blocks; found {self.block_count}"
            )

    def schedule(self) -> StepSchedule:
        """The order without the resident chunks, as the rCache walks it."""
        residents = frozenset(index for index, chunk in enumerate(self.chunks) if chunk.resident)
        required = required_chunks(((use.chunks, use.pin_until) for use in self.order), residents)
        return StepSchedule(required, self.prefetch_depth)

    @property
    def fingerprint(self) -> str:
        """Identifies the plan: same digits, same plan."""
        return digest(self.to_dict())

    def check(self, model_fingerprint: str, world_size: int) -> None:
        """Make sure that the plan was made for this model (`elixir.fingerprint.fingerprint`) and world size.

        Raises:
            ArtifactError: it was made for another; names the field and what to do.
        """
        for name, expected, found in (
            ("model_fingerprint", self.model_fingerprint, model_fingerprint),
            ("world_size", self.world_size, world_size),
        ):
            if expected != found:
                raise ArtifactError(
                    f"this plan was made for {self.model_name} at world size {self.world_size}: "
                    f"field '{name}' is {expected!r}, here it is {found!r}; plan again for what runs here"
                )

    def __str__(self) -> str:
        streamed = [chunk for chunk in self.chunks if not chunk.resident]
        trainable = [chunk for chunk in self.chunks if chunk.trainable]
        states = {home: sum(chunk.state_home == home for chunk in trainable) for home in ("host", "disk")}
        in_backward = sum(chunk.steps_in_backward for chunk in trainable)
        moved, seconds = self.predicted.moved_bytes, self.predicted.seconds
        shown = [link for link in LINKS if link not in DISK_LINKS or self.uses_disk]
        links = ", ".join(f"{link.replace('_', ' ')} {format_bytes(moved[link])}" for link in shown)
        cache = "none: every chunk is resident"
        if streamed:
            blocks = "block" if self.block_count == 1 else "blocks"
            cache = (
                f"{self.block_count} {blocks} of {format_bytes(self.block_bytes)}, prefetch {self.prefetch_depth} ahead"
            )
        return "\n".join(
            (
                f"plan {self.fingerprint}: {self.model_name} ({self.dtype}) on {self.world_size} x {self.hardware_name}",
                f"  chunks        {len(self.chunks)}, {len(self.chunks) - len(streamed)} resident on the device",
                f"  states        {states['host']} of {len(trainable)} trainable chunks on the host"
                + (f", {states['disk']} on the disk" if self.uses_disk else "")
                + (f", moments in {self.moments}" if self.moments != "float32" else "")
                + (f", {in_backward} stepped in backward" if self.may_step_in_backward else ""),
                f"  rCache        {cache}",
                f"  device peak   {format_bytes(self.predicted.device_peak_bytes)} "
                f"of {format_bytes(self.device_budget_bytes)}",
                f"  host peak     {format_bytes(self.predicted.host_peak_bytes)} "
                f"of {format_bytes(self.host_budget_bytes)}",
                *(
                    [
                        f"  disk          {format_bytes(self.predicted.disk_peak_bytes)} "
                        f"of {format_bytes(self.disk_budget_bytes)}"
                    ]
                    if self.uses_disk
                    else []
                ),
                f"  moved a step  {links}",
                f"  step          {format_seconds(seconds.get('total', 0.0))} predicted"
                + (f", of {self.accumulation} batches" if self.accumulation > 1 else ""),
            )
        )


MASTER_BYTES = 4
"""Of one element of a master weight, kept where the weight itself has fewer bits or lies elsewhere than its states: float32, or as
wide as the weight where that is wider (`master_bytes`)."""
STAGING_BUFFERS = 2
"""In host memory, through which new weights of such chunks return to the device."""
_COUNTS = (
    "block_numel",
    "block_bytes",
    "block_count",
    "prefetch_depth",
    "grad_block_count",
    "device_budget_bytes",
    "host_budget_bytes",
    "disk_budget_bytes",
)


def master_bytes(weight_bytes: int) -> int:
    """Of one element of a master weight, by those of the weight."""
    return max(weight_bytes, MASTER_BYTES)


def check_adam(optimizer: str, moments: MomentKind) -> None:
    """Refuse moments in fewer bits for an optimizer that is no Adam.

    Raises:
        InputError: it is none.
    """
    if moments != "float32" and optimizer not in ADAM_FAMILIES:
        raise InputError(
            f"moments in {moments} are there for {' and '.join(ADAM_FAMILIES)}, found the optimizer {optimizer}; leave "
            "moments at 'float32', or train with Adam"
        )


def check_step_in_backward(dtype: str, accumulation: int) -> None:
    """Refuse updates during backward where they would come before all is known that they depend on.

    Args:
        dtype: of the plan.
        accumulation: batches per optimizer step.

    Raises:
        InputError: a gradient is not whole with one backward, or an overflow anywhere would leave the step out.
    """
    if accumulation > 1:
        raise InputError(
            f"with {accumulation} batches a step gradients are whole after the last backward only; plan with "
            "step_in_backward=False, or with accumulation=1"
        )
    if dtype == "float16":
        raise InputError(
            "a step with float16 gradients is left out if any of them overflowed, which is known after backward only; plan "
            "with step_in_backward=False, or in bfloat16"
        )


def _check_at_least(least: int, name: str, value: float) -> None:
    if value < least:
        raise InputError(f"field '{name}' must be {least} or larger, found {value}")


def _itemsize(dtype: str) -> int:
    try:
        return dtype_bytes(dtype)
    except InputError as error:
        raise InputError(f"field 'dtype': {error}") from None


def same_packing(plan: Plan, other: Plan) -> bool:
    """Whether both pack the same parameters into the same chunks, wherever these live."""

    def packing(plan: Plan) -> list[tuple[object, ...]]:
        return [(chunk.dtype, chunk.trainable, chunk.numel, chunk.parameters) for chunk in plan.chunks]

    return plan.world_size == other.world_size and packing(plan) == packing(other)
