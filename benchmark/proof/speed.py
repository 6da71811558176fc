"""Parts `resident` and `offload`: tokens per second of one contender."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

from benchmark.common import percentiles
from benchmark.proof import carried, ours
from benchmark.proof.contenders import PEERS, Running, max_norm
from benchmark.proof.jobs import Row
from benchmark.proof.models import numel_of, shape_of
from benchmark.proof.place import Place

WARM_UP_STEPS = 2
"""The first allocates, the second is the first with states."""
CORRECTION_STEPS = 6
"""Further steps of a contender that corrects its plan: `elixir.api.WARM_UP_STEPS` and `MEASURED_STEPS`, and the
move."""
LEAST_STEPS, MOST_STEPS = 3, 20
SETTINGS = (
    "micro", "keep", "stage", "sync_last", "ratio", "super_offload", "sub_group_size", "all_threads", "compile",
)  # fmt: skip
"""Options of contenders that a row repeats."""


def saved_at(place: Place, part: str, case: str, contender: str) -> Path:
    """Path of a contender's plan and trace, without the endings."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", f"{part}_{case}_{contender}")
    return place.folder / "plans" / name


def timed(running: Running, place: Place, *, warm_up: int, measure_s: float) -> dict[str, Any]:
    """Seconds of single steps, by marks between them, nothing waiting in between: steps may reach into each other.

    Raises:
        RuntimeError: the loss is not finite, or steps were not made as plans expect them to be.
    """
    losses = [running.step() for _ in range(warm_up - 1)]
    place.wait_until_quiet()
    place.sync()
    before = place.mark()
    losses.append(running.step())
    one_s = max(place.between_s(before, place.mark()), 1e-6)
    count = min(max(math.ceil(measure_s / one_s), LEAST_STEPS), MOST_STEPS)
    place.reset_peaks()
    marks = [place.mark()]
    for _ in range(count):
        losses.append(running.step())
        marks.append(place.mark())
    seconds = [place.between_s(a, b) for a, b in itertools.pairwise(marks)]
    place.sync()
    values = [float(loss) for loss in losses]
    loss = values[-1]
    if not math.isfinite(loss):
        raise RuntimeError(f"the loss of step {warm_up + count} is {loss}: what was timed is no training")
    p20, p50, p80 = percentiles(seconds)
    mean_s = sum(seconds) / len(seconds)
    found = {"steps": count, "mean_s": mean_s, "p20_s": p20, "p50_s": p50, "p80_s": p80, "loss": loss, "losses": values}
    return {**found, **place.peaks(), **running.account(count)}


def work(options: dict[str, Any], place: Place) -> Row:
    """Builds a contender within its budget and times it.

    Raises:
        NotRun: it cannot fit, by arithmetic, or is not installed.
    """
    place.limit_reserved(options.get("budget_bytes"))
    saved = saved_at(place, options["part"], options["case"], options["contender"])
    kind = options["kind"]
    if kind == "elixir":
        running = ours.run(options, place, saved, carried.choice_for(options, place))
    else:
        running = PEERS[kind](options, place)
    warm_up = WARM_UP_STEPS + (CORRECTION_STEPS if options.get("wrap") else 0)
    found = timed(running, place, warm_up=warm_up, measure_s=options["measure_s"])
    running.keep()
    tokens = options["batch"] * options["seq"]
    return {
        "kind": kind,
        "model": shape_of(options).name,
        "parameters": numel_of(shape_of(options)),
        "batch": options["batch"],
        "seq": options["seq"],
        "precision": options["precision"],
        "budget_bytes": options.get("budget_bytes"),
        # From the mean: steps of a contender that works ahead are not alike, and what counts is all of them.
        "tokens_per_s": tokens / found["mean_s"],
        "tokens_per_step": tokens,
        "max_norm": max_norm(options),
        **{key: options[key] for key in SETTINGS if key in options},
        **({"loss_form": options["loss"]} if "loss" in options else {}),  # "loss" is what was measured
        **found,
        **running.facts,
    }
