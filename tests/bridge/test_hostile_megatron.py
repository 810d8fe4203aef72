"""Megatron checkpoints from strangers: nothing runs, and damage is one clear error."""

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from exploits import Touch, archive
from helpers.errors import facts

from bridge.formats._pickle_writer import Call, Name, Object, Pairs, encode_pickle
from bridge.megatron import open_megatron
from bridge.megatron.read._dcp import open_dcp
from bridge.megatron.write._dcp import DcpWriter

DCP = "torch.distributed.checkpoint"
VALUES = np.arange(24, dtype=np.float32).reshape(6, 4)


def read_all(path: Path) -> dict[str, bytes]:
    found = open_megatron(path)
    sources = [found.source]
    if found.optimizer is not None:
        sources += [found.optimizer.exp_avg, found.optimizer.exp_avg_sq]
    return {s.name + key: s.read(key).tobytes() for s in sources for key in s.keys()}


@pytest.fixture(params=["qwen3/torch_dist", "qwen3_mcore_head/torch_dist"])
def torch_dist(request, golden, tmp_path) -> Path:
    name, kind = request.param.split("/")
    shutil.copytree(golden(name) / kind, tmp_path / "run")
    return tmp_path / "run/iter_0000007"


def test_an_exploit_in_metadata_is_not_run(torch_dist, tmp_path):
    program = pickle.dumps({"a": Touch(tmp_path / "sentinel")})
    (torch_dist / ".metadata").write_bytes(program)
    with pytest.raises(ValueError, match=facts(".metadata", "'posix.mkdir'")):
        open_megatron(torch_dist)
    assert not (tmp_path / "sentinel").exists()
    pickle.loads(program)  # the exploit is real
    assert (tmp_path / "sentinel").exists()


def test_an_exploit_in_the_common_state_is_not_run(torch_dist, tmp_path):
    """Of old versions, a file of its own; of new ones, an item among the tensors."""
    program = pickle.dumps([{"args": Touch(tmp_path / "sentinel")}])
    if (torch_dist / "common.pt").exists():
        (torch_dist / "common.pt").write_bytes(archive(program))
    else:
        place = open_dcp(torch_dist).items["common_state/shard_0_1"].args[2]
        with (torch_dist / place.file).open("r+b") as stream:
            stream.seek(place.offset)
            stream.write(archive(program, place.nbytes))
    with pytest.raises(ValueError, match=facts("'posix.mkdir'")):
        open_megatron(torch_dist)
    assert not (tmp_path / "sentinel").exists()


def test_an_exploit_in_a_chunk_is_not_run(torch_dist, tmp_path):
    tensor = open_dcp(torch_dist).tensors["decoder.final_layernorm.weight"]
    archive_of = tensor.tiles[0].part.open
    file, offset, nbytes = archive_of.args
    program = pickle.dumps(Touch(tmp_path / "sentinel"))
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(archive(program, nbytes))
    source = open_megatron(torch_dist).source
    with pytest.raises(ValueError, match=facts(".distcp", "'posix.mkdir'")):
        source.read("decoder.final_layernorm.weight")
    assert not (tmp_path / "sentinel").exists()


def test_a_flipped_bit_is_an_error_or_changes_nothing(torch_dist):
    before = read_all(torch_dist)
    random, caught = np.random.default_rng(0), 0
    files = sorted(torch_dist.glob("*.distcp"))
    for file in random.choice(np.array(files, object), 16):
        data = file.read_bytes()
        flipped = bytearray(data)
        flipped[random.integers(len(data))] ^= 1 << int(random.integers(8))
        file.write_bytes(flipped)
        try:
            assert read_all(torch_dist) == before  # padding, or not of the model
        except ValueError:
            caught += 1
        file.write_bytes(data)
    assert caught > 2


def test_a_flipped_bit_of_a_weight_is_caught_by_its_checksum(torch_dist):
    source = open_megatron(torch_dist).source
    rows = source.read("embedding.word_embeddings.weight", (slice(0, 192),)).tobytes()
    (file,) = [f for f in torch_dist.glob("*.distcp") if rows in f.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(rows) + 1000] ^= 4
    file.write_bytes(data)
    with pytest.raises(ValueError, match=facts("'archive/data/0'", "checksum")):
        read_all(torch_dist)


