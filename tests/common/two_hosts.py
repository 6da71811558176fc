"""Two hosts on one machine: namespaces of network, names and processes, joined by a cable of a given rate.

A host lives as long as its first process: when that is killed, the kernel kills all others of the host and takes down
its end of the cable, as when a machine loses power. The first process dies with the program that made it, however that
ends, so nothing is left. Both hosts have one memory and one processor.

    python -m tests.common.two_hosts          says whether hosts can be made here, and ends with 1 if not
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PORT = 29511
"""On which the first host listens; no other program is in its network."""
_BURST = "256kb"
"""Sent at once, at any rate: more than a packet as the kernel hands it on, less than a millisecond of a fast rate."""
_QUEUE = "64mb"
"""Waits for its turn; if packets were dropped, the sender would slow down by itself."""
_PR_SET_PDEATHSIG = 1


def lacking() -> str:
    """Says what is missing for two hosts here; empty if nothing is."""
    if not sys.platform.startswith("linux"):
        return "two hosts are made of Linux namespaces, and this is no Linux"
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"two hosts need {' and '.join(missing)}: apt-get install iproute2 util-linux"
    if os.geteuid() != 0:
        return "two hosts need root, which makes networks: run as root, such as sudo make test-machines"
    try:
        with Hosts(rate_bits_per_s=1e9):
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return f"this kernel does not make two hosts with a network of a given rate: {detail.strip()}"


class Hosts:
    """Two hosts, until the end of the block.

    Args:
        rate_bits_per_s: of the cable, per direction.
    """

    def __init__(self, rate_bits_per_s: float) -> None:
        self._rate = rate_bits_per_s
        self.first_processes: list[int] = []
        """The first process of each host, as this program numbers processes."""
        self._keepers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        try:
            for name in ("one", "two"):
                self._start(name)
            one, two = self.first_processes
            self._in_network(
                one, "ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(two)
            )
            for number, process in enumerate(self.first_processes):
                self._in_network(process, "ip", "address", "add", f"{self.address(number)}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    self._in_network(process, "ip", "link", "set", device, "up")
            self.set_rate(self._rate)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(len(self._keepers)):
            self.kill(number)

    @staticmethod
    def address(number: int) -> str:
        """Address of a host."""
        return f"10.77.0.{number + 1}"

    def set_rate(self, bits_per_s: float) -> None:
        """Gives the cable another rate, per direction."""
        shape = ["tbf", "rate", f"{bits_per_s:.0f}bit", "burst", _BURST, "limit", _QUEUE]
        for process in self.first_processes:
            self._in_network(process, "tc", "qdisc", "replace", "dev", "cable", "root", *shape)

    def kill(self, number: int) -> None:
        """Ends a host and all its processes at once."""
        self._keepers[number].kill()  # its child, the first process of the host, dies with it
        self._keepers[number].wait()

    def run(self, number: int, call: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Starts a program on a host, with the names of its network in the environment."""
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": "cable",
            "TP_SOCKET_IFNAME": "cable",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        enter = ["nsenter", f"--target={self.first_processes[number]}", "--net", "--uts", "--pid", "--mount"]
        return subprocess.Popen(
            [*enter, f"--wd={options.pop('cwd', ROOT)}", *call],
            env=environment | options.pop("env", {}),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **options,
        )

    def torchrun(self, call: Sequence[str], *, ranks: int = 2, **options: Any) -> list[subprocess.Popen[str]]:
        """Starts a program under torchrun, with so many ranks on each host."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={ranks}"]
        launch += [f"--master-addr={self.address(0)}", f"--master-port={PORT}"]
        return [
            self.run(
                number, [*launch, f"--node-rank={number}", f"--local-addr={self.address(number)}", *call], **options
            )
            for number in range(2)
        ]

    def _start(self, name: str) -> None:
        script = f"hostname elixir-{name} && echo ready && exec sleep infinity"
        keeper = subprocess.Popen(
            ["unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_die_with_parent,
        )
        self._keepers.append(keeper)
        if keeper.stdout is None or keeper.stderr is None or not keeper.stdout.readline():
            raise OSError("unshare: " + (keeper.stderr.read().decode() if keeper.stderr else ""))
        self.first_processes.append(_child_of(keeper.pid))

    @staticmethod
    def _in_network(process: int, *call: str) -> None:
        subprocess.run(["nsenter", f"--target={process}", "--net", *call], check=True, capture_output=True, text=True)


def answers(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[tuple[int, str]]:
    """Status and output of programs, once all have ended.

    Raises:
        TimeoutExpired: one has not.
    """
    until = time.monotonic() + timeout_s
    try:
        found = []
        for process in processes:
            text, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
            found.append((process.returncode, text))
        return found
    finally:
        for process in processes:
            process.kill()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _child_of(process: int) -> int:
    children = Path(f"/proc/{process}/task/{process}/children")
    for _ in range(100):
        found = children.read_text().split()
        if found:
            return int(found[0])
        time.sleep(0.01)
    raise OSError(f"process {process} has started nothing")


if __name__ == "__main__":
    lacks = lacking()
    print(lacks or "two hosts can be made here")
    sys.exit(bool(lacks))
