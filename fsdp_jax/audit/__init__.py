"""Audit of compiled steps: compares their collectives and shardings with the plan."""

from fsdp_jax.audit._budget import BudgetError as BudgetError
from fsdp_jax.audit._budget import assert_budget as assert_budget
