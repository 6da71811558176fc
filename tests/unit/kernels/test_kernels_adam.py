"""The Adam of flat shards: torch's numbers, the bytes promised, rounding without bias, compiling that stays out of the
way."""

from __future__ import annotations

import logging
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.errors import InputError, InputTypeError
from elixir.kernels.adam import step as native
from elixir.kernels.adam.adam_rule import AdamOptions, adam_rule, adam_scalars
from elixir.kernels.adam.eager import IN_PIECES, eager_step
from elixir.kernels.adam.moments import MasterStates, Moments, make_moments, read_moments
from elixir.kernels.adam.step import adam_step
from tests.common import inside
from tests.common.early import needs_kernel

KINDS = ("float32", "bfloat16", "8bit")


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled unless a test asks, and what a test left of combinations does not reach the next."""
    monkeypatch.setenv("ELIXIR_COMPILE", "0")
    inside.forget(monkeypatch, "Adam kernels")


def recorded(
    numel: int, steps: int, dtype: torch.dtype = torch.float32, spread: float = 2.0
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Weights, and gradients whose sizes differ by orders of magnitude between elements, as those of models do."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp(spread * torch.randn(numel, generator=generator)) * 1e-3
    weights = torch.randn(numel, generator=generator)
    return weights, [(torch.randn(numel, generator=generator) * scale).to(dtype) for _ in range(steps)]


def by_torch(weights: torch.Tensor, gradients: list[torch.Tensor], options: AdamOptions) -> torch.Tensor:
    parameter = torch.nn.Parameter(weights.clone())
    cls = torch.optim.AdamW if options.decoupled else torch.optim.Adam
    optimizer = cls(
        [parameter],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        maximize=options.maximize,
        fused=False,
        foreach=False,
    )
    for gradient in gradients:
        parameter.grad = gradient.float()
        optimizer.step()
    return parameter.detach()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


VARIANTS = [
    AdamOptions(lr=1e-2, weight_decay=0.1),
    AdamOptions(lr=1e-2, weight_decay=0.1, decoupled=False),
    AdamOptions(lr=1e-2, beta1=0.8, beta2=0.95, eps=1e-4, maximize=True),
    AdamOptions(lr=1e-2, weight_decay=0.1, decoupled=False, maximize=True),
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("numel", [1, 1000, 300_007])
def test_a_hundred_steps_are_those_of_torch(options: AdamOptions, numel: int) -> None:
    weights, gradients = recorded(numel, 100 if numel < 10**5 else 4)
    master, moments = weights.clone(), make_moments(numel)
    for step, gradient in enumerate(gradients, 1):
        adam_step(gradient, master, None, moments, options, step)
    assert distance(master, by_torch(weights, gradients, options)) < 1e-6


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_plain_function_is_torchs_adam_too(options: AdamOptions) -> None:
    """Moments in fewer bits are stepped by it."""
    weights, gradients = recorded(1000, 100)
    master, avg, square = weights.clone(), torch.zeros(1000), torch.zeros(1000)
    for step, gradient in enumerate(gradients, 1):
        master, avg, square = adam_rule(gradient, master, avg, square, adam_scalars(options, step))
    assert distance(master, by_torch(weights, gradients, options)) < 1e-6


@pytest.mark.parametrize(("kind", "limit"), [("bfloat16", 0.01), ("8bit", 0.1)])
def test_fewer_bits_move_the_weights_nearly_alike(kind: str, limit: float) -> None:
    """The error is measured against how far the weights moved, not against how large they are."""
    options = AdamOptions(lr=1e-3)
    weights, gradients = recorded(2000, 100, spread=1.0)
    master, moments = weights.clone(), make_moments(2000, kind)
    for step, gradient in enumerate(gradients, 1):
        adam_step(gradient, master, None, moments, options, step)
    expected = by_torch(weights, gradients, options)
    assert distance(master - weights, expected - weights) < limit


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_give_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a shard is cut depends on the number of threads, which must not show."""
    weights, gradients = recorded(3000, 3, torch.bfloat16)
    results = []
    for piece_numel in (2**20, 512):
        monkeypatch.setattr("elixir.kernels.adam.eager.LARGEST_PIECE_NUMEL", piece_numel)
        monkeypatch.setattr("elixir.kernels.adam.eager.LARGEST_HOST_PIECE_NUMEL", piece_numel)
        master, moments = weights.clone(), make_moments(3000, kind)
        for step, gradient in enumerate(gradients, 1):
            adam_step(gradient, master, None, moments, AdamOptions(), step)
        results.append((master, *moments.tensors()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["bfloat16", "8bit"])
def test_moments_are_rounded_without_bias(kind: str) -> None:
    """A step takes a thousandth from a second moment, which rounding to nearest would put back each time."""
    _, (values,) = recorded(256, 1)
    values[:2], trials = torch.tensor([0.0, 1e-14]), 150
    sums = [torch.zeros(256), torch.zeros(256)]
    for trial in range(1, trials + 1):  # the noise depends on the step's number; beta = 0 keeps the values
        moments, options = make_moments(256, kind), AdamOptions(beta1=0.0, beta2=0.0)
        adam_step(values, torch.zeros(256), None, moments, options, trial)
        found = read_moments(moments, 256)
        assert torch.equal(found[1] > 0, values != 0)
        for total, read in zip(sums, found, strict=True):
            total += read / trials
    for total, expected in zip(sums, (values, values.square()), strict=True):
        assert distance(total, expected) < 5e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_shows(kind: str, bad: float) -> None:
    """The NaN reaches the weight, as in torch, so that training visibly fails rather than drifts."""
    gradient, master, moments = torch.ones(300), torch.ones(300), make_moments(300, kind)
    gradient[5] = bad
    for step in (1, 2):
        adam_step(gradient, master, None, moments, AdamOptions(), step)
    assert not bool(master[5].isfinite())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"master": torch.ones(8, dtype=torch.bfloat16)}, "master weights must be float32"),
        ({"gradient": torch.ones(8, dtype=torch.int32)}, "gradient must be of a floating dtype"),
        ({"gradient": torch.ones(7)}, "gradient has 7 elements"),
        ({"gradient": torch.ones(2, 4)}, "flat and contiguous"),
        ({"weight_out": torch.ones(16)[::2]}, "flat and contiguous"),
        ({"moments": make_moments(9)}, "have 8 elements there"),
        ({"step": 0}, "first step is number 1"),
        ({"factor": math.nan}, "cannot be multiplied by nan"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], match: str) -> None:
    arguments = {
        "gradient": torch.ones(8),
        "master": torch.ones(8),
        "weight_out": None,
        "moments": make_moments(8),
        "options": AdamOptions(),
        "step": 1,
    }
    with pytest.raises((InputError, InputTypeError), match=match):
        adam_step(**{**arguments, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"beta1": 1.0}, {"beta2": -0.1}, {"eps": math.nan}, {"weight_decay": math.inf}]
)
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        AdamOptions(**options)


