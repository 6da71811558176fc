"""The weights that running modules and autograd nodes use, on each thread: these stay pinned until they end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elixir.chunk.chunk import Chunk


@dataclass
class ScopeUses:
    """The uses, so far, of a running module or autograd node."""

    pins: list[int] = field(default_factory=list)
    """The pinned chunks, one entry per pin."""
    parameters: set[int] = field(default_factory=set)
    """The parameters of streamed chunks, by `id`."""
    unannounced: list[Chunk] = field(default_factory=list)
    """The resident chunks of a unit, inside of which nothing announces a write."""
    unit: frozenset[int] = frozenset()
    """The parameters of the unit whose backward this is, if it is fetched as one: it lasts over nodes that read these.
    """

    def watch(self, chunks: Iterable[Chunk]) -> None:
        """Notes the chunks of a unit that begins."""
        self.unannounced = [chunk for chunk in chunks if chunk.plan.resident]
        for chunk in self.unannounced:
            chunk.watch_writes()


@dataclass
class ThreadUses:
    """The uses of one thread."""

    scopes: list[ScopeUses] = field(default_factory=list)
    """One per running module, outermost first."""
    node: tuple[int, int] | None = None
    """The backward and the number of the autograd node that ran last. The number alone is not unique: each thread
    counts the nodes that it creates, recomputing threads included."""
    at_node: ScopeUses = field(default_factory=ScopeUses)
