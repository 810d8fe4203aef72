"""Arguments of Megatron's training script, to and from `DecoderConfig`.

They are the fields of `TransformerConfig` and the arguments of `GPTModel`, some under
other names. A run has hundreds of further arguments, which are not read.

Source: Megatron-LM megatron/training/arguments.py::core_transformer_config_from_args,
gpt_builders.py::gpt_builder
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from bridge.megatron._key_mapping import hybrid_pattern
from bridge.megatron.config._mlp import GELU, QUICK_GELU, SILU, TANH_GELU
from bridge.megatron.config._transformer_config import (
    from_transformer_config,
    to_gpt_model,
    to_transformer_config,
)
from bridge.models import DecoderConfig

_FIELD_OF = {
    "num_experts": "num_moe_experts",
    "max_position_embeddings": "max_sequence_length",
    "use_rope_scaling": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
}
_OLD = {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}
"""Names up to Megatron-Core 0.14, which are read but not written."""

_REFUSED = ("squared_relu", "openai_gelu")
_ORIGINAL = "original_max_position_embeddings"


def from_args(
    args: Mapping[str, Any],
    *,
    vocab_size: int | None = None,
    original_max_position_embeddings: int | None = None,
    model_type: str | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | tuple[int, ...] | None = None,
    pad_token_id: int | None = None,
) -> DecoderConfig:
    """Converts the settings of a run to a `DecoderConfig`.

    Args:
      args: Settings by name, such as `open_megatron(path).args`.
      vocab_size: Number of tokens in the vocabulary, without padding. None uses
        `args["vocab_size"]`, which a run with a tokenizer does not record: it records
        only the padded number of rows.
      original_max_position_embeddings: Context length in tokens before yarn extended
        it, for latent attention. None uses the value in `args`, which most versions do
        not record.
      model_type: Model family; see `from_transformer_config`.
      bos_token_id: Beginning-of-sequence token.
      eos_token_id: End-of-sequence token or tokens.
      pad_token_id: Padding token.

    Returns:
      Model config.

    Raises:
      ValueError: If settings are missing or have unsupported values. All settings that
        one check rejects are listed.

    Examples:
      >>> bridge.save_megatron(path, params, config)
      >>> args = bridge.megatron.open_megatron(path).args
      >>> bridge.megatron.from_args(args).hidden_size
      16
    """
    if pattern := hybrid_pattern(args):
        raise ValueError(
            f"hybrid_layer_pattern = {pattern!r}: the settings of hybrid runs are not "
            "read as a config. Give config=, such as bridge.from_hf_config of the "
            "Nemotron-H model of these layers."
        )
    _check_given(args, vocab_size, original_max_position_embeddings)
    names = {**_OLD, **_FIELD_OF}
    fields = {names.get(name, name): value for name, value in args.items()}
    untied = args.get("untie_embeddings_and_output_weights")
    fields["share_embeddings_and_output_weights"] = not untied
    fields |= _activation_fields(args)
    if not args.get("group_query_attention"):
        fields["num_query_groups"] = None  # ignore the argument's default value
    if args.get("use_rotary_position_embeddings"):
        fields["position_embedding_type"] = "rope"
    if fields.get("rope_type") is None:
        fields.pop("rope_type", None)  # use the default of the config class instead
    if original_max_position_embeddings is not None:
        fields[_ORIGINAL] = original_max_position_embeddings
    return from_transformer_config(
        fields,
        vocab_size=vocab_size,
        model_type=model_type,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )


def to_args(
    config: DecoderConfig,
    *,
    make_vocab_size_divisible_by: int = 128,
    flags: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Converts a `DecoderConfig` to the settings of a run that it determines.

    Args:
      config: Model config.
      make_vocab_size_divisible_by: Padding of the vocabulary: its rows are padded to a
        multiple of this times the number of tensor-parallel ranks.
      flags: Further settings, included unchanged, such as
        `{"transformer_impl": "local"}`.

    Returns:
      Settings by name, for `write_megatron`; dtypes are numpy dtypes. Parallel sizes
      are not included, because `write_megatron` sets them.

    Raises:
      ValueError: If Megatron's layers cannot be this model's, or no command-line
        setting expresses it; all settings that one check rejects are listed.
    """
    fields = {**to_transformer_config(config, flags=flags), **to_gpt_model(config)}
    activation, wrong = _activation_args(fields)
    if fields["softmax_scale"] is not None:
        wrong.append(
            f"attention_multiplier = {config.attention_multiplier}: no setting"
        )
    if wrong:
        raise ValueError(
            f"The settings of a run cannot express this {config.model_type} model:\n"
            + "\n".join(f"  {line}" for line in wrong)
        )
    names = {field: name for name, field in _FIELD_OF.items()}
    args = {
        names.get(field, field): value
        for field, value in fields.items()
        if field not in _NOT_SETTINGS and not field.endswith("parallel_size")
    }
    return args | {
        **activation,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "group_query_attention": config.mla is None,
        "params_dtype": jnp.dtype(config.dtype),
        "vocab_size": config.vocab_size,
        "make_vocab_size_divisible_by": make_vocab_size_divisible_by,
    }


_NOT_SETTINGS = (
    "activation_func",
    "bias_activation_fusion",
    "gated_linear_unit",
    "pipeline_dtype",
    "sequence_parallel",
    "share_embeddings_and_output_weights",
    "softmax_scale",
)


def _check_given(
    args: Mapping[str, Any], vocab_size: int | None, original_length: int | None
) -> None:
    wrong = [f"{name} = True: not modelled" for name in _REFUSED if args.get(name)]
    if vocab_size is None and args.get("vocab_size") is None:
        wrong.append(
            f"vocab_size is not said, but padded_vocab_size = "
            f"{args.get('padded_vocab_size')}: give `vocab_size`, the words alone"
        )
    stretched = args.get("multi_latent_attention") and args.get("rope_type") != "rope"
    if stretched and original_length is None and args.get(_ORIGINAL) is None:
        wrong.append(
            f"{_ORIGINAL} is not said: give it, the tokens of context before yarn; "
            "4096 for DeepSeek"
        )
    if wrong:
        raise ValueError(
            "These settings cannot be converted:\n"
            + "\n".join(f"  {line}" for line in wrong)
        )


def _activation_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    if args.get("swiglu") or args.get("quick_geglu"):
        return {
            "activation_func": SILU if args.get("swiglu") else QUICK_GELU,
            "gated_linear_unit": True,
            "bias_activation_fusion": False,  # the fused kernels of these are exact
        }
    return {
        "activation_func": GELU,
        "gated_linear_unit": False,
        "bias_activation_fusion": bool(args.get("bias_gelu_fusion")),
    }


def _activation_args(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    kind = fields["activation_func"], fields["gated_linear_unit"]
    flags = {"swiglu": kind == (SILU, True), "quick_geglu": kind == (QUICK_GELU, True)}
    tanh = kind == (TANH_GELU, False)
    wrong = []
    if not (any(flags.values()) or tanh or kind == (GELU, False)):
        wrong.append(f"hidden_act: no setting makes it {kind[0]}, gated: {kind[1]}")
    if tanh and not fields["add_bias_linear"]:
        wrong.append("hidden_act: its GELU by tanh is a fused kernel that adds a bias")
    return {**flags, "bias_gelu_fusion": tanh}, wrong
