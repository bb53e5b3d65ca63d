"""Numbers of the report in words."""

import pytest
from recorded import mechanism, record

from dp_transformers.reports.certificate import read
from dp_transformers.reports.words import percent, run_table, up


@pytest.mark.parametrize(
    ("value", "said"),
    [(7.9961, "7.997"), (7.996, "7.996"), (8.0, "8"), (0.00012345, "0.0001235"), (123456.7, "123500"), (None, "∞")],
)
def test_what_is_promised_is_rounded_up(value, said):
    assert up(value) == said


@pytest.mark.parametrize(("share", "said"), [(0.07, "7%"), (0.01, "1%"), (0.3012, "30.2%"), (1.0, "100%")])
def test_a_share_is_rounded_up_but_not_for_what_floats_add(share, said):
    assert percent(share) == said


@pytest.mark.parametrize(
    ("steps", "planned", "said"),
    [(3, 8, "3 of 8 planned"), (8, 8, "8 of 8 planned"), (10, 8, "8 of 8 planned; 2 were taken besides (lost in a restart, say) and count too"), (3, None, "3")],
)  # fmt: skip
def test_steps_are_compared_with_the_plan(tmp_path, steps, planned, said):
    record(tmp_path, steps=steps, how=mechanism(steps=planned))
    assert dict(run_table(read(tmp_path)["runs"][0]))["Steps"] == said
