"""The table of published models on the page that says how to bring one's own."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/pages/how-to/bring-your-model.md"


def table(text: str) -> dict[str, str]:
    """Name of a model -> its row in the table of what was tried."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    cells = {row.split("|")[1].strip(): row for row in rows}
    return {name: row for name, row in cells.items() if name and "---" not in name}
