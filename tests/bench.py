"""tests/bench.py: what the engine gains. Each peer runs beside ours, in turn, in one process.

    python tests/bench.py update                      one comparison, on one thread of the CPU
    python tests/bench.py all --json bench.json       all of them
    python tests/bench.py roofline --device cuda --model qwen2.5-7b
    python tests/bench.py seven_b --device cuda       a roll-out phase and an update of a 7B

Ours and a peer have the same random weights, the same tokens and forced lengths. A ratio above 1
means that ours is better: CPU-seconds on a CPU, wall seconds on a GPU, the median over interleaved
runs. Memory is the peak of a fresh process above what it held before the measured call. Peers come
from requirements-bench.txt; one that is missing is an error and not a pass.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import io
import json
import logging
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import agentflow  # noqa: E402
import eval as evaluation  # noqa: E402
import flow_grpo  # noqa: E402
import train  # noqa: E402
from agentflow import Backbone, Limits, Reply, Request, Sampling  # noqa: E402
from tools import Ask, make_tools  # noqa: E402

SHAPES = {  # --model: the configuration of agentflow.CONFIGS that it stands for
    "tiny": "tiny",
    "smollm-135m": "SmolLM2-135M-Instruct",
    "qwen2.5-7b": "Qwen2.5-7B-Instruct",
}
G = 8  # roll-outs a question in all of these


# --- Measuring -----------------------------------------------------------------------------------


@dataclass
class Side:
    """One contender. run(): does the work once and returns what came of it, for checking."""

    name: str
    run: Callable[[], object]


@dataclass
class Work:
    """One line of the table: the same work by several sides, the first of them ours."""

    sides: list[Side]
    unit: str  # of the figures: what `amount` counts, a second
    amount: float = 1.0
    check: Callable[[list], None] = lambda results: None  # raises where the sides disagree
    notes: list[str] = field(default_factory=list)


def seconds(run: Callable[[], object], device: str) -> tuple[float, float, object]:
    """(CPU-seconds, wall seconds, result) of one run."""
    gc.collect()
    return clocked(run, device)


def clocked(run: Callable[[], object], device: str) -> tuple[float, float, object]:
    """The same for a part of a run: what lies about in memory is left there."""
    if device == "cuda":
        torch.cuda.synchronize()
    cpu, wall = time.process_time(), time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.process_time() - cpu, time.perf_counter() - wall, result


def peak_memory(run: Callable[[], object], device: str) -> float:
    """Bytes at the peak of one run above what was held before it; for a fresh process."""
    gc.collect()
    before = new_peak(device)
    run()
    return peak(device) - before


def status(name: str) -> int:
    """Bytes by name, from what Linux tells about this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def new_peak(device: str) -> int:
    """The high-water mark of memory starts anew; bytes held now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak(device: str) -> int:
    """Bytes at the high-water mark since new_peak, all that is held included."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else status("VmHWM")


def measure(name: str, work: Work, memory: list[float], options) -> list[dict]:
    """Interleaved runs of all sides -> a row a peer, printed and returned. memory: of each side."""
    clock = 1 if options.device == "cuda" else 0
    names = [side.name for side in work.sides]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(options.runs + 1):  # the first one warms caches and allocators up
        results = []
        for side in work.sides:
            *taken, result = seconds(side.run, options.device)
            results.append(result)
            if turn:
                times[side.name].append(tuple(taken))
        if not turn:
            work.check(results)
        del results
    ours, *peers = names
    rows = []
    for number, peer in enumerate(peers, start=1):
        pairs = zip(times[ours], times[peer], strict=True)
        ratios = [theirs[clock] / mine[clock] for mine, theirs in pairs]
        middle = {side: [statistics.median(values) for values in zip(*times[side], strict=True)]
                  for side in (ours, peer)}
        row = {
            "name": name,
            "peer_name": peer,
            "ours": work.amount / middle[ours][clock],
            "peer": work.amount / middle[peer][clock],
            "unit": work.unit,
            "ratio": statistics.median(ratios),
            "spread": max(ratios) - min(ratios),
            "memory_ratio": memory[number] / memory[0] if memory else None,
        }
        rows.append(row)
        print(f"{name} | {peer}: {row['ratio']:.2f}x "
              f"({min(ratios):.2f} to {max(ratios):.2f}) | ours {row['ours']:.4g}, "
              f"peer {row['peer']:.4g} {work.unit} | wall, s: ours "
              f"{middle[ours][1]:.2f}, peer {middle[peer][1]:.2f}", flush=True)
        if memory:
            print(f"{' ' * len(name)} | peak memory, GB: ours {memory[0] / 1e9:.3f}, peer "
                  f"{memory[number] / 1e9:.3f}, {row['memory_ratio']:.2f}x less", flush=True)
    for note in work.notes:
        print(f"{' ' * len(name)} | {note}", flush=True)
    return rows


