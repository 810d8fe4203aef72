"""Compressor: entries that each stand for the tokens of a window."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._config import DecoderConfig
from bridge.models._entry_windows import EntryWindows
from bridge.models._layer_state import CompressorInputs
from bridge.models._linear import Linear
from bridge.models._norm import Norm
from bridge.models._rope import rotate_last

Entries = Float[Array, "batch entries head_dim"]
Table = Float[Array, "#batch entries half_rope_dim"]


class Compressor(nnx.Module):
    """Makes an entry of each full window of tokens: their mean, weighted by dim.

    Where windows overlap, a token has two values: one in the entry of its own window,
    and one in the next. Tokens behind the last full window have no entry yet.

    Args:
      config: Config of the decoder, with `compressed_attention`.
      head_dim: Width of an entry.
      rate: Number of tokens of a window.
      overlaps: Whether an entry is also of the window before its own.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_deepseek_v4.py::DeepseekV4CSACompressor`,
      `DeepseekV4HCACompressor`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        head_dim: int,
        rate: int,
        *,
        overlaps: bool,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ):
        """Initializes both projections, zero biases of positions, and the norm."""
        std, width = config.initializer_range, (1 + overlaps) * head_dim

        def linear() -> Linear:
            into, out = (config.hidden_size,), (width,)
            return Linear(into, out, std=std, rngs=rngs, param_dtype=param_dtype)

        self.kv_proj, self.gate_proj = linear(), linear()
        self.position_bias = nnx.Param(jnp.zeros((rate, width), param_dtype))
        self.norm = Norm(
            (head_dim,), config.norm, config.norm_eps, param_dtype=param_dtype
        )
        self.rate, self.overlaps = rate, overlaps

    def project(self, x: Float[Array, "batch seq embed"]) -> CompressorInputs:
        """Returns what the tokens are projected to.

        Args:
          x: Normed hidden states.
        """
        return CompressorInputs(self.kv_proj(x), self.gate_proj(x))

    def entries(
        self,
        inputs: CompressorInputs,
        cos: Table,
        sin: Table,
        windows: EntryWindows | None = None,
    ) -> Entries:
        """Returns the entry of each full window, turned by the position of its start.

        Args:
          inputs: Projections of the tokens.
          cos: Cosines of the angles at the start of each window.
          sin: Sines of the angles.
          windows: Windows of the texts of packed rows; None for rows of one text.
        """
        values, gates = (self._in_windows(each, windows) for each in inputs)
        gates = gates + jnp.expand_dims(self.position_bias[...], (0, 1))
        if self.overlaps:
            values = _with_window_before(values, windows, 0)
            gates = _with_window_before(gates, windows, -jnp.inf)
        wide = gates.astype(jnp.promote_types(gates.dtype, jnp.float32))
        weights = jax.nn.softmax(wide, axis=2).astype(values.dtype)
        normed = self.norm(jnp.sum(values * weights, axis=2))
        return rotate_last(normed[:, :, None], cos, sin)[:, :, 0]

    def _in_windows(
        self, x: Float[Array, "batch tokens width"], windows: EntryWindows | None
    ) -> Float[Array, "batch entries rate width"]:
        if windows is not None:
            return windows.gather(x)
        batch, tokens, width = x.shape
        full = tokens // self.rate
        return x[:, : full * self.rate].reshape(batch, full, self.rate, width)


def _with_window_before(
    x: Float[Array, "batch entries rate width"],
    windows: EntryWindows | None,
    absent: float,
) -> Float[Array, "batch entries both half"]:
    """Returns the first half of the window before, and the second of each window."""
    before, own = jnp.split(x, 2, axis=-1)
    first = jnp.full_like(before[:, :1], absent)
    before = jnp.concatenate([first, before[:, :-1]], axis=1)
    if windows is not None:
        follows = windows.follows[..., None, None]
        before = jnp.where(follows, before, jnp.asarray(absent, before.dtype))
    return jnp.concatenate([before, own], axis=2)
