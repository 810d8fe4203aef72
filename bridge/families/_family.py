"""A model family as a table: its fields, its rules, and what it refuses."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from bridge.families._dim_sizes import Sizes, capture, sizes_of
from bridge.families._field_transform import FieldTransform
from bridge.models import DecoderConfig, LayerKind, LayerStack
from bridge.rules._mapping import Mapping as WeightMapping
from bridge.rules._mapping import is_ignored
from bridge.rules._rules import Rule

REQUIRED = object()
"""In place of a default: a config file without the field is refused."""


STALE = (
    *("**rotary_emb.**", "**rotary_pos_emb.**"),
    *("**.masked_bias", "**.position_ids"),
)
"""Tensors of any family's old files that follow from the config."""

FURTHER = ("mtp.**", "model.mtp.**", "model.mtp_layers.**")
"""Tensors of layers that predict further tokens, in files of any family."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of `config.json` that is a field of `DecoderConfig`.

    Args:
      default: What transformers takes when the file does not say; `REQUIRED` if there
        is nothing to take.
      ours: Dotted name in `DecoderConfig`, or several that are all this; None means
        the same name.
      aliases: Other names that files give the field; never written.
    """

    default: Any = REQUIRED
    ours: str | tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()

    def targets(self, name: str) -> tuple[str, ...]:
        """Names in `DecoderConfig` of what the file calls `name`."""
        if isinstance(self.ours, tuple):
            return self.ours
        return (self.ours or name,)


@dataclasses.dataclass(frozen=True)
class Layers:
    """How the tensors of a layer are the leaves of a `DecoderLayer`.

    Args:
      prefix: What their names begin with, `{layer}` for the number.
      rules: The rules of one layer of a kind, without that prefix.
      left_out: Numbers of layers of the file that the model does not have.
    """

    prefix: str
    rules: Callable[[DecoderConfig, LayerKind], tuple[Rule, ...]]
    left_out: Callable[[DecoderConfig], Collection[int]] = lambda _: ()

    def ignored(self, config: DecoderConfig) -> tuple[str, ...]:
        """Returns patterns of the tensors of layers that are left out.

        Args:
          config: Config of the decoder.
        """
        return tuple(
            f"{self.prefix.format(layer=number)}**" for number in self.left_out(config)
        )

    def sizes(self, config: DecoderConfig) -> Sizes:
        """Returns the numbers in the file of each stack's layers, if some are left out.

        Args:
          config: Config of the decoder.
        """
        if not (without := frozenset(self.left_out(config))):
            return {}
        others = (number for number in itertools.count() if number not in without)
        numbers = list(itertools.islice(others, config.num_hidden_layers))
        return {
            capture(number): [numbers[layer] for layer in stack.layers]
            for number, stack in enumerate(config.layer_stacks)
        }

    def stacked(self, config: DecoderConfig) -> tuple[Rule, ...]:
        """Returns the rules of all layers, each in its stack."""
        return tuple(
            self._of_stack(rule, number, stack)
            for number, stack in enumerate(config.layer_stacks)
            for rule in self.rules(config, stack.kind)
        )

    def _of_stack(self, rule: Rule, number: int, stack: LayerStack) -> Rule:
        prefix = self.prefix.format(layer="{" + capture(number) + "}")
        return dataclasses.replace(
            rule,
            source=tuple(prefix + name for name in rule.sources),
            destination=tuple(f"{stack.path}.{name}" for name in rule.destinations),
        )


