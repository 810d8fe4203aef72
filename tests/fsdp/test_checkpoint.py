"""A checkpoint: the same bits on any mesh, whole or not at all, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers.errors import facts
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves
from fsdp_jax.checkpoint import _read
from fsdp_jax.checkpoint._leaf_names import is_key
from fsdp_jax.checkpoint._typed_json import decode, encode
from fsdp_jax.checkpoint._zarr import open_arrays

WIDTH = 8
TX = optax.adamw(1e-2)
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
STEPS = 2


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(jnp.tanh(self.linear(x))))


def loss(model, batch):
    return jnp.mean(model(batch) ** 2)


def plan_on(devices: int, *, make=lambda key: Block(nnx.Rngs(key)), **sizes):
    mesh = fsdp.make_mesh(devices=jax.devices()[:devices], **sizes)
    return fsdp.fully_shard(make, mesh)


def bits(tree) -> dict[str, np.ndarray]:
    """Every leaf on the host, keys as their words."""
    return {
        name: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        for name, leaf in named_leaves(tree)
    }


def assert_same_bits(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@dataclasses.dataclass
class Saved:
    """A run on eight devices.

    Attributes:
      path: Where its steps 1 and 2 are.
      step: Its compiled train step.
      bits: What was saved at step 2, by name.
      after: What the run had one step later.
    """

    path: str
    step: fsdp.training.TrainStep
    bits: dict[str, np.ndarray]
    after: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    path = str(tmp_path_factory.mktemp("run"))
    plan = plan_on(8)
    step = fsdp.make_train_step(plan, loss, TX)
    params = fsdp.init_params(plan, jax.random.key(0))
    state = fsdp.init_state(plan, TX, params, key=jax.random.key(3))
    for number in range(1, STEPS + 1):
        state, _ = step(state, X)
        fsdp.save(path, state, metadata={"at": number, "data": {"shard": [1, 2]}})
    before = bits(state)
    after, _ = step(state, X)
    return Saved(path, step, before, bits(after))


@pytest.mark.parametrize(
    "devices, sizes",
    [(8, {}), (4, {}), (2, {}), (1, {}), (8, {"dp_outer": 2}), (8, {"dp_outer": 8})],
    ids=["8", "4", "2", "1", "2 x 4", "8 replicas"],
)
def test_every_mesh_loads_the_same_bits_into_its_own_abstract_tree(
    saved, devices, sizes
):
    like = fsdp.abstract_state(plan_on(devices, **sizes), TX)
    state = fsdp.load(saved.path, like)
    assert_same_bits(bits(state), saved.bits)
    assert int(state.step) == STEPS
    for (name, leaf), (_, want) in zip(
        named_leaves(state), named_leaves(like), strict=True
    ):
        assert leaf.dtype == want.dtype, name  # keys come back typed
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim), name


def test_training_goes_on_as_if_it_had_never_stopped(saved):
    state = fsdp.load(saved.path, fsdp.abstract_state(saved.step.plan, TX))
    state, _ = saved.step(state, X)
    assert_same_bits(bits(state), saved.after)


def test_what_was_saved_did_change_and_has_every_sort_of_leaf(saved):
    names = " ".join(saved.bits)
    for part in (
        "step",
        "key",
        "params.linear.kernel",
        ".mu.",
        "norm.mean",
        "rngs.key",
    ):
        assert part in names
    assert not np.array_equal(saved.bits["params.linear.kernel"], np.zeros((8, 8)))
    assert any((saved.bits[n] != saved.after[n]).any() for n in saved.bits)


def test_an_older_step_can_be_asked_for(saved):
    like = fsdp.abstract_state(plan_on(1), TX)
    assert int(fsdp.load(saved.path, like, step=1).step) == 1
    assert fsdp.latest_step(saved.path) == STEPS


def test_parameters_alone_are_read_alone(saved, monkeypatch):
    read = []

    def watched(arrays, names):
        read.extend(names)
        return open_arrays(arrays, names)

    monkeypatch.setattr(_read, "open_arrays", watched)
    plan = plan_on(4)
    params = fsdp.checkpoint.load_params(saved.path, plan.params)
    want = {n: x for n, x in saved.bits.items() if n.startswith("params.")}
    assert_same_bits({f"params.{n}": x for n, x in bits(params).items()}, want)
    assert sorted(read) == sorted(want)
    fsdp.init_state(plan, optax.sgd(0.1), params)  # they lie as planned


def test_metadata_comes_back(saved):
    assert fsdp.checkpoint.load_metadata(saved.path) == {
        "at": 2,
        "data": {"shard": [1, 2]},
    }
    assert fsdp.checkpoint.load_metadata(saved.path, step=1)["at"] == 1


def test_a_chunk_that_eight_devices_need_is_read_once_into_their_memory(tmp_path):
    """A chunk from one device; then rows of it, and all of it, on eight."""
    one, eight = (fsdp.make_mesh(devices=jax.devices()[:n]) for n in (1, 8))
    values = np.random.default_rng(0).normal(size=(1024, 2048)).astype(np.float32)
    whole = NamedSharding(one, PartitionSpec())
    scalar = jax.device_put(jnp.int32(1), whole)
    params = {name: jax.device_put(values, whole) for name in ("rows", "all")}
    state = fsdp.TrainState(scalar, params, {}, {}, scalar, scalar)
    fsdp.save(tmp_path, state)

    def like(x, *spec):
        sharding = NamedSharding(eight, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    likes = jax.tree.map(like, state)
    likes.params["rows"] = like(params["rows"], "dp_shard")
    before = bytes_read()
    loaded = fsdp.load(tmp_path, likes)
    assert 1 <= (bytes_read() - before) / (2 * values.nbytes) < 1.1
    for leaf in loaded.params.values():
        np.testing.assert_array_equal(leaf, values)


def bytes_read() -> int:
    (line,) = [x for x in Path("/proc/self/io").read_text().splitlines() if "rch" in x]
    return int(line.split()[1])


def test_all_that_does_not_fit_is_named_before_anything_is_read(saved, monkeypatch):
    class Other(Block):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.linear = nnx.Linear(WIDTH, 16, use_bias=False, rngs=rngs)
            self.extra = nnx.Param(jnp.ones((WIDTH,)))

    def unread(*_, **__):
        raise AssertionError("the checkpoint was read")

    monkeypatch.setattr(_read, "open_arrays", unread)
    policy = fsdp.MixedPrecisionPolicy(main_params_dtype=jnp.bfloat16)
    mesh = fsdp.make_mesh()
    plan = fsdp.fully_shard(
        lambda key: Other(nnx.Rngs(key)), mesh, (), fsdp.FSDPConfig(mp_policy=policy)
    )
    with pytest.raises(ValueError) as error:
        fsdp.checkpoint.load_params(saved.path, plan.params)
    says = str(error.value)
    assert "does not fit in 5 place(s)" in says
    assert "not in the checkpoint: params.extra" in says
    assert "only in the checkpoint: params.linear.bias" in says
    kernel = "params.linear.kernel: stored float32[8, 8], wanted bfloat16[8, 16]"
    assert kernel in says
    assert "params.norm.scale: stored float32[8], wanted bfloat16[8]" in says


def test_another_optimizer_does_not_fit(saved):
    like = fsdp.abstract_state(plan_on(8), optax.sgd(0.1, momentum=0.9))
    with pytest.raises(
        ValueError,
        match=facts("opt_state.0.trace.linear.bias", "opt_state.0.mu.linear.bias"),
    ):
        fsdp.load(saved.path, like)


@pytest.mark.parametrize("read", [fsdp.load, fsdp.checkpoint.load_params])
def test_a_directory_without_steps_is_refused(tmp_path, read):
    like = {"w": jax.ShapeDtypeStruct((), jnp.float32)}
    with pytest.raises(ValueError, match=facts("absent'")):
        read(tmp_path / "absent", like)
    with pytest.raises(ValueError, match=facts(repr(str(tmp_path)))):
        read(tmp_path, like)
    with pytest.raises(ValueError, match=facts("absent'")):
        fsdp.checkpoint.load_metadata(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_a_step_that_is_not_there_is_refused_with_those_that_are(saved):
    like = fsdp.abstract_state(plan_on(1), TX)
    with pytest.raises(ValueError, match=facts("step 7", "1, 2")):
        fsdp.load(saved.path, like, step=7)


def test_an_empty_or_absent_directory_has_no_latest_step(tmp_path):
    assert fsdp.latest_step(tmp_path) is None
    assert fsdp.latest_step(tmp_path / "absent") is None


def small_state(step: int) -> fsdp.TrainState:
    return fsdp.TrainState(
        step=jnp.int32(step),
        params={"w": jnp.arange(8.0)},
        opt_state=(),
        model_state={},
        key=jax.random.key(0),
        num_skipped=jnp.int32(0),
    )


def test_a_step_that_was_cut_off_is_not_the_latest(tmp_path):
    fsdp.save(tmp_path, small_state(3))
    step = tmp_path / "3"
    # So orbax calls what it has not committed yet.
    shutil.copytree(step, tmp_path / "7.orbax-checkpoint-tmp")
    assert fsdp.latest_step(tmp_path) == 3
    with pytest.raises(ValueError, match=facts("step 7", "3")):
        fsdp.checkpoint.load_metadata(tmp_path, step=7)


def test_a_save_that_fails_leaves_no_step_behind(tmp_path, monkeypatch):
    fsdp.save(tmp_path, small_state(1))

    def fail(*_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.PyTreeCheckpointHandler, "finalize", fail)
        with pytest.raises(OSError, match=facts("disk")):
            fsdp.save(tmp_path, small_state(2))
    assert fsdp.latest_step(tmp_path) == 1
    fsdp.save(tmp_path, small_state(2))  # and does not stand in the way
    assert fsdp.latest_step(tmp_path) == 2


@pytest.mark.parametrize("step", [4, 3])
def test_a_committed_step_is_never_overwritten_nor_hidden(tmp_path, step):
    fsdp.save(tmp_path, small_state(4), metadata={"first": True})
    with pytest.raises(ValueError, match=facts("4", step)):
        fsdp.save(tmp_path, small_state(step))
    assert fsdp.latest_step(tmp_path) == 4
    assert fsdp.checkpoint.load_metadata(tmp_path) == {"first": True}


def test_two_leaves_of_one_name_are_refused_before_anything_is_written(tmp_path):
    twice = {"a.b": jnp.ones(8), "a": {"b": jnp.zeros(8)}}
    state = dataclasses.replace(small_state(0), params=twice)
    with pytest.raises(ValueError, match=facts("params.a.b")):
        fsdp.save(tmp_path / "run", state)
    assert not (tmp_path / "run").exists()


def test_a_relative_path_is_as_good(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fsdp.save("run", small_state(5))
    assert fsdp.latest_step("run") == fsdp.latest_step(tmp_path / "run") == 5


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_of_every_kind_come_back_typed(tmp_path, impl):
    keys = jax.random.split(jax.random.key(1, impl=impl), 3)
    state = dataclasses.replace(small_state(0), model_state={"keys": keys})
    fsdp.save(tmp_path, state)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state
    )
    loaded = fsdp.load(tmp_path, like)
    assert loaded.model_state["keys"].dtype == keys.dtype
    assert_same_bits(bits(loaded), bits(state))


def test_step_b_after_a_load_is_step_b_to_the_bit_with_schedule_and_remat(tmp_path):
    """As in verl tests/utils/test_fsdp_ckpt.py: A, save, B, load, B again."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 20)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    config = fsdp.FSDPConfig(remat_policy=jax.checkpoint_policies.nothing_saveable)
    plan = fsdp.fully_shard(
        lambda key: Block(nnx.Rngs(key)), fsdp.make_mesh(), (Block,), config
    )
    step = fsdp.make_train_step(plan, loss, tx)
    batches = np.random.default_rng(1).normal(size=(4, *X.shape)).astype(np.float32)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    for number in (0, 1):
        state, _ = step(state, batches[number])
    fsdp.save(tmp_path, state, metadata={"next_batch": 2})
    at_save = bits(state)
    state, metrics = step(state, batches[2])
    after, loss_b = bits(state), np.asarray(metrics["loss"])

    again = fsdp.load(tmp_path, fsdp.abstract_state(plan, tx))
    assert_same_bits(bits(again), at_save)
    again, metrics = step(
        again, batches[fsdp.checkpoint.load_metadata(tmp_path)["next_batch"]]
    )
    assert_same_bits(bits(again), after)
    np.testing.assert_array_equal(metrics["loss"], loss_b)
    other, _ = step(fsdp.load(tmp_path, fsdp.abstract_state(plan, tx)), batches[3])
    assert any((bits(other)[name] != after[name]).any() for name in after)


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats()
)
METADATA = st.dictionaries(
    st.text() | st.sampled_from(["__tuple__", "__bytes__", "__items__"]),
    st.recursive(
        SCALARS,
        lambda x: (
            st.lists(x)
            | st.lists(x).map(tuple)
            | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), x)
        ),
        max_leaves=8,
    ),
)


