"""Small optimizers as users write them: numbers in their groups, or one number over several weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class Own(torch.optim.Optimizer):
    """Plain descent; what is derived from it changes one thing."""

    def __init__(self, params: Any, lr: float = 0.05, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    def stepped(self) -> Iterator[tuple[dict[str, Any], list[nn.Parameter]]]:
        """Each group, with its parameters that have a gradient."""
        for group in self.param_groups:
            yield group, [p for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameters in self.stepped():
            for p in parameters:
                p.sub_(p.grad, alpha=group["lr"])


class Averaging(Own):
    """Rewrites weights for training and for evaluation, as optimizers without a schedule do."""

    def train(self) -> None:
        """Refused by its name."""

    def eval(self) -> None:
        """Refused by its name."""


class Counting(Own):
    """Counts its steps under a key that its defaults lack, if there is anything to step; small steps come first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameters in self.stepped():
            if parameters:
                group["step"] = group.get("step", 0) + 1
            for p in parameters:
                p.sub_(p.grad, alpha=group["lr"] * min(1.0, group["step"] / 8))


class Estimating(Own):
    """Finds its step length from all gradients, as Prodigy does."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr, d=1e-3, d_sum=0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameters in self.stepped():
            for p in parameters:
                p.sub_(p.grad, alpha=group["lr"] * group["d"])
            group["d_sum"] += sum(float(p.grad.abs().sum()) for p in parameters)


class Normed(Own):
    """Divides by one norm over all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for _, parameters in self.stepped() for p in parameters]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for group, parameters in self.stepped():
            for p in parameters:
                p.sub_(p.grad / norm, alpha=group["lr"])


class Clipping(torch.optim.AdamW):
    """Clips inside of its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


class Projecting(Own):
    """Takes what lies along a weight off its gradient, but only if that is nearly nothing, as SGDP does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameters in self.stepped():
            for p in parameters:
                rows, gradient = (
                    p.flatten(1) if p.dim() > 1 else p[None],
                    p.grad.view(len(p), -1) if p.dim() > 1 else p.grad[None],
                )
                along = nn.functional.cosine_similarity(rows, gradient, dim=1)
                if p.dim() > 1 and along.abs().max() < 0.1 / rows.shape[1] ** 0.5:
                    gradient = gradient - rows * (
                        (rows * gradient).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
                    )
                p.sub_(gradient.view(p.shape), alpha=group["lr"])


class Factored(Own):
    """Scales rows of weights that have at least 128 of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameters in self.stepped():
            for p in parameters:
                factored = p.dim() == 2 and min(p.shape) >= 128
                scale = p.grad.square().mean(1, keepdim=True).sqrt() if factored else p.grad.abs()
                p.sub_(p.grad / (scale + 1e-3), alpha=group["lr"])


class Keyed(Own):
    """Counts in its state, under a name."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["k"] = self.state.get("k", torch.zeros(1)) + 1  # type: ignore[index, call-overload]
        super().step()


class OnItself(Own):
    """Counts in an attribute."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step()


class OnItsTensor(Own):
    """Counts in a tensor, next to one of several numbers."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.counted, self.others = torch.zeros(1), torch.zeros(3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.counted += 1
        super().step()


class Shifting(Own):
    """Keeps this gradient and the one before, and hands the tensor of one state to the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameters in self.stepped():
            for p in parameters:
                state = self.state[p]
                state["before"] = state.get("now", torch.zeros_like(p))
                state["now"] = p.grad.clone()
                p.sub_(state["now"] - 0.5 * state["before"], alpha=group["lr"])


class Swapping(Own):
    """Swaps two states in every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameters in self.stepped():
            for p in parameters:
                state = self.state[p]
                one, other = (state.get(kind, torch.zeros_like(p)) for kind in ("one", "other"))
                state["one"], state["other"] = other, one
                state["one"].mul_(0.5).add_(p.grad)
                p.sub_(state["one"] - 0.3 * state["other"], alpha=group["lr"])


class Decaying(Own):
    """Makes sums in its constructor, and lets them decay whether or not a weight has a gradient."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(sum=torch.ones_like(p), step=torch.zeros(()))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["sum"].mul_(0.9)
                state["step"] += 1
                if p.grad is not None:
                    state["sum"].addcmul_(p.grad, p.grad)
                    p.addcdiv_(p.grad, state["sum"].sqrt() + 1e-8, value=-group["lr"])


class Stacking(Own):
    """Keeps a state next to two that lie in one tensor, and a list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameters in self.stepped():
            for p in parameters:
                state = self.state[p]
                if not state:
                    state.update(mean=torch.zeros_like(p), pair=torch.zeros(2, *p.shape), seen=[])
                state["seen"].append(1)
                state["mean"].mul_(0.9).add_(p.grad)
                state["pair"].mul_(0.5).add_(p.grad)
                p.sub_(state["mean"] + state["pair"][0], alpha=group["lr"] / len(state["seen"]))
