"""Explain a difference: the smallest setting, the first module, and a file that replays it.

Takes what the check found and repeats it under smaller settings and with hooks on the modules.
"""
