"""What a pass costs: seconds as a linear function of its rows, learnt while it runs."""

from __future__ import annotations


class PassCost:
    """Least squares of seconds over rows, in which old passes fade."""

    _FADE = 0.98

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def update(self, rows: int, seconds: float) -> None:
        """Take in one pass. One far slower than expected (a pause of the machine) counts as twice the expected."""
        if self._n > 3:
            seconds = min(seconds, 2 * self.predict(rows))
        f = self._FADE
        self._n = f * self._n + 1
        self._x = f * self._x + rows
        self._y = f * self._y + seconds
        self._xx = f * self._xx + rows * rows
        self._xy = f * self._xy + rows * seconds

    @property
    def slope(self) -> float:
        """Seconds a further row costs, at least 0."""
        spread = self._n * self._xx - self._x * self._x
        if self._n < 2 or spread <= 1e-9 * self._n * self._xx:
            return 0.0
        return max((self._n * self._xy - self._x * self._y) / spread, 0.0)

    def predict(self, rows: float) -> float:
        """Seconds of a pass over `rows` rows; 0 before the first update."""
        if not self._n:
            return 0.0
        slope = self.slope
        return max((self._y - slope * self._x) / self._n + slope * rows, 1e-9)
