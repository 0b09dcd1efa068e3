"""What the parsers read from the replies of planner, executor and verifier, and from an answer.

Each table holds one way of writing a reply a line: what a model may do to the format, not one
recorded reply. The oracle is the same plan, call or verdict written plainly.
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import eval as evaluation
import modules
from tests import cases

TOOLS = ["Base_Generator_Tool", "Python_Coder_Tool", "Google_Search_Tool", "Web_Search_Tool"]
CARD = {"query": "str", "add_citations": "bool = True"}
CALL = 'execution = tool.execute(query="a")'
RECORDED = cases.read(cases.DEFAULT)

# ---- recorded cases ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [row for row in RECORDED if row["kind"] in cases.RUNNERS and "checks" not in row],
    ids=lambda row: row["id"],
)
def test_recorded_case_is_read_as_expected(case):
    passed, found = cases.check(case)
    assert passed, f"got {found}, wanted one of {cases.wanted(case)}"


def _case(value, tier="must", text="STOP"):
    line = {"id": "x", "kind": "parse_verdict", "tier": tier, "input": text}
    return line | {"expected_value": value}


def _program(lines, folder):
    """The exit code of `python -m tests.cases FILE` without a new interpreter."""
    file = folder / "cases.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return cases.main([str(file)])


def test_program_prints_what_differs_and_the_counts_alone_on_the_last_line(tmp_path, capsys):
    unbuilt = {"id": "y", "kind": "parse_poem", "input": ""}
    assert _program([_case("STOP"), _case("CONTINUE"), unbuilt], tmp_path) == 1
    assert capsys.readouterr().out.split("\n") == [
        "x (must): got 'STOP', wanted 'CONTINUE'",
        "skipped, kinds that are not known: parse_poem (1)",
        "1 passed, 1 failed, 1 skipped",
        "",
    ]


def test_program_forgives_one_should_in_ten_and_not_two(tmp_path):
    """9 right and 1 wrong is 90 %, enough; 8 and 2 is not."""
    right, wrong = _case("STOP", "should"), _case("CONTINUE", "should")
    assert _program([right] * 9 + [wrong], tmp_path) == 0
    assert _program([right] * 8 + [wrong] * 2, tmp_path) == 1


def test_program_names_the_line_that_is_no_case(tmp_path, capsys):
    assert _program([_case("STOP"), ["no object"]], tmp_path) == 2
    assert "line 2" in capsys.readouterr().err


@pytest.mark.slow
def test_program_passes_on_the_recorded_cases(capsys):
    assert cases.main([]) == 0
    assert capsys.readouterr().out.split("\n")[-2].endswith(" skipped")


def test_true_and_one_are_different_values_of_a_case():
    assert not cases.same([{"add_citations": 1}], [{"add_citations": True}])
    assert cases.same(0.66667, 0.6667) and cases.same(1.0, True) and not cases.same(0.0, True)


# ---- thinking ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, left",
    [
        ("a<think>b</think>c", "ac"),
        ("<think>b</think>c<think>d</think>e", "ce"),
        ("b</think>c", "c"),  # the chat template opened the tag
        ("a<think>b", "a"),  # cut off while thinking
        ("<THINK>b</THINK >c", "c"),
        ("<think>a<think>b</think>c</think>d", "d"),
        ("<thinking>b</thinking>c", "c"),
        ("I think so", "I think so"),
        (None, ""),
    ],
)
def test_thinking_is_dropped(text, left):
    assert modules.drop_thinking(text) == left


# ---- plans -------------------------------------------------------------------------------------

PLANS = [
    "Context: c\nSub-Goal: g\nTool Name: Python_Coder_Tool",
    "context：c\nsub goal：g\ntool：python-coder-tool",
    "CONTEXT: c\r\nSUB-GOAL: g\r\nTOOL NAME: PYTHON_CODER_TOOL\r\n",
    "**Context:** c\n**Sub-Goal:** g\n**Tool Name:** Python_Coder_Tool",
    "**Context**: c\n**Sub-Goal**: g\n**Tool Name**: `Python_Coder_Tool`",
    "**Context: c**\n**Sub-Goal: g**\n**Tool Name: Python_Coder_Tool**",
    "**1. Context:** c\n**2. Sub-Goal:** g\n**3. Tool Name:** Python_Coder_Tool",
    "* **Context:** c\n* **Sub-Goal:** g\n* **Tool Name:** Python_Coder_Tool",
    "(1) Context: c\n(2) Sub-Goal: g\n(3) Tool Name: Python_Coder_Tool",
    "> - Context: c\n> - Subgoal: g\n> - Tool: Python_Coder_Tool",
    "### Context\nc\n\n### Sub-Goal\ng\n\n### Tool Name\n\nPython_Coder_Tool",
    "## 1. Context:\nc\n---\n## 2. Sub-Goal:\ng\n---\n## 3. Tool Name:\n`Python_Coder_Tool`\n",
    "```\nTool Name: Python_Coder_Tool\nSub-Goal: g\nContext: c\n```",
    "Context: c Sub-Goal: g Tool Name: Python_Coder_Tool",
    "Context (facts): c\nSub-Goal (one): g\nSelected Tool (exact name): Python_Coder_Tool",
    "Sub\u2011Goal: g\nContext: c\nTool Name: Python_Coder_Tool",
    '{"context": "c", "sub_goal": "g", "tool_name": "python coder tool"}',
    'In {braces}: {"a": 1}, so {"plan": {"Context": "c", "Sub-Goal": "g", "Tool": '
    '"Python_Coder_Tool"}} and {"more": 2}',
    "{'context': 'c', 'subGoal': \"g\", 'toolName': 'Python_Coder_Tool', 'sure': True,}",
    '```json\n{\n  "context": "c",\n  "sub_goal": "g",\n  "tool_name": "Python_Coder_Tool"\n}\n```',
    "Tool Name: Web_Search_Tool</think>Context: c\nSub-Goal: g\nTool Name: Python_Coder_Tool",
]


@pytest.mark.parametrize("text", PLANS)
def test_plan_is_read_however_it_is_decorated(text):
    plan = modules.parse_plan(text, TOOLS)
    assert plan.error is None
    assert (plan.context, plan.sub_goal, plan.tool_name) == ("c", "g", "Python_Coder_Tool")


@pytest.mark.parametrize(
    "name",
    [
        "Python_Coder_Tool - because it computes",
        "`Python_Coder_Tool`: see above",
        "I choose the Python Coder Tool here",
        "Python_Coder_Tool()",
        "[Python_Coder_Tool]",
        '"Python_Coder_Tool",',
        "PythonCoderTool",
        "pythonCoder",
        "python_coder",
        "Python_Coder_Tool</s>",
        "1. Python_Coder_Tool.",
        "\n```\nPython_Coder_Tool\n```\nThis will do.",
        "Python_Coder_Tool\n\nGood luck with Web_Search_Tool!",
    ],
)
def test_tool_name_is_resolved_when_one_tool_is_meant(name):
    plan = modules.parse_plan(f"Context: c\nSub-Goal: g\nTool Name: {name}", TOOLS)
    assert (plan.tool_name, plan.error) == ("Python_Coder_Tool", None)


@pytest.mark.parametrize(
    "name",
    [
        "Calculator_Tool",
        "Search_Tool",  # two tools end so
        "My_Python_Coder_Tool",
        "Python_Coder_Tool or Google_Search_Tool",
        "None",
        "?",
    ],
)
def test_unknown_or_ambiguous_tool_is_an_error_that_lists_the_tools(name):
    plan = modules.parse_plan(f"Context: c\nSub-Goal: g\nTool Name: {name}", TOOLS)
    assert plan.tool_name == "" and all(tool in plan.error for tool in TOOLS)


def test_name_that_is_part_of_another_tools_name_is_told_apart():
    tools = ["Search", "Web_Search", "Web_Search_Fast"]
    for said, meant in [("Search", 0), ("use Web Search, please", 1), ("the web-search-fast", 2)]:
        plan = modules.parse_plan(f"Sub-Goal: g\nTool Name: {said}", tools)
        assert plan.tool_name == tools[meant]


@pytest.mark.parametrize(
    "text",
    [
        "I will use Python_Coder_Tool to compute it.",
        "Context: c\nSub-Goal: g",
        "Context: c\nSub-Goal:\nTool Name: Python_Coder_Tool",
        "Context: c\nSub-Goal: g\nTool Name:\n",
        '{"context": "c", "sub_goal": "g", "tool_na',
        '{"context": "c", "tool_name": "Python_Coder_Tool"}',
        "<think>Context: c\nSub-Goal: g\nTool Name: Python_Coder_Tool",
    ],
)
def test_plan_without_sub_goal_or_tool_is_an_error_that_asks_for_the_lines(text):
    plan = modules.parse_plan(text, TOOLS)
    assert "Sub-Goal:" in plan.error and "Tool Name:" in plan.error and TOOLS[3] in plan.error


def test_values_keep_their_lines_and_their_own_marks():
    context = "x = `a` and **b**\n\n- 3 * 4\n```python\nprint(1)\n```"
    text = f"Justification: j1\nj2\nContext: {context}\nSub-Goal: g\nTool Name: Web_Search_Tool"
    plan = modules.parse_plan(text, TOOLS)
    assert (plan.context, plan.justification) == (context, "j1\nj2")


def test_last_complete_plan_wins_over_a_draft_and_over_one_that_was_cut_off():
    draft = "Context: c1\nSub-Goal: g1\nTool Name: Web_Search_Tool\n"
    final = "Context: c2\nSub-Goal: g2\nTool Name: Python_Coder_Tool\n"
    assert modules.parse_plan(f"Draft:\n{draft}\nFinal:\n{final}", TOOLS).sub_goal == "g2"
    cut = modules.parse_plan(final + "\nContext: c3\nSub-Goal: g3", TOOLS)
    assert (cut.context, cut.sub_goal, cut.tool_name) == ("c2", "g2", "Python_Coder_Tool")
    # An unknown tool in the last plan is an error, never a silent return to the draft.
    assert modules.parse_plan(draft + final.replace("Python", "Perl"), TOOLS).error


def test_tool_line_below_a_tool_line_amends_it_and_a_tool_in_the_context_does_not_count():
    plan = "Sub-Goal: g\nTool Name: Web_Search_Tool\nTool Name: Python_Coder_Tool"
    assert modules.parse_plan(plan, TOOLS).tool_name == "Python_Coder_Tool"
    plan = "Context: we have\nTool: hammer\nSub-Goal: g\nTool Name: Python_Coder_Tool"
    assert modules.parse_plan(plan, TOOLS).tool_name == "Python_Coder_Tool"


# ---- commands ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        CALL + ";",
        CALL + "  # look it up",
        CALL + "\nprint(execution)",
        'execution = tool.execute("a")',  # one positional argument: the first parameter
        "tool . execute ( query = 'a' )",
        'execution = tool.execute(\n    # what\n    query="a",  # it\'s short :)\n)',
        'execution = tool.execute(query="" "a")',
        f"Don't worry, here it is: {CALL}.",
        f"I call tool.execute() now.\nCommand: {CALL}\n<END>",
        f"**Command:** `{CALL}`",
        f"```{CALL}```",
        f"```python\n{CALL}",
        f"~~~\n{CALL}\n~~~",
        f"1. Run\n   ```py\n   {CALL}\n   ```\n",
        f"```bash\nls\n```\n```python\n{CALL}\n```\n```python\n{CALL.replace('a', 'b')}\n```",
        f"Try `tool.execute(query='b')`:\n```python\n{CALL}\n```",
        f"```python\n# {CALL.replace('a', 'b')}\n{CALL}\n```",
        f"```python\n{CALL}\n<END>",
        f"<think>tool.execute(query='b')</think>{CALL}",
        json.dumps({"analysis": "x", "command": f"```python\n{CALL}\n```"}),
        f"```json\n{json.dumps({'command': CALL})}\n```",
        str({"command": CALL, "sure": True}),
        '{"query": "a"}',
        '<tool_call>{"name": "t", "arguments": {"query": "a"}}</tool_call>',
    ],
)
def test_one_literal_call_is_read_wherever_it_stands(text):
    command = modules.parse_command(text, CARD)
    assert (command.arguments, command.error) == ({"query": "a"}, None)


@pytest.mark.parametrize(
    "query",
    [
        "use ```x``` here",
        "\n```python\nprint('a')\n```\n",
        'He said "hi" (twice)',
        "tool.execute(query='b')",
        "50 % of {x} # not a comment",
        "naïve “Zürich” 東京",
        "C:\\new",
        "",
    ],
)
def test_query_comes_back_as_it_was_written(query):
    for text in (
        f"```python\nexecution = tool.execute(query={query!r})\n```",
        f"Sure: execution = tool.execute(query={query!r})\n<END>",
        json.dumps({"command": f"execution = tool.execute(query={query!r})"}),
    ):
        assert modules.parse_command(text, CARD).arguments == {"query": query}


def test_fence_inside_a_string_of_several_lines_does_not_end_the_command():
    text = '```python\nexecution = tool.execute(query="""\n```\nx\n```\n""")\n```'
    assert modules.parse_command(text, CARD).arguments == {"query": "\n```\nx\n```\n"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "There is nothing to run.",
        "```python\nprint(1)\n```",
        "```python\n```",
        f"{CALL}\n{CALL}",
        "tool.execute(query=tool.execute(query='a'))",
        "x = 'a'\nexecution = tool.execute(query=x)",
        "tool.execute(query=open('/etc/passwd').read())",
        "tool.execute(query=f'{1}')",
        "tool.execute(query='a' * 9)",
        "tool.execute(**{'query': 'a'})",
        "tool.execute(*['a'])",
        "tool.execute('a', False)",
        "tool.execute('a', query='a')",
        "tool.execute(query='a', query='b')",
        "tool.execute(queri='a')",
        "tool.execute(add_citations=True)",
        "tool.execute()",
        "tool.execute(query=5)",
        "tool.execute(query=None)",
        "tool.execute(query=['a'])",
        "tool.execute(query='a', add_citations='False')",
        "tool.execute(query='a', add_citations=1)",
        "tool.execute(query='a'",
        "tool.execute(query='don't')",
        "mytool.execute(query='a')",
        "my.tool.execute(query='a')",
        '{"command": "print(1)"}',
        '{"command": {"queri": "a"}}',
    ],
)
def test_anything_but_one_literal_call_is_an_error_that_names_the_parameters(text):
    command = modules.parse_command(text, CARD)
    assert command.arguments == {}
    assert "query: str" in command.error and "add_citations: bool = True" in command.error


@pytest.mark.parametrize(
    "kind, good, bad",
    [
        ("int", ["1", "-3"], ["True", "1.0", "'1'"]),
        ("float", ["1", "2.5", "-1e3"], ["True", "'1'"]),
        ("bool", ["True"], ["1", "'True'"]),
        ("list", ["[1, 'a']", "[]"], ["'a'", "(1, 2)"]),
        ("str", ["'a'"], ["b'a'", "1"]),
        ("str = None", ["'a'", "None"], ["1"]),
    ],
)
def test_types_are_those_of_the_card(kind, good, bad):
    for value in good + bad:
        command = modules.parse_command(f"tool.execute(x={value})", {"x": kind})
        assert (command.error is None) == (value in good), value


def test_nothing_that_a_model_wrote_is_run(tmp_path):
    canary = tmp_path / "canary"
    code = f"open({str(canary)!r}, 'w').close()"
    for text in (f"{code}\n{CALL}", f"tool.execute(query={code})", f"{{'command': {code}}}"):
        modules.parse_command(text, CARD)
    assert not canary.exists()


# ---- verdicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Explanation: all is known.\nConclusion: STOP",
        "Explanation: all is known. Conclusion: STOP",
        "**Conclusion:** `STOP`",
        "**Conclusion: STOP**",
        "2. **Conclusion**: stop.",
        "### Conclusion\n\n**STOP**",
        "**Conclusion** STOP",
        "Conclusion：[STOP]",
        "Final Conclusion: STOP!",
        "Conclusion: STOP. No further tool is needed.",
        "Conclusion: STOP - all is known",
        "Conclusion: CONTINUE\nWait, it is there.\nConclusion: STOP",
        "<think>Conclusion: CONTINUE</think>STOP",
        "All is known.\n\nSTOP",
        '{"explanation": "x", "stop_signal": true}',
        "```json\n{'conclusion': 'STOP', 'sure': True}\n```",
        'So: {"verdict": "stop"} is my verdict.',
        "Stop Signal: True",
    ],
)
def test_conclusion_that_is_the_word_stops(text):
    assert modules.parse_verdict(text).stop is True


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Conclusion: CONTINUE",
        "Conclusion: we should not stop",
        "Conclusion: do not STOP",
        "Conclusion: STOP is not warranted",
        "Conclusion: STOP (not yet)",
        "Conclusion: STOP: no, more is needed",
        "Conclusion: STOP?",
        "Conclusion: STOP or CONTINUE",
        "Conclusion: STOP/CONTINUE",
        "Conclusion: Stopped too early",
        "Conclusion: NON-STOP",
        "Conclusion: CONTINUE, do not STOP",
        "Conclusion: STOP\nNo.\nConclusion: CONTINUE",
        "The conclusion: STOP is premature.",
        "If all were known I would say\nSTOP\nbut it is not.",
        "do not\ndo not STOP",
        "Should we STOP?",
        '{"explanation": "STOP", "stop_signal": false}',
        '{"conclusion": "do not stop"}',
        '{"stop_signal": "false"}',
        "Stop Signal: False",
        "<think>Conclusion: STOP</think>Explanation: more is needed.",
        "<think>Conclusion: STOP",
    ],
)
def test_anything_but_a_clear_stop_goes_on(text):
    assert modules.parse_verdict(text).stop is False


def test_verdict_keeps_the_explanation():
    assert modules.parse_verdict("Explanation: a\nb\nConclusion: STOP").explanation == "a\nb"
    assert modules.parse_verdict('{"analysis": "a", "stop_signal": true}').explanation == "a"
    assert modules.parse_verdict("no labels").explanation == "no labels"


# ---- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<answer> Paris </answer>", "Paris"),
        ("<ANSWER>a</Answer> or rather <answer>b</answer>", "b"),
        ("<answer>Paris</answer>, in <answer></answer> tags", "Paris"),
        ("Write it between <answer> and </answer>.", None),
        ("Put it in <answer> tags.", None),
        ("<answer>your answer</answer>", None),
        ("<answer>...</answer>", None),
        ("<answer></answer>", None),
        ("<answer>two\nlines</answer>", "two\nlines"),
        ("It is <answer>Paris", "Paris"),
        ("It is <answer>Paris</ans", "Paris"),
        ("in <answer> \nQuestion: what is the capital?\nContext: long", None),
        ("<answer>**Paris**</answer>", "Paris"),
        ("<answer>∞</answer>", "∞"),
        ("<answer>0</answer>", "0"),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{3}, no: \boxed {7}", "7"),
        (r"\boxed{3} and \boxed{", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),  # an escaped brace opens nothing
        (r"\boxed{}", None),
        (r"\boxed{3", None),
        (r"<answer>\boxed{33}</answer>", "33"),
        (r"The final answer is $\boxed{5}$.", "5"),
        (r"\boxed{7}. Final answer: 8", "8"),
        ("**Final Answer:** 73.", "73"),
        ("Sum is 12+34=46. **Final answer: 73**", "73"),
        ("### Final Answer\n\n42\n", "42"),
        ("FINAL ANSWER：\n3.14", "3.14"),
        ("The final answer is **42**.", "42"),
        ("<answer>Paris</answer> My final answer is based on step 2.", "Paris"),
        ("My final answer needs more steps.", None),
        ("final answer:", None),
        ("<think><answer>5</answer></think>", None),
        ("<think>5?", None),
        ("Paris", None),
        ("", None),
        (None, None),
    ],
)
def test_last_explicit_answer_is_taken(text, answer):
    assert evaluation.extract_answer(text) == answer


# ---- any text at all ---------------------------------------------------------------------------


def _read_all(text):
    plan = modules.parse_plan(text, TOOLS)
    command = modules.parse_command(text, CARD)
    verdict = modules.parse_verdict(text)
    answer = evaluation.extract_answer(text)
    # What the callers rely on, whatever the text
    assert plan.error or (plan.tool_name in TOOLS and plan.sub_goal)
    assert command.error or "query" in command.arguments
    assert isinstance(verdict.stop, bool)
    assert answer is None or answer.strip()


def test_random_text_never_raises():
    """3,000 texts glued together from the pieces that the parsers look for, and from noise."""
    pieces = (
        "Context:|Sub-Goal: |Tool Name: |Python_Coder_Tool|\n|```|```python\n|tool.execute(|query=|"
        '"|\'|"""|)|{|}|[|]|,|:|"command": |"sub_goal": "g", |"tool_name": |<think>|</think>|'
        "<answer>|</answer>|\\boxed{|Final answer: |Conclusion: |STOP|not |{'a': |True|null|**|# |"
        "\\|\0|\ud800|é|：|1|-| |\t|\r\n|\u2028|(|lambda: 0|f'{x}'|;|="
    ).split("|")
    generator = random.Random(0)
    for _ in range(3000):
        _read_all("".join(generator.choices(pieces, k=generator.randint(0, 40))))


