"""Every layout to every other, bit by bit, under names that no layout enters."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.zoo import CASES
from jax.sharding import NamedSharding, PartitionSpec
from tiny_configs import FAMILIES, hf_fields

import bridge
import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves
from fsdp_jax.checkpoint._leaf_names import flatten, is_key
from fsdp_jax.checkpoint._zarr import zarr_metadata
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.sharding._padded import Padded

TX = optax.adamw(1e-2)
# name -> (zero_dp_strategy, outer_dp_sharding_strategy, devices on dp_outer)
STRATEGIES = {
    "no_shard": (0, 0, 1),
    "optim": (1, 0, 1),
    "optim_grads": (2, 0, 1),
    "optim_grads_params": (3, 0, 1),
    "HSDP": (3, 0, 2),
    "HFSDP": (3, 1, 2),
}
LAYOUTS = [
    (name, devices)
    for name, (_, _, outer) in STRATEGIES.items()
    for devices in (8, 4, 2, 1)
    if devices >= outer
]
REGISTERED = [*CASES, "odd shapes", "llama"]
KEYS = Path(__file__).parent / "checkpoint_keys.json"


def make_model(key):
    """Even and odd shapes, a stack of layers, and a scalar."""
    del key
    return {
        "even": jnp.zeros((16, 24)),
        "odd": jnp.zeros((13, 17)),
        "odd_bias": jnp.zeros(5),
        "layers": jnp.zeros((3, 8, 7), jnp.bfloat16),
        "scale": jnp.zeros(()),
    }


def like_of(layout: tuple[str, int]) -> fsdp.TrainState:
    name, devices = layout
    inner, outer, dp_outer = STRATEGIES[name]
    mesh = fsdp.make_mesh(devices=jax.devices()[:devices], dp_outer=dp_outer)
    config = fsdp.FSDPConfig(zero_dp_strategy=inner, outer_dp_sharding_strategy=outer)
    return fsdp.abstract_state(fsdp.fully_shard(make_model, mesh, (), config), TX)


def filled(like: fsdp.TrainState) -> fsdp.TrainState:
    """Numbers that are nowhere equal, each leaf's from its name alone."""
    leaves = [_filled(name, leaf) for name, leaf in named_leaves(like)]
    treedef = jax.tree.structure(like, is_leaf=lambda n: isinstance(n, Padded))
    return treedef.unflatten(leaves)


def _filled(name: str, leaf):
    value = leaf.value if isinstance(leaf, Padded) else leaf
    rng = np.random.default_rng(list(name.encode()))
    if is_key(leaf):
        return jax.device_put(jax.random.key(7), leaf.sharding)
    padded = np.zeros(value.shape)
    padded[tuple(map(slice, leaf.shape))] = rng.normal(size=leaf.shape) ** 2 * 1000
    array = jax.device_put(padded.astype(leaf.dtype), value.sharding)
    return Padded(array, leaf.shape) if isinstance(leaf, Padded) else array


def bits(state) -> dict[str, bytes]:
    return {
        name: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf).tobytes()
        for name, leaf in named_leaves(state)
    }


@pytest.fixture(scope="module")
def canonical() -> dict[str, bytes]:
    """What every layout holds."""
    return bits(filled(like_of(("no_shard", 1))))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_from_every_layout_to_one_and_back_bit_by_bit(layout, canonical, tmp_path):
    like, one = like_of(layout), like_of(("no_shard", 1))
    fsdp.save(tmp_path / "there", filled(like))
    plain = fsdp.load(tmp_path / "there", one)
    assert bits(plain) == canonical
    fsdp.save(tmp_path / "back", plain)
    again = fsdp.load(tmp_path / "back", like)
    assert bits(again) == canonical
    assert_placed(again, like)


def assert_placed(state, like):
    """Each leaf in its sharding, and zeros behind the end of what is padded."""
    for leaf, want in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert leaf.dtype == want.dtype and leaf.shape == want.shape
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)
    for _, leaf in named_leaves(state):
        if isinstance(leaf, Padded):
            assert np.count_nonzero(leaf.value) <= np.prod(leaf.shape)


@pytest.mark.long
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_from_every_layout_to_every_other_bit_by_bit(source, canonical, tmp_path):
    fsdp.save(tmp_path, filled(like_of(source)))
    for target in LAYOUTS:
        like = like_of(target)
        state = fsdp.load(tmp_path, like)
        assert bits(state) == canonical, target
        assert_placed(state, like)


def test_the_grid_has_padded_leaves_and_layouts_without():
    def num_padded(layout):
        return sum(isinstance(x, Padded) for _, x in named_leaves(like_of(layout)))

    assert num_padded(("optim_grads_params", 8)) == 6  # two, and their moments
    assert num_padded(("no_shard", 8)) == 0


