"""Train a model on the text of Python's own standard library, byte by byte, under a plan made here.

    python example/train.py --model opt-125m --layers 2 --device-memory 300MiB
    torchrun --nproc-per-node 2 example/train.py --model opt-125m --layers 2

Runs on the CPU over gloo and, unchanged, on GPUs over NCCL. Rank 0 plans, all ranks run its plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist

from elixir.hardware import preset
from elixir.models import build_shape, default_step, describe
from elixir.plan import Plan
from elixir.search import optimal_search
from elixir.units import parse_dtype
from elixir.wrapper import ElixirModule, ElixirOptimizer

BYTES = 256


def library_text(limit: int = 4_000_000) -> torch.Tensor:
    """The sources of the standard library as one tensor of bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text, dtype=torch.uint8).long()


def batches(text: torch.Tensor, batch: int, seq: int, seed: int):  # type: ignore[no-untyped-def]
    """Endless random stretches of `text`, each its own label."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - seq, (batch,), generator=generator)
        ids = torch.stack([text[start : start + seq] for start in starts])
        yield {"input_ids": ids, "labels": ids}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="opt-125m", help="a named causal language model (elixir models)")
    parser.add_argument("--layers", type=int, help="keep only so many layers")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--dtype", default="fp32", help="fp32, bf16 or fp16")
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations in backward")
    parser.add_argument("--device-memory", help="budget of one device, such as 300MiB; what is free by default")
    parser.add_argument("--host-memory", help="budget of the machine; what is free by default")
    parser.add_argument(
        "--weights-on-meta", action="store_true", help="build on the meta device; no rank ever holds the whole model"
    )
    parser.add_argument("--max-norm", type=float, default=1.0, help="clip the gradients' global norm")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if ranks > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank() if ranks > 1 else 0

    torch.manual_seed(0)  # the same weights on every rank
    shape = dataclasses.replace(describe(args.model), vocabulary=BYTES)
    if args.layers:
        shape = dataclasses.replace(shape, layers=args.layers)
    checkpoint = "non-reentrant" if args.checkpoint else "none"
    model = build_shape(shape, checkpoint=checkpoint, device="meta" if args.weights_on_meta else "cpu")
    data = batches(library_text(), args.batch, args.seq, seed=rank)

    plans = [None]
    if rank == 0:
        plan = optimal_search(
            model,
            ranks,
            unified_dtype=parse_dtype(args.dtype),
            inp=next(data),
            step_fn=default_step,
            hardware=None if cuda else preset("cpu"),
            device_memory=args.device_memory,
            host_memory=args.host_memory,
        )
        print(plan)
        plans = [plan.to_json()]
    if ranks > 1:
        dist.broadcast_object_list(plans)
    plan = Plan.from_json(plans[0])

    model = ElixirModule(model, plan)
    optimizer = ElixirOptimizer(model, torch.optim.AdamW(model.parameters(), lr=args.lr), max_norm=args.max_norm)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    for step, batch in zip(range(args.steps), data, strict=False):
        loss = model(**batch).loss
        optimizer.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 5 == 0 or step == args.steps - 1):
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)
    if rank == 0:
        print(model.last_report)
    model.close()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
