"""How fast BFC replays run, side by side with the real C++ allocator.

    python -m benchmarks.bfc [--rounds 5] [--only A,B,...]

Every round runs everything once, in turn, so that all see the same machine; medians are printed in
million events per second. The real one is tsl::BFCAllocator of tensorflow-cpu 2.21.0 (classic
flavour, one region), its first region taken before the clock starts. `compiled` is what
`alloclab replay` does with a long trace, `readable` is policies/bfc.py through the checked base
class; `plain` and `lists` are a best fit and free lists by size in plain Python through the same.
Every address is compared.
"""

import argparse
import statistics
import subprocess
import sys
import time
from bisect import bisect_left, insort
from tempfile import TemporaryDirectory

import numpy as np

from alloclab.policies import bfc_kernel
from alloclab.policies.base import Columns, Int64s, Outcome, Placement, Policy, Request
from alloclab.policies.bfc import Bfc
from alloclab.simulator.requests import RequestTrace
from alloclab.validation.oracle import RealBfc
from alloclab.validation.oracle_fetch import OracleUnavailable
from benchmarks.traces import LOADS, make

EVENTS = {"F5000": 200_000, "F15000": 200_000}  # the real one would take minutes for more
READABLE_EVENTS = 200_000
TARGETS = {"A": 4, "B": 4, "C": 4, "D": 4, "R": 4, "F5000": 100, "S15000": 2}
#: No number of events per second, but the growth of the time per event.
SCALING = (100_000, 1_000_000, 10_000_000)

_MEMORY = """
import sys
import numpy as np
from alloclab.policies.bfc import Bfc
from alloclab.simulator.replay import replay_requests
from alloclab.simulator.requests import RequestTrace
what, limit, *files = sys.argv[1:]
if what != "imports":
    trace = RequestTrace.from_columns(*(np.load(file) for file in files))
if what == "replay":
    replay_requests(trace, Bfc(), limit=int(limit), search_limit=False)
with open("/proc/self/status") as status:
    print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024)
"""


class PlainBestFit(Policy):
    """Best fit over one sorted list, as one would write it in an afternoon."""

    def setup(self) -> None:
        self.holes: list[tuple[int, int]] = []  # (bytes, address), sorted
        self.by_start: dict[int, int] = {}
        self.by_end: dict[int, int] = {}
        if self.limit is not None:
            self.reserve(self.limit)
            self.add(0, self.limit)

    def place(self, request: Request) -> Placement | None:
        size = (request.size + 255) & -256
        at = bisect_left(self.holes, (size,))
        if at == len(self.holes):
            return None
        found, address = self.holes.pop(at)
        del self.by_start[address], self.by_end[address + found]
        if found > size:
            self.add(address + size, found - size)
        return address, size

    def release(self, address: int, size: int) -> None:
        after = self.by_start.get(address + size)
        if after is not None:
            self.take(after, address + size)
            size += after
        before = self.by_end.get(address)
        if before is not None:
            address -= before
            self.take(before, address)
            size += before
        self.add(address, size)

    def add(self, address: int, size: int) -> None:
        self.by_start[address] = self.by_end[address + size] = size
        insort(self.holes, (size, address))

    def take(self, size: int, address: int) -> None:
        del self.holes[bisect_left(self.holes, (size, address))]
        del self.by_start[address], self.by_end[address + size]


class FreeLists(Policy):
    """A free list for each power of two, and fresh memory where it is empty."""

    def setup(self) -> None:
        self.lists: list[list[int]] = [[] for _ in range(64)]
        self.top = 0
        if self.limit is not None:
            self.reserve(self.limit)

    def place(self, request: Request) -> Placement | None:
        power = max(8, (request.size - 1).bit_length())
        size = 1 << power
        if self.lists[power]:
            return self.lists[power].pop(), size
        address = self.top
        if self.limit is None or address + size > self.limit:
            return None
        self.top = address + size
        return address, size

    def release(self, address: int, size: int) -> None:
        self.lists[size.bit_length() - 1].append(address)


def timed(policy: Bfc, limit: int, columns: Columns) -> tuple[float, Outcome]:
    """Seconds and outcome of a compiled replay."""
    policy.start(limit)
    start = time.perf_counter()
    outcome = bfc_kernel.replay(policy, columns)
    seconds = time.perf_counter() - start
    assert outcome is not None
    return seconds, outcome


