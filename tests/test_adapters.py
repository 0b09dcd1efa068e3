"""Adapters travel: between PEFT and us in both directions, and merged into a plain folder.

The models are test_engine's: two blocks, width 32, weights drawn wide, so that a layer left out or
a wrong scale moves log-probs by much more than rounding. The oracle is PEFT's own forward.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import agentflow
import eval as evaluation
from tests.test_engine import (
    backbone,
    hf_logp,
    ragged_requests,
    tiny_model,
    toy_tokenizer,
)

peft = pytest.importorskip("peft")
ROOT = Path(__file__).resolve().parent.parent
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WEIGHTS = "adapter_model.safetensors"


def peft_adapter(folder, model=None, **options):
    """An adapter that PEFT makes and saves: rank 4, A and B drawn at random."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": NAMES, **options}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    made = peft.get_peft_model(copy.deepcopy(model or tiny_model()), config)
    random = torch.Generator().manual_seed(1)
    for name, weight in made.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=random) * 0.2
    made.save_pretrained(folder)
    return folder


def in_bf16(folder):
    file = folder / WEIGHTS
    save_file({name: x.bfloat16() for name, x in load_file(file).items()}, file)


def planner_differs(made, oracle):
    """The largest difference of the planner's log-probs from those of a Hugging Face model."""
    replies = made.generate(ragged_requests(3, module="planner"))
    return max(
        (torch.tensor(x.logp) - hf_logp(oracle, x.prompt_ids, x.response_ids)).abs().max().item()
        for x in replies
    )


# ---------------------------------------------------------------------------- from PEFT, to PEFT


@pytest.mark.parametrize(
    "options, layers",
    [
        ({}, 14),
        ({"lora_alpha": 5}, 14),
        ({"target_modules": ["q_proj", "v_proj"]}, 4),
        ({"target_modules": "all-linear"}, 14),
        ({"target_modules": r".*layers\.1\..*(up|down)_proj"}, 2),
        ({"layers_to_transform": [0]}, 7),
        ({"exclude_modules": ["o_proj"]}, 12),
        ({"init_lora_weights": "gaussian", "lora_dropout": 0.3}, 14),
    ],
    ids=lambda value: "-".join(value) or "all" if isinstance(value, dict) else str(value),
)
def test_an_adapter_made_by_peft_gives_pefts_logits_here(tmp_path, options, layers):
    """Loaded over another adapter: what it leaves out must be the bare layer, and no old one."""
    model = tiny_model()
    peft_adapter(tmp_path, model, **options)
    made = backbone(model, adapter=True, lora_r=4, lora_alpha=12)
    made.load_adapter(tmp_path)
    assert sum(bool(lora.B.any()) for lora in made.lora.values()) == layers
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).eval()
    assert planner_differs(made, theirs) < 1e-5
    assert planner_differs(made, model) > 1e-2, "the adapter does something"


def test_an_adapter_in_bf16_is_read_into_fp32(tmp_path):
    model = tiny_model()
    in_bf16(peft_adapter(tmp_path, model))
    made = backbone(model, lora_r=4)
    made.load_adapter(tmp_path)
    assert all(x.dtype == torch.float32 for x in made.trainable_parameters())
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).eval()
    assert planner_differs(made, theirs) < 1e-5


def test_ours_goes_through_peft_and_comes_back_equal(tmp_path):
    """Saved by us, loaded and saved by PEFT, loaded by us: the same tensors and log-probs."""
    model = tiny_model("llama")
    ours, back = backbone(model, adapter=True, lora_r=4, lora_alpha=6), backbone(model, lora_r=4)
    ours.save_adapter(tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "ours").eval()
    assert planner_differs(ours, theirs) < 1e-5
    theirs.save_pretrained(tmp_path / "theirs")
    back.load_adapter(tmp_path / "theirs")
    assert back.lora_alpha == 6
    state = back.adapter_state()
    assert all(torch.equal(x, state[name]) for name, x in ours.adapter_state().items())
    assert planner_differs(back, theirs) < 1e-5


@pytest.mark.parametrize(
    "name, value",
    [
        ("bias", "all"), ("modules_to_save", ["lm_head"]), ("use_dora", True),
        ("use_rslora", True), ("rank_pattern", {"q_proj": 2}), ("alpha_pattern", {"q_proj": 2}),
        ("init_lora_weights", "pissa"), ("lora_bias", True),
    ],
)  # fmt: skip
def test_what_is_more_than_plain_lora_is_refused_by_its_name(tmp_path, name, value):
    """All of them made by PEFT. Refused before anything is changed."""
    peft_adapter(tmp_path, **{name: value})
    made = backbone(adapter=True, lora_r=4)
    before = made.adapter_state()
    with pytest.raises(ValueError, match=f"more than plain LoRA: {name} is .*merge_and_unload"):
        made.load_adapter(tmp_path)
    assert all(torch.equal(x, before[key]) for key, x in made.adapter_state().items())


