"""Runs compiled layers of a trace as the code that inductor generates for them: its buffers, kernels and products.

Inductor is given each kind of layer once, on fake tensors, and asked for its code. No kernel is built: in a trace they
only cost what they read and write. The rest of the code allocates, frees and multiplies on meta, under the trace's
dispatch mode, and PyTorch's own wrapper keeps what it saves for backward. So peaks and lifetimes are those of the
real compiled step.

If one layer cannot be compiled so, the trace begins anew with uncompiled layers. Private names of the compiler are in
this file and in `pretended_cuda`; where a version lacks one, all layers run uncompiled.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from elixir.errors import TraceError
from elixir.step_trace import Operation
from elixir.torch_private import keep_cuda_guard, tree_flatten, tree_unflatten, while_nothing_compiles
from elixir.tracer.checkpointed_regions import STATE_BYTES
from elixir.tracer.joint_graph import JointGraph, Layout
from elixir.tracer.operation_kinds import passing
from elixir.tracer.pretended_cuda import RANDOM_STATE_BYTES, compiled_for_cuda, pretended_cuda, without_driver

Kinds = dict[Any, Any]
"""By kind of layer, its `JointGraph`. By kind and budget, its code, and in a list what gets the costs of
its kernels in the trace that runs it."""
Settings = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Settings of inductor, and of AOTAutograd, under which a layer is compiled."""

_CHOSEN_BY_RUNNING = (
    "max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "benchmark_fusion", "cpp_wrapper",
    "triton.cudagraphs",
)  # fmt: skip
_ATOMS = (int, float, bool, str, type(None), torch.dtype, torch.device)
_BUILDS_KERNELS = "async_compile = AsyncCompile()"
"""The line of generated code after which its kernels are defined."""
_DRAWS = "torch.ops.higher_order."
"""The place of operators that set the generator's state around another operator, so that it draws alike again."""
_FRESH = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "compile_threads": 1, "cpp.simdlen": 1}
"""Settings of inductor under which code without kernels reaches no cache, no worker process starts, and kernels are
written without vectors: buffers are the same, and a quarter of the time is saved."""
_AHEAD = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
"""Settings of AOTAutograd: backward is compiled together with forward, and not when a trace calls it."""


