"""The shape and the traits of a decoder, under the names Hugging Face gives them."""

import dataclasses
from typing import Literal

RopeType = Literal["default", "linear", "llama3"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """How positions turn the query and key heads.

    One value for what Hugging Face spells in two ways (`rope_theta` with
    `rope_scaling`, and `rope_parameters`), so that nothing past the config
    translation knows there were two.

    Args:
      rope_theta: Base of the geometric series of wavelengths.
      rope_type: `default`, or how the frequencies are stretched: `linear` divides
        them all by `factor`; `llama3` only those of long wavelengths.
      factor: How many times longer the context is than at pre-training.
      low_freq_factor: `llama3`: wavelengths above original length / this are
        divided by `factor`.
      high_freq_factor: `llama3`: wavelengths below original length / this stay.
      original_max_position_embeddings: `llama3`: tokens of context at pre-training.

    Raises:
      ValueError: If a field that `rope_type` needs is missing, or one that it does
        not read is set.
    """

    rope_theta: float = 10000.0
    rope_type: RopeType = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self):
        """Refuses a field that would do nothing, and the absence of one that does."""
        needed = ROPE_FIELDS.get(self.rope_type)
        if needed is None:
            raise ValueError(
                f"rope_type {self.rope_type!r} is not modelled; "
                f"the modelled types are {', '.join(ROPE_FIELDS)}."
            )
        wrong = [
            f"  {name} = {getattr(self, name)!r}: "
            + ("needed, not set" if name in needed else "set, but never read")
            for name in ROPE_FIELDS["llama3"]
            if (getattr(self, name) is not None) != (name in needed)
        ]
        if wrong:
            raise ValueError(
                f"rope_type {self.rope_type!r} reads "
                f"{', '.join(needed) or 'no further field'}:\n" + "\n".join(wrong)
            )


ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer, as data.

    Fields carry Hugging Face's names and meanings. Those that the model does not
    read (`initializer_range` aside, the token ids, `max_position_embeddings` and
    `dtype`) are kept so that an exported config says what the imported one said.

    Args:
      vocab_size: Rows of the embedding, padding included.
      hidden_size: Width of the residual stream.
      intermediate_size: Width inside the MLP.
      num_hidden_layers: Layers, stacked in one module.
      num_attention_heads: Query heads.
      num_key_value_heads: Key and value heads; None means as many as query heads.
      head_dim: Width of a head; None means `hidden_size / num_attention_heads`.
      max_position_embeddings: Longest sequence the model was trained for, in tokens.
      rms_norm_eps: Added to the mean square under the root.
      rope: How positions turn queries and keys.
      attention_bias: Whether q, k, v and o projections have biases.
      mlp_bias: Whether gate, up and down projections have biases.
      tie_word_embeddings: Whether the embedding is also the output projection.
      initializer_range: Standard deviation of freshly initialised weights.
      bos_token_id: Token that begins a text, or None.
      eos_token_id: Token, or tokens, that end a text, or None.
      pad_token_id: Token that fills up a batch, or None.
      model_type: The family, a key of the family table.
      dtype: Weights' dtype as recorded in the config file. The compute dtype
        follows the weights, never this field.

    Raises:
      ValueError: If sizes are not positive or do not fit each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = None  # pyright: ignore[reportAssignmentType]
    head_dim: int = None  # pyright: ignore[reportAssignmentType]
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    model_type: str = "llama"
    dtype: str = "float32"

    def __post_init__(self):
        """Fills in the two derived sizes and checks that all sizes fit."""
        wrong = [
            f"{name} is {getattr(self, name)!r}, not a positive integer"
            for name in _SIZES
            if not _is_size(getattr(self, name), optional=name in _DERIVED)
        ]
        if not wrong:
            self._derive()
            wrong = self._misfits()
        if wrong:
            raise ValueError("DecoderConfig:\n" + "\n".join(f"  {w}" for w in wrong))

    def _derive(self):
        # A frozen dataclass is still being made here: its own setattr refuses.
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            head_dim = self.hidden_size // self.num_attention_heads
            object.__setattr__(self, "head_dim", head_dim)

    def _misfits(self) -> list[str]:
        misfits = []
        if self.num_attention_heads % self.num_key_value_heads:
            misfits.append(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}: query heads share "
                "key heads in equal groups"
            )
        if self.head_dim % 2:
            misfits.append(
                f"head_dim {self.head_dim} is odd, but rotary embedding turns pairs"
            )
        return misfits


_DERIVED = ("num_key_value_heads", "head_dim")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    *_DERIVED,
)


def _is_size(value: object, *, optional: bool) -> bool:
    if value is None:
        return optional
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
