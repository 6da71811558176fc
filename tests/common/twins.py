"""Plain PyTorch that steps each weight on the kind of device on which a plan steps it: there its bits are promised.

Adam on a CPU rounds otherwise than on a GPU, so a twin that steps all on the GPU would soon have other weights.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from elixir.wrapper import ElixirModule
from tests.common import gpu, inside

Numbers = list[dict[str, Any]]


def on_host(module: ElixirModule) -> set[str]:
    """Names of the weights that the host steps next to a CUDA device."""
    if module.device.type == "cpu":
        return set()
    chunks = inside.chunks(module)
    return {slot.name for chunk in chunks if chunk.plan.update_home == "host" for slot in chunk.slots}


def step_alike(
    optimizer: torch.optim.Optimizer, module: ElixirModule, weights: Mapping[str, torch.Tensor]
) -> torch.optim.Optimizer:
    """Lets `optimizer` step those of its `weights` on the host that the plan of `module` has there, in a separate call,
    as if the others had no gradient; its states stay where a weight was stepped last. What a class counts in its groups
    is counted once."""
    step, inside, hidden = type(optimizer).step, [False], list[dict[torch.Tensor, torch.Tensor | None]]()
    counted: list[tuple[Numbers, Numbers]] = []

    def before(*_: Any) -> None:
        if inside[0]:
            return
        away = _stepped(optimizer, [weights[name] for name in on_host(module) & weights.keys()])
        rest = _all(optimizer, but=away)
        if away:
            inside[0], first = True, _numbers(optimizer)
            try:
                with _without_gradient(rest), _moved(optimizer, away):
                    step(optimizer)
            finally:
                inside[0] = False
            counted.append((first, _numbers(optimizer)))
            for group, numbers in zip(optimizer.param_groups, first, strict=True):
                for key in group.keys() - numbers.keys() - {"params"}:
                    del group[key]
                group.update(copy.deepcopy(numbers))
        hidden.append({each: each.grad for each in away})
        for each in away:
            each.grad = None
        for each in rest:
            _take(optimizer, each, each.device)

    def after(*_: Any) -> None:
        if not inside[0]:
            for each, gradient in hidden.pop().items():
                each.grad = gradient
            if counted:
                _count_once(optimizer, *counted.pop())

    if module.device.type != "cpu":
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
    return optimizer


def _numbers(optimizer: torch.optim.Optimizer) -> Numbers:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return copy.deepcopy(groups)


def _count_once(optimizer: torch.optim.Optimizer, before: Numbers, after: Numbers) -> None:
    """Sets what the step on the host has changed in the groups and the other has not, for it had no gradients there."""
    for group, old, new in zip(optimizer.param_groups, before, after, strict=True):
        group.update({key: value for key, value in new.items() if key not in old or group[key] == old[key]})


def _all(optimizer: torch.optim.Optimizer, but: Collection[torch.Tensor] = ()) -> list[torch.Tensor]:
    left_out = {id(each) for each in but}
    return [each for group in optimizer.param_groups for each in group["params"] if id(each) not in left_out]


def _stepped(optimizer: torch.optim.Optimizer, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    mine = {id(each) for each in _all(optimizer)}
    return [each for each in weights if id(each) in mine and each.grad is not None]


@contextmanager
def _without_gradient(weights: list[torch.Tensor]) -> Iterator[None]:
    gradients = [each.grad for each in weights]
    for each in weights:
        each.grad = None
    yield
    for each, gradient in zip(weights, gradients, strict=True):
        each.grad = gradient


@contextmanager
def _moved(optimizer: torch.optim.Optimizer, weights: list[torch.Tensor]) -> Iterator[None]:
    """Weights, gradients and states on the host; weights come back into the memory that they had."""
    before = [(each.data, each.grad) for each in weights]
    for each, (data, gradient) in zip(weights, before, strict=True):
        assert gradient is not None
        each.grad = None
        each.data = data.cpu()
        each.grad = gradient.cpu()
        _take(optimizer, each, each.device)
    yield
    for each, (data, gradient) in zip(weights, before, strict=True):
        each.grad = None
        data.copy_(each.data)
        each.data = data
        each.grad = gradient


def _take(optimizer: torch.optim.Optimizer, weight: torch.Tensor, device: torch.device) -> None:
    """Takes a weight's states to a device; counts of steps stay on the host, but for those that torch wants there."""
    group = next(group for group in optimizer.param_groups if any(each is weight for each in group["params"]))
    moves = device.type == "cpu" or group.get("fused") or group.get("capturable")
    moves = moves or isinstance(optimizer, torch.optim.ASGD)
    for name, value in optimizer.state.get(weight, {}).items():
        if moves or name not in ("step", "mu_product"):
            optimizer.state[weight][name] = gpu.there(value, device)
