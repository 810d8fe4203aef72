"""Report of checkpoint contents that are not converted, with reasons."""

import re
from collections.abc import Sequence

from bridge._report import fold_numbers

RANDOM = ("rng_state", "rerun_state_machine")
_REASONS = (
    (
        r"_extra_state(/|$)",
        "scaling of fp8 matmuls, which TransformerEngine makes anew",
    ),
    (r"^rng_state", "torch's random generators, which JAX has not"),
    (r"^rerun_state_machine", "Megatron's search for faulty hardware"),
    (
        r"/\w*optim\w*\.pt$",
        "the optimizer's state, without the names of the weights; save with "
        "--ckpt-format torch_dist to carry it",
    ),
    (r"^(chained_\d+\.)?optimizer\.", "settings of the optimizer"),
)


def describe_left_out(keys: Sequence[str]) -> tuple[str, ...]:
    """Returns one line per kind of unconverted contents, with the reason.

    Args:
      keys: Keys or file names that are not converted.
    """
    lines, others = [], list(keys)
    for pattern, why in _REASONS:
        search = re.compile(pattern).search
        matched = [key for key in others if search(key)]
        others = [key for key in others if not search(key)]
        if matched:
            count = f" and {len(matched) - 1} more" if len(matched) > 1 else ""
            lines.append(f"'{matched[0]}'{count}: {why}")
    return (*lines, *(f"{key}: of unknown use" for key in fold_numbers(others)))
