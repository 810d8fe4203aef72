"""Pickle writer for classes that need not be importable.

Python's pickler imports each class that it names. torch's files name torch's own
functions, so without torch the opcodes are written directly: protocol 2, which every
torch version reads, also with `weights_only=True`.
"""

import dataclasses
import pickle
import struct
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Name:
    """Class, function or constant by its full name, such as `torch.float32`."""

    name: str


@dataclasses.dataclass(frozen=True)
class Call:
    """Result of a function call.

    Args:
      function: Name of the function.
      args: Arguments of the call.
    """

    function: Name
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Object:
    """Object of a class, created without its constructor.

    Args:
      cls: Name of the class.
      state: Attributes, or the argument of its `__setstate__`; None to set none.
    """

    cls: Name
    state: Any = None


@dataclasses.dataclass(frozen=True)
class External:
    """Object that is stored outside of the pickle.

    Args:
      pid: Persistent id, by which the reader finds it.
    """

    pid: Any


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Dict whose keys may be `Name`, `Call`, `Object` or `External`."""

    pairs: tuple[tuple[Any, Any], ...]


def encode_pickle(value: Any) -> bytes:
    """Pickles plain values and the placeholder classes of this module.

    Args:
      value: None, boolean, number, string, bytes or placeholder; or a tuple, list or
        dict of these.

    Raises:
      ValueError: If `value` contains an object of another type.
    """
    return pickle.PROTO + b"\2" + b"".join(_encode(value)) + pickle.STOP


def _encode(value: Any) -> Iterable[bytes]:
    if type(value) in _ENCODERS:
        yield from _ENCODERS[type(value)](value)
    else:
        raise ValueError(
            f"{value!r} is a {type(value).__name__}, which is not a plain value."
        )


def _encode_int(value: int) -> Iterable[bytes]:
    if -(2**31) <= value < 2**31:
        yield pickle.BININT + struct.pack("<i", value)
    else:
        data = pickle.encode_long(value)
        yield pickle.LONG1 + bytes([len(data)]) + data


def _encode_str(value: str) -> Iterable[bytes]:
    data = value.encode("utf-8", "surrogatepass")
    yield pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def _encode_bytes(value: bytes) -> Iterable[bytes]:
    # Protocol 2 has no opcode for bytes, as it dates from Python 2.
    yield from _encode(Call(Name("_codecs.encode"), (value.decode("latin1"), "latin1")))


def _encode_tuple(value: tuple[Any, ...]) -> Iterable[bytes]:
    yield pickle.MARK
    for item in value:
        yield from _encode(item)
    yield pickle.TUPLE


def _encode_list(value: list[Any]) -> Iterable[bytes]:
    yield pickle.EMPTY_LIST + pickle.MARK
    for item in value:
        yield from _encode(item)
    yield pickle.APPENDS


def _encode_pairs(pairs: Iterable[tuple[Any, Any]]) -> Iterable[bytes]:
    yield pickle.EMPTY_DICT + pickle.MARK
    for key, item in pairs:
        yield from _encode(key)
        yield from _encode(item)
    yield pickle.SETITEMS


def _encode_name(value: Name) -> Iterable[bytes]:
    module, _, name = value.name.rpartition(".")
    yield pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _encode_call(value: Call) -> Iterable[bytes]:
    yield from _encode(value.function)
    yield from _encode(value.args)
    yield pickle.REDUCE


def _encode_object(value: Object) -> Iterable[bytes]:
    yield from _encode(value.cls)
    yield pickle.EMPTY_TUPLE + pickle.NEWOBJ
    if value.state is not None:
        yield from _encode(value.state)
        yield pickle.BUILD


def _encode_external(value: External) -> Iterable[bytes]:
    yield from _encode(value.pid)
    yield pickle.BINPERSID


_ENCODERS: dict[type, Any] = {
    type(None): lambda _: [pickle.NONE],
    bool: lambda value: [pickle.NEWTRUE if value else pickle.NEWFALSE],
    int: _encode_int,
    float: lambda value: [pickle.BINFLOAT + struct.pack(">d", value)],
    str: _encode_str,
    bytes: _encode_bytes,
    tuple: _encode_tuple,
    list: _encode_list,
    dict: lambda value: _encode_pairs(value.items()),
    Pairs: lambda value: _encode_pairs(value.pairs),
    Name: _encode_name,
    Call: _encode_call,
    Object: _encode_object,
    External: _encode_external,
}
