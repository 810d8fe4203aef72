"""What `import bridge` costs, and what it never needs."""

import fnmatch
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

import bridge


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    root = Path(bridge.__file__).parents[1]
    run = [sys.executable, "-c", code]
    output = subprocess.run(run, cwd=root, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in output.stdout.split()}


def test_import_bridge_loads_nothing_that_it_can_do_without():
    loaded = loaded_by("import bridge")
    assert "bridge" in loaded
    assert not loaded & {"torch", "transformers", "safetensors", "huggingface_hub"}
    assert "fsdp_jax" not in loaded


def test_a_local_path_is_resolved_without_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert bridge.resolve(tmp_path) == tmp_path


def test_a_hub_id_downloads_weights_and_tokenizer_but_no_pickle(monkeypatch, tmp_path):
    asked = {}

    def download(repo_id, *, allow_patterns):
        asked.update(repo_id=repo_id, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert bridge.resolve("some/model") == tmp_path
    assert asked["repo_id"] == "some/model"
    assert {"*.safetensors", "*.json"} <= set(asked["patterns"])
    for pickle in ("pytorch_model.bin", "model.pt", "optimizer.pth", "a.pkl"):
        assert not any(fnmatch.fnmatch(pickle, p) for p in asked["patterns"])


def test_a_hub_that_cannot_be_reached_is_one_clear_error(monkeypatch):
    def download(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match="'some/model' is no path .* no route"):
        bridge.resolve("some/model")
