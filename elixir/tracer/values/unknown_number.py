"""Numbers that a trace does not have, and the errors of code that decides by one.

`loss.item()` follows from weights, which a trace does not have. It gives a number that can be added up and printed, as
a log line does, but raises once something compares it, converts it to bool or takes it for a size.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from elixir.errors import TraceError

_OUR_FOLDERS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


_ARITHMETIC = frozenset(
    "add sub mul pow mod sym_max sym_min float_pow int_floordiv floordiv pow_by_natural neg abs truediv float_truediv "
    "int_truediv".split()
)
_ANSWERS = {"has_hint": False, "is_constant": False, "is_nested_int": False, "is_symbolic": True, "maybe_as_int": None}
_KINDS = {"is_int": int, "is_float": float, "is_bool": bool}


class UnknownNumber:
    """Node of a `torch.SymInt/SymFloat/SymBool` whose value nobody knows: arithmetic goes on, decisions raise."""

    def __init__(self, kind: type, text: str = "unknown") -> None:
        self.kind = kind
        self._text = text

    def _graph_repr(self) -> str:
        return self._text

    __str__ = __repr__ = _graph_repr

    def wrap_int(self, value: float) -> UnknownNumber:
        """A known operand next to this one, of any kind."""
        return UnknownNumber(type(value), repr(value))

    wrap_float = wrap_bool = wrap_int

    def sym_float(self) -> UnknownNumber:
        """The same number as a float."""
        return UnknownNumber(float, self._text)

    def round(self, digits: int | None = None) -> UnknownNumber:
        """Rounded, which a log line may want."""
        return UnknownNumber(int if digits is None else self.kind)

    def __getattr__(self, name: str) -> Any:
        if name == "str":
            return self._graph_repr
        if name.startswith("__") or name == "_sympy_":
            raise AttributeError(name)

        def answer(*others: Any) -> Any:
            if name in _KINDS:
                return self.kind is _KINDS[name]
            if name in _ANSWERS:
                return _ANSWERS[name]
            if name in _ARITHMETIC:
                floats = "truediv" in name or any(each.kind is float for each in (self, *others))
                return UnknownNumber(float if floats else self.kind)
            raise unconvertible() if name in ("guard_float", "trunc") else undecidable("a number")

        return answer


def _printable_kind(base: type) -> type:
    """A class of numbers that can be put into a log line, ``f"{loss.item():.3f}"``, as can what is computed of them."""

    def staying(name: str) -> Callable[..., Any]:
        return lambda self, *others: printable(getattr(base, name)(self, *others))

    names = "add sub mul truediv floordiv mod pow neg pos abs sym_float sym_int".split()
    methods = [method for name in names for method in (f"__{name}__", f"__r{name}__") if hasattr(base, method)]
    return type(f"Unknown{base.__name__}", (base,), {each: staying(each) for each in methods} | {"__format__": _format})


def _format(number: Any, spec: str) -> str:
    return str(number)


def printable(number: Any) -> Any:
    """The same number, so that a log line can format it if nobody knows it; PyTorch hands it out in a special class."""
    kind = _PRINTABLE.get(type(number))
    if kind is not None:
        number.__class__ = kind
    return number


_PRINTABLE: dict[type, type] = {base: _printable_kind(base) for base in (torch.SymInt, torch.SymFloat)}


def unknown_number(tensor: torch.Tensor) -> Any:
    """The number that `.item()` of a tensor without known values gives."""
    if tensor.dtype is torch.bool:
        return torch.SymBool(UnknownNumber(bool))
    if tensor.is_floating_point():
        return torch.SymFloat(UnknownNumber(float))
    return torch.SymInt(UnknownNumber(int))


def undecidable(what: str) -> TraceError:
    """The error for control flow that depends on values the trace does not have."""
    return TraceError(
        f"{user_location()}: the code decides by {what} that follows from weights or activations, which a trace does "
        "not have. Make the decision depend on shapes or on the inputs, or leave it out of step_fn: that is run for "
        "planning only, and the training loop may keep its checks"
    )


def unconvertible() -> TraceError:
    """The error for ``float(loss)``, which Python wants to be a float: one that stands for an unknown number would be
    compared as any other."""
    return TraceError(
        f"{user_location()}: float(), int() or math wants a number that follows from weights or activations, which a "
        "trace does not have. Write loss.item() or loss.detach() to record it, torch.isfinite(loss) to check it, or "
        "leave it out of step_fn"
    )


def user_location() -> str:
    """``file:line`` of the innermost frame that is neither ours, nor PyTorch's, nor Python's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown location"


def raised_in(error: BaseException) -> str:
    """``file:line`` of the innermost such frame through which an error came; empty if there is none."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    places = [f"{file}:{line}" for file, line in frames if is_user_code(file)]
    return places[-1] if places else ""


def is_user_code(filename: str) -> bool:
    """Whether a source file is neither ours, nor PyTorch's, nor of Python's own library."""
    if filename.startswith((*_OUR_FOLDERS, "<")):
        return False
    return not filename.startswith(_STANDARD_LIBRARY) or "site-packages" in filename
