"""How much memory do the activations of OPT take, from 125M to 175B parameters? No GPU needed, none used.

python example/profile_activation.py                      # table, and activations.png
python example/profile_activation.py opt-13b llama-2-13b --batch 4 --seq 1024 --device a100 --plot mine.pdf
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from elixir.artifact import check_writable
from elixir.errors import ElixirError
from elixir.hardware.profile import HardwareProfile, preset
from elixir.models import build, default_input, default_step
from elixir.show.memory_curve import plot_activations
from elixir.show.style import picture_format
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
        picture_format(check_writable(args.plot))
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
