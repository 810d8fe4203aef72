"""Small models written twice, in PyTorch and in flax.nnx, and the rules between them.

Where layers differ by more than layout (the padding of a transposed convolution, the
order in which a feature map is flattened) the twin in nnx says so.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import bridge
from bridge import adapt


class TorchMLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 6)
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(6, 6), torch.nn.Linear(6, 5, bias=False)]
        )
        self.norm = torch.nn.LayerNorm(5)
        self.rms = torch.nn.RMSNorm(5, eps=1e-5)
        self.scale = torch.nn.Parameter(torch.ones(5))

    def forward(self, x):
        x = torch.relu(self.layers[0](self.embed(x)))
        return self.scale * self.rms(self.norm(self.layers[1](x)) + 1)


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 6, rngs=rngs)
        self.layers = nnx.List(
            [
                nnx.Linear(6, 6, rngs=rngs),
                nnx.Linear(6, 5, use_bias=False, rngs=rngs),
            ]
        )
        self.norm = nnx.LayerNorm(5, epsilon=1e-5, rngs=rngs)
        self.rms = nnx.RMSNorm(5, epsilon=1e-5, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(5))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)  # its random state is no weight

    def __call__(self, x):
        x = nnx.relu(self.layers[0](self.embed(x)))
        x = self.rms(self.norm(self.layers[1](x)) + 1)
        return self.scale[None, None] * self.dropout(x, deterministic=True)


class TorchCNN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.bn = torch.nn.BatchNorm2d(8)
        self.grouped = torch.nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.groups = torch.nn.GroupNorm(2, 8)
        self.up = torch.nn.ConvTranspose2d(8, 4, (4, 3), stride=2, padding=1)
        self.again = torch.nn.ConvTranspose2d(4, 4, 3, padding=1)
        self.head = torch.nn.Linear(4 * 8 * 7, 5)

    def forward(self, x):
        x = torch.relu(self.groups(self.grouped(self.bn(self.stem(x)))))
        return self.head(self.again(self.up(x)).flatten(1))


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), padding=1, rngs=rngs)
        self.bn = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
        self.grouped = nnx.Conv(
            8, 8, (3, 3), padding=1, feature_group_count=2, rngs=rngs
        )
        self.groups = nnx.GroupNorm(8, num_groups=2, epsilon=1e-5, rngs=rngs)
        self.up = nnx.ConvTranspose(
            8, 4, (4, 3), strides=2, padding=((2, 2), (1, 1)), rngs=rngs
        )
        self.again = nnx.ConvTranspose(
            4, 4, (3, 3), padding=1, transpose_kernel=True, rngs=rngs
        )
        self.head = nnx.Linear(8 * 7 * 4, 5, rngs=rngs)

    def __call__(self, x):
        x = x.transpose(0, 2, 3, 1)
        x = nnx.relu(self.groups(self.grouped(self.bn(self.stem(x)))))
        x = self.again(self.up(x))
        return self.head(x.reshape(x.shape[0], -1))


class Encoder(nnx.Module):
    """What `nn.TransformerEncoderLayer` is, without its dropout."""

    def __init__(self, rngs):
        self.self_attn = nnx.MultiHeadAttention(4, 12, decode=False, rngs=rngs)
        self.linear1 = nnx.Linear(12, 12, rngs=rngs)
        self.linear2 = nnx.Linear(12, 12, rngs=rngs)
        self.norm1 = nnx.LayerNorm(12, epsilon=1e-5, rngs=rngs)
        self.norm2 = nnx.LayerNorm(12, epsilon=1e-5, rngs=rngs)

    def __call__(self, x):
        x = self.norm1(x + self.self_attn(x))
        return self.norm2(x + self.linear2(nnx.relu(self.linear1(x))))


class TorchRecurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(6, 5, batch_first=True)
        self.gru = torch.nn.GRU(5, 4, batch_first=True)
        self.back = torch.nn.LSTM(4, 3, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.back(self.gru(self.lstm(x)[0])[0])[0]


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.lstm = nnx.RNN(nnx.OptimizedLSTMCell(6, 5, rngs=rngs), rngs=rngs)
        self.gru = nnx.RNN(nnx.GRUCell(5, 4, rngs=rngs), rngs=rngs)
        self.back = nnx.Bidirectional(
            nnx.RNN(nnx.LSTMCell(4, 3, rngs=rngs), rngs=rngs),
            nnx.RNN(nnx.OptimizedLSTMCell(4, 3, rngs=rngs), rngs=rngs),
            rngs=rngs,
        )

    def __call__(self, x):
        return self.back(self.gru(self.lstm(x)))


def encoder() -> torch.nn.Module:
    return torch.nn.TransformerEncoderLayer(12, 4, 12, dropout=0, batch_first=True)


def hidden_bias_of_n_is_zero(net: torch.nn.Module) -> None:
    net.gru.bias_hh_l0.data[8:] = 0  # nnx.GRUCell has no place for it


@dataclasses.dataclass(frozen=True)
class Twins:
    make_torch: Callable[[], torch.nn.Module]
    make_nnx: Callable[[nnx.Rngs], nnx.Module]
    inputs: np.ndarray
    rules: Sequence[Any]
    prepare: Callable[[torch.nn.Module], None] = lambda net: None

    def torch(self) -> torch.nn.Module:
        """The model in PyTorch, every tensor of it random."""
        torch.manual_seed(0)
        net = self.make_torch().eval()
        for key, value in net.state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape) / 2)
            if key.endswith("running_var"):
                value.abs_().add_(0.5)
        self.prepare(net)
        return net

    def like(self) -> nnx.Module:
        return nnx.eval_shape(lambda: self.make_nnx(nnx.Rngs(0)))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


TWINS = {
    "mlp": Twins(
        TorchMLP,
        MLP,
        np.arange(14).reshape(2, 7) % 7,
        [
            adapt.embedding("embed", "embed"),
            adapt.linear("layers.0", "layers.0"),
            adapt.linear("layers.1", "layers.1", bias=False),
            adapt.norm("norm", "norm"),
            adapt.norm("rms", "rms", bias=False),
            bridge.Rule("scale", "scale", "embed -> embed"),
        ],
    ),
    "cnn": Twins(
        TorchCNN,
        CNN,
        normal(2, 3, 4, 4),
        [
            adapt.conv("stem", "stem", ndim=2),
            adapt.batch_norm("bn", "bn"),
            adapt.conv("grouped", "grouped", ndim=2),
            adapt.norm("groups", "groups"),
            adapt.conv_transpose("up", "up", ndim=2),
            adapt.conv_transpose("again", "again", ndim=2, transpose_kernel=True),
            adapt.linear("head", "head", flattened=(4, 8, 7)),
        ],
    ),
    "encoder": Twins(
        encoder,
        Encoder,
        normal(2, 5, 12),
        [
            adapt.attention("self_attn", "self_attn"),
            adapt.linear("linear1", "linear1"),
            adapt.linear("linear2", "linear2"),
            adapt.norm("norm1", "norm1"),
            adapt.norm("norm2", "norm2"),
        ],
    ),
    "recurrent": Twins(
        TorchRecurrent,
        Recurrent,
        normal(2, 7, 6),
        [
            adapt.lstm("lstm", "lstm.cell", bias="sum"),
            adapt.gru("gru", "gru.cell", bias="sum"),
            adapt.lstm(
                "back", "back.forward_rnn.cell", bias="sum", cell="nnx.LSTMCell"
            ),
            adapt.lstm(
                "back", "back.backward_rnn.cell", bias="sum", suffix="_l0_reverse"
            ),
        ],
        hidden_bias_of_n_is_zero,
    ),
}


def outputs(model: Any, inputs: np.ndarray) -> np.ndarray:
    if isinstance(model, torch.nn.Module):
        with torch.no_grad():
            return model(torch.from_numpy(inputs)).numpy()
    return np.asarray(jax.jit(lambda model, x: model(x))(model, inputs))
