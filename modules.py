"""The modules of the flow: how their replies become data (paper, section 3).

Planner, executor and verifier are language models and answer in text, so each reply has to be
read: `parse_plan` gives the plan a^t (context, sub-goal, tool), `parse_command` the arguments of
the tool call e^t, `parse_verdict` the verdict v^t. A reply is labelled text or JSON. A mistake of
the model never raises: it comes back as `.error`, a sentence that the planner can act on, and
the flow goes on. Nothing that a model wrote is ever executed here: a command is read with `ast`.

Run `python modules.py` to see a few good and bad replies and what is read from them.
Left out on purpose: repairing broken JSON, guessing a tool from its description, and running
several calls of one command.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tools import Ask, Tool, check_arguments, parse_python

# ------------------------------------------------------------------------------------------------
# Replies as data
# ------------------------------------------------------------------------------------------------


def _encodable(text: str) -> str:
    r"""Without lone surrogates, which "\\ud800" in JSON or in a literal gives: no tokenizer and no
    file takes them."""
    return text.encode("utf-8", "replace").decode("utf-8")


@dataclass
class Plan:
    """a^t: what the planner decided. `error` is None, or a sentence that lists the real tools."""

    context: str = ""  # what the tool needs to know; may be empty
    sub_goal: str = ""
    tool_name: str = ""  # one of the toolset K, spelled as there; "" where it is not known
    error: str | None = None
    justification: str = ""

    def __post_init__(self) -> None:
        self.context, self.sub_goal = _encodable(self.context), _encodable(self.sub_goal)
        self.justification = _encodable(self.justification)


@dataclass
class Command:
    """The arguments of the one call in e^t. `error` is None, or says what would be allowed."""

    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def __post_init__(self) -> None:
        self.arguments = {
            name: _encodable(value) if isinstance(value, str) else value
            for name, value in self.arguments.items()
        }


@dataclass
class Verdict:
    """v^t: stop (1) or go on (0), and the verifier's reason."""

    stop: bool = False
    explanation: str = ""


# ------------------------------------------------------------------------------------------------
# Prompts
# ------------------------------------------------------------------------------------------------

# One set for every model, from the built-in backbone to 7B, so every word is paid for on a laptop.
# The system text is the static head: equal for all requests of a module (the executor's: of a
# tool), so its keys and values are computed once. What varies comes after it, the memory last,
# because the memory only grows: turn t+1's prompt begins with turn t's.

ANALYST_SYSTEM = """\
You analyse a question before an agent answers it with tools.
Tools:
{tools}
Reply with four lines:
Summary: what is asked
Skills: what it takes
Tools: which may help
Considerations: what to mind"""

PLANNER_SYSTEM = """\
You plan the next step of an agent that answers a question with tools.
Tools:
{tools}
Reply with four lines:
Justification: why this step is next
Context: what the tool needs to know
Sub-Goal: what the tool shall do, in one sentence
Tool Name: one name from the list"""

EXECUTOR_SYSTEM = """\
You write the command that makes a tool reach a sub-goal.
{card}
Reply with one line, every value a literal:
execution = tool.execute(parameter="value")"""

VERIFIER_SYSTEM = """\
You judge whether the steps so far are enough to answer a question.
Tools:
{tools}
Reply with two lines:
Explanation: what is known or missing
Conclusion: STOP if they are enough, CONTINUE if not"""

GENERATOR_SYSTEM = """\
You answer a question from the steps of an agent.
Reply with the final answer only, as short as possible: <answer> your answer </answer>"""


def tool_list(tools: list[Tool]) -> str:
    """The toolset K as the planner sees it: a line a tool (the executor sees the chosen card)."""
    return "\n".join(f"- {tool.name}: {tool.description}" for tool in tools)


def command_text(arguments: dict[str, Any] | None) -> str:
    """A command as the memory shows it: tool.execute(query="..."); "" where nothing was called."""
    if arguments is None:
        return ""
    shown = [
        f"{name}={json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)}"
        for name, value in arguments.items()
    ]
    return f"tool.execute({', '.join(shown)})"


def _state(question: str, analysis: str, memory: str) -> str:
    """(q, M^t) as text, in the order that lets prompts share their beginnings.

    There is no placeholder for an empty memory: "Steps: none" would have to be taken back at the
    next turn, and the shared prefix would end there.
    """
    parts = [f"Question: {question}"]
    if analysis:
        parts.append(analysis)
    if memory:
        parts.append(memory)
    return "\n".join(parts)


