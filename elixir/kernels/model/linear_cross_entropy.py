"""Cross-entropy over a linear layer's output without that output: logits are made a slice of the vocabulary at a time.

Forward goes over the slices, keeps a running maximum and sum of exponentials per token, and saves the log-sum-exp
alone. Backward makes each slice again and turns it into its gradients. So where plain PyTorch keeps logits in the
model's dtype, in float32 and as log-probabilities, here a slice is alive at a time; the price is one more product with
the weight.

Slices go over the vocabulary rather than over tokens because then each row of the weight's gradient is complete in one
product: it is rounded once, as in the plain form, and needs no float32 accumulator of the weight's size. Recomputing
rather than making gradients in forward lets the incoming gradient (with it a loss scale) enter before anything is
rounded to low precision, keeps no gradient of the weight's size between forward and backward, and lets backward run
twice.

`DeferredLogits` bring it into models that somebody else wrote.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elixir.access.interception import untrack
from elixir.errors import InputError
from elixir.units import MIB

SLICE_BYTES = 128 * MIB
"""Size of one slice of logits in float32: large enough that a product fills a GPU, small compared with all logits."""

MIN_SLICE_COLUMNS = 256
"""Classes in a slice at least, however many tokens there are: narrower products waste a matrix unit."""


def _present_values(parameter: torch.Tensor | None) -> Any:
    """A parameter's memory as an ordinary tensor without a graph, for a kernel that reads it often: it reports one use.

    Valid until the module that runs now returns.
    """
    if parameter is None:
        return None
    values = parameter.detach()
    untrack([values])
    return values


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over values of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def slice_columns(tokens: int, classes: int) -> int:
    """Classes per slice for so many tokens."""
    fitting = SLICE_BYTES // (4 * max(tokens, 1))
    return min(classes, max(fitting // MIN_SLICE_COLUMNS * MIN_SLICE_COLUMNS, MIN_SLICE_COLUMNS))


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias).float(), target)``, without ever holding all logits.

    Args:
        hidden: (tokens, features), any floating dtype.
        weight: (classes, features) of the same dtype; may be a streamed parameter, or tied to an embedding.
        target: (tokens,) int64, classes or `ignore_index`.
        bias: (classes,), or None.
        ignore_index: tokens with this target count for nothing.
        reduction: ``mean`` over the tokens that count (nan if there are none, as in PyTorch), or ``sum``.

    Returns:
        A float32 scalar (float64 for float64). Differentiable once, in `hidden`, `weight` and `bias`.

    Raises:
        InputError: shapes or dtypes do not fit, or on the CPU, a target is no class; or its backward is differentiated.
            On other devices, where looking would stop the device, such a target makes the loss nan.
    """
    _check(hidden, weight, target, bias, reduction)
    if target.device.type == "cpu":
        _check_targets(target, weight.shape[0], ignore_index)
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, target, ignore_index, reduction == "mean")  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        ignore_index: int,
        mean: bool,
    ) -> torch.Tensor:
        present = (_present_values(weight), _present_values(bias))
        tokens, classes = hidden.shape[0], weight.shape[0]
        columns = slice_columns(tokens, classes)
        wide = _wide(hidden.dtype)
        peak = torch.full((tokens,), -torch.inf, dtype=wide, device=hidden.device)
        total = torch.zeros_like(peak)
        own = torch.full_like(peak, torch.nan)  # stays so where a target is no class
        for start in range(0, classes, columns):
            logits = _logits(hidden, *present, start, columns)
            own = torch.where(*_inside(logits, target, start), own)
            higher = torch.maximum(peak, logits.amax(1))
            total.mul_(peak.sub_(higher).exp_())
            total.add_(logits.sub_(higher.unsqueeze(1)).exp_().sum(1))
            peak = higher
            del logits, higher
        normaliser = total.log_().add_(peak)
        counts = target != ignore_index
        loss = torch.where(counts, normaliser - own, 0.0).sum()
        counted = counts.sum() if mean else None
        ctx.save_for_backward(hidden, weight, bias, target, normaliser, counted)
        ctx.ignore_index = ignore_index
        return loss if counted is None else loss / counted

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # `once_differentiable` refuses only where the incoming gradient depends on something: a gradient penalty, for
        # which the saved tensors do, would silently be left out.
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph=True needs a second derivative, which the fused loss does not have; choose "
                'use_fused_kernels={"cross_entropy": "plain"}'
            )
        hidden, weight, bias, target, normaliser, counted = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        columns = slice_columns(hidden.shape[0], weight.shape[0])
        share = gradient if counted is None else gradient / counted
        shares = torch.where(target != ctx.ignore_index, share, 0.0).to(normaliser.dtype).unsqueeze(1)
        of_hidden = None
        of_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
        of_bias = torch.empty_like(bias) if bias is not None and needs_bias else None
        for start in range(0, weight.shape[0], columns):
            end = start + columns
            logits = _logits(hidden, weight, bias, start, columns)
            slope = logits.sub_(normaliser.unsqueeze(1)).exp_()  # probabilities
            place, inside = _place(slope, target, start)
            slope.scatter_add_(1, place, -inside.to(slope.dtype).unsqueeze(1))
            slope = slope.mul_(shares).to(hidden.dtype)
            del logits, place, inside
            if of_weight is not None:
                of_weight[start:end].copy_(slope.t() @ hidden)
            if of_bias is not None:
                of_bias[start:end].copy_(slope.sum(0))
            if needs_hidden:
                part = (slope @ weight[start:end]).to(normaliser.dtype)
                of_hidden = part if of_hidden is None else of_hidden.add_(part)
                del part
            del slope
        return None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, of_bias, None, None, None


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, start: int, columns: int
) -> torch.Tensor:
    """One slice, rounded to the model's dtype as the plain form rounds it, then in float32; the caller's to write
    to."""
    end = start + columns
    logits = F.linear(hidden, weight[start:end], None if bias is None else bias[start:end])
    return logits.to(_wide(logits.dtype))


