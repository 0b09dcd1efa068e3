"""Wrong versions of our functions, each a fault that was made somewhere before, and the test that
must notice it. tests/test_mutants.py swaps one in at a time and runs that test.

To add one: write the wrong function and append `Mutant(...)` to MUTANTS. The named test takes no
fixtures, calls the function through its module (`flow_grpo.kl_k3(...)`), and must fail by an assert
of its own: a mutant that only crashes proves nothing.

The wrong versions are ours with one thing turned: `loss_with(...)`, `advantages_with(...)` and
`logprobs_with(...)` are plain second implementations with a knob for each fault. With no knob
turned they are right, which test_mutants.py checks against the same tests.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import flow_grpo


@dataclass(frozen=True)
class Mutant:
    name: str  # the fault, in a few words
    module: str  # where the right function lives, "flow_grpo"
    attribute: str  # its name there; a dot reaches into a class, "Memory.render"
    wrong: Callable  # what replaces it
    test: str  # who must notice, "tests.test_flow_grpo:test_name"


# ------------------------------------------------------------------------- Eq. 7: group_advantages


def advantages_with(turn_rows=False, batch=False, ddof=1, by_position=0, divide=True, floor=True,
                    nan_as=None, noise=True):  # fmt: skip
    def group_advantages(rewards, group_ids, eps=1e-6):
        if nan_as is not None:
            rewards = torch.where(rewards.isnan(), nan_as, rewards.float())
        if by_position:  # groups are taken to be consecutive and of this size
            group_ids = torch.arange(len(rewards)) // by_position
        result = torch.zeros(len(rewards))
        for group in group_ids.unique():
            here = (group_ids == group) & ~(rewards.isnan() & floor)
            counted = rewards[here].double()
            if turn_rows:  # one row a turn: who is right takes one turn, who is wrong three
                turns = torch.where(counted == 1, 1, 3)
                counted = counted.repeat_interleave(turns)
            if batch:
                counted = rewards.double()
            if floor and len(counted) < 2:  # nothing to compare with
                continue
            std = (((counted - counted.mean()) ** 2).sum() / (len(counted) - ddof)).sqrt()
            if noise and std <= 1e-6 * counted.abs().max() + 1e-12:
                continue
            scale = std + eps if divide else 1.0
            result[here] = ((rewards[here].double() - counted.mean()) / scale).float()
        return result

    return group_advantages


# ------------------------------------------------------------------- Eq. 5's means: turn_weights


def weights_with(fixed_group=0, count_turns=True, per_token=False, pairs=True, swap=False):
    def turn_weights(group_ids, rollout_ids, lengths):
        if per_token:  # one mean over all tokens
            return torch.full((len(lengths),), 1.0 / float(lengths.sum()))
        Q = len(group_ids.unique())
        result = torch.zeros(len(lengths))
        for n in range(len(lengths)):
            question = group_ids == group_ids[n]
            rollout = rollout_ids == rollout_ids[n]
            if pairs:
                rollout = rollout & question
            G = fixed_group or len(rollout_ids[question].unique())
            T = int(rollout.sum()) if count_turns else 1
            length = lengths[n - 1] if swap else lengths[n]
            result[n] = 1.0 / (Q * G * T * float(length))
        return result

    return turn_weights


# ------------------------------------------------------------------------ log-probs of the LM head


def logprobs_with(cold=False, cold_entropy=False, shift=0, fixed_normaliser=False,
                  trained_entropy=False, slope=1.0, head_dtype=None):  # fmt: skip
    """All (M, V) logits at once, with autograd: right in value and gradient, wrong in memory."""

    def linear_logprobs(hidden, weight, targets, temperature=1.0, chunk=None):
        if head_dtype is not None:  # multiply in this type, not in fp32
            logits = (hidden.to(head_dtype) @ weight.to(head_dtype).T).float()
        else:
            logits = hidden.float() @ weight.float().T  # (M, V)
        warm = logits / (temperature or 1.0)
        tempered = logits if cold else warm
        normaliser = tempered.logsumexp(-1, keepdim=True)  # (M, 1)
        if fixed_normaliser:
            normaliser = normaliser.detach()
        logprobs = tempered - normaliser
        logp = logprobs.gather(1, targets.long().roll(shift)[:, None]).squeeze(1)
        logp = slope * logp + (1 - slope) * logp.detach()  # same value, another gradient
        measured = (logits if cold_entropy else warm).log_softmax(-1)
        entropy = -(measured.exp() * measured).sum(-1)
        return logp, entropy if trained_entropy else entropy.detach()

    return linear_logprobs


def slope_without_temperature(hidden, weight, targets, temperature=1.0, chunk=None):
    """The backward pass forgets to divide by the temperature."""
    return logprobs_with(slope=temperature or 1.0)(hidden, weight, targets, temperature)


def last_chunk_forgotten(hidden, weight, targets, temperature=1.0, chunk=None):
    """Tokens that do not fill a chunk keep the value they were allocated with."""
    logp, entropy = logprobs_with()(hidden, weight, targets, temperature)
    if chunk is None:
        return logp, entropy
    whole = torch.arange(len(logp)) < len(logp) - len(logp) % chunk
    return torch.where(whole, logp, 0.0), torch.where(whole, entropy, 0.0)


# ------------------------------------------------------------------------ KL and Eq. 5-6: the loss


def loss_with(sequence_ratio=False, clip=True, larger=False, wrong_side=False, swap_epsilons=False,
              dual_clip=None, kl_sign=1.0, swap_kl=False, plain_mean=False, micro_mean=False,
              late_mask=False, no_ratio=False, old_trained=False, count_padding=False,
              detach_policy=False, sides=True):  # fmt: skip
    def flow_grpo_loss(logp, logp_old, logp_ref, advantages, weights, mask,
                       epsilon_low=0.2, epsilon_high=0.2, beta=1e-3):  # fmt: skip
        keep = mask.bool()
        if not late_mask:
            logp, logp_old = torch.where(keep, logp, 0.0), torch.where(keep, logp_old, 0.0)
            logp_ref = None if logp_ref is None else torch.where(keep, logp_ref, 0.0)
        if not old_trained:
            logp_old = logp_old.detach()
            logp_ref = None if logp_ref is None else logp_ref.detach()
        if swap_epsilons:
            epsilon_low, epsilon_high = epsilon_high, epsilon_low
        A = advantages[:, None]
        ratio = (logp - logp_old).exp()
        if sequence_ratio:  # one ratio for the whole response
            ratio = (keep * (logp - logp_old)).sum(1, keepdim=True).exp().expand_as(logp)
        if no_ratio:  # REINFORCE without importance weight: right only on the first update
            ratio = 1 + logp - logp.detach()
        clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high) if clip else ratio
        objective = (torch.maximum if larger else torch.minimum)(ratio * A, clipped * A)
        if wrong_side:  # clips whatever the sign of A
            objective = clipped * A
        if dual_clip is not None:
            objective = torch.where(A < 0, torch.maximum(objective, dual_clip * A), objective)
        if detach_policy:
            objective = objective.detach() + 0 * logp
        kl = torch.full_like(logp, torch.nan) if logp_ref is None else (
            flow_grpo.kl_k3(logp_ref, logp) if swap_kl else flow_grpo.kl_k3(logp, logp_ref)
        )  # fmt: skip
        if beta:
            objective = objective - kl_sign * beta * kl
        objective = objective * keep if late_mask else torch.where(keep, objective, 0.0)
        if plain_mean:  # over the tokens of this call
            loss = -objective.sum() / keep.sum().clamp(min=1)
        else:
            loss = -(weights[:, None] * objective).sum()
        if micro_mean:  # over the rows of this call
            loss = loss / len(logp)
        with torch.no_grad():
            seen = torch.ones_like(keep) if count_padding else keep
            count = seen.sum().clamp(min=1)
            low = ((ratio < 1 - epsilon_low) & ((A < 0) | (not sides)) & seen).sum() / count
            high = ((ratio > 1 + epsilon_high) & ((A > 0) | (not sides)) & seen).sum() / count
            inside = ratio[seen] if seen.any() else torch.ones(1)
            statistics = dict(
                clip_fraction=low + high, clip_low_fraction=low, clip_high_fraction=high,
                kl=kl.detach()[seen].sum() / count if logp_ref is not None else kl.mean(),
                ratio_min=inside.min(), ratio_max=inside.max(), tokens=seen.sum(),
            )  # fmt: skip
        return loss, statistics

    return flow_grpo_loss


def exact_k3(logp, logp_ref):
    return (logp_ref - logp).exp() - (logp_ref - logp) - 1


# What the knobs start from: right, although slow or large. test_mutants.py runs the tests on them.
RIGHT = {
    "group_advantages": advantages_with(),
    "turn_weights": weights_with(),
    "linear_logprobs": logprobs_with(),
    "kl_k3": exact_k3,
    "flow_grpo_loss": loss_with(),
}


def _flow_grpo(name: str, attribute: str, wrong: Callable, test: str) -> Mutant:
    return Mutant(name, "flow_grpo", attribute, wrong, f"tests.test_flow_grpo:test_{test}")


MUTANTS = [
    # Eq. 7
    _flow_grpo("statistics over turn rows", "group_advantages", advantages_with(turn_rows=True),
               "two_right_of_eight_get_plus_1_62_and_minus_0_54"),
    _flow_grpo("statistics over the batch", "group_advantages", advantages_with(batch=True),
               "each_group_is_measured_against_itself_and_not_against_the_batch"),
    _flow_grpo("ddof 0", "group_advantages", advantages_with(ddof=0),
               "the_standard_deviation_is_the_samples_with_ddof_1"),
    _flow_grpo("no standard deviation", "group_advantages", advantages_with(divide=False),
               "two_right_of_eight_get_plus_1_62_and_minus_0_54"),
    _flow_grpo("groups by position", "group_advantages", advantages_with(by_position=4),
               "groups_are_found_by_id_and_not_by_position"),
    _flow_grpo("groups of a fixed stride", "group_advantages", advantages_with(by_position=2),
               "groups_may_differ_in_size_and_losing_a_rollout_moves_only_its_own_group"),
    _flow_grpo("noise of a flat group blown up", "group_advantages", advantages_with(noise=False),
               "a_group_equal_up_to_float_noise_gets_exactly_zero"),
    _flow_grpo("NaN for a group of one", "group_advantages",
               advantages_with(floor=False, noise=False), "a_group_of_one_gets_exactly_zero"),
    _flow_grpo("a NaN reward poisons its group", "group_advantages", advantages_with(floor=False),
               "a_nan_reward_gets_zero_and_leaves_its_groups_statistics"),
    _flow_grpo("a NaN reward counts as wrong", "group_advantages", advantages_with(nan_as=0.0),
               "a_nan_reward_gets_zero_and_leaves_its_groups_statistics"),
    # the nesting of Eq. 5
    _flow_grpo("G is the same for every question", "turn_weights", weights_with(fixed_group=2),
               "a_row_weighs_one_over_questions_rollouts_turns_and_tokens"),
    _flow_grpo("G is a setting, sum is not 1", "turn_weights", weights_with(fixed_group=8),
               "weights_times_lengths_sum_to_one_in_any_order_of_rows"),
    _flow_grpo("no mean over turns", "turn_weights", weights_with(count_turns=False),
               "eq_5_to_7_by_hand_on_two_rollouts_of_different_turns_and_lengths"),
    _flow_grpo("one mean over all tokens", "turn_weights", weights_with(per_token=True),
               "a_short_rollout_has_as_much_say_as_a_long_one"),
    _flow_grpo("roll-out numbers shared by questions", "turn_weights", weights_with(pairs=False),
               "a_row_weighs_one_over_questions_rollouts_turns_and_tokens"),
    _flow_grpo("length of the neighbouring row", "turn_weights", weights_with(swap=True),
               "weights_times_lengths_sum_to_one_in_any_order_of_rows"),
    # log-probs
    _flow_grpo("temperature missing", "linear_logprobs", logprobs_with(cold=True),
               "logprobs_entropies_and_gradients_are_those_of_log_softmax"),
    _flow_grpo("entropy without temperature", "linear_logprobs", logprobs_with(cold_entropy=True),
               "logprobs_entropies_and_gradients_are_those_of_log_softmax"),
    _flow_grpo("gradient without temperature", "linear_logprobs", slope_without_temperature,
               "logprobs_entropies_and_gradients_are_those_of_log_softmax"),
    _flow_grpo("off by one target", "linear_logprobs", logprobs_with(shift=1),
               "each_target_is_scored_by_its_own_hidden_state"),
    _flow_grpo("no gradient through the normaliser", "linear_logprobs",
               logprobs_with(fixed_normaliser=True),
               "logprobs_entropies_and_gradients_are_those_of_log_softmax"),
    _flow_grpo("entropy carries gradient", "linear_logprobs", logprobs_with(trained_entropy=True),
               "gradients_go_only_where_they_are_asked_for_and_never_through_the_entropy"),
    _flow_grpo("all logits at once", "linear_logprobs", logprobs_with(),
               "memory_does_not_grow_with_the_vocabulary"),
    _flow_grpo("logits rounded to bf16", "linear_logprobs",
               logprobs_with(head_dtype=torch.bfloat16), "a_bf16_head_is_multiplied_in_fp32"),
    _flow_grpo("last chunk forgotten", "linear_logprobs", last_chunk_forgotten,
               "logprobs_entropies_and_gradients_are_those_of_log_softmax"),
    _flow_grpo("temperature 0 as a tiny number", "tempered", lambda logits, temperature:
               logits.float() / torch.as_tensor(temperature).clamp(min=1e-4).unsqueeze(-1),
               "the_temperature_divides_the_logits_and_zero_stands_for_one"),
    # KL
    _flow_grpo("KL swapped", "kl_k3", lambda logp, logp_ref: exact_k3(logp_ref, logp),
               "the_mean_of_k3_is_the_kl_from_the_policy_to_the_reference"),
    _flow_grpo("k3 clamped", "kl_k3", lambda logp, ref: exact_k3(logp, ref).clamp(-10, 10),
               "the_mean_of_k3_is_the_kl_from_the_policy_to_the_reference"),
    _flow_grpo("k1 in place of k3", "kl_k3", lambda logp, logp_ref: logp - logp_ref,
               "the_mean_of_k3_is_the_kl_from_the_policy_to_the_reference"),
    _flow_grpo("k2 in place of k3", "kl_k3", lambda logp, ref: (logp - ref) ** 2 / 2,
               "k3_averages_to_the_kl_on_sampled_tokens_too"),
    _flow_grpo("gradient of the other KL", "kl_k3", lambda logp, ref:
               exact_k3(logp, ref).detach() + (logp.exp() - logp.exp().detach()) * (logp - ref)
               / logp.exp().detach(),
               "the_on_policy_gradient_of_k3_is_that_of_the_other_direction"),
    _flow_grpo("KL rewarded", "flow_grpo_loss", loss_with(kl_sign=-1.0),
               "a_positive_beta_holds_the_policy_to_the_reference"),
    _flow_grpo("KL arguments swapped", "flow_grpo_loss", loss_with(swap_kl=True),
               "eq_5_to_7_by_hand_on_two_rollouts_of_different_turns_and_lengths"),
    # Eq. 5-6
    _flow_grpo("ratio of the whole response", "flow_grpo_loss", loss_with(sequence_ratio=True),
               "the_ratio_belongs_to_one_token_and_not_to_the_response"),
    _flow_grpo("no ratio", "flow_grpo_loss", loss_with(no_ratio=True),
               "eq_5_to_7_by_hand_on_two_rollouts_of_different_turns_and_lengths"),
    _flow_grpo("no clip", "flow_grpo_loss", loss_with(clip=False),
               "the_clip_takes_away_reward_for_going_too_far_and_never_penalty"),
    _flow_grpo("max in place of min", "flow_grpo_loss", loss_with(larger=True),
               "the_clip_takes_away_reward_for_going_too_far_and_never_penalty"),
    _flow_grpo("clip on the wrong side too", "flow_grpo_loss", loss_with(wrong_side=True),
               "the_clip_takes_away_reward_for_going_too_far_and_never_penalty"),
    _flow_grpo("epsilons swapped", "flow_grpo_loss", loss_with(swap_epsilons=True),
               "the_clip_takes_away_reward_for_going_too_far_and_never_penalty"),
    _flow_grpo("dual clip", "flow_grpo_loss", loss_with(dual_clip=3.0),
               "the_clip_takes_away_reward_for_going_too_far_and_never_penalty"),
    _flow_grpo("token mean of a micro-batch", "flow_grpo_loss", loss_with(plain_mean=True),
               "micro_batches_and_shuffling_change_no_gradient"),
    _flow_grpo("row mean of a micro-batch", "flow_grpo_loss", loss_with(micro_mean=True),
               "micro_batches_and_shuffling_change_no_gradient"),
    _flow_grpo("token mean ignores turns", "flow_grpo_loss", loss_with(plain_mean=True),
               "eq_5_to_7_by_hand_on_two_rollouts_of_different_turns_and_lengths"),
    _flow_grpo("mask by multiplication", "flow_grpo_loss", loss_with(late_mask=True),
               "what_stands_under_the_mask_leaks_neither_value_nor_gradient"),
    _flow_grpo("loss of 0 taken for no gradient", "flow_grpo_loss", loss_with(detach_policy=True),
               "on_policy_the_value_is_zero_and_the_gradient_is_that_of_reinforce"),
    _flow_grpo("old and reference are trained", "flow_grpo_loss", loss_with(old_trained=True),
               "only_the_policy_being_trained_gets_a_gradient"),
    _flow_grpo("statistics count padding", "flow_grpo_loss", loss_with(count_padding=True),
               "the_statistics_count_clipped_tokens_by_side"),
    _flow_grpo("clip counted whatever the side", "flow_grpo_loss", loss_with(sides=False),
               "the_statistics_count_clipped_tokens_by_side"),
    _flow_grpo("policy gradient reversed", "flow_grpo_loss", lambda logp, old, ref, A, *rest, **k:
               loss_with()(logp, old, ref, -A, *rest, **k),
               "with_centred_rewards_the_expected_gradient_is_that_of_the_reward"),
]  # fmt: skip
