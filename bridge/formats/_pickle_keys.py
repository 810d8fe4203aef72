"""Bounds on keys of dicts and members of sets, whose hashes are computed recursively.

The hash of a tuple descends into its tuples, without a limit of depth and once for
each reference to a shared one: a pickle of 100 bytes computes for days, one of 2 MB
overflows the stack of the process. So sizes are followed through the opcodes first.
"""

import pickletools
from typing import Any

MOST_VALUES = 1000
"""Upper bound on the values of one key, shared ones counted each time."""

_CODES = {op.name: ord(op.code) for op in pickletools.opcodes}
_PUSHES = frozenset(
    ord(op.code)
    for op in pickletools.opcodes
    if not op.stack_before and op.stack_after and op.name not in ("MARK", "DUP")
)
_PUTS = frozenset(_CODES[name] for name in ("BINPUT", "LONG_BINPUT"))
_GETS = frozenset(_CODES[name] for name in ("BINGET", "LONG_BINGET"))
_TUPLES = {_CODES[f"TUPLE{n}"]: n for n in (1, 2, 3)}
# Values that are taken from the stack, of which one is left or made.
_TAKEN = {
    _CODES[name]: n
    for name, n in {
        "APPEND": 2,
        "BUILD": 2,
        "REDUCE": 2,
        "NEWOBJ": 2,
        "NEWOBJ_EX": 3,
        "STACK_GLOBAL": 2,
        "BINPERSID": 1,
    }.items()
}
_MARK, _POP, _POP_MARK = _CODES["MARK"], _CODES["POP"], _CODES["POP_MARK"]
_DUP, _MEMOIZE, _SETITEM = _CODES["DUP"], _CODES["MEMOIZE"], _CODES["SETITEM"]
_TO_MARK = {
    _CODES[name]: name
    for name in "TUPLE LIST DICT FROZENSET APPENDS SETITEMS ADDITEMS".split()
}
_KEY_STEPS = {"DICT": 2, "SETITEMS": 2, "FROZENSET": 1, "ADDITEMS": 1}


class KeySizes:
    """Stack of an unpickler that holds the size of each value in place of the value.

    A tuple has the size of its values and 1; all else has 1, as it has no hash or one
    that is independent of its contents.
    """

    def __init__(self):
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._memo: dict[int, int] = {}

    def run(self, code: int, argument: int) -> None:
        """Follows one opcode.

        Args:
          code: Opcode.
          argument: Index in the memo, of an opcode that has one.

        Raises:
          ValueError: If it hashes a value of more than `MOST_VALUES` values.
          IndexError: If the stack has too few values.
          KeyError: If the memo has no such index.
        """
        stack = self._stack
        if code in _PUSHES and code not in _GETS:
            stack.append(1)
        elif code in _PUTS:
            self._memo[argument] = stack[-1]
        elif code in _GETS:
            stack.append(self._memo[argument])
        elif code == _MEMOIZE:
            self._memo[len(self._memo)] = stack[-1]
        elif code == _MARK:
            self._marks.append(len(stack))
        elif code in _TUPLES:
            self._make(len(stack) - _TUPLES[code], is_tuple=True)
        elif code in _TAKEN:
            self._make(len(stack) - _TAKEN[code], is_tuple=False)
        elif code in _TO_MARK:
            self._take_to_mark(_TO_MARK[code])
        elif code == _SETITEM:
            _check_size(stack[-2])
            del stack[-2:]
        elif code == _DUP:
            stack.append(stack[-1])
        elif code == _POP and self._marks[-1:] != [len(stack)]:
            stack.pop()
        elif code == _POP_MARK:
            del stack[self._marks.pop() :]
        elif code == _POP:
            self._marks.pop()

    def _make(self, start: int, *, is_tuple: bool) -> None:
        if start < 0:
            raise IndexError("it takes more than its stack holds")
        size = 1 + sum(self._stack[start:]) if is_tuple else 1
        # Bounded: sizes double with each opcode.
        self._stack[start:] = [min(size, MOST_VALUES + 1)]

    def _take_to_mark(self, name: str) -> None:
        start = self._marks.pop()
        if name in _KEY_STEPS:
            for size in self._stack[start :: _KEY_STEPS[name]]:
                _check_size(size)
        if name in ("APPENDS", "SETITEMS", "ADDITEMS"):
            del self._stack[start:]
        else:
            self._make(start, is_tuple=name == "TUPLE")


def _check_size(size: int) -> None:
    if size > MOST_VALUES:
        raise ValueError(f"a key has more than {MOST_VALUES:,} values")


def check_key(key: Any, atoms: tuple[type, ...]) -> None:
    """Checks that hashing a key is quick, which an interpreted value need not be.

    Args:
      key: Key of a dict, or member of a set.
      atoms: Types of values whose hash is independent of other values.

    Raises:
      ValueError: If it has a value that is neither of `atoms` nor a tuple or frozenset,
        or more than `MOST_VALUES` values.
    """
    left, count = [key], 0
    while left:
        value = left.pop()
        count += 1
        if isinstance(value, (tuple, frozenset)):
            _check_size(count + len(left) + len(value))
            left.extend(value)
        elif not isinstance(value, atoms):
            raise ValueError(f"a key has a {type(value).__name__}")
