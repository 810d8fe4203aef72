"""Runs described in a file: the options of `fsdp-jax train` in YAML, by section."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import yaml

from fsdp_jax.checkpoint._paths import as_path
from fsdp_jax.cli._dataset import is_hub_id
from fsdp_jax.cli._option_schema import Schema, problems, schema_of
from fsdp_jax.cli._options import repeated
from fsdp_jax.cli._run_marker import write_in

NAME = "run.yaml"
"""Name of the file in the directory of a run, with all options of its last start."""

_SUFFIXES = (".yaml", ".yml", ".json")
# What a resumed run has of its own: a start, steps to trace, and devices.
_OF_DATA = ("data", "eval_data")
_OF_A_START = ("start", "profiling", "where")


def expand(words: Sequence[str], command: type) -> list[str]:
    """Puts the options of a run file in place of its name.

    The file is the first argument; `--set SECTION.OPTION=VALUE` replaces a value of it,
    and other options of the command line do as well. `--resume RUN` without a file and
    without another directory to save to takes the options that the run had.

    Args:
      words: Arguments of the command.
      command: Dataclass of the command.

    Returns:
      Arguments without a file and without `--set`.

    Raises:
      ValueError: If the file is not YAML, or has unknown options or values of other
        types, all offenders in one message; or a run without a file is resumed without
        `--data` and `--save`.
    """
    file, words = _split_file(words)
    sets, words = _split_sets(words)
    schema = schema_of(command)
    values: dict[str, Any] = {}
    if file is not None:
        values = read_run_file(file, schema)
    elif (run := _value_of(words, "resume")) is not None:
        if Path(_value_of(words, "save") or run).absolute() == Path(run).absolute():
            values = _options_of_run(Path(run), schema)
            given = (_value_of(words, option) for option in ("data", "save"))
            if not values and None in given:
                raise ValueError(
                    f"--resume '{run}': there is no {NAME} with the options of a run. "
                    "Check the path, or give --data and --save too."
                )
    for text in sets:
        _set(values, text, schema)
    return [*_as_words(values, command, _names(words)), *words]


def read_run_file(file: Any, schema: Schema) -> dict[str, Any]:
    """Reads the options of a file.

    Args:
      file: Path of a YAML or JSON file, from `as_path`.
      schema: Schema of its content.

    Raises:
      ValueError: As for `expand`.
    """
    if not file.exists():
        raise ValueError(f"'{file}' is not a file that describes a run.")
    try:
        values = yaml.load(file.read_bytes().decode(), _UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(
            f"'{file}' is not YAML: {' '.join(str(error).split())}"
        ) from error
    wrong = list(_wrong(values, schema))
    if wrong:
        raise ValueError(f"'{file}' describes no run:\n  " + "\n  ".join(wrong))
    return values


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would drop one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        keys = [self.construct_object(key) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.MarkedYAMLError(
                problem=f"{', '.join(twice)} stands twice",
                problem_mark=node.start_mark,
            )
        return super().construct_mapping(node, deep)


def _wrong(values: Any, schema: Schema) -> Iterator[str]:
    """Yields what is unknown or of another type, by section and option."""
    if not isinstance(values, dict):
        yield f"it holds {type(values).__name__}, not options by name"
        return
    for name, value in values.items():
        known = schema["properties"].get(name)
        if known is None:
            yield _unknown(str(name), "", schema)
        elif known.get("type") != "object":
            yield from problems(value, known, name)
        elif not isinstance(value, dict):
            yield f"{name}: a section, with options by name, not {value!r}"
        else:
            for option, given in value.items():
                if option in known["properties"]:
                    inner = known["properties"][option]
                    yield from problems(given, inner, f"{name}.{option}")
                else:
                    yield _unknown(str(option), f"{name}.", schema)


def _unknown(name: str, section: str, schema: Schema) -> str:
    """Returns the message for a name that is none, with the nearest one that is."""
    paths = dict(_paths(schema))
    plain = name.replace("-", "_")
    nearest = difflib.get_close_matches(plain, paths, n=1)
    hint = f" Did you mean {paths[nearest[0]]}?" if nearest else ""
    return f"{section}{name}: there is no such option.{hint}"


def _paths(schema: Schema) -> Iterator[tuple[str, str]]:
    """Yields the options by name, each with its section."""
    for name, inner in schema["properties"].items():
        yield name, name
        for option in inner.get("properties", {}):
            yield option, f"{name}.{option}"


def _split_file(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    if words and not words[0].startswith("-") and words[0].endswith(_SUFFIXES):
        return Path(words[0]), list(words[1:])
    return None, list(words)


def _split_sets(words: Sequence[str]) -> tuple[list[str], list[str]]:
    sets, rest = [], []
    remaining = iter(words)
    for word in remaining:
        if word == "--set":
            sets.append(next(remaining, ""))
        elif word.startswith("--set="):
            sets.append(word.removeprefix("--set="))
        else:
            rest.append(word)
    return sets, rest


def _set(values: dict[str, Any], text: str, schema: Schema) -> None:
    path, equals, value = text.partition("=")
    *section, option = path.replace("-", "_").split(".")
    if not equals or len(section) > 1 or not option:
        raise ValueError(
            f"--set {text}: give SECTION.OPTION=VALUE, such as optimizer.lr=1e-4."
        )
    given: Any = {option: yaml.safe_load(value)}
    for name in section:
        given = {name: given}
    if wrong := list(_wrong(given, schema)):
        raise ValueError(f"--set {text}: {'; '.join(wrong)}")
    for name in section:
        values[name] = {**values.get(name, {}), **given[name]}
    if not section:
        values.update(given)


def _options_of_run(run: Path, schema: Schema) -> dict[str, Any]:
    """Returns the options of a run that is resumed, but those of its start."""
    file = as_path(run) / NAME
    if not file.exists():
        return {}
    values = read_run_file(file, schema)
    kept = {name: x for name, x in values.items() if name not in _OF_A_START}
    return {**kept, "save": str(run)}


def _value_of(words: Sequence[str], option: str) -> str | None:
    for word, following in itertools.pairwise([*words, ""]):
        if word == f"--{option}":
            return following
        if word.startswith(f"--{option}="):
            return word.partition("=")[2]
    return None


def _names(words: Sequence[str]) -> set[str]:
    """Returns the names of the options that are given."""
    given = (word.partition("=")[0] for word in words if word.startswith("--"))
    names = {name.removeprefix("--").replace("-", "_") for name in given}
    return names | {name.removeprefix("no_") for name in names}


def _as_words(
    values: Mapping[str, Any], command: type, typed: set[str]
) -> Iterator[str]:
    """Yields the arguments for values, but for options that are typed."""
    hints = typing.get_type_hints(command, include_extras=True)
    for name, value in values.items():
        if isinstance(value, dict):
            section = typing.get_type_hints(command)[name]
            yield from _as_words(value, section, typed)
        elif name not in typed:
            yield from _words(name.replace("_", "-"), value, repeated(hints[name]))


def _words(option: str, value: Any, repeats: bool) -> list[str]:
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    texts = [str(x) for x in (value if isinstance(value, list) else [value])]
    if repeats:
        return [word for text in texts for word in (f"--{option}", text)]
    return [f"--{option}", *texts] if texts else []


def words_of(values: Mapping[str, Any], command: type) -> list[str]:
    """Returns the arguments of a command for the options of a run file.

    Args:
      values: Options by section, from `read_run_file`.
      command: Command, a dataclass.
    """
    return list(_as_words(values, command, set()))


def write_run_file(save: Any, options: Mapping[str, Any]) -> None:
    """Writes the options of a run into its directory, in process 0.

    Args:
      save: Directory of the run, from `as_path`.
      options: Options from `options_by_section`.
    """
    if jax.process_index() > 0:
        return
    text = "# Options of this run: fsdp-jax train run.yaml --save ANOTHER repeats it.\n"
    text += yaml.safe_dump(dict(options), sort_keys=False, allow_unicode=True)
    write_in(save, NAME, text)


def options_by_section(group: Any, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a run file, without those that have no value.

    Args:
      group: Command, or a section of its options.
      resolved: Values of the options that were not given, by name.
    """
    found = {}
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if dataclasses.is_dataclass(value):
            value = options_by_section(value, resolved) or None
        elif value is None:
            value = resolved.get(field.name)
        if value is not None and value != ():
            found[field.name] = _as_yaml(value, field.name in _OF_DATA)
            # A name that is no path here is one of the hub.
            if field.name == "hf" and isinstance(value, str) and Path(value).exists():
                found[field.name] = os.path.abspath(value)
    return found


def _as_yaml(value: Any, is_data: bool) -> Any:
    if isinstance(value, tuple):
        return [_as_yaml(x, is_data) for x in value]
    if not isinstance(value, Path) or (is_data and is_hub_id(value)):
        return str(value) if isinstance(value, Path) else value
    return str(as_path(value).absolute())
