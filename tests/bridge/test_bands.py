"""However a tensor is cut, laid out and cast, both ways are what the pattern says."""

import collections
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.layouts import layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from bridge import Mapping, Rule
from bridge._box import Box, Range, as_index, complete, shape_of, span, whole
from bridge.rules._layout import Layout
from bridge.streaming import _bands
from bridge.streaming._bands import Section, elements_to_read, reads
from bridge.streaming._cooperate import fill_together
from bridge.streaming._fill import start_piece, start_tensor
from bridge.streaming._shards import each, empty_shards, planes, to_array
from bridge.streaming._workers import workers


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The least that a source must be: no file, and no `read_into`."""

    tensors: dict[str, np.ndarray]
    name: str = "arrays"

    def keys(self):
        return tuple(self.tensors)

    def shape(self, key):
        return self.tensors[key].shape

    def dtype(self, key):
        return self.tensors[key].dtype

    def read(self, key, slices=()):
        return self.tensors[key][slices]


@pytest.fixture(autouse=True)
def small_bands(monkeypatch):
    """Bands of a few numbers, so that small tensors have many."""
    monkeypatch.setattr(_bands, "BAND_BYTES", 40)
    monkeypatch.setattr(_bands, "_BAND_ROWS", 3)


def numbers(shape, dtype=np.float32):
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


def pattern(layout):
    sides = [
        " ".join(f"({' '.join(dim)})" for dim in side)
        for side in (layout.source, layout.destination)
    ]
    return " -> ".join(sides)


def grid(draw, shape) -> list[Box]:
    """Boxes that tile a shape, cut at random."""
    ranges = []
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        ranges.append([Range(*ends) for ends in itertools.pairwise(cuts)])
    return list(itertools.product(*ranges)) if all(ranges) else [whole(shape)]


def stacked(boxes, dtype, together):
    """Memory for boxes: those of one shape in one array, or each in its own."""
    shapes = {box: (shape_of(box), None if together else box) for box in boxes}
    groups = collections.defaultdict(list)
    for box in sorted(boxes):
        groups[shapes[box]].append(box)
    return {
        tuple(group): np.empty((len(group), *shape), dtype)
        for (shape, _), group in groups.items()
    }


@settings(deadline=None, max_examples=200)
@given(layouts(5), st.integers(1, 12))
def test_bands_are_the_source_from_its_first_byte_to_its_last(drawn, max_elements):
    layout, sizes = drawn
    array = numbers(layout.source_shape(sizes))
    moved = layout.apply(array, sizes)
    parts = [moved[as_index(box)] for box in layout.bands(sizes, max_elements)]
    ranges = [
        span(layout.source_box(box, sizes), array.shape)
        for box in layout.bands(sizes, max_elements)
    ]
    for part, found in zip(parts, ranges, strict=True):
        assert sorted(part.reshape(-1)) == list(range(*found))
    assert [n for found in ranges for n in range(*found)] == list(range(array.size))


def test_bands_are_no_larger_than_asked_where_the_layout_lets_them():
    query = Layout.parse("(heads head_dim) embed -> embed heads head_dim")
    sizes = {"heads": 4, "head_dim": 6, "embed": 5}
    shapes = [shape_of(box) for box in query.bands(sizes, 70)]
    assert shapes == [(5, 2, 6), (5, 2, 6)]  # 70 would be 2.3 heads
    assert [math.prod(shape_of(b)) for b in query.bands(sizes, 7)] == [5] * 24
    across = Layout.parse("a b -> (b a)")  # b is no range of the destination
    assert across.bands({"a": 4, "b": 6}, 5) == [(Range(0, 24),)]


@settings(deadline=None, max_examples=200)
@given(layouts(5), st.data())
def test_parts_of_a_box_are_views_of_its_factors_and_tile_it(drawn, data):
    layout, sizes = drawn
    shape = layout.destination_shape(sizes)
    box = tuple(
        Range(*sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2))))
        for n in shape
    )
    if 0 in shape_of(box):
        return
    hits = np.zeros(shape, int)
    for part in layout.split(box, sizes):
        hits[as_index(part)] += 1
        _, move = layout.cut(part, sizes)
        assert move.joined == shape_of(part)
    inside = np.zeros(shape, int)
    inside[as_index(box)] = 1
    np.testing.assert_array_equal(hits, inside)


@settings(deadline=None, max_examples=150)
@given(layouts(5), st.data())
@pytest.mark.parametrize("cast", [np.float32, jnp.bfloat16])
def test_any_shards_are_filled_from_any_source_and_make_it_again(cast, drawn, data):
    layout, sizes = drawn
    rule = Rule("w", "leaf", pattern(layout))
    (piece,) = Mapping((rule,), sizes).pieces
    tensor = numbers(piece.source_shape) % 97  # exact in both dtypes
    want = layout.apply(tensor, sizes).astype(cast)
    boxes = grid(data.draw, want.shape)
    shards = stacked(boxes, cast, data.draw(st.booleans()))
    again = np.empty_like(tensor)
    with workers() as pool:
        for future in start_piece(pool, Arrays({"w": tensor}), piece, shards):
            future.result()
        for future in start_tensor(pool, piece, planes(piece, shards), again):
            future.result()
    for box, shard in each(shards):
        np.testing.assert_array_equal(shard, want[as_index(box)])
    np.testing.assert_array_equal(again, tensor)


@settings(deadline=None, max_examples=100)
@given(layouts(5), st.data())
def test_shards_of_rows_read_nothing_twice(drawn, data):
    layout, sizes = drawn
    (piece,) = Mapping((Rule("w", "leaf", pattern(layout)),), sizes).pieces
    boxes = grid(data.draw, piece.destination_shape)
    section = Section.of(piece)
    hits = np.zeros(piece.source_shape, int)
    for band in section.bands(itemsize=4):
        for read in reads(section, (tuple(boxes),), band):
            hits[as_index(read.box)] += 1
    rows = hits.reshape(len(hits), -1) if hits.ndim else hits.reshape(1, 1)
    if len(layout.source) < 2 or len(layout.source[0]) < 2:  # else within one row
        assert rows.max(initial=1) == 1


def test_shards_in_one_array_that_take_alike_are_filled_by_one_copy():
    (piece,) = Mapping((Rule("w", "w", "a b -> b a"),), {"a": 6, "b": 8}).pieces
    section = Section.of(piece)
    shards = tuple((Range(2 * i, 2 * i + 2), Range(0, 6)) for i in range(4))
    for band in section.bands(itemsize=4):
        ((together,), *apart) = (
            [read.parts for read in reads(section, stacks, band)]
            for stacks in ((shards,), tuple((shard,) for shard in shards))
        )
        assert len(together) == 1 and together[0].where[0] == Range(0, 4)
        assert [len(parts) for read in apart for parts in read] == [4]


MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
SPECS = [(), ("x",), (None, ("y", "x")), ("x", "y"), (None, None, None, "x")]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_devices_put_a_stack_together_as_the_host_does(spec, dtype):
    """Sections of 18 rows, which 8 devices do not divide; two tensors a layer."""
    layout = "(heads head_dim) embed -> embed heads head_dim"
    rule = Rule(("{layer}.k", "{layer}.v"), "kv", layout, dim=1)
    sizes = {"layer": 2, "heads": 3, "head_dim": 6, "embed": 8}
    pieces = list(Mapping((rule,), sizes).pieces)
    tensors = {p.source: numbers((18, 8)) + 100 * i for i, p in enumerate(pieces)}
    sharding = NamedSharding(MESH, PartitionSpec(*spec))
    leaf = jax.ShapeDtypeStruct((2, 8, 6, 6), dtype, sharding=sharding)
    shards, ticked = empty_shards(leaf), []
    with workers() as pool:
        source = Arrays(tensors)
        together = fill_together(pool, source, pieces, leaf, ticked.append)
        for piece in pieces:
            for future in start_piece(pool, source, piece, shards):
                future.result()
    assert together.sharding == sharding and ticked == pieces
    np.testing.assert_array_equal(together, to_array(leaf, shards))


def test_columns_are_counted_as_the_whole_rows_that_they_cost():
    (piece,) = Mapping((Rule("w", "w", "a b -> b a"),), {"a": 6, "b": 8}).pieces
    assert elements_to_read(piece, (whole((8, 6)),)) == 48
    half_the_rows = (Range(0, 8), Range(0, 3))
    assert elements_to_read(piece, (half_the_rows,)) == 24
    half_the_columns = (Range(0, 4), Range(0, 6))
    assert elements_to_read(piece, (half_the_columns,)) > 24


def test_on_cpu_devices_take_the_host_s_memory_as_it_is():
    leaf = jax.ShapeDtypeStruct(
        (3, 8), jnp.bfloat16, sharding=NamedSharding(MESH, PartitionSpec(None, "x"))
    )
    shards = empty_shards(leaf)
    for _, shard in each(shards):
        shard[...] = 1
    array = to_array(leaf, shards)
    addresses = {box: shard.ctypes.data for box, shard in each(shards)}
    for shard in array.addressable_shards:
        box = complete(shard.index, leaf.shape)
        assert shard.data.unsafe_buffer_pointer() == addresses[box]


def test_an_array_that_is_donated_leaves_its_replicas_alone():
    leaf = jax.ShapeDtypeStruct(
        (4,), np.float32, sharding=NamedSharding(MESH, PartitionSpec())
    )
    shards = empty_shards(leaf)
    ((_, memory),) = each(shards)  # eight devices, one array
    memory[...] = 1
    array = to_array(leaf, shards)
    other = jax.device_put(array.addressable_data(3), jax.devices()[3])
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(array))
    assert array.is_deleted()
    np.testing.assert_array_equal(other, np.ones(4))
    np.testing.assert_array_equal(memory, np.ones(4))
