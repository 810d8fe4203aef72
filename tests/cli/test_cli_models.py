"""Models go in, are looked at, and are compared, from the command line."""

import dataclasses
import json
import shutil

import jax
import pytest
from flax import nnx
from helpers.damage import ORBAX_FAILS_NOISILY, file_size_limited
from helpers.errors import facts
from tiny_configs import FAMILIES, hf_fields

import bridge
from bridge.models import Decoder
from fsdp_jax.cli import main
from fsdp_jax.cli._errors import check_unwritten


def write(path, config, *, scale=1.0, only="", seed=0):
    """Writes a random model; leaves whose name holds `only` are scaled."""
    model = Decoder(config, rngs=nnx.Rngs(jax.random.key(seed)))

    def change(path, leaf):
        named = only and only in jax.tree_util.keystr(path)
        return leaf * scale if named else leaf

    params = jax.tree.map_with_path(change, nnx.state(model, nnx.Param))
    bridge.save_hf(path, params, config)
    return str(path)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> str:
    """A model with dense and sparse layers."""
    config = bridge.from_hf_config(hf_fields("qwen3_moe", vocab_size=257))
    return write(tmp_path_factory.mktemp("mixed") / "model", config)


@pytest.fixture(scope="module")
def imported(tmp_path_factory, mixed) -> str:
    path = str(tmp_path_factory.mktemp("imported") / "run")
    assert main(["import", mixed, path]) == 0
    return path


def test_an_imported_model_is_exported_byte_for_byte(mixed, imported, tmp_path):
    assert main(["export", imported, str(tmp_path / "out")]) == 0
    a, b = (bridge.open_checkpoint(path) for path in (mixed, tmp_path / "out"))
    assert sorted(a.keys()) == sorted(b.keys())
    for key in a.keys():
        assert a.read(key).tobytes() == b.read(key).tobytes()


@pytest.mark.parametrize(
    "left, free",
    [
        (("run_id", "writer.json", "0.orbax-checkpoint-tmp"), True),
        (("run_id.abcd1234.part", "writer.json.0123456789abcdef.part"), True),
        (("run_id", "config.json"), False),
        (("0",), False),
    ],
)
def test_what_a_save_left_is_in_no_ones_way(tmp_path, left, free):
    for name in left:
        (tmp_path / name).write_text("")
    if free:
        check_unwritten(tmp_path, "OUT")
    else:
        with pytest.raises(ValueError, match=facts("OUT", tmp_path)):
            check_unwritten(tmp_path, "OUT")


@ORBAX_FAILS_NOISILY
def test_a_failed_import_can_be_run_again(mixed, tmp_path, capsys):
    out = tmp_path / "run"
    with file_size_limited(20_000):
        assert main(["import", mixed, str(out)]) == 2
    capsys.readouterr()
    assert main(["import", mixed, str(out)]) == 0
    assert main(["import", mixed, str(out)]) == 2  # but not over a step
    assert "is not empty" in capsys.readouterr().err


def test_a_full_disk_is_named(mixed, tmp_path, capsys):
    out = tmp_path / "out"
    with file_size_limited(20_000):
        assert main(["convert", mixed, str(out), "--to", "hf"]) == 2
    assert f": '{out}'" in capsys.readouterr().err


