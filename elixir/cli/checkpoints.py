"""``elixir checkpoint``: what a saved run holds, whether it is whole, its weights for others, and what may go."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from elixir.checkpoint_format.commit import remove_checkpoint, remove_stale
from elixir.checkpoint_format.export import export_hf
from elixir.checkpoint_format.index import INDEX_NAME
from elixir.checkpoint_format.run_folders import find_checkpoints, surplus, unfinished
from elixir.checkpoint_format.saved_checkpoint import SavedCheckpoint, open_checkpoint
from elixir.checkpoint_format.slice_reader import verify
from elixir.cli import output
from elixir.errors import CheckpointCorrupt, CheckpointNotFound, InputError
from elixir.files import FILES
from elixir.units import format_bytes

SHOWN_PROBLEMS = 20


def run_checkpoint(args: argparse.Namespace) -> int:
    """Shows, verifies, exports or prunes a checkpoint, or the checkpoints in a folder."""
    folder = Path(args.folder)
    for name, action in (("hf", "export"), ("dtype", "export"), ("config", "export"), ("keep", "prune")):
        if getattr(args, name) is not None and args.action != action:
            raise InputError(f"--{name} goes with {action}")
    if args.action == "export":
        if args.hf is None:
            raise InputError("export needs --hf OUT, the folder for the files that Hugging Face reads")
        output.say_written([export_hf(_one(folder), args.hf, dtype=args.dtype, config=args.config)])
        return 0
    if args.action == "prune":
        return _prune(folder, args.keep)
    if args.action == "verify":
        return _verify(folder)
    folders = _all(folder)
    records = []
    for each in folders:
        with open_checkpoint(each) as saved:
            records.append(_record(saved))
    if args.json:
        output.say_json(records[0] if _is_one(folder) else {"checkpoints": records})
        return 0
    for record in records:
        width = max(map(len, record))
        output.say("\n".join(f"{name:<{width}}  {_in_words(name, value)}" for name, value in record.items()) + "\n")
    return 0


def _record(saved: SavedCheckpoint) -> dict[str, Any]:
    index = saved.index
    dtypes = sorted({index.tensors[f"weight/{name}"].dtype for name in index.names})
    return {
        "folder": str(saved.folder),
        "step": index.step,
        "sequence": index.sequence,
        "ranks": index.world_size,
        "bytes": index.nbytes,
        "files": len(index.files),
        "parameters": sum(index.tensors[f"weight/{name}"].numel for name in index.names),
        "weights": dtypes,
        "moments": index.moments,
        "optimizers": list(index.optimizers),
        "values": [*index.values, *(index.rank_values[0] if index.rank_values else {})],
        "frozen": index.has_frozen,
    }


def _in_words(name: str, value: Any) -> str:
    if name == "bytes":
        return format_bytes(value)
    if isinstance(value, bool) or value is None:
        return {True: "saved", False: "left out", None: "-"}[value]
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return f"{value:,}" if isinstance(value, int) and name == "parameters" else str(value)


def _verify(folder: Path) -> int:
    for each in _all(folder):
        problems = verify(each)
        for problem in problems[:SHOWN_PROBLEMS]:
            output.note(str(problem))
        if problems:
            raise CheckpointCorrupt(f"{len(problems)} problems; load the one before", path=each)
        output.say(f"{each}: whole")
    return 0


def _prune(folder: Path, keep: int | None) -> int:
    removed: list[str] = []
    if _is_one(folder):
        if keep is not None:
            raise InputError(f"--keep is for a folder of checkpoints; {folder} is one")
        removed = [str(folder / name) for name in remove_stale(folder)]
    else:
        found, damaged = find_checkpoints(folder)
        for error in damaged:
            output.note(f"left as it is: {error}")
        gone = surplus(found, keep) + [folder / name for name in unfinished(folder, FILES)]
        if not found and not gone:
            raise CheckpointNotFound(f"{folder} holds no checkpoints")
        for each in gone:
            left = (
                "" if remove_checkpoint(each) else f", but for {FILES.names(each)[0]} and what else is no checkpoint's"
            )
            removed.append(f"{each}{left}")
    for name in removed:
        output.say(f"removed {name}")
    if not removed:
        output.say("nothing to remove")
    return 0


def _is_one(folder: Path) -> bool:
    return (folder / INDEX_NAME).exists()


def _one(folder: Path) -> Path:
    """The checkpoint that is meant: of a folder of several the latest."""
    return folder if _is_one(folder) else _all(folder)[0]


def _all(folder: Path) -> list[Path]:
    if _is_one(folder):
        return [folder]
    found, damaged = find_checkpoints(folder)
    if not found:
        if damaged:
            raise damaged[0]
        raise CheckpointNotFound(f"{folder} holds no checkpoint")
    for error in damaged:
        output.note(str(error))
    return [*found]
