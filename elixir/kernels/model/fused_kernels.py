"""Fused kernels in a model somebody else wrote: its loss by ours, its layers by libraries that are installed.

``True`` takes the loss without all logits and, on CUDA, what is there of the other providers before ``plain``. A dict
names providers by kind, such as ``{"cross_entropy": "plain", "swiglu": "xformers"}``; the variable
``ELIXIR_FUSED_KERNELS`` overrides it: ``rms_norm=apex,swiglu=plain``, or ``0`` for none at all.

`ROWS` are the layers of libraries. Everything is put in per instance, and `remove` takes it off again: nothing of a
class or of a library stays changed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from importlib.machinery import PathFinder
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from elixir.access.interception import untrack
from elixir.errors import InputError, InputTypeError, unknown_name
from elixir.kernels.model.linear_cross_entropy import deferring_forward, deferring_layer, last_layer_of

# --- library layers --------------------------------------------------------------------------------------------------
# Layers of models by kernels of NVIDIA Apex (source build of 2025) and xformers (0.0.2x): a table, one row each.
#
# A module takes a kernel if its class computes what the kernel computes: its forward is run once on a few numbers, with
# stand-ins for what it holds. Gemma's norm, which multiplies by one plus its weight, is left alone that way.


class Row(NamedTuple):
    """One kernel of a library."""

    kind: str
    library: str
    modules: tuple[str, ...]
    """Files that are imported; the last has the function."""
    function: str
    fits: Callable[[Any], bool]
    """Whether a module computes what the kernel does."""
    arguments: Callable[[Any], Iterable[Any]]
    """The arguments of the kernel after the input, of a module."""


def forward_of(row: Row, module: nn.Module, kernel: Callable[..., Any]) -> Any:
    """A forward for the module that runs the kernel; None if it computes something else."""
    try:
        with torch.no_grad():
            if not row.fits(module):
                return None
    except Exception:  # stand-ins lack what other forwards need
        return None
    plain = type(module).forward

    @wraps(plain)
    def forward(self: Any, x: torch.Tensor) -> Any:
        if any(weight.dtype != x.dtype for weight in self.parameters()):  # families differ in that of the result
            return plain(self, x)
        return kernel(x, *(_present(each) if isinstance(each, nn.Parameter) else each for each in row.arguments(self)))

    return MethodType(forward, module)


def _present(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's present memory as an ordinary tensor that leads gradients to it, until the running module
    returns. A library's kernel is no torch function, and would not be seen reading a parameter that is elsewhere."""
    view = parameter.view_as(parameter)
    untrack([view])
    return view


def _numbers(*shape: int, seed: float) -> torch.Tensor:
    """Numbers without a pattern that a wrong formula could fit; no random generator is touched."""
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel(), device="cpu").square().mul(seed).sin().view(shape)


def _is_rms_norm(module: Any) -> bool:
    x, weight = _numbers(3, 4, seed=1.0), _numbers(4, seed=0.7)
    found = type(module).forward(SimpleNamespace(weight=weight, variance_epsilon=0.1), x)
    expected = weight * x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()
    return len(list(module.parameters())) == 1 and bool(torch.allclose(found, expected, rtol=1e-5, atol=1e-5))


def _is_layer_norm(module: Any) -> bool:
    return type(module) is nn.LayerNorm and module.bias is not None


def _is_swiglu(module: Any) -> bool:
    # The layers are not called, so what is more than a linear layer, or is listened to, would be left out.
    layers = [getattr(module, name) for name in _PROJECTIONS]
    if any(type(each) is not nn.Linear or each._forward_hooks or each._forward_pre_hooks for each in layers):
        return False
    x, (a, b, c) = _numbers(3, 4, seed=1.0), (_numbers(4, 4, seed=seed) for seed in (0.3, 0.5, 0.9))
    holds = dict(zip(_PROJECTIONS, (lambda y: y @ a, lambda y: y @ b, lambda y: y @ c), strict=True))
    found = type(module).forward(SimpleNamespace(**holds, act_fn=module.act_fn), x)
    return bool(torch.allclose(found, (nn.functional.silu(x @ a) * (x @ b)) @ c, rtol=1e-5, atol=1e-5))


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_NORMS = ("fused_layer_norm_cuda", "apex.normalization.fused_layer_norm")
"""The extension is imported first: Apex itself looks for it at the first call only."""
ROWS = (
    Row("rms_norm", "apex", _NORMS, "fused_rms_norm_affine", _is_rms_norm,
        lambda module: (module.weight, module.weight.shape, module.variance_epsilon)),
    Row("layer_norm", "apex", _NORMS, "fused_layer_norm_affine", _is_layer_norm,
        lambda module: (module.weight, module.bias, module.normalized_shape, module.eps)),
    Row("swiglu", "xformers", ("xformers.ops",), "swiglu", _is_swiglu,
        lambda module: (getattr(getattr(module, name), key) for name in _PROJECTIONS for key in ("weight", "bias"))),
)  # fmt: skip


