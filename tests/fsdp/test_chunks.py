"""Chunks say exactly where an array lies, and cutting it there moves nothing."""

import itertools
import math
import socket
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.errors import facts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import fsdp_jax as fsdp
from fsdp_jax.sharding._chunks import Chunk, chunks, split_chunks, validate_chunks

P = PartitionSpec


def make_mesh(**axes: int) -> Mesh:
    """A mesh of the first devices, as many as the axes take."""
    devices = jax.devices()[: math.prod(axes.values())]
    auto = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), auto, devices=devices)


LINE = make_mesh(x=8)
GRID = make_mesh(x=2, y=4)
CUBE = make_mesh(x=2, y=2, z=2)
TURNED = Mesh(np.array(jax.devices())[::-1].reshape(4, 2), ("x", "y"))

SHARDINGS = {
    "replicated": ((4, 3), NamedSharding(LINE, P())),
    "a scalar": ((), NamedSharding(LINE, P())),
    "dim 0": ((8, 3), NamedSharding(LINE, P("x"))),
    "dim 0, large": ((1024, 512), NamedSharding(LINE, P("x"))),
    "dim 1": ((5, 16), NamedSharding(LINE, P(None, "x"))),
    "one dim of three": ((3, 8, 5), NamedSharding(LINE, P(None, "x"))),
    "sharded and replicated": ((4, 3), NamedSharding(GRID, P("y"))),
    "replicated and sharded": ((4, 3), NamedSharding(GRID, P("x"))),
    "both dims": ((16, 24), NamedSharding(GRID, P("x", "y"))),
    "both dims, crossed": ((12, 6), NamedSharding(GRID, P("y", "x"))),
    "two axes on a dim": ((16, 3), NamedSharding(GRID, P(("x", "y")))),
    "two axes on a dim, inner first": ((16, 3), NamedSharding(GRID, P(("y", "x")))),
    "two dims of three": ((4, 5, 8), NamedSharding(GRID, P("x", None, "y"))),
    "three dims": ((4, 6, 2), NamedSharding(CUBE, P("z", "x", "y"))),
    "two axes, the middle one not": ((12, 3), NamedSharding(CUBE, P(("z", "x")))),
    "devices from the last": ((8, 6), NamedSharding(TURNED, P("x", "y"))),
    "some of the devices": ((6, 3), NamedSharding(make_mesh(x=3), P("x"))),
    "one device": ((5, 2), jax.sharding.SingleDeviceSharding(jax.devices()[5])),
    "an empty dim": ((0, 8), NamedSharding(GRID, P("x", "y"))),
}
every_sharding = pytest.mark.parametrize(
    "shape, sharding", SHARDINGS.values(), ids=SHARDINGS
)


