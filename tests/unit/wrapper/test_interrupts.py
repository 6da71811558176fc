"""After an interrupt, as by Ctrl-C in a notebook, a model trains on from what its state dicts say, and nothing of the
interrupted call is left."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import elixir
from elixir.access import interrupts
from elixir.access.autograd import innermost_saved_tensors_hooks
from elixir.plan.plan import Plan
from elixir.torch_private import while_nothing_compiles
from elixir.wrapper.phase import Phase
from tests.common import inside
from tests.common.early import chain, updating_early
from tests.common.on_disk import on_disk
from tests.common.one_pass import Stack, plan_for, square_loss, stepping, vectors
from tests.common.parity import Case, Pair, make_plan, take_step

_ELIXIR = str(Path(elixir.__file__).parent)


class Interrupting:
    """A context that sends this process SIGINT before the so many-th line that the main thread runs of Elixir's code.

    Args:
        line: its number; 0 for none, to count the lines.
    """

    def __init__(self, line: int = 0) -> None:
        self._line = line
        self.lines = 0
        """The lines that have run."""

    @property
    def came(self) -> bool:
        """Whether the signal was sent."""
        return 0 < self._line <= self.lines

    def __enter__(self) -> Interrupting:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        return self._goes_on if file.startswith(_ELIXIR) and file != interrupts.__file__ and not self.came else None

    def _goes_on(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not self.came:
            self.lines += 1
            if self.came:
                signal.raise_signal(signal.SIGINT)
                return frame.f_trace  # the handler may have set another
        return self._goes_on


def moments(step: Callable[[], object], count: int) -> list[int]:
    """Numbers of lines of Elixir's code in `step`, evenly spread."""
    with Interrupting() as counted:
        step()
    return [1 + place * (counted.lines - 1) // count for place in range(count)]


MOMENTS = 20


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert innermost_saved_tensors_hooks() is None
    assert torch.is_grad_enabled()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    free: list[bool] = []

    def take() -> None:
        with while_nothing_compiles():
            free.append(True)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(10)
    assert free


class Interrupted:
    """A model that is interrupted in steps, and its twin, which begins from its state dicts each time.

    Args:
        pair: the two.
        step: makes a whole step of the first.
    """

    def __init__(self, pair: Pair, step: Callable[[], None]) -> None:
        self.pair, self.step = pair, step
        pair.audited = False
        step()

    def at(self, line: int, then: Callable[[], object] = lambda: None) -> None:
        """Interrupts a step at a line of Elixir's code; calls `then`, and trains on."""
        pair = self.pair
        with Interrupting(line) as interrupting:
            try:
                self.step()
                raised = False
            except KeyboardInterrupt:
                raised = True
        assert raised is interrupting.came
        assert innermost_saved_tensors_hooks() is None
        then()
        pair.optimizer.zero_grad()
        assert inside.phase(pair.module) is Phase.IDLE
        states = pair.optimizer.state_dict()
        assert (
            len({int(state["step"]) for state in states["state"].values()}) == 1
        )  # a step is made whole, or not at all
        pair.plain.load_state_dict(pair.module.state_dict())
        pair.plain_optimizer.load_state_dict(states)
        pair.train(1)
        pair.assert_same_weights()


def in_homes(folder: Path, kind: str) -> Interrupted:
    """A chain of layers in homes of this kind."""
    it = chain(2)
    plans: dict[str, Callable[[], Plan]] = {
        "mixed": lambda: make_plan(it, "mixed", split_number=2),
        "early": lambda: updating_early(it, "streamed", split_number=2),
        "units": lambda: make_plan(it, "streamed", split_number=2),
        "disk": lambda: on_disk(make_plan(it, "streamed", split_number=2)),
    }
    where = {"disk_folder": str(folder)} if kind == "disk" else {}
    pair = Pair(it, plans[kind](), device="cpu", max_norm=1e9 if kind == "early" else None, **where)

    def step() -> None:
        take_step(pair.optimizer, it.loss(pair.module, it.inp))

    return Interrupted(pair, step)


def in_one_pass() -> Interrupted:
    """Layers that two micro-batches pass together."""
    torch.manual_seed(0)
    model = Stack([nn.Linear(8, 8), nn.Linear(8, 8)])
    (batches,) = vectors(2, steps=1)
    pair = Pair(
        Case(model, batches[0], square_loss), plan_for(model, batches[0], square_loss, accumulation=2), device="cpu"
    )

    def step() -> None:
        pair.optimizer.accumulate(stepping(pair.optimizer, square_loss, 2), batches)
        pair.optimizer.step()
        pair.optimizer.zero_grad()

    return Interrupted(pair, step)


@pytest.mark.parametrize("kind", ["mixed", "early", "units", "disk"])
def test_a_model_trains_on_after_an_interrupt(kind: str, tmp_path: Path) -> None:
    it = in_homes(tmp_path, kind)
    with it.pair:
        for line in moments(it.step, MOMENTS):
            it.at(line)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixed", "early", "units", "disk", "pass"])
def test_a_model_trains_on_after_any_of_many_interrupts(kind: str, tmp_path: Path) -> None:
    it = in_one_pass() if kind == "pass" else in_homes(tmp_path, kind)
    pair, saved, later = it.pair, str(tmp_path / "saved"), str(tmp_path / "later")
    state = {"model": pair.module, "optimizer": pair.optimizer}
    elixir.save_checkpoint(saved, dict(state), wait=True)

    def save() -> None:
        pair.optimizer.zero_grad()
        elixir.save_checkpoint(later, dict(state), wait=True)

    def load() -> None:
        pair.optimizer.zero_grad()
        elixir.load_checkpoint(saved, dict(state))

    # Some weights have no gradient yet in a pass that was interrupted, and are not stepped then.
    step = pair.module.settle if kind == "pass" else pair.optimizer.step
    followed_by = (lambda: None, step, pair.module.state_dict, save, load)
    with pair:
        for number, line in enumerate(moments(it.step, 300)):
            it.at(line, followed_by[number % len(followed_by)])


@pytest.mark.parametrize("kind", ["mixed", "early"])
def test_an_interrupted_model_can_be_closed(kind: str, tmp_path: Path) -> None:
    lines = moments((first := in_homes(tmp_path, kind)).step, 4)
    first.pair.module.close()
    for line in lines:
        it = in_homes(tmp_path, kind)
        with pytest.raises(KeyboardInterrupt), Interrupting(line):
            it.step()
        model = it.pair.module.release()
        assert all(value.isfinite().all() for value in model.state_dict().values())
        it.pair.case.loss(model, it.pair.case.inp).backward()


def interrupting(module: nn.Module, at: int = 1) -> Any:
    """Interrupts the so many-th next call of a module."""
    calls = iter(range(1, at + 1))

    def hook(*_: object) -> None:
        if next(calls, 0) == at:
            raise KeyboardInterrupt

    return module.register_forward_pre_hook(hook)
