"""Proposals: certain by names and classes, or printed as code; never by shape."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from bridge_helpers import assert_same_leaves
from flax import nnx
from test_from_torch_linen_equinox import Equinox, Linen, TorchConvNet, TorchNet
from torch_twins import TWINS

import bridge
from bridge import adapt
from bridge.pytorch._match import canonical

pytestmark = pytest.mark.torch


def by_code(proposal: bridge.Proposal) -> list:
    """The rules that someone gets who pastes the table."""
    names = {"bridge": bridge, "adapt": adapt}
    exec(str(proposal), names)
    return names["rules"]


@pytest.mark.parametrize("name", ["mlp", "encoder"])
def test_a_module_and_its_twin_are_matched_by_names_and_classes(name):
    twins = TWINS[name]
    proposal = bridge.propose_rules(twins.torch(), twins.like())
    assert proposal.is_certain
    weights = nnx.Not(nnx.RngState)
    assert_same_leaves(
        nnx.state(bridge.from_torch(twins.torch(), twins.like()), weights),
        nnx.state(bridge.from_torch(twins.torch(), twins.like(), twins.rules), weights),
    )


@pytest.mark.parametrize("name", list(TWINS))
@pytest.mark.parametrize("as_module", [True, False])
def test_a_printed_table_is_code_that_gives_its_rules(name, as_module):
    twins = TWINS[name]
    net = twins.torch()
    proposal = bridge.propose_rules(
        net if as_module else net.state_dict(), twins.like()
    )
    assert tuple(by_code(proposal)) == proposal.rules


def test_a_square_matrix_of_no_known_class_is_in_doubt():
    twins = TWINS["mlp"]
    with pytest.raises(ValueError) as raised:
        bridge.from_torch(twins.torch().state_dict(), twins.like())
    doubts = [line for line in str(raised.value).splitlines() if "in doubt" in line]
    assert doubts == [
        '    adapt.linear("layers.0", "layers.0"),  # in doubt: square, (6, 6), and of '
        "no known class in PyTorch"
    ]
    assert "none is guessed" in str(raised.value)


class Conv1D(torch.nn.Module):
    """GPT-2's linear, of a class that is not PyTorch's: `[in, out]`."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(*shape))


def test_a_class_that_is_not_pytorchs_says_nothing():
    def like(wide):
        return nnx.eval_shape(
            lambda: nnx.Dict(fc=nnx.Linear(3, wide, use_bias=False, rngs=nnx.Rngs(0)))
        )

    square = torch.nn.ModuleDict({"fc": Conv1D(3, 3)})
    assert "square" in str(bridge.propose_rules(square, like(3)))
    wide = torch.nn.ModuleDict({"fc": Conv1D(3, 5)})
    (row,) = bridge.propose_rules(wide, like(5)).rows
    assert len(row.doubts) == 2 and "in=5 is 5 by the other shapes" in row.doubts[0]


def test_two_biases_a_flattened_map_and_strangers_are_in_doubt():
    cnn, recurrent = TWINS["cnn"], TWINS["recurrent"]
    text = str(bridge.propose_rules(cnn.torch(), cnn.like()))
    assert 'adapt.linear("head", "head"),  # in doubt: fed with a flattened' in text
    assert text.count("in doubt") == 1
    assert "# Ignored: bn.num_batches_tracked" in text
    text = str(bridge.propose_rules(recurrent.torch(), recurrent.like()))
    assert 'adapt.gru("gru", "gru.cell", bias="ih"),  # in doubt: two biases' in text
    assert "#   back.weight_ih_l0_reverse (12, 4)" in text
    assert "#   back.forward_rnn.cell.if_.kernel (4, 3)" in text


