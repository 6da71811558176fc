"""Frozen weights in 4 bits: packed bytes and what unpacks them are planned, streamed and saved as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import elixir
from benchmark.observe import observe_step
from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.errors import InputError
from elixir.hardware.profile import preset
from elixir.models.model_tensors import buffer_places
from elixir.models.quantised import flat
from elixir.tracer.trace import trace_step
from elixir.wrapper.assemble.weight_source import SafetensorsFiles
from tests.common.parity import MODES, Case, Pair, assert_as_planned, make_plan
from tests.common.quantised import FORMS, TORCHAO, quantised_case

CHECKPOINTS = ("none", "non-reentrant")
_QUICK = tuple({("streamed", "none"), (mode, "non-reentrant")} for mode in ("mixed", "resident"))
"""Modes and checkpoints of the quick tests of a form, in turn."""


def step(model: nn.Module, inp: dict[str, Any]) -> None:
    model(**inp).loss.backward()


def traced(it: Case, **options: Any) -> elixir.StepTrace:
    return trace_step(it.model, it.inp, step, hardware=preset("cpu"), **options)


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


def test_scales_of_torchao_are_planned_as_weights() -> None:
    it = quantised_case("torchao int8")
    weights = {name: each for name, each in it.model.named_parameters() if type(each).__name__ == "Int8Tensor"}
    planned = {info.name: info for info in traced(it).parameters}
    assert len(weights) == 14
    for name, weight in weights.items():
        for own in ("qdata", "scale"):
            held = getattr(weight, own)
            info = planned[f"{name}.{own}"]
            assert (info.shape, info.dtype) == (tuple(held.shape), str(held.dtype).removeprefix("torch."))
    assert traced(it).param_bytes == sum(part.nbytes for each in it.model.parameters() for _, part in flat("", each))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_of_the_tensors(form: str) -> None:
    it = quantised_case(form)
    trace = traced(it)
    assert trace.param_bytes == sum(parameter.nbytes for parameter in it.model.parameters())
    places = {place.buffer: place.name for place in buffer_places(it.model)}
    companions = [name for name in places.values() if ".weight." in name]
    assert len(companions) == {"nf4 double": 5}.get(form, 2) * 14
    assert trace.buffer_bytes == sum(buffer.nbytes for buffer in places)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize(
    "form", ["nf4", "nf4 double", "torchao int8", pytest.param(TORCHAO[1], marks=pytest.mark.slow)]
)
def test_the_peak_is_that_of_a_real_step(form: str, checkpoint: str) -> None:
    it = quantised_case(form, checkpoint)
    trace = traced(it)
    real = observe_step(it.model, it.inp, step).peak_bytes
    assert abs(trace.backward_peak_bytes - trace.resting_bytes - real) <= 0.01 * real


def test_products_with_packed_weights_have_their_flops() -> None:
    it, plain = quantised_case("nf4"), quantised_case("nf4")
    for layer in plain.model.modules():
        for name, child in layer.named_children():
            if type(child).__name__ == "Linear4bit":
                setattr(layer, name, nn.Linear(child.in_features, child.out_features, False).requires_grad_(False))
    assert traced(it).flops == traced(plain).flops


def test_a_cast_leaves_packed_numbers_and_their_scales() -> None:
    it = quantised_case("fp4 in float32")
    was = {place.name: place.buffer.dtype for place in buffer_places(it.model) if ".weight." in place.name}
    module = elixir.ElixirModule(it.model, make_plan(it, "streamed", unified_dtype="bfloat16"), device="cpu")
    module(**it.inp).loss.backward()
    now = {place.name: place.buffer.dtype for place in buffer_places(it.model) if ".weight." in place.name}
    assert was == now
    chunks = {slot.name: chunk.dtype for chunk in module.plan.chunks for slot in chunk.parameters}
    packed = [name for name in chunks if f"{name}.absmax" in was]
    assert packed
    assert {chunks[name] for name in packed} == {"float32"}
    assert set(chunks.values()) == {"float32", "bfloat16"}


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


def test_close_gives_packed_weights_back() -> None:
    it = quantised_case("nf4")
    kinds = {name: type(parameter) for name, parameter in it.model.named_parameters()}
    twin = copy.deepcopy(it.model)
    with Pair(it, make_plan(it, "streamed"), plain=twin) as pair:
        pair.train(2)
    assert {name: type(parameter) for name, parameter in it.model.named_parameters()} == kinds
    assert torch.equal(it.model(**it.inp).loss, twin(**it.inp).loss)


def test_what_cannot_be_right_is_refused() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    it = quantised_case("nf4")
    unpacked = nn.Sequential(bnb.nn.Linear4bit(16, 16), nn.Linear(16, 16))
    eight = nn.Sequential(bnb.nn.Linear8bitLt(16, 16), nn.Linear(16, 16))
    floating = quantised_case("fp4 in float32").model
    trained = next(p for p in floating.parameters() if type(p).__name__ == "Params4bit")
    trained.requires_grad_(True)
    for model, said in (
        (unpacked, r"0\.weight is a Params4bit that is not quantised yet.*model\.to\('cpu'\)"),
        (eight, r"0\.weight is of Int8Params, .*load_in_4bit"),
        (floating, r"is a trained Params4bit.* train adapters"),
    ):
        with pytest.raises(InputError, match=said):
            trace_step(model, it.inp, step, hardware=preset("cpu"))


@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_an_evaluation_changes_no_packed_weight(mode: str) -> None:
    it = quantised_case("nf4 double")
    plain = copy.deepcopy(it.model)
    bits = {place.name: place.buffer.clone() for place in buffer_places(it.model) if ".weight." in place.name}
    module = elixir.ElixirModule(it.model, make_plan(it, mode), device="cpu")
    before = module(**it.inp).loss
    module.eval()
    with torch.no_grad():
        module(**it.inp)
    assert torch.equal(module.train()(**it.inp).loss, before)
    module.close()
    assert torch.equal(it.model(**it.inp).loss, plain(**it.inp).loss)
    now = {place.name: place.buffer for place in buffer_places(it.model) if ".weight." in place.name}
    assert all(torch.equal(bits[name], value) for name, value in now.items())


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


def test_files_of_bitsandbytes_are_complete(tmp_path: Any) -> None:
    """All of a model without adapters: strict as well."""
    it, other = quantised_case("nf4 double"), quantised_case("nf4 double")
    folder = _saved(it.model, tmp_path / "saved")
    base = other.model.unload()
    base.model.norm.weight.requires_grad_(True)
    plan = make_plan(Case(base, other.inp, other.loss), "streamed")
    module = elixir.ElixirModule(base, plan, weights=folder)
    with torch.no_grad():
        assert torch.equal(module(**it.inp).loss, it.model.unload()(**it.inp).loss)


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
