"""Makes all ranks agree on the plan and the model's values before the model is sharded.

As in DistributedDataParallel, rank 0's values win. Each rank keeps shards of the model that it built. Without
agreement, ranks with different seeds would silently train a mixture of models, or several models if chunks are whole on
every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from elixir.chunk.group import Group
from elixir.errors import InputError, few
from elixir.models.inner_tensors import flat
from elixir.plan.plan import Plan
from elixir.units import format_bytes
from elixir.wrapper.assemble.weight_source import Weights

logger = logging.getLogger(__name__)

_PIECE_NUMEL = 2**20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""The dtype to read bits in, by bytes of an element; wider elements are read as several int64."""


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


def agree_on_values(group: Group, model: nn.Module, given: Weights | None, *, strict: bool = True) -> None:
    """Gives every rank the parameters and buffers of rank 0, if they differ.

    Values of tensors on meta come later, from rank 0's generator. A state dict in `given` is only compared; files are
    the same for all ranks.

    Args:
        group: the ranks that share the model.
        model: the caller's model; different values are overwritten in place on all ranks but 0.
        given: values that will replace the model's own parameters.
        strict: whether `given` replaces all of them.

    Raises:
        InputError: a tensor has values on one rank and is on meta on another; or `given` differs between ranks.
    """
    if group.size == 1:
        return
    if isinstance(given, dict):
        values = ((name, value) for name, value in given.items() if isinstance(value, torch.Tensor))
        tensors = (part for name, value in values for part in flat(name, value))
        _, different = _compare(group, "given weights", tensors)
        if different:
            raise InputError(
                f"the weights given are not the same on all ranks ({few(different)}); load the same ones everywhere"
            )
    own: dict[str, torch.Tensor] = dict(model.named_parameters()) if given is None or not strict else {}
    own |= model.named_buffers()
    lacking, different = _compare(group, "values", own.items())
    if lacking:
        raise InputError(
            f"some ranks built {few(lacking)} on meta, others with values; build the model in the same way on all "
            "ranks, or on meta everywhere with weights="
        )
    for name in different:
        _take_from_rank_0(group, own[name])
    if different and group.rank == 0:
        logger.warning(
            "the ranks built different models (%s): all train rank 0's; seed them alike before building, with "
            "torch.manual_seed, and nothing has to be sent",
            few(different),
        )


def _compare(group: Group, what: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[str], list[str]]:
    """Names that have values on some ranks only, and names whose values differ; the same result on all ranks."""
    mine = {name: _digest(tensor) for name, tensor in tensors}
    answers = group.exchange(what, mine)
    names = dict.fromkeys(name for answer in answers for name in answer)
    lacking: list[str] = []
    different: list[str] = []
    for name in names:
        found = [answer.get(name) for answer in answers]
        if all(value == found[0] for value in found):
            continue
        (lacking if None in found else different).append(name)
    return lacking, different


def _digest(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """A sum of all bit patterns weighted by their index; None without values, and for a layout without strides."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return None
    flat = tensor.detach().reshape(-1)
    bits = flat.view(_INTEGERS.get(flat.element_size(), torch.int64))
    total = 0
    for start in range(0, bits.numel(), _PIECE_NUMEL):
        piece = bits[start : start + _PIECE_NUMEL].long()
        places = torch.arange(start, start + piece.numel(), device=piece.device)
        total += int((piece * (2 * places + 1)).sum())  # wraps around, on all ranks alike
    return (*tensor.shape, total)


def _take_from_rank_0(group: Group, tensor: torch.Tensor) -> None:
    value = tensor.detach()
    flat = value.reshape(-1).cpu()
    group.send_from_rank_0(flat)
    value.copy_(flat.view(value.shape))
