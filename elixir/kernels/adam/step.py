"""`adam_step`: one Adam step over a flat shard, in place or into other memory.

The C++ kernel makes it once a thread has compiled it; until then, or without a compiler, `eager_step` does.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import torch

from elixir.errors import InputError, InputTypeError, unknown_name
from elixir.kernels.adam.adam_rule import AdamOptions, adam_scalars, check_step, step_numbers
from elixir.kernels.adam.eager import IN_PIECES, eager_step, rule_step
from elixir.kernels.adam.moments import MasterStates, Moments, make_moments, moment_numel, noise_seed, write_moments
from elixir.optimizer_states import BLOCK_NUMEL, MomentKind

# --- the C++ kernel --------------------------------------------------------------------------------------------------
# The host's Adam kernel: a C++ file that the machine's compiler compiles for one combination of dtypes, in a thread.
#
# It steps in place, or writes new states elsewhere and leaves the old ones as they are, in one pass over memory. It is
# kept in the user's cache folder. Before it is used, its results are compared with those of the eager step; if one bit
# differs, or if there is no compiler, the eager step runs, as it does until the kernel is there.
#
# ``ELIXIR_COMPILE`` says when steps in place run compiled: ``1`` or ``now`` as soon as the kernel is there (default),
# ``wait`` from the first step on, ``0`` never. No bit depends on it. Steps that leave the old states as they are use
# the kernel in any case, and wait for it only with ``wait``.


logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp",
    "-fPIC", "-shared",
)  # fmt: skip
"""Nothing that rounds otherwise than the source says."""
VARIABLE, CACHE_VARIABLE = "ELIXIR_COMPILE", "XDG_CACHE_HOME"
_MODES = {"0": "never", "1": "background", "now": "background", "wait": "wait"}
_LONGEST_S = 300.0
"""A compiler that takes longer hangs: it takes 1.5 s on a core of an EPYC 9005."""
SMALL_NUMEL = 2**16
"""Elements below which a step does not have the kernel compiled: in any form it takes about a millisecond."""

_KINDS = {None: "NONE", torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
_MOMENTS = {"float32": "FLOAT32", "bfloat16": "BFLOAT16", "8bit": "EIGHT"}
_CONTRACTED = ("1", "0")
"""Variants of the kernel with float32 moments: the first with the bits of the eager step is used."""
_VECTOR_NUMEL = 16
"""Elements of the longest vector of torch's kernels; what is left after the last whole one is stepped by other code."""
_CHECKED_NUMEL = 4096 + 5
THREAD_NUMEL = 2**15
"""Elements for which another thread is woken, as in torch's operators (``at::internal::GRAIN_SIZE``)."""
_SEED_MODULUS = 2**32


class _Numbers(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_float)
        for name in (
            "factor", "sign", "l2", "decay", "avg_weight", "beta2", "sq_weight", "root", "eps", "step_size",
        )
    ]  # fmt: skip


class _States(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            "gradient", "master", "avg", "sq", "new_master", "new_avg", "new_sq", "weights",
            "avg_scale", "sq_scale", "new_avg_scale", "new_sq_scale",
        )
    ]  # fmt: skip


Kernel = Callable[[torch.Tensor, MasterStates, MasterStates, torch.Tensor | None, AdamOptions, int, float, int], None]
"""A function of (gradient, old, new, weight_out, options, step, factor, position of the first element), all of these
elements only; `new` may be `old`. 8-bit moments are of whole blocks."""


class Combination(NamedTuple):
    """The dtypes for which a kernel is compiled."""

    gradient: torch.dtype
    weight: torch.dtype | None
    """Dtype of the weights that are written next to the float32 master; None without such weights."""
    moments: MomentKind

    def __str__(self) -> str:
        parts = [str(self.gradient), str(self.weight or "no weights"), self.moments]
        return f"CPU Adam ({', '.join(part.removeprefix('torch.') for part in parts)} moments)"


