"""How fast traces load: a Parquet trace of a million events, and small text files.

Every measurement is made in a process of its own, as a user's is: `import` is what loading
imports beside NumPy, `load` is `load_trace`, which checks everything, and `again` is the same
once more; `kept` is the memory that the process holds more after the first load, `peak` the most
while loading (both on Linux only). Forms take turns, and the medians of all rounds are printed.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from alloclab.simulator.requests import RequestTrace
from alloclab.simulator.trace_files import save_trace

ROUNDS = 5

_MEASURE = """
import sys, time, json
import numpy
from alloclab.simulator.requests import RequestTrace
def status(name):  # KiB
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))
start = time.perf_counter()
from alloclab.simulator.trace_files import load_trace
if sys.argv[1].endswith("parquet"):
    import alloclab.simulator.trace_parquet
else:
    import alloclab.simulator.trace_csv, alloclab.simulator.trace_jsonl
imported = time.perf_counter()
before = status("VmRSS")
trace = load_trace(sys.argv[1])
loaded = time.perf_counter()
kept, peak = (status(name) - before for name in ("VmRSS", "VmHWM"))
del trace
again = time.perf_counter()
load_trace(sys.argv[1])
print(json.dumps({
    "import": 1000 * (imported - start), "load": 1000 * (loaded - imported),
    "again": 1000 * (time.perf_counter() - again), "MiB kept": kept / 1024, "MiB peak": peak / 1024,
}))
assert "jax" not in sys.modules
assert ("pyarrow" in sys.modules) == sys.argv[1].endswith("parquet")
"""


def example(events: int, *, columns: bool, sparse: bool) -> RequestTrace:
    """A trace like a program's: lifetimes from one event to thousands, sizes in size classes.

    ``columns``: with streams, labels, times and executions; ``sparse``: ids as addresses are.
    """
    rng = np.random.default_rng(0)
    allocs = events // 2
    born = np.sort(rng.random(allocs))
    when = np.concatenate([born, born + rng.exponential(0.01, allocs)])
    ids = rng.permutation(allocs) * 512 + (1 << 46) if sparse else np.arange(allocs)
    sizes = 256 * (1 << rng.integers(0, 12, allocs)) + 4 * rng.integers(0, 64, allocs)
    order = np.argsort(when, kind="stable")
    more = {}
    if columns:
        more = {
            "label": rng.integers(0, 4, events),
            "time_us": when[order] * 1e6,
            "execution": np.sort(rng.integers(0, events // 50 + 1, events)),
        }
    return RequestTrace.from_arrays(
        order < allocs,
        np.concatenate([ids, ids])[order],
        np.concatenate([sizes, sizes])[order],
        labels=("", "output", "temp", "argument"),
        name="benchmark",
        **more,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for events, kind, forms in (
            (1_000_000, "dense ids", ["parquet", "jsonl"]),
            (1_000_000, "sparse ids", ["parquet"]),
            (1_000_000, "all columns", ["parquet"]),
            (10_000, "dense ids", ["jsonl", "csv"]),
            (10_000, "all columns", ["jsonl", "csv"]),
        ):
            trace = example(events, columns=kind == "all columns", sparse=kind == "sparse ids")
            for form in forms:
                file = Path(folder, f"{events} {kind}.{form}")
                save_trace(trace, file)
                files.append(file)
        found: dict[Path, list[dict[str, float]]] = {each: [] for each in files}
        for _ in range(ROUNDS):
            for file in files:
                command = [sys.executable, "-c", _MEASURE, str(file)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[file].append(json.loads(done.stdout))
        print(f"medians of {ROUNDS} processes; bytes of the file; import, load and again in ms")
        print(f"{'file':32} {'bytes':>10}", *(f"{each:>8}" for each in found[files[0]][0]))
        for file, rounds in found.items():
            medians = [
                f"{statistics.median(each[name] for each in rounds):8.1f}" for name in rounds[0]
            ]
            print(f"{file.name:32} {file.stat().st_size:10} {' '.join(medians)}")


if __name__ == "__main__":
    main()
