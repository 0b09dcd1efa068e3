"""Full fine-tuning, bf16 weights rounded at random, gradient checkpointing."""

import json
import shutil

import pytest
import torch

import agentflow
import eval as evaluation
import train
from tests.test_train import SMALL, few_questions, read, run  # noqa: F401 (a fixture)

BF16 = torch.bfloat16


def drift_after_100_steps(optimizer_class, dtype):
    """Mean movement of 2^20 weights, N(0, 0.02), under one constant gradient at lr 1e-6."""
    start = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02).to(BF16)
    weight = torch.nn.Parameter(start.to(dtype).clone())
    optimizer = optimizer_class([weight], lr=1e-6, betas=(0.9, 0.999), weight_decay=0.0)
    weight.grad = torch.full_like(weight, 0.5)
    for _ in range(100):
        optimizer.step()
    return (weight.detach().double() - start.double()).mean().item()


def test_a_hundred_steps_of_1e_6_move_bf16_weights_as_far_as_fp32_ones():
    """AdamW's step is the learning rate where the gradient is constant: 100 x 1e-6 = 1e-4 down.

    A bf16 weight of 0.02 has neighbours 1.2e-4 away. Rounded to the nearest, not one would move."""
    exact = drift_after_100_steps(torch.optim.AdamW, torch.float32)
    assert exact == pytest.approx(-1e-4, rel=1e-3)
    assert drift_after_100_steps(train.RoundedAdamW, BF16) == pytest.approx(exact, rel=0.01)
    nearest = drift_after_100_steps(torch.optim.AdamW, BF16)
    assert abs(nearest) < 0.5 * abs(exact), "rounding to the nearest loses the steps"


def test_rounding_at_random_keeps_bf16_numbers_and_hits_the_neighbours_in_proportion():
    """1 + 2^-9 lies a quarter of the way from 1 to its bf16 neighbour 1 + 2^-7."""
    generator = torch.Generator().manual_seed(1)
    exact = torch.tensor([1.0, -0.15625, 0.0, 2.0**120])
    assert torch.equal(train.round_at_random(exact, generator), exact.to(BF16))
    for sign in (1, -1):
        values = torch.full((100_000,), sign * (1 + 2.0**-9))
        rounded = train.round_at_random(values, generator).float() * sign
        assert set(rounded.tolist()) == {1.0, 1.0 + 2.0**-7}
        assert (rounded > 1).float().mean().item() == pytest.approx(0.25, abs=0.01)


def test_a_weight_that_is_no_number_stays_one():
    """All patterns of a NaN, among them the one whose bits overflow under noise; infinity too."""
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32)
    values = torch.cat([bits.view(torch.float32), torch.tensor([torch.inf, -torch.inf])])
    for seed in range(20):
        rounded = train.round_at_random(values, torch.Generator().manual_seed(seed))
        assert rounded[:3].isnan().all() and rounded[3:].tolist() == [torch.inf, -torch.inf]


def test_rounded_adamw_follows_adamw_where_steps_are_large():
    """200 steps down a quadratic, lr 0.01, decay 0.01: the same way as fp32 up to bf16's digits."""
    target = torch.linspace(-1, 1, 4096)
    ends = []
    for kind, dtype in ((torch.optim.AdamW, torch.float32), (train.RoundedAdamW, BF16)):
        weight = torch.nn.Parameter(torch.zeros(4096, dtype=dtype))
        optimizer = kind([weight], lr=0.01, betas=(0.9, 0.999), weight_decay=0.01)
        for _ in range(200):
            weight.grad = (weight.detach().float() - target).to(dtype)
            optimizer.step()
        ends.append(weight.detach().float())
    assert (ends[0] - target).abs().max() < 0.1, "fp32 arrives"
    assert (ends[1] - ends[0]).abs().mean() < 0.005


def test_a_resumed_optimizer_draws_the_same_random_numbers():
    ends = []
    for stopped in (False, True):
        weight = torch.nn.Parameter(torch.full((1000,), 0.02, dtype=BF16))
        optimizer = train.RoundedAdamW([weight], lr=1e-6, seed=7)
        for step in range(6):
            if stopped and step == 3:
                state = optimizer.state_dict()
                optimizer = train.RoundedAdamW([weight], lr=1e-6, seed=7)
                optimizer.load_state_dict(state)
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        ends.append(weight.detach().clone())
    assert torch.equal(*ends)


def gradients(lora_r, checkpointing):
    """Gradients of one update over two rows that share a prompt, adapter off zero."""
    backbone = agentflow.load_backbone(
        "config:tiny", "cpu", lora_r=lora_r, gradient_checkpointing=checkpointing
    )
    with torch.no_grad():
        for lora in backbone.lora.values():
            lora.B.normal_(std=0.02, generator=torch.Generator().manual_seed(3))
    rows = [
        train.Row([5, 6, 7, 8], response, [-8.0] * len(response), advantage, 0.25, 0)
        for response, advantage in (([9, 10, 11], 1.0), ([9, 12], -1.0))
    ]
    train.accumulate_gradients(backbone, rows, train.Config(lora_r=lora_r))
    return [torch.zeros(()) if p.grad is None else p.grad for p in backbone.trainable_parameters()]


