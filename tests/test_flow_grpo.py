"""The mathematics of Flow-GRPO as worked examples: every number is worked out in a docstring, or
has an oracle beside it (enumeration of all outcomes, log_softmax with autograd).

Functions are called through the module, `flow_grpo.f(...)`, so that tests/mutants.py can swap in
wrong versions of them; so the tests take no fixtures.
"""

import itertools
import math
from contextlib import redirect_stdout
from io import StringIO
from unittest import mock

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import flow_grpo

NAN, INF = float("nan"), float("inf")


def close(actual, expected, tolerance=1e-6):
    """Equal in shape, and in value to `tolerance`: absolute for small, relative for large ones."""
    if not isinstance(expected, torch.Tensor):
        expected = torch.tensor(expected, dtype=actual.dtype)
    assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# --------------------------------------------------------------------------- advantages, Eq. 7


def test_two_right_of_eight_get_plus_1_62_and_minus_0_54():
    """Two right of eight: mean 0.25; squared deviations 2 * 0.5625 + 6 * 0.0625 = 1.5, divided by
    7, root: std 0.46291. So (1 - 0.25) / 0.46291 = 1.6202 and -0.25 / 0.46291 = -0.5401.
    Over turn rows (right ones took 1 turn, wrong ones 3) the mean would be 2 / 20 and the two
    values +2.92 and -0.32.
    """
    rewards = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0])
    actual = flow_grpo.group_advantages(rewards, torch.zeros(8, dtype=torch.long))
    close(actual, [1.6202] * 2 + [-0.5401] * 6, 1e-4)


def test_the_standard_deviation_is_the_samples_with_ddof_1():
    """[1, 0, 0, 0]: mean 1/4, squared deviations 9/16 + 3/16 = 3/4; / 3 = 1/4, root 1/2. So +1.5
    and -0.5. (ddof 0 would give std 0.433 and +1.732.)
    """
    rewards = torch.tensor([1.0, 0, 0, 0])
    close(flow_grpo.group_advantages(rewards, torch.zeros(4).long()), [1.5, -0.5, -0.5, -0.5], 1e-5)


def test_each_group_is_measured_against_itself_and_not_against_the_batch():
    """{1,1,0,0} and {9,9,8,8} are the same news: mean 0.5 (8.5), std sqrt(1/3) = 0.57735, so
    +-0.86603 in both. Over the batch the first question would have only negative advantages.
    """
    rewards = torch.tensor([1.0, 1, 0, 0, 9, 9, 8, 8])
    actual = flow_grpo.group_advantages(rewards, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    close(actual, [0.8660254, 0.8660254, -0.8660254, -0.8660254] * 2, 1e-5)


def test_groups_are_found_by_id_and_not_by_position():
    """Ids 7 and -3 interleaved: group 7 has rewards 1, 0, 0, 0 (std 1/2) at places 0, 2, 4, 6, and
    group -3 has 1, 1, 0, 0 at the others (std 0.57735).
    """
    ids = torch.tensor([7, -3, 7, -3, 7, -3, 7, -3])
    rewards = torch.tensor([1.0, 1, 0, 1, 0, 0, 0, 0])
    expected = [1.5, 0.8660254, -0.5, 0.8660254, -0.5, -0.8660254, -0.5, -0.8660254]
    close(flow_grpo.group_advantages(rewards, ids), expected, 1e-5)


def test_groups_may_differ_in_size_and_losing_a_rollout_moves_only_its_own_group():
    """Group 0: 1, 0 and group 1: 1, 0, 0, 0. A pair has mean 1/2, std sqrt(1/2): +-0.70711; four
    give +1.5 and -0.5. Without the second roll-out group 0 is alone (0), and group 1 as before.
    """
    rewards, ids = torch.tensor([1.0, 0, 1, 0, 0, 0]), torch.tensor([0, 0, 1, 1, 1, 1])
    actual = flow_grpo.group_advantages(rewards, ids)
    close(actual, [0.7071068, -0.7071068, 1.5, -0.5, -0.5, -0.5], 1e-5)
    kept = torch.tensor([0, 2, 3, 4, 5])
    actual = flow_grpo.group_advantages(rewards[kept], ids[kept])
    close(actual, [0.0, 1.5, -0.5, -0.5, -0.5], 1e-5)


def test_a_group_equal_up_to_float_noise_gets_exactly_zero():
    """Nothing to learn from, so 0 and not a small number: equal rewards, equal ones that three
    different sums made (0.1 + 0.2 is not 0.3 in binary), 0.3 - 0.2 - 0.1 beside 0, and the noise of
    float32. Without a floor the std of the noise divides the noise: full-sized advantages.
    """
    groups = (
        torch.tensor([1.0, 1.0, 1.0]),
        torch.tensor([0.0, 0.0]),
        torch.full((7,), 0.1),
        torch.tensor([123456.0, 123456.0 + 0.0078125, 123456.0]),
        torch.tensor([0.7, 0.7 + 6e-8, 0.7 - 6e-8]),
        torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.6 / 2], dtype=torch.float64),
        torch.tensor([0.3 - 0.2 - 0.1, 0.0, 0.0], dtype=torch.float64),
    )
    for eps, rewards in itertools.product((1e-6, 0.0), groups):
        actual = flow_grpo.group_advantages(rewards, torch.zeros(len(rewards)).long(), eps=eps)
        assert actual.tolist() == [0.0] * len(rewards), f"{rewards.tolist()} gave {actual}"


