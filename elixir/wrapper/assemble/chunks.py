"""Lets all ranks agree on a plan, and assembles its chunks from a model, one parameter at a time, so that no weight is
held twice."""

from __future__ import annotations

import contextlib
import logging
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elixir.chunk.chunk import Chunk
from elixir.chunk.group import Group
from elixir.chunk.memory import Arena
from elixir.chunk.state_window import MASTERS, StateWindow, StoredStates
from elixir.errors import ArtifactError, InputError, few
from elixir.hardware.memory import total_host_bytes
from elixir.hardware.profile import other_device
from elixir.memory_order import is_dense
from elixir.models.model_tensors import buffer_places, fingerprint
from elixir.models.plannable import refuse_compiled, refuse_unplannable
from elixir.plan.chunk_plan import ChunkPlan
from elixir.plan.plan import HasPlan, Plan, plan_of
from elixir.torch_private import DisableTorchFunctionSubclass
from elixir.units import dtype_name, format_bytes, parse_dtype
from elixir.wrapper.assemble.frozen_weights import FrozenWeights
from elixir.wrapper.assemble.weight_source import Weights, WeightSource

# --- agreement -------------------------------------------------------------------------------------------------------
# Makes all ranks agree on the plan and on where the model's values come from, before anything of it is changed.
#
# As in DistributedDataParallel, rank 0's values win: `build_chunks` sends what a rank has in memory, and
# `SharedBuffers` the buffers. Otherwise ranks with different seeds would silently train a mixture of models.


logger = logging.getLogger(__name__)

_FOUND = frozenset(
    {
        "overlap", "block_numel", "block_bytes", "block_count", "prefetch_depth", "grad_block_count", "chunks", "order",
        "predicted", "start_up_s",
    }
)  # fmt: skip
"""Fields of a plan that follow from budgets; the other fields repeat the request and the machine."""


def plan_for_all(group: Group, plan: Plan) -> Plan:
    """Chooses the plan of the lowest rank whose plan fits the free memory of every rank.

    Ranks that each search read their free memory at different moments, so their plans differ.

    Raises:
        InputError: the plans differ for another reason, or no rank's plan fits. All ranks raise the same.
    """
    asked = {field.name: getattr(plan, field.name) for field in fields(plan) if field.name not in _FOUND}
    asked["step"] = replace(plan.step, units=())  # which a search fetches as one or not
    peaks = {"device": plan.predicted.device_peak_bytes, "host": plan.predicted.host_peak_bytes}
    answers = group.exchange("budgets", (plan.fingerprint, asked, peaks))
    for rank, (name, theirs, _) in enumerate(answers):
        if name != answers[0][0]:
            _refuse_other_cause(rank, name, theirs, answers[0])
    budgets = {kind: min(theirs[f"{kind}_budget_bytes"] for _, theirs, _ in answers) for kind in plan.read_budgets}
    for rank, (name, _, needed) in enumerate(answers):
        if all(needed[kind] <= least for kind, least in budgets.items()):
            if group.rank == 0:
                logger.info("ranks have read different free memory, so all run plan %s of rank %d", name, rank)
            found: Plan = group.exchange("the plan for all", plan if group.rank == rank else None)[rank]
            return found
    options = {"device": "device_memory", "host": "host_budget"}
    given = " and ".join(f"{options[kind]}={size} ({format_bytes(size)})" for kind, size in budgets.items())
    raise InputError(
        f"ranks have read different free memory, and no rank's plan fits what all of them have; plan with {given}"
    )


def _refuse_other_cause(rank: int, name: str, asked: dict[str, Any], first: tuple[str, dict[str, Any], Any]) -> None:
    """Raises if a plan differs from rank 0's by more than budgets that were read."""
    differing = [field for field, value in first[1].items() if asked[field] != value]
    read = {f"{kind}_{of}_bytes" for kind in first[1]["read_budgets"] for of in ("budget", "reserve")}
    if differing and read.issuperset(differing):
        return
    causes = ", ".join(f"{field} ({asked[field]!r:.80}, on rank 0 {first[1][field]!r:.80})" for field in differing)
    raise InputError(
        f"rank {rank} has plan {name}, rank 0 has plan {first[0]}, which differs in "
        f"{causes or 'what was found for the same memory'}; plan on one rank and send the plan to the others "
        "(torch.distributed.broadcast_object_list)"
    )


