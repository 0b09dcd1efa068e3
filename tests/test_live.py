"""The flow told live, and the analyses in miniature."""

import io
import json
import math
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import agentflow
import train
from agentflow import Limits, Sampling, ScriptedBackbone
from tools import make_tools

ROOT = Path(__file__).resolve().parent.parent
PLAN = "Context: none\nSub-Goal: {}\nTool Name: Python_Coder_Tool"
CALL = 'execution = tool.execute(query="{}")'


def tell_two_turns(tool_text="```python\nprint(6*7)\n```"):
    """(what was told, the roll-out) of a scripted flow of two turns."""
    backbone = ScriptedBackbone({
        "analyst": ["an analysis"],
        "planner": [PLAN.format("first"), PLAN.format("second")],
        "executor": [CALL.format("one"), CALL.format("two")],
        "tool": [tool_text, tool_text],
        "verifier": ["Conclusion: CONTINUE", "Conclusion: STOP"],
        "generator": ["<answer> 42 </answer>"],
    })  # fmt: skip
    told = []
    flow = agentflow.answer_question("q?", make_tools(["Python_Coder_Tool"], True), Limits())
    (rollout,) = agentflow.drive(
        [agentflow.narrate(flow, lambda module, text: told.append((module, text)))],
        [(0,)], backbone, Sampling(),
    )  # fmt: skip
    return told, rollout


def test_the_flow_is_told_as_it_goes_and_is_the_same_flow():
    told, rollout = tell_two_turns()
    turn = ["planner", "executor", "tool", "memory", "verifier"]
    assert [module for module, _ in told] == ["analyst", *turn, *turn, "generator"]
    memories = [text for module, text in told if module == "memory"]
    # each is the new step alone: together, with the verdicts, they are the whole memory
    whole = f"{memories[0]}\nVerdict: CONTINUE\n{memories[1]}\nVerdict: STOP"
    assert whole == rollout.memory
    assert "Result: 42" in memories[0] and "Step 1" not in memories[1]


def test_a_reader_that_has_read_enough_is_no_error():
    process = subprocess.Popen([sys.executable, str(ROOT / "agentflow.py")], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline().startswith("Question: ")
    process.stdout.close()  # as `... | head -1` does
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), said) == (141, "")


