"""The tests' one door into the runtime.

Tests use public names, the classes of the package they test, and this file. Everything that a test of a whole run sees
or disturbs below the public names goes through here, so that a runtime of another shape changes this file and no test.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from elixir.checkpoint import saving, snapshot
from elixir.checkpoint.snapshot import COPIES, Snapshot, SnapshotPool
from elixir.checkpoint_format import index as index_file
from elixir.checkpoint_format.index import Index
from elixir.checkpoint_format.slices import WrittenFile
from elixir.chunk import chunk as chunk_file
from elixir.chunk import memory as pages
from elixir.chunk.chunk import Chunk
from elixir.chunk.gradients import chunk_gradient
from elixir.chunk.gradients.chunk_gradient import ChunkGradient
from elixir.chunk.gradients.gradient_flow import GradientFlow
from elixir.chunk.group import Group
from elixir.chunk.host_buffers import HostBuffers
from elixir.chunk.lanes import Lane, Lanes, StepCounts
from elixir.chunk.memory import Arena, Ticket
from elixir.chunk.rcache import RCache
from elixir.chunk.state_window import StateWindow
from elixir.hardware.host_share import HostShare
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper import phase as phase_file
from elixir.wrapper.account.plan_promise import PlanPromise
from elixir.wrapper.engine import AnyStepper, Engine, engine_of
from elixir.wrapper.loss_scale import LossScale
from elixir.wrapper.one_pass.one_pass import OnePass
from elixir.wrapper.optimizer import stepper_of
from elixir.wrapper.phase import Phase, StepPhase
from elixir.wrapper.step.shard import SteppedShard

if TYPE_CHECKING:
    from elixir.microbench.bench import Effort

# --- memory ----------------------------------------------------------------------------------------------------------


def arena(module: ElixirModule) -> Arena:
    """The account of all memory, where a test reads it again and again."""
    return engine_of(module).arena


def bytes_by_kind(module: ElixirModule, home: str) -> dict[str, int]:
    """Bytes that are taken now on the ``device``, ``host`` or ``disk``, by what they hold."""
    return dict(engine_of(module).arena.parts(home))


def live_bytes(module: ElixirModule, home: str) -> int:
    """Bytes that are taken now."""
    return engine_of(module).arena.live_bytes(home)


def peak_bytes(module: ElixirModule, home: str) -> int:
    """The most bytes that were taken at a time."""
    return engine_of(module).arena.peak_bytes[home]


def host_buffers(module: ElixirModule, kind: str) -> Any:
    """The host buffers of a kind of `elixir.chunk.host_buffers`."""
    return engine_of(module).host_buffers.of(kind)


def spare_host_bytes(module: ElixirModule) -> int:
    """Host memory that the plan leaves for copies of a checkpoint."""
    return engine_of(module).spare_host_bytes()


@contextlib.contextmanager
def pages_made_by(of: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces the function that makes memory in separate pages by what `of` returns for it, such as a failing one."""
    with mock.patch.object(pages, "_touched", of(pages._touched)):
        yield


# --- chunks, and the states of their shards --------------------------------------------------------------------------


def chunks(module: ElixirModule) -> list[Chunk]:
    """The chunks of a running plan."""
    return engine_of(module).chunks


def chunk_of(module: ElixirModule, weight: str | torch.Tensor) -> Chunk:
    """The chunk with a weight, given by its name or itself."""
    return next(
        chunk
        for chunk in chunks(module)
        if any(slot.name == weight if isinstance(weight, str) else slot.parameter is weight for slot in chunk.slots)
    )


def is_ordinary(module: ElixirModule, chunk: Chunk) -> bool:
    """Whether the weights of a chunk are ordinary parameters, resident and of one rank."""
    return engine_of(module).is_ordinary(chunk)


def transitions(of: type) -> Mapping[Any, Collection[Any]]:
    """The table of a class with a state: which states may follow each."""
    return {
        Chunk: chunk_file._ALLOWED,
        ChunkGradient: chunk_gradient._NEXT,
        Snapshot: snapshot._ALLOWED,
        StepPhase: phase_file._NEXT,
    }[of]


def shards(of: ElixirModule | ElixirOptimizer) -> list[SteppedShard]:
    """The shards that an optimizer steps; of a module, those of its first optimizer."""
    stepper: Any = stepper_of(of) if isinstance(of, ElixirOptimizer) else engine_of(of).steppers[0]
    return list(stepper.shards)


