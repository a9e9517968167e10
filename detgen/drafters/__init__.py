"""Drafters propose tokens, which the target verifies. All give the same output; they differ in cost and acceptance."""
