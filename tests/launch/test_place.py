"""Which process of which job this is, by the variables of each launcher."""

from __future__ import annotations

import pytest
from helpers.errors import facts

from fsdp_jax.launch._cluster import JobPlace, check_token, find_place

TORCHRUN = {
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "8",
    "RANK": "5",
    "LOCAL_RANK": "1",
}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
OTHERS = ("JAX_COORDINATOR_ADDRESS", "LOCAL_WORLD_SIZE")


@pytest.fixture
def variables(monkeypatch):
    """Sets the variables of this process, which jax's detection reads."""

    def set_all(**values: str) -> None:
        for name in [*TORCHRUN, *SLURM, *OPEN_MPI, *OTHERS]:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    set_all()
    return set_all


def test_without_any_launcher_there_is_no_job(variables):
    assert find_place() is None


def test_torchruns_variables_say_the_place(variables):
    variables(**TORCHRUN)
    assert find_place() == JobPlace("node1", 29500, 8, 5, [1])


def test_where_torchrun_listens_itself_the_next_port_is_taken(variables):
    variables(**TORCHRUN, TORCHELASTIC_USE_AGENT_STORE="True")
    assert find_place() == JobPlace("node1", 29501, 8, 5, [1])


def test_a_job_of_one_machine_stays_on_it(variables):
    variables(**TORCHRUN, LOCAL_WORLD_SIZE="8")
    assert find_place() == JobPlace("127.0.0.1", 29500, 8, 5, [1])
    variables(**TORCHRUN, LOCAL_WORLD_SIZE="4")
    assert find_place() == JobPlace("node1", 29500, 8, 5, [1])


def test_slurms_variables_say_the_place(variables):
    variables(**SLURM)
    assert find_place() == JobPlace("node07", 61441, 8, 5, [1])


def test_open_mpis_variables_say_the_place(variables):
    variables(**OPEN_MPI)
    found = find_place()
    assert found is not None
    assert (found.host, found.num_processes, found.process_id) == ("10.96.0.1", 8, 5)


def test_the_launcher_next_to_the_program_counts(variables):
    variables(**SLURM, **TORCHRUN)  # srun torchrun
    assert find_place() == JobPlace("node1", 29500, 8, 5, [1])


def test_arguments_count_before_variables(variables):
    variables(**TORCHRUN)
    assert find_place("h:1", 2, 1, 3) == JobPlace("h", 1, 2, 1, [3])
    variables(JAX_COORDINATOR_ADDRESS="h:2")
    assert find_place(num_processes=2, process_id=1) == JobPlace("h", 2, 2, 1)


@pytest.mark.parametrize("without", ["MASTER_ADDR", "LOCAL_RANK"])
def test_a_variable_that_is_missing_is_named(variables, without):
    variables(**{k: v for k, v in TORCHRUN.items() if k != without})
    with pytest.raises(ValueError, match=facts("RANK", "WORLD_SIZE", without)):
        find_place()


def test_variables_that_are_no_numbers_are_all_named(variables):
    variables(**TORCHRUN | {"RANK": "one", "WORLD_SIZE": "-2"})
    with pytest.raises(ValueError, match=facts("WORLD_SIZE='-2', RANK='one'")):
        find_place()


@pytest.mark.parametrize("arguments", [("h:1",), ("h:1", 2), (None, 2, 0)])
def test_arguments_that_say_half_are_refused(variables, arguments):
    with pytest.raises(
        ValueError,
        match=facts("coordinator_address, num_processes", "process_id", "None"),
    ):
        find_place(*arguments)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_process_outside_its_job_is_refused(variables, rank):
    with pytest.raises(
        ValueError, match=facts(f"process_id {rank}", "num_processes 2", "0", "1")
    ):
        find_place("h:1", 2, rank)


def test_a_batch_script_without_srun_is_refused(variables):
    # What the script of `sbatch --ntasks=8` sees: it is no task itself.
    variables(SLURM_JOB_ID="4097", SLURM_NTASKS="8", SLURM_PROCID="0")
    with pytest.raises(ValueError, match=facts("SLURM", "8", "`srun python ...`")):
        find_place()
    variables(SLURM_JOB_ID="4097", SLURM_NTASKS="1", SLURM_PROCID="0")
    assert find_place() is None


def test_a_pod_of_an_indexed_job_needs_the_package_that_finds_the_others(variables):
    variables(JOB_COMPLETION_INDEX="1", KUBERNETES_SERVICE_HOST="10.0.0.1")
    with pytest.raises(ValueError, match=facts("'kubernetes'", "'jax[k8s]'")):
        find_place()


@pytest.mark.parametrize(
    "place, needs",
    [
        (JobPlace("node1", 1, 8, 5), True),
        (JobPlace("10.0.0.1", 1, 2, 0), True),
        (JobPlace("127.0.0.1", 1, 2, 0, hosted=True), True),
        (JobPlace("node1", 1, 8, 5, token="secret"), False),
        (JobPlace("node1", 1, 1, 0), False),
        (JobPlace("localhost", 1, 2, 1), False),
        (JobPlace("127.0.0.1", 1, 2, 1), False),
        (JobPlace("::1", 1, 2, 1), False),
    ],
    ids=str,
)
def test_a_token_is_needed_where_other_machines_or_the_launcher_are(place, needs):
    if needs:
        with pytest.raises(ValueError, match=facts("FSDP_JAX_TOKEN")):
            check_token(place)
    else:
        check_token(place)
