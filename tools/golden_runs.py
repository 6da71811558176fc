"""Hashes of tiny runs, compared between two commits on one machine: a change of the runtime's shape changes no bit.

    python tools/golden_runs.py COMMIT          this tree against COMMIT; status 1 if any run differs
    python tools/golden_runs.py COMMIT --only disk
    python tools/golden_runs.py --print         one JSON object of hashes of this tree

Each run makes `STEPS` steps and gives three hashes: of its losses, of its weights, and of its optimizer states. They
depend on the processor, so nothing is recorded: the other commit is checked out into a temporary folder and runs the
same cases there, by the script that it has, or by this one if it has none. Plans are written out here, chunk by chunk,
so that no search and no time model decides what runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, os.environ.get("ELIXIR_TREE", str(ROOT)))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

STEPS = 6
NEVER, ALWAYS, SOMETIMES = 1e9, 1e-6, 0.1
"""Limits of the norm. Losses of every other step are divided by `LESS`, which takes their norms below `SOMETIMES`."""
LESS = 1000.0

HOMES: dict[str, tuple[tuple[bool, str, str], ...]] = {
    "resident": ((True, "device", "device"),),
    "streamed": ((False, "host", "host"),),
    "states": ((True, "device", "host"),),
    "disk": ((False, "host", "disk"), (True, "device", "disk"), (False, "device", "disk"), (False, "host", "host")),
    "files": ((False, "files", "files"), (True, "device", "device")),
    "mixed": (
        (True, "device", "device"),
        (False, "host", "host"),
        (True, "device", "host"),
        (False, "device", "device"),
        (False, "device", "host"),
    ),
}
"""(resident, home of weights, home of states) of chunks in turn."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One tiny run."""

    family: str
    homes: str
    dtype: str = "float32"
    max_norm: float | None = None
    early: bool = False
    """Whether chunks with states on the host make new states during backward."""
    batches: int = 1
    moments: str = "float32"
    optimizers: int = 1
    kind: str = "AdamW"
    ranks: int = 1
    way: str = ""
    """One more thing that the run does, of `WAYS`."""
    loaded: str = ""
    """Homes of the plan under which the run goes on from its checkpoint, after half of its steps."""

    @property
    def name(self) -> str:
        default = {field.name: field.default for field in dataclasses.fields(self)}
        given = {key: value for key, value in dataclasses.asdict(self).items() if value != default[key]}
        limits = {NEVER: "never", ALWAYS: "always", SOMETIMES: "sometimes"}
        words = [str(given.pop(key)) for key in ("family", "homes")]
        if "max_norm" in given:
            given["clipped"] = limits[given.pop("max_norm")]
        return " ".join((*words, *(f"{key}={value}" for key, value in given.items())))


