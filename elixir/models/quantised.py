"""Weights quantised by libraries: which tensors they are, and which others they need.

bitsandbytes' `Params4bit` is a parameter whose numbers are packed, two to a byte, into a tensor of any dtype. What
unpacks them hangs on the parameter (`quant_state`), where neither `named_parameters` nor `named_buffers` sees it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir.errors import InputError, few
from elixir.models.inner_tensors import InnerTensor, unwrap_subclasses

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
    put_together = unwrap_subclasses(model)
    layers = [module for module in model.modules() if vars(module).get("support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]

    def end() -> None:
        for layer in layers:
            layer.support_avx512bf16_for_cpu = True  # type: ignore[assignment]
        put_together()

    return end
