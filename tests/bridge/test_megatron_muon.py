"""Three steps of Muon on a mesh are Megatron-Core's own: losses and weights.

`tests/golden/write_megatron_muon.py` ran Megatron-Core's `TensorParallelMuon`, which
splits queries, keys and values, on what we export.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from megatron_steps import ADAM, MUON, MUON_VARIANT, NUM_STEPS, summary
from megatron_variants import exact_params, exact_tokens, twin_config

import fsdp_jax as fsdp
from bridge.megatron import megatron_tensors
from bridge.models import Decoder, DecoderLayer, tensor_parallel_rules

FILE = Path(__file__).parents[1] / "golden" / "megatron_muon.json"
GOLDEN = json.loads(FILE.read_text())
# Of a tensor's change in three steps, float32. Newton-Schulz multiplies small singular
# values, and what rounding made of them, by 3.4 in each of its five iterations.
CHANGE = 2e-3
# A key's bias moves no score, so that its gradient is rounding, and Adam walks on it.
UNTRAINED = "linear_qkv.bias"
MATRICES = {
    "layers.self_attn.o_proj.kernel": 2,
    "layers.self_attn.*.kernel": 1,
    "layers.mlp.*.kernel": 1,
    "embed_positions.embedding": 1,
}


def muon(plan):
    """Muon as Megatron configures it: its Nesterov momentum is not bias-corrected."""
    return optax.chain(
        optax.trace(MUON["momentum"], nesterov=MUON["nesterov"]),
        optax.contrib.muon(
            ADAM["learning_rate"],
            ns_coeffs="dion",  # Megatron's "quintic"
            beta=0.0,
            nesterov=False,
            consistent_rms=MUON["scale"],
            muon_weight_dimension_numbers=lambda stacks: jax.tree.map(
                lambda _: optax.contrib.MuonDimensionNumbers((1,), (2,)), stacks
            ),
        ),
    )


def trained():
    """Losses and changes of a model over data axes and tp, in Megatron's tensors."""
    config = twin_config(MUON_VARIANT)
    mesh = fsdp.make_mesh(tp=2, devices=jax.devices()[:4])
    plan = fsdp.fully_shard(
        lambda key: Decoder(config, rngs=nnx.Rngs(key), scan=fsdp.scan),
        mesh,
        units=[DecoderLayer],
        config=fsdp.FSDPConfig(tensor_parallel=tensor_parallel_rules(config, 2)),
    )
    adam = optax.adamw(
        ADAM["learning_rate"], ADAM["b1"], ADAM["b2"], ADAM["eps"], weight_decay=0.0
    )
    tx = fsdp.optim.layer_wise(plan, muon(plan), adam, MATRICES)
    first = exact_params(config)
    params = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), first, plan.params
    )

    def loss_fn(model, tokens):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    step = fsdp.make_train_step(plan, loss_fn, tx)
    state = fsdp.init_state(plan, tx, params)
    tokens, losses = jnp.asarray(exact_tokens(config), jnp.int32), []
    for _ in range(NUM_STEPS):
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
    last = fsdp.unshard(state.params)
    changed = jax.tree.map(lambda a, b: np.asarray(a) - b, last, first)
    return losses, megatron_tensors(changed, config)


@pytest.mark.torch
def test_three_steps_of_muon_are_megatrons():
    losses, changes = trained()
    np.testing.assert_allclose(losses, GOLDEN["losses"], rtol=1e-5)
    assert len(GOLDEN["matrices"]) == 4 * 3 + 1
    for name, (norm, product) in GOLDEN["changes"].items():
        if name.endswith(UNTRAINED):
            continue
        values = changes.read(name)
        ours = summary(values)
        assert abs(ours[0] - norm) <= CHANGE * norm, (name, ours, norm)
        bound = CHANGE * norm * max(1.0, values.size**0.25)
        assert abs(ours[1] - product) <= bound, (name, ours, product)