def test_a_padded_leaf_is_written_by_its_slices_and_has_its_logical_shape(tmp_path):
    state = filled(like_of(("optim_grads_params", 8)))
    fsdp.save(tmp_path, state)
    step = tmp_path / str(int(state.step))
    stored = zarr_metadata(step / "state")["params.odd"]
    value = state.params["odd"].value
    assert tuple(stored["shape"]) == (13, 17)
    assert value.shape != (13, 17)
    chunks = tuple(stored["chunk_grid"]["configuration"]["chunk_shape"])
    assert chunks == value.sharding.shard_shape(value.shape)
    assert fsdp.checkpoint.load_shapes(tmp_path)["params.odd"].shape == (13, 17)


# name -> (sizes of the mesh, how an array of shape (16, 24) lies on it)
AXES = {
    "2 x tp 4": ({"dp_shard": 2, "tp": 4}, ("dp_shard", "tp")),
    "4 x tp 2": ({"dp_shard": 4, "tp": 2}, ("tp", "dp_shard")),
    "4 x tp 2, one dim": ({"dp_shard": 4, "tp": 2}, (("dp_shard", "tp"),)),
    "2 x ep 4": ({"dp_shard": 2, "ep": 4}, ("ep", "dp_shard")),
    "ep 8": ({"dp_shard": 1, "ep": 8}, (None, ("dp_shard", "ep"))),
}


def like_over(axes: str) -> dict[str, jax.ShapeDtypeStruct]:
    sizes, spec = AXES[axes]
    sharding = NamedSharding(fsdp.make_mesh(**sizes), PartitionSpec(*spec))
    return {"w": jax.ShapeDtypeStruct((16, 24), jnp.float32, sharding=sharding)}


@pytest.mark.parametrize("source, target", list(itertools.permutations(AXES, 2)))
def test_tensor_and_expert_axes_reshard_too(source, target, tmp_path):
    params = {"w": _filled("w", like_over(source)["w"])}
    zero = jnp.int32(0)
    state = fsdp.TrainState(zero, params, (), {}, jax.random.key(0), zero)
    fsdp.save(tmp_path, state)
    like = like_over(target)
    loaded = fsdp.checkpoint.load_params(tmp_path, like)
    assert bits(loaded) == bits(params)
    assert loaded["w"].sharding == like["w"].sharding


SPECS = [(), ("dp_shard",), (None, "dp_shard")]


@pytest.mark.parametrize("source, target", list(itertools.permutations(SPECS, 2)))
def test_an_optimizer_may_lie_otherwise_than_its_parameters(source, target, tmp_path):
    def split(params, moments):
        def like(spec):
            sharding = NamedSharding(fsdp.make_mesh(), PartitionSpec(*spec))
            return jax.ShapeDtypeStruct((16, 24), jnp.float32, sharding=sharding)

        whole = NamedSharding(fsdp.make_mesh(), PartitionSpec())
        scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        return fsdp.TrainState(
            scalar, {"w": like(params)}, {"mu": like(moments)}, {}, scalar, scalar
        )

    state = filled(split(source, target))
    fsdp.save(tmp_path, state)
    like = split(target, source)
    loaded = fsdp.load(tmp_path, like)
    assert bits(loaded) == bits(state)
    assert_placed(loaded, like)


def plan_of(case: str) -> fsdp.Plan:
    if case in CASES:
        return CASES[case].plan(fsdp.make_mesh())
    if case == "odd shapes":
        return fsdp.fully_shard(make_model, fsdp.make_mesh())
    return plan_decoder(bridge.from_hf_config(hf_fields(case)), fsdp.make_mesh())


def keys_of(case: str) -> list[str]:
    plan = plan_of(case)
    return [
        f"{name} {leaf.value.dtype}{list(leaf.shape)}"
        for name, leaf in flatten(fsdp.abstract_state(plan, TX)).items()
    ]


@pytest.mark.parametrize("case", REGISTERED)
def test_names_on_disk_are_those_of_the_list(case):
    """Whoever changes one makes every checkpoint written so far unreadable."""
    assert keys_of(case) == json.loads(KEYS.read_text())[case]


def families_keys(family: str) -> list[str]:
    """Of a family the names alone: its optimizer repeats them."""
    return [name for name, _ in named_leaves(plan_of(family).params)]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_every_family_have_the_names_of_the_list(family):
    assert families_keys(family) == json.loads(KEYS.read_text())["families"][family]


def test_the_list_has_every_kind_of_model_and_every_family():
    listed = json.loads(KEYS.read_text())
    assert listed.keys() == {*REGISTERED, "families"}
    assert listed["families"].keys() == set(FAMILIES)


if __name__ == "__main__":  # writes the list anew
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    names = {case: keys_of(case) for case in REGISTERED}
    names |= {"families": {family: families_keys(family) for family in FAMILIES}}
    KEYS.write_text(json.dumps(names, indent=1) + "\n")