def agree_on_weights(group: Group, model: nn.Module, given: Weights | None, *, strict: bool = True) -> WeightSource:
    """Returns the source of the model's weights, once all ranks have one of the same kind, and gives buffers on meta
    their values.

    Args:
        group: the ranks that share the model.
        model: the caller's model. Of it only buffers on meta, and those in `given`, are replaced.
        given, strict: see `WeightSource`.

    Raises:
        InputError: see `WeightSource`; a buffer on meta has no value; or a tensor has another shape, dtype or order in
            memory on some rank, or is on meta there, or its values come from elsewhere.
        RankError: another rank has raised.
    """
    drawn = 0
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        # Drawing advances the generator, as building on the CPU would.
        drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    seed = group.exchange("seed", drawn)[0]
    with group.together("have its weights"):
        source = WeightSource(model, given, seed=seed, strict=strict)
    refuse_different(group, "weights", source.kinds(), "build the model and give weights= in the same way on all ranks")
    _warn_of_gaps(group, model)
    with group.together("fill its buffers"):
        source.fill_buffers()
    return source


def refuse_different(group: Group, what: str, mine: Mapping[str, str], way: str) -> None:
    """Compares `what` ranks have, by name. Digests come first, since this precedes forwards.

    Raises:
        InputError: ranks differ, on all of them; names the first that do, and the `way` out.
    """
    if len(set(group.exchange(f"kinds of {what}", zlib.crc32(repr(sorted(mine.items())).encode())))) == 1:
        return
    first, *others = group.exchange(f"different {what}", mine)
    for rank, theirs in enumerate(others, 1):
        names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
        if names:
            kinds = " and ".join(each.get(names[0], "missing") for each in (first, theirs))
            raise InputError(f"{few(names)} differ between ranks 0 and {rank} ({kinds}); {way}")


def _warn_of_gaps(group: Group, model: nn.Module) -> None:
    """Warns on rank 0 of weights whose layout cannot be kept."""
    with DisableTorchFunctionSubclass():  # this asks for a weight's layout, not its values
        found = [name for name, each in model.named_parameters() if not is_dense(each.shape, each.stride())]
    if found and group.rank == 0:
        logger.warning(
            "%s: elements with gaps between them, or that overlap, become contiguous in a chunk, so that numbers may "
            "differ from plain PyTorch's by rounding",
            few(found),
        )


# --- chunks ----------------------------------------------------------------------------------------------------------


