"""The rules of the runtime model, each shown on the smallest program that needs it."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloclab.policies.base import Event, Free, Mark, Policy, Request
from alloclab.policies.bfc import Bfc
from alloclab.policies.errors import InputError
from alloclab.policies.fits import BestFit
from alloclab.policies.ideal import Ideal
from alloclab.policies.units import GIB
from alloclab.simulator.devices import load_device
from alloclab.simulator.environment import read_environment
from alloclab.simulator.program import Aval, ProgramTrace
from alloclab.simulator.replay import replay_requests
from alloclab.simulator.requests import ALLOC, SPACES, RequestTrace
from alloclab.simulator.runtime import Machine, Simulation, lower
from alloclab.simulator.runtime_state import PoolKey
from tests.unit.program_builder import Program, assignment, executable

#: A call costs nothing, so that times are easy to follow.
GPU = Machine("gpu", dispatch_us=0.0)
TPU = Machine("tpu", dispatch_us=0.0)
CPU = Machine("cpu", dispatch_us=0.0)


def story(events: Iterable[Event]) -> list[str]:
    """Each event in a word or two: ``+output 400``, ``-output 400``, ``=mark``."""
    named: dict[int, str] = {}
    told = []
    for event in events:
        if isinstance(event, Request):
            named[event.id] = f"{event.label} {event.size}"
            told.append("+" + named[event.id])
        elif isinstance(event, Free):
            told.append("-" + named.pop(event.id))
        else:
            told.append("=" + event.label)
    return told


def times(trace: RequestTrace, what: str) -> list[float]:
    """The times (us) of the events that `story` tells so."""
    told = story(trace.events())
    return [float(trace.time_us[at]) for at, each in enumerate(told) if each == what]


#: Two outputs, 300 and 100 bytes, a table of two pointers and 5000 bytes of temp.
STEP = executable(
    "step",
    1,
    2,
    cpu=assignment(
        ("parameter", 64, {"parameter": 0}),
        ("constant", 777),
        ("thread_local", 88),
        ("output", 300, {"output": 1}),
        ("output", 100, {"output": 0}),
        ("tuple", 16),
        ("output", 0),
        ("temp", 5000),
    ),
)
#: One input that becomes the output if it is donated, and some temp.
UPDATE = executable(
    "update",
    1,
    1,
    cpu=assignment(("parameter", 400, {"parameter": 0, "output": 0}), ("temp", 1000)),
)
#: One output.
MAKE = executable("make", 0, 1, cpu=assignment(("output", 500, {"output": 0})))
#: One input, one output.
USE = executable(
    "use",
    1,
    1,
    cpu=assignment(("parameter", 500, {"parameter": 0}), ("output", 40, {"output": 0})),
)

#: One input, one output, some temp.
WORK = executable(
    "work",
    1,
    1,
    cpu=assignment(
        ("parameter", 512, {"parameter": 0}), ("output", 40, {"output": 0}), ("temp", 512)
    ),
)
#: No input, one output, much temp.
BIG = executable("big", 0, 1, cpu=assignment(("output", 512, {"output": 0}), ("temp", 2048)))


#: Like `BIG` with less temp.
SMALL = executable("small", 0, 1, cpu=assignment(("output", 512, {"output": 0}), ("temp", 1024)))


# --- one execution ----------------------------------------------------------------------------


def step_program() -> ProgramTrace:
    program = Program()
    (x,) = program.put(64)
    program.run(STEP, [x], [100, 300], takes=10)
    program.mark("step")
    program.drop(x)
    return program.trace()


def test_an_execution_asks_in_the_order_of_the_assignment() -> None:
    """Outputs, tuple table, temp; nothing for parameters, constants, thread-local and empty
    buffers; table and temp are freed right after the enqueue."""
    trace = lower(step_program(), GPU)
    assert story(trace.events()) == [
        "+argument 64",
        "+output 300",
        "+output 100",
        "+tuple 16",
        "+temp 5000",
        "-tuple 16",
        "-temp 5000",
        "=step",
        "-argument 64",
    ]
    assert trace.execution.tolist() == [-1, 0, 0, 0, 0, 0, 0, -1, -1]
    assert times(trace, "-temp 5000") == [0.0]  # the device is busy until 10
    assert times(trace, "-argument 64") == [0.0]


def test_outputs_can_be_released_one_by_one() -> None:
    program = Program()
    (x,) = program.put(64)
    small, large = program.run(STEP, [x], [100, 300])
    program.drop(large)
    program.drop(small)
    assert story(lower(program.trace(), GPU).events())[-2:] == ["-output 300", "-output 100"]


def test_on_a_cpu_scratch_lives_as_long_as_the_execution() -> None:
    trace = lower(step_program(), CPU)
    assert story(trace.events()) == story(lower(step_program(), GPU).events())
    assert times(trace, "+temp 5000") == [0.0]
    assert times(trace, "-tuple 16") == times(trace, "-temp 5000") == [10.0]
    assert times(trace, "=step") == [10.0]


def test_a_tpu_reserves_temp_and_table_with_the_program() -> None:
    trace = lower(step_program(), TPU)
    assert story(trace.events())[:4] == [
        "+argument 64",
        "+program 5016",
        "+output 300",
        "+output 100",
    ]


def test_host_time_is_the_captured_gap_and_the_cost_of_calls() -> None:
    program = Program()
    program.run(MAKE, [], [500], takes=10)
    program.wait(3)
    program.mark("later")
    trace = lower(program.trace(), replace(GPU, dispatch_us=2.0))
    assert times(trace, "=later") == [5.0]


# --- donation ---------------------------------------------------------------------------------


def update_program(donate: bool) -> ProgramTrace:
    program = Program()
    (x,) = program.put(400)
    alias = {0: x} if donate else None
    (y,) = program.run(UPDATE, [x], [400], donate=[x] if donate else [], alias=alias)
    if not donate:
        program.drop(x)
    program.drop(y)
    return program.trace()


@pytest.mark.parametrize("machine", [GPU, CPU])
def test_a_donated_input_becomes_the_output(machine: Machine) -> None:
    assert story(lower(update_program(donate=True), machine).events()) == [
        "+argument 400",
        "+temp 1000",
        "-temp 1000",
        "-argument 400",
    ]


@pytest.mark.parametrize("machine", [GPU, CPU])
def test_an_aliased_input_that_is_not_donated_is_copied_after_the_temp(machine: Machine) -> None:
    assert story(lower(update_program(donate=False), machine).events()) == [
        "+argument 400",
        "+temp 1000",
        "+copy 400",
        "-temp 1000",
        "-argument 400",
        "-copy 400",
    ]


@pytest.mark.parametrize("machine", [GPU, CPU])
def test_a_donated_input_without_alias_is_freed_after_the_execution(machine: Machine) -> None:
    program = Program()
    (x,) = program.put(500)
    program.run(USE, [x], [40], donate=[x])
    told = story(lower(program.trace(), machine).events())
    assert told == ["+argument 500", "+output 40", "-argument 500"]


def test_the_target_decides_which_donations_work() -> None:
    """Captured with an alias, run where the compiler made none, and the other way round."""
    both = executable(
        "both",
        1,
        1,
        cpu=assignment(("parameter", 400, {"parameter": 0, "output": 0})),
        cuda_h100=assignment(("parameter", 400, {"parameter": 0}), ("output", 400, {"output": 0})),
    )
    program = Program()
    (x,) = program.put(400)
    program.run(both, [x], [400], donate=[x], alias={0: x})
    told = story(lower(program.trace(), replace(GPU, target="cuda:h100")).events())
    assert told == ["+argument 400", "+output 400", "-argument 400"]
    assert story(lower(program.trace(), GPU).events()) == ["+argument 400"]


def test_donation_waits_for_reads_of_the_buffer() -> None:
    """The execution starts when the copy to the host is over: what it makes is ready at 100 + 10,
    and only then can it be copied."""
    for donate in (True, False):
        program = Program()
        (x,) = program.put(400)
        program.get(x, takes=100)
        y = program.run(
            UPDATE, [x], [400], donate=[x] if donate else [], alias={0: x} if donate else None,
            takes=10,
        )  # fmt: skip
        program.get(*y, takes=1)
        simulation = Simulation(program.trace(), replace(GPU, blocking_reads=False)).run()
        staged = times(simulation.trace(0, "staging"), "-staging 400")
        assert staged[-1] == (111.0 if donate else 100.0)


# --- streams and run-ahead --------------------------------------------------------------------


def test_the_host_runs_at_most_32_executions_ahead() -> None:
    program = Program()
    for _ in range(40):
        program.run(MAKE, [], [500], takes=10)
    asked = times(lower(program.trace(), GPU), "+output 500")
    assert asked[:32] == [0.0] * 32
    assert asked[32:] == [10.0 * (each + 1) for each in range(8)]
    ahead = times(lower(program.trace(), replace(GPU, max_inflight=2)), "+output 500")
    assert ahead == [0.0, 0.0] + [10.0 * (each + 1) for each in range(38)]


def test_a_copy_to_the_host_waits_for_the_result_and_the_host_for_the_copy() -> None:
    program = Program()
    (y,) = program.run(MAKE, [], [500], takes=10)
    program.get(y, takes=4)
    program.drop(y)
    program.mark("read")
    trace = lower(program.trace(), GPU)
    assert times(trace, "=read") == [14.0]
    free = lower(program.trace(), replace(GPU, blocking_reads=False))
    assert times(free, "=read") == [0.0]
    assert times(free, "-output 500") == [14.0]  # held by the copy
    assert story(free.events()) == ["+output 500", "=read", "-output 500"]


def test_four_streams_copy_to_the_host_in_turn() -> None:
    program = Program()
    buffers = program.put(*range(101, 107))
    for each in buffers:
        program.get(each, takes=10)
    program.drop(*buffers)
    trace = lower(program.trace(), replace(GPU, blocking_reads=False))
    ended = [times(trace, f"-argument {size}") for size in range(101, 107)]
    assert ended == [[10.0]] * 4 + [[20.0]] * 2


def test_one_stream_copies_to_the_device_and_holds_its_buffers() -> None:
    program = Program()
    first = program.put(101, takes=10)
    second = program.put(102, takes=10)
    program.drop(*first, *second)
    trace = lower(program.trace(), GPU)
    assert story(trace.events()) == [
        "+argument 101",
        "+argument 102",
        "-argument 101",
        "-argument 102",
    ]
    assert trace.time_us.tolist() == [0.0, 0.0, 10.0, 20.0]


def test_a_copy_to_the_device_waits_for_the_compute_stream() -> None:
    """Its memory may have been handed back by work that is still running."""
    program = Program()
    program.run(MAKE, [], [500], takes=10)
    (x,) = program.put(101, takes=1)
    program.drop(x)
    assert times(lower(program.trace(), GPU), "-argument 101") == [11.0]


def test_an_execution_waits_for_the_copy_of_its_input() -> None:
    program = Program()
    (x,) = program.put(500, takes=7)
    (y,) = program.run(USE, [x], [40], takes=10)
    program.get(y, takes=1)
    program.mark("read")
    assert times(lower(program.trace(), GPU), "=read") == [18.0]


def test_copies_are_staged_in_the_shared_pinned_pool() -> None:
    program = Program()
    program.put(100, takes=5, device=0)
    (x,) = program.put(200, takes=5, device=1)
    program.put(GIB, takes=5)
    program.put(GIB - 1, takes=5)
    program.get(x, device=1, takes=2)
    simulation = Simulation(program.trace(), GPU).run()
    trace = simulation.trace(0, "staging")
    assert story(trace.events()) == [
        "+staging 100",
        "+staging 200",
        f"+staging {GIB - 1}",
        "+staging 200",
        "-staging 100",
        "-staging 200",
        "-staging 200",
        f"-staging {GIB - 1}",
    ]
    assert set(trace.space[trace.op == ALLOC].tolist()) == {SPACES.index("pinned_host")}
    for machine in (CPU, TPU):
        assert not len(Simulation(program.trace(), machine).run().trace(0, "staging"))


def test_buffers_in_pinned_memory_have_their_own_allocator_and_are_not_staged() -> None:
    program = Program()
    (x,) = program.put(100, space="pinned_host", takes=5)
    program.get(x, takes=5)
    program.drop(x)
    simulation = Simulation(program.trace(), GPU).run()
    assert list(simulation.traces()) == [PoolKey(0, "pinned_host")]
    assert story(simulation.trace(0, "pinned_host").events()) == ["+argument 100", "-argument 100"]


def test_a_cpu_copies_in_the_call() -> None:
    program = Program()
    (x,) = program.put(100, takes=5)
    program.get(x, takes=3)
    program.drop(x)
    trace = lower(program.trace(), CPU)
    assert story(trace.events()) == ["+argument 100", "-argument 100"]
    assert trace.time_us.tolist() == [0.0, 8.0]


# --- asynchronous dispatch --------------------------------------------------------------------


def late_launch(machine: Machine) -> RequestTrace:
    """The second launch must wait for the first; the program goes on where it can."""
    program = Program()
    (x,) = program.put(500)
    program.run(MAKE, [], [500], takes=10)
    (y,) = program.run(USE, [x], [40], takes=10)
    program.drop(x)
    program.drop(y)
    program.mark("later")
    return lower(program.trace(), replace(machine, max_inflight=1))


def test_without_a_dispatch_thread_the_host_waits() -> None:
    trace = late_launch(GPU)
    told = ["+argument 500", "+output 500", "+output 40", "-argument 500", "-output 40", "=later"]
    assert story(trace.events()) == told
    assert times(trace, "=later") == [10.0]


def test_with_a_dispatch_thread_launches_and_frees_come_later() -> None:
    """PJRT_GPU_ENABLE_ASYNC_DISPATCH: inputs are held, and outputs have no memory, until then."""
    trace = late_launch(replace(GPU, async_dispatch=True))
    told = ["+argument 500", "=later", "+output 500", "+output 40", "-output 40", "-argument 500"]
    assert sorted(story(trace.events())) == sorted(told)
    assert times(trace, "=later") == [0.0]
    assert times(trace, "+output 40") == times(trace, "-output 40") == [10.0]
    assert times(trace, "-argument 500") == [10.0]


def test_reading_waits_for_the_dispatch_thread() -> None:
    program = Program()
    program.run(MAKE, [], [500], takes=10)
    (y,) = program.run(MAKE, [], [500], takes=10)
    program.get(y, takes=3)
    program.mark("read")
    machine = replace(GPU, async_dispatch=True, max_inflight=1)
    assert times(lower(program.trace(), machine), "=read") == [23.0]


def test_the_host_waits_for_a_launch_that_waits_for_memory() -> None:
    """The second launch is due at 10, but its memory comes back at 30."""
    program = Program()
    (x,) = program.put(500)
    program.get(x, takes=30)
    program.drop(x)
    program.run(WORK, program.put(64), [40], takes=10)
    program.run(BIG, [], [512])
    program.mark("later")
    for late in (False, True):
        machine = replace(GPU, blocking_reads=False, max_inflight=1, async_dispatch=late)
        simulation = Simulation(program.trace(), machine, limited(Ideal, 2700)).run()
        assert simulation.state.failure is None
        assert times(simulation.trace(), "+temp 2048") == [30.0]
        assert times(simulation.trace(), "=later") == [0.0 if late else 30.0]


def test_the_environment_sets_the_machine() -> None:
    device = load_device("h100")
    plain = Machine.of(device, read_environment({}, "0.12.0.1"))
    assert (plain.async_dispatch, plain.separate_collective) == (False, False)
    late = Machine.of(device, read_environment({"PJRT_GPU_ENABLE_ASYNC_DISPATCH": "1"}, "0.12.0.1"))
    assert late.async_dispatch
    assert Machine.of(device, read_environment({}, "0.10.2")).separate_collective


# --- several devices, memory spaces -------------------------------------------------------------


def test_every_device_has_its_own_allocator_and_launch_thread() -> None:
    """Device 0 is busy, so that its part of a launch waits; device 1 does not wait for it. The
    host goes on when both are launched."""
    program = Program()
    program.run(MAKE, [], [500], takes=50, device=0)
    inputs = [program.put(64, device=each)[0] for each in (0, 1)]
    program.run(STEP, inputs[:1], [100, 300], device=0)
    program.run(STEP, inputs[1:], [100, 300], device=1, same_launch=True)
    program.mark("both")
    simulation = Simulation(program.trace(), replace(GPU, max_inflight=1)).run()
    first, second = simulation.trace(0), simulation.trace(1)
    assert times(first, "+temp 5000") == [50.0]
    assert times(second, "+temp 5000") == [0.0]
    assert times(first, "=both") == times(second, "=both") == [50.0]
    assert story(second.events()) == [*story(lower(step_program(), GPU).events())[:-2], "=both"]


def test_collective_memory_shares_the_pool_or_has_its_own() -> None:
    reduce = executable(
        "reduce",
        0,
        1,
        cpu=assignment(("output", 300, {"output": 0, "color": 1}), ("temp", 50), ("temp", 60)),
    )
    program = Program()
    program.run(reduce, [], [300])
    shared = lower(program.trace(), GPU)
    assert story(shared.events())[:3] == ["+output 300", "+temp 50", "+temp 60"]
    asked = [each for each in shared.events() if isinstance(each, Request)]
    assert [each.space for each in asked] == ["collective", "device", "device"]
    assert [each.alignment for each in asked] == [2 << 20, 64, 64]
    apart = Simulation(program.trace(), replace(GPU, separate_collective=True)).run()
    assert story(apart.trace(0, "collective").events()) == ["+output 300"]
    assert story(apart.trace(0).events())[:2] == ["+temp 50", "+temp 60"]


def test_results_in_host_memory_are_asked_of_the_pinned_pool() -> None:
    offload = executable(
        "offload", 0, 1, cpu=assignment(("output", 300, {"output": 0, "color": 5}), ("temp", 50))
    )
    program = Program()
    program.drop(*program.run(offload, [], [300]))
    simulation = Simulation(program.trace(), GPU).run()
    assert story(simulation.trace(0, "pinned_host").events()) == ["+output 300", "-output 300"]
    assert story(simulation.trace(0).events()) == ["+temp 50", "-temp 50"]


def test_on_chip_memory_of_a_tpu_is_no_request() -> None:
    small = executable(
        "small", 0, 1, cpu=assignment(("output", 300, {"output": 0}), ("temp", 50, {"color": 1}))
    )
    program = Program()
    program.run(small, [], [300])
    assert story(lower(program.trace(), TPU).events()) == ["+output 300"]


def test_buffers_of_a_tpu_are_padded() -> None:
    """Those from the host, and results where the buffer assignment is another target's."""
    shaped = (Aval((1000, 3), "float32"),)
    both = executable(
        "both", 0, 1, cpu=assignment(("output", 12000, {"output": 0})),
        tpu_v5e=assignment(("output", 20480, {"output": 0})),
    )  # fmt: skip
    program = Program()
    program.put(12000)
    program.put(12000, space="pinned_host")
    program.run(both, [], [12000])
    trace = replace(program.trace(), avals=shaped)

    def sizes(target: str) -> list[int]:
        machine = replace(Machine.of(load_device("v5e")), target=target)
        simulation = Simulation(trace, machine).run()
        assert story(simulation.trace(0, "pinned_host").events()) == ["+argument 12000"]
        found: list[int] = simulation.trace().size.tolist()
        return found

    assert sizes("tpu:v5e") == [16384, 20480]
    assert sizes("tpu:v4") == [16384, 20480]  # the nearest is a TPU's
    assert sizes("cpu") == [16384, 12000]
    only_cpu = replace(trace, executables=(replace(both, targets={"cpu": both.targets["cpu"]}),))
    machine = Machine.of(load_device("v5e"))
    assert lower(only_cpu, machine).size.tolist() == [16384, 16384]
    keys = replace(only_cpu, avals=(Aval((1000,), "key<fry>"),))
    assert lower(keys, machine).size.tolist() == [12000, 12000]


