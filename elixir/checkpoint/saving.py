"""`save_checkpoint`: returns at once; a thread writes the states of this step while training goes on, and commits
them."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elixir.checkpoint.shared_folder import HeartbeatGroup, SharedFolder
from elixir.checkpoint.snapshot import ALIGNMENT_BYTES, ChunkReader, Snapshot, SnapshotPool, key_of
from elixir.checkpoint.user_state import UserState, encoded, rng_state
from elixir.checkpoint_format.folders import new_id, rank_file, shard_file, shared_file
from elixir.checkpoint_format.index import NO_STATES, Index, SavedGroup, encode, merge_tensors
from elixir.checkpoint_format.slices import CHECKSUM_KIND, Slice, SliceWriter, WrittenFile, slice_header
from elixir.chunk.group import Group
from elixir.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    InputError,
    InputTypeError,
    RankError,
)
from elixir.files import FILES, Files, PathLike, absolute
from elixir.optimizer_states import is_adam
from elixir.units import format_bytes
from elixir.wrapper.training_states import WEIGHT, SmallStates, TrainingStates

logger = logging.getLogger(__name__)


def save_checkpoint(
    folder: PathLike,
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    wait: bool = False,
    frozen: bool = True,
    files: Files = FILES,
) -> Saving:
    """Saves a run: returns at once, and a thread writes the states of now while training goes on. All ranks call this.

    Whatever is killed when, the folder holds the checkpoint that was there before, or this one.

    Code that writes to weights otherwise than by a step or a load, such as one that swaps in their mean for an
    evaluation, calls `Saving.wait` first. A save notices what torch counts as a write, but not ``weight.data``.

    Args:
        folder: of the checkpoint, on a file system that all ranks share, or on one of each machine. One that is there
            is replaced when the new one is whole.
        state: the `ElixirModule` and its `ElixirOptimizer`, objects with ``state_dict`` and ``load_state_dict`` such
            as schedulers, `PerRank`, and plain values: None, numbers, text, bytes, lists, tuples, dicts, sets,
            tensors and numpy, in each other. Random number generators, buffers and the loss scale are saved as well.
        step: kept in the checkpoint for people.
        wait: return only when the checkpoint is whole.
        frozen: also save parameters that are not trained, but for those that live in files. Loading leaves parameters
            that are not saved as they are.
        files: the file operations it uses.

    Returns:
        `Saving.wait` says whether it went well.

    Raises:
        InputError: this is not the moment (between backward and ``step``, inside of ``gathered``), or a value in
            `state` cannot be saved; on all ranks.
        CheckpointError: the checkpoint before could not be saved, which was not reported; or, with `wait`, this one.

    Example:
        >>> saving = save_checkpoint("run/step-500", {"model": model, "optimizer": optimizer, "epoch": 3})
        >>> saving.wait()
    """
    user = UserState.of(state)
    saving = Saves.of(user.states).start(user, SaveOptions(Path(os.fspath(folder)), step, frozen, files))
    if wait:
        saving.wait()  # the caller asked for a checkpoint that is whole
    return saving


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was saved or loaded."""

    folder: Path
    """The checkpoint's folder."""
    step: int | None
    """The step that the save was given."""
    sequence: int
    """The larger, the later: among the checkpoints of one folder the one with the largest is the latest."""
    world_size: int
    """Ranks that saved it."""
    notes: tuple[str, ...] = ()
    """One sentence for each thing that was rounded, skipped or left as it was."""

    @property
    def exact(self) -> bool:
        """Whether training goes on with the bits with which it would have gone on without a break."""
        return not self.notes


@dataclass(frozen=True)
class SaveOptions:
    """Options of a save; see `save_checkpoint`."""

    folder: Path
    step: int | None = None
    frozen: bool = True
    files: Files = FILES
    keep: int | None = None
    """Number of checkpoints that stay in the folder around this one, if it `retains`; None for all."""
    retains: bool = False
    """Whether the folder around this one belongs to one run, so that the save removes old checkpoints there."""
    pool_bytes: int | None = None
    """Limit of memory for copies; None: see `TrainingStates.pool_bytes`. For tests."""


