"""Train a small language model: the demo's program, plain JAX and optax.

python examples/transformer.py --steps 4 --donate
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import alloclab

Parameters = dict[str, Any]
VOCABULARY = 512


def initialise(key: jax.Array, layers: int, width: int) -> Parameters:
    """Parameters of a decoder with ``layers`` blocks of ``width`` channels."""

    def matrix(key: jax.Array, rows: int, columns: int) -> Any:
        return jax.random.normal(key, (rows, columns)) / rows**0.5

    keys = iter(jax.random.split(key, 4 * layers + 2))
    return {
        "embedding": matrix(next(keys), VOCABULARY, width),
        "head": matrix(next(keys), width, VOCABULARY),
        "blocks": [
            {
                "qkv": matrix(next(keys), width, 3 * width),
                "out": matrix(next(keys), width, width),
                "up": matrix(next(keys), width, 4 * width),
                "down": matrix(next(keys), 4 * width, width),
            }
            for _ in range(layers)
        ],
    }


def normalise(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attention(block: Parameters, x: jax.Array, heads: int) -> Any:
    batch, length, width = x.shape
    q, k, v = jnp.split(x @ block["qkv"], 3, -1)
    q, k, v = (each.reshape(batch, length, heads, width // heads) for each in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ block["out"]


def loss(parameters: Parameters, tokens: jax.Array, heads: int) -> Any:
    """Mean cross entropy of each next token; tokens are int32[batch, length + 1]."""
    x = parameters["embedding"][tokens[:, :-1]]
    for block in parameters["blocks"]:
        x = x + attention(block, normalise(x), heads)
        x = x + jax.nn.gelu(normalise(x) @ block["up"]) @ block["down"]
    logits = normalise(x) @ parameters["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--donate", action="store_true", help="donate parameters and state")
    options = parser.parse_args()

    optimiser = optax.adamw(1e-3)

    @partial(jax.jit, donate_argnums=(0, 1) if options.donate else ())
    def train_step(
        parameters: Parameters, state: optax.OptState, tokens: jax.Array
    ) -> tuple[Parameters, optax.OptState, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, tokens, options.heads)
        updates, state = optimiser.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    key = jax.random.key(0)
    parameters = jax.jit(initialise, static_argnums=(1, 2))(key, options.layers, options.width)
    state = jax.jit(optimiser.init)(parameters)
    for step in range(options.steps):
        shape = (options.batch, options.length + 1)
        tokens = jax.random.randint(jax.random.fold_in(key, step), shape, 0, VOCABULARY)
        parameters, state, value = train_step(parameters, state, tokens)
        print(f"step {step}: loss {value:.4f}")
        alloclab.mark("step")


if __name__ == "__main__":
    main()
