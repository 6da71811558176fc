"""Part `memory`: the predicted peak of a plain PyTorch step against the measured one."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import torch
from torch import nn

from benchmark.gpu_peaks import CASES, Case, seeded_step
from benchmark.observe import observe
from benchmark.proof.jobs import Row
from benchmark.proof.place import Place
from elixir.cli.trial import quiet_profiler
from elixir.models import loading
from elixir.models.model_shape import ModelShape, describe
from elixir.models.step import default_input
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step
from elixir.tracer.values.expert_choice import RecordedRouting, RoutingRecorder
from elixir.units import parse_dtype

DROPOUTS = {
    "opt": ("dropout", "attention_dropout"),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "llama": ("attention_dropout",),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "vit": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "t5": ("dropout_rate",),
    "mixtral": ("attention_dropout",),
}
"""Family -> the options of its transformers config that switch dropout."""

_LLAMA_1B = {"hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocabulary": 32000}
_SMALL_MIXTRAL = {"hidden": 1024, "heads": 16, "kv_heads": 4, "ffn": 3584}
_TOY = {"hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 256, "vocabulary": 512, "positions": 64}


@dataclasses.dataclass(frozen=True)
class MemoryCase(Case):
    """A step to predict and to run, with what `benchmark.gpu_peaks.Case` leaves out."""

    changes: tuple[tuple[str, int], ...] = ()
    """Fields that differ from the named shape, apart from the layers."""
    autocast: str | None = None
    """Dtype of `torch.autocast` around forward."""
    mask: bool = False
    """Adds an attention mask; every other sequence is padded by a quarter."""
    dropout: float | None = None
    """None: as the family has it."""

    @property
    def label(self) -> str:
        """The label used in a row's name."""
        parts = [super().label]
        parts += [f"autocast-{self.autocast}"] if self.autocast else []
        parts += ["mask"] if self.mask else []
        parts += [f"dropout-{self.dropout:g}"] if self.dropout is not None else []
        return "-".join(parts)

    @property
    def shape(self) -> ModelShape:
        """The model that is built."""
        return describe(self.model).changed(layers=self.layers, **dict(self.changes))


def _case(
    model: str,
    layers: int,
    checkpoint: Any = "none",
    kernel: Any = "fused",
    dtype: str = "bf16",
    batch: int = 8,
    seq: int | None = 1024,
    changes: dict[str, int] | None = None,
    **more: Any,
) -> MemoryCase:
    changed = tuple((changes or {}).items())
    return MemoryCase(model, layers, checkpoint, kernel, parse_dtype(dtype), batch, seq, changed, **more)


def memory_cases() -> tuple[MemoryCase, ...]:
    """Whole models first, so that a run cut short has seen every family, dtype and option; then those of
    `gpu_peaks`."""
    named = (
        _case("opt-125m", 12),
        _case("gpt2-medium", 24, "non-reentrant", "foreach"),
        _case("llama-3-8b", 16, "non-reentrant", "fused", changes=_LLAMA_1B),
        _case("bert-large", 24, "none", "fused", seq=512, mask=True),
        _case("vit-large", 24, "none", "foreach", batch=64, seq=None),
        _case("mixtral-8x7b", 6, "none", "fused", batch=4, changes=_SMALL_MIXTRAL),
        _case("t5-large", 24, "non-reentrant", "foreach", seq=512, batch=4),
        _case("opt-125m", 12, "none", "foreach", "fp32", autocast="bf16"),
        _case("opt-1.3b", 24, "non-reentrant", "fused"),
        _case("gpt2-xl", 48, "non-reentrant", "foreach", batch=4),
        _case("opt-1.3b", 24, "none", "foreach", "fp16", batch=4, mask=True),
        _case("gpt2-medium", 24, "none", "fused", "fp16", batch=4, dropout=0.0),
        _case("opt-125m", 12, "none", "fused", "fp32"),
        _case("llama-3-8b", 16, "none", "foreach", batch=2, changes=_LLAMA_1B, mask=True),
        _case("bert-large", 24, "non-reentrant", "foreach", "fp32", seq=512, dropout=0.0),
        _case("gpt2-medium", 24, "none", "fused", "fp32", batch=4, autocast="fp16"),
        _case("vit-large", 24, "non-reentrant", "fused", "fp16", batch=64, seq=None),
        _case("t5-large", 24, "none", "fused", "fp32", seq=512, batch=2, autocast="bf16", mask=True),
        _case("mixtral-8x7b", 6, "non-reentrant", "foreach", batch=4, changes=_SMALL_MIXTRAL, mask=True),
        _case("opt-1.3b", 24, "reentrant", "fused", "bf16", batch=8, dropout=0.0),
        _case("llama-3-8b", 16, "non-reentrant", "fused", "fp32", autocast="bf16", changes=_LLAMA_1B, batch=4),
    )
    return (*named, *(MemoryCase(**{f.name: getattr(c, f.name) for f in dataclasses.fields(Case)}) for c in CASES))


def rehearsal_memory_cases() -> tuple[MemoryCase, ...]:
    """Toys that go through every branch."""
    return (
        _case("opt-125m", 2, "non-reentrant", "foreach", "fp32", 2, 32, _TOY, mask=True),
        _case("gpt2", 2, "none", "fused", "fp32", 2, 32, _TOY, autocast="bf16", dropout=0.0),
    )


