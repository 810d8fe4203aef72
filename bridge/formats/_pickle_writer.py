"""Pickles written by hand: names of classes that need not be importable here.

Python's pickler insists on importing what it names. torch's files name torch's own
functions, so without torch they are written opcode by opcode: protocol 2, which every
torch reads, and its `weights_only=True` too.
"""

import dataclasses
import pickle
import struct
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Name:
    """A class, function or constant by its full name, as in `torch.float32`."""

    name: str


@dataclasses.dataclass(frozen=True)
class Call:
    """What calling something gives.

    Args:
      function: What is called.
      args: With what.
    """

    function: Name
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Object:
    """An object of a class, made without its constructor.

    Args:
      cls: The class.
      state: Its attributes, or what its `__setstate__` takes; None to set none.
    """

    cls: Name
    state: Any = None


@dataclasses.dataclass(frozen=True)
class External:
    """Something kept outside of the pickle.

    Args:
      pid: How the reader will find it.
    """

    pid: Any


@dataclasses.dataclass(frozen=True)
class Pairs:
    """A dict whose keys may be any of the above."""

    pairs: tuple[tuple[Any, Any], ...]


def encode_pickle(value: Any) -> bytes:
    """Pickles plain values, and the classes above.

    Args:
      value: None, booleans, numbers, strings, bytes; tuples, lists and dicts.

    Raises:
      ValueError: If it holds an object of another type.
    """
    return pickle.PROTO + b"\2" + b"".join(_encode(value)) + pickle.STOP


def _encode(value: Any) -> Iterable[bytes]:
    if type(value) in _ENCODERS:
        yield from _ENCODERS[type(value)](value)
    else:
        raise ValueError(
            f"{value!r} is a {type(value).__name__}, which is no plain value."
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
    # As protocol 2 has it: there were no bytes in Python 2.
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
