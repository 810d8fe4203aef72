"""Which weights of a model an adapter may have factors for, by the names of PEFT."""

from collections.abc import Collection

from bridge.hf._config import find_family
from bridge.lora._lora_rules import adaptable, adapted_weights
from bridge.models import DecoderConfig

ALL_LINEAR = "all-linear"
"""PEFT's word for every linear module but the head."""


def lora_targets(config: DecoderConfig, modules: Collection[str]) -> dict[str, int]:
    """The weights of a tree that modules are, and how many of their dims are inputs.

    Args:
      config: The base model.
      modules: Last components of module names, such as `q_proj`, or `ALL_LINEAR` alone
        for those of all layers; not the head and the embedding.

    Returns:
      By path of the weight, its dims of inputs; they come first.

    Raises:
      ValueError: If a name is of no module, or of one whose weight is cut, or joined
        with others, in the tree; all offenders in one message.
    """
    base = find_family(config.model_type).mapping(config)
    known = adaptable(base, transposed=stores_in_out(config))
    if list(modules) == [ALL_LINEAR]:
        chosen = [name for weight in known if weight.stacked for name in weight.modules]
    else:
        names = dict.fromkeys(
            piece.source.removesuffix(".weight")
            for pieces in base.by_destination().values()
            for piece in pieces
        )
        chosen = [name for name in names if name.rpartition(".")[2] in modules]
        found = {name.rpartition(".")[2] for name in chosen}
        if missing := [module for module in modules if module not in found]:
            has = sorted({name.rpartition(".")[2] for name in names})
            raise ValueError(
                f"The model has no modules {', '.join(missing)}; it has "
                f"{', '.join(has)}."
            )
    weights = adapted_weights(base, chosen, transposed=stores_in_out(config))
    return {weight.leaf: weight.num_in for weight in weights}


def stores_in_out(config: DecoderConfig) -> bool:
    """Whether the family stores its weights `[in, out]`: PEFT's `fan_in_fan_out`."""
    return config.model_type == "gpt2"
