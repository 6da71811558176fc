"""`HybridAdam`: Adam for parameters anywhere, in any precision; its states may live on a disk (`DiskStates`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn

from elixir.errors import InputError, InputTypeError
from elixir.extents.extent_file import ExtentFile
from elixir.extents.stored_tensors import StoredTensors, TensorFile, paged_memory
from elixir.files import PathLike
from elixir.kernels.adam.adam_rule import AdamOptions, check_step, group_options
from elixir.kernels.adam.moments import Moments, make_moments
from elixir.kernels.adam.step import adam_step
from elixir.memory_order import is_dense
from elixir.optimizer_states import check_kind
from elixir.units import dtype_name

# --- disk states -----------------------------------------------------------------------------------------------------
# States of a `HybridAdam` that live on a disk, without a plan: read for their step, and written during the next.


class DiskStates:
    """States of some parameters, in a file without a name.

    Args:
        folder: on the disk.
        parameters: whose states live there; all in host memory.
        states: the states of an optimizer. Those of `parameters` are in memory until `put_away`, and then only inside
            of `in_turn`.
    """

    def __init__(
        self, folder: PathLike, parameters: Sequence[nn.Parameter], states: MutableMapping[Any, dict[str, Any]]
    ) -> None:
        file = ExtentFile([folder])  # it is closed with its last reference
        self.folder, self.parameters = folder, dict.fromkeys(parameters)
        self._states, self._file = states, TensorFile(lambda: file)
        self._stored: dict[nn.Parameter, StoredTensors] = {}

    def put_away(self) -> None:
        """Writes all states that there are. Raises as `in_turn`; nothing can be read any more then."""
        self.in_turn([parameter for parameter in self.parameters if parameter in self._states], lambda parameter: None)

    def in_turn(
        self, parameters: Sequence[nn.Parameter], work: Callable[[nn.Parameter], object], *, write: bool = True
    ) -> None:
        """Calls `work` for each parameter while its states are in memory; with `write` it may change them, or make them
        if there are none. While one is read and stepped, the one before is written.

        Raises:
            DiskError: the disk has failed, now or before.
        """
        if self._file.lost is not None:
            raise self._file.lost
        writes: list[Future[None]] = []
        with ThreadPoolExecutor(1, "elixir disk") as lane:  # which has written all when it ends
            for parameter in parameters:
                stored, store = self._stored.get(parameter), None
                memory = paged_memory(0 if stored is None else stored.nbytes)
                if stored is not None:
                    stored.fill(memory)
                    stored.bind(memory)
                try:
                    work(parameter)
                    store = self._kept(parameter, memory) if write else None
                finally:
                    if store is None and stored is not None:
                        stored.put_away()
                wait(writes[-1:])
                if store is not None:
                    writes.append(lane.submit(store))
        for written in writes:
            written.result()

    def _kept(self, parameter: nn.Parameter, memory: torch.Tensor) -> Callable[[], None] | None:
        """A function that writes a state from memory to its place, which is new if its tensors are; None without."""
        values = self._states[parameter].items()
        tensors = {name: value for name, value in values if isinstance(value, torch.Tensor) and value.dim()}
        stored = self._stored.pop(parameter, None)
        if stored is None or list(map(id, tensors.values())) != list(map(id, stored.tensors)):
            if stored is not None:
                stored.give_back()
            if not tensors:
                return None
            # Each tensor begins at a multiple of its itemsize.
            nbytes = sum(value.nbytes + value.itemsize for value in tensors.values())
            stored = StoredTensors(self._file, "a HybridAdam", nbytes)
            memory = paged_memory(stored.nbytes)
            stored.bind(memory)
            for name, value in tensors.items():
                order = value.stride()
                stored.region(name, value.numel(), value.dtype).as_strided(value.shape, order).copy_(value)
                stored.show(None, value, name, stride=order)
        self._stored[parameter] = stored
        return partial(stored.store, memory)


def chosen(parameters: Iterable[nn.Parameter], fraction: float) -> list[nn.Parameter]:
    """The first parameters in host memory that together have this part of its elements."""
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise InputTypeError(f"nvme_offload_fraction must be a number, got {fraction!r}")
    if not 0 <= fraction <= 1:
        raise InputError(f"nvme_offload_fraction must be from 0 to 1, got {fraction}")
    here = [parameter for parameter in parameters if parameter.device.type == "cpu" and parameter.numel()]
    ends = [*accumulate(parameter.numel() for parameter in here)]
    return [parameter for parameter, end in zip(here, ends, strict=True) if end <= fraction * ends[-1]]


# --- hybrid adam -----------------------------------------------------------------------------------------------------


_STEPPED = (torch.float32, torch.bfloat16, torch.float16)
_SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
_MOMENTS = ("exp_avg", "exp_avg_sq", *_SCALES)
"""Names of moments in a state, in the order in which `Moments` takes them."""


class HybridAdam(torch.optim.Optimizer):
    """Adam or AdamW whose parameters may lie on CPU and CUDA devices at once, each stepped where it lies.

    float32 parameters are stepped as they are. bfloat16 and float16 ones have a float32 master in the state and are
    the master, rounded, after each step; a parameter that was written to in between is taken over first. Numbers follow
    `torch.optim.AdamW` (or `Adam`) over float32 to rounding. State dicts go both ways between the two as long as
    moments are float32.

    Args:
        params: parameters or groups of them; every other argument may be set per group.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decay per step and learning rate.
        adamw_mode: decoupled decay as in AdamW; else the L2 term of Adam.
        moments: ``float32``, ``bfloat16`` or ``8bit`` (see `elixir.kernels.adam.moments`); used when a parameter is
            first stepped.
        maximize: ascend rather than descend.
        amsgrad: not supported; here so that a configuration that asks for it is refused.
        nvme_offload_fraction: part of the elements in host memory whose states live on a disk, from the first parameter
            on; with a plan, the plan says that instead (`disk_folder` of `ElixirModule`). A copy of the optimizer, by
            `pickle`, `copy.deepcopy` or `torch.save`, has all states in memory.
        nvme_offload_dir: a folder on that disk. Nothing stays there when the process ends; `state_dict` has all states.

    Raises:
        InputError, InputTypeError: an option out of range; a parameter that is neither float32, bfloat16 nor float16.

    Example:
        >>> model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
        >>> optimizer = HybridAdam(model.parameters(), lr=1e-3, weight_decay=0.1)
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(  # noqa: PLR0913 - torch's own arguments
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        moments: str = "float32",
        maximize: bool = False,
        amsgrad: bool = False,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: PathLike | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adamw_mode": adamw_mode,
            "moments": moments,
            "maximize": maximize,
            "amsgrad": amsgrad,
        }
        self._versions: dict[nn.Parameter, int] = {}  # versions of weights with masters, after their last step
        self._on_disk: DiskStates | None = None
        super().__init__(params, defaults)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        offloaded = chosen(parameters, nvme_offload_fraction)
        if nvme_offload_fraction and nvme_offload_dir is None:
            raise InputError("nvme_offload_fraction needs nvme_offload_dir, a folder on the disk")
        if offloaded and nvme_offload_dir is not None:
            self._on_disk = DiskStates(nvme_offload_dir, offloaded, self.state)
            self._on_disk.put_away()

    @property
    def _away(self) -> dict[nn.Parameter, None]:
        """Parameters whose states live on a disk, in order."""
        return {} if self._on_disk is None else self._on_disk.parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as torch does, and checks its options and parameters."""
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            _options(group)
            for parameter in group["params"]:
                _check_parameter(parameter)
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, factor: float = 1.0) -> Any:
        """One step with the gradients there are, times `factor` (one over a loss scale, or what clipping leaves).

        Returns:
            What `closure` returned, else None.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        check_step(1, factor)
        later: dict[nn.Parameter, Callable[[nn.Parameter], None]] = {}
        for group in self.param_groups:
            step_one = partial(self._step_one, options=_options(group), kind=group["moments"], factor=factor)
            for parameter in group["params"]:
                if parameter.grad is None or not parameter.numel():
                    continue
                if parameter in self._away:
                    later[parameter] = step_one
                else:
                    step_one(parameter)
        if self._on_disk is not None:
            self._on_disk.in_turn([*later], lambda each: later[each](each))
        return result

    def _step_one(self, parameter: nn.Parameter, options: AdamOptions, kind: str, factor: float) -> None:
        gradient = cast(torch.Tensor, parameter.grad)  # the caller steps those that have one
        if gradient.is_sparse or gradient.layout is not torch.strided:
            raise InputError("HybridAdam steps dense gradients; use sparse=False in the embedding, or SparseAdam")
        # Checked here and not earlier: another optimizer that steps for this one may keep parameters anywhere.
        if not is_dense(parameter.shape, parameter.stride()):
            raise InputError(
                "a parameter must be dense and without overlap in memory; call .contiguous() before wrapping it"
            )
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        state, weights, weight_out = self.state[parameter], flat(parameter), None
        if "exp_avg" not in state:
            _begin(state, parameter, weights, kind)
        master = weights
        if parameter.dtype != torch.float32:
            master, weight_out = flat(state["master"]), weights
            if self._versions.get(parameter) != parameter._version:
                _follow(master, weights)
        kept = check_kind("8bit" if _SCALES[0] in state else dtype_name(state["exp_avg"].dtype))
        moments = Moments(kept, *(flat(state[name]) for name in _MOMENTS if name in state))
        state["step"] += 1
        adam_step(flat(gradient), master, weight_out, moments, options, int(state["step"]), factor)
        torch.autograd.graph.increment_version(parameter)  # the C++ kernel does not tell autograd that it wrote
        if weight_out is not None:
            self._versions[parameter] = parameter._version

    def state_dict(self) -> dict[str, Any]:
        """Gives torch's state dict; states that live on a disk are read into separate memory."""
        with self._in_memory():
            return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        """Gives a copy all states, in memory."""
        with self._in_memory():
            return super().__getstate__()

    @contextlib.contextmanager
    def _in_memory(self) -> Iterator[None]:
        """While it lasts, `state` has copies of the tensors that live on a disk."""
        before = self.state
        if self._on_disk is not None:
            whole = before.copy()

            def read(parameter: nn.Parameter) -> None:
                values = before[parameter].items()
                whole[parameter] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values}

            self._on_disk.in_turn([each for each in self._away if each in before], read, write=False)
            self.state = whole
        try:
            yield
        finally:
            self.state = before

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state dict of a `HybridAdam`, or of torch's `Adam` or `AdamW`; to the bit, and as a copy.

        Raises:
            InputError: states that are none of Adam's, or of amsgrad.
        """
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        # torch's loading casts states to the parameter's dtype, which would round masters and moments.
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in saved:
                self.state[parameter] = _loaded(saved[number], parameter)
        if self._on_disk is not None:
            self._on_disk = DiskStates(self._on_disk.folder, [*self._away], self.state)
            self._on_disk.put_away()  # if that fails, the disk has lost states, and says so from here on

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickled, or loaded: groups that torch's own Adam wrote lack some options, and have others."""
        super().__setstate__(state)
        self._versions = {}
        self._on_disk = getattr(self, "_on_disk", None)
        for group in self.param_groups:
            group.setdefault("moments", "float32")
            group.setdefault("maximize", False)
            group.setdefault("amsgrad", False)
            decoupled = group.pop("decoupled_weight_decay", self.defaults.get("adamw_mode", True))
            group.setdefault("adamw_mode", decoupled)
            _options(group)


