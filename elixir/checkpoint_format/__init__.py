"""Checkpoints on disk: an index, files of parts of tensors with checksums, a rename that commits; no ranks, no model.

To save, each rank writes a `PartWriter`, and all make the `Index` from all `WrittenFile`. Then one process of each
file system calls `commit`, and after all of them `remove_old`. To load, `SavedCheckpoint` reads any range.
"""
