"""The runtime of TPUs, as far as it is public.

Its allocation model is kAsynchronous (xla/pjrt/local_device_state.h): a buffer may be given up at
any time, and the allocator itself keeps it until all uses have completed. Loaded programs have
memory reserved at the other end than buffers; buffers matter more than they do. The rest is known
from openxla.org/xla/errors, E0100 and E0101, and from messages in public reports; what they leave
open is said below.
"""

from collections.abc import Iterator

from alloclab.simulator.runtime_gpu import ALONE, Gpu
from alloclab.simulator.runtime_plan import Plan
from alloclab.simulator.runtime_state import (
    FREE_ONE,
    PROGRAM,
    Lane,
    Launch,
    Pool,
    Row,
    Scratch,
    Storage,
)


class Tpu(Gpu):
    """What a TPU's runtime does. Copies are as on a GPU, but not staged in a pool."""

    def _staging(self, storage: Storage, row: int) -> Storage | None:
        return None

    def prepare(self, row: int, plan: Plan, lane: Lane) -> None:
        """Load the program if it is not: its temps and tables are reserved in one block.

        Programs run one after the other, so that one reservation serves all that are loaded: as
        much as the largest needs (inferred: a public report of a v6e shows bytes_limit =
        bytes_in_use + bytes_reserved + largest_free_block_bytes, after many programs were loaded).
        """
        lane.running = executable = self.simulation.executable[row]
        loaded = lane.loaded.pop(executable, None) is not None
        lane.loaded[executable] = plan.reserved  # now the most recently used
        if not loaded:
            self._reserve(lane, self.simulation.pool_of(row, "device"), row)

    def _reserve(self, lane: Lane, pool: Pool, row: int) -> None:
        """Make the reservation as large as the largest loaded program needs."""
        simulation = self.simulation
        size = max(lane.loaded.values(), default=0)
        if lane.reservation is not None and lane.reservation.row.size == size:
            return
        if lane.reservation is not None:
            pool.free(FREE_ONE, lane.reservation.id, simulation.state.now)
            lane.reservation = None
        if size:
            storage = Storage()
            simulation.allocate(pool, pool.single(Row(size, PROGRAM)), row, ALONE, [storage])
            lane.reservation = storage

    def enqueued(self, launch: Launch, scratch: Scratch, finish: int) -> int:
        """The device uses operands and results until the execution ends."""
        for storage in (*launch.operands, *launch.results):
            if storage is not None:
                storage.busy = finish
        self.simulation.lane(launch.row).running = -1
        return super().enqueued(launch, scratch, finish)

    def gone(self, storage: Storage) -> None:
        """A buffer that the device still uses is queued for deallocation."""
        simulation = self.simulation
        if storage.busy > simulation.state.now:
            simulation.schedule(storage.busy, "free", storage)
        else:
            simulation.free(storage)

    def rescue(self, pool: Pool, wanted: Row, row: int) -> Iterator[None]:
        """A request was refused: each time that something changed, it is tried again.

        First queued deallocations are waited for; then, if enough is free but scattered, buffers
        are moved together; then loaded programs are evicted, least recently used first (E0100: all
        three happen; their order is inferred from their cost).
        """
        simulation = self.simulation
        lane = simulation.state.lanes[pool.key.device]
        while simulation.wait_for_free(pool):
            yield
        if pool.key.memory != "device":
            return
        if _is_scattered(pool, wanted):
            self._defragment(pool, lane, row)
            yield
        if wanted.label == PROGRAM:
            return  # the reservation is as large as this one program needs, whoever else is loaded
        while others := [each for each in lane.loaded if each != lane.running]:
            simulation.let_pass(lane.compute)
            del lane.loaded[others[0]]
            self._reserve(lane, pool, row)
            yield
            if _is_scattered(pool, wanted):
                self._defragment(pool, lane, row)
                yield

    def _defragment(self, pool: Pool, lane: Lane, row: int) -> None:
        """Move all buffers together, when the device is idle: free them and place them again."""
        simulation = self.simulation
        simulation.let_pass(lane.compute)
        assert pool.policy is not None
        buffers = {key: each for key, each in pool.live.items() if each.row.label != PROGRAM}
        for number in buffers:
            pool.free(FREE_ONE, number, simulation.state.now)
        for old in sorted(buffers.values(), key=lambda each: each.address):
            number = pool.take_ids(1)
            if not pool.ask(old.row, number, old.owner, simulation.state.now, -1):
                simulation.fail(pool, old.row, row)
            if pool.live[number].address != old.address:
                pool.policy.stats.bytes_moved += old.taken


def _is_scattered(pool: Pool, wanted: Row) -> bool:
    """Whether enough memory is free, in pieces."""
    assert pool.policy is not None
    limit = pool.policy.limit
    return limit is not None and limit - pool.in_use - pool.reserved >= wanted.size
