"""Predictions of `elixir.runtimes` for FSDP2, DeepSpeed and DDP, next to what an H200 measured of them.

    python benchmark/peer_runtimes.py            all rows of peers in results/gpu_proof_h200.jsonl; needs no GPU
    python benchmark/peer_runtimes.py --gloo     FSDP2 on two ranks of this CPU, bytes by accounting

The first replaces ``results/peer_runtimes.csv``, the second ``results/fsdp2_peaks.csv``. Rows of
``super_offload``, which steps by another rule, are left out.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from benchmark.common import RESULTS, Row, conditions, print_table
from benchmark.cpu_peaks import build_case
from benchmark.observe import observe
from benchmark.proof.models import micro_batches, on_meta
from elixir.cli.trial import quiet_profiler
from elixir.hardware.profile import HardwareProfile, preset
from elixir.kernels.model.fused_kernels import PLAIN, PROVIDERS
from elixir.models.layer_units import layer_units
from elixir.runtimes import Setting, Work, ddp, predict
from elixir.search.simulator.rates import Rates
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step

PEAK_PERCENT, SECONDS_PERCENT = 5.0, 35.0
"""The most by which a predicted peak, or second, may be off."""
FAMILIES = ("opt", "gpt2", "llama", "bert", "t5", "mixtral")
RUNS = 3
"""The least of so many observations counts: threads of gloo free their copies late."""
_CHUNKED = {**dict.fromkeys(PROVIDERS, PLAIN), "cross_entropy": "elixir"}
_HARDWARE = RESULTS / "hardware_h200.json"


def train(model: nn.Module, inp: dict[str, Any]) -> None:
    """The step of the rows: the output is let go before backward."""
    loss = model(**inp).loss
    loss.backward()


def train_under_autocast(model: nn.Module, inp: dict[str, Any]) -> None:
    """The same over float32 weights."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(**inp).loss
    loss.backward()


def peer_rows(rows: list[Row]) -> list[Row]:
    """The rows of peers that ran to their end, each case and contender once; those of ``super_offload`` left out."""
    found = {
        (row["case"], row["contender"]): row
        for row in rows
        if row.get("kind") in ("fsdp2", "deepspeed", "ddp")
        and row["status"] == "ok"
        and "super-offload" not in row["contender"]
    }
    return list(found.values())


@functools.cache
def _trace(
    model: str, batch: int, seq: int, checkpoint: str, precision: str, autocast: bool, chunked: bool
) -> StepTrace:
    built = on_meta({"model": model, "checkpoint": checkpoint})
    inp = micro_batches(built, {"batch": batch, "seq": seq}, batch, "cpu")[0]
    return trace_step(
        built,
        inp,
        train_under_autocast if autocast else train,
        dtype=torch.bfloat16 if precision == "bf16" and not autocast else torch.float32,
        hardware=HardwareProfile.load(_HARDWARE),
        optimizer="AdamW",
        optimizer_kernel="fused",
        use_fused_kernels=_CHUNKED if chunked else False,
    )


def compared(row: Row) -> Row:
    """A measured row of a peer next to its prediction."""
    hardware = HardwareProfile.load(_HARDWARE)
    checkpointed = row["part"] == "offload" or "checkpointed" in row["case"]
    chunked, whole = row.get("loss_form") == "chunked", row["kind"] == "ddp"
    trace = _trace(
        row["model"], row["micro"], row["seq"], "non-reentrant" if checkpointed else "none", row["precision"],
        whole and row["precision"] == "bf16", chunked,
    )  # fmt: skip
    dtype = "bfloat16" if row["precision"] == "bf16" else "float32"
    work = Work(trace, hardware, 1, [float(each) for each in Rates(hardware, dtype, 1, 1).accesses_s(trace)])
    setting = Setting(
        runtime=row["kind"],
        micro=row["micro"],
        accumulation=row["batch"] // row["micro"],
        checkpoint=checkpointed,
        offload="offload" in row["contender"],
        keep=bool(row.get("keep")),
        stage=row.get("stage") or 0,
        weights_offload=row.get("stage") == 3,
        ratio=row.get("ratio") or 1.0,
    )
    made = ddp.predict(work, setting, as_views=True) if whole else predict(work, setting)
    return {
        "case": row["case"],
        "contender": row["contender"],
        "measured_bytes": row["max_allocated_bytes"],
        "predicted_bytes": made.device_bytes,
        "device_percent": round(100 * (made.device_bytes / row["max_allocated_bytes"] - 1), 2),
        "measured_s": round(row["p50_s"], 3),
        "predicted_s": round(made.step_s, 3),
        "seconds_percent": round(100 * (made.step_s / row["p50_s"] - 1), 1),
    }


def observed_peak(family: str, *, keep: bool, checkpoint: str = "none", accumulation: int = 1) -> int:
    """Bytes of one step of FSDP2 on this rank: what it holds before, and the most that it allocates on top."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, inp = build_case(family, checkpoint, torch.float32, 0.0)
    for layer in list(layer_units(model)):
        fully_shard(layer, reshard_after_forward=not keep)
    fully_shard(model, reshard_after_forward=not keep)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        for left in reversed(range(accumulation)):
            model.set_requires_gradient_sync(not left)  # as accelerate and Trainer do
            train(model, inp)
        optimizer.step()

    peaks = []
    for number in range(RUNS + 1):
        with quiet_profiler():
            peaks += [observe(step).peak_bytes] if number else []
        if not number:
            step()
        optimizer.zero_grad()
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    inputs = sum(each.nbytes for each in (*inp.values(), *model.buffers()))
    return min(peaks) + 12 * local + inputs


def predicted_peak(family: str, world_size: int, *, keep: bool, checkpoint: str = "none", accumulation: int = 1) -> int:
    """The prediction for `observed_peak`."""
    model, inp = build_case(family, checkpoint, torch.float32, 0.0)
    trace = trace_step(model, inp, train, hardware=preset("cpu"), optimizer=None)
    work = Work(trace, preset("cpu"), world_size, [0.0] * len(trace.accesses))
    return predict(work, Setting(runtime="fsdp2", keep=keep, accumulation=accumulation)).device_bytes


def gloo_rank(rank: int, world_size: int, families: tuple[str, ...]) -> dict[str, int]:
    """The observed peaks on one of two ranks, by family and whether weights are kept."""
    return {f"{family} {keep}": observed_peak(family, keep=keep) for family in families for keep in (False, True)}


def _gloo_rows() -> list[Row]:
    from tests.common.spawn import run_ranks

    found: dict[str, int] = {}
    for family in FAMILIES:
        found |= run_ranks(2, gloo_rank, (family,))[0]
    rows = []
    for key, observed in found.items():
        family, keep = key.split(" ")
        made = predicted_peak(family, 2, keep=keep == "True")
        percent = round(100 * (made / observed - 1), 3)
        rows.append(
            {"family": family, "keep": keep, "observed_bytes": observed, "predicted_bytes": made, "percent": percent}
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--no-record", action="store_true", help="print only")
    args = parser.parse_args()
    if args.gloo:
        name, rows = "fsdp2_peaks", _gloo_rows()
    else:
        measured = [json.loads(line) for line in (RESULTS / "gpu_proof_h200.jsonl").read_text().splitlines()]
        name, rows = "peer_runtimes", [compared(row) for row in peer_rows(measured)]
    columns = [column for column in rows[0] if column != "case"]
    print_table("predicted and measured", columns, ([row[column] for column in columns] for row in rows))
    if not args.no_record:
        rows = [{**row, **conditions()} for row in rows]
        with (RESULTS / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
