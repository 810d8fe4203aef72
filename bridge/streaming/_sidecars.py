"""Files of a model, such as the tokenizer's, that are copied unchanged."""

import shutil
from pathlib import Path

# Files that transformers reads, except weights and config, which an export rewrites.
_PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)


def find_sidecars(directory: Path) -> list[Path]:
    """Returns paths of tokenizer, processor and generation files in a directory.

    Args:
      directory: Directory of a model.

    Returns:
      Paths relative to `directory`, sorted.

    Raises:
      ValueError: If there is no such directory, or one of these names is not a regular
        file in it. Links are accepted if they lead to a file in the directory or, as
        in the hub's cache, in the blobs beside it; a link elsewhere could leak any
        file.
    """
    if not directory.is_dir():
        raise ValueError(f"Cannot copy from '{directory}': it is not a directory.")
    # Not one glob per pattern, which would silently skip broken links.
    listed = [*directory.iterdir(), *directory.glob("additional_chat_templates/*")]
    found = sorted(
        file
        for file in listed
        if any(file.relative_to(directory).match(pattern) for pattern in _PATTERNS)
    )
    check_inside(directory, found)
    return [file.relative_to(directory) for file in found]


def check_inside(directory: Path, files: list[Path]) -> None:
    """Checks that files of a directory are regular files that lie in it.

    Args:
      directory: Directory of a model.
      files: Paths in it.

    Raises:
      ValueError: If one is none, or a link to a file elsewhere, except in the blobs
        of the hub's cache.
    """
    # In the hub's cache, `snapshots/<commit>/<file>` links to `blobs/<hash>`.
    real = directory.resolve()
    inside = (real, real.parent.parent / "blobs")
    wrong = [
        f"  '{file}' is {file.resolve()}"
        for file in files
        if not file.is_file()
        or not any(file.resolve().is_relative_to(home) for home in inside)
    ]
    if wrong:
        raise ValueError(
            f"These of '{directory}' are not files that lie there:\n"
            + "\n".join(wrong)
            + "\nReplace them by plain files, or remove them."
        )


def copy_sidecars(source: Path, files: list[Path], destination: Path) -> None:
    """Copies the files returned by `find_sidecars`, contents only."""
    for file in files:
        (destination / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / file, destination / file)
