"""The command line `fsdp-jax`; one file a command.

The only place that imports both `fsdp_jax` and `bridge`. Results go to stdout, progress
and messages to stderr.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import os
import signal
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import jax
import tyro

import fsdp_jax
from fsdp_jax._compat import CLEAN_UP, TYRO_OPTIONS
from fsdp_jax._local_path import check_local
from fsdp_jax._streams import discard, open_closed
from fsdp_jax.checkpoint import NotSavedError
from fsdp_jax.checkpoint._paths import as_path
from fsdp_jax.cli._errors import CheckFailed, ChildFailed
from fsdp_jax.cli._help_text import help_text, wrapped
from fsdp_jax.cli._no_driver import be_silent_without_driver
from fsdp_jax.cli._option_names import suggestions
from fsdp_jax.cli._options import named
from fsdp_jax.cli._run_file import expand
from fsdp_jax.cli.commands._audit import Audit
from fsdp_jax.cli.commands._compare import Compare
from fsdp_jax.cli.commands._completion import Completion
from fsdp_jax.cli.commands._convert import Convert
from fsdp_jax.cli.commands._data import Data
from fsdp_jax.cli.commands._demo import Demo
from fsdp_jax.cli.commands._diff_metrics import DiffMetrics
from fsdp_jax.cli.commands._doctor import Doctor
from fsdp_jax.cli.commands._edit import Edit
from fsdp_jax.cli.commands._eval import Eval
from fsdp_jax.cli.commands._explain import Explain
from fsdp_jax.cli.commands._export import Export
from fsdp_jax.cli.commands._generate import Generate
from fsdp_jax.cli.commands._import import Import
from fsdp_jax.cli.commands._inspect import Inspect
from fsdp_jax.cli.commands._launch import Launch
from fsdp_jax.cli.commands._make_tiny_llama import MakeTinyLlama
from fsdp_jax.cli.commands._merge import Merge
from fsdp_jax.cli.commands._plan import Plan
from fsdp_jax.cli.commands._remove import Remove
from fsdp_jax.cli.commands._schema import Schema
from fsdp_jax.cli.commands._train import Train
from fsdp_jax.cli.commands._verify import Verify
from fsdp_jax.launch import fail

# Options that are directories of checkpoints, which may be in an object store.
_OF_CHECKPOINTS = {"checkpoint", "resume", "save"}

_Command = (
    Annotated[Train, named("train", Train)]
    | Annotated[Data, named("data", Data)]
    | Annotated[Eval, named("eval", Eval)]
    | Annotated[Generate, named("generate", Generate)]
    | Annotated[Plan, named("plan", Plan)]
    | Annotated[Explain, named("explain", Explain)]
    | Annotated[Import, named("import", Import)]
    | Annotated[Export, named("export", Export)]
    | Annotated[Convert, named("convert", Convert)]
    | Annotated[Merge, named("merge", Merge)]
    | Annotated[Edit, named("edit", Edit)]
    | Annotated[Inspect, named("inspect", Inspect)]
    | Annotated[Verify, named("verify", Verify)]
    | Annotated[Audit, named("audit", Audit)]
    | Annotated[Remove, named("remove", Remove)]
    | Annotated[Compare, named("compare", Compare)]
    | Annotated[DiffMetrics, named("diff-metrics", DiffMetrics)]
    | Annotated[MakeTinyLlama, named("make-tiny-llama", MakeTinyLlama)]
    | Annotated[Demo, named("demo", Demo)]
    | Annotated[Launch, named("launch", Launch)]
    | Annotated[Schema, named("schema", Schema)]
    | Annotated[Doctor, named("doctor", Doctor)]
    | Annotated[Completion, named("completion", Completion)]
)
_CONFIG = (tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)
_DESCRIPTION = """Fully sharded training of Hugging Face models in JAX.