# --- targets and durations ----------------------------------------------------------------------


def test_the_wanted_target_is_used_and_a_substitute_is_named() -> None:
    both = executable(
        "both",
        0,
        1,
        cpu=assignment(("output", 500, {"output": 0}), ("temp", 1)),
        cuda_t4=assignment(("output", 500, {"output": 0}), ("temp", 2)),
    )
    program = Program()
    program.run(both, [], [500])
    program.run(MAKE, [], [500])

    def temp_and_name(target: str | None, kind: str = "gpu") -> tuple[str, str]:
        trace = lower(program.trace(), replace(GPU, kind=kind, target=target))  # type: ignore[arg-type]
        return story(trace.events())[1], trace.name

    assert temp_and_name("cpu") == ("+temp 1", "program on cpu")
    temp, name = temp_and_name("cuda:t4")
    assert temp == "+temp 2"
    assert "(estimate: 1 of 2 executables without a buffer assignment for cuda:t4" in name
    assert temp_and_name("cuda:h100")[0] == "+temp 2"  # the same compiler is nearer
    temp, name = temp_and_name("cpu:other", "cpu")
    assert temp == "+temp 1"
    assert "(estimate: 2 of 2 executables" in name


def test_without_any_assignment_results_are_asked_by_size_then_the_table() -> None:
    bare = executable("bare", 1, 3)
    program = Program()
    (x,) = program.put(400)
    program.run(bare, [x], [100, 300, 400], donate=[x], alias={2: x})
    trace = lower(program.trace(), GPU)
    told = ["+argument 400", "+output 300", "+output 100", "+tuple 24", "-tuple 24"]
    assert story(trace.events()) == told
    assert "estimate: 1 of 1" in trace.name


