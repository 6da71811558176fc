"""Turns measured points into latency and rate: ``seconds = latency_s + amount / per_s``.

The fit minimises relative errors, so that a copy of a megabyte counts as much as one of a gigabyte. What it cannot
describe it refuses: too few points, times that say nothing about a rate, or an error beyond `ERROR_LIMIT`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from elixir.errors import ElixirError, InputError, RankError
from elixir.hardware.rate_fit import LARGEST_ALONE, RateFit
from elixir.microbench.bench import Bench, Effort, median_seconds

ERROR_LIMIT = 0.5
"""A fit that is off by more than this share at any point is left out."""
MIN_POINTS = 3
"""Least number of points, since two fit any line."""
MIN_RATE_SHARE = 0.6
"""Least share of the rate in the time of the largest amount. With less, the amounts were too small to show a rate, or
other work kept the cores busy: threads that wait for a core wait for milliseconds."""

MAX_LATENCY_S = 5e-3
"""Largest latency that is believed: a thread that waits for its turn on a core takes longer to start."""


@dataclass(frozen=True)
class Series:
    """Measured seconds by amount, for one key of `HardwareProfile.fits`."""

    key: str
    unit: str
    """The unit of amounts: ``bytes``, ``elements`` or ``FLOP``."""
    points: tuple[tuple[float, float], ...]
    """(amount, median seconds), amounts rising."""
    repeats: int
    """The fewest runs that any of the medians is of."""
    how: str
    """A description of the work that ran."""
    ranks: int = 1
    """How many ranks did so at once."""


@dataclass(frozen=True)
class Measured:
    """A key, what was measured for it, and the fit, or why there is none."""

    key: str
    series: Series | None
    """None where the measurement itself failed."""
    fit: RateFit | None
    problem: str = ""

    @property
    def per_s(self) -> float:
        """Rate of large amounts: the fit's; without a fit that of the largest amount, latency and all.

        Raises:
            InputError: nothing was measured.
        """
        if self.fit is not None:
            return self.fit.per_s
        if self.series is None or not self.series.points:
            raise InputError(f"{self.key} could not be measured: {self.problem}")
        amount, seconds = self.series.points[-1]
        return amount / seconds

    @property
    def source(self) -> str:
        """Text for `HardwareProfile.sources`."""
        if self.series is None:
            return f"not measured: {self.problem}"
        text = f"measured, {len(self.series.points)} amounts, each the median of {self.series.repeats} runs or more: "
        text += self.series.how
        return text + ("" if self.fit else f"; no fit ({self.problem}), so {LARGEST_ALONE}")


@dataclass(frozen=True)
class Job:
    """One thing to measure."""

    title: str
    keys: tuple[str, ...]
    """The keys for which it gives series."""
    run: Callable[[], Series | Sequence[Series]]

    def measured(self) -> list[Measured]:
        """Runs the job and fits its series; runs it once more if there is no fit, since something came between.

        What the device cannot do, or has no memory for, becomes a problem with a name.
        """
        try:
            first = [fitted(series) for series in self.series()]
            if all(result.fit is not None for result in first):
                return first
            # All ranks have the same points, so all of them do this or none.
            again = [fitted(series) for series in self.series()]
            return [a if a.fit is not None else b for a, b in zip(first, again, strict=True)]
        except RankError:
            raise  # the other ranks are gone: nothing after this would work either
        except (ElixirError, RuntimeError, NotImplementedError) as error:
            problem = (str(error).strip() or type(error).__name__).splitlines()[0]
            return [Measured(key, None, None, problem) for key in self.keys]

    def series(self) -> list[Series]:
        """Runs the job: one series for each key."""
        found = self.run()
        return [found] if isinstance(found, Series) else [*found]


def fitted(series: Series) -> Measured:
    """Fits `series`, or says why there is no fit."""
    try:
        return Measured(series.key, series, fit_points(series.points))
    except InputError as error:
        return Measured(series.key, series, None, str(error))


def fit_points(points: Sequence[tuple[float, float]]) -> RateFit:
    """Finds latency and rate with the least squared relative error over `points` of (amount, seconds).

    Raises:
        InputError: no fit that could be believed; the message says why.
    """
    for amount, seconds in points:
        if not (0 < amount < math.inf and 0 < seconds < math.inf):
            raise InputError(f"amounts and seconds must be above 0 and finite, found {seconds!r} s for {amount!r}")
    if len({amount for amount, _ in points}) < MIN_POINTS:
        raise InputError(f"a fit needs {MIN_POINTS} different amounts or more, found {len(points)} points")
    import numpy as np
    from scipy.optimize import lsq_linear

    amounts, seconds_ = np.array(points, dtype=np.float64).T
    # In units of the largest amount and its time, so that both unknowns are of order one; each row over its own time.
    amount_unit, seconds_unit = float(amounts.max()), float(seconds_[amounts.argmax()])
    times = seconds_ / seconds_unit
    rows = np.stack([1 / times, amounts / amount_unit / times], axis=1)
    solved = lsq_linear(rows, np.ones(len(times)), bounds=(0, np.inf), method="bvls")
    latency, inverse = (float(value) for value in solved.x)
    if not solved.success or not (math.isfinite(latency) and math.isfinite(inverse)):
        raise InputError(f"the fit failed: {solved.message}")
    if inverse < MIN_RATE_SHARE * (latency + inverse):
        raise InputError(
            f"seconds hardly grow with the amount: {latency / (latency + inverse):.0%} of the largest amount's time "
            "would be latency; measure larger amounts, on a quieter machine"
        )
    if latency * seconds_unit > MAX_LATENCY_S:
        raise InputError(
            f"a latency of {latency * seconds_unit * 1e3:.1f} ms is too long, at most {MAX_LATENCY_S * 1e3:g} ms is "
            f"accepted: other programs keep the cores busy; measure again on a quieter machine"
        )
    errors = np.abs(rows @ solved.x - 1)
    worst = int(errors.argmax())
    if errors[worst] > ERROR_LIMIT:
        raise InputError(
            f"latency and rate do not describe it: off by {errors[worst]:.0%} at {amounts[worst]:.4g}, at most "
            f"{ERROR_LIMIT:.0%} is accepted; measure again on a quieter machine"
        )
    return RateFit(
        latency_s=latency * seconds_unit,
        per_s=amount_unit / (inverse * seconds_unit),
        error=float(errors[worst]),
        points=tuple((float(amount), float(seconds)) for amount, seconds in points),
    )


def sweep(
    bench: Bench,
    plan: Effort,
    key: str,
    unit: str,
    how: str,
    cases: Iterable[tuple[float, Callable[[], Callable[[], object]]]],
    *,
    longest_s: float = math.inf,
) -> Series:
    """Times growing amounts.

    Args:
        cases: (amount, function that prepares and gives what is timed); prepared one after the other, so that memory of
            one is free for the next.
        longest_s: stop before an amount that would take longer, once there are points enough for a fit.
    """
    points: list[tuple[float, float]] = []
    fewest = plan.max_repeats
    for amount, prepare in cases:
        if len(points) >= MIN_POINTS and points[-1][1] * amount / points[-1][0] > longest_s:
            break
        seconds, repeats = median_seconds(prepare(), bench.device, plan, bench.ranks)
        points.append((float(amount), seconds))
        fewest = min(fewest, repeats)
    return Series(key, unit, tuple(points), fewest, bench.text(how), bench.ranks.size)


def geometric(smallest: int, largest: int, count: int, multiple: int = 1) -> list[int]:
    """`count` amounts or fewer, evenly spread on a logarithmic scale, each a multiple; the last is `largest`."""
    smallest = min(smallest, largest)
    exact = [smallest * (largest / smallest) ** (step / max(count - 1, 1)) for step in range(count)]
    return sorted({max(multiple, round(amount / multiple) * multiple) for amount in exact[:-1]} | {largest})


def windows(buffer: torch.Tensor, numel: int) -> list[torch.Tensor]:
    """Pieces of `numel` elements that follow each other in `buffer`, as many as there are."""
    return [buffer[start : start + numel] for start in range(0, buffer.numel() - numel + 1, numel)]


def in_turns(run: Callable[..., object], numel: int, *buffers: torch.Tensor) -> Callable[[], object]:
    """Calls `run` with the first windows of all buffers, then with the second ones, and so on.

    None of them is found in a cache, as in a step that walks through all weights.
    """
    turns = itertools.cycle(zip(*(windows(buffer, numel) for buffer in buffers), strict=True))
    return lambda: run(*next(turns))
