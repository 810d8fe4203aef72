"""Parses the text of an HLO module into computations and instructions.

Instructions keep the order of the text, which is the order of execution if the module
is scheduled.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Shape:
    """Dtype, as HLO writes it, and dims of an array; dims are `()` for a scalar."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of the elements, rounded up and without padding."""
        return -(-self.num_elements * _bits(self.dtype) // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
      name: Name of the instruction, without `%`.
      shapes: Shapes of the result; several for a tuple, with nested tuples flattened.
      opcode: HLO opcode, e.g. `fusion`, `all-gather-start`.
      operands: Names of the operands, in the same computation. The parameter number for
        a `parameter`, the literal for a `constant`.
      attributes: Text behind the operands.
    """

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def calls(self) -> tuple[str, ...]:
        """Names of the called computations: fusion, loop body or branches."""
        return tuple(
            name
            for listed in re.findall(_CALLED, self._own)
            + re.findall(r"branch_computations=\{(.*?)\}", self._own)
            for name in re.findall(r"[\w.\-]+", listed)
        )

    @property
    def op_name(self) -> str:
        """Path of the jax scopes and primitive in the metadata; "" if there is none."""
        found = re.search(r'op_name="(.*?)"', self.attributes)
        return found[1] if found else ""

    @property
    def trip_count(self) -> int | None:
        """Number of iterations of a loop; None if unknown to the compiler.

        If the number depends on the data, an expected number is read from the loop's
        scope, `about_N_times`.
        """
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        found = found or re.search(r"about_(\d+)_times/while$", self.op_name)
        return int(found[1]) if found else None

    @property
    def index(self) -> int | None:
        """Tuple index that a `get-tuple-element` reads; None for other opcodes."""
        found = re.search(r"(?:^|, )index=(\d+)", self.attributes)
        return int(found[1]) if found else None

    @property
    def target(self) -> str:
        """Library routine that a custom call runs; "" if there is none."""
        found = re.search(r'custom_call_target="(.*?)"', self.attributes)
        return found[1] if found else ""

    @property
    def _own(self) -> str:
        """Attributes without the metadata, whose scopes may look like attributes."""
        return self.attributes.split(", metadata=")[0]


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions of one computation, in the order of the text.

    Attributes:
      name: Name of the computation.
      instructions: All instructions, in the order of the schedule if the module has
        one.
      root: Instruction whose result is the computation's; it need not be the last one.
    """

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction

    def fused(self, one: Instruction) -> Instruction:
        """Returns the fusion that a `fusion-done` completes; others as they are."""
        if one.opcode != "fusion-done":
            return one
        start = self.by_name[one.operands[0]]
        return dataclasses.replace(
            one, opcode="fusion", operands=start.operands, attributes=start.attributes
        )

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameter instructions by number."""
        found = {}
        for instruction in self.instructions:
            if instruction.opcode == "parameter":
                found[int(instruction.operands[0])] = instruction
        return found

    @functools.cached_property
    def readers(self) -> dict[str, list[Instruction]]:
        """Instructions that read each result, by the name of the result."""
        readers: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                readers.setdefault(operand, []).append(instruction)
        return readers


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed HLO module.

    Attributes:
      computations: Computations by name.
      entry: Name of the entry computation.
    """

    computations: dict[str, Computation]
    entry: str

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]


def parse(text: str) -> Module:
    """Parses the text of a module, as returned by `compiled.as_text()`.

    Args:
      text: HLO text.

    Returns:
      The parsed module.

    Raises:
      ValueError: If the text has no entry computation.
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
            "This text is not a compiled module: it has no ENTRY computation. Pass the "
            "result of compiled.as_text()."
        )
    return Module(computations, entry)


_CALLED = r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\]")


def _blocks(text: str) -> Iterator[tuple[str, bool, list[str]]]:
    """Yields `(name, is_entry, instruction lines)` of each computation."""
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
    """Parses one line into `(is_root, instruction)`."""
    match = _INSTRUCTION.match(line)
    assert match, line
    # XLA writes `/*index=5*/` into long tuples.
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
    """Splits `text` after the parenthesis that closes the first one."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    return text, ""


def _bits(dtype: str) -> int:
    """Returns the bits of an element: the first number in the dtype's name, else 8."""
    if dtype in ("token", "opaque"):
        return 0
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8
