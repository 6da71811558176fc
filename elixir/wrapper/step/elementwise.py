"""Finds out by trial whether an optimizer class steps shards of weights as it steps whole weights.

Three optimizers of the class step the same weights with the same gradients: one has whole weights, the other two a
shard each. After every step all weights must agree.

The steps of some classes change numbers in their groups, such as a count. Such a class is elementwise if the change
does not depend on the weights. A `Rehearsal` then tells the change in advance, so that all shards start from the same
groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from elixir.errors import InputError
from elixir.torch_private import tree_flatten, tree_map

Options = dict[str, Any]
"""The options of one group, without its parameters."""
MakeOver = Callable[[list[list[nn.Parameter]]], torch.optim.Optimizer]
"""Creates an optimizer over the parameters of each group."""

_MODES = ("train", "eval")
"""Methods by which a class rewrites weights for training and for evaluation."""
_NAMES = frozenset("Adafactor LAMB Lamb LARS Muon Shampoo SOAP LBFGS SparseAdam NovoGrad".split())
_SHAPES = ((136, 144), (24, 8, 3), (40,))
"""The first shape exceeds 128 rows and columns, from which on some classes factor their moments."""
_CUT = 7000
"""Elements of the first weight in the first shard. The second shard has the rest and all other weights."""
_ROUNDS = 2
"""Rounds of all kinds of gradients. Two make 12 steps: some classes act in every fifth or sixth step."""
_ALIKE_STEPS = 3
"""Steps of weights that are alike. Some classes act differently from the second step on."""
_LEAST = 1e-2
"""The least learning rate and weight decay: with the rate of a warm-up's first step no change would show."""
_COPIES: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys((bool, int, float, str, type(None)), lambda value: value),
    tuple: lambda values: tuple(map(_copied, values)),
}
"""Copies values of these types without a walk through them: every chunk copies the options in every step."""
_ROUNDING = 2e-6
"""The tolerance: two dozen roundings in float32, relative to the largest value that a weight has had."""


class Rehearsal:
    """Tries a first step over one number per group, and tells how it changes the options of the groups.

    Args:
        make: creates an optimizer of the class.
        groups: the number of groups.
    """

    def __init__(self, make: MakeOver, groups: int) -> None:
        self._weights = [nn.Parameter(torch.zeros(1, device="cpu")) for _ in range(groups)]
        self._optimizer = make([[weight] for weight in self._weights])
        # Some classes create states in their constructor.
        self._first = {weight: options_of(state) for weight, state in self._optimizer.state.items()}

    def after(self, groups: Sequence[Options], stepped: Collection[int]) -> list[Options]:
        """The options of the groups after a step.

        Args:
            groups: their current options.
            stepped: the groups that get a gradient.
        """
        self._optimizer.state.clear()
        self._optimizer.state.update({weight: options_of(state) for weight, state in self._first.items()})
        for index, options in enumerate(groups):
            weight = self._weights[index]
            weight.data.zero_()
            weight.grad = torch.ones_like(weight) if index in stepped else None
            set_options(self._optimizer.param_groups[index], options, exactly=True)
        self._optimizer.step()
        return [options_of(group) for group in self._optimizer.param_groups]


