"""torchrun itself starts a job that finds its place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.distributed]

ROOT = Path(__file__).parent.parent.parent
JOIN = """
import fsdp_jax, jax, os
job = fsdp_jax.initialize()
said = f"joined {job.process_id} {job.num_processes} {jax.device_count()}\\n"
os.write(1, said.encode())  # in one piece
"""


def test_a_job_of_torchrun_is_found_beside_its_own_store(tmp_path):
    (tmp_path / "join.py").write_text(JOIN)
    cpus = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "OMP_NUM_THREADS": "1"}
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, *command, tmp_path / "join.py"],
            env=os.environ | cpus | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        # torchrun draws a free port, and the one behind it may be another test's.
        if "Address already in use" not in done.stderr:
            break
    assert sorted(done.stdout.splitlines()) == ["joined 0 2 4", "joined 1 2 4"], (
        done.stderr
    )
