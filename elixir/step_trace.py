"""`StepTrace`: what one training step needs, found without a GPU.

All byte counts are those of one rank that holds the whole model, as plain PyTorch would run it on the target device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, get_args

from elixir.artifact import ADDED, Artifact
from elixir.errors import InputError
from elixir.optimizer_states import MASTER_BYTES, MATRIX_STATES, NO_OPTIMIZER, StateSize, state_size
from elixir.units import dtype_bytes, format_bytes

Phase = Literal["forward", "recompute", "backward"]
"""`recompute` is a checkpointed region that runs again inside backward."""

Kind = Literal["parameters", "gradients", "optimizer", "buffers", "inputs", "activations", "workspace"]
"""The purpose of live bytes. `workspace` is memory that libraries and the optimizer hold while they work."""


def is_inside(name: str, module: str) -> bool:
    """Whether `name` is that of a module, or of a module or parameter inside it: ``h.1.bias`` inside ``h.1``."""
    return name == module or name.startswith(f"{module}.")


def enclosing(name: str, modules: Collection[str]) -> str | None:
    """The innermost of `modules` that is `name`, or that it is inside of; None if there is none."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


@dataclass(frozen=True)
class ParamInfo:
    """One parameter tensor; tied names share one entry."""

    name: str
    """The first name under which `named_parameters` gives it."""
    aliases: tuple[str, ...]
    """Its other names."""
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    grad_access: int | None
    """Index of the access during which its gradient is complete; None where it gets none."""
    grad_arrivals: int = 1
    """How often autograd adds to its gradient: more than once where reentrant checkpointing runs several backwards over
    what shares it, or where the step has several; 0 where it gets none."""

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


OperatorKind = Literal[
    "square", "tall", "deep", "skinny", "unaligned", "attention", "attention_backward", "activation", "reduction",
    "elementwise",
]  # fmt: skip
"""The bound of an operator: a class of matrix products, attention, or memory-bound work of three sorts. The measured
rates of a profile have the same names (docs/appendix/formulas.md)."""


@dataclass(frozen=True)
class Operation:
    """The work of one operator, as often as the step has it with the same shapes."""

    kind: OperatorKind
    dtype: str
    """Dtype of its result."""
    flops: int
    moved_bytes: int
    """Bytes it reads and writes in device memory."""


@dataclass(frozen=True)
class Access:
    """One use of parameters: a function call in forward or recompute, an autograd node in backward.

    Costs are of everything dispatched from this access up to the next one.
    """

    phase: Phase
    parameters: tuple[int, ...]
    """Indices into `StepTrace.parameters`."""
    pin_until: int
    """Index of the last access during which these stay in memory: when the module that used them returns."""
    module: str
    operator: str
    operations: tuple[int, ...]
    """Its operators in order: indices into `StepTrace.operations`."""
    live_bytes: int
    """Highest live bytes of inputs, activations and workspace: all but parameters, gradients, states, buffers."""
    kept_bytes: int = 0
    """The same when it begins: what the accesses before have left. Of the first one of a unit, and the first one after
    it, the same when that unit begins, or ends."""
    parts: tuple[int, ...] = ()
    """Numbers of operators of the accesses that it stands for, in a pass of several micro-batches; else empty."""
    arriving_bytes: int | None = None
    """How much higher `live_bytes` is with the gradients that autograd has and has not handed over; None: unknown."""


Direction = Literal["device_to_host", "host_to_device"]


@dataclass(frozen=True)
class Transfer:
    """One copy of activations between the device and host memory."""

    direction: Direction
    nbytes: int
    begins: int
    """Index of the access in which the device comes to it."""
    ends: int
    """Index of the access in which compute waits until it is over: at once for copies that the step makes itself."""
    planned: bool = False
    """Whether the plan makes it (`UnitActivations.swap`), not the step itself."""
    begins_after: int = 0
    """Number of operators of the access `begins` that come before it."""
    ends_after: int = 0
    """Number of operators of the access `ends` that come before the wait."""


Form = Literal["compiled", "checkpointed", "plain"]