def numbers(shape) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def equal(got, want):
    """The same dtype and the same bytes: nan equals itself, 0.0 is not -0.0."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.tobytes() == want.tobytes()


# chunks


@every_sharding
def test_chunks_are_the_shards_that_jax_holds(shape, sharding):
    whole = numbers(shape)
    array = jax.device_put(whole, sharding)
    found = chunks(array)
    shards = {shard.device: shard for shard in array.addressable_shards}
    assert {chunk.device for chunk in found} == shards.keys()
    assert len(found) == len(shards)
    for chunk in found:
        shard = shards[chunk.device]
        assert chunk.sizes == shard.data.shape
        assert chunk.replica_id == shard.replica_id
        equal(whole[chunk.index], shard.data)


@every_sharding
def test_an_abstract_tree_has_the_chunks_of_its_array(shape, sharding):
    like = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    assert chunks(like) == chunks(jax.device_put(numbers(shape), sharding))


@every_sharding
def test_the_chunks_of_an_array_are_valid(shape, sharding):
    validate_chunks(shape, chunks(jax.ShapeDtypeStruct(shape, bool, sharding=sharding)))


def test_the_order_of_two_axes_on_a_dim_is_that_of_the_parts():
    def offsets(spec):
        like = jax.ShapeDtypeStruct((8,), bool, sharding=NamedSharding(GRID, spec))
        return [chunk.offsets[0] for chunk in chunks(like)]

    assert offsets(P(("x", "y"))) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert offsets(P(("y", "x"))) == [0, 2, 4, 6, 1, 3, 5, 7]


def test_keys_have_the_chunks_of_their_own_shape():
    keys = jax.random.split(jax.random.key(0), 8)
    array = jax.device_put(keys, NamedSharding(GRID, P("y")))
    assert {chunk.sizes for chunk in chunks(array)} == {(2,)}
    for number, pieces in enumerate(split_chunks(array, 1)):
        for _, key in pieces:
            equal(jax.random.key_data(key)[0], jax.random.key_data(keys[number]))


def test_a_plan_says_where_its_parameters_will_lie():
    mesh = fsdp.make_mesh(dp_outer=2)
    plan = fsdp.fully_shard(lambda key: {"w": jnp.ones((8, 12))}, mesh)
    found = chunks(plan.params["w"])
    validate_chunks((8, 12), found)
    assert {chunk.replica_id for chunk in found} == {0, 1}
    assert {math.prod(chunk.sizes) for chunk in found} == {8 * 12 // 4}


def test_chunks_outlive_the_array_that_was_donated():
    array = jax.device_put(numbers((8, 3)), NamedSharding(LINE, P("x")))
    before = chunks(array)
    array.delete()
    assert chunks(array) == before


TWO_PROCESSES = """
    import sys
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    import fsdp_jax as fsdp
    from fsdp_jax.sharding._chunks import chunks, split_chunks, validate_chunks

    rank, address = int(sys.argv[1]), sys.argv[2]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    whole = np.arange(8 * 3).reshape(8, 3)
    sharding = NamedSharding(fsdp.make_mesh(), P("dp_shard"))
    array = jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)
    assert not array.is_fully_addressable
    found = chunks(array)
    validate_chunks(whole.shape, found)
    assert [chunk.device.process_index for chunk in found] == [0, 0, 1, 1]
    if rank == 0:  # alone: a collective would wait for ever
        sections = split_chunks(array, [3, 5])
        assert [len(pieces) for pieces in sections] == [2, 1]
        for pieces, want in zip(sections, np.split(whole, [3])):
            for chunk, data in pieces:
                np.testing.assert_array_equal(data, want[chunk.index])
