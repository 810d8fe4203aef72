"""Layers of Llama's names whose MLP is a mixture of experts."""

from collections.abc import Callable

from bridge.families._blocks import (
    FUSED_EXPERTS,
    PRE_NORMS,
    Rules,
    attention,
    experts,
    key_mapping,
    linear,
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
    return key_mappings_by_kind(lambda config, _: attend(config), beside)


def key_mappings_by_kind(
    mix: Callable[[DecoderConfig, LayerKind], Rules],
    beside: Part = lambda _: (),
) -> tuple[KeyMapping, KeyMapping]:
    """Returns both ways to write the experts, of layers with mixers of several kinds.

    Args:
      mix: Rules of the mixer of a kind of layer.
      beside: As for `key_mappings`.
    """

    def layer(run: Rules) -> Callable[[DecoderConfig, LayerKind], Rules]:
        def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
            is_sparse = kind.channels == "sparse"
            inner = router() + run + beside(config) if is_sparse else mlp(config)
            return mix(config, kind) + inner + norms(PRE_NORMS)

        return rules

    return key_mapping(layer(experts())), key_mapping(layer(FUSED_EXPERTS))


def gated_shared(config: DecoderConfig) -> Rules:
    """The MLP that all tokens share, and its gate."""
    at = "mlp.shared_expert."
    gate = "one embed -> embed one"
    return (
        *mlp(config, at, at, "shared_mlp"),
        *linear("mlp.shared_expert_gate", "mlp.shared_gate", gate),
    )