_begun: dict[Combination, Future[Kernel | None]] = {}
_lock = threading.Lock()


def mode() -> str:
    """``never``, ``background`` or ``wait``, as the environment says.

    Raises:
        InputError: the variable has another value.
    """
    value = os.environ.get(VARIABLE, "1").strip().lower() or "1"
    if value not in _MODES:
        raise unknown_name(f"value of {VARIABLE}", value, _MODES)
    return _MODES[value]


def kernel_for(combination: Combination, numel: int, *, separate: bool = False) -> Kernel | None:
    """The kernel if it is there, for a step now or later. Unless the step is small, compiling begins.

    Args:
        combination: of the step.
        numel: its elements.
        separate: whether the new states are written to other memory. Plans count on the kernel for that.
    """
    chosen = mode()
    if chosen == "never" and not separate:
        return None
    with _lock:
        made = _begun.get(combination)
        if made is None and (separate or numel >= SMALL_NUMEL):
            made = _begun[combination] = Future()
            # Python waits for this thread when the process ends, so that the compiler leaves nothing behind.
            thread = threading.Thread(target=_make, args=(combination, made), name=f"elixir compiles {combination}")
            try:
                thread.start()
            except RuntimeError as error:  # the process ends, or may have no more threads
                logger.warning("%s stays as it is: %s", combination, error)
                made.set_result(None)
    return None if made is None or not (made.done() or chosen == "wait") else made.result()


def forget_unfinished() -> None:
    """A forked process lacks the threads that would end these."""
    global _lock
    _lock = threading.Lock()
    for combination in [combination for combination, made in _begun.items() if not made.done()]:
        del _begun[combination]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_unfinished)


def absent_kernels() -> list[str]:
    """Waits for all kernels that have begun; the names of those that are not there all the same."""
    with _lock:
        asked = list(_begun.items())
    return [str(combination) for combination, made in asked if made.result() is None]


def _make(combination: Combination, made: Future[Kernel | None]) -> None:
    """Compiles a kernel, or says why there is none."""
    kernel = None
    try:
        began = time.monotonic()
        if (lacking := _lacking()) is not None:
            logger.info("%s runs uncompiled: %s", combination, lacking)
        else:
            kernel = build_kernel(combination)
            logger.info("%s is compiled, in %.1f s", combination, time.monotonic() - began)
    except Exception as error:
        logger.warning("%s could not be compiled and stays as it is: %s", combination, error)
        logger.debug("compiling failed", exc_info=True)
    finally:
        made.set_result(kernel)


def _lacking() -> str | None:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "there is no kernel for this processor"
    return None if shutil.which(_compiler()) else f"there is no C++ compiler ({_compiler()!r}; set CXX)"


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def build_kernel(combination: Combination) -> Kernel:
    """Compiles the kernel now.

    Raises:
        RuntimeError: there is no such kernel for this processor, or none with the bits of the eager step.
    """
    for contracted in _CONTRACTED if combination.moments == "float32" else ("0",):
        kernel = functools.partial(_call, _library(combination, contracted))
        if has_same_bits(combination, kernel):
            return kernel
    raise RuntimeError("it does not give the bits of the eager step")


def _run(command: list[str]) -> None:
    # In a separate session, Ctrl-C ends the program and not the compiler.
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LONGEST_S, start_new_session=True, check=False
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").split("\n")
        said = next((line for line in lines if "error" in line), f"it ended with {done.returncode}")
        raise RuntimeError(f"{command[0]}: {said.strip()}")


