"""Host memory beside a CUDA device is pinned at its exact size, for exactly as long as it lives."""

from __future__ import annotations

import gc

import pytest
import torch

from elixir.chunk.buffers import Arena
from elixir.errors import StateError
from elixir.wrapper import ElixirModule
from tests.common.gpu import needs_gpu, needs_pretended_gpu
from tests.common.parity import case, make_plan
from tests.pretend_cuda import install

pytestmark = needs_gpu


@pytest.mark.parametrize("numel", [1, 1000, 3_000_001])
def test_buffers_of_the_host_are_pinned_and_zero(numel: int) -> None:
    arena = Arena(torch.device("cuda", 0))
    buffer = arena.make(numel, torch.bfloat16, "host", "weights")
    assert buffer.is_pinned()
    assert buffer.numel() == numel
    assert buffer.device.type == "cpu"
    assert not buffer.any()
    assert arena.live_bytes("host") == 2 * numel


def test_many_small_buffers_do_not_share_pages() -> None:
    arena = Arena(torch.device("cuda", 0))
    buffers = [arena.make(100, torch.float32, "host", "weights") for _ in range(50)]
    assert len({buffer.data_ptr() // 4096 for buffer in buffers}) == 50


def test_memory_can_be_pinned_again_by_whoever_gets_it_next() -> None:
    """Without `close`, and by views that outlive the buffer."""
    arena = Arena(torch.device("cuda", 0))
    for _ in range(20):
        view = arena.make(100_000, torch.float32, "host", "weights")[10:20]
        assert view.is_pinned()


@needs_pretended_gpu
def test_nothing_stays_pinned_of_a_module_that_is_let_go_of() -> None:
    it = case("opt")
    plan = make_plan(it, "streamed")
    gc.collect()
    before = len(install().pinned())
    module = ElixirModule(it.model, plan, device="cuda")
    assert len(install().pinned()) > before
    del module, it
    gc.collect()
    assert len(install().pinned()) == before


@needs_pretended_gpu
def test_says_what_to_look_at_where_pinning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *args: 2)
    with pytest.raises(StateError, match=r"pinning 400 bytes of host memory failed with CUDA error 2: .*ulimit -l"):
        Arena(torch.device("cuda", 0)).make(100, torch.float32, "host", "weights")
