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
      directory: A model's directory. Links are followed as the hub's cache needs it,
        which links each file to a blob, but only to plain files.

    Raises:
      ValueError: If there is no such directory, or such a name is no plain file.
    """
    if not directory.is_dir():
        raise ValueError(f"Cannot copy from '{directory}': it is no directory.")
    found = sorted({file for name in _PATTERNS for file in directory.glob(name)})
    if wrong := [file for file in found if not file.is_file()]:
        raise ValueError(
            "Cannot copy these, which are no files:\n"
            + "\n".join(f"  {file}" for file in wrong)
        )
    return [file.relative_to(directory) for file in found]


def copy_sidecars(source: Path, files: list[Path], destination: Path) -> None:
    """Copies the bytes of what `find_sidecars` found."""
    for file in files:
        (destination / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / file, destination / file)
