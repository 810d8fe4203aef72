"""Train state, and the steps that change it."""
