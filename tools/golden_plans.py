"""Hashes of 40 plans and traces, so that a change of the code's shape shows that it changed no outcome.

    python tools/golden_plans.py            compares with benchmark/results/golden_plans.json; status 1 if any differs
    python tools/golden_plans.py --write    records them anew; a commit that does so says why

A case is a command line of `elixir` with its JSON output. Before hashing, fingerprints, versions, dates and the time a trace took are left out,
fields are mapped to those of `FORMER`, and floats are rounded to ten digits, since libraries may sum in another order.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from elixir.cli import main as elixir
from elixir.tracer.device import cpu_target

GOLDEN = Path(__file__).parent.parent / "benchmark" / "results" / "golden_plans.json"

LEFT_OUT = ("fingerprint", "schema_version", "version", "created", "date", "torch", "trace_s", "read_budgets", "units")
"""A field whose name contains one of these says who made the file, when, from what and how quickly, not what was
planned."""

FORMER: dict[str, Callable[[Any], dict[str, Any]]] = {
    "grad_access": lambda access: {"grad_event": access},
    "reduce_order": lambda order: {"grad_rank": order},
    "update": lambda update: {"speculates": update == "early", "steps_in_backward": False},
    "may_update_early": lambda wish: {"may_speculate": wish, "may_step_in_backward": False},
    "new_states": lambda amount: {"undo": amount},
    "matrices": lambda _: {},
    "frozen_weights": lambda place: {} if place == "host" else {"frozen_weights": place},
    "weight_files": lambda files: {"weight_files": files} if files else {},
    "forward": lambda seconds: {} if seconds is False else {"forward": seconds},
    "generate": lambda tokens: {} if tokens is None else {"generate": tokens},
    "replicas": lambda count: {},
    "pass_size": lambda size: {} if size == 1 else {"pass_size": size},
    "lora": lambda rank: {} if rank is None else {"lora": rank},
    "quantised": lambda form: {} if form is None else {"quantised": form},
    "moved_to_host_bytes": lambda amount: {"moved_to_host_bytes": amount} if amount else {},
    "kept_bytes": lambda _: {},
    "arriving_bytes": lambda _: {},
    "parts": lambda counts: {"parts": counts} if counts else {},
    "activation_bytes": lambda _: {},
    "reserve_bytes": lambda amount: {"reserve_bytes": amount} if amount else {},
    "must_be_free": lambda _: {},
    "what_to_write": lambda _: {},
    "packed": lambda documents: {} if documents is None else {"packed": documents},
    "activations": lambda units: {} if units == [] else {"activations": units},
}
"""Name of a field today -> the fields that said the same when the hashes were recorded."""

BIG = "--dtype bf16 --checkpoint non-reentrant"
CASES = (
    *(f"profile {model} --json {flags}" for model, flags in (
        ("opt-125m", "--device cpu --dtype fp32 --batch 2 --seq 64"),
        ("opt-13b", f"--device h200 --batch 8 --seq 1024 {BIG}"),
        ("gpt2-xl", "--device a100 --batch 4 --seq 512 --dtype bf16"),
        ("llama-3-8b", f"--device h100 --batch 1 --seq 2048 {BIG} --fused-kernels"),
        ("mixtral-8x7b", f"--device h200 --batch 1 --seq 512 {BIG}"),
        ("bert-base", "--device cpu --dtype fp32 --batch 2 --seq 64"),
        ("t5-base", "--device a100 --batch 2 --seq 128 --dtype bf16"),
        ("vit-base", "--device cpu --dtype fp32 --batch 2"),
        ("opt-1.3b", "--device rtx4090 --batch 2 --seq 256 --dtype fp16"),
        ("gpt2-medium", "--device h200 --batch 2 --seq 256 --dtype bf16 --checkpoint reentrant"),
    )),
    *(f"plan {model} --json {flags}" for model, flags in (
        ("opt-125m", "--hardware cpu --dtype fp32 --batch 2 --seq 64 --device-memory 1GiB --host-budget 8GiB"),
        ("opt-125m", "--hardware cpu --dtype fp32 --batch 2 --seq 64 --device-memory 16GiB --host-budget 8GiB"),
        ("opt-1.3b", f"--hardware a100 --batch 4 --seq 1024 {BIG} --device-memory 8GiB --host-budget 64GiB"),
        ("opt-1.3b", f"--hardware a100 --batch 4 --seq 1024 {BIG} --device-memory 12GiB --host-budget 64GiB --world-size 4"),
        ("opt-1.3b", "--hardware rtx4090 --batch 2 --seq 512 --dtype fp16 --device-memory 20GiB --host-budget 64GiB"),
        ("opt-1.3b", f"--hardware a100 --batch 4 --seq 1024 {BIG} --device-memory 8GiB --host-budget 64GiB --no-overlap"),
        ("opt-1.3b", f"--hardware a100 --batch 4 --seq 1024 {BIG} --device-memory 8GiB --host-budget 64GiB --placement cpu"),
        ("opt-1.3b", f"--hardware a100 --batch 4 --seq 1024 {BIG} --device-memory 40GiB --host-budget 64GiB --placement cuda"),
        ("opt-1.3b", f"--hardware a100 --batch 4 --seq 1024 {BIG} --device-memory 8GiB --host-budget 64GiB --speculate"),
        ("opt-1.3b", f"--hardware a100 --batch 4 --seq 1024 {BIG} --device-memory 8GiB --host-budget 64GiB --moments 8bit"),
        ("opt-1.3b", f"--hardware a100 --batch 4 --seq 1024 {BIG} --device-memory 8GiB --host-budget 64GiB --moments bfloat16"),
        ("opt-1.3b", f"--hardware a100 --batch 4 --seq 1024 {BIG} --device-memory 8GiB --host-budget 12GiB --disk-memory 100GiB"),
        ("opt-6.7b", f"--hardware h100 --batch 4 --seq 1024 {BIG} --device-memory 40GiB --host-budget 128GiB"),
        ("opt-6.7b", f"--hardware h100 --batch 4 --seq 1024 {BIG} --device-memory 20GiB --host-budget 256GiB --world-size 2"),
        ("opt-13b", f"--hardware h200 --batch 8 --seq 1024 {BIG} --device-memory 130GiB --host-budget 128GiB"),
        ("opt-13b", f"--hardware h200 --batch 8 --seq 1024 {BIG} --device-memory 80GiB --host-budget 256GiB --speculate"),
        ("opt-30b", f"--hardware h200 --batch 4 --seq 1024 {BIG} --device-memory 120GiB --host-budget 512GiB"),
        ("opt-175b", f"--hardware h200 --batch 2 --seq 1024 {BIG} --device-memory 130GiB --host-budget 3000GiB --world-size 8"),
        ("gpt2-xl", f"--hardware a100 --batch 4 --seq 1024 {BIG} --device-memory 10GiB --host-budget 64GiB"),
        ("gpt2-4b", f"--hardware a100 --batch 4 --seq 1024 {BIG} --device-memory 20GiB --host-budget 128GiB"),
        ("gpt2-medium", "--hardware a100 --batch 4 --seq 512 --dtype bf16 --device-memory 8GiB --host-budget 32GiB --optimizer sgd"),
        ("gpt2-medium", "--hardware cpu --batch 1 --seq 128 --dtype fp32 --device-memory 3GiB --host-budget 32GiB"),
        ("llama-2-7b", f"--hardware h100 --batch 1 --seq 2048 {BIG} --device-memory 60GiB --host-budget 128GiB --world-size 2"),
        ("llama-3-8b", f"--hardware rtx4090 --batch 1 --seq 2048 {BIG} --device-memory 22GiB --host-budget 128GiB"),
        ("llama-3-8b", f"--hardware rtx4090 --batch 1 --seq 2048 {BIG} --device-memory 22GiB --host-budget 64GiB --moments 8bit"),
        ("llama-3-8b", f"--hardware h100 --batch 2 --seq 2048 {BIG} --device-memory 60GiB --host-budget 128GiB --fused-kernels"),
        ("mixtral-8x7b", f"--hardware h200 --batch 1 --seq 512 {BIG} --device-memory 120GiB --host-budget 1600GiB --world-size 8"),
        ("bert-large", "--hardware cpu --batch 2 --seq 64 --dtype fp32 --device-memory 2GiB --host-budget 16GiB"),
        ("t5-base", "--hardware a100 --batch 2 --seq 128 --dtype bf16 --device-memory 3GiB --host-budget 16GiB"),
        ("vit-large", "--hardware a100 --batch 4 --dtype bf16 --device-memory 3GiB --host-budget 16GiB"),
    )),
)  # fmt: skip


def normalised(value: Any) -> Any:
    """`value` without what says who made it, with the recorded names and rounded floats."""
    if isinstance(value, dict):
        former = [FORMER[key](item) for key, item in value.items() if key in FORMER]
        if "backward_peak_bytes" in value and not value.get("host_peak_bytes"):  # of a trace
            value = {key: item for key, item in value.items() if key != "host_peak_bytes"}
        kept = {key: item for key, item in value.items() if not (key in FORMER or any(w in key for w in LEFT_OUT))}
        return {key: normalised(item) for fields in (kept, *former) for key, item in fields.items()}
    if isinstance(value, list):
        return [normalised(item) for item in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def outcome(case: str) -> str:
    """The hash of what one command line gives, or the first words of its error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            # What is not known of a machine is no part of this comparison.
            status = elixir([*case.split(), *(["--assume", "nominal"] if case.startswith("plan ") else [])])
        except SystemExit as error:
            status = error.code
    if status:
        return f"status {status}: {err.getvalue().splitlines()[-1][:120]}"
    text = json.dumps(normalised(json.loads(out.getvalue())), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the hashes anew")
    parser.add_argument("--only", default="", help="cases that contain this text")
    args = parser.parse_args()
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    cpu_target.MAX_RUN_FLOPS = 0.0  # what kernels allocate differs between processors
    found = {case: outcome(case) for case in CASES if args.only in case}
    if args.write:
        GOLDEN.write_text(json.dumps({**golden, **found} if args.only else found, indent=1) + "\n")
        print(f"{len(found)} outcomes recorded in {GOLDEN}")
        return 0
    differing = [case for case, value in found.items() if golden.get(case) != value]
    for case in differing:
        print(f"differs: elixir {case}\n  recorded {golden.get(case)}\n  now      {found[case]}")
    print(f"{len(found) - len(differing)} of {len(found)} outcomes are as recorded")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
