"""Presets, --dry_run, and the memory plan: its counts against real models, optimisers, key and
value buffers, and what autograd keeps."""

import dataclasses
import json
import socket
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import agentflow
import train
from tools import Ask

TINY = train.shape_of(agentflow.known_config("tiny"))
SEVEN_B = train.shape_of(agentflow.known_config("Qwen2.5-7B-Instruct"))
TOKENIZER = agentflow.load_tokenizer(str(agentflow.BUILTIN))


def run(*arguments):
    return train.main([str(argument) for argument in arguments])


def config_of(preset="laptop", **flags):
    return train.Config(**{**train.PRESETS[preset], "preset": preset, **flags})


def tiny_backbone(dtype=torch.float32, lora_r=16, **changed):
    config = agentflow.known_config("tiny")
    for name, value in changed.items():
        setattr(config, name, value)
    model = agentflow.random_model(config, "cpu", dtype)
    return agentflow.Backbone(model, TOKENIZER, lora_r=lora_r, slots=4), train.shape_of(config)


# --- Random weights of a known shape -----------------------------------------------------------


def test_a_known_shape_with_random_weights_generates_ids_that_the_tokenizer_has_no_text_for():
    backbone = agentflow.load_backbone("config:tiny", "cpu")
    request = agentflow.Request(Ask("planner", "Be brief.", "Why?"), 1.0, 300, (0, 1))
    (reply,) = backbone.generate([request])
    assert max(reply.response_ids) >= len(TOKENIZER), "ids above the vocabulary are drawn too"
    known = [i for i in reply.response_ids if i < len(TOKENIZER)]
    assert reply.text == TOKENIZER.decode(known, skip_special_tokens=True), "and are no text"


def test_random_weights_are_the_same_each_time_so_that_an_adapter_fits_them():
    one, two = (agentflow.load_backbone("config:tiny", "cpu", lora_r=None) for _ in range(2))
    pairs = zip(one.model.parameters(), two.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert one.dtype == torch.float32, "as on any CPU"


def test_a_shape_that_is_not_known_is_refused_with_the_list():
    with pytest.raises(ValueError, match="config:tiny, config:SmolLM2-135M-Instruct"):
        agentflow.load_backbone("config:Qwen9", "cpu")


# --- Counts against the real thing -------------------------------------------------------------

PUBLISHED = {  # parameters, as the models' own weight files hold them
    "SmolLM2-135M-Instruct": 134_515_008,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
}


@pytest.mark.parametrize("name", [*agentflow.CONFIGS, "builtin", "biases everywhere"])
def test_parameters_are_those_of_the_model_that_transformers_builds(name):
    if name == "builtin":
        config = AutoConfig.from_pretrained(agentflow.BUILTIN)
    elif name == "biases everywhere":
        config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, head_dim=16,
                             num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                             attention_bias=True, mlp_bias=True)  # fmt: skip
    else:
        config = agentflow.known_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = train.shape_of(config)
    assert shape.parameters() == sum(p.numel() for p in model.parameters())
    assert shape.parameters() == PUBLISHED.get(name, shape.parameters())


def test_a_tokens_keys_and_values_are_as_large_as_the_engine_makes_them():
    """Qwen2.5-7B: keys and values, 28 layers, 4 heads of 128 numbers, 2 bytes: 57,344."""
    assert SEVEN_B.kv_bytes(2) == 2 * 28 * 4 * 128 * 2 == 57_344
    for dtype, number in ((torch.float32, 4), (torch.bfloat16, 2)):
        backbone, shape = tiny_backbone(dtype)
        assert shape.kv_bytes(number) == backbone.lanes[0].zeros(1, 1).nbytes


@pytest.mark.parametrize("lora_r", [16, 0])
def test_what_a_run_always_keeps_is_what_weights_gradients_and_adamw_hold(lora_r):
    backbone, shape = tiny_backbone(lora_r=lora_r)
    trained = backbone.trainable_parameters()
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    backbone.packed_hidden([[5, 6, 7]], [[8, 9]], gate=1).sum().backward()
    for parameter in trained:  # the LM head is tied, so each has a gradient already
        assert parameter.grad is not None
    optimizer.step()
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg",
                                                                             "exp_avg_sq")]
    frozen = [p for p in backbone.frozen.parameters() if not p.requires_grad]
    real = {
        "weights (frozen)": frozen,
        "adapter" if lora_r else "weights (policy)": trained,
        "gradients": [parameter.grad for parameter in trained],
        "AdamW's moments": states,
    }
    plan = train.memory_plan(config_of(lora_r=lora_r), shape, on_cpu=True)
    assert plan.always == {name: sum(t.nbytes for t in many) for name, many in real.items()}


