"""From PyTorch: the same outputs; and back: the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch_twins import TWINS, Twins, normal, outputs

import bridge
from bridge import Rule, adapt

pytestmark = pytest.mark.torch

# Of the largest output: two float32 programs that sum in other orders. Measured here:
# below 2e-6.
TOLERANCE = 1e-5


def error(ours, theirs) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.fixture(params=list(TWINS))
def twins(request) -> Twins:
    return TWINS[request.param]


def test_outputs_are_those_of_pytorch(twins):
    net = twins.torch()
    model = bridge.from_torch(net, twins.mould(), twins.rules)
    theirs = outputs(net, twins.inputs)
    assert theirs.std() > 0.1
    e = error(outputs(model, twins.inputs), theirs)
    print(e)
    assert e <= TOLERANCE
