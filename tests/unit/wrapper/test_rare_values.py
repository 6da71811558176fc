"""Values that few programs have: outputs without numbers, options that are tensors, states that are None."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elixir.access import activations as swapping
from elixir.chunk.lanes import Emulation
from elixir.errors import ArtifactError, InputError
from elixir.optimizer_states import DIRECTION_BYTES
from elixir.search import optimal_search, simple_search
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from elixir.wrapper.assemble.chunks import compute_device
from elixir.wrapper.step.elementwise import same_options
from elixir.wrapper.step.rules import Inputs
from tests.common import inside
from tests.common.failing import Fault, net, plan_of, rehoming_for_good
from tests.common.one_pass import Stack, in_passes, plainly, plan_for, square_loss, vectors
from tests.common.parity import Case, case, make_plan
from tests.common.rank_threads import on_ranks, results
from tests.unit.wrapper.step.test_muon import optimizers as with_muon
from tests.unit.wrapper.test_one_pass_traps import Layer, check, seeded


class Talking(nn.Module):
    """Gives numbers of several kinds, and words."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.inner(x)
        return {"loss": y.square().mean(), "places": y.argmax(-1), "said": "words", "nothing": None, "count": 3}


def test_only_floating_outputs_are_widened() -> None:
    model, x = Talking(), torch.randn(2, 4)
    plan = simple_search(
        model, 1, inp={"x": x}, step_fn=lambda m, inp: m(**inp)["loss"].backward(), unified_dtype=torch.bfloat16
    ).plan
    module = ElixirModule(model, plan, device="cpu", output_fp32=True)
    found = module(x)
    assert found["loss"].dtype == torch.float32
    assert found["places"].dtype == torch.int64
    assert (found["said"], found["nothing"], found["count"]) == ("words", None, 3)


def test_a_device_is_the_one_that_was_named_or_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for given, found in ((None, 1), ("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)):
        assert compute_device(given) == torch.device("cuda", found)
    assert compute_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="'cuda:2' was asked for, but there are 2, from 'cuda:0' on"):
        compute_device("cuda:2")


def test_options_are_the_same_if_all_their_values_are() -> None:
    lr = torch.tensor(0.5)
    for one, other, same in (
        ({"lr": lr}, {"lr": torch.tensor(0.5)}, True),
        ({"lr": lr}, {"lr": torch.tensor(0.25)}, False),
        ({"lr": lr}, {"lr": 0.5}, True),
        ({"lr": 0.5, "betas": (0.9, 0.99)}, {"lr": 0.5, "betas": (0.9, 0.95)}, False),
        ({"lr": 0.5}, {"lr": 0.5, "eps": 0.1}, False),
    ):
        assert same_options(one, other) is same


def test_no_update_is_kept_whose_factor_nobody_has_read() -> None:
    """A factor on a device is compared with none: the thread that steps would wait for it."""
    read, unread = Inputs([], None, 1.0, [], 0, 0), Inputs([], None, torch.tensor(1.0), [], 0, 0)
    assert read.equal(Inputs([], None, 1.0, [], 0, 0))
    assert not read.equal(Inputs([], None, 1.0, [], 0, 1))
    assert not read.equal(Inputs([], None, 1.0, [{"lr": 1.0}], 0, 0))
    assert not read.equal(unread)
    assert not unread.equal(read)


def linear() -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Case(nn.Linear(8, 8), {"input": torch.ones(2, 8)}, lambda model, inp: model(**inp).square().mean())


@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_zeros_before_the_first_step_are_no_states(mode: str) -> None:
    it = linear()
    module = ElixirModule(it.model, make_plan(it, mode), device="cpu", use_fused_kernels=True)
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters()), init_step=True)
    assert optimizer.state_dict()["state"] == {}
    assert len(optimizer.state) == 0
    optimizer.backward(it.loss(module, it.inp))
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {1.0}


