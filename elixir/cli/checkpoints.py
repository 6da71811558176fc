"""``elixir checkpoint``: what a saved run holds, whether it is whole, its weights for others, and what may go."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elixir.checkpoint_format.export import export_hf
from elixir.checkpoint_format.folders import find_checkpoints, remove_checkpoint, remove_stale, surplus, unfinished
from elixir.checkpoint_format.index import INDEX_NAME
from elixir.checkpoint_format.slice_reader import open_checkpoint, verify
from elixir.cli import output
from elixir.errors import CheckpointCorrupt, CheckpointNotFound, InputError
from elixir.files import FILES
from elixir.optimizer_states import AVERAGE
from elixir.show.tables import record_table

SHOWN_PROBLEMS = 20


def run_checkpoint(args: argparse.Namespace) -> Iterator[output.Said]:
    """Shows, verifies, exports or prunes a checkpoint, or the checkpoints in a folder."""
    folder = Path(args.folder)
    if args.action == "export":
        if args.hf is None:
            raise InputError("export needs --hf OUT, the folder for the files that Hugging Face reads")
        latest = _checkpoints(folder)[0]
        written = str(export_hf(latest, args.hf, dtype=args.dtype, config=args.config, ema=bool(args.ema)))
        yield {"written": written}
        yield f"written: {written}"
    elif args.action == "prune":
        yield from _pruned(folder, args.keep)
    elif args.action == "verify":
        yield from _verified(_checkpoints(folder))
    else:
        records = [_record(each) for each in _checkpoints(folder)]
        yield records[0] if _is_one(folder) else {"checkpoints": records}
        yield (record_table("checkpoint", record) for record in records)


def _record(folder: Path) -> dict[str, Any]:
    with open_checkpoint(folder) as saved:
        index = saved.index
    weights = [index.tensors[f"weight/{name}"] for name in index.names]
    return {
        "folder": str(folder),
        "step": index.step,
        "sequence": index.sequence,
        "ranks": index.world_size,
        "bytes": index.nbytes,
        "files": len(index.files),
        "parameters": sum(weight.numel for weight in weights),
        "weights": sorted({weight.dtype for weight in weights}),
        "moments": index.moments,
        "optimizers": list(index.optimizers),
        "average": any(key.startswith(f"{AVERAGE}/") for key in index.tensors),
        "values": [*index.values, *(index.rank_values[0] if index.rank_values else {})],
        "frozen": index.has_frozen,
    }


def _verified(found: Sequence[Path]) -> Iterator[output.Said]:
    problems: dict[Path, list[str]] = {}
    for each in found:
        if said := [str(problem) for problem in verify(each)]:
            problems[each] = said
        for line in said[:SHOWN_PROBLEMS]:
            output.note(line)
        yield f"{each}: {f'damaged, problems: {len(said)}' if said else 'whole'}"
    whole = [each for each in found if each not in problems]
    damaged = {str(each): said for each, said in problems.items()}
    yield {"whole": [*map(str, whole)], "damaged": damaged}
    if problems:
        way = f"load {whole[0]}" if whole else "load another"
        raise CheckpointCorrupt(f"problems: {sum(map(len, problems.values()))}; {way}", path=next(iter(problems)))


def _pruned(folder: Path, keep: int | None) -> Iterator[output.Said]:
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
        others = ", but for {} and what else is no checkpoint's"
        removed = [f"{each}{'' if remove_checkpoint(each) else others.format(FILES.names(each)[0])}" for each in gone]
    yield {"removed": removed}
    yield "\n".join(f"removed {name}" for name in removed) or "nothing to remove"


def _is_one(folder: Path) -> bool:
    return (folder / INDEX_NAME).exists()


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoint that is meant, or those in a folder, the latest first."""
    if _is_one(folder):
        return [folder]
    found, damaged = find_checkpoints(folder)
    if not found:
        raise damaged[0] if damaged else CheckpointNotFound(f"{folder} holds no checkpoint")
    for error in damaged:
        output.note(str(error))
    return [*found]
