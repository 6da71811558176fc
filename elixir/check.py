"""Finds what would be refused where weights are streamed: `elixir check` and ``wrap(strict=True)``.

If all weights stay on the device, a step is plain PyTorch. A program may then read a weight outside of its module, or
write to it through `.data`, which a smaller machine refuses. So the check runs two steps of a copy on the CPU. It
evicts every weight after each use, fills freed blocks with NaN, and compares the weights with those of plain PyTorch.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from elixir.access.compiled_units import uncompiled
from elixir.access.whole import held, holds_others
from elixir.chunk.group import new_group
from elixir.errors import ElixirError, InputError, shortened
from elixir.hardware.profile import preset
from elixir.models.step import check_batch, check_step, default_input, default_step, with_tensors
from elixir.models.user_code import GENERATORS, restored
from elixir.optimizer_states import moments_of
from elixir.plan.plan import Plan
from elixir.search import simple_search
from elixir.tracer.trace import trace_step
from elixir.tracer.user_objects import user_objects_restored
from elixir.tracer.values.unknown_number import raised_in
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from elixir.wrapper.engine import engine_of
from elixir.wrapper.optimizer import check_given, families_of
from elixir.wrapper.step.user_optimizer import check_optimizer

STEPS = 2
"""The second one reads weights that the first one has written."""
CHUNKS = 32
"""Chunks of the plan; there are fewer if the largest parameter needs larger chunks."""
MADE_UP_STD = 0.02
"""Standard deviation of weights that are on meta."""
RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Differences to plain PyTorch that rounding may make."""

