"""What every form of trace file must do: give back what was saved, and notice any cut."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from alloclab.simulator.program import ProgramTrace
from alloclab.simulator.program_checks import check_program
from alloclab.simulator.requests import RequestTrace
from alloclab.simulator.trace_files import load_trace, save_trace
from tests.strategies import program_traces, request_traces

FULL_FORMS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"]
FORMS = [*FULL_FORMS, "csv", "csv.gz", "csv.zst"]
AnyTrace = RequestTrace | ProgramTrace

#: One folder per test is enough for all examples: each is written over the one before.
examples = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def plain(value: Any) -> Any:
    """The value as lists and tuples that compare, with types; arrays with their dtype."""
    if isinstance(value, np.ndarray):
        return value.dtype, [repr(each) for each in value.tolist()]
    if dataclasses.is_dataclass(value):
        return type(value), [
            (each.name, plain(getattr(value, each.name))) for each in dataclasses.fields(value)
        ]
    if isinstance(value, Mapping):
        return [(key, plain(each)) for key, each in sorted(value.items())]
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return repr(value)


def round_trip(trace: AnyTrace, file: Path) -> AnyTrace:
    save_trace(trace, file)
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    return load_trace(file)


@pytest.mark.parametrize("form", FULL_FORMS)
@given(trace=request_traces())
@examples
def test_a_request_trace_comes_back(tmp_path: Path, form: str, trace: RequestTrace) -> None:
    back = round_trip(trace, tmp_path / f"trace.{form}")
    assert plain(back) == plain(trace)


@pytest.mark.parametrize("form", FULL_FORMS)
@given(trace=program_traces())
@examples
def test_a_program_trace_comes_back(tmp_path: Path, form: str, trace: ProgramTrace) -> None:
    back = round_trip(trace, tmp_path / f"trace.{form}")
    assert plain(back) == plain(trace)


@pytest.mark.parametrize("form", ["csv", "csv.gz", "csv.zst"])
@given(trace=request_traces())
@examples
def test_csv_keeps_all_events(tmp_path: Path, form: str, trace: RequestTrace) -> None:
    back = round_trip(trace, tmp_path / f"trace.{form}")
    assert isinstance(back, RequestTrace)
    assert list(back.events()) == list(trace.events())
    for name in ("op", "id", "size", "alignment", "stream", "space", "time_us", "execution"):
        assert plain(getattr(back, name)) == plain(getattr(trace, name))


@given(trace=program_traces())
@examples
def test_drawn_programs_are_valid(trace: ProgramTrace) -> None:
    check_program(trace)


def test_the_examples_of_the_reference_load(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "trace-format.md"
    blocks = re.findall(r"^```(jsonl|csv)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert [form for form, _ in blocks] == ["jsonl", "csv", "jsonl"]
    for form, text in blocks:
        (tmp_path / "example").write_text(text)
        trace = load_trace(tmp_path / "example")
        save_trace(trace, tmp_path / f"again.{form}")
        assert (tmp_path / f"again.{form}").read_text() == text
