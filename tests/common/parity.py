"""A model run under a plan, compared with the same model in plain PyTorch, step by step, to the bit.

Each weight of the twin is stepped on the kind of device that the plan has it stepped on. Gradients that the host steps
are measured there as well as on the device, where they are summed in another order: once they are clipped on a GPU,
losses and weights are compared up to `ROUNDED`.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.models.quantised import flat
from elixir.models.step import default_input
from elixir.plan.chunk_plan import ChunkPlan
from elixir.plan.plan import Plan
from elixir.search import simple_search
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.account.step_report import StepReport
from elixir.wrapper.step.stepper import Stepper
from tests.common import gpu, inside
from tests.common.audit import audit
from tests.common.debug import debugged
from tests.common.tiny_models import FAMILIES, tiny
from tests.common.twins import on_host, step_alike

LossFn = Callable[[nn.Module, dict[str, Any]], torch.Tensor]
MODES = ("streamed", "mixed", "resident")
"""Every chunk in and out of the fewest blocks; chunks of every kind a plan can have; everything on the device."""

ROUNDED = 1e-2
"""Relative distance that steps may have whose gradients were clipped to norms that differ by rounding, after some steps.
A weight whose gradient is rounding error alone moves by up to the learning rate either way."""

NEVER = 1e6
"""No gradient of these models is as long: a limit from here on clips nothing."""

HOMES: dict[str, tuple[tuple[bool, str, str], ...]] = {  # resident, weight home, state home
    "resident": ((True, "device", "device"),),
    "streamed": ((False, "host", "host"),),
    "states": ((True, "device", "host"),),
    "device": ((False, "device", "device"),),
    "device, states": ((False, "device", "host"),),
}
"""Homes that the chunks of a plan have in turn."""
HOMES["mixed"] = tuple(home for homes in HOMES.values() for home in homes)


def report_of(module: ElixirModule) -> StepReport:
    """The report of the last step; there must be one."""
    assert module.last_report is not None
    return module.last_report


COUNTED = ("loads", "host_to_device", "device_to_host")


def assert_as_planned(module: ElixirModule, counted: Sequence[str] = COUNTED) -> StepReport:
    """Asserts that the last step fetched nothing late, and of what is `counted` took what was predicted. Returns its
    report."""
    report = report_of(module)
    assert report.demand_loads == report.deviations == 0
    assert {name: report.observed.get(name) for name in counted} == {
        name: report.predicted.get(name) for name in counted
    }
    return report


def take_step(optimizer: ElixirOptimizer, loss: torch.Tensor) -> None:
    """The backward of a loss and a step, after which there are no gradients."""
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class Case:
    """A model, a batch and how to get from one to a loss."""

    model: nn.Module
    inp: dict[str, Any]
    loss: LossFn


def hf_loss(model: nn.Module, inp: dict[str, Any]) -> torch.Tensor:
    """Loss of a Hugging Face model."""
    loss: torch.Tensor = model(**inp).loss
    return loss


def square_loss(model: nn.Module, inp: dict[str, Any]) -> torch.Tensor:
    """The loss of models that return one tensor."""
    output: torch.Tensor = model(**inp)
    return output.square().mean()


def case(name: str, checkpoint: Any = "none", **overrides: Any) -> Case:
    """A tiny Hugging Face model by family, or one of the modules below by name."""
    if name in FAMILIES:
        model = tiny(name, checkpoint=checkpoint, **overrides)
        return Case(model, default_input(model, batch=2, seq=None if name == "vit" else 24), hf_loss)
    if name == "recurrent" and gpu.pretended():
        pytest.skip("CUDA's fused cells have no kernel on the CPU")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _OTHERS[name]()


def make_plan(case: Case, mode: str, **options: Any) -> Plan:
    """A plan of one rank for `mode`; if one was made for such a case before, that one."""

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        case.loss(model, inp).backward()

    options = {"split_number": 8, "allocate_factor": 0.01, "hardware": "cpu"} | options
    where = "cuda" if mode == "resident" else "cpu"
    key = contents((case, where, options))
    plan = _PLANS.get(key) if key else None
    if plan is None:
        plan = simple_search(case.model, 1, inp=case.inp, step_fn=step, shard_device=where, **options).plan
        if key:
            _PLANS[key] = plan
    return mixed(plan) if mode == "mixed" else plan


_PLANS: dict[bytes, Plan] = {}
"""Traces by the contents of what they were made from. Most tests share few cases, and a trace takes longer than the
steps that follow."""


class _Contents(pickle.Pickler):
    """Writes objects with all that a trace can depend on: of weights the form, of other tensors the values as well."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._tensors: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        if (obj.is_leaf and obj.grad is not None) or obj._backward_hooks or obj._post_accumulate_grad_hooks:
            raise pickle.PicklingError("hooks may do anything")
        known = self._tensors.setdefault(id(obj), len(self._tensors))
        values = None if isinstance(obj, nn.Parameter) else obj.detach().cpu().tolist()
        return known, type(obj), obj.shape, obj.stride(), obj.dtype, obj.device, obj.requires_grad, values


