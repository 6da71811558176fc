"""Short questions to a GPU whose answers decide what is built next: each is a row, and takes seconds.

``cores and link``: do CPU Adam and copies over the link share a limit? ``adam bits``: how does torch's fused CUDA Adam
round? ``storages``: do storages that are emptied and filled in a pool of the allocator's keep their blocks exact?
``tests`` runs what failed last.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmark.proof.jobs import NotRun, Row
from benchmark.proof.place import Place
from elixir.chunk.memory import host_zeros, pinned_zeros
from elixir.kernels.adam.adam_rule import AdamOptions
from elixir.kernels.adam.moments import Moments
from elixir.kernels.adam.step import adam_step
from elixir.units import GIB

_cuda: Any = torch.cuda  # its classes carry no annotations
ROOT = Path(__file__).parents[2]
OPTIONS = AdamOptions(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False)


# Cores and link -------------------------------------------------------------------------------------------------------


class _Copies(threading.Thread):
    """Copies both ways over the link, one buffer after the other, until the probe ends it."""

    def __init__(self, place: Place, nbytes: int) -> None:
        super().__init__(daemon=True)
        self._hosts = [pinned_zeros(nbytes) for _ in range(2)]
        self._devices = [torch.ones(nbytes, dtype=torch.uint8, device=place.device) for _ in range(2)]
        self._streams = [_cuda.Stream(place.device) for _ in range(2)]
        self._ended = threading.Event()
        self.bytes_per_s = 0.0
        """In each direction, while both were busy."""

    def run(self) -> None:
        began, count = time.perf_counter(), 0
        while not self._ended.is_set() or not count:
            for stream, up in zip(self._streams, (True, False), strict=True):
                with _cuda.stream(stream):
                    host, device = self._hosts[up], self._devices[up]
                    (device if up else host).copy_(host if up else device, non_blocking=True)
            for stream in self._streams:
                stream.synchronize()
            count += 1
        self.bytes_per_s = count * self._hosts[0].nbytes / (time.perf_counter() - began)

    def end(self) -> float:
        self._ended.set()
        self.join()
        return self.bytes_per_s


def cores_and_link(options: dict[str, Any], place: Place) -> Row:
    """CPU Adam alone, copies alone, and both at once.

    Args:
        options: ``numel`` elements that are stepped; ``copied_bytes`` of one copy; ``steps`` that are timed each time.
        place: where.
    """
    numel = options["numel"]
    master, first, second = (host_zeros(4 * numel).view(torch.float32) for _ in range(3))
    gradient, weights = (pinned_zeros(2 * numel).view(torch.bfloat16) for _ in range(2))
    gradient.fill_(1e-3)
    done = 0

    def step() -> str:
        nonlocal done
        done += 1
        return adam_step(gradient, master, weights, Moments("float32", first, second), OPTIONS, done)

    def numel_per_s() -> float:
        began = time.perf_counter()
        for _ in range(options["steps"]):
            step()
        return float(options["steps"] * numel / (time.perf_counter() - began))

    step()
    form = step()
    alone = numel_per_s()
    copies = _Copies(place, options["copied_bytes"])
    copies.start()
    time.sleep(options["copied_bytes"] / GIB)
    link_alone = copies.end()
    copies = _Copies(place, options["copied_bytes"])
    copies.start()
    both = numel_per_s()
    link_both = copies.end()
    return {
        "kind": "probe",
        "host_adam_form": form,
        "host_adam_numel_per_s": [alone, both],
        "link_bytes_per_s": [link_alone, link_both],
        "outcome": f"CPU Adam {alone / 1e9:.2f} G elements/s, {both / 1e9:.2f} next to copies; link {link_alone / 1e9:.1f} "
        f"GB/s each way, {link_both / 1e9:.1f} next to CPU Adam",
    }


# Adam's bits ----------------------------------------------------------------------------------------------------------

BITS_FILE = "adam_bits_{}.npz"
STATES = ("p", "m", "v")


def adam_inputs(numel: int, steps: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Weights and the gradients of all steps: the same on every machine, since they are made of integers."""
    draw = np.random.RandomState(0)  # its streams are frozen
    tensors = []
    for _ in range(1 + steps):
        digits, power = draw.randint(-(2**23), 2**23, numel), draw.randint(-40, -20, numel)
        tensors.append(torch.from_numpy(np.ldexp(digits.astype(np.float32), power)).to(dtype))
    return tuple(tensors)


