"""`Rule`: steps the `States` of a shard. `AdamRule` is Adam in one pass over memory, `ClassRule` the user's class.

An `EarlyUpdate` is a step of a rule into a second set of states. `elixir.wrapper.step.matrix_rule` has the third rule,
over whole matrices. `UserOptimizer.rule_for` chooses.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from elixir.chunk.memory import Memory, written
from elixir.hardware.process_memory import HEAP
from elixir.kernels.adam.adam_rule import group_options
from elixir.kernels.adam.moments import MasterStates
from elixir.kernels.adam.step import COPIED, adam_step
from elixir.optimizer_states import BLOCK_NUMEL, MomentKind
from elixir.torch_private import while_nothing_compiles
from elixir.wrapper.step.elementwise import same_options, set_options
from elixir.wrapper.step.segments import Arrived, Segment
from elixir.wrapper.step.states import ADAM_KINDS, SCALE_SUFFIX, Kind, States, is_elementwise

# --- early update ----------------------------------------------------------------------------------------------------
# `EarlyUpdate`: new states that CPU Adam computes during backward, before norm and loss scale are known.
#
# Once the gradients of a chunk have reached their home, CPU Adam steps it into a second set of states. Nothing else
# changes until `ElixirOptimizer.step`: the model shows, saves, loads and evaluates the old weights. `step` knows the
# norm of all gradients and the loss scale. It keeps the new states, by swapping the two sets, if they were computed
# with the right factor and neither gradients, old states nor options have changed since. Otherwise it discards them and
# steps the chunk again. Both ways give the same bits, so ranks may keep different chunks.


def scales(factor: float | torch.Tensor) -> bool:
    """Whether gradients are multiplied. A tensor is not compared, since this thread would wait for the device."""
    return isinstance(factor, torch.Tensor) or factor != 1.0


Step = Callable[..., set[str]]
"""`elixir.wrapper.step.rules.Rule.step` into another set, with all that a step makes there."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of an update, apart from the old states."""

    arrived: Arrived
    """The segments that got a gradient, each with it."""
    gradients: torch.Tensor | None
    """The gradients of the whole shard, if they lie in one tensor."""
    factor: float | torch.Tensor
    """The factor by which gradients are multiplied; a tensor on the device only if a shard `accepts_tensor_factor`."""
    options: list[dict[str, Any]]
    """Hyperparameters, by group."""
    writes: int
    """`Chunk.writes`."""
    changes: int
    """`ShardGradients.changes`."""
    in_place: bool = False
    """Whether gradients in the weights' dtype are multiplied in place, as torch.nn.utils.clip_grad_norm_ does it. A
    copy would take memory that no plan counts, and half the time of the step."""

    def of(self, segments: Sequence[Segment]) -> Inputs:
        """The same for another set of states, by its segments."""
        mine = {segment.place: segment for segment in segments}
        return replace(self, arrived=[(mine[segment.place], gradient) for segment, gradient in self.arrived])

    def multiplied(self, dtype: torch.dtype) -> Inputs:
        """Multiplies the gradients if `in_place` allows it; returns the inputs with the factor that is left.

        Args:
            dtype: the dtype of the weights that are stepped.
        """
        if not (self.in_place and scales(self.factor) and self.arrived and self.arrived[0][1].dtype == dtype):
            return self
        for _, gradient in self.arrived:
            gradient.mul_(self.factor)
        return replace(self, factor=1.0)

    def equal(self, other: Inputs) -> bool:
        """Whether an update of the same states with `other` gives the same result."""
        if isinstance(self.factor, torch.Tensor) or isinstance(other.factor, torch.Tensor):
            return False  # comparing them would wait for the device
        mine = self.factor, self.writes, self.changes, [segment.name for segment, _ in self.arrived]
        theirs = other.factor, other.writes, other.changes, [segment.name for segment, _ in other.arrived]
        return mine == theirs and same_options(self.options, other.options)


class EarlyUpdate:
    """One early update.

    Args:
        inputs: the inputs of the update, with all segments of the shard.
        step: steps `old` into `new`, as `Rule.step` does.
        old: the current states.
        new: takes the new ones.
        reads: memory of the gradients, and of the current states.
    """

    def __init__(self, inputs: Inputs, step: Step, old: States, new: States, reads: tuple[Memory, ...]) -> None:
        self.inputs, self.reads, self._filling = inputs, reads, written(*reads)
        self._step, self._old, self._new = step, old, new
        # Read now, since the two sets may be swapped before `run` begins.
        self.rounded, self._old_rounded = new.weights, old.weights
        self._is_discarded = False

    def run(self, release: Callable[[], None] | None, forms: deque[str]) -> None:
        """Computes the new states, on the lane of CPU Adam.

        Args:
            release: the checkpoint's hook (`Chunk.before_write`).
            forms: takes the forms of the step.
        """
        if self._is_discarded:
            return
        try:
            for ticket in self._filling:
                if ticket.error is not None:  # all of them are over
                    raise ticket.error
            if release is not None:
                release()  # otherwise a running checkpoint would read the new states
            forms.extend(self._step(self._old, self.inputs, self.rounded, self._new))
        except BaseException:  # they may be what is saved of the weights after this
            self._new.become(self._old)
            if self.rounded is not None and self._old_rounded is not None:
                self.rounded.copy_(self._old_rounded)
            raise

    def discard(self) -> None:
        """Discards the new states; if `run` has not begun, it will do nothing."""
        self._is_discarded = True


