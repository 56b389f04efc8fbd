"""What a capture records of a real JAX program."""

import gc
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alloclab.policies.errors import InputError
from alloclab.scenarios.capture import capture, captured, mark
from alloclab.scenarios.script import capture_script
from alloclab.simulator.program import (
    EXECUTE,
    MARK,
    RELEASE,
    TRANSFER_IN,
    TRANSFER_OUT,
    ProgramTrace,
)
from alloclab.simulator.program_checks import check_program
from alloclab.simulator.requests import SPACES

pytestmark = pytest.mark.jax
jax = pytest.importorskip("jax")
jnp = jax.numpy


def record(program: Callable[[], Any]) -> tuple[Any, ProgramTrace]:
    """Run a program under capture; its result, and its trace, which must be valid."""
    with capture() as run:
        result = program()
    check_program(run.trace)
    return result, run.trace


def rows(trace: ProgramTrace, kind: int) -> np.ndarray:
    return np.flatnonzero(trace.kind == kind)


def operands(trace: ProgramTrace, row: int) -> Any:
    return trace.operands[trace.operand_start[row] : trace.operand_start[row + 1]].tolist()


def results(trace: ProgramTrace, row: int) -> Any:
    return trace.results[trace.result_start[row] : trace.result_start[row + 1]].tolist()


def donated(trace: ProgramTrace, row: int) -> Any:
    return trace.donated[trace.operand_start[row] : trace.operand_start[row + 1]].tolist()


def executions(trace: ProgramTrace, name: str) -> list[int]:
    """Rows of the executions of the executable whose name holds the text."""
    wanted = [n for n, each in enumerate(trace.executables) if name in each.name]
    return [int(row) for row in rows(trace, EXECUTE) if trace.executable[row] in wanted]


def live_at_end(trace: ProgramTrace) -> int:
    """Buffers that were neither released nor donated."""
    gone = set(trace.operands[np.repeat(trace.kind == RELEASE, np.diff(trace.operand_start))])
    return len(trace.buffer_bytes) - len(gone | set(trace.operands[trace.donated].tolist()))


def test_transfer_execute_read_release() -> None:
    host = np.arange(1000, dtype=np.float32)

    def program() -> float:
        x = jax.device_put(host)
        total = jax.jit(lambda x: (x * 2).sum())(x)
        return float(total)

    value, trace = record(program)
    assert value == 999000
    (put,) = rows(trace, TRANSFER_IN)
    (run,) = executions(trace, "lambda")
    (read,) = rows(trace, TRANSFER_OUT)
    x, total = results(trace, put)[0], results(trace, run)[0]
    assert operands(trace, run) == [x]
    assert operands(trace, read) == [total]
    assert trace.buffer_bytes[[x, total]].tolist() == [4000, 4]
    assert put < run < read
    assert live_at_end(trace) == 0
    (executable,) = [each for each in trace.executables if "lambda" in each.name]
    assignment = executable.targets["cpu"]
    assert assignment.bytes_of("parameter") == 4000
    assert assignment.bytes_of("output") == 4


@pytest.mark.parametrize("donate", [False, True])
def test_donation_is_an_alias(donate: bool) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=(0,) if donate else ())

    def program() -> Any:
        x = jax.device_put(np.zeros(256, np.float32))
        for _ in range(3):
            x = step(x)
        return x

    _, trace = record(program)
    runs = executions(trace, "lambda")
    assert len(runs) == 3
    for row in runs:
        old, new = operands(trace, row)[0], results(trace, row)[0]
        assert donated(trace, row) == [donate]
        assert trace.buffer_alias_of[new] == (old if donate else -1)
    released = np.concatenate([operands(trace, row) for row in rows(trace, RELEASE)] or [[]])
    assert len(released) == (0 if donate else 3)


def test_an_unusable_donation_is_none() -> None:
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        _, trace = record(
            lambda: jax.jit(lambda x: x.sum(), donate_argnums=0)(jnp.ones(64)).block_until_ready()
        )
    (row,) = executions(trace, "lambda")
    assert donated(trace, row) == [False]


def test_arrays_over_one_buffer_count_once() -> None:
    def program() -> Any:
        x = jax.device_put(np.ones(512, np.float32))
        y = jax.device_put(x, jax.devices()[0])
        z = x.addressable_data(0)
        twice = jax.jit(lambda a, b, c: a + b + c)(x, y, z)
        del x
        return twice, y

    _, trace = record(program)
    (row,) = executions(trace, "lambda")
    assert len(set(operands(trace, row))) == 1
    assert int((trace.buffer_bytes == 2048).sum()) == 2  # the array, and the sum


