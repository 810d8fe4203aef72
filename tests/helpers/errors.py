"""What a test reads in an error: the names and numbers, not the sentence."""

import re

_QUOTED = re.compile(r"(?<!\w)(['\"`]).*?\1")
_PLAIN_WORD = r"(?<![\w.'`/=-])(?!None|True|False)[A-Za-z][a-z]*(?![\w'`/=(-])"
_PROSE = re.compile(rf"{_PLAIN_WORD}\s+{_PLAIN_WORD}")


def facts(*wanted: object) -> str:
    """Pattern for `match=` that finds messages with all of `wanted`, in any order.

    A fact is what stays when a sentence is rewritten: a name, a number, a shape, an
    option, a path, a quoted value. Each is searched for literally and as a whole: "2"
    is not in "12" or "2.5", and "params.w" is not in "params.weight".

    Args:
        wanted: Facts of the message, at least one; `str` of each is searched for.

    Returns:
        A regular expression for `re.search`.

    Raises:
        ValueError: There is no fact, or one of them is prose: outside of quotes it has
            two plain words side by side.
    """
    if not wanted:
        raise ValueError("facts() takes 1 fact or more, got 0")
    texts = [str(fact) for fact in wanted]
    if prose := [text for text in texts if not text.strip() or is_prose(text)]:
        raise ValueError(
            f"These facts are prose, which may be rewritten: {prose}. Give the names "
            "and numbers of the message, each as a fact of its own."
        )
    return r"(?s)\A" + "".join(f"(?=.*{_whole(text)})" for text in texts)


def is_prose(fact: str) -> bool:
    """Whether two plain words stand side by side outside of quotes."""
    return _PROSE.search(_QUOTED.sub("''", fact)) is not None


def _whole(fact: str) -> str:
    """Pattern of the fact where it is no part of a longer name or number."""
    before = r"(?<!\w)" if re.match(r"\w", fact) else ""
    after = r"(?!\w)" if re.search(r"\w$", fact) else ""
    if re.match(r"\d", fact):
        before += r"(?<!\d[.,])(?<!\W-)"
    if re.search(r"\d$", fact):
        after += r"(?![.,]\d)"
    return before + re.escape(fact) + after