def test_gradient_checkpointing_changes_no_gradient():
    for lora_r in (4, 0):
        plain, again = gradients(lora_r, False), gradients(lora_r, True)
        assert all(value.abs().max() > 0 for value in plain)
        for one, other in zip(plain, again, strict=True):
            assert torch.equal(one, other), "computed again with the gate as it was"


def test_gradient_checkpointing_keeps_less_for_backward():
    kept = []
    for checkpointing in (False, True):
        backbone = agentflow.load_backbone(
            "config:tiny", "cpu", gradient_checkpointing=checkpointing
        )
        sizes = {}

        def keep(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = {p.untyped_storage().data_ptr() for p in backbone.model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = backbone.packed_hidden([list(range(2, 300))], [[1] * 50], 1)
        kept.append(sum(size for place, size in sizes.items() if place not in weights))
        hidden.sum().backward()
    assert kept[1] < kept[0] / 3, kept


# --- All weights, from the command line --------------------------------------------------------

FULL = ["--lora_r", "0", "--learning_rate", "1e-4", "--deterministic", *SMALL]


@pytest.fixture(scope="module")
def full_run(tmp_path_factory, few_questions):  # noqa: F811
    folder = tmp_path_factory.mktemp("full") / "run"
    assert run("--max_steps", 2, *FULL, "--eval_data", few_questions, "--output_dir", folder) == 0
    return folder


def test_full_fine_tuning_moves_the_planner_and_leaves_the_frozen_copy(full_run):
    rows = read(full_run / "metrics.jsonl")
    assert rows[0]["adapter/delta_norm"] > 0 and rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows[1]["kl"] > 0, "the reference is the start weights, not the moved ones"
    assert rows[1]["sampling/sampling_logp_difference/max"] < 1e-4, "sampled by the new weights"
    backbone = agentflow.load_backbone("builtin", "cpu", lora_r=0)
    start = agentflow.load_backbone("builtin", "cpu", lora_r=None)
    backbone.load_planner(full_run)
    for name, weight in backbone.frozen.named_parameters():
        assert torch.equal(weight, start.model.get_parameter(name)), name
    moved = [
        not torch.equal(weight, start.model.get_parameter(name))
        for name, weight in backbone.policy.named_parameters()
    ]
    assert all(moved)


def test_a_full_checkpoint_is_a_plain_hugging_face_folder(full_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = full_run / "checkpoint-2" / "model"
    model = AutoModelForCausalLM.from_pretrained(place)
    assert AutoTokenizer.from_pretrained(place).chat_template
    backbone = agentflow.load_backbone("builtin", "cpu", lora_r=0)
    backbone.load_planner(full_run / "checkpoint-2")
    ids = [1, 300, 301, 302]
    hidden = backbone.packed_hidden([ids], [[303]], 1)
    theirs = model(torch.tensor([ids])).logits[0, -1:]
    torch.testing.assert_close(hidden @ backbone.lm_head_weight.T, theirs, rtol=0, atol=1e-4)
    config = json.loads((place / "config.json").read_text())
    assert "agentflow" not in json.dumps(config)


def test_a_full_run_resumes_bit_for_bit_and_is_measured_again(
    full_run, few_questions, tmp_path  # noqa: F811
):
    folder = tmp_path / "run"
    common = [*FULL, "--eval_data", few_questions, "--output_dir", folder]
    assert run("--max_steps", 1, *common) == 0
    assert run("--max_steps", 2, *common, "--resume") == 0
    name = "checkpoint-2/model/model.safetensors"
    assert (folder / name).read_bytes() == (full_run / name).read_bytes()
    result = tmp_path / "result.json"
    assert evaluation.main(["--adapter", str(full_run), "--json", str(result)]) == 0
    summary = json.loads((full_run / "summary.json").read_text())
    assert json.loads(result.read_text())["accuracy"] == summary["accuracy_after"]


def test_generation_settings_that_contradict_each_other_stop_no_checkpoint(tmp_path):
    """Published models have such: without sampling, but with a temperature."""
    backbone = agentflow.load_backbone("builtin", "cpu", lora_r=0)
    backbone.policy.generation_config.temperature = 0.6
    backbone.policy.generation_config.eos_token_id = [1, 2]
    backbone.save_planner(tmp_path)
    saved = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [1, 2]
    assert backbone.policy.generation_config.temperature == 0.6
    backbone.load_planner(tmp_path)


def test_full_weights_that_are_damaged_or_missing_are_named(full_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(full_run, folder)
    weights = folder / "checkpoint-2" / "model" / "model.safetensors"
    content = weights.read_bytes()
    backbone = agentflow.load_backbone("builtin", "cpu", lora_r=0)
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="damaged"):
        backbone.load_planner(folder)
    weights.unlink()
    with pytest.raises(ValueError, match="lacks weights"):
        backbone.load_planner(folder)
    with pytest.raises(ValueError, match="use .*model"):
        evaluation.merge(
            evaluation.EvalConfig(adapter=str(full_run), merge_to=str(tmp_path / "m"), lora_r=0)
        )
