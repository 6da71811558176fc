"""The report: each promise with its bar, and a table of all rows, as Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.proof.contenders import MAX_NORM
from benchmark.proof.jobs import PARTS, Job, Row

MEMORY_WORST_PERCENT, MEMORY_MEAN_PERCENT, MEMORY_CASES = 2.0, 0.5, 16
RESIDENT_RATIO = 0.98
OFFLOAD_RATIO, OFFLOAD_BEST_RATIO, FITS_RATIO, STATES_ONLY_RATIO = 1.5, 3.0, 1.0, 0.8
CAPACITY_NUMEL, CAPACITY_DEVICE_BYTES, CAPACITY_HOST_BYTES = 15e9, 139 * 2**30, 128 * 2**30
LINKS_PERCENT = 10.0

HOST_SHARE = 0.8
"""Least share of a machine's host memory that is left to a process. A machine of 128 GiB may give 106."""
SHOWN = "shown, not judged"
SHOWN_WAIT_S = 0.0005
"""Shorter waits are not shown."""

_OFFLOADING = ("fsdp2 offload", "zero", "torchao")
_FITTING = ("fsdp2, ", "fsdp2 chunked", "fsdp2 keep", "plain, ", "plain chunked")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One promise."""

    part: str
    promise: str
    bar: str
    measured: str
    met: bool | None
    """None without enough rows to say."""


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Every promise, in the order of the parts; those without rows are open."""
    ok = [row for row in rows if row["status"] == "ok"]
    found = [*_memory(ok), *_resident(ok), *_offload(ok), *_capacity(ok), *_links(ok)]
    return sorted(found, key=lambda verdict: PARTS.index(verdict.part))


def distance_percent(row: Row) -> float:
    """How far a memory row is off: the worse of backward and whole step."""
    return max(abs(row["backward_percent"]), abs(row["step_percent"]))


def _memory(ok: Sequence[Row]) -> list[Verdict]:
    off = [distance_percent(row) for row in ok if row["part"] == "memory"]
    count = f"{len(off)} cases"
    if not off:
        return [Verdict("memory", "peaks are as predicted", f"{MEMORY_CASES} cases or more", "0 cases", None)]
    enough = len(off) >= MEMORY_CASES
    worst, mean = max(off), sum(off) / len(off)

    def met(good: bool) -> bool | None:
        return good if enough or not good else None  # few cases can refute, not confirm

    return [
        Verdict(
            "memory",
            "peak, worst case",
            f"within {MEMORY_WORST_PERCENT:g} %",
            f"{worst:.3f} % of {count}",
            met(worst <= MEMORY_WORST_PERCENT),
        ),
        Verdict(
            "memory",
            "peak, mean",
            f"within {MEMORY_MEAN_PERCENT:g} %",
            f"{mean:.3f} % of {count}",
            met(mean <= MEMORY_MEAN_PERCENT),
        ),
    ]


def _by_case(ok: Sequence[Row], part: str) -> dict[str, list[Row]]:
    cases: dict[str, list[Row]] = {}
    for row in ok:
        if row["part"] == part and "tokens_per_s" in row:
            cases.setdefault(row["case"], []).append(row)
    return cases


def _ours(rows: Sequence[Row]) -> Row | None:
    """The automatic plan; with more room where the first had too little."""
    named = {row["contender"]: row for row in rows}
    return named.get("elixir") or named.get("elixir, more room")


def _best(rows: Sequence[Row], names: tuple[str, ...]) -> Row | None:
    found = [row for row in rows if row["contender"].startswith(names)]
    return max(found, key=lambda row: row["tokens_per_s"], default=None)


def _ratio(mine: Row, other: Row) -> float:
    if mine["tokens_per_step"] != other["tokens_per_step"]:
        raise ValueError(f"{mine['case']}: {mine['tokens_per_step']} tokens a step, not {other['tokens_per_step']}")
    return float(mine["tokens_per_s"] / other["tokens_per_s"])


def _resident(ok: Sequence[Row]) -> list[Verdict]:
    found = []
    for case, rows in _by_case(ok, "resident").items():
        mine = _ours(rows)
        # Of equal numbers: without float32 masters is not the same training.
        other = _best([row for row in rows if row["contender"] in ("plain", "ddp")], ("plain", "ddp"))
        if mine is None or other is None:
            found.append(Verdict("resident", case, f"{RESIDENT_RATIO:g} of plain PyTorch", "no pair", None))
            continue
        ratio = _ratio(mine, other)
        shown = f"{ratio:.3f} of {other['contender']} ({_tokens(mine)} over {_tokens(other)})"
        bar = f"{RESIDENT_RATIO:g} of the faster of plain and DDP"
        found.append(Verdict("resident", case, bar, shown, ratio >= RESIDENT_RATIO))
    return found or [Verdict("resident", "speed where all fits", f"{RESIDENT_RATIO:g}", "no rows", None)]