def test_a_group_of_one_gets_exactly_zero():
    """One roll-out has nothing to be compared with (and torch.std of one number is NaN)."""
    actual = flow_grpo.group_advantages(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([5, 6, 6]))
    assert actual[0].item() == 0.0
    close(actual[1:], [0.7071068, -0.7071068], 1e-5)


def test_a_nan_reward_gets_zero_and_leaves_its_groups_statistics():
    """1, NaN, 0, 1: the three judged ones have mean 2/3 and squared deviations 1/9 + 4/9 + 1/9 =
    2/3, / 2 = 1/3, std 0.57735: +0.57735, 0, -1.15470, +0.57735. A group with one judged roll-out,
    and one with none, get zeros; the neighbour is as it was.
    """
    rewards = torch.tensor([1.0, NAN, 0, 1, NAN, 1, NAN, NAN, 1, 0])
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3, 3])
    expected = [0.5773503, 0, -1.1547005, 0.5773503, 0, 0, 0, 0, 0.7071068, -0.7071068]
    close(flow_grpo.group_advantages(rewards, ids), expected, 1e-5)


def test_no_advantage_exceeds_the_square_root_of_the_group():
    """One 0.95 among seven 0.35: whatever the values, the lone one gets (G-1)/sqrt(G) = 7/2.8284 =
    2.4749, below sqrt(8) = 2.8284; and so for random rewards of any size.
    """
    rewards = torch.tensor([0.35] * 7 + [0.95])
    close(flow_grpo.group_advantages(rewards, torch.zeros(8).long())[-1], 2.4749, 1e-4)
    for scale in (1e-3, 1.0, 1e6):
        rewards = scale * torch.rand(400, generator=seeded()) ** 20  # heavy tails
        actual = flow_grpo.group_advantages(rewards, torch.arange(50).repeat_interleave(8))
        assert actual.abs().max() <= math.sqrt(8), f"|A| of {actual.abs().max()} at scale {scale}"


def test_ids_may_be_of_any_integer_type_and_rewards_of_any_number_type():
    expected = [0.7071068, -0.7071068]
    floats, integers = torch.tensor([1.0, 0.0]), torch.tensor([1, 0])
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        ids = torch.tensor([3, 3], dtype=dtype)
        for rewards in (floats, integers, floats.half()):
            close(flow_grpo.group_advantages(rewards, ids).float(), expected, 1e-3)
        close(flow_grpo.turn_weights(ids, torch.tensor([0, 1], dtype=dtype), ids), [1 / 6, 1 / 6])


def test_an_infinite_reward_or_an_empty_row_is_refused_with_a_sentence():
    with pytest.raises(AssertionError, match="finite"):
        flow_grpo.group_advantages(torch.tensor([1.0, INF]), torch.tensor([0, 0]))
    with pytest.raises(AssertionError, match="end token"):
        flow_grpo.turn_weights(*torch.tensor([[0, 0], [0, 1], [3, 0]]))


# ------------------------------------------------------------------------- weights, Eq. 5's means


def example_rows():
    """Four turns: question 7 has roll-out 0 (turns of 2 and 4 tokens) and roll-out 1 (one of 5);
    question 3 has a roll-out 0 of its own, one turn of 10 tokens.
    """
    group_ids = torch.tensor([7, 3, 7, 7])
    rollout_ids = torch.tensor([0, 0, 1, 0])
    lengths = torch.tensor([2, 10, 5, 4])
    return group_ids, rollout_ids, lengths


def test_a_row_weighs_one_over_questions_rollouts_turns_and_tokens():
    """Q = 2. Question 7: G = 2; roll-out 0: T = 2: 1/(2*2*2*2) = 1/16 and 1/(2*2*2*4) = 1/32;
    roll-out 1: T = 1: 1/(2*2*1*5) = 1/20. Question 3: G = 1, T = 1: 1/(2*1*1*10) = 1/20. Times
    the lengths: 2/16 + 4/32 + 5/20 + 10/20 = 1.
    """
    group_ids, rollout_ids, lengths = example_rows()
    actual = flow_grpo.turn_weights(group_ids, rollout_ids, lengths)
    close(actual, [1 / 16, 1 / 20, 1 / 20, 1 / 32])


def test_weights_times_lengths_sum_to_one_in_any_order_of_rows():
    generator = seeded()
    group_ids = torch.randint(0, 5, (60,), generator=generator)
    rollout_ids = torch.randint(0, 4, (60,), generator=generator)
    lengths = torch.randint(1, 2049, (60,), generator=generator)
    weights = flow_grpo.turn_weights(group_ids, rollout_ids, lengths)
    close((weights.double() * lengths).sum(), 1.0)
    order = torch.randperm(60, generator=generator)
    again = flow_grpo.turn_weights(group_ids[order], rollout_ids[order], lengths[order])
    assert torch.equal(again, weights[order])


