"""`detgen report`: one page that shows what a run did, drawn from its output folder.

Reads what is there and computes nothing again: whether a run's tokens are what the model gives is for the audit.
"""
