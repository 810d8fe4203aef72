"""ModernBERT, T5, ViT and CLIP fill modules of three libraries by proposed rules."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from encoder_parts import (
    Linen,
    Stacked,
    equinox_module,
    nested,
    nnx_module,
    sliced,
    walk,
)
from encoder_twins import ALONE, ENCODERS, LAYERS, Encoder, random
from flax import nnx
from helpers.errors import facts

import bridge

pytestmark = pytest.mark.torch

# Two float32 programs that sum in different orders.
RELATIVE = 2e-5


def renamed(encoder: Encoder, path: str, names: str) -> str:
    """Returns a path as the twin has it: transformers' own, or another library's."""
    if names == "own":
        for old, new in encoder.own.items():
            path = new + path.removeprefix(old) if path.startswith(old) else path
    return path


def like_of(encoder: Encoder, library: str, names: str):
    """Returns the abstract twin, and a function from a filled one to its output."""

    def path_of(path: str) -> str:
        return renamed(encoder, path, names)

    parts = nested({path_of(path): part for path, part in encoder.table.items()})

    def forward(model, x):
        return encoder.forward(lambda path: walk(model, path_of(path)), x)

    x = jnp.asarray(encoder.inputs())
    if library == "nnx":
        return nnx.eval_shape(lambda: nnx_module(parts, nnx.Rngs(0))), forward
    if library == "equinox":
        key = jax.random.key(0)
        return eqx.filter_eval_shape(equinox_module, parts, key), forward
    model = Linen(lambda: parts, forward)
    return jax.eval_shape(model.init, jax.random.key(0), x), model.apply


def stacked_of(encoder: Encoder, library: str, names: str):
    """Returns the abstract twin with one layer for all, and its function."""
    start, stack = f"{encoder.list}.0.", renamed(encoder, f"{encoder.list}.", names)
    layer, table = {}, {}
    for path, part in encoder.table.items():
        if path in ALONE:
            table[path.rpartition(".")[2]] = part
        elif path.startswith(start):
            layer[path.removeprefix(start)] = part
        elif not path.startswith(f"{encoder.list}."):
            table[renamed(encoder, path, names)] = part
    parts = nested(table | {stack.rstrip("."): Stacked(nested(layer), LAYERS)})

    def part_of(model, path: str):
        inside = path.removeprefix(f"{encoder.list}.")
        if path in ALONE:
            return walk(model, path.rpartition(".")[2])
        if inside == path:
            return walk(model, renamed(encoder, path, names))
        number, _, rest = inside.partition(".")
        return sliced(walk(model, stack + rest), int(number))

    def forward(model, x):
        return encoder.forward(lambda path: part_of(model, path), x)

    if library == "nnx":
        return nnx.eval_shape(lambda: nnx_module(parts, nnx.Rngs(0))), forward
    key = jax.random.key(0)
    return eqx.filter_eval_shape(equinox_module, parts, key), forward


def torch_output(net: torch.nn.Module, inputs: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        found = net(torch.from_numpy(inputs))
    pooled = type(net).__name__ == "CLIPVisionModel"
    return (found.pooler_output if pooled else found.last_hidden_state).numpy()


def error(found, want: np.ndarray) -> float:
    return np.abs(np.asarray(found) - want).max() / np.abs(want).max()


LIBRARIES = ("nnx", "linen", "equinox")
TARGETS = [
    pytest.param(like_of, name, library, id=f"{name}-{library}")
    for name in ENCODERS
    for library in LIBRARIES
] + [
    pytest.param(stacked_of, name, library, id=f"{name}-stacked-{library}")
    for name in ("ViT", "CLIP text", "CLIP vision")
    for library in ("nnx", "equinox")
]


@pytest.mark.parametrize("names", ["transformers", "own"])
@pytest.mark.parametrize("target, name, library", TARGETS)
def test_an_encoder_fills_a_module_and_computes_the_same(target, name, library, names):
    encoder = ENCODERS[name]
    net = random(encoder.torch)
    like, forward = target(encoder, library, names)
    model = bridge.from_torch(net, like, ignore=encoder.ignore)
    want = torch_output(net, encoder.inputs())
    assert error(forward(model, jnp.asarray(encoder.inputs())), want) <= RELATIVE


@pytest.mark.parametrize("name", ["T5", "CLIP vision"])
def test_a_rule_of_all_layers_fills_what_the_rules_of_each_fill(name):
    encoder = ENCODERS[name]
    net = random(encoder.torch)
    like, _ = like_of(encoder, "equinox", "own")
    rows = bridge.propose_rules(net, like).rows
    beginnings = (f"{encoder.list}.0.", renamed(encoder, f"{encoder.list}.0.", "own"))
    rules = {}
    for row in rows:
        starts = zip(row.args, beginnings, strict=True) if len(row.args) == 2 else ()
        inside = [path.startswith(start) for path, start in starts]
        args = row.args
        if all(inside) and inside and row.args[0] not in ALONE:
            args = tuple(path.replace("0", "{layer}", 1) for path in args)
        elif row.args[0].startswith(f"{encoder.list}.1."):
            continue
        rules[args] = row.make(*args, **row.options)
    assert len(rules) < len(rows)
    found = bridge.from_torch(net, like, list(rules.values()))
    want = bridge.from_torch(net, like)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), found, want)
    assert jax.tree.all(same)


def swapped(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors, the first two matrices of equal shape exchanged."""
    state = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    keys = [key for key in state if ".0." in key and state[key].ndim == 2]
    one = keys[0]
    other = next(k for k in keys + list(state) if _like(state, k, one))
    return state | {one: state[other], other: state[one]}


