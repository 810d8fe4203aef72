"""What XLA is told to compile a step with: per version, and never by environment."""

from __future__ import annotations

Options = dict[str, bool | int | str]


def compiler_options() -> Options:
    """Options of XLA:GPU under which communication hides behind computation.

    Pass them to `jitted.lower(...).compile(compiler_options=...)`, or to
    `make_train_step(compiler_options=...)`. An option that this version of XLA does not
    know raises there; the same name in `XLA_FLAGS` would abort the process.
    """
    return {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_all_gather_combine_threshold_bytes": 1 << 30,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 1 << 27,
        "xla_gpu_all_reduce_combine_threshold_bytes": 1 << 27,
    }
