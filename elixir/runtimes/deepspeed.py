"""DeepSpeed's ZeRO, stages 1 to 3, with and without offload of optimizer states and weights.

Weights are kept in the dtype of the trace, bfloat16 or float16, and stepped in float32. Sources are files and lines of
DeepSpeed 0.19.8, below ``deepspeed/runtime``. Defaults of its configuration hold, and ``overlap_comm``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from elixir.optimizer_states import MASTER_BYTES
from elixir.runtimes.work import ADAM_TRAFFIC_BYTES, MOMENTS_BYTES, Prediction, Setting, Work
from elixir.step_trace import Access
from elixir.units import dtype_bytes

BUCKET_NUMEL = 500_000_000
"""zero/config.py:113 ``reduce_bucket_size``, and ``allgather_bucket_size``."""
SUB_GROUP_NUMEL = 1_000_000_000
"""zero/config.py:182 ``sub_group_size``."""
LIVE_NUMEL = 1_000_000_000
"""zero/config.py:245 ``stage3_max_live_parameters``, and ``stage3_max_reuse_distance``: so many stay gathered."""
SOURCES = (
    "zero/stage_1_and_2.py:3260 setup_buckets: from the first gradient on two buckets of reduce_bucket_size",
    "zero/stage_1_and_2.py:659 temp_grad_buffer_for_gpu_offload: with offload a buffer as large as the largest weight",
    "zero/stage3.py: gathered weights up to max_live_parameters, a flat bucket of gradients of reduce_bucket_size",
    "zero/stage_1_and_2.py:3013 step, zero/stage3.py:2702 _prepare_sub_group: gradients become float32 first",
    "zero/config.py:113, 119, 138, 182, 222, 228, 245, 251: the defaults",
)
HOST_TRAFFIC_BYTES = 42
"""Bytes of host memory for each element of a step with offload: Adam 28, scaling and clipping its gradient 8, the new
weight in fewer bits 6."""
STATES_BYTES = 2 * MASTER_BYTES + MOMENTS_BYTES
"""Bytes of an element's master, gradient and moments, all in float32."""
HOST_SHARE = 0.8
"""Share of the rate of one large Adam on the host that its step reaches: six rows of one H200
(benchmark/results/gpu_proof_h200.jsonl) gave 0.73 to 0.80, but for 0.62 with two micro-batches."""
PARTLY_SHARE = 0.14
"""The same share if a part of the states is on the device (``ratio`` below 1): the one row that there is
took 2.6 times as long as with all of them on the host, so `settings` does not propose it."""


def settings(*, checkpoint: bool, micro: int, accumulation: int, world_size: int) -> list[Setting]:
    """The settings to try, the fastest first; on one rank a stage only matters with offload."""
    made = partial(Setting, runtime="deepspeed", micro=micro, accumulation=accumulation, checkpoint=checkpoint)
    resident = [made(stage=stage) for stage in ((1, 2, 3) if world_size > 1 else (1,))]
    offload = [made(stage=stage, offload=True) for stage in (2, 3)]
    return [*resident, *offload, made(stage=3, offload=True, weights_offload=True)]


def predict(work: Work, setting: Setting) -> Prediction:
    """One step; `work.trace` is of a model whose weights have the dtype of compute."""
    ranks, trained = work.world_size, work.trained
    width = max((dtype_bytes(each.dtype) for each in work.trace.parameters), default=2)
    largest = max((each.numel for each in work.trace.parameters if each.trainable), default=0)
    bucket = width * min(BUCKET_NUMEL, trained)
    done, again = work.gradients_before(), setting.accumulation > 1
    own = width * trained // (ranks if setting.stage > 1 else 1)
    fixed = {"buffers": work.trace.buffer_bytes}
    if not setting.offload:
        fixed["masters and optimizer"] = (MASTER_BYTES + MOMENTS_BYTES) * trained // ranks
    elif setting.ratio < 1:
        fixed["masters, gradients and optimizer"] = round((1 - setting.ratio) * STATES_BYTES * trained / ranks)
    whole = work.trace.param_bytes
    if setting.stage == 3:
        live = width * min(LIVE_NUMEL, work.trace.numel)
        sharded = 0 if setting.weights_offload else whole // ranks
        fixed["weights"] = sharded + (live if ranks > 1 or setting.weights_offload else 0)
        fixed["buckets"] = bucket
    else:
        fixed["weights"] = whole
        fixed["buckets"] = width * largest if setting.offload else 0

    def kept(index: int, access: Access) -> Mapping[str, int]:
        begun = access.phase != "forward" and done[index] > 0
        here = own if again or setting.stage == 3 else done[index] // (ranks if setting.stage > 1 else 1)
        # Two buckets, and on several ranks the flat copy that is reduced.
        more = (2 if ranks == 1 else 3) * bucket if begun and setting.stage < 3 else 0
        gradients = 0 if setting.offload else here
        return {**fixed, "gradients": gradients, "buckets": fixed["buckets"] + more}

    parts = work.highest(kept)
    if not setting.offload:
        # Gradients become float32 for the step: all of a rank's part, or with stage 3 one sub-group after the other.
        cast = MASTER_BYTES * (min(SUB_GROUP_NUMEL, trained // ranks) if setting.stage == 3 else trained // ranks)
        step = {**fixed, "gradients": own, "float32 gradients": cast, "activations": work.trace.input_bytes}
        parts = max(parts, step, key=lambda each: sum(each.values()))
    return Prediction(setting, sum(parts.values()), parts, _host_bytes(work, setting), _seconds(work, setting), SOURCES)


def _host_bytes(work: Work, setting: Setting) -> int:
    """Masters, gradients and moments in float32, and weights, and with stage 3 or several micro-batches gradients, in
    the dtype of compute; of all ranks here. Pinned buffers may take up to twice as much: torch rounds them up."""
    if not setting.offload:
        return 0
    states = round(setting.ratio * STATES_BYTES * work.trained)
    again = setting.stage == 3 or setting.accumulation > 1
    return (states + work.trace.param_bytes + again * work.trace.grad_bytes) * work.ranks_here // work.world_size


def _seconds(work: Work, setting: Setting) -> Mapping[str, float]:
    """Compute; what of gathers, reductions and copies is not hidden by it; the optimizer step."""
    ranks, times, trained = work.world_size, setting.accumulation, work.trained
    weights, gradients = work.trace.param_bytes, work.trace.grad_bytes
    gathers = (2 if setting.stage == 3 else 0) * work.ring_s(weights)
    if setting.weights_offload:
        gathers += 2 * work.link_s(weights / ranks)
    # Stages 1 and 2 reduce by all-reduce (use_multi_rank_bucket_allreduce); stage 1 in the last micro-batch alone.
    reduce = work.ring_s(gradients, passes=2 if setting.stage < 3 else 1)
    home = work.link_s(MASTER_BYTES * trained / ranks, to_host=True) if setting.offload else 0.0
    waits = max(reduce + home - work.compute_s(backward=True), 0.0) * (1 if setting.stage == 1 else times)
    exposed = max(gathers - work.compute_s(), 0.0) * times + waits
    step = work.adam_s(trained / ranks, on_host=setting.offload)
    after = 0.0
    if setting.offload:
        share = HOST_SHARE if setting.ratio == 1 else PARTLY_SHARE
        step *= setting.ratio * HOST_TRAFFIC_BYTES / ADAM_TRAFFIC_BYTES / share
        after = 0.0 if setting.weights_offload else work.link_s(weights / ranks)
    if setting.stage < 3:
        after += work.ring_s(weights)
    return {"compute": work.compute_s() * times, "transfers": exposed + after, "optimizer": step}
