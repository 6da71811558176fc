"""Quantised weights: which tensors they are, which others they need, and how they are taken apart while a plan runs.

A tensor subclass that holds other tensors, such as torchao's, has no memory: it computes with ordinary tensors inside
of it (``__tensor_flatten__`` names them). Those are what a plan can place and move. So each becomes a parameter under
the name of the whole and its own, such as ``fc.weight.qdata``, and ``fc.weight`` is put together from them whenever a
module reads it.

bitsandbytes' `Params4bit` is a parameter whose numbers are packed, two to a byte, into a tensor of any dtype. What
unpacks them hangs on the parameter (`quant_state`), where neither `named_parameters` nor `named_buffers` sees it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir.access.interception import TrackedParameter
from elixir.access.whole import announcing, held, holds_others
from elixir.errors import InputError, few


class InnerTensor(nn.Parameter):
    """A tensor inside of a frozen parameter. Its numbers have a meaning only with the others, so it is never cast."""


def flat(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the ordinary tensors inside of one, with their names; an ordinary one as it is."""
    if not holds_others(tensor):
        yield name, tensor
        return
    for own, each in held(tensor):
        yield from flat(f"{name}.{own}", each)


def first_inside(tensor: nn.Parameter) -> nn.Parameter:
    """The first tensor inside of a parameter, which names one that was taken apart; an ordinary parameter itself."""
    found = next(each for _, each in flat("", tensor))
    assert isinstance(found, nn.Parameter)
    return found


class InnerTensors(nn.Module):
    """Holds the tensors inside of one parameter as parameters, and puts it together.

    A state dict has the whole, under the parameter's name; it loads one likewise.

    Args:
        whole: the parameter. Its tensors become the new parameters, so that memory is not held twice.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.kind: Any = type(whole)
        names, self.context = whole.__tensor_flatten__()
        self.shape, self.strides = whole.size(), whole.stride()
        self.names: tuple[str, ...] = tuple(names)
        for name in names:
            inner = getattr(whole, name)
            if holds_others(inner):
                self.add_module(name, InnerTensors(inner))
                continue
            made = InnerTensor(inner, requires_grad=False)
            self.register_parameter(name, made)
            setattr(whole, name, made)
        self.register_state_dict_post_hook(_join)  # type: ignore[no-untyped-call]

    def whole(self) -> torch.Tensor:
        """The parameter, of what its tensors are now; it announces its uses if they do."""
        made = self.rebuild({name: self._inner(name) for name in self.names})
        tracked = tuple(each for each in self.parameters() if isinstance(each, TrackedParameter))
        if tracked:
            made.__class__ = announcing(self.kind)
            made.elixir_held = tracked  # type: ignore[attr-defined]
        return made

    def _inner(self, name: str) -> Any:
        inner = self._modules[name] if name in self._modules else self._parameters[name]
        return inner.whole() if isinstance(inner, InnerTensors) else inner

    def rebuild(self, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The parameter, of other tensors."""
        made: torch.Tensor = self.kind.__tensor_unflatten__(dict(inner), self.context, self.shape, self.strides)
        if not torch.compiler.is_dynamo_compiling():  # it cannot look into a tensor that it makes, and needs no mark
            vars(made)["_is_param"] = True  # as `nn.Parameter` marks tensors of other classes
        return made

    def give_back(self, whole: torch.Tensor) -> None:
        """Gives a parameter ordinary tensors again: those that are here now."""
        for name in self.names:
            inner = self._modules.get(name)
            if isinstance(inner, InnerTensors):
                inner.give_back(getattr(whole, name))
            else:
                setattr(whole, name, self._inner(name).data)

    def like(self, value: Any) -> bool:
        """Whether a value is of the same form, so that its tensors can be loaded."""
        return type(value) is self.kind and bool(value.__tensor_flatten__() == (list(self.names), self.context))


