"""Two processes on the CPU (gloo): the gradient, the numbers and the files of one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as torchrun starts this file

import agentflow  # noqa: E402
import train  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--max_steps", "2", "--num_questions", "3", "--num_generations", "2", "--max_turns", "2",
         "--eval_questions", "3", "--eval_steps", "1"]  # fmt: skip


def torchrun(*arguments, **options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc_per_node", "2", *map(str, arguments)]  # fmt: skip
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, **options,
    )  # fmt: skip


def finished(process):
    out, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    return out


def update_of_three_groups(team):
    """Gradients and report of one update: three groups, two of them of rank 0, unequal rows."""
    backbone = agentflow.load_backbone("config:tiny", "cpu", lora_r=4)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for lora in backbone.lora.values():
            lora.B.normal_(std=0.02, generator=random)
    rows = []
    for group, number in ((0, 3), (1, 1), (2, 4)):
        prompt = torch.randint(2, 4000, (12,), generator=random).tolist()
        for row in range(number):
            response = torch.randint(2, 4000, (2 + row,), generator=random).tolist()
            old = [-8.3 + 0.1 * row] * len(response)
            rows.append(train.Row(prompt, response, old, 1.0 - row, 0.01 * (1 + row), group))
    config = train.Config(learning_rate=1e-3, beta=0.1)
    optimizer = train.new_optimizer(backbone.trainable_parameters(), config)
    report = train.update(backbone, optimizer, rows, config, team)
    return {
        "gradients": [p.grad for p in backbone.trainable_parameters()],
        "weights": [p.detach() for p in backbone.trainable_parameters()],
        "report": report,
        "entropy": [row.entropy for row in rows],
        "logp_ref": [row.logp_ref for row in rows],
    }


def ending_of_two_processes(team):
    """What each process meets when rank 1 fails, and then when rank 0 comes to its end first."""
    came = {"together": None, "gone": None}

    def work():
        if team.rank == 1:
            raise ValueError("too long")

    def note(name, function):
        try:
            function()
        except (ValueError, ConnectionError) as error:
            came[name] = f"{type(error).__name__}: {error}"

    note("together", lambda: team.together(work))
    note("gone", team.wait_at_the_end if team.leads else lambda: team.gather("the next step"))
    if team.leads:
        time.sleep(1.0)  # writes a checkpoint
        came["saved"] = time.monotonic()  # one clock for all processes of a machine
    team.wait_at_the_end()
    came["end"] = time.monotonic()
    return came


def test_two_processes_have_the_gradient_of_one(tmp_path):
    """Gradients before clipping would hide nothing here: the norm is far below the bound."""
    finished(torchrun(__file__, tmp_path))
    alone = update_of_three_groups(train.ALONE)
    both = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    for theirs in both:
        for one, other in zip(alone["gradients"], theirs["gradients"], strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
        assert theirs["report"] == pytest.approx(alone["report"], abs=1e-6)
        assert theirs["entropy"] == alone["entropy"] and theirs["logp_ref"] == alone["logp_ref"]
    assert max(value.abs().max().item() for value in alone["gradients"]) > 1e-3, "a real gradient"
    for one, other in zip(both[0]["weights"], both[1]["weights"], strict=True):
        assert torch.equal(one, other), "both processes go on with the same planner"


def test_an_error_in_one_process_is_everybodys_and_nobody_ends_before_all_have_saved(tmp_path):
    """Rank 1 cannot go on; rank 0 learns why, and saves for a second, for which rank 1 waits."""
    finished(torchrun(__file__, tmp_path))
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert zero["together"] == "ConnectionError: Process 1 has stopped (ValueError: too long)."
    assert one["together"] == "ValueError: too long"
    assert zero["gone"] is None, "rank 0 waits at the end"
    assert one["gone"] == "ConnectionError: Another process has ended; its own message says why."
    assert one["end"] >= zero["saved"]


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_a_run_of_two_processes_is_the_run_of_one(tmp_path):
    """The same roll-outs at step 1, word for word; the same metrics and accuracy; one writer."""
    out = finished(torchrun("train.py", *SMALL, "--output_dir", tmp_path / "two"))
    assert out.count("step   1 |") == 1, "one voice"
    assert train.main([*SMALL, "--output_dir", str(tmp_path / "one")]) == 0
    one, two = (lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert len(two) == 2
    for name in ("reward", "turns/mean", "num_tokens", "frac_reward_zero_std", "eval/accuracy"):
        assert two[0][name] == one[0][name], name
    for name in ("loss", "kl", "entropy", "grad_norm", "adapter/delta_norm"):
        assert two[0][name] == pytest.approx(one[0][name], rel=1e-3, abs=1e-6), name
    said = [
        [(row["group"], row["rollout"], row["generator"]["reply"], row["reward"], row["advantage"],
          [turn["planner"]["reply_ids"] for turn in row["turns"]])
         for row in lines(tmp_path / name / "rollouts" / "1.jsonl")]
        for name in ("one", "two")
    ]  # fmt: skip
    assert said[0] == said[1] and len(said[0]) == 6
    before = [lines(tmp_path / name / "eval_before.jsonl") for name in ("one", "two")]
    assert before[0] == before[1]
    finished(torchrun("train.py", "--resume", "--max_steps", 3, "--output_dir", tmp_path / "two"))
    assert [row["step"] for row in lines(tmp_path / "two" / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.slow
def test_ctrl_c_stops_all_processes_and_keeps_what_is_done(tmp_path):
    folder = tmp_path / "run"
    process = torchrun(
        "train.py", *SMALL, "--max_steps", 200, "--output_dir", folder, start_new_session=True,
        # a shell's background jobs ignore Ctrl-C, and so would their children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.time() + 200
    while not (folder / "checkpoint-2").exists() and time.time() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: everybody gets it
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    done = lines(folder / "metrics.jsonl")[-1]["step"]
    assert (folder / f"checkpoint-{done}" / "trainer_state.json").is_file()
    assert train.main(["--resume", "--max_steps", str(done), "--output_dir", str(folder)]) == 0


if __name__ == "__main__":  # what test_two_processes_have_the_gradient_of_one starts
    team, _ = train.join_team("cpu")
    torch.save(update_of_three_groups(team), Path(sys.argv[1]) / f"{team.rank}.pt")
    came = ending_of_two_processes(team)
    (Path(sys.argv[1]) / f"{team.rank}.json").write_text(json.dumps(came))
    torch.distributed.destroy_process_group()
