"""The user's values in a checkpoint: the same types and bits, or an error that says where; nothing that is read is run."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elixir.checkpoint_format.folders import commit
from elixir.checkpoint_format.index import DEEPEST, decode, encode
from elixir.checkpoint_format.slice_reader import open_checkpoint
from elixir.errors import CheckpointCorrupt, InputError
from tests.common.checkpoints import same, save, write

VALUES: dict[str, Any] = {
    "plain": {"a": None, "b": [True, 1, -1.5, "ü\ud800\0"], "": {}},
    "numbers": [float("inf"), float("-inf"), float("nan"), -0.0, 5e-324, 2**63, -(2**200_00), 1 + 2j, complex("nan")],
    "bytes": [b"", bytes(range(256)), bytearray(b"x")],
    "tuples": ((), (1, (2, [3])), {"k": (1,)}),
    "sets": [set(), {1, "a", (2, 3)}, frozenset({b"x"})],
    "keys": {1: "int", (1, 2): "tuple", None: 0, 1.5: 1, False: 2, b"k": 3, frozenset({1}): 4}
    | {"$": "tag", 2: {"$": 1}},
    "milestones": Counter({30: 1, 80: 2, "x": -1}),
    "ordered": OrderedDict([("b", 1), ("a", OrderedDict([(3, 4)]))]),
    "numpy": [
        np.float32(1.5),
        np.int64(-3),
        np.bool_(True),
        np.complex128(1j),
        np.float64("nan"),
        np.uint64(2**64 - 1),
    ],
    "arrays": [
        np.arange(6).reshape(2, 3),
        np.array(1.5, dtype=">f8").astype("<f8"),
        np.zeros((0, 2), np.float16),
        np.arange(3, dtype=">f4"),
    ],
    "tensors": {"t": torch.randn(2, 3), "nested": [torch.tensor(True), torch.empty(0), torch.arange(6).view(2, 3).t()]},
    "complex": [torch.randn(3, dtype=torch.complex128), torch.randn(2, dtype=torch.complex64).conj()],
    "ambiguous": {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), 1: torch.ones(2), "1": torch.zeros(2)},
}


def test_values_come_back_of_the_same_types_to_the_bit(tmp_path: Path) -> None:
    save(tmp_path, {}, values=VALUES)
    with open_checkpoint(tmp_path) as saved:
        assert saved.value_names() == tuple(VALUES)
        for name, value in VALUES.items():
            assert same(saved.value(name), value), name
        with pytest.raises(InputError, match="did you mean plain"):
            saved.value("plan")


WRITTEN = [
    (None, None), (True, True), ("x", "x"), (1.5, 1.5), ([1, [2]], [1, [2]]), ({"a": {"b": 1}}, {"a": {"b": 1}}),
    (2**63 - 1, 2**63 - 1), (2**63, {"$": "int", "hex": "0x8000000000000000"}),
    (1 - 2**63, 1 - 2**63), (-(2**63), {"$": "int", "hex": "-0x8000000000000000"}),
    (float("inf"), {"$": "float", "hex": "inf"}), (2 - 0.5j, {"$": "complex", "hex": ["0x1.0000000000000p+1", "-0x1.0000000000000p-1"]}),
    (b"ab", {"$": "bytes", "base64": "YWI="}), (bytearray(b"ab"), {"$": "bytearray", "base64": "YWI="}),
    ((1, (2,)), {"$": "tuple", "items": [1, {"$": "tuple", "items": [2]}]}),
    ({2, 10}, {"$": "set", "items": [10, 2]}), (frozenset({"b", "a"}), {"$": "frozenset", "items": ["a", "b"]}),
    ({"$": 1}, {"$": "dict", "pairs": [["$", 1]]}), ({1: 2}, {"$": "dict", "pairs": [[1, 2]]}),
    (OrderedDict(a=1), {"$": "OrderedDict", "pairs": [["a", 1]]}), (Counter("aa"), {"$": "Counter", "pairs": [["a", 2]]}),
    (np.float32(1.5), {"$": "numpy", "dtype": "float32", "hex": "0000c03f"}),
    (np.arange(2, dtype=">i2"), {"$": "array", "key": "value/k", "dtype": ">int16", "shape": [2]}),
    (np.zeros((1, 2), bool), {"$": "array", "key": "value/k", "dtype": "bool", "shape": [1, 2]}),
    (torch.ones(2, 3).bfloat16(), {"$": "tensor", "key": "value/k", "dtype": "bfloat16", "shape": [2, 3]}),
    ([torch.nn.Parameter(torch.ones(()))], [{"$": "tensor", "key": "value/k[0]", "dtype": "float32", "shape": []}]),
    (torch.ones(1, dtype=torch.complex128), {"$": "tensor", "key": "value/k", "dtype": "complex128", "shape": [1]}),
]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), WRITTEN)
def test_values_are_this_json_which_later_versions_have_to_read(value: Any, text: Any) -> None:
    found, tensors = encode(value, "k")
    assert same(found, text)
    back = decode(json.loads(json.dumps(text)), tensors.__getitem__, path="f", key="k")
    assert same(back, [each.detach() for each in value] if isinstance(value, list) and tensors else value)


def test_schedulers_come_back(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedulers = {
        "steps": torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 80, 30]),
        "cycle": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    }
    states = {name: scheduler.state_dict() for name, scheduler in schedulers.items()}
    save(
        tmp_path,
        {},
        values=states
        | {
            "rng": torch.get_rng_state(),
            "python": random.getstate(),
            "np": np.random.default_rng(0).bit_generator.state,
        },
    )
    with open_checkpoint(tmp_path) as saved:
        for name, scheduler in schedulers.items():
            assert same(saved.value(name), states[name])
            scheduler.load_state_dict(saved.value(name))
        assert torch.equal(saved.value("rng"), torch.get_rng_state())
        random.setstate(saved.value("python"))
        np.random.default_rng().bit_generator.state = saved.value("np")


class Odd(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, object()]}, "state.a[1]"),
        ({"a": {2: lambda: 0}}, "state.a[2]"),
        ([Odd()], "state[0]"),
        ((np.array(["x"], dtype=object),), "state[0]"),
        ({"t": torch.ones(1, device="meta")}, "state.t"),
        ({"t": torch.ones(1).to_sparse()}, "state.t"),
        ({Path("a"): 1}, "key"),
        (np.datetime64("2026-01-01"), "state"),
        ([np.ma.masked_array([1, 2], mask=[True, False])], "state[0]"),
        (type, "state"),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_path(value: Any, where: str) -> None:
    with pytest.raises(InputError, match=re.escape(where)):
        encode(value, "state")


@pytest.mark.parametrize(
    "wrap", [lambda inner: [inner], lambda inner: (inner,), lambda inner: {"a": inner}, lambda inner: {1: inner}]
)
def test_values_in_each_other_are_saved_down_to_the_deepest(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    value: Any = 5
    for _ in range(DEEPEST):
        value = wrap(value)
    save(tmp_path, {}, values={"deep": value})
    with open_checkpoint(tmp_path) as saved:
        assert saved.value("deep") == value
    with pytest.raises(InputError, match="more than 64 containers in each other"):
        encode(wrap(value), "state")


def test_containers_in_keys_count_as_those_in_values() -> None:
    key: Any = 5
    for _ in range(DEEPEST - 1):
        key = (key,)
    text, _ = encode({key: 1}, "state")
    assert decode(text, {}.__getitem__, path="f", key="k") == {key: 1}
    with pytest.raises(InputError, match="more than 64 containers in each other"):
        encode({(key,): 1}, "state")
    ((inner, _),) = text["pairs"]
    text["pairs"] = [[{"$": "tuple", "items": [inner]}, 1]]
    with pytest.raises(CheckpointCorrupt, match="more than 64 containers in each other"):
        decode(text, {}.__getitem__, path="f", key="k")


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(InputError, match="contains itself"):
        encode(value, "state")
    with pytest.raises(InputError, match="containers"):
        encode(json.loads("[" * 70 + "]" * 70), "state")


def test_values_that_were_not_encoded_are_corrupt(tmp_path: Path) -> None:
    nested: Any = 1
    by_name: Any = 1
    tuples: Any = 1
    pairs: Any = 1
    for _ in range(66):
        nested, by_name, tuples = [nested], {"x": by_name}, {"$": "tuple", "items": [tuples]}
        pairs = {"$": "dict", "pairs": [[1, pairs]]}
    wrong = [
        {"$": "call", "items": []}, {"$": "tuple"}, {"$": "tuple", "items": 3}, {"$": "tuple", "items": [], "x": 1}, {"$": ["tuple"]},
        {"$": "int", "hex": "12"}, {"$": "int", "hex": "__import__('os')"}, {"$": "float", "hex": "0x1p99999"}, {"$": "bytes", "base64": "*"},
        {"$": "set", "items": [[1]]}, {"$": "dict", "pairs": [[1]]}, {"$": "dict", "pairs": [[[], 1]]}, {"$": "dict", "pairs": [[1, 1], [1, 2]]},
        {"$": "numpy", "dtype": "O", "hex": "00" * 8}, {"$": "numpy", "dtype": "int64", "hex": "00"}, {"$": "complex", "hex": ["0x1p0"]},
        {"$": "tensor", "key": "no", "dtype": "float32", "shape": [1]}, {"$": "tensor", "key": "weight/w", "dtype": "int8", "shape": [4]},
        {"$": "tensor", "key": "weight/w", "dtype": "float32", "shape": [5]}, {"$": "tensor", "key": "weight/w", "dtype": "float32", "shape": ["4"]},
        {"$": "array", "key": "weight/w", "dtype": "object", "shape": [4]}, {"$": "array", "key": "weight/w", "dtype": "float32", "shape": [4]},
        {"$": "tensor", "key": "weight/w", "dtype": "complex128", "shape": [2]}, nested, by_name, tuples, pairs,
    ]  # fmt: skip
    index = write(tmp_path, {"weight/w": torch.ones(4)})
    commit(tmp_path, dataclasses.replace(index, values={str(i): each for i, each in enumerate(wrong)}))
    with open_checkpoint(tmp_path) as saved:
        for i in range(len(wrong)):
            with pytest.raises(CheckpointCorrupt) as caught:
                saved.value(str(i))
            assert caught.value.key.startswith((str(i), "no", "a key of")), wrong[i]