RUNS = (
    Run("opt", "resident"),
    Run("opt", "streamed", max_norm=SOMETIMES),
    Run("opt", "mixed", max_norm=ALWAYS),
    Run("opt", "disk", max_norm=SOMETIMES),
    Run("gpt2", "mixed", "bfloat16", max_norm=NEVER),
    Run("gpt2", "streamed", "bfloat16", max_norm=SOMETIMES, early=True),
    Run("gpt2", "disk", "bfloat16", max_norm=ALWAYS),
    Run("gpt2", "resident", "bfloat16"),
    Run("llama", "streamed", max_norm=NEVER, early=True),
    Run("llama", "mixed", max_norm=SOMETIMES, early=True),
    Run("llama", "states", max_norm=ALWAYS, early=True, batches=2),
    Run("llama", "mixed", "float16", max_norm=SOMETIMES),
    Run("llama", "disk", "float16", max_norm=NEVER),
    Run("llama", "streamed", "float16", early=True),
    Run("bert", "mixed", batches=3, max_norm=SOMETIMES),
    Run("bert", "streamed", batches=2, early=True, max_norm=NEVER),
    Run("bert", "disk", batches=2),
    Run("t5", "mixed", "bfloat16", moments="8bit", max_norm=SOMETIMES),
    Run("t5", "streamed", moments="bfloat16", early=True, max_norm=NEVER),
    Run("t5", "disk", "bfloat16", moments="8bit", max_norm=NEVER),
    Run("opt", "mixed", moments="8bit", early=True, max_norm=SOMETIMES),
    Run("mixtral", "streamed", max_norm=SOMETIMES),
    Run("mixtral", "mixed", "bfloat16", batches=2),
    Run("convolutions", "mixed", max_norm=SOMETIMES),
    Run("convolutions", "streamed", kind="SGD"),
    Run("opt", "mixed", optimizers=2, max_norm=SOMETIMES),
    Run("opt", "disk", "bfloat16", optimizers=2),
    Run("gpt2", "mixed", kind="Adagrad"),
    Run("gpt2", "streamed", kind="fused AdamW", early=True, max_norm=SOMETIMES),
    Run("gpt2", "mixed", "bfloat16", kind="HybridAdam", max_norm=SOMETIMES),
    Run("llama", "mixed", ranks=2, max_norm=SOMETIMES),
    Run("llama", "streamed", "bfloat16", ranks=2, early=True, max_norm=NEVER),
    Run("bert", "disk", ranks=2, batches=2, max_norm=SOMETIMES),
    Run("opt", "mixed", loaded="streamed", max_norm=SOMETIMES),
    Run("opt", "streamed", "bfloat16", loaded="disk", early=True, max_norm=SOMETIMES),
    Run("opt", "disk", "float16", loaded="mixed", moments="8bit"),
    Run("gpt2", "mixed", loaded="mixed", ranks=2, max_norm=NEVER),
    Run("llama", "streamed", way="units", max_norm=SOMETIMES),
    Run("llama", "mixed", way="compiled"),
    Run("gpt2", "streamed", batches=4, way="one pass", max_norm=SOMETIMES),
    Run("bert", "mixed", ranks=4, batches=2, way="replicas", max_norm=SOMETIMES),
    Run("opt", "files", way="frozen in files"),
    Run("llama", "streamed", way="moved activations"),
    Run("llama", "mixed", kind="Muon", max_norm=SOMETIMES),
    Run("llama", "mixed", way="together", early=True, max_norm=NEVER),
)

WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "units": {"split_number": 4, "allocate_factor": 0.7},
    "compiled": {"split_number": 4, "allocate_factor": 0.7},
    "one pass": {"accumulation": 4, "pass_size": 4},
    "replicas": {"replicas": 2},
    "frozen in files": {"frozen_weights": "files"},
    "moved activations": {},
    "together": {},
}
"""Further options of a plan: layers fetched as one, compiled layers, micro-batches that go through each layer
together, replicas, frozen weights that stay in their files, activations that wait on the host, a model with its frozen
reference."""


# --- models --------------------------------------------------------------------------------------------------------


def model_of(family: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A tiny model with weights by a fixed seed, and a batch for it."""
    torch.manual_seed(0)
    if family == "convolutions":
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(1024, 10)
        )
        return model.to(memory_format=torch.channels_last), {"input": torch.randn(4, 3, 12, 12)}
    import transformers as hf

    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    dropped = {"dropout": 0.0, "attention_dropout": 0.0}
    wide = {"intermediate_size": 96, "num_key_value_heads": 2}
    makers: dict[str, Callable[[], nn.Module]] = {
        "opt": lambda: hf.OPTForCausalLM(
            hf.OPTConfig(**sizes, ffn_dim=96, max_position_embeddings=32, word_embed_proj_dim=48, **dropped)
        ),
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=96, n_embd=48, n_layer=3, n_head=4, n_positions=32, resid_pdrop=0.1)
        ),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **wide)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**sizes, intermediate_size=96, max_position_embeddings=32)),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=96, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0
            )
        ),
        "mixtral": lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**sizes, **wide, num_local_experts=4, num_experts_per_tok=2)
        ),
    }
    ids = torch.randint(96, (2, 12))
    return makers[family]().train(), {"input_ids": ids, "labels": ids.clone()}


def model_in(run: Run) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and the batch of a run."""
    import elixir

    model, inp = model_of(run.family)
    if run.way == "together":
        reference = model_of(run.family)[0].requires_grad_(False)
        return elixir.together(policy=model, reference=reference), inp
    if run.way == "compiled":
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    elif run.way == "one pass":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif run.way == "frozen in files":
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() < 2)
    return model, inp


