"""Objects of the user's that a traced step may change, put back after it.

A step appends losses to lists, counts tokens and keeps tensors in attributes of its model. In a trace it does so with
numbers that nobody has and with a batch that nobody trains. So what it can reach is afterwards as it was before: from
the model, the step function and the batch, through containers, attributes of objects, closures and defaults of
functions, and containers that the step function itself names. Tensors are copied once something writes to them.

Not looked at are the entries of containers that hold a thousand or more, other names of modules and attributes of
classes, slots, caches of functions and arrays of NumPy, nor most objects of Python's own library (locks, queues,
threads) and of PyTorch, nor data sets and loaders.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import operator
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from elixir.tracer.values.unknown_number import is_user_code

logger = logging.getLogger(__name__)

MOST_ENTRIES = 1_000_000
"""Limit on entries that are looked into, about 50 ns each."""

ENTRIES_OF_OBJECT = 20
"""Entries as which one object counts: looking at it takes 8 us."""

MANY_ENTRIES = 1_000
"""Entries from which a container counts as data: it is put back, but a list of samples, each with its tokens, is not
looked into."""

_VALUES = frozenset(
    (int, float, complex, str, bytes, bool, type(None), torch.Tensor, nn.Parameter, torch.dtype, torch.device,
     torch.Size, type, types.ModuleType, types.CodeType, range, slice)
)  # fmt: skip
"""Types whose values cannot change, or whose changes are seen elsewhere."""
_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "pandas", "pyarrow", "datasets"}
_LEFT_ALONE = (torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.Tensor, type, types.ModuleType)
_OF_THREADS = (type(threading.Lock()), type(threading.RLock()), threading.Thread, threading.Condition, threading.Event)
_PLAIN_MODULES = ("argparse", "collections", "types", "torch.optim")
"""Modules of `_LIBRARIES` whose objects hold what the user gives them, and counts, such as schedulers."""
_TRIES = 3
"""A call of `uninterrupted` that fails as often is given up, so that the others are still made."""

_CONTAINERS: dict[Any, Callable[[Any, Any], None]] = {
    collections.OrderedDict: collections.OrderedDict.update,
    dict: dict.update,
    list: list.extend,
    set: set.update,
    collections.deque: collections.deque.extend,
}
"""Class of containers -> how an empty one is filled."""
_STATES: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]], ...] = (
    (types.CellType, lambda cell: cell.cell_contents, lambda cell, held: setattr(cell, "cell_contents", held)),
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.RandomState, lambda found: found.get_state(), lambda found, state: found.set_state(state)),
    (np.random.BitGenerator, lambda found: found.state, lambda found, state: setattr(found, "state", state)),
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
)
"""Class of objects that hold one thing, such as random generators -> how that is read and set."""
_REACHED: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    ((tuple, frozenset), lambda held: held if len(held) < MANY_ENTRIES else ()),
    (
        types.FunctionType,
        lambda made: (*(made.__closure__ or ()), made.__defaults__, made.__kwdefaults__, vars(made)),
    ),
    (types.MethodType, lambda method: (method.__func__, method.__self__)),
    (types.BuiltinFunctionType, lambda method: (method.__self__,)),  # a list's append
    (functools.partial, lambda call: (call.func, call.args, call.keywords)),
    (np.random.Generator, lambda generator: (generator.bit_generator,)),
)
"""Class of objects that stay as they are -> what is reached through them."""


@contextlib.contextmanager
def user_objects_restored(*roots: Any, writes_unseen: bool = False) -> Iterator[UserObjects]:
    """While open, a step may change what it reaches.

    Args:
        roots: the model, the step function, and whatever else the step is given.
        writes_unseen: no operator is observed, so all tensors but parameters are copied now.

    Yields:
        What was found; it has to know of each tensor with values before something writes to it.
    """
    found = UserObjects(writes_unseen)
    found.remember((*roots, *(_named_in(root) for root in roots if isinstance(root, types.FunctionType))))
    try:
        yield found
    finally:
        found.restore()


def _named_in(function: types.FunctionType) -> list[Any]:
    """Containers that a function reaches by a global name."""
    found = (function.__globals__.get(name) for name in function.__code__.co_names)
    return [value for value in found if isinstance(value, tuple(_CONTAINERS))]


def uninterrupted(calls: list[Callable[[], object]]) -> None:
    """Makes all calls; one that raises, as handlers of signals do at any line (Ctrl-C), is made again, and the first
    exception is raised afterwards."""
    raised: BaseException | None = None
    tries = 0
    while calls:
        try:
            calls[0]()
            del calls[0]
            tries = 0
        except BaseException as error:
            raised = error if raised is None else raised
            tries += 1
            if tries == _TRIES:
                del calls[0]
                tries = 0
    if raised is not None:
        raise raised


class UserObjects:
    """Remembers what containers, objects and cells hold, and tensors before their first write."""

    def __init__(self, writes_unseen: bool = False) -> None:
        self._writes_unseen = writes_unseen
        self._copies: dict[int, tuple[weakref.ref[torch.UntypedStorage], torch.UntypedStorage]] = {}
        self._seen: dict[int, Any] = {}
        self._ahead: collections.deque[Any] = collections.deque()
        self._entries = 0
        self._containers: list[tuple[Any, Any, Any]] = []
        """The class that fills it, the container, and what it held."""
        self._empty: list[dict[Any, Any]] = []
        """Dicts of modules that held nothing, which most of them are."""
        self._states: list[Callable[[], Any]] = []

    def remember(self, roots: Iterable[Any]) -> None:
        """Looks at all that can be reached."""
        self._push(roots)
        while self._ahead:
            item = self._ahead.popleft()
            if self._entries > MOST_ENTRIES:
                logger.warning(
                    "the step reaches more objects than are looked into, so its trace may change a %s or its like; "
                    "hold samples in a torch.utils.data.Dataset, which is not looked into",
                    type(item).__name__,
                )
                return
            # A proxy may raise anything when it is asked for its class; nothing that a step changes is lost by it.
            with contextlib.suppress(Exception):
                self._look_at(item)

    def before_write(self, *tensors: torch.Tensor | None) -> None:
        """Copies those of `tensors` with values, to which something is about to write."""
        for tensor in tensors:
            if tensor is not None and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._copies:
                    gone = functools.partial(self._forget, key)
                    self._copies[key] = (weakref.ref(storage, gone), storage.clone())

    def _forget(self, key: int, _: Any) -> None:
        self._copies.pop(key, None)

    def _restore_tensors(self) -> None:
        """Gives tensors that still exist their values back."""
        for storage, copy in [(ref(), copy) for ref, copy in self._copies.values()]:
            if storage is not None and storage.nbytes() == copy.nbytes():
                storage.copy_(copy)
        self._copies.clear()

    def restore(self) -> None:
        """Puts changed values back."""
        changed = [each for each in self._containers if not _same(*each)]
        back = [functools.partial(_put_back, *each) for each in changed]
        uninterrupted([self._restore_tensors, *(each.clear for each in self._empty if each), *back, *self._states])

    def _push(self, items: Iterable[Any]) -> None:
        for item in items:
            kind = type(item)
            if kind not in _VALUES:
                self._ahead.append(item)
            elif self._writes_unseen and kind is torch.Tensor:
                self.before_write(item)

    def _look_at(self, item: Any) -> None:
        if id(item) in self._seen:
            return
        self._seen[id(item)] = item
        self._entries += ENTRIES_OF_OBJECT
        if isinstance(item, nn.Module):
            self._module(item)
        elif isinstance(item, tuple(_CONTAINERS)):
            self._container(item)
        elif not isinstance(item, _LEFT_ALONE):
            for kind, reached in _REACHED:
                if isinstance(item, kind):
                    self._push(reached(item))
                    return
            for kind, read, write in _STATES:
                if isinstance(item, kind):
                    before = read(item)  # an empty cell raises, and stays as it is
                    self._states.append(functools.partial(write, item, before))
                    self._push((before,))
                    return
            self._object(item)

    def _container(self, held: Any) -> None:
        kind = next(kind for kind in _CONTAINERS if isinstance(held, kind))
        is_dict = issubclass(kind, dict)
        before = dict(kind.items(held)) if is_dict else kind(held)
        self._containers.append((kind, held, before))
        if len(before) < MANY_ENTRIES:
            self._entries += len(before)
            self._push(before.values() if is_dict else before)
        if hasattr(held, "__dict__"):
            self._push((vars(held),))

    def _module(self, module: nn.Module) -> None:
        """Remembers a module's attributes, and its dicts of weights, parts and hooks, which are most of them, at
        once."""
        held = vars(module)
        self._containers.append((dict, held, held.copy()))
        for value in held.values():
            kind = type(value)
            if kind is not dict and kind is not collections.OrderedDict:
                if kind not in _VALUES or self._writes_unseen:
                    self._push((value,))
                continue
            self._seen[id(value)] = value
            if value:
                self._containers.append((kind, value, value.copy()))
                self._push(value.values())
            else:
                self._empty.append(value)

    def _object(self, item: Any) -> None:
        kind: Any = type(item)
        held = getattr(item, "__dict__", None)
        if not isinstance(held, dict) or not _is_looked_into(kind):
            return
        if _is_of_user(kind) or not any(isinstance(value, _OF_THREADS) for value in held.values()):
            self._push((held,))  # otherwise other threads may change it meanwhile, and that must not be undone


def _put_back(kind: Any, held: Any, before: Any) -> None:
    """Gives a container of this kind its contents again."""
    kind.clear(held)
    _CONTAINERS[kind](held, before)


def _same(kind: Any, held: Any, before: Any) -> bool:
    """Whether a container of this kind holds the very same objects, in the same order."""
    if len(held) != len(before):
        return False
    if kind is set:
        return {id(item) for item in held} == {id(item) for item in before}
    if isinstance(before, dict):
        keys = all(map(operator.is_, kind.keys(held), before))
        return keys and all(map(operator.is_, kind.values(held), before.values()))
    return all(map(operator.is_, held, before))


@functools.lru_cache(maxsize=4096)
def _is_looked_into(kind: type) -> bool:
    """Whether instances of a class are: those of libraries that have threads and handles are not."""
    library = kind.__module__.partition(".")[0]
    if library == "elixir":
        return kind.__module__.startswith("elixir.integrations.")
    return library not in _LIBRARIES or kind.__module__.startswith(_PLAIN_MODULES)


def _is_of_user(kind: type) -> bool:
    """Whether a class is the user's and not that of an installed package."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None:  # a notebook has none
        return kind.__module__ == "__main__"
    return is_user_code(file) and "site-packages" not in file and "dist-packages" not in file
