"""Flow-GRPO: the mathematics of the paper's section 3 as pure tensor functions.

    Eq. 5  the objective J, three nested means  ->  turn_weights, flow_grpo_loss
    Eq. 6  the importance ratio of a token      ->  flow_grpo_loss
    Eq. 7  the advantage of a roll-out          ->  group_advantages
    KL     the penalty of Eq. 5                 ->  kl_k3
    log pi_theta(token | what came before)      ->  linear_logprobs

Run `python flow_grpo.py` for a worked example in numbers small enough to check by hand.

Left out on purpose: dual clip, entropy bonus, clamping of the KL, and any state. Tensors go in,
tensors come out, and no input is ever changed.
"""

from __future__ import annotations

import torch

# Symbols. A letter stands for these sizes only, here and in every other file.
#   Q  questions a step                     N  rows: planner turns of all roll-outs of a step
#   G  roll-outs a question, the group      L  tokens of a row's response, padded to the longest
#   R  roll-outs a step, Q * G              M  scored tokens: responses of many rows, no padding
#   T  turns of a roll-out                  D  width of a hidden state      V  vocabulary
#   P  tokens of the rows' trie: prompts and responses, what rows share once
#   S, W  slots of the generation loop, and tokens that a slot holds
# A small m is the part of M in one chunk. Of the paper's own symbols, A is the advantage, rho the
# ratio; i counts roll-outs, t turns, j tokens; a_i^t is a plan, |a_i^t| its length in tokens.

# A group whose spread is below this part of its size is flat: float32 carries about 7 digits.
FLOAT_NOISE = 1e-6
# What the fp32 logits of a chunk of tokens over a part of the vocabulary may take, and that part of
# the head in fp32: as much as stays in a CPU's cache, and 8 times that on an accelerator, whose
# matmuls want more rows. A few buffers of this size live at once, whatever M and V are (beside the
# gradients themselves).
LOGITS_BYTES = 1 << 23
HEAD_BYTES = 1 << 24


# ------------------------------------------------------------------- Eq. 7: the advantage