def _join(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert isinstance(module, InnerTensors)
    getattr(state, "_metadata", {}).pop(prefix[:-1], None)
    keys = [prefix + name for name in module.names]
    if prefix and all(key in state for key in keys):  # otherwise the state dict leaves out what is not trained
        state[prefix[:-1]] = module.rebuild({name: state.pop(prefix + name) for name in module.names})


def _replace_parameters(
    module: nn.Module, wholes: dict[str, nn.Parameter], made: dict[nn.Parameter, InnerTensors]
) -> Callable[[], None]:
    """Puts modules in place of parameters of a module; returns what puts these back."""
    kind, order = type(module), tuple(module._parameters)
    for name, whole in wholes.items():
        del module._parameters[name]
        module._modules[name] = made[whole]
    reads = {name: property(partial(_read, name)) for name in wholes}
    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    module.__class__ = type(kind.__name__, (kind,), same | reads)
    handles = [module.register_load_state_dict_pre_hook(_separate)]
    if len(order) > 1:
        handles.append(module.register_state_dict_post_hook(partial(_in_order, order)))

    def end() -> None:
        for handle in handles:
            handle.remove()
        module.__class__ = kind
        for name, whole in wholes.items():
            del module._modules[name]
            made[whole].give_back(whole)
            module._parameters[name] = whole
        for name in order:
            if name in module._parameters:
                module._parameters[name] = module._parameters.pop(name)

    return end


def _read(name: str, module: nn.Module) -> torch.Tensor:
    inner = module._modules[name]
    assert isinstance(inner, InnerTensors)
    return inner.whole()


def _in_order(own: tuple[str, ...], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Puts parameters before what follows them in the state dict of an ordinary module."""
    first = [prefix + name for name in own]
    for key in (*first, *[key for key in state if key.startswith(prefix) and key not in first]):
        if key in state:
            state[key] = state.pop(key)


def _separate(module: nn.Module, state: Any, prefix: str, metadata: Any, strict: bool, *found: list[str]) -> None:
    for name, inner in module._modules.items():
        if isinstance(inner, InnerTensors) and prefix + name in state:
            value = state.pop(prefix + name)
            if inner.like(value):
                state.update(flat(prefix + name, value))
            else:
                found[2].append(f"{prefix}{name} is a {inner.kind.__name__} of another form than the value to load")


def unwrap_subclasses(model: nn.Module) -> Callable[[], None]:
    """Takes frozen parameters of a model apart that hold other tensors; returns what puts them together again.

    The parameters are the same objects afterwards, with the values that their tensors have then. Parameters that are
    apart already are left to the caller that took them apart.
    """
    made: dict[nn.Parameter, InnerTensors] = {}
    with contextlib.ExitStack() as undone:
        for module in list(model.modules()):
            own = module._parameters.items()
            wholes = {name: each for name, each in own if each is not None and not each.requires_grad}
            wholes = {name: each for name, each in wholes.items() if holds_others(each)}
            made |= {each: InnerTensors(each) for each in wholes.values() if each not in made}
            if wholes:
                undone.callback(_replace_parameters(module, wholes, made))
        return undone.pop_all().close


@contextlib.contextmanager
def unwrapped_subclasses(model: object) -> Iterator[None]:
    """Takes parameters apart meanwhile; see `unwrap_subclasses`. Anything but a module is left to others to refuse."""
    with contextlib.ExitStack() as undone:
        if isinstance(model, nn.Module):
            undone.callback(unwrap_subclasses(model))
        yield


PACKED_CLASSES = frozenset({"Params4bit"})
"""Classes of parameters that may hold packed numbers."""


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are packed numbers, which have a meaning only with its companions."""
    return isinstance(tensor, InnerTensor) or vars(tensor).get("quant_state") is not None


def companions(parameter: torch.Tensor) -> Iterator[tuple[str, Any, str]]:
    """Yields where the tensors are that unpack a weight; nothing for an ordinary one.

    Each has a name, that of bitsandbytes' own files, such as ``absmax``; that of the table has the kind as well. It
    comes with the object that holds the tensor, and the name of the attribute.
    """
    state = vars(parameter).get("quant_state")
    if state is None:
        return
    inner = getattr(state, "state2", None)  # of double quantisation: the scales are quantised, too
    # A kernel goes by the name of the kind, so numbers of another kind must not be loaded.
    places = [
        ("absmax", state, "absmax"),
        (f"quant_map.{state.quant_type}", state, "code"),
        ("nested_offset", state, "offset"),
        ("nested_absmax", inner, "absmax"),
        ("nested_quant_map", inner, "code"),
    ]
    for name, holder, key in places:
        if isinstance(getattr(holder, key, None), torch.Tensor):
            yield name, holder, key


_SAVED_STATE = ".quant_state.bitsandbytes__"
"""In the names of bitsandbytes' files it comes between a weight and the kind; the tensor is JSON."""


class SavedByBitsandbytes(Mapping[str, torch.Tensor]):
    """The tensors of bitsandbytes' files, by the names of `companions`. Values are read on access, but for small ones.

    Args:
        saved: by their own names.
    """

    def __init__(self, saved: Mapping[str, torch.Tensor]) -> None:
        self._read: dict[str, Callable[[], torch.Tensor]] = {name: partial(saved.__getitem__, name) for name in saved}
        self.forms: dict[str, dict[str, Any]] = {}
        """Name of each packed weight -> what its file says of it: kind, shape, sizes of blocks."""
        for name in saved:
            weight, mark, kind = name.partition(_SAVED_STATE)
            if not mark:
                continue
            del self._read[name]
            self.forms[weight] = form = json.loads(bytes(saved[name].tolist()))
            if f"{weight}.quant_map" in self._read:
                self._read[f"{weight}.quant_map.{kind}"] = self._read.pop(f"{weight}.quant_map")
            if "nested_offset" in form:
                offset = float(form["nested_offset"])
                self._read[f"{weight}.nested_offset"] = partial(torch.tensor, offset, device="cpu")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def by_companions(saved: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The tensors of files by the names of `companions`; itself if bitsandbytes has not written them."""
    return SavedByBitsandbytes(saved) if any(_SAVED_STATE in name for name in saved) else saved


def refuse_other_form(name: str, weight: torch.Tensor, saved_as: str, saved: Mapping[str, torch.Tensor]) -> None:
    """Refuses to load a weight that is packed otherwise than that of the model, or without what unpacks it.

    Args:
        name: the weight's in the model.
        weight: the model's.
        saved_as: the name of its new values.
        saved: the new values.

    Raises:
        InputError: the forms differ.
    """
    form = saved.forms.get(saved_as, {}) if isinstance(saved, SavedByBitsandbytes) else {}
    state = vars(weight).get("quant_state")
    own = {} if state is None else {"quant_type": state.quant_type, "blocksize": state.blocksize}
    if state is not None and form:
        inner = getattr(state, "state2", None)
        own |= {"shape": list(state.shape), "nested_blocksize": getattr(inner, "blocksize", None)}
    if form and {key: form.get(key) for key in own or form} != own:
        raise InputError(
            f"{saved_as} was packed by bitsandbytes as {form}, and {name} of the model is {own or 'not packed'}; load "
            "the model with the quantization_config of the files"
        )
    lacking = [name for own, *_ in companions(weight) if (name := f"{saved_as}.{own}") not in saved]
    if lacking:
        raise InputError(
            f"the weights given have packed numbers of {name} without what unpacks them ({few(lacking)}); give all of "
            "them, or leave the weight out"
        )


def packed_for_cpu(tensor: torch.Tensor) -> bool:
    """Whether an evaluation on a CPU with AVX512-BF16 has put the numbers in its kernel's own order."""
    return bool(getattr(vars(tensor).get("quant_state"), "packing_format_for_cpu", False))


def ready_to_move(model: nn.Module) -> Callable[[], None]:
    """Takes parameters apart that hold tensors, and keeps evaluations from reordering packed numbers.

    bitsandbytes would replace ``weight.data`` and the scales in the first evaluation on a CPU with AVX512-BF16.

    Returns:
        What ends both.
    """
    undone = contextlib.ExitStack()
    undone.callback(unwrap_subclasses(model))
    for module in model.modules():
        if vars(module).get("support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
            undone.callback(setattr, module, "support_avx512bf16_for_cpu", True)
    return undone.close
