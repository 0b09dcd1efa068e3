"""The README tells the truth: its commands run, its map points at real functions."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_eval import serve

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FILES = ("flow_grpo", "memory", "tools", "modules", "agentflow", "train", "eval")


def commands():
    """Every line of every bash block, without its comment."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """A run of one small step: what the README calls runs/NAME."""
    folder = tmp_path_factory.mktemp("readme")
    few = folder / "few.jsonl"
    lines = (ROOT / "data" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    few.write_text("\n".join(lines), encoding="utf-8")
    shorter = {
        "train.py": f"--max_steps 1 --num_questions 2 --num_generations 2 --eval_data {few}",
        "eval.py": f"--data {few}",
    }
    run_shortened("python train.py --output_dir runs/NAME", folder, shorter)
    return folder, shorter


def run_shortened(command, folder, shorter):
    """Run a README command here, with runs/ elsewhere and flags that make it short."""
    for name, path in {"runs/NAME": "NAME", "my_task": "my_task", "my_reward": "my_reward"}.items():
        command = command.replace(name, str(folder / path))
    words = shlex.split(command)
    assert words[0] == "python", command
    script = words[1]
    if script == "train.py" and "--help" not in words and "--output_dir" not in words:
        words += ["--output_dir", str(folder / f"run-{len(list(folder.iterdir()))}")]
    if script == "eval.py" and "--output_dir" not in words and "--compare" not in words:
        words += ["--output_dir", str(folder / f"results-{len(list(folder.iterdir()))}")]
    words += shlex.split(shorter.get(script, ""))  # the last of two equal flags counts
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.slow
def test_every_command_of_the_readme_runs(small_run):
    folder, shorter = small_run
    ran = 0
    for command in commands():
        if command.startswith("pip install") or " -m pytest" in command:
            continue  # what this test itself runs in
        if any(word in command for word in ("my_task", "results/", "--bench", "my.jsonl")):
            continue  # these have tests of their own
        run_shortened(command, folder, shorter)
        ran += 1
    assert ran >= 6, "the README shows how to train, measure, ask, resume"


@pytest.mark.slow
def test_the_commands_that_measure_run_one_after_the_other(server, small_run, tmp_path):
    """Four questions of each set; and a server of ours."""
    few = tmp_path / "my.jsonl"
    lines = (ROOT / "data" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    few.write_text("\n".join(lines), encoding="utf-8")
    instead = {
        "runs/NAME": str(small_run[0] / "NAME"),
        "http://localhost:8000/v1": serve(server, lambda body: "<answer>16</answer>"),
        "python": shlex.quote(sys.executable),
        "eval.py": shlex.quote(str(ROOT / "eval.py")),
    }

    def run(command):
        for name, other in instead.items():
            command = command.replace(name, other)
        words = shlex.split(command)
        if not {"--compare", "--resume", "--rescore"} & {*words}:
            words += ["--eval_questions", "4"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    section = README.partition("## Measuring")[2].partition("\n## ")[0]
    shown = [line for line in commands() if line in section and "results/" in line]
    assert len(shown) == 6 and "--url http://localhost:8000/v1" in section
    shown.insert(0, "python eval.py --data my.jsonl --url http://localhost:8000/v1")
    said = [run(command) for command in shown]
    assert any("verdicts could not be read" in text for text in said) and "gained" in said[-1]


def test_the_install_and_test_commands_are_the_two_that_a_fresh_machine_needs():
    found = commands()
    assert "pip install -r requirements.txt" in found
    assert "pip install -r requirements-dev.txt" in found and "python -m pytest" in found
    wanted = (ROOT / "requirements.txt").read_text().split()
    names = {re.match(r"[a-z]+", line).group() for line in wanted}
    assert names == {"torch", "transformers", "numpy", "requests", "tqdm"}


def test_the_map_from_paper_to_code_points_at_what_exists():
    table = README.partition("## From the paper to the code")[2].partition("\n## ")[0]
    names = re.findall(rf"`((?:{'|'.join(FILES)})\.[\w.]+)`", table)
    assert len(names) > 20
    for name in names:
        module, *path = name.split(".")
        found = importlib.import_module(module)
        for part in path:
            found = getattr(found, part)
    for equation in ("Eq. 5", "Eq. 6", "Eq. 7", "Algorithm 1", "KL"):
        assert equation in table


def test_the_table_of_metrics_names_every_metric_that_a_step_logs():
    import inspect

    import train

    table = README.partition("## What a step logs")[2].partition("\n## ")[0]
    prefix = ""
    named = set()
    for name in re.findall(r"`([^`]+)`", table):
        if name.startswith("…"):
            name = prefix + name[1:]
        else:
            prefix = name.rpartition("/")[0]
        named.add(name)
    logged = set(re.findall(r'^        "([\w/]+)":', inspect.getsource(train.step_metrics), re.M))
    logged |= set(re.findall(r'"(time/\w+|step_time|adapter/\w+)"',
                             inspect.getsource(train.train_step)))
    assert len(logged) > 25 and not logged - named, logged - named


@pytest.mark.parametrize("name", ["flow_grpo", "memory", "tools", "modules"])
def test_each_file_runs_on_its_own_as_a_demo(name):
    done = subprocess.run(
        [sys.executable, f"{name}.py"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 200


def test_imports_point_one_way():
    """tools → memory → modules → agentflow → eval → train; flow_grpo imports none of ours."""
    allowed = {
        "flow_grpo": set(),
        "tools": set(),
        "memory": {"tools"},
        "modules": {"tools", "memory"},
        "agentflow": {"flow_grpo", "tools", "memory", "modules"},
        "eval": {"tools", "modules", "agentflow"},
        "train": {"flow_grpo", "tools", "memory", "modules", "agentflow", "eval"},
    }
    for name, others in allowed.items():
        source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
        found = set(re.findall(r"^(?:import|from) (\w+)", source, re.M)) & set(FILES)
        assert found <= others, (name, found - others)
    python = {path.name for path in ROOT.glob("*.py")}
    assert python == {f"{name}.py" for name in FILES}, "seven files, and no other at the top"


def test_nothing_in_the_tree_looks_like_a_key_or_a_path_of_this_machine():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    pattern = re.compile(r"\b(sk-[A-Za-z0-9]{20,}|hf_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b")
    for name in tracked:
        path = ROOT / name
        if path.suffix in (".safetensors", ".png") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        assert not pattern.search(text), name
        assert str(ROOT) + "/" not in text, name


def test_the_readmes_own_tool_works_in_fifteen_lines(monkeypatch):
    import tools

    [block] = re.findall(r"```python\n(import tools.*?)```", README, re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 15
    monkeypatch.setattr(tools, "TOOLS", tools.TOOLS)
    exec(block, {})
    assert tools.TOOLS[-1].name == "Roman_Numeral_Tool"
    (tool,) = tools.make_tools(["Roman_Numeral_Tool"])

    def answer(**arguments):
        with pytest.raises(StopIteration) as stop:
            next(tools.execute(tool, arguments))
        return stop.value.value

    assert [answer(numeral=n).output for n in ("XIV", "MCMXCIX", "IX")] == ["14", "1999", "9"]
    assert answer(numeral="A").error == "runtime" and answer(numeral=3).error == "bad_arguments"


def test_the_readmes_own_task_trains_with_its_own_reward(tmp_path):
    """The section as it stands: five rows, a function of 15 lines at most, one command."""
    section = README.partition("## Train on your own task")[2].partition("\n## ")[0]
    blocks = re.findall(r"```(?:json|python|bash)\n(.*?)```", section, re.DOTALL)
    rows, function, command = blocks
    assert len(rows.splitlines()) == 5
    assert len([line for line in function.splitlines() if line.strip()]) <= 15
    (tmp_path / "my_task.jsonl").write_text(rows, encoding="utf-8")
    (tmp_path / "my_reward.py").write_text(function, encoding="utf-8")
    short = {"train.py": "--max_steps 1 --num_generations 4"}
    said = run_shortened(command.strip(), tmp_path, short)
    assert "4 questions to train on, 1 held out" in said
    (folder,) = tmp_path.glob("run-*")
    written = (folder / "rollouts" / "1.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [json.loads(line)["reward"] for line in written]
    assert len(rewards) == 16 and {0.2, 1.0} <= {*rewards} <= {0.0, 0.2, 1.0}
