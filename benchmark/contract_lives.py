"""The processes of `benchmark/contract.py`: one that has imported a framework, and its children, which live whole runs.

A child is a rank. It first makes all pages its own that it shares with its parent, so that it holds what a process holds
that has imported everything by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FRAMEWORKS = ("plain", "plain", "trainer", "lightning", "accelerate")
PHASES = dict.fromkeys(FRAMEWORKS, ("train", "evaluate", "generate", "export", "resume", "rehome"))
PHASES["plain"] = ("save", *PHASES["plain"])
PHASES["lightning"] = ("train", "evaluate", "export", "resume")
SECONDS = 240
"""The seconds of one run after which it is given up."""
GRACE_SECONDS = 15
"""The seconds that other ranks have to end after one was killed."""
LOOK_SECONDS = 0.002
"""The seconds between two looks at the memory of a rank: Linux keeps the peak of all its pages, not of private ones."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # of Linux 5.14
_IMPORTS = {
    "plain": (),
    "trainer": ("transformers.trainer", "elixir.integrations.transformers"),
    "lightning": ("lightning", "elixir.integrations.lightning"),
    "accelerate": ("accelerate", "elixir.integrations.accelerate"),
}
PRETENDED = "h100"
"""The preset of a pretended device."""
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

    @property
    def layer_numel(self) -> int:
        """Weights of one layer."""
        return (16 if self.family == "llama-2-7b" else 12) * self.hidden**2

    @property
    def embedding_numel(self) -> int:
        """Weights that are looked up by token, or give logits."""
        return self.vocabulary * self.hidden

    @property
    def state_bytes(self) -> int:
        """Bytes of weight, gradient, master and moments for one weight."""
        return 12 if self.moments == "bfloat16" else 16


SMALL = {
    name: Case(-1, "opt-125m", 2, 64, 512, 16, "fp32", "float32", 1, 1.0, True, 1, "train", name) for name in FRAMEWORKS
}


# --- from wrapping on -------------------------------------------------------------------------------------------------


class Checks:
    """Looks on while wrapping checks what is free, and sets the limit of a control group by what it expects.

    Args:
        group: of the ranks; None for none.
        share: of the expected peak that is given at first.
        verdict: a file for what wrapping said to that.
    """

    def __init__(self, group: Path | None, share: float, verdict: Path) -> None:
        self._group, self._share, self._verdict = group, share, verdict
        self.expected: dict[str, int] = {}
        self.expected_bytes = self._own_bytes = 0
        """The highest peak that any check of this process expected."""
        self.modules: list[str] = []
        """Modules that were imported at the first check."""

    def look_on(self) -> None:
        """Stays with the class for the rest of this process."""
        from elixir.wrapper.account.plan_promise import PlanPromise

        original = PlanPromise.refuse_exceeded

        def refuse_exceeded(promise: Any, plan: Any, *coming: Any) -> None:
            need = promise.need_of(plan)
            expected_bytes = max(need.peak_bytes, promise.held.peak_bytes)
            if expected_bytes > self.expected_bytes:
                self.expected, self.expected_bytes = need.parts, expected_bytes
            if self._group is not None and not self.modules:
                self._limit(self._group, need.own_bytes, lambda: original(promise, plan))
            else:
                if self._group is not None:
                    self._widen(self._group, need.own_bytes - self._own_bytes)
                original(promise, plan, *coming)
            self._own_bytes = max(self._own_bytes, need.own_bytes)
            self.modules = self.modules or list(sys.modules)

        PlanPromise.refuse_exceeded = refuse_exceeded  # type: ignore[method-assign]

    def _widen(self, group: Path, more_bytes: int) -> None:
        """Gives the group what another plan takes more than the first."""
        more_bytes = sum(together(max(more_bytes, 0)))
        if os.environ["RANK"] == "0":
            limit = group / "memory.limit_in_bytes"
            limit.write_text(str(int(limit.read_text()) + more_bytes))
        together()

    def _limit(self, group: Path, own_bytes: int, check: Callable[[], None]) -> None:
        """Checks with `share` of the need; if any rank is refused, again with the room that this names."""
        from elixir.errors import InputError
        from elixir.hardware.process_memory import resident
        from elixir.units import parse_bytes

        limit, leads, now, said = group / "memory.limit_in_bytes", os.environ["RANK"] == "0", resident(), ""
        room = sum(together(int(self._share * own_bytes) - (now.own_bytes if now else 0)))
        if leads:
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.usage_in_bytes").read_text()) - int(stat["total_inactive_file"])
            limit.write_text(str(used + room))
        together()
        try:
            check()
        except InputError as error:
            said = str(error)
        named = [re.search(r": ([\d.]+ [KMG]?i?B) more suffice", each) for each in together(said) if each]
        self._verdict.write_text("refused" if named else "accepted")
        if named:
            if leads:
                more = max(parse_bytes(each[1].replace(" ", "")) for each in named if each is not None)
                limit.write_text(str(int(limit.read_text()) + more))
            together()
            check()