def test_a_short_rollout_has_as_much_say_as_a_long_one():
    """10 and 100 tokens: each half of the sum (a token mean would give the short one 1/11 = 9 %).
    Then a third roll-out with three turns of 100 tokens: each still a third.
    """
    lengths = torch.tensor([10, 100])
    weights = flow_grpo.turn_weights(torch.tensor([0, 0]), torch.tensor([0, 1]), lengths)
    close(weights * lengths, [0.5, 0.5])
    rollout_ids, lengths = torch.tensor([0, 1, 2, 2, 2]), torch.tensor([10, 100, 100, 100, 100])
    share = flow_grpo.turn_weights(torch.zeros(5).long(), rollout_ids, lengths) * lengths
    close(share, [1 / 3, 1 / 3, 1 / 9, 1 / 9, 1 / 9])


# -------------------------------------------------------------------------------- Eq. 5-7 together


def hand_made_batch():
    """One question. Roll-out 0: right, a turn of 2 tokens. Roll-out 1: wrong, turns of 1 and 4."""
    rollout_ids, lengths = torch.tensor([0, 1, 1]), torch.tensor([2, 1, 4])
    ratio = torch.tensor([[1.0, 1.5, 1, 1], [0.5, 1, 1, 1], [1.1, 1.0, 0.9, 2.0]])
    to_ref = torch.tensor([[math.log(2), 0, 0, 0], [-math.log(2), 0, 0, 0], [0.0, 0, 0, 0]])
    logp = torch.tensor([[-1.0, -0.5, 0, 0], [-2.0, 0, 0, 0], [-0.1, -1.0, -0.7, -3.0]])
    advantages = flow_grpo.group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    return dict(
        logp=logp.requires_grad_(),
        logp_old=logp.detach() - ratio.log(),
        logp_ref=logp.detach() + to_ref,
        advantages=advantages[rollout_ids],
        weights=flow_grpo.turn_weights(torch.zeros(3).long(), rollout_ids, lengths),
        mask=torch.arange(4) < lengths[:, None],
    )


def test_eq_5_to_7_by_hand_on_two_rollouts_of_different_turns_and_lengths():
    """Rewards 1, 0: advantages +-a with a = 0.70711. epsilon 0.2, beta 0.1.

    Roll-out 0, ratios 1.0 and 1.5 (clipped to 1.2): (1.0 + 1.2) / 2 * a           =  1.1 a
    Roll-out 1, turn 1, ratio 0.5: min(-0.5 a, -0.8 a)                             = -0.8 a
                turn 2, ratios 1.1, 1.0, 0.9, 2.0: A < 0, so 2.0 stays: -5.0 / 4 a = -1.25 a
                mean of its two turns                                              = -1.025 a
    Policy part (1.1 - 1.025) / 2 * a = 0.0375 * 0.70711                           = 0.0265165
    k3: d = ln 2 at one of roll-out 0's two tokens: 2 - ln 2 - 1 = 0.306853, mean 0.153426;
        d = -ln 2 at roll-out 1's first turn: 0.5 + ln 2 - 1 = 0.193147, mean of turns 0.096574;
        mean 0.125. J = 0.0265165 - 0.1 * 0.125 = 0.0140165.

    Gradient of -J for a token: -w * (ratio * A where not clipped, else 0) + w * beta * (1 - e^d).
    Weights 1/4, 1/4, 1/16. Token 1: -(a + 0.1) / 4 = -0.2017767 (1 - e^d = -1); token 2: clipped,
    0; turn 1: clipped, and 1 - e^d = 1/2: 0.1 / 8 = 0.0125; turn 2: ratio * a / 16.
    """
    batch = hand_made_batch()
    loss, _ = flow_grpo.flow_grpo_loss(**batch, beta=0.1)
    loss.backward()
    close(loss.detach(), -0.0140165, 1e-5)
    expected = [
        [-0.2017767, 0, 0, 0],
        [0.0125, 0, 0, 0],
        [0.0486136, 0.0441942, 0.0397748, 0.0883883],
    ]
    close(batch["logp"].grad, expected, 1e-5)


