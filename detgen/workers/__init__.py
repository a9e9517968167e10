"""Workers: an engine that is made of others, each in a process of its own, here or on other machines.

Ray starts and restarts the processes and moves requests and completions; which request goes where is decided here. Ray
is imported in `cluster` alone, when workers are asked for.
"""