def test_scalars_and_numpy_arguments_are_transfers() -> None:
    f = jax.jit(lambda x, s: x * s)
    _, trace = record(lambda: f(np.ones((4, 4), np.float32), 3.0).block_until_ready())
    (row,) = executions(trace, "lambda")
    made = [buffer for put in rows(trace, TRANSFER_IN) for buffer in results(trace, put)]
    assert set(operands(trace, row)) == set(made)
    assert sorted(trace.buffer_bytes[made].tolist()) == [4, 64]


def test_sharding_over_eight_devices() -> None:
    mesh = jax.make_mesh((8,), ("x",))
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def program() -> float:
        x = jax.device_put(np.ones((16, 32), np.float32), sharded)
        w = jax.device_put(np.ones((32,), np.float32), whole)
        return float(jax.jit(lambda x, w: (x @ w).sum())(x, w))

    value, trace = record(program)
    assert value == 512
    runs = executions(trace, "lambda")
    assert sorted(trace.device[runs].tolist()) == list(range(8))
    assert len(set(trace.launch[runs].tolist())) == 1
    for row in runs:
        x, w = operands(trace, row)
        assert trace.buffer_bytes[[x, w]].tolist() == [256, 128]
        assert set(trace.buffer_device[[x, w]].tolist()) == {int(trace.device[row])}
    assert live_at_end(trace) == 0


def test_pmap() -> None:
    _, trace = record(lambda: jax.pmap(lambda x: x * 2)(np.ones((8, 4), np.float32)))
    devices = {int(trace.device[row]) for row in rows(trace, EXECUTE)}
    assert devices == set(range(8))


def programs() -> list[Any]:
    """Programs of all kinds: each returns something to compare."""
    x = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)

    def loss(w: Any) -> Any:
        return jnp.tanh(x @ w).sum()

    def effects() -> Any:
        f = jax.jit(lambda x: (jax.debug.print("{}", x.sum(), ordered=True), x + 1)[1])
        return f(f(x))

    def callback() -> Any:
        shape = jax.ShapeDtypeStruct((8, 8), np.float32)
        return jax.jit(lambda x: jax.pure_callback(lambda y: np.asarray(y) * 2, shape, x))(x)

    def cond() -> Any:
        f = jax.jit(lambda n, x: jax.lax.cond(n > 0, lambda: x + 1, lambda: x - 1))
        return f(1, x), f(-1, x)

    return [
        pytest.param(program, id=name)
        for name, program in {
            "keys": lambda: jax.random.normal(jax.random.split(jax.random.key(3))[0], (16,)),
            "raw keys": lambda: jax.random.uniform(jax.random.PRNGKey(3), (16,)),
            "vmap": lambda: jax.vmap(jax.vmap(jnp.sin))(x),
            "scan": lambda: jax.lax.scan(lambda c, r: (c + r, c * r), x[0], x),
            "while": lambda: jax.lax.while_loop(lambda v: v.sum() < 99, lambda v: v * 2, x),
            "cond": cond,
            "grad": lambda: jax.jit(jax.value_and_grad(loss))(x),
            "remat": lambda: jax.grad(jax.checkpoint(loss))(x),
            "eager": lambda: jnp.concatenate([jnp.array(x)[:3] @ x, jnp.zeros((1, 8))]).T,
            "identity": lambda: jax.jit(lambda a, b: (a, b, a + b))(jnp.array(x), x),
            "effects": effects,
            "callback": callback,
            "sort": lambda: jnp.sort(x, axis=0),
            "linalg": lambda: jnp.linalg.qr(x),
            "integers": lambda: jnp.arange(5, dtype=jnp.int8).at[2].set(7),
        }.items()
    ]


@pytest.mark.parametrize("program", programs())
def test_results_are_the_same_bits(program: Callable[[], Any]) -> None:
    jax.clear_caches()
    plain = [np.asarray(each).tobytes() for each in jax.tree.leaves(program())]
    result, trace = record(program)
    assert [np.asarray(each).tobytes() for each in jax.tree.leaves(result)] == plain
    assert len(rows(trace, EXECUTE)) > 0
    for executable in trace.executables:
        assert executable.targets["cpu"].allocations
        assert len(executable.inputs) == sum(
            each.kind == "parameter" for each in executable.targets["cpu"].allocations
        )
    del result
    gc.collect()


