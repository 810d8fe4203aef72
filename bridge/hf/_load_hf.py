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

    Only what this process's shards need is read, and each byte of it once. Beside the
    arrays the host needs a few megabytes a core on CPU; for other devices, two tensors
    of the file; for GPTQ and AWQ, also two weights as they are stored. In a job of
    several processes all of them must make this call: each byte is read by one of them.
    Everything is checked against config and headers before the first weight is read.

    Values are cast to the dtype of `like` between floating dtypes (bfloat16 files
    fill float32 main weights exactly; the other way rounds); any other difference of
    dtype is an error. Tensors or leaves without a counterpart are errors too. Layers
    that predict further tokens or attend to images, and other parts than the text part
    of a multimodal model, are left out, with a warning. Quantized weights are decoded
    to the dtype of the config first.

    Args:
      path: Directory with `config.json` and files as `open_checkpoint` takes them, or
        one such file.
      like: Abstract parameters: any pytree of `jax.ShapeDtypeStruct`. Each array is
        created with the leaf's `.sharding`, or on the default device if it is None.
      config: Config of the decoder; None reads `config.json`.
      progress: Called after each tensor of the checkpoint with bytes read and total
        bytes.

    Returns:
      Pytree of arrays with the structure of `like`.

    Raises:
      FileNotFoundError: If there is no checkpoint or no config.
      ValueError: If the checkpoint is damaged, its family not supported, or `like`,
        config and checkpoint do not fit; everything that does not fit is listed. Also
        if the config ties an output projection that is stored with other values.

    Examples:
      >>> loaded = bridge.load_hf("small-llama", like)
      >>> jax.tree.all(jax.tree.map(jnp.array_equal, loaded, params))
      True
    """
    source, _, mapping = open_hf(path, config)
    return load(source, mapping, like, progress=progress)