class GeneratedCode:
    """Compiled layers of one trace, which call generated code until `remove`.

    Args:
        layers: name of a layer -> the layer, and settings of inductor; empty for those that it has now.
        cost: gets what each kernel costs.
        budgets: memory budgets of some layers (`elixir.step_trace.UnitActivations.budget`); the others
            have the one of PyTorch's setting.
        kinds: code of kinds of layers that traces of the same step have found, to which this one adds.
        capability: compute capability of the CUDA device that is planned for; None for a CPU.

    Raises:
        TraceError: a layer with a budget is none of these layers.
    """

    def __init__(
        self,
        layers: Mapping[str, tuple[nn.Module, Mapping[str, Any]]],
        cost: Callable[[Operation], None],
        budgets: Mapping[str, float],
        kinds: Kinds,
        capability: tuple[int, int] | None,
    ) -> None:
        unknown = sorted(budgets.keys() - layers.keys())
        if unknown:
            raise TraceError(
                f"{unknown[0]} has a memory budget of torch.compile, and what it keeps then is known only of layers "
                "that inductor compiles; take the compiler's default backend, or plan without activations="
            )
        self._cost, self._kinds, self._capability = cost, kinds, capability
        self._settings: dict[nn.Module, Any] = {}
        self.layers = [layer for layer, _ in layers.values()]
        """The layers that call generated code."""
        self._before = {layer: layer._compiled_call_impl for layer in self.layers}
        numbered: dict[type, set[tuple[str, str]]] = {}
        for name, (layer, _) in layers.items():
            found = _numbered(layer, name.rpartition(".")[2])
            numbered[type(layer)] = numbered.get(type(layer), found) & found
        for name, (layer, settings) in layers.items():
            flags = tuple(_flags(layer, numbered[type(layer)]))
            layouts = tuple(map(_layout, _tensors_of(layer).values()))
            under = {"activation_memory_budget": budgets[name]} if name in budgets else {}
            self._settings[layer] = (settings, under), (repr(settings), type(layer), flags, layouts)
            layer._compiled_call_impl = partial(self._call, layer)

    def remove(self) -> None:
        """Gives the layers back the calls that they had before."""
        for layer, call in self._before.items():
            layer._compiled_call_impl = call

    def assumption(self, units: int) -> tuple[str, ...]:
        """Says what a trace with so many compiled modules assumes of them."""
        if not units:
            return ()
        if self.layers:
            return (f"{units} compiled modules as the code that inductor generates on this machine",)
        return (
            f"{units} compiled modules with the memory that they take uncompiled, and memory-bound operators fused",
        )

    def _call(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs a layer on meta tensors as its generated code would.

        Raises:
            TraceError: there is no such code for the layer.
        """
        leaves, spec = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = tuple(leaf for leaf in leaves if not isinstance(leaf, torch.Tensor))
        (settings, under), kind = self._settings[layer]
        kind = kind, str(spec), tuple(map(_layout, given)), repr(others), torch.is_grad_enabled()
        key = kind, repr(under)
        if key not in self._kinds:
            try:
                _check(given, others, settings)
                joint = self._kinds.setdefault(kind, _joint_graph(layer, leaves, spec, self._capability))
                costs = [self._cost]
                made = _generated(joint, (settings, under), lambda operation: costs[0](operation), self._capability)
                self._kinds[key] = costs, made
            except Exception as error:  # whatever a compiler raises
                said = f"{type(error).__name__}: {error}".split("\n")[0]
                raise TraceError(f"{type(layer).__name__} has no generated code: {said}") from error
        costs, run = self._kinds[key]
        costs[0] = self._cost
        return run([*_tensors_of(layer).values(), *given])


def _check(given: Sequence[torch.Tensor], others: Sequence[object], settings: Mapping[str, Any]) -> None:
    import torch._inductor.config as inductor_config  # the compiler takes a second to import

    if not all(tensor.is_meta for tensor in given):
        raise NotImplementedError("a tensor on the host among its arguments")
    if not all(isinstance(item, _ATOMS) for item in others):
        raise NotImplementedError("an object among its arguments, which may hold tensors")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise NotImplementedError("autocast")
    if any(settings.get(name, _set(inductor_config, name)) for name in _CHOSEN_BY_RUNNING):
        raise NotImplementedError("code that is chosen by running it")


def _set(config: Any, name: str) -> Any:
    """The value of a setting for all that is compiled, such as by an environment variable; None if there is no such."""
    for part in name.split("."):
        config = getattr(config, part, None)
    return config


def _joint_graph(layer: nn.Module, leaves: list[Any], spec: Any, capability: tuple[int, int] | None) -> JointGraph:
    own = _tensors_of(layer)
    names = list(own)
    layouts = [_layout(item) for item in (*own.values(), *leaves) if isinstance(item, torch.Tensor)]
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    arguments = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    inner = _Uncompiled(layer)

    def call(tensors: Sequence[torch.Tensor]) -> Any:
        """The layer without its compiled call, as a function of tensors."""
        filled = list(arguments)
        for place, tensor in zip(places, tensors[len(names) :], strict=True):
            filled[place] = tensor
        args, kwargs = tree_unflatten(filled, spec)
        return functional_call(inner, {f"layer.{n}": t for n, t in zip(names, tensors, strict=False)}, args, kwargs)

    return JointGraph(layer, call, layouts, len(names), "cpu" if capability is None else "meta")


class _Uncompiled(nn.Module):
    """Calls a layer past its compiled call."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer._call_impl(*args, **kwargs)


def _generated(
    joint: JointGraph, given: Settings, cost: Callable[[Operation], None], capability: tuple[int, int] | None
) -> Callable[[list[torch.Tensor]], Any]:
    """Returns a function of a layer's weights, buffers and tensor arguments that returns what the layer does.

    Args:
        capability: of the CUDA device; None for the CPU.
    """
    run = _in_a_thread_of_its_own(partial(_compiled, joint, given, cost, capability), torch.is_grad_enabled())
    return lambda tensors: tree_unflatten(list(run(*[tensors[place] for place in joint.order])), joint.form)


def _compiled(
    joint: JointGraph, given: Settings, cost: Callable[[Operation], None], capability: tuple[int, int] | None
) -> Callable[..., Any]:
    import torch._functorch.config as aot_config  # the compiler takes a second to import
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    settings, under = given
    ours = {name: value for name, value in settings.items() if getattr(inductor_config, name, value) != value}
    ahead = {name: value for name, value in _AHEAD.items() if hasattr(aot_config, name)} | dict(under)
    with (
        _checkpoints_in_the_graph(joint.layer),
        while_nothing_compiles(),
        inductor_config.patch(ours | _FRESH),
        aot_config.patch(ahead),
        _code_without_kernels(cost),
        joint.recorded_once(),
    ):
        graph, inputs = joint.as_dynamo_gives_it()
        if joint.draws and under.get("activation_memory_budget", 1.0) < 1:
            raise NotImplementedError(
                "it draws random numbers (dropout), and under a memory budget the compiler draws others in backward"
            )
        if capability is None:
            return cast(Callable[..., Any], compile_fx(graph, inputs))
        with pretended_cuda(capability):
            return cast(Callable[..., Any], compile_fx(graph, inputs, inner_compile=compiled_for_cuda))


_CHECKPOINT_OPTIONS = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")


@contextmanager
def _checkpoints_in_the_graph(layer: nn.Module) -> Iterator[None]:
    """Makes the checkpoints that a layer's modules hold leave marks in the graph, as Dynamo's do: the compiler decides
    what is computed again."""
    held = [
        (module, name, value)
        for module in layer.modules()
        for name, value in vars(module).items()
        if getattr(value, "func", value) is checkpoint
    ]
    for module, name, value in held:
        setattr(module, name, partial(_marked, **getattr(value, "keywords", {})))
    try:
        yield
    finally:
        for module, name, value in held:
            setattr(module, name, value)


def _marked(function: Callable[..., Any], *args: Any, context_fn: Any = None, **options: Any) -> Any:
    if context_fn is not None:
        raise NotImplementedError("a checkpoint that keeps some results")
    kept = {name: value for name, value in options.items() if name not in _CHECKPOINT_OPTIONS}

    def contexts() -> tuple[Any, Any]:
        first, again = create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
        first.ac_graph_id = 0
        return first, again

    with torch.fx.traceback.preserve_node_meta():
        return checkpoint(
            partial(function, **kept),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            early_stop=False,
            context_fn=contexts,
        )


def _in_a_thread_of_its_own(work: Callable[[], Any], grad: bool) -> Any:
    """Runs `work` where no mode, hook or autocast of the trace is on: all of these belong to a thread.

    So do settings of the compiler, such as torch's ``activation_memory_budget``, under which the run compiles, too.
    """
    outcome: list[Any] = []
    if not torch.cuda.is_available():
        keep_cuda_guard()

    def run() -> None:
        try:
            with torch.set_grad_enabled(grad):
                outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="elixir-generated-code")
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