def memory_of(name: str, side: int, options) -> float:
    """The peak of one side, measured in a process of its own."""
    command = [sys.executable, __file__, name, "--side", str(side), "--device", options.device,
               "--threads", str(options.threads), "--model", options.model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}, side {side} ended with {done.returncode} (-9: too little "
                           f"memory here): {done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


# --- Models and tokens ---------------------------------------------------------------------------


def shape(options):
    """The configuration that --model names."""
    name = "smollm-135m" if options.model == "default" else options.model
    return agentflow.known_config(SHAPES.get(name, name))


def shape_name(text: str) -> str:
    """--model, refused where nothing of that name is known."""
    if text != "default" and agentflow.known_config(SHAPES.get(text, text)) is None:
        raise argparse.ArgumentTypeError(
            f"{text} is no known shape: give {', '.join(SHAPES)}, or config: and one of "
            f"{', '.join(agentflow.CONFIGS)}")
    return text


def models(options, slots: int = 64):
    """(our backbone, Hugging Face's own model) with equal random weights."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    theirs = agentflow.random_model(shape(options), options.device, dtype)
    theirs.config._attn_implementation = "sdpa"
    mine = copy.deepcopy(theirs)
    tokenizer = agentflow.load_tokenizer(str(agentflow.BUILTIN))
    backbone = Backbone(mine, tokenizer, options.device, lora_r=None, slots=slots)
    backbone.stop_ids, backbone.stop = [-1], torch.tensor([-1], device=options.device)
    return backbone, theirs.eval()


def random_tokens(rng: random.Random, count: int, config) -> list[int]:
    return [rng.randrange(10, config.vocab_size) for _ in range(count)]


class EndAt(StoppingCriteria):
    """Ends row i of `generate` after lengths[i] tokens."""

    def __init__(self, width: int, lengths: list[int], device: str) -> None:
        self.last = torch.tensor([width + length for length in lengths], device=device)

    def __call__(self, input_ids, scores, **_):
        return input_ids.shape[1] >= self.last


def generation(options, prompts: list[list[int]], lengths: list[int]) -> Work:
    """Our generation loop against transformers' `generate` on left-padded rows."""
    backbone, theirs = models(options, slots=64)
    backbone._prompt_ids = lambda _, number: tuple(prompts[int(number)])
    backbone._head_ids = lambda _: ()  # the prompts are random: no static head
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt):] = torch.tensor(prompt)
        mask[row, width - len(prompt):] = 1
    ids, mask = ids.to(options.device), mask.to(options.device)

    def ours():
        replies = backbone.generate([
            Request(Ask("planner", "", str(row)), 1.0, length, (0, row))
            for row, length in enumerate(lengths)
        ])
        assert [len(reply.response_ids) for reply in replies] == lengths

    @torch.inference_mode()
    def peer():
        stop = StoppingCriteriaList([EndAt(width, lengths, options.device)])
        made = theirs.generate(
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=max(lengths), stopping_criteria=stop, pad_token_id=0, eos_token_id=-1,
        )  # fmt: skip
        assert made.shape == (len(prompts), width + max(lengths))

    return Work([Side("ours", ours), Side("transformers generate", peer)],
                "tokens/s", sum(lengths), notes=[f"{len(prompts)} rows, {sum(lengths)} new tokens"])


# --- Generation ----------------------------------------------------------------------------------


def generate_shared(options) -> Work:
    """64 rows of 8 prompts, 256 + 32 tokens."""
    rng = random.Random(0)
    config = shape(options)
    prompts = [random_tokens(rng, 256, config) for _ in range(8)]
    return generation(options, [prompt for prompt in prompts for _ in range(G)], [32] * 64)


def generate_ragged(options) -> Work:
    """32 rows of 4 prompts, 256 + up to 128 tokens, about 39 in the mean: most replies are short,
    a few long, as a planner's are."""
    rng = random.Random(0)
    config = shape(options)
    prompts = [random_tokens(rng, 256, config) for _ in range(4)]
    lengths = [min(128, 1 + round(rng.expovariate(1 / 38))) for _ in range(31)] + [128]
    return generation(options, [prompt for prompt in prompts for _ in range(G)], lengths)


def generate_distinct(options) -> Work:
    """64 different prompts of 32 to 256 tokens, 8 to 64 new ones: nothing is shared."""
    rng = random.Random(0)
    config = shape(options)
    prompts = [random_tokens(rng, rng.randint(32, 256), config) for _ in range(64)]
    return generation(options, prompts, [rng.randint(8, 64) for _ in prompts])


class SameDraws(LogitsProcessor):
    """Lets `generate` draw what our engine draws: by the rows' own random numbers."""

    def __init__(self, requests: list[Request], width: int, device) -> None:
        self.width = width
        self.seeds = torch.tensor([agentflow.row_seed(r.key) for r in requests], device=device)
        self.temperature = torch.full((len(requests),), requests[0].temperature, device=device)

    def __call__(self, input_ids, scores):
        place = torch.tensor(input_ids.shape[1] - self.width, device=scores.device)
        draws = agentflow.uniforms(self.seeds, place)
        ids, _ = agentflow.choose(scores, self.temperature, draws)
        return torch.full_like(scores, -math.inf).scatter(1, ids[:, None], 0.0)


class LockStep:
    """A backbone as one would write it: each stage of all flows is one call of `generate`."""

    def __init__(self, model, tokenizer, prompt_ids) -> None:
        self.model, self.tokenizer, self.prompt_ids = model, tokenizer, prompt_ids
        self.waiting: list[Request] = []
        self.prompt_length = lambda ask: len(prompt_ids(ask))

    def clear(self) -> None:
        """Nothing is kept from one phase to the next."""

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    @torch.inference_mode()
    def step(self):
        module = self.waiting[0].ask.module
        requests = [request for request in self.waiting if request.ask.module == module]
        self.waiting = [request for request in self.waiting if request.ask.module != module]
        prompts = [self.prompt_ids(request.ask) for request in requests]
        width, device = max(map(len, prompts)), self.model.device
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        draws = [SameDraws(requests, width, device)] if requests[0].temperature else []
        made = self.model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=requests[0].max_tokens,
            logits_processor=LogitsProcessorList(draws), pad_token_id=0,
            eos_token_id=self.tokenizer.eos_token_id,
        )[:, width:].tolist()  # fmt: skip
        replies = []
        for request, prompt, row in zip(requests, prompts, made, strict=True):
            finished = self.tokenizer.eos_token_id in row
            row = row[: row.index(self.tokenizer.eos_token_id)] if finished else row
            text = self.tokenizer.decode(row, skip_special_tokens=True)
            replies.append((request, Reply(text, prompt, row, [], finished, request.ask)))
        return replies


