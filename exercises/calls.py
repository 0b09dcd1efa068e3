"""Runs in the student's process: calls the student's functions, and answers with plain data.

check.py starts it as `calls.py FOLDER`, sends a call a line as JSON, and judges the answers in its
own process. So nothing that happens here can decide a verdict, only what a function returns: the
right numbers can be had by computing them. Where an exercise uses what another one has to fill in,
a slow version from checks.py stands in, so that the exercises can be done in any order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import secrets
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import checks
from checks import decode, encode


@contextlib.contextmanager
def swapped(module, **others):
    """Other values for some names of a module, for a while."""
    before = {name: getattr(module, name) for name in others}
    try:
        for name, value in others.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def gradient(tensor):
    """What has arrived at a leaf; zeros where nothing has, as for a weighted sum of nothing."""
    import torch

    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def watching(see):
    """A context in which see(operation's name, result) follows each tensor operation."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            see(function.__name__, result)
            return result

    return Watch()


def load(name):
    """Import a module of the folder; where it was found."""
    return str(Path(importlib.import_module(name).__file__).resolve().parent)


# ------------------------------------------------------------------------------- 1 to 4: text


def step_text(step, limit):
    from memory import Step

    return Step(**step).render(limit)


def memory_text(steps, limits):
    """(text, were the steps left as they were?)"""
    from memory import Memory, Step

    memory = Memory()
    memory.steps = [Step(**step) for step in steps]
    text = memory.render(limits)
    return text, memory.steps == [Step(**step) for step in steps]


def plan(text, tools):
    from modules import parse_plan

    return dataclasses.asdict(parse_plan(text, tools))


def last_plan(pairs):
    from modules import _last_plan

    return _last_plan([tuple(pair) for pair in pairs])


def bm25_weights(texts):
    """term -> (numbers of texts, weights)."""
    from tools import BM25

    index = BM25(texts).index
    return {term: [[int(row) for row in rows], [float(x) for x in weights]]
            for term, (rows, weights) in index.items()}


def bm25_best(scores, count, share):
    """`best` alone: the scores are given."""
    import numpy as np

    from tools import BM25

    bm25 = object.__new__(BM25)
    bm25.size, given = len(scores), np.array(scores, dtype=np.float64)
    bm25.scores = lambda query: given.copy()
    return [int(row) for row in bm25.best("", count, share)]


def library(passages, query):
    """(output, kind of error) of the search tool over these passages."""
    from tools import Library_Search_Tool, execute

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "library.jsonl"
        lines = [json.dumps({"title": "", "text": text}) for text in passages]
        path.write_text("\n".join(lines), encoding="utf-8")
        tool = Library_Search_Tool(path)
    try:
        next(execute(tool, {"query": query}))
    except StopIteration as stop:
        return stop.value.output, stop.value.error
    raise TypeError("run() asked for something: a look-up needs neither a model nor a job")


def alive(token: str) -> set[int]:
    """This process's living children, and whoever has the token in its command line (Linux only;
    elsewhere nobody is found)."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            own = parent == str(os.getpid()) or token.encode() in (
                stat.parent / "cmdline").read_bytes()
            if own and state != "Z":
                found.add(int(stat.parent.name))
    return found


def python_run(code, timeout, namespaces=True):
    """What became of the program, the seconds that the caller waited, and how many are left a
    second later; TOKEN in the code tells whom it has started."""
    from tools import run_python

    token = secrets.token_hex(8)
    before, started = alive(token), time.perf_counter()
    run = run_python(code.replace("TOKEN", token), timeout, namespaces=namespaces)
    ended = time.perf_counter()
    while (left := alive(token) - before) and time.perf_counter() < ended + 1.0:
        time.sleep(0.02)
    for process in left:
        with contextlib.suppress(OSError):
            os.kill(process, 9)
    return {"stdout": run.stdout, "value": run.value, "error": run.error, "message": run.message,
            "seconds": run.seconds, "waited": ended - started, "left": len(left)}


def unread(size):
    """(error, message) for a program of so many characters whose process ends before it reads."""
    import tools

    with tempfile.TemporaryDirectory() as folder, swapped(tools, RUNNER="import os; os._exit(3)"):
        run = tools._run_in(folder, "#" * size, 5.0, 512, 1000, False)
    return run.error, run.message


def verdict(stderr, mark, code, timeout):
    from tools import _verdict

    return _verdict(stderr, mark, code, timeout)


# ------------------------------------------------------------------- 5, 6 and 11: the backbone


def causal_mask(positions, width, dtype):
    import torch

    from agentflow import causal_mask

    return causal_mask(positions, width, getattr(torch, dtype))


def cached_attend(kv, rows, positions, mask, layer, query, key, value, scaling):
    """(output, keys and values afterwards)."""
    from agentflow import CachedAttention

    slots = kv.clone()
    context = CachedAttention(slots, rows, positions, mask)
    return context.attend(layer, query, key, value, scaling), slots


def burst(prompts, written, steps, dtype):
    """One burst over rows of so many prompt tokens and written ones: the positions and masks that
    each pass was given. No model: its states are zeros, and each next token is 0."""
    import torch

    import agentflow

    ask, rows = agentflow.Ask("executor", "", ""), []
    for number, (prompt, own) in enumerate(zip(prompts, written, strict=True)):
        request = agentflow.Request(ask, 0.0, own + steps, (number,))
        ids = tuple(range(prompt))
        rows.append(agentflow.Draft([request], ids, 0, ids=[7] * own, logp=[0.0] * own))
    B, passes, reserved = len(rows), [], []
    backbone = object.__new__(agentflow.Backbone)
    backbone.device, backbone.stride, backbone.lora = torch.device("cpu"), steps, {}
    backbone.stop = torch.zeros(0, dtype=torch.long)

    def hidden(lane, ids, positions, context, gates):
        passes.append((positions.clone(), context.mask.clone()))
        return torch.zeros(B, 1, 1)

    backbone._hidden = hidden
    lane = SimpleNamespace(
        rows=rows, dtype=getattr(torch, dtype), lm_head=lambda x: x,
        kv=torch.zeros(2, 1, B, 1, 64, 1, dtype=getattr(torch, dtype)),
        reserve=lambda rows, width: reserved.append([rows, width]))
    nothing = (torch.zeros(B, dtype=torch.long), torch.zeros(B))
    with swapped(agentflow, choose=lambda logits, temperatures, draws: nothing,
                 causal_mask=checks.slow_mask):
        backbone._burst(lane)
    positions, masks = zip(*passes, strict=True)
    return torch.stack(positions), torch.stack(masks), reserved


def choose(logits, temperatures, draws):
    import agentflow

    return agentflow.choose(logits, temperatures, draws)


def draw(probabilities, draws):
    import agentflow

    return agentflow.draw(probabilities, draws)


def new_lora(weight, r, seed, bias=None):
    """An adapter as it is made, around a frozen layer with this weight (out, in), bias (out,)."""
    import torch

    from agentflow import Gate, LoraLinear

    base = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    base.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    if bias is not None:
        base.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
    gate, random = Gate(), torch.Generator().manual_seed(seed)
    return LoraLinear(base, gate, r, 2.0 * r, random), gate


def lora_start(weight, r, seed):
    lora = new_lora(weight, r, seed)[0]
    trained = sorted(name for name, p in lora.named_parameters() if p.requires_grad)
    return lora.A.detach(), lora.B.detach(), trained


def lora(weight, A, B, gates, x, upstream, bias=None):
    """The layer with this A and B and scale 2: output, gradients of A, B and x, and the precisions
    of the forward pass's products."""
    import torch

    precisions = set()

    def see(operation, result):
        if re.match("(add|b|badd)?mm", operation):
            precisions.add(str(result.dtype))

    layer, gate = new_lora(weight, len(A), 0, bias)
    x = x.clone().requires_grad_()
    with torch.no_grad():
        layer.A.copy_(A)
        layer.B.copy_(B)
    gate.value = gates
    # what a layer is handed is some other layer's output, not a leaf
    with watching(see):
        out = layer(x * 1.0)
    if gates is not None or out.requires_grad:
        (out * upstream).sum().backward()
    return out, gradient(layer.A), gradient(layer.B), gradient(x), sorted(precisions)


# ------------------------------------------------------------------------ 7 to 10: Flow-GRPO


def turn_weights(group_ids, rollout_ids, lengths):
    import flow_grpo

    return flow_grpo.turn_weights(group_ids, rollout_ids, lengths)


def group_advantages(rewards, group_ids, eps=1e-6):
    import flow_grpo

    return flow_grpo.group_advantages(rewards, group_ids, eps)


def loss(logp, logp_old, logp_ref, advantages, weights, mask, low, high, beta):
    """Loss, its gradient, the largest ratio and the mean KL of the statistics."""
    import flow_grpo

    logp = logp.clone().requires_grad_()
    old = logp_old.clone().requires_grad_()
    value, statistics = flow_grpo.flow_grpo_loss(
        logp, old, logp_ref, advantages, weights, mask, low, high, beta)
    value.backward()
    return value, gradient(logp), gradient(old), statistics["ratio_max"], statistics["kl"]


def kl(logp, logp_ref):
    """Estimates, and the gradient of their sum."""
    import flow_grpo

    logp = logp.clone().requires_grad_()
    value = flow_grpo.kl_k3(logp, logp_ref)
    value.sum().backward()
    return value, gradient(logp)


def logprobs(hidden, weight, targets, temperature, chunk, upstream, head_bytes, frozen_head):
    """Log-probs, entropies, both gradients, and the numbers in the largest tensor on the way."""
    import flow_grpo

    largest = 0

    def see(operation, result):
        nonlocal largest
        largest = max(largest, getattr(result, "numel", lambda: 0)())

    hidden = hidden.clone().requires_grad_()
    weight = weight.clone().requires_grad_(not frozen_head)
    with swapped(flow_grpo, HEAD_BYTES=head_bytes), watching(see):
        logp, entropy = flow_grpo.linear_logprobs(hidden, weight, targets, temperature, chunk)
        (logp * upstream).sum().backward()
    return logp, entropy, gradient(hidden), gradient(weight), largest


# ----------------------------------------------------------------------------- 12: the loop


def rows(lengths, rewards, group_ids):
    """lengths: for each roll-out the response lengths of its turns. The rows as dictionaries."""
    import agentflow
    import flow_grpo
    import train

    rollouts = []
    for i, turns in enumerate(lengths):
        planners = [
            agentflow.Reply("", [i, t], list(range(length)), [-0.5 - i] * length, True)
            for t, length in enumerate(turns)
        ]
        rollouts.append(SimpleNamespace(turns=[SimpleNamespace(planner=x) for x in planners]))
    with swapped(flow_grpo, group_advantages=lambda rewards, group_ids, eps=1e-6:
                 checks.slow_advantages(rewards, group_ids), turn_weights=checks.slow_weights):
        made, advantages = train.make_rows(rollouts, rewards, group_ids)
    keep = ("prompt_ids", "response_ids", "logp_old", "advantage", "weight", "group")
    return [{name: getattr(row, name) for name in keep} for row in made], advantages


def gradients(policy, reference, head, made, settings):
    """The gradient of a model whose state after a token is a row of a table (V, D), by
    accumulate_gradients; the statistics; and who was scored, with or without a gradient."""
    import torch

    import flow_grpo
    import train

    table, scored = policy.clone().requires_grad_(), set()

    def packed_hidden(prompts, responses, gate):
        scored.add(("pi_theta" if gate else "pi_ref", torch.is_grad_enabled()))
        before = [[*p, *r][len(p) - 1:-1] for p, r in zip(prompts, responses, strict=True)]
        return (table if gate else reference)[torch.tensor([t for row in before for t in row])]

    backbone = SimpleNamespace(packed_hidden=packed_hidden, head_weight=lambda gate: head)
    with swapped(flow_grpo, flow_grpo_loss=checks.slow_loss,
                 linear_logprobs=checks.slow_logprobs):
        totals = train.accumulate_gradients(
            backbone, [train.Row(**row) for row in made], train.Config(**settings))
    return (gradient(table), {name: totals[name] for name in ("loss", "kl", "gap_max")},
            sorted(scored))


def update(gradients_of_pass, iterations):
    """`update` of weights at 0 by SGD of rate 1, each pass having these gradients: the weights, the
    norm that is reported, what happened in which order, and the error."""
    import torch

    import train

    weights = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients_of_pass]
    events, optimizer = [], torch.optim.SGD(weights, lr=1.0)
    take = optimizer.step

    def step():
        events.append("step")
        take()

    optimizer.step = step
    backbone = SimpleNamespace(trainable_parameters=lambda: weights,
                               adapter_changed=lambda: events.append("changed"))

    def accumulate(*arguments):
        for weight, own in zip(weights, gradients_of_pass, strict=True):
            weight.grad = own.clone()
        return {"gap_mean": 0.0, "gap_max": 0.0}

    row = train.Row([1], [2], [-1.0], advantage=1.0, weight=1.0, group=0)
    config, error, report = train.Config(num_iterations=iterations), "", {"grad_norm": 0.0}
    with swapped(train, accumulate_gradients=accumulate):
        try:
            report = train.update(backbone, optimizer, [row], config,
                                  before_step=lambda: events.append("before"))
        except FloatingPointError:
            error = "FloatingPointError"
    return [weight.detach() for weight in weights], report["grad_norm"], events, error


