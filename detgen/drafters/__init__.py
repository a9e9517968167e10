"""Who writes the provisional tokens. All drafters give the same output; they differ in cost and acceptance."""
