"""Attention whose keys and values later layers attend to as well."""

from typing import Any, NamedTuple

from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._attention import Window, attend
from bridge.models._cache import Slots, attend_cached, key_values, visible_slots
from bridge.models._config import DecoderConfig
from bridge.models._layer_kinds import LayerKind
from bridge.models._layer_state import KeyValues
from bridge.models._position_tables import PositionTables
from bridge.models._self_attention import Heads, MakeLinear, SelfAttention


class SharedStream(NamedTuple):
    """Residual stream beside the keys and values of the last layer of each type.

    Attributes:
      stream: Residual stream.
      sliding: Keys and values of the last sliding layer that has any.
      full: Those of the last full one.
    """

    stream: Float[Array, "batch seq embed"]
    sliding: KeyValues
    full: KeyValues


class SharedAttention(SelfAttention):
    """Self-attention that returns its keys and values, or attends to those it is given.

    Args:
      config: Config of the decoder.
      reuses: Whether the layer has no keys and values of its own.
      **options: Those of `SelfAttention`.

    Source: transformers `modeling_gemma4.py::Gemma4TextAttention`.
    """

    def __init__(self, config: DecoderConfig, *, reuses: bool, **options: Any):
        """Initializes the projections, without keys and values if others' are read."""
        self.reuses = reuses
        super().__init__(config, **options)

    def attend_shared(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        segment_ids: Int[Array, "batch seq"] | None,
        window: Window,
        before: KeyValues,
    ) -> tuple[Float[Array, "batch seq embed"], KeyValues]:
        """Attends to its own keys and values, or to those of an earlier layer.

        Args:
          x: Normed hidden states.
          tables: Tables of the positions.
          segment_ids: Segment of each token in a packed row; None for one segment.
          window: Attention window of this layer; None for the one of all layers.
          before: Keys and values of the last layer of this type.

        Returns:
          Attention output, and the keys and values that it attended to.
        """
        query, used = self._project_shared(x, tables, before)
        options = {"segment_ids": segment_ids, **self._score_options(window)}
        return self.o_proj(self.attention(query, *used, **options)), used

    def extend_shared(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        cache: KeyValues | None,
        slots: Slots,
        window: Window,
        before: KeyValues,
    ) -> tuple[Float[Array, "batch seq embed"], KeyValues | None, KeyValues]:
        """Attends from new tokens to those in the cache of this or an earlier layer.

        Args:
          x: Normed hidden states of the new tokens.
          tables: Tables of their positions.
          cache: KV cache of this layer; None if it attends to that of another.
          slots: Cache slot of each new token: its position.
          window: Attention window of this layer; None for the one of all layers.
          before: Cache of the last layer of this type, with the new tokens.

        Returns:
          Attention output, the cache of this layer, and the cache that it attended to.
        """
        query, new = self._project_shared(x, tables, before)
        options = self._score_options(window)
        if cache is not None:
            out, used = attend_cached(query, new, cache, slots, **options)
            return self.o_proj(out), used, used
        mask = visible_slots(slots, before.key.shape[1], options["window"])[:, None]
        scale, cap, sinks = (options[name] for name in ("scale", "softcap", "sinks"))
        out = attend(query, *before, scale, mask, cap, sinks)
        return self.o_proj(out), None, before

    def _project_shared(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        before: KeyValues,
    ) -> tuple[Heads, KeyValues]:
        if not self.reuses:
            query, key, value = self._project(x, tables)
            return query, KeyValues(key, value)
        query = self.q_proj(x)
        query = query if self.q_norm is None else self.q_norm(query)
        return self._apply_rope(query, tables), before

    def _make_projections(
        self, config: DecoderConfig, linear: MakeLinear, param_dtype: DTypeLike
    ) -> None:
        super()._make_projections(config, linear, param_dtype)
        if self.reuses:
            self.k_proj = self.v_proj = self.k_norm = self.v_norm = None


def share_nothing(config: DecoderConfig, x: Array, keys: int) -> SharedStream:
    """Returns a stream before the first layer, beside zeros.

    Args:
      config: Config of the decoder.
      x: Residual stream.
      keys: Number of keys.
    """
    sliding, full = (
        key_values(
            config.of_kind(LayerKind(is_full=is_full)), x.shape[:1], keys, x.dtype
        )
        for is_full in (False, True)
    )
    return SharedStream(x, sliding, full)