def test_the_clip_takes_away_reward_for_going_too_far_and_never_penalty():
    """One token, epsilon_low 0.2, epsilon_high 0.3. min(rho A, clip(rho, 0.8, 1.3) A) and its slope
    in logp (rho A where the unclipped term is the smaller, else 0):

        rho   A = +1            A = -1
        0.5   0.5, slope 0.5    -0.8, slope 0
        1.0   1.0, slope 1.0    -1.0, slope -1.0
        1.5   1.3, slope 0      -1.5, slope -1.5
        10    1.3, slope 0      -10,  slope -10    (a dual clip would stop this one at -3)
    """
    table = [
        (0.5, +1, 0.5, 0.5), (0.5, -1, -0.8, 0.0),
        (1.0, +1, 1.0, 1.0), (1.0, -1, -1.0, -1.0),
        (1.5, +1, 1.3, 0.0), (1.5, -1, -1.5, -1.5),
        (10.0, +1, 1.3, 0.0), (10.0, -1, -10.0, -10.0),
    ]  # fmt: skip
    for ratio, advantage, value, slope in table:
        logp = torch.tensor([[math.log(ratio) - 1]], requires_grad=True)
        old, one = torch.tensor([[-1.0]]), torch.ones(1)
        loss, _ = flow_grpo.flow_grpo_loss(
            logp, old, old, advantage * one, one, torch.ones(1, 1),
            epsilon_low=0.2, epsilon_high=0.3, beta=0.0,
        )  # fmt: skip
        loss.backward()
        close(-loss.detach(), value, 1e-5)
        close(-logp.grad, [[slope]], 1e-5)


def test_the_statistics_count_clipped_tokens_by_side():
    """Ratios 0.5, 1.0, 1.5, 2.0 for A = +1 and again for A = -1, the last column of both masked.
    epsilon 0.2: high clips 1.5 of the first row, low clips 0.5 of the second: 1/6 each. Ratio from
    0.5 to 1.5, as 2.0 is masked. kl with d = ln 2 in one of six tokens: 0.306853 / 6 = 0.0511422.
    """
    ratio = torch.tensor([[0.5, 1.0, 1.5, 2.0]] * 2)
    logp_ref = torch.zeros(2, 4)
    logp_ref[0, 0] = math.log(2)
    logp = torch.zeros(2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0]] * 2)
    _, statistics = flow_grpo.flow_grpo_loss(
        logp, -ratio.log(), logp_ref, torch.tensor([1.0, -1.0]), torch.ones(2), mask
    )
    assert not any(value.requires_grad for value in statistics.values()), "statistics are detached"
    expected = dict(
        clip_low_fraction=1 / 6, clip_high_fraction=1 / 6, clip_fraction=1 / 3,
        kl=0.0511422, ratio_min=0.5, ratio_max=1.5, tokens=6,
    )  # fmt: skip
    for name, value in expected.items():
        close(statistics[name], value, 1e-5)


def test_the_ratio_belongs_to_one_token_and_not_to_the_response():
    """Ratios 1.5 and 1/1.5 = 0.6667 with A = +1: (1.2 + 0.6667) / 2 = 0.93333. The ratio of the
    whole response would be their product, 1, and the value 1.
    """
    logp = torch.tensor([[math.log(1.5), -math.log(1.5)]]) - 2
    old, weights = torch.full((1, 2), -2.0), torch.tensor([0.5])
    loss, _ = flow_grpo.flow_grpo_loss(
        logp, old, old, torch.ones(1), weights, torch.ones(1, 2), beta=0.0
    )
    close(-loss, 0.9333333, 1e-5)


def test_on_policy_the_value_is_zero_and_the_gradient_is_that_of_reinforce():
    """pi_theta = pi_old: every ratio is 1, and the value is the sum of w |a| A: half of roll-out
    0's advantage plus half of roll-out 1's, 0. The gradient is that of sum w A log pi all the same.
    """
    batch = hand_made_batch() | dict(logp_old=hand_made_batch()["logp"].detach())
    loss, statistics = flow_grpo.flow_grpo_loss(**batch, beta=0.0)
    loss.backward()
    close(loss.detach(), 0.0)
    close(torch.stack([statistics["ratio_min"], statistics["ratio_max"]]), [1.0, 1.0])
    reinforce = -(batch["weights"] * batch["advantages"])[:, None] * batch["mask"]
    close(batch["logp"].grad, reinforce)
    assert batch["logp"].grad.abs().sum() > 0.5, "a loss of 0 still teaches"


def test_only_the_policy_being_trained_gets_a_gradient():
    batch = hand_made_batch()
    batch["logp_old"].requires_grad_()
    batch["logp_ref"].requires_grad_()
    loss, _ = flow_grpo.flow_grpo_loss(**batch, beta=0.1)
    loss.backward()
    assert batch["logp_old"].grad is None and batch["logp_ref"].grad is None
    assert batch["logp"].grad is not None


def test_what_stands_under_the_mask_leaks_neither_value_nor_gradient():
    """inf, -inf, NaN and 1e30 in the padding of each of the three log-probs: value, gradient and
    statistics are those of the clean batch to the last bit.
    """
    clean = hand_made_batch()
    expected, expected_statistics = flow_grpo.flow_grpo_loss(**clean, beta=0.1)
    expected.backward()
    for name, rubbish in itertools.product(
        ("logp", "logp_old", "logp_ref"), (INF, -INF, NAN, 1e30, -1e30)
    ):
        batch = hand_made_batch()
        with torch.no_grad():
            batch[name][~batch["mask"]] = rubbish
        loss, statistics = flow_grpo.flow_grpo_loss(**batch, beta=0.1)
        loss.backward()
        assert torch.equal(loss, expected), f"{rubbish} under the mask of {name}: {loss}"
        assert torch.equal(batch["logp"].grad, clean["logp"].grad), f"{rubbish} in {name}"
        for key, value in statistics.items():
            assert torch.equal(value, expected_statistics[key]), f"{key}: {rubbish} in {name}"


