"""Laws and gold values of the layer-wise layout: unsplit matrices, even work."""

import dataclasses
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.megatron.buffers import (
    BufferKey,
    ParamSpec,
    full_layout,
    group_params,
    is_layer_wise,
    layer_wise_layout,
    newton_schulz_cost,
    owned_pieces,
    shard_divisor,
)


def vectors(*sizes):
    """Parameters 0, 1, ... whose work is their elements, so that both orders agree."""
    return [ParamSpec(str(i), (size,)) for i, size in enumerate(sizes)]


def shards_of(layout):
    """The shard in which each parameter lies, and that it does not leave."""
    shards = {}
    for place in layout.placements:
        bucket = layout.buckets[place.bucket]
        size = bucket.num_elements // layout.num_shards
        first, last = (
            (position - bucket.start) // size
            for position in (place.start, place.stop - 1)
        )
        assert first == last, f"{place.param.name} crosses a shard"
        shards[place.param.name] = first
    return shards


def buckets_of(layout):
    return {place.param.name: place.bucket for place in layout.placements}


# Which parameters are layer-wise


@pytest.mark.parametrize(
    "shape, tags, managed",
    [
        ((16, 8), {}, True),
        ((8, 16), {"is_expert": True}, True),
        ((16,), {}, False),
        ((), {}, False),
        ((4, 4, 4), {}, False),
        ((16, 8), {"is_embedding_or_output": True}, False),
        ((16, 8), {"use_muon": False}, False),
    ],
)
def test_muon_takes_matrices_and_no_embeddings(shape, tags, managed):
    assert is_layer_wise(ParamSpec("w", shape, **tags)) is managed


def test_a_matrix_kept_from_muon_lies_in_another_buffer():
    muon, adam = ParamSpec("m", (16, 8)), ParamSpec("a", (16, 8), use_muon=False)
    groups = group_params([muon, adam], layer_wise=True)
    key = BufferKey("bfloat16", "bfloat16")
    assert groups[dataclasses.replace(key, is_layer_wise=True)].params == (muon,)
    assert groups[key].params == (adam,)


def test_nothing_is_layer_wise_under_another_optimizer():
    assert list(group_params([ParamSpec("m", (16, 8))])) == [
        BufferKey("bfloat16", "bfloat16", is_layer_wise=False)
    ]


# Alignment


@pytest.mark.parametrize(
    "dp_size, high_busbw, divisor",
    [(1, False, 128), (2, False, 64), (4, False, 64), (8, False, 64)]
    + [(3, False, 128), (256, False, 64), (8, True, 8_192)],
)
def test_shards_are_aligned_and_fill_a_bucket(dp_size, high_busbw, divisor):
    assert shard_divisor(dp_size, high_busbw) == divisor
    assert divisor % 64 == 0
    assert dp_size * divisor % math.lcm(dp_size, 128, 2**16 if high_busbw else 1) == 0


@pytest.mark.parametrize("dp_size", [2, 4, 8])
def test_each_bucket_splits_evenly(dp_size):
    layout = layer_wise_layout(vectors(*[333] * 2 * dp_size), dp_size)
    (bucket,) = layout.buckets
    assert bucket.num_elements == dp_size * 768  # 333 at 0 and at 384, to 717


def test_each_bucket_ends_aligned():
    layout = layer_wise_layout(vectors(*[333] * 8), 3, bucket_size=600)
    assert [bucket.stop % math.lcm(3, 128) for bucket in layout.buckets] == [0, 0, 0]


# Packing


def test_equal_parameters_are_distributed_evenly():
    layout = layer_wise_layout(vectors(*[256] * 8), 4)
    assert Counter(shards_of(layout).values()) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_the_first_shard_takes_what_is_left_over():
    layout = layer_wise_layout(vectors(*[256] * 5), 4)
    assert Counter(shards_of(layout).values()) == {0: 2, 1: 1, 2: 1, 3: 1}


def test_parameters_of_mixed_sizes_are_not_cut():
    layout = layer_wise_layout(vectors(100, 200, 100, 200, 100), 2)
    assert set(shards_of(layout)) == {"0", "1", "2", "3", "4"}


