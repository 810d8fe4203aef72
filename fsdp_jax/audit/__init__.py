"""Audits of a compiled step, against its plan, and of a loss, against one device."""

from fsdp_jax.audit._audit_loss import AuditedLoss as AuditedLoss
from fsdp_jax.audit._audit_loss import audit_loss as audit_loss
from fsdp_jax.audit._audit_step import AuditError as AuditError
from fsdp_jax.audit._audit_step import audit_step as audit_step
from fsdp_jax.audit._budget import BudgetError as BudgetError
from fsdp_jax.audit._budget import assert_budget as assert_budget
from fsdp_jax.audit._report import Audited as Audited