@dataclass
class _RankPart:
    """The part of the index that one rank contributes, but for its file."""

    small: dict[str, SmallStates]
    rng: Any
    rank_values: dict[str, Any]
    common: dict[str, Any]
    """Fields of the index that rank 0 provides; empty on the others."""


@dataclass
class _Captured:
    """The small values at the time of the call, and readers of the chunks."""

    readers: list[ChunkReader]
    part: _RankPart
    own_tensors: dict[str, torch.Tensor]
    shared_tensors: dict[str, torch.Tensor]
    state_slices: list[Slice]
    """Slices of the chunks, and parameters without elements, which no rank has a part of."""


@dataclass(frozen=True)
class _Part:
    """A file that this rank writes."""

    name: str
    slices: list[Slice]
    tensors: Mapping[str, torch.Tensor]
    """Tensors of the slices that are in memory, by key."""
    has_states: bool = False
    """Whether the states of the chunks are among the slices."""

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(slice_header(self.slices)) + _bytes_of(self.slices)


@dataclass
class Answers:
    """Values that ranks exchange after some work; see `Saves.together`."""

    mine: Any = None
    """The value of this rank."""
    answers: list[Any] = field(default_factory=list)
    """The values of all ranks, in order of rank, once the work is done."""


class Saves:
    """The saves of one module, one at a time, in a group that no training uses. Implements `StateReader`."""

    def __init__(self, group: Group) -> None:
        self._values = group
        self._pool: SnapshotPool | None = None
        self.current: Saving | None = None
        """The save that is under way, or the last one."""

    @staticmethod
    def of(states: TrainingStates) -> Saves:
        """Returns the saves of a module. All ranks call this, since the first call makes a process group."""
        states.refuse_closed()
        reader = states.reader
        if not isinstance(reader, Saves):
            reader = Saves(states.group.for_values())
            states.reader = reader
        return reader

    def _ended(self) -> CheckpointError | None:
        return None if self.current is None else self.current.end()

    def settle(self) -> None:
        """Waits for the previous save; logs its error if that was not reported yet."""
        error = self._ended()
        if error is not None:
            logger.error("going on after a save that failed: %s", error)

    def let_go(self) -> None:
        """See `StateReader`."""
        if self.current is not None:
            self.current.snapshot.wait_for_live()

    def close(self) -> Exception | None:
        """See `StateReader`."""
        error = self._ended()
        self._values.close()
        return error

    @contextlib.contextmanager
    def together(self, what: str, caught: tuple[type[Exception], ...] = (Exception,)) -> Iterator[Answers]:
        """Surrounds work that all ranks do while no save is under way, and exchanges a value after it. If the work
        raises on some rank, whatever it is, all ranks raise the error of the first such rank.

        Args:
            what: name of the exchange.
            caught: errors that the others hear about.

        Raises:
            CheckpointError: the ranks have lost each other.
        """
        found, problem = Answers(), None
        try:
            yield found
        except caught as error:
            problem = error
        try:
            answers = self._values.exchange(what, (found.mine, None if problem is None else _report_of(problem)))
        except RankError as error:
            raise CheckpointError(str(error)) from error
        for rank, (_, theirs) in enumerate(answers):
            if theirs is not None:
                kind, text, more = theirs
                raise kind(f"rank {rank}: {text}" if self._values.size > 1 else text, **more) from problem
        found.answers = [value for value, _ in answers]

    def start(self, user: UserState, options: SaveOptions) -> Saving:
        """Begins to save; see `save_checkpoint`."""
        error = self._ended()
        if error is not None:
            raise error
        states = user.states
        with self.together("save") as ranks:  # also what a lane has raised: all ranks must raise
            states.refuse("save_checkpoint()")
            captured = _capture(user, options, self._values.rank)
            ranks.mine = (os.fspath(options.folder), user.names(), options.step, options.frozen, new_id())
        answers = ranks.answers
        if any(theirs[:-1] != answers[0][:-1] for theirs in answers):
            rank, theirs = next((r, each) for r, each in enumerate(answers) if each[:-1] != answers[0][:-1])
            raise InputError(f"ranks save different things: rank 0 {answers[0][:-1]}, rank {rank} {theirs[:-1]}")
        options = replace(options, folder=absolute(options.folder))  # the program may go elsewhere while this is saved
        limit = states.pool_bytes if options.pool_bytes is None else options.pool_bytes
        limit -= limit % ALIGNMENT_BYTES
        if self._pool is None or self._pool.limit_bytes != limit:
            self._pool = SnapshotPool(states.host_buffers, limit)
        self.current = Saving(user, options, answers[0][-1], captured, self._pool, self._values)
        return self.current