def test_adapters_for_other_models_and_ranks_are_refused_also_where_they_are_subsets(tmp_path):
    """A third block that we lack; a second block that they lack; a layer that we never wrap."""
    made = backbone(lora_r=4)
    with pytest.raises(ValueError, match="--lora_r 8"):
        made.load_adapter(peft_adapter(tmp_path / "rank", r=8))
    with pytest.raises(ValueError, match=r"embed_tokens.* is \(.*\) there and None here"):
        made.load_adapter(peft_adapter(tmp_path / "embed", target_modules=["embed_tokens"]))
    two = peft_adapter(tmp_path / "two", target_modules=["q_proj"])
    file = two / WEIGHTS
    tensors = load_file(file)
    first = {name: x for name, x in tensors.items() if ".layers.0." in name}
    save_file(first, file)
    with pytest.raises(ValueError, match=r"layers.1.self_attn.q_proj.lora_A.weight is None there"):
        made.load_adapter(two)
    third = {name.replace(".layers.1.", ".layers.2."): x.clone() for name, x in tensors.items()}
    save_file({**tensors, **third}, file)
    with pytest.raises(ValueError, match=r"layers.2.self_attn.q_proj.lora_A.*and None here"):
        made.load_adapter(two)


def test_a_pickled_adapter_is_refused_with_what_to_do(tmp_path):
    peft_adapter(tmp_path)
    torch.save(load_file(tmp_path / WEIGHTS), tmp_path / "adapter_model.bin")
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ValueError, match="save it as safetensors"):
        backbone(lora_r=4).load_adapter(tmp_path)


# --------------------------------------------------------------------------------------- merging


def base_and_adapter(folder, kind="qwen2", tied=True, dtype=torch.float32):
    """A model's folder without generation settings, and an adapter's folder beside it."""
    config = tiny_model(kind).config
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model = (AutoModelForCausalLM.from_config(config)).to(dtype).eval()
    model.save_pretrained(folder / "base")
    (folder / "base" / "generation_config.json").unlink()
    config = folder / "base" / "config.json"  # in a hand of its own: a rewritten one would show
    config.write_text(json.dumps(json.loads(config.read_text()), separators=(",", ":")))
    toy_tokenizer().save_pretrained(folder / "base")
    peft_adapter(folder / "adapter", model.float(), target_modules=["q_proj", "down_proj"])
    return folder / "base", folder / "adapter"


def merge(base, adapter, folder):
    return evaluation.main(
        ["--model", str(base), "--adapter", str(adapter), "--merge_to", str(folder)]
    )


