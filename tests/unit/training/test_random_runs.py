"""Runs of random features after one another have the bits of plain PyTorch, whatever comes between their steps.

Each number draws a model, homes of chunks, units cut finely or coarsely, checkpoints, compiled layers, and the events
of some steps: evaluations, exceptions in forward and backward, reads and writes of weights, saves and loads, moves.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.hardware.profile import preset
from elixir.plan.plan import Plan
from elixir.search import simple_search
from elixir.tracer.trace import trace_step
from tests.common.file_faults import UnsyncedFiles
from tests.common.parity import HOMES, Case, Pair, case, rehomed

MODELS = ("opt", "gpt2", "llama", "bert", "t5", "mixtral", "cnn", "laid out", "encoder", "recurrent", "albert")
CHECKPOINTED = ("opt", "gpt2", "llama", "bert")
QUICK, BATCHES, PER_BATCH = 4, 10, 50


class Stopped(Exception):
    """The user's own error."""


def planned(it: Case, draw: random.Random) -> Plan:
    """A plan in chunks and units of a random size, in random homes."""

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        it.loss(model, inp).backward()

    trace = trace_step(it.model, it.inp, step, hardware=preset("cpu"))
    if draw.random() < 0.5:
        units = tuple(
            replace(unit, fetch="parameters") if unit.fetch == "either" else unit for unit in trace.step.units
        )
        trace = replace(trace, step=replace(trace.step, units=units))
    cuts, room = draw.choice((2, 5, 8, 20)), draw.choice((0.01, 0.3, 1.0))
    plan = simple_search(trace, 1, cuts, room, shard_device="cpu", hardware="cpu").plan
    return rehomed(plan, draw.choice(sorted(HOMES)))


class RandomRun:
    """One pair of a model under a plan and its twin, and what may happen to both."""

    def __init__(self, number: int, folder: Path) -> None:
        self.draw, self.folder = random.Random(number), folder
        name = self.draw.choice(MODELS)
        kind = self.draw.choice(("none", "none", "reentrant", "non-reentrant")) if name in CHECKPOINTED else "none"
        self.said = [name, kind]
        it = case(name, kind) if kind != "none" else case(name)
        plain = copy.deepcopy(it.model)
        if kind == "none" and self.draw.random() < 0.1:
            self.compile(it.model)
        self.plan = planned(it, self.draw)
        limit = self.draw.choice((None, 0.5))
        self.pair = Pair(it, self.plan, plain=plain, max_norm=limit, evict_always=self.draw.random() < 0.2)
        self.pair.audited = False  # moves and copies of states are counted while they are there
        self.saved: tuple[dict[str, Any], dict[str, Any]] | None = None

    def compile(self, model: nn.Module) -> None:
        """Compiles the layers of the list that is longest."""
        lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
        for layer in max(lists, key=len, default=()):
            layer.compile(backend="eager")
        self.said.append("compiled")

    def run(self) -> None:
        """Trains some steps with random events before, inside and after them."""
        between: list[Callable[[], None]] = [
            self.evaluate, self.fail_in_forward, self.fail_in_backward, self.read, self.write, self.compare, self.save,
            self.load, self.move, self.settle,
        ]  # fmt: skip
        with self.pair as pair:
            for _ in range(self.draw.randint(2, 5)):
                for event in self.draw.sample(between, self.draw.choice((0, 0, 1, 2, 3))):
                    self.said.append(event.__name__)
                    event()
                self.said.append("step")
                for _ in range(self.draw.choice((1, 1, 2))):
                    pair.backward()
                pair.step()

    def evaluate(self) -> None:
        pair = self.pair
        pair.module.eval()
        pair.plain.eval()
        with self.draw.choice((torch.no_grad, torch.inference_mode))():
            mine, plain = (pair.case.loss(model, pair.case.inp) for model in (pair.module, pair.plain))
        assert torch.equal(mine, plain)
        pair.module.train()
        pair.plain.train()

    def fail_in_forward(self) -> None:
        """Only one of the two fails, so nothing of it may count."""
        module = self.draw.choice([each for each in self.pair.module.module.modules() if not [*each.children()]])
        statistics = [copy.deepcopy(buffer) for buffer in self.pair.module.buffers()]

        def stop(*_: Any) -> None:
            raise Stopped

        handle = module.register_forward_pre_hook(stop)
        with contextlib.suppress(Stopped):  # a module may never run
            self.pair.case.loss(self.pair.module, self.pair.case.inp)
        handle.remove()
        with torch.no_grad():
            for buffer, before in zip(self.pair.module.buffers(), statistics, strict=True):
                buffer.copy_(before)

    def fail_in_backward(self) -> None:
        """Both fail at the same gradient, and are cleared."""
        names = [name for name, each in self.pair.plain.named_parameters() if each.requires_grad]
        name = self.draw.choice(names)

        def stop(_: torch.Tensor) -> None:
            raise Stopped

        for model in (self.pair.module.module, self.pair.plain):
            handle = model.get_parameter(name).register_hook(stop)
            around = self.pair.module if model is not self.pair.plain else model
            loss = self.pair.case.loss(around, self.pair.case.inp)
            with pytest.raises(Stopped):
                loss.backward()
            handle.remove()
            around.zero_grad()

    def read(self) -> None:
        name, weight = self.draw.choice(list(self.pair.plain.named_parameters()))
        mine = self.pair.module.module.get_parameter(name)
        with self.pair.module.gathered([mine]):
            assert torch.equal(mine, weight)

    def write(self) -> None:
        name, weight = self.draw.choice(list(self.pair.plain.named_parameters()))
        mine = self.pair.module.module.get_parameter(name)
        with torch.no_grad(), self.pair.module.gathered([mine], write=True):
            for each in (mine, weight):
                each.mul_(0.5)

    def compare(self) -> None:
        self.pair.assert_same_weights()

    def state(self) -> dict[str, Any]:
        return {"model": self.pair.module, "optimizer": self.pair.optimizer}

    def save(self) -> None:
        save_checkpoint(self.folder / "saved", self.state(), files=UnsyncedFiles()).wait()
        self.saved = copy.deepcopy((self.pair.plain.state_dict(), self.pair.plain_optimizer.state_dict()))

    def load(self) -> None:
        if self.saved is not None:
            load_checkpoint(self.folder / "saved", self.state(), files=UnsyncedFiles())
            weights, states = copy.deepcopy(self.saved)
            self.pair.plain.load_state_dict(weights)
            self.pair.plain_optimizer.load_state_dict(states)

    def move(self) -> None:
        self.pair.module.rehome(rehomed(self.plan, self.draw.choice(sorted(HOMES))))

    def settle(self) -> None:
        self.pair.module.settle()


def run(number: int, folder: Path) -> None:
    found = RandomRun(number, folder)
    try:
        found.run()
    except Exception as error:
        raise AssertionError(f"run {number}: {found.said}") from error


@pytest.mark.parametrize("number", range(QUICK))
def test_a_random_run_has_the_bits_of_plain_pytorch(number: int, tmp_path: Path) -> None:
    run(number, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
def test_many_random_runs_have_the_bits_of_plain_pytorch(batch: int, tmp_path: Path) -> None:
    for number in range(QUICK + batch * PER_BATCH, QUICK + (batch + 1) * PER_BATCH):
        run(number, tmp_path / str(number))
