"""Elixir in the timed parts: choose a micro-batch by planning, run its plan, keep plan and trace for `links`."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import elixir
from benchmark.proof.contenders import BYTES_PER_NUMEL, Running, adamw, max_norm
from benchmark.proof.jobs import NotRun
from benchmark.proof.models import micro_batches, on_meta, random_weights
from benchmark.proof.place import Place
from elixir.errors import PlanError
from elixir.hardware.profile import HardwareProfile
from elixir.kernels.adam.step import COPIED, absent_kernels
from elixir.models.layer_units import layers_compiled
from elixir.models.step import default_step
from elixir.plan.plan import Plan
from elixir.search.advise.answer import Answer
from elixir.search.question import StepQuestion
from elixir.search.request import SearchRequest
from elixir.search.searches import answer_to
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace, UnitActivations
from elixir.units import format_bytes, parse_dtype
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.account.step_report import StepReport

RESERVE_SHARE = 0.95
"""Share of a budget of reserved memory that is planned with. Plans count what is allocated; how much more the caching
allocator reserves has not been measured, and `benchmark.proof.cases` tries again with less where this was too much."""


Kernels = bool | dict[str, str]
"""The ``use_fused_kernels`` of `ElixirModule` and of `trace_step`: the same for both, or the plan is another step's."""

_REPORTS_KEPT = 64
"""More than steps are timed."""

PLAIN_LOSS: Kernels = {"cross_entropy": "plain"}
"""All other fused kernels; the model's own loss holds all logits, and computes them once rather than twice."""


class Choice(NamedTuple):
    """A plan, and what it was chosen from."""

    plan: Plan
    trace: StepTrace
    micro: int
    kernels: Kernels
    tried: dict[str, str]
    """Micro-batch and loss -> predicted seconds of an optimizer step, or that nothing fits."""
    made: str = "here"
    """``before``, if the plan was carried here."""


def budgets(options: dict[str, Any], place: Place) -> tuple[int, int]:
    """Device and host bytes that a plan may use.

    Raises:
        NotRun: the states alone are more than both.
    """
    free = place.free_device_bytes()
    share = options.get("share", RESERVE_SHARE)
    device = options.get("planned_device_bytes") or int(min(options.get("budget_bytes") or free, free) * share)
    host = options.get("host_bytes") or place.free_host_bytes()
    numel = sum(parameter.numel() for parameter in on_meta(options).parameters())
    if numel * BYTES_PER_NUMEL > device + host:
        raise NotRun(
            f"{numel:,} parameters at {BYTES_PER_NUMEL} bytes each are {format_bytes(numel * BYTES_PER_NUMEL)}, device "
            f"and host have {format_bytes(device + host)}"
        )
    return device, host


def step_of(
    options: dict[str, Any], micro: int, kernels: Kernels, activations: tuple[UnitActivations, ...] = ()
) -> StepQuestion:
    """One micro-batch of the job's model, with the kernels that it will run with."""
    model = on_meta(options)
    return StepQuestion(
        model=model,
        inp=micro_batches(model, options, micro, "cpu")[0],
        step_fn=default_step,
        dtype=parse_dtype(options["precision"]),
        use_fused_kernels=kernels,
        compile=options.get("compile", False),
        activations=activations,
    )


def answer_for(
    options: dict[str, Any], micro: int, hardware: HardwareProfile, kernels: Kernels, device_bytes: int, host_bytes: int
) -> Answer:
    """The plan of a job with one micro-batch; with option ``activations`` the search chooses what is kept.

    Raises:
        PlanError: nothing fits.
    """
    request = SearchRequest(
        world_size=1,
        optimizer_type="AdamW",
        accumulation=options["batch"] // micro,
        device_memory=device_bytes,
        host_budget=host_bytes,
        placement=options.get("placement", "auto"),
        activations=options.get("activations"),
        clipping=bool(max_norm(options)),
    )
    return answer_to(step_of(options, micro, kernels), hardware, request, read_host=False)


