"""What differs, explained: the smallest setting, the first module, and a file that replays it.

Takes what the check found, and runs the check again on smaller settings and with hooks on the modules.
"""
