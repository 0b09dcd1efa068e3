"""train.py: Algorithm 1's outer loop. Questions -> roll-outs -> outcome -> Flow-GRPO update.

    python train.py                                   the paper in miniature, minutes on a laptop
    python train.py --max_steps 5                     a taste of a minute or two
    python train.py --resume --output_dir runs/NAME   goes on after a stop
    python train.py --model Qwen/Qwen2.5-7B-Instruct --data FILE.jsonl   a real backbone, one GPU

Each step samples Q questions, lets the flow of agentflow.py answer each of them G times with the
present planner, scores the final answers (the only reward there is), turns the scores of a group
into advantages (Eq. 7) and takes a gradient step on the clipped objective (Eq. 5 and 6). The
mathematics is in flow_grpo.py; here are data, batches, checkpoints and logs.
Left out on purpose: a format or length reward, an entropy bonus, a value model, a reward model.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import agentflow
import eval as evaluation
import flow_grpo
from modules import planner_ask
from tools import sandbox_line


@dataclass
class Config(agentflow.ToolFlags):
    """The command line of train.py. Names follow Hugging Face TRL where the meaning is the same;
    the paper's symbol stands in the comment."""

    # What is learnt, by which model
    preset: str = "laptop"  # laptop | smollm2 | single_gpu_24gb | single_gpu_80gb | paper
    data: str = "builtin"  # questions: "builtin", a JSON/JSONL file, or sets by name: "nq,deepmath"
    data_questions: int = 0  # so many of sets by name; 0: as many as the steps ask
    eval_data: str = ""  # held-out questions, as eval.py's --data; default: a tenth of --data
    reward: str = ""  # FILE.py:FUNCTION(response, question) -> 0..1, instead of the answer's rule
    model: str = "builtin"  # "builtin", "smollm2", a folder, or a name on the Hugging Face hub
    device: str = "auto"  # auto | cpu | cuda | mps
    frozen_url: str = ""  # an OpenAI-compatible server (".../v1") for the frozen modules
    frozen_model: str = ""  # its name there; default: the only one that is served
    judge: str = ""  # an OpenAI-compatible server that judges answers, instead of the rule
    judge_model: str = ""  # its name there; default: the only one that is served
    # Roll-outs
    num_questions: int = 8  # Q: questions a step
    num_generations: int = 8  # G: roll-outs a question
    max_turns: int = 3  # T_max
    temperature: float = 1.0  # of the planner; sampling and scoring both use it
    max_completion_length: int = 96  # tokens of one planner reply, |a| at most
    max_frozen_length: int = 96  # tokens of one reply of a frozen module
    max_prompt_length: int = 1500  # tokens; a longer prompt loses the middle of old results
    slots: int = 64  # S: replies generated at a time; a matter of memory and speed
    # Flow-GRPO
    max_steps: int = 60  # gradient steps on fresh roll-outs
    learning_rate: float = 1e-3  # AdamW (0.9, 0.999), constant
    beta: float = 0.001  # weight of KL(pi_theta || pi_ref)
    epsilon: float = 0.2  # clip range below 1
    epsilon_high: float = 0.3  # clip range above 1
    num_iterations: int = 1  # updates on the same roll-outs
    lora_r: int = 16  # rank of the planner's adapter; 0: all weights are trained
    lora_alpha: int = 32  # the adapter's output is scaled by alpha / r
    micro_batch_tokens: int = 2048  # packed tokens of one forward; changes memory, not gradients
    gradient_checkpointing: bool = False  # compute activations twice, keep a layer's input only
    # Running
    seed: int = 0  # of questions, sampling and the adapter's start
    output_dir: str = ""  # default: runs/<date-time>
    save_steps: int = 1  # a checkpoint every so many steps
    keep: int = 2  # checkpoints kept, the last ones; 0: all
    eval_questions: int = 0  # measure on so many held-out questions, evenly spread; 0: on all
    eval_steps: int = 0  # held-out accuracy every so many steps; 0: only before and after
    eval_temperature: float = 0.7  # of the planner when it is measured (the paper's test setting)
    log_rollouts: int = 0  # roll-outs written a step; 0: all of them
    report_to: str = "none"  # none | tensorboard | trackio | wandb: curves there too
    deterministic: bool = False  # replies enter in request order: two runs agree bit for bit
    resume: bool = False  # go on from the last checkpoint in --output_dir
    dry_run: bool = False  # say what would run, with how much memory and time, and load nothing


MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.01


# --- The update: rows, micro-batches, Eq. 5 ----------------------------------------------------


@dataclass
class Row:
    """One planner turn as a training sample. Everything but the ids is fixed before any
    micro-batch is made, which is why micro-batches cannot change the gradient."""

    prompt_ids: list[int]
    response_ids: list[int]  # a_i^t, as sampled
    logp_old: list[float]  # log pi_old of each of them, from the sampler
    advantage: float  # A_i, Eq. 7
    weight: float  # 1 / (Q · G · T_i · |a_i^t|), Eq. 5
    group: int  # its question's place in the step
    # Filled in by the first scoring pass, for the run's files; None where no pass was needed.
    logp_ref: list[float] | None = None
    entropy: list[float] | None = None


def make_rows(rollouts: list, rewards: torch.Tensor, group_ids: torch.Tensor):
    """(rows, advantages (R,)): a row for every planner turn of every roll-out of a step."""
    advantages = flow_grpo.group_advantages(rewards, group_ids)  # (R,)  Eq. 7
    turns = [(i, turn.planner) for i, rollout in enumerate(rollouts) for turn in rollout.turns]
    rollout_ids = torch.tensor([i for i, _ in turns])  # (N,)
    lengths = torch.tensor([len(reply.response_ids) for _, reply in turns])  # (N,)
    weights = flow_grpo.turn_weights(group_ids[rollout_ids], rollout_ids, lengths)  # (N,)
    rows = [
        Row(
            reply.prompt_ids,
            reply.response_ids,
            reply.logp,
            advantages[i].item(),
            weight,
            group_ids[i].item(),
        )
        for (i, reply), weight in zip(turns, weights.tolist(), strict=True)
    ]
    return rows, advantages


def micro_batches(rows: list[Row], tokens: int) -> list[list[Row]]:
    """Cut rows into runs of at most `tokens` tokens, counting a shared prompt prefix once.

    Rows that begin alike stay beside each other: the more they share, the less is computed. A
    single row over the budget gets a batch of its own.
    """
    batches: list[list[Row]] = []
    total, before = 0, []  # tokens of the last batch's trie, and of its last row
    for row in sorted(rows, key=lambda row: (row.group, row.prompt_ids, row.response_ids)):
        ids = row.prompt_ids + row.response_ids
        # In sorted order a row shares most with the one before it: the rest is what it adds.
        new = len(ids) - agentflow.common_prefix([before, ids])
        if batches and total + new <= tokens:
            batches[-1].append(row)
            total += new
        else:
            batches.append([row])
            total = len(ids)
        before = ids
    return batches


