"""Chat data and completions: what is trained, in which rows, and what is left out."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.errors import facts
from helpers.tiny_tokenizer import write_tokenizer

import fsdp_jax as fsdp
from fsdp_jax.cli import main
from fsdp_jax.cli._chat_template import ChatTemplate, read_chat_template
from fsdp_jax.cli._data import mixed_batches, position
from fsdp_jax.cli._data_config import DataConfig
from fsdp_jax.cli._document_data import (
    Encoder,
    _read_in_first,
    parse_weights,
    read_documents,
)
from fsdp_jax.cli._records import _record, read_records
from fsdp_jax.cli._tokenizer import Bytes, ModelTokenizer
from fsdp_jax.data import HostShard

pytestmark = pytest.mark.torch  # transformers renders templates.

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<eos>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2, surely."},
]
SPECIALS = ["<bos>", "<eos>", "<user>", "<assistant>"]
# Two meshes and layouts add up the same float32 numbers in different orders.
ANOTHER_MESH = 1e-5


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory, write_llama) -> Path:
    """A model with a tokenizer of bytes and four special tokens."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    write_llama(folder, vocab_size=264, eos_token_id=257)
    tokens = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}
    write_tokenizer(folder, SPECIALS, **tokens)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """Sixteen conversations of one to three questions."""
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    lines = []
    for number in range(16):
        messages = []
        for turn in range(1 + number % 3):
            messages += [
                {"role": "user", "content": f"{number} + {turn}?"},
                {"role": "assistant", "content": f"{number + turn}"},
            ]
        lines.append(json.dumps({"messages": messages}))
    file.write_text("\n".join(lines))
    return file


def encoder(model: Path) -> Encoder:
    return Encoder(ModelTokenizer(model / "tokenizer.json"), model, 257, 264)


def write(folder: Path, *records: dict) -> Path:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.mark.parametrize("source", [TEMPLATE, MARKED], ids=["prefixes", "marked"])
def test_spans_are_what_the_assistant_writes(source):
    text, spans = ChatTemplate(source, {"bos_token": "<bos>"}).render(CHAT)
    assert [text[slice(*span)].strip() for span in spans] == [
        "1.<eos>",
        "2, surely.<eos>",
    ]


def test_the_ids_and_the_mask_are_those_of_transformers(chat_model, tmp_path):
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(chat_model / "tokenizer.json")
    )
    theirs = tokenizer.apply_chat_template(
        CHAT, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    record = read_records(
        write(tmp_path, {"messages": CHAT}), ChatTemplate(MARKED, {})
    )[0]
    ids, trained = encoder(chat_model).encode(record, "completions")
    assert ids == theirs["input_ids"]
    assert trained == [bool(flag) for flag in theirs["assistant_masks"]]


def test_a_template_that_rewrites_earlier_messages_is_refused():
    last = "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }}"
    with pytest.raises(ValueError, match=facts("2", "{% generation %}")):
        ChatTemplate(last + "{% endfor %}", {}).render(CHAT)


def test_the_template_of_a_checkpoint_is_its_own(chat_model, tmp_path):
    template = read_chat_template(chat_model)
    assert template == ChatTemplate(
        TEMPLATE, {"bos_token": "<bos>", "eos_token": "<eos>"}
    )
    named = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": named})
    )
    found = read_chat_template(tmp_path)
    assert found is not None and found.source == "b"
    assert read_chat_template(tmp_path / "none") is None


def test_only_completions_are_trained_and_the_end_of_the_text(chat_model, tmp_path):
    file = write(tmp_path, {"prompt": "é? ", "completion": "yes é"})
    (record,) = read_records(file, None)
    ids, trained = encoder(chat_model).encode(record, "completions")
    assert ids[-1] == 257
    assert sum(trained) == len("yes é".encode()) + 1
    assert trained == sorted(trained)
    _, everything = encoder(chat_model).encode(record, "all")
    assert all(everything)


def test_completions_in_messages_leave_out_the_answers_of_the_prompt(chat_model):
    template = read_chat_template(chat_model)
    assert template is not None
    text, _ = template.render(CHAT)
    record = _record({"prompt": CHAT[:3], "completion": CHAT[3:]}, template)
    assert record.text == text
    assert [text[slice(*span)].strip() for span in record.spans] == ["2, surely.<eos>"]