--version prints the version."""
_CLOSED_PIPE = 128 + signal.SIGPIPE
_INTERRUPTED = 128 + signal.SIGINT
# No space, no quota, or too large a file: what Python says of them may name no file.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def run() -> NoReturn:
    """Runs the command of this process, and ends it with the status of `main`."""
    status = main()
    # An interrupt also ends what reads the output: `main` then finds it closed.
    if status not in (_INTERRUPTED, _CLOSED_PIPE):
        sys.exit(status)
    # XLA may still compile, in threads that Python's own end, and jax's, would take the
    # memory from: a segmentation fault, and its status.
    with contextlib.suppress(ImportError):
        atexit.unregister(CLEAN_UP.get())
    try:
        atexit._run_exitfuncs()
        jax.distributed.shutdown()  # which is the other part of jax's own end
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: Arguments after the program's name; None for those of the process.

    Returns:
      Exit status: 0; 1 if a comparison failed, training diverged or the doctor found a
      problem; 2 for what the user can fix; 130 if interrupted; 141 if the reader of
      stdout has gone; for `launch`, the status of the program.
    """
    open_closed()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _answer(words)
        finally:
            # Python flushes at its end too, where a closed pipe would be a traceback.
            sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        return _CLOSED_PIPE
    except OSError as error:  # stdout cannot be written: its disk is full
        discard(sys.stdout)
        return _report(error, status=2)


def _answer(words: Sequence[str]) -> int:
    if words == ["--version"]:
        print(f"fsdp-jax {fsdp_jax.__version__}")
        return 0
    try:
        command = parse(words)
    except BrokenPipeError:  # of the help
        raise
    except (ValueError, OSError) as error:  # in the file of a run
        return _report(error, status=2)
    if isinstance(command, Completion):
        return _print_completion(command.shell)
    return _run(command)


def parse(words: Sequence[str]) -> Any:
    """Parses the arguments of a command.

    Args:
      words: Name of the command, and its arguments.

    Returns:
      The command, a dataclass with a method `run`.

    Raises:
      SystemExit: If they are wrong, with status 2, or if help was asked for.
      ValueError: If the file that describes a run is wrong.
    """
    # tyro has colours for any terminal, and knows nothing of https://no-color.org.
    TYRO_OPTIONS.get()["ansi_codes"] = not os.environ.get("NO_COLOR")
    commands = _commands()
    command, rest = (words[0], words[1:]) if words else ("", words)
    if command == "train":
        rest = expand(rest, Train)
    try:
        if command not in commands:
            return _parse(_Command, "fsdp-jax", wrapped(_DESCRIPTION), words)
        chosen = commands[command]
        return _parse(chosen, f"fsdp-jax {command}", help_text(chosen), rest)
    except SystemExit as stop:
        if stop.code == 2:
            for line in suggestions(words, commands):
                print(f"fsdp-jax: {line}", file=sys.stderr)
        raise


def _parse(command: Any, program: str, text: str, words: Sequence[str]) -> Any:
    return tyro.cli(command, prog=program, description=text, args=words, config=_CONFIG)


def _print_completion(shell: str) -> int:
    try:
        parse(["--tyro-write-completion", shell, "-"])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def _commands() -> dict[str, type]:
    """Returns the commands by name."""
    found = {}
    for annotated in typing.get_args(_Command):
        command, subcommand = typing.get_args(annotated)
        found[subcommand.name] = command
    return found


def _run(command: Any) -> int:
    be_silent_without_driver()
    try:
        _check_paths(command)
        command.run()
    except BrokenPipeError:
        raise
    except KeyboardInterrupt as error:
        fail(error)
        return _INTERRUPTED
    except ChildFailed as error:
        return error.status
    except CheckFailed as error:
        return _report(error, status=1)
    except (ValueError, OSError, NotSavedError) as error:
        return _report(_named(error, command), status=2)
    return 0


def _named(error: Exception, command: object) -> Exception:
    """Returns the error with the directory that has no space, if it names none."""
    target = getattr(command, "out", None) or getattr(command, "dst", None)
    if not isinstance(error, OSError) or error.errno not in _FULL:
        return error
    if error.filename is not None or target is None:
        return error
    return OSError(error.errno, error.strerror, str(target))


def _check_paths(command: object) -> None:
    """Refuses URLs in options that are paths; a prompt may be one."""
    for name, value in vars(command).items():
        for each in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(each):
                _check_paths(each)
            elif isinstance(each, Path) and name in _OF_CHECKPOINTS:
                as_path(each)
            elif isinstance(each, Path):
                check_local(each)


def _report(error: Exception, *, status: int) -> int:
    print(f"fsdp-jax: error: {error}", file=sys.stderr)
    fail(error)
    return status
