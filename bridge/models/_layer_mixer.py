"""Mixer of a decoder layer: attention of each kind or a recurrence, with its cache."""

from typing import Any, NamedTuple, Protocol

from flax import nnx
from jaxtyping import Array, Float, Int

from bridge.models._attention import Window
from bridge.models._cache import Slots
from bridge.models._causal_conv import Mask
from bridge.models._compressed_attention import CompressedAttention
from bridge.models._constrain import Constrain
from bridge.models._indexed_attention import IndexedAttention, SelectedStream
from bridge.models._indexer import Selected
from bridge.models._latent_attention import LatentAttention
from bridge.models._layer_state import (
    AttentionMambaState,
    CompressedKeyValues,
    IndexedKeyValues,
    KeyValues,
    LayerState,
)
from bridge.models._lightning import LightningAttention
from bridge.models._multipliers_config import MultipliersConfig
from bridge.models._position_tables import PositionTables
from bridge.models._recurrence import Recurrence
from bridge.models._scale import scale_by
from bridge.models._self_attention import SelfAttention
from bridge.models._shared_attention import SharedAttention, SharedStream

Stream = Float[Array, "batch seq embed"]


class MixerInputs(NamedTuple):
    """What the mixer of a layer reads beside its input.

    Attributes:
      tables: Tables of the positions.
      window: Attention window in tokens; None for the one of all layers.
      segment_ids: Segment of each token; None for one segment.
      slots: Slots of the tokens in the cache; None without a cache.
      is_token: False behind the last token of a row; None if all are tokens.
      selected: Keys that the last indexer selected; None for all.
      shared: Stream and the keys and values that layers share; None if they do not.
      own_input: Input that the layer has of each token; None for none.
      slopes: Decays of lightning attention in this layer; None for none.
      lambda_start: First factor of differential attention in this layer; None for other
        attention.
      embeddings: Residual stream before the first layer; None if no shared block reads
        it.
    """

    tables: PositionTables
    window: Window
    segment_ids: Int[Array, "batch seq"] | None
    slots: Slots | None
    is_token: Mask
    selected: Selected | None = None
    shared: SharedStream | None = None
    own_input: Float[Array, "batch seq size"] | None = None
    slopes: Float[Array, "1 1 heads"] | None = None
    lambda_start: Float[Array, ""] | None = None
    embeddings: Stream | None = None


class MixerOutput(NamedTuple):
    """Output of the mixer of a layer.

    Attributes:
      output: Mixed hidden states.
      cache: Cache with the new tokens; None if there was none.
      selected: Keys that the queries attended to; None for all.
      shared: Keys and values of which later layers read; None if they read none.
    """

    output: Stream
    cache: LayerState | None
    selected: Selected | None = None
    shared: SharedStream | None = None

    def beside_selected(
        self, stream: Array, before: Array | None
    ) -> Array | SelectedStream:
        """Returns the stream behind the layer, beside keys that the next ones read.

        Args:
          stream: Residual stream, or streams, behind the layer.
          before: Keys beside the stream before it; None if layers share none.
        """
        if before is None:
            return stream
        own = self.selected
        return SelectedStream(
            stream, before if own is None else own.astype(before.dtype)
        )


class StatefulMixer(Protocol):
    """Mixer with a state: a short convolution or a `RecurrentMixer`."""

    def __call__(
        self, x: Stream, segment_ids: Int[Array, "batch seq"] | None
    ) -> Stream:
        """Mixes each token with those before it in its segment."""
        ...

    def extend(self, x: Stream, state: Any, is_token: Mask) -> tuple[Stream, Any]:
        """Mixes new tokens with those of a state, and returns the state after them."""
        ...


def constrained_input(attention: nnx.Module, x: Stream, constrain: Constrain) -> Stream:
    """Returns the input of attention, with its sharding constraint.

    Latent attention constrains its latent vectors instead.

    Args:
      attention: Attention of the layer.
      x: Normed hidden states.
      constrain: Sharding constraint of activations.
    """
    latent = isinstance(attention, LatentAttention | CompressedAttention)
    return x if latent else constrain(x, "input")


