"""The runtime of the CPU backend: everything happens in the call.

Its allocation model is kSynchronous (xla/pjrt/local_device_state.h): memory is freed after the last
use has finished. There is no run-ahead and no staging; copies are plain memory copies.
"""

from alloclab.simulator.runtime_gpu import Gpu
from alloclab.simulator.runtime_state import Launch, Scratch


class Cpu(Gpu):
    """What the CPU's runtime does (xla/pjrt/cpu/cpu_client.cc)."""

    def transfer_in(self, row: int) -> int:
        """Allocate, and copy before the call returns."""
        simulation = self.simulation
        for buffer, _ in simulation.copies(row, simulation.results(row)):
            simulation.new_buffer(buffer, row, simulation.row_of(buffer))
        return simulation.state.now + simulation.duration[row]

    def transfer_out(self, row: int) -> int:
        """Copy before the call returns."""
        return self.simulation.state.now + self.simulation.duration[row]

    def enqueued(self, launch: Launch, scratch: Scratch, finish: int) -> int:
        """Run to the end; then temp and tuple tables are freed, and the call returns.

        The order of requests is that of a GPU: the buffer assignment's, then copies of aliased
        inputs (BufferAlloc::Allocate, BufferAllocAndCopy::AllocateAndCopy).
        """
        simulation = self.simulation
        if simulation.skip_to(finish, launch.row):
            simulation.complete(launch, scratch)
        else:
            simulation.schedule(finish, "complete", launch, scratch)
        return finish
