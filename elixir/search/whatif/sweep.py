"""Asks which machines can train a model, and how fast: many plans, made and simulated without any of the machines.

`sweep` tries every combination it is given; `fit` walks known machines from the smallest until one can do it. Both
are pure: the same arguments give the same rows in every process, whatever machine they are asked on. Times are those of
`simulate_step`, so they are as good as the profile's rates (`docs/planning.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple, TypeVar

from torch import nn

from elixir.errors import ElixirError, InputError, PlanError
from elixir.hardware.profile import HardwareProfile, preset, preset_names
from elixir.plan.activations import activations_text
from elixir.plan.plan import Plan
from elixir.plan.process_need import must_be_free_bytes
from elixir.search.advise.activations import that_keeps_everything, trace_that_keeps
from elixir.search.advise.answer import Answer
from elixir.search.budgets import resolve_budgets
from elixir.search.planner import plan_or_shortage
from elixir.search.propose.sizes import Budgets
from elixir.search.question import Question, StepQuestion
from elixir.search.request import Progress, SearchRequest, check_count
from elixir.search.searches import profile_for, with_exact_moves
from elixir.search.simulator.simulation import Simulation, simulate_step
from elixir.search.whatif.settings import METHODS, Choices, best_settings, check_room
from elixir.step_trace import StepTrace
from elixir.units import dtype_name, parse_bytes

__all__ = ["HOST_PER_DEVICE_BYTE", "METHODS", "Choices", "Fit", "SweepRow", "doublings", "fit", "sweep"]

Collected = TypeVar("Collected")
ON_PAPER = SearchRequest(world_size=1, optimizer_type="AdamW")
"""The options for every machine, unless the caller gives others."""
STEP_ON_PAPER = StepQuestion(dtype="bf16")
"""The step, likewise."""
HOST_PER_DEVICE_BYTE = 2
"""Host memory of a machine that says nothing of it, per byte of device memory in use on it.

Assumption: machines are bought with about so much; a DGX H200 has 2 TB with 8 x 141 GB (NVIDIA, DGX H200 datasheet).
"""


@dataclass(frozen=True)
class SweepRow:
    """One combination: whether it fits, and what its plan would do. What is not known is None."""

    model: str
    machine: str
    world_size: int
    batch: int
    """Samples per rank."""
    seq: int | None
    """Tokens per sample; None where samples are no tokens."""
    dtype: str
    fits: bool
    reason: str
    """The reason why not, in one sentence; empty if it fits."""
    device_budget_bytes: int
    """Bytes of one device."""
    host_budget_bytes: int
    """Bytes of one machine, all its ranks together."""
    step_s: float | None = None
    samples_per_s: float | None = None
    """Samples of all ranks together."""
    tokens_per_s: float | None = None
    """Tokens of all ranks together."""
    fastest_s: float | None = None
    """The least that a step may take, as far as rates are uncertain; `slowest_s` is the most."""
    slowest_s: float | None = None
    device_flops_per_s: float | None = None
    """FLOP/s of one device, recomputed work included."""
    peak_share: float | None = None
    """`device_flops_per_s` over the device's published peak."""
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    bound_by: str | None = None
    """The resource with most seconds on the critical path of the step."""
    chunks: int | None = None
    resident_chunks: int | None = None
    weights_on_host_chunks: int | None = None
    states_on_host_chunks: int | None = None
    block_count: int | None = None
    host_to_device_bytes: int | None = None
    """Per rank and step."""
    device_to_host_bytes: int | None = None
    network_bytes: int | None = None
    disk_budget_bytes: int = 0
    """Bytes of one machine, like the host's."""
    disk_peak_bytes: int | None = None
    states_on_disk_chunks: int | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    accumulation: int = 1
    """Micro-batches of an optimizer step, `batch` samples each."""
    replicas_bytes: int | None = None
    """Per rank and step, between replicas."""
    activations: str | None = None
    """The results that layers keep or move, in words, where that was chosen."""
    must_be_free_bytes: int | None = None
    """Bytes of one machine that all its processes take, libraries and programs included."""
    ranks_per_host: int | None = None
    """Ranks on one machine."""
    method: str | None = None
    """One of `METHODS`, if several were compared; the settings that follow are those that were chosen."""
    lora: int | None = None
    quantised: str | None = None
    moments: str | None = None
    checkpoint: str | None = None
    """Activation checkpointing."""
    fused_kernels: bool | None = None
    pass_size: int | None = None
    enough: str = ""
    """If it does not fit: the argument of a search, with its value, that suffices; empty if none is known."""


