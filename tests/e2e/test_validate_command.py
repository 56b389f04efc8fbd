"""alloclab validate."""

from alloclab.validation.oracle_fetch import OracleUnavailable, library
from tests.e2e.conftest import Alloclab


def test_the_bfc_tier(alloclab: Alloclab) -> None:
    ran = alloclab("validate", "--tier", "bfc", "--configurations", "3", "--json")
    try:
        library("tf-2.21.0")
    except OracleUnavailable as error:
        assert ran.code == 2
        assert str(error).split(":", maxsplit=1)[0]
        return
    assert ran.code == 0, ran.err
    rows = ran.json["rows"]
    keys = {"tier", "scenario", "quantity", "predicted", "actual", "error"}
    assert all(keys <= row.keys() for row in rows)
    assert sum(row["error"] for row in rows) == 0
    assert {row["tier"] for row in rows} == {"bfc"}


def test_an_unknown_tier(alloclab: Alloclab) -> None:
    ran = alloclab("validate", "--tier", "hearsay")
    assert ran.code == 2
    assert "known: bfc, runtime, planner" in ran.err


def test_the_planner_tier(alloclab: Alloclab) -> None:
    ran = alloclab("validate", "--tier", "planner", "--json")
    assert ran.code == 0, ran.err
    rows = ran.json["rows"]
    assert {row["scenario"].split(",")[0] for row in rows} == {"cpu", "cuda:h100", "tpu:v5e"}
    assert sum(row["predicted"] for row in rows) > 5000
    assert all(row["error"] == 0 for row in rows)
    assert len(ran.json["not_measured"]) == 2  # VMEM, of two compilers
