"""Which process of which job this is: as told, or as its launcher's variables say."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence

from jax._src.clusters import ClusterEnv

from fsdp_jax.launch._protocol import split_address

# Set by `fsdp-jax launch`, which is itself the coordinator.
HOSTED = "FSDP_JAX_HOSTED"
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
# torchrun itself listens at MASTER_PORT if it says so here.
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process in a job.

    Attributes:
      host: Of the coordinator.
      port: Of the coordinator.
      num_processes: How many the job has.
      process_id: Which this is.
      local_device_ids: Its GPUs among those of the machine; None for all.
      hosted: Whether the coordinator runs already, and not in process 0.
    """

    host: str
    port: int
    num_processes: int
    process_id: int
    local_device_ids: Sequence[int] | None = None
    hosted: bool = False


def find_place(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Place | None:
    """Finds the place of this process; None if nothing speaks of a job.

    Args:
      coordinator_address: As for `initialize`, like the next three.
      num_processes: The same.
      process_id: The same.
      local_device_ids: The same.
      environment: Default that of the process; jax's own detection reads that always.

    Raises:
      ValueError: If what is said is incomplete or wrong.
    """
    variables = os.environ if environment is None else environment
    ids = [local_device_ids] if isinstance(local_device_ids, int) else local_device_ids
    given = (coordinator_address, num_processes, process_id)
    if all(argument is None for argument in given):
        if _is_torchrun(variables):
            return _from_torchrun(variables, ids)
        _check_step(variables)
        _check_pod(variables)
    # What is not given is found by jax, of its JAX_* variables or of a cluster.
    address = coordinator_address or variables.get("JAX_COORDINATOR_ADDRESS")
    address, count, rank, ids = ClusterEnv.auto_detect_unset_distributed_params(
        address, num_processes, process_id, ids, None, None
    )
    if address is None and count is None and rank is None:
        return None
    if address is None or count is None or rank is None:
        raise ValueError(
            "initialize takes coordinator_address, num_processes and process_id "
            f"together; got {address}, {count} and {rank}."
        )
    return _place(address, count, rank, ids)


def _place(
    address: str, count: int, rank: int, ids: Sequence[int] | None, hosted: bool = False
) -> Place:
    host, port = split_address(address)
    if not 0 <= rank < count:
        raise ValueError(
            f"process_id {rank} of num_processes {count}: ids are 0 to "
            f"{max(count - 1, 0)}."
        )
    return Place(host, port, count, rank, ids, hosted)


def _is_torchrun(variables: Mapping[str, str]) -> bool:
    return "RANK" in variables and "WORLD_SIZE" in variables


def _from_torchrun(variables: Mapping[str, str], ids: Sequence[int] | None) -> Place:
    missing = [name for name in _TORCHRUN if name not in variables]
    if missing:
        raise ValueError(
            "RANK and WORLD_SIZE are set, as torchrun sets them, but not "
            f"{', '.join(missing)}."
        )
    wrong = {n: variables[n] for n in _TORCHRUN[1:] if not variables[n].isdecimal()}
    if wrong:
        shown = ", ".join(f"{name}='{value}'" for name, value in wrong.items())
        raise ValueError(f"These variables are numbers: {shown}.")
    _, port, count, rank, local = (variables[name] for name in _TORCHRUN)
    next_port = int(port) + (variables.get(_AGENT_STORE) == "True")
    return _place(
        f"{variables['MASTER_ADDR']}:{next_port}",
        int(count),
        int(rank),
        [int(local)] if ids is None else ids,
        hosted=HOSTED in variables,
    )


def _check_step(variables: Mapping[str, str]) -> None:
    """A batch script of SLURM is no task of its job: one process would run alone."""
    tasks = variables.get("SLURM_NTASKS", "1")
    if tasks != "1" and "SLURM_STEP_NODELIST" not in variables:
        raise ValueError(
            f"SLURM has {tasks} tasks for this job, but this process was not started "
            "by srun and is none of them. Write `srun python ...` in the batch script."
        )


def _check_pod(variables: Mapping[str, str]) -> None:
    """Without Kubernetes' client jax warns, and each pod would run alone."""
    of_a_job = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= variables.keys()
    if of_a_job and importlib.util.find_spec("kubernetes") is None:
        raise ValueError(
            "This is a pod of an indexed Job, and the other pods are found with the "
            "package 'kubernetes', which is not installed: pip install 'jax[k8s]'."
        )
