"""eval.py: what counts as right, and how often a planner gets there.

    python eval.py                              the untrained planner on the held-out questions
    python eval.py --adapter runs/NAME          a trained one, with the same random numbers
    python eval.py --json FILE                  the same numbers, and every item, as data

The reward of a roll-out is `score(...)` of the generator's reply (paper section 2: a verifiable
outcome R in {0, 1}); the same functions measure a planner, so the two cannot drift apart.
`extract_answer` isolates the final answer, `score` compares it with the reference.
Left out on purpose: a judge, evaluation of what a model wrote, a tolerance for numbers that are
merely close.
"""

from __future__ import annotations

import argparse
import bisect
import csv
import dataclasses
import gzip
import hashlib
import importlib.util
import io
import itertools
import json
import math
import operator
import os
import re
import string
import sys
import time
import unicodedata
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from tqdm import tqdm

import agentflow
from modules import drop_thinking
from tools import cache_folder, seconds_to_wait

# ------------------------------------------------------------------------------------------------
# The final answer of a reply
# ------------------------------------------------------------------------------------------------

_TAG = re.compile(r"<\s?(/?)\s?(?:final[_ ]?)?answer\s?>", re.IGNORECASE)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{|\\[\\{}]|[{}]")
_STATED = re.compile(  # "Final answer: 7", "**Final Answer:** 7", "the final answer is 7"
    r"\bfinal\s{1,3}answer[*_`]{0,3}[ \t]{0,9}(?P<verb>is\b)?"
    r"[*_`]{0,3}[ \t]{0,9}(?P<colon>[:：﹕])?",
    re.IGNORECASE,
)
_NEXT_LINE = re.compile(r"[\s*`]*([^\n]*)")
# What stands between the tags where a reply repeats its instructions instead of answering.
_TEMPLATE = re.compile(
    r"(?:and|or|[.…_\s]*|(?:your|the|final|\s)*answer(?:\s+here)?)\Z", re.IGNORECASE
)
_ECHO = re.compile(r"(?:and|or|tags?)\b", re.IGNORECASE)  # "put it in <answer> tags"


def extract_answer(text: str | None) -> str | None:
    """The last explicit answer of a reply, or None where there is none or it is empty.

    Explicit are `<answer>…</answer>` (an unclosed one at the end: if it is one short line),
    `\\boxed{…}` with balanced braces, and "final answer: …". The weaker "final answer is …" counts
    only where none of these occurs ("my final answer is based on …" is no answer). Thinking is
    dropped first. Of nested ones the inner counts: `<answer>\\boxed{7}</answer>` gives 7.
    """
    text = drop_thinking(text)
    strong, weak = _stated(text)
    found = [pair for pair in (_tagged(text), _boxed(text), strong) if pair] or [weak]
    return max(found)[1] if found[0] else None


def _tagged(text: str) -> tuple[int, str] | None:
    """(position, content) of the last filled pair of answer tags."""
    tags = [*_TAG.finditer(text), None]
    for place in reversed(range(len(tags) - 1)):
        tag, after = tags[place], tags[place + 1]
        if tag[1] or (after and not after[1]):
            continue  # a closing tag, or an opening one whose partner is missing
        value = text[tag.end() : after.start() if after else len(text)].strip()
        value = value if after else re.sub(r"</?\w{0,20}\Z", "", value)  # a tag cut off half-way
        # Never closed: the reply ends in its answer, or it repeats the prompt ("in <answer> tags")
        if not after and ("\n" in value or len(value) > 300 or _ECHO.match(value)):
            continue
        value = value.strip("*` ")
        if not _TEMPLATE.match(value):
            return tag.start(), value
    return None


def _boxed(text: str) -> tuple[int, str] | None:
    r"""(position, content) of the last `\boxed{…}` or `\fbox{…}` whose braces balance."""
    opened: list[tuple[int, int] | None] = []  # a box's start and its content's; None: a mere brace
    spans: list[tuple[int, int, int]] = []  # where the box, its content and its end are
    for brace in _BRACE.finditer(text):  # one walk; `\{` and `\}` are text, not braces
        if brace[0] == "{":
            opened.append(None)
        elif len(brace[0]) > 2:
            opened.append(brace.span())
        elif brace[0] == "}" and opened and (box := opened.pop()):
            spans.append((*box, brace.start()))
    for start, inner, stop in sorted(spans, reverse=True):
        if value := text[inner:stop].strip():
            return start, value
    return None


def _stated(text: str) -> tuple[tuple[int, str] | None, tuple[int, str] | None]:
    """The last "final answer: …" (or a heading with the answer below) and the last "… is …"."""
    weak = None
    for match in reversed(list(_STATED.finditer(text))):
        start = match.start()
        lead = text[text.rfind("\n", max(0, start - 24), start) + 1 : start]
        heading = text[match.end() : match.end() + 1] in "\n" and re.search(r"[#*]", lead[-8:])
        if not (match["verb"] or match["colon"] or heading):
            continue
        value = _TAG.split(_NEXT_LINE.match(text, match.end())[1])[0].strip("*` \t")
        value = value.removesuffix(".").strip("*` \t")
        if value and (match["colon"] or heading):
            return (start, value), weak
        weak = weak or ((start, value) if value else None)
    return None, weak


# ------------------------------------------------------------------------------------------------
# Text: exact match and F1
# ------------------------------------------------------------------------------------------------

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_SIGN_OR_POINT = re.compile(r"(?<!\w)-(?=\.?[0-9])|(?<![^\W\d])\.(?=[0-9])")


def normalize_text(text: str, articles: bool = False) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no articles, single spaces.

    Two things differ, because the official code makes 31.4 equal to 314 and -5 equal to 5: the
    decimal point of a number and the minus sign before one stay. Punctuation is Unicode's.
    `articles=True` keeps a, an, the.
    """
    text = unicodedata.normalize("NFC", text).replace("\u2212", "-").lower()
    text = _SIGN_OR_POINT.sub(lambda sign: "\0\1"[sign[0] == "."], text)  # not to be dropped
    dropped = [c for c in set(text) if c in string.punctuation or unicodedata.category(c)[0] == "P"]
    text = text.translate(dict.fromkeys(map(ord, dropped))).translate({0: "-", 1: "."})
    return " ".join((text if articles else _ARTICLE.sub(" ", text)).split())


def text_scores(
    prediction: str | None, references: list[str], hotpot: bool = False
) -> tuple[float, float]:
    """(exact match, F1) of a short answer, each the best over the aliases.

    F1 counts common words as a multiset. `hotpot=True` adds HotpotQA's rule: where the prediction
    or the reference is yes, no or noanswer, only an exact match scores. An empty prediction
    scores 0, also against a reference that normalises to nothing.
    """
    exact, best = 0.0, 0.0
    short, full = normalize_text(prediction or ""), normalize_text(prediction or "", True)
    for reference in references if full else ():
        said, gold = short, normalize_text(reference)
        if not said or not gold:  # nothing but articles ("A", "The The"): compare with them
            said, gold = full, normalize_text(reference, True)
        exact = max(exact, float(said == gold))
        if hotpot and said != gold and {said, gold} & {"yes", "no", "noanswer"}:
            continue
        common = sum((Counter(said.split()) & Counter(gold.split())).values())
        # F1 = 2PR / (P + R) with P = common / said and R = common / gold
        best = max(best, 2 * common / (len(said.split()) + len(gold.split())))
    return exact, best


# ------------------------------------------------------------------------------------------------
# Numbers
# ------------------------------------------------------------------------------------------------

_DECIMAL = r"(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)?(?:\.[0-9]+)?"
_NUMBER = re.compile(rf"([+-]?)\s?({_DECIMAL})(?:\s?/\s?([+-]?)({_DECIMAL}))?")


def _bare(text: str) -> str:
    """An answer without what only dresses it: math marks, bold, a full stop, a percent sign."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\%", "%").strip()
    text = text.replace("\\(", "").replace("\\)", "").replace("\\$", "").replace("$", "")
    return text.strip("*` \t\n").removesuffix(".").strip().removesuffix("%").strip()


