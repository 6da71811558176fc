"""A checkpoint on disk, opened without ranks and without a model: its tensors, weights, optimizer states and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from elixir.checkpoint_format.index import INDEX_NAME, scale_key
from elixir.checkpoint_format.saved_tensor import STORED_DTYPES, scalar_state
from elixir.checkpoint_format.slice_reader import SliceReader
from elixir.checkpoint_format.values import decode
from elixir.errors import CheckpointCorrupt, CheckpointError, InputError, unknown_name
from elixir.files import FILES, Files, PathLike
from elixir.memory_order import shaped
from elixir.optimizer_states import decode_signed, decode_unsigned
from elixir.units import parse_dtype

_SCALED = {"exp_avg": decode_signed, "exp_avg_sq": decode_unsigned}


def open_checkpoint(folder: PathLike, *, files: Files = FILES) -> SavedCheckpoint:
    """Opens the checkpoint in a folder to read from it. `close` or a ``with`` statement closes it.

    Args:
        folder: that was saved to.
        files: the file operations it uses.

    Raises:
        CheckpointNotFound: the folder holds no checkpoint.
        CheckpointCorrupt: its index is damaged, or a file that it names is missing or of another size.

    Example:
        >>> with open_checkpoint("run/step-00000500") as saved:
        ...     model.load_state_dict(saved.weights(torch.bfloat16))
    """
    saved = SavedCheckpoint(folder, files=files)
    for name in saved.index.files:
        saved.check_file(name)
    return saved


class SavedCheckpoint(SliceReader):
    """A checkpoint to read from, by one thread at a time. Nothing is held in memory but the index."""

    @property
    def step(self) -> int | None:
        """The step that the save was given."""
        return self.index.step

    def keys(self) -> tuple[str, ...]:
        """Keys of all tensors, such as ``weight/<name>`` and ``exp_avg/<name>``."""
        return tuple(self.index.tensors)

    def read_whole(self, key: str) -> torch.Tensor:
        """Reads a tensor in its shape."""
        return self._shaped(key, self.read(key))

    def _shaped(self, key: str, flat: torch.Tensor) -> torch.Tensor:
        saved = self.tensor(key)
        return shaped(flat, saved.shape, saved.order)

    def read_float32(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Reads elements in float32; codes of 8 bits are decoded with their scales."""
        saved, stop = self.in_range(key, start, stop)
        if saved.block_numel is None or start == stop:
            return self.read(key, start, stop).float()
        kind, size = key.partition("/")[0], saved.block_numel
        if kind not in _SCALED:
            raise CheckpointError(f"{key}: codes of {kind} are unknown to this version of Elixir")
        first, last = start // size, -(-stop // size)
        # Codes as whole blocks; the last of the tensor may be cut short, and zeros fill it up.
        origin = first * size
        codes = torch.zeros((last - first) * size, dtype=saved.torch_dtype, device="cpu")
        self.read_into(key, origin, codes[: min(saved.numel - origin, codes.numel())])
        scales = self.read(scale_key(key), first, last)
        values = _SCALED[kind](codes.view(-1, size), scales).view(-1)
        return values[start - origin : stop - origin].clone()

    def weights(self, dtype: torch.dtype | str | None = None) -> Mapping[str, torch.Tensor]:
        """Weights and persistent buffers by name, as a model's ``load_state_dict`` takes them; read when asked for.

        Args:
            dtype: of the floating-point weights. None: as saved, which is float32 where there were master weights.
        """
        return _Weights(self, None if dtype is None else parse_dtype(dtype))

    def optimizer_state_dict(self, optimizer: str | None = None) -> dict[str, Any]:
        """Returns the states in the layout of torch.optim: by number, in float32 or wider, in the parameter's shape,
        all in memory.

        Args:
            optimizer: the name under which it was saved; may be left out if there is one.

        Raises:
            InputError: there is no such optimizer, or several and none is named.
        """
        names = tuple(dict.fromkeys(group.optimizer for group in self.index.param_groups))
        if optimizer is None:
            if len(names) != 1:
                raise InputError(f"{self.folder} has {len(names)} optimizers, name one of {list(names)}")
            (optimizer,) = names
        if optimizer not in names:
            raise unknown_name("optimizer", optimizer, names)
        groups = [group for group in self.index.param_groups if group.optimizer == optimizer]
        numbers = {name: i for i, name in enumerate(name for group in groups for name in group.names)}
        state: dict[int, dict[str, Any]] = {}
        for name, kinds in self.index.state_kinds(numbers).items():
            for kind in kinds:
                key = f"{kind}/{name}"
                saved = self.tensor(key)
                narrow = saved.torch_dtype.is_floating_point and saved.itemsize < torch.float32.itemsize
                value = self.read_float32(key) if narrow or saved.block_numel else self.read(key)
                state.setdefault(numbers[name], {})[kind] = self._shaped(key, value)
        for name, step in self.index.steps.items():
            if name in numbers:
                state[numbers[name]] = {"step": torch.tensor(float(step), device="cpu")} | state.get(numbers[name], {})
        for name in self.index.scalars:
            if name in numbers:
                scalars = {kind: scalar_state(value) for kind, value in self.scalars(name).items()}
                state.setdefault(numbers[name], {}).update(scalars)
        found = []
        for i, group in enumerate(groups):
            options = self.mapping(group.options, f"param_groups[{i}].options")
            found.append({**options, "params": [numbers[name] for name in group.names]})
        return {"state": dict(sorted(state.items())), "param_groups": found}

    def scalars(self, name: str) -> dict[str, Any]:
        """States of a parameter that are no tensors over its elements; see `Index.scalars`."""
        key = f"scalars.{name}"
        found = self.mapping(self.index.scalars.get(name, {}), key)
        for kind, value in found.items():
            pair = type(value) is tuple and len(value) == 2 and value[0] in STORED_DTYPES
            number = value[1] if pair else value
            if not isinstance(number, (bool, int, float)):
                raise self._wrong("no number", f"{key}.{kind}")
        return found

    def value(self, name: str) -> Any:
        """A value of the user's state, such as ``epoch``."""
        if name not in self.index.values:
            raise unknown_name("saved value", name, self.index.values)
        return self.decoded(self.index.values[name], name)

    def value_names(self) -> tuple[str, ...]:
        """Names that `value` takes."""
        return tuple(self.index.values)

    def decoded(self, data: Any, key: str) -> Any:
        """Decodes a value of the index that `values.encode` made; `key` names it in errors."""
        return decode(data, self._stored, path=self.folder / INDEX_NAME, key=key)

    def _stored(self, key: str) -> torch.Tensor:
        if key not in self.index.tensors:
            raise self._wrong("a value names this tensor, which is not there", key)
        return self.read(key)

    def mapping(self, data: Any, key: str) -> dict[str, Any]:
        """Decodes a value that must be a dict."""
        found = self.decoded(data, key)
        if not isinstance(found, dict):
            raise self._wrong(f"expected a dict, found {type(found).__name__}", key)
        return found

    def _wrong(self, problem: str, key: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(problem, path=self.folder / INDEX_NAME, key=key)


class _Weights(Mapping[str, torch.Tensor]):
    def __init__(self, saved: SavedCheckpoint, dtype: torch.dtype | None) -> None:
        self._saved, self._dtype = saved, dtype
        index = saved.index
        kept = [key for key in index.tensors if key.startswith(("weight/", "buffer/"))]
        self._keys = {key.partition("/")[2]: key for key in kept}
        self._keys |= {other: self._keys[name] for other, name in index.aliases.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        key = self._keys[name]
        found = self._saved.read_whole(key)
        if self._dtype is None or not key.startswith("weight/") or not found.is_floating_point():
            return found
        return found.to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
