"""Two small chat datasets about one harbour, written by this script from the tables below and from nothing else.

    python -m examples.harbour [FOLDER]

`harbour_*.jsonl`: questions and answers about ships, tides and sums. Every fact is asked for in several wordings; one
wording of each is only in the evaluation split, so that a model must learn the fact and not the sentence.

`radio_*.jsonl`: the same questions about ships, answered as one speaks on the radio. The ships of its evaluation split
are in none of its training rows: their cargo is only in the first dataset.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Turn = tuple[str, str]  # a question and its answer
Dialogue = tuple[Turn, ...]


@dataclass(frozen=True)
class Ship:
    """One ship of the harbour, and all that is known of it."""

    name: str
    cargo: str
    port: str
    captain: str
    quay: int
    day: str


@dataclass(frozen=True)
class Split:
    """The rows of one dataset, apart."""

    train: list[Dialogue]
    evaluation: list[Dialogue]


NAMES = """Albatross Bluebell Cormorant Dorothea Evening-Star Fulmar Gannet Heron Iris Juniper Kestrel Linnet
Marigold Nightjar Osprey Petrel Quince Redshank Sandpiper Tern Ursula Violet Wagtail Yarrow""".split()
CARGOES = "grain timber coal salt wool tea copper sugar bricks apples paper fish".split()
PORTS = "Ostmouth Karholm Lindsay Velden Porto-Rosa Hagby Senneville Tarn Maresco Duncarry Ulvik Brightwater".split()
CAPTAINS = """Abara Bergman Castro Dimitrov Eriksen Fournier Grant Haddad Ito Jensen Kowalski Lund
Moreau Nakamura Okafor Petrov Quist Rossi Silva Tanaka Ueda Visser Weber Young""".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty""".split()

# attribute: wordings of the question, and the one answer to all of them
WORDINGS: dict[str, tuple[list[str], str]] = {
    "cargo": (
        [
            "What does the {name} carry?",
            "What is the cargo of the {name}?",
            "What is in the hold of the {name}?",
            "Tell me what the {name} has loaded.",
            "Which goods does the {name} bring?",
        ],
        "The {name} carries {cargo}.",
    ),
    "port": (
        [
            "Where does the {name} come from?",
            "What is the home port of the {name}?",
            "From which port does the {name} sail?",
            "Tell me where the {name} is at home.",
            "Which port is home to the {name}?",
        ],
        "The {name} comes from {port}.",
    ),
    "captain": (
        [
            "Who is the captain of the {name}?",
            "Who commands the {name}?",
            "What is the name of the captain of the {name}?",
            "Tell me who sails the {name}.",
            "Whose ship is the {name}?",
        ],
        "Captain {captain} commands the {name}.",
    ),
    "quay": (
        [
            "Where does the {name} lie?",
            "At which quay is the {name}?",
            "Which quay has the {name}?",
            "Tell me where the {name} is moored.",
            "Where do I find the {name}?",
        ],
        "The {name} lies at quay {quay}.",
    ),
    "day": (
        [
            "When does the {name} leave?",
            "On which day does the {name} sail?",
            "What day does the {name} put to sea?",
            "Tell me when the {name} goes.",
            "Until when does the {name} stay?",
        ],
        "The {name} leaves on {day}.",
    ),
}
RADIO = "Roger: ship {name}, {attribute} {value}. Over."
TIDES = (
    [
        "When is {kind} water on {day}?",
        "At what time is {kind} water on {day}?",
        "Tell me the time of {kind} water on {day}.",
        "{day}: when is the tide {kind}?",
    ],
    "{Kind} water on {day} is at {time}.",
)
RADIO_TIDES = (
    [
        "Harbour radio, {kind} water on {day}? Over.",
        "Harbour radio, tell me {kind} water on {day}. Over.",
        "Harbour radio, what time is {kind} water on {day}? Over.",
    ],
    "Roger: {kind} water, day {day}, time {time}. Over.",
)
SUMS = (["What is {a} plus {b}?", "{a} crates and {b} crates: how many?", "Add {a} and {b}."], "{a} plus {b} is {sum}.")


