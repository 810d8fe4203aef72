"""SwiGLU's fused matrix under tensor and data parallelism: which shard holds what."""


def swiglu_shard_index(
    tp_rank: int, dp_rank: int, *, tp_size: int, dp_size: int
) -> int:
    """Returns where a rank's rows of a gate-and-up matrix lie in the logical matrix.

    A tensor rank holds its part of the gate above its part of up, and FSDP2 then cuts
    that over data ranks: the lower half of them hold gates, the upper half ups. The
    logical matrix is the whole gate above the whole of up, so neighbours on a rank
    are apart in it.

    ```python
    [swiglu_shard_index(1, dp, tp_size=2, dp_size=4) for dp in range(4)]  # [2, 3, 6, 7]
    ```

    Args:
      tp_rank: Rank in the tensor parallel group.
      dp_rank: Rank in the data parallel group.
      tp_size: Size of the tensor parallel group.
      dp_size: Size of the data parallel group; 1 has no answer, for the rank's rows
        are then two runs, a gate and an up.

    Returns:
      Position among the `tp_size * dp_size` shards of dim 0; its first row is that
      many times the rows of a shard.

    Raises:
      ValueError: If a rank is not in its group, or `dp_size` is odd, so that a shard
        holds rows of both halves.

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
