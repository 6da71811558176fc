"""Optimizers of many packages under a plan: the bits of plain PyTorch, refused by name, or wrong.

    python benchmark/optimizers.py [--only schedulefree timm ...] [--dry]

A small model takes twelve steps with each optimizer on the list, in plain PyTorch and under two plans: everything
streamed, and chunks of every kind. Under each plan it is

* identical: all losses and weights have plain PyTorch's bits;
* refused: wrapping raises an `InputError` that names the class;
* wrong: anything else, another error among them.

One row for each goes to `results/optimizers.csv`; ``--dry`` prints only. The packages are no dependencies of Elixir.
Install them with ``pip install --no-deps`` next to it:

    timm schedulefree prodigyopt prodigy-plus-schedule-free lion-pytorch adan-pytorch came-pytorch pytorch-optimizer
    torch-optimizer pytorch-ranger dadaptation sophia-opt adabelief-pytorch madgrad adam-mini adam-atan2-pytorch
    torch-optimi dog-optimizer grokadamw tabulate einops colorama

timm's optimizers are imported without the rest of timm, which needs torchvision.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import sys
import types
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from benchmark.common import Row, append_rows, conditions, print_table
from elixir.errors import InputError
from elixir.plan.plan import Plan
from elixir.search import simple_search
from elixir.wrapper import ElixirModule, ElixirOptimizer

STEPS = 12


@dataclass(frozen=True)
class Listed:
    """An optimizer on the list.

    Args:
        package: as it is installed.
        module: has the class.
        name: of the class.
        options: given to it.
    """

    package: str
    module: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over the weights of a model."""
        made: torch.optim.Optimizer = getattr(importlib.import_module(self.module), self.name)(
            list(model.parameters()), **self.options
        )
        return made


LIST = (
    Listed("torch", "torch.optim", "AdamW", {"lr": 1e-2}),
    Listed("torch", "torch.optim", "SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    Listed("torch", "torch.optim", "NAdam", {"lr": 1e-2}),
    Listed("torch", "torch.optim", "Adafactor", {"lr": 1e-2}),
    Listed("transformers", "transformers.optimization", "Adafactor", {"lr": 1e-2, "relative_step": False}),
    Listed("timm", "timm.optim", "AdafactorBigVision", {"lr": 1e-2}),
    Listed("timm", "timm.optim", "AdamP", {"lr": 1e-2}),
    Listed("timm", "timm.optim", "Adan", {"lr": 1e-2}),
    Listed("timm", "timm.optim", "Adopt", {"lr": 1e-2}),
    Listed("timm", "timm.optim", "Lamb", {"lr": 1e-2}),
    Listed("timm", "timm.optim", "LaProp", {"lr": 1e-2}),
    Listed("timm", "timm.optim", "MADGRAD", {"lr": 1e-2}),
    Listed("timm", "timm.optim", "Mars", {"lr": 1e-2}),
    Listed("timm", "timm.optim", "NAdamW", {"lr": 1e-2}),
    Listed("timm", "timm.optim", "RMSpropTF", {"lr": 1e-2, "momentum": 0.9}),
    Listed("timm", "timm.optim", "SGDP", {"lr": 1e-2, "momentum": 0.9}),
    Listed("schedulefree", "schedulefree", "AdamWScheduleFree", {"lr": 1e-2, "warmup_steps": 4}),
    Listed("schedulefree", "schedulefree", "SGDScheduleFree", {"lr": 1e-1, "weight_decay": 1e-2}),
    Listed("schedulefree", "schedulefree", "RAdamScheduleFree", {"lr": 1e-2}),
    Listed("prodigyopt", "prodigyopt", "Prodigy", {"weight_decay": 1e-2}),
    Listed("prodigy-plus-schedule-free", "prodigyplus", "ProdigyPlusScheduleFree"),
    Listed("dadaptation", "dadaptation", "DAdaptAdam"),
    Listed("dog-optimizer", "dog", "LDoG", {"reps_rel": 1e-3}),
    Listed("lion-pytorch", "lion_pytorch", "Lion", {"lr": 1e-3, "weight_decay": 1e-2}),
    Listed("adan-pytorch", "adan_pytorch", "Adan", {"lr": 1e-2}),
    Listed("came-pytorch", "came_pytorch", "CAME", {"lr": 1e-3}),
    Listed("adabelief-pytorch", "adabelief_pytorch", "AdaBelief", {"lr": 1e-2, "print_change_log": False}),
    Listed("madgrad", "madgrad", "MADGRAD", {"lr": 1e-2}),
    Listed("sophia-opt", "sophia_opt", "SophiaG", {"lr": 1e-3}),
    Listed("adam-atan2-pytorch", "adam_atan2_pytorch", "AdamAtan2", {"lr": 1e-2}),
    Listed("grokadamw", "grokadamw", "GrokAdamW", {"lr": 1e-2}),
    Listed("torch-optimi", "optimi", "StableAdamW", {"lr": 1e-2}),
    Listed("torch-optimizer", "torch_optimizer", "DiffGrad", {"lr": 1e-2}),
    Listed("torch-optimizer", "torch_optimizer", "QHAdam", {"lr": 1e-2}),
    Listed("torch-optimizer", "torch_optimizer", "Ranger", {"lr": 1e-2}),
    Listed("pytorch-optimizer", "pytorch_optimizer", "SOAP", {"lr": 1e-2}),
    Listed("pytorch-optimizer", "pytorch_optimizer", "AdEMAMix", {"lr": 1e-2}),
    Listed("pytorch-optimizer", "pytorch_optimizer", "ADOPT", {"lr": 1e-2}),
    Listed("pytorch-optimizer", "pytorch_optimizer", "Grams", {"lr": 1e-2}),
    Listed("pytorch-optimizer", "pytorch_optimizer", "Tiger", {"lr": 1e-3}),
)
"""Forty, chosen before any of them was made to work."""


class Net(nn.Module):
    """Weights of every kind of shape, of more rows than factored moments begin with; some before a normalization, so
    that their gradients are orthogonal to them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(150, 48)
        self.convolution = nn.Conv1d(48, 32, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(32)
        self.up = nn.Linear(32, 136)
        self.scale = nn.LayerNorm(136)
        self.wide = nn.Linear(136, 144)
        self.head = nn.Linear(144, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores of ten classes."""
        hidden = self.norm(self.convolution(self.embed(ids).transpose(1, 2))).relu().mean(2)
        scores: torch.Tensor = self.head(self.wide(self.scale(self.up(hidden)).tanh()).relu())
        return scores


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["ids"]), batch["ids"][:, 0] % 10)