def test_an_unknown_kind_of_moments_is_refused() -> None:
    with pytest.raises(InputError, match="float32"):
        make_moments(8, "float23")
    with pytest.raises(InputTypeError, match="lr must be a number"):
        AdamOptions(lr="fast")  # type: ignore[arg-type]


# Compiling ---------------------------------------------------------------------------------------------------------


def step_once(numel: int, moments: Moments | None = None) -> None:
    adam_step(torch.ones(numel), torch.ones(numel), None, moments or make_moments(numel), AdamOptions(), 1)


def compiling() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("elixir compiles")]


@needs_kernel
@pytest.mark.parametrize(
    ("text", "why"),
    [("echo no luck >&2; echo an error: $# >&2; exit 1", "an error: "), ("exit 3", "it ended with 3")],
)
def test_a_compiler_that_fails_is_said_once_and_changes_nothing(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{text}\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("ELIXIR_COMPILE", "wait")
    monkeypatch.setenv("CXX", str(compiler))
    with caplog.at_level(logging.INFO, logger="elixir.kernels"):
        for _ in range(3):
            step_once(native.SMALL_NUMEL)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "CPU Adam (float32, no weights, float32 moments) could not be compiled and stays as it is" in caplog.text
    assert f"compiler: {why}" in caplog.text


def test_the_variable_has_four_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in {
        "0": "never",
        "1": "background",
        "": "background",
        "WAIT": "wait",
        "now": "background",
    }.items():
        monkeypatch.setenv("ELIXIR_COMPILE", value)
        assert native.mode() == expected
    monkeypatch.setenv("ELIXIR_COMPILE", "perhaps")
    with pytest.raises(InputError, match="ELIXIR_COMPILE"):
        native.mode()


COMBINATIONS = [
    ("float32", torch.bfloat16, torch.bfloat16),
    ("float32", torch.float32, None),
    ("float32", torch.float16, torch.float16),
    ("bfloat16", torch.bfloat16, torch.bfloat16),
    ("8bit", torch.bfloat16, torch.bfloat16),
]


def test_no_step_waits_for_a_thread_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It could not be started, or a process was forked meanwhile."""

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    inside.forget(monkeypatch, "Adam kernels")
    monkeypatch.setenv("ELIXIR_COMPILE", "wait")
    combination = native.Combination(torch.float32, None, "float32")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_thread)
        assert native.kernel_for(combination, native.SMALL_NUMEL) is None
    assert "can't start new thread" in caplog.text
    inside.forget(monkeypatch, "Adam kernels")
    with monkeypatch.context() as forked:
        forked.setenv("ELIXIR_COMPILE", "now")
        forked.setattr(threading.Thread, "start", lambda thread: None)
        assert native.kernel_for(combination, native.SMALL_NUMEL) is None
    native.forget_unfinished()  # without it, the next line would never return
    assert native.absent_kernels() == []


@needs_kernel
def test_the_kernel_in_place_has_the_bits_of_the_eager_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever gradients are: sparse, absent for a while, no numbers; and however many threads step."""
    compiled, build = list[Any](), native.build_kernel
    monkeypatch.setattr(native, "SMALL_NUMEL", 2)
    monkeypatch.setattr(native, "build_kernel", lambda one: compiled.append(one) or build(one))
    for kind, gradient_dtype, weight_dtype in COMBINATIONS:
        for numel, at in ((3, None), (1000, 300), (5000, None), (5003, 256)):
            results = []
            for mode in ("0", "wait"):
                monkeypatch.setenv("ELIXIR_COMPILE", mode)
                weights, gradients = recorded(numel, 6, gradient_dtype)
                gradients[2].zero_()
                gradients[3][::3] = 0.0
                gradients[5][::999] = math.nan
                master, moments = weights.clone(), make_moments(numel + (at or 0), kind)
                out = None if weight_dtype is None else weights.to(weight_dtype)
                for step, gradient in enumerate(gradients, 1):
                    options = AdamOptions(lr=1e-2, weight_decay=0.1, decoupled=step % 2 == 0)
                    form = adam_step(gradient, master, out, moments, options, step, factor=0.5, at=at)
                assert (form == "compiled") is (mode == "wait")
                results.append([master, *moments.tensors(), *([] if out is None else [out])])
            for mine, theirs in zip(*results, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0.0, atol=0.0, equal_nan=True)
    assert len(compiled) == len(set(compiled)) == len(COMBINATIONS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_nothing_has_a_form(kind: Any) -> None:
    empty, moments = torch.ones(0), make_moments(0, kind)
    assert adam_step(empty, empty, None, moments, AdamOptions(), 1) == IN_PIECES
    into = MasterStates(torch.ones(0), make_moments(0, kind))
    assert adam_step(empty, empty, None, moments, AdamOptions(), 1, into=into) == native.COPIED


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", ["", "moments", "weights", "new states"])
def test_a_kernel_is_compared_in_all_that_it_reads_and_writes(wrong: str, kind: Any) -> None:
    """It begins with moments as training has them, and is called in place, and if it can for other memory."""

    def kernel(
        gradient: torch.Tensor, old: MasterStates, new: MasterStates, out: torch.Tensor | None,
        options: AdamOptions, step: int, factor: float, at: int,
    ) -> None:  # fmt: skip
        if old is new or wrong != "new states":
            for mine, theirs in zip(
                (new.master, *new.moments.tensors()), (old.master, *old.moments.tensors()), strict=True
            ):
                mine.copy_(theirs * (wrong != "moments" or theirs is old.master))
            eager_step(gradient, new, None if wrong == "weights" else out, options, step, factor)

    combination = native.Combination(torch.bfloat16, torch.bfloat16, kind)
    right = not wrong or (wrong == "new states" and kind == "8bit")  # whose steps are in place alone
    assert native.has_same_bits(combination, kernel) is right
