"""Quantized formats in which weights are gathered, and the dims of their arrays."""

from __future__ import annotations

from fsdp_jax.sharding._block_float8_gather import TILE, BlockFloat8Gather
from fsdp_jax.sharding._float8_gather import BLOCK as MXFP8_BLOCK
from fsdp_jax.sharding._float8_gather import Float8Gather, MXFP8Gather, num_blocks
from fsdp_jax.sharding._nvfp4_gather import BLOCK as NVFP4_BLOCK
from fsdp_jax.sharding._nvfp4_gather import NVFP4Gather

ParamGather = Float8Gather | MXFP8Gather | BlockFloat8Gather | NVFP4Gather
"""Quantized format in which weights are gathered."""

Dims = tuple[int, ...]


def needs_largest(gather: ParamGather | None) -> bool:
    """Returns whether ranks have to agree on the largest magnitude of a tensor."""
    return isinstance(gather, Float8Gather | NVFP4Gather)


def byte_dims(gather: ParamGather, dims: Dims, block_dim: int) -> Dims:
    """Returns the dims of the bytes of an array with dims `dims`.

    Args:
      gather: Format.
      dims: Dims of the array.
      block_dim: Dim of the blocks, counted from the end.
    """
    if not isinstance(gather, NVFP4Gather):
        return dims
    return _with(dims, block_dim, dims[block_dim] // 2)


def scale_dims(
    gather: ParamGather, dims: Dims, block_dim: int, split_dim: int, stored: int
) -> Dims | None:
    """Returns the dims of the scales of blocks; None for one scale a tensor.

    Args:
      gather: Format.
      dims: Dims of the array, of one or several shards.
      block_dim: Dim of the blocks, counted from the end.
      split_dim: Dim that data axes split, counted from the end.
      stored: Size of that dim in one shard.
    """
    if isinstance(gather, Float8Gather):
        return None
    sizes = {
        MXFP8Gather: MXFP8_BLOCK,
        NVFP4Gather: NVFP4_BLOCK,
        BlockFloat8Gather: TILE,
    }
    scales = _with(dims, block_dim, num_blocks(dims[block_dim], sizes[type(gather)]))
    if not isinstance(gather, BlockFloat8Gather):
        return scales
    shards = dims[split_dim] // stored
    return _with(scales, split_dim, shards * num_blocks(stored, TILE))


def _with(dims: Dims, at: int, size: int) -> Dims:
    changed = list(dims)
    changed[at] = size
    return tuple(changed)
