"""What a user waits for: `alloclab replay` of a file, process start included.

    python -m benchmarks.command

Prints the median wall time of five runs of `alloclab replay FILE --policy bfc --json` on a file of
10,000 events in each form, and which heavy packages the process imported.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from alloclab.simulator.trace_files import save_trace
from benchmarks.traces import make

ROUNDS = 5
_COMMAND = [sys.executable, "-m", "alloclab", "replay"]
_HEAVY = "jax jaxlib matplotlib numba pyarrow simpy networkx rich"


def main() -> None:
    """Run the benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        for form in ("csv", "jsonl", "parquet"):
            file = Path(folder, f"trace.{form}")
            save_trace(make("B", 10_000), file)
            arguments = [str(file), "--policy", "bfc", "--limit", "16GiB", "--json"]
            seconds = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                subprocess.run([*_COMMAND, *arguments], check=True, capture_output=True)
                seconds.append(time.perf_counter() - began)
            code = (
                f"import sys; sys.argv = ['alloclab', 'replay', *{arguments}]\n"
                "from alloclab.cli import main\n"
                "try: main()\n"
                f"except SystemExit: print(*(sys.modules.keys() & set('{_HEAVY}'.split())), "
                "file=sys.stderr)"
            )
            seen = subprocess.run(
                [sys.executable, "-c", code], check=True, capture_output=True, text=True
            ).stderr.strip()
            print(
                f"{form:8} 10,000 events: {statistics.median(seconds):.2f} s, "
                f"imports {seen or 'none'} of: {_HEAVY}"
            )


if __name__ == "__main__":
    main()