def _place(logits: torch.Tensor, target: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each token's target in a slice, as (tokens, 1), 0 where it is elsewhere; and whether it is there."""
    place = target - start
    inside = (place >= 0) & (place < logits.shape[1])
    return place.mul_(inside).unsqueeze(1), inside


def _inside(logits: torch.Tensor, target: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each token's target is in a slice, and the logit that it would have there."""
    place, inside = _place(logits, target, start)
    return inside, logits.gather(1, place).squeeze(1)


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, reduction: str
) -> None:
    if reduction not in ("mean", "sum"):
        raise InputError(f"reduction is 'mean' or 'sum', got {reduction!r}")
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise InputError(
            "hidden must be (tokens, features) and weight (classes, features), got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if target.dtype != torch.int64 or target.shape != hidden.shape[:1]:
        raise InputError(
            f"target must be int64 of shape {tuple(hidden.shape[:1])}, got {target.dtype} of {tuple(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"bias must be of shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    dtypes = [tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None]
    if len(set(dtypes)) > 1 or not hidden.is_floating_point():
        raise InputError(f"hidden, weight and bias must have one floating dtype, got {', '.join(map(str, dtypes))}")


def _check_targets(target: torch.Tensor, classes: int, ignore_index: int) -> None:
    wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
    if wrong.numel():
        raise InputError(f"target {int(wrong[0])} is none of the {classes} classes and not ignore_index {ignore_index}")


# --- deferred logits -------------------------------------------------------------------------------------------------
# Logits that are only computed if somebody looks at them: how a loss meets the layer before it in someone else's model.
#
# A language model's forward computes logits, hands them to a loss and returns both. While its fused form runs, the last
# layer gives a `DeferredLogits` instead: hidden states and weight. What models do on the way to the loss (`float`,
# `view`, cutting off the last position) it does to the hidden states; `torch.nn.functional.cross_entropy` of it is
# `linear_cross_entropy`; anything else that is asked of it computes the logits and goes on with those, so a model that
# scales or caps its logits, or uses another loss, gets what it always gets.


_FLAG = "_elixir_defers_logits"
"""Set on the last layer while a forward runs whose logits nobody will see."""


class DeferredLogits:
    """The result that `torch.nn.functional.linear` of the arguments would have, cast to `dtype`, not computed yet.

    Args:
        hidden: (..., features).
        layer: the linear layer.
        dtype: of the logits, to which they are cast.
    """

    def __init__(self, hidden: torch.Tensor, layer: nn.Linear, dtype: torch.dtype | None = None) -> None:
        self._hidden, self._layer = hidden, layer
        self.dtype = hidden.dtype if dtype is None else dtype
        self.computed: torch.Tensor | None = None
        """The logits, once somebody has looked."""

    # --- what does not need them -----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._layer.out_features))

    @property
    def requires_grad(self) -> bool:
        return self._hidden.requires_grad or self._layer.weight.requires_grad

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self._hidden.dim()

    def contiguous(self) -> DeferredLogits:
        return self if self.computed is None else self._like(self._hidden)

    def float(self) -> DeferredLogits:
        return self._like(self._hidden, torch.float32)

    def view(self, *shape: Any) -> Any:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
        if len(sizes) < 1 or sizes[-1] != self._layer.out_features:
            return self.tensor().view(*shape)
        return self._like(self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1]))

    reshape = view

    def __getitem__(self, index: Any) -> Any:
        # An index that takes the whole last dimension, such as ``logits[..., :-1, :]``, applies to the hidden states.
        cuts = index[1:] if isinstance(index, tuple) and index[:1] == (Ellipsis,) else ()
        if cuts and len(cuts) <= self.dim() and all(isinstance(cut, slice) for cut in cuts) and cuts[-1] == slice(None):
            return self._like(self._hidden[index])
        return self.tensor()[index]

    # --- what does ---------------------------------------------------------------------------------------------------

    def tensor(self) -> torch.Tensor:
        """The logits."""
        if self.computed is None:
            self.computed = F.linear(self._hidden, self._layer.weight, self._layer.bias).to(self.dtype)
        return self.computed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            loss = _fused_loss(*args, **kwargs)
            if loss is not None:
                return loss
        args = tuple(as_tensors(arg) for arg in args)
        return func(*args, **{name: as_tensors(value) for name, value in kwargs.items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def _like(self, hidden: torch.Tensor, dtype: torch.dtype | None = None) -> DeferredLogits:
        return DeferredLogits(hidden, self._layer, dtype or self.dtype)


def _forward_operator(name: str) -> Callable[..., Any]:
    def operator(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*(as_tensors(arg) for arg in args))

    return operator


for (
    _name
) in "add radd sub rsub mul rmul truediv rtruediv pow neg matmul eq ne lt le gt ge setitem len iter bool".split():
    setattr(DeferredLogits, f"__{_name}__", _forward_operator(f"__{_name}__"))
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


def as_tensors(item: Any) -> Any:
    """Deferred logits, on their own or in a list or tuple, as tensors; all else as it is."""
    if isinstance(item, DeferredLogits):
        return item.tensor()
    if type(item) in (list, tuple):
        return type(item)(as_tensors(inner) for inner in item)
    return item


def _fused_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """`torch.nn.functional.cross_entropy` of deferred logits; None if only the plain form can compute it."""
    if not isinstance(input, DeferredLogits) or input.computed is not None or not isinstance(target, torch.Tensor):
        return None
    hidden, layer = input._hidden, input._layer  # noqa: SLF001 - this function is what the class is for
    if weight is not None or size_average is not None or reduce is not None or label_smoothing != 0.0:
        return None
    if reduction not in ("mean", "sum") or hidden.dim() != 2 or target.shape != hidden.shape[:1]:
        return None
    if target.dtype != torch.int64 or target.device != hidden.device:
        return None
    if any(t is not None and t.dtype != hidden.dtype for t in (layer.weight, layer.bias)):
        return None
    loss = linear_cross_entropy(
        hidden, layer.weight, target, layer.bias, ignore_index=ignore_index, reduction=reduction
    )
    return loss.to(input.dtype)


def last_layer_of(model: nn.Module) -> nn.Linear | None:
    """The linear layer that makes a Hugging Face language model's logits, if its loss can be fused with it.

    Not where somebody listens to the layer's output, or has replaced its forward or the model's.
    """
    find = getattr(model, "get_output_embeddings", None)
    if not callable(find) or "forward" in vars(model) or "labels" not in inspect.signature(model.forward).parameters:
        return None
    try:
        layer = find()
    except Exception:  # some models only have a stub that raises
        return None
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return None
    listened_to = layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return None if listened_to else layer


def deferring_forward(model: nn.Module) -> Any:
    """A forward for this model, in which the last layer defers its logits if only the loss needs them."""
    plain = type(model).forward
    signature = inspect.signature(plain)

    @wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        head = self.get_output_embeddings()  # type: ignore[operator]
        if not _wants_loss_only(self, signature, args, kwargs) or vars(head).get(_FLAG):
            return plain(self, *args, **kwargs)
        vars(head)[_FLAG] = True
        try:
            output = plain(self, *args, **kwargs)
        finally:
            del vars(head)[_FLAG]
        return _without_deferred(output)

    return MethodType(forward, model)


def deferring_layer(layer: nn.Linear) -> Any:
    """A forward for the last layer that defers while the model's forward says so."""

    def forward(self: nn.Linear, input: torch.Tensor) -> Any:
        if vars(self).get(_FLAG) and torch.is_grad_enabled() and input.is_floating_point():
            return DeferredLogits(input, self)
        return nn.Linear.forward(self, input)

    return MethodType(forward, layer)


def _wants_loss_only(model: nn.Module, signature: inspect.Signature, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this call is one of training, whose caller gets a loss and does without logits."""
    if not model.training or not torch.is_grad_enabled():
        return False
    # Autocast would run the products here and not those of a backward written by hand in low precision.
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return False
    named = kwargs
    if args:
        try:
            named = signature.bind(model, *args, **kwargs).arguments
        except TypeError:  # plain forward says what is wrong
            return False
        named = {**named, **named.get("kwargs", {})}
    config = getattr(model, "config", None)
    as_tuple = named.get("return_dict", getattr(config, "return_dict", True)) is False
    return named.get("labels") is not None and not as_tuple


def _without_deferred(output: Any) -> Any:
    """A model's output without logits that were not computed: a key less in Hugging Face's, None in a tuple or dict."""
    if isinstance(output, DeferredLogits):
        return output.tensor()
    if isinstance(output, dict):
        kept = {key: value for key, value in output.items() if not _never_computed(value)}
        kept = {key: as_tensors(value) for key, value in kept.items()}
        missing = [key for key in output if key not in kept]
        if type(output) is dict:
            return {**dict.fromkeys(output), **kept}
        return type(output)(**kept) if missing or any(kept[key] is not output[key] for key in kept) else output
    if isinstance(output, tuple):
        items = [None if _never_computed(item) else as_tensors(item) for item in output]
        return output._make(items) if hasattr(output, "_make") else tuple(items)
    return output


def _never_computed(item: Any) -> bool:
    return isinstance(item, DeferredLogits) and item.computed is None
