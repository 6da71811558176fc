"""One operation that fails, in whatever is being done, and what must be left after it.

The operations are those of files with states on a disk or with a checkpoint, and the allocators of the host. The
contracts are the same on one rank and on several: ranks are given the same batch, so each of them has the numbers of
plain PyTorch on one. On several ranks the operation fails on the first only.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from elixir import load_checkpoint, save_checkpoint
from elixir.errors import ElixirError, FileError, InputError
from elixir.files import Files
from elixir.plan.plan import Plan
from elixir.search import simple_search
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from elixir.wrapper.module import lacks_weights
from tests.common import inside
from tests.common.on_disk import with_states
from tests.common.parity import take_step

NEVER = 10**9

ON_DISK = {"create": errno.EACCES, "allocate": errno.ENOSPC, "write": errno.EIO, "read": errno.EIO, "close": errno.EIO}
"""Operations of a file with states, and the errno with which they fail."""
IN_CHECKPOINT = ON_DISK | {"sync": errno.EIO, "rename": errno.EIO, "resize": errno.ENOSPC, "make": errno.EROFS}
IN_MEMORY = ("zeros", "pages")
"""Allocators: that of torch, and the map of pages."""


class Fault(Files):
    """Operations of one kind fail: the `at`-th after `arm`, or with `forever` all from then on."""

    def __init__(self, kind: str) -> None:
        self.may_come = threading.Event()
        """Operations wait for this while they are counted."""
        self.may_come.set()
        self.kind, self.count, self._at, self._forever = kind, 0, NEVER, False
        self._armed, self._lock = False, threading.Lock()

    @contextlib.contextmanager
    def armed(self, at: int = NEVER, *, forever: bool = False) -> Iterator[None]:
        """Counts operations while it lasts, and fail."""
        self.count, self._at, self._forever, self._armed = 0, at, forever, True
        try:
            with contextlib.ExitStack() as patched:
                if self.kind == "zeros":
                    failing = _Torch(self._failing(torch.zeros, RuntimeError))
                    patched.enter_context(mock.patch("elixir.chunk.memory.torch", failing))
                if self.kind == "pages":
                    patched.enter_context(inside.pages_made_by(lambda made: self._failing(made, OSError)))
                yield
        finally:
            self._armed = False

    @property
    def struck(self) -> bool:
        """Whether an operation has failed."""
        return self.count >= self._at

    def _strikes(self) -> bool:
        assert not self._armed or self.may_come.wait(60)
        with self._lock:
            self.count += self._armed
            return self._armed and (self.count == self._at or (self._forever and self.count > self._at))

    def _failing(self, made: Callable[..., Any], kind: type[Exception]) -> Callable[..., Any]:
        def make(*args: Any, **options: Any) -> Any:
            if args and isinstance(args[0], int) and args[0] and self._strikes():
                raise kind(errno.ENOMEM, "cannot allocate memory")
            return made(*args, **options)

        return make

    def call(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
        if operation == self.kind and self._strikes():
            code = IN_CHECKPOINT[operation]
            if operation == "close":
                function(*args)  # a system that reports an error has closed it all the same
            raise FileError(code, os.strerror(code), path, operation)
        return super().call(operation, path, function, *args)


class _Torch:
    """The package, as one module sees it, with another `zeros`."""

    def __init__(self, zeros: Callable[..., torch.Tensor]) -> None:
        self.zeros = zeros

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Net(nn.Module):
    """Layers of which one is frozen, a weight used twice, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        output: torch.Tensor = self.head(self.norm(x)).square().mean()
        return output


def net() -> Net:
    """The same model each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net()


BATCH = {"ids": torch.tensor([1, 5, 2, 9, 9, 11])}
_PLANS: dict[tuple[int, str | None], Plan] = {}


def plan_of(world_size: int, homes: str, dtype: str | None = None) -> Plan:
    """A plan whose states are in ``memory``, on a ``disk``, or ``both``."""
    key = world_size, dtype
    if key not in _PLANS:

        def step(model: nn.Module, inp: dict[str, Any]) -> None:
            model(**inp).backward()

        _PLANS[key] = simple_search(
            net(), world_size, inp=BATCH, step_fn=step, split_number=6, allocate_factor=0.01, hardware="cpu",
            shard_device="cpu", unified_dtype=dtype,
        ).plan  # fmt: skip
    plan = _PLANS[key]
    return with_states(plan, "host") if homes == "memory" else with_states(plan, "disk", 1 + (homes == "both"))


def bits(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of the tensors of a state dict."""
    return {name: value.detach().clone() for name, value in state.items()}


def same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two state dicts have the same tensors, to the bit."""
    alike = all(torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype for name in theirs)
    return alike and mine.keys() == theirs.keys()


def same_states(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """The same of optimizers' state dicts."""
    return mine["state"].keys() == theirs["state"].keys() and all(
        torch.equal(torch.as_tensor(mine["state"][number][kind]), torch.as_tensor(value))
        for number, states in theirs["state"].items()
        for kind, value in states.items()
    )


