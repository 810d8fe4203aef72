"""The command line `fsdp-jax`; one file a command.

The only place that imports both `fsdp_jax` and `bridge`. Results go to stdout, what
is meant for watching goes to stderr.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from fsdp_jax._local_path import check_local
from fsdp_jax.checkpoint import NotSavedError
from fsdp_jax.cli._errors import CheckFailed, ChildFailed
from fsdp_jax.cli._no_driver import be_silent_without_driver
from fsdp_jax.cli.commands._compare import Compare
from fsdp_jax.cli.commands._convert import Convert
from fsdp_jax.cli.commands._demo import Demo
from fsdp_jax.cli.commands._diff_metrics import DiffMetrics
from fsdp_jax.cli.commands._doctor import Doctor
from fsdp_jax.cli.commands._eval import Eval
from fsdp_jax.cli.commands._export import Export
from fsdp_jax.cli.commands._generate import Generate
from fsdp_jax.cli.commands._import import Import
from fsdp_jax.cli.commands._inspect import Inspect
from fsdp_jax.cli.commands._launch import Launch
from fsdp_jax.cli.commands._make_tiny_llama import MakeTinyLlama
from fsdp_jax.cli.commands._plan import Plan
from fsdp_jax.cli.commands._remove import Remove
from fsdp_jax.cli.commands._train import Train
from fsdp_jax.cli.commands._verify import Verify
from fsdp_jax.launch import fail

_Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Import, tyro.conf.subcommand("import")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Remove, tyro.conf.subcommand("remove")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[DiffMetrics, tyro.conf.subcommand("diff-metrics")]
    | Annotated[MakeTinyLlama, tyro.conf.subcommand("make-tiny-llama")]
    | Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Launch, tyro.conf.subcommand("launch")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: Arguments after the program's name; None takes those of the process.

    Returns:
      The exit status: 0; 1 if a comparison failed, training diverged or the doctor
      found something wrong; 2 for what the user can fix; 130 if interrupted; of
      `launch`, that of the program.
    """
    command = tyro.cli(
        _Command,  # pyright: ignore[reportArgumentType]
        prog="fsdp-jax",
        description="Fully sharded training of Hugging Face models in JAX.",
        args=argv,
        config=(tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName),
    )
    be_silent_without_driver()
    try:
        _check_paths(command)
        command.run()
    except KeyboardInterrupt as error:
        fail(error)
        return 130
    except ChildFailed as error:
        return error.status
    except CheckFailed as error:
        return _report(error, status=1)
    except (ValueError, OSError, NotSavedError) as error:
        return _report(error, status=2)
    return 0


def _check_paths(command: object) -> None:
    """Refuses URLs in options that are paths; a prompt may be one."""
    values = vars(command).values()
    flat = [each for x in values for each in (x if isinstance(x, tuple) else (x,))]
    check_local(*(each for each in flat if isinstance(each, Path)))
    for value in filter(dataclasses.is_dataclass, flat):
        _check_paths(value)


def _report(error: Exception, *, status: int) -> int:
    print(f"fsdp-jax: error: {error}", file=sys.stderr)
    fail(error)
    return status
