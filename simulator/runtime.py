"""The runtime model: from what a program did to what each allocator is asked.

`lower` turns a program trace into the request trace of one device. `Simulation` is the run behind
it, event by event, which can be stepped, inspected, saved and branched, and which can drive live
policies, so that running out of memory has its consequences.

SimPy keeps the clock and the calendar. What happens is plain methods on an explicit state, not
SimPy processes: a suspended generator can't be copied, and a run that can't be copied can't be
branched. The rules of each runtime are in `runtime_gpu`, `runtime_cpu` and `runtime_tpu`.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import simpy

from alloclab.policies.base import Event, Policy
from alloclab.policies.errors import InputError
from alloclab.simulator.layouts import default_tpu_layout, layout_bytes
from alloclab.simulator.program import (
    EVENT_KINDS,
    EXECUTE,
    RELEASE,
    TRANSFER_IN,
    TRANSFER_OUT,
    Aval,
    ProgramTrace,
)
from alloclab.simulator.requests import SPACES, RequestTrace
from alloclab.simulator.runtime_cpu import Cpu
from alloclab.simulator.runtime_gpu import ALONE, Gpu
from alloclab.simulator.runtime_plan import (
    Kind,
    Machine,
    Plan,
    make_plan,
    memory_of,
    time_events,
)
from alloclab.simulator.runtime_state import (
    FREE_ONE,
    Block,
    Lane,
    Launch,
    OutOfMemory,
    Pool,
    PoolKey,
    Row,
    Scratch,
    State,
    Storage,
)
from alloclab.simulator.runtime_tpu import Tpu

__all__ = [
    "AS_CAPTURED",
    "Machine",
    "OutOfMemory",
    "PoolKey",
    "Simulation",
    "State",
    "Step",
    "lower",
]

#: A GPU with the buffer assignments and the durations of the captured run.
AS_CAPTURED = Machine()

RULES: dict[Kind, type[Gpu]] = {"gpu": Gpu, "tpu": Tpu, "cpu": Cpu}


def lower(
    program: ProgramTrace,
    machine: Machine = AS_CAPTURED,
    *,
    device: int = 0,
    memory: str = "device",
) -> RequestTrace:
    """What the allocator of a device is asked when the program runs there.

    Marks are kept. Where an executable has no buffer assignment for the wanted target, the nearest
    is used, and the trace's name says so: "(estimate: ...)".

    Args:
        machine: the device and its runtime; by default a GPU with the captured assignment.
        device: the ordinal of the device in the program.
        memory: which of its allocators; see `PoolKey`.

    Raises:
        InputError: the program does not use the device, or it has no such allocator.
    """
    simulation = Simulation(program, machine)
    simulation.run()
    return simulation.trace(device, memory)


class Step(NamedTuple):
    """One simulated event: when, what happened, and what the allocators were asked by it."""

    time_us: float
    what: str
    events: dict[PoolKey, list[Event]]


class Simulation:
    """A run of a program on a machine, one simulated event after the other.

    Args:
        program: what the program did.
        machine: the device and its runtime, the same for all devices of the program.
        policies: live policies by allocator, started with their limits. Allocators without one
            only record what they are asked, and refuse nothing.

    ``state`` is all that changes; see `State`. After the run, ``state.failure`` says why it ended
    early, if it did.
    """

    def __init__(
        self,
        program: ProgramTrace,
        machine: Machine = AS_CAPTURED,
        policies: Mapping[PoolKey, Policy] = MappingProxyType({}),
    ) -> None:
        self.program = program
        self.machine = machine
        self.dispatch = round(machine.dispatch_us * 1000)
        self.kind: list[int] = program.kind.tolist()
        self.device: list[int] = program.device.tolist()
        self.executable: list[int] = program.executable.tolist()
        self.launch: list[int] = program.launch.tolist()
        same = np.diff(program.launch, append=-1) == 0
        #: Whether the next event launches the same execution on another device.
        self._more: list[bool] = (same & (program.kind == EXECUTE)).tolist()
        self._operands: list[int] = program.operands.tolist()
        self._operand_start: list[int] = program.operand_start.tolist()
        self._results: list[int] = program.results.tolist()
        self._result_start: list[int] = program.result_start.tolist()
        self._donated: list[bool] = program.donated.tolist()
        self._spaces: list[int] = program.buffer_space.tolist()
        self._sizes = _buffer_bytes(program, machine)
        self.gap, self.duration = time_events(program, machine, self._sizes)
        self._plans: dict[int, Plan] = {}
        devices = sorted(set(self.device)) or [0]
        keys = [PoolKey(each, memory) for each in devices for memory in ("device", "pinned_host")]
        if machine.separate_collective:
            keys += [PoolKey(each, "collective") for each in devices]
        keys.append(PoolKey(0, "staging"))
        if unknown := policies.keys() - set(keys):
            raise InputError(
                f"simulation: there is no allocator {tuple(min(unknown))}; "
                f"there are {', '.join(str(tuple(key)) for key in keys)}"
            )
        self.rules = RULES[machine.kind](self)
        self.state = State(
            pools := {key: Pool(key, policies.get(key)) for key in keys},
            {
                each: Lane(
                    {key.memory: pool for key, pool in pools.items() if key.device == each},
                    self.rules.to_host_streams,
                )
                for each in devices
            },
        )
        self._set_clock()
        if len(program):
            self.schedule(self.gap[0], "host")

    # --- running --------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether nothing is left to happen."""
        return self.state.failure is not None or not self.state.pending

    def run(self) -> Self:
        """Run to the end; returns itself."""
        # A live policy may refuse a launch, which then waits while the host goes on: no bursts.
        self._burst = all(pool.policy is None for pool in self.state.pools.values())
        with contextlib.suppress(_FailedError):
            while not self.done:
                self._clock.step()
        self._burst = False
        return self

    def step(self) -> Step | None:
        """Let one simulated event happen; None if nothing is left.

        An event is: the host reaches the next event of the program, a copy ends, a launch that had
        to wait is made. What happens while the host waits for memory is part of the same step.
        """
        if self.done:
            return None
        before = {key: pool.issued for key, pool in self.state.pools.items()}
        with contextlib.suppress(_FailedError):
            self._clock.step()
        events = {
            key: list(pool.events(before[key]))
            for key, pool in self.state.pools.items()
            if pool.issued > before[key]
        }
        return Step(self.state.now / 1000, self._happened, events)

    def save(self) -> State:
        """A copy of the state, for `restore`."""
        return copy.deepcopy(self.state)

    def restore(self, state: State) -> None:
        """Go on from a saved state."""
        self.state = copy.deepcopy(state)
        self._set_clock()

    def branch(self) -> "Simulation":
        """A second run that goes on from here, independent of this one."""
        twin = copy.copy(self)
        twin.rules = type(self.rules)(twin)
        twin.restore(self.state)
        return twin

    # --- looking ----------------------------------------------------------------------------------

    def trace(self, device: int = 0, memory: str = "device") -> RequestTrace:
        """What an allocator was asked so far."""
        pool = self.state.pools.get(PoolKey(device, memory))
        if pool is None:
            known = ", ".join(f"{each.device} {each.memory}" for each in self.state.pools)
            raise InputError(
                f"simulation: device {device} has no allocator for {memory} memory; there are: "
                f"{known}"
            )
        return pool.trace(f"{self.program.name or 'program'} on {self.target}{self.note}")

    def traces(self) -> dict[PoolKey, RequestTrace]:
        """What every allocator was asked so far; those that were asked nothing are left out."""
        return {key: self.trace(*key) for key, pool in self.state.pools.items() if pool.issued}

    @property
    def target(self) -> str:
        """Whose buffer assignment is wanted."""
        return self.machine.target or self.program.target

    @property
    def note(self) -> str:
        """Says which executables so far had no buffer assignment for the target, if any."""
        wrong = sum(not plan.exact for plan in self._plans.values())
        if not wrong:
            return ""
        return (
            f" (estimate: {wrong} of {len(self._plans)} executables without a buffer assignment "
            f"for {self.target}; the nearest is used, captured on {self.program.target})"
        )

    def memory_stats(self, device: int = 0) -> dict[str, int]:
        """What `jax.Device.memory_stats` says there about allocations, in bytes.

        On a TPU memory of loaded programs counts as reserved, not as in use.

        Raises:
            InputError: the device's memory has no live policy.
        """
        pool = self.state.pools.get(PoolKey(device, "device"))
        if pool is None or pool.policy is None:
            raise InputError(f"simulation: device {device} has no live policy")
        stats = pool.policy.stats
        found = {
            "num_allocs": stats.num_allocs,
            "bytes_in_use": pool.in_use,
            "peak_bytes_in_use": pool.peak_in_use,
            "largest_alloc_size": stats.largest_alloc_size,
            "bytes_reserved": pool.reserved,
            "peak_bytes_reserved": pool.peak_reserved,
        }
        if pool.policy.limit is not None:
            found["bytes_limit"] = pool.policy.limit
        return found

    # --- the calendar -----------------------------------------------------------------------------

    def schedule(self, due: int, action: str, *arguments: Any) -> None:
        """Let an action happen at a time (ns)."""
        state = self.state
        number = state.number = state.number + 1
        state.pending[number] = (due, action, arguments)
        _Due(self._clock, due, number, self._fire, last=action in _HOST)

    def _set_clock(self) -> None:
        """A calendar that holds what is pending. Ties keep their order."""
        self._burst = False
        self._happened = ""
        self._actions: dict[str, Callable[..., object]]
        self._clock = simpy.Environment(initial_time=self.state.now)
        self._actions = {
            "host": self._host,
            "launch": self._launch,
            "dispatch": self._dispatch,
            "copied": self._copied,
            "complete": self.complete,
            "free": self.free,
        }
        for number, (due, action, _) in sorted(self.state.pending.items()):
            _Due(self._clock, due, number, self._fire, last=action in _HOST)

    def _fire(self, event: simpy.Event) -> None:
        assert event.value is not None
        due, action, arguments = self.state.pending.pop(event.value)
        self.state.now = due
        self._happened = action
        self._actions[action](*arguments)

    def wait_for_free(self, pool: Pool, deadline: float = np.inf) -> bool:
        """Whoever asks for memory is blocked: let others go on until some of it comes back.

        Returns whether it did, before the deadline (ns).
        """
        before = pool.frees
        while pool.frees == before and self._clock.peek() <= deadline and self.state.pending:
            self._clock.step()
        return pool.frees > before

    def skip_to(self, until: int, row: int) -> bool:
        """The host waits for a launch: let all else happen first that is due by a time (ns).

        A shortcut of `run`, past the calendar, for the last device of a launch; false otherwise.
        """
        if not self._burst or self._more[row]:
            return False
        while self._clock.peek() <= until:
            self._clock.step()
        self.state.now = until
        return True

    def let_pass(self, until: int) -> None:
        """Whoever calls is blocked until a time (ns): let others go on."""
        while self._clock.peek() <= until:
            self._clock.step()
        self.state.now = max(self.state.now, until)

    # --- the host ---------------------------------------------------------------------------------

    def _host(self) -> None:
        """Serve the next event of the program; in a burst all, each after what is due before it."""
        state = self.state
        rows = len(self.kind)
        while True:
            row = state.row
            if state.launching or self.machine.async_dispatch:
                state.waiting = self._must_wait(row)
                if state.waiting:
                    return  # `_wake` lets the same event come again
            free = self._serve(row)
            state.row = row + 1
            if state.row == rows:
                return
            due = free + self.gap[row + 1]
            if not self._burst:
                self.schedule(due, "host")
                return
            while self._clock.peek() <= due:
                self._clock.step()
            state.now = due

    def _must_wait(self, row: int) -> bool:
        """Whether the host must wait for a launch to be made before it serves an event."""
        state = self.state
        if state.launching:
            return not self._more[row - 1]
        if self.kind[row] != TRANSFER_OUT:
            return False
        storages = [state.buffers[each] for each in self.operands(row)]
        return any(each is not None and each.pool is None for each in storages)

    def _serve(self, row: int) -> int:
        """Serve one event of the program: when (ns) the host is free again."""
        kind = self.kind[row]
        state = self.state
        if not self._burst:
            self._happened = f"host: {self._describe(row)}"
        if kind == EXECUTE:
            return self._execute(row)
        if kind == TRANSFER_IN:
            return self.rules.transfer_in(row)
        if kind == TRANSFER_OUT:
            return self.rules.transfer_out(row)
        if kind == RELEASE:
            for buffer in self.operands(row):
                self.drop(state.buffers.pop(buffer))
        else:
            for pool in state.pools.values():
                pool.mark(self.program.labels[self.program.label[row]], state.now)
        return state.now

    def _execute(self, row: int) -> int:
        """Launch on one device; the host goes on when all devices of a launch have been served.

        Each device has a launch thread of its own, so that one that must wait does not hold up the
        others (PjRtStreamExecutorLoadedExecutable::Execute).
        """
        state = self.state
        device = self.device[row]
        lane = state.lanes[device]
        launch = self._bind(row)
        if self.machine.async_dispatch:
            lane.queue.append(launch)
            if len(lane.queue) == 1:
                self.schedule(state.now, "dispatch", device)
            free = state.now + self.dispatch
        else:
            slot = lane.slot(state.now, self.machine.max_inflight)
            if slot > state.now and not self.skip_to(slot, row):
                self.schedule(slot, "launch", launch)
                state.launching += 1
                free = slot + self.dispatch
            else:
                free = self.rules.launch(launch)
        state.launched = max(state.launched, free)
        return state.now if self._more[row] else state.launched

    def _launch(self, launch: Launch) -> None:
        """Make a launch that had to wait."""
        state = self.state
        self.lane(launch.row).slot(state.now, self.machine.max_inflight)
        self.rules.launch(launch)
        state.launching -= 1
        self._wake()

    def _wake(self) -> None:
        """A launch has been made: if the host waits for it, it looks again."""
        if self.state.waiting:
            self.state.waiting = False
            self.schedule(self.state.now, "host")

    def _dispatch(self, device: int) -> None:
        """A device's dispatch thread makes the next launch of its queue, or waits for its turn."""
        state = self.state
        lane = state.lanes[device]
        slot = lane.slot(state.now, self.machine.max_inflight)
        if slot > state.now:
            self.schedule(slot, "dispatch", device)
            return
        self.rules.launch(lane.queue[0])
        lane.queue.popleft()
        self._wake()
        if lane.queue:
            self.schedule(state.now + self.dispatch, "dispatch", device)

    def _bind(self, row: int) -> Launch:
        """Give the results of an execution their names, and take those of donated operands.

        A donated operand whose memory no result takes over is given up after the launch: XLA
        donates only what its alias configuration names.
        """
        plan, buffers = self.plan(row), self.state.buffers
        first, last = self._operand_start[row], self._operand_start[row + 1]
        names = self._operands[first:last]
        operands = [buffers[each] for each in names]
        results = [None if wanted is None else Storage() for wanted in plan.results]
        drops: list[Storage] = []
        if True in (flags := self._donated[first:last]):
            donated = {at: buffers.pop(names[at]) for at, flag in enumerate(flags) if flag}
            for result, parameter in plan.taken_over.items():
                if parameter in donated:
                    results[result] = donated.pop(parameter)
            drops = [each for each in donated.values() if each is not None]
        buffers.update(zip(self.results(row), results, strict=True))
        if self.machine.async_dispatch:  # all are held until the launch has been made
            held = [each for each in (*operands, *results) if each is not None]
            for storage in held:
                storage.references += 1
            drops += held
        return Launch(row, plan, operands, results, drops)

    def complete(self, launch: Launch, scratch: Scratch) -> None:
        """Free what an execution needed only until now, in index order, then drop references."""
        state, number = self.state, self.launch[launch.row]
        for pool, block, base in scratch:
            pool.free(block, base, state.now, number)
        for storage in launch.drops:
            self.drop(storage)

    # --- buffers --------------------------------------------------------------------------------

    def plan(self, row: int) -> Plan:
        """The plan of the executable that an event runs."""
        executable = self.executable[row]
        plan = self._plans.get(executable)
        if plan is None:
            results = self.results(row)
            place = {buffer: at for at, buffer in enumerate(self.operands(row))}
            alias_of = self.program.buffer_alias_of[list(results)].tolist()
            aliases = {at: place[each] for at, each in enumerate(alias_of) if each in place}
            rows = [self.row_of(each, "output") for each in results]
            plan = self._plans[executable] = make_plan(
                self.program.executables[executable],
                self.machine,
                self.program.target,
                rows,
                aliases,
            )
        return plan

    def lane(self, row: int) -> Lane:
        """The streams of the device of an event."""
        return self.state.lanes[self.device[row]]

    def pool_of(self, row: int, space: str) -> Pool:
        """The allocator that serves a memory space on the device of an event."""
        return self.lane(row).pools[memory_of(space, self.machine)]

    def operands(self, row: int) -> Sequence[int]:
        """The buffers that an event uses."""
        return self._operands[self._operand_start[row] : self._operand_start[row + 1]]

    def results(self, row: int) -> Sequence[int]:
        """The buffers that an event makes."""
        return self._results[self._result_start[row] : self._result_start[row + 1]]

    def row_of(self, buffer: int, label: str = "argument") -> Row:
        """What a buffer needs when it comes from the host, or from no known allocation."""
        return Row(self._sizes[buffer], label, SPACES[self._spaces[buffer]])

    def copies(self, row: int, buffers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The buffers that an event copies, with the time (ns) for each."""
        total = sum([self._sizes[each] for each in buffers])
        for each in buffers:
            yield each, self.duration[row] * self._sizes[each] // total if total else 0

    def new_buffer(self, buffer: int, row: int, wanted: Row) -> Storage | None:
        """Allocate for a buffer; None if it has no bytes."""
        storage = None
        if wanted.size:
            storage = Storage()
            pool = self.pool_of(row, wanted.space)
            self.allocate(pool, pool.single(wanted), row, ALONE, [storage])
        self.state.buffers[buffer] = storage
        return storage

    def allocate(
        self,
        pool: Pool,
        block: Block,
        row: int,
        owners: Sequence[tuple[int, int]],
        storages: Sequence[Storage | None],
    ) -> int:
        """Ask for a block's rows, on behalf of an event; returns the first of their ids.

        ``owners`` pairs rows of the block with the storages that get the memory.
        """
        base = pool.take_ids(len(block.rows))
        if pool.policy is None:
            pool.note(block, base, self.state.now, self.launch[row])
            for at, owner in owners:
                storage = storages[owner]
                assert storage is not None
                storage.put(pool, base + at, block.rows[at])
            return base
        owner_of = {at: storages[owner] for at, owner in owners}
        for at, wanted in enumerate(block.rows):
            self._ask(pool, wanted, base + at, owner_of.get(at), row)
        return base

    def _ask(self, pool: Pool, wanted: Row, number: int, owner: Storage | None, row: int) -> None:
        """Ask a live policy, and do what the runtime does when it refuses."""
        launch = self.launch[row]
        if pool.ask(wanted, number, owner, self.state.now, launch):
            return
        for _ in self.rules.rescue(pool, wanted, row):
            if pool.ask(wanted, number, owner, self.state.now, launch):
                return
        self.fail(pool, wanted, row)

    def fail(self, pool: Pool, wanted: Row, row: int) -> None:
        """The run ends here: a request got no memory."""
        state = self.state
        state.failure = OutOfMemory(
            pool.key, state.now / 1000, row, wanted, pool.in_use, pool.reserved
        )
        raise _FailedError

    def free(self, storage: Storage) -> None:
        """Free a storage's memory."""
        assert storage.pool is not None
        storage.pool.free(FREE_ONE, storage.id, self.state.now)

    def drop(self, storage: Storage | None) -> None:
        """One reference to a storage is gone."""
        if storage is None:
            return
        storage.references -= 1
        if not storage.references:
            self.rules.gone(storage)

    def _copied(self, storage: Storage, staging: Storage | None) -> None:
        """A copy is done."""
        self.drop(staging)
        self.drop(storage)

    def _describe(self, row: int) -> str:
        name = EVENT_KINDS[self.kind[row]]
        if self.kind[row] == EXECUTE:
            name += f" {self.program.executables[self.executable[row]].name}"
        return f"{name} on device {self.device[row]}, event {row}"


#: What the host waits for comes after all else that is due at the same time.
_HOST = frozenset({"host", "launch", "complete"})
_LAST = simpy.events.EventPriority(simpy.events.NORMAL + 1)


class _Due(simpy.Event):
    """Fires at a time (ns); ``last`` after all others that are due then."""

    def __init__(
        self,
        clock: simpy.Environment,
        due: int,
        number: int,
        fire: Callable[[simpy.Event], None],
        *,
        last: bool,
    ) -> None:
        super().__init__(clock)
        self.callbacks.append(fire)
        self._ok = True
        self._value = number
        clock.schedule(self, _LAST if last else simpy.events.NORMAL, due - clock.now)


class _FailedError(Exception):
    """Ends a run that is out of memory; never leaves a `Simulation`."""


def _buffer_bytes(program: ProgramTrace, machine: Machine) -> list[int]:
    """Bytes of each buffer on the machine: padded in a TPU's memory, as captured elsewhere."""
    sizes = program.buffer_bytes
    if machine.generation is not None and len(sizes):
        padded = np.array([_padded(each, machine.generation) for each in program.avals], np.int64)
        on_device = program.buffer_space == SPACES.index("device")
        sizes = np.where(on_device, np.maximum(sizes, padded[program.buffer_aval]), sizes)
    listed: list[int] = sizes.tolist()
    return listed


def _padded(aval: Aval, generation: int) -> int:
    """Bytes in a TPU's default layout; 0 for types that are no XLA types, such as keys."""
    try:
        return layout_bytes(default_tpu_layout(aval.dtype, aval.shape, generation))
    except InputError:
        return 0
