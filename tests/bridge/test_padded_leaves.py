"""A train state is exported as it is: its padded leaves in their logical shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bridge_helpers import assert_same_bytes, tensors_of
from flax import nnx

import bridge
import fsdp_jax as fsdp
from bridge import Rule
from bridge.megatron import megatron_tensors
from bridge.models import Decoder

pytestmark = pytest.mark.torch

MESH = fsdp.make_mesh(devices=jax.devices()[:4])


def trained(make):
    plan = fsdp.fully_shard(make, MESH)
    assert any(param.is_padded for param in plan.param_plans)
    params = fsdp.init_params(plan, jax.random.key(0))
    whole = fsdp.unshard(params)
    return fsdp.init_state(plan, optax.sgd(0.1), params).params, whole


class Head(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs(), (5, 7)))


@pytest.mark.parametrize("kind", ["dict", "nnx.State", "nnx.Module"])
def test_a_padded_leaf_reaches_torch_in_its_logical_shape(kind):
    def make(key):
        model = Head(nnx.Rngs(key))
        return {"kernel": model.kernel[...]} if kind == "dict" else model

    params, whole = trained(make)
    (want,) = jax.tree.leaves(whole)
    if kind == "nnx.Module":
        params = nnx.merge(nnx.graphdef(Head(nnx.Rngs(0))), params)
    made = bridge.to_torch(params, [Rule("weight", "kernel", "in out -> out in")])
    np.testing.assert_array_equal(made["weight"].numpy(), np.asarray(want).T)


def padded(leaf):
    """A matrix as a train state may hold it: with zeros behind its end."""
    if leaf.ndim < 2:
        return leaf
    return fsdp.Padded(jnp.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, 3)]), leaf.shape)


def test_padded_leaves_reach_hf_and_megatron_in_their_logical_shapes(llama, tmp_path):
    config = bridge.from_hf_config(llama)
    model = Decoder(config, rngs=nnx.Rngs(0))
    plain = nnx.state(model, nnx.Param)
    params = jax.tree.map(padded, plain)
    bridge.save_hf(tmp_path / "plain", plain, config)
    bridge.save_hf(tmp_path / "padded", params, config)
    assert_same_bytes(tensors_of(tmp_path / "padded"), tensors_of(tmp_path / "plain"))
    want, got = megatron_tensors(plain, config), megatron_tensors(params, config)
    assert_same_bytes(*({k: s.read(k) for k in s.keys()} for s in (got, want)))
