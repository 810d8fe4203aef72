"""Loading a Hugging Face checkpoint into sharded arrays."""

import os
from typing import Any

from bridge.hf._hf_checkpoint import open_hf
from bridge.models import DecoderConfig
from bridge.streaming._load import Progress, load


def load_hf(
    path: str | os.PathLike[str],
    like: Any,
    *,
    config: DecoderConfig | None = None,
    progress: Progress | None = None,
) -> Any:
    """Loads the weights of a Hugging Face checkpoint as a tree like `like`.

    Only what this process's shards need is read, and each byte of it once. On CPU the
    host holds the arrays themselves and a few megabytes a core; for other devices, two
    tensors of the file. In a job of several processes all of them must call this
    alike: a byte is read by one of them. Everything is checked against config and
    headers before the first weight is read.

    Values are cast to the dtype of `like` between floating dtypes (bfloat16 files
    fill float32 main weights exactly; the other way rounds); any other difference of
    dtype is an error. Tensors or leaves without a counterpart are errors too. Layers
    that predict further tokens (DeepSeek-V3) are left out, with a warning.

    Args:
      path: A directory with `config.json` and safetensors files, or one such file.
      like: Any pytree of `jax.ShapeDtypeStruct`. A leaf is born in its `.sharding`;
        without one, on the default device.
      config: The model; None reads `config.json`.
      progress: Called with bytes of the checkpoint done, and bytes in all, after each
        tensor of the file.

    Returns:
      Arrays in the structure of `like`.

    Raises:
      FileNotFoundError: If there is no checkpoint or no config.
      ValueError: If the checkpoint is damaged, its family not supported, or `like`,
        config and checkpoint do not fit; everything that does not fit is listed. Also
        if the config ties an output projection that is stored with other values.
    """
    source, _, mapping = open_hf(path, config)
    return load(source, mapping, like, progress=progress)