@given(METADATA)
def test_metadata_comes_back_as_it_was_tuples_bytes_and_keys_of_any_sort(metadata):
    text = json.dumps(encode(metadata))
    assert repr(decode(json.loads(text))) == repr(metadata)


@pytest.mark.parametrize(
    "value", [np.longdouble(1), {1, 2}, jnp.ones(2), object], ids=repr
)
def test_metadata_that_json_cannot_hold_is_refused_before_anything_is_written(
    tmp_path, value
):
    with pytest.raises(ValueError, match=facts("metadata['at'][1]")):
        fsdp.save(tmp_path / "run", small_state(1), metadata={"at": [0, value]})
    assert not (tmp_path / "run").exists()


STORED = (
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e4m3b11fnuz "
    "float8_e3m4 float8_e8m0fnu float4_e2m1fn int2 int4 int8 uint8 bool bfloat16 "
    "float16 complex64"
)


def test_leaves_of_every_dtype_come_back_to_the_bit(tmp_path):
    values = np.arange(1, 17)
    params = {name: jnp.asarray(values).astype(name) for name in STORED.split()}
    state = dataclasses.replace(small_state(0), params=params)
    fsdp.save(tmp_path, state)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    loaded = fsdp.load(tmp_path, like)
    for name, want in params.items():
        assert loaded.params[name].dtype == want.dtype
        got = np.asarray(loaded.params[name])
        assert got.tobytes() == np.asarray(want).tobytes(), name


