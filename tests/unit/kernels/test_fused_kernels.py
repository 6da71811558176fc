"""Fused kernels in models: the numbers of the plain model to rounding, put in per instance, taken off again, traced."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elixir.errors import InputError
from elixir.kernels.model.fused_kernels import FusedKernels
from elixir.kernels.model.linear_cross_entropy import DeferredLogits
from elixir.wrapper import Debug, ElixirModule
from tests.common.fused import assert_close_gradients, language_case, train_with_plain
from tests.common.parity import case, make_plan

pytestmark = pytest.mark.usefixtures("fresh_kernels")

LANGUAGE = ("opt", "gpt2", "llama", "bert", "t5", "mixtral")


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*LANGUAGE, "vit"])
def test_loss_and_gradients_are_those_of_the_plain_model(family: str, dtype: torch.dtype) -> None:
    model, inp = language_case(family, dtype=dtype)
    plain = copy.deepcopy(model)
    fused = FusedKernels(model, True, "cpu")
    assert fused.counts == ({} if family == "vit" else {"cross_entropy": ("elixir", 1)})
    exact = copy.deepcopy(plain).float()(**inp).loss.item()
    mine, theirs = model(**inp), plain(**inp)
    mine.loss.backward()
    theirs.loss.backward()
    low = dtype == torch.bfloat16
    assert mine.loss.dtype == theirs.loss.dtype
    # A model that leaves its logits in bfloat16 may round its loss by several steps: then ours is to be no worse.
    tolerance = max(8e-3 * exact, abs(theirs.loss.item() - exact)) if low else 1e-6 * exact
    assert mine.loss.item() == pytest.approx(exact if low else theirs.loss.item(), abs=tolerance)
    assert_close_gradients(model, plain, 3e-2 if low else 1e-5)


def test_labels_may_come_by_position() -> None:
    model, inp = language_case("gpt2")
    expected = model(**inp).loss
    FusedKernels(model, True, "cpu")
    order = list(inspect.signature(model.forward).parameters)
    arguments = [inp.get(name) for name in order[: order.index("labels") + 1]]
    output = model(*arguments)
    assert "logits" not in output
    torch.testing.assert_close(output.loss, expected)


def test_a_target_outside_of_the_vocabulary_is_refused() -> None:
    model, inp = language_case("llama")
    FusedKernels(model, True, "cpu")
    inp["labels"][0, 9] = 4000
    with pytest.raises(InputError, match="target 4000 is none of the 128 classes"):
        model(**inp)


# --- logits that nobody computes -----------------------------------------------------------------------------------


def test_logits_are_there_wherever_they_may_be_wanted() -> None:
    model, inp = language_case("llama")
    plain = copy.deepcopy(model)
    FusedKernels(model, {"rms_norm": "plain", "swiglu": "plain"}, "cpu")
    alone = {"input_ids": inp["input_ids"]}
    assert torch.equal(model(**alone).logits, plain(**alone).logits)  # without a loss
    with torch.no_grad():
        assert torch.equal(model(**inp).logits, plain(**inp).logits)
    assert model(**inp, return_dict=False)[1].shape == (2, 24, 128)  # by position in a tuple
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(**inp).loss, plain(**inp).loss)
    model.eval(), plain.eval()
    output = model(**inp)
    assert torch.equal(output.logits, plain(**inp).logits)
    assert torch.equal(output.loss, plain(**inp).loss)
    generated = model.generate(**alone, max_new_tokens=3, do_sample=False)
    assert torch.equal(generated, plain.generate(**alone, max_new_tokens=3, do_sample=False))


def deferred() -> tuple[DeferredLogits, torch.Tensor, torch.Tensor]:
    layer = nn.Linear(8, 60)
    hidden = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(0))
    logits = DeferredLogits(hidden, layer)
    return logits, layer(hidden), torch.arange(14).view(2, 7)


def test_the_way_to_the_loss_needs_no_logits() -> None:
    logits, plain, labels = deferred()
    cut = logits.float()[..., :-1, :].contiguous()
    assert cut.shape == (2, 6, 60)
    assert cut.size(-1) == 60
    loss = F.cross_entropy(cut.view(-1, 60), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(loss, F.cross_entropy(plain[:, :-1].reshape(-1, 60), labels[:, 1:].reshape(-1)))
    assert not hasattr(cut, "__fspath__")  # Python asks for such names; none of them needs a number
    assert logits.computed is None
    assert cut.computed is None


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x / 3.0,
        lambda x: 2 * x - 1,
        lambda x: torch.tanh(x),
        lambda x: torch.cat([x, x], dim=1),
        lambda x: x.argmax(-1),
        lambda x: x[:, -1],
        lambda x: x[..., 3],
        lambda x: x[..., :3],
        lambda x: x.view(-1, 30),
        lambda x: x.softmax(-1) @ torch.ones(60),
        lambda x: F.cross_entropy(x.view(-1, 60), torch.arange(14), label_smoothing=0.1),
        lambda x: F.cross_entropy(x.view(-1, 60), torch.arange(14), weight=torch.linspace(1, 2, 60)),
        lambda x: F.cross_entropy(x.view(-1, 60), torch.arange(14), reduction="none"),
        lambda x: F.cross_entropy(x.view(-1, 60), torch.full((14, 60), 1 / 60)),
        lambda x: F.cross_entropy(x.transpose(1, 2), torch.arange(14).view(2, 7)),
        lambda x: F.log_softmax(x, dim=-1),
        lambda x: (x > 0).float(),
        lambda x: x.double(),
    ],
)
def test_whatever_else_is_asked_of_deferred_logits_is_what_logits_give(ask: Any) -> None:
    logits, plain, _ = deferred()
    assert torch.equal(ask(logits), ask(plain))


# --- per instance, and undone --------------------------------------------------------------------------------------


def test_only_this_instance_changes_and_only_until_remove() -> None:
    model, inp = language_case("llama")
    other, expected = copy.deepcopy(model), model(**inp)
    classes = {type(module): type(module).forward for module in model.modules()}
    fused = FusedKernels(model, True, "cpu")
    assert not any("forward" in vars(module) for module in other.modules())
    assert all(cls.forward is forward for cls, forward in classes.items())
    assert "logits" not in model(**inp)
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="batch_size"):
        model(input_ids=inp["input_ids"], labels=inp["labels"][:1])
    assert isinstance(model.lm_head(torch.ones(1, 64)), torch.Tensor)  # which defers nothing after an error
    fused.remove()
    fused.remove()  # a second time is nothing
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(**inp).logits, expected.logits)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    torch.testing.assert_close(twin(**inp).loss, expected.loss)  # with the weights that it has
    fused = FusedKernels(model, True, "cpu")
    model.lm_head.forward = later = lambda x: x
    fused.remove()
    assert vars(model.lm_head)["forward"] is later  # of somebody else
    assert not FusedKernels(model, True, "cpu").counts
    twin.lm_head.register_forward_hook(lambda module, args, output: None)
    del twin.lm_head.forward
    assert not FusedKernels(twin, True, "cpu").counts  # a layer that somebody listens to keeps its logits


# --- under a plan --------------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("name", "checkpoint", "mode", "options"),
    [
        ("llama", "none", "streamed", {"tie_word_embeddings": True}),
        ("llama", "non-reentrant", "streamed", {"tie_word_embeddings": False}),
        ("llama", "reentrant", "mixed", {"tie_word_embeddings": True}),
        ("t5", "reentrant", "streamed", {}),
        ("opt", "non-reentrant", "mixed", {}),
        ("bert", "none", "streamed", {}),
        ("mixtral", "none", "resident", {}),
        ("llama", "none", "streamed", {"dtype": torch.bfloat16}),
    ],
)
def test_trains_as_plain_pytorch_does(name: str, checkpoint: str, mode: str, options: dict[str, Any]) -> None:
    it = case(name, checkpoint, **options)
    plain = copy.deepcopy(it.model)
    plan = make_plan(it, mode, use_fused_kernels=True)
    module = ElixirModule(
        it.model, plan, device="cpu", debug=Debug(poison=True, evict_always=True), use_fused_kernels=True
    )
    train_with_plain(it, module, plain, 3e-3 if "dtype" in options else 1e-5)