def rollout(options) -> Work:
    """64 flows of the built-in set and backbone: G 8, T_max 3. The peer runs the same flows, but
    each module's stage is one `generate` call that all flows wait for."""
    backbone = agentflow.load_backbone("builtin", options.device)
    theirs = AutoModelForCausalLM.from_pretrained(agentflow.BUILTIN, attn_implementation="sdpa")
    theirs = theirs.to(options.device).eval()
    lock_step = LockStep(theirs, backbone.tokenizer, backbone.prompt_ids)
    tools = make_tools(offline=True)
    questions = evaluation.load_questions(evaluation.DATA / "train.jsonl")[:8]

    def run(which):
        limits = Limits(3, 1500, which.prompt_length)
        backbone.adapter_changed()  # no planner prompt of the run before is known
        rollouts = agentflow.roll_out([question.text for question in questions], G, which, tools,
                                      limits, Sampling(1.0, 96, 96), seed=0, step=0)
        return [turn.plan.tool_name for rollout in rollouts for turn in rollout.turns]

    def check(results):
        mine, other = results
        same = sum(a == b for a, b in zip(mine, other, strict=False)) / max(map(len, results))
        assert same > 0.95, f"the two sides ran different flows: {same:.2f} of the turns agree"

    return Work(
        [Side("ours", lambda: run(backbone)),
         Side("generate in lock-step", lambda: run(lock_step))],
        "flows/s", 64, check=check,
        notes=["ours answers equal greedy requests of a phase once, the peer each"],
    )  # fmt: skip


# --- The update ----------------------------------------------------------------------------------


def policy_gradient(logp: torch.Tensor, first: int, rows: int) -> None:
    """Backward through the loss of a step of `rows` rows, without KL term; logp (n, L): of some of
    them, from number `first` on."""
    n, L = logp.shape
    advantages = torch.linspace(-1, 1, rows, device=logp.device)[first:first + n]  # (n,)
    weights = torch.full((n,), 1 / (rows * L), device=logp.device)  # (n,)
    loss, _ = flow_grpo.flow_grpo_loss(
        logp, logp.detach(), None, advantages, weights, torch.ones_like(logp), beta=0.0
    )
    loss.backward()


def update_work(options, prompts, responses, with_trl: bool) -> Work:
    """Forward and backward of planner rows: ours packed, the peers padded, G rows at a time."""
    backbone, theirs = models(options)
    backbone.model.requires_grad_(True)
    N, L = len(prompts), len(responses[0])
    width = max(map(len, prompts))
    device = options.device
    rows = [[0] * (width - len(p)) + p + r for p, r in zip(prompts, responses, strict=True)]
    ids = torch.tensor(rows, device=device)  # (N, W), padded on the left
    mask = [[0] * (width - len(p)) + [1] * (len(p) + L) for p in prompts]
    mask = torch.tensor(mask, device=device)  # (N, W)
    targets = torch.tensor(responses, device=device)  # (N, L)

    def norm(model):
        weight = model.get_input_embeddings().weight
        value = weight.grad.norm().item()
        model.zero_grad(set_to_none=True)
        return value

    computed, inner = [], backbone._hidden
    backbone._hidden = lambda lane, ids, *rest: (
        computed.append(ids.numel()) or inner(lane, ids, *rest)
    )

    def ours():
        hidden = backbone.packed_hidden(prompts, responses, gate=1)  # (M, D)
        logp, _ = flow_grpo.linear_logprobs(hidden, backbone.head_weight(1), targets.flatten())
        policy_gradient(logp.view(N, L), 0, N)
        return norm(backbone.model)

    def padded():
        for first in range(0, N, G):
            some = slice(first, first + G)
            start = int((mask[some] == 0).sum(1).min())  # no padding that all of these have
            own = mask[some, start:]
            positions = (own.cumsum(1) - 1).clamp(min=0)
            logits = theirs(ids[some, start:], attention_mask=own, position_ids=positions,
                            use_cache=False, logits_to_keep=L + 1).logits[:, :-1]  # (G, L, V)
            logp = logits.float().log_softmax(-1).gather(-1, targets[some, :, None])[..., 0]
            policy_gradient(logp, first, N)
        return norm(theirs)

    def check(results):
        assert max(results) - min(results) < 1e-3 * max(results), f"gradient norms {results}"

    sides = [Side("ours", ours), Side("padded rows", padded)]
    if with_trl:
        sides.append(Side("TRL's loss", trl_loss(theirs, options, ids, mask, L, norm)))
    tokens = sum(len(p) + L - 1 for p in prompts)  # a row's last token predicts nothing
    nodes, _ = agentflow.build_trie([p + r[:-1] for p, r in zip(prompts, responses, strict=True)])
    trie = sum(len(node.tokens) for node in nodes)

    def check_all(results):
        check(results)
        assert computed[0] <= 1.05 * trie, f"{computed[0]} tokens computed, the trie has {trie}"

    return Work(sides, "updates/s", check=check_all,
                notes=[f"{N} rows of {tokens} tokens, {trie} of them different"])


