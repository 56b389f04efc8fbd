"""The tiers of validation: what real thing the predictions are compared with."""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from alloclab.simulator.requests import RequestTrace
from alloclab.validation.bfc_tier import LIBRARIES, run_tier
from alloclab.validation.cpu_runtime import observe
from alloclab.validation.heap_agreement import HeapAgreement, heap_agreement
from alloclab.validation.heap_goldens import read_goldens
from alloclab.validation.oracle_fetch import OracleUnavailable, library

Rows = list[dict[str, Any]]
#: What could not be measured, and why.
Missing = dict[str, str]
#: Compilers' dumps, as parsed and committed; see `alloclab.validation.heap_goldens`.
GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "oracle" / "data" / "heap"

Tier = Callable[[int, int, Sequence[RequestTrace]], tuple[Rows, Missing]]


def _bfc(configurations: int, seed: int, traces: Sequence[RequestTrace]) -> tuple[Rows, Missing]:
    """The real BFC on random pools and the given traces."""
    rows: Rows = []
    missing: Missing = {}
    for name in LIBRARIES:
        try:
            library(name)
            rows += run_tier(configurations, [name], seed, traces=traces)
        except OracleUnavailable as error:
            missing[name] = str(error)
    return rows, missing


def _runtime(
    configurations: int, seed: int, traces: Sequence[RequestTrace]
) -> tuple[Rows, Missing]:
    """The requests of the real CPU runtime, one row per program."""
    try:
        found = observe()
    except OracleUnavailable as error:
        return [], {"cpu runtime": str(error)}
    jax = version("jax")
    return [
        {
            "tier": "runtime",
            "scenario": each.program,
            "quantity": "requests of one execution",
            "predicted": len(each.planned),
            "actual": len(each.seen),
            "error": int(each.planned != each.seen),
            "source": "posix_memalign under the CPU client",
            "version": f"jax {jax}",
        }
        for each in found
    ], {}


def _planner(
    configurations: int, seed: int, traces: Sequence[RequestTrace]
) -> tuple[Rows, Missing]:
    """XLA's heap planner against the offsets in committed compiler dumps, per target and memory."""
    files = sorted(GOLDENS.glob("*.json.gz"))
    if not files:
        return [], {"planner": "its goldens come with the source tree (tests/oracle/data/heap)"}
    rows: Rows = []
    missing: Missing = {}
    for file in files:
        target, versions, dumps = read_goldens(file)
        compiler = ", ".join(f"{name} {number}" for name, number in versions.items())
        heaps: dict[int, list[HeapAgreement]] = {}
        for dump in dumps:
            for each in heap_agreement(dump, target):
                heaps.setdefault(each.color, []).append(each)
        for color, found in sorted(heaps.items()):
            if not all(each.planned for each in found):
                missing[f"planner, {target}, {compiler}, memory {color}"] = (
                    "not placed by the heap simulator but by memory space assignment"
                )
                continue
            pairs = {
                "heaps placed exactly": (len(found), sum(each.exact for each in found)),
                "buffers at XLA's offset": (
                    sum(each.buffers for each in found),
                    sum(each.agreeing for each in found),
                ),
            }
            rows += [
                {
                    "tier": "planner",
                    "scenario": f"{target}, {len(dumps)} programs, memory {color}",
                    "quantity": quantity,
                    "predicted": predicted,
                    "actual": actual,
                    "error": predicted - actual,
                    "source": f"dumps of {compiler}",
                    "version": compiler,
                }
                for quantity, (predicted, actual) in pairs.items()
            ]
    return rows, missing


TIERS: dict[str, Tier] = {"bfc": _bfc, "runtime": _runtime, "planner": _planner}


def run_tiers(
    names: Sequence[str], configurations: int, seed: int, traces: Sequence[RequestTrace]
) -> tuple[Rows, Missing]:
    """Run tiers by name: rows of the error table, and what could not be measured."""
    rows: Rows = []
    missing: Missing = {}
    for name in names:
        more, lacking = TIERS[name](configurations, seed, traces)
        rows += more
        missing |= lacking
    return rows, missing
