"""Checkpoints go both ways: stock Orbax's are loaded by rules, and it reads ours."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training import train_state
from helpers.errors import facts
from helpers.saving_worker import like, state_at
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp1

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves

pytestmark = pytest.mark.versions

TX = optax.adamw(1e-2)
W = np.arange(32.0, dtype=np.float32).reshape(8, 4)


@pytest.fixture(scope="module")
def mesh():
    return fsdp.make_mesh()


def sharded(mesh, tree):
    """The tree without values, its arrays split over all devices where they divide."""

    def one(x):
        split = x.ndim and x.shape[0] % mesh.size == 0
        spec = PartitionSpec("dp_shard" if split else None) if x.ndim else None
        sharding = NamedSharding(mesh, spec or PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(one, tree)


def assert_equal(got, want):
    got, want = dict(named_leaves(got)), dict(named_leaves(want))
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


def our_state(params):
    """A train state with other values than those that are stored."""
    zero = jnp.int32(0)
    return fsdp.TrainState(zero, params, TX.init(params), {}, jax.random.key(0), zero)


def save_tree(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def test_a_train_state_of_flax_becomes_a_train_state(tmp_path, mesh):
    model = nn.Dense(4)
    params = model.init(jax.random.key(1), W)["params"]
    theirs = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=TX)
    theirs = theirs.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))
    theirs = theirs.replace(step=jnp.int32(theirs.step))  # as from a jitted step
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(theirs))
    abstract = sharded(mesh, our_state(jax.tree.map(jnp.zeros_like, params)))
    # What flax does not have keeps its value.
    ours = dataclasses.replace(
        abstract, key=jax.random.key(7), num_skipped=jnp.int32(0)
    )
    got = fsdp.load(tmp_path, ours, rules=(), strict="return_all")
    assert got.missing == () and set(got.unexpected) == {"key", "num_skipped"}
    assert int(got.state.step) == 1
    assert_equal(got.state.params, theirs.params)
    assert_equal(got.state.opt_state, theirs.opt_state)
    assert got.state.params["kernel"].sharding.num_devices == mesh.size


def test_a_state_of_nnx_loses_the_names_of_its_variables(tmp_path, mesh):
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5))
    save_tree(tmp_path / "nnx", nnx.state(model, nnx.Param))
    want = {"params": nnx.to_pure_dict(nnx.state(model, nnx.Param))}
    stored = (r"^(.*?)(\.value)?$", r"params.\1")
    got = fsdp.load(tmp_path / "nnx", sharded(mesh, want), rules=[stored])
    assert_equal(got, want)


@pytest.mark.parametrize("zarr3", [False, True])
def test_the_layout_of_maxtext_is_loaded_by_one_rule(tmp_path, mesh, zarr3):
    decoder = {"layers": {"mlp": {"wi": {"kernel": W}}}, "norm": {"scale": W[0]}}
    tree = {"params": {"params": {"decoder": decoder}}, "step": np.int32(5)}
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=zarr3)
    with ocp.CheckpointManager(
        tmp_path, item_names=("items",), item_handlers={"items": handler}
    ) as manager:
        arguments = ocp.args.PyTreeSave(tree)
        for step in (2, 5):
            manager.save(step, args=ocp.args.Composite(items=arguments))
    want = {"params": decoder, "step": tree["step"]}
    rule = (r"^params\.params\.decoder\.", "params.")
    for step in (None, 2):
        got = fsdp.load(tmp_path, sharded(mesh, want), rules=[rule], step=step)
        assert_equal(got, want)
    with pytest.raises(ValueError, match=facts("step 3", "2, 5")):
        fsdp.load(tmp_path, sharded(mesh, want), rules=[rule], step=3)


def test_arrays_in_files_of_their_own_are_loaded_too(tmp_path, mesh):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "old", args=ocp.args.PyTreeSave({"a": {"w": W}}))
    want = {"w": W}
    got = fsdp.load(tmp_path / "old", sharded(mesh, want), rules=[("^a.", "")])
    assert_equal(got, want)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    path = tmp_path_factory.mktemp("stock") / "tree"
    save_tree(path, {"a": {"w": W}, "b": {"w": W + 1}, "n": np.int64(2**40)})
    return path


def test_rules_that_fit_nothing_or_join_two_arrays_are_refused(stock, mesh):
    abstract = sharded(mesh, {"w": W})
    with pytest.raises(ValueError, match=facts("a.w", "b.w", "'^z'", "3")):
        fsdp.load(stock, abstract, rules=[(r"^[ab]\.", ""), ("^z", "")])
    with pytest.raises(ValueError, match=facts("extras=['data']")):
        fsdp.load(stock, abstract, rules=[], extras={"data": {}})
    with pytest.raises(ValueError, match=facts("step 1", str(stock))):
        fsdp.load(stock, abstract, rules=[], step=1)


def test_what_is_left_out_and_what_does_not_fit_is_said(stock, mesh):
    drop = [("^b.*", ""), ("^n$", ""), ("^a.", "")]
    assert_equal(fsdp.load(stock, sharded(mesh, {"w": W}), rules=drop), {"w": W})
    with pytest.raises(ValueError, match=facts("b.w", "n")):
        fsdp.load(stock, sharded(mesh, {"a": {"w": W}}), rules=[])
    wrong = sharded(mesh, {"a": {"w": W[:4]}})
    with pytest.raises(ValueError, match=facts("a.w", "[8, 4]", "[4, 4]")):
        fsdp.load(stock, wrong, rules=[], strict="raise_unexpected")
    with pytest.raises(ValueError, match=facts("n", "int64", "int32")):
        one = sharded(mesh, {"n": np.int32(0)})
        fsdp.load(stock, one, rules=[], strict="raise_unexpected")


def test_two_items_of_a_step_must_be_told_apart(tmp_path, mesh):
    for item in ("model", "ema"):
        save_tree(tmp_path / "1" / item, {"w": W})
    abstract = sharded(mesh, {"w": W})
    with pytest.raises(ValueError, match=facts("ema, model", "2")):
        fsdp.load(tmp_path, abstract, rules=())
    assert_equal(fsdp.load(tmp_path / "1" / "ema", abstract, rules=()), {"w": W})
    with pytest.raises(ValueError, match=facts(str(tmp_path / "none"))):
        fsdp.load(tmp_path / "none", abstract, rules=())


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_stock_orbax_reads_our_steps(tmp_path):
    state = state_at(7)
    fsdp.save(tmp_path, state)
    want = {"params.w": state.params["w"], "opt_state.mu": state.opt_state["mu"]}
    readers = {
        "v0": lambda step: ocp.PyTreeCheckpointer().restore(step / "state"),
        "v1": lambda step: ocp1.load(step, checkpointable_name="state"),
    }
    for name, read in readers.items():
        got = read(tmp_path / "7")
        for leaf, value in want.items():
            np.testing.assert_array_equal(got[leaf], value, err_msg=name)
    assert fsdp.load(tmp_path, like()).params["w"].shape == state.params["w"].shape
