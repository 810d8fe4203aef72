"""Optimizer state in narrow floats with scales, as Megatron's precision-aware one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import optax
from jaxtyping import Array, DTypeLike, Float

from fsdp_jax.optim._quantized_state import (
    StateForm,
    normalized,
    scaled,
    with_quantized_state,
)

DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_WIDE = 2.0**64  # a dtype with larger numbers has the range of float32


def precision_aware(
    tx: optax.GradientTransformation,
    dtypes: Mapping[str, DTypeLike],
    *,
    unsigned: tuple[str, ...] = ("nu",),
    block: int = 256,
    min_elements: int = 1,
) -> optax.GradientTransformation:
    """Stores fields of an optimizer's state in narrower floats; the update is float32.

    Each block is scaled so that its largest magnitude is the largest of the dtype,
    so that the dtype's range is spent on that of the block; of bfloat16, which has the
    range of float32, it is 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import fsdp_jax as fsdp
      >>> dtypes = {"mu": jnp.float8_e4m3fn, "nu": jnp.float16}
      >>> tx = fsdp.optim.precision_aware(optax.adamw(3e-4), dtypes)
      >>> state = tx.init({"w": jnp.ones((4, 8))})
      >>> state.codes[0].mu["w"].dtype, state.codes[0].nu["w"].dtype
      (dtype(float8_e4m3fn), dtype('float16'))

    Args:
      tx: Optax transformation whose state has arrays in the shapes of parameters.
      dtypes: Dtype of each field of its state to store so, by the field's name, such as
        `mu` and `nu` of `ScaleByAdamState`.
      unsigned: Fields that are never negative, such as `nu`. Updates are divided by
        their roots, so that none of their elements is rounded to zero: each that is
        positive stays at least the dtype's least number.
      block: Number of elements of the last dim that share a scale; a shorter dim is one
        block.
      min_elements: Number of elements below which an array stays in float32; scalars
        always do.

    Returns:
      A transformation in place of `tx`, with a `QuantizedState`.

    Raises:
      ValueError: If `dtypes` is empty or has another dtype, or `block` or
        `min_elements` is less than 1; from its `init`, if no array of the state is
        quantized.

    Source: Megatron-LM `optimizer_config.py::exp_avg_dtype`, `exp_avg_sq_dtype`;
      TransformerEngine `fused_adam.py::FusedAdam`, which has one scale a tensor and
      lets second moments underflow.
    """
    names = {field: jnp.dtype(dtype).name for field, dtype in dtypes.items()}
    unknown = sorted(set(names.values()) - set(DTYPES))
    if not names or unknown or block < 1 or min_elements < 1:
        raise ValueError(
            f"precision_aware({names}, {block=}, {min_elements=}): a dtype of "
            f"{', '.join(DTYPES)} for at least one field, and numbers of at least 1."
        )

    def codec(fields: str) -> _NarrowFloats | None:
        for field in fields.split("."):
            if field in names:
                return _NarrowFloats(names[field], field in unsigned, block)
        return None

    asked = f"precision_aware({names}, min_elements={min_elements})"
    return with_quantized_state(tx, StateForm(codec, min_elements, asked))


@dataclasses.dataclass(frozen=True)
class _NarrowFloats:
    """Floats of one dtype, with a scale for each block; see `precision_aware`."""

    dtype: str
    is_unsigned: bool
    block: int

    def encode(
        self, x: Float[Array, "*shape"]
    ) -> tuple[Float[Array, "*shape"], Float[Array, ...]]:
        """Returns the narrow floats, and the largest magnitude of each block."""
        info = jnp.finfo(self.dtype)
        unit, scales = normalized(x, self.block)
        narrow = unit * self._largest
        if self.is_unsigned:
            # bfloat16's least number is none of float32 where it has no subnormal ones.
            least = max(float(info.smallest_subnormal), float(jnp.finfo("f4").tiny))
            narrow = jnp.where(unit > 0, jnp.maximum(narrow, least), narrow)
        return narrow.astype(self.dtype), scales

    def decode(
        self, codes: Float[Array, "*shape"], scales: Float[Array, ...]
    ) -> Float[Array, "*shape"]:
        """Returns the values of narrow floats."""
        return scaled(codes.astype(jnp.float32) / self._largest, scales, self.block)

    @property
    def _largest(self) -> Float[Array, ""]:
        """The code of a block's largest magnitude."""
        # XLA divides by a constant as a product with its inverse: that of bfloat16's
        # largest number is subnormal, and zero where those are flushed.
        largest = float(jnp.finfo(self.dtype).max)
        return jnp.float32(1.0 if largest > _WIDE else largest)