# --- fused kernels ---------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

ENVIRONMENT = "ELIXIR_FUSED_KERNELS"
OURS, LIGER, PLAIN = "elixir", "liger", "plain"
"""Providers: this package, Liger-Kernel, and the model's own code."""
PROVIDERS = {
    "cross_entropy": (OURS, PLAIN),
    "layer_norm": (LIGER, PLAIN, "apex"),
    "rms_norm": (LIGER, "apex", PLAIN),
    "swiglu": (LIGER, PLAIN, "xformers"),
}
"""Kind -> who provides it. Without a wish those before `PLAIN` are taken, the first that is there."""
_LIGER_KINDS = {"geglu": "swiglu"}
"""Switches of Liger's patches that have another name than their kind."""
_GONE = (
    "Elixir's own norms, SwiGLU blocks and rotations are gone: install liger-kernel for CUDA; for its rotations, which "
    "change the class, call its apply_liger_kernel_to_... before wrapping"
)


def wishes(use_fused_kernels: bool | Mapping[str, str]) -> dict[str, str] | None:
    """Returns the provider that is wanted for each kind named. None: fused kernels are off.

    Raises:
        InputError, InputTypeError: it names a kind or a provider that does not exist.
    """
    if not isinstance(use_fused_kernels, (bool, Mapping)):
        found = type(use_fused_kernels).__name__  # type: ignore[unreachable]
        raise InputTypeError(f"use_fused_kernels is True, False or a dict of kinds to providers, got {found}")
    asked = dict(use_fused_kernels) if isinstance(use_fused_kernels, Mapping) else {}
    text = os.environ.get(ENVIRONMENT, "").strip()
    if use_fused_kernels and text not in ("", "0", "1"):
        pairs = (part.partition("=") for part in text.split(","))
        asked |= {kind.strip(): name.strip() for kind, _, name in pairs}
    for kind, name in asked.items():
        if kind == "rotary":
            raise InputError(f"use_fused_kernels has no rotary any more. {_GONE}")
        if kind not in PROVIDERS:
            raise unknown_name("kind of fused kernel", str(kind), PROVIDERS)
        if name not in PROVIDERS[kind]:
            raise InputError(f"{name!r} provides no {kind}; choose one of {', '.join(PROVIDERS[kind])}. {_GONE}")
    return None if not use_fused_kernels or text == "0" else asked