# --- rules -----------------------------------------------------------------------------------------------------------


BY_CLASS = "by its class"
"""The form of a step by the user's own class."""
_FIRST_NUMEL = 2**20
"""Elements of a piece of a first step, in which a class makes states. They are copied piece by piece, so that memory
has them twice for one piece only."""


class Rule(Protocol):
    """How one optimizer steps the states of one shard. An implementation inherits from it."""

    is_predictable: bool = True
    """Whether a step without a gradient does nothing, and the first one with a gradient creates all states of a
    segment. Other classes may count steps, or create states later."""
    accepts_tensor_factor: bool = False
    """Whether the factor of a step may be a tensor on the device."""
    shares_call: bool = False
    """Whether one call may step several shards; see `prepare`."""
    exchanged_bytes: int = 0
    """Bytes that this rank receives from others in each step."""
    turn: Callable[[], None] | None = None
    """Work between `begin` and `step`, on the lane of the network; None if `step` does it all."""

    def kinds(self, dtype: torch.dtype, groups: Collection[int]) -> dict[str, Kind]:
        """The kinds of elementwise states of weights in a dtype and of some groups, as far as they are known before the
        first step."""

    def attach(self, states: States) -> None:
        """Prepares to step a new set of states, which stays empty, whatever a class makes in its constructor."""
        return

    def begin_anew(self, states: States) -> None:
        """Gives segments that have no state the one with which a class begins, if it makes that before its step."""
        return

    def begin(self, states: States, inputs: Inputs) -> None:
        """Runs the first part of a step with a `turn`; arguments as of `step`."""
        return

    def prepare(self, states: States, inputs: Inputs, given: contextlib.ExitStack) -> Callable[[], None] | None:
        """Gives gradients to a call that steps all shards that were prepared; one that `shares_call` has it.

        Args:
            states, inputs: as of `step`.
            given: takes the gradients back when it ends.

        Returns:
            The call; None if the shard needs none.
        """
        return None

    def step(
        self, states: States, inputs: Inputs, weight_out: torch.Tensor | None = None, into: States | None = None
    ) -> set[str]:
        """Runs one step.

        Args:
            states: of the shard.
            inputs: have the gradients, the factor that multiplies them first, and the options.
            weight_out: takes the new weights of the shard, flat, in its dtype, if the same pass can write them.
            into: takes the new states, and `states` stay unchanged. Then all segments have gradients.

        Returns:
            The forms of the step (`elixir.kernels.adam`). With `BY_CLASS` nothing was written to `weight_out`.
        """


