"""The former names of what is in `screen` and `progress`, for those that have not moved yet."""

from detgen.show.progress import open_display
from detgen.show.screen import Screen, clock

PLAIN_INTERVAL = 10.0
__all__ = ["PLAIN_INTERVAL", "Screen", "clock", "open_display"]
