"""Records what the runtime does: states of chunks, work of lanes, collectives, counted memory, and messages."""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import json
import logging
import lzma
import re
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elixir.chunk.chunk import Chunk
from elixir.chunk.gradients.chunk_gradient import ChunkGradient
from elixir.chunk.group import Group
from elixir.chunk.lanes import ThreadLane, _ThreadTicket
from elixir.chunk.memory import Arena
from elixir.hardware import process_memory
from elixir.hardware.process_memory import HeapLimit
from elixir.wrapper.phase import StepPhase
from elixir.wrapper.weight_uses import WeightUses

_MARK = "elixir_test_rank"
SECONDS = re.compile(r"[-+\d.e]+ (?:m|u|n)?s\b|[\d.]+ times|load \d+ on \d+ cores")
"""Figures in messages that differ from run to run."""
_MOST_LINES = 60
"""The most lines of a difference that are shown."""
CHANGING = re.compile(rf"threads of the host's Adam: .*|0x[0-9a-f]+|{tempfile.gettempdir()}/\S+")


class Recorder(logging.Handler):
    """The events of each rank, by what they are of, each kind in its own order: threads of one rank take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.events: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._here = threading.local()

    @contextlib.contextmanager
    def of_rank(self, rank: int) -> Iterator[None]:
        """Says whose objects this thread makes."""
        self._here.rank = rank
        try:
            yield
        finally:
            del self._here.rank

    def mark(self, made: Any) -> None:
        """Notes whose object this is."""
        setattr(made, _MARK, getattr(self._here, "rank", None))

    def note(self, of: Any, kind: str, event: str) -> None:
        """Records an event of an object."""
        rank = getattr(of, _MARK, None)
        if rank is not None:
            self.events[rank][kind].append(event)

    def say(self, event: str) -> None:
        """Records what the thread of a rank does that this machine need not show: waits for streams, and for the heap,
        and for checkpoints that still read."""
        rank = getattr(self._here, "rank", None)
        if rank is not None:
            self.events[rank]["thread"].append(event)

    def emit(self, record: logging.LogRecord) -> None:
        rank = getattr(self._here, "rank", None)
        if rank is not None:
            self.events[rank]["messages"].append(f"{record.levelname} {plain(record.getMessage())}")

    @property
    def is_rank(self) -> bool:
        """Whether this thread is a rank's own."""
        return hasattr(self._here, "rank")

    def take(self, rank: int) -> dict[str, list[str]]:
        """The events of a rank since they were last taken."""
        return dict(sorted(self.events.pop(rank, {}).items()))


def in_lines(step: dict[str, Any]) -> dict[str, Any]:
    """A step as it is recorded: its numbers, and a line for each event, each answer and each field of the report."""
    lines = [f"{kind}: {event}" for kind, each in step["events"].items() for event in each]
    for part in ("answers", "report"):
        fields = json.loads(json.dumps(step.get(part, {}), default=vars))
        lines += [f"{part} {name}: {json.dumps(value)}" for name, value in fields.items()]
    return {"numbers": [float(f"{number:.4g}") for number in step["numbers"]], "lines": [*lines, step["error"]]}


def difference(there: list[str], here: list[str]) -> str:
    """The first lines that are not as recorded; empty if there are none."""
    changed = difflib.unified_diff(there, here, "recorded", "here", n=2, lineterm="")
    return "\n".join(itertools.islice(changed, _MOST_LINES))


@functools.cache
def read_recording(path: Path) -> dict[str, Any]:
    """Reads what `write_recording` has written."""
    found: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
    return found


def write_recording(path: Path, found: dict[str, Any]) -> None:
    """Writes a recording, compressed: whole events take as few bytes as digests of them, and show what differs."""
    path.write_bytes(lzma.compress(json.dumps(found, indent=1).encode(), preset=9))


def plain(message: str) -> str:
    """A message without what differs from run to run."""
    return CHANGING.sub("...", SECONDS.sub("...", message))


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Records all that objects do that ranks make inside of this."""
    seen = Recorder()

    def marked(kind: type) -> None:
        made = kind.__init__  # type: ignore[misc]

        def init(self: Any, *args: Any, **options: Any) -> None:
            seen.mark(self)
            made(self, *args, **options)

        patch.setattr(kind, "__init__", init)

    to, put, count, issuing, turn = Chunk.to, ThreadLane._put, Arena.count, Group._issuing, ChunkGradient.to

    def went(self: Chunk, state: Any, memory: Any = None) -> None:
        seen.note(self, "chunks", f"{self.index} {state.value} {self.pins}")
        to(self, state, memory)

    def turned(self: ChunkGradient, state: Any) -> None:
        seen.note(self, f"gradient {self.chunk.index}", state.value)
        turn(self, state)

    def submitted(self: ThreadLane, work: Any, filling: Any, using: Any, nbytes: int) -> Any:
        who = "" if seen.is_rank else " by a lane"
        seen.note(self, f"{self._thread.name}{who}", f"{len(filling) + len(using)} {nbytes}")
        return put(self, work, filling, using, nbytes)

    def waited(self: _ThreadTicket) -> None:
        if seen.is_rank:
            seen.note(self._lane, "waits", self._lane._thread.name)
        wait(self)

    def counted(self: Arena, nbytes: int, home: Any, kind: str) -> None:
        seen.note(self, f"{kind} on {home}", f"{nbytes:+}")
        count(self, nbytes, home, kind)

    @contextlib.contextmanager
    def issued(self: Group, what: str) -> Iterator[None]:
        seen.note(self, "collectives", what)
        with issuing(self, what):
            yield

    def trimmed(pad: int) -> None:
        seen.say("give back")

    def follow(kind: type, name: str, said: Callable[..., str]) -> None:
        """Notes the calls of a method that the thread of a rank makes."""
        method = getattr(kind, name)

        def called(self: Any, *args: Any, **options: Any) -> Any:
            seen.say(f"{name} {said(self, *args)}")
            return method(self, *args, **options)

        patch.setattr(kind, name, called)

    wait = _ThreadTicket.synchronize
    logger = logging.getLogger("elixir")
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Chunk, ThreadLane, Arena, Group, ChunkGradient):
            marked(kind)
        patch.setattr(Chunk, "to", went)
        patch.setattr(ThreadLane, "_put", submitted)
        patch.setattr(_ThreadTicket, "synchronize", waited)
        patch.setattr(_ThreadTicket, "wait", waited)
        patch.setattr(Arena, "count", counted)
        patch.setattr(Group, "_issuing", issued)
        patch.setattr(ChunkGradient, "to", turned)
        for name in ("about_to_write", "synchronize_weights", "follow_writes", "watch_writes", "check_unwritten"):
            follow(Chunk, name, lambda chunk: str(chunk.index))
        follow(WeightUses, "order_compute", lambda uses: "")
        follow(StepPhase, "to", lambda phase, now: now.value)
        # What the heap holds differs from run to run, and so would what is given back.
        for name in ("trim_if_over", "forward_begins"):  # what other tests have left in the heap counts for neither
            patch.setattr(HeapLimit, name, lambda heap, coming_bytes=0: seen.say(f"look {coming_bytes}"))
        patch.setattr(HeapLimit, "set", lambda heap, *expected: seen.say("limit"))
        patch.setattr(process_memory, "ctypes", SimpleNamespace(CDLL=lambda name: SimpleNamespace(malloc_trim=trimmed)))
        before = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(seen)
        try:
            yield seen
        finally:
            logger.removeHandler(seen)
            logger.setLevel(before)
