"""Notes of telephone calls, made by rule from public lists of names, towns and occupations.

They read like data that have to be protected and are nobody's, so that a recipe can be tried on them: who called, from
where, about what, and what was done. The lists are Faker's, fetched with pip.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import count, islice

import assets

INSTRUCTION = "Say in a few words what the call was about and what was done."
OPENINGS = (
    "{caller} called from {place} .",
    "{caller} , a {job} in {place} , was on the line .",
    "Call from {place} : {caller} , who works as a {job} .",
    "I spoke to {caller} today , a {job} .",
    "A {job} from {place} , {caller} , rang this morning .",
)
SECOND_PERSONS = (
    "The contract is with {other} .",
    "{other} had taken the order .",
    "The account belongs to {other} , a {job} .",
    "A letter also goes to {other} in {place} .",
    "",
)
TOPICS = {
    "late delivery": (
        "The parcel has not come yet .",
        "Nothing has arrived after three weeks .",
        "The van did not turn up on the day that was agreed .",
        "The shipment is still on its way .",
    ),
    "broken goods": (
        "The lid was cracked when the box was opened .",
        "The machine stopped working on the second day .",
        "Two of the plates were in pieces .",
        "The screen shows nothing but stripes .",
    ),
    "wrong bill": (
        "The amount was charged twice .",
        "The invoice lists items that nobody had ordered .",
        "The sum on the statement is too high .",
        "The discount is missing from the invoice .",
    ),
    "lost password": (
        "The login is refused since Monday .",
        "Nobody remembers how to sign in .",
        "The code for the new phone is not accepted .",
        "The account is locked after three attempts .",
    ),
    "rude staff": (
        "The man in the shop was shouting .",
        "The driver was impolite and slammed the door .",
        "Our colleague hung up in the middle of a sentence .",
        "The tone of the last letter was found offensive .",
    ),
    "cancelled order": (
        "The purchase should be called off .",
        "The goods are no longer wanted .",
        "The subscription has to end this month .",
        "The customer withdraws from the contract .",
    ),
}
OUTCOMES = {
    "refunded": ("We pay the money back .", "The full price will be returned ."),
    "replaced": ("A new one is sent today .", "We exchange it free of charge ."),
    "called back": ("The manager will phone tomorrow .", "I promised to ring again ."),
    "nothing done": ("There was nothing that I could do .", "No action was taken ."),
}


@dataclass(frozen=True)
class CallNote:
    """One note: its words, a tag for each (such as B-PERSON, I-PERSON, O), the facts that it names, with the place in
    the text where they begin, and what it is about."""

    words: list[str]
    tags: list[str]
    facts: dict[str, tuple[str, int]]
    topic: str
    outcome: str

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def summary(self) -> str:
        return f"{self.topic} {self.outcome}"


def call_notes(how_many: int = 5_000, seed: int = 0, short: bool = False) -> list[CallNote]:
    """Make ``how_many`` notes. Short ones name the caller alone."""
    draw = random.Random(seed)
    people, places, jobs = assets.people_places_jobs()
    notes = (_note(draw, people, places, jobs) for _ in count())
    return list(islice((note for note in notes if not short or "other" not in note.facts), how_many))


def _note(draw: random.Random, people: tuple[list[str], list[str]], places: list[str], jobs: list[str]) -> CallNote:
    first_names, last_names = people
    topic, outcome = draw.choice(sorted(TOPICS)), draw.choice(sorted(OUTCOMES))
    sentences = [draw.choice(OPENINGS), draw.choice(SECOND_PERSONS), draw.choice(TOPICS[topic])]
    sentences[1:] = draw.sample(sentences[1:], 2)
    words, tags, facts = [], [], {}
    for word in " ".join([*sentences, draw.choice(OUTCOMES[outcome])]).split():
        slot = word.strip("{}")
        if slot == word:
            filled, kind = word, None
        elif slot in ("caller", "other"):
            filled, kind = f"{draw.choice(first_names)} {draw.choice(last_names)}", "PERSON"
        else:
            filled, kind = draw.choice({"place": places, "job": jobs}[slot]), slot.upper()
        if kind:
            facts.setdefault(slot, (filled, len(" ".join([*words, ""]))))
        parts = filled.split()
        words += parts
        tags += [f"{'I' if i else 'B'}-{kind}" if kind else "O" for i in range(len(parts))]
    return CallNote(words, tags, facts, topic, outcome)


def tagged_words() -> list[dict]:
    """Rows ``{"tokens", "tags"}``: which words are a person, a place or an occupation."""
    return [{"tokens": note.words, "tags": note.tags} for note in call_notes()]


def questions() -> list[dict]:
    """Rows ``{"context", "question", "answers"}`` as in SQuAD, one for each note: the answer is the text of a span."""
    asked = {
        "caller": "Who called?",
        "other": "Who else is named?",
        "place": "Which town?",
        "job": "Which occupation?",
    }
    draw, rows = random.Random(1), []
    for note in call_notes():
        slot = draw.choice(sorted(note.facts))
        answer, start = note.facts[slot]
        answers = {"text": [answer], "answer_start": [start]}
        rows.append({"context": note.text, "question": asked[slot], "answers": answers})
    return rows


def summaries() -> list[dict[str, str]]:
    """Rows ``{"text", "summary"}``, such as "late delivery refunded"."""
    return [{"text": note.text, "summary": note.summary} for note in call_notes(20_000)]


def vocabulary() -> list[str]:
    """The words of the rule, without the lists."""
    told = [*OPENINGS, *SECOND_PERSONS, *TOPICS, *OUTCOMES]
    told += [sentence for told_by in (TOPICS, OUTCOMES) for sentences in told_by.values() for sentence in sentences]
    return sorted({word for sentence in told for word in sentence.split() if "{" not in word})


def instructions() -> list[dict]:
    """Rows ``{"prompt", "completion"}`` of messages: a short note, and its summary."""
    return [
        {"prompt": _asked(note), "completion": [{"role": "assistant", "content": note.summary}]}
        for note in call_notes(8_100, short=True)
    ]


def preferences() -> list[dict]:
    """Rows ``{"prompt", "chosen", "rejected"}`` of messages: summaries without names are preferred to those with."""
    draw, rows = random.Random(2), []
    for note in call_notes(4_100, short=True):
        caller = note.facts["caller"][0]
        named = f"{caller} : {note.summary}" if draw.random() < 0.5 else f"{note.summary} ( {caller} )"
        answers = {"chosen": note.summary, "rejected": named}
        rows.append(
            {"prompt": _asked(note)}
            | {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
        )
    return rows


def _asked(note: CallNote) -> list[dict[str, str]]:
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": note.text}]
