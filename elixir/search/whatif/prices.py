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
from elixir.search.whatif.sweep_row import SweepRow

COLUMNS = ("machine", "devices", "per_hour", "currency", "source", "read_on")
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
        """Reads a CSV file with the columns `COLUMNS`; lines that begin with ``#`` are comments.

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
        if sorted(rows.fieldnames or ()) != sorted(COLUMNS):
            found = ",".join(rows.fieldnames or ()) or "nothing"
            raise InputError(f"{path}: expected the columns {','.join(COLUMNS)}, found {found}")
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

    def cost(self, row: SweepRow) -> RunCost | None:
        """The cheapest offer of the row's machine for as many devices; None without an offer, or if it does not fit."""
        offers = [offer for offer in self.offers if offer.machine == row.machine]
        speed, unit = (row.samples_per_s, "samples") if row.tokens_per_s is None else (row.tokens_per_s, "tokens")
        if not offers or not row.fits or not speed:
            return None
        best = min(offers, key=lambda offer: offer.hourly(row.world_size))
        hourly = best.hourly(row.world_size)
        return RunCost(best, hourly, hourly / HOUR_S / speed * 1e6, unit)


def _offer(row: dict[str, str]) -> Offer:
    """The offer in one line; `ValueError` says which value is wrong."""
    if None in row or None in row.values():
        raise ValueError(f"expected {len(COLUMNS)} values")
    text = {name: value.strip() for name, value in row.items()}
    for name in ("machine", "currency"):
        if not text[name]:
            raise ValueError(f"{name} is empty")
    try:
        devices, per_hour = int(text["devices"]), float(text["per_hour"])
    except ValueError:
        raise ValueError(
            f"devices and per_hour must be numbers, got {text['devices']!r} and {text['per_hour']!r}"
        ) from None
    if devices < 1 or not 0 < per_hour < math.inf:
        raise ValueError(f"devices and per_hour must be positive, got {devices} and {per_hour:g}")
    read_on = datetime.date.fromisoformat(text["read_on"])
    return Offer(text["machine"], devices, per_hour, text["currency"], text["source"], read_on)