def test_training_is_the_same_bits_and_leaks_nothing() -> None:
    optax = pytest.importorskip("optax")

    def program() -> list[bytes]:
        optimiser = optax.adamw(1e-2)
        w = jax.random.normal(jax.random.key(0), (32, 32))
        state = optimiser.init(w)

        @jax.jit  # type: ignore[untyped-decorator]
        def step(w: Any, state: Any, x: Any) -> Any:
            value, gradient = jax.value_and_grad(lambda w: jnp.tanh(x @ w).mean())(w)
            updates, state = optimiser.update(gradient, state, w)
            return optax.apply_updates(w, updates), state, value

        losses = []
        for n in range(5):
            w, state, value = step(w, state, jax.random.normal(jax.random.key(n), (16, 32)))
            losses.append(np.asarray(value).tobytes())
            mark("step")
        return losses

    plain = program()
    losses, trace = record(program)
    assert losses == plain
    assert len(executions(trace, "step")) == 5
    assert [trace.labels[trace.label[row]] for row in rows(trace, MARK)] == ["step"] * 5
    assert live_at_end(trace) <= 4  # constants that JAX keeps


def test_functions_compiled_before_are_seen() -> None:
    f = jax.jit(lambda x: x * 3)
    x = f(jnp.ones(100))
    _, trace = record(lambda: f(x).block_until_ready())
    (row,) = executions(trace, "lambda")
    assert trace.executables[trace.executable[row]].targets["cpu"].allocations
    assert trace.buffer_bytes[operands(trace, row)].tolist() == [400]
    f(x)  # and work on afterwards


def test_deleted_arrays_are_released() -> None:
    def program() -> None:
        x = jax.device_put(np.ones(300, np.float32))
        view = x.addressable_data(0)
        x.delete()
        mark("deleted")
        assert view.is_deleted()
        y = jax.device_put(np.ones(300, np.float32))
        del y
        mark("collected")

    _, trace = record(program)
    released = rows(trace, RELEASE)
    deleted, collected = rows(trace, MARK)
    assert len(released) == 2
    assert released[0] < deleted < released[1] < collected


def test_an_exception_keeps_the_trace() -> None:
    with pytest.raises(ZeroDivisionError), capture() as run:
        jnp.ones(10).block_until_ready()
        raise ZeroDivisionError
    assert executions(run.trace, "broadcast_in_dim")
    record(lambda: jnp.zeros(3))  # everything was put back


def test_no_nesting_and_everything_put_back() -> None:
    from jax._src import array, callback, compiler, debugging, dispatch, pjit, stages
    from jax._src.interpreters import pxla

    owners: list[Any] = [array, callback, compiler, debugging, dispatch, pjit, stages, pxla, np]
    owners += [pxla.ExecuteReplicated, pxla.InputsHandler, stages.Compiled, array.ArrayImpl]

    def everything() -> list[dict[str, Any]]:
        return [dict(vars(each)) for each in owners]

    before = everything()
    with capture(), pytest.raises(InputError, match="nested"), capture():
        pass
    after = everything()
    for owner, old, new in zip(owners, before, after, strict=True):
        changed = [name for name in old | new if old.get(name) is not new.get(name)]
        assert not changed, owner


def test_threads() -> None:
    f = jax.jit(lambda x: x + 1)

    def program() -> None:
        def work() -> None:
            x = jnp.zeros(64)
            for _ in range(50):
                x = f(x)
            x.block_until_ready()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    _, trace = record(program)
    assert len(executions(trace, "lambda")) == 200
    assert (np.diff(trace.time_us) >= 0).all()


def test_the_decorator() -> None:
    result, trace = captured(lambda: float(jnp.ones(3).sum()))()
    assert result == 3.0
    assert executions(trace, "reduce_sum") or executions(trace, "sum")


def test_a_donated_buffer_is_where_its_output_is() -> None:
    """The recorded aliases, against addresses."""
    f = jax.jit(lambda a, b, c: (b * 2, c.sum(), a + 1), donate_argnums=(0, 1, 2))

    def program() -> Any:
        given = [jnp.full(64, n) + 0.0 for n in (1, 2)] + [jnp.ones(32) + 0.0]
        before = [each.unsafe_buffer_pointer() for each in given]
        with pytest.warns(UserWarning, match="donated buffers were not usable"):
            out = f(*given)
        gone = [each.is_deleted() for each in given]
        return before, gone, [each.unsafe_buffer_pointer() for each in out]

    (before, gone, after), trace = record(program)
    (row,) = executions(trace, "lambda")
    assert donated(trace, row) == gone == [True, True, False]
    taken = {
        before.index(address): output for output, address in enumerate(after) if address in before
    }
    assert sorted(taken) == [0, 1]
    for parameter, output in taken.items():
        made = results(trace, row)[output]
        assert trace.buffer_alias_of[made] == operands(trace, row)[parameter]


