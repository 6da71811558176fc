"""Predictions and choices of other runtimes, next to numbers that were computed by hand for a step of six accesses.

Layer ``a`` holds 100 weights, ``b`` 200 and 50 frozen ones, and a head in no layer 40, all of two bytes: 780 bytes of
weights, of which 680 are trained. Gradients of the head are complete in access 3, of ``b`` in 4, of ``a`` in 5, so
0, 0, 0, 0, 80 and 480 bytes of them are there when each access begins. Compute takes 6 seconds in forward, 15 in
backward. A bus of 10 bytes a second joins ranks: on two, 780 bytes of weights are gathered in 39 seconds, 680 of
gradients reduced in 34.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile
from elixir.runtimes import Prediction, Setting, Work, choices, ddp, deepspeed, fsdp2, predict
from elixir.step_trace import Access, ParamInfo, StepShape, StepTrace, Unit
from tests.common.samples import make_hardware, make_trace

MACHINE = replace(
    make_hardware(), devices_per_host=2, host_memory_bytes_per_s=100.0, host_to_device_bytes_per_s=40.0,
    device_to_host_bytes_per_s=80.0, device_to_device_bytes_per_s=10.0, host_adam_numel_per_s=10.0,
    device_adam_numel_per_s=100.0,
)  # fmt: skip
ON_CPU = replace(MACHINE, device_kind="cpu", compute_capability=None)
WEIGHTS = (
    ParamInfo("a.weight", (), (10, 10), "bfloat16", True, 5),
    ParamInfo("b.weight", (), (20, 10), "bfloat16", True, 4),
    ParamInfo("b.frozen", (), (5, 10), "bfloat16", False, None),
    ParamInfo("head.weight", (), (4, 10), "bfloat16", True, 3),
)
SECONDS = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def trace(live: int | None = None, kept: int | None = None, *, units: str = "ab", **fields: Any) -> StepTrace:
    """The step, with 10,000 bytes of activations during access `live`, or left when access `kept` begins."""
    accesses = tuple(
        Access("forward" if at < 3 else "backward", (), at, module, "aten.mm", (), 10_000 * (at == live), 10_000 * (at == kept))
        for at, module in enumerate(("a", "b", "head", "head", "b", "a"))
    )  # fmt: skip
    step = StepShape(units=tuple(Unit(name, "plain", "Layer", "parameters") for name in units))
    values = {"parameters": WEIGHTS, "accesses": accesses, "step": step, "operations": (), "param_bytes": 780}
    values |= {"grad_bytes": 680, "optimizer_bytes": 0, "buffer_bytes": 7, "input_bytes": 11}
    return replace(make_trace(layers=1), **(values | fields))


def work(ranks: int, *spike: int | None, machine: HardwareProfile = MACHINE, slower: float = 1, **fields: Any) -> Work:
    return Work(trace(*spike, **fields), machine, ranks, [slower * each for each in SECONDS])


def zero(stage: int, offload: bool = False, **more: Any) -> Setting:
    return Setting(runtime="deepspeed", stage=stage, offload=offload, **more)


def sharded(**more: Any) -> Setting:
    return Setting(runtime="fsdp2", **more)


def grown(found: Prediction, *names: str) -> tuple[int, ...]:
    """The parts of these names at the peak; the total has no others, but for activations and buffers."""
    assert found.device_bytes == sum(found.parts.values())
    assert found.parts["buffers"] == 7
    assert {*names, "buffers", "activations"} == found.parts.keys()
    return tuple(found.parts[name] for name in names)


FLOAT32 = "masters and optimizer"


@pytest.mark.parametrize(
    ("ranks", "setting", "spike", "parts"),
    [  # bytes of weights, buckets, gradients, and of masters and moments in float32
        (1, zero(1), 2, (780, 0, 0, 4080)),
        (1, zero(1), 3, (780, 0, 0, 4080)),
        (1, zero(1), 4, (780, 2 * 680, 80, 4080)),
        (2, zero(1), 5, (780, 3 * 680, 480, 2040)),
        (2, zero(2), 5, (780, 3 * 680, 240, 2040)),
        (2, zero(2, accumulation=2), 0, (780, 0, 340, 2040)),
        (2, zero(1, accumulation=2), 5, (780, 3 * 680, 680, 2040)),
        (2, zero(3), 5, (390 + 780, 680, 340, 2040)),
        (1, zero(3), 0, (780, 680, 680, 4080)),
        (1, zero(2, True), 0, (780, 400, 0)),
        (1, zero(2, True), 5, (780, 400 + 2 * 680, 0)),
        (2, zero(3, True), 5, (390 + 780, 680, 0)),
        (1, zero(3, True, weights_offload=True), 5, (780, 680, 0)),
        (2, zero(3, True, weights_offload=True), 5, (780, 680, 0)),
    ],
)
def test_zero_holds_so_much_of_the_device(ranks: int, setting: Setting, spike: int, parts: tuple[int, ...]) -> None:
    found = predict(work(ranks, spike), setting)
    assert grown(found, "weights", "buckets", "gradients", *([] if setting.offload else [FLOAT32])) == parts
    assert found.parts["activations"] == 10_000


def test_zero_steps_with_gradients_in_float32_and_with_what_does_not_go_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("weights", "buckets", "gradients", "float32 gradients", FLOAT32)
    found = predict(work(1), zero(1))
    assert grown(found, *names) == (780, 0, 680, 4 * 340, 4080)
    assert found.parts["activations"] == 11
    assert grown(predict(work(2), zero(3)), *names) == (390 + 780, 680, 340, 4 * 170, 2040)
    partly = predict(work(1), zero(3, True, ratio=0.25))
    assert partly.parts["masters, gradients and optimizer"] == 0.75 * 16 * 340
    assert partly.seconds["optimizer"] == pytest.approx(0.25 * 34 * 42 / 28 / deepspeed.PARTLY_SHARE)
    for name, numel in (("BUCKET_NUMEL", 30), ("LIVE_NUMEL", 50), ("SUB_GROUP_NUMEL", 100)):
        monkeypatch.setattr(deepspeed, name, numel)
    assert grown(predict(work(2), zero(3)), *names) == (390 + 100, 60, 340, 4 * 100, 2040)
    assert grown(predict(work(2), zero(2)), *names) == (780, 0, 340, 4 * 170, 2040)
    assert grown(predict(work(2, 4), zero(2)), "weights", "buckets", "gradients", FLOAT32) == (780, 180, 40, 2040)


@pytest.mark.parametrize(
    ("ranks", "setting", "host_bytes"),
    [
        (2, zero(3), 0),
        (1, zero(2, True), 16 * 340 + 780),
        (1, zero(2, True, accumulation=2), 16 * 340 + 780 + 680),
        (1, zero(3, True), 16 * 340 + 780 + 680),
        (1, zero(3, True, ratio=0.25), 4 * 340 + 780 + 680),
        (4, zero(2, True), (16 * 340 + 780) // 2),  # two of four ranks on each machine
        (2, sharded(), 0),
        # Each weight and each gradient is pinned in a power of two; moments are not.
        (2, sharded(offload=True), 2 * (2 * 256 + 400 + 2 * 512 + 800 + 64 + 2 * 128 + 160)),
        (2, Setting(runtime="ddp"), 0),
    ],
)
def test_hosts_hold_what_is_offloaded_by_their_own_ranks(ranks: int, setting: Setting, host_bytes: int) -> None:
    assert predict(work(ranks), setting).host_bytes == host_bytes


def test_a_cpu_pins_nothing_and_cuda_pins_powers_of_two() -> None:
    assert predict(work(2, machine=ON_CPU), sharded(offload=True)).host_bytes == 2 * (800 + 1600 + 60 + 320)
    sizes = {0: 0, 1: 1, 2: 2, 3: 4, 256: 256, 257: 512}
    assert {size: fsdp2.pinned_bytes(size) for size in sizes} == sizes


@pytest.mark.parametrize(
    ("ranks", "setting", "slower", "transfers", "step"),
    [
        (1, zero(1), 1, 0, 3.4),
        (2, zero(1), 1, 68 - 15 + 39, 1.7),
        (2, zero(1, accumulation=2), 1, 68 - 15 + 39, 1.7),
        (2, zero(2, accumulation=2), 1, 2 * (68 - 15) + 39, 1.7),
        (2, zero(2), 100, 39, 1.7),
        (2, zero(3), 1, 2 * 39 - 21 + 34 - 15, 1.7),
        (2, zero(3, accumulation=2), 1, 2 * (2 * 39 - 21 + 34 - 15), 1.7),
        (2, zero(3), 100, 0, 1.7),
        # To the host with 80 bytes a second, or 50 if two ranks share 100; back with 40.
        (1, zero(2, True), 1, 1360 / 80 - 15 + 780 / 40, 34 * 1.5 / 0.8),
        (2, zero(2, True), 1, 68 + 680 / 50 - 15 + 390 / 40 + 39, 34 * 1.5 / 0.8),
        (2, zero(3, True), 1, 78 - 21 + 34 + 680 / 50 - 15 + 390 / 40, 34 * 1.5 / 0.8),
        (2, zero(3, True, weights_offload=True), 1, 78 + 2 * 390 / 40 - 21 + 34 + 13.6 - 15, 34 * 1.5 / 0.8),
        # 800 bytes of weights with padding are gathered in 40 seconds, in three groups.
        (2, sharded(), 1, 40 - 6 + 40 + 34 - 15, 1.7),
        (2, sharded(accumulation=2), 1, 2 * (40 - 6) + 40 - 15 + 40 + 34 - 15, 1.7),
        (2, sharded(keep=True), 1, 40 - 6 + 34 - 15, 1.7),
        (2, sharded(), 100, 40 / 3 + 74 / 3, 1.7),
        (
            2,
            sharded(offload=True, accumulation=2),
            1,
            3 * 58.5 - 6 - 6 - 15 + 58.5 + 34 + 13.6 - 15,
            34 * 40 / 28 / 0.5,
        ),
        (2, sharded(offload=True), 1, 58.5 - 6 + 58.5 + 34 + 13.6 - 15, 34 * 40 / 28 / 0.5),
        (1, sharded(offload=True), 1, 36.5 + 36.5 + 17 - 15, 34 * 40 / 28 / 0.5),
        (1, sharded(), 1, 0, 3.4),
    ],
)
def test_seconds_are_of_compute_of_what_it_does_not_hide_and_of_the_step(
    ranks: int, setting: Setting, slower: float, transfers: float, step: float
) -> None:
    found = predict(work(ranks, slower=slower), setting)
    compute = 21 * slower * setting.accumulation
    assert found.seconds == pytest.approx({"compute": compute, "transfers": transfers, "optimizer": step})
    assert found.step_s == pytest.approx(compute + transfers + step)


GATHERED = ("gathered weights", "gather and reduce buffers", "gradients")


@pytest.mark.parametrize(
    ("ranks", "setting", "live", "kept", "parts"),
    [  # bytes of gathered weights, buffers and gradients; the head's 80 stay, b has 520 of two ranks, a has 200
        (2, sharded(), None, 0, (80, 200 + 100, 0)),
        (2, sharded(), 0, None, (280, 200, 0)),
        (2, sharded(), None, 1, (80, 200 + 520 + 260, 0)),
        (2, sharded(), 1, None, (600, 520, 0)),
        (2, sharded(), 2, None, (80, 520, 0)),
        (2, sharded(), None, 4, (80, 520 + 520, 80)),
        (2, sharded(), 4, None, (600, 200, 80)),
        (2, sharded(), None, 5, (80, 200 + 400 + 200, 80 + 400)),
        (2, sharded(), 5, None, (280, 400, 80 + 400)),
        (2, sharded(keep=True), None, 1, (280, 200 + 520 + 260, 0)),
        (2, sharded(keep=True), 1, None, (800, 520, 0)),
        (2, sharded(keep=True), 2, None, (800, 0, 0)),
        (2, sharded(keep=True), 4, None, (800, 0, 80)),
        (2, sharded(keep=True), None, 5, (280, 400, 480)),
        (2, sharded(offload=True), 5, None, (280, 400, 80)),
        (2, sharded(accumulation=2), 0, None, (280, 200, 680)),
        (2, sharded(accumulation=2), 5, None, (280, 400, 680 + 80)),
        (1, sharded(), None, 1, (80, 0, 0)),
        (1, sharded(), None, 4, (80, 0, 80)),
        (1, sharded(), 4, None, (580, 0, 80)),
        (1, sharded(), 5, None, (280, 400, 80 + 800)),
    ],
)
def test_fsdp2_holds_so_much_at_each_moment(
    ranks: int, setting: Setting, live: int | None, kept: int | None, parts: tuple[int, ...]
) -> None:
    names = () if setting.offload else ("sharded weights", "optimizer")
    rest = () if setting.offload else ((1460, 2720) if ranks == 1 else (740, 1360))
    found = predict(work(ranks, live, kept), setting)
    assert grown(found, *GATHERED, *names) == (*parts, *rest)
    assert found.parts["activations"] == 10_000


def test_fsdp2_reduces_what_lies_in_no_layer_at_the_end() -> None:
    """If there are no layers that is all: weights are let go, and gradients are there whole and as the input of the reduction."""
    found = predict(work(2, units=""), sharded())
    assert grown(found, *GATHERED, "sharded weights", "optimizer") == (0, 680, 680, 740, 1360)


def test_ddp_holds_all_twice_and_waits_for_its_last_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("weights", "gradients", "buckets", "optimizer")
    for ranks, more, spike, expected in (
        (1, {}, 4, (780, 80, 0, 2720)),
        (2, {}, 5, (780, 480, 680, 2720)),
        (2, {"accumulation": 2}, 0, (780, 680, 680, 2720)),
    ):
        assert grown(predict(work(ranks, spike), Setting(runtime="ddp", **more)), *names) == expected
    own = work(1, 5, optimizer_bytes=99)
    assert grown(ddp.predict(own, Setting(runtime="ddp"), as_views=True), *names) == (780, 0, 680, 99)
    assert ddp.predict(own, Setting(runtime="ddp"), as_views=True).seconds["reduce"] == 0
    twice = Setting(runtime="ddp", accumulation=2)
    assert predict(work(2), twice).seconds == pytest.approx({"compute": 42, "reduce": 68, "Adam": 3.4})
    monkeypatch.setattr(ddp, "BUCKET_BYTES", 100)
    assert predict(work(2), twice).seconds["reduce"] == pytest.approx(68 - 15)
    assert predict(work(2, slower=100), twice).seconds["reduce"] == pytest.approx(10)


def test_a_weight_that_the_step_does_not_read_gets_no_gradient() -> None:
    found = work(1, parameters=(*WEIGHTS, replace(WEIGHTS[0], name="a.unused", grad_access=None)))
    assert found.gradients_before() == [0, 0, 0, 0, 80, 480]
    assert found.gradients_made() == {"a": 200, "b": 400, "": 80}


def test_a_ring_takes_the_seconds_that_were_measured_or_those_of_the_slowest_link() -> None:
    measured = replace(work(2), gather_s=lambda nbytes: 1 + nbytes / 5)
    assert [measured.ring_s(10), measured.ring_s(10, passes=2), measured.ring_s(0)] == [3, 6, 0]
    assert replace(measured, world_size=1).ring_s(10) == 0
    between = [work(4, machine=replace(MACHINE, network_bytes_per_s=rate)).ring_s(40) for rate in (5.0, 15.0, None)]
    assert between == [6, 3, 3]
    assert work(2, machine=replace(MACHINE, network_bytes_per_s=5.0)).ring_s(40) == 2


def test_a_setting_says_all_that_it_is() -> None:
    parts, more = {"weights": 1024, "none": 0}, {"checkpoint": True, "accumulation": 2, "micro": 4}
    assert str(sharded(keep=True, offload=True)) == "FSDP2 keep offload, 1 x 1"
    assert str(zero(3, True, ratio=0.5)) == "ZeRO-3 offload, ratio 0.5, 1 x 1"
    setting = zero(3, True, weights_offload=True, **more)
    assert str(Prediction(setting, 1024, parts, 2048, {"compute": 0.5, "none": 0.0})) == (
        "ZeRO-3 offload of weights too, checkpointed, 2 x 4: 1.00 KiB of each device (weights 1.00 KiB), 2.00 KiB of "
        "each host, 0.500 s a step (compute 0.500 s)"
    )
    tried = [
        [str(each) for each in of.settings(checkpoint=False, micro=1, accumulation=1, world_size=ranks)]
        for of, ranks in ((ddp, 2), (fsdp2, 2), (deepspeed, 1), (deepspeed, 2))
    ]
    host = [f"ZeRO-{what}, 1 x 1" for what in ("2 offload", "3 offload", "3 offload of weights too")]
    assert tried == [
        ["DDP, 1 x 1"],
        [f"FSDP2{what}, 1 x 1" for what in (" keep", "", " keep offload", " offload")],
        ["ZeRO-1, 1 x 1", *host],
        [*(f"ZeRO-{stage}, 1 x 1" for stage in (1, 2, 3)), *host],
    ]


class Tried:
    """Steps whose activations are as large as their samples, 1,000 bytes each, without a checkpoint; and which were
    asked for."""

    def __init__(self, slower: float = 1, refused: tuple[bool, ...] = ()) -> None:
        self.asked, self.slower, self.refused = list[tuple[int, bool]](), slower, refused

    def __call__(self, runtime: str, micro: int, checkpoint: bool) -> Work:
        self.asked.append((micro, checkpoint))
        if checkpoint in self.refused:
            raise InputError(f"no step with checkpoint {checkpoint}")
        made = work(2, machine=ON_CPU, slower=self.slower)
        accesses = [replace(each, live_bytes=0 if checkpoint else 1000 * micro) for each in made.trace.accesses]
        return replace(made, trace=replace(made.trace, accesses=tuple(accesses)))

    def choices(self, runtime: str, device_bytes: int, host_bytes: int = 0, **more: Any) -> list[Any]:
        limits = {"device_bytes": device_bytes, "host_bytes": host_bytes}
        return choices(runtime, self, **{"samples": 6, "world_size": 2, **limits, **more})


def test_settings_that_fit_come_first_by_seconds_and_others_by_all_that_they_lack() -> None:
    for device_bytes, host_bytes, offloads in ((1500, 1000, [False, True]), (1000, 5000, [True, False])):
        lacking = Tried(refused=(True,)).choices("fsdp2", device_bytes, host_bytes)
        settings = [each.prediction.setting for each in lacking]
        assert [(each.offload, each.keep) for each in settings] == [
            (of, keep) for of in offloads for keep in (False, True)
        ]
        assert all(each.host_short == each.prediction.host_bytes - host_bytes for each in lacking)
        needed = [round(1.013 * each.prediction.device_bytes) for each in lacking]
        assert [each.device_short for each in lacking] == [each - device_bytes for each in needed]
    for slower, keeps in ((1, [True, False]), (100, [False, True])):  # the one with less if both take as long
        found = Tried(slower, refused=(True,)).choices("fsdp2", 100_000)
        assert [each.fits for each in found] == [True, True, False, False]
        assert [each.prediction.setting.keep for each in found][:2] == keeps


def test_micro_batches_get_smaller_until_they_fit_or_until_that_is_hopeless() -> None:
    whole = predict(work(2, machine=ON_CPU), Setting(runtime="ddp")).device_bytes  # without activations
    for device_bytes, more, asked, fits in (
        (round((whole + 6000) * 1.013), {}, [6], True),
        (round((whole + 6000) * 1.013) - 1, {}, [6, 3], True),
        (round((whole + 6000) * 1.013), {"micro": 4}, [3], True),
        (round((whole + 1000) * 1.013) - 1, {}, [6, 3, 2, 1], False),
        (round((whole + 6000) * 1.013) - 6480, {}, [6, 3, 2, 1], False),  # activations, and 480 bytes of gradients
        (round((whole + 6000) * 1.013) - 6481, {}, [6], False),
    ):
        tried = Tried()
        found = tried.choices("ddp", device_bytes, checkpoints=(False,), **more)
        assert tried.asked == [(micro, False) for micro in asked]
        (best,) = found
        assert (best.fits, best.prediction.setting.micro) == (fits, asked[-1])
        assert best.prediction.setting.accumulation == 6 // asked[-1]
    for each in Tried().choices("fsdp2", 8000, 99_999, checkpoints=(False,)):
        assert (each.fits, each.prediction.setting.micro) == (True, 6 if each.prediction.setting.offload else 3)
    tried = Tried()
    tried.choices("ddp", 100_000)
    assert tried.asked == [(6, False), (6, True)]
    assert [each.prediction.setting.checkpoint for each in Tried(refused=(False,)).choices("ddp", 9_999)] == [True]
    with pytest.raises(InputError, match="no step with checkpoint True"):
        Tried(refused=(False, True)).choices("ddp", 9_999)
    with pytest.raises(InputError, match="no form of checkpointing"):
        Tried().choices("ddp", 9_999, checkpoints=())
    with pytest.raises(InputError, match="deepspeed"):
        Tried().choices("zero", 9_999)
