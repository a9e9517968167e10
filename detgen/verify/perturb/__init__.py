"""`detgen verify-determinism`: generates under perturbed settings and compares every bit with a reference.

Axes, the covering array of their values, running under a setting, comparing.
"""
