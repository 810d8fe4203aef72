"""The files beside the weights that neither training nor a bridge changes."""

import shutil
from pathlib import Path

# What transformers reads beside weights and config. Weights and config are never
# among them: those are written anew.
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
    """Returns the tokenizer's and generation's files of a model, relative to it.

    Args:
      directory: A model's directory.

    Raises:
      ValueError: If there is no such directory, or such a name is no plain file of it.
        A link counts as one if it leads to a file of the directory, or of the blobs
        beside it as in the hub's cache; elsewhere, it could publish any file.
    """
    if not directory.is_dir():
        raise ValueError(f"Cannot copy from '{directory}': it is no directory.")
    # Not a glob for each pattern, which would pass over a broken link in silence.
    listed = [*directory.iterdir(), *directory.glob("additional_chat_templates/*")]
    found = sorted(
        file
        for file in listed
        if any(file.relative_to(directory).match(pattern) for pattern in _PATTERNS)
    )
    real = directory.resolve()
    inside = (real, real.parent.parent / "blobs")
    wrong = [
        f"  '{file}' is {file.resolve()}"
        for file in found
        if not file.is_file()
        or not any(file.resolve().is_relative_to(home) for home in inside)
    ]
    if wrong:
        raise ValueError(
            f"These of '{directory}' are not files that lie there:\n"
            + "\n".join(wrong)
            + "\nReplace them by plain files, or remove them."
        )
    return [file.relative_to(directory) for file in found]


def copy_sidecars(source: Path, files: list[Path], destination: Path) -> None:
    """Copies the bytes of what `find_sidecars` found."""
    for file in files:
        (destination / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / file, destination / file)