def _number(text: str) -> Fraction | None:
    """The exact value of an integer, decimal or simple fraction, or None. Thousands separators
    need groups of three digits; no exponents or powers, so that nothing can grow large."""
    match = _NUMBER.fullmatch(text) if len(text) <= 300 else None
    if match is None or not match[2]:
        return None
    top = Fraction(match[1] + match[2].replace(",", ""))
    if match[4] is None:
        return top
    bottom = Fraction(match[3] + match[4].replace(",", "")) if match[4] else Fraction(0)
    return top / bottom if bottom else None


def _same_math(prediction: str, reference: str) -> bool:
    """Equal as numbers, exactly; where neither is a number, equal as text without white space."""
    said, gold = _bare(prediction), _bare(reference)
    values = _number(said), _number(gold)
    if values != (None, None):
        return values[0] == values[1]
    return bool(said) and "".join(said.split()) == "".join(gold.split())


# ------------------------------------------------------------------------------------------------
# One entry for all kinds
# ------------------------------------------------------------------------------------------------


def score(
    kind: str,
    response: str | None,
    reference: Any,
    *,
    extracted: bool = False,
    choices: list[str] | None = None,
    numbers: list[int] | None = None,
    metric: str | None = None,
) -> float:
    """How right a reply is, 0..1. The reward in training and the score of a benchmark.

    kind: "text" with metric "em" (default), "f1" or "f1_hotpot"; "math": plain numbers, compared
    exactly (integers, decimals, thousands separators, leading zeros, a/b; a percent sign is
    dropped), anything else by equality of the strings. "mc", "gaia", "game24" (which need
    `choices`, `numbers`) raise NotImplementedError, an unknown kind or metric ValueError.
    reference: a string, a number, or a list of aliases, of which the best counts.
    response: the whole reply, or with `extracted=True` the answer itself; None scores 0. Without
    an explicit answer, math scores 0 and text takes the whole reply. Empty answers never score.
    """
    if kind in ("mc", "gaia", "game24"):
        raise NotImplementedError(f"answers of kind '{kind}' cannot be scored yet")
    if kind not in ("text", "math"):
        raise ValueError(f"unknown kind '{kind}': use text, math, mc, gaia or game24")
    if metric not in (None, "em", "f1", "f1_hotpot"):
        raise ValueError(f"unknown metric '{metric}': use em, f1 or f1_hotpot")
    aliases = reference if isinstance(reference, (list, tuple)) else [reference]
    aliases = [str(alias) for alias in aliases if alias is not None]
    answer = response if extracted else extract_answer(response)
    if answer is None and kind == "text":
        # Tags with nothing between them are an empty answer, not a missing one.
        whole = drop_thinking(response)
        answer = None if _TAG.search(whole) else whole
    if answer is None:
        return 0.0
    if kind == "math":
        return float(any(_same_math(answer, alias) for alias in aliases))
    exact, f1 = text_scores(answer, aliases, hotpot=metric == "f1_hotpot")
    return exact if metric in (None, "em") else f1


# ------------------------------------------------------------------------------------------------
# Questions
# ------------------------------------------------------------------------------------------------

DATA = Path(__file__).resolve().parent / "data"
QUESTION_FIELDS = ("question", "query", "prompt", "problem", "input")
REFERENCE_FIELDS = (
    "answer", "answers", "result", "solution", "ground_truth", "golden_answers", "target",
)
ID_FIELDS = ("id", "pid", "idx", "_id")
CHOICE_FIELDS = ("choices", "options")
KINDS = ("auto", "text", "math", "mc", "gaia", "game24")
METRICS = (None, "em", "f1", "f1_hotpot")
LETTERS = string.ascii_uppercase
# Some public copies glue this to the question, and a search tool would be sent it.
_INSTRUCTION = re.compile(
    r"\s*When ready, output the (?:final )?answer enclosed in <answer> and </answer> tags\..*\Z",
    re.DOTALL | re.IGNORECASE,
)


@dataclass(frozen=True)
class Question:
    """A question with its reference answers (aliases: any of them is right)."""

    id: str
    text: str  # what the flow is asked: of multiple choice with the options below, one a line
    references: list[str]
    group: str = "all"  # what the table groups by; no influence on the score
    kind: str = "auto"  # how it is scored: one of KINDS; auto: by what the references look like
    choices: tuple[str, ...] | None = None  # of "mc": the options, A first; references are letters
    numbers: tuple[int, ...] | None = None  # of "game24"
    metric: str | None = None  # of "text": one of METRICS
    source: str = ""  # the set or the file that it comes from
    own: Callable | None = field(default=None, repr=False, compare=False)  # see with_reward

    def reward(self, response: str | None) -> float:
        """R in 0..1: the verifiable outcome of the whole roll-out. Nothing else is rewarded.

        Kind "auto": numbers are compared as numbers, everything else as normalised text. NaN where
        a reward function of one's own failed: then nobody knows how right the reply is.
        """
        if self.own:
            try:
                # without `own`, so that the function may ask for the rule, question.reward(...)
                plain = dataclasses.replace(self, own=None)
                return own_reward(self.own, response or "", plain)
            except ValueError as error:
                warnings.warn(f"--reward: {error} Such roll-outs have no reward.", stacklevel=2)
                return math.nan
        if self.kind != "auto":
            choices, numbers = (value and list(value) for value in (self.choices, self.numbers))
            how = {"choices": choices, "numbers": numbers, "metric": self.metric}
            return score(self.kind, response, self.references, **how)
        numeric = [item for item in self.references if _number(_bare(item)) is not None]
        texts = [item for item in self.references if item not in numeric]
        return max(
            score("math", response, numeric) if numeric else 0.0,
            score("text", response, texts, metric=self.metric) if texts else 0.0,
        )


