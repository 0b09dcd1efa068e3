"""Measuring a planner: the run and its folder, the judge, servers as backbones, the reports."""

import json
import math
import random
import re
import statistics

import pytest

import agentflow
import eval as evaluation
from agentflow import Request, ScriptedBackbone
from tools import Ask

QUESTIONS = [("one", "1"), ("two", "2"), ("three", "3"), ("four", "4")]


def scripted(right=("1", "2")):
    """A backbone that answers a question with its number where that is in `right`, and with 0."""

    def say(ask: Ask) -> str:
        asked = re.search(r"what is (\w+)\?", ask.user)  # the executor sees no question
        number = dict(QUESTIONS)[asked[1]] if asked else ""
        return {
            "analyst": "Summary: x",
            "planner": "Justification: j\nContext: c\nSub-Goal: s\nTool Name: Base_Generator_Tool",
            "executor": 'execution = tool.execute(query="q")',
            "verifier": "Conclusion: STOP",
            "generator": f"<answer>{number if number in right else 0}</answer>",
            "judge": "Verdict: " + ("CORRECT" if number in right else "INCORRECT"),
        }.get(ask.module, "x")

    return ScriptedBackbone(say)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Four questions in a file; evaluations run in an empty folder, on the scripted backbone."""
    monkeypatch.chdir(tmp_path)
    lines = [{"id": word, "question": f"what is {word}?", "answer": n} for word, n in QUESTIONS]
    path = tmp_path / "few.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    monkeypatch.setattr(evaluation, "load_model", lambda config: scripted())
    return path


def run(*arguments):
    return evaluation.main([str(argument) for argument in arguments])


def lines_of(folder):
    text = (folder / "results.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


# --- The run and its folder --------------------------------------------------------------------


def test_a_run_leaves_results_a_report_and_the_same_numbers_as_data(data, tmp_path, capsys):
    """Two of four are right: 50 %, and Wilson's interval for 2 of 4 is 15.0 to 85.0 %."""
    folder = tmp_path / "out"
    assert run("--data", data, "--output_dir", folder, "--json", tmp_path / "all.json") == 0
    said = capsys.readouterr().out
    assert "| 50.0 | 15.0-85.0 |" in re.sub(" +", " ", said) and str(folder) in said
    assert [line["score"] for line in lines_of(folder)] == [1.0, 1.0, 0.0, 0.0]
    report = json.loads((folder / "report.json").read_text())
    assert report["accuracy"] == 0.5 and report["sets"][0]["done"] == 4
    assert len(json.loads((tmp_path / "all.json").read_text())["items"]) == 4
    rows, _, details = (folder / "report.md").read_text().partition("\n\n```\n")
    assert rows in said and details.removesuffix("\n```\n") in said


def test_a_stopped_run_says_how_far_it_came_and_goes_on_where_it_was(
    data, tmp_path, capsys, monkeypatch
):
    """Ctrl-C behind the third answer: exit code 130, three lines; then only the fourth is asked."""
    folder, add = tmp_path / "out", evaluation.Results.add

    def stop_at_three(self, item):
        add(self, item)
        if len(self.items) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(evaluation.Results, "add", stop_at_three)
        assert run("--data", data, "--output_dir", folder) == 130
    said = capsys.readouterr()
    assert "3 of 4 questions are done" in said.err and "3 of 4" in said.out
    with open(folder / "results.jsonl", "a", encoding="utf-8") as file:
        file.write('{"id": "cut in the mid')  # what a kill can leave
    backbone = scripted()
    monkeypatch.setattr(evaluation, "load_model", lambda config: backbone)
    assert run("--resume", "--output_dir", folder) == 0
    assert [line["id"] for line in lines_of(folder)] == ["one", "two", "three", "four"]
    assert sum(ask.module == "generator" for ask in backbone.asked) == 1
    assert run("--resume", "--output_dir", folder, "--temperature", 0.1) == 2
    assert "temperature = 0.7" in capsys.readouterr().err
    assert run("--data", data, "--output_dir", folder) == 2
    assert "already holds results" in capsys.readouterr().err


def test_a_question_that_cannot_be_asked_is_wrong_and_stays_in_the_denominator(
    data, tmp_path, monkeypatch
):
    """The third is longer than a prompt may be: 2 of 4, one of the wrong ones crashed."""
    rows = data.read_text().replace("what is three?", "what is three? " + "x" * 4000)
    data.write_text(rows)
    assert run("--data", data, "--output_dir", tmp_path / "out") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["accuracy"], report["crashed"]) == (0.5, 1)
    assert report["turns"] == 1.0  # of the three that were answered, each in one turn
    (crashed,) = [line for line in lines_of(tmp_path / "out") if line["crashed"]]
    assert crashed["id"] == "three" and "max_prompt_length" in crashed["crashed"]


