"""Nine trainings of models that people have, each in a control group of what `elixir plan` says must be free.

    python benchmark/contract_trainings.py [--only opt-125m ...] [--tries 3] [--without-group] [--no-record]

As `benchmark/contract.py`, but the limit is what is said before anything runs (`Answer.must_be_free_bytes`), the models
have published shapes, and torch's AdamW steps as it is by default. A training wraps a model under the plan, takes three
steps, evaluates, saves a checkpoint while it goes on, and takes another step. Each rank is a fresh process, in the group
from its first import on. Models are built from configs; nothing is downloaded.

A control group counts page tables and pages of files that were written, too, but not pages of libraries that another
process has read first; so the peak that counts is that of the processes (``VmHWM``), libraries once. Appends a row for
each training to ``results/contract_trainings.csv``; fails where one is killed, or takes more than was said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROOT = Path(__file__).resolve().parent.parent
GROUPS = Path("/sys/fs/cgroup/memory")
SECONDS = 400
"""The seconds after which a training is given up."""
MIB = 1 << 20
ABOVE = 0.15
"""The share that the said memory may be above the peak where copies for a checkpoint were taken."""


@dataclass(frozen=True)
class Training:
    """A training by what differs from that of the others."""

    model: str = ""
    """Known by name; empty: built by `own`."""
    own: str = ""
    """The name of a function here that gives a model and its batch."""
    batch: int = 1
    seq: int | None = 48
    dtype: str = "fp32"
    ranks: int = 1
    lora: int | None = None
    fused: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the search."""


TRAININGS = {
    "opt-125m": Training("opt-125m", options={"device_memory": "700MiB"}),
    "opt-125m fused": Training("opt-125m", fused=True, options={"device_memory": "700MiB"}),
    "gpt2 bf16": Training("gpt2", dtype="bf16", options={"device_memory": "500MiB", "moments": "bfloat16"}),
    "table": Training(own="table", options={"device_memory": "2GiB"}),
    "vit-base": Training("vit-base", seq=None, options={"device_memory": "500MiB"}),
    "mlp": Training(own="convolution", options={"device_memory": "200MiB"}),
    "bert-base 2 ranks": Training("bert-base", ranks=2, options={"device_memory": "600MiB"}),
    "t5-small": Training("t5-small", options={"device_memory": "400MiB", "accumulation": 3}),
    "qwen3 lora": Training("qwen3-0.6b", dtype="bf16", lora=8, options={"device_memory": "1GiB"}),
    "bert-base": Training("bert-base", options={"device_memory": "4GiB"}),
}


def table() -> tuple[Any, dict[str, Any]]:
    """An embedding of 77 MB and a small tower."""
    import torch
    from torch import nn

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(300_000, 64)
            self.tower = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

        def forward(self, ids: Any) -> Any:
            return self.tower(self.table(ids).mean(1))

    return Tower(), {"ids": torch.randint(0, 300_000, (64, 8))}


def convolution() -> tuple[Any, dict[str, Any]]:
    """An MLP after a convolution."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 16, 3, stride=2)
            self.rest = nn.Sequential(
                nn.Linear(16 * 15 * 15, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 8)
            )

        def forward(self, x: Any) -> Any:
            return self.rest(self.first(x).flatten(1))

    return Net(), {"x": torch.randn(16, 3, 32, 32)}


def squares(model: Any, inp: dict[str, Any]) -> None:
    """The step of models of this file."""
    model(**inp).square().mean().backward()


def built(it: Training, device: str) -> tuple[Any, dict[str, Any], Callable[[Any, Any], Any] | None]:
    """The model, one rank's batch, and the step; None for the default one."""
    import torch

    from elixir.models.loading import build
    from elixir.models.step import default_input

    if it.own:
        with torch.device(device):
            model, batch = globals()[it.own]()
        return model, {name: torch.zeros_like(value, device="cpu") for name, value in batch.items()}, squares
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[it.dtype]
    model = build(it.model, dtype=dtype, lora=it.lora, device=device)
    return model, default_input(model, batch=it.batch, seq=it.seq), None


