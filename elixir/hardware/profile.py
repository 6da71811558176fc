"""`HardwareProfile`: what one machine can do. This module holds data.

Profiles come from three places: a preset (`preset`, published numbers with their sources), a JSON file
(`load_hardware`), or a measurement (`elixir.microbench.measure`). Nothing here measures speed or allocates memory.
"""

from __future__ import annotations

import datetime
import functools
import importlib.resources
import logging
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from elixir.artifact import ADDED, NOT_NEGATIVE, POSITIVE, Artifact, Bound, check_bounds, digest
from elixir.errors import InputError, InputTypeError, unknown_name
from elixir.hardware.rate_fit import (
    DOUBTFUL_ERROR,
    LARGEST_ALONE,
    PER_S,
    PLAIN_FIELDS,
    PRODUCTS,
    RateFit,
    check_key,
    plainer_keys,
)
from elixir.units import is_dtype_name

_LOG = logging.getLogger(__name__)
_PRESETS = importlib.resources.files("elixir.hardware") / "presets"
"""A file for each machine, as `HardwareProfile.save` writes it: a user may copy one, change it and name its path."""

_Rate = Annotated[float, PER_S]
_Size = Annotated[int, POSITIVE]
_Positive = Annotated[float, POSITIVE]
_NotNegative = Annotated[float, NOT_NEGATIVE]
_PositiveShare = Annotated[float, Bound("a share above 0 and at most 1", POSITIVE.least, 1.0)]
_Share = Annotated[float, Bound("a share from 0 to 1", 0.0, 1.0)]

_NO_PART_OF_PLANS = "sources measured_at fits host_pin_bytes_per_s step_range learned early_steps".split()
"""Fields that `HardwareProfile.fingerprint` leaves out as they are; of fits it takes latency and rate."""
_EVEN_IF_UNKNOWN = ("compute_capability", "host_memory_bytes", "contention")
"""Fields that have a part in a fingerprint even if they are None."""

UNIFIED = ("GB10",)
"""Ends of the names of CUDA devices whose memory is that of the host, so that a plan may count a part of it for
each."""


@dataclass(frozen=True)
class Learned:
    """The runs whose seconds have been folded into a profile."""

    date: str
    """ISO date of the last."""
    steps: int
    """Steps, of all runs, that taught rates; 0 where all were clipped."""
    factor: float
    """Seconds that they took, over those that were predicted before any was known."""
    reports: tuple[str, ...]
    """Digests of the reports, so that none counts twice."""


_LACKED = {
    7: ("host_adam_least", "link_least", "early_kept", "early_steps", "sustained_attention_share"),
    8: ("sustained_attention_share",),
}
"""Earlier schema versions that are read -> the fields that they lack, which are unknown."""