def _library(combination: Combination, contracted: str) -> ctypes.CDLL:
    """The kernel's library, compiled unless the cache folder has it."""
    macros = {
        "CONTRACTED": contracted,
        "GRADIENT": _KINDS.get(combination.gradient),
        "MOMENTS": _MOMENTS[combination.moments],
        "WEIGHTS": _KINDS.get(combination.weight),
    }
    if None in macros.values():
        raise RuntimeError(f"there is no kernel for {combination}")
    command = [_compiler(), *FLAGS, *(f"-D{name}={value}" for name, value in macros.items()), str(SOURCE)]
    made_of = "\n".join((SOURCE.read_text(encoding="utf-8"), *command, _processor()))
    folder = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache") / "elixir"
    library = folder / f"adam_{hashlib.sha256(made_of.encode()).hexdigest()[:24]}.so"
    kept = _may_keep_code_in(folder)
    if kept and _is_private(library):
        return ctypes.CDLL(str(library))
    with tempfile.TemporaryDirectory(dir=folder if kept else None) as scratch:
        made = Path(scratch) / library.name
        _run([*command, "-o", str(made)])
        loaded = ctypes.CDLL(str(made))
        if kept:
            made.chmod(0o700)  # the user's umask may give others rights, which `_is_private` refuses
            made.replace(library)  # another process may make the same at the same time
    return loaded


def _may_keep_code_in(folder: Path) -> bool:
    """Whether nobody else can put a library there, which this process would run."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_private(folder):
            return True
        problem = "others may write to it, or it belongs to another user"
    except OSError as error:
        problem = str(error)
    logger.warning(
        "the kernel is compiled for this process alone, because %s cannot keep it: %s; set %s to a folder of this "
        "user alone, or take the rights to write from others (chmod go-w)",
        folder,
        problem,
        CACHE_VARIABLE,
    )
    return False


def _is_private(path: Path) -> bool:
    """Whether a file or folder is there, belongs to this user, and nobody else may write to it."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    owned = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
    return owned and not stat.S_ISLNK(found.st_mode) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _processor() -> str:
    """The properties that ``-march=native`` depends on: a cache folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.platform()
    properties = [
        line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")
    ]
    return "\n".join(dict.fromkeys(properties)) or platform.platform()


def _call(  # noqa: PLR0913 - as a step takes them
    library: ctypes.CDLL,
    gradient: torch.Tensor,
    old: MasterStates,
    new: MasterStates,
    weight_out: torch.Tensor | None,
    options: AdamOptions,
    step: int,
    factor: float,
    first: int,
) -> None:
    numel, torchs = old.master.numel(), old.moments.kind == "float32"
    whole = numel - numel % _VECTOR_NUMEL if torchs else numel
    seed, position = (0, 0) if torchs else noise_seed(step, first).tolist()
    before, after = old.moments, new.moments
    tensors = (
        gradient, old.master, before.exp_avg, before.exp_avg_sq, new.master, after.exp_avg, after.exp_avg_sq,
        weight_out, before.exp_avg_scale, before.exp_avg_sq_scale, after.exp_avg_scale, after.exp_avg_sq_scale,
    )  # fmt: skip
    states = _States(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))
    made = _numbers(options, step, factor, torchs=torchs)
    # ctypes releases the interpreter's lock.
    library.elixir_adam(
        ctypes.byref(states),
        ctypes.byref(made),
        ctypes.c_int64(whole),
        ctypes.c_uint32(position % _SEED_MODULUS),
        ctypes.c_uint32(seed % _SEED_MODULUS),
        ctypes.c_int(min(torch.get_num_threads(), max(whole // THREAD_NUMEL, 1))),
    )
    if whole < numel:
        rest = slice(whole, numel)
        tail = MasterStates(new.master[rest], after.cut(whole, numel))
        tail.master.copy_(old.master[rest])
        for mine, theirs in zip(tail.moments.tensors(), before.cut(whole, numel).tensors(), strict=True):
            mine.copy_(theirs)
        eager_step(gradient[rest], tail, None if weight_out is None else weight_out[rest], options, step, factor)


def _numbers(options: AdamOptions, step: int, factor: float, *, torchs: bool) -> _Numbers:
    """The numbers of a step: each rounded once, as torch's kernel does, or those of the rule."""
    if torchs:
        return _Numbers(*step_numbers(options, step, factor))
    factor, *rest = adam_scalars(options, step, factor).tolist()
    return _Numbers(factor, 1.0, *rest)


