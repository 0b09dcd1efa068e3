"""Wrong versions of what full fine-tuning and large models need. For tests/test_mutants.py."""

import torch

import train
from tests.mutants import Mutant

right_move = train.RoundedAdamW._move


def rounded_to_the_nearest(values, generator):
    return values.to(torch.bfloat16)


def rounded_by_half_the_noise(values, generator):
    bits = values.float().view(torch.int32)
    noise = torch.empty_like(bits).random_(0, 1 << 15, generator=generator)
    return ((bits + noise) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


def moved_without_the_corrections_of_the_first_steps(
    weight, grad, exp_avg, exp_avg_sq, group, step, generator
):
    right_move(weight, grad, exp_avg, exp_avg_sq, group, 1_000_000, generator)


def not_computed_again(forward, gate):
    return forward


HERE = "tests.test_full:test_"
ROUNDING = HERE + "rounding_at_random_keeps_bf16_numbers_and_hits_the_neighbours_in_proportion"
DRIFT = HERE + "a_hundred_steps_of_1e_6_move_bf16_weights_as_far_as_fp32_ones"
TRAIN_MUTANTS = [
    Mutant("bf16 weights rounded to the nearest", "train", "round_at_random",
           rounded_to_the_nearest, DRIFT),
    Mutant("rounded up half as often as it should be", "train", "round_at_random",
           rounded_by_half_the_noise, ROUNDING),
    Mutant("bf16 AdamW without bias correction", "train", "RoundedAdamW._move",
           staticmethod(moved_without_the_corrections_of_the_first_steps), DRIFT),
    Mutant("nothing is computed again", "agentflow", "checkpointed", not_computed_again,
           HERE + "gradient_checkpointing_keeps_less_for_backward"),
]  # fmt: skip
