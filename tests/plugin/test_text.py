"""Values, shares and columns as text."""

import math

import pytest

from pytest_aiperf import text


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (1.2345e-7, "s", "123.5 ns"),
        (1.5e-6, "s", "1.500 µs"),
        (127.94e-6, "s", "127.9 µs"),
        (1e-3, "s", "1.000 ms"),
        (-1e-3, "s", "-1.000 ms"),
        (0.9999996, "s", "1.000 s"),
        (75.0, "s", "75.00 s"),
        (12345.0, "s", "12345 s"),
        (2e-10, "s", "0.2000 ns"),
        (0.0, "s", "0.000 s"),
        (math.inf, "s", "inf s"),
        (math.nan, "B", "nan B"),
        (3 * 2**29, "B", "1.500 GiB"),
        (512.0, "bytes", "512.0 B"),
        (0.0, "B", "0.000 B"),
        (2.0**60, "B", "1.000 EiB"),
        (2.0**71, "B", "2048 EiB"),
        (4.2e12, "B/s", "4.200 TB/s"),
        (999.0, "FLOP/s", "999.0 FLOP/s"),
        (1.5e16, "OP/s", "15000 TOP/s"),
        (12345.6, "tok/s", "12346 tok/s"),
        (0.93751, "", "0.9375"),
    ],
)
def test_a_value_has_four_digits_and_a_fitting_prefix(value, unit, expected):
    assert text.si(value, unit) == expected


def test_the_number_of_digits_can_be_chosen():
    assert text.si(2.1e-6, "s", 2) == "2.1 µs"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.5, "0.5"), (2.0, "2"), (100.0, "100"), (3e3, "3k"), (2e6, "2M"), (0.0, "0")],
)
def test_a_tick_is_short(value, expected):
    assert text.short(value) == expected
    assert text.short(math.inf) == "-"


def test_a_share_is_formatted_as_a_percentage():
    assert text.percent(0.981) == "98 %"
    assert text.percent(0.00421, 2) == "0.42 %"


def test_columns_are_aligned_and_short_rows_are_filled():
    rows = [("name", "value", "unit"), ("a", "1.5", "s"), ("longer", "12")]
    assert text.table(rows, "<><") == [
        "name    value  unit",
        "a         1.5  s",
        "longer     12",
    ]
    assert text.table(rows)[1] == "a         1.5     s"
    assert text.table([]) == []


def test_a_long_name_keeps_its_start_and_its_end():
    name = "void kernel<" + "int, " * 60 + "float>(float*)"
    assert text.shorten("short") == "short"
    shown = text.shorten(name)
    assert len(shown) == 100
    assert shown.startswith("void kernel<int, ")
    assert shown.endswith("int, float>(float*)")
    assert "..." in shown
