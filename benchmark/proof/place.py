"""The place where the proof runs: a CUDA device, or the CPU for a rehearsal. All calls that need CUDA are in `Place.cuda`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmark.gpu_peaks import machine
from elixir.hardware.memory import free_device_bytes, free_host_bytes, total_host_bytes
from elixir.hardware.profile import HardwareProfile, preset
from elixir.units import GIB

HOST_HEADROOM_BYTES = 8 * GIB
"""Left free of the host's memory: Python, torch's libraries, the CUDA context's host side, the weights' source. A
guess, not measured; too small ends in a killed process, too large in a smaller model."""
HARDWARE_FILE = "hardware.json"
ALLOCATOR, ALLOCATOR_OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"
"""Near a limit on reserved memory, segments of fixed size make the allocator free and ask again in every step."""
SETTINGS = {
    # CPU Adam as users have it; its code is there before the first step ends, so that none of the timed ones differ.
    "ELIXIR_COMPILE": "wait",
    "HF_HUB_OFFLINE": "1",
    "NCCL_SOCKET_IFNAME": "lo",  # one rank needs no network, and a machine without one may resolve no name
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Every worker's environment, unless it says otherwise; rows tell what they were."""
QUIET_S = 30.0
"""How long a job waits at most for the next worker to have loaded its libraries, before it takes times."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The device of a job, and the folder that all jobs of a run share."""

    folder: Path
    rehearse: bool = False
    host_bytes: int | None = None
    """Host memory that jobs may plan with, where the user says; None for what the system says is free."""
    carried: Path | None = None
    """The folder of plans that were made beforehand, see `benchmark.proof.carried`."""
    next_ready: Path | None = None
    """Exists once the worker of the next job has loaded its libraries; None if none is being started."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        paths = {name: None if path is None else str(path.resolve()) for name, path in self._paths().items()}
        return {**dataclasses.asdict(self), **paths}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Place:
        """The inverse of `to_dict`."""
        paths = {name: None if values[name] is None else Path(values[name]) for name in ("carried", "next_ready")}
        return cls(**{**values, "folder": Path(values["folder"]), **paths})

    def _paths(self) -> dict[str, Path | None]:
        return {"folder": self.folder, "carried": self.carried, "next_ready": self.next_ready}

    @property
    def cuda(self) -> bool:
        """Whether this is a real run."""
        return not self.rehearse

    @property
    def device(self) -> torch.device:
        """The device on which compute runs."""
        return torch.device("cuda", 0) if self.cuda else torch.device("cpu")

    def hardware(self) -> HardwareProfile:
        """The profile that `links` measured in this folder; otherwise the preset of the GPU at hand, or of a CPU."""
        measured = self.folder / HARDWARE_FILE
        if measured.exists():
            return HardwareProfile.load(measured)
        return machine() if self.cuda else preset("cpu")

    def prepare(self, *, expandable_segments: bool = False) -> None:
        """Prepares a job's process; runs before anything else in it.

        Args:
            expandable_segments: of the allocator, unless the environment says what it is to do.
        """
        if self.cuda:
            if expandable_segments and ALLOCATOR not in os.environ and ALLOCATOR_OLD not in os.environ:
                set_allocator(EXPANDABLE)
            torch.cuda.set_device(0)
            torch.cuda.init()
            torch.set_float32_matmul_precision("high")  # what everybody who trains in float32 switches on
        _be_killed_first()

    def total_device_bytes(self) -> int:
        """Memory of the device; in a rehearsal of the host."""
        if self.cuda:
            return int(torch.cuda.get_device_properties(0).total_memory)
        return total_host_bytes()

    def free_device_bytes(self) -> int:
        """Bytes that this process could still allocate there."""
        return free_device_bytes(self.device)

    def free_host_bytes(self) -> int:
        """Memory that plans may use."""
        if self.host_bytes is not None:
            return self.host_bytes
        return max(free_host_bytes() - (HOST_HEADROOM_BYTES if self.cuda else 0), 0)

    def limit_reserved(self, budget_bytes: int | None) -> None:
        """The caching allocator fails beyond so much reserved memory. A rehearsal has no allocator to limit."""
        if budget_bytes is not None and self.cuda:
            torch.cuda.set_per_process_memory_fraction(min(budget_bytes / self.total_device_bytes(), 1.0), 0)

    def wait_until_quiet(self) -> None:
        """Waits before times are taken: the next worker, which is started ahead, loads its libraries on a core of this
        machine."""
        until = time.monotonic() + QUIET_S
        while self.next_ready is not None and not self.next_ready.exists() and time.monotonic() < until:
            time.sleep(0.05)

    def sync(self) -> None:
        """Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def reset_peaks(self) -> None:
        """Begins anew to count what `peaks` reports."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_accumulated_memory_stats()

    def peaks(self) -> dict[str, int]:
        """The allocator's peaks since `reset_peaks`, bytes, and how often it was short; empty in a rehearsal.

        Where it was short it has freed what it kept and asked the driver again, which is slow and no error.
        """
        if not self.cuda:
            return {}
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        return {
            "num_alloc_retries": int(stats.get("num_alloc_retries", 0)),
            "num_ooms": int(stats.get("num_ooms", 0)),
            "max_allocated_bytes": torch.cuda.max_memory_allocated(),
            "max_reserved_bytes": torch.cuda.max_memory_reserved(),
        }

    def mark(self) -> Any:
        """A moment on the device's main stream."""
        if not self.cuda:
            return time.perf_counter()
        cuda: Any = torch.cuda
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_s(self, earlier: Any, later: Any) -> float:
        """Seconds between two marks; waits for the later one."""
        if not self.cuda:
            return float(later - earlier)
        later.synchronize()
        return float(earlier.elapsed_time(later)) / 1e3

    def facts(self) -> dict[str, Any]:
        """Columns of a row for the machine and settings, in addition to `benchmark.common.conditions`."""
        found: dict[str, Any] = {
            "host_total_bytes": total_host_bytes(),
            "host_given_bytes": self.host_bytes,
            "rehearsal": self.rehearse,
            "settings": {
                name: os.environ[name] for name in (*SETTINGS, ALLOCATOR, ALLOCATOR_OLD) if name in os.environ
            },
        }
        if self.cuda:
            found |= {
                "device": torch.cuda.get_device_name(0),
                "device_total_bytes": self.total_device_bytes(),
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
            }
        return found

    def grown(self) -> dict[str, int]:
        """The part of `facts` that a job may have changed: some machines get their memory only once it is touched."""
        return {"host_total_bytes": total_host_bytes()}


def set_allocator(settings: str) -> None:
    """Applies `ALLOCATOR` of the environment, for a process that has loaded torch already and no device yet.

    PyTorch reads the variable at the first use of a device, and some builds of it earlier; so it is told as well, by
    the name that `torch.cuda.memory._set_allocator_settings` stands for.
    """
    os.environ[ALLOCATOR] = settings
    tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if tell is not None:
        tell(settings)


def _be_killed_first() -> None:
    """Asks the kernel to kill this process, not the one that keeps the results, if host memory runs out."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
