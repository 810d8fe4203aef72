"""`fsdp-jax generate`: continues prompts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated

import tyro

import fsdp_jax as fsdp
from bridge.models import (
    Sampling,
)
from fsdp_jax.cli._average import averaged
from fsdp_jax.cli._data_config import Tokenizer
from fsdp_jax.cli._decoder import computed_in, plan_decoder
from fsdp_jax.cli._model_source import Origin, open_any
from fsdp_jax.cli._options import Devices, Group, IgnoreField, Unset
from fsdp_jax.cli._own_tokenizer import default_tokenizer, tokenizer_file
from fsdp_jax.cli._precision import ParamDtype
from fsdp_jax.cli._special_tokens import stop_tokens
from fsdp_jax.cli._text_generation import (
    check_prompts,
    encode_prompt,
    make_continuation,
)
from fsdp_jax.cli._tokenizer import TextCodec, open_codec


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
      ema: Uses the average of the weights, of a run with --ema.
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
    ema: bool = False
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
        if self.ema:
            origin = averaged(origin)
        codec = self._open_codec(origin)
        stop = stop_tokens(codec, origin.files, origin.config)
        prompts = [
            encode_prompt(codec, origin, text, chat=self.chat) for text in self.prompt
        ]
        check_prompts(self.prompt, prompts)
        mesh = fsdp.make_mesh(devices=devices)
        plan = plan_decoder(origin.config, mesh, computed_in(self.param_dtype))
        params = origin.load_params(plan.params)
        continue_prompts = make_continuation(
            plan,
            max_new_tokens=self.max_new_tokens,
            sampling=sampling,
            seed=self.seed,
            stop=stop,
        )
        rows = continue_prompts(params, prompts)
        for text, prompt, row in zip(self.prompt, prompts, rows, strict=True):
            self._print(codec, text, row[len(prompt) :], stop)

    def _check(self) -> None:
        wrong = []
        if not self.prompt:
            wrong.append("--prompt: at least one")
        if self.max_new_tokens < 1:
            wrong.append(f"--max-new-tokens {self.max_new_tokens} must be at least 1")
        if not 0 <= self.seed < 2**32:
            wrong.append(f"--seed {self.seed} must be at least 0 and below 2**32")
        if wrong:
            raise ValueError("; ".join(wrong) + ".")

    def _open_codec(self, origin: Origin) -> TextCodec:
        tokenizer = self.tokenizer or default_tokenizer(origin)
        return open_codec(tokenizer, tokenizer_file(origin), origin.config.vocab_size)

    def _print(
        self, codec: TextCodec, prompt: str, new: Sequence[int], stop: tuple[int, ...]
    ) -> None:
        ended = bool(new) and new[-1] in stop
        text = codec.decode(new[:-1] if ended else new)
        if self.json:
            print(json.dumps({"prompt": prompt, "text": text, "ended": ended}))
        else:
            print(prompt + text)
