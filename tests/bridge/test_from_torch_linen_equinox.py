"""From PyTorch to linen and equinox: the same outputs."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_twins import normal

import bridge
from bridge import adapt

pytestmark = pytest.mark.torch

# Of the largest output: two float32 programs that sum in other orders.
TOLERANCE = 1e-5


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv1d(3, 6, 3, padding=1)
        self.up = torch.nn.ConvTranspose1d(6, 6, 4, stride=2, padding=1)
        self.bn = torch.nn.BatchNorm1d(6)
        self.attn = torch.nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = torch.nn.LayerNorm(6)
        self.fc = torch.nn.Linear(6, 6)

    def forward(self, x):
        x = self.bn(self.up(self.conv(x))).mT
        return self.fc(self.norm(self.attn(x, x, x)[0]))


class Linen(nn.Module):
    def setup(self):
        self.conv = nn.Conv(6, (3,), padding=1)
        self.up = nn.ConvTranspose(
            6, (4,), strides=(2,), padding=((2, 2),), transpose_kernel=True
        )
        self.bn = nn.BatchNorm(use_running_average=True)
        self.attn = nn.MultiHeadDotProductAttention(2)
        self.norm = nn.LayerNorm(epsilon=1e-5)
        self.fc = nn.Dense(6)

    def __call__(self, x):
        x = self.bn(self.up(self.conv(x.transpose(0, 2, 1))))
        return self.fc(self.norm(self.attn(x)))


RULES = [
    adapt.conv("conv", "params.conv", ndim=1),
    adapt.conv_transpose("up", "params.up", ndim=1, transpose_kernel=True),
    adapt.batch_norm("bn", "params.bn", stats="batch_stats.bn"),
    adapt.attention("attn", "params.attn"),
    adapt.norm("norm", "params.norm"),
    adapt.linear("fc", "params.fc"),
]


class TorchConvNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 6, 3, padding=1)
        self.groups = torch.nn.GroupNorm(2, 6)
        self.up = torch.nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1)
        self.fc = torch.nn.Linear(4 * 7 * 7, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.embed = torch.nn.Embedding(5, 7)

    def forward(self, x):
        x = self.fc(self.up(self.groups(self.conv(x))).flatten(1))
        return self.norm(torch.tanh(x)) + self.embed(torch.tensor([3]))


class Equinox(eqx.Module):
    conv: eqx.nn.Conv2d
    groups: eqx.nn.GroupNorm
    up: eqx.nn.ConvTranspose2d
    fc: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    embed: eqx.nn.Embedding
    activation: object  # a leaf that is no array
    dropout: eqx.nn.Dropout  # and numbers that are no weights

    def __init__(self, key):
        self.conv = eqx.nn.Conv2d(3, 6, 3, padding=1, key=key)
        self.groups = eqx.nn.GroupNorm(2, 6)
        self.up = eqx.nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, key=key)
        self.fc = eqx.nn.Linear(4 * 7 * 7, 7, key=key)
        self.norm = eqx.nn.LayerNorm(7)
        self.embed = eqx.nn.Embedding(5, 7, key=key)
        self.activation = jnp.tanh
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x):
        x = self.fc(self.up(self.groups(self.conv(x))).reshape(-1))
        return self.norm(self.activation(x)) + self.embed(3)


EQUINOX_RULES = [
    adapt.equinox.conv("conv", "conv", ndim=2),
    adapt.equinox.norm("groups", "groups"),
    adapt.equinox.conv_transpose("up", "up", ndim=2),
    adapt.equinox.linear("fc", "fc"),
    adapt.equinox.norm("norm", "norm"),
    adapt.equinox.embedding("embed", "embed"),
]


def random_net(make) -> torch.nn.Module:
    torch.manual_seed(0)
    net = make().eval()
    for key, value in net.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.randn(value.shape) / 2)
        if key.endswith("running_var"):
            value.abs_().add_(0.5)
    return net


def torch_output(net, x) -> np.ndarray:
    with torch.no_grad():
        return net(torch.from_numpy(x)).numpy()


def assert_close(ours, theirs) -> None:
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max()


def test_variables_of_linen_give_pytorchs_outputs():
    net, x, model = random_net(TorchNet), normal(2, 3, 5), Linen()
    like = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = bridge.from_torch(net, like, RULES)
    assert_close(model.apply(variables, x), torch_output(net, x))
    again = bridge.to_torch(variables, RULES, like=net)
    state = net.state_dict()
    assert all(torch.equal(again[key], state[key]) for key in state)


@pytest.mark.parametrize("abstract", [True, False])
def test_modules_of_equinox_give_pytorchs_outputs(abstract):
    net, x = random_net(TorchConvNet), normal(2, 3, 4, 4)
    make = eqx.filter_eval_shape if abstract else lambda make, key: make(key)
    like = make(Equinox, jax.random.key(0))
    model = bridge.from_torch(net, like, EQUINOX_RULES)
    assert isinstance(model, Equinox)
    assert model.activation is jnp.tanh and model.dropout.p == 0.5
    assert_close(jax.vmap(model)(x), torch_output(net, x))
    again = bridge.to_torch(model, EQUINOX_RULES, like=net)
    state = net.state_dict()
    assert all(torch.equal(again[key], state[key]) for key in state)
