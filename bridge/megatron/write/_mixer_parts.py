"""Mixers as `torch_dist` stores them: an entry for each part of a fused projection."""

from types import MappingProxyType

from bridge._box import Range, whole
from bridge.formats._source import Source
from bridge.formats._tensor_source import TensorSource
from bridge.megatron._mixers import FUSED, parts_of
from bridge.megatron._views import Section, Tensor
from bridge.megatron._vocab import Keyed


def split_mixers(source: Source) -> Source:
    """Returns a source with an entry for each part of mixers; the rest is unchanged.

    Args:
      source: Tensors by canonical name.

    Raises:
      ValueError: If the sizes of a mixer's tensors contradict each other.
    """
    keys = source.keys()
    if not any(FUSED.match(key) for key in keys):
        return source
    tensors: dict[str, Tensor] = {}
    for key in keys:
        match = FUSED.match(key)
        if match is None:
            tensors[key] = Keyed(source, key)
            continue
        rows, start = _rows(source, match[1]), 0
        for part in parts_of(key):
            box = whole(source.shape(key))
            rest = (Range(start, start + rows[part]), *box[1:])
            tensors[f"{key}.{part}"] = Section(Keyed(source, key), rest)
            start += rows[part]
    return TensorSource(source.name, MappingProxyType(tensors))


def _rows(source: Source, at: str) -> dict[str, int]:
    """Returns the number of rows of each part, from the sizes of a mixer's tensors."""
    heads = source.shape(f"{at}A_log")[0]
    conv = source.shape(f"{at}conv1d.weight")[0]
    projected = source.shape(f"{at}in_proj.weight")[0]
    width = projected - heads - conv  # the rows of z, as many as those of x
    state, odd = divmod(conv - width, 2)
    if min(width, state) <= 0 or odd or width % heads:
        raise ValueError(
            f"'{source.name}': {at}in_proj of {projected} rows, conv1d of {conv} and "
            f"A_log of {heads} are not the sizes of one Mamba 2 mixer."
        )
    return {"z": width, "x": width, "B": state, "C": state, "dt": heads}