def test_durations_come_from_costs_and_rates_or_from_the_captured_run() -> None:
    """2e6 flops at 1e12 flop/s are 2 us, 3e6 bytes at 1e12 B/s are 3 us; 500 bytes at 1e8 B/s 5."""
    costly = executable("costly", 0, 1, 2e6, 3e6, cpu=assignment(("output", 500, {"output": 0})))
    program = Program()
    (y,) = program.run(costly, [], [500], takes=100)
    program.get(y, takes=200)
    program.mark("read")

    def read_at(**rates: object) -> float:
        trace = lower(program.trace(), replace(GPU, **rates))  # type: ignore[arg-type]
        return times(trace, "=read")[0]

    assert read_at() == 300.0
    assert read_at(peak=(("f32", 1e12),)) == 202.0
    assert read_at(peak=(("f32", 1e12),), bandwidth=1e12) == 203.0
    assert read_at(peak=(("f32", 1e12),), bandwidth=1e12, host_bandwidth=1e8) == 8.0


# --- running out of memory ------------------------------------------------------------------------


def limited(kind: type[Policy], limit: int) -> dict[PoolKey, Policy]:
    return {PoolKey(0, "device"): kind().start(limit)}


def test_a_run_ends_where_memory_ends() -> None:
    program = Program()
    for _ in range(3):
        program.run(MAKE, [], [500])
    simulation = Simulation(program.trace(), GPU, limited(Ideal, 1200)).run()
    failure = simulation.state.failure
    assert failure is not None
    assert (failure.row, failure.request.size, failure.in_use) == (2, 500, 1000)
    assert simulation.done
    assert simulation.step() is None
    assert story(simulation.trace().events()) == ["+output 500"] * 2