def contents(value: Any) -> bytes | None:
    """All parts of `value` in bytes; None if one of them cannot be written, such as a lambda."""
    file = io.BytesIO()
    try:
        _Contents(file).dump(value)
    except Exception:  # each object refuses in its own way: PicklingError, AttributeError, RuntimeError, ours
        return None
    return file.getvalue()


def rehomed(plan: Plan, homes: str) -> Plan:
    """The same packing with other `HOMES`; what it predicts is no longer meant."""
    chunks: list[ChunkPlan] = []
    for index, chunk in enumerate(plan.chunks):
        resident, weights, states = HOMES[homes][index % len(HOMES[homes])]
        states = states if chunk.trainable else weights
        chunks.append(replace(chunk, resident=resident, weight_home=weights, state_home=states))  # type: ignore[arg-type]
    return replace(plan, chunks=tuple(chunks))


def mixed(plan: Plan) -> Plan:
    """The same packing with chunks of every kind in turn."""
    return rehomed(plan, "mixed")


class Pair:
    """One model under a plan and its twin in plain PyTorch, whose weights must be the same at the end of a ``with``.

    Args:
        case: its model is taken over; the twin is a copy, unless `plain` is given.
        plan: for the model.
        optimizer: makes the optimizer of each from named parameters; None for AdamW.
        after: build the optimizer before (False) or after wrapping.
        device: where both run; None for that of the test run, the CPU or with ``--cuda`` CUDA.
        alike: whether they have the same weights at the end.
    """

    def __init__(
        self,
        case: Case,
        plan: Plan,
        *,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        after: bool = True,
        max_norm: float | None = None,
        ema: float | None = None,
        plain: nn.Module | None = None,
        device: str | None = None,
        alike: bool = True,
        **options: Any,
    ) -> None:
        make = optimizer or adamw
        device = device or gpu.DEVICE
        case = replace(case, inp=gpu.there(case.inp, device))
        self.case, self.plan = case, plan
        self.plain = gpu.there(copy.deepcopy(case.model) if plain is None else plain, device)
        self.plain_optimizer = make(self.plain)
        built = None if after else make(case.model)
        self.module = ElixirModule(case.model, plan, device=device, **debugged(options, poison=True))
        step_alike(self.plain_optimizer, self.module, dict(self.plain.named_parameters()))
        self.max_norm = max_norm
        self.exact = True
        """Whether all steps so far must have given the same bits on both sides."""
        self.audited = True
        """Whether `train` ends with an audit of the counted memory."""
        self.alike = alike
        self._one_kind = device == "cpu" or gpu.pretended()
        self.optimizer = ElixirOptimizer(
            self.module, make(self.module.module) if built is None else built, max_norm=max_norm, ema=ema
        )

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            if failed is None and self.alike and not inside.engine_of(self.module).phase.closed:
                self.assert_same_weights()
        finally:
            self.module.close()

    def backward(self, inp: dict[str, Any] | None = None, scale: float = 1.0) -> float:
        """Forward and backward of both; their losses must be the same bits."""
        inp = self.case.inp if inp is None else gpu.there(inp, self.module.device)
        mine = self.case.loss(self.module, inp) * scale
        plain = self.case.loss(self.plain, inp) * scale
        assert self.agree(mine, plain), f"loss {mine.item()} is not {plain.item()}"
        self.optimizer.backward(mine)
        plain.backward()
        return mine.item()

    def step(self) -> None:
        """The optimizers' steps."""
        if self.max_norm:
            torch.nn.utils.clip_grad_norm_(self.plain.parameters(), self.max_norm)
        limits = [stepper.norm.limit for stepper in inside.steppers(self.module) if isinstance(stepper, Stepper)]
        clips = any(limit is not None and limit < NEVER for limit in limits)
        self.exact = self.exact and not (clips and self._sums_apart)
        self.optimizer.step()
        self.plain_optimizer.step()
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()

    @property
    def _sums_apart(self) -> bool:
        """Whether the norm may be summed on a CPU, and the twin's on a GPU."""
        return not self._one_kind and bool(on_host(self.module))

    def agree(self, mine: torch.Tensor, plain: torch.Tensor, *, are_norms: bool = False) -> bool:
        """Whether two values that both sides computed are the same bits, or close where no more is promised."""
        exact = self.exact and not (are_norms and self._sums_apart)
        return torch.equal(mine, plain) or (not exact and distance([mine], [plain]) < ROUNDED)

    def train(self, steps: int = 10, inp: dict[str, Any] | None = None) -> list[float]:
        """Trains `steps` whole steps; gives the losses."""
        losses = []
        for _ in range(steps):
            losses.append(self.backward(inp))
            self.step()
        if self.audited and steps:  # some classes make states at once, which count from the first step on
            audit(self.module)
        return losses

    def assert_same_weights(self) -> None:
        """Every weight and buffer has the same bits on both sides."""
        mine, plain = self.module.state_dict(), self.plain.state_dict()
        assert [(name, type(each)) for name, each in mine.items()] == [(n, type(each)) for n, each in plain.items()]
        mine, plain = (dict(part for each in state.items() for part in flat(*each)) for state in (mine, plain))
        if not self.exact:
            found = distance([mine[name] for name in plain], list(plain.values()))
            assert found < ROUNDED, f"weights are {found:g} apart"
            return
        different = [name for name in plain if not torch.equal(_bits(mine[name]), _bits(plain[name]))]
        assert not different, f"{len(different)} of {len(plain)} differ, first {different[:3]}"