def open_files(folder: Path) -> list[str]:
    """Files below a folder that this process has open."""
    gc.collect()
    found = []
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{handle}"))
    return [path for path in found if path.startswith(f"{folder}/")]


class Run:
    """A model under a plan, next to one of plain PyTorch where its numbers are the same.

    Args:
        fault: fails in files with states.
        folder: of the disk.
        world_size: ranks.
        homes, dtype: see `plan_of`.
    """

    def __init__(self, fault: Fault, folder: Path, world_size: int, homes: str, dtype: str | None = None) -> None:
        self.world_size, self.dtype = world_size, dtype
        self.model = net()
        self.plain = copy.deepcopy(self.model)
        self.module = ElixirModule(
            self.model, plan_of(world_size, homes, dtype), device="cpu", disk_folder=folder, debug=Debug(files=fault)
        )
        self.optimizer, self.plain_optimizer = (
            ElixirOptimizer(self.module, _adam(self.model)),
            _adam(self.plain),
        )

    def step(self) -> None:
        """A step of both, whose losses are the same; without the plain one in low precision."""
        loss = self.module(**BATCH)
        if self.dtype is None:
            plain = self.plain(**BATCH)
            assert torch.equal(loss, plain)
            plain.backward()
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad()
        take_step(self.optimizer, loss)

    def train(self, steps: int) -> None:
        """Steps of both, after which weights are the same, too."""
        for _ in range(steps):
            self.step()
        if self.dtype is None:
            assert same(self.module.state_dict(), self.plain.state_dict())


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def positions(count: int) -> list[int]:
    """Some of so many operations: the first ones, one in the middle, the last."""
    return sorted({1, 2, count // 2, count} & set(range(1, count + 1)))


# --- contracts ----------------------------------------------------------------------------------------------------


def wrapping(folder: Path, rank: int, world_size: int, kind: str, dtype: str | None) -> int:
    """Wrapping fails: nothing of the disk is held, and the model is as it was, or its error says that it is lost, and it
    is refused from then on. How often it has failed."""
    fault, plan, failed = Fault(kind), plan_of(world_size, "both", dtype), 0

    def wrap(model: nn.Module) -> ElixirModule:
        return ElixirModule(model, plan, device="cpu", disk_folder=folder, debug=Debug(files=fault))

    with fault.armed():
        wrap(net()).close()
    for at in positions(_alike(fault.count)):
        for forever in (False, True):
            model, wrapped, lost = net(), False, False
            before, loss = bits(model.state_dict()), model(**BATCH)
            model.load_state_dict(before)
            with fault.armed(at if rank == 0 else NEVER, forever=forever):
                try:
                    module = wrap(model)
                except ElixirError as error:
                    failed += 1
                    lost = "build the model again" in str(getattr(error, "__notes__", ""))
                else:  # the operation is one of closing
                    wrapped = True
                    with contextlib.suppress(OSError, ElixirError):
                        module.close()
            assert open_files(folder) == []
            assert lost == lacks_weights(model) == bool(_alike(lost))
            assert all(type(each) is nn.Parameter for each in model.parameters())
            if lost:
                with pytest.raises(InputError, match="build the model again"):
                    wrap(model)
                continue
            if wrapped and dtype is not None:
                continue  # what is frozen has been rounded
            assert same(model.state_dict(), before)
            assert model.head.weight is model.embedding.weight
            assert torch.equal(model(**BATCH), loss)
            model.load_state_dict(before)
            again = wrap(model)
            assert dtype is not None or same(again.state_dict(), before)
            again.close()
    return failed


def rehoming(folder: Path, rank: int, world_size: int, kind: str, dtype: str | None, homes: tuple[str, str]) -> int:
    """Moving chunks fails: they are where they were, with weights and states, and training goes on."""
    source, target = (plan_of(world_size, each, dtype) for each in homes)
    fault, failed = Fault(kind), 0
    probe = Run(fault, folder, world_size, homes[0], dtype)
    probe.train(2)
    probe.module.settle()
    with fault.armed():
        probe.module.rehome(target)
    probe.module.close()
    for at in positions(_alike(fault.count)):
        run = Run(fault, folder, world_size, homes[0], dtype)
        run.train(2)
        before, states = run.module.state_dict(), run.optimizer.state_dict()
        taken = {home: inside.live_bytes(run.module, home) for home in ("device", "host", "disk")}
        with fault.armed(at if rank == 0 else NEVER):
            try:
                run.module.rehome(target)
            except (ElixirError, OSError):
                failed += 1
        if _alike(fault.struck):
            assert run.module.plan == source or kind == "close"
        if run.module.plan == source:
            now = {home: inside.live_bytes(run.module, home) for home in taken}
            assert now == taken
        assert same(run.module.state_dict(), before)
        assert same_states(run.optimizer.state_dict(), states)
        run.train(2)
        if run.module.plan == source:
            run.module.rehome(target)  # later it can be done
        run.train(1)
        run.module.close()
        assert open_files(folder) == []
    return failed


def rehoming_for_good(folder: Path, rank: int, world_size: int, kind: str, homes: tuple[str, str]) -> int:
    """Nothing of a kind works any more from some point of a move on: weights can be had all the same."""
    target = plan_of(world_size, homes[1])
    fault, failed = Fault(kind), 0
    probe = Run(fault, folder, world_size, homes[0])
    probe.train(2)
    with fault.armed():
        probe.module.rehome(target)
    probe.module.close()
    for at in positions(_alike(fault.count)):
        run = Run(fault, folder, world_size, homes[0])
        run.train(2)
        before = bits(run.plain.state_dict())
        with fault.armed(at if rank == 0 else NEVER, forever=True):
            try:
                run.module.rehome(target)
            except (ElixirError, OSError):
                failed += 1
            with contextlib.suppress(OSError, ElixirError):
                run.module.close()
        assert same(run.model.state_dict(), before)
        assert open_files(folder) == []
    return failed


def closing(folder: Path, rank: int, world_size: int, kind: str, dtype: str | None) -> int:
    """Closing fails: all weights are there, rounded where only the disk had more bits, which is said; files are closed."""
    fault, failed = Fault(kind), 0
    probe = Run(fault, folder, world_size, "both", dtype)
    probe.train(2)
    with fault.armed():
        probe.module.close()
    for at in positions(_alike(fault.count)):
        for forever in (False, True):
            run = Run(fault, folder, world_size, "both", dtype)
            run.train(2)
            before = run.module.state_dict()
            said: Exception | None = None
            with fault.armed(at if rank == 0 else NEVER, forever=forever):
                try:
                    run.module.close()
                except (ElixirError, OSError) as error:
                    failed, said = failed + 1, error
            now = run.model.state_dict()
            rounded = [name for name in before if not torch.equal(now[name], before[name].to(now[name].dtype))]
            for name in rounded:
                assert torch.equal(now[name], before[name].to(torch.bfloat16).to(now[name].dtype)), name
            assert not rounded or (dtype is not None and said is not None)
            assert open_files(folder) == []
            torch.optim.SGD(run.model.parameters(), lr=0.1).step()
            run.model(**BATCH).backward()
    return failed


def saving(folder: Path, rank: int, world_size: int, kind: str, dtype: str | None) -> int:
    """Saving fails: the last checkpoint is whole, training goes on, and the next one can be saved."""
    fault, failed = Fault(kind), 0
    states = folder / "states"
    states.mkdir(exist_ok=True)
    run = Run(Fault(""), states, world_size, "both", dtype)
    target = folder / "checkpoint"
    run.train(1)
    save_checkpoint(target, {"model": run.module, "optimizer": run.optimizer}, wait=True)
    last = run.module.state_dict()
    with fault.armed():
        save_checkpoint(folder / "other", {"model": run.module, "optimizer": run.optimizer}, wait=True, files=fault)
    for at in positions(_alike(fault.count)):
        run.train(1)
        now = run.module.state_dict()
        with fault.armed(at if rank == 0 else NEVER):
            try:
                save_checkpoint(target, {"model": run.module, "optimizer": run.optimizer}, wait=True, files=fault)
            except ElixirError:
                failed += 1
            else:
                last = now
        other = Run(Fault(""), states, world_size, "memory", dtype)
        load_checkpoint(target, {"model": other.module, "optimizer": other.optimizer})
        assert same(other.module.state_dict(), last) or same(other.module.state_dict(), now)
        other.module.close()
    run.train(1)
    save_checkpoint(target, {"model": run.module, "optimizer": run.optimizer}, wait=True)
    run.module.close()
    assert open_files(folder) == []
    return failed


def computing(folder: Path, rank: int, world_size: int, kind: str) -> int:
    """Steps fail: no forward gives a loss of weights that are not all of one step. How often one has raised."""
    fault, failed = Fault(kind), 0
    probe = Run(fault, folder, world_size, "disk")
    probe.train(1)
    with fault.armed():
        probe.train(2)
    probe.module.close()
    for at in range(1, _alike(fault.count) + 1, 3):
        run = Run(fault, folder, world_size, "disk")
        run.train(1)
        run.model.register_forward_pre_hook(lambda *_: fault.may_come.set())
        with fault.armed(at if rank == 0 else NEVER, forever=True):
            try:
                for _ in range(3):
                    with torch.no_grad():
                        assert torch.equal(run.module(**BATCH), run.plain(**BATCH))
                    fault.may_come.clear()  # so that the next forward has begun when an operation of this step fails
                    run.step()
            except ElixirError:
                failed += 1
            else:
                assert not fault.struck
            fault.may_come.set()
            with contextlib.suppress(ElixirError, OSError):
                run.module.close()
    return failed


def _alike(count: int) -> int:
    """Rank 0's count, on every rank."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return count
    value = torch.tensor([count])
    dist.broadcast(value, 0)
    return int(value)


def fails_at(lane: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes one of the next pieces of work of a lane fail."""
    submit, left = lane.submit, [number]

    def failing(work: Callable[[], None], **options: Any) -> Any:
        def fail() -> None:
            raise MemoryError("no memory on the way")

        left[0] -= 1
        return submit(work if left[0] else fail, **options)

    monkeypatch.setattr(lane, "submit", failing)