@dataclass(frozen=True)
class HardwareProfile(Artifact):
    """One machine: its devices, its host, the links between them.

    Links and Adam rates are what a program reaches. FLOP/s and memory bandwidth of a preset are published peaks, the
    former brought down by `matmul_efficiency`; a measured profile has reached rates throughout. `sources` tells.

    `None` means unknown; the search then names the field it needs.

    Raises:
        InputError: a number is not positive and finite, a share is not in (0, 1], a range is reversed, the device kind
            is neither ``cuda`` nor ``cpu``, or a dtype is none of torch's; the message names the field.
    """

    artifact: ClassVar[str] = "hardware_profile"
    schema_version: ClassVar[int] = 9
    earlier: ClassVar[tuple[int, ...]] = tuple(_LACKED)
    remake_hint: ClassVar[str] = "measure it anew with `elixir hardware --measure`, or name a preset"

    name: str
    """Short name, such as ``h200``."""
    device_kind: str
    """``cuda`` or ``cpu``."""
    device_name: str
    """The name of the device, as the driver or the operating system has it."""
    compute_capability: tuple[int, int] | None
    """(major, minor) of a CUDA device, else None."""
    devices_per_host: _Size
    """1 on a ``cpu`` machine without a network, which any number of ranks share; see `ranks_per_host`."""
    device_memory_bytes: _Size
    """Memory of one device, as PyTorch reports it. On a ``cpu`` machine this is the host's memory."""
    device_memory_bytes_per_s: _Rate
    """Bandwidth of the device's own memory."""
    flops_per_s: dict[str, _Rate]
    """Dense peak by torch dtype name, such as ``bfloat16``."""
    matmul_efficiency: _PositiveShare
    """Share of `flops_per_s` that large matrix products reach, above 0 and at most 1."""
    host_memory_bytes: _Size | None
    """Memory of the whole machine."""
    host_memory_bytes_per_s: _Rate
    """Bandwidth of host memory, all cores together."""
    host_to_device_bytes_per_s: _Rate
    """One device alone, from pinned memory."""
    device_to_host_bytes_per_s: _Rate
    """The same in the other direction."""
    device_to_device_bytes_per_s: _Rate
    """Bandwidth between devices of one machine, per device and direction."""
    host_adam_numel_per_s: _Rate
    """Elements per second of a fused Adam over fp32 states on the host, all cores together."""
    device_adam_numel_per_s: _Rate
    """Elements per second of a fused Adam over fp32 states on the device."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of each number: a publication, or how it was measured."""
    measured_at: str | None = None
    """ISO date of the measurement; None for a preset."""
    fits: dict[str, RateFit] = field(default_factory=dict)
    """Latency and rate by what was measured, such as ``host_to_device.both``; of a preset, what its source says of all
    ranks at once. docs/appendix/formulas.md lists the keys; `rate` and `seconds` answer for those that are not
    there."""
    network_bytes_per_s: _Rate | None = None
    """Bandwidth between machines, per machine and direction, all its network cards together."""
    network_latency_s: _NotNegative | None = None
    """Latency of one step of a collective between machines, at least 0."""
    disk_read_bytes_per_s: _Rate | None = None
    """Rate of the disk of one machine on which states may live, past the page cache; shared by its ranks."""
    disk_write_bytes_per_s: _Rate | None = None
    """Rate of writing, until the bytes are on the disk."""
    disk_free_bytes: _Size | None = None
    """Free there when it was measured."""
    sustained_flops_share: _PositiveShare | None = None
    """Share of `flops_per_s` that the matrix products of a whole training step reach, which run at the clocks of a warm
    device, next to collectives. Asked where no fit was measured; None: `matmul_efficiency`."""
    sustained_memory_share: _Positive | None = None
    """Share of `device_memory_bytes_per_s` that its memory-bound operators reach; likewise, and None: all of it. Above
    1 on a CPU whose caches hold what they work on."""
    sustained_attention_share: _PositiveShare | None = None
    """Share of `flops_per_s` that attention reaches, masked scores not counted; None: `sustained_flops_share`."""
    step_range: tuple[_Positive, _Positive] | None = None
    """The multiples of the predicted seconds between which steps fell on machines like this one; None if no run is
    known."""
    learned: Learned | None = None
    """The runs that its rates agree with; see `elixir.hardware.learning.learn`."""
    launch_s: _Positive | None = None
    """Seconds that the host needs per operator. Where kernels are shorter than that, it is what counts; on a CPU, which
    runs them itself, it is added."""
    contention: _NotNegative | None = None
    """Seconds that compute loses for each second in which a lane works next to it: on a CPU copies and Adam take cores,
    caches and memory from it. None: nothing, as on devices with copy engines."""
    host_shared_bytes_per_s: _Rate | None = field(default=None, metadata=ADDED)
    """The most that CPU Adam, on all cores together, and copies over the links move in host memory at once, if it was
    measured that they share a limit. None: `host_memory_bytes_per_s`, or what Adam alone moves if that is more."""
    host_pin_bytes_per_s: _Rate | None = None
    """How fast host memory is made ready when a model is wrapped: touched for the first time and, where the device is
    no CPU, registered with CUDA."""

    host_adam_least: _PositiveShare | None = None
    """Part of its rate that CPU Adam may turn out to have, at most 1; None: as little as is known of such a profile
    (`elixir.hardware.scenario.slowest_rates`)."""
    link_least: _PositiveShare | None = None
    """The same part for the links between host and device."""
    early_kept: _Share | None = None
    """Share of steps that kept new states which the host made in backward, from 0 to 1: those whose gradients were not
    clipped. None: no run has said."""
    early_steps: Annotated[int, NOT_NEGATIVE] | None = None
    """Steps of runs from which that share is known."""

    @classmethod
    def from_dict(cls, data: Any, *, source: str = "input") -> HardwareProfile:
        """Builds a profile of this version's fields, or of those of versions 7 and 8.

        These counted the masked half of the scores in measurements of causal attention as well.
        """
        version = data.get("schema_version") if isinstance(data, dict) else None
        if type(version) is int and version in _LACKED:
            data = dict.fromkeys(_LACKED[version]) | data | {"schema_version": cls.schema_version}
            if isinstance(fits := data.get("fits"), dict):
                data["fits"] = {key: _unmasked(fit) if _is_attention(key, fit) else fit for key, fit in fits.items()}
        return super().from_dict(data, source=source)

    def ranks_per_host(self, world_size: int) -> int:
        """How many of `world_size` ranks share a machine: one per device; all of them on a ``cpu`` machine without a
        network."""
        alone = self.device_kind == "cpu" and self.network_bytes_per_s is None
        return world_size if alone else min(world_size, self.devices_per_host)

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError("hardware field 'name' must not be empty")
        if self.device_kind not in ("cuda", "cpu"):
            raise InputError(f"hardware field 'device_kind' must be 'cuda' or 'cpu', found {self.device_kind!r}")
        check_bounds(self, "hardware field '{}'")
        self._check_capability()
        self._check_rates()
        if self.step_range is not None and self.step_range[0] > self.step_range[1]:
            raise InputError(
                f"hardware field 'step_range' must be two numbers, the lower first, found {list(self.step_range)}"
            )
        if self.measured_at is not None:
            try:
                datetime.date.fromisoformat(self.measured_at)
            except (TypeError, ValueError):
                raise InputError(
                    f"hardware field 'measured_at' must be a date such as '2026-01-31', found {self.measured_at!r}"
                ) from None

    def _check_rates(self) -> None:
        if not self.flops_per_s:
            raise InputError("hardware field 'flops_per_s' must give a rate for at least one dtype, found none")
        for dtype in self.flops_per_s:
            if not is_dtype_name(dtype):
                raise InputError(
                    f"hardware field 'flops_per_s' has {dtype!r}, which is no torch dtype name such as 'bfloat16'"
                )
        for key, fit in self.fits.items():
            check_key(key)
            if not isinstance(fit, RateFit):
                raise InputError(f"hardware field 'fits.{key}' must be a RateFit, found {type(fit).__name__}")

    def _check_capability(self) -> None:
        found, on_cpu = self.compute_capability, self.device_kind == "cpu"
        if not (found is None if on_cpu else found and len(found) == 2 and found[0] >= 1 and found[1] >= 0):
            expected = "null for a cpu" if on_cpu else "(major, minor) for a cuda device"
            raise InputError(f"hardware field 'compute_capability' must be {expected}, found {found}")

    @property
    def knows_disk(self) -> bool:
        """Whether it says how fast its disk is, in both directions."""
        ways = ("disk_read", "disk_write")
        return all(way in self.fits or getattr(self, PLAIN_FIELDS[way]) is not None for way in ways)

    @property
    def fingerprint(self) -> str:
        """Identifies the numbers that plans depend on, not their sources. What is not known has no part in it."""
        data = {
            name: value
            for name, value in self.to_dict().items()
            if name not in _NO_PART_OF_PLANS and (value is not None or name in _EVEN_IF_UNKNOWN)
        }
        data["schema_version"] = 1
        fits = {key: [fit.latency_s, fit.per_s] for key, fit in self.fits.items()}
        return digest(data, fits) if fits else digest(data)

    def flops_rate(self, dtype: str) -> float:
        """FLOP/s that large matrix products in `dtype` (a torch name, such as ``bfloat16``) reach on one device.

        A CPU of which nobody said float64's takes twice as long for it as for float32: its registers hold half as many.

        Raises:
            InputError: the profile has no rate for this dtype.
        """
        if dtype == "float64" and dtype not in self.flops_per_s and self.device_kind == "cpu":
            return self.flops_rate("float32") / 2
        if dtype not in self.flops_per_s:
            known = ", ".join(sorted(self.flops_per_s))
            raise InputError(
                f"hardware {self.name!r} has no FLOP/s for dtype {dtype!r}; it has {known}. Choose one of these, "
                f"or add the dtype to 'flops_per_s' in a JSON profile"
            )
        return self.flops_per_s[dtype] * self.matmul_efficiency

    def seconds(self, key: str, amount: float) -> float:
        """Seconds that `amount` of what `key` names takes; see `rate`.

        Args:
            key: one of those in docs/appendix/formulas.md, such as ``host_to_device.both`` or
                ``matmul.bfloat16.square``.
            amount: bytes, elements or FLOPs, as the key counts.

        Raises:
            InputError: there is no such key, or the amount is negative or not finite.
        """
        return self.rate(key).seconds(amount)

    def rate(self, key: str) -> RateFit:
        """The fit for `key`; where it was not measured, that of the nearest plainer key; else a plain field, latency 0.

        Plainer means with fewer words: ``host_to_device.both.all_ranks`` is answered by ``host_to_device.both`` or
        ``host_to_device``, then by `host_to_device_bytes_per_s`. A class of matrix product is answered by ``square``,
        an activation function by ``elementwise``. A collective that was not measured sends each byte that is another
        rank's once over `device_to_device_bytes_per_s`, as a ring does; for a world of one it is a copy within the
        device's memory.

        Raises:
            InputError: there is no such key, or the profile knows no FLOP/s for its dtype, or no speed of a disk.
        """
        fit = self.fits.get(key)
        if fit is not None:
            return fit
        check_key(key)
        for other in plainer_keys(key):
            if other in self.fits:
                return self.fits[other]
        family, *rest = key.split(".")
        if family in PRODUCTS:
            return RateFit(0.0, self.flops_rate(rest[0]), 0.0)
        if family in ("all_gather", "reduce_scatter"):
            world = int(rest[0])
            if world == 1:
                return RateFit(0.0, self.device_memory_bytes_per_s / 2, 0.0)  # each byte is read and written
            return RateFit(0.0, self.device_to_device_bytes_per_s * world / (world - 1), 0.0)
        plain: float | None = getattr(self, PLAIN_FIELDS[family])
        if plain is None:
            raise InputError(
                f"hardware {self.name!r} does not say how fast its disk is; measure it with `elixir hardware --measure "
                f"--disk-folder DIR --out hw.json`, add '{PLAIN_FIELDS[family]}' to a JSON profile, or "
                "pass disk_folder= to elixir.wrap, which measures that disk"
            )
        return RateFit(0.0, plain, 0.0)


