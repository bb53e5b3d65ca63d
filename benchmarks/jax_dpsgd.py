"""DP-SGD in JAX for the networks of `end_to_end`, vmapped and jitted, on the same weights as the torch models: a fast
peer.

Needs `pip install jax`. Import this module before anything else imports jax: it asks XLA for one CPU thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from .models import CifarCNN, ImdbEmbedding, ImdbLSTM, MnistCNN

Params = dict[str, jax.Array]


def convolution(x: jax.Array, layer: nn.Conv2d, weight: jax.Array, bias: jax.Array) -> jax.Array:
    padding = [(p, p) for p in layer.padding]
    y = jax.lax.conv_general_dilated(x, weight, layer.stride, padding, dimension_numbers=("NCHW", "OIHW", "NCHW"))
    return y + bias[:, None, None]


def sequential(model: nn.Sequential, params: Params, x: jax.Array) -> jax.Array:
    """The layers that the two convolutional networks are made of."""
    for name, layer in model.named_children():
        if isinstance(layer, nn.Conv2d):
            x = convolution(x, layer, params[f"{name}.weight"], params[f"{name}.bias"])
        elif isinstance(layer, nn.Linear):
            x = x @ params[f"{name}.weight"].T + params[f"{name}.bias"]
        elif isinstance(layer, nn.ReLU):
            x = jax.nn.relu(x)
        elif isinstance(layer, nn.MaxPool2d):
            window, stride = (1, 1, layer.kernel_size, layer.kernel_size), (1, 1, layer.stride, layer.stride)
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, stride, "VALID")
        elif isinstance(layer, nn.AvgPool2d):
            window = (1, 1, layer.kernel_size, layer.kernel_size)
            x = jax.lax.reduce_window(x, 0.0, jax.lax.add, window, window, "VALID") / layer.kernel_size**2
        elif isinstance(layer, nn.AdaptiveAvgPool2d):
            x = x.mean((2, 3), keepdims=True)
        else:
            x = x.reshape(len(x), -1)
    return x


def lstm(params: Params, x: jax.Array) -> jax.Array:
    """(B, T, d) -> (B, T, p), torch's order of gates."""
    projected = x @ params["lstm.weight_ih_l0"].T + params["lstm.bias_ih_l0"] + params["lstm.bias_hh_l0"]
    recurrent = params["lstm.weight_hh_l0"].T

    def cell(state: tuple[jax.Array, jax.Array], z: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        h, c = state
        i, f, g, o = jnp.split(z + h @ recurrent, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((len(x), recurrent.shape[0]))
    return jax.lax.scan(cell, (zero, zero), projected.swapaxes(0, 1))[1].swapaxes(0, 1)


def logits_of(model: nn.Module) -> Callable[[Params, jax.Array], jax.Array]:
    """The JAX twin of a torch network, in its parameters' names."""
    if isinstance(model, (MnistCNN, CifarCNN)):
        return lambda params, x: sequential(model, params, x)
    assert isinstance(model, (ImdbEmbedding, ImdbLSTM))

    def text(params: Params, x: jax.Array) -> jax.Array:
        x = params["embedding.weight"][x]
        x = lstm(params, x) if isinstance(model, ImdbLSTM) else x
        return x.mean(1) @ params["head.weight"].T + params["head.bias"]

    return text


def parameters_of(model: nn.Module) -> Params:
    return {name: jnp.asarray(p.detach().numpy()) for name, p in model.named_parameters()}


def make_step(
    model: nn.Module, max_grad_norm: float, noise_multiplier: float, learning_rate: float
) -> Callable[[Params, jax.Array, jax.Array, jax.Array], Params]:
    """A jitted f(params, x, y, key) -> params, one step of DP-SGD."""
    logits = logits_of(model)

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(logits(params, x[None])[0])[y]

    def clipped(params: Params, x: jax.Array, y: jax.Array) -> Params:
        gradient = jax.grad(loss)(params, x, y)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradient.values()))
        return {name: g * jnp.minimum(1.0, max_grad_norm / norm) for name, g in gradient.items()}

    @jax.jit
    def step(params: Params, x: jax.Array, y: jax.Array, key: jax.Array) -> Params:
        sums = {name: g.sum(0) for name, g in jax.vmap(clipped, (None, 0, 0))(params, x, y).items()}
        keys = dict(zip(sums, jax.random.split(key, len(sums)), strict=True))
        noised = {
            name: g + noise_multiplier * max_grad_norm * jax.random.normal(keys[name], g.shape)
            for name, g in sums.items()
        }
        return {name: p - learning_rate * noised[name] / len(x) for name, p in params.items()}

    return step


def phases(
    model: nn.Module, x: np.ndarray, y: np.ndarray, max_grad_norm: float, noise_multiplier: float, learning_rate: float
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A contender's two phases, of which the first does everything."""
    step = make_step(model, max_grad_norm, noise_multiplier, learning_rate)
    with torch.no_grad():
        expected = model(torch.from_numpy(x[:2])).numpy()
    x, y = jnp.asarray(x), jnp.asarray(y)
    assert np.allclose(logits_of(model)(parameters_of(model), x[:2]), expected, rtol=1e-3, atol=1e-4), (
        "not the same network"
    )
    state = {"params": parameters_of(model), "key": jax.random.key(0)}

    def run() -> None:
        state["key"], key = jax.random.split(state["key"])
        state["params"] = jax.block_until_ready(step(state["params"], x, y, key))

    return run, lambda: None
