"""`UserOptimizer`: the user's optimizer, its groups and options, and optimizers of its class over shards."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import threading
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir.chunk.chunk import Chunk
from elixir.errors import InputError, few
from elixir.kernels import HybridAdam
from elixir.kernels.adam.adam_rule import group_options
from elixir.kernels.adam.step import Combination, kernel_for
from elixir.kernels.muon import check_rule, matrix_rule
from elixir.optimizer_states import AVERAGE, MomentKind, averages, with_average, without_average
from elixir.plan.plan import Plan
from elixir.torch_private import tree_map, while_nothing_compiles
from elixir.units import dtype_name
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.elementwise import Rehearsal, check_elementwise, check_positions, options_of, same_options
from elixir.wrapper.step.matrix_rule import Exchange, MatrixRoom, MatrixRule
from elixir.wrapper.step.rules import AdamRule, ClassRule, Rule
from elixir.wrapper.step.segments import Segment
from elixir.wrapper.step.states import Kind, is_elementwise

HOW = ("foreach", "fused", "capturable", "differentiable", "moments")
"""Options that say how a step is computed, not its result: loading a state dict keeps those of this run."""
_TRIED_NUMEL, _TRIED_STEPS = 1009, 3
"""Elements of a weight with which a class shows its states, and how often it is stepped. No other state has as many."""
_REMEMBERED = 8
"""How many steps' changes of groups are remembered: more steps than are under way at once."""