def kernels_of(options: dict[str, Any]) -> list[Kernels]:
    """The kernels to choose among: those of option ``fused_kernels``, or all of them with either loss."""
    asked = options.get("fused_kernels")
    return [True, PLAIN_LOSS] if asked is None else [asked]


def choose(options: dict[str, Any], hardware: HardwareProfile, device_bytes: int, host_bytes: int) -> Choice:
    """The micro-batch and the loss whose plan takes the fewest predicted seconds per optimizer step.

    A plan of billions of parameters takes seconds to find, so micro-batches are tried from large to small until one is
    no better than those before; and of the losses that had room with a larger one, the better only.

    Raises:
        PlanError: none fits; the one of the smallest micro-batch.
    """
    best: Choice | None = None
    best_s, problem = float("inf"), None
    tried: dict[str, str] = {}
    candidates = kernels_of(options)
    for micro in sorted(options["micros"], reverse=True):
        before_s, slower = best_s, []
        for kernels in candidates:
            called = f"{micro}, {'plain' if kernels in (False, PLAIN_LOSS) else 'chunked'} loss"
            try:
                answer = answer_for(options, micro, hardware, kernels, device_bytes, host_bytes)
            except PlanError as error:
                tried[called], problem = "does not fit", error
                continue
            plan, trace = answer.plan, answer.question.trace
            plan = with_early_states(plan) if options.get("early_states") else plan
            step_s = simulate_step(plan, trace, hardware).step_s
            tried[called] = f"{step_s:.4g} s"
            if step_s < best_s:
                slower += [] if best is None else [best.kernels]
                best, best_s = Choice(plan, trace, micro, kernels, tried), step_s
            else:
                slower.append(kernels)
        if best is not None and best_s == before_s:
            break
        candidates = [
            kernels for kernels in candidates if best is None or kernels == best.kernels or kernels not in slower
        ]
    if best is None:
        raise problem or NotRun("no micro-batch to try")
    return best


def with_early_states(plan: Plan) -> Plan:
    """The plan with new states made in backward of all chunks that the host steps, whatever pays: a rehearsal is to show
    what becomes of them."""
    chunks = [
        dataclasses.replace(c, update="early") if c.state_home == "host" and c.grad_entry is not None else c
        for c in plan.chunks
    ]
    return dataclasses.replace(plan, chunks=tuple(chunks), may_update_early=True)


def needs(trace: StepTrace, options: dict[str, Any]) -> dict[str, int]:
    """Bytes of a resident step, with and without what the optimizer keeps."""
    numel = sum(parameter.numel for parameter in trace.parameters if parameter.trainable)
    without = trace.backward_peak_bytes
    # bf16: master and two moments, float32 all; float32: two moments.
    return {
        "without_states_bytes": without,
        "resident_bytes": without + numel * (12 if options["precision"] == "bf16" else 8),
    }


