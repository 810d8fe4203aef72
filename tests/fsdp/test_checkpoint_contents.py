"""What a step holds: each byte once, and enough beside the values to need none."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers.compiles import compilations
from helpers.damage import files_of
from helpers.errors import facts
from helpers.saving_worker import like, state_at
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.futures.future import CommitFuture
from tiny_configs import hf_fields

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._read import reshard
from fsdp_jax.cli import main

pytestmark = pytest.mark.versions

MANIFEST = 16_000  # bytes beside the values, of a state of a few leaves


def sharded(value, *spec) -> jax.Array:
    return jax.device_put(value, NamedSharding(fsdp.make_mesh(), PartitionSpec(*spec)))


def state_of(params, step: int = 1, **fields) -> fsdp.TrainState:
    empty = fsdp.TrainState(
        step=sharded(jnp.int32(step)),
        params=params,
        opt_state=(),
        model_state={},
        key=sharded(jax.random.key(0)),
        num_skipped=sharded(jnp.int32(0)),
    )
    return dataclasses.replace(empty, **fields)


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def size_of(run: Path) -> int:
    return sum(path.stat().st_size for path in files_of(run))


def bytes_of(state) -> int:
    return sum(
        leaf.nbytes for leaf in jax.tree.leaves(state) if hasattr(leaf, "nbytes")
    )


@pytest.mark.parametrize("spec", [(), ("dp_shard",), (None, "dp_shard")], ids=str)
def test_every_byte_is_stored_once_however_often_devices_hold_it(spec, tmp_path):
    state = state_of({"w": sharded(np.ones((512, 256), np.float32), *spec)})
    fsdp.save(tmp_path, state)
    assert 0 < size_of(tmp_path) - bytes_of(state) < MANIFEST


def test_a_train_state_holds_nothing_twice(tmp_path):
    """The main weights are the parameters, and bfloat16 is made of them each step."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    plan = fsdp.fully_shard(
        lambda key: {"w": jax.random.normal(key, (256, 128))},
        fsdp.make_mesh(),
        (),
        fsdp.FSDPConfig(mp_policy=policy),
    )
    tx = optax.adamw(1e-2)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    fsdp.save(tmp_path, state)
    one = 256 * 128 * 4
    assert 0 < size_of(tmp_path) - 3 * one < 2 * MANIFEST  # and Adam's two moments


def test_parts_that_are_exchanged_are_held_twice_for_one_array_at_a_time():
    mesh = fsdp.make_mesh()
    split = NamedSharding(mesh, PartitionSpec("dp_shard"))
    whole = NamedSharding(mesh, PartitionSpec())
    values = {name: np.arange(16.0) + i for i, name in enumerate("abc")}
    parts = {name: jax.device_put(x, split) for name, x in values.items()}
    parts["kept"] = jax.device_put(np.ones(8), whole)
    held = []

    class Wanted(dict):
        def __getitem__(self, name):
            held.append([n for n in "abc" if not parts[n].is_deleted()])
            return super().__getitem__(name)

    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in parts.items()}
    wanted = Wanted({n: x.update(sharding=whole) for n, x in shapes.items()})
    got = reshard(parts, wanted)
    assert held == [["a", "b", "c"], ["b", "c"], ["c"], []]
    for name, value in values.items():
        np.testing.assert_array_equal(got[name], value)
        assert got[name].sharding == whole
    assert got["kept"] is parts["kept"]


def test_of_a_view_into_a_large_array_only_the_view_is_stored(tmp_path):
    fsdp.save(tmp_path, state_of({"w": np.arange(2_000_000.0)[:10]}))
    assert size_of(tmp_path) < MANIFEST


