"""Does the planner place a compiler's heaps as the compiler did?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from alloclab.policies.errors import InputError
from alloclab.simulator.devices import load_device
from alloclab.simulator.heap_combine import heap_rule, lay_end_to_end, plan_heap, temps_last
from alloclab.simulator.heap_dump import DumpedHeap, HeapDump
from alloclab.simulator.heap_planner import HeapPlan
from alloclab.simulator.heap_trace import from_heap_trace


@dataclass(frozen=True)
class HeapAgreement:
    """One heap, planned and actual.

    Attributes:
        program, color: which heap.
        planned: false where the planner has no rule for it, as in a TPU's VMEM.
        strategy: the one that was used.
        buffers, agreeing: how many have more than 0 bytes, and how many of these are at XLA's
            offset in the temp block.
        height, actual_height: bytes of the heap.
        temp, actual_temp: bytes of the temp block that it is in.
    """

    program: str
    color: int
    planned: bool
    strategy: str
    buffers: int
    agreeing: int
    height: int
    actual_height: int
    temp: int
    actual_temp: int

    @property
    def exact(self) -> bool:
        """Every offset and both sizes are those of XLA."""
        return (
            self.agreeing == self.buffers
            and self.height == self.actual_height
            and self.temp == self.actual_temp
        )


def heap_agreement(dump: HeapDump, target: str) -> list[HeapAgreement]:
    """Plan every heap of a dump by the rules for a target and compare, one row per heap.

    A heap for which there is no rule is planned as if it were in the target's main memory, to show
    how far that is from what happened; such a row has ``planned`` false.
    """
    limit = _limit(target)
    planned = [_plan(dump, heap, target, limit) for heap in dump.heaps]
    plans = [result for _, result in planned]
    rows = []
    for heap, (known, result) in zip(dump.heaps, planned, strict=True):
        sized = heap.size > 0
        actual = heap.offset[sized]
        base, temp = _temp_block(dump, heap, plans, target) if known else (0, result.height)
        rows.append(
            HeapAgreement(
                dump.name,
                heap.color,
                known,
                result.strategy,
                len(actual),
                int((actual == result.offset[sized] + base).sum()),
                result.height,
                int((actual + heap.size[sized]).max(initial=0) - actual.min(initial=1 << 60)),
                temp,
                dump.allocations[heap.allocation].size,
            )
        )
    return rows


def _limit(target: str) -> int | None:
    """Bytes of the target that a program may use, None where its compiler does not ask."""
    platform, _, name = target.partition(":")
    if platform != "tpu":
        return None
    device = load_device(name)
    if device.memory_bytes is None:
        return None
    return device.memory_bytes - (device.reserved_bytes or 0)


def _plan(
    dump: HeapDump, heap: DumpedHeap, target: str, limit: int | None
) -> tuple[bool, HeapPlan]:
    try:
        rule, known = heap_rule(target, heap.color), True
    except InputError:
        rule, known = heap_rule(target), False
    sizes = dict(zip(heap.buffer.tolist(), heap.size.tolist(), strict=True))
    others = sum(
        sum(piece.size for piece in each.pieces) if each.role == "temp" else each.size
        for each in dump.allocations
        if each.color == heap.color
    )
    return known, plan_heap(from_heap_trace(heap.trace, sizes), rule, others=others, limit=limit)


class _Part(NamedTuple):
    """An allocation, or what became a part of one: before the temporary ones were combined."""

    temp: bool
    color: int
    size: int
    heap: bool = False


def _temp_block(
    dump: HeapDump, heap: DumpedHeap, plans: Sequence[HeapPlan], target: str
) -> tuple[int, int]:
    """Where the heap begins in its temp block, and the size of the block.

    Buffer assignment leaves tables of tuples out of the heap and lays them and the heap end to end.
    Their order is what is left of the order of all allocations when the temporary ones have been
    moved to the end. Before that it is: what was placed in advance (VMEM); then by falling size,
    outputs first, then by position what has an allocation of its own; the heaps by color; what is
    local to a thread (BufferAssigner::CreateAssignment, AssignBuffersForComputations).
    """
    advance = {each.allocation for each in dump.heaps if not each.whole_module}
    own = []
    for number, each in enumerate(dump.allocations):
        if number in advance:
            continue
        if each.role == "temp":
            own += [
                (-piece.size, True, piece.position, _Part(True, each.color, piece.size))
                for piece in each.pieces
            ]
        elif each.role != "thread_local":
            part = _Part(False, each.color, each.size)
            own.append((-each.size, each.role != "output", each.position, part))
    heaps = [
        (each.whole_module, _Part(True, each.color, result.height, heap=True))
        for each, result in zip(dump.heaps, plans, strict=True)
    ]
    before = [
        *(part for whole, part in heaps if not whole),
        *(part for *_, part in sorted(own)),
        *sorted((part for whole, part in heaps if whole), key=lambda part: part.color),
        *(_Part(False, 0, 0) for each in dump.allocations if each.role == "thread_local"),
    ]
    after = [before[i] for i in temps_last([each.temp for each in before])]
    block = [each for each in after if each.temp and each.color == heap.color]
    alignment = heap_rule(target, heap.color).alignment
    offsets, size = lay_end_to_end([each.size for each in block], alignment)
    return offsets[[each.heap for each in block].index(True)], size


def table(rows: Sequence[HeapAgreement]) -> str:
    """The rows in short, by memory space: how many heaps and buffers agree."""
    lines = ["color  heaps  exact  buffers  at XLA's offset"]
    for color in sorted({each.color for each in rows}):
        of_color = [each for each in rows if each.color == color]
        lines.append(
            f"{color:5}{len(of_color):7}{sum(each.exact for each in of_color):7}"
            f"{sum(each.buffers for each in of_color):9}"
            f"{sum(each.agreeing for each in of_color):17}"
            + ("" if of_color[0].planned else "  (no rule: memory space assignment)")
        )
    return "\n".join(lines)
