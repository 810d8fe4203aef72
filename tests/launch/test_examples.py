"""The examples for SLURM, Kubernetes and Ray start what they say, on stubs of these."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jsonschema
import pytest
import yaml
from helpers.errors import facts

import fsdp_jax
from fsdp_jax.cli import main
from fsdp_jax.launch import Generation, generation

EXAMPLES = Path(fsdp_jax.__file__).parent / "launch" / "examples"

STUB = """#!{python} -S
import json, os, sys
names = [name for name in os.environ if name.startswith("SLURM_")]
print(json.dumps({{"arguments": sys.argv[1:]}}))
sys.exit(int(os.environ["STATUS"]))
"""


@pytest.fixture
def sbatch(tmp_path):
    """Runs the batch script with a stub of srun; the status and what srun was given."""
    srun = tmp_path / "srun"
    srun.write_text(STUB.format(python=sys.executable))
    srun.chmod(0o755)

    def run(*arguments: str, status: int = 0) -> tuple[int, list[str]]:
        done = subprocess.run(
            ["bash", EXAMPLES / "slurm.sbatch", *arguments],
            env=os.environ
            | {"PATH": f"{tmp_path}:/bin:/usr/bin", "STATUS": str(status)},
            capture_output=True,
            text=True,
        )
        given = json.loads(done.stdout)["arguments"] if done.stdout else []
        return done.returncode, given

    return run


def parses(arguments: list[str]) -> bool:
    """Whether `fsdp-jax` takes them: it then says that the model is not there."""
    return main(arguments) == 2


def test_sbatch_gives_srun_the_command_of_each_task(sbatch, capsys):
    status, given = sbatch("no/model", "no/text.txt", "no/run")
    assert status == 0
    options = [option for option in given if option.startswith("--")]
    assert "--kill-on-bad-exit=1" in options
    command = given[given.index("fsdp-jax") + 1 :]
    assert command[:7] == [
        *("train", "--hf", "no/model", "--data", "no/text.txt"),
        *("--save", "no/run"),
    ]
    assert parses(command) and "no/text.txt" in capsys.readouterr().err


def test_sbatch_fails_as_srun_does_and_without_its_arguments(sbatch):
    assert sbatch("model", "text", "run", status=143)[0] == 143
    assert sbatch("model")[0] != 0


def test_sbatch_asks_for_a_task_a_gpu_and_time_to_save():
    asked = dict(
        re.findall(
            r"^#SBATCH --([\w-]+)=(\S+)", (EXAMPLES / "slurm.sbatch").read_text(), re.M
        )
    )
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] == "8"
    assert asked["signal"].startswith("TERM@")


STOPS = "kill -TERM $PPID; sleep 0.3"  # what SLURM sends the batch script at the end
SIGNALLED = ["scancel", "2", "3", "--signal=TERM", "7"]
REQUEUED = ["scontrol", "2", "3", "requeue", "7"]


@pytest.mark.parametrize(
    "happens, status, then",
    [
        ("", 0, []),
        ("", 1, [REQUEUED]),
        # Survivors of a failure that are ended with SIGTERM say 143 too.
        ("", 143, [REQUEUED]),
        (STOPS, 143, [SIGNALLED]),
        (STOPS, 137, [SIGNALLED]),  # SIGKILL's, of a task that was slow to end
    ],
)
def test_the_elastic_sbatch_gives_replicas_and_requeues_failures(
    happens, status, then, tmp_path, capsys
):
    for name in ("srun", "scontrol", "scancel"):
        stub = tmp_path / name
        end = f"{happens}\nexit {status}" if name == "srun" else ""
        shown = f"echo {name} $FSDP_JAX_GENERATION $FSDP_JAX_REPLICAS $@\n{end}\n"
        stub.write_text(f"#!/bin/bash\n{shown}")
        stub.chmod(0o755)
    variables = {"SLURM_JOB_NUM_NODES": "3", "SLURM_RESTART_COUNT": "2"}
    done = subprocess.run(
        [
            "bash",
            EXAMPLES / "slurm_elastic.sbatch",
            "no/model",
            "no/text.txt",
            "no/run",
        ],
        env={"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "7", **variables},
        capture_output=True,
        text=True,
    )
    task, *rest = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == status and task[:3] == ["srun", "2", "3"]
    assert rest == then
    command = task[task.index("fsdp-jax") + 1 :]
    assert parses(command) and "no/text.txt" in capsys.readouterr().err
    rows, most = (int(command[command.index(n) + 1]) for n in ("--batch", "--dp-outer"))
    for replicas in range(1, most + 1):
        assert Generation(0, replicas, most).microbatches_for(rows, data_ranks=8)


def requires(**fields) -> dict:
    """A schema of an object that has these fields, and perhaps others."""
    return {"type": "object", "required": [*fields], "properties": fields}


INDEXED = requires(
    parallelism={"type": "integer", "minimum": 1},
    completions={"type": "integer", "minimum": 1},
    completionMode={"const": "Indexed"},  # or jax finds no process id
    backoffLimit={"const": 0},  # or one pod alone would be started again
    template=requires(
        spec=requires(
            restartPolicy={"const": "Never"},
            serviceAccountName={"type": "string"},
            containers={
                "type": "array",
                "minItems": 1,
                "items": requires(
                    name={"type": "string"},
                    image={"type": "string"},
                    command={"const": ["fsdp-jax", "train"]},
                    args={"type": "array", "items": {"type": "string"}},
                    resources=requires(limits=requires(**{"nvidia.com/gpu": {}})),
                ),
            },
        )
    ),
)
NAMED = requires(name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"})
SCHEMAS = {
    "ServiceAccount": requires(apiVersion={"const": "v1"}, metadata=NAMED),
    "Role": requires(
        apiVersion={"const": "rbac.authorization.k8s.io/v1"},
        metadata=NAMED,
        rules={
            "type": "array",
            "items": requires(apiGroups={}, resources={}, verbs={}),
        },
    ),
    "RoleBinding": requires(
        apiVersion={"const": "rbac.authorization.k8s.io/v1"},
        metadata=NAMED,
        subjects={"type": "array", "minItems": 1},
        roleRef=requires(apiGroup={}, kind={"const": "Role"}, name={}),
    ),
    "JobSet": requires(
        apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
        metadata=NAMED,
        spec=requires(
            failurePolicy=requires(maxRestarts={"type": "integer"}),
            network=requires(enableDNSHostnames={"const": True}),
            replicatedJobs={
                "type": "array",
                "items": requires(
                    name={"type": "string"},
                    replicas={"const": 1},  # or there were two processes of each id
                    template=requires(spec=INDEXED),
                ),
            },
        ),
    ),
}


@pytest.mark.parametrize("name, replicas", [("", 2), ("_elastic", 1), ("_elastic", 3)])
def test_the_jobset_is_one_indexed_job_whose_pods_may_ask_for_each_other(
    name, replicas, capsys
):
    text = (EXAMPLES / f"jobset{name}.yaml").read_text()
    documents = list(yaml.safe_load_all(text.replace("${REPLICAS}", str(replicas))))
    kinds = {document["kind"]: document for document in documents}
    assert kinds.keys() == SCHEMAS.keys()
    for kind, document in kinds.items():
        jsonschema.validate(document, SCHEMAS[kind])
    (rule, jobs) = kinds["Role"]["rules"]
    assert {*rule["resources"]} >= {"pods"} and "list" in rule["verbs"]
    assert jobs["resources"] == ["jobs"]
    (job,) = kinds["JobSet"]["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == replicas
    pod = spec["template"]["spec"]
    account = kinds["ServiceAccount"]["metadata"]["name"]
    assert pod["serviceAccountName"] == account
    assert kinds["RoleBinding"]["subjects"][0]["name"] == account
    (container,) = pod["containers"]
    assert parses([*container["command"][1:], *container["args"]])
    assert "/data/text" in capsys.readouterr().err


def test_the_elastic_jobset_gives_each_pod_its_generation():
    text = (EXAMPLES / "jobset_elastic.yaml").read_text().replace("${REPLICAS}", "3")
    (jobset,) = (d for d in yaml.safe_load_all(text) if d["kind"] == "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    given = {one["name"]: one for one in container["env"]}
    attempt = given["FSDP_JAX_GENERATION"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert "restart-attempt" in attempt
    names = ("FSDP_JAX_REPLICAS", "FSDP_JAX_MAX_REPLICAS")
    variables = {name: given[name]["value"] for name in names}
    found = generation({"FSDP_JAX_GENERATION": "2", **variables})
    assert found == Generation(2, 3, 4)
    options = dict(option[2:].split("=") for option in container["args"])
    assert options["dp-outer"] == "4"
    for replicas in range(1, 5):
        of = Generation(2, replicas, 4)
        assert of.microbatches_for(int(options["batch"]), data_ranks=8)


@pytest.mark.parametrize(
    "file, scaling",
    [
        ("ray_train.md", {"num_workers": 16}),
        (
            "ray_train_elastic.md",
            {"num_workers": (1, 4), "resources_per_worker": {"GPU": 8}},
        ),
    ],
)
def test_ray_trains_worker_runs_the_command(file, scaling, monkeypatch, capsys):
    """With a stub of Ray that has the names of its documentation."""
    trainers = []

    class JaxTrainer:
        def __init__(self, train_loop_per_worker, **options):
            trainers.append((train_loop_per_worker, options))

        def fit(self):
            worker, options = trainers[-1]
            worker(options["train_loop_config"])

    train = types.ModuleType("ray.train")
    for name in ("FailureConfig", "RunConfig", "ScalingConfig"):
        setattr(train, name, lambda **options: options)
    context = types.SimpleNamespace(get_world_size=lambda: 3)
    train.__dict__["get_context"] = lambda: context
    # What the worker sets is of its own process, and not of this one.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    module = types.ModuleType("ray.train.v2.jax")
    module.__dict__["JaxTrainer"] = JaxTrainer
    for name in ("ray", "ray.train.v2"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray.train", train)
    monkeypatch.setitem(sys.modules, "ray.train.v2.jax", module)
    text = (EXAMPLES / file).read_text()
    (source,) = re.findall("```python\n(.*?)```", text, re.S)
    with pytest.raises(RuntimeError, match=facts("fsdp-jax", "2")):
        exec(source, {"__name__": "__main__"})
    assert "/data/text" in capsys.readouterr().err
    assert trainers[0][1]["scaling_config"] == {**scaling, "use_gpu": True}
    if "elastic" in file:
        assert generation() == Generation(0, 3, 4)