def run(options: dict[str, Any], place: Place, saved: Path, known: Choice | None = None) -> Running:
    """Elixir under its plan; with ``wrap`` by `elixir.wrap`, which corrects the plan after the first steps.

    Args:
        saved: where the plan and the trace go, with `.plan.json` and `.trace.json` after it.
        known: a choice that was made already.
    """
    hardware = place.hardware()
    device_bytes, host_bytes = budgets(options, place)
    choice = known or choose(options, hardware, device_bytes, host_bytes)
    model = on_meta(options)
    batches = micro_batches(model, options, choice.micro, place.device)
    weights = random_weights(model)
    fused: dict[str, Any] = {"use_fused_kernels": choice.kernels, "device": place.device}
    limit = max_norm(options)
    if options.get("wrap"):
        first = {key: value.cpu() for key, value in batches[0].items()}
        module, optimizer = elixir.wrap(
            model,
            adamw(model.parameters()),
            inp=first,
            step_fn=default_step,
            dtype=parse_dtype(options["precision"]),
            hardware=hardware,
            device_memory=device_bytes,
            host_budget=host_bytes,
            max_norm=limit,
            accumulation=len(batches),
            weights=weights,
            **fused,
        )
    else:
        with layers_compiled(model, options.get("compile", False), keep=True):
            module = ElixirModule(model, choice.plan, weights=weights, **fused)
        optimizer = ElixirOptimizer(module, adamw(model.parameters()), max_norm=limit)
    del weights
    _refuse_copies(
        absent_kernels()
    )  # waits for those that a plan counts on, which take seconds if nobody has built them
    reports: deque[StepReport] = deque(maxlen=_REPORTS_KEPT)

    def step() -> torch.Tensor:
        for batch in batches:
            loss = module(**batch).loss / len(batches)
            optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if module.last_report is not None:
            reports.append(module.last_report)
        return loss.detach()

    def keep() -> None:
        saved.parent.mkdir(parents=True, exist_ok=True)
        module.plan.save(saved.with_name(f"{saved.name}.plan.json"))
        choice.trace.save(saved.with_name(f"{saved.name}.trace.json"))

    predicted = choice.plan.predicted  # with `wrap` that of the first plan: it may be corrected later
    facts = {
        "micro": choice.micro,
        "tried_micros": choice.tried,
        "planned": choice.made,
        "fused_kernels": choice.kernels,
        "planned_device_bytes": device_bytes,
        "planned_host_bytes": host_bytes,
        "predicted_device_bytes": predicted.device_peak_bytes,
        "predicted_host_bytes": predicted.host_step_bytes,
        "predicted_moved_bytes": predicted.moved_bytes,
        "host_state_chunks": sum(c.trainable and c.state_home == "host" for c in choice.plan.chunks),
        "chunks": len(choice.plan.chunks),
        "hardware": hardware.name,
        **needs(choice.trace, options),
    }
    return Running(step, keep, facts, lambda steps: account([*reports][-steps:], limit))


def account(reports: Sequence[StepReport], limit: float | None) -> dict[str, Any]:
    """The timed steps as the run itself saw them: states made early and kept, steps clipped, seconds by lane that the host
    and the compute stream waited and that the lane worked, forms of CPU Adam.

    Args:
        reports: of the timed steps.
        limit: to which the norm of the gradients was clipped.

    Raises:
        RuntimeError: old states were copied before early steps, which no plan expects.
    """
    forms, waited, streams, busy = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for report in reports:
        forms.update(report.host_forms)
        waited.update(report.waited_s)
        streams.update(report.stream_waited_s)
        busy.update(report.busy_s)
    if forms[COPIED]:
        _refuse_copies([f"{forms[COPIED]} of {sum(forms.values())} steps of shards"])
    norms = [float(report.grad_norm) for report in reports if report.grad_norm is not None]
    return {
        "early_states_made": sum(report.early.made for report in reports),
        "early_states_kept": sum(report.early.kept for report in reports),
        "clipped_steps": sum(limit is not None and norm > limit for norm in norms),
        "grad_norm_range": [min(norms), max(norms)] if norms else None,
        "waited_s_per_step": {lane: seconds / len(reports) for lane, seconds in waited.items()},
        "stream_waited_s_per_step": {lane: seconds / len(reports) for lane, seconds in streams.items()},
        "busy_s_per_step": {lane: seconds / len(reports) for lane, seconds in busy.items()},
        "host_adam_forms": dict(forms),
    }


def _refuse_copies(lacking: Sequence[str]) -> None:
    if lacking:
        raise RuntimeError(
            f"there is no one-pass kernel for {'; '.join(lacking)}: CPU Adam would copy the states before each early "
            "step, "
            "which takes 2.5 times as long as plans expect. Is there a C++ compiler "
            "(CXX), and what does log.txt say?"
        )
