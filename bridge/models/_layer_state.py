"""What each kind of mixer keeps of the tokens so far, to generate the next."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float


class KeyValues(NamedTuple):
    """KV cache of one layer, or, with a leading layer dim, of a stack of layers.

    A token is stored in the slot of its position. So prompts of unequal lengths need
    no left padding, and a query never attends to slots after its own.
    """

    key: Float[Array, "batch slots kv_heads head_dim"]
    value: Float[Array, "batch slots kv_heads v_head_dim"]


class CompressorInputs(NamedTuple):
    """What a compressor projects each token to.

    Attributes:
      values: Values, of which an entry is the weighted mean.
      gates: Logits of their weights.
    """

    values: Float[Array, "batch tokens width"]
    gates: Float[Array, "batch tokens width"]


class IndexedKeyValues(NamedTuple):
    """Cache of attention to the keys that an indexer selects.

    Attributes:
      attention: KV cache.
      index_key: Keys of the indexer, which all its heads share.
    """

    attention: KeyValues
    index_key: Float[Array, "batch slots index_dim"]


class CompressedKeyValues(NamedTuple):
    """Cache of attention to single tokens and to entries of several.

    Entries are made anew of what their compressor projects, so that a token is one slot
    here too.

    Attributes:
      key: Keys, which are also the values, and which all heads share.
      entries: Values and gates of the compressor; None in a layer without one.
      index_entries: Those of the compressor of the indexer; None without an indexer.
    """

    key: Float[Array, "batch slots head_dim"]
    entries: CompressorInputs | None = None
    index_entries: CompressorInputs | None = None


class ConvState(NamedTuple):
    """State of a short convolution: its inputs of the last tokens."""

    inputs: Float[Array, "batch before embed"]


class DeltaNetState(NamedTuple):
    """State of a gated delta net.

    Attributes:
      query: Inputs of the query's convolution of the last tokens.
      key: Those of the key's.
      value: Those of the value's.
      memory: Matrix from keys to values of each head, at least in float32.
    """

    query: Float[Array, "batch before key_heads key_dim"]
    key: Float[Array, "batch before key_heads key_dim"]
    value: Float[Array, "batch before heads value_dim"]
    memory: Float[Array, "batch heads key_dim value_dim"]


class LightningState(NamedTuple):
    """State of lightning attention.

    Attributes:
      memory: Matrix from keys to values of each head, at least in float32.
    """

    memory: Float[Array, "batch heads value_dim key_dim"]


class MambaState(NamedTuple):
    """State of a Mamba 2 mixer.

    Attributes:
      x: Inputs of the channels' convolution of the last tokens.
      b: Those of the convolution of the projection into the state.
      c: Those of the convolution of the projection of the state.
      memory: State of each channel, at least in float32.
    """

    x: Float[Array, "batch before heads head_dim"]
    b: Float[Array, "batch before groups state"]
    c: Float[Array, "batch before groups state"]
    memory: Float[Array, "batch heads head_dim state"]


class Mamba1State(NamedTuple):
    """State of a Mamba 1 mixer.

    Attributes:
      x: Inputs of the channels' convolution of the last tokens.
      memory: State of each channel, at least in float32.
    """

    x: Float[Array, "batch before channels"]
    memory: Float[Array, "batch channels state"]


class RGLRUMemory(NamedTuple):
    """Memory of a real-gated linear recurrent unit.

    Attributes:
      hidden: State of each channel, at least in float32.
      begun: Whether a row has tokens so far.
    """

    hidden: Float[Array, "batch heads head_dim"]
    begun: Bool[Array, " batch"]


class RGLRUState(NamedTuple):
    """State of a real-gated linear recurrent unit.

    Attributes:
      x: Inputs of the channels' convolution of the last tokens.
      memory: State of the recurrence.
    """

    x: Float[Array, "batch before heads head_dim"]
    memory: RGLRUMemory


class AttentionMambaState(NamedTuple):
    """State of attention and a Mamba mixer side by side, or one after the other.

    Attributes:
      attention: KV cache.
      mamba: State of the mixer; only behind shared blocks one of Mamba 1.
    """

    attention: KeyValues
    mamba: MambaState | Mamba1State


class TwoKeyValues(NamedTuple):
    """Cache of a layer with two attentions, one after the other."""

    first: KeyValues
    second: KeyValues


LayerState = (
    KeyValues
    | TwoKeyValues
    | IndexedKeyValues
    | CompressedKeyValues
    | ConvState
    | DeltaNetState
    | LightningState
    | MambaState
    | Mamba1State
    | RGLRUState
    | AttentionMambaState
)
