"""The checksum of a span: xxh3 of 64 bits, which takes less time than a copy of the bytes, and no interpreter lock."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest as checksum

__all__ = ["CHECKSUM_KIND", "checksum"]

CHECKSUM_KIND = "xxh3_64"
"""Name of the checksum in the index of a checkpoint."""
