"""Checkpoints on disk: an index, files of flat slices with checksums, one rename that commits; no ranks, no model.

To save, each rank writes a `SliceWriter`, and rank 0 makes the `Index` from all `WrittenFile`. Then one process of each
file system calls `commit`, after all of them `settle`, and `remove_stale`. To load, `SliceReader` reads any range.
"""

from __future__ import annotations

from elixir.checkpoint_format.commit import (
    FoundCheckpoint,
    abandon,
    commit,
    find_checkpoints,
    new_id,
    newest_checkpoints,
    next_sequence,
    rank_file,
    rank_mark,
    read_index,
    remove_checkpoint,
    remove_stale,
    sequences,
    settle,
    shared_file,
)
from elixir.checkpoint_format.export import export_hf
from elixir.checkpoint_format.index import INDEX_NAME, Index, SavedGroup, merge_tensors, parse_index, scale_key
from elixir.checkpoint_format.reader import SliceReader, verify
from elixir.checkpoint_format.saved import SavedCheckpoint, open_checkpoint
from elixir.checkpoint_format.slices import Slice, SliceWriter, WrittenFile
from elixir.checkpoint_format.tensors import SPAN_BYTES, Piece, SavedTensor, memory_of, span_count
from elixir.checkpoint_format.values import decode, encode

__all__ = [
    "INDEX_NAME",
    "SPAN_BYTES",
    "FoundCheckpoint",
    "Index",
    "Piece",
    "SavedCheckpoint",
    "SavedGroup",
    "SavedTensor",
    "Slice",
    "SliceReader",
    "SliceWriter",
    "WrittenFile",
    "abandon",
    "commit",
    "decode",
    "encode",
    "export_hf",
    "find_checkpoints",
    "memory_of",
    "merge_tensors",
    "new_id",
    "newest_checkpoints",
    "next_sequence",
    "open_checkpoint",
    "parse_index",
    "rank_file",
    "rank_mark",
    "read_index",
    "remove_checkpoint",
    "remove_stale",
    "scale_key",
    "sequences",
    "settle",
    "shared_file",
    "span_count",
    "verify",
]
