"""Validation of pickle opcodes before unpickling.

The C unpickler trusts every size: one opcode of five bytes makes it allocate and fill
34 GB of memo. So the opcodes are checked first, with the sizes of keys; those that
neither torch nor Megatron writes are rejected.
"""

import pickletools

from bridge.formats._pickle_keys import KeySizes

# Protocol 2 and later, except opcodes that name a class without `find_class` (EXT),
# instantiate in the old way (INST, OBJ), or need out-of-band buffers.
_ALLOWED = """
PROTO STOP FRAME MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE
BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT
SHORT_BINSTRING BINSTRING SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8
SHORT_BINUNICODE BINUNICODE BINUNICODE8
EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS
EMPTY_DICT DICT SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET
BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET
GLOBAL STACK_GLOBAL REDUCE BUILD NEWOBJ NEWOBJ_EX BINPERSID
""".split()

_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}

_BY_CODE = {ord(op.code): op for op in pickletools.opcodes if op.name in _ALLOWED}
_FIXED = {
    code: op.arg.n if op.arg else 0
    for code, op in _BY_CODE.items()
    if op.arg is None or op.arg.n >= 0
}
_COUNTED = {
    code: _LENGTH_BYTES[op.arg.n]
    for code, op in _BY_CODE.items()
    if op.arg is not None and op.arg.n in _LENGTH_BYTES
}
_GLOBAL, _STOP, _LONG_BINPUT = ord("c"), ord("."), ord("r")
_MEMO = frozenset(
    code
    for code, op in _BY_CODE.items()
    if op.name in ("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET")
)
_NAMES = {ord(op.code): op.name for op in pickletools.opcodes}


def check_opcodes(program: bytes) -> None:
    """Checks that unpickling needs memory and time of the order of the pickle's size.

    Args:
      program: Bytes of one complete pickle.

    Raises:
      ValueError: If it uses a disallowed opcode, ends early, has bytes after its STOP,
        takes more than its stack or memo holds, uses a memo index larger than its
        length, or hashes a key of too many values.
    """
    position, code, sizes = 0, -1, KeySizes()
    while code != _STOP:
        if position >= len(program):
            raise ValueError("it ends before its STOP")
        code, position = program[position], position + 1
        size, start = _FIXED.get(code), position
        position = _skip(program, code, position) if size is None else position + size
        argument = 0
        if code in _MEMO:
            argument = int.from_bytes(program[start:position], "little")
        # The C unpickler allocates its memo up to the largest index.
        if code == _LONG_BINPUT and argument > len(program):
            raise ValueError(f"it asks for {argument:,} memo entries")
        try:
            sizes.run(code, argument)
        except (IndexError, KeyError):
            raise ValueError("it takes more than its stack or memo holds") from None
    if position != len(program):
        raise ValueError(f"{len(program) - position:,} bytes follow its end")


def _skip(program: bytes, code: int, position: int) -> int:
    """Returns the position of the opcode that follows one of variable length."""
    if code in _COUNTED:
        start = position + _COUNTED[code]
        return start + int.from_bytes(program[position:start], "little")
    if code == _GLOBAL:  # two lines: module and name
        middle = program.find(b"\n", position) + 1
        end = program.find(b"\n", middle) + 1
        if middle and end:
            return end
        raise ValueError("it ends inside a name")
    raise ValueError(
        f"it uses the opcode {_NAMES.get(code, hex(code))}, which torch never writes"
    )
