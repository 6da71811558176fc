"""Small checkpoints, saved as several ranks would, in one process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from elixir.checkpoint_format.folders import (
    abandon,
    commit,
    finish_commit,
    new_id,
    next_sequence,
    rank_file,
    read_index,
    remove_stale,
)
from elixir.checkpoint_format.index import Index, SavedGroup, encode, merge_tensors
from elixir.checkpoint_format.slices import CHECKSUM_KIND, Slice, SliceWriter
from elixir.errors import CheckpointNotFound, FileError
from elixir.files import FILES, Files


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    world_size: int = 2,
    values: Mapping[str, Any] | None = None,
    blocks: Mapping[str, int] | None = None,
    cut_to: int = 1,
    files: Files = FILES,
    **fields: Any,
) -> Index:
    """Writes and synchronises the files of a checkpoint that is not committed; every rank has an equal part of each
    tensor.

    `cut_to`: elements to whose multiples the parts are cut, in tensors with `blocks`.
    """
    checkpoint_id, encoded, tensors = new_id(), {}, dict(tensors)
    for name, value in (values or {}).items():
        encoded[name], found = encode(value, name)
        tensors |= found
    written = []
    try:
        for rank in range(world_size):
            parts = {}
            for key, tensor in tensors.items():
                flat, multiple = tensor.detach().contiguous().view(-1), cut_to if key in (blocks or {}) else 1
                low, high = (
                    min(flat.numel(), -(-flat.numel() * each // world_size) // multiple * multiple)
                    if each < world_size
                    else flat.numel()
                    for each in (rank, rank + 1)
                )
                parts[key] = (low, flat[low:high], tuple(tensor.shape))
            slices = [
                Slice(key, shape, flat.dtype, low, flat.numel(), (blocks or {}).get(key))
                for key, (low, flat, shape) in parts.items()
            ]
            writer = SliceWriter(folder / rank_file(checkpoint_id, rank, world_size), slices, files=files)
            try:
                # The last first: any order must do.
                for key, (_, flat, _) in reversed(parts.items()):
                    writer.write_tensor(key, flat)
                written.append(writer.finish())
            except BaseException:
                writer.abandon()
                raise
        sequence = fields.pop("sequence", None) or next_sequence(folder, files=files)
    except BaseException:
        with contextlib.suppress(FileError):
            abandon(folder, checkpoint_id, files=files)
        raise
    return Index(
        id=checkpoint_id,
        sequence=sequence,
        world_size=world_size,
        files={file.name: file.nbytes for file in written},
        tensors=merge_tensors(file.tensors for file in written),
        values=encoded,
        **{
            "step": None,
            "model_fingerprint": "",
            "plan_fingerprint": "",
            "checksum_kind": CHECKSUM_KIND,
            "moments": None,
            "steps": {},
            "scalars": {},
            "optimizers": {},
            "has_frozen": True,
            "aliases": {},
            "param_groups": (),
            "loss_scale": None,
            "rng": (),
            "rank_values": (),
        }
        | fields,
    )


def save(folder: Path, tensors: Mapping[str, torch.Tensor], *, files: Files = FILES, **options: Any) -> Index:
    """Saves a checkpoint as a run on one file system does; what fails leaves the one before."""
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(CheckpointNotFound):
        finish_commit(folder, read_index(folder, files=files).id, files=files)
    remove_stale(folder, files=files)
    index = write(folder, tensors, files=files, **options)
    try:
        commit(folder, index, files=files)
    except BaseException:
        with contextlib.suppress(FileError):
            abandon(folder, index.id, files=files)
        raise
    finish_commit(folder, index.id, files=files)
    remove_stale(folder, files=files)
    return index


def group(names: list[str], optimizer: str = "optimizer", **options: Any) -> SavedGroup:
    """A parameter group with plain options."""
    return SavedGroup(optimizer, tuple(names), encode(options, "options")[0])


def same(left: Any, right: Any) -> bool:
    """Whether two values are of the same types and the same bits, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and left.tolist() == right.tolist()
    if isinstance(left, dict):
        pairs = itertools.zip_longest(left.items(), right.items())
        return all(a is not None and b is not None and same(a[0], b[0]) and same(a[1], b[1]) for a, b in pairs)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "tobytes"):
        return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())
    return repr(left) == repr(right) if isinstance(left, (float, complex)) else bool(left == right)
