"""A run that Megatron began goes on here as it would have gone on there."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from bridge_helpers import abstract_model, like_of
from flax import nnx
from helpers.errors import facts

import bridge
import fsdp_jax as fsdp
from bridge._tree import named_leaves
from bridge.megatron import load_megatron_adam, open_megatron
from bridge.models import Decoder, DecoderLayer

pytestmark = pytest.mark.torch

# ||a - b|| / ||b|| of each parameter's change in one step, float32: the moments are the
# same bits, and two programs divide and take roots in another order.
CHANGE = 1e-5
# The same of the parameter itself, as a whole.
PARAMETER = 1e-6
LR, B1, B2, EPS, DECAY = 1e-2, 0.9, 0.95, 1e-8, 0.1


@pytest.fixture(params=["qwen3", "mixtral"])
def begun(request, golden):
    path = golden(request.param) / "torch_dist"
    config = bridge.megatron.from_args(open_megatron(path).args)
    return path, config, load_megatron_adam(path, like_of(config))


def gradients(config, params):
    graph, _ = nnx.split(abstract_model(config))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (8, 17))

    def loss(params):
        logits = nnx.merge(graph, params)(jnp.asarray(tokens[:, :-1]))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    return jax.jit(jax.grad(loss))(params), tokens


def continued(tx, adam):
    return optax.tree.set(
        tx.init(adam.params), mu=adam.mu, nu=adam.nu, count=adam.count
    )


def torch_step(weight, grad, mu, nu, count):
    """What torch's AdamW makes of one tensor from this state."""
    parameter = torch.nn.Parameter(torch.from_numpy(np.array(weight)))
    adam = torch.optim.AdamW(
        [parameter], lr=LR, betas=(B1, B2), eps=EPS, weight_decay=DECAY
    )
    adam.state[parameter] = {
        "step": torch.tensor(float(count)),
        "exp_avg": torch.from_numpy(np.array(mu)),
        "exp_avg_sq": torch.from_numpy(np.array(nu)),
    }
    parameter.grad = torch.from_numpy(np.array(grad))
    adam.step()
    return parameter.detach().numpy()


def relative(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_the_next_step_is_that_of_torchs_adam(begun):
    path, config, adam = begun
    tx = optax.adamw(LR, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)
    state = continued(tx, adam)
    grads, _ = gradients(config, adam.params)
    updates, _ = tx.update(grads, state, adam.params)
    got = named_leaves(optax.apply_updates(adam.params, updates))
    parts = [named_leaves(tree) for tree in (adam.params, grads, adam.mu, adam.nu)]
    for name, before in parts[0].items():
        want = torch_step(*(part[name] for part in parts), adam.count)
        assert relative(got[name], want) < PARAMETER
        assert relative(got[name] - before, want - np.asarray(before)) < CHANGE
        afresh = torch_step(before, parts[1][name], 0 * before, 0 * before, 0)
        assert relative(afresh - np.asarray(before), want - np.asarray(before)) > 0.1


def test_it_goes_on_sharded_as_on_one_device(begun):
    path, config, adam = begun
    tx = optax.adamw(LR, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)
    grads, tokens = gradients(config, adam.params)
    updates, _ = tx.update(grads, continued(tx, adam), adam.params)
    want = named_leaves(optax.apply_updates(adam.params, updates))

    plan = fsdp.fully_shard(
        lambda key: Decoder(config, rngs=nnx.Rngs(key), scan=fsdp.scan),
        fsdp.make_mesh(),
        units=[DecoderLayer],
    )
    begun = load_megatron_adam(path, plan.params)
    opt_state = continued(tx, begun)
    state = fsdp.init_state(
        plan, tx, begun.params, opt_state=opt_state, step=int(begun.count)
    )

    def loss(model, tokens):
        logits = model(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    state, _ = fsdp.make_train_step(plan, loss, tx)(state, jnp.asarray(tokens))
    assert int(state.step) == begun.count + 1
    for name, leaf in named_leaves(fsdp.sharding.unpack(state.params)).items():
        assert relative(leaf, want[name]) < 1e-4  # a sum over devices moves a moment


def test_a_checkpoint_without_moments_says_what_is_left_out(golden):
    path = golden("qwen3") / "legacy"
    config = bridge.megatron.from_args(open_megatron(path).args)
    with pytest.raises(ValueError, match=facts("iter_0000007", "'rng_state'")):
        load_megatron_adam(path, like_of(config))


def test_an_optimizer_state_of_another_optimizer_is_refused():
    plan = fsdp.fully_shard(lambda key: {"w": jnp.ones((8, 8))}, fsdp.make_mesh())
    params = fsdp.init_params(plan, jax.random.key(0))
    other = optax.sgd(0.1, momentum=0.9).init(params)
    with pytest.raises(
        ValueError, match=facts("opt_state", "4", "0.mu.w", "0.trace.w")
    ):
        fsdp.init_state(plan, optax.adamw(0.1), params, opt_state=other)
