"""Seconds of a step of four ranks on two hosts: as simulated, compared with as measured.

    python benchmark/two_hosts.py [--rates 1e8 2e8] [--rounds 9] [--no-record]        (as root)

The hosts are namespaces of this machine, joined by a cable whose rate `tc` limits (`tests.common.two_hosts`), with two
ranks on each. Model, plans and rates are such that the network, or emulated links, take most of a step: four ranks on few
cores say little of compute. For each rate, in one process per rank:

* `elixir.microbench.measure` under torchrun measures the network and collectives, on each host and over both;
* plain PyTorch's forward and backward, and its Adam, on all ranks at once, calibrate compute;
* plans of one replica over all ranks, and of two replicas, take turns: with everything on the device, over the cable as it
  is; and with everything on the host, all links and the network emulated at two speeds, over a cable that is faster.

A step is the slowest rank's; the measured seconds are a median. The error is simulated over measured seconds, less 1.
Appends to ``results/two_hosts.csv``; fails where a bar is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmark.common import append_rows, conditions, percentiles, print_table  # noqa: E402
from benchmark.emulated_runs import Run, with_error  # noqa: E402
from elixir.hardware.profile import HardwareProfile  # noqa: E402
from elixir.models.loading import build  # noqa: E402
from elixir.models.model_shape import describe  # noqa: E402
from elixir.models.step import default_input, default_step  # noqa: E402
from elixir.search import simple_search  # noqa: E402
from elixir.search.simulator.rates import Rates, with_link_speed  # noqa: E402
from elixir.search.simulator.simulation import simulate_step  # noqa: E402
from elixir.tracer.trace import trace_step  # noqa: E402
from tests.common.two_hosts import Hosts, answers, lacking  # noqa: E402

SHAPE = describe("opt-125m").changed(
    name="opt 2x256", layers=2, hidden=256, heads=4, kv_heads=4, ffn=1024, vocabulary=4096
)
SEQUENCE = 32
RATES = (1e8, 2e8)
"""Bits a second between the hosts, per direction."""
LINKS = (10e6, 20e6)
"""Bytes a second of an emulated link, per direction."""
FAST = 1e10
"""Bits a second of the cable that links are emulated next to."""
REPLICAS = (1, 2)
NETWORK_BAR, LINK_BAR = 0.10, 0.05
"""Mean of the absolute errors between hosts, and with emulated links."""
WAIT_S = 540.0


def work(rounds: int, emulated: bool) -> list[dict[str, Any]]:
    """Every case at one rate, on one rank."""
    cases = [(replicas, link) for replicas in REPLICAS for link in (LINKS if emulated else (None,))]
    from elixir.microbench import measure
    from elixir.microbench.ranks import joined

    torch.set_num_threads(1)
    with joined() as ranks:
        hardware = measure(quick=True, ranks=ranks)
        meta = build(SHAPE, device="meta")
        inp = {name: value.roll(ranks.rank, -1) for name, value in default_input(meta, batch=1, seq=SEQUENCE).items()}
        compute_s, adam_s = (ranks.slowest(seconds) for seconds in _plain(inp, ranks, rounds))
        numel = sum(parameter.numel() for parameter in meta.parameters())
        machine = _without(hardware, "device_adam", device_adam_numel_per_s=numel / adam_s)
        trace = trace_step(meta, inp, default_step, hardware=machine, optimizer=None)
        scale = compute_s / Rates(machine, "float32", 1, 1).accesses_s(trace).sum()
        runs, found = [], []
        for replicas, link in cases:
            options = {
                "inp": inp,
                "step_fn": default_step,
                "hardware": machine,
                "replicas": replicas,
                "clipping": False,
            }
            home = "cuda" if link is None else "cpu"
            plan = simple_search(meta, 4, 8, 0.3, shard_device=home, optimizer_type="AdamW", **options).plan
            runs.append(Run(SHAPE, inp, ranks.share(plan), host_threads=1))
            runs[-1].link(link, link)
        measured: list[list[float]] = [[] for _ in cases]
        for turn in range(rounds):
            for index in range(len(cases)):
                case = (index + turn) % len(cases)
                ranks.barrier()
                measured[case].append(ranks.slowest(runs[case].turn()[0].step_s))
        for (replicas, link), run, seconds in zip(cases, runs, measured, strict=True):
            there = machine if link is None else _emulated(machine, link)
            simulated = simulate_step(run.plan, trace, there, compute_scale=scale)
            p20, p50, p80 = percentiles(seconds)
            network = round(machine.network_bytes_per_s or 0.0)
            case = {"replicas": replicas, "link_bytes_per_s": link, "network_bytes_per_s": network}
            times = {"measured_s": p50, "p20_s": p20, "p80_s": p80, "simulated_s": simulated.step_s}
            found.append(with_error(case | times | {"compute_s": round(compute_s, 4)}))
        for run in runs:
            run.module.close()
    return found if ranks.rank == 0 else []


def _plain(inp: dict[str, Any], ranks: Any, rounds: int) -> tuple[float, float]:
    """Median seconds of forward and backward, and of Adam, while all ranks do the same."""
    model = build(SHAPE, dtype=torch.float32, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    seconds = []
    for _ in range(rounds):
        ranks.barrier()
        began = time.perf_counter()
        default_step(model, inp)
        stepped = time.perf_counter()
        optimizer.step()
        seconds.append((stepped - began, time.perf_counter() - stepped))
        optimizer.zero_grad()
    compute, adam = zip(*seconds[1:], strict=True)
    return statistics.median(compute), statistics.median(adam)


def _without(hardware: HardwareProfile, *families: str, **rates: float) -> HardwareProfile:
    """The machine with other plain rates, and without the fits that would count before them."""
    fits = {key: fit for key, fit in hardware.fits.items() if key.split(".")[0] not in families}
    return dataclasses.replace(hardware, fits=fits, **rates)


def _emulated(hardware: HardwareProfile, link: float) -> HardwareProfile:
    """The machine whose links and network have this speed for each rank; two share the network of a host."""
    return dataclasses.replace(with_link_speed(hardware, link), network_bytes_per_s=2 * link, network_latency_s=0.0)


def main() -> int:
    """Runs, records, and compares with the bars; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--emulated", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(work(args.rounds, args.emulated)), flush=True)
        return 0
    if lacking():
        print(lacking())
        return 1
    rows: list[dict[str, Any]] = []
    for rate in (*args.rates, FAST):
        before = conditions() | {"threads": 1, "rate_bits_per_s": rate}
        with Hosts(rate) as hosts:
            call = [str(Path(__file__)), "--work", "--rounds", str(args.rounds), *["--emulated"] * (rate == FAST)]
            (status, text), (other, more) = answers(hosts.torchrun(call), WAIT_S)
        if status or other:
            raise SystemExit(f"{text}\n{more}")
        cases = next(found for line in text.splitlines() if line.startswith("[{") for found in [json.loads(line)])
        rows += [before | case for case in cases]
    shown = ("rate_bits_per_s", "replicas", "link_bytes_per_s", "measured_s", "simulated_s", "error_percent")
    print_table("Steps of four ranks on two hosts", shown, [[row[name] for name in shown] for row in rows])
    missed = False
    for what, of_links, bar in (("between hosts", False, NETWORK_BAR), ("with emulated links", True, LINK_BAR)):
        errors = [abs(row["error_percent"]) / 100 for row in rows if (row["link_bytes_per_s"] is not None) == of_links]
        print(f"{what}: mean error {statistics.mean(errors):.1%} (bar {bar:.0%}), worst {max(errors):.1%}")
        missed |= statistics.mean(errors) > bar
    if not args.no_record:
        print(append_rows("two_hosts", rows))
    return missed


if __name__ == "__main__":
    sys.exit(main())
