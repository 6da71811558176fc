"""The chunks that the host updates in backward, and what holds for a step whichever they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elixir.optimizer_states import StateSize
from elixir.search.problem.placement import Setting
from elixir.search.propose.sizes import SearchSpace
from elixir.step_trace import ParamInfo, StepTrace
from tests.common.chains import NUMEL, Speeds
from tests.common.synthetic_trace import TraceBuilder


def _able(trace: StepTrace, capacity: int = NUMEL * 4) -> list[bool]:
    """Whether each chunk of one parameter can be updated early."""
    work = SearchSpace(trace, Speeds().machine(), Setting(1, 1, StateSize(8), True)).model(capacity).work
    return list(work.early_able)


def _with(trace: StepTrace, index: int, **changes: Any) -> StepTrace:
    parameters: list[ParamInfo] = list(trace.parameters)
    parameters[index] = replace(parameters[index], **changes)
    return replace(trace, parameters=tuple(parameters))


def test_a_chunk_that_is_read_behind_its_last_gradient_waits() -> None:
    """A weight is read after its last gradient if the gradient of the input comes later."""
    build = TraceBuilder("float32")
    first, second = (build.parameter(name, NUMEL) for name in ("first", "second"))
    for phase, used in (("forward", first), ("forward", second), ("backward", second), ("backward", first)):
        build.use(phase, used)  # type: ignore[arg-type]
    trace = build.build("read behind")
    assert _able(trace) == [True, True]
    build.use("recompute", second)
    again = replace(build.build("read behind"), parameters=trace.parameters)
    assert _able(again) == [True, False]
    assert not _able(replace(trace, parameters=_with(trace, 1, grad_access=1).parameters))[1]
