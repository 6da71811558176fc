"""Every job, in the order in which they are worth running.

Seconds are guesses until a GPU has been seen; they only decide what is still begun.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

from benchmark.proof.contenders import BYTES_PER_NUMEL
from benchmark.proof.jobs import PARTS, Job
from benchmark.proof.memory import memory_cases, rehearsal_memory_cases
from benchmark.proof.models import shape_of

GB = 10**9

_TOY = {"layers": 3, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 256, "vocabulary": 512, "positions": 64}
_TOY_BUDGET_BYTES = 2_600_000
"""Of the toy's 4 MB with states, so that some of them have to live on the host."""
_TOY_LADDER = [{**_TOY, "hidden": hidden, "ffn": 4 * hidden, "layers": 2} for hidden in (32, 64, 128)]

_BUDGETS_GB = (20, 80, 40)
_OFFLOAD = (
    ("gpt2-4b", 16, 1024),
    ("opt-6.7b", 16, 1024),
    ("gpt2-10b", 16, 1024),
)
"""Model, samples per optimizer step, tokens per sample: the largest batch and the sequence of the original's grid."""

_START_S = 30.0
"""Of a timed job: libraries, tracing, planning, a few steps."""
_HOST_S_PER_GB = 0.6
"""For host memory that a job fills, pins and gives back, and for the steps that go with it. A guess."""
_CAPACITY_HOST_BYTES = 120 * GB
"""What part `capacity` is expected to fill."""
_LIMIT = 3.0
"""A job is ended after so many times what was expected."""

_RESIDENT = (
    ("gpt2-medium", 16, 1024, "none", "bf16"),
    ("opt-1.3b", 8, 1024, "non-reentrant", "bf16"),
    ("opt-1.3b", 4, 1024, "none", "fp32"),
)
"""Model, samples per step, tokens per sample, checkpointing, precision."""


def jobs_of(part: str, *, rehearse: bool) -> list[Job]:
    """The jobs of a part, in order.

    Args:
        part: one of `PARTS`.
        rehearse: toys for the CPU instead.
    """
    table = {
        "links": _links,
        "memory": _memory,
        "resident": _resident,
        "offload": _offload,
        "capacity": _capacity,
    }
    if part not in PARTS:
        raise ValueError(f"a part is one of {', '.join(PARTS)}, found {part!r}")
    jobs = table[part](rehearse)
    # Toys take a moment, on a busy machine a long one; how long says nothing.
    return [dataclasses.replace(job, expected_s=1.0, limit_s=300.0) for job in jobs] if rehearse else jobs


def closing_jobs(*, rehearse: bool) -> list[Job]:
    """What is done last, whatever time is left: it needs little."""
    return [
        Job(
            part="links",
            case="simulated against measured",
            contender="elixir",
            work="compare",
            expected_s=0.0 if rehearse else 10.0,
            limit_s=120.0,
        )
    ]


def _links(rehearse: bool) -> list[Job]:
    options = {"quick": rehearse}
    common: dict[str, Any] = {"part": "links", "case": "this machine", "contender": "elixir", "work": "measure"}
    return [Job(**common, options=options, expected_s=60.0, limit_s=180.0)]


def _memory(rehearse: bool) -> list[Job]:
    cases = rehearsal_memory_cases() if rehearse else memory_cases()
    return [
        Job(
            part="memory",
            case=case.label,
            contender="plain",
            work="memory",
            options={"label": case.label},
            expected_s=12.0,
            limit_s=90.0,
        )
        for case in cases
    ]


def _speed(part: str, case: str, contender: str, kind: str, shared: dict[str, Any], **more: Any) -> Job:
    timing = {key: more.pop(key) for key in ("expected_s", "limit_s", "unless") if key in more}
    options = {**shared, "part": part, "case": case, "contender": contender, "kind": kind, **more}
    return Job(part=part, case=case, contender=contender, work="speed", options=options, **timing)


def _resident(rehearse: bool) -> list[Job]:
    jobs = []
    grid: Any = (("opt-125m", 2, 32, "none", "fp32"),) if rehearse else _RESIDENT
    for model, batch, seq, checkpoint, precision in grid:
        case = f"{model} {precision} {batch}x{seq} {'checkpointed' if checkpoint != 'none' else 'plain'}"
        shared: dict[str, Any] = {
            "model": model,
            "changes": _TOY if rehearse else {},
            "batch": batch,
            "seq": seq,
            "micro": batch,
            "checkpoint": checkpoint,
            "precision": precision,
            "measure_s": 0.05 if rehearse else 3.0,
        }
        if rehearse:
            shared["budget_bytes"], shared["host_bytes"] = 10**9, 10**9
        for kind in ("elixir", "plain", "ddp", *(("plain-bf16",) if precision == "bf16" else ())):
            micros = {"micros": [batch]} if kind == "elixir" else {}
            options = {key: value for key, value in shared.items() if kind != "elixir" or key != "micro"}
            jobs.append(_speed("resident", case, kind, kind, options, expected_s=20.0, **micros))
    return sorted(jobs, key=lambda job: job.contender == "plain-bf16")  # which is shown and not judged


