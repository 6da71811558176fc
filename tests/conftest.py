"""Settings shared by all tests."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import shutil
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.common import stages

# Examples are drawn the same way on every run, and no example fails for being slow on a busy machine.
settings.register_profile(
    "elixir", deadline=None, derandomize=True, print_blob=False, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("elixir")

# Tests share the machine with each other, and their tensors are tiny: on a busy machine two threads that wait for each
# other in every operator took eight times as long as one.
torch.set_num_threads(1)


LAUNCH = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Variables by which torchrun tells a process which rank it is."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cuda",
        action="store_true",
        help="run parity tests and tests/gpu on CUDA; without a GPU, but with g++, on a device that is pretended",
    )
    parser.addoption("--write-costs", action="store_true", help="measure each test for tests/costs.json; without -n")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ran the tests in the background; some interrupt
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--write-costs"):
        config.pluginmanager.register(stages.Costs())
    if not config.getoption("--cuda"):
        return
    if not torch.cuda.is_available() and shutil.which("g++"):
        from tests.cuda_emulator import install

        install()
    from tests.common import gpu  # its marks look for a device

    gpu.DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage collection while everything is imported: it would look through all of that and free next to nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Every other process reads the files backwards: in a fresh clone each compiles half of them, for all."""
    report = yield
    if isinstance(collector, pytest.Directory) and int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 2:
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow most cases of tests that start ranks or carry the marker `sampled`: all but the first, with
    ``sampled(every=n)`` all but one in n. Then marks what ``make test`` leaves to ``make test-more``."""
    items.sort(key=lambda item: item.path)  # within a file they stay in order
    counts, turns = Counter[str](), dict[str, int]()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if not sampled and "distributed" not in item.path.parts:
            continue
        test = item.nodeid.partition("[")[0]
        left_out = counts[test] > 0
        if sampled and "every" in sampled.kwargs:
            # Along the diagonals of the parameters, so that every value of each stays.
            axes = [len(parameters.args[1]) for parameters in item.iter_markers("parametrize")]
            if axes:
                place = sum(map(int, np.unravel_index(counts[test], axes)))
            else:  # a fixture has the parameters: tests take turns, so that together they have every value
                place = counts[test] + turns.setdefault(test, len(turns))
            left_out = place % sampled.kwargs["every"] > 0
        if left_out:
            item.add_marker(pytest.mark.slow)
        counts[test] += 1
    stages.mark_later_stages(items)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """``make test`` does not import files of which no test is in the first stage."""
    asked = config.getoption("markexpr") == stages.FIRST_STAGE and not config.getoption("file_or_dir")
    return True if asked and collection_path in stages.later_files() else None


@pytest.fixture(autouse=True)
def no_launch_is_left() -> Iterator[None]:
    """Takes back what frameworks write into the environment about ranks: the next test's framework would believe it."""
    before = {name: os.environ.get(name) for name in LAUNCH}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def models_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Closes what a test has wrapped in its own thread, for a plan of one rank, and left open; that must not raise."""
    from elixir.wrapper import ElixirModule  # after `pytest_configure`: it looks for a device

    wrap, wrapped, thread = ElixirModule.__init__, weakref.WeakSet[ElixirModule](), threading.current_thread()

    @functools.wraps(wrap)
    def noted(self: ElixirModule, *args: Any, **options: Any) -> None:
        wrap(self, *args, **options)
        if threading.current_thread() is thread and self.plan.world_size == 1:
            wrapped.add(self)

    monkeypatch.setattr(ElixirModule, "__init__", noted)
    yield
    for module in wrapped:
        module.close()


@pytest.fixture(autouse=True)
def no_hooks_are_left() -> Iterator[None]:
    """Fails a test that leaves hooks for saved tensors on this thread, instead of one that comes later."""
    yield
    left = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        left.append(inspect.unwrap(hooks[0]))
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert not left


def pytest_collection_finish() -> None:
    """Takes what is imported out of garbage collection: millions of objects, through which Python and every test that
    calls ``gc.collect()`` would look again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # after the fixtures are gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drops what the tests of a file have imported."""
    if nextitem is None or nextitem.path != item.path:
        pytest_collection_finish()


@pytest.fixture
def fresh_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No wish in the environment, 48 classes per slice, so that a tiny vocabulary takes several."""
    from elixir.kernels.model import fused_kernels, linear_cross_entropy

    monkeypatch.delenv(fused_kernels.ENVIRONMENT, raising=False)
    monkeypatch.setattr(linear_cross_entropy, "SLICE_BYTES", 1)
    monkeypatch.setattr(linear_cross_entropy, "MIN_SLICE_COLUMNS", 48)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
