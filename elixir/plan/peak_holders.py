"""The holders of memory at the peak of forward and backward: origins of a trace, those of repeated layers as one."""

from __future__ import annotations

from elixir.step_trace import Contributor, Kind, StepTrace
from elixir.units import format_bytes


def peak_holders(trace: StepTrace) -> list[Contributor]:
    """All of them, the largest first; ``layers.*.fc1`` is that module of every layer."""
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
