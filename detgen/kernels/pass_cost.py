"""The cost of a pass and of choosing its tokens: seconds by rows and attention area, fitted during the run."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from detgen.program.operands import PAGE

# Cost, in places, of the attention of a pass, and of 64 more keys.
_CALL, _KEYS = 15, 2


_Numbers = TypeVar("_Numbers", float, np.ndarray)


def attention_area(rows: _Numbers, keys: _Numbers) -> _Numbers:
    """Cost of the attention of passes, in places: `rows` rows, of windows that read `keys` keys together."""
    return _CALL + rows + _KEYS * keys / PAGE


class PassCost:
    """Least-squares fit of seconds to rows and `attention_area`, in which old passes fade.

    It minimizes relative errors: passes of few rows do not lie on the line of passes of many, which compute more.
    """

    _FADE = 0.98

    def __init__(self) -> None:
        self._count = self._n = self._x = self._y = self._z = 0.0
        self._xx = self._xy = self._xz = self._zz = self._zy = 0.0
        self._chosen = self._choosing = 0.0
        self._line: tuple[float, float, float] | None = None  # seconds without rows, by row and by area, once asked for

    def update(self, rows: int, seconds: float, area: float | None = None) -> None:
        """Add a pass; one much slower than expected (the machine paused) counts as twice the expected time."""
        area = rows if area is None else area
        if self._count > 3:
            seconds = min(seconds, 2 * self._pass(rows, area))
        f, w = self._FADE, max(seconds, 1e-6) ** -2
        self._line = None
        self._count = f * self._count + 1
        self._n = f * self._n + w
        self._x = f * self._x + w * rows
        self._y = f * self._y + w * seconds
        self._z = f * self._z + w * area
        self._xx = f * self._xx + w * rows * rows
        self._xy = f * self._xy + w * rows * seconds
        self._xz = f * self._xz + w * rows * area
        self._zz = f * self._zz + w * area * area
        self._zy = f * self._zy + w * area * seconds

    def choose(self, rows: int, seconds: float) -> None:
        """Add the time taken to choose the tokens of some rows; a pause counts as in `update`."""
        if self._chosen > 3 * rows:
            seconds = min(seconds, 2 * self._choice * rows)
        self._chosen = self._FADE * self._chosen + rows
        self._choosing = self._FADE * self._choosing + seconds

    @property
    def _choice(self) -> float:
        """Seconds per row for choosing."""
        return self._choosing / self._chosen if self._chosen else 0.0

    def slopes(self) -> tuple[float, float]:
        """Seconds per additional row (including its choice) and per additional unit of area, at least 0 each."""
        by_row, by_area = self._slopes()
        return by_row + self._choice, by_area

    def _slopes(self) -> tuple[float, float]:
        """Slopes of passes, without choosing."""
        return self._fitted()[1:]

    def _fitted(self) -> tuple[float, float, float]:
        """Seconds of a pass without rows, per row and per unit of area."""
        if self._line is None:
            by_row, by_area = self._fit()
            self._line = (self._y - by_row * self._x - by_area * self._z) / (self._n or 1.0), by_row, by_area
        return self._line

    def _fit(self) -> tuple[float, float]:
        """The slopes that fit best."""
        n = self._n or 1.0
        xx, zz = self._xx - self._x * self._x / n, self._zz - self._z * self._z / n
        xy, zy = self._xy - self._x * self._y / n, self._zy - self._z * self._y / n
        xz = self._xz - self._x * self._z / n
        spread = xx > 1e-9 * self._xx
        apart = xx * zz - xz * xz
        if spread and apart > 0.02 * xx * zz:  # else rows and area grew together: attribute everything to the rows
            by_row, by_area = (xy * zz - zy * xz) / apart, (zy * xx - xy * xz) / apart
            if by_row >= 0 and by_area >= 0:
                return by_row, by_area
        return (max(xy / xx, 0.0) if spread else 0.0), 0.0

    def fixed_rows(self) -> float:
        """Return how many rows cost as much as a pass itself, at least 1; very many while all passes were alike."""
        by_row, by_area = self._slopes()
        area = self._z / self._x if self._n else 1.0
        return max(self._pass(0, 0) / max(by_row + by_area * area, 1e-9), 1.0)

    def predict(self, rows: float, area: float | None = None, chosen: float | None = None) -> float:
        """Predict the seconds of a pass and of choosing its tokens; 0 before the first update.

        Args:
            rows: rows of the pass.
            area: its attention area; None for the usual area per row.
            chosen: tokens chosen; None for one per row.
        """
        if not self._n:
            return 0.0
        seconds = self._pass(rows, rows * self._z / self._x if area is None else area)
        return seconds + self._choice * (rows if chosen is None else chosen)

    def shares(self, rows: np.ndarray, areas: np.ndarray) -> np.ndarray:
        """Predict each pass's share in the time of all given passes, float64 [passes].

        Args:
            rows: int64 [passes], rows of each.
            areas: float64 [passes], their attention areas.
        """
        rest, by_row, by_area = self._fitted()
        seconds = np.maximum(rest + by_row * rows + by_area * areas, 1e-9) if self._n else rows
        found: np.ndarray = seconds / seconds.sum()
        return found

    def _pass(self, rows: float, area: float) -> float:
        """Seconds of a pass, without choosing."""
        rest, by_row, by_area = self._fitted()
        return max(rest + by_row * rows + by_area * area, 1e-9)