def pad(values: list, width: int, device) -> torch.Tensor:
    """A list of N sequences -> (N, L), zeros at the right."""
    out = torch.zeros(len(values), width, device=device)
    for i, value in enumerate(values):
        out[i, : len(value)] = torch.as_tensor(value, device=device)
    return out


def score_rows(backbone, rows: list[Row], temperature: float, gate: int):
    """log-probs (N, L) and entropies (N, L) of the rows' responses: gate 1 = pi_theta, 0 = pi_ref.

    One forward over the packed rows; the LM head sees only the positions that predict a response.
    """
    prompts, responses = [r.prompt_ids for r in rows], [r.response_ids for r in rows]
    hidden = backbone.packed_hidden(prompts, responses, gate)  # (M, D)
    targets = torch.tensor([t for ids in responses for t in ids], device=hidden.device)  # (M,)
    logp, entropy = flow_grpo.linear_logprobs(
        hidden, backbone.head_weight(gate), targets, temperature
    )  # (M,), (M,)
    lengths = [len(ids) for ids in responses]
    width = max(lengths)
    row = torch.repeat_interleave(
        torch.arange(len(rows), device=hidden.device), torch.tensor(lengths, device=hidden.device)
    )  # (M,) which row a token belongs to
    column = torch.cat([torch.arange(length, device=hidden.device) for length in lengths])  # (M,)
    empty = logp.new_zeros(len(rows), width)  # (N, L)
    return empty.index_put((row, column), logp), empty.index_put((row, column), entropy)


def accumulate_gradients(backbone, rows: list[Row], config: Config) -> dict[str, float]:
    """Backward through Eq. 5 over all rows, micro-batch by micro-batch; returns the statistics.

    The loss is a weighted sum with weights that were fixed for the whole step, so the gradients
    of micro-batches simply add up.
    """
    totals = dict.fromkeys(
        ("loss", "kl", "entropy", "clip", "clip_low", "clip_high", "gap_mean"), 0.0
    )
    totals["gap_max"] = 0.0
    all_tokens = sum(len(row.response_ids) for row in rows)
    for batch in micro_batches(rows, config.micro_batch_tokens):
        logp, entropy = score_rows(backbone, batch, config.temperature, gate=1)  # (N, L) each
        width, device = logp.shape[1], logp.device
        logp_old = pad([row.logp_old for row in batch], width, device)  # (N, L)
        mask = pad([[1.0] * len(row.response_ids) for row in batch], width, device)  # (N, L)
        logp_ref = None
        if config.beta:
            with torch.no_grad():
                logp_ref, _ = score_rows(backbone, batch, config.temperature, gate=0)  # (N, L)
        loss, statistics = flow_grpo.flow_grpo_loss(
            logp,
            logp_old,
            logp_ref,
            torch.tensor([row.advantage for row in batch], device=device),
            torch.tensor([row.weight for row in batch], device=device),
            mask,
            epsilon_low=config.epsilon,
            epsilon_high=config.epsilon_high,
            beta=config.beta,
        )
        loss.backward()
        keep_token_values(batch, entropy, logp_ref)
        tokens = mask.sum().item()
        share = tokens / all_tokens
        gap = ((logp.detach() - logp_old).abs() * mask)  # (N, L) sampler against scorer
        totals["loss"] += loss.item()
        totals["kl"] += statistics["kl"].item() * share
        totals["entropy"] += (entropy * mask).sum().item() / all_tokens
        totals["clip"] += statistics["clip_fraction"].item() * share
        totals["clip_low"] += statistics["clip_low_fraction"].item() * share
        totals["clip_high"] += statistics["clip_high_fraction"].item() * share
        totals["gap_mean"] += gap.sum().item() / all_tokens
        totals["gap_max"] = max(totals["gap_max"], gap.max().item())
    return totals


def keep_token_values(batch: list[Row], entropy, logp_ref) -> None:
    """(N, L) tensors of a micro-batch -> a list a row, once: what the token inspector shows."""
    for i, row in enumerate(batch):
        if row.entropy is None:
            length = len(row.response_ids)
            row.entropy = [round(value, 5) for value in entropy[i, :length].tolist()]
            if logp_ref is not None:
                row.logp_ref = [round(value, 5) for value in logp_ref[i, :length].tolist()]


def update(
    backbone,
    optimizer,
    rows: list[Row],
    config: Config,
    before_step: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """`num_iterations` gradient steps on one batch of roll-outs; the first one's statistics are
    logged for the sampler's gap, the last one's for the rest.

    before_step: called before a weight changes; see InterruptLater.
    """
    if not config.beta:  # a flat group has advantage 0: without a KL term it has no gradient
        rows = [row for row in rows if row.advantage != 0]
    parameters = backbone.trainable_parameters()
    report: dict[str, float] = {"grad_norm": 0.0}
    for iteration in range(config.num_iterations if rows else 0):
        optimizer.zero_grad(set_to_none=True)
        totals = accumulate_gradients(backbone, rows, config)
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"The gradient is {norm.item()}: it is not applied. Start again with a lower "
                "--learning_rate; the last lines of metrics.jsonl show whether kl or the sampler's "
                "gap jumped."
            )
        before_step()
        optimizer.step()
        if iteration:  # later iterations are off the sampler's policy: their gap is the update's
            totals["gap_mean"], totals["gap_max"] = report["gap_mean"], report["gap_max"]
        report = {**totals, "grad_norm": norm.item()}
    backbone.adapter_changed()  # cached keys and values of the planner are out of date
    return report


# --- What a step is measured by ----------------------------------------------------------------