def test_an_assembled_array_keeps_its_pieces() -> None:
    devices = jax.devices()[:4]
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))

    def program() -> Any:
        pieces = [jax.device_put(np.full(25, n, np.float32), d) for n, d in enumerate(devices)]
        whole = jax.make_array_from_single_device_arrays((100,), split, pieces)
        del pieces
        mark("assembled")
        return float(jax.jit(jnp.sum)(whole))

    value, trace = record(program)
    assert value == 150
    assert (trace.buffer_bytes == 100).sum() == 4
    (assembled,) = rows(trace, MARK)
    assert (rows(trace, RELEASE) > assembled).all()


def random_program(seed: int) -> list[Any]:
    """Arrays that are alive after random transfers, executions, views, deletions."""
    random = np.random.default_rng(seed)
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    split, whole = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis)) for axis in ("x", None)
    )
    places = [split, whole, devices[0], devices[3]]
    alive: list[Any] = []

    def addresses(array: Any) -> set[Any]:
        return {
            (shard.device.id, shard.data.unsafe_buffer_pointer())
            for shard in array.addressable_shards
        }

    def give_up(array: Any) -> Any:
        """Take the array, and those over the same memory, from the list; None if a part is used."""
        mine = addresses(array)
        over = [each for each in alive if addresses(each) & mine]
        if any(addresses(each) != mine for each in over):
            return None
        alive[:] = [each for each in alive if not any(each is other for other in over)]
        return array

    def step() -> None:
        host = np.full((16, 8), random.random(), np.float32)
        action = random.integers(12)
        if action == 0 or not alive:
            alive.append(jax.device_put(host, places[random.integers(4)]))
            return
        x = alive[random.integers(len(alive))]
        if action == 1:
            alive.extend(jax.jit(lambda x: (x + 1, x * 2))(x))
        elif action == 2:
            alive.append(jax.jit(lambda x: x)(x))
        elif action == 3:
            if give_up(x) is not None:
                alive.append(jax.jit(lambda x: x * 2, donate_argnums=0)(x))
        elif action == 4:
            place = places[random.integers(4)]
            alive.append(jax.device_put(x, whole if x.shape[0] % 8 else place))
        elif action == 5:
            alive.append(x.addressable_shards[random.integers(len(x.addressable_shards))].data)
        elif action == 6:
            alive.append(x.addressable_data(0))
        elif action == 7:
            if give_up(x) is not None:
                x.delete()
        elif action == 8 and len(x.addressable_shards) == 8:
            pieces = [shard.data for shard in x.addressable_shards]
            alive.append(jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces))
        elif action == 9:
            np.asarray(x)
        elif action == 10:
            alive.append(jax.device_put(x, x.sharding, may_alias=bool(random.integers(2))))
        else:
            alive.remove(x) if len(alive) == 1 else alive.pop(random.integers(len(alive)))

    for _ in range(50):
        step()
    return alive


