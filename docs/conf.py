"""How Sphinx builds these pages: `make docs`. They are Markdown, as GitHub shows it, by way of MyST."""

import re

from sphinx.application import Sphinx

project = "detgen"
extensions = ["myst_parser"]
html_theme = "alabaster"
html_theme_options = {"description": "The same bytes every time", "page_width": "1100px", "fixed_sidebar": True}
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}
html_show_sourcelink = False
html_copy_source = False
highlight_language = "none"  # of what is no fenced block
smartquotes = False  # they would make a dash of the -- of an option
myst_heading_anchors = 3  # the anchors of GitHub, which links between pages use


def leave_out_links(app: Sphinx, name: str, text: list[str]) -> None:
    """Keep the words alone of a link to a file outside of docs/, which is no page. `tests/test_docs.py` checks it."""
    text[0] = re.sub(r"\[([^\]]+)\]\(\.\./[^)\s]+\)", r"\1", text[0])


def setup(app: Sphinx) -> None:
    """Register the function above."""
    app.connect("source-read", leave_out_links)
