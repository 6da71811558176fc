"""`ElixirModule`: runs a model under a plan."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from elixir.access import ParameterAccess
from elixir.chunk.buffers import Arena, BlockPool
from elixir.chunk.cache import RCache
from elixir.chunk.chunk import Chunk
from elixir.chunk.gradients import GradientFlow
from elixir.chunk.group import Group
from elixir.chunk.lanes import Emulation, Ticket, make_lanes
from elixir.errors import InputError, InputTypeError
from elixir.fingerprint import fingerprint
from elixir.plan import Plan
from elixir.units import dtype_name
from elixir.wrapper.build import build_chunks, place_buffers
from elixir.wrapper.report import StepReport
from elixir.wrapper.uses import WeightUses

logger = logging.getLogger(__name__)


class ElixirModule(nn.Module):
    """A model whose weights live where a plan says, with the same numbers as the model itself.

    Chunks that the plan streams come into a few blocks on the device just before they are used; resident chunks stay.
    Parameters keep their identity, so an optimizer may be built before or after.

    Args:
        module: the model; it is taken over, and must not be used except through this.
        plan: made for this model and this number of ranks.
        group: process group; None means the default one, or a single rank where there is none.
        prefetch: fetch chunks before they are used, as the plan says; False fetches on demand.
        dtype: parameters and floating inputs are cast to it; None takes the plan's. Buffers keep theirs.
        reduce_always_fp32: average gradients over the ranks in float32.
        output_fp32: floating outputs are cast to float32.
        use_fused_kernels: accepted for later; no model code is replaced yet.
        device: where compute runs; the current CUDA device by default, else the CPU.
        emulation: of the links, on the CPU.
        poison: fill blocks that are given back with NaN; for tests.
        evict_always: evict whatever is not pinned after every use; for tests.

    Raises:
        ArtifactError: the plan is for another model or another number of ranks.
        InputError: an argument makes no sense with the plan, or the model is on meta.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        group: dist.ProcessGroup | None = None,
        prefetch: bool = True,
        dtype: torch.dtype | None = None,
        reduce_always_fp32: bool = False,
        output_fp32: bool = False,
        use_fused_kernels: bool = False,
        *,
        device: torch.device | str | None = None,
        emulation: Emulation | None = None,
        poison: bool = False,
        evict_always: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module) or isinstance(module, ElixirModule):
            raise InputTypeError(f"module must be a plain nn.Module, got {type(module).__name__}")
        self._group = Group(group)
        plan.check(fingerprint(module), self._group.size)
        if dtype is not None and plan.dtype not in ("as built", dtype_name(dtype)):
            raise InputError(f"the plan is for {plan.dtype}, dtype asks for {dtype_name(dtype)}; plan with that dtype")
        if not self._group.same_everywhere(plan.fingerprint):
            raise InputError("the ranks have different plans; plan on one rank and send the plan to the others")
        self._device = _compute_device(device)
        self.plan = plan
        self._cast = None if plan.dtype == "as built" else getattr(torch, plan.dtype)
        self._output_fp32 = output_fp32
        self._arena = Arena(self._device)
        self._lanes = make_lanes(self._device, emulation)
        self.chunks: list[Chunk] = build_chunks(module, plan, self._arena, self._group)
        place_buffers(module, self._device)
        self._pool = BlockPool(self._arena, plan.block_count, plan.block_bytes, poison=poison)
        schedule = (plan if prefetch else replace(plan, prefetch_depth=0)).schedule()
        self.cache = RCache(self.chunks, schedule, self._pool, self._lanes, self._group, evict_always=evict_always)
        streamed = {
            slot.parameter: chunk.index for chunk in self.chunks if not chunk.plan.resident for slot in chunk.slots
        }
        self.uses = WeightUses(self.cache, streamed)
        self._access = ParameterAccess(module, self.uses, streamed) if streamed else None
        self.gradients = self._gradient_flow(reduce_always_fp32)
        self.rewrite_hooks: list[Callable[[Chunk], None]] = []
        """Called with a chunk whose weights were written from outside."""
        self.refreshed_bytes = 0
        """Host to device since the last report, for resident weights that the host has updated."""
        self.regathered_bytes = 0
        """Network, likewise, for resident weights whose shards have been updated."""
        self.last_report: StepReport | None = None
        """What the last step did, beside what the plan predicted; None before the first."""
        self._warned = False
        self._in_backward = False
        self._pending_updates: list[Ticket] = []
        self.module = module
        self._watch_gradients()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        for ticket in self._pending_updates:
            ticket.wait()
        self._pending_updates.clear()
        self.cache.begin()
        args, kwargs = tree_map(self._input, (args, kwargs))
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            self.uses.reset()
            raise
        return tree_map(self._output, output) if self._output_fp32 else output

    def __getattr__(self, name: str) -> Any:
        """Attributes of the model itself, such as ``config`` or ``generate``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    @contextlib.contextmanager
    def gathered(self, parameters: Iterable[nn.Parameter] | None = None, *, write: bool = False) -> Iterator[None]:
        """Full weights of `parameters` (all by default) in `parameter.data`, outside of a forward.

        They lie in memory of their own for as long as this lasts. With `write`, what was written to them becomes the
        weights; every rank must write the same.
        """
        wanted = None if parameters is None else set(parameters)
        self.settle()
        opened: list[tuple[Chunk, torch.Tensor]] = []
        self.uses.writable += 1
        try:
            for chunk in self.chunks:
                if wanted is not None and not any(slot.parameter in wanted for slot in chunk.slots):
                    continue
                whole = self._whole(chunk)
                opened.append((chunk, whole))
                for slot in chunk.slots:
                    slot.parameter.data = whole[slot.offset : slot.offset + slot.numel].view(slot.shape)
            yield
            if write:
                for chunk, whole in opened:
                    self._write_back(chunk, whole)
        finally:
            self.uses.writable -= 1
            for chunk, _ in opened:
                if chunk.whole is None:
                    chunk.hold_placeholders()

    def settle(self) -> None:
        """Wait for everything that runs beside compute, and empty the blocks."""
        self.gradients.settle()
        for chunk in self.chunks:
            if chunk.updated is not None:
                chunk.updated.synchronize()
        for ticket in self._pending_updates:
            ticket.wait()
        self._pending_updates.clear()
        self.cache.invalidate()

    def weights_changed(self, updates: Iterable[Ticket]) -> None:
        """An optimizer has stepped: what the blocks hold is old, and resident weights are new once `updates` are done."""
        self._pending_updates.extend(updates)
        self.cache.invalidate()

    def step_over(self) -> None:
        """An optimizer has stepped: write the step's report, and say so where the plan was wrong."""
        counts, flow = self.cache.take_counts(), self.gradients
        parts, moved = self.plan.predicted.device_parts, self.plan.predicted.moved_bytes
        ours = ["rcache", "resident_weights", "weight_shards", "optimizer_states", "gradient_blocks"]
        if self._group.size > 1:
            ours.append("gradients")
        self.last_report = StepReport(
            observed={
                "loads": counts.loads,
                "hits": counts.hits,
                "host_to_device": counts.host_to_device_bytes + self.refreshed_bytes,
                "device_to_host": flow.offloaded_bytes,
                "network": counts.network_bytes + flow.network_bytes + self.regathered_bytes,
                "device_peak": self._arena.peak_bytes["device"],
            },
            predicted={
                "loads": self.plan.predicted.loads,
                "hits": self.plan.predicted.hits,
                **moved,
                "device_peak": sum(parts.get(name, 0) for name in ours),
            },
            demand_loads=counts.demand_loads,
            deviations=counts.deviations,
            waited_s={name: lane.waited_s for name, lane in self._lanes.by_name().items()},
        )
        self.refreshed_bytes = self.regathered_bytes = flow.offloaded_bytes = flow.network_bytes = 0
        for lane in self._lanes.all():
            lane.waited_s = 0.0
        surprises = self.last_report.surprises()
        if surprises and not self._warned:
            self._warned = True
            text = ", ".join(f"{name} {seen} instead of {expected}" for name, (seen, expected) in surprises.items())
            logger.warning("this step differs from its plan: %s", text)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's state dict with full weights, under the model's own names, on the CPU."""
        with self.gathered():
            state = self.module.state_dict(*args, **kwargs)
            return {
                name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
                for name, value in state.items()
            }

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load weights and buffers into their homes."""
        if assign:
            raise InputError("assign=True would give the parameters other memory; leave it out")
        with self.gathered(write=True):
            return self.module.load_state_dict(state_dict, strict=strict)

    def __deepcopy__(self, memo: Any) -> Any:
        raise InputError("an ElixirModule cannot be copied: its weights live in shared chunks; wrap a second model")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError("an ElixirModule cannot be pickled; save state_dict() instead")

    def close(self) -> None:
        """Stop the lanes. The module cannot run afterwards."""
        self._lanes.close()
        self._group.close()
        self._arena.release()

    # --- inside ------------------------------------------------------------------------------------------------

    def _input(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if item.is_floating_point() and self._cast is not None:
            return item.to(self._device, self._cast)
        return item.to(self._device)

    @staticmethod
    def _output(item: Any) -> Any:
        return item.float() if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    def is_ordinary(self, chunk: Chunk) -> bool:
        """Whether its parameters are plain ones: weights, gradients and states all on the device of one rank."""
        return chunk.plan.resident and chunk.plan.state_home == "device" and self._group.size == 1

    def _gradient_flow(self, reduce_fp32: bool) -> GradientFlow:
        gathering = [chunk for chunk in self.chunks if chunk.plan.trainable and not self.is_ordinary(chunk)]
        # Those that got no gradient in the traced step come last: nobody shall wait for them.
        last = len(self.chunks)
        gathering.sort(key=lambda chunk: (last if chunk.plan.grad_rank is None else chunk.plan.grad_rank, chunk.index))
        return GradientFlow(
            gathering,
            self._arena,
            self._lanes,
            self._group,
            block_count=self.plan.grad_block_count,
            block_bytes=self.plan.block_bytes,
            reduce_fp32=reduce_fp32,
        )

    def _watch_gradients(self) -> None:
        for chunk in self.chunks:
            if chunk.index not in self.gradients.shards:
                continue
            for slot in chunk.slots:
                if slot.parameter.requires_grad:

                    def arrived(parameter: nn.Parameter, chunk: Chunk = chunk, slot: Any = slot) -> None:
                        self._backward_runs()
                        if parameter.grad is not None:
                            self.gradients.take(chunk, slot, parameter.grad)
                            parameter.grad = None

                    slot.parameter.register_post_accumulate_grad_hook(arrived)

    def _backward_runs(self) -> None:
        """Once per backward: have the engine call when it is over."""
        if not self._in_backward:
            self._in_backward = True
            self.gradients.begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)

    def _backward_over(self) -> None:
        self._in_backward = False
        self.gradients.flush()
        self.uses.backward_done()

    def _whole(self, chunk: Chunk) -> torch.Tensor:
        if chunk.whole is not None:
            return chunk.whole
        if chunk.shard is None:
            raise InputError(f"chunk {chunk.index} has neither weights nor a shard")
        whole = torch.empty(chunk.plan.numel, dtype=chunk.dtype, device=self._device)
        shard = chunk.shard.to(self._device)
        self._lanes.network.submit(lambda: self._group.gather(whole, shard)).synchronize()
        return whole

    def _write_back(self, chunk: Chunk, whole: torch.Tensor) -> None:
        if chunk.shard is not None:
            chunk.shard.copy_(whole[chunk.shard_start : chunk.shard_start + chunk.shard_numel])
        for hook in self.rewrite_hooks:
            hook(chunk)


def _compute_device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
