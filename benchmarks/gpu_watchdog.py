"""Whether XLA's watchdog ends a process whose program waits for ever."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

WATCHDOG = 10
"""Seconds that an execution may take in `hang`."""


def hang(seconds: int) -> None:
    """Waits within a program, as a rank does whose peer is alive but stuck."""

    def wait(x):
        time.sleep(seconds)
        return x

    @functools.partial(
        jax.jit,
        compiler_options={"xla_gpu_execution_terminate_timeout": f"{WATCHDOG}s"},
    )
    def program(x):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x + 1)

    jax.block_until_ready(program(jnp.float32(0)))


def measure_watchdog(seconds: int) -> dict[str, Any]:
    """Lets a process wait, and says how it ended.

    Args:
      seconds: How long its program waits.
    """
    started = time.perf_counter()
    command = [sys.executable, __file__, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    took = time.perf_counter() - started
    return {
        "watchdog_s": WATCHDOG,
        "wait_s": seconds,
        "process_s": round(took, 1),
        "status": done.returncode,
        # It is aborted, and not after it had waited.
        "ended_by_watchdog": done.returncode < 0 and took < seconds,
        "said": done.stderr.strip().splitlines()[-3:],
    }


if __name__ == "__main__":
    hang(int(sys.argv[1]))
