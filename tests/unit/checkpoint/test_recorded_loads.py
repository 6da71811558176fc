"""Loads of checkpoints that differ from the run in made-up ways refuse, note and bring back what was recorded.

A commit that means to change what a load takes records them anew and says why:

    python -m tests.unit.checkpoint.test_recorded_loads             all of them
    python -m tests.unit.checkpoint.test_recorded_loads "load 3"    prints one, to compare it by hand
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.artifact import digest
from elixir.checkpoint import PerRank, load_checkpoint, save_checkpoint
from elixir.errors import ElixirError
from elixir.wrapper.loss_scale import LossScale
from tests.common import gpu
from tests.common.file_faults import UnsyncedFiles
from tests.common.parity import case, make_plan
from tests.common.resuming import Run, differing, two_groups
from tests.unit.checkpoint.test_checked_loads import edited

RECORDED = Path(__file__).with_suffix(".json")
NAMES = tuple(f"load {number}" for number in range(40))
FILES = UnsyncedFiles()
LOGGER = logging.getLogger("elixir.checkpoint.loading")
Body = dict[str, Any]
EMPTY = {"dtype": "float32", "shape": [0], "order": None, "block_numel": None, "pieces": []}
"""A tensor without elements, as the index has it."""


def pick(draw: random.Random, body: Body, kind: str) -> str:
    """A tensor of a kind."""
    return draw.choice(sorted(key for key in body["tensors"] if key.startswith(f"{kind}/")))


def lose_parameter(draw: random.Random, body: Body) -> None:
    name = pick(draw, body, "weight").partition("/")[2]
    body["tensors"] = {key: each for key, each in body["tensors"].items() if key.partition("/")[2] != name}
    body["steps"].pop(name, None)
    for group in body["param_groups"]:
        group["names"] = [each for each in group["names"] if each != name]


def more_parameters(draw: random.Random, body: Body) -> None:
    for number in range(draw.choice((1, 7))):
        body["tensors"][f"weight/9.{number}"] = EMPTY


def other_shape(draw: random.Random, body: Body) -> None:
    body["tensors"][pick(draw, body, draw.choice(("weight", "buffer")))]["shape"].append(1)


def other_buffers(draw: random.Random, body: Body) -> None:
    if draw.random() < 0.5:
        del body["tensors"][pick(draw, body, "buffer")]
    else:
        body["tensors"]["buffer/9.mean"] = EMPTY


def other_optimizer(draw: random.Random, body: Body) -> None:
    (said,) = body["optimizers"].values()
    said["class"] = draw.choice(("AdamW", "Adam", "HybridAdam", "SGD"))
    names = draw.choice((["other"], ["one", "two"], ["optimizer", "more"]))
    body["optimizers"] = dict.fromkeys(names, said)
    for group in body["param_groups"]:
        group["optimizer"] = names[0]


def other_groups(draw: random.Random, body: Body) -> None:
    first, second = body["param_groups"]
    if draw.random() < 0.5:
        first["names"] += second["names"]  # all parameters of each group are in one that was saved
        body["param_groups"] = [first]
    else:
        second["names"].append(first["names"].pop())


def other_values(draw: random.Random, body: Body) -> None:
    if draw.random() < 0.5:
        del body["values"][draw.choice(sorted(body["values"]))]
    else:
        body["rank_values"] = draw.choice(([], [{}], [{"order": 3, "more": 4}]))


def other_ranks(draw: random.Random, body: Body) -> None:
    body["world_size"] = 2
    body["rng"] *= 2
    body["rank_values"] *= 2


EDITS: tuple[Callable[[random.Random, Body], None], ...] = (
    lose_parameter, more_parameters, other_shape, other_buffers, other_optimizer, other_groups, other_values,
    other_ranks,
    lambda _, body: body.update(has_frozen=False),
    lambda _, body: body.update(loss_scale=LossScale(True, 4.0, 1).state()),
    lambda _, body: body.update(rng=[]),
)  # fmt: skip


class Runs(contextlib.AbstractContextManager["Runs"]):
    """A run, and what was saved of it after one step and after two."""

    def __init__(self, folder: Path) -> None:
        self.folder, it = folder, case("cnn")
        it.model[8].bias.requires_grad_(False)
        self.run = Run(it, make_plan(it, "mixed"), two_groups())
        self.bits = []
        for number in range(2):
            self.run.train(1)
            save_checkpoint(folder / str(number), self.state(0.1), wait=True, files=FILES)
            self.bits.append(self.run.bits())

    def __exit__(self, *_: object) -> None:
        self.run.module.close()

    def state(self, value: float, **more: Any) -> dict[str, Any]:
        return self.run.state(ema=torch.full((4,), value), order=PerRank([value]), count=value, **more)

    def outcome(self, name: str) -> list[Any]:
        """Says what a load of the first checkpoint leads to, after one of the second."""
        draw, before = random.Random(name), self.folder / "edited"
        shutil.copytree(self.folder / "0", before)
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        try:
            load_checkpoint(self.folder / "1", self.state(0.0), files=FILES)
            made = draw.sample(EDITS, draw.choice((0, 1, 1, 2)))
            edited(before, lambda body: [edit(draw, body) for edit in made])
            if draw.random() < 0.25:
                next(before.glob("*-rank-*")).unlink()
            state = self.state(0.0, **({"more": 3} if draw.random() < 0.2 else {}))
            for left_out in draw.sample(("optimizer", "ema", "order", "count"), draw.choice((0, 0, 0, 1))):
                del state[left_out]
            if "ema" in state:
                state["ema"] = state["ema"].to(draw.choice((torch.float32, torch.float64, torch.bfloat16)))
            level, said = LOGGER.level, []
            LOGGER.setLevel(logging.INFO)
            LOGGER.addHandler(handler)
            try:
                loaded = load_checkpoint(
                    before, state, strict=draw.random() < 0.5, rng=draw.random() < 0.7, files=FILES
                )
                said = [*loaded.notes, loaded.exact, loaded.step, loaded.world_size]
            except ElixirError as error:
                said = [type(error).__name__, str(error), getattr(error, "missing", None)]
                said += [getattr(error, "unexpected", None), str(getattr(error, "shapes", None))]
            finally:
                LOGGER.removeHandler(handler)
                LOGGER.setLevel(level)
        finally:
            shutil.rmtree(before)
        values = [str(getattr(state.get(key), "value", state.get(key))) for key in ("count", "ema", "more", "order")]
        try:
            changed = [differing(bits, self.run.bits()) for bits in self.bits]
        except ElixirError as error:  # half of a load
            changed = [[str(error)]]
        found = [said, messages, values, changed]
        text = re.sub(r"\b[0-9a-f]{16}\b", "id", json.dumps(found).replace(str(self.folder), ""))
        return json.loads(text)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("loads")) as made:
        yield made


@gpu.on_the_cpu("recorded there: on another device others of the random numbers are noted")
@pytest.mark.parametrize("name", NAMES)
def test_a_load_is_as_recorded(name: str, runs: Runs) -> None:
    assert digest(runs.outcome(name)) == json.loads(RECORDED.read_text())[name]
    assert runs.run.optimizer.loss_scale == 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary, Runs(Path(temporary)) as made:
        if len(sys.argv) > 1:
            print(json.dumps(made.outcome(sys.argv[1]), indent=1))
        else:
            rows = [f" {json.dumps(name)}: {json.dumps(digest(made.outcome(name)))}" for name in NAMES]
            RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
