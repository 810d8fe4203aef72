"""Stacks of a decoder's layers: one `DecoderLayer` with a leading layer dim for each.

Where layers are of several kinds there is a stack for each layer of each block.
"""

from typing import Any

from flax import nnx

from bridge.models._config import DecoderConfig
from bridge.models._decoder_layer import DecoderLayer
from bridge.models._layer_kinds import LayerStack


def make_layers(config: DecoderConfig, rngs: nnx.Rngs, **options: Any) -> Any:
    """Returns the layers of a decoder.

    Args:
      config: Config of the decoder.
      rngs: Source of keys for the initial weights.
      **options: Those of `DecoderLayer`, the same for all layers.

    Returns:
      An entry for each block of `config.layer_blocks`, or the entry itself if there is
      a single block: a stack, or a list of one for each layer of the period.
    """
    stacks = iter(
        [_make_stack(config, rngs, stack, options) for stack in config.layer_stacks]
    )
    return _one_or_list(
        [_one_or_list([next(stacks) for _ in b.kinds]) for b in config.layer_blocks]
    )


def stacks_of_blocks(config: DecoderConfig, layers: Any) -> list[list[DecoderLayer]]:
    """Returns the stacks of each block.

    Args:
      config: Config of the decoder.
      layers: Layers from `make_layers`.
    """
    if isinstance(layers, DecoderLayer):
        return [[layers]]
    if len(config.layer_blocks) == 1:
        return [list(layers)]
    return [[b] if isinstance(b, DecoderLayer) else list(b) for b in layers]


def _make_stack(
    config: DecoderConfig, rngs: nnx.Rngs, stack: LayerStack, options: dict[str, Any]
) -> DecoderLayer:
    @nnx.split_rngs(splits=len(stack.layers))
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> DecoderLayer:
        return DecoderLayer(config, kind=stack.kind, rngs=rngs, **options)

    return make(rngs)


def _one_or_list(modules: list[Any]) -> Any:
    return modules[0] if len(modules) == 1 else nnx.List(modules)
