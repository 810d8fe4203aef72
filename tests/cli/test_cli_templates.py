"""Templates and special tokens: rows are what transformers makes of the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import facts
from helpers.tiny_tokenizer import write_tokenizer

from fsdp_jax.cli import main
from fsdp_jax.cli._chat_template import read_chat_template
from fsdp_jax.cli._data_config import DataConfig
from fsdp_jax.cli._document_data import Encoder
from fsdp_jax.cli._preference_records import pair_records
from fsdp_jax.cli._records import Record, parse_records, read_records
from fsdp_jax.cli._special_tokens import end_token, stop_tokens
from fsdp_jax.cli._tokenizer import Bytes, ModelTokenizer
from fsdp_jax.cli._training_data import encoder_of

pytestmark = pytest.mark.torch  # transformers renders templates.

PLAIN = (
    "{% if aloud %}<aloud>{% endif %}{{ bos_token }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITH_TOOLS = "{{ tools | tojson }}" + PLAIN
# Two blocks a message, of which the second is the end.
IN_BLOCKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}|"
    "{% generation %}<eos>{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2."},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
SPECIALS = ["<bos>", "<eos>", "<end>"]
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}


def model(folder: Path, template: Any = PLAIN, **tokens: Any) -> Path:
    """A folder with a tokenizer, and a template in its config."""
    write_tokenizer(folder, SPECIALS, chat_template=template, **(tokens or TOKENS))
    return folder


def rendered(folder: Path, messages: list[dict], **options: Any) -> str:
    """What transformers makes of a conversation, from the folder alone."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def records(folder: Path, *lines: dict) -> list[Record]:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_records(file, read_chat_template(folder))


def written(record: Record) -> list[str]:
    return [record.text[slice(*span)] for span in record.spans]


NAMED = [
    {"name": "default", "template": PLAIN},
    {"name": "tool_use", "template": WITH_TOOLS},
]


@pytest.mark.parametrize("place", ["listed", "a folder"])
def test_conversations_with_tools_have_the_template_for_tools(place, tmp_path):
    folder = model(tmp_path, NAMED if place == "listed" else PLAIN)
    if place == "a folder":
        (folder / "additional_chat_templates").mkdir()
        named = folder / "additional_chat_templates" / "tool_use.jinja"
        named.write_text(WITH_TOOLS)
        (folder / "chat_template.jinja").write_text(PLAIN)
    without, told, as_json = records(
        folder,
        {"messages": CHAT, "tools": "", "chat_template_kwargs": ""},
        {"messages": CHAT, "tools": TOOLS},
        {"messages": CHAT, "tools": json.dumps(TOOLS)},
    )
    assert without.text == rendered(folder, CHAT)
    assert told.text == as_json.text == rendered(folder, CHAT, tools=TOOLS)
    assert without.text != told.text and '"add"' in told.text


def test_tools_and_variables_reach_the_template_with_prompt_and_completion(tmp_path):
    folder = model(tmp_path, NAMED)
    options = {"tools": TOOLS, "chat_template_kwargs": {"aloud": True}}
    (record,) = records(folder, {"prompt": CHAT[:3], "completion": CHAT[3:], **options})
    assert record.text == rendered(folder, CHAT, tools=TOOLS, aloud=True)
    assert "]<aloud><bos>" in record.text
    sides = {"chosen": CHAT[3:], "rejected": CHAT[1:2], "prompt": CHAT[:3]}
    file = folder / "pairs.jsonl"
    file.write_text(json.dumps({**sides, **options}))
    template = read_chat_template(folder)
    ((chosen, _),) = parse_records(file, lambda line: pair_records(line, template))
    assert chosen.text == record.text


@pytest.mark.parametrize(
    "field, value, says",
    [
        ("tools", "[", ["tools", "JSON"]),
        ("tools", {"a": 1}, ["tools"]),
        ("chat_template_kwargs", [1], ["chat_template_kwargs"]),
        ("chat_template_kwargs", {"tools": 1}, ["chat_template_kwargs", "tools"]),
    ],
)
def test_what_a_template_cannot_take_is_refused(field, value, says, tmp_path):
    with pytest.raises(ValueError, match=facts("line 1", *says)):
        records(model(tmp_path), {"messages": CHAT, field: value})


def test_blocks_of_the_prompt_are_not_trained(tmp_path):
    folder = model(tmp_path, IN_BLOCKS)
    every, last = records(
        folder, {"messages": CHAT}, {"prompt": CHAT[:3], "completion": CHAT[3:]}
    )
    assert written(every) == ["1.", "<eos>", "2.", "<eos>"]
    assert every.text == last.text and written(last) == ["2.", "<eos>"]


@pytest.mark.parametrize("end", ["<eos>", ""])
def test_a_prompt_without_answers_is_no_matter_how_it_is_rendered(end, tmp_path):
    # Without a user's message the template fails, and the end comes once.
    ended = "{{ messages[1].content }}" + IN_BLOCKS + end
    folder = model(tmp_path, ended)
    chat = [{"role": "system", "content": "Be."}, *CHAT[:2]]
    (record,) = records(folder, {"prompt": chat[:1], "completion": chat[1:]})
    assert written(record) == ["1.", "<eos>"]


def test_a_prompt_whose_answers_are_rendered_anew_is_refused(tmp_path):
    anew = IN_BLOCKS.replace("{{ m.content }}", "{{ messages | length }}")
    prompted = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    with pytest.raises(ValueError, match=facts("line 1", "3 messages")):
        records(model(tmp_path, anew), prompted)


