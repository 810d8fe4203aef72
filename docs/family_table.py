"""The families of models that `bridge` reads and writes, as a Markdown table."""

from __future__ import annotations

import importlib

from bridge.families import FAMILIES
from bridge.families._family import Family
from bridge.megatron import TWINS

_HEAD = (
    "| `model_type` | Models | Class of transformers | Experts | Positions "
    "| Beside attention | cp | Megatron |"
)
_MIXERS = {
    "short_conv": "short convolution",
    "delta_net": "gated delta net",
    "mamba": "Mamba 2",
    "mamba1": "Mamba 1",
}


def table() -> str:
    """A row for each family, by name."""
    rows = [_row(FAMILIES[name]) for name in sorted(FAMILIES)]
    return "\n".join([_HEAD, "|---|---|---|---|---|---|---|---|", *rows])


def _row(family: Family) -> str:
    names = ", ".join(f"`{name}`" for name in (family.model_type, *family.also_named))
    cells = (
        names,
        _models(family),
        f"`{family.architecture}`",
        "yes" if _has_experts(family) else "",
        _positions(family),
        ", ".join(_MIXERS[name] for name in _mixers(family)),
        _over_cp(family),
        "yes" if family.model_type in TWINS else "",
    )
    return f"| {' | '.join(cells)} |"


def _models(family: Family) -> str:
    """What the first line of a family's file says of it."""
    module = importlib.import_module(f"bridge.families.{_file_of(family)}")
    assert module.__doc__ is not None
    return module.__doc__.splitlines()[0].rstrip(".")


def _file_of(family: Family) -> str:
    return family.model_type.removesuffix("_text")


def _over_cp(family: Family) -> str:
    if _has_part(family, "indexer"):
        return "no"
    return "whole rows" if _mixers(family) else "yes"


def _has_experts(family: Family) -> bool:
    return _has_part(family, "moe")


def _mixers(family: Family) -> list[str]:
    """What its layers have beside attention."""
    return [name for name in _MIXERS if _has_part(family, name)]


def _has_part(family: Family, part: str) -> bool:
    targets = [t for name, f in family.fields.items() for t in f.targets(name)]
    read = any(target.startswith(f"{part}.") for target in targets)
    return read or part in family.optional


def _positions(family: Family) -> str:
    constants = family.constants
    if constants.get("rope", True) is not None:
        return "rotary"
    if constants.get("alibi_bias_max") is not None:
        return "ALiBi"
    return "learned" if constants.get("learned_positions", True) else ""
