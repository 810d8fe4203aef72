"""Training steps of Llama on one GPU: seconds, memory, losses, predictions."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig, MoEConfig, RopeConfig
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._decoder_loss import fused_next_token_loss
from fsdp_jax.cli._precision import OffloadTo, Precision, Products
from fsdp_jax.cli._remat import Remat
from fsdp_jax.cli._sharding_options import Strategy
from fsdp_jax.planner import GPU, GPUS
from fsdp_jax.planner._memory import predict_memory
from fsdp_jax.training._memory_check import compiled_bytes, memory_alarms

_ROPE = RopeConfig(rope_theta=500000.0)
LLAMA_1B = DecoderConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    rope=_ROPE,
    tie_word_embeddings=True,
)
LLAMA_3B = dataclasses.replace(
    LLAMA_1B,
    hidden_size=3072,
    num_hidden_layers=28,
    num_attention_heads=24,
    head_dim=128,
)
EXPERTS_1B = dataclasses.replace(
    LLAMA_1B,
    num_hidden_layers=8,
    num_attention_heads=16,
    head_dim=128,
    vocab_size=32000,
    moe=MoEConfig(
        num_experts=16,
        num_experts_per_tok=4,
        intermediate_size=1024,
        norm_topk_prob=True,
    ),
)
TINY = DecoderConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
STEPS, WARM_STEPS = 12, 3
"""Steps that are timed, and those before them."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step of a decoder, in bfloat16 with AdamW.

    Attributes:
      config: Sizes of the decoder.
      rows: Rows of a batch.
      seq: Tokens that a row predicts.
      remat: Activations of a layer saved for backward, as of `fsdp-jax train`.
      products: Format of the operands of projections.
      offload: State that is stored on the host.
    """

    config: DecoderConfig = LLAMA_1B
    rows: int = 4
    seq: int = 4096
    remat: Remat = "dots"
    products: Products = "param_dtype"
    offload: OffloadTo | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.seq

    def rehearsed(self) -> Case:
        """The same step of a tiny decoder."""
        moe = self.config.moe and dataclasses.replace(
            self.config.moe, num_experts=4, num_experts_per_tok=2, intermediate_size=32
        )
        config = dataclasses.replace(TINY, moe=moe)
        return dataclasses.replace(self, config=config, rows=2, seq=32)

    def plan(self) -> fsdp.Plan:
        """A plan on one device, the first that is here."""
        policy = fsdp.MixedPrecisionPolicy(
            param_dtype=jnp.bfloat16, grad_comm_dtype=jnp.bfloat16
        )
        config = fsdp.FSDPConfig(mp_policy=policy)
        config = Precision("bfloat16").sharding(config, offload=self.offload)
        mesh = fsdp.make_mesh(devices=jax.devices()[:1])
        config = Strategy(remat=self.remat).applied(config, mesh)
        return plan_decoder(self.config, mesh, config, products=self.products)

    def batch(self) -> np.ndarray:
        """Random tokens, the same each time."""
        shape = (self.rows, self.seq + 1)
        rng = np.random.default_rng(0)
        return rng.integers(0, self.config.vocab_size, shape, dtype=np.int32)


CASES = {
    "1b": Case(),
    "1b_all": Case(remat="all"),
    "1b_recompute": Case(remat="nothing"),
    "1b_float8": Case(products="float8"),
    "1b_experts": Case(EXPERTS_1B),
    "3b": Case(LLAMA_3B, rows=2, remat="nothing"),
    "3b_float8": Case(LLAMA_3B, rows=2, remat="nothing", products="float8"),
    "1b_offload": Case(remat="nothing", offload="optimizer"),
    "1b_stream": Case(remat="nothing", offload="stream"),
}
"""Steps by name."""


def optimizer() -> optax.GradientTransformation:
    """The optimizer of all steps."""
    return optax.adamw(3e-4, weight_decay=0.1)


def measure(case: Case, profile: str | None = None) -> dict[str, Any]:
    """Trains a few steps, and says how long they took and what they needed.

    Args:
      case: Step.
      profile: Directory for a profile of three more steps; None for none.
    """
    plan, tx, tokens = case.plan(), optimizer(), case.batch()
    step = fsdp.make_train_step(plan, fused_next_token_loss, tx)
    like = fsdp.abstract_state(plan, tx)
    started = time.perf_counter()
    compiled = step.lower(like, tokens).compile()
    compile_seconds = time.perf_counter() - started
    traced = step.jitted.trace(like, tokens).jaxpr
    predicted = predict_memory(plan, like, tokens, traced)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    seconds, losses = [], []
    for _ in range(WARM_STEPS + STEPS):
        started = time.perf_counter()
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))  # Waits for the step.
        seconds.append(time.perf_counter() - started)
    peak = peak_bytes()
    profiled = profile and _profiled(step, state, tokens, profile)
    assigned = compiled_bytes(compiled)
    return {
        **speeds(case, seconds[WARM_STEPS:], losses),
        "compile_s": round(compile_seconds, 1),
        "memory_alarms": list(memory_alarms(compiled, memory_of(jax.devices()[0]))),
        "memory": {
            "peak_in_use": peak,
            "assigned_by_xla": assigned,
            "predicted": dataclasses.asdict(predicted) | {"total": predicted.total},
            "predicted_of_assigned": round(predicted.total / assigned, 4),
            "predicted_of_peak": peak and round(predicted.total / peak, 4),
        },
        **({"profile": profiled} if profiled else {}),
    }


def _profiled(step, state, tokens, folder):
    """Seconds of a profiled step by unit and kind of work."""
    with jax.profiler.trace(folder):
        for _ in range(3):
            state, metrics = step(state, tokens)
        jax.block_until_ready(metrics)
    if jax.default_backend() == "cpu":
        return None  # A profile of CPUs has no kernels.
    try:
        return dataclasses.asdict(fsdp.planner.read_profile(folder))
    except ValueError as error:  # The step was measured all the same.
        return {"failed": str(error)}


def measure_jit(case: Case) -> dict[str, Any]:
    """The same decoder, loss and optimizer in `jax.jit` alone, for comparison."""
    tokens, tx = jnp.asarray(case.batch()), optimizer()
    make = functools.partial(Decoder, case.config)
    graph, params = nnx.split(make(rngs=nnx.Rngs(jax.random.key(0))))

    def loss_of(params, tokens):
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return fused_next_token_loss(nnx.merge(graph, half), tokens)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = tx.init(params)
    started = time.perf_counter()
    compiled = step.lower(params, opt_state, tokens).compile()
    compile_seconds = time.perf_counter() - started
    seconds, losses = [], []
    for _ in range(WARM_STEPS + STEPS):
        started = time.perf_counter()
        params, opt_state, loss = compiled(params, opt_state, tokens)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - started)
    return {
        **speeds(case, seconds[WARM_STEPS:], losses),
        "compile_s": round(compile_seconds, 1),
        "memory": {
            "peak_in_use": peak_bytes(),
            "assigned_by_xla": compiled_bytes(compiled),
        },
    }


def predict(case: Case, gpu: GPU) -> dict[str, Any]:
    """What the planner says of a step, compiled for a GPU that is not here."""
    plan = case.plan()
    estimate = fsdp.estimate_step(
        plan,
        fused_next_token_loss,
        optimizer(),
        case.batch(),
        gpu=gpu,
        gpus=1,
        guide=False,
    )
    return {
        "step_s": estimate.timeline.seconds,
        "range_s": list(estimate.seconds_range),
        "mfu_attention_square": round(estimate.mfu, 4),
        "compiled_bytes": estimate.compiled_bytes,
        "memory": estimate.memory.total,
        "attention": list(estimate.attention),
    }


def memory_of(device: jax.Device) -> int:
    """Bytes of a device; where it does not say, those of an H100."""
    return (device.memory_stats() or {}).get("bytes_limit") or GPUS["h100"].memory


def peak_bytes() -> int | None:
    """Most bytes that this process had on its device; None where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def flops(config: DecoderConfig, rows: int, seq: int, *, causal: bool) -> float:
    """FLOPs of forward and backward without recomputation, as people count them.

    Args:
      config: Sizes of the decoder.
      rows: Rows of a batch.
      seq: Tokens of a row.
      causal: Whether attention counts as the triangle that it is, not as a square.
    """
    embed, heads = config.hidden_size, config.num_attention_heads
    head_dim = config.head_dim or embed // heads
    kv = config.num_key_value_heads or heads
    attention = embed * head_dim * (2 * heads + 2 * kv)
    width = config.intermediate_size
    if config.moe is not None:
        width = config.moe.num_experts_per_tok * config.moe.intermediate_size
    layer = attention + 3 * embed * width
    weights = config.num_hidden_layers * layer + config.vocab_size * embed
    square = 12 * config.num_hidden_layers * heads * head_dim * seq
    return rows * seq * (6 * weights + square / (2 if causal else 1))


def speeds(case: Case, seconds: list[float], losses: list[float]) -> dict[str, Any]:
    """Median step, tokens a second, and model FLOPs utilization, counted both ways."""
    median, peak = statistics.median(seconds), GPUS["h100"].cost.peak_flops

    def mfu(*, causal):
        total = flops(case.config, case.rows, case.seq, causal=causal)
        return round(total / median / peak, 4)

    return {
        "median_step_s": median,
        "steps_s": seconds,
        "losses": losses,
        "tokens_per_s": case.tokens / median,
        "mfu_attention_square": mfu(causal=False),
        "mfu_attention_causal": mfu(causal=True),
    }
