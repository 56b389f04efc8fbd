"""The tiers of validation: what real thing the predictions are compared with."""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from alloclab.simulator.requests import RequestTrace
from alloclab.validation.bfc_tier import LIBRARIES, run_tier
from alloclab.validation.cpu_runtime import observe
from alloclab.validation.oracle_fetch import OracleUnavailable, library

Rows = list[dict[str, Any]]
#: What could not be measured, and why.
Missing = dict[str, str]
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


TIERS: dict[str, Tier] = {"bfc": _bfc, "runtime": _runtime}


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
