"""alloclab capture, and what comes after it, on a script as a user has one."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Alloclab

pytestmark = pytest.mark.jax

SCRIPT = """
import os
os.environ["JAX_ENABLE_X64"] = "1"  # before the import, as scripts do
import sys
import jax, jax.numpy as jnp
from functools import partial

@partial(jax.jit, donate_argnums=0)
def step(x):
    return jnp.sin(x) @ x.T @ x

x = jnp.ones((64, 64))
assert x.dtype == "float64"
for n in range(int(sys.argv[1])):
    x = step(x)
print("sum", float(x.sum()))
if "fail" in sys.argv:
    raise RuntimeError("on purpose")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


@pytest.mark.parametrize("form", ["jsonl", "parquet", "jsonl.gz", "jsonl.zst"])
def test_capture_then_replay(alloclab: Alloclab, script: Path, form: str) -> None:
    ran = alloclab("capture", script, "-o", f"run.{form}", "--json", "--", "3")
    assert ran.code == 0, ran.err
    assert ran.json["file"] == f"run.{form}"
    assert ran.json["events"] > 5
    assert ran.json["executables"] >= 2
    assert "sum" in ran.err
    again = alloclab("replay", f"run.{form}", "--policy", "bfc,ideal", "--device", "t4,v5e,cpu",
                     "--json")  # fmt: skip
    assert again.code == 2  # bfc needs a limit, which the CPU does not have
    again = alloclab("replay", f"run.{form}", "--policy", "bfc,ideal", "--device", "t4", "--json")
    assert again.code == 0, again.err
    bfc, ideal = again.json["results"]
    # Two donated buffers of 32 KiB, never both: input, then output in the same memory.
    assert ideal["peak_bytes_in_use"] >= 64 * 64 * 8
    assert bfc["peak_bytes_in_use"] >= ideal["peak_bytes_in_use"]


def test_a_failing_script_leaves_its_trace(alloclab: Alloclab, script: Path) -> None:
    ran = alloclab("capture", script, "-o", "run.jsonl", "--", "2", "fail")
    assert ran.code == 1
    assert "RuntimeError: on purpose" in ran.err
    assert ran.out.startswith("sum")
    assert alloclab("replay", "run.jsonl", "--limit", "1GiB").code == 0


def test_a_script_without_jax(alloclab: Alloclab, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('hello')")
    ran = alloclab("capture", "plain.py", "-o", "run.jsonl", "--json")
    assert ran.code == 0
    assert ran.json["events"] == 0
    assert alloclab("replay", "run.jsonl", "--limit", "1GiB", "--json").code == 0
