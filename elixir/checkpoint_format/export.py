"""Weights of a checkpoint as safetensors that Hugging Face reads, streamed: memory for a few spans whatever the
model, or for one tensor whose elements lie in another order."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elixir.checkpoint_format.folders import one_checkpoint
from elixir.checkpoint_format.slice_reader import SliceReader
from elixir.checkpoint_format.slices import SPAN_BYTES, memory_of, safetensors_header
from elixir.errors import CheckpointError, FileError, InputError, InputTypeError
from elixir.files import FILES, FLUSH_EVERY_BYTES, Files, PathLike, temporary_name
from elixir.memory_order import shaped
from elixir.optimizer_states import AVERAGE
from elixir.units import dtype_name, parse_bytes, parse_dtype

_TEMPORARY = re.compile(
    r"\.(config\.json|model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json)\.[0-9a-f]{12}"
)
"""Temporary names of the files of an export, as `temporary_name` makes them."""


@dataclass(frozen=True)
class _Exported:
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


def export_hf(
    folder: PathLike,
    out: PathLike,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: str | int = "5GB",
    config: Any = None,
    ema: bool = False,
    files: Files = FILES,
) -> Path:
    """Writes the weights and persistent buffers of a checkpoint for ``from_pretrained``; tied ones once.

    What an export that was killed has left there is removed: one export at a time writes to a folder.

    A model of plain PyTorch reads them by `load_model` of safetensors, which knows tied weights.

    Args:
        folder: of the checkpoint, or of several, of which the newest is taken.
        out: the folder for the files; it is made where it is missing, and must hold no model yet.
        dtype: of floating-point weights, rounded once. None: as saved, which is float32 where there were master
            weights.
        max_shard_size: of one file, such as ``5GB``; a larger tensor gets a separate file.
        config: for ``config.json``: a transformers config, a dict, or the path of a ``config.json``. None: none is
            written.
        ema: write the averages of weights (`ElixirOptimizer`) in their place, if there are any.
        files: the file operations it uses.

    Returns:
        `out`: ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` with ``model.safetensors.index.json``.

    Raises:
        InputError: `out` holds a model already, there is no average to write, or an argument makes no sense.
        CheckpointError: the checkpoint cannot be read, is damaged, or the files cannot be written. No new file is left
    then.
    """
    target, wanted, largest = Path(out), None if dtype is None else parse_dtype(dtype), parse_bytes(max_shard_size)
    if largest < 1:
        raise InputError(f"max_shard_size must be 1 byte or more, found {max_shard_size!r}")
    settings = _settings(config)
    made: list[tuple[Path, Path]] = []
    renamed: list[Path] = []
    with SliceReader(one_checkpoint(folder, files=files), files=files) as reader:
        shards = _shards(reader, wanted, largest, ema=ema)
        try:
            files.make_folder(target)
            for name in files.names(target):
                if _TEMPORARY.fullmatch(name):  # of an export that was killed
                    files.remove(target / name, missing_ok=True)
            there = [name for name in files.names(target) if name.startswith("model") and ".safetensors" in name]
            if there:
                raise InputError(f"{target} holds {there[0]} already; give an empty folder")
            weight_map: dict[str, str] = {}
            total = 0
            for number, shard in enumerate(shards, start=1):
                name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
                made.append((Path(temporary_name(target / name)), target / name))
                _write_shard(reader, made[-1][0], shard, files)
                weight_map |= dict.fromkeys(shard, name)
                total += sum(each.nbytes for each in shard.values())
            texts = {} if settings is None else {"config.json": settings | _dtype_setting(shards)}
            if len(shards) > 1:
                texts["model.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": weight_map}
            for name, content in texts.items():
                made.append((Path(temporary_name(target / name)), target / name))
                with files.create(made[-1][0]) as file:
                    file.write((json.dumps(content, indent=2, sort_keys=True) + "\n").encode(), 0)
                    file.sync()
            for temporary, final in made:
                files.replace(temporary, final)
                renamed.append(final)
            files.sync_folder(target)
        except BaseException as error:
            for path in [*renamed, *(temporary for temporary, _ in made)]:
                with contextlib.suppress(FileError):
                    files.remove(path, missing_ok=True)
            if isinstance(error, FileError):
                raise CheckpointError(f"not exported: {error}") from error
            raise
    return target


def _shards(reader: SliceReader, wanted: torch.dtype | None, largest: int, *, ema: bool) -> list[dict[str, _Exported]]:
    """Names -> tensor for each file, in the order in which they are saved."""
    averages = {name: f"{AVERAGE}/{name}" for name in reader.index.names if f"{AVERAGE}/{name}" in reader.index.tensors}
    if ema and not averages:
        raise InputError(f"{reader.folder} holds no average of the weights; train with ema=, or leave out ema")
    shards: list[dict[str, _Exported]] = [{}]
    room = largest
    for key, saved in reader.index.tensors.items():
        kind, _, name = key.partition("/")
        if kind not in ("weight", "buffer"):
            continue
        if ema and kind == "weight" and name in averages:
            key, saved = averages[name], reader.index.tensors[averages[name]]
        floating = kind == "weight" and saved.torch_dtype.is_floating_point
        dtype = wanted if floating and wanted is not None else saved.torch_dtype
        each = _Exported(key, dtype, saved.shape, saved.numel * dtype.itemsize)
        if shards[-1] and each.nbytes > room:
            shards.append({})
            room = largest
        shards[-1][name] = each
        room -= each.nbytes
    if not shards[0]:
        raise CheckpointError(f"{reader.folder} holds no weights to export")
    return shards


def _write_shard(reader: SliceReader, path: Path, shard: Mapping[str, _Exported], files: Files) -> None:
    header = safetensors_header({name: (each.dtype, each.shape) for name, each in shard.items()}, {"format": "pt"})
    at = len(header)
    with files.create(
        path, at + sum(each.nbytes for each in shard.values()), flush_every_bytes=FLUSH_EVERY_BYTES
    ) as file:
        file.write(header, 0)
        for each in shard.values():
            saved = reader.tensor(each.key)
            if saved.order is not None:  # such as channels last: the file wants another order
                whole = shaped(reader.read(each.key), saved.shape, saved.order).to(each.dtype)
                file.write(memory_of(whole.contiguous()), at)
                at += each.nbytes
                continue
            # From span to span of the saved pieces, so that each is read once; through one buffer, since malloc keeps
            # what is freed in between.
            step = max(1, min(SPAN_BYTES // saved.itemsize, saved.numel))
            span = torch.empty(step, dtype=saved.torch_dtype, device="cpu")
            cast = span if each.dtype == span.dtype else torch.empty_like(span, dtype=each.dtype)
            for piece in saved.pieces:
                for start in range(piece.start, piece.stop, step):
                    count = min(step, piece.stop - start)
                    reader.read_into(each.key, start, span[:count])
                    file.write(memory_of(cast[:count].copy_(span[:count])), at + start * each.dtype.itemsize)
            at += each.nbytes
        file.sync()
        file.drop_cache()


def _settings(config: Any) -> dict[str, Any] | None:
    """The contents of ``config.json``."""
    if config is None:
        return None
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        try:
            config = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"config {os.fspath(path)!r} cannot be read: {error}") from None
    elif hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise InputTypeError(f"config must be a transformers config, a dict or a path, found {type(config).__name__}")
    try:
        json.dumps(settings := {str(name): value for name, value in config.items()})
    except (TypeError, ValueError) as error:
        raise InputError(f"config is no JSON: {error}") from None
    return settings


def _dtype_setting(shards: list[dict[str, _Exported]]) -> dict[str, str]:
    """The dtype for ``config.json``: readers that follow it would otherwise round to the one that it had before."""
    dtypes = {each.dtype for shard in shards for each in shard.values() if not each.key.startswith("buffer/")}
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return {"dtype": dtype_name(floating[0])} if len(floating) == 1 else {}
