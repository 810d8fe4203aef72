"""Options that several commands share."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated, Any, TypeVar

import jax
import tyro

from fsdp_jax.launch import initialize

_T = TypeVar("_T")

Unset = Annotated[_T | None, tyro.conf.arg(help_behavior_hint="")]
"""An option whose default is no constant: its help says what it is."""

IgnoreField = Annotated[
    tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME")
]
"""`--ignore-field NAME`, as often as there are fields of `config.json` to ignore."""


@dataclasses.dataclass(frozen=True)
class Devices:
    """Which devices a command runs on.

    Attributes:
      devices: Use the first so many devices; default all.
      cpu_devices: Simulate so many CPU devices, to try sharding on any machine; does
        nothing where there are GPUs.
    """

    devices: Unset[int] = None
    cpu_devices: Unset[int] = None

    def pick(self) -> list[Any]:
        """Joins the job if there is one, starts jax and returns the devices to use.

        Raises:
          ValueError: If a number is not positive, there are fewer devices, the backend
            of this process runs already with another number of CPU devices, or the
            processes of the job do not agree.
        """
        for name, count in dataclasses.asdict(self).items():
            if count is not None and count < 1:
                raise ValueError(f"--{name.replace('_', '-')} {count}: at least 1.")
        if self.cpu_devices is not None:
            _simulate_cpu_devices(self.cpu_devices)
        initialize(config={"arguments": sys.argv[1:]})
        available = jax.devices()
        if self.devices is not None and self.devices > len(available):
            raise ValueError(
                f"--devices {self.devices}: there are {len(available)} "
                f"{available[0].platform} devices."
            )
        return available[: self.devices]


def _simulate_cpu_devices(count: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise ValueError(
            f"--cpu-devices {count}: jax runs already with {jax.device_count('cpu')}, "
            "and cannot change it within a process. Use --devices."
        ) from error
