"""Laws and gold values of Megatron's buffers: who lies where, and who owns it.

Gold values are Megatron-LM's own, worked out by its code for the same shapes.
"""

import dataclasses
import itertools
import math
from collections import Counter

import pytest
from helpers.errors import facts
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge._box import Range
from bridge.megatron.buffers import (
    Bucket,
    BucketId,
    Buffer,
    BufferKey,
    ParamSpec,
    bucket_end_divisor,
    default_layout,
    distributed_optimizer_layout,
    full_layout,
    group_params,
    owned_pieces,
    packed_layout,
    pad_bucket_end,
    pad_param_start,
    pad_to_divisor,
    partition_buckets,
    resolve_bucket_size,
    shard_bucket,
    swiglu_shard_index,
)

BF16, F32, U8 = "bfloat16", "float32", "uint8"


def specs(*shapes, **tags):
    """Parameters 0, 1, ... in the order of the model."""
    return [ParamSpec(str(i), shape, **tags) for i, shape in enumerate(shapes)]


def spans(layout):
    return {p.param.name: (p.start, p.stop, p.bucket) for p in layout.placements}


def ends(layout):
    return [(bucket.start, bucket.stop) for bucket in layout.buckets]


def unpadded(layout):
    return [bucket.num_unpadded for bucket in layout.buckets]


def starts(layout):
    return [p.start for p in layout.placements]


def members(layout, bucket):
    return [p.param.name for p in layout.placements if p.bucket == bucket]


@st.composite
def models(draw):
    """Any parameters at all, of few sizes so that some are alike."""
    sizes = st.one_of(st.sampled_from([1, 63, 64, 65, 128]), st.integers(1, 700))
    shapes = draw(st.lists(st.lists(sizes, min_size=1, max_size=2), max_size=12))
    params = specs(*map(tuple, shapes))
    shared = draw(st.none() | st.integers(0, len(params)))
    return [
        dataclasses.replace(param, shared_embedding=i == shared)
        for i, param in enumerate(params)
    ]


bucket_sizes = st.none() | st.integers(1, 3_000)
dp_sizes = st.integers(1, 9)


# Padding


@pytest.mark.parametrize("value, divisor, padded", [(128, 64, 128), (65, 64, 128)])
def test_a_size_is_padded_up_to_a_multiple(value, divisor, padded):
    assert pad_to_divisor(value, divisor) == padded


def test_nothing_is_padded_to_nothing():
    assert pad_to_divisor(0, 64) == 0


def test_padding_is_exact_where_floats_are_not():
    assert pad_to_divisor(2**60 + 1, 64) == 2**60 + 64


@pytest.mark.parametrize("start, padded", [(0, 0), (1, 64), (63, 64), (64, 64)])
def test_a_parameter_starts_at_a_multiple_of_64(start, padded):
    assert pad_param_start(start) == padded
    assert pad_param_start(start + 64) == padded + 64


@pytest.mark.parametrize(
    "dp_size, high_busbw, divisor",
    [(1, False, 128), (3, False, 384), (4, False, 128), (256, False, 256)]
    + [(4, True, 65_536), (3, True, 196_608)],
)
def test_a_bucket_ends_where_it_splits_evenly(dp_size, high_busbw, divisor):
    assert bucket_end_divisor(dp_size, high_busbw) == divisor
    assert pad_bucket_end(1, dp_size, high_busbw) == divisor


def test_an_even_bucket_gets_no_padding():
    assert pad_bucket_end(bucket_end_divisor(2), 2) == 128


# Grouping


def test_parameters_of_one_dtype_share_a_buffer():
    params = specs((100, 100), (50, 50))
    ((key, group),) = group_params(params, grad_reduce_in_fp32=True).items()
    assert key == BufferKey(BF16, F32)
    assert group.params == tuple(params) and group.indices == (0, 1)


def test_gradients_have_their_parameters_dtype_unless_asked_for_float32():
    ((key, _),) = group_params(specs((100,))).items()
    assert key.grad_dtype == BF16


