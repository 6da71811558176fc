"""Why nothing fits, how much would, and what to change: every saving is the outcome of planning again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from elixir.errors import Lever, PlanError, readable_bytes
from elixir.hardware import HardwareProfile
from elixir.optimizer_states import MASTER_BYTES, MomentKind, is_adam, moments_size, optimizer_name
from elixir.plan import Home
from elixir.search.budgets import CUDA_CONTEXT_BYTES
from elixir.search.problem import MemoryModel, Placement, Setting, Spill
from elixir.search.propose import Budgets, PlacementBuilder, SearchSpace, spilled
from elixir.search.request import SearchRequest
from elixir.step_trace import StepTrace
from elixir.units import LARGEST_BYTES, dtype_bytes, format_bytes


@dataclass(frozen=True)
class Case:
    """The trace, setting and request of a search."""

    trace: StepTrace
    hardware: HardwareProfile
    setting: Setting
    request: SearchRequest

    @cached_property
    def space(self) -> SearchSpace:
        """The case, ready to be searched, without overlap: that is given up before a search fails."""
        return SearchSpace(self.trace, self.hardware, replace(self.setting, overlap=False))


@dataclass(frozen=True)
class _Least:
    """The least need over the candidates, and what is in it."""

    bytes: int
    parts: dict[str, int]


def shortage(
    case: Case, budgets: Budgets, least_host_bytes: Callable[[], int], settled: Collection[str] = ()
) -> PlanError:
    """The error for a case that has no plan within its budgets.

    Args:
        case: what was asked for.
        budgets: what it was searched with.
        least_host_bytes: gives the least host need of all that the search finds to fit the device; called only if the
            device would do.
        settled: arguments of which others will say whether they suffice; what they save is not worked out.
    """
    device = _least_device(case)
    if device.bytes > budgets.device_bytes:
        return PlanError(
            _device_message(case, budgets, device),
            needed_bytes=device.bytes,
            available_bytes=budgets.device_bytes,
            levers=tuple(_device_levers(case, budgets, device, settled)),
        )
    estimate = _least_host(case, budgets.device_bytes)
    host = replace(estimate, bytes=min(estimate.bytes, least_host_bytes()))
    provided = f", with as much on the device as {format_bytes(budgets.device_bytes)} hold"
    if case.request.placement == "cpu":
        provided = ", where placement 'cpu' puts all weights and states"
    return PlanError(
        f"{case.trace.model_name} at world size {case.setting.world_size} does not fit the host memory{provided}",
        needed_bytes=host.bytes,
        available_bytes=budgets.host_bytes,
        levers=tuple(_host_levers(case, budgets, host, settled)),
    )


def _device_message(case: Case, budgets: Budgets, least: _Least) -> str:
    where = f"{case.trace.model_name} at world size {case.setting.world_size}"
    table = case.space.table
    rest = least.parts["activations"] + least.parts["buffers"]
    largest = max(range(len(table.aligned)), key=lambda index: (table.aligned[index], -index))
    if case.request.placement == "cuda":
        return f"{where}: weights and states of every chunk on the device (placement 'cuda') exceed its memory"
    parameter = case.trace.parameters[largest]
    together = 2 if parameter.trainable else 1
    if rest <= budgets.device_bytes < rest + together * table.aligned[largest]:
        gradient = " with its gradient" if parameter.trainable else ""
        return (
            f"{where}: parameter {parameter.name!r} of {format_bytes(table.bytes[largest])}{gradient} is larger than "
            "every chunk that fits the device; split it into several"
        )
    if rest > budgets.device_bytes:
        return f"{where}: activations, inputs and buffers alone exceed the device memory, wherever weights are kept"
    return f"{where} does not fit the device memory, even with everything else on the host"


def _device_levers(case: Case, budgets: Budgets, least: _Least, settled: Collection[str]) -> Iterator[Lever]:
    setting, trace = case.setting, case.trace
    if budgets.device_reserve_bytes:
        yield Lever("keep back less of the device", budgets.device_reserve_bytes, "adds", "device_reserve")
    if case.hardware.device_kind == "cuda" and least.bytes <= case.hardware.device_memory_bytes - CUDA_CONTEXT_BYTES:
        more = least.bytes - budgets.device_bytes
        yield Lever("let the plan have more of the device", more, "adds", "device_memory", _enough(least.bytes))
    halved = _with_half_batch(case)
    if "batch" not in settled and (saved := least.bytes - _least_device(halved).bytes) > 0:
        yield Lever("halve the batch of each rank, or the length of its sequences", saved, argument="batch")
    if not trace.checkpointed_modules:
        yield Lever("turn on activation checkpointing and trace again", 0, argument="checkpoint")
    doubled = _twice_the_ranks(case)
    if "world_size" not in settled and (saved := least.bytes - _least_device(doubled).bytes) > 0:
        ranks = 2 * setting.world_size
        yield Lever(f"run on {ranks} ranks", saved, argument="world_size", value=str(ranks))
    if case.request.placement == "cuda":
        moved = least.bytes - _least_device(_asking(case, placement="auto")).bytes
        if moved > 0:
            action = "let weights and states live on the host (placement 'auto')"
            yield Lever(action, moved, argument="placement", value="auto")
    if case.request.search != "optimal":
        chosen = least.bytes - _least_device(_asking(case, search="optimal")).bytes
        if chosen > 0:
            yield Lever("let optimal_search choose the chunk size", chosen)


def _host_levers(case: Case, budgets: Budgets, least: _Least, settled: Collection[str]) -> Iterator[Lever]:
    more = max(least.bytes - budgets.host_bytes, 0)
    if budgets.host_reserve_bytes:
        yield Lever("keep back less of the host", budgets.host_reserve_bytes, "adds", "host_reserve")
    yield Lever("give the host more memory", more, "adds", "host_memory", _enough(least.bytes))
    ranks = str(2 * case.setting.world_size)
    half = "halve the batch of each rank, which leaves device memory to states"
    for action, other, argument, value in (
        (f"run on {ranks} ranks", _twice_the_ranks(case), "world_size", ranks),
        (half, _with_half_batch(case), "batch", ""),
    ):
        if argument not in settled and (saved := least.bytes - _least_host(other, budgets.device_bytes).bytes) > 0:
            yield Lever(action, saved, argument=argument, value=value)
    for kind, other in _fewer_bits(case) if "moments" not in settled else ():
        saved = least.bytes - _least_host(other, budgets.device_bytes).bytes
        if saved > 0:
            yield Lever(f"keep Adam's moments in {kind} (moments)", saved, argument="moments", value=kind)
    disk = Spill(0, LARGEST_BYTES)
    on_disk = replace(case, setting=replace(case.setting, spill=disk))
    saved = least.bytes - _least_host(on_disk, budgets.device_bytes).bytes
    if saved > 0:
        instead = "moments" not in settled and moments_instead(case, budgets) is not None
        yield Lever(_disk_action(case), saved, argument="disk_memory", comes_last=instead)
    if case.request.placement == "cpu":
        saved = least.bytes - _least_host(_asking(case, placement="auto"), budgets.device_bytes).bytes
        if saved > 0:
            action = "let weights and states live on the device too (placement 'auto')"
            yield Lever(action, saved, argument="placement", value="auto")


def moments_instead(case: Case, budgets: Budgets) -> MomentKind | None:
    """The kind of moments in fewer bits with which no disk is needed, that with most bits first; None if there is
    none."""
    for kind, other in _fewer_bits(case):
        if 0 < _least_host(other, budgets.device_bytes).bytes <= budgets.host_bytes:
            return kind
    return None


def _fewer_bits(case: Case) -> Iterator[tuple[MomentKind, Case]]:
    """The case with each kind of moments that has fewer bits, without a disk."""
    kinds: tuple[MomentKind, ...] = get_args(MomentKind)
    wide = any(p.trainable and dtype_bytes(p.dtype) > MASTER_BYTES for p in case.trace.parameters)
    if wide or not is_adam(optimizer_name(case.request.optimizer_type)):
        return
    for kind in kinds[kinds.index(case.setting.moments) + 1 :]:
        yield kind, replace(case, setting=replace(case.setting, states=moments_size(kind), moments=kind, spill=None))


def _enough(needed_bytes: int) -> str:
    """A size, rounded up, as budgets are given."""
    return readable_bytes(needed_bytes, up=True).replace(" ", "")


def _disk_action(case: Case) -> str:
    if case.setting.spill is not None:
        return "give states more of the disk (disk_memory)"
    measured = (
        "" if case.hardware.knows_disk else ", once `elixir hardware --measure --disk-folder DIR` has measured it"
    )
    return f"let states live on a disk (disk_memory){measured}"


def _twice_the_ranks(case: Case) -> Case:
    ranks = 2 * case.setting.world_size
    per_host = case.hardware.ranks_per_host(ranks)
    return replace(case, setting=replace(case.setting, world_size=ranks, ranks_per_host=per_host))


def _asking(case: Case, **options: str) -> Case:
    return replace(case, request=SearchRequest.of(case.request, **options))


def _with_half_batch(case: Case) -> Case:
    return replace(case, trace=_half_batch(case.trace))


def _half_batch(trace: StepTrace) -> StepTrace:
    """The trace with inputs and activations halved; what libraries keep does not shrink with the batch."""
    kept = trace.workspace_bytes
    accesses = tuple(
        replace(access, live_bytes=min(kept, access.live_bytes) + max(access.live_bytes - kept, 0) // 2)
        for access in trace.accesses
    )
    return replace(trace, accesses=accesses, input_bytes=trace.input_bytes // 2)


def _models(case: Case) -> Iterator[MemoryModel]:
    """Those that the search tries."""
    space = case.space
    tiers = space.tiers(case.request.placement, all_sizes=case.request.search == "optimal")
    sizes = [size for tier in tiers for size in tier()]
    for size in dict.fromkeys(sizes):
        yield space.model(size)


def _least_device(case: Case) -> _Least:
    """The least device memory any candidate needs, whatever the host has."""
    found: _Least | None = None
    for model in _models(case):
        for placement, blocks in _emptiest(model, case):
            need = model.need(placement, blocks)
            if found is None or need.device_bytes < found.bytes:
                found = _Least(need.device_bytes, need.device_parts)
    if found is None:  # there is always the size of the largest parameter
        raise PlanError("no chunk size can be tried", needed_bytes=0, available_bytes=0)
    return found


def _emptiest(model: MemoryModel, case: Case) -> Iterator[tuple[Placement, int]]:
    """Placements and blocks that may need least of the device: all on the host; or all on the device."""
    if case.request.placement != "cuda":
        builder = _start(model, 0 if case.request.placement == "auto" else LARGEST_BYTES)
        yield builder.placement(), min(builder.blocks, builder.streamed)
    if case.request.placement != "cpu":
        yield Placement.everywhere(Home.RESIDENT, len(model.work.chunks)), 0
        if case.setting.world_size > 1:
            shards = Placement(tuple(Home.RESIDENT if out else Home.DEVICE for out in model.outsized.tolist()))
            yield shards, model.work.schedule(shards.residents, 0).min_blocks


def _start(model: MemoryModel, budget_bytes: int) -> PlacementBuilder:
    """As the search begins with the fewest blocks: on the host, but for moves that lower the peak down to a budget."""
    builder = PlacementBuilder(
        model, model.work.schedule(PlacementBuilder(model, 0).placement().residents, 0).min_blocks
    )
    builder.squeeze(budget_bytes)
    return builder


def _least_host(case: Case, device_bytes: int) -> _Least:
    """The least host memory of any candidate that fits the device."""
    found: _Least | None = None
    for model in _models(case):
        if case.request.placement != "cpu":
            everything = Placement.everywhere(Home.RESIDENT, len(model.work.chunks))
            if model.need(everything, 0).device_bytes <= device_bytes:
                return _Least(0, {})
        builder = _start(model, device_bytes if case.request.placement == "auto" else LARGEST_BYTES)
        if builder.peak_bytes() > device_bytes:
            continue
        if case.request.placement != "cpu":
            chunks = range(len(model.work.chunks))
            single = case.setting.world_size == 1
            builder.move_all(chunks, state=True, resident=single, budget_bytes=device_bytes)
            if not single:
                builder.move_all(chunks, state=False, resident=False, budget_bytes=device_bytes)
        placement = spilled(model, builder.placement(), host_bytes=0)
        need = model.need(placement, min(builder.blocks, builder.streamed))
        if found is None or need.host_bytes < found.bytes:
            found = _Least(need.host_bytes, need.host_parts)
    return found or _Least(0, {})
