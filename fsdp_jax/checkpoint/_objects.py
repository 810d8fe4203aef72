"""Objects that are saved beside a state: a data iterator, an average, what one likes.

Each is written as typed JSON; the arrays of jax in it, with those of the state.
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
from fsdp_jax.checkpoint._typed_json import decode, encode

FOLDER = "extras"


@runtime_checkable
class Checkpointable(Protocol):
    """An object that can say where it stands and go on from there.

    Every iterator of grain is one. A state is numbers, strings, bytes, numpy arrays,
    lists, tuples and dicts of them, as in metadata; and arrays of jax or trees of
    them, which keep their dtype and come back in the sharding that those of the object
    have when it is restored.
    """

    def get_state(self) -> Any:
        """The state now."""
        ...

    def set_state(self, state: Any, /) -> None:
        """Takes a state that `get_state` returned."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """The same in PyTorch's words, as `torch.distributed.checkpoint.stateful` has it.

    `torchdata`'s loaders are such.
    """

    def state_dict(self) -> Any:
        """The state now."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Takes a state that `state_dict` returned."""
        ...


@dataclasses.dataclass(frozen=True)
class PerProcess:
    """An object of which each process has its own, such as an iterator over its files.

    Without it all processes must have the same state, which is stored once.

    Attributes:
      value: That of this process. Its state holds no array of jax: those are of all.
      merge: What to do where another number of processes saved: from their states, in
        order, the one for this process. None: it is refused.
    """

    value: Checkpointable | Stateful
    merge: Callable[[list[Any]], Any] | None = None


Extra = Checkpointable | Stateful | PerProcess


@dataclasses.dataclass(frozen=True)
class Captured:
    """Objects as they stand.

    Attributes:
      documents: The state of each in types of JSON, by name.
      trees: The arrays in them, by dotted name.
      own: Names of those of which each process has its own.
    """

    documents: dict[str, Any]
    trees: dict[str, PyTree]
    own: frozenset[str]

    @property
    def leaves(self) -> dict[str, Leaf]:
        """What is to be stored with the leaves of the state."""
        return flatten(self.trees)

    @property
    def shared(self) -> dict[str, Any]:
        """What must be the same in all processes."""
        return {
            name: None if name in self.own else document
            for name, document in self.documents.items()
        }

    def contents(self) -> dict[str, bytes]:
        """What this process writes: each file, by its place in the step."""
        rank, count = jax.process_index(), jax.process_count()
        files = {
            f"{FOLDER}/{name}/{rank}.json": [count, document]
            if name in self.own
            else [None, document]
            for name, document in self.documents.items()
            if name in self.own or rank == 0
        }
        return {name: json.dumps(file).encode() for name, file in files.items()}


def capture(extras: Mapping[str, Extra]) -> Captured:
    """Asks each object for its state.

    Raises:
      ValueError: If one has no state, or one that cannot be stored.
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
    """The objects of a step.

    Attributes:
      names: Those that are stored, as leaves are called.
      documents: Of those asked for, what each process saved, in order; one for all
        where they saved the same.
    """

    names: frozenset[str]
    documents: dict[str, list[Any]]


def read_extras(
    directory: Path, files: Mapping[str, Any], extras: Mapping[str, Extra]
) -> Stored:
    """Reads the objects that are asked for, as far as they are stored.

    Args:
      directory: Of the step.
      files: Of its manifest, by which they are as they were written.
      extras: What is asked for.

    Raises:
      ValueError: If what each process saved for itself is asked for as what all have
        in common, or of another number of processes and not to be merged.
    """
    parts = [file.split("/") for file in files]
    names = {part[1] for part in parts if part[0] == FOLDER}
    stored = {name: (None, []) for name in names}
    for name in names & extras.keys():
        ranks = sum(part[:2] == [FOLDER, name] for part in parts)
        paths = [directory / FOLDER / name / f"{rank}.json" for rank in range(ranks)]
        found = [json.loads(path.read_bytes()) for path in paths]
        stored[name] = found[0][0], [document for _, document in found]
    return choose_extras(directory.parent, stored, extras)


def choose_extras(
    where: Path,
    stored: Mapping[str, tuple[int | None, list[Any]]],
    extras: Mapping[str, Extra],
) -> Stored:
    """What of the objects of a step is asked for.

    Args:
      where: The step, for messages.
      stored: By name how many processes saved their own, None if it is one for all;
        and the documents. Of what is not asked for they may be left out.
      extras: What is asked for.

    Raises:
      ValueError: As for `read_extras`.
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
    """Gives each object that is stored the state that it had.

    Args:
      extras: The objects.
      captured: Of the same, before: the mould of their arrays.
      stored: What was read of them.
      values: The arrays, by the name of the leaf.

    Raises:
      ValueError: If a state has arrays where the object has none to say their
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
            f"{error.args[0]}: the step has arrays of jax there, and the object to be "
            "restored has none, which would say how they are sharded."
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
    """Why what was saved, by so many or (None) once for all, is not for this object."""
    count, where = jax.process_count(), f"{FOLDER}.{name}"
    is_own = isinstance(extra, PerProcess)
    if not is_own and saved_by is not None:
        return [f"{where}: each process saved its own: give fsdp_jax.PerProcess"]
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