def plain_adam(states: tuple[torch.Tensor, ...], gradient: torch.Tensor, step: int) -> tuple[torch.Tensor, ...]:
    """A step whose every operation rounds once in float32, as on any machine; nothing is contracted."""
    p, m, v, g = (tensor.float() for tensor in (*states, gradient))
    o = OPTIONS
    p = p - p * float(np.float32(o.lr * o.weight_decay))
    m = m * o.beta1 + g * (1 - o.beta1)
    v = v * o.beta2 + g * (1 - o.beta2) * g
    denominator = v.sqrt() / (1 - o.beta2**step) ** 0.5 + o.eps
    p = p - m * (o.lr / (1 - o.beta1**step)) / denominator
    return tuple(tensor.to(gradient.dtype) for tensor in (p, m, v))


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    kind = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    return tensor.view(kind).numpy().astype(np.int32)


def adam_bits(options: dict[str, Any], place: Place) -> Row:
    """Steps ``options["numel"]`` elements by torch's fused Adam, and writes how its bits differ from `plain_adam`'s.

    A file has, per step and state, the difference of the bits: a few megabytes, from which `read_adam_bits` gives all
    outputs back.
    """
    shares = []
    for dtype in (torch.float32, torch.bfloat16):
        weights, *gradients = adam_inputs(options["numel"], options["steps"], dtype)
        before = (weights, torch.zeros_like(weights), torch.zeros_like(weights))
        there = [tensor.to(place.device, copy=True) for tensor in before]
        count = torch.zeros((), device=place.device)
        found = {}
        for step, gradient in enumerate(gradients, 1):
            count += 1
            torch._fused_adamw_(
                *([tensor] for tensor in (there[0], gradient.to(place.device), *there[1:])), [], [count],
                amsgrad=False, lr=OPTIONS.lr, beta1=OPTIONS.beta1, beta2=OPTIONS.beta2, eps=OPTIONS.eps,
                weight_decay=OPTIONS.weight_decay, maximize=False,
            )  # fmt: skip
            after = tuple(tensor.cpu().clone() for tensor in there)
            for name, mine, plain in zip(STATES, after, plain_adam(before, gradient, step), strict=True):
                found[f"{name}{step}"] = _bits(mine) - _bits(plain)
            before = after
        name = str(dtype).removeprefix("torch.")
        np.savez_compressed(place.folder / BITS_FILE.format(name), **found)
        equal = ", ".join(f"{key} {np.mean(values == 0):.4%}" for key, values in found.items())
        shares.append(f"{name}: {equal}")
    return {"kind": "probe", "numel": options["numel"], "outcome": f"same as rounding once; {'; '.join(shares)}"}


