"""The real CPU runtime as an oracle: what one execution asks of the C library's allocator.

    python -m alloclab.validation.cpu_runtime

prints, for small programs of many kinds, the requests predicted from the buffer assignment and
those that a shim under posix_memalign saw.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alloclab.simulator.program import EXECUTE
from alloclab.simulator.requests import ALLOC
from alloclab.simulator.runtime import lower
from alloclab.simulator.runtime_plan import Machine
from alloclab.validation.oracle_fetch import OracleUnavailable

#: Room for the sizes of one execution; as in memalign_shim.c.
_ROOM = 1 << 16


class Execution(NamedTuple):
    """Sizes in bytes, in order: as predicted, and as the runtime asked for them."""

    program: str
    planned: list[int]
    seen: list[int]


def observe() -> list[Execution]:
    """Run every program once under the shim, in a process of its own.

    Raises:
        OracleUnavailable: there is no C compiler, or this system has no LD_PRELOAD.
    """
    with tempfile.TemporaryDirectory() as folder:
        shim = _build(Path(folder))
        environment = os.environ | {"LD_PRELOAD": str(shim), "JAX_PLATFORMS": "cpu"}
        environment.pop("XLA_FLAGS", None)
        done = subprocess.run(
            [sys.executable, "-m", "alloclab.validation.cpu_runtime", str(shim)],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the observed process failed:\n{done.stderr}")
    return [Execution(*row) for row in json.loads(done.stdout)]


def _build(folder: Path) -> Path:
    if not sys.platform.startswith("linux"):
        raise OracleUnavailable("the CPU runtime is observed through LD_PRELOAD, on Linux only")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise OracleUnavailable("the CPU runtime's shim needs a C compiler; install gcc or set CC")
    shim = folder / "memalign_shim.so"
    source = Path(__file__).with_name("memalign_shim.c")
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(shim), "-ldl"], check=True
    )
    return shim


def _programs() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]]:
    """Function, arguments and donated arguments by name."""
    import jax
    import jax.numpy as jnp
    import optax

    key = jax.random.key(0)
    x = jax.random.normal(key, (32, 64))
    layers = [jax.random.normal(key, shape) for shape in ((64, 128), (128, 128), (128, 10))]
    optimiser = optax.adam(1e-3)

    def mlp(layers: Any, x: Any) -> Any:
        for each in layers[:-1]:
            x = jnp.tanh(x @ each)
        return x @ layers[-1]

    def step(layers: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda p: (mlp(p, x) ** 2).mean())(layers)
        updates, state = optimiser.update(gradients, state)
        return optax.apply_updates(layers, updates), state, value

    def rnn(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, row: (jnp.tanh(h @ w + row), h.sum()), x[0], x)

    def attention(q: Any) -> Any:
        return jax.nn.softmax(q @ q.T / 8) @ q

    def convolve(x: Any) -> Any:
        image, kernel = x.reshape(1, 1, 32, 64), jnp.ones((4, 1, 3, 3))
        return jax.lax.conv(image, kernel, (1, 1), "SAME")

    state = optimiser.init(layers)
    return {
        "add": (lambda x: x + 1, (x,), ()),
        "add, donated": (lambda x: x + 1, (x,), (0,)),
        "several outputs": (lambda x: (x.sum(), x * 2, x[0], x.T @ x), (x,), ()),
        "mlp": (mlp, (layers, x), ()),
        "mlp gradient": (jax.grad(lambda p, x: mlp(p, x).sum()), (layers, x), ()),
        "adam step": (step, (layers, state, x), ()),
        "adam step, donated": (step, (layers, state, x), (0, 1)),
        "rnn": (rnn, (jnp.eye(64), x), ()),
        "rnn gradient": (jax.grad(lambda w, x: rnn(w, x)[1].sum()), (jnp.eye(64), x), ()),
        "attention": (attention, (x,), ()),
        "attention gradient": (jax.grad(lambda q: attention(q).sum()), (x,), ()),
        "convolution": (convolve, (x,), ()),
        "loop": (lambda x: jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(x) @ x.T @ x, x), (x,), ()),
        "swap, donated": (lambda a, b: (b * 2, a + 1), (x, x + 1), (0, 1)),
    }


def _observe_here(shim: str) -> list[Execution]:
    """In the observed process: plan and run each program."""
    import jax

    from alloclab.scenarios.capture import capture

    library = ctypes.CDLL(shim)
    sizes = np.zeros(_ROOM, np.int64)
    found = []
    for name, (function, arguments, donated) in _programs().items():
        jitted = jax.jit(function, donate_argnums=donated)

        def fresh(arguments: Any = arguments) -> Any:
            return jax.block_until_ready(jax.tree.map(lambda leaf: leaf + 0, arguments))

        with capture() as run:
            jax.block_until_ready(jitted(*fresh()))
        requests = lower(run.trace, Machine("cpu"))
        launch = run.trace.launch[run.trace.kind == EXECUTE][-1]
        asked = (requests.op == ALLOC) & (requests.execution == launch)
        planned = requests.size[asked].tolist()
        jax.block_until_ready(jitted(*fresh()))  # compiles
        ready = fresh()
        library.shim_start()
        jax.block_until_ready(jitted(*ready))
        count = library.shim_stop(sizes.ctypes.data_as(ctypes.c_void_p))
        found.append(Execution(name, planned, sizes[:count].tolist()))
    return found


def main() -> None:
    """Print the comparison; in the observed process, the raw result."""
    if len(sys.argv) > 1:
        print(json.dumps(_observe_here(sys.argv[1])))
        return
    for each in observe():
        verdict = "equal" if each.planned == each.seen else f"DIFFERS: {each.seen}"
        print(f"{each.program}: planned {each.planned}, {verdict}")


if __name__ == "__main__":
    main()
