"""train.py and eval.py as their users run them: the run folder, resume, bad input, the update."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import agentflow
import eval as evaluation
import train
from agentflow import Reply
from tools import Ask, make_tools

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
SMALL = ["--num_questions", "2", "--num_generations", "4", "--save_steps", "1"]


@pytest.fixture(scope="module")
def few_questions(tmp_path_factory):
    """Twelve held-out questions in a file: an evaluation of two seconds."""
    path = tmp_path_factory.mktemp("data") / "few.jsonl"
    lines = (DATA / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:12]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Where no --output_dir is given, results/<date-time> lands here."""
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    """main() of train.py in this process; returns its exit code."""
    return train.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, few_questions):
    """Three deterministic steps of a small run, never stopped."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    assert run("--max_steps", 3, "--deterministic", "--eval_data", few_questions, *SMALL,
               "--output_dir", folder) == 0
    return folder


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


# --- The run folder ----------------------------------------------------------------------------


def test_a_run_writes_what_the_conventions_say(finished_run):
    names = {path.name for path in finished_run.iterdir()}
    assert {
        "run_config.json", "metrics.jsonl", "rollouts", "summary.json", "eval_before.jsonl",
        "eval_after.jsonl", "adapter_config.json", "adapter_model.safetensors", "checkpoint-3",
    } <= names
    assert {path.name for path in (finished_run / "checkpoint-3").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "rng_state.pth",
        "trainer_state.json",
    }
    summary = json.loads((finished_run / "summary.json").read_text())
    assert {
        "accuracy_before", "accuracy_after", "tool_errors_before", "tool_errors_after", "seconds",
        "seed",
    } <= set(summary)
    config = json.loads((finished_run / "run_config.json").read_text())
    assert config["max_steps"] == 3 and config["versions"]["torch"] == torch.__version__
    items = read(finished_run / "eval_after.jsonl")
    assert len(items) == 12
    assert {"id", "question", "reference", "answer", "score"} <= set(items[0])
    assert sum(item["score"] for item in items) / 12 == summary["accuracy_after"]


def test_metrics_are_a_flat_line_a_step_under_trls_names_and_without_nan(finished_run):
    rows = read(finished_run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    text = (finished_run / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    for row in rows:
        assert all(isinstance(name, str) for name in row.pop("alarms"))
        assert all(not isinstance(value, (dict, list)) for value in row.values())
        assert {
            "reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "loss", "grad_norm",
            "learning_rate", "clip_ratio/region_mean", "clip_ratio/low_mean",
            "clip_ratio/high_mean", "completions/mean_length", "completions/max_length",
            "completions/clipped_ratio", "num_tokens", "step_time", "tools/call_frequency",
            "tools/failure_frequency", "sampling/sampling_logp_difference/mean",
            "sampling/sampling_logp_difference/max", "turns/mean", "verifier/stop_rate",
            "memory/tokens", "rollouts/failed", "rollouts/unique_tool_sequences",
            "adapter/delta_norm", "time/rollout", "time/tools", "time/score", "time/train",
        } <= set(row)
    assert rows[-1]["adapter/delta_norm"] > 0, "the adapter moves away from zero"


def test_every_roll_out_stands_in_its_steps_file_with_ids_and_log_probs(finished_run):
    rows = read(finished_run / "rollouts" / "2.jsonl")
    assert [(row["group"], row["rollout"]) for row in rows] == [
        (group, number) for group in range(2) for number in range(4)
    ]
    for row in rows:
        assert row["prompt"] == row["question"] and row["completion"] == row["answer"]
        assert row["reward"] in (0.0, 1.0) and row["turns"]
        for turn in row["turns"]:
            planner = turn["planner"]
            assert len(planner["reply_ids"]) == len(planner["logp"]) > 0
            assert len(planner["logp_ref"]) == len(planner["entropy"]) == len(planner["logp"])
            assert {"name", "arguments", "output", "error", "seconds"} == set(turn["tool"])
            assert isinstance(turn["verifier"]["stop"], bool)
        assert row["memory"].count("Step ") >= len(row["turns"])


def test_the_sampler_and_the_scorer_agree_at_the_first_update(finished_run):
    """On-policy: the log-probs of sampling and of scoring differ by rounding only (ratio 1).

    The largest of thousands of tokens is that of an unlikely one, whose rounding is the largest; a
    wrong temperature, mask or adapter differs by 0.01 and more on the mean."""
    for row in read(finished_run / "metrics.jsonl"):
        assert row["sampling/sampling_logp_difference/mean"] < 2e-6
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["clip_ratio/region_mean"] == 0.0


def test_peft_loads_the_adapter(finished_run):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(agentflow.BUILTIN)
    ids = torch.tensor([[1, 300, 301, 302, 303]])
    bare = base(ids).logits
    theirs = peft.PeftModel.from_pretrained(base, finished_run)(ids).logits
    ours = agentflow.load_backbone("builtin", "cpu")
    ours.load_adapter(finished_run)
    hidden = ours.packed_hidden([[1, 300, 301, 302]], [[303, 0]], 1)
    assert (theirs - bare).abs().max() > 1e-4, "the adapter does something"
    torch.testing.assert_close(hidden @ ours.lm_head_weight.T, theirs[0, 3:], rtol=0, atol=1e-5)


def test_eval_says_nothing_of_other_questions_after_a_run_on_the_first_few(
        tmp_path, few_questions, capsys):
    folder = tmp_path / "run"
    assert run("--max_steps", 0, "--eval_data", few_questions, "--eval_questions", 2, *SMALL,
               "--output_dir", folder) == 0
    assert evaluation.main(["--adapter", str(folder)]) == 0
    said = capsys.readouterr()
    assert "other questions" not in said.err and "2 questions" in said.out
    assert run("--resume", "--output_dir", folder, "--eval_questions", 3) == 2
    assert "eval_questions = 2" in capsys.readouterr().err, "the flag is named, and no hash"


def test_eval_with_the_runs_adapter_gives_the_accuracy_after_again(finished_run, few_questions,
                                                                   tmp_path):
    path = tmp_path / "result.json"
    assert evaluation.main(["--adapter", str(finished_run), "--data", few_questions,
                            "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    summary = json.loads((finished_run / "summary.json").read_text())
    assert result["accuracy"] == summary["accuracy_after"]
    assert result["tool_errors"] == summary["tool_errors_after"]


def test_learning_rate_0_leaves_the_planner_where_it_was(tmp_path, few_questions):
    folder = tmp_path / "still"
    assert run("--max_steps", 2, "--learning_rate", 0, "--eval_data", few_questions, *SMALL,
               "--output_dir", folder) == 0
    assert read(folder / "eval_before.jsonl") == read(folder / "eval_after.jsonl")


# --- Stop and go on ----------------------------------------------------------------------------


def test_resume_equals_never_stopped_bit_for_bit(finished_run, few_questions, tmp_path):
    folder = tmp_path / "stopped"
    common = ["--deterministic", "--eval_data", few_questions, *SMALL, "--output_dir", folder]
    assert run("--max_steps", 2, *common) == 0
    assert run("--max_steps", 3, *common, "--resume") == 0
    for name in ("adapter_model.safetensors", "eval_after.jsonl", "rollouts/1.jsonl"):
        if name.startswith("rollouts"):
            continue
        assert (folder / name).read_bytes() == (finished_run / name).read_bytes(), name

    def without_time(rows):
        return [
            {k: v for k, v in row.items() if "time" not in k} for row in rows
        ]

    assert without_time(read(folder / "metrics.jsonl")) == without_time(
        read(finished_run / "metrics.jsonl")
    )
    whole, stopped = (
        [[turn["planner"] for turn in row["turns"]] for row in read(f / "rollouts" / "3.jsonl")]
        for f in (finished_run, folder)
    )
    assert whole == stopped


@pytest.mark.slow
def test_a_stop_while_a_step_is_measured_loses_no_number(tmp_path, few_questions, monkeypatch):
    flags = ["--max_steps", 2, "--deterministic", "--eval_steps", 1, "--eval_data", few_questions,
             *SMALL]  # fmt: skip
    assert run(*flags, "--output_dir", tmp_path / "whole") == 0
    calls, right = [], train.measure

    def stops_at_the_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return right(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train, "measure", stops_at_the_second)
        assert run(*flags, "--output_dir", tmp_path / "stopped") == 130
    assert run("--resume", "--output_dir", tmp_path / "stopped") == 0
    names = ("step", "reward", "loss", "eval/accuracy")
    whole, stopped = (
        [[row.get(name) for name in names] for row in read(tmp_path / folder / "metrics.jsonl")]
        for folder in ("whole", "stopped")
    )
    assert stopped == whole and whole[0][-1] is not None


def test_a_resumed_run_takes_its_flags_from_its_start(tmp_path, few_questions):
    folder = tmp_path / "run"
    assert run("--max_steps", 1, "--learning_rate", 0.01, "--eval_data", few_questions, *SMALL,
               "--output_dir", folder) == 0
    assert run("--resume", "--output_dir", folder, "--max_steps", 2) == 0
    config = json.loads((folder / "run_config.json").read_text())
    assert (config["learning_rate"], config["num_generations"], config["max_steps"]) == (0.01, 4, 2)
    assert [line["step"] for line in read(folder / "metrics.jsonl")] == [1, 2]


def test_ctrl_c_saves_what_there_is_and_exits_130_and_resume_goes_on(tmp_path, few_questions):
    folder = tmp_path / "interrupted"
    command = [
        sys.executable, "train.py", "--max_steps", "50", "--eval_data", few_questions,
        "--num_questions", "2", "--num_generations", "4", "--output_dir", str(folder),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a shell's background jobs ignore Ctrl-C, and so would their children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.time() + 120
    while not (folder / "metrics.jsonl").exists() and time.time() < deadline:
        time.sleep(0.1)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and "--resume" in errors
    done = len(read(folder / "metrics.jsonl"))
    assert (folder / f"checkpoint-{done}").is_dir()
    assert not list(folder.glob("*.tmp"))
    assert run("--max_steps", done + 1, "--eval_data", few_questions, "--num_questions", 2,
               "--num_generations", 4, "--output_dir", folder, "--resume") == 0
    assert [row["step"] for row in read(folder / "metrics.jsonl")] == list(range(1, done + 2))


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # Python raises between two instructions, a moment later


@pytest.mark.parametrize("last", [True, False])
def test_an_impatient_ctrl_c_while_saving_loses_nothing(tmp_path, few_questions, monkeypatch, last):
    """Pressed in the middle of the last save, or (not last) of the save after a first Ctrl-C."""
    folder, save_adapter = tmp_path / "run", agentflow.Backbone.save_adapter

    def pressed(self, place):
        press_ctrl_c()
        save_adapter(self, place)

    monkeypatch.setattr(agentflow.Backbone, "save_adapter", pressed)
    if not last:
        monkeypatch.setattr(train.Run, "log", lambda self, row: press_ctrl_c())
    assert run("--max_steps", 1 if last else 5, "--eval_data", few_questions, "--num_questions", 2,
               "--num_generations", 2, "--output_dir", folder) == 130
    assert (folder / "checkpoint-1" / "trainer_state.json").is_file()
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("name", ["optimizer.pt", "trainer_state.json", "rng_state.pth"])
def test_a_damaged_checkpoint_is_named(finished_run, few_questions, tmp_path, capsys, name):
    folder = tmp_path / "damaged"
    shutil.copytree(finished_run, folder)
    content = (folder / "checkpoint-3" / name).read_bytes()
    (folder / "checkpoint-3" / name).write_bytes(content[: len(content) // 2])
    assert run("--max_steps", 4, "--deterministic", "--eval_data", few_questions, *SMALL,
               "--output_dir", folder, "--resume") == 2
    assert "checkpoint-3 is damaged" in capsys.readouterr().err


def test_two_runs_cannot_write_into_one_folder(tmp_path):
    questions = evaluation.load_questions(DATA / "heldout.jsonl")
    config = train.Config(output_dir=str(tmp_path / "run"))
    first = train.Run(config, questions, questions)
    with pytest.raises(ValueError, match="in use"):
        train.Run(dataclasses.replace(config, resume=True), questions, questions)
    first.lock.close()
    train.Run(dataclasses.replace(config, resume=True), questions, questions).lock.close()


def test_held_out_questions_that_changed_are_noticed(tmp_path, few_questions, capsys):
    mine, folder = tmp_path / "mine.jsonl", tmp_path / "run"
    shutil.copy(few_questions, mine)
    common = ["--eval_data", mine, "--num_questions", 2, "--num_generations", 2,
              "--output_dir", folder]
    assert run("--max_steps", 0, *common) == 0
    lines = mine.read_text(encoding="utf-8").splitlines()
    mine.write_text("\n".join(lines[:6]) + "\n", encoding="utf-8")
    assert run("--max_steps", 1, *common, "--resume") == 2
    assert "eval_hash" in capsys.readouterr().err
    assert evaluation.main(["--adapter", str(folder)]) == 0
    assert "other questions" in capsys.readouterr().err


def test_weights_that_ran_away_are_said_to_have(capsys, tmp_path, few_questions):
    assert run("--max_steps", 2, "--learning_rate", 1e18, "--eval_data", few_questions, *SMALL,
               "--output_dir", tmp_path / "run") == 2
    errors = capsys.readouterr().err
    assert "no numbers" in errors or "gradient is" in errors


@pytest.mark.parametrize("damage", ["no tokenizer", "a layer too few", "half the weights"])
def test_a_damaged_model_folder_is_refused(tmp_path, capsys, damage):
    folder = tmp_path / "model"
    shutil.copytree(agentflow.BUILTIN, folder)
    weights = folder / "model.safetensors"
    if damage == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif damage == "a layer too few":
        config = json.loads((folder / "config.json").read_text())
        config["num_hidden_layers"] += 1
        config.pop("layer_types", None)
        (folder / "config.json").write_text(json.dumps(config))
    else:
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert run("--model", folder, "--offline") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_resume_folder_of_another_configuration_is_refused(finished_run, few_questions, capsys):
    assert run("--max_steps", 4, "--deterministic", "--eval_data", few_questions, *SMALL,
               "--output_dir", finished_run, "--resume", "--learning_rate", 0.5) == 2
    assert "learning_rate" in capsys.readouterr().err


def test_a_folder_that_holds_a_run_is_not_overwritten(finished_run, few_questions, capsys):
    assert run("--eval_data", few_questions, "--output_dir", finished_run) == 2
    assert "--resume" in capsys.readouterr().err


# --- Bad input: a sentence, exit code 2, no traceback ------------------------------------------


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--num_generations", "1"], "at least 2"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--data", "/no/such/file.jsonl"], "/no/such/file.jsonl"),
        (["--tools", "Calculator_Tool"], "Python_Coder_Tool"),
        (["--max_turns", "0"], "--max_turns"),
        (["--temperature", "0"], "--temperature"),
        (["--resume"], "--output_dir"),
        (["--resume", "--output_dir", "/no/such/run"], "/no/such/run"),
        (["--device", "quantum"], "quantum"),
        (["--device", "mps" if torch.cuda.is_available() else "cuda"], "--device cpu"),
        (["--learning_rate", "nan"], "--learning_rate"),
        (["--learning_rate", "inf"], "--learning_rate"),
        (["--lora_alpha", "0"], "--lora_alpha"),
        (["--seed", "9" * 30], "--seed"),
        (["--max_prompt_length", "60"], "--max_prompt_length"),
        (["--output_dir", str(ROOT / "README.md")], "README.md"),
    ],
)
def test_a_mistake_gets_a_sentence_that_says_what_to_do(arguments, says, capsys):
    assert run(*arguments) == 2
    errors = capsys.readouterr().err
    assert says in errors and "Traceback" not in errors and errors.count("\n") <= 3


def test_an_unknown_flag_names_the_nearest_one(capsys):
    with pytest.raises(SystemExit) as stop:
        run("--num_generation", 4)
    assert stop.value.code == 2
    assert "--num_generations" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "content, says",
    [
        ('{"question": "q", "answer": "a"}\n{"question": ', "line 2"),
        ('{"question": "q", "answer": "a"}\n{"question": "r"}\n', "line 2"),
        ('{"answer": "a"}', "line 1"),
        ('{"id": 1, "question": "q", "answer": "a"}\n{"id": 1, "question": "r", "answer": "b"}',
         "same id"),
        ("", "no question"),
        ('{"question": "q", "answer": "a"}\n{"question": "\\ud800", "answer": "a"}', "line 2"),
        ('{"question": "q", "answer": NaN}', "line 1"),
        ('{"question": "q", "answer": ["a", ["b"]]}', "line 1"),
        ("[" * 200_000, "too deeply"),
    ],
)
def test_a_malformed_question_file_names_the_line(content, says, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="utf-8")
    assert run("--data", path) == 2
    assert says in capsys.readouterr().err


def test_an_adapter_of_another_shape_is_a_sentence(finished_run, capsys):
    assert evaluation.main(["--adapter", str(finished_run), "--lora_r", "4"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error:") and "4" in errors


def test_help_shows_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as stop:
        run("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--learning_rate" in text and "0.001" in text and "KL" in text


# --- Question files ----------------------------------------------------------------------------


def test_question_files_may_be_json_or_jsonl_gzipped_or_not_under_many_names(tmp_path):
    import gzip

    rows = [{"pid": "7", "query": "q1", "golden_answers": ["a", "b", "a"]},
            {"pid": 8, "query": "q2", "answer": 33}]
    as_lines = "\n".join(map(json.dumps, rows)).encode()
    variants = {
        "a.jsonl": as_lines,
        "b.jsonl.gz": gzip.compress(as_lines),
        "c.gz": as_lines,  # not gzipped, whatever its name says
        "d.jsonl": gzip.compress(as_lines),
        "e.json": json.dumps(rows).encode(),
        "f.jsonl": b"\xef\xbb\xbf" + as_lines,  # a byte order mark
        "g.jsonl": as_lines.replace(b"\n", b"\r\n"),
    }
    for name, content in variants.items():
        (tmp_path / name).write_bytes(content)
        one, two = evaluation.load_questions(tmp_path / name)
        assert (one.id, one.text, one.references) == ("7", "q1", ["a", "b"]), name
        assert (two.id, two.references) == ("8", ["33"])


def test_a_tenth_is_held_out_by_a_hash_of_the_id_and_stays_held_out():
    questions = [evaluation.Question(f"id-{i}", "q", ["a"]) for i in range(2000)]
    train_part, held_out = evaluation.split_questions(questions)
    assert 150 < len(held_out) < 250 and len(train_part) + len(held_out) == 2000
    moved = [evaluation.Question("new", "q", ["a"]), *reversed(questions)]
    assert {q.id for q in evaluation.split_questions(moved)[1]} - {"new"} == {
        q.id for q in held_out
    }


def test_the_reward_compares_numbers_as_numbers_and_text_as_text():
    number, text = evaluation.Question("1", "q", ["12"]), evaluation.Question("2", "q", ["He"])
    assert number.reward("<answer> 12.0 </answer>") == 1.0
    assert number.reward("<answer> 2 </answer>") == 0.0
    assert number.reward("") == number.reward(None) == number.reward("<answer></answer>") == 0.0
    assert text.reward("<answer> he </answer>") == 1.0
    assert text.reward("<answer> The </answer>") == 0.0


# --- The update --------------------------------------------------------------------------------


def planner_reply(prompt, response, logp=None, finished=True):
    return Reply("text", prompt, response, logp or [-0.5] * len(response), finished)


class Stub:
    """As much of a roll-out as make_rows looks at."""

    def __init__(self, replies):
        self.turns = [type("T", (), {"planner": reply})() for reply in replies]


def test_rows_carry_the_advantage_of_their_roll_out_and_the_weight_of_eq_5():
    """Two roll-outs of one question, right with 1 turn of 2 tokens and wrong with 2 turns of 1 and
    4 tokens: A = ±1/√2 (ddof 1), weights 1/(1·2·1·2), 1/(1·2·2·1), 1/(1·2·2·4)."""
    rollouts = [
        Stub([planner_reply([5, 6], [7, 2])]),
        Stub([planner_reply([5, 6], [2]), planner_reply([5, 6, 8], [7, 7, 7, 2])]),
    ]
    rows, advantages = train.make_rows(
        rollouts, torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    )
    torch.testing.assert_close(advantages, torch.tensor([0.5, -0.5]) * 2**0.5, rtol=1e-5, atol=0)
    assert [row.weight for row in rows] == [0.25, 0.25, 0.0625]
    assert rows[1].advantage == rows[2].advantage == advantages[1].item()
    assert [row.response_ids for row in rows] == [[7, 2], [2], [7, 7, 7, 2]]


def test_a_roll_out_that_nobody_could_judge_leaves_its_group_in_eq_5_too():
    """Three roll-outs of one turn, rewards 1, 0 and none: two are left, 1 / (1 * 2 * 1 * |a|) each,
    and the update is theirs, down to the KL term of beta 0.5."""
    rollouts = [Stub([planner_reply([5, 6], [7] * n)]) for n in (2, 4, 3)]
    group_ids = torch.tensor([0, 0, 0])
    rows, advantages = train.make_rows(rollouts, torch.tensor([1.0, 0.0, torch.nan]), group_ids)
    assert [row.weight for row in rows] == [0.25, 0.125, 0.0]
    two, expected = train.make_rows(rollouts[:2], torch.tensor([1.0, 0.0]), group_ids[:2])
    assert advantages.tolist() == [*expected.tolist(), 0.0]
    gradients = []
    for given in (rows, two):
        backbone = agentflow.load_backbone("config:tiny", "cpu", lora_r=4)
        for lora in backbone.lora.values():
            torch.nn.init.normal_(lora.B, std=0.02, generator=torch.Generator().manual_seed(1))
        config = train.Config(learning_rate=0.0, beta=0.5)
        optimizer = train.new_optimizer(backbone.trainable_parameters(), config)
        train.update(backbone, optimizer, given, config)
        gradients.append([p.grad for p in backbone.trainable_parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other) and one.abs().max() > 0


def fresh_rows():
    """A backbone whose planner is not at its start, and rows of twelve of its roll-outs."""
    backbone = agentflow.load_backbone("builtin", "cpu", seed=3)
    for parameter in backbone.trainable_parameters():  # B is zero at first: then A has no gradient
        torch.nn.init.normal_(parameter, std=0.02)
    backbone.adapter_changed()
    questions = evaluation.load_questions(DATA / "train.jsonl")[:3]
    tools = make_tools(offline=True)
    config = train.Config(num_generations=4)
    rollouts = agentflow.roll_out(
        [question.text for question in questions], 4, backbone, tools,
        agentflow.limits_of(config, backbone),
        agentflow.sampling_of(config, config.temperature), 0, 1,
    )
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    rows, _ = train.make_rows(rollouts, rewards, torch.arange(3).repeat_interleave(4))
    return backbone, rows


some_rows = functools.cache(fresh_rows)  # for tests that leave the weights as they are


def gradient(backbone, rows, **changes):
    for parameter in backbone.trainable_parameters():
        parameter.grad = None
    totals = train.accumulate_gradients(backbone, rows, train.Config(**changes))
    flat = torch.cat([p.grad.flatten() for p in backbone.trainable_parameters()])
    return flat, totals


def test_micro_batches_and_the_order_of_rows_change_no_gradient():
    """All rows at once, a few at a time, one at a time, reversed: equal to 1e-5 of the norm."""
    backbone, rows = some_rows()
    whole, totals = gradient(backbone, rows, micro_batch_tokens=10**9)
    assert whole.norm() > 0
    for tokens, order in ((1500, rows), (1, rows), (1500, rows[::-1])):
        part, same = gradient(backbone, order, micro_batch_tokens=tokens)
        assert (part - whole).norm() <= 1e-5 * whole.norm()
        for name in ("loss", "kl", "entropy"):
            assert same[name] == pytest.approx(totals[name], rel=1e-4, abs=1e-7)


def test_micro_batches_hold_every_row_once_and_keep_to_the_budget():
    _, rows = some_rows()
    batches = train.micro_batches(rows, 1500)
    assert sorted(map(id, (row for batch in batches for row in batch))) == sorted(map(id, rows))
    for batch in batches:
        nodes, _ = agentflow.build_trie([row.prompt_ids + row.response_ids for row in batch])
        assert len(batch) == 1 or sum(len(node.tokens) for node in nodes) <= 1500
    for batch, following in zip(batches, batches[1:], strict=False):
        more = [row.prompt_ids + row.response_ids for row in [*batch, following[0]]]
        nodes, _ = agentflow.build_trie(more)
        assert sum(len(node.tokens) for node in nodes) > 1500, "the next row had its place here"


def test_the_last_token_of_a_reply_is_trained_whether_it_ends_or_is_cut():
    """Change the old log-prob of the last token (EOS, or the last before the limit): its ratio is
    part of the loss, so the gradient changes."""
    backbone, rows = some_rows()
    end = backbone.tokenizer.eos_token_id
    finished = next(row for row in rows if row.response_ids[-1] == end)
    cut = train.Row(finished.prompt_ids, finished.response_ids[:-3], finished.logp_old[:-3],
                    finished.advantage, finished.weight, finished.group)
    for row in (finished, cut):
        moved = train.Row(row.prompt_ids, row.response_ids,
                          [*row.logp_old[:-1], row.logp_old[-1] - 0.1], 1.0, row.weight, 0)
        still = train.Row(row.prompt_ids, row.response_ids, row.logp_old, 1.0, row.weight, 0)
        difference = gradient(backbone, [moved])[0] - gradient(backbone, [still])[0]
        assert difference.norm() > 0


def test_the_mask_comes_from_who_wrote_a_token_and_not_from_its_value():
    """End and pad ids in the middle of a reply were sampled like any other: each of its tokens
    has a ratio in the loss, and no token of the prompt has."""
    backbone, _ = some_rows()
    end, pad = backbone.tokenizer.eos_token_id, backbone.tokenizer.pad_token_id
    prompt, response = [1, 300, end, pad, 301], [302, end, pad, 303, end]
    longer = [302] * 8  # a second row, so that the first is padded
    rows = [train.Row(prompt, ids, [-1.0] * len(ids), 1.0, 0.1, 0) for ids in (response, longer)]
    with torch.no_grad():
        logp, _ = train.score_rows(backbone, rows, 1.0, gate=1)  # (2, 8)
    assert logp.shape == (2, 8) and (logp[0, 5:] == 0).all() and (logp[0, :5] < 0).all()
    rows[0].logp_old, rows[1].logp_old = logp[0, :5].tolist(), logp[1].tolist()  # ratio 1
    still, same = gradient(backbone, rows)[0], list(rows[0].logp_old)
    for place in range(len(response)):
        rows[0].logp_old = [*same[:place], same[place] - 0.1, *same[place + 1 :]]  # ratio 1.1
        moved = gradient(backbone, rows)[0]
        assert (moved - still).norm() > 1e-3 * still.norm(), place


def test_the_reference_is_the_start_weights_so_the_first_kl_is_zero():
    backbone = agentflow.load_backbone("builtin", "cpu")
    row = train.Row([1, 300, 301], [302, 303, 2], [-1.0, -1.0, -1.0], 1.0, 0.1, 0)
    _, totals = gradient(backbone, [row], beta=0.1)
    assert totals["kl"] == 0.0
    with torch.no_grad():
        for parameter in backbone.trainable_parameters():
            parameter.add_(0.05)
    _, totals = gradient(backbone, [row], beta=0.1)
    assert totals["kl"] > 0.0


def test_a_second_iteration_keeps_the_old_log_probs_and_moves_the_ratio():
    backbone, rows = fresh_rows()
    config = train.Config(num_iterations=2, learning_rate=0.02, epsilon=0.01, epsilon_high=0.01)
    optimizer = torch.optim.AdamW(backbone.trainable_parameters(), lr=config.learning_rate)
    old = [list(row.logp_old) for row in rows]
    report = train.update(backbone, optimizer, rows, config)
    assert [row.logp_old for row in rows] == old
    assert report["gap_max"] < 2e-5, "the sampler's gap is measured before the first update"
    assert report["clip"] > 0, "after it, ratios have left the clip range"


def test_groups_without_spread_cost_no_forward_when_beta_is_zero(monkeypatch):
    backbone, rows = some_rows()
    flat = [train.Row(r.prompt_ids, r.response_ids, r.logp_old, 0.0, r.weight, 0) for r in rows]
    monkeypatch.setattr(train, "score_rows", None)  # calling it would fail
    optimizer = torch.optim.AdamW(backbone.trainable_parameters(), lr=0.1)
    before = [p.detach().clone() for p in backbone.trainable_parameters()]
    train.update(backbone, optimizer, flat, train.Config(beta=0.0))
    assert all(torch.equal(a, b) for a, b in zip(before, backbone.trainable_parameters(),
                                                  strict=True))


def test_after_an_update_the_next_roll_out_is_sampled_from_the_new_weights():
    """One update with a large step; the log-probs of the next sample are those of the new weights,
    although the planner's prompt head had been cached with the old ones."""
    backbone, rows = fresh_rows()
    ask = Ask("planner", "You plan.", "Question: What is 2 plus 2?")
    request = agentflow.Request(ask, 1.0, 12, (0, 0))
    before = backbone.generate([request])[0]
    optimizer = torch.optim.AdamW(backbone.trainable_parameters(), lr=0.05)
    train.update(backbone, optimizer, rows, train.Config())
    after = backbone.generate([request])[0]
    row = train.Row(after.prompt_ids, after.response_ids, after.logp, 1.0, 1.0, 0)
    with torch.no_grad():
        logp, _ = train.score_rows(backbone, [row], 1.0, gate=1)
    assert max(abs(a - b) for a, b in zip(logp[0].tolist(), after.logp, strict=True)) < 2e-5
    assert before.logp != after.logp


