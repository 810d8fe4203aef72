"""Models that others published, small: what each package's own users would write."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from helpers.trials import Trial

import fsdp_jax as fsdp

ROWS, VOCAB = 16, 64


@dataclasses.dataclass(frozen=True)
class Published:
    """A model of a package.

    Attributes:
      package: Name on PyPI, `""` for flax itself.
      model: Name of the model in it.
      framework: Framework that it is written in.
      units: Units, as the page writes them.
      trial: `trial(width, layers, seq) -> Trial`.
      lora: Weights that get LoRA factors.
    """

    package: str
    model: str
    framework: str
    units: str
    trial: Callable[[int, int, int], Trial]
    lora: tuple[str | fsdp.lora.LoRATarget, ...]


def tokens(seq: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (ROWS, seq + 1), np.int32)


def cross_entropy(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    )
    return losses.mean()


def decoder_sizes(width: int, layers: int) -> dict[str, Any]:
    return {
        **{"num_layers": layers, "vocab_size": VOCAB, "embed_dim": width},
        **{"hidden_dim": 2 * width, "num_heads": 4, "head_dim": width // 4},
        **{"num_kv_heads": 2, "norm_eps": 1e-5, "rope_theta": 10_000},
    }


def tunix_loss(model, batch):
    inputs, labels = batch[:, :-1], batch[:, 1:]
    rows, seq = inputs.shape
    positions = jnp.broadcast_to(jnp.arange(seq), (rows, seq))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((seq, seq), bool)), (rows, seq, seq))
    return cross_entropy(model(inputs, positions, None, mask)[0], labels)


def llama3(width: int, layers: int, seq: int) -> Trial:
    from tunix.models.llama3 import model as module

    sizes = decoder_sizes(width, layers)
    config = module.ModelConfig(**sizes, remat_config=module.RematConfig.BLOCK)
    return Trial(
        lambda key: module.Llama3(config, rngs=nnx.Rngs(key)),
        (module.DecoderLayer, module.Embedder),
        *(tunix_loss, tokens(seq)),
    )


def qwen3(width: int, layers: int, seq: int) -> Trial:
    from tunix.models.qwen3 import model as module

    config = module.ModelConfig(**decoder_sizes(width, layers), use_tied_embedding=True)
    return Trial(
        lambda key: module.Qwen3(config, rngs=nnx.Rngs(key)),
        (module.DecoderLayer, module.Embedder),
        *(tunix_loss, tokens(seq)),
    )


def nano_moe(width: int, layers: int, seq: int) -> Trial:
    from nano_moe import NanoMoE, NanoMoEConfig

    model = NanoMoE(
        NanoMoEConfig(
            **{"vocab_size": VOCAB, "n_layers": layers, "n_heads": 4},
            **{"d_model": width, "d_ff": 2 * width, "n_experts": 2, "top_k": 1},
            block_size=seq,
        )
    )

    def loss(variables, batch):
        logits, _ = model.apply(variables, batch[:, :-1])
        return cross_entropy(logits, batch[:, 1:])

    batch = tokens(seq)
    return Trial(
        lambda key: model.init(key, batch[:1, :-1]), ("params.block_*",), loss, batch
    )


def vision_transformer(width: int, layers: int, seq: int) -> Trial:
    from equimo.layers import AttentionBlock
    from equimo.models import VisionTransformer

    size = round(seq**0.5) * 4

    def make_model(key):
        return VisionTransformer(
            **{"img_size": size, "in_channels": 3, "dim": width, "patch_size": 4},
            **{"num_heads": 4, "depths": [layers], "num_classes": 8, "reg_tokens": 0},
            key=key,
        )

    def loss(model, batch):
        model = eqx.nn.inference_mode(model)
        logits = jax.vmap(lambda x: model(x, key=jax.random.key(0)))(batch["x"])
        return cross_entropy(logits, batch["y"])

    random = np.random.default_rng(0)
    batch = {
        "x": random.normal(size=(ROWS, 3, size, size)).astype(np.float32),
        "y": random.integers(0, 8, ROWS, np.int32),
    }
    return Trial(make_model, (AttentionBlock,), loss, batch)


class ScannedBlock(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norm, self.norm_mlp = (nnx.RMSNorm(width, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up, self.down = linear(width, 2 * width), linear(2 * width, width)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(jax.nn.silu(self.up(self.norm_mlp(x))))


class ScannedDecoder(nnx.Module):
    """A decoder by flax's guide: `nnx.vmap` stacks the layers, `nnx.scan` runs them."""

    def __init__(self, width: int, layers: int, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return ScannedBlock(width, rngs)

        self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
        self.layers = make(rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer, x):
            return layer(x)

        return self.embed.attend(run(self.layers, self.embed(tokens)))


def scanned(width: int, layers: int, seq: int) -> Trial:
    return Trial(
        lambda key: ScannedDecoder(width, layers, nnx.Rngs(key)),
        (ScannedBlock, nnx.Embed),
        lambda model, batch: cross_entropy(model(batch[:, :-1]), batch[:, 1:]),
        tokens(seq),
    )


def stacked_by_haliax(width: int, layers: int, seq: int) -> Trial:
    import haliax
    import haliax.nn as hnn

    embed, mlp = haliax.Axis("embed", width), haliax.Axis("mlp", 2 * width)

    class Block(eqx.Module):
        up: hnn.Linear
        down: hnn.Linear

        @staticmethod
        def init(*, key):
            first, second = jax.random.split(key)
            up = hnn.Linear.init(embed, mlp, key=first)
            return Block(up, hnn.Linear.init(mlp, embed, key=second))

        def __call__(self, x):
            return x + self.down(haliax.tanh(self.up(x)))

    class Model(eqx.Module):
        layers: hnn.Stacked

        def __call__(self, x):
            return self.layers.fold(x)

    def make_model(key):
        keys = jax.random.split(key, layers)
        stack = hnn.Stacked.init(haliax.Axis("layers", layers), Block)
        return Model(stack(key=keys))

    def loss(model, batch):
        x = haliax.named(batch, ("batch", "seq", "embed"))
        return jnp.mean(model(x).array ** 2)

    batch = np.random.default_rng(0).normal(size=(ROWS, seq, width))
    return Trial(make_model, (Block,), loss, batch.astype(np.float32))


# tunix: [embed, heads, head_dim] and back; equinox: [out, in].
TUNIX_LORA = (
    fsdp.lora.LoRATarget("layers.*.attn.q_proj.w", num_in=1),
    fsdp.lora.LoRATarget("layers.*.attn.o_proj.w", num_in=2),
    "layers.*.mlp.up_proj.kernel",
)

PUBLISHED = {
    "llama3": Published(
        *("google-tunix", "Llama3", "flax.nnx", "[DecoderLayer, Embedder]", llama3),
        TUNIX_LORA,
    ),
    "qwen3": Published(
        *("google-tunix", "Qwen3", "flax.nnx", "[DecoderLayer, Embedder]", qwen3),
        TUNIX_LORA,
    ),
    "nano_moe": Published(
        *("nano-moe-jax", "NanoMoE", "flax.linen", '["params.block_*"]', nano_moe),
        ("params.block_*.MultiHeadAttention_*.Dense_*.kernel",),
    ),
    "vit": Published(
        *("equimo", "VisionTransformer", "equinox", "[AttentionBlock]"),
        vision_transformer,
        (fsdp.lora.LoRATarget("blocks.0.blocks.*.mlp.fc1.weight", out_first=True),),
    ),
    "scanned": Published(
        *("flax", "decoder with `nnx.scan`", "flax.nnx", "[Block, nnx.Embed]", scanned),
        (
            "layers.up.kernel",
            fsdp.lora.LoRATarget("layers.attention.out.kernel", num_in=2),
        ),
    ),
    "haliax": Published(
        *("haliax", "layers in `Stacked`", "haliax", "[Block]", stacked_by_haliax),
        (fsdp.lora.LoRATarget("layers.stacked.*.weight.0", out_first=True),),
    ),
}
