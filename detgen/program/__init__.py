"""What a pass does: a program of typed steps on buffers of rows, checked when it is built.

Knows shapes and number formats; knows no models, no devices and no requests.
"""
