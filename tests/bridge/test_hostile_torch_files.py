"""Torch files from strangers: nothing in them runs, and damage is one clear error."""

import builtins
import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers.errors import facts
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.formats._torch_zip import open_torch_file, read_torch_file
from bridge.formats._unpickle import Stub, unpickle
from bridge.formats._zip import StoredZip


class Call:
    """Pickled, it is a call that unpickling would make."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def write_archive(file: Path, program: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        for name, data in members.items():
            archive.writestr(f"archive/{name}", data)
    return file


EXPLOITS = {
    "a shell": lambda path: Call(os.system, f"touch {path}"),
    "a file opened": lambda path: Call(open, str(path), "w"),
    "eval": lambda path: Call(eval, f"open({str(path)!r}, 'w')"),
    "getattr": lambda path: Call(getattr, Path(path), "touch"),
    "in a state": lambda path: {"model": [Call(os.mkdir, str(path))]},
    "as a key": lambda path: {(Call(os.mkdir, str(path)),): 1},
}
ASKED_FOR = {
    "a shell": "system'",
    "a file opened": "open'",
    "eval": "eval'",
    "getattr": "getattr'",
    "in a state": "mkdir'",
    "as a key": "mkdir'",
}


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("exploit", EXPLOITS)
def test_nothing_that_a_pickle_asks_for_is_run(tmp_path, exploit, protocol):
    sentinel = tmp_path / "sentinel"
    program = pickle.dumps(EXPLOITS[exploit](sentinel), protocol)
    with pytest.raises(ValueError, match=facts(ASKED_FOR[exploit])):
        read_torch_file(write_archive(tmp_path / "w.pt", program))
    assert not sentinel.exists()


def test_the_exploits_are_real(tmp_path):
    for number, exploit in enumerate(EXPLOITS.values()):
        program = pickle.dumps(exploit(tmp_path / str(number)))
        value = pickle.loads(program)
        if isinstance(value, io.IOBase):
            value.close()
        if callable(value):
            value()
        assert (tmp_path / str(number)).exists()


def test_a_class_of_megatron_is_inert():
    program = b"\x80\x02cmegatron.core.enums\nModelType\nK\x01\x85R}b."
    stub = unpickle(program, "it", {})
    assert isinstance(stub, Stub)
    assert (stub.name, stub.args, stub.state) == (
        "megatron.core.enums.ModelType",
        (1,),
        {},
    )


NAMESPACE = b"cargparse\nNamespace\n"
PROGRAMS = {
    "a memo of 34 GB": (b"\x80\x02Nr\xff\xff\xff\x7f.", ["2,147,483,647"]),
    "attributes of a class": (
        b"\x80\x02" + NAMESPACE + b"N}X\4\0\0\0nameX\1\0\0\0xs\x86b.",
        ["Stub.__setstate__()", "'state'"],
    ),
    "state of a class": (
        b"\x80\x02" + NAMESPACE + b"}b.",
        ["Stub.__setstate__()", "'state'"],
    ),
    "state of a list": (b"\x80\x02]}b.", ["'list'", "'__dict__'"]),
    "a class by number": (b"\x80\x02\x82\x01.", ["EXT1"]),
    "a class of Python 2": (b"\x80\x02(ios\nsystem\n.", ["INST"]),
    "no stop": (b"\x80\x02N", ["STOP"]),
    "two stops": (b"\x80\x02N.N.", ["2 bytes"]),
    "an unknown opcode": (b"\x80\x02\xff.", ["0xff"]),
    "a string longer than all": (b"\x80\x02X\xff\xff\xff\x7fab.", ["STOP"]),
    "a name without end": (b"\x80\x02cargparse\n.", ["name"]),
    "an empty stack": (b"\x80\x020.", ["stack"]),
    "a list in itself": (b"\x80\x02]q\x00h\x00a.", ["list", "itself"]),
    "nested too deep": (
        b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".",
        ["recursion"],
    ),
    "nothing": (b"", ["STOP"]),
}


@pytest.mark.parametrize("program, match", PROGRAMS.values(), ids=PROGRAMS)
def test_a_broken_pickle_is_one_clear_error(tmp_path, program, match):
    file = write_archive(tmp_path / "w.pt", program)
    with pytest.raises(ValueError, match=facts(*match)) as error:
        read_torch_file(file)
    assert str(file) in str(error.value)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_a_value_error(tail):
    try:
        unpickle(b"\x80\x02" + NAMESPACE + tail + b".", "it", {})
    except ValueError as error:
        assert "it " in str(error)


def test_the_stubs_of_one_pickle_do_not_reach_the_next():
    # BUILD on a class with a pair sets attributes: of an ordinary class, for ever.
    before = set(vars(Stub))
    program = PROGRAMS["attributes of a class"][0]
    with pytest.raises(ValueError):
        unpickle(program, "it", {})
    assert set(vars(Stub)) == before


def tensor_program(
    numel=b"K\x04", offset=b"K\x00", shape=b"K\x04\x85", strides=b"K\x01\x85"
) -> bytes:
    """One float32 tensor of storage 0, with four elements, as torch pickles it."""
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpu"
    return (
        b"\x80\x02}X\1\0\0\0wctorch._utils\n_rebuild_tensor_v2\n("
        + (storage + numel + b"tQ" + offset + shape + strides)
        + b"\x89ccollections\nOrderedDict\n)RtRs."
    )


def write_tensor(file: Path, data: bytes = bytes(16), **fields: bytes) -> Path:
    return write_archive(file, tensor_program(**fields), **{"data/0": data})


def test_a_tensor_made_by_hand_is_read(tmp_path):
    data = np.arange(4, dtype=np.float32)
    source = open_torch_file(write_tensor(tmp_path / "w.pt", data.tobytes()))
    np.testing.assert_array_equal(source.read("w"), data)
    square = {"shape": b"K\x02K\x02\x86", "strides": b"K\x01K\x02\x86"}
    source = open_torch_file(write_tensor(tmp_path / "v.pt", data.tobytes(), **square))
    np.testing.assert_array_equal(source.read("w"), data.reshape(2, 2).T)


MINUS_ONE = b"J\xff\xff\xff\xff"
FIELDS = {
    "storage larger than its member": ({"numel": b"K\x05"}, ["'0'", "20", "16"]),
    "storage of negative size": ({"numel": MINUS_ONE}, ["'0'", "-4", "16"]),
    "offset past the end": (
        {"offset": b"K\x01"},
        ["(4,)", "20", "'archive/data/0'", "16"],
    ),
    "negative offset": ({"offset": MINUS_ONE}, ["(-1, 4, 1)"]),
    "shape past the end": (
        {"shape": b"K\x05\x85"},
        ["(5,)", "20", "'archive/data/0'", "16"],
    ),
    "negative shape": ({"shape": MINUS_ONE + b"\x85"}, ["(0, -1, 1)"]),
    "strides past the end": (
        {"strides": b"K\x02\x85"},
        ["(4,)", "28", "'archive/data/0'", "16"],
    ),
    "negative strides": ({"strides": MINUS_ONE + b"\x85"}, ["(0, 4, -1)"]),
    "more strides than dims": ({"strides": b"K\x01K\x01\x86"}, ["(0, 4, 1, 1)"]),
    "boolean shape": ({"shape": b"\x88\x85"}, ["(0, True, 1)"]),
    "overflow": (
        {"shape": b"\x8a\x0a" + b"\xff" * 9 + b"\x7f\x85"},
        ["(604462909807314587353087,)", "16"],
    ),
}


@pytest.mark.parametrize("fields, match", FIELDS.values(), ids=FIELDS)
def test_a_tensor_outside_of_its_storage_is_refused(tmp_path, fields, match):
    with pytest.raises(ValueError, match=facts(*match)):
        open_torch_file(write_tensor(tmp_path / "w.pt", **fields))


def test_a_pickle_cannot_share_its_way_to_endless_names(tmp_path):
    # Sixty lists, each of them twice in the next.
    doubled = b"\x80\x02]" + b"".join(
        b"q" + bytes([n]) + b"0](h" + bytes([n]) + b"h" + bytes([n]) + b"e"
        for n in range(60)
    )
    file = write_archive(tmp_path / "w.pt", doubled + b".")
    with pytest.raises(ValueError, match=facts("1,048,576")):
        open_torch_file(file)


def test_a_missing_storage_is_named(tmp_path):
    file = write_archive(tmp_path / "w.pt", tensor_program())
    with pytest.raises(ValueError, match=facts("'archive/data/0'")):
        open_torch_file(file)


def test_a_scripted_module_is_refused_with_advice(tmp_path):
    file = write_archive(tmp_path / "w.pt", b"N.", **{"constants.pkl": b"N."})
    with pytest.raises(
        ValueError, match=facts("TorchScript", "torch.jit.load", "state_dict()")
    ):
        read_torch_file(file)


def test_big_endian_files_are_refused(tmp_path):
    file = write_archive(tmp_path / "w.pt", b"N.", byteorder=b"big")
    with pytest.raises(ValueError, match=facts("b'big'")):
        read_torch_file(file)


# The archive


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a\\..\\b"])
def test_a_member_that_would_leave_is_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"x")
    with pytest.raises(ValueError, match=facts(repr(name))):
        read_torch_file(tmp_path / "w.pt")


def test_all_members_of_no_use_are_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr("a/../b", b"x")
        archive.writestr("c", b"x" * 100, zipfile.ZIP_DEFLATED)
        archive.writestr("d", b"x")
        with pytest.warns(UserWarning, match=facts("'d'")):
            archive.writestr("d", b"y")
    with pytest.raises(ValueError) as error:
        StoredZip(tmp_path / "w.pt")
    for part in ("'a/../b': a path", "'c': compressed", "'d': named twice"):
        assert part in str(error.value)


def test_members_that_lie_over_each_other_are_refused(tmp_path):
    file = write_archive(tmp_path / "w.pt", b"N.", a=b"x" * 100)
    data = bytearray(file.read_bytes())
    entry = data.rindex(b"PK\x01\x02")  # the directory's last: make it the first
    data[entry + 42 : entry + 46] = bytes(4)
    file.write_bytes(data)
    with pytest.raises(ValueError, match=facts("'archive/data.pkl'", "'archive/a'")):
        StoredZip(file)


def test_a_member_cut_short_is_refused(tmp_path):
    file = write_archive(tmp_path / "w.pt", b"N.", a=b"x" * 100)
    data = bytearray(file.read_bytes())
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 20 : entry + 28] = (10**6).to_bytes(4, "little") * 2
    file.write_bytes(data)
    with pytest.raises(ValueError, match=facts("'archive/a'")):
        StoredZip(file)


def test_a_range_beyond_the_file_is_refused(tmp_path):
    file = write_archive(tmp_path / "w.pt", b"N.")
    for offset, nbytes in ((10**9, 5), (0, 10**9), (-1, 5), (0, -1)):
        with pytest.raises(
            ValueError, match=facts("132", f"{offset:,}", f"{offset + nbytes:,}")
        ):
            StoredZip(file, offset, nbytes)


@pytest.fixture
def legacy(golden, tmp_path) -> Path:
    """One rank of a checkpoint that Megatron wrote."""
    run = golden("qwen3") / "legacy/iter_0000007/mp_rank_01_001"
    return Path(shutil.copy(run / "model_optim_rng.pt", tmp_path))


def read_all(file: Path) -> dict[str, bytes]:
    source = open_torch_file(file)
    return {key: source.read(key).tobytes() for key in source.keys()}


def test_a_flipped_bit_is_an_error_or_changes_nothing(legacy):
    before, data = read_all(legacy), legacy.read_bytes()
    caught = 0
    for position in np.random.default_rng(0).integers(0, len(data), 40):
        flipped = bytearray(data)
        flipped[position] ^= 1 << int(position) % 8
        legacy.write_bytes(flipped)
        try:
            assert read_all(legacy) == before  # padding, or a field nobody needs
        except ValueError:
            caught += 1
    assert caught > 30


@pytest.mark.parametrize("part", range(1, 10))
def test_a_file_cut_short_is_one_error(legacy, part):
    os.truncate(legacy, legacy.stat().st_size * part // 10)
    with pytest.raises(ValueError, match=facts("model_optim_rng.pt", "zip")):
        open_torch_file(legacy)


def test_a_file_cut_short_after_opening_is_noticed(legacy):
    source = open_torch_file(legacy)
    os.truncate(legacy, 1000)
    with pytest.raises(ValueError, match=facts("model_optim_rng.pt", "58,880")):
        source.read("model.output_layer.weight")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\x93NUMPY"])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(ValueError, match=facts("torch.save", repr(content[:4]))):
        open_torch_file(tmp_path / "w.pt")


def test_a_path_without_a_file_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=facts(repr(str(tmp_path)))):
        open_torch_file(tmp_path)


def test_unpickling_imports_nothing(legacy, monkeypatch):
    def refuse(name, *args, **kwargs):
        raise AssertionError(f"imports {name}")

    program = StoredZip(legacy).read("model_optim_rng/data.pkl").tobytes()
    calls = {"a persistent id": lambda stub: stub}
    monkeypatch.setattr(builtins, "__import__", refuse)
    try:
        tree = unpickle(program, "it", calls)
    finally:
        monkeypatch.undo()
    assert tree["args"].name == "argparse.Namespace"
