"""Checks of what this machine has for detgen and what it lacks, with commands to fix it."""

from __future__ import annotations

from detgen.doctor.examining import Finding, examine

__all__ = ["Finding", "examine"]
