"""A ledger's sums over its log are those that can be counted by hand."""

from __future__ import annotations

import torch

from elixir.tracer.ledger import Ledger


def made(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def test_host_memory_counts_at_its_peak_and_pinned_memory_by_sizes() -> None:
    ledger = Ledger(lambda nbytes: nbytes)
    assert ledger.host_peak_bytes() == 0
    alone = Ledger(lambda nbytes: nbytes)
    alone.add_on_host(made(5), 5, "plain", "")
    assert alone.host_peak_bytes() == 5
    device = made(4000)
    ledger.add(device, "activations", "", None)
    pinned = made(60)
    ledger.add_on_host(pinned, 64, "pinned", "")
    del pinned
    for nbytes, sort in ((64, "pinned"), (32, "pinned"), (1000, "plain"), (700, "planned")):
        ledger.add_on_host(made(nbytes), nbytes, sort, "")  # each is gone at once
    plain = [made(600), made(300)]
    for each in plain:
        ledger.add_on_host(each, each.nbytes, "plain", "")
    both = [made(64), made(64)]
    for each in both:
        ledger.add_on_host(each, 64, "pinned", "")
    assert ledger.host_peak_bytes() == 2 * 64 + 32 + 1000
    assert [record.nbytes for record in ledger.alive_at(len(ledger) - 1)] == [4000]
    assert ledger.curve().host.tolist()[-4:] == [600, 900, 964, 1028]
    assert ledger.curve().total.tolist()[-1] == 4000


def test_gradients_are_incomplete_then_arriving_then_elsewhere() -> None:
    ledger = Ledger(lambda nbytes: nbytes)
    tensors = [made(nbytes) for nbytes in (1, 2, 4, 8)]
    for tensor in tensors:
        ledger.add(tensor, "gradients", "", None)
    first, second, third, _ = ledger.records
    first.complete_at, first.arrived_at = 2, 3
    second.complete_at, second.arrived_at = 0, 4  # past the end
    third.complete_at, third.arrived_at = 1, 3  # complete before it is born: at its birth
    incomplete, arriving = ledger.gradients()
    assert incomplete.tolist() == [1, 1, 0, 0]
    assert arriving.tolist() == [0, 2, 2 + 1 + 4, 2]


def test_what_is_gone_counts_nothing() -> None:
    ledger = Ledger(lambda nbytes: -(-nbytes // 512) * 512)
    kept, gone = made(1100), made(1)
    ledger.add(kept, "parameters", "", None)
    ledger.add(gone, "inputs", "", None)
    assert ledger.add(kept, "inputs", "", None) is ledger.find(kept)  # it stays what it is
    del gone
    ledger.touch(100, "", "op")
    assert ledger.curve().total.tolist() == [1536, 2048, 1536, 2048, 1536]
    assert ledger.curve().without("parameters").tolist() == [0, 512, 0, 512, 0]
    assert [[record.nbytes for record in ledger.alive_at(at)] for at in range(3)] == [[1536], [1536, 512], [1536]]
    counters = ledger.add_bytes(900, "optimizer", "", "step")
    new = made(700)
    ledger.follow(new, 1024, "", None, 1)
    assert counters.nbytes == 1024
    assert ledger.curve().total.tolist()[-2:] == [2560, 3584]
    assert ledger.records[-1] is ledger.find(new)
    assert not ledger.knows([new.untyped_storage()._cdata])
    ledger.stop()
    assert ledger.find(kept) is None
    assert not ledger.knows([kept.untyped_storage()._cdata])
