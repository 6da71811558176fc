"""How much memory do the activations of OPT take, from 125M to 175B parameters? No GPU needed, none used.

python example/profile_activation.py                      # table, and activations.png
python example/profile_activation.py opt-13b llama-2-13b --batch 4 --seq 1024 --device a100 --plot mine.pdf
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich import box
from rich.console import Console
from rich.table import Table

from elixir.artifact import check_writable
from elixir.errors import ElixirError, InputError
from elixir.hardware.profile import HardwareProfile, preset
from elixir.models import build, default_input, default_step
from elixir.show import style
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step
from elixir.units import GIB, parse_dtype

OPT = ("opt-125m", "opt-1.3b", "opt-6.7b", "opt-13b", "opt-30b", "opt-66b", "opt-175b")


def profile(name: str, checkpoint: bool, args: argparse.Namespace, hardware: HardwareProfile) -> StepTrace:
    """Traces one training step of the model called `name`."""
    dtype = parse_dtype(args.dtype)
    model = build(name, dtype=dtype, checkpoint="non-reentrant" if checkpoint else "none")
    inp = default_input(model, batch=args.batch, seq=args.seq)
    return trace_step(model, inp, default_step, dtype=dtype, hardware=hardware, model_name=name)


def table_of(traces: list[StepTrace], title: str) -> Table:
    """One line per trace; sizes in GiB."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model")
    table.add_column("ckpt")
    for heading in ("parameters", "activations", "backward", "step", "traced in"):
        table.add_column(heading, justify="right")
    for trace in traces:
        sizes = (trace.activation_peak_bytes, trace.backward_peak_bytes, trace.step_peak_bytes)
        table.add_row(
            trace.model_name,
            "yes" if trace.checkpointed_modules else "no",
            f"{trace.numel / 1e9:.3f} G",
            *(f"{size / GIB:.2f}" for size in sizes),
            f"{trace.trace_s:.2f} s",
        )
    return table


def plot_activations(traces: Sequence[StepTrace], path: str | os.PathLike[str] | None = None) -> Figure:
    """Activation and step peaks of several models on one logarithmic axis, with and without checkpointing.

    Traces of the same `model_name` share a line; one with checkpointed modules gets the hollow marks.

    Raises:
        InputError: no trace is given, or `path` names no picture format.
    """
    if not traces:
        raise InputError("give at least one trace to draw")
    names = list(dict.fromkeys(trace.model_name for trace in traces))
    figure = style.new_figure(0.9 + 0.26 * len(names))
    axes = figure.add_subplot()
    for trace in traces:
        y = names.index(trace.model_name)
        plain = not trace.checkpointed_modules
        for size, colour, marker in (
            (trace.param_bytes, style.DARK, "|"),
            (trace.activation_peak_bytes, style.ORANGE, "o"),
            (trace.step_peak_bytes, style.BLUE, "D"),
        ):
            axes.plot([size / GIB], [y], **_mark(colour, marker, hollow=not plain))
    for y, name in enumerate(names):
        sizes = [trace.activation_peak_bytes / GIB for trace in traces if trace.model_name == name]
        axes.plot([min(sizes), max(sizes)], [y, y], color=style.ORANGE, linewidth=1.0, alpha=0.5, zorder=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("GiB", fontsize=style.TEXT_PT)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", which="major", color=style.PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    handles = _activation_handles(traces)
    style.legend(axes, handles, columns=2, below=0.5 / (0.9 + 0.26 * len(names)))
    return style.finish(figure, path)


def _mark(colour: str, marker: str, *, hollow: bool) -> dict[str, Any]:
    # Hollow marks are larger, so that where both fall together the ring still shows around the dot.
    size = 8.0 if marker == "|" else 6.5 if hollow else 4.0
    look = {"marker": marker, "color": colour, "markerfacecolor": "none" if hollow else colour, "linestyle": "none"}
    return look | {"markersize": size, "markeredgewidth": 1.0, "zorder": 3}


def _activation_handles(traces: Sequence[StepTrace]) -> list[Any]:
    kinds = [("parameters", style.DARK, "|", False)]
    for hollow, ending in ((False, ""), (True, ", checkpointing")):
        if any(bool(trace.checkpointed_modules) == hollow for trace in traces):
            kinds.append((f"activation peak{ending}", style.ORANGE, "o", hollow))
            kinds.append((f"step peak{ending}", style.BLUE, "D", hollow))
    return [
        Line2D([], [], label=label, **_mark(colour, marker, hollow=hollow)) for label, colour, marker, hollow in kinds
    ]


def main() -> None:
    """Profile every model without and with checkpointing."""
    parser = argparse.ArgumentParser(description="Activation memory of several models, with and without checkpointing.")
    parser.add_argument("models", nargs="*", default=OPT, help="names, config.json files or module:function")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", default="h200", help="the device to pretend")
    parser.add_argument("--plot", type=Path, default=Path("activations.png"))
    args = parser.parse_args()
    started = time.perf_counter()
    try:
        style.picture_format(check_writable(args.plot))
        hardware = preset(args.device)
        traces = [profile(name, checkpoint, args, hardware) for name in args.models for checkpoint in (False, True)]
    except ElixirError as error:
        parser.error(str(error))
    took_s = time.perf_counter() - started
    console = Console()
    console.print(
        table_of(traces, f"one step of {args.batch} x {args.seq}, {args.dtype}, on {args.device}; peaks in GiB")
    )
    plot_activations(traces, args.plot)
    console.print(f"{len(traces)} steps traced in {took_s:.1f} s without a GPU; picture in {args.plot}")


if __name__ == "__main__":
    main()
