"""A run that is saved, and another that goes on from there; every bit of both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elixir.checkpoint_format.slice_reader import open_checkpoint, verify
from elixir.plan.plan import Plan
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.run_options import Debug
from elixir.wrapper.step.states import small_states
from tests.common import gpu, inside
from tests.common.file_faults import Crash, Operation
from tests.common.parity import Case

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """A user's optimizer: an int for a step, and a new tensor in each, rather than the same one written to."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                before = state.get("exp_avg", torch.zeros_like(parameter))
                parameter.add_((0.9 * before + 0.1 * parameter.grad).sign(), alpha=-group["lr"])
                state["exp_avg"] = 0.99 * before + 0.01 * parameter.grad


def two_groups(cls: type = torch.optim.AdamW, **options: Any) -> Make:
    """Weights with decay and vectors without, at different rates."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "lr": 1e-3},
            {"params": [p for p in trained if p.dim() <= 1], "lr": 3e-3},
        ]
        return cls([group for group in groups if group["params"]], **options)

    return make


class Run:
    """A model, its optimizer and a scheduler, in training.

    Args:
        case: its model is copied.
        plan: for it.
        make: makes the optimizer.
        max_norm: ask for the norm and clip to it before every step.
        optimizer: options of `ElixirOptimizer`.
    """

    def __init__(
        self, case: Case, plan: Plan, make: Make, *, max_norm: float = 0.0, wrap: Any = None, **optimizer: Any
    ) -> None:
        self.case = replace(case, model=copy.deepcopy(case.model), inp=gpu.there(case.inp, gpu.DEVICE))
        options = {"debug": Debug(poison=True)} | (wrap or {})
        self.module = ElixirModule(self.case.model, plan, device=gpu.DEVICE, **options)
        self.optimizer = ElixirOptimizer(self.module, make(self.module.module), **optimizer)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        self._max_norm = max_norm

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.module.close()

    def state(self, **more: Any) -> dict[str, Any]:
        """The state that is saved."""
        return {"model": self.module, "optimizer": self.optimizer, "scheduler": self.scheduler, **more}

    def step(self, scale: float = 1.0) -> float:
        """One step; its loss."""
        loss = self.case.loss(self.module, self.case.inp)
        self.optimizer.backward(loss * scale)
        if self._max_norm:
            self.optimizer.clip_grad_norm_(self._max_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()

    def train(self, steps: int) -> list[float]:
        """Trains `steps` steps; gives their losses."""
        return [self.step() for _ in range(steps)]

    def bits(self) -> dict[str, Any]:
        """All that a checkpoint should bring back, of this rank."""
        found: dict[str, Any] = {f"model.{name}": value for name, value in self.module.state_dict().items()}
        for part in inside.shards(self.optimizer):
            for each in part.states.to_save():
                found[f"{each.kind}.{each.name}.{each.first}"] = (
                    each.values(0, each.tensor.numel()).detach().cpu().clone()
                )
            found |= {f"small.{name}": vars(small) for name, small in small_states(part.states).items()}
        found["groups"] = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        scale = inside.loss_scale(self.module)
        found["loss scale"] = scale.state() if scale.used else None
        found["scheduler"] = self.scheduler.state_dict()
        return found


def differing(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Names of what is not the same, bit for bit."""
    found = sorted(mine.keys() ^ theirs.keys())
    for name in mine.keys() & theirs.keys():
        one, other = mine[name], theirs[name]
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        if not same:
            found.append(name)
    return sorted(found)


def values_left(crash: Crash, log: Sequence[Operation], folder: Path, *, seeds: int) -> set[int]:
    """Reads `number` from every checkpoint that a crash after a prefix of a record may leave: 1 was saved, then 2.

    Args:
        crash: of the folder as it was before the record.
        log: operations of the second save; once all are done, 2 must be there.
        folder: gets a folder for each outcome.
        seeds: so many random parts of what had not reached the disk are kept, one after the other.
    """
    found: dict[frozenset[tuple[str, bytes]], int] = {}  # many prefixes leave the same
    for done in range(len(log) + 1):
        if done:
            crash.do(log[done - 1])
        for what, content in crash.outcomes(seeds=seeds):
            left = frozenset(content.items())
            if left not in found:
                place = folder / f"left-{len(found)}"
                place.mkdir()
                for name, raw in content.items():
                    (place / name).write_bytes(raw)
                assert verify(place) == (), (done, what)
                with open_checkpoint(place) as saved:
                    found[left] = saved.value("number")
            assert found[left] == 2 or done < len(log), "what was said to be committed is not there"
    return set(found.values())
