"""Adapters over weights that are larger than the memory allowed: frozen weights stay in their safetensors.

    python benchmark/frozen_files.py [--layers 40] [--allowed 1.5GiB] [--steps 4] [--no-record]

A Llama of random float32 weights with LoRA adapters (peft) is written to files. Three processes train it for some steps
on the CPU: plain PyTorch with all memory; Elixir with ``frozen_weights="files"`` where the process may use less memory
than the weights take; and Elixir with ``frozen_weights="host"`` under the same limit, which must fail, or the limit
would prove nothing. The limit is a control group (page cache counted, and given back by Linux when it is full) if one
can be made below the group of this process; otherwise ``RLIMIT_DATA``, which leaves the page cache out. The row says
which. Files are dropped from the page cache before each run. The model is wrapped from meta, names as in the files.

Appends to ``results/frozen_files.csv``; fails unless losses and adapters are those of plain PyTorch to the bit, bytes
read from the files are as planned, and the run on the host fails.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmark.common import append_rows, conditions, print_table
from elixir.hardware import preset
from elixir.hardware.control_groups import control_groups
from elixir.units import GIB, format_bytes, parse_bytes

ROOT = Path(__file__).resolve().parent.parent
BATCH, SEQUENCE, VOCABULARY = 1, 64, 4096
DEVICE_BYTES, HOST_BYTES = "320MiB", "320MiB"
"""Budgets of the plan; on a CPU both are memory of the process. The libraries take about half a GiB more."""
READ_BYTES_PER_S = 2e9
"""Rate of the disk that the plan is made with."""


def config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=VOCABULARY, attn_implementation="eager",
    )  # fmt: skip


def with_adapters(layers: int) -> Any:
    """The model on meta, with adapters."""
    with torch.device("meta"):
        base = LlamaForCausalLM(config(layers))
    return get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def write_files(folder: Path, layers: int) -> int:
    """Writes base weights under their own names, a file a layer, and adapters; returns the bytes of the base."""
    generator = torch.Generator().manual_seed(0)
    files: dict[str, dict[str, torch.Tensor]] = {}
    base_bytes = 0
    for name, parameter in with_adapters(layers).named_parameters():
        value = torch.randn(parameter.shape, generator=generator) * (0.02 if parameter.dim() > 1 else 0.0)
        value += parameter.dim() == 1
        if parameter.requires_grad:
            files.setdefault("adapters", {})[name] = value
            continue
        name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        part = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{part}", {})[name] = value
        base_bytes += value.nbytes
    for name, values in files.items():
        save_file(values, folder / f"{name}.safetensors")
    return base_bytes


def drop_cache(folder: Path) -> None:
    """Takes the files out of the page cache, once the drive has them."""
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def batches(steps: int) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def work(mode: str, folder: Path, layers: int, steps: int) -> dict[str, Any]:
    """Trains in this process; returns losses, adapters' file and counts."""
    torch.set_num_threads(1)
    model = with_adapters(layers)
    found: dict[str, Any] = {"losses": [], "seconds": []}
    if mode == "plain":
        stored = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
        names = {
            name: name.removeprefix("base_model.model.").replace(".base_layer.", ".") for name in model.state_dict()
        }
        model.load_state_dict({name: stored.get(name, stored.get(plain)) for name, plain in names.items()}, assign=True)
        with torch.no_grad():
            rotary = LlamaForCausalLM(config(1)).model.rotary_emb
        model.base_model.model.model.rotary_emb = rotary
        optimizer: Any = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        run, back = model, lambda loss: loss.backward()
    else:
        import elixir

        hardware = replace(
            preset("cpu"), disk_read_bytes_per_s=READ_BYTES_PER_S, disk_write_bytes_per_s=READ_BYTES_PER_S
        )
        adamw = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        budgets = {"device_memory": DEVICE_BYTES, "host_budget": HOST_BYTES if mode == "files" else "64GiB"}
        run, optimizer = elixir.wrap(
            model, adamw, inp=next(batches(1)), hardware=hardware, weights=folder, frozen_weights=mode, replan=False,
            **budgets,
        )  # fmt: skip
        back = optimizer.backward
    for batch in batches(steps):
        began_s = time.perf_counter()
        loss = run(**batch).loss
        back(loss)
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["seconds"].append(time.perf_counter() - began_s)
    if mode != "plain":
        report = run.last_report
        for name in ("disk_read", "loads", "host_peak", "device_buffers"):
            found[name] = report.observed.get(name, 0), report.predicted.get(name, 0)
        found["demand_loads"] = report.demand_loads
        run.settle()
    state = run.state_dict()
    adapters = {name: state[name].clone() for name in state if "lora_" in name}
    save_file(adapters, folder.parent / f"{mode}.safetensors")
    found["peak_anonymous_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


class Limit:
    """A limit on the memory of processes: a control group, or ``RLIMIT_DATA`` where none can be made."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.group = nbytes, None
        own = next((folder for folder, is_v2 in control_groups("memory") if folder.is_dir() and not is_v2), None)
        if own is not None:
            group = own / f"elixir_frozen_files_{os.getpid()}"
            try:
                group.mkdir()
                (group / "memory.limit_in_bytes").write_text(str(nbytes))
                self.group = group
            except OSError:
                if group.is_dir():
                    group.rmdir()
        self.kind = "control group" if self.group is not None else "RLIMIT_DATA"

    def __call__(self) -> None:
        """Puts this process under the limit; for a child before it runs."""
        if self.group is not None:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (self.nbytes, self.nbytes))

    def remove(self) -> None:
        if self.group is not None:
            self.group.rmdir()


def run_apart(mode: str, folder: Path, args: argparse.Namespace, limit: Limit | None) -> dict[str, Any] | None:
    """Runs `work` in another process; None if that failed."""
    drop_cache(folder)
    command = [
        sys.executable,
        __file__,
        "--work",
        mode,
        str(folder),
        "--layers",
        str(args.layers),
        "--steps",
        str(args.steps),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, preexec_fn=limit)
    if done.returncode:
        print(f"{mode}: ended with {done.returncode}; {(done.stderr.strip().splitlines() or ['no word'])[-1][:200]}")
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Writes the files, runs the three; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--allowed", default="1.5GiB")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--work", nargs=2, metavar=("MODE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(work(args.work[0], Path(args.work[1]), args.layers, args.steps)))
        return 0
    limit = Limit(parse_bytes(args.allowed))
    before = conditions() | {"threads": 1}
    try:
        with tempfile.TemporaryDirectory(dir=ROOT) as scratch:
            folder = Path(scratch) / "weights"
            folder.mkdir()
            base_bytes = write_files(folder, args.layers)
            plain = run_apart("plain", folder, args, None)
            files = run_apart("files", folder, args, limit)
            host = run_apart("host", folder, args, limit)
            if plain is None or files is None:
                return 1
            adapters = [load_file(Path(scratch) / f"{mode}.safetensors") for mode in ("plain", "files")]
            alike = adapters[0].keys() == adapters[1].keys()
            same = alike and all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    finally:
        limit.remove()
    read, planned = files["disk_read"]
    row = before | {
        "model": f"llama {args.layers}x1024 + LoRA, float32", "weights_bytes": base_bytes, "limit": limit.kind,
        "limit_bytes": limit.nbytes, "steps": args.steps, "losses_equal": files["losses"] == plain["losses"],
        "adapters_equal": same, "file_bytes_read": read, "file_bytes_planned": planned, "loads": files["loads"][0],
        "loads_planned": files["loads"][1], "demand_loads": files["demand_loads"], "host_buffers_bytes": files["host_peak"][0],
        "host_buffers_planned_bytes": files["host_peak"][1], "resident_peak_bytes": files["peak_anonymous_bytes"],
        "step_s": round(statistics.median(files["seconds"][1:]), 3), "plain_step_s": round(statistics.median(plain["seconds"][1:]), 3),
        "on_host_under_limit": "failed" if host is None else "ran",
    }  # fmt: skip
    shown = {name: value for name, value in row.items() if name not in before}
    print_table(
        "adapters over frozen weights in files", ["", "measured"], [[name, str(value)] for name, value in shown.items()]
    )
    print(
        f"{format_bytes(base_bytes)} of weights in {format_bytes(limit.nbytes)} ({limit.kind}); {base_bytes / GIB:.2f} GiB"
    )
    if not args.no_record:
        append_rows("frozen_files", [row])
    good = row["losses_equal"] and same and read == planned and host is None and base_bytes > limit.nbytes
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