def loss_of(model: Any, inp: dict[str, torch.Tensor]) -> torch.Tensor:
    if hasattr(model, "reference"):
        with torch.no_grad():
            reference = model.reference(**inp).loss
        return (model.policy(**inp).loss - reference + 0.1) ** 2
    out = model(**inp)
    loss: torch.Tensor = out.square().mean() if isinstance(out, torch.Tensor) else out.loss
    return loss


# --- one run -------------------------------------------------------------------------------------------------------


def plan_of(run: Run, homes: str) -> Any:
    """The packing of a simple search, with homes by hand."""
    from elixir.search import optimal_search, simple_search

    def step(model: nn.Module, inp: dict[str, torch.Tensor]) -> None:
        loss_of(model, inp).backward()

    model, inp = model_in(run)
    if run.way == "one pass":
        search, options = optimal_search, {"device_memory": "1GiB", "host_memory": "8GiB", "placement": "cpu"}
    else:
        search, options = simple_search, {"shard_device": "cpu", "split_number": 8, "allocate_factor": 0.01}
    hardware = hardware_with_disk() if run.way == "frozen in files" else "cpu"
    found: Any = search(
        with_moved_activations(model, inp, step) if run.way == "moved activations" else model,
        run.ranks,
        unified_dtype=None if run.way == "moved activations" else getattr(torch, run.dtype),
        inp=inp,
        step_fn=step,
        hardware=hardware,
        optimizer_type=run.kind.split()[-1].replace("HybridAdam", "AdamW"),
        moments=run.moments,
        clipping=run.max_norm is not None,
        **options | WAYS[run.way],
    )
    plan = getattr(found, "plan", found)  # older trees give the plan alone
    chunks = []
    for index, chunk in enumerate(plan.chunks):
        resident, weights, states = HOMES[homes][index % len(HOMES[homes])]
        if weights == "files" and chunk.weight_home != "files":
            weights = states = "host"  # it has weights that are trained
        states = states if chunk.trainable else weights
        early: Any = run.early and chunk.trainable and states == "host"
        # Older trees have another field for it.
        update = {"update": "early" if early else "after_norm"} if hasattr(chunk, "update") else {"speculates": early}
        chunks.append(dataclasses.replace(chunk, resident=resident, weight_home=weights, state_home=states, **update))
    wish = "may_update_early" if hasattr(plan, "may_update_early") else "may_speculate"
    return dataclasses.replace(plan, chunks=tuple(chunks), accumulation=run.batches, **{wish: run.early})


def hardware_with_disk() -> Any:
    """A CPU whose disk is known."""
    from elixir.hardware import preset

    return dataclasses.replace(preset("cpu"), disk_read_bytes_per_s=2e9, disk_write_bytes_per_s=1e9)


def with_moved_activations(model: nn.Module, inp: dict[str, torch.Tensor], step: Callable[..., None]) -> Any:
    """The trace of a step whose layers keep on the host, in turns, all that they saved and what they were called with."""
    from elixir.access import activations as swapping
    from elixir.hardware import preset
    from elixir.step_trace import INPUT, SAVED, Result, StepShape, UnitActivations
    from elixir.tracer.trace import trace_step

    swapping.SMALLEST_BYTES = 16
    turns = ((None, (Result(SAVED, 0),)), ((), (Result(INPUT, 0),)), (None, ()))
    units = trace_step(model, inp, step, hardware=preset("cpu")).units
    choice = tuple(UnitActivations(unit.name, *turns[number % len(turns)]) for number, unit in enumerate(units))
    return trace_step(model, inp, step, hardware=preset("cpu"), shape=StepShape(activations=choice))


