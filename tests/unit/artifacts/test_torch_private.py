"""Each private name of PyTorch does what it is used for, in the installed version."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch._functorch.aot_autograd import aot_function

from elixir import torch_private as private

ROOT = Path(__file__).parents[3]


class Announced(torch.Tensor):
    uses = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Announced.uses += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Counted(private.TorchDispatchMode):
    operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert isinstance(func, private.OpOverload)
        self.operators += 1
        return func(*args, **(kwargs or {}))


def modes() -> None:
    tensor, before = torch.zeros(2).as_subclass(Announced), Announced.uses
    with private.DisableTorchFunctionSubclass():
        assert not private.torch_function_is_enabled()
        tensor.sum()
    with private.DisableTorchFunction():
        tensor.sum()
    assert Announced.uses == before
    assert private.torch_function_is_enabled()
    with Counted() as mode:
        torch.ones(2).neg()
        seen = mode.operators
        with private.DisableTorchDispatch():
            torch.ones(2).neg()
        assert private.dispatch_mode_count() == 1
        with private.without_dispatch_modes():
            assert private.dispatch_mode_count() == 0
            torch.ones(2).neg()
    assert mode.operators == seen == 2
    assert torch.Tensor.__torch_dispatch__ is private.TopDispatch
    assert Announced.__torch_dispatch__ is private.TopDispatch


def transforms() -> None:
    levels = []
    assert private.functorch_level() is None
    torch.func.vmap(lambda x: levels.append(private.functorch_level()) or x)(torch.zeros(2))
    assert levels == [1]
    forward_mode: list[bool] = [private.forward_mode_runs()]
    for around in (torch.func.vmap, torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        around(lambda x: forward_mode.append(private.forward_mode_runs()) or x.sum())(torch.zeros(2))
    assert forward_mode == [False, False, False, True]


def keys() -> None:
    key = private.dispatch_key("DeferredInit")
    assert not private.dispatch_keys(torch.zeros(1)).has(key)
    before = private.key_is_excluded(key)
    private.exclude_key(key, not before)
    assert private.key_is_excluded(key) is not before
    private.exclude_key(key, before)
    made = private.make_wrapper_subclass(
        type("Lent", (torch.Tensor,), {"__torch_dispatch__": classmethod(lambda *_: None)}),
        (2, 3),
        _extra_dispatch_keys=private.DispatchKeySet(key),
    )
    assert private.dispatch_keys(made).has(key)
    assert made.shape == (2, 3)
    operators = private.operator_names()
    assert "aten::mm" in operators
    assert private.has_kernel("aten::mm", "AutocastCUDA")
    assert not private.has_kernel("aten::view", "AutocastCUDA")
    autocast = private.dispatch_key("AutocastCPU")
    for is_on in (True, False):
        private.include_key(autocast, is_on)
        assert torch._C._dispatch_tls_is_dispatch_key_included(autocast) is is_on
    with private.ExcludeDispatchKeyGuard(private.DispatchKeySet(autocast)):
        assert private.key_is_excluded(autocast)


def autograd() -> None:
    assert private.saved_tensors_hooks_are_enabled()
    assert private.top_saved_tensors_hooks(True) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert len(private.top_saved_tensors_hooks(True)) == 2
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        assert not private.saved_tensors_hooks_are_enabled()
    over: list[int] = []
    numbers: list[tuple[int, int]] = []

    def heard(gradient: torch.Tensor) -> None:
        numbers.append((private.current_graph_task_id(), private.current_autograd_node()._sequence_nr()))
        private.call_after_backward(lambda: over.append(len(numbers)))

    weight = torch.ones(2, requires_grad=True)
    assert private.current_graph_task_id() == -1
    assert private.current_autograd_node() is None
    first = private.sequence_number()
    product = weight * 2
    product.register_hook(heard)
    assert private.sequence_number() == first + 1
    product.sum().backward()
    assert over == [1]
    assert numbers[0][0] >= 0
    version = weight._version
    with torch.no_grad(), private.version_counter_kept(weight):
        weight.add_(1)
    assert weight._version == version
    seen: list[Any] = []
    with private.seeing_backwards(lambda *found: seen.append(found)):
        loss = (weight * 2).sum()
        loss.backward(retain_graph=True)
        torch.autograd.backward(loss, inputs=[weight], retain_graph=True)
        torch.autograd.grad(loss, weight, retain_graph=True)
        loss.backward(create_graph=True)
    torch.autograd.grad((weight * 2).sum(), weight)
    assert [outputs[0] is loss for outputs, _ in seen] == [True] * 4
    assert [asks for _, asks in seen] == [False, True, True, True]


class Count:
    def __init__(self, count: int):
        self.count = count

    def more(self) -> int:
        return self.count + 1


def scripts() -> None:
    called = []

    def call(method: Any, *args: Any) -> Any:
        called.append((method.name, private.script_parameters(method.owner)))
        return original(method, *args)

    scripted: Any = torch.jit.script(nn.Sequential(nn.Linear(2, 2, bias=False)))
    counts: Any = torch.jit.script(Count(1))
    original, x = private.ScriptMethod.__call__, torch.ones(1, 2)
    private.ScriptMethod.__call__ = call
    try:
        scripted(x)
        scripted.forward(x)
        assert counts.more() == 2
    finally:
        private.ScriptMethod.__call__ = original
    assert [(name, len(found)) for name, found in called] == [("forward", 1), ("forward", 1), ("more", 0)]
    assert all(found[0] is next(scripted.parameters()) for _, found in called[:2])


def tensors() -> None:
    rnn = nn.RNN(2, 2)  # keeps weak references to its parameters
    parameter = next(rnn.parameters())
    value = nn.Parameter(torch.full_like(parameter, 3.0))
    private.swap_tensors(parameter, value)
    assert parameter[0, 0] == 3
    assert next(rnn.parameters()) is parameter
    assert private.has_internal_overlap(torch.zeros(1).expand(2))
    assert not private.has_internal_overlap(torch.zeros(2))
    image = torch.zeros(2, 3, 4, 4)
    assert private.suggest_memory_format(image) is torch.contiguous_format
    assert private.suggest_memory_format(image.to(memory_format=torch.channels_last)) is torch.channels_last
    assert private.suggest_memory_format(image[0]) is torch.contiguous_format
    assert private.suggest_memory_format(image[:, :1]) is torch.contiguous_format
    one = torch.zeros(2)
    alone = private.references(one)
    other = one.detach()
    assert private.references(one)[1] == alone[1] + 1
    assert private.foreach_norm([other + 1], 2.0, dtype=torch.float32)[0] == pytest.approx(2**0.5)
    assert callable(private.fused_adam)
    assert callable(private.fused_adamw)
    leaves, form = private.tree_flatten({"a": [1, (2,)]})
    assert private.tree_unflatten(leaves, form) == {"a": [1, (2,)]}
    assert private.tree_leaves([1, [2]]) == [1, 2]
    assert private.tree_map(lambda x: x + 1, [1, (2,)]) == [2, (3,)]


def kernels() -> None:
    weight = torch.ones(2, requires_grad=True)
    with private.below_autograd():
        assert (weight * 2).grad_fn is None
    with torch.backends.mkldnn.flags(enabled=False):
        assert not private.onednn_is_enabled()
    found = private.allocations(lambda: torch.ones(100) + torch.ones(100))
    assert found is not None
    made, changes = found
    assert made.shape == (100,)
    assert changes[:3] == [400, 400, 400]
    assert sum(changes) == 400
    with torch.autograd.profiler.profile(use_kineto=False):
        assert private.allocations(lambda: None) is None


def compiled_code() -> None:
    found: list[bool] = []
    noted = torch.compile(lambda x: found.append(bool(private.compiling())) or x + 1, backend="eager")
    for call in (noted, torch.compiler.disable(lambda x: found.append(bool(private.compiling())))):
        call(torch.ones(2))
    assert not private.compiling()
    assert found == [True, False]

    def backend(graph: Any, inputs: Any) -> Any:
        """Looks from another thread whether it may go on while this one compiles."""
        lock = private.while_nothing_compiles()
        with ThreadPoolExecutor(1) as pool:
            taken.append((torch.compiler.is_compiling(), pool.submit(lock.acquire, blocking=False).result()))
        return graph

    taken: list[tuple[bool, bool]] = []
    torch.compile(lambda x: x + 2, backend=backend)(torch.ones(2))
    assert taken in ([(True, False)], [(False, False)])  # before 2.12 PyTorch does not say so in a backend
    asked: list[bool] = []

    def recorded(x: torch.Tensor) -> torch.Tensor:
        asked.append(private.is_recorded(x))
        return x * 2

    aot_function(recorded, fw_compiler=lambda graph, _: graph)(torch.ones(2, requires_grad=True))
    recorded(torch.ones(2))
    assert asked[0]
    assert not asked[-1]


def optimizers() -> None:
    first, second = (torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1) for _ in range(2))
    private.share_hooks(first, second)
    seen: list[str] = []
    first.register_step_pre_hook(lambda *_: seen.append("step"))
    handle = first.register_step_post_hook(lambda *_: seen.append("no more"))
    handle.remove()
    second.register_state_dict_pre_hook(lambda *_: seen.append("state dict"))
    second.step()
    assert [hook(first) for hook in private.hooks_of(first, "state_dict_pre")] == [None]
    assert seen == ["step", "state dict"]
    noted: list[bool] = []
    as_it_is = private.not_compiled(lambda: noted.append(torch.compiler.is_compiling()))
    torch.compile(lambda: as_it_is(), backend="eager")()
    assert noted == [False]


def contexts() -> None:
    torch.set_default_device("meta")
    try:
        assert private.default_device_context.device_context.device == torch.device("meta")
    finally:
        torch.set_default_device(None)
    asked = []
    checks = dict.fromkeys(private.checks_of_checkpoints, asked.append)
    with mock.patch.dict(private.checks_of_checkpoints, checks):
        torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert [tensor.shape for tensor in asked] == [(2,)]


@pytest.mark.parametrize(
    "used", [modes, transforms, keys, autograd, kernels, scripts, tensors, compiled_code, optimizers, contexts]
)
def test_does_what_it_is_used_for(used: Callable[[], None]) -> None:
    used()


def owners() -> dict[str, Any]:
    """An object that has the attribute, for each private attribute whose owner needs no process group."""
    parameter, module = nn.Parameter(torch.zeros(2)), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([parameter], 0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer.step()
    found: dict[str, Any] = dict.fromkeys(
        ["_version", "_base", "_is_view", "_use_count", "_backward_hooks", "_post_accumulate_grad_hooks"], parameter
    )
    found |= dict.fromkeys(
        [
            "_backward_pre_hooks",
            "_forward_hooks",
            "_forward_pre_hooks",
            "_parameters",
            "_buffers",
            "_modules",
            "_apply",
            "_compiled_call_impl",
            "_call_impl",
        ],
        module,
    )
    found |= dict.fromkeys(["_schema", "_overloadpacket"], torch.ops.aten.mm.default)
    return found | {
        "_cdata": parameter.untyped_storage(),
        "_non_persistent_buffers_set": module,
        "_sequence_nr": (parameter * 2).grad_fn,
        "_destroy": torch.library.Library("aten", "IMPL"),
        "_c": torch.jit.script(nn.ReLU()),
        "_opt_called": optimizer.step if hasattr(optimizer.step, "_opt_called") else optimizer,
        "_get_backend": torch.distributed.ProcessGroup,
    }


NEEDS_MORE = {"_timeout": "a process group", "_init_weights": "a model of transformers"}
"""Attributes whose owners other tests make: of time limits of a group, and of initial values."""


def test_attributes_are_there() -> None:
    assert [name for name, owner in owners().items() if not hasattr(owner, name)] == []


def test_the_linter_allows_these_attributes_and_operators_of_aten() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = set(re.findall(r'"(\w+)"', text.partition("extend-ignore-names = [")[2].partition("]")[0]))
    attributes = owners().keys() | NEEDS_MORE.keys()
    assert attributes <= listed
    others = listed - attributes - {"_getframe", "_filters_mutated"}
    assert [name for name in others if not hasattr(torch.ops.aten, name)] == []
