"""Tables in pages that are written by hand: each follows a mark with its name, and ends at the next empty line."""

from __future__ import annotations

import re
from collections.abc import Sequence


def with_table(page: str, name: str, lines: Sequence[str]) -> str:
    """``page`` with these lines in the place of the table that follows ``<!-- table: name -->``.

    Raises:
        ValueError: there is no such place in the page, or more than one.
    """
    place = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(?=\n\n|\n?\Z)", re.S)
    page, places = place.subn(lambda found: found[1] + "\n".join(lines), page)
    if places != 1:
        raise ValueError(f"a page needs one place for its table, '<!-- table: {name} -->', and has {places}.")
    return page
