"""Silences jax about its CUDA plugin on machines without a driver.

The plugin that `fsdp-jax plan` compiles with is also the one that runs on GPUs. Without
a driver jax logs a traceback for it, although nothing is wrong with a machine that only
plans.
"""

from __future__ import annotations

import logging

from fsdp_jax._compat import XLA_BRIDGE_LOGGER
from fsdp_jax._quiet_import import DRIVER, has_driver, load_plugin

_DRIVER = DRIVER


class _PluginComplaint(logging.Filter):
    """Drops the message that a plugin could not be set up."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the message is shown."""
        return not record.getMessage().startswith("Jax plugin configuration error")


_COMPLAINT = _PluginComplaint()


def be_silent_without_driver() -> None:
    """Hides what jax's CUDA plugin says if no driver is installed."""
    if not has_driver(_DRIVER):
        logging.getLogger(XLA_BRIDGE_LOGGER).addFilter(_COMPLAINT)
        load_plugin()
