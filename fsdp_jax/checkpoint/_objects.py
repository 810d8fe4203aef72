"""Objects saved beside a state, such as data iterators or averages of weights.

Each is written as typed JSON; its jax arrays are stored with those of the state.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from fsdp_jax._tree import PyTree
from fsdp_jax.checkpoint._assets import unusable_names
from fsdp_jax.checkpoint._leaf_names import Leaf, flatten, unflatten
from fsdp_jax.checkpoint._manifest import reading
from fsdp_jax.checkpoint._typed_json import decode, encode

FOLDER = "extras"


@runtime_checkable
class Checkpointable(Protocol):
    """Protocol of an object with a state that can be saved and restored.

    Every iterator of grain implements it. A state consists of numbers, strings, bytes,
    numpy arrays, and lists, tuples and dicts of them, as in metadata; and of jax arrays
    or trees of them, which keep their dtype and are restored in the sharding of the
    object's arrays at that time.
    """

    def get_state(self) -> Any:
        """Returns the current state."""
        ...

    def set_state(self, state: Any, /) -> None:
        """Restores a state returned by `get_state`."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """PyTorch's form of the protocol, `torch.distributed.checkpoint.stateful`.

    The loaders of `torchdata` implement it.
    """

    def state_dict(self) -> Any:
        """Returns the current state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restores a state returned by `state_dict`."""
        ...


@dataclasses.dataclass(frozen=True)
class PerProcess:
    """Wraps an object that differs between processes, such as an iterator over files.

    Without it, all processes must have the same state, which is stored once.

    Attributes:
      value: Object of this process. Its state holds no jax array, since these are
        global.
      merge: Function from the states of all saving processes, in order, to the state of
        this process; called if the number of processes has changed. None to refuse such
        a load.
    """

    value: Checkpointable | Stateful
    merge: Callable[[list[Any]], Any] | None = None


Extra = Checkpointable | Stateful | PerProcess


@dataclasses.dataclass(frozen=True)
class Captured:
    """States of objects at one time.

    Attributes:
      documents: State of each object in JSON types, by name.
      trees: Arrays in the states, by dotted name.
      own: Names of the objects that differ between processes.
    """

    documents: dict[str, Any]
    trees: dict[str, PyTree]
    own: frozenset[str]

    @property
    def leaves(self) -> dict[str, Leaf]:
        """Arrays to store with the leaves of the state."""
        return flatten(self.trees)

    @property
    def shared(self) -> dict[str, Any]:
        """States that must be equal in all processes; None for per-process ones."""
        return {
            name: None if name in self.own else document
            for name, document in self.documents.items()
        }

    def contents(self) -> dict[str, bytes]:
        """Returns the files that this process writes, by path in the step."""
        rank, count = jax.process_index(), jax.process_count()
        # [number of saving processes, None if shared; state]
        files = {
            f"{FOLDER}/{name}/{rank}.json": [count, document]
            if name in self.own
            else [None, document]
            for name, document in self.documents.items()
            if name in self.own or rank == 0
        }
        return {name: json.dumps(file).encode() for name, file in files.items()}


def capture(extras: Mapping[str, Extra]) -> Captured:
    """Collects the state of each object.

    Raises:
      ValueError: If an object has no state, or one that cannot be stored.
    """
    problems = unusable_names(extras)
    for name, extra in extras.items():
        if not isinstance(_value(extra), Checkpointable | Stateful):
            kind = type(_value(extra)).__name__
            problems.append(
                f"{name}: {kind} has neither get_state and set_state nor state_dict "
                "and load_state_dict"
            )
    if problems:
        raise ValueError("extras: " + "; ".join(problems) + ".")
    own = frozenset(n for n, extra in extras.items() if isinstance(extra, PerProcess))
    trees: dict[str, PyTree] = {}
    documents = {
        name: encode(
            _get(_value(extra)), f"{FOLDER}.{name}", None if name in own else trees
        )
        for name, extra in extras.items()
    }
    return Captured(documents, trees, own)


@dataclasses.dataclass(frozen=True)
class Stored:
    """Stored objects of a step.

    Attributes:
      names: Names of all stored objects, as leaf names.
      documents: States of the requested objects: one per saving process in order, or a
        single one if they were equal.
    """

    names: frozenset[str]
    documents: dict[str, list[Any]]


def read_extras(
    directory: Path, files: Mapping[str, Any], extras: Mapping[str, Extra]
) -> Stored:
    """Reads the requested objects that are stored.

    Args:
      directory: State directory of the step.
      files: Files in the step's manifest, which verifies their contents.
      extras: Requested objects.

    Raises:
      ValueError: If an object was saved per process and is requested without
        `PerProcess`, or the reverse; or if another number of processes saved it and it
        has no `merge`.
      DamagedCheckpointError: If a file is not readable.
    """
    parts = [file.split("/") for file in files]
    names = {part[1] for part in parts if part[0] == FOLDER}
    stored = {name: (None, []) for name in names}
    for name in names & extras.keys():
        ranks = sum(part[:2] == [FOLDER, name] for part in parts)
        paths = [directory / FOLDER / name / f"{rank}.json" for rank in range(ranks)]
        with reading(directory, f"{FOLDER}/{name}"):
            found = [json.loads(path.read_bytes()) for path in paths]
            stored[name] = found[0][0], [document for _, document in found]
    return choose_extras(directory.parent, stored, extras)


def choose_extras(
    where: Path,
    stored: Mapping[str, tuple[int | None, list[Any]]],
    extras: Mapping[str, Extra],
) -> Stored:
    """Returns the requested objects of a step.

    Args:
      where: Step, for messages.
      stored: Number of processes that saved their own state, None for a shared state;
        and the documents; by name. Documents of objects that are not requested may be
        left out.
      extras: Requested objects.

    Raises:
      ValueError: If a stored object does not fit the request, as in `read_extras`.
    """
    problems, documents = [], {}
    for name in stored.keys() & extras.keys():
        saved_by, documents[name] = stored[name]
        problems += _misfits(name, saved_by, len(documents[name]), extras[name])
    if problems:
        raise ValueError(f"'{where}' does not fit: {'; '.join(problems)}.")
    return Stored(frozenset(f"{FOLDER}.{name}" for name in stored), documents)


def restore_extras(
    extras: Mapping[str, Extra],
    captured: Captured,
    stored: Stored,
    values: Mapping[str, jax.Array],
) -> None:
    """Restores the state of each stored object.

    Args:
      extras: Objects to restore.
      captured: Their states before the restore, which have the shardings of their
        arrays.
      stored: Stored states.
      values: Stored arrays by leaf name.

    Raises:
      ValueError: If a stored state has arrays where the object has none to define their
        sharding.
    """
    trees = unflatten(captured.trees, dict(values))
    try:
        states = {
            name: [decode(document, trees) for document in documents]
            for name, documents in stored.documents.items()
        }
    except KeyError as error:
        raise ValueError(
            f"{error.args[0]}: the step has jax arrays there, but the object to "
            "restore has none to take their shardings from."
        ) from error
    for name, state in states.items():
        extra = extras[name]
        if not isinstance(extra, PerProcess):
            _set(extra, state[0])
        elif len(state) == jax.process_count():
            _set(extra.value, state[jax.process_index()])
        else:
            assert extra.merge is not None
            _set(extra.value, extra.merge(state))


def _misfits(name: str, saved_by: int | None, found: int, extra: Extra) -> list[str]:
    """Returns the reasons why a saved state does not fit `extra`.

    Args:
      name: Name of the object.
      saved_by: Number of processes that saved their own state; None for a shared state.
      found: Number of states found.
      extra: Object to restore.
    """
    count, where = jax.process_count(), f"{FOLDER}.{name}"
    is_own = isinstance(extra, PerProcess)
    if not is_own and saved_by is not None:
        return [
            f"{where}: each process saved its own: give fsdp_jax.checkpoint.PerProcess"
        ]
    if is_own and saved_by is None:
        return [f"{where}: saved once for all, not PerProcess"]
    if is_own and saved_by != found:
        return [f"{where}: {found} of {saved_by} processes left a file"]
    if is_own and saved_by != count and extra.merge is None:
        return [
            f"{where}: {saved_by} process(es) saved, {count} load: say what becomes of "
            "their states by PerProcess(..., merge=...)"
        ]
    return []


def _value(extra: Any) -> Any:
    return extra.value if isinstance(extra, PerProcess) else extra


def _get(value: Checkpointable | Stateful) -> Any:
    if isinstance(value, Checkpointable):
        return value.get_state()
    return value.state_dict()


def _set(value: Checkpointable | Stateful, state: Any) -> None:
    if isinstance(value, Checkpointable):
        value.set_state(state)
    else:
        value.load_state_dict(state)
