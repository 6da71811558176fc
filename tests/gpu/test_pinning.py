"""Host memory next to a CUDA device is pinned at its exact size, for exactly as long as it lives."""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from elixir.chunk.memory import Arena, pinned_zeros
from elixir.errors import NoMemoryError
from elixir.wrapper import ElixirModule
from tests.common import inside
from tests.common.gpu import needs_gpu, needs_pretended_gpu
from tests.common.parity import case, make_plan
from tests.cuda_emulator import install

pytestmark = needs_gpu


def kernel_flags(tensor: torch.Tensor) -> set[str]:
    """The kernel's flags of the mapping in which a tensor begins, such as ``dc``: not copied by fork."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= tensor.data_ptr() < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("the tensor lies in no mapping")


@pytest.mark.parametrize("numel", [1, 1000, 3_000_001])
def test_buffers_of_the_host_are_pinned_and_zero(numel: int) -> None:
    arena = Arena(torch.device("cuda", 0))
    buffer = arena.make(numel, torch.bfloat16, "host", "weights").tensor
    assert buffer.is_pinned()
    assert buffer.numel() == numel
    assert buffer.device.type == "cpu"
    assert not buffer.any()
    assert arena.live_bytes("host") == 2 * numel


def test_many_small_buffers_do_not_share_pages() -> None:
    arena = Arena(torch.device("cuda", 0))
    buffers = [arena.make(100, torch.float32, "host", "weights").tensor for _ in range(50)]
    assert len({buffer.data_ptr() // 4096 for buffer in buffers}) == 50


def test_memory_can_be_pinned_again_by_whoever_gets_it_next() -> None:
    """Memory returns without `close`, and through views that outlive the buffer."""
    arena = Arena(torch.device("cuda", 0))
    for _ in range(20):
        view = arena.make(100_000, torch.float32, "host", "weights").tensor[10:20]
        assert view.is_pinned()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_no_buffer_of_the_host_is_for_child_processes() -> None:
    arena = Arena(torch.device("cuda", 0))
    for pin in (True, False):
        buffer = arena.make(5_000_000, torch.bfloat16, "host", "weights", pin=pin).tensor
        assert buffer.is_pinned() == pin
        assert "dc" in kernel_flags(buffer)


@pytest.mark.parametrize(("dtype", "copied"), [(torch.bfloat16, False), (None, True)])
def test_masters_are_pinned_only_where_new_weights_are_copied_from_them(
    dtype: torch.dtype | None, copied: bool
) -> None:
    it = case("opt")
    module = ElixirModule(it.model, make_plan(it, "mixed", unified_dtype=dtype), device="cuda", dtype=dtype)
    on_host = [chunk for chunk in inside.chunks(module) if chunk.plan.trainable and chunk.plan.state_home == "host"]
    masters = [chunk for chunk in on_host if chunk.masters is not None]
    assert masters
    for chunk in masters:
        assert chunk.masters is not None
        assert chunk.masters.is_pinned() == (copied and chunk.plan.weight_home == "device")
    assert all(
        chunk.shard.is_pinned()
        for chunk in inside.chunks(module)
        if chunk.shard is not None and not chunk.shard.is_cuda
    )


@needs_pretended_gpu
def test_pins_for_every_context_on_the_device_that_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[object] = []
    asked: list[tuple[int, ...]] = []

    class OneDevice:
        def __init__(self, device: object) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: object) -> None:
            entered.pop()

    def register(*args: int) -> int:
        assert entered == [torch.device("cuda", 0)]
        asked.append(args)
        return 0

    monkeypatch.setattr(torch.cuda, "device", OneDevice)
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", register)
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostUnregister", lambda pointer: 0)
    buffer = Arena(torch.device("cuda", 0)).make(100, torch.float32, "host", "weights").tensor
    assert asked == [(buffer.data_ptr(), 400, 1)]


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
    with pytest.raises(NoMemoryError, match=r"pinning 400 bytes of host memory failed with CUDA error 2: .*ulimit -l"):
        Arena(torch.device("cuda", 0)).make(100, torch.float32, "host", "weights")


@needs_pretended_gpu
def test_a_forked_child_leaves_pinning_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a copy of each object, none of the pages, and must not call a driver that cannot be used after a fork."""
    given_up: list[int] = []
    buffer = pinned_zeros(100)
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostUnregister", given_up.append)
    child = os.fork()
    if not child:
        del buffer
        os._exit(len(given_up))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    address = buffer.data_ptr()
    del buffer
    assert given_up == [address]
    monkeypatch.undo()
    torch.cuda.cudart().cudaHostUnregister(address)
