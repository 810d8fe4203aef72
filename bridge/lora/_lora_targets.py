"""Selection of the weights that an adapter has factors for, by PEFT module names."""

from collections.abc import Collection

from bridge.hf._config import find_family
from bridge.lora._lora_rules import adaptable, adapted_weights
from bridge.models import DecoderConfig

ALL_LINEAR = "all-linear"
"""PEFT's name for all linear modules except the head."""


def lora_targets(config: DecoderConfig, modules: Collection[str]) -> dict[str, int]:
    """Returns the weights of the given modules, with their numbers of input dims.

    Args:
      config: Config of the base model.
      modules: Last components of module names, such as `q_proj`; or only `ALL_LINEAR`
        for all linear modules of the layers, without head and embedding.

    Returns:
      Number of input dims by path of the weight; they precede its output dims.

    Raises:
      ValueError: If a name matches no module, or a module whose weight is split, or
        concatenated with others, in the tree. All are listed.

    Examples:
      >>> bridge.lora_targets(config, ["q_proj", "down_proj"])
      {'layers.self_attn.q_proj.kernel': 1, 'layers.mlp.down_proj.kernel': 1}
    """
    base = find_family(config.model_type).adapter_mapping(config)
    transposed = fan_in_fan_out(config)
    known = adaptable(base, transposed=transposed)
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
            fit = {module for weight in known for module in weight.modules}
            unfit = {name.rpartition(".")[2] for name in names.keys() - fit}
            linear = {name.rpartition(".")[2] for name in fit} - unfit
            raise ValueError(
                f"The model has no modules {', '.join(missing)}; those that may have "
                f"factors are {', '.join(sorted(linear))}."
            )
    weights = adapted_weights(base, chosen, transposed=transposed)
    return {weight.leaf: weight.num_in for weight in weights}


def fan_in_fan_out(config: DecoderConfig) -> bool:
    """Returns whether checkpoints of the family store weights as `[in, out]`."""
    return find_family(config.model_type).fan_in_fan_out
