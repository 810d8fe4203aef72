"""Fields and rules of blocks of attention and an MLP that several layers share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.families._blocks import Rules, linear, norm
from bridge.families._field_transform import FieldTransform
from bridge.models import DecoderConfig, SharedBlocksConfig

HEADS: Mapping[str, str] = {
    "q": "heads head_dim",
    "k": "kv_heads head_dim",
    "v": "kv_heads v_head_dim",
}
"""Dims of the heads of a block, by the first letter of their projection."""

TYPES, TIED = "layers_block_type", "tie_word_embeddings"
HYBRID, LINEAR = "hybrid", "linear_attention"
"""Types of layers with a block and without, as transformers 5 writes them."""


def block_prefix(blocks: SharedBlocksConfig, number: int, name: str) -> str:
    """Prefix of a block in the file: that of the first layer that runs it.

    Args:
      blocks: Blocks of the model.
      number: Index of the block.
      name: Name of the block in a layer.
    """
    return f"model.layers.{blocks.layers[number]}.{name}."


def block_copies(name: str) -> Callable[[DecoderConfig], dict[str, str]]:
    """Returns the prefixes of blocks in the later layers that run them.

    Args:
      name: Name of the block in a layer.
    """

    def copies(config: DecoderConfig) -> dict[str, str]:
        blocks = config.shared_blocks
        assert blocks is not None
        return {
            f"model.layers.{layer}.{name}.": block_prefix(
                blocks, i % blocks.num_blocks, name
            )
            for i, layer in enumerate(blocks.layers)
            if i >= blocks.num_blocks
        }

    return copies


def block_attention(at: str, to: str) -> Rules:
    """Norms and attention of a block, whose input is two streams side by side.

    Args:
      at: Prefix of the block in the file.
      to: Prefix of the block in the model.
    """
    rules = (norm(f"{at}input_layernorm", f"{to}input_layernorm", "two_embeds"),)
    for name, heads in HEADS.items():
        names = f"{at}self_attn.{name}_proj", f"{to}self_attn.{name}_proj"
        rules += linear(*names, f"({heads}) two_embeds -> two_embeds {heads}")
    return (
        *rules,
        *linear(
            f"{at}self_attn.o_proj",
            f"{to}self_attn.o_proj",
            "embed (heads v_head_dim) -> heads v_head_dim embed",
        ),
        norm(f"{at}pre_ff_layernorm", f"{to}pre_feedforward_layernorm"),
    )


def hybrid_layers(
    given: Sequence[Any], without: str
) -> tuple[tuple[int, ...], list[str]]:
    """Returns the layers that run a block, and what is wrong with types of layers.

    Args:
      given: Type of each layer.
      without: What to say of a model in which none does.
    """
    wrong = []
    # transformers takes whatever is not hybrid for a Mamba layer.
    if unknown := sorted(set(map(str, given)) - {HYBRID, LINEAR, "mamba"}):
        wrong.append(f"{TYPES} has {unknown}: known are {[HYBRID, LINEAR, 'mamba']}")
    layers = tuple(i for i, kind in enumerate(given) if kind == HYBRID)
    return layers, wrong if layers else [
        *wrong,
        f"{TYPES} has no {HYBRID!r}: {without}",
    ]


def types_of(config: DecoderConfig) -> list[str]:
    """Returns the type of each layer, as files have it."""
    blocks = config.shared_blocks
    assert blocks is not None
    layers = range(config.num_hidden_layers)
    return [HYBRID if i in blocks.layers else LINEAR for i in layers]


def tied_alone(whatever: str) -> FieldTransform:
    """Reads that the head is tied, without which transformers shares no block.

    Args:
      whatever: What else of the config says that layers share blocks.
    """

    def read(fields: Mapping[str, Any]) -> dict[str, Any]:
        if not fields[TIED]:
            raise ValueError(
                f"{TIED} = {fields[TIED]!r}: transformers ties blocks and head "
                f"together, so that no layers share one then, whatever {whatever} "
                "says; set it to true if they do"
            )
        return {TIED: True}

    def write(config: DecoderConfig) -> dict[str, Any]:
        del config
        return {TIED: True}

    return FieldTransform((TIED,), read, write, {TIED: True})