def plan(name: str, folder: Path) -> None:
    """Writes the plan down, and what is said of it."""
    from elixir.search import optimal_search

    it = TRAININGS[name]
    model, batch, step = built(it, "meta")
    options = {"host_budget": "4GiB", "clipping": True} | it.options
    answer = optimal_search(
        model,
        it.ranks,
        inp=batch,
        step_fn=step,
        hardware="cpu",
        optimizer_type="AdamW",
        unified_dtype=it.dtype,
        **options,
    )
    answer.plan.save(folder / "plan.json")
    said = {"said_bytes": answer.must_be_free_bytes, "parts": answer.process_need.parts}
    said["copies_bytes"] = answer.plan.predicted.checkpoint_bytes
    (folder / "said.json").write_text(json.dumps(said))


def live(name: str, rank: int, folder: Path) -> None:
    """The life of one rank."""
    import torch
    import torch.distributed as dist

    import elixir
    from elixir.hardware.process_memory import resident

    it, at, peaks = TRAININGS[name], time.monotonic(), {}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if it.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=it.ranks)

    def note(what: str) -> None:
        now = resident()
        peaks[what] = None if now is None else (now.peak_bytes // MIB, now.own_bytes // MIB, now.file_bytes // MIB)
        (folder / f"rank{rank}.json").write_text(json.dumps({"peaks": peaks}))

    model, batch, step = built(it, "cpu")
    note("built")
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, **({"fused": True} if it.fused else {}))
    model, optimizer = elixir.wrap(model, optimizer, plan=folder / "plan.json", max_norm=1.0)
    note("wrapped")

    def steps(count: int) -> None:
        for _ in range(count):
            for _ in range(it.options.get("accumulation", 1)):
                out = model(**batch)
                optimizer.backward(out.square().mean() if step is squares else out.loss)
            optimizer.step()
            optimizer.zero_grad()

    for number in range(3):
        steps(1)
        note(f"step {number}")
    model.settle()
    note("steps")
    first = dict(model.last_report.predicted), dict(model.last_report.observed)
    model.eval()
    with torch.no_grad():
        model(**batch)
    model.train()
    note("evaluated")
    saving = elixir.save_checkpoint(folder / "saved", {"model": model, "optimizer": optimizer})
    steps(1)
    note("stepped while saving")
    saving.wait()
    note("saved")
    steps(1)
    model.settle()
    note("end")
    now = resident()
    if now is None:
        raise SystemExit("this operating system does not tell what is resident")
    report = model.last_report
    found = {
        "peaks": peaks, "peak": now.peak_bytes, "file": now.file_bytes, "seconds": time.monotonic() - at,
        "predicted": report.predicted["process_peak"], "observed": report.observed["process_peak"],
        "parts": report.process_parts, "first": [each.get("process_peak") for each in first],
    }  # fmt: skip
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def ran(arguments: list[str], group: Path | None) -> subprocess.Popen[bytes]:
    """A process of this file, in the group before it imports anything."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONWARNINGS": "ignore", "OPENBLAS_NUM_THREADS": "1"}
    words = [sys.executable, str(Path(__file__).resolve()), *arguments]
    if group is not None:
        words = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *words]
    return subprocess.Popen(words, env=environment, stderr=subprocess.PIPE)


class Group:
    """A memory control group for the processes of one run; `folder` is None where none can be made."""

    def __init__(self) -> None:
        self.folder: Path | None = GROUPS / f"elixir_contract_{os.getpid()}"
        try:
            self.folder.mkdir()
            (self.folder / "memory.limit_in_bytes").read_text()
        except OSError:
            self.folder = None

    def remove(self) -> None:
        """Removes it, once its processes have ended."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def tried(name: str, folder: Path, limit_bytes: int | None) -> dict[str, Any]:
    """One try; says how it ended, and what its ranks noted."""
    group = Group()
    inside = None if limit_bytes is None else group.folder
    if inside is not None:
        (inside / "memory.limit_in_bytes").write_text(str(limit_bytes))
        swap = inside / "memory.memsw.limit_in_bytes"
        if swap.exists():
            swap.write_text(str(limit_bytes))
    try:
        ranks = [ran(["--live", name, str(rank), str(folder)], inside) for rank in range(TRAININGS[name].ranks)]
        errors = []
        for each in ranks:
            try:
                errors.append(each.communicate(timeout=SECONDS)[1].decode()[-600:])
            except subprocess.TimeoutExpired:
                each.kill()
                errors.append("given up")
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
        ended = [each.returncode for each in ranks]
        failures = 0 if inside is None else int((inside / "memory.failcnt").read_text())
        used = 0 if inside is None else int((inside / "memory.max_usage_in_bytes").read_text())
        return {"ended": ended, "ranks": found, "errors": errors, "at_limit": failures, "group_peak": used}
    finally:
        group.remove()


