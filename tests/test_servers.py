"""Frozen modules and judges on a server: the same roll-outs, and what happens when it is down."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch

import agentflow
import train
from agentflow import Request
from tests.test_train import few_questions, read, run  # noqa: F401 (a fixture)
from tools import Ask, ServerDown

SMALL = ["--max_steps", "1", "--num_questions", "2", "--num_generations", "2", "--max_turns", "2",
         "--eval_questions", "2", "--deterministic"]  # fmt: skip


@pytest.fixture(autouse=True)
def one_try(monkeypatch):
    """No waiting for a server that a test has switched off."""
    monkeypatch.setattr(agentflow.RemoteBackbone, "TRIES", 1)


@pytest.fixture
def chat():
    """An OpenAI-compatible server with one model, "base": `chat.say(body) -> text` answers, one
    request at a time; None is an HTTP 500."""
    state = SimpleNamespace(say=lambda body: "", asked=[])
    turn = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"data": [{"id": "base"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with turn:
                state.asked.append(body)
                text = state.say(body)
            message = {"message": {"content": text}, "finish_reason": "stop"}
            self.reply({"choices": [message]}, 200 if text is not None else 500)

        def reply(self, value, status=200):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, *args):
            """Not into the test's output."""

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    state.url = f"http://127.0.0.1:{httpd.server_address[1]}/v1"
    state.close = lambda: (httpd.shutdown(), httpd.server_close())
    yield state
    state.close()


def texts(body):
    return [message["content"] for message in body["messages"]]


def builtin_modules():
    """The built-in backbone's frozen weights as `say`."""
    backbone = agentflow.load_backbone("builtin", "cpu", lora_r=None)

    def say(body):
        ask = Ask("executor", *texts(body))  # a frozen module, whichever
        return backbone.generate([Request(ask, body["temperature"], body["max_tokens"], (0,))])[
            0
        ].text

    return say


def replies(folder):
    return [
        (line["generator"]["reply"], [turn["planner"]["reply"] for turn in line["turns"]],
         [turn["verifier"]["reply"] for turn in line["turns"]], line["reward"])
        for line in read(folder / "rollouts" / "1.jsonl")
    ]  # fmt: skip


def test_served_frozen_modules_write_what_local_ones_write(tmp_path, few_questions, chat):  # noqa: F811
    """The same weights on the other side of HTTP: the same roll-outs, word for word."""
    chat.say = builtin_modules()
    common = [*SMALL, "--eval_data", few_questions]
    assert run(*common, "--output_dir", tmp_path / "local") == 0
    assert run(*common, "--output_dir", tmp_path / "served", "--frozen_url", chat.url) == 0
    assert replies(tmp_path / "served") == replies(tmp_path / "local")
    assert chat.asked and all(body["model"] == "base" for body in chat.asked)
    assert not any(texts(body)[0].startswith("You plan the next step") for body in chat.asked)
    for name in ("eval_before.jsonl", "eval_after.jsonl"):
        ours, theirs = (
            [(item["id"], item["response"]) for item in read(tmp_path / folder / name)]
            for folder in ("served", "local")
        )
        assert ours == theirs


def test_the_servers_model_is_checked_at_the_start(tmp_path, few_questions, chat, capsys):  # noqa: F811
    for flag in ("--frozen_model", "--judge_model"):
        url = "--frozen_url" if flag == "--frozen_model" else "--judge"
        assert run(*SMALL, url, chat.url, flag, "other", "--output_dir", tmp_path / "run") == 2
        assert "serves base" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_what_is_no_address_is_refused_at_once(tmp_path, capsys):
    for flag in ("--frozen_url", "--judge"):
        assert run(*SMALL, flag, "localhost:8000/v1", "--output_dir", tmp_path / "run") == 2
        assert "http://localhost:8000/v1" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [b"[]", b"{}", b'{"data": [1]}', b"<html>", b"", b"null"])
def test_a_list_of_models_that_is_none_is_said_in_a_sentence(tmp_path, server, capsys, answer):
    server.answers["/v1/models"] = lambda state: (200, {}, answer)
    url = f"{server.base}/v1"
    assert run(*SMALL, "--frozen_url", url, "--output_dir", tmp_path / "run") == 2
    errors = capsys.readouterr().err
    assert url in errors and "Traceback" not in errors


@pytest.mark.parametrize("answer", [[], {}, {"choices": []}, {"choices": [{"message": 1}]}, None,
                                    {"choices": [{"message": {"content": 5}}]}])
