"""A worker that runs thousands of tests keeps within what the kernel maps for it."""

import jax
import jax.numpy as jnp
import pytest
from helpers import program_memory
from helpers.program_memory import EVERY, count_maps, let_go

pytestmark = pytest.mark.skipif(not count_maps(), reason="only Linux counts maps")


def compile_many(programs: int) -> list:
    """Functions that were called, and keep their programs as long as they live."""
    functions = [jax.jit(lambda x, i=i: jnp.sin(x) * i) for i in range(programs)]
    for function in functions:
        function(1.0)
    return functions


def test_programs_are_let_go_of_where_more_is_mapped():
    compile_many(1)  # what the backend maps once is not a program's
    jax.clear_caches()
    before = count_maps()
    functions = compile_many(100)
    with_programs = count_maps()
    assert let_go(with_programs - 1)
    # jaxlib 0.12 maps a hundred programs in no piece of their own.
    assert count_maps() - before <= (with_programs - before) / 2
    assert len(functions) == 100  # alive until here


def test_programs_are_kept_below(monkeypatch):
    monkeypatch.setattr(jax, "clear_caches", lambda: pytest.fail("let go"))
    assert not let_go(2 * count_maps())


def test_a_worker_counts_after_every_few_tests(request, monkeypatch):
    cleared = []
    monkeypatch.setattr(program_memory, "MOST_MAPS", 0)
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(True))
    for _ in range(2 * EVERY):
        program_memory.pytest_runtest_teardown(request.node)
    assert len(cleared) == 2
    assert request.config.pluginmanager.hasplugin(program_memory.__name__)
