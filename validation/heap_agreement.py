"""Does the planner place a compiler's heaps as the compiler did?"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alloclab.policies.errors import InputError
from alloclab.simulator.heap_combine import heap_rule, lay_end_to_end, temps_last
from alloclab.simulator.heap_dump import DumpedHeap, HeapDump
from alloclab.simulator.heap_planner import HeapPlan, plan
from alloclab.simulator.heap_trace import from_heap_trace


@dataclass(frozen=True)
class HeapAgreement:
    """One heap, planned and actual.

    Attributes:
        program, color: which heap.
        planned: false where the planner has no rule for it, as in a TPU's VMEM.
        strategy: the one that won; None where there is no plan.
        buffers, agreeing: how many there are, and how many are at XLA's offset in the temp block.
        height, actual_height: bytes of the heap.
        temp, actual_temp: bytes of the temp block that it is in.
    """

    program: str
    color: int
    planned: bool
    strategy: str | None
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

    Heaps for which there is no rule are planned as if they were in the target's main memory, to
    show how far that is from what happened; such a row has ``planned`` false.
    """
    plans = [_planned(heap, target) for heap in dump.heaps]
    rows = []
    for heap, (rule_known, result) in zip(dump.heaps, plans, strict=True):
        sized = heap.size > 0
        actual = heap.offset[sized]
        base, temp = _temp_block(dump, heap, [each for _, each in plans], target)
        rows.append(
            HeapAgreement(
                dump.name,
                heap.color,
                rule_known,
                result.strategy if rule_known else None,
                len(actual),
                int((actual == result.offset[sized] + base).sum()),
                result.height,
                int((actual + heap.size[sized]).max() - actual.min()),
                temp,
                dump.allocations[heap.allocation].size,
            )
        )
    return rows


def _planned(heap: DumpedHeap, target: str) -> tuple[bool, HeapPlan]:
    sizes = dict(zip(heap.buffer.tolist(), heap.size.tolist(), strict=True))
    try:
        rule, known = heap_rule(target, heap.color), True
    except InputError:
        rule, known = heap_rule(target), False
    buffers = from_heap_trace(heap.trace, sizes)
    return known, plan(buffers, alignment=rule.alignment, strategies=rule.strategies)


def _temp_block(
    dump: HeapDump, heap: DumpedHeap, plans: Sequence[HeapPlan], target: str
) -> tuple[int, int]:
    """Where the heap begins in its temp block, and the size of the block.

    The block is made of the heap and of the tables of tuples, which buffer assignment left outside
    of it. Their order is that of the allocations after the temporary ones were moved to the end. To
    repeat the move the order before it is needed: by falling size first the heaps placed in
    advance, then all others of BufferAssigner::AssignBuffersForComputations, the heaps, and the
    thread-local ones. What the dump does not say is the order among equals; others come first here.
    """
    block = [
        number
        for number, each in enumerate(dump.allocations)
        if each.role == "temp" and each.color == heap.color
    ]
    if block != [heap.allocation] or not heap.whole_module:
        return 0, plans[dump.heaps.index(heap)].height
    preset = [(0, each.color, plans[i].height) for i, each in enumerate(dump.heaps)]
    advance = [each for i, each in enumerate(preset) if not dump.heaps[i].whole_module]
    simulated = sorted(
        (each for i, each in enumerate(preset) if dump.heaps[i].whole_module),
        key=lambda each: each[1],
    )
    others = [
        (each.size, False, -1) for each in dump.allocations if each.role == "other"
    ]
    tables = [
        (size, True, each.color)
        for each in dump.allocations
        if each.role == "temp"
        for _, size in each.pieces
    ]
    greedy = sorted(others + tables, key=lambda each: (-each[0], each[1]))
    local = sum(each.role == "thread_local" for each in dump.allocations)
    # (is temporary, color, size, is the heap of the color)
    before = (
        [(True, color, height, True) for _, color, height in advance]
        + [(temp, color, size, False) for size, temp, color in greedy]
        + [(True, color, height, True) for _, color, height in simulated]
        + [(False, -1, 0, False)] * local
    )
    after = [before[i] for i in temps_last([each[0] for each in before])]
    pieces = [each for each in after if each[0] and each[1] == heap.color]
    offsets, size = lay_end_to_end(
        [each[2] for each in pieces], heap_rule(target, heap.color).alignment
    )
    return offsets[[each[3] for each in pieces].index(True)], size


def table(rows: Sequence[HeapAgreement]) -> str:
    """The rows in short, by memory space: how many heaps and buffers agree."""
    lines = ["color  heaps  exact  buffers  at XLA's offset"]
    for color in sorted({each.color for each in rows}):
        of_color = [each for each in rows if each.color == color]
        lines.append(
            f"{color:5}{len(of_color):7}{sum(each.exact for each in of_color):7}"
            f"{sum(each.buffers for each in of_color):9}"
            f"{sum(each.agreeing for each in of_color):17}"
            + ("" if of_color[0].planned else "  (no rule: not planned by the heap simulator)")
        )
    return "\n".join(lines)