@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_states_that_are_none_are_loaded_as_none(mode: str) -> None:
    """SGD of torch saves a momentum that no step has made so."""
    it, momentum = linear(), torch.full((8,), 0.5)
    plain = copy.deepcopy(it.model)
    module = ElixirModule(it.model, make_plan(it, mode, optimizer_type="SGD"), device="cpu")
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    mine = ElixirOptimizer(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    state = theirs.state_dict() | {"state": {0: {"momentum_buffer": None}, 1: {"momentum_buffer": momentum}}}
    heard: list[Any] = []
    mine.register_state_dict_pre_hook(heard.append)
    for optimizer, model in ((theirs, plain), (mine, module)):
        optimizer.load_state_dict(copy.deepcopy(state))
        it.loss(model, it.inp).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = module.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in plain.state_dict().items())
    found, expected = (
        {at: state["momentum_buffer"] for at, state in each.state_dict()["state"].items()} for each in (mine, theirs)
    )
    assert all(torch.equal(value, found[at]) for at, value in expected.items())
    assert heard == [mine]


class Unbiased(Layer):
    """Normalises by what it gets, and keeps nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def test_norms_without_statistics_take_several_micro_batches() -> None:
    check(seeded(lambda: Stack([Unbiased(), Unbiased()])), count=2)


def test_as_many_threads_as_cores_are_no_matter(caplog: pytest.LogCaptureFixture) -> None:
    it = linear()
    module = ElixirModule(it.model, make_plan(it, "streamed"), device="cpu")
    cores = inside.host_share(module).all_cores
    with caplog.at_level(logging.WARNING):
        assert ElixirOptimizer(module, torch.optim.SGD(module.parameters()), host_threads=cores).host_threads == cores
    assert "host_threads=" not in caplog.text


def test_matrices_of_the_host_cross_an_emulated_link_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    it, speed = linear(), 1e9
    plan = make_plan(it, "streamed", optimizer_type="Muon")
    module = ElixirModule(it.model, plan, device="cpu", debug=Debug(emulation=Emulation(bytes_per_s=speed)))
    optimizers = [ElixirOptimizer(module, each) for each in with_muon(it.model, plan.matrices)]
    it.loss(module, it.inp).backward()
    module.settle()
    slept.clear()
    for each in optimizers:
        each.step()
    module.settle()
    assert plan.matrices == ("weight",)
    assert slept.count(2 * 8 * 8 * DIRECTION_BYTES / speed) == 1, slept


def test_a_model_that_can_move_neither_way_is_given_back(tmp_path: Path) -> None:
    rehoming_for_good(tmp_path, 0, 1, "zeros", ("disk", "memory"))


def test_ranks_with_different_options_step_nothing() -> None:
    def work(rank: int) -> list[str]:
        it = linear()
        plan = simple_search(it.model, 2, inp=it.inp, step_fn=lambda m, inp: it.loss(m, inp).backward()).plan
        module = ElixirModule(it.model, plan, device="cpu")
        optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=0.1))
        said = []
        for lr in (0.1 + rank * 1e-12, 0.1 + rank * 1e-6):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.backward(it.loss(module, it.inp))
            before = module.state_dict()
            try:
                optimizer.step()
            except InputError as error:
                said.append(str(error))
            said.append(str(all(torch.equal(each, before[name]) for name, each in module.state_dict().items())))
            module.zero_grad()
        module.close()
        return said

    for found in on_ranks(2, work):
        stepped, message, same = found
        assert (stepped, same) == ("False", "True")
        assert "lr of group 0 is 0.1 on rank 0, 0.100001 on rank 1; nothing was stepped" in message, message


def test_a_model_that_only_runs_forward_is_frozen_meanwhile() -> None:
    model = linear().model
    step = {"inp": {"input": torch.ones(2, 8)}, "step_fn": lambda m, inp: m(**inp), "hardware": "cpu"}
    module = ElixirModule(model, optimal_search(model, 1, optimizer_type=None, **step), device="cpu")  # type: ignore[arg-type]
    assert not any(each.requires_grad for each in model.parameters())
    assert module(torch.ones(2, 8)).grad_fn is None
    module.close()
    assert all(each.requires_grad for each in model.parameters())


def test_a_plan_of_one_process_says_what_differs_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ArtifactError, match="only in the plan") as refused:
        ElixirModule(nn.Linear(8, 8, bias=False), make_plan(linear(), "streamed"), device="cpu")
    assert "processes were started" not in str(refused.value)


def test_a_loaded_learning_rate_reaches_the_tensor_that_a_scheduler_holds() -> None:
    it, lr = linear(), torch.tensor(0.5)
    module = ElixirModule(it.model, make_plan(it, "streamed"), device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=lr, foreach=False))
    state = optimizer.state_dict()
    state["param_groups"][0] |= {"lr": torch.tensor(0.25), "weight_decay": 0.75}
    optimizer.load_state_dict(state)
    group = optimizer.param_groups[0]
    assert (group["lr"] is lr, lr.item(), group["weight_decay"]) == (True, 0.25, 0.75)


def test_masters_that_cannot_be_read_are_given_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, fault = net(), Fault("read")
    files = Debug(files=fault)
    module = ElixirModule(model, plan_of(1, "disk", "bfloat16"), device="cpu", disk_folder=tmp_path, debug=files)
    before = module.state_dict()
    with fault.armed(1, forever=True), caplog.at_level(logging.ERROR):
        after = module.state_dict()
    assert "weights are given as they are in memory, in bfloat16" in caplog.text
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert changed
    assert all(torch.equal(before[name].bfloat16().float(), after[name]) for name in changed)


def test_parts_of_a_gradient_of_two_backwards_are_added_up_in_a_pass() -> None:
    steps, make = vectors(2, steps=1), seeded(lambda: Stack([Layer(), Layer()]))

    def twice(model: nn.Module, backward: Any, batch: dict[str, Any]) -> None:
        out = model(batch["x"])
        backward(out.square().mean(), retain_graph=True)
        backward(out.mean() / 4)

    plain, model = make(), make()
    for batch in steps[0]:
        twice(plain, lambda loss, **options: loss.backward(**options), batch)
    plan = plan_for(model, steps[0][0], square_loss, accumulation=2)
    module = ElixirModule(model, plan, device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=1.0))
    optimizer.accumulate(lambda model, batch: twice(model, optimizer.backward, batch), steps[0])
    optimizer.step()
    found = module.state_dict()
    for name, each in plain.named_parameters():
        torch.testing.assert_close(found[name], each.detach() - each.grad)


class Buffered(nn.Module):
    """Has buffers of all kinds, which some forward may register anew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        for name in ("grown", "cache", "kind", "wide"):
            self.register_buffer(name, torch.zeros(2), persistent=name != "cache")
        self.wide = torch.zeros(1).expand(2)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(input)
        return found