def build(case: MemoryCase, device: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model and its batch on a device; the batch stays on the CPU for a model on meta."""
    torch.manual_seed(0)
    shape = case.shape
    off = {} if case.dropout is None else dict.fromkeys(DROPOUTS[shape.family], case.dropout)
    model = loading.build(shape.changed(**off), dtype=case.dtype, checkpoint=case.checkpoint, device=device)
    inp = default_input(model, batch=case.batch, seq=case.seq)
    if case.mask:
        mask = torch.ones_like(inp["input_ids"])
        mask[1::2, -(mask.shape[1] // 4) :] = 0
        inp["attention_mask"] = mask
    return model, inp if device == "meta" else {key: value.to(device) for key, value in inp.items()}


def step_of(case: MemoryCase, kind: str) -> Any:
    """The step that is traced and run: the default one, under autocast where the case says so."""
    if case.autocast is None:
        return seeded_step
    dtype = parse_dtype(case.autocast)

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        torch.manual_seed(0)
        with torch.autocast(kind, dtype=dtype):
            loss = model(**inp).loss
        loss.backward()

    return step


def make_optimizer(case: MemoryCase, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with the kernel of the case."""
    options: Any = {case.kernel: True} if case.kernel != "for-loop" else {"foreach": False}
    return torch.optim.AdamW(model.parameters(), **options)


def observe_cuda(case: MemoryCase, place: Place) -> tuple[dict[str, int], list[torch.Tensor]]:
    """Bytes above what the process held before the model (nothing, as a rule), and which experts were chosen."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()
    model, inp = build(case, "cuda")
    optimizer, step = make_optimizer(case, model), step_of(case, "cuda")
    with RoutingRecorder() as log:
        step(model, inp)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        step(model, inp)
        optimizer.step()
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()  # what reserving has left over from the steps that do not count
    place.reset_peaks()
    allocated, reserved = before.get("allocated_bytes.all.current", 0), before.get("reserved_bytes.all.current", 0)
    step(model, inp)
    backward = torch.cuda.max_memory_allocated() - allocated
    optimizer.step()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    found = {
        "backward": backward,
        "step": torch.cuda.max_memory_allocated() - allocated,
        "reserved": torch.cuda.max_memory_reserved() - reserved,
        "requested": stats["requested_bytes.all.peak"] - before.get("requested_bytes.all.current", 0),
    }
    return found, log.choices


def observe_cpu(case: MemoryCase) -> tuple[dict[str, int], list[torch.Tensor]]:
    """The same of a rehearsal: what the profiler sees allocated, on top of what tensors hold before the step."""
    model, inp = build(case, "cpu")
    optimizer, step = make_optimizer(case, model), step_of(case, "cpu")
    with RoutingRecorder() as log:
        step(model, inp)
    optimizer.step()
    model.zero_grad(set_to_none=True)
    gc.collect()
    tensors = [*model.parameters(), *model.buffers(), *inp.values()]
    tensors += [state for values in optimizer.state.values() for state in values.values()]
    held = sum(tensor.nbytes for tensor in tensors)

    def whole() -> None:
        step(model, inp)
        optimizer.step()

    with quiet_profiler():
        backward = observe(lambda: step(model, inp)).peak_bytes
        model.zero_grad(set_to_none=True)
        both = observe(whole).peak_bytes
    return {"backward": held + backward, "step": held + both}, log.choices


def predict(case: MemoryCase, place: Place, choices: list[torch.Tensor]) -> StepTrace:
    """The trace of the same step."""
    model, inp = build(case, "meta")
    return trace_step(
        model,
        inp,
        step_of(case, "cuda" if place.cuda else "cpu"),
        hardware=place.hardware(),
        optimizer="AdamW",
        optimizer_kernel=case.kernel,
        routing=RecordedRouting(choices) if choices else None,
    )


def work(options: dict[str, Any], place: Place) -> Row:
    """Predicted and measured peaks of one case, and how far the prediction is off, percent of what was measured."""
    cases = rehearsal_memory_cases() if place.rehearse else memory_cases()
    case = next(case for case in cases if case.label == options["label"])
    observed, choices = observe_cuda(case, place) if place.cuda else observe_cpu(case)
    return {
        **_predicted(case, place, choices, observed["backward"], observed["step"]),
        "measured_requested_bytes": observed.get("requested"),
        "measured_reserved_bytes": observed.get("reserved"),
    }


def predicted_again(row: Row, place: Place) -> Row:
    """A row of `work` with what is predicted today; as it is, if the case draws experts, which no row has."""
    case = next(case for case in memory_cases() if case.label == row["case"])
    if case.shape.family == "mixtral":
        return row
    return {**row, **_predicted(case, place, [], row["measured_backward_bytes"], row["measured_step_bytes"])}


def _predicted(
    case: MemoryCase, place: Place, choices: list[torch.Tensor], backward_bytes: int, step_bytes: int
) -> Row:
    trace = predict(case, place, choices)
    # States are there from the first step on, and so they add to the activations in a real forward and backward.
    backward = trace.backward_peak_bytes + trace.curve[0].optimizer
    return {
        "predicted_backward_bytes": backward,
        "measured_backward_bytes": backward_bytes,
        "backward_percent": round(100 * (backward / backward_bytes - 1), 4),
        "predicted_step_bytes": trace.step_peak_bytes,
        "measured_step_bytes": step_bytes,
        "step_percent": round(100 * (trace.step_peak_bytes / step_bytes - 1), 4),
        "peak_operator": trace.peak_operator,
        "peak_module": trace.peak_module,
    }
