"""Damage to any byte, name or file: an error of one family, or the right data; and nothing that is read is run."""

from __future__ import annotations

import collections
import contextlib
import copy
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.checkpoint_format.folders import read_index
from elixir.checkpoint_format.index import Index, parse_index
from elixir.checkpoint_format.slice_reader import open_checkpoint, verify
from elixir.errors import ArtifactError, CheckpointCorrupt, CheckpointError, CheckpointNotFound
from tests.common import inside
from tests.common.checkpoints import group, same, save

NUMEL = 3000
VALUE = {"a": (1, float("inf")), "t": torch.arange(5)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is never changed itself."""
    folder = tmp_path_factory.mktemp("whole")
    tensors = {
        "weight/w": torch.arange(NUMEL).float(),
        "exp_avg/w": torch.ones(NUMEL).bfloat16(),
        "weight/v": torch.ones(2, 3),
    }
    save(
        folder, tensors, values={"value": VALUE}, step=3, steps={"w": 3}, aliases={"u": "w"},
        param_groups=(group(["w", "v"], lr=0.1),), rng=(1, 2),
    )  # fmt: skip
    return folder


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def everything(folder: Path) -> dict[str, Any]:
    """All that can be read."""
    with open_checkpoint(folder) as saved:
        found = {key: saved.read_whole(key) for key in saved.keys()}  # noqa: SIM118
        found |= {"value": saved.value("value"), "optimizer": saved.optimizer_state_dict(), "step": saved.step}
        return found | {f"name {name}": tensor for name, tensor in saved.weights().items()}


def with_checksum(data: dict[str, Any]) -> bytes:
    """An index that somebody has made up with care."""
    body = {key: value for key, value in data.items() if key != "checksum"}
    return inside.index_text(body).encode()


def damage(folder: Path, dice: random.Random, bomb: Path) -> str:
    """One random damage; what was done."""
    names = sorted(path.name for path in folder.iterdir())
    path = folder / dice.choice(names)
    raw = bytearray(path.read_bytes())
    at = dice.randrange(len(raw))
    kind = dice.choice(
        [
            "flip",
            "flips",
            "cut",
            "zero",
            "grow",
            "noise",
            "swap",
            "missing",
            "folder",
            "pickle",
            "deep",
            "insert",
            "repeat",
        ]
    )
    if kind == "flip":
        raw[at] ^= 1 << dice.randrange(8)
    elif kind == "flips":
        for _ in range(10):
            raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
    elif kind == "cut":
        del raw[at:]
    elif kind == "zero":
        raw[at : at + 4096] = bytes(len(raw[at : at + 4096]))
    elif kind == "grow":
        raw += dice.randbytes(dice.randint(1, 100))
    elif kind == "noise":
        raw = bytearray(dice.randbytes(len(raw)))
    elif kind == "insert":
        raw[at:at] = dice.randbytes(dice.randint(1, 8))
    elif kind == "repeat":
        raw[at : at + 16] = raw[at : at + 16] * 2
    elif kind == "pickle":
        raw = bytearray(pickle.dumps(Bomb(bomb)))
    elif kind == "deep":
        raw = bytearray(dice.choice([b"[", b'{"a":']) * 100_000)
    elif kind == "swap":
        other = folder / dice.choice([name for name in names if name != path.name])
        raw, swapped = bytearray(other.read_bytes()), raw
        other.write_bytes(swapped)
    if kind in ("missing", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
    else:
        path.write_bytes(raw)
    return f"{kind} {'index' if path.name == 'index.json' else 'data'}"


def outcomes_of(whole: Path, place: Path, trials: int) -> collections.Counter[str]:
    expected, outcomes, bomb = everything(whole), collections.Counter[str](), place / "executed"
    for seed in range(trials):
        folder = place / "damaged"
        shutil.copytree(whole, folder)
        what = damage(folder, random.Random(seed), bomb)
        try:
            found = everything(folder)
            right = found.keys() == expected.keys() and all(same(found[key], value) for key, value in expected.items())
            assert right, f"wrong data after {what}, seed {seed}"
            outcomes["right"] += 1
        except CheckpointError as error:
            outcomes[type(error).__name__] += 1
            outcomes["without its file"] += str(folder) not in str(error)
        with contextlib.suppress(CheckpointNotFound):
            assert isinstance(verify(folder), tuple)
        shutil.rmtree(folder)
    assert not bomb.exists()
    assert not outcomes["without its file"]
    return outcomes


def test_damage_is_an_error_of_one_family_or_does_not_matter(whole: Path, tmp_path: Path) -> None:
    outcomes = outcomes_of(whole, tmp_path, 300)
    assert outcomes["CheckpointCorrupt"] > 200
    assert outcomes["CheckpointNotFound"] > 0


@pytest.mark.slow
def test_damage_ten_thousand_times(whole: Path, tmp_path: Path) -> None:
    outcomes = outcomes_of(whole, tmp_path, 10_000)
    assert outcomes["CheckpointCorrupt"] > 8_000


def test_every_single_byte_of_an_index_is_checked(whole: Path) -> None:
    path = whole / "index.json"
    raw, index = path.read_bytes(), read_index(whole)
    for at in range(0, len(raw), 7):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << (at % 8)
        try:
            assert parse_index(bytes(damaged), path) == index  # a changed space or line end
        except CheckpointCorrupt as error:
            assert error.path == str(path)  # noqa: PT017
    for length in range(0, len(raw) - 2, 13):
        with pytest.raises(CheckpointCorrupt):
            parse_index(raw[:length], path)


def crafted(change: Callable[[dict[str, Any]], Any], folder: Path) -> bytes:
    data = json.loads((folder / "index.json").read_text())
    change(data)
    return with_checksum(data)


def rename_file(data: dict[str, Any], new: str) -> None:
    old = next(iter(data["files"]))
    data["files"][new] = data["files"].pop(old)
    for tensor in data["tensors"].values():
        for piece in tensor["pieces"]:
            piece["file"] = new if piece["file"] == old else piece["file"]


def first_piece(data: dict[str, Any], key: str = "weight/w") -> dict[str, Any]:
    return data["tensors"][key]["pieces"][0]  # type: ignore[no-any-return]


CRAFTED: list[tuple[Callable[[dict[str, Any]], Any], str, str]] = [
    (lambda d: d.pop("step"), "step", "missing"),
    (lambda d: d.update(colour=1), "colour", "unknown"),
    (lambda d: d.update(step="3"), "step", "must be int"),
    (lambda d: d.update(sequence=True), "sequence", "must be int"),
    (lambda d: d.update(sequence=0), "sequence", "1 or larger"),
    (lambda d: d.update(world_size=0), "world_size", "1 or larger"),
    (lambda d: d.update(rng=[1]), "rng", "2 ranks, found 1"),
    (lambda d: d.update(schema_version=4), "schema_version", "reads 3"),
    (lambda d: d.update(checksum_kind="crc32"), "checksum_kind", "knows only 'xxh3_64'"),
    (lambda d: d.update(artifact="plan"), "artifact", "plan"),
    (lambda d: d.update(id="../../etc"), "id", "hexadecimal"),
    (lambda d: d.update(steps={"w": -1}), "steps.w", "0 or larger"),
    (lambda d: d.update(aliases={"u": "nobody"}), "aliases.u", "not saved"),
    (lambda d: rename_file(d, "../x.safetensors"), "files", "no name of a file"),
    (lambda d: rename_file(d, "/etc/x.safetensors"), "files", "no name of a file"),
    (lambda d: rename_file(d, f"{d['id']}-../x.safetensors"), "files", "no name of a file"),
    (lambda d: rename_file(d, f"{d['id']}-..safetensors"), "files", "no name of a file"),
    (lambda d: rename_file(d, f"{d['id']}-a\0.safetensors"), "files", "no name of a file"),
    (lambda d: rename_file(d, "0badcafe-shared.safetensors"), "files", "no name of a file"),
    (lambda d: d["files"].clear(), "tensors.weight/w", "not listed"),
    (lambda d: d["files"].update({next(iter(d["files"])): 100}), "tensors", "a piece ends at byte"),
    (lambda d: d["tensors"]["weight/w"]["pieces"].pop(), "tensors.weight/w", "pieces end at"),
    (lambda d: d["tensors"]["weight/w"]["pieces"].pop(0), "tensors.weight/w", "before ends at 0"),
    (lambda d: d["tensors"]["weight/w"]["pieces"].reverse(), "tensors.weight/w", "begins at element"),
    (lambda d: d["tensors"]["weight/w"]["pieces"].append(first_piece(d)), "tensors.weight/w", "two pieces"),
    (lambda d: d["tensors"]["weight/w"]["pieces"][1].update(start=10), "tensors.weight/w", "begins at element 10"),
    (lambda d: d["param_groups"].append(d["param_groups"][0]), "param_groups[1].names", "already"),
    (lambda d: first_piece(d, "weight/v").update(offset=first_piece(d)["offset"]), "tensors", "overlaps"),
    (lambda d: first_piece(d).update(offset=2**50), "tensors.weight/w", "a piece ends at byte"),
    (lambda d: first_piece(d).update(offset=2**61), "tensors.weight/w.pieces[0].offset", "an integer below 2**60"),
    (lambda d: first_piece(d).update(offset=0), "tensors.weight/w.pieces[0]", "offset 8"),
    (lambda d: first_piece(d).update(start=-1), "tensors.weight/w.pieces[0]", "start 0"),
    (lambda d: first_piece(d).update(numel=2**50), "tensors.weight/w", "spans"),
    (lambda d: first_piece(d).update(checksums=[]), "tensors.weight/w", "checksums"),
    (lambda d: first_piece(d).update(checksums=[-1]), "tensors.weight/w.pieces[0]", "at least 0"),
    (lambda d: first_piece(d).update(checksums=[2**64]), "tensors.weight/w.pieces[0]", "64 bits"),
    (lambda d: first_piece(d).update(checksums=[1.0]), "tensors.weight/w.pieces[0].checksums[0]", "must be int"),
    (lambda d: d["tensors"]["weight/w"].update(shape=[-1, -3000]), "tensors.weight/w", "negative"),
    (lambda d: d["tensors"]["weight/w"].update(shape=[0, 2**61], pieces=[]), "tensors.weight/w", "any memory"),
    (lambda d: d["tensors"]["weight/w"].update(shape=[2**20, 2**20]), "tensors.weight/w", "pieces end"),
    (lambda d: d["tensors"]["weight/w"].update(shape=[0, 2**40, 2**40], pieces=[]), "tensors.weight/w", "any memory"),
    (lambda d: d["tensors"]["weight/w"].update(dtype="object"), "tensors.weight/w", "dtype"),
    (lambda d: d["tensors"]["weight/w"].update(dtype="load"), "tensors.weight/w", "dtype"),
    (lambda d: d["tensors"]["weight/w"].update(order=[1, 1]), "tensors.weight/w", "does not name"),
    (lambda d: d["tensors"]["weight/w"].update(block_numel=0), "tensors.weight/w", "make no sense"),
    (lambda d: d["tensors"]["weight/w"].update(block_numel=256), "tensors.weight/w", "int8 or uint8"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "key", "words"), CRAFTED, ids=[f"{i}-{row[2]}" for i, row in enumerate(CRAFTED)])
def test_an_index_made_up_with_care_is_refused_by_its_field(
    whole: Path, change: Callable[[dict[str, Any]], Any], key: str, words: str
) -> None:
    with pytest.raises(CheckpointCorrupt, match=re.escape(words)) as caught:
        parse_index(crafted(change, whole), whole / "index.json")
    assert caught.value.key.startswith(key)
    assert caught.value.path == str(whole / "index.json")


AT_THE_END: list[Callable[[dict[str, Any]], Any]] = [
    lambda d: d.update(sequence=1, step=0, steps={"w": 0}),
    lambda d: d.update(id="0badcafe", files={}, tensors={}, aliases={}),
    lambda d: d.update(id="0badcafe" * 4, files={}, tensors={}, aliases={}),
    lambda d: first_piece(d).update(checksums=[2**64 - 1]),
    lambda d: first_piece(d).update(checksums=[0]),
    lambda d: d["tensors"].update({"weight/w": {**d["tensors"]["weight/v"], "shape": [3], "pieces": [at_8(d)]}}),
    lambda d: d["tensors"]["weight/w"].update(shape=[0, 2**61 - 1], pieces=[]),
    lambda d: d["tensors"]["weight/w"].update(order=[0]),
    lambda d: d["files"].update(ends(d)),
    lambda d: d.update(rng=[], rank_values=[{}, {}]),
    lambda d: d.update(rng=[1, 2], rank_values=[]),
]
"""Changes that are only just right."""


def at_8(data: dict[str, Any]) -> dict[str, Any]:
    """A piece of three elements that begins as early as any can."""
    return first_piece(data) | {"start": 0, "numel": 3, "offset": 8}


def ends(data: dict[str, Any]) -> dict[str, int]:
    """The bytes at which the last piece of each file ends."""
    itemsize = {"float32": 4, "bfloat16": 2, "int64": 8}
    found = [
        (piece["file"], piece["offset"] + piece["numel"] * itemsize[tensor["dtype"]])
        for tensor in data["tensors"].values()
        for piece in tensor["pieces"]
    ]
    return {name: max(end for other, end in found if other == name) for name, _ in found}


@pytest.mark.parametrize("change", AT_THE_END)
def test_an_index_at_the_end_of_what_is_allowed_is_read(whole: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    assert isinstance(parse_index(crafted(change, whole), whole / "index.json"), Index)


@pytest.mark.parametrize(("field", "value", "words"), [("schema_version", 4, "reads 3"), ("artifact", "plan", "plan")])
def test_an_index_of_another_kind_is_told_from_a_damaged_one(whole: Path, field: str, value: Any, words: str) -> None:
    """Its checksum may be made in another way."""
    data = json.loads((whole / "index.json").read_text())
    data[field] = value
    with pytest.raises(CheckpointCorrupt, match=words) as caught:
        parse_index(json.dumps(data).encode(), whole / "index.json")
    assert caught.value.key == field


def test_an_index_made_up_at_random_raises_nothing_else(whole: Path) -> None:
    """Damages indexes that keep a right checksum: other values at any place."""
    original = json.loads((whole / "index.json").read_text())
    odd = [None, True, 0, -1, 2**70, 1.5, "", "x", "../x", [], [[]], {}, {"$": "tuple", "items": [1]}, {"a": 1}]
    refused = 0
    for seed in range(400):
        dice, data = random.Random(seed), copy.deepcopy(original)
        node: Any = data
        while True:
            places = list(node) if isinstance(node, dict) else list(range(len(node)))
            place = dice.choice(places)
            if not isinstance(node[place], (dict, list)) or not node[place] or dice.random() < 0.2:
                break
            node = node[place]
        node[place] = dice.choice(odd)
        try:
            index = parse_index(with_checksum(data), whole / "index.json")
            assert isinstance(index, Index)
        except CheckpointCorrupt:
            refused += 1
    assert refused > 200


def test_a_fifo_in_the_place_of_a_file_does_not_hang(whole: Path, tmp_path: Path) -> None:
    for name in ("index.json", sorted(read_index(whole).files)[0]):
        folder = tmp_path / name
        shutil.copytree(whole, folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(CheckpointCorrupt, match="regular"):
            open_checkpoint(folder)


def test_a_folder_without_a_checkpoint_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(CheckpointNotFound):
            open_checkpoint(folder)


def test_a_damaged_header_is_found_by_verify_though_we_do_not_need_it(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    shutil.copytree(whole, folder)
    path = folder / sorted(read_index(folder).files)[1]
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"F32")] ^= 1
    path.write_bytes(raw)
    everything(folder)
    (problem,) = verify(folder)
    assert "header" in str(problem)


def test_an_index_cannot_hold_what_json_cannot(whole: Path) -> None:
    import dataclasses

    index = read_index(whole)
    with pytest.raises(ArtifactError, match="sequence"):
        dataclasses.replace(index, sequence=0)
    with pytest.raises(ValueError, match="cannot be saved"):
        dataclasses.replace(index, values={"a": float("nan")}).to_json()