class Saving:
    """A save that is under way, or has ended."""

    def __init__(
        self,
        user: UserState,
        options: SaveOptions,
        checkpoint_id: str,
        captured: _Captured,
        pool: SnapshotPool,
        group: Group,
    ) -> None:
        self._options, self._id, self._captured, self._group = options, checkpoint_id, captured, group
        self._shares = user.states.group  # not the module: who keeps a save that has ended must not keep its memory
        self._states = captured.state_slices
        self.nbytes = _bytes_of(self._states + whole_slices(captured.own_tensors))
        """Bytes of tensors that this rank writes. States that another replica writes count until that is known."""
        self.snapshot = Snapshot(captured.readers, pool, user.states.device)
        self._ended = threading.Event()
        self._outcome: Loaded | CheckpointError  # once it has ended
        self._reported = False
        for index, reader in enumerate(captured.readers):
            reader.chunk.before_write = partial(self.snapshot.release, index)
        # No daemon: the interpreter ends after the checkpoint is whole.
        self._thread = threading.Thread(target=self._run, name="elixir save")
        self._thread.start()

    @property
    def stall_s(self) -> float:
        """Seconds for which updates have waited for this save so far, with the time for copies."""
        return self.snapshot.stall_s

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Loaded:
        """Waits until the checkpoint is whole.

        Args:
            timeout: in seconds.

        Raises:
            CheckpointError: it could not be saved, and the one before is as it was; or it is still being written after
                `timeout`.
        """
        if not self._ended.wait(timeout):
            raise CheckpointError(f"{self._options.folder} is still being written after {timeout} s")
        self._reported = True
        if isinstance(self._outcome, CheckpointError):
            raise self._outcome
        return self._outcome

    def end(self) -> CheckpointError | None:
        """Waits until the save has ended; returns its error if that was not reported yet."""
        self._ended.wait()  # the caller saves again, loads or closes: one save at a time reads the chunks
        reported, self._reported = self._reported, True
        return self._outcome if isinstance(self._outcome, CheckpointError) and not reported else None

    def _run(self) -> None:
        started = time.perf_counter()
        ranks = HeartbeatGroup(self._group)
        try:
            self._outcome = self._save(ranks)
            written, took_s = format_bytes(self.nbytes), time.perf_counter() - started
            said = "%s: %s of this rank written in %.1f s, for which updates waited %.2f s"
            logger.info(said, self._options.folder, written, took_s, self.stall_s)
        except BaseException as error:  # raised where the save is waited for
            # This stays the outcome if telling the other ranks fails.
            self._outcome = CheckpointError(f"{self._options.folder} was not saved: {error}")
            self.snapshot.end()  # training goes on before the ranks have come together
            failed = ranks.fail(error)
            if failed is not error:
                failed.__cause__ = error
            self._outcome = failed
            logger.error("%s was not saved: %s", self._options.folder, failed)
            _let_go_of_frames(failed)
            del failed
        finally:
            self.snapshot.end()
            self._let_go()
            self._ended.set()

    def _let_go(self) -> None:
        for reader in self._captured.readers:
            reader.chunk.before_write = None
        self._captured.readers.clear()
        del self._captured.own_tensors, self._captured.shared_tensors

    def _save(self, ranks: HeartbeatGroup) -> Loaded:
        options, captured, group, files = self._options, self._captured, self._group, self._options.files
        folder = SharedFolder.found(options.folder, self._id, group.rank, ranks, files)
        before = folder.clean_up()
        shared = captured.shared_tensors
        if folder.count > 1:
            shared = ranks.exchange(shared if group.rank == 0 else None)[0]
        parts = self._parts(folder, shared)
        folder.check_space(sum(part.nbytes for part in parts))
        try:
            written = [self._write(part, ranks) for part in parts]
            sequence = folder.next_sequence()
            folder.check_written(written)
            index = _index(self._id, sequence, ranks.exchange((written, captured.part)), options)
            folder.commit(index, before)
        except BaseException:
            folder.abandon(self._id)
            raise
        if options.retains:
            folder.retain(options.keep)
        ranks.exchange()  # an error of any leader is an error of all
        return Loaded(options.folder, options.step, sequence, group.size)

    def _parts(self, folder: SharedFolder, shared: Mapping[str, torch.Tensor]) -> list[_Part]:
        """Returns the files that this rank writes.

        All that share a folder find each shard there once: replicas have the same, and the first of them writes it.
        """
        chunks, own = self._shares, self._captured.own_tensors
        name = rank_file(self._id, chunks.rank, chunks.size)
        if chunks.replicas == 1:
            found = [_Part(name, self._states + whole_slices(own), own, has_states=True)]
        else:
            found = [_Part(name, whole_slices(own), own)]
            if next(rank for rank in folder.ranks if rank % chunks.shards == chunks.shard) == chunks.rank:
                found.append(
                    _Part(shard_file(self._id, chunks.shard, chunks.shards), self._states, {}, has_states=True)
                )
            else:
                self.snapshot.end()
                self.nbytes -= _bytes_of(self._states)
        if shared and folder.leads:
            found.append(_Part(shared_file(self._id), whole_slices(shared), shared))
        return found

    def _write(self, part: _Part, ranks: HeartbeatGroup) -> WrittenFile:
        writer = SliceWriter(self._options.folder / part.name, part.slices, files=self._options.files)
        try:
            if part.has_states:
                self.snapshot.write(writer.write_span, ranks.heartbeat)
            for key, tensor in part.tensors.items():
                writer.write_tensor(key, tensor)
                ranks.heartbeat()
            return writer.finish()
        except BaseException:
            writer.abandon()
            raise


