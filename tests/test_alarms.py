"""Alarms, the log-prob of one right answer, and reporting elsewhere."""

import importlib.machinery
import json
import re
import sys
import types
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import agentflow
import train
from tests.test_train import fresh_rows, some_rows

ROOT = Path(__file__).resolve().parent.parent

# What `python train.py --max_steps 25` measured (seed 0): a run that learns, from 0.16 to 0.7.
NAMES = (
    "reward", "frac_reward_zero_std", "kl", "entropy", "completions/mean_length",
    "completions/clipped_ratio", "sampling/sampling_logp_difference/mean", "tools/call_frequency",
    "tools/failure_frequency", "adapter/delta_norm", "probe/logp_before", "probe/logp_after",
)  # fmt: skip
MEASURED = """
0.156 0.5 0 0.0492 37.6 0 3.93e-08 2.89 0.503 0.338 -1.89 -1.68
0.25 0.375 0.000257 0.0497 37.2 0 4.01e-08 2.8 0.441 0.571 -1.89 -2.04
0.219 0.25 0.00153 0.0565 36.9 0 5.02e-08 2.75 0.392 0.74 -1.52 -1.44
0.594 0.125 0.00448 0.0554 32.7 0 5.5e-08 2.14 0.226 0.923 -1.55 -1.6
0.531 0 0.00803 0.0485 33.2 0 4.79e-08 2.34 0.213 1.09 -1.54 -1.47
0.625 0.125 0.0139 0.0396 35.8 0 3.08e-08 2.19 0.207 1.28 -0.624 -0.449
0.609 0.5 0.0361 0.158 35.6 0.0246 1.56e-07 1.69 0.197 1.41 -3.13 -1.22
0.859 0.5 0.0472 0.215 31.7 0.00971 6.97e-08 1.56 0.0971 1.53 -0.322 -0.29
0.469 0.25 0.0274 0.03 38.4 0 3.09e-08 2.42 0.0129 1.63 -0.425 -0.402
0.484 0.125 0.0373 0.0253 35.2 0 2.77e-08 2.47 0.0316 1.71 -1.49 -1.1
0.656 0.25 0.0286 0.0319 37.1 0 4.63e-08 2.14 0.0432 1.78 -1.04 -0.683
0.547 0 0.0367 0.129 38 0.00676 1.1e-07 2.14 0.135 1.85 -0.756 -0.624
0.547 0 0.0186 0.0451 37.9 0 4.53e-08 2.52 0.0183 1.9 -0.428 -0.383
0.734 0 0.034 0.0673 34.9 0.00699 6.44e-08 2.19 0.042 1.96 -0.499 -0.469
0.5 0 0.0421 0.028 38 0 3.21e-08 2.53 0.0432 2.01 -0.507 -0.558
0.594 0 0.0181 0.0315 38.3 0 3.79e-08 2.42 0.0129 2.07 -0.609 -0.66
0.562 0.25 0.0232 0.0285 38.4 0 3.31e-08 2.42 0.0256 2.12 -0.613 -0.637
0.719 0.25 0.012 0.0305 39.3 0 3.59e-08 2.31 0.0135 2.18 -0.653 -0.685
0.719 0.25 0.02 0.0585 35.7 0 7.55e-08 2.11 0.0629 2.23 -0.565 -0.585
0.703 0.25 0.0387 0.0453 33.8 0 5.39e-08 2.12 0.036 2.26 -0.711 -0.702
0.656 0 0.0554 0.0881 35 0.00741 7.1e-08 2.05 0.0741 2.29 -0.66 -0.688
0.766 0.5 0.0215 0.0262 36.6 0 4.26e-08 1.97 0.0394 2.33 -0.796 -0.789
0.719 0.25 0.0464 0.0253 36.5 0 4.97e-08 2.06 0.0227 2.36 -0.717 -0.774
0.703 0.125 0.0539 0.0265 36.9 0 4.32e-08 2.22 0.0282 2.4 -0.728 -0.722
0.594 0.25 0.0169 0.0519 37.8 0 5.62e-08 2.23 0.0205 2.44 -1.06 -1.02
"""
GAP = "sampling/sampling_logp_difference/mean"
ROLLOUTS = 64


