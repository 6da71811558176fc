"""Known values are followed, unknown ones never guessed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmark.observe import observe_step
from elixir.errors import TraceError
from elixir.models.step import default_input
from elixir.tracer.trace import trace_step
from elixir.tracer.values.unknown_number import UnknownNumber
from tests.common.tiny_models import tiny
from tests.common.tracing import CPU, H200, cpu_trace, predicted_bytes, real_routing

HERE = __file__
TOKENS = torch.tensor([[5, 7, 0, 2], [3, 3, 1, 0]])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Steps are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def branches(decide: Callable[[Any, torch.Tensor], Any]) -> nn.Module:
    """Runs its second layer as many times as `decide` says, from the real input's values."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.layer = nn.Linear(8, 8)
            self.register_buffer("limit", torch.tensor([1, 2, 3]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.embed(x)
            for _ in range(int(decide(self, x))):
                y = self.layer(y)
            return y

    return Branches()


def runs(decide: Callable[[Any, torch.Tensor], Any], hardware: Any = CPU) -> int:
    trace = trace_step(branches(decide), {"x": TOKENS}, lambda m, i: m(i["x"]).sum().backward(), hardware=hardware)
    return sum(e.phase == "forward" and e.module == "layer" for e in trace.accesses)


class Routes(nn.Module):
    """Each token to its best expert, by `choose`; experts are told by name, as in Switch Transformers."""

    def __init__(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleDict({f"expert_{index}": nn.Linear(8, 8) for index in range(4)})
        self.choose = choose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.choose(self.router(x))
        hit = nn.functional.one_hot(chosen, 4).sum(0).nonzero()
        return sum(self.experts[f"expert_{index[0]}"](x[chosen == index[0]]).sum() for index in hit)  # type: ignore[return-value]


CHOICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "argmax": lambda s: s.argmax(-1),
    "max": lambda s: s.softmax(-1).max(dim=-1)[1],
    "topk": lambda s: s.topk(1)[1].squeeze(-1),
    "sort": lambda s: s.sort(dim=-1, descending=True)[1][:, 0],
    "argsort": lambda s: s.argsort(-1, descending=True)[:, 0],
    "multinomial": lambda s: s.softmax(-1).multinomial(1).squeeze(-1),
}


@pytest.mark.parametrize("name", CHOICES)
def test_experts_may_be_chosen_by_any_operator_that_ranks(name: str) -> None:
    trace = cpu_trace(Routes(CHOICES[name]), {"x": torch.randn(16, 8)}, lambda m, i: m(i["x"]).backward())
    assert all(p.grad_access is not None for p in trace.parameters if p.name.startswith("experts"))
    (said,) = trace.assumptions
    assert said.startswith("balanced routing of tokens over 4 experts")


@pytest.mark.parametrize("name", ["argmax", "max", "topk", "sort"])
def test_recorded_choices_give_the_real_peak(name: str) -> None:
    torch.manual_seed(3)
    model, inp = Routes(CHOICES[name]), {"x": torch.randn(256, 8)}
    step = lambda m, i: m(i["x"]).backward()  # noqa: E731
    predicted = predicted_bytes(model, inp, step, routing=real_routing(model, inp, step))
    assert abs(predicted - observe_step(model, inp, step).peak_bytes) <= 64


UNKNOWN: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "bool": lambda m, x: bool(m.embed(x).sum() > 0),
    "if": lambda m, x: 1 if m.layer.weight.max() > 0 else 0,
    "compared number": lambda m, x: m.embed(x).sum().item() > 0.5,
    "size": lambda m, x: torch.zeros(m.embed(x).argmax().item()).numel(),
    "range": lambda m, x: len(range(m.embed(x).argmax().item())),
    "float": lambda m, x: float(m.embed(x).sum()) > 1,
    "mask count": lambda m, x: (m.embed(x) > 0).sum(),
    "nonzero": lambda m, x: len(torch.nonzero(m.embed(x) > 0)),
    "picked by a mask": lambda m, x: len(m.embed(x)[m.embed(x) > 0]),
    "random": lambda m, x: torch.randint(0, 2, (1,), device=x.device) + 0,
    "known overwritten by random": lambda m, x: x.clone().random_(3).sum(),
    "known overwritten by unknown": lambda m, x: torch.zeros(1, device=x.device).copy_(m.layer.bias[:1]).sum(),
    "equal": lambda m, x: torch.equal(m.embed(x), m.embed(x)),
}


@pytest.mark.parametrize("hardware", [CPU, H200], ids=["cpu", "h200"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_decision_on_what_follows_from_weights_names_the_line(name: str, hardware: Any) -> None:
    decide = UNKNOWN[name]
    with pytest.raises(TraceError) as caught:
        runs(decide, hardware)
    file, _, rest = str(caught.value).partition(":")
    assert file == HERE
    first = decide.__code__.co_firstlineno
    loop = branches(decide).forward.__code__.co_firstlineno + 2
    assert int(rest.partition(":")[0]) in (first, loop), str(caught.value)
    assert not isinstance(torch.zeros(1).item(), torch.SymFloat)


def test_which_of_many_numbers_are_finite_is_not_known() -> None:
    with pytest.raises(TraceError, match="decides by .* only, and the training loop may keep its checks"):
        cpu_trace(
            nn.Linear(4, 4), {"x": torch.ones(2, 4)}, lambda m, i: m(i["x"])[torch.isfinite(m(i["x"]))].sum().backward()
        )


@pytest.mark.parametrize("convert", [float, math.isfinite, lambda loss: round(float(loss), 3)])
def test_a_number_that_python_would_take_for_known_says_what_to_write(convert: Callable[[Any], Any]) -> None:
    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        loss = model(inp["x"]).sum()
        round(loss.item(), 3)
        convert(loss.detach())

    with pytest.raises(TraceError, match=r"Write loss\.item\(\) .* to record it, torch\.isfinite\(loss\) to check it"):
        cpu_trace(nn.Linear(4, 4), {"x": torch.ones(2, 4)}, step)


def test_classes_of_torch_are_as_before_when_a_step_raises() -> None:
    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        raise ValueError("no")

    before = {cls: dict(vars(cls)) for cls in (torch.SymFloat, torch.SymInt, torch.Tensor)}
    functions = (
        torch.get_rng_state,
        torch.tensor,
        torch.as_tensor,
        torch.Tensor.__getitem__,
        torch.Tensor.__setitem__,
        torch.Tensor.__format__,
    )
    with pytest.raises(TraceError, match="ValueError: no"):
        cpu_trace(nn.Linear(4, 4), {"x": torch.ones(2, 4)}, step)
    for cls, names in before.items():
        assert dict(vars(cls)) == names, cls
    now = (
        torch.get_rng_state,
        torch.tensor,
        torch.as_tensor,
        torch.Tensor.__getitem__,
        torch.Tensor.__setitem__,
        torch.Tensor.__format__,
    )
    assert now == functions


def experts(**options: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = tiny("mixtral", experts_implementation="eager", **options)
    return model, default_input(model, batch=2, seq=32)


def test_an_unknown_number_has_no_special_methods_of_others() -> None:
    """`copy`, `numpy` and torch ask an object for such before they treat it as one of theirs."""
    number = UnknownNumber(int, "n")
    assert not any(hasattr(number, name) for name in ("__array__", "__deepcopy__", "_sympy_"))
    assert str(copy.copy(number)) == "n"


def rms_norm_decides(model: nn.Module, inp: dict[Any, Any]) -> None:
    normed = torch.nn.functional.rms_norm(model(inp["x"]), (8,))
    (normed * 2 if normed.max() > 0 else normed).sum().backward()


@pytest.mark.parametrize("hardware", [CPU, H200], ids=["cpu", "h200"])
def test_what_a_replaced_kernel_makes_is_not_known(hardware: Any) -> None:
    with pytest.raises(TraceError, match="the code decides by a number that follows from weights"):
        trace_step(nn.Linear(4, 8), {"x": torch.randn(2, 4)}, rms_norm_decides, hardware=hardware)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    if dist.is_initialized():
        pytest.skip("this process has a group already")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_is_gathered_from_ranks_is_what_this_rank_has(one_rank: None) -> None:
    """A trainer counts valid tokens over all ranks, and divides by them if there are any."""

    def step(model: nn.Module, inp: dict[Any, Any]) -> None:
        mine = (inp["ids"] >= 0).sum()
        listed, at_once = [torch.empty_like(mine)], torch.empty(1, dtype=mine.dtype, device=mine.device)
        dist.all_gather(listed, mine)
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        gather(at_once, mine)
        assert [int(listed[0]), int(at_once[0])] == [3, 3]
        gather(several := torch.empty_like(inp["ids"]), inp["ids"])
        assert int(several.sum()) == 5
        on_host = [torch.zeros(2)]
        dist.all_gather(on_host, torch.ones(2))
        dist.all_reduce(on_host[0])
        assert on_host[0].tolist() == [1, 1]
        model(inp["x"]).sum().backward()

    inp = {"x": torch.randn(2, 4), "ids": torch.tensor([1, 2, -1, 3])}
    for hardware in (CPU, H200):
        trace_step(nn.Linear(4, 8), inp, step, hardware=hardware)

    def decides(model: nn.Module, inp: dict[Any, Any]) -> None:
        total = model(inp["x"]).sum()
        gathered = [torch.empty_like(total)]
        dist.all_gather(gathered, total.detach())
        (total if gathered[0] > 0 else 2 * total).backward()

    with pytest.raises(TraceError, match="the code decides by a number"):
        trace_step(nn.Linear(4, 8), inp, decides, hardware=CPU)


def test_nothing_is_decided_by_an_empty_tensor() -> None:
    def step(model: nn.Module, inp: dict[Any, Any]) -> None:
        empty = torch.empty(4, device=inp["x"].device).mul_(2)
        (model(inp["x"]).sum() * (2 if empty.sum() > 0 else 1)).backward()

    with pytest.raises(TraceError, match="the code decides by a number"):
        trace_step(nn.Linear(4, 8), {"x": torch.randn(2, 4)}, step, hardware=CPU)
