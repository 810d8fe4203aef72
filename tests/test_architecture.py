"""Imports run one way, neither package knows the other, and what is public says why.

All of it is read from the source (`ast`), so imports inside functions and under
`TYPE_CHECKING` count too.
"""

import ast
import graphlib
import importlib
import inspect
import subprocess
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType

import pytest
from helpers.marks import TORCH

ROOT = Path(__file__).parent.parent
PACKAGES = ("fsdp_jax", "bridge")

# The rooms of fsdp_jax, from the ground up: a module imports from its own room and from
# those below. `__init__` is the package itself: `from fsdp_jax import X`.
ROOMS = [
    {"box", "compat", "jaxpr", "local_path", "option_types", "quiet_import"}
    | {"report", "scopes", "streams", "tp_shards", "tree"},
    {"launch", "lora", "rl", "hlo"},
    {"sharding"},
    {"data", "ops"},
    {"step"},
    {"optim"},
    {"pipeline"},
    {"training"},
    {"checkpoint"},
    {"resharding"},
    {"replay"},
    {"planner"},
    {"audit"},
    {"notebook"},
    {"__init__"},
    {"cli"},
    {"main__"},
]
# The same for bridge, whose packages are a row each.
BRIDGE_ROWS = [
    {"box", "cast", "compat", "local_path", "new_directory", "report", "reorder"}
    | {"tree"},
    {"models", "formats"},
    {"rules"},
    {"families", "adapt", "streaming"},
    {"hf", "pytorch"},
    {"lora", "megatron", "handover"},
    {"__init__"},
]
# The same for its Megatron package, whose rooms stand on modules of their own.
MEGATRON_ROOMS = [
    {"key_mapping", "mixers", "names", "param_class", "pipeline", "ranks", "swiglu"}
    | {"tensor_parallel", "tiling", "views", "vocab", "weight_rules"},
    {"buffers", "config"},
    {"cast", "rank_buffers"},
    {"rank_layout"},
    {"read"},
    {"write"},
    {"convert", "decoder", "edit", "hybrid"},
    {"adam", "save"},
    {"save_adam"},
    {"__init__"},
]
WITHIN = [("bridge", BRIDGE_ROWS), ("bridge.megatron", MEGATRON_ROOMS)]
RANK = {layer: rank for rank, row in enumerate(ROOMS) for layer in row}

# "fsdp_jax.sharding._plan" -> its text; a package by its own name
Sources = Mapping[str, str]
Rooms = Sequence[Set[str]]