def test_large_parameters_share_a_bucket_and_no_shard():
    layout = layer_wise_layout(vectors(*[256, 64] * 4), 4)
    shards, buckets = shards_of(layout), buckets_of(layout)
    assert {buckets[name] for name in "0246"} == {0}
    assert {shards[name] for name in "0246"} == {0, 1, 2, 3}


def test_small_parameters_fill_the_shards_beside_a_large_one():
    layout = layer_wise_layout(vectors(128, 128, 128, 1_024), 4)
    shards = shards_of(layout)
    assert len(layout.buckets) == 1
    assert shards["3"] not in (shards["0"], shards["1"], shards["2"])


def test_in_a_shard_equal_parameters_keep_the_order_of_backward():
    layout = layer_wise_layout(vectors(*[128] * 6), 2)
    shards = shards_of(layout)
    for shard in (0, 1):
        names = [
            p.param.name for p in layout.placements if shards[p.param.name] == shard
        ]
        assert names == sorted(names, reverse=True) and len(names) == 3


def test_on_one_rank_all_is_in_one_shard():
    layout = layer_wise_layout(vectors(*[100] * 5), 1)
    assert set(shards_of(layout).values()) == {0} and len(layout.placements) == 5


def test_one_parameter_is_one_bucket_that_is_mostly_padding():
    layout = layer_wise_layout(vectors(512), 4)
    (bucket,) = layout.buckets
    assert (bucket.num_elements, bucket.num_unpadded) == (4 * 512, 512)
    assert shards_of(layout) == {"0": 0}


def test_no_parameters_are_no_buckets():
    assert layer_wise_layout([], 4).buckets == ()


def test_every_parameter_is_laid_out_once():
    params = vectors(64, 128, 256, 64, 128, 256, 64)
    layout = layer_wise_layout(params, 4)
    assert sorted(p.param.name for p in layout.placements) == [p.name for p in params]


def test_a_parameter_larger_than_a_fair_share_is_placed_all_the_same():
    # A fair share is at most (64 + 64 + 1,024) / 2 x 1.3 = 748.8 elements.
    layout = layer_wise_layout(vectors(64, 64, 1_024), 2)
    shards = shards_of(layout)
    assert shards == {"2": 0, "1": 1, "0": 1}


# Shared embeddings


@pytest.mark.parametrize("shared", [0, 2, 4])
def test_a_shared_embedding_has_a_bucket_to_itself_in_shard_0(shared):
    params = vectors(*[128] * 5)
    params[shared] = dataclasses.replace(params[shared], shared_embedding=True)
    layout = layer_wise_layout(params, 2)
    buckets = buckets_of(layout)
    mine = [name for name in buckets if buckets[name] == buckets[str(shared)]]
    assert mine == [str(shared)] and shards_of(layout)[str(shared)] == 0
    assert len(layout.buckets) == (3 if shared == 2 else 2)


@pytest.mark.parametrize("dp_size", [2, 4, 8])
def test_a_shared_embedding_fits_into_its_shard_on_many_ranks(dp_size):
    embedding = ParamSpec("e", (1_024,), shared_embedding=True)
    layout = layer_wise_layout([embedding], dp_size)
    assert shards_of(layout) == {"e": 0}
    assert layout.num_elements == dp_size * 1_024


# Bucket sizes


def test_a_bucket_closes_when_it_is_full():
    layout = layer_wise_layout(vectors(*[256] * 8), 2, bucket_size=512)
    assert [bucket.num_elements for bucket in layout.buckets] == [512] * 4


def test_a_full_bucket_takes_what_fits_into_its_padding():
    layout = layer_wise_layout(vectors(*[256] * 6), 4, bucket_size=5 * 256)
    (bucket,) = layout.buckets
    assert (bucket.num_elements, bucket.num_unpadded) == (2_048, 2_048 - 512)


def test_parameters_that_fill_their_shards_leave_no_padding():
    layout = layer_wise_layout(vectors(*[256] * 8), 4, bucket_size=5 * 256)
    assert layout.num_elements == layout.num_unpadded == 8 * 256


