"""Prices of machines an hour, from a file that the user keeps: cost of a step, and of a run of many tokens."""

from __future__ import annotations

import csv
import datetime
import io
import math
import os
from dataclasses import dataclass

from elixir.errors import InputError
from elixir.files import FILES
from elixir.search.whatif.sweep import SweepRow
from elixir.units import GIB

COLUMNS = ("machine", "devices", "per_hour", "currency", "source", "read_on")
HOST_MEMORY = "host_memory"
"""A column that a file may leave out, and a line may leave empty."""
LARGEST_FILE_BYTES = 2**20
HOUR_S = 3600.0


@dataclass(frozen=True)
class Offer:
    """One line of a price file."""

    machine: str
    """The name of a preset, or of a hardware profile."""
    devices: int
    """Devices rented together: 8 for a whole machine that is not divided."""
    per_hour: float
    """The price of all of them for an hour."""
    currency: str
    source: str
    read_on: datetime.date
    host_memory_bytes: int | None = None
    """Host memory of what is rented, all devices of the offer together; None if the file does not say."""

    def has_room(self, row: SweepRow) -> bool:
        """Whether a machine of such offers may have the host memory that must be free for a row."""
        if self.host_memory_bytes is None or row.must_be_free_bytes is None or row.ranks_per_host is None:
            return True
        return math.ceil(row.ranks_per_host / self.devices) * self.host_memory_bytes >= row.must_be_free_bytes

    def hourly(self, devices: int) -> float:
        """The price of at least `devices` devices for an hour."""
        return math.ceil(devices / self.devices) * self.per_hour


@dataclass(frozen=True)
class RunCost:
    """The cost of a row of a sweep or fit."""

    offer: Offer
    per_hour: float
    per_million: float
    """Cost of a million tokens, or of a million samples if samples are no tokens."""
    unit: str
    """``tokens`` or ``samples``."""

    def of(self, amount: float) -> float:
        """Cost of a run of `amount` tokens or samples."""
        return self.per_million * amount / 1e6


@dataclass(frozen=True)
class Prices:
    """The offers of a price file, all in one currency."""

    offers: tuple[Offer, ...]
    currency: str

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Prices:
        """Reads a CSV file with the columns `COLUMNS` and perhaps `HOST_MEMORY`, in GiB; ``#`` begins a comment line.

        Raises:
            FileError: the file cannot be read.
            InputError: a column is missing, a value makes no sense, or there are several currencies; names the line.
        """
        raw = FILES.read_whole(path, limit_bytes=LARGEST_FILE_BYTES)
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise InputError(f"{path}: not a text file in UTF-8") from None
        numbered = [(at, line) for at, line in enumerate(io.StringIO(text), 1) if line.strip() and line[0] != "#"]
        rows = csv.DictReader(line for _, line in numbered)
        if sorted({*(rows.fieldnames or ()), HOST_MEMORY}) != sorted((*COLUMNS, HOST_MEMORY)):
            found = ",".join(rows.fieldnames or ()) or "nothing"
            raise InputError(
                f"{path}: expected the columns {','.join(COLUMNS)}, found {found}; {HOST_MEMORY} may be one more"
            )
        offers = []
        for (at, _), row in zip(numbered[1:], rows, strict=False):
            try:
                offers.append(_offer(row))
            except (ValueError, TypeError) as error:
                raise InputError(f"{path}, line {at}: {error}") from None
        currencies = sorted({offer.currency for offer in offers})
        if len(currencies) != 1:
            found = ", ".join(currencies) or "no price"
            raise InputError(f"{path}: expected prices in one currency, found {found}")
        return cls(tuple(offers), currencies[0])

    def names(self, machine: str) -> bool:
        """Whether there is an offer of this machine."""
        return any(offer.machine == machine for offer in self.offers)

    def cost(self, row: SweepRow) -> RunCost | None:
        """The cheapest offer of the row's machine for as many devices; None without one that has the host memory, or if
        it does not fit."""
        offers = [offer for offer in self.offers if offer.machine == row.machine and offer.has_room(row)]
        speed, unit = (row.samples_per_s, "samples") if row.tokens_per_s is None else (row.tokens_per_s, "tokens")
        if not offers or not row.fits or not speed:
            return None
        best = min(offers, key=lambda offer: offer.hourly(row.world_size))
        hourly = best.hourly(row.world_size)
        return RunCost(best, hourly, hourly / HOUR_S / speed * 1e6, unit)


def _offer(row: dict[str, str]) -> Offer:
    """The offer in one line; `ValueError` says which value is wrong."""
    if None in row or None in row.values():
        raise ValueError(f"expected {len([name for name in row if name])} values")
    text = {name: value.strip() for name, value in row.items()}
    for name in ("machine", "currency"):
        if not text[name]:
            raise ValueError(f"{name} is empty")
    host = text.get(HOST_MEMORY, "")
    if host and not (host.replace(".", "", 1).isdecimal() and float(host)):
        raise ValueError(f"{HOST_MEMORY} must be a positive number of GiB, or empty, got {host!r}")
    try:
        devices, per_hour = int(text["devices"]), float(text["per_hour"])
    except ValueError:
        raise ValueError(
            f"devices and per_hour must be numbers, got {text['devices']!r} and {text['per_hour']!r}"
        ) from None
    if devices < 1 or not 0 < per_hour < math.inf:
        raise ValueError(f"devices and per_hour must be positive, got {devices} and {per_hour:g}")
    read_on = datetime.date.fromisoformat(text["read_on"])
    host_bytes = int(float(host) * GIB) if host else None
    return Offer(text["machine"], devices, per_hour, text["currency"], text["source"], read_on, host_bytes)
