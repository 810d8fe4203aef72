"""Reference decoder, defined by its config, in plain single-device JAX."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float

from bridge.models._attention import Attention, dot_product_attention
from bridge.models._config import DecoderConfig
from bridge.models._constrain import Constrain, unconstrained
from bridge.models._decoder_parts import make_final_norm, make_norm, make_streams
from bridge.models._float8 import Product, plain_product
from bridge.models._float8_grouped import GroupedProduct
from bridge.models._grouped import grouped_matmul
from bridge.models._head import finish_logits, make_head, make_head_transform
from bridge.models._layer_inputs import position_tables
from bridge.models._layer_loop import (
    Scan,
    Unit,
    apply_and_keep,
    apply_and_route,
    apply_layer,
    extend_layer,
    in_layer_order,
    plain_scan,
    run_layers,
    sparse_layers,
)
from bridge.models._layer_mixer import Stream
from bridge.models._layer_products import LayerProducts, products_of_layers
from bridge.models._layer_stacks import make_layers, stacks_of_blocks
from bridge.models._layer_state import LayerState
from bridge.models._linear import Embedding, Linear
from bridge.models._moe import Dispatch, sorted_dispatch
from bridge.models._per_layer_input import PerLayerInputs
from bridge.models._positions import (
    Ids,
    Positions,
    check_length,
    check_whole_rows,
    positions_in_order,
)
from bridge.models._recurrence import Recurrence, plain_recurrence
from bridge.models._router_stats import RouterStats
from bridge.models._routes import Routes, check_routes
from bridge.models._shared_block import make_shared_blocks
from bridge.models._start import Start
from bridge.models._token_embedding import scale_embeddings, sinusoids
from bridge.models._token_experts import TokenExperts


class Decoder(nnx.Module):
    """Decoder-only language model with stacked layers.

    `layers` is a single `DecoderLayer` with a leading layer dim on every leaf, so
    that a scan compiles one layer and the layers of a file are loaded into one array.
    Where layers are of several kinds, it is a list with an entry for each block of
    `config.layer_blocks`: such a stack, or, where the kinds alternate, a list of
    stacks, one for each layer of the period. A scan then runs a period at a time.
    Parameters are only used inside the call of the module that owns them, so a
    replacement of `DecoderLayer.__call__` sees every use of a layer's weights.

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
      product: Product of the projections of attention and MLPs, such as
        `float8_product`; embedding, head and routers keep their dtype.
      expert_product: Grouped product of experts, such as `float8_grouped_matmul`.
      num_layers_at_start_in_bf16: Number of first layers that multiply in the dtype of
        the weights whatever `product` and `expert_product` are.
      num_layers_at_end_in_bf16: Number of last layers likewise.
      positions: Function that returns positions if a call has none, with the signature
        of `positions_in_order`. For rows split over devices the right positions
        suffice, except with `longrope`: each part would choose its frequencies by
        its own longest text.
      recurrence: Function that runs mixers with a state, with the signature of
        `plain_recurrence`.
      batch_parts: Parts of the rows that layers run side by side, so that one part
        computes while tokens of another are communicated over `tp` or `ep`; 1 for all
        rows at once. No row depends on it, but for what is a property of a batch: the
        tokens that experts of a fixed capacity drop, and the scales of
        `float8_product`. Generation with a cache runs all rows at once.

    Raises:
      ValueError: If `batch_parts` is less than 1, or the layers in bf16 are fewer than
        none, more than all, or set beside a product that multiplies in bf16 anyway.

    Source: Domino (arXiv:2409.15241), for `batch_parts`; Megatron-LM
      `transformer_config.py`, for the names of the layers in bf16.
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
        product: Product = plain_product,
        expert_product: GroupedProduct = grouped_matmul,
        num_layers_at_start_in_bf16: int = 0,
        num_layers_at_end_in_bf16: int = 0,
        positions: Positions = positions_in_order,
        recurrence: Recurrence = plain_recurrence,
        batch_parts: int = 1,
    ):
        """Initializes all weights; under `nnx.eval_shape`, only their shapes."""
        if positions is not positions_in_order:
            check_whole_rows(config, "positions")
        if batch_parts < 1:
            raise ValueError(f"batch_parts={batch_parts}: at least 1.")
        ends = num_layers_at_start_in_bf16, num_layers_at_end_in_bf16
        products = LayerProducts(product, expert_product)
        self.products = products_of_layers(config.num_hidden_layers, products, *ends)
        self.config, self.scan, self.batch_parts = config, scan, batch_parts
        self.constrain, self.positions = constrain, positions
        self._make_inputs(config, rngs, param_dtype, constrain)
        own = dict(param_dtype=param_dtype, attention=attention, constrain=constrain)
        self.layers = make_layers(
            config,
            rngs,
            **own,
            dispatch=dispatch,
            recurrence=recurrence,
            products=self.products[0],
        )
        self.shared_blocks = make_shared_blocks(config, rngs, self.products, **own)
        self.norm = make_final_norm(config, param_dtype)
        self.head_transform = make_head_transform(config, rngs, param_dtype)
        self.lm_head = make_head(config, rngs, param_dtype)

    def _make_inputs(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        constrain: Constrain,
    ) -> None:
        """Makes what turns tokens into inputs of layers; None where there is none."""
        std, embed = config.initializer_range, config.hidden_size
        table = partial(Embedding, std=std, rngs=rngs, param_dtype=param_dtype)
        self.embed_tokens = table(config.vocab_size + config.unscored_tokens, embed)
        longest = config.max_position_embeddings + config.position_offset
        learned = config.learned_positions
        self.embed_positions = table(longest, embed) if learned else None
        inputs = None
        if config.per_layer_input is not None:
            inputs = PerLayerInputs(
                config, rngs=rngs, param_dtype=param_dtype, constrain=constrain
            )
        self.per_layer_inputs = inputs
        self.streams = make_streams(config, rngs, param_dtype)
        self.token_experts = TokenExperts(config) if config.hash_layers else None
        normed = config.embedding_norm
        self.embed_norm = make_norm(config, param_dtype) if normed else None

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
            decoder's own `positions`, by default from 0 in each row. They restart with
            each packed text, or may go on if the config has ropes of differences alone:
            no `dynamic` or `longrope`, learned positions, sines, `query_scale` or
            `attention_chunk_size`. A recurrence begins anew with `segment_ids` alone.
          segment_ids: Segment of each token in a packed row; None for one segment.

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
        experts: Routes | None = None,
    ) -> tuple[Float[Array, "batch seq vocab"], RouterStats | None]:
        """Returns the logits and router statistics, for load-balancing losses.

        Args:
          tokens: Token ids.
          positions: Positions as in `__call__`.
          segment_ids: Segments as in `__call__`.
          experts: Experts as in `final_states`.

        Returns:
          Logits, and the statistics of all layers with experts, stacked along a first
          dim, or None if there are no such layers.
        """
        states, stats = self.final_states(tokens, positions, segment_ids, experts)
        return self.logits(states), stats

    def logits(
        self, states: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of states returned by `final_states` or `extend`."""
        if isinstance(self.lm_head, Linear):
            logits = self.lm_head(states)
        else:
            logits = self.embed_tokens.attend(states)
            logits = logits if self.lm_head is None else self.lm_head(logits)
        return self.finish_logits(self.constrain(logits, "logits"))

    def extend(
        self,
        tokens: Ids,
        positions: Ids,
        cache: Sequence[LayerState | None],
        is_token: Bool[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], list[LayerState | None]]:
        """Runs new tokens that follow those in a cache.

        Args:
          tokens: Token ids.
          positions: Position of each token in its text, which is its cache slot.
          cache: Cache from `empty_cache`, or from a previous call.
          is_token: False behind the last new token of a row, which states of other
            layers than attention do not see; None if all are tokens.

        Returns:
          Normed final states, the input of the head; and the cache with the new
          tokens.
        """
        # Ropes that depend on the longest text do not see what is behind its end.
        seen = positions if is_token is None else jnp.where(is_token, positions, 0)
        start = self._start(tokens, seen)
        x, cache = self._run(extend_layer, start, positions, is_token, cache=cache)
        return self._head_input(x), cache

    def final_states(
        self,
        tokens: Ids,
        positions: Ids | None = None,
        segment_ids: Ids | None = None,
        experts: Routes | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], RouterStats | None]:
        """Returns the normed final states, the head's input, and router statistics.

        For losses that compute logits in chunks, from these states, `head_kernel`,
        `head_bias` and `finish_logits`.

        Args:
          tokens: Token ids.
          positions: Positions as in `__call__`.
          segment_ids: Segments as in `__call__`.
          experts: Experts of each token that `chosen_experts` or a rollout engine
            recorded, whose weights are computed anew; None if routers choose. A rollout
            in another precision chooses other experts for some tokens, whose
            log-probabilities then differ by far more than rounding.

        Raises:
          ValueError: If `experts` has not the shape that the decoder chooses.

        Source: verl `router_replay`; Megatron-LM `router_replay.py::RouterReplay`.
        """
        if experts is not None:
            check_routes(self.config, tokens, experts)
        start = self._start(tokens, positions)
        x, stats = self._run(apply_layer, start, segment_ids, experts=experts)
        return self._head_input(x), in_layer_order(self.config, stats)

    def chosen_experts(
        self,
        tokens: Ids,
        positions: Ids | None = None,
        segment_ids: Ids | None = None,
    ) -> Routes:
        """Returns the experts that routers choose, to be replayed by `final_states`.

        Args:
          tokens: Token ids.
          positions: Positions as in `__call__`.
          segment_ids: Segments as in `__call__`.

        Raises:
          ValueError: If no layer has experts.
        """
        if not sparse_layers(self.config):
            raise ValueError("This decoder has no experts: its config has moe=None.")
        start = self._start(tokens, positions)
        _, experts = self._run(apply_and_route, start, segment_ids)
        return in_layer_order(self.config, experts)

    def head_kernel(self) -> Float[Array, "embed vocab"]:
        """Returns the head's kernel; with tied embeddings, the transposed embedding."""
        if isinstance(self.lm_head, Linear):
            return self.lm_head.kernel[...]
        return self.embed_tokens.embedding[...].T

    def head_bias(self) -> Float[Array, " vocab"] | None:
        """Returns the head's bias, or None if it has none."""
        if self.lm_head is None or self.lm_head.bias is None:
            return None
        return self.lm_head.bias[...]

    def finish_logits(self, logits: Float[Array, "..."]) -> Float[Array, "..."]:
        """Scales and soft-caps products of head and states, elementwise."""
        return finish_logits(self.config, logits)

    def hidden_states(
        self,
        tokens: Ids,
        positions: Ids | None = None,
        segment_ids: Ids | None = None,
    ) -> Float[Array, "layers+1 batch seq embed"]:
        """Returns the residual stream before the first layer and after each layer.

        Used to find the first layer where two models differ. The last entry is normed,
        as in transformers. Of several streams, each entry before it is the active one;
        of hyper-connections, their mean.
        """
        start = self._start(tokens, positions)
        x, states = self._run(apply_and_keep, start, segment_ids)
        states = in_layer_order(self.config, states)
        states = states if self.streams is None else self.streams.shown(states)
        return jnp.concatenate([start.x[None], states[:-1], self.norm(x)[None]])

    def _head_input(self, x: Stream) -> Stream:
        states = self.constrain(self.norm(x), "input")
        transform = self.head_transform
        return states if transform is None else transform(states)

    def _start(self, tokens: Ids, positions: Ids | None) -> Start:
        """Returns what the layers receive."""
        if positions is None:
            check_length(self.config, tokens.shape[1], "A row")
            positions = self.positions(tokens)
        x = self.constrain(self._embed(tokens, positions), "embeddings")
        make, choose = self.per_layer_inputs, self.token_experts
        inputs = None if make is None else make(tokens, x)
        experts = None if choose is None else choose(tokens)
        return Start(x, positions, inputs, experts)

    def _run(
        self,
        unit: Unit,
        start: Start,
        *consts: Any,
        cache: Sequence[LayerState | None] | None = None,
        experts: Routes | None = None,
    ) -> tuple[Stream, list[Any]]:
        """Runs all layers; see `run_layers`."""
        tables = position_tables(self.config, start.positions, start.x.dtype)
        streams = self.streams
        x, ys = run_layers(
            self.config,
            self.scan,
            unit,
            stacks_of_blocks(self.config, self.layers),
            start.x if streams is None else streams.split(start.x),
            (tables, *consts),
            cache=cache,
            experts=experts,
            token_experts=start.token_experts,
            inputs_of_layers=start.inputs_of_layers,
            products=self.products if len(set(self.products)) > 1 else None,
            shared_blocks=self.shared_blocks,
            batch_parts=1 if cache is not None else self.batch_parts,
        )
        return (x if streams is None else streams.join(x)), ys

    def _embed(self, tokens: Ids, positions: Ids) -> Stream:
        x = scale_embeddings(self.config, self.embed_tokens(tokens))
        rows = positions + self.config.position_offset
        if self.embed_positions is not None:
            x = x + self.embed_positions(rows)
        if self.config.sinusoidal_positions:
            x = x + sinusoids(rows, self.config.hidden_size, x.dtype)
        x = x if self.embed_norm is None else self.embed_norm(x)
        if self.config.residual_in_fp32:
            x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return x
