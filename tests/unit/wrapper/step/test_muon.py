"""Muon over matrices next to AdamW over everything else: the numbers of plain PyTorch, in every home."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elixir.api import dry_run
from elixir.check import refusals
from elixir.chunk.memory import Arena
from elixir.errors import InputError
from elixir.kernels import HybridAdam
from elixir.optimizer_states import matrix_flops, matrix_room_bytes, optimizer_name, state_size
from elixir.plan.plan import Plan
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from tests.common import gpu, inside
from tests.common.on_disk import in_memory, on_disk
from tests.common.parity import MODES, ROUNDED, Case, assert_alike, case, distance, make_plan, report_of
from tests.common.tiny_models import FAMILIES

CASES = (*FAMILIES, "encoder")
QUICK = ("llama", "gpt2")


def optimizers(model: nn.Module, names: Any, **options: Any) -> list[torch.optim.Optimizer]:
    """Muon over the parameters with these names, AdamW over the others."""
    named = dict(model.named_parameters())
    matrices = [each for name, each in named.items() if name in set(names)]
    others = [each for name, each in named.items() if name not in set(names)]
    muon = torch.optim.Muon(matrices, lr=1e-2, **options)
    return [muon, torch.optim.AdamW(others, lr=1e-3)] if others else [muon]


def trained(
    case: Case, plan: Plan, *, steps: int = 3, accumulate: int = 1, clip: float = 0.0, **options: Any
) -> tuple[nn.Module, nn.Module, ElixirModule]:
    """The model in plain PyTorch and under the plan, after the same steps."""
    plain, streamed = gpu.there(copy.deepcopy(case.model)), copy.deepcopy(case.model)
    theirs = optimizers(plain, plan.matrices, **options)
    module = ElixirModule(streamed, plan)
    mine = [ElixirOptimizer(module, each) for each in optimizers(streamed, plan.matrices, **options)]
    for _ in range(steps):
        for _ in range(accumulate):
            case.loss(plain, gpu.there(case.inp)).backward()
            mine[0].backward(case.loss(module, case.inp))
        if clip:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
            module.clip_grad_norm_(clip)
        for each in (*theirs, *mine):
            each.step()
            each.zero_grad()
    return plain, streamed, module


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_weights_have_the_bits_of_torch(name: str, mode: str) -> None:
    given = case(name)
    plan = make_plan(given, mode, optimizer_type="Muon")
    assert plan.matrices
    assert plan.optimizer == "Muon + AdamW"
    plain, _, module = trained(given, plan)
    assert_alike(module, plain)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 4},
        {"momentum": 0.5, "eps": 1e-5, "ns_coefficients": (2.0, -1.5, 0.5)},
    ],
)
@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_options_are_those_of_the_class(mode: str, options: dict[str, Any]) -> None:
    given = case("llama")
    plain, _, module = trained(given, make_plan(given, mode, optimizer_type="Muon"), **options)
    assert_alike(module, plain)


@pytest.mark.parametrize("mode", MODES)
def test_accumulated_and_clipped_gradients_give_the_bits_of_torch(mode: str) -> None:
    given = case("llama")
    plan = make_plan(given, mode, optimizer_type="Muon")
    plain, _, module = trained(given, plan, accumulate=2, clip=0.5)
    assert_alike(module, plain)


def test_backwards_are_counted_anew_when_all_optimizers_have_cleared_gradients() -> None:
    """Replicas sum gradients in the last backward of a step, and norms are of its sums."""
    given = case("llama")
    plan = make_plan(given, "streamed", optimizer_type="Muon")
    module = ElixirModule(given.model, plan)
    first, second = (ElixirOptimizer(module, each) for each in optimizers(given.model, plan.matrices))
    gradients = inside.gradients(module)
    for _ in range(2):
        first.backward(given.loss(module, given.inp))
    first.zero_grad()
    assert gradients.backward_count == 2
    second.zero_grad()
    assert gradients.backward_count == 0


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_on_a_disk_have_the_bits_of_states_in_memory(dtype: str, tmp_path: Path) -> None:
    given = case("llama", dtype=getattr(torch, dtype))
    plan = make_plan(given, "mixed", optimizer_type="Muon")
    found = []
    for homes in (in_memory(plan), on_disk(plan, every=2)):
        model = copy.deepcopy(given.model)
        module = ElixirModule(model, homes, disk_folder=tmp_path, debug=Debug(poison=True))
        mine = [ElixirOptimizer(module, each) for each in optimizers(model, plan.matrices)]
        for _ in range(3):
            mine[0].backward(given.loss(module, given.inp))
            for each in mine:
                each.step()
                each.zero_grad()
        module.settle()
        states = mine[0].state_dict()["state"]
        report = report_of(module)
        if homes.uses_disk:
            assert any(chunk.matrices and chunk.state_home == "disk" for chunk in homes.chunks)
            assert not all(chunk.matrices for chunk in homes.chunks if chunk.state_home == "disk")
            for part in ("disk_read", "disk_peak", "host_to_device"):
                assert report.observed[part] == report.predicted[part], part
        weights = module.state_dict()
        found.append((weights, [state["momentum_buffer"] for state in states.values()]))
        module.close()
    (first, momenta), (second, others) = found
    assert all(torch.equal(first[name], value) for name, value in second.items())
    assert all(map(torch.equal, momenta, others))


class _Kept(torch.utils._python_dispatch.TorchDispatchMode):
    """Follows the bytes of storages that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not func.is_view and func.name() not in _IN_PLACE:
            storage = found.untyped_storage()
            self._alive[storage.data_ptr()] = (
                torch.multiprocessing.reductions.StorageWeakRef(storage),
                storage.nbytes(),
            )
        self.most = max(self.most, sum(size for ref, size in self._alive.values() if not ref.expired()))
        return found