"""


def test_parts_of_other_processes_are_listed_and_only_own_ones_are_cut():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    code = textwrap.dedent(TWO_PROCESSES)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), address],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [child.communicate(timeout=120)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], "\n".join(errors)


@pytest.mark.parametrize("act", [chunks, lambda thing: split_chunks(thing, 2)])
@pytest.mark.parametrize("thing", [np.ones(8), [1.0], None, jax.random.key])
def test_what_is_no_jax_array_is_a_type_error(act, thing):
    with pytest.raises(
        TypeError, match=facts(type(thing).__name__, "jax.device_put(x, sharding)")
    ):
        act(thing)


def test_within_jit_there_are_no_chunks():
    with pytest.raises(TypeError, match=facts("DynamicJaxprTracer", "jax.jit")):
        jax.jit(lambda x: chunks(x) and x)(jnp.ones(8))


@pytest.mark.parametrize("sharding", [None, NamedSharding(LINE.abstract_mesh, P("x"))])
def test_an_abstract_tree_without_devices_is_an_error(sharding):
    with pytest.raises(ValueError, match=facts("(8,)", "sharding")):
        chunks(jax.ShapeDtypeStruct((8,), bool, sharding=sharding))


def test_an_abstract_tree_that_its_devices_do_not_divide_is_an_error():
    with pytest.raises(ValueError, match=facts("(9,)", 8)):
        chunks(jax.ShapeDtypeStruct((9,), bool, sharding=NamedSharding(LINE, P("x"))))


# validate_chunks


def parts(*boxes: tuple[slice, ...]) -> list[Chunk]:
    """A chunk for each numpy index, one a device."""
    return [
        Chunk(
            device,
            tuple(where.start for where in box),
            tuple(where.stop - where.start for where in box),
            replica_id=0,
        )
        for device, box in zip(jax.devices(), boxes, strict=False)
    ]


@pytest.mark.parametrize(
    "shape, boxes",
    [
        ((8,), [np.s_[0:3,], np.s_[3:3,], np.s_[3:8,]]),  # ragged, one of them empty
        ((8,), [np.s_[0:8,], np.s_[0:8,]]),  # replicas
        ((8,), [np.s_[8:8,], np.s_[0:8,]]),  # empty, at the very end
        ((3, 3), [np.s_[0:1, 0:2], np.s_[0:2, 2:3], np.s_[2:3, 1:3]]
         + [np.s_[1:3, 0:1], np.s_[1:2, 1:2]]),  # a pinwheel: no grid
        ((), [()]),
        ((), [(), ()]),
        ((0, 4), []),
    ],
)  # fmt: skip
def test_parts_that_make_the_array_are_valid(shape, boxes):
    validate_chunks(shape, parts(*boxes))


@pytest.mark.parametrize(
    "shape, boxes, problems",
    [
        ((8,), [np.s_[0:4,], np.s_[4:9,]], ["cpu:1 [4:9] is out of bounds"]),
        ((8,), [np.s_[-1:4,], np.s_[4:8,]], ["cpu:0 [-1:4] is out of bounds"]),
        ((8,), [np.s_[0:8,], np.s_[9:9,]], ["cpu:1 [9:9] is out of bounds"]),
        ((8,), [np.s_[0:8,], np.s_[5:4,]], ["cpu:1 [5:4] is out of bounds"]),
        ((8,), [np.s_[0:8,], np.s_[0:8, 0:1]], ["cpu:1 [0:8, 0:1] is out of bounds"]),
        ((8,), [np.s_[0:5,], np.s_[4:8,]], ["cpu:0 [0:5] overlaps cpu:1 [4:8]"]),
        ((8,), [np.s_[0:8,], np.s_[2:4,]], ["cpu:0 [0:8] overlaps cpu:1 [2:4]"]),
        # Upstream lets this pass: somebody has the first index, somebody the last.
        ((8,), [np.s_[0:2,], np.s_[6:8,]], ["no device holds [2:6]"]),
        (
            (4, 4),
            [np.s_[0:2, 0:2], np.s_[2:4, 2:4]],
            ["no device holds [2:4, 0:2]", "no device holds [0:2, 2:4]"],
        ),
        (
            (4, 4),
            [np.s_[0:2, 0:2]],
            ["no device holds [2:4, 0:4]", "no device holds [0:2, 2:4]"],
        ),
        # An overlap as large as the gap: the volumes alone would add up.
        (
            (8,),
            [np.s_[0:4,], np.s_[2:6,]],
            ["cpu:0 [0:4] overlaps cpu:1 [2:6]", "no device holds [6:8]"],
        ),
        ((3, 3), [np.s_[1:2, 1:2], np.s_[0:1, 0:3], np.s_[1:3, 0:1], np.s_[1:3, 2:3]],
         ["no device holds [2:3, 1:2]"]),
        ((), [], ["no device holds []"]),
        ((2,), [], ["no device holds [0:2]"]),
    ],
)  # fmt: skip
def test_every_fault_is_named(shape, boxes, problems):
    with pytest.raises(ValueError) as error:
        validate_chunks(shape, parts(*boxes))
    first, *lines = str(error.value).splitlines()
    assert first == (
        f"The chunks do not make an array of shape {shape}, in "
        f"{len(problems)} place(s):"
    )
    assert sorted(line.strip() for line in lines[:-1]) == sorted(problems)
    assert "fsdp_jax.sharding.chunks(array)" in lines[-1]


def test_a_missing_device_is_a_gap_of_its_part():
    like = jax.ShapeDtypeStruct((16, 24), bool, sharding=NamedSharding(GRID, P(*"xy")))
    found = chunks(like)
    for left_out in found:
        rest = [chunk for chunk in found if chunk != left_out]
        (row, column) = left_out.index
        gap = f"[{row.start}:{row.stop}, {column.start}:{column.stop}]"
        with pytest.raises(ValueError) as error:
            validate_chunks((16, 24), rest)
        assert f"no device holds {gap}" in str(error.value)


small = st.integers(0, 3)
boxes = st.tuples(small, small, small, small).map(
    lambda b: np.s_[b[0] : b[0] + b[1], b[2] : b[2] + b[3]]
)


@settings(deadline=None)
@given(st.lists(boxes, max_size=5))
def test_a_verdict_is_that_of_counting_every_element(drawn):
    shape, count = (4, 4), np.zeros((4, 4), int)
    for box in {str(box): box for box in drawn}.values():
        count[box] += 1
    inside = all(b.stop <= 4 for box in drawn for b in box)
    try:
        validate_chunks(shape, parts(*drawn))
        valid, message = True, ""
    except ValueError as error:
        valid, message = False, str(error)
    assert valid == (inside and (count == 1).all())
    assert ("no device holds" in message) == (count == 0).any()


# gather


DTYPES = ["float32", "float64", "int32", "int64", "bfloat16", "float16", "bool", "int8"]
DTYPES += ["complex64", "float8_e4m3fn", "uint32"]


@every_sharding
def test_gather_is_exact_on_every_device(shape, sharding):
    array = jax.device_put(numbers(shape), sharding)
    whole = fsdp.unshard(array)
    assert {shard.device for shard in whole.addressable_shards} == sharding.device_set
    for shard in whole.addressable_shards:
        equal(shard.data, numbers(shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [P("x", "y"), P(None, ("y", "x")), P("y"), P()])
def test_gather_and_split_keep_every_bit_of_every_dtype(fusion_emitters, dtype, spec):
    with jax.enable_x64(True):
        whole = of_any_bits((8, 16), dtype)
        array = jax.device_put(whole, NamedSharding(GRID, spec))
        assert array.dtype == dtype
        for shard in fsdp.unshard(array).addressable_shards:
            equal(shard.data, whole)
        check_split(array, whole, [3, 5], 0)


def of_any_bits(shape, dtype) -> np.ndarray:
    """Random bits: infinities, nans, -0.0, and integers that no float32 can hold."""
    if dtype == "bool":
        return np.random.default_rng(0).random(shape) < 0.5
    dtype = np.dtype(dtype)
    bits = np.random.default_rng(0).bytes(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(bits, dtype).reshape(shape)


# split_chunks


def sections_of(whole: np.ndarray, sizes, dim: int) -> list[np.ndarray]:
    return np.split(whole, np.cumsum(sizes)[:-1], axis=dim)


def check_split(array: jax.Array, whole: np.ndarray, sizes, dim: int):
    """Each section is complete, exact, and where it was before."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    sections = split_chunks(array, sizes, dim)
    wanted = sections_of(whole, sizes, dim)
    for pieces, want in zip(sections, wanted, strict=True):
        validate_chunks(want.shape, [chunk for chunk, _ in pieces])
        for chunk, data in pieces:
            assert data.devices() == {chunk.device}
            equal(data, want[chunk.index])
    held = sum(data.size for pieces in sections for _, data in pieces)
    assert held == sum(shard.size for shard in shards.values())