def _like(state: dict[str, torch.Tensor], key: str, other: str) -> bool:
    return key != other and state[key].shape == state[other].shape


@pytest.mark.parametrize("name", ENCODERS)
def test_two_tensors_of_equal_shape_that_are_swapped_are_missed(name):
    encoder = ENCODERS[name]
    net = random(encoder.torch)
    want = torch_output(net, encoder.inputs())
    net.load_state_dict(swapped(net))
    like, forward = like_of(encoder, "nnx", "transformers")
    model = bridge.from_torch(net, like, ignore=encoder.ignore)
    assert error(forward(model, jnp.asarray(encoder.inputs())), want) > 100 * RELATIVE


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_converted_back_by_the_same_rules(name):
    encoder = ENCODERS[name]
    net = random(encoder.torch)
    like, _ = like_of(encoder, "nnx", "own")
    rules = bridge.propose_rules(net, like, ignore=encoder.ignore).rules
    model = bridge.from_torch(net, like, rules, ignore=encoder.ignore)
    state = net.state_dict()
    again = bridge.to_torch(model, rules)
    assert all(torch.equal(again[key], state[key]) for key in again)
    left = {key for key in state if not key.startswith(("pooler", "encoder.embed_"))}
    assert set(again) == left


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ENCODERS)
def test_without_classes_only_square_matrices_and_kernels_are_in_doubt(name, library):
    encoder = ENCODERS[name]
    net = random(encoder.torch)
    like, forward = like_of(encoder, library, "own")
    state = net.state_dict()
    proposal = bridge.propose_rules(state, like, ignore=encoder.ignore)
    for row in proposal.rows:
        weight = state.get(f"{row.args[0]}.weight")
        square = weight is not None and len(set(weight.shape[:2])) == 1
        assert not row.doubts or square or "patch" in row.args[0], row
    model = bridge.from_torch(state, like, proposal.rules, ignore=encoder.ignore)
    want = torch_output(net, encoder.inputs())
    assert error(forward(model, jnp.asarray(encoder.inputs())), want) <= RELATIVE


class Parameters(torch.nn.Module):
    def __init__(self, **shapes: tuple[int, ...]):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))


def test_parameters_may_have_other_dims_of_size_one():
    net = Parameters(cls=(1, 1, 4), places=(1, 3, 4), first=(4,), one=(1,))
    shapes = {"cls": (4,), "places": (3, 4), "first": (1, 1, 4), "one": (1,)}
    like = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in shapes.items()}
    tree = bridge.from_torch(net, like)
    for name, tensor in net.state_dict().items():
        np.testing.assert_array_equal(tree[name], tensor.numpy().reshape(shapes[name]))
    like["places"] = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    rows = {row.args[0]: row for row in bridge.propose_rules(net, like).rows}
    assert rows["places"].doubts and not rows["cls"].doubts


