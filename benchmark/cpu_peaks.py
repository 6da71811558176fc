"""Predicted memory of a step on the CPU against a real step, every family, checkpointing, dtype and dropout.

    python benchmark/cpu_peaks.py [--quick] [--families opt t5] [--no-record]

The real step runs under torch.profiler, whose allocation events are summed up; the prediction is a trace for target
``cpu``. Both count what is allocated from the start of forward on. Appends one row per case to
``results/cpu_peaks.csv``, and whole steps with AdamW to ``results/cpu_optimizer.csv``.

In bf16 oneDNN's matrix products take scratchpads through PyTorch's allocator, of a size that depends on the processor.
A case that misses `BAR_PERCENT` is therefore run once more with oneDNN switched off: if it then agrees, the scratchpad
was all there was to the difference. Fails if a case misses in any other way.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from benchmark.common import Row, append_rows, conditions, percentiles, print_table
from benchmark.observe import ObservedMemory, observe, observe_step
from benchmark.proof.memory import DROPOUTS
from elixir.cli.trial import quiet_profiler
from elixir.hardware.profile import preset
from elixir.models.loading import build
from elixir.models.model_shape import ModelShape, describe
from elixir.models.step import default_input, default_step
from elixir.step_trace import StepTrace
from elixir.tracer.device.target import OptimizerKernel
from elixir.tracer.trace import trace_step
from elixir.tracer.values.expert_choice import RecordedRouting, RoutingRecorder
from elixir.units import dtype_name

BAR_PERCENT = 0.2
BATCH, SEQUENCE = 4, 256
CHECKPOINTS: tuple[str, ...] = ("none", "reentrant", "non-reentrant")
DTYPES = (torch.float32, torch.bfloat16)
VOCABULARY = 4096
"""Vocabulary of every model: real ones are larger, and nothing but the logits would be left of a model of this
width."""

OPTIMIZER_KERNELS: tuple[OptimizerKernel, ...] = ("for-loop", "foreach", "fused")
OPTIMIZER_FAMILIES = ("opt", "llama")
OPTIMIZER_TOKENS = 32
"""Few enough that the optimizer's temporaries, if any, set the peak and not the activations."""

_LAYERS, _HIDDEN, _HEADS = 3, 256, 4
_SHAPES = {
    "opt": "opt-125m",
    "gpt2": "gpt2",
    "llama": "llama-2-7b",
    "bert": "bert-base",
    "vit": "vit-large",
    "t5": "t5-large",
    "mixtral": "mixtral-8x7b",
}
"""Family -> the model whose proportions (feed-forward over hidden, head width, experts) the case keeps."""


