"""detgen as a part of other programs: one file for each, imported by that program."""