def _offload(ok: Sequence[Row]) -> list[Verdict]:
    found: list[Verdict] = []
    ratios: list[float] = []
    cases = _by_case(ok, "offload")
    # Where the device has no room for all states there is no resident speed to compare with. Where it has, plans may
    # put some on the host all the same, if that is faster.
    free = {
        row["model"]: row
        for rows in cases.values()
        for row in rows
        if row["contender"] == "elixir, no budget" and row["resident_bytes"] <= row["planned_device_bytes"]
    }
    for case, rows in cases.items():
        if any(row["contender"] == "elixir, no budget" for row in rows):
            continue
        mine, fitting = _ours(rows), _best(rows, _FITTING)
        if not _is_judged(rows[0]):
            found.append(_shown(case, mine, _best(rows, (*_FITTING, *_OFFLOADING))))
            continue
        offloading = _best([*rows, *_in_smaller_budgets(rows[0], ok)], _OFFLOADING)
        other = fitting or offloading
        if mine is None or other is None:
            who = "no run of ours" if mine is None else "no peer ran"
            found.append(Verdict("offload", case, f"{OFFLOAD_RATIO:g} of the best peer", who, None))
        else:
            least = FITS_RATIO if fitting else OFFLOAD_RATIO
            peers = [row for row in (fitting, offloading) if row is not None]
            best = max(peers, key=lambda row: row["tokens_per_s"])
            ratio = _ratio(mine, best)
            ratios += [] if fitting else [ratio]
            where = "" if best["case"] == case else f" in {best['budget_bytes'] / 1e9:g} GB"
            shown = f"{ratio:.2f} of {best['contender']}{where} ({_tokens(mine)} over {_tokens(best)})"
            bar = f"{least:g} of the best peer" + (", one of which fits" if fitting else "")
            found.append(Verdict("offload", case, bar, shown, ratio >= least))
        found += _states_only(case, mine, free)
    found.sort(key=lambda verdict: verdict.promise)
    best_ratio = max(ratios, default=None)
    shown = "no pair" if best_ratio is None else f"{best_ratio:.2f}"
    met = None if best_ratio is None else best_ratio >= OFFLOAD_BEST_RATIO
    return [*found, Verdict("offload", "somewhere", f"{OFFLOAD_BEST_RATIO:g} of the best peer", shown, met)]


def _is_judged(row: Row) -> bool:
    """Whether all gradients are waited for, and none is clipped."""
    return bool(row.get("max_norm", MAX_NORM) == MAX_NORM)


def _shown(case: str, mine: Row | None, other: Row | None) -> Verdict:
    """No bar was set for steps without clipping, which suit us better, nor for those that are always clipped."""
    if mine is None or other is None:
        return Verdict("offload", case, SHOWN, "no run of ours" if mine is None else "no peer ran", None)
    ratio = f"{_ratio(mine, other):.2f} of {other['contender']} ({_tokens(mine)} over {_tokens(other)})"
    return Verdict("offload", case, SHOWN, ratio, None)


def _in_smaller_budgets(row: Row, ok: Sequence[Row]) -> list[Row]:
    """Runs of a case's model with a whole batch at once in less memory: who offloads everything can do no more in
    more."""
    budget = row["budget_bytes"]
    return [
        other
        for other in ok
        if other["part"] == "offload"
        and other.get("model") == row["model"]
        and other.get("max_norm", MAX_NORM) == row.get("max_norm", MAX_NORM)
        and other.get("micro") == other.get("batch")
        and other.get("tokens_per_step") == row["tokens_per_step"]
        and budget is not None
        and (other.get("budget_bytes") or budget) < budget
    ]


def _states_only(case: str, mine: Row | None, free: dict[str, Row]) -> list[Verdict]:
    """Whether weights, gradients and activations fit and only the states do not."""
    if mine is None or mine["budget_bytes"] is None or mine["model"] not in free:
        return []
    if not mine["without_states_bytes"] <= mine["budget_bytes"] < mine["resident_bytes"]:
        return []
    ratio = _ratio(mine, free[mine["model"]])
    bar = f"{STATES_ONLY_RATIO:g} of the speed without a budget"
    shown = f"{ratio:.2f} ({_tokens(mine)} over {_tokens(free[mine['model']])})"
    return [Verdict("offload", f"{case}, only the states do not fit", bar, shown, ratio >= STATES_ONLY_RATIO)]


