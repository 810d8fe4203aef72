"""The Hugging Face hub: a model's files, on this machine."""

import glob
import os
from pathlib import Path

from bridge._local_path import check_local
from bridge.formats._index import read_index
from bridge.formats._other_formats import describe_names
from bridge.formats._weight_files import (
    BIN_INDEX_NAME,
    BIN_NAME,
    INDEX_NAME,
    SINGLE_NAME,
)

# As transformers prefers them: the first that a repository has is its model.
_WEIGHTS = (
    SINGLE_NAME,
    INDEX_NAME,
    "adapter_model.safetensors",
    BIN_NAME,
    BIN_INDEX_NAME,
    "adapter_model.bin",
)
# What a model needs besides, all of it small.
_OTHERS = [
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "chat_template.*",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "tekken.json",
]


def resolve(
    path_or_repo_id: str | os.PathLike[str], *, revision: str | None = None
) -> Path:
    """Returns a local path; downloads a hub repository if the cache does not have it.

    Downloads config, tokenizer, chat template, and either `model.safetensors` or the
    files that its index names; PyTorch's files only of a repository without them, since
    other programs run the code in their pickles (`load_hf` does not). No second copies
    are downloaded, in other formats, precisions or directories. The files are stored in
    the hub's own cache, and found there without a network. Only this function
    downloads: `load_hf` takes local paths alone.

    Args:
      path_or_repo_id: Path that exists, or a hub id such as
        `"meta-llama/Llama-3.2-1B"`.
      revision: Branch, tag or commit of a hub repository; None means `main`.

    Returns:
      The path itself if it exists, else the directory in the cache.

    Raises:
      ValueError: If it is neither, there are no weights, the hub cannot be reached and
        the cache has no copy, or it refuses; or if a path that exists is given a
        revision.

    Examples:
      >>> bridge.resolve("small-llama").name  # a path that exists
      'small-llama'
    """
    check_local(path_or_repo_id)
    path = Path(path_or_repo_id)
    if path.exists():
        if revision is not None:
            raise ValueError(f"'{path}' is a local path: it has no {revision=}.")
        return path
    return _fetch(os.fspath(path_or_repo_id), revision)


def _fetch(repo_id: str, revision: str | None) -> Path:
    names = _list(repo_id, revision)
    if names is None:
        names = os.listdir(_download(repo_id, revision, ["config.json"]))
    weights = next((name for name in _WEIGHTS if name in names), None)
    if weights is None:
        raise ValueError(
            f"'{repo_id}' has no file that would be its model, none of "
            f"{', '.join(map(repr, _WEIGHTS))}.{describe_names(names)}"
        )
    folder = _download(repo_id, revision, [*_OTHERS, weights])
    if weights in (INDEX_NAME, BIN_INDEX_NAME):
        # Of the same commit, whatever is pushed meanwhile: the folder bears its name.
        files = sorted(set(read_index(folder / weights).values()))
        folder = _download(repo_id, folder.name, [glob.escape(file) for file in files])
    return folder


def _list(repo_id: str, revision: str | None) -> list[str] | None:
    """Returns the names of a repository's files; None if the hub does not tell."""
    # Here and not above: a local checkpoint needs neither the package nor its cost.
    from huggingface_hub import HfApi

    try:
        siblings = HfApi().model_info(repo_id, revision=revision).siblings
    except Exception:  # the cache may have a copy; if it has none, `_download` says why
        return None
    return [sibling.rfilename for sibling in siblings or []]


def _download(repo_id: str, revision: str | None, patterns: list[str]) -> Path:
    """Returns the cache's folder of a repository, after fetching what it lacks."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repo_id, revision=revision, allow_patterns=patterns, ignore_patterns="*/*"
        )
    except Exception as error:  # the hub's errors share no narrower base class
        raise ValueError(_explain(repo_id, revision, error)) from error
    return Path(folder)


def _explain(repo_id: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors

    subject = f"'{repo_id}' is not a path that exists, and"
    match error:
        case errors.HFValidationError():
            return f"{subject} no hub id such as 'org/name' either: {error}"
        case errors.GatedRepoError():  # before its base class, the next
            return (
                f"{subject} its hub repository is gated: accept the terms on its page, "
                "and log in (`hf auth login`)."
            )
        case errors.RepositoryNotFoundError():
            return (
                f"{subject} the hub has no such repository, or a private one: check "
                "its name, or log in (`hf auth login`)."
            )
        case errors.RevisionNotFoundError():
            return f"{subject} its hub repository has no revision {revision!r}."
        case errors.LocalEntryNotFoundError():
            return (
                f"{subject} the hub cannot be reached, and its cache has no complete "
                f"copy: check the network and HF_HUB_OFFLINE. {error}"
            )
    return f"{subject} fetching it failed: {type(error).__name__}: {error}"
