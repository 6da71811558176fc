"""`Estimate`: the memory that one training step takes on a device, with a margin from measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from elixir.hardware.memory import CONTEXT_AND_KERNELS_BYTES, NCCL_BYTES
from elixir.step_trace import CurveSample, Kind, StepTrace, holders_text
from elixir.units import format_bytes, parse_bytes

ERROR_SHARE = 0.013
"""By how much the allocated peak was above the predicted one at most, over 38 cases measured on an H200 (mean 0.13 %;
part ``memory`` of benchmark/results/gpu_proof_h200.jsonl)."""
HOLDERS = 3


def with_margin(peak_bytes: int, device_kind: str = "cuda", ranks: int = 1) -> int:
    """Device memory that a predicted peak needs for sure."""
    return round(peak_bytes * (1 + ERROR_SHARE)) + _libraries_bytes(device_kind, ranks)


def without_margin(device_bytes: int, device_kind: str = "cuda", ranks: int = 1) -> int:
    """The largest predicted peak that so much device memory is enough for."""
    return max(int((device_bytes - _libraries_bytes(device_kind, ranks)) / (1 + ERROR_SHARE)), 1)


def _libraries_bytes(device_kind: str, ranks: int) -> int:
    return 0 if device_kind != "cuda" else CONTEXT_AND_KERNELS_BYTES + (NCCL_BYTES if ranks > 1 else 0)


@dataclass(frozen=True)
class Estimate:
    """One training step in plain PyTorch, its optimizer included.

    >>> estimate = elixir.estimate(model, batch, torch.optim.AdamW(model.parameters()))  # doctest: +SKIP
    >>> estimate.fits("24GiB")  # doctest: +SKIP
    True
    """

    trace: StepTrace
    """The step that it is of."""
    device_kind: str = "cuda"
    """``cuda`` or ``cpu``."""

    @property
    def peak_bytes(self) -> int:
        """Highest bytes of tensors of the whole step."""
        return self.trace.step_peak_bytes

    @property
    def needed_bytes(self) -> int:
        """Device memory with which the step runs for sure: `peak_bytes`, what measurements were above it at most, and
        on CUDA the context and its kernels."""
        return with_margin(self.peak_bytes, self.device_kind)

    @property
    def _highest(self) -> CurveSample:
        return max(self.trace.curve, key=lambda sample: sample.total)

    @property
    def when(self) -> str:
        """The phase of the peak: ``forward``, ``recompute``, ``backward`` or ``optimizer``."""
        return self._highest.phase

    @property
    def where(self) -> str:
        """The operator that runs then, and its module; of forward and backward."""
        if self.when == "optimizer":
            return self.trace.optimizer
        return f"{self.trace.peak_operator} in {self.trace.peak_module or self.trace.model_name}"

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by kind at the peak."""
        return {kind: getattr(self._highest, kind) for kind in get_args(Kind)}

    def fits(self, memory: str | int) -> bool:
        """Whether the step runs for sure on a device with so much memory, such as ``"24GiB"``."""
        return self.needed_bytes <= parse_bytes(memory)

    def __str__(self) -> str:
        """Peak, when and where, what it is made of, and what a device must have."""
        parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.parts.items() if size)
        context = (
            f" and {format_bytes(CONTEXT_AND_KERNELS_BYTES)} of CUDA's context and kernels"
            if self.device_kind == "cuda"
            else ""
        )
        held = holders_text(self.trace, HOLDERS)
        lines = [
            f"{self.trace.model_name}, {self.trace.dtype}, {self.trace.optimizer}, on {self.trace.device}: one step "
            f"takes {format_bytes(self.peak_bytes)}",
            f"  peak    in {self.when}, at {self.where}",
            f"  parts   {parts}",
            f"  needs   {format_bytes(self.needed_bytes)} of a device: the peak, {100 * ERROR_SHARE:.1f} % more, as "
            f"the worst measured case was{context}",
            *([f"  largest {held}"] if held else []),
        ]
        return "\n".join(lines)
