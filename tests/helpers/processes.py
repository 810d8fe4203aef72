"""Real processes that form one job over `jax.distributed`, on the CPU with gloo.

```
results = run_processes(scenario, 4, str(tmp_path))     # scenario(directory) -> JSON
```
The function is named by its file, so it may stand in the test's own module. Whatever
happens, no process is left when `run_processes` returns.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_jax.launch import Patience, Processes

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        str(ROOT / path) for path in ("", "tests", "tests/bridge")
    ),
    # As in conftest.py: most of the time of a test is compiling.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}


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
        call = {
            "file": sys.modules[function.__module__].__file__,
            "function": function.__name__,
            "arguments": arguments,
            "results": scratch,
        }
        command = [sys.executable, __file__, json.dumps(call)]
        job = Recorded(command, num_processes, devices=devices)
        with job.processes:
            try:
                job.processes.wait(timeout_secs)
            except TimeoutError as error:
                raise AssertionError(f"{error}\n{job.said}") from error
        paths = [Path(scratch, f"{rank}.json") for rank in range(num_processes)]
        failed = [rank for rank, path in enumerate(paths) if not path.exists()]
        assert not failed, f"processes {failed} failed\n{job.said}"
        return [json.loads(path.read_text()) for path in paths]


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
        patience: Patience | None = None,
    ):
        self.lines: dict[int, list[str]] = defaultdict(list)
        self.processes = Processes(
            command,
            num_processes,
            line=lambda rank, line, is_error: self.lines[rank].append(line),
            devices_per_process=devices,
            patience=patience,
            environment=ENVIRONMENT,
        )

    @property
    def said(self) -> str:
        """All of it, to be shown."""
        return "\n".join(
            f"--- process {rank}\n" + "\n".join(lines)
            for rank, lines in sorted(self.lines.items())
        )


def _main(call: dict[str, Any]) -> None:
    import fsdp_jax

    rank = fsdp_jax.initialize().process_id
    spec = importlib.util.spec_from_file_location("scenario", call["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scenario"] = module
    spec.loader.exec_module(module)
    result = getattr(module, call["function"])(*call["arguments"])
    path = Path(call["results"], f"{rank}.json")
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
