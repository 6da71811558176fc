"""Parts of the wrapper on which frameworks lean: `to()` where nothing changes, plans given, parts of state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir
from elixir.errors import InputError
from elixir.wrapper import ElixirModule, ElixirOptimizer, weights_io
from tests.common import inside

ON_HOST = {"hardware": "cpu", "placement": "cpu", "device_memory": "1MiB", "host_budget": "64MiB", "assume": "nominal"}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    model.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    return model


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(1))}


def step(model: nn.Module, inp: dict[str, Any]) -> None:
    model(inp["x"]).square().mean().backward()


def wrapped(**options: Any) -> tuple[ElixirModule, ElixirOptimizer]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return elixir.wrap(model, optimizer, inp=batch(), step_fn=step, **{**ON_HOST, **options})


@pytest.mark.parametrize(("inner", "placement"), [(False, "cpu"), (True, "cpu"), (False, "cuda"), (True, "cuda")])
def test_to_what_it_is_already_changes_nothing(inner: bool, placement: str) -> None:
    wrapper, _ = wrapped(placement=placement)
    model = wrapper.module if inner else wrapper
    assert model.to("cpu") is model
    assert model.to(torch.device("cpu"), torch.float32) is model
    assert model.float() is model
    assert model.cpu() is model
    for change in (
        lambda: model.to(torch.bfloat16),
        lambda: model.to("meta"),
        lambda: model.half(),
        lambda: model.to(memory_format=torch.channels_last),
        lambda: model.share_memory(),
        lambda: model.to_empty(device="cpu"),
        lambda: model._apply(lambda tensor: tensor.add_(1)),
    ):
        with pytest.raises(InputError, match=r"leave out to\(\)"):
            change()
    wrapper.close()


def test_a_plan_that_is_given_is_run_without_a_trace(tmp_path: Path) -> None:
    first, optimizer = wrapped()
    path = first.plan.save(tmp_path / "plan.json")
    model = make_model()
    again, other = elixir.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=path, device="cpu")
    assert again.plan == first.plan
    for run, steps in ((first, optimizer), (again, other)):
        step(run, batch())
        steps.step()
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in first.state_dict().items())
    spare = make_model()
    with pytest.raises(InputError, match="leave out device_memory, inp"):
        elixir.wrap(spare, torch.optim.AdamW(spare.parameters()), plan=path, device_memory="1GiB", inp=batch())
    first.close()
    again.close()


def test_several_optimizers_share_a_plan() -> None:
    model, plain = make_model(), make_model()
    parts = [[torch.optim.AdamW(each[index].parameters(), lr=1e-2) for index in (0, 1, 2)] for each in (model, plain)]
    wrapper, optimizers = elixir.wrap(model, parts[0], inp=batch(), step_fn=step, **ON_HOST)
    for run, each in ((wrapper, optimizers), (plain, parts[1])):
        for _ in range(3):
            step(run, batch())
            for optimizer in each:
                optimizer.step()
            for optimizer in each:
                optimizer.zero_grad()
    state = wrapper.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    wrapper.close()
    mixed = [torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[2].parameters())]
    with pytest.raises(InputError, match="one family"):
        elixir.wrap(model, mixed, inp=batch(), step_fn=step, **ON_HOST)


def test_wrapping_a_wrapped_model_says_so_before_anything_is_traced() -> None:
    wrapper, _ = wrapped()
    with pytest.raises(InputError, match="run by an ElixirModule already"):
        elixir.wrap(wrapper.module, torch.optim.AdamW(wrapper.module.parameters()), inp=batch(), step_fn=step)
    wrapper.close()


def test_a_state_dict_of_a_part_gathers_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper, _ = wrapped()
    whole = wrapper.state_dict()
    gathered: list[int] = []
    chunks, gather = inside.chunks(wrapper), weights_io.whole

    def noted(engine: Any, chunk: Any, **more: Any) -> torch.Tensor:
        gathered.append(chunk.index)
        return gather(engine, chunk, **more)

    monkeypatch.setattr(weights_io, "whole", noted)
    part = wrapper.state_dict(only=lambda name, parameter: name.startswith("2."), dtype=torch.bfloat16)
    assert sorted(part) == ["2.bias", "2.weight", "count"]
    assert all(torch.equal(part[name], whole[name].bfloat16()) for name in ("2.bias", "2.weight"))
    of_part = {c.index for c in chunks if any(slot.name.startswith("2.") for slot in c.slots)}
    assert set(gathered) == of_part
    assert len(of_part) < len(chunks)
    wrapper.close()