def build_chunks(
    model: nn.Module,
    plan: Plan,
    arena: Arena,
    group: Group,
    window: StateWindow,
    *,
    source: WeightSource,
    frozen: FrozenWeights | None = None,
    buffer_dtype: torch.dtype | None = None,
) -> Iterator[Chunk]:
    """Yields chunks with the model's weights at their homes, one by one; then places the model's buffers.

    A rank reads one chunk at a time, and only parameters of which it keeps a part, or that other ranks may have with
    other values. Parameters keep their identity. If all weights are the model's own, their memory is freed once the
    caller has the chunk. Otherwise a value may still be refused, so the model keeps its memory until `Chunk.attach`.

    Args:
        model: a model on meta, with values, or partly both.
        plan: for it.
        arena: allocates and counts the memory.
        group: the ranks over which chunks are sharded.
        window: the buffers for masters that live on a disk.
        source: gives the values, see `agree_on_weights`.
        frozen: the files in which the plan leaves frozen weights.
        buffer_dtype: see `place_buffers`.

    Raises:
        InputError: a weight on meta has no source, or another shape there.
        RankError: another rank has failed.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    all_own = not any(map(source.replaces, by_name))
    for index, chunk_plan in enumerate(plan.chunks):
        parameters = [by_name[slot.name] for slot in chunk_plan.parameters]
        chunk = _made(index, chunk_plan, parameters, group, arena.device)
        with _released_on_error(chunk):
            with group.together("fill its weights"):
                _make_memory(chunk, plan, arena, window, frozen)
                values = _in_memory(chunk, source)
            values = {name: _of_rank_0(group, value) for name, value in values.items()}
            with group.together("write its weights"):
                _load_weights(chunk, source, values)
            values.clear()  # they may be the model's memory, which is freed next
        yield chunk
        for slot in chunk.slots if all_own else ():
            chunk.show(slot)
    with group.together("place its buffers"):
        place_buffers(model, arena.device, buffer_dtype)


def move_chunks(
    model: nn.Module,
    plan: Plan,
    arena: Arena,
    group: Group,
    window: StateWindow,
    *,
    before: Sequence[Chunk],
    leaving: Mapping[int, StoredStates],
    frozen: FrozenWeights | None = None,
) -> Iterator[Chunk]:
    """Yields the same chunks at the homes of another plan, with the same bits. Each old chunk is freed once the caller
    has the new one. A chunk whose home does not change is yielded unchanged.

    Args:
        model: the model, which has the chunks' parameters.
        plan: a plan with the same packing.
        arena: allocates the new memory.
        group: the ranks over which chunks are sharded.
        window: the buffers for masters that live on a disk.
        before: the current chunks; no transfer to or from them may be pending.
        leaving: by chunk, the extent with its masters, which is used again if its states are on a disk again.
        frozen: the files in which the plan leaves frozen weights.
    """
    for old, chunk_plan in zip(tuple(before), plan.chunks, strict=True):
        if old.plan.home.having() is chunk_plan.home.having():  # however it is updated
            old.plan = chunk_plan
            _count_memory(old, arena)
            yield old
            continue
        parameters = [slot.parameter for slot in old.slots]
        chunk = _made(old.index, chunk_plan, parameters, group, arena.device)
        chunk.block = old.block  # in which views lie that are alive
        if chunk_plan.home.states_on_disk:
            chunk.stored = leaving.get(chunk.index)
        with _released_on_error(chunk), group.together("move its chunks"):
            has_masters = chunk.stored is not None
            _make_memory(chunk, plan, arena, window, frozen)
            _copy_weights(old, chunk, has_masters=has_masters)
        if chunk.weights is not None and old.weights is None:
            group.gather(chunk.weights, old.shard_weights.to(arena.device), f"chunk {chunk.index}, which stays")
        yield chunk
        if old.stored is not None:
            old.stored.forget(old)
        for slot in chunk.slots:
            chunk.show(slot)
        old.let_go()


def _made(index: int, plan: ChunkPlan, parameters: Sequence[nn.Parameter], group: Group, device: torch.device) -> Chunk:
    """Creates a chunk without memory for this rank of the group."""
    return Chunk(index, plan, parameters, rank=group.rank, world_size=group.shards, shard=group.shard, device=device)


@contextlib.contextmanager
def _released_on_error(chunk: Chunk) -> Iterator[None]:
    """Frees the memory of a chunk that cannot be filled: the error would keep the chunk alive."""
    stored = chunk.stored
    try:
        yield
    except BaseException:
        if chunk.stored is not None:
            chunk.stored.forget(chunk)
            if stored is None:
                chunk.stored.give_back()
        chunk.let_go()
        raise


def _copy_weights(old: Chunk, chunk: Chunk, *, has_masters: bool) -> None:
    """Copies weights and masters from the old chunk, except weights that are sharded over ranks."""
    shard = old.shard_weights
    if chunk.filed is not None:
        for held in chunk.held.values():
            chunk.refuse_unlike_file(held.slot, shard[held.part])
    if chunk.masters is not None and not has_masters:
        with old.in_memory(), chunk.in_memory(write=True):
            chunk.masters.copy_(shard if old.masters is None else old.masters)
    if chunk.shard is not None:
        chunk.shard.copy_(shard)
    elif chunk.weights is not None and old.weights is not None:
        chunk.weights.copy_(old.weights)


def _make_memory(
    chunk: Chunk, whole_plan: Plan, arena: Arena, window: StateWindow, frozen: FrozenWeights | None
) -> None:
    plan = chunk.plan
    if plan.weight_home == "files":
        if frozen is None:
            raise InputError(
                f"the plan leaves {chunk} in its files, which the model was not wrapped with; wrap it with a plan that "
                "was made with frozen_weights='files', and weights="
            )
        chunk.filed = frozen.shard_of(chunk)
        return
    wide = torch.float32 if chunk.low_precision else chunk.dtype
    if plan.state_home == "disk":
        if chunk.stored is None:
            chunk.stored = StoredStates(window, f"rank {chunk.rank}'s {chunk}", whole_plan.extent_bytes(plan))
        chunk.masters = chunk.stored.region(MASTERS, chunk.shard_numel, wide)
        chunk.stored.show(chunk, chunk.masters, MASTERS)
    elif chunk.needs_masters:
        # New weights are copied from masters of the same dtype, which then are pinned: the weights are on the device.
        # Wider masters are rounded first, into a staging buffer or the weights' home.
        pin = not chunk.low_precision
        chunk.masters = arena.make(chunk.shard_numel, wide, plan.update_home, "optimizer_states", pin=pin).tensor
    if plan.resident:
        chunk.weights = arena.make(plan.numel, chunk.dtype, "device", "resident_weights").tensor
    else:
        chunk.shard = arena.make(chunk.shard_numel, chunk.dtype, plan.weight_home, _kind_of_shard(plan)).tensor


def _count_memory(chunk: Chunk, arena: Arena) -> None:
    """Counts the memory of `_make_memory` in another arena."""
    plan = chunk.plan
    if chunk.masters is not None and chunk.stored is None:
        arena.count(chunk.masters.nbytes, plan.update_home, "optimizer_states")
    if chunk.weights is not None:
        arena.count(chunk.weights.nbytes, "device", "resident_weights")
    if chunk.shard is not None and plan.weight_home != "files":
        arena.count(chunk.shard.nbytes, plan.weight_home, _kind_of_shard(plan))


def _kind_of_shard(plan: ChunkPlan) -> str:
    return "weight_shards" if plan.weight_home == "device" else "weights"


def _in_memory(chunk: Chunk, source: WeightSource) -> dict[str, torch.Tensor]:
    """The values of a chunk that ranks have in memory, each rank its own."""
    names = [slot.name for slot in chunk.slots if chunk.filed is None and source.is_in_memory(slot.name)]
    return {name: source.parameter(name) for name in names}


def _of_rank_0(group: Group, value: torch.Tensor) -> torch.Tensor:
    """Rank 0's `value`, with whose values no rank trains a mixture; `value` itself stays as it is."""
    if group.size == 1:
        return value
    sent = value.reshape(-1).to("cpu", copy=group.rank > 0)
    group.send_from_rank_0(sent)
    return sent.view(value.shape)


