"""What can go wrong in a run: it ends in a clear state, and resumes to the same numbers."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import agentflow
import train
from tests.test_train import ROOT, few_questions, read, run  # noqa: F401 (a fixture)

SMALL = ["--num_questions", "2", "--num_generations", "2", "--deterministic", "--max_turns", "2"]
STEPS = 4


def flags(folder, questions, steps=STEPS):
    return ["--max_steps", steps, *SMALL, "--eval_data", questions, "--eval_questions", 2,
            "--output_dir", folder]  # fmt: skip


def numbers(folder):
    """What a run is, without what depends on the clock: metrics, and the adapter's bytes."""
    rows = [
        {name: value for name, value in row.items() if "time" not in name}
        for row in read(folder / "metrics.jsonl")
    ]
    said = [
        [[turn["planner"] for turn in line["turns"]] for line in read(file)]
        for file in sorted((folder / "rollouts").glob("[0-9]*.jsonl"))
    ]
    return rows, said, (folder / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, few_questions):  # noqa: F811
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(*flags(folder, few_questions)) == 0
    return numbers(folder)


def fails_at(step, function, error, times=1):
    """function, which raises `error` at its first `times` calls for that step."""
    left = [times]

    def failing(self, given, *rest):
        number = given if isinstance(given, int) else given["step"]
        if number == step and left[0]:
            left[0] -= 1
            raise error
        return function(self, given, *rest)

    return failing


FULL_DISK = OSError(28, "No space left on device")


def broken_gradient(call):
    """accumulate_gradients, whose gradient holds a NaN at its call of that number (from 1)."""
    right, calls = train.accumulate_gradients, []

    def breaking(backbone, *rest):
        report = right(backbone, *rest)
        calls.append(1)
        if len(calls) == call:
            backbone.trainable_parameters()[0].grad[0, 0] = torch.nan
        return report

    return breaking


@pytest.mark.parametrize("times", [1, 9], ids=["once", "for good"])
@pytest.mark.parametrize("what", ["log", "write_rollouts", "save"])
def test_a_full_disk_loses_at_most_the_step_and_resume_gives_the_same_run(
    tmp_path, few_questions, monkeypatch, capsys, whole, what, times  # noqa: F811
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(train.Run, what, fails_at(2, getattr(train.Run, what), FULL_DISK, times))
        assert run(*flags(folder, few_questions)) == 2
    assert "No space left" in capsys.readouterr().err
    saved = 2 if times == 1 else 1
    assert (folder / f"checkpoint-{saved}").is_dir()
    assert not (folder / f"checkpoint-{saved + 1}").exists()
    assert run("--resume", "--output_dir", folder) == 0
    assert numbers(folder) == whole


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_half_line(tmp_path, monkeypatch):
    """The write stops in its middle, as on a disk that is full from there on."""
    written = train.Run(train.Config(output_dir=str(tmp_path / "run")), [], [])
    written.log({"step": 1, "reward": 0.5})

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, text):
            self.file.write(text[:7])
            self.file.flush()
            raise FULL_DISK

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", lambda *a, _open=open, **k: Full(_open(*a, **k)))
        with pytest.raises(OSError, match="No space"):
            written.log({"step": 2, "reward": 0.25})
    written.log({"step": 2, "reward": 0.25})
    written.log({"step": 2, "reward": 0.25})  # once more does no harm
    assert [row["step"] for row in written.metrics()] == [1, 2]
    assert (written.folder / "metrics.jsonl").read_text().count("\n") == 2
    written.close()


def test_a_checkpoint_brings_the_line_that_was_not_written(tmp_path, few_questions, whole):  # noqa: F811
    folder = tmp_path / "run"
    assert run(*flags(folder, few_questions, steps=2)) == 0
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(lines[0] + "\n" + lines[1][:30])  # killed in a line
    assert run("--resume", "--max_steps", STEPS, "--output_dir", folder) == 0
    assert numbers(folder) == whole


