"""Encoders of transformers, tiny, and what they compute, in JAX."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from encoder_parts import WIDTH, Embed, Linear, Norm, Param, Patches, Table, apply

INSIDE, HEADS, LAYERS, VOCAB, LENGTH = 40, 3, 2, 31, 7
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INSIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGES: dict[str, Any] = {"image_size": 8, "patch_size": 4}
PATCHES = 4
# From each token, by row, to each.
DISTANCES = np.arange(LENGTH)[None] - np.arange(LENGTH)[:, None]

Get = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class Encoder:
    """An encoder of transformers and its twin.

    Args:
      torch: Builds the module of transformers.
      table: Its layers by path.
      forward: What it computes, of a function from paths to layers, and its input.
      own: Beginnings of paths, and what another library calls them.
      list: Path of the list of layers.
      ignore: Tensors that the twin has no use for.
    """

    torch: Callable[[], torch.nn.Module]
    table: Table
    forward: Callable[[Get, jax.Array], jax.Array]
    own: Mapping[str, str]
    list: str
    ignore: tuple[str, ...] = ()

    def inputs(self) -> np.ndarray:
        """Returns tokens, or images if patches are embedded."""
        random = np.random.default_rng(0)
        if any(isinstance(part, Patches) for part in self.table.values()):
            return random.standard_normal((2, 3, 8, 8), np.float32)
        return random.integers(3, VOCAB, (2, LENGTH))


def attend(query, key, value, *, scale=None, mask=None, bias=None, turn=None):
    """Attention in heads, of `[B, T, WIDTH]`."""
    heads = [x.reshape(*x.shape[:-1], HEADS, -1) for x in (query, key, value)]
    if turn is not None:
        heads[:2] = map(turn, heads[:2])
    options = {"scale": scale, "mask": mask, "bias": bias}
    return jax.nn.dot_product_attention(*heads, **options).reshape(query.shape)


def per_layer(parts: Table, path: str) -> dict[str, Any]:
    """Returns the parts of a layer, for each layer."""
    return {
        f"{path}.{layer}.{name}": part
        for layer in range(LAYERS)
        for name, part in parts.items()
    }


# ViT and CLIP: a norm before each of two residual branches


def parts_at(get: Get, at: str):
    """Returns a function that applies a module below `at`, by its name, to a value."""

    def part(name, value):
        return apply(get(f"{at}.{name}"), value)

    return part


def before_and_after(get: Get, at: str, names, x, act, mask=None):
    """A layer of ViT or CLIP."""
    norms, attention, out = names
    part = parts_at(get, at)
    seen = part(norms[0], x)
    qkv = [part(f"{attention}.{name}_proj", seen) for name in "qkv"]
    x = x + part(f"{attention}.{out}", attend(*qkv, mask=mask))
    return x + part("mlp.fc2", act(part("mlp.fc1", part(norms[1], x))))


def layer_parts(names, epsilon: float) -> dict[str, Any]:
    norms, attention, out = names
    square = Linear(WIDTH, WIDTH)
    return {
        **{norm: Norm(epsilon) for norm in norms},
        **{f"{attention}.{name}_proj": square for name in "qkv"},
        f"{attention}.{out}": square,
        "mlp.fc1": Linear(WIDTH, INSIDE),
        "mlp.fc2": Linear(INSIDE, WIDTH),
    }


VIT = (("layernorm_before", "layernorm_after"), "attention", "o_proj")
CLIP = (("layer_norm1", "layer_norm2"), "self_attn", "out_proj")


def erf_gelu(x):
    return jax.nn.gelu(x, approximate=False)


def quick_gelu(x):
    return x * jax.nn.sigmoid(1.702 * x)


def vit(get: Get, images):
    x = apply(get("embeddings.patch_embeddings.projection"), images)
    x = x.reshape(x.shape[0], -1, WIDTH)
    first = jnp.broadcast_to(get("embeddings.cls_token"), (x.shape[0], 1, WIDTH))
    x = jnp.concatenate([first, x], 1) + get("embeddings.position_embeddings")
    for layer in range(LAYERS):
        x = before_and_after(get, f"layers.{layer}", VIT, x, erf_gelu)
    return apply(get("layernorm"), x)


def clip_vision(get: Get, images):
    x = apply(get("embeddings.patch_embedding"), images)
    x = x.reshape(x.shape[0], -1, WIDTH)
    first = get("embeddings.class_embedding")[None, None]
    first = jnp.broadcast_to(first, (x.shape[0], 1, WIDTH))
    places = apply(get("embeddings.position_embedding"), jnp.arange(PATCHES + 1))
    x = apply(get("pre_layrnorm"), jnp.concatenate([first, x], 1) + places[None])
    for layer in range(LAYERS):
        x = before_and_after(get, f"encoder.layers.{layer}", CLIP, x, quick_gelu)
    return apply(get("post_layernorm"), x[:, 0])


def clip_text(get: Get, tokens):
    x = apply(get("embeddings.token_embedding"), tokens)
    x = x + apply(get("embeddings.position_embedding"), jnp.arange(LENGTH))[None]
    mask = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH), bool))
    for layer in range(LAYERS):
        at = f"encoder.layers.{layer}"
        x = before_and_after(get, at, CLIP, x, quick_gelu, mask)
    return apply(get("final_layer_norm"), x)


# ModernBERT: rotary positions, one tensor of query, key and value, a gated MLP


def turned(base: float):
    """Rotary positions: halves of a head are turned."""

    def turn(x):
        half = x.shape[-1] // 2
        angles = jnp.outer(jnp.arange(LENGTH), base ** -(jnp.arange(half) / half))
        cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
        one, other = x[..., :half], x[..., half:]
        return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)

    return turn


def modernbert(get: Get, tokens):
    x = apply(get("embeddings.tok_embeddings"), tokens)
    x = apply(get("embeddings.norm"), x)
    for layer in range(LAYERS):
        part = parts_at(get, f"layers.{layer}")
        seen = part("attn_norm", x) if layer else x
        qkv = jnp.split(part("attn.Wqkv", seen), 3, -1)
        mask = jnp.abs(DISTANCES) <= (2 if layer else LENGTH)
        mixed = attend(
            *qkv, mask=mask[None, None], turn=turned(1e4 if layer else 1.6e5)
        )
        x = x + part("attn.Wo", mixed)
        value, gate = jnp.split(part("mlp.Wi", part("mlp_norm", x)), 2, -1)
        x = x + part("mlp.Wo", erf_gelu(value) * gate)
    return apply(get("final_norm"), x)


def modernbert_table() -> Table:
    norm = Norm(1e-5, bias=False)
    layer = {
        "attn_norm": norm,
        "attn.Wqkv": Linear(WIDTH, 3 * WIDTH, False),
        "attn.Wo": Linear(WIDTH, WIDTH, False),
        "mlp_norm": norm,
        "mlp.Wi": Linear(WIDTH, 2 * INSIDE, False),
        "mlp.Wo": Linear(INSIDE, WIDTH, False),
    }
    table = {
        "embeddings.tok_embeddings": Embed(VOCAB),
        "embeddings.norm": norm,
        **per_layer(layer, "layers"),
        "final_norm": norm,
    }
    return {path: part for path, part in table.items() if "0.attn_norm" not in path}


# T5: no scale, and a bias by distance that only the first layer holds

DISTANCE_BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"


def t5(get: Get, tokens):
    x = apply(get("shared"), tokens)
    # Fewer than 8 tokens away, each distance has a row; those after come behind 16.
    rows = jnp.abs(DISTANCES) + 16 * (DISTANCES > 0)
    bias = apply(get(DISTANCE_BIAS), rows).transpose(2, 0, 1)[None]
    for layer in range(LAYERS):
        at = f"encoder.block.{layer}.layer"
        part = parts_at(get, at)
        seen = part("0.layer_norm", x)
        qkv = [part(f"0.SelfAttention.{name}", seen) for name in "qkv"]
        x = x + part("0.SelfAttention.o", attend(*qkv, scale=1.0, bias=bias))
        inside = part("1.DenseReluDense.wi", part("1.layer_norm", x))
        x = x + part("1.DenseReluDense.wo", jax.nn.relu(inside))
    return apply(get("encoder.final_layer_norm"), x)


def t5_table() -> Table:
    norm, square = Norm(1e-6, bias=False, rms=True), Linear(WIDTH, WIDTH, False)
    layer = {
        "layer.0.layer_norm": norm,
        **{f"layer.0.SelfAttention.{name}": square for name in "qkvo"},
        "layer.1.layer_norm": norm,
        "layer.1.DenseReluDense.wi": Linear(WIDTH, INSIDE, False),
        "layer.1.DenseReluDense.wo": Linear(INSIDE, WIDTH, False),
    }
    return {
        "shared": Embed(VOCAB),
        **per_layer(layer, "encoder.block"),
        DISTANCE_BIAS: Embed(32, HEADS),
        "encoder.final_layer_norm": norm,
    }


def random(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Draws all weights, so that each matters: biases and norms are not constants."""
    torch.manual_seed(0)
    net = make().eval()
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape) * (0.3 if weight.ndim > 1 else 1))
    return net


