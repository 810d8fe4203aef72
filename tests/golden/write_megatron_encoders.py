"""Saves a BERT and a T5 of Megatron-Core as `torch_dist`, for `encoders.tar.xz`.

Megatron's own `BertModel` and `T5Model`, two layers each, local layer specs, one
process on a CPU, float32. `encoder_tensors` says what each parameter holds.

    pip download --no-deps megatron-core==0.16.1 && unzip megatron_core-*.whl -d mcore
    PYTHONPATH=.:tests:tests/bridge:tests/golden:mcore python \
        tests/golden/write_megatron_encoders.py
"""

import tarfile
import tempfile
from pathlib import Path

import torch
from encoder_tensors import value_of
from megatron.core import dist_checkpointing
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.T5 import t5_spec
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.transformer.transformer_config import TransformerConfig
from write_megatron_logits import prepare
from write_megatron_steps import put_on_cpu

OUT = Path(__file__).with_name("encoders.tar.xz")


def config() -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        ffn_hidden_size=12,
        use_cpu_initialization=True,
    )


def models() -> dict[str, torch.nn.Module]:
    sizes = {"vocab_size": 32, "max_sequence_length": 16}
    bert = BertModel(
        config(),
        num_tokentypes=2,
        transformer_layer_spec=bert_layer_local_spec,
        **sizes,
    )
    t5 = T5Model(
        config(),
        encoder_config=config(),
        transformer_encoder_layer_spec=t5_spec.get_t5_encoder_with_local_block_spec(2),
        transformer_decoder_layer_spec=t5_spec.get_t5_decoder_with_local_block_spec(2),
        **sizes,
    )
    return {"bert": bert, "t5": t5}


if __name__ == "__main__":
    prepare()
    put_on_cpu()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "encoders"
        for name, model in models().items():
            for key, param in model.named_parameters():
                param.data = torch.from_numpy(value_of(key, tuple(param.shape)))
            path = root / name / "iter_0000001"
            path.mkdir(parents=True)
            dist_checkpointing.save(model.sharded_state_dict(), str(path))
            names = "\n".join(key for key, _ in model.named_parameters())
            (root / name / "names.txt").write_text(names + "\n")
            latest = root / name / "latest_checkpointed_iteration.txt"
            latest.write_text("1")
        with tarfile.open(OUT, "w:xz") as archive:
            archive.add(root, "encoders")