def trl_trainer(model, options, words: list[str], new_tokens: int):
    """A GRPOTrainer of one step of G roll-outs, around a model with random weights."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    logging.disable(logging.WARNING)
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=options.device == "cpu",
        bf16=options.device == "cuda", per_device_train_batch_size=G, num_generations=G,
        max_completion_length=new_tokens, generation_kwargs={"min_new_tokens": new_tokens},
        gradient_accumulation_steps=1, max_steps=1, beta=0.0, temperature=1.0, loss_type="grpo",
        learning_rate=1e-6, gradient_checkpointing=False, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    return GRPOTrainer(
        model=model, args=settings,
        processing_class=agentflow.load_tokenizer(str(agentflow.BUILTIN)),
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        train_dataset=Dataset.from_list([{"prompt": "".join(words)}] * G),
    )  # fmt: skip


def trl_loss(model, options, ids, mask, length: int, norm):
    """Forward and backward of TRL's own loss on the padded rows."""
    trainer = trl_trainer(copy.deepcopy(model), options, [" 1"], length)
    trainer.current_gradient_accumulation_steps = 1
    inputs = {
        "prompt_ids": ids[:, :-length], "prompt_mask": mask[:, :-length],
        "completion_ids": ids[:, -length:], "completion_mask": mask[:, -length:],
        "advantages": torch.linspace(-1, 1, len(ids), device=ids.device),
        "num_items_in_batch": mask[:, -length:].sum(),
    }  # fmt: skip

    def run():
        trainer._compute_loss(trainer.model, inputs).backward()
        return norm(trainer.model)

    return run


def update(options) -> Work:
    """G 8, prompt 512, response 64: forward and backward of all weights."""
    rng = random.Random(0)
    config = shape(options)
    prompt = random_tokens(rng, 512, config)
    responses = [random_tokens(rng, 64, config) for _ in range(G)]
    return update_work(options, [prompt] * G, responses, with_trl=True)


def update_turns(options) -> Work:
    """8 roll-outs of three turns: the prompts grow from 512 to 768 tokens, each its own way. The
    peer takes a turn of all roll-outs at a time: equal lengths, so that it pads nothing."""
    rng = random.Random(0)
    config = shape(options)
    start = random_tokens(rng, 512, config)
    memories = [random_tokens(rng, 256, config) for _ in range(G)]
    tail = random_tokens(rng, 8, config)  # the template's end, behind the memory
    prompts = [start + memory[: 128 * turn] + tail for turn in range(3) for memory in memories]
    responses = [random_tokens(rng, 64, config) for _ in prompts]
    return update_work(options, prompts, responses, with_trl=False)


def step(options) -> Work:
    """A whole GRPO step: 8 roll-outs of a prompt of 512 tokens, 64 new ones, update and AdamW."""
    backbone, theirs = models(options)
    rng = random.Random(0)
    words = [f" {rng.randrange(1000)}" for _ in range(512)]  # a token each
    prompt = backbone.tokenizer.encode("".join(words), add_special_tokens=False)
    assert len(prompt) == 512
    backbone.model.requires_grad_(True)
    backbone._prompt_ids, backbone._head_ids = lambda *_: tuple(prompt), lambda _: ()
    optimizer = torch.optim.AdamW(backbone.model.parameters(), lr=1e-6, foreach=True)
    trainer = trl_trainer(theirs, options, words, 64)

    def ours():
        requests = [Request(Ask("planner", "", ""), 1.0, 64, (0, i)) for i in range(G)]
        replies = backbone.generate(requests)
        responses = [reply.response_ids for reply in replies]
        hidden = backbone.packed_hidden([prompt] * G, responses, gate=1)  # (M, D)
        targets = torch.tensor(responses, device=options.device).flatten()  # (M,)
        logp, _ = flow_grpo.linear_logprobs(hidden, backbone.head_weight(1), targets)
        policy_gradient(logp.view(G, -1), 0, G)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        backbone.adapter_changed()

    def peer():
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its statistics
            trainer.train()

    sides = [Side("ours", ours), Side("TRL GRPOTrainer", peer)]
    return Work(sides, "steps/s")


