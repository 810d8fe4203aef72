"""Megatron-Core configs, to and from `DecoderConfig`.

Megatron-Core describes a model in two places: `TransformerConfig` holds the layers, and
the arguments of `GPTModel` hold vocabulary, positions and rope. Here both are dicts;
functions and dtypes are given by name. Neither Megatron nor torch is needed.

Source: Megatron-LM megatron/core/transformer/transformer_config.py::TransformerConfig,
::MLATransformerConfig, megatron/core/models/gpt/gpt_model.py::GPTModel
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families._field_transform import FieldTransform
from bridge.megatron.config._attention import ATTENTION_CODEC, WINDOW_CODEC
from bridge.megatron.config._dtype import DTYPE_CODEC
from bridge.megatron.config._family import Tokens, settle
from bridge.megatron.config._layer import LAYER_CODECS
from bridge.megatron.config._mlp import MLP_CODEC
from bridge.megatron.config._moe import MLA_CODEC, MOE_CODEC
from bridge.megatron.config._parallel import ParallelFields
from bridge.megatron.config._rope import ROPE_CODEC
from bridge.megatron.config._training import TRAINING, write_training
from bridge.megatron.config._unmodelled import find_unmodelled
from bridge.models import DecoderConfig

TRANSFORMS: tuple[FieldTransform, ...] = (
    *LAYER_CODECS,
    ATTENTION_CODEC,
    WINDOW_CODEC,
    MLP_CODEC,
    ROPE_CODEC,
    MLA_CODEC,
    MOE_CODEC,
    DTYPE_CODEC,
)
READ = frozenset(name for transform in TRANSFORMS for name in transform.names)

_GPT_MODEL = (
    "vocab_size",
    "max_sequence_length",
    "share_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "seq_len_interpolation_factor",
    "rope_scaling",
    "rope_scaling_factor",
)
# Latent attention creates its own rope from its config, so these are fields of both.
_OF_BOTH = ("rotary_base", "rotary_percent")

_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(READ),
    "init_method_std": 0.02,
    "share_embeddings_and_output_weights": False,
    "normalization": "LayerNorm",
    "layernorm_zero_centered_gamma": False,
    "layernorm_epsilon": 1e-5,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "softmax_type": "vanilla",
    "qk_layernorm": False,
    "gated_linear_unit": False,
    "activation_func": "gelu",
    "glu_linear_offset": 0.0,
    "bias_activation_fusion": False,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "multi_latent_attention": False,
    "moe_router_topk": 2,
    "moe_shared_expert_gate": False,
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_enable_expert_bias": False,
    "moe_router_load_balancing_type": "aux_loss",
}
_LATENT_DEFAULTS: Mapping[str, Any] = {
    **_DEFAULTS,
    "normalization": "RMSNorm",
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": "yarn",
    "rotary_scaling_factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}


def to_transformer_config(
    config: DecoderConfig,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    virtual_pipeline: int | None = None,
    expert_parallel: int = 1,
    expert_tensor_parallel: int | None = None,
    context_parallel: int = 1,
    sequence_parallel: bool | None = None,
    flags: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the fields of a `TransformerConfig` or an `MLATransformerConfig`.

    Args:
      config: Model config.
      tensor_parallel: Number of tensor-parallel ranks.
      pipeline_parallel: Number of pipeline stages.
      virtual_pipeline: Number of model chunks per stage; None means one.
      expert_parallel: Number of expert-parallel ranks.
      expert_tensor_parallel: Number of tensor-parallel ranks of experts; None means
        `tensor_parallel`.
      context_parallel: Number of context-parallel ranks.
      sequence_parallel: Whether to shard activations along the sequence; None means if
        `tensor_parallel` is above 1.
      flags: Further fields, such as those of kernels and dispatchers, included
        unchanged.

    Returns:
      Fields by name; `activation_func` and dtypes are strings such as `"silu"` and
      `"bfloat16"`. The class is `MLATransformerConfig` if `multi_latent_attention` is
      true.

    Raises:
      ValueError: If Megatron's layers cannot be this model's, if the parallel sizes do
        not divide it, or if a flag is a field that the model determines; all errors are
        listed.
    """
    parallel = ParallelFields(
        tensor=tensor_parallel,
        pipeline=pipeline_parallel,
        virtual_pipeline=virtual_pipeline,
        context=context_parallel,
        expert=expert_parallel,
        expert_tensor=expert_tensor_parallel,
        sequence=sequence_parallel,
    )
    fields, wrong = _write(config)
    wrong += parallel.misfits(config)
    fields |= parallel.fields()
    wrong += [
        f"flags: {name} is decided by the model"
        for name in flags or ()
        if name in fields
    ]
    _raise_if(f"This {config.model_type} model cannot be one of Megatron's", wrong)
    kept = _OF_BOTH if config.mla is not None else ()
    own = {k: v for k, v in fields.items() if k not in _GPT_MODEL or k in kept}
    return {**own, **(flags or {})}


