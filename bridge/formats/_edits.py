"""Edits of a checkpoint's tensors: new names, other dtypes, and tensors left out."""

import dataclasses
import fnmatch
import re
from collections import Counter
from collections.abc import Collection, Mapping

import jax.numpy as jnp
import numpy as np

from bridge._report import format_report


@dataclasses.dataclass(frozen=True)
class Edits:
    """Changes of names and dtypes.

    Args:
      rename: Pairs of a regular expression and its replacement, applied one after the
        other to every name in which the expression is found.
      drop: Patterns (`*` matches anything) of tensors to leave out, by their old names.
      cast: Pairs of such a pattern and the floating dtype of the tensors it matches.

    Examples:
      >>> edits = bridge.Edits(rename=(("^model", "decoder"),), drop=("lm_head.*",))
      >>> bridge.edit_safetensors("small-llama", path + "/edited", edits)
      >>> bridge.open_checkpoint(path + "/edited").keys()[0]
      'decoder.embed_tokens.weight'
    """

    rename: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()
    cast: tuple[tuple[str, np.dtype], ...] = ()

    def apply(
        self, dtypes: Mapping[str, np.dtype], others: Collection[str] = ()
    ) -> tuple[dict[str, str], dict[str, np.dtype]]:
        """Returns the edited names and dtypes.

        Args:
          dtypes: Dtype of each tensor by name.
          others: Names of entries that are not tensors; they cannot be cast.

        Returns:
          New name of each entry that is kept, and new dtype of each tensor that is
          kept, both by old name.

        Raises:
          ValueError: If an edit matches nothing, two entries get one name, or a tensor
            that is cast is not of floating-point numbers; all are listed.
        """
        names = [*dtypes, *others]
        dropped = {
            n for n in names if any(fnmatch.fnmatchcase(n, p) for p in self.drop)
        }
        renamed = {name: name for name in names if name not in dropped}
        wrong: dict[str, list[str]] = {
            "patterns that match nothing": [
                pattern
                for pattern in (*self.drop, *(pattern for pattern, _ in self.cast))
                if not fnmatch.filter(names, pattern)
            ]
        }
        renamed = self._renamed(renamed, wrong)
        twice = [n for n, count in Counter(renamed.values()).items() if count > 1]
        wrong["names of several entries"] = twice
        kept = {name: dtype for name, dtype in dtypes.items() if name in renamed}
        if dtypes and not kept:
            wrong["patterns that leave no tensor"] = list(self.drop)
        cast = {
            name: self._dtype(name, dtype, wrong.setdefault("not floating-point", []))
            for name, dtype in kept.items()
        }
        if any(wrong.values()):
            raise ValueError(f"These edits cannot be made:\n{format_report(wrong)}")
        return renamed, cast

    def _renamed(
        self, names: Mapping[str, str], wrong: dict[str, list[str]]
    ) -> dict[str, str]:
        """Returns the new names by the old ones; adds what is wrong with the edits."""
        renamed, wrong["malformed expressions"] = dict(names), []
        for pattern, replacement in self.rename:
            try:
                found = any(re.search(pattern, name) for name in renamed.values())
                renamed = {
                    old: re.sub(pattern, replacement, name)
                    for old, name in renamed.items()
                }
            except (re.error, IndexError) as error:  # of an unknown name of a group
                wrong["malformed expressions"].append(
                    f"{pattern!r} by {replacement!r}: {error}"
                )
                continue
            if not found:
                wrong["patterns that match nothing"].append(pattern)
        return renamed

    def _dtype(self, name: str, dtype: np.dtype, wrong: list[str]) -> np.dtype:
        to = [to for p, to in self.cast if fnmatch.fnmatchcase(name, p)]
        if to and not jnp.issubdtype(dtype, jnp.floating):
            wrong.append(f"{name} of {dtype}")
        return to[-1] if to else dtype
