"""`FrozenWeights`: the files in which frozen weights of a model stay, compared with the model and with its plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from elixir.chunk.chunk import Chunk
from elixir.chunk.group import Group
from elixir.chunk.weight_files import FilePart, FileShard, WeightFiles
from elixir.errors import InputError, few
from elixir.files import FILES, Files
from elixir.plan.chunk_plan import WeightFile
from elixir.plan.plan import Plan
from elixir.units import dtype_name
from elixir.wrapper.assemble.weight_source import Weights, paths_of, weight_names

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FrozenWeights:
    """Open files with all frozen weights of a model."""

    files: WeightFiles
    names: Mapping[str, str]
    """Name of each frozen parameter -> its name in the files."""

    def shard_of(self, chunk: Chunk) -> FileShard:
        """This rank's part of a chunk that lives in files."""
        parts = tuple(FilePart(self.names[name], held.first, held.part) for name, held in chunk.held.items())
        names = {slot.name: self.names[slot.name] for slot in chunk.slots}
        return FileShard(self.files, parts, names, chunk.shard_numel, chunk.dtype)


def weight_records(weights: Weights | None) -> tuple[WeightFile, ...]:
    """Returns the files in `weights` as they are now, for a plan that leaves frozen weights in them.

    Raises:
        InputError: `weights` are no safetensors files.
    """
    opened = WeightFiles(safetensors_in(weights))
    try:
        return opened.records
    finally:
        opened.close()


def open_frozen(
    group: Group, model: nn.Module, plan: Plan, weights: Weights | None, files: Files = FILES
) -> FrozenWeights | None:
    """Opens the files in which a plan leaves frozen weights; None if it keeps them in memory.

    Args:
        group: the ranks, each of which reads its own files.
        model: the model.
        plan: for it.
        weights: see `ElixirModule`.
        files: the file operations to use.

    Raises:
        InputError: a file is missing, has changed since the plan was made, is another on another rank, or lacks a
            frozen weight in the shape and dtype of the run.
    """
    if plan.frozen_weights != "files":
        return None
    with group.together("have the files of its frozen weights"):
        opened = WeightFiles(safetensors_in(weights), files)
        try:
            written = opened.check(plan.weight_files)
            if written and group.rank == 0:
                logger.warning(
                    "%s was written or copied since the plan was made; a sample of each tensor is the same, but other "
                    "values of it may differ", few(written),
                )  # fmt: skip
            found = FrozenWeights(opened, _names_in(opened, model, plan))
        except BaseException:
            opened.close()
            raise
    answers = group.exchange("weight files", opened.records)
    for rank, theirs in enumerate(answers):
        other = sorted({record.name for record in {*theirs} ^ {*answers[0]}})
        if other:
            opened.close()
            raise InputError(
                f"{few(other)} on rank {rank} and on rank 0 are not the same file; copy it to all machines"
            )
    return found


def safetensors_in(weights: Weights | None) -> list[str]:
    """The paths of the safetensors in `weights`; `InputError` if they are something else."""
    if weights is None or isinstance(weights, Mapping):
        found = "nothing" if weights is None else "a state dict"
        raise InputError(
            "frozen_weights='files' leaves frozen weights in their safetensors, so name these files, or their folder, "
            f"with weights=; found {found}"
        )
    return paths_of(weights)


def _names_in(opened: WeightFiles, model: nn.Module, plan: Plan) -> dict[str, str]:
    """The names of all frozen parameters in the files; raises `InputError` for those that cannot be read from there."""
    own = {names[0]: (parameter, names) for parameter, names in weight_names(model).items()}
    by_any = {name: found for found in own.values() for name in found[1]}
    names: dict[str, str] = {}
    missing: list[str] = []
    for chunk in plan.chunks:
        for slot in () if chunk.trainable else chunk.parameters:
            parameter, aliases = by_any[slot.name]
            place = opened.place(aliases)
            if place is None:
                missing.append(slot.name)
                continue
            names[slot.name], dtype, shape = place
            _check(slot.name, parameter, chunk.dtype, dtype, shape)
    if missing:
        raise InputError(
            f"frozen_weights='files' finds no values of {few(missing)} in the files of weights=: name the files that "
            "have them, save them as safetensors, train them, or plan with frozen_weights='host'"
        )
    return names


def _check(name: str, parameter: nn.Parameter, planned: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if dtype_name(dtype) != planned:
        raise InputError(
            f"{name} is of {dtype_name(dtype)} in its file and of {planned} in the run, and frozen_weights='files' "
            f"reads bytes as they are: plan and run with dtype=torch.{dtype_name(dtype)}, or save the file in {planned}"
        )
    if shape != tuple(parameter.shape):
        raise InputError(f"{name} must have shape {list(parameter.shape)}, its file has {list(shape)}")
    if not parameter.is_contiguous():
        raise InputError(
            f"{name} lies in memory in another order than in its file (strides {list(parameter.stride())}), so it "
            "cannot stay there: build the model without channels_last, or plan with frozen_weights='host'"
        )
