"""Texts that would take effect if a page, a template or a terminal took them for its own."""

HOSTILE = [
    "<script>document.title = 'owned'</script>",
    "</script></style></title></pre></bdi></table></svg><script>document.title = 'owned'</script>",
    "<svg onload=\"document.title = 'owned'\"><style>* { display: none }</style></svg>",
    "\"><img src=x onerror=\"document.title = 'owned'\"> ' autofocus onfocus='document.title = 1'",
    '"; } * { display: none; background: url(https://example.org/) } /*',
    "--> ]]> <!-- <![CDATA[ &lt;b&gt; &#60;b&#62; &amp;",
    "{{ 7 * 7 }} {% include 'page.css' %} {# gone #}",
    "\x00\x07\x08\x1b[2J\x1b]0;owned\x07\x7f\x85\x9b31m",
    "\u202egnp.exe\u202c \u2066a\u2067b\u2069 \u200b\u2028\u2029\ufeff\U000e0041",
    "\ud800 \udfff",
    "a" * 300_000,
]
ALL = " ".join(HOSTILE[:-1])
