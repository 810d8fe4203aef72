"""Elastic jobs on the command line: options of `launch`, and the mesh of `train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated

import tyro
from jax.sharding import Mesh

from fsdp_jax.cli._options import Unset
from fsdp_jax.cli._train_config import TrainConfig
from fsdp_jax.cli._train_options import MeshOptions
from fsdp_jax.launch import ElasticConfig, Generation
from fsdp_jax.launch._elastic_config import parse_range
from fsdp_jax.sharding._mesh import BATCH_AXES, num_devices

_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")


@dataclasses.dataclass(frozen=True)
class ElasticOptions:
    """Restarts of a job when a process dies.

    Attributes:
      elastic: Least and largest number of replicas; --processes are those of the
        largest. Default: a death ends the job.
      global_batch: Rows of a step, as the program's --batch. With it any number of
        replicas that divides them may run, else only divisors of MAX.
      max_restarts: Number of generations that may fail; the next failure ends the job.
        Default 10.
      rejoin_secs: Seconds for which the place of a dead process, and its GPU, is left
        out, doubled with each further death there; 0 for none, inf to leave it out
        until the launcher gets SIGUSR1, which must be before less than MIN are left.
        Default 60.
    """

    elastic: Annotated[Unset[str], tyro.conf.arg(metavar="MIN:MAX")] = None
    global_batch: Unset[int] = None
    max_restarts: Unset[int] = None
    rejoin_secs: Unset[float] = None

    def config(self, environment: Mapping[str, str]) -> ElasticConfig | None:
        """Returns the limits of the job; None if it is not elastic.

        Args:
          environment: Environment variables of the launcher.

        Raises:
          ValueError: If options are out of range or have no effect, or the launcher is
            one of several.
        """
        given = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        if self.elastic is None:
            if given:
                names = [f"--{k.replace('_', '-')} {v}" for k, v in given.items()]
                raise ValueError(f"{', '.join(names)}: give --elastic MIN:MAX too.")
            return None
        nodes = {name: environment.get(name, "1") for name in _NODES}
        if several := [f"{k}={v}" for k, v in nodes.items() if v != "1"]:
            raise ValueError(
                f"--elastic {self.elastic} is for the processes of one machine, and "
                f"{several[0]}: let SLURM requeue the job, see the section 'Several "
                "machines' of the page 'elastic HSDP'."
            )
        least, most = parse_range(given.pop("elastic"))
        return ElasticConfig(least, most, **given)


def with_replicas(mesh: MeshOptions, generation: Generation | None) -> MeshOptions:
    """Returns the mesh of a generation.

    Args:
      mesh: Mesh of the complete job.
      generation: Generation of this process; None if the job is not elastic.

    Raises:
      ValueError: If the mesh has another number of replicas than the complete job.
    """
    if generation is None:
        return mesh
    if mesh.dp_outer != generation.max_replicas:
        raise ValueError(
            f"--dp-outer {mesh.dp_outer}: the launcher runs up to "
            f"{generation.max_replicas} replicas (--elastic): give --dp-outer "
            f"{generation.max_replicas}; a generation with fewer uses their number."
        )
    return dataclasses.replace(mesh, dp_outer=generation.num_replicas)


def num_microbatches(
    config: TrainConfig, mesh: Mesh, generation: Generation | None
) -> int:
    """Returns the microbatches of a step, so that a generation keeps the global batch.

    Args:
      config: Options of the complete job.
      mesh: Mesh of the generation.
      generation: Generation of this process; None if the job is not elastic.

    Raises:
      ValueError: If the rows of a step do not divide so, or the launcher was given
        another number of rows.
    """
    rows = config.data.batch
    if generation is not None and generation.global_batch not in (None, rows):
        raise ValueError(
            f"--batch {rows}, but the launcher has --global-batch "
            f"{generation.global_batch}: give both the same number."
        )
    if generation is None or generation.is_complete:
        return config.microbatches
    return generation.microbatches_for(
        rows,
        config.microbatches,
        data_ranks=num_devices(mesh, BATCH_AXES) // mesh.shape["dp_outer"],
    )