StepFn = Callable[[nn.Module, Any], Any]
Part = Literal["optimizer", "trace", "step", "numbers"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """Something that would be refused, or would go wrong."""

    part: Part
    """The check that found it: of the optimizer, of the trace, of the step, or of the weights after it."""
    sentence: str
    place: str = ""
    """``file:line`` of the innermost code that is neither Elixir's nor PyTorch's; empty if the sentence has it."""

    def __str__(self) -> str:
        return f"{self.part}: {self.place + ': ' if self.place else ''}{self.sentence}"


def refusals(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    inp: Any = None,
    step_fn: StepFn | None = None,
    *,
    dtype: torch.dtype | None = None,
    moments: str | None = None,
    use_fused_kernels: bool | Mapping[str, str] = False,
) -> tuple[Refusal, ...]:
    """Finds the first refusal of each part of a step; an empty tuple means that no machine refuses it.

    Model, optimizer and whatever else the step reaches stay as they are. The check needs host memory for two copies of
    the weights, for gradients and for states. Weights on meta get random values.

    Args:
        model, optimizer, inp, step_fn: as in `elixir.wrap`.
        dtype, moments, use_fused_kernels: as in `elixir.wrap`.

    Raises:
        InputError: the step fails in plain PyTorch on the CPU.
        InputError, InputTypeError: an argument is of the wrong type, or the optimizer steps another model.
    """
    optimizers = check_given(model, optimizer)
    if inp is not None:
        check_batch(inp, step_fn)
    step = default_step if step_fn is None else step_fn
    check_step(step)
    batch = with_tensors(torch.Tensor.cpu, default_input(model) if inp is None else inp)
    run = _Check(model, optimizers, batch, step)
    with restored(*GENERATORS), _gradients_kept(model), uncompiled(model):  # copies lose what was compiled
        run.look_at_optimizers(moments)
        expected = run.plain()
        plan = run.plan(dtype, use_fused_kernels, None if moments is None else str(moments))
        if plan is not None:
            found = run.streamed(plan, use_fused_kernels)
            if found is not None and dtype is None and not use_fused_kernels:
                run.compare(expected, found)
    return tuple(run.found)


def raise_refusals(found: Sequence[Refusal]) -> None:
    """Raises `InputError` if anything was found."""
    if found:
        raise InputError(
            "strict=True: a machine that streams weights would refuse this program: " + "; ".join(map(str, found))
        )


class _Check:
    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], batch: Any, step: StepFn) -> None:
        self.model, self.optimizers, self.batch, self.step = model, optimizers, batch, step
        self.found: list[Refusal] = []

    def plain(self) -> dict[str, Any]:
        """Weights and buffers after the steps in plain PyTorch."""
        model, optimizers = self._copies()
        with self._no_weight_of_the_original():
            try:
                self._steps(model, optimizers)
            except Exception as error:
                place = raised_in(error)
                raise InputError(
                    f"{place}{': ' if place else ''}the step fails in plain PyTorch on the CPU "
                    f"({type(error).__name__}: {shortened(str(error), 300)}); it has to run there to be checked"
                ) from error
        return model.state_dict()

    def look_at_optimizers(self, moments: str | None) -> None:
        """Finds optimizers that would be refused, and replaces them by SGD so that the check can go on."""
        for index, each in enumerate(self.optimizers):
            try:
                check_optimizer(each, moments_of(each, moments))  # type: ignore[arg-type]
                families_of(self.model, [each])
            except ElixirError as error:
                self._refuse("optimizer", str(error))
                groups = [{"params": group["params"]} for group in each.param_groups]
                self.optimizers[index] = torch.optim.SGD(groups, lr=1e-3)

    def plan(self, dtype: torch.dtype | None, use_fused_kernels: Any, moments: str | None) -> Plan | None:
        """Makes a plan that streams everything; for a step that cannot be traced, as if it used each weight once."""
        try:
            families = families_of(self.model, self.optimizers, moments)
        except ElixirError as error:
            self._refuse("optimizer", str(error))
            return None
        share = 1e-9  # as few blocks as the step can do with
        for step in (self.step, _uses_all):
            try:
                trace = trace_step(
                    self.model,
                    self.batch,
                    step,
                    dtype=dtype,
                    hardware=preset("cpu"),
                    optimizer=None,
                    use_fused_kernels=use_fused_kernels,
                )
                return simple_search(
                    trace,
                    1,
                    split_number=CHUNKS,
                    allocate_factor=share,
                    shard_device="cpu",
                    optimizer_type=families.optimizer_type,
                    matrices=families.matrices,
                    moments=families.moments,
                    hardware="cpu",
                ).plan
            except ElixirError as error:
                if step is _uses_all:
                    return None  # the model cannot be planned at all; the first round has said why
                self._refuse("trace", str(error))
                share = 1.0
        return None

    def streamed(self, plan: Plan, use_fused_kernels: Any) -> dict[str, Any] | None:
        """Weights and buffers after the steps under the plan; None if something was refused."""
        model, optimizers = self._copies()
        debug = Debug(poison=True, evict_always=True)
        module: ElixirModule | None = None
        try:
            with _alone() as group:
                module = ElixirModule(
                    model, plan, group, use_fused_kernels=use_fused_kernels, device="cpu", debug=debug
                )
                engine_of(module).observer = None  # the plan's machine does not exist, so no step is compared with it
                try:
                    self._steps(module, [ElixirOptimizer(module, each) for each in optimizers])
                    return module.state_dict()
                finally:
                    with contextlib.suppress(ElixirError):  # a step that was refused midway may leave open work
                        module.close()
        except Exception as error:
            sentence = str(error)
            if not isinstance(error, ElixirError):
                sentence = f"raises {type(error).__name__}, but not in plain PyTorch: {shortened(sentence, 300)}"
            place = raised_in(error)
            self._refuse("step", sentence, "" if place in sentence else place)
            return None

    def compare(self, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Adds a refusal if weights or buffers differ from those of plain PyTorch."""
        differing = [name for name, value in expected.items() if not _same(value, found.get(name))]
        if differing:
            self._refuse(
                "numbers",
                f"after {STEPS} steps {len(differing)} of {len(expected)} weights and buffers are not those of plain "
                f"PyTorch, such as {differing[0]!r}; something reads or writes weights unseen",
            )

    def _refuse(self, part: Part, sentence: str, place: str = "") -> None:
        self.found.append(Refusal(part=part, sentence=sentence, place=place))

    def _steps(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Each run begins with what the first one found, such as a generator that the step draws from.
        reached = (self.model, self.step, self.batch, *self.optimizers)  # models and optimizers have hooks
        with restored(*GENERATORS), user_objects_restored(*reached, writes_unseen=True):
            for _ in range(STEPS):
                self.step(model, with_tensors(torch.Tensor.clone, self.batch))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

    @contextlib.contextmanager
    def _no_weight_of_the_original(self) -> Iterator[None]:
        """Refuses functions that run the model itself, whose weights get gradients, where its copy is run."""
        reached: list[str] = []
        handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.append(name))
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if reached:
            raise InputError(
                f"a copy of the model is checked, but something in it uses weight {reached[0]!r} of the model itself, "
                "such as a closure over it or a global name for it; reach the model's parts by self"
            )

    def _copies(self) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Copies model and optimizers to the CPU, with the same values."""
        memo: dict[int, Any] = {}
        generator = torch.Generator().manual_seed(0)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.device.type != "cpu":
                value = _made_up(tensor, generator) if tensor.is_meta else tensor.detach().cpu()
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                memo[id(tensor)] = value
        optimizers = []
        try:
            model = copy.deepcopy(self.model, memo)
            for each in self.optimizers:
                # `copy.deepcopy` would leave out attributes of a derived class, as `Optimizer.__getstate__` does.
                memo[id(each)] = made = object.__new__(type(each))
                vars(made).update(copy.deepcopy(vars(each), memo))
                optimizers.append(made)
        except Exception as error:
            raise InputError(
                f"model and optimizer cannot be copied to be checked ({type(error).__name__}: {error}); keep locks, "
                "generators and process groups out of their attributes"
            ) from error
        return model, optimizers


def _uses_all(model: nn.Module, inp: Any) -> None:
    torch.stack([each.sum() for each in model.parameters() if each.requires_grad]).sum().backward()


def _made_up(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    value = torch.zeros_like(tensor, device="cpu")
    return value.normal_(std=MADE_UP_STD, generator=generator) if isinstance(tensor, nn.Parameter) else value


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return True
    if not isinstance(other, torch.Tensor) or one.shape != other.shape:
        return False
    if holds_others(one):
        return type(one) is type(other) and all(_same(each, getattr(other, name)) for name, each in held(one))
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one.float(), other.float(), rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)


@contextlib.contextmanager
def _alone() -> Iterator[dist.ProcessGroup | None]:
    """Gives a process group that has only this rank, or None without process groups."""
    if not (dist.is_available() and dist.is_initialized()):
        yield None
        return
    group = new_group([dist.get_rank()], backend="gloo", alone=True)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


@contextlib.contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """Puts gradients of the model back, since a step may run the user's model instead of the copy that it is given."""
    before = [(each, each.grad, None if each.grad is None else each.grad.clone()) for each in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient, value in before:
            parameter.grad = gradient
            if gradient is not None and value is not None:
                gradient.copy_(value)
