"""What differs between the BFC allocators of jax releases, in one table."""

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from alloclab.policies.errors import InputError
from alloclab.policies.units import align_down, align_up

#: Chunks are multiples of this many bytes (kMinAllocationSize).
MIN_ALLOCATION_SIZE = 256
#: What each retry asks for after the driver refused (kBackpedalFactor, a float).
BACKPEDAL_FACTOR = np.float32(0.9)

Tag = Literal["gap", "lower", "upper"]


@dataclass(frozen=True)
class EndRules:
    """How one end of a spatially partitioned pool is used (BFCAllocator::Options, 0.12).

    ``descending``: of equal holes the one at the highest address is used, else the lowest.
    ``exact_holes``, ``exact_gap``: a hole, or the gap, is always split to the rounded size; else
    only when the rest is as large as the request, or 128 MiB (the split rule).
    """

    descending: bool = False
    exact_holes: bool = False
    exact_gap: bool = False


@dataclass(frozen=True)
class Rules:
    """The BFC of one jax release.

    Attributes:
        ends: the rules of each end of the spatial flavour; empty where there is none.
        ordinary: the end that serves ordinary buffers; collective ones take the other.
        backs_off_down: after a refusal the driver is asked for 0.9 of the bytes rounded down
            to a multiple of 256, else up.
        backs_off_always: where that is not less, 256 bytes less are asked for; else it is the same
            again, without end (from 2,304 bytes down).
        reports_largest_free: whether memory_stats() fills largest_free_block_bytes (else 0).
    """

    ends: dict[Tag, EndRules]
    ordinary: Tag = "lower"
    backs_off_down: bool = False
    backs_off_always: bool = True
    reports_largest_free: bool = True

    def backed_off(self, size: int) -> int:
        """What is asked after the driver refused ``size`` bytes (BFCAllocator::Extend).

        The product is in float32, as in the C++ code.
        """
        less = int(np.float32(size) * BACKPEDAL_FACTOR)
        rounded = (align_down if self.backs_off_down else align_up)(less, MIN_ALLOCATION_SIZE)
        if rounded == size and self.backs_off_always:
            return size - MIN_ALLOCATION_SIZE
        return rounded


#: The one end of the classic flavour, in all releases.
CLASSIC_ENDS: dict[Tag, EndRules] = {"lower": EndRules()}

_BFC, _EXACT = EndRules(), EndRules(exact_holes=True, exact_gap=True)

#: The rules by the first release that has them (xla/tsl/framework/bfc_allocator.cc as built into
#: jax-cuda12-pjrt, each compared by running it; see docs/explanation/bfc.md).
RULES: dict[tuple[int, int], Rules] = {
    (0, 0): Rules({}, backs_off_always=False, reports_largest_free=False),
    (0, 11): Rules({"lower": _BFC, "upper": _EXACT}),
    (0, 12): Rules(
        {"lower": _EXACT, "upper": EndRules(descending=True)}, "upper", backs_off_down=True
    ),
}


def rules_of(jax: str) -> Rules:
    """The rules of a jax release, given as ``0.12.0.1``; later releases get the newest known.

    Raises:
        InputError: the text is not a version.

    >>> rules_of("0.10.2").ends, rules_of("0.12.0.1").ordinary
    ({}, 'upper')
    """
    numbers = re.match(r"(\d+)\.(\d+)(?!\d)", jax)
    if not numbers:
        raise InputError(f"jax version {jax!r}: expected numbers such as 0.12.0.1")
    release = int(numbers[1]), int(numbers[2])
    return RULES[max(each for each in RULES if each <= release)]


def is_spatial(flavour: str, jax: str, *, growth: bool) -> bool:
    """Whether the pool is spatial; auto is spatial where jax is: from 0.11 on, without growth.

    Raises:
        InputError: the spatial flavour cannot grow, or this jax does not have it.

    >>> is_spatial("auto", "0.12.0.1", growth=False), is_spatial("auto", "0.10.2", growth=False)
    (True, False)
    """
    has_spatial = bool(rules_of(jax).ends)
    if flavour == "spatial" and growth:
        raise InputError("bfc(flavour=spatial,growth=true): the spatial flavour cannot grow")
    if flavour == "spatial" and not has_spatial:
        raise InputError(f"bfc(flavour=spatial,jax={jax}): the spatial flavour is new in jax 0.11")
    return flavour != "classic" and has_spatial and not growth
