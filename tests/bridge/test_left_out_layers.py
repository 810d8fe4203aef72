"""Layers that predict further tokens are not left out in silence, nor announced."""

from __future__ import annotations

import json
import warnings

import jax
import numpy as np
import pytest
from bridge_helpers import assert_same_bytes, assert_same_leaves, like_of, tensors_of
from helpers.errors import facts
from safetensors.numpy import save_file
from tiny_configs import hf_fields

import bridge

FIELD = "num_nextn_predict_layers"
EXTRA = "model.layers.3.eh_proj.weight"  # of the layer behind the last


@pytest.fixture
def announced(tmp_path):
    """A checkpoint with such a layer, what is in it besides, and its weights."""
    config = bridge.from_hf_config(hf_fields("deepseek_v3", **{FIELD: 1}))
    values = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: values.normal(size=leaf.shape).astype(leaf.dtype), like_of(config)
    )
    path = tmp_path / "in"
    bridge.save_hf(path, params, config)
    others = tensors_of(path)
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {FIELD: 1}))
    further = {EXTRA: np.ones((48, 96), np.float32)}
    save_file(others | further, path / "model.safetensors")
    return path, others, params


def test_an_import_warns_of_them_and_an_export_announces_none(tmp_path, announced):
    path, others, params = announced
    config = bridge.from_hf_config(path)
    with pytest.warns(UserWarning, match=facts(1, f"'{EXTRA}'", FIELD, 0)):
        again = bridge.load_hf(path, like_of(config))
    assert_same_leaves(again, params)
    bridge.save_hf(tmp_path / "out", again, config)
    assert json.loads((tmp_path / "out" / "config.json").read_text())[FIELD] == 0
    assert_same_bytes(tensors_of(tmp_path / "out"), others)


def test_what_was_exported_is_read_without_a_warning(tmp_path, announced):
    _, _, params = announced
    config = bridge.from_hf_config(hf_fields("deepseek_v3", **{FIELD: 1}))
    bridge.save_hf(tmp_path / "out", params, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = bridge.plan(tmp_path / "out")
    assert plan.left_out == ()


def test_a_plan_names_what_is_left_out(announced):
    with pytest.warns(UserWarning, match=facts(EXTRA)):
        assert bridge.plan(announced[0]).left_out == (EXTRA,)


@pytest.mark.parametrize("given", [0, 2])
def test_the_name_that_transformers_5_writes_is_the_same_field(given):
    fields = {**hf_fields("deepseek_v3"), "num_mtp_layers": given}
    del fields[FIELD]
    assert dict(bridge.from_hf_config(fields).passthrough)[FIELD] == given