def load_questions(path: str | Path) -> list[Question]:
    """Questions of a JSON or JSONL file, gzipped or not; field names as in many public sets.

    Raises ValueError with a sentence that names the file and the line.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"The question file {path} cannot be read ({error.strerror}). Give a JSON or JSONL "
            f'file, "builtin", or sets by name: {", ".join(TRAINING)} to train on, "all" or '
            f"{', '.join(BENCHMARKS)} to measure on."
        ) from error
    try:
        if raw[:2] == b"\x1f\x8b":  # gzip, whatever the name says
            raw = gzip.decompress(raw)
        text = raw.decode("utf-8-sig")  # a byte order mark is dropped
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no UTF-8 text, gzipped or not: {error}.") from error
    try:
        questions = [
            read_question(record, f"{path}, line {line}", line, path.name)
            for line, record in records(text, path)
        ]
    except RecursionError as error:
        raise ValueError(f"{path} nests lists or objects too deeply to be read.") from error
    if not questions:
        raise ValueError(f"{path} holds no question.")
    seen: dict[str, int] = {}
    for number, question in enumerate(questions, start=1):
        if question.id in seen:
            raise ValueError(
                f"{path}: questions {seen[question.id]} and {number} have the same id "
                f"{question.id!r}. Make the ids unique, or leave them out."
            )
        seen[question.id] = number
    return questions


def records(text: str, path: str | Path) -> list[tuple[int, object]]:
    """(line, record) of a JSON list or of JSON lines."""
    if text.lstrip().startswith("["):
        try:
            return list(enumerate(json.loads(text), start=1))
        except ValueError as error:
            raise ValueError(f"{path} starts like a JSON list and is none: {error}.") from error
    found = []
    for line, content in enumerate(text.split("\n"), start=1):  # not splitlines: U+2028 is text
        if content.strip():
            try:
                found.append((line, json.loads(content)))
            except json.JSONDecodeError as error:
                where = f"{path}, line {line}, column {error.colno}"
                raise ValueError(f"{where}: this is not JSON: {error.msg}.") from error
    return found


def read_question(record: object, where: str, line: int, source: str = "") -> Question:
    """One record as a Question; a sentence for each way in which it can be none."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a JSON object with question and answer is needed.")

    def first(fields: tuple[str, ...]):
        return next((record[name] for name in fields if record.get(name) is not None), None)

    text, reference, identity, options = map(
        first, (QUESTION_FIELDS, REFERENCE_FIELDS, ID_FIELDS, CHOICE_FIELDS)
    )
    if isinstance(text, list) and text and isinstance(text[-1], dict):
        text = text[-1].get("content")  # a conversation, as TRL's sets have it
    text = _INSTRUCTION.sub("", text).strip() if isinstance(text, str) else ""
    options = options or None  # an empty list is none
    if not text:
        raise ValueError(f"{where}: no question; one of {', '.join(QUESTION_FIELDS)} is needed.")
    kind, group, metric, numbers = map(record.get, ("kind", "group", "metric", "numbers"))
    kind = kind or ("auto" if options is None else "mc")
    check_kind(kind, metric, options, numbers, where)
    references = reference if isinstance(reference, list) else [reference]
    references = [item for item in references if item is not None]
    choices = None
    if kind == "mc":
        named = read_choices(options, where)
        references = [letter_of(item, named, where) for item in references]
        choices = tuple(option for _, option in named)
        text = "\n".join([text, *(f"{a}) {b}" for a, b in zip(LETTERS, choices, strict=False))])
    references = [reference_text(item, where) for item in references]
    references = list(dict.fromkeys(item for item in references if item))
    if not references and kind == "game24":
        references = ["24"]
    if not references:
        raise ValueError(f"{where}: no answer; one of {', '.join(REFERENCE_FIELDS)} is needed.")
    identity = str(line if identity is None else identity)
    group = "all" if group is None else str(group)
    numbers = tuple(numbers) if kind == "game24" else None
    question = Question(identity, text, references, group, kind, choices, numbers, metric, source)
    try:
        json.dumps(dataclasses.astuple(question), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a pair of surrogates: no file could hold it
        raise ValueError(f"{where}: {error.object[error.start]!r} is no character.") from error
    return question


def check_kind(kind, metric, options, numbers, where: str) -> None:
    """Raises ValueError where a record asks for a scoring that there is not, or lacks its part."""
    if kind not in KINDS:
        raise ValueError(
            f"{where}: kind is {kind!r}; use one of {', '.join(KINDS)}, or leave it out. What a "
            "table shall group by stands in group."
        )
    if metric not in METRICS:
        raise ValueError(f"{where}: metric is {metric!r}; use em, f1 or f1_hotpot.")
    if (options is not None) != (kind == "mc"):
        raise ValueError(f"{where}: choices and kind mc need each other; kind is {kind}.")
    right = isinstance(numbers, list) and len(numbers) == 4 and {*map(type, numbers)} == {int}
    if kind == "game24" and not right:
        raise ValueError(f"{where}: numbers is {numbers!r}; kind game24 needs four integers.")


def reference_text(item: object, where: str) -> str:
    """A reference answer as text: 1e20 as the digits that a reader would write."""
    if isinstance(item, float) and not math.isfinite(item):
        raise ValueError(f"{where}: the answer {item} is no number.")
    if isinstance(item, (int, float)) and not isinstance(item, bool):
        return format(Decimal(repr(item)), "f")
    if not isinstance(item, (str, bool)):
        raise ValueError(f"{where}: an answer is a text or a number, or a list of these.")
    return str(item).strip()


def read_choices(options: object, where: str) -> list[tuple[set, str]]:
    """(what a reference may call it, text) of each option of a list or a dict, A first.

    Names are the letter and the index from 0 (of a list), or the key (of a dict). An option that
    is null is none, but those after it keep their names. "A. " is dropped where all texts begin so.
    """
    if isinstance(options, list):
        items = [({LETTERS[i % 26], i}, option) for i, option in enumerate(options)]
    else:
        pairs = options.items() if isinstance(options, dict) else ()
        items = [({str(key).strip().upper()}, option) for key, option in pairs]

    def text(option: object) -> str:
        plain = isinstance(option, (str, int, float))
        return " ".join(reference_text(option, where).split()) if plain else ""

    named = [(names, text(option)) for names, option in items if option is not None]
    if not 2 <= len(named) <= len(options) <= 26 or not all(option for _, option in named):
        raise ValueError(f"{where}: choices must be a list or an object of 2 to 26 texts.")
    mark = re.compile(r"\(?([A-Za-z])[.):]\s+(?=\S)")
    if all((m := mark.match(option)) and m[1].upper() in names for names, option in named):
        named = [(names, mark.sub("", option, count=1)) for names, option in named]
    return named


def letter_of(reference: object, named: list[tuple[set, str]], where: str) -> str:
    """The letter of the option that a reference means: by letter or key ("B", "(B)"), by text, or
    by index. Raises ValueError where it means none, or where these rules disagree."""
    text = " ".join(reference_text(reference, where).split())
    name = re.sub(r"\A\(?(\w+)[).:]?\Z", r"\1", text).upper()
    bare = re.sub(r"\A\(?[A-Za-z][.):]\s+", "", text)  # "B. Paris" where the marks were dropped

    def places(fits: Callable) -> set[int]:
        return {i for i, (names, option) in enumerate(named) if fits(names, option)}

    found = places(lambda names, option: option in (text, bare))  # case decides where it can
    found = found or places(lambda names, option: option.lower() == bare.lower())
    index = int(name) if type(reference) is int or not found and name.isdecimal() else None
    found |= places(lambda names, _: name in names or index in names)
    if len(found) != 1:
        problem = "may mean more than one" if found else "is none"
        raise ValueError(
            f"{where}: the answer {reference!r} {problem} of the choices. Give the letter with a "
            'bracket: "B)".'
        )
    return LETTERS[found.pop()]


def own_reward(function: Callable, response: str, question: Question) -> float:
    """function(response, question), checked: a number from 0 to 1. NumPy's and torch's scalars and
    bools are numbers too. Raises ValueError with what is wrong."""
    try:
        value = function(response, question)
        value = value.item() if hasattr(value, "item") else value
    except Exception as error:  # somebody's own code may raise whatever it likes
        raise ValueError(f"the function raised {type(error).__name__}: {error}.") from error
    if not isinstance(value, Real) or not 0 <= value <= 1:  # NaN is in no range
        raise ValueError(f"the function returned {value!r}, which is no number from 0 to 1.")
    return float(value)


def load_reward(spec: str) -> Callable:
    """The function that --reward FILE.py:NAME means:

        def my_function(response: str, question: Question) -> float   # 0..1

    response: the generator's whole reply. Raises ValueError where there is no such function.
    """
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file() or not path.endswith(".py"):
        raise ValueError(f"--reward {spec}: there is no such file. Give FILE.py:FUNCTION.")
    found = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # a dataclass in it is looked up there
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a syntax error, a missing package, whatever
        raise ValueError(
            f"--reward: {path} cannot be imported ({type(error).__name__}: {error})."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"--reward: {path} has no function {name!r}.")
    return function


def with_reward(questions: list[Question], spec: str) -> list[Question]:
    """The questions with --reward's function as their judge ("": with the rule of their kind).

    It is tried on a right answer to the first question, so that a mistake shows before the run.
    """
    if not spec:
        return questions
    function = load_reward(spec)
    try:
        own_reward(function, f"<answer> {questions[0].references[0]} </answer>", questions[0])
    except ValueError as error:
        raise ValueError(f"--reward {spec}: on a trial {error}") from error
    return [dataclasses.replace(question, own=function) for question in questions]


def split_questions(questions: list[Question]) -> tuple[list[Question], list[Question]]:
    """(training, held out): a tenth is held out, chosen by a hash of the id, so that the choice
    stays when questions are added or moved. Of two and more at least one is."""
    hashes = [
        int.from_bytes(hashlib.sha256(question.id.encode()).digest()[:8], "big")
        for question in questions
    ]
    held_out = [value % 10 == 0 for value in hashes]
    if len(questions) > 1 and len({*held_out}) == 1:  # so few that none, or all, would be
        held_out = [value == min(hashes) for value in hashes]
    train = [question for question, out in zip(questions, held_out, strict=True) if not out]
    return train, [question for question, out in zip(questions, held_out, strict=True) if out]


def evenly_spread(questions: list[Question], count: int) -> list[Question]:
    """`count` of them, every so many-th, so that a sorted file gives some of each group; 0: all."""
    count = min(count or len(questions), len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]


# --- Sets by name: the ten benchmarks, and the two that the paper trains on ---------------------


@dataclass(frozen=True)
class QuestionSet:
    """Where a public set is read from, and how its rows become questions."""

    title: str
    dataset: str  # OWNER/NAME on the Hugging Face hub (of the .csv: on GitHub)
    part: str  # CONFIG/SPLIT of the datasets server; or, with a dot, a file that is read whole
    rows: int  # of that part when this was written: with other rows the sample is another
    items: int  # how many are run, as in the paper; 0: as many as training needs
    fields: dict[str, str]  # what record_of and a question file call it -> the set's column
    kind: str
    metric: str | None = None
    gated: bool = False  # its terms want to be accepted first
    paper: tuple[float, ...] = ()  # published accuracy in %, in the order of PAPER_COLUMNS


PAPER_COLUMNS = (
    "Qwen2.5-7B-Instruct alone", "GPT-4o alone", "AgentFlow untrained", "AgentFlow + Flow-GRPO",
)
_FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
_SEARCH = {"id": "id", "question": "question", "answer": "golden_answers"}
_GAIA = {"id": "task_id", "question": "Question", "answer": "Final answer", "level": "Level",
         "file": "file_name"}  # fmt: skip
_AIME = {"id": "ID", "question": "Problem", "answer": "Answer"}
_AMC = {"id": "id", "question": "question", "answer": "answer"}
_GPQA = {"question": "Question", "right": "Correct Answer", "wrong 1": "Incorrect Answer 1",
         "wrong 2": "Incorrect Answer 2", "wrong 3": "Incorrect Answer 3"}  # fmt: skip
_MEDQA = {"question": "question", "choices": "options", "answer": "answer_idx"}
# Search sets count exact matches, the rule of their own papers. GPQA is "main": the official
# repository holds 300 of its questions, more than "diamond" has.
BENCHMARKS = {
    "bamboogle": QuestionSet("Bamboogle", _FLASHRAG, "bamboogle/test.jsonl", 125, 125, _SEARCH,
                             "text", "em", False, (12.0, 68.8, 58.4, 69.6)),
    "2wiki": QuestionSet("2WikiMultihopQA", _FLASHRAG, "2wikimultihopqa/dev", 12576, 100, _SEARCH,
                         "text", "em", False, (23.0, 49.5, 60.0, 77.2)),
    "hotpotqa": QuestionSet("HotpotQA", _FLASHRAG, "hotpotqa/dev", 7405, 100, _SEARCH,
                            "text", "em", False, (21.0, 54.0, 51.3, 57.0)),
    "musique": QuestionSet("MuSiQue", _FLASHRAG, "musique/dev", 2417, 100, _SEARCH,
                           "text", "em", False, (6.0, 24.0, 19.2, 25.3)),
    "gaia": QuestionSet("GAIA", "gaia-benchmark/GAIA", "2023_all/validation", 165, 127, _GAIA,
                        "gaia", None, True, (3.2, 17.3, 17.2, 33.1)),
    "aime24": QuestionSet("AIME24", "Maxwell-Jia/AIME_2024", "default/train", 30, 30, _AIME,
                          "math", None, False, (6.7, 13.3, 16.7, 40.0)),
    "amc23": QuestionSet("AMC23", "math-ai/amc23", "default/test", 40, 40, _AMC,
                         "math", None, False, (47.5, 60.0, 47.4, 61.5)),
    "gameof24": QuestionSet("Game of 24", "princeton-nlp/tree-of-thought-llm",
                            "src/tot/data/24/24.csv", 1362, 100, {"numbers": "Puzzles"},
                            "game24", None, False, (33.0, 32.0, 31.0, 53.0)),
    "gpqa": QuestionSet("GPQA", "Idavidrein/gpqa", "gpqa_main/train", 448, 100, _GPQA,
                        "mc", None, True, (34.0, 31.0, 37.0, 47.0)),
    "medqa": QuestionSet("MedQA", "GBaker/MedQA-USMLE-4-options", "default/test", 1273, 100,
                         _MEDQA, "mc", None, False, (66.0, 60.0, 76.0, 80.0)),
}  # fmt: skip
# DeepMath as TRL keeps it: two small columns, where a row of the original is 48 kB of solutions.
TRAINING = {
    "nq": QuestionSet("NQ", _FLASHRAG, "nq/train.jsonl", 79168, 0, _SEARCH, "text", "em"),
    "deepmath": QuestionSet("DeepMath", "trl-lib/DeepMath-103K", "default/train", 97870, 0,
                            {"question": "prompt", "answer": "solution"}, "math"),
}  # fmt: skip


def load_named(spec: str, offline: bool = False, no_cache: bool = False) -> list[Question]:
    """Questions to measure on: "builtin" (the held-out ones), benchmarks by name ("aime24,amc23",
    "all"), or a file. offline: from the cache alone. no_cache: read again, and kept nowhere."""
    names = [*BENCHMARKS] if spec == "all" else [*dict.fromkeys(spec.split(","))]
    if not {*names} <= {*BENCHMARKS, "builtin"}:
        return load_questions(spec)

    def load(name: str) -> list[Question]:
        if name == "builtin":
            return load_questions(DATA / "heldout.jsonl")
        return load_benchmark(name, offline, no_cache)

    # Gated sets first: a missing token shows before anything is waited for.
    first = sorted(names, key=lambda name: name == "builtin" or not BENCHMARKS[name].gated)
    loaded = {name: load(name) for name in first}
    return [question for name in names for question in loaded[name]]


def load_training(
    spec: str, count: int, offline: bool = False, no_cache: bool = False
) -> list[Question]:
    """Questions to train on: "builtin", a file, or sets by name ("nq,deepmath"), in equal shares
    and in turn: `count` of them, and a tenth more to hold out. The same call gives the same ones.
    """
    names = [*dict.fromkeys(spec.split(","))]
    if {*names} & {*BENCHMARKS}:
        raise ValueError(
            f"--data {spec} would train on a benchmark. Those are for --eval_data and eval.py; "
            f"train on {', '.join(TRAINING)}, or a file."
        )
    if not {*names} <= {*TRAINING}:
        return load_questions(DATA / "train.jsonl" if spec == "builtin" else spec)
    share = math.ceil(count / len(names) / 0.9)
    parts = [load_set(name, TRAINING[name], share, offline, no_cache) for name in names]
    return [one for several in itertools.zip_longest(*parts) for one in several if one]


def load_benchmark(name: str, offline: bool = False, no_cache: bool = False) -> list[Question]:
    """The questions of one of BENCHMARKS: all of them where the paper runs all, else a fixed
    sample, the same for everybody. An id is SET/ROW/ROWS: which row, of how many."""
    return load_set(name, BENCHMARKS[name], BENCHMARKS[name].items, offline, no_cache)


def load_set(
    name: str, known: QuestionSet, count: int, offline: bool, no_cache: bool
) -> list[Question]:
    """`count` questions of a public set, from the cache or the network. A row that can be no
    question, and an id's second row, are left out; what differs from the paper's is said."""
    offline = offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    source = name
    try:
        rows, total = read_set(name, known, count, offline, no_cache)
    except NotServed as error:
        if name != "gameof24" or error.code != "offline":
            raise
        puzzles = solvable_puzzles()  # offline they can be found without the public list
        total, source = len(puzzles), "gameof24 (enumerated)"
        rows = [(i, {"Puzzles": puzzles[i]}) for i in sorted(fixed_order(total, "sample")[:count])]
    questions: dict[str, Question] = {}  # by the set's own id
    left_out = []
    for place, row in rows:
        where = f"{known.title}, row {place}"
        try:
            record = record_of(name, known, row)
            question = record and read_question(record, where, place, source)
        except ValueError as error:
            left_out.append(str(error))
            continue
        if question and question.id in questions:
            left_out.append(f"{where}: the id {question.id} comes a second time.")
        elif question:
            # of Game of 24 the numbers say which: its two lists have them at different places
            row_name = "-".join(map(str, question.numbers)) if question.numbers else place
            unique = dataclasses.replace(question, id=f"{name}/{row_name}/{total}")
            questions[question.id] = unique
    if not questions:
        raise ValueError(f"{known.title} has no row that can be asked. {' '.join(left_out[:1])}")
    if left_out:
        note(f"{known.title}: {len(left_out)} rows left out. The first: {left_out[0]}")
    if total != known.rows:
        note(f"{known.title} has {total} rows, not {known.rows} as before: another sample.")
    if known.items and len(questions) != known.items:
        note(f"{known.title} gave {len(questions)} questions, the paper runs {known.items}.")
    return list(questions.values())


def record_of(name: str, known: QuestionSet, row: dict) -> dict | None:
    """A row of a public set as the record that a question file would hold; None: not to be run."""
    record: dict = {key: row[column] for key, column in known.fields.items()}
    record.update(kind=known.kind, metric=known.metric, group=known.title)
    if name == "gaia":
        record["group"] = f"GAIA level {record['level']}"
        return None if record["file"] else record  # a question about a file that we do not have
    if name == "nq":  # lower case, and without a question mark
        question = re.sub(r"[\s?]+\Z", "", record["question"] or "")
        record["question"] = question and f"{question}?"
    elif name == "gameof24":
        record["numbers"] = [int(number) for number in record["numbers"].split()]
        record["question"] = GAME_OF_24.format(*record["numbers"])
    elif name == "gpqa":  # the right answer has its own column: shuffled, by the question itself
        options = [record[key] or "" for key in ("right", "wrong 1", "wrong 2", "wrong 3")]
        options = [" ".join(option.split()) for option in options]
        order = fixed_order(len(options), record["question"])
        record["choices"] = [options[i] for i in order if options[i]]  # some are null
        right = [i for i, option in enumerate(record["choices"]) if option == options[0]]
        record["answer"] = [f"{LETTERS[i]})" for i in right]  # a twin of the right one is right
    elif name == "medqa":
        record["answer"] = f"{record['answer']})"  # the letter, whatever the options' texts are
    elif known.kind == "math" and record["answer"] is not None:  # "$5$", "033", 27.0
        answer = str(record["answer"]).strip().removeprefix("$").removesuffix("$")
        record["answer"] = re.sub(r"\A(-?)0*([0-9]+)(?:\.0+)?\Z", r"\1\2", answer)
    return record


def fixed_order(count: int, seed: str) -> list[int]:
    """0 to count - 1 in an order that looks random and is the same for everybody, for ever: by
    SHA-256, where Python's generator may change."""
    return sorted(range(count), key=lambda i: hashlib.sha256(f"{seed}/{i}".encode()).digest())


def places_to_read(name: str, total: int, count: int) -> list[int]:
    """Which rows of a set are read: a fixed sample of `count`, whatever else is asked for."""
    if name == "gameof24":
        return list(range(900, 1000))[: max(0, total - 900)]  # the customary slice, by difficulty
    if name == "gaia" or count >= total:  # of GAIA, only the rows say which have a file
        return list(range(total))
    if name == "deepmath":  # whole pages, spread over the set: a hundredth of the requests
        pages = fixed_order(math.ceil(total / PAGE), "page")
        rows = [row for page in pages for row in range(page * PAGE, (page + 1) * PAGE)]
        return sorted([row for row in rows if row < total][:count])
    return sorted(fixed_order(total, "sample")[:count])


# --- Game of 24 without a file -----------------------------------------------------------------

GAME_OF_24 = (
    "Game of 24: use the numbers {}, {}, {} and {}, each exactly once, with +, -, *, / and "
    "parentheses to make 24. Answer with the expression alone."
)


@lru_cache(None)
def reachable(numbers: tuple[int, ...]) -> frozenset[Fraction]:
    """Every value that an expression over all of these numbers (sorted, at most three) can have."""
    if len(numbers) == 1:
        return frozenset([Fraction(numbers[0])])
    values = set()
    for left, right in splits(numbers):
        for a, b in itertools.product(reachable(left), reachable(right)):
            values |= {a + b, a - b, b - a, a * b, *([a / b] if b else []), *([b / a] if a else [])}
    return frozenset(values)


def splits(numbers: tuple[int, ...]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The ways to cut sorted numbers into two parts, neither empty, each way once."""
    found = set()
    for size in range(1, len(numbers) // 2 + 1):
        for chosen in itertools.combinations(range(len(numbers)), size):
            left = tuple(numbers[i] for i in chosen)
            found.add((left, tuple(n for i, n in enumerate(numbers) if i not in chosen)))
    return found


def solvable_puzzles() -> list[str]:
    """"1 1 1 8" … : all sets of four numbers from 1 to 13 that make 24; there are 1,362.

    The last operation joins two parts, so for each value a of the smaller one only the six values
    b with a ∘ b = 24 or b ∘ a = 24 are looked for in the other: half a second for all of them.
    """

    def partners(a: Fraction) -> set[Fraction]:
        return {24 - a, a - 24, a + 24, *([24 * a, 24 / a, a / 24] if a else [])}

    return [
        " ".join(map(str, numbers))
        for numbers in itertools.combinations_with_replacement(range(1, 14), 4)
        if any(
            not reachable(right).isdisjoint(partners(a))
            for left, right in splits(numbers)
            for a in reachable(left)
        )
    ]


# --- Reading from the network ------------------------------------------------------------------

HUB = "https://huggingface.co"
ROWS_API = "https://datasets-server.huggingface.co/rows"
GITHUB = "https://raw.githubusercontent.com"
GITHUB_COMMIT = "ab400345c5ea39d28ea6d7d3be0e417b11113c87"  # of the one list that stands there
PAGE = 100  # rows of one request at most
PAUSE = 0.2  # seconds between requests: no limit is documented, so be modest
TRIES, BACKOFF, MAX_WAIT = 4, 1.0, 310.0  # seconds; the hub counts in windows of five minutes
TIMEOUT = (10, 60)  # seconds to connect, and between two pieces of an answer
# With status 500 the server says by this header whether waiting helps; other codes are for good.
PASSING = ("", "ResponseNotReady", "AuthCheckHubRequestError", "UnexpectedApiError")
# A gated set, or none of that name: which of these comes depends on the token that was sent.
GATED = ("GatedRepo", "ExternalUnauthenticatedError", "ExternalAuthenticatedError")


class NotServed(ValueError):
    """Rows that cannot be had. `code` says why: the server's X-Error-Code, or "offline"."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def read_set(
    name: str, known: QuestionSet, count: int, offline: bool, no_cache: bool
) -> tuple[list, int]:
    """([(place, row)], rows of the whole set): the rows that places_to_read names, each cut down
    to the columns that are used."""
    is_file = "." in known.part
    # What decides the content is in the name, so that another table never finds these rows.
    asked = repr([known.dataset, known.part, sorted(known.fields.values()), not is_file and count])
    file = f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"
    if not is_file:
        kept = cached(file, lambda: read_rows(name, known, count), offline, no_cache)
        return kept["rows"], kept["total"]
    rows = cached(file, lambda: {"rows": read_file(known)}, offline, no_cache)["rows"]
    return [(i, rows[i]) for i in places_to_read(name, len(rows), count)], len(rows)


def cached(name: str, load: Callable[[], dict], offline: bool, no_cache: bool) -> dict:
    """What `load` returns, kept in $AGENTFLOW_CACHE/data with its SHA-256 in a file beside it."""
    path = cache_folder() / "data" / f"{name}.json"
    mark = path.with_suffix(".sha256")
    if path.is_file() and not no_cache:
        body = path.read_bytes()
        seal = mark.read_bytes()[:64] if mark.is_file() else b""
        if seal == hashlib.sha256(body).hexdigest().encode():
            return json.loads(body)
        note(f"{path} is damaged{'' if offline else ', and loaded again'}.")
    if offline:
        raise NotServed(
            f"{name.rpartition('-')[0]} is not in the cache ({path.parent}), and this run is "
            "offline. Load it once without --offline, HF_HUB_OFFLINE and --no_cache.", "offline"
        )
    kept = load()
    if no_cache:
        return kept
    body = json.dumps(kept).encode()
    seal = f"{hashlib.sha256(body).hexdigest()}  {path.name}\n".encode()  # for sha256sum -c
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for place, content in ((path, body), (mark, seal)):  # beside, then renamed
            beside = place.with_name(f"{place.name}.{os.getpid()}.tmp")
            beside.write_bytes(content)
            beside.replace(place)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror}): set AGENTFLOW_CACHE to a folder that "
            "can be, or add --no_cache."
        ) from error
    return kept


