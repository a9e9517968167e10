"""Checks of whether what detgen writes is right.

`replay` derives a run's lines from prompts, parameters and token ids. `perturb` generates under many settings, whose
bits must be the same. `explain` finds what differs and where it comes from. None of them knows how results look.
"""
