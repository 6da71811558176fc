"""`FusedStates`: steps Adam over the shard of a chunk in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from elixir.chunk.chunk import Held
from elixir.chunk.pages import host_zeros
from elixir.chunk.state_window import StoredStates
from elixir.errors import InputError
from elixir.kernels.adam.adam_rule import group_options
from elixir.kernels.adam.hybrid_adam import HybridAdam
from elixir.kernels.adam.moments import MasterStates, Moments, make_moments, read_moments, write_moments
from elixir.kernels.adam.step import COPIED, adam_step, adam_step_out_of_place
from elixir.optimizer_states import BLOCK_NUMEL, MomentKind
from elixir.units import dtype_name
from elixir.wrapper.step.elementwise import set_options
from elixir.wrapper.step.segments import Arrived, Segment
from elixir.wrapper.step.states import (
    ADAM_KINDS,
    SCALE_SUFFIX,
    MakeMemory,
    MovedStates,
    SavedStates,
    States,
    StateTensor,
)

_MOMENTS = tuple(field.name for field in fields(Moments) if field.name.startswith("exp_avg"))
"""The tensors of the moments, in the order in which they are created."""
_PIECE_NUMEL = 2**20
"""Elements that are converted at once if states come in another form: 4 MiB of float32, whole blocks of codes."""


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `FusedStates` computes what `optimizer` does: one of torch's Adams or ours, without further options."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, HybridAdam):
        return False
    refused = ("amsgrad", "differentiable")
    return all(not any(group.get(name) for name in refused) for group in optimizer.param_groups)


def check_moments(optimizer: torch.optim.Optimizer, fusible: bool, moments: MomentKind) -> None:
    """Refuses an optimizer that cannot step with the moments of a plan, or was built for others.

    Args:
        optimizer: the optimizer.
        fusible: whether `FusedStates` can step in its place.
        moments: the form of moments in the plan.

    Raises:
        InputError: the message says what to give instead.
    """
    said = [str(group["moments"]) for group in optimizer.param_groups if "moments" in group]
    other = next((kind for kind in said if kind != moments), None)
    if other is not None:
        raise InputError(
            f"the plan keeps Adam's moments in {moments}, this HybridAdam in {other}: make it with "
            f"moments={moments!r}, or plan with moments={other!r}"
        )
    if moments != "float32" and not fusible:
        raise InputError(
            f"the plan keeps Adam's moments in {moments}, with which torch.optim.Adam, torch.optim.AdamW and "
            "HybridAdam are stepped, without amsgrad and differentiable; give one of these, or plan with "
            "moments='float32'"
        )


class FusedStates(States):
    """See `States`.

    With float32 moments, neighbouring segments of one group at the same step are stepped as one run, with the unused
    gaps between them. A parameter that is frozen or belongs to another optimizer ends a run. Moments in fewer bits are
    stepped segment by segment, so that rounding is the same in every home. It depends on the place in the shard, and
    blocks of 8-bit moments count from the shard's start, whichever optimizers share the shard.

    Args:
        master: the flat shard of weights or masters, float32.
        segments: its parts, in order.
        groups: options of the parameter groups.
        decoupled: whether weight decay is AdamW's, for groups that do not say.
        moments: the form of the moments.
        ranges: the ranges of the shard that get moments, in order (`own_ranges`); None if all of it does.
        number: the number of the optimizer: the shards of several optimizers share an extent.
        extent: holds the moments if they live on a disk.
    """

    accepts_tensor_factor, is_predictable = False, True

    def __init__(  # noqa: PLR0913 - a shard, how it is stepped, and where its moments live
        self,
        master: torch.Tensor,
        segments: list[Segment],
        groups: Iterable[dict[str, Any]],
        *,
        decoupled: bool,
        moments: MomentKind = "float32",
        ranges: Sequence[slice] | None = None,
        number: int = 0,
        extent: StoredStates | None = None,
        weights: torch.Tensor | None = None,
    ) -> None:
        self.master, self.segments, self.weights = master, segments, weights
        self._ranges = [slice(0, master.numel())] if ranges is None else ranges
        self._numel, self._device = sum(each.stop - each.start for each in self._ranges), master.device
        # By place of a segment, the elements of the shard before it that have no moments here.
        self._lacking = {segment.place: _lacking(self._ranges, segment.start) for segment in segments}
        self._decoupled, self._kind, self._number, self._extent = decoupled, moments, number, extent
        self.param_groups = [dict(group) for group in groups]
        self._steps: dict[nn.Parameter, torch.Tensor] = {}  # by weights of a segment, the number of its last step
        self._moments: Moments | None = None
        self._is_second = False  # in memory that is counted as a second set

    @property
    def memory_kind(self) -> tuple[object, ...] | None:  # type: ignore[override]
        """See `States`."""
        if self._extent is not None or self._is_second:
            return None
        return FusedStates, self._kind, self._device, *((each.start, each.stop) for each in self._ranges)

    def set_options(self, options: list[dict[str, Any]]) -> None:
        """See `States`."""
        for group, values in zip(self.param_groups, options, strict=True):
            set_options(group, values)

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(
        self,
        arrived: Arrived,
        gradients: torch.Tensor | None,
        factor: float | torch.Tensor,
        weight_out: torch.Tensor | None,
        into: FusedStates | None = None,
    ) -> set[str]:
        """See `States`."""
        factor = float(factor)
        if into is not None and self._kind == "8bit":
            # Under some plans segments share blocks, so each must find the segments before it stepped.
            into.copy_from(self)
            mine = {segment.place: segment for segment in into.segments}
            into.step([(mine[segment.place], each) for segment, each in arrived], gradients, factor, weight_out)
            return {COPIED}
        if self._kind != "float32" or gradients is None:
            return {self._step_run([segment], gradient, factor, weight_out, into) for segment, gradient in arrived}
        here = {id(segment) for segment, _ in arrived}
        runs: list[list[Segment]] = []
        for segment in (segment for segment in self.segments if id(segment) in here):
            if runs and self._joins(runs[-1][-1], segment):
                runs[-1].append(segment)
            else:
                runs.append([segment])
        return {self._step_run(run, gradients[_part(run)], factor, weight_out, into) for run in runs}

    def _joins(self, one: Segment, other: Segment) -> bool:
        adjacent = other.place == one.place + 1
        return adjacent and one.group == other.group and bool(self.count(one) == self.count(other))

    def _step_run(
        self,
        run: list[Segment],
        gradient: torch.Tensor,
        factor: float,
        weight_out: torch.Tensor | None,
        into: FusedStates | None,
    ) -> str:
        part = _part(run)
        options = group_options(self.param_groups[run[0].group], decoupled=self._decoupled)
        out = None if weight_out is None else weight_out[part]
        number = int(self.count(run[0])) + 1
        if into is None:
            for segment in run:
                self.count(segment).fill_(number)
            moments = self.moments_at(run[0])
            return adam_step(gradient, self.master[part], out, moments, options, number, factor, at=part.start)
        places = {segment.place for segment in run}
        for segment in into.segments:
            if segment.place in places:
                into.count(segment).fill_(number)
        old, new = (MasterStates(states.master[part], states.moments_at(run[0])) for states in (self, into))
        return adam_step_out_of_place(gradient, old, new, out, options, number, factor, at=part.start)

    # --- memory ----------------------------------------------------------------------------------------------------

    @property
    def moments(self) -> Moments:
        """The moments of all ranges, one after the other, allocated at the first use."""
        if self._moments is None:
            zeros: Callable[[int, torch.dtype], torch.Tensor] | None = None
            if self._device.type == "cpu":
                zeros = host_zeros
            if self._extent is not None:
                make, names = self._extent.region, iter(_MOMENTS)
                zeros = lambda numel, dtype: make(self._region(next(names), dtype), numel, dtype)  # noqa: E731
            self._moments = make_moments(self._numel, self._kind, self._device, zeros=zeros)
        return self._moments

    def moments_at(self, segment: Segment | Held) -> Moments:
        """The moments, in which a segment and its neighbours of the same range have their positions in the shard."""
        return replace(self.moments, first=self._lacking[segment.place])

    def _place_of(self, segment: Segment | Held) -> slice:
        """The part of `moments` that belongs to a segment."""
        part, lacking = segment.part, self._lacking[segment.place]
        return slice(part.start - lacking, part.stop - lacking)

    def make(self, *, allocate: bool = True) -> bool:
        """See `States`."""
        if self.segments and allocate:
            _ = self.moments
        return True

    def empty_like(self, master: torch.Tensor, segments: list[Segment], memory: MakeMemory) -> FusedStates:
        """See `States`."""
        options: dict[str, Any] = {"decoupled": self._decoupled, "moments": self._kind, "ranges": self._ranges}
        other = FusedStates(master, segments, self.param_groups, **options)
        other._moments = make_moments(self._numel, self._kind, master.device, zeros=memory)
        other._is_second = True
        return other

    def copy_from(self, other: FusedStates) -> None:
        """See `States`."""
        self.master.copy_(other.master)
        for mine, theirs in zip(self.moments.tensors(), other.moments.tensors(), strict=True):
            mine.copy_(theirs)
        theirs_by_place = {segment.place: segment for segment in other.segments}
        for segment in self.segments:
            self.count(segment).copy_(other.count(theirs_by_place[segment.place]))

    def memory(self) -> Iterator[tuple[str | None, torch.Tensor, int]]:
        """See `States`."""
        for kind in _MOMENTS if self._moments is not None else ():
            tensor = getattr(self._moments, kind)
            if tensor is not None:
                yield self._region(kind, tensor.dtype), tensor, 0

    def _region(self, kind: str, dtype: torch.dtype) -> str:
        """The name of a region. Each optimizer has separate regions, with the moments of its parameters alone."""
        own = f" of optimizer {self._number}" if self._number else ""
        return f"{kind}{own} {dtype_name(dtype)}"

    # --- what there is ---------------------------------------------------------------------------------------------

    def count(self, segment: Segment) -> torch.Tensor:
        """The number of a segment's last step, a tensor without dimensions."""
        count = self._steps.get(segment.weights)
        if count is None:
            count = self._steps[segment.weights] = torch.zeros((), device="cpu")
        return count

    def has_stepped(self, segment: Segment) -> bool:
        """See `States`."""
        count = self._steps.get(segment.weights)
        return count is not None and bool(count > 0)

    def scalars(self, segment: Segment) -> dict[str, Any]:
        """See `States`."""
        return {"step": self.count(segment)} if self.has_stepped(segment) else {}

    def tensors(self, *, moving: bool = False) -> Iterator[StateTensor]:
        """See `States`."""
        for segment in filter(self.has_stepped, self.segments):
            part, order = self._place_of(segment), segment.slot.order
            blocks = _blocks(part)
            for kind in ADAM_KINDS:
                codes, scales = getattr(self.moments, kind), getattr(self.moments, kind + SCALE_SUFFIX)
                where = self._region(kind, codes.dtype), part.start, self._extent
                yield StateTensor(
                    kind, segment.held, codes[part], order, *where, has_codes=scales is not None, keeps_dtype=False
                )
                if scales is not None:
                    # By `Plan.alignment_bytes` no block has elements of another parameter or rank.
                    name = kind + SCALE_SUFFIX
                    where = self._region(name, scales.dtype), blocks.start, self._extent
                    yield StateTensor(name, segment.held, scales[blocks], None, *where, width=BLOCK_NUMEL)

    def widened(self, each: StateTensor) -> torch.Tensor:
        """See `States`."""
        moments = read_moments(self.moments_at(each.held), each.held.numel, each.held.part.start)
        return moments[ADAM_KINDS.index(each.kind)]

    # --- loading ---------------------------------------------------------------------------------------------------

    def load(self, saved: SavedStates) -> set[str]:
        """See `States`. Moments in another form are rounded to the nearest (`write_moments`)."""
        stay = saved.stay_for(self) if isinstance(saved, MovedStates) else None
        if isinstance(stay, FusedStates):
            self._moments = stay.moments
            theirs = {segment.name: stay.count(segment) for segment in stay.segments}
            for segment in self.segments:
                self.count(segment).copy_(theirs[segment.name])
            return set()
        notes: set[str] = set()
        wanted = [segment for segment in self.segments if saved.forms(segment.name)]
        for tensor in self.moments.tensors() if wanted or self._moments is not None else ():
            tensor.zero_()
        self._steps.clear()
        for segment in wanted:
            notes |= self._load(segment, saved)
            self.count(segment).fill_(float(saved.small(segment.name).step or 0))
        return notes

    def _load(self, segment: Segment, saved: SavedStates) -> set[str]:
        moments, name, first, part = self.moments, segment.name, segment.first, self._place_of(segment)
        forms = saved.forms(name)
        if self._kind != "8bit":
            for kind in ADAM_KINDS:
                saved.fill(kind, name, first, getattr(moments, kind)[part])
            return set() if forms["exp_avg"].name == self._kind else {forms["exp_avg"].rounded_to(self._kind)}
        order = segment.slot.order
        if all(forms[kind].has_codes and forms[kind].order == order for kind in ADAM_KINDS):
            for kind in ADAM_KINDS:
                saved.fill(kind, name, first, getattr(moments, kind)[part])
                scales = getattr(moments, kind + SCALE_SUFFIX)[_blocks(part)]
                saved.fill(kind + SCALE_SUFFIX, name, first // BLOCK_NUMEL, scales)
            return set()
        for begin, end in _pieces(part.start, part.stop):
            pair = [torch.empty(end - begin, dtype=torch.float32, device="cpu") for _ in ADAM_KINDS]
            for kind, values in zip(ADAM_KINDS, pair, strict=True):
                saved.fill(kind, name, first + begin - part.start, values)
            saved.filled()
            write_moments(moments, begin, *(values.to(moments.exp_avg.device) for values in pair))
        return {forms["exp_avg"].rounded_to(self._kind)}


def _part(run: list[Segment]) -> slice:
    return slice(run[0].start, run[-1].part.stop)


def _lacking(ranges: Sequence[slice], start: int) -> int:
    """The number of elements before `start` that are in none of the ranges."""
    return start - sum(int(min(start, each.stop) - min(start, each.start)) for each in ranges)


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK_NUMEL, -(-part.stop // BLOCK_NUMEL))


def _pieces(first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Pieces of at most `_PIECE_NUMEL` that end between blocks, so that each block is rounded once."""
    while first < stop:
        end = min(stop, (first // _PIECE_NUMEL + 1) * _PIECE_NUMEL)
        yield first, end
        first = end
