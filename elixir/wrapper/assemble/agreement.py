"""Makes all ranks agree on the plan and on where the model's values come from, before anything of it is changed.

As in DistributedDataParallel, rank 0's values win: `build_chunks` sends what a rank has in memory, and `SharedBuffers`
the buffers. Otherwise ranks with different seeds would silently train a mixture of models.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from elixir.chunk.group import Group
from elixir.errors import InputError, few
from elixir.memory_order import is_dense
from elixir.plan.plan import Plan
from elixir.torch_private import DisableTorchFunctionSubclass
from elixir.units import format_bytes
from elixir.wrapper.assemble.weight_source import Weights, WeightSource

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