def analyst_ask(question: str, tools: list[Tool]) -> Ask:
    """The query analysis, once a question and shared by its group (paper, Algorithm 1)."""
    return Ask("analyst", ANALYST_SYSTEM.format(tools=tool_list(tools)), f"Question: {question}")


def planner_ask(question: str, analysis: str, tools: list[Tool], memory: str) -> Ask:
    """a^t ~ pi_theta(. | q, K, M^t): the only trained call."""
    system = PLANNER_SYSTEM.format(tools=tool_list(tools))
    return Ask("planner", system, _state(question, analysis, memory))


def executor_ask(plan: Plan, tool: Tool) -> Ask:
    """e^t ~ E(. | a^t, K): sees the plan and the chosen tool's card alone, no memory."""
    user = f"Context: {plan.context}\nSub-Goal: {plan.sub_goal}"
    return Ask("executor", EXECUTOR_SYSTEM.format(card=tool.card), user)


def verifier_ask(question: str, analysis: str, tools: list[Tool], memory: str) -> Ask:
    """v^t ~ V(. | q, e^t, M^t): the memory's last step holds e^t."""
    system = VERIFIER_SYSTEM.format(tools=tool_list(tools))
    return Ask("verifier", system, _state(question, analysis, memory))


def generator_ask(question: str, memory: str) -> Ask:
    """o ~ G(. | q, M^T): the final answer."""
    return Ask("generator", GENERATOR_SYSTEM, _state(question, "", memory))


# ------------------------------------------------------------------------------------------------
# Reading text that a model wrote: thinking, labels, JSON, brackets. All of it in linear time.
# ------------------------------------------------------------------------------------------------

MAX_CALL = 20_000  # characters of one call or Python literal; bounds the time spent on a bad reply
MAX_TRIES = 40  # so many brackets of one reply are tried as the start of an object or a call

# All that `ast` and `json` raise on text that they cannot read: wrong syntax, NUL bytes and lone
# surrogates (ValueError), unhashable keys (TypeError), nesting too deep for parser or stack.
_UNREADABLE = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)

_THINKING = re.compile(r"<(/?)\s*(?:think|thinking|thought|reasoning)\s*>", re.IGNORECASE)


def drop_thinking(text: str | None) -> str:
    """The reply without its thinking: `<think>…</think>`, all before a lone `</think>`, all after
    a `<think>` that is never closed (a chat template may have opened the tag in the prompt)."""
    text = (text or "").replace("\r\n", "\n").replace("\r", "\n")
    kept, position, thinking = [], 0, False
    # One walk over the tags: `<think>.*?</think>` would be quadratic on many unclosed tags.
    for tag in _THINKING.finditer(text):
        if not tag[1]:
            kept += [] if thinking else [text[position : tag.start()]]
        elif not thinking:
            kept = []  # closed but never opened: everything before it was thinking
        thinking, position = not tag[1], tag.end()
    return "".join(kept) if thinking else "".join(kept) + text[position:]


def _plain(text: str) -> str:
    """Letters and digits only, lower case: how names are compared ("Sub-Goal" is "sub_goal")."""
    return "".join(c for c in text.lower() if c.isalnum())


def _label(names: str) -> re.Pattern[str]:
    """A pattern for a line that begins with one of `names` as a label, however it is decorated:
    `Context:`, `**Context:** c`, `2. **Context**: c`, `### Context`, `- context (short)：c`."""
    return re.compile(
        rf"(?P<lead>[\s>#*_`+•()\d.-]{{0,24}})"  # bullets, numbers, headings, bold
        rf"(?:(?:next|final|selected|chosen|current|best)[\s_-]+)?(?P<name>{names})"
        rf"(?:\s*\([^()]{{0,60}}\))?(?P<gap>[\s*_`]{{0,8}})"
        rf"(?P<colon>[:：﹕]|(?<=\*\*)\s|$)",  # or bold without a colon, or a heading
        re.IGNORECASE,
    )