def test_what_cannot_be_stored_is_named_before_anything_is_written(tmp_path):
    params = {"none": jnp.zeros((0, 3)), "four": jnp.zeros(8, jnp.uint4), "w": X}
    state = dataclasses.replace(small_state(0), params=params)
    with pytest.raises(ValueError) as error:
        fsdp.save(tmp_path / "run", state)
    says = str(error.value)
    assert "Cannot save 2 leaf/leaves" in says
    assert "params.none: no elements" in says and "params.four: dtype uint4" in says
    state = dataclasses.replace(small_state(0), opt_state={"count": 3})
    with pytest.raises(ValueError, match=facts("1", "opt_state.count")):
        fsdp.save(tmp_path / "run", state)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [True, 1.0, "1", "newest"])
def test_a_step_is_a_whole_number(saved, step):
    with pytest.raises(ValueError, match=facts(f"step={step!r}", "latest-good")):
        fsdp.load(saved.path, fsdp.abstract_state(plan_on(1), TX), step=step)


def test_what_is_no_run_is_refused_with_what_it_is(saved, tmp_path):
    like = fsdp.abstract_state(plan_on(1), TX)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ValueError, match=facts(str(file))):
        fsdp.load(file, like)
    for path in (file, file / "run"):
        with pytest.raises(ValueError, match=facts(str(path.parent))):
            fsdp.save(path, small_state(0))
        with pytest.raises(ValueError, match=facts(str(path.parent))):
            fsdp.Checkpointer(path)
    newest = fsdp.latest_step(saved.path)
    one = Path(saved.path, str(newest))
    with pytest.raises(ValueError, match=facts(saved.path, f"step={newest}")):
        fsdp.load(one, like)
    with pytest.raises(ValueError, match=facts("int", "abstract_state")):
        fsdp.load(saved.path, 3)


def test_what_an_earlier_save_left_unfinished_is_removed_by_the_next(tmp_path):
    fsdp.save(tmp_path, small_state(1))
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    fsdp.checkpoint.load_shapes(tmp_path)
    assert (tmp_path / "2.orbax-checkpoint-tmp").exists()  # reading removes nothing
    fsdp.save(tmp_path, small_state(2))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "1",
        "2",
    ]


def test_a_step_that_failed_in_another_process_is_not_in_the_way(tmp_path):
    """Orbax commits it all the same; here whoever should remove it was killed."""
    fsdp.save(tmp_path, small_state(1))
    shutil.copytree(tmp_path / "1", tmp_path / "2")
    (tmp_path / "2" / "state" / "manifest.json").rename(
        tmp_path / "2" / "state" / "failed"
    )
    assert fsdp.latest_step(tmp_path) == 1
    fsdp.save(tmp_path, small_state(2))
    assert fsdp.latest_step(tmp_path) == 2
