"""Detection of other file formats, for advice in error messages.

Names and magic bytes select the advice of an error, never the way a file is read.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase

_MOST_NAMES = 3  # file names per format in a message
_TORCH = "PyTorch's files under a name of their own: give one file's path"
_ADAPTER = "a PEFT adapter, no model: `bridge.load_lora` reads it"
_FIRST_BYTES = {
    b"version https://git-lfs": (
        "It is a git-lfs pointer, which stands for the file: run `git lfs pull` "
        "where it was cloned, or download it from the hub."
    ),
    b"PK": "It is a zip, as torch.save writes: name it .pt.",
    b"\x80": "It is a bare pickle, as torch wrote before 1.6: save it anew with torch.",
    b"GGUF": "It is a GGUF file, of llama.cpp: get the model's original weights.",
    b"\x89HDF": "It is an HDF5 file, of Keras: get the model's PyTorch weights.",
    b"<": "It is a web page: the download was answered by one, perhaps by a login.",
}
_NAMES = {
    "adapter_*.safetensors": _ADAPTER,
    "adapter_*.bin": _ADAPTER,
    "*.bin": _TORCH,
    "*.pt": _TORCH,
    "*.pth": _TORCH,
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
    """Describes a file by its magic bytes.

    Args:
      head: First bytes of the file, at least 32 if the file is that long.

    Returns:
      Sentences to append to a message; the empty string if the format is unknown.
    """
    known = (text for magic, text in _FIRST_BYTES.items() if head.startswith(magic))
    return next(known, "")


def describe_names(names: Iterable[str]) -> str:
    """Lists files that store weights in another format, with advice for each.

    Args:
      names: File names in a directory.

    Returns:
      Lines to append to a message; the empty string if there are no such files.
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