MAPS = {
    "the map alone": ({}, {"bos_token": "<bos>"}),
    "both": ({"bos_token": "<eos>"}, {"bos_token": "<bos>"}),
    "a list of added tokens": (
        {"bos_token": "<eos>", "added_tokens_decoder": {}},
        {"bos_token": "<bos>"},
    ),
    "null": ({"bos_token": None}, {}),
}


@pytest.mark.parametrize("case", MAPS)
def test_special_tokens_of_a_template_are_those_of_transformers(case, tmp_path):
    config, tokens_map = MAPS[case]
    folder = model(tmp_path, PLAIN, eos_token="<eos>", **config)
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens_map))
    (record,) = records(folder, {"messages": CHAT})
    assert record.text == rendered(folder, CHAT)


def test_a_token_that_is_nowhere_to_be_found_is_named(tmp_path):
    folder = model(tmp_path, PLAIN, eos_token="<eos>")
    with pytest.raises(ValueError, match=facts("bos_token", "tokenizer_config.json")):
        read_chat_template(folder)
    # A class without tokens of its own has none.
    named = {"tokenizer_class": "PreTrainedTokenizerFast"}
    folder = model(tmp_path, PLAIN, eos_token="<eos>", **named)
    (record,) = records(folder, {"messages": CHAT})
    assert record.text == rendered(folder, CHAT) and record.text.startswith("<user>")


CALLING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_fields_of_messages_that_are_null_are_absent(tmp_path):
    folder = model(tmp_path, CALLING)
    called = [{"function": {"name": "add", "arguments": {}}}]
    chat = [
        {"role": "user", "content": "One?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": called},
    ]
    (record,) = records(folder, {"messages": chat})
    assert record.text == rendered(folder, chat) == "<user>One?<assistant>1"


def test_files_of_templates_replace_those_of_the_config(tmp_path):
    folder = model(tmp_path, NAMED)
    (folder / "chat_template.jinja").write_text(CALLING)
    (record,) = records(folder, {"messages": CHAT, "tools": TOOLS})
    assert record.text == rendered(folder, CHAT, tools=TOOLS)
    assert "add" not in record.text


@pytest.mark.parametrize("content", ["[]", "{"])
def test_a_damaged_file_of_tokens_is_named(content, tmp_path):
    folder = model(tmp_path)
    (folder / "generation_config.json").write_text(content)
    codec = ModelTokenizer(folder / "tokenizer.json")
    with pytest.raises(ValueError, match=facts("generation_config.json'")):
        stop_tokens(codec, folder, Config(258))


def test_an_end_that_is_no_token_is_named(tmp_path):
    folder = model(tmp_path, eos_token="<missing>", bos_token="<bos>")
    codec = ModelTokenizer(folder / "tokenizer.json")
    with pytest.raises(ValueError, match=facts("'<missing>'", "tokenizer_config.json")):
        end_token(codec, folder, Config(257))
    assert end_token(Bytes(), folder, Config(257)) == 257


class Config:
    """Of a model's, what is read here."""

    def __init__(self, eos_token_id):
        self.eos_token_id = eos_token_id


def test_texts_end_with_the_token_of_the_tokenizer(tmp_path):
    folder = model(tmp_path)
    codec, end = ModelTokenizer(folder / "tokenizer.json"), 257
    assert end_token(codec, folder, Config([258, 257])) == end
    assert end_token(codec, folder, Config(None)) == end
    assert end_token(Bytes(), folder, Config([258, 257])) == 258
    (folder / "tokenizer_config.json").write_text("{}")
    assert end_token(codec, folder, Config([258, 257])) == 258
    assert end_token(codec, folder, Config(None)) is None


def test_what_a_model_writes_ends_with_any_of_its_ends(tmp_path):
    folder = model(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 258]}')
    codec = ModelTokenizer(folder / "tokenizer.json")
    assert stop_tokens(codec, folder, Config(258)) == (258, 256, 257)
    assert stop_tokens(codec, None, Config(None)) == ()


def test_an_end_that_the_tokenizer_adds_is_trained(tmp_path):
    import tokenizers

    folder = model(tmp_path)
    file = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 256), ("<eos>", 257)]
    )
    tokenizer.save(file)
    encoder = Encoder(ModelTokenizer(folder / "tokenizer.json"), folder, 257, 264)
    text = "ab"
    ids, trained = encoder.encode(Record(text, ((1, 2),)), "completions")
    assert ids[0] == 256 and ids[-1] == 257 and len(ids) == 4
    assert trained == [False, False, True, True]


def test_texts_that_nothing_ends_are_told_so(tmp_path, write_llama):
    from fsdp_jax.cli._model_source import open_any

    folder = tmp_path / "model"
    write_llama(folder, vocab_size=264)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"text": "to be"}))
    options = DataConfig("bytes", seq=8)
    _, line = encoder_of(open_any(folder), options).encode_file(file, options)
    assert "eos_token" in line


def test_a_run_goes_on_when_the_step_it_resumed_from_is_deleted(tmp_path, write_llama):
    folder = tmp_path / "model"
    write_llama(folder, vocab_size=264, eos_token_id=257)
    model(folder)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(8)))
    save = tmp_path / "run"
    argv = ["train", "--hf", str(folder), "--data", str(data), "--save", str(save)]
    argv += ["--batch", "8", "--seq", "32", "--save-every", "1", "--keep", "1"]
    assert main([*argv, "--steps", "1"]) == 0
    assert main([*argv, "--steps", "4"]) == 0
    assert [path.name for path in save.iterdir() if path.name.isdigit()] == ["4"]
    assert main(["verify", str(save)]) == 0
