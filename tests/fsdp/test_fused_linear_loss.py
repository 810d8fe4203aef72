"""A head and its cross entropy in one: the same numbers, without the logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.errors import facts
from helpers.hlo import collectives, group_size
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp
from fsdp_jax import ops

TOKENS, EMBED, VOCAB = (4, 3), 8, 20
KEYS = jax.random.split(jax.random.key(0), 3)
HIDDEN = jax.random.normal(KEYS[0], (*TOKENS, EMBED))
KERNEL = jax.random.normal(KEYS[1], (EMBED, VOCAB))
TARGETS = jax.random.randint(KEYS[2], TOKENS, 0, VOCAB)
EPS = 1e-6


def cap(logits):
    return 3 * jnp.tanh(logits / 3)


def fused(**options):
    def op(hidden, kernel, targets):
        return ops.fused_linear_cross_entropy(hidden, kernel, targets, **options)

    return op


def unfused(logit_fn=lambda x: x, label_smoothing=0.0, z_loss=0.0, vocab_size=VOCAB):
    def op(hidden, kernel, targets):
        logits = logit_fn(hidden @ kernel)[..., :vocab_size]
        labels = jax.nn.one_hot(targets, vocab_size)
        labels = optax.smooth_labels(labels, label_smoothing)
        z = jax.nn.logsumexp(logits, axis=-1)
        return optax.softmax_cross_entropy(logits, labels) + z_loss * z**2

    return op


def split_over_tp(op, **options):
    """The head in the hands of four ranks, each with a part of the vocabulary."""
    return jax.shard_map(
        op,
        mesh=fsdp.make_mesh(tp=4),
        in_specs=(P(), P(None, "tp"), P()),
        out_specs=P(),
        check_vma=False,
    )


def value_and_grad(op, *args):
    weights = jnp.arange(12, dtype=jnp.float32).reshape(TOKENS) / 10

    def total(hidden, kernel, targets):
        losses = op(hidden, kernel, targets)
        return (losses * weights).sum(), losses

    grad = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    (_, losses), grads = jax.jit(grad)(*args)
    return losses, grads


def assert_close(got, want, eps=EPS):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2 * eps, atol=5 * eps)


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("chunk", [3, 100])
def test_losses_and_gradients_are_those_with_logits(chunk, is_split):
    op = fused(chunk=chunk)
    op = split_over_tp(op) if is_split else op
    got = value_and_grad(op, HIDDEN, KERNEL, TARGETS)
    assert_close(got, value_and_grad(unfused(), HIDDEN, KERNEL, TARGETS))


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(
    "options",
    [{"logit_fn": cap}, {"label_smoothing": 0.1}, {"z_loss": 0.1}, {"vocab_size": 13}],
    ids=lambda options: next(iter(options)),
)
def test_its_options_are_those_of_the_loss_with_logits(options, is_split):
    op = fused(chunk=3, **options)
    op = split_over_tp(op) if is_split else op
    args = (HIDDEN, KERNEL, TARGETS % 13)
    assert_close(value_and_grad(op, *args), value_and_grad(unfused(**options), *args))


def test_of_bfloat16_no_product_is_rounded_but_the_gradients():
    low = HIDDEN.astype(jnp.bfloat16), KERNEL.astype(jnp.bfloat16), TARGETS
    losses, grads = value_and_grad(fused(chunk=3), *low)
    wide = [x.astype(jnp.float32) for x in low[:2]]
    want, want_grads = value_and_grad(unfused(), *wide, TARGETS)
    assert losses.dtype == jnp.float32
    assert_close(losses, want)
    for got, wanted in zip(grads, want_grads, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            got.astype(jnp.float32), wanted, rtol=0.02, atol=0.02
        )


# Memory


@pytest.fixture
def all_optimizations():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def temporaries(op, tokens=512, vocab=16384, embed=32):
    """Bytes of a loss and its gradients, beyond arguments and results."""
    args = (
        jax.ShapeDtypeStruct((tokens, embed), jnp.float32),
        jax.ShapeDtypeStruct((embed, vocab), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    grad = jax.value_and_grad(lambda *args: op(*args).mean(), argnums=(0, 1))
    return jax.jit(grad).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_that_of_a_chunk_and_not_of_the_vocabulary(all_optimizations):
    few, many = (temporaries(fused(chunk=1024), vocab=n) for n in (16384, 65536))
    chunk = 4 * 512 * 1024
    # The logits of a chunk and their gradient, and two pieces of the kernel.
    assert chunk < few < 3 * chunk
    # A few numbers a token and chunk come with a larger vocabulary.
    assert many - few < 0.1 * chunk
    wide = temporaries(fused(chunk=2048))
    assert chunk / 2 < wide - few < 3 * chunk


def test_logits_that_are_made_whole_would_be_noticed(all_optimizations):
    def op(hidden, kernel, targets):
        return ops.vocab_parallel_cross_entropy(hidden @ kernel, targets)

    few, many = (temporaries(op, vocab=n) for n in (16384, 65536))
    assert many - few > 0.9 * 4 * 512 * (65536 - 16384)


# Under a plan

ROWS, SEQ = 16, 5


def make_weights(key):
    embed, head = jax.random.split(key)
    return {
        "embed": jax.random.normal(embed, (VOCAB, EMBED)),
        "head": {"kernel": 0.3 * jax.random.normal(head, (EMBED, VOCAB))},
    }


def loss_with(op):
    @fsdp.unit
    def head(weights, hidden, targets):
        return op(hidden, weights["kernel"], targets)

    def loss_fn(weights, batch):
        hidden = jnp.tanh(weights["embed"][batch["tokens"]])
        return head(weights["head"], hidden, batch["targets"]).mean()

    return loss_fn


def batch():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ + 1), np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def plan_of(tp, **policy):
    tensor = {"tensor_parallel": {"head.kernel": 1}} if tp > 1 else {}
    config = fsdp.FSDPConfig(mp_policy=fsdp.MixedPrecisionPolicy(**policy), **tensor)
    return fsdp.fully_shard(make_weights, fsdp.make_mesh(tp=tp), ["head"], config)


@pytest.mark.parametrize("tp", [1, 2])
def test_in_a_unit_it_computes_what_one_device_does(tp):
    plan = plan_of(tp)
    compute = fsdp.value_and_grad(plan, loss_with(fused(chunk=3)), num_microbatches=2)
    params = fsdp.init_params(plan, jax.random.key(0))
    (loss, _), grads = compute(params, batch())
    weights = make_weights(jax.random.key(0))
    want = jax.value_and_grad(loss_with(unfused()))(weights, batch())
    assert_close((loss, grads), want)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_kernel_is_gathered_beside_the_chunks_and_not_for_each(tp):
    plan = plan_of(tp, param_dtype=jnp.bfloat16)
    tx = optax.sgd(0.1)
    step = fsdp.make_train_step(plan, loss_with(fused(chunk=3)), tx)
    compiled = step.lower(fsdp.abstract_state(plan, tx), batch()).compile()
    data = [c for c in collectives(compiled.as_text()) if group_size(c.groups) != tp]
    gathers = [
        c for c in data if c.op == "all-gather" and c.shape == (EMBED, VOCAB // tp)
    ]
    # In forward and in backward, which XLA:CPU may find to be the same.
    assert 1 <= len(gathers) <= 2
    assert not [c for c in data if c.loops]


def test_chunks_of_nothing_are_refused():
    with pytest.raises(ValueError, match=facts("chunk=0", "1")):
        fused(chunk=0)(HIDDEN, KERNEL, TARGETS)
