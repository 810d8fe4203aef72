"""Options shared by several commands."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Annotated, Any, TypeVar, get_args

import jax
import tyro

from fsdp_jax.launch import initialize

_T = TypeVar("_T")

Unset = Annotated[_T | None, tyro.conf.arg(help_behavior_hint="")]
"""Option without a constant default; its help states the default."""

Group = tyro.conf.OmitArgPrefixes
"""A group of options with a box of its own in the help; its names have no prefix."""


def named(name: str, command: type) -> Any:
    """Returns the annotation of a command: its name and one line of help.

    Args:
      name: Name of the command.
      command: Dataclass of the command.
    """
    summary = inspect.cleandoc(command.__doc__ or "").split("\n\n")[0]
    return tyro.conf.subcommand(name, description=summary)


Repeated = tyro.conf.UseAppendAction[tuple[str, ...]]
"""Option that is given once for each of its values."""

IgnoreField = Annotated[Repeated, tyro.conf.arg(metavar="NAME")]
"""Option `--ignore-field NAME`, given once for each field of config.json to ignore."""

LogTo = Annotated[Repeated, tyro.conf.arg(metavar="KIND:WHERE")]
"""Option `--log-to KIND:WHERE`, given once for each log of the metrics."""


def repeated(hint: Any) -> bool:
    """Returns whether an option is given once for each of its values.

    Args:
      hint: Type of the option, with its annotations.
    """
    return tyro.conf.UseAppendAction in get_args(hint)


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices to run on.

    Attributes:
      devices: Number of devices to use, the first ones; default all.
      cpu_devices: Number of CPU devices to simulate, to try sharding on any machine;
        ignored where there are GPUs.
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
                raise ValueError(
                    f"--{name.replace('_', '-')} {count} must be at least 1."
                )
        if self.cpu_devices is not None:
            _simulate_cpu_devices(self.cpu_devices)
        # A command within another one, such as what `audit` replays, is in the job.
        is_in_job = jax.distributed.is_initialized()
        initialize(config=None if is_in_job else {"arguments": sys.argv[1:]})
        available = jax.devices()
        if self.devices is not None and self.devices > len(available):
            platform = available[0].platform
            simulated = f", or simulate them: --cpu-devices {self.devices}"
            raise ValueError(
                f"--devices {self.devices}, but the number of {platform} devices is "
                f"{len(available)}: give at most {len(available)}"
                f"{simulated if platform == 'cpu' else ''}."
            )
        return available[: self.devices]


def _simulate_cpu_devices(count: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise ValueError(
            f"--cpu-devices {count}: jax already runs with {jax.device_count('cpu')} "
            "CPU devices, and the number cannot change within a process. Use --devices."
        ) from error
