"""Users' calls get the recorded answer at each moment of a training, refused or not, and leave what was recorded.

A commit that means to change an answer records them anew and says why:

    python -m tests.unit.wrapper.test_recorded_calls              all of them
    python -m tests.unit.wrapper.test_recorded_calls "calls 3"    prints the answers of one, to compare them by hand

A failing test prints what differs; ``xzcat`` shows the whole recording, one answer in a line.
"""

from __future__ import annotations

import contextlib
import copy
import json
import operator
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elixir.checkpoint import save_checkpoint
from elixir.errors import ElixirError
from tests.common import inside
from tests.common.made_up_runs import Program, Run, ids_of, known_memory, loss_of, norm_of
from tests.common.rank_threads import results
from tests.common.recording import difference, in_lines, plain, read_recording, recording, write_recording
from tests.unit.wrapper.test_recorded_runs import TIMEOUT_S

Calls = dict[str, Callable[[], Any]]
WRITES = (
    "written",
    "clear states",
    "gathered to write",
    "load",
    "load inside",
    "nothing to load",
    "load states",
    "rehome",
    "save",
)
"""Names of calls that change weights, which a backward to come has saved."""


class CallsAnywhere:
    """Makes all calls at a moment, and writes down the answers.

    Args:
        program: what trains.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.module, self.first = program, program.module, program.optimizers[0]
        self.net: Any = program.module.module
        self.weights = {name: each.clone() for name, each in self.module.state_dict().items()}
        self.states = self.first.state_dict()
        self.answers: dict[str, str] = {}
        self.tried_at: set[str] = set()

    def calls(self) -> Calls:
        """The calls that any moment may refuse; what may change the training comes last."""
        module, first, net, plan = self.module, self.first, self.net, self.program.run.plan
        ids, folder = ids_of(0, self.program.rank), str(self.program.folder / "saved")
        return {
            "backward of a number": lambda: first.backward(3.0),  # type: ignore[arg-type]
            "norm of another type": lambda: module.clip_grad_norm_(1.0, norm_type=1.0),
            "copy": lambda: copy.deepcopy(module),
            "pickle": lambda: pickle.dumps(module),
            "pickle a layer": lambda: pickle.dumps(net.layers[1]),
            "double": module.double,
            "double inside": net.double,
            "as it is": lambda: module.to(self.program.run.dtype),
            "more parameters": lambda: first.add_param_group({"params": [torch.zeros(2, requires_grad=True)]}),
            "a state": lambda: first.state[net.head.weight],
            "a state set": lambda: first.state.update({net.head.weight: {}}),
            "a state gone": lambda: operator.delitem(first.state, net.head.weight),
            "a state there": lambda: net.head.weight in first.state,
            "states there": lambda: len(first.state),
            "assigned": lambda: module.load_state_dict(self.weights, assign=True),
            "assigned inside": lambda: net.load_state_dict(self.weights, assign=True),
            "nothing to load": lambda: module.load_state_dict({}),
            "no states": lambda: first.load_state_dict({"state": {}}),
            "states of nobody": lambda: first.load_state_dict(3),
            "fewer chunks": lambda: module.rehome(replace(plan, chunks=plan.chunks[:-1], order=())),
            "gathered of nobody": lambda: module.gathered(nn.Parameter(torch.zeros(2))).__enter__(),
            "norm": lambda: norm_of(net.head.weight),
            "written": lambda: net.head.weight.mul_(1.0),
            "a gradient": lambda: norm_of(net.head.weight.grad),
            "forward": lambda: norm_of(module(ids)),
            "a layer": lambda: norm_of(net.layers[1](torch.ones(1, 3, net.words.embedding_dim, dtype=self.dtype))),
            "state dict": lambda: norm_of(module.state_dict()),
            "state dict of rank 0": lambda: norm_of(module.state_dict(rank0_only=True, dtype=torch.float16)),
            "state dict inside": lambda: norm_of(net.head.state_dict()),
            "states": lambda: norm_of(first.state_dict()),
            "gathered": lambda: self.gathered(write=False),
            "gathered to write": lambda: self.gathered(write=True),
            "load": lambda: module.load_state_dict({"module.nobody": torch.zeros(1)}, strict=False),
            "load inside": lambda: net.head.load_state_dict({"weight": self.weights["head.weight"]}, strict=False),
            "load states": lambda: first.load_state_dict(self.states),
            "save": lambda: save_checkpoint(folder, {"model": module, "first": first}, wait=True),
            "no_sync": module.no_sync,
            "rehome": lambda: module.rehome(self.program.run.other),
            "clear states": first.state.clear,
            "clip all strictly": lambda: module.clip_grad_norm_(1.0, error_if_nonfinite=True),
            "clip all": lambda: module.clip_grad_norm_(1.0),
            "clip": lambda: first.clip_grad_norm_(2.0),
            "zeros": lambda: first.zero_grad(set_to_none=False),
        }

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.net.head.weight.dtype
        return found

    def lanes(self) -> Iterable[Any]:
        return inside.lanes(self.module).all()

    def gathered(self, write: bool) -> float:
        with self.module.gathered(self.net.head, write=write):
            return norm_of(self.net.head.weight.detach())

    def tried(self, moment: str, but: tuple[str, ...] = (), more: Calls | None = None) -> None:
        """Makes all calls, except some, and others after them; once, whatever the calls come back to."""
        if moment in self.tried_at:
            return
        self.tried_at.add(moment)
        for name, call in ({key: each for key, each in self.calls().items() if key not in but} | (more or {})).items():
            try:
                with torch.no_grad():
                    found, answer = call(), "done"
                self.program.found += [found] if isinstance(found, (float, int)) else []
            except (ElixirError, RuntimeError, TypeError, ValueError, ArithmeticError) as error:
                answer = f"{type(error).__name__}: {plain(str(error))}"
            self.answers[f"{moment}: {name}"] = answer

    def loss(self, **options: Any) -> torch.Tensor:
        self.program.number += 1
        return loss_of(self.module, ids_of(self.program.number, self.program.rank), **options)

    def moments(self) -> Iterator[str]:
        """Gets to one moment after the other, tries all there, and trains on."""
        module, net, first = self.module, self.net, self.first
        clips = ("clip", "clip all", "clip all strictly") if len(self.program.optimizers) > 1 else ()
        within: Calls = {"zero": module.zero_grad, "close": module.close}
        self.tried("before the first step")
        yield "before the first step"

        hook = net.layers[1].register_forward_hook(lambda *_: self.tried("in forward", more=within))
        self.loss()
        hook.remove()
        self.tried("before backward", but=("rehome", "save"))
        module.zero_grad()
        first.backward(self.loss())
        self.tried("with gradients")
        yield "in forward"

        def passed(model: nn.Module, ids: torch.Tensor) -> None:
            loss = loss_of(model, ids)
            closes = within if self.program.run.plan.pass_size > 1 else {}
            self.tried("in accumulate()", but=(*WRITES, *clips, "forward", "a layer"), more=closes)
            first.backward(loss)

        batches = [ids_of(number, self.program.rank) for number in range(self.program.run.plan.accumulation)]
        first.accumulate(passed, batches)
        yield "in accumulate()"

        def watched(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: self.tried("in backward", more=within))

        hook = net.layers[1].register_forward_hook(watched)
        first.backward(self.loss())
        hook.remove()
        yield "in backward"

        for write in (False, True):
            moment = f"in gathered(write={write})"
            with module.gathered(net.head, write=write):
                self.tried(moment, more={"step": first.step, "close": module.close})
            yield moment

        fails: Calls = {"forward": lambda: self.loss(fails=True)}
        self.tried("a forward that raises", but=tuple(self.calls()), more=fails)
        self.tried("after a forward that raised")
        yield "after a forward that raised"

        def half(model: nn.Module, ids: torch.Tensor) -> None:
            first.backward(loss_of(model, ids, fails=ids is batches[-1]))

        fails = {"accumulate": lambda: first.accumulate(half, batches)}
        self.tried("an accumulate() that raises", but=tuple(self.calls()), more=fails)
        self.tried("after an accumulate() that raised")
        yield "after an accumulate() that raised"

        def raised(gradient: torch.Tensor) -> None:
            raise ValueError("made by a test")

        hook = net.layers[1].register_forward_hook(lambda module, args, output: (output.register_hook(raised), None)[1])
        loss = self.loss()
        hook.remove()
        self.tried("a backward that raises", but=tuple(self.calls()), more={"backward": lambda: first.backward(loss)})
        self.tried("after a backward that raised")
        yield "after a backward that raised"

        def aside(*_: Any) -> None:
            thread = threading.Thread(target=lambda: self.tried("on another thread", but=tuple(self.calls()), more=its))
            thread.start()
            thread.join()

        its: Calls = {"forward": lambda: norm_of(module(ids_of(0, self.program.rank)))}
        hook = net.layers[1].register_forward_hook(aside)
        first.backward(self.loss())
        hook.remove()
        yield "on another thread"

        engine = inside.engine(module)
        engine.errors.changed_in_part("made by a test")
        self.tried("after a load in part", more={"step": first.step})
        engine.errors.changed = None
        yield "after a load in part"

    def after_the_end(self) -> None:
        """Closes the model, on several ranks after an error, and tries all once more."""
        with contextlib.suppress(ArithmeticError):
            self.loss(fails=self.program.run.ranks > 1)
        self.module.close()
        ends = {"step": self.first.step, "settle": self.module.settle, "close": self.module.close}
        self.tried("after close", more=ends)

    def train(self) -> list[float]:
        """A step as any other; the numbers say whether what was tried has left something."""
        self.module.zero_grad()
        self.program.number += (count := self.program.run.plan.accumulation)
        batches = [ids_of(self.program.number - micro, self.program.rank) for micro in range(count)]
        losses: list[float] = self.first.accumulate(self.program.passed, batches)
        for each in self.program.optimizers:
            each.step()
        self.module.zero_grad()
        return losses


RECORDED = Path(__file__).with_suffix(".json.xz")
NAMES = tuple(f"calls {number}" for number in (0, 1, 3, 4, 5, 6, 8))


def outcome(name: str, *, whole: bool = False) -> list[list[dict[str, Any]]]:
    """By rank and moment, the answers, and what the next step does; in short, or as a whole."""
    run = Run.of(name)
    with tempfile.TemporaryDirectory(prefix="elixir-recorded-") as folder, recording() as seen, known_memory():

        def work(rank: int) -> list[dict[str, Any]]:
            with seen.of_rank(rank):
                found = list(moments(CallsAnywhere(Program(run, rank, Path(folder), seen))))
            return found if whole else [in_lines(each) for each in found]

        return results(run.ranks, work, timeout_s=TIMEOUT_S) if run.ranks > 1 else [work(0)]


def moments(calls: CallsAnywhere) -> Iterator[dict[str, Any]]:
    program = calls.program
    for _ in calls.moments():
        numbers = calls.train()
        program.module.settle()
        for lane in calls.lanes():
            lane.ask(lambda: None)  # what is recorded on it belongs to this moment
        yield answered(calls, numbers)
    calls.after_the_end()
    yield answered(calls, [])


def answered(calls: CallsAnywhere, numbers: list[float]) -> dict[str, Any]:
    program, answers = calls.program, calls.answers
    report = program.report() if numbers else {}
    numbers, program.found, calls.answers = numbers + program.found, [], {}
    return {
        "answers": answers,
        "events": program.seen.take(program.rank),
        "report": report,
        "numbers": numbers,
        "error": "",
    }


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_answered_as_recorded(name: str) -> None:
    recorded = read_recording(RECORDED)[name]
    for rank, (found, expected) in enumerate(zip(outcome(name), recorded, strict=True)):
        for moment, (here, there) in enumerate(zip(found, expected, strict=True)):
            # Steps of weights that are loaded again and again are far apart in bfloat16, if kernels round differently.
            numbers = pytest.approx(there["numbers"], rel=0.1, abs=0.05, nan_ok=True)
            assert here["numbers"] == numbers, f"rank {rank}, moment {moment}"
            changed = difference(there["lines"], here["lines"])
            assert not changed, f"rank {rank}, moment {moment}\n{changed}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(outcome(sys.argv[1], whole=True), indent=1, default=vars))
    else:
        write_recording(RECORDED, {name: outcome(name) for name in NAMES})
