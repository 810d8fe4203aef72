"""What the hub has is fetched by its own client: what is needed, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.hub_server import BRANCH_COMMIT, COMMIT, Hub, running

import bridge

ROOT = Path(bridge.__file__).parents[1]
# Each child resolves several ids, since starting one takes seconds.
CHILD = """
import json, sys, bridge
def outcome(arguments):
    try:
        return str(bridge.resolve(arguments.pop("id"), **arguments))
    except ValueError as error:
        return f"ValueError: {error}"
json.dump([outcome(a) for a in json.loads(sys.argv[1])], open(sys.argv[2], "w"))
"""

NEEDED = """
    config.json generation_config.json chat_template.jinja tokenizer.json
    tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json
    vocab.json merges.txt
    """.split()
# Copies in other formats, precisions and directories, training states, pictures, code.
OTHERS = """
    .gitattributes README.md LICENSE modeling_own.py figure.png training_args.bin
    pytorch_model.bin pytorch_model.bin.index.json pytorch_model-00001-of-00001.bin
    consolidated.safetensors consolidated.00.pth model.fp16.safetensors model-q4.gguf
    model.safetensors.index.fp16.json optimizer.pt scheduler.pt tf_model.h5
    flax_model.msgpack onnx/model.onnx onnx/config.json original/params.json
    original/tokenizer.model original/model.safetensors preprocessor_config.json
    """.split()
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
BIN_SHARDS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
REPOS = {
    "org/one": [*NEEDED, *OTHERS, ONE],
    "org/many": [*NEEDED, *OTHERS, INDEX, *SHARDS],
    "org/both": [*NEEDED, *OTHERS, ONE, INDEX, *SHARDS],
    "org/adapter": ["adapter_config.json", "adapter_model.safetensors"],
    "org/old": [*NEEDED, "training_args.bin", BIN],
    "org/old-many": [*NEEDED, BIN_INDEX, *BIN_SHARDS],
    "org/no-model": [*NEEDED, "model.pt", "x.gguf"],
    "org/outside": [INDEX],
    "org/gated": [*NEEDED, ONE],
    "org/uncached": [*NEEDED, ONE],
}


def content_of(repo: str, file: str) -> bytes:
    """Other bytes for every file: the client fetches equal ones once."""
    if file not in (INDEX, BIN_INDEX):
        return f"{repo}/{file} at {{commit}}".encode()
    files = BIN_SHARDS if file == BIN_INDEX else SHARDS
    if repo == "org/outside":
        files = ["../../../../secret.safetensors"]
    weight_map = {f"tensor {i}": name for i, name in enumerate([*files, files[0]])}
    return json.dumps({"weight_map": weight_map, "of": repo}).encode()


def contents() -> dict[str, dict[str, bytes]]:
    return {
        repo: {file: content_of(repo, file) for file in files}
        for repo, files in REPOS.items()
    }


def resolve_all(
    arguments: list[dict[str, Any]], home: Path, **environment: str
) -> list[str]:
    """Calls `bridge.resolve` in a process of its own, with a cache of its own."""
    ours = ("HF_", "HUGGING", "TRANSFORMERS_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    result = home / "result.json"
    subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(arguments), str(result)],
        env=inherited
        | {"PYTHONPATH": str(ROOT), "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
        | {"HF_HUB_DISABLE_TELEMETRY": "1", **environment},
        cwd=home,
        check=True,
        timeout=120,
        capture_output=True,
    )
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def resolved(home) -> tuple[dict[str, str], dict[str, set[str]]]:
    """What each id is resolved to, and the files that were fetched for it."""
    ids = [*REPOS, "org/absent", "absent", "no/hub/id", "/no/such/path"]
    arguments: list[dict[str, Any]] = [{"id": repo} for repo in ids]
    del arguments[ids.index("org/uncached")]
    arguments += [
        {"id": "org/one", "revision": "branch"},
        {"id": "org/one", "revision": COMMIT},
        {"id": "org/one", "revision": "no-branch"},
        {"id": str(home), "revision": "branch"},
    ]
    with running(Hub(contents(), gated="org/gated")) as hub:
        paths = resolve_all(arguments, home, HF_ENDPOINT=hub.url)
    keys = ["@".join(str(v) for v in argument.values()) for argument in arguments]
    return dict(zip(keys, paths, strict=True)), hub.fetched


def files_in(folder: str) -> set[str]:
    root = Path(folder)
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "repo, weights",
    [
        ("org/one", [ONE]),
        ("org/many", [INDEX, *SHARDS]),
        ("org/both", [ONE]),  # as transformers prefers them
        ("org/old", [BIN]),
        ("org/old-many", [BIN_INDEX, *BIN_SHARDS]),
    ],
)
def test_only_what_is_needed_is_fetched(resolved, repo, weights):
    paths, fetched = resolved
    needed = {*NEEDED, *weights}
    assert files_in(paths[repo]) == fetched[repo] == needed
    for name in needed:
        expected = content_of(repo, name).replace(b"{commit}", COMMIT.encode())
        assert (Path(paths[repo]) / name).read_bytes() == expected


def test_an_adapter_is_fetched(resolved):
    paths, _ = resolved
    assert files_in(paths["org/adapter"]) == set(REPOS["org/adapter"])


def test_a_revision_is_a_branch_or_a_commit(resolved):
    for asked, commit in (
        ("org/one", COMMIT),
        ("org/one@branch", BRANCH_COMMIT),
        (f"org/one@{COMMIT}", COMMIT),
    ):
        weights = (Path(resolved[0][asked]) / ONE).read_text()
        assert weights == f"org/one/{ONE} at {commit}"


def test_all_files_are_of_one_commit_whatever_is_pushed_meanwhile(tmp_path):
    with running(Hub(contents(), moves_after=INDEX)) as hub:
        (path,) = resolve_all([{"id": "org/many"}], tmp_path, HF_ENDPOINT=hub.url)
    weights = (Path(path) / SHARDS[0]).read_text()
    assert weights == f"org/many/{SHARDS[0]} at {COMMIT}"


def test_nothing_is_fetched_of_a_repository_without_a_model(resolved):
    paths, fetched = resolved
    assert "org/no-model" not in fetched
    for said in ("'org/no-model'", f"'{ONE}'", f"'{BIN}'", "'model.pt'", "GGUF"):
        assert said in paths["org/no-model"]


@pytest.mark.parametrize(
    "asked, says",
    [
        ("org/gated", "gated: accept the terms on its page, and log in"),
        ("org/absent", "the hub has no such repository, or a private one"),
        ("absent", "the hub has no such repository, or a private one"),
        ("no/hub/id", "no hub id such as 'org/name' either"),
        ("/no/such/path", "no hub id such as 'org/name' either"),
        ("org/one@no-branch", "its hub repository has no revision 'no-branch'"),
        ("org/outside", "'../../../../secret.safetensors' is not a file name"),
    ],
)
def test_what_the_hub_refuses_is_one_clear_error(resolved, asked, says):
    message = resolved[0][asked]
    assert message.startswith("ValueError: ") and says in message


def test_a_local_path_has_no_revision(resolved, home):
    assert "is a local path" in resolved[0][f"{home}@branch"]


@pytest.mark.parametrize(
    "environment",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}],
    ids=["offline", "no answer"],
)
def test_without_a_network_the_cache_is_enough_or_missed(resolved, home, environment):
    ids = ["org/one", "org/many", "org/uncached"]
    paths = resolve_all([{"id": repo} for repo in ids], home, **environment)
    assert paths[:2] == [resolved[0][repo] for repo in ids[:2]]
    assert paths[2].startswith("ValueError: 'org/uncached' is not a path that exists")
    assert "the hub cannot be reached, and its cache has no complete copy" in paths[2]


def test_a_local_path_is_returned_as_it_is(tmp_path):
    assert bridge.resolve(tmp_path) == tmp_path


def test_a_local_path_is_resolved_without_the_hub_s_package():
    code = "import sys, bridge; bridge.resolve('.'); print(*sys.modules)"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "bridge" in done.stdout.split()
    assert "huggingface_hub" not in done.stdout.split()
