"""Other libraries' kernels in models and under plans: which are taken, put in per instance, and taken off again."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elixir.wrapper.module
from elixir.errors import ElixirError, InputError, InputTypeError
from elixir.kernels.model import fused_kernels
from elixir.kernels.model.fused_kernels import FusedKernels
from elixir.wrapper import Debug, ElixirModule
from tests.common.fused import language_case, train_with_plain
from tests.common.parity import case, make_plan

pytestmark = pytest.mark.usefixtures("fresh_kernels")


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"rmsnorm": "torch"}, InputError, "did you mean rms_norm"),
        (
            {"rms_norm": "elixir"},
            InputError,
            "choose one of liger, apex, plain.*own norms.*are gone: install liger-kernel",
        ),
        ({"rms_norm": 3}, InputError, "3 provides no rms_norm"),
        ({"rotary": "liger"}, InputError, "call its apply_liger_kernel_to_"),
        ("yes", InputTypeError, "True, False or a dict"),
    ],
)
def test_wishes_that_cannot_be_are_refused(asked: Any, error: type[ElixirError], text: str) -> None:
    with pytest.raises(error, match=text):
        FusedKernels(nn.Linear(2, 2), asked, "cpu")


def test_the_environment_goes_before_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = language_case("llama")
    monkeypatch.setenv(fused_kernels.ENVIRONMENT, "swiglu=plain, cross_entropy = plain")
    assert not FusedKernels(model, {"cross_entropy": "elixir"}, "cpu").counts
    monkeypatch.setenv(fused_kernels.ENVIRONMENT, "0")
    assert not FusedKernels(model, True, "cpu").counts
    monkeypatch.setenv(fused_kernels.ENVIRONMENT, "swiglu")
    with pytest.raises(InputError, match="'' provides no swiglu"):
        FusedKernels(model, True, "cpu")
    assert not FusedKernels(model, False, "cpu").counts


LIGER = {"liger_kernel/__init__.py": "", "liger_kernel/transformers/__init__.py": ""}


@pytest.mark.parametrize(
    ("files", "asked", "reason"),
    [
        ({}, {}, "liger_kernel is not used: it is not installed"),
        ({"liger_kernel/__init__.py": "raise KeyError('its code ran')"}, {}, "liger_kernel is not used: it is not"),
        (LIGER | {"liger_kernel/transformers/monkey_patch.py": "import triton_not_there"}, {}, "No module named 'triton_not_there'"),
        (LIGER | {"liger_kernel/transformers/monkey_patch.py": ""}, {}, "has no attribute 'MODEL_TYPE_TO_APPLY_LIGER_FN'"),
        ({"apex/__init__.py": "raise KeyError('its code ran')"}, {"rms_norm": "apex"}, "apex is not used: it is not"),
        ({"apex/__init__.py": "", "apex/normalization/__init__.py": "", "apex/normalization/fused_layer_norm.py": ""},
         {"rms_norm": "apex"}, "apex is not used: No module named 'fused_layer_norm_cuda'"),
    ],
)  # fmt: skip
def test_absent_broken_or_other_versions_cost_one_line(
    files: dict[str, str],
    asked: dict[str, str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, text in files.items():
        _install(tmp_path, monkeypatch, name, text)
    model, _ = language_case("llama")
    with caplog.at_level(logging.INFO, "elixir"):
        assert set(FusedKernels(model, asked or True, "cuda").counts) == {"cross_entropy"}
    assert sum(reason in record.getMessage() for record in caplog.records) == 1
    assert "its code ran" not in caplog.text
    assert ("rms_norm is not run by apex here; the model's own code is" in caplog.text) == ("rms_norm" in asked)


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """A package on disk that is found before any other."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    for loaded in [key for key in sys.modules if key.partition(".")[0] == name.partition("/")[0].removesuffix(".py")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.syspath_prepend(folder)


# --- kernels of libraries, played by functions that use their weights as those do ------------------------------------


