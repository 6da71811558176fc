"""Adam steps that write new states elsewhere and leave the old ones as they are, with the bits of the step in place.

A C++ kernel does it in one pass, whose results go past the caches. It is compiled by the machine's own compiler, for
the combination of dtypes that is stepped, and kept in the user's cache folder. Before it is used, its results are
compared with those of the step in place. If one bit differs, if there is no compiler, or until it is compiled, the
states are copied and the copy is stepped in place. Compiling it takes a few seconds and no torch.compile, so it does
not depend on whether ``ELIXIR_COMPILE`` lets that run; ``wait`` waits for it, too.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from elixir.kernels.adam.compiled import Background, Step, missing_compiler, mode
from elixir.kernels.adam.moments import Moments, make_moments, noise_seed, step_arguments
from elixir.kernels.adam.rule import AdamOptions, adam_scalars, check_step
from elixir.kernels.adam.step import adam_step, check_tensors, fused_pieces
from elixir.kernels.adam.when_compiled import Combination, compiled_step
from elixir.optimizer_states import BLOCK_NUMEL, MomentKind

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp",
    "-fPIC", "-shared",
)  # fmt: skip
"""Nothing that rounds otherwise than the source says."""
CACHE_VARIABLE = "XDG_CACHE_HOME"

ONE_PASS, COPIED = "one pass", "copied"
"""Forms of a step out of place: by the kernel, or in place on a copy."""

_KINDS = {None: "NONE", torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
_MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_VECTOR_NUMEL = 16
"""Elements of the longest vector of torch's kernels; what is left after the last whole one is stepped by other code."""
_CHECKED_NUMEL = 4096 + 5
_SEED_MODULUS = 2**32


class Form(NamedTuple):
    """One kernel: the combination of dtypes, and whose arithmetic it has."""

    combination: Combination
    torchs: bool
    """That of torch's fused step, which runs where nothing else is compiled; otherwise that of the compiled rule."""


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
        for name in ("gradient", "master", "avg", "sq", "new_master", "new_avg", "new_sq", "weights")
    ]


class States(NamedTuple):
    """Master weights and moments of as many elements."""

    master: torch.Tensor
    moments: Moments


Kernel = Callable[[torch.Tensor, States, States, torch.Tensor | None, AdamOptions, int, float, int], None]
"""A function of (gradient, old, new, weight_out, options, step, factor, place of the first element); the moments are of
these elements only."""


def adam_step_out_of_place(
    gradient: torch.Tensor,
    old: States,
    new: States,
    weight_out: torch.Tensor | None,
    options: AdamOptions,
    step: int,
    factor: float = 1.0,
    *,
    at: int | None = None,
) -> str:
    """`adam_step` with the same bits, into `new`; `old` is left as it is.

    Args:
        gradient: flat, on the host, any floating dtype.
        old: flat master weights and their moments.
        new: takes the new ones; of the same kind and size, and other memory.
        weight_out: flat; takes the new weights in its dtype. None where `new.master` is what the model reads.
        options: of the parameter group.
        step: number of this step, the first being 1.
        factor: the gradient is multiplied by it first.
        at: both moments are of a longer tensor, in which these elements begin here.

    Returns:
        The form of the step: `ONE_PASS` or `COPIED`.

    Raises:
        InputError, InputTypeError: tensors do not fit together, or a number is out of range.
    """
    for states in (old, new):
        check_tensors(gradient, states.master, weight_out, states.moments, at)
    check_step(step, factor)
    numel, first = old.master.numel(), at or 0
    kernel = kernel_for(gradient, old, weight_out)
    with torch.no_grad():
        if kernel is None:
            new.master.copy_(old.master)
            for source, target in zip(old.moments.tensors(), new.moments.tensors(), strict=True):
                part = _part(source, old.moments, first, numel)
                target[part].copy_(source[part])
            adam_step(gradient, new.master, weight_out, new.moments, options, step, factor, at=at)
        elif numel:
            mine, theirs = (States(each.master, _cut(each.moments, first, numel)) for each in (new, old))
            kernel(gradient, theirs, mine, weight_out, options, step, factor, first)
    return COPIED if kernel is None else ONE_PASS


def kernel_for(
    gradient: torch.Tensor, old: States, weight_out: torch.Tensor | None, *, torchs: bool = False
) -> Kernel | None:
    """The kernel for such tensors, if it is compiled by now, with the bits of the step in place.

    Args:
        gradient, old, weight_out: those of `adam_step_out_of_place`.
        torchs: the bits are those of torch's fused step, although a compiled one may be ready.
    """
    weight = None if weight_out is None else weight_out.dtype
    combination = Combination(str(old.master.device), gradient.dtype, weight, old.moments.kind)
    compiled = None if torchs else compiled_step(combination, old.master.numel())
    return _ready(Form(combination, torchs=compiled is None), compiled)


