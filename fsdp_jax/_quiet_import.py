"""Loads jax and its plugin without the lines about CUDA drivers, in the command line.

jaxlib's libraries for CUDA write two lines each to the file descriptor of stderr while
they are loaded, if there is no driver: some with jax, the plugin's with the backend. On
a machine without GPUs they say nothing, and come before the output of every command. A
library has no business with the descriptors of its process, so this is done where the
process is the command line's, and otherwise not.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DRIVER = "libcuda.so.1"
_PLUGINS = ("xla_cuda12", "xla_cuda13")
_MODULES = ("fsdp_jax", "fsdp_jax.cli")
_LINES = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written "
    rb"to STDERR\n?"
    rb"|I0000 .*cudart_stub\.cc:\d+\] Could not find cuda drivers on your machine, GPU "
    rb"will not be used\.\n?"
)


def has_driver(name: str = DRIVER) -> bool:
    """Returns whether the library of the CUDA driver can be loaded.

    Args:
      name: File name of the library.
    """
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def is_command_line() -> bool:
    """Returns whether this process is `fsdp-jax` or `python -m fsdp_jax`."""
    program = sys.argv[0] if sys.argv else ""
    # With `-m`, argv[0] is that while Python looks for the module, and then its file.
    if program != "-m" and Path(program).name != "__main__.py":
        return Path(program).name == "fsdp-jax"
    words = sys.orig_argv
    return words[words.index("-m") + 1] in _MODULES if "-m" in words else False


@contextmanager
def without_driver_lines() -> Iterator[None]:
    """Drops exactly the lines about absent CUDA drivers from stderr; others come later.

    Covers the file descriptor, since C++ writes the lines.
    """
    try:
        kept = os.dup(2)
    except OSError:  # stderr is closed.
        yield
        return
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            if sys.stderr is not None:
                sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            for line in said:
                if not _LINES.fullmatch(line):
                    os.write(2, line)


def import_jax() -> None:
    """Imports jax; in the command line on a machine without a driver, quietly."""
    if "jax" in sys.modules or not is_command_line() or has_driver():
        return
    with without_driver_lines():
        importlib.import_module("jax")


def load_plugin() -> None:
    """Loads the library of jax's CUDA plugin; like `import_jax`, where that is quiet.

    With `JAX_PLATFORMS=cpu` jax loads it when the first backend starts, which is
    somewhere in a command. A library that is there already says nothing more.
    """
    if not is_command_line() or has_driver():
        return
    plugins = importlib.util.find_spec("jax_plugins")
    if plugins is None:  # jax for CPUs alone is installed.
        return
    with without_driver_lines():
        for folder in plugins.submodule_search_locations or ():
            for name in _PLUGINS:
                with contextlib.suppress(OSError):  # absent, or jax says what is wrong
                    ctypes.CDLL(str(Path(folder, name, "xla_cuda_plugin.so")))


import_jax()
