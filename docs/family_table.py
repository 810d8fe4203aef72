"""The families of models that `bridge` reads and writes, as a Markdown table."""

from __future__ import annotations

import importlib

from bridge.families import FAMILIES
from bridge.families._family import Family
from bridge.megatron import TWINS

_HEAD = (
    "| `model_type` | Models | Class of transformers | Experts | Positions | Megatron |"
)


def table() -> str:
    """A row for each family, by name."""
    rows = [_row(FAMILIES[name]) for name in sorted(FAMILIES)]
    return "\n".join([_HEAD, "|---|---|---|---|---|---|", *rows])


def _row(family: Family) -> str:
    names = ", ".join(f"`{name}`" for name in (family.model_type, *family.also_named))
    cells = (
        names,
        _models(family),
        f"`{family.architecture}`",
        "yes" if _has_experts(family) else "",
        _positions(family),
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


def _has_experts(family: Family) -> bool:
    targets = [t for name, f in family.fields.items() for t in f.targets(name)]
    return any(target.startswith("moe.") for target in targets)


def _positions(family: Family) -> str:
    return "learned" if family.traits.get("rope", True) is None else "rotary"
