"""What is written for Megatron is what Megatron wrote, and is read back exactly."""

import itertools
import tracemalloc
from types import MappingProxyType

import ml_dtypes
import numpy as np
import pytest
from held import assert_equal, held
from helpers.errors import facts
from megatron_twins import megatron_twin

from bridge.formats._tensor_source import TensorSource
from bridge.formats._torch_zip import open_torch_file, read_torch_file
from bridge.megatron import open_megatron, plain_args, trim_vocab, write_megatron
from bridge.megatron.read._dcp import open_dcp

VOCAB = 331


def settings(golden, name: str, **changed) -> dict:
    args, _ = plain_args(open_megatron(golden(name) / "torch_dist").args)
    return {**args, **changed}


GRID = [
    (name, impl, tp, pp, ep, vpp)
    for name, impl in itertools.product(["qwen3", "mixtral"], ["local", "te"])
    for tp, pp, ep, vpp in itertools.product((1, 2), (1, 2, 4), (1, 2, 4), (1, 2))
    if pp * vpp <= 4 and (ep == 1 or name == "mixtral")
]


@pytest.mark.parametrize("name, impl, tp, pp, ep, vpp", GRID)
def test_any_split_is_merged_back_exactly(
    golden, tmp_path, name, impl, tp, pp, ep, vpp
):
    twin = megatron_twin(golden(name) / "hf")
    spelled = {"local": "local", "te": "transformer_engine"}[impl]
    args = settings(golden, name, transformer_impl=spelled, moe_grouped_gemm=ep == 2)
    write_megatron(
        tmp_path / "out",
        held(twin),
        args,
        format="legacy",
        iteration=7,
        tp=tp,
        pp=pp,
        ep=ep,
        vpp=vpp,
    )
    found = open_megatron(tmp_path / "out")
    multiple = args["make_vocab_size_divisible_by"] * tp
    padded = found.source.shape("embedding.word_embeddings.weight")[0]
    assert padded == -(-VOCAB // multiple) * multiple == found.args["padded_vocab_size"]
    assert not found.source.read("embedding.word_embeddings.weight")[VOCAB:].any()
    assert found.iteration == 7
    assert_equal(trim_vocab(found.source, VOCAB), twin)


@pytest.mark.parametrize("name, tp, pp, ep", [("qwen3", 2, 2, 1), ("mixtral", 1, 2, 2)])
def test_legacy_files_are_those_that_megatron_wrote(golden, tmp_path, name, tp, pp, ep):
    source = open_megatron(golden(name) / "torch_dist").source  # padding included
    args = settings(golden, name)
    split = {"tp": tp, "pp": pp, "ep": ep}
    write_megatron(
        tmp_path / "out", source, args, format="legacy", iteration=7, **split
    )
    theirs, ours = golden(name) / "legacy", tmp_path / "out"
    files = sorted(theirs.rglob("*.pt"))
    assert len(files) == tp * pp * ep
    for file in files:
        expected = open_torch_file(file)
        found = open_torch_file(ours / file.relative_to(theirs))
        keys = {key for key in expected.keys() if key.startswith("model.")}
        assert {key for key in found.keys() if key.startswith("model.")} == keys
        for key in keys:
            assert found.read(key).tobytes() == expected.read(key).tobytes()
            assert found.shape(key) == expected.shape(key)


def test_a_virtual_pipeline_goes_round_the_stages(golden, tmp_path):
    """Chunk v of stage p starts at layer v * (L / VPP) + p * (L / VPP / PP)."""
    twin = megatron_twin(golden("qwen3") / "hf")
    args = settings(golden, "qwen3", transformer_impl="te")
    split = {"format": "legacy", "pp": 2, "vpp": 2}
    write_megatron(tmp_path / "out", held(twin), args, **split)
    for stage, chunk, layer in ((0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3)):
        rank = f"out/release/mp_rank_00_00{stage}/model_optim_rng.pt"
        found = open_torch_file(tmp_path / rank)
        key = "mlp.linear_fc2.weight"
        local = found.read(f"model{chunk}.decoder.layers.0.{key}")
        assert local.tobytes() == twin[f"decoder.layers.{layer}.{key}"].tobytes()


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_torch_dist_keys_and_shapes_are_those_that_megatron_wrote(
    golden, tmp_path, name
):
    run = open_megatron(golden(name) / "torch_dist")
    write_megatron(tmp_path / "out", run.source, settings(golden, name), iteration=7)
    found = open_dcp(tmp_path / "out/iter_0000007").tensors
    theirs = open_dcp(run.path).tensors
    expected = {k: v for k, v in theirs.items() if not k.startswith("optimizer.")}
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert (found[key].shape, found[key].dtype) == (tensor.shape, tensor.dtype)
        assert found[key].read().tobytes() == tensor.read().tobytes()
    assert open_megatron(tmp_path / "out").args == settings(
        golden,
        name,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
    )


def test_layers_of_several_kinds_keep_their_numbers(golden, tmp_path):
    twin = megatron_twin(golden("mixtral") / "hf")
    dense = {"mlp.linear_fc1.weight": (80, 32), "mlp.linear_fc2.weight": (32, 40)}
    twin = {k: v for k, v in twin.items() if ".0.mlp." not in k and ".0.pre_" not in k}
    for key, shape in dense.items():
        twin[f"decoder.layers.0.{key}"] = np.ones(shape, np.float32)
    twin["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"] = np.ones(32, np.float32)
    args = settings(golden, "mixtral", moe_layer_freq=[0, 1, 1, 1])
    write_megatron(tmp_path / "out", held(twin), args)
    keys = open_dcp(tmp_path / "out/release").tensors
    assert keys["decoder.layers.0.mlp.linear_fc1.weight"].shape == (80, 32)
    experts = keys["decoder.layers.3.mlp.experts.experts.linear_fc1.weight"]
    assert experts.shape == (4, 80, 32)
    assert_equal(trim_vocab(open_megatron(tmp_path / "out").source, VOCAB), twin)


LATENT = {
    "linear_q_down_proj.weight": (6, 8),
    "linear_q_up_proj.weight": (16, 6),
    "q_layernorm.weight": (6,),
    "linear_kv_down_proj.weight": (5, 8),
    "linear_kv_up_proj.weight": (16, 4),
    "kv_layernorm.weight": (4,),
    "linear_proj.weight": (8, 8),
}


@pytest.mark.parametrize("format", ["torch_dist", "legacy"])
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_latent_attention_and_biases_survive(tmp_path, impl, format):
    shapes = {"embedding.word_embeddings.weight": (10, 8)}
    for i in range(2):
        layer = f"decoder.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (8,)
        shapes |= {f"{layer}.self_attention.{k}": s for k, s in LATENT.items()}
        shapes[f"{layer}.mlp.linear_fc1.layer_norm_weight"] = (8,)
        shapes[f"{layer}.mlp.linear_fc1.weight"] = (12, 8)
        shapes[f"{layer}.mlp.linear_fc1.bias"] = (12,)
        shapes[f"{layer}.mlp.linear_fc2.weight"] = (8, 12)
        shapes[f"{layer}.mlp.linear_fc2.bias"] = (8,)
    random = np.random.default_rng(0)
    tensors = {
        key: random.normal(size=shape).astype(ml_dtypes.bfloat16)
        for key, shape in shapes.items()
    }
    args = {"transformer_impl": impl, "make_vocab_size_divisible_by": 5}
    split = {"tp": 2, "pp": 2} if format == "legacy" else {}
    write_megatron(tmp_path / "out", held(tensors), args, format=format, **split)
    assert_equal(open_megatron(tmp_path / "out").source, tensors)
    if (format, impl) == ("torch_dist", "local"):
        # Megatron maps no names of these layers, as it does of others.
        keys = open_dcp(tmp_path / "out" / "release").tensors
        assert "decoder.layers.pre_mlp_layernorm.weight" in keys
        assert not [key for key in keys if "linear_fc1.layer_norm" in key]


def test_an_mlp_without_a_gate_is_cut_into_plain_rows(tmp_path):
    fc1 = np.arange(32, dtype=np.float32).reshape(8, 4)
    tensors = {
        "embedding.word_embeddings.weight": np.ones((4, 4), np.float32),
        "decoder.layers.0.mlp.linear_fc1.weight": fc1,
    }
    for swiglu, rows in ((False, [0, 1, 2, 3]), (True, [0, 1, 4, 5])):
        out = tmp_path / str(swiglu)
        args = {"swiglu": swiglu, "make_vocab_size_divisible_by": 2}
        write_megatron(out, held(tensors), args, format="legacy", tp=2)
        rank = open_torch_file(out / "release/mp_rank_00/model_optim_rng.pt")
        found = rank.read("model.decoder.layers.0.mlp.linear_fc1.weight")
        np.testing.assert_array_equal(found, fc1[rows])
        assert_equal(open_megatron(out).source, tensors)


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    class Made:
        shape, dtype = (1024, 1024), np.dtype(np.float32)

        def read(self, slices=()):
            return np.ones(self.shape, self.dtype)

    lazy = {f"decoder.layers.{i}.mlp.linear_fc2.weight": Made() for i in range(12)}
    lazy["embedding.word_embeddings.weight"] = Made()
    source = TensorSource("made", MappingProxyType(lazy))
    for format in ("torch_dist", "legacy"):
        tracemalloc.start()
        write_megatron(tmp_path / format, source, {}, format=format)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * 2**22 + 2**20  # the tensor, and its cut parts


def test_progress_ends_at_all_bytes_and_large_files_are_parted(golden, tmp_path):
    twin, ticks = megatron_twin(golden("qwen3") / "hf"), []
    write_megatron(
        tmp_path / "out",
        held(twin),
        settings(golden, "qwen3"),
        max_file_bytes=50_000,
        progress=lambda *tick: ticks.append(tick),
    )
    total = sum(values.nbytes for values in twin.values())
    assert len(ticks) == len(twin)
    assert ticks[-1] == (total, total)
    assert len(list((tmp_path / "out/release").glob("*.distcp"))) > 2
    assert_equal(trim_vocab(open_megatron(tmp_path / "out").source, VOCAB), twin)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"tp": 5, "format": "legacy"}, ["(128, 48)", "5"]),
        ({"pp": 3, "format": "legacy"}, ["4 layers", "PP x VPP = 3"]),
        ({"pp": 2, "vpp": 4, "format": "legacy"}, ["4 layers", "PP x VPP = 8"]),
        ({"ep": 2, "format": "legacy"}, ["0 experts", "EP = 2"]),
        ({"tp": 2}, ["torch_dist", "TP 2", "VPP 1"]),
        ({"args": {"num_layers": 5}}, ["num_layers", "5", "4"]),
        ({"args": {"num_experts": 8}}, ["num_experts", "8", "None"]),
        (
            {"args": {"untie_embeddings_and_output_weights": True}},
            ["untie_embeddings_and_output_weights", "True", "False"],
        ),
        ({"args": {"rope": np.ones(2)}}, ["rope", "array([1., 1.])"]),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    golden, tmp_path, changed, message
):
    source = held(megatron_twin(golden("qwen3") / "hf"))
    args = settings(golden, "qwen3", **changed.pop("args", {}))
    with pytest.raises(ValueError, match=facts(*message)):
        write_megatron(tmp_path / "out", source, args, **changed)
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_torch_has_not_is_refused(tmp_path):
    values = np.zeros((4, 4), "S3")
    source = held({"embedding.word_embeddings.weight": values})
    with pytest.raises(
        ValueError, match=facts("embedding.word_embeddings.weight", "|S3")
    ):
        write_megatron(tmp_path / "out", source, {})


