"""FSDP2 (`torch.distributed.fsdp.fully_shard`) around every repeated layer and around the model.

A group is what one `fully_shard` gathers: a layer, or, for the model itself, all that lies in no layer. Weights are
kept in float32, each rank a part of every parameter; a step computes with gathered ones in the dtype of the trace.
Sources are files and lines of torch 2.13, below ``torch/distributed/fsdp/_fully_shard``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from elixir.runtimes.work import ADAM_TRAFFIC_BYTES, MOMENTS_BYTES, ROOT, Prediction, Setting, Work
from elixir.units import dtype_bytes

SOURCES = (
    "_fsdp_param_group.py:417 wait_for_unshard: in forward the buffer of an all-gather is kept until the next group's "
    "is there; in backward it is freed at once",
    "_fsdp_param_group.py:576, 795 pre_backward, _backward_prefetch: the group before is gathered meanwhile",
    "_fsdp_param_group.py:588 post_backward: weights are freed, then gradients copied to the input of a "
    "reduce-scatter, which is kept until the next group's",
    "_fsdp_collectives.py:522 foreach_reduce: the reduced part becomes float32; with offload it goes to pinned memory",
    "_fsdp_param.py:315: with CPUOffloadPolicy the sharded weights are pinned one by one",
)
HOST_TRAFFIC_BYTES = 40
"""Bytes of host memory for each element of a step with offload: Adam 28, the norm 4, multiplying by its factor 8."""
HOST_SHARE = 0.5
"""Share of the rate of one large Adam on the host that the step of FSDP2 over single parameters reaches: four rows of
one H200 (benchmark/results/gpu_proof_h200.jsonl) gave 0.46 to 0.50."""


def settings(*, checkpoint: bool, micro: int, accumulation: int, world_size: int) -> list[Setting]:
    """The settings to try, the fastest first."""
    return [
        Setting(
            runtime="fsdp2", micro=micro, accumulation=accumulation, checkpoint=checkpoint, offload=offload, keep=keep
        )
        for offload in (False, True)
        for keep in (True, False)
    ]


def pinned_bytes(nbytes: int) -> int:
    """Host memory that PyTorch takes to pin a tensor: its cache rounds up to a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def predict(work: Work, setting: Setting) -> Prediction:
    """One step; `work.trace` is of a model whose weights have the dtype of compute (``param_dtype``)."""
    parts = max(_Walk(work, setting).moments(), key=lambda parts: sum(parts.values()))
    return Prediction(setting, sum(parts.values()), parts, _host_bytes(work, setting), _seconds(work, setting), SOURCES)