def test_a_second_iteration_that_fails_saves_no_half_updated_step(
    tmp_path, few_questions, monkeypatch, capsys  # noqa: F811
):
    """Two updates a step; the second one of step 2 has a gradient that is no number."""
    common = [*flags(tmp_path / "run", few_questions, steps=2), "--num_iterations", 2]
    with monkeypatch.context() as patch:
        patch.setattr(train, "accumulate_gradients", broken_gradient(4))
        assert run(*common) == 2
    assert "gradient is nan" in capsys.readouterr().err
    folder = tmp_path / "run"
    assert [path.name for path in sorted(folder.glob("checkpoint-*"))] == ["checkpoint-1"]
    adapter = "adapter_model.safetensors"
    assert (folder / adapter).read_bytes() == (folder / "checkpoint-1" / adapter).read_bytes()
    assert [row["step"] for row in read(folder / "metrics.jsonl")] == [1]
    assert run("--resume", "--output_dir", folder) == 0
    other = tmp_path / "other"
    assert run(*common[:-4], "--output_dir", other, "--num_iterations", 2) == 0
    assert numbers(folder) == numbers(other)


def test_an_update_torn_in_the_first_step_saves_nothing(tmp_path, few_questions, monkeypatch):  # noqa: F811
    """Once in a new run, once in a resumed one: no checkpoint, and no adapter, of torn weights."""
    folder = tmp_path / "run"
    common = [*flags(folder, few_questions, steps=1), "--num_iterations", 2]
    with monkeypatch.context() as patch:
        patch.setattr(train, "accumulate_gradients", broken_gradient(2))
        assert run(*common) == 2
    assert not list(folder.glob("checkpoint-*")) and not list(folder.glob("adapter*"))
    assert run("--resume", "--output_dir", folder) == 0
    adapter = (folder / "adapter_model.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(train, "accumulate_gradients", broken_gradient(2))
        assert run("--resume", "--max_steps", 2, "--output_dir", folder) == 2
    assert (folder / "adapter_model.safetensors").read_bytes() == adapter
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]


def test_roll_outs_that_cannot_be_written_do_not_take_other_steps_with_them(
    tmp_path, few_questions, monkeypatch  # noqa: F811
):
    folder = tmp_path / "run"
    failing = fails_at(3, train.Run.write_rollouts, FULL_DISK, times=9)
    monkeypatch.setattr(train.Run, "write_rollouts", failing)
    assert run(*flags(folder, few_questions), "--save_steps", 10) == 2
    assert (folder / "checkpoint-3").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("keep, left", [(2, {3, 4}), (1, {4}), (0, {1, 2, 3, 4})])
def test_old_checkpoints_are_removed(tmp_path, few_questions, keep, left):  # noqa: F811
    folder = tmp_path / "run"
    assert run(*flags(folder, few_questions), "--keep", keep) == 0
    assert {int(path.name[11:]) for path in folder.glob("checkpoint-*")} == left


# --- Memory ------------------------------------------------------------------------------------

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


