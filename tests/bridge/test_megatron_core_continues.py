"""Megatron-Core loads the runs that we write, and takes our next steps.

`tests/golden/write_megatron_continued.py` ran it on what `save_megatron_adam` writes in
each format, and recorded a checksum of it. That is what we write now, or a test fails.
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
from megatron_continued import (
    FORMATS,
    NUM_STEPS,
    VARIANTS,
    digest,
    exact_adam,
    write,
)
from megatron_steps import summary
from megatron_variants import exact_tokens, twin_config

from bridge._tree import named_leaves
from bridge.megatron import megatron_tensors
from bridge.megatron._key_mapping import in_module

FILE = Path(__file__).parents[1] / "golden" / "megatron_continued.json"
GOLDEN = json.loads(FILE.read_text())
# Of losses, float32: both sum the same products in another order.
LOSS = 1e-6
# Of a tensor's change in two steps. Moments are far from zero, so that an element whose
# gradient is rounding alone does not move by its sign. A norm of
# latent attention is 5.04e-6 off with jax 0.12.
CHANGE = 1e-5


@pytest.fixture(scope="module", params=VARIANTS)
def run(request):
    """A variant, its config, our losses, and our changes in Megatron's tensors."""
    config = twin_config(request.param)
    adam = exact_adam(config)
    graph, _ = nnx.split(abstract_model(config))
    tokens, settings = jnp.asarray(exact_tokens(config)), adam.settings
    decayed = [name not in settings.no_decay for name in named_leaves(adam.params)]
    tx = optax.adamw(
        settings.lr,
        b1=settings.b1,
        b2=settings.b2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        mask=jax.tree.unflatten(jax.tree.structure(adam.params), decayed),
    )

    def loss_of(params):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = first = jax.tree.map(jnp.asarray, adam.params)
    state = optax.tree.set(tx.init(params), mu=adam.mu, nu=adam.nu, count=adam.count)
    losses = []
    for _ in range(NUM_STEPS + 1):
        after, state, loss = step(params, state)
        losses.append(float(loss))
        if len(losses) <= NUM_STEPS:
            params = after
    changed = jax.tree.map(lambda a, b: a - b, params, first)
    return request.param, config, losses, megatron_tensors(changed, config)


@pytest.mark.each_case
@pytest.mark.parametrize("format", FORMATS)
def test_megatron_core_continues_what_we_write_with_our_losses(run, format, tmp_path):
    variant, config, losses, changes = run
    golden = GOLDEN[variant][format]
    write(tmp_path / "run", config, format)
    assert digest(tmp_path / "run") == golden["sha256"]
    np.testing.assert_allclose(losses, golden["losses"], rtol=LOSS)
    assert len(set(golden["losses"])) == NUM_STEPS + 1
    names = {
        in_module(key, changes.keys(), {"transformer_impl": "local"}): key
        for key in changes.keys()
    }
    for name, (norm, product) in golden["changes"].items():
        values = changes.read(names[name])
        ours = summary(values)
        bound = CHANGE * norm
        assert norm > 0, name
        assert abs(ours[0] - norm) <= bound, (name, ours, norm)
        assert abs(ours[1] - product) <= bound * values.size**0.25, (name, ours)


def test_formats_hold_the_same_run():
    for variant in VARIANTS:
        runs = [GOLDEN[variant][format] for format in FORMATS]
        assert all(run["sha256"] == runs[0]["sha256"] for run in runs)
        np.testing.assert_allclose(
            [run["losses"] for run in runs], [runs[0]["losses"]] * len(runs), rtol=LOSS
        )
