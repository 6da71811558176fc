"""Adam out of place: the bits of the step in place, wherever it comes from, and old states that nobody touches."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from elixir.errors import InputError
from elixir.kernels.adam import step as native
from elixir.kernels.adam.adam_rule import AdamOptions, step_numbers
from elixir.kernels.adam.moments import MasterStates, make_moments
from elixir.kernels.adam.step import COPIED, ONE_PASS, Combination, adam_step, build_kernel
from tests.common import inside
from tests.common.early import needs_kernel

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = (
    AdamOptions(lr=1e-3, weight_decay=0.1),
    AdamOptions(lr=1e-2, beta1=0.3, decoupled=False, weight_decay=0.01, maximize=True),
)
ONE_LIBRARY = Combination(torch.float32, None, "bfloat16")
"""A case with one library: with float32 moments a second one is made if the first has other bits."""
_ALL = [(gradient, weight) for gradient in FLOATS for weight in (None, *FLOATS[1:])]
_QUICK = {(torch.bfloat16, torch.bfloat16), (torch.float32, None)}
DTYPES = [pytest.param(*pair, marks=() if pair in _QUICK else pytest.mark.slow) for pair in _ALL]


@pytest.fixture(autouse=True)
def _nothing_made(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.forget(monkeypatch, "Adam kernels")
    monkeypatch.setenv("ELIXIR_COMPILE", "0")


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELIXIR_COMPILE", "wait")


def states(numel: int, kind: str, seed: int, at: int = 0) -> MasterStates:
    """Some states after a few steps; moments of more elements where these begin `at` a later one."""
    generator = torch.Generator().manual_seed(seed)
    master, moments = torch.randn(numel, generator=generator), make_moments(at + numel, kind)
    for number in (1, 2):
        adam_step(torch.randn(numel, generator=generator), master, None, moments, AdamOptions(), number, at=at)
    return MasterStates(master, moments)


def copied(given: MasterStates, at: int) -> MasterStates:
    made = make_moments(at + given.master.numel(), given.moments.kind)
    for mine, theirs in zip(made.tensors(), given.moments.tensors(), strict=True):
        mine.copy_(theirs)
    return MasterStates(given.master.clone(), made)


def bits(given: MasterStates, weights: torch.Tensor | None = None) -> list[bytes]:
    tensors = (given.master, *given.moments.tensors(), *([] if weights is None else [weights]))
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def both_ways(gradient: torch.Tensor, kind: str, weight: torch.dtype | None, at: int = 0) -> set[str]:
    """Step in place and out of place; the same bits, and the old states as they were. Gives the forms of the latter."""
    numel, forms = gradient.numel(), set()
    for number, options in enumerate(OPTIONS):
        for factor in (1.0, 0.37):
            old = states(numel, kind, number, at)
            before, place, new = bits(old), copied(old, at), copied(states(numel, kind, 7, at), at)
            outs = [None if weight is None else torch.zeros(numel, dtype=weight) for _ in range(2)]
            with mock.patch.dict(os.environ, {"ELIXIR_COMPILE": "0"}):
                adam_step(gradient, place.master, outs[0], place.moments, options, 3, factor, at=at or None)
            given = (gradient, old.master, outs[1], old.moments, options, 3, factor)
            forms.add(adam_step(*given, at=at or None, into=new))
            assert bits(old) == before
            assert bits(new, outs[1]) == bits(place, outs[0])
    return forms


def gradient_of(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)


@needs_kernel
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize(("gradient", "weight"), DTYPES)
def test_the_kernel_has_the_bits_of_the_step_in_place(
    gradient: torch.dtype, weight: torch.dtype | None, kind: Any, compiles: None
) -> None:
    for numel in (1, 15, 16, 31, 32, 33, 1000, 4096, 10_007):
        assert both_ways(gradient_of(numel, gradient), kind, weight) == {ONE_PASS}


@needs_kernel
def test_a_kernel_with_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, compiles: None, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(options: AdamOptions, step: int, factor: float) -> tuple[float, ...]:
        return step_numbers(replace(options, eps=options.eps * 1.01), step, factor)

    monkeypatch.setattr(native, "step_numbers", wrong)
    assert both_ways(gradient_of(1000, torch.float32), "float32", None) == {COPIED}
    assert "does not give the bits of the eager step" in caplog.text


@needs_kernel
def test_a_library_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiles: None) -> None:
    monkeypatch.setenv(native.CACHE_VARIABLE, str(tmp_path))
    build_kernel(ONE_LIBRARY)
    made = list((tmp_path / "elixir").iterdir())
    assert len(made) == 1
    monkeypatch.setattr(native, "_run", lambda command: pytest.fail("compiled again"))
    build_kernel(ONE_LIBRARY)


@pytest.mark.sampled
@needs_kernel
@pytest.mark.parametrize("what", ["folder", "library"])
def test_a_library_that_others_could_have_written_is_never_loaded(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(native.CACHE_VARIABLE, str(tmp_path))
    build_kernel(ONE_LIBRARY)
    (made,) = (tmp_path / "elixir").iterdir()
    assert [path.stat().st_mode & 0o077 for path in (made, made.parent)] == [0, 0]
    (made if what == "library" else made.parent).chmod(0o777)
    made.write_bytes(b"planted")
    loaded, load = [], ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda path: loaded.append(Path(path).read_bytes()) or load(path))
    build_kernel(ONE_LIBRARY)
    assert [content[:4] for content in loaded] == [b"\x7fELF"]
    assert ("chmod go-w" in caplog.text) == (what == "folder")
    assert [path.name for path in made.parent.iterdir()] == [made.name]
    assert (made.read_bytes() == b"planted") == (what == "folder")


@needs_kernel
def test_a_form_without_a_kernel_is_refused() -> None:
    with pytest.raises(RuntimeError, match="there is no kernel"):
        build_kernel(Combination(torch.float64, None, "float32"))


def test_other_memory_of_another_size_is_refused() -> None:
    old, new = states(8, "float32", 0), states(9, "float32", 0)
    with pytest.raises(InputError, match="match"):
        adam_step(torch.zeros(8), old.master, None, old.moments, AdamOptions(), 1, into=new)