def _let_go_of_frames(error: BaseException | None) -> None:
    """Clears what the functions held that an error has left, and its causes, such as chunks; its printed text stays."""
    todo, seen = [error], set[int]()
    while todo:
        each = todo.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            todo += [each.__cause__, each.__context__]


def _capture(user: UserState, options: SaveOptions, rank: int) -> _Captured:
    """Records what is small and how the chunks are laid out. Afterwards steps may go on."""
    states = user.states
    small: dict[str, SmallStates] = {}
    states.follow_writes()
    chunks = states.chunks(frozen=options.frozen)
    for chunk in chunks:
        if not chunk.is_settled:  # a step may be making states: the file's layout is known after it
            chunk.wait()
    readers = [ChunkReader(chunk, small) for chunk in chunks]
    for reader in readers:
        clash = next((each for each in reader.states_only if each.kind in NO_STATES), None)
        if clash is not None:
            raise InputError(f"a state of an optimizer cannot be named {clash.kind!r}: that of {clash.name} is")
    values, tensors = encoded(user.values)
    for name, buffer in states.buffers().items():
        tensors[f"buffer/{name}"] = buffer.detach().to("cpu", copy=True).contiguous()
    groups: list[SavedGroup] = []
    optimizers: dict[str, Any] = {}
    for name, optimizer in states.optimizers.items():
        for number, (names, group) in enumerate(states.groups(optimizer)):
            data, found = encode(group, f"param_groups.{name}[{number}]")
            groups.append(SavedGroup(name, names, data))
            tensors |= found
        optimizers[name] = states.optimizer_values(name)
    rank_values, own = encoded(user.rank_values, f"[{rank}]")
    rng, found = encode(rng_state(states.device), f"rng[{rank}]")
    plan = states.plan
    common = {
        "values": values,
        "param_groups": tuple(groups),
        "optimizers": optimizers,
        "aliases": states.aliases(),
        "loss_scale": states.loss_scale.state() if states.loss_scale.used else None,
        "moments": plan.moments if optimizers and is_adam(plan.optimizer) else None,
        "model_fingerprint": plan.model_fingerprint,
        "plan_fingerprint": plan.fingerprint,
        "has_frozen": options.frozen and not plan.reads_files,
    }
    empty = [
        Slice(key_of(WEIGHT, slot.name), tuple(slot.shape), each.target.dtype, 0, 0, order=slot.order)
        for each in chunks
        for slot in each.chunk.slots
        if not slot.numel
    ]
    part = _RankPart(small, rng, rank_values, common if rank == 0 else {})
    slices = [each for reader in readers for each in reader.slices()]
    return _Captured(readers, part, own | found, tensors, slices + empty)


