"""A job of two processes reads each byte once, writes once, and fails as one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bridge_helpers import assert_same_bytes, random_tensors, tensors_of, write_llama

HERE = Path(__file__).parent
SCRIPT = HERE / "two_processes.py"
TOTAL = sum(tensor.nbytes for tensor in random_tensors(np.float32).values())


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What both processes found, and where."""
    folder = tmp_path_factory.mktemp("job")
    write_llama(folder / "llama", np.float32)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    paths = os.pathsep.join([str(HERE), str(HERE.parent.parent)])
    children = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), address, folder],
            env=os.environ | {"PYTHONPATH": paths, "XLA_FLAGS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [child.communicate(timeout=120) for child in children]
    finally:
        for child in children:
            child.kill()
    errors = "\n".join(error for _, error in outputs)
    assert [child.returncode for child in children] == [0, 0], errors
    return folder, [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.parametrize("way", ["replicated", "first dim", "last dim"])
def test_each_byte_is_read_once_a_job(job, way):
    _, found = job
    read = [one["read"][way] for one in found]
    assert sum(read) == TOTAL
    # Rows go to devices in even parts, which 131 of them are not quite.
    assert max(read) <= 0.52 * TOTAL


def test_the_first_process_writes_what_all_hold(job):
    folder, _ = job
    assert_same_bytes(tensors_of(folder / "out"), random_tensors(np.float32))


def test_all_processes_learn_that_one_failed(job):
    _, found = job
    names = [[line.partition(":")[0] for line in one["told"]] for one in found]
    saved = ["OSError", "RuntimeError", "ValueError"]
    assert names[0] == [*saved, "RuntimeError", "RuntimeError"]
    saved = ["RuntimeError", "OSError", "RuntimeError"]
    assert names[1] == [*saved, "ValueError", "ValueError"]
    assert "Processes [0] failed" in found[1]["told"][0]
    assert "it exists" in found[0]["told"][2]
    assert "ended" in found[1]["told"][3]


def test_a_failure_of_any_process_leaves_nothing(job):
    folder, _ = job
    assert sorted(os.listdir(folder)) == ["llama", "out"]