def read_file(known: QuestionSet) -> list[dict]:
    """The rows of a set that is one JSONL or CSV file."""
    is_csv = known.part.endswith(".csv")
    url = f"{HUB}/datasets/{known.dataset}/resolve/main/{known.part}"
    url = f"{GITHUB}/{known.dataset}/{GITHUB_COMMIT}/{known.part}" if is_csv else url
    text = download(known, url)[0].decode("utf-8-sig", "replace")
    rows = csv.DictReader(io.StringIO(text)) if is_csv else [row for _, row in records(text, url)]
    return [columns_of(known, row, f"row {i}") for i, row in enumerate(rows)]


def columns_of(known: QuestionSet, row: object, where: str) -> dict:
    """The used columns of a row: what else it holds may be a hundred times as long."""
    lacks = [name for name in known.fields.values() if not isinstance(row, dict) or name not in row]
    if lacks:
        raise NotServed(f"{known.title}, {where}: there is no column {lacks[0]!r} (any more).")
    return {name: row[name] for name in known.fields.values()}


def read_rows(name: str, known: QuestionSet, count: int) -> dict:
    """{"total", "rows": [[place, row]]} from the datasets server's rows, 100 a request at most.

    A first request of one row says how many there are. Raises NotServed where a row does not come,
    or where the set is changed between two requests.
    """
    first = read_page(known, 0, 1)
    wanted = places_to_read(name, first["num_rows_total"], count)
    rows: dict[int, dict] = {}
    at, length = 0, PAGE  # wanted[:at] are here
    with tqdm(total=len(wanted), desc=known.title, leave=False, disable=None) as bar:
        while at < len(wanted):
            last = wanted[bisect.bisect_left(wanted, wanted[at] + length) - 1]
            time.sleep(PAUSE)
            try:
                page = read_page(known, wanted[at], last - wanted[at] + 1)
            except NotServed as error:
                if error.code != "TooBigContentError" or length == 1:
                    raise
                length //= 2
                continue
            if any(page[key] != first[key] for key in ("num_rows_total", "revision")):
                raise NotServed(f"{known.title} was changed while it was read: try again.")
            rows.update(page["rows"])
            before = at
            while at < len(wanted) and wanted[at] in rows:
                at += 1
            if at == before:  # pages may come short, but not without their first row
                raise NotServed(f"{known.title}: the server leaves out row {wanted[at]}.")
            bar.update(at - before)
    return {"total": first["num_rows_total"], "rows": [[place, rows[place]] for place in wanted]}


