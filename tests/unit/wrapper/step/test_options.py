"""Options and numbers that a step copies, compares and rounds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.wrapper.step.gradient_norm import KnownNorms, clip_factor, each_norm, norm_of_norms
from tests.common.one_shard import user_of


def test_the_limit_of_a_norm_is_the_one_of_torch() -> None:
    gradients = [torch.full((3,), 2.0), torch.full((4,), 3.0)]
    known = [None, torch.tensor(6.0)]
    norms = each_norm(gradients, torch.get_num_threads(), known)
    assert [round(float(norm), 4) for norm in norms] == [3.4641, 6.0]
    norm = norm_of_norms(norms)
    assert float(norm) == pytest.approx(math.sqrt(48))
    assert float(norm_of_norms([])) == 0.0
    assert norm_of_norms([torch.empty((), device="meta")]).device.type == "meta"
    assert [float(each) for each in each_norm([torch.ones(4)], 0)] == [2.0]
    assert float(clip_factor(torch.tensor(1e-6), 1e-6)) == pytest.approx(0.5)
    parameter = nn.Parameter(torch.ones(7))
    for limit in (1.0, 100.0):
        parameter.grad = torch.cat(gradients)
        nn.utils.clip_grad_norm_(parameter, limit)
        torch.testing.assert_close(torch.cat(gradients) * clip_factor(norm, limit), parameter.grad, rtol=1e-6, atol=0.0)


def test_a_norm_is_known_until_its_gradient_changes() -> None:
    known, parameter = KnownNorms(), nn.Parameter(torch.ones(2))
    gradient, norm = torch.ones(2), torch.tensor(1.5)
    known.add(parameter, None, norm)
    assert known.of(parameter, gradient) is None
    known.add(parameter, gradient, norm)
    assert known.of(parameter, gradient) is norm
    assert known.of(parameter, None) is None
    assert known.of(parameter, torch.ones(2)) is None
    gradient += 1
    assert known.of(parameter, gradient) is None
    known.add(parameter, gradient, norm)
    known.clear()
    assert known.of(parameter, gradient) is None
    assert known.of(nn.Parameter(torch.ones(2)), None) is None


def test_loaded_options_are_those_of_the_class_and_how_it_steps_stays() -> None:
    given = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.5, foreach=False)
    saved = {**given.param_groups[0], "params": [0], "lr": 0.25, "foreach": True, "decoupled_weight_decay": False}
    betas = saved["betas"] = [torch.tensor(0.5), 0.75]
    del saved["maximize"]
    loaded = user_of(given).loaded_options(given.param_groups[0], saved)
    assert "params" not in loaded
    assert (loaded["lr"], loaded["foreach"], loaded["maximize"]) == (0.25, False, False)
    assert loaded["decoupled_weight_decay"]
    assert loaded["betas"] == betas
    assert loaded["betas"][0] is not betas[0]
    saved["amsgrad"] = True
    assert user_of(given).loaded_options(given.param_groups[0], saved)["amsgrad"]
    for options in ({"fused_kernels": True}, {"moments": "8bit"}):
        with pytest.raises(InputError, match=r"\(amsgrad=True\) are none with which Adam steps over whole shards"):
            user_of(given, **options).loaded_options(given.param_groups[0], saved)