def _load_weights(chunk: Chunk, source: WeightSource, values: Mapping[str, torch.Tensor]) -> None:
    """Writes a chunk's weights: `values`, and the others from their source."""
    if chunk.filed is None:
        with chunk.in_memory(write=True):
            for slot in filter(chunk.wants, chunk.slots):
                chunk.write(slot, values[slot.name] if slot.name in values else source.parameter(slot.name))


def place_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Moves buffers to the device; modules that share one still share it.

    Args:
        model: the model with the buffers.
        device: the device of compute.
        dtype: the dtype of floating buffers; None leaves each in its own.
    """
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for place in buffer_places(model):
        buffer = place.buffer
        kept = place.cast(dtype)
        if buffer.device != device or buffer.dtype != kept:
            if buffer not in moved:
                moved[buffer] = buffer.to(device, kept)
            place.put(moved[buffer])


def _check_disk_folders(plan: Plan, folders: Sequence[str]) -> None:
    """Raises `InputError` if a plan needs a folder on a disk and has none, or if one of them is no folder."""
    missing = [folder for folder in folders if not os.path.isdir(folder)]
    if plan.uses_disk and not folders:
        raise InputError(
            f"the plan keeps {format_bytes(plan.predicted.disk_peak_bytes)} of optimizer states on a disk: say on "
            "which with disk_folder=, such as disk_folder='/mnt/nvme'"
        )
    if plan.uses_disk and missing:
        raise InputError(f"disk folder {missing[0]!r} is no folder; name one on the disk that takes optimizer states")


def agree_on_plan(
    group: Group,
    module: nn.Module,
    given: Plan | HasPlan | None,
    dtype: torch.dtype | None,
    disk_folders: Sequence[str] = (),
    *,
    runs: bool = False,
) -> Plan:
    """Returns the plan that all ranks run; their plans may differ by the free memory that each has read
    (`plan_for_all`). `runs` says whether the model runs under a plan already.

    Refuses, on all ranks at once, plans that differ otherwise, and a plan that some rank cannot run.
    """
    mine, error = "", None
    try:
        plan = plan_of(given)
        mine = plan.fingerprint
        refuse_unplannable(module, None if plan.dtype == "as built" else parse_dtype(plan.dtype))
        _check_fits(plan, module, group.size)
        if group.of_mesh not in (None, plan.replicas):
            raise InputError(
                f"the plan has {plan.replicas} replicas, the device mesh {group.of_mesh}; plan with "
                f"replicas={group.of_mesh}, or give the mesh that the plan is for"
            )
        refuse_compiled(module, plan, runs=runs)
        _check_disk_folders(plan, disk_folders)
        planned = (
            list(dict.fromkeys(chunk.dtype for chunk in plan.chunks)) if plan.dtype == "as built" else [plan.dtype]
        )
        if dtype is not None and planned != [dtype_name(dtype)]:
            raise InputError(
                f"the plan is for {' and '.join(planned)}, dtype asks for {dtype_name(dtype)}; plan with unified_dtype="
                f"torch.{dtype_name(dtype)}"
            )
    except (ValueError, TypeError) as refused:
        error = refused
    answers = group.exchange("plan", (mine, None if error is None else str(error)))
    if error is not None:
        raise error
    for rank, (_, problem) in enumerate(answers):
        if problem is not None:
            raise InputError(f"rank {rank} cannot run its plan: {problem}")
    if all(theirs == plan.fingerprint for theirs, _ in answers):
        return plan
    return agree_on_plan(group, module, plan_for_all(group, plan), dtype, disk_folders, runs=runs)


def warn_if_made_elsewhere(plan: Plan, device: torch.device) -> None:
    """Warns once if the plan was made for another device, or for more memory than this machine has."""
    found = []
    here = other_device(plan.hardware_name, plan.device_name, device.type)
    if here is not None:
        found.append(f"it runs on {device.type} ({here})")
    for needed, there, what in (
        (plan.predicted.device_peak_bytes, _device_bytes(device), "of device memory"),
        (plan.predicted.host_peak_bytes, _host_bytes(), "of host memory"),
    ):
        if there is not None and needed > there:
            found.append(f"it needs {format_bytes(needed)} {what}, of which this machine has {format_bytes(there)}")
    if found:
        logger.warning(
            "the plan was made for %d x %s%s, but %s: what it predicts does not hold here, and another plan may be "
            "faster; plan again with hardware= of this machine (`elixir hardware --measure --out hw.json` measures "
            "it)",
            plan.world_size,
            plan.hardware_name,
            f" ({plan.device_name})" if plan.device_name else "",
            ", and ".join(found),
        )


def _device_bytes(device: torch.device) -> int | None:
    if device.type == "cpu":
        return _host_bytes()
    return int(torch.cuda.get_device_properties(device).total_memory)


def _host_bytes() -> int | None:
    try:
        return total_host_bytes()
    except InputError:  # this operating system does not tell it
        return None


def _check_fits(plan: Plan, module: nn.Module, world_size: int) -> None:
    """Calls `Plan.check`, and adds to its error what differs."""
    started = int(os.environ.get("WORLD_SIZE") or 1)
    alone = world_size == 1 and started > 1 and not (dist.is_available() and dist.is_initialized())
    started_apart = f"{started} processes were started, and torch.distributed.init_process_group() has not been called"
    try:
        plan.check(fingerprint(module, forward=plan.step.forward), world_size)
    except ArtifactError as refused:
        reasons = ([started_apart] if alone and plan.world_size != 1 else []) + _differences(plan, module)
        raise ArtifactError(f"{refused} ({'; '.join(reasons)})" if reasons else str(refused)) from None
    edited = _differences(plan, module)
    if edited:
        raise ArtifactError(f"the plan was edited, and is not of this model any more ({'; '.join(edited)}); plan anew")
    if alone:
        logger.warning("%s: each of them trains a separate model", started_apart)


def _differences(plan: Plan, module: nn.Module) -> list[str]:
    """The differences between the parameters of model and plan, one sentence for each kind."""
    planned = {slot.name: (slot.numel, chunk.trainable) for chunk in plan.chunks for slot in chunk.parameters}
    trains = not plan.step.forward
    here = {name: (each.numel(), each.requires_grad and trains) for name, each in module.named_parameters()}
    both = [name for name in here if name in planned]
    kinds = {
        "only in the plan": [name for name in planned if name not in here],
        "only in the model": [name for name in here if name not in planned],
        "of another size": [name for name in both if here[name][0] != planned[name][0]],
        "trained in the plan, frozen in the model": [n for n in both if planned[n][1] and not here[n][1]],
        "frozen in the plan, trained in the model": [n for n in both if here[n][1] and not planned[n][1]],
    }
    return [f"{kind}: {few(names)}" for kind, names in kinds.items() if names]


def compute_device(device: torch.device | str | None) -> torch.device:
    """Returns `device`, or by default the current CUDA device, or the CPU without one.

    Raises:
        InputError: `device` is no CPU or CUDA device, or CUDA is missing.
    """
    if device is not None:
        try:
            wanted = torch.device(device)
        except RuntimeError as error:
            raise InputError(f"device must be 'cpu' or a CUDA device such as 'cuda:0', got {device!r}") from error
        if wanted.type not in ("cpu", "cuda"):
            raise InputError(f"device must be 'cpu' or a CUDA device such as 'cuda:0', got {device!r}")
        if wanted.type == "cpu":
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise InputError(f"device {device!r} was asked for, but torch finds no CUDA here; leave device= out")
        index, count = torch.cuda.current_device() if wanted.index is None else wanted.index, torch.cuda.device_count()
        if index >= count:
            raise InputError(f"device {device!r} was asked for, but there are {count}, from 'cuda:0' on")
        return torch.device("cuda", index)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