def test_rescoring_asks_no_model_and_keeps_what_was_said(data, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "out"
    assert run("--data", data, "--output_dir", folder) == 0
    before = lines_of(folder)
    (tmp_path / "mine.py").write_text(
        "def always(response, question):\n    return len(question.text) * 0 + 1.0\n"
    )
    monkeypatch.setattr(evaluation, "load_model", lambda config: 1 / 0)
    assert run("--rescore", "--output_dir", folder, "--reward", tmp_path / "mine.py:always") == 0
    after = lines_of(folder)
    assert [line["score"] for line in after] == [1.0] * 4
    assert [line["response"] for line in after] == [line["response"] for line in before]
    assert run("--rescore", "--output_dir", folder, "--reward", "") == 0
    assert lines_of(folder) == before


def test_turn_budgets_and_runs_are_measured_apart(data, tmp_path, capsys):
    assert run("--data", data, "--output_dir", "out", "--max_turns", "5,3", "--runs", 2) == 0
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["sets"]
    assert [row["max_turns"] for row in rows] == [3, 5]
    assert all(row["runs"] == [0.5, 0.5] and row["spread"] == 0.0 for row in rows)
    assert run("--data", data, "--max_turns", "3,0") == 2
    assert "--max_turns is a number from 1 on" in capsys.readouterr().err


def test_items_gained_and_lost_between_two_results(data, tmp_path, monkeypatch, capsys):
    """Before: one, two right. After: two, three, four: 2 gained, 1 lost; an exact sign test of 1
    in 3 gives p = 2 · (1 + 3) / 8 = 1."""
    assert run("--data", data, "--output_dir", "a") == 0
    monkeypatch.setattr(evaluation, "load_model", lambda config: scripted(("2", "3", "4")))
    assert run("--data", data, "--output_dir", "b") == 0
    capsys.readouterr()
    assert run("--compare", "a,b") == 0
    assert capsys.readouterr().out.split("\n")[1].split()[1:] == [
        "3", "4", "50.0%", "75.0%", "2", "1", "1.000"]  # fmt: skip
    assert run("--compare", "a,nowhere") == 2
    assert "nowhere holds no evaluation" in capsys.readouterr().err


def test_text_sets_report_f1_beside_exact_match(tmp_path, monkeypatch):
    """ "Mark Twain the writer" and "Mark Twain": no exact match, F1 = 2 · 2 / (3 + 2) = 0.8."""
    monkeypatch.chdir(tmp_path)
    row = {"question": "what is one?", "answer": "Mark Twain", "kind": "text"}
    (tmp_path / "one.jsonl").write_text(json.dumps(row))
    twain = ScriptedBackbone(
        lambda ask: "Mark Twain the writer" if ask.module == "generator" else "Conclusion: STOP"
    )
    monkeypatch.setattr(evaluation, "load_model", lambda config: twain)
    assert run("--data", "one.jsonl", "--output_dir", "out") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["accuracy"], report["f1"]) == (0.0, pytest.approx(0.8))
    assert "|   F1 |" in (tmp_path / "out" / "report.md").read_text()


def test_wilson_covers_a_true_share_nineteen_times_in_twenty():
    rng = random.Random(0)
    covered = 0
    for _ in range(2000):
        low, high = evaluation.wilson(sum(rng.random() < 0.1 for _ in range(100)) / 100, 100)
        covered += low <= 0.1 <= high
    assert 0.93 < covered / 2000 < 0.975
    assert evaluation.wilson(0.0, 30)[0] == 0.0 and evaluation.wilson(1.0, 30)[1] == 1.0


def test_an_interval_counts_a_question_once_however_often_it_was_run():
    item = {"id": "a", "source": "few", "max_turns": 3, "group": "all", "tools": ["T"],
            "errors": ["none"]}  # fmt: skip
    items = [
        {**item, "id": name, "run": run, "score": score}
        for run, scores in enumerate([(1, 0), (1, 1), (0, 1)])
        for name, score in zip("ab", scores, strict=True)
    ]
    (row,) = evaluation.report_rows(items, {"few": 2})
    assert row["runs"] == [0.5, 1.0, 0.5] and math.isclose(row["accuracy"], 2 / 3)
    assert math.isclose(row["spread"], statistics.stdev([0.5, 1.0, 0.5]))
    assert row["interval"] == evaluation.wilson(2 / 3, 2)


def test_a_reward_function_that_fails_makes_no_answer_right(data, tmp_path):
    """It is tried once at the start, then fails for "two": 3 of 4, and one crashed."""
    (tmp_path / "mine.py").write_text(
        "def mine(response, question):\n    assert question.id != 'two', 'no'\n    return 1\n"
    )
    with pytest.warns(UserWarning, match="AssertionError"):
        assert run("--data", data, "--output_dir", "out", "--reward", "mine.py:mine") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["accuracy"], report["crashed"]) == (0.75, 1)


