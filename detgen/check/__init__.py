"""`detgen verify-determinism`: generates under perturbed settings and compares every bit with a reference.

Axes, the covering array of their values, running under a setting, comparing. Knows neither the command line nor how
results look.
"""