def test_an_adapter_of_rank_16_on_qwen_7b_has_40_million_numbers():
    """A layer: q 7168, k and v 4096 each, o 7168, three of the MLP 22,528 each = 90,112 (in + out);
    times 16 times 28 layers."""
    assert SEVEN_B.lora_parameters(16) == 90_112 * 16 * 28 == 40_370_176


def test_all_weights_of_qwen_7b_take_76_gb_and_small_ones_are_trained_in_fp32():
    plan = train.memory_plan(config_of("paper"), SEVEN_B, on_cpu=False)
    assert sum(plan.always.values()) == 7_615_616_512 * (2 + 2 + 2 + 4)  # 76.2 GB
    small = train.shape_of(agentflow.known_config("Qwen2.5-1.5B-Instruct"))
    plan = train.memory_plan(config_of("paper"), small, on_cpu=False)
    assert sum(plan.always.values()) == 1_543_714_304 * (2 + 4 + 4 + 8)
    assert sum(plan.step.values()) == 1_543_714_304 * 4, "the roots of AdamW's second moments"


def test_slots_that_grow_hold_the_old_keys_beside_the_new():
    backbone, shape = tiny_backbone()
    config = config_of(slots=4, max_prompt_length=900, max_frozen_length=96,
                       max_completion_length=60)  # fmt: skip
    lane = backbone.lanes[0]
    lane.reserve(4, 896)
    before = lane.kv.nbytes
    lane.reserve(4, 996)  # the longest prompt and reply: 1,024 in steps of 128
    plan = train.memory_plan(config, shape, on_cpu=True).rollouts
    assert plan["KV slots"] == lane.kv.nbytes
    assert plan["KV slots, while they grow"] == before
    many = dataclasses.replace(config, slots=500, num_questions=1, num_generations=3,
                               eval_questions=4)  # fmt: skip
    plan = train.memory_plan(many, shape, on_cpu=True).rollouts
    assert plan["KV slots"] == lane.kv.nbytes, "four questions at once never fill 500 slots"
    two = dataclasses.replace(config, lora_r=0)
    assert train.memory_plan(two, shape, on_cpu=True).rollouts["KV slots"] == 2 * lane.kv.nbytes


def kept_by_autograd(backbone, prompts, responses):
    """Bytes of the distinct storages that backward will need, weights not counted."""
    parameters = [*backbone.policy.parameters(), *backbone.policy.buffers()]
    weights = {tensor.untyped_storage().data_ptr() for tensor in parameters}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        backbone.packed_hidden(prompts, responses, gate=1)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype, lora_r", [(torch.float32, 16), (torch.bfloat16, 16),
                                           (torch.float32, 0)])
@pytest.mark.parametrize("replies", [1, 6])
def test_activations_are_what_autograd_keeps(dtype, lora_r, replies):
    """Prompt 200, replies of 50 tokens, of which the last is not fed: P = 200 + 49 a reply, and
    each reply's node looks at 249 keys. One reply makes a single node. What differs are masks,
    which the plan counts apart, and rotary tables."""
    backbone, shape = tiny_backbone(dtype, lora_r, hidden_size=288, intermediate_size=768,
                                    num_attention_heads=9, num_key_value_heads=3, head_dim=64,
                                    num_hidden_layers=4)  # fmt: skip
    prompts = [list(range(10, 210))] * replies
    responses = [[1000 + 100 * reply + i for i in range(50)] for reply in range(replies)]
    kept = kept_by_autograd(backbone, prompts, responses)
    tokens = 200 + 49 * replies
    seen = 249 if replies == 1 else 200 + 249 * replies
    number = dtype.itemsize
    planned = train.activations(shape, tokens, seen, number, lora_r, checkpointing=False)
    assert planned == pytest.approx(kept, rel=0.03)


