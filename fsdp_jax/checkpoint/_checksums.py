"""Makes Orbax write a CRC-32C behind each chunk, which every zarr reader verifies.

Orbax 0.12.8 writes no checksums: a flipped bit in a value loads silently. Its reader,
TensorStore, verifies the codecs named in an array's metadata, so it suffices to name
the codec when the array is created. Orbax has no option for that. This module replaces
the one private function that builds the metadata, with effect for our handler only
(`_compat.ZARR_METADATA`).

Local checkpoints are not zarr: `local/_format.py` has a CRC-32 of its own for the
header and for each shard.
"""

from __future__ import annotations

from typing import Any

from fsdp_jax._compat import ZARR_METADATA

_CODEC = {"name": "crc32c"}


class _NoCompression:
    """False as `use_compression`, and recognizable as our handler's."""

    def __bool__(self) -> bool:
        return False


# No compression: weights hardly shrink (8 %), and zstd halves the speed.
CHECKSUMMED: Any = _NoCompression()


def _build_zarr3_metadata(
    global_shape: Any, chunk_shape: Any, use_compression: Any
) -> dict[str, Any]:
    metadata = _metadata_of_orbax(global_shape, chunk_shape, use_compression)
    if use_compression is CHECKSUMMED:
        # The outer codec is `sharding_indexed`; its inner codecs apply to each chunk.
        metadata["codecs"][0]["configuration"]["codecs"].append(_CODEC)
    return metadata


_metadata_of_orbax = ZARR_METADATA.replace(_build_zarr3_metadata)


def is_checksummed(metadata: dict[str, Any]) -> bool:
    """Returns whether an array's `zarr.json` names the checksum codec."""
    (sharding,) = metadata["codecs"]
    return _CODEC in sharding["configuration"]["codecs"]
