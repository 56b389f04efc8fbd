"""From heaps to the temp block: how XLA lays several temporary allocations of one color together.

The rules are those of BufferAssignment::CombineTempAllocations (openxla/xla,
xla/service/buffer_assignment.cc).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from alloclab.policies.errors import InputError
from alloclab.simulator.heap_planner import BEST_OF_TWO, Strategy


@dataclass(frozen=True)
class HeapRule:
    """How a compiler packs the heap of one memory space.

    Attributes:
        alignment: bytes, of every offset and of every piece of the temp block.
        strategies: for `alloclab.simulator.heap_planner.plan`.
    """

    alignment: int
    strategies: tuple[Strategy, ...] = BEST_OF_TWO


#: cpu: cpu_function_runtime::MinAlign() (xla/cpu_function_runtime.h); cuda:
#: kXlaAllocatedBufferAlignBytes (xla/service/gpu/gpu_constants.h). Both for every color.
_RULES = {"cpu": HeapRule(64), "cuda": HeapRule(256)}

#: Not published: found from dumps of libtpu 0.0.42.1 for v3, v5e and v5p. Color 0 is HBM; 2 holds
#: values of 4 bytes (semaphores), 6 whole tiles of scalars.
_TPU_RULES = {0: HeapRule(16384, ("fast_merge",)), 2: HeapRule(4), 6: HeapRule(512)}


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