def row_of(name: str, said: dict[str, Any], tries: list[dict[str, Any]]) -> dict[str, Any]:
    """A training as a row of results, by its highest try."""
    whole = [each for each in tries if not any(each["ended"])]
    sums = []
    for each in whole:
        ranks = each["ranks"]
        shared = min(rank["file"] for rank in ranks)
        sums.append(sum(rank["peak"] for rank in ranks) - (len(ranks) - 1) * shared)
    peak = max(sums, default=0)
    last = whole[-1]["ranks"][0] if whole else {"predicted": 0, "observed": 1}
    return {
        "training": name,
        "said_bytes": said["said_bytes"],
        "copies_bytes": said["copies_bytes"],
        "peak_bytes": peak,
        "error_percent": round(100 * (said["said_bytes"] / peak - 1), 1) if peak else None,
        "tries": len(tries),
        "killed": len(tries) - len(whole),
        "at_limit": max((each["at_limit"] for each in tries), default=0),
        "report_predicted_bytes": last["predicted"],
        "report_observed_bytes": last["observed"],
        "report_error_percent": round(100 * (last["predicted"] / last["observed"] - 1), 1),
    }


def passes(row: dict[str, Any]) -> bool:
    """None was killed, and the said figure is not below the peak."""
    return not row["killed"] and row["said_bytes"] >= row["peak_bytes"]


def main() -> int:
    """Runs the trainings, appends rows, summarises."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(TRAININGS), choices=list(TRAININGS))
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--without-group", action="store_true", help="without a limit: only peaks")
    parser.add_argument("--verbose", action="store_true", help="print what each rank noted")
    parser.add_argument("--no-record", action="store_true", help="append nothing to the results")
    parser.add_argument("--live", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--plan", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.live:
        live(arguments.live[0], int(arguments.live[1]), Path(arguments.live[2]))
        return 0
    if arguments.plan:
        plan(arguments.plan[0], Path(arguments.plan[1]))
        return 0
    from benchmark.common import append_rows, conditions, print_table

    rows = []
    for name in arguments.only:
        before, tries = conditions(), []
        with tempfile.TemporaryDirectory() as first:
            made = ran(["--plan", name, first], None)
            error = made.communicate()[1].decode()
            if made.returncode:
                print(name, error[-2000:])
                return 1
            said, text = json.loads((Path(first) / "said.json").read_text()), (Path(first) / "plan.json").read_text()
        for _ in range(arguments.tries):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "plan.json").write_text(text)
                tries.append(tried(name, Path(folder), None if arguments.without_group else said["said_bytes"]))
        rows.append(row_of(name, said, tries) | before)
        print(name, {key: rows[-1][key] for key in list(rows[-1])[:11]}, flush=True)
        if arguments.verbose:
            print({part: nbytes // MIB for part, nbytes in said["parts"].items()})
            for each in tries:
                print(json.dumps(each)[:3000], flush=True)
    columns = ("training", "said_bytes", "peak_bytes", "error_percent", "killed", "report_error_percent")
    print_table("trainings", columns, ([row[key] for key in columns] for row in rows))
    if not arguments.no_record:
        append_rows("contract_trainings", rows)
    failed = [row["training"] for row in rows if not passes(row)]
    print("failed:", failed or "none")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
