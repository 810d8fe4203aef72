"""Checkpoints that Megatron wrote are their Hugging Face twins, bit for bit."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.errors import facts
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_twins import megatron_twin

from bridge._box import Range, whole
from bridge.megatron import MegatronCheckpoint, open_megatron, trim_vocab
from bridge.megatron._tiling import Tile, find, tile
from bridge.megatron._views import Assembled

GOLDENS = [
    ("qwen3", "torch_dist", "qwen3"),  # TP2 PP2, stacked, common.pt
    ("qwen3_mcore_head", "torch_dist", "qwen3"),  # the same without common.pt
    ("qwen3", "legacy", "qwen3"),  # tied, the last stage with a copy
    ("mixtral", "torch_dist", "mixtral"),  # PP2 EP2
    ("mixtral", "legacy", "mixtral"),
]
VOCAB = 331


@pytest.fixture(scope="module", params=GOLDENS, ids=lambda p: "-".join(p[:2]))
def opened(request, golden) -> tuple[MegatronCheckpoint, dict[str, np.ndarray]]:
    name, kind, twin = request.param
    return open_megatron(golden(name) / kind), megatron_twin(golden(twin) / "hf")


def test_all_tensors_are_their_twins_bit_for_bit(opened):
    checkpoint, twin = opened
    source = trim_vocab(checkpoint.source, VOCAB)
    assert set(source.keys()) == set(twin)
    for key in source.keys():
        assert source.dtype(key) == twin[key].dtype
        assert source.shape(key) == twin[key].shape
        assert source.read(key).tobytes() == twin[key].tobytes(), key


def test_any_box_is_what_numpy_would_slice(opened):
    checkpoint, twin = opened
    source, random = checkpoint.source, np.random.default_rng(0)
    for key in source.keys():
        ends = [np.sort(random.integers(0, n + 1, 2)) for n in source.shape(key)]
        index = tuple(slice(int(a), int(b)) for a, b in ends)
        whole = source.read(key)
        np.testing.assert_array_equal(source.read(key, index), whole[index])


def test_what_training_needs_to_go_on_is_there(opened):
    checkpoint, _ = opened
    assert (checkpoint.iteration, checkpoint.consumed_samples) == (7, 56)
    assert checkpoint.args["vocab_size"] == VOCAB
    assert checkpoint.args["num_layers"] == 4
    assert checkpoint.path.name == "iter_0000007"


def test_what_is_left_out_is_said_with_the_reason(opened):
    checkpoint, _ = opened
    left_out = "\n".join(checkpoint.left_out)
    assert "random generators" in left_out
    assert ("_extra_state" in left_out) == (checkpoint.format == "torch_dist")


def test_opening_reads_no_weights(golden, bytes_read):
    checkpoint = open_megatron(golden("mixtral") / "torch_dist")
    files = [checkpoint.path / name for name in (".metadata", "common.pt")]
    assert sum(bytes_read) < 2 * sum(file.stat().st_size for file in files)


def test_a_read_opens_only_the_chunks_that_it_touches(golden, bytes_read):
    source = open_megatron(golden("qwen3") / "torch_dist").source
    key = "decoder.layers.2.mlp.linear_fc1.weight"
    bytes_read.clear()
    source.read(key, (slice(0, 36),))  # gate, first tensor-parallel rank: one chunk
    assert 36 * 48 * 2 <= sum(bytes_read) < 36 * 48 * 2 + 4096


@pytest.mark.parametrize("name, steps", [("qwen3", 3), ("mixtral", 3)])
def test_moments_have_the_names_and_shapes_of_the_weights(golden, name, steps):
    checkpoint = open_megatron(golden(name) / "torch_dist")
    optimizer = checkpoint.optimizer
    assert optimizer is not None
    for moments in (optimizer.exp_avg, optimizer.exp_avg_sq):
        assert set(moments.keys()) == set(checkpoint.source.keys())
        for key in moments.keys():
            assert moments.shape(key) == checkpoint.source.shape(key)
            assert moments.dtype(key) == np.float32
    assert all((optimizer.exp_avg_sq.read(k) >= 0).all() for k in moments.keys())
    assert optimizer.step == steps
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}
    assert checkpoint.scheduler["num_steps"] == 24


def test_master_weights_round_to_the_weights(golden):
    checkpoint = open_megatron(golden("qwen3") / "torch_dist")
    assert checkpoint.optimizer is not None
    master = checkpoint.optimizer.master
    assert master is not None
    finer = 0
    for key in checkpoint.source.keys():
        weights, exact = checkpoint.source.read(key), master.read(key)
        assert exact.astype(weights.dtype).tobytes() == weights.tobytes()
        finer += int((exact != weights.astype(np.float32)).sum())
    assert finer > 0


def test_moments_are_of_their_own_weight(golden):
    """Gradients of a norm and of a matrix differ: moments that were swapped show."""
    optimizer = open_megatron(golden("qwen3") / "torch_dist").optimizer
    assert optimizer is not None
    for key in optimizer.exp_avg.keys():
        first, second = optimizer.exp_avg.read(key), optimizer.exp_avg_sq.read(key)
        # Of three steps, with betas 0.9 and 0.95: the square's root bounds the mean.
        bound = np.sqrt(second / (1 - 0.95**3)) * (1 - 0.9**3)
        assert (np.abs(first) <= bound * 1.2 + 1e-12).all(), key


def test_the_directory_of_one_iteration_will_do(golden):
    run = golden("qwen3") / "legacy"
    assert open_megatron(run / "iter_0000007").path == open_megatron(run).path


def test_a_release_is_found(golden, tmp_path):
    shutil.copytree(golden("qwen3") / "legacy/iter_0000007", tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert open_megatron(tmp_path).path == tmp_path / "release"


def test_nemos_weights_directory_is_found(golden, tmp_path):
    shutil.copytree(golden("qwen3") / "torch_dist/iter_0000007", tmp_path / "weights")
    assert open_megatron(tmp_path).iteration == 7


def test_trimming_more_words_than_rows_is_refused(golden):
    source = open_megatron(golden("qwen3") / "torch_dist").source
    with pytest.raises(
        ValueError, match=facts("'embedding.word_embeddings.weight'", "384", "385")
    ):
        trim_vocab(source, 385)


# Tilings: what a sharded tensor's chunks must be


@st.composite
def tilings(draw, shape=(5, 4, 3)):
    """Boxes that fill a shape, cut again and again at random places."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(box[dim].start, box[dim].stop))
        low, high = Range(box[dim].start, at), Range(at, box[dim].stop)
        halves = [(*box[:dim], half, *box[dim + 1 :]) for half in (low, high)]
        boxes += [half for half in halves if all(r.start < r.stop for r in half)]
    return boxes


