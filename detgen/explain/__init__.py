"""What differs, explained: the smallest setting, the first module, and a file that replays it.

Knows the check, whose failures it explains, and how modules are hooked.
"""
