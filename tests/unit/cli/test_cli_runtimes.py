"""``--runtime`` of the command line: each runtime keeps the fewest devices on which it fits, next to Elixir's plan."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elixir.runtimes.estimate import with_margin
from tests.common.command_line import run
from tests.common.own_step import OWN_INPUT, OWN_MODEL, OWN_STEP

ASKED = (OWN_MODEL, "--inp", OWN_INPUT, "--step", OWN_STEP, "--hardware", "h100", "--runtime", "all")
RUNTIMES = ["ddp", "fsdp2", "deepspeed", "elixir"]


def test_each_runtime_is_shown_on_the_fewest_devices_on_which_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(command: str, *words: str) -> list[dict[str, Any]]:
        status, text, _ = run(capsys, command, *ASKED, *words, "--json")
        assert status == 0
        return list(json.loads(text)["rows"])

    every = rows("plan", "--host-memory", "64GiB")
    by_runtime = {name: [row for row in every if row["runtime"] == name] for name in RUNTIMES}
    assert [len(found) for found in by_runtime.values()] == [1, 3, 3, 1]
    (ours,) = by_runtime["elixir"]
    for name in RUNTIMES[:3]:
        for row in by_runtime[name]:
            assert row["times_elixir"] == row["step_s"] / ours["step_s"]
            assert (row["asked"]["runtime"], row["fits"], row["why"]) == (name, True, "")
    # Two ranks need memory for NCCL, too: of one device less than what is enough for DDP and Elixir, of two no device.
    least = min(row["device_bytes"] for row in by_runtime["fsdp2"] if not row["asked"]["offload"])
    assert least < min(by_runtime["ddp"][0]["device_bytes"], ours["device_bytes"])
    enough = ("--device-memory", str(with_margin(least)), "--host-memory", "0.5MiB")
    found = {row["runtime"]: row for row in rows("fit", *enough, "--world-sizes", "2,1")}
    assert {name: (row["world_size"], row["fits"]) for name, row in found.items()} == {
        "ddp": (2, False), "fsdp2": (1, True), "deepspeed": (2, False), "elixir": (2, False)
    }  # fmt: skip
    assert [*found] == ["fsdp2", "ddp", "deepspeed", "elixir"]
    assert found["fsdp2"]["device_bytes"] == least
    assert "a device lacks" in found["ddp"]["why"]
    assert "a host" not in found["ddp"]["why"]
    assert all(found[name]["times_elixir"] is None for name in RUNTIMES)
    (alone,) = (row for row in rows("fit", "--host-memory", "64GiB", "--world-sizes", "1,2") if row["runtime"] == "ddp")
    assert alone == by_runtime["ddp"][0]
