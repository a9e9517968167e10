"""Workers: an engine made of other engines, each in its own process, here or on other machines.

Ray starts and restarts the processes and moves requests and completions; this package decides which request goes where.
Only `cluster` imports Ray, when workers are asked for.
"""