class AdamRule(Rule):
    """Adam in one pass over the shard; see `Rule`.

    With float32 moments, neighbouring segments of one group at the same step may be stepped as one run, with the unused
    gaps between them. A parameter that is frozen or belongs to another optimizer ends a run. Moments in fewer bits are
    stepped segment by segment, so that rounding is the same in every home. It depends on the place in the shard, and
    blocks of 8-bit moments count from the shard's start, whichever optimizers share the shard.

    Args:
        moments: the form of the moments.
        decoupled: whether weight decay is AdamW's, for groups that do not say.
        joins: whether segments are stepped as runs. One by one they have the bits of torch's fused classes, which round
            the last elements of a tensor in another way than the others.
    """

    def __init__(self, moments: MomentKind, *, decoupled: bool, joins: bool = True) -> None:
        self._moments, self._decoupled, self._joins = moments, decoupled, joins and moments == "float32"

    def kinds(self, dtype: torch.dtype, groups: Collection[int]) -> dict[str, Kind]:
        """See `Rule`."""
        if self._moments != "8bit":
            return dict.fromkeys(ADAM_KINDS, Kind(torch.float32 if self._moments == "float32" else torch.bfloat16))
        found = {}
        for kind, codes in zip(ADAM_KINDS, (torch.int8, torch.uint8), strict=True):
            found[kind] = Kind(codes, block=BLOCK_NUMEL)
            found[kind + SCALE_SUFFIX] = Kind(torch.float32, width=BLOCK_NUMEL)
        return found

    def step(
        self, states: States, inputs: Inputs, weight_out: torch.Tensor | None = None, into: States | None = None
    ) -> set[str]:
        """See `Rule`."""
        if into is not None and self._moments == "8bit":
            # Under some plans segments share blocks, so each must find the segments before it stepped.
            into.become(states)
            self.step(into, inputs.of(into.segments), weight_out)
            return {COPIED}
        if not self._joins or inputs.gradients is None:
            return {self._run(states, [one], gradient, inputs, weight_out, into) for one, gradient in inputs.arrived}
        here = {id(segment) for segment, _ in inputs.arrived}
        runs: list[list[Segment]] = []
        for segment in (segment for segment in states.segments if id(segment) in here):
            if runs and _joins(states, runs[-1][-1], segment):
                runs[-1].append(segment)
            else:
                runs.append([segment])
        whole = inputs.gradients
        return {self._run(states, run, whole[_part(run)], inputs, weight_out, into) for run in runs}

    def _run(
        self,
        states: States,
        run: list[Segment],
        gradient: torch.Tensor,
        inputs: Inputs,
        weight_out: torch.Tensor | None,
        into: States | None,
    ) -> str:
        part, factor = _part(run), float(inputs.factor)
        options = group_options(inputs.options[run[0].group], decoupled=self._decoupled)
        out = None if weight_out is None else weight_out[part]
        number = int(_count(states, run[0])) + 1
        places = {segment.place for segment in run}
        for segment in (states if into is None else into).segments:
            if segment.place in places:
                _count(states if into is None else into, segment).fill_(number)
        moments = states.moments(run[0])
        new = None if into is None else MasterStates(into.master[part], into.moments(run[0]))
        master, at = states.master[part], part.start
        return adam_step(gradient, master, out, moments, options, number, factor, at=at, into=new)


def _count(states: States, segment: Segment) -> torch.Tensor:
    """The number of a segment's last step, a tensor without dimensions."""
    state = states.by_weights.setdefault(segment.weights, {})
    if not state:
        state["step"] = torch.zeros((), device="cpu")
    count: torch.Tensor = state["step"]
    return count


def _joins(states: States, one: Segment, other: Segment) -> bool:
    adjacent = other.place == one.place + 1
    return adjacent and one.group == other.group and bool(_count(states, one) == _count(states, other))


def _part(run: list[Segment]) -> slice:
    return slice(run[0].start, run[-1].part.stop)