@pytest.mark.parametrize("field", ["text", "messages"])
def test_documents_that_are_all_empty_are_not_taken_for_long_ones(
    chat_model, tmp_path, field
):
    (tmp_path / "chat_template.jinja").write_text("")
    shutil.copy(chat_model / "tokenizer.json", tmp_path)
    file = write(tmp_path, {"text": ""} if field == "text" else {"messages": CHAT})
    config = DataConfig("model", batch=1, seq=8)
    with pytest.raises(ValueError, match=facts(f"'{file}'")) as said:
        encoder(tmp_path).encode_file(file, config)
    assert "empty" in str(said.value) and "--seq" not in str(said.value)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_that_is_not_read_is_not_replaced_in_silence(
    llama, chats, tmp_path, name, capsys
):
    shutil.copytree(llama, tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(b"x")
    argv = ["data", str(tmp_path / "model"), "--data", str(chats), "--seq", "64"]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert name in said and "save_pretrained" in said and "--tokenizer bytes" in said
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert main([*argv, "--tokenizer", "bytes", "--train-on", "all"]) == 0
    assert "(--tokenizer bytes)" in capsys.readouterr().out
    # A run that was trained so goes on so, though it carries the file.
    more = ["--tokenizer", "bytes", "--train-on", "all", "--steps", "1"]
    train = ["train", "--hf", str(tmp_path / "model"), *argv[2:], *more]
    assert main([*train, "--save", str(tmp_path / "run")]) == 0
    rest = ["--prompt", "a", "--max-new-tokens", "1"]
    assert main(["generate", str(tmp_path / "run"), *rest]) == 0


def test_one_reason_for_many_lines_is_said_once(tmp_path):
    lines = ['{"messages": []}'] * 40 + ["{"]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=facts("41 of 41")) as raised:
        read_records(tmp_path / "chats.jsonl", None)
    said = str(raised.value).splitlines()
    assert said[1].startswith("  line 1 and 39 more: ")
    assert said[2].startswith("  line 41: ") and len(said) == 3


def test_lines_that_cannot_be_used_are_listed(tmp_path):
    file = tmp_path / "data.jsonl"
    wrong = ["{", "[1]", '{"chosen": 1, "rejected": 2}', '{"texts": "a"}']
    wrong += ['{"messages": [1]}', '{"text": 3}', '{"prompt": "a", "completion": 1}']
    file.write_text("\n".join(['{"text": "fine"}', *wrong]))
    with pytest.raises(ValueError, match=facts(f"'{file}'", "7", "8")) as caught:
        read_records(file, None)
    said = str(caught.value)
    assert [f"line {n}:" in said for n in range(1, 9)] == [
        *[False, True, True, True, True, True, False, False]
    ]
    assert said.endswith("and 2 more")


