"""The question of a search: which step (`StepQuestion`), on which machine, with which options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from elixir.errors import InputError, InputTypeError
from elixir.hardware.profile import HardwareProfile
from elixir.models.packing import Packing
from elixir.plan.plan import Plan
from elixir.search.request import SearchRequest, check_count
from elixir.step_trace import StepShape, StepTrace, UnitActivations
from elixir.units import dtype_name, parse_dtype

if TYPE_CHECKING:
    import torch
    from torch import nn

    StepFn = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True, kw_only=True)
class StepQuestion:
    """The step that is asked about: one description for command line, `elixir.wrap`, `sweep`, `fit` and searches.

    Raises:
        InputError: the dtype is unknown.
    """

    model: nn.Module | StepTrace | str = ""
    """The model itself, or a name, as `elixir.models.build` takes it; or a trace, which has settled all else."""
    batch: int = 1
    """Samples of one rank, where `inp` does not say."""
    seq: int | None = None
    """Tokens per sample; None: 1024, or the model's maximum where that is smaller."""
    packed: int | str | None = None
    """Documents in each sample, all samples in one row (`elixir.models.packing`), where `inp` does not say; a text such
    as ``8:flash`` for a model by name whose attention is flash. None packs nothing."""
    dtype: str | torch.dtype | None = None
    """Dtype that floating parameters and inputs are cast to; None leaves them as built."""
    checkpoint: str = "none"
    """Activation checkpointing of a model by name, as `elixir.models.build` takes it."""
    use_fused_kernels: bool | Mapping[str, str] = False
    """The argument of `ElixirModule`, so that the plan knows the memory of fused kernels."""
    compile: bool = False
    """Whether the layers that the model repeats run as compiled ones; those compiled already always do."""
    optimizer: str | None = None
    """Class in `torch.optim` whose states and step are traced; None: none, since for a plan both follow from the
    placement."""
    optimizer_kernel: Literal["for-loop", "foreach", "fused"] | None = None
    """How it steps; None: as `torch.optim` would choose."""
    inp: Any = None
    """One rank's batch, or a function that gives it: of any kind if there is a `step_fn`, otherwise a dict of the
    model's inputs. None takes `elixir.models.default_input` (Hugging Face models only)."""
    step_fn: StepFn | None = None
    """``step_fn(model, inp)`` runs forward, loss and backward; None takes `elixir.models.default_step`."""
    forward: bool = False
    """Whether the model is only evaluated: the step runs without gradients, trainable or not."""
    generate: tuple[int, int] | None = None
    """Tokens of a prompt and new ones: the step is the last of a generation (`elixir.models.step`)."""
    lora: int | None = None
    """Rank of adapters over a frozen model by name (`elixir.models.adapters`)."""
    quantised: str | None = None
    """Form of the frozen weights of a model by name, likewise."""
    positions: int | None = None
    """Longest sequence of a model by name; None: as its config says."""
    activations: tuple[UnitActivations, ...] = ()
    """The activations of these units; all others keep what the model keeps."""

    def __post_init__(self) -> None:
        if self.dtype is not None:
            parse_dtype(self.dtype)
        if self.quantised and not (self.lora or self.forward or self.generate):
            raise InputError("quantised weights are frozen, so nothing would train; add adapters, lora=16 (--lora 16)")
        if self.positions is not None:
            check_count("positions", self.positions)
            if not isinstance(self.model, str):
                raise InputError("positions= is for a model by name; set its config's max_position_embeddings")
        if self._packing is not None and self._packing.flash and not isinstance(self.model, str):
            raise InputError("packed with :flash is for a model by name; set attn_implementation= of yours")
        if self.generate is not None:
            if not (isinstance(self.generate, tuple) and len(self.generate) == 2):
                raise InputTypeError(f"generate is (tokens of the prompt, new tokens), got {self.generate!r}")
            for number in self.generate:
                check_count("generate", number)
            settled = {"inp": self.inp, "step_fn": self.step_fn, "seq": self.seq, "packed": self.packed}
            for name in [name for name, value in settled.items() if value is not None]:
                raise InputError(f"generate={self.generate} settles the step; leave out {name}=")

    @classmethod
    def again(cls, made: StepTrace | Plan) -> StepQuestion:
        """The step that was traced for `made`.

        Raises:
            InputError: it has something that does not follow from the name of its model.
        """
        step = made.step
        if step.checkpoint is None:
            raise InputError(
                f"the step of {made.model_name} does not follow from its name, so it cannot be traced again"
            )
        optimizer = made.optimizer.split(" ")[0]
        return cls(
            model=made.model_name,
            batch=step.samples or 1,
            seq=None if step.generate else step.seq,
            packed=step.packed,
            dtype=None if made.dtype == "as built" else made.dtype,
            checkpoint=step.checkpoint,
            use_fused_kernels=step.fused_kernels,
            compile=bool(step.compiled),
            forward=step.forward,
            generate=step.generate,
            lora=step.lora,
            quantised=step.quantised,
            positions=_more_positions(made),
            activations=step.activations,
            optimizer=optimizer if isinstance(made, StepTrace) and optimizer != "none" else None,
        )

    @property
    def _packing(self) -> Packing | None:
        """The packing of `packed`; None packs nothing."""
        return None if self.packed is None else Packing.read(self.packed)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None: as built."""
        return None if self.dtype is None else parse_dtype(self.dtype)

    def build(self) -> nn.Module:
        """The model, built by its name if it has one."""
        from elixir.models.loading import (
            build,  # late, like the next: planning from a trace does not need what they load
        )

        if isinstance(self.model, str):
            kind = {"lora": self.lora, "quantised": self.quantised, "max_positions": self.positions}
            built = build(self.model, dtype=self.torch_dtype, checkpoint=self.checkpoint, **kind)  # type: ignore[arg-type]
            if self._packing is not None and self._packing.flash:
                from elixir.models.flash_attention import attend_by_document

                attend_by_document(built)
            return built
        if isinstance(self.model, StepTrace):
            raise InputTypeError("a trace has no model to build")
        return self.model

    def trace(
        self,
        hardware: HardwareProfile,
        built: nn.Module | None = None,
        kinds: dict[Any, Any] | None = None,
    ) -> StepTrace:
        """The step on this machine.

        Args:
            hardware: whose kernels and allocator to assume.
            built: the model, where it was built before.
            kinds: as `elixir.tracer.trace_step` takes it.

        Raises:
            InputError, InputTypeError: something of the question makes no sense.
            TraceError: the step cannot be traced.
        """
        if isinstance(self.model, StepTrace):
            if self.dtype is not None and self.model.dtype != dtype_name(parse_dtype(self.dtype)):
                raise InputError(
                    f"the trace is of dtype {self.model.dtype}, unified_dtype asks for "
                    f"{dtype_name(parse_dtype(self.dtype))}; trace the model again"
                )
            return self.model
        if self._packing is not None and self._packing.flash and hardware.device_kind != "cuda":
            raise InputError(f"flash attention runs on CUDA, and {hardware.name} is none; leave out :flash")
        from elixir.models import user_code
        from elixir.models.model_shape import find
        from elixir.models.step import (
            check_batch,
            default_step,
            generation_input,
            generation_step,
            input_to_trace,
            refused_overflow,
        )
        from elixir.tracer.trace import trace_step

        model, name = self.build() if built is None else built, self.model if isinstance(self.model, str) else None
        forward, step_fn = self.forward or self.generate is not None, self.step_fn or default_step
        if forward and isinstance(self.model, str):
            model.eval()
        if self.generate is not None:
            prompt, new = self.generate
            inp: Any = generation_input(model, batch=self.batch, prompt=prompt, new=new)
            step_fn = generation_step(prompt, new)
        elif self.inp is None:
            documents = None if self._packing is None else self._packing.documents
            inp = input_to_trace(model, batch=self.batch, seq=self.seq, packed=documents)
        else:
            inp = self.inp() if callable(self.inp) else self.inp
            check_batch(inp, self.step_fn)
        shape = None if name is None else find(name)
        # A model by name may be the user's code as well, which has to leave the process as it was.
        around = nullcontext() if name is None else user_code.contained(f"{name}: the step")
        with around, refused_overflow():
            return trace_step(
                model,
                inp,
                step_fn,
                dtype=self.torch_dtype,
                hardware=hardware,
                optimizer=self.optimizer,
                optimizer_kernel=self.optimizer_kernel,
                model_name=name if shape is None else shape.name,
                use_fused_kernels=self.use_fused_kernels,
                compile=self.compile,
                shape=StepShape(
                    checkpoint=self.checkpoint if name and self.inp is None and self.step_fn is None else None,
                    forward=forward,
                    generate=self.generate,
                    packed=None if self._packing is None or self.inp is not None else str(self._packing),
                    lora=self.lora,
                    quantised=self.quantised,
                    activations=self.activations,
                ),
                kinds=kinds,
            )


def _more_positions(made: StepTrace | Plan) -> int | None:
    """The positions of a step, if the model that it names has fewer; otherwise None."""
    from elixir.models.model_shape import find

    shape, step = find(made.model_name), made.step
    tokens = sum(step.generate) if step.generate else step.seq or 0
    own = None if shape is None or "image_size" in shape.config else shape.positions
    return tokens if own is not None and tokens > own else None


class Question(NamedTuple):
    """A step, a machine, and what is asked of its plan."""

    trace: StepTrace
    hardware: HardwareProfile
    request: SearchRequest

    @property
    def nominal(self) -> Question:
        """The same, planned for the rates of the machine alone."""
        return self._replace(request=replace(self.request, assume="nominal"))