def test_experts_have_a_buffer_of_their_own():
    dense, expert = ParamSpec("d", (100,)), ParamSpec("e", (100,), is_expert=True)
    groups = group_params([dense, expert], grad_reduce_in_fp32=True)
    assert groups[BufferKey(BF16, F32)].params == (dense,)
    assert groups[BufferKey(BF16, F32, is_expert=True)].params == (expert,)
    assert len(groups) == 2


def test_each_buffer_counts_its_parameters_from_zero():
    a, b = specs((100,), (200,))
    groups = group_params([a, ParamSpec("e", (100,), is_expert=True), b])
    assert [group.indices for group in groups.values()] == [(0, 1), (0,)]


def test_dtypes_do_not_share_a_buffer():
    params = [ParamSpec("a", (100,)), ParamSpec("b", (100,), dtype=F32)]
    groups = group_params(params, grad_reduce_in_fp32=True)
    assert list(groups) == [BufferKey(BF16, F32), BufferKey(F32, F32)]
    assert [group.indices for group in groups.values()] == [(0,), (0,)]


def test_quantized_parameters_lie_apart_but_are_counted_with_the_plain_ones():
    kinds = ["plain", "fp8", "plain", "nvfp4", "fp8"]
    params = [ParamSpec(str(i), (4, 4), storage=s) for i, s in enumerate(kinds)]
    groups = group_params(params)
    assert groups[BufferKey(BF16, BF16)].indices == (0, 2)
    assert groups[BufferKey(U8, BF16)].indices == (1, 3, 4)


# The default layout


def test_the_last_parameter_comes_first():
    layout = default_layout(specs((100, 100), (50, 50)))
    assert spans(layout) == {"1": (0, 2_500, 0), "0": (2_500, 12_500, 0)}
    assert ends(layout) == [(0, 12_500)] and unpadded(layout) == [12_500]


def test_a_bucket_closes_when_it_is_full():
    layout = default_layout(specs(*[(100, 100)] * 3), bucket_size=15_000)
    assert unpadded(layout) == [20_000, 10_000]
    assert ends(layout) == [(0, 20_000), (20_000, 30_000)]


def test_the_default_layout_has_no_padding():
    layout = default_layout(specs((97,), (103,)))
    assert ends(layout) == [(0, 200)] and unpadded(layout) == [200]


def test_one_parameter_is_one_bucket():
    layout = default_layout(specs((256,)))
    assert spans(layout) == {"0": (0, 256, 0)} and ends(layout) == [(0, 256)]


def test_no_parameters_are_no_buckets():
    assert ends(default_layout([])) == ends(distributed_optimizer_layout([], 4)) == []


# The distributed optimizer's layout


def test_each_parameter_starts_aligned_and_keeps_its_size():
    layout = distributed_optimizer_layout(specs((97,), (103,)), dp_size=2)
    assert spans(layout) == {"1": (0, 103, 0), "0": (128, 225, 0)}


@pytest.mark.parametrize(
    "dp_size, high_busbw, stop",
    [(4, False, 2_048), (3, False, 2_304), (2, True, 65_536)],
)
def test_each_bucket_ends_aligned(dp_size, high_busbw, stop):
    params = specs((1_000,), (1_000,))
    layout = distributed_optimizer_layout(params, dp_size, high_busbw=high_busbw)
    assert ends(layout) == [(0, stop)] and unpadded(layout) == [2_024]


@pytest.mark.parametrize("shared", [0, 1, 2, 3])
@pytest.mark.parametrize("bucket_size", [None, 8_000])
def test_a_shared_embedding_has_a_bucket_to_itself(shared, bucket_size):
    params = specs(*[(5_000,)] * 4)
    params[shared] = dataclasses.replace(params[shared], shared_embedding=True)
    layout = distributed_optimizer_layout(params, 2, bucket_size)
    assert members(layout, spans(layout)[str(shared)][2]) == [str(shared)]
    assert all(members(layout, bucket) for bucket in range(len(layout.buckets)))


@pytest.mark.parametrize("shared", [0, 1])
def test_a_shared_embedding_leaves_no_empty_bucket(shared):
    params = specs((1_000,), (1_000,))
    params[shared] = dataclasses.replace(params[shared], shared_embedding=True)
    layout = distributed_optimizer_layout(params, 2)
    assert ends(layout) == [(0, 1_024), (1_024, 2_048)]


