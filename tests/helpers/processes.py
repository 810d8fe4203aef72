"""Real processes that form one job over `jax.distributed`, on the CPU with gloo.

```
results = run_processes(scenario, 4, str(tmp_path))     # scenario(directory) -> JSON
```
The function is named by its file, so it may stand in the test's own module. Whatever
happens, no process is left when `run_processes` returns.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def run_processes(
    function: Callable[..., Any],
    num_processes: int,
    *arguments: Any,
    devices: int = 2,
    timeout_secs: float = 120,
) -> list[Any]:
    """Calls a function in every process of a new job.

    Args:
      function: Of module level; it and its arguments and results are passed by name
        and as JSON.
      num_processes: How many.
      arguments: For the function.
      devices: Simulated devices of each process.
      timeout_secs: For all of it; the job is killed after.

    Returns:
      What each process returned, in order.

    Raises:
      AssertionError: If a process failed or did not end, with what all of them wrote.
    """
    with tempfile.TemporaryDirectory() as scratch:
        job = {
            "file": sys.modules[function.__module__].__file__,
            "function": function.__name__,
            "arguments": arguments,
            "address": f"127.0.0.1:{_free_port()}",
            "num_processes": num_processes,
            "devices": devices,
            "results": scratch,
        }
        with _started(job, num_processes) as processes:
            ended = _all_ended(processes, timeout_secs)
        paths = [Path(scratch, f"{rank}.json") for rank in range(num_processes)]
        logs = [
            Path(scratch, f"{rank}.log").read_text() for rank in range(num_processes)
        ]
        failed = [rank for rank, path in enumerate(paths) if not path.exists()]
        said = "\n".join(f"--- process {rank}\n{log}" for rank, log in enumerate(logs))
        assert ended, f"not all ended within {timeout_secs} s\n{said}"
        assert not failed, f"processes {failed} failed\n{said}"
        return [json.loads(path.read_text()) for path in paths]


@contextlib.contextmanager
def _started(job: dict[str, Any], num_processes: int) -> Iterator[list]:
    """The processes, killed at the end if they have not ended."""
    path = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "bridge")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(num_processes):
            log = stack.enter_context(Path(job["results"], f"{rank}.log").open("w"))
            command = [sys.executable, __file__, json.dumps(job | {"rank": rank})]
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def _all_ended(processes: list[subprocess.Popen], timeout_secs: float) -> bool:
    """Waits until all ended well, one failed, or the time is over."""
    end = time.monotonic() + timeout_secs
    while time.monotonic() < end:
        states = [process.poll() for process in processes]
        if all(state is not None for state in states) or any(states):
            return True
        time.sleep(0.05)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _main(job: dict[str, Any]) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", job["devices"])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(job["address"], job["num_processes"], job["rank"])
    spec = importlib.util.spec_from_file_location("scenario", job["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scenario"] = module
    spec.loader.exec_module(module)
    result = getattr(module, job["function"])(*job["arguments"])
    path = Path(job["results"], f"{job['rank']}.json")
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").rename(path)
    jax.distributed.shutdown()


if __name__ == "__main__":
    try:
        _main(json.loads(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a peer that waits for this process must not keep it from ending