def test_checkpointing_keeps_each_layers_input_and_one_layer():
    """P 10, D 64, fp32, 2 layers: inputs 10 * 64 * 4 * 2; one layer; the last norm's input and what
    its weight multiplies, 2 * 10 * 64 * 4."""
    layer = train.layer_activations(TINY, 10, 10, 4, 0)
    whole = train.activations(TINY, 10, 10, 4, 0, checkpointing=False)
    lean = train.activations(TINY, 10, 10, 4, 0, checkpointing=True)
    assert whole == 2 * layer + 5120 and lean == 5120 + layer + 5120


@pytest.mark.parametrize("lora_r, passes", [(0, 3), (1, 2)])
def test_the_updates_arithmetic_is_what_torch_counts(lora_r, passes):
    """All weights: forward, and twice that backward. LoRA: backward only to the inputs, except
    those of the first layer; its products (rank 1) and that layer stay under a twentieth."""
    backbone, shape = tiny_backbone(lora_r=lora_r, num_hidden_layers=12)
    with FlopCounterMode(display=False) as counter:
        backbone.packed_hidden([list(range(10, 40))], [[50, 51, 52, 53]], gate=1).sum().backward()
    by_operator = counter.get_flop_counts()["Global"]
    products = sum(n for name, n in by_operator.items() if "mm" in str(name))
    assert products == pytest.approx(33 * 2 * shape.matrices() * passes, rel=0.05)
    config = config_of(lora_r=lora_r, beta=0.0)
    lean, checked = (
        train.work_of(dataclasses.replace(config, gradient_checkpointing=again), shape)
        for again in (False, True)
    )
    attention = lean.packed * 4 * shape.layers * shape.heads * shape.head * 375 / 2
    assert lean.update_flops - 3 * attention == lean.packed * 2 * shape.matrices() * passes
    assert checked.update_flops - lean.update_flops == pytest.approx(
        lean.packed * 2 * shape.matrices() + attention
    )


def test_a_steps_tokens_by_hand():
    """Q 2, G 4, T 3, limits 400 / 80 / 40: prompts of 100, replies of 20 and 10. 24 planner calls;
    24 executors, 24 verifiers, 8 generators, 2 analysts."""
    config = config_of(num_questions=2, num_generations=4, max_prompt_length=400,
                       max_completion_length=80, max_frozen_length=40)  # fmt: skip
    work = train.work_of(config, TINY)
    assert work.prefilled == (24 + 58) * 100
    assert work.decoded == {"planner": 480, "frozen": 580}
    assert work.packed == 8 * 100 + 480 and work.scored == 480
    remote = train.work_of(dataclasses.replace(config, frozen_url="http://x/v1"), TINY)
    assert remote.prefilled == 2400 and remote.decoded["frozen"] == 0


def test_decoding_is_as_slow_as_reading_weights_keys_and_values():
    """Qwen2.5-7B, one slot, one question, G 2, T 1, limits 4000 / 400 / 400: two replies of 100
    tokens from planner, executor, verifier and generator, one from the analyst, 900 tokens. Each
    reads 15.231 GB of weights, 1,050 tokens' keys and values (0.060 GB), and makes the fp32 head
    (4.360 GB): 19.651 GB, at 60 % of 1e12 bytes/s 0.03275 s."""
    config = config_of("single_gpu_80gb", num_questions=1, num_generations=2, max_turns=1, slots=1,
                       max_prompt_length=4000, max_completion_length=400,
                       max_frozen_length=400)  # fmt: skip
    card = train.Card(memory=80e9, flops=1e30, flops_fp32=1e30, bandwidth=1e12)
    rollouts, update = train.seconds_of(config, SEVEN_B, card)
    assert rollouts == pytest.approx(900 * 0.03275, rel=1e-3) and update < 1e-9


# --- What fits ---------------------------------------------------------------------------------


