"""Parameter groups: which parameters share a buffer."""

import dataclasses
from collections.abc import Sequence

from bridge.megatron.buffers._param_spec import ParamSpec


@dataclasses.dataclass(frozen=True)
class BufferKey:
    """What the parameters of one buffer have in common.

    Args:
      param_dtype: Dtype of the parameter buffer; `"uint8"` if they are quantized.
      grad_dtype: Dtype of the gradient buffer.
      is_expert: Whether they are reduced over the data ranks of experts.
      is_layer_wise: Whether the layer-wise optimizer (Muon) updates them.
    """

    param_dtype: str
    grad_dtype: str
    is_expert: bool = False
    is_layer_wise: bool = False


@dataclasses.dataclass(frozen=True)
class ParamGroup:
    """The parameters of one buffer.

    Args:
      params: They, in the order of the model.
      indices: For each its number among those that would share its buffer if none
        were quantized. Checkpoints are keyed by it, so that one written without
        quantization loads with it.
    """

    params: tuple[ParamSpec, ...]
    indices: tuple[int, ...]


def group_params(
    params: Sequence[ParamSpec],
    *,
    grad_reduce_in_fp32: bool = False,
    layer_wise: bool = False,
) -> dict[BufferKey, ParamGroup]:
    """Groups parameters by the buffer that they lie in.

    Args:
      params: Trainable parameters, in the order of the model.
      grad_reduce_in_fp32: Whether gradients are float32, or of each parameter's dtype.
      layer_wise: Whether the run has a layer-wise optimizer, whose parameters then
        have buffers of their own.

    Returns:
      The groups, in the order in which each first appears.

    Source: Megatron-LM
    megatron/core/distributed/param_and_grad_buffer.py::group_params_for_buffers, which
    reads a tag from each parameter where we apply `is_layer_wise`.
    """
    members: dict[BufferKey, list[tuple[ParamSpec, int]]] = {}
    counts: dict[BufferKey, int] = {}
    for param in params:
        as_if_plain = BufferKey(
            param_dtype=param.dtype,
            grad_dtype="float32" if grad_reduce_in_fp32 else param.dtype,
            is_expert=param.is_expert,
            is_layer_wise=layer_wise and is_layer_wise(param),
        )
        key = dataclasses.replace(as_if_plain, param_dtype=param.stored_dtype)
        index = counts.get(as_if_plain, 0)
        counts[as_if_plain] = index + 1
        members.setdefault(key, []).append((param, index))
    return {
        key: ParamGroup(*map(tuple, zip(*pairs, strict=True)))
        for key, pairs in members.items()
    }


def is_layer_wise(param: ParamSpec) -> bool:
    """Says whether Muon would update a parameter: a matrix, and no embedding.

    Biases, norms, embeddings and the output layer go to Adam, and so does a matrix
    with `use_muon=False`.

    Source: Megatron-LM
    megatron/core/optimizer/layer_wise_optimizer.py::is_managed_by_layer_wise_optimizer
    and megatron/core/optimizer/emerging_optimizers.py::_is_muon_excluded
    """
    is_matrix = len(param.shape) == 2
    return is_matrix and param.use_muon and not param.is_embedding_or_output