def _index(
    checkpoint_id: str,
    sequence: int,
    answers: list[tuple[list[WrittenFile], _RankPart]],
    options: SaveOptions,
) -> Index:
    """Makes the index of what all ranks have written: the same bytes on every rank.

    Args:
        checkpoint_id: of the save.
        sequence: of the checkpoint.
        answers: of each rank the files that it has written, and its part of the index.
        options: of the save.

    Raises:
        CheckpointError: replicas have different states.
    """
    by_name: dict[str, WrittenFile] = {}
    for rank, (written, _) in enumerate(answers):
        for file in written:  # with several file systems, each has those that are for several ranks
            if by_name.setdefault(file.name, file) != file:
                raise CheckpointError(
                    f"rank {rank} has other bytes of {file.name} than a rank before it: the replicas no longer have "
                    "the same weights and states; load the checkpoint before this one"
                )
    files, parts = list(by_name.values()), [part for _, part in answers]
    small = {name: each for part in parts for name, each in part.small.items()}
    common = parts[0].common
    tensors = merge_tensors(file.tensors for file in files)
    common["aliases"] = {
        name: first
        for name, first in common["aliases"].items()
        if any(key_of(kind, first) in tensors for kind in (WEIGHT, "buffer"))
    }
    return Index(
        id=checkpoint_id,
        sequence=sequence,
        step=options.step,
        world_size=len(parts),
        checksum_kind=CHECKSUM_KIND,
        files={file.name: file.nbytes for file in files},
        tensors=tensors,
        steps={name: each.step for name, each in sorted(small.items()) if each.step is not None},
        scalars={name: encode(each.others, name)[0] for name, each in sorted(small.items()) if each.others},
        rng=tuple(part.rng for part in parts),
        rank_values=tuple(part.rank_values for part in parts) if parts[0].rank_values else (),
        **common,
    )


def whole_slices(tensors: Mapping[str, torch.Tensor]) -> list[Slice]:
    """Slices of tensors that one file holds as a whole."""
    return [Slice(key, tuple(each.shape), each.dtype, 0, each.numel()) for key, each in tensors.items()]


def _bytes_of(slices: list[Slice]) -> int:
    return sum(each.nbytes for each in slices)


def _report_of(error: Exception) -> tuple[type[Exception], str, dict[str, Any]]:
    """Describes an error to other ranks: its class, or a base of it, the message, and further arguments."""
    text = str(error) or type(error).__name__
    if isinstance(error, CheckpointMismatch):
        return CheckpointMismatch, text, {key: getattr(error, key) for key in ("missing", "unexpected", "shapes")}
    if isinstance(error, CheckpointCorrupt):
        text = text.removeprefix(f"{error.path}: ").removeprefix(f"{error.key}: ")
        return CheckpointCorrupt, text, {"path": error.path, "key": error.key}
    for kind in (CheckpointNotFound, CheckpointError, InputTypeError, InputError):
        if isinstance(error, kind):
            return kind, text, {}
    return CheckpointError, text, {}
