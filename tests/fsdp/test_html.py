"""In a notebook a plan is a table with bars."""

from html.parser import HTMLParser

import jax.numpy as jnp
import pytest

import fsdp_jax as fsdp
from fsdp_jax._table import Grid, html_page


class Reader(HTMLParser):
    """Reads cells row by row, and refuses tags that are not closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.rows, self.styles = [], [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
            self.styles.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.styles[-1].append(dict(attrs)["style"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "tr" in self.open:
            self.rows[-1][-1] += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert not reader.open
    return reader


@pytest.fixture(scope="module")
def plan() -> fsdp.Plan:
    def make_weights(key):
        return {"small": jnp.zeros((8, 2)), "large": jnp.zeros((8, 8))}

    return fsdp.fully_shard(make_weights, fsdp.make_mesh(), units=["large"])


def test_a_plan_has_the_same_cells_as_its_text(plan):
    page = read(plan._repr_html_())
    lines = repr(plan).splitlines()
    for cells, line in zip(page.rows, lines, strict=False):
        assert [cell for cell in cells if cell not in line] == []
    assert len(page.rows) == 1 + len(plan.rows)
    for line in lines[len(page.rows) + 1 :]:
        assert line in plan._repr_html_()


def test_bars_are_as_long_as_the_bytes(plan):
    styles = read(plan._repr_html_()).styles[1:]
    names = [row.name for row in plan.rows]
    bars = {name: cells[-1] for name, cells in zip(names, styles, strict=True)}
    assert "100.0%" in bars["large"] and "25.0%" in bars["small"]
    assert not any("gradient" in style for cells in styles for style in cells[:-1])


def test_what_is_text_is_no_markup():
    grid = Grid({"<b>": "left"}, [["a < b & c"]])
    page = read(html_page([grid, "x < y"]))
    assert page.rows == [["<b>"], ["a < b & c"]]


def test_nothing_has_no_bar():
    grid = Grid({"bytes": "right"}, [["0"], ["0"]], [0, 0])
    assert "gradient" not in grid.as_html()