@settings(deadline=None, max_examples=100)
@given(tilings(), st.randoms(use_true_random=False))
def test_any_cutting_is_a_tiling_and_every_box_of_it_is_found(boxes, random):
    values = np.arange(60).reshape(5, 4, 3)
    random.shuffle(boxes)
    tiles = tuple(
        Tile(box, Part(values[tuple(slice(*r) for r in box)])) for box in boxes
    )
    tensor = Assembled(values.shape, values.dtype, tiles)
    np.testing.assert_array_equal(tensor.read(), values)
    index = tuple(slice(*sorted(random.choices(range(n + 1), k=2))) for n in (5, 4, 3))
    np.testing.assert_array_equal(tensor.read(index), values[index])


class Part(np.ndarray):
    """An array that can be read like a lazy tensor."""

    def __new__(cls, values):
        return values.view(cls)

    def read(self, slices=()):
        return np.asarray(self[slices])


@settings(deadline=None, max_examples=100)
@given(tilings(), st.data())
def test_a_missing_or_doubled_part_is_noticed(boxes, data):
    number = data.draw(st.integers(0, len(boxes) - 1))
    tiles = [Tile(box, None) for box in boxes]
    for wrong in (tiles[:number] + tiles[number + 1 :], [*tiles, tiles[number]]):
        with pytest.raises(ValueError, match=facts("parts")):
            tile(whole((5, 4, 3)), wrong)


def test_parts_far_away_are_not_looked_at():
    boxes = [(Range(n, n + 1), Range(0, 1)) for n in range(10_000)]
    tiling = tile(whole((10_000, 1)), [Tile(box, n) for n, box in enumerate(boxes)])
    found = [part.part for part, _ in find(tiling, (Range(70, 72), Range(0, 1)))]
    assert found == [70, 71]


def test_a_checkpoint_is_refused_by_what_was_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=facts(f"'{tmp_path}/absent'")):
        open_megatron(tmp_path / "absent")
    with pytest.raises(
        ValueError,
        match=facts(
            "'latest_checkpointed_iteration.txt'", "'metadata.json'", "'.metadata'"
        ),
    ):
        open_megatron(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(
        ValueError, match=facts("'zarr'", "0.15", "--ckpt-format torch_dist")
    ):
        open_megatron(tmp_path)


@pytest.mark.parametrize("text", ["", "-1", "../..", "9" * 40, "seven"])
def test_a_tracker_that_names_no_iteration_is_refused(tmp_path: Path, text):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(
        ValueError, match=facts("latest_checkpointed_iteration.txt'", repr(text))
    ):
        open_megatron(tmp_path)