def _begin(state: dict[str, Any], parameter: nn.Parameter, weights: torch.Tensor, kind: str) -> None:
    """The state before the first step."""
    moments = make_moments(parameter.numel(), kind, parameter.device)
    # torch's own Adam keeps its count as a float32 tensor.
    state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
    if moments.kind == "8bit":
        state["exp_avg"], state["exp_avg_sq"] = moments.exp_avg, moments.exp_avg_sq
        state[_SCALES[0]], state[_SCALES[1]] = moments.exp_avg_scale, moments.exp_avg_sq_scale
    else:
        state["exp_avg"] = torch.as_strided(moments.exp_avg, parameter.shape, parameter.stride())
        state["exp_avg_sq"] = torch.as_strided(moments.exp_avg_sq, parameter.shape, parameter.stride())
    if parameter.dtype != torch.float32:
        state["master"] = torch.as_strided(weights.float(), parameter.shape, parameter.stride())


def _follow(master: torch.Tensor, weights: torch.Tensor) -> None:
    """Weights that are not what their master rounds to were written to, by loading or by hand: the master follows."""
    written = master.to(weights.dtype) != weights
    master.copy_(torch.where(written, weights.float(), master))


def _loaded(saved: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """A parameter's state from a saved one: a copy on the parameter's device, in the parameter's order in memory."""
    if not saved:
        return {}
    missing = [name for name in ("step", "exp_avg", "exp_avg_sq") if name not in saved]
    if missing or "max_exp_avg_sq" in saved:
        found = ", ".join(sorted(saved))
        raise InputError(f"a state of Adam without amsgrad has step, exp_avg and exp_avg_sq; this one has {found}")
    state: dict[str, Any] = {"step": torch.tensor(float(saved["step"]), device="cpu")}
    for name in (name for name in (*_MOMENTS, "master") if name in saved):
        value = saved[name]
        if _SCALES[0] in saved and name != "master":
            state[name] = value.to(parameter.device, copy=True)
            continue
        if value.shape != parameter.shape:
            raise InputError(f"{name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
        dtype = torch.float32 if value.dtype == torch.float16 or name == "master" else value.dtype
        state[name] = torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(value)
    if parameter.dtype == torch.float32:
        state.pop("master", None)
    elif "master" not in state:
        state["master"] = parameter.detach().float()
    return state


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor in the order in which they lie in memory, without a copy."""
    tensor = tensor.detach()
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _check_parameter(parameter: torch.Tensor) -> None:
    if parameter.dtype not in _STEPPED:
        raise InputError(
            f"HybridAdam steps float32, bfloat16 and float16 parameters, got {parameter.dtype}; use torch.optim.AdamW"
        )
    if parameter.layout is not torch.strided:
        raise InputError(f"a parameter must be strided, got {parameter.layout}; use SparseAdam")


def _options(group: dict[str, Any]) -> AdamOptions:
    """The options of a group, which has none that `HybridAdam` lacks."""
    if group["amsgrad"]:
        raise InputError("HybridAdam has no amsgrad; use torch.optim.AdamW(amsgrad=True)")
    check_kind(group["moments"])
    return group_options(group, decoupled=True)