@dataclass(frozen=True)
class Fit:
    """The answer of `fit`."""

    model: str
    best: SweepRow | None
    """The smallest machine that can train the model; None where none of them can."""
    rows: tuple[SweepRow, ...]
    """Per machine and method: its fewest devices that can, in order of size; then those that cannot, with their most
    devices."""
    answers: tuple[Answer | None, ...] = ()
    """The answer of each row; None if it does not fit."""


class SweepInterrupted(KeyboardInterrupt):
    """An interrupt (Ctrl-C) of `sweep` or `fit`, with what was found before it: at least one row."""

    def __init__(self, found: Any, tried: int, count: int) -> None:
        super().__init__(f"interrupted after {tried} of {count} combinations")
        self.found = found
        """The rows of `sweep`, or the `Fit` of `fit`, so far."""


def sweep(  # noqa: PLR0913 - four lists, and how to ask of each combination
    models: Sequence[str],
    machines: Sequence[HardwareProfile | str],
    world_sizes: Sequence[int] = (1,),
    batches: Sequence[int] = (1,),
    *,
    step: StepQuestion = STEP_ON_PAPER,
    asked: SearchRequest | None = None,
    network_bytes_per_s: float | None = None,
    progress: Progress | None = None,
    each: Callable[[SweepRow], None] | None = None,
    **options: Any,
) -> list[SweepRow]:
    """A row for every model, batch, machine and world size, in this order of nesting.

    Args:
        models: names, config files or ``module:function``, as `elixir.models.loading.build` takes them.
        machines: profiles, presets' names or profile files.
        world_sizes: numbers of ranks, one device each.
        batches: samples per rank.
        step: what else there is to a step; its model and batch do not count.
        asked: what plans are searched for, of any number of ranks.
        network_bytes_per_s: between machines, per machine and direction. None: what the profile says. Without either a
            machine's own devices are the most.
        progress: called before each combination.
        each: called with each row once it is made, if its combination could be planned or lacks memory.
        options: fields of `SearchRequest`, which change `asked`. Memory whose size is not given is what the profile
            says, host memory otherwise `HOST_PER_DEVICE_BYTE`, less a reserve.

    Raises:
        InputError, InputTypeError: an argument makes no sense, or no combination could even be planned.
        TraceError: no combination could even be traced. One that fails alone is a row with its reason.
        SweepInterrupted: Ctrl-C after the first row; it has the rows so far.
    """
    request = SearchRequest.of(asked or ON_PAPER, **options)
    profiles = [with_network(profile_for(machine), network_bytes_per_s) for machine in machines]
    for name, values in (
        ("models", models),
        ("machines", machines),
        ("world_sizes", world_sizes),
        ("batches", batches),
    ):
        if isinstance(values, str) or not values:
            raise InputError(f"{name} must be a list of at least one, got {values!r}")
    for name, values in (("world size", world_sizes), ("batch", batches)):
        for value in values:
            check_count(f"a {name}", value)
    cases = [
        _Case(
            replace(step, model=model, batch=batch),
            hardware,
            count,
            f"{model}, batch {batch}, {count} x {hardware.name}",
        )
        for model, batch, hardware, count in product(models, batches, profiles, world_sizes)
    ]
    return _tried(cases, request, lambda rows: [row for _, row, _ in rows], progress, each)


