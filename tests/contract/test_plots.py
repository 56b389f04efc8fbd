"""Any trace can be drawn, by any policy; files are whole, of their kind, and always the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from alloclab.policies.base import Policy
from alloclab.policies.errors import InputError
from alloclab.policies.registry import known_policies
from alloclab.simulator.plots import draw, plot_overview, save_figure
from alloclab.simulator.replay import ReplayResult, replay_requests
from alloclab.simulator.requests import RequestTrace
from tests.strategies import request_traces

KINDS = ("overview", "memory", "addresses", "fragmentation")
POLICIES = [pytest.param(each, id=name) for name, each in sorted(known_policies().items())]
MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


def replayed(trace: RequestTrace, policy: Policy, limit: int) -> ReplayResult:
    return replay_requests(trace, policy, limit=limit, search_limit=False)


def comb() -> ReplayResult:
    sizes = np.array([300, 500, 700, 0, 0, 900])
    trace = RequestTrace.from_arrays(
        [1, 1, 1, 0, 0, 1], [0, 1, 2, 0, 1, 3], sizes, time_us=[0, 5, 6, 7, 8, 9.5]
    )
    return replayed(trace, known_policies()["best_fit"](), 2048)


def check(policy: Policy, kind: Any, trace: RequestTrace, limit: int, x: Any) -> None:
    try:
        result = replayed(trace, policy, limit)
        figure = draw([result], kind, x)
    except InputError as error:  # no times, or more addresses than there are
        assert "\n" not in str(error)
        return
    figure.draw_without_rendering()
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert np.isfinite([low, high]).all()
        assert low < high
        assert axes.get_ylabel().endswith("]")


LIMITS = st.sampled_from([4096, 1 << 20, 1 << 36, 1 << 59])
AXES = st.sampled_from(["event", "time"])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings("ignore:Glyph .* missing from:UserWarning")
@given(trace=request_traces(), limit=LIMITS, x=AXES)
@settings(deadline=None, max_examples=8)
def test_any_trace_under_any_policy(
    policy: type[Policy], trace: RequestTrace, limit: int, x: Any
) -> None:
    check(policy(), "overview", trace, limit, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Glyph .* missing from:UserWarning")
@given(trace=request_traces(), limit=LIMITS, x=AXES)
@settings(deadline=None, max_examples=25)
def test_any_trace_as_any_figure(kind: Any, trace: RequestTrace, limit: int, x: Any) -> None:
    check(known_policies()["best_fit"](), kind, trace, limit, x)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".PDF"])
def test_files_are_whole_and_always_the_same(tmp_path: Path, suffix: str) -> None:
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        file.write_text("what was there")
        save_figure(plot_overview(comb()), file)
    first, second = (each.read_bytes() for each in files)
    assert first.startswith(MAGIC[suffix.lower()])
    assert first == second
    assert b"20" + b"26-" not in first  # no date
    assert {each.name for each in tmp_path.iterdir()} == {each.name for each in files}


@pytest.mark.parametrize("name", ["figure.jpg", "figure", "figure.png.gz"])
def test_other_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"cannot draw .*; use \.png, \.svg, \.pdf"):
        save_figure(Figure(), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "figure.png"
    file.write_text("before")

    def fail(self: Figure, stream: Any, **options: Any) -> None:
        stream.write(b"half")
        raise MemoryError

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(MemoryError):
        save_figure(Figure(), file)
    assert file.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["figure.png"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.*cannot be written"):
        save_figure(Figure(), tmp_path / "nowhere" / "figure.png")


def test_names_beyond_the_font_are_drawn_without_a_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    trace = RequestTrace.from_arrays([1], [0], [8], name="\u4f60\U00013000\ud800\x00")
    save_figure(plot_overview(replayed(trace, known_policies()["ideal"](), 64)), tmp_path / "a.png")
    assert not recwarn.list


def test_no_window_and_no_global_figure() -> None:
    import subprocess
    import sys

    code = (
        "import sys, alloclab.simulator.plots; "
        "print(sorted({'matplotlib.pyplot', 'tkinter', 'jax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
