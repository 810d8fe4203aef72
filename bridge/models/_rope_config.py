"""How positions turn the query and key heads, as data."""

import dataclasses
from typing import Literal

from bridge.models._checks import raise_if, wrong_fields

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """How positions turn the query and key heads.

    One value for what Hugging Face spells in two ways (`rope_theta` with
    `rope_scaling`, and `rope_parameters`), so that nothing past the config
    translation knows there were two.

    Args:
      rope_theta: Base of the geometric series of wavelengths.
      rope_type: `default`, or how the frequencies are stretched: `linear` divides
        them all by `factor`; `llama3` only those of long wavelengths; `yarn` those
        that turn less than `beta_fast` times within the original length, more and
        more up to `beta_slow`; `longrope` each by a number of its own.
      partial_rotary_factor: Share of a head that is turned; the rest stays.
      interleaved: Whether a pair is two neighbours of a head; else its two numbers
        are half the turned dims apart.
      factor: How many times longer the context is than at pre-training.
      low_freq_factor: `llama3`: wavelengths above original length / this are
        divided by `factor`.
      high_freq_factor: `llama3`: wavelengths below original length / this stay.
      original_max_position_embeddings: Tokens of context at pre-training.
      attention_factor: `yarn`, `longrope`: multiplies cosines and sines; None
        computes it from `factor`.
      beta_fast: `yarn`: turns above which a frequency stays.
      beta_slow: `yarn`: turns below which a frequency is divided by `factor`.
      mscale: `yarn`: with `mscale_all_dim`, weighs the attention factor.
      mscale_all_dim: `yarn`: divides it again; latent attention scales its scores by
        the square of what belongs to this one.
      truncate: `yarn`: whether the borders are rounded to whole dims.
      short_factor: `longrope`: divides each frequency up to the original length.
      long_factor: `longrope`: divides each frequency beyond it.

    Raises:
      ValueError: If a field has a value it cannot have, one that `rope_type` needs is
        missing, or one that it does not read is set.
    """

    rope_theta: float = 10000.0
    rope_type: RopeType = "default"
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self):
        """Refuses a field that would do nothing, and the absence of one that does."""
        if self.rope_type not in NEEDED:
            raise ValueError(
                f"rope_type {self.rope_type!r} is not modelled; "
                f"the modelled types are {', '.join(NEEDED)}."
            )
        reads = (*NEEDED[self.rope_type], *OPTIONAL[self.rope_type])
        subject = f"rope_type {self.rope_type!r} reads "
        subject += ", ".join(reads) or "no further field"
        raise_if(subject, wrong_fields(self) + self._misfits())

    def _misfits(self) -> list[str]:
        needed, optional = NEEDED[self.rope_type], OPTIONAL[self.rope_type]
        wrong = []
        for name in STRETCHING:
            value = getattr(self, name)
            if value is None and name in needed:
                wrong.append(f"{name} = None: needed, not set")
            elif value is not None and name not in (*needed, *optional):
                wrong.append(f"{name} = {value!r}: set, but never read")
        for name in ("rope_theta", "partial_rotary_factor", "factor"):
            value = getattr(self, name)
            if isinstance(value, int | float) and not value > 0:
                wrong.append(f"{name} = {value!r}: must be above 0")
        return wrong


NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "short_factor",
        "long_factor",
    ),
}
"""The fields without which a type cannot be computed."""

OPTIONAL: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": (),
    "llama3": (),
    "yarn": (
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("attention_factor",),
}
"""The fields that a type reads if they are set."""

STRETCHING = tuple(
    dict.fromkeys(
        name
        for table in (NEEDED, OPTIONAL)
        for names in table.values()
        for name in names
    )
)
"""All fields that only some types read."""
