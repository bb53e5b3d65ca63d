"""The numbers of a certificate in words: a paragraph for those who decide, and a table for those who check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import ROUND_CEILING, Context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .recompute import PrivacyCurve

# the difference between neighbouring data sets
CHANGES = {
    "add_or_remove_one": "adding or removing one {} of the training data",
    "replace_special": "replacing one {} of the training data by an empty one",
    "replace_one": "replacing one {} of the training data by another",
}


def noun(certificate: Mapping[str, Any]) -> str:
    """Return the word for what is protected: "row" or "person"."""
    return certificate["total"].get("protects", "row")


def _change(total: Mapping[str, Any]) -> str:
    return CHANGES[total["relation"]].format(total.get("protects", "row"))


def paragraph(certificate: Mapping[str, Any], curve: PrivacyCurve) -> str:
    """Return the guarantee in sentences that need no knowledge of the field."""
    if not certificate["private"]:
        reasons = "; ".join(certificate["not_private_because"])
        return f"This training gives no guarantee of privacy ({reasons}). Do not claim one for any model from it."
    total = certificate["total"]
    delta, k, one = total["delta"], total["max_examples_per_person"], noun(certificate)
    found = up(100 * curve.detection(0.01), 3)
    sentences = [
        f"The training was differentially private with ε = {up(total['epsilon'])} at δ = {delta:g}, for "
        f"{_change(total)}: everything that was released would have come out with nearly the same "
        f"probability without any one of the {one}s.",
        f"Suppose that somebody has the model, every intermediate result and all other {one}s, and wrongly accuses 1 "
        f"of 100 {one}s that were not used: of 100 {one}s that were used they find at most {found}"
        ", where guessing finds 1.",
    ]
    if one == "person":
        sentences.append("All rows of a person are protected together, however many there are.")
    elif k == 1:
        sentences.append("Somebody who has several rows in the data is protected less than somebody who has one.")
    else:
        sentences.insert(0, _person(total))
        sentences.append(_found_person(total))
    runs = certificate["runs"]
    if len(runs) > 1:
        sentences.append(f"This covers all {len(runs)} trainings together, {total['steps']} steps.")
    uncovered = [each["what"] for each in also_released(certificate) if not each["covered"]]
    if uncovered:
        sentences.append(f"It does not cover what else was shown: {'; '.join(uncovered)}.")
    if not certificate["verified"]:
        sentences.append("The program was not checked against one example at a time before the first step.")
    return " ".join(sentences)


def _person(total: Mapping[str, Any]) -> str:
    k, epsilon = total["max_examples_per_person"], total["epsilon_per_person"]
    if epsilon is None:
        return f"For all rows of one person, {k} at most, together nothing is guaranteed."
    at = f"ε = {up(epsilon)} at δ = {total['delta']:g}"
    return f"All rows of one person, {k} at most, are protected together with {at}."


def _found_person(total: Mapping[str, Any]) -> str:
    """Return the bound on detection of a person. It is looser than that for rows, since it follows from one point of
    the privacy curve."""
    k, epsilon, delta = total["max_examples_per_person"], total["epsilon_per_person"], total["delta"]
    if epsilon is None:
        return f"For a person with {k} rows, that number of rows that are found does not hold."
    import numpy as np

    from .recompute import PrivacyCurve

    found = up(100 * PrivacyCurve(np.array([epsilon]), np.array([delta])).detection(0.01), 3)
    return f"Of 100 persons with {k} rows each they find at most {found}, which follows from ε and δ alone."


def epsilons(total: Mapping[str, Any]) -> list[tuple[str, float | None]]:
    """Return names and values of ε, first for a person if a person may have several rows."""
    k = total["max_examples_per_person"]
    person = [(f"ε for all rows of one person ({k} at most)", total["epsilon_per_person"])] if k > 1 else []
    return [*person, (f"ε for one {total.get('protects', 'row')}", total["epsilon"])]


def table(certificate: Mapping[str, Any], curve: PrivacyCurve) -> list[tuple[str, str]]:
    """Return names and values of the table for all trainings together."""
    total = certificate["total"]
    rows = [
        ("Private", _private(certificate)),
        *((name, up(epsilon, 6)) for name, epsilon in epsilons(total)),
        ("δ", f"{total['delta']:g}"),
        ("Neighbouring data sets", f"{_change(total)} ({total['relation']})"),
        ("Most rows of one person", "any" if noun(certificate) == "person" else str(total["max_examples_per_person"])),
        ("Accountant", total["accountant"]),
        ("Steps", str(total["steps"])),
        ("Trainings", str(len(certificate["runs"]))),
        ("Self-check", "passed before the first step" if certificate["verified"] else "NOT done for every training"),
    ]
    if certificate["private"] is None:
        return rows
    from .recompute import ceilings  # NumPy comes with it, and the command line rounds without

    detections = ceilings(curve).items()
    return rows + [
        (f"Largest detection rate of one {noun(certificate)} at {percent(a)} false alarms", percent(d))
        for a, d in detections
    ]


def _private(summary: Mapping[str, Any]) -> str:
    if summary["private"] is None:
        return "unknown: certificate, ledger and signature do not agree"
    return "yes" if summary["private"] else "NO: " + "; ".join(summary["not_private_because"])


def run_table(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of the table for one training."""
    model, data, code = (run.get(name) or {} for name in ("model", "data", "code"))
    return [
        ("Began or went on last", run["time"] or "not recorded"),
        *((f"{name}, spent", up(epsilon, 6)) for name, epsilon in epsilons(run)),
        ("δ and accountant", f"{run['delta']:g}, {run['accountant']}"),
        ("Target ε", "none" if run["target_epsilon"] is None else f"{run['target_epsilon']:g}"),
        ("Steps", _steps(run)),
        (f"{run.get('protects', 'row').capitalize()}s (N)", f"{run['num_examples']:,}"),
        *((part.capitalize(), _values(run["mechanism"][part])) for part in ("sampling", "clipping", "noise")),
        ("Also in each step", "; ".join(map(_values, run["mechanism"]["releases"])) or "nothing"),
        ("Self-check", "passed before the first step" if run["verified"] else "NOT done"),
        ("Private", _private(run)),
        ("Data digest", _data(data)),
        *(("Data digest, earlier", f"{_data(each)}, key {each.get('key')}") for each in data.get("earlier", ())),
        ("Key of the digest", data.get("key") or "none"),
        ("Model", _model(model)),
        ("Code", _code(code)),
        ("Software", ", ".join(f"{name} {version}" for name, version in (run["software"] or {}).items() if version)),
        ("Also shown", _released(run["also_released"] or ())),
    ]