_IN_PLACE = ("aten::copy_", "aten::lerp_.Scalar", "aten::mul_.Tensor", "aten::add_.Tensor", "aten::div_.Tensor",
             "aten::mm.out", "aten::addmm.out")  # fmt: skip


@pytest.mark.parametrize("shape", [(96, 40), (40, 96), (64, 64)])
def test_a_step_takes_no_more_than_room_and_temporaries(shape: tuple[int, int]) -> None:
    from elixir.kernels.muon import MuonRule

    numel, room_bytes = shape[0] * shape[1], matrix_room_bytes(*shape)
    room = torch.empty(room_bytes // 2, dtype=torch.bfloat16)
    options = torch.optim.Muon([nn.Parameter(torch.zeros(shape))]).param_groups[0]
    gradient, momentum, weights = torch.randn(numel), torch.zeros(numel), torch.randn(numel)
    with _Kept() as kept:
        MuonRule.direction(gradient, momentum, 1.0, options, room[:numel])
        found = MuonRule.orthogonal(room[:numel].view(shape), room, options)
        if found.is_contiguous():
            MuonRule.change(weights, found.view(-1), torch.Size(shape), options)
    assert kept.most <= 2 * 4 * numel


def test_flops_are_those_of_the_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    weights = nn.Parameter(torch.randn(96, 40))
    weights.grad = torch.randn(96, 40)
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon([weights]).step()
    assert counter.get_total_flops() == matrix_flops(96, 40) == matrix_flops(40, 96)


@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_moments_in_fewer_bits_are_those_of_adam(mode: str) -> None:
    given = case("llama")
    plan = make_plan(given, mode, optimizer_type="Muon", moments="8bit")
    plain, _, module = trained(given, plan, steps=1)
    assert_alike(module, plain, plan.matrices)


def test_moments_are_those_of_the_optimizer_next_to_it() -> None:
    given = case("llama")
    whole = [each for name, each in given.model.named_parameters() if each.ndim == 2 and "layers" in name]
    others = [each for each in given.model.parameters() if all(each is not one for one in whole)]
    other = HybridAdam(others, moments="8bit")
    plan = dry_run(given.model, [torch.optim.Muon(whole), other], inp=given.inp, host_budget="1GiB")
    assert (plan.optimizer, plan.moments) == ("Muon + AdamW", "8bit")
    assert not refusals(given.model, [torch.optim.Muon(whole), other], given.inp)


def test_states_are_those_of_torch_and_go_on_in_another_home() -> None:
    given = case("llama")
    plans = [make_plan(given, mode, optimizer_type="Muon") for mode in ("streamed", "mixed", "resident")]
    plain, streamed = gpu.there(copy.deepcopy(given.model)), copy.deepcopy(given.model)
    theirs = optimizers(plain, plans[0].matrices)
    module = ElixirModule(streamed, plans[0])
    mine = [ElixirOptimizer(module, each) for each in optimizers(streamed, plans[0].matrices)]
    assert not mine[0].state_dict()["state"]
    for plan in (*plans[1:], plans[0]):
        given.loss(plain, gpu.there(given.inp)).backward()
        mine[0].backward(given.loss(module, given.inp))
        for each in (*theirs, *mine):
            each.step()
            each.zero_grad()
        expected, found = theirs[0].state_dict()["state"], mine[0].state_dict()["state"]
        assert expected.keys() == found.keys()
        for number, state in expected.items():
            pair = state["momentum_buffer"].cpu(), found[number]["momentum_buffer"]
            assert torch.equal(*pair) or (not gpu.has_cpu_kernels() and distance([pair[0]], [pair[1]]) < ROUNDED)
        mine[0].load_state_dict(theirs[0].state_dict())
        module.rehome(plan)
    assert_alike(module, plain)
    assert isinstance(inside.arena(module), Arena)


def test_other_plans_ranks_homes_and_classes_are_refused() -> None:
    given = case("llama")
    with pytest.raises(InputError, match="norm.weight cannot be stepped by Muon"):
        make_plan(given, "streamed", optimizer_type="Muon", matrices=("model.norm.weight",))
    with pytest.raises(InputError, match="matrices need"):
        make_plan(given, "streamed", optimizer_type="AdamW", matrices=("lm_head.weight",))
    plan = make_plan(given, "streamed", optimizer_type="AdamW")
    module = ElixirModule(given.model, plan)
    matrices = [p for n, p in given.model.named_parameters() if n.endswith("q_proj.weight")]
    with pytest.raises(InputError, match="plan is for AdamW"):
        ElixirOptimizer(module, torch.optim.Muon(matrices))
    with pytest.raises(InputError, match="MyMuon is not elementwise"):
        ElixirOptimizer(module, type("MyMuon", (torch.optim.Muon,), {})(matrices))
    module.close()
    whole = make_plan(given, "streamed", optimizer_type="Muon")
    module = ElixirModule(given.model, whole)
    with pytest.raises(InputError, match=r"plan is for Muon \+ AdamW"):
        ElixirOptimizer(module, torch.optim.AdamW(given.model.parameters()))


def test_names_of_two_optimizers() -> None:
    assert optimizer_name("muon") == "Muon + AdamW"
    assert optimizer_name("MUON + sgd") == "Muon + SGD"
    assert optimizer_name("muon (for-loop)") == "Muon + AdamW (for-loop)"
    assert state_size("Muon + SGD") == state_size("SGD")
    for wrong in ("SGD + Muon", "Lamb + AdamW", "Muon + Muon"):
        with pytest.raises(InputError, match="unknown optimizer type"):
            optimizer_name(wrong)
