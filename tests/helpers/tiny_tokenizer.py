"""A tokenizer of single bytes, with special tokens behind them."""

import json
from collections.abc import Sequence
from pathlib import Path


def write_tokenizer(folder: Path, specials: Sequence[str], **config) -> None:
    """Writes `tokenizer.json`, and what is given into `tokenizer_config.json`.

    Args:
      folder: Directory of a model.
      specials: Special tokens, of ids 256 and on.
      **config: Fields of `tokenizer_config.json`.
    """
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
