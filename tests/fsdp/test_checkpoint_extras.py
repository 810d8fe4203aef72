"""What is saved beside the state: iterators, any object, metadata, files."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import grain
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers.damage import flipped
from helpers.errors import facts
from helpers.saving_worker import like, state_at
from jax.sharding import NamedSharding, PartitionSpec

import fsdp_jax as fsdp


def batches(**read) -> grain.DatasetIterator:
    rows = grain.MapDataset.range(40).seed(3).shuffle().repeat().batch(4)
    return iter(rows.to_iter_dataset(grain.ReadOptions(**read)))


def loader() -> grain.DataLoaderIterator:
    """Grain's older sort, whose state is bytes."""
    sampler = grain.samplers.IndexSampler(
        40, grain.sharding.ShardOptions(0, 1), shuffle=True, num_epochs=2, seed=3
    )
    return iter(grain.DataLoader(data_source=range(40), sampler=sampler))


@dataclasses.dataclass
class Average:
    """An object of a user's own, in PyTorch's words: arrays and plain values."""

    weights: Any
    decay: float = 0.9
    seen: tuple[int, ...] = ()

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)


@dataclasses.dataclass
class Place:
    """Where one process stands; anything at all."""

    state: Any

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def rows() -> NamedSharding:
    return NamedSharding(fsdp.make_mesh(), PartitionSpec("dp_shard"))


def average(step: int) -> Average:
    weights = optax.EmaState(
        count=jnp.int32(step),
        ema={"w": jax.device_put(jnp.arange(16.0) * step, rows())},
    )
    return Average(weights, 0.5 + step, (step, step + 1))


@pytest.mark.parametrize(
    "make",
    [batches, lambda: batches(num_threads=1), loader],
    ids=["plain", "ahead", "loader"],
)
def test_an_iterator_of_grain_goes_on_where_it_stood(make, tmp_path):
    there = make()
    for _ in range(3):
        next(there)
    fsdp.save(tmp_path, state_at(1), extras={"data": there})
    want = [np.asarray(next(there)).tolist() for _ in range(4)]
    again = make()
    fsdp.load(tmp_path, like(), extras={"data": again})
    assert [np.asarray(next(again)).tolist() for _ in range(4)] == want
    assert [np.asarray(next(make())).tolist()] != want[:1]


def test_an_object_of_a_users_own_comes_back_with_its_arrays_as_they_lay(tmp_path):
    with fsdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_at(1), extras={"ema": (saved := average(3))})
        saved.seen = ()  # it may go on at once
    again = average(0)
    with fsdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.resume(like(), extras={"ema": again})
    assert (again.decay, again.seen) == (3.5, (3, 4))
    assert isinstance(again.weights, optax.EmaState) and int(again.weights.count) == 3
    loaded = again.weights.ema["w"]
    np.testing.assert_array_equal(loaded, np.arange(16.0) * 3)
    assert loaded.sharding.is_equivalent_to(rows(), 1)
    assert "extras.ema.weights.ema.w" in fsdp.checkpoint.load_shapes(tmp_path)


def test_the_object_of_a_step_that_fails_to_load_is_left_as_it_was(tmp_path):
    fsdp.save(tmp_path, state_at(1), extras={"ema": average(3)})
    again, wrong = average(1), dataclasses.replace(like(), params={})
    with pytest.raises(ValueError, match=facts("params.w")):
        fsdp.load(tmp_path, wrong, extras={"ema": again})
    (document,) = (tmp_path / "1").rglob("0.json")
    with flipped(document, 8 * document.read_bytes().index(b"3.5")):
        with pytest.raises(
            fsdp.checkpoint.DamagedCheckpointError, match=facts("extras/ema/0.json")
        ):
            fsdp.load(tmp_path, like(), extras={"ema": again})
    assert vars(again) == vars(again) | {"decay": 1.5, "seen": (1, 2)}


def test_strictness_counts_extras_as_leaves(tmp_path):
    fsdp.save(tmp_path, state_at(1), extras={"a": Place(1), "b": Place(2)})
    c = Place("as it was")
    with pytest.raises(ValueError) as error:
        fsdp.load(tmp_path, like(), extras={"a": Place(0), "c": c})
    assert "in 2 place(s)" in str(error.value)
    assert "only in the checkpoint: extras.b" in str(error.value)
    assert "not in the checkpoint: extras.c" in str(error.value)
    a = Place(0)
    loaded = fsdp.load(tmp_path, like(), extras={"a": a, "c": c}, strict="return_all")
    assert (loaded.missing, loaded.unexpected) == (("extras.b",), ("extras.c",))
    assert (a.state, c.state) == (1, "as it was")
    fsdp.checkpoint.load_params(tmp_path, like().params)  # which asks for no extras


