"""Price files: what is read, what is refused, and what a row of a sweep or fit costs."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import pytest

from elixir.errors import InputError
from elixir.hardware.profile import preset_names
from elixir.search.whatif.prices import HOUR_S, Offer, Prices
from elixir.search.whatif.sweep import SweepRow

HEAD = "machine,devices,per_hour,currency,source,read_on"
ROW = SweepRow(
    model="some", machine="t4", world_size=3, batch=1, seq=8, dtype="bfloat16", device_budget_bytes=1,
    host_budget_bytes=1, fits=True, reason="", samples_per_s=5.0, tokens_per_s=40.0,
)  # fmt: skip


def read(folder: Path, content: str) -> Prices:
    table = folder / "prices.csv"
    table.write_bytes(content.replace("HEAD", HEAD).encode("latin-1"))
    return Prices.read(table)


def test_a_row_costs_what_its_cheapest_whole_offers_do(tmp_path: Path) -> None:
    prices = read(
        tmp_path,
        "# a comment\n \nHEAD\nt4,1,0.5,EUR, a ,2026-11-09\nt4,4,1.2,EUR,b,2026-11-10\n#another\nh200,8,80,EUR,c,2026-11-11\n",
    )
    assert prices.currency == "EUR"
    one, four, eight = prices.offers
    assert one == Offer("t4", 1, 0.5, "EUR", "a", datetime.date(2026, 11, 9))
    assert [each.hourly(5) for each in (one, four, eight)] == [2.5, 2.4, 80.0]
    for ranks, offer, per_hour in ((1, one, 0.5), (2, one, 1.0), (3, four, 1.2), (4, four, 1.2), (5, four, 2.4)):
        cost = prices.cost(replace(ROW, world_size=ranks))
        assert cost is not None
        assert (cost.offer, cost.per_hour, cost.unit) == (offer, per_hour, "tokens")
        assert cost.per_million == pytest.approx(per_hour / HOUR_S / 40 * 1e6)
        assert cost.of(3e6) == pytest.approx(3 * cost.per_million)
    of_samples = prices.cost(replace(ROW, tokens_per_s=None))
    assert of_samples is not None
    assert (of_samples.unit, of_samples.per_million) == ("samples", pytest.approx(1.2 / HOUR_S / 5 * 1e6))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "expected the columns machine,devices,per_hour,currency,source,read_on, found nothing"),
        ("machine,devices\nt4,1\n", "expected the columns .*, found machine,devices"),
        ("HEAD\nt4,0,1,EUR,a,2026-11-09\n", "line 2: devices and per_hour must be positive"),
        ("HEAD\nt4,1,0,EUR,a,2026-11-09\n", "line 2: devices and per_hour must be positive"),
        ("HEAD\nt4,1,nan,EUR,a,2026-11-09\n", "line 2: devices and per_hour must be positive"),
        ("HEAD\nt4,1,inf,EUR,a,2026-11-09\n", "line 2: devices and per_hour must be positive"),
        ("HEAD\n\nt4,one,1,EUR,a,2026-11-09\n", "line 3: devices and per_hour must be numbers"),
        ("HEAD\nt4,1,1,EUR,a,yesterday\n", "line 2: Invalid isoformat"),
        ("HEAD\nt4,1,1,EUR,a\n", "line 2: expected 6 values"),
        ("HEAD,host_memory\nt4,1,1,EUR,a,2026-11-09,much\n", "line 2: host_memory must be a positive number of GiB"),
        ("HEAD,host_memory\nt4,1,1,EUR,a,2026-11-09\n", "line 2: expected 7 values"),
        ("HEAD\nt4,1,1,EUR,a,2026-11-09,more\n", "line 2: expected 6 values"),
        ("HEAD\nt4,1,1, ,a,2026-11-09\n", "line 2: currency is empty"),
        ("HEAD\n\xff", "not a text file in UTF-8"),
        ("HEAD\nt4,1,1,EUR,a,2026-11-09\nl4,1,1,USD,a,2026-11-09\n", "one currency, found EUR, USD"),
        ("HEAD\n", "found no price"),
    ],
)
def test_a_price_file_that_makes_no_sense_is_refused_by_line(content: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        read(tmp_path, content)


def test_the_example_of_prices_names_presets() -> None:
    prices = Prices.read(Path(__file__).parents[3] / "example" / "prices.csv")
    assert {offer.machine for offer in prices.offers} <= set(preset_names())
    assert all(offer.source for offer in prices.offers)