def run_attention(
    attention: SelfAttention | CompressedAttention,
    x: Stream,
    cache: LayerState | None,
    inputs: MixerInputs,
) -> MixerOutput:
    """Runs attention to the keys and values of the layer.

    Args:
      attention: Attention of the layer.
      x: Normed hidden states.
      cache: Cache of the previous tokens; None without a cache.
      inputs: What it reads beside `x`.
    """
    own, window = inputs.tables, inputs.window
    start = {} if inputs.lambda_start is None else {"start": inputs.lambda_start}
    if inputs.slots is not None and cache is not None:
        if isinstance(attention, CompressedAttention):
            assert isinstance(cache, CompressedKeyValues)
            return MixerOutput(*attention.extend(x, own, cache, inputs.slots, window))
        if isinstance(cache, KeyValues | IndexedKeyValues):
            return MixerOutput(
                *attention.extend(x, own, cache, inputs.slots, window, **start)
            )
    return MixerOutput(attention(x, own, inputs.segment_ids, window, **start), cache)


def run_indexed_attention(
    attention: IndexedAttention,
    x: Stream,
    cache: LayerState | None,
    inputs: MixerInputs,
) -> MixerOutput:
    """Runs attention to the keys that an indexer selects.

    Args:
      attention: Attention of the layer.
      x: Normed hidden states.
      cache: Cache of the previous tokens; None without a cache.
      inputs: What it reads beside `x`.
    """
    own, before = inputs.tables, inputs.selected
    if inputs.slots is not None and isinstance(cache, KeyValues | IndexedKeyValues):
        extended = attention.extend_selected(x, own, cache, inputs.slots, before)
        return MixerOutput(*extended)
    ids = inputs.segment_ids
    selected = attention.select(x, own, ids, before)
    return MixerOutput(attention(x, own, ids, selected=selected), cache, selected)


def run_shared_attention(
    attention: SharedAttention,
    x: Stream,
    cache: LayerState | None,
    inputs: MixerInputs,
    shared: SharedStream,
    *,
    is_full: bool,
) -> MixerOutput:
    """Runs attention to keys and values of this layer or of an earlier one.

    Args:
      attention: Attention of the layer.
      x: Normed hidden states.
      cache: Cache of the previous tokens; None without one of this layer's own.
      inputs: What it reads beside `x`.
      shared: Keys and values of the last layer of each type.
      is_full: Whether the layer is a full one among sliding ones.
    """
    name = "full" if is_full else "sliding"
    before, own, window = getattr(shared, name), inputs.tables, inputs.window
    if inputs.slots is None:
        out, used = attention.attend_shared(x, own, inputs.segment_ids, window, before)
    else:
        if cache is not None:
            assert isinstance(cache, KeyValues)
        out, cache, used = attention.extend_shared(
            x, own, cache, inputs.slots, window, before
        )
    return MixerOutput(out, cache, shared=shared._replace(**{name: used}))


def run_recurrent_mixer(
    mixer: StatefulMixer | LightningAttention,
    recurrence: Recurrence,
    x: Stream,
    cache: LayerState | None,
    inputs: MixerInputs,
) -> MixerOutput:
    """Runs a mixer with a state.

    Args:
      mixer: Mixer of the layer.
      recurrence: Function that runs it over rows, with the signature of
        `plain_recurrence`.
      x: Normed hidden states.
      cache: State before the tokens; None without one.
      inputs: What it reads beside `x`.
    """
    if isinstance(mixer, LightningAttention):
        assert inputs.slopes is not None
        mixer = mixer.in_layer(inputs.slopes)
    if cache is None:
        return MixerOutput(recurrence(mixer, x, inputs.segment_ids), None)
    return MixerOutput(*mixer.extend(x, cache, inputs.is_token))


def run_attention_and_mamba(
    attention: SelfAttention | CompressedAttention,
    factors: MultipliersConfig,
    mamba: StatefulMixer,
    recurrence: Recurrence,
    x: Stream,
    cache: LayerState | None,
    inputs: MixerInputs,
) -> MixerOutput:
    """Runs attention and Mamba side by side, and adds their outputs.

    Args:
      attention: Attention of the layer.
      factors: Factors of inputs and outputs.
      mamba: Mixer with a state beside it.
      recurrence: As for `run_recurrent_mixer`.
      x: Normed hidden states.
      cache: State before the tokens; None without one.
      inputs: What both read beside `x`.
    """
    caches = cache if isinstance(cache, AttentionMambaState) else (None, None)
    own = scale_by(x, factors.attention_in)
    attended = run_attention(attention, own, caches[0], inputs)
    recurred = run_recurrent_mixer(mamba, recurrence, x, caches[1], inputs)
    after = None
    if cache is not None:
        after = AttentionMambaState(attended.cache, recurred.cache)  # pyright: ignore[reportArgumentType]
    output = scale_by(attended.output, factors.attention_out)
    return MixerOutput(output + scale_by(recurred.output, factors.mamba_out), after)