def test_an_empty_mask_gives_loss_zero_with_zero_gradient():
    batch = hand_made_batch()
    batch["mask"] = torch.zeros_like(batch["mask"])
    loss, statistics = flow_grpo.flow_grpo_loss(**batch)
    loss.backward()
    assert loss.item() == 0.0 and batch["logp"].grad.abs().max().item() == 0.0
    assert all(value.isfinite() for value in statistics.values()), statistics


def test_more_padding_and_rows_of_flat_groups_change_nothing():
    """Five more columns of padding, and a row of a flat group (advantage 0, beta 0): the loss and
    the gradient of the other tokens stay, since the weights were made from all rows before.
    """
    batch = hand_made_batch()
    expected, _ = flow_grpo.flow_grpo_loss(**batch, beta=0.0)
    expected.backward()
    wide = {}
    for name, value in hand_made_batch().items():
        value = value.detach()
        if value.dim() == 2:
            value = torch.nn.functional.pad(value, (0, 5))
        wide[name] = torch.cat([value, value[:1]])
    wide["advantages"][-1] = 0.0
    wide["logp"].requires_grad_()
    loss, _ = flow_grpo.flow_grpo_loss(**wide, beta=0.0)
    loss.backward()
    close(loss.detach(), expected.detach())
    close(wide["logp"].grad[:3, :4], batch["logp"].grad)
    assert wide["logp"].grad[3].abs().max().item() == 0.0, "advantage 0 has no policy gradient"


def test_without_a_kl_term_the_reference_may_be_left_out():
    batch = hand_made_batch()
    expected, _ = flow_grpo.flow_grpo_loss(**batch, beta=0.0)
    loss, statistics = flow_grpo.flow_grpo_loss(**batch | dict(logp_ref=None), beta=0.0)
    assert torch.equal(loss, expected) and statistics["kl"].isnan(), "not measured is not 0"


def policy_batch():
    """Seven turns of five roll-outs of two questions, and a softmax head that made their log-probs:
    (head, function from rows to the loss of these rows).
    """
    generator = seeded(3)
    rows, width, D, V = 7, 6, 5, 11
    group_ids = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    rollout_ids = torch.tensor([0, 1, 1, 1, 0, 0, 1])
    lengths = torch.tensor([6, 1, 3, 2, 5, 4, 6])
    hidden = torch.randn(rows, width, D, generator=generator)
    targets = torch.randint(0, V, (rows, width), generator=generator)
    old_noise, ref_noise = 0.3 * torch.randn(2, rows, width, generator=generator)
    advantages = torch.tensor([1.0, -1, -1, -1, 0.7, 0.7, -0.7])
    weights = flow_grpo.turn_weights(group_ids, rollout_ids, lengths)
    mask = torch.arange(width) < lengths[:, None]
    head = torch.randn(V, D, generator=generator).requires_grad_()
    fixed = flow_grpo.linear_logprobs(hidden.flatten(0, 1), head, targets.flatten())[0].detach()
    old, ref = (fixed.view(rows, width) + noise for noise in (old_noise, ref_noise))

    def loss_of(part):
        logp, _ = flow_grpo.linear_logprobs(
            hidden[part].flatten(0, 1), head, targets[part].flatten()
        )
        return flow_grpo.flow_grpo_loss(
            logp.view(len(part), width), old[part], ref[part], advantages[part], weights[part],
            mask[part], beta=0.1,
        )[0]  # fmt: skip

    return head, loss_of


def test_micro_batches_and_shuffling_change_no_gradient():
    """Seven rows of 1 to 6 tokens: all at once, then one, two and three at a time, then shuffled.
    A mean inside each micro-batch would depend on how they are cut.
    """
    head, loss_of = policy_batch()
    (expected,) = torch.autograd.grad(loss_of(torch.arange(7)), head)
    assert expected.abs().max() > 0.01
    shuffled = torch.tensor([4, 0, 6, 2, 1, 5, 3])
    for size, order in itertools.product((1, 2, 3, 7), (torch.arange(7), shuffled)):
        gradient = torch.zeros_like(expected)
        for part in order.split(size):
            gradient += torch.autograd.grad(loss_of(part), head)[0]
        close(gradient, expected)


