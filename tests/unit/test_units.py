"""Sizes as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloclab.policies.errors import InputError
from alloclab.policies.units import align_down, align_up, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("80GiB", 80 << 30), ("512MB", 512_000_000), ("1.5kib", 1536),
     (" 2 TiB ", 2 << 40), ("1_000", 1000), ("0.1B", 0), ("15.75GiB", 16911433728)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e3", "12 bytes", "1 G", "nan", "2EiB", "1024PiB"]
)
def test_not_sizes(text: str) -> None:
    with pytest.raises(InputError, match=r"^size "):
        parse_size(text)


def test_sizes_for_people() -> None:
    assert format_size(0) == "0 B"
    assert format_size(1023) == "1023 B"
    assert format_size(-1536) == "-1.50 KiB"
    assert format_size(3 << 50) == "3.00 PiB"


@given(st.integers(0, 1 << 60), st.integers(0, 40))
def test_alignment(value: int, power: int) -> None:
    alignment = 1 << power
    assert align_down(value, alignment) <= value <= align_up(value, alignment)
    assert align_up(value, alignment) - align_down(value, alignment) in (0, alignment)
    assert align_up(value, alignment) % alignment == 0
