"""Train a model on the text of Python's own standard library, byte by byte, under a plan made here.

    python example/train.py --model opt-125m --layers 2 --device-memory 300MiB
    torchrun --nproc-per-node 2 example/train.py --model opt-125m --layers 2
    python example/train.py --model opt-125m --layers 2 --checkpoint-folder run --resume
    torchrun --nnodes 2 --nproc-per-node 8 ... example/train.py --hardware hw.json --replicas auto

Runs on the CPU over gloo and, unchanged, on GPUs over NCCL. Rank 0 plans, all ranks run its plan.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import sysconfig
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import elixir
from elixir.microbench import measure_briefly
from elixir.microbench.disk import with_disk
from elixir.models import build, default_step
from elixir.models.model_shape import describe
from elixir.plan.plan import Plan
from elixir.search import optimal_search
from elixir.search.searches import profile_for
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


def batch_of(text: torch.Tensor, batch: int, seq: int, rank: int, step: int) -> dict[str, torch.Tensor]:
    """Random stretches of `text`, each its own label: a step has the same ones in every run."""
    generator = torch.Generator().manual_seed(step * 65536 + rank)
    starts = torch.randint(0, len(text) - seq, (batch,), generator=generator)
    ids = torch.stack([text[start : start + seq] for start in starts])
    return {"input_ids": ids, "labels": ids}


def any_rank(value: bool) -> bool:
    """Whether it is true on any rank: signals reach ranks at different moments, and all must save the same step."""
    if not dist.is_initialized():
        return value
    flag = torch.tensor(float(value), device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="opt-125m", help="a named causal language model (elixir models)")
    parser.add_argument("--layers", type=int, help="keep only so many layers")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--dtype", default="fp32", help="fp32, bf16 or fp16")
    parser.add_argument("--activation-checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--checkpoint", dest="activation_checkpointing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device-memory", help="budget of one device, such as 300MiB; what is free by default")
    parser.add_argument("--host-memory", help="memory that the machine has for the run; what is free by default")
    parser.add_argument("--disk-memory", help="budget of the machine's disk for optimizer states; none by default")
    parser.add_argument("--disk-folder", nargs="+", help="a folder on that disk, or one on each drive; measured first")
    parser.add_argument(
        "--weights-on-meta", action="store_true", help="build on the meta device; no rank ever holds the whole model"
    )
    parser.add_argument("--hardware", help="a preset or hw.json; by default what two seconds of measuring find")
    parser.add_argument(
        "--replicas", default="1", help="replicas of the model, each sharded over as many ranks; auto: the fastest"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a lost rank ends the run")
    parser.add_argument("--max-norm", type=float, default=1.0, help="clip the gradients' global norm")
    parser.add_argument(
        "--checkpoint-folder", help="save checkpoints here; also when the process is told to end (SIGTERM)"
    )
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    args = parser.parse_args()
    if args.resume and not args.checkpoint_folder:
        parser.error("--resume needs --checkpoint-folder")
    if bool(args.disk_memory) != bool(args.disk_folder):
        parser.error("--disk-memory and --disk-folder go together")
    return args


def main() -> None:
    args = arguments()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if ranks > 1:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=args.timeout))
    rank = dist.get_rank() if ranks > 1 else 0

    torch.manual_seed(0)  # the same weights on every rank
    shape = describe(args.model).changed(vocabulary=BYTES)
    if args.layers:
        shape = shape.changed(layers=args.layers)
    checkpoint = "non-reentrant" if args.activation_checkpointing else "none"
    model = build(shape, checkpoint=checkpoint, device="meta" if args.weights_on_meta else "cpu")
    dtype = parse_dtype(args.dtype)
    text = library_text()
    folder = args.checkpoint_folder
    newest = elixir.Checkpoints(folder).latest() if args.resume else None

    plans = [None]
    if rank == 0 and newest is not None:
        # The same plan, although measuring anew might give another: then all numbers go on to the bit.
        with elixir.open_checkpoint(newest) as saved:
            plans = [saved.value("plan")]
    elif rank == 0:
        # Two seconds of measuring, so that the predicted seconds are those of this machine.
        machine = (
            profile_for(args.hardware)
            if cuda or args.hardware
            else measure_briefly(2.0, dtype=dtype, tokens=args.batch * args.seq, hidden=shape.hidden)
        )
        if args.disk_folder:
            machine = with_disk(machine, *args.disk_folder)
        plan = optimal_search(
            model,
            ranks,
            unified_dtype=dtype,
            inp=batch_of(text, args.batch, args.seq, rank, step=0),
            step_fn=default_step,
            optimizer_type="AdamW",
            hardware=machine,
            device_memory=args.device_memory,
            host_memory=args.host_memory,
            disk_memory=args.disk_memory,
            replicas=args.replicas if args.replicas == "auto" else int(args.replicas),
        )
        print(plan)
        plans = [plan.to_json()]
    if ranks > 1:
        dist.broadcast_object_list(plans)
    plan = Plan.from_json(plans[0])

    model = ElixirModule(model, plan, disk_folder=args.disk_folder)
    optimizer = ElixirOptimizer(
        model, torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True), max_norm=args.max_norm
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "plan": plans[0]}
    checkpoints = elixir.Checkpoints(folder) if folder else None
    if checkpoints is not None and newest is not None:
        checkpoints.load(state)
    told_to_end = []
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.append(True))
    loss = torch.zeros(())
    for step in range(state["step"], args.steps):
        batch = batch_of(text, args.batch, args.seq, rank, step)
        loss = model(**batch).loss
        optimizer.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 5 == 0 or step == args.steps - 1):
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)
        if checkpoints is not None:
            state["step"] = step + 1
            ends = any_rank(bool(told_to_end))
            if ends or (step + 1) % args.every == 0 or step + 1 == args.steps:
                checkpoints.save(step + 1, state)
            if ends:
                break
        elif told_to_end:
            sys.exit("told to end")
    if checkpoints is not None:
        checkpoints.close()
    if rank == 0 and model.last_report is not None:
        print(model.last_report)
    model.close()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
