"""Pretrain a small BERT on the text of Python's own standard library, then fine-tune it on pairs of real text.

    python example/finetune.py --device-share 0.8
    torchrun --nproc-per-node 2 example/finetune.py --how plain --seeds 0 1 2      # DDP, the same otherwise

The task: of two consecutive pieces of a function, which one comes first? Half of the pairs are swapped. Functions come
from the standard library, split by module, so no module is in both parts. The words that two pieces share say nothing
about their order: that rule is printed as a baseline. (Whether a docstring belongs to a function was tried first. Shared
words alone were right for 70 of 100 pairs there, and a BERT of this size was still at chance after 600 steps.)

``--how elixir`` plans for ``--device-share`` of the device memory that the step needs if all of it is on the device.
Pretraining is done once and kept in ``--folder``, for all seeds and both ways. A seed gives the classifier's first
weights, the order of the pairs, and dropout.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from elixir.api import dry_run, wrap

WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^\sA-Za-z\d_]")
"""Words, parts of identifiers, numbers and punctuation."""
PAD, UNKNOWN, START, SEPARATOR, MASK = range(5)
PIECE = 16
"""Words of a piece; two pieces and three marks make a pair."""
LENGTH = 2 * PIECE + 3
VOCABULARY = 4096
BATCH = 16
"""Pairs of a step on each rank."""


# --- Text -------------------------------------------------------------------------------------------------------------


def functions(root: Path) -> Iterator[tuple[bool, list[str]]]:
    """Lines of each function without docstring and comments, and whether its module is held out."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if re.search(r"(^|/)(site-packages|dist-packages|tests?|idlelib|idle_test|lib2to3)/", name):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = source.splitlines()
        held_out = hashlib.sha256(name.encode()).digest()[0] < 51  # a fifth of the modules
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[ast.get_docstring(node) is not None :]
                if body:
                    text = lines[body[0].lineno - 1 : node.end_lineno]
                    yield held_out, [line for line in text if line.strip() and not line.lstrip().startswith("#")]


def pieces(lines: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """The last words of the first half of a function, and of its second half."""
    middle = len(lines) // 2
    found = [
        [word.lower() for line in half for word in WORD.findall(line)] for half in (lines[:middle], lines[middle:])
    ]
    if min(map(len, found)) >= 5:
        yield found[0][-PIECE:], found[1][-PIECE:]


def overlap(pairs: list[tuple[list[str], list[str], int]]) -> torch.Tensor:
    """The share of the first piece's words that the second one has."""
    return torch.tensor([len({*first} & {*second}) / len({*first}) for first, second, _ in pairs])


def by_overlap(train: Any, held_out: Any) -> float:
    """Accuracy of the best threshold on shared words, chosen on the training pairs."""
    shares, labels = overlap(train), torch.tensor([label for *_, label in train])
    rules = [(threshold / 40, above) for threshold in range(41) for above in (True, False)]
    threshold, above = max(rules, key=lambda rule: int((((shares > rule[0]) == rule[1]) == labels).sum()))
    found = (overlap(held_out) > threshold) == above
    return float((found == torch.tensor([label for *_, label in held_out])).float().mean())


def encode(pairs: list[tuple[list[str], list[str], int]], known: dict[str, int]) -> dict[str, torch.Tensor]:
    """Tensors of all pairs, each of shape (pairs, LENGTH), and labels."""
    ids, kinds = torch.full((len(pairs), LENGTH), PAD), torch.zeros(len(pairs), LENGTH, dtype=torch.long)
    for row, (first, second, _) in enumerate(pairs):
        one, other = ([known.get(word, UNKNOWN) for word in piece] for piece in (first, second))
        text = torch.tensor([START, *one, SEPARATOR, *other, SEPARATOR])
        ids[row, : len(text)] = text
        kinds[row, len(one) + 2 : len(text)] = 1
    labels = torch.tensor([label for *_, label in pairs])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "token_type_ids": kinds, "labels": labels}


def prepare(text: Path, folder: Path, steps: int) -> None:
    """Pairs, vocabulary and the pretrained model, into `folder`."""
    chance = random.Random(0)
    parts: tuple[list[Any], list[Any]] = ([], [])
    for held_out, lines in functions(text):
        for first, second in pieces(lines):
            right = chance.random() < 0.5
            parts[held_out].append((first, second, 1) if right else (second, first, 0))
    counts = Counter(word for first, second, _ in parts[0] for word in first + second)
    words = [word for word, _ in counts.most_common(VOCABULARY - 5)]
    known = {word: number for number, word in enumerate(words, 5)}
    train, held_out = (encode(part, known) for part in parts)
    model = pretrained(train, steps)
    model.save_pretrained(folder / "model")
    data = {"train": train, "held_out": held_out, "overlap": by_overlap(*parts)}
    torch.save(data, folder / "data.pt")


# --- Training ---------------------------------------------------------------------------------------------------------


def rows(data: dict[str, torch.Tensor], which: Any) -> dict[str, torch.Tensor]:
    return {name: values[which] for name, values in data.items()}


