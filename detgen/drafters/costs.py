"""What rounds cost, as far as their passes go."""

from __future__ import annotations

import math

from detgen.kernels.pass_cost import PassCost, attention_area


class Costs:
    """Predicts the seconds of a round's canonical passes.

    Args:
        cost: of a canonical pass.
        most_rows: most rows of one; a larger round takes several.
    """

    def __init__(self, cost: PassCost, most_rows: int) -> None:
        self._cost = cost
        self._most_rows = most_rows

    def seconds(self, rows: float, width: int, keys: float) -> float:
        """Those of a round.

        Args:
            rows: of its passes.
            width: rows of the longest window.
            keys: tokens of the sequences.
        """
        passes = math.ceil(rows / (self._most_rows // width * width))  # a window is not divided
        return passes * self._cost.predict(rows / passes, attention_area(rows, keys) / passes)

    def alone(self, count: int, keys: float) -> float:
        """Those of a token, if nothing is drafted for so many sequences."""
        return max(self.seconds(count, 1, keys), 1e-9) / count

    @property
    def row(self) -> float:
        """Those that one more row takes, with its tokens' choice."""
        return sum(self._cost.slopes())
