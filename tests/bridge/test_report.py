"""Reports are short, and what they fold can be unfolded again."""

import itertools
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from bridge._report import fold_numbers, format_report

words = st.sampled_from(["layers", "mlp", "0", "1", "2", "7", "12", "w"])
paths = st.lists(words, min_size=1, max_size=5).map(".".join)


def unfold(line: str) -> list[str]:
    """All paths that a folded line stands for."""
    options = [
        unfold_numbers(part[1:-1]) if part.startswith("{") else [part]
        for part in re.split(r"(\{[^}]*\})", line)
    ]
    return ["".join(parts) for parts in itertools.product(*options)]


def unfold_numbers(runs: str) -> list[str]:
    ends = [[int(end) for end in run.split("-")] for run in runs.split(",")]
    return [str(n) for run in ends for n in range(run[0], run[-1] + 1)]


@settings(deadline=None, max_examples=300)
@given(st.lists(paths, max_size=12, unique=True))
def test_a_folded_report_stands_for_its_entries_and_no_others(entries):
    unfolded = [path for line in fold_numbers(entries) for path in unfold(line)]
    assert sorted(unfolded) == sorted(entries)


def test_layers_are_folded_whatever_number_follows():
    entries = [f"layers.{i}.mlp.0.w" for i in range(80)]
    assert fold_numbers(entries) == ["layers.{0-79}.mlp.0.w"]


def test_a_number_at_the_end_or_alone_is_a_name():
    entries = ["norm.1", "norm.2", "1", "2"]
    assert fold_numbers(entries) == entries


def test_headings_without_entries_are_left_out():
    report = {"missing": [], "unexpected": ["h.0.w", "h.1.w"]}
    assert format_report(report) == "  unexpected (2):\n    h.{0-1}.w"
    assert format_report({"missing": []}) == ""