def _is_attention(key: str, fit: Any) -> bool:
    return key.startswith("attention.") and isinstance(fit, dict) and {"per_s", "points"} <= fit.keys()


def _unmasked(fit: dict[str, Any]) -> dict[str, Any]:
    """A fit of causal attention, as a file has it, with half the FLOPs in the same seconds."""
    points = [[point[0] / 2, *point[1:]] for point in fit["points"]]
    return fit | {"per_s": fit["per_s"] / 2, "points": points}


@functools.cache
def preset_names() -> tuple[str, ...]:
    """Names that `preset` knows, ``cpu`` last: those of the files in ``elixir/hardware/presets``."""
    names = (file.name.removesuffix(".json") for file in _PRESETS.iterdir() if file.name.endswith(".json"))
    return tuple(sorted(names, key=lambda name: (name == "cpu", name)))


def preset(name: str) -> HardwareProfile:
    """The preset machine `name` (case does not matter), every number with its source.

    A source keeps four kinds of numbers apart: *published* (a datasheet: memory bandwidth and FLOP/s are peaks, dense,
    never with sparsity), *measured* (by someone else, named), *derived* (from another machine's), and *assumption* (no
    source found; the text says on what basis). Rates are decimal (1 GB = 1e9 bytes), memory sizes binary.

    Raises:
        InputError: there is no such preset; the message suggests the nearest names.
    """
    if not isinstance(name, str):
        raise InputTypeError(f"hardware must be a name such as 'h200', got {type(name).__name__}")
    if name.lower() not in preset_names():
        raise unknown_name("hardware", name, preset_names())
    file = _PRESETS / f"{name.lower()}.json"
    return HardwareProfile.from_json(file.read_text(encoding="utf-8"), source=str(file))


