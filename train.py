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
import datetime
import hashlib
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
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from tqdm import tqdm

import agentflow
import eval as evaluation
import flow_grpo
from modules import planner_ask
from tools import ServerDown, sandbox_line


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


# --- Several processes: torchrun ---------------------------------------------------------------


@dataclass
class Team:
    """The processes that share a step, one a device: `torchrun --nproc_per_node 2 train.py`.

    A step's questions are dealt out, groups whole. Everybody learns all roll-outs and rewards, so
    that advantages and weights (Eq. 7 and 5) are those of one process; each computes the gradient
    of its own rows, and their sum is the step's. Only rank 0 writes. Alone, nothing is sent.
    """

    rank: int = 0
    size: int = 1
    talk: Any = None  # the group for Python objects; tensors go over the default one

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def gather(self, value) -> list:
        """The value of each process, in the order of ranks; everybody waits for all."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.talk)
        return values

    def add_gradients(self, parameters: list) -> None:
        """Each gradient becomes the sum over the processes; one that had no row adds zeros."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)  # a sum

    def own(self, count: int) -> list[int]:
        """Which of `count` things, dealt out in turn, are this process's."""
        return list(range(self.rank, count, self.size))


ALONE = Team()


def join_team(device: str) -> tuple[Team, str]:
    """The processes that torchrun started, and this one's device; without it, one and `device`."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE, device
    on_cuda = device in ("auto", "cuda") and torch.cuda.is_available()
    if on_cuda:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    patience = datetime.timedelta(hours=2)  # for whoever's roll-outs are done first
    dist.init_process_group("nccl" if on_cuda else "gloo", timeout=patience)
    rank = dist.get_rank()
    if rank:  # one voice in the terminal; errors are everybody's
        sys.stdout = open(os.devnull, "w")
    return Team(rank, size, dist.new_group(backend="gloo", timeout=patience)), device


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


def accumulate_gradients(
    backbone, rows: list[Row], config: Config, all_tokens: int | None = None
) -> dict[str, float]:
    """Backward through Eq. 5 over all rows, micro-batch by micro-batch; returns the statistics.

    The loss is a weighted sum with weights that were fixed for the whole step, so the gradients
    of micro-batches (and of processes) simply add up. all_tokens: of the step's responses, where
    other processes have the other rows; the statistics are then this process's shares.
    """
    totals = dict.fromkeys(
        ("loss", "kl", "entropy", "clip", "clip_low", "clip_high", "gap_mean"), 0.0
    )
    totals["gap_max"] = 0.0
    all_tokens = all_tokens or response_tokens(rows)
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


def response_tokens(rows: list[Row]) -> int:
    return sum(len(row.response_ids) for row in rows)


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
    team: Team = ALONE,
    before_step: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """`num_iterations` gradient steps on one batch of roll-outs; the first one's statistics are
    logged for the sampler's gap, the last one's for the rest.

    before_step: called before a weight changes. Raises FloatingPointError for a gradient that is no
    number, MemoryError where half the token budget is still too much.
    """
    if not config.beta:  # a flat group has advantage 0: without a KL term it has no gradient
        rows = [row for row in rows if row.advantage != 0]
    own = [row for row in rows if row.group % team.size == team.rank]
    all_tokens = response_tokens(rows)

    def gradients() -> dict[str, float]:
        optimizer.zero_grad(set_to_none=True)
        return accumulate_gradients(backbone, own, config, all_tokens)

    def smaller() -> str:
        config.micro_batch_tokens = max(1, config.micro_batch_tokens // 2)
        return f"--micro_batch_tokens {config.micro_batch_tokens} from now on"

    parameters = backbone.trainable_parameters()
    report: dict[str, float] = {"grad_norm": 0.0}
    for iteration in range(config.num_iterations if rows else 0):
        totals = add_statistics(team.gather(within_memory(gradients, smaller)))
        team.add_gradients(parameters)
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
    for rank, values in enumerate(team.gather([(row.entropy, row.logp_ref) for row in own])):
        theirs = [row for row in rows if row.group % team.size == rank]
        for row, (entropy, logp_ref) in zip(theirs, values, strict=True):
            row.entropy, row.logp_ref = entropy, logp_ref
    return report


def add_statistics(parts: list[dict[str, float]]) -> dict[str, float]:
    """The processes' shares of a step's statistics, together."""
    total = {name: sum(part[name] for part in parts) for name in parts[0]}
    return {**total, "gap_max": max(part["gap_max"] for part in parts)}


def within_memory(work: Callable[[], Any], make_smaller: Callable[[], str]) -> Any:
    """work(), and where the device's memory does not suffice, once more after make_smaller(), which
    says what it did. Raises MemoryError, with the flags to lower, if that does not help."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        said = str(error).split("\n")[0]
    # Out of the except block: its traceback would keep the tensors that have to go.
    tqdm.write(f"out of memory ({said}): {make_smaller()}")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        return work()
    except torch.OutOfMemoryError as error:
        raise MemoryError(agentflow.OUT_OF_MEMORY.format(str(error).split("\n")[0])) from error


