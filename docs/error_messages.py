"""Every error that the packages raise, with its message, read from the source.

A message is shown as it is written: what a run fills in stands in `{braces}`.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence
from pathlib import Path

ELLIPSIS = "{...}"


@dataclasses.dataclass(frozen=True)
class Message:
    """An error as it is raised at one place.

    Attributes:
      module: `fsdp_jax.sharding._mesh`.
      function: The function, or `Class.method`, that raises it.
      error: The class of the exception.
      text: The message, or `{...}` where it is put together elsewhere.
    """

    module: str
    function: str
    error: str
    text: str


def messages(root: Path, package: str) -> list[Message]:
    """What a package raises, in the order of its files and lines."""
    found = []
    for file in sorted((root / package).rglob("*.py")):
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        tree = ast.parse(file.read_text())
        found += _of_module(module.removesuffix(".__init__"), tree)
    return found


def classes(root: Path, package: str) -> set[str]:
    """The exceptions and warnings that a package defines."""
    return {
        node.name
        for file in (root / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and _is_error(node)
    }


def matches(module: str, patterns: Sequence[str]) -> bool:
    """Whether a module is of any of the patterns; `!` before one leaves it out."""
    if any(fnmatch.fnmatchcase(f"!{module}", pattern) for pattern in patterns):
        return False
    return any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)


def _is_error(node: ast.ClassDef) -> bool:
    bases = [ast.unparse(base) for base in node.bases]
    return any(base.endswith(("Error", "Exception", "Warning")) for base in bases)


def _of_module(module: str, tree: ast.Module) -> Iterator[Message]:
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    for where, node in _raises(tree, ""):
        call = node.exc
        # `raise _wrong_rank(x)`: the error is made by a function of the module.
        for made in _made(call, functions) if isinstance(call, ast.Call) else ():
            text = _text(made.args[0], functions) if made.args else ELLIPSIS
            yield Message(module, where, ast.unparse(made.func), _plain(text))


def _raises(node: ast.AST, where: str) -> Iterator[tuple[str, ast.Raise]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise):
            yield where, child
        named = isinstance(child, ast.FunctionDef | ast.ClassDef)
        inner = f"{where}.{child.name}".lstrip(".") if named else where
        yield from _raises(child, inner)


def _made(call: ast.Call, functions: dict[str, ast.FunctionDef]) -> Iterator[ast.Call]:
    made = _returned(call, functions)
    if not made:
        yield call
    for value in made:
        if isinstance(value, ast.Call):
            yield from _made(value, functions)


def _returned(call: ast.Call, functions: dict[str, ast.FunctionDef]) -> list[ast.expr]:
    """What a function of the same module returns, where the call is of one."""
    name = ast.unparse(call.func).removeprefix("self.")
    if name not in functions:
        return []
    nodes = ast.walk(functions[name])
    return [n.value for n in nodes if isinstance(n, ast.Return) and n.value]


def _text(node: ast.expr, functions: dict[str, ast.FunctionDef]) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value, functions) for value in values)
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, functions) + _text(right, functions)
        case ast.IfExp(body=body):
            return _text(body, functions)
        case ast.Call(func=ast.Attribute(attr="join")):
            return ELLIPSIS  # a line for each thing that is wrong
        case ast.Call():
            texts = [_text(value, functions) for value in _returned(node, functions)]
            return next((text for text in texts if text != ELLIPSIS), ELLIPSIS)
    return ELLIPSIS


def _plain(text: str) -> str:
    return " ".join(text.split())
