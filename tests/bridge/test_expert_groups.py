"""Groups of experts that a token has not chosen, where biases made scores negative."""

import dataclasses

import numpy as np
import pytest
import torch
from bridge_helpers import abstract_model, logits_of
from flax import nnx
from tiny_models import hf_logits, make_model
from transformers import AutoModelForCausalLM

import bridge

pytestmark = pytest.mark.torch

RELATIVE = 2e-5  # as in test_logits.py
OF_VARIANT = {
    "axk2-groups": ("top2_sum_zeroed", "top2_sum"),
    "deepseek_v3": ("top2_sum", "top2_sum_zeroed"),
}


@pytest.mark.parametrize("variant", OF_VARIANT)
def test_closed_groups_score_as_in_transformers(variant, tmp_path):
    """Sigmoids are below 1, so that all scores are negative here.

    One group of two experts is closed, and three experts are chosen: of scores that are
    0 there is none too many, between which the choice would be anyone's.
    """
    made = make_model(tmp_path / "in", variant, topk_group=3)
    theirs = AutoModelForCausalLM.from_pretrained(made.path).eval()
    with torch.no_grad():
        for name, bias in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(-1.5 - torch.rand(bias.shape))
        for name, bias in theirs.named_parameters():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(-1.5 - torch.rand(bias.shape))
    theirs.save_pretrained(tmp_path / "negative")
    want = hf_logits(theirs, made.tokens)
    config = bridge.from_hf_config(tmp_path / "negative")

    def error(group_scoring: str) -> float:
        moe = dataclasses.replace(config.moe, group_scoring=group_scoring)
        graph, like = nnx.split(abstract_model(dataclasses.replace(config, moe=moe)))
        model = nnx.merge(graph, bridge.load_hf(tmp_path / "negative", like))
        got = np.asarray(logits_of(model, made.tokens))
        return float(np.abs(got - want).max() / np.abs(want).max())

    own, other = OF_VARIANT[variant]
    assert config.moe.group_scoring == own
    assert error(own) <= RELATIVE
    assert error(other) > 100 * RELATIVE
