"""Rules that make meta tensors behave as on the target device: attention, autocast, allocator, sums of gradients."""