def timed_plain(policy: Policy, limit: int, trace: RequestTrace) -> float:
    """Seconds of a replay through the checked base class."""
    policy.start(limit)
    start = time.perf_counter()
    policy.run(trace.events())
    return time.perf_counter() - start


def real(trace: RequestTrace, limit: int) -> tuple[float, Int64s] | None:
    """Seconds and addresses of the real allocator, or None if it is not here."""
    try:
        with RealBfc("tf-2.21.0", limit) as pool:
            first = pool.alloc(1)
            assert first is not None
            pool.free(first)
            found = pool.replay(trace.op, trace.id, trace.size)
    except OracleUnavailable as missing:
        print(missing, file=sys.stderr)
        return None
    return found.seconds, found.offsets[trace.alloc_events]


def speeds(name: str, rounds: int) -> dict[str, float]:
    """Median million events per second of each way to replay a load."""
    limit = LOADS[name].limit
    trace = make(name, EVENTS.get(name, 1_000_000))
    short = make(name, READABLE_EVENTS)
    columns = trace.columns()
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        actual = real(trace, limit)
        if actual is not None:
            seconds.setdefault("real", []).append(actual[0] / len(trace))
        took, outcome = timed(Bfc(flavour="classic"), limit, columns)
        seconds.setdefault("compiled", []).append(took / len(trace))
        if actual is not None:
            assert np.array_equal(outcome.offsets, actual[1]), "addresses differ"
        took, _ = timed(Bfc(), limit, columns)
        seconds.setdefault("spatial", []).append(took / len(trace))
        for label, policy in {
            "readable": Bfc(flavour="classic"),
            "plain": PlainBestFit(),
            "lists": FreeLists(),
        }.items():
            took = timed_plain(policy, limit, short)
            seconds.setdefault(label, []).append(took / len(short))
    return {label: 1e-6 / statistics.median(each) for label, each in seconds.items()}


def scaling(name: str, rounds: int) -> list[float]:
    """Nanoseconds per event of the compiled replay, by the length of the trace."""
    found = []
    for events in SCALING:
        columns = make(name, events).columns()
        limit = LOADS[name].limit
        seconds = [timed(Bfc(flavour="classic"), limit, columns)[0] for _ in range(rounds)]
        found.append(statistics.median(seconds) / events * 1e9)
    return found


def memory() -> dict[str, float]:
    """MB resident at most in a process that imports, that loads a trace, and that replays it."""
    trace, found = make("A", 1_000_000), {}
    with TemporaryDirectory() as folder:
        files = [f"{folder}/{name}.npy" for name in ("op", "id", "size")]
        np.save(files[0], trace.op)
        np.save(files[1], trace.id)
        np.save(files[2], trace.size)
        for what in ("imports", "trace", "replay"):
            command = [sys.executable, "-c", _MEMORY, what, str(LOADS["A"].limit), *files]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[what] = int(done.stdout) / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of BFC replays.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(LOADS), help="loads, separated by commas")
    given = parser.parse_args()
    warm = make("B", 1000)
    bfc_kernel.replay(Bfc().start(LOADS["B"].limit), warm.columns())
    labels = ("real", "compiled", "spatial", "readable", "plain", "lists")
    print(f"million events/s, medians of {given.rounds}\n")
    print(f"{'load':38}", *(f"{label:>9}" for label in labels), f"{'ratio':>7} {'target':>7}")
    for name in given.only.split(","):
        speed = speeds(name, given.rounds)
        ratio = speed["compiled"] / speed["real"] if "real" in speed else float("nan")
        print(
            f"{name:7}{LOADS[name].summary:31}",
            *(f"{speed.get(label, float('nan')):9.2f}" for label in labels),
            f"{ratio:6.1f}x {TARGETS.get(name, ''):>7}",
            flush=True,
        )
    print("\ncompiled, ns per event at", ", ".join(f"{each:,}" for each in SCALING), "events")
    for name in ("A", "D"):
        times = scaling(name, given.rounds)
        print(f"{name:7}", *(f"{each:7.1f}" for each in times), f"  {times[-1] / times[0]:.2f}x")
    print("\nresident at most, MB:", *(f"{what} {each:.0f}" for what, each in memory().items()))


if __name__ == "__main__":
    main()
