"""Texts that a model writes while it is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import fsdp_jax as fsdp
from fsdp_jax.cli._text_generation import make_continuation
from fsdp_jax.cli._tokenizer import TextCodec


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