def fit(  # noqa: PLR0913 - as `sweep`
    model: str,
    machines: Sequence[HardwareProfile | str] | None = None,
    *,
    batch: int = 1,
    counts: Sequence[int] | None = None,
    step: StepQuestion = STEP_ON_PAPER,
    asked: SearchRequest | None = None,
    network_bytes_per_s: float | None = None,
    progress: Progress | None = None,
    each: Callable[[SweepRow], None] | None = None,
    methods: Mapping[str, Mapping[str, Any]] | None = None,
    choices: Choices | None = None,
    each_machine: bool = True,
    **options: Any,
) -> Fit:
    """The smallest of the machines and device counts that can train `model`, and how fast; with what comes next.

    Size is device memory times count. Of equals the one with fewer devices comes first, then the order of `machines`.

    Args:
        machines: all presets with a GPU by default.
        counts: numbers of devices; by default 1, 2, 4, ... up to what one machine holds.
        methods: ways to fine-tune, each with the fields of `StepQuestion` that it takes, such as `METHODS`; None: the
            step as it is.
        choices: the settings that are chosen for each machine; None: all are as asked.
        each_machine: whether all machines are tried, or each method up to the smallest that can.

    The other arguments and the errors are those of `sweep`.
    """
    request = SearchRequest.of(asked or ON_PAPER, **options)
    profiles = [
        with_network(profile, network_bytes_per_s)
        for profile in (map(preset, preset_names()) if machines is None else map(profile_for, machines))
        if machines is not None or profile.device_kind == "cuda"
    ]
    check_count("batch", batch)
    for count in counts or ():
        check_count("a count", count)
    ways = methods or {"": {}}
    cases = [
        _Case(
            replace(step, model=model, batch=batch, **fields),
            hardware,
            count,
            f"{name and f'{name}: '}{model} on {count} x {hardware.name}",
            (name, place if each_machine else 0),
            name or None,
            choices,
        )
        for name, fields in ways.items()
        for place, hardware in enumerate(profiles)
        for count in (doublings(hardware.devices_per_host) if counts is None else sorted(dict.fromkeys(counts)))
    ]
    if not cases:
        raise InputError("no machine to try: give at least one")
    order = list(ways)
    cases.sort(
        key=lambda case: (
            order.index(case.method or ""),
            case.hardware.device_memory_bytes * case.world_size,
            case.world_size,
            case.left_alone,
        )
    )
    return _tried(cases, request, _fit_of, progress, each)


class _Case(NamedTuple):
    """One combination, and how it is called."""

    step: StepQuestion
    hardware: HardwareProfile
    world_size: int
    text: str
    left_alone: tuple[str, int] | None = None
    """The method and the machine, which are left alone once they have a row that fits; None: all are tried."""
    method: str | None = None
    choices: Choices | None = None


Outcome = Answer | ElixirError | None
Rows = list[tuple[_Case, SweepRow, Outcome]]


def _tried(
    cases: Sequence[_Case],
    request: SearchRequest,
    outcome: Callable[[Rows], Collected],
    progress: Progress | None,
    each: Callable[[SweepRow], None] | None,
) -> Collected:
    """The outcome of one row after the other; errors and the other arguments are those of `sweep`."""
    traces, rows = Traces(), Rows()
    for done, case in enumerate(cases):
        if case.left_alone and any(row.fits and case.left_alone == other.left_alone for other, row, _ in rows):
            continue
        if progress is not None:
            progress(case.text, done, len(cases))
        try:
            row, found = try_out(traces, replace(request, world_size=case.world_size), case)
        except KeyboardInterrupt:
            if not rows:
                raise
            raise SweepInterrupted(outcome(rows), done, len(cases)) from None
        if each is not None and _was_planned(found):
            each(row)
        rows.append((case, row, found))
    if not any(_was_planned(found) for _, _, found in rows):
        raise next(found for _, _, found in rows if isinstance(found, ElixirError))
    return outcome(rows)


def _was_planned(found: Outcome) -> bool:
    """Whether a combination got as far as a plan, or to the memory that it lacks."""
    return not isinstance(found, ElixirError) or isinstance(found, PlanError)


def _fit_of(rows: Rows) -> Fit:
    """The rows that fit, and of each other machine and method the last one."""
    fitting = [(row, found) for _, row, found in rows if row.fits]
    fits = {case.left_alone for case, row, _ in rows if row.fits}
    others = {case.left_alone: (row, None) for case, row, _ in rows if case.left_alone not in fits}
    listed = [*fitting, *others.values()]
    answers = tuple(found if isinstance(found, Answer) else None for _, found in listed)
    best = fitting[0][0] if fitting else None
    return Fit(rows[0][1].model, best, tuple(row for row, _ in listed), answers)