@dataclasses.dataclass(frozen=True)
class KeyMapping:
    """One of the ways in which a family's checkpoints name their tensors.

    Args:
      outer: Rules of what belongs to no layer.
      layers: Those of the layers.
    """

    outer: Callable[[DecoderConfig], tuple[Rule, ...]]
    layers: Layers

    def rules(self, config: DecoderConfig) -> tuple[Rule, ...]:
        """Returns all rules that hold for a config."""
        return self.outer(config) + self.layers.stacked(config)


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of models, as a table.

    Args:
      model_type: The `model_type` of its config files.
      architecture: The class of transformers that its checkpoints are of.
      also_architectures: Other classes that its config files name.
      also_named: Other values of `model_type` whose files are of this family in
        everything else; an export says `model_type`.
      fields: Fields of `config.json` that are fields of `DecoderConfig`.
      key_mappings: How its checkpoints name their tensors; the first is what is
        written.
      module_names: Index of the key mapping that has the names of transformers'
        modules, by which adapters are written.
      transforms: Fields that are not one to one with those of `DecoderConfig`.
      constants: Values of all models of the family, by dotted names in
        `DecoderConfig`.
      fixed: Fields of which one value is modelled; any other is refused.
      passthrough: Fields that change no logit, with transformers' default; kept.
      aliases: Other names that files give fields of `passthrough`; never written.
      left_out: Fields that announce tensors which an import leaves out, with what an
        export says instead.
      inert: Fields of published files that change nothing where they have this value,
        whatever code the file names; left out.
      unread: Fields that the code of a release has and never computes with, whatever
        their value; left out.
      written_as: `model_type` of the family that computes the same, if this is the
        table of a release with code of its own; what is imported is of that family.
      optional: Parts of our config (`moe`, `rope`, ...) that only some of its models
        have, where transforms read them.
      ignore: Tensors that checkpoints may hold and nobody reads; `{name}` stands for a
        number, `**` for anything.
      copies: What names of tensors begin with that files may hold beside those that are
        read, with equal values, and what the names of these begin with.
      fan_in_fan_out: Whether linear weights are stored as `[in, out]`; PEFT's name.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, Field]
    key_mappings: tuple[KeyMapping, ...]
    module_names: int = 0
    transforms: tuple[FieldTransform, ...] = ()
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    passthrough: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inert: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    written_as: str | None = None
    optional: tuple[str, ...] = ()
    ignore: Callable[[DecoderConfig], tuple[str, ...]] = lambda _: ()
    copies: Callable[[DecoderConfig], Mapping[str, str]] = lambda _: {}
    also_architectures: tuple[str, ...] = ()
    also_named: tuple[str, ...] = ()
    fan_in_fan_out: bool = False

    def mapping(self, config: DecoderConfig) -> WeightMapping:
        """Returns the rules that hold for a config, with its sizes."""
        return self.mappings(config)[0]

    def adapter_mapping(self, config: DecoderConfig) -> WeightMapping:
        """Returns the rules by the names of modules, which adapters have.

        Args:
          config: Config of the decoder.
        """
        return self.mappings(config)[self.module_names]

    def mappings(self, config: DecoderConfig) -> tuple[WeightMapping, ...]:
        """Returns one mapping for each key_mapping."""
        sizes = sizes_of(config)
        copies = (f"{prefix}**" for prefix in self.copies(config))
        ignore = (*self.ignore(config), *copies, *STALE, *FURTHER)
        return tuple(
            WeightMapping(
                key_mapping.rules(config),
                sizes | key_mapping.layers.sizes(config),
                ignore + key_mapping.layers.ignored(config),
            )
            for key_mapping in self.key_mappings
        )

    def mapping_for(
        self,
        config: DecoderConfig,
        keys: tuple[str, ...],
        shape: Callable[[str], tuple[int, ...]] | None = None,
    ) -> WeightMapping:
        """Returns the mapping whose tensors are the most like those at hand.

        By names, and among equal names by shapes; whether they are really all there is
        `Mapping.check`'s matter.

        Args:
          config: The model.
          keys: Names of the checkpoint's tensors.
          shape: Function that returns the shape of a tensor; None to compare names.
        """
        held = set(keys)

        def unlike(mapping: WeightMapping) -> tuple[int, ...]:
            expected = mapping.by_source()
            others = [
                key
                for key in held.intersection(expected)
                if shape is not None and shape(key) != expected[key][0].source_shape
            ]
            # What the file has weighs more: adapters have a part of the names. The
            # family's own come first, and are those of a file without any known one.
            extra = held - expected.keys()
            unknown = sum(not is_ignored(key, mapping.ignore) for key in extra)
            missing = len(expected.keys() - held)
            is_known = unknown < len(held)
            return unknown, *((missing, len(others)) if is_known else ())

        return min(self.mappings(config), key=unlike)
