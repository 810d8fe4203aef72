"""A rollout engine: transformers' model, whose weights come from a trainer.

    python rollout_worker.py RECEIVER.py PORT MODEL TOKENS.npy LOGITS.npy

It begins with random weights, and has neither jax nor this project's packages.
"""

import importlib.util
import socket
import sys

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main(receiver: str, port: str, model_dir: str, tokens: str, logits: str) -> None:
    spec = importlib.util.spec_from_file_location("receiver", receiver)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["receiver"] = module
    spec.loader.exec_module(module)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    params = dict(model.named_parameters())
    with socket.create_connection(("127.0.0.1", int(port)), timeout=120) as connection:
        weights = module.receive_weights(connection)
        assert weights.metadata == {"step": 7}
        with torch.no_grad():
            for name, tensor in weights:
                params.pop(name).copy_(tensor)
    assert not params, f"did not come: {list(params)}"
    assert not {"jax", "bridge"} & sys.modules.keys()
    # What engines do on disk: their loaders read the files of a model by name.
    stored = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.from_numpy(np.load(tokens))
    with torch.no_grad():
        found = [each.eval()(ids).logits.numpy() for each in (model, stored)]
    np.save(logits, np.stack(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
