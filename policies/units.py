"""Sizes in bytes, as people write and read them."""

import re

from alloclab.policies.errors import InputError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

#: Larger than any memory; sizes at or above it are refused as absurd.
MAX_BYTES = 1 << 60

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
_SIZE = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes from ``80GiB``, ``512MB``, ``1.5 GiB`` or plain ``4096``; fractions of a byte are cut.

    Raises:
        InputError: the text is not a size, or no memory is that large.

    >>> parse_size("80GiB"), parse_size("512MB"), parse_size("4096")
    (85899345920, 512000000, 4096)
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise InputError(
            f"size {text!r}: expected bytes or a number with KiB, MiB, GiB, KB, MB, GB"
        )
    whole, _, fraction = match[1].replace("_", "").partition(".")
    size = int(whole) * unit + (int(fraction) * unit // 10 ** len(fraction) if fraction else 0)
    if size >= MAX_BYTES:
        raise InputError(f"size {text!r}: more than any memory holds (the limit is 1 EiB)")
    return size


def format_size(size: int | float) -> str:
    """The size for people, in binary units with at most two decimals.

    >>> format_size(8 * GIB), format_size(1536), format_size(12)
    ('8.00 GiB', '1.50 KiB', '12 B')
    """
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} PiB"


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` (a power of two) that is not below ``value``."""
    return (value + alignment - 1) & -alignment


def align_down(value: int, alignment: int) -> int:
    """The largest multiple of ``alignment`` (a power of two) that is not above ``value``."""
    return value & -alignment
