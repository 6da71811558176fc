"""Whole runs, from load to resume, whose processes may take the memory that was predicted and no more.

    python benchmark/contract.py [--runs 300] [--first 0] [--limited] [--seconds 3600] [--no-record]

A run is drawn from its number: model, dtype, moments, accumulation, budgets (so homes), ranks, framework, phase. Each
rank is a process. It loads a model, plans and wraps it, trains while a checkpoint is written, goes through the phase
(evaluation, generation, an export, a resume, other homes), and trains again. Compared is the peak of its resident memory
(``VmHWM``) with `StepReport.predicted`, as the process says it when its plan is at work.

``--limited`` repeats each run twice in a memory control group, where one can be made: with room for what was predicted
and 2 % more, where it must end well; and for 3 % less, where wrapping must refuse it and name the room that suffices. A
group counts no code of libraries that others have read from files, so its limit is for the process's own pages.

The device is a CPU, whose memory is the host's, so a process has both. Appends a row for each run to
``results/contract.csv``; fails where a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import Row, append_rows, conditions

ROOT = Path(__file__).resolve().parent.parent

PHASES = ("train", "evaluate", "generate", "export", "resume", "rehome")
FRAMEWORKS = ("plain", "plain", "trainer", "lightning", "accelerate")
GROUPS = Path("/sys/fs/cgroup/memory")
SECONDS = 420
"""The seconds of one run after which it is given up."""
COUNTED_FROM_BYTES = 1 << 30
"""Smaller processes are mostly libraries; their rows are there, the bars are not for them."""
ABOVE, BELOW, MEAN = 0.02, 0.03, 0.01
MAPPED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
"""Environment in which the C library maps large tensors one by one, so that what is freed is no longer resident."""
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """A run, as its number draws it."""

    number: int
    family: str
    layers: int
    hidden: int
    vocabulary: int
    sequence: int
    dtype: str
    moments: str
    accumulation: int
    share: float
    """The share that the plan gets of the device memory that all on the device would take."""
    real: bool
    """Whether the model comes with weights; otherwise it is on meta, and initialised chunk by chunk."""
    ranks: int
    phase: str
    framework: str


def drawn(number: int) -> Case:
    """The case of a number."""
    draw = random.Random(number)
    hidden = draw.choice((384, 512, 640, 768))
    framework = draw.choice(FRAMEWORKS)
    return Case(
        number=number,
        family=draw.choice(("opt-125m", "gpt2", "llama-2-7b")),
        layers=draw.randint(5, 9) if hidden > 512 else draw.randint(10, 16),
        hidden=hidden,
        vocabulary=draw.choice((8192, 16384, 32768)),
        sequence=draw.choice((32, 64, 128)),
        dtype=draw.choice(("fp32", "fp32", "bf16")),
        moments=draw.choice(("float32", "float32", "bfloat16")),
        accumulation=draw.choice((1, 1, 2)),
        share=draw.choice((0.35, 0.5, 0.7, 1.0)),
        real=draw.random() < 0.5,
        ranks=draw.choice((1, 1, 2)),
        phase=draw.choice(PHASES),
        framework=framework,
    )


# --- in the processes of a run ----------------------------------------------------------------------------------------


def work(case: Case, rank: int, folder: Path) -> dict[str, Any]:
    """The life of one rank; says its peaks, or the refusal."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if case.ranks > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.ranks)
    from elixir.errors import InputError
    from elixir.hardware.process_memory import resident

    try:
        module = lived(case, rank, folder)
    except InputError as error:
        return {"refused": str(error)}
    report, now = module.last_report, resident()
    if report is None or now is None:
        return {"refused": "no step was reported, or this operating system does not tell what is resident"}
    return {
        "predicted": report.predicted["process_peak"],
        "peak": now.peak_bytes,
        "checked": checked_bytes(module, report),
        "own_now": now.own_bytes,
        "file_now": now.file_bytes,
        "parts": report.process_parts,
        "homes": sorted({chunk.home.name for chunk in module.plan.chunks}),
    }


def checked_bytes(module: Any, report: Any) -> int:
    """The private pages that wrapping expects this process to have: with copies for a checkpoint, whether or not one
    was saved."""
    from elixir.wrapper.engine import engine_of

    engine, parts = engine_of(module), report.process_parts
    copies = module.plan.predicted.checkpoint_bytes // engine.host_share.on_machine
    later = engine.arena.most_bytes["checkpoint"] + parts.get("state_dicts", 0)
    return sum(parts.values()) - parts["libraries"] - later + copies


