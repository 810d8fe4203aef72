"""Reference decoder, defined by its config, in plain single-device JAX."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._attention import Attention, dot_product_attention
from bridge.models._cache import KeyValues
from bridge.models._config import DecoderConfig, LayerRun
from bridge.models._constrain import Constrain, unconstrained
from bridge.models._decoder_layer import (
    DecoderLayer,
    PerLayer,
    Stream,
    Tables,
    make_norm,
    scale_by,
)
from bridge.models._linear import Embedding, Linear
from bridge.models._moe import Dispatch, sorted_dispatch
from bridge.models._positions import Positions, positions_in_order
from bridge.models._rope import rope_tables
from bridge.models._rope_config import RopeConfig
from bridge.models._router_stats import RouterStats

Scan = Callable[..., tuple[Any, Any]]
Ids = Int[Array, "batch seq"]

# Window of a full-attention layer among sliding ones: wider than any sequence.
_NO_WINDOW = 2**30


def plain_scan(
    unit: Callable[..., tuple[Any, Any]],
    stacked: Any,
    carry: Any,
    xs: tuple[Any, ...] = (),
    consts: tuple[Any, ...] = (),
) -> tuple[Any, Any]:
    """Runs `unit` over stacked weights, one layer at a time.

    Default of the decoder's `scan` argument, and the required signature of any
    replacement: everything differentiable is passed as an argument.

    Args:
      unit: Function `unit(weights, carry, *x_slices, *consts) -> (carry, y)`.
      stacked: Pytree of weights with a leading layer dim.
      carry: Carry of the first unit.
      xs: Pytrees with a leading layer dim, sliced for each unit.
      consts: Pytrees that every unit receives without slicing.

    Returns:
      Final carry, and the stacked `y`s.
    """

    def body(carry, slices):
        weights, x_slices = slices
        return unit(weights, carry, *x_slices, *consts)

    return jax.lax.scan(body, carry, (stacked, xs))


class Decoder(nnx.Module):
    """Decoder-only language model with stacked layers.

    `layers` is a single `DecoderLayer` with a leading layer dim on every leaf, so
    that a scan compiles one layer and the layers of a file are loaded into one array.
    Where dense and sparse layers mix, it is a list of such stacks, one for each run of
    `config.layer_runs`. Parameters are only used inside the call of the module that
    owns them, so a replacement of `DecoderLayer.__call__` sees every use of a layer's
    weights.

    Everything that parallelism changes is an argument with a plain default.

    Args:
      config: Config of the decoder.
      rngs: Source of keys for the initial weights.
      param_dtype: Dtype of the parameters.
      scan: Function that runs the layers, with the signature of `plain_scan`.
      attention: Attention function, with the signature of `dot_product_attention`.
      dispatch: Function that runs experts, with the signature of `sorted_dispatch`.
      constrain: Sharding constraint of activations, with the signature of
        `unconstrained`.
      positions: Function that returns positions if a call has none, with the signature
        of `positions_in_order`. For rows split over devices the right positions
        suffice, except with `longrope`: each part would choose its frequencies by
        its own longest text.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike = jnp.float32,
        scan: Scan = plain_scan,
        attention: Attention = dot_product_attention,
        dispatch: Dispatch = sorted_dispatch,
        constrain: Constrain = unconstrained,
        positions: Positions = positions_in_order,
    ):
        """Initializes all weights; under `nnx.eval_shape`, only their shapes."""
        self.config = config
        self.scan = scan
        self.constrain = constrain
        self.positions = positions
        std, embed = config.initializer_range, config.hidden_size
        table = partial(Embedding, std=std, rngs=rngs, param_dtype=param_dtype)
        self.embed_tokens = table(config.vocab_size, embed)
        longest = config.max_position_embeddings + config.position_offset
        self.embed_positions = None if config.rope else table(longest, embed)

        def make_stack(run: LayerRun) -> DecoderLayer:
            @nnx.split_rngs(splits=run.stop - run.start)
            @nnx.vmap
            def make_layers(rngs: nnx.Rngs) -> DecoderLayer:
                return DecoderLayer(
                    config,
                    sparse=run.sparse,
                    rngs=rngs,
                    param_dtype=param_dtype,
                    attention=attention,
                    dispatch=dispatch,
                    constrain=constrain,
                )

            return make_layers(rngs)

        stacks = [make_stack(run) for run in config.layer_runs]
        self.layers = stacks[0] if len(stacks) == 1 else nnx.List(stacks)
        self.norm = make_norm(config, param_dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(
                (embed,),
                (config.vocab_size,),
                bias=config.head_bias,
                std=std,
                rngs=rngs,
                param_dtype=param_dtype,
            )

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the weights, which is also the compute dtype."""
        return self.embed_tokens.embedding[...].dtype

    def __call__(
        self,
        tokens: Ids,
        positions: Ids | None = None,
        segment_ids: Ids | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Predicts the next token at every position.

        Args:
          tokens: Token ids.
          positions: Position of each token in its text; None for those of the
            decoder's own `positions`, by default from 0 in each row. Rotary embedding
            depends only on differences, so positions need not restart for packed
            texts; learned positions must.
          segment_ids: Segment of each token in a packed row; None for one segment per
            row.

        Returns:
          Logits in the dtype of the weights: a loss that sums over the vocabulary
          should cast them to float32 first.
        """
        return self.with_router_stats(tokens, positions, segment_ids)[0]

    def with_router_stats(
        self,
        tokens: Ids,
        positions: Ids | None = None,
        segment_ids: Ids | None = None,
    ) -> tuple[Float[Array, "batch seq vocab"], RouterStats | None]:
        """Returns the logits and router statistics, for load-balancing losses.

        Returns:
          Logits, and the statistics of all layers with experts, stacked along a first
          dim, or None if there are no such layers.
        """
        states, stats = self.final_states(tokens, positions, segment_ids)
        return self.logits(states), stats

    def logits(
        self, states: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of states returned by `final_states` or `extend`."""
        tied = self.config.tie_word_embeddings
        logits = self.embed_tokens.attend(states) if tied else self.lm_head(states)
        return self.finish_logits(self.constrain(logits, "logits"))

    def extend(
        self, tokens: Ids, positions: Ids, cache: Sequence[KeyValues]
    ) -> tuple[Float[Array, "batch seq embed"], list[KeyValues]]:
        """Runs new tokens that follow those in a cache.

        Args:
          tokens: Token ids.
          positions: Position of each token in its text, which is its cache slot.
          cache: Cache from `empty_cache`, or from a previous call.

        Returns:
          Normed final states, the input of the head; and the cache with the new
          tokens.
        """
        x, cache = self._run(tokens, positions, None, _extend_layer, cache=cache)
        return self.constrain(self.norm(x), "input"), cache

    def final_states(
        self,
        tokens: Ids,
        positions: Ids | None = None,
        segment_ids: Ids | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], RouterStats | None]:
        """Returns the normed final states, the head's input, and router statistics.

        For losses that compute logits in chunks, from these states, `head_kernel`,
        `head_bias` and `finish_logits`.
        """
        x, stats = self._run(tokens, positions, segment_ids, _apply_layer)
        states = self.constrain(self.norm(x), "input")
        return states, _stacked([s for s in stats if s is not None])

    def head_kernel(self) -> Float[Array, "embed vocab"]:
        """Returns the head's kernel; with tied embeddings, the transposed embedding."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens.embedding[...].T
        return self.lm_head.kernel[...]

    def head_bias(self) -> Float[Array, " vocab"] | None:
        """Returns the head's bias, or None if it has none."""
        if self.config.tie_word_embeddings or self.lm_head.bias is None:
            return None
        return self.lm_head.bias[...]

    def finish_logits(self, logits: Float[Array, "..."]) -> Float[Array, "..."]:
        """Scales and soft-caps products of head and states, elementwise."""
        config = self.config
        logits = scale_by(logits, config.logit_scale)
        logits = scale_by(logits, 1 / config.logits_scaling)
        if (cap := config.final_logit_softcapping) is not None:
            logits = cap * jnp.tanh(logits / cap)
        return logits

    def hidden_states(
        self,
        tokens: Ids,
        positions: Ids | None = None,
        segment_ids: Ids | None = None,
    ) -> Float[Array, "layers+1 batch seq embed"]:
        """Returns the residual stream before the first layer and after each layer.

        Used to find the first layer where two models differ. The last entry is normed,
        as in transformers.
        """
        x, (first, *states) = self._run(
            tokens, positions, segment_ids, _apply_and_keep, keep_first=True
        )
        states = jnp.concatenate(states)
        return jnp.concatenate([first[None], states[:-1], self.norm(x)[None]])

    def _run(
        self,
        tokens: Ids,
        positions: Ids | None,
        segment_ids: Ids | None,
        unit: Callable[..., tuple[Stream, Any]],
        *,
        keep_first: bool = False,
        cache: Sequence[KeyValues] | None = None,
    ) -> tuple[Stream, list[Any]]:
        """Embeds tokens and runs all stacks of layers.

        Returns the residual stream, and one `y` per stack (with `keep_first`, preceded
        by the embeddings).
        """
        if positions is None:
            positions = self.positions(tokens)
        x = self.constrain(self._embed(tokens, positions), "embeddings")
        tables, per_layer = self._tables(positions, x.dtype), _per_layer(self.config)
        ys: list[Any] = [x] if keep_first else []
        for i, (run, stack) in enumerate(
            zip(self.config.layer_runs, self._stacks(), strict=True)
        ):
            mine = {name: v[run.start : run.stop] for name, v in per_layer.items()}
            xs, consts = (mine,), (tables, segment_ids)
            if cache is not None:
                xs, consts = (mine, cache[i]), (tables, positions)
            x, y = self.scan(unit, stack, x, xs=xs, consts=consts)
            ys.append(y)
        return x, ys

    def _stacks(self) -> list[DecoderLayer]:
        layers = self.layers
        return [layers] if isinstance(layers, DecoderLayer) else list(layers)

    def _embed(self, tokens: Ids, positions: Ids) -> Stream:
        x = self.embed_tokens(tokens)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions + self.config.position_offset)
        if self.config.scale_embeddings:
            # The factor is rounded to the dtype of the weights, as in training.
            x = x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)
        return scale_by(x, self.config.embedding_multiplier)

    def _tables(self, positions: Ids, dtype: DTypeLike) -> Tables:
        config, ropes = self.config, _ropes(self.config)
        if not ropes:
            return None
        tables = []
        for rope in ropes:
            if rope is None:
                # Rotation by 0, so that all layers of a scan have the same structure.
                ones = jnp.ones((*positions.shape, config.rope_dim // 2), dtype)
                tables.append((ones, jnp.zeros_like(ones)))
            else:
                tables.append(rope_tables(rope, config.rope_dim, positions, dtype))
        if len(tables) == 1:
            return tables[0]
        cosines, sines = zip(*tables, strict=True)
        return jnp.stack(cosines), jnp.stack(sines)


def _layer_ropes(config: DecoderConfig) -> list[RopeConfig | None]:
    """Returns the rotary embedding of each layer, None for layers without one."""
    sliding = config.sliding_rope or config.rope
    return [
        None
        if layer in config.no_rope_layers
        else (config.rope if window is None else sliding)
        for layer, window in enumerate(config.windows)
    ]


def _ropes(config: DecoderConfig) -> list[RopeConfig | None]:
    """Returns the distinct rotary embeddings, in the order of their first use."""
    if config.rope is None:
        return []
    return list(dict.fromkeys(_layer_ropes(config)))


def _per_layer(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Returns the inputs that differ between layers, as arrays with a layer dim."""
    values, ropes = {}, _ropes(config)
    if len(ropes) > 1:
        indices = [ropes.index(rope) for rope in _layer_ropes(config)]
        values["table"] = np.asarray(indices, np.int32)
    if len(set(config.windows)) > 1:
        windows = [_NO_WINDOW if w is None else w for w in config.windows]
        values["window"] = np.asarray(windows, np.int32)
    return values


def _apply_layer(
    layer: DecoderLayer, x: Stream, per_layer: PerLayer, *consts: Any
) -> tuple[Stream, RouterStats | None]:
    # Through `__call__`, which a subclass may override to gather the weights.
    out = layer(x, per_layer, *consts)
    return out.stream, out.router_stats


def _apply_and_keep(
    layer: DecoderLayer, x: Stream, per_layer: PerLayer, *consts: Any
) -> tuple[Stream, Stream]:
    x = layer(x, per_layer, *consts).stream
    return x, x


def _extend_layer(
    layer: DecoderLayer,
    x: Stream,
    per_layer: PerLayer,
    cache: KeyValues,
    tables: Tables,
    slots: Ids,
) -> tuple[Stream, KeyValues | None]:
    out = layer(x, per_layer, tables, cache=cache, slots=slots)
    return out.stream, out.cache


def _stacked(stats: list[RouterStats]) -> RouterStats | None:
    """Concatenates the statistics of several stacks of layers."""
    if not stats:
        return None
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *stats)
