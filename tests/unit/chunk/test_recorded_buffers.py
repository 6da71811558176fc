"""Made-up uses of host buffers, and of states on a disk that pass through them, take, move and wait as was recorded.

A commit that means to change that records them anew and says why:

    python -m tests.unit.chunk.test_recorded_buffers              all of them
    python -m tests.unit.chunk.test_recorded_buffers "lent 3"     prints one, to compare it by hand
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elixir.artifact import digest
from elixir.chunk import host_buffers
from elixir.chunk.host_buffers import BufferKind, HostBuffers
from elixir.chunk.lanes import ThreadLane
from elixir.chunk.memory import Arena, Memory
from elixir.errors import ElixirError
from tests.common.file_faults import UnsyncedFiles
from tests.unit.chunk.test_recorded_gradients import Noted
from tests.unit.chunk.test_state_window import Window

RECORDED = Path(__file__).with_suffix(".json")
NAMES = tuple(f"{what} {number}" for what in ("lent", "kinds", "window") for number in range(15))
CPU = torch.device("cpu")


def lent(draw: random.Random) -> list[Any]:
    """Buffers that take turns, and parts of one."""
    arena, log, messages, lane = Arena(CPU), list[Any](), list[str](), ThreadLane("work")
    buffers, parts, count = HostBuffers(arena), list[Memory](), 0
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    host_buffers.logger.addHandler(handler)

    def kind(name: str) -> BufferKind:
        sizes = [draw.choice((0, 32, 64, 100)), 1 if name == "lent" else draw.randint(1, 3)]
        return BufferKind(name, name, *sizes, at_once=draw.random() < 0.5, paged=draw.random() < 0.5)

    for name in ("lent", "turns"):
        buffers.add(kind(name))
    for _ in range(60):
        what = draw.choice(("take", "lend", "lend", "lend", "give back", "give back", "once", "rare"))
        used = None
        if what == "take":
            used = buffers.take("turns", draw.choice((1, 40, 64, 120, 150)))
        elif what == "lend":
            used = buffers.lend("lent", draw.choice((1, 2, 4, 8, 12, 16, 24, 40)))
            whole = buffers.of("lent")[0].tensor
            begin = used.tensor.data_ptr() - whole.data_ptr()
            parts.append(used)
            log.append(begin if 0 <= begin < whole.nbytes else "elsewhere")
        elif what == "give back" and parts:
            buffers.give_back("lent", parts.pop(draw.randrange(len(parts))))
        elif what == "rare" and draw.random() < 0.3:
            again = kind(draw.choice(("lent", "turns")))
            parts = [] if again.name == "lent" else parts
            draw.choice((buffers.replace, lambda each: (buffers.drop(each.name), buffers.add(each))))(again)
        elif what == "once" and draw.random() < 0.5:
            buffer = buffers.take("turns", draw.choice((16, 80)))
            buffer.tensor.fill_(7)
            buffers.enlarge("turns", buffer, draw.choice((16, 80, 200)))
            log.append(len(buffer.tensor))
        if used is not None and draw.random() < 0.4:
            count += 1
            use = [used]
            lane.submit(int, reads=use if draw.random() < 0.5 else (), writes=use)
            used.writer = Noted(used.writer, count, log)  # type: ignore[arg-type]
        log.append(
            [what, arena.parts("host"), dict(arena.most_bytes), [each.tensor.nbytes for each in buffers.of("turns")]]
        )
    for buffer in (*buffers.of("lent"), *buffers.of("turns")):
        buffer.settle()
    later = Arena(CPU)
    buffers.count_in(later)
    log += [later.parts("host"), buffers.clear(), later.parts("host"), messages]
    host_buffers.logger.removeHandler(handler)
    lane.close()
    return log


def kinds(draw: random.Random) -> list[Any]:
    """The buffers that plans have."""
    found = []
    for _ in range(6):
        chunks = [
            SimpleNamespace(
                numel=draw.choice((64, 96, 256)),
                dtype=draw.choice(("float32", "bfloat16")),
                weight_bytes=draw.choice((64, 128, 512)),
                returns_rounded=draw.random() < 0.4,
                weight_home=draw.choice(("device", "host", "files")),
                state_home=draw.choice(("device", "host", "disk")),
                update_home=draw.choice(("device", "host", "host")),
                trainable=draw.random() < 0.8,
                reduce_order=draw.choice((None, 0, 1)),
            )
            for _ in range(draw.randint(0, 5))
        ]
        step = SimpleNamespace(swap_bytes=draw.randint(0, 99))
        plan: Any = SimpleNamespace(
            chunks=chunks, shards=draw.choice((1, 2, 4)), step=step, extent_bytes=lambda chunk: 3 * chunk.numel
        )
        found += [repr(kind(plan)) for kind in (host_buffers.swapped_kind, host_buffers.staging_kind)]
        found += [repr(kind(plan)) for kind in (host_buffers.file_window_kind, host_buffers.window_kind)]
        for device in ("cpu", "cuda"):
            options = {"backwards": draw.randint(1, 3), "wide": draw.random() < 0.5}
            found.append(repr(host_buffers.summands_kind(plan, device, **options)))  # type: ignore[arg-type]
    return found


def window(draw: random.Random) -> list[Any]:
    """States that are stepped, looked at and written."""
    found, adam = [], ThreadLane("adam")
    with tempfile.TemporaryDirectory() as folder:
        it = Window(Path(folder), UnsyncedFiles())
        for _ in range(14):
            index = draw.randrange(3)
            what = draw.choice(("step", "step", "step", "step", "look", "write", "keep", "settle", "both"))
            chunk, masters = it.chunks[index], it.masters[index]
            error = ""
            try:
                if what == "step":
                    it.step(index, lambda masters=masters: masters.add_(1), adam)  # type: ignore[misc]
                elif what == "keep":
                    with it.window.keeping():
                        for part in range(2):
                            with chunk.in_memory(write=True), chunk.in_memory():
                                masters[part * 500 : (part + 1) * 500] += 3
                elif what == "both":
                    with chunk.in_memory(), it.chunks[(index + 1) % 3].in_memory():
                        pass
                elif what == "settle":
                    it.settle()
                else:
                    with chunk.in_memory(write=what == "write"):
                        error = str([masters.unique().tolist(), chunk.is_at_hand])
                        if what == "write":
                            masters.add_(4)
            except ElixirError as raised:
                error = str(raised)
            seen = [chunk.is_at_hand, masters.isnan().all().item() if what != "step" else None, list(it.submitted)]
            found.append([what, error, *seen, it.arena.parts("host"), it.arena.parts("disk")])
        it.settle()
        found += [it.log, it.moved(), it.values(), str(it.window.lost), it.arena.peak_bytes]
        adam.close()
        later = Arena(CPU)
        it.window.count_in(later)
        found.append(later.parts("disk"))
        it.close()
        found.append(later.parts("disk"))
    return found


def outcomes(name: str) -> list[Any]:
    how = {"lent": lent, "kinds": kinds, "window": window}[name.partition(" ")[0]]
    return json.loads(json.dumps(how(random.Random(name))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NAMES)
def test_a_use_of_buffers_is_as_recorded(name: str) -> None:
    assert digest(outcomes(name)) == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(outcomes(sys.argv[1]), indent=1))
    else:
        rows = [f" {json.dumps(name)}: {json.dumps(digest(outcomes(name)))}" for name in NAMES]
        RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
