"""Questions to a search: which step (`StepQuestion`), and every option (`SearchRequest`).

Both are checked once and passed on as one object. An option of a search is a field of the latter, read where it
matters. The searches, `elixir.wrap`, `sweep`, `fit` and the command line take their options from these fields, so
that a new one needs no change there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from elixir.errors import GONE, InputError, InputTypeError, unknown_name
from elixir.hardware import HardwareProfile
from elixir.optimizer_states import state_size
from elixir.plan import Plan
from elixir.step_trace import StepTrace
from elixir.units import dtype_name, parse_bytes, parse_dtype

if TYPE_CHECKING:
    import torch
    from torch import nn

    StepFn = Callable[[nn.Module, dict[str, Any]], Any]

HomeChoice = Literal["auto", "cuda", "cpu"]
SearchName = Literal["optimal", "minimum_waste"]
Assumption = Literal["scenarios", "nominal"]
Size = str | int | None
"""Bytes, or text such as ``"80GiB"``."""
Function = TypeVar("Function", bound=Callable[..., Any])
Progress = Callable[[str, int, int], None]
"""Called with what comes next, how much is done, and of how much."""

MOST_RANKS = 1 << 20
"""More than any machine has; with more, the padding that makes shards equal would outgrow the models."""
FREE_HERE = "free"
"""As a size of host memory: what is free on the machine that plans."""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """The question of a search: all its options, checked.

    Raises:
        InputError, InputTypeError: a value makes no sense, or two exclude each other.
    """

    world_size: int
    """Ranks, one device each; `HardwareProfile.devices_per_host` of them share a machine."""
    optimizer_type: str = "Adam"
    """Family whose states are counted, such as ``Adam`` or ``SGD``."""
    overlap: bool = True
    """Transfers run while compute does, with prefetch. If only that makes a plan too large, it goes without."""
    device_memory: Size = None
    """Budget of one device. None: what is free or what the profile says, less a reserve (`elixir.search.budgets`)."""
    host_memory: Size = None
    """Budget of one machine, all its ranks together. None: likewise; ``"free"``: what is free on the machine that
    plans."""
    placement: HomeChoice = "auto"
    """``cuda`` keeps weights and states of every chunk on the device, ``cpu`` all of them on the host."""
    accumulation: int = 1
    """Batches per optimizer step, each like the one that is traced. `search_batches` finds the best number."""
    disk_memory: Size = None
    """Budget of the disk of one machine, for states that neither device nor host can hold; None: they may not live
    there. `ElixirModule` runs such a plan with `disk_folder`."""
    moments: str = "float32"
    """How Adam's are kept, wherever they live: ``float32``, ``bfloat16`` (half the bytes) or ``8bit`` (a quarter). The
    run steps with these; docs/design/kernels.md says how far weights differ."""
    speculate: bool | None = None
    """The host makes new states of chunks while backward still runs, next to the old ones, in host memory that is left;
    with clipping, loss scaling and accumulation, too. It changes no number. None: where that shortens the step by more
    than 1 %, on a device that is no CPU, and leaves the copies of a checkpoint their memory. True: wherever it is
    faster at all. False: nowhere."""
    clipping: bool | None = None
    """Whether the run clips gradients by their norm, which a step has to read. None: it does."""
    device_reserve: Size = None
    """How much of one device is kept back where `device_memory` is None; None: enough for what a plan does not
    count."""
    host_reserve: Size = None
    """Likewise of one machine, where `host_memory` is None."""
    assume: Assumption = "scenarios"
    """``scenarios``: the plan loses least in all that the hardware profile thinks possible, such as a host slower than
    it says, or steps that are all clipped. ``nominal``: the fastest plan at the profile's rates."""
    search: SearchName = "optimal"
    """``optimal`` tries several chunk sizes, ``minimum_waste`` only the one that pads least."""

    def __post_init__(self) -> None:
        check_count("world_size", self.world_size)
        if self.world_size > MOST_RANKS:
            raise InputError(f"world_size must be at most {MOST_RANKS:,}, got {self.world_size:,}")
        check_count("accumulation", self.accumulation)
        for name, kind in (("placement", HomeChoice), ("search", SearchName), ("assume", Assumption)):
            known = get_args(kind)
            if getattr(self, name) not in known:
                raise InputError(f"{name} must be one of {list(known)}, got {getattr(self, name)!r}")
        state_size(self.optimizer_type, self.moments)
        for name in ("device_memory", "host_memory", "disk_memory", "device_reserve", "host_reserve"):
            size = getattr(self, name)
            if size is not None and not (name == "host_memory" and size == FREE_HERE):
                parse_bytes(size)
        for which in ("device", "host"):
            memory, reserve = getattr(self, f"{which}_memory"), getattr(self, f"{which}_reserve")
            if memory is not None and memory != FREE_HERE and reserve is not None:
                raise InputError(
                    f"{which}_memory={memory!r} is taken as given, so nothing is kept back of it; leave out "
                    f"{which}_reserve="
                    f"{reserve!r}, or leave out {which}_memory to keep that much back of what is there"
                )
        for name in ("clipping", "speculate"):
            wanted = getattr(self, name)
            if wanted is not None and not isinstance(wanted, bool):
                raise InputTypeError(f"{name} must be True, False or None, got {wanted!r}")

    @classmethod
    def of(cls, asked: SearchRequest | int, **options: Any) -> SearchRequest:
        """The request that `options` change, or a new one for so many ranks.

        Raises:
            InputError, InputTypeError: as for the class; an option is unknown, the error names the nearest.
        """
        check_options("option of a search", options, OPTIONS)
        return replace(asked, **options) if isinstance(asked, SearchRequest) else cls(world_size=asked, **options)