class MakesOptimizer(Protocol):
    """Makes optimizers of the user's class; see `elixir.wrapper.step.user_optimizer.UserOptimizer`."""

    is_predictable: bool
    """See `Rule`."""
    begins_with_states: bool
    """Whether the constructor of the class makes states."""
    divides: bool
    """Whether all states but the elementwise ones are single numbers, so that a first step may be made in pieces; known
    once `kinds` was asked for."""

    def over(self, segments: Sequence[Segment]) -> torch.optim.Optimizer:
        """Creates an optimizer of the class over segments, with their groups' options."""

    def over_one(self, weights: nn.Parameter, options: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Creates an optimizer of the class over one weight."""

    def kinds(self, dtype: torch.dtype, groups: Collection[int]) -> dict[str, Kind]:
        """The kinds of elementwise states that the class makes for weights in a dtype and of some groups, found by a
        trial."""


class ClassRule(Rule):
    """The user's class, over views of the shard. What it makes itself is moved to where `States` has it.

    Args:
        user: creates optimizers of the class.
        shared: an optimizer that steps several shards; its groups have parameters only during a call.
    """

    accepts_tensor_factor = True

    def __init__(self, user: MakesOptimizer, shared: torch.optim.Optimizer | None = None) -> None:
        self._user, self._shared = user, shared
        self.is_predictable, self.shares_call = user.is_predictable, shared is not None

    def kinds(self, dtype: torch.dtype, groups: Collection[int]) -> dict[str, Kind]:
        """See `Rule`."""
        return self._user.kinds(dtype, groups)

    def attach(self, states: States) -> None:
        """See `Rule`."""
        states.optimizer = self._shared or self._user.over(states.segments)
        states.by_weights = states.optimizer.state
        for segment in states.segments:
            states.by_weights.pop(segment.weights, None)

    def begin_anew(self, states: States) -> None:
        """See `Rule`. A class of torch makes its states again in the first step, in pieces; others may act on weights
        without a gradient before."""
        if self.is_predictable or not self._user.begins_with_states:
            return
        lacking = [segment for segment in states.segments if segment.weights not in states.by_weights]
        made = self._user.over(lacking).state
        for segment in lacking:
            if segment.weights in made:
                states.by_weights[segment.weights] = made[segment.weights]
                states.adopt(segment)

    def step(
        self, states: States, inputs: Inputs, weight_out: torch.Tensor | None = None, into: States | None = None
    ) -> set[str]:
        """See `Rule`."""
        if into is not None:
            into.become(states)
            self.step(into, inputs.of(into.segments))
            if weight_out is not None:
                weight_out.copy_(into.master)
            return {COPIED}
        arrived = self._begun(states, inputs)
        if arrived or not self.is_predictable:
            begun = {id(segment) for segment, _ in inputs.arrived} - {id(segment) for segment, _ in arrived}
            with (
                self.with_gradients(states, arrived, inputs.factor),
                _without(states, [each.weights for each in states.segments if id(each) in begun]),
            ):
                self._call(states)
        for segment in states.segments if not self.is_predictable else [each for each, _ in arrived]:
            states.adopt(segment)
        return {BY_CLASS}

    def prepare(self, states: States, inputs: Inputs, given: contextlib.ExitStack) -> Callable[[], None] | None:
        """See `Rule`."""
        arrived = self._begun(states, inputs)
        given.enter_context(self.with_gradients(states, arrived, inputs.factor))
        return partial(self._call, states) if arrived else None

    def _call(self, states: States) -> None:
        with while_nothing_compiles():
            _optimizer(states).step()

    def _begun(self, states: States, inputs: Inputs) -> Arrived:
        """Sets the options of a step, and makes the first step of segments that have none; returns the others."""
        for group, values in zip(_optimizer(states).param_groups, inputs.options, strict=True):
            set_options(group, values)
        if not (states.kinds or self._user.begins_with_states):
            return inputs.arrived
        later = []
        for segment, gradient in inputs.arrived:
            if segment.weights in states.by_weights:
                later.append((segment, gradient))
            else:
                self._first(states, segment, gradient, inputs.factor)
        return later

    def _first(self, states: States, segment: Segment, gradient: torch.Tensor, factor: float | torch.Tensor) -> None:
        """Makes the first step of a segment piece by piece."""
        options, kinds, numbers = _optimizer(states).param_groups[segment.group], list[str](), dict[str, Any]()
        numel = _FIRST_NUMEL if self._user.divides else gradient.numel()
        for first in range(0, gradient.numel(), numel):
            piece = slice(first, first + numel)
            weights = nn.Parameter(segment.weights.detach()[piece])
            made = self._user.over_one(weights, options)
            weights.grad = _scaled(gradient[piece], weights.dtype, factor)
            with while_nothing_compiles():
                made.step()
            state = made.state.get(weights, {})
            kinds = [kind for kind, value in state.items() if is_elementwise(kind, value, weights)]
            for kind in kinds:
                states.take(kind, segment, state[kind], first)
            numbers = {kind: value for kind, value in state.items() if kind not in kinds}  # of each piece the same
        states.put(segment, kinds, numbers)

    @contextlib.contextmanager
    def with_gradients(self, states: States, arrived: Arrived, factor: float | torch.Tensor = 1.0) -> Iterator[None]:
        """Sets the gradients, multiplied by `factor`, for a call of the class, and clears them afterwards."""
        groups = _optimizer(states).param_groups
        dtype = states.master.dtype
        copied = (gradient.numel() for _, gradient in arrived if gradient.dtype != dtype or scales(factor))
        HEAP.trim_if_over(sum(copied) * dtype.itemsize)
        try:  # an error must leave nothing for the next call
            for segment, gradient in arrived:
                # In float32 without a factor this is the gradient itself, as in plain PyTorch.
                segment.weights.grad = _scaled(gradient, segment.weights.dtype, factor)
                if self.shares_call:
                    groups[segment.group]["params"].append(segment.weights)
            yield
        finally:
            for group in groups if self.shares_call else ():
                group["params"] = []
            for segment, _ in arrived:
                segment.weights.grad = None


@contextlib.contextmanager
def _without(states: States, begun: Sequence[nn.Parameter]) -> Iterator[None]:
    """Leaves weights out of a call: a class may act on those that have no gradient."""
    groups = _optimizer(states).param_groups
    before, out = [group["params"] for group in groups], set(begun)
    try:
        for group in groups if out else ():
            group["params"] = [weights for weights in group["params"] if weights not in out]
        yield
    finally:
        for group, parameters in zip(groups, before, strict=True):
            group["params"] = parameters


def _optimizer(states: States) -> torch.optim.Optimizer:
    """The optimizer that `ClassRule.attach` has made."""
    assert states.optimizer is not None
    return states.optimizer


def _scaled(gradient: torch.Tensor, dtype: torch.dtype, factor: float | torch.Tensor) -> torch.Tensor:
    value = gradient.to(dtype)
    if scales(factor):
        return value * factor if value is gradient else value.mul_(factor)
    return value
