"""Texts that a model writes while it is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import fsdp_jax as fsdp
from fsdp_jax.cli._data_config import DataConfig
from fsdp_jax.cli._model_source import Origin
from fsdp_jax.cli._run_options import EvalOptions
from fsdp_jax.cli._special_tokens import stop_tokens
from fsdp_jax.cli._text_generation import (
    check_prompts,
    encode_prompt,
    make_continuation,
)
from fsdp_jax.cli._tokenizer import TextCodec
from fsdp_jax.cli._training_data import codec_of


@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
    """Prompts, and when they are continued.

    Attributes:
      texts: Prompts.
      prompts: Tokens of each.
      codec: Tokenizer.
      every: Interval of steps.
      max_new_tokens: Maximum number of new tokens.
      stop: Tokens that end a text.
    """

    texts: tuple[str, ...]
    prompts: tuple[list[int], ...]
    codec: TextCodec
    every: int
    max_new_tokens: int
    stop: tuple[int, ...]

    def is_due(self, step: int, last: int) -> bool:
        """Returns whether prompts are continued after a step.

        Args:
          step: Number of the step.
          last: Last step of the run, after which they always are.
        """
        return step % self.every == 0 or step == last

    def make(self, plan: fsdp.Plan) -> Callable[[fsdp.TrainState], Iterator[str]]:
        """Makes the function from a state to the prompts with their continuations.

        Args:
          plan: Plan of the decoder.
        """
        continue_prompts = make_continuation(
            plan, max_new_tokens=self.max_new_tokens, stop=self.stop
        )

        def write(state: fsdp.TrainState) -> Iterator[str]:
            rows = continue_prompts(state.params, self.prompts, state.model_state)
            for text, prompt, row in zip(self.texts, self.prompts, rows, strict=True):
                new = row[len(prompt) :]
                yield text + self.codec.decode([t for t in new if t not in self.stop])

        return write


def make_samples(
    options: EvalOptions, origin: Origin, config: DataConfig, steps: int
) -> Samples | None:
    """Encodes the prompts of a run; None if there are none.

    Args:
      options: Prompts, and when they are continued.
      origin: Model, with its tokenizer and chat template.
      config: Tokenizer of the data.
      steps: Last step.

    Raises:
      ValueError: If a prompt has no tokens, or the model no chat template.
    """
    if not options.sample:
        return None
    codec = codec_of(origin, config)
    prompts = [
        encode_prompt(codec, origin, text, chat=options.sample_chat)
        for text in options.sample
    ]
    check_prompts(options.sample, prompts, "--sample")
    return Samples(
        texts=options.sample,
        prompts=tuple(prompts),
        codec=codec,
        every=options.sample_every or steps,
        max_new_tokens=options.sample_tokens or 64,
        stop=stop_tokens(codec, origin.files, origin.config),
    )