_backgrounds: dict[Form, Background | None] = {}
_lock = threading.Lock()


def begin_kernel(gradient: torch.dtype, weight: torch.dtype | None, moments: MomentKind) -> None:
    """Begin to compile the kernel with the bits of torch's fused step, so that the first step out of place finds it.

    Args:
        gradient, weight: dtypes of the gradients and of the weights that are written; None without such weights.
        moments: how they are kept; there is a kernel for float32 only.
    """
    background = _background(Form(Combination("cpu", gradient, weight, moments), torchs=True), None)
    if background is not None:
        background.start()


def absent_kernels() -> list[str]:
    """Wait for all kernels that have been asked for; the names of those that are not there all the same."""
    with _lock:
        asked = list(_backgrounds.items())
    return [str(form.combination) for form, each in asked if each is None or each.wait() is None]


def _ready(form: Form, compiled: Step | None) -> Kernel | None:
    """The kernel, if it is made by now; begins to make it."""
    background = _background(form, compiled)
    if background is None:
        return None
    if background.step is None:
        if mode() == "wait":
            return background.wait()
        background.start()
    return background.step


def _background(form: Form, compiled: Step | None) -> Background | None:
    """The making of a kernel, which may not have begun; None if this form, or this machine, has none."""
    combination = form.combination
    if combination.device_type != "cpu" or combination.moments not in _MOMENTS:
        return None
    if form.torchs and combination.moments != "float32":
        return None  # eager steps with fewer bits go through other libraries, whose roots round otherwise
    with _lock:
        if form not in _backgrounds:
            lacking = missing_compiler("cpu")
            if lacking is not None:
                logger.info("%s copies states before a step out of place: %s", combination, lacking)
            name = f"{combination}, out of place"
            build = functools.partial(_build, form, compiled)
            _backgrounds[form] = Background(name, build, None) if lacking is None else None
        return _backgrounds[form]


def _build(form: Form, compiled: Step | None) -> Kernel:
    """Compile the kernel now.

    Raises:
        RuntimeError: there is no such kernel for this processor, or none with the bits of the step in place.
    """
    for contracted in (True, False) if form.torchs else (False,):
        kernel = functools.partial(_call, _library(form, contracted=contracted), form.torchs)
        if _has_same_bits(form, kernel, compiled):
            return kernel
    raise RuntimeError("it does not give the bits of the step in place")


def _library(form: Form, *, contracted: bool) -> ctypes.CDLL:
    """The kernel's library, compiled unless the cache folder has it."""
    combination = form.combination
    macros = {
        "TORCHS": int(form.torchs),
        "CONTRACTED": int(contracted),
        "GRADIENT": _KINDS.get(combination.gradient),
        "MOMENTS": _KINDS[_MOMENTS[combination.moments]],
        "WEIGHTS": _KINDS.get(combination.weight),
    }
    if None in macros.values():
        raise RuntimeError(f"there is no kernel for {combination}")
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, *FLAGS, *(f"-D{name}={value}" for name, value in macros.items()), str(SOURCE)]
    made_of = "\n".join((SOURCE.read_text(encoding="utf-8"), *command, _processor()))
    folder = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache") / "elixir"
    library = folder / f"adam_{hashlib.sha256(made_of.encode()).hexdigest()[:24]}.so"
    kept = _may_keep_code_in(folder)
    if kept and _is_private(library):
        return ctypes.CDLL(str(library))
    with tempfile.TemporaryDirectory(dir=folder if kept else None) as scratch:
        made = Path(scratch) / library.name
        done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or f"{compiler} ended with {done.returncode}")
        loaded = ctypes.CDLL(str(made))
        if kept:
            made.chmod(0o700)  # whatever the user's umask: `_is_private` refuses others
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
    told = [line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")]
    return "\n".join(dict.fromkeys(told)) or platform.platform()


def _call(  # noqa: PLR0913 - as a step takes them
    library: ctypes.CDLL,
    torchs: bool,
    gradient: torch.Tensor,
    old: States,
    new: States,
    weight_out: torch.Tensor | None,
    options: AdamOptions,
    step: int,
    factor: float,
    place: int,
) -> None:
    numel = old.master.numel()
    whole = numel - numel % _VECTOR_NUMEL if torchs else numel
    seed = 0
    if old.moments.kind != "float32":
        seed, place = noise_seed(step, place).tolist()
    tensors = (
        gradient, old.master, old.moments.exp_avg, old.moments.exp_avg_sq, new.master, new.moments.exp_avg,
        new.moments.exp_avg_sq, weight_out,
    )  # fmt: skip
    states = _States(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))
    made = _torchs_numbers(options, step, factor) if torchs else _rules_numbers(options, step, factor)
    # ctypes lets go of the interpreter's lock.
    library.elixir_adam_out_of_place(
        ctypes.byref(states),
        ctypes.byref(made),
        ctypes.c_int64(whole),
        ctypes.c_uint32(place % _SEED_MODULUS),
        ctypes.c_uint32(seed % _SEED_MODULUS),
        ctypes.c_int(torch.get_num_threads()),
    )
    if whole < numel:
        rest = slice(whole, numel)
        tail = States(new.master[rest], _cut(new.moments, whole, numel - whole))
        tail.master.copy_(old.master[rest])
        for mine, theirs in zip(tail.moments.tensors(), old.moments.tensors(), strict=True):
            mine.copy_(theirs[rest])
        out = None if weight_out is None else weight_out[rest]
        fused_pieces(gradient[rest], tail.master, out, tail.moments, options, step, factor)


