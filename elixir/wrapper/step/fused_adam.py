"""Adam over one chunk's shard in one pass over memory, instead of a torch optimizer over its segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import nn

from elixir.chunk.pinned import host_zeros
from elixir.errors import InputError
from elixir.kernels.adam import (
    COPIED,
    HybridAdam,
    Moments,
    States,
    adam_step,
    adam_step_out_of_place,
    group_options,
    make_moments,
    read_moments,
    write_moments,
)
from elixir.optimizer_states import BLOCK_NUMEL, MomentKind

_MOMENTS = tuple(field.name for field in fields(Moments) if field.name != "kind")
"""In the order in which they are made."""
MakeZeros = Callable[[str, int, torch.dtype], torch.Tensor]
"""Makes a flat tensor of zeros, given the name of a moment or of its scales, elements and dtype."""


class Stretch(Protocol):
    """A segment of a shard; see `elixir.wrapper.step.chunk_optimizer.Segment`."""

    group: int
    start: int
    place: int
    weights: nn.Parameter


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `FusedAdam` can take the place of `optimizer`: one of torch's Adams or ours, without further options."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, HybridAdam):
        return False
    refused = ("amsgrad", "differentiable")
    return all(not any(group.get(name) for name in refused) for group in optimizer.param_groups)


def check_moments(optimizer: torch.optim.Optimizer, fusible: bool, moments: MomentKind) -> None:
    """Refuse an optimizer that cannot step with the moments of a plan, or was told to use others.

    Args:
        optimizer: with its groups.
        fusible: whether `FusedAdam` can take its place.
        moments: of the plan.

    Raises:
        InputError: says what to give instead.
    """
    said = [str(group["moments"]) for group in optimizer.param_groups if "moments" in group]
    other = next((kind for kind in said if kind != moments), None)
    if other is not None:
        raise InputError(
            f"the plan keeps Adam's moments in {moments}, this HybridAdam in {other}: make it with "
            f"moments={moments!r}, or "
            f"plan with moments={other!r}"
        )
    if moments != "float32" and not fusible:
        raise InputError(
            f"the plan keeps Adam's moments in {moments}, with which torch.optim.Adam, torch.optim.AdamW and "
            "HybridAdam are "
            "stepped, without amsgrad and differentiable; give one of these, or plan with moments='float32'"
        )


@dataclass(frozen=True)
class KeptMoments:
    """Moments of one segment as they lie in those of a whole shard, which several segments share."""

    shard: Moments
    start: int
    numel: int

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both as flat float32 tensors."""
        return read_moments(self.shard, self.numel, self.start)


