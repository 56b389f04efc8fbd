"""From heaps to the temp block: how XLA lays several temporary allocations of one color together.

The rules are those of BufferAssignment::CombineTempAllocations (openxla/xla,
xla/service/buffer_assignment.cc).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from alloclab.policies.errors import InputError
from alloclab.simulator.heap_planner import (
    BEST_OF_TWO,
    HeapBuffers,
    HeapPlan,
    Strategy,
    plan,
)


@dataclass(frozen=True)
class HeapRule:
    """How a compiler packs the heap of one memory space.

    Attributes:
        alignment: bytes, of every offset and of every piece of the temp block.
        strategies: for `alloclab.simulator.heap_planner.plan`.
        fallback: strategies that are used instead where memory is short; none: never.
        reserve: bytes of the device's limit that must stay free, or memory is short.
    """

    alignment: int
    strategies: tuple[Strategy, ...] = BEST_OF_TWO
    fallback: tuple[Strategy, ...] = ()
    reserve: int = 0


#: cpu: cpu_function_runtime::MinAlign() (xla/cpu_function_runtime.h); cuda:
#: kXlaAllocatedBufferAlignBytes (xla/service/gpu/gpu_constants.h). Both for every color.
_RULES = {"cpu": HeapRule(64), "cuda": HeapRule(256)}

#: Not published; found from dumps of libtpu 0.0.42.1 and 0.0.50.1. Color 0 is HBM, 2 holds values
#: of 4 bytes (semaphores), 6 whole tiles of scalars. HBM's algorithm is FAST_MERGE_WITH_FALLBACK in
#: xla.buffer_assignment.BufferAssignmentAlgorithmProto. It falls back where less than 2.5 GiB would
#: be left: on a v5e between 14,225,074,688 and 14,225,172,992 bytes of 16,909,336,576
#: (which hold 190,464 bytes of padding that are not there yet when it decides), on a v3 between
#: 13,935,023,104 and 13,941,314,560 of 16,624,123,904, on a v5p between 93.10 and 93.25 GiB of
#: 95.73. In every fallback seen ``spatial`` was the better of the two.
_TPU_RULES = {
    0: HeapRule(16384, ("fast_merge",), fallback=BEST_OF_TWO, reserve=5 << 29),
    2: HeapRule(4),
    6: HeapRule(512),
}


def heap_rule(target: str, color: int = 0) -> HeapRule:
    """How the compiler for a target packs the heap of a memory space.

    Args:
        target: ``cpu``, ``cuda:h100``, ``tpu:v5e``, ...; what follows the colon makes no
            difference.
        color: the memory space of the allocation.

    Raises:
        InputError: there is no rule. VMEM (color 1 of a TPU) has none: its offsets are chosen by
            memory space assignment, which moves values between memories as it places them.

    >>> heap_rule("cuda:h100").alignment, heap_rule("tpu:v5e").strategies
    (256, ('fast_merge',))
    """
    platform = target.partition(":")[0]
    if platform == "tpu":
        rule = _TPU_RULES.get(color)
        valid = f"a color of {sorted(_TPU_RULES)}"
    else:
        rule = _RULES.get(platform)
        valid = "cpu, cuda or tpu"
    if rule is None:
        raise InputError(f"heap rule: none for target {target}, color {color}; expected {valid}")
    return rule


def plan_heap(
    buffers: HeapBuffers, rule: HeapRule, *, others: int = 0, limit: int | None = None
) -> HeapPlan:
    """Place the buffers of one memory space by a compiler's rule.

    Args:
        buffers: live ranges.
        rule: from `heap_rule`.
        others: bytes of the memory space's other allocations: parameters, outputs, constants and
            tables of tuples.
        limit: bytes of memory that a program may use; None where it is never short.

    >>> buffers = HeapBuffers.from_columns(size=[8, 8], lower=[0, 1], upper=[2, 3])
    >>> plan_heap(buffers, heap_rule("tpu:v5e"), others=1 << 30, limit=4 << 30).strategy
    'fast_merge'
    >>> plan_heap(buffers, heap_rule("tpu:v5e"), others=2 << 30, limit=4 << 30).strategy
    'spatial'
    """
    first = plan(buffers, alignment=rule.alignment, strategies=rule.strategies)
    if not rule.fallback or limit is None or others + first.height <= limit - rule.reserve:
        return first
    return plan(buffers, alignment=rule.alignment, strategies=rule.fallback)


def lay_end_to_end(sizes: Sequence[int], alignment: int) -> tuple[list[int], int]:
    """Offsets of the pieces of a temp block, and its size; the size is not rounded up.

    >>> lay_end_to_end([100, 64, 8], alignment=64)
    ([0, 128, 192], 200)
    """
    offsets: list[int] = []
    size = 0
    for each in sizes:
        offsets.append(-(-size // alignment) * alignment)
        size = offsets[-1] + each
    return offsets, size


def temps_last(is_temp: Sequence[bool]) -> list[int]:
    """The order of the allocations once the temporary ones have been moved to the end.

    The move is a std::partition, which does not keep their order: it swaps the first temporary
    allocation with the last other one, and so on until they meet. So those that come first often
    end up last, in reverse.

    >>> temps_last([False, True, True, False, False])
    [0, 4, 3, 2, 1]
    """
    order = list(range(len(is_temp)))
    first, last = 0, len(order) - 1
    while True:
        while first < last and not is_temp[order[first]]:
            first += 1
        while first < last and is_temp[order[last]]:
            last -= 1
        if first >= last:
            return order
        order[first], order[last] = order[last], order[first]
        first, last = first + 1, last - 1