def test_a_refused_request_waits_for_copies_to_give_memory_back() -> None:
    """AllocatorRetry: for 10 s, and no longer."""
    for takes, fits in ((9e6, True), (11e6, False)):
        program = Program()
        (x,) = program.put(500)
        program.get(x, takes=takes)
        program.drop(x)
        program.run(MAKE, [], [500])
        machine = replace(GPU, blocking_reads=False)
        simulation = Simulation(program.trace(), machine, limited(Ideal, 800)).run()
        assert (simulation.state.failure is None) == fits
        if fits:
            assert times(simulation.trace(), "+output 500") == [9e6]


def test_a_tpu_frees_when_the_device_is_done() -> None:
    program = Program()
    (x,) = program.put(500)
    program.run(USE, [x], [40], takes=10)
    program.drop(x)
    program.mark("dropped")
    trace = lower(program.trace(), TPU)
    assert story(trace.events()) == ["+argument 500", "+output 40", "=dropped", "-argument 500"]
    assert times(trace, "-argument 500") == [10.0]
    assert times(lower(program.trace(), GPU), "-argument 500") == [0.0]


def test_a_tpu_waits_for_queued_deallocations_first() -> None:
    """No program is evicted for what the device will give back."""
    program = Program()
    (x,) = program.put(512)
    program.run(WORK, [x], [40], takes=10)
    program.drop(x)
    program.put(512)
    simulation = Simulation(program.trace(), TPU, limited(BestFit, 1280)).run()
    assert simulation.state.failure is None
    trace = simulation.trace()
    assert times(trace, "+argument 512") == [0.0, 10.0]
    assert "-program 512" not in story(trace.events())