class UserOptimizer:
    """A user's optimizer: its groups, their current options, and optimizers of the same class over other tensors.

    Args:
        given: the user's optimizer.
        groups: returns its current groups.
        engine: the engine of the chunks.
        changing: the options that its step changes by itself; see `check_optimizer`.
        decay: the share of the averages of weights that each step keeps; None: there are none.
    """

    def __init__(
        self,
        given: torch.optim.Optimizer,
        groups: Callable[[], list[dict[str, Any]]],
        engine: Engine,
        changing: frozenset[str] = frozenset(),
        decay: float | None = None,
    ) -> None:
        self.given, self.decay = given, decay
        self._shared: torch.optim.Optimizer | None = None  # steps all shards on the device in one call
        self._groups, self._engine = groups, engine
        self._changing, self._rule = changing, matrix_rule(given)
        self._changed: dict[tuple[int, str], dict[str, Any]] = {}
        self._lock = threading.Lock()  # several lanes step
        self._rehearsal = Rehearsal(self._over_groups, len(groups())) if changing else None
        self.number = len(engine.steppers)
        """Its number among the optimizers of the engine."""
        self.fusible = can_fuse(given)
        self.is_predictable = isinstance(given, HybridAdam) or type(given).__module__.startswith("torch.optim.")
        """See `Rule`."""
        self.begins_with_states = bool(given.state)
        """Whether the constructor of the class makes states."""
        self.divides = True
        """See `elixir.wrapper.step.rules.MakesOptimizer`."""
        self._kinds: dict[tuple[torch.dtype, int], dict[str, Kind]] = {}
        self.group_of = {parameter: index for index, group in enumerate(groups()) for parameter in group["params"]}
        self._slots = [slot for chunk in engine.chunks for slot in chunk.slots]
        numbers = [self.group_of.get(slot.parameter) for slot in self._slots]
        self._members = f"{type(given).__name__} {zlib.crc32(repr(numbers).encode()):08x}"

    def check_plan(self, plan: Plan) -> None:
        """Refuses a plan that steps other parameters as whole matrices than this optimizer, or with other states.

        Raises:
            InputError: the message says what to do instead.
        """
        if self._rule is None:
            check_moments(self.given, self.fusible, plan.moments)
        check_average(self.decay, plan.optimizer)
        whole, mine = set(plan.matrices), {slot.name for slot in self._slots if slot.parameter in self.group_of}
        wrong = sorted(mine - whole if self._rule is not None else mine & whole)
        if wrong:
            name = type(self.given).__name__
            raise InputError(
                f"the plan is for {plan.optimizer}, and does not foresee that {name} steps {few(wrong)}; plan for "
                "these optimizers, as elixir.wrap does without plan="
            )

    def refuse_other_parameters(self) -> None:
        """Refuses groups whose parameters have changed since wrapping, since the shards have their segments from then.

        Raises:
            InputError: the message says what to do instead.
        """
        now = [parameter for group in self._groups() for parameter in group["params"]]
        if list(map(id, now)) != list(map(id, self.group_of)):
            raise InputError(
                f"the parameters of the groups have changed since the optimizer was wrapped, from {len(self.group_of)} "
                f"to {len(now)} or to others; leave them, and freeze a parameter with requires_grad_(False)"
            )

    @property
    def fuses(self) -> bool:
        """Whether `AdamRule` steps shards wherever they live, with other rounding than the user's class."""
        return self.fusible and _fuses(self._engine.options.fused_kernels, self._engine.plan.moments)

    def hyperparameters(self) -> list[dict[str, Any]]:
        """The current options of the groups."""
        return [shard_options(group) for group in self._groups()]

    def options_to_compare(self, clip_limit: float | None) -> dict[str, str]:
        """The options that must be the same on all ranks in a step, as text.

        Args:
            clip_limit: the limit of the gradient norm.
        """
        said = {"the groups of its parameters": self._members, "the limit of the norm": str(clip_limit)}
        said["ema"] = str(self.decay)
        for index, group in enumerate(self._groups()):
            # Only options of the class; others may be anything. Reading one on a device would wait for it.
            own = {key: group[key] for key in self.given.defaults if key in group}
            said |= {
                f"{key} of group {index}": str(value.tolist() if isinstance(value, torch.Tensor) else value)
                for key, value in own.items()
                if isinstance(value, (bool, int, float, tuple)) or (isinstance(value, torch.Tensor) and value.is_cpu)
            }
        return said

    def loaded_options(self, group: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a group after an optimizer of this class has loaded saved ones.

        The class decides what they mean: torch's AdamW keeps its decay, whatever an Adam saved, while `HybridAdam`
        takes over the saved decay.

        Args:
            group: its current options, of which those in `HOW` stay.
            options: the saved options.

        Raises:
            InputError: this run cannot step shards with them.
        """
        shape = (1,) if self._rule is None else (1, 1)
        weight = nn.Parameter(torch.zeros(shape, device="cpu"))  # a constructor may look at the first one
        made = _like(self.given, [{**shard_options(group), "params": [weight]}])
        taken = {key: copy.deepcopy(value) for key, value in options.items() if key not in HOW}
        loaded = {**taken, **{key: group[key] for key in HOW if key in group}, "params": []}
        made.__setstate__({"state": made.state, "param_groups": [loaded]})
        if self.fuses and not can_fuse(made):
            raise InputError(
                f"the options that were saved (amsgrad={options.get('amsgrad')}) are none with which Adam steps over "
                "whole shards; load them into a run without use_fused_kernels whose plan keeps moments in float32"
            )
        return {key: value for key, value in made.param_groups[0].items() if key != "params"}

    def over(self, segments: Sequence[Segment]) -> torch.optim.Optimizer:
        """Creates an optimizer of the user's class over segments, with their groups' options."""
        groups: list[list[nn.Parameter]] = [[] for _ in self._groups()]
        for segment in segments:
            groups[segment.group].append(segment.weights)
        return self._over_groups(groups)

    def over_one(self, weights: nn.Parameter, options: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Creates an optimizer of the user's class over one weight."""
        return _like(self.given, [{**options_of(options), "params": [weights]}])

    def kinds(self, dtype: torch.dtype, groups: Collection[int]) -> dict[str, Kind]:
        """The kinds of elementwise states that the class has made after some steps of weights in a dtype.

        Args:
            dtype: of the weights.
            groups: to which they belong.

        Raises:
            InputError: a kind of state has several dtypes.
        """
        found: dict[str, Kind] = {}
        for index in sorted(groups):
            if (dtype, index) not in self._kinds:
                self._kinds[dtype, index] = self._tried(dtype, self._groups()[index])
            for kind, each in self._kinds[dtype, index].items():
                self._refuse_two_dtypes(kind, found.setdefault(kind, each), each)
        return found

    def _tried(self, dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, Kind]:
        weights = nn.Parameter(torch.zeros(_TRIED_NUMEL, dtype=dtype, device="cpu"))
        weights.grad, found = torch.ones_like(weights), dict[str, Kind]()
        optimizer = self.over_one(weights, shard_options(options))
        for _ in range(_TRIED_STEPS):
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), while_nothing_compiles():
                optimizer.step()
            for kind, value in optimizer.state.get(weights, {}).items():
                if kind == AVERAGE:
                    raise InputError(
                        f"{type(self.given).__name__} keeps a state {kind!r}, the name of Elixir's average of the "
                        "weights; have it call that otherwise"
                    )
                if is_elementwise(kind, value, weights):
                    self._refuse_two_dtypes(kind, found.setdefault(kind, Kind(value.dtype)), Kind(value.dtype))
                else:
                    self.divides &= isinstance(value, (bool, int, float, type(None), torch.Tensor))
                    self.divides &= not (isinstance(value, torch.Tensor) and value.dim())
        return found

    def _refuse_two_dtypes(self, kind: str, one: Kind, other: Kind) -> None:
        if one != other:
            raise InputError(
                f"{type(self.given).__name__} keeps the state {kind!r} in {dtype_name(one.dtype)} and in "
                f"{dtype_name(other.dtype)}; have it keep each kind of state in one dtype"
            )

    def step_changes(self, stepped: Callable[[], Collection[int]]) -> list[dict[str, Any]]:
        """The options, by group, that a step changes by itself; empty for most classes.

        Args:
            stepped: returns the groups with a gradient on any rank.
        """
        if self._rehearsal is None:
            return [{} for _ in self._groups()]
        after = self._rehearsal.after(self.hyperparameters(), stepped())
        return [{key: group[key] for key in self._changing if key in group} for group in after]

    def apply_changes(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Sets the options that `step_changes` has returned."""
        for group, changed in zip(self._groups(), changes, strict=True):
            take_options(group, changed)

    def _over_groups(self, parameters: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
        groups = zip(self.hyperparameters(), parameters, strict=True)
        mine = [{**options, "params": mine} for options, mine in groups]
        if self._rule is not None:  # only keeps groups and states: the class refuses what is no matrix
            return torch.optim.Optimizer(mine, shard_options(self.given.defaults))
        made = _like(self.given, mine)
        if self._changing:
            self._watch(made)
        return made

    def _watch(self, made: torch.optim.Optimizer) -> None:
        """Makes an optimizer compare how its steps change groups with how the steps of other shards did."""
        before: list[str] = []

        def begins(*_: Any) -> None:
            before[:] = [repr(options_of(group)) for group in made.param_groups]

        def ends(*_: Any) -> None:
            for index, group in enumerate(made.param_groups):
                if any(weights.grad is not None for weights in group["params"]):
                    self._hold(index, before[index], options_of(group))

        made.register_step_pre_hook(begins)
        made.register_step_post_hook(ends)

    def _hold(self, index: int, before: str, after: dict[str, Any]) -> None:
        with self._lock:
            first = self._changed.setdefault((index, before), after)
            while len(self._changed) > _REMEMBERED * len(self._groups()):
                del self._changed[next(iter(self._changed))]
        for key in self._changing:
            if not same_options(first.get(key), after.get(key)):
                raise InputError(
                    f"a step of {type(self.given).__name__} has changed {key!r} of group {index} to {first.get(key)} "
                    f"for some weights and to {after.get(key)} for others, which live in other shards; it cannot be "
                    "stepped here"
                )

    def rule_for(self, chunk: Chunk, dtype: torch.dtype, *, gathered: bool) -> Rule:
        """Chooses what steps a shard.

        Args:
            chunk: the chunk of the shard.
            dtype: of what is stepped.
            gathered: whether its gradients lie in one tensor.
        """
        engine, on_host = self._engine, chunk.plan.update_home == "host"
        moments, group = engine.plan.moments, engine.group
        if self._rule is not None:
            emulation = engine.options.debug.emulation
            room = MatrixRoom.of(engine.arena, engine.plan, None if emulation is None else emulation.bytes_per_s)
            exchange = Exchange(chunk, group, room, self.group_of) if group.size > 1 and chunk.plan.matrices else None
            return MatrixRule(self, self._rule, room, staged=on_host, exchange=exchange)
        # One function steps moments in fewer bits, wherever gradients lie; float32 ones only if gradients lie together.
        one_pass = self.fuses or (on_host and has_bits_of(self.given))
        if one_pass and dtype == torch.float32 and (gathered or moments != "float32"):
            if on_host:  # the first step finds the kernel
                combination = Combination(chunk.dtype, chunk.dtype if chunk.low_precision else None, moments)
                kernel_for(combination, chunk.shard_numel, separate=chunk.plan.home.early and moments != "8bit")
            return AdamRule(moments, decoupled=isinstance(self.given, torch.optim.AdamW), joins=self.fuses)
        if not on_host and self._shares_calls:
            self._shared = self._shared or self.over([])
            return ClassRule(self, self._shared)
        return ClassRule(self)

    @property
    def loops(self) -> bool:
        """Whether it is one of torch's Adams that steps one weight after the other, by no fused kernel."""
        adam = type(self.given) in (torch.optim.Adam, torch.optim.AdamW)
        return adam and not self.fuses and not all(group.get("fused") for group in self._groups())

    @property
    def _shares_calls(self) -> bool:
        """Whether its class steps any number of tensors by one kernel, without extra memory."""
        adam = type(self.given) in (torch.optim.Adam, torch.optim.AdamW)
        return adam and all(group.get("fused") for group in self._groups())


def _fuses(fused_kernels: bool, moments: str) -> bool:
    return fused_kernels or moments != "float32"


def copies_states(given: torch.optim.Optimizer, *, fused_kernels: bool, moments: str) -> bool:
    """Whether an early update first copies the old states, because no kernel has the bits of this class and its
    options.

    Args:
        given: the user's optimizer.
        fused_kernels: whether the model runs with ``use_fused_kernels``.
        moments: the form of moments in the plan.
    """
    return not (can_fuse(given) and _fuses(fused_kernels, moments)) and not has_bits_of(given)


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `AdamRule` computes what `optimizer` does: one of torch's Adams or ours, without further options."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, HybridAdam):
        return False
    refused = ("amsgrad", "differentiable")
    return all(not any(group.get(name) for name in refused) for group in optimizer.param_groups)


def has_bits_of(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `AdamRule` has the bits of the class on the host: `HybridAdam`, or one of torch's Adams with
    ``fused=True`` and options in their usual ranges. Others round in other places."""
    if not can_fuse(optimizer):
        return False
    for group in optimizer.param_groups:
        numbers = (*group["betas"], group["eps"], group["weight_decay"])
        if group.get("capturable") or not (isinstance(optimizer, HybridAdam) or group.get("fused")):
            return False
        if not all(isinstance(value, int | float) for value in numbers):
            return False
        try:
            group_options(group, decoupled=True)
        except InputError:  # the class steps with values such as a negative rate, too
            return False
    return True


def check_moments(optimizer: torch.optim.Optimizer, fusible: bool, moments: MomentKind) -> None:
    """Refuses an optimizer that cannot step with the moments of a plan, or was built for others.

    Args:
        optimizer: the optimizer.
        fusible: whether `AdamRule` can step in its place.
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


def check_average(decay: float | None, optimizer: str) -> None:
    """Refuses a plan that counts an average of the weights which is not kept, or the other way round.

    Args:
        decay: of the average; None: none is kept.
        optimizer: of the plan, by its `elixir.optimizer_states.optimizer_name`.

    Raises:
        InputError: the message says what to do.
    """
    if decay is not None and not averages(optimizer):
        raise InputError(
            f"the plan is for {optimizer}, and counts no average of the weights, which takes 4 bytes of each trained "
            f"weight: plan with optimizer_type={with_average(optimizer)!r}, or with elixir.wrap(..., ema={decay})"
        )
    if decay is None and averages(optimizer):
        raise InputError(
            f"the plan is for {optimizer}, and counts an average of the weights: give ema=0.999, the share of it that "
            f"each step keeps, or plan with optimizer_type={without_average(optimizer)!r}"
        )


_CHECKED: dict[tuple[Any, ...], frozenset[str]] = {}
"""Results of `check_elementwise`, by class, method and options."""


def check_optimizer(given: torch.optim.Optimizer, moments: MomentKind) -> frozenset[str]:
    """Refuses an optimizer that cannot step shards, or that has stepped already.

    Args:
        given: the user's optimizer, over whole parameters.
        moments: the form of moments in the plan; `AdamRule` steps any form but float32.

    Returns:
        The options that its step changes by itself.

    Raises:
        InputError: says what to give instead.
    """
    if any(has_stepped(state) for state in given.state.values()):
        raise InputError(
            f"{type(given).__name__} has states, which would be lost: it has stepped already, or makes them when it is "
            "built; give one that has none"
        )
    _refuse_replaced(given)
    rule, tried = matrix_rule(given), {_form(group): group for group in given.param_groups}
    if rule is not None:  # a plan's moments are Adam's
        for group in tried.values():
            check_rule(rule, partial(_over_one_group, given, group))
        return frozenset()
    check_moments(given, can_fuse(given), moments)
    if moments != "float32":
        return frozenset()
    changing = frozenset[str]().union(*(_changing(given, group) for group in tried.values()))
    if not _is_known(type(given)):
        dims = [[weight.dim() for weight in group["params"]] for group in given.param_groups]
        check_positions(type(given), partial(_over_groups, given), dims)
    return changing


def _is_known(kind: type) -> bool:
    return kind.__module__.startswith(("torch.optim.", "elixir.kernels."))


def _changing(given: torch.optim.Optimizer, group: dict[str, Any]) -> frozenset[str]:
    """`check_elementwise` for one group; once in a process for a class of torch or Elixir with the same options.

    `wrap` checks first of all, and `ElixirOptimizer` again.
    """
    kind, make = type(given), partial(_over_one_group, given, group)
    if not _is_known(kind):
        return check_elementwise(kind, make)
    options = {key: value for key, value in group.items() if key != "params"}
    key = (kind, kind.step, repr(given.defaults), repr(options))
    if key not in _CHECKED:
        _CHECKED[key] = check_elementwise(kind, make)
    return _CHECKED[key]


def _form(group: Mapping[str, Any]) -> str:
    """A text that is the same for groups that differ in numbers only."""
    own = {key: bool(value) if isinstance(value, float) else value for key, value in group.items() if key != "params"}
    return repr(sorted(own.items(), key=lambda item: item[0]))


def _refuse_replaced(given: torch.optim.Optimizer) -> None:
    """Refuses an optimizer with a method that was replaced on the object: the class steps shards."""
    for name, value in vars(given).items():
        of_class = getattr(type(given), name, None)
        if not callable(value) or not callable(of_class):
            continue
        while getattr(value, "__globals__", {}).get("__name__") == torch.optim.lr_scheduler.__name__:
            value = value.__wrapped__  # the wrapper of a scheduler only notes the call
        if getattr(value, "__func__", value) is not of_class:
            raise InputError(
                f"{name} of the optimizer was replaced on the object, and would not be called: shards are stepped by "
                f"the class {type(given).__name__}; define {name} in a subclass, or use a hook of the optimizer"
            )


def _over_one_group(
    given: torch.optim.Optimizer, group: dict[str, Any], weights: list[nn.Parameter]
) -> torch.optim.Optimizer:
    return _like(given, [{**shard_options(group), "params": weights}])


def _over_groups(given: torch.optim.Optimizer, weights: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
    pairs = zip(given.param_groups, weights, strict=True)
    return _like(given, [{**shard_options(group), "params": mine} for group, mine in pairs])


def _like(given: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of the same class with the same defaults, over other tensors."""
    kind = type(given)
    defaults = {key: value for key, value in given.defaults.items() if key not in ("differentiable",)}
    made: torch.optim.Optimizer = kind(groups, **accepted_options(kind, shard_options(defaults)))
    return made


def take_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Sets options of a group, such as the result of `UserOptimizer.loaded_options`."""
    for key, value in options.items():
        mine = group.get(key)
        if isinstance(mine, torch.Tensor) and isinstance(value, (torch.Tensor, float, int)):
            mine.fill_(float(value))  # a scheduler may hold the same tensor
        else:
            group[key] = value


def refuse_different_options(said: Sequence[Mapping[str, str]]) -> None:
    """Refuses a step if options differ between ranks: each rank would step its part of a weight differently.

    Args:
        said: by rank, the result of `UserOptimizer.options_to_compare`.

    Raises:
        InputError: they differ.
    """
    first = said[0]
    for rank, other in enumerate(said):
        for what in [*first, *other]:
            one, two = str(first.get(what)), str(other.get(what))
            if one != two and not _nearly_same(one, two):
                raise InputError(
                    f"ranks step with different options: {what} is {one} on rank 0, {two} on rank {rank}; nothing was "
                    "stepped. Set the same on all ranks, such as by a scheduler that gets the mean of their losses"
                )


def _nearly_same(one: str, two: str) -> bool:
    """Whether both are numbers that differ by rounding only, as between machines with other libraries."""
    with contextlib.suppress(ValueError):
        return math.isclose(float(one), float(two), rel_tol=1e-9)
    return False


def has_stepped(state: Any) -> bool:
    """Whether an optimizer's state of one parameter comes from a step, not from a constructor."""
    if not isinstance(state, dict):
        return bool(state)
    if "step" in state:
        return bool(state["step"] > 0)
    return any(isinstance(value, torch.Tensor) for value in state.values())


def shard_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Copies options for stepping shards on any device; copies, since a scheduler may write into a tensor.

    `capturable` is switched off: it serves CUDA graphs, which are refused, and the host cannot step with it. Numbers on
    the device are read, since the host cannot step with those either.
    """
    captured = bool(options.get("capturable"))

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.item() if value.numel() == 1 and (value.is_cuda or captured) else value.clone()

    own = {key: tree_map(copied, value) for key, value in options.items() if key != "params"}
    return {**own, "capturable": False} if captured else own


def accepted_options(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """The `options` that the class's constructor takes."""
    names = inspect.signature(cls).parameters
    return {key: value for key, value in options.items() if key in names}