def cuts_of(size: int) -> list[list[int]]:
    """All of it; one by one at the start; through the middle; with empty ones."""
    third = size // 3
    return [
        [size],
        [min(1, size), max(size - 1, 0)],
        [third, size - third],
        [0, third, 0, size - third, 0],
    ]


@every_sharding
def test_a_split_is_that_of_the_whole(shape, sharding):
    whole = numbers(shape)
    array = jax.device_put(whole, sharding)
    for dim, size in enumerate(shape):
        for sizes in cuts_of(size):
            check_split(array, whole, sizes, dim)
        check_split(array, whole, [size], dim - len(shape))


@pytest.mark.parametrize(
    "shape, spec, size_or_sections, dim, sizes",
    [
        ((16, 3), P("x"), 4, 0, [4, 4, 4, 4]),
        ((16, 3), P("x"), 5, 0, [5, 5, 5, 1]),  # through shards; the last is smaller
        ((16, 3), P("x"), 99, 0, [16]),
        ((8, 13), P("x"), [3, 5, 5], 1, [3, 5, 5]),  # along a dim that is not split
        ((8, 13), P("x"), (3, 5, 5), -1, [3, 5, 5]),
        ((8, 13), P(), 5, 1, [5, 5, 3]),
        ((8, 3), P("x"), np.int64(2), 0, [2, 2, 2, 2]),
        ((8, 3), P("x"), np.array([0, 1, 0, 7]), 0, [0, 1, 0, 7]),
        ((0, 8), P(None, "x"), 5, 0, [0]),  # as torch.split: one, and it is empty
        ((0, 8), P(None, "x"), 5, 1, [5, 3]),
        ((0, 8), P(None, "x"), [], 0, []),
    ],
)
def test_sections_are_those_of_torch(shape, spec, size_or_sections, dim, sizes):
    whole = numbers(shape)
    array = jax.device_put(whole, NamedSharding(LINE, spec))
    sections = split_chunks(array, size_or_sections, dim)
    wanted = sections_of(whole, sizes, dim) if sizes else []
    for pieces, want in zip(sections, wanted, strict=True):
        validate_chunks(want.shape, [chunk for chunk, _ in pieces])
        for chunk, data in pieces:
            equal(data, want[chunk.index])


def test_a_device_without_a_part_of_a_section_is_not_in_it():
    array = jax.device_put(numbers((8, 3)), NamedSharding(LINE, P("x")))
    first, none, second = split_chunks(array, [3, 0, 5])
    assert [chunk.device.id for chunk, _ in first] == [0, 1, 2]
    assert none == []
    assert [chunk.device.id for chunk, _ in second] == [3, 4, 5, 6, 7]
    assert second[0][0].offsets == (0, 0)  # from the start of the section