def _data(data: Mapping[str, Any]) -> str:
    return data.get("digest") or f"none: {data.get('no_digest_because', 'not recorded')}"


def also_released(certificate: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the further releases of all trainings, each once."""
    shown = [each for run in certificate["runs"] for each in run["also_released"] or ()]
    return (each for i, each in enumerate(shown) if each not in shown[:i])


def up(value: float | None, digits: int = 4) -> str:
    """Round up to ``digits`` significant digits, as a promised bound must be; None is infinite."""
    if value is None:
        return "∞"
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(f"{value:.12g}")  # 7.000000000000001 is 7
    return f"{rounded:f}"


def percent(share: float) -> str:
    return f"{up(100 * share, 3)}%"


def _steps(run: Mapping[str, Any]) -> str:
    taken, planned, draws = run["steps"], run["mechanism"]["steps"], run["unfinished_draws"]
    parts = [f"{taken}" if planned is None else f"{taken} of {planned} planned"]
    if planned is not None and taken > planned:
        parts = [
            f"{planned} of {planned} planned",
            f"{taken - planned} were taken besides (lost in a restart, say) and count too",
        ]
    if draws:
        parts.append(f"{draws} of all were drawn and not taken")
    return "; ".join(parts)


def _values(part: Mapping[str, Any]) -> str:
    return ", ".join(
        str(value) if name in ("kind", "name") else f"{name} {_short(value)}" for name, value in part.items()
    )


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _model(model: Mapping[str, Any]) -> str:
    if not model:
        return "not recorded"
    of = f" ({model['name']})" if model.get("name") else ""
    return f"{model['class']}{of}, {model['trainable']:,} of {model['parameters']:,} parameters trained"


def _code(code: Mapping[str, Any]) -> str:
    if not code:
        return "not in a git repository"
    return f"{code['script']}, git {code['git_commit'][:12]}" + (", with changes" if code["has_changes"] else "")


def _released(each: Any) -> str:
    shown = [f"{one['what']} ({'covered' if one['covered'] else 'NOT covered'} by ε)" for one in each]
    return "; ".join(shown) or "nothing"
