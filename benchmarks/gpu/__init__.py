"""The stages of gpu_suite.py: the GPU itself, the vendor's kernels, and detgen's.

`stages` lists them. Each is a module whose `measure` runs in a process of its own and writes results to a `Notebook`
at once; `running` starts the processes and keeps what they wrote.
"""