@pytest.mark.parametrize("kind, tied", [("qwen2", True), ("llama", False)])
def test_a_merged_folder_is_a_plain_model_with_the_planners_logits(tmp_path, capsys, kind, tied):
    """Read by transformers and by us; configuration and tokenizer are the base's byte for byte."""
    base, adapter = base_and_adapter(tmp_path, kind, tied)
    assert merge(base, adapter, tmp_path / "merged") == 0
    said = capsys.readouterr().out
    assert f"merged: {tmp_path / 'merged'} (float32" in said and "all modules" in said
    assert "rounds away" not in said
    assert {file.name for file in tmp_path.iterdir()} == {"base", "adapter", "merged"}
    names = {file.name for file in base.iterdir()}
    assert {file.name for file in (tmp_path / "merged").iterdir()} == names
    for name in names - {"model.safetensors"}:
        written = (tmp_path / "merged" / name).read_bytes()
        assert written == (base / name).read_bytes() and b"agentflow" not in written
    assert ("lm_head.weight" in load_file(tmp_path / "merged" / "model.safetensors")) is not tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert loaded.config._attn_implementation != agentflow.ATTENTION
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    bare = AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(bare), adapter).eval()
    ours = agentflow.load_backbone(str(tmp_path / "merged"), "cpu", lora_r=None)
    assert planner_differs(ours, theirs) < 1e-5 and planner_differs(ours, bare) > 1e-2
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    torch.testing.assert_close(loaded(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5)


def test_a_bf16_model_is_merged_in_fp32_and_written_in_bf16_also_on_a_cpu(tmp_path, capsys):
    """Each weight is the nearest bf16 number to W + 8/4 B A, which fp64 finds here."""
    base, adapter = base_and_adapter(tmp_path, dtype=torch.bfloat16)
    (base / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.5}')
    assert merge(base, adapter, tmp_path / "merged") == 0
    assert "bfloat16 rounds away" in capsys.readouterr().out
    old, low = load_file(base / "model.safetensors"), load_file(adapter / WEIGHTS)
    new = load_file(tmp_path / "merged" / "model.safetensors")
    assert new.keys() == old.keys()
    for name, weight in old.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in low:
            A, B = (low[f"{layer}.lora_{part}.weight"].double() for part in "AB")
            weight = (weight.double() + 2 * (B @ A)).bfloat16()
            assert (new[name] != weight).float().mean() < 1e-3  # ties of fp32 and fp64
        assert new[name].dtype == torch.bfloat16
        torch.testing.assert_close(new[name], weight, rtol=0.01, atol=1e-6)
    settings = "generation_config.json"  # settings that transformers reads, but refuses to write
    assert (tmp_path / "merged" / settings).read_bytes() == (base / settings).read_bytes()


def test_merging_takes_no_folder_that_holds_something(tmp_path, capsys):
    base, adapter = base_and_adapter(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    assert merge(base, adapter, tmp_path / "full") == 2
    assert "is there already: choose a new folder" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["letter.txt"]
    (tmp_path / "empty").mkdir()
    assert merge(base, adapter, tmp_path / "empty") == 0
    assert (tmp_path / "empty" / "config.json").is_file()
    assert evaluation.main(["--merge_to", str(tmp_path / "new")]) == 2
    assert "name both" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_base_from_the_hub_gives_its_tokenizer_from_the_cache(tmp_path):
    """A cache as the hub's client lays it out, read offline."""
    base, adapter = base_and_adapter(tmp_path)
    kept = tmp_path / "home" / "hub" / "models--someone--tiny"
    (kept / "snapshots").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    base.rename(kept / "snapshots" / ("0" * 40))
    done = subprocess.run(
        [sys.executable, "eval.py", "--model", "someone/tiny", "--adapter", str(adapter),
         "--merge_to", str(tmp_path / "merged")],
        cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for file in (kept / "snapshots" / ("0" * 40)).iterdir():
        if file.name != "model.safetensors":
            assert (tmp_path / "merged" / file.name).read_bytes() == file.read_bytes()
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "someone" not in json.dumps(config)


# ------------------------------------------------------------------- one question, as in the run


def test_one_question_is_asked_with_the_runs_model_tools_and_limits(tmp_path, capsys, monkeypatch):
    """Of the run: two tools, offline, replies of 5 and 7 tokens. A flag that is given counts."""
    made = agentflow.load_backbone("builtin", "cpu", lora_r=4)
    made.save_adapter(tmp_path / "checkpoint-1")
    run = {
        "model": "builtin", "tools": "Library_Search_Tool,Python_Coder_Tool", "offline": True,
        "corpus": "builtin", "max_turns": 1, "max_completion_length": 5, "max_frozen_length": 7,
        "max_prompt_length": 900, "eval_temperature": 0.0, "temperature": 1.0, "device": "cuda",
    }  # fmt: skip
    (tmp_path / "run_config.json").write_text(json.dumps(run))
    seen = {}

    def asking(question, tools, limits):
        seen.update(tools=tools, limits=limits)
        return answer_question(question, tools, limits)

    def driving(flows, keys, backbone, sampling, **more):
        seen.update(sampling=sampling)
        return drive(flows, keys, backbone, sampling, **more)

    answer_question, drive = agentflow.answer_question, agentflow.drive
    monkeypatch.setattr(agentflow, "answer_question", asking)
    monkeypatch.setattr(agentflow, "drive", driving)
    asked = ["What is 2 times 3?", "--adapter", str(tmp_path / "checkpoint-1"), "--device", "cpu"]
    assert agentflow.main(asked) == 0
    assert [tool.name for tool in seen["tools"]] == ["Python_Coder_Tool", "Library_Search_Tool"]
    assert seen["sampling"] == agentflow.Sampling(0.0, 5, 7)
    assert (seen["limits"].max_turns, seen["limits"].max_prompt_length) == (1, 900)
    assert agentflow.main([*asked, "--max_frozen_length", "9"]) == 0
    assert seen["sampling"] == agentflow.Sampling(0.0, 5, 9)
    assert "Question: What is 2 times 3?" in capsys.readouterr().out
    (tmp_path / "run_config.json").write_text("{}")
    assert agentflow.main(asked) == 2
    assert "run_config.json is damaged" in capsys.readouterr().err
