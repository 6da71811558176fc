"""A plan's numbers worked out again from the plan and its trace alone, access by access; shares no code with the
search.

The formulas are those of `docs/appendix/formulas.md`. Slow and plain on purpose: no slots, no prefix sums, no bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from elixir.plan.plan import Plan
from elixir.step_trace import StepTrace

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
FP32_BYTES = 4
WINDOW, DISK_BLOCK_BYTES = 3, 4096
"""Buffers through which states on a disk pass, at most; what their extents are rounded up to."""
FILE_BUFFERS = 2
"""Buffers through which weights from files pass, at most."""


@dataclass(frozen=True)
class Recount:
    """The numbers that a plan should have predicted."""

    device_peak_bytes: int
    host_peak_bytes: int
    host_step_bytes: int
    """Host bytes without copies for a checkpoint: those take what the budget leaves, and would hide a missing part."""
    disk_peak_bytes: int
    moved_bytes: dict[str, int]
    loads: int
    grad_blocks: int


class Recounter:
    """One plan, seen through its trace.

    Args:
        ranks_per_host: ranks that share a machine.
    """

    def __init__(self, plan: Plan, trace: StepTrace, ranks_per_host: int) -> None:
        self.plan, self.trace, self.ranks_per_host = plan, trace, ranks_per_host
        self.world = plan.world_size // plan.replicas
        self.size = [chunk.numel * ITEMSIZE[chunk.dtype] for chunk in plan.chunks]
        self.shard = [size // self.world for size in self.size]
        self.home = {slot.name: index for index, chunk in enumerate(plan.chunks) for slot in chunk.parameters}
        self.arrivals: list[list[tuple[int, int]]] = [[] for _ in plan.chunks]
        """Per chunk: (access event, bytes) of each gradient."""
        for param in trace.parameters:
            if param.grad_access is not None:
                size = param.numel * ITEMSIZE[param.dtype]
                self.arrivals[self.home[param.name]].append((param.grad_access, size))

    def everything(self) -> Recount:
        """All numbers."""
        return Recount(
            device_peak_bytes=self.device_peak_bytes(),
            host_peak_bytes=self.host_bytes() * self.ranks_per_host + self.checkpoint_bytes(),
            host_step_bytes=self.host_bytes() * self.ranks_per_host,
            disk_peak_bytes=sum(self.on_disk(c) for c in range(len(self.size))) * self.ranks_per_host,
            moved_bytes=self.moved_bytes(),
            loads=len(self.loads()),
            grad_blocks=self.grad_blocks(),
        )

    def required(self) -> list[list[int]]:
        """Streamed chunks that lie in blocks at each entry of the order."""
        chunks = self.plan.chunks
        return [
            sorted({c for use in self.plan.order[: at + 1] if use.pin_until >= at for c in use.chunks if not chunks[c].resident})
            for at in range(len(self.plan.order))
        ]  # fmt: skip

    def loads(self) -> list[int]:
        """Chunks in order of loading: the windows of the order, and Belady's rule, by looking ahead."""
        required, held, loaded = self.required(), set[int](), list[int]()

        def next_use(chunk: int, at: int) -> int:
            return next(
                (later for later in range(at, len(required)) if chunk in required[later]), len(required) + chunk
            )

        for at, here in enumerate(required):
            ahead = dict.fromkeys(c for later in required[at + 1 :] for c in later if c not in here)
            window = [*here, *list(ahead)[: self.plan.prefetch_depth]]
            for chunk in window:
                if chunk not in held:
                    if len(held) == self.plan.block_count:
                        held.remove(max(held - set(window), key=lambda c: (next_use(c, at), c)))
                    held.add(chunk)
                    loaded.append(chunk)
        return loaded

    def moved_bytes(self) -> dict[str, int]:
        """Bytes over each link, per rank."""
        loaded, chunks = self.loads(), self.plan.chunks
        trained = [c for c in range(len(chunks)) if self.arrivals[c]]
        away = [c for c in trained if chunks[c].state_home != "device"]
        updated_from_disk = sum(self.on_disk(c) for c in trained)
        # Several ranks gather anew what is resident.
        gathered = [*loaded, *(c for c in range(len(chunks)) if chunks[c].trainable and chunks[c].resident)]
        return {
            "host_to_device": sum(self.shard[c] for c in loaded if chunks[c].weight_home in ("host", "files"))
            + sum(self.shard[c] for c in away if chunks[c].weight_home == "device"),
            "device_to_host": sum(self.shard[c] for c in away),
            # A reduction receives as much as a gather: all shards but one's own.
            "network": sum(self.size[c] - self.shard[c] for c in (*gathered, *trained)),
            "replicas": sum(2 * (self.plan.replicas - 1) * self.shard[c] // self.plan.replicas for c in trained),
            "disk_read": updated_from_disk + sum(map(self.in_file, loaded)),
            "disk_write": updated_from_disk,
        }

    def on_disk(self, c: int) -> int:
        """Bytes of a chunk on the disk, per rank: its states, and always a master, in whole blocks."""
        chunk = self.plan.chunks[c]
        numel = chunk.numel // self.world if chunk.state_home == "disk" else 0
        nbytes = self.state_bytes(numel, chunk.dtype) + numel * self.master(chunk.dtype)
        return -(-nbytes // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES

    def in_file(self, c: int) -> int:
        """Bytes of the first rank's shard that files have: gaps between parameters are in none."""
        chunk, end = self.plan.chunks[c], self.plan.chunks[c].numel // self.world
        held = sum(max(min(slot.offset + slot.numel, end) - slot.offset, 0) for slot in chunk.parameters)
        return held * ITEMSIZE[chunk.dtype] if chunk.weight_home == "files" else 0

    def gathering(self, *, outsized: bool) -> list[int]:
        """Chunks whose gradients are put together before they are reduced or leave."""
        return [
            c
            for c, chunk in enumerate(self.plan.chunks)
            if self.arrivals[c]
            and (self.world > 1 or chunk.state_home != "device")
            and (self.size[c] > self.plan.block_bytes) == outsized
        ]

    def grad_blocks(self) -> int:
        """Gradient blocks that are open at once, and with overlap one that leaves."""
        blocks = self.gathering(outsized=False)
        spans = {c: [event for event, _ in self.arrivals[c]] for c in blocks}
        most = max(
            sum(min(spans[c]) <= event <= max(spans[c]) for c in blocks) for event in range(len(self.trace.accesses))
        )
        return min(most + self.plan.overlap, len(blocks)) if blocks else 0

    def device_peak_bytes(self) -> int:
        """Highest sum over the accesses and the optimizer step."""
        plan, trace = self.plan, self.trace
        constant = (plan.block_count + plan.grad_block_count) * plan.block_bytes + trace.buffer_bytes
        outsized = self.gathering(outsized=True)
        if plan.overlap or self.world > 1:
            constant += max((self.size[c] for c in outsized), default=0)
        in_flight = 0
        if outsized or self.gathering(outsized=False):
            in_flight = max(size for arrivals in self.arrivals for _, size in arrivals)
        fp32_grad = 0
        for c, chunk in enumerate(plan.chunks):
            if chunk.weight_home == "device":
                constant += self.size[c] if chunk.resident else self.shard[c]
            if chunk.trainable and chunk.state_home == "device":
                numel, low = chunk.numel // self.world, ITEMSIZE[chunk.dtype] < FP32_BYTES
                constant += self.state_bytes(numel, chunk.dtype) + numel * FP32_BYTES * low
                fp32_grad = max(fp32_grad, self.temporary_bytes(numel, low=low))
        totals = [
            event.live_bytes + self.waiting_bytes(at) + self.with_autograd(at, in_flight)
            for at, event in enumerate(trace.accesses)
        ]
        step = trace.input_bytes + trace.workspace_bytes + self.waiting_bytes(len(trace.accesses)) + fp32_grad
        return constant + max(*totals, step)

    def with_autograd(self, at: int, largest: int) -> int:
        """Bytes of gradients that are not handed over; the largest in all of backward if the trace does not know."""
        known = self.trace.accesses[at].arriving_bytes
        if known is not None:
            return known if largest else 0
        return largest if at >= self.first_backward() else 0

    def temporary_bytes(self, numel: int, *, low: bool) -> int:
        """Bytes that the step of a shard takes: its gradient in fp32; with moments in fewer bits, those of a piece."""
        if self.plan.moments == "float32":
            return numel * FP32_BYTES * low
        return min(numel, 2**23) * {"bfloat16": 28, "8bit": 58}[self.plan.moments]

    def state_bytes(self, numel: int, dtype: str) -> int:
        """States of a shard: blocks one by one."""
        if self.plan.moments == "8bit":
            return sum(2 * (256 + 4) for _ in range(0, numel, 256))
        in_full = self.plan.state_size.block_bytes * (2 if dtype == "float64" else 1)
        return numel * {"bfloat16": 4, "float32": in_full}[self.plan.moments]

    def master(self, dtype: str) -> int:
        """Bytes of one element of a master."""
        return 8 if dtype == "float64" else FP32_BYTES

    def waiting_bytes(self, event: int) -> int:
        """Gradients that wait on the device during an access, for a step there."""
        amount = 0
        for c, chunk in enumerate(self.plan.chunks):
            if chunk.state_home == "device" and self.arrivals[c]:
                if self.world == 1:
                    amount += sum(size for arrival, size in self.arrivals[c] if arrival <= event)
                elif max(arrival for arrival, _ in self.arrivals[c]) <= event:
                    amount += self.shard[c]
        return amount

    def first_backward(self) -> int:
        """First access that is not forward."""
        events = self.trace.accesses
        return next((at for at, event in enumerate(events) if event.phase != "forward"), len(events))

    def host_bytes(self) -> int:
        """Host memory of one rank."""
        amount = 0
        for c, chunk in enumerate(self.plan.chunks):
            amount += self.shard[c] if chunk.weight_home == "host" else 0
            if chunk.trainable and chunk.state_home == "host":
                # An fp32 weight that lives on the host too is its own master.
                master = ITEMSIZE[chunk.dtype] < FP32_BYTES or chunk.weight_home == "device"
                numel = chunk.numel // self.world
                amount += self.state_bytes(numel, chunk.dtype) + numel * self.master(chunk.dtype) * master
            if chunk.trainable and chunk.state_home != "device":
                amount += self.shard[c] if self.arrivals[c] else 0
        staged = [
            self.shard[c]
            for c, chunk in enumerate(self.plan.chunks)
            if chunk.trainable
            and ITEMSIZE[chunk.dtype] < FP32_BYTES
            and chunk.weight_home == "device"
            and chunk.state_home != "device"
        ]
        amount += min(len(staged), 2) * max(staged, default=0)
        if self.plan.accumulation > 1:
            added = [
                self.shard[c]
                for c, chunk in enumerate(self.plan.chunks)
                if chunk.state_home != "device" and self.arrivals[c]
            ]
            amount += min(len(added), 2) * max(added, default=0)
        amount += sum(self.second_set(c) for c, chunk in enumerate(self.plan.chunks) if chunk.home.early)
        in_files = [self.shard[c] for c, chunk in enumerate(self.plan.chunks) if chunk.weight_home == "files"]
        amount += min(len(in_files), FILE_BUFFERS) * max(in_files, default=0)
        on_disk = [amount for amount in map(self.on_disk, range(len(self.size))) if amount]
        return amount + min(len(on_disk), WINDOW) * max(on_disk, default=0)

    def second_set(self, c: int) -> int:
        """New states of a shard next to the old ones: with a master, and the weights that are rounded from it."""
        chunk = self.plan.chunks[c]
        numel, low = chunk.numel // self.world, ITEMSIZE[chunk.dtype] < FP32_BYTES
        return self.state_bytes(numel, chunk.dtype) + numel * self.master(chunk.dtype) + self.shard[c] * low

    def checkpoint_bytes(self) -> int:
        """Host memory of a machine for copies while a checkpoint is written: what is left, at most two chunks."""
        saved = [
            (chunk.numel // self.world) * self.master(chunk.dtype)
            + self.state_bytes(chunk.numel // self.world, chunk.dtype)
            if chunk.trainable
            else shard * (self.plan.frozen_weights == "host")
            for chunk, shard in zip(self.plan.chunks, self.shard, strict=True)
        ]
        left = self.plan.host_budget_bytes - self.host_bytes() * self.ranks_per_host
        return min(left, 2 * max(saved) * self.ranks_per_host)

    def check_order(self) -> None:
        """The order is the trace's accesses in chunk ids, and holds each chunk for as long as the trace pins it."""
        position, position_of, accesses = -1, [], self.trace.accesses
        for event in accesses:
            used = tuple(sorted({self.home[self.trace.parameters[index].name] for index in event.parameters}))
            if used:
                here = self.plan.order[position] if position >= 0 else None
                if here is None or (here.phase, here.chunks) != (event.phase, used):
                    position += 1
                    here = self.plan.order[position]
                assert (here.phase, here.chunks) == (event.phase, used)
            position_of.append(position)
        assert position == len(self.plan.order) - 1
        required, resident = self.required(), [chunk.resident for chunk in self.plan.chunks]
        for at, event in enumerate(accesses):
            streamed = {self.home[self.trace.parameters[index].name] for index in event.parameters}
            streamed = {c for c in streamed if not resident[c]}
            for later in range(at, min(event.pin_until, len(accesses) - 1) + 1):
                if accesses[later].parameters:
                    assert streamed <= set(required[position_of[later]])
