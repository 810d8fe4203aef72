"""Code blocks, links and commands of the README and the documentation's pages."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "pages"

# ```python
# ...
# ```
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
PARSED = re.compile(r"<!-- parsed: (.+) -->\s*\Z")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
      page: Path of the page in the repository.
      language: What stands behind the fence.
      text: What is in it.
      parsed: Why it is parsed only, not run; empty if it is run.
    """

    page: str
    language: str
    text: str
    parsed: str


def pages() -> dict[str, str]:
    """The README, and every page of the documentation, by path in the repository."""
    # The home page first: its commands make what those of other pages read.
    home = PAGES / "index.md"
    others = [page for page in sorted(PAGES.rglob("*.md")) if page != home]
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", home, *others]
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


def blocks(page: str, text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = []
    for match in FENCE.finditer(text):
        before = PARSED.search(text[: match.start()])
        found.append(Block(page, match[1], match[2], before[1] if before else ""))
    return found


def all_blocks(language: str) -> list[Block]:
    """The blocks in a language, of every page."""
    every = [block for page, text in pages().items() for block in blocks(page, text)]
    return [block for block in every if block.language == language]


def commands(*, run: bool = False) -> list[tuple[str, str]]:
    """Page and command, for each line of each shell block; or of those to be run."""
    return [
        (block.page, command)
        for block in all_blocks("sh")
        if not (run and block.parsed)
        for line in block.text.splitlines()
        if (command := line.partition(" #")[0].strip())
    ]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings."""
    prose = FENCE.sub("", text)
    titles = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in titles}


def links(text: str) -> list[str]:
    """The targets of a page's links and pictures, but for those to other sites."""
    prose = FENCE.sub("", text)
    found = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in found if not target.startswith("http")]
