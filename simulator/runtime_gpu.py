"""The runtime of GPUs: PJRT's stream-executor client.

Its allocation model is kComputeSynchronized (xla/pjrt/local_device_state.h): memory that is handed
out may be used by whatever is enqueued on the compute stream later, so what the allocator sees
follows the host's enqueueing, not the device. Only copies, which run on other streams, delay frees.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from alloclab.policies.units import GIB
from alloclab.simulator.runtime_plan import Plan
from alloclab.simulator.runtime_state import Lane, Launch, Pool, PoolKey, Row, Scratch, Storage

if TYPE_CHECKING:
    from alloclab.simulator.runtime import Simulation

#: Larger copies are not staged (PjRtStreamExecutorClient::ShouldStageHostToDeviceTransfers).
STAGING_LIMIT = GIB

#: How long a refused request waits for memory to come back (AllocatorRetry in
#: xla/tsl/framework/bfc_allocator.cc): 10 s.
RETRY_NS = 10_000_000_000

#: One storage, in the first row of its block.
ALONE = ((0, 0),)


class Gpu:
    """What a GPU's runtime does for each kind of event; times are nanoseconds.

    Every method that serves an event returns when the host is free again.
    """

    #: Copy streams from device to host (LocalDeviceState::kNumDeviceToHostStreams).
    to_host_streams = 4

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation

    # --- transfers ----------------------------------------------------------------------------

    def transfer_in(self, row: int) -> int:
        """Copy from the host.

        The destination is allocated at once. The copy stream first waits for the point of the
        compute stream at which that memory was handed out; the copy holds the destination and a
        staging buffer until it is done (PjRtStreamExecutorRawBuffer::
        CopyRawHostToDeviceAndReturnEvent, xla/pjrt/se_raw_buffer.cc).
        """
        simulation = self.simulation
        state, lane = simulation.state, simulation.lane(row)
        for buffer, duration in simulation.copies(row, simulation.results(row)):
            wanted = simulation.row_of(buffer)
            storage = simulation.new_buffer(buffer, row, wanted)
            if storage is not None and wanted.space != "pinned_host":
                staging = self._staging(storage, row)
                lane.to_device = max(state.now, lane.to_device, lane.compute) + duration
                storage.ready = lane.to_device
                self._hold(storage, staging, lane.to_device)
        return state.now + simulation.dispatch

    def transfer_out(self, row: int) -> int:
        """Copy to the host, on one of several streams in turn.

        A copy waits for the contents of the buffer; it holds the buffer, and a staging buffer,
        until it is done (CopyRawDeviceToHostAndReturnEvent, same file).
        """
        simulation = self.simulation
        state, lane = simulation.state, simulation.lane(row)
        done = state.now
        for buffer, duration in simulation.copies(row, simulation.operands(row)):
            storage = state.buffers[buffer]
            if storage is None or storage.row.space == "pinned_host":
                continue
            staging = self._staging(storage, row)
            stream = lane.next_to_host
            lane.next_to_host = (stream + 1) % len(lane.to_host)
            finish = max(state.now, lane.to_host[stream], storage.ready) + duration
            lane.to_host[stream] = finish
            storage.busy = max(storage.busy, finish)
            done = max(done, finish)
            self._hold(storage, staging, finish)
        free = state.now + simulation.dispatch
        return max(free, done) if simulation.machine.blocking_reads else free

    def _hold(self, storage: Storage, staging: Storage | None, until: int) -> None:
        """A copy holds a buffer, and the memory to stage it, until it is done."""
        storage.references += 1
        self.simulation.schedule(until, "copied", storage, staging)

    def _staging(self, storage: Storage, row: int) -> Storage | None:
        """Pinned host memory of the same size, from the pool that all devices share."""
        size = storage.row.size
        if size >= STAGING_LIMIT:
            return None
        staging = Storage()
        pool = self.simulation.state.pools[PoolKey(0, "staging")]
        wanted = Row(size, "staging", "pinned_host")
        self.simulation.allocate(pool, pool.single(wanted), row, ALONE, [staging])
        return staging

    # --- executions ---------------------------------------------------------------------------

    def launch(self, launch: Launch) -> int:
        """Allocate for an execution and enqueue it (StreamExecutorGpuClient::RunGpuAsync,
        xla/pjrt/gpu/se_gpu_pjrt_client.cc).

        Requests come in the order of the buffer assignment. An aliased input that was not donated
        is protected by a copy into fresh memory, after all of these.
        """
        simulation, (row, plan, operands, results, _) = self.simulation, launch
        state, lane = simulation.state, simulation.lane(row)
        self.prepare(row, plan, lane)
        scratch = []
        for part in plan.parts:
            pool = lane.pools[part.memory]
            base = simulation.allocate(pool, part.requests, row, part.outputs, results)
            if part.scratch is not None:
                scratch.append((pool, part.scratch, base))
        start = max(state.now, lane.compute)
        for result in plan.taken_over:
            storage = results[result]
            if storage is None:
                continue
            if storage.pool is None:
                self._protect(row, storage, plan.results[result])
            elif storage.busy > start:  # reads of the donated buffer come first
                start = storage.busy
        if lane.to_device > start:  # copies to the device are under way
            start = max([start, *(each.ready for each in operands if each is not None)])
        finish = lane.compute = start + simulation.duration[row]
        lane.inflight.append(finish)
        for storage in results:
            if storage is not None:
                storage.ready = finish
        return self.enqueued(launch, scratch, finish)

    def _protect(self, row: int, storage: Storage, wanted: Row | None) -> None:
        """Memory for a copy of an aliased input, so that the execution does not overwrite it
        ("Using copy-protection", xla/service/gpu/gpu_executable_buffer_allocator.cc)."""
        assert wanted is not None
        pool = self.simulation.pool_of(row, wanted.space)
        block = pool.single(wanted._replace(label="copy"))
        self.simulation.allocate(pool, block, row, ALONE, [storage])

    def prepare(self, row: int, plan: Plan, lane: Lane) -> None:
        """Before the memory of an execution is allocated: nothing on a GPU."""

    def enqueued(self, launch: Launch, scratch: Scratch, finish: int) -> int:
        """Temp and tuple tables are freed as soon as the kernels are enqueued, long before the
        device has run (GpuExecutableBufferAllocation::TearDown, in index order)."""
        self.simulation.complete(launch, scratch)
        return self.simulation.state.now + self.simulation.dispatch

    # --- memory -------------------------------------------------------------------------------

    def gone(self, storage: Storage) -> None:
        """Nobody needs a storage any more: it is freed at once, whatever the device still does
        with it on the compute stream (PjRtStreamExecutorRawBuffer::DecrefAfter)."""
        self.simulation.free(storage)

    def rescue(self, pool: Pool, wanted: Row, row: int) -> Iterator[None]:
        """A request was refused: each time that something changed, it is tried again.

        It waits up to 10 s for memory to come back (AllocatorRetry::AllocateRaw).
        """
        deadline = self.simulation.state.now + RETRY_NS
        while self.simulation.wait_for_free(pool, deadline):
            yield
