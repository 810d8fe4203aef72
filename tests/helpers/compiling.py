"""How the tests compile: quickly, since that is most of the time of a test.

What is computed and which collectives do it stay the same. Programs may also be kept
between workers, processes and runs: set `JAX_COMPILATION_CACHE_DIR`, as `make test`
does. The key is then jax's: the program, its scopes, the compiler's options and
version. Scopes are in it since tests read them from compiled programs; lines of source
code are in neither, so that moving a function recompiles nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import jax
from jax._src import compiler

SETTINGS = {
    # Halves the time to compile. Tests that measure memory turn it off.
    "jax_disable_most_optimizations": True,
    "jax_compilation_cache_include_metadata_in_key": True,
    "jax_traceback_in_locations_limit": 0,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}

_FLAGS = [
    # A worker that gets no processor for 40 s would be ended by XLA.
    "--xla_cpu_collective_call_terminate_timeout_seconds=300",
]
_EMITTERS = "xla_cpu_use_fusion_emitters"
HAS_EMITTERS = jax.__version_info__[:2] == (0, 10)  # jaxlib 0.12 has no such flag.
if HAS_EMITTERS:
    _FLAGS.append(f"--{_EMITTERS}=false")  # Halves it once more.

XLA_FLAGS = " ".join(_FLAGS)

_THREADS = {"NPROC": "32"}
"""Threads that XLA:CPU runs programs in.

It has as many as devices otherwise. Two loops of a pipeline that do not depend on each
other may wait for their collectives at once, in two threads of one device, and leave
none to other devices: the program then waits forever (jax 0.10.2, 8 devices, 2 cores).
"""

_LOOP, _COLLECTIVES = "stablehlo.while", ("all_gather", "all_reduce", "reduce_scatter")

ENVIRONMENT = {
    "XLA_FLAGS": XLA_FLAGS,
    **_THREADS,
    **{name.upper(): str(value) for name, value in SETTINGS.items()},
}
"""The same for a child process."""


def enable() -> None:
    """Lets this process compile so; before its backend starts."""
    # XLA reads its flags from here alone, and a test's children inherit them.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()
    for name, value in _THREADS.items():
        os.environ.setdefault(name, value)
    for name, value in SETTINGS.items():
        jax.config.update(name, value)
    if jax.__version_info__ < (0, 11):
        compiler.compile_or_get_cached = _with_loops_compiled_anew


_from_cache = compiler.compile_or_get_cached


def _with_loops_compiled_anew(backend, computation, devices, options, *rest, **named):
    """Compiles programs with collectives and loops, whatever the cache has.

    XLA:CPU of jaxlib 0.10 forgets in what order loops run that do not depend on each
    other when it loads a program: their collectives mix up their data.
    """
    given = (backend, computation, devices, options, *rest)
    is_sharded = options.num_partitions * options.num_replicas > 1
    if backend.platform == "cpu" and is_sharded and _LOOP in (text := str(computation)):
        if any(name in text for name in _COLLECTIVES):
            with mock.patch.object(compiler, "_cache_read", lambda *_: (None, None)):
                return _from_cache(*given, **named)
    return _from_cache(*given, **named)


@contextlib.contextmanager
def fusion_emitters() -> Iterator[None]:
    """Compiles within as users do, for laws about bits.

    Without the emitters two programs that compute the same may round otherwise, and
    bfloat16 is copied through float32, which makes other bits of some NaNs.
    """
    if not HAS_EMITTERS:
        yield
        return
    options_of = compiler.get_compile_options

    def with_emitters(*args, env_options_overrides=None, **options):
        overrides = {_EMITTERS: True, **(env_options_overrides or {})}
        return options_of(*args, env_options_overrides=overrides, **options)

    with mock.patch.object(compiler, "get_compile_options", with_emitters):
        jax.clear_caches()
        yield
    jax.clear_caches()