def wrapped_buffers() -> tuple[Buffered, ElixirModule, dict[str, torch.Tensor]]:
    model, inp = Buffered(), {"input": torch.ones(2, 8)}
    plan = simple_search(model, 2, inp=inp, step_fn=lambda m, inp: m(**inp).sum().backward()).plan
    return model, ElixirModule(model, plan, device="cpu"), inp


def test_ranks_take_the_buffers_of_rank_0_also_those_that_no_one_can_write_to() -> None:
    def work(rank: int) -> dict[str, list[float]]:
        model, module, inp = wrapped_buffers()
        model.wide = torch.full((1,), 1.0 + rank).expand(2)
        with torch.inference_mode():
            model.kind = torch.full((2,), 1.0 + rank)
        module(**inp).sum().backward()
        module.zero_grad()
        assert model.kind.is_inference() == (rank == 0)
        found = {name: each.tolist() for name, each in model.named_buffers()}
        module.close()
        return found

    first, other = results(2, work)
    assert first == other
    assert first["wide"] == first["kind"] == [1.0, 1.0]


def grow(model: Buffered) -> None:
    model.grown = torch.ones(5)


def cast(model: Buffered) -> None:
    model.kind = torch.ones(2, dtype=torch.float64)


def add(model: Buffered) -> None:
    model.register_buffer("late", torch.ones(3))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("change", "name"), [(grow, "grown"), (cast, "kind"), (add, "late")])
