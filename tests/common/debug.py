"""Test switches of the runtime among other options."""

from __future__ import annotations

from typing import Any

from elixir.wrapper import Debug

_SWITCHES = ("poison", "evict_always", "emulation", "files")


def debugged(options: dict[str, Any], **switches: Any) -> dict[str, Any]:
    """Options of `ElixirModule` with the switches among them, and `switches` where they say nothing, in one `Debug`."""
    found = {name: value for name, value in (switches | options).items() if name in _SWITCHES}
    others = {name: value for name, value in options.items() if name not in _SWITCHES}
    return others | {"debug": Debug(**found)}
