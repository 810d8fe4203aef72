"""Which module imports which, read from the source, as a picture of layers.

A module stands one row above the highest that it imports, so every import points down.

    python docs/import_graph.py  # draws the rooms on the architecture page anew
"""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "pages" / "explanation" / "architecture.md"
ROOMS = re.compile(r"(?<=<!-- rooms: )(\w+)( -->\n```text\n)[^`]*(?=```)")

BOX_HEIGHT, ROW, GAP, LETTER, WIDTH = 26, 58, 10, 6.6, 1040
INIT = "__init__"

Graph = Mapping[str, set[str]]  # part of a package -> the parts that it imports


@dataclasses.dataclass(frozen=True)
class Box:
    """Where a part of a package is drawn, in pixels from the upper left."""

    x: float
    y: float
    width: float


def import_graph(root: Path, package: str) -> dict[str, set[str]]:
    """The parts of a package, and the other parts of it that each imports.

    A part is a module directly below the package, or a whole subpackage; leading
    underscores are left out. Imports inside functions and under `TYPE_CHECKING` count.
    """
    files = sorted((root / package).rglob("*.py"))
    parts = {
        file: _part(file.relative_to(root).with_suffix("").parts) for file in files
    }
    known = set(parts.values())
    graph: dict[str, set[str]] = {part: set() for part in known}
    for file, part in parts.items():
        names = (name.split(".") for name in _imports(file))
        found = {_part(name, known) for name in names if name[0] == package}
        graph[part] |= found - {part}
    return graph


def summaries(root: Path, package: str) -> dict[str, str]:
    """The first line of each part's docstring."""
    texts = {}
    for path in sorted((root / package).iterdir()):
        file = path / "__init__.py" if path.is_dir() else path
        if file.suffix == ".py" and file.exists() and file.parent.name != "__pycache__":
            doc = ast.get_docstring(ast.parse(file.read_text())) or ""
            name = INIT if path.stem == INIT else path.stem.lstrip("_")
            texts[name] = doc.partition("\n")[0]
    return texts


def rows(graph: Graph) -> list[list[str]]:
    """The parts by row, the lowest first.

    Raises:
      graphlib.CycleError: If parts import each other in a ring.
    """
    level: dict[str, int] = {}
    for part in graphlib.TopologicalSorter(graph).static_order():
        below = [level[name] for name in graph.get(part, ())]
        level[part] = max(below, default=-1) + 1
    count = max(level.values(), default=-1) + 1
    return [sorted(n for n in level if level[n] == row) for row in range(count)]


def outline(graph: Graph, package: str) -> str:
    """The graph as text: a line for each part, the highest row first.

    An arrow leads to the parts that no other import of the same part imports in turn.
    """
    names = {part: package if part == INIT else part for part in graph}
    width = max(map(len, names.values()))
    lines = []
    for number, row in reversed(list(enumerate(rows(graph)))):
        for part in row:
            head = "" if part != row[0] else str(number)
            below = ", ".join(names[name] for name in sorted(_direct(graph, part)))
            arrow = f" -> {below}" if below else ""
            lines.append(f"{head:>2}  {names[part]:{width}}{arrow}".rstrip())
    return "\n".join(lines)


def with_outlines(page: str, root: Path = ROOT) -> str:
    """A page with the outline of each package after its `<!-- rooms: PACKAGE -->`."""

    def made(found: re.Match[str]) -> str:
        graph = import_graph(root, found[1])
        return f"{found[1]}{found[2]}{outline(graph, found[1])}\n"

    return ROOMS.sub(made, page)


def draw(graph: Graph, texts: Mapping[str, str]) -> str:
    """The graph as SVG: boxes in rows, a line for each import, text as a tooltip."""
    boxes, height = _place(rows(graph))
    lines = [
        _line(boxes[part], boxes[name])
        for part in sorted(graph)
        for name in sorted(graph[part])
    ]
    drawn = [_box(name, boxes[name], texts.get(name, "")) for name in sorted(boxes)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            ' role="img" font-family="sans-serif" font-size="12" width="100%">',
            *lines,
            *drawn,
            "</svg>",
        ]
    )


def _direct(graph: Graph, part: str) -> set[str]:
    """The imports of a part, without those that its other imports imply."""
    return graph[part] - {n for name in graph[part] for n in _below(graph, name)}


def _below(graph: Graph, part: str) -> set[str]:
    """All parts that a part imports, directly or through others."""
    return graph[part].union(*(_below(graph, name) for name in graph[part]))


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _part(name: Sequence[str], known: Container[str] | None = None) -> str:
    """Of `package._plan.Plan` that is `plan`; of a name of the package, `__init__`."""
    part = name[1].lstrip("_") if len(name) > 1 else "init__"
    return part if part != "init__" and (known is None or part in known) else INIT


def _place(levels: list[list[str]]) -> tuple[dict[str, Box], int]:
    """Boxes centred in rows, of which a crowded one is broken into several lines."""
    lines = [line for names in reversed(levels) for line in _broken(names)]
    boxes: dict[str, Box] = {}
    for index, names in enumerate(lines):
        x = (WIDTH - sum(map(_width, names)) - GAP * (len(names) - 1)) / 2
        for name in names:
            boxes[name] = Box(x, index * ROW + 4, _width(name))
            x += _width(name) + GAP
    return boxes, len(lines) * ROW


def _broken(names: list[str]) -> list[list[str]]:
    lines: list[list[str]] = [[]]
    for name in names:
        used = sum(_width(other) + GAP for other in lines[-1])
        if used + _width(name) > WIDTH - 8:
            lines.append([])
        lines[-1].append(name)
    return lines


def _width(name: str) -> float:
    return LETTER * len(name) + 16


def _line(above: Box, below: Box) -> str:
    x1, y1 = above.x + above.width / 2, above.y + BOX_HEIGHT
    x2, y2 = below.x + below.width / 2, below.y
    middle = (y1 + y2) / 2
    return (
        f'<path d="M{x1:.0f} {y1} C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f}'
        f' {x2:.0f} {y2}" fill="none" stroke="#4477aa" stroke-opacity="0.22"/>'
    )


def _box(name: str, box: Box, text: str) -> str:
    middle = box.x + box.width / 2
    return (
        f'<g><title>{escape(text)}</title><rect x="{box.x:.0f}" y="{box.y}" rx="4"'
        f' width="{box.width:.0f}" height="{BOX_HEIGHT}" fill="#e8eef5"'
        f' stroke="#4477aa"/><text x="{middle:.0f}" y="{box.y + 17}" fill="#222"'
        f' text-anchor="middle">{escape(name)}</text></g>'
    )


if __name__ == "__main__":
    PAGE.write_text(with_outlines(PAGE.read_text()))
