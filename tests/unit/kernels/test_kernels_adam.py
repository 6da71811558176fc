"""The Adam of flat shards: torch's numbers, the bytes promised, rounding without bias, compiling that stays out of the
way."""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.errors import InputError, InputTypeError
from elixir.kernels.adam import compiled_step as compiling
from elixir.kernels.adam import when_compiled
from elixir.kernels.adam.adam_rule import AdamOptions, adam_, adam_scalars
from elixir.kernels.adam.compiled_step import CompiledStep
from elixir.kernels.adam.eager import eager_step
from elixir.kernels.adam.moments import MasterStates, Moments, make_moments, read_moments
from elixir.kernels.adam.step import adam_step
from elixir.optimizer_states import MomentKind, moments_size
from tests.common import inside
from tests.common.early import needs_kernel

ROOT = Path(__file__).parents[3]
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
    """It is what is compiled; the fused kernel that serves meanwhile must not hide a mistake in it."""
    weights, gradients = recorded(1000, 100)
    master, avg, square = weights.clone(), torch.zeros(1000), torch.zeros(1000)
    for step, gradient in enumerate(gradients, 1):
        adam_(gradient, master, None, avg, square, adam_scalars(options, step))
    assert distance(master, by_torch(weights, gradients, options)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_the_rounded_masters_and_the_gradient_is_left_alone(kind: str, dtype: torch.dtype) -> None:
    weights, gradients = recorded(700, 3, dtype)
    master, out, moments = weights.clone(), torch.zeros(700, dtype=dtype), make_moments(700, kind)
    for step, gradient in enumerate(gradients, 1):
        before = gradient.clone()
        adam_step(gradient, master, out, moments, AdamOptions(), step, factor=0.5)
        assert torch.equal(gradient, before)
        assert torch.equal(out, master.to(dtype))
    assert not torch.equal(master, weights)


@pytest.mark.parametrize("kind", KINDS)
def test_the_factor_multiplies_the_gradient(kind: str) -> None:
    weights, gradients = recorded(700, 5, torch.bfloat16)
    results = []
    for factor in (0.25, 1.0):
        master, moments = weights.clone(), make_moments(700, kind)
        for step, gradient in enumerate(gradients, 1):
            given = gradient if factor != 1.0 else gradient * 0.25  # a power of two: exact in bfloat16
            adam_step(given, master, None, moments, AdamOptions(lr=0.1, eps=1e-4), step, factor=factor)
        results.append(master)
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 1000])
def test_states_take_the_bytes_that_are_promised(kind: str, numel: int) -> None:
    moments = make_moments(numel, kind)
    assert moments.nbytes == moments_size(kind).nbytes(numel)
    if numel:
        before = [tensor.shape for tensor in moments.tensors()]
        adam_step(torch.ones(numel), torch.ones(numel), None, moments, AdamOptions(), 1)
        assert [tensor.shape for tensor in moments.tensors()] == before


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


