"""Collectives that nobody has measured take what the published formulas say."""

from __future__ import annotations

import pytest

from elixir.search.simulator.rates import Cluster, all_reduce_s, gather_s


def test_collectives_follow_their_formulas() -> None:
    one = Cluster(8, 8, host_bytes_per_s=1e9, network_bytes_per_s=1.0, host_step_s=1e-3, call_s=0.5)
    assert gather_s(8e9, one) == pytest.approx(0.5 + 7e-3 + 7.0)
    four = Cluster(32, 8, host_bytes_per_s=4e9, network_bytes_per_s=1e9, host_step_s=1e-3, network_step_s=1e-2)
    assert gather_s(32e9, four) == pytest.approx(28e-3 + 3e-2 + 31.0)
    assert all_reduce_s(8e9, one) == pytest.approx(0.5 + 14e-3 + 14.0)
    for nbytes, cluster in ((1e9, Cluster(1, 1, 1.0, 1.0, call_s=0.5)), (0, one)):
        assert gather_s(nbytes, cluster) == all_reduce_s(nbytes, cluster) == 0
