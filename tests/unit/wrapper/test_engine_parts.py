"""The heap that threads share, weights that count writes, and the order of streams that use weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.access.counted_parameter import CountedParameter
from elixir.chunk.group import Group
from elixir.hardware import process_memory
from elixir.wrapper import ElixirModule
from elixir.wrapper.engine import Engine
from elixir.wrapper.run_options import RunOptions
from elixir.wrapper.weight_uses import WeightUses
from tests.common.parity import Case, make_plan, square_loss


def test_threads_share_a_heap_where_compute_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *option: options.append(option), malloc_trim=lambda pad: None)
    monkeypatch.setattr(process_memory, "ctypes", SimpleNamespace(CDLL=lambda name: library))
    engine = Engine(nn.Linear(1, 1), Group(), torch.device("cpu"), RunOptions())
    assert options == [(-8, 1)]  # one arena
    assert engine.end()
    assert engine.phase.closed
    engine.stop()


@pytest.mark.parametrize(("dtype", "kind"), [("float32", nn.Parameter), ("bfloat16", CountedParameter)])
def test_only_weights_with_masters_count_writes_through_data(dtype: str, kind: type) -> None:
    it = Case(nn.Linear(4, 4), {"input": torch.ones(2, 4)}, square_loss)
    module = ElixirModule(it.model, make_plan(it, "resident", unified_dtype=dtype), device="cpu")
    assert {type(each) for each in it.model.parameters()} == {kind}
    module.close()


class Stream:
    """A stream of a device, which notes whom it waits for."""

    def __init__(self, waited: list[str], name: str) -> None:
        self.waited, self.name = waited, name

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(f"{self.name} for {other.name}")


def test_a_stream_that_uses_weights_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    streams = {name: Stream(waited, name) for name in ("one", "other")}
    nobody: Any = None
    uses = WeightUses(nobody, [], {}, nobody, torch.device("cuda"), lambda: None)
    for name in ("one", "one", "other", "other", "one"):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, name=name: streams[name])
        uses.order_compute()
    assert waited == ["other for one", "one for other"]
