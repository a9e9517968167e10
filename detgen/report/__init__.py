"""`detgen report`: one page that shows what a run did, drawn from its output folder.

It reads the folder and recomputes nothing; whether the tokens are what the model gives is for the audit.
"""
