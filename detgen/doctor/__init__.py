"""What this machine has for detgen and what it lacks, each with the command that mends it."""

from __future__ import annotations

from detgen.doctor.examining import Finding, examine

__all__ = ["Finding", "examine"]
