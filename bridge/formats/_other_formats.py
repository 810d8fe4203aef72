"""Files that are no safetensors: what they are and who reads them, for error messages.

Names and first bytes decide what an error advises, never how anything is read.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase

_MOST_NAMES = 3  # of one kind, in a message
_FIRST_BYTES = {
    b"version https://git-lfs": (
        "It is a git-lfs pointer, which stands for the file: run `git lfs pull` "
        "where it was cloned, or download it from the hub."
    ),
    b"PK": "It is a zip, as torch.save writes: name it .pt for `bridge.from_torch`.",
    b"\x80": "It is a bare pickle, as torch wrote before 1.6: save it anew with torch.",
    b"GGUF": "It is a GGUF file, of llama.cpp: get the model's original weights.",
    b"\x89HDF": "It is an HDF5 file, of Keras: get the model's PyTorch weights.",
    b"<": "It is a web page: the download was answered by one, perhaps by a login.",
}
_NAMES = {
    "*.bin": "PyTorch pickles: `bridge.from_torch` reads them, running no code",
    "*.pt": "PyTorch pickles: `bridge.from_torch` reads them, running no code",
    "*.pth": "PyTorch pickles: `bridge.from_torch` reads them, running no code",
    "adapter_*.safetensors": "a PEFT adapter, no model: `bridge.load_lora` reads it",
    "*.safetensors": "safetensors under a name of their own: give the file's path",
    "*.distcp": "Megatron's distributed checkpoint: `bridge.megatron.open_megatron`",
    "latest_checkpointed_iteration.txt": (
        "checkpoints of Megatron: `bridge.megatron.open_megatron` reads them"
    ),
    "*.gguf": "GGUF, of llama.cpp: get the model's original weights",
    "*.onnx": "ONNX: get the model's original weights",
    "*.h5": "HDF5, of Keras: get the model's PyTorch weights",
    "*.msgpack": "flax of transformers 4: get the model's PyTorch weights",
}


def describe_content(head: bytes) -> str:
    """Says what a file is by its first bytes; the empty string if they say nothing.

    Args:
      head: The first bytes of the file, 32 or more if it has them.

    Returns:
      Sentences to be appended to a message.
    """
    known = (text for magic, text in _FIRST_BYTES.items() if head.startswith(magic))
    return next(known, "")


def describe_names(names: Iterable[str]) -> str:
    """Lists the files that hold weights in some other way, each with advice.

    Args:
      names: Names of a directory's files.

    Returns:
      Lines to be appended to a message; the empty string if there are no such files.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        advice = next((a for p, a in _NAMES.items() if fnmatchcase(name, p)), None)
        if advice is not None:
            groups.setdefault(advice, []).append(name)
    lines = []
    for advice, found in groups.items():
        shown = ", ".join(map(repr, found[:_MOST_NAMES]))
        more = len(found) - _MOST_NAMES
        lines.append(f"\n  {shown}{f' and {more} more' * (more > 0)}: {advice}.")
    return "".join(lines)