def _capacity(ok: Sequence[Row]) -> list[Verdict]:
    rows = [row for row in ok if row["part"] == "capacity"]
    bar = f"{CAPACITY_NUMEL / 1e9:g} B parameters on {CAPACITY_DEVICE_BYTES / 2**30:g} + 128 GiB"
    if not rows:
        return [Verdict("capacity", "largest model that trains", bar, "no rows", None)]
    row = max(rows, key=lambda row: row["parameters"])
    # Where the user has said what may be planned with, the system says too little.
    host_bytes = row.get("host_given_bytes") or row["host_total_bytes"]
    small = (
        row.get("device_total_bytes", 0) < 0.99 * CAPACITY_DEVICE_BYTES or host_bytes < HOST_SHARE * CAPACITY_HOST_BYTES
    )
    reached = row["parameters"] >= CAPACITY_NUMEL
    shown = f"{row['parameters'] / 1e9:.4g} B ({row['layers']} layers of {row['hidden']})"
    # On a smaller machine less proves nothing.
    return [Verdict("capacity", "largest model that trains", bar, shown, reached if reached or not small else None)]


def _links(ok: Sequence[Row]) -> list[Verdict]:
    bar = f"within {LINKS_PERCENT:g} % on average"
    rows = [row for row in ok if row["part"] == "links" and row.get("kind") == "compare"]
    if not rows:
        return [Verdict("links", "simulated step time", bar, "no rows", None)]
    row = rows[-1]
    shown = f"{row['mean_percent']:.1f} % of {len(row['cases'])} cases, worst {row['worst_percent']:.1f} %"
    return [Verdict("links", "simulated step time", bar, shown, row["mean_percent"] <= LINKS_PERCENT)]


def _tokens(row: Row) -> str:
    return f"{row['tokens_per_s']:,.0f} tokens/s"


def missing(rows: Sequence[Row], jobs: Mapping[str, Sequence[Job]]) -> dict[str, list[str]]:
    """The answers that each part lacks, and why as far as rows tell; nothing for a part that has all its answers.

    Args:
        rows: of all runs in a folder.
        jobs: of every part.
    """
    judged = {(verdict.part, verdict.promise): verdict for verdict in verdicts(rows)}
    by_id = {f"{row['part']}/{row['case']}/{row['contender']}": row for row in rows}
    found: dict[str, list[str]] = {}
    for part in PARTS:
        lines: list[str] = []
        if part == "memory":
            count = sum(row["part"] == part and row["status"] == "ok" for row in rows)
            if count < MEMORY_CASES:
                lines = [
                    f"{MEMORY_CASES - count} more cases, {count} of {MEMORY_CASES} are there",
                    *_troubles(jobs.get(part, ()), by_id),
                ]
        elif part == "links":
            measured = any(row["part"] == part and row.get("kind") == "measure" for row in rows)
            lines += [] if measured else ["this machine's measurement", *_troubles(jobs.get(part, ()), by_id)]
            if judged.get((part, "simulated step time"), _NOT_JUDGED).met is None:
                lines.append("a comparison: it needs the measurement, and a run of ours in resident or offload")
        else:
            cases: dict[str, list[Job]] = {}
            for job in jobs.get(part, ()):
                cases.setdefault(job.case, []).append(job)
            for case, its in cases.items():
                lines += _missing_in(part, case, its, judged, by_id)
        found[part] = lines
    return found


def _missing_in(
    part: str, case: str, jobs: Sequence[Job], judged: Mapping[tuple[str, str], Verdict], by_id: Mapping[str, Row]
) -> list[str]:
    """The gap of one case: which side has no time, and what became of its jobs."""
    ran = [job for job in jobs if by_id.get(job.id, {}).get("status") == "ok"]
    mine = [job for job in jobs if job.contender.startswith("elixir")]
    if part == "capacity" or len(mine) == len(jobs):  # no pair
        lacks = {} if ran else {"no run of ours": mine}
    else:
        verdict = judged.get((part, case))
        if verdict is not None and (verdict.met is not None or (verdict.bar == SHOWN and "over" in verdict.measured)):
            return []
        peers = [job for job in jobs if job not in mine and job.contender != "plain-bf16"]
        lacks = {
            side: its
            for side, its in (("no run of ours", mine), ("no run of a peer", peers))
            if not any(job in ran for job in its)
        }
    return [f"{case}: {side}; {'; '.join(_troubles(its, by_id)) or 'not begun'}" for side, its in lacks.items()]


_NOT_JUDGED = Verdict("", "", "", "", None)


def _troubles(jobs: Sequence[Job], by_id: Mapping[str, Row]) -> list[str]:
    """Outcomes of jobs that have a row and no result."""
    rows = [by_id[job.id] for job in jobs if job.id in by_id and by_id[job.id]["status"] != "ok"]
    return [f"{row['contender']}: {row['status']} ({row.get('why', 'no reason given')})" for row in rows]