def _torchs_numbers(options: AdamOptions, step: int, factor: float) -> _Numbers:
    """In double precision, each rounded once, as torch's kernel does."""
    l2 = 0.0 if options.decoupled else options.weight_decay
    decay = 1.0 - options.lr * options.weight_decay if options.decoupled else 1.0
    root = math.sqrt(1.0 - options.beta2**step)
    sign = -1.0 if options.maximize else 1.0
    step_size = options.lr / (1.0 - options.beta1**step)
    keep1, keep2 = 1.0 - options.beta1, 1.0 - options.beta2
    return _Numbers(factor, sign, l2, decay, keep1, options.beta2, keep2, root, options.eps, step_size)


def _rules_numbers(options: AdamOptions, step: int, factor: float) -> _Numbers:
    factor, *rest = adam_scalars(options, step, factor).tolist()
    return _Numbers(factor, 1.0, *rest)


def _cut(moments: Moments, first: int, numel: int) -> Moments:
    part = slice(first, first + numel)
    return Moments(moments.kind, moments.exp_avg[part], moments.exp_avg_sq[part])


def _part(tensor: torch.Tensor, moments: Moments, first: int, numel: int) -> slice:
    """The part of one tensor of `moments` that has these elements: codes and scales of whole blocks."""
    if moments.kind != "8bit":
        return slice(first, first + numel)
    begin, stop = first // BLOCK_NUMEL, -(-(first + numel) // BLOCK_NUMEL)
    per = moments.exp_avg.numel() // tensor.numel()
    return slice(begin * BLOCK_NUMEL // per, stop * BLOCK_NUMEL // per)


def _examples() -> Iterator[tuple[AdamOptions, int, float]]:
    """Options, numbers of steps and factors that take every branch."""
    for decoupled in (True, False):
        for beta1, decay, maximize in ((0.9, 0.1, False), (0.3, 0.0, False), (0.5, 0.01, True)):
            options = AdamOptions(1e-2, beta1, 0.99, 1e-8, decay, decoupled, maximize)
            yield options, 1, 1.0
            yield options, 40, 0.37


def _has_same_bits(form: Form, kernel: Kernel, compiled: Step | None) -> bool:
    """Whether the kernel gives what the step in place gives, in every bit of everything that it writes."""
    combination = form.combination
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, _CHECKED_NUMEL, generator=generator, device="cpu")
    start[3] = start[3].abs() * torch.logspace(-12, 4, _CHECKED_NUMEL, device="cpu")
    for row in start:
        row[::97] = 0.0
    gradient = start[0].to(combination.gradient)
    for options, step, factor in _examples():
        old, new, place = _made(start, combination), _made(start * 0, combination), _made(start, combination)
        outs = [
            None if combination.weight is None else torch.zeros(_CHECKED_NUMEL, dtype=combination.weight, device="cpu")
            for _ in range(2)
        ]
        kernel(gradient, old, new, outs[0], options, step, factor, 0)
        if compiled is None:
            fused_pieces(gradient, place.master, outs[1], place.moments, options, step, factor)
        else:
            scalars = adam_scalars(options, step, factor)
            arguments = step_arguments(gradient, place.master, outs[1], place.moments, scalars, step, 0, _CHECKED_NUMEL)
            compiled(*arguments)
        found = (new.master, *new.moments.tensors(), outs[0])
        expected = (place.master, *place.moments.tensors(), outs[1])
        for mine, theirs in zip(found, expected, strict=True):
            if mine is not None and theirs is not None and not torch.equal(mine, theirs):
                return False
    return True


def _made(start: torch.Tensor, combination: Combination) -> States:
    moments = make_moments(_CHECKED_NUMEL, combination.moments)
    moments.exp_avg.copy_(start[2])
    moments.exp_avg_sq.copy_(start[3])
    return States(start[1].clone(), moments)
