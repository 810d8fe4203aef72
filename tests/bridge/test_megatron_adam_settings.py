"""Adam goes on with the settings that Megatron's checkpoint says, or says which not."""

from __future__ import annotations

import pytest
from bridge_helpers import like_of
from helpers.errors import facts

import bridge
from bridge.megatron import load_megatron_adam, open_megatron
from bridge.megatron.read._adam_settings import adam_settings

GROUP = {
    **{"wd_mult": 1.0, "lr_mult": 1.0, "lr": 3e-4, "betas": (0.9, 0.95)},
    **{"eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True},
}
UNDECAYED = {**GROUP, "wd_mult": 0.0, "weight_decay": 0.0}
CONSTANT = {
    **{"lr_decay_style": "constant", "num_steps": 80, "lr_warmup_steps": 16},
    **{"start_wd": 0.1, "end_wd": 0.1, "min_lr": 0.0, "lr_decay_steps": 160},
}
ARGS = {"clip_grad": 1.0}
NAMES = ("norm.scale", "layers.norm.scale")


def settings(groups=(GROUP, UNDECAYED), args=ARGS, scheduler=CONSTANT):
    return adam_settings(groups, args, scheduler, lambda: NAMES)


def test_what_the_checkpoint_says_is_kept():
    found = settings()
    assert (found.lr, found.b1, found.b2, found.eps) == (3e-4, 0.9, 0.95, 1e-8)
    assert (found.weight_decay, found.clip_grad) == (0.1, 1.0)
    assert found.no_decay == NAMES and not found.open
    assert settings(groups=(GROUP,)).no_decay == ()  # all are decayed
    renamed = {("pre_" + k if k.endswith("mult") else k): x for k, x in GROUP.items()}
    assert settings(groups=(renamed, UNDECAYED)) == found


@pytest.mark.parametrize(
    "changed, names",
    [
        ({"scheduler": {**CONSTANT, "lr_decay_style": "cosine"}}, {"lr": "cosine"}),
        ({"scheduler": {**CONSTANT, "num_steps": 8}}, {"lr": "16 of warmup"}),
        ({"groups": (GROUP, {**UNDECAYED, "lr": 1e-5})}, {"lr": "not said"}),
        (
            {"scheduler": {**CONSTANT, "end_wd": 0.2}},
            {"weight_decay": "from 0.1 to 0.2"},
        ),
        ({"groups": (GROUP, {**GROUP, "wd_mult": 2.0})}, {"weight_decay": "2.0"}),
        ({"args": {}}, {"clip_grad": "not said"}),
        (
            {"args": {**ARGS, "apply_wd_to_qk_layernorm": True}},
            {"no_decay": "apply_wd_to_qk_layernorm"},
        ),
        (
            {"groups": ({"betas": (0.9, 0.95)},), "scheduler": {}},
            dict.fromkeys(("lr", "eps", "weight_decay", "no_decay"), "not said"),
        ),
    ],
)
def test_what_it_does_not_say_in_one_value_is_open_by_name(changed, names):
    found = settings(**changed)
    assert set(names) <= set(found.open)
    for name, says in names.items():
        assert getattr(found, name) is None and says in found.open[name]


@pytest.mark.parametrize(
    "other",
    [{"lr_mult": 0.5}, {"amsgrad": True}, {"decoupled_weight_decay": False}],
    ids=str,
)
def test_another_optimizer_than_adamw_is_refused(other):
    with pytest.raises(ValueError, match=facts(next(iter(other)))):
        settings(groups=(GROUP, {**GROUP, **other}))


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_a_run_of_megatron_says_its_settings(name, golden):
    path = golden(name) / "torch_dist"
    config = bridge.megatron.from_args(open_megatron(path).args)
    found = load_megatron_adam(path, like_of(config)).settings
    assert (found.b1, found.b2, found.eps) == (0.9, 0.95, 1e-8)
    assert (found.weight_decay, found.clip_grad) == (0.0, 0.0)
    assert found.no_decay and all(
        leaf.endswith(("scale", "bias")) for leaf in found.no_decay
    )
    assert "norm.scale" in found.no_decay
    assert list(found.open) == ["lr"] and "linear" in found.open["lr"]
