"""Train state, and the training, evaluation and forward steps."""
