"""`fsdp-jax generate`: continues prompts."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from jaxtyping import Array, Int

import fsdp_jax as fsdp
from bridge.models import (
    GREEDY,
    Decoder,
    Generated,
    Sampling,
    generate,
)
from fsdp_jax.cli._chat_template import read_chat_template
from fsdp_jax.cli._decoder import computed_in, plan_decoder
from fsdp_jax.cli._model_source import Origin, open_any, tokenizer_file
from fsdp_jax.cli._options import Devices, Group, IgnoreField, Unset
from fsdp_jax.cli._tokenizer import TextCodec, open_codec, stop_tokens
from fsdp_jax.cli._train_config import ParamDtype, Tokenizer
from fsdp_jax.sharding._mesh import BATCH_AXES, num_devices


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue prompts, with the weights sharded over all devices.

    Prints each prompt with its continuation.

    Attributes:
      model: Model: a directory, a hub id, a Megatron checkpoint, or a checkpoint of
        fsdp-jax.
      prompt: Texts to continue.
      max_new_tokens: Maximum number of new tokens for each.
      step: Step of a checkpoint of fsdp-jax; default the newest.
      temperature: Divisor of the logits; 0 for the likeliest token, always.
      top_k: Number of likeliest tokens to draw from.
      top_p: Probability that the likeliest tokens to draw from reach together.
      seed: Seed of the draws; the same on any number of devices.
      param_dtype: Dtype that weights are gathered and computed in.
      tokenizer: Tokenizer of the prompts: bytes as they are, or the model's
        tokenizer.json; default the latter where there is one.
      chat: Renders each prompt as a question in the model's chat template.
      json: Prints a line of JSON a prompt instead: prompt, text, and whether it ended.
      ignore_field: Field of config.json to ignore although it is refused; may be
        repeated. For fields that change no number.
      where: Devices.
    """

    model: tyro.conf.Positional[str]
    prompt: tuple[str, ...]
    max_new_tokens: int = 64
    step: Unset[int] = None
    temperature: float = 0.0
    top_k: Unset[int] = None
    top_p: Unset[float] = None
    seed: int = 0
    param_dtype: ParamDtype = "float32"
    tokenizer: Unset[Tokenizer] = None
    chat: bool = False
    json: bool = False
    ignore_field: IgnoreField = ()
    where: Annotated[Devices, Group] = Devices()

    def run(self) -> None:
        """Prints the texts."""
        sampling = Sampling(self.temperature, self.top_k, self.top_p)
        self._check()
        devices = self.where.pick()
        origin = open_any(self.model, self.step, ignore_fields=self.ignore_field)
        codec = self._open_codec(origin)
        prompts = [self._encode(codec, origin, text) for text in self.prompt]
        _check_prompts(self.prompt, prompts)
        mesh = fsdp.make_mesh(devices=devices)
        plan = plan_decoder(origin.config, mesh, computed_in(self.param_dtype))
        params = origin.load_params(plan.params)
        rows = write_on(
            plan,
            params,
            prompts,
            max_new_tokens=self.max_new_tokens,
            sampling=sampling,
            seed=self.seed,
            stop=stop_tokens(origin.config),
        )
        for text, prompt, row in zip(self.prompt, prompts, rows, strict=True):
            self._print(codec, text, row[len(prompt) :], stop_tokens(origin.config))

    def _encode(self, codec: TextCodec, origin: Origin, text: str) -> list[int]:
        if not self.chat:
            return codec.encode(text)
        template = read_chat_template(origin.files)
        if template is None:
            raise ValueError(
                f"--chat: '{self.model}' has no chat template. Leave the option out, "
                "or add chat_template.jinja to the model."
            )
        text = template.prompt(text)
        return codec.encode_with_offsets(text, add_specials=False)[0]

    def _check(self) -> None:
        wrong = []
        if not self.prompt:
            wrong.append("--prompt: at least one")
        if self.max_new_tokens < 1:
            wrong.append(f"--max-new-tokens {self.max_new_tokens}: at least 1")
        if not 0 <= self.seed < 2**32:
            wrong.append(f"--seed {self.seed}: at least 0, below 2**32")
        if wrong:
            raise ValueError("; ".join(wrong) + ".")

    def _open_codec(self, origin: Origin) -> TextCodec:
        default = "bytes" if tokenizer_file(origin) is None else "model"
        return open_codec(
            self.tokenizer or default, tokenizer_file(origin), origin.config.vocab_size
        )

    def _print(
        self, codec: TextCodec, prompt: str, new: Sequence[int], stop: tuple[int, ...]
    ) -> None:
        ended = bool(new) and new[-1] in stop
        text = codec.decode(new[:-1] if ended else new)
        if self.json:
            print(json.dumps({"prompt": prompt, "text": text, "ended": ended}))
        else:
            print(prompt + text)


def write_on(
    plan: fsdp.Plan,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stop: tuple[int, ...] = (),
) -> list[list[int]]:
    """Writes on from prompts, on all devices of a plan, a part of the rows on each.

    Args:
      plan: Plan of the decoder.
      params: Its weights.
      prompts: Token ids; none is empty.
      max_new_tokens: Tokens to write at most.
      sampling: How they are drawn.
      seed: Seed of the draws.
      stop: Tokens that end a text.

    Returns:
      Each prompt with what was written, the token that ended it included.
    """
    ranks = num_devices(plan.mesh, BATCH_AXES)
    rows = -(-len(prompts) // ranks) * ranks
    # What fills up the last rows is a prompt of one token, and is dropped again.
    padded = [*prompts, *[[0]] * (rows - len(prompts))]
    tokens = np.zeros((rows, max(map(len, padded))), np.int32)
    for row, prompt in zip(tokens, padded, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.asarray([len(prompt) for prompt in padded], np.int32)
    index = np.arange(rows, dtype=np.uint32)
    batch = {"tokens": tokens, "lengths": lengths, "row": index}
    run = functools.partial(
        _generate,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        seed=seed,
    )
    found = fsdp.make_forward(plan, run)(params, batch)
    texts, ends = np.asarray(found.tokens), np.asarray(found.lengths)
    return [texts[i, : ends[i]].tolist() for i in range(len(prompts))]


def _generate(
    model: Decoder,
    batch: dict[str, Int[Array, ...]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop: tuple[int, ...],
    seed: int,
) -> Generated:
    fold = functools.partial(jax.random.fold_in, jax.random.key(seed))
    return generate(
        model,
        batch["tokens"],
        batch["lengths"],
        max_new_tokens=max_new_tokens,
        keys=jax.vmap(fold)(batch["row"]),
        sampling=sampling,
        stop=stop,
        # All ranks gather together, so none may stop before the last has.
        any_open=lambda is_open: fsdp.ops.masked_count(is_open) > 0,
    )


def _check_prompts(texts: Sequence[str], prompts: Sequence[Sequence[int]]) -> None:
    if empty := [repr(t) for t, p in zip(texts, prompts, strict=True) if not p]:
        raise ValueError(
            f"--prompt {', '.join(empty)}: no tokens, so nothing to go on from."
        )
