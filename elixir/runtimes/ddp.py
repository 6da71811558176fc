"""DistributedDataParallel: whole weights, gradients and states on every device, and buckets to reduce."""

from __future__ import annotations

from collections.abc import Mapping

from elixir.runtimes.work import MOMENTS_BYTES, Prediction, Setting, Work
from elixir.step_trace import Access

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that are reduced together (torch 2.13, nn/parallel/distributed.py: ``bucket_cap_mb``)."""
SOURCES = (
    "torch 2.13 torch/csrc/distributed/c10d/reducer.cpp, Reducer::initialize_buckets: a flat copy of all gradients, "
    "which gradients are views of with gradient_as_bucket_view=True",
)


def settings(*, checkpoint: bool, micro: int, accumulation: int, world_size: int) -> list[Setting]:
    """The settings to try."""
    return [Setting(runtime="ddp", micro=micro, accumulation=accumulation, checkpoint=checkpoint)]


def predict(work: Work, setting: Setting, *, as_views: bool = False) -> Prediction:
    """One step.

    Args:
        work: the trace is of the step as it runs, such as float32 weights under autocast.
        setting: how.
        as_views: whether gradients are views of the buckets (``gradient_as_bucket_view``); torch's default is no.
    """
    weights, reduces = work.trace.param_bytes, work.world_size > 1 or as_views
    width = work.trace.param_bytes / max(work.trace.numel, 1)
    buckets = int(work.trained * width) if reduces else 0
    done = work.gradients_before()
    again = setting.accumulation > 1  # the gradients of the micro-batches before are there from the start

    def kept(index: int, access: Access) -> Mapping[str, int]:
        gradients = 0 if as_views else int(work.trained * width) if again else done[index]
        return {
            "weights": weights,
            "buffers": work.trace.buffer_bytes,
            "gradients": gradients,
            "buckets": buckets,
            "optimizer": work.trace.optimizer_bytes or MOMENTS_BYTES * work.trained,
        }

    parts = work.highest(kept)
    backward_s = work.compute_s(backward=True)
    reduce_s = work.ring_s(buckets, passes=2) if work.world_size > 1 else 0.0
    last_s = work.ring_s(min(BUCKET_BYTES, buckets), passes=2) if work.world_size > 1 else 0.0
    seconds = {
        "compute": work.compute_s() * setting.accumulation,
        "reduce": max(reduce_s - backward_s, last_s),
        "Adam": work.adam_s(work.trained, on_host=False),
    }
    return Prediction(setting, sum(parts.values()), parts, 0, seconds, SOURCES)
