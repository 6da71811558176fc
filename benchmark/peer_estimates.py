"""Memory of a whole AdamW step on the CPU: observed, predicted by Elixir, and estimated by ``accelerate
estimate-memory``.

    python benchmark/peer_estimates.py [--families opt llama] [--no-record]
    python benchmark/peer_estimates.py --gpu [--no-record]      peaks of text models that an H200 measured; needs no GPU

accelerate is imported for its formula (`estimate_training_usage`, float32) and need not be a dependency. Its estimate
is for a batch of one and has no activations; the step that is observed has the batch of `benchmark/cpu_peaks.py`.
Appends one row per family to ``results/peer_estimates.csv``. With ``--gpu`` torch-preflight and torch-kitsune, where
they are installed, estimate the steps of part ``memory`` of the proof that have token ids, by their documented calls;
``results/peer_estimates_h200.csv`` has those rows. kitsune knows no activation checkpointing.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import io
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmark.common import RESULTS, Row, append_rows, conditions, print_table
from benchmark.cpu_peaks import BATCH, SEQUENCE, build_case, percent, predict, seeded_step, shape_of
from benchmark.observe import observe
from benchmark.proof.memory import MemoryCase, build, memory_cases
from elixir.cli.trial import quiet_profiler
from elixir.units import dtype_name

FAMILIES = ("opt", "gpt2", "llama", "bert", "t5")


def estimate_row(family: str) -> Row:
    """Bytes of one step with fused AdamW in float32: parameters, states, gradients, activations, temporaries."""
    import accelerate
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    found_conditions = conditions()
    model, inp = build_case(family, "none", torch.float32, 0.0)
    trace = predict(model, inp, optimizer="AdamW", optimizer_kernel="fused")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        seeded_step(model, inp)
        optimizer.step()

    for _ in range(2):
        step()
        model.zero_grad(set_to_none=True)
    with quiet_profiler():
        observed = trace.resting_bytes + trace.optimizer_bytes + observe(step).peak_bytes
    estimate = max(estimate_training_usage(calculate_maximum_sizes(model)[0], "float32").values())
    return {
        "model": shape_of(family).name,
        "dtype": dtype_name(torch.float32),
        "tokens": BATCH * SEQUENCE,
        "observed_bytes": observed,
        "elixir_bytes": trace.step_peak_bytes,
        "accelerate_bytes": int(estimate),
        "elixir_percent": percent(trace.step_peak_bytes, observed),
        "accelerate_percent": percent(int(estimate), observed),
        "accelerate": accelerate.__version__,
        **found_conditions,
    }


def _preflight(case: MemoryCase, model: Any) -> int | None:
    """The total of torch-preflight for a step; None without an answer."""
    if importlib.util.find_spec("torch_preflight") is None:
        return None
    from torch_preflight.vram.costmodel import estimate
    from torch_preflight.vram.guard import VRAMGuard
    from torch_preflight.vram.types import PrecisionMode

    pure = {torch.bfloat16: "PURE_BF16", torch.float16: "PURE_FP16", torch.float32: "FP32"}[case.dtype]
    guard = VRAMGuard(
        model,
        optimizer=torch.optim.AdamW(model.parameters()),
        batch_size=case.batch,
        seq_len=case.seq,
        precision=PrecisionMode["AMP" if case.autocast else pure].value,
        gradient_checkpointing=case.checkpoint != "none",
        flash_attention=True,
        verify=False,
    )
    return int(estimate(guard.profile, guard.config, None).total)


def _kitsune(case: MemoryCase, model: Any) -> int | None:
    """The total of torch-kitsune; None without an answer."""
    if importlib.util.find_spec("kitsune") is None or case.checkpoint != "none":
        return None
    from kitsune.predict import predict_memory

    return int(predict_memory(model, (case.seq,), case.batch, case.dtype, "adamw").total_bytes)


def gpu_rows() -> list[Row]:
    """Estimates of peers next to Elixir's prediction of that day, and the peak that was measured."""
    measured = map(json.loads, (RESULTS / "gpu_proof_h200.jsonl").read_text(encoding="utf-8").splitlines())
    known = {row["case"]: row for row in measured if row["part"] == "memory" and row["status"] == "ok"}
    rows = []
    for case in memory_cases():
        row = known.get(case.label)
        if row is None or case.seq is None or case.model.startswith(("t5", "mixtral")):
            continue
        if case.mask and not case.model.startswith("bert"):
            continue  # the peers know no masks
        peak = max(row["measured_step_bytes"], row["measured_backward_bytes"])
        ours = max(row["predicted_step_bytes"], row["predicted_backward_bytes"])
        found: dict[str, int | None] = {"elixir": ours}
        model, _ = build(case, "meta")
        for name, ask in (("preflight", _preflight), ("kitsune", _kitsune)):
            found[name] = None
            with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
                found[name] = ask(case, model)
        percents = {f"{name}_percent": None if each is None else percent(each, peak) for name, each in found.items()}
        rows.append({"case": case.label, "measured_bytes": peak, **percents})
    return rows


def _record_gpu_rows(*, record: bool) -> None:
    rows = gpu_rows()
    print_table("peak of one step on an H200", list(rows[0]), (list(row.values()) for row in rows))
    for name in ("elixir", "preflight", "kitsune"):
        errors = [abs(row[f"{name}_percent"]) for row in rows if row[f"{name}_percent"] is not None]
        if errors:
            print(f"{name}: {len(errors)} cases, mean error {statistics.mean(errors):.1f} %, worst {max(errors):.1f} %")
    if record:
        with (RESULTS / "peer_estimates_h200.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*rows[0], *conditions()], lineterminator="\n")
            writer.writeheader()
            writer.writerows({**row, **conditions()} for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--no-record", action="store_true", help="print only")
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    if args.gpu:
        _record_gpu_rows(record=not args.no_record)
        return 0
    rows = [estimate_row(family) for family in args.families]
    columns = ("model", "observed_bytes", "elixir_percent", "accelerate_percent")
    print_table("peak of one step", columns, ([row[column] for column in columns] for row in rows))
    if not args.no_record:
        append_rows("peer_estimates", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