@pytest.mark.parametrize(
    "unit",
    ["{", "[", "(", '{"a":', "{'a': ", '{"a": 1, ', "-", "1+", "not ", "1", '"', "'''"]
    + ['"""\\', "\\", "<think>", "</think>", "<answer>", "<answer> ", "\\boxed{", "```\n"]
    + ["tool.execute(", " ", "\n", "Conclusion: STOP,", "final answer is", "*"]
    + ["Context:\n", "Tool Name: Python_Coder_Tool\n"],
)
def test_long_hostile_text_is_read_in_linear_time(unit):
    """300,000 characters: a pattern that backtracks, or a scan that starts again at each bracket,
    would take minutes; a fraction of a second is enough (the limit is for busy machines)."""
    text = unit * (300_000 // len(unit))
    for reply in (text, f"Sub-Goal: g\nTool Name: {text}", f"tool.execute(query={text}"):
        start = time.perf_counter()
        _read_all(reply)
        assert time.perf_counter() - start < 5.0


@pytest.mark.parametrize("unit", ["{'query': ", "[", "(", "-", "~", "not ", "1+", '{"query":'])
def test_nesting_deeper_than_the_parser_allows_is_an_error_of_the_reply(unit):
    for text in (f"tool.execute(query={unit * 6000}1)", f"tool.execute(query={unit * 300}1)"):
        assert modules.parse_command(text, CARD).error


READ_IN_THREADS = """
import gc, threading, time
import tools

class Interrupt:  # garbage whose collection, at any moment, lets another thread go on
    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(0)

source, problems = "[" + "(1, [2, 'a']), " * 100 + "]", []

def read():
    for _ in range(50):
        for _ in range(3):
            Interrupt()
        try:
            tools.parse_python(source, "eval")
        except BaseException as error:
            problems.append(repr(error))

threads = [threading.Thread(target=read) for _ in range(3)]
gc.set_threshold(5)
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(problems)
"""


def test_python_can_be_read_while_other_threads_read_too():
    """CPython 3.11's parser counts its depth for all threads together: a SystemError, seldom, in
    the middle of a run. In a fresh process, its collector made to interrupt it, plain `ast.parse`
    fails every time."""
    folder = Path(modules.__file__).parent
    done = subprocess.run([sys.executable, "-c", READ_IN_THREADS], cwd=folder, text=True,
                          capture_output=True, timeout=60)  # fmt: skip
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