def test_text_that_is_none_is_named_by_its_line(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "a"}\n{"text": "\\ud800 b"}\n')
    with pytest.raises(ValueError, match=facts("line 2", r"'\ud800'")):
        read_records(file, None)
    file.write_bytes(b'{"text": "a"}\n\n{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=facts(str(file), "line 3", "UTF-8")):
        read_records(file, None)


def test_the_mark_of_an_order_of_bytes_is_no_text(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert [record.text for record in read_records(file, None)] == ["a"]


def test_a_line_ends_at_a_line_feed_and_at_nothing_else(tmp_path):
    texts = ["a\u2028b", "c\u0085d", "e\u2029f", "g"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    for name, end in (("text.jsonl", "\n"), ("text.jsonl.gz", "\r\n")):
        (file := tmp_path / name).write_bytes(
            (gzip.compress if name.endswith("gz") else bytes)(
                "".join(line + end for line in lines).encode()
            )
        )
        assert [record.text for record in read_records(file, None)] == texts


def test_a_conversation_without_messages_is_told_so(tmp_path):
    with pytest.raises(ValueError, match=facts("line 1", "messages", "empty")):
        read_records(write(tmp_path, {"messages": []}), None)


def test_what_is_cut_and_dropped_is_said_in_numbers(chat_model, tmp_path):
    file = write(
        tmp_path,
        {"prompt": "a", "completion": "b" * 20},
        {"prompt": "a" * 20, "completion": "b"},
        {"prompt": "a", "completion": "b"},
    )
    _, line = encoder(chat_model).encode_file(file, DataConfig("model", seq=8))
    assert line == (
        f"'{file}': 3 documents, 12 tokens, 10 trained, 2 longer than --seq 8 "
        "truncated by 26 tokens, 1 without a token to train on dropped"
    )
    drop = DataConfig("model", seq=8, overlong="drop")
    documents, line = encoder(chat_model).encode_file(file, drop)
    assert len(documents) == 1 and "2 longer than --seq 8 dropped" in line
    every = DataConfig("model", seq=8, train_on="all", overlong="drop")
    documents, line = encoder(chat_model).encode_file(file, every)
    predicted = int(documents.lengths.sum()) - len(documents)
    assert f"{predicted} trained" in line and documents.trained.all()
    none = write(tmp_path, {"prompt": "a" * 20, "completion": "b"})
    with pytest.raises(ValueError, match=facts(f"'{none}'", "1", "9", "--seq")):
        encoder(chat_model).encode_file(none, DataConfig("model", seq=8))


def sources(tmp_path, chat_model, **options):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    a = write(tmp_path / "a", *({"text": f"a{n}"} for n in range(40)))
    b = write(tmp_path / "b", *({"text": f"b{n}"} for n in range(10)))
    config = DataConfig("model", batch=4, seq=8, rows="pad", seed=3, **options)
    return read_documents([a, b], encoder(chat_model), config, None), config


def test_hosts_share_one_order_that_goes_on_from_any_position(chat_model, tmp_path):
    data, config = sources(tmp_path, chat_model)

    def batches(shard):
        return mixed_batches(data.sources, data.weights, config, shard)

    alone, hosts = batches(HostShard(0, 1)), [batches(HostShard(i, 2)) for i in (0, 1)]
    for _ in range(3):
        parts = [next(host)["tokens"] for host in hosts]
        np.testing.assert_array_equal(np.concatenate(parts), next(alone)["tokens"])
    (state,) = {json.dumps(position(host)) for host in (*hosts, alone)}
    again = batches(HostShard(0, 1))
    again.set_state(json.loads(state))
    np.testing.assert_array_equal(next(again)["tokens"], next(alone)["tokens"])


@pytest.mark.parametrize("weights, share", [("", 0.8), ("1,3", 0.25)])
def test_files_are_mixed_by_weight(chat_model, tmp_path, weights, share):
    data, config = sources(tmp_path, chat_model, data_weights=weights)
    batches = mixed_batches(data.sources, data.weights, config, HostShard(0, 1))
    first = [next(batches)["tokens"][:, 0] for _ in range(20)]
    codec = encoder(chat_model).codec
    letters = [codec.decode([token]) for token in np.concatenate(first)]
    assert letters.count("a") / len(letters) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("text", ["1", "1,0", "1,x", "1,2,3"])
def test_weights_that_do_not_fit_the_files_are_refused(text):
    with pytest.raises(ValueError, match=facts(f"--data-weights {text}", "2")):
        parse_weights(text, 2)


def test_bytes_end_where_their_character_does():
    ids, ends = Bytes().encode_with_offsets("aé", add_specials=True)
    assert (ids, ends) == ([97, 195, 169], [1, 2, 2])


def test_the_documents_that_the_first_process_leaves_are_the_same(
    chat_model, chats, tmp_path
):
    config = DataConfig("model", seq=64)
    ((found, line),) = _read_in_first([chats], encoder(chat_model), config, tmp_path)
    wanted, wanted_line = encoder(chat_model).encode_file(chats, config)
    assert line == wanted_line
    for name, array in vars(wanted).items():
        np.testing.assert_array_equal(getattr(found, name), array)


def losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def test_a_run_on_chats_begins_with_the_loss_of_transformers_and_resumes_over_cp(
    chat_model, chats, tmp_path, capsys
):
    import torch
    import transformers

    argv = ["--data", str(chats), "--seq", "64", "--save-every", "1", "--steps", "3"]
    start = ["train", "--hf", str(chat_model), *argv, "--rows", "pad", "--batch", "16"]
    files = ["--save", str(tmp_path / "run"), "--metrics", str(tmp_path / "run.jsonl")]
    assert main([*start, *files, "--lr", "1e-2"]) == 0
    assert "16 documents" in capsys.readouterr().err
    found = losses(tmp_path / "run.jsonl")

    model = transformers.AutoModelForCausalLM.from_pretrained(chat_model)
    template, total, count = read_chat_template(chat_model), 0.0, 0
    for record in read_records(chats, template):
        ids, trained = encoder(chat_model).encode(record, "completions")
        labels = torch.tensor(np.where(trained, ids, -100)[None])
        with torch.no_grad():
            loss = model(torch.tensor([ids]), labels=labels).loss
        total, count = total + float(loss) * sum(trained), count + sum(trained)
    assert found[0] == pytest.approx(total / count, rel=ANOTHER_MESH)

    resume = ["train", "--resume", str(tmp_path / "run"), "--resume-step", "1"]
    resume += ["--data", str(chats), "--steps", "3", "--save", str(tmp_path / "more")]
    metrics = tmp_path / "more.jsonl"
    assert main([*resume, "--cp", "2", "--metrics", str(metrics)]) == 0
    assert losses(tmp_path / "more.jsonl") == pytest.approx(found[1:], rel=ANOTHER_MESH)


def test_the_preview_marks_what_is_trained(chat_model, chats, capsys):
    argv = ["data", str(chat_model), "--data", str(chats), "--seq", "64", "--show", "1"]
    assert main([*argv, "--rows", "pad"]) == 0
    out = capsys.readouterr().out
    assert "16 documents" in out and "16 rows of 64 tokens" in out
    _, _, row = out.partition("row 1\n")
    assert row.startswith("<bos><user>") and "<assistant>[" in row and "<eos>]" in row


@pytest.mark.parametrize(
    "argv, wanted",
    [
        ("train --data {chats} {text} --steps 1", ["--data", "'{chats}'"]),
        ("train --data {text} --steps 1 --rows pad", ["--rows pad", "JSON Lines"]),
        ("eval {model} --data {chats}", ["--data {chats}"]),
        ("train --data {text} --steps 1 --eval-data {chats}", ["--data", "'{chats}'"]),
        ("train --data {text} --steps 1 --keep-best 1", ["--keep-best 1", "--keep N"]),
        (
            "train --data {text} --steps 4 --keep 1 --keep-best 1 --eval-data {text} "
            "--save-every 1",
            ["--keep-best 1", "--eval-every", "1", "0"],
        ),
        ("train --data {text} --steps 1 --eval-every 1", ["--eval-every 1"]),
        ("data {model} --data {text} --train-on all", ["--train-on all"]),
    ],
)
def test_text_and_records_are_not_taken_for_each_other(
    argv, wanted, chat_model, chats, text, tmp_path, capsys
):
    names = {"chats": chats, "text": text, "model": chat_model}
    words = [word.format_map(names) for word in argv.split()]
    if words[0] == "train":
        words += ["--hf", str(chat_model), "--save", str(tmp_path / "new")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert all(fact.format_map(names) in said for fact in wanted)


@pytest.mark.parametrize("kind", ["chats", "text"])
def test_held_out_data_is_measured_after_the_steps_that_are_due(
    kind, chat_model, chats, text, tmp_path
):
    # All of the data is one batch, and nothing is learned: two losses of one model.
    if kind == "text":
        text = tmp_path / "short.txt"
        text.write_text("x" * (8 * 16 + 1))
    data, rows = (chats, ["--rows", "pad"]) if kind == "chats" else (text, [])
    argv = ["train", "--hf", str(chat_model), "--data", str(data), "--steps", "3"]
    argv += ["--batch", "16" if kind == "chats" else "8", *rows, "--lr", "0"]
    argv += ["--seq", "64" if kind == "chats" else "16", "--eval-data", str(data)]
    metrics = tmp_path / "run.jsonl"
    more = ["--eval-every", "2", "--metrics", str(metrics), "--fused-loss"]
    more += ["--save-every", "1", "--keep", "1", "--keep-best", "1"]
    assert main([*argv, "--save", str(tmp_path / "save"), *more]) == 0
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert ["eval_loss" in line for line in lines] == [False, True, True]
    for line in lines[1:]:
        assert line["eval_loss"] == pytest.approx(line["loss"], rel=ANOTHER_MESH)
    # The best of those that were complete when step 3 was saved, and step 3.
    names = (path.name for path in (tmp_path / "save").iterdir())
    assert sorted(name for name in names if name.isdigit()) == ["2", "3"]
    stored = fsdp.checkpoint.load_metadata(tmp_path / "save")
    assert stored["eval_loss"] == lines[-1]["eval_loss"]
