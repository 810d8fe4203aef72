"""Encoders of transformers fill modules of others, by rules that find themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from helpers.errors import facts

import bridge
from bridge import Rule, adapt

pytestmark = pytest.mark.torch

# Two float32 programs that sum in different orders.
RELATIVE = 2e-5
WIDTH, INSIDE, HEADS, LAYERS, VOCAB = 24, 40, 3, 2, 31


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, rngs=rngs)


def norm(rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)


def attend(query, key, value):
    """All tokens to all, in heads."""
    split = [x.reshape(*x.shape[:-1], HEADS, -1) for x in (query, key, value)]
    return jax.nn.dot_product_attention(*split).reshape(query.shape)


class Module(nnx.Module):
    """A module with what it is given as attributes."""

    def __init__(self, **children):
        for name, child in children.items():
            setattr(self, name, child)


class BertLayer(nnx.Module):
    """A layer of BERT, with the names of transformers."""

    def __init__(self, rngs: nnx.Rngs):
        q, k, v = (linear(WIDTH, WIDTH, rngs) for _ in range(3))
        out = Module(dense=linear(WIDTH, WIDTH, rngs), LayerNorm=norm(rngs))
        self.attention = Module(output=out)
        self.attention.self = Module(query=q, key=k, value=v)
        self.intermediate = Module(dense=linear(WIDTH, INSIDE, rngs))
        self.output = Module(dense=linear(INSIDE, WIDTH, rngs), LayerNorm=norm(rngs))

    def __call__(self, x):
        of, out = self.attention.self, self.attention.output
        mixed = attend(of.query(x), of.key(x), of.value(x))
        x = out.LayerNorm(x + out.dense(mixed))
        inside = jax.nn.gelu(self.intermediate.dense(x), approximate=False)
        return self.output.LayerNorm(x + self.output.dense(inside))


class Bert(nnx.Module):
    """BERT without its head."""

    def __init__(self, rngs: nnx.Rngs):
        def table(rows: int) -> nnx.Embed:
            return nnx.Embed(rows, WIDTH, rngs=rngs)

        self.embeddings = Module(
            word_embeddings=table(VOCAB),
            position_embeddings=table(16),
            token_type_embeddings=table(2),
            LayerNorm=norm(rngs),
        )
        layers = nnx.List([BertLayer(rngs) for _ in range(LAYERS)])
        self.encoder = Module(layer=layers)

    def __call__(self, tokens):
        of = self.embeddings
        x = of.word_embeddings(tokens)
        x += of.position_embeddings(jnp.arange(tokens.shape[1]))[None]
        x = of.LayerNorm(x + of.token_type_embeddings(jnp.zeros_like(tokens)))
        for layer in self.encoder.layer:
            x = layer(x)
        return x


def bert() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INSIDE,
        max_position_embeddings=16,
    )
    return transformers.BertForMaskedLM(config).eval()


def abstract_bert() -> Bert:
    return nnx.eval_shape(lambda: Bert(nnx.Rngs(0)))


def test_bert_fills_a_module_without_its_prefix_and_computes_the_same():
    net = bert()
    ignore = ["cls.**", "**.position_ids"]
    model = bridge.from_torch(net, abstract_bert(), ignore=ignore)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 7))
    with torch.no_grad():
        want = net.bert(torch.from_numpy(tokens)).last_hidden_state.numpy()
    found = np.asarray(nnx.jit(model)(jnp.asarray(tokens)))
    assert np.abs(found - want).max() <= RELATIVE * np.abs(want).max()


def test_a_prefix_of_one_layer_alone_is_in_doubt():
    net = torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"fc": torch.nn.Linear(3, 5)})})
    like = nnx.eval_shape(lambda: nnx.Dict(fc=nnx.Linear(3, 5, rngs=nnx.Rngs(0))))
    (row,) = bridge.propose_rules(net, like).rows
    assert row.args == ("a.fc", "fc")
    (doubt,) = row.doubts
    assert "a.fc" in doubt
    both = torch.nn.ModuleDict({"a": net["a"], "b": net["a"]})
    assert bridge.propose_rules(both.state_dict(), like).rows == ()


def test_layers_of_other_names_are_paired_by_number_and_last_name_in_doubt():
    tower = transformers.LlamaModel(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=INSIDE,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
        )
    )
    net = torch.nn.ModuleDict({"model": tower})
    f32 = jnp.float32
    layer = {
        "attn": {"q_proj": {"w": jax.ShapeDtypeStruct((WIDTH, HEADS, 8), f32)}},
        "input_layernorm": {"w": jax.ShapeDtypeStruct((WIDTH,), f32)},
        "mlp": {"up_proj": {"kernel": jax.ShapeDtypeStruct((WIDTH, INSIDE), f32)}},
    }
    proposal = bridge.propose_rules(net, {"layers": [layer] * LAYERS})
    rows = {row.args[:2]: row for row in proposal.rows}
    at = "model.layers.1."
    up = rows[at + "mlp.up_proj", "layers.1.mlp.up_proj"]
    scale = rows[at + "input_layernorm.weight", "layers.1.input_layernorm.w"]
    assert not (up.doubts or scale.doubts)
    query = rows[at + "self_attn.q_proj.weight", "layers.1.attn.q_proj.w"]
    assert query.args[2] == "(d1 d2) d0 -> d0 d1 d2"
    assert any("self_attn.q_proj" in doubt for doubt in query.doubts)
    assert proposal.leaves == {}


def test_numbered_layers_fill_one_with_a_dim_more():
    layers = torch.nn.ModuleList(
        [torch.nn.ModuleDict({"fc": torch.nn.Linear(3, 5)}) for _ in range(4)]
    )
    net = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": layers})})

    @nnx.split_rngs(splits=4)
    @nnx.vmap
    def stack(rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(3, 5, rngs=rngs)

    like = nnx.eval_shape(lambda: Module(layers=Module(fc=stack(nnx.Rngs(0)))))
    (row,) = bridge.propose_rules(net, like).rows
    assert row.args == ("model.layers.{layer}.fc", "layers.fc")
    assert not row.doubts
    model = bridge.from_torch(net, like)
    want = layers[2]["fc"].weight.detach().numpy()
    np.testing.assert_array_equal(model.layers.fc.kernel[2], want.T)
    three = torch.nn.ModuleDict({"layers": layers[:3]})
    assert bridge.propose_rules(three, like).rows == ()


def test_one_rule_fills_all_layers_of_a_list_and_needs_no_layout():
    net = torch.nn.Sequential(
        *[
            torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
            for _ in range(2)
        ]
    )
    shape = jax.ShapeDtypeStruct
    layer = {
        "fc": {"kernel": shape((3, 3), jnp.float32), "bias": shape((3,), jnp.float32)},
        "norm": {"scale": shape((3,), jnp.float32), "bias": shape((3,), jnp.float32)},
    }
    rules = [
        adapt.linear("{layer}.0", "blocks.{layer}.fc"),
        Rule("{layer}.1.weight", "blocks.{layer}.norm.scale"),
        Rule("{layer}.1.bias", "blocks.{layer}.norm.bias"),
    ]
    tree = bridge.from_torch(net, {"blocks": [layer] * 2}, rules)
    kernel = net[1][0].weight.detach().numpy()
    np.testing.assert_array_equal(tree["blocks"][1]["fc"]["kernel"], kernel.T)
    again = bridge.to_torch(tree, rules)
    state = net.state_dict()
    assert set(again) == set(state)
    assert all(torch.equal(again[key], state[key]) for key in state)
    wider = {**layer, "fc": {**layer["fc"], "kernel": shape((4, 3), jnp.float32)}}
    with pytest.raises(ValueError, match=facts("(2)", "(4, 3)", "in=3")):
        bridge.from_torch(net, {"blocks": [wider] * 2}, rules)


def test_a_rule_without_a_layout_elsewhere_says_what_it_lacks():
    with pytest.raises(ValueError, match=facts("b", "layout")):
        _ = Rule("a", "b").layouts


@pytest.mark.parametrize(
    "made",
    [torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.spectral_norm],
)
def test_a_weight_that_pytorch_makes_of_others_is_in_doubt(made):
    like = nnx.state(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=facts("remove_spectral_norm", "adapt.linear")):
        bridge.from_torch(made(torch.nn.Linear(4, 3)), like)