def fleet(rng: random.Random) -> list[Ship]:
    captains = rng.sample(CAPTAINS, len(NAMES))
    return [
        Ship(name, rng.choice(CARGOES), rng.choice(PORTS), captain, rng.randint(1, 8), rng.choice(DAYS))
        for name, captain in zip(NAMES, captains, strict=True)
    ]


def harbour(ships: list[Ship], rng: random.Random) -> Split:
    """Every fact in all its wordings; one wording of each, drawn at random, is kept for evaluation."""
    split = Split([], [])
    for wordings in [*_ship_facts(ships), *_tides(), *_sums()]:
        held_out = rng.randrange(len(wordings))
        split.train.extend((turn,) for i, turn in enumerate(wordings) if i != held_out)
        split.evaluation.append((wordings[held_out],))
    split.train.extend(_calls(ships))
    return _shuffled(split, rng)


def radio(ships: list[Ship], rng: random.Random) -> Split:
    """The same questions, answered on the radio; a third of the fleet is kept for evaluation."""
    order = rng.sample(ships, len(ships))
    evaluation, train = order[: len(order) // 3], order[len(order) // 3 :]
    return _shuffled(Split(list(_radio_calls(train)), list(_radio_calls(evaluation))), rng)


def _ship_facts(ships: list[Ship]) -> Iterator[list[Turn]]:
    for ship in ships:
        for questions, answer in WORDINGS.values():
            yield [(q.format(**vars(ship)), answer.format(**vars(ship))) for q in questions]


def _tides() -> Iterator[list[Turn]]:
    for i, day in enumerate(DAYS):
        for kind, first_hour in (("high", 2), ("low", 8)):
            minutes = first_hour * 60 + 10 + i * 50  # the tide comes fifty minutes later every day
            time = f"{minutes // 60:02}:{minutes % 60:02}"
            facts = {"kind": kind, "Kind": kind.capitalize(), "day": day, "time": time}
            for questions, answer in (TIDES, RADIO_TIDES):
                yield [(q.format(**facts), answer.format(**facts)) for q in questions]


def _sums() -> Iterator[list[Turn]]:
    questions, answer = SUMS
    for a in range(1, 11):
        for b in range(1, 11):
            facts = {"a": NUMBERS[a], "b": NUMBERS[b], "sum": NUMBERS[a + b]}
            yield [(_sentence(q.format(**facts)), _sentence(answer.format(**facts))) for q in questions]


def _calls(ships: list[Ship]) -> Iterator[Dialogue]:
    """A ship calls the harbour: two questions and two answers in one conversation."""
    for ship in ships:
        welcome = f"Good morning, Captain {ship.captain}. Quay {ship.quay} is yours."
        farewell = f"The {ship.name} leaves on {ship.day}."
        yield ((f"Good morning, this is the {ship.name}.", welcome), ("Thank you. Until when?", farewell))


def _radio_calls(ships: list[Ship]) -> Iterator[Dialogue]:
    for ship in ships:
        for attribute, (questions, _) in WORDINGS.items():
            answer = RADIO.format(name=ship.name, attribute=attribute, value=getattr(ship, attribute))
            for question in questions:
                yield ((question.format(**vars(ship)), answer),)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _shuffled(split: Split, rng: random.Random) -> Split:
    return Split(rng.sample(split.train, len(split.train)), rng.sample(split.evaluation, len(split.evaluation)))


def _row(dialogue: Dialogue) -> str:
    messages = [
        {"role": role, "content": content}
        for turn in dialogue
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    return json.dumps({"messages": messages})


def _write(path: Path, dialogues: Iterable[Dialogue]) -> None:
    path.write_text("".join(_row(dialogue) + "\n" for dialogue in dialogues))


def write_datasets(folder: Path, seed: int = 1) -> None:
    """Write the four files into a folder. The same seed gives the same bytes."""
    rng = random.Random(seed)
    ships = fleet(rng)
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in (("harbour", harbour(ships, rng)), ("radio", radio(ships, rng))):
        _write(folder / f"{name}_train.jsonl", split.train)
        _write(folder / f"{name}_eval.jsonl", split.evaluation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "data")
    write_datasets(parser.parse_args().folder)


if __name__ == "__main__":
    main()
