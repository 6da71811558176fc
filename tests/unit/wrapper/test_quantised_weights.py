"""Frozen weights in 4 bits: packed bytes and what unpacks them are planned, streamed and saved as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import elixir
from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.errors import InputError
from elixir.models.model_tensors import buffer_places
from elixir.wrapper.assemble.weight_source import SafetensorsFiles
from tests.common.parity import MODES, Pair, assert_as_planned, make_plan
from tests.common.quantised import FORMS, TORCHAO, quantised_case

CHECKPOINTS = ("none", "non-reentrant")
_QUICK = tuple({("streamed", "none"), (mode, "non-reentrant")} for mode in ("mixed", "resident"))
"""Modes and checkpoints of the quick tests of a form, in turn."""


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("form", "mode", "checkpoint"),
    [
        pytest.param(
            form,
            mode,
            checkpoint,
            marks=[] if (mode, checkpoint) in _QUICK[number % len(_QUICK)] else [pytest.mark.slow],
        )
        for number, form in enumerate((*FORMS, *TORCHAO))
        for mode in MODES
        for checkpoint in CHECKPOINTS
    ],
)
def test_steps_have_the_bits_of_plain_pytorch(form: str, mode: str, checkpoint: str) -> None:
    it = quantised_case(form, checkpoint)
    with Pair(it, make_plan(it, mode), max_norm=0.5) as pair:
        pair.train(4)
        pair.assert_same_weights()
        assert_as_planned(pair.module, ("loads",))


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["nf4 double", "nf4 in bfloat16", "torchao int8"])
def test_a_checkpoint_gives_the_bits_back(form: str, tmp_path: Any) -> None:
    first = quantised_case(form)
    other = copy.deepcopy(first)
    for parameter in other.model.parameters():
        if parameter.requires_grad:
            parameter.data.zero_()
    plan = make_plan(first, "streamed")
    with Pair(first, plan) as one, Pair(other, plan) as two:
        one.train(2)
        save_checkpoint(tmp_path / "saved", {"model": one.module, "optimizer": one.optimizer}, wait=True)
        load_checkpoint(tmp_path / "saved", {"model": two.module, "optimizer": two.optimizer})
        two.plain.load_state_dict(one.plain.state_dict(), strict=False)  # bitsandbytes refuses its own names
        two.plain_optimizer.load_state_dict(one.plain_optimizer.state_dict())
        two.train(2)


def test_numbers_of_another_kind_are_not_loaded(tmp_path: Any) -> None:
    four, other = quantised_case("nf4"), quantised_case("fp4 in float32")
    kinds = {place.name.rpartition(".")[2] for it in (four, other) for place in buffer_places(it.model)}
    assert {"nf4", "fp4"} <= kinds
    FORMS["fp4"] = {"quant_type": "fp4"}
    try:
        fp4 = quantised_case("fp4")
    finally:
        del FORMS["fp4"]
    with Pair(four, make_plan(four, "streamed")) as one, Pair(fp4, make_plan(fp4, "streamed")) as two:
        save_checkpoint(tmp_path / "saved", {"model": one.module}, wait=True)
        with pytest.raises(elixir.ElixirError, match="quant_map"):
            load_checkpoint(tmp_path / "saved", {"model": two.module})


def _saved(model: nn.Module, folder: Any) -> Any:
    """The model without its adapters in a file, as `save_pretrained` of transformers writes it."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    named = model.get_base_model().state_dict()
    values = {name.replace(".base_layer.", "."): value.clone() for name, value in named.items() if "lora_" not in name}
    folder.mkdir()
    save_file(values, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("form", "frozen"),
    [
        ("nf4 double", "files"),
        pytest.param("nf4 double", "host", marks=pytest.mark.slow),
        pytest.param("nf4", "files", marks=pytest.mark.slow),
    ],
)
def test_files_of_bitsandbytes_may_be_given(form: str, frozen: str, tmp_path: Any) -> None:
    expected, it = quantised_case(form), quantised_case(form)
    folder = _saved(expected.model, tmp_path / "saved")
    names = {place.name for place in buffer_places(expected.model) if ".weight." in place.name}
    with torch.no_grad():
        for name, parameter in it.model.named_parameters():
            if type(parameter).__name__ == "Params4bit":
                parameter.zero_()
                assert f"{name}.absmax" in names
        for place in buffer_places(it.model):
            if place.name in names:
                place.buffer.zero_()
    memory = {"device_memory": "8MiB", "host_budget": "1GiB", "hardware": "cpu", "assume": "nominal"}
    optimizer = torch.optim.AdamW([each for each in it.model.parameters() if each.requires_grad], lr=1e-3)
    module, optimizer = elixir.wrap(
        it.model,
        optimizer,
        inp=it.inp,
        weights=folder,
        strict=False,
        disk_folder=str(tmp_path),
        placement="cpu",
        frozen_weights=frozen,
        **memory,
    )
    assert module.plan.reads_files == (frozen == "files")
    for _ in range(2):
        loss, plain = module(**it.inp).loss, expected.model(**it.inp).loss
        assert torch.equal(loss, plain)
        optimizer.backward(loss)
        plain.backward()
        optimizer.zero_grad()
    module.close()
    assert torch.equal(it.model(**it.inp).loss, expected.model(**it.inp).loss)


def test_weights_of_another_form_are_refused(tmp_path: Any) -> None:
    it = quantised_case("nf4")
    folder = _saved(it.model, tmp_path / "saved")
    lacking = {name: value for name, value in SafetensorsFiles(folder).items() if not name.endswith("absmax")}
    for other, given, said in (
        (quantised_case("nf4 double"), folder, "packed by bitsandbytes as .*'nested_blocksize': 256"),
        (quantised_case("fp4 in float32"), folder, "packed by bitsandbytes as .*nf4.* the model is .*fp4"),
        (it, lacking, "without what unpacks them"),
    ):
        with pytest.raises(InputError, match=said):
            elixir.ElixirModule(other.model, make_plan(other, "streamed"), weights=given, strict=False)


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit"])
def test_optimizers_of_bitsandbytes_in_8_bits_are_refused_with_a_way_out(name: str) -> None:
    it = quantised_case("nf4")
    kind = getattr(pytest.importorskip("bitsandbytes").optim, name)
    optimizer = kind([each for each in it.model.parameters() if each.requires_grad])
    with pytest.raises(InputError, match=rf"{name} .*AdamW with moments='8bit', which rounds to other bits"):
        elixir.wrap(it.model, optimizer, inp=it.inp, hardware="cpu")
