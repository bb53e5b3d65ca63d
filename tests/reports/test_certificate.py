"""The certificate of a folder, and what is found out when it or the ledger is changed."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from recorded import DATA, DELTA, mechanism, record

from dp_transformers import compute_epsilon
from dp_transformers.mechanism.sampling import CyclicPoissonSampling, FixedOrderSampling, RandomAllocationSampling
from dp_transformers.reports import certificate
from dp_transformers.reports.certificate import CERTIFICATE_NAME, CertificateError, disagreements, read
from dp_transformers.reports.findings import Report, look
from dp_transformers.step.ledger import LEDGER_NAME, Ledger, PrivacyStateError

pytestmark = pytest.mark.halved


def lines_of(folder):
    return (folder / LEDGER_NAME).read_bytes().splitlines(keepends=True)


def write_lines(folder, lines):
    (folder / LEDGER_NAME).write_bytes(b"".join(lines))


def rewrite(folder, change):
    content = json.loads((folder / CERTIFICATE_NAME).read_text())
    change(content)
    (folder / CERTIFICATE_NAME).write_text(json.dumps(content))


def faults(folder):
    return disagreements(folder, read(folder))


def test_an_honest_run(tmp_path):
    record(tmp_path)
    said = read(tmp_path)
    assert faults(tmp_path) == []
    assert (said["schema"], said["version"]) == ("dp-transformers/privacy", 1)
    assert said["private"] is True and said["verified"] is True and said["not_private_because"] == []
    assert said["total"]["epsilon"] == compute_epsilon(1.0, 0.05, 20, DELTA) and said["total"]["steps"] == 20
    assert said["total"]["relation"] == "add_or_remove_one" and said["total"]["delta"] == DELTA
    (run,) = said["runs"]
    assert run["mechanism"] == mechanism().to_dict() and run["num_examples"] == 1000 and run["data"] == DATA
    assert run["software"]["torch"] == "2.13.0" and run["also_released"][0]["covered"] is False
    size, digest = Ledger(tmp_path).digest()
    assert said["ledger"] == {"file": LEDGER_NAME, "lines": 21, "bytes": size, "sha256": digest}


def test_two_runs_in_one_folder_add_up(tmp_path):
    record(tmp_path, run_id="a1")
    record(tmp_path, run_id="b2", how=mechanism(sigma=2.0))
    said = read(tmp_path)
    assert faults(tmp_path) == [] and [run["run"] for run in said["runs"]] == ["a1", "b2"]
    first, second = (run["epsilon"] for run in said["runs"])
    both = mechanism().epsilon(DELTA, executed=[Counter({mechanism().at(0): 20}), Counter({mechanism(2.0).at(0): 20})])
    assert said["total"]["epsilon"] == both and max(first, second) < both < first + second
    assert second == compute_epsilon(2.0, 0.05, 20, DELTA)


@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.5, 1.0])
def test_a_delta_at_which_a_row_could_be_published_is_refused(tmp_path, delta):
    """At δ = 1/N nearly no noise has an epsilon of 0."""
    record(tmp_path)
    before = (tmp_path / CERTIFICATE_NAME).read_bytes()
    with pytest.raises(ValueError, match=r"delta.*(not smaller than 1/N = 0.001|must be above 0)"):
        certificate.write(tmp_path, delta=delta)
    with pytest.raises(ValueError, match="delta"):
        _ = Report([look(tmp_path)], delta=delta).certificate
    assert (tmp_path / CERTIFICATE_NAME).read_bytes() == before
    rewrite(tmp_path, lambda content: content.update(delta=delta))
    assert faults(tmp_path)


def test_a_resumed_run_counts_every_part(tmp_path):
    record(tmp_path, steps=12, verified=False)
    record(tmp_path, first=8, steps=12)
    said = read(tmp_path)
    assert said["total"]["steps"] == 24 and len(said["runs"]) == 1 and faults(tmp_path) == []
    assert said["total"]["epsilon"] == compute_epsilon(1.0, 0.05, 24, DELTA)
    assert said["verified"] is False, "as its first part"


def test_killed_in_the_middle(tmp_path):
    record(tmp_path, steps=6)
    record(tmp_path, first=6, steps=3, certified=False)
    with open(tmp_path / LEDGER_NAME, "ab") as file:
        file.write(b'{"run": "a1", "st')
    found = faults(tmp_path)
    assert "goes on for 5 lines after privacy.json was written: the training was killed" in found[0]
    assert any("total.steps = 6, by the ledger it is 10" in fault for fault in found), "the torn line counts"
    record(tmp_path, first=9, steps=1)
    assert faults(tmp_path) == [] and read(tmp_path)["total"]["steps"] == 11


def test_what_is_not_private_says_so(tmp_path):
    record(tmp_path, run_id="a1")
    record(tmp_path, run_id="b2", not_private_because=["dp_seed=1: draws and noise can be reproduced"], private=False)
    text = (tmp_path / CERTIFICATE_NAME).read_text()
    said = json.loads(text, parse_constant=pytest.fail)
    assert said["private"] is False and said["not_private_because"] == ["dp_seed=1: draws and noise can be reproduced"]
    assert said["total"]["epsilon"] is None and [run["private"] for run in said["runs"]] == [True, False]
    assert said["runs"][0]["epsilon"] is not None and said["runs"][1]["epsilon"] is None and faults(tmp_path) == []
    record(tmp_path / "silent", how=mechanism(sigma=0.0))
    said = read(tmp_path / "silent")
    assert said["private"] is False and said["not_private_because"] == ["noise_multiplier=0: no noise is added"]
    assert said["total"]["epsilon"] is None and faults(tmp_path / "silent") == []


def test_rows_of_one_person(tmp_path):
    record(tmp_path, how=mechanism(rows=3))
    total = read(tmp_path)["total"]
    assert total["max_examples_per_person"] == 3
    assert total["epsilon_per_person"] == mechanism().epsilon(DELTA, rows=3) > 2 * total["epsilon"]


@pytest.mark.parametrize("sampling", [CyclicPoissonSampling(1000, 50, 5), RandomAllocationSampling(1000, 20)])
def test_rows_of_one_person_that_have_different_turns_have_no_bound(tmp_path, sampling):
    record(tmp_path, how=mechanism(sigma=4.0, rows=3))
    record(tmp_path, run_id="b2", how=replace(mechanism(sigma=4.0), sampling=sampling))
    said = read(tmp_path)
    assert said["private"] and said["total"]["epsilon"] > 0 and said["total"]["epsilon_per_person"] is None
    assert [run["epsilon_per_person"] is None for run in said["runs"]] == [False, False], "each says for its own rows"
    found = Report([look(tmp_path)])
    assert "For all rows of one person, 3 at most, together nothing is guaranteed." in found.guarantee


@pytest.mark.parametrize("sigma", [1e-7, 1e-300])
def test_noise_that_hides_nothing_is_not_said_to_be_private(tmp_path, sigma):
    record(tmp_path, how=mechanism(sigma=sigma))
    said, found = read(tmp_path), Report([look(tmp_path)])
    assert said["total"]["epsilon"] is None and faults(tmp_path) == []
    for each in (said, said["runs"][0]):
        assert not each["private"] and "epsilon is infinite" in each["not_private_because"][0]
    assert found.guarantee.startswith("This training gives no guarantee of privacy (epsilon is infinite")
    assert found.curve.detection(0.01) == 1


def test_a_draw_that_was_not_finished_counts_and_is_kept(tmp_path):
    record(tmp_path)
    said = certificate.write(tmp_path, unfinished={"a1": 1})
    assert said["total"]["epsilon"] == compute_epsilon(1.0, 0.05, 21, DELTA) and faults(tmp_path) == []
    record(tmp_path, run_id="b2")
    assert [run["steps"] for run in read(tmp_path)["runs"]] == [21, 20] and faults(tmp_path) == []
    rewrite(tmp_path, lambda content: content["runs"][0].update(unfinished_draws=0))
    assert any("runs[0].steps = 21, by the ledger it is 20" in fault for fault in faults(tmp_path))


def test_a_draw_that_was_not_finished_belongs_to_what_was_begun_last(tmp_path):
    """A run whose examples have had one turn goes on with another order, and is stopped in its first draw: somebody
    may have a second turn."""
    how = replace(mechanism(sigma=4.0), sampling=FixedOrderSampling(1000, 50))
    record(tmp_path, how=how, steps=5)
    record(tmp_path, how=how, steps=0)
    said = certificate.write(tmp_path, unfinished={"a1": 1})
    assert said["total"]["steps"] == 6
    assert said["total"]["epsilon"] == compute_epsilon(4.0, 1.0, 2, DELTA) and faults(tmp_path) == []


def test_a_step_taken_out_of_the_ledger(tmp_path):
    record(tmp_path)
    lines = lines_of(tmp_path)
    write_lines(tmp_path, lines[:7] + lines[8:])
    found = faults(tmp_path)
    assert found[0].startswith("line 8 of privacy_ledger.jsonl does not follow from what stands before it")
    assert "a line before line 8 was taken out" in found[0] and len(found) == 2
    assert "total.steps = 20, by the ledger it is 19" in found[1]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_ledger_cut_off_at_the_end(tmp_path, cut):
    record(tmp_path)
    write_lines(tmp_path, lines_of(tmp_path)[:-cut])
    found = faults(tmp_path)
    assert f"was cut off by {cut} lines after privacy.json was written" in found[0], "the chain is whole"
    assert any("by the ledger it is" in fault for fault in found)


def test_a_chain_that_was_made_anew(tmp_path):
    """All digests are right, those of privacy.json are not."""
    record(tmp_path)
    said = (tmp_path / CERTIFICATE_NAME).read_text()
    (tmp_path / LEDGER_NAME).unlink()
    (tmp_path / CERTIFICATE_NAME).unlink()
    record(tmp_path, how=mechanism(sigma=3.0))
    (tmp_path / CERTIFICATE_NAME).write_text(said)
    with pytest.raises(PrivacyStateError, match="was changed in its last line, or in all of its digests, after"):
        certificate.write(tmp_path)
    assert (tmp_path / CERTIFICATE_NAME).read_text() == said
    assert Ledger(tmp_path).chain().broken_at is None
    assert "was changed in its last line, or in all of its digests, after" in faults(tmp_path)[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c["total"].update(epsilon=c["total"]["epsilon"] * 0.9), "total.epsilon"),
        (lambda c: c["total"].update(steps=2), "total.steps"),
        (lambda c: c["total"].update(relation="replace_one"), "total.relation"),
        (lambda c: c.update(private=False), "private"),
        (lambda c: c.update(verified=1), "verified"),
        (lambda c: c["runs"][0].update(epsilon=None), "runs[0].epsilon"),
        (lambda c: c["runs"][0]["mechanism"]["noise"].update(noise_multiplier=1.0001), "noise_multiplier"),
        (lambda c: c["runs"][0]["data"].update(digest="hmac-sha256:0"), "data.digest"),
        (lambda c: c["runs"][0]["also_released"].clear(), "also_released"),
        (lambda c: c["runs"][0].update(extra=1), "runs[0].extra"),
        (lambda c: c["runs"].append(c["runs"][0]), "runs.length"),
        (lambda c: c["ledger"].update(sha256="0" * 64), "SHA-256"),
    ],
)
def test_a_changed_certificate(tmp_path, change, named):
    record(tmp_path)
    rewrite(tmp_path, change)
    assert any(named in fault for fault in faults(tmp_path))


@pytest.mark.parametrize("draws", [-1, -19, -20])
def test_unfinished_draws_take_no_steps_away(tmp_path, draws):
    """They are what a certificate may say beside the ledger, which is untouched here."""
    record(tmp_path)
    honest, forged = read(tmp_path)["total"]["epsilon"], certificate.build(tmp_path, unfinished={"a1": draws})
    (tmp_path / CERTIFICATE_NAME).write_text(json.dumps(forged))
    with pytest.raises(CertificateError, match="must not be negative"):
        read(tmp_path)
    found = Report([look(tmp_path)])
    assert found.certificate["total"]["epsilon"] == honest and "must not be negative" in found.faults[0]
    assert found.guarantee.startswith("Nothing is guaranteed")
