"""Reports: every problem in one message, a line for all layers that share it."""

import re
from collections.abc import Mapping, Sequence

# A number that is a whole part of a dotted path.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)(?!.*\.\d+\.)")
_HOLE = "\0"


def format_report(report: Mapping[str, Sequence[str]]) -> str:
    """Lists the entries under each heading that has any.

    Args:
      report: Headings, and the offenders under each.

    Returns:
      Indented lines; the empty string if there are no offenders.
    """
    lines = []
    for heading, entries in report.items():
        if entries:
            lines.append(f"  {heading} ({len(entries)}):")
            lines += [f"    {line}" for line in fold_numbers(entries)]
    return "\n".join(lines)


def fold_numbers(entries: Sequence[str]) -> list[str]:
    """Folds entries that differ in path numbers alone: `layers.{0-31}.norm`.

    An 80-layer checkpoint of another model would else fill the screen with names.
    """
    entries, folded = list(entries), _fold_last(entries)
    while folded != entries:
        entries, folded = folded, _fold_last(folded)
    return folded


def _fold_last(entries: Sequence[str]) -> list[str]:
    groups: dict[str, list[int]] = {}
    for entry in entries:
        numbers = groups.setdefault(_NUMBER.sub(_HOLE, entry), [])
        numbers += [int(number) for number in _NUMBER.findall(entry)]
    return [
        template.replace(_HOLE, _ranges(numbers))
        for template, numbers in groups.items()
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
