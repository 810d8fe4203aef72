"""`fsdp-jax merge`: writes the weighted mean of several checkpoints."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import bridge
from bridge.models import DecoderConfig
from fsdp_jax._report import bytes_bar
from fsdp_jax.cli._errors import check_empty
from fsdp_jax.cli._megatron import MegatronLayout
from fsdp_jax.cli._model_source import open_any
from fsdp_jax.cli._options import Group, Unset
from fsdp_jax.cli.commands._import import Import
from fsdp_jax.cli.commands._inspect import config_fields


@dataclasses.dataclass(frozen=True)
class Merge:
    """Write the weighted mean of checkpoints of one model, tensor by tensor.

    Each may be of another kind: Hugging Face's models, Megatron's checkpoints and
    those of fsdp-jax. Sums are in float32, and rounded once to the dtypes of the first.

    Attributes:
      srcs: Checkpoints to read, at least two; the first gives config and tokenizer.
      out: Directory to write; new, or empty.
      weights: Weight of each, which add up to 1; default equal weights.
      to: Format to write, as in `fsdp-jax convert`.
      layout: Parallel sizes of a checkpoint for Megatron.
    """

    srcs: tyro.conf.Positional[tuple[Path, ...]]
    out: Path
    weights: Unset[tuple[float, ...]] = None
    to: Literal["hf", "torch_dist", "legacy", "fsdp_dtensor", "orbax"] = "hf"
    layout: Annotated[MegatronLayout, Group] = MegatronLayout()

    def run(self) -> None:
        """Opens all, and writes the mean."""
        check_empty(self.out, "--out")
        self.layout.check(self.to in ("torch_dist", "legacy", "fsdp_dtensor"))
        if len(self.srcs) < 2:
            raise ValueError(f"{len(self.srcs)} checkpoint to merge: give two or more.")
        origins = [open_any(src) for src in self.srcs]
        first = origins[0]
        _check_one_model(self.srcs, [origin.config for origin in origins])
        params = bridge.merge([o.lazy_params() for o in origins], self.weights)
        with bytes_bar(f"writing {self.out}") as progress:
            if self.to == "hf":
                bridge.save_hf(
                    self.out,
                    params,
                    first.config,
                    copy_from=first.files,
                    progress=progress,
                )
            elif self.to != "orbax":
                self.layout.save(self.out, params, first.config, self.to, progress)
        if self.to == "orbax":
            self._import(params, first.config, first.files)
        print(f"the mean of {len(self.srcs)} checkpoints is now in {self.out}")

    def _import(self, params: Any, config: DecoderConfig, files: Path | None) -> None:
        """Writes Hugging Face's files beside OUT, and imports them."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.out.parent) as temp:
            model = Path(temp) / "model"
            bridge.save_hf(model, params, config, copy_from=files)
            Import(str(model), self.out).run()


def _check_one_model(srcs: Sequence[Path], configs: Sequence[DecoderConfig]) -> None:
    first = _compared(configs[0])
    wrong = [
        f"  {src}: {name} is {other.get(name)!r}, not {first.get(name)!r}"
        for src, config in zip(srcs, configs, strict=True)
        for other in [_compared(config)]
        for name in sorted(first.keys() | other.keys())
        if first.get(name) != other.get(name)
    ]
    if wrong:
        raise ValueError(
            f"These checkpoints are not of the same model as {srcs[0]}:\n"
            + "\n".join(wrong)
        )


def _compared(config: DecoderConfig) -> dict[str, Any]:
    """Returns what the weights of a model mean; not their dtype, nor its tokens."""
    beside = ("dtype", "bos_token_id", "eos_token_id", "pad_token_id", "model_type")
    return {name: v for name, v in config_fields(config).items() if name not in beside}
