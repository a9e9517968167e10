"""The generic back end: a transformers forward, on functions in C, whose operators are watched."""
