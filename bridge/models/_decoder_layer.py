"""Decoder layer."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, DTypeLike, Int

from bridge.models._altup import AltUp, Streams
from bridge.models._attention import Attention, dot_product_attention
from bridge.models._batch_parts import BatchParts, join_rows
from bridge.models._cache import Slots
from bridge.models._causal_conv import Mask
from bridge.models._config import DecoderConfig
from bridge.models._constrain import Constrain, unconstrained
from bridge.models._decoder_parts import (
    RECURRENT_MIXERS,
    make_attention,
    make_channels,
    make_norms,
)
from bridge.models._dense_branch import DenseBranch
from bridge.models._hyper_connections import HyperConnection
from bridge.models._indexed_attention import IndexedAttention, SelectedStream
from bridge.models._indexer import Selected
from bridge.models._laurel import Laurel
from bridge.models._layer_kinds import DENSE_ATTENTION, LayerKind
from bridge.models._layer_mixer import (
    MixerInputs,
    MixerOutput,
    Stream,
    constrained_input,
    run_attention,
    run_attention_and_mamba,
    run_indexed_attention,
    run_recurrent_mixer,
    run_shared_attention,
)
from bridge.models._layer_output import Carry, Experts, LayerOutput, PerLayer
from bridge.models._layer_products import PLAIN, LayerProducts, set_products
from bridge.models._layer_state import AttentionMambaState, LayerState, TwoKeyValues
from bridge.models._moe import Dispatch, MoE, Routed, sorted_dispatch
from bridge.models._multipliers_config import MultipliersConfig
from bridge.models._norm import Norm
from bridge.models._per_layer_input import PerLayerInput
from bridge.models._position_tables import PositionTables
from bridge.models._recurrence import Recurrence, plain_recurrence
from bridge.models._residual import StreamFactors, residuals
from bridge.models._scale import scale_by
from bridge.models._shared_attention import SharedAttention, SharedStream
from bridge.models._shared_block import SharedBlock, SharedBlocks, make_block_use

LAYER_INPUT = "layer_input"
"""`checkpoint_name` of the residual stream that enters a layer."""


class DecoderLayer(nnx.Module):
    """Decoder layer: mixer and MLP, each normed and added to the residual stream.

    The mixer is `self_attn`, `short_conv`, `delta_net`, `lightning`, `mamba`, `mamba1`
    or `rg_lru`, by the layer's kind, or `self_attn` and `mamba` side by side.

    Args:
      config: Config of the decoder.
      kind: Kind of the layer.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      attention: Attention function, with the signature of `dot_product_attention`.
      dispatch: Function that runs experts, with the signature of `sorted_dispatch`.
      constrain: Sharding constraint of activations, with the signature of
        `unconstrained`.
      recurrence: Function that runs mixers with a state, with the signature of
        `plain_recurrence`.
      products: Products of projections and experts.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        kind: LayerKind = DENSE_ATTENTION,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike = jnp.float32,
        attention: Attention = dot_product_attention,
        dispatch: Dispatch = sorted_dispatch,
        constrain: Constrain = unconstrained,
        recurrence: Recurrence = plain_recurrence,
        products: LayerProducts = PLAIN,
    ):
        """Initializes the weights of one layer, without a layer dim."""
        norms = make_norms(config, kind, rngs, param_dtype)
        self.input_layernorm, self.post_attention_layernorm = norms[:2]
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norms[2:]
        self.mixer, self.is_full = kind.mixer, kind.is_full
        if kind.attends:
            self.self_attn = make_attention(
                config, kind, rngs, param_dtype, attention, constrain
            )
        recurrent = "mamba" if kind.mixer == "attention_mamba" else kind.mixer
        if recurrent in RECURRENT_MIXERS:
            make = RECURRENT_MIXERS[recurrent]
            setattr(self, recurrent, make(config, rngs=rngs, param_dtype=param_dtype))
        self.mlp = make_channels(config, kind, rngs, param_dtype, dispatch)
        branch = None
        if config.dense_branch:
            branch = DenseBranch(config, kind, rngs, param_dtype, attention, constrain)
        self.dense_branch = branch
        self.shared_block = kind.shared_block
        self.shared_use = make_block_use(config, kind, rngs, param_dtype, constrain)
        self._make_additions(config, rngs, param_dtype, constrain)
        self.parallel = config.norm_placement.startswith("parallel")
        self.mixer_residual, self.mlp_residual = residuals(config, kind)
        self.multipliers = config.multipliers or MultipliersConfig()
        self.constrain = constrain
        self.recurrence = recurrence
        set_products(self, products)

    def _make_additions(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        constrain: Constrain,
    ) -> None:
        """Makes what some families add to a layer; None where the config has none."""
        scale = jnp.ones(1, param_dtype)
        self.layer_scalar = nnx.Param(scale) if config.layer_scale else None
        options: dict[str, Any] = {"rngs": rngs, "param_dtype": param_dtype}
        added = altup = laurel = None
        if config.per_layer_input is not None:
            added = PerLayerInput(config, constrain=constrain, **options)
        if config.altup is not None:
            altup = AltUp(config, **options)
        if config.laurel_rank is not None:
            laurel = Laurel(config, constrain=constrain, **options)
        self.per_layer_input, self.altup, self.laurel = added, altup, laurel
        mixer = mlp = None
        if config.hyper_connections is not None:
            mixer = HyperConnection(config, **options)
            mlp = HyperConnection(config, **options)
        self.mixer_connection, self.mlp_connection = mixer, mlp
        size = (config.hidden_size, param_dtype)
        learned = config.learned_residual
        self.mixer_factors = StreamFactors(*size) if learned else None
        self.mlp_factors = StreamFactors(*size) if learned else None

    def __call__(
        self,
        x: Carry | BatchParts,
        per_layer: PerLayer | None = None,
        tables: PositionTables | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        shared: SharedBlocks | None = None,
        *,
        cache: LayerState | None = None,
        slots: Slots | None = None,
        is_token: Mask = None,
    ) -> LayerOutput:
        """Adds the outputs of mixer and MLP to the residual stream.

        Args:
          x: Residual stream; beside selected keys if later layers attend to the keys
            that the indexer of an earlier one selects, or beside keys and values to
            which later layers attend. In parts, each of them runs by itself.
          per_layer: Inputs that differ between layers: `window`, the attention window
            in tokens, `table`, the index of the rotary table, `experts`, those of each
            token if the router is not to choose them, `input`, what the layer has of
            each token, `slopes`, the decays of its lightning attention, and
            `lambda_start`, the first factor of its differential attention.
          tables: Tables of the positions; None if layers read none.
          segment_ids: Segment of each token in a packed row; None for one segment.
          shared: Shared blocks, of which the layer may run one; None for none.
          cache: Cache of the previous tokens; None without a cache.
          slots: Slots of the tokens in the cache; None without a cache.
          is_token: False behind the last token of a row; None if all are tokens. Read
            by mixers with a state alone.
        """
        # Named, so that a remat policy can save it elsewhere than on the device.
        x = checkpoint_name(x, LAYER_INPUT)
        per_layer = per_layer or {}
        own = _pick(tables, per_layer.get("table"))
        inputs = MixerInputs(
            own.of_full() if self.is_full else own,
            per_layer.get("window"),
            segment_ids,
            slots,
            is_token,
            own_input=per_layer.get("input"),
            slopes=per_layer.get("slopes"),
            lambda_start=per_layer.get("lambda_start"),
        )
        experts, block = per_layer.get("experts"), None
        if shared is not None and self.shared_block is not None:
            block = shared.blocks[self.shared_block]
            inputs = inputs._replace(embeddings=shared.embeddings)
        run = partial(self._run_rows, block=block, cache=cache)
        if not isinstance(x, BatchParts):
            return run(x, experts, inputs)
        outs = [run(part, *own) for part, own in x.with_rows((experts, inputs))]
        joined = join_rows([out._replace(stream=None) for out in outs])
        return joined._replace(stream=BatchParts(tuple(out.stream for out in outs)))

    def _run_rows(
        self,
        x: Carry,
        experts: Experts | None,
        inputs: MixerInputs,
        block: SharedBlock | None,
        cache: LayerState | None,
    ) -> LayerOutput:
        """Runs the layer on some rows, with what layers share beside the stream."""
        selected = x.selected if isinstance(x, SelectedStream) else None
        shared = x if isinstance(x, SharedStream) else None
        x = x.stream if isinstance(x, SelectedStream | SharedStream) else x
        if block is not None:
            return self._run_behind(block, x, experts, inputs, cache)
        is_selected = None if selected is None else selected > 0
        inputs = inputs._replace(selected=is_selected, shared=shared)
        return self._run(x, selected, experts, inputs, cache)

    def _run(
        self,
        x: Stream,
        selected: Selected | None,
        experts: Experts | None,
        inputs: MixerInputs,
        cache: LayerState | None,
    ) -> LayerOutput:
        """Runs the layer on a stream."""
        if self.mixer is None:
            return LayerOutput.of(*self._feed(x, experts), cache)
        if self.mixer_connection is not None:
            return self._run_streams(x, selected, experts, inputs, cache)
        if self.dense_branch is not None:
            return self._run_beside(self.dense_branch, x, experts, inputs, cache)
        predicted = None
        if self.altup is not None:
            predicted = self.altup.predict(x)
            x = predicted[:, :, self.altup.active]
        normed = _apply(self.input_layernorm, x)
        x = self.mixer_residual.of(x, normed)
        normed_input = self.constrain(normed, "input")
        mixed = self._mix(normed, normed_input, cache, inputs)
        residual = None if self.laurel is None else self.laurel(normed)
        stream, routed = self._add(x, normed_input, mixed.output, experts, residual)
        if self.per_layer_input is not None and inputs.own_input is not None:
            stream = self._add_input(stream, predicted, inputs.own_input)
        if self.layer_scalar is not None:
            stream = stream * jnp.expand_dims(self.layer_scalar[...], (0, 1))
        after = mixed.beside_selected(stream, selected)
        if mixed.shared is not None:
            after = mixed.shared._replace(stream=stream)
        return LayerOutput.of(after, routed, mixed.cache)

    def _run_streams(
        self,
        streams: Streams,
        selected: Selected | None,
        experts: Experts | None,
        inputs: MixerInputs,
        cache: LayerState | None,
    ) -> LayerOutput:
        """Runs the layer on some rows of streams that mixer and MLP mix."""
        assert self.mixer_connection is not None and self.mlp_connection is not None
        x, after = self.mixer_connection(streams)
        normed = _apply(self.input_layernorm, x)
        mixed = self._mix(normed, self.constrain(normed, "input"), cache, inputs)
        streams = after.add(streams, self.constrain(mixed.output, "output"))
        x, after = self.mlp_connection(streams)
        normed = self.constrain(_apply(self.pre_feedforward_layernorm, x), "input")
        y, routed = self._feedforward(normed, experts)
        streams = after.add(streams, self.constrain(y, "output"))
        behind = mixed.beside_selected(streams, selected)
        return LayerOutput.of(behind, routed, mixed.cache)

    def _run_behind(
        self,
        block: SharedBlock,
        x: Stream,
        experts: Experts | None,
        inputs: MixerInputs,
        cache: LayerState | None,
    ) -> LayerOutput:
        """Runs a shared block, and the mixer on what it adds to the stream."""
        first, second = cache if isinstance(cache, AttentionMambaState) else (None,) * 2
        assert self.shared_use is not None
        added, first = self.shared_use(block, x, inputs, first)
        normed = _apply(self.input_layernorm, x + added)
        mixed = self._mix(normed, self.constrain(normed, "input"), second, inputs)
        x = self.mixer_residual.add(x, self.constrain(mixed.output, "output"))
        after = None if cache is None else AttentionMambaState(first, mixed.cache)  # pyright: ignore[reportArgumentType]
        return LayerOutput.of(*self._feed(x, experts), after)

    def _run_beside(
        self,
        branch: DenseBranch,
        x: Stream,
        experts: Experts | None,
        inputs: MixerInputs,
        cache: LayerState | None,
    ) -> LayerOutput:
        """Runs attention, then experts beside the branch, on some rows."""
        first, second = cache if isinstance(cache, TwoKeyValues) else (None, None)
        normed = _apply(self.input_layernorm, x)
        mixed = self._mix(normed, self.constrain(normed, "input"), first, inputs)
        x = x + self.constrain(mixed.output, "output")
        normed = self.constrain(_apply(self.pre_feedforward_layernorm, x), "input")
        y, routed = self._feedforward(normed, experts)
        x, after = branch(x, normed, second, inputs)
        caches = None if cache is None else TwoKeyValues(mixed.cache, after)  # pyright: ignore[reportArgumentType]
        return LayerOutput.of(x + self.constrain(y, "output"), routed, caches)

    def _mix(
        self,
        normed: Stream,
        normed_input: Stream,
        cache: LayerState | None,
        inputs: MixerInputs,
    ) -> MixerOutput:
        """Runs the mixer on the normed stream, or on the same constrained as input."""
        if self.mixer is not None and self.mixer != "attention":
            mixer = getattr(self, self.mixer.removeprefix("attention_"))
            run = run_recurrent_mixer
            if self.mixer == "attention_mamba":
                run = partial(run_attention_and_mamba, self.self_attn, self.multipliers)
            return run(mixer, self.recurrence, normed_input, cache, inputs)
        attention, shared = self.self_attn, inputs.shared
        if isinstance(attention, IndexedAttention):
            return run_indexed_attention(attention, normed, cache, inputs)
        if isinstance(attention, SharedAttention) and shared is not None:
            return run_shared_attention(
                attention, normed_input, cache, inputs, shared, is_full=self.is_full
            )
        own = constrained_input(attention, normed, self.constrain)
        return run_attention(attention, own, cache, inputs)

    def _add(
        self,
        x: Stream,
        normed_input: Stream,
        mixer_output: Stream,
        experts: Experts | None,
        residual: Stream | None = None,
    ) -> tuple[Stream, Routed | None]:
        """Adds the outputs of attention and MLP, in series or parallel."""
        if self.parallel:
            if self.pre_feedforward_layernorm is not None:
                normed_input = self.constrain(
                    self.pre_feedforward_layernorm(x), "input"
                )
            y, routed = self._feedforward(normed_input, experts)
            factor = self.mlp_residual.output
            both = scale_by(mixer_output, factor) + scale_by(y, factor)
            return x + self.constrain(both, "output"), routed
        mixer_output = self.constrain(mixer_output, "output")
        mixer_output = _apply(self.post_attention_layernorm, mixer_output)
        x = self.mixer_residual.add(_apply(self.mixer_factors, x), mixer_output)
        if residual is not None:
            x = scale_by(x + residual, 2**-0.5)
        return self._feed(x, experts)

    def _add_input(
        self, stream: Stream, predicted: Streams | None, own: Stream
    ) -> Stream | Streams:
        """Adds the input of the layer; of several streams to all but the first."""
        assert self.per_layer_input is not None
        if self.altup is None or predicted is None:
            return stream + self.per_layer_input(stream, own)
        streams = self.altup.correct(predicted, stream)
        added = self.per_layer_input(self.altup.scaled(streams), own)
        return streams.at[:, :, 1:].add(added[:, :, None])

    def _feed(self, x: Stream, experts: Experts | None) -> tuple[Stream, Routed | None]:
        """Adds the output of the MLP, if there is one."""
        if self.mlp is None:
            return x, None
        normed = _apply(self.pre_feedforward_layernorm, x)
        x = self.mlp_residual.of(x, normed)
        # Experts beside a dense MLP norm the stream themselves.
        y, routed = self._feedforward(self.constrain(normed, "input"), experts, x)
        y = _apply(self.post_feedforward_layernorm, self.constrain(y, "output"))
        return self.mlp_residual.add(_apply(self.mlp_factors, x), y), routed

    def _feedforward(
        self, x: Stream, experts: Experts | None, stream: Stream | None = None
    ) -> tuple[Stream, Routed | None]:
        mlp = self.mlp
        assert mlp is not None
        return mlp(x, experts, stream) if isinstance(mlp, MoE) else (mlp(x), None)


def _apply(norm: Norm | StreamFactors | None, x: Stream) -> Stream:
    return x if norm is None else norm(x)


def _pick(tables: PositionTables | None, index: Array | None) -> PositionTables:
    tables = PositionTables() if tables is None else tables
    return tables if index is None else tables.pick(index)
