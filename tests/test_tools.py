"""The tools as worked examples: what comes back when all is well, and what when it is not.

No test needs the network: servers that play a part run on 127.0.0.1, inside the test.
"""

import contextlib
import dataclasses
import email.utils
import gzip
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import agentflow
import tools
import train
from tests import cases
from tests.cases import left_over

CASES = [json.loads(line) for line in
         (Path(__file__).parent / "cases.jsonl").read_text(encoding="utf-8").split("\n") if line]
SANDBOX_CASES = [case for case in CASES if case["kind"] == "python_tool"]
NAMESPACES = not any("process namespace" in lack for lack in tools.run_python("0").missing)


def finish(flow, *replies):
    """Drive a flow to its end: Jobs run at once, Asks are answered from `replies` in order."""
    replies, asks, answer = list(replies), [], None
    try:
        while True:
            need = flow.send(answer)
            if isinstance(need, tools.Ask):
                asks.append(need)
                answer = SimpleNamespace(text=replies.pop(0))
            else:
                answer = need.run()
    except StopIteration as stop:
        return stop.value, asks


def result_of(tool, *replies, **arguments):
    return finish(tools.execute(tool, arguments), *replies)[0]


# --- texts and cards ---------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 5, 40, 60, 99, 100, 101])
def test_a_clipped_text_is_within_its_limit_and_counts_what_is_missing(limit):
    """100 characters at limit 60: the note takes 38, so 22 stay, 11 at each end, 78 are gone."""
    text = "".join(chr(ord("a") + i % 26) for i in range(100))
    clipped = tools.clip_middle(text, limit)
    assert len(clipped) <= limit or limit >= 100
    note = re.search(r"\n\[\.\.\. (\d+) characters left out \.\.\.\]\n", clipped)
    if note:
        head, tail = clipped[:note.start()], clipped[note.end():]
        assert text.startswith(head) and text.endswith(tail)
        assert int(note[1]) == 100 - len(head) - len(tail)
    assert bool(note) == (40 <= limit < 100)
    assert (clipped == text) == (limit >= 100)


def test_cards_are_short_and_name_every_input():
    """Each word of a card is paid for in every prompt that holds it."""
    for kind in tools.TOOLS:
        card = kind.card.fget(kind)
        assert card.count("\n") <= 7 and len(card.split()) <= 110
        assert 10 <= len(kind.description.split()) <= 20 and "\n" not in kind.description
        assert all(f"{name}: {kind.parameters[name]}" in card for name in kind.parameters)
        assert all(demo.startswith("execution = tool.execute(") for demo in kind.demos)


def test_the_toolset_has_a_fixed_order_and_refuses_what_it_does_not_know(monkeypatch, tmp_path):
    library = tmp_path / "library.jsonl"
    library.write_text('{"id": "1", "title": "Iron", "text": "Iron is a metal."}\n')
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    names = [kind.name for kind in tools.TOOLS]
    assert [tool.name for tool in tools.make_tools(library=library)] == names
    two = tools.make_tools(["Library_Search_Tool", "Base_Generator_Tool"], library=library)
    assert [tool.name for tool in two] == ["Base_Generator_Tool", "Library_Search_Tool"]
    with pytest.raises(ValueError, match="'Calculator'.*Base_Generator_Tool, Python_Coder_Tool"):
        tools.make_tools(["Calculator"])
    with pytest.raises(ValueError, match="at least one"):
        tools.make_tools([])
    with pytest.raises(ValueError, match="SERPER_API_KEY"):
        tools.make_tools(["Google_Search_Tool"], offline=False)
    monkeypatch.setenv("SERPER_API_KEY", "k")
    assert tools.make_tools(["Google_Search_Tool"], offline=False)[0].http.offline is False
    with pytest.raises(ValueError, match="nowhere.jsonl cannot be read"):
        tools.make_tools(library=tmp_path / "nowhere.jsonl")


# --- running a tool ----------------------------------------------------------------------------


class Probe(tools.Tool):
    """A tool that does what a test wants and notes that it ran."""

    name = "Probe"
    parameters = {"query": "str", "count": "int = 3", "scale": "float = 1.0",
                  "deep": "bool = False"}
    job_seconds = 0.3

    def __init__(self, act=lambda: tools.ToolResult("done")):
        self.act, self.ran = act, 0

    def run(self, **arguments):
        self.ran += 1
        return (yield tools.Job(self.act))


@pytest.mark.parametrize("arguments, said", [
    ({}, "'query' is missing"),
    ({"query": "q", "depth": 1}, "Unknown argument 'depth'"),
    ({"query": 5}, "must be str, not int"),
    ({"query": "  "}, "is empty"),
    ({"query": "q", "count": "3"}, "must be int, not str"),
    ({"query": "q", "count": True}, "must be int, not bool"),
    ({"query": "q", "deep": 1}, "must be bool, not int"),
])
def test_wrong_arguments_are_named_before_anything_runs(arguments, said):
    probe = Probe()
    result = result_of(probe, **arguments)
    assert result.error == "bad_arguments" and said in result.output and probe.ran == 0


def test_right_arguments_run_and_an_int_passes_for_a_float():
    probe = Probe()
    assert result_of(probe, query="q", scale=2).output == "done" and probe.ran == 1


def raising(error):
    def act():
        raise error
    return act


@pytest.mark.parametrize("act, error, said", [
    (raising(KeyError("boom")), "runtime", "KeyError: 'boom'"),
    (raising(SystemExit(3)), "runtime", "SystemExit"),
    (raising(TimeoutError("slow")), "timeout", "slow"),
    (raising(tools.ToolError("rate_limited", "Slow down.")), "rate_limited", "Slow down."),
    (lambda: time.sleep(5), "timeout", "no result within 0.3 seconds"),
    (lambda: tools.ToolResult("x" * 5_000_000), "none", "characters left out"),
    (lambda: "text", "runtime", "not a ToolResult"),
])
def test_a_tool_that_raises_hangs_or_floods_gives_a_typed_bounded_result(act, error, said):
    started = time.perf_counter()
    result = result_of(Probe(act), query="q")
    assert result.error == error and said in result.output
    assert len(result.output) <= tools.RESULT_CHARS
    assert 0 < result.seconds <= time.perf_counter() - started < 3


class Mute(Exception):
    """Neither the error nor anything that holds it can be shown."""

    def __str__(self):
        raise SystemExit("no text")


@pytest.mark.parametrize("act, said", [
    (raising(Mute()), "Mute: (its text raised SystemExit)"),
    (lambda: tools.ToolResult(Mute()), "SystemExit: no text"),
    (raising(type("MuteTimeout", (Mute, TimeoutError), {})()), "its text raised"),
])
def test_what_cannot_be_shown_is_a_typed_error_all_the_same(act, said):
    result = result_of(Probe(act), query="q")
    assert result.error in ("runtime", "timeout") and said in result.output


def test_a_tool_that_asks_for_neither_model_nor_job_is_a_typed_error():
    class Odd(Probe):
        def run(self, **arguments):
            yield "an answer, please"

    result = result_of(Odd(), query="q")
    assert result.error == "runtime" and "str: no Ask and no Job" in result.output


def test_a_result_has_no_lone_surrogates_which_no_tokenizer_takes():
    assert result_of(Probe(lambda: tools.ToolResult("a\ud800b")), query="q").output == "a?b"