def test_no_function_changes_its_inputs():
    inputs = dict(
        rewards=torch.tensor([1.0, NAN, 0.0, 1.0]), group_ids=torch.tensor([4, 4, 2, 4]),
        rollout_ids=torch.tensor([0, 1, 0, 0]), lengths=torch.tensor([2, 3, 1, 4]),
        hidden=torch.randn(4, 3).requires_grad_(), weight=torch.randn(6, 3).requires_grad_(),
        targets=torch.tensor([5, 0, 1, 1]),
    )  # fmt: skip
    batch = hand_made_batch()
    everything = inputs | batch
    before = {name: value.detach().clone() for name, value in everything.items()}
    flow_grpo.group_advantages(inputs["rewards"], inputs["group_ids"])
    flow_grpo.turn_weights(inputs["group_ids"], inputs["rollout_ids"], inputs["lengths"])
    logp, _ = flow_grpo.linear_logprobs(inputs["hidden"], inputs["weight"], inputs["targets"])
    logp.sum().backward()
    flow_grpo.flow_grpo_loss(**batch)[0].backward()
    for name, value in everything.items():
        assert_close(value.detach(), before[name], rtol=0, atol=0, equal_nan=True)


# ------------------------------------------- the loss follows the reward: all outcomes enumerated


def enumerated_groups(G):
    """A policy small enough to list all it can do: 3 tokens, answers of 2 tokens, 9 answers, so 9^G
    groups of G roll-outs. The first token depends on nothing, the second on the first: a table of 4
    contexts, which is a head (3, 4) on one-hot states.
    """
    head = torch.randn(3, 4, generator=seeded(1)).requires_grad_()
    answers = torch.tensor(list(itertools.product(range(3), repeat=2)))  # (9, 2)
    contexts = torch.stack([torch.zeros(9).long(), 1 + answers[:, 0]], dim=1)  # (9, 2)
    states = torch.nn.functional.one_hot(contexts, 4).float()  # (9, 2, 4)
    groups = torch.tensor(list(itertools.product(range(9), repeat=G)))  # (9^G, G) answer of each
    return head, answers, states, groups


def exact_gradient(head, answers, states, rewards):
    """Gradient of J(theta) = sum over answers of pi(answer) * reward(answer)."""
    logp = (states @ head.T).log_softmax(-1).gather(2, answers[..., None]).sum((1, 2))  # (9,)
    return torch.autograd.grad((logp.exp() * rewards).sum(), head)[0]


def expected_gradient(G, rewards, advantages_of):
    """Gradient that the loss gives on average: each possible group, weighted by its probability."""
    head, answers, states, groups = enumerated_groups(G)
    rows = groups.flatten()  # (9^G * G,) one roll-out of one turn of two tokens each
    logp, _ = flow_grpo.linear_logprobs(
        states[rows].flatten(0, 1), head, answers[rows].flatten(), chunk=1000
    )
    logp = logp.view(-1, 2)
    chance = logp.detach().sum(1).view(-1, G).sum(1).exp()  # (9^G,) of drawing this group
    close(chance.sum(), 1.0, 1e-5)
    group_ids = torch.arange(len(groups)).repeat_interleave(G)
    rollout_ids = torch.arange(G).repeat(len(groups))
    weights = flow_grpo.turn_weights(group_ids, rollout_ids, torch.full_like(group_ids, 2))
    weights = weights * len(groups) * chance[group_ids]  # a mean over groups -> an expectation
    loss, _ = flow_grpo.flow_grpo_loss(
        logp, logp.detach(), logp.detach(), advantages_of(rewards[rows], group_ids), weights,
        torch.ones_like(logp), beta=0.0,
    )  # fmt: skip
    return -torch.autograd.grad(loss, head)[0], exact_gradient(head, answers, states, rewards)


def test_with_centred_rewards_the_expected_gradient_is_that_of_the_reward():
    """A_i = R_i - mean: over all 9^G groups the gradient is (1 - 1/G) * grad J / 2. The factor
    1 - 1/G, because a roll-out's own reward is part of the mean that is taken away; 1/2 = 1/|a|.
    So G = 1 learns nothing, and a larger group changes the length of the step, not its direction.
    """
    rewards = torch.rand(9, generator=seeded(2))

    for G in (2, 3):

        def centred(scores, group_ids, G=G):
            scores = scores.view(-1, G)  # (9^G, G)
            return (scores - scores.mean(1, keepdim=True)).flatten()

        actual, exact = expected_gradient(G, rewards, centred)
        close(actual, (1 - 1 / G) * exact / 2, 2e-6)
        assert exact.abs().max() > 0.01, "the signal must stand out from the tolerance"


def test_with_the_standard_deviation_and_binary_rewards_it_is_parallel_to_it():
    """Eq. 7 divides by the std, which for 0/1 rewards depends only on how many were right. The
    expected gradient is then a positive number times grad J: cosine 1. (With rewards between 0 and
    1 it need not be.)
    """
    rewards = torch.tensor([0.0, 1, 0, 0, 0, 1, 1, 0, 0])
    for G in (2, 3):
        actual, exact = expected_gradient(G, rewards, flow_grpo.group_advantages)
        cosine = torch.cosine_similarity(actual.flatten(), exact.flatten(), dim=0)
        close(cosine, 1.0, 1e-5)


# ------------------------------------------------------------------------------------------- KL


def two_distributions():
    """Two random choices among eight, far apart: KL(p || r) = 2.43 and KL(r || p) = 1.49 nats."""
    generator = seeded(5)
    p, r = (2 * torch.randn(2, 8, generator=generator, dtype=torch.float64)).log_softmax(-1)
    return p, r