def test_one_reservation_serves_all_loaded_programs() -> None:
    """It grows to the largest, and is counted apart from buffers."""
    programs = [
        executable(f"p{temp}", 0, 1, cpu=assignment(("output", 40, {"output": 0}), ("temp", temp)))
        for temp in (100, 300, 200, 300)
    ]
    program = Program()
    for each in programs:
        program.run(each, [], [40])
    simulation = Simulation(program.trace(), TPU, limited(BestFit, 4096)).run()
    told = [each for each in story(simulation.trace().events()) if "program" in each]
    assert told == ["+program 100", "-program 100", "+program 300"]
    stats = simulation.memory_stats()
    assert stats["bytes_reserved"] == stats["peak_bytes_reserved"] == 512
    assert stats["bytes_in_use"] == 4 * 256
    assert stats["bytes_limit"] == 4096


def test_loaded_programs_are_evicted_for_buffers() -> None:
    """Least recently used first; the reservation shrinks to what the others need, and the program
    is loaded again when it runs next."""
    program = Program()
    results = []
    for each in (SMALL, BIG, SMALL):
        results += program.run(each, [], [512], takes=5)
    (x,) = program.put(1024)
    program.drop(x, *results)
    program.run(BIG, [], [512])
    simulation = Simulation(program.trace(), TPU, limited(BestFit, 4352)).run()
    assert simulation.state.failure is None
    trace = simulation.trace()
    assert [each for each in story(trace.events()) if "output" not in each] == [
        "+program 1024",
        "-program 1024",
        "+program 2048",
        "-program 2048",
        "+program 1024",
        "+argument 1024",
        "-argument 1024",
        "-program 1024",
        "+program 2048",
    ]
    assert times(trace, "+argument 1024") == [15.0]  # not while they are running
    assert simulation.memory_stats()["peak_bytes_reserved"] == 2048
    assert simulation.memory_stats()["bytes_reserved"] == 2048