def to_gpt_model(
    config: DecoderConfig,
    *,
    tensor_parallel: int = 1,
    make_vocab_size_divisible_by: int = 128,
) -> dict[str, Any]:
    """Returns the arguments of `GPTModel` that a `TransformerConfig` does not hold.

    Args:
      config: Model config.
      tensor_parallel: Number of tensor-parallel ranks.
      make_vocab_size_divisible_by: Padding of the vocabulary: its rows are padded to a
        multiple of this times `tensor_parallel`.

    Returns:
      Arguments by name; `vocab_size` is the padded number of rows.

    Raises:
      ValueError: If Megatron's layers cannot be this model's; all errors are listed.
    """
    fields, wrong = _write(config)
    _raise_if(f"This {config.model_type} model cannot be one of Megatron's", wrong)
    multiple = make_vocab_size_divisible_by * tensor_parallel
    rows = config.vocab_size + -config.vocab_size % multiple
    return {k: v for k, v in fields.items() if k in _GPT_MODEL} | {"vocab_size": rows}


def from_transformer_config(
    fields: Mapping[str, Any],
    *,
    vocab_size: int | None = None,
    model_type: str | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | tuple[int, ...] | None = None,
    pad_token_id: int | None = None,
) -> DecoderConfig:
    """Converts a `TransformerConfig` and `GPTModel` arguments to a `DecoderConfig`.

    Args:
      fields: Fields and arguments by name, such as `vars(config)` or the `model`
        section of a `run_config.yaml`. Absent fields have the defaults of Megatron's
        classes.
      vocab_size: Number of tokens in the vocabulary, without padding; None uses the
        `vocab_size` of `fields`, which includes padding.
      model_type: Model family; None uses the first of `TWINS` whose config files can
        express the fields. If several can, they differ only in rounding.
      bos_token_id: Beginning-of-sequence token.
      eos_token_id: End-of-sequence token or tokens.
      pad_token_id: Padding token.

    Returns:
      Model config. Values that no field records and that do not affect logits are the
      family's defaults.

    Raises:
      ValueError: If fields are missing or have unsupported values, or the family cannot
        express them. All fields that one check rejects are listed.
    """
    if vocab_size is not None:
        fields = {**fields, "vocab_size": vocab_size}
    latent = fields.get("multi_latent_attention")
    filled = {**(_LATENT_DEFAULTS if latent else _DEFAULTS), **fields}
    wrong = find_unmodelled(fields, READ | TRAINING)
    values: dict[str, Any] = {}
    for transform in TRANSFORMS:
        wrong += _collect(lambda c=transform: values.update(c.read(filled)))
    _raise_if("This Megatron config cannot be converted", wrong)
    tokens = Tokens(bos_token_id, eos_token_id, pad_token_id)
    return settle(values, filled, tokens, model_type)


def _write(config: DecoderConfig) -> tuple[dict[str, Any], list[str]]:
    fields, wrong = write_training(config), []
    for transform in TRANSFORMS:
        wrong += _collect(lambda c=transform: fields.update(c.write(config)))
    return fields, wrong


def _collect(run: Callable[[], None]) -> list[str]:
    try:
        run()
    except ValueError as error:
        return str(error).splitlines()
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        return [f"a field of the wrong type or value: {error}"]
    return []


def _raise_if(subject: str, wrong: list[str]) -> None:
    if wrong:
        raise ValueError(
            f"{subject}:\n" + "\n".join(f"  {line}" for line in dict.fromkeys(wrong))
        )
