"""Dtypes of weights and gradients: a policy, and what it is for one parameter."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from fsdp_jax._option_types import check_options
from fsdp_jax._tree import as_patterns, matches
from fsdp_jax.sharding._param_gather import ParamGather


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a parameter and its gradient, each independent of the others.

    Weights are stored and updated in `main_params_dtype`, and gathered and computed
    with in `param_dtype`. Gradients are reduced in `grad_comm_dtype`, and accumulated
    and stored in `main_grads_dtype`. The policy applies to floating-point parameters
    only.

    Args:
      param_dtype: Dtype to which a weight is cast *before* it is gathered, so that the
        gather communicates this dtype. None: the dtype in which the model creates it.
      main_params_dtype: Dtype that the optimizer reads and writes. None: the model's
        dtype, but at least float32.
      main_grads_dtype: Dtype in which gradients are accumulated and passed to the
        optimizer, of the range of float32 at least, as bfloat16 has it. None:
        `main_params_dtype`.
      grad_comm_dtype: Dtype to which gradients are cast before they are reduced. None:
        `main_grads_dtype`.
      reduce_scatter_with_fp32_accumulation: Communicate gradients in `grad_comm_dtype`
        but sum them in `main_grads_dtype`: each rank receives the other ranks' pieces
        (an all-to-all, the same bytes as a reduce-scatter) and sums them itself.
        Without it, the sum of n ranks is rounded to `grad_comm_dtype` up to n - 1
        times. An all-reduce (between HSDP replicas, and of replicated parameters) has
        no such form and communicates `main_grads_dtype` then. Needs a narrower
        `grad_comm_dtype`.
      stochastic_rounding: With `main_params_dtype=jnp.bfloat16`, round each updated
        weight up or down at random, more often to the nearer neighbour, so that updates
        too small for bfloat16 are kept on average. The optimizer state is then in
        float32. The result does not depend on the mesh.
      param_name_patterns_for_fp32_local_accumulation: Path patterns (`"*.router.*"`, or
        `"all"`) of parameters whose gradients are accumulated over microbatches, and
        passed to the optimizer, in float32, while the others use a narrower
        `main_grads_dtype`. Communication does not change.
      param_name_patterns_in_fp32: Path patterns of parameters that are gathered and
        compute in float32 whatever `param_dtype` is: for example a router's bias, which
        moves by steps that bfloat16 would lose.
      param_gather: Quantized format in which large matrices of units are gathered: a
        `Float8Gather`, `MXFP8Gather`, `BlockFloat8Gather` or `NVFP4Gather`. None:
        `param_dtype`.

    Raises:
      ValueError: If a dtype is not a floating-point dtype, that of main gradients has
        too small a range, or an option would have no effect with these dtypes.

    Examples:
      >>> policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
      >>> config = fsdp.FSDPConfig(mp_policy=policy)
      >>> plan = fsdp.fully_shard(make_model, mesh, config=config)
      >>> precision = plan.param_plans[0].precision
      >>> str(precision.param), str(precision.main_params), str(precision.grad_comm)
      ('bfloat16', 'float32', 'float32')

    Source: Megatron-FSDP `mixed_precision.py::MixedPrecisionPolicy` for
      `main_params_dtype`, `main_grads_dtype` and `grad_comm_dtype` (there None means
      the parameter's own dtype for main gradients; here gradients are accumulated in at
      least float32 unless told otherwise). `param_dtype` is FSDP2's.
      `reduce_scatter_with_fp32_accumulation` and the patterns for local accumulation
      are those of Megatron's `DistributedDataParallelConfig` (patterns there are
      `fnmatch`ed against the whole name).
    """

    param_dtype: DTypeLike | None = None
    main_params_dtype: DTypeLike | None = None
    main_grads_dtype: DTypeLike | None = None
    grad_comm_dtype: DTypeLike | None = None
    reduce_scatter_with_fp32_accumulation: bool = False
    stochastic_rounding: bool = False
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    param_name_patterns_in_fp32: tuple[str, ...] = ()
    param_gather: ParamGather | None = None

    def __post_init__(self):
        """Validates the dtypes; all non-floating ones are listed in one message."""
        check_options(self)
        chosen = self._chosen_dtypes()
        if self.stochastic_rounding and chosen.get("main_params_dtype") != jnp.bfloat16:
            raise ValueError(
                "MixedPrecisionPolicy(stochastic_rounding=True) rounds weights that "
                "are stored in bfloat16, but "
                f"main_params_dtype={self.main_params_dtype}. Set "
                "main_params_dtype=jnp.bfloat16, or drop stochastic_rounding."
            )
        wide = jnp.dtype(self.main_grads_dtype or self.main_params_dtype or jnp.float32)
        if jnp.finfo(wide).maxexp < jnp.finfo(jnp.float32).maxexp:
            option = "main_grads" if self.main_grads_dtype else "main_params"
            raise ValueError(
                f"MixedPrecisionPolicy({option}_dtype={wide.name}): main gradients of "
                f"{wide.name} have not the range of float32. Those that a loss scale "
                "made large enough would be lost again, and their norm infinite. Set "
                "main_grads_dtype=jnp.float32, and to communicate them in fewer bits "
                f"grad_comm_dtype=jnp.{wide.name}."
            )
        communicated = jnp.dtype(self.grad_comm_dtype or wide)
        if self.reduce_scatter_with_fp32_accumulation and (
            communicated.itemsize >= wide.itemsize
        ):
            raise ValueError(
                "MixedPrecisionPolicy(reduce_scatter_with_fp32_accumulation=True) "
                f"needs a grad_comm_dtype ({communicated.name}) narrower than "
                f"main_grads_dtype ({wide.name}). Set grad_comm_dtype=jnp.bfloat16."
            )
        patterns = as_patterns(
            "MixedPrecisionPolicy",
            "param_name_patterns_for_fp32_local_accumulation",
            self.param_name_patterns_for_fp32_local_accumulation,
        )
        if patterns and wide.itemsize >= 4:
            raise ValueError(
                f"MixedPrecisionPolicy({patterns=}): these parameters would accumulate "
                "in float32 what the others accumulate in main_grads_dtype, which is "
                f"{wide.name} already. Set main_grads_dtype=jnp.bfloat16, or drop it."
            )
        object.__setattr__(
            self, "param_name_patterns_for_fp32_local_accumulation", patterns
        )
        option = "param_name_patterns_in_fp32"
        kept = as_patterns("MixedPrecisionPolicy", option, getattr(self, option))
        object.__setattr__(self, option, kept)

    def _chosen_dtypes(self) -> dict[str, jnp.dtype]:
        """Returns the dtypes that are set; refuses those that are not floating."""
        chosen = {
            field.name: _dtype(field.name, value)
            for field in dataclasses.fields(self)
            if field.name.endswith("_dtype")
            and (value := getattr(self, field.name)) is not None
        }
        wrong = [
            f"{name}={dtype.name}"
            for name, dtype in chosen.items()
            if not jnp.issubdtype(dtype, jnp.floating)
        ]
        if wrong:
            raise ValueError(
                "MixedPrecisionPolicy takes floating-point dtypes, got "
                f"{', '.join(wrong)}. Use e.g. jnp.bfloat16 or jnp.float32."
            )
        return chosen

    def resolve(self, name: str, dtype: DTypeLike) -> Precision:
        """Resolves every None for a parameter that the model creates in `dtype`."""
        model = jnp.dtype(dtype)
        if not jnp.issubdtype(
            model, jnp.floating
        ):  # Complex: the policy is not for it.
            return Precision(model, model, model, model, accumulate_wide=False)
        main = jnp.dtype(self.main_params_dtype or at_least_float32(model))
        main_grads = jnp.dtype(self.main_grads_dtype or main)
        widened = any(
            pattern == "all" or matches(pattern, name)
            for pattern in self.param_name_patterns_for_fp32_local_accumulation
        )
        is_kept = any(matches(p, name) for p in self.param_name_patterns_in_fp32)
        return Precision(
            param=jnp.dtype(jnp.float32 if is_kept else self.param_dtype or model),
            main_params=main,
            main_grads=jnp.dtype(jnp.float32) if widened else main_grads,
            grad_comm=jnp.dtype(self.grad_comm_dtype or main_grads),
            accumulate_wide=self.reduce_scatter_with_fp32_accumulation,
        )


def _dtype(option: str, given: DTypeLike) -> jnp.dtype:
    try:
        return jnp.dtype(given)
    except TypeError as error:
        raise ValueError(
            f"MixedPrecisionPolicy({option}={given!r}) is no dtype. Use e.g. "
            "jnp.bfloat16 or jnp.float32."
        ) from error


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype promoted with float32, also of a float8, which jax refuses."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize == 1:
        return jnp.dtype(jnp.float32)
    return jnp.promote_types(dtype, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Precision:
    """A `MixedPrecisionPolicy` resolved for one parameter: its concrete dtypes.

    Attributes:
      param: Dtype in which it is gathered and computed with.
      main_params: Dtype in which it is stored and updated.
      main_grads: Dtype in which its gradient is accumulated and stored.
      grad_comm: Dtype in which its gradient is communicated.
      accumulate_wide: True if gradients are summed in `main_grads` while communicated
        in `grad_comm`.
    """

    param: jnp.dtype
    main_params: jnp.dtype
    main_grads: jnp.dtype
    grad_comm: jnp.dtype
    accumulate_wide: bool