def test_what_eviction_frees_in_pieces_is_moved_together() -> None:
    program = Program()
    for each in (BIG, SMALL):
        program.run(each, [], [512], takes=5)
    program.put(1536)
    simulation = Simulation(program.trace(), TPU, limited(BestFit, 4096)).run()
    assert simulation.state.failure is None
    assert times(simulation.trace(), "+argument 1536") == [10.0]
    policy = simulation.state.pools[PoolKey(0, "device")].policy
    assert policy is not None
    assert policy.stats.bytes_moved > 0


def test_the_last_program_can_be_evicted_too() -> None:
    program = Program()
    program.drop(*program.run(BIG, [], [512]))
    program.put(4096)
    simulation = Simulation(program.trace(), TPU, limited(BestFit, 4096)).run()
    assert simulation.state.failure is None
    assert simulation.memory_stats()["bytes_reserved"] == 0


def test_a_program_that_is_launched_is_not_evicted() -> None:
    program = Program()
    program.put(2048)
    program.run(BIG, [], [512])
    simulation = Simulation(program.trace(), TPU, limited(BestFit, 4096)).run()
    assert simulation.state.failure is not None
    assert simulation.state.failure.request.label == "output"
    assert simulation.state.failure.reserved == 2048


def test_a_program_that_cannot_be_loaded_is_out_of_memory() -> None:
    program = Program()
    program.run(SMALL, [], [512])
    program.put(1792)
    program.run(BIG, [], [512])
    simulation = Simulation(program.trace(), TPU, limited(BestFit, 4096)).run()
    assert simulation.state.failure is not None
    assert simulation.state.failure.request.label == "program"
    assert len(simulation.state.lanes[0].loaded) == 2  # to evict the smaller would not help


