"""The stages of gpu_suite.py: what a GPU tells of itself, of the vendor's kernels, and of detgen's.

`stages` lists them. Each is a module whose `measure` runs in a process of its own, and writes down in a `Notebook` what
it finds as it finds it; `running` starts the processes and keeps what they wrote.
"""