@dataclass(frozen=True, kw_only=True)
class StepQuestion:
    """Which step: the one description for the command line, `elixir.wrap`, `sweep`, `fit` and the searches.

    Raises:
        InputError: the dtype is unknown.
    """

    model: nn.Module | StepTrace | str = ""
    """The model itself, or a name, as `elixir.models.build` takes it; or a trace, which has settled all else."""
    batch: int = 1
    """Samples of one rank, where `inp` does not say."""
    seq: int | None = None
    """Tokens per sample; None: 1024, or the model's maximum where that is smaller."""
    dtype: str | torch.dtype | None = None
    """Dtype that floating parameters and inputs are cast to; None leaves them as built."""
    checkpoint: str = "none"
    """Activation checkpointing of a model by name, as `elixir.models.build` takes it."""
    use_fused_kernels: bool | Mapping[str, str] = False
    """As `ElixirModule` will be given it, so that the plan knows their memory."""
    optimizer: str | None = None
    """Class in `torch.optim` whose states and step are traced; None: none, since for a plan both follow from the
    placement."""
    optimizer_kernel: Literal["for-loop", "foreach", "fused"] | None = None
    """How it steps; None: as `torch.optim` would choose."""
    inp: Mapping[str, Any] | Callable[[], dict[str, Any]] | None = None
    """One rank's batch, or what gives it; None takes `elixir.models.default_input` (Hugging Face models only)."""
    step_fn: StepFn | None = None
    """``step_fn(model, inp)`` runs forward, loss and backward; None takes `elixir.models.default_step`."""

    def __post_init__(self) -> None:
        if self.dtype is not None:
            parse_dtype(self.dtype)

    @classmethod
    def again(cls, made: StepTrace | Plan) -> StepQuestion:
        """The step that was traced for `made`.

        Raises:
            InputError: it has something that does not follow from the name of its model.
        """
        step = made.step
        if step.checkpoint is None:
            raise InputError(
                f"the step of {made.model_name} does not follow from its name, so it cannot be traced again"
            )
        optimizer = made.optimizer.split(" ")[0]
        return cls(
            model=made.model_name,
            batch=step.samples or 1,
            seq=step.seq,
            dtype=None if made.dtype == "as built" else made.dtype,
            checkpoint=step.checkpoint,
            use_fused_kernels=step.fused_kernels,
            optimizer=optimizer if isinstance(made, StepTrace) and optimizer != "none" else None,
        )

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None: as built."""
        return None if self.dtype is None else parse_dtype(self.dtype)

    def build(self) -> nn.Module:
        """The model, built by its name if it has one."""
        from elixir.models import build  # late, like the next: planning from a trace does not need what they load

        if isinstance(self.model, str):
            return build(self.model, dtype=self.torch_dtype, checkpoint=self.checkpoint)
        if isinstance(self.model, StepTrace):
            raise InputTypeError("a trace has no model to build")
        return self.model

    def trace(self, hardware: HardwareProfile, built: nn.Module | None = None) -> StepTrace:
        """The step on this machine.

        Args:
            hardware: whose kernels and allocator to assume.
            built: the model, where it was built before.

        Raises:
            InputError, InputTypeError: something of the question makes no sense.
            TraceError: the step cannot be traced.
        """
        if isinstance(self.model, StepTrace):
            if self.dtype is not None and self.model.dtype != dtype_name(parse_dtype(self.dtype)):
                raise InputError(
                    f"the trace is of dtype {self.model.dtype}, unified_dtype asks for "
                    f"{dtype_name(parse_dtype(self.dtype))}; trace the model again"
                )
            return self.model
        from elixir.models import default_step, find, input_to_trace, refused_overflow, user_code
        from elixir.tracer import trace_step

        model, name = self.build() if built is None else built, self.model if isinstance(self.model, str) else None
        if self.inp is None:
            inp: Any = input_to_trace(model, batch=self.batch, seq=self.seq)
        elif isinstance(self.inp, Mapping):
            inp = dict(self.inp)
        elif callable(self.inp):
            inp = self.inp()
        else:
            raise InputTypeError(f"inp must be a dict of the model's inputs, got {type(self.inp).__name__}")
        shape = None if name is None else find(name)
        # A model by name may be the user's code as well, which has to leave the process as it was.
        around = nullcontext() if name is None else user_code.contained(f"{name}: the step")
        with around, refused_overflow():
            return trace_step(
                model,
                inp,
                self.step_fn or default_step,
                dtype=self.torch_dtype,
                hardware=hardware,
                optimizer=self.optimizer,
                optimizer_kernel=self.optimizer_kernel,
                model_name=name if shape is None else shape.name,
                use_fused_kernels=self.use_fused_kernels,
                checkpoint=self.checkpoint if name and self.inp is None and self.step_fn is None else None,
            )


class Question(NamedTuple):
    """A step, a machine, and what is asked of its plan."""

    trace: StepTrace
    hardware: HardwareProfile
    request: SearchRequest


OPTIONS = tuple(field.name for field in fields(SearchRequest))


def check_count(name: str, value: object) -> None:
    """Refuse what is no whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputTypeError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise InputError(f"{name} must be 1 or larger, got {value}")