def wrapped(run: Run, homes: str, folder: Path) -> tuple[Any, list[Any]]:
    """The model under its plan, and its optimizers."""
    from elixir import ElixirModule, ElixirOptimizer, HybridAdam

    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "AdamW": torch.optim.AdamW,
        "fused AdamW": partial(torch.optim.AdamW, fused=True),
        "SGD": partial(torch.optim.SGD, momentum=0.9),
        "Adagrad": torch.optim.Adagrad,
        "HybridAdam": HybridAdam,
    }
    model, plan, options = model_in(run)[0], plan_of(run, homes), {"device": "cpu", "disk_folder": str(folder)}
    if run.way == "frozen in files":
        frozen = {name: each.detach() for name, each in model.named_parameters() if not each.requires_grad}
        save_file(frozen, folder / "frozen.safetensors")
        options |= {"weights": folder / "frozen.safetensors", "strict": False}
    torch.manual_seed(1)
    module = ElixirModule(model, plan, **options)
    parameters = [each for each in module.parameters() if each.requires_grad]
    if run.kind == "Muon":
        named, matrices = dict(module.module.named_parameters()), set(plan.matrices)
        made = [
            torch.optim.Muon([each for name, each in named.items() if name in matrices], lr=1e-2),
            torch.optim.AdamW([each for name, each in named.items() if name not in matrices], lr=1e-2),
        ]
    else:
        parts = [parameters[index :: run.optimizers] for index in range(run.optimizers)]
        made = [kinds[run.kind](part, lr=1e-2, weight_decay=0.01) for part in parts]
    return module, [ElixirOptimizer(module, each, max_norm=run.max_norm, initial_scale=2.0**18) for each in made]


def stepped(run: Run, module: Any, optimizers: list[Any], steps: range, rank: int) -> list[str]:
    """Losses of these steps.

    Raises:
        RuntimeError: they were not what the run is named after.
    """
    losses, early, clipped = [], 0, set()
    inp = model_of(run.family)[1]

    def micro_batch(step: int, model: Any, number: int) -> torch.Tensor:
        torch.manual_seed(1000 * step + 10 * number + rank)  # of dropout
        loss = loss_of(model, inp) / (LESS if step % 2 else 1.0)
        optimizers[0].backward(loss)
        return loss.detach()

    for step in steps:
        if run.way == "one pass":
            found = optimizers[0].accumulate(partial(micro_batch, step), range(run.batches))
        else:
            found = [micro_batch(step, module, number) for number in range(run.batches)]
        losses += [loss.item().hex() for loss in found]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        report = module.last_report
        early += report.early.made
        if run.max_norm is not None and report.grad_norm is not None and report.grad_norm.isfinite():
            clipped.add(bool(report.grad_norm > run.max_norm))
    expected = {NEVER: {False}, ALWAYS: {True}, SOMETIMES: {False, True}}
    if clipped and clipped != expected[run.max_norm or NEVER]:
        raise RuntimeError(f"{run.name}: steps were clipped or not as {clipped}")
    if run.early and not early:
        raise RuntimeError(f"{run.name}: no step made states early")
    return losses