def test_a_tool_sees_what_its_job_raised_and_may_go_on():
    class Careful(Probe):
        def run(self, **arguments):
            try:
                yield tools.Job(raising(ValueError("first")))
            except ValueError as error:
                reply = yield tools.Ask("tool", "s", str(error))
            return tools.ToolResult(reply.text)

    result, asks = finish(tools.execute(Careful(), {"query": "q"}), "second")
    assert asks[0].user == "first" and result.output == "second"


def test_a_tool_that_needs_nothing_may_be_a_plain_function():
    class Echo(tools.Tool):
        name, parameters = "Echo", {"query": "str"}

        def run(self, query):
            return tools.ToolResult(query)

    assert result_of(Echo(), query="hello").output == "hello"


def test_the_base_tool_asks_the_model_once():
    result, asks = finish(tools.execute(tools.Base_Generator_Tool(), {"query": "Why?"}), " So. ")
    assert result.output == "So."
    assert asks == [tools.Ask("tool", tools.BASE_SYSTEM, "Request: Why?")]


# --- the library -------------------------------------------------------------------------------


def test_bm25_agrees_with_the_formula_written_out_for_every_text():
    """The oracle loops over texts and terms and looks nothing up."""
    texts = ["Iron is a metal, the iron age.", "Gold is a metal", "of the and",
             "a tin of tin is TIN", "Hydrogen: H, number 1", ""]
    tokens = [[w for w in re.findall(r"[a-z0-9]+", text.lower()) if w not in tools.STOP_WORDS]
              for text in texts]
    mean = sum(map(len, tokens)) / len(tokens)
    for query in ["iron metal", "tin tin", "number 1?", "the", "unknown gold"]:
        expected = []
        for document in tokens:
            score = 0.0
            for term in set(re.findall(r"[a-z0-9]+", query.lower())) - tools.STOP_WORDS:
                n = sum(term in other for other in tokens)
                f = Counter(document)[term]
                idf = math.log((len(tokens) - n + 0.5) / (n + 0.5) + 1)
                score += idf * f * 2.5 / (f + 1.5 * (0.25 + 0.75 * len(document) / mean))
            expected.append(score)
        assert tools.BM25(texts).scores(query) == pytest.approx(expected, abs=1e-12)


def test_a_library_search_returns_the_near_best_and_says_when_there_is_none(tmp_path):
    library = tmp_path / "library.jsonl"
    library.write_text("\ufeff" + "\n".join(json.dumps(line) for line in [
        {"id": "1", "title": "Iron", "text": "The symbol of Iron is Fe."},
        {"id": "2", "title": "Iron", "text": "It rusts,\nin\u2028wet air."},
        {"id": "3", "contents": '"Gold"\nThe symbol of Gold is Au.'},
        {"id": "4", "title": "", "text": "Neon signs glow."},
    ]) + "\n\n", encoding="utf-8")
    tool = tools.Library_Search_Tool(library)
    assert tool.passages == ["The symbol of Iron is Fe.", "Iron: It rusts, in wet air.",
                             "The symbol of Gold is Au.", "Neon signs glow."]
    assert result_of(tool, query="symbol of iron").output == "[1] The symbol of Iron is Fe."
    both = result_of(tool, query="Which symbol?").output.split("\n")
    assert both == ["[1] The symbol of Iron is Fe.", "[2] The symbol of Gold is Au."]
    for query in ["Xenon", "what is the"]:  # the second holds stop words only
        assert result_of(tool, query=query).error == "not_found"


def test_long_passages_do_not_push_one_another_out(tmp_path):
    library = tmp_path / "library.jsonl"
    library.write_text("\n".join(json.dumps({"title": f"T{i}", "text": "iron " * 2000 + f"end{i}"})
                                 for i in range(5)))
    lines = result_of(tools.Library_Search_Tool(library), query="iron").output
    assert all(f"[{rank}] T" in lines and f"end{rank - 1}" in lines for rank in (1, 2, 3))


@pytest.mark.parametrize("line", ["{", "[1]", '{"id": 3}', '{"title": "T", "text": 5}'])
def test_a_malformed_library_names_the_line(tmp_path, line):
    library = tmp_path / "library.jsonl"
    library.write_text('{"title": "T", "text": "good"}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        tools.Library_Search_Tool(library)


# --- the sandbox -------------------------------------------------------------------------------


@pytest.fixture
def sandbox(monkeypatch, tmp_path):
    """A badge that each child carries, a folder for the runs' folders, a path for canaries.

    Afterwards nothing may be left: no process with the badge, no folder.
    """
    badge = f"/nowhere/{uuid.uuid4().hex}"
    monkeypatch.setenv("LD_LIBRARY_PATH", badge)  # one of the few variables that are passed on
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    yield SimpleNamespace(badge=badge, folders=folders, canary=tmp_path / "canary")
    for _ in range(50):
        if not left_over(badge):
            break
        time.sleep(0.02)
    assert not left_over(badge) and not list(folders.iterdir())


SLOW_CASES = {"y009", "y012", "y013", "y014", "y027", "y029", "y040", "y041", "y053"}
# What is not covered where the kernel grants no namespaces, as the docstring of run_python says.
NEED_NAMESPACES = {"y035", "y037"}


@pytest.mark.parametrize("case", [
    pytest.param(case, id=case["id"], marks=[pytest.mark.slow] * (case["id"] in SLOW_CASES))
    for case in SANDBOX_CASES if NAMESPACES or case["id"] not in NEED_NAMESPACES])
def test_the_sandbox_treats_each_known_trouble_as_expected(case, sandbox):
    assert not cases.program_faults(case, sandbox.canary.parent, sandbox.badge)


@pytest.mark.parametrize("code, text", [
    ("x = 6\nx * 7", "42"),
    ("print('out')\n7", "out"),
    ("None", "The program printed nothing."),
    ("x = [1,\n 2,\n 3]\nx", "[1, 2, 3]"),
    ("import sys\nprint(sys.argv, __name__, sys.modules['__main__'].__dict__ is globals())",
     "['program.py'] __main__ True"),
    ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nimport pickle\n"
     "print(pickle.loads(pickle.dumps(A(3))))", "A(x=3)"),
    ("import os\nprint(os.listdir('.'), os.path.isdir(os.environ['HOME']))", "[] True"),
    ("import threading\nthreading.Timer(0.2, print, ['late']).start()", "late"),
    ("print({'a', 'b', 'c'} == set('abc'), end='')", "True"),
    ("import sys\nsys.stdout.close()\n5", "5"),
    ("\ufeffprint(6)", "6"),
])
def test_a_program_runs_as_a_file_would_and_its_last_value_counts(code, text, sandbox):
    assert tools.run_python(code).text == text


