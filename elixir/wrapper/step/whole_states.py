"""Saves and loads whole optimizer states in torch's layout: by number of the parameter, in its shape."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from elixir.checkpoint_format.slices import scalar_state
from elixir.chunk.chunk import Chunk, Slot
from elixir.chunk.memory import separate_copy
from elixir.errors import InputError, InputTypeError
from elixir.hardware.process_memory import give_back_freed
from elixir.models.quantised import first_inside
from elixir.units import dtype_name
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.shard import SteppedShard
from elixir.wrapper.step.states import (
    ADAM_KINDS,
    NO_AVERAGE_KEPT,
    NO_AVERAGE_SAVED,
    Find,
    SavedState,
    SavedStates,
    SmallStates,
    small_states,
    wide_dtype,
)
from elixir.wrapper.step.stepper import Stepper
from elixir.wrapper.step.user_optimizer import take_options

logger = logging.getLogger(__name__)


def whole_states(engine: Engine, stepper: Stepper, groups: Sequence[dict[str, Any]], *, wanted: bool) -> dict[str, Any]:
    """Gathers the state dict, one chunk at a time. All ranks call this, after everything has settled.

    Args:
        engine: of the chunks.
        stepper: the optimizer whose states are gathered.
        groups: the parameter groups.
        wanted: whether this rank keeps the gathered states.
    """
    names_of = {slot.parameter: slot.name for chunk in engine.chunks for slot in chunk.slots}
    ordered = [names_of[first_inside(parameter)] for group in groups for parameter in group["params"]]
    numbers = {name: number for number, name in enumerate(ordered)}
    found = _agreed(engine, stepper)
    state: dict[int, dict[str, Any]] = {numbers[name]: _plain(small) for name, (_, small) in found.items()}
    for shard in stepper.shards:
        slots = [slot for slot in shard.chunk.slots if slot.name in found]
        dtypes = {kind: dtype for slot in slots for kind, dtype in found[slot.name][0].items()}
        with shard.chunk.in_memory():
            for kind in sorted(dtypes):
                whole: torch.Tensor | None = None  # lets go of the last one
                give_back_freed()  # it stays in the heap, where one of another size may not fit
                whole = _gathered(engine, shard, kind, getattr(torch, dtypes[kind]))
                for slot in slots if wanted else ():
                    if kind in found[slot.name][0]:
                        state[numbers[slot.name]][kind] = separate_copy(slot.part_of(whole), whole.dtype)
    if not wanted:
        return {}
    return {
        "state": {number: state[number] for number in sorted(state)},
        "param_groups": [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [numbers[names_of[first_inside(parameter)]] for parameter in group["params"]],
            }
            for group in groups
        ],
    }


_Found = dict[str, tuple[dict[str, str], SmallStates]]
"""By parameter, the dtype of each kind of its states in the state dict, and its numbers."""


def _agreed(engine: Engine, stepper: Stepper) -> _Found:
    """The states that exist on any rank."""
    mine: _Found = {}
    for states in (shard.states for shard in stepper.shards):
        small = small_states(states)
        for segment in filter(states.has_stepped, states.segments):
            kinds = {kind: states.kinds[kind] for kind in states.kinds_of(segment) if states.kinds[kind].width == 1}
            dtypes = {kind: dtype_name(wide_dtype(each)) for kind, each in kinds.items()}
            mine[segment.name] = dtypes, small[segment.name]
    answers = engine.exchange("optimizer states", (mine, engine.errors.of_disk))
    engine.errors.agree([lost for _, lost in answers])
    found: _Found = {}
    for theirs, _ in answers:
        found |= theirs  # a parameter has the same states on all ranks that have a part of it
    return found


def load_whole_states(
    engine: Engine, stepper: Stepper, groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]
) -> None:
    """Loads a state dict of torch's layout. All ranks call this with the same one; each takes its parts.

    Raises:
        InputError: the state dict belongs to another optimizer or model; nothing was changed on any rank.
        InputTypeError: `state_dict` is no state dict of an optimizer.
    """
    problem: Exception | None = None
    find: Find = lambda name: None  # noqa: E731
    options: list[dict[str, Any]] = []
    try:
        find = _checked(engine, stepper, groups, state_dict)
        options = [
            stepper.user.loaded_options(group, saved)
            for group, saved in zip(groups, state_dict["param_groups"], strict=True)
        ]
    except (InputError, InputTypeError) as error:
        problem = error
    answers = engine.exchange("load_state_dict() of an optimizer", None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, answer in enumerate(answers):
        if answer is not None:
            raise InputError(f"rank {rank}: {answer}")
    notes: set[str] = set()
    for shard in stepper.shards:
        shard.chunk.about_to_write()
        with shard.chunk.in_memory(write=True):
            notes |= shard.load(find, lambda: None)
    for note in sorted(notes & {NO_AVERAGE_SAVED, NO_AVERAGE_KEPT}):
        logger.info("load_state_dict() of an optimizer: %s", note)
    for group, loaded in zip(groups, options, strict=True):
        take_options(group, loaded)


def _saved(slot: Slot, state: Mapping[str, Any]) -> SavedStates:
    """The state of a parameter in a state dict, as `States.load` takes it."""
    tensors: dict[str, SavedState] = {}
    small = SmallStates()

    def fill(values: torch.Tensor, first: int, out: torch.Tensor) -> None:
        out.copy_(slot.flattened(values.detach())[first : first + out.numel()])

    for kind, value in state.items():
        if kind == "step":
            small.step = int(value)
            if not isinstance(value, torch.Tensor):
                small.others[kind] = small.step
        elif isinstance(value, torch.Tensor) and value.shape == slot.shape:
            tensors[kind] = SavedState(value.dtype, partial(fill, value))
        elif isinstance(value, torch.Tensor):
            small.others[kind] = (dtype_name(value.dtype), value.item())
        elif value is not None:
            small.others[kind] = value
    return SavedStates(tensors, small)


def _checked(engine: Engine, stepper: Stepper, groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]) -> Find:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise InputTypeError("a state dict of an optimizer has 'state' and 'param_groups', as torch.optim gives it")
    saved = state_dict["param_groups"]
    sizes, theirs = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved]
    if sizes != theirs:
        raise InputError(
            f"the state dict has groups of {theirs} parameters, this optimizer of {sizes}; make the groups that were "
            "saved"
        )
    slots = {slot.parameter: slot for chunk in engine.chunks for slot in chunk.slots}
    found: dict[str, SavedStates] = {}
    for group, other in zip(groups, saved, strict=True):
        for parameter, number in zip(group["params"], other["params"], strict=True):
            slot, state = slots[first_inside(parameter)], state_dict["state"].get(number)
            if state is None:
                continue
            _check_state(slot, state, needs_adam=stepper.user.fusible)
            found[slot.name] = _saved(slot, {kind: value for kind, value in state.items() if kind != "master"})
    return found.get


def _check_state(slot: Slot, state: Mapping[str, Any], *, needs_adam: bool) -> None:
    for kind, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != slot.shape:
            raise InputError(
                f"state {kind!r} of {slot.name} has shape {list(value.shape)}, the parameter {list(slot.shape)}; load "
                "states of the same model, with moments in float32 or bfloat16"
            )
    if needs_adam and not {"step", *ADAM_KINDS} <= set(state):
        raise InputError(
            f"the state of {slot.name} is not one of Adam: it has {sorted(state)}, not step, exp_avg and exp_avg_sq"
        )


def _gathered(engine: Engine, shard: SteppedShard, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Gathers one kind of state for all parameters of a chunk, in chunk layout; zeros where a parameter has none."""
    chunk: Chunk = shard.chunk
    mine, states = torch.zeros(chunk.shard_numel, dtype=dtype, device=engine.device), shard.states
    for segment in filter(states.has_stepped, states.segments):
        if kind in states.kinds_of(segment):
            mine[segment.part].copy_(states.read(kind, segment))
    if engine.group.size == 1:
        return mine
    whole = torch.empty(chunk.plan.numel, dtype=dtype, device=engine.device)
    gather = partial(
        engine.group.gather, whole.view(torch.uint8), mine.view(torch.uint8), f"states of chunk {chunk.index}"
    )
    engine.lanes.network.submit(gather).synchronize()  # this thread reads `whole` next
    return whole


def _plain(small: SmallStates) -> dict[str, Any]:
    found: dict[str, Any] = {} if small.step is None else {"step": torch.tensor(float(small.step), device="cpu")}
    return found | {kind: scalar_state(value) for kind, value in small.others.items()}
