"""What a capture records of a real JAX program."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from alloclab.policies.errors import InputError
from alloclab.scenarios.capture import capture, captured, mark
from alloclab.simulator.program import (
    EXECUTE,
    MARK,
    RELEASE,
    TRANSFER_IN,
    TRANSFER_OUT,
    ProgramTrace,
)
from alloclab.simulator.program_checks import check_program

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
        x.delete()
        mark("after")

    _, trace = record(program)
    (release,) = rows(trace, RELEASE)
    (after,) = rows(trace, MARK)
    assert release < after


def test_an_exception_keeps_the_trace() -> None:
    with pytest.raises(ZeroDivisionError), capture() as run:
        jnp.ones(10).block_until_ready()
        raise ZeroDivisionError
    assert executions(run.trace, "broadcast_in_dim")
    record(lambda: jnp.zeros(3))  # everything was put back


def test_no_nesting_and_everything_put_back() -> None:
    from jax._src import pjit
    from jax._src.interpreters import pxla

    before = (pxla.ExecuteReplicated.__call__, pjit._get_fastpath_data, np.asarray)
    with capture(), pytest.raises(InputError, match="nested"), capture():
        pass
    assert before == (pxla.ExecuteReplicated.__call__, pjit._get_fastpath_data, np.asarray)


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