def load_hardware(text: str) -> HardwareProfile:
    """A profile from what a user writes: a preset's name, or the path of a JSON profile (ending in ``.json``).

    Raises:
        InputError: an unknown name.
        ArtifactError: the file cannot be read or is no hardware profile.
    """
    if isinstance(text, str) and text.lower().endswith(".json"):
        return HardwareProfile.load(text)
    return preset(text)


def warn_if_other_device(profile: HardwareProfile) -> None:
    """Logs a warning where `profile` was measured on another device than this machine has.

    For a plan that is run or searched for this machine. A preset is nobody's measurement, so it is never warned of.
    """
    here = profile.measured_at and other_device("", profile.device_name, profile.device_kind)
    if here:
        _LOG.warning(
            "hardware profile %r was measured on %s, but this machine has %s: times predicted from it do not hold "
            "here; measure this machine with `elixir hardware --measure --out hw.json`",
            profile.name,
            profile.device_name,
            here,
        )


def other_device(name: str, device_name: str, kind: str) -> str | None:
    """The name of the device of `kind` here, if a plan was made for another one; None if it is the same.

    Args:
        name: of the plan's hardware profile.
        device_name: of its device; empty where that is not known.
        kind: ``cuda`` or ``cpu``, where the plan runs.
    """
    # Late: it asks the driver, which a profile that is only read has no use for.
    from elixir.hardware.memory import device_name_here

    here = device_name_here(kind)
    if here is None:
        return None
    if name in preset_names():
        made_for = preset(name)
        if made_for.device_kind != kind:
            return here
        # Drivers and data sheets name a device differently; all have the model's number, of which the preset's name
        # begins.
        same = kind == "cpu" or _letters(name.split("-")[0]) in _letters(here)
    else:
        same = not device_name or _device_of(here) == _device_of(device_name)
    return None if same else here


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def doubtful_rates(profile: HardwareProfile) -> dict[str, str]:
    """Rates of `profile` on which no times should be built, each with why; the worst first.

    Where no fit describes what was measured, `sources` says so until somebody gives the rate another source.
    """
    found = {
        name: f"no fit describes what was measured, {LARGEST_ALONE}"
        for name, source in profile.sources.items()
        if LARGEST_ALONE in source
    }
    errors = [(fit.error, key) for key, fit in profile.fits.items() if fit.error > DOUBTFUL_ERROR]
    return found | {
        f"fits.{key}": f"its fit is off by up to {error:.0%}" for error, key in sorted(errors, reverse=True)
    }


def warn_if_doubtful(profile: HardwareProfile) -> None:
    """Logs a warning that names the `doubtful_rates` of a profile from which times will be predicted."""
    found: dict[str, list[str]] = {}
    for name, why in doubtful_rates(profile).items():
        found.setdefault(why, []).append(name)
    if found:
        _LOG.warning(
            "hardware profile %r: times predicted from these rates may be far off: %s; %s",
            profile.name,
            "; ".join(f"{', '.join(names)}: {why}" for why, names in found.items()),
            IF_DOUBTFUL,
        )


IF_DOUBTFUL = (
    "measure again while nothing else runs (`elixir hardware --measure --out hw.json`), or write rates that you know "
    "into the file, with their sources"
)
"""Advice on them."""


def _device_of(name: str) -> str:
    """The name of a device without the thread count, which a process chooses."""
    return re.sub(r", \d+ threads?$", "", name)