class _Walk:
    """Device memory over one micro-batch, group by group.

    Args:
        work: the step.
        setting: how.
    """

    def __init__(self, work: Work, setting: Setting) -> None:
        self._work, self._setting, self._groups = work, setting, work.groups
        self._runs = list(work.runs())
        self._fixed = {"buffers": work.trace.buffer_bytes}
        groups = self._groups.values()
        if not setting.offload:
            self._fixed["sharded weights"] = sum(each.kept_bytes for each in groups) // work.world_size
            self._fixed["optimizer"] = MOMENTS_BYTES * sum(each.trained for each in groups) // work.world_size
        # accelerate and Trainer reduce in the last micro-batch alone, so whole gradients of those before wait for it.
        self._adds = setting.accumulation == 1
        self._shards = 0 if self._adds else sum(each.trained_bytes for each in groups)
        self._gathered = {ROOT: self._groups[ROOT].nbytes} if ROOT in self._groups else {}
        self._buffer = 0  # of the last gather, or of one ahead
        self._reduce_input = 0
        self._whole = work.gradients_before()  # by access: gradients that no reduce-scatter has taken
        self._made = work.gradients_made()
        order = dict.fromkeys(name for name, backward, _, _ in self._runs if backward and name in self._groups)
        layers = [name for name in order if name != ROOT]
        self._next = dict(pairwise(layers))
        self._last = {name: number for number, (name, backward, _, _) in enumerate(self._runs) if backward}

    def moments(self) -> Iterator[dict[str, int]]:
        """The parts of memory at all moments at which they may be highest."""
        turn = next((first - 1 for _, backward, first, _ in self._runs if backward), -1)
        for number, (name, backward, first, stop) in enumerate(self._runs):
            yield from self._enter(name, backward, first)
            for index in range(first, stop):
                if self._setting.keep and index == turn:
                    self._buffer = 0  # backward begins here, which frees that of the last gather
                yield self._parts(self._work.trace.accesses[index].live_bytes, self._whole[index])
            if name != ROOT and name in self._groups:
                if not backward and not self._setting.keep:
                    self._gathered.pop(name, None)
                elif backward and self._last[name] == number:
                    yield from self._reduce(name, stop)
        if ROOT in self._groups:  # at the end of backward
            self._gathered, self._buffer, self._reduce_input = {}, 0, 0
            yield self._parts(0, self._groups[ROOT].trained_bytes, self._groups[ROOT].trained_bytes)

    def _parts(self, live: int, gradients: int, more: int = 0) -> dict[str, int]:
        return {
            **self._fixed,
            "gathered weights": sum(self._gathered.values()),
            "gather and reduce buffers": self._buffer + self._reduce_input + more,
            "gradients": gradients + self._shards,
            "activations": live,
        }

    def _enter(self, name: str, backward: bool, first: int) -> Iterator[dict[str, int]]:
        """Gathers a group, and in backward the one that follows."""
        group, gathers = self._groups.get(name), self._work.world_size > 1  # one rank casts its weights alone
        kept = self._work.trace.accesses[first].kept_bytes
        if group is not None and name not in self._gathered:
            if backward:
                yield self._parts(kept, self._whole[first], group.nbytes if gathers else 0)
            else:
                # Two buffers at once, and what this rank puts in; the older one goes before weights are copied out.
                yield self._parts(kept, 0, group.nbytes + group.nbytes // self._work.world_size if gathers else 0)
                self._buffer = group.nbytes if gathers else 0
            self._gathered[name] = group.nbytes
        if backward and gathers and name in (*self._next, *self._next.values()):
            following = self._next.get(name, name)
            self._buffer = 0 if following in self._gathered else self._groups[following].nbytes

    def _reduce(self, name: str, stop: int) -> Iterator[dict[str, int]]:
        """Frees the weights of a group, and hands its gradients over."""
        gradients, accesses = self._groups[name].trained_bytes, self._work.trace.accesses
        self._gathered.pop(name, None)
        self._reduce_input = 0
        end = min(stop, len(accesses) - 1)
        yield self._parts(accesses[stop].kept_bytes if stop < len(accesses) else 0, self._whole[end], gradients)
        self._reduce_input = gradients
        self._shards += self._reduced(name) if self._adds else 0
        made = self._made[name]
        for index in range(stop, len(accesses)):
            self._whole[index] -= made

    def _reduced(self, name: str) -> int:
        """Bytes of this rank's part of a group's gradients on the device."""
        kept = 0 if self._setting.offload else self._work.master_bytes
        return self._groups[name].trained * kept // self._work.world_size


def _host_bytes(work: Work, setting: Setting) -> int:
    """Weights, which are pinned one by one, gradients that arrive in pinned memory, and moments; of all ranks here."""
    if not setting.offload:
        return 0
    total = 0
    for each in work.trace.parameters:
        part = work.padded(each) // work.world_size
        size = part * (work.master_bytes if each.trainable else dtype_bytes(each.dtype))
        size = pinned_bytes(size) if work.hardware.device_kind == "cuda" else size
        total += size + (size + MOMENTS_BYTES * part if each.trainable else 0)
    return total * work.ranks_here


def _seconds(work: Work, setting: Setting) -> Mapping[str, float]:
    """Compute; what of gathers, reductions and copies is not hidden by it; the optimizer step."""
    ranks, times, groups = work.world_size, setting.accumulation, work.groups.values()
    away = 1 if setting.offload else 0
    shards_s = work.link_s(away * sum(each.kept_bytes for each in groups) / ranks)
    home_s = work.link_s(away * work.master_bytes * sum(each.trained for each in groups) / ranks, to_host=True)
    gathers_s = sum(work.ring_s(each.nbytes) for each in groups)
    again = 0 if setting.keep else 1
    forward_s, backward_s = work.compute_s(backward=False), work.compute_s(backward=True)
    reduces_s = sum(work.ring_s(each.trained_bytes) for each in groups) + home_s
    # One rank copies its weights in the stream of compute; several gather ahead, but for the first group.
    before = shards_s if ranks == 1 else _left(gathers_s + shards_s, forward_s, len(groups))
    between = _left(again * (gathers_s + shards_s), backward_s, len(groups))
    last = _left(again * (gathers_s + shards_s) + reduces_s, backward_s, len(groups)) - between
    step = work.adam_s(work.trained / ranks, on_host=setting.offload)
    if setting.offload:
        step *= HOST_TRAFFIC_BYTES / ADAM_TRAFFIC_BYTES / HOST_SHARE
    transfers = (before + between) * times + last
    return {"compute": work.compute_s() * times, "transfers": transfers, "optimizer": step}


def _left(moved_s: float, compute_s: float, groups: int) -> float:
    """Seconds of transfers that compute does not hide: at least those of one group."""
    return max(moved_s - compute_s, moved_s / max(groups, 1))
