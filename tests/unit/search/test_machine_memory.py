"""``host_memory`` is all that a machine has for a run; ``host_budget`` is the part that Elixir keeps on the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elixir.cli import main
from elixir.errors import PlanError, readable_bytes
from elixir.hardware.profile import preset
from elixir.search import Answer, plan_from_trace
from elixir.units import MIB
from tests.common.samples import make_trace

TRACE = make_trace(layers=3, unit=2**24)
DEVICE = 300 * MIB


def asked(machine: str, ranks: int, **options: Any) -> Answer:
    return plan_from_trace(TRACE, preset(machine), ranks, device_memory=DEVICE, assume="nominal", **options)


@pytest.mark.parametrize(("machine", "ranks"), [("h200", 2), ("cpu", 1), ("cpu", 2)])
def test_all_that_must_be_free_fits_the_machine_and_suffices_when_it_is_typed(machine: str, ranks: int) -> None:
    roomy = asked(machine, ranks, host_memory="16GiB")
    assert roomy.plan.predicted.checkpoint_bytes
    least = roomy.must_be_free_bytes - roomy.plan.predicted.checkpoint_bytes
    found = asked(machine, ranks, host_memory=least)
    assert 0.95 * least < found.must_be_free_bytes <= least
    assert found.plan.predicted.host_peak_bytes <= found.plan.host_budget_bytes


@pytest.mark.parametrize(
    ("given", "said"),
    [(500, "in which its devices lie"), (900, "as much on the device"), (1000, "all that must be free")],
)
def test_what_is_said_to_be_needed_of_a_cpu_suffices_and_is_what_is_offered(given: int, said: str) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        plan_from_trace(TRACE, preset("cpu"), 1, host_memory=given * MIB, assume="nominal")
    needed_bytes = caught.value.needed_bytes
    (offer,) = [dict(lever.options) for lever in caught.value.levers if dict(lever.options).keys() == {"host_memory"}]
    assert offer["host_memory"] == readable_bytes(needed_bytes, up=True).replace(" ", "")
    plan_from_trace(TRACE, preset("cpu"), 1, host_memory=needed_bytes, assume="nominal")


def test_json_has_what_must_be_free(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["plan", str(TRACE.save(tmp_path / "trace.json")), "--world-size", "2", "--device-memory", "300MiB"]
    words += ["--host-memory", "16GiB", "--assume", "nominal"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["must_be_free"]
    parts = found["parts"]
    assert found["processes"] == 2
    assert found["machine_bytes"] == 2 * sum(parts.values()) - parts["libraries"]
    assert main([*words, "--brief"]) == 0
    assert "of the 16.00 GiB of each machine's memory" in capsys.readouterr().out
