"""The section "Privacy" of model cards."""

import pytest
from recorded import record

from dp_transformers.reports.findings import Report, look
from dp_transformers.reports.pages import add_to, put_into, section
from dp_transformers.step.ledger import Ledger


@pytest.fixture
def card(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n\n# A model\n")
    return tmp_path / "README.md"


def test_one_paragraph_and_one_table(tmp_path, card):
    record(tmp_path / "run", also_released=[{"what": "a|b", "covered": False}])
    add_to(card, tmp_path / "run")
    text = card.read_text()
    assert text.startswith(
        "---\nlicense: mit\n---\n\n# A model\n\n<!-- privacy: begin -->\n## Privacy\n\nThe training was differentially private"
    )
    assert (
        text.count("## Privacy") == 1
        and "| δ | 1e-05 |" in text
        and "| Largest detection rate of one row at 1% false alarms |" in text
    )
    assert all(line.count("|") == 3 for line in text.splitlines() if line.startswith("|"))


def test_the_section_is_put_in_the_place_of_an_older_one(tmp_path, card):
    record(tmp_path / "run", steps=10)
    add_to(card, tmp_path / "run")
    card.write_text(card.read_text() + "\n## Later\n")
    record(tmp_path / "run", first=10, steps=10)
    add_to(card, tmp_path / "run")
    found = Report([look(tmp_path / "run")])
    assert (
        card.read_text()
        == "---\nlicense: mit\n---\n\n# A model\n\n" + section(found.certificate, found.curve) + "\n\n## Later\n"
    )
    put_into(card, r"<!-- privacy: begin -->\1 \g<0><!-- privacy: end -->")
    assert r"\1 \g<0>" in card.read_text()


def test_a_ledger_of_which_lines_are_missing_gives_no_figure(tmp_path, card):
    record(tmp_path / "run")
    path = Ledger(tmp_path / "run").path
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in ([*lines[:4], *lines[-1:]], lines[:4]):  # out of the middle, and off the end
        path.write_bytes(b"".join(kept))
        add_to(card, tmp_path / "run")
        found = Report([look(tmp_path / "run")])
        assert found.faults and section(found.certificate, found.curve) in card.read_text()
        assert "The training was differentially private" not in card.read_text()


def test_no_card_or_no_training(tmp_path, card):
    before = card.read_text()
    add_to(card, tmp_path / "run")
    assert card.read_text() == before
    record(tmp_path / "run")
    add_to(tmp_path / "run" / "README.md", tmp_path / "run")
    assert not (tmp_path / "run" / "README.md").exists()
