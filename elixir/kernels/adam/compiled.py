"""Compiling a function with torch.compile without standing in anyone's way.

A cold compile takes some 15 s of a core. Done in a thread it would hold the interpreter's lock for half of that, and
the training loop would wait for the lock at every operator. So a child process at the lowest priority compiles first,
which fills inductor's cache on disk; then a thread of this process compiles again, mostly reading that cache. Until it
is done, and for good where anything fails, the caller keeps running its eager form.

``ELIXIR_COMPILE`` chooses: ``1`` (default) compiles in the background once it pays, ``now`` in the background at the
first step, ``wait`` before the first step (so that no step differs by when the compiler was done), ``0`` never.
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
from typing import Any

import torch

from elixir.errors import unknown_name

logger = logging.getLogger(__name__)

VARIABLE = "ELIXIR_COMPILE"
_MODES = {"0": "never", "1": "background", "now": "now", "wait": "wait"}
_PRIORITY = 19
"""Niceness of the compiling child: it gets what nobody else wants."""
_LOOKED_AFTER_S = 0.5
"""How often the compiling child looks whether its parent still runs."""
_EXIT_WAIT_S = 20.0
"""How long a process that ends waits for its compiling thread, which must not be torn down inside of C++ code."""

_ADVICE = "TORCHDYNAMO_VERBOSE"

_CHILD = """\
import os, threading, time
if hasattr(os, "nice"):
    os.nice({priority})
if hasattr(os, "killpg"):
    os.setpgid(0, 0)
    def watch():
        while os.getppid() == {parent}:
            time.sleep({seconds})
        os.killpg(0, 9)
    threading.Thread(target=watch, daemon=True).start()
{source}
"""
"""A child of low priority that leads a process group, with the compilers that it starts. The group ends when the parent
has ended, also by a signal after which no code of the parent runs."""

Step = Callable[..., Any]


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


def compile_step(function: Step, example: Sequence[Any], *, narrow: bool = False) -> tuple[Step, Any]:
    """`function` compiled for any length, and what it gave for `example`.

    With `narrow`, a CPU that has vectors of 512 bits uses those of 256. For a step that waits for memory: inductor
    takes as many elements at once as float32 has in a vector, so bfloat16 fills half of one, and AVX512's code for
    halves cost 9 to 15 % of a step over 100 M elements (2 cores of an EPYC 9005). Steps that compute more take twice as
    long with it.

    Guards are left out: the caller passes flat tensors of the same kinds as in `example` and of at least two elements.
    They would recompile, in the middle of a step, when a thread count or autocast changes, which do not matter here.
    """
    options: dict[str, str | int | bool | Callable[..., Any]] = {
        "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
        # Threads are counted when the code runs, as everywhere in torch, not written into it.
        "cpp.dynamic_threads": True,
        # ... but a process with one thread, such as the child, would get code without any.
        "cpp.threads": 64,
    }
    if all(value.device.type == "cpu" for value in example if isinstance(value, torch.Tensor)):
        # Called from Python, inductor's C++ holds the interpreter's lock for as long as the step takes, and the
        # training thread waits for it; its C++ wrapper releases the lock.
        options["cpp_wrapper"] = True
    if narrow and torch.backends.cpu.get_cpu_capability() == "AVX512":
        options["cpp.simdlen"] = 256
    compiled: Step = torch.compile(_twin(function), dynamic=True, fullgraph=True, options=options)
    with torch.no_grad():
        return compiled, compiled(*example)


def _last_word(written: str) -> str:
    """The last line of a failure's output that describes it: torch ends with advice on how to see more."""
    lines = [line.strip() for line in written.splitlines()]
    return next((line for line in reversed(lines) if line and _ADVICE not in line), "")


def _twin(function: Step) -> Step:
    """The same function with a new code object.

    Dynamo keeps what it compiled with the code object, and without guards the first entry there serves every call: a
    second combination of dtypes would run the code of the first.
    """
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"only a plain function can be compiled, got {function!r}")
    twin = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


class Background:
    """A step that is compiled once, in the background.

    Args:
        name: for log lines.
        build: compiles and returns the step; what `compile_step` gives.
        child: Python source for a child process that does the same, to fill the cache; None to do without.
    """

    def __init__(self, name: str, build: Callable[[], Step], child: str | None) -> None:
        self.name = name
        self._build = build
        self._child_source = child
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._step: Step | None = None

    @property
    def step(self) -> Step | None:
        """The compiled step once there is one."""
        return self._step

    @property
    def started(self) -> bool:
        """Whether compiling has begun, or is over."""
        return self._thread is not None

    def start(self) -> None:
        """Begin, unless begun."""
        with self._lock:
            if self._thread is not None or self._stopping:
                return
            self._thread = threading.Thread(target=self._run, name=f"elixir-compile-{self.name}", daemon=True)
            atexit.register(self._stop)
            self._thread.start()

    def wait(self, timeout_s: float | None = None) -> Step | None:
        """Begin unless begun, and wait until it is over; the step, or None where compiling failed."""
        self.start()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._step

    def _run(self) -> None:
        try:
            began = time.monotonic()
            if self._child_source is not None:
                self._run_child(self._child_source)
            child_s = time.monotonic() - began
            if not self._stopping:
                self._step = self._build()
                rest_s = time.monotonic() - began - child_s
                logger.info("%s is compiled: %.1f s in a child process, %.1f s in this", self.name, child_s, rest_s)
        except Exception as error:
            if not self._stopping:
                reason = _last_word(str(error)) or type(error).__name__
                logger.warning("%s could not be compiled and stays as it is: %s", self.name, reason)
                logger.debug("compiling %s failed", self.name, exc_info=True)

    def _run_child(self, source: str) -> None:
        """Compile in a child process; raises `RuntimeError` with its last output if it fails."""
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {**os.environ, "PYTHONPATH": paths, VARIABLE: "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        # One thread: OpenMP would keep cores busy, and the example is small.
        environment["OMP_NUM_THREADS"] = "1"
        code = _CHILD.format(priority=_PRIORITY, parent=os.getpid(), seconds=_LOOKED_AFTER_S, source=source)
        with self._lock:
            if self._stopping:
                return
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        _, written = self._process.communicate()
        if self._process.returncode and not self._stopping:
            lines = written.decode(errors="replace").strip().splitlines()
            raise RuntimeError("\n".join(lines) or f"the compiling process ended with {self._process.returncode}")

    def _stop(self) -> None:
        """At exit: end the child and its compiler at once, and let the thread leave C++ code."""
        with self._lock:
            self._stopping = True
            if self._process is not None and self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError, AttributeError):  # no group yet, or none on this system
                    os.killpg(self._process.pid, signal.SIGKILL)  # with its compiler
                self._process.kill()
        if self._thread is not None:
            self._thread.join(_EXIT_WAIT_S)
