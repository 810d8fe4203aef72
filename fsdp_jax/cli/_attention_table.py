"""Table of the attention kernel that each kind of layer gets."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

import fsdp_jax as fsdp
from bridge.models import (
    Accelerator,
    AttentionShape,
    DecoderConfig,
    KernelChoice,
    LayerKind,
    WantedKernel,
    choose_attention,
)
from fsdp_jax._report import text_table
from fsdp_jax.cli._context_parallel import CPForm


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """Settings beside the model that decide its attention kernels.

    Attributes:
      device: Device that runs the model.
      dtype: Dtype of the computation.
      packed: Whether rows have segments.
      context: Context-parallel algorithm; None where a rank has its rows complete.
      wanted: Kernel that is asked for, or auto.
    """

    device: Accelerator
    dtype: DTypeLike
    packed: bool = False
    context: CPForm | None = None
    wanted: WantedKernel = "auto"


def settings_of(
    mesh: Mesh,
    config: fsdp.FSDPConfig,
    form: CPForm,
    wanted: WantedKernel = "auto",
    *,
    packed: bool = False,
) -> AttentionSettings:
    """Returns the settings of a run.

    Args:
      mesh: Device mesh, of devices that are present or not.
      config: Sharding and dtypes.
      form: Context-parallel algorithm, if the mesh has cp.
      wanted: Kernel that is asked for, or auto.
      packed: Whether rows have segments.
    """
    return AttentionSettings(
        Accelerator.of(mesh.devices.flat[0]),
        config.mp_policy.param_dtype or jnp.float32,
        packed=packed,
        context=form if mesh.shape["cp"] > 1 else None,
        wanted=wanted,
    )


def attention_choices(
    config: DecoderConfig, settings: AttentionSettings
) -> dict[str, KernelChoice]:
    """Returns the kernel of each kind of attention layer, by its description.

    Args:
      config: Config of the model.
      settings: Settings beside the model.

    Raises:
      ValueError: If the device cannot run the kernel that is asked for.
    """
    kinds = Counter(
        _Seen(window, kind.compresses is not None, _num_selected(config, kind))
        for kind, window in zip(config.layer_kinds, config.windows, strict=True)
        if kind.attends or kind.shared_block is not None
    )
    # Windows that differ between layers are inputs of the compiled loop over them.
    is_traced = len(set(config.windows)) > 1
    choices = {}
    for (window, reads_entries, selected), count in kinds.items():
        name = f"{count} x {'full attention' if window is None else _within(window)}"
        if reads_entries:
            choices[f"{name} and entries"] = KernelChoice("xla", _ENTRIES)
            continue
        shape = AttentionShape(
            config.qk_dim,
            config.v_head_dim,
            settings.dtype,
            window="traced" if is_traced else window,
            softcap=config.attn_logit_softcapping is not None,
            packed=settings.packed,
            context=settings.context,
        )
        choice = choose_attention(shape, settings.device, settings.wanted)
        if selected is not None:
            name += ", keys that an indexer selects"
            behind = f"; xla in rows of more than {selected:,} tokens, by a mask"
            choice = KernelChoice(choice.kernel, choice.reason + behind)
        choices[name] = choice
    return choices


class _Seen(NamedTuple):
    """What queries of a layer attend to.

    Attributes:
      window: Attention window in tokens; None for all tokens before.
      reads_entries: Whether they attend to entries of several tokens too.
      num_selected: Tokens up to which an indexer selects all; None without an indexer.
    """

    window: int | None
    reads_entries: bool
    num_selected: int | None


_ENTRIES = "scores of tokens and entries exist at once, masked"


def _within(window: int) -> str:
    return f"window of {window}"


def _num_selected(config: DecoderConfig, kind: LayerKind) -> int | None:
    if config.indexer is not None:
        return config.indexer.num_selected
    if config.block_indexer is not None and kind.indexes:
        return config.block_indexer.num_keys
    return None


_EXAMPLES = {
    "heads of 128": AttentionShape(128, 128, "bfloat16"),
    "heads of 256": AttentionShape(256, 256, "bfloat16"),
    "latent attention, 192 and 128": AttentionShape(192, 128, "bfloat16"),
    "softcap": AttentionShape(128, 128, "bfloat16", softcap=True),
    "packed documents": AttentionShape(128, 128, "bfloat16", packed=True),
    "one window": AttentionShape(128, 128, "bfloat16", window=4096),
    "windows that differ": AttentionShape(128, 128, "bfloat16", window="traced"),
    "ring over cp": AttentionShape(128, 128, "bfloat16", context="ring"),
    "all_gather over cp": AttentionShape(128, 128, "bfloat16", context="all_gather"),
    "float32": AttentionShape(128, 128, "float32"),
}


def example_choices(device: Accelerator) -> dict[str, KernelChoice]:
    """Returns what kinds of attention a device computes with which kernel."""
    return {name: choose_attention(shape, device) for name, shape in _EXAMPLES.items()}


def choice_table(choices: dict[str, KernelChoice]) -> str:
    """Returns choices as a table of text."""
    if not choices:
        return "attention: in no layer"
    columns = {"attention": "left", "kernel": "left", "why": "left"}
    rows = [(name, one.kernel, one.reason) for name, one in choices.items()]
    return text_table(columns, rows)


def plan_table(
    config: DecoderConfig, plan: fsdp.Plan, form: CPForm, wanted: WantedKernel
) -> str:
    """Returns the kernel of each kind of layer of a plan, as a table of text."""
    settings = settings_of(plan.mesh, plan.config, form, wanted)
    return choice_table(attention_choices(config, settings))
