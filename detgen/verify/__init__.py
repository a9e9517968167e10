"""Whether what detgen writes is what it must be.

`replay`: from prompts, parameters and token ids, the lines must be these. `perturb`: whatever the setting, the bits
must be these. `explain`: what differs, and where it comes from. None of them knows how results look.
"""