def loss_memory(options) -> Work:
    """`linear_logprobs` on 4,096 tokens, V 152,064, D 896, with the gradient of the hidden
    states."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    M, V, D = (4096, 152_064, 896) if options.model != "tiny" else (64, 4096, 32)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(M, D, generator=generator).to(options.device).requires_grad_()  # (M, D)
    weight = (torch.randn(V, D, generator=generator) * D**-0.5).to(options.device)  # (V, D)
    targets = torch.randint(V, (M,), generator=generator).to(options.device)  # (M,)
    advantages = torch.linspace(-1, 1, G, device=options.device)
    liger = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False,
                                     loss_type="bnpo", epsilon_low=0.2, epsilon_high=0.2)

    def done(logp):  # the same loss for all: mean over tokens
        loss, _ = flow_grpo.flow_grpo_loss(
            logp.view(G, -1), logp.detach().view(G, -1), None, advantages,
            torch.full((G,), 1 / M, device=logp.device), torch.ones(G, M // G, device=logp.device),
            beta=0.0,
        )  # fmt: skip
        return logp.detach(), gradient(loss)

    def gradient(loss):
        loss.backward()
        value, hidden.grad = hidden.grad, None
        return value

    def ours():
        return done(flow_grpo.linear_logprobs(hidden, weight, targets)[0])

    def plain():
        logits = hidden @ weight.T  # (M, V)
        return done(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0])

    def fused():
        rows = (G, M // G)
        loss, *_ = liger(hidden.view(*rows, D), weight, targets.view(rows),
                         torch.ones(rows, device=hidden.device), advantages)
        return None, gradient(loss)  # of the values it gives away their loss alone, 0 here

    def check(results):
        (my_logp, mine), *others = results
        for logp, other in others:
            assert logp is None or (my_logp - logp).abs().max() < 1e-4, "log-probs differ"
            assert (mine - other).abs().max() < 1e-4 * other.abs().max(), "gradients differ"

    sides = [Side("ours", ours), Side("log_softmax", plain), Side("Liger's fused loss", fused)]
    return Work(sides, "losses/s", check=check)


# --- How it scales, and how far from the limit ---------------------------------------------------


def scaling(options) -> list[dict]:
    """Time a token over roll-outs and prompt length (tokens of one prompt, and of all its replies),
    loss memory over the vocabulary."""
    rng, rows = random.Random(0), []
    backbone, _ = models(options)
    table: dict[str, list[int]] = {}
    backbone._prompt_ids, backbone._head_ids = lambda _, name: tuple(table[name]), lambda _: ()
    clock = 1 if options.device == "cuda" else 0

    def tokens_a_second(rollouts: int, length: int) -> list[float]:
        table["prompt"] = random_tokens(rng, length, backbone.model.config)

        def run():
            backbone.generate([Request(Ask("planner", "", "prompt"), 1.0, 32, (0, i))
                               for i in range(rollouts)])

        run()
        tokens = length + rollouts * 32
        return [tokens / seconds(run, options.device)[clock] for _ in range(options.runs)]

    def report(title: str, runs: dict[str, list[float]], unit: str) -> None:
        base_name, first = next(iter(runs.items()))
        base = statistics.median(first)
        for name, values in runs.items():
            value, spread = statistics.median(values), (max(values) - min(values)) / base
            print(f"scaling | {title} {name}: {value:.4g} {unit}, "
                  f"{value / base:.2f} of {base_name} (spread {spread:.2f})", flush=True)
            rows.append({"name": f"scaling {title} {name}", "peer_name": base_name, "ours": value,
                         "peer": base, "unit": unit, "ratio": value / base, "spread": spread,
                         "memory_ratio": None})

    report("roll-outs", {f"x{n}": tokens_a_second(8 * n, 256) for n in (1, 2, 4, 8)}, "tokens/s")
    report("prompt", {f"x{n}": tokens_a_second(16, 256 * n) for n in (1, 2, 4)}, "tokens/s")
    kv = backbone.lanes[0].kv  # (2, layers, S, H_kv, W, D_head)
    slots, width = kv.shape[2], kv.shape[4]
    print(f"scaling | keys and values: {kv.nbytes / slots / width:.0f} bytes a token of a slot, "
          f"{kv.nbytes / 1e6:.0f} MB for {slots} slots of {width}")
    memory = {f"x{n}": [memory_of("scaling", side, options) / 1e6 for _ in range(options.runs)]
              for side, n in enumerate(VOCABULARIES)}
    report("vocabulary", memory, "MB")
    return rows


VOCABULARIES = (1, 4)  # times 32,000 tokens


def vocabulary(options, side: int) -> Side:
    """Log-probs and their backward over one of these vocabularies: for its memory."""
    V = 32_000 * VOCABULARIES[side]
    hidden = torch.randn(1024, 256, device=options.device, requires_grad=True)  # (M, D)
    weight = torch.randn(V, 256, device=options.device)  # (V, D)
    targets = torch.randint(V, (1024,), device=options.device)  # (M,)
    return Side("ours", lambda: flow_grpo.linear_logprobs(hidden, weight, targets)[0].sum()
                .backward())


def decode_limit(model, lane, B: int, context: int, device: str) -> Callable[[], float]:
    """Measures what a decode step of B rows cannot be faster than, in seconds: its matrix products
    alone, and its keys and values read once at the bandwidth of a copy."""
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {m.in_features: torch.randn(B, m.in_features, device=device, dtype=lane.dtype)
              for m in linears}
    source = torch.ones(64 * 2**20, device=device)  # 256 MB: more than any cache holds
    target = torch.empty_like(source)
    a_token = 2 * lane.layers * lane.kv_heads * lane.head * lane.kv.element_size()  # bytes of KV
    clock = 1 if device == "cuda" else 0

    @torch.inference_mode()
    def products():
        for module in linears:
            module(inputs[module.in_features])

    def limit() -> float:
        product_time = min(seconds(products, device)[clock] for _ in range(5))
        copy_time = min(seconds(lambda: target.copy_(source), device)[clock] for _ in range(3))
        bandwidth = 2 * source.numel() * source.element_size() / copy_time  # read and written
        return product_time + B * context * a_token / bandwidth

    products()
    return limit


def roofline(options) -> list[dict]:
    """Decoding against its limit, at several batch widths; the prefill is not counted."""
    device, burst = options.device, 16  # tokens a row
    context = 5000 if options.model == "qwen2.5-7b" else 256
    rows = []
    for B in (1, 64, 256) if context == 5000 else (1, 8, 64):
        backbone, theirs = models(options, slots=B)
        prompt = random_tokens(random.Random(B), context, backbone.model.config)
        backbone._prompt_ids, backbone._head_ids = lambda *_, p=prompt: tuple(p), lambda _: ()
        backbone.stride, lane = burst, backbone.lanes[0]
        limit = decode_limit(theirs, lane, B, context, device)

        @torch.inference_mode()
        def decode(backbone=backbone, lane=lane, B=B) -> float:
            for i in range(B):
                backbone.submit(Request(Ask("planner", "", ""), 1.0, 4 * burst, (0, i)))
            backbone._admit(lane)
            cpu, wall, _ = seconds(lambda: backbone._burst(lane), device)
            lane.rows.clear()
            return (wall if device == "cuda" else cpu) / burst

        decode()
        pairs = [(decode(), limit()) for _ in range(options.runs)]
        ratios = [least / taken for taken, least in pairs]
        ours, peer = (B / statistics.median(values) for values in zip(*pairs, strict=True))
        rows.append({"name": f"roofline B {B}", "peer_name": "limit", "ours": ours, "peer": peer,
                     "unit": "tokens/s", "ratio": statistics.median(ratios),
                     "spread": max(ratios) - min(ratios), "memory_ratio": None})
        print(f"roofline | B {B}, context {context}: {ours:.0f} tokens/s, "
              f"{statistics.median(ratios):.0%} of the limit of {peer:.0f} "
              f"({min(ratios):.0%} to {max(ratios):.0%})", flush=True)
    return rows


# --- Random weights of a 7B, end to end ----------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """Sizes of a step: how many of each, and tokens. A planner's prompt in turn t is the head, the
    question, t pieces of memory and the template's end; replies have a forced length, since random
    weights never stop by themselves."""

    questions: int = 8
    rollouts: int = G
    turns: int = 3
    head: int = 1500
    question: int = 200
    memory: int = 700  # that a turn adds
    end: int = 8
    reply: int = 256
    micro_batch: int = 4096  # packed tokens of one forward in the update


REAL, SMALL = Phase(), Phase(2, 2, 3, head=64, question=16, memory=24, reply=8)
# Dense bf16 FLOP/s and bytes/s of memory by the makers' data sheets, by a part of the device's name
PEAKS = {"H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.0e12)}


def peaks(backbone) -> tuple[float, float, str]:
    """(FLOP/s, bytes/s, where from) of the backbone's device: what no program here can exceed."""
    device = backbone.device.type
    name = torch.cuda.get_device_name(backbone.device) if device == "cuda" else device
    for known, figures in PEAKS.items():
        if known in name:
            return *figures, f"{name}, data sheet"
    clock = 1 if device == "cuda" else 0
    square = torch.randn(1024, 1024, device=device, dtype=backbone.dtype)
    product = min(seconds(lambda: square @ square, device)[clock] for _ in range(5))
    source = torch.ones(64 * 2**20, device=device)  # 256 MB: more than any cache holds
    target = torch.empty_like(source)
    copied = min(seconds(lambda: target.copy_(source), device)[clock] for _ in range(5))
    return 2 * 1024**3 / product, 2 * source.nbytes / copied, f"{name}, measured"


