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
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from helpers import compiling

from fsdp_jax.launch import Processes, Timeouts

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        str(ROOT / path) for path in ("", "tests", "tests/bridge")
    ),
    **compiling.ENVIRONMENT,
}


def run_processes(
    function: Callable[..., Any],
    num_processes: int,
    *arguments: Any,
    devices: int = 2,
    timeout_secs: float = 120,
    killed: Sequence[int] = (),
    exit_code: int = 0,
) -> list[Any]:
    """Calls a function in every process of a new job.

    Args:
      function: Of module level; it and its arguments and results are passed by name
        and as JSON.
      num_processes: How many.
      arguments: For the function.
      devices: Simulated devices of each process.
      timeout_secs: For all of it; the job is killed after.
      killed: Processes that are to be killed by a signal on the way. Nobody watches
        over such a job: the others go on, and find out by themselves.
      exit_code: With which all others are to end. Where it is not 0 they return
        nothing: they exit by themselves.

    Returns:
      What each process returned, in order; None for those that returned nothing.

    Raises:
      AssertionError: If a process failed or did not end, with what all of them wrote.
    """
    with tempfile.TemporaryDirectory() as scratch:
        address = f"127.0.0.1:{_free_port()}" if killed else None
        left = num_processes - len(killed)
        command = command_of(
            function, *arguments, results=scratch, address=address, left=left
        )
        job = Recorded(command, num_processes, devices=devices)
        with job.processes as processes:
            ended = _ended(processes, timeout_secs, exit_code, killed)
            codes = processes.statuses
        assert ended, f"not all ended within {timeout_secs} s\n{job.said}"
        failed = [
            rank
            for rank, code in enumerate(codes)
            if (code is None or code >= 0 if rank in killed else code != exit_code)
        ]
        assert not failed, f"processes {failed} failed: {codes}\n{job.said}"
        paths = [Path(scratch, f"{rank}.json") for rank in range(num_processes)]
        return [json.loads(p.read_text()) if p.exists() else None for p in paths]


def command_of(
    function: Callable[..., Any],
    *arguments: Any,
    results: str | None = None,
    address: str | None = None,
    left: int = 0,
) -> list[str]:
    """What calls a function in a process of a job.

    Args:
      function: As for `run_processes`.
      arguments: For the function.
      results: A directory where each process leaves what the function returned.
      address: Of a coordinator of jax alone, which nobody watches over.
      left: For how many results the first process waits there before it ends.
    """
    call = {
        "file": sys.modules[function.__module__].__file__,
        "function": function.__name__,
        "arguments": arguments,
        "results": results,
        "address": address,
        "left": left,
    }
    return [sys.executable, __file__, json.dumps(call)]


def _ended(
    processes: Processes, timeout_secs: float, exit_code: int, killed: Sequence[int]
) -> bool:
    """Waits until all ended, one ended as it should not, or the time is over."""
    if not (killed or exit_code):
        with contextlib.suppress(TimeoutError):
            processes.wait(timeout_secs)
            return True
        return False
    end = time.monotonic() + timeout_secs
    while time.monotonic() < end:
        codes = processes.statuses
        wrong = [
            code not in (None, exit_code) and rank not in killed
            for rank, code in enumerate(codes)
        ]
        if None not in codes or any(wrong):
            return True
        time.sleep(0.05)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Recorded:
    """A job that has begun, and all that it writes.

    Attributes:
      processes: The job; to be used in a `with` statement.
      lines: What was written so far, by rank; of the launcher under -1.
    """

    def __init__(
        self,
        command: list[str],
        num_processes: int,
        *,
        devices: int = 2,
        timeouts: Timeouts | None = None,
    ):
        self.lines: dict[int, list[str]] = defaultdict(list)
        self.processes = Processes(
            command,
            num_processes,
            line=lambda rank, line, is_error: self.lines[rank].append(line),
            devices_per_process=devices,
            timeouts=timeouts,
            environment=ENVIRONMENT,
        )

    def await_line(self, rank: int, text: str, timeout_secs: float = 60) -> None:
        """Returns when a process has written a line that begins so."""
        end = time.monotonic() + timeout_secs
        while not any(line.startswith(text) for line in list(self.lines[rank])):
            alive = self.processes.statuses[rank] is None
            assert alive and time.monotonic() < end, f"no '{text}'\n{self.said}"
            time.sleep(0.01)

    @property
    def said(self) -> str:
        """All of it, to be shown."""
        return "\n".join(
            f"--- process {rank}\n" + "\n".join(lines)
            for rank, lines in sorted(self.lines.items())
        )


def _main(call: dict[str, Any]) -> None:
    rank = _join(call["address"])
    spec = importlib.util.spec_from_file_location("scenario", call["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scenario"] = module
    spec.loader.exec_module(module)
    try:
        result = getattr(module, call["function"])(*call["arguments"])
    except BaseException:
        if call["address"] is None:
            raise
        traceback.print_exc()
        os._exit(1)  # at its end jax would wait for the others
    if call["results"] is not None:
        path = Path(call["results"], f"{rank}.json")
        path.with_suffix(".part").write_text(json.dumps(result))
        path.with_suffix(".part").rename(path)
    if call["address"] is not None:
        # The first last: without it jax ends the others.
        results = Path(call["results"])
        while rank == 0 and len(list(results.glob("*.json"))) < call["left"]:
            time.sleep(0.05)
        os._exit(0)  # jax would wait for those that were killed


def _join(address: str | None) -> int:
    import jax

    import fsdp_jax

    if address is None:
        return fsdp_jax.initialize().process_id
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    jax.distributed.initialize(address, size, rank)
    return rank


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
