"""In a notebook a plan, an audit and a sweep are tables with bars."""

import types
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax._report import Grid, html_page


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
    assert len(page.rows) == 1 + len(plan.param_plans)
    for line in lines[len(page.rows) + 1 :]:
        assert line in plan._repr_html_()


def test_bars_are_as_long_as_the_bytes(plan):
    styles = read(plan._repr_html_()).styles[1:]
    names = [param.name for param in plan.param_plans]
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


# What an audit finds


TX = optax.sgd(0.1)


def loss(weights, batch):
    return jnp.mean((batch @ weights["large"] @ weights["small"]) ** 2)


def lowered(plan, loss):
    step = fsdp.make_train_step(plan, loss, TX)
    rows = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    return step.lower(fsdp.abstract_state(plan, TX), rows)


def matrices(key):
    return {"small": jnp.zeros((8, 8)), "large": jnp.zeros((8, 8))}


@pytest.fixture(scope="module")
def square() -> fsdp.Plan:
    return fsdp.fully_shard(matrices, fsdp.make_mesh())


def test_an_audit_says_what_is_communicated(square):
    found = fsdp.audit_step(square, lowered(square, loss))
    rows = {(row.op, row.unit): row for row in found.rows}
    for op in ("all-gather", "reduce-scatter"):
        row = rows[op, "(root)"]
        assert row.axes == ("dp_shard",) and row.dtype == "f32"
        # Once each: 8 x 8 elements of 4 bytes, twice.
        assert (row.arrays, row.bytes) == (2, 2 * 8 * 8 * 4)


def test_an_audit_has_the_same_cells_as_its_text(square):
    found = fsdp.audit_step(square, lowered(square, loss))
    page, text = read(found._repr_html_()), repr(found)
    headline, _, *lines = text.splitlines()
    assert headline in found._repr_html_()
    assert len(page.rows) == len(lines) == 1 + len(found.rows)
    for cells, line in zip(page.rows, lines, strict=True):
        assert [cell for cell in cells if cell not in line] == []
    bars = [styles[-1] for styles in page.styles[1:]]
    assert sum("gradient(to left" in bar and "100.0%" in bar for bar in bars) == 2


def test_what_an_audit_finds_is_a_table_of_sentences(square):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    config = fsdp.FSDPConfig(mp_policy=policy)
    narrow = fsdp.fully_shard(matrices, square.mesh, config=config)
    with pytest.raises(fsdp.audit.AuditError) as error:
        fsdp.audit_step(narrow, lowered(square, loss))
    page = read(error.value._repr_html_())
    head, *rows = page.rows
    assert head == ["of", "the plan says", "the program", "likely fix"]
    assert len(rows) == len(error.value.differences) >= 1
    for cells, line in zip(rows, error.value.differences, strict=True):
        assert all(cell in line for cell in cells)
    assert all("white-space:normal" in style for style in page.styles[1])


# A sweep


def estimate(seconds: float, size: int, tokens: int | None = 1000, remat=None):
    """What a sweep looks at, without a compiler: the numbers of an estimate."""
    config = types.SimpleNamespace(remat_policy=remat)
    return types.SimpleNamespace(
        plan=types.SimpleNamespace(config=config),
        timeline=types.SimpleNamespace(seconds=seconds),
        compiled_bytes=size,
        fits=size < 100,
        exposed=0.25,
        mfu=0.5,
        tokens_per_second=tokens and tokens / seconds,
        num_gpus=8,
    )


def test_a_sweep_puts_what_fits_first_and_then_the_fastest():
    tried = {
        "slow": estimate(2.0, 10),
        "large": estimate(0.5, 200),
        "fast": estimate(1.0, 20),
    }
    sweep = fsdp.planner.Sweep(tried)
    assert list(sweep.estimates) == ["fast", "slow", "large"]
    assert sweep.recommended == "fast"
    page = read(sweep._repr_html_())
    assert [cells[0] for cells in page.rows[1:]] == list(sweep.estimates)
    for cells, line in zip(page.rows, repr(sweep).splitlines(), strict=False):
        assert [cell for cell in cells if cell not in line] == []
    bars = {
        row[0]: style[-1] for row, style in zip(page.rows, page.styles, strict=True)
    }
    assert "50.0%" in bars["fast"] and "25.0%" in bars["slow"]
    assert "recommended: fast" in sweep._repr_html_()


def test_a_sweep_of_which_nothing_fits_recommends_nothing():
    sweep = fsdp.planner.Sweep(
        {"a": estimate(2.0, 200), "b": estimate(1.0, 200, tokens=None)}
    )
    assert sweep.recommended is None
    assert repr(sweep).splitlines()[-1].startswith("recommended: none of these fits")
    assert "DOES NOT FIT" in sweep._repr_html_() and "?" in sweep._repr_html_()
    assert "nothing_saveable" in repr(sweep).splitlines()[-1]
    nothing = estimate(3.0, 150, remat=jax.checkpoint_policies.nothing_saveable)
    sweep = fsdp.planner.Sweep({**sweep.estimates, "c": nothing})
    assert "nothing_saveable" not in repr(sweep).splitlines()[-1]
    with pytest.raises(ValueError, match=facts("Sweep", "0")):
        fsdp.planner.Sweep({})
