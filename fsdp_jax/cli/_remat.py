"""Policies of `--remat`: which activations of a layer are saved for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

Remat = Literal["all", "dots", "attention", "offload", "nothing"]

_POLICIES = jax.checkpoint_policies
_ATTENTION = _POLICIES.save_only_these_names("context_attention")
# For jax neither a kernel of attention nor a loop over blocks of rows is a product; and
# what came from other ranks would be sent again.
_NAMED = _POLICIES.save_only_these_names(
    "context_attention", "expert_product", "received_tokens"
)
REMAT_POLICIES: dict[Remat, Callable[..., Any] | None] = {
    "all": None,
    "dots": _POLICIES.save_from_both_policies(
        _POLICIES.dots_with_no_batch_dims_saveable, _NAMED
    ),
    "attention": _ATTENTION,
    "offload": _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=(),
        names_which_can_be_offloaded=("layer_input",),
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "nothing": _POLICIES.nothing_saveable,
}
"""`remat_policy` of `FSDPConfig` by the value of the option."""
