"""`Plan`: what goes where, and when. Plain data: no tensor, no device, no process group.

A plan packs parameters into chunks, gives each chunk a home for its weights and one for its gradients and optimizer
states, and says how many rCache blocks the streamed chunks share. All bytes are per rank unless a name says otherwise.

Every class here checks its values: what exists can be run. An `InputError` names the field that is wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

from elixir.artifact import Artifact, check_bounds, digest
from elixir.errors import ArtifactError, InputError, InputTypeError
from elixir.hardware.profile import UNIFIED, preset_names
from elixir.optimizer_states import (
    DIRECTION_BYTES,
    MASTER_BYTES,
    MomentKind,
    StateSize,
    check_adam,
    extent_bytes,
    matrix_family,
    matrix_states,
    state_size,
)
from elixir.plan.activations import activations_text, check_activations, passes_together
from elixir.plan.chunk_plan import (
    UPDATES,
    Amount,
    ChunkPlan,
    ChunkUse,
    Count,
    FrozenHome,
    Positive,
    WeightFile,
    alignment_bytes,
    check_replicas,
    itemsize_of,
    must,
    packed_text,
)
from elixir.plan.matrices import exchanged_bytes
from elixir.plan.prediction import DISK_LINKS, LINKS, Prediction
from elixir.plan.step_traffic import Backwards, ChunkRoute, step_traffic
from elixir.schedule import Schedule, required_chunks
from elixir.step_trace import StepShape, UnitActivations
from elixir.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Plan(Artifact):
    """The outcome of a search, and all that a run needs to know."""

    artifact: ClassVar[str] = "plan"
    schema_version: ClassVar[int] = 33
    printed: ClassVar[tuple[str, ...]] = ("must_be_free", "what_to_write")
    remake_hint: ClassVar[str] = "plan it anew with `elixir plan`"

    model_name: str
    """Name of the model, or of its class."""
    model_fingerprint: str
    """Digest of its parameters and modules: a plan runs no other model."""
    hardware_name: str
    """Name of the hardware profile that it was planned with."""
    hardware_fingerprint: str
    """Digest of that profile's numbers."""
    world_size: Positive
    """Ranks, one device each."""
    dtype: str
    """Dtype the parameters and floating inputs are cast to, or ``as built``."""
    optimizer: str
    """Optimizer family the states were counted for, such as ``Adam``, or ``Muon + AdamW`` with `ChunkPlan.matrices`;
    ``Adam + EMA`` with an average of the weights."""
    state_size: StateSize
    """Bytes of optimizer states of a trainable chunk's shard, master weights not included."""
    overlap: bool
    """Whether transfers run while compute does, with prefetch."""
    placement: Literal["auto", "cuda", "cpu"]
    """``auto``, or the home that was forced on all chunks."""
    block_numel: Count
    """`block_bytes` in elements of the most common dtype."""
    block_bytes: Count
    """Size of one rCache or gradient block, the same for all; 0 without blocks."""
    block_count: Count
    """Blocks of the rCache."""
    prefetch_depth: Count
    """How many chunks ahead of their use are fetched."""
    grad_block_count: Count
    """Blocks of `block_bytes` that gradients on their way to the host, or to their reduction, are gathered in."""
    chunks: tuple[ChunkPlan, ...]
    """All chunks, in the order in which runs number them."""
    order: tuple[ChunkUse, ...]
    """Uses of chunks in the order of the traced step."""
    alignment_bytes: int
    """Parameters begin inside their chunks, and shards begin and end, at multiples of this; see
    `alignment_bytes`."""
    device_budget_bytes: Count
    """Budget of one device."""
    host_budget_bytes: Count
    """Budget of the host memory of one machine."""
    predicted: Prediction
    """Memory, transfers and seconds of a step."""
    accumulation: Positive = 1
    """Micro-batches per optimizer step that it was searched for; it runs with any number, but what it predicts is of
    this."""
    disk_budget_bytes: Count = 0
    """Budget of the disk of one machine; 0: the plan may not use it."""
    moments: MomentKind = "float32"
    """How Adam's moments are kept; ``float32`` for every other optimizer, as their states are."""
    may_update_early: bool | None = False
    """Whether the search might have the host make new states in backward, next to the old ones: true wherever that
    shortens the step, None where it clearly does; `ChunkPlan.update` says of which."""
    clipping: bool = False
    """Whether its seconds have the norm of all gradients in them, which clipping needs, and loss scaling in float16. It
    runs with clipping and without, whatever this says."""
    assume: Literal["scenarios", "nominal"] = "scenarios"
    """``scenarios``: it was chosen for its worst regret in all that the hardware profile thinks possible; ``nominal``:
    it is the fastest at the profile's rates."""
    device_reserve_bytes: Count = 0
    """Memory of one device, kept back of its budget for what no plan counts; 0 where the budget was given."""
    host_reserve_bytes: Count = 0
    """Memory of one machine, likewise."""
    read_budgets: tuple[Literal["device", "host"], ...] = ()
    """Budgets that nobody gave: what was free where it was planned. Ranks that all plan may read different ones."""
    start_up_s: Amount = 0.0
    """Seconds until the host memory that the plan takes is ready, once; 0 if the machine was not measured."""
    host_threads: Positive | None = None
    """Threads of one rank's Adam on the host with which its time was predicted, where the machine was measured: the
    fewest that reach nearly its best rate. A run takes no more, unless the user asks for more; None: as many as
    `elixir.hardware.host_share` gives."""
    device_name: str = ""
    """Name of the device it was made for, as its hardware profile has it."""
    step: StepShape = field(default_factory=StepShape)
    """The step that was traced for it: a micro-batch of one rank."""
    frozen_weights: FrozenHome = "host"
    """The home of frozen weights that do not fit the device: ``host`` memory, or the ``files`` that they came in."""
    weight_files: tuple[WeightFile, ...] = ()
    """These files as they were when the plan was made; empty if nobody named them."""
    replicas: int = 1
    """Replicas of the model, each sharded over as many neighbouring ranks; they sum their gradients."""
    pass_size: Positive = 1
    """Micro-batches that go through a checkpointed unit before the next one's weights are fetched: those of a pass."""
    reserve_bytes: Count = 0
    """Host memory that the program takes later in each process, as the search was asked to leave free."""

    @property
    def activations(self) -> tuple[UnitActivations, ...]:
        """The activations of units that do not run as the model has them: `StepShape.activations`."""
        return self.step.activations

    @property
    def passes(self) -> int:
        """Passes over the weights in an optimizer step, each with one backward; the last may be smaller."""
        return -(-self.accumulation // self.pass_size)

    @property
    def shards(self) -> int:
        """Ranks over which each replica is sharded."""
        return self.world_size // self.replicas

    @property
    def uses_disk(self) -> bool:
        """Whether any chunk's states live there."""
        return any(chunk.state_home == "disk" for chunk in self.chunks)

    @property
    def reads_files(self) -> bool:
        """Whether any chunk's weights live in files."""
        return any(chunk.weight_home == "files" for chunk in self.chunks)

    @property
    def moves_activations(self) -> bool:
        """Whether activations are moved to the host, by the step itself or by the plan."""
        return "activations" in self.predicted.host_parts or any(each.swap for each in self.activations)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of chunks by where they live."""
        states = [chunk.state_home for chunk in self.chunks if chunk.trainable]
        return {
            "chunks": len(self.chunks),
            "resident_chunks": sum(chunk.resident for chunk in self.chunks),
            "weights_on_host_chunks": sum(chunk.weight_home == "host" for chunk in self.chunks),
            "states_on_host_chunks": states.count("host"),
            "states_on_disk_chunks": states.count("disk"),
        }

    def states_of(self, chunk: ChunkPlan) -> StateSize:
        """Bytes of a trainable chunk's states: `state_size`, unless it is stepped as whole matrices."""
        return matrix_states(self.optimizer) if chunk.matrices else self.state_size

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the parameters that are stepped as whole matrices."""
        return tuple(slot.name for chunk in self.chunks if chunk.matrices for slot in chunk.parameters)

    def turned_bytes(self, chunk: ChunkPlan) -> int:
        """Bytes of a chunk's matrices that go from one rank's host to its device in a step, and back, to be made
        orthogonal."""
        if not chunk.matrices or chunk.home.states_on_device:
            return 0
        parameters_numel = sum(slot.numel for slot in chunk.parameters)  # without padding
        return DIRECTION_BYTES * (parameters_numel if self.shards == 1 else chunk.numel // self.shards)

    def extent_bytes(self, chunk: ChunkPlan) -> int:
        """Bytes of one rank's masters and states of a chunk where they live on a disk."""
        return extent_bytes(chunk.numel // self.shards, itemsize_of(chunk.dtype), self.states_of(chunk))

    def disk_bytes(self, rank: int = 0) -> int:
        """Bytes of states that a step of `rank` reads from the disk; it writes as many."""
        return sum(
            self.extent_bytes(chunk)
            for chunk in self.chunks
            if chunk.state_home == "disk"
            and chunk.reduce_order is not None
            and chunk.has_parameters_on(rank % self.shards, self.shards)
        )

    @property
    def disk_written_bytes(self) -> int:
        """Bytes that a step writes to the disk of one machine, all its ranks together."""
        kept = sum(self.extent_bytes(chunk) for chunk in self.chunks if chunk.state_home == "disk")
        return self.predicted.disk_peak_bytes // max(kept, 1) * self.predicted.moved_bytes["disk_write"]

    @property
    def has_early_updates(self) -> bool:
        """Whether any chunk is updated early."""
        return any(chunk.home.early for chunk in self.chunks)

    def __post_init__(self) -> None:
        check_bounds(self)
        check_replicas(self.replicas, self.world_size, "field 'replicas'")
        check_activations(self.activations, self.step.units)
        if self.dtype != "as built":
            itemsize_of(self.dtype)
        if self.pass_size > 1:
            found = f"{self.pass_size} and {activations_text(self.activations) or 'none'}"
            whole_units = "above 1 takes units that are made again as a whole and are not compiled"
            must(passes_together(self.step), "pass_size", whole_units, found)
        if self.moments != "float32":
            self._check_moments()
        early = self.may_update_early is not False or not self.has_early_updates
        must(early, "may_update_early", "must be true or null with early updates, found false")
        whole = matrix_family(self.optimizer) is not None or not any(chunk.matrices for chunk in self.chunks)
        must(whole, "optimizer", f"must name an optimizer of whole matrices, found {self.optimizer!r}")
        in_files = self.frozen_weights == "files" or not self.reads_files
        must(in_files, "frozen_weights", "must be 'files' for weights there", repr(self.frozen_weights))
        blocks = self.block_bytes or not self.grad_block_count
        must(blocks, "block_bytes", f"must be above 0 for {self.grad_block_count} gradient blocks, found 0")
        self._check_chunks()
        self._check_order()

    def _check_moments(self) -> None:
        check_adam(self.optimizer, self.moments)
        expected = state_size(self.optimizer, self.moments)
        size = f"must be {expected} for moments in {self.moments}"
        must(self.state_size == expected, "state_size", size, self.state_size)
        most = f"must be at most float32 for moments in {self.moments}, which go with float32 master weights"
        for index, chunk in enumerate(self.chunks):
            fits = not chunk.trainable or itemsize_of(chunk.dtype) <= MASTER_BYTES
            must(fits, f"chunks[{index}].dtype", most, f"{chunk.dtype}; plan with moments='float32'")

    def _check_chunks(self) -> None:
        unit = alignment_bytes(self.moments, {chunk.dtype for chunk in self.chunks if chunk.trainable})
        multiple = f"must be a multiple of {unit} with moments in {self.moments}"
        fits = self.alignment_bytes >= 1 and self.alignment_bytes % unit == 0
        must(fits, "alignment_bytes", multiple, self.alignment_bytes)
        aligned = f"multiples of {self.alignment_bytes} bytes"
        seen: dict[str, int] = {}
        for index, chunk in enumerate(self.chunks):
            name, shard_bytes = f"chunks[{index}]", chunk.weight_bytes // self.shards
            evenly = f"must be a multiple of the {self.shards} shards, so that it can be sharded evenly"
            must(chunk.numel % self.shards == 0, f"{name}.numel", evenly, chunk.numel)
            ends = f"must make shards that end at {aligned}"
            must(shard_bytes % self.alignment_bytes == 0, f"{name}.numel", ends, f"shards of {shard_bytes} bytes")
            held = f"must hold chunk {index}, which is streamed and takes {chunk.weight_bytes} bytes"
            must(chunk.resident or chunk.weight_bytes <= self.block_bytes, "block_bytes", held, self.block_bytes)
            for number, slot in enumerate(chunk.parameters):
                at, slots = slot.offset * itemsize_of(chunk.dtype), f"{name}.parameters"
                if at % self.alignment_bytes:
                    where = f"{slots}[{number}].offset"
                    raise InputError(f"field '{where}': {slot.name!r} must start at {aligned} of its chunk, found {at}")
                if slot.name in seen:
                    raise InputError(f"field '{slots}': {slot.name!r} is in chunk {seen[slot.name]} already")
                seen[slot.name] = index

    def _check_order(self) -> None:
        last = len(self.order) - 1
        for index, entry in enumerate(chunk.grad_entry for chunk in self.chunks):
            fits = entry is None or 0 <= entry <= last
            must(fits, f"chunks[{index}].grad_entry", f"must be from 0 to {last}", entry)
        for index, use in enumerate(self.order):
            for chunk in use.chunks:
                there = 0 <= chunk < len(self.chunks)
                must(there, f"order[{index}].chunks", f"refers to chunk {chunk}, there are {len(self.chunks)}")
            pinned = index <= use.pin_until <= last
            must(pinned, f"order[{index}].pin_until", f"must be from {index} to {last}", use.pin_until)
        needed = self.schedule().min_blocks
        must(
            self.block_count >= needed,
            "block_count",
            f"must be {needed} or larger, so that all chunks that the order needs at once, with {self.prefetch_depth} "
            f"fetched ahead, lie in blocks; found {self.block_count}",
        )

    def schedule(self) -> Schedule:
        """The order without the resident chunks, as the rCache walks it."""
        residents = frozenset(index for index, chunk in enumerate(self.chunks) if chunk.resident)
        required = required_chunks(((use.chunks, use.pin_until) for use in self.order), residents)
        return Schedule(required, self.prefetch_depth)

    def routes(self, rank: int = 0) -> tuple[ChunkRoute, ...]:
        """The routes of the bytes of each chunk in a step of `rank`."""
        return tuple(self._route(chunk, rank % self.shards) for chunk in self.chunks)

    def _route(self, chunk: ChunkPlan, place: int) -> ChunkRoute:
        """The route of a chunk's bytes on the rank with this place in its replica."""
        offsets, shard_numel = [slot.offset for slot in chunk.parameters], chunk.numel // self.shards
        return ChunkRoute(
            weight_bytes=chunk.weight_bytes,
            shard_bytes=chunk.weight_bytes // self.shards,
            resident=chunk.resident,
            weight_on_device=chunk.weight_home == "device",
            state_on_device=chunk.state_home == "device",
            trainable=chunk.trainable,
            gradient=chunk.reduce_order is not None,
            stepped=chunk.has_parameters_on(place, self.shards),
            turned_bytes=self.turned_bytes(chunk),
            exchanged_bytes=exchanged_bytes(chunk.matrices, offsets, shard_numel, self.shards, place),
            file_bytes=chunk.file_bytes(place, self.shards),
        )

    def prediction_for(self, micro_batches: int) -> Prediction:
        """The prediction with the loads, hits and bytes of a step of so many micro-batches; memory and times stay."""
        loads = self.schedule().step(self.block_count, micro_batches)
        backwards = Backwards.of(micro_batches, self.accumulation)
        ways, swapped = (self.routes(), loads.by_chunk, backwards), self.step.swap_bytes
        moved = step_traffic(*ways, replicas=self.replicas, swap_bytes=swapped)
        moved_bytes = self.predicted.moved_bytes | {
            "host_to_device": moved.host_to_device_bytes,
            "device_to_host": moved.device_to_host_bytes,
            "network": moved.network_bytes,
            "disk_read": self.disk_bytes() + moved.file_bytes,
            "replicas": moved.replicas_bytes,
        }
        return replace(self.predicted, loads=loads.loads, hits=loads.hits, moved_bytes=moved_bytes)

    def _training(self) -> str:
        """The training that is counted: the optimizer with its master weights, and the step. Otherwise the forward."""
        step = self.step
        narrow = any(chunk.trainable and itemsize_of(chunk.dtype) < MASTER_BYTES for chunk in self.chunks)
        training = f"{self.optimizer}{' with float32 master weights' * narrow}"
        parts = ["none: forward alone" if step.forward else training]
        if step.samples is not None:
            tokens = "" if step.seq is None else f" x {step.seq} tokens"
            if step.generate is not None:
                tokens = f" x ({step.generate[0]} + {step.generate[1]}) tokens, the last one"
            parts.append(f"{'batches' if step.forward else 'micro-batches'} of {step.samples}{tokens}")
        if step.packed is not None:
            documents, _, flash = step.packed.partition(":")
            parts.append(f"{documents} documents packed into each sample{' for flash attention' * bool(flash)}")
        parts += [f"activation checkpointing {step.checkpoint}"] * (step.checkpoint not in (None, "none"))
        parts += [f"LoRA of rank {step.lora}"] * bool(step.lora)
        parts += [f"linear layers in {step.quantised}"] * bool(step.quantised)
        parts += ["fused kernels"] * step.fused_kernels
        parts += [f"{len(step.compiled)} compiled layers"] * bool(step.compiled)
        return ", ".join(parts)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all ranks together, as predicted; None where samples are no tokens."""
        return self._per_s(self.step.tokens)

    def _per_s(self, amount: int | None) -> float | None:
        """The speed of all ranks together, of an amount per rank and micro-batch; None where either is not known."""
        step_s = self.predicted.step_s
        return None if amount is None or not step_s else amount * self.accumulation * self.world_size / step_s

    @property
    def fingerprint(self) -> str:
        """Identifies the plan: same digits, same plan."""
        return digest(self.to_dict())

    def check(self, model_fingerprint: str, world_size: int) -> None:
        """Makes sure that the plan was made for this model (`elixir.models.model_tensors.fingerprint`) and world
        size.

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

    def __repr__(self) -> str:
        return f"<Plan {self.fingerprint}: {self._setting()}, {format_seconds(self.predicted.step_s)} a step>"

    def _setting(self) -> str:
        replicas = f" in {self.replicas} replicas" if self.replicas > 1 else ""
        return f"{self.model_name} ({self.dtype}) on {self.world_size} x {self.hardware_name}{replicas}"

    def summary(self) -> str:
        """The plan in three lines."""
        lines = self._lines()
        step = f"{format_seconds(self.predicted.step_s)} predicted"
        return (
            f"plan {lines['plan']}\n  chunks {lines['chunks']}; states {lines['states'] or 'none'}\n"
            f"  device {lines['device peak']}, host {lines['host peak']}, step {step}"
        )

    def __str__(self) -> str:
        head, *lines = self._lines().items()
        return "\n".join((" ".join(head), *(f"  {label:14}{text}" for label, text in lines if text)))

    def _lines(self) -> dict[str, str]:
        """The text about the plan, by label; empty if there is nothing to say."""
        predicted, counts, several = self.predicted, self.counts, self.accumulation > 1
        updates = Counter(chunk.update for chunk in self.chunks if chunk.update in UPDATES)
        states = (
            f"{counts['states_on_host_chunks']} of {sum(c.trainable for c in self.chunks)} trainable chunks on the host"
        )
        states += f", {counts['states_on_disk_chunks']} on the disk" if self.uses_disk else ""
        states += "" if self.moments == "float32" else f", moments in {self.moments}"
        states += "".join(f", {count} {UPDATES[update]}" for update, count in updates.items())
        in_files = sum(chunk.weight_home == "files" for chunk in self.chunks)
        streamed = counts["resident_chunks"] < counts["chunks"]
        blocks = f"{self.block_count} block{'s' * (self.block_count != 1)} of {format_bytes(self.block_bytes)}"
        left_out = () if self.uses_disk or self.reads_files else DISK_LINKS
        left_out = left_out if self.replicas > 1 else (*left_out, "replicas")
        links = (
            f"{link.replace('_', ' ')} {format_bytes(predicted.moved_bytes[link])}"
            for link in LINKS
            if link not in left_out
        )
        per_step = f", per optimizer step of {self.accumulation} micro-batches" * several
        save = f"; {format_bytes(predicted.host_peak_bytes)} during a save" if predicted.checkpoint_bytes else ""
        on_preset = self.hardware_name in preset_names()
        hosted = any(chunk.trainable and chunk.state_home != "device" for chunk in self.chunks)
        return {
            "plan": f"{self.fingerprint}: {self._setting()}",
            "training": self._training(),
            "weights": packed_text([each for chunk in self.chunks for each in chunk.weights()], self.step.quantised),
            "chunks": f"{counts['chunks']}, {counts['resident_chunks']} resident on the device"
            + (f", {in_files} frozen ones in their files" if in_files else ""),
            "states": "" if self.step.forward else states,
            "activations": activations_text(self.activations),
            "rCache": f"{blocks}, prefetch {self.prefetch_depth} ahead"
            if streamed
            else "none: every chunk is resident",
            "device peak": _peak(predicted.device_peak_bytes, self.device_budget_bytes, self.device_reserve_bytes),
            "host peak": _peak(predicted.host_step_bytes, self.host_budget_bytes, self.host_reserve_bytes) + save,
            "one memory": "of device and host: what is on the host frees none of it; plan with --placement cuda"
            if self.device_name.endswith(UNIFIED) and predicted.host_step_bytes
            else "",
            "disk": _peak(predicted.disk_peak_bytes, self.disk_budget_bytes, 0) if self.uses_disk else "",
            "moved a step": ", ".join(links) + per_step,
            "step": f"{predicted.time_text()}{per_step}"
            + ("" if self.clipping or self.step.forward else ", without clipping"),
            "speed": self._speed_text(),
            "measure": 'your host with "elixir hardware --measure" for a narrower range'
            if hosted and self.host_threads is None and on_preset
            else "",
            "safe choice": predicted.regret_text(measured=not on_preset),
            "start-up": f"{format_seconds(self.start_up_s)} until host memory is ready"
            if self.start_up_s >= NOTICEABLE_S
            else "",
        }

    def _speed_text(self) -> str:
        speeds = (self.tokens_per_s, "tokens"), (self._per_s(self.step.samples), "samples")
        parts = [f"{speed:,.0f} {unit}/s" for speed, unit in speeds if speed is not None][:1]
        share = self.predicted.peak_share
        if share is not None:
            parts.append(f"{f'{100 * share:.0f}' if share >= 0.01 else 'less than 1'} % of the device's peak")
        return ", ".join(parts)


class HasPlan(Protocol):
    """Has a plan, such as the answer of a search."""

    @property
    def plan(self) -> Plan:
        """The plan."""


def plan_of(given: Plan | HasPlan | None) -> Plan:
    """The plan that is given, alone or in the answer of a search (`elixir.search.Answer`).

    Raises:
        InputTypeError: it is neither.
    """
    if given is None:
        raise InputTypeError(
            "a plan is missing: give the answer of optimal_search(model, world_size) or Plan.load(path), or call "
            "elixir.wrap(model, optimizer, inp=batch), which plans by itself"
        )
    plan = getattr(given, "plan", given)
    if not isinstance(plan, Plan):
        raise InputTypeError(
            f"plan must be a Plan, got {type(given).__name__}; Plan.load(path) reads a file, and what one rank has "
            "planned has to be sent to the others"
        )
    return plan


NOTICEABLE_S = 1.0
"""Start-up from which on a plan says how long it takes."""
STAGING_BUFFERS = 2
"""In host memory, through which new weights of such chunks return to the device."""
PASSAGE_BUFFERS = 2
"""In host memory, through which gradients pass that are added to those of earlier batches: while one is added, the next
comes."""
FILE_BUFFERS = 2
"""In host memory, through which weights pass from files to the device: while one is copied, the next is read."""
WINDOW_CHUNKS = 3
"""In host memory, through which states on a disk pass: one is stepped, one is read and one written back."""


def _peak(peak_bytes: int, budget_bytes: int, reserve_bytes: int) -> str:
    kept = f", {format_bytes(reserve_bytes)} kept back" if reserve_bytes else ""
    return f"{format_bytes(peak_bytes)} of {format_bytes(budget_bytes)}{kept}"


def same_packing(plan: Plan, other: Plan) -> bool:
    """Whether both pack the same parameters into the same chunks, wherever these live."""

    def packing(plan: Plan) -> list[tuple[object, ...]]:
        return [(chunk.dtype, chunk.trainable, chunk.numel, chunk.parameters) for chunk in plan.chunks]

    same = (plan.world_size, plan.replicas) == (other.world_size, other.replicas)
    return same and packing(plan) == packing(other)
