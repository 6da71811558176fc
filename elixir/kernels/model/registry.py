"""The choice of a kernel for each kind of operation: the first of a list that is present, looked up once.

A kind is an operation that models write out in several operators and that a library or PyTorch does in one. Providers
of it are listed in order of preference; `choose` takes the first that can be loaded and has been made for the device.
`plain` is the model's own code. To choose another provider, name it:

* ``use_fused_kernels={"rms_norm": "liger", "cross_entropy": "plain"}``;
* ``ELIXIR_FUSED_KERNELS="rms_norm=torch,rotary=plain"`` in the environment, which overrides the argument if
  fused kernels are on; ``0`` switches all of them off.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elixir.errors import InputError, InputTypeError, unknown_name
from elixir.kernels.model import libraries
from elixir.kernels.model.fused_ops import rms_norm, silu_mul, torch_rms_norm
from elixir.kernels.model.linear_cross_entropy import linear_cross_entropy

logger = logging.getLogger(__name__)

ENVIRONMENT = "ELIXIR_FUSED_KERNELS"
PLAIN = "plain"
"""The provider that leaves the model's own code in place."""

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Provider:
    """One way to run a kind of operation."""

    name: str
    load: Callable[[], Kernel] | None
    """Gives the kernel, None for `PLAIN`; raises `libraries.Unavailable` where it cannot be used here."""
    device_types: tuple[str, ...] = ("cpu", "cuda")
    whole_block: bool = False
    """It takes a block's weights and does all of it, rather than the part between the projections."""


@dataclass(frozen=True)
class ChosenKernel:
    """The provider that runs a kind of operation on a device."""

    kind: str
    name: str
    kernel: Kernel | None
    """None for `PLAIN`."""
    whole_block: bool = False


_CUDA = ("cuda",)
_PLAIN = Provider(PLAIN, None)

# Best first. After `plain` come those that are only taken when asked for; docs/design/kernels.md says why for each.
_PROVIDERS: dict[str, tuple[Provider, ...]] = {
    "layer_norm": (
        _PLAIN,
        Provider("apex", libraries.apex_layer_norm, _CUDA),
        Provider("liger", libraries.liger_layer_norm, _CUDA),
    ),
    "rms_norm": (
        Provider("apex", libraries.apex_rms_norm, _CUDA),
        Provider("liger", libraries.liger_rms_norm, _CUDA),
        Provider("torch", lambda: torch_rms_norm, _CUDA),
        Provider("elixir", lambda: rms_norm),
        _PLAIN,
    ),
    "cross_entropy": (
        Provider("elixir", lambda: linear_cross_entropy),
        _PLAIN,
    ),
    "rotary": (
        Provider("liger", libraries.liger_rotary, _CUDA),
        _PLAIN,
    ),
    "swiglu": (
        Provider("liger", libraries.liger_swiglu, _CUDA),
        Provider("elixir", lambda: silu_mul),
        _PLAIN,
        Provider("xformers", libraries.xformers_swiglu, _CUDA, whole_block=True),
    ),
}

KINDS = tuple(_PROVIDERS)
"""All kinds, in the order in which they are reported."""

_loaded: dict[tuple[str, str], Kernel | None] = {}
_lock = threading.Lock()


def wishes(use_fused_kernels: bool | Mapping[str, str]) -> dict[str, str] | None:
    """Returns the provider that is wanted for each kind named; other kinds take the best. None: fused kernels are off.

    Args:
        use_fused_kernels: True, False, or providers by kind; the environment is read as well.

    Raises:
        InputError, InputTypeError: it names a kind or a provider that does not exist.
    """
    if isinstance(use_fused_kernels, Mapping):
        asked = dict(use_fused_kernels)
    elif isinstance(use_fused_kernels, bool):
        asked = {}
    else:
        found = type(use_fused_kernels).__name__  # type: ignore[unreachable]
        raise InputTypeError(f"use_fused_kernels is True, False or a dict of kinds to providers, got {found}")
    _check(asked)
    if not use_fused_kernels:
        return None
    text = os.environ.get(ENVIRONMENT, "").strip()
    if text == "0":
        return None
    if text not in ("", "1"):
        asked |= _parsed(text)
    return asked


def choose(kind: str, device_type: str, prefer: str | None = None) -> ChosenKernel:
    """The provider of `kind` on a device: the one preferred if it can be used, else the best that can.

    Args:
        kind: one of `KINDS`.
        device_type: ``cuda`` or ``cpu``: where the kernel will run, which need not be here.
        prefer: name of a provider; None for the best.

    Raises:
        InputError: there is no such kind, or no such provider of it.
    """
    _check({kind: prefer} if prefer is not None else {kind: PLAIN})
    candidates = _PROVIDERS[kind]
    if prefer is not None:
        wanted = [provider for provider in candidates if provider.name == prefer]
        candidates = (*wanted, *candidates)
    for provider in candidates:
        if provider.load is None:
            break
        kernel = _kernel(kind, provider.name, provider.load) if device_type in provider.device_types else None
        if kernel is not None:
            return ChosenKernel(kind, provider.name, kernel, provider.whole_block)
        if provider.name == prefer:
            logger.warning("%s cannot be run by %s on %s; the next best is taken", kind, prefer, device_type)
    return ChosenKernel(kind, PLAIN, None)


def _kernel(kind: str, name: str, load: Callable[[], Kernel]) -> Kernel | None:
    """Loads a provider once; None, and one line in the log, where that fails."""
    with _lock:
        key = (kind, name)
        if key not in _loaded:
            try:
                _loaded[key] = load()
            except libraries.Unavailable as reason:
                _loaded[key] = None
                if reason.first:
                    logger.info("%s is not used: %s", name, reason)
        return _loaded[key]


def _check(asked: Mapping[str, str]) -> None:
    for kind, name in asked.items():
        if not isinstance(kind, str) or not isinstance(name, str):
            raise InputTypeError(f"use_fused_kernels maps names of kinds to names of providers, got {kind!r}: {name!r}")
        if kind not in _PROVIDERS:
            raise unknown_name("kind of fused kernel", kind, KINDS)
        known = [provider.name for provider in _PROVIDERS[kind]]
        if name not in known:
            raise InputError(f"{name!r} provides no {kind}; choose one of {', '.join(known)}")


def _parsed(text: str) -> dict[str, str]:
    found = {}
    for part in text.split(","):
        kind, separator, name = (piece.strip() for piece in part.partition("="))
        if not separator:
            raise InputError(f"{ENVIRONMENT} is 0, 1 or kind=provider pairs between commas, got {text!r}")
        found[kind] = name
    _check(found)
    return found