def sources(root: Path = ROOT) -> dict[str, str]:
    """Every module of both packages."""
    paths = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    return {module_name(path.relative_to(root)): path.read_text() for path in paths}


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(name: str, modules: Sources) -> set[str]:
    """Dotted names that a module imports; `from a import b` is `a.b` if that is one."""
    found = set()
    for node in ast.walk(ast.parse(modules[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return found


def relative(modules: Sources) -> list[str]:
    """Modules with `from . import x`: all is absolute here, for one way to read it."""
    return sorted(
        name
        for name, text in modules.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.level
    )


def top(name: str) -> str:
    return name.partition(".")[0]


def layer(name: str) -> str:
    """`fsdp_jax.checkpoint._save` is of the layer `checkpoint`."""
    parts = name.split(".")
    return parts[1].lstrip("_") if len(parts) > 1 else "__init__"


def is_cli(name: str) -> bool:
    return top(name) == "fsdp_jax" and layer(name) == "cli"


def unknown(modules: Sources) -> set[str]:
    """Layers of fsdp_jax that the table above does not place."""
    return {layer(name) for name in modules if top(name) == "fsdp_jax"} - set(RANK)


def upward(modules: Sources) -> list[str]:
    """Imports within fsdp_jax that the table above forbids."""
    edges = {
        (name, target)
        for name in modules
        for target in imports(name, modules)
        if top(name) == top(target) == "fsdp_jax"
    }
    return sorted(
        f"{name} imports {target}"
        for name, target in edges
        if not may_import(layer(name), layer(target))
    )


def may_import(importer: str, imported: str) -> bool:
    # A room that the table lacks is one failure, of its own test.
    below = RANK.get(imported, -1) < RANK.get(importer, len(ROOMS))
    return importer == imported or below or _both_on_the_ground(importer, imported)


def _both_on_the_ground(importer: str, imported: str) -> bool:
    """The modules beside the rooms may use each other; none may import in a ring."""
    return {importer, imported} <= ROOMS[0]


def across(modules: Sources) -> list[str]:
    """Imports from one package into the other, outside the command line."""
    return sorted(
        f"{name} imports {target}"
        for name in modules
        if not is_cli(name)
        for target in imports(name, modules)
        if top(target) in PACKAGES and top(target) != top(name)
    )


def room(name: str, package: str) -> str:
    """`bridge.megatron.read._dcp` is of the room `read` of `bridge.megatron`."""
    parts = name.removeprefix(package).split(".")
    return parts[1].lstrip("_") if len(parts) > 1 else "__init__"


def upward_within(package: str, rooms: Rooms, modules: Sources) -> list[str]:
    """Imports within a package of bridge that a table above forbids."""
    rank = {room: number for number, row in enumerate(rooms) for room in row}
    edges = {
        (name, target)
        for name in modules
        for target in imports(name, modules)
        if is_within(name, package) and is_within(target, package)
    }
    return sorted(
        f"{name} imports {target}"
        for name, target in edges
        for importer, imported in [(room(name, package), room(target, package))]
        if importer != imported
        and not {importer, imported} <= rooms[0]
        and rank[imported] >= rank[importer]
    )


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def cycle(modules: Sources) -> list[str]:
    """Modules that import each other in a ring, or nothing."""
    graph = {name: imports(name, modules) & set(modules) for name in modules}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_every_module_has_its_place():
    assert not unknown(sources()), (
        "new in fsdp_jax: add it to ROOMS in tests/test_architecture.py, below "
        "everything that imports it"
    )


def test_imports_are_absolute():
    assert relative(sources()) == []


def test_imports_run_one_way():
    assert upward(sources()) == []


@pytest.mark.parametrize("package, rooms", WITHIN)
def test_imports_within_bridge_run_one_way(package, rooms):
    placed = {room(name, package) for name in sources() if is_within(name, package)}
    assert placed == set().union(*rooms)
    assert upward_within(package, rooms, sources()) == []


def test_a_planted_upward_import_in_bridge_is_caught():
    modules = {
        "bridge": "",
        "bridge.formats._source": "from bridge.hf._config import from_hf_config",
        "bridge.hf._config": "from bridge.formats import _source",
        "bridge.rules._rules": "import bridge",
    }
    assert len(upward_within("bridge", BRIDGE_ROWS, modules)) == 2
    modules = {
        "bridge.megatron.read._dcp": "from bridge.megatron.write import _dcp",
        "bridge.megatron.write._dcp": "from bridge.megatron.read import _legacy",
        "bridge.megatron.read._legacy": "from bridge.megatron import _names",
        "bridge.megatron._names": "from bridge.megatron import _ranks",
        "bridge.megatron._ranks": "",
    }
    assert len(upward_within("bridge.megatron", MEGATRON_ROOMS, modules)) == 1


def test_neither_package_imports_the_other():
    assert across(sources()) == []


def test_no_modules_import_each_other_in_a_ring():
    assert cycle(sources()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_loads_no_torch(package):
    # A child process: this one may have loaded torch for other tests.
    code = f"import sys, {package}; print(*{TORCH!r} & set(sys.modules))"
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == []


# The checkers catch what they are for.


PLAN, STEP = "fsdp_jax.sharding._plan", "fsdp_jax.training._train_step"
MODULES = (
    "fsdp_jax",
    *(f"fsdp_jax.{room}" for room in ("sharding", "training", "checkpoint", "cli")),
    *(PLAN, STEP, "fsdp_jax.checkpoint._save", "fsdp_jax._tree"),
)


@pytest.mark.parametrize(
    "name, text",
    [
        (PLAN, f"from {STEP} import make_train_step"),
        (PLAN, f"import {STEP}"),
        (PLAN, "from fsdp_jax.training import _train_step"),
        (PLAN, f"def f():\n    from {STEP} import make_train_step"),
        (PLAN, f"if TYPE_CHECKING:\n    from {STEP} import TrainStep"),
        (STEP, "from fsdp_jax import Plan"),  # the package itself
        (STEP, "import fsdp_jax as fsdp"),
        (STEP, "from fsdp_jax.checkpoint import save"),
        ("fsdp_jax.launch._client", f"from {PLAN} import Plan"),
        ("fsdp_jax._tree", f"from {PLAN} import Plan"),
        ("fsdp_jax.planner", "from fsdp_jax.cli import main"),
        ("fsdp_jax", "from fsdp_jax.cli import main"),
    ],
)
def test_a_planted_upward_import_is_caught(name, text):
    assert len(upward(dict.fromkeys(MODULES, "") | {name: text})) == 1


@pytest.mark.parametrize(
    "name, text",
    [
        (STEP, f"from {PLAN} import Plan"),
        (PLAN, "from fsdp_jax.sharding._mesh import make_mesh"),
        (PLAN, "from fsdp_jax._tree import PyTree"),
        ("fsdp_jax._report", "from fsdp_jax._tree import PyTree"),
        ("fsdp_jax.checkpoint", "from fsdp_jax.checkpoint._save import save"),
        ("fsdp_jax.checkpoint._save", f"from {STEP} import TrainStep"),
        ("fsdp_jax.cli.demo", "import bridge\nimport fsdp_jax as fsdp"),
        (
            "bridge.streaming._load",
            "import jax\nfrom bridge.formats._source import Source",
        ),
    ],
)
def test_a_good_import_is_let_be(name, text):
    modules = dict.fromkeys(MODULES, "") | {name: text}
    assert upward(modules) == across(modules) == cycle(modules) == []
    assert not unknown(modules)


def test_a_planted_relative_import_is_caught():
    modules = {"bridge._a": "from . import _b", "bridge._b": "from bridge import _c"}
    assert relative(modules) == ["bridge._a"]


def test_a_planted_module_without_a_place_is_caught():
    assert unknown({"fsdp_jax._extra": "", "bridge._extra": ""}) == {"extra"}


@pytest.mark.parametrize(
    "name, text",
    [
        ("fsdp_jax.sharding._plan", "import bridge"),
        (
            "fsdp_jax.sharding._plan",
            "def f():\n    from bridge.streaming._load import load_hf",
        ),
        ("bridge.streaming._load", "from fsdp_jax import Plan"),
        ("bridge.cli", "import fsdp_jax"),  # only fsdp_jax's own command line may
    ],
)
def test_a_planted_import_across_is_caught(name, text):
    assert len(across({name: text})) == 1


def test_a_planted_ring_is_caught():
    modules = {
        "bridge": "",
        "bridge.streaming._load": "from bridge.hf._save import save",
        "bridge.hf._save": "def f():\n    from bridge.streaming import _load",
    }
    assert set(cycle(modules)) == {"bridge.streaming._load", "bridge.hf._save"}


# Public names


def public_modules() -> list[str]:
    """Packages and modules without a leading underscore, the command line aside."""
    return sorted(
        name
        for name in sources()
        if not any(part.startswith("_") for part in name.split("."))
        and not is_cli(name)
    )


def undocumented(module: ModuleType) -> list[str]:
    """Public functions and classes of ours, seen in `module`, without a docstring."""
    names = getattr(module, "__all__", [n for n in vars(module) if n[0] != "_"])
    values = {name: getattr(module, name) for name in names}
    return [
        f"{module.__name__}.{name}"
        for name, value in values.items()
        if callable(value) and top(getattr(value, "__module__", "")) in PACKAGES
        if not has_own_doc(value)
    ]


def has_own_doc(value: object) -> bool:
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    # dataclasses write a signature where there is no docstring.
    return bool(doc) and not doc.startswith(f"{getattr(value, '__name__', '')}(")


@pytest.mark.parametrize("name", public_modules())
def test_public_names_have_docstrings(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    assert undocumented(module) == []


def test_a_planted_undocumented_name_is_caught():
    planted = ModuleType("bridge.planted")
    text = """
import dataclasses

def said(): "Says."
def silent(): pass
def _private(): pass

@dataclasses.dataclass
class Silent:
    x: int
"""
    planted.__dict__["__name__"] = "bridge.planted"
    exec(text, planted.__dict__)
    assert undocumented(planted) == ["bridge.planted.silent", "bridge.planted.Silent"]