def test_a_completion_that_is_none_is_a_server_that_is_down(server, answer):
    server.answers["/v1/models"] = lambda state: (200, {}, b'{"data": [{"id": "base"}]}')
    body = json.dumps(answer).encode()
    server.answers["/v1/chat/completions"] = lambda state: (200, {}, body)
    remote = agentflow.RemoteBackbone(f"{server.base}/v1")
    with pytest.raises(ServerDown):
        remote.reply(Request(Ask("verifier", "system", "user"), 0.0, 8, (0,)))


def test_a_roll_out_whose_server_fails_has_no_reward_and_leaves_its_group(
    tmp_path, few_questions, chat, monkeypatch  # noqa: F811
):
    """The server refuses one roll-out's generator: reward null, its turns are no rows, and the
    advantages are those of the other three."""
    modules, seen = builtin_modules(), []

    def say(body):
        if "<answer>" in texts(body)[0] and not seen:
            seen.append(body)
            return None
        return modules(body)

    chat.say = say
    folder = tmp_path / "run"
    monkeypatch.setattr(train, "measure", lambda t, title: {  # only the step is of interest
        "accuracy": 0.0, "tool_errors": 0.0, "turns": 1.0, "items": [], "errors": {}, "tools": {},
        "groups": {}})  # fmt: skip
    assert run(*SMALL, "--num_generations", 4, "--eval_data", few_questions,
               "--frozen_url", chat.url, "--output_dir", folder) == 0  # fmt: skip
    lines = read(folder / "rollouts" / "1.jsonl")
    failed = [line for line in lines if line["reward"] is None]
    assert len(failed) == 1 and len(lines) == 8
    assert "HTTP 500" in failed[0]["failed"] and failed[0]["turns"] == []
    assert failed[0]["advantage"] == 0
    group = [line for line in lines if line["group"] == failed[0]["group"]]
    rewards = torch.tensor([line["reward"] for line in group if line["reward"] is not None])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    got = [line["advantage"] for line in group if line["reward"] is not None]
    torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-4, atol=1e-4)
    (row,) = read(folder / "metrics.jsonl")
    assert row["rollouts/failed"] == 1


def test_a_failing_server_inside_a_tool_is_no_tool_error():
    """Base_Generator_Tool asks the frozen model: where its server is down, nothing was answered."""
    from tools import execute, make_tools

    (tool,) = make_tools(["Base_Generator_Tool"])
    running = execute(tool, {"query": "why?"})
    assert isinstance(next(running), Ask)
    with pytest.raises(ServerDown):
        running.throw(ServerDown("gone"))


@pytest.mark.parametrize("flag", ["--frozen_url", "--judge"])
def test_a_server_that_is_gone_ends_the_run_and_a_new_address_goes_on(
    tmp_path, few_questions, chat, capsys, flag, monkeypatch  # noqa: F811
):
    """It dies behind step 1: step 2 is not taken, step 1 is saved, and --resume finds it again at
    another address."""
    modules = builtin_modules()
    chat.say = modules if flag == "--frozen_url" else lambda body: "Verdict: CORRECT"
    right = train.train_step

    def dies_behind_step_1(t, step):
        if step == 2 and not monkeypatch_done:
            monkeypatch_done.append(1)
            chat.say = lambda body: None
        return right(t, step)

    monkeypatch_done = []
    monkeypatch.setattr(train, "train_step", dies_behind_step_1)
    folder = tmp_path / "run"
    assert run(*SMALL, "--max_steps", 2, "--eval_data", few_questions, flag, chat.url,
               "--output_dir", folder) == 2  # fmt: skip
    errors = capsys.readouterr().err
    assert "Step 2 is not taken" in errors and "--resume" in errors and "Traceback" not in errors
    assert [row["step"] for row in read(folder / "metrics.jsonl")] == [1]
    assert (folder / "checkpoint-1").is_dir()
    chat.say = modules if flag == "--frozen_url" else lambda body: "Verdict: CORRECT"
    moved = chat.url.replace("127.0.0.1", "localhost")
    assert run("--resume", "--output_dir", folder, flag, moved) == 0
    assert [row["step"] for row in read(folder / "metrics.jsonl")] == [1, 2]


def test_a_judge_scores_in_training_and_in_the_measurement(tmp_path, few_questions, chat):  # noqa: F811
    """It says CORRECT to everything, where the rule would not."""
    chat.say = lambda body: "Verdict: CORRECT"
    folder = tmp_path / "run"
    assert run(*SMALL, "--eval_data", few_questions, "--judge", chat.url,
               "--output_dir", folder) == 0  # fmt: skip
    assert {line["reward"] for line in read(folder / "rollouts" / "1.jsonl")} == {1.0}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy_before"] == summary["accuracy_after"] == 1.0


