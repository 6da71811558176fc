"""Changes that a user may make to a step: each as arguments, and as the trace and the request that they give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from elixir.errors import InputError
from elixir.hardware import HardwareProfile
from elixir.optimizer_states import state_size
from elixir.search.request import SearchRequest, StepQuestion
from elixir.step_trace import StepTrace

Kind = Literal["moments", "kernels", "accumulation", "checkpointing", "placement", "machine"]
MORE_BATCHES = 4
"""How many times as many batches a step that accumulates has."""


@dataclass(frozen=True)
class Change:
    """One thing, or several, done differently."""

    kinds: tuple[Kind, ...]
    action: str
    """In the imperative."""
    options: tuple[tuple[str, str], ...]
    """Arguments that do it, with their values; a switch has none."""
    request: tuple[tuple[str, Any], ...] = ()
    """Fields of `SearchRequest`."""
    samples: int | None = None
    """Samples of a batch; None: as traced, like the next two."""
    checkpoint: str | None = None
    fused_kernels: bool | None = None

    @property
    def traces(self) -> bool:
        """Whether it takes another trace."""
        return not (self.samples is None and self.checkpoint is None and self.fused_kernels is None)

    def __add__(self, other: Change) -> Change:
        """Both at once; of different kinds."""
        return Change(
            self.kinds + other.kinds,
            f"{self.action}, and {other.action}",
            self.options + other.options,
            self.request + other.request,
            self.samples if other.samples is None else other.samples,
            self.checkpoint if other.checkpoint is None else other.checkpoint,
            self.fused_kernels if other.fused_kernels is None else other.fused_kernels,
        )

    def applied(
        self, trace: StepTrace, hardware: HardwareProfile, request: SearchRequest
    ) -> tuple[StepTrace, SearchRequest]:
        """The step and the question with it.

        Raises:
            InputError: it does not go with what else is asked.
            TraceError: the step cannot be traced so.
        """
        asked = replace(request, **dict(self.request))
        return (_traced_again(trace, hardware, self) if self.traces else trace), asked


def can_trace_again(trace: StepTrace) -> bool:
    """Whether the step follows from the model's name."""
    return trace.step.checkpoint is not None


def job_changes(trace: StepTrace, request: SearchRequest) -> Iterator[Change]:
    """Changes of the training, not of the machine, whose options are not what they would set already."""
    if request.moments == "float32" and _is_adam(request):
        for moments in ("bfloat16", "8bit"):
            action = f"keep Adam's moments in {'8 bits' if moments == '8bit' else moments}"
            yield Change(("moments",), action, (("moments", moments),), (("moments", moments),))
    if not can_trace_again(trace):
        return
    if not trace.step.fused_kernels:
        yield Change(("kernels",), "use fused kernels", (("fused_kernels", ""),), fused_kernels=True)
    forms = ["none", "non-reentrant"]
    if len(trace.checkpointed_modules) > 1:
        forms.append(f"non-reentrant:{len(trace.checkpointed_modules) // 2}")
    for form in forms:
        if form != trace.step.checkpoint:
            action = "checkpoint no activations" if form == "none" else "checkpoint activations"
            action += f" of the first {form.partition(':')[2]} layers" if ":" in form else ""
            yield Change(("checkpointing",), action, (("checkpoint", form),), checkpoint=form)


def smaller_batch(trace: StepTrace, request: SearchRequest) -> Iterator[Change]:
    """The same step in twice as many batches of half the samples."""
    samples = trace.step.samples
    if samples and samples % 2 == 0 and can_trace_again(trace):
        twice, half = 2 * request.accumulation, samples // 2
        options = (("batch", str(half)), ("accumulation", str(twice)))
        action = f"cut the step into {twice} batches of {half}"
        yield Change(("accumulation",), action, options, (("accumulation", twice),), samples=half)


def more_batches(request: SearchRequest) -> Iterator[Change]:
    """More samples a step, so that updates are fewer."""
    count = MORE_BATCHES * request.accumulation
    action = f"accumulate {count} batches a step"
    yield Change(("accumulation",), action, (("accumulation", str(count)),), (("accumulation", count),))


def _is_adam(request: SearchRequest) -> bool:
    try:
        state_size(request.optimizer_type, "8bit")
    except InputError:
        return False
    return True


def _traced_again(trace: StepTrace, hardware: HardwareProfile, change: Change) -> StepTrace:
    asked: dict[str, Any] = {
        "batch": change.samples,
        "checkpoint": change.checkpoint,
        "use_fused_kernels": change.fused_kernels,
    }
    optimizer = trace.optimizer.split(" ")[0]
    step = replace(StepQuestion.again(trace), optimizer=None if optimizer == "none" else optimizer)
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(step, **given).trace(hardware)
