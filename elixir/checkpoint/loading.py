"""`load_checkpoint`: puts a checkpoint into a run, whatever ranks, chunks, homes and moments it was saved with."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elixir.checkpoint.saving import Loaded, Saves
from elixir.checkpoint.shared_folder import known_indexes, newest_of_all
from elixir.checkpoint.user_state import UserState, check_tensor, restore, restore_rng
from elixir.checkpoint_format.folders import read_index
from elixir.checkpoint_format.index import INDEX_NAME, Index
from elixir.checkpoint_format.slice_reader import SavedCheckpoint
from elixir.checkpoint_format.slices import SPAN_BYTES, SavedTensor
from elixir.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    ElixirError,
    FileError,
    InputError,
)
from elixir.files import FILES, Files, PathLike
from elixir.memory_order import Order, flattened, shaped
from elixir.units import dtype_name
from elixir.wrapper.loss_scale import LossScale
from elixir.wrapper.step.user_optimizer import take_options
from elixir.wrapper.training_states import SCALE_SUFFIX, SavedState, SavedStates, SmallStates

logger = logging.getLogger(__name__)

_ADAMS = ("Adam", "AdamW", "HybridAdam")
"""Classes whose states are the same."""
_SHOWN = 5


def load_checkpoint(
    folder: PathLike, state: MutableMapping[str, Any], *, strict: bool = True, rng: bool = True, files: Files = FILES
) -> Loaded:
    """Loads a checkpoint into a run, in place. All ranks call this.

    The ranks, the plan, and how moments are kept may be others than those it was saved with; `Loaded.notes` says what
    is not exact then.

    Args:
        folder: of the checkpoint.
        state: as for `save_checkpoint`. Plain values are replaced in the dict. What is left out is not loaded.
        strict: refuse a checkpoint that lacks something of `state`, or has other parameters. Otherwise it is left as it
            is.
        rng: restore random number generators, if the number of ranks is the same.
        files: the file operations it uses.

    Raises:
        CheckpointNotFound: the folder holds no checkpoint. CheckpointCorrupt, CheckpointError: it is damaged or cannot
        be read, or an object of `state` raised on some rank. If weights have been written to by then, the module
        refuses to run, on all ranks, until a load succeeds.
        CheckpointMismatch: it is of something else; nothing was changed.

    Example:
        >>> state = {"model": model, "optimizer": optimizer, "epoch": 0}
        >>> load_checkpoint("run/step-500", state)
        >>> state["epoch"]
        3
    """
    user = UserState.of(state)
    saves = Saves.of(user.states)
    saves.settle()
    path = Path(os.fspath(folder))
    index = _agreed_index(path, user, saves, files)
    with SavedCheckpoint(path, index, files=files) as saved:
        load = _Loading(path, user, state, saved, strict, rng)
        with saves.together("load") as ranks:
            load.check()
            values = load.decode()
            ranks.mine = load.files_here
        load.refuse_missing(set().union(*ranks.answers))
        half = f"the load of {path} did not come to its end"
        load.states.begin_to_load(half)
        with saves.together("loaded"):
            load.write()
    try:
        with saves.together("restored") as ranks:
            load.states.show()
            load.finish(values)
            ranks.mine = sorted(load.notes)
    except BaseException:
        load.states.begin_to_load(half)
        raise
    said = tuple(dict.fromkeys(note for each in ranks.answers for note in each))
    for note in said if user.states.group.rank == 0 else ():
        logger.info("%s: %s", path, note)
    return Loaded(path, index.step, index.sequence, index.world_size, said)


def _agreed_index(folder: Path, user: UserState, saves: Saves, files: Files) -> Index:
    """Agrees on the newest checkpoint of the folder that all ranks see, also if a commit was cut off, which the next
    save ends."""
    with saves.together("find", (ElixirError, FileError)) as ranks:
        user.states.refuse("load_checkpoint()", loading=True)
        known = known_indexes(folder, files)
        if not known:
            read_index(folder, files=files)  # raises what is wrong with it
        ranks.mine = user.names(), [each.id for each in known]
    names, seen = (list(each) for each in zip(*ranks.answers, strict=True))
    if any(theirs != names[0] for theirs in names):
        raise InputError("ranks load into different things: `state` must have the same names and kinds on all ranks")
    chosen = newest_of_all(seen)
    if chosen is None:
        raise CheckpointNotFound(f"{folder} holds no checkpoint that all ranks have: they see {seen}")
    return next(each for each in known if each.id == chosen)


@dataclass(eq=False)
class _Loading:
    """One load on one rank."""

    _folder: Path
    _user: UserState
    _state: MutableMapping[str, Any]
    _saved: SavedCheckpoint
    _strict: bool
    _rng: bool

    def __post_init__(self) -> None:
        self.states, self._index = self._user.states, self._saved.index
        self._rank = self.states.group.rank
        self._skipped: set[str] = set()
        self._optimizers: dict[str, str] = {}
        """Name of an optimizer in the state -> in the checkpoint."""
        self.notes: set[str] = set()
        self.files_here: set[str] = set()
        """Files that this rank sees. With node-local disks other ranks see other files. A file that this rank needs and
        does not see fails when it is read."""

    def check(self) -> None:
        """Raises `CheckpointMismatch` where the checkpoint is of something else, before anything is written."""
        self._check_parameters()
        self._check_buffers()
        self._check_optimizers()
        self._check_values()
        self.files_here = {name for name in self._index.files if (self._folder / name).exists()}
        for name in self.files_here:
            self._saved.check_file(name)

    def refuse_missing(self, seen: Collection[str]) -> None:
        """Raises `CheckpointCorrupt` for a file that no rank sees, before anything is written."""
        for name, nbytes in self._index.files.items():
            if name not in seen:
                raise CheckpointCorrupt(f"missing; the index says it has {nbytes} bytes", path=self._folder / name)

    def _check_parameters(self) -> None:
        here = self.states.parameters()
        there = {name: self._index.tensors[f"weight/{name}"].shape for name in self._index.names}
        differ = _difference({name: shape for name, (shape, _) in here.items()}, there)
        self._skipped = set(differ["missing"])
        if not self._index.has_frozen:
            differ["missing"] = [name for name in differ["missing"] if here[name][1]]
        missing, unexpected, shapes = differ.values()
        if shapes:
            name = next(iter(shapes))
            raise CheckpointMismatch(
                f"{self._folder}: {len(shapes)} parameters have another shape, such as {name}: {list(shapes[name][0])} "
                f"in the checkpoint, {list(shapes[name][1])} here; build the model that was saved",
                **differ,
            )
        if self._strict and (missing or unexpected):
            raise CheckpointMismatch(
                f"{self._folder} is of another model: missing {_few(missing)}, unexpected {_few(unexpected)}; build "
                "the model that was saved, or give strict=False",
                **differ,
            )
        if missing:
            self.notes.add(f"parameters that the checkpoint lacks are left as they are: {_few(missing)}")
        if unexpected:
            self.notes.add(f"parameters that are not here are skipped: {_few(unexpected)}")
        if len(self._skipped) > len(missing):
            logger.info("%s was saved without frozen parameters, which are left as they are", self._folder)

    def _check_buffers(self) -> None:
        here = {name: tuple(buffer.shape) for name, buffer in self.states.buffers().items()}
        saved = self._index.tensors.items()
        there = {key.removeprefix("buffer/"): each.shape for key, each in saved if key.startswith("buffer/")}
        differ = _difference(here, there)
        missing, unexpected, shapes = differ.values()
        if shapes or (self._strict and (missing or unexpected)):
            raise CheckpointMismatch(
                f"{self._folder}: buffers differ: missing {_few(missing)}, unexpected {_few(unexpected)}, of another "
                f"shape {_few(shapes)}; build the model that was saved",
                **differ,
            )

    def _check_optimizers(self) -> None:
        here, theirs = list(self.states.optimizers), list(self._index.optimizers)
        for name in here:
            if name in theirs:
                self._optimizers[name] = name
            elif len(here) == len(theirs) == 1:
                self._optimizers[name] = theirs[0]
            elif self._strict:
                raise CheckpointMismatch(
                    f"{self._folder} has no optimizer {name!r}, only {_few(theirs)}; leave it out, or give "
                    "strict=False",
                    missing=[name],
                )
            else:
                self.notes.add(f"optimizer {name!r} is not in the checkpoint and begins anew")
        for name, saved_name in self._optimizers.items():
            optimizer = self.states.optimizers[name]
            said = self._saved.decoded(self._index.optimizers[saved_name], f"optimizers.{saved_name}")
            saved_class = said.get("class") if isinstance(said, dict) else None
            mine = self.states.optimizer_values(name)["class"]
            if saved_class != mine and not (saved_class in _ADAMS and mine in _ADAMS):
                raise CheckpointMismatch(
                    f"{self._folder}: {saved_name!r} was a {saved_class}, {name!r} is a {mine}, whose states "
                    "are others; leave it out of the state, or make the optimizer that was saved"
                )
            for names, _ in self.states.groups(optimizer):
                if self._group_of(saved_name, names) is None:
                    if self._strict:
                        raise CheckpointMismatch(
                            f"{self._folder}: the parameters of a group of {name!r} ({_few(list(names))}) are in no "
                            "group, or in several, of the optimizer that was saved; make the same groups, or give "
                            "strict=False, which keeps the options that this group has here"
                        )
                    self.notes.add(f"a group of {name!r} keeps the options that it has here: {_few(list(names))}")
        unused = [name for name in theirs if name not in self._optimizers.values()]
        if unused and here:
            self.notes.add(f"optimizers that are not in the state are skipped: {_few(unused)}")

    def _group_of(self, optimizer: str, names: Collection[str]) -> int | None:
        """Finds the saved group with the same parameters, otherwise one that has all of them."""
        wanted = set(names)
        around = None
        for number, group in enumerate(self._index.param_groups):
            if group.optimizer == optimizer:
                theirs = set(group.names)
                if theirs == wanted:
                    return number
                if wanted <= theirs:
                    around = number
        return around

    def _check_values(self) -> None:
        there = set(self._index.values)
        missing = [name for name in self._user.values if name not in there]
        per_rank = set(self._index.rank_values[0]) if self._index.rank_values else set()
        missing += [name for name in self._user.rank_values if name not in per_rank]
        if missing and self._strict:
            raise CheckpointMismatch(
                f"{self._folder} has no {_few(missing)}; leave it out of the state, or give strict=False",
                missing=missing,
            )
        if missing:
            self.notes.add(f"values that the checkpoint lacks are left as they are: {_few(missing)}")
        if self._user.rank_values and self._index.world_size != self.states.group.size:
            raise CheckpointMismatch(
                f"{self._folder} has {_few(list(self._user.rank_values))} for each of {self._index.world_size} ranks, "
                f"here are {self.states.group.size}; leave it out of the state and begin it anew"
            )
        left = sorted((there | per_rank) - set(self._user.values) - set(self._user.rank_values))
        if left:
            logger.info("%s also has %s, which the state does not ask for", self._folder, _few(left))

    def decode(self) -> dict[str, Any]:
        """Reads and checks everything small before anything is written.

        Raises:
            CheckpointMismatch: a tensor or a group of the state cannot take what was saved.
            CheckpointCorrupt: the index has something that no save writes there.
        """
        saved, index = self._saved, self._index
        found: dict[str, Any] = {
            "values": {name: saved.value(name) for name in self._user.values if name in index.values},
            "rank_values": {
                name: saved.decoded(index.rank_values[self._rank][name], f"{name}[{self._rank}]")
                for name in self._user.rank_values
                if index.rank_values and name in index.rank_values[self._rank]
            },
            "buffers": {
                name: saved.read_whole(f"buffer/{name}")
                for name in self.states.buffers()
                if f"buffer/{name}" in index.tensors
            },
            "groups": {},
            "optimizers": {},
            "loss_scale": None if index.loss_scale is None else saved.mapping(index.loss_scale, "loss_scale"),
        }
        for name, value in found["values"].items():
            self.notes |= check_tensor(name, self._state[name], value, self._folder)
        for name in index.scalars:
            saved.scalars(name)  # read again, one by one, where they are written
        if found["loss_scale"] is not None:
            with self._as_corrupt("loss_scale"):
                LossScale(True, 1.0, 1).load(found["loss_scale"])
        for name, saved_name in self._optimizers.items():
            found["optimizers"][name] = saved.mapping(index.optimizers[saved_name], f"optimizers.{saved_name}")
            for names, group in self.states.groups(self.states.optimizers[name]):
                number = self._group_of(saved_name, names)
                if number is not None:
                    key = f"param_groups[{number}].options"
                    options = saved.mapping(index.param_groups[number].options, key)
                    with self._as_corrupt(key):
                        try:
                            found["groups"][name, names] = self.states.loaded_options(name, group, options)
                        except InputError as error:
                            raise CheckpointMismatch(f"{self._folder}: {error}") from error
        if self._rng and index.rng and index.world_size == self.states.group.size:
            key = f"rng[{self._rank}]"
            found["rng"] = saved.mapping(index.rng[self._rank], key)
            with self._as_corrupt(key):
                self.notes |= restore_rng(found["rng"], self.states.device, try_only=True)
        elif self._rng:
            self.notes.add(
                f"random number generators are left as they are: saved by {index.world_size} ranks, loaded by "
                f"{self.states.group.size}"
            )
        return found

    @contextlib.contextmanager
    def _as_corrupt(self, key: str) -> Iterator[None]:
        """Turns any exception except a `CheckpointError` into a `CheckpointCorrupt` about `key` of the index."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            problem, path = f"not what was saved: {type(error).__name__} {error}", self._folder / INDEX_NAME
            raise CheckpointCorrupt(problem, path=path, key=key) from error

    def write(self) -> None:
        """Writes weights and states."""
        groups = [group for group in self._index.param_groups if group.optimizer in self._optimizers.values()]
        names = {name for group in groups for name in group.names}
        source = CheckpointStates(self._saved, names, self.states.orders())
        skipped = frozenset(self._skipped)
        self.notes |= self.states.load(source.fill_weights, source.find, self._saved.finish, skipped=skipped)

    @torch.no_grad()
    def finish(self, values: dict[str, Any]) -> None:
        """Finishes once all ranks have their weights. Objects of the user come last, since they may raise anything."""
        states = self.states
        for name, buffer in states.buffers().items():
            if name in values["buffers"]:
                buffer.copy_(values["buffers"][name])
        for (name, names), options in values["groups"].items():
            for group in states.optimizers[name].param_groups:
                if states.names_of(group) == names:
                    take_options(group, options)
        for name, said in values["optimizers"].items():
            states.load_optimizer_values(name, said)
        if states.loss_scale.used and values["loss_scale"] is not None:
            states.loss_scale.load(values["loss_scale"])
        restore(self._state, {**values["values"], **values["rank_values"]})
        if "rng" in values:  # last: restoring values may draw numbers
            restore_rng(values["rng"], states.device)


