"""Families imported into a like over `tp` train as they do on one device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.compare import host, worst
from helpers.errors import facts
from helpers.hlo import collectives, group_size
from tiny_configs import hf_fields

import bridge
import fsdp_jax as fsdp
from bridge.models import (
    Decoder,
    DecoderConfig,
    DecoderLayer,
    dot_product_attention,
    tensor_parallel_rules,
)
from fsdp_jax.cli._decoder_loss import fused_next_token_loss, next_token_loss

TX = optax.adamw(1e-2, eps=1e-3)
# Like no other size, so that tokens are not taken for weights of a size.
ROWS, SEQ, STEPS = 8, 28, 3
# ||a - b|| / ||b|| of each parameter in float32, after three steps.
PARAMETERS = 1e-5
# No gradient reaches the former, and that of the latter is rounding where nothing is
# turned: Adam walks on it.
UNTRAINED = ("correction_bias", "k_proj.bias")


@dataclasses.dataclass(frozen=True)
class Case:
    """A family, how eight devices share it, and what else is particular to it."""

    mesh: dict[str, int]
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    prefetch: int = 0
    whole: tuple[str, ...] = ()
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss: Any = next_token_loss


CASES = {
    # Two heads of keys and values for four ranks; a vocabulary that they divide.
    "llama": Case({"tp": 4}, {"vocab_size": 132}, prefetch=1, whole=("k_proj", "v_")),
    "qwen3": Case({"dp_outer": 2, "tp": 2}, {"vocab_size": 132}),
    "gemma2": Case({"tp": 2}, prefetch=1, loss=fused_next_token_loss),
    "gpt2": Case({"dp_outer": 2, "tp": 2}, whole=("embed_tokens", "embed_positions")),
    "olmo2": Case({"tp": 2}, {"vocab_size": 132}),
    "cohere-qk-norm": Case({"tp": 2}, {"vocab_size": 132}),
    # A head with a bias.
    "phi": Case({"tp": 2}, {"vocab_size": 132}, loss=fused_next_token_loss),
    "deepseek_v2": Case({"tp": 2}, whole=("q_a_proj", "kv_a_proj_with_mqa")),
    # Keys that are the values too, of one head in layers that attend to all.
    "gemma4": Case({"tp": 2}, {"vocab_size": 132}, whole=("k_proj",)),
    # An indexer that selects keys.
    "deepseek_v32": Case({"tp": 2}, whole=("q_a_proj", "indexer")),
    # One that selects blocks of keys, for each key head by itself.
    "minimax_m3": Case({"tp": 2}, {"vocab_size": 132}, whole=("indexer",)),
}


def config_of(variant: str, **fields: Any) -> DecoderConfig:
    return bridge.from_hf_config(hf_fields(variant, **fields))


def batches(config: DecoderConfig) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    shape = (STEPS, ROWS, SEQ + 1)
    return list(random.integers(0, config.vocab_size, shape).astype(np.int32))


def write_model(path, config: DecoderConfig) -> None:
    """A directory as Hugging Face has it; no weight is zero, and no norm one."""
    like = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    leaves, structure = jax.tree.flatten(like)
    random = np.random.default_rng(1)
    values = [random.normal(0.1, 0.3, leaf.shape).astype("f4") for leaf in leaves]
    params = jax.tree.map(jnp.asarray, structure.unflatten(values))
    bridge.save_hf(path, params, config)


def alone(path, config: DecoderConfig):
    """Three steps without any of fsdp_jax: the parameters after each, and the loss."""
    graph, like = nnx.split(
        nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(jax.random.key(0))))
    )
    params = bridge.load_hf(path, like)

    def loss_fn(params, tokens):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    @jax.jit
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, seen, loss = TX.init(params), [], None
    for tokens in batches(config):
        params, state, loss = step(params, state, tokens)
        seen.append(host(params))
    return seen, float(loss)


def make_plan(config: DecoderConfig, case: Case, **changes: Any) -> fsdp.Plan:
    mesh = fsdp.make_mesh(**case.mesh)
    policy = fsdp.MixedPrecisionPolicy(**case.policy)
    scan = functools.partial(fsdp.scan, prefetch=case.prefetch)

    def make(key):
        return Decoder(
            config,
            rngs=nnx.Rngs(key),
            scan=scan,
            attention=fsdp.ops.split_heads(dot_product_attention),
            constrain=fsdp.ops.sequence_parallel,
        )

    rules = tensor_parallel_rules(config, mesh.shape["tp"])
    sharding = fsdp.FSDPConfig(mp_policy=policy, tensor_parallel=rules, **changes)
    return fsdp.fully_shard(make, mesh, [DecoderLayer], sharding)


@dataclasses.dataclass(frozen=True)
class Run:
    """Three steps over tp, and the program that took them."""

    config: DecoderConfig
    plan: fsdp.Plan
    path: Any
    compiled: jax.stages.Compiled
    state: fsdp.TrainState
    loss: float


def run_case(variant: str, path) -> Run:
    case = CASES[variant]
    config = config_of(variant, **case.fields)
    write_model(path, config)
    plan = make_plan(config, case)
    state = fsdp.init_state(plan, TX, bridge.load_hf(path, plan.params))
    step = fsdp.make_train_step(plan, case.loss, TX)
    tokens = jax.device_put(batches(config), plan.batch_sharding)
    compiled = step.lower(fsdp.abstract_state(plan, TX), tokens[0]).compile()
    metrics = {}
    for batch in tokens:
        state, metrics = compiled(state, batch)
    return Run(config, plan, path, compiled, state, float(metrics["loss"]))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return run_case("llama", tmp_path_factory.mktemp("llama") / "hf")


@pytest.fixture
def run(request, tmp_path, llama):
    variant = request.param
    return llama if variant == "llama" else run_case(variant, tmp_path / "hf")


SOON = ("llama", "qwen3", "gpt2", "deepseek_v2")
ALL = [
    pytest.param(name, marks=() if name in SOON else pytest.mark.long) for name in CASES
]


@pytest.mark.parametrize("run", ALL, indirect=True)
def test_three_steps_over_tp_are_those_of_one_device(run, request):
    want, want_loss = alone(run.path, run.config)
    got = host(fsdp.sharding.unpack(run.state.params))
    assert worst(got, want[-1], without=UNTRAINED) < PARAMETERS
    assert abs(run.loss - want_loss) < 1e-5
    # A step fewer is another model.
    assert worst(got, want[-2], without=UNTRAINED) > 100 * PARAMETERS
    # What the ranks cannot share the plan tells, and the program does what it says.
    whole = CASES[request.node.callspec.params["run"]].whole
    rows = repr(run.plan).splitlines()
    told = str([row for row in rows if "replicated over tp" in row])
    assert all(name in told for name in whole)
    tp = run.plan.mesh.shape["tp"]
    assert ("embed_tokens" in told) == (run.config.vocab_size % tp > 0)
    fsdp.audit_step(run.plan, run.compiled)


def test_of_tokens_a_part_crosses_tp_and_of_matrices_nothing(llama):
    tp, embed = 4, llama.config.hidden_size
    found = collectives(llama.compiled.as_text())
    across = [c for c in found if group_size(c.groups) == tp and c.dtype == "f32"]
    rows = ROWS // (8 // tp)
    whole, part = rows * SEQ * embed, rows * SEQ * embed // tp
    layers = [c for c in across if c.loops and c.size > part // 2]
    # A layer reads its tokens whole twice, and twice what it makes is summed; for the
    # gradients of these the same, and besides those of keys and values, whole here.
    assert {c.op for c in layers} == {"all-gather", "all-reduce"}
    assert sum(c.size == whole for c in layers) >= 8
    assert max(c.size for c in across) == whole
    # Each matrix is gathered over data axes at tp width.
    over_data = [c for c in found if c.op == "all-gather" and group_size(c.groups) == 2]
    split = [
        param for param in llama.plan.param_plans if param.split.tensor_dim is not None
    ]
    widths = {int(np.prod(param.shape[param.num_stacked :])) // tp for param in split}
    assert widths <= {c.size for c in over_data}


def like(tp: int):
    case = dataclasses.replace(CASES["llama"], mesh={"tp": tp})
    plan = make_plan(config_of("llama", **case.fields), case)
    return plan, fsdp.abstract_state(plan, TX)


@pytest.mark.parametrize("tp", [2, 1])
def test_a_checkpoint_fills_abstract_trees_of_other_tensor_axes(llama, tp, tmp_path):
    fsdp.save(tmp_path / "run", llama.state)
    _, wanted = like(tp)
    loaded = fsdp.load(tmp_path / "run", wanted)
    placed = jax.tree.map(lambda a, m: a.sharding == m.sharding, loaded, wanted)
    assert all(jax.tree.leaves(placed))
    for name in ("params", "opt_state", "step"):
        pair = (getattr(state, name) for state in (loaded, llama.state))
        jax.tree.map(np.testing.assert_array_equal, *map(host, pair))


def test_ranks_that_do_not_divide_heads_or_widths_are_named_with_both():
    config = config_of("deepseek_v2", moe_intermediate_size=25)
    with pytest.raises(ValueError) as error:
        tensor_parallel_rules(config, 8)
    for name in ("num_attention_heads 4", "moe.intermediate_size 25"):
        assert name in str(error.value)


@pytest.mark.parametrize("place", ["inptu", None, 5])
def test_an_activation_of_no_place_is_refused(place):
    with pytest.raises(ValueError, match=facts("sequence_parallel", place, "'input'")):
        fsdp.ops.sequence_parallel(jnp.ones((2, 4, 8)), place)


def test_rows_that_tp_does_not_divide_are_refused(llama):
    step = fsdp.make_train_step(llama.plan, next_token_loss, TX)
    odd = jax.ShapeDtypeStruct((ROWS, SEQ + 2), jnp.int32)
    with pytest.raises(ValueError, match=facts("29", "4", "'tp'")):
        step.lower(fsdp.abstract_state(llama.plan, TX), odd)


def test_heads_that_tp_does_not_divide_are_refused():
    attention = fsdp.ops.split_heads(dot_product_attention)
    x = jnp.ones((1, 4, 3, 8))
    with jax.set_mesh(fsdp.make_mesh(tp=2)):
        with pytest.raises(ValueError, match=facts("3 heads", "2 ranks", "'tp'")):
            attention(x, x, x, scale=1.0)