def test_a_parameter_that_seemed_to_fit_can_make_a_bucket_grow():
    # The estimate fills shards in backward's order, and the packing sorts first.
    backward = [192, 192, 256, 128, 128, 192]
    layout = layer_wise_layout(vectors(*reversed(backward)), 2, bucket_size=448)
    assert [bucket.num_elements for bucket in layout.buckets] == [1_024, 384]
    assert set(shards_of(layout)) == {*"012345"}


def test_a_bucket_stays_open_until_nine_tenths_of_its_least_length_are_filled():
    # Its least length is 4 x 1,024. With three of the small ones it is past its
    # bucket size and the fourth finds no padding to fit into, but 2,824 elements are
    # less than 3,686. So it takes five, and a sixth for the padding that these make.
    layout = layer_wise_layout(vectors(*[600] * 7, 1_024), 4, bucket_size=1)
    assert [bucket.num_unpadded for bucket in layout.buckets] == [4_624, 600]


def test_a_bucket_may_close_once_nine_tenths_of_its_least_length_are_filled():
    # 1,924 of 2 x 1,024 are enough: at least 1,843.
    layout = layer_wise_layout(vectors(900, 900, 900, 1_024), 2, bucket_size=1)
    assert [bucket.num_unpadded for bucket in layout.buckets] == [1_924, 1_800]


def test_what_fits_is_judged_by_one_bucket_alone():
    backward = [512, 448, 384, 384, 64]
    layout = layer_wise_layout(vectors(*reversed(backward)), 2, bucket_size=512)
    assert [bucket.num_unpadded for bucket in layout.buckets] == [960, 768, 64]


# Work


@pytest.mark.parametrize(
    "param, cost",
    [
        (ParamSpec("wide", (8, 16)), 16 * 8 * 8),
        (ParamSpec("tall", (16, 8)), 16 * 8 * 8),
        (ParamSpec("gathered", (8, 16), gtp_size=4), 32 * 16 * 16),
        (ParamSpec("vector", (100,)), 100),
        (ParamSpec("kernel", (3, 4, 5)), 60),
    ],
)
def test_the_work_is_that_of_the_whole_matrix(param, cost):
    assert newton_schulz_cost(param) == cost


def gathered(name):
    """Few elements here, and much work: 64 such parts are one matrix."""
    return ParamSpec(name, (64, 256), gtp_size=64)


def test_expensive_parameters_are_spread_though_they_are_small():
    shapes = [(128, 1_024), (256, 256), (256, 256)]
    params = [ParamSpec(f"dense{i}", shape) for i, shape in enumerate(shapes)]
    params += [*map(gathered, "abc"), ParamSpec("tail", (64, 256))]
    layout = layer_wise_layout(params, 4)
    shards = shards_of(layout)
    assert len({shards[name] for name in "abc"}) == 3
    work = Counter()
    for param in params:
        work[shards[param.name]] += newton_schulz_cost(param)
    # 3.77 if the order is by elements.
    assert max(work.values()) / (sum(work.values()) / 4) < 1.5


def test_work_is_remembered_from_bucket_to_bucket():
    params = []
    for bucket in range(4):
        params.append(gathered(f"gathered{bucket}"))
        params += [ParamSpec(f"{bucket}.{i}", (128, 128)) for i in range(3)]
    layout = layer_wise_layout(params, 4, bucket_size=4 * 128 * 128)
    shards = shards_of(layout)
    assert len(layout.buckets) == 4
    assert {shards[f"gathered{bucket}"] for bucket in range(4)} == {0, 1, 2, 3}


def test_for_even_work_a_shard_takes_three_tenths_more_than_its_part():
    # An even part is 3.5 of seven equal parameters, and 4 are less than 4.55.
    params = [ParamSpec(str(i), (128, 128)) for i in range(6)]
    layout = layer_wise_layout([*params, gathered("expensive")], 2)
    shards = shards_of(layout)
    assert Counter(shards.values()) == {0: 3, 1: 4} and shards["expensive"] == 0


