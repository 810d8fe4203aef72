"""AdamW's settings on the command line, and those of a Megatron checkpoint."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.errors import facts

from bridge.megatron import AdamSettings
from fsdp_jax._tree import named_leaves
from fsdp_jax.cli._adam import settings_of_import, stored_settings
from fsdp_jax.cli._optimizer import OptimizerConfig
from fsdp_jax.cli._train_config import config_of, merge_options

PARAMS = {"norm": {"scale": jnp.ones(4)}, "w": jnp.full((3, 4), 2.0)}
LR, DECAY = 0.1, 0.5
# float32, of one program and another.
RTOL = 1e-5


def config(**options) -> OptimizerConfig:
    return OptimizerConfig(
        **{"lr": LR, "weight_decay": DECAY, "no_decay": "", **options}
    )


def two_steps(options):
    """Parameters after two steps with gradients of one, then of two."""
    tx = options.make()
    params, state = PARAMS, tx.init(PARAMS)
    for size in (1.0, 2.0):
        grads = jax.tree.map(lambda p, size=size: jnp.full_like(p, size), params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def by_hand(options):
    """The same in float64: decoupled decay, bias correction, a clipped norm."""
    found = {}
    count = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    for name, leaf in named_leaves(PARAMS):
        w, mu, nu = np.asarray(leaf, np.float64), 0.0, 0.0
        decay = 0.0 if name.endswith("scale") and options.no_decay else DECAY
        for step, g in enumerate((1.0, 2.0), start=1):
            norm = g * np.sqrt(count)
            g *= min(1.0, options.clip / norm) if options.clip else 1.0
            mu = options.b1 * mu + (1 - options.b1) * g
            nu = options.b2 * nu + (1 - options.b2) * g**2
            first, second = mu / (1 - options.b1**step), nu / (1 - options.b2**step)
            w = w - LR * (first / (np.sqrt(second) + options.eps) + decay * w)
        found[name] = w
    return found


@pytest.mark.parametrize(
    "options",
    [
        config(b2=0.999),
        config(b1=0.8, b2=0.95, eps=0.1),
        config(b2=0.999, clip=5.0),
        config(b2=0.999, no_decay="*.bias,norm.scale"),
    ],
    ids=str,
)
def test_each_setting_does_what_it_says(options):
    params, state = two_steps(options)
    for name, want in by_hand(options).items():
        np.testing.assert_allclose(dict(named_leaves(params))[name], want, rtol=RTOL)
    plain = OptimizerConfig().make().init(PARAMS)
    assert [n for n, _ in named_leaves(state)] == [n for n, _ in named_leaves(plain)]


KNOWN = AdamSettings(
    lr=3e-4,
    **{"b1": 0.9, "b2": 0.95, "eps": 1e-7, "weight_decay": 0.2, "clip_grad": 1.0},
    no_decay=("norm.scale", "layers.norm.scale"),
)


def test_a_run_of_megatron_goes_on_with_its_settings():
    metadata = {"optimizer": "adamw", "adam": stored_settings(KNOWN)}
    known = settings_of_import(metadata, {})
    config = merge_options({"b1": 0.8}, {}, {"tokenizer": "bytes", **known})
    assert config.optimizer == OptimizerConfig(
        lr=3e-4,
        weight_decay=0.2,
        **{"b1": 0.8, "b2": 0.95, "eps": 1e-7, "clip": 1.0},
        no_decay="norm.scale,layers.norm.scale",
    )


def test_a_setting_that_did_not_come_along_is_asked_for():
    told = {"lr": "cosine to 0.0", "no_decay": "a rule of its own"}
    known = AdamSettings(**{**vars(KNOWN), **dict.fromkeys(told), "open": told})
    metadata = {"optimizer": "adamw", "adam": stored_settings(known)}
    with pytest.raises(ValueError, match=facts("--lr", "0.0", "--no-decay")):
        settings_of_import(metadata, {})
    with pytest.raises(ValueError, match=facts("--no-decay")):
        settings_of_import(metadata, {"lr": 1e-3})
    known = settings_of_import(metadata, {"lr": 1e-3, "no_decay": ""})
    assert known["b2"] == 0.95 and "lr" not in known


def test_an_import_without_settings_asks_for_all():
    with pytest.raises(
        ValueError, match=facts("--lr", "--weight-decay", "--b2", "--no-decay")
    ):
        settings_of_import({"optimizer": "adamw"}, {})


@pytest.mark.parametrize("wrong", [{"b1": 1.0}, {"b2": -0.1}, {"clip": -1.0}])
def test_a_setting_out_of_range_is_refused(wrong):
    with pytest.raises(
        ValueError, match=facts(f"--{next(iter(wrong)).replace('_', '-')}")
    ):
        config_of({"tokenizer": "bytes", **wrong})