def read_page(known: QuestionSet, offset: int, length: int) -> dict:
    """One answer of the datasets server, checked: {"num_rows_total", "revision", "rows": {place:
    row}}, whatever order its rows have."""
    config, split = known.part.split("/")
    asked = {"dataset": known.dataset, "config": config, "split": split}
    body, headers = download(known, ROWS_API, {**asked, "offset": offset, "length": length})
    try:
        page = json.loads(body)
        types = {column["name"]: column["type"] for column in page["features"]}
        rows = {}
        for entry in page["rows"]:
            place = operator.index(entry["row_idx"])
            row = rows[place] = columns_of(known, entry["row"], f"row {place}")
            if cut := {*(entry["truncated_cells"] or ())} & {*row}:
                raise NotServed(f"{known.title}, row {place}: {cut.pop()} comes cut short.")
            for column in row:  # the cells of a column of class labels are numbers
                if isinstance(types[column], dict) and types[column].get("_type") == "ClassLabel":
                    row[column] = dict(enumerate(types[column]["names"])).get(row[column])
        total = operator.index(page["num_rows_total"])
    except (KeyError, TypeError, IndexError, AttributeError, json.JSONDecodeError) as error:
        raise NotServed(
            f"The datasets server answers for {known.title} in another shape than documented "
            f"({type(error).__name__}: {error})."
        ) from error
    if page.get("partial") and known.items:  # to train on, a part will do
        raise NotServed(f"Only a part of {known.title} is served: no sample of the whole set.")
    return {"num_rows_total": total, "revision": headers.get("X-Revision"), "rows": rows}


