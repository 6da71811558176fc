"""Adam's moments in fewer bits: a plan says so, its bytes are exact, and the run steps with them wherever they live."""

from __future__ import annotations

import copy
import functools
import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elixir.errors import InputError, InputTypeError
from elixir.hardware.profile import preset
from elixir.kernels import HybridAdam
from elixir.kernels.adam.adam_rule import AdamOptions
from elixir.kernels.adam.moments import make_moments, read_moments
from elixir.kernels.adam.step import adam_step
from elixir.models.step import default_step
from elixir.optimizer_states import LARGEST_HOST_PIECE_NUMEL, STEP_TEMPORARY_BYTES, moments_size
from elixir.plan.plan import Plan
from elixir.plan.process_need import LOOP_TENSORS
from elixir.search.replan import Observation, calibrated
from elixir.search.simulator.rates import Rates
from elixir.tracer.trace import trace_step
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from elixir.wrapper.step.rules import AdamRule
from tests.common import gpu, inside
from tests.common.parity import MODES, Case, case, distance, make_plan, rehomed, take_step

LOW = ("bfloat16", "8bit")
KINDS = ("float32", *LOW)
LR = 1e-3


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Two groups, so that neighbours in a shard, and in a block, are of different ones."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": other, "lr": LR / 2}], lr=LR)


class Run:
    """A model under a plan with so many bits of moments."""

    def __init__(self, it: Case, plan: Plan, make: Any = adamw, **options: Any) -> None:
        self.case = it
        self.module = ElixirModule(it.model, plan, device=gpu.DEVICE, debug=Debug(poison=True), **options)
        self.optimizer = ElixirOptimizer(self.module, make(self.module.module))

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.case.loss(self.module, self.case.inp)
            take_step(self.optimizer, loss)
            losses.append(loss.item())
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.module.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(value, other[name]) for name, value in one.items())


@functools.cache
def _losses_of_20_steps(moments: str) -> list[float]:
    it = case("opt")
    run = Run(it, make_plan(it, "mixed", moments=moments))
    losses = run.train(20)
    run.module.close()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOW)
def test_20_steps_end_near_those_of_float32(kind: str) -> None:
    losses = {moments: _losses_of_20_steps(moments) for moments in ("float32", kind)}
    assert losses["float32"][-1] < 0.9 * losses["float32"][0]
    for one, other in zip(losses["float32"], losses[kind], strict=True):
        assert abs(one - other) < (2e-3 if kind == "bfloat16" else 2e-2) * one
    assert losses["float32"][3:] != losses[kind][3:]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", LOW)
@pytest.mark.parametrize("family", ["opt", "bert"])  # bert has parameters without a gradient
def test_homes_change_no_bit_nor_does_moving_between_them(kind: str, family: str) -> None:
    plan = make_plan(case(family), "streamed", moments=kind)
    ends = []
    for start in MODES:
        run = Run(case(family), rehomed(plan, start))
        run.train(6)
        ends.append(run.weights())
        run.module.close()
    moved = Run(case(family), rehomed(plan, "streamed"))
    for mode in ("resident", "mixed", "streamed"):
        moved.train(2)
        moved.module.rehome(rehomed(plan, mode))
    ends.append(moved.weights())
    assert all(isinstance(part.rule, AdamRule) for part in inside.shards(moved.module))
    moved.module.close()
    for end in ends[1:]:
        if gpu.DEVICE == "cpu":
            assert same(ends[0], end)
        else:  # its kernels round otherwise than those of the host: up to 1e-5 on the pretended device
            assert distance([end[name] for name in ends[0]], list(ends[0].values())) < 1e-3


@pytest.mark.parametrize("kind", LOW)
@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.Adam(model.parameters(), lr=LR),
        lambda model: torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1),
    ],
)
def test_a_step_is_that_of_hybrid_adam_where_shards_are_parameters(kind: str, make: Any) -> None:
    """One large parameter fills its shard from the start, so blocks and rounding fall alike."""
    model = torch.nn.Linear(64, 40, bias=False)
    twin = copy.deepcopy(model)
    group = make(twin).param_groups[0]
    reference = HybridAdam(
        twin.parameters(), lr=LR, weight_decay=group["weight_decay"], adamw_mode=group["weight_decay"] > 0, moments=kind
    )
    it = Case(model, {"input": torch.randn(8, 64)}, lambda m, inp: m(**inp).square().mean())
    run = Run(it, make_plan(it, "streamed", split_number=1, moments=kind), make)
    for _ in range(4):
        run.train(1)
        there = gpu.there(copy.deepcopy(twin))  # the run's gradients are from its device, and stepped on the host
        it.loss(there, gpu.there(it.inp)).backward()
        twin.weight.grad = there.weight.grad.cpu()
        reference.step()
        reference.zero_grad()
    assert same(run.weights(), twin.state_dict())


