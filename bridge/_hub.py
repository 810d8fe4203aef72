"""The Hugging Face hub: a model's files, on this machine."""

import os
from pathlib import Path

# No pickles: a checkpoint that has safetensors does not need them, and they run code.
_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]


def resolve(path_or_repo_id: str | os.PathLike[str]) -> Path:
    """Returns a local path, downloading a hub repository if need be.

    Only safetensors, JSON and tokenizer files are downloaded, and kept in the hub's
    own cache. `load_hf` takes local paths alone, so that nothing is ever downloaded
    by surprise.

    Args:
      path_or_repo_id: A path that exists, returned as it is, or a hub id such as
        `"meta-llama/Llama-3.2-1B"`.

    Raises:
      ValueError: If it is neither, or the hub cannot be reached or refuses.
    """
    path = Path(path_or_repo_id)
    if path.exists():
        return path
    # Here and not above: a local checkpoint needs neither the package nor its cost.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path_or_repo_id), allow_patterns=_PATTERNS))
    except Exception as error:  # the hub's errors share no narrower base class
        raise ValueError(
            f"'{path_or_repo_id}' is no path that exists, and could not be fetched "
            f"from the hub: {type(error).__name__}: {error}. Check the spelling, the "
            "network, and whether the repository needs a login (`hf auth login`)."
        ) from error
