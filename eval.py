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
import dataclasses
import gzip
import hashlib
import json
import math
import re
import string
import sys
import unicodedata
import zlib
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from tqdm import tqdm

import agentflow
from modules import drop_thinking

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


@dataclass(frozen=True)
class Question:
    """A question with its reference answers (aliases: any of them is right)."""

    id: str
    text: str
    references: list[str]
    kind: str = "all"  # what the table groups by; no influence on the score

    def reward(self, response: str | None) -> float:
        """R in {0, 1}: the verifiable outcome of the whole roll-out. Nothing else is rewarded.

        Numbers are compared as numbers, everything else as normalised text.
        """
        numbers = [item for item in self.references if _number(_bare(item)) is not None]
        texts = [item for item in self.references if item not in numbers]
        return max(
            score("math", response, numbers) if numbers else 0.0,
            score("text", response, texts) if texts else 0.0,
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
            'file, or "builtin".'
        ) from error
    try:
        if raw[:2] == b"\x1f\x8b":  # gzip, whatever the name says
            raw = gzip.decompress(raw)
        text = raw.decode("utf-8-sig")  # a byte order mark is dropped
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no UTF-8 text, gzipped or not: {error}.") from error
    try:
        questions = [
            read_question(record, f"{path}, line {line}", line)
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


def records(text: str, path: Path) -> list[tuple[int, object]]:
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


def read_question(record: object, where: str, line: int) -> Question:
    """One record as a Question; a sentence for each way in which it can be none."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a JSON object with question and answer is needed.")

    def first(fields: tuple[str, ...]):
        return next((record[name] for name in fields if record.get(name) is not None), None)

    text, reference, identity = map(first, (QUESTION_FIELDS, REFERENCE_FIELDS, ID_FIELDS))
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: no question; one of {', '.join(QUESTION_FIELDS)} is needed.")
    references = reference if isinstance(reference, list) else [reference]
    references = [reference_text(item, where) for item in references if item is not None]
    references = list(dict.fromkeys(item for item in references if item))
    if not references:
        raise ValueError(f"{where}: no answer; one of {', '.join(REFERENCE_FIELDS)} is needed.")
    kind = record.get("kind")
    try:
        json.dumps([text, references, kind, identity], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a pair of surrogates: no file could hold it
        raise ValueError(f"{where}: {error.object[error.start]!r} is no character.") from error
    return Question(
        str(line if identity is None else identity),
        text.strip(),
        references,
        kind if isinstance(kind, str) else "all",
    )


def reference_text(item: object, where: str) -> str:
    """A reference answer as text: 1e20 as the digits that a reader would write."""
    if isinstance(item, float) and not math.isfinite(item):
        raise ValueError(f"{where}: the answer {item} is no number.")
    if isinstance(item, (int, float)) and not isinstance(item, bool):
        return format(Decimal(repr(item)), "f")
    if not isinstance(item, (str, bool)):
        raise ValueError(f"{where}: an answer is a text or a number, or a list of these.")
    return str(item).strip()


def split_questions(questions: list[Question]) -> tuple[list[Question], list[Question]]:
    """(training, held out): a tenth is held out, chosen by a hash of the id, so that the choice
    stays when questions are added or moved."""
    held_out = [
        int.from_bytes(hashlib.sha256(question.id.encode()).digest()[:8], "big") % 10 == 0
        for question in questions
    ]
    train = [question for question, out in zip(questions, held_out, strict=True) if not out]
    return train, [question for question, out in zip(questions, held_out, strict=True) if out]


def evenly_spread(questions: list[Question], count: int) -> list[Question]:
    """`count` of them, every so many-th, so that a sorted file gives some of each kind; 0: all."""
    count = min(count or len(questions), len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]


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
    """One roll-out a question: {"accuracy", "tool_errors", "turns", "tools", "kinds", "items"}.

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
        items.append(
            {
                "id": question.id,
                "question": question.text,
                "reference": question.references,
                "answer": extract_answer(response) or response.strip(),  # what was scored
                "score": question.reward(response),
                "kind": question.kind,
                "tools": [turn.plan.tool_name for turn in rollout.turns],
                "errors": [turn.result.error for turn in rollout.turns],
            }
        )
    return summarise(items)


def summarise(items: list[dict]) -> dict:
    """What the table shows, from the items: shares are shares of calls (one a turn)."""
    calls = [name or "(no tool)" for item in items for name in item["tools"]]
    errors = [error for item in items for error in item["errors"]]
    kinds: dict[str, list[float]] = {}
    for item in items:
        kinds.setdefault(item["kind"], []).append(item["score"])
    return {
        "accuracy": sum(item["score"] for item in items) / len(items),
        "tool_errors": sum(error != "none" for error in errors) / max(1, len(errors)),
        "turns": len(calls) / len(items),
        "tools": {name: calls.count(name) / len(calls) for name in sorted(set(calls))},
        "kinds": {kind: sum(scores) / len(scores) for kind, scores in sorted(kinds.items())},
        "items": items,
    }


def table(columns: dict[str, dict]) -> str:
    """Evaluations beside each other, as text: heading -> what evaluate returned."""
    names = sorted({name for result in columns.values() for name in result["tools"]})
    asked = [item["kind"] for item in next(iter(columns.values()))["items"]]
    kinds = sorted(set(asked))
    rows: list[tuple[str, list[str]]] = []

    def percent(label: str, pick) -> None:
        rows.append((label, [f"{100 * pick(result):.1f} %" for result in columns.values()]))

    percent("accuracy", lambda result: result["accuracy"])
    if len(kinds) > 1:
        for kind in kinds:
            label = f"  {kind} ({asked.count(kind)})"
            percent(label, lambda result, kind=kind: result["kinds"].get(kind, 0.0))
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
    data: str = "builtin"  # questions: "builtin" (the held-out ones), or a JSON/JSONL file
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
                settings["eval_hash"] = run.get("eval_hash", "")
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(
                    f"{path} is damaged ({type(error).__name__}: {error}): it says how the run of "
                    "this adapter measured itself. Restore it, or move the adapter elsewhere."
                ) from error
            return settings
    return agentflow.adapter_settings(adapter)


def held_out_questions(data: str, split: bool) -> list[Question]:
    """The questions of --data: the built-in held-out ones, a file's, or a file's held-out tenth."""
    if data == "builtin":
        return load_questions(DATA / "heldout.jsonl")
    questions = load_questions(data)
    if split and not (questions := split_questions(questions)[1]):
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
        questions = held_out_questions(config.data, of_run and bool(defaults["held_out_of"]))
        measured = evenly_spread(questions, defaults.get("eval_questions", 0))
        if of_run and defaults["eval_hash"] not in ("", data_hash(measured)):
            print("note: the run measured itself on other questions; the file has changed since.",
                  file=sys.stderr)
        questions = evenly_spread(questions, config.eval_questions)
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