Fetch = Literal["parameters", "either", "one"]
"""How the weights of a unit are fetched: each when it is read, or all as one when the unit begins to run in forward,
and when its backward asks for the first. ``either``: a plan may choose, and has not chosen the latter."""


@dataclass(frozen=True)
class Unit:
    """A layer of the model: a module that is compiled, checkpointed, or a member of a list of repeated layers.

    No unit is inside another one, and the model itself is none: see `elixir.models.layer_units`.
    """

    name: str
    """Path of the module."""
    form: Form
    """``compiled``, also where it is checkpointed too; ``plain`` for a repeated layer that is neither."""
    kind: str
    """Same for units of the same class whose parameters have the same names, shapes and dtypes: the name of the class,
    with a number from its second kind on."""
    fetch: Fetch
    """``one`` for compiled units. ``parameters`` for those that write to their weights, choose among them by values (as
    a router of experts does), checkpoint a part of themselves, keep a view of a weight when they return, are never
    called themselves, or whose weights others read."""


@dataclass(frozen=True)
class UnitRun:
    """Successive accesses of one unit in one phase, such as one call of it in forward, or its part of backward."""

    unit: int
    """Index into `StepTrace.units`."""
    phase: Phase
    first: int
    """Index of its first access."""
    last: int
    """Index of its last access."""


def unit_runs(accesses: Sequence[tuple[Phase, str]], units: Sequence[str]) -> tuple[UnitRun, ...]:
    """The runs of units, in order. An access belongs to the unit in which its module is.

    Args:
        accesses: phase and module of those of a step, in order.
        units: names of the units.
    """
    numbers = {unit: index for index, unit in enumerate(units)}
    unit_of = {module: enclosing(module, numbers) for module in {module for _, module in accesses}}
    runs: list[UnitRun] = []
    for index, (phase, module) in enumerate(accesses):
        name = unit_of[module]
        if name is None:
            continue
        unit, first = numbers[name], index
        if runs and (runs[-1].unit, runs[-1].phase, runs[-1].last) == (unit, phase, index - 1):
            first = runs.pop().first
        runs.append(UnitRun(unit, phase, first, index))
    return tuple(runs)


@dataclass(frozen=True)
class UnitOperator:
    """An operator in the forward of a unit."""

    operator: str
    """Its overload, such as ``aten.mm.default``; ``kernel`` for one that a compiler makes of several."""
    occurrence: int
    """The number of this call among those of the same operator in the unit, from 0."""
    access: int
    """The access of the unit, from 0, during which it runs, or just before."""
    operation: int | None
    """Its work: index into `StepTrace.operations`; None if it only allocates."""
    made_bytes: int
    """Bytes of the storages that it makes."""
    saved_bytes: int
    """Bytes of these that are there when the unit returns, for backward alone."""
    keepable: bool
    """Whether its results can be kept while others are made again: nothing is random in them or writes to them."""


@dataclass(frozen=True)
class UnitForward:
    """The forward of units that do the same. Each keeps all that backward reads, and writes to nothing that was there
    before, so that it can run again; a compiled one as a whole. If a unit runs several times in the step, this is each
    of its calls that keeps anything for backward."""

    units: tuple[str, ...]
    """Names of these units."""
    operators: tuple[UnitOperator, ...]
    """All that take time or memory, in order."""
    again: int
    """The operators that would run again in backward if nothing were kept: so many of the first."""
    accesses_again: int
    """The accesses that this takes: so many of the first."""


@dataclass(frozen=True)
class CurveSample:
    """Live bytes by kind at the moment of highest total within one stretch of the step."""

    operator: int
    """Index of the dispatched operator at that moment."""
    phase: Literal["forward", "recompute", "backward", "optimizer"]
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    inputs: int
    activations: int
    workspace: int
    host: int = 0
    """Bytes in host memory that the step has moved there; not in `total`."""

    @property
    def total(self) -> int:
        """Sums over the kinds."""
        return sum(getattr(self, kind) for kind in get_args(Kind))


@dataclass(frozen=True)
class Contributor:
    """Tensors of one origin that are alive at the peak."""

    kind: Kind
    module: str
    operator: str
    count: int
    bytes: int


