"""Where the proof runs: a CUDA device, or the CPU for a rehearsal. All calls that need CUDA are behind `Place.cuda`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmark.gpu_peaks import machine
from elixir.free_memory import free_device_bytes, free_host_bytes, total_host_bytes
from elixir.hardware import HardwareProfile, preset
from elixir.units import GIB

HOST_HEADROOM_BYTES = 8 * GIB
"""Left free of the host's memory: Python, torch's libraries, the CUDA context's host side, the weights' source. A guess,
not measured; too small ends in a killed process, too large in a smaller model."""
HARDWARE_FILE = "hardware.json"


@dataclasses.dataclass(frozen=True)
class Place:
    """The device of a job, and the folder that all jobs of a run share."""

    folder: Path
    rehearse: bool = False

    @property
    def cuda(self) -> bool:
        """Whether this is a real run."""
        return not self.rehearse

    @property
    def device(self) -> torch.device:
        """Where compute runs."""
        return torch.device("cuda", 0) if self.cuda else torch.device("cpu")

    def hardware(self) -> HardwareProfile:
        """What `links` measured in this folder; else the preset of the GPU at hand, or of a CPU."""
        measured = self.folder / HARDWARE_FILE
        if measured.exists():
            return HardwareProfile.load(measured)
        return machine() if self.cuda else preset("cpu")

    def prepare(self) -> None:
        """Before anything else in a job's process."""
        if self.cuda:
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
        """What this process could still allocate there."""
        return free_device_bytes(self.device)

    def free_host_bytes(self) -> int:
        """What may be planned with."""
        return max(free_host_bytes() - (HOST_HEADROOM_BYTES if self.cuda else 0), 0)

    def limit_reserved(self, budget_bytes: int | None) -> None:
        """The caching allocator fails beyond so much reserved memory. A rehearsal has no allocator to limit."""
        if budget_bytes is not None and self.cuda:
            torch.cuda.set_per_process_memory_fraction(min(budget_bytes / self.total_device_bytes(), 1.0), 0)

    def sync(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def reset_peaks(self) -> None:
        """What `peaks` says begins now."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, int]:
        """The allocator's peaks since `reset_peaks`, bytes; empty in a rehearsal."""
        if not self.cuda:
            return {}
        torch.cuda.synchronize()
        return {
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
        """What a row says of the machine, beside `benchmark.common.conditions`."""
        found: dict[str, Any] = {"host_total_bytes": total_host_bytes(), "rehearsal": self.rehearse}
        if self.cuda:
            found |= {
                "device": torch.cuda.get_device_name(0),
                "device_total_bytes": self.total_device_bytes(),
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
            }
        return found


def _be_killed_first() -> None:
    """Where the host runs out of memory, the kernel is to take this process and not the one that keeps the results."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