def healthy():
    """The rows of metrics.jsonl that MEASURED stands for."""
    lines = MEASURED.strip().splitlines()
    return [
        {"step": step, "learning_rate": 1e-3, "rollouts/failed": 0,
         **dict(zip(NAMES, map(float, line.split()), strict=True))}
        for step, line in enumerate(lines, 1)
    ]  # fmt: skip


def history(last=25, **changes):
    """The healthy rows with one metric's last values replaced: `kl=[1, 2]` sets the last two."""
    rows = healthy()[:last]
    for name, values in changes.items():
        for row, value in zip(rows[-len(values) :], values, strict=True):
            row[name] = value
    return rows


def sounding(rows, fp32=True):
    return train.alarms(rows, fp32, ROLLOUTS)


# --- Alarms ------------------------------------------------------------------------------------


def test_a_healthy_run_hears_no_alarm_at_any_step():
    for last in range(26):
        assert sounding(history(last)) == {}, f"step {last}"
        assert sounding(history(last), fp32=False) == {}, f"step {last}"


# name of the alarm -> metrics of the last steps that make it sound, and a word of its remedy
SICK = [
    ("flat", {"frac_reward_zero_std": [0.6] * 10, "reward": [0.95] * 10}, "harder"),
    ("flat", {"frac_reward_zero_std": [0.6] * 10, "reward": [0.05] * 10}, "easier"),
    ("flat", {"frac_reward_zero_std": [0.6] * 10, "reward": [0.5] * 10}, "--num_generations"),
    ("clipped", {"completions/clipped_ratio": [0.3] * 5}, "--max_completion_length"),
    ("tool_errors", {"tools/failure_frequency": [0.25] * 5}, "rollouts/"),
    ("tool_use", {"tools/call_frequency": [1.1] * 5, "reward": [0.3] * 5}, "--learning_rate"),
    ("kl", {"kl": [0.5, 0.6]}, "--beta"),
    ("gap", {GAP: [2e-4]}, "--device cpu"),
    ("unchanged", {"adapter/delta_norm": [2.4] * 4}, "raise --learning_rate"),
    ("unchanged", {"adapter/delta_norm": [0.0] * 4, "learning_rate": [0.0]}, "it is 0"),
    ("probe", {"probe/logp_before": [-1.0] * 10, "probe/logp_after": [-1.2] * 10}, "Lower"),
    ("probe", {"probe/logp_before": [-1.0] * 10, "probe/logp_after": [-1.000004] * 10}, "Raise"),
    ("failed", {"rollouts/failed": [7]}, "--judge"),
    ("length", {"completions/mean_length": [80] * 5}, "--beta"),
    ("length", {"completions/mean_length": [15] * 5}, "--beta"),
    ("entropy", {"entropy": [0.004] * 5}, "--temperature"),
]


@pytest.mark.parametrize("name, changes, says", SICK)
def test_an_alarm_sounds_where_its_metric_goes_wrong_and_no_other_does(name, changes, says):
    said = sounding(history(**changes))
    assert [*said] == [name] and says in said[name]


NEARLY = [
    {"frac_reward_zero_std": [0.5] * 10},
    {"completions/clipped_ratio": [1.0]},  # one step of five
    {"tools/failure_frequency": [0.7]},
    {"tools/call_frequency": [1.1] * 5},  # fewer calls, and more reward: the planner learnt it
    {"tools/call_frequency": [0.0], "reward": [0.0]},
    {"kl": [9.0]},  # one odd step
    {"kl": [0.3, 0.3]},  # two, not ten times the steps before
    {GAP: [0.9e-4]},
    {"adapter/delta_norm": [2.4] * 3},
    {"adapter/delta_norm": [None] * 4},  # no adapter: all weights are trained
    {"adapter/delta_norm": [2.4] * 4, "frac_reward_zero_std": [1.0]},  # nothing to learn from
    {"probe/logp_before": [-1.0] * 9, "probe/logp_after": [-1.0, -1.2] * 4 + [-0.5]},
    {"rollouts/failed": [6]},
    {"completions/mean_length": [200]},
    {"entropy": [0.0] * 4},
    {"entropy": [0.004] * 5, "reward": [0.98] * 10},  # learnt: nothing is left to be tried
]