def test_a_bucket_closed_for_a_shared_embedding_counts_its_last_gap():
    # 1,000 elements end at 1,000, and the embedding would have started at 1,024:
    # Megatron writes the latter into checkpoints.
    params = specs((1_000,), (1_000,))
    params[0] = dataclasses.replace(params[0], shared_embedding=True)
    assert unpadded(distributed_optimizer_layout(params, 2)) == [1_024, 1_000]


def test_a_bucket_is_full_with_its_gaps():
    layout = distributed_optimizer_layout(specs(*[(5_000,)] * 3), 2, bucket_size=8_000)
    assert unpadded(layout) == [10_056, 5_000]
    # Without the gap of 56 elements the first bucket would take the third one too.
    layout = distributed_optimizer_layout(specs(*[(5_000,)] * 3), 2, bucket_size=10_056)
    assert unpadded(layout) == [10_056, 5_000]


def test_padding_is_never_counted_as_elements():
    (bucket,) = distributed_optimizer_layout(specs((1_000,)), dp_size=8).buckets
    assert bucket == Bucket(0, 1_024, 1_000)


def test_aligned_parameters_lie_as_in_the_default_layout():
    params = specs((640,), (1_280,), (960,))
    layout, plain = distributed_optimizer_layout(params, 1), default_layout(params)
    assert spans(layout) == spans(plain) and unpadded(layout) == unpadded(plain)


def linears(*, bias, shared):
    """Ten linear layers of 95 x 95; the last weight may be a shared embedding."""
    params = []
    for layer in range(10):
        tied = shared and layer == 9
        weight = ParamSpec(f"{layer}.weight", (95, 95), shared_embedding=tied)
        params += [weight, *[ParamSpec(f"{layer}.bias", (95,))] * bias]
    return params


REPLICATED = [  # bias, bucket size, elements of each bucket
    (False, None, [90_250]),
    (False, 9_000, [9_025] * 10),
    (False, 9_025, [9_025] * 10),
    (False, 9_050, [18_050] * 5),
    (False, 18_000, [18_050] * 5),
    (False, 18_050, [18_050] * 5),
    (False, 20_000, [27_075] * 3 + [9_025]),
    (True, None, [91_200]),
    (True, 9_000, [9_120] * 10),
    (True, 9_025, [9_120] * 10),
    (True, 9_050, [9_120] * 10),
    (True, 18_000, [18_240] * 5),
    (True, 18_050, [18_240] * 5),
    (True, 20_000, [27_360] * 3 + [9_120]),
]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bias, bucket_size, sizes", REPLICATED)
def test_ten_layers_of_a_replicated_optimizer(bias, shared, bucket_size, sizes):
    bucket_size = resolve_bucket_size(bucket_size, dp_size=8)
    layout = default_layout(linears(bias=bias, shared=shared), bucket_size)
    assert unpadded(layout) == sizes
    assert [bucket.num_elements for bucket in layout.buckets] == sizes


ONE, TWO, THREE = (9_025, 9_088), (18_113, 18_176), (27_201, 27_264)
ONE_B, TWO_B, THREE_B = (9_153, 9_216), (18_369, 18_432), (27_585, 27_648)
SHARDED = [  # bias, shared, bucket size, (unpadded, padded) of each bucket
    (False, False, None, [(90_817, 90_880)]),
    (False, False, 9_000, [ONE] * 10),
    (False, False, 9_025, [ONE] * 10),
    (False, False, 9_050, [TWO] * 5),
    (False, False, 18_000, [TWO] * 5),
    (False, False, 18_050, [TWO] * 5),
    (False, False, 20_000, [THREE] * 3 + [ONE]),
    (True, False, None, [(92_097, 92_160)]),
    (True, False, 9_000, [ONE_B] * 10),
    (True, False, 9_025, [ONE_B] * 10),
    (True, False, 9_050, [ONE_B] * 10),
    (True, False, 18_000, [TWO_B] * 5),
    (True, False, 18_050, [TWO_B] * 5),
    (True, False, 20_000, [THREE_B] * 3 + [ONE_B]),
    (False, True, None, [ONE, (81_729, 81_792)]),
    (False, True, 9_000, [ONE] * 10),
    (False, True, 9_025, [ONE] * 10),
    (False, True, 9_050, [ONE] + [TWO] * 4 + [ONE]),
    (False, True, 18_000, [ONE] + [TWO] * 4 + [ONE]),
    (False, True, 18_050, [ONE] + [TWO] * 4 + [ONE]),
    (False, True, 20_000, [ONE] + [THREE] * 3),
]


