"""What a decoder writes from its cache is what transformers writes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from bridge_helpers import load_model
from helpers.errors import facts
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from bridge.models import Sampling, empty_cache, generate

pytestmark = pytest.mark.torch

# Learned positions, latent attention, sinks, caps, windows, interleaved ropes, experts,
# rows before position 0, heads normed once they are turned, states of other mixers,
# two mixers side by side, distances, queries that grow, keys that an indexer selects,
# keys of an earlier layer, entries of several tokens,
# blocks of keys, two attentions a layer, values narrower than keys,
# decays of each layer,
# decays of each dim, blocks that several layers share, heads of Mamba 1,
# experts of attention, norms behind what is added.
VARIANTS = [
    *("llama", "gemma3", "gpt2", "olmo2", "cohere", "glm4", "gpt_oss", "deepseek_v3"),
    *("opt", "hunyuan", "lfm2", "qwen3_next", "granitemoehybrid", "nemotron_h"),
    *("falcon_h1", "mamba2", "bloom", "ministral3", "llama4", "mamba", "jamba"),
    *("glm_moe_dsa", "gemma4", "gemma4-small", "gemma3n", "lfm2_moe", "lfm3"),
    *("deepseek_v4", "minimax_m3", "longcat_flash", "mimo_v2_flash", "minimax"),
    *("kimi_linear", "cohere2_moe", "olmo_hybrid", "recurrent_gemma"),
    *("diffllama", "doge", "persimmon", "xglm", "biogpt", "bitnet", "aria"),
    *("modernbert", "mistral4", "cohere_compass", "lara_mini", "bailing_hybrid"),
    *("laguna", "zamba2", "mllama", "hy_v4", "axk2", "zamba", "jetmoe"),
    "openai-gpt",
]
# transformers counts the padding before a prompt among the positions by which the
# queries of Llama 4 grow: here they do not yet.
CHANGES: dict[str, dict] = {"llama4": {"floor_scale": 64}}
# transformers leaves the bound of a time step out of single tokens: here it binds none.
CHANGES |= {"zamba2": {"time_step_min": 1e-6}}
# transformers counts that padding among the tokens of the first entries, of the first
# blocks, and before learned positions of GPT: here each prompt is alone.
ALONE = {"deepseek_v4", "minimax_m3", "openai-gpt"}
NEW, WIDTH = 9, 19
LENGTHS = np.array([19, 3, 11])


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on both sides, and prompts of unequal lengths.

    `in_blocks` is whether it attends to blocks of keys.
    """

    model: object
    torch_model: object
    prompts: np.ndarray
    padded: bool


@pytest.fixture(scope="module", params=VARIANTS)
def case(request, tmp_path_factory) -> Case:
    path = tmp_path_factory.mktemp(request.param) / "in"
    hf = make_model(path, request.param, **CHANGES.get(request.param, {}))
    torch_model = AutoModelForCausalLM.from_pretrained(hf.path).eval()
    prompts = np.random.default_rng(0).integers(5, 90, (len(LENGTHS), WIDTH))
    padded = request.param not in ALONE
    return Case(load_model(hf.path), torch_model, prompts, padded)


def written(model, prompts, **options):
    run = jax.jit(lambda model, p, n: generate(model, p, n, **options))
    return run(model, jnp.asarray(prompts, jnp.int32), jnp.asarray(LENGTHS, jnp.int32))


def written_by_transformers(case: Case) -> np.ndarray:
    """Prompts padded from the left, as it wants them, or each alone."""
    if not case.padded:
        pairs = zip(case.prompts, LENGTHS, strict=True)
        return np.concatenate([generated(case, p[None, :n]) for p, n in pairs])
    left = np.zeros((len(LENGTHS), WIDTH), np.int64)
    mask = np.zeros_like(left)
    for row, prompt, length in zip(
        range(len(left)), case.prompts, LENGTHS, strict=True
    ):
        left[row, WIDTH - length :] = prompt[:length]
        mask[row, WIDTH - length :] = 1
    return generated(case, left, mask)


