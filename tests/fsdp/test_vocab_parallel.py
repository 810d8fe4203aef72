"""Cross entropy, log-probabilities and entropy of a vocabulary split over `tp`."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.errors import facts
from helpers.hlo import collectives, group_size
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp
from fsdp_jax import ops
from fsdp_jax.ops.vocab import _chunked

BATCH, SEQ, VOCAB = 4, 3, 20
TARGETS = jax.random.randint(jax.random.key(1), (BATCH, SEQ), 0, VOCAB)
# In float32 sums over parts and over the whole differ by rounding.
EPS = 1e-6


def logits_of(key=0, scale=3.0):
    return scale * jax.random.normal(jax.random.key(key), (BATCH, SEQ, VOCAB))


def plain_entropy(z, targets):
    return -(jax.nn.softmax(z) * jax.nn.log_softmax(z)).sum(-1)


def plain_smoothed(z, targets):
    labels = optax.smooth_labels(jax.nn.one_hot(targets, z.shape[-1]), 0.1)
    return optax.softmax_cross_entropy(z, labels)


def plain_loss(z, targets):
    return optax.softmax_cross_entropy_with_integer_labels(z, targets)


def entropy(z, targets):
    return ops.vocab_parallel_entropy(z)


def sum_pi_squared(z, targets):
    return ops.vocab_parallel_sum_pi_squared(z)


def smoothed(z, targets, **options):
    options["label_smoothing"] = 0.1
    return ops.vocab_parallel_cross_entropy(z, targets, **options)


OPS = {
    "cross entropy": (ops.vocab_parallel_cross_entropy, plain_loss),
    "smoothed": (smoothed, plain_smoothed),
    "log-probs": (ops.vocab_parallel_log_probs, lambda *args: -plain_loss(*args)),
    "entropy": (entropy, plain_entropy),
    "sum of squares": (sum_pi_squared, lambda z, _: (jax.nn.softmax(z) ** 2).sum(-1)),
}


def whole(op):
    return op


def automatic(op):
    """As in a training step: `tp` is left to XLA, where data axes are manual."""
    mesh = fsdp.make_mesh(tp=2)
    rows = P("dp_shard")
    return jax.jit(
        jax.shard_map(
            op,
            mesh=mesh,
            in_specs=rows,
            out_specs=rows,
            axis_names=set(mesh.axis_names) - {"tp"},
            check_vma=False,
        )
    )


def manual(check_vma):
    """In a `shard_map` over all axes: each rank has its part of the vocabulary."""

    def wrap(op):
        return jax.shard_map(
            op,
            mesh=fsdp.make_mesh(tp=4),
            in_specs=(P(None, None, "tp"), P()),
            out_specs=P(),
            check_vma=check_vma,
        )

    return wrap


WAYS = {
    "whole": whole,
    "automatic": automatic,
    "manual": manual(check_vma=False),
    "manual, checked": manual(check_vma=True),
}


def value_and_grad(op, *args):
    """Of a sum in which each token has another weight."""
    weights = jnp.arange(BATCH * SEQ, dtype=jnp.float32).reshape(BATCH, SEQ) / 10

    def total(logits, targets):
        values = op(logits, targets)
        return (values * weights).sum(), values

    (_, values), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(*args)
    return values, grad


def assert_close(got, want, eps=EPS):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=eps, atol=2 * eps)


@pytest.fixture
def chunks(monkeypatch):
    """Chunks that divide no part, so that the last one reaches back."""
    monkeypatch.setattr(_chunked, "CHUNK", 3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients_are_those_of_whole_logits(name, way, chunks):
    op, plain = OPS[name]
    got = value_and_grad(WAYS[way](op), logits_of(), TARGETS)
    want = value_and_grad(plain, logits_of(), TARGETS)
    assert_close(got, want)


@pytest.mark.parametrize("name", ["smoothed", "entropy"])
def test_a_gradient_within_a_shard_map_is_that_of_a_psum(name):
    # Unchecked, each rank differentiates the sum of all ranks' losses, as with any
    # `lax.psum`: of two ranks' equal losses, twice.
    op, plain = OPS[name]

    def grad(z):
        return jax.grad(lambda z: op(z, TARGETS).sum())(z)

    mesh, spec = fsdp.make_mesh(tp=2), P(None, None, "tp")
    for check_vma, times in ((False, 2), (True, 1)):
        local = jax.jit(
            jax.shard_map(
                grad, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
            )
        )
        want = jax.grad(lambda z: plain(z, TARGETS).sum())(logits_of())
        assert_close(local(logits_of()), times * want, 2 * EPS)


@pytest.mark.parametrize("name", ["smoothed", "log-probs", "entropy"])
@pytest.mark.parametrize("way, counted", [("automatic", 17), ("manual", 3)])
def test_padding_counts_for_nothing_whatever_is_in_it(name, way, counted, chunks):
    # Of 3, most ranks have padding alone.
    def op(z, targets):
        if name == "entropy":
            return ops.vocab_parallel_entropy(z, vocab_size=counted)
        if name == "log-probs":
            return ops.vocab_parallel_log_probs(z, targets, vocab_size=counted)
        return smoothed(z, targets, vocab_size=counted)

    targets = TARGETS % counted
    logits = logits_of().at[..., counted:].set(1e4).at[..., -1].set(jnp.nan)
    values, grad = value_and_grad(WAYS[way](op), logits, targets)
    want, want_grad = value_and_grad(OPS[name][1], logits[..., :counted], targets)
    assert_close((values, grad[..., :counted]), (want, want_grad))
    assert not grad[..., counted:].any()


def test_the_entropy_of_logits_far_from_zero_loses_no_digits():
    # Exact in float32, so that what is left can only be the operation's own rounding.
    logits = jnp.round(logits_of() * 64) / 64
    far, near = (
        value_and_grad(WAYS["manual"](entropy), z, TARGETS)
        for z in (logits + 4096, logits)
    )
    assert_close(far, near, 1e-3)  # logsumexp itself is rounded at 4096


@pytest.mark.parametrize("way", ["whole", "manual"])
def test_entropy_passes_over_logits_of_minus_infinity(way, chunks):
    left = jnp.arange(VOCAB) % 3 == 0
    left = left.at[:10].set(False)  # whole ranks without any
    logits = jnp.where(left[None, None], logits_of(), -jnp.inf)
    values, grad = value_and_grad(WAYS[way](entropy), logits, TARGETS)
    want, want_grad = value_and_grad(plain_entropy, logits_of()[..., left], TARGETS)
    assert_close((values, grad[..., left]), (want, want_grad))
    assert not grad[..., ~left].any()


@pytest.mark.parametrize("way", ["automatic", "manual"])
def test_a_target_that_is_no_entry_is_nan_and_can_be_masked_out(way):
    targets = TARGETS.at[0].set(-100).at[1, 0].set(VOCAB)
    is_known = (targets >= 0) & (targets < VOCAB)
    op = WAYS[way](ops.vocab_parallel_cross_entropy)
    np.testing.assert_array_equal(
        jnp.isnan(jax.jit(op)(logits_of(), targets)), ~is_known
    )

    def mean(z):
        return ops.masked_mean(op(z, targets), is_known)

    loss, grad = jax.jit(jax.value_and_grad(mean))(logits_of())
    want = plain_loss(logits_of()[is_known], targets[is_known]).mean()
    np.testing.assert_allclose(loss, want, rtol=EPS)
    assert jnp.isfinite(grad).all() and not grad[~is_known].any()
    assert jnp.abs(grad[is_known]).max() > 0


def test_sums_of_bfloat16_logits_are_in_float32():
    logits = logits_of().astype(jnp.bfloat16)
    wide = logits.astype(jnp.float32)
    for op in (smoothed, entropy):
        values, grad = value_and_grad(WAYS["manual"](op), logits, TARGETS)
        want, want_grad = value_and_grad(op, wide, TARGETS)
        assert values.dtype == jnp.float32 and grad.dtype == jnp.bfloat16
        assert_close(values, want)
        assert_close(grad, want_grad.astype(jnp.bfloat16))


# The case of upstream's own test.

ROWS, ENTRIES = 256, 155_136


@pytest.fixture
def all_optimizations():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def on_two(fn, *shapes):
    """Compiles a function of logits and targets for two devices that split them."""
    mesh = fsdp.make_mesh(tp=2, devices=jax.devices()[:2])
    args = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(shapes, (P(None, "tp"), P()), strict=True)
    ]
    with jax.set_mesh(mesh):
        return jax.jit(fn).lower(*args).compile(), tuple(x.sharding for x in args)


def test_entropy_and_gradient_of_a_vocabulary_of_155136(all_optimizations):
    logits = np.random.default_rng(0).standard_normal((ROWS, ENTRIES), np.float32)
    targets = np.zeros(ROWS, np.int32)

    def total(z, targets):
        values = entropy(z, targets)
        return values.sum(), values

    compiled, shardings = on_two(
        jax.value_and_grad(total, has_aux=True), logits, targets
    )
    (_, values), grad = compiled(*jax.device_put((logits, targets), shardings))
    assert grad.sharding.spec == P(None, "tp")
    # The same in float64, a few rows at a time.
    for at in range(0, ROWS, 64):
        rows = slice(at, at + 64)
        below = logits[rows].astype(np.float64)
        below -= below.max(-1, keepdims=True)
        log_p = below - np.log(np.exp(below).sum(-1, keepdims=True))
        p = np.exp(log_p)
        want = -(p * log_p).sum(-1)
        np.testing.assert_allclose(values[rows], want, rtol=1e-6)
        want_grad = -p * (log_p + want[:, None])
        largest = np.abs(want_grad).max()
        np.testing.assert_allclose(
            grad[rows], want_grad, rtol=1e-6, atol=1e-6 * largest
        )


@pytest.mark.parametrize("name", ["smoothed", "entropy"])
def test_nothing_is_as_large_as_the_logits_but_their_gradient(name, all_optimizations):
    op, plain = OPS[name]
    shapes = (
        jax.ShapeDtypeStruct((ROWS, ENTRIES), jnp.float32),
        jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    )
    mine = ROWS * ENTRIES // 2 * 4  # bytes of a rank's logits

    def memory(op):
        grad = jax.value_and_grad(lambda *args: op(*args).sum())
        return on_two(grad, *shapes)[0].memory_analysis()

    got = memory(op)
    assert mine <= got.output_size_in_bytes < 1.01 * mine
    # Three chunks of [rows, 8192], of 77,568 entries.
    assert got.temp_size_in_bytes < 3.1 * ROWS * _chunked.CHUNK * 4 < 0.33 * mine
    if name == "entropy":  # The negative control: by its formula it has.
        assert memory(plain).temp_size_in_bytes > 0.99 * mine


# In a training step.


def make_weights(key):
    embed, head = jax.random.split(key)
    return {
        "embed": jax.random.normal(embed, (VOCAB, 16)),
        "head": 0.3 * jax.random.normal(head, (16, VOCAB)),
    }


def loss_with(op):
    def loss_fn(weights, batch):
        hidden = jnp.tanh(weights["embed"][batch["tokens"]])
        return op(hidden @ weights["head"], batch["targets"]).mean()

    return loss_fn


def batch():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (16, 6), np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


@pytest.mark.parametrize("name", ["smoothed", "entropy"])
def test_a_step_computes_what_one_device_does(name):
    op, plain = OPS[name]
    plan = fsdp.fully_shard(
        make_weights,
        fsdp.make_mesh(tp=2),
        config=fsdp.FSDPConfig(tensor_parallel={"head": 1}),
    )
    compute = fsdp.value_and_grad(plan, loss_with(op), num_microbatches=2)
    params = fsdp.init_params(plan, jax.random.key(0))
    (loss, _), grads = compute(params, batch())
    want = jax.value_and_grad(loss_with(plain))(
        make_weights(jax.random.key(0)), batch()
    )
    assert_close((loss, grads), want, 2 * EPS)


@pytest.mark.parametrize("name", ["smoothed", "entropy"])
def test_only_numbers_a_token_cross_the_axis_and_none_in_backward(name):
    op, _ = OPS[name]
    mesh = fsdp.make_mesh(tp=2)
    logits = jax.device_put(logits_of(), NamedSharding(mesh, P(None, None, "tp")))

    def loss(z):
        return op(z, TARGETS).sum()

    with jax.set_mesh(mesh):
        forward = jax.jit(loss).lower(logits)
        both = jax.jit(jax.value_and_grad(loss)).lower(logits)
    found = collectives(both.compile().as_text())
    assert {c.op for c in found if group_size(c.groups) == 2} == {"all-reduce"}
    assert all(c.size <= BATCH * SEQ for c in found)
    reductions = [
        len(re.findall("stablehlo.all_reduce", lowered.as_text()))
        for lowered in (forward, both)
    ]
    assert reductions[0] == reductions[1] > 0


@pytest.mark.parametrize(
    "vocab, given, message",
    [
        (
            21,
            {},
            ["21", "2", "'tp'", "1", "22", "vocab_size=21"],
        ),
        (20, {"vocab_size": 21}, ["vocab_size=21", "20"]),
        (20, {"vocab_size": 0}, ["vocab_size=0", "20"]),
        (20, {"label_smoothing": 1.5}, ["label_smoothing=1.5", "0", "1"]),
    ],
)
def test_what_cannot_be_is_refused(vocab, given, message):
    def op(z, targets):
        return ops.vocab_parallel_cross_entropy(z, targets, **given)

    with pytest.raises(ValueError, match=facts(*message)):
        automatic(op)(jnp.zeros((BATCH, SEQ, vocab)), TARGETS)