def test_a_shard_within_one_section_is_not_copied():
    array = jax.device_put(numbers((16, 3)), NamedSharding(LINE, P("x")))
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    (_, cut), *_, (chunk, whole) = itertools.chain(*split_chunks(array, [1, 15]))
    assert whole.unsafe_buffer_pointer() == shards[chunk.device].unsafe_buffer_pointer()
    assert cut.shape == (1, 3)


def test_a_split_moves_nothing():
    array = jax.device_put(numbers((16, 3)), NamedSharding(LINE, P("x")))
    with jax.transfer_guard("disallow_explicit"):
        with pytest.raises(Exception, match=facts("16,3")):  # the guard is on
            fsdp.unshard(array)
        sections = split_chunks(array, [5, 11])
    assert [len(pieces) for pieces in sections] == [3, 6]


@pytest.mark.parametrize(
    "sections, dim, message",
    [
        ([3, 4], 0, ["(8, 3)", "[3, 4]", "7", "8"]),
        ([9, -1], 0, ["[9, -1]", "8"]),
        ([], 0, ["[]", "0", "8"]),
        (0, 0, ["size 0", "1"]),
        (-2, 0, ["size -2", "1"]),
        (2, 2, ["dim 2", "(8, 3)", "2 dims"]),
        (2, -3, ["dim -3", "2 dims"]),
    ],
)
def test_sections_that_do_not_fit_are_an_error(sections, dim, message):
    array = jax.device_put(numbers((8, 3)), NamedSharding(LINE, P("x")))
    with pytest.raises(ValueError, match=facts(*message)):
        split_chunks(array, sections, dim)


def test_a_scalar_has_no_dim_to_split():
    with pytest.raises(ValueError, match=facts("()", "0")):
        split_chunks(jnp.ones(()), 1)


@pytest.mark.parametrize(
    "sections, kind",
    [(2.0, "float"), ([4.0, 4.0], "float"), (None, "NoneType"), ("8", "str")],
)
def test_sizes_that_are_no_integers_are_a_type_error(sections, kind):
    with pytest.raises(TypeError, match=facts(repr(kind))):
        split_chunks(jnp.ones(8), sections)


def test_an_abstract_tree_has_nothing_to_split():
    like: Any = jax.ShapeDtypeStruct((8,), bool, sharding=NamedSharding(LINE, P("x")))
    with pytest.raises(
        TypeError,
        match=facts(
            "split_chunks", "jax.ShapeDtypeStruct", "fsdp_jax.sharding.chunks(abstract)"
        ),
    ):
        split_chunks(like, 2)


# All of it, on any mesh


@st.composite
def shardings(draw):
    """Any mesh of up to 8 devices, its axes on any dims in any order, and a shape."""
    sizes = draw(
        st.sampled_from([(8,), (5,), (2, 4), (4, 2), (2, 3), (2, 2, 2), (1, 4)])
    )
    devices = draw(st.permutations(jax.devices()))[: math.prod(sizes)]
    names = "xyz"[: len(sizes)]
    mesh = Mesh(np.array(devices).reshape(sizes), tuple(names))
    axes: list[tuple[str, ...]] = [()] * draw(st.integers(0, 3))
    for name in draw(st.permutations(names)):
        dim = draw(st.integers(-1, len(axes) - 1))  # -1: replicated
        if dim >= 0:
            axes[dim] += (name,)
    shape = tuple(
        draw(st.integers(0, 3)) * math.prod(mesh.shape[name] for name in dim)
        for dim in axes
    )
    return shape, NamedSharding(mesh, P(*(dim or None for dim in axes)))


@settings(deadline=None, max_examples=40)
@given(shardings(), st.data())
def test_on_any_mesh_chunks_splits_and_gather_agree_with_the_whole(drawn, data):
    shape, sharding = drawn
    whole = numbers(shape)
    array = jax.device_put(whole, sharding)
    found = chunks(array)
    validate_chunks(shape, found)
    shards = {shard.device: shard for shard in array.addressable_shards}
    for chunk in found:
        assert chunk.replica_id == shards[chunk.device].replica_id
        equal(shards[chunk.device].data, whole[chunk.index])
    equal(fsdp.unshard(array), whole)
    if shape:
        dim = data.draw(st.integers(0, len(shape) - 1))
        ends = data.draw(st.lists(st.integers(0, shape[dim]), max_size=3).map(sorted))
        check_split(array, whole, np.diff([0, *ends, shape[dim]]), dim)
