"""Numbers of the report in words."""

import pytest

from dp_transformers.reports.words import percent, up


@pytest.mark.parametrize(
    ("value", "said"),
    [(7.9961, "7.997"), (7.996, "7.996"), (8.0, "8"), (0.00012345, "0.0001235"), (123456.7, "123500"), (None, "∞")],
)
def test_what_is_promised_is_rounded_up(value, said):
    assert up(value) == said


@pytest.mark.parametrize(("share", "said"), [(0.07, "7%"), (0.01, "1%"), (0.3012, "30.2%"), (1.0, "100%")])
def test_a_share_is_rounded_up_but_not_for_what_floats_add(share, said):
    assert percent(share) == said
