"""data/make_data.py: true facts about the chemical elements -> library and questions.

Writes, beside itself:
  elements.csv    the facts, taken from the package `mendeleev` (MIT licence)
  library.jsonl   one sentence a fact: what Library_Search_Tool searches
  train.jsonl     2,400 questions to train on
  heldout.jsonl   200 questions about other elements, with other operands
It also owns the language of the built-in set, which data/pretrain.py shares: the kinds of
questions, and which elements and operands are held out.

Run:  python data/make_data.py            (from elements.csv: the same files, byte for byte)
      python data/make_data.py --facts    (elements.csv anew; needs `pip install mendeleev`)
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

# column of elements.csv -> the words for it. The first is text, the others are numbers and can
# enter a calculation.
ATTRIBUTES = {
    "symbol": "symbol",
    "atomic_number": "atomic number",
    "period": "period",
    "group": "group",
    "discovery_year": "discovery year",
}
NUMERIC = [name for name in ATTRIBUTES if name != "symbol"]
OPERATORS = {"plus": "+", "minus": "-", "times": "*"}

# Every sixth element is held out: 20 of 118, spread over the periodic table.
HELD_OUT_ELEMENTS = range(4, 119, 6)


def held_out_operand(number: int) -> bool:
    """Operands of the held-out questions. Above 118 and below 1,000, so that none of them is a
    fact about an element (atomic numbers end at 118, the known discovery years begin at 1669)."""
    return 120 <= number < 1000 and number % 7 == 3


def read_elements() -> list[dict]:
    """Rows of elements.csv; numbers as int, an unknown fact (no group, no known year) as None."""
    with open(FOLDER / "elements.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for column in NUMERIC:
            row[column] = int(row[column]) if row[column] else None
    return rows


def is_held_out(element: dict) -> bool:
    return element["atomic_number"] in HELD_OUT_ELEMENTS


def facts(elements: list[dict]) -> list[tuple[str, str, str]]:
    """(attribute in words, element's name, value as text) for every known fact."""
    return [
        (words, element["name"], str(element[column]))
        for element in elements
        for column, words in ATTRIBUTES.items()
        if element[column] is not None
    ]


def fact_sentence(attribute: str, name: str, value: str) -> str:
    return f"The {attribute} of the element {name} is {value}."


@dataclass
class Task:
    """A question of the built-in set, with what a right agent needs to know about it."""

    kind: str  # "lookup" | "arithmetic" | "two-step"
    question: str
    answer: str
    fact: tuple[str, str, str] | None = None  # (attribute, element, value)


def make_lookup(fact: tuple[str, str, str]) -> Task:
    attribute, name, value = fact
    return Task("lookup", f"What is the {attribute} of the element {name}?", value, fact)


def calculate(code: str) -> str:
    """The value of an expression that this file wrote itself."""
    return str(eval(code, {"__builtins__": {}}))


def make_arithmetic(rng: random.Random, operand) -> Task:
    """Two operands, or (two in five) three: 'What is 47 times 63 minus 12?'"""
    count = 3 if rng.random() < 0.4 else 2
    words = code = str(operand())
    for _ in range(count - 1):
        operator, number = rng.choice(list(OPERATORS)), operand()
        words += f" {operator} {number}"
        code += f" {OPERATORS[operator]} {number}"
    return Task("arithmetic", f"What is {words}?", calculate(code))


def make_two_step(rng: random.Random, operand, number_facts) -> Task:
    """A fact, then a calculation: 'What is 23 times the atomic number of the element Iron?'"""
    fact = rng.choice(number_facts)
    attribute, name, value = fact
    operator, number = rng.choice(list(OPERATORS)), operand()
    fact_first = rng.random() < 0.5
    left, right = ("{}", str(number)) if fact_first else (str(number), "{}")
    asked = f"{left} {operator} {right}".format(f"the {attribute} of the element {name}")
    answer = calculate(f"{left} {OPERATORS[operator]} {right}".format(value))
    return Task("two-step", f"What is {asked}?", answer, fact)


def training_operand(rng: random.Random) -> int:
    """1 to 3 digits, each length as often; never a held-out one."""
    while True:
        number = rng.choice([rng.randint(2, 9), rng.randint(10, 99), rng.randint(100, 999)])
        if not held_out_operand(number):
            return number


HELD_OUT_OPERANDS = [number for number in range(1000) if held_out_operand(number)]


def make_questions(elements: list[dict], held_out: bool, counts: dict, seed: int) -> list[Task]:
    """`counts` questions of each kind about the held-out elements and operands, or the others."""
    rng = random.Random(seed)
    known = facts([element for element in elements if is_held_out(element) == held_out])
    numeric_words = {ATTRIBUTES[column] for column in NUMERIC}
    number_facts = [fact for fact in known if fact[0] in numeric_words]

    def operand() -> int:
        return rng.choice(HELD_OUT_OPERANDS) if held_out else training_operand(rng)

    lookups = rng.sample(known, counts["lookup"])
    tasks = {task.question: task for task in map(make_lookup, lookups)}
    for kind, make in (
        ("arithmetic", lambda: make_arithmetic(rng, operand)),
        ("two-step", lambda: make_two_step(rng, operand, number_facts)),
    ):
        target = len(tasks) + counts[kind]
        while len(tasks) < target:  # a repeated question takes its own place: no duplicates
            task = make()
            tasks[task.question] = task
    shuffled = list(tasks.values())
    rng.shuffle(shuffled)
    return shuffled


TRAIN_COUNTS = {"lookup": 450, "arithmetic": 750, "two-step": 1200}
HELD_OUT_COUNTS = {"lookup": 60, "arithmetic": 65, "two-step": 75}


def write_facts() -> None:
    """elements.csv from `mendeleev`; the year a fact was not recorded stays empty."""
    from mendeleev import get_all_elements

    with open(FOLDER / "elements.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["name", *ATTRIBUTES])
        for element in sorted(get_all_elements(), key=lambda element: element.atomic_number):
            row = [element.name, element.symbol, element.atomic_number, element.period]
            writer.writerow([*row, element.group_id or "", element.discovery_year or ""])


def write_jsonl(name: str, rows: list[dict]) -> None:
    with open(FOLDER / name, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    print(f"data/{name}: {len(rows)} lines")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--facts", action="store_true", help="take the facts anew from mendeleev")
    if parser.parse_args().facts:
        write_facts()
    elements = read_elements()
    write_jsonl(
        "library.jsonl",
        [
            {"id": f"{name}/{attribute}", "title": name, "text": fact_sentence(attribute, name, v)}
            for attribute, name, v in facts(elements)
        ],
    )
    for name, held_out, counts, seed in (
        ("train", False, TRAIN_COUNTS, 1),
        ("heldout", True, HELD_OUT_COUNTS, 2),
    ):
        tasks = make_questions(elements, held_out, counts, seed)
        write_jsonl(
            f"{name}.jsonl",
            [
                {
                    "id": f"{name}-{i:04d}",
                    "question": task.question,
                    "answer": task.answer,
                    "group": task.kind,
                }
                for i, task in enumerate(tasks)
            ],
        )


if __name__ == "__main__":
    main()
