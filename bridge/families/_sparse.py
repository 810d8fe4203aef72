"""Layers of Llama's names whose MLP is a mixture of experts."""

from collections.abc import Callable

from bridge.families._blocks import (
    FUSED_EXPERTS,
    PRE_NORMS,
    Rules,
    attention,
    experts,
    key_mapping,
    mlp,
    norms,
    router,
)
from bridge.families._family import KeyMapping
from bridge.models import DecoderConfig, LayerKind

Part = Callable[[DecoderConfig], Rules]


def key_mappings(
    attend: Part = attention, beside: Part = lambda _: ()
) -> tuple[KeyMapping, KeyMapping]:
    """Returns both ways to write the experts: each by itself, and all in one tensor.

    The first is what transformers writes, the second what it holds in memory and
    writes with `save_original_format=False`.

    Args:
      attend: Rules of the attention.
      beside: Rules of what a sparse MLP has beside router and experts.
    """

    def layer(run: Rules) -> Callable[[DecoderConfig, LayerKind], Rules]:
        def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
            is_sparse = kind.channels == "sparse"
            inner = router() + run + beside(config) if is_sparse else mlp(config)
            return attend(config) + inner + norms(PRE_NORMS)

        return rules

    return key_mapping(layer(experts())), key_mapping(layer(FUSED_EXPERTS))
