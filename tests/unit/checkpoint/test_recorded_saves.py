"""Checkpoints of made-up runs are those that were recorded: files, bytes, index, notes, messages and refusals.

A commit that means to change them records them anew and says why:

    python -m tests.unit.checkpoint.test_recorded_saves             all of them
    python -m tests.unit.checkpoint.test_recorded_saves "save 3"    prints one, to compare it by hand
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.artifact import digest
from elixir.checkpoint import Checkpoints
from elixir.checkpoint_format.export import export_hf
from elixir.checkpoint_format.folders import find_checkpoints, one_checkpoint, read_index, remove_checkpoint
from elixir.checkpoint_format.slice_reader import SavedCheckpoint, open_checkpoint, verify
from elixir.errors import ElixirError
from tests.common.made_up_runs import Program, Run, known_memory, norm_of
from tests.common.rank_threads import results
from tests.common.recording import Recorder, plain, recording

RECORDED = Path(__file__).with_suffix(".json")
NAMES = tuple(f"save {number}" for number in range(14))
CHANGING = re.compile(r"[0-9a-f]{8,}|(?<=column )\d+|(?<=char )\d+")
"""Checksums of weights, whose last bits differ by processor, random names of checkpoints, and places after those."""


class Saved:
    """A program that saves twice, and all that is made of it."""

    def __init__(self, program: Program, draw: random.Random, root: Path) -> None:
        self.program, self.draw, self.root, self.found = program, draw, root, dict[str, Any]()
        self.options: dict[str, Any] = {"keep": draw.choice((1, 2, None)), "wait": draw.random() < 0.5}
        self.options["frozen"] = draw.random() < 0.6

    def state(self) -> dict[str, Any]:
        program = self.program
        named = {f"optimizer {number}": each for number, each in enumerate(program.optimizers)}
        values = {"epoch": 3, "nested": [{"a": (1, 2.5, None)}, {4: b"x", "t": torch.arange(6).view(2, 3)}], "lr": 0.5}
        return {"model": program.module, **named, **values}

    def attempt(self, name: str, what: Callable[[], Any]) -> None:
        """Notes an outcome, or how it is refused."""
        try:
            found = what()
        except ElixirError as error:
            found = [type(error).__name__, *map(cleaned, str(error).splitlines())]
        self.found[name] = found

    def run(self) -> None:
        found, program = self.found, self.program
        with Checkpoints(self.root, **self.options) as checkpoints:

            def load(state: dict[str, Any], **options: Any) -> list[Any] | None:
                loaded = checkpoints.load(state, **options)
                return loaded and [loaded.step, loaded.sequence, loaded.world_size, *map(cleaned, loaded.notes)]

            self.attempt("nothing", lambda: load(self.state()))
            for step in (1, 2, 5):
                program.step(())
                self.attempt(f"save {step}", partial(lambda step: checkpoints.save(step, self.state()).nbytes, step))
            checkpoints.close()
            found["steps"] = [checkpoints.steps(), cleaned(str(checkpoints.latest()))]
            state = self.state()
            self.attempt("load", lambda: load(state))
            found["nested"] = repr(state["nested"])
            part = {name: each for name, each in state.items() if self.draw.random() < 0.6 or name == "model"}
            for strict in (True, False):
                self.attempt(f"part, strict {strict}", partial(load, part | {"more": 7}, strict=strict))
            self.attempt("an older one", lambda: load(state, step=2))
            self.attempt("missing", lambda: load(state, step=4))
            self.attempt("other homes", lambda: program.module.rehome(program.run.other))
            self.attempt("load with them", lambda: load(state))
        found["numbers"] = [norm_of(each.state_dict()) for each in (program.module, *program.optimizers)]

    def look(self) -> None:
        """Notes what one process sees without a model."""
        found = self.found
        sizes = {path: path.stat().st_size for path in sorted(self.root.rglob("*.safetensors"))}
        found["files"] = [f"{cleaned(str(path.relative_to(self.root)))} {nbytes}" for path, nbytes in sizes.items()]
        folder = one_checkpoint(self.root)
        index = json.loads(read_index(folder).to_json())
        index["rng"] = len(index["rng"])  # where the process is in its random numbers
        found["index"] = cleaned(json.dumps(index, sort_keys=True))
        found["verified"] = [str(each) for each in verify(folder)]
        found["folders"] = [len(each) for each in find_checkpoints(self.root)]
        with open_checkpoint(folder) as saved:
            self.attempt("opened", lambda: opened(saved))
            keys = [key for key in saved.index.tensors if not key.startswith("value/rng")]
            found["numbers"] = [float(saved.read_float32(key, 1).norm()) for key in keys]
        self.attempt("exported", lambda: exported(folder, self.root / "out", self.draw))
        for path in sorted(folder.glob("*.safetensors")):
            self.damage(path)
        found["removed"] = [remove_checkpoint(folder), folder.exists()]

    def damage(self, path: Path) -> None:
        """Changes a byte of a file, cuts it, takes it away, and mends it."""
        raw = path.read_bytes()
        at = self.draw.randrange(len(raw))
        ways = {
            "changed": raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :],
            "cut": raw[:-3],
            "gone": None,
            "mended": raw,
        }
        for way, bad in ways.items():
            path.unlink(missing_ok=True)
            if bad is not None:
                path.write_bytes(bad)
            self.attempt(f"{cleaned(path.name)} {way}", lambda: [cleaned(str(each)) for each in verify(path.parent)])


def opened(saved: SavedCheckpoint) -> list[Any]:
    """All that the reader of one checkpoint gives."""
    weights = saved.weights()
    states = {name: saved.optimizer_state_dict(name) for name in saved.index.optimizers}
    form = {name: [sorted(map(str, each["state"])), repr(each["param_groups"])] for name, each in states.items()}
    values = [repr(saved.value(name)) for name in saved.value_names()]
    return [saved.step, list(weights), form, values, [str(each.dtype) for each in weights.values()]]


def exported(folder: Path, out: Path, draw: random.Random) -> list[Any]:
    export_hf(folder, out, dtype=draw.choice((None, "bfloat16")), max_shard_size=draw.choice((600, 2000, "5GB")))
    found = sorted(out.iterdir())
    return [[path.name, path.stat().st_size, path.read_text() if path.suffix == ".json" else ""] for path in found]


def cleaned(text: str) -> str:
    """A text without paths, checksums and names that differ from run to run."""
    return CHANGING.sub("#", plain(text))


def outcome(name: str) -> dict[str, Any]:
    """All that was found, in short."""
    found = whole(name)
    return {key: each if key == "numbers" else digest(json.loads(json.dumps(each)))[:6] for key, each in found.items()}


def whole(name: str) -> dict[str, Any]:
    """All that was found: by the ranks, and by one process afterwards."""
    draw = random.Random(name)
    run = Run.of(name)
    with tempfile.TemporaryDirectory(prefix="elixir-recorded-") as folder, recording() as seen, known_memory():
        root = Path(folder) / "run"

        def work(rank: int) -> tuple[Saved, list[str]]:
            with seen.of_rank(rank):
                return saved(Program(run, rank, Path(folder), seen), random.Random(name), root, seen)

        ranks = results(run.ranks, work) if run.ranks > 1 else [work(0)]
        first = Saved(ranks[0][0].program, draw, root)
        first.look()
        found = {f"rank {rank}: {key}": each for rank, (it, _) in enumerate(ranks) for key, each in it.found.items()}
        found |= {f"rank {rank}: messages": messages for rank, (_, messages) in enumerate(ranks)}
    found |= first.found
    numbers = [found.pop(key) for key in sorted(found) if key.endswith("numbers")]
    found["numbers"] = [[float(f"{number:.4g}") for number in each] for each in numbers]
    return found


def saved(program: Program, draw: random.Random, root: Path, seen: Recorder) -> tuple[Saved, list[str]]:
    it = Saved(program, draw, root)
    it.run()
    program.module.close()
    messages = map(cleaned, seen.take(program.rank).get("messages", []))
    return it, [message for message in messages if "differs from its plan" not in message]


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_as_recorded(name: str) -> None:
    recorded = json.loads(RECORDED.read_text())[name]
    found = outcome(name)
    for here, there in zip(found.pop("numbers"), recorded.pop("numbers"), strict=True):
        assert here == pytest.approx(there, rel=5e-2, abs=1e-4)
    assert found == recorded


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(whole(sys.argv[1]), indent=1))
    else:
        rows = [f" {json.dumps(name)}: {json.dumps(outcome(name))}" for name in NAMES]
        RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