_PLAN_LABEL = _label(r"justification|context|sub[\s_‐-―−-]*goal|tool[\s_-]*name|tool")
_VERDICT_LABEL = _label(r"explanation|analysis|conclusion|verdict|decision|stop[\s_-]*signal")
_INLINE_LABEL = re.compile(  # labels that share a line; the bare word "tool" is too common here
    r"(?<=\S)\s+(?=[*_`]{0,3}(?:justification|context|sub[\s_-]?goal|tool[\s_]?name)"
    r"[*_`]{0,3}\s?[:：﹕])",
    re.IGNORECASE,
)


def _labelled(text: str, label: re.Pattern[str]) -> list[tuple[str, str]]:
    """All (label, value) pairs in order; a value runs over lines up to the next label."""
    found: list[tuple[str, list[str]]] = []
    for line in text.split("\n"):
        match = label.match(line)
        # Without a colon only a decorated line is a heading; "Context" alone may be prose.
        if match and (match["colon"] or re.search(r"[#*_`\d]", match["lead"])):
            rest = line[match.end() :].strip()
            marks = re.sub(r"[^*_`]", "", re.sub(r"^\s*\*\s", "", match["lead"]))
            if marks and not match["gap"].strip():  # bold was opened and is not closed yet
                if rest.startswith(marks):  # **Context:** c
                    rest = rest[len(marks) :]
                else:  # **Context: c**
                    rest = rest.removesuffix(marks)
            found.append((_plain(match["name"]), [rest]))
        elif found:
            found[-1][1].append(line)
    return [(name, _trim(lines)) for name, lines in found]


def _trim(lines: list[str]) -> str:
    """A value without white space around it, rules (---) below it, or the end of a code fence
    that was opened above the labels (an odd number of fence lines)."""
    lines = list(lines)
    fences = sum(line.lstrip().startswith("```") for line in lines)
    while lines and not lines[-1].strip("-=*_ \t"):
        lines.pop()
    if lines and fences % 2 and lines[-1].strip() == "```":
        lines.pop()
    return "\n".join(lines).strip()


def _first_line(value: str) -> str:
    """The first line that holds a word: chatter below a name or a verdict is not part of it."""
    return next((line for line in value.split("\n") if _plain(line)), "")


_LEXEME = re.compile(r"""\\.|\"\"\"|'''|["'#\n()\[\]{}]""", re.DOTALL)