@pytest.mark.parametrize(
    "state",
    [
        np.float32(0.1),
        np.bool_(True),
        ml_dtypes.bfloat16(3),
        np.arange(5, dtype=ml_dtypes.int4),
        np.array([1, 2], ml_dtypes.float8_e4m3fn).reshape(2, 1),
        np.zeros((0, 3), np.uint16),
        {"tuple": (1, b"\0\xff"), 3: [None, {"__tuple__": 1}], (1, 2): 2**70},
    ],
    ids=repr,
)
def test_what_a_state_is_made_of_comes_back_in_its_type(state, tmp_path):
    fsdp.save(
        tmp_path, state_at(1), metadata={"it": state}, extras={"it": Place(state)}
    )
    again = Place(None)
    fsdp.load(tmp_path, like(), extras={"it": again})
    for got in (again.state, fsdp.checkpoint.load_metadata(tmp_path)["it"]):
        assert type(got) is type(state) and repr(got) == repr(state)
        assert getattr(got, "dtype", None) == getattr(state, "dtype", None)


Named = collections.namedtuple("Named", "a")


@pytest.mark.parametrize(
    "extra, says",
    [
        (Place({"x": [0, {1}]}), ["extras.it['x'][1]", "set"]),
        (Place(Named(1)), ["extras.it", "Named"]),
        (Place(np.longdouble(1)), ["extras.it", "longdouble"]),
        (Place(np.array(["text"])), ["extras.it", "ndarray"]),
        (fsdp.checkpoint.PerProcess(Place(jnp.ones(2))), ["extras.it", "ArrayImpl"]),
        (3, ["it", "int", "get_state", "load_state_dict"]),
        (Place({"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}}), ["extras.it.a.b"]),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name_before_anything_is_written(
    extra, says, tmp_path
):
    with pytest.raises(ValueError, match=facts(*says)):
        fsdp.save(tmp_path / "run", state_at(1), extras={"it": extra})
    with pytest.raises(ValueError, match=facts("extras", "'no/word'")):
        fsdp.save(tmp_path / "run", state_at(1), extras={"no/word": Place(1)})
    assert not (tmp_path / "run").exists()


def test_arrays_for_which_the_object_has_no_abstract_tree_are_refused_by_name(tmp_path):
    fsdp.save(tmp_path, state_at(1), extras={"it": Place({"w": jnp.ones(2)})})
    with pytest.raises(ValueError, match=facts("extras.it.w")):
        fsdp.load(tmp_path, like(), extras={"it": Place({})})
    empty = Place({})
    with pytest.raises(ValueError, match=facts("extras.it.w")):
        fsdp.load(tmp_path, like(), extras={"it": empty}, strict="ignore_all")
    assert empty.state == {}


def test_what_was_saved_by_each_is_not_what_was_saved_for_all(tmp_path):
    own = fsdp.checkpoint.PerProcess(Place(1))
    fsdp.save(tmp_path, state_at(1), extras={"own": own, "one": Place(2)})
    with pytest.raises(
        ValueError, match=facts("extras.own", "fsdp_jax.checkpoint.PerProcess")
    ):
        fsdp.load(tmp_path, like(), extras={"own": Place(0), "one": Place(0)})
    with pytest.raises(ValueError, match=facts("extras.one", "PerProcess")):
        fsdp.load(
            tmp_path,
            like(),
            extras={"own": own, "one": fsdp.checkpoint.PerProcess(Place(0))},
        )


def contents(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_a_directory_of_files_is_copied_along_and_verified(tmp_path):
    source = tmp_path / "tokenizer"
    (source / "d").mkdir(parents=True)
    (source / "tokenizer.json").write_text("{}")
    (source / "d" / "manifest.json").write_text('{"of": "the tokenizer"}')
    one = tmp_path / "recipe.txt"
    one.write_text("lr 1")
    run = tmp_path / "run"
    files = {"tokenizer": source, "recipe": one, "both": [source / "d", one]}
    fsdp.save(run, state_at(1), files=files)
    carried = fsdp.checkpoint.load_files(run, "tokenizer")
    assert {
        p.relative_to(carried): p.read_bytes() for p in carried.rglob("*.json")
    } == {p.relative_to(source): p.read_bytes() for p in source.rglob("*.json")}
    assert (
        fsdp.checkpoint.load_files(run, "recipe") / "recipe.txt"
    ).read_text() == "lr 1"
    both = {
        path.as_posix() for path in contents(fsdp.checkpoint.load_files(run, "both"))
    }
    assert both == {"d/manifest.json", "recipe.txt"}
    fsdp.load(run, like())  # files are no state
    for name in ("tokenizer.json", "d/manifest.json"):
        with (
            flipped(carried / name, 9),
            pytest.raises(
                fsdp.checkpoint.DamagedCheckpointError,
                match=facts(f"files/tokenizer/{name}"),
            ),
        ):
            fsdp.checkpoint.load_files(run, "tokenizer")
    with pytest.raises(ValueError, match=facts("'vocab'", "both, recipe, tokenizer")):
        fsdp.checkpoint.load_files(run, "vocab")


def test_files_that_are_not_there_are_refused_before_anything_is_written(tmp_path):
    (tmp_path / "empty").mkdir()
    files = {"a": tmp_path / "empty", "b": tmp_path / "absent", "c/d": tmp_path}
    with pytest.raises(ValueError) as error:
        fsdp.save(tmp_path / "run", state_at(1), files=files)
    says = str(error.value)
    assert "'c/d' is not a word" in says and "a: '" in says and "b: '" in says
    assert not (tmp_path / "run").exists()
