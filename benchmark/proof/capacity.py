"""Part `capacity`: the largest OPT-like model that plans say can be trained here, and three steps of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from benchmark.proof import ours
from benchmark.proof.contenders import BYTES_PER_NUMEL
from benchmark.proof.jobs import NotRun, Row
from benchmark.proof.models import numel_of
from benchmark.proof.place import Place
from benchmark.proof.speed import saved_at
from elixir.errors import PlanError
from elixir.models.model_shape import ModelShape, describe

STEPS = 3
LADDER = ("opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "opt-30b", "opt-66b", "opt-175b")
"""Widths that are tried; between two of them layers are added to the smaller."""

T = TypeVar("T")


def with_layers(shape: ModelShape, layers: int) -> ModelShape:
    """The same width, and other depth."""
    return shape.changed(layers=layers, name=f"opt-like {shape.hidden}x{layers}")


def largest(
    ladder: Sequence[ModelShape],
    fits: Callable[[ModelShape], T | None],
    may_fit: Callable[[ModelShape], bool] = lambda shape: True,
) -> tuple[ModelShape, T] | None:
    """The largest shape that fits, and what `fits` said of it: over the ladder first, then over layers.

    What fits is taken to fit with fewer layers too, and any shape of the ladder to fit where a later one does.

    Args:
        ladder: from small to large.
        fits: None for what does not; takes its time.
        may_fit: False where arithmetic says that it cannot. What may, most often does, so the largest such is tried
            first.
    """

    def last(count: int, at: Callable[[int], ModelShape]) -> tuple[int, ModelShape, T] | None:
        """The last of `count` shapes that fits, and its place."""
        shapes = [at(index) for index in range(count)]
        while shapes and not may_fit(shapes[-1]):
            shapes.pop()
        low, high, found = 0, len(shapes), None  # all below `low` fit, none from `high` on
        step = 1
        while low < high:
            # Downwards from the last in growing steps, and once one fits in halves.
            middle = max(high - step, low) if found is None else (low + high) // 2
            step *= 2
            answer = fits(shapes[middle])
            if answer is None:
                high = middle
            else:
                low, found = middle + 1, (middle, shapes[middle], answer)
        return found

    best = last(len(ladder), ladder.__getitem__)
    if best is None:  # even the smallest is too deep
        best = last(ladder[0].layers - 1, lambda index: with_layers(ladder[0], index + 1))
        return None if best is None else best[1:]
    index, base, _ = best
    numel = numel_of(base)
    most = numel_of(ladder[index + 1]) if index + 1 < len(ladder) else 2 * numel
    more = (most - numel) // (
        numel_of(with_layers(base, base.layers + 1)) - numel
    )  # as many as the next of the ladder has, which does not fit
    return (last(more, lambda index: with_layers(base, base.layers + 1 + index)) or best)[1:]


def work(options: dict[str, Any], place: Place) -> Row:
    """Finds it, builds it, trains it.

    Raises:
        NotRun: not even one layer fits.
    """
    place.limit_reserved(options.get("budget_bytes"))
    hardware = place.hardware()
    free = place.free_device_bytes()
    device_bytes = int(min(options.get("budget_bytes") or free, free) * options["share"])
    host_bytes = options.get("host_bytes") or int(place.free_host_bytes() * options["host_share"])
    plans_tried: list[str] = []

    def asked(shape: ModelShape) -> dict[str, Any]:
        return {**options, "model": "opt-125m", "changes": _changes(shape)}

    def fits(shape: ModelShape) -> ours.Choice | None:
        try:
            found = ours.choose(asked(shape), hardware, device_bytes, host_bytes)
        except PlanError:
            found = None
        plans_tried.append(f"{numel_of(shape) / 1e9:.3g} B: {'does not fit' if found is None else 'fits'}")
        return found

    def may_fit(shape: ModelShape) -> bool:
        return numel_of(shape) * BYTES_PER_NUMEL <= device_bytes + host_bytes

    began = time.perf_counter()
    ladder = [describe("opt-125m").changed(**changes) for changes in options["ladder"]]
    found = largest(ladder or [describe(name) for name in LADDER], fits, may_fit)
    planned_s = time.perf_counter() - began
    if found is None:
        raise NotRun(f"not one layer fits {device_bytes} device and {host_bytes} host bytes: {'; '.join(plans_tried)}")
    shape, choice = found
    running = ours.run(
        # Host and device are those that were searched with, not what is free after the search.
        {**asked(shape), "host_bytes": host_bytes, "planned_device_bytes": device_bytes},
        place,
        saved_at(place, options["part"], options["case"], options["contender"]),
        choice,
    )
    built_s = time.perf_counter() - began - planned_s
    place.reset_peaks()
    losses, seconds = [], []
    for _ in range(STEPS):
        start = place.mark()
        losses.append(float(running.step()))
        seconds.append(place.between_s(start, place.mark()))
    peaks = place.peaks()
    running.keep()
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"losses are {losses}: that is no training")
    if len(set(losses)) == 1:
        raise RuntimeError(f"losses are {losses}: nothing was learned, so nothing was trained")
    return {
        "kind": "elixir",
        "model": shape.name,
        "parameters": numel_of(shape),
        "layers": shape.layers,
        "hidden": shape.hidden,
        "batch": options["batch"],
        "seq": options["seq"],
        "precision": options["precision"],
        "plans_tried": plans_tried,
        "planning_s": planned_s,
        "building_s": built_s,
        "losses": losses,
        "steps_s": seconds,
        "tokens_per_step": options["batch"] * options["seq"],
        **peaks,
        **running.facts,
    }


def _changes(shape: ModelShape) -> dict[str, Any]:
    fields = ("name", "layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "positions")
    return {name: getattr(shape, name) for name in fields}
