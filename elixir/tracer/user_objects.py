"""Objects of the user's that a traced step may change, put back after it.

A step appends losses to lists, counts tokens and rebinds names. In a trace it does so with numbers that nobody has and
with a batch that nobody trains, so all that it can reach is afterwards as it was before. "Reach" means: closures and
globals of functions, attributes of objects, elements of containers. Most objects of Python's own library (locks,
queues, threads), of PyTorch and of NumPy are not looked into, nor are data sets and loaders. Tensors are copied once
something writes to them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import heapq
import itertools
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
"""Limit on remembered entries of containers, about 8 bytes and 50 ns each. The narrowest containers come first, so that
a list of samples, each with its tokens, does not keep a counter from being remembered."""

ENTRIES_OF_OBJECT = 20
"""Entries as which one object counts: looking at it takes 8 us."""

MANY_ENTRIES = 1_000
"""Entries from which a container counts as data, so that no warning is needed if it is not looked into."""

_MISSING: Any = object()
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_VALUES = frozenset(
    (int, float, complex, str, bytes, bool, type(None), torch.Tensor, nn.Parameter, torch.dtype, torch.device,
     torch.Size, types.ModuleType, types.CodeType, range, slice)
)  # fmt: skip
"""Types whose values cannot change, or whose changes are seen elsewhere."""
_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "pandas", "pyarrow", "datasets"}
_DATA = (torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.Tensor)
_OF_THREADS = (type(threading.Lock()), type(threading.RLock()), threading.Thread, threading.Condition, threading.Event)
_PLAIN_MODULES = ("argparse", "collections", "types", "torch.optim")
"""Modules of `_LIBRARIES` whose objects hold what the user gives them, and counts, such as schedulers."""
_OF_MODULES = frozenset(vars(nn.Module())) - {"training", "_buffers", "_modules"}
_CONTAINERS: dict[Any, Callable[[Any, Any], None]] = {
    collections.OrderedDict: collections.OrderedDict.update,
    dict: dict.update,
    list: list.extend,
    set: set.update,
    collections.deque: collections.deque.extend,
}
"""Class of containers -> how an empty one is filled."""
_WIDE: tuple[Any, ...] = (dict, list, set, collections.deque, tuple, frozenset)
_CACHED: Any = type(functools.cache(len))
_GENERATORS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]], ...] = (
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.RandomState, lambda found: found.get_state(), lambda found, state: found.set_state(state)),
    (np.random.BitGenerator, lambda found: found.state, lambda found, state: setattr(found, "state", state)),
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
)
"""Class of random generators -> how their state is read and set."""


@contextlib.contextmanager
def user_objects_restored(
    model: nn.Module, twin: nn.Module, *roots: Any, writes_unseen: bool = False
) -> Iterator[UserObjects]:
    """While open, a step may change what it reaches.

    Args:
        model: of the user's; its attributes are out of reach unless it is its own twin.
        twin: the model that the step is given.
        roots: the step function, and whatever else the step is given.
        writes_unseen: no operator is observed, so all tensors but parameters are copied now.

    Yields:
        What was found; it has to know of each tensor with values before something writes to it.
    """
    found = UserObjects(writes_unseen)
    if twin is not model:
        found.spare(model)
    for root in (*roots, model):
        found.push(root)
    found.remember()
    try:
        yield found
    finally:
        found.restore()


class _WrittenTensors:
    """Copies of tensors with values, made before their first write."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[torch.UntypedStorage], torch.UntypedStorage]] = {}

    def before(self, *tensors: torch.Tensor | None) -> None:
        """Copies `tensors`, to which something is about to write."""
        for tensor in tensors:
            if tensor is not None and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._copies:
                    gone = functools.partial(self._forget, key)
                    self._copies[key] = (weakref.ref(storage, gone), storage.clone())

    def _forget(self, key: int, _: Any) -> None:
        self._copies.pop(key, None)

    def restore(self) -> None:
        """Gives tensors that still exist their values back."""
        for storage, copy in [(ref(), copy) for ref, copy in self._copies.values()]:
            if storage is not None and storage.nbytes() == copy.nbytes():
                storage.copy_(copy)
        self._copies.clear()


