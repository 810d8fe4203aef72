"""Rules: every operation is exact both ways, and a check that sees everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.errors import facts
from safetensors import numpy as reference

from bridge import Mapping, Rule, open_checkpoint
from bridge._report import fold_numbers
from bridge.streaming._load import load

SIZES = {"layer": 3, "expert": 2, "q": 8, "k": 4, "embed": 6, "mlp": 5}
SPLIT = Rule(
    "h.{layer}.qkv.weight",
    ("layers.q.kernel", "layers.k.kernel", "layers.v.kernel"),
    ("q embed -> embed q", "k embed -> embed k", "k embed -> embed k"),
)
CONCATENATE = Rule(
    ("h.{layer}.mlp.{expert}.gate", "h.{layer}.mlp.{expert}.up"),
    "layers.mlp.gate_up",
    "mlp embed -> embed mlp",
    dim=1,
)
MAPPING = Mapping((SPLIT, CONCATENATE), SIZES)


@pytest.fixture
def tensors(tmp_path) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    tensors = {
        key: random.normal(size=parts[0].source_shape).astype(np.float32)
        for key, parts in MAPPING.by_source().items()
    }
    reference.save_file(tensors, tmp_path / "model.safetensors")
    return tensors


def like(**changes):
    shapes = {k: p[0].destination_shape for k, p in MAPPING.by_destination().items()}
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in (shapes | changes).items()
        if shape is not None
    }


def test_split_and_concatenate_and_stack_put_every_part_in_its_place(tmp_path, tensors):
    leaves = load(open_checkpoint(tmp_path), MAPPING, like())
    qkv = tensors["h.1.qkv.weight"]
    for name, part in zip("qkv", np.split(qkv, [8, 12]), strict=True):
        np.testing.assert_array_equal(leaves[f"layers.{name}.kernel"][1], part.T)
    gate, up = tensors["h.2.mlp.1.gate"], tensors["h.2.mlp.1.up"]
    expected = np.concatenate([gate.T, up.T], axis=1)
    np.testing.assert_array_equal(leaves["layers.mlp.gate_up"][2, 1], expected)


# A head of keys, with two of queries, at a time.
BY_GROUP = Mapping(
    (
        Rule(
            "qkv.weight",
            ("q.kernel", "k.kernel", "v.kernel"),
            (
                "(group two d) embed -> embed (group two) d",
                *("(group d) embed -> embed group d",) * 2,
            ),
            repeat="group",
        ),
    ),
    {"group": 4, "two": 2, "d": 3, "embed": 6},
)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_that_come_again_for_each_head_are_told_apart(tmp_path, parts):
    qkv = np.random.default_rng(0).normal(size=(4, 4, 3, 6)).astype(np.float32)
    tensors = {"qkv.weight": qkv.reshape(48, 6)}
    reference.save_file(tensors, tmp_path / "model.safetensors")
    mesh = jax.make_mesh((parts,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    by_head = jax.NamedSharding(mesh, jax.P(None, "x"))
    shapes = {n: p[0].destination_shape for n, p in BY_GROUP.by_destination().items()}
    wanted = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=by_head)
        for name, shape in shapes.items()
    }
    leaves = load(open_checkpoint(tmp_path), BY_GROUP, wanted)
    for name, rows in {"q": qkv[:, :2], "k": qkv[:, 2:3], "v": qkv[:, 3:]}.items():
        expected = rows.reshape(-1, 3, 6).transpose(2, 0, 1)
        np.testing.assert_array_equal(leaves[f"{name}.kernel"], expected)
    back = np.empty_like(tensors["qkv.weight"])
    for piece in BY_GROUP.by_source()["qkv.weight"]:
        leaf = np.asarray(leaves[piece.destination])
        section = leaf[tuple(slice(*r) for r in piece.inner_box)]
        back[tuple(slice(*r) for r in piece.source_box)] = piece.to_source(section)
    np.testing.assert_array_equal(back, tensors["qkv.weight"])


def test_a_part_comes_again_for_a_factor_that_leads_its_dims_alone():
    for layout in ("(d group) e -> e group d", "(group d) e -> e (d group)"):
        with pytest.raises(ValueError, match=facts("group", "dim 0")):
            Rule("a", ("b", "c"), (layout, layout), repeat="group")


def test_shards_of_split_and_concatenated_leaves_are_cut_right(tmp_path, tensors):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    source = open_checkpoint(tmp_path)
    whole = load(source, MAPPING, like())
    across = like()
    for name, leaf in across.items():  # the last dim: gate_up is cut at 5 of 10
        spec = jax.P(*[None] * (leaf.ndim - 1), "x")
        across[name] = leaf.update(sharding=jax.NamedSharding(mesh, spec))
    cut = load(source, MAPPING, across)
    jax.tree.map(np.testing.assert_array_equal, whole, cut)


def test_every_rule_can_be_followed_backwards(tmp_path, tensors):
    leaves = load(open_checkpoint(tmp_path), MAPPING, like())
    for key, parts in MAPPING.by_source().items():
        tensor = np.full_like(tensors[key], np.nan)
        for part in parts:
            box = tuple(slice(*r) for r in part.destination_box)
            section = np.asarray(leaves[part.destination])[box]
            tensor[tuple(slice(*r) for r in part.source_box)] = part.to_source(section)
        np.testing.assert_array_equal(tensor, tensors[key])


def test_one_error_lists_all_that_is_wrong_and_reads_nothing(
    tmp_path, tensors, monkeypatch
):
    del tensors["h.0.qkv.weight"]
    tensors["h.1.mlp.0.up"] = np.ones((5, 7), np.float32)
    tensors["h.2.mlp.0.up"] = tensors["h.2.mlp.0.up"].astype(np.int32)
    tensors |= {f"h.{i}.stray": np.ones(2, np.float32) for i in (0, 1, 2, 5)}
    reference.save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr("os.preadv", lambda *_: pytest.fail("data were read"))
    mapping = Mapping((*MAPPING.rules, SPLIT), SIZES)
    wrong = like(**{"layers.q.kernel": (3, 6, 9), "layers.k.kernel": None, "x": (2,)})
    with pytest.raises(ValueError) as error:
        load(open_checkpoint(tmp_path), mapping, wrong)
    for line in (
        "covered by more than one rule (6):\n    tensor h.{0-2}.qkv.weight",
        "missing in the tree (1):\n    layers.k.kernel",
        "unexpected in the tree (1):\n    x",
        "of another shape in the tree (1):\n"
        "    layers.q.kernel: (3, 6, 9), the config says (3, 6, 8)",
        "missing in the checkpoint (1):\n    h.0.qkv.weight",
        "unexpected in the checkpoint (4):\n    h.{0-2,5}.stray",
        "of another shape in the checkpoint (1):\n    h.1.mlp.0.up: (5, 7), the",
        "h.2.mlp.0.up: int32, the tree wants float32",
    ):
        assert line in str(error.value)


def test_ignored_tensors_are_not_unexpected(tmp_path, tensors):
    tensors |= {"h.0.mask": np.ones(1, bool), "h.12.mask": np.ones(1, bool)}
    reference.save_file(tensors, tmp_path / "model.safetensors")
    source = open_checkpoint(tmp_path)
    Mapping(MAPPING.rules, SIZES, ignore=("h.{layer}.mask",)).check(like(), source)
    with pytest.raises(ValueError, match=facts("h.{0,12}.mask", "(2)")):
        Mapping(MAPPING.rules, SIZES, ignore=("h.{layer}.mas",)).check(like(), source)


@pytest.mark.parametrize(
    "source, destination, layout, dim, match",
    [
        (("a", "b"), ("c", "d"), "x -> x", 0, ["2 sources", "2 destinations"]),
        (("a", "a"), "c", "x -> x", 0, ["['a']"]),
        (("a", "b"), "c", ("x -> x",) * 3, 0, ["3", "2"]),
        (("a", "b"), "c", "x y -> (x y)", 1, ["dim 1"]),
        (("a.{i}", "b"), "c", "x -> x", 0, ["('a.{i}', 'b')", "{names}"]),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(source, destination, layout, dim, match):
    with pytest.raises(ValueError, match=facts(*match)):
        Rule(source, destination, layout, dim)


def test_a_dim_without_a_size_is_refused():
    with pytest.raises(ValueError, match=facts("['expert', 'mlp']", "sizes")):
        Mapping(MAPPING.rules, {k: SIZES[k] for k in ("layer", "q", "k", "embed")})


def test_lines_that_differ_in_path_numbers_are_folded():
    lines = [f"m.{i}.e.{j}.w: odd" for i in (0, 1, 2, 7) for j in range(3)] + ["n.1.w"]
    assert fold_numbers(lines) == ["m.{0-2,7}.e.{0-2}.w: odd", "n.1.w"]