def download(known: QuestionSet, url: str, params: dict | None = None) -> tuple[bytes, Mapping]:
    """(body, headers) of a GET. Tries again, a few times, what may pass: no connection, 429, 5xx.

    HF_TOKEN goes to the hub's two hosts, and there with gated sets only; `requests` drops it where
    a redirect leaves the host.
    """
    token = os.environ.get("HF_TOKEN", "").strip() if known.gated else ""
    if known.gated and not token:
        raise NotServed(gate(known))
    if not re.fullmatch(r"[!-~]*", token):  # an HTTP header takes no others
        raise ValueError("HF_TOKEN holds characters that no token has: copy it again.")
    to_hub = token and url.startswith((f"{HUB}/", ROWS_API))
    headers = {"Authorization": f"Bearer {token}"} if to_hub else {}
    host = urlsplit(url).hostname
    for attempt in range(1, TRIES + 1):
        wait = BACKOFF * 2 ** (attempt - 1)
        try:
            status, answered, body = get(url, params, headers, known.title)
        except requests.RequestException as error:  # its text may hold headers: the kind only
            problem = NotServed(f"No answer from {host} ({type(error).__name__}): try again later.")
            again = True
        else:
            if status == 200:
                return body, answered
            problem = refusal(known, host, status, answered, body)
            again = status in (429, 502, 503, 504) or (status == 500 and problem.code in PASSING)
            told = seconds_to_wait(answered.get("Retry-After", "").strip())
            reset = re.search(r";t=([0-9]+)", answered.get("RateLimit", ""))
            wait = max(wait, told or 0, int(reset[1]) + 1 if status == 429 and reset else 0)
        if not again or attempt == TRIES or wait > MAX_WAIT:
            raise problem
        time.sleep(wait)
    raise AssertionError("the last try has returned or raised")