def markdown(rows: Sequence[Row], left_out: Sequence[str] = (), jobs: Mapping[str, Sequence[Job]] | None = None) -> str:
    """The whole report.

    Args:
        rows: of all runs in a folder.
        left_out: ids of jobs that this run had no time for.
        jobs: of every part, so that the report says what each lacks.
    """
    lines = ["# What one run of `benchmark/gpu_proof.py` showed", ""]
    first = next((row for row in rows if "device" in row), None)
    if first is None:
        lines += ["Nothing has been run.", ""]
    else:
        lines += [
            f"{first['device']}, torch {first['torch']}, CUDA {first.get('cuda')}, Elixir {first['elixir']}, "
            f"{first['host_total_bytes'] / 2**30:.0f} GiB of host memory, {first['date']}.",
            "",
        ]
        if first.get("rehearsal"):
            lines += [
                "**A rehearsal: toys on the CPU, to see that everything runs. No figure in it says anything about a "
                "GPU,"
                " and none is compared with a bar.**",
                "",
            ]
    word = {True: "met", False: "MISSED", None: "open"}
    rehearsed = first is not None and bool(first.get("rehearsal"))

    def result(verdict: Verdict) -> str:
        shown = verdict.bar == SHOWN
        return "rehearsed" if rehearsed else "shown" if shown else word[verdict.met]

    table = [[v.part, v.promise, v.bar, v.measured, result(v)] for v in verdicts(rows)]
    lines += _table(("part", "promise or case", "bar", "measured", "result"), table)
    if jobs is not None:
        lines += ["", "What is missing for an answer, part by part:", ""]
        for part, lacks in missing(rows, jobs).items():
            lines += [f"* {part}: nothing"] if not lacks else [f"* {part}:", *(f"    * {lack}" for lack in lacks)]
    details = [
        [row["part"], row["case"], row["contender"], row["status"], _outcome(row), f"{row.get('wall_s', 0):.0f}"]
        for row in rows
    ]
    lines += ["", "All rows:", "", *_table(("part", "case", "who", "status", "outcome", "took, s"), details)]
    if left_out:
        lines += ["", "Not begun, for lack of time (run it again with the same `--out`):", ""]
        lines += [f"* {name}" for name in left_out]
    return "\n".join([*lines, ""])


def _outcome(row: Row) -> str:
    if row["status"] != "ok":
        return str(row.get("why", ""))
    if row["part"] == "memory":
        reserved = row["measured_reserved_bytes"]
        text = f"backward {row['backward_percent']:+.3f} %, step {row['step_percent']:+.3f} % of {_gib(row['measured_step_bytes'])}"
        return text + (f", reserved {_gib(reserved)}" if reserved else "")
    if row["part"] == "capacity":
        return f"{row['parameters'] / 1e9:.4g} B parameters, losses {', '.join(f'{x:.3f}' for x in row['losses'])}"
    if "tokens_per_s" in row:
        text = f"{_tokens(row)}, step {row['p50_s']:.4g} s ({row['p20_s']:.4g} to {row['p80_s']:.4g})"
        reserved, short = row.get("max_reserved_bytes"), row.get("num_alloc_retries")
        text += f", reserved {_gib(reserved)}" if reserved else ""
        text += f", the allocator was short {short} times" if short else ""
        return text + _waits(row) + _early(row)
    if "outcome" in row:
        return str(row["outcome"])
    if row.get("kind") == "compare":
        return f"mean {row['mean_percent']:.1f} %, worst {row['worst_percent']:.1f} %"
    return f"{row['hardware']}"


def _waits(row: Row) -> str:
    """Says where steps of ours stood still: the host until work was issued, and compute on the device for it."""
    found = []
    for who, key in (("the host", "waited_s_per_step"), ("the device", "stream_waited_s_per_step")):
        waits = [f"{lane} {seconds:.3f} s" for lane, seconds in row.get(key, {}).items() if seconds >= SHOWN_WAIT_S]
        found += [f", {who} waited for {' and '.join(waits)} a step"] if waits else []
    return "".join(found)


def _early(row: Row) -> str:
    """The course of steps of ours: states made before the norm was known, and the form of CPU Adam."""
    if not row.get("host_adam_forms") and not row.get("early_states_made"):
        return ""
    forms = ", ".join(row["host_adam_forms"]) or "none"
    kept = f"early states kept {row['early_states_kept']} of {row['early_states_made']}"
    return f", {kept}, clipped {row['clipped_steps']} of {row['steps']} steps, CPU Adam: {forms}"


def _gib(amount: float) -> str:
    return f"{amount / 2**30:.2f} GiB"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    return [line(head), line(["---"] * len(head)), *map(line, rows)]