def step_metrics(rollouts, rewards, group_ids, report, rows, config, seconds) -> dict:
    """The metrics of a step under TRL's names, flat; conventions for ours are in the README.

    Every statistic is over all roll-outs of the step, the flat and the failed ones included; those
    of the update over the rows that it saw (without a KL term it skips flat groups).
    """
    groups = [rewards[group_ids == group] for group in group_ids.unique().tolist()]  # Q x (G,)
    groups = [group[~group.isnan()] for group in groups]
    spread = [group.std().item() if len(group) > 1 else 0.0 for group in groups]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    lengths = [len(turn.planner.response_ids) for turn in turns]
    errors = [turn.result.error for turn in turns]
    called = [turn.plan.tool_name for turn in turns if turn.arguments is not None]
    sequences: dict[int, set] = {}
    for group, rollout in zip(group_ids.tolist(), rollouts, strict=True):
        names = tuple(turn.plan.tool_name for turn in rollout.turns)
        sequences.setdefault(group, set()).add(names)
    metrics = {
        "reward": rewards.nanmean().item(),
        "reward_std": mean(spread),
        "frac_reward_zero_std": mean([value < 1e-6 for value in spread]),
        "kl": report.get("kl"),
        "entropy": report.get("entropy"),
        "loss": report.get("loss"),
        "grad_norm": report.get("grad_norm"),
        "learning_rate": config.learning_rate,
        "clip_ratio/region_mean": report.get("clip"),
        "clip_ratio/low_mean": report.get("clip_low"),
        "clip_ratio/high_mean": report.get("clip_high"),
        "completions/mean_length": mean(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": mean([not turn.planner.finished for turn in turns]),
        "num_tokens": sum(len(row.prompt_ids) + len(row.response_ids) for row in rows),
        "sampling/sampling_logp_difference/mean": report.get("gap_mean"),
        "sampling/sampling_logp_difference/max": report.get("gap_max"),
        "turns/mean": len(turns) / len(rollouts),
        "verifier/stop_rate": mean([rollout.stopped for rollout in rollouts]),
        "memory/tokens": mean([len(rollout.generator.prompt_ids) for rollout in rollouts]),
        "prompts/shortened": sum(rollout.shortened for rollout in rollouts),
        "tools/call_frequency": len(called) / len(rollouts),
        "tools/failure_frequency": mean([error != "none" for error in errors]),
        "rollouts/failed": int(rewards.isnan().sum()),
        "rollouts/unique_tool_sequences": mean([len(names) for names in sequences.values()]),
    }
    for name in sorted(set(called)):
        failed = [t.result.error != "none" for t in turns if t.plan.tool_name == name]
        metrics[f"tools/{name}/share"] = called.count(name) / len(called)
        metrics[f"tools/{name}/failure"] = mean(failed)
    for kind in sorted(set(errors) - {"none"}):
        metrics[f"tools/errors/{kind}"] = errors.count(kind)
    return {**metrics, **seconds}


def mean(values: list) -> float:
    return sum(values) / len(values) if values else 0.0


def without_nan(value):
    """JSON has no NaN: null says "not measured"."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def step_line(metrics: dict, groups: int) -> str:
    """One line a step, always in this order."""

    def show(name: str, form: str) -> str:
        return "-" if metrics.get(name) is None else format(metrics[name], form)

    line = (
        f"step {metrics['step']:3d} | reward {show('reward', '.2f')}"
        f" | turns {show('turns/mean', '.2f')} | len {show('completions/mean_length', '.0f')}"
        f" | kl {show('kl', '.4f')} | clip {show('clip_ratio/region_mean', '.3f')}"
        f" | grad {show('grad_norm', '.2f')}"
        f" | flat {round(metrics['frac_reward_zero_std'] * groups)}/{groups}"
        f" | {show('step_time', '.1f')}s"
    )
    if "eval/accuracy" in metrics:
        line += f" | held out {metrics['eval/accuracy']:.3f}"
    return line


def curve(values: list[float], width: int = 60, height: int = 8) -> str:
    """A small curve in the terminal: the mean reward over the steps."""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    points = [mean(values[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    lines = []
    for level in range(height, 0, -1):
        marks = "".join("█" if point * height >= level - 0.5 else " " for point in points)
        lines.append(f"{level / height:4.2f} |{marks}")
    return "\n".join([*lines, f"     +{'-' * count}", f"      reward, steps 1 to {len(values)}"])


# --- Alarms ------------------------------------------------------------------------------------


WINDOW = 5  # steps of a mean: the first ones are a run's start, the last ones its present


def alarms(history: list[dict], fp32: bool, rollouts: int) -> dict[str, str]:
    """name -> a sentence with the remedy, for whatever in a run needs its owner.

    history: the rows of metrics.jsonl, the present step's last; a metric may be None or missing.
    fp32: are the weights fp32, so that sampler and scorer differ by rounding alone?
    rollouts: R, of each step. A mean over some steps decides, or a bound that no healthy step
    comes near: a single odd step is no alarm. README's "Alarms" has them in a table.
    """
    return {**learning_alarms(history, fp32), **flow_alarms(history, rollouts)}


def known(history: list[dict], name: str) -> list[float]:
    """A metric's values, oldest first, without the steps that did not measure it."""
    values = [row.get(name) for row in history]
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


def start_and_present(history: list[dict], name: str) -> tuple[float, float] | None:
    """A metric's means over a run's first and last steps; None while these are the same steps."""
    values = known(history, name)
    if len(values) < 2 * WINDOW:
        return None
    return mean(values[:WINDOW]), mean(values[-WINDOW:])


def learning_alarms(history: list[dict], fp32: bool) -> dict[str, str]:
    """Is anything learnt, and does it hold? For `alarms`, from rewards, policy and adapter."""
    found = {}
    # The median of the steps before, not their mean: one odd step must not raise it. Two steps
    # running: in a healthy run one alone can be at ten times the median. A whole nat a token is
    # too far from the start at any time; a much too high learning rate is there in two steps.
    kl = known(history, "kl")
    earlier, jumped = sorted(kl[-2 * WINDOW - 2 : -2]), min(kl[-2:], default=0.0)
    usual = earlier[len(earlier) // 2] if len(earlier) >= WINDOW else math.inf
    if len(kl) >= 2 and jumped > min(1.0, max(0.1, 10 * usual)):
        found["kl"] = (
            f"kl is {jumped:.3g} and more for two steps: the planner runs away from its start. "
            "Begin again with a lower --learning_rate or a higher --beta."
        )
    flat = mean(known(history, "frac_reward_zero_std")[-2 * WINDOW :])
    reward = mean(known(history, "reward")[-2 * WINDOW :])
    if len(history) >= WINDOW and flat > 0.5:
        if "kl" in found:
            remedy = "The planner ran away: see kl."
        elif reward > 0.75:
            remedy = "These questions are learnt: stop, or give harder ones with --data."
        elif reward < 0.25:
            remedy = "Give easier questions with --data, or raise --num_generations, --temperature."
        else:
            remedy = "Most are always right or never: raise --num_generations or --temperature."
        found["flat"] = (
            f"{flat:.0%} of the groups had equal rewards, {reward:.2f} on the mean. {remedy}"
        )
    gap = known(history, "sampling/sampling_logp_difference/mean")[-1:]
    if gap and gap[0] > (1e-4 if fp32 else 0.05):
        found["gap"] = (
            f"sampler and scorer differ by {gap[0]:.2g} a token, more than "
            f"{'fp32' if fp32 else 'bf16'} rounds: the update is of another policy than the one "
            "that was sampled. Stop, run the tests, and compare with --device cpu."
        )
    entropy = start_and_present(history, "entropy")
    if entropy and entropy[1] < entropy[0] / 10 and reward < 0.9:
        found["entropy"] = (
            f"the planner's entropy fell from {entropy[0]:.2g} to {entropy[1]:.2g}: it has stopped "
            "to try anything else. Lower --learning_rate, or raise --beta or --temperature."
        )
    return {**found, **training_alarms(history, fp32)}


def training_alarms(history: list[dict], fp32: bool) -> dict[str, str]:
    """Is it really training? By the adapter's size, and by one right answer of each step."""
    found = {}
    norms = [row.get("adapter/delta_norm") for row in history[-4:]]
    spread = [share < 1 for share in known(history[-3:], "frac_reward_zero_std")]
    if len(norms) == 4 and None not in norms and spread == [True] * 3:
        if all(math.isclose(norm, norms[0], rel_tol=1e-7) for norm in norms):
            rate = history[-1].get("learning_rate")
            found["unchanged"] = (
                f"the adapter has been at {norms[0]:.4g} for 3 steps, although rewards differed: "
                + ("set --learning_rate, it is 0." if rate == 0 else "raise --learning_rate.")
            )
    probed = [row for row in history if known([row], "probe/logp_before")]
    probed = [row for row in probed if known([row], "probe/logp_after")][-2 * WINDOW :]
    if len(probed) == 2 * WINDOW:
        changes = [row["probe/logp_after"] - row["probe/logp_before"] for row in probed]
        # Rounding alone moves a row's sum by about this much: a gap a token, in bf16 large.
        gap = mean(known(probed, "sampling/sampling_logp_difference/mean"))
        noise = gap * mean(known(probed, "completions/mean_length"))
        # A healthy run has falls too, once right answers are likely anyway: small and in between.
        falls = sum(changes) < -0.5 * sum(map(abs, changes)) and mean(changes) < -max(0.05, noise)
        if falls or (fp32 and mean([abs(change) for change in changes]) <= 10 * noise):
            found["probe"] = (
                f"over {len(probed)} steps an update changed the log-prob of a right answer by "
                f"{mean(changes):.2g} nats on the mean, and should raise it. "
                + ("Lower" if falls else "Raise")
                + " --learning_rate."
            )
    return found


def flow_alarms(history: list[dict], rollouts: int) -> dict[str, str]:
    """Do roll-outs still do what they should? For `alarms`, from replies, tools and servers."""
    found = {}
    clipped = known(history, "completions/clipped_ratio")[-WINDOW:]
    if len(clipped) >= 3 and mean(clipped) > 0.25:
        found["clipped"] = (
            f"{mean(clipped):.0%} of the planner's replies were cut at the limit, and what a plan "
            "ends with is lost. Raise --max_completion_length."
        )
    length = start_and_present(history, "completions/mean_length")
    if length and not length[0] / 2 < length[1] < 2 * length[0]:
        found["length"] = (
            f"planner replies went from {length[0]:.0f} to {length[1]:.0f} tokens. If the reward "
            "did not rise with it, lower --learning_rate or raise --beta."
        )
    errors = known(history, "tools/failure_frequency")
    if len(errors) >= 2 * WINDOW:
        # Against the best five steps so far: an alarm that stays while the errors stay.
        ends = range(WINDOW, len(errors) - WINDOW + 1)
        best, now = min(mean(errors[end - WINDOW : end]) for end in ends), mean(errors[-WINDOW:])
        if now > best + 0.15:
            kinds = {name for row in history[-WINDOW:] for name in row if "tools/errors/" in name}
            most = max(kinds, key=lambda name: sum(known(history[-WINDOW:], name)), default="")
            found["tool_errors"] = (
                f"{now:.0%} of the tool calls fail, at best it was {best:.0%}; most are "
                f"`{most.rpartition('/')[2]}`. Read some in rollouts/; if it is the planner's "
                "doing and no server's, lower --learning_rate or raise --beta."
            )
    calls = start_and_present(history, "tools/call_frequency")
    reward = start_and_present(history, "reward")
    if calls and reward and calls[1] < calls[0] / 2 and reward[1] < reward[0] + 0.05:
        found["tool_use"] = (
            f"tool calls a roll-out fell from {calls[0]:.2f} to {calls[1]:.2f}, and the reward did "
            "not rise with it. Read in rollouts/ whether plans are still readable; lower "
            "--learning_rate or raise --beta."
        )
    failed = known(history[-1:], "rollouts/failed")
    if failed and failed[0] > rollouts / 10:
        found["failed"] = (
            f"{failed[0]:.0f} of {rollouts} roll-outs have no reward and teach nothing: a server "
            "does not answer. Check --judge and --frozen_url."
        )
    return found


def sound_alarms(run: Run, metrics: dict, fp32: bool) -> list[str]:
    """Notes the present step's alarms in its row, as `alarms`; returns a line for each new one.

    An alarm is said once, and again only when it was away for WINDOW steps: a mean that wavers at
    its bound is one alarm. A function of the rows alone, so that a resumed run says what one that
    never stopped would.
    """
    before, rollouts = run.metrics(), run.config.num_questions * run.config.num_generations
    now = alarms([*before, metrics], fp32, rollouts)
    said = set()
    for end in range(max(0, len(before) - WINDOW) + 1, len(before) + 1):
        said |= alarms(before[:end], fp32, rollouts).keys()
    metrics["alarms"] = list(now)
    return [f"  ! {name}: {text}" for name, text in now.items() if name not in said]


def probe_row(rows: list[Row]) -> Row | None:
    """One right answer of a step: the first row of the highest advantage; None if all are flat."""
    best = max(rows, key=lambda row: row.advantage, default=None)
    return best if best is not None and best.advantage > 0 else None


def probe(backbone, rows: list[Row], config: Config) -> dict[str, float | None]:
    """Is it really training? The log-prob of one right answer before and after the update.

    In nats, summed over the answer's tokens, at the temperature of sampling. Before: the sampler's
    own; after: a forward of that one row, without gradient and without a random number. One update
    serves all rows, with the momentum of those before it: early in a run it nearly always raises
    the probe, later, when right answers are likely anyway, about every second time.
    """
    row = probe_row(rows)
    if row is None:
        return {"probe/logp_before": None, "probe/logp_after": None}
    with torch.no_grad():
        logp, _ = score_rows(backbone, [row], config.temperature, gate=1)  # (1, L)
    return {"probe/logp_before": sum(row.logp_old), "probe/logp_after": logp.sum().item()}


# --- Reporting elsewhere -----------------------------------------------------------------------

TRACKERS = ("tensorboard", "trackio", "wandb")  # each the name of its package too


def check_report_to(name: str) -> None:
    """Raises ValueError for a tracker that is unknown or not installed."""
    if name not in ("none", *TRACKERS):
        raise ValueError(f"--report_to is none, {', '.join(TRACKERS)}; not {name}.")
    if name != "none" and importlib.util.find_spec(name) is None:
        raise ValueError(f"--report_to {name} needs the package {name}: pip install {name}")


class Tracker:
    """--report_to: the numbers of metrics.jsonl, passed on to a tracker while the run goes on.

    None of these packages is needed, so each is imported here alone. The run does not hang on its
    tracker: what that raises later is said once, and nothing more is passed on.
    Raises ValueError where it cannot be opened.
    """

    def __init__(self, name: str, folder: Path, settings: dict) -> None:
        self.name, self.writer = name, None
        try:
            if name == "tensorboard":
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(str(folder))
            elif name != "none":
                self.writer = importlib.import_module(name)
                self.writer.init(
                    project="agentflow", name=folder.resolve().name, config=settings
                )
        except Exception as error:  # whatever a foreign package raises: no login, no server
            raise ValueError(
                f"--report_to {name} cannot be opened ({type(error).__name__}: {error}). Set it "
                "up as its own pages say, or leave the flag out."
            ) from error

    def log(self, metrics: dict) -> None:
        """A step's row; names and nulls in it stay in metrics.jsonl alone."""
        numbers = {name: values[0] for name in metrics if (values := known([metrics], name))}
        step = numbers.pop("step")
        if self.name == "tensorboard":
            for name, value in numbers.items():
                self._pass_on("add_scalar", name, value, step)
        else:
            self._pass_on("log", numbers, step=step)

    def close(self) -> None:
        self._pass_on("close" if self.name == "tensorboard" else "finish")
        self.writer = None

    def _pass_on(self, method: str, *arguments, **options) -> None:
        if self.writer is None:
            return
        try:
            getattr(self.writer, method)(*arguments, **options)
        except Exception as error:  # as above; the run's own files have every number
            self.writer = None
            print(
                f"--report_to {self.name} is switched off: {type(error).__name__}: {error}. The "
                "run goes on, and metrics.jsonl has every step.",
                file=sys.stderr,
            )


def head_name(system: str) -> str:
    return hashlib.sha256(system.encode()).hexdigest()[:8]


def heads_of(rollouts: list) -> dict[str, str]:
    """name -> system text, for every head that the roll-outs' prompts start with."""
    replies = [rollout.generator for rollout in rollouts] + [r.analysis for r in rollouts]
    for turn in (turn for rollout in rollouts for turn in rollout.turns):
        replies += [reply for reply in (turn.planner, turn.executor, turn.verifier) if reply]
    systems = {reply.ask.system for reply in replies}
    return {head_name(system): system for system in sorted(systems)}


def rollout_record(step, group, number, question, rollout, rows, reward, advantage) -> dict:
    """A roll-out's line in rollouts/<step>.jsonl. rows: its turns' training rows.

    A prompt is written without its head, the system text that it shares with many others: `head`
    names it, and rollouts/heads.json holds each once (the planner's `prompt_ids` are whole).
    """

    def said(reply, **more) -> dict:
        head = head_name(reply.ask.system)
        return {"head": head, "prompt": reply.ask.user, "reply": reply.text, **more}

    turns = []
    for turn, row, kept in zip(rollout.turns, rows, rollout.steps, strict=True):
        planner = said(
            turn.planner,
            prompt_ids=turn.planner.prompt_ids,
            reply_ids=turn.planner.response_ids,
            logp=[round(value, 5) for value in turn.planner.logp],
            logp_ref=row.logp_ref,
            entropy=row.entropy,
        )
        turns.append(
            {
                "planner": planner,
                "executor": said(turn.executor) if turn.executor else None,
                "tool": {
                    "name": turn.plan.tool_name,
                    "arguments": turn.arguments,
                    "output": turn.result.output,
                    "error": turn.result.error,
                    "seconds": round(turn.result.seconds, 4),
                },
                "verifier": said(turn.verifier, stop=turn.stop),
                "seconds": round(kept.seconds, 4),  # as in the memory: plan, command and tool
                "code": turn.result.code,  # what Python_Coder_Tool ran
            }
        )
    answer = evaluation.extract_answer(rollout.generator.text) or rollout.generator.text.strip()
    return {
        "step": step,
        "group": group,
        "rollout": number,
        "id": question.id,
        "question": question.text,
        "reference": question.references,
        "answer": answer,
        "reward": without_nan(reward),
        "advantage": round(advantage, 6),
        "analysis": said(rollout.analysis),
        "turns": turns,
        "memory": rollout.memory,
        "generator": said(rollout.generator),
        "prompt": question.text,  # TRL's names for the same two columns
        "completion": answer,
    }


# --- The run folder ----------------------------------------------------------------------------


def write_atomically(path: Path, text: str) -> None:
    """Beside it, then renamed: a reader sees the old file or the new one, never half of one."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def write_json(path: Path, value) -> None:
    write_atomically(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def write_jsonl(path: Path, rows: list[dict]) -> None:
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


# What may differ between a run and its resumption: how long and where, not what is learnt; and the
# limit that a run may have stopped over.
MAY_CHANGE = {
    "max_steps", "output_dir", "resume", "save_steps", "eval_steps", "log_rollouts", "device",
    "report_to", "micro_batch_tokens", "max_prompt_length", "sandbox", "contact", "no_cache",
}


class Run:
    """The run folder of one training run: configuration, metrics, roll-outs, checkpoints."""

    def __init__(self, config: Config, questions: list, held_out: list) -> None:
        self.folder = Path(config.output_dir or time.strftime("runs/%Y-%m-%d-%H%M%S"))
        self.config = config
        self.description = {
            **dataclasses.asdict(config),
            "output_dir": str(self.folder),
            "data_hash": evaluation.data_hash(questions),
            "eval_hash": evaluation.data_hash(held_out),
            "versions": versions(),
        }
        path = self.folder / "run_config.json"
        if config.resume:
            self.check_same(path)
        elif path.exists() or (self.folder / "metrics.jsonl").exists() or self.checkpoints():
            raise ValueError(
                f"{self.folder} already holds a run. Add --resume to go on with it, or choose "
                "another --output_dir."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = agentflow.lock_folder(self.folder)
        self.tracker = Tracker(config.report_to, self.folder, dataclasses.asdict(config))
        write_json(path, self.description)
        (self.folder / "rollouts").mkdir(exist_ok=True)

    def check_same(self, path: Path) -> None:
        """Refuse to go on with another configuration than the run was started with."""
        if not self.config.output_dir:
            raise ValueError("--resume goes on in --output_dir: name the folder of the run.")
        try:
            before = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"--resume: {path} cannot be read, so {self.folder} is no run that can go on."
            ) from error
        names = {field.name for field in dataclasses.fields(Config)} | {"data_hash", "eval_hash"}
        for name in sorted(names - MAY_CHANGE, key=lambda name: (name.endswith("_hash"), name)):
            if before.get(name) != self.description[name]:
                raise ValueError(
                    f"--resume: {self.folder} was started with {name} = {before.get(name)!r}, now "
                    f"it is {self.description[name]!r}. Leave the flag out, or start anew."
                )

    def checkpoints(self) -> list[Path]:
        """The finished checkpoints, oldest first."""
        found = [path for path in self.folder.glob("checkpoint-*") if path.name[11:].isdigit()]
        return sorted(found, key=lambda path: int(path.name[11:]))

    def save(self, step: int, backbone, optimizer) -> None:
        """checkpoint-<step>/ written beside and renamed, and the adapter in the run folder."""
        final = self.folder / f"checkpoint-{step}"
        if not final.exists():
            beside = self.folder / f"checkpoint-{step}.tmp"
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            backbone.save_adapter(beside)
            # Questions and samples are hashed from (seed, step, ...): nothing in training draws
            # from torch's generator. Its state is kept for whoever adds something that does.
            random_state = {"torch": torch.get_rng_state()}
            try:
                torch.save(optimizer.state_dict(), beside / "optimizer.pt")
                torch.save(random_state, beside / "rng_state.pth")
            except RuntimeError as error:  # that is how torch says that the disk is full
                raise OSError(f"{beside} cannot be written: {error}") from error
            write_json(beside / "trainer_state.json", {"step": step})
            os.replace(beside, final)
        backbone.save_adapter(self.folder)

    def load_last(self, backbone, optimizer) -> int:
        """Load the last checkpoint and forget what was logged after it; returns its step."""
        found = self.checkpoints()
        try:
            return self._load(found, backbone, optimizer)
        except Exception as error:  # whatever a damaged file makes a reader say
            name = found[-1] if found else self.folder / "metrics.jsonl"
            raise ValueError(
                f"--resume: {name} is damaged ({type(error).__name__}: {error}). Move it away to "
                "go on from what was saved before it."
            ) from error

    def _load(self, found: list[Path], backbone, optimizer) -> int:
        step = 0
        if found:
            backbone.load_adapter(found[-1])
            device = backbone.device
            state = torch.load(found[-1] / "optimizer.pt", map_location=device, weights_only=True)
            optimizer.load_state_dict(state)
            torch.set_rng_state(torch.load(found[-1] / "rng_state.pth", weights_only=True)["torch"])
            step = json.loads((found[-1] / "trainer_state.json").read_text())["step"]
            if found[-1].name != f"checkpoint-{step}":
                raise ValueError(f"trainer_state.json says that this is step {step}")
        self.rewrite_metrics(step)
        return step

    def metrics(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")
        # the last line may be half a line, if the machine went down while it was written
        return [json.loads(line) for line in lines if line.endswith("}")]

    def rewrite_metrics(self, step: int) -> None:
        """Steps after the checkpoint are done again: their lines would stand twice."""
        write_jsonl(
            self.folder / "metrics.jsonl", [row for row in self.metrics() if row["step"] <= step]
        )

    def log(self, metrics: dict) -> None:
        row = {name: without_nan(value) for name, value in metrics.items()}
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def add_heads(self, heads: dict[str, str]) -> None:
        path = self.folder / "rollouts" / "heads.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not heads.keys() <= known.keys():
            write_json(path, {**known, **heads})

    def write_evaluation(self, name: str, result: dict) -> None:
        write_jsonl(self.folder / f"{name}.jsonl", result["items"])

    def read_evaluation(self, name: str) -> dict | None:
        path = self.folder / f"{name}.jsonl"
        if not path.exists():
            return None
        lines = path.read_text(encoding="utf-8").split("\n")
        try:
            return evaluation.summarise([json.loads(line) for line in lines if line])
        except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
            raise ValueError(
                f"{path} is damaged ({error}): move it away to measure anew."
            ) from error


def versions() -> dict[str, str]:
    import numpy
    import transformers

    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
    }


# --- Algorithm 1, outer loop -------------------------------------------------------------------


def questions_of_step(questions: list, step: int, config: Config) -> list[int]:
    """The Q questions of a step, by their place: epoch after epoch, each in its own order.

    A function of (seed, step) alone, so a resumed run goes on where it stopped.
    """
    first = (step - 1) * config.num_questions
    order, shuffled = [], None
    places = []
    for position in range(first, first + config.num_questions):
        epoch, place = divmod(position, len(questions))
        if epoch != shuffled:
            order, shuffled = list(range(len(questions))), epoch
            random.Random(f"{config.seed}/{epoch}").shuffle(order)
        places.append(order[place])
    return places


class InterruptLater:
    """Ctrl-C between `hold()` and `release()` waits for the release.

    An update must not be cut in two: half of the weights at step n and half at n+1 are a state
    that no checkpoint should hold. Before the update a step may be dropped, after it is done.
    """

    def __init__(self) -> None:
        self.pending, self.previous = False, None

    @property
    def holding(self) -> bool:
        return self.previous is not None

    def hold(self) -> None:
        if not self.holding:
            self.previous = signal.signal(signal.SIGINT, self._note)

    def _note(self, *_) -> None:
        self.pending = True

    def drop(self) -> bool:
        """Ends the hold; was Ctrl-C pressed meanwhile?"""
        if self.holding:
            signal.signal(signal.SIGINT, self.previous)
            self.previous = None
        pressed, self.pending = self.pending, False
        return pressed

    def release(self) -> None:
        """Ends the hold. Raises KeyboardInterrupt if Ctrl-C was pressed meanwhile."""
        if self.drop():
            raise KeyboardInterrupt


def train_step(
    step: int, questions: list, backbone, optimizer, tools, config: Config, run: Run, hold
) -> dict:
    """One pass of Algorithm 1: returns the step's metrics. `hold` is called before the update."""
    started = time.perf_counter()
    # 1. Roll-outs: G attempts at each of Q questions with the present planner, pi_old
    places = questions_of_step(questions, step, config)
    total = len(places) * config.num_generations
    with tqdm(total=total, desc=f"step {step} roll-outs", leave=False, disable=None) as bar:
        rollouts = agentflow.roll_out(
            [questions[place].text for place in places],
            config.num_generations,
            backbone,
            tools,
            agentflow.limits_of(config, backbone),
            agentflow.sampling_of(config, config.temperature),
            seed=config.seed,
            step=step,
            ids=places,
            deterministic=config.deterministic,
            on_done=lambda index, rollout: bar.update(),
        )
    rolled = time.perf_counter()
    # 2. Outcome: one number a roll-out, broadcast unchanged to all of its turns
    group_ids = torch.arange(len(places)).repeat_interleave(config.num_generations)  # (R,)
    asked = [questions[places[group]] for group in group_ids.tolist()]
    judged = [q.reward(rollout.generator.text) for q, rollout in zip(asked, rollouts, strict=True)]
    rewards = torch.tensor(judged, dtype=torch.float64)  # (R,) 0.2 is logged as 0.2
    scored = time.perf_counter()
    # 3. Update: Eq. 5 to 7
    rows, advantages = make_rows(rollouts, rewards, group_ids)
    report = update(backbone, optimizer, rows, config, before_step=hold)
    probed = probe(backbone, rows, config)
    trained = time.perf_counter()
    # 4. Log
    seconds = {
        "step_time": trained - started,
        "time/rollout": rolled - started,
        "time/tools": sum(t.result.seconds for r in rollouts for t in r.turns),
        "time/score": scored - rolled,
        "time/train": trained - scored,
        "adapter/delta_norm": backbone.adapter_norm() if config.lora_r else None,
        **probed,
    }
    log_rollouts(run, step, asked, rollouts, rows, rewards.tolist(), advantages.tolist())
    return {
        "step": step,
        **step_metrics(rollouts, rewards, group_ids, report, rows, config, seconds),
    }


def log_rollouts(run, step, asked, rollouts, rows, rewards, advantages) -> None:
    """rollouts/<step>.jsonl, a line a roll-out; one whole roll-out in the terminal now and then.

    asked, rollouts, rewards, advantages: R of each, group by group; rows: one a turn, in order.
    """
    config, left = run.config, iter(rows)
    records = []
    for i, rollout in enumerate(rollouts):
        group, number = divmod(i, config.num_generations)
        own_rows = list(itertools.islice(left, len(rollout.turns)))
        records.append(
            rollout_record(
                step, group, number, asked[i], rollout, own_rows, rewards[i], advantages[i]
            )
        )
    write_jsonl(run.folder / f"rollouts/{step}.jsonl", records[: config.log_rollouts or None])
    run.add_heads(heads_of(rollouts))
    if step % config.save_steps == 1 or config.save_steps == 1:
        tqdm.write(f"\nOne roll-out of step {step}, reward {rewards[0]:g}:")
        tqdm.write(agentflow.describe(rollouts[0]) + "\n")


def measure(backbone, held_out, tools, config: Config, title: str) -> dict:
    """Held-out accuracy: the same items, random numbers and code before, between and after."""
    return evaluation.evaluate(
        backbone,
        held_out,
        tools,
        agentflow.limits_of(config, backbone),
        agentflow.sampling_of(config, config.eval_temperature),
        config.seed,
        title,
    )


def is_measured(step: int, config: Config) -> bool:
    """Is held-out accuracy measured behind this step? Behind the last one it is anyway."""
    return bool(config.eval_steps) and step % config.eval_steps == 0 and step < config.max_steps


def measure_late(run: Run, done: int, held_out, tools, backbone) -> None:
    """A stop during a step's measurement left its line without the accuracy: measured now, by the
    same weights, so that the numbers are those of a run that was never stopped."""
    rows = run.metrics()
    if rows and rows[-1]["step"] == done and is_measured(done, run.config):
        if "eval/accuracy" not in rows[-1]:
            late = measure(backbone, held_out, tools, run.config, f"held out, step {done}")
            rows[-1]["eval/accuracy"] = late["accuracy"]
            write_jsonl(run.folder / "metrics.jsonl", rows)


def take_steps(run: Run, done: int, questions, held_out, tools, backbone, optimizer) -> int:
    """Steps done + 1 to the last one: each logged, some measured and saved. Returns the last one.

    On Ctrl-C, or whatever else ends it early, every finished step is saved before it is raised on.
    """
    config = run.config
    interrupt, step = InterruptLater(), done
    try:
        for step in range(done + 1, config.max_steps + 1):
            metrics = train_step(
                step, questions, backbone, optimizer, tools, config, run, interrupt.hold
            )
            done = step
            try:
                interrupt.release()
                if is_measured(step, config):
                    middle = measure(backbone, held_out, tools, config, f"held out, step {step}")
                    metrics["eval/accuracy"] = middle["accuracy"]
            finally:  # a step that was taken is logged, whatever happens after it
                interrupt.hold()
                news = sound_alarms(run, metrics, backbone.dtype == torch.float32)
                run.log(metrics)
                print(step_line(metrics, config.num_questions), *news, sep="\n", flush=True)
                run.tracker.log(metrics)
            if step % config.save_steps == 0:
                run.save(step, backbone, optimizer)
            interrupt.release()
        interrupt.hold()
        run.save(done, backbone, optimizer)
        interrupt.release()
    except BaseException:  # Ctrl-C, a full disk, a gradient that is no number: nothing is lost
        if interrupt.holding:  # the step failed after its update: the weights are this step's
            done = step
        interrupt.hold()  # an impatient second Ctrl-C waits too
        run.save(done, backbone, optimizer)
        interrupt.drop()
        raise
    return done


def train(config: Config, run: Run, questions, held_out, tools, backbone) -> dict:
    """The whole run; returns summary.json's content. On Ctrl-C everything done so far is saved."""
    started = time.perf_counter()
    # lr 0 in AdamW also switches weight decay off, which is scaled by it
    optimizer = torch.optim.AdamW(
        backbone.trainable_parameters(),
        lr=config.learning_rate,
        betas=(0.9, 0.999),
        weight_decay=WEIGHT_DECAY,
        foreach=True,
    )
    done = run.load_last(backbone, optimizer) if config.resume else 0
    if config.resume:
        left = max(0, config.max_steps - done)
        print(f"resumed after step {done}; {left} steps to go", flush=True)
        measure_late(run, done, held_out, tools, backbone)
    before = run.read_evaluation("eval_before")
    if before is None or done == 0:
        before = measure(backbone, held_out, tools, config, "held out, before")
        run.write_evaluation("eval_before", before)
    print(f"held-out accuracy before: {before['accuracy']:.3f}", flush=True)
    done = take_steps(run, done, questions, held_out, tools, backbone, optimizer)
    after = measure(backbone, held_out, tools, config, "held out, after")
    run.write_evaluation("eval_after", after)
    summary = {
        "accuracy_before": before["accuracy"],
        "accuracy_after": after["accuracy"],
        "tool_errors_before": before["tool_errors"],
        "tool_errors_after": after["tool_errors"],
        "turns_before": before["turns"],
        "turns_after": after["turns"],
        "steps": done,
        "seconds": round(time.perf_counter() - started, 1),
        "seed": config.seed,
    }
    write_json(run.folder / "summary.json", summary)
    print("\n" + evaluation.table({"before": before, "after": after}))
    rewards = [row["reward"] for row in run.metrics() if row["reward"] is not None]
    if rewards:
        print("\n" + curve(rewards))
    print(f"\nadapter, metrics and roll-outs: {run.folder}")
    return summary


TURN_LABELS = 32  # tokens of a turn's labels, tool name, error and verdict in the memory
LEAST = {
    **agentflow.LEAST, "num_questions": 1, "max_steps": 0, "num_iterations": 1, "save_steps": 1,
    "micro_batch_tokens": 1, "eval_steps": 0, "log_rollouts": 0, "learning_rate": 0, "beta": 0,
    "epsilon": 0, "epsilon_high": 0, "data_questions": 0,
}  # fmt: skip


def flags_of_start(arguments: list[str] | None) -> dict:
    """With --resume, what the run was started with: the defaults of the command that goes on.

    Not `offline`, which stands for more than its flag there. What cannot be read is left to
    `Run.check_same` to complain about.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--resume", action="store_true")
    first.add_argument("--output_dir", default="")
    early = first.parse_known_args(arguments)[0]
    path = Path(early.output_dir) / "run_config.json"
    if not (early.resume and early.output_dir and path.is_file()):
        return {}
    try:
        started = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
    return {
        field.name: started[field.name]
        for field in dataclasses.fields(Config)
        if field.name not in ("resume", "output_dir", "offline")
        and type(started.get(field.name)) is type(field.default)
    }


def resolved(config: Config) -> Config:
    """The configuration with what its defaults stand for, as run_config.json holds it."""
    count = config.data_questions
    if {*config.data.split(",")} <= {*evaluation.TRAINING} and not count:
        count = max(1, config.max_steps) * config.num_questions
    offline = agentflow.is_offline(config.offline, config.model, config.data)
    return dataclasses.replace(config, offline=offline, data_questions=count)


def load_data(config: Config, offline: bool) -> tuple[list, list]:
    """(training questions, held-out questions), with --reward's function where there is one."""
    access = {"offline": offline, "no_cache": config.no_cache}
    questions = evaluation.load_training(config.data, config.data_questions, **access)
    if config.eval_data or config.data == "builtin":
        held_out = evaluation.load_named(config.eval_data or "builtin", **access)
    else:
        questions, held_out = evaluation.split_questions(questions)
    held_out = evaluation.evenly_spread(held_out, config.eval_questions)
    if not questions or not held_out:
        raise ValueError(
            f"--data {config.data} leaves {len(questions)} questions to train on and "
            f"{len(held_out)} held out; both need some. Give more, or name --eval_data."
        )
    judged = evaluation.with_reward([*questions, *held_out], config.reward)
    return judged[: len(questions)], judged[len(questions) :]


def prepare(config: Config, offline: bool = False):
    """(training questions, held-out questions, tools, backbone) of a configuration. offline:
    public sets come from the cache alone.

    Raises ValueError with a sentence for whatever in it cannot work.
    """
    if config.num_generations < 2:
        raise ValueError(
            "--num_generations must be at least 2: an advantage compares the roll-outs of a "
            "question with each other (Eq. 7), and one alone teaches nothing."
        )
    agentflow.check_ranges(config, LEAST)
    check_report_to(config.report_to)
    if config.temperature == 0:
        raise ValueError("--temperature must be above 0: without sampling all roll-outs are equal.")
    tools = agentflow.tools_from_flags(config)  # first: a missing key shows before any download
    questions, held_out = load_data(config, offline)
    backbone = agentflow.load_backbone(
        config.model,
        config.device,
        lora_r=config.lora_r,
        lora_alpha=config.lora_alpha,
        seed=config.seed,
    )
    check_prompt_room(config, backbone, tools, [*questions, *held_out])
    return questions, held_out, tools, backbone


def check_prompt_room(config: Config, backbone, tools, questions) -> None:
    """Raises ValueError where a prompt could outgrow --max_prompt_length with no result in it."""
    by_size = sorted((q.text for q in questions), key=lambda text: len(text.encode()))
    bare = max(backbone.prompt_length(planner_ask(text, "", tools, "")) for text in by_size[-50:])
    # The analysis comes in too, and of each turn what is never cut: sub-goal, command and labels.
    turn = config.max_completion_length + config.max_frozen_length + TURN_LABELS
    needed = bare + config.max_frozen_length + config.max_turns * turn
    if needed > config.max_prompt_length:
        raise ValueError(
            f"The longest question needs a prompt of up to {needed} tokens, results not counted: "
            f"raise --max_prompt_length ({config.max_prompt_length})."
        )


def main(arguments: list[str] | None = None) -> int:
    asked = agentflow.parse_flags(Config, arguments, __doc__, flags_of_start(arguments))
    config = resolved(asked)
    try:
        # A built-in model keeps its tools offline; that does not keep its user from loading data.
        questions, held_out, tools, backbone = prepare(config, offline=bool(asked.offline))
        run = Run(config, questions, held_out)
    except (ValueError, OSError) as error:
        return agentflow.fail(error)
    if config.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    print(" ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items()))
    print(
        f"{len(questions)} questions to train on, {len(held_out)} held out; "
        f"{backbone.device}; run folder {run.folder}"
    )
    if any(tool.name == "Python_Coder_Tool" for tool in tools):
        print(sandbox_line())
    try:
        train(config, run, questions, held_out, tools, backbone)
    except KeyboardInterrupt:
        print(
            "\nstopped; finished steps are saved. To go on: "
            f"python train.py --resume --output_dir {run.folder}",
            file=sys.stderr,
        )
        return 130
    except (ValueError, OSError, FloatingPointError) as error:
        return agentflow.fail(error)
    finally:
        run.tracker.close()
    return 0


if __name__ == "__main__":
    sys.exit(agentflow.run_command(main))
