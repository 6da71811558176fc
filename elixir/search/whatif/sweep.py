"""Asks which machines can train a model, and how fast: many plans, made and simulated without any of the machines.

`sweep` tries every combination it is given; `fit` walks known machines from the smallest until one can do it. Both
are pure: the same arguments give the same rows in every process, whatever machine they are asked on. Times are those of
`simulate_step`, so they are as good as the profile's rates (`docs/planning.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elixir.errors import ElixirError, InputError, PlanError
from elixir.hardware.profile import HardwareProfile, preset, preset_names
from elixir.search.question import StepQuestion
from elixir.search.request import Progress, SearchRequest, check_count
from elixir.search.searches import profile_for
from elixir.search.whatif.sweep_row import (
    HOST_PER_DEVICE_BYTE,
    SweepRow,
    Traces,
    try_out,
    with_network,
)

__all__ = ["HOST_PER_DEVICE_BYTE", "Fit", "SweepRow", "doublings", "fit", "sweep"]

ON_PAPER = SearchRequest(world_size=1, optimizer_type="AdamW")
"""The options for every machine, unless the caller gives others."""
STEP_ON_PAPER = StepQuestion(dtype="bf16")
"""The step, likewise."""


@dataclass(frozen=True)
class Fit:
    """The answer of `fit`."""

    model: str
    best: SweepRow | None
    """The smallest machine that can train the model; None where none of them can."""
    rows: tuple[SweepRow, ...]
    """Per machine: its fewest devices that can, in order of size; then those that cannot, with their most devices."""


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
    traces = Traces(step)
    cases = [
        (model, batch, hardware, world_size)
        for model in models
        for batch in batches
        for hardware in profiles
        for world_size in world_sizes
    ]
    rows: list[SweepRow] = []
    errors = []
    for done, (model, batch, hardware, world_size) in enumerate(cases):
        if progress is not None:
            progress(f"{model}, batch {batch}, {world_size} x {hardware.name}", done, len(cases))
        try:
            row, error = try_out(traces, replace(request, world_size=world_size), model, batch, hardware)
        except KeyboardInterrupt:
            if not rows:
                raise
            raise SweepInterrupted(rows, done, len(cases)) from None
        if each is not None and _was_planned(error):
            each(row)
        rows.append(row)
        errors.append(error)
    if not any(map(_was_planned, errors)):
        raise next(error for error in errors if error is not None)
    return rows


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
    **options: Any,
) -> Fit:
    """The smallest of the machines and device counts that can train `model`, and how fast; with what comes next.

    Size is device memory times count. Of equals the one with fewer devices comes first, then the order of `machines`.

    Args:
        machines: all presets with a GPU by default.
        counts: numbers of devices; by default 1, 2, 4, ... up to what one machine holds.

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
    traces = Traces(step)
    candidates = [
        (hardware.device_memory_bytes * count, count, place, hardware)
        for place, hardware in enumerate(profiles)
        for count in (doublings(hardware.devices_per_host) if counts is None else sorted(dict.fromkeys(counts)))
    ]
    if not candidates:
        raise InputError("no machine to try: give at least one")
    candidates.sort(key=lambda candidate: candidate[:3])
    found: dict[int, SweepRow] = {}
    failed: dict[int, SweepRow] = {}
    errors = []
    for done, (_, count, place, hardware) in enumerate(candidates):
        if place in found:
            continue
        if progress is not None:
            progress(f"{model} on {count} x {hardware.name}", done, len(candidates))
        try:
            row, error = try_out(traces, replace(request, world_size=count), model, batch, hardware)
        except KeyboardInterrupt:
            if not (found or failed):
                raise
            raise SweepInterrupted(_fit_of(found, failed), done, len(candidates)) from None
        if each is not None and _was_planned(error):
            each(row)
        (found if row.fits else failed)[place] = row
        errors.append(error)
    if not any(map(_was_planned, errors)):
        raise next(error for error in errors if error is not None)
    return _fit_of(found, failed)


def _was_planned(error: ElixirError | None) -> bool:
    """Whether a combination got as far as a plan, or to the memory that it lacks."""
    return error is None or isinstance(error, PlanError)


def _fit_of(found: Mapping[int, SweepRow], failed: Mapping[int, SweepRow]) -> Fit:
    rows = [*found.values(), *(row for place, row in failed.items() if place not in found)]
    return Fit(rows[0].model, next(iter(found.values()), None), tuple(rows))


def doublings(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most` itself.

    >>> doublings(6)
    (1, 2, 4, 6)
    """
    powers = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return tuple(dict.fromkeys((*powers, most)))