@pytest.mark.parametrize("changes", NEARLY)
def test_no_alarm_sounds_below_its_bound_or_for_one_odd_step(changes):
    rows = history(**changes)
    if "kl" in changes and len(changes["kl"]) == 2:
        for row in rows[:-2]:
            row["kl"] = max(row["kl"], 0.04)
    assert sounding(rows) == {}


def test_a_planner_that_ran_away_at_once_hears_kl_and_no_advice_about_its_questions():
    """`--learning_rate 0.02`, measured: kl 3.07 and 3.15 at steps 2 and 3, and every group flat."""
    assert sounding(history(2, kl=[3.07])) == {}
    assert [*sounding(history(3, kl=[3.07, 3.15]))] == ["kl"]
    said = sounding(history(10, kl=[3.0] * 9, reward=[0.0] * 9, frac_reward_zero_std=[1.0] * 9))
    assert [*said] == ["kl", "flat"] and "--data" not in said["flat"] and "kl" in said["flat"]


def test_bf16_may_differ_by_rounding_and_by_no_more():
    assert sounding(history(**{GAP: [0.04]}), fp32=False) == {}
    assert [*sounding(history(**{GAP: [0.06]}), fp32=False)] == ["gap"]
    # A gap of 0.01 a token over 37 tokens hides a change of 0.2 nats, and no change at all.
    noisy = {GAP: [0.01] * 10, "probe/logp_before": [-1.0] * 10}
    for after in (-1.0, -1.2):
        assert sounding(history(**noisy, **{"probe/logp_after": [after] * 10}), fp32=False) == {}
    fallen = history(**noisy, **{"probe/logp_after": [-1.5] * 10})
    assert [*sounding(fallen, fp32=False)] == ["probe"]


def test_every_flag_of_a_remedy_exists():
    flags = {field.name for field in fields(train.Config)}
    named = set()
    for name, changes, _ in SICK:
        named |= {*re.findall(r"--(\w+)", sounding(history(**changes))[name])}
    assert len(named) >= 8 and named <= flags, named - flags


def test_tool_errors_are_named_by_their_most_frequent_kind():
    rows = history(**{
        "tools/failure_frequency": [0.4] * 5, "tools/errors/network": [3, 0, 3, 3, 3],
        "tools/errors/runtime": [5],
    })  # fmt: skip
    assert "`network`" in sounding(rows)["tool_errors"]


@pytest.mark.parametrize("hole", [None, float("nan"), "missing"])
def test_metrics_that_were_not_measured_raise_nothing_and_sound_nothing(hole):
    """With --beta 0 kl is not measured, without a judged roll-out there is no reward, ..."""
    for name in NAMES:
        rows = healthy()
        for row in rows[::2]:
            row[name] = hole
            if hole == "missing":
                del row[name]
        assert sounding(rows) == {}, name
    assert sounding([{"step": step} for step in range(20)]) == {}


def said_over(rows):
    """What `sound_alarms` says at each step of a run that logs these rows."""
    logged, said = [], []
    run = SimpleNamespace(
        metrics=lambda: json.loads(json.dumps(logged)),
        config=train.Config(num_questions=8, num_generations=8),
    )
    for row in rows:
        said.append(train.sound_alarms(run, row, fp32=True))
        logged.append(row)
    return said


