"""A decoder with a score head is the model of transformers that has one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models  # noqa: F401  (makes all families known to transformers)
import torch
from flax import nnx
from helpers.errors import facts
from tiny_configs import FAMILIES, hf_fields
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as OF_TRANSFORMERS,
)

import bridge
from bridge.hf._score_head import _TRANSFORMED, fields_with_head, without_head
from bridge.models import Decoder, DecoderConfig

pytestmark = [pytest.mark.torch, pytest.mark.each_case]

# The largest difference over the largest score, as of logits.
RELATIVE = 2e-5
TOKENS = np.random.default_rng(0).integers(3, 131, (2, 40))


def config_of(family: str) -> DecoderConfig:
    fields = hf_fields(family)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return bridge.from_hf_config(config.to_dict())


def test_the_classes_with_a_score_are_those_of_transformers():
    for family in FAMILIES:
        config = config_of(family)
        known = OF_TRANSFORMERS.get(config.model_type)
        if known is None or config.model_type in _TRANSFORMED:
            with pytest.raises(ValueError, match=facts(config.model_type, "score")):
                fields_with_head(config, "score")
        else:
            fields = fields_with_head(config, "score")
            assert fields["architectures"] == [known]
            assert len(fields["id2label"]) == 1


def drawn(config: DecoderConfig) -> tuple[Decoder, jax.Array]:
    """A decoder without logits, and a kernel of scores."""
    decoder = Decoder(without_head(config), rngs=nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(1), 1000))
    state = jax.tree.map(
        lambda x: (
            x + 0.1 * jax.random.normal(next(keys), x.shape, x.dtype)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x
        ),
        nnx.state(decoder, nnx.Param),
    )
    nnx.update(decoder, state)
    return decoder, jax.random.normal(next(keys), (config.hidden_size, 1))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "opt", "phi"])
def test_scores_are_those_of_transformers(family, tmp_path):
    config = config_of(family)
    decoder, kernel = drawn(config)
    params = nnx.state(decoder, nnx.Param)
    params = nnx.State({**params.raw_mapping, "score": {"kernel": nnx.Param(kernel)}})
    bridge.save_hf(tmp_path / "out", params, config, head="score")
    theirs, loaded = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", pad_token_id=0, output_loading_info=True
    )
    assert type(theirs).__name__ == OF_TRANSFORMERS[config.model_type]
    assert not any(loaded.values())
    with torch.no_grad():
        want = theirs.eval()(torch.from_numpy(TOKENS)).logits.numpy()
    states, _ = decoder.final_states(jnp.asarray(TOKENS))
    found = np.asarray(states[:, -1] @ kernel)
    assert want.shape == found.shape == (2, 1)
    assert np.abs(found - want).max() < RELATIVE * np.abs(want).max()


def test_a_head_that_the_tree_has_not_is_refused(tmp_path):
    config = config_of("llama")
    decoder, _ = drawn(config)
    params = nnx.state(decoder, nnx.Param)
    with pytest.raises(ValueError, match=facts("score.kernel")):
        bridge.save_hf(tmp_path / "out", params, config, head="score")
    assert not (tmp_path / "out").exists()
