"""`detgen verify-determinism`: generate under perturbed settings and compare every bit with a reference.

Axes, the covering array of their values, generation under a setting, and comparison.
"""