@pytest.mark.parametrize("bias, shared, bucket_size, sizes", SHARDED)
def test_ten_layers_of_a_distributed_optimizer(bias, shared, bucket_size, sizes):
    bucket_size = resolve_bucket_size(bucket_size, dp_size=8)
    params = linears(bias=bias, shared=shared)
    layout = distributed_optimizer_layout(params, 8, bucket_size)
    assert [(b.num_unpadded, b.num_elements) for b in layout.buckets] == sizes


def test_positions_in_a_bucket_are_those_in_the_buffer_less_its_start():
    params = specs((4, 4), (4,), (4, 4), (4,))
    layout = distributed_optimizer_layout(params, 2, bucket_size=70)
    assert spans(layout) == {
        "3": (0, 4, 0),
        "2": (64, 80, 0),
        "1": (128, 132, 1),
        "0": (192, 208, 1),
    }
    assert [layout.in_bucket(str(i)) for i in range(4)] == [
        Range(64, 80),
        Range(0, 4),
        Range(64, 80),
        Range(0, 4),
    ]


@pytest.mark.parametrize("dp_size, size", [(1, 40_000_000), (64, 64_000_000)])
def test_the_usual_bucket_grows_with_the_data_ranks(dp_size, size):
    assert resolve_bucket_size(None, dp_size) == size


def test_a_bucket_size_that_is_asked_for_is_taken():
    assert resolve_bucket_size(7, 64) == 7


@pytest.mark.parametrize(
    "run",
    [
        {"overlap_grad_reduce": False},
        {"pipeline_rank": 1},
        {"disable_bucketing": True},
    ],
)
def test_without_overlap_there_is_one_bucket(run):
    assert resolve_bucket_size(7, 64, **run) is None


# Laws of both sequential layouts


def assert_covers(layout, params):
    """Every parameter once, inside its bucket, and no two in one place."""
    assert Counter(p.param for p in layout.placements) == Counter(params)
    assert all(p.stop - p.start == p.param.num_elements for p in layout.placements)
    for place, after in itertools.pairwise(layout.placements):
        assert place.stop <= after.start and place.bucket <= after.bucket
    for place in layout.placements:
        bucket = layout.buckets[place.bucket]
        assert bucket.start <= place.start and place.stop <= bucket.stop
    edges = [0, *(bucket.stop for bucket in layout.buckets)]
    assert [bucket.start for bucket in layout.buckets] == edges[:-1]
    assert {p.bucket for p in layout.placements} == {*range(len(layout.buckets))}
    assert layout.num_unpadded <= layout.num_elements


@settings(deadline=None)
@given(models(), bucket_sizes)
def test_the_default_layout_is_the_parameters_end_to_end(params, bucket_size):
    layout = default_layout(params, bucket_size)
    assert_covers(layout, params)
    assert [p.param for p in layout.placements] == params[::-1]
    assert layout.num_elements == sum(param.num_elements for param in params)


@settings(deadline=None)
@given(models(), dp_sizes, bucket_sizes, st.booleans())
def test_the_distributed_layout_is_aligned_and_complete(params, dp, size, high_busbw):
    layout = distributed_optimizer_layout(params, dp, size, high_busbw=high_busbw)
    assert_covers(layout, params)
    assert [p.param for p in layout.placements] == params[::-1]
    assert all(start % 64 == 0 for start in starts(layout))
    divisor = math.lcm(dp, 128, 2**16 if high_busbw else 1)
    assert all(stop % divisor == 0 for _, stop in ends(layout))