def test_two_processes_cannot_go_on_in_one_folder(data, tmp_path, capsys):
    assert run("--data", data, "--output_dir", "out") == 0
    lock = agentflow.lock_folder(tmp_path / "out")
    assert run("--resume", "--output_dir", "out") == 2
    assert "in use" in capsys.readouterr().err
    lock.close()
    assert run("--resume", "--output_dir", "out") == 0


@pytest.mark.parametrize("damage", [
    lambda line: line.replace('"id"', '"identity"'),
    lambda line: line.replace('"score": 1.0', '"score": "x"'),
    lambda line: line + line, lambda line: line.replace('"source"', '"sauce"'), lambda line: "[]\n",
    lambda line: re.sub(r'"tools": \[[^]]*]', '"tools": null', line), lambda line: "{}\n",
])  # fmt: skip
def test_damaged_results_are_refused_in_a_sentence(data, tmp_path, capsys, damage):
    assert run("--data", data, "--output_dir", "out") == 0
    path = tmp_path / "out" / "results.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text(damage(first) + "".join(others))
    for how in ("--resume", "--rescore"):
        assert run(how, "--output_dir", "out") == 2
        assert "the results are damaged" in capsys.readouterr().err


# --- A judge -----------------------------------------------------------------------------------


def test_a_judges_verdict_counts_and_one_that_cannot_be_read_passes_nothing(
    data, tmp_path, monkeypatch
):
    """The judge passes 1, fails 2 (the rule passes both) and mumbles on 3 and 4: one of four is
    right, two verdicts are missing, and it agrees with the rule on one of the two it gave."""
    verdicts = {"1": "Verdict: CORRECT", "2": "Verdict: INCORRECT"}

    def say(ask):
        if ask.module == "judge":
            return verdicts.get(re.search(r"Reference: (\d)", ask.user)[1], "Well, who knows?")
        return scripted()._reply(ask).text

    monkeypatch.setattr(evaluation, "load_model", lambda config: ScriptedBackbone(say))
    assert run("--data", data, "--output_dir", "out", "--judge", "frozen") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["accuracy"] == 0.25 and report["judge_failures"] == 2
    assert report["judge_agrees_with_rule"] == 0.5
    assert [line["rule"] for line in lines_of(tmp_path / "out")] == [1.0, 1.0, 0.0, 0.0]


# --- A server as a backbone --------------------------------------------------------------------


def serve(server, answer, models=("planner",)):
    """An OpenAI-compatible server: `answer` maps a request's body to the message's content."""
    listed = {"object": "list", "data": [{"id": name} for name in models]}

    def chat(state):
        body = json.loads(state.requests[-1].body)
        found = answer(body)
        if isinstance(found, tuple):
            return found
        message = {"role": "assistant", "content": found}
        reply = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        return 200, {}, json.dumps(reply).encode()

    server.answers["/v1/models"] = lambda state: (200, {}, json.dumps(listed).encode())
    server.answers["/v1/chat/completions"] = chat
    return server.base + "/v1"


def by_script(body):
    system, user = (message["content"] for message in body["messages"])
    kinds = ("analyst", "planner", "executor", "verifier", "generator")
    module = next((kind for kind in kinds if MODULE_HEADS[kind] in system), "tool")
    return scripted()._reply(Ask(module, system, user)).text


MODULE_HEADS = {
    "analyst": "You analyse", "planner": "You plan", "executor": "You write the command",
    "verifier": "You judge whether", "generator": "You answer a question from",
}  # fmt: skip


def test_all_modules_may_be_played_by_a_server(server, data, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "canary" * 3)
    url = serve(server, by_script)
    assert run("--data", data, "--url", url, "--output_dir", "out") == 0
    scores = {line["id"]: line["score"] for line in lines_of(tmp_path / "out")}
    assert scores == {"one": 1.0, "two": 1.0, "three": 0.0, "four": 0.0}
    first = next(request for request in server.requests if request.method == "POST")
    assert json.loads(first.body)["model"] == "planner"
    assert first.headers["Authorization"] == "Bearer " + "canary" * 3
    written = "".join(p.read_text() for p in (tmp_path / "out").iterdir())
    assert "canary" * 3 not in written


