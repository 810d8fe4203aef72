"""Compiled programs are kept between workers, processes and runs of the tests.

Most of the time of a test is compiling, and mostly what another test, or yesterday's
run, compiled already. The key is jax's: the program, its scopes, the compiler's options
and version. Scopes are in it since tests read them from compiled programs; lines of
source code are in neither, so that moving a function recompiles nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax

DIRECTORY = os.environ.get(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[2] / ".jax_cache")
)

SETTINGS = {
    "jax_compilation_cache_dir": DIRECTORY,
    "jax_compilation_cache_include_metadata_in_key": True,
    "jax_traceback_in_locations_limit": 0,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}

ENVIRONMENT = {name.upper(): str(value) for name, value in SETTINGS.items()}
"""The same for a child process."""


def enable() -> None:
    """Uses the cache in this process."""
    for name, value in SETTINGS.items():
        jax.config.update(name, value)
