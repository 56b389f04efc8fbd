"""alloclab replay, plot, policies and devices."""

import csv
from pathlib import Path

import pytest

from tests.e2e.conftest import Alloclab

RESULT_KEYS = {
    "policy", "device", "peak_bytes_in_use", "peak_pool_bytes", "bytes_limit", "num_allocs",
    "external_fragmentation_at_peak", "internal_waste_at_peak", "oom", "lower_bound_bytes",
    "min_limit_bytes",
}  # fmt: skip


def test_replay_json_follows_the_contract(alloclab: Alloclab, comb: Path) -> None:
    ran = alloclab("replay", comb, "--policy", "bfc,first_fit,ideal", "--limit", "64KiB", "--json")
    assert ran.code == 1, ran.err
    results = ran.json["results"]
    assert [each["policy"] for each in results] == ["bfc", "first_fit", "ideal"]
    assert all(each.keys() >= RESULT_KEYS for each in results)
    bfc, first_fit, ideal = results
    assert (
        bfc["oom"]
        == first_fit["oom"]
        == {
            "event": 96,
            "request_bytes": 2048,
            "free_bytes": 32768,
            "largest_free_bytes": 1024,
            "cause": "fragmentation",
        }
    )
    assert ideal["oom"] is None
    assert {each["lower_bound_bytes"] for each in results} == {65536}
    assert (bfc["min_limit_bytes"], ideal["min_limit_bytes"]) == (67584, 65536)


def test_replay_for_people(alloclab: Alloclab, comb: Path) -> None:
    ran = alloclab("replay", comb, "--policy", "best_fit", "--device", "h100,t4")
    assert ran.code == 0, ran.err
    assert "65 allocations in 97 events" in ran.out
    assert "h100" in ran.out
    assert "t4" in ran.out
    assert "fits" in ran.out


def test_placements(alloclab: Alloclab, comb: Path, tmp_path: Path) -> None:
    file = tmp_path / "placed.csv"
    ran = alloclab("replay", comb, "--jax", "0.10.2", "--limit", "64KiB", "--placements", file)
    assert ran.code == 1
    rows = list(csv.reader(file.open()))
    assert rows[0] == ["id", "offset"]
    assert rows[1:] == [*([str(n), str(1024 * n)] for n in range(64)), ["64", "-1"]]
    two = alloclab("replay", comb, "--policy", "bfc,ideal", "--limit", "1MiB", "--placements", file)
    assert two.code == 2


def test_a_policy_by_path(alloclab: Alloclab, comb: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from alloclab import Policy\n"
        "class Cheat(Policy):\n"
        "    def setup(self):\n"
        "        self.reserve(4096)\n"
        "    def place(self, request): return (0, request.size)\n"
        "    def release(self, address, size): pass\n"
    )
    ran = alloclab("replay", comb, "--policy", "mine.py:Cheat", "--limit", "64KiB")
    assert ran.code == 2
    assert ran.err == (
        "alloclab: Cheat: event 1, 1024 bytes for id 1: [0, 1024) overlaps a live allocation\n"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["replay", "absent.csv", "--limit", "1GiB"], "absent.csv"),
        (["replay", "comb.csv"], "needs a limit"),
        (["replay", "comb.csv", "--limit", "lots"], "size 'lots'"),
        (["replay", "comb.csv", "--device", "h999"], "h100"),
        (["replay", "comb.csv", "--policy", "nobody", "--limit", "1GiB"], "known: "),
        (["replay", "comb.csv", "--limit", "1GiB", "--env", "X"], "NAME=VALUE"),
        (["replay", "comb.csv", "--limit", "1GiB", "--jax", "new"], "new"),
        (["replay"], "TRACE"),
        (["nothing"], "nothing"),
        (["plot", "comb.csv", "--limit", "1GiB", "-o", "figure.txt"], ".png"),
        (["capture", "absent.py", "-o", "out.jsonl"], "absent.py"),
        (["capture", "comb.csv", "-o", "out.txt"], ".parquet"),
        (["capture", "comb.csv", "-o", "out.csv"], "request traces only"),
        (["capture", "comb.csv", "-o", "nowhere/out.jsonl"], "no folder"),
        (
            ["replay", "comb.csv", "--limit", "1GiB", "--env", "XLA_PYTHON_CLIENT_ALLOCATOR=vmm"],
            "no policy models it",
        ),
    ],
)
def test_bad_input_is_one_clear_line(
    alloclab: Alloclab, comb: Path, arguments: list[str], says: str
) -> None:
    ran = alloclab(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("alloclab: ")
    assert says in ran.err


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plot(alloclab: Alloclab, comb: Path, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"figure.{suffix}"
    ran = alloclab("plot", comb, "--limit", "1MiB", "-o", file, "--json")
    assert ran.code == 0, ran.err
    assert ran.json == {"file": str(file)}
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert file.read_bytes().startswith(magic)
    assert {each.name for each in tmp_path.iterdir()} == {"comb.csv", file.name}


def test_lists(alloclab: Alloclab) -> None:
    policies = alloclab("policies", "--json").json
    assert {"bfc", "first_fit", "best_fit", "ideal"} <= {each["name"] for each in policies}
    assert all(each["summary"] for each in policies)
    devices = alloclab("devices", "--json").json
    assert {"h100", "t4", "v5e", "cpu"} <= {each["name"] for each in devices}
    assert all(each["summary"] for each in devices)
    for name in ("policies", "devices"):
        ran = alloclab(name)
        assert ran.code == 0
        assert "best_fit" in ran.out or "h100" in ran.out


def test_replay_does_not_import_jax(comb: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, runpy; sys.argv = ['alloclab', 'replay', sys.argv[1], '--limit', '1MiB', "
        "'--json']\n"
        "try: runpy.run_module('alloclab', run_name='__main__')\n"
        "finally: print(sorted({m.split('.')[0] for m in sys.modules} & "
        "{'jax', 'matplotlib', 'pyarrow', 'numba', 'simpy', 'networkx'}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(comb)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"