def shape_of(family: str, layers: int = _LAYERS, vocabulary: int = VOCABULARY) -> ModelShape:
    """A model of the family's proportions, small enough for a second on one core."""
    real = describe(_SHAPES[family])
    fewer: dict[str, Any] = {"patch_size": 14, "image_size": 224} if family == "vit" else {}
    return real.changed(
        name=f"{family} {layers}x{_HIDDEN}",
        layers=layers,
        hidden=_HIDDEN,
        heads=_HEADS,
        kv_heads=max(1, _HEADS * real.kv_heads // real.heads),
        ffn=_HIDDEN * real.ffn // real.hidden,
        vocabulary=real.vocabulary if family == "vit" else vocabulary,
        positions=real.positions if real.positions is None or family == "vit" else 512,
        **fewer,
    )


def build_case(
    family: str, checkpoint: str, dtype: torch.dtype, dropout: float, shape: ModelShape | None = None
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A real model with random weights, and its batch; `shape` replaces the family's."""
    torch.manual_seed(0)
    options = dict.fromkeys(DROPOUTS[family], dropout)
    model = build((shape or shape_of(family)).changed(**options), dtype=dtype, checkpoint=checkpoint, device="cpu")
    seq = None if family == "vit" else SEQUENCE
    return model, default_input(model, batch=BATCH, seq=seq)


def seeded_step(model: nn.Module, inp: dict[str, Any]) -> None:
    """The default step with the same dropout every time, on which expert choices depend."""
    torch.manual_seed(0)
    default_step(model, inp)


def recorded_routing(model: nn.Module, inp: dict[str, Any]) -> list[torch.Tensor]:
    """The expert choices of a real step."""
    with RoutingRecorder() as mode:
        seeded_step(model, inp)
    model.zero_grad(set_to_none=True)
    return mode.choices


def predict(
    model: nn.Module, inp: dict[str, Any], choices: list[torch.Tensor] | None = None, **options: Any
) -> StepTrace:
    """The trace for target ``cpu``."""
    routing = None if choices is None else RecordedRouting(choices)
    return trace_step(model, inp, seeded_step, hardware=preset("cpu"), routing=routing, **options)


def observe_without_onednn(model: nn.Module, inp: dict[str, Any]) -> ObservedMemory:
    """A real step with PyTorch's own matrix products, which are several times slower and take no scratchpads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about TF32 on GPUs of another maker
        with torch.backends.mkldnn.flags(enabled=False), quiet_profiler():
            observed = observe(lambda: seeded_step(model, inp))
    model.zero_grad(set_to_none=True)
    return observed


def percent(predicted: int, observed: int) -> float:
    """How far the prediction is above what was observed."""
    return round(100 * (predicted / observed - 1), 4)


def innermost(observed: ObservedMemory) -> str:
    """The chain of ATen operators at the peak."""
    return " > ".join(name for name in observed.peak_operators if name.startswith("aten::"))


def step_row(family: str, checkpoint: str, dtype: torch.dtype, dropout: float) -> Row:
    """One case: peak over what was there before the step, predicted and observed, and which sums are exact."""
    found_conditions = conditions()
    model, inp = build_case(family, checkpoint, dtype, dropout)
    choices = recorded_routing(model, inp) if family == "mixtral" else None
    trace = predict(model, inp, choices)
    same = trace == predict(model, inp, choices, cache=False)
    with quiet_profiler():
        observed = observe_step(model, inp, seeded_step)
    predicted = trace.backward_peak_bytes - trace.resting_bytes
    difference = percent(predicted, observed.peak_bytes)
    plain = observe_without_onednn(model, inp) if abs(difference) > BAR_PERCENT else None
    seeded_step(model, inp)
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return {
        "model": shape_of(family).name,
        "checkpoint": checkpoint,
        "dtype": dtype_name(dtype),
        "dropout": dropout,
        "batch": BATCH,
        "tokens_per_sample": inp["input_ids"].shape[1] if "input_ids" in inp else _patches(family) + 1,
        "predicted_bytes": predicted,
        "observed_bytes": observed.peak_bytes,
        "difference_bytes": predicted - observed.peak_bytes,
        "difference_percent": difference,
        "observed_without_onednn_bytes": plain.peak_bytes if plain else None,
        "difference_without_onednn_bytes": predicted - plain.peak_bytes if plain else None,
        "difference_without_onednn_percent": percent(predicted, plain.peak_bytes) if plain else None,
        "predicted_peak_operator": trace.peak_operator,
        "observed_peak_operators": innermost(observed),
        "params_exact": trace.param_bytes == sum(p.nbytes for p in model.parameters()),
        "grads_exact": trace.grad_bytes == gradients,
        "same_without_cache": same,
        **found_conditions,
    }


def _patches(family: str) -> int:
    shape = shape_of(family)
    return (shape.positions or 1) - 1


def optimizer_row(family: str, dtype: torch.dtype, kernel: OptimizerKernel) -> Row:
    """One whole step with AdamW, its states being there already: peak over what was there before the step."""
    found_conditions = conditions()
    model, inp = build_case(family, "none", dtype, 0.0)
    inp = {key: value[:1, :OPTIMIZER_TOKENS] for key, value in inp.items()}
    trace = predict(model, inp, optimizer="AdamW", optimizer_kernel=kernel)
    options = {"fused": True} if kernel == "fused" else {"foreach": kernel == "foreach"}
    optimizer = torch.optim.AdamW(model.parameters(), **options)

    def step() -> None:
        seeded_step(model, inp)
        optimizer.step()

    for _ in range(2):
        step()
        model.zero_grad(set_to_none=True)
    with quiet_profiler():
        observed = observe(step)  # the gradients stay for what follows
        phase = observe(optimizer.step)
    states = sum(state.nbytes for values in optimizer.state.values() for state in values.values())
    predicted = trace.step_peak_bytes - trace.resting_bytes - trace.optimizer_bytes
    highest = max(sample.total for sample in trace.curve if sample.phase == "optimizer")
    predicted_phase = highest - trace.resting_bytes - trace.optimizer_bytes - trace.grad_bytes
    return {
        "model": shape_of(family).name,
        "dtype": dtype_name(dtype),
        "optimizer": f"AdamW ({kernel})",
        "tokens": OPTIMIZER_TOKENS,
        "predicted_bytes": predicted,
        "observed_bytes": observed.peak_bytes,
        "difference_bytes": predicted - observed.peak_bytes,
        "difference_percent": percent(predicted, observed.peak_bytes),
        "observed_peak_operators": innermost(observed),
        "predicted_temporaries_bytes": predicted_phase,
        "observed_temporaries_bytes": phase.peak_bytes,
        "predicted_state_bytes": trace.optimizer_bytes,
        "observed_state_bytes": states,
        "states_exact": trace.optimizer_bytes == states,
        **found_conditions,
    }


def passes(row: Row) -> bool:
    """Within the bar, or outside it for oneDNN's scratchpads alone; and all that must be exact is."""
    within = abs(row["difference_percent"]) <= BAR_PERCENT
    if not within and row.get("difference_without_onednn_percent") is not None:
        within = abs(row["difference_without_onednn_percent"]) <= BAR_PERCENT
    exact = [row[key] for key in ("params_exact", "grads_exact", "same_without_cache", "states_exact") if key in row]
    return within and all(exact)


def run_steps(families: list[str], quick: bool) -> list[Row]:
    """All cases of forward and backward; `quick` leaves out bf16 and steps without dropout."""
    dtypes, dropouts = (DTYPES[:1], (0.1,)) if quick else (DTYPES, (0.0, 0.1))
    rows = []
    for family, dtype, checkpoint, dropout in itertools.product(families, dtypes, CHECKPOINTS, dropouts):
        started = time.perf_counter()
        row = step_row(family, checkpoint, dtype, dropout)
        rows.append(row)
        note = ""
        if row["observed_without_onednn_bytes"] is not None:
            note = f"; {row['difference_without_onednn_bytes']:+d} bytes without oneDNN"
        print(
            f"{row['model']:14} {row['checkpoint']:13} {row['dtype']:8} dropout {dropout}: {row['observed_bytes']:>11} "
            f"observed, predicted {row['difference_bytes']:+d} bytes, {row['difference_percent']:+.4f} %{note} "
            f"({time.perf_counter() - started:.1f} s)",
            flush=True,
        )
    return rows


def run_optimizers(families: list[str], quick: bool) -> list[Row]:
    """Whole steps with every kernel of AdamW."""
    chosen = [family for family in OPTIMIZER_FAMILIES if family in families]
    cases = itertools.product(chosen, DTYPES[:1] if quick else DTYPES, OPTIMIZER_KERNELS)
    return [optimizer_row(*case) for case in cases]


def report(steps: list[Row], optimizers: list[Row]) -> int:
    """Prints both summaries; 1 if any case fails."""
    summary = []
    for dtype in dict.fromkeys(row["dtype"] for row in steps):
        for label, key in (("", "difference_percent"), (", oneDNN off", "difference_without_onednn_percent")):
            sizes = [abs(row[key]) for row in steps if row["dtype"] == dtype and row[key] is not None]
            if sizes:
                p20, p50, p80 = percentiles(sizes)
                within = sum(size <= BAR_PERCENT for size in sizes)
                cells = (f"{value:.4f}" for value in (p20, p50, p80, max(sizes)))
                summary.append((f"{dtype}{label}", len(sizes), *cells, f"{within} of {len(sizes)}"))
    title = "distance of prediction and observation, percent of the observed peak"
    print_table(title, ("", "cases", "p20", "p50", "p80", "worst", f"within {BAR_PERCENT} %"), summary)
    if optimizers:
        columns = ("model", "dtype", "optimizer", "predicted_bytes", "observed_bytes", "difference_bytes")
        columns += ("predicted_temporaries_bytes", "observed_temporaries_bytes", "states_exact")
        print_table("a step with AdamW", columns, ([row[key] for key in columns] for row in optimizers))
    failed = [row for row in (*steps, *optimizers) if not passes(row)]
    for row in failed:
        print("not explained:", row)
    return 1 if failed else 0


def main() -> int:
    """Runs all cases, appends rows, summarises."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=list(_SHAPES), choices=list(_SHAPES))
    parser.add_argument("--quick", action="store_true", help="fp32 with dropout only")
    parser.add_argument("--no-record", action="store_true", help="append nothing to the results")
    arguments = parser.parse_args()
    steps = run_steps(arguments.families, arguments.quick)
    optimizers = run_optimizers(arguments.families, arguments.quick)
    if not arguments.no_record:
        append_rows("cpu_peaks", steps)
        if optimizers:
            append_rows("cpu_optimizer", optimizers)
    return report(steps, optimizers)


if __name__ == "__main__":
    sys.exit(main())