@pytest.mark.sampled
@pytest.mark.parametrize("kind", LOW)
def test_other_kinds_of_moments_are_read_in_float32_on_the_way(kind: str) -> None:
    it = case("opt")
    low = make_plan(it, "streamed", moments=kind)
    plan = replace(low, moments="float32", state_size=moments_size("float32"))  # in the same packing
    run = Run(it, plan)
    run.train(5)
    run.module.settle()
    before = {}
    for part in inside.shards(run.module):
        for segment in part.segments:
            before[segment.name] = part.states.state_of(segment)["exp_avg"].flatten().clone()
    run.module.rehome(low)
    for part in inside.shards(run.module):
        assert isinstance(part.rule, AdamRule)
        for segment in part.segments:
            avg, _ = read_moments(part.states.moments(segment), segment.weights.numel(), segment.start)
            assert float(part.states.state_of(segment)["step"]) == 5
            error, scales = (avg - before[segment.name]).abs(), part.states.moments(segment).exp_avg_scale
            if scales is None:
                assert (error <= 2**-8 * before[segment.name].abs()).all()
                continue
            # Half the distance of two codes, for each of at most three segments that are put into a block in turn.
            places = torch.arange(segment.part.start, segment.part.stop) // 256
            assert (error <= 3 * 0.016 * scales[places]).all()
    near = run.train(2)
    run.module.rehome(plan)  # and back, into the user's own class
    near += run.train(2)
    run.module.close()
    still = Run(case("opt"), plan)
    far = still.train(9)[5:]
    still.module.close()
    assert all(abs(one - other) < 2e-2 * one for one, other in zip(near, far, strict=True))


def test_an_optimizer_that_was_told_otherwise_is_refused() -> None:
    it = case("opt", layers=1)
    plans = {kind: make_plan(it, "streamed", moments=kind) for kind in KINDS}

    def wrapped(kind: str, make: Any) -> None:
        it = case("opt", layers=1)
        module = ElixirModule(it.model, plans[kind], device=gpu.DEVICE)
        try:
            ElixirOptimizer(module, make(module.module))
        finally:
            module.close()

    for kind in KINDS:
        wrapped(kind, lambda model, kind=kind: HybridAdam(model.parameters(), moments=kind))
    with pytest.raises(InputError, match="make it with moments='8bit', or plan with moments='float32'"):
        wrapped("8bit", lambda model: HybridAdam(model.parameters()))
    with pytest.raises(InputError, match="make it with moments='float32', or plan with moments='bfloat16'"):
        wrapped("float32", lambda model: HybridAdam(model.parameters(), moments="bfloat16"))
    for make in (
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True),
    ):
        with pytest.raises(InputError, match="give one of these, or plan with moments='float32'"):
            wrapped("8bit", make)