class UserObjects:
    """Remembers what containers, objects, cells and names hold."""

    def __init__(self, writes_unseen: bool = False) -> None:
        self._writes_unseen = writes_unseen
        self._spared: list[nn.Module] = []
        self._written = _WrittenTensors()
        self.before_write = self._written.before
        """Is called with tensors that are about to be written to."""
        self._seen: dict[int, Any] = {}
        self._ahead: list[tuple[int, int, Any]] = []
        self._numbers = itertools.count()
        self._width = 0  # entries of the widest container on the way to the current object
        self._entries = 0
        self._restores: list[Callable[[], None]] = []

    def spare(self, model: nn.Module) -> None:
        """Leaves the attributes of a model alone, of which the step has a copy; its functions are not copied."""
        self._spared.append(model)
        for module in model.modules():
            self._seen[id(module)] = module
            self.push(type(module))
            for value in vars(module).values():
                if isinstance(value, _FUNCTIONS):
                    self.push(value)
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for hook in hooks.values():
                    self.push(hook)

    def push(self, item: Any, entries: int = 1) -> None:
        """Queues `item`, which is one of so many, to be looked at."""
        if self._writes_unseen and type(item) is torch.Tensor:
            self.before_write(item)
        elif type(item) not in _VALUES and id(item) not in self._seen:
            self._seen[id(item)] = item
            width = max(self._width, entries, _width_of(item))
            heapq.heappush(self._ahead, (width, next(self._numbers), item))

    def remember(self) -> None:
        """Looks at all that can be reached."""
        while self._ahead:
            self._width, _, item = heapq.heappop(self._ahead)
            if self._entries > MOST_ENTRIES:
                logger.log(
                    logging.INFO if self._width >= MANY_ENTRIES else logging.WARNING,
                    "the step reaches more objects than are looked into, so its trace may change a %s or its like; "
                    "hold samples in a torch.utils.data.Dataset, which is not looked into",
                    type(item).__name__,
                )
                return
            # A proxy may raise anything when it is asked for its class; nothing that a step changes is lost by it.
            with contextlib.suppress(Exception):
                self._look_at(item)

    def restore(self) -> None:
        """Puts changed values back."""
        self._written.restore()
        for restore in self._restores:
            try:
                restore()
            except Exception as error:  # a class may be closed to changes; the others are put back
                logger.warning("something that the trace has changed could not be put back: %s", error)

    def refusal_of(self, weight: torch.Tensor) -> str:
        """The reason why a tensor that needs a gradient cannot take part in a trace, and what to do."""
        for model in self._spared:
            for name, parameter in model.named_parameters():
                if parameter is weight:
                    return (
                        f"a copy of the model is traced, but this uses weight {name!r} of the model itself; run the "
                        "model that step_fn is given, and reach its parts by self, not by a global name"
                    )
        holder = next(self._holders_of(weight), None)
        if holder is None:
            return (
                "step_fn combines the traced model with a CPU tensor that needs a gradient and is no weight of that "
                "model; detach it, or make it on the input's device"
            )
        return (
            f"step_fn runs {holder}, a second model whose weights need gradients, but only the model it is given is "
            "traced and planned for; if the second one is not trained, freeze it with requires_grad_(False)"
        )

    def _holders_of(self, weight: torch.Tensor) -> Iterator[str]:
        """Names of the holders of a weight's module; an attribute of an object comes before the module itself."""
        for item in self._seen.values():
            for name, value in getattr(item, "__dict__", {}).items():
                if _has(value, weight):
                    owner = item if isinstance(item, type) else type(item)
                    yield f"{name!r} of the {owner.__name__}"
        for item in self._seen.values():
            if _has(item, weight):
                yield f"a {type(item).__name__}"

    def _look_at(self, item: Any) -> None:
        if isinstance(item, types.ModuleType):
            return  # a module that loads its names late is of another class; functions look up what they name
        if isinstance(item, (dict, list, set, collections.deque)):
            self._container(item)
        elif isinstance(item, (tuple, frozenset)):
            self._all(item)
        elif isinstance(item, types.FunctionType):
            self._function(item)
        elif isinstance(item, types.MethodType):
            self._all((item.__func__, item.__self__))
        elif isinstance(item, types.BuiltinFunctionType):
            self._all((item.__self__,))  # a list's append
        elif isinstance(item, functools.partial):
            self._all((item.func, item.args, item.keywords))
        elif isinstance(item, type):
            if _is_of_user(item.__module__):
                self._names(item)
            self._all(item.__bases__)
        elif isinstance(item, np.ndarray):
            self._array(item)
        elif isinstance(item, np.random.Generator):
            self.push(item.bit_generator)
        else:
            self._object(item)

    def _all(self, items: Iterable[Any], entries: int = 1) -> None:
        self._entries += entries
        for item in items:
            if type(item) not in _VALUES or type(item) is torch.Tensor:
                self.push(item, entries)
                if self._entries > MOST_ENTRIES:
                    return  # nothing more is visited; the warning names the object

    def _container(self, held: Any) -> None:
        kind, refill = next(found for found in _CONTAINERS.items() if isinstance(held, found[0]))
        is_dict = issubclass(kind, dict)
        before = dict(kind.items(held)) if is_dict else kind(held)

        def restore() -> None:
            if not _same(kind, held, before):
                kind.clear(held)
                refill(held, before)

        self._restores.append(restore)
        self._all(before.values() if is_dict else before, len(before))
        if hasattr(held, "__dict__"):
            self.push(vars(held))

    def _function(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._cell(cell)
        self._all((function.__defaults__ or (), function.__kwdefaults__ or {}, vars(function)))
        if _is_of_user(function.__module__):
            names = _names_in(function.__code__)
            self._globals(function.__globals__, names)
            for name in names:
                module = function.__globals__.get(name)
                if isinstance(module, types.ModuleType) and _is_of_user(module.__name__):
                    self._globals(vars(module), names)

    def _globals(self, held: dict[str, Any], names: tuple[str, ...]) -> None:
        before = {name: held.get(name, _MISSING) for name in names}

        def restore() -> None:
            for name, value in before.items():
                if value is _MISSING:
                    held.pop(name, None)
                elif held.get(name, _MISSING) is not value:
                    held[name] = value

        self._restores.append(restore)
        self._all(before.values())

    def _cell(self, cell: types.CellType) -> None:
        try:
            before = cell.cell_contents
        except ValueError:  # it is empty
            return

        def restore() -> None:
            cell.cell_contents = before

        self._restores.append(restore)
        self.push(before)

    def _names(self, owner: type) -> None:
        """Attributes of a class; what a descriptor such as a property does is not known."""
        before = {name: value for name, value in vars(owner).items() if not name.startswith("__")}

        def restore() -> None:
            for name in [name for name in vars(owner) if name not in before and not name.startswith("__")]:
                delattr(owner, name)
            for name, value in before.items():
                if vars(owner).get(name, _MISSING) is not value:
                    setattr(owner, name, value)

        self._restores.append(restore)
        unwrapped = (getattr(value, "__func__", getattr(value, "fget", value)) for value in vars(owner).values())
        self._all(unwrapped, len(before))

    def _cached(self, function: Any) -> None:
        """Results of a trace have no values, and must not be found in a cache afterwards."""
        self.push(function.__wrapped__)
        before = function.cache_info()

        def restore() -> None:
            if function.cache_info().misses == before.misses:
                return
            if before.currsize and before.maxsize is None:
                logger.warning("the trace has added to the cache of %s; call its cache_clear()", function.__wrapped__)
            else:
                function.cache_clear()

        if _is_of_user(function.__module__):
            self._restores.append(restore)

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        self._entries += array.nbytes // 8
        if self._entries <= MOST_ENTRIES and not array.dtype.hasobject and array.flags.writeable:
            before = array.copy()
            self._restores.append(lambda: np.copyto(array, before))

    def _object(self, item: Any) -> None:
        self._entries += ENTRIES_OF_OBJECT
        if isinstance(item, _CACHED):
            self._cached(item)
            return
        for generator, read, write in _GENERATORS:
            if isinstance(item, generator):
                self._restores.append(functools.partial(write, item, read(item)))
                return
        kind: Any = type(item)
        if isinstance(item, _DATA) or not _is_looked_into(kind):
            return
        held = getattr(item, "__dict__", None)
        threads = held and any(isinstance(value, _OF_THREADS) for value in held.values())
        if threads and not _is_of_user(kind.__module__):
            return  # other threads may change it meanwhile, and that must not be undone
        self.push(kind)
        if isinstance(item, nn.Module):
            self._attributes_of_module(item)
        elif isinstance(held, dict):
            self.push(held)
        for owner in kind.__mro__:
            slots = vars(owner).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                self._slot(item, vars(owner).get(name))

    def _attributes_of_module(self, module: nn.Module) -> None:
        held = vars(module)
        before = {name: value for name, value in held.items() if name not in _OF_MODULES}

        def restore() -> None:
            for name in [name for name in held if name not in before and name not in _OF_MODULES]:
                del held[name]
            held.update(before)

        self._restores.append(restore)
        self._all(before.values(), len(before))

    def _slot(self, item: Any, slot: Any) -> None:
        if not isinstance(slot, types.MemberDescriptorType):
            return  # such as __dict__ and __weakref__
        before = _value_of(slot, item)

        def restore() -> None:
            present = _value_of(slot, item)
            if before is _MISSING and present is not _MISSING:
                slot.__delete__(item)
            elif present is not before:
                slot.__set__(item, before)

        self._restores.append(restore)
        self.push(before)


def _width_of(item: Any) -> int:
    """Entries of a container, and words of an array; 1 for all others. The item is not asked: a proxy may raise."""
    kind = type(item)
    if issubclass(kind, np.ndarray):
        return int(item.nbytes // 8)
    return next((held.__len__(item) for held in _WIDE if issubclass(kind, held)), 1)


def _has(item: Any, weight: torch.Tensor) -> bool:
    return isinstance(item, nn.Module) and any(parameter is weight for parameter in item.parameters())


def _value_of(slot: types.MemberDescriptorType, item: Any) -> Any:
    try:
        return slot.__get__(item)
    except AttributeError:
        return _MISSING


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
    return library not in _LIBRARIES or kind.__module__.startswith(_PLAIN_MODULES) or issubclass(kind, nn.Module)


@functools.lru_cache(maxsize=4096)
def _is_of_user(name: str | None) -> bool:
    """Whether a module is the user's and not that of an installed package."""
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    if file is None:
        return name == "__main__"
    return is_user_code(file) and "site-packages" not in file and "dist-packages" not in file


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function and those in it may look up among globals."""
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return tuple(dict.fromkeys((*code.co_names, *itertools.chain.from_iterable(inner))))
