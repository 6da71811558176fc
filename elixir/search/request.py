"""`SearchRequest`: everything that can be asked of a search, checked once and passed on as one object.

An option is a field here, read where it matters. The searches, `elixir.wrap`, `sweep`, `fit` and the command line take
their options from these fields, so that a new one needs no change there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from elixir.errors import GONE, InputError, InputTypeError, unknown_name
from elixir.hardware.promises import Memory
from elixir.optimizer_states import state_size
from elixir.plan.chunk_plan import FrozenHome, check_replicas, divisions
from elixir.plan.plan import HasPlan, Plan, plan_of
from elixir.units import parse_bytes

HomeChoice = Literal["auto", "cuda", "cpu"]
SearchName = Literal["optimal", "minimum_waste"]
Assumption = Literal["scenarios", "nominal"]
ActivationChoice = Literal["auto", None]
Size = str | int | None
"""Bytes, or text such as ``"80GiB"``."""
Function = TypeVar("Function", bound=Callable[..., Any])
Progress = Callable[[str, int, int], None]
"""Called with what comes next, how much is done, and of how much."""

MOST_RANKS = 1 << 20
"""More than any machine has; with more, the padding that makes shards equal would outgrow the models."""
FREE_HERE = "free"
"""The size of host memory that stands for what is free on the machine that plans."""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """The question of a search: all its options, checked.

    Raises:
        InputError, InputTypeError: a value makes no sense, or two exclude each other.
    """

    world_size: int
    """Ranks, one device each; `HardwareProfile.devices_per_host` of them share a machine."""
    optimizer_type: str | None = "Adam"
    """Family whose states are counted, such as ``Adam`` or ``SGD``; ``Adam + EMA`` with an average of weights.
    None: the model is evaluated, or generates, and trains nothing; there are no gradients and no states."""
    overlap: bool = True
    """Transfers run while compute does, with prefetch. If only that makes a plan too large, it goes without."""
    device_memory: Size = None
    """Budget of one device. None: what is free or what the profile says, less a reserve (`elixir.search.budgets`)."""
    host_memory: Size = None
    """Memory that one machine has for the run: all that must be free there counts, of all its ranks together, such as
    libraries, the program and, on a CPU, the device's part. None: as for a device; ``"free"``: what is free on the
    machine that plans."""
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
    early_updates: bool | None = None
    """The host makes new states of chunks while backward still runs, next to the old ones, in host memory that is left;
    with clipping, loss scaling and accumulation, too. It changes no number. None: where that shortens the step, on a
    device that is no CPU, and leaves the copies of a checkpoint their memory; of plans that are equally safe, the one
    that needs less of the host wins. True: on a CPU as well, and with no memory kept for copies. False: nowhere."""
    clipping: bool | None = None
    """Whether the run clips gradients by their norm, which a step has to read. None: it does."""
    frozen_weights: FrozenHome = "host"
    """The home of weights that are not trained and do not fit the device: ``host`` memory, or the ``files`` that they
    come in (safetensors, `weights` of `ElixirModule`), from which each load reads them; the host needs no memory for
    them then. The profile must know how fast the disk is."""
    device_reserve: Size = None
    """How much of one device is kept back where `device_memory` is None; None: enough for what a plan does not
    count."""
    host_reserve: Size = None
    """The same of one machine, if neither `host_memory` nor `host_budget` is given."""
    reserve: Size = None
    """Host memory that the user's program takes in each process after its model is wrapped, such as for the workers of
    a data loader. It counts against `host_memory` or what is free, not against `host_budget`; what a process holds
    before is measured."""
    assume: Assumption = "scenarios"
    """``scenarios``: the plan loses least in all that the hardware profile thinks possible, such as a host slower than
    it says, or steps that are all clipped. ``nominal``: the fastest plan at the profile's rates."""
    matrices: tuple[str, ...] | None = None
    """Names of the parameters that an optimizer such as Muon steps as whole matrices; None: with ``Muon + AdamW`` all
    matrices but embeddings, and those of the shape of one, as an output layer has it."""
    replicas: int | Literal["auto"] = 1
    """Replicas of the model, each sharded over world_size / replicas neighbouring ranks, two or more: weights are
    gathered within a replica, gradients reduced there and summed over the replicas once per optimizer step. ``auto``:
    the fastest of all numbers with which each replica takes whole machines, or a part of one."""
    pass_size: int | Literal["auto"] = 1
    """Micro-batches that go through each layer before the next layer's weights are fetched, with
    `ElixirOptimizer.accumulate`; it divides `accumulation`. ``auto``: the fastest power of two, or all of them."""
    activations: ActivationChoice = None
    """``auto``: the search chooses for each unit which results of its forward are kept for backward, and which are made
    again, together with the homes of chunks (`elixir.step_trace.UnitActivations`). It takes the model, or a trace that
    follows from a model's name. None: as the model is."""
    host_budget: Size = None
    """The budget, given instead of `host_memory`, of what Elixir itself keeps on the host of one machine, such as
    weights, gradients and states of all its ranks. All else that must be free comes on top."""
    search: SearchName = "optimal"
    """``optimal`` tries several chunk sizes, ``minimum_waste`` only the one that pads least."""

    free: Memory | None = None
    """Free memory, where the budget is what is free: of ranks on several machines the least. None: it is read here."""
    chunks_of: Plan | HasPlan | None = None
    """A plan whose chunks are kept, so that `ElixirModule.rehome` can move a model that runs under it; None: the search
    packs the step anew."""

    def __post_init__(self) -> None:
        self._check_counts()
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise InputError(f"{name} must be one of {list(known)}, got {getattr(self, name)!r}")
        state_size(self.optimizer_type, self.moments)
        for name in (*_BUDGETS, "disk_memory", "device_reserve", "host_reserve", "reserve"):
            size = getattr(self, name)
            if size is not None and not (name == "host_memory" and size == FREE_HERE):
                parse_bytes(size)
        if self.host_memory is not None and self.host_budget is not None:
            raise InputError(
                f"host_memory={self.host_memory!r} is what a machine has for all of the run, host_budget="
                f"{self.host_budget!r} what Elixir keeps on its host; give one of them"
            )
        for name, which in _BUDGETS.items():
            memory, reserve = getattr(self, name), getattr(self, f"{which}_reserve")
            if memory is not None and memory != FREE_HERE and reserve is not None:
                raise InputError(
                    f"{name}={memory!r} is taken as given, so nothing is kept back of it; leave out {which}_reserve="
                    f"{reserve!r}, or leave out {name} to keep that much back of what is there"
                )
        self._check_kept()
        for name in ("clipping", "early_updates"):
            wanted = getattr(self, name)
            if wanted is not None and not isinstance(wanted, bool):
                raise InputTypeError(f"{name} must be True, False or None, got {wanted!r}")

    def _check_counts(self) -> None:
        check_count("world_size", self.world_size)
        if self.world_size > MOST_RANKS:
            raise InputError(f"world_size must be at most {MOST_RANKS:,}, got {self.world_size:,}")
        check_count("accumulation", self.accumulation)
        if self.pass_size != "auto":
            check_count("pass_size", self.pass_size)
            if self.accumulation % self.pass_size:
                raise InputError(
                    f"pass_size must divide accumulation, got {self.pass_size} and {self.accumulation}; with "
                    "pass_size=accumulation all micro-batches of a step are one pass"
                )
        if self.replicas != "auto":
            check_count("replicas", self.replicas)

    def _check_kept(self) -> None:
        if self.chunks_of is None:
            return
        kept = plan_of(self.chunks_of)
        for name, what in (("world_size", "ranks"), ("replicas", "replicas")):
            there = getattr(kept, name)
            if getattr(self, name) not in (there, "auto"):
                raise InputError(f"chunks_of is a plan for {there} {what}, so {name} must be {there}, too")

    @classmethod
    def of(cls, asked: SearchRequest | int, **options: Any) -> SearchRequest:
        """The request that `options` change, or a new one for so many ranks.

        Raises:
            InputError, InputTypeError: as for the class; an option is unknown, the error names the nearest.
        """
        check_options("option of a search", options, OPTIONS)
        return replace(asked, **options) if isinstance(asked, SearchRequest) else cls(world_size=asked, **options)

    def in_replicas(self, replicas: int) -> SearchRequest:
        """The request with this number for ``auto``; a number that was asked for stays."""
        return replace(self, replicas=replicas) if self.replicas == "auto" else self

    def divisions(self, ranks_per_host: int) -> tuple[int, ...]:
        """The numbers of replicas to try, the smallest first.

        Raises:
            InputError: the ranks cannot form the replicas that are asked for.
        """
        if self.replicas != "auto":
            check_replicas(self.replicas, self.world_size)
            return (self.replicas,)
        if self.chunks_of is not None:
            return (plan_of(self.chunks_of).replicas,)
        return divisions(self.world_size, ranks_per_host)

    @property
    def gives_host(self) -> bool:
        """Whether it says how much of the host a plan may use."""
        return self.host_memory is not None or self.host_budget is not None

    @property
    def host_option(self) -> Literal["host_memory", "host_budget"]:
        """The option by which the host's memory is given, or would be."""
        return "host_memory" if self.host_budget is None else "host_budget"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of passes to try, the smallest first."""
        if self.pass_size != "auto":
            return (self.pass_size,)
        powers = {1 << power for power in range(self.accumulation.bit_length())}
        return tuple(size for size in sorted({*powers, self.accumulation}) if not self.accumulation % size)


_BUDGETS = {"device_memory": "device", "host_memory": "host", "host_budget": "host"}
"""Options that are budgets -> whose memory."""
_CHOICES = {name: get_args(kind) for name, kind in get_type_hints(SearchRequest).items() if get_origin(kind) is Literal}
"""Options that are one of a few values -> these."""
OPTIONS = tuple(field.name for field in fields(SearchRequest))


def check_count(name: str, value: object) -> None:
    """Refuses what is no whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputTypeError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise InputError(f"{name} must be 1 or larger, got {value}")


def check_options(kind: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuses a keyword that is not known: an `InputTypeError` that names the nearest, or what took its place."""
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
