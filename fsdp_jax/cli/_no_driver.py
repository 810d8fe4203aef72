"""Silence about GPUs on machines that can have none.

The plugin that `fsdp-jax plan` compiles with is also the one that runs on GPUs. Where
there is no driver jax tells, with a traceback, that it cannot: of a machine that is
only to plan there is nothing to mend.
"""

from __future__ import annotations

import ctypes
import logging

_DRIVER = "libcuda.so.1"


class _PluginComplaint(logging.Filter):
    """Lets all messages pass but that a plugin could not be set up."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the message is to be seen."""
        return not record.getMessage().startswith("Jax plugin configuration error")


_COMPLAINT = _PluginComplaint()


def be_silent_without_driver() -> None:
    """Hides jax's complaint about its plugin for CUDA, if no driver is installed."""
    if not _has_driver():
        logging.getLogger("jax._src.xla_bridge").addFilter(_COMPLAINT)


def _has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True
