"""What a step may cost is pinned, and what costs more fails, without a GPU."""

from __future__ import annotations

import jax
import optax
import pytest
from helpers.errors import facts
from helpers.llama import Llama, tokens

import fsdp_jax as fsdp

pytestmark = [pytest.mark.plan, pytest.mark.versions]
GIB = 1 << 30
# Llama-3 8B, one sequence of 4,096 a GPU: the stack is scanned, so that 32 layers
# compile as fast as 4.
LLAMA_8B = Llama(width=4096, mlp=14336, heads=32, layers=32, vocab=128256, pieces=8)


def compiled(gpus, prefetch=1):
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        plan = LLAMA_8B.plan(fsdp.make_mesh(devices=jax.devices()[:1]))
        return fsdp.estimate_step(
            *(plan, LLAMA_8B.loss(prefetch, unroll=2), optax.adamw(1e-3)),
            tokens(gpus, 4096),
            gpus=gpus,
            guide=False,
        )
    finally:
        jax.config.update("jax_disable_most_optimizations", True)


# Golden budgets: about 5 % above what the step costs now.
BUDGETS = {
    8: dict(exposed=0.02, memory=24 * GIB, collectives=None),
    64: dict(exposed=0.015, memory=int(10.5 * GIB), collectives=None),
}


@pytest.fixture(scope="module", params=BUDGETS)
def found(request):
    return compiled(request.param)


def test_8b_stays_within_its_budget(found):
    weights = 8.03e9 * 2
    gpus = found.num_gpus
    sent = {"all-gather": 2.1, "reduce-scatter": 1.05}
    budget = BUDGETS[gpus] | {
        "collectives": {
            op: int(times * weights * (gpus - 1) / gpus) for op, times in sent.items()
        }
    }
    costs = fsdp.audit.assert_budget(found.plan, found.compiled, **budget)
    assert costs["memory"] == found.compiled_bytes
    # The budget is no wider than a tenth: a change that costs more is noticed.
    assert costs["memory"] > 0.9 * budget["memory"]


def test_all_that_is_exceeded_is_listed(found):
    with pytest.raises(
        fsdp.audit.BudgetError,
        match=facts("3 budget(s)", "exposed", "memory", "1.00 GiB", "all-gather"),
    ) as raised:
        fsdp.audit.assert_budget(
            *(found.plan, found.compiled),
            exposed=0.0,
            memory=GIB,
            collectives={"reduce-scatter": 1 << 50},
        )
    assert len(raised.value.over) == 3


def test_a_check_of_nothing_is_refused(found):
    with pytest.raises(ValueError, match=facts("exposed", "memory", "collectives")):
        fsdp.audit.assert_budget(found.plan, found.compiled)
