"""The exercises: stubs without solutions, checks that notice wrong ones, and a grading that a
student's code cannot stop or fake by the usual tricks."""

import ast
import contextlib
import csv
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "exercises"))  # as for `python exercises/check.py`

import bugs  # noqa: E402
import calls  # noqa: E402
import check  # noqa: E402
import checks  # noqa: E402
import make  # noqa: E402
from tasks import TASKS  # noqa: E402

from tests.mutants_exercises import WRONG_SOLUTIONS, find  # noqa: E402

SOURCES = {path.name: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*.py"))}
README = (ROOT / "exercises" / "README.md").read_text(encoding="utf-8")


def split(source):
    """(lines outside of solutions, lines of solutions), markers left out."""
    outside, inside, number = [], [], None
    for line in source.splitlines():
        if marker := re.fullmatch(r" *# (BEGIN|END) SOLUTION (\d+)", line):
            number = marker[2] if marker[1] == "BEGIN" else None
        else:
            (inside if number else outside).append(line)
    return outside, inside


def run_here(name, *given):
    """A call as check.py sends it, answered in this process; a crash is no answer to judge."""
    arguments = json.loads(json.dumps(checks.encode(list(given))))
    reply = json.loads(json.dumps(calls.answer(name, arguments, str(ROOT))))
    assert "raised" not in reply, reply
    return checks.judged(reply, name, arguments)


def script(name, *words):
    return subprocess.run([sys.executable, str(ROOT / "exercises" / name), *map(str, words)],
                          capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class") / "ada"
    assert make.main([str(folder)]) == 0
    return folder


# ------------------------------------------------------------------------------------- the stubs


def test_markers_pair_up_and_stand_in_the_functions_that_the_table_names():
    found = {number: [] for number in range(1, 13)}
    for name in ("memory.py", "modules.py", "tools.py", "agentflow.py", "flow_grpo.py", "train.py",
                 "eval.py"):
        functions = {}
        for node in ast.walk(ast.parse(SOURCES[name])):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef):
                    owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                    functions[f"{owner}{child.name}"] = range(child.lineno, child.end_lineno + 1)
        begun = None
        for place, line in enumerate(SOURCES[name].splitlines(), start=1):
            if marker := re.fullmatch(r" *# (BEGIN|END) SOLUTION (\d+)", line):
                assert marker[2] == (begun or marker[2]) and (marker[1] == "BEGIN") == (not begun)
                begun = marker[2] if marker[1] == "BEGIN" else None
                if begun:
                    (function,) = [f for f, lines in functions.items() if place in lines]
                    found[int(begun)].append(f"{name}:{function}")
        assert begun is None, name
    assert found == {k: [block.place for block in task.blocks] for k, task in TASKS.items()}


def test_a_made_folder_has_no_solution_left_and_everything_else(made):
    solved = 0
    for name, source in SOURCES.items():
        outside, inside = split(source)
        students = (made / name).read_text(encoding="utf-8")
        left = Counter(students.splitlines()) - Counter(outside)
        assert Counter(outside) <= Counter(students.splitlines())
        stubs = [line for line in left.elements() if line.strip()]
        assert all(re.match(r' *(#|raise NotImpl|"exercise \d+: )', line) for line in stubs), stubs
        solved += len(inside)
        compile(students, name, "exec")
    assert solved > 200
    # a line that tells something stands in no other file of the folder either
    telling = {line.strip() for source in SOURCES.values() for line in split(source)[1]}
    telling -= {line.strip() for source in SOURCES.values() for line in split(source)[0]}
    other = [path for path in made.rglob("*") if path.suffix in (".py", ".md")]
    for path in other:
        told = {line.strip() for line in path.read_text(encoding="utf-8").splitlines()}
        assert not {line for line in told & telling if len(line) > 25}, path
    names = {path.relative_to(made).as_posix() for path in made.rglob("*")}
    assert {"train.py", "exercises/check.py", "data/library.jsonl", "requirements.txt"} <= names
    behind = r"tests|\.git/|__pycache__|\.pyc|exercises/(make|bugs|LECTURE)"
    assert not [name for name in names if re.search(behind, name)]


def test_signatures_and_docstrings_stay(made):
    for name, source in SOURCES.items():
        contracts = []
        for text in (source, (made / name).read_text(encoding="utf-8")):
            nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
            contracts.append({(n.name, ast.dump(n.args), ast.get_docstring(n)) for n in nodes})
        inner = {(n, a, d) for n, a, d in contracts[0] if n == "group_sum"}  # inside a solution
        assert contracts[0] - inner == contracts[1]


def test_a_downloaded_archive_is_enough_and_runs_caches_and_environments_stay_behind(tmp_path):
    project = tmp_path / "archive"
    for name in ("exercises", "data"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.txt"), ROOT / "README.md"]:
        shutil.copy(path, project)
    for litter in ("runs/x/metrics.jsonl", ".git/config", "venv/pyvenv.cfg", ".venv/a.py",
                   "data/__pycache__/a.pyc", "exercises/.pytest_cache/a", "results/a.json"):
        (project / litter).parent.mkdir(parents=True, exist_ok=True)
        (project / litter).write_text("x")
    done = subprocess.run([sys.executable, project / "exercises" / "make.py", tmp_path / "out"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "12 exercises" in done.stdout, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "exercises", "data", "README.md", "requirements.txt", "requirements-dev.txt",
        "requirements-bench.txt", *SOURCES}
    assert not [p for p in (tmp_path / "out").rglob("*") if p.name in ("__pycache__", "a")]


def test_make_refuses_what_is_there_and_the_project_itself(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("")
    for folder, said in ((tmp_path, "there already"), (tmp_path / "mine.py", "there already"),
                         (ROOT, "in the project itself"), (ROOT / "student", "in the project")):
        with pytest.raises(SystemExit) as stop:
            make.main([str(folder)])
        assert stop.value.code == 2 and said in capsys.readouterr().err
    assert not (ROOT / "student").exists() and [*tmp_path.iterdir()] == [tmp_path / "mine.py"]
    (tmp_path / "empty").mkdir()
    assert make.main([str(tmp_path / "empty")]) == 0


@pytest.mark.parametrize("source", [
    "# BEGIN SOLUTION 1\nx = 1\n", "# END SOLUTION 1\n", "x = 1  # BEGIN SOLUTION 1\n",
    "# BEGIN SOLUTION 1\n# END SOLUTION 2\n", "# BEGIN SOLUTION 1\n# BEGIN SOLUTION 1\n",
])  # fmt: skip
def test_markers_that_do_not_pair_up_are_refused(source):
    with pytest.raises(ValueError):
        make.without_solutions(source, {})


# ------------------------------------------------------------------------------------ the checks


def number_of(mutant):
    return int(mutant.test.rpartition("_")[2])


def slow_if(slow, value):
    return pytest.param(value, marks=pytest.mark.slow) if slow else value


@pytest.mark.parametrize("number", [slow_if(number == 4, number) for number in TASKS])
def test_the_projects_own_solution_passes(number):
    checks.CHECKS[number](run_here, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_it_passes_with_other_random_numbers(seed):
    for number in TASKS.keys() - {4}:
        checks.CHECKS[number](run_here, seed)


@pytest.mark.parametrize("mutant", [slow_if(number_of(m) == 4, m) for m in WRONG_SOLUTIONS],
                         ids=lambda mutant: mutant.name)
def test_a_wrong_solution_fails_its_check(mutant, monkeypatch):
    monkeypatch.setattr(*find(mutant.module, mutant.attribute), mutant.wrong)
    with pytest.raises(checks.Wrong) as said:
        getattr(checks, mutant.test.partition(":")[2])(run_here, 0)
    text = str(said.value)
    assert re.match(r"  case:      .+\n  expected:  .*", text) and "\n  got:       " in text
    assert len(text) < 1500


RIGHT_SOLUTIONS = {  # written otherwise than the project's own, and right
    "a draw without the total": (6, "agentflow", "draw", """
def draw(probabilities, draws):
    sums = probabilities.to(draws.dtype).cumsum(-1)
    return first_above(sums, draws[:, None])[0][:, 0]
"""),
    "entropy from the normaliser": (10, "flow_grpo", "LinearLogprobs.forward", """
def forward(ctx, hidden, weight, targets, temperature, chunk):
    logp, entropy, normaliser = (torch.empty(len(hidden)) for _ in range(3))
    for s in range(0, len(hidden), chunk):
        part, state = slice(s, s + chunk), hidden[s:s + chunk].float()
        z = torch.full((len(state),), -torch.inf)
        for v, w in head_slices(weight):
            l = tempered(state @ w.T, temperature)
            z = torch.logaddexp(z, l.logsumexp(1))
            column, here = column_of(targets[part], v)
            logp[part] = torch.where(here, l.gather(1, column)[:, 0], logp[part])
        normaliser[part], entropy[part] = z, z
        logp[part] -= z
        for v, w in head_slices(weight):
            l = tempered(state @ w.T, temperature)
            entropy[part] -= ((l - z[:, None]).exp() * l).sum(1)
    ctx.save_for_backward(hidden, weight, targets, normaliser)
    ctx.temperature, ctx.chunk = temperature, chunk
    ctx.mark_non_differentiable(entropy)
    return logp, entropy
"""),
    "a plan of the fields that were asked for": (2, "modules", "_last_plan", """
def _last_plan(pairs):
    plans = [{}]
    for name, value in pairs:
        if name in plans[-1]:
            plans.append({})
        plans[-1][name] = value
    for plan in reversed(plans):
        tool = plan.get("toolname") or plan.get("tool", "")
        if plan.get("subgoal") and tool:
            wanted = {name: plan.get(name, "") for name in ("context", "justification", "subgoal")}
            return {**wanted, "tool": tool}
"""),
    "weights one by one": (7, "flow_grpo", "turn_weights", """
def turn_weights(group_ids, rollout_ids, lengths):
    rows = list(zip(group_ids.tolist(), rollout_ids.tolist(), lengths.tolist()))
    rollouts = {(g, r) for g, r, _ in rows}
    return torch.tensor([
        1 / (len({g for g, _ in rollouts}) * sum(g == group for g, _ in rollouts)
             * sum((g, r) == (group, rollout) for g, r, _ in rows) * length)
        for group, rollout, length in rows])
"""),
    "LoRA by plain products": (11, "agentflow", "LoraLinear.forward", """
def forward(self, x):
    y = self.base(x)
    if self.gate.value is None:
        return y
    low = x @ self.A.to(x.dtype).T
    return y + self.gate.value * (self.scale * (low @ self.B.to(x.dtype).T))
"""),
}


@pytest.mark.parametrize("name", RIGHT_SOLUTIONS)
def test_a_right_solution_of_another_kind_passes(name, monkeypatch):
    number, module, place, source = RIGHT_SOLUTIONS[name]
    owner, attribute = find(module, place)
    found = {}
    exec(source, vars(importlib.import_module(module)), found)
    static = isinstance(vars(owner).get(attribute), staticmethod)
    function = found[attribute]
    monkeypatch.setattr(owner, attribute, staticmethod(function) if static else function)
    for seed in range(3):
        checks.CHECKS[number](run_here, seed)


def test_every_exercise_has_three_wrong_solutions_with_names_of_their_own():
    count = Counter(map(number_of, WRONG_SOLUTIONS))
    assert count.keys() == TASKS.keys() and min(count.values()) >= 3
    assert len({mutant.name for mutant in WRONG_SOLUTIONS}) == len(WRONG_SOLUTIONS)
    zeros = {number_of(m) for m in WRONG_SOLUTIONS if re.search("zero|empty|nothing| 0$", m.name)}
    assert zeros >= {1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12}
    assert {number_of(m) for m in WRONG_SOLUTIONS if "gradient" in m.name} == {9, 10, 11, 12}


def test_a_function_that_changes_its_input_is_told_so(monkeypatch):
    import flow_grpo

    right = flow_grpo.turn_weights

    def sorts_in_place(group_ids, rollout_ids, lengths):
        answer = right(group_ids, rollout_ids, lengths)
        lengths.mul_(2)
        return answer

    monkeypatch.setattr(flow_grpo, "turn_weights", sorts_in_place)
    with pytest.raises(checks.Wrong, match="argument 3 after the call"):
        checks.check_7(run_here, 0)


@pytest.mark.parametrize("got", [
    "torch.zeros(2)", "torch.zeros(2, 1, dtype=torch.float64)", "[0.0, 0.0]", "None",
    "torch.tensor([0.0, torch.nan], dtype=torch.float64)",
    "torch.tensor([0.0, 1e-6], dtype=torch.float64)",
])  # fmt: skip
def test_shape_and_type_and_small_values_are_compared(got):
    import torch

    with pytest.raises(checks.Wrong):
        checks.same("case", eval(got, {"torch": torch}), torch.zeros(2, dtype=torch.float64))


# ---------------------------------------------------------------------------- check.py as a command


@pytest.mark.parametrize("words, said", [
    ([], "Give a folder"), (["1", "2", "."], "Give a folder"), (["13", "."], "no exercise 13"),
    (["x", "."], "no exercise x"), (["nowhere"], "no folder"), (["1", "nowhere"], "no folder"),
    (["--all", "."], "--csv FILE"), ([".", "--csv", "a.csv"], "Give a folder"),
    (["--all", ".", "--csv", "nowhere/a.csv"], "a.csv cannot be written"),
    (["--seconds", "0", "1", "."], "above 0"), (["7"], "Which folder?"),
    (["--all", ".", "--csv", "."], "cannot be written"), (["~nobody-at-all/x"], "no folder"),
    (["x" * 5000], "no folder"),
])  # fmt: skip
def test_a_mistake_on_the_command_line_ends_with_a_sentence_and_code_2(words, said, capsys,
                                                                      tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        check.main(words)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and said in error and error.count("\n") == 1


def test_exit_codes_and_messages_of_one_exercise(made, tmp_path):
    done = script("check.py", 1, "--seconds", 50, ROOT)
    assert (done.returncode, done.stdout) == (0, "exercise 1, Memory rendering: pass\n")
    done = script("check.py", 1, made)
    assert done.returncode == 1 and "not done yet: exercise 1: write one step" in done.stdout
    line = (made / "memory.py").read_text(encoding="utf-8").splitlines()
    where = int(re.search(r"memory\.py:(\d+)", done.stdout)[1])
    assert "NotImplementedError" in line[where - 1] and not done.stderr
    done = script("check.py", 1, tmp_path)  # no project
    assert done.returncode == 1 and "no Python file is in it" in done.stdout
    shutil.copytree(made, tmp_path / "ada", ignore=shutil.ignore_patterns("data"))
    done = script("check.py", tmp_path)  # one folder too high
    assert done.returncode == 1 and done.stdout.count(f"{tmp_path / 'ada'} may be") == 1
    (tmp_path / "ada" / "memory.py").unlink()
    done = script("check.py", 1, tmp_path / "ada")
    assert done.returncode == 1 and "memory.py is not in" in done.stdout


def test_an_exception_is_told_with_the_call_in_words():
    class Raises:
        folder = ROOT

        def ask(self, name, arguments, until):
            raised = {"raised": "ValueError", "text": "no", "where": "flow_grpo.py:1: x"}
            return {"value": str(ROOT), "changed": []} if name == "load" else raised

    text = check.grade(Raises(), 7, 60).text
    assert "case:      turn_weights(int64 (1,) [0], int64 (1,) [0], int64 (1,) [1])\n" in text
    assert "got:       ValueError: no\n  flow_grpo.py:1: x" in text


def test_help_says_how(capsys):
    for program in (check, make, bugs):
        with pytest.raises(SystemExit) as stop:
            program.main(["--help"])
        assert stop.value.code == 0 and "python exercises/" in capsys.readouterr().out


@pytest.mark.slow
def test_the_table_of_a_made_folder_and_of_the_project(made):
    done = script("check.py", made)
    assert done.returncode == 1 and done.stdout.count("not done\n") == 12, done.stdout
    assert "0 of 12" in done.stdout
    done = script("check.py", ROOT)
    assert done.returncode == 0 and "12 of 12 pass" in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", TASKS)
def test_each_exercise_of_a_made_folder_says_its_number(made, number):
    done = script("check.py", number, made)
    assert done.returncode == 1 and f"not done yet: exercise {number}: " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", TASKS)
def test_each_exercise_can_be_done_before_all_others(made, tmp_path, number):
    """A folder in which this solution alone is filled in."""
    folder = tmp_path / "one"
    shutil.copytree(made, folder)
    for name, source in SOURCES.items():
        source = re.sub(rf"# (BEGIN|END) SOLUTION {number}\n", "#\n", source)
        (folder / name).write_text(make.without_solutions(source, {}), encoding="utf-8")
    done = script("check.py", number, folder)
    assert done.returncode == 0, done.stdout


# ------------------------------------------------------------------ code that would rather not work

RIGHT = SOURCES["memory.py"]
TRICKS = {  # what stands at the top of memory.py: the verdict on exercise 1
    "says that it passed and leaves": ("import os\nprint('exercise 1: pass', flush=True)\n"
                                       "os._exit(0)", "error"),
    "ends at once": ("import sys\nsys.exit(0)", "error"),
    "never ends": ("while True: pass", "timeout"),
    "never ends and catches everything": ("while True:\n    try:\n        while True: pass\n"
                                          "    except BaseException: pass", "timeout"),
    "cannot be imported": ("import no_such_module", "error"),
    "is no Python": ("def f(:", "error"),
    "is interrupted": ("raise KeyboardInterrupt", "error"),
    "deletes modules": ("import sys\nsys.modules.clear()", "error"),
    "floods the screen": ("import os\nfor _ in range(100): os.write(1, b'pass' * 65536)\n"
                          "os._exit(0)", "error"),
    "answers by itself": ("import os\nfor fd in range(3, 32):\n    try: os.write(fd, "
                          "b'{\"value\": \"\", \"changed\": []}\\n' * 9)\n    except OSError: pass",
                          "error"),
    "answers without an end": ("import os\nfor fd in range(3, 32):\n    try: os.write(fd, b'{' * "
                               "9 + b'\\n')\n    except OSError: pass", "error"),
    "changes the checker": ("import sys\nfor name in ('checks', 'calls', '__main__'):\n"
                            "    for key, value in vars(sys.modules.get(name, sys)).items():\n"
                            "        if callable(value) and key in ('same', 'holds', 'check_1'):\n"
                            "            setattr(sys.modules[name], key, lambda *a, **k: None)",
                            "not done"),
    "leaves a child with the pipe": ("import os, time\nif os.fork() == 0:\n    os.setsid()\n"
                                     "    time.sleep(4)\n    os._exit(0)\nos._exit(0)", "error"),
}  # fmt: skip
QUICK = ("says that it passed and leaves", "answers by itself", "changes the checker")


@pytest.mark.parametrize("name", [slow_if(name not in QUICK, name) for name in TRICKS])
def test_a_trick_neither_stops_the_grading_nor_passes(made, tmp_path, name):
    code, expected = TRICKS[name]
    folder = tmp_path / "student"
    shutil.copytree(made, folder, ignore=shutil.ignore_patterns("data"))
    path, started = folder / "memory.py", time.monotonic()
    head, line, rest = path.read_text(encoding="utf-8").partition(
        "from __future__ import annotations\n")
    path.write_text(head + line + code + "\n" + rest, encoding="utf-8")
    student = check.Student(folder, shown=False)
    try:
        verdict = check.grade(student, 1, 2.0 if expected == "timeout" else 60.0)
    finally:
        student.stop()
    assert verdict.status == expected, verdict
    assert time.monotonic() - started < 60


def test_a_process_that_stops_reading_is_a_timeout(made):
    student = check.Student(made, shown=False)
    try:
        student.ask("load", ["memory"], time.monotonic() + 60)
        os.kill(student.process.pid, signal.SIGSTOP)
        with pytest.raises(check.Ended) as end:
            student.ask("choose", [[0.5] * 1_000_000], time.monotonic() + 1)
        assert end.value.verdict.status == "timeout"
    finally:
        student.stop()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_checker_that_is_stopped_leaves_nobody_behind(tmp_path, number):
    (tmp_path / "memory.py").write_text("while True: pass")

    def students():
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # ended meanwhile
                line = path.read_bytes()
                found += [line] * (b"calls.py" in line and str(tmp_path).encode() in line)
        return found

    def wait_for(count):
        until = time.monotonic() + 20
        while len(students()) != count:
            assert time.monotonic() < until, f"{len(students())} processes, not {count}"
            time.sleep(0.05)

    process = subprocess.Popen([sys.executable, str(ROOT / "exercises" / "check.py"), "1",
                                str(tmp_path)], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    wait_for(1)
    time.sleep(0.5)  # until it has told the kernel whose child it is
    process.send_signal(number)
    assert process.wait(20) in (130, -9)
    wait_for(0)


def test_answers_of_another_form_are_failures_and_no_crash_of_the_grading(made, tmp_path):
    class Odd:
        folder = ROOT

        def ask(self, name, arguments, until):
            return {"value": str(ROOT) if name == "load" else self.answer, "changed": []}

    odd = Odd()
    for odd.answer in (None, 3, [], {}, {"tensor": "load", "shape": [], "numbers": []},
                   {"tensor": "float32", "shape": [2], "numbers": ["x"]}, "text", [[[]]]):
        for number in TASKS:
            assert check.grade(odd, number, 60).status == "fail"


def test_a_class_is_graded_row_by_row_also_past_a_student_who_hangs(made, tmp_path, monkeypatch,
                                                                   capsys):
    monkeypatch.setattr(check, "TASKS", {1: TASKS[1], 3: TASKS[3]})
    for name, text in (("bob", RIGHT), ("eve", "while True: pass")):
        shutil.copytree(made, tmp_path / name)
        (tmp_path / name / "memory.py").write_text(text, encoding="utf-8")
    table = tmp_path / "grades.csv"
    table.write_text("eve,pass,pass,2\n")  # as if a student had written it
    (tmp_path / "zoe.zip").write_text("not unpacked")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    foreign = os.fsdecode(os.fsencode(tmp_path) + b"/m\xfcller")  # as another system writes it
    os.mkdir(foreign)
    odd = [str(tmp_path / "gone"), foreign, str(tmp_path / "twins" / "ada")]
    folders = [str(tmp_path / name) for name in ("eve", "zoe.zip", "bob")] + [str(made)]
    folders += odd
    assert check.main(["--all", *folders, "--csv", str(table), "--seconds", "3"]) == 0
    with open(table, newline="", encoding="utf-8") as file:
        assert [*csv.reader(file)] == [
            ["folder", "1", "3", "total"], ["eve", "timeout", "not done", "0"],
            ["zoe.zip", "error", "error", "0"], ["bob", "pass", "not done", "1"],
            [str(made), "not done", "not done", "0"], ["gone", "error", "error", "0"],
            [r"m\udcfcller", "error", "error", "0"], [odd[2], "error", "error", "0"]]
    said = capsys.readouterr().out
    assert "eve: 0 of 2" in said and "zoe.zip is no folder: unpack it first" in said


def test_keys_of_the_lecturer_are_not_handed_to_the_student(made, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a lecturer's")
    (tmp_path / "memory.py").write_text(
        "import os\nraise ValueError(os.environ.get('OPENAI_API_KEY'))")
    student = check.Student(tmp_path, shown=False)
    try:
        assert "ValueError: None" in check.grade(student, 1, 60).text
    finally:
        student.stop()


# ------------------------------------------------------------------------------------ the README


def test_the_readmes_table_is_the_tasks_and_its_places_exist():
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in README.splitlines() if re.match(r"\| *\d+ *\|", line)]
    assert len(rows) == 12
    for row, (number, task) in zip(rows, TASKS.items(), strict=True):
        places = list(dict.fromkeys(block.place for block in task.blocks))
        assert row == [str(number), str(task.minutes), task.title,
                       ", ".join(f"`{place}`" for place in places), task.paper, task.learnt]
        for place in places:
            owner, name = find(place.partition(":")[0].removesuffix(".py"),
                               place.partition(":")[2])
            assert callable(getattr(owner, name))
        assert 10 <= task.minutes <= 40
    for name in re.findall(r"`(\w+\.\w+)\(\)`", README):
        module, _, function = name.partition(".")
        assert callable(getattr(importlib.import_module(module), function)), name
    for heading in ("## Find the silent bug", "## Predict, then run"):
        assert heading in README


def test_the_lectures_exercises_fit_into_their_minutes_and_none_is_forgotten():
    lecture = (ROOT / "exercises" / "LECTURE.md").read_text(encoding="utf-8")
    named = []
    for room, *there, minutes, rest in re.findall(
            r"\| (\d+) \| Exercises (\d+) and (\d+) \((\d+) minutes\)(.+?at home)", lecture):
        there = [int(number) for number in there]
        assert sum(TASKS[number].minutes for number in there) == int(minutes) <= int(room)
        named += there + [int(number) for number in re.findall(r"\d+", rest)]
    assert sorted(named) == [*TASKS]


# -------------------------------------------------------------------------------- the silent bugs


@pytest.mark.parametrize("number", bugs.BUGS)
def test_a_bug_is_handed_out_and_only_its_line_is_the_answer(number, tmp_path, capsys):
    folder = tmp_path / "bug"
    assert bugs.main([str(number), str(folder)]) == 0
    handed_out = capsys.readouterr().out
    changed = {
        (path.name, line)
        for path in folder.glob("*.py")
        for line, (old, new) in enumerate(
            zip(SOURCES[path.name].splitlines(), path.read_text("utf-8").splitlines(), strict=True),
            start=1)
        if old != new
    }
    assert 1 <= len(changed) <= 2
    for name, line in changed:
        assert bugs.main([str(number), str(folder), f"{name}:{line}"]) == 0
        assert bugs.main([str(number), str(folder), f"{name}:{line + 5}"]) == 1
    assert bugs.BUGS[number].clue not in handed_out and bugs.BUGS[number].clue in \
        capsys.readouterr().out
    for odd, where in (("train.py", folder), ("train.py:x", folder), ("", folder),
                       ("train.py:99999", folder), ("nope.py:3", folder), ("1337", folder),
                       ("train.py:3", ROOT), ("train.py:3", tmp_path)):
        with pytest.raises(SystemExit) as end:
            bugs.main([str(number), str(where), odd])
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.count("\n") == 1
        assert ("is no line" if where == folder else "does not hold bug") in error
    (name, line), *_ = changed
    path = folder / name  # a student's own prints above it
    path.write_text("# mine\n" + path.read_text("utf-8"), "utf-8")
    assert bugs.main([str(number), str(folder), f"{name}:{line + 1}"]) == 0
    assert not (folder / "exercises").exists()  # its answers stay behind
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 41))
    with pytest.raises(SystemExit) as end:
        bugs.main([str(number), str(folder)])
    assert end.value.code == 2 and "is there already" in capsys.readouterr().err


def test_the_logs_show_what_the_answers_say():
    def rows(number):
        lines = (ROOT / f"exercises/bugs/{number}/metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    assert all(row["kl"] == 0 for row in rows(1)) and rows(1)[-1]["adapter/delta_norm"] > 1
    gap = "sampling/sampling_logp_difference/mean"
    assert rows(2)[0][gap] > 5e-4 and all(row[gap] < 1e-5 for row in rows(1))
    flat = {n: [row["frac_reward_zero_std"] for row in rows(n)] for n in bugs.BUGS}
    assert flat[3][0] == 0 and sum(flat[3][:20]) / 20 < 0.05
    assert flat[1][0] == 0.5 and sum(flat[1][:20]) / 20 > 0.2


def test_the_lines_to_change_in_the_predictions_are_there():
    assert "advantages = torch.where(flat, 0.0, centred / (std + eps))" in SOURCES["flow_grpo.py"]
    assert SOURCES["train.py"].count("flow_grpo.group_advantages(rewards, group_ids)") == 1
