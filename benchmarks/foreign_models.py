"""Models as their users write them, at sizes that fill GPUs.

Nothing in them knows of sharding. tunix's decoders and equimo's transformer are other
packages' (the extra `foreign`); the others are written as the guides of flax and the
README write them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import bridge
import fsdp_jax as fsdp

VOCAB, WIDTH, HIDDEN, HEADS, KV_HEADS, SEQ = 32_768, 2_048, 8_192, 32, 8, 2_048
HEAD_DIM = WIDTH // HEADS
LOOPS = 3


@dataclasses.dataclass(frozen=True)
class Form:
    """A model with its loss.

    Attributes:
      make_model: Function of a PRNG key that returns the model.
      units: What `fully_shard` takes.
      loss: `loss(model, batch)`.
      batch: `batch(gpus)`, the abstract global batch.
    """

    make_model: Callable[[jax.Array], Any]
    units: Sequence[Any]
    loss: Callable[[Any, Any], Any]
    batch: Callable[[int], Any]


def tokens(gpus: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((gpus, SEQ + 1), jnp.int32)


def causal(seq: int) -> jax.Array:
    return jnp.tril(jnp.ones((1, 1, seq, seq), bool))


def cross_entropy(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    )
    return losses.mean()


def next_token(model, batch):
    return cross_entropy(model(batch[:, :-1]), batch[:, 1:])


def tunix_loss(model, batch):
    inputs, labels = batch[:, :-1], batch[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(SEQ), inputs.shape)
    mask = jnp.broadcast_to(causal(SEQ)[0], (len(inputs), SEQ, SEQ))
    return cross_entropy(model(inputs, positions, None, mask)[0], labels)


def tunix_sizes(layers: int) -> dict[str, Any]:
    return {
        **{"num_layers": layers, "vocab_size": VOCAB, "embed_dim": WIDTH},
        **{"hidden_dim": HIDDEN, "num_heads": HEADS, "head_dim": HEAD_DIM},
        **{"num_kv_heads": KV_HEADS, "norm_eps": 1e-5, "rope_theta": 500_000},
    }


def llama3(layers: int) -> Form:
    from tunix.models.llama3 import model as module

    config = module.ModelConfig(**tunix_sizes(layers), weight_tying=True)
    return Form(
        lambda key: module.Llama3(config, rngs=nnx.Rngs(key)),
        (module.DecoderLayer, module.Embedder),
        tunix_loss,
        tokens,
    )


def qwen3(layers: int) -> Form:
    from tunix.models.qwen3 import model as module

    config = module.ModelConfig(**tunix_sizes(layers), use_tied_embedding=True)
    return Form(
        lambda key: module.Qwen3(config, rngs=nnx.Rngs(key)),
        (module.DecoderLayer, module.Embedder),
        tunix_loss,
        tokens,
    )


class Gpt2Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(HEADS)
        y = nn.LayerNorm()(x)
        x = x + attention(y, y, mask=causal(x.shape[1]))
        y = nn.Dense(HIDDEN)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.gelu(y))


class Gpt2(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, WIDTH, name="wte")
        x = embed(tokens) + nn.Embed(SEQ, WIDTH, name="wpe")(jnp.arange(SEQ))
        for i in range(self.layers):
            x = Gpt2Block(name=f"h_{i}")(x)
        return embed.attend(nn.LayerNorm(name="ln_f")(x))


def gpt2(layers: int) -> Form:
    model = Gpt2(layers)
    first = jnp.zeros((1, SEQ), jnp.int32)

    def loss(variables, batch):
        return cross_entropy(model.apply(variables, batch[:, :-1]), batch[:, 1:])

    return Form(
        lambda key: model.init(key, first), ("params.h_*", "params.wte"), loss, tokens
    )


IMAGE, PATCH, IMAGES, CLASSES = 224, 14, 8, 1_000


def vision_transformer(layers: int) -> Form:
    from equimo.layers import AttentionBlock
    from equimo.models import VisionTransformer

    def make_model(key):
        return VisionTransformer(
            **{"img_size": IMAGE, "in_channels": 3, "patch_size": PATCH},
            **{"dim": WIDTH, "num_heads": HEADS, "depths": [layers]},
            **{"num_classes": CLASSES, "reg_tokens": 0},
            key=key,
        )

    def loss(model, batch):
        model = eqx.nn.inference_mode(model)
        logits = jax.vmap(lambda x: model(x, key=jax.random.key(0)))(batch["x"])
        return cross_entropy(logits, batch["y"])

    def batch(gpus: int) -> Any:
        rows = IMAGES * gpus
        images = (rows, 3, IMAGE, IMAGE)
        return {
            "x": jax.ShapeDtypeStruct(images, jnp.bfloat16),
            "y": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }

    return Form(make_model, (AttentionBlock,), loss, batch)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norm, self.norm_mlp = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, use_bias=False, rngs=rngs
        )
        self.gate, self.up = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN)
        self.down = linear(HIDDEN, WIDTH)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), mask=causal(x.shape[1]))
        y = self.norm_mlp(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class ScannedDecoder(nnx.Module):
    """By flax's guide: `nnx.vmap` stacks the layers, `nnx.scan` runs them."""

    def __init__(self, layers, rngs):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return NnxBlock(rngs)

        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = make(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer, x):
            return layer(x)

        return self.embed.attend(self.norm(run(self.layers, self.embed(tokens))))


def scanned(layers: int) -> Form:
    return Form(
        lambda key: ScannedDecoder(layers, nnx.Rngs(key)),
        (NnxBlock, nnx.Embed),
        next_token,
        tokens,
    )


class ReadmeBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class ReadmeModel(nnx.Module):
    def __init__(self, layers, rngs):
        self.blocks = nnx.List([ReadmeBlock(rngs) for _ in range(layers)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def readme(layers: int) -> Form:
    return _of_blocks(layers, lambda model, x: model(x))


def looped(layers: int) -> Form:
    """All blocks again and again: a depth that recurs."""

    def apply(model, x):
        return jax.lax.scan(lambda x, _: (model(x), None), x, length=LOOPS)[0]

    return _of_blocks(layers, apply)


def _of_blocks(layers: int, apply: Callable[[Any, Any], Any]) -> Form:
    def loss(model, batch):
        return jnp.mean((apply(model, batch["x"]) - batch["y"]) ** 2)

    def batch(gpus: int) -> Any:
        # As many rows as the decoders have tokens.
        rows = jax.ShapeDtypeStruct((gpus * SEQ, WIDTH), jnp.float32)
        return {"x": rows, "y": rows}

    return Form(
        lambda key: ReadmeModel(layers, nnx.Rngs(key)), (ReadmeBlock,), loss, batch
    )


def reference(layers: int) -> Form:
    config = bridge.models.DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=SEQ,
        tie_word_embeddings=True,
    )
    return Form(
        lambda key: bridge.models.Decoder(config, rngs=nnx.Rngs(key), scan=fsdp.scan),
        (bridge.models.DecoderLayer,),
        next_token,
        tokens,
    )


FORMS: dict[str, Callable[[int], Form]] = {
    "llama3": llama3,
    "qwen3": qwen3,
    "gpt2": gpt2,
    "vit": vision_transformer,
    "scanned": scanned,
    "readme": readme,
    "looped": looped,
    "reference": reference,
}
"""Name -> `form(layers)`; the last is what the others are compared with."""