CHUNK = 1 << 24  # weights updated at a time: what they take in fp32 stays small


def round_at_random(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """fp32 -> bf16, up or down with the probability that makes the mean right.

    Rounded to the nearest, a step of 1e-6 on a weight of 0.02 is lost, each time: bf16 has 8 bits,
    and the next number is 1e-4 away. Rounded at random it happens once in a hundred times, whole.
    A bf16 number is the upper half of an fp32 one: a random lower half is added, and cut off.
    """
    bits = values.float().view(torch.int32)
    noise = torch.empty_like(bits).random_(0, 1 << 16, generator=generator)
    return ((bits + noise) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW for bf16 weights, with bf16 moments, all of them rounded at random: 8 bytes a weight
    with its gradient, instead of 16. That is how a whole 7B model trains on one GPU.

    The random numbers are those of (seed, update, parameter): a resumed run draws the same, and so
    do several processes.
    """

    def __init__(self, parameters, lr: float, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
                 seed: int = 0) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps,
                                      "weight_decay": weight_decay})  # fmt: skip
        self.seed = seed

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for number, weight in enumerate(group["params"]):
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)
                state["step"] += 1
                generator = torch.Generator(weight.device)
                generator.manual_seed(agentflow.row_seed((self.seed, state["step"], number)))
                parts = (weight, weight.grad, state["exp_avg"], state["exp_avg_sq"])
                for chunk in zip(*(x.view(-1).split(CHUNK) for x in parts), strict=True):
                    self._move(*chunk, group, state["step"], generator)

    @staticmethod
    def _move(weight, grad, exp_avg, exp_avg_sq, group, step, generator) -> None:
        beta1, beta2 = group["betas"]
        grad = grad.float()
        first = exp_avg.float().lerp_(grad, 1 - beta1)
        second = exp_avg_sq.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        size = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        new = weight.float().mul_(1 - group["lr"] * group["weight_decay"])
        new.addcdiv_(first, size, value=-group["lr"] / (1 - beta1**step))
        for old, value in ((weight, new), (exp_avg, first), (exp_avg_sq, second)):
            old.copy_(round_at_random(value, generator))


def new_optimizer(parameters: list, config: Config) -> torch.optim.Optimizer:
    """AdamW. lr 0 also switches weight decay off, which is scaled by it."""
    options = {"lr": config.learning_rate, "betas": (0.9, 0.999), "weight_decay": WEIGHT_DECAY}
    if parameters[0].dtype == torch.bfloat16:
        return RoundedAdamW(parameters, **options, seed=config.seed)
    on_cuda = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(parameters, **options, fused=on_cuda, foreach=not on_cuda)


# --- What a step is measured by ----------------------------------------------------------------


def step_metrics(rollouts, rewards, group_ids, report, rows, config, seconds) -> dict:
    """The metrics of a step under TRL's names, flat; conventions for ours are in the README.

    Every statistic is over all roll-outs of the step that came to an end, the flat ones included;
    those of the update over the rows that it saw (without a KL term it skips flat groups).
    """
    ended = [rollout for rollout in rollouts if not rollout.failed]
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
        "turns/mean": len(turns) / len(ended),
        "verifier/stop_rate": mean([rollout.stopped for rollout in ended]),
        "memory/tokens": mean([len(rollout.generator.prompt_ids) for rollout in ended]),
        "prompts/shortened": sum(rollout.shortened for rollout in ended),
        "tools/call_frequency": len(called) / len(ended),
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
        "failed": rollout.failed or None,  # the server that was down
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


# What may differ between a run and its resumption: how long, where and in how much memory, not what
# is learnt; and the limit that a run may have stopped over.
MAY_CHANGE = {
    "max_steps", "output_dir", "resume", "preset", "dry_run", "save_steps", "keep", "eval_steps",
    "log_rollouts", "report_to", "device", "slots", "micro_batch_tokens", "gradient_checkpointing",
    "max_prompt_length", "sandbox", "contact", "no_cache",
}
ADDRESSES = {"frozen_url", "judge"}  # a server may have moved; whether there is one may not change


class Run:
    """The run folder of one training run: configuration, metrics, roll-outs, checkpoints.

    Of several processes only the first one writes; the others read.
    """

    def __init__(self, config: Config, questions: list, held_out: list, writes=True) -> None:
        self.folder = Path(config.output_dir or time.strftime("runs/%Y-%m-%d-%H%M%S"))
        self.config, self.writes, self.logged = config, writes, 0
        if not writes:
            return
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
        write_json(path, self.description)
        (self.folder / "rollouts").mkdir(exist_ok=True)

    def close(self) -> None:
        """Lets others use the folder."""
        if self.writes:
            self.lock.close()

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
            was, now = before.get(name), self.description[name]
            if name in ADDRESSES:
                was, now = bool(was), bool(now)
            if was != now:
                raise ValueError(
                    f"--resume: {self.folder} was started with {name} = {before.get(name)!r}, now "
                    f"it is {self.description[name]!r}. Leave the flag out, or start anew."
                )

    def checkpoints(self) -> list[Path]:
        """The finished checkpoints, oldest first."""
        found = [path for path in self.folder.glob("checkpoint-*") if path.name[11:].isdigit()]
        return sorted(found, key=lambda path: int(path.name[11:]))

    def save(self, step: int, backbone, optimizer, metrics: dict | None = None) -> None:
        """checkpoint-<step>/ written beside and renamed, older ones removed (`--keep`); the adapter
        also in the run folder. metrics: the step's line, so that no step has one without the other.
        """
        if not self.writes:
            return
        final = self.folder / f"checkpoint-{step}"
        if not final.exists():
            beside = self.folder / f"checkpoint-{step}.tmp"
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            # Questions and samples are hashed from (seed, step, ...): nothing in training draws
            # from torch's generator. Its state is kept for whoever adds something that does.
            random_state = {"torch": torch.get_rng_state()}
            try:
                backbone.save_planner(beside)
                torch.save(optimizer.state_dict(), beside / "optimizer.pt")
                torch.save(random_state, beside / "rng_state.pth")
            except (RuntimeError, SafetensorError) as error:  # how these say that the disk is full
                raise OSError(f"{beside} cannot be written: {error}") from error
            write_json(beside / "trainer_state.json", {"step": step, "metrics": metrics})
            os.replace(beside, final)
        if backbone.lora_r:
            backbone.save_adapter(self.folder)
        for old in self.checkpoints()[: -self.config.keep or len(self.checkpoints())]:
            shutil.rmtree(old)

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
        step, line = 0, None
        if found:
            backbone.load_planner(found[-1])
            device = backbone.device
            state = torch.load(found[-1] / "optimizer.pt", map_location=device, weights_only=True)
            optimizer.load_state_dict(state)
            torch.set_rng_state(torch.load(found[-1] / "rng_state.pth", weights_only=True)["torch"])
            state = json.loads((found[-1] / "trainer_state.json").read_text())
            step, line = state["step"], state["metrics"]
            if found[-1].name != f"checkpoint-{step}":
                raise ValueError(f"trainer_state.json says that this is step {step}")
        if self.writes:
            self.rewrite_metrics(step, line)
        return step

    def metrics(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")
        # the last line may be half a line, if the machine went down while it was written
        return [json.loads(line) for line in lines if line.endswith("}")]

    def rewrite_metrics(self, step: int, line: dict | None = None) -> None:
        """Steps after the checkpoint are done again: their lines would stand twice. line: the
        checkpoint's own, where the run ended before it was written."""
        rows = [row for row in self.metrics() if row["step"] <= step]
        if line and (not rows or rows[-1]["step"] < step):
            rows.append(line)
        write_jsonl(self.folder / "metrics.jsonl", rows)
        self.logged = step

    def log(self, metrics: dict) -> None:
        """A step's line, once; whole or not at all, also where the disk is full."""
        if not self.writes or metrics["step"] <= self.logged:
            return
        row = {name: without_nan(value) for name, value in metrics.items()}
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            size = file.tell()
            try:
                file.write(json.dumps(row) + "\n")
                file.flush()
            except OSError:
                file.truncate(size)
                raise
        self.logged = metrics["step"]

    def write_rollouts(self, step: int, records: list[dict], heads: dict[str, str]) -> None:
        """rollouts/<step>.jsonl, and in rollouts/heads.json the heads that its prompts name."""
        if not self.writes:
            return
        write_jsonl(self.folder / f"rollouts/{step}.jsonl", records)
        path = self.folder / "rollouts" / "heads.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not heads.keys() <= known.keys():
            write_json(path, {**known, **heads})

    def write_evaluation(self, name: str, result: dict) -> None:
        if self.writes:
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
    """Ctrl-C, or a SIGTERM, between `hold()` and `release()` waits for the release.

    An update must not be cut in two: half of the weights at step n and half at n+1 are a state
    that no checkpoint should hold. Nor may one of several processes stop where others wait for it.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.pending, self.previous = False, None

    def hold(self) -> None:
        if self.previous is None:
            self.previous = [signal.signal(number, self._note) for number in self.SIGNALS]

    def _note(self, *_) -> None:
        self.pending = True

    def drop(self) -> bool:
        """Ends the hold; was Ctrl-C pressed meanwhile?"""
        if self.previous is not None:
            for number, handler in zip(self.SIGNALS, self.previous, strict=True):
                signal.signal(number, handler)
            self.previous = None
        pressed, self.pending = self.pending, False
        return pressed

    def release(self) -> None:
        """Ends the hold. Raises KeyboardInterrupt if Ctrl-C was pressed meanwhile."""
        if self.drop():
            raise KeyboardInterrupt


@dataclass
class Training:
    """What the functions of the outer loop work with."""

    config: Config
    run: Run
    questions: list
    held_out: list
    tools: list
    scoring: evaluation.Scoring
    backbone: Any
    optimizer: torch.optim.Optimizer
    team: Team
    interrupt: InterruptLater
    torn: bool = False  # an update is under way: the weights are those of no step


def shared(t: Training, count: int, work: Callable[[list[int]], list]) -> list:
    """A result for each of `count` things: every process makes those of its own places, by
    work(places) -> results, and learns the others'.

    Ctrl-C is held before and after, and may break the work off: then KeyboardInterrupt is raised in
    all processes, at the same place.
    """
    made = None
    try:
        t.interrupt.release()
        made = work(t.team.own(count))
        t.interrupt.hold()
    except KeyboardInterrupt:
        t.interrupt.hold()
    results: list = [None] * count
    everyone = t.team.gather(made)
    if any(part is None for part in everyone):
        raise KeyboardInterrupt
    for rank, part in enumerate(everyone):
        results[rank :: t.team.size] = part
    return results


def train_step(t: Training, step: int) -> tuple[dict, list, dict]:
    """One pass of Algorithm 1: the step's metrics, its roll-outs' records, their prompts' heads."""
    config, started = t.config, time.perf_counter()
    # 1. Roll-outs: G attempts at each of Q questions with the present planner, pi_old
    places = questions_of_step(t.questions, step, config)
    groups = shared(t, len(places), lambda own: roll_out_groups(t, step, places, own))
    rollouts = list(itertools.chain(*groups))  # (R,) group by group
    group_ids = torch.arange(len(places)).repeat_interleave(config.num_generations)  # (R,)
    rolled = time.perf_counter()
    # 2. Outcome: one number a roll-out, broadcast unchanged to all of its turns
    asked = [t.questions[places[group]] for group in group_ids.tolist()]
    outcomes = shared(t, len(rollouts), lambda own: score(t, step, asked, rollouts, own))
    rewards = rewards_of(outcomes, step)  # (R,)
    scored = time.perf_counter()
    # 3. Update: Eq. 5 to 7
    rows, advantages = make_rows(rollouts, rewards, group_ids)
    t.torn = False
    report = update(t.backbone, t.optimizer, rows, config, t.team, lambda: setattr(t, "torn", True))
    trained = time.perf_counter()
    # 4. Log
    seconds = {
        "step_time": trained - started,
        "time/rollout": rolled - started,
        "time/tools": sum(turn.result.seconds for r in rollouts for turn in r.turns),
        "time/score": scored - rolled,
        "time/train": trained - scored,
        "adapter/delta_norm": t.backbone.adapter_norm(),
    }
    metrics = step_metrics(rollouts, rewards, group_ids, report, rows, config, seconds)
    records = rollout_records(t, step, asked, rollouts, rows, rewards.tolist(), advantages.tolist())
    t.torn = False
    return {"step": step, **metrics}, records, heads_of(rollouts)


def roll_out_groups(t: Training, step: int, places: list[int], own: list[int]) -> list[list]:
    """The G roll-outs of each of the own groups; places: which questions the step asks."""
    config, sampling = t.config, agentflow.sampling_of(t.config, t.config.temperature)
    number = config.num_generations
    again = [places[:group].count(places[group]) for group in own]  # asked twice in one step

    def work() -> list:
        title, total = f"step {step} roll-outs", len(own) * number
        hidden = None if t.team.leads else True  # None: shown in a terminal only
        with tqdm(total=total, desc=title, leave=False, disable=hidden) as bar:
            return agentflow.roll_out(
                [t.questions[places[group]].text for group in own],
                number,
                t.backbone,
                t.tools,
                agentflow.limits_of(config, t.backbone),
                sampling,
                seed=config.seed,
                step=step,
                ids=[places[group] for group in own],
                again=again,
                deterministic=config.deterministic,
                on_done=lambda index, rollout: bar.update(),
            )

    rollouts = within_memory(work, lambda: f"--slots {t.backbone.halve_slots()} from now on")
    return [rollouts[i : i + number] for i in range(0, len(rollouts), number)]


def score(t: Training, step: int, asked: list, rollouts: list, own: list[int]) -> list:
    """(reward, what server was down) of the own roll-outs; NaN where nobody could judge one."""

    def outcome(place: int):
        if rollouts[place].failed:
            return math.nan, rollouts[place].failed
        try:
            reply = rollouts[place].generator.text
            return (yield from t.scoring.reward(reply, asked[place])), ""
        except ServerDown as error:
            return math.nan, str(error)

    keys = [(t.config.seed, step, -1, place) for place in own]  # no roll-out has these
    sampling = agentflow.sampling_of(t.config, 0.0)
    return agentflow.drive([outcome(place) for place in own], keys, t.backbone, sampling)


def rewards_of(outcomes: list[tuple[float, str]], step: int) -> torch.Tensor:
    """Outcomes -> rewards (R,), fp64: 0.2 is logged as 0.2. Raises ServerDown where servers left
    none: a step of which nobody knows anything is not taken."""
    if all(down for _, down in outcomes):
        raise ServerDown(
            f"Step {step} is not taken, none of its roll-outs has a reward: {outcomes[0][1]}. "
            "Start the server again (it may have another address now), then go on with --resume."
        )
    return torch.tensor([reward for reward, _ in outcomes], dtype=torch.float64)


def rollout_records(t: Training, step, asked, rollouts, rows, rewards, advantages) -> list[dict]:
    """A line of rollouts/<step>.jsonl for each roll-out; one of them in the terminal now and then.

    asked, rollouts, rewards, advantages: R of each, group by group; rows: one a turn, in order.
    """
    left, records = iter(rows), []
    for i, rollout in enumerate(rollouts):
        group, number = divmod(i, t.config.num_generations)
        own_rows = list(itertools.islice(left, len(rollout.turns)))
        records.append(
            rollout_record(
                step, group, number, asked[i], rollout, own_rows, rewards[i], advantages[i]
            )
        )
    if t.team.leads and step % SHOW_EVERY == 1 and not rollouts[0].failed:
        tqdm.write(f"\nOne roll-out of step {step}, reward {rewards[0]:g}:")
        tqdm.write(agentflow.describe(rollouts[0]) + "\n")
    return records[: t.config.log_rollouts or None]


def measure(t: Training, title: str) -> dict:
    """Held-out accuracy: the same items, random numbers and code before, between and after."""
    count = len(t.held_out)

    def work(own: list[int]) -> list:
        if not own:
            return []
        return evaluation.evaluate(
            t.backbone,
            t.held_out,
            t.tools,
            agentflow.limits_of(t.config, t.backbone),
            agentflow.sampling_of(t.config, t.config.eval_temperature),
            t.config.seed,
            title if t.team.leads else "",
            scoring=t.scoring,
            done=set(range(count)) - set(own),
        )["items"]

    return evaluation.summarise(shared(t, count, work))


def measure_step(t: Training, step: int) -> None:
    """Adds the held-out accuracy behind a step to its line, where it is due and not yet there: a
    stop during the measurement leaves that to the run that goes on, with the same weights."""
    every = t.config.eval_steps
    if not every or step % every or step >= t.config.max_steps:
        return
    rows = t.team.gather(t.run.metrics())[0]
    if rows and rows[-1]["step"] == step and "eval/accuracy" not in rows[-1]:
        rows[-1]["eval/accuracy"] = measure(t, f"held out, step {step}")["accuracy"]
        print(f"held-out accuracy after step {step}: {rows[-1]['eval/accuracy']:.3f}", flush=True)
        if t.run.writes:
            write_jsonl(t.run.folder / "metrics.jsonl", rows)


def commit(t: Training, finished: tuple[dict, list, dict], save: bool) -> None:
    """Writes what a step left: roll-outs, metrics, checkpoint. Once more does no harm."""
    metrics, records, heads = finished
    t.run.write_rollouts(metrics["step"], records, heads)
    t.run.log(metrics)
    if save:
        t.run.save(metrics["step"], t.backbone, t.optimizer, metrics)


def take_steps(t: Training, done: int) -> int:
    """Steps done + 1 to the last one: each logged, some saved and measured. Returns the last one.

    On Ctrl-C, or whatever else ends it early, every finished step is saved before it is raised on;
    except where an update broke off in the middle: its weights are no step's, and the last
    checkpoint stands.
    """
    config, finished = t.config, None
    t.interrupt.hold()
    try:
        for step in range(done + 1, config.max_steps + 1):
            finished = train_step(t, step)
            done = step
            commit(t, finished, save=step % config.save_steps == 0)
            print(step_line(finished[0], config.num_questions), flush=True)
            measure_step(t, step)
    finally:  # Ctrl-C, a full disk, a gradient that is no number: nothing is lost
        t.interrupt.hold()
        if finished is None:  # no step: the planner as it was
            t.run.save(done, t.backbone, t.optimizer)
        elif not t.torn:
            commit(t, finished, save=True)
    return done


def train(t: Training) -> dict:
    """The whole run; returns summary.json's content. On Ctrl-C everything done so far is saved."""
    started, config, run = time.perf_counter(), t.config, t.run
    done = run.load_last(t.backbone, t.optimizer) if config.resume else 0
    if config.resume:
        left = max(0, config.max_steps - done)
        print(f"resumed after step {done}; {left} steps to go", flush=True)
        measure_step(t, done)
    before = t.team.gather(run.read_evaluation("eval_before"))[0]
    if before is None or done == 0:
        before = measure(t, "held out, before")
        run.write_evaluation("eval_before", before)
    print(f"held-out accuracy before: {before['accuracy']:.3f}", flush=True)
    done = take_steps(t, done)
    after = measure(t, "held out, after")
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
    if run.writes:
        write_json(run.folder / "summary.json", summary)
    print("\n" + evaluation.table({"before": before, "after": after}))
    rewards = [row["reward"] for row in run.metrics() if row["reward"] is not None]
    if rewards:
        print("\n" + curve(rewards))
    print(f"\nadapter, metrics and roll-outs: {run.folder}")
    return summary


SHOW_EVERY = 20  # steps between two roll-outs in the terminal
TURN_LABELS = 32  # tokens of a turn's labels, tool name, error and verdict in the memory
LEAST = {
    **agentflow.LEAST, "lora_r": 0, "slots": 1, "keep": 0, "num_questions": 1, "max_steps": 0,
    "num_iterations": 1, "save_steps": 1, "micro_batch_tokens": 1, "eval_steps": 0,
    "log_rollouts": 0, "learning_rate": 0, "beta": 0, "epsilon": 0, "epsilon_high": 0,
    "data_questions": 0,
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
        if field.name not in ("resume", "output_dir", "offline", "dry_run")
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


def prepare(config: Config, team: Team, device: str, offline: bool = False) -> Training:
    """All that a configuration names, loaded, and its run folder. offline: public sets come from
    the cache alone.

    Raises ValueError with a sentence for whatever in it cannot work, ServerDown for a server that
    does not answer.
    """
    if config.num_generations < 2:
        raise ValueError(
            "--num_generations must be at least 2: an advantage compares the roll-outs of a "
            "question with each other (Eq. 7), and one alone teaches nothing."
        )
    agentflow.check_ranges(config, LEAST)
    if config.temperature == 0:
        raise ValueError("--temperature must be above 0: without sampling all roll-outs are equal.")
    tools = agentflow.tools_from_flags(config)  # first: a missing key shows before any download
    scoring = evaluation.scoring_of(config)
    questions, held_out = load_data(config, offline)
    frozen = None
    if config.frozen_url:
        frozen = agentflow.RemoteBackbone(config.frozen_url, config.frozen_model)
    backbone = agentflow.load_backbone(
        config.model,
        device,
        lora_r=config.lora_r,
        lora_alpha=config.lora_alpha,
        seed=config.seed,
        slots=config.slots,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    check_prompt_room(config, backbone, tools, [*questions, *held_out])
    optimizer = new_optimizer(backbone.trainable_parameters(), config)
    if frozen:
        backbone = agentflow.ServedBackbone(backbone, frozen)
    run = Run(config, questions, held_out, writes=team.leads)
    run.folder = team.gather(run.folder)[0]  # its default name is a time of day
    return Training(config, run, questions, held_out, tools, scoring, backbone, optimizer, team,
                    InterruptLater())  # fmt: skip


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
        team, device = join_team(config.device)
        # A built-in model keeps its tools offline; that does not keep its user from loading data.
        t = prepare(config, team, device, offline=bool(asked.offline))
    except (ValueError, OSError) as error:
        return agentflow.fail(error)
    if config.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    print(" ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items()))
    print(
        f"{len(t.questions)} questions to train on, {len(t.held_out)} held out; "
        f"{t.backbone.device}{f' and {team.size - 1} more' if team.size > 1 else ''}; "
        f"run folder {t.run.folder}"
    )
    if any(tool.name == "Python_Coder_Tool" for tool in t.tools):
        print(sandbox_line())
    to_go_on = f"To go on: python train.py --resume --output_dir {t.run.folder}"
    try:
        train(t)
    except KeyboardInterrupt:
        print(f"\nstopped; finished steps are saved. {to_go_on}", file=sys.stderr)
        return 130
    except (ValueError, OSError, FloatingPointError, MemoryError) as error:
        code = agentflow.fail(error)
        if t.run.checkpoints():
            print(f"Finished steps are saved. {to_go_on}", file=sys.stderr)
        return code
    finally:  # not only with the process: notebooks and tests go on in theirs
        t.interrupt.drop()
        t.run.close()
        if team.size > 1:
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cluster's way to press Ctrl-C
    sys.exit(agentflow.run_command(main))