@pytest.mark.parametrize("names", ["transformers", "own"])
@pytest.mark.parametrize("library", ["nnx", "equinox"])
@pytest.mark.parametrize("name", ["ModernBERT", "T5"])
def test_what_one_layer_alone_has_is_in_doubt_beside_a_stack(name, library, names):
    encoder = ENCODERS[name]
    net = random(encoder.torch)
    like, forward = stacked_of(encoder, library, names)
    proposal = bridge.propose_rules(net, like)
    (row,) = [row for row in proposal.rows if row.doubts]
    assert row.args[0] in ALONE and not (proposal.tensors or proposal.leaves)
    with pytest.raises(ValueError, match=facts(row.args[0], row.args[1])):
        bridge.from_torch(net, like)
    model = bridge.from_torch(net, like, proposal.rules)
    want = torch_output(net, encoder.inputs())
    assert error(forward(model, jnp.asarray(encoder.inputs())), want) <= RELATIVE


def test_a_leaf_without_a_rule_is_named_and_the_rule_to_write():
    encoder = ENCODERS["ViT"]
    table = dict(encoder.table)
    table["ending"] = table.pop("layernorm")
    like = nnx.eval_shape(lambda: nnx_module(nested(table), nnx.Rngs(0)))
    written = 'bridge.Rule("NAME", "ending.bias", "d0 -> d0")'
    with pytest.raises(ValueError, match=facts("layernorm.weight", written)):
        bridge.from_torch(random(encoder.torch), like, ignore=encoder.ignore)


# Projections in other forms


class Projections(torch.nn.Module):
    """Query, key and value, in one tensor or in three."""

    def __init__(self, names: str):
        super().__init__()
        attn = torch.nn.ModuleDict(
            {"Wqkv": torch.nn.Linear(6, 12)}
            if names == "Wqkv"
            else {name: torch.nn.Linear(6, 4) for name in ("query", "key", "value")}
        )
        attn["out"] = torch.nn.Linear(4, 6)
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"attn": attn})])

    def array(self, name: str) -> np.ndarray:
        return self.state_dict()[f"layers.0.attn.{name}"].numpy()


def projections(names: str, heads: tuple[int, ...] = ()):
    """The same, with kernels of flax; heads are dims of their own if given."""
    f32, out = jnp.float32, heads or (4,)
    wide = {"Wqkv": (12,)} if names == "Wqkv" else dict.fromkeys(("query", "key"), out)
    wide |= {} if names == "Wqkv" else {"value": out}
    attn = {
        name: {
            "kernel": jax.ShapeDtypeStruct((6, *dims), f32),
            "bias": jax.ShapeDtypeStruct(dims, f32),
        }
        for name, dims in wide.items()
    }
    attn["out"] = {
        "kernel": jax.ShapeDtypeStruct((*out, 6), f32),
        "bias": jax.ShapeDtypeStruct((6,), f32),
    }
    return {"layers": [{"attn": attn}]}


def test_heads_are_dims_of_a_kernel_in_flax():
    net = Projections("three")
    tree = bridge.from_torch(net, projections("three", (2, 2)))
    ours = tree["layers"][0]["attn"]
    for name in ("query", "key", "value"):
        want = net.array(f"{name}.weight").T.reshape(6, 2, 2)
        np.testing.assert_array_equal(ours[name]["kernel"], want)
        want = net.array(f"{name}.bias").reshape(2, 2)
        np.testing.assert_array_equal(ours[name]["bias"], want)
    want = net.array("out.weight").T.reshape(2, 2, 6)
    np.testing.assert_array_equal(ours["out"]["kernel"], want)


@pytest.mark.parametrize("theirs, ours", [("Wqkv", "three"), ("three", "Wqkv")])
def test_query_key_and_value_in_one_tensor_are_proposed_in_doubt(theirs, ours):
    net, like = Projections(theirs), projections(ours)
    proposal = bridge.propose_rules(net, like)
    doubts = [row for row in proposal.rows if row.doubts]
    assert len(doubts) == 2 and not (proposal.tensors or proposal.leaves)
    written: dict = {"bridge": bridge, "adapt": bridge.adapt}
    exec(str(proposal), written)
    assert tuple(written["rules"]) == proposal.rules
    tree = bridge.from_torch(net, like, proposal.rules)
    found = tree["layers"][0]["attn"]

    def joined(names: str, read) -> np.ndarray:
        parts = ["Wqkv"] if names == "Wqkv" else ["query", "key", "value"]
        return np.concatenate([read(part) for part in parts], -1)

    np.testing.assert_array_equal(
        joined(ours, lambda part: found[part]["kernel"]),
        joined(theirs, lambda part: net.array(f"{part}.weight").T),
    )
    np.testing.assert_array_equal(
        joined(ours, lambda part: found[part]["bias"]),
        joined(theirs, lambda part: net.array(f"{part}.bias")),
    )