def test_buffers_that_one_rank_has_otherwise_are_refused_by_name_on_all(
    change: Callable[[Buffered], None], name: str, rank: int
) -> None:
    def work(mine: int) -> None:
        model, module, inp = wrapped_buffers()
        if mine == rank:
            change(model)
        for call in (lambda: module(**inp), module.state_dict):
            with pytest.raises(InputError, match=f"^{name} differ between ranks 0 and 1 .*in attributes"):
                call()
        change(model)  # on all: the run goes on
        module(**inp).sum().backward()
        module.zero_grad()
        module.close()

    results(2, work)


class Sparse(nn.Module):
    """Has a buffer that is no part of a message."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("table", torch.eye(8).mul_(scale).to_sparse())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(input)
        return found


def test_ranks_exchange_buffers_that_are_sparse() -> None:
    def work(rank: int) -> torch.Tensor:
        model, inp = Sparse(3.0), {"input": torch.ones(2, 8)}
        plan = simple_search(model, 2, inp=inp, step_fn=lambda m, inp: m(**inp).sum().backward()).plan
        module = ElixirModule(model, plan, device="cpu")
        model.table = Sparse(5.0 + rank).table
        module(**inp)
        table: torch.Tensor = model.table
        module.close()
        return table.to_dense()

    for found in on_ranks(2, work):
        assert isinstance(found, torch.Tensor), found
        assert torch.equal(found, 5.0 * torch.eye(8))


def made_mkldnn(tensor: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = tensor.to_mkldnn()
    return made


@pytest.mark.parametrize("how", [made_mkldnn, torch.Tensor.to_sparse_csr])
def test_buffers_of_other_layouts_are_taken_or_refused_by_name(how: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, inp = Sparse(3.0), {"input": torch.ones(2, 8)}
    table = how(torch.eye(8))
    model.register_buffer("table", table)
    refused = pytest.raises(InputError, match=r"table is a torch.sparse_csr buffer.*to_sparse\(\)")
    with nullcontext() if how is made_mkldnn else refused:
        plan = simple_search(model, 1, inp=inp, step_fn=lambda m, inp: m(**inp).sum().backward()).plan
        module = ElixirModule(model, plan, device="cpu")
        module(**inp)
        assert model.table is table
        module.close()


class Noted(Layer):
    """Counts its calls."""

    calls = 0

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Nothing(torch.autograd.Function):
    """Has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


