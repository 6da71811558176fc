"""Refusals of a smaller machine are known beforehand, and finding them changes nothing."""

from __future__ import annotations

import json
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir
from elixir.check import Refusal, refusals
from elixir.errors import InputError, InputTypeError
from elixir.models.step import default_input
from elixir.torch_private import MEMORY_MOVES
from elixir.wrapper import ElixirModule
from tests.common.command_line import run
from tests.common.tiny_models import tiny

INP = {"x": torch.ones(4, 8)}
ROOMY = {"device_memory": "1GiB", "host_budget": "1GiB", "placement": "cuda"}


class Net(nn.Module):
    """Two layers with statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.drop, self.head = (
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.2),
            nn.Linear(8, 4),
        )
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.body(x))))


class ByArray(Net):
    """Reads the memory of a weight after the layer that needs it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            self.kept = self.kept if self.kept is not None else self.body.weight.detach().numpy()
            x = x * float(self.kept.sum())
        return super().forward(x)


class Alone(nn.Module):
    """A `ByArray` with one weight, whose block no other takes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8, bias=False)
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 1.0
        if not x.is_meta:
            factor = 1.0 if self.kept is None else float(self.kept.sum())
            self.kept = self.body.weight.detach().numpy()
        return self.body(x) * factor


class Decides(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x * 2 if x.sum().item() > 1e9 else x


def step(model: nn.Module, inp: dict[str, Any]) -> None:
    model(inp["x"]).square().mean().backward()


def outside(model: nn.Module, inp: dict[str, Any]) -> None:
    loss = model(inp["x"]).square().mean()
    model.head.weight.data_ptr()  # type: ignore[operator, union-attr]
    loss.backward()


def made(
    kind: Callable[[], nn.Module] = Net, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    return model, optimizer(model.parameters())


def kept_memory(says: str) -> list[tuple[str, str]]:
    """The refusal of a program that keeps the memory of a weight: memory that cannot move (before torch 2.13) is given
    up, which torch refuses."""
    return [("numbers", says)] if MEMORY_MOVES else [("step", "not resizable")]


FOUND: dict[str, tuple[Callable[[], Any], Callable[..., None], list[tuple[str, str]]]] = {
    "nothing": (made, step, []),
    "a weight outside of the forward": (made, outside, [("step", "head.weight outside of the model's forward")]),
    "a decision": (lambda: made(Decides), step, [("trace", "decides by a number")]),
    "a decision, and a weight": (
        lambda: made(Decides), outside, [("trace", "decides by a number"), ("step", "outside of the model's forward")]
    ),
    "an optimizer": (lambda: made(Net, torch.optim.Adafactor), step, [("optimizer", "not elementwise")]),
    "an optimizer, and a weight": (
        lambda: made(Net, torch.optim.Adafactor), outside, [("optimizer", "not elementwise"), ("step", "head.weight")]
    ),
    "memory of a weight": (lambda: made(ByArray), step, kept_memory("not those of plain PyTorch")),
    "memory of the only weight": (lambda: made(Alone), step, kept_memory("1 of 1 weights and buffers are not those")),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_the_first_refusal_of_each_part_is_found(name: str) -> None:
    make, program, expected = FOUND[name]
    found = refusals(*make(), INP, program)
    assert [each.part for each in found] == [part for part, _ in expected]
    for refusal, (_, says) in zip(found, expected, strict=True):
        assert says in refusal.sentence
        assert refusal.part in ("optimizer", "numbers") or f"{__file__}:" in str(refusal)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_library_model_on_meta_is_checked_with_made_up_weights(dtype: torch.dtype | None) -> None:
    model = tiny("llama").to("meta")
    optimizer = elixir.HybridAdam(model.parameters())
    assert refusals(model, optimizer, default_input(model, batch=2, seq=8), dtype=dtype) == ()
    assert all(parameter.is_meta for parameter in model.parameters())


def test_wrap_refuses_what_passes_on_a_large_machine_only_if_it_is_strict() -> None:
    model, optimizer = made()
    with pytest.raises(
        InputError, match=r"strict=True: .*would refuse.*: step: .*head\.weight outside of the model's forward"
    ):
        elixir.wrap(model, optimizer, inp=INP, step_fn=outside, strict=True, **ROOMY)
    with pytest.raises(InputError, match="strict=True"):
        elixir.api.dry_run(model, optimizer, inp=INP, step_fn=outside, strict=True, **ROOMY)
    plain, plain_optimizer = made()
    on_the_cpu = {"hardware": "cpu", **ROOMY}
    wrapped, wrapped_optimizer = elixir.wrap(model, optimizer, inp=INP, step_fn=step, strict=True, **on_the_cpu)
    assert isinstance(wrapped, ElixirModule)
    for module, each in ((plain, plain_optimizer), (wrapped, wrapped_optimizer)):
        torch.manual_seed(1)
        step(module, INP)
        each.step()
    wrapped.close()
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_step_that_fails_by_itself_is_no_refusal() -> None:
    def broken(model: nn.Module, inp: dict[str, Any]) -> None:
        model(inp["y"])

    with pytest.raises(InputError, match=r"test_check\.py:\d+: the step fails in plain PyTorch on the CPU \(KeyError"):
        refusals(*made(), INP, broken)


@pytest.mark.parametrize(("inp", "step_fn", "name"), [(step, INP, "step_fn"), (INP, 5, "step_fn")])
def test_arguments_of_a_wrong_type_are_named(inp: Any, step_fn: Any, name: str) -> None:
    with pytest.raises(InputTypeError, match=f"^{name} must be"):
        refusals(*made(), inp, step_fn)


def test_strict_is_a_question_of_yes_or_no(tmp_path: Path) -> None:
    model, optimizer = made()
    with pytest.raises(InputTypeError, match="strict must be"):
        elixir.wrap(model, optimizer, inp=INP, step_fn=step, strict="yes")
    plan = elixir.api.dry_run(model, optimizer, inp=INP, step_fn=step, **ROOMY)
    with pytest.raises(InputError, match="elixir check"):
        elixir.wrap(model, optimizer, plan=plan, strict=True)


PROGRAM = """
import torch
from torch import nn