@settings(deadline=None)
@given(models(), dp_sizes, st.integers(1, 3_000))
def test_a_bucket_closes_when_it_is_full_and_not_before(params, dp_size, bucket_size):
    params = [dataclasses.replace(p, shared_embedding=False) for p in params]
    for layout in (
        default_layout(params, bucket_size),
        distributed_optimizer_layout(params, dp_size, bucket_size),
    ):
        for number, bucket in enumerate(layout.buckets):
            *before, last = (p for p in layout.placements if p.bucket == number)
            is_last = number == len(layout.buckets) - 1
            assert last.stop - bucket.start >= bucket_size or is_last
            assert all(p.stop - bucket.start < bucket_size for p in before)


@pytest.mark.parametrize(
    "params, dp_size, bucket_size, match",
    [
        (specs((2,)) * 2, 2, None, ["['0']", "2"]),
        (specs((2,)), 0, None, ["dp", "[0]", "1"]),
        (specs((2,)), 2, 0, ["bucket_size", "0", "None"]),
        (specs((2,)) * 2, 0, 0, ["['0']", "bucket_size", "dp", "[0]"]),
    ],
)
def test_what_cannot_be_laid_out_is_refused(params, dp_size, bucket_size, match):
    with pytest.raises(ValueError, match=facts(*match)):
        distributed_optimizer_layout(params, dp_size, bucket_size)
    with pytest.raises(ValueError, match=facts(*match)):
        full_layout(params, dp_size=dp_size, bucket_size=bucket_size)


# Full layouts


def test_dense_parameters_are_one_buffer():
    params = specs((100, 100), (50, 50))
    (buffer,) = full_layout(params, dp_size=2)
    assert buffer.key == BufferKey(BF16, BF16)
    assert set(spans(buffer.layout)) == {"0", "1"}


def dense_and_expert(size=1_000):
    return [ParamSpec("d", (size,)), ParamSpec("e", (size,), is_expert=True)]


@pytest.mark.parametrize("optimizer", ["replicated", "distributed", "layer_wise"])
def test_dense_and_expert_buffers_both_start_at_zero(optimizer):
    dense, expert = full_layout(dense_and_expert(), dp_size=2, optimizer=optimizer)
    assert not dense.key.is_expert and expert.key.is_expert
    assert spans(dense.layout) == {"d": (0, 1_000, 0)}
    assert spans(expert.layout) == {"e": (0, 1_000, 0)}
    padded = 1_000 if optimizer == "replicated" else 1_024
    assert dense.layout.num_elements == expert.layout.num_elements == padded


def test_dense_and_expert_buffers_are_padded_for_their_own_ranks():
    dense, expert = full_layout(dense_and_expert(), dp_size=3, expert_dp_size=256)
    assert ends(dense.layout) == [(0, 1_152)]  # 3 x 384
    assert ends(expert.layout) == [(0, 1_024)]  # 4 x 256
    assert (dense.layout.num_shards, expert.layout.num_shards) == (3, 256)


def test_experts_have_as_many_ranks_as_others_unless_said():
    _, expert = full_layout(dense_and_expert(), dp_size=3)
    assert expert.layout.num_shards == 3


def test_the_bucket_size_holds_in_every_buffer():
    params = [
        dataclasses.replace(p, name=f"{p.name}{i}")
        for i in "01"
        for p in dense_and_expert()
    ]
    buffers = full_layout(params, dp_size=2, bucket_size=1_000)
    assert [len(buffer.layout.buckets) for buffer in buffers] == [2, 2]


def test_parameters_are_numbered_in_the_order_of_the_model():
    (buffer,) = full_layout(specs((100,), (200,), (300,)), dp_size=2)
    assert buffer.group.indices == (0, 1, 2)
    assert [param.name for param in buffer.group.params] == ["0", "1", "2"]


# Shards


def test_a_bucket_is_split_evenly():
    assert shard_bucket(Bucket(128, 256, 100), 2) == (Range(128, 192), Range(192, 256))


def test_a_bucket_that_cannot_be_split_evenly_is_refused():
    with pytest.raises(ValueError, match=facts("1,000", "dp_size=3")):
        shard_bucket(Bucket(0, 1_000, 1_000), 3)


