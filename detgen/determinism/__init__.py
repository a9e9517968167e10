"""`detgen verify-determinism`: tries to break the contract, audits finished runs, shows the probe.

The engine is driven through its public API. Knows neither the command line nor how results look; `report` alone
knows rich, and is imported by the command line only.
"""