class _ForeignNorm(torch.autograd.Function):
    """Reads weights as plain memory, in forward and from `saved_tensors`, as Liger's and Apex' norms do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        weight.data_ptr()  # the memory that a kernel gets
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        inverse = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        along = (gradient * weight * x).mean(-1, keepdim=True)
        of_x = gradient * weight * inverse - x * along * inverse**3
        return of_x, (gradient * x * inverse).flatten(0, -2).sum(0), None


def _rms_norm_of_apex(input: Any, weight: Any, normalized_shape: Any, eps: float = 1e-6) -> Any:
    assert type(weight) is torch.Tensor
    assert normalized_shape == (input.shape[-1],)
    return _ForeignNorm.apply(input, weight, eps)


def _swiglu_of_xformers(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, w3: Any, b3: Any) -> Any:
    assert all(type(w) is torch.Tensor for w in (w1, w2, w3))
    return F.linear(F.silu(F.linear(x, w1, b1)) * F.linear(x, w2, b2), w3, b3)


def _layer_norm_of_apex(x: Any, weight: Any, bias: Any, normalized_shape: Any, eps: float = 1e-6) -> Any:
    return F.layer_norm(x, normalized_shape, weight, bias, eps)


class _LigerNorm(nn.Module):
    """Its forward reads the weight of the module to which it is bound, as Liger's norm does."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        assert self.in_place is False
        return _ForeignNorm.apply(hidden_states, self.weight.contiguous(), self.variance_epsilon)


def _patch_of_liger(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    geglu: bool = True,
    model: Any = None,
) -> None:
    """Changes the file of the classes, too, as Liger's does."""
    import transformers.models.llama.modeling_llama as llama

    assert (rope, cross_entropy, fused_linear_cross_entropy, geglu) == (False, False, False, swiglu)
    if rms_norm:
        llama.LlamaRMSNorm = _LigerNorm
        for part in model.modules():
            if hasattr(part, "variance_epsilon"):
                part.in_place, part.forward = True, MethodType(_LigerNorm.forward, part)
    if not swiglu:
        raise ValueError("half done")


@pytest.fixture
def libraries_present(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = f"from {__name__} import"
    files = LIGER | {
        "liger_kernel/transformers/monkey_patch.py":
            f"{ours} _patch_of_liger\nMODEL_TYPE_TO_APPLY_LIGER_FN = {{'llama': _patch_of_liger}}",
        "fused_layer_norm_cuda.py": "",
        "apex/__init__.py": "",
        "apex/normalization/__init__.py": "",
        "apex/normalization/fused_layer_norm.py":
            f"{ours} _rms_norm_of_apex as fused_rms_norm_affine, _layer_norm_of_apex as fused_layer_norm_affine",
        "xformers/__init__.py": "",
        "xformers/ops.py": f"{ours} _swiglu_of_xformers as swiglu",
    }  # fmt: skip
    for name, text in files.items():
        _install(tmp_path, monkeypatch, name, text)


LAYERS = {
    "llama": ({}, {"layers": ("liger", 5)}),
    "llama, asked": ({"rms_norm": "apex", "swiglu": "xformers"}, {"rms_norm": ("apex", 5), "swiglu": ("xformers", 2)}),
    "llama, plain": ({"rms_norm": "plain"}, {}),
    "opt": ({}, {}),
    "gpt2": ({"layer_norm": "apex"}, {"layer_norm": ("apex", 5)}),
    "t5": ({}, {"rms_norm": ("apex", 12)}),
}


@pytest.mark.usefixtures("libraries_present")
@pytest.mark.parametrize("name", [*LAYERS])
def test_kernels_that_are_no_torch_functions_see_streamed_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are poisoned and evicted at once, and the libraries' places are taken as on a GPU."""
    made: list[FusedKernels] = []

    def as_on_cuda(model: nn.Module, use: bool | Mapping[str, str], device_type: str) -> FusedKernels:
        made.append(FusedKernels(model, use, "cuda"))
        return made[-1]

    monkeypatch.setattr(elixir.wrapper.module, "FusedKernels", as_on_cuda)
    asked, expected = LAYERS[name]
    it = case(name.partition(",")[0], "non-reentrant")
    plain = copy.deepcopy(it.model)
    use = asked or True
    plan = make_plan(it, "streamed", use_fused_kernels=use)
    module = ElixirModule(
        it.model, plan, device="cpu", debug=Debug(poison=True, evict_always=True), use_fused_kernels=use
    )
    assert made[-1].counts == {"cross_entropy": ("elixir", 1), **expected}
    train_with_plain(it, module, plain, 1e-5)
