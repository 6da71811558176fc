"""State dicts are full and strict, in and out, through the wrapper and past it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.wrapper import ElixirModule
from tests.common import gpu
from tests.common.parity import MODES, Pair, case, make_plan, take_step


@pytest.fixture(params=MODES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A CNN: batch norm has buffers, one of them of integers."""
    it = case("cnn")
    with Pair(it, make_plan(it, request.param)) as made:
        made.train(2)
        yield made


@pytest.mark.sampled(every=2)
def test_round_trip_with_buffers(pair: Pair) -> None:
    state = pair.module.state_dict()
    pair.assert_same_weights()
    pair.train(2)
    assert not torch.equal(state["0.weight"], pair.module.state_dict()["0.weight"])
    # Both go back to where they were, and go on alike from there with fresh optimizers.
    for model in (pair.module, pair.plain):
        result = model.load_state_dict(state)
        assert not result.missing_keys
        assert not result.unexpected_keys
    pair.assert_same_weights()
    pair.train(2)


@pytest.mark.sampled(every=2)
def test_the_only_rank_is_the_first(pair: Pair) -> None:
    assert pair.module.state_dict(rank0_only=True).keys() == pair.module.state_dict().keys()


@pytest.mark.sampled(every=2)
def test_what_it_gives_does_not_change_later(pair: Pair) -> None:
    state = pair.module.state_dict()
    before = copy.deepcopy(state)
    pair.train(1)
    for name, value in state.items():
        assert torch.equal(value, before[name]), name


@pytest.mark.sampled(every=2)
def test_strict_names_missing_and_unexpected(pair: Pair) -> None:
    state = pair.module.state_dict()
    state["extra"] = state.pop("3.weight")
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*3\.weight.*Unexpected.*extra"):
        pair.module.load_state_dict(state)
    result = pair.module.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["3.weight"], ["extra"])
    with pytest.raises(RuntimeError, match="size mismatch"):
        pair.module.load_state_dict(state | {"0.bias": torch.zeros(3)}, strict=False)
    for module in (pair.module, pair.module.module):
        with pytest.raises(InputError, match="assign=True would give the parameters other memory; leave it out"):
            module.load_state_dict(state, assign=True)
    same = pair.module.module.state_dict()
    with pytest.raises(InputError, match="leave it out"):
        pair.module.module.load_state_dict(same, assign=True)
    pair.module.module.load_state_dict(same)  # PyTorch has noted the first call in it
    pair.train(2)


@pytest.mark.sampled(every=2)
def test_the_inner_model_gives_full_values(pair: Pair) -> None:
    inner, plain = pair.module.module, pair.plain
    for mine, theirs in (
        (inner.state_dict(), plain.state_dict()),
        (inner[3].state_dict(), plain[3].state_dict()),
        (inner.state_dict(prefix="a."), plain.state_dict(prefix="a.")),
        (inner[1].state_dict(prefix="a.b."), plain[1].state_dict(prefix="a.b.")),
    ):
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[name].cpu(), theirs[name].cpu()) for name in theirs)
    pair.train(1)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("mode", MODES)
def test_low_precision_is_saved_and_loaded_as_its_masters(mode: str) -> None:
    it = case("opt", layers=1)
    plan = make_plan(it, mode, unified_dtype="bfloat16")
    fresh = {name: value.clone() for name, value in it.model.state_dict().items()}
    with Pair(copy.deepcopy(it), plan, alike=False) as pair:
        assert all(torch.equal(value, fresh[name]) for name, value in pair.module.state_dict().items())
        take_step(pair.optimizer, it.loss(pair.module, it.inp))
        state = pair.module.state_dict()
        inner = pair.module.module.state_dict()
        assert all(value.dtype == torch.float32 for value in state.values())
        assert all(torch.equal(value.bfloat16(), inner[name].cpu()) for name, value in state.items())
        assert any(not torch.equal(value, inner[name].cpu().float()) for name, value in state.items())
    module = ElixirModule(it.model, plan, device=gpu.DEVICE)
    module.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    with module.gathered(write=True):  # what is not written keeps its precision
        module.module.lm_head.weight.data[0, 0] = 3.0
    after = module.state_dict()
    state["lm_head.weight"][0, 0] = 3.0
    assert all(torch.equal(value, state[name]) for name, value in after.items())


def test_a_state_dict_that_fails_leaves_nothing_open() -> None:
    it = case("cnn")
    with Pair(it, make_plan(it, "streamed")) as pair:
        handle = pair.module.module.register_state_dict_post_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pair.module.state_dict()
        handle.remove()
        with pytest.raises(InputError, match="outside"):
            pair.module.module[0].weight.data_ptr()
        with pytest.raises(InputError, match="outside"):
            pair.module.module.state_dict(keep_vars=True)["0.weight"].data_ptr()
        pair.train(1)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["gpt2", "t5", "albert"])
def test_save_pretrained_and_from_pretrained(family: str, mode: str, tmp_path: Path) -> None:
    it = case(family)
    with Pair(it, make_plan(it, mode)) as pair:
        pair.train(1)
        pair.module.save_pretrained(tmp_path)
        loaded = type(pair.plain).from_pretrained(tmp_path)
        theirs = pair.plain.state_dict()
        assert list(theirs) == list(loaded.state_dict())
        assert all(torch.equal(value, theirs[name].cpu()) for name, value in loaded.state_dict().items())
        pair.train(1)


def test_as_a_part_of_another_module() -> None:
    it = case("cnn")
    outer = nn.Module()
    outer.net = ElixirModule(it.model, make_plan(it, "streamed"), device=gpu.DEVICE)
    state = {name: value + 1 for name, value in outer.state_dict().items()}
    assert "net.0.weight" in state
    result = outer.load_state_dict(state)
    assert not result.missing_keys
    assert all(torch.equal(value, state[name]) for name, value in outer.state_dict().items())
    outer.net.close()


def test_a_closed_module_is_refused() -> None:
    it = case("cnn")
    module = ElixirModule(it.model, make_plan(it, "streamed"), device=gpu.DEVICE)
    module.close()
    for call in (module.state_dict, lambda: module(**it.inp), module.half):
        with pytest.raises(InputError, match="closed"):
            call()
