"""The one interception: every use of a parameter is announced, nothing else is, and all of it can be taken off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elixir.access.autograd import backward_is_running, innermost_saved_tensors_hooks
from elixir.access.interception import Interception, TrackedParameter


class Log:
    """A listener that writes down what it hears, and claims the weights of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.by_storage = {p.untyped_storage()._cdata: name for name, p in model.named_parameters()}
        self.parameters = dict(model.named_parameters())
        self.heard: list[tuple[str, Any]] = []
        self.tracks, self.claims_saved = False, True
        self.held: nn.Parameter | None = None

    def used(self, parameters: list[nn.Parameter], function: str) -> tuple[int, ...]:
        self.heard.append(("used", (tuple(self.names[id(p)] for p in parameters), function)))
        return ()

    def writes(self, parameters: list[nn.Parameter], function: str, *, of_weights: bool) -> None:
        self.heard.append(("writes", (tuple(self.names[id(p)] for p in parameters), function)))

    def wrote(self, parameters: list[nn.Parameter]) -> None:
        pass

    storages = until_read = ()

    def parameter_of(self, view: torch.Tensor) -> nn.Parameter | None:
        name = self.by_storage.get(view.untyped_storage()._cdata)
        return self.parameters[name] if self.tracks and name is not None else None

    def stays(self, tensor: torch.Tensor) -> bool:
        return False

    def lends(self, parameter: nn.Parameter, data: torch.Tensor) -> torch.Tensor:
        return data

    def has_room_for(self, parameters: list[nn.Parameter]) -> bool:
        return True

    def holds(self, parameter: nn.Parameter) -> bool:
        return parameter is self.held

    def reads_gradient(self, parameter: nn.Parameter) -> None:
        self.heard.append(("gradient", self.names[id(parameter)]))

    def drops_gradient(self, parameter: nn.Parameter) -> None:
        self.heard.append(("dropped", self.names[id(parameter)]))

    def entered(self, module: nn.Module) -> None:
        self.heard.append(("entered", type(module).__name__))

    def left(self, module: nn.Module, output: Any) -> Any:
        self.heard.append(("left", type(module).__name__))
        return output

    def pack(self, tensor: torch.Tensor) -> Any | None:
        name = self.by_storage.get(tensor.untyped_storage()._cdata)
        return None if name is None else (name, tensor.detach())

    def unpack(self, handle: Any) -> torch.Tensor:
        assert backward_is_running()
        self.heard.append(("unpacked", handle[0]))
        return handle[1]

    def only(self, kind: str) -> list[Any]:
        return [what for heard, what in self.heard if heard == kind]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


X = torch.linspace(-1, 1, 16).view(2, 8)


def plain(model: nn.Module) -> None:
    model(X).pow(2).sum().backward()


METADATA = [
    lambda p: p.shape, lambda p: p.dtype, lambda p: p.size(), lambda p: p.numel(), lambda p: p.requires_grad,
    lambda p: p.device, lambda p: p.grad, lambda p: p.stride(), lambda p: p.is_floating_point(), lambda p: hash(p),
    lambda p: p.dim(), lambda p: p.ndim, lambda p: p.is_leaf, lambda p: p.element_size(), lambda p: torch.zeros_like(p),
    lambda p: len({p}), lambda p: p.is_contiguous(), lambda p: p._version, lambda p: p.requires_grad_(),
]  # fmt: skip
READS = [
    lambda p: p.t(), lambda p: p.T, lambda p: p.mT, lambda p: p[0], lambda p: p + 1, lambda p: 2 * p, lambda p: p.sum(),
    lambda p: torch.stack([p, p]), lambda p: p.view(-1), lambda p: p.to(torch.bfloat16), lambda p: p.clone(),
    lambda p: p @ p.T, lambda p: torch.equal(p, p), lambda p: p.detach(), lambda p: p.tolist(), lambda p: list(p),
    lambda p: torch.nn.functional.pad(p, (1, 1)), lambda p: p.norm(), lambda p: torch.cat((p, p)), lambda p: p == p,
    lambda p: p.data_ptr(), lambda p: p.data, lambda p: p.untyped_storage(), lambda p: p.storage_offset(),
]  # fmt: skip


def test_metadata_is_no_use_and_reading_is() -> None:
    model = nn.Linear(4, 4)
    log = Log(model)
    access = Interception(model, log)
    for position, ask in enumerate(METADATA):
        ask(model.weight)
        assert not log.only("used"), f"METADATA[{position}]"
    for position, read in enumerate(READS):
        read(model.weight)
        assert log.only("used"), f"READS[{position}]"
        assert all(names == ("weight",) for names, _ in log.only("used"))
        log.heard.clear()
    access.remove()


def test_removal_leaves_nothing_even_in_the_middle_of_a_module() -> None:
    model = mlp()
    log = Log(model)
    access = Interception(model, log)

    def stop(module: nn.Module, args: Any) -> None:
        raise KeyError("stop")

    handle = model[2].register_forward_pre_hook(stop)
    with pytest.raises(KeyError):
        model(X)
    handle.remove()
    access.remove()
    assert innermost_saved_tensors_hooks() is None
    assert not any(isinstance(p, TrackedParameter) for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    heard = len(log.heard)
    plain(model)
    assert len(log.heard) == heard


def test_a_write_after_saving_is_still_noticed() -> None:
    """Saved-tensor hooks switch PyTorch's own check off."""
    model = mlp()
    access = Interception(model, Log(model))
    y = torch.tanh(model(X))
    z = model[1](y)
    z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    access.remove()