def made(step):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    print("built")
    return model, torch.optim.AdamW(model.parameters()), {"x": torch.ones(2, 8)}, step

def good(model, inp):
    print("step")
    model(inp["x"]).sum().backward()

def bad(model, inp):
    (model(inp["x"]).sum() + getattr(model, "1").weight.data_ptr()).backward()

def passes(): return made(good)
def refused(): return made(bad)
def three(): return made(good)[:3]
"""


def test_the_command_prints_what_is_refused_and_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"program_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "check", f"{name}:passes")
    assert (status, out) == (0, "nothing is refused\n")
    assert "step" in err
    status, out, _ = run(capsys, "check", f"{name}:refused")
    assert status == 1
    assert out.startswith("step: ")
    assert f"{name}.py:15" in out
    assert "1.weight outside of the model's forward" in out
    status, out, _ = run(capsys, "check", f"{name}:refused", "--json")
    assert status == 1
    (found,) = json.loads(out)["refused"]
    assert Refusal(**found).place.endswith(f"{name}.py:15")
    status, out, err = run(capsys, "check", f"{name}:three")
    assert (status, out) == (2, "")
    assert "must return (model, optimizer, batch, step_fn), got tuple of 3" in err
    status, _, err = run(capsys, "check", f"{name}.py:passes")
    assert status == 2
    assert "names a file; expected module:function" in err


def test_only_a_model_and_optimizers_over_it_are_checked() -> None:
    model: Any = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for given, over, error, says in (
        ("model", optimizer, InputTypeError, "model must be a plain nn.Module, got str"),
        (model, (), InputTypeError, "optimizer must be a torch optimizer, got tuple"),
        (model, [3], InputTypeError, "optimizer must be a torch optimizer, got int"),
        (nn.Linear(2, 2), optimizer, InputError, "2 parameters of the optimizer are not the model's; make it over"),
    ):
        with pytest.raises(error, match=says):
            refusals(given, over)
    model.lock = threading.Lock()
    with pytest.raises(InputError, match=r"cannot be copied to be checked \(TypeError: .*; keep locks, generators and"):
        refusals(
            model, optimizer, inp={"input": torch.ones(1, 2)}, step_fn=lambda model, inp: model(**inp).sum().backward()
        )


def test_a_function_that_holds_the_model_itself_is_refused_and_leaves_no_gradient() -> None:
    model = Net()
    model.kept = lambda x: model.head(x)
    model.forward = lambda x: model.kept(model.body(x))  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"uses weight '\w+\.\w+' of the model itself.*by self"):
        refusals(model, torch.optim.SGD(model.parameters(), lr=0.1), INP, lambda m, i: m(i["x"]).sum().backward())
    assert all(parameter.grad is None for parameter in model.parameters())