def watched(backbone) -> dict[str, float]:
    """From now on the generation loop adds up here what it computes, and in which time.

    prefill, decode: tokens, seconds, and pairs of a query with a key that it sees; decode_steps:
    passes over all rows in flight, each of which reads every weight once.
    """
    kinds = ("tokens", "seconds", "pairs", "steps")
    totals = {f"{part}_{kind}": 0.0 for part in ("prefill", "decode") for kind in kinds}
    admit, prefill_rows, burst = backbone._admit, backbone._prefill_rows, backbone._burst
    device = backbone.device.type
    clock = 1 if device == "cuda" else 0

    def timed_admit(lane):
        totals["prefill_seconds"] += clocked(lambda: admit(lane), device)[clock]

    def counted_prefill_rows(lane, kv, tails, starts, gates):
        for start, tail in zip(starts, tails, strict=True):
            totals["prefill_tokens"] += len(tail)
            totals["prefill_pairs"] += len(tail) * start + len(tail) * (len(tail) + 1) / 2
        return prefill_rows(lane, kv, tails, starts, gates)

    def timed_burst(lane):
        rows, before = list(lane.rows), [len(row.ids) for row in lane.rows]
        totals["decode_seconds"] += clocked(lambda: burst(lane), device)[clock]
        new = [len(row.ids) - old for row, old in zip(rows, before, strict=True)]
        for row, old, count in zip(rows, before, new, strict=True):
            first = len(row.prompt_ids) + old  # keys that the first of these tokens sees
            totals["decode_pairs"] += count * first + count * (count - 1) / 2
        totals["decode_tokens"] += sum(new)
        totals["decode_steps"] += max(new)

    backbone._admit, backbone._prefill_rows, backbone._burst = (
        timed_admit, counted_prefill_rows, timed_burst)
    return totals


def play(backbone, phase: Phase, rng: random.Random) -> list:
    """The roll-outs of a step, turn by turn, all of them in one batch: a list of roll-outs as
    `train.make_rows` reads them. Their prompts are random tokens that share what real ones share.
    """
    def tokens(count):
        return random_tokens(rng, count, backbone.model.config)

    head, end = tokens(phase.head), tokens(phase.end)
    flows = [(q, g) for q in range(phase.questions) for g in range(phase.rollouts)]
    questions = [tokens(phase.question) for _ in range(phase.questions)]
    memories = {flow: tokens(phase.memory * (phase.turns - 1)) for flow in flows}

    def prompt(_, name):
        q, g, t = map(int, name.split())
        return (*head, *questions[q], *memories[q, g][: phase.memory * t], *end)

    backbone._prompt_ids, backbone._head_ids = prompt, lambda _: tuple(head)
    rollouts = [SimpleNamespace(turns=[]) for _ in flows]
    for t in range(phase.turns):
        asks = [Ask("planner", "head", f"{q} {g} {t}") for q, g in flows]
        replies = backbone.generate([
            Request(ask, 1.0, phase.reply, (0, 0, *flow, t), flow=(0, 0, *flow))
            for ask, flow in zip(asks, flows, strict=True)
        ])
        for rollout, reply in zip(rollouts, replies, strict=True):
            assert len(reply.response_ids) == phase.reply, "a reply has another length than asked"
            rollout.turns.append(SimpleNamespace(planner=reply))
    return rollouts