def stepper(of: ElixirModule | ElixirOptimizer) -> Any:
    """The stepper of an optimizer; of a module, that of its only one."""
    if isinstance(of, ElixirOptimizer):
        return stepper_of(of)
    (found,) = engine_of(of).steppers
    return found


def early_counts(module: ElixirModule) -> tuple[int, int]:
    """Chunks with new states when the last step began, and how many of them it kept."""
    report = module.last_report
    assert report is not None
    return report.early.made, report.early.kept


def steppers(module: ElixirModule) -> list[AnyStepper]:
    """The steppers of all optimizers of a module."""
    return engine_of(module).steppers


# --- the rCache, gradients, ranks ------------------------------------------------------------------------------------

LOADS, OPENS, SENDS = (RCache, "_load"), (GradientFlow, "_opened"), (GradientFlow, "_send")
"""The methods, by class and name, that load a chunk, and that open and send its gradient."""


def cache(module: ElixirModule) -> RCache:
    """The rCache."""
    return engine_of(module).cache


def counts(module: ElixirModule) -> StepCounts:
    """The counts of the step."""
    return engine_of(module).lanes.counts


def gradients(module: ElixirModule) -> GradientFlow:
    """The way of gradients to where they live."""
    return engine_of(module).gradients


def holds_gradients(module: ElixirModule) -> bool:
    """Whether any gradients wait for a step."""
    return engine_of(module).holds_gradients()


def group(module: ElixirModule) -> Group:
    """The ranks of a module."""
    return engine_of(module).group


# --- lanes and phases ------------------------------------------------------------------------------------------------


def lane(module: ElixirModule, name: str) -> Lane:
    """A lane: ``fetch``, ``network``, ``offload``, ``host_adam``, ``refresh`` or ``disk``."""
    return engine_of(module).lanes.by_name()[name]


def lanes(module: ElixirModule) -> Lanes:
    """All lanes, by name."""
    return engine_of(module).lanes


def updates(module: ElixirModule) -> list[Ticket]:
    """Work that writes to weights or states of chunks at home, such as updates."""
    memories = [memory for chunk in chunks(module) for memory in (chunk.states, chunk.second, chunk.at_home)]
    return [ticket for memory in memories for ticket in memory.users]


def phase(module: ElixirModule) -> Phase:
    """The phase of the step that the module is in."""
    return engine_of(module).phase.now


