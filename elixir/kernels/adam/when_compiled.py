"""The moment at which a step is compiled: once it pays, once per combination of dtypes."""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

import torch

from elixir.kernels.adam.adam_rule import AdamOptions, adam_scalars
from elixir.kernels.adam.compiled_step import Combination, CompiledStep, Run, Step, compile_step, missing_compiler, mode
from elixir.kernels.adam.eager import step_pieces
from elixir.kernels.adam.moments import (
    STEPS,
    MasterStates,
    Moments,
    adam_8bit_,
    encode_8bit_,
    find_8bit_scales,
    make_moments,
    step_arguments,
)
from elixir.kernels.adam.native import Kernel, build_kernel
from elixir.optimizer_states import BLOCK_NUMEL, MomentKind

logger = logging.getLogger(__name__)

SMALL_NUMEL: dict[MomentKind, int] = {"float32": 2**20, "bfloat16": 2**17, "8bit": 2**16}
"""Kind of moments -> elements below which a step does not count towards compiling: it takes about a millisecond anyway.
On CUDA, and with float32 moments, it does not run compiled either. With moments in fewer bits than float32, parameters
are stepped one by one, so most are small."""

COMPILE_COST_S = {"cpu": 1.5, "cuda": 15.0}
"""Seconds of a core for compiling the kernel, measured on 2 cores of an EPYC 9005; for torch.compile, not measured on
CUDA, what it takes there for the host."""

GAIN_S_PER_NUMEL = {
    # Measured there on two threads. With float32 moments torch's fused kernel on pieces is about as fast on an idle
    # machine, and several times slower on a busy one, where its threads wait for each other after every operator.
    ("cpu", "float32"): 0.3e-9,
    ("cpu", "bfloat16"): 3e-9,
    ("cpu", "8bit"): 20e-9,
    # Not measured: computed for 4 TB/s, from a float32 gradient written and read, or from some 50 and 100 passes.
    ("cuda", "float32"): 2e-12,
    ("cuda", "bfloat16"): 50e-12,
    ("cuda", "8bit"): 100e-12,
}
"""Seconds that a compiled step saves per element over the eager one."""

_WHOLE_NUMEL = 2**30
"""Longest piece of what torch.compile makes, whose positions are 32-bit; it makes no temporaries of any length."""
_EXAMPLE_NUMEL = 2**18


class _Progress:
    """How far one combination has come in this process."""

    def __init__(self, combination: Combination) -> None:
        device = combination.device_type
        self.after_numel = COMPILE_COST_S[device] / GAIN_S_PER_NUMEL[device, combination.moments]
        self.stepped_numel = 0
        self.compiling: CompiledStep | None = None
        lacking = missing_compiler(device)
        if lacking is not None:
            logger.info("%s runs uncompiled: %s", combination, lacking)
            return
        build = build_kernel if device == "cpu" else build_step
        self.compiling = CompiledStep(str(combination), functools.partial(build, combination))

    def ready(self, *, begin: bool) -> Kernel | None:
        """The compiled step if it is there; without it, compiling begins if it may."""
        if self.compiling is None:
            return None
        if self.compiling.step is None:
            if mode() == "wait":
                return self.compiling.wait()
            if begin:
                self.compiling.start()
        return self.compiling.step


_progress: dict[Combination, _Progress] = {}
_lock = threading.Lock()


def combination_of(
    gradient: torch.Tensor, master: torch.Tensor, weight_out: torch.Tensor | None, moments: Moments
) -> Combination:
    """The combination of a step of these tensors."""
    weight = None if weight_out is None else weight_out.dtype
    return Combination(str(master.device), gradient.dtype, weight, moments.kind)


