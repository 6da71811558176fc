"""Files with weights or states on a disk: what is no file of theirs, and what is asked of them otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from elixir.chunk.weight_files import WeightFiles
from elixir.errors import FileError, InputError, StateError
from elixir.extents.extent_file import ExtentFile
from elixir.extents.stored_tensors import StoredTensors, TensorFile, paged_memory
from elixir.files import File


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", r"no whole safetensors file \(it has no header\); download or save it again"),
        ((1 << 62).to_bytes(8, "little") + b"{}", r"no whole safetensors file \(its header is cut off\)"),
        (None, r"cannot be opened: No such file or directory; say where it is with weights="),
    ],
)
def test_what_is_no_file_of_weights_is_told(content: bytes | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=f"a.safetensors.*{says}"):
        WeightFiles([str(tmp_path / "a.safetensors")])


def test_a_file_of_weights_that_ends_while_it_is_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"weight": torch.ones(8)}, tmp_path / "a.safetensors")
    files = WeightFiles([str(tmp_path / "a.safetensors")])
    monkeypatch.setattr(File, "read_into", lambda *_: 4)
    with pytest.raises(FileError, match="the file ended early: it has changed since the run began"):
        files.read([("weight", 0, torch.empty(8))])
    files.close()


def test_states_on_a_disk_stay_as_they_were_made(tmp_path: Path) -> None:
    file = TensorFile(lambda: ExtentFile([str(tmp_path)]))
    states = StoredTensors(file, "chunk 3", 4096)
    assert states.region("exp_avg", 1000, torch.float32).isnan().all()
    with pytest.raises(StateError, match=r"chunk 3: 'exp_avg' has 1000 x torch.float32, asked for 1000 x torch.int8"):
        states.region("exp_avg", 1000, torch.int8)
    states.bind(paged_memory(4096))
    with pytest.raises(StateError, match="chunk 3 is in 4096 bytes of memory, its tensors need 8192"):
        states.region("exp_avg_sq", 1000, torch.float32)
    other = TensorFile(lambda: ExtentFile([str(tmp_path)]))
    with pytest.raises(StateError, match="states are moved before there is a file"):
        other.transfer("read", file.new_extent(4096, "chunk 4"), torch.empty(4096, dtype=torch.uint8), "chunk 4")
    states.give_back()
    file.close()