def together(value: Any = None) -> list[Any]:
    """The value of every rank, once all have one."""
    import torch.distributed as dist

    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def work(case: Case, rank: int, folder: Path, group: Path | None, share: float) -> dict[str, Any]:
    """The life of one rank; says its peaks, or its error."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if case.ranks > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.ranks)
    from elixir.hardware.process_memory import resident

    checks = Checks(group, share, folder / f"verdict{rank}")
    checks.look_on()
    module = lived(case, rank, folder)
    report, now = module.last_report, resident()
    if report is None or now is None:
        return {"died": "no step was reported, or this operating system does not tell what is resident"}
    return {
        "expected": checks.expected_bytes,
        "expected_own": checks.expected_bytes - checks.expected["libraries"],
        "parts": checks.expected,
        "modules": checks.modules,
        "reported": report.predicted["process_peak"],
        "reported_parts": report.process_parts,
        "peak": now.peak_bytes,
        "cpu_s": round(time.process_time(), 1),
        "own_now": now.own_bytes,
        "file_now": now.file_bytes,
        "activations": [
            module.plan.predicted.activation_bytes,
            module.plan.predicted.device_parts.get("activations", 0),
        ],
        "homes": sorted({chunk.home.name for chunk in module.plan.chunks}),
    }


def shape_of(case: Case) -> Any:
    """The shape of the model."""
    from elixir.models.model_shape import describe

    heads = case.hidden // 64
    kv = {"kv_heads": heads} if case.family == "llama-2-7b" else {}
    return describe(case.family).changed(
        name=f"{case.family} {case.layers}x{case.hidden}", layers=case.layers, hidden=case.hidden, heads=heads,
        ffn=4 * case.hidden, vocabulary=case.vocabulary, **kv,
    )  # fmt: skip


def lived(case: Case, rank: int, folder: Path, device: str = "cpu", hardware: str = "cpu") -> Any:
    """Loads, plans, wraps, trains, saves and goes through the phase; gives the wrapped model."""
    import torch

    from elixir.models.loading import build

    where = {"device": "cpu"} if case.real or case.framework != "plain" else {}
    model = build(shape_of(case), dtype=torch.float32, **where)
    numel = sum(each.numel() for each in model.parameters())
    generator = torch.Generator().manual_seed(rank)
    rows = [
        {"input_ids": ids, "labels": ids}
        for ids in torch.randint(5, case.vocabulary - 5, (16, case.sequence), generator=generator).to(device)
    ]
    least = 12 * max(case.embedding_numel, case.layer_numel // 3) + 96 * MIB
    most = case.state_bytes * numel // case.ranks + least
    options: dict[str, Any] = {
        "device_memory": int(least + case.share * (most - least)),
        "host_budget": "12GiB",
        "moments": case.moments,
        "replan": False,
        "hardware": hardware,
    }
    return _LIVES[case.framework](case, model, rows, options, folder)


def _plain(case: Case, model: Any, rows: list[Any], options: dict[str, Any], folder: Path) -> Any:
    import torch

    import elixir

    batch = {name: value[None] for name, value in rows[0].items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = elixir.wrap(
        model, optimizer, inp=batch, dtype=case.dtype, accumulation=case.accumulation, **options
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
    if case.phase != "save":
        saving.wait()
    steps(1)
    saving.wait()
    if case.phase == "evaluate":
        model.eval()
        with torch.no_grad():
            model(**batch)
        model.train()
    elif case.phase == "export" and os.environ["RANK"] == "0":
        elixir.export_hf(folder / "saved", folder / "exported")
    elif case.phase == "resume":
        elixir.load_checkpoint(folder / "saved", state)
    _later(case, model, rows)
    steps(1)
    if case.phase == "rehome":
        elixir.save_checkpoint(folder / "moved", state).wait()
        steps(1)
    model.settle()
    return model


def _later(case: Case, model: Any, rows: list[Any]) -> None:
    """The phases that are the same under every framework, after its training."""
    batch = {name: value[None] for name, value in rows[0].items()}
    if case.phase == "generate":
        model.eval()
        model.generate(batch["input_ids"][:, :8], max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
        model.train()
    elif case.phase == "rehome":
        model.settle()
        model.rehome(_other_homes(case, model, batch))


def _other_homes(case: Case, model: Any, batch: Any) -> Any:
    """A plan of the same chunks with less device memory, three quarters if that suffices; all ranks find the same."""
    import elixir
    from elixir.errors import PlanError
    from elixir.models.loading import build
    from elixir.units import parse_dtype

    plan = model.plan
    for share in (0.75, 0.9):
        with contextlib.suppress(PlanError):
            return elixir.optimal_search(
                build(shape_of(case), dtype=parse_dtype("fp32")), case.ranks, inp=batch, chunks_of=plan,
                hardware="cpu" if batch["input_ids"].is_cpu else PRETENDED, unified_dtype=parse_dtype(case.dtype),
                optimizer_type=plan.optimizer, moments=case.moments, clipping=False, accumulation=case.accumulation,
                device_memory=int(share * plan.device_budget_bytes), host_budget="12GiB",
            ).plan  # fmt: skip
    return plan


def _trainer(case: Case, model: Any, rows: list[Any], options: dict[str, Any], folder: Path) -> Any:
    from transformers import TrainingArguments

    from elixir.integrations.transformers import ElixirTrainer

    args = TrainingArguments(
        str(folder / "out"), use_cpu=True, per_device_train_batch_size=1, report_to=[], disable_tqdm=True, max_steps=2,
        gradient_accumulation_steps=case.accumulation, bf16=case.dtype == "bf16", save_strategy="steps", save_steps=2,
        eval_strategy="steps" if case.phase == "evaluate" else "no", eval_steps=2, optim="adamw_torch_fused",
        logging_strategy="no",
    )  # fmt: skip
    trainer = ElixirTrainer(model, args, train_dataset=rows, eval_dataset=rows[:2], elixir=options)
    trainer.train()
    wrapped = trainer.model_wrapped
    if case.phase == "export":
        trainer.save_model(str(folder / "exported"))
    elif case.phase == "resume":
        trainer.args.max_steps = 3
        trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    _later(case, wrapped, rows)
    if case.phase == "rehome":
        trainer.model_wrapped.train()
        for begin in (0, case.accumulation):
            for row in rows[begin : begin + case.accumulation]:
                batch = {name: value[None] for name, value in row.items()}
                trainer.accelerator.backward(wrapped(**batch).loss)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            trainer.save_model(str(folder / "moved"))
    return wrapped


def _lightning(case: Case, model: Any, rows: list[Any], options: dict[str, Any], folder: Path) -> Any:
    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
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

    strategy = ElixirStrategy(**options)
    keep = ModelCheckpoint(folder / "kept", every_n_train_steps=2, save_top_k=-1)
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=case.ranks, max_steps=3, logger=False, callbacks=[keep],
        accumulate_grad_batches=case.accumulation, enable_progress_bar=False, enable_model_summary=False,
        precision={"fp32": "32-true", "bf16": "bf16-true"}[case.dtype], num_sanity_val_steps=0,
        limit_val_batches=2 if case.phase == "evaluate" else 0, default_root_dir=str(folder),
    )  # fmt: skip
    training, loaders = Training(), (DataLoader(rows, batch_size=1), DataLoader(rows[:2], batch_size=1))
    trainer.fit(training, *loaders)
    if case.phase == "export":
        trainer.save_checkpoint(folder / "exported.ckpt", weights_only=True)
    elif case.phase == "resume":
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(training, *loaders, ckpt_path=keep.best_model_path)
    return strategy.elixir.module


def _accelerate(case: Case, model: Any, rows: list[Any], options: dict[str, Any], folder: Path) -> Any:
    import torch
    from torch.utils.data import DataLoader

    from elixir.integrations.accelerate import ElixirAccelerator

    accelerator = ElixirAccelerator(
        cpu=True, gradient_accumulation_steps=case.accumulation, mixed_precision="bf16" if case.dtype == "bf16" else "no",
        elixir=options,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=1))

    def steps(count: int) -> None:
        for _, batch in zip(range(count * case.accumulation), loader, strict=False):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    steps(2)
    accelerator.save_state(str(folder / "state"))
    if case.phase == "evaluate":
        model.eval()
        with torch.no_grad():
            model(**next(iter(loader)))
        model.train()
    elif case.phase == "export":
        accelerator.save_model(model, str(folder / "exported"))
    elif case.phase == "resume":
        accelerator.load_state(str(folder / "state"))
    steps(1)
    _later(case, model, rows)
    if case.phase == "rehome":
        steps(1)
        accelerator.save_state(str(folder / "moved"))
        steps(1)
    return model


_LIVES = {"plain": _plain, "trainer": _trainer, "lightning": _lightning, "accelerate": _accelerate}


# --- processes --------------------------------------------------------------------------------------------------------


def own_pages() -> None:
    """Copies the private pages that this process shares with its parent, and maps the pages of files that its parent
    has mapped: a forked process has neither."""
    import numpy as np

    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open(f"/proc/{os.getppid()}/pagemap", "rb", buffering=0) as pagemap:
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, mode, _, _, _, *name = line.split(maxsplit=5)
            first, end = (int(each, 16) // PAGE_BYTES for each in span.split("-"))
            if not (mode.startswith("r") and mode.endswith("p")) or (name and name[0].startswith("[v")):
                continue
            pagemap.seek(first * 8)
            there = np.frombuffer(pagemap.read((end - first) * 8), np.int64) < 0  # the highest bit: present
            edges = np.flatnonzero(np.diff(there, prepend=False, append=False))
            for begin, stop in edges.reshape(-1, 2).tolist():
                advice = MADV_POPULATE_WRITE if "w" in mode else MADV_POPULATE_READ
                libc.madvise((first + begin) * PAGE_BYTES, (stop - begin) * PAGE_BYTES, advice)


def start(case: Case, rank: int, folder: Path, group: Path | None, share: float, port: int) -> None:
    """Lives one rank in this process, and ends it."""
    with open(folder / f"out{rank}", "wb", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    try:
        answer = work(case, rank, folder, group, share)
    except BaseException as error:
        traceback.print_exc()
        answer = {"died": f"{type(error).__name__}: {error}"[:400]}
    (folder / f"answer{rank}.json").write_text(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)


def imported(framework: str) -> None:
    """Imports what a program with this framework imports at its beginning."""
    import torch

    torch.set_num_threads(1)
    for name in ("transformers", "elixir", "elixir.models.loading", "elixir.models.model_shape", *_IMPORTS[framework]):
        importlib.import_module(name)


def serve(framework: str) -> None:
    """Runs the cases that come line by line, each rank in a child; answers with a line for each.

    A small run tells which modules are there when a model is wrapped; they are imported here, too. What is imported
    later stays the growth that it is.
    """
    imported(framework)
    with tempfile.TemporaryDirectory() as folder:
        found = children(SMALL[framework], Path(folder), None, 1.0, 0)[0]
    for name in found["modules"]:
        with contextlib.suppress(Exception):  # some are no files, such as `torch.ops`
            importlib.import_module(name)
    gc.collect()
    for line in sys.stdin:
        asked = json.loads(line)
        group = Path(asked["group"]) if asked["group"] else None
        answers = children(Case(**asked["case"]), Path(asked["folder"]), group, asked["share"], asked["port"])
        print(json.dumps(answers), flush=True)


def children(case: Case, folder: Path, group: Path | None, share: float, port: int) -> list[dict[str, Any]]:
    """The answer of each rank of a run, with the peak of its private pages; ``{"died": reason}`` of one that has none."""
    from elixir.hardware.process_memory import resident

    ranks = []
    for rank in range(case.ranks):
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))
            own_pages()
            start(case, rank, folder, group, share, port)
        ranks.append(child)
    ended: dict[int, int] = {}
    own_peaks = [0] * len(ranks)
    until = time.monotonic() + SECONDS
    while len(ended) < len(ranks):
        for rank, child in enumerate(ranks):
            now = resident(Path(f"/proc/{child}/status")) if child not in ended else None
            own_peaks[rank] = max(own_peaks[rank], 0 if now is None else now.own_bytes)
            if child not in ended and (found := os.waitpid(child, os.WNOHANG))[0]:
                ended[child] = found[1]
                if found[1]:
                    until = min(until, time.monotonic() + GRACE_SECONDS)  # the others wait for it
        if time.monotonic() > until:
            for child in ranks:
                if child not in ended:
                    os.killpg(child, signal.SIGKILL)
            until = math.inf
        time.sleep(LOOK_SECONDS)
    return [
        answer_of(folder, rank, ended[child]) | {"own_peak": own}
        for rank, (child, own) in enumerate(zip(ranks, own_peaks, strict=True))
    ]


def answer_of(folder: Path, rank: int, status: int) -> dict[str, Any]:
    """Reads the answer of a rank; without one, the reason why it ended."""
    path, verdict = folder / f"answer{rank}.json", folder / f"verdict{rank}"
    found = {"verdict": verdict.read_text() if verdict.exists() else ""}
    if path.exists():
        return found | json.loads(path.read_text())
    said = (folder / f"out{rank}").read_text(errors="replace").strip().splitlines() or [""]
    return found | {"died": f"status {os.waitstatus_to_exitcode(status)}: {said[-1][-200:]}"}


if __name__ == "__main__":
    serve(sys.argv[1])