def check_elementwise(cls: type, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> frozenset[str]:
    """Makes sure that steps on shards of weights give what steps on whole weights give.

    Args:
        cls: the optimizer's class; for messages.
        make: creates an optimizer of that class over parameters, in one group with the caller's options.

    Returns:
        The options that a step changes by itself, independent of the weights.

    Raises:
        InputError: shards come out differently, or the optimizer cannot step them.
    """
    if any(base.__name__ in _NAMES for base in cls.__mro__):
        raise _refusal(cls)
    if all(callable(getattr(cls, mode, None)) for mode in _MODES):
        raise InputError(
            f"{cls.__name__} rewrites weights between training and evaluation, which shards cannot follow; use "
            "torch.optim.AdamW with a schedule of its rate"
        )
    with _trying(cls, "flat pieces of a weight"):
        return _Trial(cls, make).run()


def check_positions(cls: type, make: MakeOver, dims: Sequence[Sequence[int]]) -> None:
    """Makes sure that steps do not depend on the position of a weight in its list, since each shard has another list.

    Small weights that are alike must stay alike.

    Args:
        cls: the optimizer's class; for messages.
        make: creates an optimizer of that class over the parameters of each group, with the caller's options.
        dims: the number of dimensions of the caller's parameters, by group.

    Raises:
        InputError: weights of a group have come out differently.
    """
    # One more in each group, so that no rule changes exactly where a group ends.
    groups = [[nn.Parameter(_small(dim)) for dim in (*group, *group[-1:])] for group in dims]
    with _trying(cls, "small weights"):
        optimizer = make(groups)
        for group in optimizer.param_groups:
            _raise(group)
        for _ in range(_ALIKE_STEPS):
            for weight in (weight for group in groups for weight in group):
                weight.grad = _small(weight.dim()).square_()
            optimizer.step()
            for weights in filter(None, groups):
                values = torch.stack([weight.detach().flatten() for weight in weights])
                if not torch.allclose(values, values[0], rtol=_ROUNDING, atol=_ROUNDING * _LEAST, equal_nan=True):
                    raise _refusal(
                        cls,
                        "its update of a weight depends on the weight's position in its list, and each shard has "
                        "another list",
                        "say by an option of a group what differs between weights",
                    )


@contextmanager
def _trying(cls: type, what: str) -> Iterator[None]:
    """Steps inside draw from no generator of the user's; what they raise says that they cannot step `what`."""
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            yield
    except InputError:
        raise
    except Exception as error:
        raise _refusal(cls, f"it cannot step {what} ({type(error).__name__}: {error})") from error


def _small(dim: int) -> torch.Tensor:
    """Two values with `dim` dimensions, or with one."""
    return torch.tensor([0.5, -1.0], device="cpu").view(*[1] * (dim - 1), -1)


def _refusal(
    cls: type,
    why: str = "its update of one weight depends on others, which live in other shards",
    way: str = "use an elementwise optimizer such as AdamW, SGD, RMSprop or Adagrad, and for matrices "
    "torch.optim.Muon, or a class with an elixir_rule (elixir.kernels.muon)",
) -> InputError:
    if "8bit" in cls.__name__.lower():  # as bitsandbytes and torchao call theirs
        way = "use torch.optim.Adam or AdamW with moments='8bit', which rounds to other bits"
    return InputError(f"{cls.__name__} is not elementwise: {why}; {way}")


class _Trial:
    """Runs three optimizers of one class over the same gradients.

    `_whole` has whole weights. `_alone` has one shard, and its steps change its groups. `_guided` has the other shard,
    and its groups are set before each step as the runtime sets them: options that a `Rehearsal` foresees as in
    `_whole`, all others as at the beginning.
    """

    def __init__(self, cls: type, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self._cls = cls
        self._generator, self._slope = torch.Generator().manual_seed(0), 1.0
        self._weights = [nn.Parameter(weight) for weight in self._drawn()]
        self._shards = [[nn.Parameter(piece) for piece in shard] for shard in _cut(self._weights)]
        self._whole, self._alone, self._guided = (make(each) for each in (self._weights, *self._shards))
        self._rehearsal = Rehearsal(lambda groups: make(groups[0]), 1)
        for optimizer in (self._whole, self._alone, self._guided):
            _raise(optimizer.param_groups[0])
        self._start = options_of(self._whole.param_groups[0])
        self._largest = torch.full((sum(map(math.prod, _SHAPES)),), _LEAST, device="cpu")
        self._changed: set[str] = set()
        self._unforeseen: set[str] = set()

    def run(self) -> frozenset[str]:
        """Runs all steps; returns the options that they change independent of the weights."""
        counts: dict[str, float] | None = None
        for gradients in self._gradients():
            for weight, gradient in zip(self._weights, gradients, strict=True):
                weight.grad = gradient
            for shard, pieces in zip(self._shards, _cut(gradients), strict=True):
                for weight, piece in zip(shard, pieces, strict=True):
                    weight.grad = piece
            self._step()
            counts = _counts(self._whole) if counts is None else counts
        self._refuse_other_states(counts or {})
        return frozenset(self._changed - self._unforeseen)

    def _refuse_other_states(self, counts: dict[str, float]) -> None:
        odd = next((key for key in self._whole.state if not isinstance(key, torch.Tensor)), None)
        if odd is not None:
            raise _refusal(self._cls, f"it keeps a state {odd!r} for no parameter, and shards have those of parameters")
        counted = {name for name, count in _counts(self._whole).items() if count != counts.get(name)}
        if counted:
            raise _refusal(
                self._cls, f"its step changes {min(counted)!r} of the object, and each shard has another object"
            )

    def _gradients(self) -> Iterator[list[torch.Tensor]]:
        """Gradients of several sizes, orthogonal and parallel to the rows of the weights, on which some rules depend.

        Each is computed when it is needed, from the current weights.
        """
        for _ in range(_ROUNDS):
            yield self._drawn()
            yield self._drawn(1e-3)
            yield [_across(*pair) for pair in zip(self._weights, self._drawn(), strict=True)]
            yield [weight.detach().clone() for weight in self._weights]
            yield self._drawn(30.0)
            yield self._drawn()

    def _drawn(self, size: float = 1.0) -> list[torch.Tensor]:
        """Random values that grow from element to element, or shrink, in turn, so that means over the two shards
        differ."""
        self._slope = -self._slope
        drawn = []
        for shape in _SHAPES:
            values = torch.randn(math.prod(shape), generator=self._generator, device="cpu")
            drawn.append(
                (values * torch.logspace(-self._slope, self._slope, len(values), device="cpu") * size).view(shape)
            )
        return drawn

    def _step(self) -> None:
        """Steps all three.

        Raises:
            InputError: groups or weights of a shard differ from those of `_whole`.
        """
        group = self._whole.param_groups[0]
        before = options_of(group)
        foreseen = self._rehearsal.after([before], [0])[0]
        kept = {key: value for key, value in before.items() if key not in self._unforeseen}
        again = {key: value for key, value in self._start.items() if key in self._unforeseen}
        set_options(self._guided.param_groups[0], {**kept, **again}, exactly=True)
        for optimizer in (self._whole, self._alone, self._guided):
            optimizer.step()
        after = options_of(group)
        by_weights = _differing(options_of(self._alone.param_groups[0]), after)
        if by_weights:
            names = ", ".join(map(repr, sorted(by_weights)))
            raise _refusal(
                self._cls,
                f"its step changes {names} of its groups in a way that depends on the weights, of which each shard "
                "has a part",
            )
        self._changed |= _differing(before, after)
        self._unforeseen |= _differing(foreseen, after)
        self._compare()

    def _compare(self) -> None:
        mine = torch.cat([piece.detach() for shard in self._shards for piece in shard])
        theirs = torch.cat([weight.detach().flatten() for weight in self._weights])
        # With a tolerance: vectors of other lengths may go through other instructions.
        self._largest = torch.maximum(self._largest, theirs.abs())
        same = (mine == theirs) | (mine.isnan() & theirs.isnan()) | ((mine - theirs).abs() <= _ROUNDING * self._largest)
        if not same.all():
            raise _refusal(self._cls)


def _counts(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The numbers among an optimizer's attributes, tensors of one element included."""
    kept = vars(optimizer).items()
    tensors = {name: value.item() for name, value in kept if isinstance(value, torch.Tensor) and value.numel() == 1}
    return tensors | {name: value for name, value in kept if type(value) in (int, float)}


def _cut(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Cuts tensors with the shapes of `_SHAPES` into two shards, flat and in separate memory."""
    first, *others = (tensor.detach().flatten().clone() for tensor in tensors)
    return [first[:_CUT].clone()], [first[_CUT:].clone(), *others]


def _raise(group: dict[str, Any]) -> None:
    lr, decay = group.get("lr"), group.get("weight_decay")
    if isinstance(lr, torch.Tensor):
        lr.clamp_(min=_LEAST)
    elif isinstance(lr, (int, float)):
        group["lr"] = max(lr, _LEAST)
    if isinstance(decay, float) and decay:
        group["weight_decay"] = max(decay, _LEAST)


def _across(weight: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """`drawn` without nearly all of its component along the rows of `weight`, like gradients of normalized weights."""
    rows = weight.detach().flatten(1) if weight.dim() > 1 else weight.detach()[None]
    unit = rows / rows.norm(dim=1, keepdim=True)
    found: torch.Tensor = drawn.view_as(rows)
    for _ in range(2):  # the second time for what rounding has left
        found = found - unit * (unit * found).sum(1, keepdim=True)
    # A twentieth of a random gradient's component stays: some rules remove components below a tenth.
    found = found + unit * found.norm(dim=1, keepdim=True) / (20 * rows.shape[1] ** 0.5)
    return found.view_as(weight)


def options_of(group: Mapping[str, Any]) -> Options:
    """Copies the options of a group, or the states of a weight."""
    return {key: _copied(value) for key, value in group.items() if key != "params"}


def set_options(group: dict[str, Any], options: Mapping[str, Any], *, exactly: bool = False) -> None:
    """Sets options of a group; with `exactly`, deletes all others. Values are copied, since a step may write into
    them."""
    for key in [key for key in group if exactly and key not in options and key != "params"]:
        del group[key]
    group.update({key: _copied(value) for key, value in options.items()})


def same_options(one: Any, other: Any) -> bool:
    """Whether two sets of options are the same."""
    values, form = tree_flatten(one)
    others, other_form = tree_flatten(other)
    return form == other_form and all(map(_equal, values, others))


def _differing(one: Options, other: Options) -> set[str]:
    changed = {key for key in one.keys() & other.keys() if not same_options(one[key], other[key])}
    return changed | (one.keys() ^ other.keys())


def _copied(value: Any) -> Any:
    return _COPIES.get(type(value), _copied_leaves)(value)


def _copied_leaves(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