def read_adam_bits(path: Path, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """Weights and moments before the first step and after each, as torch's fused Adam has left them."""
    kept = np.load(path)
    steps = len(kept.files) // len(STATES)
    weights, *gradients = adam_inputs(len(kept["p1"]), steps, dtype)
    states = [(weights, torch.zeros_like(weights), torch.zeros_like(weights))]
    kind = np.int32 if dtype == torch.float32 else np.int16
    for step, gradient in enumerate(gradients, 1):
        plain = plain_adam(states[-1], gradient, step)
        bits = [_bits(tensor) + kept[f"{name}{step}"] for name, tensor in zip(STATES, plain, strict=True)]
        states.append(tuple(torch.from_numpy(each.astype(kind)).view(dtype) for each in bits))
    return states


# Storages in a pool ---------------------------------------------------------------------------------------------------


def storages(options: dict[str, Any], place: Place) -> Row:
    """Empties and fills storages in a `torch.cuda.MemPool`, and says what becomes of blocks, streams and views.

    Args:
        options: ``nbytes`` of a storage, ``count`` that are filled at most, ``cycles``.
        place: where.

    Raises:
        NotRun: PyTorch has no such pool here.
    """
    try:
        pool = _cuda.MemPool()
    except RuntimeError as error:
        raise NotRun(f"no pool: {error}") from None

    def fill(storage: Any, nbytes: int) -> None:
        with _cuda.use_mem_pool(pool):
            storage.resize_(nbytes)

    def empties(count: int) -> list[Any]:
        return [torch.empty(0, dtype=torch.uint8, device=place.device).untyped_storage() for _ in range(count)]

    def exact() -> dict[str, Any]:
        made, before = empties(options["count"]), _cuda.memory_reserved()
        for storage in made:
            fill(storage, options["nbytes"] + 1)
        wanted, taken = len(made) * (options["nbytes"] + 1), _cuda.memory_reserved() - before
        for storage in made:
            storage.resize_(0)
        return {"wanted_bytes": wanted, "reserved_bytes": taken}

    def cycled(sizes: list[int]) -> dict[str, Any]:
        made, draw = empties(2 * options["count"]), random.Random(0)
        filled: list[Any] = []
        calls, seconds, most = _cuda.memory_stats().get("num_device_alloc", 0), 0.0, 0
        before = _cuda.memory_reserved()
        for _ in range(options["cycles"]):
            began = time.perf_counter()
            if len(filled) == options["count"]:
                gone = filled.pop(draw.randrange(len(filled)))
                gone.resize_(0)
                made.append(gone)
            storage = made.pop(draw.randrange(len(made)))
            fill(storage, draw.choice(sizes))
            seconds += time.perf_counter() - began
            filled.append(storage)
            most = max(most, sum(each.nbytes() for each in filled))
        taken, calls = _cuda.memory_reserved() - before, _cuda.memory_stats().get("num_device_alloc", 0) - calls
        for storage in filled:
            storage.resize_(0)
        once_us = 1e6 * seconds / options["cycles"]
        return {"most_bytes": most, "more_reserved_bytes": taken, "device_allocs": calls, "microseconds": once_us}

    def streams(recorded: bool) -> dict[str, Any]:
        """A block that a second stream still writes is given up: which stream gets it next, and does the host wait?"""
        first, second = empties(2)
        fill(first, options["nbytes"])
        side, address = _cuda.Stream(place.device), first.data_ptr()
        view = torch.empty(0, dtype=torch.uint8, device=place.device).set_(first)
        with _cuda.stream(side):  # kernels are loaded when they are first used, which waits for the device
            _cuda._sleep(1)
            view.fill_(0)
        place.sync()
        side.wait_stream(_cuda.current_stream())
        with _cuda.stream(side):
            _cuda._sleep(options["sleep_cycles"])
            view.fill_(1)
        if recorded:
            view.record_stream(side)
        began = time.perf_counter()
        first.resize_(0)
        fill(second, options["nbytes"])
        took_us, over = 1e6 * (time.perf_counter() - began), side.query()
        reused = second.data_ptr() == address
        place.sync()
        second.resize_(0)
        return {"reused_while_written": reused and not over, "host_waited": over, "microseconds": took_us}

    def views() -> dict[str, Any]:
        """Do views that were made before follow the storage to another block?"""
        first, second = empties(2)
        fill(first, options["nbytes"])
        view, address = torch.empty(0, dtype=torch.uint8, device=place.device).set_(first), first.data_ptr()
        first.resize_(0)
        fill(second, options["nbytes"])  # takes the block
        fill(first, options["nbytes"])
        follows = view.data_ptr() == first.data_ptr()
        view.fill_(7)
        right = bool((torch.empty(0, dtype=torch.uint8, device=place.device).set_(first) == 7).all())
        return {"other_block": first.data_ptr() != address, "follows": follows, "right": right}

    asked: dict[str, Callable[[], dict[str, Any]]] = {
        "exact": exact,
        "one_size": lambda: cycled([options["nbytes"]]),
        "four_sizes": lambda: cycled([options["nbytes"] // part for part in (1, 2, 3, 5)]),
        "streams": lambda: streams(False),
        "streams_recorded": lambda: streams(True),
        "views": views,
    }
    found: dict[str, Any] = {}
    for name, ask in asked.items():
        try:
            found[name] = ask()
        except (RuntimeError, AttributeError, TypeError) as error:  # the other answers are worth having
            found[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    said = "; ".join(
        f"{name}: " + ", ".join(f"{key} {value}" for key, value in each.items()) for name, each in found.items()
    )
    return {"kind": "probe", **found, "outcome": said}


# Tests ----------------------------------------------------------------------------------------------------------------


def tests(options: dict[str, Any], place: Place) -> Row:
    """Runs the tests of ``options["all"]`` that failed last, if the folder has pytest's cache of that run, and then those of
    ``options["tests"]``, with ``options["flags"]``.

    Each is interrupted, not ended, when the time is over: pytest then says what has failed so far, and keeps it.
    """
    cache = place.folder / "pytest_cache"
    last = cache / "v" / "cache" / "lastfailed"
    until = time.monotonic() + options["seconds"]
    what = [options["tests"]]
    if last.exists() and json.loads(last.read_text(encoding="utf-8")):
        what.insert(0, ["--lf", *options["all"]])
    said = []
    for arguments in what:
        left_s = until - time.monotonic()
        if left_s < 1:
            break
        command = [
            sys.executable, str(Path(__file__).with_name("lifetime.py")), str(os.getpid()), str(int(left_s) + 30),
            sys.executable, "-m", "pytest", "-q", "--tb=short", "-o", f"cache_dir={cache}", *options["flags"], *arguments,
        ]  # fmt: skip
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            timer = threading.Timer(left_s, run.send_signal, [signal.SIGINT])
            timer.start()
            text = run.communicate()[0]
            timer.cancel()
        print(text, flush=True)
        counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped|xfailed)", text[-400:])
        said.append(f"{' '.join(arguments)}: {', '.join(counts) or 'nothing counted'}")
    failed = json.loads(last.read_text(encoding="utf-8")) if last.exists() else {}
    return {"kind": "tests", "failed": sorted(failed), "outcome": "; ".join(said)}
