"""Eight simulated devices for every test; where torch is missing, the tests without."""

import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import flax
import jax
import pytest
from helpers import compiling
from helpers.marks import has_module_mark
from helpers.tiers import UNMEASURED, Durations, grid, read_durations, slow_tests

pytest_plugins = ["helpers.cpu_time", "helpers.program_memory"]

# Before any backend starts, and through jax's config rather than the environment, so
# that the tests' child processes choose their devices themselves. The platform is named
# so that the tests are the same on a machine with a GPU.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
compiling.enable()
# A silent (n,) + (m, n) is a bug more often than not. flax, optax and equinox are clean
# under it. Strict dtype promotion is not for all: optax 0.2.8's adamw breaks under it,
# so a test wraps our own calls in `jax.numpy_dtype_promotion("strict")`.
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module")
def fusion_emitters() -> Iterator[None]:
    """Lets the tests of a module compile as users do, for laws about bits."""
    with compiling.fusion_emitters():
        yield


@pytest.fixture(scope="module")
def gpus() -> Iterator[list[jax.Device]]:
    """Stand-ins for 8 H200s, for which XLA compiles as for users."""
    pytest.importorskip("jax_plugins.xla_cuda12", reason="needs XLA's CUDA plugin")
    from fsdp_jax.planner._compile import gpu_devices
    from fsdp_jax.planner._gpu import GPUS

    jax.config.update("jax_disable_most_optimizations", False)
    yield gpu_devices(GPUS["h200"], 8)
    jax.config.update("jax_disable_most_optimizations", True)


def pytest_report_header() -> str:
    """Says which of the two lanes this is."""
    torch = "with" if importlib.util.find_spec("torch") else "without"
    return f"jax {jax.__version__}, flax {flax.__version__}, {torch} torch"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves modules unread that are marked `torch` or `foreign`, unless asked for.

    pytest imports a module to learn its marks, and these cannot be imported where
    torch, or the packages of others, are not installed. So the mark is read from the
    source instead. Tests that need torch are left out by `-m "not torch"` alone:
    without torch, and without that `-m`, the import fails. Those of foreign models are
    left out unless `-m` asks for them.
    """
    expression, path = config.option.markexpr, collection_path
    without = ["torch"] if "not torch" in expression else []
    if not re.search(r"(?<!not )\bforeign\b", expression):
        without.append("foreign")
    if path.suffix != ".py" or not without:
        return None  # let the other hooks decide
    text = path.read_text()
    return any(has_module_mark(text, mark) for mark in without) or None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Marks what is slow or long, and skips what cannot be compiled here."""
    durations = read_durations()
    _mark_slow(items, durations)
    if hasattr(config, "workerinput"):
        _costly_files_first(items, durations)
    _skip_without_compiler(items)


def _mark_slow(items: list[pytest.Item], durations: Durations) -> None:
    slow = slow_tests((item.nodeid for item in items), durations)
    left = grid(durations)
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
        if item.nodeid in left and not item.get_closest_marker("each_case"):
            item.add_marker(pytest.mark.grid)
            item.add_marker(pytest.mark.long)


def _costly_files_first(items: list[pytest.Item], durations: Durations) -> None:
    """Lets workers, which take files in turn, end at about the same time."""
    cost: Counter[Path] = Counter()
    for item in items:
        cost[item.path] += durations.get(item.nodeid, UNMEASURED)
    items.sort(key=lambda item: (-cost[item.path], str(item.path)))


def _skip_without_compiler(items: list[pytest.Item]) -> None:
    """Skips what compiles for GPUs where XLA's compiler for them is not installed."""
    if importlib.util.find_spec("jax_cuda12_plugin"):
        return
    missing = pytest.mark.skip(reason="pip install 'fsdp-jax[plan]' to run it")
    for item in items:
        if item.get_closest_marker("plan"):
            item.add_marker(missing)