def _offload(rehearse: bool) -> list[Job]:
    """First what every pair needs for an answer, small models before large ones; then what may make either side better."""
    grid: Any = (("opt-125m", 4, 32),) if rehearse else _OFFLOAD
    budgets = (_TOY_BUDGET_BYTES,) if rehearse else tuple(size * GB for size in _BUDGETS_GB)
    rounds: list[list[Job]] = [[], [], []]
    for model, batch, seq in grid:
        shared: dict[str, Any] = {
            "model": model,
            "changes": _TOY if rehearse else {},
            "batch": batch,
            "seq": seq,
            "checkpoint": "non-reentrant",
            "precision": "fp32" if rehearse else "bf16",
            "measure_s": 0.05 if rehearse else 6.0,
        }
        if rehearse:
            shared["host_bytes"] = 10**9
        name = f"{model} {batch}x{seq}"
        cases = {budget: f"{name} in {f'{budget} B' if rehearse else f'{budget / GB:g} GB'}" for budget in budgets}
        for index, (budget, case) in enumerate(cases.items()):
            smaller = [cases[other] for other in budgets[:index] if other < budget]
            for number, jobs in enumerate(_pair(case, {**shared, "budget_bytes": budget}, smaller, rehearse)):
                rounds[number] += jobs
        free = {**shared, "micros": [batch, max(batch // 2, 1)], **({"budget_bytes": 10**9} if rehearse else {})}
        times = _times(_states_bytes(shared) - max(budgets))
        rounds[0].append(_speed("offload", name, "elixir, no budget", "elixir", free, **times))
    return [job for jobs in rounds for job in jobs]


def _states_bytes(options: dict[str, Any]) -> int:
    """Weights, gradients and states of a job's model."""
    return shape_of(options).parameters * BYTES_PER_NUMEL


def _times(host_bytes: float) -> dict[str, float]:
    """Of a job that fills so much host memory."""
    expected_s = _START_S + _HOST_S_PER_GB * max(host_bytes, 0) / GB
    return {"expected_s": expected_s, "limit_s": _LIMIT * expected_s}


def _pair(
    case: str, shared: dict[str, Any], smaller: list[str], rehearse: bool
) -> tuple[list[Job], list[Job], list[Job]]:
    """Jobs of one model in one budget, by how soon they are wanted.

    Args:
        case: what they are called.
        shared: options of all.
        smaller: cases of the model that come before, in smaller budgets.
        rehearse: of toys.
    """
    batch = shared["batch"]
    micros = [batch, batch // 2, batch // 4]
    states_bytes = _states_bytes(shared)
    # A rehearsal lists them all the same, and sees them leave themselves out.
    fits = rehearse or states_bytes <= shared["budget_bytes"]
    has_deepspeed = rehearse or importlib.util.find_spec("deepspeed") is not None

    def elixir(contender: str, **more: Any) -> Job:
        times = _times(states_bytes - shared["budget_bytes"])
        return _speed("offload", case, contender, "elixir", {**shared, "micros": micros}, **times, **more)

    def peers(name: str, kind: str, **options: Any) -> list[Job]:
        """With the largest micro-batch that fits; with less, weights travel more often.

        Whoever offloads everything does in a larger budget what it does in a smaller one, once the batch is whole.
        """
        offloads = kind == "deepspeed" or bool(options.get("offload"))
        times = _times(states_bytes if offloads else 0)
        whole = [f"offload/{other}/{name}, micro-batch {batch}" for other in smaller] if offloads else []
        found: list[Job] = []
        for micro in micros[:1] if rehearse else micros:
            before = (*whole, *(job.id for job in found))
            called = f"{name}, micro-batch {micro}"
            found.append(_speed("offload", case, called, kind, shared, micro=micro, unless=before, **times, **options))
        return found

    ours = elixir("elixir")
    first = [
        ours,
        elixir("elixir, more room", share=0.85, unless=(ours.id,)),
        # Without others to gather from, gathering again is a cast; keeping what was gathered may be too much.
        *(peers("fsdp2", "fsdp2", offload=False, keep=False) if fits else []),
        *peers("fsdp2 offload", "fsdp2", offload=True, keep=False),
    ]
    second = [
        *(peers("zero-3 offload", "deepspeed", stage=3) if has_deepspeed else []),
        *(peers("zero-offload", "deepspeed", stage=2) if has_deepspeed else []),
        *(peers("plain", "plain") if fits else []),
        *(peers("fsdp2 keep", "fsdp2", offload=False, keep=True) if fits else []),
        *peers("fsdp2 offload keep", "fsdp2", offload=True, keep=True),
    ]
    third = [elixir("elixir, plan corrected", wrap=True), elixir("elixir, torch's Adam", fused_kernels=False)]
    return first, second, third


def _capacity(rehearse: bool) -> list[Job]:
    shared: dict[str, Any] = {
        "part": "capacity", "batch": 1, "seq": 32 if rehearse else 1024, "micros": [1], "checkpoint": "non-reentrant",
        "precision": "bf16", "ladder": _TOY_LADDER if rehearse else [],
    }  # fmt: skip
    if rehearse:
        shared |= {"budget_bytes": 3_000_000, "host_bytes": 3_000_000}
    jobs: list[Job] = []
    # Less room only where more of it was too much, which the row of the first then says.
    for name, share, host_share in (
        ("elixir", 0.95, 0.96),
        ("elixir, more room", 0.92, 0.93),
        ("elixir, much more room", 0.85, 0.85),
    ):
        options = {**shared, "case": "opt-like", "contender": name, "share": share, "host_share": host_share}
        jobs.append(
            Job(
                part="capacity",
                case="opt-like",
                contender=name,
                work="capacity",
                options=options,
                **_times(_CAPACITY_HOST_BYTES),
                unless=tuple(job.id for job in jobs),
            )
        )
    return jobs