def check_options(kind: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuse a keyword that is not known: an `InputTypeError` that names the nearest, or what took its place."""
    for name in given:
        if name in GONE:
            raise InputError(GONE[name])
        if name not in known:
            raise InputTypeError(str(unknown_name(kind, name, known)))


def options_of(options: type, *, without: Collection[str] = ()) -> dict[str, inspect.Parameter]:
    """The fields of a dataclass of options as parameters, but for some."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return {
        field.name: inspect.Parameter(
            field.name,
            kind,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=field.type,
        )
        for field in fields(options)
        if field.name not in without
    }


def takes(parameters: Collection[inspect.Parameter]) -> Callable[[Function], Function]:
    """Decorates a function of ``(*given, **options)``: `help` and `inspect.signature` show `parameters`, which hold."""

    def shown(function: Function) -> Function:
        returned = function.__annotations__.get("return", inspect.Signature.empty)
        signature = inspect.Signature(list(parameters), return_annotation=returned)
        setattr(function, "__signature__", signature)  # noqa: B010 - a function has no such attribute for type checkers
        return function

    return shown


def bound(function: Callable[..., Any], given: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, defaults included, of a function that `takes` them.

    Raises:
        InputTypeError: an argument is unknown, missing, or given twice.
    """
    signature = inspect.signature(function)
    check_options(f"argument of {function.__name__}", options, signature.parameters)
    try:
        arguments = signature.bind(*given, **options)
    except TypeError as error:
        raise InputTypeError(f"{function.__name__}: {error}") from None
    arguments.apply_defaults()
    return arguments.arguments