def test_rehome_asks_the_optimizer_first() -> None:
    it = case("opt", layers=1)
    plan = make_plan(it, "streamed")
    run = Run(it, plan, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    run.train(1)
    with pytest.raises(InputError, match="moments"):
        run.module.rehome(replace(plan, optimizer="Adam", moments="8bit", state_size=moments_size("8bit")))
    run.train(1)  # nothing was taken from it


def test_searches_refuse_what_makes_no_sense() -> None:
    it = case("opt", layers=1)
    for options, error, words in (
        ({"moments": "8bits"}, InputError, "did you mean"),
        ({"moments": torch.bfloat16}, InputTypeError, "'bfloat16'"),
        ({"moments": "8bit", "optimizer_type": "SGD"}, InputError, "Adam and AdamW"),
    ):
        with pytest.raises(error, match=words):
            make_plan(it, "streamed", **options)
    wide = Case(torch.nn.Linear(4, 4).double(), {"input": torch.randn(2, 4).double()}, lambda m, i: m(**i).sum())
    with pytest.raises(InputError, match="float64"):
        make_plan(wide, "streamed", moments="8bit")


def test_reading_a_part_is_reading_the_whole() -> None:
    moments = make_moments(1000, "8bit")
    moments.exp_avg.copy_(torch.randint(-127, 128, (1024,)))
    moments.exp_avg_sq.copy_(torch.randint(0, 256, (1024,)))
    assert moments.exp_avg_scale is not None
    assert moments.exp_avg_sq_scale is not None
    moments.exp_avg_scale.uniform_()
    moments.exp_avg_sq_scale.uniform_()
    for start, numel in ((0, 1000), (3, 5), (250, 10), (256, 256), (511, 489)):
        for part, whole in zip(read_moments(moments, numel, start), read_moments(moments, 1000), strict=True):
            assert torch.equal(part, whole[start : start + numel])


def whole_and_parts(kind: str, numel: int, cuts: tuple[int, ...], steps: int) -> list[tuple[torch.Tensor, ...]]:
    """The same steps of one tensor, and of its parts between `cuts` with moments in common."""
    ends = []
    for edges in ((0, numel), (0, *cuts, numel)):
        generator = torch.Generator().manual_seed(0)
        master = torch.randn(numel, generator=generator)
        weights, moments = master.bfloat16(), make_moments(numel, kind)
        for step in range(1, steps + 1):
            gradient = torch.randn(numel, generator=generator)
            for start, stop in pairwise(edges):
                part = slice(start, stop)
                adam_step(gradient[part], master[part], weights[part], moments, AdamOptions(), step, at=start)
        ends.append((master, weights, *read_moments(moments, numel)))
    return ends


@pytest.mark.parametrize("kind", LOW)
def test_parts_of_whole_blocks_step_as_the_whole_does(kind: str) -> None:
    cuts = (256, 768) if kind == "8bit" else (100, 256, 700)
    one, other = whole_and_parts(kind, 1000, cuts, 5)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_parts_that_share_a_block_step_as_the_whole_does_on_average() -> None:
    """Rounding is other noise, without bias: errors of the shared blocks are not larger than those of the others."""
    numel, steps = 256 * 16, 10
    exact, _ = whole_and_parts("float32", numel, (), steps)
    whole, parts = whole_and_parts("8bit", numel, tuple(range(100, numel, 300)), steps)
    errors = [float((end[0] - exact[0]).norm()) for end in (whole, parts)]
    assert errors[1] < 1.5 * errors[0]
    drifts = [abs(float((end[0] - exact[0]).mean())) for end in (whole, parts)]
    assert drifts[1] < 4 * errors[1] / numel  # the standard deviation of a mean of so many, four times


def test_a_part_of_a_block_leaves_the_rest_of_it_alone() -> None:
    moments = make_moments(256, "8bit")
    master, gradient = torch.zeros(256), torch.linspace(-1, 1, 256)
    adam_step(gradient, master, None, moments, AdamOptions(), 1)
    before = [tensor.clone() for tensor in moments.tensors()]
    rest, middle = torch.cat([torch.arange(100), torch.arange(150, 256)]), slice(100, 150)
    adam_step(gradient[middle] * 1e-3, master[middle], None, moments, AdamOptions(), 2, at=100)
    avg, avg_scale, square, square_scale = moments.tensors()
    assert torch.equal(avg[rest], before[0][rest])
    assert torch.equal(square[rest], before[2][rest])
    assert torch.equal(avg_scale, before[1])  # its largest is not among the 50
    assert torch.equal(square_scale, before[3])
    assert not torch.equal(avg[middle], before[0][middle])
    with pytest.raises(InputError, match="at element 200"):
        adam_step(gradient[:100], master[:100], None, moments, AdamOptions(), 3, at=200)


class Living(TorchDispatchMode):
    """Counts the bytes of storages that operators make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in before:
                storage = value.untyped_storage()
                self.live_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(storage, self._gone, storage.nbytes())
        return result

    def _gone(self, nbytes: int) -> None:
        self.live_bytes -= nbytes


@pytest.mark.parametrize("kind", LOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_is_not_compiled_takes_the_memory_that_plans_count(
    kind: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELIXIR_COMPILE", "0")  # other tests of this process may have had the kernel compiled
    numel = 2**17 + 100
    master = torch.randn(numel)
    moments = make_moments(numel, kind)
    with Living() as living:
        adam_step(master.to(dtype), master, master.bfloat16(), moments, AdamOptions(weight_decay=0.1), 1, 0.5)
    made = (dtype != torch.float32) * 2 * numel + 2 * numel  # the arguments above
    taken = living.peak_bytes - made
    assert 0.8 * STEP_TEMPORARY_BYTES[kind] * numel < taken <= STEP_TEMPORARY_BYTES[kind] * numel + 2**16


def test_a_step_in_a_loop_takes_two_tensors_of_a_weight_and_one_of_that_before() -> None:
    weights = [torch.nn.Parameter(torch.randn(numel)) for numel in (1000, 5000, 2000)]
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()  # makes the states
    with Living() as living:
        optimizer.step()
    taken = living.peak_bytes - (1000 + LOOP_TENSORS * 5000) * 4
    assert 0 <= taken < 1000  # counts of steps


@pytest.mark.parametrize("kind", LOW)
def test_on_the_host_no_number_of_threads_makes_such_a_step_take_more(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setenv("ELIXIR_COMPILE", "0")
    master = torch.randn(3 * LARGEST_HOST_PIECE_NUMEL)
    moments = make_moments(master.numel(), kind)
    with Living() as living:
        adam_step(master, master, None, moments, AdamOptions(), 1)
    assert living.peak_bytes <= STEP_TEMPORARY_BYTES[kind] * LARGEST_HOST_PIECE_NUMEL + 2**16


def test_a_step_that_was_watched_is_corrected_in_the_plans_own_moments() -> None:
    """The corrected machine has the observed rate of the host's Adam for these moments."""
    it = case("opt")
    plan = make_plan(it, "streamed", moments="8bit")
    trace = trace_step(it.model, it.inp, default_step, hardware=preset("cpu"), optimizer=None)
    seen = Observation(1.0, {"fetch": 0.0, "offload": 0.0, "refresh": 0.0, "host_adam": 0.5}, 0.0, 0.0, 0.0, 1, 1)
    machine, _ = calibrated(trace, preset("cpu"), plan, seen)
    stepped = sum(chunk.numel for chunk in plan.chunks)
    rates = Rates(machine, "float32", 1, 1, moments="8bit")
    assert float(rates.host_adam(stepped)) == pytest.approx(0.5)