def test_a_shared_embedding_is_no_work_for_muon():
    params = [ParamSpec(str(i), (64, 64)) for i in range(3)]
    params.append(ParamSpec("e", (64, 64), shared_embedding=True))
    assert shards_of(layer_wise_layout(params, 2)) == {"e": 0, "2": 0, "1": 1, "0": 0}


# Full layouts


def test_vectors_have_the_plain_layout_and_key():
    params = vectors(*[256] * 4)
    (buffer,) = full_layout(
        params, dp_size=2, optimizer="layer_wise", grad_reduce_in_fp32=True
    )
    assert buffer.key == BufferKey("bfloat16", "float32", is_expert=False)
    assert not buffer.layout.whole_params


def test_matrices_have_the_layer_wise_layout():
    params = [ParamSpec("w", (16, 16)), ParamSpec("b", (16,))]
    matrix, vector = full_layout(params, dp_size=2, optimizer="layer_wise")
    assert matrix.key.is_layer_wise and not vector.key.is_layer_wise
    assert matrix.layout == layer_wise_layout(params[:1], 2)
    assert not vector.layout.whole_params


def test_experts_have_a_layer_wise_buffer_of_their_own():
    params = [ParamSpec("d", (16, 16)), ParamSpec("e", (16, 16), is_expert=True)]
    dense, expert = full_layout(
        params, dp_size=2, expert_dp_size=4, optimizer="layer_wise"
    )
    assert (dense.layout.num_shards, expert.layout.num_shards) == (2, 4)
    assert dense.layout.whole_params and expert.layout.whole_params
    assert expert.key.is_expert and not dense.key.is_expert


# Laws


@st.composite
def models(draw):
    sizes = st.one_of(st.sampled_from([1, 16, 64, 65]), st.integers(1, 100))
    params = []
    for i, shape in enumerate(
        draw(st.lists(st.lists(sizes, min_size=1, max_size=2), max_size=14))
    ):
        shared = draw(st.integers(0, 9)) == 0
        gtp_size = draw(st.sampled_from([1, 1, 4]))
        params.append(
            ParamSpec(str(i), tuple(shape), shared_embedding=shared, gtp_size=gtp_size)
        )
    return params


@settings(deadline=None)
@given(models(), st.integers(1, 9), st.none() | st.integers(1, 20_000), st.booleans())
def test_a_layer_wise_layout_is_whole_aligned_and_complete(params, dp, size, busbw):
    layout = layer_wise_layout(params, dp, size, high_busbw=busbw)
    assert Counter(p.param for p in layout.placements) == Counter(params)
    shards_of(layout)  # none crosses
    end = 0
    for place in layout.placements:
        assert place.start % 64 == 0 and place.start >= end
        end = place.stop
        assert end - place.start == place.param.num_elements
    divisor = math.lcm(dp, 128, 2**16 if busbw else 1)
    edges = [0, *(bucket.stop for bucket in layout.buckets)]
    assert [bucket.start for bucket in layout.buckets] == edges[:-1]
    assert all(edge % divisor == 0 for edge in edges)
    total = sum(param.num_elements for param in params)
    assert layout.num_unpadded == total <= layout.num_elements


@settings(deadline=None)
@given(models(), st.integers(1, 9), st.none() | st.integers(1, 20_000))
def test_buckets_follow_backward_and_no_shared_embedding_has_company(params, dp, size):
    layout = layer_wise_layout(params, dp, size)
    buckets = buckets_of(layout)
    order = [buckets[param.name] for param in reversed(params)]
    assert order == sorted(order)
    members = Counter(order)
    for param in params:
        if param.shared_embedding:
            assert members[buckets[param.name]] == 1
            assert shards_of(layout)[param.name] == 0


@settings(deadline=None)
@given(models(), st.integers(1, 9), st.none() | st.integers(1, 20_000))
def test_each_parameter_has_one_owner(params, dp_size, bucket_size):
    layout = layer_wise_layout(params, dp_size, bucket_size)
    pieces = [p for rank in range(dp_size) for p in owned_pieces(layout, rank)]
    assert sorted((p.param.name, *p.in_param) for p in pieces) == sorted(
        (param.name, 0, param.num_elements) for param in params
    )
