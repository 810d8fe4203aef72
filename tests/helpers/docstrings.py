"""What docstrings of public names lack, and whether their examples run."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Examples|Source):", re.M)
ENTRY = re.compile(r"^  \*{0,2}(\w+): \S", re.M)


def sections(doc: str) -> dict[str, str]:
    """The text of each section of a docstring, and its first line under ""."""
    heads = list(SECTION.finditer(doc))
    ends = [*(head.start() for head in heads), len(doc)][1:]
    texts = {
        head[1]: doc[head.end() : end] for head, end in zip(heads, ends, strict=True)
    }
    return {"": doc.partition("\n")[0], **texts}


def missing(value: Any) -> Iterator[str]:
    """What the docstring of a function or a class lacks."""
    doc = sections(inspect.getdoc(value) or "")
    if not re.fullmatch(r"[A-Z`].*\.", doc[""]):
        yield "a first line that is a sentence"
    if not doc.get("Examples", "").lstrip().startswith(">>> "):
        yield "Examples"
    if not inspect.isclass(value):
        yield from missing_of_a_function(value)
    elif dataclasses.is_dataclass(value):
        yield from missing_of_a_dataclass(value)
    else:
        for name, method in inspect.getmembers(value, inspect.isfunction):
            if name == "__init__" or name[0] != "_":
                for what in missing_of_a_function(method):
                    yield f"{what} of {name}"


def missing_of_a_function(function: Callable[..., Any]) -> Iterator[str]:
    doc = sections(inspect.getdoc(function) or "")
    signature = inspect.signature(function)
    names = [name for name in signature.parameters if name != "self"]
    if (said := ENTRY.findall(doc.get("Args", ""))) != names:
        yield f"Args for {names}, it has {said}"
    if signature.return_annotation not in (None, "None", inspect.Signature.empty):
        if "Returns" not in doc:
            yield "Returns"
    if raises(function) and "Raises" not in doc:
        yield "Raises"


def missing_of_a_dataclass(cls: type) -> Iterator[str]:
    doc = sections(inspect.getdoc(cls) or "")
    names = [field.name for field in dataclasses.fields(cls)]
    said = ENTRY.findall(doc.get("Args", "") + doc.get("Attributes", ""))
    if said != names:
        yield f"Args or Attributes for {names}, it has {said}"
    check = vars(cls).get("__post_init__")
    if check and raises(check) and "Raises" not in doc:
        yield "Raises"


def raises(function: Callable[..., Any]) -> bool:
    """Whether the function itself has a `raise` statement."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree))


def failures(doc: str, names: dict[str, Any]) -> str:
    """Runs the examples of a docstring; returns doctest's report of those that fail."""
    test = doctest.DocTestParser().get_doctest(doc, names, "example", None, 0)
    assert test.examples
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return "".join(said)