def test_a_questions_control_signs_are_told_as_signs_and_quotes_are_asked_for(capsys):
    assert agentflow.main(["say \x1b[2J", "--max_turns", "1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Question: say \\x1b[2J\n") and "\x1b" not in said
    with pytest.raises(SystemExit):
        agentflow.main(["a", "b"])
    assert "A question of several words stands in quotes." in capsys.readouterr().err


def test_an_error_reaches_the_coroutine_that_is_told():
    def asks():
        try:
            yield agentflow.analyst_ask("q?", [])
        except ValueError as error:
            return f"caught {error}"

    told = agentflow.narrate(asks(), lambda *_: None)
    next(told)
    with pytest.raises(StopIteration) as end:
        told.throw(ValueError("too long"))
    assert end.value.value == "caught too long"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_colours_are_for_terminals_and_a_page_cannot_move_the_cursor(kind, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = kind()
    agentflow.teller(stream)("planner", "a\x1b[2Jb\rc\nd é")
    shown = stream.getvalue()
    assert "a\\x1b[2Jb\\rc\nd é" in shown
    assert ("\x1b[" in shown) == (kind is Terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    stream = kind()
    agentflow.teller(stream)("planner", "a")
    assert "\x1b" not in stream.getvalue()


# ------------------------------------------------------------------------------------- --analyses


def test_an_interval_over_seeds_is_student_s():
    # two degrees of freedom: the 97.5 % quantile is 4.3027 (any table of the t distribution)
    values = [0.2, 0.5, 0.8]
    middle, half = train.mean_and_half(values)
    assert middle == pytest.approx(0.5)
    assert half == pytest.approx(4.303 * statistics.stdev(values) / math.sqrt(3))
    assert train.mean_and_half([0.4]) == (0.4, None)


def test_arms_differ_in_one_thing_each_and_make_equal_roll_outs():
    config = train.Config(output_dir="x", seed=5, analyses=True)
    arms = train.arms_of(config)
    assert len({arm.output_dir for arm in arms.values()}) == len(arms)
    for arm in arms.values():
        assert arm.num_questions * arm.num_generations == 64
        assert not arm.analyses and arm.seed == 5
    assert [arms[name].num_generations for name in ("Flow-GRPO", "G 2", "G 4")] == [8, 2, 4]
    assert [arms[name].beta for name in ("Flow-GRPO", "beta 0", "beta 1")] == [0.001, 0.0, 1.0]


@pytest.fixture(scope="module")
def analysed(tmp_path_factory):
    """--analyses in small, stopped once in the middle and started again."""
    folder = tmp_path_factory.mktemp("analyses")
    flags = ["--analyses", "--output_dir", str(folder), "--device", "cpu", "--max_steps", "1",
             "--num_questions", "2", "--num_generations", "4", "--eval_questions", "4"]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "ANALYSES_SEEDS", 2)
        patch.setattr(train, "TURN_BUDGETS", (1, 3))
        whole, arms = train.run_arm, []

        def stops_at_the_third(name, config, device):
            arms.append(name)
            if len(arms) == 3:
                raise KeyboardInterrupt
            whole(name, config, device)

        patch.setattr(train, "run_arm", stops_at_the_third)
        assert train.main(flags) == 130
        times = {path: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}
        patch.setattr(train, "run_arm", whole)
        assert train.main(flags) == 0
    return folder, times


@pytest.mark.slow
def test_the_analyses_go_on_where_they_stopped_and_report_what_was_measured(analysed):
    folder, times = analysed
    assert len(times) == 2  # two arms were finished, and are not run again
    assert all(path.stat().st_mtime_ns == before for path, before in times.items())
    report = (folder / "analyses.md").read_text(encoding="utf-8")
    found = json.loads((folder / "analyses.json").read_text(encoding="utf-8"))
    assert list(found) == ["0", "1"] and len(found["0"]) == 6
    # the first table again, from the files of the runs
    for name, file in (("frozen", "eval_before"), ("Flow-GRPO", "eval_after")):
        shares = []
        for seed in (0, 1):
            lines = (folder / f"seed{seed}-flow_grpo/{file}.jsonl").read_text().splitlines()
            shares.append(100 * statistics.mean(json.loads(line)["score"] for line in lines))
        half = 12.706 * statistics.stdev(shares) / math.sqrt(2)
        assert f"| {name} | {statistics.mean(shares):.1f} ± {half:.1f} |" in report
    one_turn = (folder / "seed0-flow_grpo/turns_after_1.jsonl").read_text().splitlines()
    assert all(len(json.loads(line)["tools"]) == 1 for line in one_turn)


@pytest.mark.slow
def test_arms_of_other_flags_and_damaged_arms_are_refused(analysed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "ANALYSES_SEEDS", 2)
    monkeypatch.setattr(train, "TURN_BUDGETS", (1, 3))
    folder = tmp_path / "copy"
    shutil.copytree(analysed[0], folder)
    flags = ["--analyses", "--output_dir", str(folder), "--device", "cpu", "--max_steps", "1",
             "--num_questions", "2", "--num_generations", "4", "--eval_questions", "4"]  # fmt: skip

    def refused(*more):
        capsys.readouterr()
        assert train.main([*flags, *more]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("error: ") and said.err.count("\n") == 1
        return said.err

    assert train.main(flags) == 0  # as they are, they are taken
    for more, words in (
        (("--learning_rate", "0.5"), "learning_rate = 0.001, now it is 0.5"),
        (("--max_steps", "2"), "max_steps = 1, now it is 2"),
        (("--eval_questions", "3"), "eval_questions = 4"), (("--max_steps", "0"), "--max_steps"),
    ):
        assert words in refused(*more)
    arm = folder / "seed1-g_2"
    shutil.rmtree(folder / "seed1-beta_1")  # would be made with the other rate
    assert "learning_rate" in refused("--learning_rate", "0.5")
    assert not (folder / "seed1-beta_1").exists()
    for name, text in (("metrics.jsonl", ""), ("metrics.jsonl", '{"step": 1, "rew'),
                       ("eval_after.jsonl", ""), ("eval_after.jsonl", None),
                       ("run_config.json", "{")):
        before = (arm / name).read_text(encoding="utf-8")
        (arm / name).unlink() if text is None else (arm / name).write_text(text)
        said = refused()
        assert str(arm) in said and "the same command makes it again" in said
        (arm / name).write_text(before, encoding="utf-8")
    assert train.main(flags) == 0


def test_imitation_is_a_step_on_the_weighted_log_likelihood(tmp_path, monkeypatch):
    """Against the same sum by Hugging Face's forward and log_softmax, differentiated by autograd.
    """
    config = train.Config(model="config:tiny", device="cpu", lora_r=4, num_questions=1,
                          num_generations=2, output_dir=str(tmp_path / "run"))  # fmt: skip
    backbone = agentflow.load_backbone("config:tiny", "cpu", lora_r=4)
    for layer in backbone.lora.values():  # an untrained B is 0, and A's gradient with it
        torch.nn.init.normal_(layer.B, std=0.02, generator=torch.Generator().manual_seed(1))
    prompts, replies = [[5, 6, 7], [5, 6, 9], [8, 3]], [[11, 12], [13], [14, 15, 16]]

    def reply(i):
        return agentflow.Reply("", prompts[i], replies[i], [0.0] * len(replies[i]), True)

    def rollout(*turns):
        made = [agentflow.Turn(reply(i), None, None, None, None, None, True) for i in turns]
        return agentflow.Rollout("", None, made, "", [], None, 0)

    seen = {}

    class Optimizer:
        def zero_grad(self, set_to_none):
            backbone.model.zero_grad()

        def step(self):
            parts = {path: (lora.A.grad.clone(), lora.B.grad.clone())
                     for path, lora in backbone.lora.items()}  # fmt: skip
            seen.update(parts)

    monkeypatch.setattr(train, "MAX_GRAD_NORM", 1e9)
    training = train.Training(config, None, [], [], [], None, backbone, Optimizer(), train.ALONE,
                              None)  # fmt: skip
    train.imitate(training, [rollout(0, 1), rollout(2)], step=1)
    # 2 roll-outs; the first has 2 turns: weights 1 / (2 * T_i * |a|) a token
    weights = [1 / (2 * 2 * 2), 1 / (2 * 2 * 1), 1 / (2 * 1 * 3)]
    backbone.model.zero_grad()
    loss = 0.0
    for prompt, answer, weight in zip(prompts, replies, weights, strict=True):
        backbone.gate.value = torch.ones(1, 1, 1)
        ids = torch.tensor([prompt + answer])
        context = agentflow.TrieAttention(agentflow.build_trie([prompt + answer])[0], "cpu",
                                          torch.float32)  # fmt: skip
        logits = backbone.model(ids, use_cache=False, context=context).logits[0]
        backbone.gate.value = None
        logp = logits.log_softmax(-1)
        for j, token in enumerate(answer):
            loss = loss - weight * logp[len(prompt) + j - 1, token]
    loss.backward()
    for path, lora in backbone.lora.items():
        torch.testing.assert_close(seen[path][0], lora.A.grad, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(seen[path][1], lora.B.grad, rtol=1e-4, atol=1e-7)
    assert any(grad.abs().max() > 0 for grad, _ in seen.values())


def test_torchrun_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main(["--analyses", "--device", "cpu"]) == 2
    assert "without torchrun" in capsys.readouterr().err
