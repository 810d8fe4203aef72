"""Small things that several test files of `bridge` need."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import numpy as reference

import bridge
from bridge.models import Decoder, DecoderConfig

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
}
HF_SHAPES = {  # spelled out by hand, to owe nothing to the table under test
    "self_attn.q_proj.weight": (128, 48),
    "self_attn.k_proj.weight": (32, 48),
    "self_attn.v_proj.weight": (32, 48),
    "self_attn.o_proj.weight": (48, 128),
    "mlp.gate_proj.weight": (80, 48),
    "mlp.up_proj.weight": (80, 48),
    "mlp.down_proj.weight": (48, 80),
    "input_layernorm.weight": (48,),
    "post_attention_layernorm.weight": (48,),
}


def random_tensors(dtype) -> dict[str, np.ndarray]:
    shapes = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(3)
        for name, shape in HF_SHAPES.items()
    }
    shapes |= {
        "model.embed_tokens.weight": (131, 48),
        "model.norm.weight": (48,),
        "lm_head.weight": (131, 48),
    }
    random = np.random.default_rng(0)
    return {key: random.normal(size=s).astype(dtype) for key, s in shapes.items()}


def write_llama(path: Path, dtype=np.float32, *, tensors=None, **fields: Any) -> Path:
    path.mkdir(exist_ok=True)
    tensors = random_tensors(dtype) if tensors is None else tensors
    reference.save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(HF_CONFIG | fields))
    return path


def abstract_model(config: DecoderConfig, dtype=jnp.float32, **kwargs: Any) -> Decoder:
    return nnx.eval_shape(
        lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=dtype, **kwargs)
    )


def like_of(config: DecoderConfig, dtype=jnp.float32) -> nnx.State:
    return nnx.state(abstract_model(config, dtype), nnx.Param)


def load_model(path: Path, dtype=jnp.float32, **kwargs: Any) -> Decoder:
    model = abstract_model(bridge.from_hf_config(path), dtype, **kwargs)
    graph, like = nnx.split(model)
    return nnx.merge(graph, bridge.load_hf(path, like))


@jax.jit
def logits_of(model: Decoder, tokens: jax.Array, **kwargs: jax.Array) -> jax.Array:
    return model(tokens, **kwargs)


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    source = bridge.open_checkpoint(path)
    return {key: source.read(key) for key in source.keys()}


def assert_same_bytes(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert sorted(a) == sorted(b)
    for key in a:
        assert (a[key].dtype, a[key].shape) == (b[key].dtype, b[key].shape), key
        assert a[key].tobytes() == b[key].tobytes(), key


def assert_same_leaves(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)