def test_a_piece_is_the_same_elements_counted_from_four_places():
    layout = distributed_optimizer_layout(specs((100,), (300,)), 2, bucket_size=200)
    (_, piece) = owned_pieces(layout, rank=0)
    assert (piece.param.name, piece.bucket) == ("0", 1)
    assert piece.in_param == Range(0, 64)
    assert piece.in_buffer == Range(384, 448)
    assert piece.in_bucket == piece.in_shard == Range(0, 64)
    (head, tail) = owned_pieces(layout, rank=1)
    assert (head.in_param, head.in_shard) == (Range(192, 300), Range(0, 108))
    assert (tail.in_param, tail.in_bucket) == (Range(64, 100), Range(64, 100))
    assert tail.in_shard == Range(0, 36)


def test_a_rank_with_padding_alone_owns_nothing():
    layout = distributed_optimizer_layout(specs((10,)), dp_size=4)
    assert [len(owned_pieces(layout, rank)) for rank in range(4)] == [1, 0, 0, 0]


@settings(deadline=None)
@given(models(), dp_sizes, bucket_sizes)
def test_shards_hold_every_element_of_every_parameter_once(params, dp_size, size):
    layout = distributed_optimizer_layout(params, dp_size, size)
    owned = {param.name: [] for param in params}
    for rank in range(dp_size):
        for piece in owned_pieces(layout, rank):
            bucket = layout.buckets[piece.bucket]
            shard_size = bucket.num_elements // dp_size
            assert 0 <= piece.in_shard.start < piece.in_shard.stop <= shard_size
            assert piece.in_bucket.start == rank * shard_size + piece.in_shard.start
            assert piece.in_buffer.start == bucket.start + piece.in_bucket.start
            place = layout.by_name[piece.param.name]
            assert piece.in_buffer.start == place.start + piece.in_param.start
            owned[piece.param.name].append(piece.in_param)
    for param in params:
        edges = [0, *(piece.stop for piece in owned[param.name])]
        assert [piece.start for piece in owned[param.name]] == edges[:-1]
        assert edges[-1] == param.num_elements


@pytest.mark.parametrize("instances", [1, 2])
def test_shards_cover_every_parameter_for_each_instance_of_the_optimizer(instances):
    group_size = 8 // instances
    params = linears(bias=True, shared=False)
    (buffer,) = full_layout(params, dp_size=group_size, bucket_size=18_000)
    pieces = [owned_pieces(buffer.layout, rank) for rank in range(group_size)]
    owned = sum(p.in_param.stop - p.in_param.start for rank in pieces for p in rank)
    assert owned == sum(param.num_elements for param in params) == 91_200


def test_a_rank_beyond_the_group_that_shares_the_optimizer_is_refused():
    layout = distributed_optimizer_layout(specs((1_000,)), dp_size=4)
    with pytest.raises(ValueError, match=facts("Rank 4", "4 ranks")):
        owned_pieces(layout, rank=4)


def test_a_layout_without_shards_has_no_owners():
    with pytest.raises(
        ValueError, match=facts("1,000", "distributed_optimizer_layout")
    ):
        owned_pieces(default_layout(specs((1_000,))), rank=0)


# Bucket groups


def buffers_of(*storages, is_expert=False, sizes=(200, 200), dp_size=2):
    """A buffer of two buckets for each kind of storage."""
    buffers = []
    for storage in storages:
        plain = storage in (BF16, F32)
        params = [
            ParamSpec(
                f"{storage}.{i}",
                (size,),
                dtype=storage if plain else BF16,
                storage="plain" if plain else storage,
                is_expert=is_expert,
            )
            for i, size in enumerate(sizes)
        ]
        buffers += full_layout(params, dp_size=dp_size, bucket_size=200)
    return buffers


A, B, C, D = (BucketId(buffer, bucket) for buffer in (0, 1) for bucket in (0, 1))


@pytest.mark.parametrize("single_group", [False, True])
def test_no_buffers_are_no_groups(single_group):
    assert partition_buckets([], single_group=single_group) == ()


def test_each_bucket_is_a_group_where_nothing_is_quantized():
    assert partition_buckets(buffers_of(BF16, F32)) == ((A,), (B,), (C,), (D,))


