"""Keys and messages of small pickles that grow as they are hashed or written."""

import pickle
import subprocess
import sys
import zipfile

import pytest
from helpers.errors import facts

from bridge.formats._torch_tensors import PLAIN_RULES
from bridge.formats._torch_zip import read_torch_file
from bridge.formats._unpickle import unpickle

NUM_DOUBLINGS = 20
ONE = b"K\x01"
DOUBLED = b")" + b"2\x86" * NUM_DOUBLINGS
"""An empty tuple, and twenty tuples with the one before twice."""

SIZE = b"ctorch\nSize\n"
# Stubs whose shapes contain the shape before twice: small before they are interpreted.
SHAPES = (
    SIZE + b")\x85R" + (b"q\x00\x30" + SIZE + b"h\x00h\x00\x86\x85R") * NUM_DOUBLINGS
)
KEYS = {
    "of a dict": b"}" + DOUBLED + ONE + b"s",
    "of a dict with a mark": b"}(" + DOUBLED + ONE + b"u",
    "of a dict made at once": b"(" + DOUBLED + ONE + b"d",
    "second of a dict": b"}(" + ONE + ONE + DOUBLED + ONE + b"u",
    "of a memo": b"}" + DOUBLED + b"q\x000h\x00" + ONE + b"s",
    "of a memo without an index": b"}" + DOUBLED + b"\x940h\x00" + ONE + b"s",
    "of a tuple with a mark": b"}((" + DOUBLED + b"tt" + ONE + b"s",
    "in a set": b"\x8f(" + DOUBLED + b"\x90",
    "in a frozenset": b"(" + DOUBLED + b"\x91",
    "in a frozenset under marks": b"(((10" + DOUBLED + b"\x91",
    "of a stub": b"cargparse\nNamespace\n)R" + DOUBLED + ONE + b"s",
    "of a dict once interpreted": b"}" + SHAPES + ONE + b"s",
    "in a set once interpreted": b"\x8f(" + SHAPES + b"\x90",
    "of a list of pairs": (
        b"ccollections\nOrderedDict\n](" + DOUBLED + ONE + b"\x86e\x85R"
    ),
    "of a state of pairs": (b"cargparse\nNamespace\n)R](" + DOUBLED + ONE + b"\x86eb"),
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_key_that_doubles_with_each_tuple_is_refused(key):
    with pytest.raises(ValueError, match=facts("1,000")):
        unpickle(b"\x80\x02" + key + b".", "it", PLAIN_RULES)


NESTED = r"""
from bridge.formats._unpickle import unpickle
try:
    unpickle(b"\x80\x02})" + b"\x85" * 2_000_000 + b"K\x01s.", "it", {})
except ValueError as error:
    print(error)
"""


def test_a_key_of_two_million_nested_tuples_does_not_end_the_process():
    done = subprocess.run(
        [sys.executable, "-c", NESTED], capture_output=True, text=True, timeout=60
    )
    assert "1,000 values" in done.stdout, done


def test_a_key_that_holds_a_dict_of_tuples_is_refused():
    program = b"\x80\x02}" + SIZE + b"]]a\x85R" + ONE + b"s."
    with pytest.raises(ValueError, match=facts("list")):
        unpickle(program, "it", PLAIN_RULES)


KEPT = {
    "flat": {("a", 1, None): 2, 3: {"b": 4}, b"c": 1.5},
    "nested": {((1, (2, "x")), ()): [(1, 2), {(): 3}]},
    "of a thousand values": {tuple(range(999)): 1},
    "a large tuple that is no key": {"a": tuple((n, n) for n in range(5000))},
    "shared": {"a": [("b",)] * 2000},
}


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("tree", KEPT.values(), ids=KEPT)
def test_keys_of_ordinary_pickles_are_read(tree, protocol):
    assert unpickle(pickle.dumps(tree, protocol), "it", PLAIN_RULES) == tree


def test_members_of_sets_are_read():
    tree = {"a": {"b", (1, 2)}, "c": frozenset({1.5, frozenset({(1, 2)})})}
    assert unpickle(pickle.dumps(tree, 4), "it", PLAIN_RULES) == tree


def test_a_message_about_shared_tuples_is_short(tmp_path):
    storage = b"(X\1\0\0\0xctorch\nFloatStorage\n" + DOUBLED + b"X\0\0\0\0K\1tQ"
    file = tmp_path / "w.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\2" + storage + b".")
    with pytest.raises(ValueError, match=facts("torch.FloatStorage")) as error:
        read_torch_file(file)
    assert len(str(error.value)) < 2000