@pytest.mark.parametrize("code, message", [
    ("x = 1\nprint(2)\nx / 0", "ZeroDivisionError: division by zero (line 3: x / 0)"),
    ("def f():\n    return g()\ndef g():\n    raise KeyError('k')\nf()",
     "KeyError: 'k' (line 4: raise KeyError('k'))"),
    ("import json\njson.loads('{')", "(line 2: json.loads('{'))"),
    ("x ==== 2", "SyntaxError: invalid syntax (line 1: x ==== 2)"),
    ("class E(Exception):\n    def __str__(self):\n        1 / 0\nraise E", "E: (its text raised"),
    ("class E(Exception):\n    def __str__(self): raise SystemExit\nraise E", "E: (its text"),
    ("class E(Exception):\n    lineno = property(lambda e: 1 / 0)\nraise E('a')", "E: a (its line"),
    ("raise ValueError('v' * 10**6)", "ValueError: vvv"),
    ("import sys\nprint('a')\nsys.exit(3)", "exit code 3"),
    ("raise SystemExit('bye')", "bye"),
    ("import os\nos._exit(4)", "exit code 4"),
    ("import ctypes\nctypes.string_at(0)", "signal 11"),
    ("", "empty"),
    ("#" * 200_000, "characters of code"),
])
def test_an_error_is_told_in_one_line_with_the_line_of_the_program(code, message, sandbox):
    run = tools.run_python(code)
    assert run.status == "error" and run.error == "runtime"
    assert message in run.message and "\n" not in run.message and len(run.message) < 2_200
    assert run.text.startswith(run.message)


def test_what_was_printed_before_a_timeout_is_kept_and_the_kind_is_timeout(sandbox):
    run = tools.run_python("print('before')\nwhile True: pass", timeout=0.5)
    assert run.error == "timeout" and run.text == ("Timed out after 0.5 seconds.\n"
                                                   "It had printed:\nbefore")
    assert 0.5 <= run.seconds < 1.5


def test_equal_programs_print_sets_of_strings_in_equal_order(sandbox):
    """Python shuffles string hashes from process to process; a run that resumes must not differ."""
    runs = {tools.run_python("print({'a', 'b', 'c', 'd', 'e', 'f'})").stdout for _ in range(4)}
    assert len(runs) == 1


FLEE = """
import os, subprocess, sys, time
code = "import time; time.sleep(1.5); open({canary!r}, 'w').write('x')"
{how}
print('started', flush=True)
{then}
"""
POPEN = "subprocess.Popen([sys.executable, '-c', code], {options})"


@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.parametrize("options", ["", "start_new_session=True", "stdout=-3, stderr=-3",
                                     "start_new_session=True, stdout=-3, stderr=-3"])
@pytest.mark.parametrize("then", ["time.sleep(60)", ""])
def test_grandchildren_are_killed_at_the_limit_and_at_the_end(namespaces, options, then, sandbox):
    """Whether they stay in the process group or not, hold our pipes or not."""
    how = POPEN.format(options=options)
    code = FLEE.format(canary=str(sandbox.canary), how=how, then=then)
    started = time.perf_counter()
    run = tools.run_python(code, timeout=0.6, namespaces=namespaces)
    assert run.stdout == "started\n" and run.status == ("timeout" if then else "ok"), run
    assert time.perf_counter() - started < 3 and not left_over(sandbox.badge)


@pytest.mark.slow
@pytest.mark.parametrize("namespaces", [True, False])
def test_a_grandchild_that_was_killed_writes_nothing_later(namespaces, sandbox):
    how = POPEN.format(options="start_new_session=True")
    tools.run_python(FLEE.format(canary=str(sandbox.canary), how=how, then=""),
                     namespaces=namespaces)
    time.sleep(2.5)
    assert not sandbox.canary.exists()


def test_keys_of_the_parent_are_not_visible_to_the_program(sandbox, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "canary-789")
    assert "canary" not in tools.run_python("import os; print(dict(os.environ))").stdout
    if NAMESPACES:  # without them, /proc is open to the same user, as the docstring says
        code = ("from pathlib import Path\nfor p in Path('/proc').glob('[0-9]*'):\n"
                "    try: print((p / 'environ').read_bytes())\n    except OSError: pass")
        seen = tools.run_python(code, max_output=10_000_000).stdout
        assert "canary" not in seen and "MPLBACKEND" in seen  # it sees itself, at least


@pytest.mark.skipif(not NAMESPACES, reason="this kernel grants no namespaces; `missing` says so")
def test_a_program_in_its_namespaces_has_no_network_and_cannot_signal_the_parent(sandbox):
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = server.server_address[1]
    code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
    assert "OSError" in tools.run_python(code).message
    server.server_close()
    run = tools.run_python(f"import os\nos.kill({__import__('os').getpid()}, 9)")
    assert "ProcessLookupError" in run.message


def test_a_python_in_a_folder_that_is_its_owners_alone_starts_all_the_same(
    sandbox, monkeypatch, tmp_path
):
    """An environment made in a folder of mode 0700, as mktemp -d makes it."""
    venv = tmp_path / "venv"
    venv.mkdir(mode=0o700)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    monkeypatch.setattr(sys, "executable", str(venv / "bin" / "python"))
    run = tools.run_python("import subprocess, sys\nprint(sys.prefix)\nsubprocess.run("
                           "[sys.executable, '-c', 'print(5)'], stderr=subprocess.STDOUT)")
    assert run.stdout == f"{venv}\n5\n", run
    assert run.missing == tools.sandbox_lacks()


def test_missing_protections_are_listed_and_one_that_fails_does_not_skip_the_others(sandbox):
    """Without namespaces they are named, and the memory limit holds all the same."""
    run = tools.run_python("bytearray(4 * 10**9)", namespaces=False)
    assert {"network namespace", "process namespace", "file namespace"} <= set(run.missing)
    assert "MemoryError" in run.message
    broken = tools.RUNNER.replace('"RLIMIT_" + name', '"RLIMIT_" + name.replace("CPU", "NONE")')
    original, tools.RUNNER = tools.RUNNER, broken
    try:
        run = tools.run_python("bytearray(4 * 10**9)")
    finally:
        tools.RUNNER = original
    assert "CPU limit" in run.missing and "MemoryError" in run.message


@pytest.mark.parametrize("code, said", [
    ("open('big', 'wb').write(bytes(100 << 20))", "OSError"),
    ("x = [open('/dev/null') for _ in range(1000)]", "Too many open files"),
    ("import os\nos.makedirs('a/b/c')\nos.symlink('/etc', 'a/link')\nos.chmod('a/b', 0)\n"
     "os.chmod('a', 0)\nprint('locked')", "locked"),
])
def test_files_are_limited_and_the_folder_is_removed_whatever_is_in_it(code, said, sandbox):
    assert said in tools.run_python(code).text
    assert Path("/etc/passwd").exists()


def test_a_folder_of_any_depth_is_removed(sandbox):
    """1,500 levels: more than Python's stack has frames and a process has descriptors."""
    deep = "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\nprint('down')"
    assert tools.run_python(deep).text == "down"  # that nothing is left, the fixture checks


@pytest.mark.skipif(not NAMESPACES, reason="this kernel grants no namespaces; `missing` says so")
def test_shared_memory_semaphores_and_queues_end_with_their_run(sandbox):
    """System V's belong to no process and no folder, and would outlive both."""
    code = ("import ctypes\nlibc = ctypes.CDLL(None)\n"
            "print(*[get(0x5D1F, *more, {flags}) >= 0 for get, more in [(libc.shmget, [4096]), "
            "(libc.semget, [1]), (libc.msgget, [])]])")
    assert tools.run_python(code.format(flags=0o1666)).text == "True True True"
    assert tools.run_python(code.format(flags=0)).text == "False False False"
    held = [Path("/proc/sysvipc", kind).read_text() for kind in ("shm", "sem", "msg")]
    assert not any(f" {0x5D1F} " in lines for lines in held)


