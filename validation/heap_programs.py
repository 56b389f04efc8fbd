"""Small JAX programs whose temp blocks differ in kind: loops, branches, donation, recomputation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

Tree = Any


@dataclass(frozen=True)
class Program:
    """A function to compile: its arguments as shapes, and which of them are donated."""

    function: Callable[..., Any]
    arguments: tuple[Tree, ...]
    donated: tuple[int, ...] = ()


def programs(scale: int = 1) -> dict[str, Program]:
    """The programs by name, their matrices ``scale`` times as wide.

    At 1 a TPU keeps nearly all of their values in VMEM; at 32 it needs HBM.
    """
    f32 = partial(_shape, dtype=jnp.float32)
    width, rows = 128 * scale, 64 * scale
    square = f32(width, width)
    weights = (f32(width, 2 * width), f32(2 * width, width), f32(width, 16))
    batch = (f32(rows, width), f32(rows, 16))
    tokens = (_shape(8, 65, dtype=jnp.int32),)
    kernels = (f32(3, 3, 8, 2 * rows), f32(3, 3, 2 * rows, rows), f32(3, 3, rows, rows))
    heads = (f32(4, width, 8, 32),) * 3
    recurrent = (f32(width, width), f32(rows, width)), f32(24, 16, rows)
    key = _shape(2, dtype=jnp.uint32)
    decoder, narrow = _decoder(width), _decoder(width // 2)
    return {
        "mlp": Program(_mlp, (weights, batch[0])),
        "mlp_grad": Program(jax.value_and_grad(_mlp_loss), (weights, *batch)),
        **_steps("adamw", _mlp_loss, weights, batch),
        "conv_grad": Program(jax.grad(_conv_loss), (kernels, f32(8, 32, 32, 8))),
        "rnn_scan_grad": Program(jax.grad(_rnn_loss), recurrent),
        **_steps("transformer", _decoder_loss, decoder, tokens),
        "transformer_remat": Program(
            jax.value_and_grad(partial(_decoder_loss, remat=True)), (decoder, *tokens)
        ),
        "scan_layers_remat": Program(
            jax.grad(_scan_layers), (f32(6, width, width), f32(rows, width))
        ),
        "while_loop": Program(_while_loop, (square,)),
        "nested_loops": Program(_nested_loops, (square,)),
        "switch": Program(_switch, (_shape(dtype=jnp.int32), square, square)),
        "attention": Program(_attention, heads),
        "matmul_chain": Program(_matmul_chain, (f32(8, width, width), [f32(8, width, width)] * 6)),
        "sort": Program(_sort, (square,)),
        "cholesky": Program(_cholesky, (square,)),
        "random": Program(_random, (key, square)),
        **_steps("narrow", _decoder_loss, narrow, tokens),
    }


def _shape(*dimensions: int, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, dtype)


def _steps(
    name: str, loss: Callable[..., jax.Array], parameters: Tree, data: tuple[Tree, ...]
) -> dict[str, Program]:
    """A training step with AdamW, with its parameters and state donated and not."""
    optimiser = optax.adamw(1e-3)

    def step(parameters: Tree, state: Tree, *data: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, *data)
        updates, state = optimiser.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    arguments = (parameters, jax.eval_shape(optimiser.init, parameters), *data)
    return {
        f"{name}_step": Program(step, arguments),
        f"{name}_step_donated": Program(step, arguments, donated=(0, 1)),
    }


def _decoder(width: int) -> Tree:
    """Shapes of the parameters of a decoder with three blocks."""
    f32 = partial(_shape, dtype=jnp.float32)
    block = {
        "qkv": f32(width, 3 * width),
        "out": f32(width, width),
        "up": f32(width, 4 * width),
        "down": f32(4 * width, width),
    }
    return {"embedding": f32(512, width), "blocks": [block] * 3}


def _mlp(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for each in weights[:-1]:
        x = jnp.tanh(x @ each)
    return x @ weights[-1]


def _mlp_loss(weights: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((_mlp(weights, x) - y) ** 2)


def _conv_loss(kernels: Tree, x: jax.Array) -> jax.Array:
    for each in kernels:
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(
                x, each, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
    return jnp.mean(x**2)


def _rnn_loss(weights: Tree, xs: jax.Array) -> jax.Array:
    def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ weights[0] + x @ weights[1])
        return h, h

    _, hs = jax.lax.scan(cell, jnp.zeros((xs.shape[1], len(weights[0]))), xs)
    return jnp.mean(jnp.square(hs))


def _block(block: Tree, x: jax.Array) -> jax.Array:
    rows, length, width = x.shape
    heads = (jnp.split(x @ block["qkv"], 3, -1)[i].reshape(rows, length, 4, -1) for i in range(3))
    q, k, v = heads
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    x = x + mixed.reshape(rows, length, width) @ block["out"]
    return jnp.add(x, jax.nn.gelu(x @ block["up"]) @ block["down"])


def _decoder_loss(parameters: Tree, tokens: jax.Array, remat: bool = False) -> jax.Array:
    x = parameters["embedding"][tokens[:, :-1]]
    for each in parameters["blocks"]:
        x = (jax.checkpoint(_block) if remat else _block)(each, x)
    logits = x @ parameters["embedding"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def _scan_layers(layers: jax.Array, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ weight) @ weight.T + x, None

    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, layers)[0])


def _while_loop(x: jax.Array) -> jax.Array:
    def body(carry: Tree) -> Tree:
        step, x, y = carry
        y = jnp.sin(x) @ y
        return step + 1, y @ x.T, y

    result: jax.Array = jax.lax.while_loop(lambda carry: carry[0] < 10, body, (0, x, x * 2))[1]
    return result


def _nested_loops(x: jax.Array) -> Tree:
    def outer(carry: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        inner = jax.lax.fori_loop(0, 3, lambda i, z: jnp.cos(z) @ carry + i, carry * 2)
        return inner @ carry, inner.sum()

    return jax.lax.scan(outer, x, None, length=4)


def _switch(index: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    branches = (
        lambda x, y: (x @ y) @ (x + y),
        lambda x, y: jnp.tanh(x) @ jnp.tanh(y.T) @ x,
        lambda x, y: jnp.sort(x * y),
    )
    chosen: jax.Array = jax.lax.switch(index, branches, x, y)
    return chosen + x


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return weights @ v.transpose(0, 2, 1, 3)


def _matmul_chain(x: jax.Array, weights: list[jax.Array]) -> Tree:
    sums = []
    for each in weights:
        x = jnp.tanh(jnp.einsum("bij,bjk->bik", x, each))
        sums.append(x.sum(1))
    return x, jnp.stack(sums)


def _sort(x: jax.Array) -> Tree:
    order = jnp.argsort(x, axis=-1)
    return jnp.take_along_axis(x, order, -1) @ jnp.sort(x.T, axis=0), jax.lax.top_k(x, 5)


def _cholesky(a: jax.Array) -> jax.Array:
    lower = jnp.linalg.cholesky(a @ a.T + jnp.eye(len(a)))
    return jax.scipy.linalg.solve_triangular(lower, a, lower=True)


def _random(key: jax.Array, x: jax.Array) -> jax.Array:
    first, second = jax.random.split(key)
    return jax.random.normal(first, x.shape) @ x + jax.random.uniform(second, x.shape)
