"""Fine-tuning under DDP and under Elixir: a table over seeds, and its picture.

    python benchmark/finetune.py [--seeds 0 1 2 3 4] [--folder FOLDER] [--no-record]

Runs `example/finetune.py`: on one rank plainly and under a plan (the first seed), then on two gloo ranks under DDP and
under a plan (all seeds). The plan has a share of the device memory that the step needs. Both ways begin with the same
pretrained model and see the same pairs in the same order. With ``--folder``, runs that are in there are kept, so that a
table that was interrupted goes on.

Appends to ``results/finetune.csv`` and draws ``docs/images/finetune.png``. Fails where a bar is missed:
on one rank losses and logits are equal; on two ranks accuracy per seed is within a point, means are within one standard
error, and both are 5 points above what shared words tell.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmark.common import Row, append_rows, conditions, print_table  # noqa: E402
from elixir.show.style import SMALL_PT, finish, new_figure, title_style  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "finetune.png"
POINT = 0.01
"""Most that the accuracy of a seed may differ between DDP and Elixir."""
ABOVE = 0.05
"""Least that the mean accuracy must be above the baseline's."""
NAMES = {"plain": "DDP", "elixir": "Elixir"}


def run(how: str, ranks: int, seed: int, folder: Path, more: list[str]) -> dict[str, Any]:
    """One run, with its CPU seconds, all ranks and starting them included; one that is in `folder` is not made again."""
    out = folder / f"{how}-{ranks}-{seed}.json"
    if not out.exists():
        launch = [sys.executable]
        if ranks > 1:
            launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        scratch = out.with_suffix(".new")
        call = ["example/finetune.py", "--how", how, "--folder", folder, "--out", scratch, "--seeds", seed]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        before = os.times()
        subprocess.run([*launch, *map(str, call), *more], cwd=ROOT, env=environment, check=True)
        after = os.times()
        cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
        (made,) = json.loads(scratch.read_text(encoding="utf-8"))
        scratch.write_text(json.dumps({**made, "cpu_s": round(cpu_s, 1)}), encoding="utf-8")
        scratch.rename(out)
    return dict(json.loads(out.read_text(encoding="utf-8")))


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def largest(one: Any, other: Any) -> float:
    """The largest difference between two lists of numbers, nested alike."""
    if isinstance(one, list):
        return max((largest(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    return abs(one - other)


def compared(plain: dict[str, Any], ours: dict[str, Any]) -> Row:
    """The difference that a plan makes to one run."""
    flips = sum((a[0] < a[1]) != (b[0] < b[1]) for a, b in zip(plain["logits"], ours["logits"], strict=True))
    return {
        "largest_loss_difference": largest(plain["losses"], ours["losses"]),
        "largest_logit_difference": largest(plain["logits"], ours["logits"]),
        "other_answers": flips,
    }


def row(made: dict[str, Any], difference: Row) -> Row:
    return {
        **conditions(),
        **{name: made[name] for name in ("ranks", "how", "seed", "accuracy", "overlap", "pairs", "held_out", "steps", "cpu_s")},
        **{name: made.get(name, "") for name in ("need_bytes", "budget_bytes", "device_buffers_bytes")},
        **difference,
    }  # fmt: skip


def missed(plain: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    """The bars of several ranks that are missed."""
    accuracies = [[each["accuracy"] for each in runs] for runs in (plain, ours)]
    means, errors = [statistics.mean(found) for found in accuracies], [standard_error(found) for found in accuracies]
    found = [
        f"seed {one['seed']}: {one['accuracy']:.4f} and {other['accuracy']:.4f} are more than a point apart"
        for one, other in zip(plain, ours, strict=True)
        if abs(one["accuracy"] - other["accuracy"]) > POINT
    ]
    if abs(means[0] - means[1]) > max(errors):
        found.append(f"means {means[0]:.4f} and {means[1]:.4f} are more than a standard error apart, {max(errors):.4f}")
    if min(means) < plain[0]["overlap"] + ABOVE:
        found.append(f"mean {min(means):.4f} is not {ABOVE} above {plain[0]['overlap']:.4f}, what shared words tell")
    return found


def draw(plain: list[dict[str, Any]], ours: list[dict[str, Any]], path: Path) -> None:
    """Accuracy of each seed, with the mean and its standard error, over the baseline."""
    figure = new_figure(2.6)
    axes = figure.add_subplot()
    for number, (name, runs, colour) in enumerate((("DDP", plain, "#4c6a92"), ("Elixir", ours, "#c8763a"))):
        shift = (number - 0.5) * 0.16
        accuracies = [100 * each["accuracy"] for each in runs]
        axes.scatter(
            [place + shift for place in range(len(runs))], accuracies, s=28, color=colour,
            marker="os"[number], label=name, zorder=3,
        )  # fmt: skip
        axes.errorbar(
            len(runs) + 0.3 + shift, statistics.mean(accuracies), yerr=standard_error(accuracies), fmt="os"[number],
            color=colour, capsize=4, markersize=7, linewidth=1.2, zorder=3,
        )  # fmt: skip
    baseline = 100 * plain[0]["overlap"]
    axes.axhline(baseline, color="#888888", linewidth=0.8, linestyle="--")
    axes.annotate(
        "shared words", (0.01, baseline), xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points",
        fontsize=SMALL_PT,
    )  # fmt: skip
    ticks = [*range(len(plain)), len(plain) + 0.3]
    axes.set_xticks(ticks, [*(f"seed {each['seed']}" for each in plain), "mean, standard error"])
    axes.set_ylabel("held-out accuracy, %", fontsize=SMALL_PT)
    axes.set_title("Two ranks, float32; Elixir with less device memory than the step needs", **title_style())
    axes.legend(fontsize=SMALL_PT, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.08))
    finish(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, help="pairs and the pretrained model; made anew by default")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--steps", type=int, help="of each fine-tuning; the example's own number by default")
    parser.add_argument("--no-record", action="store_true", help="write no row and no picture")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        table(args, folder.resolve())


def table(args: argparse.Namespace, folder: Path) -> None:
    more = ["--steps", str(args.steps)] if args.steps else []
    alone, planned = (run(how, 1, args.seeds[0], folder, more) for how in NAMES)
    pairs = [[run(how, 2, seed, folder, more) for how in NAMES] for seed in args.seeds]
    plain, ours = (list(runs) for runs in zip(*pairs, strict=True))

    same = compared(alone, planned)
    differences = [compared(one, other) for one, other in pairs]
    nothing = dict.fromkeys(same, "")
    rows = [row(alone, nothing), row(planned, same)]
    for one, other, difference in zip(plain, ours, differences, strict=True):
        rows += [row(one, nothing), row(other, difference)]
    print_table(
        f"{alone['held_out']} held-out pairs; by shared words {alone['overlap']:.4f}",
        ["seed", "DDP", "Elixir", "other answers", "largest loss difference"],
        [
            (one["seed"], f"{one['accuracy']:.4f}", f"{other['accuracy']:.4f}", difference["other_answers"],
             f"{difference['largest_loss_difference']:.1e}")
            for one, other, difference in zip(plain, ours, differences, strict=True)
        ],
    )  # fmt: skip
    for runs in (plain, ours):
        found = [each["accuracy"] for each in runs]
        print(f"{NAMES[runs[0]['how']]}: {statistics.mean(found):.4f}, standard error {standard_error(found):.4f}")
    print(f"one rank: losses differ by {same['largest_loss_difference']}, logits by {same['largest_logit_difference']}")
    if not args.no_record:
        draw(plain, ours, args.picture)
        print(append_rows("finetune", rows), args.picture)
    bad = missed(plain, ours)
    if same["largest_loss_difference"] or same["largest_logit_difference"]:
        bad.append("on one rank the numbers are not plain PyTorch's")
    if bad:
        raise SystemExit("\n".join(bad))


if __name__ == "__main__":
    main()