def test_the_largest_slots_and_micro_batch_fit_and_one_more_does_not():
    config = config_of("single_gpu_80gb")

    def plan(**flags):
        return train.memory_plan(dataclasses.replace(config, **flags), SEVEN_B, on_cpu=False)

    slots = train.largest_slots(config, SEVEN_B, False, 80e9)
    assert plan(slots=slots).rollout_peak() <= 80e9 < plan(slots=slots + 1).rollout_peak()
    tokens = train.largest_micro_batch(config, SEVEN_B, False, 80e9)
    assert plan(micro_batch_tokens=tokens).update_peak() <= 80e9
    assert plan(micro_batch_tokens=tokens + 1).update_peak() > 80e9
    assert train.largest_slots(config, SEVEN_B, False, 15e9) == 0, "the weights alone are more"


@pytest.mark.parametrize("preset, model", [
    ("single_gpu_24gb", "Qwen2.5-0.5B-Instruct"),
    ("single_gpu_24gb", "Qwen2.5-1.5B-Instruct"),
    ("single_gpu_24gb", "Qwen2.5-3B-Instruct"),
    ("single_gpu_80gb", "Qwen2.5-7B-Instruct"),
    ("paper", "Qwen2.5-7B-Instruct"),
])  # fmt: skip
def test_each_gpu_preset_fits_the_card_that_it_is_for(preset, model):
    shape = train.shape_of(agentflow.known_config(model))
    plan = train.memory_plan(config_of(preset), shape, on_cpu=False)
    assert plan.peak() <= train.PRESET_GB[preset] * 1e9


def test_the_paper_preset_needs_more_than_80_gb():
    plan = train.memory_plan(config_of("paper", slots=1), SEVEN_B, on_cpu=False)
    assert plan.update_peak() > 80e9


# --- Presets -----------------------------------------------------------------------------------


def flags(*arguments):
    return agentflow.parse_flags(
        train.Config, [*arguments], "", train.flags_of_preset([*arguments])
    )


def test_a_preset_stands_in_for_the_defaults_and_a_flag_beside_it_wins():
    assert flags() == flags("--preset", "laptop") == train.Config()
    config = flags("--learning_rate", "3e-5", "--preset=paper")
    assert config.learning_rate == 3e-5 and config.preset == "paper"
    assert config.lora_r == 0 and config.temperature == 0.5 and config.epsilon_high == 0.3


@pytest.mark.parametrize("name", train.PRESETS)
def test_every_preset_names_flags_that_exist_with_values_of_their_type(name):
    for flag, value in train.PRESETS[name].items():
        assert type(value) is type(getattr(train.Config, flag)), flag


def test_an_unknown_preset_is_one_sentence_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as stop:
        run("--preset", "gpu")
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.startswith("error: ") and "single_gpu_24gb" in told
    assert told.count("\n") == 1


def test_a_run_prints_its_preset_and_is_resumed_with_it(tmp_path, capsys):
    few = tmp_path / "few.jsonl"
    few.write_text('{"question": "2 + 2?", "answer": "4"}\n' * 2, encoding="utf-8")
    folder = tmp_path / "run"
    assert run("--preset", "smollm2", "--model", "config:tiny", "--max_steps", 1, "--device", "cpu",
               "--num_questions", 1, "--num_generations", 2, "--max_turns", 1, "--offline",
               "--max_completion_length", 4, "--max_frozen_length", 4, "--eval_data", few,
               "--output_dir", folder) == 0  # fmt: skip
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "preset smollm2: " + " ".join(
        f"{flag}={value}" for flag, value in train.PRESETS["smollm2"].items()
    )
    saved = json.loads((folder / "run_config.json").read_text())
    assert saved["preset"] == "smollm2" and saved["model"] == "config:tiny"
    assert saved["learning_rate"] == 1e-4, "the preset's, where no flag says otherwise"
    assert run("--resume", "--output_dir", folder, "--dry_run") == 0
    told = capsys.readouterr().out
    assert told.startswith("preset smollm2: ") and "config:tiny" in told
    assert run("--resume", "--output_dir", folder, "--preset", "laptop") == 2
    assert "preset = 'smollm2'" in capsys.readouterr().err, "no run goes on under another's name"


def test_the_readmes_plan_is_the_one_that_is_printed(capsys):
    """From the memory's table on: what stands before it is about the machine."""
    run("--preset", "single_gpu_80gb", "--model", "config:Qwen2.5-7B-Instruct", "--dry_run")
    told = capsys.readouterr().out
    plan = told[told.index("memory in GB") : told.index("\n\nIt ")]
    assert plan in (Path(train.__file__).parent / "README.md").read_text(encoding="utf-8")