def test_all_buckets_are_one_group_where_asked():
    groups = partition_buckets(buffers_of(BF16, "fp8"), single_group=True)
    assert groups == ((A, B, C, D),)


@pytest.mark.parametrize("storage", ["fp8", "nvfp4"])
@pytest.mark.parametrize("plain_first", [False, True])
def test_plain_buckets_join_the_last_quantized_one(storage, plain_first):
    if plain_first:
        groups = ((C,), (D, A, B))
        assert partition_buckets(buffers_of(BF16, storage)) == groups
    else:
        groups = ((A,), (B, C, D))
        assert partition_buckets(buffers_of(storage, BF16)) == groups


def test_quantized_buckets_stay_alone_where_nothing_is_plain():
    assert partition_buckets(buffers_of("fp8")) == ((A,), (B,))


def test_float32_reduce_scatter_keeps_plain_buckets_alone():
    groups = partition_buckets(buffers_of(BF16, "fp8"), fp32_reduce_scatter=True)
    assert groups == ((C,), (D,), (A,), (B,))


def test_float32_reduce_scatter_refuses_a_group_of_several():
    with pytest.raises(ValueError, match=facts("4", "single_group")):
        partition_buckets(
            buffers_of(BF16, F32), single_group=True, fp32_reduce_scatter=True
        )


def test_float32_reduce_scatter_takes_a_group_of_one():
    buffers = buffers_of(BF16, sizes=[200])
    groups = partition_buckets(buffers, single_group=True, fp32_reduce_scatter=True)
    assert groups == ((A,),)


@pytest.mark.parametrize("single_group", [False, True])
def test_two_quantized_buffers_are_refused(single_group):
    buffers = buffers_of("fp8") + buffers_of("nvfp4")
    with pytest.raises(ValueError, match=facts("2", "quantized")):
        partition_buckets(buffers, single_group=single_group)


@pytest.mark.parametrize("other", [{"is_expert": True}, {"dp_size": 4}])
def test_buckets_of_different_ranks_are_not_joined(other):
    buffers = buffers_of(BF16) + buffers_of("fp8", **other)
    with pytest.raises(
        ValueError, match=facts("(is_expert, num_shards)", "(False, 2)")
    ):
        partition_buckets(buffers)
    partition_buckets(buffers, fp32_reduce_scatter=True)  # joins none


# NVFP4: gradients by one map, parameters by another


def nvfp4(*shapes):
    return specs(*shapes, storage="nvfp4")


def test_packed_parameters_take_half_the_elements():
    layout = default_layout(nvfp4((100, 100), (100, 100)))
    packed = packed_layout(layout)
    assert spans(layout) == {"1": (0, 10_000, 0), "0": (10_000, 20_000, 0)}
    assert spans(packed) == {"1": (0, 5_000, 0), "0": (5_000, 10_000, 0)}
    assert (layout.num_elements, packed.num_elements) == (20_000, 10_000)


@settings(deadline=None)
@given(models(), dp_sizes, bucket_sizes)
def test_a_layout_without_nvfp4_is_packed_as_it_is(params, dp_size, bucket_size):
    for layout in (
        default_layout(params, bucket_size),
        distributed_optimizer_layout(params, dp_size, bucket_size),
    ):
        assert ends(packed_layout(layout)) == ends(layout)
        assert spans(packed_layout(layout)) == spans(layout)


def test_packed_parameters_stay_in_their_buckets():
    layout = default_layout(nvfp4(*[(100, 100)] * 4), bucket_size=15_000)
    packed = packed_layout(layout)
    assert ends(layout) == [(0, 20_000), (20_000, 40_000)]
    assert ends(packed) == [(0, 10_000), (10_000, 20_000)]
    assert layout.in_bucket("0") == Range(10_000, 20_000)
    assert packed.in_bucket("0") == Range(5_000, 10_000)


@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
def test_packed_parameters_are_aligned_as_others_are(dp_size):
    layout = distributed_optimizer_layout(nvfp4((98, 101), (98, 101)), dp_size)
    packed = packed_layout(layout)
    assert spans(layout) == {"1": (0, 9_898, 0), "0": (9_920, 19_818, 0)}
    assert spans(packed) == {"1": (0, 4_949, 0), "0": (4_992, 9_941, 0)}
    assert (layout.num_elements, packed.num_elements) == (19_840, 9_984)


