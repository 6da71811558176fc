"""Ranks, here threads over gloo: what collectives give, and who finds out when ranks no longer do the same."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from elixir.chunk.group import MESH_DIMENSIONS, Group, new_group
from elixir.errors import InputError, RankError
from elixir.torch_private import process_groups
from tests.common import inside
from tests.common.rank_threads import TIMEOUT_S, on_ranks, results

FORMS = [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)]
"""Ranks, replicas."""


def made(replicas: int) -> Group:
    if replicas == 1:
        return Group()
    group = Group(data=False)
    group.divide(replicas)
    return group


@pytest.mark.parametrize(("size", "replicas"), FORMS)
def test_collectives_give_what_their_names_say(size: int, replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard i of replica r has the numbers 10 r + i."""
    inside.limit(monkeypatch, sent_bytes=5)
    shards = size // replicas

    def work(rank: int) -> None:
        known = set(distributed_c10d._world.pg_names.values())
        group = made(replicas)
        replica, shard = divmod(rank, shards)
        assert (group.rank, group.size, group.shards, group.shard, group.replicas) == (
            rank,
            size,
            shards,
            shard,
            replicas,
        )
        assert group.timeout_s == (None if size == 1 else TIMEOUT_S)
        whole, mine = torch.full((2 * shards,), -1.0), torch.full((2,), 10.0 * replica + shard)
        group.gather(whole, mine)
        expected = [10.0 * replica + each // 2 for each in range(2 * shards)]
        assert whole.tolist() == expected
        group.gather(whole, whole[2 * shard : 2 * shard + 2], "its own part")
        assert whole.tolist() == expected

        whole, reduced = torch.arange(2.0 * shards) * (1 + rank), torch.empty(2)
        group.reduce_mean(reduced, whole)
        factor = sum(1 + each for each in range(replica * shards, (replica + 1) * shards)) / size
        assert reduced.tolist() == pytest.approx([2 * shard * factor, (2 * shard + 1) * factor])
        if replicas > 1:
            group.sum_replicas(reduced)
            factor = sum(range(1, size + 1)) / size
            assert reduced.tolist() == pytest.approx([2 * shard * factor, (2 * shard + 1) * factor])

        if shards > 1:  # to the next of the replica, and one byte more to the one after it
            sent, came = torch.full((3,), float(rank)), torch.empty(3)
            group.swap([(sent, (shard + 1) % shards)], [(came, (shard - 1) % shards)], "numbers")
            assert came.tolist() == [float(replica * shards + (shard - 1) % shards)] * 3
            group.swap([], [], "nothing")

        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            value = torch.full((3, 2), rank + 7, dtype=dtype)
            group.send_from_rank_0(value)
            assert value.tolist() == [[7, 7]] * 3
        assert group.exchange("numbers", {"rank": rank, "long": "x" * (1 + 100 * rank)}) == [
            {"rank": each, "long": "x" * (1 + 100 * each)} for each in range(size)
        ]
        what = f"a note of {size}"
        count = sys.getrefcount(what)
        group.note(what)
        group.exchange("numbers", None)
        assert sys.getrefcount(what) == count  # what all ranks have done need not be kept
        other = group.for_values()
        assert other.exchange("others", rank) == list(range(size))
        assert not group.is_broken
        for each in (group, other):
            each.close()
        assert set(distributed_c10d._world.pg_names.values()) == known

    results(size, work)


def test_one_rank_copies_to_other_memory_alone() -> None:
    def work(rank: int) -> None:
        group, values = Group(), torch.arange(4.0)
        for collective in (lambda out: group.gather(out, values), lambda out: group.reduce_mean(out, values)):
            out = torch.zeros(4)
            collective(out)
            assert torch.equal(out, values)
            collective(values)
            assert values.tolist() == [0, 1, 2, 3]
        assert group.timeout_s is None  # there is nobody to wait for

    work(0)
    results(1, work)


def test_a_mesh_says_which_ranks_form_a_replica() -> None:
    def work(rank: int) -> list[tuple[int | None, int]]:
        meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=MESH_DIMENSIONS) for ranks in ([[0, 1], [2, 3]], [[0], [1]])]
        groups = [Group(mesh, data=False) for mesh in meshes[: 1 + (rank < 2)]]
        for other, names in (([[1, 0], [2, 3]], MESH_DIMENSIONS), ([[0, 1], [2, 3]], ("shard", "replicate"))):
            with pytest.raises(InputError, match="must have the dimensions"):
                Group(DeviceMesh("cpu", other, mesh_dim_names=names), data=False)
        return [(group.of_mesh, group.size) for group in groups]

    assert results(4, work) == [[(2, 4), (2, 2)]] * 2 + [[(2, 4)]] * 2


