"""The choice of fused kernels among those present, and other libraries' kernels in models and under plans."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elixir.tracer.trace
import elixir.wrapper.module
from elixir.errors import ElixirError, InputError, InputTypeError
from elixir.kernels.model import registry
from elixir.kernels.model.fused_kernels import FusedKernels
from elixir.kernels.model.registry import choose
from elixir.wrapper import Debug, ElixirModule
from tests.common.fused import language_case, train_with_plain
from tests.common.parity import case, make_plan
from tests.common.tiny_models import tiny

pytestmark = pytest.mark.usefixtures("fresh_kernels")


def test_without_libraries_the_next_in_line_is_taken() -> None:
    absent = [name for name in ("apex", "liger_kernel", "xformers") if name in sys.modules]
    if absent:
        pytest.skip(f"{absent} are here")
    assert choose("rms_norm", "cpu").name == "elixir"
    assert choose("layer_norm", "cuda").name == "plain"
    assert choose("cross_entropy", "cuda").name == "elixir"


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"rmsnorm": "torch"}, InputError, "did you mean rms_norm"),
        ({"rms_norm": "triton"}, InputError, "choose one of apex, liger, torch, elixir, plain"),
        ({"rms_norm": 3}, InputTypeError, "maps names of kinds"),
        ("yes", InputTypeError, "True, False or a dict"),
    ],
)
def test_wishes_that_cannot_be_are_refused(asked: Any, error: type[ElixirError], text: str) -> None:
    with pytest.raises(error, match=text):
        FusedKernels(nn.Linear(2, 2), asked, "cpu")


def test_the_environment_goes_before_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = language_case("llama")
    monkeypatch.setenv(registry.ENVIRONMENT, "swiglu=plain, rms_norm = elixir")
    assert set(FusedKernels(model, {"swiglu": "elixir"}, "cpu").counts) == {"rms_norm", "cross_entropy"}
    monkeypatch.setenv(registry.ENVIRONMENT, "0")
    assert not FusedKernels(tiny("llama"), True, "cpu").counts
    monkeypatch.setenv(registry.ENVIRONMENT, "swiglu")
    with pytest.raises(InputError, match="kind=provider"):
        FusedKernels(tiny("llama"), True, "cpu")
    assert not FusedKernels(tiny("llama"), False, "cpu").counts


def test_another_project_named_apex_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _install(tmp_path, monkeypatch, "apex/__init__.py", "raise KeyError('its code ran')")
    with caplog.at_level(logging.INFO, "elixir"):
        assert [choose("rms_norm", "cuda").name for _ in range(2)] != ["apex"] * 2
        choose("layer_norm", "cuda", "apex")
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert sum("apex is not used: the package named apex here is another project" in line for line in lines) == 1
    assert sum("layer_norm cannot be run by apex" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "liger_kernel is not installed"),
        ({"liger_kernel/__init__.py": "raise OSError('no such libcuda')"}, "its import failed (OSError: no such libcuda)"),
        ({"liger_kernel/__init__.py": "", "liger_kernel/transformers/__init__.py": "import triton_not_there"},
         "its import failed (ModuleNotFoundError: No module named 'triton_not_there')"),
        ({"liger_kernel/__init__.py": "", "liger_kernel/transformers/__init__.py": "",
          "liger_kernel/transformers/functional.py": "def liger_geglu(a, b): ..."},
         "this version has no liger_kernel.transformers.functional.liger_rms_norm"),
    ],
)  # fmt: skip
def test_absent_broken_or_other_versions_cost_one_line(
    files: dict[str, str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if "liger_kernel" in sys.modules and not files:
        pytest.skip("it is here")
    for name, text in files.items():
        _install(tmp_path, monkeypatch, name, text)
    with caplog.at_level(logging.INFO, "elixir"):
        names = [choose(kind, "cuda").name for kind in ("rms_norm", "swiglu", "rotary", "rms_norm")]
    assert "liger" not in names
    lines = [record.getMessage() for record in caplog.records if "liger is not used" in record.getMessage()]
    assert lines == [f"liger is not used: {reason}"]


@pytest.mark.parametrize("extension", [None, ModuleType("fused_layer_norm_cuda")], ids=["absent", "there"])
def test_apex_without_its_extension_is_not_taken(extension: ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(monkeypatch, "apex.normalization.fused_layer_norm", fused_rms_norm_affine=_rms_norm_of_apex)
    monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", extension)  # importing None raises
    assert (choose("rms_norm", "cuda").name == "apex") is (extension is not None)


def test_apex_as_nvidia_lays_it_out_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "fused_layer_norm_cuda.py": "",
        "apex/__init__.py": "",
        "apex/normalization/__init__.py": "",
        "apex/normalization/fused_layer_norm.py": "def fused_rms_norm_affine(x, w, shape, eps): ...",
    }.items():
        _install(tmp_path, monkeypatch, name, text)
    assert choose("rms_norm", "cuda").name == "apex"
    assert choose("layer_norm", "cuda", "apex").name == "plain"  # this version has no such function


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """A package on disk that is found before any other."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    for loaded in [key for key in sys.modules if key.partition(".")[0] == name.partition("/")[0].removesuffix(".py")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.syspath_prepend(folder)