def test_an_imported_model_is_the_same_model(mixed, imported, capsys):
    argv = ["compare", imported, mixed, "--against", "bridge", "--json", "--seq", "8"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["max_diff"] == 0 and found["kl"] == 0 and found["same_choice"] == 1
    assert found["first_layer"] is None


@pytest.mark.parametrize(
    "only, layer", [("embed_tokens", 0), ("layers'][1", 2), ("lm_head", None)]
)
def test_the_first_differing_layer_is_named(tmp_path, mixed, only, layer, capsys):
    config = bridge.from_hf_config(mixed)
    other = write(tmp_path / "other", config, scale=1.5, only=only)
    argv = ["compare", other, mixed, "--against", "bridge", "--json", "--seq", "8"]
    assert main(argv) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["first_layer"] == layer
    assert found["relative"] > 1e-4 and found["kl"] > 0


def test_models_of_other_depths_differ_behind_the_shorter(tmp_path, mixed, capsys):
    config = bridge.from_hf_config(mixed)
    shorter = dataclasses.replace(config, num_hidden_layers=2, layer_types=None)
    other = write(tmp_path / "other", shorter)
    argv = ["compare", other, mixed, "--against", "bridge", "--seq", "8"]
    assert main(argv) == 1
    assert "first differing layer: " in capsys.readouterr().out


def test_inspect_shows_the_config_and_the_mapping(mixed, capsys):
    assert main(["inspect", mixed]) == 0
    out = capsys.readouterr().out
    assert "qk_norm" in out and "num_experts 8" in out
    row = next(line for line in out.splitlines() if "layers.0.mlp.experts.down" in line)
    assert "model.layers.0.mlp.experts.{0-7}.down_proj.weight" in row
    assert "process 0 reads" in out


def test_inspect_as_json_adds_up(mixed, capsys):
    assert main(["inspect", mixed, "--json", "--sharded"]) == 0
    data = json.loads(capsys.readouterr().out)
    source = bridge.open_checkpoint(mixed)
    size = sum(source.read(key).nbytes for key in source.keys())
    assert data["bytes"] == size == data["bytes_read_by_process"]["0"]
    assert data["config"]["moe"]["num_experts"] == 8


def test_inspect_shows_a_checkpoint(imported, capsys):
    assert main(["inspect", imported, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    shape, dtype = data["leaves"]["params.layers.1.mlp.up_proj.kernel"]
    assert (shape, dtype) == ([1, 48, 80], "float32")
    assert main(["inspect", imported]) == 0
    assert "step 0 of" in capsys.readouterr().out


def test_training_starts_from_an_imported_model(
    imported, mixed, tmp_path, text, capsys
):
    def train(start, save):
        argv = ["train", "--hf", start, "--data", str(text), "--steps", "1"]
        argv += ["--seq", "8", "--save", str(tmp_path / save)]
        assert main(argv) == 0
        return json.loads(capsys.readouterr().out)["loss"]

    assert train(imported, "a") == train(mixed, "b")


def test_an_imported_model_cannot_be_resumed(imported, tmp_path, text, capsys):
    argv = ["train", "--resume", imported, "--data", str(text), "--steps", "1"]
    assert main([*argv, "--save", str(tmp_path / "x")]) == 2
    assert "was imported, not trained" in capsys.readouterr().err


@pytest.mark.parametrize("variant", FAMILIES)
def test_every_family_can_be_inspected(variant, tmp_path, capsys):
    config = bridge.from_hf_config(hf_fields(variant))
    path = write(tmp_path / "model", config)
    assert main(["inspect", path]) == 0
    assert config.model_type in capsys.readouterr().out


def test_an_import_in_bfloat16_is_that_for_all_that_read_it(mixed, tmp_path, capsys):
    path = str(tmp_path / "run")
    assert main(["import", mixed, path, "--dtype", "bfloat16"]) == 0
    capsys.readouterr()
    assert main(["inspect", path, "--json"]) == 0
    leaves = json.loads(capsys.readouterr().out)["leaves"]
    assert {d for n, (_, d) in leaves.items() if n.startswith("params")} == {"bfloat16"}
    argv = ["compare", path, mixed, "--against", "bridge", "--seq", "8"]
    assert main([*argv, "--tolerance", "0.2"]) == 0
    assert main([*argv, "--tolerance", "1e-6"]) == 1
    out = str(tmp_path / "out")
    assert main(["export", path, out]) == 0
    assert bridge.from_hf_config(out).dtype == "bfloat16"


def test_a_checkpoint_carries_the_tokenizer_to_the_export(mixed, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(mixed, model)
    files = {
        "tokenizer.json": "{}",
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/short.jinja": "{{ messages[0] }}",
    }
    for name, text in files.items():
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(text)
    run, out, hf = (str(tmp_path / name) for name in ("run", "out", "hf"))
    assert main(["import", str(model), run]) == 0
    shutil.rmtree(model)
    assert main(["inspect", run]) == 0
    assert "beside them: files.tokenizer" in capsys.readouterr().out
    assert main(["export", run, out]) == 0
    assert main(["convert", run, hf, "--to", "hf"]) == 0
    for name, text in files.items():
        assert (tmp_path / "out" / name).read_text() == text
        assert (tmp_path / "hf" / name).read_text() == text
    assert main(["remove", run, "files.tokenizer"]) == 0
    assert main(["export", run, str(tmp_path / "bare")]) == 0
    assert not (tmp_path / "bare" / "tokenizer.json").exists()
