"""Finds the flags of `XLA_FLAGS` with which XLA aborts the process."""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
from collections.abc import Callable, Sequence, Set
from pathlib import Path

from fsdp_jax.cli._subprocess import Outcome
from fsdp_jax.cli._xla_names import option_names

Probe = Callable[[str], Outcome]
"""Starts a backend with these `XLA_FLAGS`, in a child."""


@dataclasses.dataclass(frozen=True)
class BadFlag:
    """A part of `XLA_FLAGS` that XLA rejects.

    Attributes:
      text: Flag as written.
      reason: Reason for the rejection.
      nearest: Most similar known name; None if there is none.
    """

    text: str
    reason: str
    nearest: str | None = None


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Rejected flags, and the others.

    Attributes:
      bad: Rejected flags, in the order found.
      good: Flags without the rejected ones.
    """

    bad: tuple[BadFlag, ...] = ()
    good: str = ""


def diagnose(text: str, probe: Probe) -> Diagnosis:
    """Finds the flags that XLA rejects, by removing those that it complains of.

    Args:
      text: Value of `XLA_FLAGS`.
      probe: Called once for flags that are fine, and about once more for each fault:
        XLA names all unknown flags together, but of wrong values the first alone.
    """
    if not text or _is_flags(text):
        return _diagnose_flags(text, probe)
    try:
        return _diagnose_flags(Path(text).read_text(), probe)
    except (OSError, ValueError):
        return Diagnosis((BadFlag(text, _NO_FILE),))


def value_of(text: str, name: str) -> str | None:
    """Returns the value of a flag; None if it is not set."""
    values = [flag.partition("=")[2] for flag in split(text) if _name(flag) == name]
    return values[-1] if values else None


def split(text: str) -> list[str]:
    """Returns the words of `XLA_FLAGS`, without quotes around values."""
    try:
        return shlex.split(text)
    except ValueError:  # A quote that does not end.
        return text.split()


_NO_FILE = (
    "it does not begin with '-', so XLA takes it for the name of a file of flags, and "
    "that cannot be read"
)
_STRAY = "no flag, and XLA reads none of what follows; write --name=value"


def _is_flags(text: str) -> bool:
    return text.lstrip().startswith("-")


def _diagnose_flags(text: str, probe: Probe) -> Diagnosis:
    words = split(text)
    flags = [word for word in words if word.startswith("-")]
    refused, good = _without_refused(flags, probe)
    names = option_names() if refused else frozenset()
    bad = [_explain(flag, outcome, names) for flag, outcome in refused]
    if strays := [word for word in words if not word.startswith("-")]:
        bad.append(BadFlag(" ".join(strays), _STRAY))
    return Diagnosis(tuple(bad), _join(good))


def _without_refused(
    flags: Sequence[str], probe: Probe
) -> tuple[list[tuple[str, Outcome]], list[str]]:
    """Returns the flags that XLA rejects, each with its output, and the others."""
    refused, left = [], list(flags)
    while left:
        outcome = probe(_join(left))
        if outcome.alive or outcome.timed_out:
            break
        found = dict.fromkeys(_named(left, outcome.error), outcome)
        found = found or _refused_alone(left, probe)
        if not found:
            break
        refused += found.items()
        left = [flag for flag in left if flag not in found]
    return refused, left


def _named(flags: Sequence[str], error: str) -> list[str]:
    """Returns the flags that XLA's message names."""
    if unknown := re.search(r"Unknown flags? in XLA_FLAGS: (.*)", error):
        listed = f" {unknown[1]} "
        return [flag for flag in flags if f" {flag} " in listed]
    if wrong := re.search(r"Couldn't interpret value .* for flag (\w+)", error):
        return [flag for flag in flags if _name(flag) == wrong[1]]
    return []


def _refused_alone(flags: Sequence[str], probe: Probe) -> dict[str, Outcome]:
    """Returns flags with which no backend starts, where XLA names none."""
    if not probe("").alive:
        return {}
    outcomes = {flag: probe(_join([flag])) for flag in flags}
    return {flag: outcome for flag, outcome in outcomes.items() if not outcome.alive}


def _explain(flag: str, outcome: Outcome, names: Set[str]) -> BadFlag:
    name, has_value, value = flag.lstrip("-").partition("=")
    if ",--" in value:
        return BadFlag(flag, "flags are separated by spaces, not by commas")
    if "Unknown flag" not in outcome.error:
        return BadFlag(flag, f"the value '{value}' does not do: {_said(outcome, name)}")
    if name in names and not flag.startswith("--"):
        return BadFlag(flag, f"flags begin with two dashes: --{name}")
    if name in names and not has_value:
        return BadFlag(flag, f"it needs a value: --{name}=VALUE")
    nearest = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.8)
    return BadFlag(flag, "this XLA knows no such flag", nearest[0] if nearest else None)


def _said(outcome: Outcome, name: str) -> str:
    if "Flag parsing failed" not in outcome.error:
        return outcome.reason
    # The usage that XLA prints then has the kind of each flag, until it is cut off.
    usage = rf"^\t--{name}=.*?\t(\w+)\t"
    kind = re.search(usage, outcome.error, flags=re.MULTILINE)
    if "Couldn't interpret value" in outcome.error and kind:
        return f"XLA wants {kind[1]}"
    return "XLA takes others"


def _name(flag: str) -> str:
    return flag.lstrip("-").partition("=")[0]


def _join(flags: Sequence[str]) -> str:
    return " ".join(map(_quoted, flags))


def _quoted(flag: str) -> str:
    """Quotes a value that has spaces, as XLA reads it."""
    name, equals, value = flag.partition("=")
    if not re.search(r"[\s'\"\\]", value):
        return flag
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'