EXPERT = "mtp.layers.0.transformer_layer.mlp.experts.0.linear_fc1.weight"
PREDICTING = {
    "embedding.word_embeddings.weight": np.ones((128, 4), np.float32),
    "mtp.layers.0.eh_proj.weight": np.ones((4, 8), np.float32),
    EXPERT: np.ones((4, 4), np.float32),
}


def test_layers_that_predict_further_tokens_keep_their_numbers(tmp_path):
    write_megatron(tmp_path / "out", held(PREDICTING), {})
    assert_equal(open_megatron(tmp_path / "out").source, PREDICTING)


def test_layers_that_predict_further_tokens_are_not_written_as_legacy(tmp_path):
    with pytest.raises(
        ValueError, match=facts("mtp.layers.0.eh_proj.weight", EXPERT, "torch_dist")
    ):
        write_megatron(tmp_path / "out", held(PREDICTING), {}, format="legacy")


def test_a_missing_layer_is_refused(golden, tmp_path):
    twin = megatron_twin(golden("qwen3") / "hf")
    del twin["decoder.layers.2.mlp.linear_fc2.weight"]
    with pytest.raises(
        ValueError, match=facts("layer 3: ['mlp.linear_fc2.weight']", "layer 2: []")
    ):
        write_megatron(tmp_path / "out", held(twin), settings(golden, "qwen3"))


