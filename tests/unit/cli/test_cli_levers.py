"""Advice of the command line if nothing fits: flags that it has, which then do what they promise."""

from __future__ import annotations

import re

import pytest

from elixir.cli import main

STEP = ("opt-125m", "--hardware", "l4", "--batch", "4")
CHECKPOINT = "checkpoint activations: --activation-checkpointing non-reentrant"


def failed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["plan", *words]) == 2
    return capsys.readouterr().err


def advised(text: str, flag: str) -> list[str]:
    """`flag` and its value, as a message has them."""
    (found,) = re.findall(rf"{flag} [^\s)]+", text)
    return found.split(" ")


@pytest.mark.slow
def test_flags_that_give_more_memory_give_enough(capsys: pytest.CaptureFixture[str]) -> None:
    text = failed(capsys, *STEP, "--device-memory", "3GiB", "--host-budget", "1GiB", "--placement", "cuda")
    assert "(instead of placement 'cuda'): --placement auto (not enough alone)" in text
    assert "run on 2 ranks: --world-size 2 (not enough alone)" in text
    assert f"{CHECKPOINT} (not enough alone)" in text
    device = advised(text, "--device-memory")
    assert main(["plan", *STEP, *device, "--host-budget", "1GiB", "--brief"]) == 0
    text = failed(capsys, *STEP, "--device-memory", "4GiB", "--host-budget", "256MiB")
    assert "let states live on a disk (--disk-memory), once `elixir hardware --measure" in text
    assert main(["plan", *STEP, "--device-memory", "4GiB", *advised(text, "--host-budget"), "--brief"]) == 0


def test_more_of_a_device_is_advised_only_while_it_has_more(capsys: pytest.CaptureFixture[str]) -> None:
    text = failed(capsys, *STEP[:-1], "26", "--assume", "nominal", "--host-budget", "512GiB")
    assert "--device-memory" not in text
    assert "which activations are kept: --activations auto (enough" in text
    assert f"{CHECKPOINT} (enough" in text


def test_a_step_with_inputs_of_its_own_is_not_told_of_flags_that_it_cannot_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("tests.unit.cli.test_cli_levers:small", "--inp", "tests.unit.cli.test_cli_levers:inputs", "--step")
    words += ("tests.unit.cli.test_cli_levers:step", "--hardware", "l4", "--dtype", "fp32", "--host-budget", "1GiB")
    text = failed(capsys, *words, "--device-memory", "20MiB")
    assert "halve the batch of each rank" in text
    assert "--batch" not in text


def small() -> object:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))


def inputs() -> dict[str, object]:
    import torch

    return {"input": torch.zeros(4096, 256)}


def step(model: object, inp: dict[str, object]) -> None:
    model(**inp).sum().backward()  # type: ignore[operator]