def get(url: str, params: dict | None, headers: dict, title: str) -> tuple[int, Mapping, bytes]:
    """(status, headers, body) of one request, with a progress bar where the body is long."""
    agent = {"User-Agent": "AgentFlow-from-scratch/1.0 (educational)"}
    options = {"params": params, "timeout": TIMEOUT, "stream": True, "headers": agent}
    # as `auth`, not as a header: a .netrc would replace the header
    with requests.get(url, auth=lambda r: r.headers.update(headers) or r, **options) as answer:
        size = int(answer.headers.get("Content-Length") or 0)
        with tqdm(total=size, desc=title, unit="B", unit_scale=True, leave=False,
                  disable=None if size > 1_000_000 else True) as bar:  # fmt: skip
            body = b""
            for chunk in answer.iter_content(1 << 16):
                body += chunk
                bar.update(len(chunk))
        return answer.status_code, answer.headers, body


def refusal(known: QuestionSet, host: str, status: int, headers: Mapping, body: bytes) -> NotServed:
    """A status that is not 200 as one sentence that says what to do."""
    code = headers.get("X-Error-Code", "")
    try:
        said = str(json.loads(body)["error"])
    except (ValueError, TypeError, KeyError):  # text, or a page of HTML: the status must do
        said = headers.get("X-Error-Message", "")
    said = f"{host} says {status} {code}: {' '.join(said.split())[:200]}".rstrip(": ")
    if code in GATED or status in (401, 403):
        return NotServed(f"{gate(known)} ({said})", code)
    if code == "RenamedDatasetError":
        what = f"was renamed: the table in eval.py needs its new name ({said})."
    elif status in (429, 500, 502, 503, 504) and code in PASSING:
        what = f"cannot be read now: try again later ({said})."
    else:
        what = f"cannot be read ({said})."
    return NotServed(f"{known.title} ({known.dataset}) {what}", code)


def gate(known: QuestionSet) -> str:
    kind = "is gated" if known.gated else "is gated now, or not there any more"
    return (
        f"{known.title} {kind}: accept its terms at {HUB}/datasets/{known.dataset}, and set "
        "HF_TOKEN to a token of that account."
    )


# ------------------------------------------------------------------------------------------------
# Measuring a planner
# ------------------------------------------------------------------------------------------------


def evaluate(
    backbone,
    questions: list[Question],
    tools: list,
    limits: agentflow.Limits,
    sampling: agentflow.Sampling,
    seed: int = 0,
    title: str = "evaluation",
) -> dict:
    """One roll-out a question: {"accuracy", "tool_errors", "turns", "tools", "groups", "items"}.

    The frozen modules are greedy, the planner samples; a token's random number depends on the seed
    and the question's place in the list, and replies enter in order. So the same weights give the
    same numbers again, in a training run and in `python eval.py`.
    Every question counts: one without an answer scores 0 and stays in the denominator.
    """
    with tqdm(total=len(questions), desc=title, leave=False, disable=None) as bar:
        rollouts = agentflow.roll_out(
            [question.text for question in questions],
            1,
            backbone,
            tools,
            limits,
            sampling,
            seed=seed,
            step=-1,  # no training step has this number: other random numbers than in training
            deterministic=True,
            on_done=lambda _: bar.update(),
        )
    items = []
    for question, rollout in zip(questions, rollouts, strict=True):
        response = rollout.generator.text
        reward = question.reward(response)
        items.append(
            {
                "id": question.id,
                "question": question.text,
                "reference": question.references,
                "answer": extract_answer(response) or response.strip(),  # what was scored
                "score": None if math.isnan(reward) else reward,  # None: nobody could judge it
                "group": question.group,
                "tools": [turn.plan.tool_name for turn in rollout.turns],
                "errors": [turn.result.error for turn in rollout.turns],
            }
        )
    return summarise(items)