def test_a_file_cut_short_is_found_at_once(torch_dist):
    file = torch_dist / "__2_0.distcp"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(ValueError, match=facts("'__2_0.distcp'")):
        open_megatron(torch_dist)


def test_a_missing_file_is_named(torch_dist):
    (torch_dist / "__1_0.distcp").unlink()
    with pytest.raises(ValueError, match=facts("'__1_0.distcp'")):
        open_megatron(torch_dist)


# Metadata by hand


def size(*values: int) -> Call:
    return Call(Name("torch.Size"), (values,))


def write_metadata(directory: Path, file="__0_0.distcp", **changed) -> None:
    """Metadata of one tensor of shape (6, 4) in two chunks, changed in one place."""
    key = changed.get("key", "w")
    properties = (
        Name(changed.get("dtype", "torch.float32")),
        Call(Name("torch.serialization._get_layout"), ("torch.strided",)),
        False,
        Call(Name(f"{DCP}.metadata._MEM_FORMAT_ENCODING"), (0,)),
        False,
    )
    boxes = changed.get("boxes", [((0, 0), (3, 4)), ((3, 0), (3, 4))])
    chunks = [
        Object(
            Name(f"{DCP}.metadata.ChunkStorageMetadata"),
            {"offsets": size(*offsets), "sizes": size(*sizes)},
        )
        for offsets, sizes in boxes
    ]
    entry = {
        "properties": Object(Name(f"{DCP}.metadata.TensorProperties"), properties),
        "size": size(*changed.get("shape", (6, 4))),
        "chunks": chunks,
    }
    places = [
        (
            Object(
                Name(f"{DCP}.metadata.MetadataIndex"),
                {"fqn": key, "offset": size(row, 0), "index": None},
            ),
            Object(
                Name(f"{DCP}.filesystem._StorageInfo"),
                {
                    "relative_path": file,
                    "offset": changed.get("offset", 0),
                    "length": changed.get("length", 1000),
                    "transform_descriptors": changed.get("transforms"),
                },
            ),
        )
        for row in changed.get("rows", (0, 3))
    ]
    state = {
        "state_dict_metadata": {
            key: Object(Name(f"{DCP}.metadata.TensorStorageMetadata"), entry)
        },
        "storage_data": Pairs(tuple(places)),
    }
    metadata = Object(Name(changed.get("kind", f"{DCP}.metadata.Metadata")), state)
    (directory / ".metadata").write_bytes(encode_pickle(metadata))


@pytest.fixture
def directory(tmp_path) -> Path:
    (tmp_path / "__0_0.distcp").write_bytes(bytes(1000))
    return tmp_path


MCORE = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"


@pytest.mark.parametrize("kind", [f"{DCP}.metadata.Metadata", MCORE])
def test_metadata_made_by_hand_is_read(directory, kind):
    write_metadata(directory, kind=kind)
    assert open_megatron(directory).source.shape("w") == (6, 4)


