"""MLP, attention and a second MLP that run beside the experts of a layer."""

from flax import nnx
from jaxtyping import DTypeLike

from bridge.models._attention import Attention
from bridge.models._config import DecoderConfig
from bridge.models._constrain import Constrain
from bridge.models._decoder_parts import make_attention, make_mlp, make_norm
from bridge.models._layer_kinds import LayerKind
from bridge.models._layer_mixer import (
    MixerInputs,
    Stream,
    constrained_input,
    run_attention,
)
from bridge.models._layer_state import LayerState


class DenseBranch(nnx.Module):
    """Dense part of a layer from its first attention on; experts run beside all of it.

    The experts read what the first MLP reads, and their output is added behind the
    second: their communication can overlap with an attention and two MLPs.

    Args:
      config: Config of the decoder.
      kind: Kind of the layer.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      attention: Attention function, with the signature of `dot_product_attention`.
      constrain: Sharding constraint of activations.

    Source: LongCat-Flash, https://arxiv.org/abs/2509.01322, section 2; transformers
      `modeling_longcat_flash.py::LongcatFlashDecoderLayer`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        kind: LayerKind,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        attention: Attention,
        constrain: Constrain,
    ):
        """Initializes both MLPs, attention and its norms."""
        self.first_mlp = make_mlp(config, kind, rngs, param_dtype)
        self.input_layernorm = make_norm(config, param_dtype)
        self.self_attn = make_attention(
            config, kind, rngs, param_dtype, attention, constrain
        )
        self.pre_feedforward_layernorm = make_norm(config, param_dtype)
        self.mlp = make_mlp(config, kind, rngs, param_dtype)
        self.constrain = constrain

    def __call__(
        self,
        x: Stream,
        normed: Stream,
        cache: LayerState | None,
        inputs: MixerInputs,
    ) -> tuple[Stream, LayerState | None]:
        """Adds the outputs of both MLPs and of attention to the residual stream.

        Args:
          x: Residual stream behind the first attention.
          normed: The same normed, which the experts read too.
          cache: Cache of the second attention; None without a cache.
          inputs: What attention reads beside its input.
        """
        x = x + self.constrain(self.first_mlp(normed), "output")
        normed = self.input_layernorm(x)
        own = constrained_input(self.self_attn, normed, self.constrain)
        mixed = run_attention(self.self_attn, own, cache, inputs)
        x = x + self.constrain(mixed.output, "output")
        normed = self.constrain(self.pre_feedforward_layernorm(x), "input")
        return x + self.constrain(self.mlp(normed), "output"), mixed.cache
