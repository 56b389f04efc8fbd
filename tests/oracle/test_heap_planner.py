"""XLA's own offsets and sizes of temp blocks, and those of the planner."""

import importlib.metadata
from pathlib import Path

import pytest

from alloclab.policies.errors import InputError
from alloclab.simulator.heap_dump import HeapDump, read_heap_dump
from alloclab.validation.heap_agreement import HeapAgreement, heap_agreement, table
from alloclab.validation.heap_goldens import TARGETS, read_goldens, write_goldens

DATA = Path(__file__).with_name("data") / "heap"
#: Remade by ``python -m alloclab.validation.heap_goldens``.
GOLDENS = sorted(DATA.glob("*.json.gz"))


def rows_of(path: Path) -> tuple[str, list[HeapDump], list[HeapAgreement]]:
    target, _, dumps = read_goldens(path)
    return target, dumps, [row for dump in dumps for row in heap_agreement(dump, target)]


def test_there_is_a_golden_for_every_target() -> None:
    found = {read_goldens(each)[0] for each in GOLDENS}
    assert found == {each.name for each in TARGETS.values()}


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.name)
def test_every_heap_is_planned_as_xla_did(path: Path) -> None:
    _, dumps, rows = rows_of(path)
    assert len(dumps) >= 18
    planned = [row for row in rows if row.planned]
    assert [row for row in planned if not row.exact] == []
    # The goldens are worth something: most heaps hold many buffers, of several programs.
    assert sum(row.buffers for row in planned) > 400


def test_the_goldens_need_every_strategy_and_the_order_of_the_pieces() -> None:
    used: dict[str, set[tuple[int, str]]] = {}
    for path in GOLDENS:
        target, dumps, rows = rows_of(path)
        used.setdefault(target, set()).update(
            (row.color, row.strategy) for row in rows if row.planned
        )
        # Somewhere the heap does not begin its temp block.
        assert any(
            heap.whole_module and heap.offset.min() > 0 for dump in dumps for heap in dump.heaps
        )
    assert used["cpu"] == {(0, "spatial"), (0, "temporal")}
    assert used["cuda:h100"] >= {(0, "spatial")}
    # Spatial in HBM is the fallback where memory is short.
    assert used["tpu:v5e"] == {(0, "fast_merge"), (0, "spatial"), (2, "spatial"), (6, "spatial")}


def test_vmem_is_not_the_heap_simulators() -> None:
    """Why there is no rule for VMEM: its traces do not say enough, whatever the planner."""
    _, dumps, rows = rows_of(next(each for each in GOLDENS if each.name.startswith("tpu")))
    vmem = [row for row in rows if not row.planned]
    assert vmem and {row.color for row in vmem} == {1}
    assert sum(row.exact for row in vmem) < len(vmem) / 2
    heaps = [heap for dump in dumps for heap in dump.heaps if heap.color == 1]
    assert not any(heap.whole_module for heap in heaps)
    # Values that the trace has alive at once share memory, and no event says so.
    assert not any((heap.trace.kind == 2).any() for heap in heaps)
    assert sum(row.actual_height < row.height for row in vmem) > 3


def test_goldens_survive_being_written(tmp_path: Path) -> None:
    for path in GOLDENS:
        target, versions, dumps = read_goldens(path)
        again = tmp_path / path.name
        write_goldens(again, target, versions, dumps)
        assert again.read_bytes() == path.read_bytes()


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(b"{}")
    with pytest.raises(InputError, match="cannot be read as compressed JSON"):
        read_goldens(path)
    write_goldens(path, "cpu", {}, [])
    assert read_goldens(path) == ("cpu", {}, [])
    with pytest.raises(InputError, match=r"x\.json\.gz: cannot be read as"):
        read_heap_dump(path)


def test_the_table_counts_by_memory_space() -> None:
    rows = [
        HeapAgreement("a", 0, True, "spatial", 3, 3, 8, 8, 8, 8),
        HeapAgreement("b", 0, True, "spatial", 3, 3, 8, 8, 9, 8),
        HeapAgreement("b", 1, False, "spatial", 2, 1, 8, 8, 8, 8),
    ]
    _, device, vmem = table(rows).splitlines()
    assert device.split() == ["0", "2", "1", "6", "6"]
    assert vmem.split()[:5] == ["1", "1", "0", "2", "1"]
    assert "memory space assignment" in vmem


@pytest.mark.jax
@pytest.mark.parametrize("name", ["transformer_step_donated", "rnn_scan_grad", "sort"])
def test_this_machines_compiler_agrees(name: str) -> None:
    pytest.importorskip("optax")
    from alloclab.validation.heap_goldens import compile_heaps
    from alloclab.validation.heap_programs import programs

    (row,) = heap_agreement(compile_heaps(programs()[name], "cpu", name), "cpu")
    assert row.buffers > 0
    assert row.exact, f"jaxlib {importlib.metadata.version('jaxlib')}: {row}"