def test_groups_that_some_ranks_make_alone_leave_those_of_all_as_they_are() -> None:
    def work(rank: int) -> list[float]:
        made = [new_group([0, 1], alone=True) for _ in range(2)] if rank < 2 else [new_group([2], alone=True)]
        dist.destroy_process_group(made.pop())
        made.append(dist.new_group([0, 1, 2]))  # all ranks know it by one name
        if rank < 2:
            made.append(new_group([0, 1], alone=True))
        sums = [torch.ones(1) for _ in made]
        for group, each in zip(made, sums, strict=True):
            dist.all_reduce(each, group=group)
        return [each.item() for each in sums]

    assert results(3, work) == [[2, 3, 2], [2, 3, 2], [3]]
    assert isinstance(process_groups().group_count, int)  # without it torch 2.14 would wait for ever


@pytest.mark.parametrize(("given", "expected"), [("cpu:gloo,cuda:gloo", "gloo"), ("cpu:gloo,cuda:nccl",) * 2])
def test_chunks_travel_over_the_backends_of_the_group_that_was_given(
    given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_group, asked = dist.new_group, list[tuple[Any, ...]]()

    def new_group(ranks: list[int], *, backend: str, use_local_synchronization: bool, **options: Any) -> Any:
        asked.append((ranks, backend, use_local_synchronization))
        return made_group(ranks, backend="gloo", use_local_synchronization=use_local_synchronization, **options)

    monkeypatch.setattr(dist, "get_backend_config", lambda _: given)
    monkeypatch.setattr(dist, "new_group", new_group)
    results(1, lambda _: made(2).exchange("ranks", None))
    assert not asked
    results(2, lambda _: Group().exchange("ranks", None))
    # All ranks make them: those that some ranks make alone would have the names of earlier ones.
    assert sorted(asked) == sorted([([0, 1], expected, False), ([0, 1], "gloo", False)] * 2)


def test_on_a_device_rank_0_sends_to_other_replicas_and_each_sends_on_within(monkeypatch: pytest.MonkeyPatch) -> None:
    broadcast, sent = dist.broadcast, [list[Any]() for _ in range(4)]

    def noted(value: torch.Tensor, source: int, *, group: Any, async_op: bool = False) -> Any:
        if not value.is_meta:
            return broadcast(value, source, group=group, async_op=async_op)
        assert not async_op  # compute waits, not the host
        sent[dist.get_rank()].append((dist.get_process_group_ranks(group), source))
        return None

    monkeypatch.setattr(dist, "broadcast", noted)
    results(4, lambda _: made(2).send_from_rank_0(torch.empty(4, device="meta")))
    across, first, second = ([0, 2], 0), ([0, 1], 0), ([2, 3], 2)
    assert sent == [[across, first], [first], [across, second], [second]]


def said(size: int, work: Callable[[Group], Any], monkeypatch: pytest.MonkeyPatch, look_s: float = 0.05) -> list[str]:
    """The text of each rank's `RankError`; all further calls say the same at once."""
    inside.limit(monkeypatch, look_s=look_s)

    def rank_of(rank: int) -> str:
        group = Group()
        group.exchange("begin", None)
        group.note("both")
        assert not group.is_broken
        with pytest.raises(RankError) as caught:
            work(group)
        assert group.is_broken
        with pytest.raises(RankError) as again:
            group.note("more")
        assert again.value is caught.value
        return str(caught.value)

    return results(size, rank_of)


def test_an_exchange_for_another_purpose_is_told_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found = said(2, lambda group: group.exchange("ab"[group.rank], None), monkeypatch, TIMEOUT_S)
    assert found[0].startswith(
        "rank 0 is at 'a' after 2 collectives, rank 1 at 'b' after 2 others: the ranks no longer"
    )
    assert found[1].startswith("rank 1 is at 'b' after 2 collectives, rank 0 at 'a' after 2 others: ")


def test_ranks_that_wait_for_each_other_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is in a gather, the other in an exchange, for which gloo would wait until its timeout."""

    def work(group: Group) -> None:
        if group.rank:
            group.gather(torch.empty(2), torch.empty(1), "chunk 3")
        group.exchange("step", None)

    begin = time.monotonic()
    found = said(2, work, monkeypatch)
    assert time.monotonic() - begin < TIMEOUT_S / 2
    words = ("rank 0 went on with 'step' after 2 collectives, rank 1 with 'gather chunk 3'",
             "rank 1 went on with 'gather chunk 3' after 2 collectives, rank 0 with 'step'")  # fmt: skip
    assert all(any(each.startswith(word) for word in words) for each in found)
    assert all("every rank must call forward, backward and step equally often" in each for each in found)


def test_ranks_find_out_while_those_between_them_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 2 part; what 1 and 3, each next to one of them, published before says nothing of it."""
    inside.limit(monkeypatch, look_s=0.02)
    parted = {rank: threading.Event() for rank in range(4)}

    def rank_of(rank: int) -> str:
        group = Group()
        if rank % 2 == 0:
            time.sleep(0.2)  # the others wait, and publish where they are
        group.exchange("begin", None)
        if rank % 2:  # these are slow: they come when the others know
            assert parted[0].wait(TIMEOUT_S)
            assert parted[2].wait(TIMEOUT_S)
        elif rank:
            group.note("gather chunk 3")
        with pytest.raises(RankError) as caught:
            group.exchange("step", None)
        parted[rank].set()
        return str(caught.value)

    for text in results(4, rank_of):
        assert "no longer do the same" in text


def test_a_rank_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.limit(monkeypatch, look_s=0.05)
    there = threading.Event()

    def work(rank: int) -> None:
        group = Group()
        group.note("both")
        if rank:
            group.close()
            dist.destroy_process_group()
            there.set()
            return
        assert there.wait(TIMEOUT_S)
        group.exchange("step", None)

    (first, second) = on_ranks(2, work)
    assert second is None
    assert isinstance(first, RankError)
    assert str(first).startswith(
        "rank 0: step (collective 2) failed, because another rank has died, has raised an error"
    )
    assert isinstance(first.__cause__, RuntimeError)


@pytest.mark.parametrize("size", [1, 3])
def test_what_one_rank_raises_all_raise(size: int) -> None:
    def work(rank: int) -> tuple[str, str]:
        group, texts = Group(), list[str]()
        with group.together("do nothing wrong"):
            pass
        for error in (ValueError("too large"), KeyError()):

            def fit(wrong: Exception | None = error if rank == size - 1 else None) -> None:
                with group.together("fit"):
                    if wrong is not None:
                        raise wrong

            with pytest.raises((ValueError, KeyError, RankError)) as caught:
                fit()
            assert (caught.value is error) == (rank == size - 1)
            texts.append(f"{type(caught.value).__name__}: {caught.value}")
        assert not group.is_broken
        return texts[0], texts[1]

    found = results(size, work)
    assert found[-1] == ("ValueError: too large", "KeyError: ")
    begins = f"RankError: rank {size - 1} could not fit: "
    assert found[:-1] == [(begins + "too large", begins + "KeyError")] * (size - 1)
