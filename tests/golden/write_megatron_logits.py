"""Runs Megatron-Core on what `bridge` exports, and records its logits.

For each tiny model of `megatron_variants`: the fields of `to_transformer_config` and
`to_gpt_model` make Megatron's own `GPTModel`, the tensors of `megatron_tensors` are its
weights, and the logits of the last tokens are written, with a checksum of all that it
was given. One process on a CPU, the local layer spec, float32.

    pip download --no-deps megatron-core==0.16.1 && unzip megatron_core-*.whl -d mcore
    PYTHONPATH=.:tests:tests/bridge:mcore python tests/golden/write_megatron_logits.py
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import activations, parallel_state
from megatron.core.fusions import fused_softmax
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from megatron_variants import WITH, digest, exact_params, exact_tokens, twin_config

from bridge.megatron import megatron_tensors, to_gpt_model, to_transformer_config
from bridge.megatron._key_mapping import in_module

OUT = Path(__file__).with_name("megatron_logits.json")
FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "fast_gelu": activations.fast_gelu,
    "quick_gelu": activations.quick_gelu,
}


def prepare() -> None:
    """One rank, and no-ops and CPU tensors where Megatron asks for a GPU."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29712")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.manual_seed = lambda seed: None
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda *_, **__: None
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda *_, **__: None
    parallel_state.initialize_model_parallel()
    megatron_random.model_parallel_cuda_manual_seed(0)
    fused_softmax.get_sliding_window_causal_mask = sliding_mask
    # Names that are undefined without TransformerEngine.
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    patch_latent_attention()


def sliding_mask(sq: int, skv: int, window: tuple[int, int]) -> torch.Tensor:
    """Megatron's own, which makes it on a GPU."""
    seen = torch.ones(sq, skv, dtype=torch.bool).triu(skv - sq - window[0])
    return ~seen.tril(skv - sq + window[1])


def patch_latent_attention() -> None:
    """Lets the local attention have values that are narrower than keys."""
    init = DotProductAttention.__init__

    def wide(self, *args, k_channels=None, v_channels=None, **kwargs):
        init(self, *args, **kwargs)
        if v_channels is not None:
            heads = self.config.num_attention_heads
            self.hidden_size_per_partition = v_channels * heads

    DotProductAttention.__init__ = wide


def make_config(fields: dict[str, Any]) -> TransformerConfig:
    latent = fields["multi_latent_attention"]
    kind = MLATransformerConfig if latent else TransformerConfig
    known = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in fields.items() if name in known}
    given["activation_func"] = FUNCTIONS[given["activation_func"]]
    for name in ("params_dtype", "pipeline_dtype"):
        given[name] = getattr(torch, given[name])
    config = kind(**given, use_cpu_initialization=True)
    for name in fields.keys() - known:  # yarn's, which GPTModel looks for all the same
        setattr(config, name, fields[name])
    return config


def make_spec(config: TransformerConfig) -> Any:
    if isinstance(config.moe_layer_freq, list):
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization
        )
    return gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )


def record(variant: str) -> dict[str, Any]:
    config = twin_config(variant)
    fields = to_transformer_config(config)
    arguments = to_gpt_model(config, make_vocab_size_divisible_by=1)
    source = megatron_tensors(exact_params(config), config)
    theirs = make_config(fields)
    model = GPTModel(theirs, make_spec(theirs), **arguments).eval()
    weights = {
        in_module(key, source.keys(), {"transformer_impl": "local"}): torch.from_numpy(
            np.ascontiguousarray(source.read(key))
        )
        for key in source.keys()
    }
    found = model.load_state_dict(weights, strict=False)
    missing = [key for key in found.missing_keys if "_extra_state" not in key]
    assert not missing and not found.unexpected_keys, (variant, found)
    tokens = torch.from_numpy(exact_tokens(config))
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    ahead = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = model(tokens, positions, ahead)[:, -1].float().numpy()
    rounded = [[float(f"{value:.8g}") for value in row] for row in logits]
    return {"sha256": digest(fields | arguments, source), "logits": rounded}


if __name__ == "__main__":
    prepare()
    golden = {variant: record(variant) for variant in WITH}
    OUT.write_text(
        "{\n"
        + ",\n".join(f'"{name}": {json.dumps(v)}' for name, v in golden.items())
        + "\n}\n"
    )
