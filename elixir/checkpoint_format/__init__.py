"""Checkpoints on disk: an index, files of flat slices with checksums, one rename that commits; no ranks, no model.

To save, each rank writes a `SliceWriter`, and all make the same `Index` from all `WrittenFile`. Then one process of
each file system calls `commit`, after all of them `finish_commit`, and `remove_stale`. To load, `SliceReader` reads any
range.
"""