@contextmanager
def _code_without_kernels(cost: Callable[[Operation], None]) -> Iterator[None]:
    """Makes inductor return its code on this thread before it is written to a file and its kernels are built."""
    from torch._inductor.graph import GraphLowering

    real, thread = GraphLowering.compile_to_module, threading.get_ident()

    def loaded(graph: Any) -> Any:
        return _loaded(graph, cost) if threading.get_ident() == thread else real(graph)

    GraphLowering.compile_to_module = loaded  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GraphLowering.compile_to_module = real  # type: ignore[method-assign]


def _loaded(graph: Any, cost: Callable[[Operation], None]) -> Any:
    """Runs a module of generated code; its buffers will lie on meta, and its kernels only cost what they touch."""
    source: str = graph.codegen()[0].value
    kind = "cuda" if "cuda" in graph.device_types else "cpu"
    if _BUILDS_KERNELS not in source or f"empty_strided_{kind}" not in source or graph.constants:
        raise NotImplementedError("generated code of another form")

    def kernel(*arguments: Any) -> None:
        touched = {id(item): item for item in arguments if isinstance(item, torch.Tensor)}
        if touched:
            last = list(touched.values())[-1]
            cost(passing(last, sum(_touched_bytes(item) for item in touched.values())))

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")

    nbytes, place = (STATE_BYTES, "meta") if kind == "cpu" else (RANDOM_STATE_BYTES, "cpu")

    def saving(operator: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        return torch.empty(nbytes, dtype=torch.uint8, device=place), operator(*args, **kwargs)

    def restoring(_: torch.Tensor, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return saving(operator, *args, **kwargs)[1]  # it saves the present state, too

    names: dict[str, Any] = {"__name__": "elixir_generated_code"}
    source = source.replace(_BUILDS_KERNELS, "").replace(_DRAWS, "elixir_draws.")
    if kind == "cuda":
        source = without_driver(source, names)
    names["async_compile"] = SimpleNamespace(
        cpp_pybinding=lambda *_: kernel,
        triton=lambda *_, **__: SimpleNamespace(run=lambda *arguments, **_: kernel(*arguments)),
        wait=lambda _: None,
    )
    exec(compile(source, "<generated code>", "exec"), names)
    names |= {f"empty_strided_{kind}": empty, "device": lambda *_, **__: torch.device("meta")}
    # Seeds of attention on CUDA have another shape than in the graph, and nothing has an address.
    names |= {"assert_size_stride": lambda *_: None, "copy_if_misaligned": lambda tensor: tensor}
    names["elixir_draws"] = SimpleNamespace(run_and_save_rng_state=saving, run_with_rng_state=restoring)
    return SimpleNamespace(call=names["call"], runner=names.get("runner"), __file__="<generated code>")


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of distinct elements: an expanded tensor is read once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.itemsize


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _tensors_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _numbered(layer: nn.Module, number: str) -> set[tuple[str, str]]:
    """The settings of a layer's modules that are its `number` in its list, such as ``layer_idx``."""
    return {
        (name, attribute)
        for name, module in layer.named_modules()
        for attribute, value in vars(module).items()
        if type(value) is int and str(value) == number
    }


def _flags(layer: nn.Module, numbered: set[tuple[str, str]]) -> Iterator[tuple[str, str, Any]]:
    """All by which two layers of a class may differ in code: settings of their modules, and the modules' classes.

    Settings that are `numbered` in all layers of the class are left out, and what runs it compiled.
    """
    for name, module in layer.named_modules():
        yield name, "", type(module)
        for attribute, value in vars(module).items():
            ours = attribute == "_compiled_call_impl" or (name, attribute) in numbered
            if isinstance(value, _ATOMS) and not ours:
                yield name, attribute, value