def group_advantages(
    rewards: torch.Tensor, group_ids: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """(R,), (R,) -> (R,): how much better each roll-out did than its group, paper Eq. 7.

        A_i = (R_i - mean_k R_k) / (std_k R_k + eps)

    One entry a *roll-out*, not a turn: statistics over turn rows would count a roll-out of three
    turns three times. The caller hands the same A_i to every turn of roll-out i.

    rewards: outcome of each roll-out; NaN means that nobody could judge it (a judge was down).
    group_ids: question of each roll-out, any integers in any order; equal id = same group.
    The standard deviation is the sample's (ddof 1, as torch.std). Three cases give exactly 0: a
    group whose rewards are equal up to float noise, a group of one, and a NaN reward, which also
    stays out of its group's mean and deviation. Always |A_i| <= (G - 1) / sqrt(G) < sqrt(G).
    Raises AssertionError for an infinite reward or for shapes that differ.
    """
    assert rewards.dim() == 1 and rewards.shape == group_ids.shape, (
        f"one reward and one group id a roll-out: got {rewards.shape} and {group_ids.shape}"
    )
    # R is a few hundred: float64 on the CPU costs nothing, exists on every machine, and sums in one
    # fixed order (on CUDA, index_add adds in whatever order its threads arrive).
    scores = rewards.detach().cpu().double()  # (R,)
    assert not scores.isinf().any(), "a reward is a finite number, or NaN where judging failed"
    # BEGIN SOLUTION 8
    groups, group = group_ids.cpu().long().unique(return_inverse=True)  # (Q,), (R,) in 0..Q-1

    def group_sum(values: torch.Tensor) -> torch.Tensor:
        """(R,) -> (R,): each roll-out sees the sum over its group."""
        return values.new_zeros(len(groups)).index_add(0, group, values)[group]

    judged = ~scores.isnan()  # (R,)
    known = torch.where(judged, scores, 0.0)  # (R,) NaN must go before any sum sees it
    count = group_sum(judged.double())  # (R,) judged roll-outs of the group
    mean = group_sum(known) / count.clamp(min=1)  # (R,)
    centred = torch.where(judged, known - mean, 0.0)  # (R,)
    std = (group_sum(centred**2) / (count - 1).clamp(min=1)).sqrt()  # (R,) ddof 1

    # subtle: rewards such as 0.1 + 0.2 beside 0.3 differ in the last bit. Divided by a std of the
    # same size, that noise would become a full-sized advantage; eps alone only makes it smaller.
    size = (group_sum(known**2) / count.clamp(min=1)).sqrt()  # (R,) root mean square of the rewards
    flat = std <= FLOAT_NOISE * size + 1e-12  # (R,) the last term: 0.3 - 0.2 - 0.1 beside 0
    advantages = torch.where(flat, 0.0, centred / (std + eps))  # (R,) Eq. 7
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    return advantages.to(device=rewards.device, dtype=dtype)
    # END SOLUTION 8


# --------------------------------------------------- Eq. 5: three nested means, one weight a row


def turn_weights(
    group_ids: torch.Tensor, rollout_ids: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """(N,), (N,), (N,) -> (N,): what one token of each row weighs in Eq. 5.

    Eq. 5 averages over the tokens of a turn, then over the turns of a roll-out, then over the
    roll-outs of a question; a step averages over its questions:

        J = 1/Q sum_q  1/G_q sum_i  1/T_i sum_t  1/|a_i^t| sum_j  [token j]
          = sum over all tokens of  w * [token]       with  w = 1 / (Q * G_q * T_i * |a_i^t|)

    Every question counts the same, every roll-out of a question, every turn of a roll-out, every
    token of a turn: a long answer or a long roll-out has no more say than a short one (Appendix B:
    with 1/T_i for each state the multi-turn objective is a single-turn one). Made once from *all*
    rows of a step (before flat groups are skipped, before any micro-batch is cut), so that the loss
    is a plain weighted sum that no cutting and no shuffling can change.

    group_ids: question of each row. rollout_ids: which roll-out; the numbers may start again in
    each question, since a roll-out is the pair (group, roll-out). lengths: response tokens of the
    row, end token included. G_q is counted from the rows. The weights times the lengths sum to 1.
    A plan that could not be parsed is a turn like any other. Returns float32.
    Raises AssertionError for shapes that differ, or a row without a token.
    """
    assert group_ids.dim() == 1 and group_ids.shape == rollout_ids.shape == lengths.shape, (
        f"one group, roll-out and length a row: got {group_ids.shape}, {rollout_ids.shape}, "
        f"{lengths.shape}"
    )
    assert (lengths > 0).all(), "a row is a planner turn, and has at least its end token"
    # BEGIN SOLUTION 7
    pairs = torch.stack([group_ids.cpu().long(), rollout_ids.cpu().long()], dim=1)  # (N, 2)
    rollouts, rollout = pairs.unique(dim=0, return_inverse=True)  # (R, 2), (N,) in 0..R-1
    turns = rollout.bincount()  # (R,) T_i
    groups, group = rollouts[:, 0].unique(return_inverse=True)  # (Q,), (R,) in 0..Q-1
    rollouts_in_group = group.bincount()[group]  # (R,) G_q, of the question it belongs to
    Q = len(groups)
    per_rollout = Q * rollouts_in_group.double() * turns  # (R,) Q * G_q * T_i
    weights = 1.0 / (per_rollout[rollout] * lengths.cpu())  # (N,) Eq. 5's three fractions, and 1/Q
    return weights.to(device=lengths.device, dtype=torch.float32)
    # END SOLUTION 7


# ------------------------------------------------------ Eq. 5-6: the ratio and the objective


def flow_grpo_loss(
    logp: torch.Tensor,
    logp_old: torch.Tensor,
    logp_ref: torch.Tensor | None,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    mask: torch.Tensor,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    beta: float = 1e-3,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(N, L) x 3, (N,), (N,), (N, L) -> the loss to minimise, -J of Eq. 5, and its statistics.

        loss = - sum_n w_n sum_l mask * [ min(rho A, clip(rho, 1-eps_low, 1+eps_high) A) - beta k3 ]

    logp: log pi_theta of each sampled token, the policy being trained: the only one with gradient.
    logp_old: the same tokens under pi_old, which *sampled* them. logp_ref: under pi_ref, the start
    weights (None if beta is 0: then `kl` is NaN). All three at the temperature of sampling.
    advantages: A_i of each row's roll-out. weights: from turn_weights. mask: 1 where the planner
    wrote the token, 0 for padding; whatever stands under a 0, inf and NaN included, is not seen.

    How the loss is averaged: not at all here. The weights hold every mean, so losses of
    micro-batches are *added*, and their gradients sum to that of the whole batch.

    On the first update pi_theta = pi_old: each ratio is 1 and the value is about 0, since a group's
    advantages sum to 0. The gradient is not: d rho / d theta = rho * d logp / d theta.

    Statistics (detached, plain means over unmasked tokens, `tokens` of them): clip_low_fraction
    (rho < 1 - eps_low, A < 0), clip_high_fraction (rho > 1 + eps_high, A > 0), clip_fraction their
    sum: tokens that the clip leaves without a policy gradient; kl; ratio_min and ratio_max.
    """
    assert logp.shape == logp_old.shape == mask.shape, "log-probs and mask are (N, L) alike"
    assert advantages.shape == weights.shape == logp.shape[:1], "one advantage, one weight a row"
    if logp_ref is None:
        assert beta == 0, "beta > 0 needs the reference's log-probs"
    else:
        assert logp_ref.shape == logp.shape, "the reference's log-probs are (N, L) too"

    # subtle: take what lies under the mask out *before* arithmetic. Multiplying by the mask later
    # is too late: 0 * inf = NaN, in the value and again in the gradient.
    keep = mask.bool()  # (N, L)
    logp = torch.where(keep, logp, 0.0)  # (N, L)
    logp_old = torch.where(keep, logp_old.detach(), 0.0)  # (N, L)
    A = advantages.detach()[:, None]  # (N, 1) one number for all tokens of a turn

    # BEGIN SOLUTION 9
    # One ratio a token, never a product over the response. Numerator: the policy trained now.
    # Denominator, and sampling distribution: pi_old.
    ratio = (logp - logp_old).exp()  # (N, L)  Eq. 6
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)  # (N, L)
    # The smaller of the two is the pessimistic one: the clip only ever takes away the reward for
    # having moved further in the good direction, never the penalty for the bad one.
    objective = torch.minimum(ratio * A, clipped * A)  # (N, L)  Eq. 5, inside the sums
    if logp_ref is None:
        kl = torch.full_like(ratio, torch.nan)  # (N, L) not measured
    else:
        kl = kl_k3(logp, torch.where(keep, logp_ref.detach(), 0.0))  # (N, L) KL(pi_theta || pi_ref)
    if beta != 0:
        objective = objective - beta * kl  # (N, L)
    objective = torch.where(keep, objective, 0.0)  # (N, L) padding weighs nothing
    loss = -(weights.detach()[:, None] * objective).sum()  # ()  Eq. 5; minus, as J is maximised
    # END SOLUTION 9

    with torch.no_grad():
        tokens = keep.sum()  # ()
        count = tokens.clamp(min=1)  # () no token at all: fractions of 0, not NaN
        low = ((ratio < 1 - epsilon_low) & (A < 0) & keep).sum() / count
        high = ((ratio > 1 + epsilon_high) & (A > 0) & keep).sum() / count
        # Under the mask both log-probs are 0 and the ratio is 1: with no token, so are both ends.
        seen = keep | (tokens == 0)  # (N, L)
        statistics = {
            "clip_fraction": low + high,
            "clip_low_fraction": low,
            "clip_high_fraction": high,
            "kl": torch.where(keep, kl, 0.0).sum() / count,
            "ratio_min": torch.where(seen, ratio, torch.inf).min(),
            "ratio_max": torch.where(seen, ratio, -torch.inf).max(),
            "tokens": tokens,
        }
    if logp_ref is None:
        statistics["kl"] = ratio.new_tensor(torch.nan)
    return loss, statistics


def kl_k3(logp: torch.Tensor, logp_ref: torch.Tensor) -> torch.Tensor:
    """Per token: e^d - d - 1 with d = logp_ref - logp, an estimate of KL(pi_theta || pi_ref).

    For tokens sampled from pi_theta. Why it works: E[e^d] = sum pi_theta * pi_ref / pi_theta = 1,
    so e^d - 1 has mean 0, and -d has mean KL(pi_theta || pi_ref); their sum is never negative,
    while -d alone often is. Not clamped: a token far from the reference should be seen.

    Mind the gradient: d k3 / d logp = 1 - e^d, and its mean over tokens from pi_theta is
    -sum pi_ref * d logp, the gradient of KL(pi_ref || pi_theta), the other direction. Both are
    smallest at pi_theta = pi_ref.
    """
    # BEGIN SOLUTION 9
    difference = logp_ref - logp  # d; direction: reference over policy
    return torch.expm1(difference) - difference  # expm1 keeps its digits where d is about 0
    # END SOLUTION 9


# --------------------------------- log-probs in chunks of tokens and vocabulary: memory flat in V


def tempered(logits: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    """(..., V) logits -> fp32 logits of the distribution that is sampled at this temperature.

    The only place that knows the temperature: sampling, and the log-probs of pi_theta, pi_old and
    pi_ref, all come through here, since a ratio of log-probs at two temperatures is no ratio.
    temperature: a number, or a tensor with one for each row of V logits. 0 means greedy choice;
    there a log-prob is that of temperature 1, as at 0 it would be 0 or minus infinity.
    """
    if isinstance(temperature, torch.Tensor):
        temperature = torch.where(temperature == 0, 1.0, temperature.float()).unsqueeze(-1)
    elif temperature == 0:
        temperature = 1.0
    return logits.float() / temperature  # (..., V)


def head_slices(weight: torch.Tensor):
    """The head (V, D) as pairs (slice of V, that part in fp32), each within its budget.

    Of an fp32 head a part is no copy. The whole of Qwen2.5-7B's in fp32 would take 2.2 GB.
    """
    V, D = weight.shape
    rows = max(1, budget(HEAD_BYTES, weight.device) // (4 * D))
    for start in range(0, V, rows):
        part = slice(start, min(V, start + rows))
        yield part, weight[part].float()  # (rows, D)


def budget(size: int, device: torch.device) -> int:
    """Bytes of a buffer of nominal `size` on this device."""
    return size if device.type == "cpu" else 8 * size


def head_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(m, D), (V, D) -> (m, V): logits multiplied and summed in fp32, whatever the inputs are.

    For sampling: logits rounded to bf16 are off by up to 0.06 at a value of 20.
    """
    hidden = hidden.float()  # (m, D)
    if weight.dtype == torch.float32:
        return hidden @ weight.T  # (m, V)
    logits = hidden.new_empty(len(hidden), len(weight))  # (m, V)
    for part, head in head_slices(weight):
        logits[:, part] = hidden @ head.T
    return logits


class LinearLogprobs(torch.autograd.Function):
    """The operator behind linear_logprobs.

    Autograd would keep (M, V) numbers for backward: 11 GB for 18,000 tokens of Qwen2.5-7B, and as
    much again for their gradient. Here forward goes through chunks of tokens and, for each, through
    parts of the vocabulary, and keeps one number a token, the log-normaliser; backward makes the
    logits a second time, part by part. One more matmul of the head, in exchange for logits that
    take the same room whatever M and V are, and for blocks that stay in a CPU's cache.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk):
        M = len(hidden)
        logp, entropy, normaliser = (
            torch.empty(M, dtype=torch.float32, device=hidden.device) for _ in range(3)
        )  # (M,) each
        # BEGIN SOLUTION 10
        for start in range(0, M, chunk):
            part = slice(start, start + chunk)
            state = hidden[part].float()  # (m, D)
            # A softmax that is read once: when a later part of the vocabulary holds a larger
            # logit, what was summed so far shrinks by e to the difference.
            top = state.new_full((len(state),), -torch.inf)  # (m,) the largest logit so far
            total, weighted = torch.zeros_like(top), torch.zeros_like(top)  # (m,) of e^l, of e^l l
            for v, head in head_slices(weight):
                logits = tempered(state @ head.T, temperature)  # (m, v)
                higher = torch.maximum(top, logits.amax(dim=-1))  # (m,)
                shrink = (top - higher).exp()  # (m,) 0 at the first part
                mass = (logits - higher[:, None]).exp_()  # (m, v)
                total = total * shrink + mass.sum(dim=-1)  # (m,)
                weighted = weighted * shrink + mass.mul_(logits).sum(dim=-1)  # (m,)
                top = higher
                column, here = column_of(targets[part], v)  # (m, 1), (m,)
                logp[part] = torch.where(here, logits.gather(1, column)[:, 0], logp[part])
            normaliser[part] = top + total.log()  # (m,) log of the softmax's denominator
            logp[part] -= normaliser[part]  # (m,)
            entropy[part] = normaliser[part] - weighted / total  # (m,) -sum p log p
        # END SOLUTION 10
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)  # measured, never trained
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logp, _grad_entropy):
        hidden, weight, targets, normaliser = ctx.saved_tensors
        to_hidden, to_weight = ctx.needs_input_grad[:2]
        # fp32 whatever the head is: many small parts summed in bf16 would be rounded away.
        grad_hidden, grad_weight = (
            torch.zeros_like(x, dtype=torch.float32) if wanted else None
            for x, wanted in ((hidden, to_hidden), (weight, to_weight))
        )  # (M, D), (V, D)
        # BEGIN SOLUTION 10
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            state = hidden[part].float()  # (m, D)
            # Chain rule through the division by the temperature, which is linear.
            outer = tempered(grad_logp[part, None], ctx.temperature)  # (m, 1)
            for v, head in head_slices(weight):
                logits = tempered(state @ head.T, ctx.temperature)  # (m, v) again
                # d logp / d logits = one-hot(target) - softmax (what the normaliser contributes)
                slope = logits.sub_(normaliser[part, None]).exp_().mul_(-outer)  # (m, v)
                column, here = column_of(targets[part], v)  # (m, 1), (m,)
                slope.scatter_add_(1, column, outer * here[:, None])
                if to_hidden:
                    grad_hidden[part].addmm_(slope, head)
                if to_weight:
                    grad_weight[v].addmm_(slope.T, state)
        # END SOLUTION 10
        if to_hidden:
            grad_hidden = grad_hidden.to(hidden.dtype)
        if to_weight:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def column_of(targets: torch.Tensor, v: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """(m,) ids -> (their column (m, 1) in this part of the vocabulary, are they in it (m,)?)."""
    here = (targets >= v.start) & (targets < v.stop)
    return (targets - v.start).clamp(0, v.stop - v.start - 1)[:, None], here


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, D), (V, D), (M,) -> log-probs (M,) of the targets and entropies (M,), both fp32, in nats.

        log softmax(hidden @ weight.T / temperature)[target]

    hidden: the state at the position *before* each target, which is where it was predicted.
    weight: the LM head, fp32 or bf16. The log-probs carry gradient to `hidden`, and to `weight`,
    each only where it requires it; the entropies (of the same tempered distribution) carry none.
    chunk: tokens at a time; None takes as many as fit LOGITS_BYTES (eight times that on a GPU). It
    changes memory, and results by rounding only.
    Raises AssertionError for shapes that do not fit, or a target outside V.
    """
    assert hidden.dim() == weight.dim() == 2 and hidden.shape[1] == weight.shape[1], (
        f"hidden is (M, D) and weight (V, D): got {tuple(hidden.shape)}, {tuple(weight.shape)}"
    )
    assert targets.shape == hidden.shape[:1], "one target a hidden state: (M,)"
    assert not ((targets < 0) | (targets >= len(weight))).any(), "a target is an id below V"
    if chunk is None:
        widest = next(head_slices(weight.detach()))[1].shape[0]
        chunk = max(1, budget(LOGITS_BYTES, hidden.device) // (4 * widest))  # 4 bytes a logit
    assert chunk >= 1, "a chunk holds at least one token"
    return LinearLogprobs.apply(hidden, weight, targets.long(), temperature, chunk)


# -------------------------------------------------------------------------------- a worked example


def demo() -> None:
    """One question, two roll-outs: right in one turn, wrong in two. Eq. 5-7 and the gradient."""
    rewards = torch.tensor([1.0, 0.0])  # (R,)
    advantages = group_advantages(rewards, torch.tensor([0, 0]))  # (R,)
    rollout_ids = torch.tensor([0, 1, 1])  # (N,) roll-out 1 has two turns
    lengths = torch.tensor([2, 1, 4])  # (N,) tokens of each plan
    weights = turn_weights(torch.zeros_like(rollout_ids), rollout_ids, lengths)  # (N,)
    mask = torch.arange(4) < lengths[:, None]  # (N, L) by who wrote the token, not by its value

    ratio = torch.tensor([[1.0, 1.5, 1, 1], [0.5, 1, 1, 1], [1.1, 1.0, 0.9, 2.0]])  # (N, L)
    logp_old = torch.full((3, 4), -1.0)  # (N, L)
    logp = (logp_old + ratio.log()).requires_grad_()  # (N, L) what gives those ratios
    row_advantages = advantages[rollout_ids]  # (N,) the same for each turn of a roll-out
    loss, statistics = flow_grpo_loss(
        logp, logp_old, logp_old, row_advantages, weights, mask, beta=0.0
    )
    loss.backward()

    print("Eq. 7  reward -> advantage:", *(f"{r:g} -> {a:+.4f}" for r, a in zip(
        rewards.tolist(), advantages.tolist(), strict=True)))
    print("\nEach row is a planner turn; each token: ratio (gradient of the loss).")
    print("A gradient below zero makes the token likelier; 0 means that the clip stopped it.\n")
    print("roll-out  tokens  weight   advantage")
    for n in range(len(lengths)):
        row = [f"{ratio[n, j]:.1f} ({logp.grad[n, j]:+.4f})" for j in range(int(lengths[n]))]
        print(f"{rollout_ids[n]:8d}  {lengths[n]:6d}  {weights[n]:.4f}   {row_advantages[n]:+.4f} ",
              *row, sep="  ")
    print(f"\nweights x lengths sum to {(weights * lengths).sum():.4f}")
    print(f"Eq. 5  loss = -J = {loss:+.4f}   ", *(f"{k} {v:.3g}" for k, v in statistics.items()))


if __name__ == "__main__":
    demo()