class FusedAdam:
    """Adam of one chunk's shard.

    float32 moments: neighbours of one group at the same step are stepped as one stretch, alignment gaps between them
    included: what is there is nobody's. A parameter between them that is not stepped here, because it is frozen or
    another optimizer's, parts them. Moments in fewer bits: segment by segment, wherever the gradients come from, so
    that rounding is the same in every home. Blocks of 8-bit moments count from the shard's start.

    Args:
        master: the flat shard of weights that are stepped, float32.
        segments: its parts, in order.
        groups: options of the parameter groups.
        decoupled: AdamW's decay, where a group does not say.
        moments: how they are kept.
        zeros: makes the memory of moments; None for ordinary one.
    """

    def __init__(
        self,
        master: torch.Tensor,
        segments: Sequence[Stretch],
        groups: Iterable[dict[str, Any]],
        decoupled: bool,
        moments: MomentKind = "float32",
        zeros: MakeZeros | None = None,
    ) -> None:
        self._master = master
        self._segments = list(segments)
        self._decoupled = decoupled
        self._kind, self._zeros = moments, zeros
        self.param_groups = [dict(group) for group in groups]
        self.state: dict[nn.Parameter, dict[str, Any]] = {}
        """By segment: the number of its last step. Moments are the shard's."""
        self._moments: Moments | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the moments, once there are any."""
        return 0 if self._moments is None else self._moments.nbytes

    def step(
        self,
        arrived: Sequence[tuple[Stretch, torch.Tensor]],
        gradients: torch.Tensor | None,
        factor: float,
        weight_out: torch.Tensor | None,
        into: FusedAdam | None = None,
    ) -> set[str]:
        """One step of the segments in `arrived`.

        Args:
            arrived: those that got a gradient, with it, flat.
            gradients: those of the whole shard, where they lie in one tensor.
            factor: gradients are multiplied by it first.
            weight_out: flat; takes the new weights in its dtype. None where `master` is what the model reads.
            into: takes the new states, all of this shard's being left as they are; over a master of the same segments.

        Returns:
            The forms of the step; see `adam_step` and `adam_step_out_of_place`.
        """
        if into is not None and self._kind == "8bit":
            # Segments share blocks, so each must find those before it stepped.
            into.copy(self)
            into.step(into.like(arrived), gradients, factor, weight_out)
            return {COPIED}
        if self._kind != "float32" or gradients is None:
            return {self._step_run([stretch], gradient, factor, weight_out, into) for stretch, gradient in arrived}
        forms = set()
        here = {id(segment) for segment, _ in arrived}
        run: list[Stretch] = []
        for segment in [*self._segments, None]:
            joins = segment is not None and id(segment) in here
            if run and not (joins and segment is not None and self._joins(run[-1], segment)):
                forms.add(self._step_run(run, gradients[self._part(run)], factor, weight_out, into))
                run = []
            if joins and segment is not None:
                run.append(segment)
        return forms

    @property
    def moments(self) -> Moments:
        """The moments of the whole shard, which are made if there are none yet."""
        return self._made()

    def named_moments(self) -> dict[str, torch.Tensor]:
        """The moments by name, scales of codes included; none before they are made."""
        found = {} if self._moments is None else {name: getattr(self._moments, name) for name in _MOMENTS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def steps_of(self, segment: Stretch) -> int:
        """How many steps a segment has had."""
        state = self.state.get(segment.weights)
        return 0 if state is None else int(state["step"])

    def read(self, segment: Stretch) -> tuple[torch.Tensor, torch.Tensor]:
        """Both moments of a segment in float32."""
        return read_moments(self._made(), segment.weights.numel(), segment.start)

    def set_steps(self, segment: Stretch, steps: int) -> None:
        """Go on as after so many steps; the moments are the caller's to write."""
        self._state(segment)["step"].fill_(float(steps))

    def give_up(self, segment: Stretch) -> dict[str, Any]:
        """The state of a segment, for `take`; empty before its first step."""
        if segment.weights not in self.state:
            return {}
        kept = KeptMoments(self._made(), segment.start, segment.weights.numel())
        return {"step": self.state[segment.weights]["step"], "moments": kept}

    def take(self, segment: Stretch, state: dict[str, Any]) -> None:
        """Go on from a state that another shard optimizer gave up, or as torch's Adam keeps it.

        Moments of the same kind and place come over to the bit. Else they are read in float32 and rounded to the
        nearest (`elixir.kernels.adam.moments.write_moments` says how far off that is).
        """
        self._state(segment)["step"].fill_(float(state["step"]))
        kept = state.get("moments")
        if kept is None:
            pair = (state["exp_avg"], state["exp_avg_sq"])
        elif self._same_place(kept, segment):
            self._take_bits(kept)
            return
        else:
            pair = kept.read()
        mine = self._made()
        avg, square = (value.detach().to(self._master.device, torch.float32).reshape(-1) for value in pair)
        write_moments(mine, segment.start, avg, square)

    def _same_place(self, kept: KeptMoments, segment: Stretch) -> bool:
        shard, mine = kept.shard, self._made()
        return (
            shard.kind == mine.kind
            and kept.start == segment.start
            and kept.numel == segment.weights.numel()
            and shard.exp_avg.shape == mine.exp_avg.shape
        )

    def _take_bits(self, kept: KeptMoments) -> None:
        """All of what this segment's moments lie in: blocks it shares with others are the same for these."""
        first, stop = kept.start, kept.start + kept.numel
        for theirs, mine in zip(kept.shard.tensors(), self._made().tensors(), strict=True):
            per = kept.shard.exp_avg.numel() // theirs.numel()  # 1, or a block's elements for its scale
            width = BLOCK_NUMEL if self._kind == "8bit" else 1
            part = slice(first // width * width // per, -(-stop // width) * width // per)
            mine[part].copy_(theirs[part])

    def _joins(self, one: Stretch, other: Stretch) -> bool:
        adjacent = other.place == one.place + 1
        return adjacent and one.group == other.group and bool(self._state(one)["step"] == self._state(other)["step"])

    @staticmethod
    def _part(run: list[Stretch]) -> slice:
        return slice(run[0].start, run[-1].start + run[-1].weights.numel())

    def _step_run(
        self,
        run: list[Stretch],
        gradient: torch.Tensor,
        factor: float,
        weight_out: torch.Tensor | None,
        into: FusedAdam | None,
    ) -> str:
        part = self._part(run)
        options = group_options(self.param_groups[run[0].group], decoupled=self._decoupled)
        out = None if weight_out is None else weight_out[part]
        number = int(self._state(run[0])["step"]) + 1
        if into is None:
            for segment in run:
                self._state(segment)["step"] += 1
            return adam_step(gradient, self._master[part], out, self._made(), options, number, factor, at=part.start)
        for segment, _ in into.like([(segment, gradient) for segment in run]):
            into.set_steps(segment, number)
        old, new = self.states_of(part), into.states_of(part)
        return adam_step_out_of_place(gradient, old, new, out, options, number, factor, at=part.start)

    def states_of(self, part: slice) -> States:
        """Masters of a part of the shard, with the moments of the whole."""
        return States(self._master[part], self._made())

    def like(self, arrived: Sequence[tuple[Stretch, torch.Tensor]]) -> list[tuple[Stretch, torch.Tensor]]:
        """The segments here that are at the places of others' `arrived`, with the gradients of those."""
        mine = {segment.place: segment for segment in self._segments}
        return [(mine[segment.place], gradient) for segment, gradient in arrived]

    def copy(self, other: FusedAdam) -> None:
        """Have the master and the states of another one over the same segments."""
        self._master.copy_(other.states_of(slice(None)).master)
        for mine, theirs in zip(self._made().tensors(), other.moments.tensors(), strict=True):
            mine.copy_(theirs)
        for segment, (theirs_segment, _) in zip(
            self._segments, other.like([(each, self._master) for each in self._segments]), strict=True
        ):
            self.set_steps(segment, other.steps_of(theirs_segment))

    def make_moments(self) -> None:
        """Have moments now, and not only when they are first needed."""
        self._made()

    def _made(self) -> Moments:
        if self._moments is None:
            device = self._master.device
            zeros: Callable[[int, torch.dtype], torch.Tensor] | None = host_zeros if device.type == "cpu" else None
            if self._zeros is not None:
                made, names = self._zeros, iter(_MOMENTS)
                zeros = lambda numel, dtype: made(next(names), numel, dtype)  # noqa: E731
            self._moments = make_moments(self._master.numel(), self._kind, device, zeros=zeros)
        return self._moments

    def _state(self, segment: Stretch) -> dict[str, Any]:
        state = self.state.get(segment.weights)
        if state is None:
            state = self.state[segment.weights] = {"step": torch.zeros((), device="cpu")}
        return state