def shape_of(case: Case) -> Any:
    """The shape of the model."""
    from elixir.models.model_shape import describe

    heads = case.hidden // 64
    kv = {"kv_heads": heads} if case.family == "llama-2-7b" else {}
    return describe(case.family).changed(
        name=f"{case.family} {case.layers}x{case.hidden}", layers=case.layers, hidden=case.hidden, heads=heads,
        ffn=4 * case.hidden, vocabulary=case.vocabulary, **kv,
    )  # fmt: skip


def lived(case: Case, rank: int, folder: Path) -> Any:
    """Loads, plans, wraps, trains, saves and goes through the phase; gives the wrapped model."""
    import torch

    from elixir.models.loading import build

    shape = shape_of(case)
    where = {"device": "cpu"} if case.real or case.framework != "plain" else {}
    model = build(shape, dtype=torch.float32, **where)
    numel = sum(each.numel() for each in model.parameters())
    generator = torch.Generator().manual_seed(rank)
    rows = [
        {"input_ids": ids, "labels": ids}
        for ids in torch.randint(5, case.vocabulary - 5, (16, case.sequence), generator=generator)
    ]
    width = {"fp32": 16, "bf16": 14}[case.dtype] - (4 if case.moments == "bfloat16" else 0)
    memory = int(case.share * (width * numel / case.ranks + 200 * MIB)) + 4 * 4 * case.vocabulary * case.hidden
    options: dict[str, Any] = {
        "device_memory": memory,
        "host_memory": "12GiB",
        "moments": case.moments,
        "replan": False,
    }
    return _LIVES[case.framework](case, model, rows, options, folder)