class HalfUsed(Stack):
    """Has a last layer whose output gets no gradient, unlike in the traced step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run(self.layers[0], self.first(x))
        rest: torch.Tensor = Nothing.apply(self.run(self.layers[1], x)).sum()  # type: ignore[no-untyped-call]
        found: torch.Tensor = self.last(x) + rest
        return found


def test_a_layer_whose_output_has_no_gradient_does_not_run_again_in_a_pass() -> None:
    made: list[HalfUsed] = []

    def half_used() -> nn.Module:
        made.append(HalfUsed([Noted(), Noted()]))
        return made[-1]

    steps, make = vectors(2, steps=1), seeded(half_used)
    plan = plan_for(Stack([Noted(), Noted()]), steps[0][0], square_loss, accumulation=2)
    assert plan.step.checkpointed == ("layers.0", "layers.1")
    assert in_passes(make, steps, plan, square_loss).same_as(plainly(make, steps, square_loss))
    assert [layer.calls for layer in made[0].layers] == [4, 2]


def test_layers_of_an_evaluation_inside_of_a_pass_take_no_turns() -> None:
    ran: list[tuple[str, bool]] = []

    class Watched(Layer):
        def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
            ran.append((threading.current_thread().name, torch.is_grad_enabled()))
            return super().forward(x, *more)

    def evaluating(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            model(batch["x"])
        return square_loss(model, batch)

    steps, make = vectors(2, steps=1), seeded(lambda: Stack([Watched(), Watched()]))
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=2)
    ran.clear()
    in_passes(make, steps, plan, evaluating)
    first, second = "micro-batch 0", "micro-batch 1"
    assert [name for name, trains in ran if not trains] == [first, first, second, second]
    assert [name for name, trains in ran if trains][:4] == [first, second, first, second]


class Casting(Layer):
    """Counts its calls, and the casts of its weight that they make."""

    calls = casts = 0

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with Casts(self):
            return super().forward(x, *more)


class Casts(TorchDispatchMode):
    def __init__(self, layer: Casting) -> None:
        super().__init__()
        self._layer = layer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._layer.casts += func is torch.ops.aten._to_copy.default and args[0].shape == (8, 8)
        return func(*args, **(kwargs or {}))


def test_no_cast_of_a_weight_outlasts_a_call_of_its_layer_in_a_pass() -> None:
    made: list[nn.Module] = []

    def twice_through(layers: nn.ModuleList) -> nn.Module:
        made.append(Stack([*layers, *layers]))
        return made[-1]

    steps, make = vectors(2, steps=1), seeded(lambda: twice_through(nn.ModuleList([Casting(), Casting()])))
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=2, home="cuda")
    in_passes(make, steps, plan, square_loss, around=lambda: torch.autocast("cpu", torch.bfloat16))
    layers = [each for each in made[-1].modules() if isinstance(each, Casting)]
    assert [(each.calls, each.casts) for each in layers] == [(8, 8)] * 2


class Entered(Stack):
    """Runs its layers first, so that the first one gets what the model gets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        found: torch.Tensor = self.last(self.first(x))
        return found


def test_a_leaf_that_enters_a_layer_of_a_pass_gets_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeping(leaves: list[torch.Tensor]) -> Callable[[nn.Module, dict[str, Any]], torch.Tensor]:
        def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
            leaves.append(batch["x"].clone().requires_grad_())
            return square_loss(model, {"x": leaves[-1]})

        return loss

    monkeypatch.setattr(swapping, "SMALLEST_BYTES", 1)
    steps, make = vectors(2, steps=1), seeded(lambda: Entered([Layer(), Layer()]))
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=2, on_host=True)
    ours, plain = list[torch.Tensor](), list[torch.Tensor]()
    found, expected = in_passes(make, steps, plan, keeping(ours)), plainly(make, steps, keeping(plain))
    assert found.same_as(expected)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


class Scaled(Stack):
    """Reads what has left its first layer once more, without a derivative."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = entered = self.run(self.layers[0], self.first(x))
        for layer in self.layers[1:]:
            x = self.run(layer, x)
        scale: torch.Tensor = Nothing.apply(entered).mean()  # type: ignore[no-untyped-call]
        found: torch.Tensor = self.last(x) * scale
        return found


def test_what_enters_a_layer_of_a_pass_may_get_no_gradient_elsewhere() -> None:
    check(seeded(lambda: Scaled([Layer(), Layer()])), count=2)


def test_a_closed_model_has_its_own_kernels_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="elixir")
    it = case("llama")
    module = ElixirModule(it.model, make_plan(it, "streamed"), device="cpu", use_fused_kernels=True)
    assert any("forward" in vars(each) for each in it.model.modules())
    assert [each for each in caplog.messages if each.startswith("fused kernels: ")]
    module.close()
    assert not any("forward" in vars(each) for each in it.model.modules())
