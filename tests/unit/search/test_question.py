"""A question about a step reaches the tracer as it was asked, and is found again in what was made of it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from elixir.errors import InputError, InputTypeError
from elixir.search.question import StepQuestion

NAMED = "Facebook/OPT-125m"


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"dtype": "bf17"}, InputError, "bf17"),
        ({"quantised": "nf4"}, InputError, "nothing would train"),
        ({"positions": 0}, InputError, "positions must be 1 or larger"),
        ({"positions": 8, "model": nn.Linear(1, 1)}, InputError, "set its config's max_position_embeddings"),
        ({"generate": [3, 2]}, InputTypeError, "generate is"),
        ({"generate": (3, 2, 1)}, InputTypeError, "generate is"),
        ({"generate": (3, 0)}, InputError, "generate must be 1 or larger"),
        ({"generate": (3, 2), "seq": 4}, InputError, "leave out seq="),
        ({"generate": (3, 2), "inp": {}}, InputError, "leave out inp="),
        ({"generate": (3, 2), "step_fn": print}, InputError, "leave out step_fn="),
    ],
)
def test_a_question_that_contradicts_itself_is_refused(
    asked: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        StepQuestion(**{"model": NAMED} | asked)
    for enough in ({"lora": 4}, {"forward": True}, {"generate": (3, 2)}):
        assert StepQuestion(model=NAMED, quantised="nf4", **enough).quantised == "nf4"  # type: ignore[arg-type]