@pytest.mark.parametrize("kind", ["bfloat16", "8bit"])
def test_second_moments_decay_without_bias(kind: str) -> None:
    """A step takes away a thousandth, which rounding to nearest would put back each time."""
    numel, steps = 4096, 200
    moments = make_moments(numel, kind)
    master = torch.zeros(numel)
    adam_step(torch.ones(numel), master, None, moments, AdamOptions(), 1)
    start = read_moments(moments, numel)[1].mean()
    for step in range(2, steps + 2):
        adam_step(torch.zeros(numel), master, None, moments, AdamOptions(), step)
    left = float(read_moments(moments, numel)[1].mean() / start)
    assert left == pytest.approx(0.999**steps, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_to_rest_when_their_gradients_stop(kind: str) -> None:
    """Other weights in the same block go on: a first moment that stayed would be divided by ever less."""
    generator = torch.Generator().manual_seed(0)
    master, moments = torch.zeros(512), make_moments(512, kind)
    options = AdamOptions(lr=1e-3, beta2=0.9)
    for step in range(1, 301):
        gradient = torch.randn(512, generator=generator)
        if step > 50:
            gradient[::2] = 0.0
        if step == 200:
            before = master.clone()
        adam_step(gradient, master, None, moments, options, step)
    assert float((master - before)[::2].abs().max()) < 1e-3  # a single step of those that go on
    assert float((master - before)[1::2].abs().mean()) > 1e-3


def test_8_bit_codes_are_unbiased_and_never_lose_a_second_moment() -> None:
    numel, trials = 256, 400
    _, (values,) = recorded(numel, 1)
    sums = [torch.zeros(numel), torch.zeros(numel)]
    for trial in range(1, trials + 1):  # the step's number is what the noise depends on; beta = 0 keeps the values
        moments = make_moments(numel, "8bit")
        adam_step(values, torch.zeros(numel), None, moments, AdamOptions(beta1=0.0, beta2=0.0), trial)
        for total, read in zip(sums, read_moments(moments, numel), strict=True):
            total += read / trials
        assert bool((read_moments(moments, numel)[1] > 0).all())
    assert distance(sums[0], values) < 2e-3
    assert distance(sums[1], values.square()) < 2e-3


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


def test_compiling_begins_when_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setenv("ELIXIR_COMPILE", "1")
    monkeypatch.setattr(CompiledStep, "start", lambda self: started.append(self.name))
    monkeypatch.setattr(when_compiled, "missing_compiler", lambda device_type: None)
    cost_s = when_compiled.GAIN_S_PER_NUMEL["cpu", "float32"] * 3 * when_compiled.SMALL_NUMEL["float32"]
    monkeypatch.setitem(when_compiled.COMPILE_COST_S, "cpu", cost_s)
    moments = make_moments(when_compiled.SMALL_NUMEL["float32"])
    for _ in range(2):
        step_once(when_compiled.SMALL_NUMEL["float32"] - 1)  # small shards do not count
    for begun in (False, False, True):
        step_once(when_compiled.SMALL_NUMEL["float32"], moments)
        assert bool(started) is begun


@needs_kernel
def test_small_shards_run_a_kernel_that_others_have_had_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.ones(512)
    for kind, form in (("bfloat16", "compiled"), ("8bit", "compiled"), ("float32", "in pieces")):
        found = []
        for mode in ("1", "wait", "1", "0"):
            monkeypatch.setenv("ELIXIR_COMPILE", mode)
            moments = make_moments(512, kind)
            if mode == "wait":
                combination = when_compiled.combination_of(values, values, None, moments)
                assert when_compiled.compiled_step(combination, when_compiled.SMALL_NUMEL[kind]) is not None
                continue
            found.append(adam_step(values, values.clone(), None, moments, AdamOptions(), 1))
        assert found == [found[2], form, found[2]]
        assert found[2] != "compiled"


def test_without_a_compiler_it_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("ELIXIR_COMPILE", "now")
    monkeypatch.setenv("CXX", "no-such-compiler")
    moments = make_moments(when_compiled.SMALL_NUMEL["float32"])
    with caplog.at_level(logging.INFO, logger="elixir.kernels"):
        for _ in range(3):
            step_once(when_compiled.SMALL_NUMEL["float32"], moments)
    assert len(caplog.records) == 1
    assert "no-such-compiler" in caplog.text


def test_a_compiler_that_fails_is_said_once_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def build(run: compiling.Run) -> compiling.Step:
        raise RuntimeError("it is broken")

    background = CompiledStep("test", build)
    with caplog.at_level(logging.INFO, logger="elixir.kernels"):
        assert background.wait() is None
        assert background.wait() is None
    assert len(caplog.records) == 1
    assert "it is broken" in caplog.text


def test_a_child_that_fails_says_why(caplog: pytest.LogCaptureFixture) -> None:
    background = CompiledStep("test", lambda run: run(["sh", "-c", "echo no luck >&2; exit 1"]))
    with caplog.at_level(logging.WARNING, logger="elixir.kernels"):
        assert background.wait(60) is None
    assert "no luck" in caplog.text


def test_the_variable_has_four_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in {"0": "never", "1": "background", "": "background", "WAIT": "wait", "now": "now"}.items():
        monkeypatch.setenv("ELIXIR_COMPILE", value)
        assert compiling.mode() == expected
    monkeypatch.setenv("ELIXIR_COMPILE", "perhaps")
    with pytest.raises(InputError, match="ELIXIR_COMPILE"):
        compiling.mode()


def test_a_process_ends_at_once_while_a_child_compiles() -> None:
    """The child would sleep for ten minutes; ending the process ends it."""
    source = (
        "import time\nfrom elixir.kernels.adam.compiled_step import CompiledStep\n"
        "b = CompiledStep('test', lambda run: run(['sleep', '600']))\n"
        "b.start()\nwhile b._process is None: time.sleep(0.01)\nprint(b._process.pid)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_a_child_that_fails_says_why_and_none_begins_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(compiling.atexit, "register", at_exit.append)
    runs: list[compiling.Run] = []
    for command, why in (
        (["false"], "false ended with 1"),
        (["sh", "-c", "echo no room >&2; exit 3"], "no room"),
    ):
        step = CompiledStep("test", lambda run, command=command: (runs.append(run), run(command)))  # type: ignore[misc]
        with caplog.at_level(logging.WARNING):
            step.wait()
        assert f"test could not be compiled and stays as it is: {why}" in caplog.text
    for end, run in zip(at_exit, runs, strict=True):
        end()
        with pytest.raises(RuntimeError, match="this process ends"):
            run(["true"])


@pytest.mark.sampled
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_leaves_neither_the_child_nor_its_compiler(number: int, tmp_path: Path) -> None:
    """Both hold the writing end of a pipe open, so the pipe ends when both have ended."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = ["sh", "-c", f"exec > {pipe}; echo; sleep 100"]
    source = f"from elixir.kernels.adam.compiled_step import CompiledStep\nCompiledStep('test', lambda run: run({command})).wait()"
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        with subprocess.Popen([sys.executable, "-c", source], env=environment) as parent:
            said = [_said(reading)]
            parent.send_signal(number)
        said.append(_said(reading))
    finally:
        os.close(reading)
    assert said == [b"\n", b""]


def _said(reading: int) -> bytes:
    """The next bytes of a pipe, nothing at its end."""
    readable, _, _ = select.select([reading], [], [], 60)
    assert readable, "neither a word nor an end after a minute"
    return os.read(reading, 100)


COMBINATIONS = [
    ("float32", torch.bfloat16, torch.bfloat16),
    ("float32", torch.float32, None),
    ("float32", torch.float16, torch.float16),
    ("bfloat16", torch.bfloat16, torch.bfloat16),
    ("8bit", torch.bfloat16, torch.bfloat16),
]


@needs_kernel
def test_the_kernel_in_place_has_the_bits_of_the_eager_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever gradients are: sparse, absent for a while, no numbers; and however many threads step."""
    compiled: list[str] = []
    monkeypatch.setattr(when_compiled, "SMALL_NUMEL", dict.fromkeys(when_compiled.SMALL_NUMEL, 2))
    monkeypatch.setattr(when_compiled, "CompiledStep", lambda *given: compiled.append(given[0]) or CompiledStep(*given))
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


@pytest.mark.slow
def test_what_torch_compiles_gives_eager_numbers() -> None:
    """All kinds in one process, where one must not run the code of another."""
    if compiling.missing_compiler("cpu"):
        pytest.skip("no C++ compiler")
    for kind in KINDS:
        step = when_compiled.build_step(compiling.Combination("cpu", torch.bfloat16, torch.bfloat16, kind))
        for numel in (256, 5120):  # one compilation for all
            weights, gradients = recorded(numel, 20, torch.bfloat16)
            results = []
            for each in (step, lambda gradient, states, _, *rest: eager_step(gradient, states, *rest)):
                states, out = MasterStates(weights.clone(), make_moments(numel, kind)), weights.bfloat16()
                with torch.no_grad():
                    for number, gradient in enumerate(gradients, 1):
                        each(gradient, states, states, out, AdamOptions(lr=1e-2, weight_decay=0.1), number, 0.5, 0)
                results.append(states.master)
                assert torch.equal(out, states.master.bfloat16())
            assert distance(*results) < (1e-6 if kind == "float32" else 1e-3)


def test_compiled_code_that_gives_other_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(gradient: torch.Tensor, master: torch.Tensor, *_: object) -> None:
        master.zero_()

    monkeypatch.setattr(when_compiled, "compile_step", lambda function, example: (wrong, None))
    with pytest.raises(RuntimeError, match="does not give what the plain one gives"):
        when_compiled.build_step(compiling.Combination("cpu", torch.bfloat16, None, "float32"))


def test_each_device_has_compiled_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It launches on the device that its example was on, whatever the device of the tensors that it is given."""
    monkeypatch.setenv("ELIXIR_COMPILE", "wait")
    monkeypatch.setattr(when_compiled, "missing_compiler", lambda device_type: None)
    monkeypatch.setattr(when_compiled, "build_step", lambda combination, run: combination.device)
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        combination = compiling.Combination(device, torch.bfloat16, torch.bfloat16, "bfloat16")
        assert when_compiled.compiled_step(combination, 2**20) == device


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_to_compile_with_is_on_the_device(kind: MomentKind, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: object, example: Sequence[torch.Tensor | None]) -> None:
        raise RuntimeError(" ".join(sorted({str(each.device) for each in example if each is not None})))

    monkeypatch.setattr(when_compiled, "compile_step", refuse)
    with pytest.raises(RuntimeError, match=r"^meta$"):
        when_compiled.build_step(compiling.Combination("meta", torch.bfloat16, torch.bfloat16, kind))


def test_each_combination_has_a_code_object_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo finds compiled code by it, and there are no guards to tell combinations apart."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    values = [torch.ones(2) for _ in range(4)]
    example = (*values[:2], None, *values[2:], adam_scalars(AdamOptions(), 1))
    compiled: list[Any] = [compiling.compile_step(adam_, example)[0] for _ in range(2)]
    assert len({id(each.__code__) for each in (*compiled, adam_)}) == 3
