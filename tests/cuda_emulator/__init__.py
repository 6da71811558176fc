"""A CUDA device for machines that have none, so that what only runs on one can be tested.

`install()` compiles `device.cpp` (once for each version of PyTorch; a minute) and makes `torch.cuda` work on it:
tensors on ``cuda`` are apart from those on ``cpu``, streams, events, pinning and the allocator's statistics exist, and
freed memory turns into NaN. It computes with the CPU's kernels, at once and in the order of issue. `races.py` finds
from what it wrote down what a device that runs streams side by side might have got wrong.

It cannot be undone: use it in a separate process. It has one device, no NCCL, no Triton, no graphs, and neither its
numbers, its times nor the workspaces of its kernels are those of a GPU.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils import cpp_extension

from tests.cuda_emulator import attention, host, kernels

DEVICE_NAME = "pretended device"
TOTAL_BYTES = 16 * 2**30
_DEVICE = Path(__file__).with_name("device.cpp")
_GROUP = Path(__file__).with_name("group.cpp")
_installed: ModuleType | None = None
_libraries: list[torch.library.Library] = []


def is_installed() -> bool:
    """Whether `torch.cuda` is pretended."""
    return _installed is not None


def install() -> ModuleType:
    """Makes `torch.cuda` work; gives the compiled module. Any number of times."""
    global _installed
    if _installed is None:
        if torch.cuda.is_available():
            raise RuntimeError("this machine has a CUDA device, and needs to pretend none")
        _installed = _load(_compiled(_DEVICE))
        _installed.set_capacity(TOTAL_BYTES)
        _patch(torch.cuda, _installed)
        _libraries.append(host.implement(_installed, {**attention.KERNELS, **kernels.KERNELS}))
    return _installed


def install_nccl() -> None:
    """Installs the device; process groups over ``nccl`` exist as well, of one rank or of several processes on this machine."""
    install()
    distributed: Any = torch.distributed.distributed_c10d
    if not distributed.is_nccl_available():
        made = _load(_compiled(_GROUP)).ProcessGroupNCCL
        for module in (distributed, torch.distributed):
            module.ProcessGroupNCCL = made
            module.is_nccl_available = lambda: True
        distributed.default_pg_nccl_timeout = distributed.default_pg_timeout


def _compiled(source: Path) -> Path:
    """The extension made of a C++ file; anew only where that file, a header or PyTorch is another."""
    name = f"pretended_{source.stem}"
    sources = b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    made_of = sources + torch.__version__.encode() + sysconfig.get_config_var("SOABI").encode()
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "elixir-tests"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{name}-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
            command = ["g++", "-O1", "-std=c++20", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={name}"]
            command += [f"-I{path}" for path in includes]
            command += [str(source), "-o", str(made), f"-L{Path(torch.__file__).parent / 'lib'}"]
            command += ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
            subprocess.run(command, check=True)
            made.replace(library)  # another process may make the same at the same time
    return library


def _load(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(library.name.partition("-")[0], library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Stream(torch.Stream):
    """Stands for `torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **made: int) -> Stream:
        if made:
            return super().__new__(cls, **made)
        return super().__new__(cls, device="cuda", priority=priority)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.event = torch.Event(device="cuda", enable_timing=enable_timing)

    def record(self, stream: torch.Stream | None = None) -> None:
        self.event.record(torch.cuda.current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        self.event.wait(torch.cuda.current_stream() if stream is None else stream)

    def query(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()

    def elapsed_time(self, ended: Event) -> float:
        return self.event.elapsed_time(ended.event)


class _OneDevice:
    """Stands for `torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _OnStream:
    """Stands for `torch.cuda.stream`."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> Stream | None:
        assert _installed is not None
        self.before = _installed.current_stream()
        if self.stream is not None:
            _installed.set_stream(self.stream.stream_id)
        return self.stream

    def __exit__(self, *_: object) -> None:
        assert _installed is not None
        _installed.set_stream(self.before)


class _Runtime:
    """Stands for the CUDA runtime's functions that pin memory."""

    def __init__(self, device: ModuleType) -> None:
        self._device = device

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        if self._device.is_pinned(pointer):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self._device.pin(pointer, nbytes)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        return 0 if self._device.unpin(pointer) else 713  # cudaErrorHostMemoryNotRegistered


def _patch(cuda: Any, device: ModuleType) -> None:
    properties = SimpleNamespace(
        name=DEVICE_NAME, major=9, minor=0, total_memory=TOTAL_BYTES, multi_processor_count=8, uuid="pretended"
    )

    def stream_of(number: int) -> Stream:
        return Stream(stream_id=number, device_index=0, device_type=1)

    replaced = {
        "_initialized": True,
        "Stream": Stream,
        "Event": Event,
        "device": _OneDevice,
        "stream": _OnStream,
        "StreamContext": _OnStream,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "current_stream": lambda device=None: stream_of(device_module.current_stream()),
        "default_stream": lambda device=None: stream_of(0),
        "set_stream": lambda stream: device_module.set_stream(stream.stream_id),
        "synchronize": lambda device=None: device_module.synchronize(),
        "mem_get_info": lambda device=None: (
            device_module.capacity_bytes() - device_module.allocated_bytes(),
            TOTAL_BYTES,
        ),
        "memory_allocated": lambda device=None: device_module.allocated_bytes(),
        "max_memory_allocated": lambda device=None: device_module.peak_bytes(),
        "memory_reserved": lambda device=None: device_module.allocated_bytes(),
        "max_memory_reserved": lambda device=None: device_module.peak_bytes(),
        "reset_peak_memory_stats": lambda device=None: device_module.reset_peak(),
        "reset_accumulated_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: {
            "allocated_bytes.all.current": device_module.allocated_bytes(),
            "allocated_bytes.all.peak": device_module.peak_bytes(),
            "requested_bytes.all.current": device_module.requested_bytes(),
            "requested_bytes.all.peak": device_module.requested_peak_bytes(),
            "reserved_bytes.all.current": device_module.allocated_bytes(),
            "reserved_bytes.all.peak": device_module.peak_bytes(),
        },
        "empty_cache": lambda: None,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: DEVICE_NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "_sleep": lambda cycles: None,  # nothing is queued here that a timing would have to hold back
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "cudart": lambda: runtime,
        "manual_seed": lambda seed: None,  # random numbers are the CPU's
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
    }
    device_module, runtime = device, _Runtime(device)
    resize_elsewhere = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resize_elsewhere(storage, nbytes)
        device.resize_storage(storage, nbytes)
        return storage

    copy_elsewhere = torch.UntypedStorage.clone

    def copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return copy_elsewhere(storage)
        whole = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage, 0, (storage.nbytes(),), (1,))
        return torch.empty_like(whole).copy_(whole).untyped_storage()

    torch.UntypedStorage.resize_, torch.UntypedStorage.clone = resize, copy
    for name, value in replaced.items():
        setattr(cuda, name, value)
    # bitsandbytes takes it when it is imported.
    torch._C._cuda_getCurrentRawStream = lambda index: device.current_stream()  # type: ignore[attr-defined]
