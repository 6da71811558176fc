"""Functions in a copy of a model that hold the model, made anew so that they hold the copy.

`copy.deepcopy` leaves functions and weak references as they are. A lambda over ``self``, a forward that wraps another,
or a hook would then run the model itself where its copy is traced.
"""

from __future__ import annotations

import collections
import copy
import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

MOST_OBJECTS = 10_000
"""Objects that are looked at to find out whether a function holds the model; one that holds more is left as it is."""

_MISSING: Any = object()
_KEPT = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, weakref.ref, tuple)
"""Values that a copy may have in common with its original."""
_PLAIN = (str, bytes, int, float, complex, type(None), type, types.ModuleType, torch.Tensor)


def deep_copied(item: Any, memo: dict[int, Any]) -> Any:
    """A deep copy whose functions hold the copies.

    Args:
        item: is copied.
        memo: of `copy.deepcopy`: copies by the `id` of each original; it may have some already.
    """
    made = copy.deepcopy(item, memo)
    _rebind_functions(memo)
    return made


def _rebind_functions(memo: dict[int, Any]) -> None:
    """Replaces, in everything that was copied, functions that hold what was copied."""
    copies = _CopiedFunctions(memo)
    for made in list(memo.values()):
        if isinstance(made, functools.partial):
            copies.rebind_partial(made)
            continue
        for held in (made, getattr(made, "__dict__", None)):
            if isinstance(held, dict):
                found: Iterator[tuple[Any, Any]] = iter(list(held.items()))
            elif isinstance(held, list):
                found = iter(list(enumerate(held)))
            else:
                continue
            for key, value in found:
                if isinstance(value, _KEPT) and copies.holds(value):
                    held[key] = copies.of(value)


class _CopiedFunctions:
    def __init__(self, memo: dict[int, Any]) -> None:
        self._copies = dict(memo)
        self._made = {id(made) for made in memo.values() if not isinstance(made, _KEPT)}
        self._cells: dict[int, types.CellType] = {}
        self._kept: list[Any] = []  # so that no `id` in the dict comes twice

    def holds(self, item: Any) -> bool:
        """Whether something that was copied can be reached from `item`, or `item` was copied."""
        try:
            return self._reaches(item)
        except Exception:  # a proxy may raise anything when it is asked for its class
            return False

    def _reaches(self, item: Any) -> bool:
        ahead, seen = [item], {id(item)}
        while ahead and len(seen) < MOST_OBJECTS:
            held = ahead.pop()
            if id(held) in self._copies:
                return True
            for inner in () if id(held) in self._made else _held_by(held):
                if id(inner) not in seen and (id(inner) in self._copies or not isinstance(inner, _PLAIN)):
                    seen.add(id(inner))
                    ahead.append(inner)
        return False

    def of(self, item: Any) -> Any:
        """`item`, or a new one that holds the copies."""
        known = self._copies.get(id(item), _MISSING)
        if known is not _MISSING:
            return known
        if isinstance(item, _PLAIN) or id(item) in self._made or not self.holds(item):
            return item
        self._kept.append(item)
        if isinstance(item, types.FunctionType):
            return self._function(item)
        if isinstance(item, types.MethodType):
            return types.MethodType(self.of(item.__func__), self.of(item.__self__))
        if isinstance(item, types.BuiltinFunctionType):  # a list's append
            return getattr(self.of(item.__self__), item.__name__)
        if isinstance(item, weakref.ref):
            return weakref.ref(self.of(item()))
        if isinstance(item, tuple):
            values = [self.of(value) for value in item]
            return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
        return self._object(item)

    def rebind_partial(self, made: functools.partial[Any]) -> None:
        """Replaces the contents of a partial function."""
        keywords = {name: self.of(value) for name, value in made.keywords.items()}
        args = tuple(self.of(value) for value in made.args)
        made.__setstate__((self.of(made.func), args, keywords, vars(made)))  # type: ignore[attr-defined]

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = [self._cell(cell) for cell in function.__closure__ or ()]
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, None, tuple(cells) or None
        )
        self._copies[id(function)] = made  # it may hold itself
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            if cell is not original:
                cell.cell_contents = self.of(original.cell_contents)
        functools.update_wrapper(made, function)
        made.__defaults__ = self.of(function.__defaults__)
        made.__kwdefaults__ = self.of(function.__kwdefaults__)
        vars(made).clear()
        vars(made).update({name: self.of(value) for name, value in vars(function).items()})
        return made

    def _cell(self, cell: types.CellType) -> types.CellType:
        """The same cell, which other functions may share, unless what it holds was copied."""
        if not any(self.holds(content) for content in _content(cell)):
            return cell
        return self._cells.setdefault(id(cell), types.CellType())

    def _object(self, item: Any) -> Any:
        try:
            made = copy.copy(item)
        except Exception:  # the object stays the model's, and is refused once it runs a weight
            return item
        self._copies[id(item)] = made
        if isinstance(made, dict):
            made.update({key: self.of(value) for key, value in item.items()})
        elif isinstance(made, (list, collections.deque)):
            for index, value in enumerate(item):
                made[index] = self.of(value)
        elif isinstance(made, functools.partial):
            self.rebind_partial(made)
        if isinstance(getattr(made, "__dict__", None), dict):
            vars(made).update({name: self.of(value) for name, value in vars(item).items()})
        return made


def _held_by(item: Any) -> Iterator[Any]:
    """Yields the objects that a function, a container or an object refers to."""
    if isinstance(item, types.FunctionType):
        for cell in item.__closure__ or ():
            yield from _content(cell)
        yield from (item.__defaults__ or (), item.__kwdefaults__ or {})
    elif isinstance(item, types.MethodType):
        yield from (item.__func__, item.__self__)
    elif isinstance(item, types.BuiltinFunctionType):
        yield item.__self__
    elif isinstance(item, functools.partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, weakref.ref):
        yield item()
    elif isinstance(item, dict):
        yield from list(item.values())
    elif isinstance(item, (list, tuple, collections.deque)):
        yield from item
    held = getattr(item, "__dict__", None)
    if isinstance(held, dict):
        yield from list(held.values())


def _content(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()