# --------------------------------------------------------------------------------- the process

CALLS = {function.__name__: function for function in (
    load, step_text, memory_text, plan, last_plan, bm25_weights, bm25_best, library, python_run,
    unread, verdict, causal_mask, cached_attend, burst, choose, draw, lora_start, lora,
    turn_weights, group_advantages, loss, kl, logprobs, rows, gradients, update)}


def answer(name: str, arguments: list, folder: str) -> dict:
    """A call's result as plain data: its value and the places of arguments that it changed, or
    what it raised and where in the folder."""
    try:
        given = [decode(argument) for argument in arguments]
        value = encode(CALLS[name](*given))
        changed = [i for i, argument in enumerate(arguments)
                   if json.dumps(encode(given[i])) != json.dumps(argument)]
        return {"value": value, "changed": changed}
    except BaseException as error:  # SystemExit too: whatever it is, it is the student's
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if Path(f.filename).parent == Path(folder)]
        # None of the student's: it is what came back that does not fit here, two values, say.
        last = (own or [f for f in frames if f.filename == __file__])[-1]
        where = f"{Path(last.filename).name}:{last.lineno}: {last.line}"
        if isinstance(error, SyntaxError) and error.filename:
            where = f"{Path(error.filename).name}:{error.lineno}: {(error.text or '').strip()}"
        return {"raised": type(error).__name__, "text": str(error)[:500], "where": where}


def end_with_the_checker() -> None:
    """Linux: the kernel kills this process when check.py ends, however it ends."""
    with contextlib.suppress(Exception):
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    end_with_the_checker()
    folder = str(Path(sys.argv[1]).resolve())
    # Ours alone from here on: what the student's code prints goes to stderr, and it reads nothing.
    requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path[0] = folder
    for line in requests:
        call = json.loads(line)
        replies.write(json.dumps(answer(call["name"], call["arguments"], folder)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
