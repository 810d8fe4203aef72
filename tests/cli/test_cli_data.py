"""The stream of batches: every token once an epoch, and on from any point."""

import dataclasses
import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from helpers.errors import facts

from fsdp_jax.cli._data import make_batches, position, with_batch
from fsdp_jax.cli._data_config import DataConfig
from fsdp_jax.cli._records import has_records, read_records
from fsdp_jax.cli._tokenizer import ModelTokenizer
from fsdp_jax.cli._tokens import Tokens, check_files, fingerprint, read_tokens
from fsdp_jax.data import HostShard

IDS = np.arange(50, dtype=np.uint32)  # 7 rows of 7 and 1; the first is predicted never
TOKENS = Tokens((IDS[:20], IDS[20:]))
CONFIG = DataConfig("bytes", batch=3, seq=7, seed=5)
ALONE = HostShard(0, 1)


class Watched:
    """Ids of which it is known how often some were read, and how many at once."""

    def __init__(self, ids):
        self.ids, self.sizes = ids, []

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, which: slice) -> np.ndarray:
        found = self.ids[which]
        self.sizes += [len(found)] if len(found) else []
        return found


def take(batches, count: int) -> np.ndarray:
    return np.concatenate([next(batches) for _ in range(count)])


def test_an_epoch_predicts_every_token_once():
    rows = take(make_batches(TOKENS, CONFIG, ALONE), 7)  # 21 rows: three epochs
    assert rows.shape == (21, 8)
    assert rows.dtype == np.int32
    for epoch in np.split(rows, 3):
        np.testing.assert_array_equal(np.sort(epoch[:, 1:], axis=None), range(1, 50))


def test_each_epoch_is_shuffled_anew():
    first, second, _ = np.split(take(make_batches(TOKENS, CONFIG, ALONE), 7), 3)
    assert (first != second).any()


def test_the_seed_makes_the_order():
    first, again, other = (
        take(make_batches(TOKENS, dataclasses.replace(CONFIG, seed=seed), ALONE), 2)
        for seed in (5, 5, 6)
    )
    assert (first == again).all()
    assert (first != other).any()


def test_hosts_read_the_rows_of_one_batch_between_them_and_each_its_own():
    whole = make_batches(TOKENS, CONFIG, ALONE)
    each = [Watched(IDS) for _ in range(3)]
    hosts = [
        make_batches(Tokens((seen,)), CONFIG, HostShard(index, 3))
        for index, seen in enumerate(each)
    ]
    for _ in range(5):  # into the third epoch
        np.testing.assert_array_equal(
            np.concatenate(list(map(next, hosts))), next(whole)
        )
        (state,) = {json.dumps(position(host)) for host in hosts}
    assert json.loads(state) == position(whole)
    for seen in each:  # of five batches and those read ahead, one row in three
        assert set(seen.sizes) == {8} and 5 <= len(seen.sizes) <= 11


@pytest.mark.parametrize("seen", [0, 1, 5])
def test_the_position_goes_through_json_and_back(seen):
    batches = make_batches(TOKENS, CONFIG, ALONE)
    for _ in range(seen):
        next(batches)
    stored = json.loads(json.dumps(position(batches)))
    again = make_batches(TOKENS, CONFIG, ALONE)
    again.set_state(stored)
    np.testing.assert_array_equal(take(again, 4), take(batches, 4))


def test_bytes_are_their_own_tokens_file_after_file(tmp_path):
    files = []
    for name, data in {"a": b"ab\xff", "b": b"c"}.items():
        (tmp_path / name).write_bytes(data)
        files.append(tmp_path / name)
    tokens = read_tokens(files, "bytes", None, vocab_size=256)
    assert tokens[:].tolist() == [97, 98, 255, 99]
    assert tokens[1:3].tolist() == [98, 255] and tokens[2:9].tolist() == [255, 99]
    assert fingerprint(tokens) == hashlib.sha256(b"ab\xffc").hexdigest()


@pytest.fixture
def tokenizer_file(tmp_path) -> Path:
    import tokenizers  # comes with transformers

    words = tokenizers.models.WordLevel({"?": 0, "to": 1, "be": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.mark.torch
def test_the_models_tokenizer_neither_cuts_nor_pads(tokenizer_file, tmp_path):
    (tmp_path / "text").write_text("to be or not to be")
    tokens = read_tokens([tmp_path / "text"], "model", tokenizer_file, vocab_size=3)
    assert tokens[:].tolist() == [1, 2, 0, 0, 1, 2]


@pytest.mark.torch
def test_a_token_without_an_embedding_is_refused(tokenizer_file, tmp_path):
    (tmp_path / "text").write_text("to be")
    with pytest.raises(ValueError, match=facts("tokenizer.json'", "2")):
        read_tokens([tmp_path / "text"], "model", tokenizer_file, vocab_size=2)


@pytest.mark.torch
def test_a_file_that_is_no_text_is_named(tokenizer_file, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(
        ValueError, match=facts("--data", "latin'", "0xe9", "--tokenizer")
    ):
        read_tokens([tmp_path / "latin"], "model", tokenizer_file, vocab_size=9)


def test_rows_go_on_where_they_were_in_batches_of_another_size():
    def batches(batch):
        config = dataclasses.replace(CONFIG, batch=batch)
        return make_batches(TOKENS, config, ALONE)

    ones = batches(1)
    rows = np.concatenate([next(ones) for _ in range(26)])
    seen, state, before = [], None, 4
    for batch in (4, 6, 3):  # None of them divides what was read before.
        stream = batches(batch)
        if state is not None:
            stream.set_state(json.loads(json.dumps(with_batch(state, before, batch))))
        seen += [next(stream), next(stream)]
        state, before = position(stream), batch
    np.testing.assert_array_equal(np.concatenate(seen), rows)
    assert with_batch(state, 3, 3) == state


@pytest.mark.torch
def test_a_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=facts("tokenizer.json'")):
        ModelTokenizer(tmp_path / "tokenizer.json")


def test_compressed_text_is_no_text_and_compressed_records_are_records(tmp_path):
    record = json.dumps({"text": "to be"}) + "\n"
    texts, records = ["text.txt.gz", "table.parquet.gz"], ["a.json.gz", "b.jsonl.gz"]
    for name in (*texts, *records):
        (tmp_path / name).write_bytes(gzip.compress(record.encode()))
    for name in texts:
        with pytest.raises(ValueError, match=facts("--data", f"{name}'", ".jsonl.gz")):
            check_files([tmp_path / name])
    for name in records:
        check_files([tmp_path / name])
        assert has_records(tmp_path / name)
        (found,) = read_records(tmp_path / name, None)
        assert found.text == "to be"