@pytest.mark.parametrize("what", ["update", "roll-outs"])
def test_out_of_memory_is_tried_once_more_with_half_as_much(
    tmp_path, few_questions, monkeypatch, capsys, whole, what  # noqa: F811
):
    """Nothing changes but what is computed at a time: the numbers are those of the whole run."""
    place, name = (train, "accumulate_gradients") if what == "update" else (agentflow, "roll_out")
    right, calls = getattr(place, name), []

    def fails_first(*arguments, **options):
        calls.append(1)
        if what == "update":
            right(*arguments, **options)  # half of a gradient is there already
        if len(calls) == 1:
            raise NO_MEMORY
        if what == "update":
            for parameter in arguments[0].trainable_parameters():
                parameter.grad = None
        return right(*arguments, **options)

    monkeypatch.setattr(place, name, fails_first)
    folder = tmp_path / "run"
    assert run(*flags(folder, few_questions, steps=1)) == 0
    said = capsys.readouterr().out
    assert "out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.)" in said
    assert ("--micro_batch_tokens 1024" if what == "update" else "--slots 32") in said
    first, ours = whole[0][0], numbers(folder)[0][0]
    assert ours["reward"] == first["reward"]
    assert ours["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)


def test_a_gradient_that_was_begun_is_not_added_to(monkeypatch):
    """The first attempt leaves half of its gradients behind: the second must start from none."""
    backbone = agentflow.load_backbone("config:tiny", "cpu", lora_r=4)
    rows = [train.Row([5, 6, 7], [9, 10], [-8.0, -8.0], 1.0, 0.5, 0)]
    config, seen = train.Config(learning_rate=0.0), []
    optimizer = train.new_optimizer(backbone.trainable_parameters(), config)
    train.update(backbone, optimizer, rows, config)
    expected = [parameter.grad.clone() for parameter in backbone.trainable_parameters()]
    right = train.accumulate_gradients

    def fails_late(*arguments):
        report = right(*arguments)
        seen.append(1)
        if len(seen) == 1:
            raise NO_MEMORY
        return report

    monkeypatch.setattr(train, "accumulate_gradients", fails_late)
    train.update(backbone, optimizer, rows, config)
    for parameter, value in zip(backbone.trainable_parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, value)


def test_memory_that_never_suffices_ends_with_the_flags_to_lower(
    tmp_path, few_questions, monkeypatch, capsys  # noqa: F811
):
    def never(*_):
        raise NO_MEMORY

    monkeypatch.setattr(train, "accumulate_gradients", never)
    assert run(*flags(tmp_path / "run", few_questions)) == 2
    errors = capsys.readouterr().err
    assert "Tried to allocate 2.00 GiB" in errors and "Traceback" not in errors
    assert {"--micro_batch_tokens", "--slots", "--dry_run"} <= set(errors.replace("`", " ").split())


def test_memory_that_ends_inside_the_optimizer_keeps_the_last_step(
    tmp_path, few_questions, monkeypatch, capsys  # noqa: F811
):
    """Half of the tensors are moved by then: they belong to no step."""
    right, calls = torch.optim.AdamW.step, []

    def fails_behind_it(self, *rest):
        right(self, *rest)
        calls.append(1)
        if len(calls) == 2:
            raise NO_MEMORY

    folder = tmp_path / "run"
    monkeypatch.setattr(torch.optim.AdamW, "step", fails_behind_it)
    assert run(*flags(folder, few_questions)) == 2
    errors = capsys.readouterr().err
    assert "Tried to allocate 2.00 GiB" in errors and "To go on" in errors
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
    adapter = "adapter_model.safetensors"
    assert (folder / adapter).read_bytes() == (folder / "checkpoint-1" / adapter).read_bytes()


# --- Signals -----------------------------------------------------------------------------------


def test_a_signal_between_two_handlers_does_not_leave_ctrl_c_dead(monkeypatch):
    """It raises when the first handler of a hold is in place and the second is not."""
    before = [signal.getsignal(number) for number in train.InterruptLater.SIGNALS]
    interrupt, right, calls = train.InterruptLater(), signal.signal, []

    def struck(number, handler):
        old = right(number, handler)
        calls.append(number)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return old

    monkeypatch.setattr(signal, "signal", struck)
    with pytest.raises(KeyboardInterrupt):
        interrupt.hold()
    interrupt.hold()
    interrupt.drop()
    assert [signal.getsignal(number) for number in train.InterruptLater.SIGNALS] == before


def start(folder, questions, steps=STEPS):
    command = [sys.executable, "train.py", *map(str, flags(folder, questions, steps))]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_a_cluster_that_ends_the_job_is_answered_as_ctrl_c_is(tmp_path, few_questions):  # noqa: F811
    folder = tmp_path / "run"
    process = start(folder, few_questions, steps=50)
    deadline = time.time() + 120
    while not (folder / "checkpoint-1").exists() and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume" in errors, errors
    done = read(folder / "metrics.jsonl")[-1]["step"]
    assert (folder / f"checkpoint-{done}" / "trainer_state.json").is_file()


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_at_most_the_step_and_resumes_to_the_same_numbers(
    tmp_path, few_questions, whole  # noqa: F811
):
    """Twenty random moments between the start of the first step and the end of the last."""
    random_moments = random.Random(0)
    clock = time.time()
    process = start(tmp_path / "timed", few_questions)
    process.communicate(timeout=300)
    whole_seconds = time.time() - clock
    in_the_middle = 0
    for number in range(20):
        folder = tmp_path / f"killed-{number}"
        process = start(folder, few_questions)
        time.sleep(random_moments.uniform(0.3, 1.0) * whole_seconds)
        process.kill()
        process.communicate()
        if not (folder / "run_config.json").exists():
            continue  # before the run was there at all
        logged = len((folder / "metrics.jsonl").read_text().splitlines()) if (
            folder / "metrics.jsonl").exists() else 0
        saved = max((int(p.name[11:]) for p in folder.glob("checkpoint-*[0-9]")), default=0)
        assert logged - 1 <= saved <= logged, "a step is logged, then saved"
        in_the_middle += 0 < saved < STEPS
        assert run("--resume", "--output_dir", folder) == 0
        assert numbers(folder) == whole, f"killed after {saved} steps"
        assert json.loads((folder / "summary.json").read_text())["steps"] == STEPS
    assert in_the_middle >= 5, "most moments should be in the middle of the run"
