"""Megatron-Core, run on what we export, computes our logits.

`tests/golden/write_megatron_logits.py` ran it, and recorded a checksum of what it was
given: fields, names, shapes and bits. That is what we export now, or a test fails.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_helpers import abstract_model, logits_of
from flax import nnx
from megatron_variants import WITH, digest, exact_params, exact_tokens, twin_config

from bridge.megatron import megatron_tensors, to_gpt_model, to_transformer_config

FILE = Path(__file__).parents[1] / "golden" / "megatron_logits.json"
GOLDEN = json.loads(FILE.read_text())


def test_every_variant_with_a_twin_was_run():
    assert set(GOLDEN) == set(WITH)


@pytest.mark.each_case
@pytest.mark.parametrize("variant", WITH)
def test_megatron_core_computes_our_logits_from_what_we_export(variant):
    config, golden = twin_config(variant), GOLDEN[variant]
    params = exact_params(config)
    fields = to_transformer_config(config)
    fields |= to_gpt_model(config, make_vocab_size_divisible_by=1)
    assert digest(fields, megatron_tensors(params, config)) == golden["sha256"]

    model = nnx.merge(
        nnx.split(abstract_model(config))[0], jax.tree.map(jnp.asarray, params)
    )
    ours = np.asarray(logits_of(model, exact_tokens(config))[:, -1])
    theirs = np.array(golden["logits"], np.float32)
    assert theirs.std() > 0.5
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
