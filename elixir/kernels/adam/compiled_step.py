"""Compiling a step in the background: the host's kernel by a C++ compiler, a device's by torch.compile.

A thread of this process compiles. Until it is done, and for good if anything fails, the caller keeps running its eager
form. A C++ compiler runs in a child process, which ends with this one.

``ELIXIR_COMPILE`` chooses when steps in place are compiled: ``1`` (default) once it pays, ``now`` at the first step,
``wait`` before the first step, ``0`` never. On the host no bit depends on it. Steps that leave the old states as they
are always use the kernel once it is there, and wait for it only with ``wait``.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from elixir.errors import unknown_name
from elixir.optimizer_states import MomentKind

logger = logging.getLogger(__name__)

VARIABLE = "ELIXIR_COMPILE"
_MODES = {"0": "never", "1": "background", "now": "now", "wait": "wait"}
_LOOKED_AFTER_S = 0.5
"""How often the compiling child looks whether its parent still runs."""
_EXIT_WAIT_S = 20.0
"""How long a process that ends waits for its compiling thread, which must not be torn down inside of C++ code."""

_ADVICE = "TORCHDYNAMO_VERBOSE"

_CHILD = """\
import os, subprocess, sys, threading, time
if hasattr(os, "killpg"):
    os.setpgid(0, 0)
    def watch():
        while os.getppid() == {parent}:
            time.sleep({seconds})
        os.killpg(0, 9)
    threading.Thread(target=watch, daemon=True).start()
sys.exit(subprocess.run({command}).returncode)
"""
"""A child that leads a process group, with the compiler that it starts. The group ends when the parent has ended, also
by a signal after which no code of the parent runs."""

Step = Callable[..., Any]
Run = Callable[[Sequence[str]], None]
"""Runs a compiler's command; `RuntimeError` with its output if it fails."""


class Combination(NamedTuple):
    """The device, dtypes and moments on which a compiled step depends."""

    device: str
    """Device with its index, since compiled code launches on the device of its example."""
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


def mode() -> str:
    """``never``, ``background``, ``now`` or ``wait``, as the environment says.

    Raises:
        InputError: the variable has another value.
    """
    value = os.environ.get(VARIABLE, "1").strip().lower() or "1"
    if value not in _MODES:
        raise unknown_name(f"value of {VARIABLE}", value, _MODES)
    return _MODES[value]


def missing_compiler(device_type: str) -> str | None:
    """The tool that compiling for a device lacks, in words; None if nothing obvious is missing."""
    if device_type == "cuda":
        return None if importlib.util.find_spec("triton") else "Triton is not installed"
    if device_type != "cpu":
        return f"nothing is compiled for {device_type}"
    default = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    compiler = os.environ.get("CXX", default)
    return None if shutil.which(compiler) else f"there is no C++ compiler ({compiler!r}; set CXX)"


def compile_step(function: Step, example: Sequence[Any]) -> tuple[Step, Any]:
    """Compiles `function` with torch for any length; returns it with its result for `example`.

    Guards are left out: the caller passes flat tensors of the same kinds as in `example` and of at least two elements.
    They would recompile, in the middle of a step, when a thread count or autocast changes, which do not matter here.
    """
    options: dict[str, str | int | bool | Callable[..., Any]] = {
        "guard_filter_fn": torch.compiler.skip_all_guards_unsafe
    }
    compiled: Step = torch.compile(_twin(function), dynamic=True, fullgraph=True, options=options)
    with torch.no_grad():
        return compiled, compiled(*example)


def _last_word(written: str) -> str:
    """The last line of a failure's output that describes it: torch ends with advice on how to see more."""
    lines = [line.strip() for line in written.splitlines()]
    return next((line for line in reversed(lines) if line and _ADVICE not in line), "")


def _twin(function: Any) -> Step:
    """The same function with a new code object.

    Dynamo keeps what it compiled with the code object, and without guards the first entry there serves every call: a
    second combination of dtypes would run the code of the first.
    """
    twin = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


class CompiledStep:
    """A step that is compiled once, in the background.

    Args:
        name: for log lines.
        build: compiles and returns the step; it is given what runs a command in a child process.
    """

    def __init__(self, name: str, build: Callable[[Run], Step]) -> None:
        self.name = name
        self._build = build
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self.step: Step | None = None
        """The compiled step once there is one."""

    @property
    def started(self) -> bool:
        """Whether compiling has begun, or is over."""
        return self._thread is not None

    def start(self) -> None:
        """Begins, unless begun."""
        with self._lock:
            if self._thread is not None or self._stopping:
                return
            self._thread = threading.Thread(target=self._run, name=f"elixir-compile-{self.name}", daemon=True)
            atexit.register(self._stop)
            self._thread.start()

    def wait(self, timeout_s: float | None = None) -> Step | None:
        """Begins unless begun, and waits until it is over; the step, or None where compiling failed."""
        self.start()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.step

    def _run(self) -> None:
        try:
            began = time.monotonic()
            self.step = self._build(self._run_child)
            logger.info("%s is compiled, in %.1f s", self.name, time.monotonic() - began)
        except Exception as error:
            if not self._stopping:
                reason = _last_word(str(error)) or type(error).__name__
                logger.warning("%s could not be compiled and stays as it is: %s", self.name, reason)
                logger.debug("compiling %s failed", self.name, exc_info=True)

    def _run_child(self, command: Sequence[str]) -> None:
        """Runs a command in a child process; raises `RuntimeError` with its output if it fails."""
        code = _CHILD.format(parent=os.getpid(), seconds=_LOOKED_AFTER_S, command=list(command))
        with self._lock:
            if self._stopping:
                raise RuntimeError("this process ends")
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        _, written = self._process.communicate()
        if self._process.returncode:
            ended = f"{command[0]} ended with {self._process.returncode}"
            raise RuntimeError(written.decode(errors="replace").strip() or ended)

    def _stop(self) -> None:
        """Ends the child and its compiler at exit, and lets the thread leave C++ code."""
        with self._lock:
            self._stopping = True
            if self._process is not None and self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError, AttributeError):  # no group yet, or none on this system
                    os.killpg(self._process.pid, signal.SIGKILL)  # with its compiler
                self._process.kill()
        if self._thread is not None:
            self._thread.join(_EXIT_WAIT_S)
