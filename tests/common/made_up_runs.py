"""Made-up programs that train a small model under a plan by hand, and all that they do between steps."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.checkpoint import load_checkpoint, save_checkpoint, shared_folder
from elixir.errors import ElixirError, InputError
from elixir.hardware.process_memory import Resident
from elixir.plan.plan import Plan
from elixir.search import simple_search
from elixir.units import GIB, MIB
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from elixir.wrapper.account import plan_promise
from elixir.wrapper.account import step_report as step_clock
from tests.common import inside
from tests.common.in_files import HARDWARE
from tests.common.one_pass import plan_for
from tests.common.recording import Recorder, plain
from tests.common.tracing import kernels_not_run

WORDS, WIDTH, RANKS_WIDTH, ROWS = 24, 8, 24, 3
HOMES = (
    (True, "device", "device"), (False, "host", "host"), (True, "device", "host"), (False, "device", "device"),
    (False, "device", "host"), (False, "host", "disk"), (True, "device", "disk"), (False, "device", "disk"),
)  # fmt: skip
"""(resident, home of weights, home of states)."""
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda trained: torch.optim.AdamW(trained, lr=1e-2),
    "SGD": lambda trained: torch.optim.SGD(
        [{"params": trained[::2]}, {"params": trained[1::2], "weight_decay": 0.1}], lr=1e-2, momentum=0.9
    ),
    "Adagrad": lambda trained: torch.optim.Adagrad(trained, lr=1e-2),
}


class Layer(nn.Module):
    """A layer that adds to what it gets."""

    def __init__(self, width: int, checkpointed: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.checkpointed = checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.up(self.norm(x)).tanh())
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)


class Net(nn.Module):
    """Words to words; a head that may be tied, a layer that may be frozen, one that a step may leave out."""

    def __init__(self, draw: random.Random, width: int = WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width, draw.random() < 0.3) for _ in range(draw.choice((2, 3))))
        self.expert = Layer(width, checkpointed=False)
        self.head = nn.Linear(width, WORDS, bias=draw.random() < 0.5)
        if draw.random() < 0.4:
            self.head.weight = self.words.weight
        if draw.random() < 0.4:
            self.layers[0].requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, expert: bool = True, fails: bool = False) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        if fails:
            raise ArithmeticError("made by a test")
        if expert:
            x = self.expert(x)
        found: torch.Tensor = self.head(x)
        return found


def loss_of(model: nn.Module, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(input_ids=ids, **options).float().flatten(0, 1), ids.flatten())


def traced_step(model: nn.Module, inp: dict[str, Any]) -> None:
    loss_of(model, inp["input_ids"]).backward()


def ids_of(number: int, rank: int) -> torch.Tensor:
    return torch.randint(WORDS, (2, ROWS), generator=torch.Generator().manual_seed(100 * number + rank))


@dataclass
class Run:
    """A made-up program."""

    ranks: int
    plan: Plan
    other: Plan
    """The same with other homes."""
    model: nn.Module
    kind: str
    dtype: torch.dtype
    optimizers: int
    options: dict[str, Any]
    max_norm: float | None
    actions: list[tuple[str, ...]]
    """By step, what happens around it."""

    @classmethod
    @kernels_not_run()  # the plan's peak would be this processor's
    def of(cls, name: str) -> Run:
        draw, together = random.Random(name), name.startswith("ranks")  # these have parts of each parameter
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Net(draw, RANKS_WIDTH if together else WIDTH)
        ranks, kind = draw.choice((1, 1, 1, 2)), draw.choice(("AdamW", "AdamW", "AdamW", "SGD", "Adagrad", "Muon"))
        ranks = 2 if together else ranks
        dtype = draw.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
        moments = draw.choice(("float32", "float32", "bfloat16", "8bit")) if kind == "AdamW" else "float32"
        optimizers = draw.choice((1, 1, 1, 2)) if kind != "Muon" else 2
        options: dict[str, Any] = {"unified_dtype": dtype, "moments": moments, "optimizer_type": kind}
        if draw.random() < 0.2 and not together:
            return cls.in_passes(draw, model, moments=moments, optimizer_type=kind)
        plan = simple_search(
            model,
            ranks,
            inp={"input_ids": ids_of(0, 0)},
            step_fn=traced_step,
            hardware=HARDWARE,
            split_number=draw.choice((3, 5)),
            allocate_factor=draw.choice((0.01, 0.4)),
            shard_device="cpu",
            overlap=draw.random() < 0.8,
            frozen_weights="host" if all(each.requires_grad for each in model.parameters()) else "files",
            **options,
        ).plan
        early = optimizers == 1 and kind not in ("Adagrad", "Muon") and draw.random() < 0.4
        plan = replace(
            plan,
            accumulation=draw.choice((1, 1, 2)),
            may_update_early=early,
            predicted=replace(plan.predicted, range_s=None),  # no step is said to be slow
        )
        actions = [tuple(draw.sample(sorted(ACTIONS), draw.choice((0, 1, 2, 3)))) for _ in range(4)]
        actions = WITH_STATES if together else actions
        options = {"prefetch": draw.random() < 0.8, "output_fp32": draw.random() < 0.3}
        options |= {"use_fused_kernels": draw.random() < 0.2, "reduce_always_fp32": draw.random() < 0.5}
        return cls(
            ranks=ranks,
            plan=with_homes(plan, draw, early),
            other=with_homes(plan, draw, early),
            model=model,
            kind=kind,
            dtype=dtype,
            optimizers=optimizers,
            options=options,
            max_norm=draw.choice((None, 1e-3, 1.0, 1e9)),
            actions=actions,
        )

    def optimizers_of(self, module: nn.Module) -> list[torch.optim.Optimizer]:
        """The optimizers in plain PyTorch."""
        named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        if self.kind == "Muon":
            matrices = [each for name, each in named if name.removeprefix("module.") in self.plan.matrices]
            others = [each for name, each in named if name.removeprefix("module.") not in self.plan.matrices]
            return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]
        trained = [each for _, each in named]
        return [OPTIMIZERS[self.kind](trained[first :: self.optimizers]) for first in range(self.optimizers)]

    @classmethod
    def in_passes(cls, draw: random.Random, model: nn.Module, **options: Any) -> Run:
        """One that takes several micro-batches through each layer."""
        for each in model.modules():
            if isinstance(each, Layer):
                each.checkpointed = False
        count = draw.choice((2, 3))
        plan = plan_for(
            model, {"input_ids": ids_of(0, 0)}, lambda model, inp: loss_of(model, inp["input_ids"]), again=True,
            accumulation=count, on_host=draw.random() < 0.5, **options,
        )  # fmt: skip
        plan = replace(plan, predicted=replace(plan.predicted, range_s=None))
        actions = [tuple(name for name in draw.sample(sorted(ACTIONS), 2) if "between" not in name) for _ in range(3)]
        plans = with_homes(plan, draw, early=False), with_homes(plan, draw, early=False)
        kind, limit = options["optimizer_type"], draw.choice((None, 1e-3, 1e9))
        return cls(1, *plans, model, kind, torch.float32, 1 + (kind == "Muon"), {}, limit, actions)


def with_homes(plan: Plan, draw: random.Random, early: bool) -> Plan:
    """The plan with random homes."""
    chunks = []
    for chunk in plan.chunks:
        resident, weights, states = draw.choice(HOMES)
        if chunk.weight_home == "files" and draw.random() < 0.7:
            resident, weights = False, "files"
        states = states if chunk.trainable else weights
        now = early and chunk.trainable and chunk.grad_entry is not None and states == "host"
        update = "early" if now else "after_norm"
        chunks.append(replace(chunk, resident=resident, weight_home=weights, state_home=states, update=update))
    for least in range(1, 2 * len(chunks)):
        blocks = least + draw.choice((0, 0, 1, 2))
        with contextlib.suppress(InputError):
            return replace(plan, chunks=tuple(chunks), block_count=blocks, prefetch_depth=draw.randint(0, 2))
    raise AssertionError("no number of blocks is enough")


class Noted(deque[str]):
    """Counts what lanes append, at whatever moment a report takes it."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def append(self, form: str) -> None:
        self.counts[form if form in ("by its class", "copied") else "by its rule"] += 1  # kernels differ by processor
        super().append(form)


