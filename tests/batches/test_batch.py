"""The laws of batches of rows, as verl's DataProto has them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers.errors import facts
from hypothesis import given
from hypothesis import strategies as st

import fsdp_jax as fsdp
from fsdp_jax.rl import Batch, Jagged
from fsdp_jax.rl._same import same


def batch(num_rows: int = 6) -> Batch:
    obs = np.arange(2 * num_rows).reshape(num_rows, 2)
    words = Jagged.from_rows([np.arange(n % 3) for n in range(num_rows)])
    return Batch(
        {"obs": obs, "words": words},
        {"labels": [f"label {n}" for n in range(num_rows)]},
        {"temperature": 0.7},
    )


def assert_same(a: Batch, b: Batch) -> None:
    for part in ("arrays", "objects", "meta"):
        assert same(dict(getattr(a, part)), dict(getattr(b, part))), part


sizes = st.integers(1, 12)


@given(num_rows=sizes, part=sizes)
def test_what_is_split_and_put_together_again_is_the_same(num_rows, part):
    parts = batch(num_rows).split(part)
    assert [len(each) for each in parts[:-1]] == [part] * (len(parts) - 1)
    assert_same(Batch.concat(parts), batch(num_rows))


@given(num_rows=sizes, divisor=sizes)
def test_padding_repeats_rows_from_the_first_and_is_taken_away_again(num_rows, divisor):
    padded, added = batch(num_rows).pad_to_divisor(divisor)
    assert len(padded) == num_rows + added and len(padded) % divisor == 0
    assert added < divisor
    labels = [f"label {n % num_rows}" for n in range(len(padded))]
    assert padded.objects["labels"].tolist() == labels
    assert_same(padded.unpad(added), batch(num_rows))
    assert sum(map(len, padded.chunk(divisor))) == len(padded)


@given(order=st.permutations(range(6)))
def test_an_order_and_its_inverse_are_no_change(order):
    there = batch().reorder(order)
    assert there.objects["labels"].tolist() == [f"label {n}" for n in order]
    assert_same(there.reorder(np.argsort(order)), batch())


def test_rows_are_repeated_together_or_batch_by_batch():
    three = batch(3)
    interleaved = three.repeat(2).arrays["obs"][:, 0].tolist()
    assert interleaved == [0, 0, 2, 2, 4, 4]
    whole = three.repeat(2, interleave=False)
    assert whole.arrays["obs"][:, 0].tolist() == [0, 2, 4, 0, 2, 4]
    each = three.repeat([0, 1, 2])
    assert each.objects["labels"].tolist() == ["label 1", "label 2", "label 2"]
    lengths = [0, 1, 2, 0, 1, 2]
    assert whole.arrays["words"].lengths.tolist() == lengths


def test_columns_are_selected_popped_and_renamed():
    assert_same(
        batch().select("labels"), Batch({}, batch().objects, {"temperature": 0.7})
    )
    popped, rest = batch().pop("obs", "labels")
    assert (set(popped.arrays), set(popped.objects)) == ({"obs"}, {"labels"})
    assert (set(rest.arrays), set(rest.objects)) == ({"words"}, set())
    assert_same(rest.union(popped), batch())
    renamed = batch().rename({"obs": "seen", "labels": "names"})
    assert_same(renamed.rename({"seen": "obs", "names": "labels"}), batch())


@pytest.mark.parametrize("method", ["select", "pop"])
def test_a_column_that_is_not_there_is_named(method):
    with pytest.raises(ValueError, match=facts("x, y", "labels, obs, words")):
        getattr(batch(), method)("x", "obs", "y")


def test_two_columns_of_one_name_are_refused():
    with pytest.raises(ValueError, match=facts("rename", "['labels']")):
        batch().rename({"obs": "labels"})
    with pytest.raises(ValueError, match=facts("x 2 times")):
        Batch({"x": np.zeros(2)}, {"x": ["a", "b"]})


def test_a_union_takes_what_is_the_same_and_refuses_what_is_not():
    nan = Batch({"x": np.array([1.0, np.nan])}, {"o": [np.nan, {"a": [1]}]}, {"m": 1})
    assert_same(nan.union(nan), nan)
    assert_same(nan.union(Batch({"y": np.zeros(2)})).select("x", "o"), nan)
    for other in (
        Batch({"x": np.array([2.0, np.nan])}, meta={"m": 1}),
        Batch({"x": np.array([1, 2])}),
        Batch({"o": np.zeros(2)}, {"x": ["a", "b"]}),
    ):
        with pytest.raises(ValueError, match=facts("x")):
            nan.union(other)
    with pytest.raises(ValueError, match=facts("union", "m")):
        nan.union(Batch({"y": np.zeros(2)}, meta={"m": 2}))
    with pytest.raises(ValueError, match=facts("union", "2", "3")):
        nan.union(Batch({"y": np.zeros(3)}))


def test_concat_lists_what_differs_if_told_and_refuses_it_else():
    a, b = batch(2), batch(3)
    a = Batch(a.arrays, a.objects, {"metrics": {"loss": 1.0}, "only": 1})
    b = Batch(b.arrays, b.objects, {"metrics": {"loss": 2.0}})
    joined = Batch.concat([a, b, batch(1)], listed=["metrics"])
    assert joined.meta == {
        "only": 1,
        "temperature": 0.7,
        "metrics": [{"loss": 1.0}, {"loss": 2.0}],
    }
    with pytest.raises(ValueError, match=facts("concat", "metrics")):
        Batch.concat([a, b])
    with pytest.raises(
        ValueError,
        match=facts("concat", "(['obs'], [])", "(['obs', 'words'], ['labels'])"),
    ):
        Batch.concat([a, b.select("obs")])
    with pytest.raises(ValueError, match=facts("concat", "0")):
        Batch.concat([])


@pytest.mark.parametrize(
    "index, rows",
    [
        (slice(1, 4, 2), [1, 3]),
        (slice(-1, None), [5]),
        ([3, -1, 3], [3, 5, 3]),
        (np.array([2]), [2]),
        ([True, False, False, True, False, False], [0, 3]),
        (jnp.array([4]), [4]),
        ([], []),
    ],
)
def test_rows_are_picked_by_slice_numbers_or_mask(index, rows):
    picked = batch()[index]
    assert picked.objects["labels"].tolist() == [f"label {n}" for n in rows]
    assert picked.arrays["obs"][:, 0].tolist() == [2 * n for n in rows]
    assert picked.arrays["words"].lengths.tolist() == [n % 3 for n in rows]


def test_other_indices_are_refused():
    for index in (1, "obs", None):
        with pytest.raises(TypeError, match=facts("batch.row(number)", repr(index))):
            batch()[index]
    with pytest.raises(ValueError, match=facts("(1,)", "6")):
        batch()[[True]]
    with pytest.raises(IndexError):
        batch()[[6]]


def test_a_row_has_the_values_of_all_columns():
    row = batch().row(5)
    assert row["obs"].tolist() == [10, 11]
    assert row["words"].tolist() == [0, 1]
    assert row["labels"] == "label 5"


def test_every_row_comes_once_an_epoch_shuffled_as_the_seed_says():
    def seen(seed):
        parts = list(batch().iterate(2, epochs=3, seed=seed))
        assert [len(part) for part in parts] == [2] * 9
        return [label for part in parts for label in part.objects["labels"]]

    assert seen(None) == batch().objects["labels"].tolist() * 3
    assert seen(1) == seen(1) != seen(2)
    epochs = [seen(1)[i : i + 6] for i in (0, 6, 12)]
    assert all(sorted(e) == sorted(epochs[0]) for e in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    "refused, says",
    [
        (lambda b: b.chunk(4), ["6", "4", "pad_to_divisor(4)"]),
        (lambda b: b.iterate(4), ["6", "4", "split"]),
        (lambda b: b.split(0), ["split", "0", "1"]),
        (lambda b: b.reorder([0, 0, 1, 2, 3, 4]), ["reorder", "0", "5"]),
        (lambda b: b.repeat([1, 2]), ["repeat", "[1, 2]", "6"]),
        (lambda b: b.repeat(-1), ["repeat", "-1", "6"]),
        (lambda b: b.repeat([1] * 6, interleave=False), ["repeat", "interleave=True"]),
        (lambda b: b.unpad(6), ["unpad", "6"]),
        (lambda b: b[[]].pad_to_divisor(2), ["0", "2"]),
    ],
)
def test_what_rows_do_not_allow_is_refused(refused, says):
    with pytest.raises(ValueError, match=facts(*says)):
        refused(batch())


def test_columns_of_other_lengths_and_scalars_are_refused():
    with pytest.raises(ValueError, match=facts("x: 2", "o: 3")):
        Batch({"x": np.zeros(2)}, {"o": ["a"] * 3})
    with pytest.raises(ValueError, match=facts("x", "()")):
        Batch({"x": np.float32(1)})
    assert len(Batch(meta={"only": "this"})) == 0


# With jax


def test_a_batch_is_a_pytree_of_its_arrays_that_keeps_the_rest():
    doubled = jax.tree.map(lambda x: 2 * x, batch())
    assert doubled.arrays["obs"].tolist() == (2 * batch().arrays["obs"]).tolist()
    assert doubled.objects is not None and doubled.meta == batch().meta
    paths = [str(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch())]
    assert len(paths) == 3 and "obs" in paths[0]


def test_jit_is_compiled_once_for_the_arrays_and_anew_for_other_objects():
    calls = []

    @jax.jit
    def double(b):
        calls.append(1)
        return jax.tree.map(lambda x: 2 * x, b)

    first = batch().select("obs", "labels")
    assert double(first).objects["labels"].tolist() == first.objects["labels"].tolist()
    double(jax.tree.map(lambda x: x + 1, first))
    assert len(calls) == 1
    other = Batch(first.arrays, {"labels": ["x"] * 6}, first.meta)
    assert double(other).objects["labels"].tolist() == ["x"] * 6
    assert len(calls) == 2


def test_rows_on_devices_stay_there():
    there = jax.tree.map(jnp.asarray, batch())
    joined = Batch.concat([there[:2], there[2:]])
    assert isinstance(joined.arrays["obs"], jax.Array)
    assert_same(jax.tree.map(np.asarray, joined), jax.tree.map(np.asarray, there))


# Jagged rows


ROWS = [np.arange(n, dtype=np.float32) + 10 * n for n in (2, 0, 3)]


@pytest.mark.parametrize("asarray", [np.asarray, jnp.asarray])
def test_jagged_rows_are_padded_and_come_back(asarray):
    jagged = Jagged.from_rows([asarray(row) for row in ROWS])
    padded, mask = jagged.to_padded(4, fill=-1)
    assert np.asarray(padded).tolist() == [
        [20, 21, -1, -1],
        [-1, -1, -1, -1],
        [30, 31, 32, -1],
    ]
    assert_same(
        Batch({"x": Jagged.from_padded(padded, mask)}),
        Batch({"x": jagged}),
    )
    for row, expected in zip(jagged.rows(), ROWS, strict=True):
        np.testing.assert_array_equal(row, expected)


def test_jagged_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=facts("3 elements", "2")):
        Jagged.from_rows(ROWS).to_padded(2)
    with pytest.raises(ValueError, match=facts("float64[]", "float64[2]")):
        Jagged.from_rows([np.zeros(2), np.zeros((2, 2))])
    with pytest.raises(ValueError, match=facts("0 rows")):
        Jagged.from_rows([])


# On disk


def test_a_batch_comes_back_from_disk_to_the_bit(tmp_path):
    saved = Batch(
        {
            "half": np.array([1.5, np.nan], ml_dtypes.bfloat16),
            "flags": np.array([True, False]),
            "deep": np.zeros((2, 0, 3), np.int8),
            "words": Jagged.from_rows([np.arange(3), np.arange(0)]),
            "tiny": np.array([1, 2], ml_dtypes.float8_e4m3fn),
        },
        {"o": ["ä\n", {"a": [1, None, 2.5, True]}]},
        {"m": {"n": "x"}},
    )
    fsdp.rl.save_batch(tmp_path / "batch.npz", saved)
    assert_same(fsdp.rl.load_batch(tmp_path / "batch.npz"), saved)
    assert [path.name for path in tmp_path.iterdir()] == ["batch.npz"]


def test_what_a_file_cannot_hold_is_named_and_nothing_is_written(tmp_path):
    wrong = Batch(objects={"o": [{1: 2}, print]}, meta={"m": (1,)})
    with pytest.raises(
        ValueError, match=facts("o[0]", "o[1]", "builtin_function_or_method", "meta.m")
    ):
        fsdp.rl.save_batch(tmp_path / "batch.npz", wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "column, dtype",
    [
        (np.array(["x", "yy"]), "<U2"),
        (np.array([b"x"]), "S1"),
        (np.array([None, {}], object), "object"),
        (jax.random.split(jax.random.key(0), 2), "key<fry>"),
        (np.zeros(2, [("a", "i4")]), "[('a', '<i4')]"),
    ],
)
def test_arrays_that_are_no_numbers_are_refused_by_name(tmp_path, column, dtype):
    with pytest.raises(ValueError, match=facts("column", dtype, "objects")):
        fsdp.rl.save_batch(tmp_path / "batch.npz", Batch({"column": column}))
    assert list(tmp_path.iterdir()) == []


def test_numbers_in_another_order_of_bytes_are_kept(tmp_path):
    fsdp.rl.save_batch(tmp_path / "b.npz", Batch({"x": np.array([1.5, 2], ">f4")}))
    np.testing.assert_array_equal(
        fsdp.rl.load_batch(tmp_path / "b.npz").arrays["x"], [1.5, 2]
    )


def test_a_pickle_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path.joinpath("run").touch, ())

    np.savez(tmp_path / "evil.npz", x=np.array([Evil()], object))
    for name, data in (("text", b"x"), ("empty", b""), ("zip", b"PK\x03\x04")):
        (tmp_path / f"{name}.npz").write_bytes(data)
    for name in ("evil", "text", "empty", "zip"):
        with pytest.raises(ValueError, match=facts("save_batch", f"{name}.npz")):
            fsdp.rl.load_batch(tmp_path / f"{name}.npz")
    assert not (tmp_path / "run").exists()


# In one process


def test_one_process_gathers_what_it_has():
    assert fsdp.rl.allgather_dict_into_dict({"loss": jnp.float32(1.5), "x": [1]}) == {
        "loss": [1.5],
        "x": [[1]],
    }
    with pytest.raises(ValueError, match=facts("metrics", "list")):
        fsdp.rl.allgather_dict_into_dict([1])
    gathered = fsdp.rl.all_gather(batch(), fsdp.make_mesh(), "dp_shard")
    assert_same(gathered, batch())
    with pytest.raises(ValueError, match=facts("('pp', 'dp_outer'", "dp")):
        fsdp.rl.all_gather(batch(), fsdp.make_mesh(), "dp")
