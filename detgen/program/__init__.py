"""What a pass does: a program of typed steps on buffers of rows, checked when it is built.

It knows shapes and number formats, but no models, devices or requests.
"""
