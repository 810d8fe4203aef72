"""Policies of `--remat`: which activations of a layer are saved for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

from bridge.models._decoder_layer import LAYER_INPUT
from bridge.models._fused_attention import RESIDUALS
from bridge.models._moe import EXPERT_PRODUCT
from fsdp_jax.ops.moe._routes import RECEIVED

Remat = Literal["all", "dots", "attention", "offload", "nothing"]

_POLICIES = jax.checkpoint_policies
_ATTENTION = _POLICIES.save_only_these_names(RESIDUALS)
# For jax neither a kernel of attention nor a loop over blocks of rows is a product; and
# what came from other ranks would be sent again.
_NAMED = _POLICIES.save_only_these_names(RESIDUALS, EXPERT_PRODUCT, RECEIVED)
_DOTS = _POLICIES.dots_with_no_batch_dims_saveable
_BUT_PADDED = _POLICIES.save_from_both_policies(_DOTS, _ATTENTION)
_BY_NAME: dict[Remat, Callable[..., Any] | None] = {
    "all": None,
    "dots": _POLICIES.save_from_both_policies(_DOTS, _NAMED),
    "attention": _ATTENTION,
    "offload": _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=(),
        names_which_can_be_offloaded=(LAYER_INPUT,),
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "nothing": _POLICIES.nothing_saveable,
}


def policy_of(remat: Remat, *, padded: bool = False) -> Callable[..., Any] | None:
    """Returns the `remat_policy` of `FSDPConfig` for a value of the option.

    Args:
      remat: The value.
      padded: Whether rows of experts are padded to the most that a rank may receive,
        several times what it does: `dots` saves none of them.
    """
    return _BUT_PADDED if padded and remat == "dots" else _BY_NAME[remat]
