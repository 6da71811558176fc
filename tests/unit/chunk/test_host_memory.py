"""Host memory of the runtime: present when wrapping ends, and in no child process."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from elixir.chunk.memory import HUGE_PAGE_BYTES, PORTABLE, Arena, host_zeros, pinned_zeros, separate_copy
from elixir.errors import StateError
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.parity import adamw, case, make_plan, take_step

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")


def in_separate_pages(buffer: torch.Tensor) -> bool:
    """Whether it begins with a page, where the C library puts none of several blocks next to each other."""
    return buffer.data_ptr() % mmap.PAGESIZE == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_host_memory_next_to_a_device_has_the_size_that_was_asked_for(dtype: torch.dtype) -> None:
    arena = Arena(torch.device("cuda", 0))
    buffer = arena.make(1001, dtype, "host", "weights", pin=False).tensor
    assert (buffer.shape, buffer.dtype, buffer.any().item()) == ((1001,), dtype, False)
    assert arena.parts("host") == {"weights": 1001 * dtype.itemsize}


def test_a_device_that_is_full_raises_the_error_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    arena = Arena(torch.device("cuda", 0))
    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        arena.make(1001, torch.float32, "device", "weights")


@pytest.mark.parametrize("status", [0, 2])
def test_a_driver_pins_the_pages_until_the_last_tensor_in_them_is_gone(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that refuses has its error taken, which the next kernel would raise otherwise."""
    calls: list[tuple[Any, ...]] = []
    driver = SimpleNamespace(
        cudaHostRegister=lambda *args: calls.append(("pin", *args)) or status,
        cudaHostUnregister=lambda address: calls.append(("unpin", address)),
    )
    ordinary = torch.zeros

    def zeros(*args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        if device == "cuda":
            calls.append(("kernel",))
            raise RuntimeError("CUDA error: out of memory")
        return ordinary(*args, device=device, **options)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(calls.append(("on", device))))
    monkeypatch.setattr(torch, "zeros", zeros)
    device = torch.device("cuda", 1)
    if status:
        with pytest.raises(StateError, match=r"pinning 1000 bytes of host memory failed with CUDA error 2: .*ulimit"):
            pinned_zeros(1000, device)
        assert [what for what, *_ in calls] == ["on", "pin", "kernel"]
        return
    part = pinned_zeros(1000, device)[10:20]
    assert not part.any()
    first = part.data_ptr() - 10
    assert calls == [("on", device), ("pin", first, 1000, PORTABLE)]
    del part
    gc.collect()
    assert calls[2:] == [("unpin", first)]
    host_zeros(1000)  # is not pinned
    gc.collect()
    assert len(calls) == 3


@pytest.mark.parametrize(("numel", "paged"), [(HUGE_PAGE_BYTES // 4, True), (HUGE_PAGE_BYTES // 4 - 1, False)])
def test_a_large_copy_has_separate_pages(numel: int, paged: bool) -> None:
    source = torch.arange(float(numel))
    copies = [separate_copy(source, torch.float32) for _ in range(3)]
    assert all(in_separate_pages(copy) for copy in copies) is paged
    assert all(torch.equal(copy, source) for copy in copies)


@pytest.mark.sampled
@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are not forked here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("fused", [True, False])
def test_training_goes_on_while_and_after_forked_workers_live(fused: bool) -> None:
    """Workers that hold no tensor of the model read nothing of its memory, and the same steps follow."""

    def losses(workers: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        it = case("opt")
        module = ElixirModule(it.model, make_plan(it, "streamed"), device="cpu", use_fused_kernels=fused)
        optimizer = ElixirOptimizer(module, adamw(module.module))
        ids = torch.arange(6 * 24).view(6, 24) % 50
        context = "fork" if workers else None
        loader = DataLoader(TensorDataset(ids), batch_size=1, num_workers=workers, multiprocessing_context=context)
        found = []
        for _ in range(2):  # workers of the second pass are forked when states have been stepped
            for (batch,) in loader:
                loss = module(input_ids=batch, labels=batch).loss
                found.append(loss.item())
                take_step(optimizer, loss)
        weights = module.state_dict()
        module.close()
        return found, weights

    alone, forked = losses(0), losses(2)
    assert alone[0] == forked[0]
    assert all(torch.equal(value, forked[1][name]) for name, value in alone[1].items())


@linux
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_has_nothing_at_these_addresses() -> None:
    kept, shared = host_zeros(1 << 20), torch.zeros(1 << 20)
    child = os.fork()
    if child == 0:
        os._exit(is_mapped(kept.data_ptr()) + 2 * is_mapped(shared.data_ptr()))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2
    assert is_mapped(kept.data_ptr())
    assert not kept.any()


def is_mapped(address: int) -> bool:
    """Whether this process has memory at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(bound, 16) for bound in line.split(" ")[0].split("-"))
        if first <= address < last:
            return True
    return False


@linux
def test_only_large_memory_that_lasts_leaves_the_heap_on_a_cpu() -> None:
    arena, numel = Arena(torch.device("cpu")), HUGE_PAGE_BYTES // 4
    lasting = [arena.make(numel, torch.float32, home, "weights").tensor for home in ("device", "host")]
    passing = [arena.make(numel, torch.float32, "device", "gradients", passing=True).tensor for _ in range(4)]
    small = [arena.make(numel // 2, torch.float32, "device", "weights").tensor for _ in range(4)]
    assert [each.data_ptr() % mmap.PAGESIZE for each in lasting] == [0, 0]
    for several in (small, passing):  # one of them may begin a page by chance
        assert any(each.data_ptr() % mmap.PAGESIZE for each in several)
    lasting[0].fill_(3.0)
    child = os.fork()
    if not child:
        os._exit(int(lasting[0][-1]))  # as a worker of a DataLoader may read weights
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
