"""SwiGLU's fused matrix: shard indices under tensor and data parallelism."""


def swiglu_shard_index(
    tp_rank: int, dp_rank: int, *, tp_size: int, dp_size: int
) -> int:
    """Returns the shard index of a rank's rows in the logical gate-and-up matrix.

    A tensor-parallel rank holds its part of gate followed by its part of up. FSDP2 then
    splits these rows over data-parallel ranks: the lower half of the ranks hold gate
    rows, the upper half up rows. The logical matrix is the complete gate followed by
    the complete up, so shards that are adjacent on a rank are not adjacent in it.

    ```python
    [swiglu_shard_index(1, dp, tp_size=2, dp_size=4) for dp in range(4)]  # [2, 3, 6, 7]
    ```

    Args:
      tp_rank: Rank in the tensor-parallel group.
      dp_rank: Rank in the data-parallel group.
      tp_size: Size of the tensor-parallel group.
      dp_size: Size of the data-parallel group. It must be even; with 1 the rank's rows
        would be two separate ranges, gate and up.

    Returns:
      Index among the `tp_size * dp_size` shards of dim 0. The shard's first row is this
      index times the number of rows per shard.

    Raises:
      ValueError: If a rank is out of range, or `dp_size` is odd, so that one shard
        holds rows of gate and of up.

    Source: Megatron-LM megatron/core/transformer/mlp.py::apply_swiglu_sharded_factory
    (its branch for FSDP2)
    """
    if not (0 <= tp_rank < tp_size and 0 <= dp_rank < dp_size):
        raise ValueError(
            f"No rank (tp {tp_rank}, dp {dp_rank}) in groups of {tp_size} and "
            f"{dp_size}: ranks run from 0 up to, and without, the size of their group."
        )
    if dp_size % 2:
        raise ValueError(
            f"Cannot place a gate-and-up matrix split over {dp_size} data ranks: with "
            "an odd number one shard holds rows of both. Use an even dp_size."
        )
    shards_per_half = dp_size // 2
    half, shard = divmod(dp_rank, shards_per_half)
    return (half * tp_size + tp_rank) * shards_per_half + shard