# Maps of 3 and 5 channels, 7 by 7, side by side: then all of a map, or its rows.
HEADS = {
    "Linear": (
        lambda: torch.nn.Linear(8 * 49, 4),
        lambda rngs: nnx.Linear(8 * 49, 4, rngs=rngs),
    ),
    "LayerNorm": (
        lambda: torch.nn.LayerNorm(8 * 49),
        lambda rngs: nnx.LayerNorm(8 * 49, rngs=rngs),
    ),
    "Conv1d": (
        lambda: torch.nn.Conv1d(8 * 7, 4, 1),
        lambda rngs: nnx.Conv(8 * 7, 4, (1,), rngs=rngs),
    ),
    "LSTM": (
        lambda: torch.nn.LSTM(8 * 7, 4, bias=False),
        lambda rngs: nnx.RNN(nnx.OptimizedLSTMCell(8 * 7, 4, rngs=rngs)),
    ),
    # Not flattened: as wide as the channels of another convolution, or of two.
    "LayerNorm of channels": (
        lambda: torch.nn.LayerNorm(5),
        lambda rngs: nnx.LayerNorm(5, rngs=rngs),
    ),
    "Conv2d of both": (
        lambda: torch.nn.Conv2d(8, 4, 3),
        lambda rngs: nnx.Conv(8, 4, (3, 3), rngs=rngs),
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_what_may_follow_a_flattened_map_of_several_is_in_doubt(name):
    in_torch, in_jax = HEADS[name]
    maps = {"a": torch.nn.Conv2d(1, 3, 3), "b": torch.nn.Conv2d(1, 5, 3)}
    net = torch.nn.ModuleDict({**maps, "head": in_torch()})

    def make():
        rngs = nnx.Rngs(0)
        maps = {n: nnx.Conv(1, c, (3, 3), rngs=rngs) for n, c in (("a", 3), ("b", 5))}
        return nnx.Dict(**maps, head=in_jax(rngs))

    rows = bridge.propose_rules(net, nnx.eval_shape(make)).rows
    doubts = {row.args[0]: row.doubts for row in rows}
    assert not doubts["a"] and not doubts["b"]
    asked = [doubt for doubt in doubts["head"] if "flattened" in doubt]
    assert len(asked) == (" of " not in name)


BEFORE = {
    "a map of 4 by 4": (64, lambda: torch.nn.ConvTranspose2d(4, 7, 3), True),
    "a map of 2 by 2": (16, lambda: torch.nn.Conv2d(4, 3, 3), True),
    "a scale and a shift of channels": (8, lambda: torch.nn.Conv2d(4, 3, 3), False),
    "channels": (4, lambda: torch.nn.Conv2d(4, 3, 3), False),
    "a linear layer": (64, lambda: torch.nn.Linear(64, 3), False),
}


@pytest.mark.parametrize("as_module", [True, False])
@pytest.mark.parametrize("name", BEFORE)
def test_what_may_be_put_into_a_map_is_in_doubt(name, as_module):
    width, make_behind, doubted = BEFORE[name]
    behind = make_behind()
    net = torch.nn.ModuleDict(
        {
            "fc": torch.nn.Linear(5, width),
            "norm": torch.nn.LayerNorm(width),
            "z": behind,
        }
    )

    def make():
        rngs = nnx.Rngs(0)
        kinds = {"ConvTranspose2d": nnx.ConvTranspose, "Conv2d": nnx.Conv}
        kind = kinds.get(type(behind).__name__)
        last = (
            nnx.Linear(64, 3, rngs=rngs)
            if kind is None
            else kind(4, behind.out_channels, (3, 3), rngs=rngs)
        )
        norm = nnx.LayerNorm(width, rngs=rngs)
        return nnx.Dict(fc=nnx.Linear(5, width, rngs=rngs), norm=norm, z=last)

    source = net if as_module else net.state_dict()
    rows = bridge.propose_rules(source, nnx.eval_shape(make)).rows
    (doubts,) = (row.doubts for row in rows if row.args[0] == "fc")
    assert any("feature map" in doubt for doubt in doubts) is doubted


@pytest.mark.parametrize(
    "shape, wanted",
    [
        ((4, 1, 1), (1, 1, 4)),
        ((1, 4, 1, 1), (1, 1, 1, 4)),
        ((1, 1, 4), (1, 4)),
        ((1, 4), (1, 1, 4)),
        ((3, 4, 1), (1, 3, 4)),
        ((1, 3, 4), (3, 1, 1, 4)),
        ((4, 1, 1), (4,)),
        ((1, 1), (1,)),
    ],
)
def test_dims_of_one_may_be_anywhere(shape, wanted):
    values = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    like = {"gain": jax.ShapeDtypeStruct(wanted, "float32")}
    found = bridge.from_torch({"gain": values}, like)["gain"]
    np.testing.assert_array_equal(found, values.reshape(wanted))


def test_a_dim_of_one_for_no_dim_is_in_doubt():
    like = {"slope": jax.ShapeDtypeStruct((), "float32")}
    (row,) = bridge.propose_rules({"slope": np.ones(1, "f4")}, like).rows
    assert row.doubts


def test_lists_that_count_otherwise_are_in_doubt():
    linears = [torch.nn.Linear(6, 6, bias=False) for _ in range(3)]
    relu = torch.nn.ReLU()
    net = torch.nn.Sequential(linears[0], relu, linears[1], relu, linears[2])

    class Net(nnx.Module):
        def __init__(self, count, rngs):
            made = [nnx.Linear(6, 6, use_bias=False, rngs=rngs) for _ in range(count)]
            self.layers = nnx.List(made)

    def doubts(theirs, count):
        like = nnx.eval_shape(lambda: Net(count, nnx.Rngs(0)))
        rows = bridge.propose_rules(theirs, like).rows
        return [any("0, 2, 4" in doubt for doubt in row.doubts) for row in rows]

    assert doubts(net, 3) == [True, True]
    assert doubts(torch.nn.Sequential(*linears), 3) == [False] * 3


def test_no_name_is_matched_by_its_shape():
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 5)})
    like = nnx.eval_shape(lambda: nnx.Dict(b=nnx.Linear(3, 5, rngs=nnx.Rngs(0))))
    proposal = bridge.propose_rules(net, like)
    assert proposal.rows == ()
    assert set(proposal.tensors) == {"a.weight", "a.bias"}
    assert set(proposal.leaves) == {"b.kernel", "b.bias"}


