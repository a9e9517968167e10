"""detgen as a part of other programs: one file for each, which is imported where that program is there."""
