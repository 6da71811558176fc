"""Nothing reads what is still being written, however long that takes: work is held back by gates that open late."""

from __future__ import annotations

import threading

import pytest

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