INPUT = "input"
"""`Result.operator` of the tensors that a unit is called with."""
SAVED = "saved"
"""`Result.operator` of all that autograd saves of a unit that runs once, weights and small tensors left out."""


@dataclass(frozen=True, order=True)
class Result:
    """The results of one call of an operator in the forward of a unit."""

    operator: str
    """Its overload, such as ``aten.mm.default``; ``input`` for a tensor that the unit is called with, ``saved`` for all
    that it saves."""
    occurrence: int
    """The number of the call among those of the same operator in this unit, from 0."""


@dataclass(frozen=True)
class UnitActivations:
    """The way of the activations of one unit: kept, made again, or moved to the host meanwhile."""

    unit: str
    """Its name (`elixir.step_trace.Unit.name`)."""
    keep: tuple[Result, ...] | None
    """The results that stay while all others are made again in backward, by a checkpoint around the unit; none of a
    compiled one. None: the unit runs once, and everything that backward reads stays."""
    swap: tuple[Result, ...] = ()
    """The results that move to host memory after forward, and come back before the unit's backward: inputs of a unit
    with a checkpoint, or all that one without saves."""
    swap_bytes: int = 0
    """Bytes of these in a backward, of a micro-batch or of all in a pass; 0 until the step is traced."""


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The size of the step that was traced, and all that is needed to trace it again. Per rank and micro-batch."""

    samples: int | None = None
    """First dimension of the input ids, otherwise of the first tensor of the input; None without a tensor."""
    tokens: int | None = None
    """Elements of the input ids; None where the input has none."""
    fused_kernels: bool = False
    """Whether fused kernels ran, as with ``use_fused_kernels=True``."""
    checkpoint: str | None = None
    """Activation checkpointing, as `elixir.models.build` takes it, of a step that follows from it and the model's name.
    None if the input or the step is a function of the user's, or the model was given as an object: such a step cannot
    be traced again by name."""
    units: tuple[Unit, ...] = ()
    """The layers of the model, in the order of its modules. One access of each call has all parameters of a compiled
    one, and their gradients are complete together."""
    forward: bool = False
    """Whether the step only evaluates or generates: nothing is trained, whatever `requires_grad` says."""
    generate: tuple[int, int] | None = None
    """Tokens of the prompt and new ones, if the step is the last of a generation with a key-value cache."""
    lora: int | None = None
    """Rank of the adapters that a model by name was given, as `elixir.models.build` takes it."""
    quantised: str | None = None
    """Form of its frozen weights, likewise."""
    activations: tuple[UnitActivations, ...] = ()
    """The activations of these units; all others keep what the model keeps."""
    packed: str | None = field(default=None, metadata=ADDED)
    """Documents in each sample of a packed batch, whose samples lie in one row, such as ``8``; ``8:flash`` if attention
    computes each document alone, as `StepQuestion.packed` asks for it. None: nothing is packed."""
    changed_state: str | None = field(default=None, metadata=ADDED)
    """The first tensor of a module, such as a buffer that counts, that the step writes to or replaces: micro-batches
    of one pass would read each other's. None if there is none; not looked for in an evaluation."""

    @property
    def swap_bytes(self) -> int:
        """Bytes of activations that the plan moves to the host before a backward, and back."""
        return sum(each.swap_bytes for each in self.activations)

    @property
    def seq(self) -> int | None:
        """Tokens per sample."""
        return None if self.tokens is None or not self.samples else self.tokens // self.samples

    @property
    def compiled(self) -> tuple[str, ...]:
        """Names of the compiled units."""
        return tuple(unit.name for unit in self.units if unit.form == "compiled")

    @property
    def checkpointed(self) -> tuple[str, ...]:
        """Names of the units that run again in backward, compiled ones left out."""
        return tuple(unit.name for unit in self.units if unit.form == "checkpointed")

    @property
    def fetched_whole(self) -> tuple[str, ...]:
        """Names of the units that are fetched as one and are not compiled."""
        return tuple(unit.name for unit in self.units if unit.fetch == "one" and unit.form != "compiled")


