"""The command line as a user types it: a process, its output and its exit code."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Ran(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)


Alloclab = Callable[..., Ran]


@pytest.fixture
def alloclab(tmp_path: Path) -> Alloclab:
    """Run `alloclab ARGS` in an empty folder."""

    def run(*args: str | Path) -> Ran:
        command = [sys.executable, "-m", "alloclab", *map(str, args)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def comb(tmp_path: Path) -> Path:
    """A CSV trace that leaves a comb: every second of 64 blocks of 1 KiB is freed."""
    rows = ["op,id,size", *(f"alloc,{n},1024" for n in range(64))]
    rows += [f"free,{n}," for n in range(0, 64, 2)]
    rows += ["alloc,64,2048"]
    file = tmp_path / "comb.csv"
    file.write_text("\n".join(rows) + "\n")
    return file
