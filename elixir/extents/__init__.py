"""Room on disks for what memory does not hold: extents of unnamed files, and tensors that live in an extent."""
