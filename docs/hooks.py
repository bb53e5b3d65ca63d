"""What docstrings say in the manner of transformers, shown in the manner of this site."""

import re


def on_page_content(html, **_):
    html = re.sub(r"\[(<code>)~?(?:\w+\.)*(\w+)(</code>)\]", r"\1\2\3", html)  # [`~transformers.Trainer`]
    html = re.sub(r":(?:mod|class|func|meth|attr):(?=<code>)", "", html)
    return html.replace("Example::", "Example:")