class FusedKernels:
    """The fused kernels in one model, until `remove`.

    Args:
        model: its modules get new forwards where a kernel is taken for them.
        use_fused_kernels: True for the best present; providers by kind to choose; False for nothing at all.
        device_type: where the model will run: ``cuda`` or ``cpu``.
        traced: whether a trace runs the model on meta, where no library's kernels run. It counts the model's own
            layers, which keep more.

    Raises:
        InputError, InputTypeError: a kind or provider is asked for that does not exist.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> fused = FusedKernels(model, True, "cpu")
        >>> str(fused)
        'no fused kernels'
        >>> fused.remove()
    """

    def __init__(
        self,
        model: nn.Module,
        use_fused_kernels: bool | Mapping[str, str],
        device_type: str,
        *,
        traced: bool = False,
    ) -> None:
        self._replaced: list[tuple[nn.Module, str, Any]] = []
        self.counts: dict[str, tuple[str, int]] = {}
        """Kind -> its provider and the number of modules; only kinds that some module has. Those of Liger-Kernel are
        together ``layers``."""
        asked = wishes(use_fused_kernels)
        if asked is None:
            return
        tried = {kind: names[: names.index(PLAIN)] for kind, names in PROVIDERS.items()}
        tried |= {kind: (name,) for kind, name in asked.items()}
        if OURS in tried["cross_entropy"]:
            self._count("cross_entropy", OURS, sum(map(self._defer, list(model.modules()))))
        if traced:
            return
        ran: set[str] = set()
        if device_type == "cuda":
            ran |= self._apply_liger(model, {kind for kind, names in tried.items() if LIGER in names})
            for row in ROWS:
                if row.library in tried[row.kind]:
                    self._count(row.kind, row.library, self._put_in(model, row))
            ran |= self.counts.keys()
        for kind, name in asked.items():
            if name not in (OURS, PLAIN) and kind not in ran:
                logger.warning("%s is not run by %s here; the model's own code is", kind, name)

    def remove(self, down_to: int = 0) -> None:
        """Gives every module its own code back."""
        while len(self._replaced) > down_to:
            module, name, value = self._replaced.pop()
            if vars(module).get(name, self) is value:  # another forward may have replaced this one
                delattr(module, name)

    def __str__(self) -> str:
        parts = (
            f"{kind} by {name} in {count} module{'s' * (count > 1)}" for kind, (name, count) in self.counts.items()
        )
        return "fused kernels: " + ", ".join(parts) if self.counts else "no fused kernels"

    def _count(self, kind: str, provider: str, count: int) -> None:
        if count:
            self.counts[kind] = (provider, count)

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        setattr(module, name, value)
        self._replaced.append((module, name, value))

    def _defer(self, model: nn.Module) -> bool:
        """Lets a language model go without logits, if it is one."""
        layer = last_layer_of(model)
        if layer is None:
            return False
        self._set(layer, "forward", deferring_layer(layer))
        self._set(model, "forward", deferring_forward(model))
        return True

    def _put_in(self, model: nn.Module, row: Row) -> int:
        """Gives the modules that a row fits the forward of that row; returns their number."""
        count = 0
        if (kernel := _loaded(row.modules, row.function)) is not None:
            for module in model.modules():
                if "forward" not in vars(module) and (forward := forward_of(row, module, kernel)) is not None:
                    self._set(module, "forward", forward)
                    count += 1
        return count

    def _apply_liger(self, model: nn.Module, kinds: set[str]) -> set[str]:
        """Calls Liger-Kernel's own ``apply_liger_kernel_to_...`` for each transformers model in `model`.

        It gives modules new attributes, which are noted, and changes names in the files of their classes, which are put
        back: other models keep their code.

        Returns:
            The kinds that it has for these models.
        """
        patches: dict[Any, Any] = {}
        if kinds:
            patches = _loaded(("liger_kernel.transformers.monkey_patch",), "MODEL_TYPE_TO_APPLY_LIGER_FN") or {}
        first, done, ran = len(self._replaced), set[nn.Module](), set[str]()
        for part in model.modules():
            # Layers, too, have a `config`; whole models alone have this name.
            if part in done or not hasattr(part, "base_model_prefix"):
                continue
            done.update(part.modules())
            apply = patches.get(getattr(part.config, "model_type", None))
            if apply is None:
                continue
            known, noted = inspect.signature(apply).parameters, len(self._replaced)
            # Whatever else it offers is not asked for, such as its rotary embedding, which would change the class.
            switches = [name for name, each in known.items() if isinstance(each.default, bool)]
            chosen = {name: _LIGER_KINDS.get(name, name) in kinds for name in switches}
            before = [(module, dict(vars(module))) for module in part.modules()]
            files = {name: dict(vars(sys.modules[name])) for name in {type(module).__module__ for module, _ in before}}
            failed: Exception | None = None
            try:
                apply(model=part, **chosen)
            except Exception as error:
                failed = error
            finally:
                for name, names in files.items():
                    vars(sys.modules[name]).update(names)
                for module, attributes in before:
                    for name in vars(module).keys() - attributes:
                        # Its norms would write over gradients of outputs, which hooks may still read.
                        self._set(module, name, name != "in_place" and vars(module)[name])
            if failed is None:
                ran |= {_LIGER_KINDS.get(name, name) for name, wanted in chosen.items() if wanted}
            else:
                self.remove(noted)
                logger.warning("liger-kernel failed, and is not used for %s: %s", type(part).__name__, failed)
        self._count("layers", LIGER, [name for _, name, _ in self._replaced[first:]].count("forward"))
        return ran


def _loaded(modules: tuple[str, ...], name: str) -> Any:
    """An object of the last of some modules of a library; None, and a line in the log, whatever their import raises."""
    library, inside = modules[-1].split(".")[:2]
    try:
        folders = getattr(importlib.util.find_spec(library), "submodule_search_locations", None)
        # Another project may have the name, as apex on the package index has; its code is not run.
        if not folders or PathFinder.find_spec(f"{library}.{inside}", folders) is None:
            raise ImportError("it is not installed, or another package of this name is")
        return getattr([importlib.import_module(each) for each in modules][-1], name)
    except Exception as error:
        logger.info("%s is not used: %s", library, error)
        return None