def test_a_tpu_moves_buffers_together_when_free_memory_is_scattered() -> None:
    program = Program()
    buffers = program.put(*[1024] * 4)
    program.run(WORK, [buffers[3]], [512], takes=7)
    program.drop(buffers[0], buffers[2])
    (x,) = program.put(2048)
    program.drop(*buffers[1::2], x)
    simulation = Simulation(program.trace(), TPU, limited(BestFit, 5120)).run()
    assert simulation.state.failure is None
    trace = simulation.trace()
    assert "-program 512" not in story(trace.events())
    assert times(trace, "+argument 2048") == [7.0]  # after the device was idle
    policy = simulation.state.pools[PoolKey(0, "device")].policy
    assert policy is not None
    assert policy.stats.bytes_moved == 1024 + 1024  # the output's place was the best already
    # The trace holds the moves, so that it replays to the same placements.
    assert replay_requests(trace, BestFit(), limit=5120).oom is None


def test_a_gpu_does_not_move_buffers() -> None:
    program = Program()
    buffers = program.put(*[1024] * 4)
    program.drop(buffers[0], buffers[2])
    program.put(2048)
    simulation = Simulation(program.trace(), GPU, limited(BestFit, 4096)).run()
    assert simulation.state.failure is not None


# --- the run itself -------------------------------------------------------------------------------


def busy_program(seed: int) -> ProgramTrace:
    """A random program on two devices with everything in it. `UPDATE` takes any buffer."""
    random = np.random.default_rng(seed)
    program = Program()
    alive: list[tuple[int, int]] = []  # buffer of 400 bytes, device
    for _ in range(60):
        device = int(random.integers(2))
        here = [each for each in alive if each[1] == device]
        match random.integers(6):
            case 0:
                space = "pinned_host" if random.random() < 0.2 else "device"
                (x,) = program.put(400, device=device, takes=float(random.integers(9)), space=space)
                alive.append((x, device))
            case 1 | 2 if here:
                x, _ = here[random.integers(len(here))]
                donate = bool(random.integers(2))
                results = program.run(
                    UPDATE,
                    [x],
                    [400],
                    donate=[x] if donate else [],
                    alias={0: x} if donate else None,
                    device=device,
                    takes=float(random.integers(30)),
                )
                if donate:
                    alive.remove((x, device))
                alive += [(each, device) for each in results]
            case 3 if random.random() < 0.3:
                for each in (0, 1):
                    (y,) = program.run(
                        MAKE, [], [500], device=each, takes=9.0, same_launch=each == 1
                    )
                    alive.append((y, each))
            case 3 if here:
                program.get(here[0][0], device=device, takes=float(random.integers(20)))
            case 4 if here:
                gone = here[random.integers(len(here))]
                program.drop(gone[0], device=device)
                alive.remove(gone)
            case _:
                program.wait(float(random.integers(4)))
                program.mark("step")
    return program.trace()


MACHINES = [
    replace(GPU, max_inflight=3),
    replace(GPU, max_inflight=2, async_dispatch=True, dispatch_us=1.0),
    replace(GPU, max_inflight=3, blocking_reads=False, dispatch_us=0.5),
    replace(TPU, max_inflight=3, blocking_reads=False),
    CPU,
]


def contents(simulation: Simulation) -> dict[PoolKey, list[list[float]]]:
    """Everything that every allocator was asked."""
    columns = ("op", "id", "size", "label", "space", "time_us", "execution")
    return {
        key: [getattr(trace, name).tolist() for name in columns]
        for key, trace in simulation.traces().items()
    }


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(MACHINES))
def test_stepping_running_and_branching_agree(seed: int, machine: Machine) -> None:
    """Byte for byte, at every point of the run; and what is freed is what the program gave up."""
    program = busy_program(seed)
    whole = Simulation(program, machine).run()
    assert contents(Simulation(program, machine).run()) == contents(whole)
    stepped = Simulation(program, machine)
    told: dict[PoolKey, list[Event]] = {}
    branches, saved = [], []
    count = 0
    while (step := stepped.step()) is not None:
        for key, events in step.events.items():
            told.setdefault(key, []).extend(events)
        if count % 17 == 0:
            branches.append(stepped.branch())
            saved.append(stepped.save())
        count += 1
    assert contents(stepped) == contents(whole)
    assert whole.state.row == len(program)
    for key, trace in stepped.traces().items():
        assert told[key] == list(trace.events())
    for branch in branches:
        assert contents(branch.run()) == contents(whole)
    for state in saved:
        stepped.restore(state)
        assert contents(stepped.run()) == contents(whole)
    alive = [each for each in whole.state.buffers.values() if each is not None]
    live = sum(int(each.live_bytes[-1]) for each in whole.traces().values())
    reserved = sum(
        lane.reservation.row.size for lane in whole.state.lanes.values() if lane.reservation
    )
    assert live == sum(each.row.size for each in alive) + reserved


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(MACHINES), st.integers(2, 12))
def test_stepping_and_running_agree_when_memory_is_short(
    seed: int, machine: Machine, buffers: int
) -> None:
    program = busy_program(seed)

    def fresh() -> Simulation:
        policies: dict[PoolKey, Policy] = {
            PoolKey(each, "device"): BestFit().start(512 * buffers)
            for each in set(program.device.tolist())
        }
        return Simulation(program, machine, policies)

    stepped, whole = fresh(), fresh().run()
    count = 0
    while stepped.step() is not None:
        count += 1
        if count % 20 == 0:
            stepped = stepped.branch()
    assert contents(stepped) == contents(whole)
    assert stepped.state.failure == whole.state.failure
    assert whole.state.failure is not None or whole.state.row == len(program)


