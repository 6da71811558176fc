"""The linear program under `benchmark.certificate.lower_bound`: what every plan must do, whatever its chunks.

Rows are explained in docs/appendix/proofs.md, with the proof that each plan satisfies them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from elixir.optimizer_states import MASTER_BYTES, master_bytes
from elixir.search.problem.placement import Floats, Ints
from elixir.search.propose.sizes import MAX_OUTSIZED, Budgets, SearchSpace
from elixir.search.simulator.rates import Rates, main_dtype
from elixir.units import GIB, dtype_bytes

LARGE_PARAMETERS = 16
"""The number of largest parameters with a separate row: a block must hold each of them that is streamed."""
PER_BYTE_S_AT = GIB
"""Collectives are bounded by what more bytes cost beyond these; their latencies are left out."""
KINDS = ("without prefetch", "with prefetch", "one streamed chunk")
"""Every plan is of one kind at least: with prefetch there are two blocks, unless a single chunk is streamed."""
ROUNDING = 1e-9
"""Share by which the bound is lowered, against rounding in its sums."""


class Program:
    """Rows ``a x <= b`` over the columns: per group of parameters, the shares on the device; then single quantities."""

    def __init__(self, space: SearchSpace, budgets: Budgets, kind: str) -> None:
        self.space, self.setting, self.trace, self.kind = space, space.setting, space.trace, kind
        self.world_size = self.setting.world_size
        ranks, moments = self.setting.ranks_per_host, self.setting.moments
        self.rates = Rates(space.hardware, main_dtype(self.trace), self.world_size, ranks, moments=moments)
        self._gather_parameters()
        self._read_compute()
        count = len(self.bytes)
        several = self.world_size > 1
        # Shares: states (and weights) on the device; weights alone; gathered there for good (one rank: all on it).
        self.states, self.weights = np.arange(count), count + np.arange(count)
        self.gathered = 2 * count + np.arange(count) if several else None
        first = (3 if several else 2) * count
        self.blocks, self.grad_blocks, self.in_flight, self.forward, self.backward = range(first, first + 5)
        # Host bytes of one machine that a disk holds instead.
        self.spilled = first + 5 if budgets.disk_bytes else None
        self.columns = first + 5 + (self.spilled is not None)
        self.cost = np.zeros(self.columns)
        self.cost[[self.forward, self.backward]] = 1.0
        self.rows: list[Floats] = []
        self.limits: list[float] = []
        self.names: list[str] = []
        self._homes()
        self._memory(budgets)
        self._forward()
        self._backward()
        self.upper = self._upper(budgets)
        self.units = np.ones(self.columns)
        self.units[[self.blocks, self.grad_blocks]] = self.bytes.sum()
        if self.spilled is not None:
            self.units[self.spilled] = self.bytes.sum()
        self.units[[self.forward, self.backward]] = self.before_s[-1] or 1.0

    def share_on_device(self, solution: Floats) -> float:
        trained = self.numel * self.trained
        return float(solution[self.states] @ trained / max(trained.sum(), 1.0))

    # --- what is there -----------------------------------------------------------------------------------------------

    def _gather_parameters(self) -> None:
        """Parameters that no row can tell apart are one group."""
        table, facts = self.space.table, self.space.facts
        large = sorted(range(len(table.bytes)), key=lambda index: (-table.bytes[index], index))[:LARGE_PARAMETERS]
        groups: dict[tuple[object, ...], list[int]] = {}
        reads = [
            {
                index
                for access in self.trace.accesses
                if (access.phase == "forward") is forward
                for index in access.parameters
            }
            for forward in (True, False)
        ]
        for index, param in enumerate(self.trace.parameters):
            stretch = None if param.grad_access is None else facts.stretch_of[param.grad_access]
            alone = index if index in large else None
            used = tuple(index in some for some in reads)
            groups.setdefault((stretch, param.dtype, param.trainable, used, alone), []).append(index)
        keys, members = list(groups), list(groups.values())
        self.bytes = np.array([sum(table.bytes[i] for i in group) for group in members], dtype=np.float64)
        self.weight_bytes = [dtype_bytes(str(key[1])) for key in keys]
        item = np.array(self.weight_bytes)
        self.numel = self.bytes / item
        self.low_precision = item < MASTER_BYTES
        self.trainable = np.array([bool(key[2]) for key in keys])
        self.trained = np.array([key[0] is not None for key in keys])
        self.stretch: Ints = np.array([-1 if key[0] is None else key[0] for key in keys], dtype=np.int64)
        self.in_forward = np.array([key[3][0] for key in keys])  # type: ignore[index]
        self.in_backward = np.array([key[3][1] for key in keys])  # type: ignore[index]
        self.alone = [number for number, key in enumerate(keys) if key[4] is not None]

    def _read_compute(self) -> None:
        """Computes before every access, where backward begins, and where the last of forward's first uses is."""
        accesses = self.trace.accesses
        self.before_s = np.concatenate(([0.0], np.cumsum(self.rates.accesses_s(self.trace))))
        self.backward_at = next(
            (i for i, event in enumerate(accesses) if event.parameters and event.phase != "forward"), len(accesses)
        )
        first: dict[int, int] = {}
        for index, event in enumerate(accesses[: self.backward_at]):
            for param in event.parameters:
                first.setdefault(param, index)
        self.last_first_use = max(first.values(), default=self.backward_at)
        arrivals = [param.grad_access for param in self.trace.parameters if param.grad_access is not None]
        # A gradient comes at the end of its access.
        until = self.before_s[min(arrivals, default=len(accesses) - 1) + 1]
        self.head_s = max(0.0, float(until - self.before_s[self.backward_at]))

    def _row(self, name: str, limit: float) -> Floats:
        row = np.zeros(self.columns)
        self.rows.append(row)
        self.limits.append(limit)
        self.names.append(name)
        return row

    def _on_host(self, row: Floats, amounts: Floats) -> None:
        """Adds ``amounts`` times the share of the weights that is on the host, the constant being on the other side."""
        row[self.states] -= amounts
        row[self.weights] -= amounts
        self.limits[-1] -= float(amounts.sum())

    def _states_on_host(self, row: Floats, amounts: Floats) -> None:
        row[self.states] -= amounts
        self.limits[-1] -= float(amounts.sum())

    def _streamed(self, row: Floats, amounts: Floats) -> None:
        if self.gathered is None:
            self._on_host(row, amounts)
        else:
            row[self.gathered] -= amounts
            self.limits[-1] -= float(amounts.sum())

    def _upper(self, budgets: Budgets) -> Floats:
        """Ends of the columns. A plan that takes longer than all its work in turn, and twice, is beaten by any
        bound."""
        upper = np.ones(self.columns)
        upper[[self.blocks, self.grad_blocks]] = max(budgets.device_bytes, 0)
        longest_s = sum(abs(limit) for name, limit in zip(self.names, self.limits, strict=True) if ": " in name)
        if self.spilled is not None:
            upper[self.spilled] = budgets.disk_bytes
            longest_s += budgets.disk_bytes * self._disk_byte_s()
        upper[[self.forward, self.backward]] = 1.0 + 2 * longest_s
        return upper

    # --- rows --------------------------------------------------------------------------------------------------------

    def _homes(self) -> None:
        for group in range(len(self.bytes)):
            row = self._row("home", 1.0)
            row[[self.states[group], self.weights[group]]] = 1.0
            if self.gathered is not None:
                row = self._row("gathered", 0.0)
                row[self.gathered[group]] = 1.0
                row[[self.states[group], self.weights[group]]] = -1.0
        used = self.in_forward | self.in_backward
        for group in self.alone if self.kind != KINDS[2] else ():
            if used[group]:
                row = self._row("block", 0.0)
                row[self.blocks] = -1.0
                count = 2 if self.kind == KINDS[1] else 1
                self._streamed(row, np.where(np.arange(len(used)) == group, count * self.bytes, 0.0))
        if self.kind == KINDS[2]:
            row = self._row("block", 0.0)
            row[self.blocks] = -1.0
            self._streamed(row, np.where(used, self.bytes, 0.0))
        self._gradients_on_their_way()

    def _gradients_on_their_way(self) -> None:
        """Whenever a gradient is gathered there is a block for it (an outsized one: with overlap), and one in flight."""
        if self.world_size > 1:
            for column, amount in ((self.in_flight, float(self.trained.any())), (self.grad_blocks, self._pool_bytes())):
                self._row("gradient block", -amount)[column] = -1.0
            return
        for group in self.alone:
            if self.trained[group]:
                for column, amount in ((self.in_flight, 1.0), (self.grad_blocks, self.bytes[group])):
                    if column == self.in_flight or self.setting.overlap:
                        row = self._row("gradient block", 0.0)
                        row[column] = -1.0
                        self._states_on_host(row, np.where(np.arange(len(self.bytes)) == group, amount, 0.0))

    def _pool_bytes(self) -> float:
        """Least bytes of gradient blocks with several ranks.

        A block holds the largest parameter that is not outsized, and the largest outsized one has a separate one.
        With overlap there are two blocks, unless a single chunk holds all the rest.
        """
        parameters, sizes = self.trace.parameters, self.space.table.bytes
        trained = sorted(
            (sizes[i] for i, param in enumerate(parameters) if param.grad_access is not None), reverse=True
        )
        if not trained:
            return 0.0
        blocks = 2 if self.setting.overlap else 1
        found = [min(blocks * trained[0], sum(trained))]
        for outsized in range(1, MAX_OUTSIZED + 1):
            rest = trained[outsized:]
            found.append(trained[0] + min(blocks * max(rest, default=0), sum(rest)))
        return float(min(found))

    def _memory(self, budgets: Budgets) -> None:
        world, facts = self.world_size, self.space.facts
        per_numel = np.array([self.setting.states.least_per_numel(width) for width in self.weight_bytes])
        masters = np.array([master_bytes(width) for width in self.weight_bytes])
        state = np.where(self.trainable, per_numel, 0) * self.numel / world
        master = np.where(self.trainable & self.low_precision, masters, 0) * self.numel / world
        gradient = np.where(self.trained, self.bytes, 0.0) / world
        live = facts.live_bytes + self.trace.buffer_bytes
        for stretch in self._stretches_that_count():
            row = self._row("device memory", float(budgets.device_bytes - live[stretch]))
            # One rank: gradients as they arrive. Several: when their chunk is complete, which may be at the end.
            arrived = self.stretch <= stretch if world == 1 else stretch == facts.stretches - 1
            row[self.states] = self.bytes / world + state + master + np.where(arrived, gradient, 0.0)
            row[self.weights] = self.bytes / world
            if self.gathered is not None:
                row[self.gathered] = self.bytes * (1 - 1 / world)
            row[[self.blocks, self.grad_blocks]] = 1.0
            if facts.first_backward_stretch <= stretch < facts.stretches - 1:
                row[self.in_flight] = facts.arriving_bytes[stretch]
        ranks = self.setting.ranks_per_host
        row = self._row("host memory", float(budgets.host_bytes))
        self._on_host(row, ranks * self.bytes / world)
        self._states_on_host(row, ranks * (state + master + gradient))
        # If its weights are on the device, an fp32 chunk, or a wider one, also keeps a master.
        full = np.where(self.trainable & ~self.low_precision, masters, 0) * self.numel / world
        row[self.weights] += ranks * full
        if self.spilled is not None:
            row[self.spilled] = -1.0
            self._disk(self.spilled, ranks * (state + master), ranks * full)

    def _disk(self, spilled: int, states: Floats, full: Floats) -> None:
        """No more than states can leave the host, and what is updated is read and written in every step."""
        row = self._row("disk", 0.0)
        row[spilled] = 1.0
        self._states_on_host(row, -states)
        row[self.weights] -= full
        per_byte_s = self._disk_byte_s()
        row = self._row("step: disk", float(np.where(self.trained, 0.0, states + full).sum()) * per_byte_s)
        row[[self.forward, self.backward]] = -1.0
        row[spilled] = per_byte_s

    def _disk_byte_s(self) -> float:
        """Seconds of one byte of a machine, there and back; each of its ranks moves its part."""
        return (1 / self.rates.disk_read.per_s + 1 / self.rates.disk_write.per_s) / self.setting.ranks_per_host

    def _stretches_that_count(self) -> list[int]:
        """Gradients only ever get more: a stretch counts where nothing later is as high, its gradient in flight
        included."""
        facts = self.space.facts
        last = facts.stretches - 1
        with_them = facts.live_bytes + facts.arriving_bytes
        found = {last}
        for heights in (facts.live_bytes.tolist(), with_them.tolist()):
            highest, highest_in_backward = heights[last], -1
            for stretch in range(last - 1, -1, -1):
                height, in_backward = heights[stretch], stretch >= facts.first_backward_stretch
                if height > (highest_in_backward if in_backward else highest):
                    found.add(stretch)
                highest = max(highest, height)
                highest_in_backward = max(highest_in_backward, height if in_backward else -1)
        return sorted(found, reverse=True)

    def _forward(self) -> None:
        """The part until backward begins, including the optimizer step before it."""
        rates, world = self.rates, self.world_size
        row = self._row("forward: compute", -self.before_s[self.backward_at])
        row[self.forward] = -1.0
        row[self.states] += np.where(self.trained, self.numel / world / rates.device_adam.per_s, 0.0)
        self._serial_loads(row, self.in_forward)
        self._updates_before_use()
        row = self._row("forward: host to device", 0.0)
        row[self.forward] = -1.0
        self._on_host(row, np.where(self.in_forward, self.bytes / world / rates.fetch.per_s, 0.0))
        if world > 1:
            row = self._row("forward: network", 0.0)
            row[self.forward] = -1.0
            seconds = np.where(self.in_forward, self.bytes * self._per_byte_s(rates.gather), 0.0)
            # Weights that the optimizer steps are gathered after their step if they stay; frozen ones need not be.
            self.limits[-1] -= float(np.where(self.trained, seconds, 0.0).sum())
            self._streamed(row, np.where(self.trained, 0.0, seconds))

    def _updates_before_use(self) -> None:
        """The last update is done before its chunk's first use, from which on there is some forward left."""
        rates, world = self.rates, self.world_size
        left_s = self.before_s[self.backward_at] - self.before_s[self.last_first_use]
        row = self._row("forward: host's Adam", -left_s)
        row[self.forward] = -1.0
        updated = np.where(self.trained & self.in_forward, self.numel / world / rates.host_adam.per_s, 0.0)
        self._states_on_host(row, updated)
        # Weights that live on the device return there, each after its update and during the next.
        row = self._row("forward: refresh", -left_s)
        row[self.forward] = -1.0
        row[self.weights] += np.where(self.trained & self.in_forward, self.bytes / world / rates.fetch.per_s, 0.0)

    def _backward(self) -> None:
        """The part from the start of backward until every gradient is at home."""
        rates, world, seconds = self.rates, self.world_size, self.before_s
        copies = np.where(self.trained, 2 * self.bytes / rates.device_memory.per_s, 0.0)
        for kept in (False, True) if self.kind == KINDS[0] else (False,):
            row = self._row("backward: compute", -(seconds[-1] - seconds[self.backward_at]))
            row[self.backward] = -1.0
            if world == 1:
                self._states_on_host(row, copies)
            else:
                self.limits[-1] -= float(copies.sum())
            if kept:
                self._serial_loads(row, self.in_backward)
                row[self.blocks] -= self._load_per_byte_s()
        # Blocks may keep as many bytes as they have; what else backward uses is brought in again.
        fetched = np.where(self.in_backward, self.bytes / world / rates.fetch.per_s, 0.0)
        row = self._row("backward: host to device", 0.0)
        row[[self.backward, self.blocks]] = -1.0, -1 / world / rates.fetch.per_s
        self._on_host(row, fetched)
        row = self._row("backward: device to host", -self.head_s)
        row[self.backward] = -1.0
        left = np.where(self.trained, self.bytes / world / rates.offload.per_s, 0.0)
        self._states_on_host(row, left)
        if world > 1:
            row[self.states] += np.where(self.trained, 2 * self.bytes / world / rates.device_memory.per_s, 0.0)
            per_byte_s = self._per_byte_s(rates.gather)
            row = self._row("backward: network", 0.0)
            row[[self.backward, self.blocks]] = -1.0, -per_byte_s
            self._streamed(row, np.where(self.in_backward, self.bytes * per_byte_s, 0.0))
            self.limits[-1] -= float(np.where(self.trained, self.bytes, 0.0).sum()) * self._per_byte_s(rates.reduce)

    def _serial_loads(self, row: Floats, used: npt.NDArray[np.bool_]) -> None:
        """Every load keeps compute waiting from beginning to end if nothing is fetched ahead."""
        if self.kind == KINDS[0]:
            self._streamed(row, np.where(used, self.bytes * self._load_per_byte_s(), 0.0))

    def _load_per_byte_s(self) -> float:
        return self._per_byte_s(self.rates.gather) if self.world_size > 1 else 1 / self.rates.fetch.per_s

    def _per_byte_s(self, collective: Callable[[npt.ArrayLike], Floats]) -> float:
        less, more = collective([PER_BYTE_S_AT, 2 * PER_BYTE_S_AT]).tolist()
        return float((more - less) / PER_BYTE_S_AT) * (1 - ROUNDING)