# --- --dry_run ---------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """No network, no keys, no model, an empty cache, and a folder of its own."""

    def refuse(*_, **__):
        raise AssertionError("a dry run loads nothing and asks nobody")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(train.agentflow, "load_backbone", refuse)
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path / "cache"))
    for name in ("SERPER_API_KEY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def status_of(printed):
    """check -> its status."""
    lines = [line.split() for line in printed.splitlines()]
    return {line[1]: line[0] for line in lines if line and line[0] in ("OK", "WARN", "FAIL")}


def test_the_default_run_can_start_and_nothing_is_loaded_or_written(alone, capsys):
    assert run("--dry_run", "--device", "cpu") == 0
    told = capsys.readouterr().out
    status = status_of(told)
    assert status.pop("sandbox") in ("OK", "WARN"), "which protections hold is the machine's affair"
    assert status == dict.fromkeys(
        ("packages", "device", "flags", "model", "tools", "data", "disk", "memory"), "OK"
    )
    for part in ("weights (frozen)", "kept prompts", "AdamW's moments", "H200", "40%", "60%"):
        assert part in told
    assert list(alone.iterdir()) == [], "nothing was made here"


@pytest.mark.parametrize("arguments, check, next_step", [
    (("--no-offline",), "tools", "SERPER_API_KEY"),
    (("--data", "nowhere.jsonl"), "data", "nowhere.jsonl"),
    (("--data", "nq", "--offline"), "data", "Load it once"),
    (("--model", "config:Qwen9"), "model", "config:tiny"),
    (("--model", "nowhere"), "model", "hub name"),
    (("--device", "cuda:9"), "device", "--device cpu"),
    (("--num_generations", "1"), "flags", "at least 2"),
    (("--num_questions", "0"), "flags", "--num_questions"),
    (("--slots", "0"), "flags", "--slots"),
    (("--save_steps", "0", "--keep", "0"), "flags", "--save_steps"),
    (("--slots", "9999999"), "memory", "--slots"),
    (("--report_to", "no_such_package"), "flags", "tensorboard"),
])  # fmt: skip
def test_what_cannot_work_fails_with_the_next_step(alone, capsys, arguments, check, next_step):
    if check == "device" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    device = () if check == "device" else ("--device", "cpu")
    assert run("--dry_run", *device, *arguments) == 1
    told = capsys.readouterr().out
    failed = {name for name, status in status_of(told).items() if status == "FAIL"}
    assert failed == {check}
    (line,) = [line for line in told.splitlines() if line.startswith("FAIL")]
    assert next_step in line


def test_hub_names_are_planned_by_the_table_and_strangers_are_a_warning(alone, capsys):
    common = ("--dry_run", "--device", "cpu", "--model")
    run(*common, "Qwen/Qwen2.5-7B-Instruct", "--data", "nq")
    told = capsys.readouterr().out
    status = status_of(told)
    assert "7,615,616,512 parameters by the table" in told
    assert status["model"] == "WARN" and status["data"] == "WARN", "both would be downloaded"
    assert "7,615,616,512 parameters of 4 bytes" in told, "fp32 on a CPU"
    assert run(*common, "nobody/knows-this") == 0
    told = capsys.readouterr().out
    assert status_of(told)["model"] == "WARN" and "memory" not in status_of(told)


def test_a_local_folder_is_planned_by_its_config(alone, capsys):
    agentflow.known_config("Qwen2.5-0.5B-Instruct").save_pretrained(alone / "model")
    assert run("--dry_run", "--device", "cpu", "--model", alone / "model", "--slots", 2) == 0
    assert "494,032,768 parameters by its config.json" in capsys.readouterr().out


def test_a_folder_that_holds_a_run_is_not_written_over(alone, capsys):
    (alone / "run").mkdir()
    (alone / "run" / "run_config.json").write_text("{}")
    assert run("--dry_run", "--device", "cpu", "--output_dir", alone / "run") == 1
    assert status_of(capsys.readouterr().out)["disk"] == "FAIL"
