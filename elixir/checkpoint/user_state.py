"""The user's state: which of it is the module, which are optimizers, and how the rest is saved and restored."""

from __future__ import annotations

import random
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elixir.checkpoint_format.index import encode
from elixir.errors import CheckpointError, CheckpointMismatch, InputError, InputTypeError
from elixir.units import dtype_name
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.training_states import TrainingStates


class PerRank:
    """A value that every rank has for itself, such as the position of its data loader. Give it as a value of the state.

    It is saved for every rank, and comes back on as many ranks only.

    Args:
        value: plain values, or an object with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class UserState:
    """The parts of a state."""

    states: TrainingStates
    module_name: str
    values: dict[str, Any]
    """All that is neither the module nor an optimizer, nor `PerRank`."""
    rank_values: dict[str, PerRank]

    @staticmethod
    def of(state: Mapping[str, Any]) -> UserState:
        """Divides `state` into its parts.

        Raises:
            InputTypeError: it is no dict by name.
            InputError: it has not exactly one ElixirModule, or an optimizer of another.
        """
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            raise InputTypeError(
                'state must be a dict by name, such as {"model": model, "optimizer": optimizer, "epoch": 3}, got '
                f"{type(state).__name__}"
            )
        modules = {name: value for name, value in state.items() if isinstance(value, ElixirModule)}
        if len(modules) != 1:
            several = f"{len(modules)} ({', '.join(sorted(modules))}); save each model in a separate folder"
            found = several if modules else "none; give the module that elixir.wrap or ElixirModule returned"
            raise InputError(f"state must have exactly one ElixirModule, found {found}")
        ((name, module),) = modules.items()
        optimizers = {name: value for name, value in state.items() if isinstance(value, ElixirOptimizer)}
        rest = {key: value for key, value in state.items() if key not in modules and key not in optimizers}
        per_rank = {key: value for key, value in rest.items() if isinstance(value, PerRank)}
        values = {key: value for key, value in rest.items() if key not in per_rank}
        return UserState(TrainingStates(module, optimizers), name, values, per_rank)

    def names(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of everything, the same on all ranks."""
        return (
            (self.module_name, "module"),
            *((name, "optimizer") for name in sorted(self.states.optimizers)),
            *((name, "value") for name in sorted(self.values)),
            *((name, "per rank") for name in sorted(self.rank_values)),
        )


def encoded(values: Mapping[str, Any], suffix: str = "") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Encodes values as JSON by name; also returns the tensors in them by key."""
    found: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        plain = value.value if isinstance(value, PerRank) else value
        if _is_stateful(plain):
            plain = plain.state_dict()
        found[name], own = encode(plain, name + suffix)
        tensors |= own
    return found, tensors


def check_tensor(name: str, mine: Any, saved: Any, folder: Path) -> set[str]:
    """Checks that a tensor of the user's state can take a saved one; returns a note if it is cast.

    Raises:
        CheckpointMismatch: the shapes differ, or the dtype of `mine` cannot hold such numbers.
    """
    if not isinstance(mine, torch.Tensor) or not isinstance(saved, torch.Tensor):
        return set()
    if mine.shape != saved.shape:
        raise CheckpointMismatch(
            f"{folder}: {name!r} has shape {list(saved.shape)} in the checkpoint, {list(mine.shape)} here",
            shapes={name: (tuple(saved.shape), tuple(mine.shape))},
        )
    if mine.dtype == saved.dtype:
        return set()
    theirs, ours = dtype_name(saved.dtype), dtype_name(mine.dtype)
    if not torch.can_cast(saved.dtype, mine.dtype):
        raise CheckpointMismatch(
            f"{folder}: {name!r} is {theirs} in the checkpoint, {ours} here, which cannot hold it; give a tensor of "
            f"{theirs}"
        )
    return {f"{name!r}, saved in {theirs}, is cast to {ours}"}


def restore(state: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    """Puts saved values into the user's state: plain values are replaced first, then objects load theirs.

    Raises:
        CheckpointError: an object raised something; the message names it.
    """
    objects = {}
    for name, saved in values.items():
        mine = state[name]
        plain = mine.value if isinstance(mine, PerRank) else mine
        if _is_stateful(plain):
            objects[name] = plain
        elif isinstance(mine, PerRank):
            mine.value = saved
        elif isinstance(mine, torch.Tensor) and isinstance(saved, torch.Tensor):
            with torch.no_grad():
                mine.copy_(saved)
        else:
            state[name] = saved
    for name, plain in objects.items():
        try:
            plain.load_state_dict(values[name])
        except Exception as error:
            raise CheckpointError(
                f"load_state_dict of {name!r}, a {type(plain).__name__}, raised {type(error).__name__}: {error}"
            ) from error


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def rng_state(device: torch.device) -> dict[str, Any]:
    """State of all global random number generators of this process: torch's on the host and on `device`, Python's,
    numpy's."""
    version, numbers, following = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), following),
        "numpy": tuple(np.random.get_state()),  # noqa: NPY002  the user's data loading may draw from it
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device, *, try_only: bool = False) -> set[str]:
    """Restores what `rng_state` gave; returns notes on what cannot be restored.

    With `try_only`, generators made for it take the state, which raises whatever they raise, and the global ones stay
    as they are.
    """
    version, numbers, following = state["python"]
    (torch.Generator("cpu").set_state if try_only else torch.set_rng_state)(state["torch"])
    (random.Random() if try_only else random).setstate((version, tuple(numbers.tolist()), following))
    (np.random.RandomState() if try_only else np.random).set_state(state["numpy"])
    if device.type == "cuda" and "cuda" in state:
        if try_only:
            torch.Generator(device).set_state(state["cuda"])
        else:
            torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "cuda" or "cuda" in state:
        return {
            "the random numbers of a CUDA device are not those of the checkpoint, which was saved on another device"
        }
    return set()
