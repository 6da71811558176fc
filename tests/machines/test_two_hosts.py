"""Replicas on two hosts with a network between them: the example, a resumed run, a lost host, and what is measured."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elixir.hardware.profile import HardwareProfile
from tests.common.two_hosts import ROOT, Hosts, answers, lacking

pytestmark = pytest.mark.slow
RATE_BITS_PER_S = 400e6
CALL = (
    "example/train.py --model opt-125m --layers 1 --batch 2 --seq 32 --lr 1e-3 --device-memory 64MiB "
    "--host-memory 8GiB --hardware cpu --replicas 2 --timeout 40"
).split()
WAIT_S = 400.0


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    lacks = lacking()
    if lacks:
        pytest.skip(lacks)


def losses(text: str) -> dict[int, str]:
    """Loss by step."""
    return {int(step): loss for step, loss in re.findall(r"step +(\d+)  loss (\S+)", text)}


def test_the_example_trains_is_resumed_and_ends_when_a_host_is_lost(tmp_path: Path) -> None:
    with Hosts(RATE_BITS_PER_S) as hosts:
        whole = answers(hosts.torchrun([*CALL, "--steps", "6"]), WAIT_S)
        assert [status for status, _ in whole] == [0, 0], whole
        for name in ("network", "replicas"):
            line = re.search(rf"^{name} +(.*)$", whole[0][1], re.MULTILINE)
            assert line is not None, whole[0][1]
            observed, predicted = re.split(r" {2,}", line[1].strip())
            assert observed == predicted != "0", line[0]
        saved = [*CALL, "--checkpoint-folder", str(tmp_path), "--every", "2", "--steps"]
        # The rate is that of a schedule of six steps in both: the first run ends after some.
        first = hosts.torchrun([*saved, "6"])
        _wait_for(tmp_path / "step-00000002" / "index.json")
        began = time.monotonic()
        hosts.kill(1)
        (status, text), _ = answers(first, WAIT_S)
        assert status != 0
        assert "RankError" in text, text
        assert time.monotonic() - began < 120.0
    with Hosts(RATE_BITS_PER_S) as hosts:
        again = answers(hosts.torchrun([*saved, "6", "--resume"]), WAIT_S)
        assert [status for status, _ in again] == [0, 0], again
    expected, found = losses(whole[0][1]), losses(again[0][1])
    assert found[5] == expected[5]


def _wait_for(path: Path) -> None:
    until = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.1)


def test_the_network_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "hw.json"
    with Hosts(RATE_BITS_PER_S) as hosts:
        call = ["-m", "elixir", "hardware", "--measure", "--quick", "--out", str(out)]
        found = answers(hosts.torchrun(call), WAIT_S)
    assert [status for status, _ in found] == [0, 0], found
    profile = HardwareProfile.from_dict(json.loads(out.read_text()))
    assert (profile.devices_per_host, profile.ranks_per_host(4)) == (2, 2)
    assert profile.network_bytes_per_s == pytest.approx(RATE_BITS_PER_S / 8, rel=0.25)
    for key in ("all_gather.2", "reduce_scatter.2", "all_gather.4", "reduce_scatter.4"):
        assert key in profile.fits or key in found[0][1], found[0][1]  # a busy machine's fits are left out, by name


MAKER = """
import time
from tests.common.two_hosts import Hosts
with Hosts(1e9) as hosts:
    sleeper = hosts.run(1, ["sleep", "1000"])
    print(*hosts.first_processes, flush=True)
    time.sleep(1000)
"""


def test_nothing_is_left_of_hosts_whose_maker_was_killed() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    assert maker.stdout is not None
    processes = [int(word) for word in maker.stdout.readline().split()]
    assert len(processes) == 2
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    until = time.monotonic() + 10.0
    while any(_runs(process) for process in processes):
        assert time.monotonic() < until, "a host is still there"
        time.sleep(0.05)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
