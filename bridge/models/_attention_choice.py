"""Choice of the attention kernel of a layer on a device, with its reason."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from bridge._compat import CUDNN_ATTENTION

KernelName = Literal["cudnn", "flash", "xla"]
"""Attention kernel: cuDNN's, the Pallas kernel of this package, or XLA's operations."""

WantedKernel = Literal["auto", "cudnn", "flash", "xla"]
"""Attention kernel to use; auto for the first of them that the device can run."""

ContextForm = Literal["ring", "all_gather", "ulysses"]
"""Context-parallel attention algorithm."""

ASSUMED_CUDNN = 91000
"""Version of cuDNN on GPUs that are not present: 9.10, as the planner compiles for."""

_CAPABILITIES = {
    **dict.fromkeys(("A100", "A800"), (8, 0)),
    **dict.fromkeys(("L40S", "L40", "L4"), (8, 9)),
    **dict.fromkeys(("H20", "H800", "H100", "H200", "GH200"), (9, 0)),
    **dict.fromkeys(("B200", "GB200"), (10, 0)),
    **dict.fromkeys(("B300", "GB300"), (10, 3)),
}
"""Compute capability of the GPUs that steps are planned for, by name."""


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Properties of a device that attention kernels depend on.

    Attributes:
      kind: Name of the device, e.g. `NVIDIA H100 80GB HBM3` or `cpu`.
      capability: CUDA compute capability `(major, minor)`; None if it has none.
      cudnn: Version of cuDNN, e.g. 91000 for 9.10.0; None if it is not installed.
    """

    kind: str
    capability: tuple[int, int] | None = None
    cudnn: int | None = ASSUMED_CUDNN

    @classmethod
    def current(cls) -> "Accelerator":
        """Returns the device that is traced for: that of the mesh, if there is one.

        A step is planned on meshes of GPUs that are not here, and runs their kernels.
        """
        abstract = jax.sharding.get_abstract_mesh().abstract_device
        here = jax.devices()[0]
        if abstract is None or abstract.device_kind == here.device_kind:
            return cls.of(here)
        return cls(abstract.device_kind, _capability(abstract))

    @classmethod
    def of(cls, device: Any) -> "Accelerator":
        """Returns what a device is, present or not."""
        capability, cudnn = _capability(device), ASSUMED_CUDNN
        if capability and jax.default_backend() == "gpu":
            cudnn = _installed_cudnn()
        return cls(device.device_kind, capability, cudnn)


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Features of attention that decide which kernels compute it.

    Attributes:
      head_dim: Width of queries and keys.
      v_head_dim: Width of values.
      dtype: Dtype of queries, keys and values.
      window: Tokens that a query sees; "traced" if only the running program knows;
        None for all.
      softcap: Whether scores are bounded.
      packed: Whether rows have segments.
      context: Context-parallel algorithm; None where a rank has its rows complete.
    """

    head_dim: int
    v_head_dim: int
    dtype: DTypeLike
    window: int | Literal["traced"] | None = None
    softcap: bool = False
    packed: bool = False
    context: ContextForm | None = None


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """The kernel of a layer.

    Attributes:
      kernel: Name of the kernel.
      reason: Why it is this one, and why not those before it.
    """

    kernel: KernelName
    reason: str


def choose_attention(
    shape: AttentionShape, device: Accelerator, wanted: WantedKernel = "auto"
) -> KernelChoice:
    """Returns the attention kernel for a layer on a device.

    Args:
      shape: Features of the attention.
      device: Device that runs it.
      wanted: Kernel to use; auto for cuDNN's, else the flash kernel, else XLA's
        operations.

    Raises:
      ValueError: If the device cannot run the wanted kernel.

    Example:
      >>> from bridge.models import Accelerator, AttentionShape, choose_attention
      >>> h100 = Accelerator("NVIDIA H100 80GB HBM3", (9, 0))
      >>> choose_attention(AttentionShape(128, 128, "bfloat16"), h100).kernel
      'cudnn'
      >>> choose_attention(AttentionShape(128, 128, "bfloat16", softcap=True), h100)
      KernelChoice(kernel='flash', reason='cuDNN has no softcap')
    """
    cudnn, flash = list(_not_cudnn(shape, device)), list(_not_flash(shape, device))
    if wanted == "xla":
        return KernelChoice("xla", "asked for")
    if wanted != "auto":
        if problems := cudnn if wanted == "cudnn" else flash:
            raise ValueError(
                f"attention={wanted!r} does not run on {device.kind}: "
                f"{'; '.join(problems)}. Use attention='auto'."
            )
        return KernelChoice(wanted, "asked for")
    if not cudnn:
        return KernelChoice("cudnn", f"head dims of {_widths(shape)}, 16 bits")
    if not flash:
        return KernelChoice("flash", "; ".join(cudnn))
    return KernelChoice("xla", "; ".join(dict.fromkeys([*cudnn, *flash])))


def _not_cudnn(shape: AttentionShape, device: Accelerator) -> Iterator[str]:
    """Yields why cuDNN's kernel does not compute it.

    Source: jax `fused_attention_stablehlo.py::check_is_flash_attention`;
      TransformerEngine `fused_attn.cpp::nvte_get_fused_attn_backend` for Blackwell.
    """
    yield from _not_on_gpu(shape, device)
    if device.capability is None:
        return
    if device.cudnn is None:
        yield "cuDNN is not installed"
        return
    if device.capability == (10, 3) and device.cudnn < 91100:
        yield f"compute capability 10.3 needs cuDNN 9.11, not {_version(device.cudnn)}"
    yield from _wrong_widths(shape, device.capability, device.cudnn)
    if shape.softcap:
        yield "cuDNN has no softcap"
    if shape.packed:
        yield "cuDNN takes packed rows by a mask [seq, seq] only"
    if shape.window == "traced":
        yield "cuDNN's window is static"
    if shape.context == "ring" and shape.window is not None:
        yield "cuDNN has no window over the keys of other ranks"


def _wrong_widths(
    shape: AttentionShape, capability: tuple[int, int], cudnn: int
) -> Iterator[str]:
    widths = (shape.head_dim, shape.v_head_dim)
    if any(width % 8 for width in widths):
        yield f"head dims of {_widths(shape)} are not multiples of 8"
    most = 256 if capability[0] == 9 else 128
    is_deepseek = widths == (192, 128) and capability[0] == 10 and cudnn >= 91100
    if max(widths) > most and not is_deepseek:
        of = f"compute capability {capability[0]}.{capability[1]}"
        yield f"head dims of {_widths(shape)}: at most {most} on {of}"
    elif widths[0] != widths[1] and (capability < (9, 0) or cudnn < 91000):
        yield "queries and values of two widths need Hopper and cuDNN 9.10"


def _not_flash(shape: AttentionShape, device: Accelerator) -> Iterator[str]:
    """Yields why the Pallas kernel does not compute it."""
    yield from _not_on_gpu(shape, device)
    if device.capability is not None and device.capability < (8, 0):
        yield "the flash kernel needs compute capability 8.0"
    widths = (shape.head_dim, shape.v_head_dim)
    if min(widths) < 16 or max(widths) > 256:
        yield f"head dims of {_widths(shape)}: the flash kernel has 16 to 256"


def _not_on_gpu(shape: AttentionShape, device: Accelerator) -> Iterator[str]:
    if device.capability is None:
        yield f"fused kernels are for NVIDIA GPUs, and this is {device.kind}"
    elif jnp.dtype(shape.dtype) not in (jnp.bfloat16, jnp.float16):
        yield f"fused kernels take 16 bits, not {jnp.dtype(shape.dtype)}"
    if shape.context == "all_gather":
        yield "all_gather attention computes blocks by XLA's operations"


def _capability(device: Any) -> tuple[int, int] | None:
    """Returns the compute capability, by the name of devices that do not tell it."""
    if device.platform not in ("gpu", "cuda") or "NVIDIA" not in device.device_kind:
        return None
    told = str(getattr(device, "compute_capability", ""))
    if re.fullmatch(r"\d+\.\d+", told):
        major, minor = told.split(".")
        return int(major), int(minor)
    words = re.split(r"[\s-]", device.device_kind)
    return next((_CAPABILITIES[word] for word in words if word in _CAPABILITIES), None)


def _installed_cudnn() -> int | None:
    try:
        return CUDNN_ATTENTION.get().check_cudnn_version()
    except RuntimeError:  # Not found, or not to be loaded.
        return None


def _widths(shape: AttentionShape) -> str:
    widths = dict.fromkeys((shape.head_dim, shape.v_head_dim))
    return " and ".join(map(str, widths))


def _version(cudnn: int) -> str:
    return f"{cudnn // 10000}.{cudnn // 100 % 100}"
