"""Upload of a folder to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id


def check_push(repo: str) -> None:
    """Checks a repository's name and the token, before any work is done.

    Args:
      repo: Name of the repository, `org/name`.

    Raises:
      ValueError: If the name is not valid, there is no token, or the hub rejects it.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"--push {repo}: {error}") from error
    try:
        huggingface_hub.HfApi().whoami()
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"--push {repo}: the hub at {constants.ENDPOINT} does not accept your "
            f"login ({_first_line(error)}). Log in with `hf auth login`, or set "
            "HF_TOKEN."
        ) from error


def push(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Uploads a folder in one commit; makes the repository if there is none.

    Args:
      folder: Folder whose files are uploaded.
      repo: Name of the repository, `org/name`.
      private: Whether a new repository is private.
      message: Message of the commit.

    Returns:
      URL of the commit.

    Raises:
      ValueError: If the hub refuses the repository or the commit.
    """
    api = huggingface_hub.HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.create_commit(repo, _additions(folder), commit_message=message)
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"--push {repo}: '{folder}' is written, but not uploaded: "
            f"{_first_line(error)}. Try again: hf upload {repo} {folder}"
        ) from error
    return commit.commit_url


def _additions(folder: Path) -> list[huggingface_hub.CommitOperationAdd]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        huggingface_hub.CommitOperationAdd(file.relative_to(folder).as_posix(), file)
        for file in files
    ]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
