"""`detgen verify-determinism`: tries to break the contract, audits finished runs, shows the probe.

The engine is driven through its public API. Knows neither the command line nor how results look; `report` alone
knows rich, and is imported by the command line only.
"""

from __future__ import annotations


class CheckError(ValueError):
    """What cannot be checked, audited or replayed; the message names it and the remedy."""