def _batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {"ids": torch.randint(150, (8, 12), generator=generator)}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def _plans() -> dict[str, Plan]:
    """Everything streamed; chunks of every kind in turn."""
    streamed = simple_search(
        _model(), 1, inp=_batch(0), step_fn=lambda model, batch: _loss(model, batch).backward(),
        shard_device="cpu", split_number=8, allocate_factor=0.01, hardware="cpu",
    ).plan  # fmt: skip
    kinds: tuple[tuple[bool, Any, Any], ...] = (
        (True, "device", "device"), (False, "host", "host"), (True, "device", "host"), (False, "device", "host"),
    )  # fmt: skip
    chunks = []
    for index, chunk in enumerate(streamed.chunks):
        resident, weights, states = kinds[index % len(kinds)]
        chunks.append(replace(chunk, resident=resident, weight_home=weights, state_home=states))
    return {"streamed": streamed, "mixed": replace(streamed, chunks=tuple(chunks))}


def _train(model: nn.Module, optimizer: Any) -> list[Any]:
    """The losses of all steps, and the weights at the end."""
    seen: list[Any] = []
    torch.manual_seed(1)  # some draw numbers
    for step in range(STEPS):
        loss = _loss(model, _batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
    return [*seen, {name: value.detach().clone() for name, value in model.state_dict().items()}]


def _plain(listed: Listed) -> list[Any]:
    model = _model()
    optimizer = listed.make(model)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()  # such as a schedule-free one
    return _train(model, optimizer)


def _judged(listed: Listed, plan: Plan, expected: list[Any]) -> tuple[str, str]:
    """(outcome, why) under a plan."""
    model = _model()
    given = listed.make(model)
    module = ElixirModule(model, plan)
    try:
        try:
            optimizer = ElixirOptimizer(module, given)
        except InputError as error:
            return ("refused" if listed.name in str(error) else "wrong"), str(error)
        found = _train(module, optimizer)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(Exception):
            module.close()
    apart = max(_apart(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    return ("identical", "") if apart == 0 else ("wrong", f"losses or weights differ by {apart:.1e}")


def _apart(mine: Any, theirs: Any) -> float:
    if isinstance(mine, dict):
        return max(_apart(mine[name], theirs[name]) for name in theirs)
    if torch.equal(mine, theirs):
        return 0.0
    return max(float((mine.double() - theirs.double()).abs().max()), sys.float_info.min)


def _timm_alone() -> None:
    """Has `timm.optim` imported without timm's models, which need torchvision."""
    found = importlib.util.find_spec("timm")
    if found is None or found.submodule_search_locations is None:
        return
    package, models = types.ModuleType("timm"), types.ModuleType("timm.models")
    package.__path__ = list(found.submodule_search_locations)
    models.group_parameters = None  # type: ignore[attr-defined]  # of a function that is not called here
    sys.modules |= {"timm": package, "timm.models": models}


def main() -> None:
    """Judge those asked for, and append their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="packages or classes")
    parser.add_argument("--dry", action="store_true", help="append no rows")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    _timm_alone()
    plans, rows, said = _plans(), [], conditions()
    for listed in LIST:
        if options.only and not {listed.package, listed.name} & set(options.only):
            continue
        version = importlib.metadata.version(listed.package)
        row: Row = {"optimizer": f"{listed.module}.{listed.name}", "package": f"{listed.package} {version}"}
        with contextlib.redirect_stdout(io.StringIO()):  # some greet their user
            expected = _plain(listed)
            if any(_apart(*pair) for pair in zip(expected, _plain(listed), strict=True)):
                raise SystemExit(f"{row['optimizer']} differs from itself in plain PyTorch")
            outcomes = {mode: _judged(listed, plan, expected) for mode, plan in plans.items()}
        row |= {mode: outcome for mode, (outcome, _) in outcomes.items()}
        row["note"] = next((why for _, why in outcomes.values() if why), "").replace("\n", " ")[:300]
        rows.append({**row, **said})
        gc.collect()
    if not options.dry:
        append_rows("optimizers", rows)
    cells = [(row["optimizer"], *(row[mode] for mode in plans), row["note"][:100]) for row in rows]
    print_table("optimizers", ("optimizer", *plans, "note"), cells)
    for mode in plans:
        outcomes = [row[mode] for row in rows]
        print(mode, {kind: outcomes.count(kind) for kind in ("identical", "refused", "wrong")})


if __name__ == "__main__":
    main()