def test_a_missing_number_is_refused(golden, tmp_path):
    for name, gap in (("qwen3", "layers.1."), ("mixtral", "experts.2.")):
        twin = megatron_twin(golden(name) / "hf")
        twin = {key: values for key, values in twin.items() if gap not in key}
        what, number = gap.strip(".").split(".")
        with pytest.raises(ValueError, match=facts(what, f"[{number}]")):
            write_megatron(tmp_path / "out", held(twin), {})


def test_a_failure_midway_leaves_nothing(golden, tmp_path):
    twin = megatron_twin(golden("qwen3") / "hf")
    source = held(twin)

    def fail(done, total):
        if done > total / 2:
            raise RuntimeError("the disk is gone")

    for format in ("torch_dist", "legacy"):
        with pytest.raises(RuntimeError, match=facts("disk")):
            write_megatron(
                tmp_path / "out",
                source,
                settings(golden, "qwen3"),
                format=format,
                progress=fail,
            )
    assert list(tmp_path.iterdir()) == []


def test_a_taken_path_is_refused(golden, tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ValueError, match=facts(repr(str(tmp_path)))):
        write_megatron(tmp_path, held({}), {})


def test_settings_that_are_megatrons_own_objects_are_named(golden):
    args = open_megatron(golden("qwen3") / "legacy").args
    plain, objects = plain_args(args)
    assert set(objects) == {"attention_backend", "exit_signal", "model_type"}
    assert len(plain) + len(objects) == len(args)
    assert plain["params_dtype"] == np.dtype(ml_dtypes.bfloat16)


def test_storages_are_aligned_as_torch_maps_them(golden, tmp_path):
    twin = megatron_twin(golden("qwen3") / "hf")
    args = settings(golden, "qwen3")
    write_megatron(tmp_path / "out", held(twin), args, format="legacy")
    (file,) = tmp_path.glob("out/release/*/*.pt")
    data = file.read_bytes()
    for values in twin.values():
        if values.nbytes > 100:  # long enough to be found once
            assert data.index(values.tobytes()) % 64 == 0


def test_what_is_written_is_alike_every_time(golden, tmp_path):
    twin = megatron_twin(golden("qwen3") / "hf")
    contents: list[list[bytes]] = []
    for name in ("a", "b"):
        write_megatron(tmp_path / name, held(twin), settings(golden, "qwen3"))
        files = sorted(file for file in (tmp_path / name).rglob("*") if file.is_file())
        contents.append([file.read_bytes() for file in files])
    assert contents[0] == contents[1]
    (common,) = tmp_path.glob("a/release/common.pt")
    assert read_torch_file(common)["checkpoint_version"] == 3.0