@pytest.mark.parametrize("seed", range(6))
def test_the_live_buffers_are_the_real_ones(seed: int) -> None:
    """What is recorded as alive at the end of a random program, against addresses."""
    gc.collect()
    before = [each for each in jax.live_arrays() if each.nbytes]
    alive, trace = record(lambda: (random_program(seed), gc.collect())[0])
    real = {
        (shard.device.id, shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
        for array in (*alive, *before)
        for shard in array.addressable_shards
    }
    gone = set(trace.operands[np.repeat(trace.kind == RELEASE, np.diff(trace.operand_start))])
    gone |= set(trace.operands[trace.donated])
    live = np.array(sorted(set(range(len(trace.buffer_bytes))) - gone), np.int64)
    found = zip(trace.buffer_device[live].tolist(), trace.buffer_bytes[live].tolist(), strict=True)
    assert sorted(found) == sorted((device, size) for device, _, size in real)


def test_functions_compiled_ahead_of_time() -> None:
    x = jnp.ones(50)
    earlier = jax.jit(lambda x: x * 5).lower(x).compile()
    earlier(x), earlier(x)  # its fast path is in place now

    def program() -> Any:
        now = jax.jit(lambda x: x * 7, donate_argnums=0).lower(x).compile()
        y = earlier(earlier(x))
        return now(now(y))

    result, trace = record(program)
    assert float(result[0]) == 5 * 5 * 7 * 7
    runs = executions(trace, "lambda")
    assert [donated(trace, row) for row in runs] == [[False], [False], [True], [True]]
    assert all(each.targets["cpu"].allocations for each in trace.executables)
    earlier(x)


def test_mutable_references() -> None:
    if not hasattr(jax, "new_ref"):
        pytest.skip("this JAX has no mutable references")

    def program() -> Any:
        state = jax.new_ref(jnp.zeros(100))

        def add_step(x: Any) -> Any:
            state[...] += x
            return state[...].sum()

        step = jax.jit(add_step)
        step(1.0), step(2.0)
        return float(step(3.0))

    value, trace = record(program)
    assert value == 600
    runs = executions(trace, "step")
    assert len(runs) == 3
    for row, later in itertools.pairwise(runs):
        old, new = operands(trace, row)[-1], results(trace, row)[-1]
        assert trace.buffer_alias_of[new] == old
        assert operands(trace, later)[-1] == new
    assert live_at_end(trace) <= 1  # the state, which the traced function holds


def test_a_host_callback_is_the_hosts() -> None:
    shape = jax.ShapeDtypeStruct((100,), np.float32)

    def host(x: Any) -> Any:
        return np.asarray(jnp.sin(np.asarray(x)))

    def program() -> Any:
        f = jax.jit(lambda x: jax.pure_callback(host, shape, x * 2))
        return f(jnp.zeros(100)).block_until_ready()

    _, trace = record(program)
    assert not executions(trace, "sin")
    assert not rows(trace, TRANSFER_OUT).size
    assert (trace.buffer_bytes == 400).sum() == 2


def test_what_only_prints_is_an_execution() -> None:
    def program() -> None:
        jax.jit(lambda: jax.debug.print("done"))()
        jax.effects_barrier()

    _, trace = record(program)
    assert len(executions(trace, "lambda")) == 1


def test_an_array_is_read_once() -> None:
    def program() -> None:
        x = jax.device_put(np.ones(10, np.float32))
        y = x.sum()
        np.asarray(x), np.array(x), x.tolist(), np.asanyarray(x)
        np.array([y, y]), float(y), y.item()

    _, trace = record(program)
    assert len(rows(trace, TRANSFER_OUT)) == 2


def test_host_memory_is_not_the_devices() -> None:
    device = jax.devices()[0]

    def program() -> Any:
        kinds = [each.kind for each in device.addressable_memories()]
        return [
            jax.device_put(
                np.ones(9, np.float32),
                jax.sharding.SingleDeviceSharding(device, memory_kind=kind),
            )
            for kind in kinds
        ], kinds

    (_, kinds), trace = record(program)
    spaces = [SPACES[each] for each in trace.buffer_space[trace.buffer_bytes == 36]]
    assert spaces == ["device" if kind == "device" else "pinned_host" for kind in kinds]


def test_a_fingerprint_is_the_same_wherever_the_function_stands() -> None:
    def first(x: Any) -> Any:
        return x * 2

    def again(x: Any) -> Any:
        return x * 2

    def other(x: Any) -> Any:
        return x * 3

    _, trace = record(lambda: [jax.jit(f)(jnp.ones(5)) for f in (first, again, other)])
    prints = {each.name: each.fingerprint for each in trace.executables}
    assert prints["jit_first"] == prints["jit_again"] != prints["jit_other"]


def test_a_dump_that_the_program_asked_for_is_there(tmp_path: Path) -> None:
    options = {"xla_dump_to": str(tmp_path)}
    _, trace = record(lambda: jax.jit(lambda x: x + 4, compiler_options=options)(jnp.ones(3)))
    assert list(tmp_path.glob("*lambda*after_optimizations.txt"))
    assert all(each.targets["cpu"].values is not None for each in trace.executables)


def test_a_script_runs_as_it_would(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("FACTOR = 3\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, threading\n"
        "import jax, jax.numpy as jnp\n"
        "from beside import FACTOR\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--size', '7']\n"
        "def late():\n"
        "    threading.Event().wait(0.2)\n"
        "    jnp.ones(int(sys.argv[2])) * FACTOR\n"
        "threading.Thread(target=late).start()\n"
        "sys.exit(0)\n"
    )
    argv, path = list(sys.argv), list(sys.path)
    trace, error = capture_script(script, ["--size", "7"])
    assert error is None
    assert executions(trace, "multiply")  # Python waits for threads; so does the capture
    assert 7 * 4 in trace.buffer_bytes
    assert (sys.argv, sys.path) == (argv, path)
    script.write_text("import jax\njax.numpy.ones(5)\nraise KeyError('here')\n")
    trace, error = capture_script(script)
    assert isinstance(error, KeyError)
    assert executions(trace, "broadcast_in_dim")
    script.write_text("import sys\nsys.exit('no data')\n")
    assert isinstance(capture_script(script)[1], SystemExit)