def test_an_alarm_is_said_once_until_it_was_away_and_stands_in_every_row_that_has_it():
    failed = [9, 9, 0, 9, 0, 0, 0, 0, 0, 0, 9]
    rows = history(**{"rollouts/failed": failed})
    said = said_over(rows)
    assert [row["alarms"] for row in rows[-11:]] == [["failed"] if n else [] for n in failed]
    new = [step for step, lines in enumerate(said, 1) if lines]
    assert new == [15, 25], "not at step 18, two steps after the last time"
    assert said[14][0].startswith("  ! failed: 9 of 64 roll-outs have no reward")


# --- Is it really training? ----------------------------------------------------------------------


def log_prob(backbone, row, temperature):
    """The row's log-prob by Hugging Face's own forward, the adapter added into the weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(agentflow.BUILTIN)
    with torch.no_grad():
        for path, lora in backbone.lora.items():
            model.get_submodule(path).weight += lora.scale * (lora.B @ lora.A)  # (out, in)
        logits = model(torch.tensor([row.prompt_ids + row.response_ids])).logits[0]  # (L, V)
    logp = (logits[len(row.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
    return sum(logp[i, token].item() for i, token in enumerate(row.response_ids))


def test_the_probe_is_the_first_row_of_the_highest_advantage():
    def rows(*advantages):
        return [train.Row([1], [2], [-1.0], a, 1.0, 0) for a in advantages]

    right = rows(-0.5, 0.9, 1.6, 1.6, 0.9)
    assert train.probe_row(right) is right[2]
    assert train.probe_row(rows(0.0, 0.0)) is None and train.probe_row([]) is None
    flat = train.probe(None, rows(0.0, 0.0), train.Config())
    assert flat == {"probe/logp_before": None, "probe/logp_after": None}


def test_the_probe_is_the_log_prob_before_and_after_an_update_and_leaves_no_trace():
    """An update on that one row alone can only raise it; both sides by another implementation."""
    backbone, rows = fresh_rows()
    config = train.Config(learning_rate=1e-3, beta=0.0)
    row = train.probe_row(rows)
    before = log_prob(backbone, row, config.temperature)
    optimizer = torch.optim.AdamW(backbone.trainable_parameters(), lr=config.learning_rate)
    train.update(backbone, optimizer, [row], config)
    state = torch.get_rng_state()
    gradients = [parameter.grad.clone() for parameter in backbone.trainable_parameters()]
    found = train.probe(backbone, rows, config)
    assert torch.equal(torch.get_rng_state(), state)
    for parameter, gradient in zip(backbone.trainable_parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    after = log_prob(backbone, row, config.temperature)
    assert found["probe/logp_before"] == pytest.approx(before, abs=1e-3)
    assert found["probe/logp_after"] == pytest.approx(after, abs=1e-3)
    assert found["probe/logp_after"] > found["probe/logp_before"] + 0.01


def test_the_probe_is_scored_at_the_temperature_of_sampling():
    backbone, rows = some_rows()
    config = train.Config(temperature=3.0)
    wanted = log_prob(backbone, train.probe_row(rows), 3.0)
    found = train.probe(backbone, rows, config)["probe/logp_after"]
    assert found == pytest.approx(wanted, abs=1e-3)
    assert abs(found - log_prob(backbone, train.probe_row(rows), 1.0)) > 1


# --- Reporting elsewhere -------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch):
    """A package that records its calls, under the name of trackio or wandb."""

    def install(name, broken=None):
        module, calls = types.ModuleType(name), []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)

        def recorder(method):
            def record(*arguments, **options):
                calls.append((method, arguments, options))
                if method == broken:
                    raise RuntimeError(f"no {method} today")

            return record

        for method in ("init", "log", "finish"):
            setattr(module, method, recorder(method))
        monkeypatch.setitem(sys.modules, name, module)
        return calls

    return install


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Four held-out questions in a file."""
    path = tmp_path_factory.mktemp("data") / "few.jsonl"
    lines = (ROOT / "data" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def small_run(folder, few, *flags):
    """main() on replies of four tokens, which are all cut: quick, and nothing is learnt."""
    return train.main([str(word) for word in (
        "--num_questions", 2, "--num_generations", 2, "--max_steps", 2, "--eval_data", few,
        "--max_completion_length", 4, "--output_dir", folder, *flags)])  # fmt: skip


def read(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_tracker_gets_the_numbers_of_metrics_jsonl_step_by_step(name, fake, tmp_path, few):
    calls = fake(name)
    assert small_run(tmp_path / "run", few, "--report_to", name) == 0
    assert [method for method, _, _ in calls] == ["init", "log", "log", "finish"]
    start = calls[0][2]
    assert (start["project"], start["name"]) == ("agentflow", "run")
    assert start["config"]["num_generations"] == 2
    for row, (_, (numbers,), options) in zip(read(tmp_path / "run"), calls[1:3], strict=True):
        assert options == {"step": row.pop("step")}
        assert "reward" in numbers and "kl" in numbers
        assert numbers == {
            name: value for name, value in row.items() if isinstance(value, int | float)
        }


def test_a_tracker_is_closed_on_ctrl_c(fake, tmp_path, few, monkeypatch):
    calls = fake("wandb")

    def pressed(*rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train_step", pressed)
    assert small_run(tmp_path / "run", few, "--report_to", "wandb") == 130
    assert [method for method, _, _ in calls] == ["init", "finish"]


def test_a_tracker_that_fails_is_said_once_and_the_run_goes_on(fake, tmp_path, few, capsys):
    calls = fake("trackio", broken="log")
    assert small_run(tmp_path / "run", few, "--report_to", "trackio") == 0
    assert [method for method, _, _ in calls] == ["init", "log"], "switched off after the first"
    assert len(read(tmp_path / "run")) == 2
    assert capsys.readouterr().err.count("--report_to trackio is switched off") == 1


def test_a_tracker_that_cannot_be_opened_stops_the_run_and_leaves_its_folder_free(
    fake, tmp_path, few, capsys
):
    fake("wandb", broken="init")
    flags = ["--max_steps", 0]
    assert small_run(tmp_path / "run", few, *flags, "--report_to", "wandb") == 2
    assert "no init today" in capsys.readouterr().err
    assert not (tmp_path / "run" / "run_config.json").exists()


@pytest.mark.parametrize(
    "name, says",
    [("wandb", "pip install wandb"), ("mlflow", "none, tensorboard, trackio, wandb; not mlflow")],
)
def test_a_tracker_that_is_not_there_is_refused_before_anything_is_loaded(
    name, says, tmp_path, few, capsys, monkeypatch
):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    loaded = []
    monkeypatch.setattr(train, "load_data", lambda *rest: loaded.append(rest))
    assert small_run(tmp_path / "run", few, "--report_to", name) == 2
    assert says in capsys.readouterr().err and not loaded and not (tmp_path / "run").exists()


def test_tensorboard_reads_what_the_tracker_writes(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = train.Tracker("tensorboard", tmp_path, {})
    for step in (1, 2):
        tracker.log({"step": step, "reward": step / 4, "kl": None, "alarms": ["flat"]})
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward"]
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.25), (2, 0.5)]


def test_a_run_says_its_alarms_under_the_step_line(tmp_path, few, capsys):
    """All replies are cut: said at the third step, the first with three to look at, and standing
    in the rows since then."""
    assert small_run(tmp_path / "run", few, "--max_steps", 4) == 0
    assert ["clipped" in row["alarms"] for row in read(tmp_path / "run")] == [0, 0, 1, 1]
    lines = capsys.readouterr().out.splitlines()
    said = [i for i, line in enumerate(lines) if line.startswith("  ! clipped: 100% of")]
    assert len(said) == 1 and lines[said[0] - 1].startswith("step   3 |")


# --- README ------------------------------------------------------------------------------------


def test_the_readme_has_every_alarm_and_every_new_name():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## What a step logs")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", section, re.M)
    assert {name for name, _, _ in SICK} <= {*listed}
    for name in ("probe/logp_before", "probe/logp_after", "alarms"):
        assert f"`{name}`" in section
    flags = {*re.findall(r"`--(\w+)", section)}
    assert flags <= {field.name for field in fields(train.Config)}