def compiled_step(combination: Combination, numel: int) -> Kernel | None:
    """The compiled step where it is ready, for a shard of `numel` elements that is about to be stepped in place.

    Compiling begins once eager steps have cost as much more as compiling takes: never worse than twice the better of
    the two, however long the job turns out to be. Small shards do not count.
    """
    if combination.device_type not in ("cpu", "cuda"):
        return None
    chosen = mode()
    if chosen == "never":
        return None
    if numel < SMALL_NUMEL[combination.moments]:
        return _ready_on_host(combination)
    progress = _asked(combination, numel)
    return progress.ready(begin=chosen == "now" or progress.stepped_numel >= progress.after_numel)


def _ready_on_host(combination: Combination) -> Kernel | None:
    """The host's kernel for a small shard, if others have had it compiled. In the eager step with moments in fewer bits
    all threads compute some roots, whatever their number, and on a busy machine they wait for each other."""
    if combination.device_type != "cpu" or combination.moments == "float32":
        return None
    begun = _progress.get(combination)
    return None if begun is None or begun.compiling is None else begun.compiling.step


def kernel_for(combination: Combination) -> Kernel | None:
    """The kernel that can leave the old states as they are, if it is compiled by now; it begins to be compiled."""
    return _asked(combination).ready(begin=True) if _steps_out_of_place(combination) else None


def begin_kernel(gradient: torch.dtype, weight: torch.dtype | None, moments: MomentKind) -> None:
    """Begins to compile the host's kernel, so that the first step out of place finds it.

    Args:
        gradient, weight: dtypes of the gradients and of the weights that are written; None without such weights.
        moments: how they are kept; 8-bit ones are never stepped out of place.
    """
    combination = Combination("cpu", gradient, weight, moments)
    if _steps_out_of_place(combination) and (background := _asked(combination).compiling) is not None:
        background.start()


def absent_kernels() -> list[str]:
    """Waits for all of the host's kernels that have begun; the names of those that are not there all the same."""
    with _lock:
        asked = [(name, each.compiling) for name, each in _progress.items() if name.device_type == "cpu"]
    return [str(name) for name, each in asked if each is None or (each.started and each.wait() is None)]


def _steps_out_of_place(combination: Combination) -> bool:
    return combination.device_type == "cpu" and combination.moments != "8bit"


def _asked(combination: Combination, numel: int = 0) -> _Progress:
    with _lock:
        if combination not in _progress:
            _progress[combination] = _Progress(combination)
        _progress[combination].stepped_numel += numel
        return _progress[combination]


def build_step(combination: Combination, run: Run | None = None) -> Kernel:
    """Compiles the step in place of a combination now, by torch.compile, on a small example.

    Raises:
        RuntimeError: the compiled step does not give what the plain one gives.
    """
    plain = STEPS[combination.moments]
    if combination.moments == "8bit":
        example = _example(combination)
        find_scales, scales = compile_step(find_8bit_scales, (*example[:2], *example[3:-1]))
        encode, _ = compile_step(encode_8bit_, (*example, *scales))
        step: Step = functools.partial(adam_8bit_, find_scales=find_scales, encode=encode)
    else:
        step, _ = compile_step(plain, _example(combination))
    _check_against_plain(combination, step)

    def kernel(gradient: torch.Tensor, old: MasterStates, new: MasterStates, *rest: Any) -> None:
        # One element or one row would be compiled anew, as a special length.
        step_pieces(lambda numel: plain if numel <= BLOCK_NUMEL else step, _WHOLE_NUMEL, gradient, old, *rest)

    return kernel


def _example(combination: Combination) -> list[torch.Tensor | None]:
    """Arguments of a first step."""
    device = torch.device(combination.device)
    master = torch.linspace(-1.0, 1.0, _EXAMPLE_NUMEL, device=device)
    gradient = master.flip(0).to(combination.gradient)
    weight = None if combination.weight is None else torch.zeros_like(master, dtype=combination.weight)
    moments = make_moments(_EXAMPLE_NUMEL, combination.moments, device)
    scalars = adam_scalars(AdamOptions(weight_decay=0.1), 1, 1.0, device)
    return step_arguments(gradient, MasterStates(master, moments), weight, scalars, 1, slice(0, _EXAMPLE_NUMEL))


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
