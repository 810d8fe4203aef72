"""The text of a compiled module as instructions, in the order in which they run."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's dtype, as HLO writes it, and dims; `()` for a scalar."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements in it."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes it takes, at least, on a device."""
        return -(-self.num_elements * _bits(self.dtype) // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: Its own, without `%`.
      shapes: Of its result; several for a tuple, nested ones flattened.
      opcode: E.g. `fusion`, `all-gather-start`.
      operands: Names of what it reads, in the same computation; of a parameter its
        number, of a constant its value.
      attributes: Whatever follows the operands.
    """

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def bytes(self) -> int:
        """Bytes of its result."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def calls(self) -> tuple[str, ...]:
        """Computations that it runs: of a fusion, a loop's body, branches."""
        return tuple(
            name
            for listed in re.findall(_CALLED, self._own)
            + re.findall(r"branch_computations=\{(.*?)\}", self._own)
            for name in re.findall(r"[\w.\-]+", listed)
        )

    @property
    def op_name(self) -> str:
        """The path of jax's scopes and primitives that it comes from; may be empty."""
        found = re.search(r'op_name="(.*?)"', self.attributes)
        return found[1] if found else ""

    @property
    def trip_count(self) -> int | None:
        """How often a loop runs its body; None if the compiler does not know.

        Where that is for the data to say, its scope may tell what is expected.
        """
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        found = found or re.search(r"about_(\d+)_times/while$", self.op_name)
        return int(found[1]) if found else None

    @property
    def index(self) -> int | None:
        """Which element of a tuple a `get-tuple-element` takes."""
        found = re.search(r"(?:^|, )index=(\d+)", self.attributes)
        return int(found[1]) if found else None

    @property
    def target(self) -> str:
        """The library routine of a custom call."""
        found = re.search(r'custom_call_target="(.*?)"', self.attributes)
        return found[1] if found else ""

    @property
    def _own(self) -> str:
        """The attributes without what quotes jax's scopes."""
        return self.attributes.split(", metadata=")[0]


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions, in the order of the schedule if the module has one.

    Attributes:
      name: Its own.
      instructions: All of them.
      root: The one whose result is the computation's; it need not run last.
    """

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Name -> instruction."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Number -> parameter."""
        found = {}
        for one in self.instructions:
            if one.opcode == "parameter":
                found[int(one.operands[0])] = one
        return found

    @functools.cached_property
    def readers(self) -> dict[str, list[Instruction]]:
        """Name -> the instructions that read it."""
        readers: dict[str, list[Instruction]] = {}
        for one in self.instructions:
            for operand in dict.fromkeys(one.operands):
                readers.setdefault(operand, []).append(one)
        return readers


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled module.

    Attributes:
      computations: By name.
      entry: The name of the one that runs.
    """

    computations: dict[str, Computation]
    entry: str

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]


def parse(text: str) -> Module:
    """Reads the text of a module, as `compiled.as_text()` writes it.

    Raises:
      ValueError: If it has no entry computation.
    """
    computations, entry = {}, None
    for name, is_entry, lines in _blocks(text):
        read = [_instruction(line) for line in lines]
        (root,) = (instruction for is_root, instruction in read if is_root)
        instructions = tuple(instruction for _, instruction in read)
        computations[name] = Computation(name, instructions, root)
        entry = name if is_entry else entry
    if entry is None:
        raise ValueError(
            "This text has no ENTRY computation: it is no compiled module. Pass what "
            "compiled.as_text() returns."
        )
    return Module(computations, entry)


_CALLED = r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\]")


def _blocks(text: str) -> Iterator[tuple[str, bool, list[str]]]:
    """`(name, is it the entry, lines)` of each computation."""
    header, lines = None, []
    for line in text.splitlines():
        if header is None:
            header, lines = _HEADER.match(line), []
        elif line.startswith("}"):
            yield header[2], bool(header[1]), lines
            header = None
        elif _INSTRUCTION.match(line):
            lines.append(line)


def _instruction(line: str) -> tuple[bool, Instruction]:
    """Whether it is the root, and the instruction."""
    match = _INSTRUCTION.match(line)
    assert match, line
    rest = re.sub(r"/\*.*?\*/", "", match[3])
    result, rest = _upto(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, rest = rest.strip().split("(", 1)
    operands, attributes = _upto("(" + rest)
    shapes = tuple(
        Shape(dtype, tuple(int(d.strip("<=")) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(result)
    )
    listed = operands[1:-1]
    names = re.findall(r"%([\w.\-]+)", listed)
    if opcode in ("parameter", "constant"):
        names = [listed]
    return bool(match[1]), Instruction(
        match[2], shapes, opcode, tuple(names), attributes
    )


def _upto(text: str) -> tuple[str, str]:
    """Splits behind the parenthesis that closes the first one."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    return text, ""


def _bits(dtype: str) -> int:
    """Bits of an element: the number in its name, of the narrow floats the first."""
    if dtype in ("token", "opaque"):
        return 0
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8