def bit_sums(backbone) -> dict[str, int]:
    """Every weight outside the adapter as the sum of its bits, read as integers: any update would
    change it."""
    adapter = {id(parameter) for parameter in backbone.trainable_parameters()}
    whole = {2: torch.int16, 4: torch.int32}
    return {
        name: weight.detach().view(whole[weight.element_size()]).sum(dtype=torch.int64).item()
        for name, weight in backbone.model.named_parameters() if id(weight) not in adapter
    }  # fmt: skip


def limits(backbone, totals: dict, packed: int, scored: int, beta: float) -> dict[str, float]:
    """The least seconds that prefill, decoding and the update can take on this device.

    Counted: 2 FLOP for each weight of a matrix product and each token that goes through it, and in
    generation 4 for each width of a query head and each pair of query and key. Prefill and update
    are bound by FLOP/s. An update of an adapter costs a token 4 N: forward, and backward to the
    inputs alone (all weights: 6 N); the reference's forward, where there is a KL term, 2 N more;
    attention and what is computed twice is not counted. Decoding is bound by FLOP/s or by bytes:
    the weights once a step, and each row's keys and values.
    """
    flops, bandwidth, _ = peaks(backbone)
    shape, size = train.shape_of(backbone.model.config), backbone.lm_head_weight.element_size()
    N, head = shape.matrices(), shape.vocabulary * shape.width
    a_pair = 4 * shape.layers * shape.heads * shape.head
    read = totals["decode_steps"] * (N + head) + totals["decode_pairs"] * shape.kv_bytes(1)
    decode = 2 * (N + head) * totals["decode_tokens"] + a_pair * totals["decode_pairs"]
    prefill = 2 * N * totals["prefill_tokens"] + a_pair * totals["prefill_pairs"]
    a_token = 4 + (2 if beta else 0)
    return {"prefill": prefill / flops, "decode": max(decode / flops, read * size / bandwidth),
            "update": a_token * (N * packed + head * scored) / flops}


def train_config(phase: Phase) -> train.Config:
    """The flags of train.py that a run of these sizes would have."""
    prompt = phase.head + phase.question + phase.memory * (phase.turns - 1) + phase.end
    return train.Config(
        num_questions=phase.questions, num_generations=phase.rollouts, max_turns=phase.turns,
        slots=phase.questions * phase.rollouts, max_prompt_length=prompt, learning_rate=1e-4,
        max_completion_length=phase.reply, max_frozen_length=phase.reply,
        micro_batch_tokens=phase.micro_batch,
    )  # fmt: skip


def seven_b(options) -> list[dict]:
    """A roll-out phase of real size and an update, with random weights: default Qwen2.5-7B in bf16
    on a GPU, a tiny model on a CPU. Raises AssertionError where a check fails."""
    device = options.device
    name = options.model
    if name == "default":
        name = "qwen2.5-7b" if device == "cuda" else "tiny"
    name = agentflow.RANDOM + SHAPES.get(name, name).removeprefix(agentflow.RANDOM)
    phase = SMALL if name == "config:tiny" else REAL
    backbone = agentflow.load_backbone(name, device, slots=phase.questions * phase.rollouts)
    backbone.stop_ids, backbone.stop = [-1], torch.tensor([-1], device=device)
    before = bit_sums(backbone)
    row = {"name": "seven_b", "model": name, "device": peaks(backbone)[2]}

    # A small step without its end warms the device up, and leaves nothing behind.
    warm = rows_of(play(backbone, SMALL, random.Random(1)), SMALL)
    train.accumulate_gradients(backbone, warm, train_config(SMALL))
    backbone.model.zero_grad(set_to_none=True)
    backbone.clear()
    backbone.adapter_changed()  # drops the small step's head

    totals = watched(backbone)
    new_peak(device)
    rows = rows_of(play(backbone, phase, random.Random(0)), phase)
    row["rollout_peak_gb"] = peak(device) / 1e9
    backbone.clear()  # as train.py does: the update needs the room
    row |= learn(backbone, rows, phase, totals)
    row["prompt_tokens"] = sum(len(r.prompt_ids) for r in rows)
    plan = train.memory_plan(
        train_config(phase), train.shape_of(backbone.model.config), device == "cpu"
    )
    row |= {"rollout_planned_gb": plan.rollout_peak() / 1e9,
            "update_planned_gb": plan.update_peak() / 1e9}
    for part, least in limits(
        backbone, totals, row["update_tokens"], row["scored_tokens"], train_config(phase).beta
    ).items():
        taken, count = totals[f"{part}_seconds"], totals[f"{part}_tokens"]
        row |= {f"{part}_tokens": int(count), f"{part}_seconds": taken,
                f"{part}_tokens_per_second": count / taken, f"{part}_share": least / taken}
    check_seven_b(row, before == bit_sums(backbone), phase)
    show_seven_b(row, phase)
    return [row]