def test_a_verdict_that_cannot_be_read_is_no_reward(tmp_path, few_questions, chat):  # noqa: F811
    said = iter(["Verdict: CORRECT", "I cannot say.", "Verdict: INCORRECT", "Verdict: CORRECT"])
    chat.say = lambda body: next(said, "Verdict: CORRECT")
    folder = tmp_path / "run"
    assert run("--max_steps", 1, "--num_questions", 1, "--num_generations", 4, "--max_turns", 1,
               "--eval_questions", 1, "--eval_data", few_questions, "--eval_temperature", 0,
               "--judge", chat.url, "--output_dir", folder) == 0  # fmt: skip
    (row,) = read(folder / "metrics.jsonl")
    rewards = [line["reward"] for line in read(folder / "rollouts" / "1.jsonl")]
    assert rewards.count(None) == row["rollouts/failed"] == 1


def test_a_judge_that_never_says_anything_ends_the_run(tmp_path, few_questions, chat, capsys):  # noqa: F811
    chat.say = lambda body: "I cannot say."
    assert run(*SMALL, "--eval_data", few_questions, "--judge", chat.url,
               "--output_dir", tmp_path / "run") == 2  # fmt: skip
    assert "no verdict of the judge can be read" in capsys.readouterr().err


def test_a_reply_far_over_its_limit_is_cut(server):
    server.answers["/v1/models"] = lambda state: (200, {}, b'{"data": [{"id": "base"}]}')
    choice = {"message": {"content": "x" * 1_000_000}, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice]}).encode()
    server.answers["/v1/chat/completions"] = lambda state: (200, {}, body)
    remote = agentflow.RemoteBackbone(f"{server.base}/v1")
    reply = remote.reply(Request(Ask("verifier", "system", "user"), 0.0, 8, (0,)))
    assert len(reply.text) == 256 and not reply.finished


def test_a_prompt_that_the_server_refuses_costs_its_roll_out(tmp_path, few_questions, chat):  # noqa: F811
    """HTTP 400 to one generator's prompt: that roll-out failed, the run goes on."""
    chat.say, refused = builtin_modules(), []
    remote = agentflow.RemoteBackbone(chat.url)
    right, turn = remote._call, threading.Lock()

    def refuses_once(path, body=None):
        with turn:
            if body and "<answer>" in texts(body)[0] and not refused:
                refused.append(body)
                raise agentflow.Refused("too long")
            return right(path, body)

    remote._call = refuses_once
    backbone = agentflow.ServedBackbone(agentflow.load_backbone("builtin", "cpu"), remote)
    tools, question = agentflow.make_tools(offline=True), "What is 6 plus 5?"
    sampling = agentflow.Sampling(1.0, 96, 96)
    rollouts = agentflow.roll_out(
        [question], 3, backbone, tools, agentflow.Limits(2), sampling, seed=0, step=1
    )
    assert [rollout.failed for rollout in rollouts].count("too long") == 1
    assert sum(bool(rollout.turns) for rollout in rollouts) == 2


def test_half_a_character_and_endless_brackets_are_no_crash(server):
    server.answers["/v1/models"] = lambda state: (200, {}, b'{"data": [{"id": "base"}]}')
    remote = agentflow.RemoteBackbone(f"{server.base}/v1")
    request = Request(Ask("verifier", "system", "user"), 0.0, 8, (0,))
    body = b'{"choices": [{"message": {"content": "a\\ud800b"}, "finish_reason": "stop"}]}'
    server.answers["/v1/chat/completions"] = lambda state: (200, {}, body)
    assert remote.reply(request).text == "a?b"
    server.answers["/v1/chat/completions"] = lambda state: (200, {}, b"[" * 200_000)
    with pytest.raises(ServerDown):
        remote.reply(request)


def test_a_judge_may_not_come_or_go_on_resume(tmp_path, few_questions, chat, capsys):  # noqa: F811
    folder = tmp_path / "run"
    chat.say = lambda body: "Verdict: CORRECT"
    assert run(*SMALL, "--max_steps", 0, "--eval_data", few_questions, "--output_dir", folder) == 0
    assert run("--resume", "--output_dir", folder, "--judge", chat.url) == 2
    assert "judge" in capsys.readouterr().err
