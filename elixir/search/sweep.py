"""Which machines can train a model, and how fast: many plans, made and simulated without any of the machines.

`sweep` tries every combination it is given; `fit` walks known machines from the smallest until one can do it. Both
are pure: the same arguments give the same rows in every process, whatever machine they are asked on. Times are those of
`simulate_step`, so they are as good as the profile's rates (`docs/questions.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from elixir.errors import InputError, InputTypeError, PlanError
from elixir.hardware import HardwareProfile, load_hardware, preset, preset_names
from elixir.search.trial import HOST_PER_DEVICE_BYTE, Asked, SweepRow, Traces, TrainingStep, try_out, with_network
from elixir.units import parse_bytes

__all__ = ["HOST_PER_DEVICE_BYTE", "Fit", "SweepRow", "TrainingStep", "doublings", "fit", "sweep"]

Progress = Callable[[str, int, int], None]
"""Called with what comes next, how much is done, and of how much."""


@dataclass(frozen=True)
class Fit:
    """The answer of `fit`."""

    model: str
    best: SweepRow | None
    """The smallest machine that can train the model; None where none of them can."""
    rows: tuple[SweepRow, ...]
    """Per machine: its fewest devices that can, in order of size; then those that cannot, with their most devices."""


def sweep(
    models: Sequence[str],
    machines: Sequence[HardwareProfile | str],
    world_sizes: Sequence[int] = (1,),
    batches: Sequence[int] = (1,),
    *,
    step: TrainingStep | None = None,
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    disk_memory: str | int | None = None,
    network_bytes_per_s: float | None = None,
    overlap: bool = True,
    progress: Progress | None = None,
) -> list[SweepRow]:
    """A row for every model, batch, machine and world size, in this order of nesting.

    Args:
        models: names, config files or ``module:function``, as `elixir.models.build` takes them.
        machines: profiles, presets' names or profile files.
        world_sizes: numbers of ranks, one device each.
        batches: samples per rank.
        step: what else there is to a step; the defaults of `TrainingStep` else.
        device_memory: budget of one device. None: what the profile says, less a CUDA context.
        host_memory: budget of each machine. None: what its profile says, else `HOST_PER_DEVICE_BYTE`.
        disk_memory: budget of the disk of each machine, for states that do not fit elsewhere; None: they may not live there.
        network_bytes_per_s: between machines, per machine and direction. None: what the profile says. Without either a
            machine's own devices are the most.
        overlap: transfers run beside compute.
        progress: told before each combination.

    Raises:
        InputError, InputTypeError: an argument makes no sense, or no combination could even be planned.
        TraceError: no combination could even be traced. One that fails alone is a row with its reason.
    """
    asked = Asked(
        step or TrainingStep(), _bytes(device_memory), _bytes(host_memory), bool(overlap), _bytes(disk_memory)
    )
    profiles = [with_network(_profile(machine), network_bytes_per_s) for machine in machines]
    for name, values in (
        ("models", models),
        ("machines", machines),
        ("world_sizes", world_sizes),
        ("batches", batches),
    ):
        if isinstance(values, str) or not values:
            raise InputError(f"{name} must be a list of at least one, got {values!r}")
    _check_counts("world size", world_sizes)
    _check_counts("batch", batches)
    traces = Traces(asked.step)
    cases = [
        (model, batch, hardware, world_size)
        for model in models
        for batch in batches
        for hardware in profiles
        for world_size in world_sizes
    ]
    rows, errors = [], []
    for done, (model, batch, hardware, world_size) in enumerate(cases):
        if progress is not None:
            progress(f"{model}, batch {batch}, {world_size} x {hardware.name}", done, len(cases))
        row, error = try_out(traces, asked, model, batch, hardware, world_size)
        rows.append(row)
        errors.append(error)
    if all(error is not None and not isinstance(error, PlanError) for error in errors):
        raise next(error for error in errors if error is not None)
    return rows


def fit(
    model: str,
    machines: Sequence[HardwareProfile | str] | None = None,
    *,
    batch: int = 1,
    counts: Sequence[int] | None = None,
    step: TrainingStep | None = None,
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    disk_memory: str | int | None = None,
    network_bytes_per_s: float | None = None,
    overlap: bool = True,
    progress: Progress | None = None,
) -> Fit:
    """The smallest of the machines and device counts that can train `model`, and how fast; with what comes next.

    Size is device memory times count. Of equals the one with fewer devices comes first, then the order of `machines`.

    Args:
        machines: all presets with a GPU by default.
        counts: numbers of devices; by default 1, 2, 4, ... up to what one machine holds.

    The other arguments and the errors are those of `sweep`.
    """
    asked = Asked(
        step or TrainingStep(), _bytes(device_memory), _bytes(host_memory), bool(overlap), _bytes(disk_memory)
    )
    profiles = [
        with_network(profile, network_bytes_per_s)
        for profile in (map(preset, preset_names()) if machines is None else map(_profile, machines))
        if machines is not None or profile.device_kind == "cuda"
    ]
    _check_counts("batch", (batch,))
    if counts is not None:
        _check_counts("count", counts)
    traces = Traces(asked.step)
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
        row, error = try_out(traces, asked, model, batch, hardware, count)
        (found if row.fits else failed)[place] = row
        errors.append(error)
    if all(error is not None and not isinstance(error, PlanError) for error in errors):
        raise next(error for error in errors if error is not None)
    rows = [*found.values(), *(row for place, row in failed.items() if place not in found)]
    return Fit(rows[0].model, next(iter(found.values()), None), tuple(rows))


def doublings(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most` itself.

    >>> doublings(6)
    (1, 2, 4, 6)
    """
    powers = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return tuple(dict.fromkeys((*powers, most)))


def _profile(machine: HardwareProfile | str) -> HardwareProfile:
    if isinstance(machine, HardwareProfile):
        return machine
    if isinstance(machine, str):
        return load_hardware(machine)
    raise InputTypeError(f"a machine is a HardwareProfile or the name of a preset, got {type(machine).__name__}")


def _bytes(size: str | int | None) -> int | None:
    return None if size is None else parse_bytes(size)


def _check_counts(name: str, values: Iterable[int]) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"a {name} must be a whole number, 1 or larger, got {value!r}")
