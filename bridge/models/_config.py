"""Config of a decoder, with Hugging Face's field names."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes
from bridge.models._config_consistency import inconsistencies
from bridge.models._decoder_fields import BLOCK_SPARSE, COMPRESSIONS, DecoderFields
from bridge.models._layer_kinds import (
    Channels,
    LayerBlock,
    LayerKind,
    LayerStack,
    Mixer,
    layer_blocks,
)
from bridge.models._mla_config import MLAConfig


@dataclasses.dataclass(frozen=True)
class DecoderConfig(DecoderFields):
    """Config of a decoder-only transformer.

    Fields have Hugging Face's names and meanings where it uses one name consistently.
    Fields that the model does not read (the token ids, `max_position_embeddings`
    unless positions are learned, `dtype` and `passthrough`) are kept so that an
    exported config equals the imported one.

    Args:
      vocab_size: Number of logits, and of rows of the embedding, including padding.
      hidden_size: Width of the residual stream.
      intermediate_size: Width inside a dense MLP.
      num_hidden_layers: Number of layers.
      num_attention_heads: Number of query heads.
      num_key_value_heads: Number of key and value heads; None for as many as query
        heads.
      head_dim: Width of a query or key head; None for `hidden_size /
        num_attention_heads`, or the width given by `mla`.
      value_head_dim: Width of a value head; None for `head_dim`, or the width given by
        `mla`.
      max_position_embeddings: Longest sequence the model was trained for, in tokens.
      norm: Kind of norm. `rms`: RMS norm, rounded to the compute dtype before it is
        scaled; `rms_wide`: scaled in float32, then rounded; `rms_zero_centered`: like
        `rms_wide`, but the scale is stored minus one; `layer`: layer norm in float32;
        `layer_zero_centered`: like `layer`, but the scale is stored minus one.
      norm_eps: Epsilon added to the mean square, or variance, under the root.
      final_norm_eps: The same of the norm behind the last layer, where it differs; None
        for `norm_eps`.
      norm_scale: Whether norms multiply by a scale.
      norm_bias: Whether norms of the residual stream add a bias.
      norm_gate_rank: Width of the gates of norms, before each mixer and before
        experts; None for norms without a gate.
      norm_placement: Position of the norms of attention and MLP: before (`pre`),
        after (`post`), before and after (`both`), before in the residual stream itself,
        which the norms replace (`in_stream`), one shared norm before both, which
        run in parallel (`parallel`), or one before each, in parallel (`parallel_two`).
      recurrent_norm_placement: The same in layers whose mixer has a state, where it
        differs; None for `norm_placement`.
      hidden_act: Activation of the MLP.
      gated_mlp: Whether the activation multiplies a second projection.
      mlp_bias: Whether the MLP's projections have biases.
      swiglu_limit: Bound on the inputs of the gated activation of dense and shared
        MLPs, as in `MoEConfig` of experts; None for no bound.
      swiglu_alpha: Factor in the sigmoid of another activation, as there.
      attention_bias: Whether the q, k and v projections have biases.
      attention_out_bias: Whether the o projection has a bias.
      qk_norm: Norm of queries and keys: each head with one shared scale (`head`),
        each head with its own scale (`per_head`), all heads as one vector (`full`),
        each head with a rope without a scale (`l2`), or none (None).
      qk_norm_bias: Whether these norms, layer norms, add a bias.
      value_norm: Whether each value head is normed, without a scale.
      qk_norm_after_rope: Whether that norm follows the rotary embedding.
      query_pre_attn_scalar: Value whose power of -1/2 scales the scores; None for
        `head_dim`.
      attention_multiplier: Scale of the scores; None for the one given by
        `query_pre_attn_scalar`.
      attn_logit_softcapping: Bound of the scores, applied by tanh; None for no bound.
      final_logit_softcapping: Bound of the logits, applied by tanh; None for no bound.
      attention_sinks: Whether each head has a learned score that takes part in the
        softmax but has no value.
      attention_gate: Whether a gate, projected with each query, scales the output of
        its head.
      attention_gate_per_head: Whether that is one number a head, which has no bias.
      attention_gate_activation: Activation of the gate.
      clip_qkv: Bound on queries, keys and values; None for no bound.
      inner_norms: Whether attention and MLPs norm what their projections back read.
      differential_attention: Whether heads attend in pairs, of which one subtracts from
        the other.
      dynamic_mask_size: Longest row of attention whose keys have a bias, made of their
        values; None for keys without one.
      attention_experts: Experts of attention, of which each token has a few, each with
        queries of all key heads and a projection back; None for none.
      mla: Sizes of latent attention; None for grouped-query attention.
      full_attention: Sizes of full-attention layers among sliding ones, where they
        differ; None for those of all layers.
      kv_sharing: Last layers, which attend to keys and values of earlier ones; None if
        each layer has its own.
      indexer: Sizes of the indexer that selects the keys of latent attention; None to
        attend to all keys.
      shared_indexer_layers: Indices of layers without an indexer, which attend to the
        keys that the last one before them selected.
      block_indexer: Sizes of the indexer of `block_sparse_attention` layers, which
        selects the blocks of keys that queries attend to; None without such layers.
      compressed_attention: Sizes of attention to single tokens of a window and to
        entries that each stand for several; None for other attention.
      short_conv: Sizes of the layers of type `short_conv`; None without any.
      delta_net: Sizes of the layers of type `delta_net`; None without any.
      lightning: Factors of the layers of type `lightning`; None without any.
      mamba: Sizes of the layers of type `mamba` or `attention_mamba`; None without any.
      mamba1: Sizes of the layers of type `mamba1`; None without any.
      rg_lru: Sizes of the layers of type `rg_lru`; None without any.
      shared_blocks: Blocks of attention and an MLP that several layers of type `mamba`
        or `mamba1` run before their mixers, with the same weights; None for none.
      rope: Rotary embedding of queries and keys; None for none.
      learned_positions: Whether a learned embedding of the position is added to that
        of the token; None for True where there is neither `rope` nor ALiBi.
      sinusoidal_positions: Whether sines and cosines of the position are added to the
        embedding of the token.
      position_offset: Number of rows of the learned positions before the row of
        position 0.
      sliding_rope: Rotary embedding of layers of type `sliding_attention`; None for
        `rope`.
      attention_chunk_size: Number of positions of a chunk, the one in which a token of
        a `chunked_attention` layer attends; None without such layers.
      no_rope_layers: Indices of layers without rotary embedding.
      query_scale: Factor of queries that grows with their position; None for none.
      alibi_bias_max: Exponent of the least slope of ALiBi, which lowers scores by the
        distance of the key; None for no ALiBi.
      sliding_window: Number of tokens that a sliding layer attends to, including the
        current one.
      layer_types: What mixes the tokens of each layer, `none` where nothing does; None
        for all sliding if `sliding_window` is set, else all full attention.
      unscored_tokens: Number of rows of the embedding behind those of `vocab_size`, of
        tokens without a logit.
      scale_embeddings: Whether embeddings are multiplied by the root of `hidden_size`,
        rounded to their dtype.
      multipliers: Factors inside of layers; None for 1 everywhere.
      embedding_multiplier: Factor of the embeddings of tokens.
      embedding_norm: Whether embeddings are normed before the first layer.
      per_layer_input: Sizes of the inputs that each layer has of each token; None for
        none.
      altup: Several residual streams, of which layers run on one; None for one stream.
      hyper_connections: Several residual streams, which each part of a layer mixes;
        None for one stream.
      laurel_rank: Width of the learned residual beside attention, with which the stream
        is averaged; None without one.
      gate_sparsity: Part of the values of an MLP's gate that `cut_gate_layers` set to
        zero, if they are normally distributed; None where none does.
      cut_gate_layers: Indices of these layers.
      layer_scale: Whether the stream behind each layer is multiplied by a number of the
        layer, which no gradient trains.
      residual_in_fp32: Whether the residual stream is at least float32 for weights of
        any dtype.
      residual_multiplier: Factor of the outputs of attention and MLP, before they are
        added to the residual stream.
      residual_factors: Factors of the stream and of the outputs of attention and MLP,
        each its own; None for those of `residual_multiplier`.
      learned_residual: Whether the stream that the outputs of attention and MLP are
        added to is multiplied by learned factors.
      logit_scale: Factor of the logits.
      logits_scaling: Divisor of the logits.
      moe: Config of the experts; None if all layers are dense.
      dense_layers: Indices of layers that are dense although `moe` is set.
      hash_layers: Indices of layers with experts that follow from the id of a token,
        and whose router only weights them.
      dense_branch: Whether an MLP, attention and a second MLP, all dense, run beside
        the experts of each layer.
      mixer_only_layers: Indices of layers without MLP or experts.
      unnormed_mixer_layers: Indices of layers whose mixer reads the stream as it is.
      mlp_sizes: Indices of layers whose dense MLP is not `intermediate_size` wide, each
        with its width.
      tie_word_embeddings: Whether the embedding is also the output projection.
      head_bias: Whether the output projection has a bias.
      head_transform: Projection, activation and norm of what the output projection
        reads; None for none.
      initializer_range: Standard deviation of the initial weights.
      bos_token_id: Token that begins a text, or None.
      eos_token_id: Token or tokens that end a text, or None.
      pad_token_id: Token that pads a batch, or None.
      model_type: Name of the family, a key of the family table.
      dtype: Dtype of the weights as recorded in the config file. The compute dtype
        follows the weights, never this field.
      passthrough: Names and values of fields that change no logit (dropout rates, loss
        coefficients) and are exported again; no dropout is computed.

    Raises:
      ValueError: If a field has an invalid value, or fields are inconsistent.

    Examples:
      >>> config = DecoderConfig(64, 16, 32, num_hidden_layers=2, num_attention_heads=2)
      >>> config.head_dim, [stack.path for stack in config.layer_stacks]
      (8, ['layers'])
    """

    def __post_init__(self):
        """Fills in the two derived sizes and validates the fields."""
        self._derive()
        wrong = wrong_fields(self) + wrong_sizes(self, _SIZES)
        raise_if("DecoderConfig", wrong or inconsistencies(self))

    @property
    def v_head_dim(self) -> int:
        """Width of a value head."""
        own = self.mla.v_head_dim if self.mla else self.value_head_dim
        return self.head_dim if own is None else own

    @property
    def qk_dim(self) -> int:
        """Width of a query or key head in the scores, with the dims of biases."""
        biased = 0 if self.dynamic_mask_size is None else 1
        return self.head_dim + biased + (0 if self.alibi_bias_max is None else 2)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer in tokens, or None for full attention."""
        types = self.layer_types or ("sliding_attention",) * self.num_hidden_layers
        slide = {"sliding_attention", *COMPRESSIONS}
        return tuple(self.sliding_window if kind in slide else None for kind in types)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer."""
        layers = range(self.num_hidden_layers)
        types = self.layer_types or ("full_attention",) * len(layers)
        dense = layers if self.moe is None else self.dense_layers
        channels: dict[int, Channels | None] = dict.fromkeys(layers, "sparse")
        channels |= dict.fromkeys(dense, "dense")
        channels |= dict.fromkeys(self.mixer_only_layers)
        indexed = set() if self.indexer is None else set(layers)
        indexed -= set(self.shared_indexer_layers)
        indexed |= {i for i in layers if types[i] == BLOCK_SPARSE}
        own = self.full_attention is not None
        sharing, blocks = self.kv_sharing, self.shared_blocks
        first_reusing = len(layers) - (sharing.num_layers if sharing else 0)
        widths = dict(self.mlp_sizes)
        return tuple(
            LayerKind(
                _MIXERS.get(types[i], "attention"),
                channels[i],
                i in indexed,
                own and types[i] == "full_attention",
                i >= first_reusing,
                i in self.cut_gate_layers,
                widths.get(i),
                COMPRESSIONS.get(types[i]),
                i in self.hash_layers,
                i not in self.unnormed_mixer_layers,
                None if blocks is None else blocks.block_of(i),
            )
            for i in layers
        )

    def mlp_width(self, kind: LayerKind) -> int:
        """Returns the width inside the dense MLPs of layers of a kind.

        Args:
          kind: Kind of the layers.
        """
        if kind.reuses and self.kv_sharing is not None:
            return self.kv_sharing.intermediate_size
        return kind.mlp_size or self.intermediate_size

    def of_kind(self, kind: LayerKind) -> "DecoderConfig":
        """Returns the config with the sizes that attention has in layers of a kind.

        Args:
          kind: Kind of the layers.
        """
        if (full := self.full_attention) is None:
            return self
        if not kind.is_full:
            rope = self.sliding_rope or self.rope
            return dataclasses.replace(
                self,
                full_attention=None,
                kv_sharing=None,
                rope=rope,
                sliding_rope=None,
            )
        return dataclasses.replace(
            self,
            full_attention=None,
            kv_sharing=None,
            head_dim=full.head_dim,
            num_attention_heads=full.num_attention_heads or self.num_attention_heads,
            num_key_value_heads=full.num_key_value_heads,
            attention_sinks=self.attention_sinks and full.sinks,
        )

    @property
    def layer_blocks(self) -> tuple[LayerBlock, ...]:
        """Consecutive layers whose kinds repeat, each block with its own loop."""
        return layer_blocks(self.layer_kinds)

    @property
    def layer_stacks(self) -> tuple[LayerStack, ...]:
        """Stacked layers of all blocks, in order."""
        blocks = self.layer_blocks
        paths = (
            ["layers"]
            if len(blocks) == 1
            else [f"layers.{number}" for number in range(len(blocks))]
        )
        return tuple(
            stack
            for block, path in zip(blocks, paths, strict=True)
            for stack in block.stacks(path)
        )

    def _derive(self):
        # The dataclass is frozen, so its own setattr raises.
        hidden, heads = self.hidden_size, self.num_attention_heads
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", heads)
        if self.learned_positions is None:
            positioned = self.rope is not None or self.alibi_bias_max is not None
            object.__setattr__(self, "learned_positions", not positioned)
        if self.head_dim is None and isinstance(self.mla, MLAConfig):
            object.__setattr__(self, "head_dim", self.mla.qk_head_dim)
        elif self.head_dim is None and isinstance(hidden, int):
            if isinstance(heads, int) and heads:  # else the checks that follow refuse
                object.__setattr__(self, "head_dim", hidden // heads)


_MIXERS: dict[str, Mixer | None] = {
    "short_conv": "short_conv",
    "delta_net": "delta_net",
    "lightning": "lightning",
    "mamba": "mamba",
    "mamba1": "mamba1",
    "rg_lru": "rg_lru",
    "attention_mamba": "attention_mamba",
    "none": None,
}
"""Mixers by the type of a layer, but attention."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "value_head_dim",
    "max_position_embeddings",
    "sliding_window",
    "attention_chunk_size",
    "dynamic_mask_size",
    "laurel_rank",
    "norm_gate_rank",
)
