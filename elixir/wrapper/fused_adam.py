"""Adam over one chunk's shard in one pass over memory, in the place of a torch optimizer over its segments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from elixir.kernels.adam import AdamOptions
from elixir.kernels.hybrid_adam import HybridAdam
from elixir.kernels.moments import Moments, make_moments
from elixir.kernels.step import adam_step


class Stretch(Protocol):
    """A segment of a shard; see `elixir.wrapper.chunk_optimizer.Segment`."""

    group: int
    start: int
    weights: nn.Parameter


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `FusedAdam` can take the place of `optimizer`: one of torch's Adams or ours, with float32 moments."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, HybridAdam):
        return False
    refused = ("amsgrad", "differentiable", "capturable")
    return all(
        not any(group.get(name) for name in refused) and group.get("moments", "float32") == "float32"
        for group in optimizer.param_groups
    )


class FusedAdam:
    """Adam of one chunk's shard.

    Neighbours of one group at the same step are stepped as one stretch, alignment gaps between them included: what is
    there is nobody's. States have the names and meaning of torch's.

    Args:
        master: the flat shard of weights that are stepped, float32.
        segments: its parts, in order.
        groups: options of the parameter groups.
        decoupled: AdamW's decay, where a group does not say.
    """

    def __init__(
        self, master: torch.Tensor, segments: Sequence[Stretch], groups: Iterable[dict[str, Any]], decoupled: bool
    ) -> None:
        self._master = master
        self._segments = list(segments)
        self._decoupled = decoupled
        self.param_groups = [dict(group) for group in groups]
        self.state: dict[nn.Parameter, dict[str, Any]] = {}
        self._moments: Moments | None = None

    def step(
        self, arrived: Iterable[Stretch], gradients: torch.Tensor, factor: float, weight_out: torch.Tensor | None
    ) -> None:
        """One step of the segments in `arrived`.

        Args:
            arrived: those that got a gradient.
            gradients: flat, of the whole shard.
            factor: gradients are multiplied by it first.
            weight_out: flat; takes the new weights in its dtype. None where `master` is what the model reads.
        """
        moments = self._made()
        here = {id(segment) for segment in arrived}
        run: list[Stretch] = []
        for segment in [*self._segments, None]:
            joins = segment is not None and id(segment) in here
            if run and not (joins and segment is not None and self._alike(run[-1], segment)):
                self._step_run(run, moments, gradients, factor, weight_out)
                run = []
            if joins and segment is not None:
                run.append(segment)

    def take(self, segment: Stretch, state: dict[str, Any]) -> None:
        """Go on from a state as torch's Adam keeps it."""
        mine = self._state(segment)
        mine["step"].fill_(float(state["step"]))
        for name in ("exp_avg", "exp_avg_sq"):
            mine[name].copy_(state[name].reshape(-1))

    def _alike(self, one: Stretch, other: Stretch) -> bool:
        return one.group == other.group and bool(self._state(one)["step"] == self._state(other)["step"])

    def _step_run(
        self,
        run: list[Stretch],
        moments: Moments,
        gradients: torch.Tensor,
        factor: float,
        weight_out: torch.Tensor | None,
    ) -> None:
        part = slice(run[0].start, run[-1].start + run[-1].weights.numel())
        for segment in run:
            self._state(segment)["step"] += 1
        adam_step(
            gradients[part],
            self._master[part],
            None if weight_out is None else weight_out[part],
            Moments("float32", moments.exp_avg[part], moments.exp_avg_sq[part]),
            self._options(self.param_groups[run[0].group]),
            int(self._state(run[0])["step"]),
            factor,
        )

    def _options(self, group: dict[str, Any]) -> AdamOptions:
        beta1, beta2 = group["betas"]
        return AdamOptions(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group.get("adamw_mode", group.get("decoupled_weight_decay", self._decoupled)),
            maximize=bool(group.get("maximize", False)),
        )

    def _made(self) -> Moments:
        if self._moments is None:
            self._moments = make_moments(self._master.numel(), "float32", self._master.device)
        return self._moments

    def _state(self, segment: Stretch) -> dict[str, Any]:
        state = self.state.get(segment.weights)
        if state is None:
            moments, part = self._made(), slice(segment.start, segment.start + segment.weights.numel())
            state = self.state[segment.weights] = {
                "step": torch.zeros(()),
                "exp_avg": moments.exp_avg[part],
                "exp_avg_sq": moments.exp_avg_sq[part],
            }
        return state
