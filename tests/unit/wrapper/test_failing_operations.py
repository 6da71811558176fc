"""Whatever fails in moving, saving and closing, nothing is lost; a model that could not be wrapped is as it was, or is
said to be lost (`tests.common.failing` says what is left)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import elixir
from elixir.errors import ArtifactError, ElixirError, InputError, NoMemoryError
from elixir.wrapper import ElixirModule
from tests.common.failing import (
    BATCH,
    IN_CHECKPOINT,
    IN_MEMORY,
    ON_DISK,
    Fault,
    bits,
    closing,
    computing,
    net,
    plan_of,
    rehoming,
    rehoming_for_good,
    same,
    saving,
    wrapping,
)

DTYPES = (None, "bfloat16")
MOVES = (("memory", "disk"), ("disk", "memory"), ("both", "disk"), ("memory", "both"))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*ON_DISK, *IN_MEMORY])
def test_a_model_that_cannot_be_wrapped_is_as_it_was_or_said_to_be_lost(
    kind: str, dtype: str | None, tmp_path: Path
) -> None:
    failed = wrapping(tmp_path, 0, 1, kind, dtype)
    assert failed or kind in ("read", "close")


@pytest.mark.sampled
@pytest.mark.parametrize("homes", MOVES, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*ON_DISK, *IN_MEMORY])
def test_chunks_that_cannot_move_stay_and_train(
    kind: str, dtype: str | None, homes: tuple[str, str], tmp_path: Path
) -> None:
    rehoming(tmp_path, 0, 1, kind, dtype, homes)


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("homes", MOVES, ids="-".join)
@pytest.mark.parametrize("kind", [*ON_DISK, *IN_MEMORY])
def test_weights_outlive_a_move_that_can_go_neither_way(kind: str, homes: tuple[str, str], tmp_path: Path) -> None:
    rehoming_for_good(tmp_path, 0, 1, kind, homes)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*ON_DISK, *IN_MEMORY])
def test_a_model_that_is_closed_has_its_weights(kind: str, dtype: str | None, tmp_path: Path) -> None:
    closing(tmp_path, 0, 1, kind, dtype)


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*IN_CHECKPOINT, *IN_MEMORY])
def test_a_checkpoint_that_cannot_be_saved_leaves_the_last_one(kind: str, dtype: str | None, tmp_path: Path) -> None:
    saving(tmp_path, 0, 1, kind, dtype)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_no_loss_is_of_weights_of_two_steps(kind: str, tmp_path: Path) -> None:
    assert computing(tmp_path, 0, 1, kind)


def test_a_model_whose_optimizer_cannot_be_made_is_given_back() -> None:
    model, fault = net(), Fault("pages")
    before = bits(model.state_dict())
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    for at in (1, 2):
        with fault.armed(at), pytest.raises((ElixirError, OSError)):
            elixir.wrap(model, optimizer, plan=plan_of(1, "memory"), device="cpu")
        assert same(model.state_dict(), before)
    module, _ = elixir.wrap(model, optimizer, plan=plan_of(1, "memory"), device="cpu")
    module.close()


EDITS = {
    "another name": lambda plan: replace(plan, parameters=(replace(plan.parameters[0], name="gone"),)),
    "another size": lambda plan: replace(plan, parameters=(replace(plan.parameters[0], numel=1),)),
    "too large": lambda plan: replace(plan, numel=2**62, resident=True, weight_home="device"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_plan_is_refused_in_words(edit: str) -> None:
    plan, model = plan_of(1, "memory"), net()
    before = bits(model.state_dict())
    edited = replace(plan, chunks=(EDITS[edit](plan.chunks[0]), *plan.chunks[1:]))
    with pytest.raises((ArtifactError, InputError, NoMemoryError), match="edited|no room for|more of host memory"):
        ElixirModule(model, edited, device="cpu")
    assert same(model.state_dict(), before)
    model(**BATCH)
