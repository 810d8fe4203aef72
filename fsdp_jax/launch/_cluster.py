"""Detection of a process's place in its job, from arguments or the environment.

torchrun's variables are read here. SLURM, Open MPI, Kubernetes and TPU pods are
detected by jax (`CLUSTER_ENV`); SLURM and Kubernetes are checked here for jobs in which
each process would run alone.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence

from fsdp_jax._compat import CLUSTER_ENV
from fsdp_jax.launch._protocol import is_loopback, split_address

# Set by `fsdp-jax launch`, which runs the coordinator itself.
HOSTED = "FSDP_JAX_HOSTED"
# Secret of the job, equal in all its processes; `fsdp-jax launch` makes one.
TOKEN = "FSDP_JAX_TOKEN"
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
# If "True", torchrun's own store listens at MASTER_PORT.
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclasses.dataclass(frozen=True)
class JobPlace:
    """Place of a process in a job.

    Attributes:
      host: Host of the coordinator.
      port: Port of the coordinator.
      num_processes: Number of processes of the job.
      process_id: Index of this process.
      local_device_ids: GPUs of this process among those of the machine; None for all.
      hosted: Whether the coordinator runs already, outside of process 0.
      token: Secret of the job; "" for none.
    """

    host: str
    port: int
    num_processes: int
    process_id: int
    local_device_ids: Sequence[int] | None = None
    hosted: bool = False
    token: str = dataclasses.field(default="", repr=False)


def find_place(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> JobPlace | None:
    """Returns the place of this process; None if no job is configured.

    Args:
      coordinator_address: Address of process 0, as in `initialize`.
      num_processes: Number of processes, as in `initialize`.
      process_id: Index of this process, as in `initialize`.
      local_device_ids: GPUs of this process, as in `initialize`.
      environment: Environment variables, default those of the process; jax's own
        detection always reads the latter.

    Raises:
      ValueError: If arguments or variables are incomplete or wrong.
    """
    variables = os.environ if environment is None else environment
    ids = [local_device_ids] if isinstance(local_device_ids, int) else local_device_ids
    given = (coordinator_address, num_processes, process_id)
    if all(argument is None for argument in given):
        if _is_torchrun(variables):
            return _with_token(_from_torchrun(variables, ids), variables)
        _check_step(variables)
        _check_pod(variables)
    # jax detects missing values from its JAX_* variables or from a cluster.
    address = coordinator_address or variables.get("JAX_COORDINATOR_ADDRESS")
    detect = CLUSTER_ENV.get().auto_detect_unset_distributed_params
    address, count, rank, ids = detect(
        address, num_processes, process_id, ids, None, None
    )
    if address is None and count is None and rank is None:
        return None
    if address is None or count is None or rank is None:
        raise ValueError(
            "initialize takes coordinator_address, num_processes and process_id "
            f"together; got {address}, {count} and {rank}."
        )
    return _with_token(_place(address, count, rank, ids), variables)


def check_token(place: JobPlace) -> None:
    """Raises a `ValueError` if a process needs a token of its job, and has none.

    It needs none alone, or if only processes of its machine reach the coordinator.
    """
    if place.token or place.num_processes == 1:
        return
    if place.hosted:
        raise ValueError(
            f"{HOSTED} is set, as `fsdp-jax launch` does, and {TOKEN} is not, which it "
            "sets too: start the program with the whole environment of the launcher."
        )
    if not is_loopback(place.host):
        raise ValueError(
            f"{TOKEN} is not set, and other machines reach the coordinator at "
            f"{place.host}: without it they can take the place of a process. Set it to "
            "the same secret in all processes, made for each job, such as by "
            f"`export {TOKEN}=$(openssl rand -hex 16)` before srun."
        )


def _with_token(place: JobPlace, variables: Mapping[str, str]) -> JobPlace:
    return dataclasses.replace(place, token=variables.get(TOKEN, ""))


def _place(
    address: str, count: int, rank: int, ids: Sequence[int] | None, hosted: bool = False
) -> JobPlace:
    host, port = split_address(address)
    if not 0 <= rank < count:
        raise ValueError(
            f"process_id {rank} of num_processes {count}: ids are 0 to "
            f"{max(count - 1, 0)}."
        )
    return JobPlace(host, port, count, rank, ids, hosted)


def _is_torchrun(variables: Mapping[str, str]) -> bool:
    return "RANK" in variables and "WORLD_SIZE" in variables


def _from_torchrun(variables: Mapping[str, str], ids: Sequence[int] | None) -> JobPlace:
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
    host, port, count, rank, local = (variables[name] for name in _TORCHRUN)
    if variables.get("LOCAL_WORLD_SIZE") == count:
        # torchrun names the machine even if all processes are on it, and the
        # coordinator would listen to others.
        host = "127.0.0.1"
    # The coordinator uses the next port if torchrun's store has this one.
    next_port = int(port) + (variables.get(_AGENT_STORE) == "True")
    return _place(
        f"{host}:{next_port}",
        int(count),
        int(rank),
        [int(local)] if ids is None else ids,
        hosted=HOSTED in variables,
    )


def _check_step(variables: Mapping[str, str]) -> None:
    """Raises in a SLURM batch script outside of srun: it would run as one process."""
    tasks = variables.get("SLURM_NTASKS", "1")
    if tasks != "1" and "SLURM_STEP_NODELIST" not in variables:
        raise ValueError(
            f"SLURM has {tasks} tasks for this job, but this process was not started "
            "by srun and is none of them. Write `srun python ...` in the batch script."
        )


def _check_pod(variables: Mapping[str, str]) -> None:
    """Raises in a pod of an indexed Job without Kubernetes' client.

    jax would only warn, and each pod would run alone.
    """
    of_a_job = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= variables.keys()
    if of_a_job and importlib.util.find_spec("kubernetes") is None:
        raise ValueError(
            "This is a pod of an indexed Job, and the other pods are found with the "
            "package 'kubernetes', which is not installed: pip install 'jax[k8s]'."
        )
