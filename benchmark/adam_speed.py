"""How fast one Adam step over a flat shard is on the CPU, compared with torch's steps; and the cost of compiling.

    python benchmark/adam_speed.py [--quick] [--numel 100000000] [--threads 2] [--no-record]

The shard has a bfloat16 gradient, float32 master weights and moments, and bfloat16 weights. All forms step the same
shard in turn, round after round, so that a busy moment hits all alike:

* ``peer``: ``parameter.grad = gradient.float()``, ``torch.optim.AdamW(fused=True)``, ``weights.copy_(parameter)``;
* ``peer, buffer kept``: the same with a float32 gradient that is allocated once;
* ``deepspeed``: ``DeepSpeedCPUAdam`` with the same casts, where DeepSpeed is importable;
* ``eager`` and ``compiled``: `elixir.kernels.adam.step.adam_step` with compiling off, and compiled before;
* ``triad``: ``a += s * b`` in place, and ``a = b + s * c``.

Bytes are those that cross the memory bus. A line that torch writes without reading it before (the bfloat16 weights
here, ``a`` of the second triad) is read first all the same; the compiled step streams it past the caches. A line updated
in place is read and written once. So Adam moves 2 (gradient) + 3 * 8 (master, moments) + 4 (weights) = 30 bytes per
element, compiled 28, ``a += s * b`` 12, ``a = b + s * c`` 16. The bar compares with the latter, STREAM's triad; the former, of
whose traffic a third is writes (Adam's: half), is shown next to it.

Further: 100 steps on recorded gradients against float32 `torch.optim.AdamW`, and bytes and speed with bfloat16 and 8-bit
moments.

Appends to ``results/adam_speed.csv``; fails if a bar of `BARS` is missed, except with ``--quick``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmark.common import Row, append_rows, conditions, percentiles, print_table  # noqa: E402
from elixir.kernels.adam.adam_rule import AdamOptions  # noqa: E402
from elixir.kernels.adam.moments import make_moments  # noqa: E402
from elixir.kernels.adam.step import adam_step  # noqa: E402
from elixir.optimizer_states import moments_size  # noqa: E402

MOVED_BYTES = {"eager": 30, "compiled": 28, "triad in place": 12, "triad": 16}
"""Per element; see above."""
BARS = {"over peer": 1.8, "over deepspeed": 1.3, "of triad": 0.9, "error": 1e-6}
OPTIONS = AdamOptions(lr=1e-3, weight_decay=0.1)
KINDS = ("float32", "bfloat16", "8bit")

Run = Callable[[], object]


class Shard:
    """The tensors that all forms update."""

    def __init__(self, numel: int, kind: str = "float32") -> None:
        generator = torch.Generator().manual_seed(0)
        self.gradient = torch.randn(numel, generator=generator).bfloat16()
        self.master = torch.randn(numel, generator=generator)
        self.weights = self.master.bfloat16()
        self.moments = make_moments(numel, kind)
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        adam_step(self.gradient, self.master, self.weights, self.moments, OPTIONS, self.steps)


def with_mode(mode: str, run: Run) -> Run:
    """`run` with ELIXIR_COMPILE set."""

    def inside() -> None:
        os.environ["ELIXIR_COMPILE"] = mode
        run()

    return inside


def peers(shard: Shard) -> dict[str, Run]:
    """torch's fused AdamW, and DeepSpeed's, with the casts they need; over separate states."""
    options: dict[str, Any] = {"lr": OPTIONS.lr, "weight_decay": OPTIONS.weight_decay}
    parameter = torch.nn.Parameter(shard.master.clone())
    fused = torch.optim.AdamW([parameter], fused=True, **options)
    buffer = torch.empty_like(shard.master)

    def allocating() -> None:
        parameter.grad = shard.gradient.float()
        fused.step()
        shard.weights.copy_(parameter.detach())
        parameter.grad = None

    def keeping() -> None:
        parameter.grad = buffer.copy_(shard.gradient)
        fused.step()
        shard.weights.copy_(parameter.detach())

    found: dict[str, Run] = {"peer": allocating, "peer, buffer kept": keeping}
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        theirs = DeepSpeedCPUAdam([parameter], adamw_mode=True, **options)
    except Exception as error:  # missing, or its extension does not build here
        print(f"DeepSpeedCPUAdam is left out: {type(error).__name__}: {error}".splitlines()[0])
        return found

    def deepspeed() -> None:
        parameter.grad = buffer.copy_(shard.gradient)
        theirs.step()
        shard.weights.copy_(parameter.detach())

    return {**found, "deepspeed": deepspeed}


def time_in_turn(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of each; one run before is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if round_:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def speed(numel: int, rounds: int) -> list[Row]:
    """All forms with float32 moments, and the triads."""
    shard = Shard(numel)
    a, b, c = torch.ones(numel), torch.ones(numel), torch.ones(numel)
    runs = {
        **peers(shard),
        "eager": with_mode("0", shard.step),
        "compiled": with_mode("wait", shard.step),
        "triad in place": lambda: a.add_(b, alpha=1e-3),
        "triad": lambda: torch.add(b, c, alpha=1e-3, out=a),
    }
    seconds = time_in_turn(runs, rounds)
    rates = {name: numel / percentiles(values)[1] for name, values in seconds.items()}
    triad, in_place_triad = (rates[name] * MOVED_BYTES[name] for name in ("triad", "triad in place"))
    rows = []
    for name, values in seconds.items():
        ours = name in ("eager", "compiled")
        moved = MOVED_BYTES.get(name, 0)
        rows.append(
            row(
                "speed",
                name,
                numel,
                values,
                bytes_per_s=round(moved * rates[name]) if moved else "",
                of_triad=round(moved * rates[name] / triad, 3) if moved else "",
                of_in_place_triad=round(moved * rates[name] / in_place_triad, 3) if moved else "",
                over_peer=round(rates[name] / rates["peer"], 3) if ours else "",
                over_kept_peer=round(rates[name] / rates["peer, buffer kept"], 3) if ours else "",
                over_deepspeed=round(rates[name] / rates["deepspeed"], 3) if ours and "deepspeed" in rates else "",
            )
        )
    return rows


def other_moments(numel: int, rounds: int) -> list[Row]:
    """Compiled steps with fewer bits; eager ones as well, on fewer rounds, being slow."""
    rows = []
    for kind in KINDS[1:]:
        shard = Shard(numel, kind)
        for name, mode, count in (("compiled", "wait", rounds), ("eager", "0", 1)):
            seconds = time_in_turn({name: with_mode(mode, shard.step)}, count)[name]
            rows.append(row("moments", f"{name}, {kind}", numel, seconds, state_bytes=moments_size(kind).nbytes(numel)))
    return rows


def accuracy(numel: int = 100_000, steps: int = 100) -> list[Row]:
    """Norm-wise error against float32 AdamW on the same bfloat16 gradients; with fewer bits, as a share of the way."""
    rows = []
    for name, mode, kind in [
        ("eager", "0", "float32"),
        ("compiled", "wait", "float32"),
        *(("eager", "0", kind) for kind in KINDS[1:]),
    ]:
        # Small shards are never compiled, so what compiled code computes needs a shard that is.
        length = numel if mode == "0" else 2**20
        shard = Shard(length, kind)
        start = shard.master.clone()
        parameter = torch.nn.Parameter(start.clone())
        reference = torch.optim.AdamW([parameter], lr=OPTIONS.lr, weight_decay=OPTIONS.weight_decay, foreach=False)
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            shard.gradient = torch.randn(length, generator=generator).bfloat16()
            parameter.grad = shard.gradient.float()
            reference.step()
            with_mode(mode, shard.step)()
        expected = parameter.detach().double()
        error = float((shard.master.double() - expected).norm() / expected.norm())
        of_way = float((shard.master.double() - expected).norm() / (expected - start.double()).norm())
        rows.append(
            row(
                "accuracy",
                f"{name}, {kind}, {steps} steps",
                length,
                [0.0],
                error=f"{error:.2e}",
                of_way=f"{of_way:.2e}",
            )
        )
    return rows


COLUMNS = (
    "bytes_per_s",
    "of_triad",
    "of_in_place_triad",
    "over_peer",
    "over_kept_peer",
    "over_deepspeed",
    "over_eager",
)
MORE_COLUMNS = ("state_bytes", "error", "of_way")


def row(part: str, what: str, numel: int, seconds: list[float], **more: Any) -> Row:
    """One row; columns that do not apply stay empty."""
    low, middle, high = percentiles(seconds)
    timed = middle > 0
    values: Row = {
        "part": part,
        "what": what,
        "numel": numel,
        "runs": len(seconds),
        "p20_s": round(low, 5) if timed else "",
        "p50_s": round(middle, 5) if timed else "",
        "p80_s": round(high, 5) if timed else "",
        "numel_per_s": round(numel / middle) if timed and part != "cold cache" else "",
    }
    return values | {name: more.get(name, "") for name in (*COLUMNS, *MORE_COLUMNS)}


def missed(rows: list[Row]) -> list[str]:
    """Bars that were not reached, in words. The step is whichever form a job of that length runs: the better one."""
    ours = [found for found in rows if found["what"] in ("eager", "compiled") and found["part"] == "speed"]
    best = max(ours, key=lambda found: found["numel_per_s"])
    checks = [
        ("over peer", best["over_peer"], best["over_peer"] >= BARS["over peer"]),
        ("of triad", best["of_triad"], best["of_triad"] >= BARS["of triad"]),
    ]
    if best["over_deepspeed"] != "":
        checks.append(("over deepspeed", best["over_deepspeed"], best["over_deepspeed"] >= BARS["over deepspeed"]))
    for found in rows:
        if found["part"] == "accuracy" and "float32" in found["what"]:
            checks.append(("error", found["error"], float(found["error"]) <= BARS["error"]))
    return [f"{name}: {value}, bar {BARS[name]}" for name, value, reached in checks if not reached]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small shard, few rounds; no rows, no bars")
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.quick:
        arguments.numel, arguments.rounds, arguments.no_record = 20_000_000, 3, True
    before = conditions()
    rows = speed(arguments.numel, arguments.rounds)
    rows += other_moments(arguments.numel, min(arguments.rounds, 5))
    rows += accuracy(steps=5 if arguments.quick else 100)
    shown = ("part", "what", "p20_s", "p50_s", "p80_s", "numel_per_s", *COLUMNS, *MORE_COLUMNS)
    print_table(
        f"Adam, {arguments.numel / 1e6:.0f} M elements", shown, ([found[key] for key in shown] for found in rows)
    )
    if not arguments.no_record:
        print("appended to", append_rows("adam_speed", ({**found, **before} for found in rows)))
    problems = missed(rows)
    if problems and not arguments.quick:
        raise SystemExit("bars missed: " + "; ".join(problems))


if __name__ == "__main__":
    main()