class Program:
    """One rank of a run."""

    def __init__(self, run: Run, rank: int, folder: Path, seen: Recorder) -> None:
        self.run, self.rank, self.folder, self.seen, self.number = run, rank, folder, seen, 0
        self.found: list[Any] = []
        self.forms = Counter[str]()
        seen.mark(self)
        (folder / f"disk-{rank}").mkdir()
        frozen = {
            name: each.detach().to(run.dtype) for name, each in run.model.named_parameters() if not each.requires_grad
        }
        save_file(frozen, folder / f"disk-{rank}" / "frozen.safetensors")
        files = folder / f"disk-{rank}" if frozen else None
        self.module = ElixirModule(
            copy.deepcopy(run.model), run.plan, device="cpu", disk_folder=folder / f"disk-{rank}",
            debug=Debug(poison=True), weights=files, strict=False, reserve=3 * MIB, between_steps=2 * MIB, **run.options,
        )  # fmt: skip
        self.optimizers = [
            ElixirOptimizer(self.module, each, max_norm=run.max_norm, initial_scale=2.0**10)
            for each in run.optimizers_of(self.module)
        ]

        inside.engine(self.module).host_forms = Noted(self.forms)

    def step(self, actions: tuple[str, ...]) -> None:
        """One step, with what happens before its micro-batches, between them and after it."""
        module, first = self.module, self.optimizers[0]
        for action in actions:
            if action.startswith("before"):
                ACTIONS[action](self)
        count = self.run.plan.accumulation + ("one more" in actions)
        if self.run.plan.pass_size > 1:
            batches = [ids_of(self.number + micro, self.rank) for micro in range(self.run.plan.accumulation)]
            self.number += len(batches)
            self.found += first.accumulate(self.passed, batches)
            count = 0
        for micro in range(count):
            self.number += 1
            loss = loss_of(module, ids_of(self.number, self.rank), expert="no expert" not in actions)
            loss = loss * (float("inf") if "overflow" in actions and self.run.dtype == torch.float16 else 1.0)
            self.found.append(loss.item())
            if "twice" in actions:
                first.backward(loss, retain_graph=True)
            first.backward(loss)
            if micro == 0:
                for action in actions:
                    if action.startswith("between"):
                        ACTIONS[action](self)
        if "clip" in actions:
            self.found.append(float(module.clip_grad_norm_(0.5)))
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            if "zeros" in actions:
                self.attempt(lambda each=optimizer: each.zero_grad(set_to_none=False))
            optimizer.zero_grad()
        for action in actions:
            if action.startswith("after"):
                ACTIONS[action](self)

    def passed(self, module: nn.Module, ids: torch.Tensor) -> float:
        """One micro-batch of a pass."""
        loss = loss_of(module, ids)
        self.optimizers[0].backward(loss)
        return loss.item()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.found.append(loss_of(self.module, ids_of(0, self.rank)).item())

    def fail(self) -> None:
        with pytest.raises(ArithmeticError):
            loss_of(self.module, ids_of(0, self.rank), fails=True)

    def show(self) -> None:
        with self.module.gathered(self.module.module.head):
            self.found.append(norm_of(self.module.module.head.weight.detach()))

    def write(self) -> None:
        with self.module.gathered(self.module.module.words, write=True), torch.no_grad():
            self.module.module.words.weight.mul_(1.5)

    def read(self) -> None:
        self.found.append(norm_of(self.module.state_dict(rank0_only=True)))

    def load(self) -> None:
        trained = {name for name, each in self.module.module.named_parameters() if each.requires_grad}
        state = self.module.state_dict()
        self.module.load_state_dict({name: each * (0.5 if name in trained else 1) for name, each in state.items()})

    def rehome(self) -> None:
        self.module.rehome(self.run.other if self.module.plan == self.run.plan else self.run.plan)

    def read_states(self) -> None:
        self.found += [norm_of(optimizer.state_dict()) for optimizer in self.optimizers]

    def load_states(self) -> None:
        for optimizer in self.optimizers:
            optimizer.load_state_dict(optimizer.state_dict())

    def save(self) -> None:
        state: dict[str, Any] = {"model": self.module, "step": self.number}
        state |= {f"optimizer {number}": each for number, each in enumerate(self.optimizers)}
        folder = str(self.folder / f"saved-{self.number}")
        self.module.settle()  # what a save waits for otherwise depends on what is over by then
        save_checkpoint(folder, state, wait=self.number % 2 == 0)
        load_checkpoint(folder, state)

    def ask(self) -> None:
        self.found.append(inside.spare_host_bytes(self.module))

    def clip_in_vain(self) -> None:
        self.optimizers[0].backward(loss_of(self.module, ids_of(0, self.rank)))
        self.found.append(float(self.module.clip_grad_norm_(1e-4)))
        self.module.zero_grad()

    def call_parts(self) -> None:
        net = self.module.module
        with torch.no_grad():
            x = net.expert(net.layers[1](net.words(ids_of(0, self.rank))))
            self.found.append(norm_of(x))
            self.found += [norm_of(net(ids_of(number, self.rank))) for number in (0, 1)]

    def drop(self) -> None:
        self.module.module.head.weight.grad = None

    def attempt(self, *what: Callable[[], Any]) -> None:
        """Does what may be refused, and notes the refusals."""
        for each in what:
            try:
                with torch.no_grad():
                    each()
            except (ElixirError, RuntimeError) as error:
                self.seen.note(self, "refusals", plain(str(error)))

    def mistake(self) -> None:
        net = self.module.module
        self.attempt(
            lambda: net.words.weight.norm(),
            lambda: net.head.weight.mul_(1.0),
            lambda: setattr(net.head.weight, "data", torch.zeros(WORDS, WIDTH)),
            lambda: self.found.append(norm_of(net.words.weight.grad)),
            lambda: self.module.rehome(self.run.other),
            lambda: self.module.double(),
            lambda: self.module.load_state_dict({}),
        )

    def lack(self) -> None:
        """Switches plans where memory is scarce."""
        free_bytes.here = 1000
        self.attempt(lambda: self.module.rehome(self.run.other))
        free_bytes.here = 3 * GIB

    def report(self) -> dict[str, Any]:
        """All that the last step says of itself, apart from seconds and sentences."""
        report = self.module.last_report
        if report is None:
            return {}
        timed = ("waited_s", "busy_s", "step_s", "grad_norm", "host_forms", "predicted_step_s", "outgrown")
        fields = {each.name: getattr(report, each.name) for each in dataclasses.fields(report)}
        found = {name: value for name, value in fields.items() if name not in timed}
        found["span"] = None if report.span is None else report.span.seconds()
        found |= {"surprises": report.surprises(), "numbers": sorted(report.to_dict())}
        found["numbers"] = [name for name in found["numbers"] if not name.startswith("waited")]
        if report.grad_norm is not None:
            self.found.append(float(report.grad_norm))
        arena = inside.arena(self.module)
        found["memory"] = [arena.parts("device"), arena.parts("host"), arena.parts("disk")]
        for each in (found["observed"], found["surprises"]):
            each.pop("host_peak", None)  # what else was there when states were made
        return found


