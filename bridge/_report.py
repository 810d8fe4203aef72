"""Formatting of error reports: all problems in one message, repeats folded."""

import re
from collections.abc import Mapping, Sequence

# A number, or an already folded set of numbers, that is one component of a dotted path.
_NUMBERS = re.compile(r"(?<=\.)(0|[1-9]\d*|\{[\d,-]+\})(?=\.)")


def format_report(report: Mapping[str, Sequence[str]]) -> str:
    """Formats the non-empty sections of a report as indented lines.

    Args:
      report: Offending entries by heading.

    Returns:
      Indented lines; the empty string if there are no entries.
    """
    lines = []
    for heading, entries in report.items():
        if entries:
            lines.append(f"  {heading} ({len(entries)}):")
            lines += [f"    {line}" for line in fold_numbers(entries)]
    return "\n".join(lines)


def fold_numbers(entries: Sequence[str]) -> list[str]:
    """Folds entries that differ only in path numbers: `layers.{0-31}.norm`.

    Otherwise a mismatched 80-layer checkpoint would fill the screen with names.
    """
    most = max((len(_NUMBERS.findall(entry)) for entry in entries), default=0)
    for place in range(1, most + 1):
        entries = _fold(entries, place)
    return list(entries)


def _fold(entries: Sequence[str], place: int) -> list[str]:
    """Folds entries that differ only in their `place`-th number from the end."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for entry in entries:
        numbers = list(_NUMBERS.finditer(entry))[-place:]
        if len(numbers) == place and numbers[0][0].isdigit():
            rest = entry[: numbers[0].start()], entry[numbers[0].end() :]
            groups.setdefault(rest, []).append(int(numbers[0][0]))
        else:
            groups[(entry,)] = []
    return [
        _ranges(numbers).join(rest) if numbers else rest[0]
        for rest, numbers in groups.items()
    ]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
    return f"{{{text}}}" if len(numbers) > 1 else text