def test_layers_of_two_classes_are_in_doubt_even_if_shapes_fit():
    net = torch.nn.ModuleDict({"fc": torch.nn.Embedding(5, 3)})
    like = nnx.eval_shape(
        lambda: nnx.Dict(fc=nnx.Linear(3, 5, use_bias=False, rngs=nnx.Rngs(0)))
    )
    text = str(bridge.propose_rules(net, like))
    assert "in doubt: Embedding in PyTorch, Linear in the tree" in text


def test_variables_of_linen_are_matched_by_the_names_of_their_leaves():
    like = jax.eval_shape(Linen().init, jax.random.key(0), jnp.ones((2, 3, 5)))
    proposal = bridge.propose_rules(TorchNet(), like)
    rows = {row.name: row for row in proposal.rows}
    assert rows["adapt.batch_norm"].options == {"stats": "batch_stats.bn"}
    assert {name: row.doubts for name, row in rows.items() if row.doubts} == {
        "adapt.conv_transpose": (
            "square, (6, 6, 4), and of no known class in the tree",
            "nothing says whether it has `transpose_kernel`",
        ),
        "adapt.linear": ("square, (6, 6), and of no known class in the tree",),
    }
    assert not (proposal.tensors or proposal.leaves)
    without_classes = str(bridge.propose_rules(TorchNet().state_dict(), like))
    assert "no class says what it is" in without_classes


def test_modules_of_equinox_are_matched_by_their_classes():
    like = Equinox(jax.random.key(0))
    proposal = bridge.propose_rules(TorchConvNet(), like)
    assert proposal.is_certain


def test_sequences_and_wrappers_have_other_names_in_flax():
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)
    )
    like = nnx.eval_shape(
        lambda: nnx.Sequential(
            nnx.Linear(3, 4, rngs=nnx.Rngs(0)),
            jnp.tanh,
            nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
        )
    )
    assert bridge.propose_rules(net, like).is_certain
    wrapped = torch.nn.ModuleDict({"module": net})
    assert bridge.propose_rules(wrapped, like).is_certain


@pytest.mark.parametrize("framework", ["nnx", "equinox"])
def test_a_model_may_be_one_layer(framework):
    net = torch.nn.Linear(3, 3)
    like = (
        nnx.eval_shape(lambda: nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
        if framework == "nnx"
        else eqx.nn.Linear(3, 3, key=jax.random.key(0))
    )
    model = bridge.from_torch(net, like)
    kernel = model.kernel[...] if framework == "nnx" else model.weight.T
    np.testing.assert_array_equal(kernel, net.weight.detach().T)


@pytest.mark.parametrize(
    "path, name",
    [
        ("params.layers_0.fc", "0.fc"),
        ("module._orig_mod.layers.0.fc", "0.fc"),
        ("rnn.cell", "rnn"),
        ("layers.norm", "layers.norm"),
        ("block_12", "block.12"),
        ("conv_2d", "conv_2d"),
        ("params", ""),
    ],
)
def test_both_sides_habits_are_taken_off_a_name(path, name):
    assert canonical(path) == name