def sweep_within(monkeypatch: pytest.MonkeyPatch, mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """Runs backward through the layers of a pass of several micro-batches inside of a context."""
    sweep = OnePass._sweep

    def swept(one_pass: OnePass) -> None:
        with mode():
            sweep(one_pass)

    monkeypatch.setattr(OnePass, "_sweep", swept)


def loss_scale(module: ElixirModule) -> LossScale:
    """The scale of losses."""
    return engine_of(module).loss_scale


def window(module: ElixirModule) -> StateWindow:
    """The way of states between a disk and the host."""
    return engine_of(module).window


# --- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint_pool(module: ElixirModule) -> SnapshotPool:
    """Memory for copies of the states that a save reads, once there was a save."""
    reader: Any = engine_of(module).state_reader
    return reader._pool  # type: ignore[no-any-return]


def pool_of(limit_bytes: int) -> SnapshotPool:
    """Memory for copies without a module."""
    return SnapshotPool(HostBuffers(Arena(torch.device("cpu"))), limit_bytes)


def taken_bytes(pool: SnapshotPool, *, most: bool = False) -> int:
    """Bytes of areas that are taken now; or the `most` host memory that the pool ever had."""
    if most:
        return pool._buffers._arena.peak_bytes["host"]
    lent = pool._buffers._lent[COPIES]
    lent.taken_back()
    return sum(end - begin for begin, end in lent._inside.values())


def snapshot_part(states: snapshot.ChunkReader) -> Any:
    """A chunk of a snapshot."""
    return snapshot._Part(states)


def updates_waiting(of: Snapshot) -> list[int]:
    """Chunks whose updates wait for the writer of a snapshot, or have waited."""
    return of._wanted


def index_text(body: dict[str, Any]) -> str:
    """An index made by hand, with the checksum that it should have."""
    return index_file._text(body | {"checksum": index_file._checksum(body)})


def index_of(checkpoint_id: str, files: Sequence[list[WrittenFile]], options: saving.SaveOptions) -> Index:
    """Makes the index of the files that each rank has written."""
    answers = [(each, saving._RankPart({}, None, {}, {})) for each in files]
    return saving._index(checkpoint_id, 1, answers, options)


# --- limits and memories of the process ------------------------------------------------------------------------------

LIMITS = {
    "look_s": "elixir.chunk.group._LOOK_S",  # after which a blocked rank looks whether the ranks have parted
    "sent_bytes": "elixir.chunk.group._PIECE_BYTES",  # that rank 0 sends at once
    "converted_numel": "elixir.wrapper.step.states._PIECE_NUMEL",  # of moments, at once
    "slow_numel": "elixir.wrapper.step.shard._SLOW_NUMEL",  # from which on a slow class of optimizer is reported
}
MEMORIES: dict[str, dict[str, type]] = {
    "promises": {"elixir.hardware.promises._AT_WORK": weakref.WeakSet},  # of memory, by other models
    "Adam kernels": {"elixir.kernels.adam.step._begun": dict},
}


def limit(monkeypatch: pytest.MonkeyPatch, **limits: float) -> None:
    """Sets limits of `LIMITS` by name."""
    for name, value in limits.items():
        monkeypatch.setattr(LIMITS[name], value)


def forget(monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    """Empties one of `MEMORIES`, as in a new process."""
    for place, kind in MEMORIES[memory].items():
        monkeypatch.setattr(place, kind())


# --- plans and machines ----------------------------------------------------------------------------------------------


def may_replan(module: ElixirModule) -> bool:
    """Whether the plan is still corrected by what the first steps show."""
    return engine_of(module).before_forward is not None


def promise(module: ElixirModule) -> PlanPromise:
    """The module's promise about memory."""
    found: PlanPromise = vars(module)["_promise"]
    return found


def other_promise(module: ElixirModule, **options: Any) -> PlanPromise:
    """A second promise for the same module, as another model of the process makes it."""
    return PlanPromise(module.module, engine_of(module), **options)


def host_share(module: ElixirModule) -> HostShare:
    """The rank's share of its machine's cores."""
    return engine_of(module).host_share


def pretend_device(monkeypatch: pytest.MonkeyPatch, module: ElixirModule, device: torch.device) -> None:
    """Makes the runtime believe that the module computes there."""
    monkeypatch.setattr(engine_of(module), "device", device)


def engine(module: ElixirModule) -> Engine:
    """The whole runtime of a module, for the few tests of how its parts work together."""
    return engine_of(module)


# --- planning, tracing and the command line --------------------------------------------------------------------------


def cross_entropy_unchecked(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean loss as on a device other than the CPU, where nobody looks whether the targets are classes."""
    from elixir.kernels.model.linear_cross_entropy import _LinearCrossEntropy

    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, None, target, -100, True)
    return loss


def measure_with(monkeypatch: pytest.MonkeyPatch, effort: Effort) -> None:
    """Lets measurements of the CPU, quick ones and others, take this effort."""
    from elixir.microbench import bench

    monkeypatch.setattr(bench, "_EFFORTS", dict.fromkeys([("cpu", False), ("cpu", True)], effort))


def rate_of_work(run: Callable[[], object], amount: float, lane: ThreadPoolExecutor | None = None) -> Any:
    """A rate that is measured briefly: of a run that amounts to something, on this thread or on that of a lane."""
    from elixir.microbench.brief import _Rate

    return _Rate(run, amount, lane=lane)


def attention_is_counted_with_groups() -> bool:
    """Whether this PyTorch counts the FLOPs of attention whose heads share keys."""
    from elixir.tracer.operation_kinds import _formulas_take_groups

    return _formulas_take_groups()


def count_attention_without_groups(monkeypatch: pytest.MonkeyPatch, formula: Callable[..., int]) -> None:
    """Counts attention by a formula that refuses heads which share keys."""
    from elixir.tracer import operation_kinds

    monkeypatch.setattr(operation_kinds, "_FORMULAS_TAKE_GROUPS", False)
    for kernel in operation_kinds._SHARES_HEADS:
        monkeypatch.setitem(operation_kinds.flop_registry, kernel, formula)
