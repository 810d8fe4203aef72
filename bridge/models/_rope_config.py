"""Config of rotary position embedding."""

import dataclasses
from typing import Literal

from bridge.models._checks import raise_if, wrong_fields

RopeType = Literal[
    "default",
    "linear",
    "dynamic",
    "ntk_alpha",
    "llama3",
    "yarn",
    "longrope",
    "proportional",
]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Config of rotary position embedding.

    It unifies the two forms in Hugging Face configs (`rope_theta` with `rope_scaling`,
    and `rope_parameters`), so that only the config translation handles both.

    Args:
      rope_theta: Base of the geometric series of wavelengths.
      rope_type: `default`, or the scaling of the frequencies: `linear` divides all by
        `factor`; `dynamic` raises the base for texts beyond the original length, by
        their length; `ntk_alpha` raises it for all; `llama3` divides only frequencies
        of long wavelengths; `yarn` those of fewer than
        `beta_fast` rotations within the original length, gradually up to the full
        `factor` at `beta_slow`; `longrope` each by its own divisor. `proportional`
        gives pairs of an entire head its frequencies, but turns only the first of
        them, a part of `partial_rotary_factor`.
      partial_rotary_factor: Fraction of a head's dims that is rotated.
      interleaved: Whether a pair is two adjacent dims of a head; otherwise the two
        are half of the rotated dims apart.
      clockwise: Whether pairs turn the other way, by the negative angle.
      factor: Ratio of the context length to that of pre-training.
      alpha: `ntk_alpha`: ratio of the context length, to which the base is adapted.
      low_freq_factor: `llama3`: divisor of the original length that gives the
        wavelength above which frequencies are divided by `factor`.
      high_freq_factor: `llama3`: divisor of the original length that gives the
        wavelength below which frequencies are unchanged.
      original_max_position_embeddings: Context length of pre-training, in tokens.
      attention_factor: `yarn`, `longrope`: factor of cosines and sines; None to
        compute it from `factor`.
      beta_fast: `yarn`: number of rotations above which a frequency is unchanged; None
        for 32.
      beta_slow: `yarn`: number of rotations below which a frequency is divided by
        `factor`; None for 1.
      mscale: `yarn`: weight in the numerator of the attention factor, if
        `mscale_all_dim` is set too.
      mscale_all_dim: `yarn`: weight in its denominator; latent attention multiplies
        its scores by the square of this term.
      truncate: `yarn`: whether the bounds of the ramp are rounded to integer dims;
        None for True.
      short_factor: `longrope`: divisors of the frequencies up to the original length.
      long_factor: `longrope`: divisors of the frequencies beyond it.
      short_mscale: `longrope`: factor of cosines and sines of texts up to the original
        length. Where it is set, `short_factor` divides the frequencies of all texts,
        as in transformers.
      long_mscale: `longrope`: the same of longer texts; set with `short_mscale`.

    Raises:
      ValueError: If a field has an invalid value, one that `rope_type` needs is
        missing, or one that it does not read is set.
    """

    rope_theta: float = 10000.0
    rope_type: RopeType = "default"
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    clockwise: bool = False
    factor: float | None = None
    alpha: float | None = None
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
    short_mscale: float | None = None
    long_mscale: float | None = None

    def __post_init__(self):
        """Rejects fields that `rope_type` does not read, and missing ones it needs."""
        if self.rope_type not in NEEDED:
            raise ValueError(
                f"rope_type {self.rope_type!r} is not modelled; "
                f"the modelled types are {', '.join(NEEDED)}."
            )
        reads = (*NEEDED[self.rope_type], *OPTIONAL[self.rope_type])
        subject = f"rope_type {self.rope_type!r} reads "
        subject += ", ".join(reads) or "no further field"
        raise_if(subject, wrong_fields(self) + self._inconsistencies())

    def _inconsistencies(self) -> list[str]:
        needed, optional = NEEDED[self.rope_type], OPTIONAL[self.rope_type]
        wrong = []
        for name in STRETCHING:
            value = getattr(self, name)
            if value is None and name in needed:
                wrong.append(f"{name} = None: needed, not set")
            elif value is not None and name not in (*needed, *optional):
                wrong.append(f"{name} = {value!r}: set, but never read")
        if (self.short_mscale is None) != (self.long_mscale is None):
            wrong.append("short_mscale and long_mscale: both or neither")
        for name in ("rope_theta", "partial_rotary_factor", "factor", "alpha"):
            value = getattr(self, name)
            if isinstance(value, int | float) and not value > 0:
                wrong.append(f"{name} = {value!r}: must be above 0")
        if isinstance(part := self.partial_rotary_factor, int | float) and part > 1:
            wrong.append(f"partial_rotary_factor = {part!r}: a head has at most 1")
        return wrong


NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "ntk_alpha": ("alpha",),
    "proportional": (),
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
"""Required fields of each type."""

OPTIONAL: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": (),
    "dynamic": (),
    "ntk_alpha": (),
    "proportional": (),
    "llama3": (),
    "yarn": (
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("attention_factor", "short_mscale", "long_mscale"),
}
"""Optional fields of each type."""

STRETCHING = tuple(
    dict.fromkeys(
        name
        for table in (NEEDED, OPTIONAL)
        for names in table.values()
        for name in names
    )
)
"""Fields that are read by some types only."""
