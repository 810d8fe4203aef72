"""The names of config fields that transformers knows, as bridge has them.

`PYTHONPATH=tests python tests/helpers/transformers_fields.py` writes
`transformers_fields.json` anew. A name is known if a config class declares it, or the
source of the class, of its model or of what all models share takes it from a config.
What is written there errs on the side of too many names: a field that is known and not
modelled is refused.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import helpers.deepseek_moe  # noqa: F401  (makes it known to transformers)
import helpers.mistral4  # noqa: F401  (makes it known to transformers)
import helpers.mllama  # noqa: F401  (makes it known to transformers)
import helpers.nemotron_nas  # noqa: F401  (makes it known to transformers)
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
)

from bridge.families import FAMILIES

LIBRARY = Path(transformers.__file__).parent
OUT = Path(__file__).parents[2] / "bridge/families/transformers_fields.json"
# What decoders compute with besides their own modules.
CONFIGS = ("configuration_utils", "modeling_rope_utils")
SHARED = (
    *("activations", "cache_utils", "masking_utils", "modeling_attn_mask_utils"),
    *("modeling_flash_attention_utils", "modeling_layers", "modeling_utils"),
    *("pytorch_utils", "loss/loss_utils", "integrations/eager_paged"),
    *("integrations/flash_attention", "integrations/flash_paged"),
    *("integrations/flex_attention", "integrations/moe"),
    *("integrations/sdpa_attention", "integrations/sdpa_paged"),
    *("models/auto/auto_factory", "utils/generic", "utils/output_capturing"),
)
_TAKES = ("getattr", "hasattr", "get", "pop", "setdefault")

Fields = frozenset[str]


def known_fields() -> tuple[Fields, dict[str, Fields]]:
    """Returns the names that all models know, and those that each knows besides."""
    paths = [LIBRARY / f"{name}.py" for name in SHARED]
    common = _declared(PreTrainedConfig).union(
        *(_from_config(path) for path in paths if path.is_file()),
        *(_of_config_module(LIBRARY / f"{name}.py") for name in CONFIGS),
        _listed(LIBRARY / "configuration_utils.py"),
    )
    common = Fields(filter(is_field, common))
    own = {name: _of_model(name) - common for name in sorted(FAMILIES)}
    return common, own


def known_rope_keys() -> Fields:
    """Returns the keys that `rope_parameters` may have in any of the models."""
    folders = {Path(inspect.getfile(CONFIG_MAPPING[name])).parent for name in FAMILIES}
    models = [path for folder in folders for path in folder.glob("modeling_*.py")]
    keys = _strings(_nodes(LIBRARY / "modeling_rope_utils.py"))
    for path in models:
        slices = [n.slice for n in _nodes(path) if isinstance(n, ast.Subscript)]
        keys += _strings(slices) + _asked_of_ropes(path)
    return Fields(filter(str.isidentifier, keys))


def _asked_of_ropes(path: Path) -> list[str]:
    """Keys of `rope_parameters.get("key")`."""
    calls = [node for node in _nodes(path) if isinstance(node, ast.Call)]
    asked = [call for call in calls if _last_name(call.func) in _TAKES]
    owners = [(call, getattr(call.func, "value", None)) for call in asked]
    return [
        name
        for call, owner in owners
        if owner is not None and "rope" in _last_name(owner)
        for name in _strings(call.args)
    ]


def as_json(common: Fields, own: Mapping[str, Fields], rope: Fields) -> str:
    """Returns the text of `bridge/families/transformers_fields.json`."""

    def names(fields: Fields) -> str:
        return " ".join(sorted(fields))

    by_model_type = {name: names(own[name]) for name in sorted(own)}
    parts = {
        "common": names(common),
        "rope_keys": names(rope),
        "by_model_type": by_model_type,
    }
    return json.dumps(parts, indent=1) + "\n"


def _of_model(model_type: str) -> Fields:
    kind = CONFIG_MAPPING[model_type]
    module = Path(inspect.getfile(kind))
    models = sorted(module.parent.glob("modeling_*.py")) or [_borrowed(kind)]
    names = _declared(kind).union(
        _of_config_module(module),
        *(_from_config(path) | _taken(path) for path in models),
    )
    return Fields(filter(is_field, names))


def _borrowed(kind: type[PreTrainedConfig]) -> Path:
    """The modelling code of a config without its own."""
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    return Path(inspect.getfile(model))


def _declared(kind: type) -> Fields:
    aliases: dict[str, str] = kind.attribute_map
    declared = {field.name for field in dataclasses.fields(kind)}
    return Fields(declared | {*aliases, *aliases.values()})


def _of_config_module(path: Path) -> Fields:
    return _from_config(path, "self") | _taken(path)


def _from_config(path: Path, *others: str) -> Fields:
    """Names that are attributes of something whose name has `config` in it."""
    return Fields(
        name
        for node in _nodes(path)
        for name, owner in _attributes(node)
        if "config" in owner or owner in others
    )


def _attributes(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Attribute):
        yield node.attr, _last_name(node.value)
    elif isinstance(node, ast.Call) and _last_name(node.func) in _TAKES[:2]:
        for name in _strings(node.args[1:2]):
            yield name, _last_name(node.args[0])


def _taken(path: Path) -> Fields:
    """Names that are strings: `kwargs.pop("name")`, `"name" in kwargs`."""
    found: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.Call) and _last_name(node.func) in _TAKES:
            found |= set(_strings(node.args))
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            found |= set(_strings([node.left]))
    return Fields(found)


def _listed(path: Path) -> Fields:
    """Names in a tuple of names, which are tried one by one."""
    return Fields(
        name
        for node in _nodes(path)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        if _last_name(node.targets[0]).endswith("_names")
        for name in _strings(node.value.elts)
    )


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


def _strings(nodes: Sequence[ast.AST]) -> list[str]:
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_field(name: str) -> bool:
    """Whether a name may be that of a field, and is no method of the configs."""
    method = callable(getattr(PreTrainedConfig, name, None))
    return name.isidentifier() and not name.startswith("__") and not method


if __name__ == "__main__":
    OUT.write_text(as_json(*known_fields(), known_rope_keys()))
