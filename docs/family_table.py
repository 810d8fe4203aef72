"""The families that `bridge` reads and writes, and releases, as Markdown tables."""

from __future__ import annotations

import importlib

from bridge.families import FAMILIES
from bridge.families._family import Family
from bridge.families.releases import RELEASES
from bridge.megatron import TWINS

_HEAD = (
    "| `model_type` | Models | Class | Experts | Positions "
    "| Beside attention | cp | Megatron |"
)
_RELEASE_FILES = dict.fromkeys(("RefinedWeb", "RefinedWebModel"), "refined_web")
_WHOLE_ROWS = (
    *("indexer", "block_indexer", "compressed_attention", "dynamic_mask_size"),
)
"""Parts of attention that read rows of which no device has all."""

_MIXERS = {
    "short_conv": "short convolution",
    "delta_net": "gated delta net",
    "lightning": "lightning attention",
    "mamba": "Mamba 2",
    "mamba1": "Mamba 1",
    "rg_lru": "RG-LRU",
}


def table() -> str:
    """A row for each family, by name."""
    rows = [_row(FAMILIES[name]) for name in sorted(FAMILIES)]
    return "\n".join([_HEAD, "|---|---|---|---|---|---|---|---|", *rows])


def releases() -> str:
    """A row for each release with code of its own, by name."""
    rows = [_release(RELEASES[name]) for name in sorted(RELEASES)]
    return "\n".join(["| `model_type` | Models | Becomes |", "|---|---|---|", *rows])


def _release(table: Family) -> str:
    file = table.model_type.replace("-", "_")
    models = _first_line(f"releases.{_RELEASE_FILES.get(file, file)}")
    return f"| `{table.model_type}` | {models} | `{table.written_as}` |"


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
    return _first_line(_file_of(family))


def _first_line(file: str) -> str:
    module = importlib.import_module(f"bridge.families.{file}")
    assert module.__doc__ is not None
    return module.__doc__.splitlines()[0].rstrip(".")


def _file_of(family: Family) -> str:
    return family.model_type.removesuffix("_text").replace("-", "_")


def _over_cp(family: Family) -> str:
    if any(_has_part(family, part) for part in _WHOLE_ROWS):
        return "no"
    return "whole rows" if _mixers(family) else "yes"


def _has_experts(family: Family) -> bool:
    return _has_part(family, "moe")


def _mixers(family: Family) -> list[str]:
    """What its layers have beside attention."""
    return [name for name in _MIXERS if _has_part(family, name)]


def _has_part(family: Family, part: str) -> bool:
    targets = [t for name, f in family.fields.items() for t in f.targets(name)]
    read = any(target == part or target.startswith(f"{part}.") for target in targets)
    return read or part in family.optional


def _positions(family: Family) -> str:
    constants = family.constants
    if constants.get("rope", True) is not None:
        return "rotary"
    if constants.get("alibi_bias_max") is not None:
        return "ALiBi"
    if constants.get("sinusoidal_positions"):
        return "sines"
    return "learned" if constants.get("learned_positions", True) else ""