def _examples() -> Iterator[tuple[AdamOptions, int, float]]:
    """Options, numbers of steps and factors that take every branch."""
    for decoupled in (True, False):
        for beta1, decay, maximize in ((0.9, 0.1, False), (0.3, 0.0, False), (0.5, 0.01, True)):
            options = AdamOptions(1e-2, beta1, 0.99, 1e-8, decay, decoupled, maximize)
            yield options, 1, 1.0
            yield options, 40, 0.37


def has_same_bits(combination: Combination, kernel: Kernel) -> bool:
    """Whether the kernel gives what the eager step gives, in every bit of everything that it writes."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.float32  # not the program's default, which another thread may set
    start = torch.randn(4, _CHECKED_NUMEL, generator=generator, dtype=wide, device="cpu")
    start[3] = start[3].abs() * torch.logspace(-12, 4, _CHECKED_NUMEL, dtype=wide, device="cpu")
    # Next to small weights, every bit of a step is visible.
    start[1] *= torch.logspace(-6, 0, _CHECKED_NUMEL, dtype=wide, device="cpu")
    for row in start:
        row[::97] = 0.0
    blocks = combination.moments == "8bit"
    start = start[:, : _CHECKED_NUMEL // BLOCK_NUMEL * BLOCK_NUMEL] if blocks else start
    gradient, weight = start[0].to(combination.gradient), combination.weight
    for options, step, factor in _examples():
        old, new, place, again = (_made(values, combination) for values in (start, start * 0, start, start))
        outs = [None if weight is None else torch.zeros_like(start[0], dtype=weight) for _ in range(3)]
        if not blocks:
            kernel(gradient, old, new, outs[0], options, step, factor, 0)
        with torch.no_grad():
            eager_step(gradient, place, outs[1], options, step, factor)
        kernel(gradient, again, again, outs[2], options, step, factor, 0)
        expected = (place.master, *place.moments.tensors(), outs[1])
        for states, out in ((again, outs[2]),) if blocks else ((again, outs[2]), (new, outs[0])):
            for mine, theirs in zip((states.master, *states.moments.tensors(), out), expected, strict=True):
                if mine is not None and theirs is not None and not torch.equal(mine, theirs):
                    return False
    return True


def _made(start: torch.Tensor, combination: Combination) -> MasterStates:
    moments = make_moments(start.shape[1], combination.moments)
    write_moments(moments, 0, start[2], start[3])
    return MasterStates(start[1].clone(), moments)


# --- step ------------------------------------------------------------------------------------------------------------


COMPILED = "compiled"
"""The form of a step in place by the C++ kernel. Eager forms are in `elixir.kernels.adam.eager`."""
ONE_PASS, COPIED = "one pass", "copied"
"""Forms of a step out of place: by the kernel, or in place on a copy."""


@torch.no_grad()
def adam_step(  # noqa: PLR0913 - tensors, then numbers
    gradient: torch.Tensor,
    master: torch.Tensor,
    weight_out: torch.Tensor | None,
    moments: Moments,
    options: AdamOptions,
    step: int,
    factor: float = 1.0,
    *,
    at: int | None = None,
    into: MasterStates | None = None,
) -> str:
    """One Adam step over a flat shard. On the host, all forms give the same bits.

    Args:
        gradient: flat, any floating dtype; left as it is.
        master: flat float32 weights; updated.
        weight_out: flat; takes the new weights in its dtype. None where `master` is what the model reads.
        moments: of as many elements; updated.
        options: of the parameter group.
        step: number of this step, the first being 1.
        factor: the gradient is multiplied by it first.
        at: `moments` are of a longer tensor, in which these elements begin here. Rounding is by the place there, so
            moments in fewer bits are the same whether a tensor is stepped whole or in parts, but for 8-bit blocks that
            a part does not fill: those are rounded once for each part.
        into: other memory on the host, of the same kind and size, which takes new weights and moments; `master` and
            `moments` are left as they are.

    Returns:
        The form of the step: `COMPILED`, or what `eager_step` says; with `into`, `ONE_PASS` or `COPIED`.

    Raises:
        InputError, InputTypeError: tensors do not fit together, or a number is out of range.
    """
    old = MasterStates(master, moments)
    for states in (old,) if into is None else (old, into):
        _check_tensors(gradient, states, weight_out, at)
    check_step(step, factor)
    numel, first = master.numel(), at or 0
    if numel == 0:
        return IN_PIECES if into is None else COPIED
    weight, separate = None if weight_out is None else weight_out.dtype, into is not None and moments.kind != "8bit"
    kernel = None
    if master.device.type == "cpu":
        kernel = kernel_for(Combination(gradient.dtype, weight, moments.kind), numel, separate=separate)
    if into is not None:
        new = MasterStates(into.master, into.moments.cut(first, first + numel))
        old = MasterStates(master, moments.cut(first, first + numel))
        if separate and kernel is not None:
            kernel(gradient, old, new, weight_out, options, step, factor, first)
            return ONE_PASS
        for mine, theirs in zip((new.master, *new.moments.tensors()), (master, *old.moments.tensors()), strict=True):
            mine.copy_(theirs)
        adam_step(gradient, into.master, weight_out, into.moments, options, step, factor, at=at)
        return COPIED
    begin, end = _whole_blocks(first, numel) if moments.kind == "8bit" else (0, numel)
    whole, place = slice(begin, end), first + begin
    out = None if weight_out is None else weight_out[whole]
    if kernel is None:
        form = eager_step(gradient[whole], MasterStates(master[whole], moments), out, options, step, factor, place)
    else:
        states = MasterStates(master[whole], moments.cut(place, first + end))
        kernel(gradient[whole], states, states, out, options, step, factor, place)
        form = COMPILED
    for part in (slice(0, begin), slice(end, numel)):  # of 8-bit blocks that others share
        if part.start < part.stop:
            out = None if weight_out is None else weight_out[part]
            states = MasterStates(master[part], moments)
            rule_step(gradient[part], states, out, options, step, factor, first + part.start)
    return form


def _whole_blocks(first: int, numel: int) -> tuple[int, int]:
    """The range of elements that fill whole blocks, if the first element lies at `first` of a tensor."""
    begin = min(-first % BLOCK_NUMEL, numel)
    return begin, max(begin, numel - (first + numel) % BLOCK_NUMEL)


def _check_tensors(
    gradient: torch.Tensor, states: MasterStates, weight_out: torch.Tensor | None, at: int | None
) -> None:
    master, moments = states
    if master.dtype != torch.float32:
        raise InputTypeError(f"master weights must be float32, got {master.dtype}")
    for name, tensor in (("master", master), ("gradient", gradient), ("weight_out", weight_out)):
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise InputTypeError(f"{name} must be of a floating dtype, got {tensor.dtype}")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise InputError(f"{name} must be flat and contiguous, got shape {tuple(tensor.shape)}; use .view(-1)")
        if tensor.shape != master.shape or tensor.device != master.device:
            raise InputError(
                f"{name} has {tensor.numel()} elements on {tensor.device}, master has {master.numel()} on "
                f"{master.device}; they must match"
            )
    begin = (at or 0) - moments.first
    expected = moment_numel(begin + master.numel(), moments.kind)
    more, where = ("", "") if at is None else (" or more", f" at element {at}")
    for tensor in (moments.exp_avg, moments.exp_avg_sq):
        fits = tensor.shape == (expected,) if at is None else begin >= 0 and tensor.numel() >= expected
        if not fits or tensor.device != master.device:
            raise InputError(
                f"{moments.kind} moments of {master.numel()} weights{where} on {master.device} have {expected}{more} "
                f"elements there, got {tuple(tensor.shape)} on {tensor.device}; make them with make_moments"
            )