def test_an_ipc_namespace_that_cannot_be_had_is_named_and_costs_nothing_else(sandbox, monkeypatch):
    granted = tools.run_python("0").missing
    monkeypatch.setattr(tools, "RUNNER", tools.RUNNER.replace('"IPC": 0x8000000', '"IPC": 1'))
    code = f"import os\nprint(os.path.exists(os.sep), os.path.exists({__file__!r}))"
    run = tools.run_python(code)
    assert set(run.missing) == {*granted, "IPC namespace"}
    assert not NAMESPACES or run.text == "True False", "the file system is its own still"


@pytest.mark.parametrize("report", [
    "'(' * 100_000", "'[' * 9_000", "'(1, 2, 3)'", "'(None, [], \"m\")'",
    "'(None, \"timeout\", \"m\")'", "'(None, \"none\", 5)'", "'(None, \"none\")'",
    "'-' * 9_000 + '1'"])
def test_a_forged_report_of_another_shape_counts_for_none(report, sandbox):
    """Ten thousand brackets are a MemoryError or a RecursionError of the parser."""
    code = ("import os\nwords = open('/proc/self/cmdline', 'rb').read().split(b'\\0')\n"
            "mark = [word for word in words if word.startswith(b'run-')][-1]\n"
            f"os.write(2, b'\\n' + mark + b' ' + ({report}).encode() + b'\\n')\nos._exit(3)")
    assert tools.run_python(code).text == "The program ended early with exit code 3."


def test_sixty_four_programs_at_once_all_answer_and_waiting_is_not_running(sandbox):
    with ThreadPoolExecutor(64) as pool:
        runs = list(pool.map(lambda i: tools.run_python(f"print({i} ** 2)"), range(64)))
    assert [run.stdout for run in runs] == [f"{i * i}\n" for i in range(64)]
    slots = tools.RUNS_AT_ONCE
    with ThreadPoolExecutor(3 * slots) as pool:  # three rounds of 0.4 s, none of them late
        nap = "import time; time.sleep(0.4); print(1)"
        runs = list(pool.map(lambda _: tools.run_python(nap, timeout=1.5), range(3 * slots)))
    assert all(run.status == "ok" and run.seconds < 1.5 for run in runs)


# --- the coder ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reply, code", [
    ("```python\nprint(1)\n```", "print(1)\n"),
    ("Sure:\n```py\nprint(1)\n```\nDone.\n```python\nprint(2)\n```", "print(1)\n"),
    ("```bash\nls\n```\n```python\nprint(1)\n```", "print(1)\n"),
    ("```python\nprint(1)", "print(1)"),
    ('```python\nx = "a ```b``` c"\nprint(x)\n```', 'x = "a ```b``` c"\nprint(x)\n'),
    ("print(1)", "print(1)"),
    ("```python print(1)```", "print(1)"),
    ("<think>```python\nno\n```</think>\n```\nprint(1)\n```", "print(1)\n"),
])
def test_the_program_is_found_in_a_reply(reply, code):
    assert tools.extract_code(reply) == code


@pytest.mark.parametrize("reply, output, error", [
    ("```python\nprint(6 * 7)\n```", "42", "none"),
    ("6 * 7", "42", "none"),
    ("```python\nprint('a')\n1 / 0\n```",
     "ZeroDivisionError: division by zero (line 2: 1 / 0)\nIt had printed:\na", "runtime"),
    ("I cannot do that.", "SyntaxError: invalid syntax (line 1: I cannot do that.)", "runtime"),
    ("", "The program is empty.", "runtime"),
])
def test_the_coder_runs_what_the_model_wrote_once(reply, output, error, sandbox):
    result, asks = finish(tools.execute(tools.Python_Coder_Tool(), {"query": "6 by 7"}), reply)
    assert (result.output, result.error) == (output, error)
    assert asks == [tools.Ask("tool", tools.CODER_SYSTEM, "Request: 6 by 7")]


def test_a_program_that_hangs_gives_the_coder_a_timeout(sandbox):
    tool = tools.Python_Coder_Tool()
    tool.timeout = 0.3
    assert result_of(tool, "while True: pass", query="q").error == "timeout"


# --- the network tools -------------------------------------------------------------------------


NETWORK = [(tools.Google_Search_Tool, {"query": "q"}),
           (tools.Wikipedia_Search_Tool, {"query": "q"}),
           (tools.Web_Search_Tool, {"query": "q", "url": "http://example.org"})]


@pytest.mark.parametrize("kind, arguments", NETWORK)
def test_offline_network_tools_answer_at_once_without_trying(kind, arguments, monkeypatch):
    def explode(*args, **kwargs):
        raise AssertionError("an offline tool touched the network")

    for name in ("getaddrinfo", "create_connection", "socket"):
        monkeypatch.setattr(f"socket.{name}", explode)
    monkeypatch.setattr("requests.Session.request", explode)
    tool, = tools.make_tools([kind.name], offline=True)
    with pytest.raises(StopIteration) as stop:  # it asks for nothing: neither a Job nor an Ask
        next(tools.execute(tool, arguments))
    result = stop.value.value
    assert result.error == "network"
    assert result.output == "The network is switched off in this run (--offline)."


def always(body, status=200, **headers):
    body = body if isinstance(body, bytes) else body.encode()
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda state: (status, headers, body)


OPEN = tools.Http(offline=False, allow_private_hosts=True, contact="test@example.org")


@pytest.mark.parametrize("address, public", [
    ("8.8.8.8", True), ("2606:4700::1111", True), ("::ffff:8.8.8.8", True),
    ("127.0.0.1", False), ("10.0.0.1", False), ("172.16.0.1", False), ("192.168.1.1", False),
    ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False),
    ("255.255.255.255", False), ("::1", False), ("fe80::1%eth0", False), ("fc00::1", False),
    ("::ffff:127.0.0.1", False), ("2002:7f00:1::", False), ("64:ff9b::7f00:1", False),
    ("ff02::1", False), ("::", False),
])
def test_only_addresses_of_the_public_internet_are_public(address, public):
    assert tools.is_public(address) is public


@pytest.mark.parametrize("url", [
    "http://127.0.0.1/", "http://localhost/", "http://2130706433/", "http://0x7f000001/",
    "http://0177.0.0.1/", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://169.254.169.254/",
    "file:///etc/hostname", "ftp://8.8.8.8/x", "data:text/html,hi", "example.org", "http:///x",
])
def test_addresses_that_lead_inwards_and_other_protocols_are_refused(url):
    tool = tools.Web_Search_Tool(tools.Http(offline=False))
    assert result_of(tool, query="q", url=url).error == "refused"


@pytest.mark.parametrize("url", ["http://[::1", "http://host:99999/"])
def test_an_address_that_is_none_is_a_bad_argument(url):
    tool = tools.Web_Search_Tool(tools.Http(offline=False))
    assert result_of(tool, query="q", url=url).error == "bad_arguments"


