"""Config of several residual streams that each part of a layer mixes."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class HyperConnectionsConfig:
    """Residual streams of hyper-connections.

    Attention and MLP each read a weighted sum of the streams, and their output is added
    to all of them, which are mixed by a matrix of which rows and columns sum to 1, or
    are independent.

    Args:
      num_streams: Number of residual streams, at least 2.
      sinkhorn_iters: Number of Sinkhorn-Knopp iterations that normalize the columns,
        and between them the rows, of the matrix.
      eps: Epsilon added to weights and to the sums that divide them.
      independent: Whether the streams are not mixed. The epsilon is added to the
        weights of an output as well then.
      expand_factor: Upper bound of the weights of an output in the streams.

    Raises:
      ValueError: If a field has an invalid value.

    Source: mHC (arXiv:2512.24880); transformers
      `modeling_deepseek_v4.py::DeepseekV4HyperConnection`,
      `modeling_hy_v4.py::HYV4HyperConnection`, for independent ones.
    """

    num_streams: int
    sinkhorn_iters: int = 20
    eps: float = 1e-6
    independent: bool = False
    expand_factor: float = 2.0

    def __post_init__(self):
        """Validates the fields."""
        sizes = ("num_streams", "sinkhorn_iters")
        wrong = wrong_fields(self) or wrong_sizes(self, sizes)
        if not wrong and self.num_streams < 2:
            wrong.append(f"num_streams {self.num_streams}: at least 2")
        if not wrong and self.eps < 0:
            wrong.append(f"eps {self.eps} is negative")
        raise_if("HyperConnectionsConfig", wrong)