def doublings(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most` itself.

    >>> doublings(6)
    (1, 2, 4, 6)
    """
    powers = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return tuple(dict.fromkeys((*powers, most)))


@dataclass
class Traces:
    """Traces by what they depend on: the model, the batch, and of the machine only its kind and compute capability."""

    models: dict[tuple[object, ...], nn.Module] = field(default_factory=dict)
    """Models that were built for traces, by name and adapters; at most one."""
    _known: dict[tuple[object, ...], StepTrace | ElixirError] = field(default_factory=dict)
    _kinds: dict[tuple[object, ...], dict[Any, Any]] = field(default_factory=dict)

    def get(self, step: StepQuestion, hardware: HardwareProfile, request: SearchRequest) -> StepTrace:
        """The step of one combination, with activations that are chosen for it if the request says so."""
        if request.activations is None:
            return self.asked(step, hardware)
        whole, kinds = self.whole(step, hardware), self._kinds[self._key(step, hardware)]
        return trace_that_keeps(step, hardware, request, self.built(step), whole, kinds)

    def asked(self, step: StepQuestion, hardware: HardwareProfile) -> StepTrace:
        """The step as it is."""
        return self._traced(step, hardware)

    def whole(self, step: StepQuestion, hardware: HardwareProfile) -> StepTrace:
        """The step with layers that keep everything."""
        return self._traced(step, hardware, "keeps everything")

    def built(self, step: StepQuestion) -> nn.Module:
        """The model of a step."""
        model = str(step.model), step.lora, step.quantised
        if model not in self.models:
            self.models.clear()  # models come one after the other, and some configs make large ones
            self.models[model] = step.build()
        return self.models[model]

    def _traced(self, step: StepQuestion, hardware: HardwareProfile, *how: str) -> StepTrace:
        key = self._key(step, hardware)
        found = self._known.get((*key, *how))
        if found is None:
            try:
                built = self.built(step)
                asked = that_keeps_everything(step, built) if how else step
                found = asked.trace(hardware, built, self._kinds.setdefault(key, {}))
            except ElixirError as error:
                found = error
            self._known[(*key, *how)] = found
        if isinstance(found, ElixirError):
            raise found
        return found

    @staticmethod
    def _key(step: StepQuestion, hardware: HardwareProfile) -> tuple[object, ...]:
        kind = hardware.device_kind, hardware.compute_capability
        return (step.model, step.lora, step.quantised, step.batch, *kind)


def budgets_on_paper(hardware: HardwareProfile, request: SearchRequest) -> Budgets:
    """Budgets of a machine that need not be here: given, from its profile, or by `HOST_PER_DEVICE_BYTE`."""
    unknown = hardware.device_memory_bytes
    if hardware.device_kind != "cpu":
        unknown *= HOST_PER_DEVICE_BYTE * hardware.ranks_per_host(request.world_size)
    return resolve_budgets(hardware, request, unknown_host_bytes=unknown, on_paper=True)


def try_out(traces: Traces, request: SearchRequest, case: _Case) -> tuple[SweepRow, Outcome]:
    """The row of one combination, and its answer, or what stood in its way."""
    step, hardware = case.step, case.hardware
    disk_bytes = 0 if request.disk_memory is None else parse_bytes(request.disk_memory)
    budgets = replace(budgets_on_paper(hardware, request), disk_bytes=disk_bytes)
    dtype, world_size = step.torch_dtype, request.world_size
    known: dict[str, Any] = {
        "model": step.model,
        "machine": hardware.name,
        "world_size": world_size,
        "batch": step.batch,
        "seq": step.seq,
        "dtype": "as built" if dtype is None else dtype_name(dtype),
        "device_budget_bytes": budgets.device_bytes,
        "host_budget_bytes": budgets.host_bytes,
        "disk_budget_bytes": disk_bytes,
        "method": case.method,
        "lora": step.lora,
        "quantised": step.quantised,
    }
    try:
        _check_network(hardware, world_size)
        found = replace(request, device_memory=budgets.device_bytes, device_reserve=None, host_reserve=None)
        if budgets.machine_bytes is None:
            found = replace(found, host_memory=None, host_budget=budgets.host_bytes)
        if case.choices is not None:
            answer = best_settings(step, hardware, found, traces, case.choices)
        else:
            trace = traces.get(step, hardware, found)
            known |= _step_of(trace, step)
            question = Question(trace, hardware, replace(found, activations=None))
            check_room(question)
            answer = with_exact_moves(Answer(plan_or_shortage(question), question), step, traces.built(step))
        known |= _step_of(answer.trace, step)
        simulated = simulate_step(answer.plan, answer.trace, hardware)
    except ElixirError as error:
        if isinstance(error, PlanError) and error.needed_bytes - error.available_bytes <= budgets.device_slack_bytes:
            full = replace(request, device_memory=budgets.with_slack().device_bytes, device_reserve=None)
            row, outcome = try_out(traces, full, case)
            if row.fits:
                return row, outcome
        reason, levers = str(error).splitlines()[0], error.levers if isinstance(error, PlanError) else ()
        enough = next((f"{lever.argument}={lever.value}" for lever in levers if lever.enough and lever.value), "")
        missing: dict[str, Any] = {"accumulation": request.accumulation, "reason": reason, "enough": enough}
        return SweepRow(**known, fits=False, **missing), error
    known["ranks_per_host"] = hardware.ranks_per_host(world_size)
    return SweepRow(
        **known, fits=True, reason="", **_measures(answer.plan, simulated, known["batch"], hardware)
    ), answer


def _step_of(trace: StepTrace, step: StepQuestion) -> dict[str, Any]:
    return {"model": trace.model_name, "batch": trace.step.samples or step.batch, "seq": trace.step.seq}


def _measures(plan: Plan, step: Simulation, samples: int, hardware: HardwareProfile) -> dict[str, Any]:
    predicted = plan.predicted
    fastest_s, slowest_s = predicted.range_s or (None, None)
    per_s = plan.world_size * plan.accumulation / step.step_s if step.step_s else None
    return {
        "step_s": step.step_s,
        "samples_per_s": None if per_s is None else samples * per_s,
        "tokens_per_s": None if per_s is None or plan.step.tokens is None else plan.step.tokens * per_s,
        "fastest_s": fastest_s,
        "slowest_s": slowest_s,
        "device_flops_per_s": predicted.flops_per_s,
        "peak_share": predicted.peak_share,
        "device_peak_bytes": predicted.device_peak_bytes,
        "host_peak_bytes": predicted.host_peak_bytes,
        "must_be_free_bytes": must_be_free_bytes(plan, hardware),
        "disk_peak_bytes": predicted.disk_peak_bytes,
        "bound_by": step.bound_by,
        "activations": activations_text(plan.activations) or None,
        "accumulation": plan.accumulation,
        "moments": plan.moments,
        "checkpoint": plan.step.checkpoint,
        "fused_kernels": plan.step.fused_kernels,
        "pass_size": plan.pass_size,
        **plan.counts,
        "block_count": plan.block_count,
        **{f"{link}_bytes": amount for link, amount in predicted.moved_bytes.items()},
    }


def with_network(
    hardware: HardwareProfile, network_bytes_per_s: float | None, devices_per_host: int | None = None
) -> HardwareProfile:
    """The machine with this bandwidth between machines, per machine and direction, and so many devices in each; as it
    is where None is given."""
    given = {"network_bytes_per_s": network_bytes_per_s, "devices_per_host": devices_per_host}
    return replace(hardware, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _check_network(hardware: HardwareProfile, world_size: int) -> None:
    if world_size > hardware.ranks_per_host(world_size) and hardware.network_bytes_per_s is None:
        raise InputError(
            f"{hardware.name} has {hardware.devices_per_host} devices a machine; for {world_size} give the network's "
            f"bandwidth between machines, or devices_per_host={world_size} (--devices-per-host) if one has as many"
        )
