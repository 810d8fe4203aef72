"""Options of a step that change no number: sharding, rematerialization, schedules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jax.sharding import Mesh

import fsdp_jax as fsdp
from bridge.models import WantedKernel
from fsdp_jax.cli._context_parallel import CPForm
from fsdp_jax.cli._options import Unset
from fsdp_jax.cli._remat import Remat, policy_of
from fsdp_jax.sharding._pipeline_config import ScheduleName

# Options that do nothing unless an axis of the mesh is larger than 1.
_NEEDS_AXIS = {
    "outer": "dp_outer",
    "cp_form": "cp",
    "schedule": "pp",
    "virtual_stages": "pp",
}


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What a step shards, saves for backward and overlaps.

    Attributes:
      zero: ZeRO stage, 0 to 3: shards nothing, the optimizer, gradients too, weights
        too.
      outer: State that dp_outer splits: 0 none (HSDP), 1 the optimizer's (HFSDP).
        Default 0.
      remat: Activations of a layer saved for backward: all, results of products with
        weights, of fused attention and of what ranks send to each other (dots; of
        experts over ep only with a capacity), the outputs of attention over cp
        (attention), nothing but the layer's input, or that in host memory (offload).
        Default dots; all where weights stay gathered.
      reshard: Frees the gathered weights of a layer after forward, and gathers them
        again for backward. Without it they are kept, as all activations must be.
      prefetch: Layers gathered ahead of the one that computes. Default 1; 0 where
        weights stay gathered.
      unroll: Layers in one iteration of the compiled loop.
      cp_form: Context-parallel attention algorithm: ring, all_gather or ulysses.
        Default ring.
      attention: Attention kernel: cudnn, flash (Pallas), xla, or the first of them that
        the GPU can run (auto).
      batch_parts: Parts of a rank's rows that a layer runs side by side: one computes
        while tokens of another are communicated over tp, ep or cp.
      schedule: Pipeline schedule: 1f1b or gpipe, which saves more activations. Default
        1f1b.
      virtual_stages: Parts of the layers per pipeline stage. Default 1.
    """

    zero: int = 3
    outer: Unset[int] = None
    remat: Unset[Remat] = None
    reshard: bool = True
    prefetch: Unset[int] = None
    unroll: int = 1
    cp_form: Unset[CPForm] = None
    attention: WantedKernel = "auto"
    batch_parts: int = 1
    schedule: Unset[ScheduleName] = None
    virtual_stages: Unset[int] = None

    @property
    def saved(self) -> Remat:
        """Activations of a layer that are saved for backward."""
        return self.remat or ("dots" if self.reshard else "all")

    @property
    def num_ahead(self) -> int:
        """Layers gathered ahead."""
        if self.prefetch is not None:
            return self.prefetch
        return 1 if self.reshard else 0

    @property
    def cp_algorithm(self) -> CPForm:
        """Context-parallel attention algorithm."""
        return self.cp_form or "ring"

    def check(self, sizes: Mapping[str, int] | None = None) -> None:
        """Checks the ranges, and that no option is without effect.

        Args:
          sizes: Sizes of the axes of the mesh; None for meshes to be tried.

        Raises:
          ValueError: If a number is out of range or an option needs another axis.
        """
        lowest = {"zero": 0, "prefetch": 0, "unroll": 1, "batch_parts": 1}
        lowest |= {"outer": 0, "virtual_stages": 1}
        highest = {"zero": 3, "outer": 1}
        wrong = []
        for name, low in lowest.items():
            value, high = getattr(self, name), highest.get(name)
            if value is not None and (
                value < low or (high is not None and value > high)
            ):
                limit = f"at least {low}" if high is None else f"{low} to {high}"
                wrong.append(f"--{name.replace('_', '-')} {value}: {limit}")
        for name, axis in _NEEDS_AXIS.items():
            value = getattr(self, name)
            if value is not None and sizes is not None and sizes.get(axis, 1) == 1:
                option = name.replace("_", "-")
                wrong.append(f"--{option} {value} has no effect with {axis}=1")
        if not self.reshard and self.zero < 3:
            wrong.append(f"--no-reshard has no effect with --zero {self.zero}")
        if not self.reshard and self.num_ahead:
            wrong.append(f"--prefetch {self.prefetch} has no effect with --no-reshard")
        if not self.reshard and self.saved != "all":
            wrong.append(
                f"--remat {self.remat} is of layers that are gathered again, and "
                "--no-reshard keeps them"
            )
        if wrong:
            raise ValueError("; ".join(wrong) + ".")

    def applied(
        self, config: fsdp.FSDPConfig, mesh: Mesh, *, padded: bool = False
    ) -> fsdp.FSDPConfig:
        """Returns a config with these options.

        Args:
          config: Config with all other fields.
          mesh: Device mesh.
          padded: Whether rows of experts are padded, see `Routing.pads`.

        Raises:
          ValueError: If `remat` names outputs of attention that nothing computes.
        """
        if self.remat == "attention" and (
            mesh.shape["cp"] == 1 or self.cp_form == "ulysses"
        ):
            raise ValueError(
                "--remat attention saves the outputs of attention over cp with "
                "--cp-form ring or all_gather: use cp > 1, or --remat nothing."
            )
        return dataclasses.replace(
            config,
            zero_dp_strategy=self.zero,
            outer_dp_sharding_strategy=self.outer or 0,
            remat_policy=policy_of(self.saved, padded=padded),
            reshard_after_forward=self.reshard,
            pipeline=fsdp.PipelineConfig(
                self.schedule or "1f1b", self.virtual_stages or 1
            ),
        )


def check_batch_parts(parts: int, rows: int, microbatches: int, mesh: Mesh) -> None:
    """Raises a `ValueError` if there are fewer rows than parts, or nothing to hide.

    Args:
      parts: Parts of a rank's rows.
      rows: Rows of a global batch.
      microbatches: Microbatches a step.
      mesh: Device mesh.
    """
    if parts == 1:
        return
    sizes = {axis: mesh.shape[axis] for axis in ("tp", "ep", "cp")}
    if all(size == 1 for size in sizes.values()):
        raise ValueError(
            f"--batch-parts {parts} has no effect with tp=1, ep=1, cp=1: layers "
            "communicate no tokens."
        )
    ranks = math.prod(mesh.shape[axis] for axis in ("dp_outer", "dp_shard", "ep"))
    own = rows // (ranks * microbatches)
    if own < parts:
        raise ValueError(
            f"--batch-parts {parts}: {rows} rows, {ranks} ranks and {microbatches} "
            f"microbatches give a rank {own} at a time. Use --batch "
            f"{parts * ranks * microbatches}, or --batch-parts {max(own, 1)}."
        )