def schedule(optimizer: Any, steps: int) -> Any:
    """A tenth of warm-up, then down to 0."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(10 * (step + 1) / steps, 10 / 9 * (1 - step / steps))
    )


def pretrained(data: dict[str, torch.Tensor], steps: int) -> BertForMaskedLM:
    """A BERT that has learned to fill in masked words, of the training part alone; labels are not looked at."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256,
        max_position_embeddings=LENGTH, pad_token_id=PAD, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = schedule(optimizer, steps)
    for step in range(steps):
        inputs = rows(data, torch.randint(0, len(data["labels"]), (2 * BATCH,)))
        del inputs["labels"]
        ids = inputs["input_ids"]
        hidden = (torch.rand(ids.shape) < 0.15) & (ids > MASK)
        words = ids[hidden]
        inputs["input_ids"] = ids.masked_fill(hidden, MASK)
        # The head runs on hidden words only: it takes more time than all layers.
        loss = torch.nn.functional.cross_entropy(model.cls(model.bert(**inputs).last_hidden_state[hidden]), words)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 25 == 0 or step == steps - 1:
            print(f"pretraining, step {step:4}  loss {loss.item():.3f}", flush=True)
    return model


def under_a_plan(model: Any, optimizer: Any, batch: Any, share: float) -> tuple[Any, Any, dict[str, int]]:
    """The wrapped model, for a share of the device memory that the step needs without Elixir."""
    whole = dry_run(model, optimizer, inp=batch, placement="cuda", max_norm=1.0)
    need_bytes = whole.predicted.device_peak_bytes
    budget_bytes = int(share * need_bytes)
    model, optimizer = wrap(model, optimizer, inp=batch, device_memory=budget_bytes, max_norm=1.0)
    return model, optimizer, {"need_bytes": need_bytes, "budget_bytes": budget_bytes}


def finetune(data: Any, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One run: what it has lost in each step, and what it says about the held-out pairs."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    train, held_out = data["train"], data["held_out"]
    torch.manual_seed(seed)
    model: Any = BertForSequenceClassification.from_pretrained(args.folder / "model", hidden_dropout_prob=0.1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr)
    order = torch.randperm(len(train["labels"]))[: args.steps * BATCH * world_size].view(args.steps, world_size, BATCH)
    memory: dict[str, int] = {}
    if args.how == "elixir":
        batch = rows(train, slice(0, BATCH))
        model, optimizer, memory = under_a_plan(model, optimizer, batch, args.device_share)
        if rank == 0:
            print(model.plan)
    elif world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    scheduler = schedule(optimizer, args.steps)
    torch.manual_seed(1000 * seed + rank)  # dropout differs between ranks
    losses = []
    for step in range(args.steps):
        loss = model(**rows(train, order[step, rank])).loss
        if args.how == "elixir":
            optimizer.backward(loss)  # clips in step()
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0 and (step % 40 == 0 or step == args.steps - 1):
            print(f"seed {seed}, step {step:4}  loss {losses[-1]:.3f}", flush=True)
    said = predictions(model, held_out)
    right = (said.argmax(1) == held_out["labels"]).float()
    report = getattr(model, "last_report", None)
    if report is not None:
        if rank == 0:
            print(report)
        memory["device_buffers_bytes"] = int(report.to_dict()["device_buffers_bytes"])
        model.close()
    return {
        "how": args.how, "ranks": world_size, "seed": seed, "accuracy": float(right.mean()), "overlap": data["overlap"],
        "pairs": len(train["labels"]), "held_out": len(right), "steps": args.steps, "losses": losses,
        "logits": said.tolist(), **memory,
    }  # fmt: skip


@torch.no_grad()
def predictions(model: Any, held_out: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits for all held-out pairs; each rank evaluates its share of every batch, and all get everything."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model.eval()
    found = torch.zeros(len(held_out["labels"]), 2)
    numbers = torch.arange(len(found))
    for start in range(0, len(found), 128 * world_size):
        # As many batches on every rank: gathering a chunk takes all of them.
        batch = numbers[start : start + 128 * world_size][rank::world_size]
        found[batch] = model(**rows(held_out, batch)).logits
    if world_size > 1:
        dist.all_reduce(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=["elixir", "plain"], default="elixir", help="plain is DDP on several ranks")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device-share", type=float, default=0.8, help="budget over what the step needs")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=240, help="of fine-tuning")
    parser.add_argument("--pretraining-steps", type=int, default=600)
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="Python sources")
    parser.add_argument("--folder", type=Path, default=Path("finetune"), help="pairs and the pretrained model")
    parser.add_argument("--out", type=Path, help="write all runs here, as JSON")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()  # a new classifier's weights are missing, as they should be
    transformers.logging.disable_progress_bar()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0 and not (args.folder / "data.pt").exists():
        prepare(args.text, args.folder, args.pretraining_steps)
    if dist.is_initialized():
        dist.barrier()
    data = torch.load(args.folder / "data.pt")
    runs = [finetune(data, args, seed) for seed in args.seeds]
    if rank == 0:
        print(
            f"{runs[0]['pairs']} pairs to train on, {runs[0]['held_out']} held out; by shared words {data['overlap']:.3f}"
        )
        for run in runs:
            print(f"seed {run['seed']}: accuracy {run['accuracy']:.3f}")
        if args.out:
            args.out.write_text(json.dumps(runs), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