def test_a_packed_bucket_counts_its_last_gap_if_another_follows():
    params = nvfp4((100,), (100,), (100,))
    packed = packed_layout(distributed_optimizer_layout(params, 2, bucket_size=150))
    # 50 at 0 and at 64 end at 114; the next would have started at 128.
    assert unpadded(packed) == [128, 50] and ends(packed) == [(0, 128), (128, 256)]


def test_plain_parameters_among_packed_ones_keep_their_size():
    packed = packed_layout(default_layout([*nvfp4((100, 100)), ParamSpec("n", (100,))]))
    assert spans(packed) == {"n": (0, 100, 0), "0": (100, 5_100, 0)}


def test_packed_parameters_of_different_sizes_follow_each_other():
    layout = default_layout(nvfp4((10, 20), (100, 200)))
    assert spans(layout) == {"1": (0, 20_000, 0), "0": (20_000, 20_200, 0)}
    assert spans(packed_layout(layout)) == {
        "1": (0, 10_000, 0),
        "0": (10_000, 10_100, 0),
    }


def test_values_that_do_not_pair_up_are_refused():
    layout = default_layout(nvfp4((3, 5), (2, 2), (7,)))
    with pytest.raises(ValueError, match=facts("'2'", "(7,)", "'0'", "(3, 5)")):
        packed_layout(layout)


def test_a_layer_wise_layout_is_not_packed():
    (buffer,) = full_layout(nvfp4((4, 4)), dp_size=2, optimizer="layer_wise")
    with pytest.raises(ValueError, match=facts("1", "NVFP4")):
        packed_layout(buffer.layout)


# SwiGLU

SWIGLU = {  # (tp rank, dp rank): position, of 2 x 4 ranks
    (0, 0): 0,
    (0, 1): 1,
    (0, 2): 4,
    (0, 3): 5,
    (1, 0): 2,
    (1, 1): 3,
    (1, 2): 6,
    (1, 3): 7,
}


def test_gates_lie_before_ups_whatever_the_rank():
    for (tp_rank, dp_rank), position in SWIGLU.items():
        assert swiglu_shard_index(tp_rank, dp_rank, tp_size=2, dp_size=4) == position


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_every_shard_of_gate_and_up_finds_its_rows(tp_size, half_dp_size, rows):
    dp_size = 2 * half_dp_size
    per_rank = half_dp_size * rows  # of the gate, and of up, on one tensor rank
    gate = [("gate", i) for i in range(tp_size * per_rank)]
    up = [("up", i) for i in range(tp_size * per_rank)]
    for tp, dp in itertools.product(range(tp_size), range(dp_size)):
        mine = slice(tp * per_rank, (tp + 1) * per_rank)
        on_tensor_rank = gate[mine] + up[mine]
        index = swiglu_shard_index(tp, dp, tp_size=tp_size, dp_size=dp_size)
        shard = (gate + up)[index * rows : (index + 1) * rows]
        assert shard == on_tensor_rank[dp * rows : (dp + 1) * rows]


@pytest.mark.parametrize("dp_size", [1, 3])
def test_a_shard_across_gate_and_up_is_refused(dp_size):
    with pytest.raises(ValueError, match=facts("dp_size", dp_size)):
        swiglu_shard_index(0, 0, tp_size=2, dp_size=dp_size)


@pytest.mark.parametrize("tp_rank, dp_rank", [(2, 0), (0, 4), (-1, 0), (0, -1)])
def test_a_rank_outside_its_group_is_refused(tp_rank, dp_rank):
    with pytest.raises(
        ValueError, match=facts(f"tp {tp_rank}", f"dp {dp_rank}", "2", "4")
    ):
        swiglu_shard_index(tp_rank, dp_rank, tp_size=2, dp_size=4)


def test_buffers_are_values():
    first, second = (full_layout(specs((3, 5), (7,)), dp_size=2) for _ in range(2))
    assert first == second and isinstance(first[0], Buffer)