def norm_of(state: Any) -> float:
    """The norm of all numbers in a state dict."""
    if isinstance(state, torch.Tensor):
        return float(state.double().norm())
    if isinstance(state, dict):
        return sum(norm_of(each) ** 2 for each in state.values()) ** 0.5
    if isinstance(state, (list, tuple)):
        return sum(norm_of(each) ** 2 for each in state) ** 0.5
    return 0.0


ACTIONS: dict[str, Callable[[Program], Any]] = {
    "before: evaluate": Program.evaluate,
    "before: fail": Program.fail,
    "before: save": Program.save,
    "between: evaluate": Program.evaluate,
    "between: show": Program.show,
    "before: call parts": Program.call_parts,
    "before: clip in vain": Program.clip_in_vain,
    "between: read": Program.read,
    "between: drop": Program.drop,
    "between: mistake": Program.mistake,
    "after: mistake": Program.mistake,
    "after: lack": Program.lack,
    "after: show": Program.show,
    "after: write": Program.write,
    "after: load": Program.load,
    "after: rehome": Program.rehome,
    "after: rehome again": Program.rehome,
    "after: read states": Program.read_states,
    "after: load states": Program.load_states,
    "after: save": Program.save,
    "after: settle": lambda program: program.module.settle(),
    "after: ask": Program.ask,
    "overflow": lambda program: None,
    "silent": lambda program: None,  # does nothing; later draws are the recorded ones
    "no expert": lambda program: None,
    "twice": lambda program: None,
    "one more": lambda program: None,
    "clip": lambda program: None,
    "zeros": lambda program: None,
}


WITH_STATES: list[tuple[str, ...]] = [
    ("after: read states", "after: rehome"), ("after: save", "no expert"), ("after: load states", "between: show"),
    ("before: save", "after: rehome", "clip"), ("after: load", "after: rehome again", "after: save"),
]  # fmt: skip


class FreeBytes(threading.local):
    here = 3 * GIB


class Ticks(threading.local):
    """A clock of each thread that goes on by a second whenever it is read."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


free_bytes = FreeBytes()
"""Free memory of the machine, as each rank reads it."""


@contextlib.contextmanager
def known_memory() -> Iterator[None]:
    """Has this process and its machine hold the same memory in each run, steps take as long, and saves no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_promise, "resident", lambda: Resident(200 * MIB, 100 * MIB, 310 * MIB))
        patch.setattr(plan_promise, "free_host_bytes", lambda: free_bytes.here)
        patch.setattr(step_clock, "time", Ticks())
        patch.setattr(shared_folder, "time", SimpleNamespace(monotonic=lambda: 0.0))  # a slow one takes more rounds
        inside.forget(patch, "promises")
        yield