def summarise(items: list[dict]) -> dict:
    """What the table shows, from the items: shares are shares of calls (one a turn)."""
    calls = [name or "(no tool)" for item in items for name in item["tools"]]
    errors = [error for item in items for error in item["errors"]]
    groups: dict[str, list[float]] = {}
    for item in items:
        if item["score"] is not None:
            groups.setdefault(item["group"], []).append(item["score"])
    judged = [score for scores in groups.values() for score in scores]
    return {
        "accuracy": sum(judged) / max(1, len(judged)),
        "tool_errors": sum(error != "none" for error in errors) / max(1, len(errors)),
        "turns": len(calls) / len(items),
        "tools": {name: calls.count(name) / len(calls) for name in sorted(set(calls))},
        "groups": {group: sum(scores) / len(scores) for group, scores in sorted(groups.items())},
        "items": items,
    }


def table(columns: dict[str, dict]) -> str:
    """Evaluations beside each other, as text: heading -> what evaluate returned."""
    names = sorted({name for result in columns.values() for name in result["tools"]})
    asked = [item["group"] for item in next(iter(columns.values()))["items"]]
    groups = sorted(set(asked))
    rows: list[tuple[str, list[str]]] = []

    def percent(label: str, pick) -> None:
        rows.append((label, [f"{100 * pick(result):.1f} %" for result in columns.values()]))

    percent("accuracy", lambda result: result["accuracy"])
    if len(groups) > 1:
        for group in groups:
            label = f"  {group} ({asked.count(group)})"
            percent(label, lambda result, group=group: result["groups"].get(group, 0.0))
    percent("tool errors (of calls)", lambda result: result["tool_errors"])
    rows.append(("mean turns", [f"{result['turns']:.2f}" for result in columns.values()]))
    for name in names:
        percent(f"  {name}", lambda result, name=name: result["tools"].get(name, 0.0))
    head = f"{'':28}" + "".join(f"{heading:>12}" for heading in columns)
    return "\n".join([head, *(f"{label:28}" + "".join(f"{c:>12}" for c in r) for label, r in rows)])


# ------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------


@dataclass
class EvalConfig(agentflow.ToolFlags):
    """The command line of eval.py."""

    # What is measured
    adapter: str = ""  # a run folder or checkpoint; its run's settings become the defaults below
    data: str = "builtin"  # "builtin" (the held-out questions), sets by name, "all", or a file
    reward: str = ""  # FILE.py:FUNCTION that judges a reply instead of the rule; see load_reward
    model: str = "builtin"  # "builtin", "smollm2", a folder, or a name on the Hugging Face hub
    device: str = "auto"  # auto | cpu | cuda | mps
    json: str = ""  # write the same numbers, and every item, to this file
    # Roll-outs
    max_turns: int = 3  # T_max
    temperature: float = 0.7  # of the planner; the frozen modules are greedy
    max_completion_length: int = 96  # tokens of one planner reply
    max_frozen_length: int = 96  # tokens of one reply of a frozen module
    max_prompt_length: int = 1500  # tokens; a longer prompt loses the middle of old results
    eval_questions: int = 0  # measure on so many questions, evenly spread over all; 0: on all
    lora_r: int = 16  # rank of the adapter
    lora_alpha: int = 32  # the adapter's output is scaled by alpha / r
    seed: int = 0  # of the sampling


def settings_of_run(adapter: str) -> dict:
    """How the run of an adapter measured itself, from run_config.json in the adapter's folder or
    the one above: with these defaults `eval.py --adapter RUN` repeats the run's last measurement.
    Also "held_out_of": the training file of which a tenth was held out, where it was."""
    for folder in (Path(adapter), Path(adapter).parent):
        if adapter and (folder / "run_config.json").is_file():
            path = folder / "run_config.json"
            try:
                run = json.loads(path.read_text(encoding="utf-8"))
                fields = dataclasses.fields(EvalConfig)
                types = {entry.name: type(entry.default) for entry in fields}
                names = types.keys() - {"json", "data", "offline", "temperature"}
                settings = {name: types[name](run[name]) for name in names if name in run}
                settings["offline"] = run["offline"]
                settings["temperature"] = float(run["eval_temperature"])
                settings["data"] = str(run["eval_data"] or run["data"])
                settings["held_out_of"] = "" if run["eval_data"] else settings["data"]
                settings["data_questions"] = int(run.get("data_questions", 0))
                settings["eval_hash"] = run.get("eval_hash", "")
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(
                    f"{path} is damaged ({type(error).__name__}: {error}): it says how the run of "
                    "this adapter measured itself. Restore it, or move the adapter elsewhere."
                ) from error
            return settings
    return agentflow.adapter_settings(adapter)


def held_out_questions(
    data: str, split: bool, count: int = 0, offline: bool = False, no_cache: bool = False
) -> list[Question]:
    """The questions of --data; split: the held-out tenth of what a run trained on."""
    if not split or data == "builtin":
        return load_named(data, offline, no_cache)
    questions = split_questions(load_training(data, count, offline, no_cache))[1]
    if not questions:
        raise ValueError(f"{data} leaves no question held out: name others with --eval_data.")
    return questions


def data_hash(questions: list[Question]) -> str:
    """A fingerprint of questions and references: is this still the same set?"""
    text = json.dumps([[q.id, q.text, q.references] for q in questions], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def same_file(one: str, other: str | None) -> bool:
    return other is not None and Path(one).resolve() == Path(other).resolve()


def main(arguments: list[str] | None = None) -> int:
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--adapter", default="")  # looked at first: its run gives the defaults
    try:
        defaults = settings_of_run(first.parse_known_args(arguments)[0].adapter)
        config = agentflow.parse_flags(EvalConfig, arguments, __doc__, defaults)
        agentflow.check_ranges(config)
        if config.json:
            open(config.json, "a", encoding="utf-8").close()  # better refused now than at the end
        of_run = same_file(config.data, defaults.get("data"))
        questions = held_out_questions(
            config.data,
            of_run and bool(defaults["held_out_of"]),
            defaults.get("data_questions", 0),
            bool(config.offline),
            config.no_cache,
        )
        measured = evenly_spread(questions, defaults.get("eval_questions", 0))
        if of_run and defaults["eval_hash"] not in ("", data_hash(measured)):
            print("note: the run measured itself on other questions; the file has changed since.",
                  file=sys.stderr)
        questions = with_reward(evenly_spread(questions, config.eval_questions), config.reward)
        tools = agentflow.tools_from_flags(config, config.model, config.data)
        backbone = agentflow.load_backbone(
            config.model, config.device, lora_r=config.lora_r, lora_alpha=config.lora_alpha
        )
        if config.adapter:
            backbone.load_adapter(config.adapter)
        result = evaluate(
            backbone,
            questions,
            tools,
            agentflow.limits_of(config, backbone),
            agentflow.sampling_of(config, config.temperature),
            config.seed,
        )
    except (ValueError, OSError, FloatingPointError) as error:
        return agentflow.fail(error)
    print(f"{len(questions)} questions, T_max {config.max_turns}")
    print(table({"trained" if config.adapter else "untrained": result}))
    if config.json:
        Path(config.json).write_text(
            json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(agentflow.run_command(main))
