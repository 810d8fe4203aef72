"""Experts whose width is split over a mesh axis compute what whole ones compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.compare import worst
from jax.sharding import AxisType

from bridge.models import DecoderConfig, MoEConfig
from bridge.models import _moe as moe_module
from bridge.models._moe import Experts

ROWS, EMBED, WIDTH, EXPERTS = 12, 6, 8, 3
# Two parts of a width summed apart, in float64.
ROUNDING = 1e-12


def experts(*, biased: bool, gated: bool) -> Experts:
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=EMBED,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        gated_mlp=gated,
        initializer_range=1.0,
        moe=MoEConfig(EXPERTS, 1, WIDTH, expert_bias=biased),
    )
    module = Experts(config, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    if biased:
        random = np.random.default_rng(1)
        for bias in (module.gate_up_bias, module.down_bias):
            bias[...] = jnp.asarray(random.normal(size=bias.shape))
    return module


def results(module: Experts, sizes):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, EMBED)))
    graph, params = nnx.split(module, nnx.Param)

    def loss(params, x):
        out = nnx.merge(graph, params)(x, sizes)
        return jnp.square(out).sum(), out

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)


@pytest.mark.parametrize("sizes", [np.full(3, 4, np.int32), jnp.asarray([5, 1, 6])])
@pytest.mark.parametrize("form", ["plain", "gated", "biased"])
def test_experts_split_over_a_mesh_axis_are_those_of_one_device(form, sizes):
    mesh = jax.make_mesh(
        (2,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    with jax.enable_x64(True):
        module = experts(biased=form == "biased", gated=form != "plain")
        want = results(module, sizes)
        with jax.set_mesh(mesh):
            assert worst(results(module, sizes), want) < ROUNDING


def test_a_part_of_the_width_that_is_not_summed_is_seen(monkeypatch):
    with jax.enable_x64(True):
        module = experts(biased=False, gated=True)
        sizes = np.full(3, 4, np.int32)
        want = results(module, sizes)
        monkeypatch.setattr(moe_module, "split_axis", lambda _: "tp")
        monkeypatch.setattr(
            moe_module, "run_split", lambda run, _, *args: run(*args) / 2
        )
        assert worst(results(module, sizes), want) > 0.1
