"""What capture costs: the same training step with and without it, side by side.

    python benchmarks/capture.py [--steps 30] [--rounds 5]

Prints the median time of a step without capture, the median with it, and their ratio, for an MLP
with adamw at several widths. Steps with and without capture take turns, round by round, so that
both see the same machine. The first steps of a round, which compile, are not counted.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from alloclab.scenarios.capture import capture

WARM_UP = 3


def training(hidden: int, batch: int) -> tuple[Callable[..., Any], Any]:
    """A jitted adamw step of a three-layer perceptron, and its first state."""
    import jax
    import jax.numpy as jnp
    import optax

    optimiser = optax.adamw(1e-3)
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(key, (hidden, hidden)) * 0.02 for key in keys]
    biases = [jnp.zeros(hidden) for _ in keys]

    def loss(parameters: Any, x: Any) -> Any:
        for w, b in zip(*parameters, strict=True):
            x = jnp.tanh(x @ w + b)
        return (x**2).mean()

    @jax.jit
    def step(parameters: Any, state: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(parameters, x)
        updates, state = optimiser.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    parameters = (weights, biases)
    return step, (parameters, optimiser.init(parameters), np.ones((batch, hidden), np.float32))


def step_times(hidden: int, batch: int, steps: int, *, captured: bool) -> list[float]:
    """Seconds of each step of a training loop, its loss read on the host."""
    step, (parameters, state, x) = training(hidden, batch)
    times = []
    with capture() if captured else nullcontext():
        for _ in range(WARM_UP + steps):
            began = time.perf_counter()
            parameters, state, value = step(parameters, state, x)
            float(value)
            times.append(time.perf_counter() - began)
    return times[WARM_UP:]


def main() -> None:
    """Measure and print one row per width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for hidden, batch in ((32, 8), (256, 64), (1024, 256)):
        plain: list[float] = []
        recorded: list[float] = []
        for _ in range(options.rounds):
            plain += step_times(hidden, batch, options.steps, captured=False)
            recorded += step_times(hidden, batch, options.steps, captured=True)
        without, with_ = statistics.median(plain) * 1e3, statistics.median(recorded) * 1e3
        print(
            f"hidden {hidden:4}, batch {batch:3}: {without:8.3f} ms a step, captured"
            f" {with_:8.3f} ms, ratio {with_ / without:.2f}"
        )


if __name__ == "__main__":
    main()
