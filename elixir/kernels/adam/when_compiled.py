"""When a step is compiled: once it pays, once per combination of dtypes."""

from __future__ import annotations

import functools
import logging
import threading
from typing import NamedTuple

import torch

from elixir.kernels.adam.compiled import Background, Step, compile_step, missing_compiler, mode
from elixir.kernels.adam.moments import (
    STEPS,
    adam_8bit_,
    encode_8bit_,
    find_8bit_scales,
    make_moments,
    step_arguments,
)
from elixir.kernels.adam.rule import AdamOptions, adam_scalars
from elixir.optimizer_states import MomentKind

logger = logging.getLogger(__name__)

SMALL_NUMEL: dict[MomentKind, int] = {"float32": 2**20, "bfloat16": 2**17, "8bit": 2**16}
"""By kind of moments: what has fewer elements neither counts towards compiling nor runs compiled, since it takes about
a millisecond anyway. With other than float32 moments parameters are stepped one by one, so most are small."""

COMPILE_COST_S = 15.0
"""Seconds of a core for a cold compile, measured on 2 cores of an EPYC 9005."""

GAIN_S_PER_NUMEL = {
    # Measured there on two threads. With float32 moments torch's fused kernel on pieces is about as fast on an idle
    # machine, and several times slower on a busy one, where its threads wait for each other after every operator.
    ("cpu", "float32"): 0.3e-9,
    ("cpu", "bfloat16"): 3e-9,
    ("cpu", "8bit"): 20e-9,
    # Not measured: by traffic at 4 TB/s, of a float32 gradient written and read, or of some 50 and 100 passes.
    ("cuda", "float32"): 2e-12,
    ("cuda", "bfloat16"): 50e-12,
    ("cuda", "8bit"): 100e-12,
}
"""Seconds that a compiled step saves per element over the eager one."""

_EXAMPLE_NUMEL = 2**18
"""Long enough for the compiler to think of threads."""


class Combination(NamedTuple):
    """The device, dtypes and moments on which a compiled step depends."""

    device: str
    """With its index: compiled code launches on the device that its example was on."""
    gradient: torch.dtype
    weight: torch.dtype | None
    """Dtype of the weights that are written next to the float32 master; None without such weights."""
    moments: MomentKind

    @property
    def device_type(self) -> str:
        """``cpu``, ``cuda`` or another."""
        return torch.device(self.device).type

    def __str__(self) -> str:
        parts = [str(self.gradient), str(self.weight or "no weights"), self.moments]
        return f"Adam ({self.device}, {', '.join(part.removeprefix('torch.') for part in parts)} moments)"


class _Progress:
    """How far one combination has come in this process."""

    def __init__(self, combination: Combination) -> None:
        self.after_numel = COMPILE_COST_S / GAIN_S_PER_NUMEL[combination.device_type, combination.moments]
        self.stepped_numel = 0
        self.background: Background | None = None
        lacking = missing_compiler(combination.device_type)
        if lacking is not None:
            logger.info("%s runs uncompiled: %s", combination, lacking)
            return
        # A child on CUDA would need another context, some 500 MB of a device that the plan may have filled.
        child = _child_source(combination) if combination.device_type == "cpu" else None
        self.background = Background(str(combination), functools.partial(build_step, combination), child)


_progress: dict[Combination, _Progress] = {}
_lock = threading.Lock()


def compiled_step(combination: Combination, numel: int) -> Step | None:
    """The compiled step where it is ready, for a shard of `numel` elements that is about to be stepped.

    Compiling begins once eager steps have cost as much more as compiling takes: never worse than twice the better of
    the two, however long the job turns out to be.
    """
    if numel < SMALL_NUMEL[combination.moments] or combination.device_type not in ("cpu", "cuda"):
        return None
    chosen = mode()
    if chosen == "never":
        return None
    with _lock:
        if combination not in _progress:
            _progress[combination] = _Progress(combination)
        progress = _progress[combination]
        progress.stepped_numel += numel
    background = progress.background
    if background is None:
        return None
    if background.step is None:
        if chosen == "wait":
            return background.wait()
        if chosen == "now" or progress.stepped_numel >= progress.after_numel:
            background.start()
    elif combination.device_type == "cpu":
        torch.get_num_threads()  # a new thread takes over torch's number of threads, on which compiled code relies
    return background.step


def build_step(combination: Combination) -> Step:
    """Compile the step of a combination now, on a small example.

    Raises:
        RuntimeError: the compiled step does not give what the plain one gives.
    """
    if combination.moments == "8bit":
        example = _example(combination)
        find_scales, scales = compile_step(find_8bit_scales, (*example[:2], *example[3:-1]))
        encode, _ = compile_step(encode_8bit_, (*example, *scales))
        step: Step = functools.partial(adam_8bit_, find_scales=find_scales, encode=encode)
    else:
        narrow = combination.moments == "float32"
        step, _ = compile_step(STEPS[combination.moments], _example(combination), narrow=narrow)
    _check_against_plain(combination, step)
    return step


def _example(combination: Combination) -> list[torch.Tensor | None]:
    """Arguments of a first step."""
    device = torch.device(combination.device)
    master = torch.linspace(-1.0, 1.0, _EXAMPLE_NUMEL, device=device)
    gradient = master.flip(0).to(combination.gradient)
    weight = None if combination.weight is None else torch.zeros_like(master, dtype=combination.weight)
    moments = make_moments(_EXAMPLE_NUMEL, combination.moments, device)
    scalars = adam_scalars(AdamOptions(weight_decay=0.1), 1, 1.0, device)
    return step_arguments(gradient, master, weight, moments, scalars, 1, 0, _EXAMPLE_NUMEL)


def _check_against_plain(combination: Combination, compiled: Step) -> None:
    """A compiler's mistake must not train a model."""
    results = []
    for step in (compiled, STEPS[combination.moments]):
        arguments = _example(combination)
        with torch.no_grad():
            step(*arguments)
        results.append([tensor for tensor in arguments[1:3] if tensor is not None])
    for found, expected in zip(*results, strict=True):
        limit = 1e-5 if expected.dtype == torch.float32 else 4 * torch.finfo(expected.dtype).eps
        if not torch.allclose(found.float(), expected.float(), rtol=limit, atol=limit * 1e-3):
            raise RuntimeError("the compiled step does not give what the plain one gives")


def _child_source(combination: Combination) -> str:
    dtypes = f"{combination.gradient}, {combination.weight}"  # as Python writes them: torch.bfloat16, None
    return (
        "import torch\nfrom elixir.kernels.adam.when_compiled import Combination, build_step\n"
        f"build_step(Combination({combination.device!r}, {dtypes}, {combination.moments!r}))"
    )
