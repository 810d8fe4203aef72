"""LoRA adapters of PEFT: merged as weights are read, or kept beside them; and back."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from bridge_helpers import (
    abstract_model,
    assert_same_bytes,
    assert_same_leaves,
    like_of,
    logits_of,
    tensors_of,
)
from flax import nnx
from helpers.errors import facts
from safetensors import numpy as safetensors
from tiny_models import hf_logits, make_model
from transformers import AutoModelForCausalLM

import bridge
from bridge.lora._lora_merge import merge_lora
from bridge.lora._lora_source import open_lora

pytestmark = pytest.mark.torch

# Of the largest logit: two float32 programs that sum in other orders.
TOLERANCE = 2e-5

MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "someone/llama",
    "r": 4,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "o_proj", "down_proj"],
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "init_lora_weights": True,
    "modules_to_save": None,
    "layer_replication": None,
    "loftq_config": {},
    "qalora_group_size": 16,
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("base"), "llama")


@pytest.fixture(scope="module")
def shapes(hf) -> dict[str, tuple[int, ...]]:
    source = bridge.open_checkpoint(hf.path)
    return {key: source.shape(key) for key in source.keys()}


def factors(shapes, modules=MODULES, rank=4, dtype=np.float32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    tensors = {}
    for key, shape in shapes.items():
        module = key.removesuffix(".weight")
        if module.endswith(modules):
            rows, columns = shape
            name = f"base_model.model.{module}.lora"
            a, b = (rank, columns), (rows, rank)
            tensors[f"{name}_A.weight"] = random.normal(size=a).astype(dtype) / 8
            tensors[f"{name}_B.weight"] = random.normal(size=b).astype(dtype) / 8
    return tensors


def write(path: Path, tensors, **fields) -> Path:
    path.mkdir()
    safetensors.save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | fields))
    return path


def merged_by_torch(hf, tensors, scale_of) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(hf.path).eval()
    state = model.state_dict()
    for key in tensors:
        if key.endswith("lora_A.weight"):
            module = key.removeprefix("base_model.model.").removesuffix(
                ".lora_A.weight"
            )
            a, b = (
                torch.from_numpy(tensors[key.replace("_A.", f"_{x}.")]) for x in "AB"
            )
            state[f"{module}.weight"] += scale_of(module) * b @ a
    return model


def merged_logits(hf, path) -> np.ndarray:
    config = bridge.from_hf_config(hf.path)
    graph, like = nnx.split(abstract_model(config))
    filled = bridge.load_hf_with_lora(hf.path, path, like)
    return np.asarray(logits_of(nnx.merge(graph, filled), hf.tokens))


def error(ours, theirs) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def by_pattern(module: str) -> float:
    if module.endswith("q_proj"):
        return 8 / 4
    return (2 if module == "model.layers.1.mlp.down_proj" else 16) / 4


PATTERNS = {"alpha_pattern": {"q_proj": 8, "layers.1.mlp.down_proj": 2}}
SCALES = {
    "plain": ({}, lambda module: 16 / 4),
    "rslora": ({"use_rslora": True}, lambda module: 16 / 4**0.5),
    "patterns": (PATTERNS, by_pattern),
}


@pytest.mark.parametrize("name", list(SCALES))
def test_logits_of_a_merged_model_are_those_of_the_sum(hf, shapes, tmp_path, name):
    fields, scale_of = SCALES[name]
    tensors = factors(shapes)
    path = write(tmp_path / "lora", tensors, **fields)
    theirs = hf_logits(merged_by_torch(hf, tensors, scale_of), hf.tokens)
    ours = merged_logits(hf, path)
    assert error(ours, theirs) <= TOLERANCE
    assert error(hf.logits, theirs) > 100 * TOLERANCE  # the adapter matters
    unscaled = hf_logits(merged_by_torch(hf, tensors, lambda _: 1), hf.tokens)
    assert error(ours, unscaled) > 100 * TOLERANCE  # and so does its scale


def test_factors_beside_the_weights_are_laid_out_like_them(hf, shapes, tmp_path):
    path = write(tmp_path / "lora", factors(shapes), **PATTERNS)
    config = bridge.from_hf_config(hf.path)
    lora = bridge.load_lora(path, config)
    base = bridge.load_hf(hf.path, like_of(config))
    merged = bridge.load_hf_with_lora(hf.path, path, like_of(config))
    base, merged = (dict(_named(tree)) for tree in (base, merged))
    assert set(lora.factors) == {f"layers.{module}.kernel" for module in MODULES}
    for leaf, pair in lora.factors.items():
        for layer, scale in enumerate(lora.scales[leaf]):
            delta = jnp.tensordot(pair["lora_a"][layer], pair["lora_b"][layer], 1)
            difference = merged[leaf][layer] - base[leaf][layer]
            np.testing.assert_allclose(difference, scale * delta, rtol=0, atol=1e-5)
            assert np.abs(delta).max() > 0.01
    untouched = set(base) - set(lora.factors)
    assert_same_leaves(*({k: t[k] for k in untouched} for t in (merged, base)))


def _named(tree):
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path[:-1], simple=True, separator="."), leaf


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_adapter_returns_bit_by_bit(hf, shapes, tmp_path, dtype):
    tensors = factors(shapes, dtype=dtype)
    path = write(tmp_path / "lora", tensors, use_rslora=True)
    config = bridge.from_hf_config(hf.path)
    bridge.save_lora(tmp_path / "out", bridge.load_lora(path, config), config)
    again = tensors_of(tmp_path / "out" / "adapter_model.safetensors")
    assert_same_bytes(again, tensors)
    fields = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert fields == CONFIG | {"use_rslora": True}


def test_adapters_of_old_are_read_without_running_their_pickle(hf, shapes, tmp_path):
    tensors = factors(shapes)
    config = bridge.from_hf_config(hf.path)
    theirs = bridge.load_lora(write(tmp_path / "new", tensors), config)
    path = write(tmp_path / "old", tensors)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=facts("adapter_model.safetensors")):
        bridge.load_lora(path, config)
    state = {key: torch.from_numpy(value) for key, value in tensors.items()}
    torch.save(state, path / "adapter_model.bin")
    assert_same_leaves(bridge.load_lora(path, config).factors, theirs.factors)


def test_factors_that_were_trained_here_are_an_adapter_of_peft(hf, shapes, tmp_path):
    config = bridge.from_hf_config(hf.path)
    path = write(tmp_path / "lora", factors(shapes))
    theirs = bridge.load_lora(path, config)
    ours = bridge.Lora(bridge.LoraConfig(4, 16), theirs.factors, theirs.scales)
    bridge.save_lora(tmp_path / "out", ours, config)
    again = bridge.load_lora(tmp_path / "out", config)
    assert_same_leaves(again.factors, theirs.factors)
    assert again.config.scale("model.layers.0.mlp.down_proj") == 4
    fields = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert sorted(fields["target_modules"]) == ["down_proj", "o_proj", "q_proj"]
    wrong = bridge.Lora(bridge.LoraConfig(5, 16), theirs.factors, theirs.scales)
    with pytest.raises(
        ValueError,
        match=facts(
            "layers.self_attn.q_proj.kernel.lora_a", "(3, 48, 4)", "(3, 48, 5)"
        ),
    ):
        bridge.save_lora(tmp_path / "wrong", wrong, config)
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(
    "read, written",
    [
        (["q_proj"], ["q_proj", "down_proj", "o_proj"]),
        ("all-linear", "all-linear"),
        (r".*\.(q_proj|o_proj|down_proj)", r".*\.(q_proj|o_proj|down_proj)"),
    ],
)
def test_an_adapter_that_grew_names_all_that_it_adapts(
    hf, shapes, tmp_path, read, written
):
    config = bridge.from_hf_config(hf.path)
    theirs = bridge.load_lora(write(tmp_path / "lora", factors(shapes)), config)
    fields = theirs.config.fields | {"target_modules": read}
    grown = dataclasses.replace(theirs.config, fields=fields)
    lora = bridge.Lora(grown, theirs.factors, theirs.scales)
    bridge.save_lora(tmp_path / "out", lora, config)
    fields = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert fields["target_modules"] == written


def test_an_adapter_whose_pattern_lacks_modules_lists_all_of_them(hf, shapes, tmp_path):
    config = bridge.from_hf_config(hf.path)
    theirs = bridge.load_lora(write(tmp_path / "lora", factors(shapes)), config)
    fields = theirs.config.fields | {"target_modules": r".*\.q_proj"}
    grown = dataclasses.replace(theirs.config, fields=fields)
    lora = bridge.Lora(grown, theirs.factors, theirs.scales)
    bridge.save_lora(tmp_path / "out", lora, config)
    fields = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    listed = fields["target_modules"]
    assert len(listed) == 3 * config.num_hidden_layers
    assert "model.layers.0.mlp.down_proj" in listed


def test_shards_of_a_merged_weight_are_those_of_the_whole(hf, shapes, tmp_path):
    path = write(tmp_path / "lora", factors(shapes))
    config = bridge.from_hf_config(hf.path)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    like = like_of(config)
    across = jax.tree.map(
        lambda leaf: leaf.update(
            sharding=jax.NamedSharding(mesh, jax.P(*[None] * (leaf.ndim - 1), "x"))
            if leaf.shape[-1] % 2 == 0
            else jax.NamedSharding(mesh, jax.P())
        ),
        like,
    )
    whole, cut = (bridge.load_hf_with_lora(hf.path, path, m) for m in (like, across))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), whole, cut
    )


def magnitudes(tensors) -> dict[str, np.ndarray]:
    """Magnitudes of DoRA, one for each output of a module."""
    random = np.random.default_rng(1)
    return {
        key.replace("lora_B.weight", "lora_magnitude_vector"): random.uniform(
            0.5, 2, len(array)
        ).astype(np.float32)
        for key, array in tensors.items()
        if key.endswith("lora_B.weight")
    }


def merged_dora(base, tensors, stem, transposed) -> np.ndarray:
    """The merged weight, from the formula of the paper in float64."""
    a, b = (tensors[f"{stem}.lora_{x}.weight"].astype(np.float64) for x in "AB")
    sums = (base.T if transposed else base) + 4 * b @ a
    scale = tensors[f"{stem}.lora_magnitude_vector"] / np.linalg.norm(sums, axis=1)
    merged = sums * scale[:, None]
    return merged.T if transposed else merged


@pytest.mark.parametrize("transposed", [False, True])
def test_each_output_of_a_dora_has_the_norm_that_the_adapter_gives_it(
    hf, gpt2, shapes, tmp_path, transposed
):
    model = gpt2 if transposed else hf
    tensors = gpt2_factors(gpt2.path, "mlp.c_fc") if transposed else factors(shapes)
    tensors |= magnitudes(tensors)
    fields = {"use_dora": True, "fan_in_fan_out": transposed}
    path = write(tmp_path / "dora", tensors, **fields)
    source = bridge.open_checkpoint(model.path)
    merged = merge_lora(source, open_lora(path), transposed=transposed)
    for key in source.keys():
        stem = f"base_model.model.{key.removesuffix('.weight')}"
        base = source.read(key)
        if f"{stem}.lora_A.weight" not in tensors:
            np.testing.assert_array_equal(merged.read(key), base)
            continue
        want = merged_dora(base, tensors, stem, transposed)
        np.testing.assert_allclose(merged.read(key), want, rtol=1e-5, atol=1e-6)
        assert np.abs(want - base).max() > 0.1  # the adapter matters
        # A shard has a part of the inputs, and the norm is of all.
        part = slice(1, 5), slice(2, 7)
        shard = merged.read(key, part)
        np.testing.assert_allclose(shard, want[part], rtol=1e-5, atol=1e-6)


def test_a_dora_is_merged_under_any_name_and_not_kept_beside_the_weights(
    hf, shapes, tmp_path
):
    tensors = factors(shapes) | magnitudes(factors(shapes))
    named = {key.replace(".model.model.", ".model."): x for key, x in tensors.items()}
    paths = [
        write(tmp_path / name, given, use_dora=True)
        for name, given in (("plain", tensors), ("base", named))
    ]
    config = bridge.from_hf_config(hf.path)
    like = like_of(config)
    assert_same_leaves(*(bridge.load_hf_with_lora(hf.path, p, like) for p in paths))
    with pytest.raises(ValueError, match=facts("use_dora=True", "load_hf_with_lora")):
        bridge.load_lora(paths[0], config)
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    wrong = write(
        tmp_path / "wrong", tensors | {stem: np.ones(3, np.float32)}, use_dora=True
    )
    with pytest.raises(ValueError, match=facts("q_proj.lora_magnitude_vector", "(3,)")):
        bridge.load_hf_with_lora(hf.path, wrong, like)


def test_modules_that_were_saved_whole_take_the_places_of_the_bases(
    hf, shapes, tmp_path
):
    tensors = factors(shapes)
    head = np.full(shapes["lm_head.weight"], 0.25, np.float32)
    tensors["base_model.model.lm_head.weight"] = head
    path = write(tmp_path / "lora", tensors, modules_to_save=["lm_head"])
    config = bridge.from_hf_config(hf.path)
    merged = dict(_named(bridge.load_hf_with_lora(hf.path, path, like_of(config))))
    np.testing.assert_array_equal(merged["lm_head.kernel"], head.T)
    with pytest.raises(ValueError, match=facts("load_hf_with_lora", "lm_head.weight")):
        bridge.load_lora(path, config)


# Where multimodal models of transformers 4 and 5, SmolVLM, and base models have layers.
PREFIXES = ("language_model.model.", "model.language_model.", "model.text_model.", "")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_an_adapter_has_the_names_of_the_model_that_it_was_trained_beside(
    hf, shapes, tmp_path, prefix
):
    plain = write(tmp_path / "plain", factors(shapes), **PATTERNS)
    named = {
        key.replace(".model.model.", f".model.{prefix}"): array
        for key, array in factors(shapes).items()
    }
    full = {f"{prefix}layers.1.mlp.down_proj": 2, "q_proj": 8}
    other = write(tmp_path / "other", named, alpha_pattern=full, target_modules=".*")
    config = bridge.from_hf_config(hf.path)
    like = like_of(config)
    merged = [bridge.load_hf_with_lora(hf.path, path, like) for path in (plain, other)]
    assert_same_leaves(*merged)
    kept = [bridge.load_lora(path, config) for path in (plain, other)]
    assert_same_leaves(kept[0].factors, kept[1].factors)
    assert_same_leaves(kept[0].scales, kept[1].scales)
    # What is saved is of the model of texts, in names and in patterns.
    bridge.save_lora(tmp_path / "saved", kept[1], config)
    saved, trained = (
        tensors_of(path / "adapter_model.safetensors")
        for path in (tmp_path / "saved", plain)
    )
    assert saved.keys() == trained.keys()
    again = bridge.load_lora(tmp_path / "saved", config)
    assert_same_leaves(again.scales, kept[0].scales)
    assert again.config.fields["target_modules"] == sorted(CONFIG["target_modules"])


def test_factors_of_a_vision_tower_are_none_of_the_text(hf, shapes, tmp_path):
    """Its layers have the same names, and may have the same shapes."""
    named = {
        key.replace(".model.model.", ".model.vision_tower."): array
        for key, array in factors(shapes).items()
    }
    path = write(tmp_path / "lora", named)
    config = bridge.from_hf_config(hf.path)
    with pytest.raises(ValueError, match=facts("vision_tower")):
        bridge.load_hf_with_lora(hf.path, path, like_of(config))
    name = "vision_tower.layers.0.self_attn.q_proj"
    with pytest.raises(ValueError, match=facts(name)):
        bridge.load_lora(path, config)


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"use_dora": 1}, ["use_dora=1"]),
        ({"use_dora": True}, ["q_proj.lora_magnitude_vector"]),
        ({"peft_type": "IA3"}, ["peft_type", "'IA3'", "'LORA'"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["init_lora_weights='pissa_niter_4'"]),
        ({"target_parameters": ["experts"]}, ["target_parameters=['experts']"]),
        ({"layer_replication": [[0, 2]]}, ["layer_replication=[[0, 2]]"]),
        ({"something_new": 3}, ["something_new=3"]),
        ({"r": 0}, ["r=0"]),
        ({"r": 4.0}, ["r=4.0"]),
        ({"lora_alpha": float("nan")}, ["adapter_config.json", "NaN"]),
        ({"use_rslora": "no"}, ["use_rslora='no'"]),
        ({"rank_pattern": ["q_proj"]}, ["rank_pattern=['q_proj']"]),
        ({"rank_pattern": {"q_proj": True}}, ["rank_pattern", "'q_proj': True"]),
        ({"lora_alpha": "16"}, ["lora_alpha='16'"]),
        ({"rank_pattern": {"(a+)+$": 2}}, ["rank_pattern", "'(a+)+$': 2"]),
        ({"rank_pattern": {"q_proj": 2}}, ["q_proj", "2"]),
        ({"r": 8}, ["q_proj", "8"]),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(hf, shapes, tmp_path, fields, match):
    path = write(tmp_path / "lora", factors(shapes), **fields)
    config = bridge.from_hf_config(hf.path)
    with pytest.raises(ValueError, match=facts(*match)):
        bridge.load_lora(path, config)
    with pytest.raises(ValueError, match=facts(*match)):
        bridge.load_hf_with_lora(hf.path, path, like_of(config))


def test_tensors_that_are_none_of_the_models_are_all_listed(hf, shapes, tmp_path):
    tensors = factors(shapes) | {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": (
            np.ones(3, np.float32)
        ),
        "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": (
            np.ones((4, 3), np.float32)
        ),
        "base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 3)),
        "stray": np.ones(3, np.float32),
    }
    path = write(tmp_path / "lora", tensors)
    with pytest.raises(ValueError) as raised:
        bridge.load_lora(path, bridge.from_hf_config(hf.path))
    for line in (
        "q_proj.lora_magnitude_vector is there, and the config has no use_dora",
        "embed_tokens.lora_embedding_A is a factor of an embedding",
        "stray is not a tensor of the model",
        "layers.9.mlp.up_proj.lora_B.weight is missing beside",
    ):
        assert line in str(raised.value)


def test_an_adapter_of_another_model_is_refused(hf, shapes, tmp_path):
    tensors = factors({"model.layers.7.mlp.up_proj.weight": (5, 6)}, ("up_proj",))
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    tensors |= factors(shapes) | {key: np.ones((3, 4), np.float32)}
    path = write(tmp_path / "lora", tensors)
    config = bridge.from_hf_config(hf.path)
    with pytest.raises(ValueError) as raised:
        bridge.load_hf_with_lora(hf.path, path, like_of(config))
    assert "model.layers.7.mlp.up_proj.weight" in str(raised.value)
    assert "the adapter is for (3, 48)" in str(raised.value)
    with pytest.raises(ValueError, match=facts("model.layers.7.mlp.up_proj")):
        bridge.load_lora(path, config)


def test_some_of_the_stacked_layers_are_merged_but_not_kept_apart(hf, shapes, tmp_path):
    tensors = factors(shapes, ("layers.1.mlp.down_proj", "layers.2.mlp.down_proj"))
    path = write(tmp_path / "lora", tensors)
    assert error(merged_logits(hf, path), hf.logits) > 100 * TOLERANCE
    with pytest.raises(
        ValueError,
        match=facts(
            "model.layers.{layer_0}.mlp.down_proj", "model.layers.0.mlp.down_proj"
        ),
    ):
        bridge.load_lora(path, bridge.from_hf_config(hf.path))
    ranks = factors(shapes, ("0.mlp.down_proj",), rank=2) | factors(
        shapes, ("1.mlp.down_proj", "2.mlp.down_proj")
    )
    pattern = {"layers.0.mlp.down_proj": 2}
    path = write(tmp_path / "ranks", ranks, rank_pattern=pattern)
    with pytest.raises(
        ValueError, match=facts("layers.mlp.down_proj.kernel", "[2, 4]")
    ):
        bridge.load_lora(path, bridge.from_hf_config(hf.path))
    merged_logits(hf, path)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("gpt2"), "gpt2")


def gpt2_factors(path, *modules) -> dict[str, np.ndarray]:
    """Of weights that are stored as [in, out]."""
    source = bridge.open_checkpoint(path)
    keys = [key for key in source.keys() if key.endswith(".weight")]
    return factors({key: source.shape(key)[::-1] for key in keys}, modules)


def test_a_base_that_stores_its_weights_the_other_way_says_so(gpt2, tmp_path):
    tensors = gpt2_factors(gpt2.path, "attn.c_attn", "attn.c_proj", "mlp.c_fc")
    name = "base_model.model.transformer.h.1.mlp.c_fc"
    (width,) = bridge.open_checkpoint(gpt2.path).shape(f"{name[17:]}.bias")
    bias = np.full(width, 0.5, np.float32)
    whole = {f"{name}.base_layer.bias": bias}  # as PEFT names it
    path = write(tmp_path / "lora", tensors | whole, bias="all", fan_in_fan_out=True)
    model = AutoModelForCausalLM.from_pretrained(gpt2.path).eval()
    state = model.state_dict()
    state["transformer.h.1.mlp.c_fc.bias"].copy_(torch.from_numpy(bias))
    for key in tensors:
        if key.endswith("lora_A.weight"):
            a, b = (tensors[key.replace("_A.", f"_{x}.")] for x in "AB")
            weight = key[len("base_model.model.") : -len(".lora_A.weight")] + ".weight"
            state[weight] += torch.from_numpy(4 * b @ a).T
    theirs = hf_logits(model, gpt2.tokens)
    assert error(merged_logits(gpt2, path), theirs) <= TOLERANCE
    write(tmp_path / "apart", tensors, fan_in_fan_out=True)
    with pytest.raises(ValueError, match=facts("transformer.h.{layer_0}.attn.c_attn")):
        bridge.load_lora(tmp_path / "apart", bridge.from_hf_config(gpt2.path))


def test_factors_of_a_weight_stored_the_other_way_are_laid_out_like_it(gpt2, tmp_path):
    config = bridge.from_hf_config(gpt2.path)
    tensors = gpt2_factors(gpt2.path, "mlp.c_proj")
    path = write(tmp_path / "lora", tensors, fan_in_fan_out=True)
    lora = bridge.load_lora(path, config)
    pair = lora.factors["layers.mlp.down_proj.kernel"]
    a = tensors["base_model.model.transformer.h.1.mlp.c_proj.lora_A.weight"]
    np.testing.assert_array_equal(pair["lora_a"][1], a.T)
    bridge.save_lora(tmp_path / "out", lora, config)
    assert_same_bytes(tensors_of(tmp_path / "out/adapter_model.safetensors"), tensors)


def test_what_the_base_stores_decides_how_factors_lie_and_not_the_adapters_flag(
    hf, gpt2, shapes, tmp_path
):
    # PEFT takes the flag back too; square weights would be transposed in silence.
    square = ".self_attn.o_proj"
    of_llama = {k: x for k, x in factors(shapes).items() if square in k}
    for base, tensors in (
        (hf, of_llama or factors(shapes)),
        (gpt2, gpt2_factors(gpt2.path, "attn.c_proj")),
    ):
        said = {}
        for flag in (True, False):
            path = tmp_path / f"{base.path.name}{id(base)}{flag}"
            write(path, tensors, fan_in_fan_out=flag)
            said[flag] = merged_logits(base, path)
        np.testing.assert_array_equal(said[True], said[False])


def test_a_dot_of_a_pattern_is_any_character():
    config = bridge.LoraConfig(
        4, 8, alpha_pattern={"layers...self_attn.q_proj": 64, "^layers.1": 2}
    )
    assert config.alpha("model.layers.0.self_attn.q_proj") == 64
    assert config.alpha("model.layers.10.self_attn.q_proj") == 8
    assert config.alpha("model.layers.0.self_attn.k_proj") == 8
    assert config.alpha("layers.1") == 2 and config.alpha("model.layers.1") == 8


@pytest.mark.parametrize("ties", [False, True])
def test_a_table_that_is_the_head_too_is_not_replaced_unless_both_are_tied(
    tmp_path, ties
):
    tied = make_model(tmp_path / "tied", "llama-tied")
    source = bridge.open_checkpoint(tied.path)
    table = "model.embed_tokens.weight"
    tensors = factors({k: source.shape(k) for k in source.keys() if "q_proj" in k})
    new = np.asarray(source.read(table)) + 1
    whole = {f"base_model.model.{table}": new}
    fields = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": ties}
    path = write(tmp_path / "lora", tensors | whole, **fields)
    config = bridge.from_hf_config(tied.path)
    if not ties:
        with pytest.raises(ValueError, match=facts(table, "tie_word_embeddings=False")):
            bridge.load_hf_with_lora(tied.path, path, like_of(config))
        return
    found = bridge.load_hf_with_lora(tied.path, path, like_of(config))
    np.testing.assert_array_equal(found["embed_tokens"]["embedding"], new)
