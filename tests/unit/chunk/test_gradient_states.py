"""The states of a chunk's gradient, and what holds it in each."""

from __future__ import annotations

import itertools

import pytest
import torch

from elixir.chunk.gradients.chunk_gradient import ChunkGradient, GradState
from elixir.chunk.memory import Arena
from elixir.errors import StateError
from tests.common import inside
from tests.unit.chunk.test_chunks import make_chunk

CPU = torch.device("cpu")


@pytest.mark.parametrize(("one", "other"), list(itertools.product(GradState, GradState)))
def test_only_the_changes_of_the_table_are_allowed(one: GradState, other: GradState) -> None:
    gradient = ChunkGradient(make_chunk(5), Arena(CPU))
    gradient.state = one
    if other in inside.transitions(ChunkGradient)[one]:
        gradient.to(other)
        assert gradient.state is other
    else:
        with pytest.raises(StateError, match="gradient of chunk 5"):
            gradient.to(other)
        assert gradient.state is one