def hashes(run: Run, rank: int, folder: Path) -> dict[str, str]:
    """Runs it; gives a hash of its losses, one of its weights and one of its states."""
    from elixir import load_checkpoint, save_checkpoint

    module, optimizers = wrapped(run, run.homes, folder / "states")
    half = STEPS // 2 if run.loaded else STEPS
    losses = stepped(run, module, optimizers, range(half), rank)
    if run.loaded:
        save_checkpoint(str(folder / "saved"), {"model": module, "optimizer": optimizers[0]}, wait=True)
        module.close()
        module, optimizers = wrapped(run, run.loaded, folder / "others")
        load_checkpoint(str(folder / "saved"), {"model": module, "optimizer": optimizers[0]})
        losses += stepped(run, module, optimizers, range(half, STEPS), rank)
    weights, states = module.state_dict(), [optimizer.state_dict() for optimizer in optimizers]
    module.close()
    return {name: digest(value) for name, value in (("losses", losses), ("weights", weights), ("states", states))}


def digest(value: Any) -> str:
    """A hash of numbers, texts and tensors in dicts and lists."""
    found = hashlib.sha256()
    for path, leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{path} {leaf.dtype} {tuple(leaf.shape)}".encode())
            found.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(f"{path} {leaf!r}".encode())
    return found.hexdigest()[:16]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from leaves(each, f"{path}/{index}")
    else:
        yield path, value


# --- all runs, here and there --------------------------------------------------------------------------------------


def rank_of_run(rank: int, run: Run, folder: str) -> None:
    """One rank of a run of several; writes its hashes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=run.ranks)
    found = hashes(run, rank, Path(folder))
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def all_hashes(only: str) -> dict[str, Any]:
    """Hashes of the runs whose names contain `only`; of several ranks, by rank."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for run in (run for run in RUNS if only in run.name):
        with tempfile.TemporaryDirectory(prefix="elixir-golden-") as folder:
            for name in ("states", "others"):
                Path(folder, name).mkdir()
            if run.ranks == 1:
                found[run.name] = hashes(run, 0, Path(folder))
            else:
                torch.multiprocessing.spawn(rank_of_run, (run, folder), nprocs=run.ranks)
                ranks = (Path(folder, f"{rank}.json").read_text(encoding="utf-8") for rank in range(run.ranks))
                found[run.name] = [json.loads(rank) for rank in ranks]
        print(f"{run.name}: {found[run.name]}", file=sys.stderr)
    return found


def run_by(script: Path, tree: Path, only: str) -> dict[str, Any]:
    """Hashes that the code in `tree` gives."""
    environment = os.environ | {"ELIXIR_TREE": str(tree), "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, str(script), "--print", "--only", only]
    done = subprocess.run(call, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compare(commit: str, only: str) -> int:
    with tempfile.TemporaryDirectory(prefix="elixir-golden-") as folder:
        there = Path(folder, "tree")
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", "-q", there, commit], check=True)
        try:
            name = Path(__file__).name
            theirs = next(
                (path for path in (there / "tools" / name, there / "benchmark" / name) if path.exists()), None
            )
            before = run_by(theirs or Path(__file__).resolve(), there, only)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", there], check=True)
    now = run_by(Path(__file__).resolve(), ROOT, only)
    both = [name for name in now if name in before]
    different = [name for name in both if now[name] != before[name]]
    for name in different:
        print(f"differs: {name}\n  {commit}: {before[name]}\n  here: {now[name]}")
    lost = sorted(set(before) - set(now))
    print(
        f"{len(both) - len(different)} of {len(both)} runs have the bits of {commit}; {len(now) - len(both)} are new here"
    )
    if lost:
        print("runs that are gone here:", ", ".join(lost))
    return 1 if different or lost or not both else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="to compare with")
    parser.add_argument("--only", default="", help="runs whose names contain this")
    parser.add_argument("--print", action="store_true", help="hashes of this tree as JSON")
    given = parser.parse_args()
    if given.print == (given.commit is not None):
        parser.error("give a commit to compare with, or --print")
    if given.print:
        print(json.dumps(all_hashes(given.only), indent=2))
        return 0
    return compare(given.commit, given.only)


if __name__ == "__main__":
    sys.exit(main())
