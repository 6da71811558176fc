"""Nothing reads what is still being written, however long that takes: work is held back by gates that open late."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.common import inside
from tests.common.parity import Pair, case, make_plan, rehomed


def open_later(gate: threading.Event) -> None:
    """Code that does not wait for what the gate holds back is past it by then."""
    threading.Timer(0.2, gate.set).start()


WAITS = {
    "an update for its gradients": ("streamed", 1, "offload"),
    "a fetch for the update of its chunk": ("streamed", 8, "host_adam"),
    "a forward for weights that stay and are updated elsewhere": ("states", 8, "host_adam"),
    "a state dict for updates": ("mixed", 8, "host_adam"),
}
"""Homes, chunks, and the lane whose work is held back."""


@pytest.mark.parametrize("what", WAITS)
def test_what_uses_new_weights_waits_for_them_and_the_step_does_not(what: str) -> None:
    it, (homes, count, lane) = case("opt", layers=1), WAITS[what]
    with Pair(it, rehomed(make_plan(it, "streamed", split_number=count), homes)) as pair:
        pair.train(1)
        gate = threading.Event()
        inside.lane(pair.module, lane).submit(gate.wait)
        pair.backward()
        pair.step()
        assert not gate.is_set()
        open_later(gate)
        if "state dict" not in what:
            pair.backward()  # its loss is that of the new weights
            pair.step()


def test_gradients_that_are_cleared_on_their_way_leave_the_next_ones_alone() -> None:
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, "streamed", split_number=1)) as pair:
        pair.backward()
        gate = threading.Event()
        inside.lane(pair.module, "host_adam").submit(gate.wait)
        pair.backward()  # the host adds it when the gate is open, and nobody has asked for it any more
        pair.optimizer.zero_grad()
        pair.plain_optimizer.zero_grad()
        assert not gate.is_set()
        open_later(gate)
        pair.backward()
        pair.step()


def test_a_norm_waits_for_its_gradients() -> None:
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, "streamed", split_number=1)) as pair:
        gate = threading.Event()
        inside.lane(pair.module, "offload").submit(gate.wait)
        pair.backward()
        open_later(gate)
        norm = pair.module.clip_grad_norm_(0.1)
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1))
        pair.step()


def test_a_step_waits_for_those_who_still_read_the_weights() -> None:
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, "streamed")) as pair:
        pair.backward()
        gate, read = threading.Event(), []
        chunk = inside.chunks(pair.module)[0]
        shard = chunk.shard
        assert shard is not None
        before = shard.clone()
        look = lambda: (gate.wait(), read.append(shard.clone()))  # noqa: E731
        inside.lane(pair.module, "fetch").submit(look, reads=[chunk.at_home])
        pair.step()
        open_later(gate)
        pair.assert_same_weights()
        assert torch.equal(read[0], before)
        assert not torch.equal(shard, before)
