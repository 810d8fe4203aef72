"""Parameter groups of `fsdp_dtensor`: settings recorded parameter by parameter."""

import re
from collections.abc import Callable, Mapping
from typing import Any

_META = re.compile(r"^optimizer\.param_to_group_meta\.(.+)\.(\w+)$")


def is_group_meta(key: str) -> bool:
    """Returns whether a key names one setting of one parameter's group."""
    return _META.match(key) is not None


def read_group_meta(items: Mapping[str, Callable[[], Any]]) -> list[dict[str, Any]]:
    """Returns the distinct parameter groups.

    Args:
      items: Functions that read the settings, by key on disk.
    """
    by_param: dict[str, dict[str, Any]] = {}
    for key, read in items.items():
        match = _META.match(key)
        if match is not None:
            by_param.setdefault(match[1], {})[match[2]] = read()
    distinct = {repr(sorted(group.items())): group for group in by_param.values()}
    return list(distinct.values())
