"""PyTorch's cells have two biases where flax has one: nothing is added unasked."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers.errors import facts

import bridge
from bridge import adapt

pytestmark = pytest.mark.torch

# Of outputs within (-1, 1): two float32 programs that sum in other orders.
TOLERANCE = 1e-5

CELLS = {
    "nnx.OptimizedLSTMCell": nnx.OptimizedLSTMCell,
    "nnx.LSTMCell": nnx.LSTMCell,
    "nnx.GRUCell": nnx.GRUCell,
}
LINEN = {
    "LSTMCell": nn.LSTMCell,
    "OptimizedLSTMCell": nn.OptimizedLSTMCell,
    "GRUCell": nn.GRUCell,
}


def torch_cell(name: str, zero: slice = slice(0)) -> torch.nn.Module:
    torch.manual_seed(0)
    cls = torch.nn.GRUCell if "GRU" in name else torch.nn.LSTMCell
    cell = cls(6, 4)
    cell.bias_hh.data[zero] = 0
    return torch.nn.ModuleDict({"cell": cell})


def adapter(name: str, bias, cell: str):
    make = adapt.gru if "GRU" in name else adapt.lstm
    return make("cell", "cell", bias=bias, cell=cell, suffix="")


def like_of(name: str) -> nnx.State:
    make = CELLS[name]
    cell = nnx.eval_shape(lambda: make(6, 4, rngs=nnx.Rngs(0)))
    return nnx.State({"cell": nnx.state(cell)})


def torch_output(net, inputs) -> np.ndarray:
    states = [torch.from_numpy(x) for x in inputs]
    x, *carry = states
    with torch.no_grad():
        if isinstance(net["cell"], torch.nn.GRUCell):
            return net["cell"](x, carry[0]).numpy()
        return net["cell"](x, (carry[0], carry[1]))[0].numpy()


@pytest.fixture
def inputs() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.normal(size=(3, n)).astype(np.float32) for n in (6, 4, 4)]


@pytest.mark.parametrize("name", list(CELLS))
def test_a_bias_that_would_be_lost_is_refused(name):
    rules = [adapter(name, "ih", name)]
    with pytest.raises(ValueError, match=facts("cell.bias_hh", "cell.bias_ih")):
        bridge.from_torch(torch_cell(name), like_of(name), rules)


@pytest.mark.parametrize("name", list(CELLS))
def test_a_zero_bias_is_left_out_and_comes_back(name):
    state = torch_cell(name, slice(None)).state_dict()
    rules = [adapter(name, "ih", name)]
    filled = bridge.from_torch(state, like_of(name), rules)
    again = bridge.to_torch(filled, rules, like=state)
    assert all(torch.equal(again[key], state[key]) for key in state)
    assert list(again) == list(state)


def test_what_a_gru_scales_by_its_gate_is_no_part_of_a_sum():
    rules = [adapter("nnx.GRUCell", "sum", "nnx.GRUCell")]
    like = like_of("nnx.GRUCell")
    with pytest.raises(
        ValueError, match=facts("cell.bias_hh", "2 of 3", "cell.bias_ih")
    ):
        bridge.from_torch(torch_cell("GRU"), like, rules)
    bridge.from_torch(torch_cell("GRU", slice(8, 12)), like, rules)


def test_how_two_biases_become_one_must_be_said():
    with pytest.raises(TypeError, match=facts("'bias'")):
        adapt.lstm("cell", "cell")
    with pytest.raises(ValueError, match=facts("'cell'", "bias=True", "'ih'", "'sum'")):
        adapt.gru("cell", "cell", bias=True)


def test_biases_of_two_dtypes_are_not_added():
    state = torch_cell("LSTM").state_dict()
    state["cell.bias_hh"] = state["cell.bias_hh"].bfloat16()
    rules = [adapter("LSTM", "sum", "nnx.LSTMCell")]
    with pytest.raises(
        ValueError,
        match=facts("cell.bias_hh", "bfloat16", "cell.bias_ih", "float32", "(16,)"),
    ):
        bridge.from_torch(state, like_of("nnx.LSTMCell"), rules)


@pytest.mark.parametrize("name", list(LINEN))
def test_cells_of_linen_give_pytorchs_outputs(name, inputs):
    cell, net = LINEN[name](4), torch_cell(name)
    x, h, c = inputs
    carry = h if name == "GRUCell" else (c, h)
    like = jax.eval_shape(cell.init, jax.random.key(0), carry, x)["params"]
    rules = [adapter(name, "sum", "linen")]
    params = bridge.from_torch(net, {"cell": like}, rules)["cell"]
    ours = cell.apply({"params": params}, carry, x)[1]
    theirs = torch_output(net, inputs)
    assert np.abs(theirs).max() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


def test_a_gru_of_linen_needs_no_zero_and_adds_two_gates_of_three():
    net = torch_cell("GRU")
    cell = nn.GRUCell(4)
    like = jax.eval_shape(
        cell.init, jax.random.key(0), jnp.ones((1, 4)), jnp.ones((1, 6))
    )
    rules = [adapter("GRU", "sum", "linen")]
    filled = bridge.from_torch(net, {"cell": like["params"]}, rules)["cell"]
    ih, hh = (net["cell"].get_parameter(f"bias_{side}") for side in ("ih", "hh"))
    np.testing.assert_array_equal(filled["iz"]["bias"], (ih + hh).detach()[4:8])
    np.testing.assert_array_equal(filled["in"]["bias"], ih.detach()[8:])
    np.testing.assert_array_equal(filled["hn"]["bias"], hh.detach()[8:])
    again = bridge.to_torch({"cell": filled}, rules)
    assert torch.equal(again["cell.bias_hh"][8:], hh.detach()[8:])
    assert not again["cell.bias_hh"][:8].any()