def test_a_model_that_the_server_does_not_serve_is_refused_with_the_names_it_serves(
    server, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    url = serve(server, by_script, models=("qwen", "llama"))
    assert run("--url", url) == 2
    assert "serves qwen, llama: name one" in capsys.readouterr().err
    assert run("--url", url, "--model", "gpt") == 2
    assert "no model 'gpt'" in capsys.readouterr().err
    assert agentflow.RemoteBackbone(url, "llama").model == "llama"


REQUEST = Request(Ask("generator", "system", "user"), 0.0, 8, (0,))


def test_a_busy_server_is_asked_again_and_a_broken_one_is_given_up(server, monkeypatch):
    naps = []
    monkeypatch.setattr(agentflow.time, "sleep", naps.append)
    answers = [(429, {"Retry-After": "7"}, b"slow down"), (503, {}, b"busy"), "fine"]
    url = serve(server, lambda body: answers.pop(0))
    backbone = agentflow.RemoteBackbone(url)
    assert backbone.reply(REQUEST).text == "fine" and naps == [7.0, 2.0]
    answers += [(500, {}, b"boom")] * 5
    with pytest.raises(ConnectionError, match="failed 5 times; the last: HTTP 500: boom"):
        backbone.reply(REQUEST)


@pytest.mark.parametrize("status, body, error", [
    (400, b'{"error": {"message": "maximum context length is 4096"}}', ValueError),
    (401, b"who are you?", ConnectionError),
    (200, b'{"choices": []}', ConnectionError),
    (302, b"", ValueError),
])  # fmt: skip
def test_what_a_server_may_answer_instead_of_a_reply(server, status, body, error, monkeypatch):
    monkeypatch.setattr(agentflow.time, "sleep", lambda seconds: None)
    url = serve(server, lambda request: (status, {"Location": "http://10.0.0.1/"}, body))
    with pytest.raises(error):
        agentflow.RemoteBackbone(url).reply(REQUEST)


def test_a_refused_request_is_raised_in_its_own_flow_and_a_null_reply_is_empty(server):
    """ "content": null is what a server sends for a refusal."""
    url = serve(server, lambda body: None if "null" in str(body) else (400, {}, b"too long"))
    backbone = agentflow.RemoteBackbone(url)

    def asks(text):
        try:
            return (yield Ask("generator", "system", text)).text
        except ValueError as error:
            return str(error)

    results = agentflow.drive(
        [asks("null"), asks("long")], [(0,), (1,)], backbone, agentflow.Sampling()
    )
    assert results[0] == "" and "too long" in results[1]


def test_a_server_that_dies_leaves_what_was_answered_and_can_be_gone_on_with(
    server, data, tmp_path, monkeypatch, capsys
):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agentflow.RemoteBackbone, "TRIES", 1)
    dead = []

    def answer(body):
        if "four" in str(body) and not dead:
            return 500, {}, b"out of memory"
        return by_script(body)

    url = serve(server, answer)
    assert run("--data", data, "--url", url, "--output_dir", "out") == 1
    said = capsys.readouterr().err
    assert "out of memory" in said and "questions are done" in said
    dead.append(True)
    assert run("--resume", "--output_dir", "out") == 0
    assert {line["id"] for line in lines_of(tmp_path / "out")} == {"one", "two", "three", "four"}


def test_benchmarks_stand_beside_the_papers_numbers(tmp_path, monkeypatch, capsys):
    """Two sets of two questions: one right of two in each, and 58.4 of the paper's table."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluation, "load_model", lambda config: scripted(("1", "3")))

    def load(name, offline, no_cache):
        pair = QUESTIONS[:2] if name == "bamboogle" else QUESTIONS[2:]
        return [
            evaluation.Question(f"{name}/{word}", f"what is {word}?", [number], source=name)
            for word, number in pair
        ]

    monkeypatch.setattr(evaluation, "load_benchmark", load)
    assert run("--bench", "aime24,bamboogle", "--output_dir", "out", "--offline") == 0
    assert "58.4" in capsys.readouterr().out
    rows = {
        row["set"]: row for row in json.loads((tmp_path / "out/report.json").read_text())["sets"]
    }
    assert rows["bamboogle"]["accuracy"] == rows["aime24"]["accuracy"] == 0.5
    assert rows["aime24"]["paper"]["AgentFlow + Flow-GRPO"] == 40.0


def test_a_judge_may_be_a_server_and_sees_question_reference_and_answer(server, data, tmp_path):
    """It says INCORRECT to everything but "two"."""
    seen = []

    def verdict(body):
        seen.append(body["messages"][1]["content"])
        return "Verdict: CORRECT" if "what is two?" in seen[-1] else "Verdict: INCORRECT"

    url = serve(server, verdict, models=("judge",))
    assert run("--data", data, "--output_dir", "out", "--judge", url) == 0
    scores = {line["id"]: line["score"] for line in lines_of(tmp_path / "out")}
    assert scores == {"one": 0.0, "two": 1.0, "three": 0.0, "four": 0.0}
    assert "Question: what is one?\nReference: 1\nAnswer: 1" in seen