def kl(p, r):
    """KL(p || r) = sum p log(p / r), from log-probs."""
    return (p.exp() * (p - r)).sum()


def test_the_mean_of_k3_is_the_kl_from_the_policy_to_the_reference():
    """All eight outcomes weighted by pi_theta: exactly KL(pi_theta || pi_ref), which here is far
    from KL(pi_ref || pi_theta); no single value is negative, and none is clamped: d = 20 gives
    e^20 - 21 = 485165174.41.
    """
    p, r = two_distributions()
    k3 = flow_grpo.kl_k3(p, r)
    assert abs(kl(p, r) - kl(r, p)) > 0.3, "the two directions must be told apart"
    close((p.exp() * k3).sum(), kl(p, r), 1e-9)
    assert (k3 >= 0).all()
    far = flow_grpo.kl_k3(torch.tensor(-20.0).double(), torch.tensor(0.0).double())
    close(far, 485165174.4097903, 1e-9)


def test_k3_averages_to_the_kl_on_sampled_tokens_too():
    """2,000,000 samples from pi_theta, and k3 of each sample alone: within 0.01 of the exact KL."""
    p, r = two_distributions()
    samples = torch.multinomial(p.exp(), 2_000_000, replacement=True, generator=seeded())
    assert abs(flow_grpo.kl_k3(p[samples], r[samples]).mean() - kl(p, r)) < 0.01


def test_the_on_policy_gradient_of_k3_is_that_of_the_other_direction():
    """sum over outcomes of pi_theta (held fixed, as it only sampled) * k3, differentiated: equals
    the gradient of KL(pi_ref || pi_theta), and not that of KL(pi_theta || pi_ref).
    """
    start, r = two_distributions()
    logits = start.clone().requires_grad_()
    p = logits.log_softmax(-1)
    (actual,) = torch.autograd.grad((p.detach().exp() * flow_grpo.kl_k3(p, r)).sum(), logits)
    (reverse,) = torch.autograd.grad(kl(r, logits.log_softmax(-1)), logits)
    (forward,) = torch.autograd.grad(kl(logits.log_softmax(-1), r), logits)
    close(actual, reverse, 1e-9)
    assert (actual - forward).abs().max() > 0.1


def test_a_positive_beta_holds_the_policy_to_the_reference():
    """Advantage 0, so only the penalty acts: a token likelier than under the reference (d = -1)
    must become less likely under gradient descent, one less likely (d = +1) more. Slopes of the
    loss 0.1 * (1 - e^d) / 2: 0.0316060 and -0.0859141.
    """
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    logp_ref = torch.tensor([[-2.0, -1.0]])
    loss, _ = flow_grpo.flow_grpo_loss(
        logp, logp.detach(), logp_ref, torch.zeros(1), torch.tensor([0.5]), torch.ones(1, 2),
        beta=0.1,
    )  # fmt: skip
    loss.backward()
    assert loss > 0, "the penalty is added to what is minimised"
    close(logp.grad, [[0.0316060, -0.0859141]], 1e-5)


# --------------------------------------------------------------------- log-probs of the LM head


