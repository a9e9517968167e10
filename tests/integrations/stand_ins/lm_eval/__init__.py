"""Stands in for EleutherAI's harness: what its models are derived from, and no more."""