def test_a_branch_is_independent_and_can_run_on_another_machine() -> None:
    program = busy_program(4)
    one = Simulation(program, MACHINES[2])
    for _ in range(30):
        one.step()
    before = contents(one)
    other = one.branch()
    other.run()
    assert contents(one) == before
    assert len(other.trace()) > len(one.trace())


def test_live_policies_are_branched_with_the_run() -> None:
    """Also those whose state a deep copy could not follow: hundreds of linked chunks."""
    program = Program()
    for buffer in program.put(*range(300, 2800)):
        if buffer % 2:
            program.drop(buffer)
    program.put(*range(300, 800))
    policies = limited(Bfc, 64 << 20)
    one = Simulation(program.trace(), GPU, policies)
    for _ in range(100):
        one.step()
    two = one.branch()
    results = [each.run().memory_stats() for each in (one, two)]
    assert results[0] == results[1]

    def placed(simulation: Simulation) -> dict[int, int]:
        live = simulation.state.pools[PoolKey(0, "device")].live
        return {number: each.address for number, each in live.items()}

    assert placed(one) == placed(two)


def test_live_and_recorded_runs_ask_the_same() -> None:
    program = busy_program(11)
    for machine in MACHINES:
        live = Simulation(program, machine, limited(Ideal, 1 << 30)).run()
        assert contents(live) == contents(Simulation(program, machine).run())


def test_a_step_tells_what_happened() -> None:
    simulation = Simulation(step_program(), GPU)
    steps = []
    while (step := simulation.step()) is not None:
        steps.append(step)
    assert [each.what for each in steps] == [
        "host: transfer_in on device 0, event 0",
        "copied",
        "host: execute step on device 0, event 1",
        "host: mark on device 0, event 2",
        "host: release on device 0, event 3",
    ]
    assert story(steps[0].events[PoolKey(0, "device")]) == ["+argument 64"]
    assert steps[3].time_us == 0.0


def test_marks_reach_every_allocator_and_policy() -> None:
    class Listens(Ideal):
        """Remembers marks."""

        def setup(self) -> None:
            self.heard: list[str] = []

        def mark(self, label: str) -> None:
            self.heard.append(label)

    program = step_program()
    simulation = Simulation(program, GPU, limited(Listens, 1 << 20)).run()
    policy = simulation.state.pools[PoolKey(0, "device")].policy
    assert isinstance(policy, Listens)
    assert policy.heard == ["step"]
    assert Mark("step") in list(simulation.trace(0, "staging").events())


def test_unknown_allocators_are_named() -> None:
    simulation = Simulation(step_program(), GPU)
    with pytest.raises(InputError, match="device 3 has no allocator for device memory"):
        simulation.trace(3)
    with pytest.raises(InputError, match="no live policy"):
        simulation.memory_stats()
    with pytest.raises(InputError, match="there is no allocator"):
        Simulation(step_program(), GPU, {PoolKey(7, "device"): Ideal()})


def test_an_empty_program() -> None:
    program = Program()
    program.mark("")
    trace = lower(program.trace(), GPU)
    assert story(trace.events()) == ["="]


def test_time_never_runs_back_when_requests_wait() -> None:
    """Two copies need the staging pool, which holds one at a time."""
    program = Program()
    (x,) = program.put(500, takes=10)
    program.put(500, takes=10)
    program.get(x, takes=10)
    program.put(500, takes=10)
    policies: dict[PoolKey, Policy] = {PoolKey(0, "staging"): Ideal().start(600)}
    simulation = Simulation(program.trace(), GPU, policies).run()
    assert simulation.state.failure is None
    assert times(simulation.trace(0, "staging"), "+staging 500") == [0.0, 10.0, 20.0, 30.0]
    assert times(simulation.trace(), "+argument 500") == [0.0, 0.0, 30.0]


def test_programs_are_not_evicted_for_host_memory() -> None:
    program = Program()
    program.run(BIG, [], [512])
    program.put(600, space="pinned_host")
    policies: dict[PoolKey, Policy] = {
        PoolKey(0, "pinned_host"): BestFit().start(512),
        PoolKey(0, "device"): BestFit().start(1 << 20),
    }
    simulation = Simulation(program.trace(), TPU, policies).run()
    assert simulation.state.failure is not None
    assert simulation.state.lanes[0].loaded