def generated(case: Case, prompts: np.ndarray, mask: np.ndarray | None = None):
    mask = np.ones_like(prompts) if mask is None else mask
    with torch.no_grad():
        out = case.torch_model.generate(
            torch.from_numpy(prompts),
            attention_mask=torch.from_numpy(mask),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[:, prompts.shape[1] :].numpy()


def test_greedy_tokens_are_those_of_transformers(case: Case):
    junk = case.prompts.copy()
    junk[np.arange(WIDTH)[None] >= LENGTHS[:, None]] = 10**6  # is not read
    found = written(case.model, junk, max_new_tokens=NEW)
    want = written_by_transformers(case)
    np.testing.assert_array_equal(found.lengths, LENGTHS + NEW)
    for row, length in enumerate(LENGTHS):
        prompt, new = np.split(np.asarray(found.tokens[row]), [length])
        np.testing.assert_array_equal(prompt, case.prompts[row, :length])
        np.testing.assert_array_equal(new[:NEW], want[row])
        assert not new[NEW:].any()


def test_token_by_token_the_logits_are_those_of_the_whole_text(case: Case):
    tokens = jnp.asarray(case.prompts, jnp.int32)
    rows, first = len(tokens), 8

    @jax.jit
    def in_parts(model, tokens):
        cache = empty_cache(model.config, rows, WIDTH, model.dtype)
        slots = jnp.broadcast_to(jnp.arange(WIDTH)[None], tokens.shape)
        states, cache = model.extend(tokens[:, :first], slots[:, :first], cache)

        def one(cache, i):
            at = jax.lax.dynamic_slice_in_dim(tokens, i, 1, axis=1)
            x, cache = model.extend(at, jnp.full((rows, 1), i), cache)
            return cache, x[:, 0]

        _, more = jax.lax.scan(one, cache, jnp.arange(first, WIDTH))
        return model.logits(jnp.concatenate([states, more.swapaxes(0, 1)], axis=1))

    with torch.no_grad():
        want = case.torch_model(torch.from_numpy(case.prompts)).logits.numpy()
    error = np.abs(np.asarray(in_parts(case.model, tokens)) - want).max()
    assert error <= 2e-5 * np.abs(want).max()  # as test_logits has it


@pytest.mark.parametrize("case", ["llama"], indirect=True)
def test_a_stop_token_ends_its_row_alone(case: Case):
    free = written(case.model, case.prompts, max_new_tokens=NEW)
    third = int(free.tokens[1, LENGTHS[1] + 2])
    found = written(case.model, case.prompts, max_new_tokens=NEW, stop=(third,))
    assert found.lengths[1] == LENGTHS[1] + 3
    for row, length in enumerate(np.asarray(found.lengths)):
        np.testing.assert_array_equal(
            found.tokens[row, :length], free.tokens[row, :length]
        )
        assert not np.asarray(found.tokens[row, length:]).any()
        ended = length < LENGTHS[row] + NEW
        assert ended == (third in free.tokens[row, LENGTHS[row] : -1].tolist())


ROPES = {
    "phi3-longrope-long": {},
    "llama": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        "max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("variant", ROPES)
def test_neither_padding_nor_a_longer_prompt_chooses_the_rope(tmp_path, variant):
    hf = make_model(tmp_path, variant, **ROPES[variant])
    model, prompt = load_model(hf.path), np.arange(3, 13)

    def continued(width: int, *others: int) -> list[int]:
        padded = np.full((1 + len(others), width), 7, np.int32)
        padded[0, :10] = prompt
        lengths = jnp.array([10, *others])
        found = generate(model, jnp.asarray(padded), lengths, max_new_tokens=NEW)
        return found.tokens[0, 10 : 10 + NEW].tolist()

    assert continued(40) == continued(10)
    assert continued(40, 40) == continued(10)  # beside a longer prompt


@pytest.mark.parametrize("case", ["llama"], indirect=True)
def test_what_cannot_be_written_is_refused(case: Case):
    prompts = jnp.zeros((2, 3), jnp.int32)
    for lengths in ([0, 3], [1, 5]):
        with pytest.raises(ValueError, match=facts(*map(str, lengths), "3")):
            generate(case.model, prompts, jnp.array(lengths), max_new_tokens=1)
    with pytest.raises(ValueError, match=facts("generate", "max_new_tokens=0")):
        written(case.model, case.prompts, max_new_tokens=0)
    with pytest.raises(
        ValueError,
        match=facts("Sampling(temperature=1.0, top_k=None, top_p=None)", "keys"),
    ):
        written(
            *(case.model, case.prompts),
            max_new_tokens=1,
            sampling=Sampling(temperature=1.0),
        )
