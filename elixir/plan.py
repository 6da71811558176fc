"""`Plan`: what goes where, and when. Plain data: no tensor, no device, no process group.

A plan packs parameters into chunks, gives each chunk a home for its weights and one for its gradients and optimizer
states, and says how many rCache blocks the streamed chunks share. All bytes are per rank unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from elixir.artifact import Artifact, digest
from elixir.errors import ArtifactError
from elixir.units import dtype_bytes, format_bytes

Home = Literal["device", "host"]
Phase = Literal["forward", "recompute", "backward"]

PARAM_ALIGNMENT_BYTES = 512
"""Parameters start at multiples of this inside a chunk: other offsets change the bits some kernels give."""


@dataclass(frozen=True)
class ParamSlot:
    """Where one parameter lies inside its chunk."""

    name: str
    offset: int
    """In elements from the start of the chunk."""
    numel: int


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
    state_home: Home
    """Where the shard of gradients, master weights and optimizer states lives; for a frozen chunk, its weight home."""
    resident: bool
    """True: gathered on the device for the whole step, in memory of its own. False: gathered into rCache blocks."""

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
    """What the planner expects of one steady training step, for a run to compare itself with."""

    device_peak_bytes: int
    device_parts: dict[str, int]
    """The device peak by what holds it; sums to `device_peak_bytes`."""
    host_peak_bytes: int
    """Of all ranks of one machine together."""
    host_parts: dict[str, int]
    """The host peak by what holds it; sums to `host_peak_bytes`."""
    moved_bytes: dict[str, int]
    """Bytes per rank and step over each link: ``host_to_device``, ``device_to_host``, ``network``."""
    loads: int
    """Gathers into rCache blocks per step."""
    hits: int
    """Uses of streamed chunks that found them in a block already."""
    seconds: dict[str, float]
    """Predicted time by part; ``total`` is the step."""


@dataclass(frozen=True)
class Plan(Artifact):
    """The outcome of a search, and all that a run needs to know."""

    artifact: ClassVar[str] = "plan"
    schema_version: ClassVar[int] = 1

    model_name: str
    model_fingerprint: str
    hardware_name: str
    hardware_fingerprint: str
    world_size: int
    dtype: str
    """Dtype the parameters and floating inputs are cast to, or ``as built``."""
    optimizer: str
    """Optimizer family the states were counted for, such as ``Adam``."""
    state_bytes_per_numel: int
    """Bytes of optimizer states for one trainable element of a chunk, master weight not included."""
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
        states_on_host = [chunk for chunk in self.chunks if chunk.trainable and chunk.state_home == "host"]
        trainable = [chunk for chunk in self.chunks if chunk.trainable]
        moved, seconds = self.predicted.moved_bytes, self.predicted.seconds
        links = ", ".join(f"{link} {format_bytes(amount)}" for link, amount in moved.items())
        return "\n".join(
            (
                f"plan {self.fingerprint}: {self.model_name} ({self.dtype}) on {self.world_size} x {self.hardware_name}",
                f"  chunks        {len(self.chunks)}, {len(self.chunks) - len(streamed)} resident on the device",
                f"  states        {len(states_on_host)} of {len(trainable)} trainable chunks on the host",
                f"  rCache        {self.block_count} blocks of {format_bytes(self.block_bytes)}, "
                f"prefetch {self.prefetch_depth} ahead",
                f"  device peak   {format_bytes(self.predicted.device_peak_bytes)} "
                f"of {format_bytes(self.device_budget_bytes)}",
                f"  host peak     {format_bytes(self.predicted.host_peak_bytes)} "
                f"of {format_bytes(self.host_budget_bytes)}",
                f"  moved a step  {links}",
                f"  step          {seconds.get('total', 0.0):.3f} s predicted",
            )
        )