class CheckpointStates:
    """The tensors of a checkpoint for `TrainingStates.load`, read in pieces of a span.

    Args:
        saved: the checkpoint.
        names: parameters whose states are wanted.
        orders: name -> order in which elements are wanted, where it is not that of the dimensions. Of a parameter that
            was saved in another order, all that is asked for is read as a whole.
    """

    def __init__(self, saved: SavedCheckpoint, names: Collection[str], orders: Mapping[str, Order]) -> None:
        self._saved, self._orders = saved, orders
        self._reordered: dict[str, torch.Tensor] = {}
        """Tensors of one parameter, flat in the order in which they are wanted."""
        self._kinds = saved.index.state_kinds(names)
        self._names = frozenset(names)

    def find(self, name: str) -> SavedStates | None:
        """The states of a parameter, if it has any and they are wanted."""
        index, wanted = self._saved.index, self._orders.get(name)
        tensors: dict[str, SavedState] = {}
        for kind in self._kinds.get(name, ()):
            saved = index.tensors[f"{kind}/{name}"]
            has_codes, fill = saved.block_numel is not None, partial(self.fill, kind, name)
            scales = partial(self.fill, kind + SCALE_SUFFIX, name) if has_codes and saved.order == wanted else None
            tensors[kind] = SavedState(saved.torch_dtype, fill, has_codes, scales)
        small = SmallStates(index.steps.get(name), self._saved.scalars(name))
        is_empty = not tensors and small.step is None and not small.others
        return None if name not in self._names or is_empty else SavedStates(tensors, small)

    def fill(self, kind: str, name: str, start: int, out: torch.Tensor) -> None:
        """Begins to fill a flat tensor with the elements of a state from `start` on, in the order that is wanted and in
        the dtype of `out`; codes only in their own."""
        key = f"{kind}/{name}"
        saved = self._saved.index.tensors[key]
        if saved.order != self._orders.get(name) and not self._saved.index.holds_scales(kind, name):
            out.copy_(self._in_order(key, saved, name)[start : start + out.numel()])
            return
        same = saved.torch_dtype == out.dtype
        if same and out.device.type == "cpu" and out.is_contiguous():
            self._saved.begin_to_read(key, start, out)
            return
        for first, stop in _ranges(saved, start, start + out.numel()):
            read = self._saved.read if same or saved.block_numel is None else self._saved.read_float32
            out[first - start : stop - start].copy_(read(key, first, stop))

    def _in_order(self, key: str, saved: SavedTensor, name: str) -> torch.Tensor:
        if key not in self._reordered:
            if any(each.partition("/")[2] != name for each in self._reordered):
                self._reordered.clear()  # memory for the tensors of one parameter at a time
            read = self._saved.read if saved.block_numel is None else self._saved.read_float32
            self._reordered[key] = flattened(shaped(read(key), saved.shape, saved.order), self._orders.get(name))
        return self._reordered[key]

    def fill_weights(self, name: str, start: int, out: torch.Tensor) -> set[str]:
        """Fills a range of a parameter's weights or masters; returns a note if they are rounded."""
        self.fill("weight", name, start, out)
        saved = self._saved.index.tensors[f"weight/{name}"].torch_dtype
        if saved.itemsize > out.dtype.itemsize or (saved.itemsize == out.dtype.itemsize and saved != out.dtype):
            return {f"weights saved in {dtype_name(saved)} are rounded to {dtype_name(out.dtype)}"}
        return set()


def _ranges(saved: SavedTensor, start: int, stop: int) -> list[tuple[int, int]]:
    """Ranges of elements that each lie in one span of one piece, so that every span is read once."""
    found = []
    step = SPAN_BYTES // saved.itemsize
    for piece in saved.pieces:
        low, high = max(start, piece.start), min(stop, piece.stop)
        while low < high:
            end = min(high, piece.start + ((low - piece.start) // step + 1) * step)
            found.append((low, end))
            low = end
    return found


def _difference(here: Mapping[str, tuple[int, ...]], there: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The names and shapes in which a model and a checkpoint differ, as `CheckpointMismatch` takes them."""
    return {
        "missing": [name for name in here if name not in there],
        "unexpected": [name for name in there if name not in here],
        "shapes": {name: (there[name], here[name]) for name in here if name in there and there[name] != here[name]},
    }


def _few(names: Collection[str]) -> str:
    shown = sorted(names)[:_SHOWN]
    more = len(names) - len(shown)
    return (", ".join(shown) + (f" and {more} more" if more else "")) if shown else "nothing"