def _closing(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`, or -1; knows Python's strings and
    comments, so that `f("a)")` and `f("x", # :)` end where they should."""
    depth, inside = 0, ""  # inside: the quote of the string that we are in, or "#"
    for token in _LEXEME.finditer(text, start, start + MAX_CALL):
        piece = token[0]
        if inside:
            # subtle: three quotes inside a one-quote string close it (and are an empty string)
            if piece == ("\n" if inside == "#" else inside) or piece == 3 * inside:
                inside = ""
        elif piece[0] in "\"'#":
            inside = piece
        elif piece in "([{":
            depth += 1
        elif piece in ")]}":
            depth -= 1
            if depth == 0:
                return token.end()
    return -1


def _python(source: str, mode: str = "exec") -> ast.AST | None:
    """The syntax tree, or None where this is no Python. Nothing is run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "\d" in a query is a warning for programmers, not here
        try:
            return parse_python(source, mode)
        except _UNREADABLE:
            return None


def _objects(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(position, object) of each JSON object amid prose, in order; objects inside objects come
    after them. Python's way of writing (True, None, 'x', a last comma) is read too."""
    decoder = json.JSONDecoder(strict=False)  # strict=False: a model writes raw line ends
    for brace in islice(re.finditer(r"\{(?=\s*[\"'])", text), MAX_TRIES):
        start = brace.start()
        try:
            yield start, decoder.raw_decode(text, start)[0]
            continue
        except _UNREADABLE:
            stop = _closing(text, start)  # no JSON: the braces' extent, then Python's literals
        tree = _python(text[start:stop], "eval") if stop > 0 else None
        try:
            value = ast.literal_eval(tree) if tree else None
        except _UNREADABLE:
            value = None
        if isinstance(value, dict):
            yield start, value


def _keyed(fields: dict[Any, Any]) -> dict[str, Any]:
    """The same object with compared keys: sub_goal, "Sub-Goal" and subGoal are one."""
    return {_plain(str(key)): value for key, value in fields.items()}


def _as_text(value: Any) -> str:
    """A field of a JSON plan as text: strings as they are, anything else as JSON."""
    if isinstance(value, str):
        return value.strip()
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


# ------------------------------------------------------------------------------------------------
# Planner
# ------------------------------------------------------------------------------------------------


def parse_plan(text: str, tools: list[str]) -> Plan:
    """Read the planner's reply; `tools` are the names of the toolset K. Never raises.

    Sub-goal and tool are needed, context and justification may be missing. Where labels are
    repeated (a draft, then the plan) the last plan that is complete wins: labels of one plan are
    never mixed with another's, so a plan cut off by the token limit does not spoil the one before
    it. Of several JSON objects, the first that is a plan wins. Errors: no plan found, unknown
    tool, more than one tool.
    """
    # BEGIN SOLUTION 2
    text = drop_thinking(text)
    plan = _last_plan(_labelled(text, _PLAN_LABEL))
    for _, fields in () if plan else _objects(text):
        pairs = [(name, _as_text(value)) for name, value in _keyed(fields).items()]
        if plan := _last_plan(pairs):
            break
    if not plan:  # last try: labels that share a line
        plan = _last_plan(_labelled(_INLINE_LABEL.sub("\n", text), _PLAN_LABEL))
    names = ", ".join(tools)
    if not plan:
        return Plan(
            error="The plan could not be read: it needs the lines 'Context: …', 'Sub-Goal: …' and "
            f"'Tool Name: …', the last one with exactly one of these tools: {names}."
        )
    said = _first_line(plan["tool"]).strip()
    tool = _resolve(said, tools)
    error = f"'{said[:80]}' is not one of the tools. Use exactly one of: {names}."
    return Plan(
        context=plan.get("context", ""),
        sub_goal=plan["subgoal"],
        tool_name=tool,
        error=None if tool else error,
        justification=plan.get("justification", ""),
    )
    # END SOLUTION 2


def _last_plan(pairs: list[tuple[str, str]]) -> dict[str, str] | None:
    """The last plan among (label, value) pairs that has a sub-goal and a tool."""
    # BEGIN SOLUTION 2
    groups: list[dict[str, str]] = [{}]
    before = ""
    for name, value in pairs:
        # A label seen before opens the next plan; but a second tool line right below the first
        # one amends it.
        if name in groups[-1] and not name == before == "toolname":
            groups.append({})
        groups[-1][name] = value
        before = name
    # Where no group is complete, a value repeats a label (a context with a line "Context: …"):
    # then the last value of every label.
    merged = {name: value for plan in groups for name, value in plan.items()}
    for plan in (*reversed(groups), merged):
        # "Tool: hammer" may be a line of the context, so "Tool Name" has the say where it stands
        plan["tool"] = plan.get("toolname") or plan.get("tool", "")
        if plan.get("subgoal") and _first_line(plan["tool"]):
            return plan
    return None
    # END SOLUTION 2


def _resolve(line: str, tools: list[str]) -> str:
    """The tool that a line names, or "" for none or several. Case, spaces, hyphens, camel case,
    back-ticks, `()` and a full stop do not matter, nor a missing "Tool" at the end."""
    said = _plain(line)
    for spell in (_plain, lambda name: _plain(name).removesuffix("tool")):
        same = [tool for tool in tools if said and spell(tool) == spell(line)]
        if len(same) == 1:
            return same[0]
    # "Python_Coder_Tool - because …": a name with words around it. `_` is part of a name, so
    # My_Python_Coder_Tool does not name Python_Coder_Tool.
    named = []
    for tool in tools:
        words = [re.escape(word) for word in re.findall(r"[^\W_]+", tool)]
        pattern = r"(?<!\w)" + r"[\W_]*".join(words) + r"(?!\w)"
        if words and re.search(pattern, line, re.IGNORECASE):
            named.append(tool)
    # A name inside a longer one that is there too ("Search Tool" in "Web Search Tool") is no name.
    whole = [a for a in named if not any(a != b and _plain(a) in _plain(b) for b in named)]
    return whole[0] if len(whole) == 1 else ""


# ------------------------------------------------------------------------------------------------
# Executor
# ------------------------------------------------------------------------------------------------

_CALL = re.compile(r"(?<![\w.])tool\s{0,9}\.\s{0,9}execute\s{0,9}\(")


def parse_command(text: str, card: dict[str, str]) -> Command:
    """Read the executor's reply: exactly one `tool.execute(...)` with literal arguments.

    card: parameter -> type ("str", "int", "float", "bool", "list"), optional as "bool = True".
    The call may stand on several lines; the first fenced block that holds one counts, else the
    bare text. One positional argument is taken for the first parameter. Code around the call is
    neither run nor looked at. JSON: {"command": "…"}, or an object of arguments. Never raises;
    `.error` names the parameters that are allowed.
    """
    text = drop_thinking(text)
    call = _CALL.search(text)
    for position, fields in _objects(text):
        command = _keyed(fields).get("command")
        if call and position > call.start():
            break  # this object stands in or after the call: it is not the reply's own form
        if isinstance(command, str):
            return parse_command(command, card)
        if isinstance(command, dict):
            return _checked(command, card)
        if not call and fields.keys() <= card.keys():
            return _checked(fields, card)
    calls = _calls(text)
    if len(calls) != 1:
        return _refused("no complete call was found" if not calls else "more than one call", card)
    return _read_call(calls[0], card)


def _refused(reason: str, card: dict[str, str]) -> Command:
    """The error of a command: what was wrong, and all that would be allowed."""
    allowed = ", ".join(f"{name}: {kind}" for name, kind in card.items()) or "no parameters"
    return Command(
        error=f"The command was not run: {reason}. It must be exactly one call "
        f"`execution = tool.execute(...)` with literal arguments; parameters: {allowed}."
    )


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """(start, stop) of each fenced block. A fence ends only at the start of a line, so that
    back-ticks inside a query are text; one that is never closed runs to the end."""
    start = -1
    for fence in re.finditer(r"^[ \t]*(?:```|~~~)([^\n]*)(?:\n|\Z)", text, re.MULTILINE):
        if start < 0:
            start = fence.end()
        elif not fence[1].strip("`~ \t"):  # a fence with a language cannot be a closing one
            yield start, fence.start()
            start = -1
    if start >= 0:
        yield start, len(text)


def _calls(text: str) -> list[ast.Call]:
    """The calls in the first block that holds one, or else in the bare text."""
    for start, stop in (*_blocks(text), (0, len(text))):
        if not _CALL.search(text, start, stop):
            continue
        tree = _python(text[start:stop].strip()) if stop - start <= MAX_CALL else None
        # Not Python as a whole (prose, an end marker, a fence inside a string): look for the call
        calls = [node for node in ast.walk(tree) if _is_call(node)] if tree else _scan(
            text, start, stop
        )
        if calls:
            return calls
    return []


def _is_call(node: ast.AST | None) -> bool:
    """Is this `tool.execute(...)`?"""
    function = node.func if isinstance(node, ast.Call) else None
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "execute"
        and isinstance(function.value, ast.Name)
        and function.value.id == "tool"
    )


def _scan(text: str, start: int, stop: int) -> list[ast.Call]:
    """Calls amid prose. Where one is assigned (`execution = …`), others are mere mentions."""
    found, position = [], start
    for match in islice(_CALL.finditer(text, start, stop), MAX_TRIES):
        end = _closing(text, match.end() - 1) if match.start() >= position else -1
        tree = _python(text[match.start() : end], "eval") if end > 0 else None
        if tree and _is_call(tree.body):
            assigned = text[max(0, match.start() - 40) : match.start()].rstrip().endswith("=")
            found.append((assigned, tree.body))
            position = end  # what looks like a call before here stands inside this one's text
    return [call for assigned, call in found if assigned] or [call for _, call in found]


def _read_call(call: ast.Call, card: dict[str, str]) -> Command:
    """The call's arguments as values. Only literals have one: names, sums, f-strings do not."""
    given = [(keyword.arg, keyword.value) for keyword in call.keywords]
    if len(call.args) > 1 or (call.args and not card):
        return _refused("arguments need their names", card)
    if call.args:
        given.insert(0, (next(iter(card)), call.args[0]))
    arguments: dict[str, Any] = {}
    for name, node in given:
        if name is None or name in arguments:
            return _refused("arguments are unpacked (**) or given twice", card)
        try:
            arguments[name] = ast.literal_eval(node)
        except _UNREADABLE:
            return _refused(f"the value of {name[:40]} is not a literal", card)
    return _checked(arguments, card)


def _checked(arguments: dict[str, Any], card: dict[str, str]) -> Command:
    """Names and types against the card, by the rule that holds when the tool is run."""
    problem = check_arguments(card, arguments)
    return Command(error=problem) if problem else Command(arguments=dict(arguments))


# ------------------------------------------------------------------------------------------------
# Verifier
# ------------------------------------------------------------------------------------------------

_STOP = re.compile(r"[^\w?]*_*stop(?![\w'’])[\s*_`\"'”)\]]*(?P<rest>.*)", re.IGNORECASE)
_DOUBT = re.compile(  # what takes a STOP back: after a new sentence, or anywhere in the same one
    r"\bcontinue\b|^\W*(?:not|never|but|wait|if|unless|only)\b"
    r"|^[^.;!].*(?:\?|\b(?:no|not|never|but|if|unless|until|yet|more)\b|n['’]t\b)",
    re.IGNORECASE,
)
_INLINE_CONCLUSION = re.compile(r"\bconclusion[*_`\s]{0,6}[:：﹕](?P<value>[^\n]*)", re.IGNORECASE)


def parse_verdict(text: str) -> Verdict:
    """Read the verifier's reply; anything but a clear STOP means CONTINUE. Never raises.

    Only a conclusion that *is* the word counts: "we should not stop", "STOP is not warranted" or
    a "stop" in the explanation go on. A wrong CONTINUE costs one turn, a wrong STOP the answer.
    The last `Conclusion:` wins; in JSON the keys stop_signal, conclusion, verdict or stop; else a
    last line that is the word alone.
    """
    text = drop_thinking(text)
    labelled = _labelled(text, _VERDICT_LABEL)
    reasons = [value for key, value in labelled if key in ("explanation", "analysis")]
    explanation = reasons[-1] if reasons else ""
    pairs = dict([pair for pair in labelled if pair[0] not in ("explanation", "analysis")][-1:])
    if not pairs:
        inline = list(_INLINE_CONCLUSION.finditer(text))
        for _, fields in _objects(text):
            keyed = _keyed(fields)
            pairs = {
                key: keyed[key]
                for key in ("stopsignal", "conclusion", "verdict", "decision", "stop")
                if key in keyed
            }
            if pairs:
                explanation = _as_text(keyed.get("explanation", keyed.get("analysis", "")))
                break
        if not pairs and inline:
            pairs = {"conclusion": inline[-1]["value"]}
    if pairs:
        key, value = list(pairs.items())[-1]
        stop = _says_stop(value, key)
    else:
        last = text.rstrip().rpartition("\n")[2]
        stop = re.fullmatch(r"[^\w?]*_*stop_*[^\w?]*", last, re.IGNORECASE) is not None
    return Verdict(stop, explanation or text.strip())


def _says_stop(value: Any, key: str) -> bool:
    """Is this conclusion the word STOP (or true, where the key asks whether to stop)?"""
    if not isinstance(value, str):
        return value is True
    line = _first_line(value)
    if key.startswith("stop"):
        return _plain(line) in ("true", "yes", "stop", "1")
    match = _STOP.match(line)
    if match is None:
        return False
    # "STOP." and "STOP: all is known" are the word; "STOP is too early" and "STOP?" are not.
    rest = match["rest"]
    return not rest or (rest[0] in ".,;:!(–—-" and not _DOUBT.search(rest))


if __name__ == "__main__":
    toolset = ["Base_Generator_Tool", "Python_Coder_Tool", "Google_Search_Tool"]
    for reply in (
        "**Context:** 12 apples\n**Sub-Goal:** halve them\n**Tool Name:** `python coder tool`.",
        '{"context": "12 apples", "sub_goal": "halve them", "tool_name": "Calculator"}',
    ):
        print(f"planner said   {reply!r}\n  -> {parse_plan(reply, toolset)}")
    for reply in (
        'Here it is:\n```python\nexecution = tool.execute(\n    query="12 / 2",  # half\n)\n```',
        'execution = tool.execute(query=open("/etc/passwd").read())',
    ):
        print(f"executor said  {reply!r}\n  -> {parse_command(reply, {'query': 'str'})}")
    for reply in ("Explanation: 6 is known.\nConclusion: STOP", "Conclusion: we should not stop"):
        print(f"verifier said  {reply!r}\n  -> {parse_verdict(reply)}")