def read_by_this_process() -> int:
    """Bytes that this process asked the kernel for so far."""
    counters = dict(
        line.split(": ") for line in Path("/proc/self/io").read_text().splitlines()
    )
    return int(counters["rchar"])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A step of 8 MB."""
    path = tmp_path_factory.mktemp("run")
    state = state_of({"w": sharded(np.ones((2048, 1024), np.float32), "dp_shard")})
    fsdp.save(path, state, metadata={"config": hf_fields("llama"), "at": (1, 2)})
    return path


@pytest.mark.parametrize(
    "look",
    [
        lambda run: fsdp.checkpoint.load_metadata(run)["at"] == (1, 2),
        lambda run: fsdp.checkpoint.load_shapes(run)["params.w"].shape == (2048, 1024),
        lambda run: main(["inspect", str(run)]) == 0,
        lambda run: fsdp.latest_step(run) == 1,
    ],
    ids=["load_metadata", "load_shapes", "inspect", "latest_step"],
)
def test_no_value_is_read_to_say_what_a_step_holds(run, look):
    assert look(run)  # what it imports is read now
    before = read_by_this_process()
    assert look(run)
    assert read_by_this_process() - before < 100_000
    before = read_by_this_process()
    fsdp.checkpoint.verify(run)
    assert read_by_this_process() - before > 8_000_000  # so reads are counted


def test_a_later_save_compiles_nothing_and_a_structure_that_changes_is_seen(tmp_path):
    """There is no plan to be agreed on, so none to be kept from save to save."""
    fsdp.save(tmp_path, state_at(1))
    second, third = state_at(2), state_of({"v": sharded(np.ones(8))}, 3)
    with compilations() as heard:
        fsdp.save(tmp_path, second)
    assert not [event for event in heard if "backend_compile" in event]
    fsdp.save(tmp_path, third)
    shapes = {
        step: fsdp.checkpoint.load_shapes(tmp_path, step=step) for step in (1, 2, 3)
    }
    assert shapes[1] == shapes[2] and "params.v" in shapes[3]
    assert "params.w" not in shapes[3]


@pytest.mark.parametrize(
    "wanted, said",
    [
        ("threefry2x32", ["uint32[4]", "uint32[2]"]),
        ("unsafe_rbg", ["rbg", "unsafe_rbg"]),
    ],
)
def test_keys_of_another_kind_are_refused_though_their_words_are_as_many(
    wanted, said, tmp_path
):
    """Keys of rbg and of unsafe_rbg are four words each, and other numbers."""
    state = state_of({}, key=sharded(jax.random.key(3, impl="rbg")))
    fsdp.save(tmp_path, state)
    other = dataclasses.replace(state, key=sharded(jax.random.key(3, impl=wanted)))
    with pytest.raises(ValueError, match=facts("key", *said)):
        fsdp.load(tmp_path, abstract(other))
    same = fsdp.load(tmp_path, abstract(state))
    assert same.key.dtype == state.key.dtype
    words = dataclasses.replace(state, key=jax.random.key_data(state.key))
    loaded = fsdp.load(tmp_path, abstract(words))  # as plain words, if one wants them
    np.testing.assert_array_equal(loaded.key, jax.random.key_data(state.key))


def test_a_list_of_another_length_is_refused_by_the_names_of_its_items(tmp_path):
    two = {"layers": [jnp.ones(2), jnp.ones(2)]}
    fsdp.save(tmp_path, state_of(two))
    three = state_of({"layers": [*two["layers"], jnp.ones(2)]})
    with pytest.raises(ValueError, match=facts("params.layers.2")):
        fsdp.load(tmp_path, abstract(three))
    one = state_of({"layers": two["layers"][:1]})
    with pytest.raises(ValueError, match=facts("params.layers.1")):
        fsdp.load(tmp_path, abstract(one))


def test_what_is_loaded_fills_the_structure_asked_for_whatever_saved_it(tmp_path):
    """Names are all that counts: a list, a tuple or a dict of numbers."""
    fsdp.save(tmp_path, state_of({"layers": [jnp.ones(2), jnp.zeros(2)]}))
    asked = state_of({"layers": {"0": jnp.zeros(2), "1": jnp.ones(2)}})
    loaded = fsdp.load(tmp_path, abstract(asked))
    np.testing.assert_array_equal(loaded.params["layers"]["0"], [1, 1])


def test_every_file_but_the_commit_markers_is_missed_when_it_is_gone(tmp_path):
    fsdp.save(tmp_path, state_at(1))
    directory = tmp_path / "1" / "state"
    files = [path for path in files_of(directory) if path.name != "commit_success.txt"]
    assert len(files) > 6
    for path in files:
        path.rename(tmp_path / "elsewhere")
        if path.name == "manifest.json":
            assert fsdp.latest_step(tmp_path) is None
        else:
            with pytest.raises(
                fsdp.checkpoint.DamagedCheckpointError, match=facts(path.name)
            ):
                fsdp.load(tmp_path, like())
        (tmp_path / "elsewhere").rename(path)
    fsdp.checkpoint.verify(tmp_path)


def test_a_step_of_orbax_alone_is_no_step_of_ours(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
        manager.wait_until_finished()
    assert fsdp.latest_step(tmp_path) is None
    with pytest.raises(ValueError, match=facts(repr(str(tmp_path)))):
        fsdp.load(tmp_path, like())


def test_parameters_come_in_the_dtype_asked_for_or_in_their_own(tmp_path):
    values = {
        "w": sharded(jnp.arange(8.0).astype(jnp.bfloat16)),
        "n": sharded(jnp.arange(2)),
    }
    fsdp.save(tmp_path, state_of(values))
    wide = {"w": abstract(sharded(jnp.zeros(8))), "n": abstract(values["n"])}
    with pytest.raises(
        ValueError, match=facts("params.w", "bfloat16[8]", "float32[8]")
    ):
        fsdp.checkpoint.load_params(tmp_path, wide)
    cast = fsdp.checkpoint.load_params(tmp_path, wide, cast="floats")
    stored = fsdp.checkpoint.load_params(tmp_path, wide, cast="as_stored")
    assert (cast["w"].dtype, stored["w"].dtype) == (jnp.float32, jnp.bfloat16)
    for loaded in (cast, stored):
        np.testing.assert_array_equal(loaded["w"].astype(jnp.float32), np.arange(8.0))
        assert loaded["n"].dtype == jnp.int32
    wide["n"] = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=wide["n"].sharding)
    with pytest.raises(ValueError, match=facts("params.n", "int32[2]", "float32[2]")):
        fsdp.checkpoint.load_params(tmp_path, wide, cast="as_stored")


def test_an_orbax_that_hangs_ends_in_an_error_and_the_next_save_works(
    tmp_path, monkeypatch
):
    async def hang(*_, **__):
        return [CommitFuture(asyncio.sleep(5))]

    with fsdp.Checkpointer(tmp_path, timeout_secs=1) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(ocp.type_handlers.ArrayHandler, "serialize", hang)
            checkpointer.save(1, state_at(1))
            with pytest.raises(RuntimeError, match=facts("Step 1", "ChainedFuture")):
                checkpointer.wait()
        checkpointer.save(2, state_at(2))
    assert fsdp.checkpoint.verify(tmp_path).step == 2