WRONG = {
    "leaves the directory": ({"file": "../secret"}, ["'../secret'"]),
    "absolute": ({"file": "/etc/passwd"}, ["'/etc/passwd'"]),
    "absent": ({"file": "__9_9.distcp"}, ["'__9_9.distcp'"]),
    "past the end": ({"offset": 500}, ["w", "500", "1,500", "'__0_0.distcp'", "1,000"]),
    "before the start": ({"offset": -10}, ["w", "-10", "990"]),
    "of no bytes": ({"length": 0}, ["w", "0", "48"]),
    "compressed": ({"transforms": ["zstd"]}, ["w", "['zstd']"]),
    "a gap": (
        {"boxes": [((0, 0), (3, 4)), ((4, 0), (2, 4))], "rows": (0, 4)},
        ["w", "[(0, 3), (4, 6)]", "[0:6, 0:4]"],
    ),
    "an overlap": (
        {"boxes": [((0, 0), (4, 4)), ((3, 0), (3, 4))]},
        ["w", "2", "[0:6, 0:4]", "(4, 4), (3, 4)"],
    ),
    "outside": (
        {"boxes": [((0, 0), (3, 4)), ((3, 0), (4, 4))]},
        ["w", "[(0, 3), (3, 7)]", "[0:6, 0:4]"],
    ),
    "missing": ({"boxes": [((0, 0), (3, 4))]}, ["w", "[(0, 3)]", "[0:6, 0:4]"]),
    "nowhere": (
        {"rows": (0,)},
        ["w", "Range(start=3, stop=6), Range(start=0, stop=4)"],
    ),
    "of other dims": ({"shape": (6, 4, 1)}, ["(6, 4, 1)"]),
    "of negative size": ({"shape": (-6, 4)}, ["-6"]),
    "larger than its place": ({"length": 40}, ["48", "40"]),
    "absurdly large": (
        {"shape": (2**62, 4), "boxes": [((0, 0), (2**62, 4))]},
        ["73,786,976,294,838,206,464", "1,000"],
    ),
    "of no dtype": ({"dtype": "torch.Size"}, ["dtype ()"]),
    "of a secret dtype": ({"dtype": "os.system"}, ["'os.system'"]),
    "a file of no name": ({"file": 3}, ["3"]),
}


@pytest.mark.parametrize("changed, match", WRONG.values(), ids=WRONG)
def test_metadata_that_lies_is_refused_at_once(directory, changed, match):
    write_metadata(directory, **changed)
    with pytest.raises(ValueError, match=facts(*match)) as error:
        open_megatron(directory)
    assert ".metadata" in str(error.value)


STACKED = "decoder.layers.mlp.linear_fc2.weight"


def test_an_endless_stack_of_empty_layers_is_refused(directory):
    write_metadata(directory, key=STACKED, shape=(2**40, 0), boxes=[], rows=())
    with pytest.raises(
        ValueError,
        match=facts("'decoder.layers.mlp.linear_fc2.weight'", "(1099511627776, 0)"),
    ):
        open_megatron(directory)


@pytest.mark.parametrize("shape", [(), (2**17,)])
def test_what_no_model_stacks_is_refused(tmp_path, shape):
    with DcpWriter(tmp_path) as writer:
        writer.add(STACKED, (0,) * len(shape), np.zeros(shape, np.uint8))
        writer.finish()
    with pytest.raises(
        ValueError, match=facts("'decoder.layers.mlp.linear_fc2.weight'", str(shape))
    ):
        open_megatron(tmp_path)


def test_all_that_is_wrong_is_listed(directory):
    write_metadata(directory, file="../a", transforms=["zstd"], boxes=[])
    with pytest.raises(ValueError) as error:
        open_megatron(directory)
    for part in ("outside", "compressed", "do not fill"):
        assert part in str(error.value)


def test_a_chunk_of_another_shape_than_said_is_refused(tmp_path):
    with DcpWriter(tmp_path) as writer:
        writer.add("w", (0, 0), VALUES.reshape(4, 6))
        writer.finish()
    write_metadata(
        tmp_path,
        boxes=[((0, 0), (6, 4))],
        rows=(0,),
        length=os.path.getsize(tmp_path / "__0_0.distcp"),
    )
    with pytest.raises(ValueError, match=facts("float32", "(6, 4)", "'w'", "(4, 6)")):
        open_megatron(tmp_path).source.read("w")


@pytest.mark.parametrize("value", [3, [], {"a": 1}, None])
def test_metadata_of_another_kind_is_refused(tmp_path, value):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(ValueError, match=facts(".metadata", type(value).__name__)):
        open_megatron(tmp_path)


@pytest.mark.parametrize("value", [[1], {"args": [1]}, {"opt_param_scheduler": "x"}])
def test_common_state_of_another_kind_is_refused(golden, tmp_path, value):
    shutil.copytree(golden("qwen3") / "torch_dist/iter_0000007", tmp_path / "x")
    program = pickle.dumps(value)
    (tmp_path / "x/common.pt").write_bytes(archive(program))
    with pytest.raises(ValueError, match=facts("x'", "dict")):
        open_megatron(tmp_path / "x")