@dataclass(frozen=True)
class StepTrace(Artifact):
    """The needs of one training step; see the fields."""

    artifact: ClassVar[str] = "step_trace"
    schema_version: ClassVar[int] = 14
    remake_hint: ClassVar[str] = "trace it anew with `elixir profile`"

    model_name: str
    """Name of the model, or of its class."""
    model_fingerprint: str
    """Digest of its parameters and modules."""
    device: str
    """Name of the hardware the step was traced for, such as ``h200`` or ``cpu``."""
    dtype: str
    """Dtype the floating parameters and inputs were cast to, or ``as built``."""
    optimizer: str
    """Class name of the optimizer and how it runs, such as ``AdamW (foreach)``."""
    parameters: tuple[ParamInfo, ...]
    """All parameters, tied ones once."""
    param_bytes: int
    """Bytes of the parameters."""
    grad_bytes: int
    """Bytes of the gradients."""
    optimizer_bytes: int
    """States of the optimizer in plain PyTorch (moments in the dtype of the parameters)."""
    buffer_bytes: int
    """Bytes of the buffers."""
    input_bytes: int
    """Bytes of the batch."""
    resting_bytes: int
    """Bytes that the allocator holds between steps, without optimizer states: parameters, buffers and inputs,
    rounded."""
    workspace_bytes: int
    """Bytes that matrix libraries keep allocated on the target device."""
    activation_peak_bytes: int
    """Highest live bytes, over forward and backward, that are no parameter, gradient, buffer or optimizer state."""
    backward_peak_bytes: int
    """Highest total in forward and backward, optimizer states not included."""
    step_peak_bytes: int
    """Highest total of a whole training step, optimizer states and its temporaries included."""
    peak_module: str
    """Module that was running at `backward_peak_bytes`."""
    peak_operator: str
    """Operator that was running at `backward_peak_bytes`."""
    peak_contributors: tuple[Contributor, ...]
    """Allocations that are alive at `backward_peak_bytes`, largest first."""
    operations: tuple[Operation, ...]
    """All distinct ones, in order of first use."""
    accesses: tuple[Access, ...]
    """All moments at which parameters are used, in order."""
    curve: tuple[CurveSample, ...]
    """Live bytes by kind over the step."""
    operators: int
    """Number of operators dispatched."""
    checkpointed_modules: tuple[str, ...]
    """Modules whose activations are recomputed."""
    unused_parameters: tuple[str, ...]
    """Parameters that the step never read."""
    unused_modules: tuple[str, ...]
    """Modules that hold parameters and never ran."""
    assumptions: tuple[str, ...]
    """Assumptions of the trace, such as balanced expert routing."""
    trace_s: float = field(compare=False)
    """Seconds that tracing took."""
    step: StepShape = field(default_factory=StepShape)
    forwards: tuple[UnitForward, ...] = ()
    """The forwards of the ``plain`` and ``compiled`` units that can run again."""
    pass_size: int = 1
    """Micro-batches that go through each checkpointed unit together: then each of these, and all between two, is one
    access in forward and one in backward, of all micro-batches."""
    transfers: tuple[Transfer, ...] = ()
    """Copies of activations to host memory and back, in order: those that the step makes itself, as
    `torch.autograd.graph.save_on_cpu` does, and those of the plan."""
    host_peak_bytes: int = 0
    """The most host memory that the step takes for what it moves there itself, as PyTorch's allocators take it."""

    def __post_init__(self) -> None:
        for name, count, indices in (
            ("parameters", len(self.parameters), [access.parameters for access in self.accesses]),
            ("operations", len(self.operations), [access.operations for access in self.accesses]),
            ("pin_until", len(self.accesses), [(access.pin_until,) for access in self.accesses]),
        ):
            every = set().union(*indices)
            if every and not 0 <= min(every) <= max(every) < count:
                at, of = next((at, of) for at, of in enumerate(indices) if any(not 0 <= one < count for one in of))
                raise InputError(
                    f"field 'accesses[{at}].{name}' must have indices below {count}, found {min(of)} to {max(of)}"
                )
        for number, transfer in enumerate(self.transfers):
            if not 0 <= transfer.begins <= transfer.ends < len(self.accesses) or transfer.nbytes < 0:
                raise InputError(
                    f"field 'transfers[{number}]' must begin and end, in this order, at accesses below "
                    f"{len(self.accesses)}, and have bytes, found {transfer}"
                )

    @property
    def units(self) -> tuple[Unit, ...]:
        """The layers of the model: `StepShape.units`."""
        return self.step.units

    @cached_property
    def unit_runs(self) -> tuple[UnitRun, ...]:
        """The runs of all units: `unit_runs` of the accesses."""
        return unit_runs([(each.phase, each.module) for each in self.accesses], [unit.name for unit in self.units])

    @property
    def numel(self) -> int:
        """Number of parameter elements, tied ones counted once."""
        return sum(param.numel for param in self.parameters)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the parameters that are not trained."""
        return sum(param.numel * dtype_bytes(param.dtype) for param in self.parameters if not param.trainable)

    @property
    def flops(self) -> int:
        """FLOPs of the step, recomputed ones included, the optimizer's not."""
        return sum(self.operations[index].flops for access in self.accesses for index in access.operations)

    def transferred_bytes(self, direction: Direction) -> int:
        """Bytes of activations that the step itself copies in one direction."""
        return sum(each.nbytes for each in self.transfers if each.direction == direction and not each.planned)

    def state_bytes(
        self, states: StateSize, matrices: Collection[str] = (), of_matrices: StateSize = MATRIX_STATES
    ) -> int:
        """Optimizer states and master weights that a plan keeps of all that is trained, wherever they live.

        Args:
            states: of the optimizer (`elixir.optimizer_states.state_size`).
            matrices: names of parameters that are stepped as whole matrices.
            of_matrices: states of these.
        """
        numel, total = dict[tuple[int, bool], int](), 0
        for param in self.parameters:
            if param.trainable:
                kind = dtype_bytes(param.dtype), param.name in matrices
                numel[kind] = numel.get(kind, 0) + param.numel
        for (width, whole), count in numel.items():
            kept = (of_matrices if whole else states).nbytes(count, width)
            total += kept + (count * MASTER_BYTES if width < MASTER_BYTES else 0)
        return total

    @property
    def planned_peak_bytes(self) -> int | None:
        """Peak of the step as Elixir trains, with everything on one device: float32 master weights and states of the
        optimizer next to the highest total of forward and backward. None for an optimizer whose states are not known.
        """
        if self.optimizer == NO_OPTIMIZER and not self.step.forward:
            return None
        try:
            states = state_size(self.optimizer.split(" ")[0])
        except InputError:
            return None
        return self.backward_peak_bytes + self.state_bytes(states)


def peak_holders(trace: StepTrace) -> list[Contributor]:
    """The holders of memory at the peak of forward and backward, the largest first.

    Those of repeated layers are one: ``layers.*.fc1`` is that module of every layer.
    """
    found: dict[tuple[Kind, str, str], tuple[int, int]] = {}
    for origin in trace.peak_contributors:
        module = ".".join("*" if part.isdigit() else part for part in origin.module.split("."))
        key = (origin.kind, module, origin.operator)
        count, size = found.get(key, (0, 0))
        found[key] = (count + origin.count, size + origin.bytes)
    ranked = sorted(found.items(), key=lambda each: (-each[1][1], each[0]))
    return [Contributor(*key, *amounts) for key, amounts in ranked]


def holders_text(trace: StepTrace, most: int) -> str:
    """The largest `most` of those that a batch takes, wherever weights are; empty without any."""
    batch = [each for each in peak_holders(trace) if each.kind not in ("parameters", "gradients", "optimizer")]
    return ", ".join(
        f"{format_bytes(each.bytes)} {each.operator} in {each.module or 'no module'}"
        if each.kind == "activations"
        else f"{format_bytes(each.bytes)} of {each.kind}" + (f" of {each.operator}" if each.operator else "")
        for each in batch[:most]
    )