def _fake(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """A library that is loaded already, without files."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:count]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for key, function in functions.items():
        setattr(module, key, function)


# --- kernels of libraries, played by functions that use their weights as those do ------------------------------------


class _ForeignNorm(torch.autograd.Function):
    """Reads weights as plain memory, in forward and from `saved_tensors`, as Liger's and Apex' norms do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert type(weight) is torch.Tensor
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


def _rms_norm_of_liger(X: Any, W: Any, eps: float, offset: float = 0.0, casting_mode: str = "llama",
                       in_place: bool = True) -> Any:  # fmt: skip
    assert (offset, casting_mode, in_place) == (0.0, "llama", False)
    return _ForeignNorm.apply(X, W, eps)


def _rms_norm_of_apex(input: Any, weight: Any, normalized_shape: Any, eps: float = 1e-6) -> Any:
    assert normalized_shape == (input.shape[-1],)
    return _ForeignNorm.apply(input, weight, eps)


def _rope_of_liger(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any = None, unsqueeze_dim: int = 1) -> Any:
    def turned(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return x * cos.unsqueeze(1) + torch.cat((-x[..., half:], x[..., :half]), -1) * sin.unsqueeze(1)

    return turned(q), turned(k)


def _swiglu_of_xformers(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, w3: Any, b3: Any) -> Any:
    assert all(type(w) is torch.Tensor for w in (w1, w2, w3))
    return F.linear(F.silu(F.linear(x, w1, b1)) * F.linear(x, w2, b2), w3, b3)


@pytest.fixture
def libraries_present(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(
        monkeypatch,
        "liger_kernel.transformers.functional",
        liger_rms_norm=_rms_norm_of_liger,
        liger_swiglu=lambda a, b: F.silu(a) * b,
        liger_rope=_rope_of_liger,
        liger_layer_norm=lambda X, W, B, eps: F.layer_norm(X, W.shape, W, B, eps),
    )
    _fake(
        monkeypatch,
        "apex.normalization.fused_layer_norm",
        fused_rms_norm_affine=_rms_norm_of_apex,
        fused_layer_norm_affine=lambda x, w, b, shape, eps: F.layer_norm(x, shape, w, b, eps),
    )
    monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", ModuleType("fused_layer_norm_cuda"))
    _fake(monkeypatch, "xformers.ops", swiglu=_swiglu_of_xformers)


@pytest.mark.usefixtures("libraries_present")
def test_libraries_go_before_our_own_on_cuda_only() -> None:
    assert [choose(kind, "cuda").name for kind in ("rms_norm", "swiglu", "rotary", "layer_norm", "cross_entropy")] == [
        "apex", "liger", "liger", "plain", "elixir"
    ]  # fmt: skip
    assert [choose(kind, "cpu").name for kind in ("rms_norm", "swiglu", "rotary")] == ["elixir", "elixir", "plain"]
    assert choose("rms_norm", "cuda", "liger").name == "liger"
    assert choose("swiglu", "cuda", "xformers").whole_block


LIBRARIES: list[tuple[str, dict[str, str]]] = [
    ("llama", {}),
    ("llama", {"rms_norm": "liger", "swiglu": "xformers"}),
    ("opt", {"layer_norm": "liger"}),
    ("gpt2", {"layer_norm": "apex"}),
    ("t5", {"rms_norm": "liger"}),
]


@pytest.mark.usefixtures("libraries_present")
@pytest.mark.parametrize(("family", "asked"), LIBRARIES)
def test_kernels_that_are_no_torch_functions_see_streamed_weights(
    family: str, asked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are poisoned and evicted at once, and the libraries' places are taken as on a GPU."""

    made: list[FusedKernels] = []

    def as_on_cuda(model: nn.Module, use: bool | Mapping[str, str], device_type: str) -> FusedKernels:
        made.append(FusedKernels(model, use, "cuda"))
        return made[-1]

    monkeypatch.setattr(elixir.wrapper.module, "FusedKernels", as_on_cuda)
    monkeypatch.setattr(elixir.tracer.trace, "FusedKernels", as_on_cuda)
    it = case(family, "non-reentrant")
    plain = copy.deepcopy(it.model)
    use = asked or True
    plan = make_plan(it, "streamed", use_fused_kernels=use)
    module = ElixirModule(
        it.model, plan, device="cpu", debug=Debug(poison=True, evict_always=True), use_fused_kernels=use
    )
    used = {name for name, _ in made[-1].counts.values()}
    assert used >= set(asked.values())
    train_with_plain(it, module, plain, 1e-5)


def test_rotation_changes_neither_class_nor_library(libraries_present: None) -> None:
    import transformers.models.llama.modeling_llama as llama

    model, inp = language_case("llama")
    plain = copy.deepcopy(model)
    before = (llama.apply_rotary_pos_emb, llama.LlamaAttention.forward)
    fused = FusedKernels(model, {"rms_norm": "plain", "swiglu": "plain", "cross_entropy": "plain"}, "cuda")
    assert fused.counts == {"rotary": ("liger", 2)}
    assert (llama.apply_rotary_pos_emb, llama.LlamaAttention.forward) == before
    attention = model.model.layers[0].self_attn
    forward = attention.forward.__func__
    while "apply_rotary_pos_emb" not in forward.__globals__:  # a decorator's, of transformers from 5.24 on
        forward = forward.__wrapped__
    assert forward.__globals__["apply_rotary_pos_emb"] is not llama.apply_rotary_pos_emb
    torch.testing.assert_close(model(**inp).logits, plain(**inp).logits)
