"""A BERT and a T5 that Megatron-Core wrote are read, and fill trees by rules.

`tests/golden/write_megatron_encoders.py` made and saved them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoder_tensors import value_of

import bridge
from bridge import Rule
from bridge.megatron import open_megatron

FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


@pytest.fixture(params=["bert", "t5"])
def opened(request, golden):
    path = golden("encoders") / request.param
    return open_megatron(path).source, (path / "names.txt").read_text().split()


def canonical(name):
    for local, fused in FUSED.items():
        name = name.replace(local, fused)
    return name


def test_every_parameter_of_an_encoder_is_read_under_its_name(opened):
    source, names = opened
    assert len(names) > 30
    for name in names:
        found = source.read(canonical(name))
        np.testing.assert_array_equal(found, value_of(name, found.shape), name)


def test_rules_fill_a_tree_with_an_encoder(opened):
    source, _ = opened
    shape = jax.ShapeDtypeStruct
    heads = shape((8, 2, 4), jnp.float32)
    block = {"q": heads, "k": heads, "v": heads, "up": shape((8, 12), jnp.float32)}
    layer = "encoder.layers.{layer}"
    rules = [
        Rule(
            f"{layer}.self_attention.linear_qkv.weight",
            tuple(f"layers.{{layer}}.{part}" for part in "qkv"),
            ("(heads head_dim) embed -> embed heads head_dim",) * 3,
            repeat="heads",
        ),
        Rule(f"{layer}.mlp.linear_fc1.weight", "layers.{layer}.up", "out in -> in out"),
    ]
    tensors = {key: source.read(key) for key in source.keys()}
    ours = ("encoder.layers", "linear_qkv.weight", "linear_fc1.weight")
    others = [
        key for key in tensors if not key.startswith(ours[0]) or not key.endswith(ours)
    ]
    tree = bridge.from_torch(tensors, {"layers": [block] * 2}, rules, ignore=others)
    for number, filled in enumerate(tree["layers"]):
        name = f"encoder.layers.{number}"
        fused = value_of(f"{name}.self_attention.linear_qkv.weight", (2, 3, 4, 8))
        for at, part in enumerate("qkv"):
            want = fused[:, at].transpose(2, 0, 1)
            np.testing.assert_array_equal(filled[part], want)
        up = value_of(f"{name}.mlp.linear_fc1.weight", (12, 8))
        np.testing.assert_array_equal(filled["up"], up.T)