def rows_of(rollouts: list, phase: Phase) -> list[train.Row]:
    """The training rows of a step in which every other roll-out is right."""
    groups = torch.arange(phase.questions).repeat_interleave(phase.rollouts)  # (R,)
    rewards = (torch.arange(len(rollouts)) % 2).float()  # (R,)
    return train.make_rows(rollouts, rewards, groups)[0]


def learn(backbone, rows: list[train.Row], phase: Phase, totals: dict) -> dict:
    """One update, as train.py makes it, timed into `totals`: figures of the table's row."""
    config, device = train_config(phase), backbone.device.type
    optimizer = torch.optim.AdamW(backbone.trainable_parameters(), lr=config.learning_rate)
    tries = [agentflow.build_trie([r.prompt_ids + r.response_ids[:-1] for r in batch])[0]
             for batch in train.micro_batches(rows, config.micro_batch_tokens)]
    packed = sum(len(node.tokens) for nodes in tries for node in nodes)
    new_peak(device)
    *taken, report = seconds(lambda: train.update(backbone, optimizer, rows, config), device)
    totals |= {"update_tokens": packed, "update_seconds": taken[1 if device == "cuda" else 0]}
    return {
        "update_peak_gb": peak(device) / 1e9, "update_tokens": packed,
        "scored_tokens": sum(len(r.response_ids) for r in rows),
        "adapter_norm": backbone.adapter_norm(),
        **{name: report[name] for name in ("loss", "grad_norm", "gap_mean", "gap_max")},
    }  # fmt: skip


def check_seven_b(row: dict, base_unchanged: bool, phase: Phase) -> None:
    """Raises AssertionError with a sentence for what is not as it must be."""
    for name in ("loss", "grad_norm", "gap_mean", "gap_max", "adapter_norm"):
        assert math.isfinite(row[name]), f"{name} is {row[name]}"
    assert row["grad_norm"] > 0 and row["adapter_norm"] > 0, "the update did not move the adapter"
    assert base_unchanged, "a weight outside the adapter changed"
    written = phase.questions * phase.rollouts * phase.turns * phase.reply
    first = phase.questions * phase.rollouts * phase.turns  # drawn by the prefill
    assert row["decode_tokens"] == written - first, "not as many tokens decoded as asked"


def show_seven_b(row: dict, phase: Phase) -> None:
    print(f"seven_b | {row['model']} with random weights; limits of {row['device']}\n"
          f"seven_b | {phase.questions} x {phase.rollouts} roll-outs of {phase.turns} turns, "
          f"{phase.reply} tokens a reply; peak memory {row['rollout_peak_gb']:.2f} GB, "
          f"train.py --dry_run plans {row['rollout_planned_gb']:.2f}")
    for part, more in (
        ("prefill", f" of {row['prompt_tokens']} in prompts"), ("decode", ""),
        ("update", f" packed, {row['scored_tokens']} of them scored"),
    ):
        what = "MFU" if part == "update" else "of the roofline"
        print(f"seven_b | {part}: {row[f'{part}_tokens']} tokens{more} in "
              f"{row[f'{part}_seconds']:.2f} s, {row[f'{part}_tokens_per_second']:.0f} tokens/s, "
              f"{row[f'{part}_share']:.1%} {what}")
    print("seven_b | MFU counts 4 N a packed token (an adapter's backward makes no gradients of "
          "the weights) and 2 N for the reference\n"
          f"seven_b | update: peak memory {row['update_peak_gb']:.2f} GB, planned "
          f"{row['update_planned_gb']:.2f}; loss {row['loss']:.3g}, gradient "
          f"{row['grad_norm']:.3g}\n"
          f"seven_b | log-probs of sampler and scorer differ by {row['gap_mean']:.2g} in the mean, "
          f"{row['gap_max']:.2g} at most\n"
          f"seven_b | all finite, no weight outside the adapter changed, the adapter did "
          f"(size 0 -> {row['adapter_norm']:.3g})", flush=True)


BENCHES = {
    bench.__name__: bench
    for bench in (generate_shared, generate_ragged, generate_distinct, rollout, update,
                  update_turns, step, loss_memory, scaling, roofline, seven_b)
}  # fmt: skip
# The sides of those whose memory is measured too: before this process holds any model itself.
MEMORY_SIDES = {"update": 3, "update_turns": 2, "step": 2, "loss_memory": 3}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[*BENCHES, "all"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default="default", type=shape_name, metavar="SHAPE",
                        help=f"random weights of this shape: {', '.join(SHAPES)} or config:NAME "
                             "[smollm-135m; seven_b: a 7B on a GPU, config:tiny on a CPU]")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU [1]")
    parser.add_argument("--runs", type=int, default=3, help="of each side, after a first one [3]")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)  # its memory, in a child
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # the peers' about their own next versions
    if options.side is not None:
        side = (vocabulary(options, options.side) if options.name == "scaling"
                else BENCHES[options.name](options).sides[options.side])
        print(peak_memory(side.run, options.device))
        return 0
    print(f"{options.device}, {options.threads} threads, torch {torch.__version__}, transformers "
          f"{transformers.__version__}; {options.runs} interleaved runs of each", flush=True)
    rows = []
    for name in BENCHES if options.name == "all" else [options.name]:
        memory = [memory_of(name, i, options) for i in range(MEMORY_SIDES.get(name, 0))]
        made = BENCHES[name](options)
        rows += made if isinstance(made, list) else measure(name, made, memory, options)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
