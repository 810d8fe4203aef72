"""From PyTorch: the same outputs; and back: the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from bridge_helpers import assert_same_leaves
from flax import nnx
from helpers.errors import facts
from torch_twins import TWINS, Twins, normal, outputs

import bridge
from bridge import Rule, adapt

pytestmark = pytest.mark.torch

# Of the largest output: two float32 programs that sum in other orders. Measured here:
# below 4e-7.
TOLERANCE = 1e-5
LOSSLESS = [name for name in TWINS if name != "recurrent"]  # whose biases are added


def error(ours, theirs) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def replaced(rules, source: str, by) -> list:
    """The rules with another in the place of the one for a tensor."""
    return [by if f"'{source}" in repr(rule) else rule for rule in rules]


@pytest.fixture(params=list(TWINS))
def twins(request) -> Twins:
    return TWINS[request.param]


def test_outputs_are_those_of_pytorch(twins: Twins):
    net = twins.torch()
    model = bridge.from_torch(net, twins.like(), twins.rules)
    theirs = outputs(net, twins.inputs)
    assert theirs.std() > 0.1
    assert error(outputs(model, twins.inputs), theirs) <= TOLERANCE


@pytest.mark.parametrize(
    "name, source, wrong",
    [
        (
            "mlp",
            "layers.0.weight",
            adapt.Adapter(
                (
                    Rule("layers.0.weight", "layers.0.kernel", "out in -> out in"),
                    Rule("layers.0.bias", "layers.0.bias", "out -> out"),
                )
            ),
        ),
        ("cnn", "again", adapt.conv_transpose("again", "again", ndim=2)),
        ("cnn", "head", adapt.linear("head", "head")),
    ],
    ids=["square matrix transposed", "kernel flipped twice", "channels last"],
)
def test_what_shapes_cannot_tell_misses_by_a_hundredfold(name, source, wrong):
    twins = TWINS[name]
    net = twins.torch()
    rules = replaced(twins.rules, source, wrong)
    model = bridge.from_torch(net, twins.like(), rules)
    ours, theirs = outputs(model, twins.inputs), outputs(net, twins.inputs)
    assert error(ours, theirs) > 100 * TOLERANCE


@pytest.mark.parametrize("name", LOSSLESS)
def test_there_and_back_is_the_same_state_dict(name):
    twins, state = TWINS[name], TWINS[name].torch().state_dict()
    model = bridge.from_torch(state, twins.like(), twins.rules)
    again = bridge.to_torch(model, twins.rules, like=state)
    assert list(again) == list(state)
    for key, tensor in state.items():
        assert again[key].dtype == tensor.dtype, key
        assert torch.equal(again[key], tensor), key


def test_back_and_there_is_the_same_model(twins: Twins):
    model = bridge.from_torch(twins.torch(), twins.like(), twins.rules)
    state = bridge.to_torch(model, twins.rules)
    twins.make_torch().load_state_dict(state)  # strict: every name, every shape
    again = bridge.from_torch(state, twins.like(), twins.rules)
    weights = nnx.Not(nnx.RngState)
    assert_same_leaves(nnx.state(again, weights), nnx.state(model, weights))


def test_the_abstract_tree_is_not_changed_and_keeps_its_random_state():
    twins = TWINS["mlp"]
    like = twins.make_nnx(nnx.Rngs(1))
    before = jax.tree.map(np.asarray, nnx.state(like, nnx.Param))
    model = bridge.from_torch(twins.torch(), like, twins.rules)
    assert_same_leaves(nnx.state(like, nnx.Param), before)
    assert not np.array_equal(model.embed.embedding[...], like.embed.embedding[...])
    key, own = (m.dropout.rngs.key[...] for m in (model, like))
    assert (jax.random.key_data(key) == jax.random.key_data(own)).all()


def test_weights_are_born_in_the_abstract_trees_shardings():
    twins = TWINS["encoder"]
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    state = nnx.state(twins.like())
    by_last_dim = jax.tree.map(
        lambda leaf: leaf.update(
            sharding=jax.NamedSharding(mesh, jax.P(*[None] * (leaf.ndim - 1), "x"))
        ),
        nnx.state(nnx.eval_shape(lambda: nnx.Linear(12, 12, rngs=nnx.Rngs(0)))),
    )
    state["linear1"] = by_last_dim
    filled = bridge.from_torch(twins.torch(), state, twins.rules)
    assert isinstance(filled, nnx.State)
    kernel = filled["linear1"]["kernel"][...]
    assert kernel.sharding.spec == jax.P(None, "x")
    weight = twins.torch().linear1.weight.detach()
    np.testing.assert_array_equal(kernel, weight.T)
    again = bridge.to_torch(filled, twins.rules)
    assert torch.equal(again["linear1.weight"], weight)


@pytest.mark.parametrize("dim", range(4))
def test_shards_of_a_flipped_kernel_are_cut_from_where_they_lie(dim):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P(*["x" if d == dim else None for d in range(4)])
    sharding = jax.NamedSharding(mesh, spec)
    like = jax.ShapeDtypeStruct((4, 2, 6, 8), jnp.float32, sharding=sharding)
    weight = torch.randn(6, 8, 4, 2)
    rules = [adapt.conv_transpose("up", "up", ndim=2, bias=False)]
    filled = bridge.from_torch({"up.weight": weight}, {"up": {"kernel": like}}, rules)
    kernel = filled["up"]["kernel"]
    assert kernel.sharding == sharding
    expected = weight.flip(2, 3).permute(2, 3, 0, 1)
    np.testing.assert_array_equal(kernel, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_checkpoint_of_any_float_fills_float32_and_returns_bit_by_bit(dtype):
    twins = TWINS["encoder"]
    state = {key: value.to(dtype) for key, value in twins.torch().state_dict().items()}
    model = bridge.from_torch(state, twins.like(), twins.rules)
    assert model.linear1.kernel.dtype == jnp.float32
    again = bridge.to_torch(model, twins.rules, like=state)
    assert all(torch.equal(again[key], state[key]) for key in state)
    assert {tensor.dtype for tensor in again.values()} == {dtype}


def test_integers_are_kept_and_never_become_floats():
    state = {"table": torch.arange(6, dtype=torch.int32).reshape(2, 3)}
    rules = [Rule("table", "table", "a b -> b a")]
    like = {"table": jax.ShapeDtypeStruct((3, 2), jnp.int32)}
    filled = bridge.from_torch(state, like, rules)
    np.testing.assert_array_equal(filled["table"], state["table"].numpy().T)
    assert torch.equal(bridge.to_torch(filled, rules)["table"], state["table"])
    floats = {"table": jax.ShapeDtypeStruct((3, 2), jnp.float32)}
    with pytest.raises(ValueError, match=facts("table", "int32", "float32")):
        bridge.from_torch(state, floats, rules)


def test_layers_of_a_list_are_stacked_where_the_tree_has_them_so():
    net = torch.nn.Sequential(*[torch.nn.Linear(3, 4) for _ in range(5)])
    like = {
        "kernel": jax.ShapeDtypeStruct((5, 3, 4), jnp.float32),
        "bias": jax.ShapeDtypeStruct((5, 4), jnp.float32),
    }
    rules = [
        Rule("{layer}.weight", "kernel", "out in -> in out"),
        Rule("{layer}.bias", "bias", "out -> out"),
    ]
    filled = bridge.from_torch(net, like, rules)
    np.testing.assert_array_equal(filled["kernel"][3], net[3].weight.detach().T)
    again = bridge.to_torch(filled, rules)
    assert list(again) == [*[f"{i}.weight" for i in range(5)]] + [
        f"{i}.bias" for i in range(5)
    ]
    net.load_state_dict(again)
    longer = net.append(torch.nn.Linear(3, 4))
    with pytest.raises(ValueError, match=facts("(2)", "5.weight", "5.bias")):
        bridge.from_torch(longer, like, rules)
    shorter = net[:3]
    with pytest.raises(ValueError, match=facts("(4)", "3.weight", "4.bias")):
        bridge.from_torch(shorter, like, rules)


def test_parts_of_one_tensor_agree_on_the_dims_that_are_not_cut():
    leaves = {"a": (2, 3), "b": (2, 4)}
    like = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in leaves.items()}
    rules = [Rule("ab", ("a", "b"), ("x y -> x y", "x z -> x z"))]
    with pytest.raises(ValueError, match=facts("b", "(2, 4)", "4", "z=3")):
        bridge.from_torch({"ab": torch.zeros(4, 3)}, like, rules)


def test_one_error_lists_all_that_is_wrong():
    state = {
        "a.weight": torch.zeros(2, 3),
        "b.weight": torch.zeros(2, 3, dtype=torch.int64),
        "c.weight": torch.zeros(2, 3),
        "d": torch.zeros(12),
        "stray": torch.zeros(1),
    }
    leaves = {"a.kernel": (2, 3), "b.kernel": (3, 2), "c.kernel": (3, 2)}
    leaves |= {"d": (3, 4), "bare": (1,), "e": (2, 2)}
    like = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in leaves.items()}
    rules = [
        *[adapt.linear(name, name, bias=False) for name in "abc"],
        Rule("c.weight", "e", "a b -> a b"),
        Rule("d", "d", "(a b) -> b a"),
        Rule("f", "g", "a -> a"),
        adapt.linear("a", "gone", bias=False),
    ]
    with pytest.raises(ValueError) as raised:
        bridge.from_torch(state, like, rules)
    for line in (
        "'the state dict' and the tree do not fit the rules",
        "missing in the source (1):\n    f",
        "missing in the tree (2):\n    g\n    gone.kernel",
        "unexpected in the source (1):\n    stray",
        "unexpected in the tree (1):\n    bare",
        "dim 0 of a.kernel, of shape (2, 3), is 2, but in=3 is 3",
        "b.weight: int64, the tree wants float32",
        "tensor a.weight\n    tensor c.weight",
    ):
        assert line in str(raised.value)


def test_a_size_that_no_shape_tells_is_asked_for():
    state = {"d": torch.arange(12.0)}
    rules, back = [Rule("d", "d", "(a b) -> (b a)")], jax.ShapeDtypeStruct((12,), "f4")
    with pytest.raises(ValueError, match=facts("sizes", "a, b", "d")):
        bridge.from_torch(state, {"d": back}, rules)
    filled = bridge.from_torch(state, {"d": back}, rules, sizes={"a": 3})
    np.testing.assert_array_equal(filled["d"], state["d"].reshape(3, 4).T.reshape(-1))


def test_a_tensor_made_of_two_dtypes_gets_none_in_silence():
    tree = {"a": jnp.ones(2, jnp.float32), "b": jnp.ones(3, jnp.bfloat16)}
    rules = [Rule("ab", ("a", "b"), ("x -> x", "y -> y"))]
    with pytest.raises(ValueError, match=facts("ab", "like")):
        bridge.to_torch(tree, rules)
    like = {"ab": torch.zeros(5, dtype=torch.float16)}
    assert bridge.to_torch(tree, rules, like)["ab"].dtype == torch.float16


def test_what_comes_back_shares_no_memory_with_what_it_was_made_of():
    twins, net = TWINS["cnn"], TWINS["cnn"].torch()
    model = bridge.from_torch(net, twins.like(), twins.rules)
    for tensor in bridge.to_torch(model, twins.rules, like=net).values():
        tensor.zero_()
    assert_same_leaves(
        nnx.state(model),
        nnx.state(bridge.from_torch(twins.torch(), twins.like(), twins.rules)),
    )
    assert net.stem.weight.any() and net.bn.weight.any()


def test_an_abstract_tree_has_nothing_to_take_back():
    twins = TWINS["encoder"]
    with pytest.raises(ValueError, match=facts("linear1.bias, linear1.kernel")):
        bridge.to_torch(twins.like(), twins.rules)


def test_attention_to_another_width_has_three_projections_of_its_own():
    torch.manual_seed(0)
    net = torch.nn.MultiheadAttention(12, 4, kdim=6, vdim=6, batch_first=True)
    torch.nn.init.normal_(net.in_proj_bias)
    like = nnx.eval_shape(
        lambda: nnx.MultiHeadAttention(
            4, 12, in_kv_features=6, decode=False, rngs=nnx.Rngs(0)
        )
    )
    model = bridge.from_torch(net, like, [adapt.attention("", "", fused=False)])
    query, memory = normal(2, 5, 12), normal(2, 3, 6)
    with torch.no_grad():
        q, kv = torch.from_numpy(query), torch.from_numpy(memory)
        theirs = net(q, kv, kv)[0].numpy()
    assert error(np.asarray(model(query, memory, memory)), theirs) <= TOLERANCE
    again = bridge.to_torch(model, [adapt.attention("", "", fused=False)], like=net)
    assert all(torch.equal(again[k], v) for k, v in net.state_dict().items())
    assert bridge.propose_rules(net, like).is_certain