def test_an_error_in_the_middle_of_a_run_loses_no_finished_step(
    tmp_path, monkeypatch, few_questions
):
    """The third step fails: the two before it are in a checkpoint, and the exit code is 2."""
    right = train.train_step

    def failing(training, step):
        if step == 3:
            raise OSError("the disk is full")
        return right(training, step)

    monkeypatch.setattr(train, "train_step", failing)
    folder = tmp_path / "failed"
    assert run("--max_steps", 5, "--eval_data", few_questions, "--num_questions", 2,
               "--num_generations", 4, "--output_dir", folder) == 2
    assert (folder / "checkpoint-2").is_dir()


def test_every_question_comes_once_an_epoch_in_an_order_of_its_own():
    config = train.Config(num_questions=4)
    items = list(range(12))
    steps = [train.questions_of_step(items, step, config) for step in range(1, 7)]
    first, second = sum(steps[:3], []), sum(steps[3:], [])
    assert sorted(first) == sorted(second) == items and first != second
    assert steps == [train.questions_of_step(items, step, config) for step in range(1, 7)]


# --- The whole thing ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(1, marks=pytest.mark.release),
        pytest.param(2, marks=pytest.mark.release),
    ],
)
def test_the_laptop_run_makes_the_planner_better(tmp_path, seed):
    """`python train.py`, all defaults: at most 0.45 before, at least 0.90 after."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, "train.py", "--seed", str(seed), "--output_dir", str(tmp_path / "run")],
        cwd=ROOT, env=environment, check=True,
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_before"] <= 0.45
    assert summary["accuracy_after"] >= 0.90
    assert summary["tool_errors_after"] < summary["tool_errors_before"]