def _plain(case: Case, model: Any, rows: list[Any], options: dict[str, Any], folder: Path) -> Any:
    import torch

    import elixir

    batch = {name: value[None] for name, value in rows[0].items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = elixir.wrap(
        model, optimizer, inp=batch, hardware="cpu", dtype=case.dtype, accumulation=case.accumulation, **options
    )

    def steps(count: int) -> None:
        for _ in range(count):
            for row in rows[: case.accumulation]:
                optimizer.backward(model(**{name: value[None] for name, value in row.items()}).loss)
            optimizer.step()
            optimizer.zero_grad()

    steps(2)
    state = {"model": model, "optimizer": optimizer}
    saving = elixir.save_checkpoint(folder / "saved", state)
    steps(1)  # while it is written
    saving.wait()
    _phase(case, model, optimizer, state, batch, folder)
    steps(1)
    model.settle()
    return model


def _phase(case: Case, model: Any, optimizer: Any, state: Any, batch: Any, folder: Path) -> None:
    import torch

    import elixir

    if case.phase == "evaluate":
        model.eval()
        with torch.no_grad():
            model(**batch)
        model.train()
    elif case.phase == "generate":
        model.eval()
        model.generate(batch["input_ids"][:, :8], max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
        model.train()
    elif case.phase == "export" and os.environ["RANK"] == "0":
        elixir.export_hf(folder / "saved", folder / "exported")
    elif case.phase == "resume":
        elixir.load_checkpoint(folder / "saved", state)
    elif case.phase == "rehome":
        model.settle()
        model.rehome(_other_homes(case, model, batch))


def _other_homes(case: Case, model: Any, batch: Any) -> Any:
    """A plan of the same chunks with three quarters of the device memory; all ranks find the same."""
    import elixir
    from elixir.models.loading import build
    from elixir.units import parse_dtype

    plan = model.plan
    return elixir.optimal_search(
        build(shape_of(case), dtype=parse_dtype("fp32")), case.ranks, inp=batch, hardware="cpu", chunks_of=plan,
        unified_dtype=parse_dtype(case.dtype), optimizer_type=plan.optimizer, moments=case.moments, clipping=False,
        accumulation=case.accumulation, device_memory=int(0.75 * plan.device_budget_bytes), host_memory="12GiB",
    ).plan  # fmt: skip


def _trainer(case: Case, model: Any, rows: list[Any], options: dict[str, Any], folder: Path) -> Any:
    from transformers import TrainingArguments

    from elixir.integrations.transformers import ElixirTrainer

    args = TrainingArguments(
        str(folder / "out"), use_cpu=True, per_device_train_batch_size=1, report_to=[], disable_tqdm=True, max_steps=4,
        gradient_accumulation_steps=case.accumulation, bf16=case.dtype == "bf16", save_strategy="steps", save_steps=2,
        save_total_limit=1, eval_strategy="steps" if case.phase == "evaluate" else "no", eval_steps=2, optim="adamw_torch_fused",
        logging_strategy="no",
    )  # fmt: skip
    trainer = ElixirTrainer(
        model, args, train_dataset=rows, eval_dataset=rows[:2], elixir={**options, "hardware": "cpu"}
    )
    trainer.train()
    return trainer.model_wrapped


def _lightning(case: Case, model: Any, rows: list[Any], options: dict[str, Any], folder: Path) -> Any:
    import lightning
    import torch
    from torch.utils.data import DataLoader

    from elixir.integrations.lightning import ElixirStrategy

    class Training(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.model(**batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    strategy = ElixirStrategy(**options, hardware="cpu")
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=4, logger=False, enable_checkpointing=False,
        accumulate_grad_batches=case.accumulation, enable_progress_bar=False, enable_model_summary=False,
        precision={"fp32": "32-true", "bf16": "bf16-true"}[case.dtype], num_sanity_val_steps=0,
        limit_val_batches=2 if case.phase == "evaluate" else 0, default_root_dir=str(folder),
    )  # fmt: skip
    trainer.fit(Training(), DataLoader(rows, batch_size=1), DataLoader(rows[:2], batch_size=1))
    return strategy.elixir.module


def _accelerate(case: Case, model: Any, rows: list[Any], options: dict[str, Any], folder: Path) -> Any:
    import torch
    from torch.utils.data import DataLoader

    from elixir.integrations.accelerate import ElixirAccelerator

    accelerator = ElixirAccelerator(
        cpu=True, gradient_accumulation_steps=case.accumulation, mixed_precision="bf16" if case.dtype == "bf16" else "no",
        elixir={**options, "hardware": "cpu"},
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=1))

    def epoch() -> None:
        for index, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if index == 3:
                break

    epoch()
    accelerator.save_state(str(folder / "state"))
    if case.phase == "resume":
        accelerator.load_state(str(folder / "state"))
    epoch()
    return model


_LIVES = {"plain": _plain, "trainer": _trainer, "lightning": _lightning, "accelerate": _accelerate}


# --- around them ------------------------------------------------------------------------------------------------------


def can_limit() -> bool:
    """Whether control groups can be made here."""
    limit = Limit(COUNTED_FROM_BYTES)
    limit.remove()
    return limit.group is not None


class Limit:
    """A memory control group for the processes of one run; `group` is None where none can be made."""

    def __init__(self, nbytes: int) -> None:
        self.group: Path | None = GROUPS / f"elixir_contract_{os.getpid()}"
        try:
            self.group.mkdir()
            (self.group / "memory.limit_in_bytes").write_text(str(nbytes))
        except OSError:
            self.remove()
            self.group = None

    def __call__(self) -> None:
        """Puts a process into it before it runs."""
        if self.group is not None:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        if self.group is not None and self.group.is_dir():
            with contextlib.suppress(OSError):
                self.group.rmdir()


def free_port() -> int:
    """A port for the frameworks that open one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run(case: Case, limit_bytes: int | None = None) -> list[dict[str, Any]]:
    """The answer of each rank; ``{"died": status}`` of one that did not."""
    environment = os.environ | MAPPED | {
        "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(case.ranks),
        "LOCAL_WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    limit = None if limit_bytes is None else Limit(limit_bytes)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as files:
        processes = []
        for rank in range(case.ranks):
            command = [sys.executable, __file__, "--work", json.dumps(asdict(case)), str(rank), scratch]
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            out = files.enter_context(open(Path(scratch) / f"out{rank}", "w+", encoding="utf-8"))
            started = subprocess.Popen(command, env=own, stdout=out, stderr=subprocess.STDOUT, preexec_fn=limit)
            processes.append((started, out))
        answers = [_answer(process, out) for process, out in processes]
    if limit is not None:
        limit.remove()
    return answers


def _answer(process: subprocess.Popen[bytes], out: Any) -> dict[str, Any]:
    try:
        status = process.wait(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return {"died": f"took more than {SECONDS} s"}
    out.seek(0)
    lines = out.read().strip().splitlines() or [""]
    try:
        return json.loads(lines[-1])
    except ValueError:
        return {"died": f"status {status}: {lines[-1][-200:]}"}


def limited(case: Case, found: list[dict[str, Any]]) -> Row:
    """The same run in control groups: with more room than predicted, with less, and with the room that is named then."""
    own = [answer["checked"] for answer in found]
    verdicts: Row = {}
    for name, share in (("more", 1 + ABOVE), ("less", 1 - BELOW)):
        limit_bytes = int(share * sum(own))
        answers = run(case, limit_bytes)
        print(name, limit_bytes // MIB, [answer.get("refused", "")[:300] for answer in answers], flush=True)
        verdicts[f"with_{name}"] = _verdict(answers)
    refused = [answer["refused"] for answer in answers if "refused" in answer]
    missing = [re.search(r": ([\d.]+ [KMG]iB) more suffice", text) for text in refused]
    sizes = [parse_size(match[1]) for match in missing if match is not None]
    verdicts["with_named"] = _verdict(run(case, limit_bytes + max(sizes))) if sizes else ""
    return verdicts


def parse_size(text: str) -> int:
    """Bytes of a size, rounded up to whole pages."""
    from elixir.units import parse_bytes

    return -(-parse_bytes(text.replace(" ", "")) // 4096 + 1) * 4096


def _verdict(answers: list[dict[str, Any]]) -> str:
    said = ["ran" if "peak" in each else "refused" if "refused" in each else str(each["died"]) for each in answers]
    return "; ".join(dict.fromkeys(said))


def row_of(case: Case, answers: list[dict[str, Any]], before: Row) -> Row:
    """A run as a row of results: the rank that is furthest from its prediction."""
    row = {**before, **asdict(case), **dict.fromkeys(("predicted_bytes", "peak_bytes", "error_percent", "said"), "")}
    measured = [answer for answer in answers if "peak" in answer]
    if len(measured) < case.ranks:
        return row | {"said": next(str(each)[:200] for each in answers if "peak" not in each)}
    worst = max(measured, key=lambda each: abs(each["peak"] / each["predicted"] - 1))
    error = round(100 * (worst["peak"] / worst["predicted"] - 1), 2)
    return row | {"predicted_bytes": worst["predicted"], "peak_bytes": worst["peak"], "error_percent": error}


def main() -> int:
    """Draws, runs, compares; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--limited", action="store_true")
    parser.add_argument("--seconds", type=float, default=3600, help="after which no further run is begun")
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--work", nargs=3, metavar=("CASE", "RANK", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(
            "\n" + json.dumps(work(Case(**json.loads(args.work[0])), int(args.work[1]), Path(args.work[2]))), flush=True
        )
        os._exit(0)
    rows: list[Row] = []
    started = time.monotonic()
    for number in range(args.first, args.first + args.runs):
        if time.monotonic() - started > args.seconds:
            break
        case, before = drawn(number), conditions()
        answers = run(case)
        row = row_of(case, answers, before) | {"compared": "VmHWM", "with_more": "", "with_less": "", "with_named": ""}
        if args.limited and row["peak_bytes"] and can_limit():
            row |= limited(case, answers)
        rows.append(row)
        print({name: value for name, value in row.items() if name not in before}, flush=True)
        print([{name: size // MIB for name, size in each.get("parts", {}).items()} for each in answers], flush=True)
        if not args.no_record:
            append_rows("contract", [row])
    large = [row["error_percent"] for row in rows if row["peak_bytes"] and row["peak_bytes"] > COUNTED_FROM_BYTES]
    if large:
        mean = statistics.fmean(abs(error) for error in large)
        print(f"{len(large)} processes above 1 GiB: {min(large):+.2f} to {max(large):+.2f} %, mean error {mean:.2f} %")
    missed = not large or max(large) > 100 * ABOVE or min(large) < -100 * BELOW or mean > 100 * MEAN
    wrong = [row for row in rows if row["said"] or row["with_more"] not in ("", "ran")]
    wrong += [row for row in rows if row["with_less"] not in ("", "refused") or row["with_named"] not in ("", "ran")]
    return int(missed or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
