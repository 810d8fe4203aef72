"""Parameter groups: sets of parameters that share a buffer."""

import dataclasses
from collections.abc import Sequence

from bridge.megatron.buffers._param_spec import ParamSpec


@dataclasses.dataclass(frozen=True)
class BufferKey:
    """Properties shared by all parameters of one buffer.

    Args:
      param_dtype: Dtype of the parameter buffer; `"uint8"` for quantized parameters.
      grad_dtype: Dtype of the gradient buffer.
      is_expert: Whether gradients are reduced over the experts' data-parallel ranks.
      is_layer_wise: Whether the layer-wise optimizer (Muon) updates the parameters.
    """

    param_dtype: str
    grad_dtype: str
    is_expert: bool = False
    is_layer_wise: bool = False


@dataclasses.dataclass(frozen=True)
class ParamGroup:
    """Parameters of one buffer, with their checkpoint indices.

    Args:
      params: Parameters of the buffer, in model order.
      indices: Index of each parameter among those that would share its buffer if none
        were quantized. Checkpoints use it as a key, so that a checkpoint written
        without quantization loads into a quantized run.
    """

    params: tuple[ParamSpec, ...]
    indices: tuple[int, ...]


def group_params(
    params: Sequence[ParamSpec],
    *,
    grad_reduce_in_fp32: bool = False,
    layer_wise: bool = False,
) -> dict[BufferKey, ParamGroup]:
    """Groups parameters by the buffer that contains them.

    Args:
      params: Trainable parameters, in model order.
      grad_reduce_in_fp32: Whether gradients are float32; otherwise each gradient has
        its parameter's dtype.
      layer_wise: Whether the run has a layer-wise optimizer, whose parameters get
        separate buffers.

    Returns:
      Parameter groups by buffer key, in order of first appearance.

    Source: Megatron-LM
    megatron/core/distributed/param_and_grad_buffer.py::group_params_for_buffers.
    Deviation: Megatron reads a tag from each parameter; this function calls
    `is_layer_wise`.
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
        # The index counts quantized and plain parameters together; the buffer key
        # separates them.
        key = dataclasses.replace(as_if_plain, param_dtype=param.stored_dtype)
        index = counts.get(as_if_plain, 0)
        counts[as_if_plain] = index + 1
        members.setdefault(key, []).append((param, index))
    return {
        key: ParamGroup(*map(tuple, zip(*pairs, strict=True)))
        for key, pairs in members.items()
    }


def is_layer_wise(param: ParamSpec) -> bool:
    """Returns whether Muon updates a parameter: a matrix that is not an embedding.

    Adam updates biases, norms, embeddings, the output layer, and any matrix with
    `use_muon=False`.

    Source: Megatron-LM
    megatron/core/optimizer/layer_wise_optimizer.py::is_managed_by_layer_wise_optimizer
    and megatron/core/optimizer/emerging_optimizers.py::_is_muon_excluded
    """
    is_matrix = len(param.shape) == 2
    return is_matrix and param.use_muon and not param.is_embedding_or_output