def test_each_redirect_is_checked_and_the_checked_address_is_the_one_used(server, monkeypatch):
    """The name resolves to our server on the first look and to another address on the second."""
    real, looks = tools.socket.getaddrinfo, []

    def resolve(host, port, *family, **options):
        looks.append(host)
        if host == "site.example":
            host = "127.0.0.1" if len(looks) == 1 else "10.0.0.1"
        return real(host, port, *family, **options)

    monkeypatch.setattr(tools.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(tools, "is_public", lambda address: address == "127.0.0.1")
    port = server.base.rpartition(":")[2]
    server.answers["/page"] = always("hello", Content_Type="text/plain")
    http = tools.Http(offline=False)
    assert http.fetch(f"http://site.example:{port}/page").text() == "hello"
    assert looks[0] == "site.example" and "site.example" not in looks[1:]  # asked only once
    assert server.requests[0].headers["Host"] == f"site.example:{port}"
    for target in ("http://10.0.0.1/", "//10.0.0.1/x", "file:///etc/passwd"):
        server.answers["/away"] = always("", 302, Location=target)
        with pytest.raises(tools.ToolError) as caught:
            http.fetch(server.base + "/away")
        assert caught.value.kind == "refused"


def test_redirects_are_followed_a_bounded_number_of_times(server):
    server.answers["/a"] = always("", 302, Location="/b")
    server.answers["/b"] = always("here", Content_Type="text/plain")
    page = OPEN.fetch(server.base + "/a")
    assert page.text() == "here" and page.url == server.base + "/b"
    server.answers["/loop"] = always("", 302, Location="/loop")
    with pytest.raises(tools.ToolError, match="redirects"):
        OPEN.fetch(server.base + "/loop")


def test_requests_say_who_they_are_and_wait_as_they_are_told(server):
    """Two times 429 with Retry-After 0, then the page: three requests."""
    def busy(state):
        tries = len(state.requests)
        return (200, {}, b"ok") if tries == 3 else (429, {"Retry-After": "0"}, b"slow down")

    server.answers["/busy"] = busy
    assert OPEN.fetch(server.base + "/busy").text() == "ok"
    assert len(server.requests) == 3
    assert "contact: test@example.org" in server.requests[0].headers["User-Agent"]
    assert "AgentFlow" in server.requests[0].headers["User-Agent"]


@pytest.mark.parametrize("status, headers, kind, tries", [
    (429, {"Retry-After": "0"}, "rate_limited", 3),
    (429, {"Retry-After": "3600"}, "rate_limited", 1),  # longer than a flow can wait
    (503, {"Retry-After": "0"}, "network", 3),
    (403, {}, "refused", 1),
    (404, {}, "not_found", 1),
])
def test_a_bad_status_has_its_kind_and_its_number_of_tries(server, status, headers, kind, tries):
    server.answers["/"] = lambda state: (status, headers, b"Please set a user-agent")
    with pytest.raises(tools.ToolError, match=str(status)) as caught:
        OPEN.fetch(server.base + "/")
    assert caught.value.kind == kind and len(server.requests) == tries
    assert "Please set a user-agent" in str(caught.value)


def test_a_silent_server_is_a_timeout_and_no_server_a_network_error(server, monkeypatch):
    monkeypatch.setattr(tools, "READ_SECONDS", 0.1)
    monkeypatch.setattr(tools, "TRIES", 1)
    server.answers["/"] = lambda state: time.sleep(0.5) or (200, {}, b"")
    tool = tools.Web_Search_Tool(OPEN)
    result = result_of(tool, query="q", url=server.base + "/")
    assert result.error == "timeout" and "127.0.0.1" in result.output
    result = result_of(tool, query="q", url="http://127.0.0.1:9/")
    assert result.error == "network" and "127.0.0.1" in result.output


def test_a_body_is_read_only_up_to_its_cap_also_when_it_is_packed(server, monkeypatch):
    """A gzip stream of 60 kB that unpacks to 60 MB costs the cap, and a chunk."""
    monkeypatch.setattr(tools, "MAX_BYTES", 100_000)
    server.answers["/plain"] = always(b"x" * 3_000_000)
    server.answers["/bomb"] = always(gzip.compress(b"x" * 60_000_000), Content_Encoding="gzip")
    for path in ("/plain", "/bomb"):
        assert OPEN.fetch(server.base + path).body == b"x" * 100_000


def test_retry_after_is_read_as_seconds_or_as_a_date():
    assert tools.seconds_to_wait("3") == 3.0
    assert tools.seconds_to_wait("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    later = email.utils.formatdate(time.time() + 90, usegmt=True)
    assert 85 < tools.seconds_to_wait(later) <= 91
    for neither in ("", "soon", "-1", "Wed, 99 Oct 2015", "²", "٣"):
        assert tools.seconds_to_wait(neither) is None


@pytest.mark.parametrize("answer, kind", [
    ("302 Found\r\nLocation: http://[::1/\r\nContent-Length: 0\r\n\r\n", "network"),
    ("302 Found\r\nLocation: /\xe9\xff\r\nContent-Length: 0\r\n\r\n", "network"),
    ("200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n", "network"),
    ("429 Busy\r\nRetry-After: \xb2\r\nContent-Length: 0\r\n\r\n", "rate_limited"),
    ("200 OK\r\nContent-Encoding: br\r\nContent-Length: 3\r\n\r\nabc", "refused"),
    ("200 OK\r\nContent-Encoding: gzip, gzip\r\nContent-Length: 3\r\n\r\nabc", "refused"),
])
def test_an_answer_that_breaks_the_protocol_is_a_typed_error(answer, kind, monkeypatch):
    monkeypatch.setattr(tools, "TRIES", 1)
    monkeypatch.setattr("urllib3.HTTPResponse.CONTENT_DECODERS", ["gzip"])  # br may be installed
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def serve():
            with listening.accept()[0] as talk:
                talk.recv(10_000)
                talk.sendall(f"HTTP/1.1 {answer}".encode("latin-1"))

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        assert result_of(tools.Web_Search_Tool(OPEN), query="q", url=url).error == kind


def test_no_deeper_json_than_the_stack_is_read():
    page = tools.Page("http://x", 200, {}, b"[" * 100_000)
    with pytest.raises(tools.ToolError, match="No JSON"):
        page.json()


def drip(start: bytes):
    """A server that begins an answer and then sends a byte every 20 ms, for ever."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        with contextlib.suppress(OSError), listening.accept()[0] as talk:
            talk.recv(10_000)
            talk.sendall(start)
            while True:
                talk.sendall(b"x")
                time.sleep(0.02)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listening, thread


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nX-Slow: ",
                                   b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n",
                                   b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"])
def test_a_server_that_drips_for_ever_is_hung_up_on_at_the_deadline(start, monkeypatch):
    """Every single read is quick; the whole is not. The server sees the connection end."""
    monkeypatch.setattr(tools, "TOTAL_SECONDS", 0.4)
    listening, thread = drip(start)
    started = time.perf_counter()
    with pytest.raises(tools.ToolError) as caught:
        OPEN.fetch(f"http://127.0.0.1:{listening.getsockname()[1]}/")
    assert caught.value.kind == "timeout" and time.perf_counter() - started < 1.5
    thread.join(2)
    assert not thread.is_alive(), "the connection is still open"
    listening.close()


def test_pages_are_kept_by_all_that_decides_them_and_never_with_a_key(server, tmp_path):
    http = dataclasses.replace(OPEN, cache=tmp_path)
    server.answers["/"] = always("hello", Content_Type="text/plain; charset=utf-8")
    options = [{}, {"params": {"q": 1}}, {"params": {"q": 2}}, {"json": {"q": 1}}]
    for _ in range(2):
        for more in options:
            headers = {"X-API-KEY": "canary-key"}
            page = http.fetch(server.base + "/", headers=headers, **more)
            assert page.text() == "hello" and page.type == "text/plain"
    assert len(server.requests) == len(options)
    kept = list(tmp_path.iterdir())
    assert len(kept) == len(options) and not any("canary" in f.read_text() for f in kept)
    tools.Http(False, True, cache=tmp_path).fetch(server.base + "/")  # who asks does not matter
    assert len(server.requests) == len(options)
    for file in kept:
        file.write_text("{half a fil")
    http.fetch(server.base + "/")
    assert len(server.requests) == len(options) + 1, "what is damaged is fetched again"
    [good] = [file for file in tmp_path.iterdir() if file.read_text()[-1] == "}"]
    os.utime(good, (1, 1))
    http.fetch(server.base + "/")
    assert len(server.requests) == len(options) + 2, "what is old is fetched again"


def test_a_cache_that_cannot_be_written_or_read_costs_no_page(server, tmp_path):
    """No folder where it should be; a name that is taken; and files that others have damaged."""
    server.answers["/"] = always("hello", Content_Type="text/plain")
    (tmp_path / "file").write_text("")
    nowhere = dataclasses.replace(OPEN, cache=tmp_path / "file" / "http")
    assert nowhere.fetch(server.base + "/").text() == "hello"
    http = dataclasses.replace(OPEN, cache=tmp_path / "http")
    http.fetch(server.base + "/")
    (kept,) = http.cache.iterdir()
    good = json.loads(kept.read_text())
    damaged = [{**good, "type": None}, {**good, "type": 5}, {**good, "url": None}, [], 5]
    for text in ["[" * 100_000, *map(json.dumps, damaged)]:
        kept.write_text(text)
        page = http.fetch(server.base + "/")
        assert (page.text(), page.type, page.url) == ("hello", "text/plain", server.base + "/")
    kept.unlink()
    kept.mkdir()
    assert http.fetch(server.base + "/").text() == "hello"
    assert list(http.cache.iterdir()) == [kept] and len(server.requests) == 9


def test_an_error_is_not_kept_and_a_private_page_is_for_those_who_may_read_it(server, tmp_path):
    http = dataclasses.replace(OPEN, cache=tmp_path)
    server.answers["/"] = always("gone", 404)
    with pytest.raises(tools.ToolError, match="404"):
        http.fetch(server.base + "/")
    assert not list(tmp_path.iterdir())
    server.answers["/"] = always("secret")
    assert http.fetch(server.base + "/").text() == "secret"
    with pytest.raises(tools.ToolError) as caught:
        dataclasses.replace(http, allow_private_hosts=False).fetch(server.base + "/")
    assert caught.value.kind == "refused"


@pytest.mark.parametrize("kind, body, text", [
    ("text/html", "<meta charset=utf-8>Café 中文".encode(), "Café 中文"),
    ("text/html", "Café".encode(), "Café"),
    ("text/html; charset=latin-1", "Café".encode("latin-1"), "Café"),
    ("text/html; charset=klingon", "Café".encode(), "Café"),
    ("text/html; charset=Windows-1252", "Café €".encode("cp1252"), "Café €"),
    ("text/html; charset=shift_jis", "東京".encode("shift_jis"), "東京"),
    ("text/html; charset=punycode", "Café".encode(), "Café"),  # none of these five is a charset of
    ("text/html; charset=idna", "Café".encode(), "Café"),  # pages: slow, no decoder of bytes, or
    ("text/html; charset=utf-7", b"+2AA-", "+2AA-"),  # a way to write lone surrogates
    ("text/html; charset=unicode_escape", rb"\ud800", r"\ud800"),
    ("text/html; charset=undefined", "Café".encode(), "Café"),
    ("text/html", b"<script>var a=1</script><style>p{}</style><p>Hi <b>y</b>ou</p>there",
     "Hi you\nthere"),
    ("text/html", b"<title>T</title><p>a &lt; b &amp; c<p>d<br>e", "T\na < b & c\nd\ne"),
    ("text/html", b"a < b<br>3 <4 <!-- <p>x --> &amp;lt; <P title='x > y' q=\"<b>\">c</P>d",
     "a < b\n3 <4 &lt;\nc\nd"),
    ("text/html", b"<svg/>a<svg><b>x</b></svg>b<script q='>'>1</a>2</script >c<style>d",
     "a\nb\nc"),
    ("text/html", b"<?xml version='1'?><!DOCTYPE html><a-b>x</a-b> <p don't>y</ p> it's",
     "x\ny it's"),
    ("text/html", b"a<p>b<!-- never closed <p>c", "a\nb"),
    ("text/html", b"&#" + b"9" * 5_000 + b"; &#55296; &eacute;", "\ufffd \ufffd é"),
    ("text/plain", b"hello <b>\r\nworld", "hello <b>\nworld"),
    ("text/markdown; charset=utf-8", b"# Title", "# Title"),
    ("", b"<html><p>x</p></html>", "x"),
])
def test_pages_are_decoded_rightly_and_read_without_scripts(kind, body, text):
    page = tools.Page("http://x", 200, {"Content-Type": kind}, body)
    assert tools.readable(page) == text


@pytest.mark.parametrize("unit", [
    "<", "<a ", '<a b="', "<a b='", "<a =", "<!--", "<!--->", "<!", "<?", "</", "</a ", "<![CDATA[",
    "<script>", "<script", "<svg><", "<script></script ", "&", "&#1", "<b></b>"])
def test_no_page_takes_longer_than_its_length(unit):
    """2 MB of what never ends. A parser that looks for an end at each begin takes minutes."""
    page = tools.Page("http://x", 200, {"Content-Type": "text/html"}, b"")
    body = (unit * (2_000_000 // len(unit))).encode()
    started = time.thread_time()
    tools.readable(dataclasses.replace(page, body=body))
    assert time.thread_time() - started < 2


def test_a_page_is_read_in_the_job_where_no_other_flow_waits_for_it(monkeypatch):
    threads = []
    real = tools.readable
    monkeypatch.setattr(tools, "readable", lambda page: threads.append(threading.current_thread())
                        or real(page))
    page = tools.Page("http://x", 200, {"Content-Type": "text/html"}, b"<p>At nine.")
    http = SimpleNamespace(require=lambda: None, fetch=lambda url: page)
    assert result_of(tools.Web_Search_Tool(http), "Nine.", query="q", url="u").error == "none"
    assert threads and threads[0] is not threading.main_thread()


@pytest.mark.parametrize("kind, body", [("application/pdf", b"%PDF-1.4"), ("", b"%PDF-1.4"),
                                        ("image/png", b"\x89PNG"), ("text/plain", b"a\x00b")])
def test_binary_files_are_refused(kind, body):
    with pytest.raises(tools.ToolError) as caught:
        tools.readable(tools.Page("http://x", 200, {"Content-Type": kind}, body))
    assert caught.value.kind == "refused"


def test_chunks_have_200_words_and_share_20():
    """380 words: 0-199 and 180-379; one word more begins a third at 360."""
    text = " ".join(map(str, range(380)))
    first, second = (piece.split() for piece in tools.chunks(text))
    assert (first[0], first[-1], second[0], second[-1]) == ("0", "199", "180", "379")
    assert tools.chunks(text + " x")[2].split()[0] == "360"
    assert tools.chunks("") == [""] and tools.chunks("a b") == ["a b"]


def test_the_web_tool_answers_from_the_best_chunks_of_a_page(server):
    filler = "<p>" + "nothing of interest " * 2000 + "</p>"
    server.answers["/"] = always(f"<html>{filler}<p>The zebra opens at nine.</p>{filler}</html>",
                                 Content_Type="text/html")
    flow = tools.execute(tools.Web_Search_Tool(OPEN), {"query": "zebra", "url": server.base + "/"})
    result, asks = finish(flow, "At nine.")
    assert result.output == f"At nine. ({server.base}/)"
    assert asks[0].user.startswith("Request: zebra\nText:\n") and "opens at nine" in asks[0].user
    assert len(asks[0].user.split()) < 450  # one chunk matches, of sixty


def test_google_results_carry_links_unless_they_are_not_wanted(server, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "canary-key")
    tool = tools.Google_Search_Tool(OPEN)
    tool.url = server.base + "/search"
    hits = [{"title": "Oslo", "link": "https://o.example", "snippet": "A city", "position": 1},
            {"title": "Bare", "link": "https://b.example"}]
    server.answers["/search"] = always(json.dumps({"organic": hits}))
    assert result_of(tool, query="oslo").output == (
        "[1] Oslo: A city (https://o.example)\n[2] Bare:  (https://b.example)")
    sent = server.requests[0]
    assert sent.method == "POST" and json.loads(sent.body)["q"] == "oslo"
    assert sent.headers["X-API-KEY"] == "canary-key" and "canary" not in sent.path
    assert "https" not in result_of(tool, query="oslo", add_citations=False).output
    for body, status, error in [
            ({}, 200, "not_found"), ({"organic": []}, 200, "not_found"),
            ({"message": "Unauthorized.", "statusCode": 403}, 403, "missing_key"),
            ({"message": "Not enough credits", "statusCode": 400}, 400, "refused")]:
        server.answers["/search"] = always(json.dumps(body), status)
        result = result_of(tool, query="oslo")
        assert result.error == error and "canary" not in result.output
    server.answers["/search"] = always("<html>Are you a robot?</html>", Content_Type="text/html")
    assert "Are you a robot?" in result_of(tool, query="oslo").output


def fake_wikipedia(state):
    """A few titles of MediaWiki, in the shapes of formatversion 2."""
    from urllib.parse import parse_qs, urlsplit
    asked = {name: values[0] for name, values in
             parse_qs(urlsplit(state.requests[-1].path).query).items()}
    title = asked.get("titles")
    if asked.get("list") == "search":
        found = ["Mercury", "Portal (video game)", "Kale"] if asked["srsearch"] != "zz" else []
        query = {"search": [{"ns": 0, "title": name, "pageid": 1, "snippet": ""} for name in found]}
    elif asked["prop"] == "links":
        query = {"pages": [{"title": title, "links": [{"title": "Mercury (planet)"},
                                                      {"title": "Mercury (element)"}]}]}
    else:
        page = {"title": title, "pageid": 1, "fullurl": "https://w.example/" + title[:4],
                "extract": f"{title} is a thing. " + "Filler text. " * 400 + "It was made in 2007."}
        if title == "Mercury":
            page |= {"pageprops": {"disambiguation": ""}, "extract": ""}
        query = {"pages": [page]}
    return 200, {"Content-Type": "application/json"}, json.dumps({"query": query}).encode()


def test_wikipedia_reads_the_pages_that_the_model_picks_with_titles_verbatim(server):
    tool = tools.Wikipedia_Search_Tool(OPEN)
    tool.url = server.base + "/api"
    server.answers["/api"] = fake_wikipedia
    flow = tools.execute(tool, {"query": "When was Portal made?"})
    result, asks = finish(flow, "2, 99, 1 and 2")  # 99 is no page, 2 is said twice
    assert asks[0].user.endswith("Pages:\n1. Mercury\n2. Portal (video game)\n3. Kale")
    lines = result.output
    assert lines.startswith("[1] Portal (video game) (https://w.example/Port): Portal (video game)")
    assert "made in 2007" in lines and len(lines) <= tools.RESULT_CHARS
    assert "[2] Mercury (https://w.example/Merc) may mean: Mercury (planet), Mercury (el" in lines
    assert lines.endswith("Other pages: Kale")
    assert "[1] Mercury" in result_of(tool, "none of them", query="q").output  # the first hit
    assert result_of(tool, query="zz").error == "not_found"


@pytest.mark.parametrize("body, error, tries", [
    ('{"error": {"code": "maxlag", "info": "Waiting"}}', "rate_limited", 3),
    ('{"error": {"code": "x", "info": "HTTP request timed out."}}', "rate_limited", 3),
    ('{"error": {"code": "badvalue", "info": "No such thing"}}', "refused", 1),
    ("not json", "network", 1),
])
def test_wikipedia_reports_errors_that_come_with_status_200(server, tmp_path, body, error, tries):
    """A busy server is asked again, as Retry-After says; none of these answers is kept."""
    tool = tools.Wikipedia_Search_Tool(dataclasses.replace(OPEN, cache=tmp_path))
    tool.url = server.base + "/api"
    server.answers["/api"] = always(body, Retry_After="0")
    assert result_of(tool, query="q").error == error
    assert len(server.requests) == tries and not list(tmp_path.iterdir())


def test_a_host_is_asked_by_a_few_flows_at_a_time_and_all_are_answered(server):
    now, most = [0], [0]

    def slow(state):
        now[0] += 1
        most[0] = max(most[0], now[0])
        time.sleep(0.02)
        now[0] -= 1
        return 200, {}, b"ok"

    server.answers["/"] = slow
    with ThreadPoolExecutor(16) as pool:
        pages = list(pool.map(lambda i: OPEN.fetch(server.base + "/", params={"i": i}), range(16)))
    assert [page.body for page in pages] == [b"ok"] * 16 and most[0] <= tools.HOST_AT_ONCE


def run_file(*words):
    return subprocess.run([sys.executable, tools.__file__, *words], capture_output=True, text=True,
                          timeout=120, cwd=Path(tools.__file__).parent)


def test_the_file_lists_the_tools_and_their_cards():
    run = run_file()
    assert run.returncode == 0, run.stderr
    assert "'42'" in run.stdout and "sandbox: " in run.stdout
    assert all(f"Tool: {kind.name}\n" in run.stdout for kind in tools.TOOLS)


@pytest.mark.parametrize("words, code, out, err", [
    (["Library_Search_Tool", "--query", "atomic number of Iron"], 0, "26", ""),
    (["Python_Coder_Tool", "--query", "Calculate 23 times 26."], 0, "598", ""),
    (["Web_Search_Tool", "--query", "q", "--url", "http://127.0.0.1/"], 1, "not a public", "error"),
    (["Wikipedia_Search_Tool", "--query", "q", "--offline"], 1, "switched off", "network"),
    (["Web_Search_Tool", "--query", "q"], 2, "", "--url"),
    (["Library_Search_Tool", "--query", "q", "--corpus", "/nowhere"], 2, "", "cannot be read"),
    (["No_Tool"], 2, "", "invalid choice"),
    (["Google_Search_Tool", "--query", "x", "--add_citations", "foo(", "--offline"], 2, "", "foo("),
])
def test_the_file_runs_one_tool(words, code, out, err, monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path))
    run = run_file(*words)
    assert (run.returncode, out in run.stdout, err in run.stderr) == (code, True, True), run
    assert "Traceback" not in run.stderr


def test_flags_that_cannot_work_are_refused_at_the_start(tmp_path, monkeypatch):
    for contact in ("", " ", "a@b.example\nX-Evil: 1"):
        with pytest.raises(ValueError, match="--contact"):
            tools.make_tools(contact=contact)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="AGENTFLOW_CACHE.*--no_cache"):
        tools.make_tools(["Web_Search_Tool"], offline=False, cache=True)
    (tmp_path / "latin.jsonl").write_bytes('{"text": "Café"}'.encode("latin-1"))
    with pytest.raises(ValueError, match="latin.jsonl.*UTF-8"):
        tools.make_tools(["Library_Search_Tool"], library=tmp_path / "latin.jsonl")


def test_an_own_tool_gets_the_network_the_corpus_and_the_strictness_of_its_kind(monkeypatch):
    net = type("Net_Tool", (tools.Tool,), {"name": "Net_Tool", "needs_network": True})
    coder = type("My_Coder", (tools.Python_Coder_Tool,), {"name": "My_Coder"})
    monkeypatch.setattr(tools, "TOOLS", (*tools.TOOLS, net, coder))
    monkeypatch.setattr(tools, "sandbox_lacks", lambda: ("file namespace",))
    (made,) = tools.make_tools(["Net_Tool"], offline=False, contact="me@example.org")
    assert made.http.contact == "me@example.org" and not made.http.offline
    with pytest.raises(ValueError, match="strict"):
        tools.make_tools(["My_Coder"], strict=True)


def test_strict_refuses_where_a_protection_is_missing(monkeypatch):
    monkeypatch.setattr(tools, "sandbox_lacks", lambda: ("network namespace",))
    assert "NOT granted here: network namespace" in tools.sandbox_line()
    with pytest.raises(ValueError, match="network namespace.*--tools"):
        tools.make_tools(strict=True)
    assert tools.make_tools(["Library_Search_Tool"], strict=True) and tools.make_tools()
    monkeypatch.setattr(tools, "sandbox_lacks", tuple)
    assert tools.make_tools(strict=True) and "of their own" in tools.sandbox_line()


def test_starting_a_program_costs_little_more_than_starting_python():
    """At most 60 ms over `python -I -c pass`, the medians of nine interleaved runs."""
    ours, bare = [], []
    for _ in range(9):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)
        bare.append(time.perf_counter() - started)
        started = time.perf_counter()
        assert tools.run_python("pass").status == "ok"
        ours.append(time.perf_counter() - started)
    assert sorted(ours)[4] - sorted(bare)[4] < 0.060


def test_a_flow_in_which_every_tool_misbehaves_still_ends_with_an_answer(server, monkeypatch):
    """Seven turns, a trouble each; the memory says which, and the metrics count them by kind."""
    monkeypatch.setenv("SERPER_API_KEY", "canary-key")
    monkeypatch.setattr(tools, "TOTAL_SECONDS", 0.5)
    toolset = [tools.Base_Generator_Tool(), tools.Python_Coder_Tool(),
               *(kind(OPEN) for kind in tools.TOOLS[2:5]), tools.Library_Search_Tool()]
    base, coder, google, wikipedia, web, library = toolset
    coder.timeout = 0.5
    google.url, wikipedia.url = server.base + "/google", server.base + "/wikipedia"
    server.answers["/google"] = always('{"message": "Unauthorized."}', 403)
    server.answers["/wikipedia"] = always("busy", 429, Retry_After="3600")
    server.answers["/pdf"] = always(b"%PDF-1.7", Content_Type="application/pdf")
    listening, _ = drip(b"HTTP/1.1 200 OK\r\n\r\n")
    slow = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    turns = [  # (tool, command, what the model inside it says, kind of error)
        (base, 'query="q"', "", "runtime"),
        (coder, 'query="q"', "while True: pass", "timeout"),
        (google, 'query="q"', None, "missing_key"),
        (wikipedia, 'query="q"', None, "rate_limited"),
        (web, f'query="q", url="{server.base}/pdf"', None, "refused"),
        (web, f'query="q", url="{slow}"', None, "timeout"),
        (library, 'query="xyzzy"', None, "not_found"),
    ]
    left = iter(turns)
    said = {"analyst": "Summary: s", "verifier": "Conclusion: CONTINUE",
            "generator": "<answer> 26 </answer>"}
    now = []

    def say(ask):
        if ask.module == "planner":
            now[:] = next(left)
            return f"Justification: j\nContext: c\nSub-Goal: g\nTool Name: {now[0].name}"
        if ask.module == "executor":
            return f"execution = tool.execute({now[1]})"
        return now[2] if ask.module == "tool" else said[ask.module]

    rollouts = agentflow.roll_out(["q"], 1, agentflow.ScriptedBackbone(say), toolset,
                                  agentflow.Limits(len(turns)), agentflow.Sampling(), 0, 1)
    listening.close()
    (rollout,) = rollouts
    kinds = [kind for *_, kind in turns]
    assert [turn.result.error for turn in rollout.turns] == kinds
    assert all(f"Error: {kind}" in rollout.memory for kind in kinds)
    assert rollout.turns[1].result.code == "while True: pass"
    assert rollout.generator.text == said["generator"] and "canary" not in rollout.memory
    one = torch.ones(1)
    metrics = train.step_metrics(rollouts, one, one.long(), {}, [], train.Config(), {})
    assert metrics["tools/errors/timeout"] == 2 and metrics["tools/failure_frequency"] == 1
    assert all(metrics[f"tools/errors/{kind}"] == kinds.count(kind) for kind in kinds)


def test_no_key_stands_in_any_file_of_a_run(server, monkeypatch, tmp_path):
    """A run that searches with keys set: neither its folder nor the cache holds one."""
    for name in ("SERPER_API_KEY", "OPENAI_API_KEY", "HF_TOKEN", "OPENAI_BASE_URL"):
        monkeypatch.setenv(name, "canary-77")
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tools.Google_Search_Tool, "url", server.base + "/search")
    server.answers["/search"] = always(json.dumps({"organic": [{"title": "T", "snippet": "s"}]}))
    questions = Path(tools.__file__).parent / "data" / "heldout.jsonl"
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(questions.read_text().splitlines()[:2]))
    flags = "--max_steps 1 --num_questions 2 --num_generations 2 --tools Google_Search_Tool "
    flags += f"--no-offline --allow_private_hosts --eval_data {few} --output_dir {tmp_path}/run"
    assert train.main(flags.split()) == 0
    assert any(sent.headers["X-API-KEY"] == "canary-77" for sent in server.requests)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.parent.name == "http" for path in files) and len(files) > 10
    assert not [path for path in files if b"canary-77" in path.read_bytes()]