def head_and_targets(M=13, D=6, V=17):
    generator = seeded(4)
    hidden = torch.randn(M, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    targets = torch.randint(0, V, (M,), generator=generator)
    slopes = torch.randn(M, generator=generator)  # (M,) a different gradient for each token
    return hidden, weight, targets, slopes


def oracle(hidden, weight, targets, slopes, temperature):
    """log_softmax of all logits at once, autograd, float64: logp, entropy and two gradients."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logprobs = (hidden @ weight.T / temperature).log_softmax(-1)  # (M, V)
    logp = logprobs.gather(1, targets[:, None]).squeeze(1)
    gradients = torch.autograd.grad((logp * slopes).sum(), [hidden, weight])
    return logp.detach(), -(logprobs.exp() * logprobs).sum(-1).detach(), *gradients


def test_logprobs_entropies_and_gradients_are_those_of_log_softmax():
    """Temperatures 0.5 and 1; chunks of 1, 3 (13 = 4 * 3 + 1), all, more than all, by budget."""
    hidden, weight, targets, slopes = head_and_targets()
    hidden.requires_grad_(), weight.requires_grad_()
    for temperature, chunk in itertools.product((0.5, 1.0), (1, 3, 13, 100, None)):
        expected = oracle(hidden, weight, targets, slopes, temperature)
        logp, entropy = flow_grpo.linear_logprobs(hidden, weight, targets, temperature, chunk)
        gradients = torch.autograd.grad((logp * slopes).sum(), [hidden, weight])
        assert logp.dtype == entropy.dtype == torch.float32
        for actual, exact in zip((logp, entropy, *gradients), expected, strict=True):
            close(actual.detach().double(), exact, 3e-6)


def test_the_temperature_divides_the_logits_and_zero_stands_for_one():
    """Logits 2 and 0. T 1: log-prob of the first -ln(1 + e^-2) = -0.126928; T 0.5: -ln(1 + e^-4) =
    -0.018150. T 0, greedy, is reported as T 1. A tensor holds one temperature for each row.
    """
    hidden, weight = torch.tensor([[2.0]]), torch.tensor([[1.0], [0.0]])
    for temperature, expected in ((1.0, -0.126928), (0.5, -0.018150), (0.0, -0.126928)):
        logp, _ = flow_grpo.linear_logprobs(hidden, weight, torch.tensor([0]), temperature)
        close(logp, [expected], 1e-5)
        rows = flow_grpo.tempered(
            torch.tensor([[2.0, 0.0]] * 2).bfloat16(), torch.tensor([temperature, 1.0])
        )
        close(rows.log_softmax(-1)[:, 0], [expected, -0.126928], 1e-5)


def test_each_target_is_scored_by_its_own_hidden_state():
    """A head that is the identity times 20, and states that point at the next id: (i + 1) mod 5 has
    log-prob about 0 after i, any other about -20. One place off, and all are -20.
    """
    ids = torch.tensor([0, 1, 2, 3, 4, 0])
    hidden = torch.eye(5)[(ids[:-1] + 1) % 5]
    logp, _ = flow_grpo.linear_logprobs(hidden, 20 * torch.eye(5), ids[1:])
    assert (logp > -1e-6).all(), logp
    assert logp.shape == (5,)


def test_gradients_go_only_where_they_are_asked_for_and_never_through_the_entropy():
    hidden, weight, targets, _ = head_and_targets()
    for wanted in (hidden, weight):
        wanted.requires_grad_()
        logp, entropy = flow_grpo.linear_logprobs(hidden, weight, targets)
        assert logp.requires_grad and not entropy.requires_grad
        logp.sum().backward()
        wanted.requires_grad_(False)
    assert hidden.grad.shape == hidden.shape and weight.grad.shape == weight.shape
    once = weight.grad.clone()
    hidden.requires_grad_()
    flow_grpo.linear_logprobs(hidden, weight, targets)[0].sum().backward()
    assert torch.equal(weight.grad, once), "a frozen head gets nothing"


def test_a_bf16_head_is_multiplied_in_fp32():
    """The bf16 numbers are exact in float64, so the oracle sees the same head: log-probs agree to
    1e-5, where logits rounded to bf16 (three digits, values up to 30) would be off by 0.1. The
    gradient comes back in bf16, with the two or three digits that it has.
    """
    hidden, weight, targets, slopes = head_and_targets(M=20, D=64, V=50)
    hidden, weight = (3 * hidden).bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    with mock.patch.object(flow_grpo, "HEAD_BYTES", 7 * 64 * 4):  # parts of 7 rows: 50 = 7 * 7 + 1
        logp, entropy = flow_grpo.linear_logprobs(hidden, weight, targets, 1.0, 3)
        gradients = torch.autograd.grad((logp * slopes).sum(), [hidden, weight])
    expected = oracle(hidden, weight, targets, slopes, 1.0)
    close(logp.detach().double(), expected[0], 1e-5)
    close(entropy.double(), expected[1], 1e-5)
    for actual, exact in zip(gradients, expected[2:], strict=True):
        assert actual.dtype == torch.bfloat16
        close(actual.double(), exact, 5e-3)


class BiggestTensor(TorchDispatchMode):
    """Records the bytes of the largest storage that an operation returns, inputs left out."""

    def __init__(self, *inputs):
        super().__init__()
        self.inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.inputs:
                    self.bytes = max(self.bytes, storage.nbytes())
        return result


def test_memory_does_not_grow_with_the_vocabulary():
    """512 tokens, V of 2,048 and 8,192, 256 KiB for the logits of a chunk (32 and 8 tokens): no
    tensor of forward or backward is larger, while all logits would be 4 and 16 MiB. The head is
    bf16, and an fp32 copy of it (1 MiB at 8,192 x 32) would show too.
    """
    largest = []
    for V in (2048, 8192):
        hidden, weight, targets, _ = head_and_targets(M=512, D=32, V=V)
        weight = weight.bfloat16()
        hidden.requires_grad_()
        with (
            mock.patch.object(flow_grpo, "LOGITS_BYTES", 1 << 18),
            mock.patch.object(flow_grpo, "HEAD_BYTES", 1 << 17),
            BiggestTensor(hidden, weight, targets) as memory,
        ):
            flow_grpo.linear_logprobs(hidden, weight, targets)[0].sum().backward()
        largest.append(memory.bytes)
    assert largest == [1 << 18, 1 << 18], largest


# ------------------------------------------------------------------------------------ the demo


def test_the_demo_prints_the_numbers_of_the_hand_made_example():
    """Its loss is the policy part of the example above: -0.0265165."""
    with redirect_stdout(StringIO()) as out:
        flow_grpo.demo()
    assert "loss = -J = -0.0265" in out.getvalue()
    assert "+0.7071" in out.getvalue() and "2.0 (+0.0884)" in out.getvalue()
