"""Steps that several tests ask for are traced once: a trace is a value, and takes longer than most of what follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elixir.hardware.profile import HardwareProfile
from elixir.models.model_shape import find
from elixir.search.question import StepQuestion
from elixir.step_trace import StepTrace
from tests.common.parity import contents

_TRACES: dict[bytes, StepTrace] = {}


@pytest.fixture(scope="module", autouse=True)
def steps_are_traced_once() -> Iterator[None]:
    """Keeps the traces of models that Elixir knows by name, by all that was asked."""
    traced = StepQuestion.trace

    def trace(question: StepQuestion, hardware: HardwareProfile, *given: Any) -> StepTrace:
        known = isinstance(question.model, str) and find(question.model) is not None
        # `given` are the model, which the question describes, and what traces may share.
        key = contents((question, hardware)) if known else None
        if key is None:
            return traced(question, hardware, *given)
        if key not in _TRACES:
            _TRACES[key] = traced(question, hardware, *given)
        return _TRACES[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepQuestion, "trace", trace)
        yield
