"""Three steps of training are Megatron-Core's own: losses, gradients and weights.

`tests/golden/write_megatron_steps.py` ran Megatron-Core's model, backward and optimizer
on what we export.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bridge_helpers import abstract_model
from flax import nnx
from megatron_steps import ADAM, NUM_STEPS, VARIANTS, summary
from megatron_variants import exact_params, exact_tokens, twin_config

from bridge._tree import named_leaves
from bridge.megatron import megatron_tensors, weight_mapping
from bridge.megatron.read._adam_settings import undecayed_leaves

FILE = Path(__file__).parents[1] / "golden" / "megatron_steps.json"
GOLDEN = json.loads(FILE.read_text())
# Of a gradient's norm, float32: both sum the same products in another order.
GRADIENT = 5e-6
# Of the change in three steps: Adam divides small gradients by their size, so that an
# element whose gradient is rounding alone may move either way.
CHANGE = 2e-4


@pytest.fixture(scope="module", params=VARIANTS)
def run(request):
    """Our losses, first gradients and final changes, in Megatron's tensors."""
    config = twin_config(request.param)
    graph, _ = nnx.split(abstract_model(config))
    params = jax.tree.map(jnp.asarray, exact_params(config))
    tokens = jnp.asarray(exact_tokens(config))
    source = megatron_tensors(params, config)
    undecayed = undecayed_leaves(source, weight_mapping(config))
    names = list(named_leaves(params))
    mask = jax.tree.unflatten(
        jax.tree.structure(params), [name not in undecayed for name in names]
    )
    tx = optax.adamw(**ADAM, mask=mask)

    def loss_of(params):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, grads

    first, state, losses, grads = params, tx.init(params), [], None
    for _ in range(NUM_STEPS):
        params, state, loss, found = step(params, state)
        losses.append(float(loss))
        grads = found if grads is None else grads
    changed = jax.tree.map(lambda a, b: a - b, params, first)
    tensors = [megatron_tensors(tree, config) for tree in (grads, changed)]
    return GOLDEN[request.param], losses, *tensors


def assert_near(found, expected: dict, tolerance: float) -> None:
    assert set(expected) <= set(found.keys())
    for name, (norm, product) in expected.items():
        ours = summary(found.read(name))
        assert norm > 0, name
        bound = tolerance * norm
        assert abs(ours[0] - norm) <= bound, (name, ours, norm)
        # The fixed vector's elements are of size one half: its norm bounds rounding.
        size = np.sqrt(found.read(name).size)
        assert abs(ours[1] - product) <= bound * max(1.0, size**0.5), (name, ours)


def test_losses_are_megatrons(run):
    golden, losses, *_ = run
    np.testing.assert_allclose(losses[0], golden["losses"][0], rtol=1e-6)
    np.testing.assert_allclose(losses, golden["losses"], rtol=1e-5)
    assert golden["losses"][0] - golden["losses"][-1] > 0.1


def test_gradients_are_megatrons(run):
    golden, _, grads, _ = run
    assert_near(grads, golden["grads"], GRADIENT)


def test_weights_after_three_steps_are_megatrons(run):
    golden, *_, changes = run
    assert_near(changes, golden["changes"], CHANGE)
