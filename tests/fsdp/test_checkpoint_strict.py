"""What is stored and what is asked for differ as far as one says, and no further."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.errors import facts
from jax.sharding import NamedSharding, PartitionSpec

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._matching import may_differ
from fsdp_jax.sharding._padded import Padded

VOCAB, EMBED = 13, 8


def rows(mesh_size: int = 8) -> NamedSharding:
    mesh = fsdp.make_mesh(devices=jax.devices()[:mesh_size])
    return NamedSharding(mesh, PartitionSpec("dp_shard"))


def whole() -> NamedSharding:
    return NamedSharding(fsdp.make_mesh(), PartitionSpec())


def state_of(params, opt_state=()) -> fsdp.TrainState:
    def put(leaf):
        return jax.device_put(leaf, whole())

    return fsdp.TrainState(
        step=put(jnp.int32(4)),
        params=jax.tree.map(put, params),
        opt_state=jax.tree.map(put, opt_state),
        model_state={},
        key=put(jax.random.key(0)),
        num_skipped=put(jnp.int32(0)),
    )


def abstract(tree):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )


@pytest.fixture
def run(tmp_path):
    """Holds `params.a` and `params.b`; `asked` holds `params.a` and `params.c`."""
    fsdp.save(tmp_path, state_of({"a": jnp.arange(8.0), "b": jnp.ones(3)}))
    return tmp_path


@pytest.fixture
def asked() -> fsdp.TrainState:
    return state_of({"a": jnp.zeros(8), "c": jnp.full(2, 7.0)})


def assert_loaded(state):
    np.testing.assert_array_equal(state.params["a"], np.arange(8.0))
    np.testing.assert_array_equal(state.params["c"], [7.0, 7.0])  # as it was given
    assert int(state.step) == 4
    assert "b" not in state.params


@pytest.mark.parametrize(
    "strict, refuses",
    [
        ("assume_ok_unexpected", ["not in the checkpoint: params.c"]),
        ("raise_unexpected", ["not in the checkpoint: params.c"]),
        (
            "raise_all",
            ["not in the checkpoint: params.c", "only in the checkpoint: params.b"],
        ),
    ],
)
def test_modes_that_raise_name_what_they_refuse(run, asked, strict, refuses):
    with pytest.raises(ValueError) as error:
        fsdp.load(run, asked, strict=strict)
    says = str(error.value)
    assert f"does not fit in {len(refuses)} place(s)" in says
    assert all(message in says for message in refuses)


@pytest.mark.parametrize("strict, logs", [("log_unexpected", "c"), ("log_all", "bc")])
def test_modes_that_log_load_the_rest_and_say_what_is_left(
    run, asked, strict, logs, caplog
):
    with caplog.at_level(logging.WARNING, logger="fsdp_jax"):
        assert_loaded(fsdp.load(run, asked, strict=strict))
    said = "\n".join(r.getMessage() for r in caplog.records if r.name == "fsdp_jax")
    assert ("left as given, not in the checkpoint: params.c" in said) == ("c" in logs)
    assert ("not read, only in the checkpoint: params.b" in said) == ("b" in logs)


@pytest.mark.parametrize(
    "strict, missing",
    [("return_unexpected", ()), ("return_all", ("params.b",))],
)
def test_modes_that_return_load_the_rest_and_give_the_names(
    run, asked, strict, missing
):
    loaded = fsdp.load(run, asked, strict=strict)
    assert_loaded(loaded.state)
    assert (loaded.missing, loaded.unexpected) == (missing, ("params.c",))


def test_ignore_all_is_silent_and_loads_the_rest(run, asked, caplog):
    assert_loaded(fsdp.load(run, asked, strict="ignore_all"))
    assert not [r for r in caplog.records if r.name == "fsdp_jax"]


MODES = [
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "raise_all",
    "return_unexpected",
    "return_all",
    "ignore_all",
]


@pytest.mark.parametrize("strict", MODES)
def test_every_mode_loads_an_exact_match(run, strict, caplog):
    like = abstract(state_of({"a": jnp.zeros(8), "b": jnp.zeros(3)}))
    loaded = fsdp.load(run, like, strict=strict)
    if strict.startswith("return"):
        assert (loaded.missing, loaded.unexpected) == ((), ())
        loaded = loaded.state
    np.testing.assert_array_equal(loaded.params["a"], np.arange(8.0))
    np.testing.assert_array_equal(loaded.params["b"], np.ones(3))
    assert not [r for r in caplog.records if r.name == "fsdp_jax"]


@pytest.mark.parametrize("strict", MODES)
def test_no_mode_returns_a_leaf_without_a_value(run, asked, strict):
    with pytest.raises(ValueError, match=facts("params.c")):
        fsdp.load(run, abstract(asked), strict=strict)


def test_a_mode_that_does_not_exist_is_refused_with_those_that_do(run, asked):
    with pytest.raises(ValueError, match=facts("strict='lenient'", "raise_all")):
        fsdp.load(run, asked, strict="lenient")


def vocabulary(size: int, dtype=jnp.float32) -> jax.Array:
    values = jnp.arange(1, VOCAB * EMBED + 1, dtype=dtype).reshape(VOCAB, EMBED)
    return jnp.pad(values, ((0, max(0, size - VOCAB)), (0, 0)))[:size]


@pytest.fixture
def with_vocabulary(tmp_path):
    table = {"embed": {"embedding": vocabulary(VOCAB)}, "w": jnp.ones((4, 4))}
    fsdp.save(tmp_path, state_of(table, {"mu": table}))
    return tmp_path


@pytest.mark.parametrize("size", [VOCAB - 2, VOCAB + 3, 16], ids=["cut", "16", "even"])
def test_a_vocabulary_of_another_size_is_cut_or_filled_with_zeros(
    with_vocabulary, size
):
    table = {"embed": {"embedding": vocabulary(size)}, "w": jnp.ones((4, 4))}
    like = abstract(state_of(table, {"mu": table}))
    pattern = ["embed.embedding"]
    state = fsdp.load(with_vocabulary, like, allow_shape_mismatch=pattern)
    for part in (state.params, state.opt_state["mu"]):
        np.testing.assert_array_equal(part["embed"]["embedding"], vocabulary(size))
        np.testing.assert_array_equal(part["w"], np.ones((4, 4)))


@pytest.mark.parametrize("size", [11, 13, 19])
def test_a_padded_vocabulary_is_cut_or_filled_too_and_stays_zero_behind_its_end(
    with_vocabulary, size
):
    padded = 8 * -(-size // 8)
    value = jax.ShapeDtypeStruct((padded, EMBED), jnp.float32, sharding=rows())
    table = {"embed": {"embedding": vocabulary(VOCAB)}, "w": jnp.ones((4, 4))}
    like = abstract(state_of(table, {"mu": table}))
    like.params["embed"]["embedding"] = Padded(value, (size, EMBED))
    pattern = ["params.embed.embedding"] if size != VOCAB else []
    state = fsdp.load(with_vocabulary, like, allow_shape_mismatch=pattern)
    leaf = state.params["embed"]["embedding"]
    np.testing.assert_array_equal(leaf, vocabulary(size))
    assert leaf.value.sharding.is_equivalent_to(rows(), 2)
    assert not np.asarray(leaf.value)[size:].any()


def test_shapes_differ_only_where_it_is_allowed_and_never_in_rank(with_vocabulary):
    table = {"embed": {"embedding": vocabulary(16)}, "w": jnp.ones((4, 5))}
    like = abstract(state_of(table, {"mu": {**table, "w": jnp.ones((4, 4))}}))
    with pytest.raises(ValueError) as error:
        fsdp.load(with_vocabulary, like, allow_shape_mismatch=["embed.embedding"])
    says = str(error.value)
    assert "in 1 place(s)" in says
    assert "params.w: stored float32[4, 4], wanted float32[4, 5]" in says
    table["w"] = jnp.ones(16)
    like = abstract(state_of(table, {"mu": table}))
    with pytest.raises(
        ValueError, match=facts("params.w", "float32[4, 4]", "float32[16]")
    ):
        patterns = ["embed.embedding", "w"]
        fsdp.load(with_vocabulary, like, allow_shape_mismatch=patterns)


def test_a_pattern_that_names_no_leaf_is_refused(with_vocabulary):
    like = abstract(state_of({"embed": {"embedding": vocabulary(16)}}))
    with pytest.raises(ValueError, match=facts("allow_shape_mismatch", "'lm_head.*'")):
        fsdp.load(
            with_vocabulary,
            like,
            strict="ignore_all",
            allow_shape_mismatch=["embedding", "lm_head.*"],
        )


def test_a_pattern_matches_whole_components_at_the_end_of_a_name():
    assert may_differ("opt_state.0.mu.embed.embedding", ["embed.embedding"])
    assert may_differ("params.layers.3.b", ["layers.*.b"])
    assert not may_differ("params.embed.embedding", ["embed"])
    assert not may_differ("params.unembed.embedding", ["embed.embedding"])


FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]


@pytest.mark.parametrize("have", FLOATS)
@pytest.mark.parametrize("want", FLOATS)
def test_floats_are_cast_when_asked_as_jax_casts_them_and_never_otherwise(
    tmp_path, have, want
):
    values = jnp.array([1.0, 1.0009765625, -3.14159, 65504.0, 1e-7], have)
    fsdp.save(tmp_path, state_of({"w": values}))
    like = abstract(state_of({"w": values.astype(want)}))
    state = fsdp.load(tmp_path, like, cast="floats")
    assert state.params["w"].dtype == want
    np.testing.assert_array_equal(state.params["w"], values.astype(want))
    if have != want:
        with pytest.raises(
            ValueError,
            match=facts("params.w", f"{jnp.dtype(have)}[5]", f"{jnp.dtype(want)}[5]"),
        ):
            fsdp.load(tmp_path, like)


@pytest.mark.parametrize("cast", ["none", "Never", "float", None, False, jnp.float16])
def test_another_cast_is_refused(tmp_path, cast):
    state = state_of({"w": jnp.zeros(2)})
    fsdp.save(tmp_path, state)
    with pytest.raises(
        ValueError, match=facts(f"cast={cast!r}", "'never'", "'floats'")
    ):
        fsdp.load(tmp_path, abstract(state), cast=cast)


@pytest.mark.parametrize(
    "have, want", [("float32", "int32"), ("int32", "float32"), ("int32", "int8")]
)
def test_integers_are_never_cast(tmp_path, have, want):
    fsdp.save(tmp_path, state_of({"w": jnp.array([300, 1], have)}))
    like = abstract(state_of({"w": jnp.zeros(2, want)}))
    with pytest.raises(ValueError, match=facts("params.w", f"{have}[2]", f"{want}[2]")):
        fsdp.load(tmp_path, like, cast="floats")


def test_a_leaf_without_a_sharding_is_refused(run):
    like = abstract(state_of({"a": jnp.zeros(8), "b": jnp.zeros(3)}))
    like.params["a"] = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(ValueError, match=facts("params.a", "sharding")):
        fsdp.load(run, like)