# What one layer alone has, which a stack has no place for.
ALONE = (DISTANCE_BIAS, "layers.1.attn_norm")

ENCODERS = {
    "ModernBERT": Encoder(
        lambda: transformers.ModernBertModel(
            transformers.ModernBertConfig(
                **SIZES,
                **TEXT,
                cls_token_id=1,
                sep_token_id=2,
                local_attention=4,
            )
        ),
        modernbert_table(),
        modernbert,
        {"embeddings.": "", "layers.": "blocks."},
        "layers",
    ),
    "T5": Encoder(
        lambda: transformers.T5EncoderModel(
            transformers.T5Config(
                vocab_size=VOCAB,
                d_model=WIDTH,
                d_kv=WIDTH // HEADS,
                d_ff=INSIDE,
                num_layers=LAYERS,
                num_heads=HEADS,
            )
        ),
        t5_table(),
        t5,
        {"encoder.": ""},
        "encoder.block",
    ),
    "ViT": Encoder(
        lambda: transformers.ViTModel(transformers.ViTConfig(**SIZES, **IMAGES)),
        {
            "embeddings.cls_token": Param((1, 1, WIDTH)),
            "embeddings.position_embeddings": Param((1, PATCHES + 1, WIDTH)),
            "embeddings.patch_embeddings.projection": Patches(),
            **per_layer(layer_parts(VIT, 1e-12), "layers"),
            "layernorm": Norm(1e-12),
        },
        vit,
        {"embeddings.": "", "layers.": "blocks."},
        "layers",
        ("pooler.**",),
    ),
    "CLIP text": Encoder(
        lambda: transformers.CLIPTextModel(
            transformers.CLIPTextConfig(**SIZES, **TEXT, max_position_embeddings=16)
        ),
        {
            "embeddings.token_embedding": Embed(VOCAB),
            "embeddings.position_embedding": Embed(16),
            **per_layer(layer_parts(CLIP, 1e-5), "encoder.layers"),
            "final_layer_norm": Norm(1e-5),
        },
        clip_text,
        {"embeddings.": "", "encoder.layers.": "resblocks."},
        "encoder.layers",
    ),
    "CLIP vision": Encoder(
        lambda: transformers.CLIPVisionModel(
            transformers.CLIPVisionConfig(**SIZES, **IMAGES)
        ),
        {
            "embeddings.class_embedding": Param((WIDTH,)),
            "embeddings.patch_embedding": Patches(bias=False),
            "embeddings.position_embedding": Embed(PATCHES + 1),
            "pre_layrnorm": Norm(1e-5),
            **per_layer(layer_parts(CLIP, 1e-5), "encoder.layers"),
            "post_layernorm": Norm(1e-5),
        },
        clip_vision,
        {"embeddings.": "", "encoder.layers.": "resblocks."},
        "encoder.layers",
    ),
}
