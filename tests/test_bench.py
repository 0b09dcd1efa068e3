"""tests/bench.py: the run of a 7B's size passes with a tiny model, and its figures are right."""

import json
from types import SimpleNamespace

import pytest
import torch

import agentflow
from tests import bench

# Of config:tiny, 2 layers: queries and outputs 64 x 64, keys and values 64 x 32, three of 64 x 128
N = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
HEAD = 4096 * 64


def test_the_run_of_a_7b_passes_with_a_tiny_model(tmp_path, monkeypatch):
    """2 x 2 roll-outs of three turns: head 64, question 16, memory 24 a turn, end 8, reply 8.

    Prefill: the head and each question once, then what is new in each roll-out's turn: 64 +
    2 (16 + 8) + 2 x 4 (24 + 8) = 368 tokens. Packed for the update, replies without their last
    token: 64 + 2 (16 + 8) + 4 x 7 + 4 (48 + 2 (8 + 7)) = 452.
    """
    monkeypatch.setattr(bench, "peaks", lambda backbone: (1.0, 1e9, "a device of 1 FLOP/s"))
    seen = {}
    limits = bench.limits
    monkeypatch.setattr(bench, "limits", lambda *given: seen.setdefault("limits", limits(*given)))
    file = tmp_path / "row.json"
    assert bench.main(["seven_b", "--device", "cpu", "--model", "config:tiny",
                       "--json", str(file)]) == 0  # fmt: skip
    (row,) = json.loads(file.read_text())
    assert (row["prefill_tokens"], row["update_tokens"]) == (368, 452)
    assert (row["decode_tokens"], row["scored_tokens"]) == (12 * 7, 12 * 8)
    assert row["gap_max"] < 1e-5 and row["grad_norm"] > 0
    pairs = sum(range(1, 65)) + 2 * sum(range(65, 89))  # a token sees those before it, and itself
    pairs += 4 * (sum(range(81, 113)) + sum(range(105, 137)))
    assert seen["limits"]["prefill"] == 2 * N * 368 + 4 * 2 * 64 * pairs
    assert seen["limits"]["update"] == (4 + 2) * (N * 452 + HEAD * 96)
    pairs = 4 * sum(prompt + j for prompt in (88, 112, 136) for j in range(1, 8))
    assert seen["limits"]["decode"] == 2 * (N + HEAD) * 84 + 4 * 2 * 64 * pairs
    assert row["update_share"] == seen["limits"]["update"] / row["update_seconds"]


def test_decoding_that_is_bound_by_memory_reads_weights_once_a_step_and_each_rows_keys(
    monkeypatch,
):
    """fp32: 4 bytes a number; a token's keys and values are 2 x 2 layers x 2 heads x 16 numbers."""
    monkeypatch.setattr(bench, "peaks", lambda backbone: (1e12, 1.0, "1 byte/s"))
    backbone = agentflow.load_backbone("config:tiny", "cpu")
    totals = dict.fromkeys(
        ("prefill_tokens", "prefill_pairs", "decode_tokens", "decode_pairs"), 10
    )
    least = bench.limits(backbone, {**totals, "decode_steps": 7}, 1, 1, 0.0)
    assert least["decode"] == 4 * (7 * (N + HEAD) + 10 * 128)
    assert least["update"] == 4 * (N + HEAD) / 1e12, "without a KL term no reference is computed"


def test_a_weight_that_changed_by_one_bit_is_seen():
    backbone = agentflow.load_backbone("config:tiny", "cpu", dtype=torch.bfloat16)
    before = bench.bit_sums(backbone)
    with torch.no_grad():
        backbone.trainable_parameters()[0].add_(1.0)
    assert bench.bit_sums(backbone) == before, "the adapter is not among them"
    weight = backbone.model.get_input_embeddings().weight
    with torch.no_grad():
        weight[5, 3].view(torch.int16).add_(1)
    changed = [name for name, bits in bench.bit_sums(backbone).items() if bits != before[name]]
    assert changed == ["model.embed_tokens.weight"]


def test_peaks_are_the_data_sheets_where_the_device_is_known(monkeypatch):
    cuda = SimpleNamespace(device=torch.device("cuda"))
    for name, figures in (("NVIDIA H200", (989e12, 4.8e12)),
                          ("NVIDIA A100-SXM4-80GB", (312e12, 2.0e12))):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert bench.peaks(cuda)[:2] == figures


@pytest.mark.parametrize("wrong", ["nan", "base", "tokens", "still"])
def test_what_is_not_as_it_must_be_is_an_error(wrong):
    names = ("loss", "grad_norm", "gap_mean", "gap_max", "adapter_norm")
    row = {**dict.fromkeys(names, 0.5), "decode_tokens": 84}
    bench.check_seven_b(row, True, bench.SMALL)
    row |= {"nan": {"loss": float("nan")}, "still": {"grad_norm": 0.0},
            "tokens": {"decode_tokens": 83}, "base": {}}[wrong]  # fmt: skip
    with pytest.raises(AssertionError):
        bench.check_seven_b(row, wrong != "base", bench.SMALL)


def test_a_shape_that_is_not_known_is_refused_by_name(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["update", "--model", "config:Qwen9"])
    assert stop.value.code == 2 and "config:Qwen9 is no known shape" in capsys.readouterr().err
    assert bench.shape(SimpleNamespace(model="config:tiny")).hidden_size == 64
    assert bench.shape(SimpleNamespace(model="default")).hidden_size == 576