def assert_alike(module: ElixirModule, plain: nn.Module, names: Container[str] | None = None) -> None:
    """Asserts that a model under a plan has the weights of one in plain PyTorch: the same bits, or close ones where a
    GPU computes what the CPU does for the other. Of some `names` only, if they are given."""
    mine, theirs = module.state_dict(), plain.state_dict()
    theirs = {name: theirs[name] for name in theirs if names is None or name in names}
    if gpu.has_cpu_kernels():
        different = [name for name, value in theirs.items() if not torch.equal(mine[name].cpu(), value.cpu())]
        assert not different, f"{len(different)} of {len(theirs)} differ, first {different[:3]}"
    else:
        found = distance([mine[name] for name in theirs], list(theirs.values()))
        assert found < ROUNDED, f"weights are {found:g} apart"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)


def distance(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Distance of all elements together, relative to the length of `theirs`."""
    lengths = [torch.cat([each.detach().cpu().double().flatten() for each in tensors]) for tensors in (mine, theirs)]
    return ((lengths[0] - lengths[1]).norm() / lengths[1].norm()).item()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over whatever is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


# --- models that are no Hugging Face family ------------------------------------------------------------------------


def _cnn() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    return Case(model, {"input": torch.randn(4, 3, 12, 12)}, square_loss)


def _laid_out() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=2, bias=False),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 8, 1),
        nn.Flatten(),
        nn.Linear(8 * 64, 48),
        nn.Tanh(),
        nn.Linear(48, 10),
    )
    model = model.to(memory_format=torch.channels_last)
    for linear in (model[7], model[9]):  # as code has it that shares a weight with a product by its transpose
        linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
    return Case(model, {"input": torch.randn(4, 3, 10, 10).to(memory_format=torch.channels_last)}, square_loss)


def _encoder() -> Case:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return Case(model, {"src": torch.randn(2, 6, 32)}, square_loss)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(32, 4, batch_first=True)
        self.second = nn.MultiheadAttention(32, 4, kdim=16, vdim=24, batch_first=True, add_bias_kv=True)

    def forward(self, x: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        x = self.first(x, x, x, need_weights=False)[0]
        return self.second(x, key, value)[0]


def _attention() -> Case:
    inp = {"x": torch.randn(2, 6, 32), "key": torch.randn(2, 5, 16), "value": torch.randn(2, 5, 24)}
    return Case(_Attention(), inp, square_loss)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(48, 16, batch_first=True)
        self.head = nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(self.embed(ids))
        out, _ = self.gru(out)
        return self.head(out)


def _recurrent() -> Case:
    return Case(_Recurrent(), {"ids": torch.randint(50, (2, 7))}, square_loss)


def _albert() -> Case:
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=96,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = AlbertForMaskedLM(config)
    return Case(model, default_input(model, batch=2, seq=24), hf_loss)


_OTHERS: dict[str, Callable[[], Case]] = {
    "cnn": _cnn,
    "laid out": _laid_out,
    "encoder": _encoder,
    "attention": _attention,
    "recurrent": _recurrent,
    "albert": _albert,
}
ALL = (*FAMILIES, *_OTHERS)
