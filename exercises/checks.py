"""The checks of the twelve exercises: from the smallest case to larger ones, each with an answer
that two lines of arithmetic, a loop, or PyTorch's own function gives.

A check is a function of `run` and `seed`: `run("turn_weights", …)` calls the student's function in
the student's process (calls.py) and returns what came back; nothing of the student's runs here.
The slow_… functions say in plain loops what is to be computed.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from functools import partial

# --------------------------------------------------------------------------- plain data and tensors


def encode(value):
    """Plain data for JSON; a tensor as its type, shape and numbers; of anything else its type."""
    if type(value) in (str, int, float, bool, type(None)):
        return value
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {str(name): encode(item) for name, item in value.items()}
    if type(value).__name__ in ("Tensor", "Parameter"):
        flat = value.detach().cpu().flatten()
        flat = flat.double() if value.is_floating_point() else flat
        kind, shape = str(value.dtype)[6:], list(value.shape)
        return {"tensor": kind, "shape": shape, "numbers": flat.tolist()}
    return {"other": type(value).__name__}


def decode(value):
    """What `encode` wrote, tuples as lists. Raises ValueError for what is no tensor of ours."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" not in value:
        return {name: decode(item) for name, item in value.items()}
    import torch

    dtype = getattr(torch, str(value["tensor"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no type of a tensor: {value['tensor']}")
    wide = torch.float64 if dtype.is_floating_point else None
    return torch.tensor(value["numbers"], dtype=wide).to(dtype).reshape(value["shape"])


class Wrong(Exception):
    """The answer is wrong; the text says for which case, what was expected and what came."""


def show(value) -> str:
    """A value in few words."""
    if hasattr(value, "dtype"):
        flat = [f"{number:.5g}" for number in value.flatten().tolist()[:12]]
        more = ", …" if value.numel() > 12 else ""
        return f"{str(value.dtype)[6:]} {tuple(value.shape)} [{', '.join(flat)}{more}]"
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:200]} … {text[-80:]}"


RELATIVE = {"float64": 1e-7, "float32": 1e-4, "bfloat16": 2e-2}
ABSOLUTE = {"float64": 1e-9, "float32": 1e-6, "bfloat16": 1e-3}


def same(case: str, got, expected, atol: float | None = None) -> None:
    """Raises Wrong where type, shape or value differ; values up to rounding."""
    if hasattr(expected, "dtype"):
        import torch

        kind = str(expected.dtype)[6:]
        right = (
            hasattr(got, "dtype") and got.shape == expected.shape and got.dtype == expected.dtype
            and torch.allclose(got, expected, RELATIVE.get(kind, 0), atol or ABSOLUTE.get(kind, 0),
                               equal_nan=True))
        note = ""
        if not right and hasattr(got, "dtype") and (got.shape, got.dtype) == (
                expected.shape, expected.dtype) and expected.numel():
            off = (got.double() - expected.double()).abs().nan_to_num(nan=torch.inf)
            place = [int(i) for i in torch.unravel_index(off.argmax(), off.shape)]
            note = f"\n  furthest:  at {place}: expected {expected[tuple(place)].item():.9g}, " \
                   f"got {got[tuple(place)].item():.9g}"
    elif isinstance(expected, float):
        right = type(got) in (int, float) and math.isclose(
            got, expected, rel_tol=1e-5, abs_tol=1e-6)
        note = ""
    else:
        right, note = type(got) is type(expected) and got == expected, ""
    if not right:
        raise Wrong(f"  case:      {case}\n  expected:  {show(expected)}\n"
                    f"  got:       {show(got)}{note}")


def holds(case: str, right: bool, expected: str, got) -> None:
    """Raises Wrong where something is not so."""
    if not right:
        raise Wrong(f"  case:      {case}\n  expected:  {expected}\n  got:       {show(got)}")


# ---------------------------------------------------------------------------- 1. Memory rendering


def slow_step(step: dict) -> str:
    """The lines of a step whose result is not shortened."""
    text = f"Step {step['turn']}\nSub-Goal: {step['sub_goal']}\nTool Name: {step['tool_name']}\n"
    text += f"Command: {step['command']}\n" if step["command"] else ""
    text += f"Error: {step['error']}\n" if step["error"] != "none" else ""
    text += f"Result: {step['result']}"
    return text + {None: "", True: "\nVerdict: STOP", False: "\nVerdict: CONTINUE"}[step["stop"]]


def check_1(run, seed) -> None:
    first = {"turn": 1, "sub_goal": "Find it.", "tool_name": "Search", "command": "",
             "result": "26", "error": "none", "stop": None, "seconds": 1.5}
    called = {**first, "command": 'tool.execute(query="Iron")'}
    for case, step in (
        ("a step that is not judged yet, without a command", first),
        ("a step with a command", called),
        ("a step that failed", {**called, "error": "timeout"}),
        ("a step with the verdict CONTINUE", {**called, "stop": False}),
        ("a step with the verdict STOP", {**called, "error": "bad_plan", "stop": True}),
    ):
        same(case, run("step_text", step, None), slow_step(step))
    long = {**called, "result": "a" * 3000 + "z"}
    text = run("step_text", long, 100)
    shown = text.partition("Result: ")[2]
    holds("a result of 3001 characters, of which 100 may be shown", len(shown) <= 100
          and shown.startswith("aaa") and shown.endswith("z") and "characters left out" in shown,
          "at most 100 characters: head, note and tail, as clip_middle gives them", text)
    same("a result of which 0 characters may be shown", run("step_text", long, 0),
         slow_step({**long, "result": ""}))
    steps = [{**called, "stop": False}, {**first, "turn": 2}]
    same("an empty memory", run("memory_text", [], None), ["", True])
    same("two steps", run("memory_text", steps, None),
         ["\n".join(map(slow_step, steps)), True])
    steps = [{**step, "result": letter * 400} for step, letter in zip(steps, "xy", strict=True)]
    text, kept = run("memory_text", steps, [400, 50])
    holds("two results of 400 characters, limits 400 and 50", "x" * 400 in text
          and "y" * 51 not in text, "the first whole, the second shortened", text)
    holds("the memory after rendering", kept, "the steps as they were", "other steps")
    before, _ = run("memory_text", steps[:1], None)
    after, _ = run("memory_text", steps, None)
    holds("a memory that grew by a step", after.startswith(before),
          "a text that begins with the shorter memory's", after)


# --------------------------------------------------------------------------------- 2. Plan parser


def check_last_plan(run) -> None:
    pairs = [["subgoal", "halve it"], ["toolname", "hammer"]]

    def fields(case: str, pairs: list, **expected: str) -> None:
        got = run("last_plan", pairs)
        holds(f"{case}: {pairs}", isinstance(got, dict) and {
            name: got.get(name) for name in expected} == expected, f"{expected}", got)

    fields("one plan as pairs", pairs, subgoal="halve it", tool="hammer")
    fields("the label 'tool'", [["subgoal", "halve it"], ["tool", "saw"]], tool="saw")
    same("pairs without a tool", run("last_plan", pairs[:1]), None)
    same("pairs with an empty sub-goal", run("last_plan", [["subgoal", ""], pairs[1]]), None)


def check_refused_plans(run, tools, plain) -> None:
    """plain: a plan that is right, to be spoilt in one place each."""

    def refuse(case: str, text: str) -> None:
        error = run("plan", text, tools)["error"]
        holds(f"{case}: {text!r}", isinstance(error, str) and all(t in error for t in tools),
              "an error that lists the tools", error)

    refuse("an empty reply", "")
    refuse("prose", "I would use Python_Coder_Tool.")
    refuse("a tool that there is not", plain.replace("Python_Coder", "Calculator"))
    refuse("two tools", plain + " or Library_Search_Tool")
    refuse("no sub-goal", "Context: 12\nTool Name: Python_Coder_Tool")
    refuse("an empty sub-goal", "Context: 12\nSub-Goal:\nTool Name: Python_Coder_Tool")
    refuse("JSON with a list of tools", '{"sub_goal": "halve it", "tool_name": ["a", "b"]}')
    got = run("plan", plain.replace("Python_Coder", "Calculator"), tools)
    same("the tool of a plan whose tool there is not", [got["sub_goal"], got["tool_name"]],
         ["halve them", ""])


def check_2(run, seed) -> None:
    check_last_plan(run)
    tools = ["Python_Coder_Tool", "Library_Search_Tool"]

    def read(case: str, text: str, context: str, goal: str, tool: str, why: str = "") -> None:
        got = run("plan", text, tools)
        holds(case, got["error"] is None, f"a plan from {text!r}", got["error"])
        same(f"{case}: {text!r}", [got[name] for name in (
            "context", "sub_goal", "tool_name", "justification")], [context, goal, tool, why])

    plain = "Context: 12 apples\nSub-Goal: halve them\nTool Name: Python_Coder_Tool"
    read("three lines", plain, "12 apples", "halve them", tools[0])
    read("no context", plain.partition("\n")[2], "", "halve them", tools[0])
    read("bold labels, the tool in back-ticks",
         "**Context:** 12\n**Sub-Goal:** halve it\n**Tool Name:** `python coder tool`.",
         "12", "halve it", tools[0])
    read("a justification before it", "Justification: it is next.\n" + plain, "12 apples",
         "halve them", tools[0], "it is next.")
    read("thinking before it", "<think>Tool Name: Library_Search_Tool</think>" + plain,
         "12 apples", "halve them", tools[0])
    read("a line that says 'Tool'", plain.replace("Tool Name", "Tool"), "12 apples", "halve them",
         tools[0])
    read("a remark below the tool", plain + "\nI did not choose Library_Search_Tool.", "12 apples",
         "halve them", tools[0])
    draft = "Context: a draft\nSub-Goal: search\nTool Name: Library_Search_Tool\n"
    read("a draft, then the plan", draft + plain, "12 apples", "halve them", tools[0])
    read("a draft's context is not the plan's", draft + plain.partition("\n")[2], "",
         "halve them", tools[0])
    read("a plan, then one that is cut off", plain + "\nContext: more\nSub-Goal: go", "12 apples",
         "halve them", tools[0])
    read("JSON", 'My plan: {"context": "12", "sub_goal": "halve it", "tool_name": '
         '"Python_Coder_Tool"}', "12", "halve it", tools[0])
    read("JSON with keys of another style", '{"Context": 12, "subGoal": "halve it", '
         '"Tool Name": "Python_Coder_Tool"}', "12", "halve it", tools[0])
    read("JSON: the first object that is a plan wins", '{"a": 1} {"sub_goal": "halve it", '
         '"tool_name": "Python_Coder_Tool", "context": null} {"sub_goal": "search", "tool_name": '
         '"Library_Search_Tool"}', "", "halve it", tools[0])
    read("labels that share a line",
         "Context: 12 Sub-Goal: halve it Tool Name: Python_Coder_Tool", "12", "halve it", tools[0])
    check_refused_plans(run, tools, plain)


# -------------------------------------------------------------------------- 3. The library search


def slow_bm25(texts: list[str]) -> dict:
    """term -> {text number: addend}, the formula term by term; the texts hold no stop words."""
    bags = [Counter(text.lower().split()) for text in texts]
    mean = sum(sum(bag.values()) for bag in bags) / len(bags)
    weights: dict = {}
    for term in {term for bag in bags for term in bag}:
        holding = sum(term in bag for bag in bags)
        idf = math.log(1 + (len(bags) - holding + 0.5) / (holding + 0.5))
        weights[term] = {
            i: idf * bag[term] * 2.5
            / (bag[term] + 1.5 * (0.25 + 0.75 * sum(bag.values()) / mean))
            for i, bag in enumerate(bags) if term in bag
        }
    return weights


def check_3(run, seed) -> None:
    for case, texts in (("one text", ["iron metal"]),
                        ("three texts", ["iron metal", "iron iron rust", "gold metal shine coin"])):
        index = run("bm25_weights", texts)
        for term, addends in slow_bm25(texts).items():
            got = dict(zip(*index.get(term, [[], []]), strict=True))
            holds(f"{case} {texts}, term {term!r}", got.keys() == addends.keys() and all(
                math.isclose(got[i], addends[i], rel_tol=1e-6) for i in got),
                  f"text number -> addend {addends}", got)
    for case, scores, count, share, expected in (
        ("the best of two", [1.0, 2.0], 1, 0.0, [1]),
        ("what scores 0 is not found", [0.0, 2.0, 0.0], 3, 0.0, [1]),
        ("equal scores in the texts' order", [2.0, 1.0, 2.0, 2.0], 4, 0.0, [0, 2, 3, 1]),
        ("a share of 0.7", [0.5, 1.0, 0.7, 0.69], 4, 0.7, [1, 2]),
        ("40 equal scores", [1.0] * 20 + [2.0] + [1.0] * 19, 4, 0.0, [20, 0, 1, 2]),
        ("nothing matches", [0.0, 0.0], 3, 0.7, []),
        ("no text", [], 3, 0.7, []),
    ):
        same(f"{case}: scores {scores}, count {count}, share {share}",
             run("bm25_best", scores, count, share), expected)
    passages = ["iron metal", "gold metal", "iron iron rust"]
    same(f"library {passages}, query 'gold'", run("library", passages, "gold"),
         ["[1] gold metal", "none"])
    order = sorted((0, 2), key=lambda i: -slow_bm25(passages)["iron"].get(i, 0))
    same(f"library {passages}, query 'iron'", run("library", passages, "iron"),
         ["\n".join(f"[{n}] {passages[i]}" for n, i in enumerate(order, start=1)), "none"])
    for longer, found in ((5, 2), (8, 1)):  # 0.74 and 0.63 of the best score
        texts = ["iron metal rust", "iron" + " gold" * longer]
        scores = slow_bm25(texts)["iron"]
        same(f"library {texts}, query 'iron', scores {scores[0]:.3f} and {scores[1]:.3f}",
             run("library", texts, "iron"),
             ["\n".join(f"[{i + 1}] {texts[i]}" for i in range(found)), "none"])
    text, error = run("library", passages, "silver")
    holds("a query that nothing matches", error == "not_found" and bool(text.strip()),
          "a sentence and the error 'not_found'", [text, error])
    text, error = run("library", [f"iron{' x' * 1500} end{i}" for i in range(5)], "iron")
    holds("five equal passages of 3000 characters", [f"end{i}" in text for i in range(5)]
          == [True, True, True, False, False] and error == "none"
          and [len(line) for line in re.split(r"\n?\[\d\] ", text)] == [0, 658, 658, 658],
          "the first three, each shortened in its middle to RESULT_CHARS // 3 - 8 = 658 characters",
          text)


# ------------------------------------------------------------------- 4. The sandbox's time limit


def check_4(run, seed) -> None:
    got = run("python_run", "print(6 * 7)", 5.0)
    same("print(6 * 7), limit 5 s", [got["error"], got["stdout"]], ["none", "42\n"])
    holds("print(6 * 7): the wait", got["waited"] < 4 and 0 < got["seconds"] <= got["waited"],
          "as long as the program runs, not the limit", got)
    got = run("python_run", "1 / 0", 10.0)
    holds("1 / 0, limit 10 s", got["error"] == "runtime" and "ZeroDivisionError" in got["message"],
          "the error 'runtime', ZeroDivisionError", got)
    got = run("python_run", "x = '" + "a" * 80_000 + "'\nlen(x)", 10.0)
    same("a program of 80,000 characters", got["value"], "80000")
    for case, code in (
        ("an endless loop", "print('so far', flush=True)\nwhile True: pass"),
        ("a sleep of 8 seconds", "print('so far', flush=True)\nimport time; time.sleep(8)"),
    ):
        got = run("python_run", code, 1.0)
        same(f"{case}, limit 1 s", [got["error"], got["message"], got["value"]],
             ["timeout", "Timed out after 1 seconds.", None])
        holds(f"{case}: what it had printed", got["stdout"] == "so far\n", "'so far\\n'", got)
        holds(f"{case}: the wait, limit 1 s", 0.9 < got["seconds"] < 2.5 and got["waited"] < 4,
              "about 1 s", got)
        holds(f"{case}: its process afterwards", not got["left"], "killed", "still running")
    for case, more, end, namespaces, expected in (
        ("an endless loop that starts a program", "", "while True: pass", True, "timeout"),
        ("an endless loop that starts one in a session of its own", ", start_new_session=True",
         "while True: pass", True, "timeout"),
        ("the same where there are no namespaces", ", start_new_session=True", "while True: pass",
         False, "timeout"),
        ("a program that ends before the one that it started, without namespaces",
         ", start_new_session=True", "", False, "none"),
    ):
        code = (f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; "
                f"time.sleep(20)  # TOKEN']{more}, stdout=-3, stderr=-3)\n{end}")
        got = run("python_run", code, 2.0, namespaces)
        same(f"{case}: error", got["error"], expected)
        holds(f"{case}: afterwards", not got["left"], "everybody killed", "still running")
    same("a program of 3,000,000 characters whose process ends without reading it",
         run("unread", 3_000_000), ["runtime", "The program ended early with exit code 3."])
    same("print('é')", run("python_run", "print('é')", 10.0)["stdout"], "é\n")
    same("a program with half of a character, which UTF-8 cannot hold: '?' stands for it",
         run("python_run", "print('\ud800')", 10.0)["stdout"], "?\n")
    report = "said\nmark (None, 'runtime', 'ValueError: x')\n"
    same("a report before the limit of 2.5 s", run("verdict", report, "mark", None, 2.5),
         [None, "timeout", "Timed out after 2.5 seconds. Before: ValueError: x", "said"])
    report = "said\nmark ('7', 'none', '')\n"
    same("a report without a message", run("verdict", report, "mark", None, 10.0),
         [None, "timeout", "Timed out after 10 seconds.", "said"])
    same("warnings and no report", run("verdict", "a warning", "mark", -9, 10.0)[:3],
         [None, "timeout", "Timed out after 10 seconds."])


# ------------------------------------------------------------- 5. Slots and masks of a decode step


def slow_mask(positions, width, dtype):
    """(..., L) positions -> (..., 1, L, width), number by number."""
    import torch

    rows = [[0.0 if k <= q else -math.inf for k in range(width)] for q in positions.flatten()]
    mask = torch.tensor(rows, dtype=dtype).reshape(*positions.shape, width)
    return mask.unsqueeze(-3)


def slow_attention(query, keys, values, last, scaling):
    """One query (D_head,) over the keys (W, D_head) up to place `last`."""
    weights = (keys[: last + 1] @ query * scaling).softmax(dim=0)
    return weights @ values[: last + 1]


def check_mask(run) -> None:
    import torch

    for case, positions, width in (
        ("one query at place 1, 3 keys", [[1]], 3),
        ("queries at 0 and 1, 2 keys", [[0, 1]], 2),
        ("two rows at places 3 and 1, 5 keys", [[3], [1]], 5),
        ("two steps of three rows, 5 keys", [[[0], [2], [1]], [[1], [3], [2]]], 5),
    ):
        positions = torch.tensor(positions)
        for dtype in ("float64", "float32"):
            same(f"mask: {case}", run("causal_mask", positions, width, dtype),
                 slow_mask(positions, width, getattr(torch, dtype)))


def check_slots(run, seed) -> None:
    import torch

    random = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=random, dtype=torch.float64)
    for case, places, heads, shared, width in (
        ("one row, one token at place 2", [[2]], 1, 1, 3),
        ("two rows, places 4 and 1, rubbish to the right", [[4], [1]], 2, 2, 5),
        ("two rows of two tokens, 4 heads on 2 keys", [[2, 3], [0, 1]], 4, 2, 4),
    ):
        places = torch.tensor(places)
        B, L = places.shape
        kv = normal(2, 2, B, shared, 6, 4) * 5  # 2 layers, slots of 6 places
        query = normal(B, heads, L, 4)
        key, value = normal(B, shared, L, 4), normal(B, shared, L, 4)
        mask = slow_mask(places, width, torch.float64)
        out, after = run("cached_attend", kv, torch.arange(B)[:, None], places, mask, 1, query, key,
                         value, 0.7)
        wanted, expected = kv.clone(), torch.zeros(B, L, heads, 4, dtype=torch.float64)
        for b in range(B):
            for t, place in enumerate(places[b].tolist()):
                wanted[0, 1, b, :, place], wanted[1, 1, b, :, place] = key[b, :, t], value[b, :, t]
        for b in range(B):
            for h in range(heads):
                for t, place in enumerate(places[b].tolist()):
                    keys, values = wanted[:, 1, b, h * shared // heads]
                    expected[b, t, h] = slow_attention(query[b, h, t], keys, values, place, 0.7)
        same(f"slots afterwards: {case}", after, wanted)
        same(f"output: {case}", out, expected)


def check_5(run, seed) -> None:
    import torch

    check_mask(run)
    check_slots(run, seed)
    for case, prompts, written, steps, dtype in (
        ("a prompt of 3 tokens, 1 written, 1 step", [3], [1], 1, "float32"),
        ("prompts of 3 and 5, 2 and 1 written, 2 steps", [3, 5], [2, 1], 2, "float32"),
        ("prompts of 7, 2 and 4, 1, 6 and 3 written, 3 steps", [7, 2, 4], [1, 6, 3], 3, "float32"),
        ("bf16 weights", [3, 5], [2, 1], 2, "bfloat16"),
    ):
        positions, masks, reserved = run("burst", prompts, written, steps, dtype)
        # the last written token has no keys yet: it is fed first, at its own place
        places = torch.tensor([[[p + w - 1 + t] for p, w in zip(prompts, written, strict=True)]
                               for t in range(steps)])
        width = int(places.max()) + 1
        same(f"positions: {case}", positions.long() if hasattr(positions, "long") else positions,
             places)
        same(f"masks: {case}", masks, slow_mask(places, width, getattr(torch, dtype)))
        same(f"reserved (rows, width): {case}", reserved, [[len(prompts), width]])


# -------------------------------------------------------------------------- 6. Sampling, log-probs


JUST_BELOW_1 = 1 - 2.0**-53


def check_small_draws(run) -> None:
    import torch

    halves = torch.tensor([[0.5, 0.25, 0.25]])
    for u, token in ((0.0, 0), (0.49, 0), (0.5, 1), (0.74, 1), (0.75, 2), (0.999, 2)):
        draws = torch.tensor([u], dtype=torch.float64)
        same(f"draw: probabilities 1/2, 1/4, 1/4 and the number {u}", run("draw", halves, draws),
             torch.tensor([token]))
    edges = torch.tensor([0.0, 0.5, JUST_BELOW_1], dtype=torch.float64)
    same("draw: probabilities 0, 1, 0: only token 1", run(
        "draw", torch.tensor([[0.0, 1.0, 0.0]] * 3), edges), torch.tensor([1, 1, 1]))
    below = torch.tensor([[0.7, 0.2, 0.1, 0.0]])
    same("draw: 0.7, 0.2, 0.1 and 0, of sum 1 - 7e-9 in fp32, and the number 1 - 2^-53",
         run("draw", below, edges[-1:]), torch.tensor([2]))


def check_choose(run, seed) -> None:
    import torch

    logits = torch.tensor([[1.0, 2.0, 0.0], [3.0, 1.0, 3.5], [0.0, 0.0, 1.0]])
    for case, temperatures, draws in (
        ("all greedy, no numbers", [0.0, 0.0, 0.0], None),
        ("temperature 1", [1.0, 1.0, 1.0], [0.05, 0.4, 0.99]),
        ("temperatures 0.5, 2 and 0", [0.5, 2.0, 0.0], [0.05, 0.6, 0.01]),
        ("the same, numbers that another temperature gives other tokens", [0.5, 2.0, 0.0],
         [0.2, 0.45, 0.99]),
    ):
        heat = torch.tensor(temperatures)
        logp = torch.log_softmax(logits / torch.where(heat == 0, 1.0, heat)[:, None], dim=-1)
        ids = logits.argmax(dim=-1)
        for b, t in enumerate(temperatures):
            if t:
                ids[b] = int((logp[b].exp().cumsum(0) <= draws[b]).sum())
        numbers = None if draws is None else torch.tensor(draws, dtype=torch.float64)
        got_ids, got_logp = run("choose", logits, heat, numbers)
        same(f"choose: {case}: ids", got_ids, ids)
        same(f"choose: {case}: log-probs", got_logp, logp.gather(1, ids[:, None])[:, 0])
    got = run("choose", logits.bfloat16() * 100, torch.tensor([1.0, 1.0, 0.0]),
              torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64))
    same("choose: logits of 300 in bfloat16: log-probs are fp32", got[1], torch.zeros(3))
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(48, 5, generator=random).bfloat16()
    heat = torch.tensor([0.3, 0.7, 1.3]).repeat(16)
    logp = torch.log_softmax(logits.double() / heat.double()[:, None], dim=-1)
    ids = torch.randint(5, (48,), generator=random)
    rare = logp.gather(1, ids[:, None])[:, 0] < -6  # a border on each side within 2e-6
    ids = torch.where(rare, logp.argmax(dim=-1), ids)
    before = (logp.exp().cumsum(-1) - logp.exp()).gather(1, ids[:, None])[:, 0]
    own = logp.gather(1, ids[:, None])[:, 0]
    for side, numbers in (("above the lower", before + 2e-6),
                          ("below the upper", before + own.exp() - 2e-6)):
        got = run("choose", logits, heat, numbers.clamp(0, 1))
        same(f"choose: 48 rows in bfloat16, numbers just {side} borders: ids", got[0], ids)
        same(f"choose: 48 rows in bfloat16, numbers just {side} borders: log-probs", got[1],
             own.float())
    got = run("choose", torch.tensor([[0.0, -60.0]]), torch.ones(1),
              torch.tensor([JUST_BELOW_1], dtype=torch.float64))
    same("choose: one token has all but 1e-26, the number is just below 1", got[0],
         torch.tensor([0]))


def check_6(run, seed) -> None:
    import torch

    check_small_draws(run)
    check_choose(run, seed)
    random = torch.Generator().manual_seed(seed)
    # 600 tokens of about 2^18 parts in 600 * 2^18, numbers one part beside the borders: sums in
    # fp32 have a tenth of the digits that this takes
    change = torch.randint(1, 1 << 17, (300,), generator=random)
    parts = torch.stack([(1 << 18) + change, (1 << 18) - change], dim=1).flatten()
    upper, total = parts.cumsum(0), 600 << 18
    probabilities = (parts.double() / total).float()
    numbers = torch.cat([upper - parts + 1, upper - 1]).double() / total
    exact = probabilities.double().cumsum(0)  # which ends at about 1
    scaled, plain = ((exact[None] <= (numbers * whole)[:, None]).sum(dim=1)
                     for whole in (exact[-1], 1.0))
    clear = (scaled == plain).nonzero()[:, 0][::8]  # the same with and without that total
    got = run("draw", probabilities.expand(len(clear), 600).clone(), numbers[clear])
    same("draw: 600 tokens, numbers just beside the borders (are sums in the numbers' precision?)",
         got, plain[clear])


# -------------------------------------------------------------------------------- 7. Turn weights


def slow_weights(group_ids, rollout_ids, lengths):
    """Eq. 5: 1 / (Q · G_q · T_i · |a_i^t|), counted one by one."""
    import torch

    rows = list(zip(group_ids.tolist(), rollout_ids.tolist(), lengths.tolist(), strict=True))
    weights = []
    for group, rollout, length in rows:
        questions = len({g for g, _, _ in rows})
        rollouts = len({i for g, i, _ in rows if g == group})
        turns = sum((g, i) == (group, rollout) for g, i, _ in rows)
        weights.append(1 / (questions * rollouts * turns * length))
    return torch.tensor(weights, dtype=torch.float32)


def check_7(run, seed) -> None:
    import torch

    random = torch.Generator().manual_seed(seed)
    for case, groups, rollouts, lengths in (
        ("one turn of one token", [0], [0], [1]),
        ("one turn of four tokens", [0], [0], [4]),
        ("a roll-out of two turns", [0, 0], [0, 0], [2, 2]),
        ("two roll-outs, of one and of two turns", [0, 0, 0], [0, 1, 1], [2, 1, 4]),
        ("two questions, of one and of two roll-outs", [0, 1, 1], [0, 0, 1], [1, 1, 1]),
        ("roll-out numbers that start again, in any order", [5, -3, 5, -3, 5], [0, 0, 1, 0, 0],
         [3, 2, 1, 7, 2]),
        ("40 rows at random", *(torch.randint(1, high, (40,), generator=random).tolist()
                                for high in (5, 4, 30))),
        ("400 rows of many roll-outs", *(torch.randint(high, (400,), generator=random).tolist()
                                         for high in (9, 70)), [1] * 400),
    ):
        rows = [torch.tensor(x) for x in (groups, rollouts, lengths)]
        same(f"{case}: questions {groups[:9]}, roll-outs {rollouts[:9]}, lengths {lengths[:9]}",
             run("turn_weights", *rows), slow_weights(*rows))


# ---------------------------------------------------------------------------- 8. Group advantages


def slow_advantages(rewards, group_ids):
    """Eq. 7, one roll-out at a time; NaN is in no group."""
    import torch

    pairs, out = list(zip(rewards.tolist(), group_ids.tolist(), strict=True)), []
    for reward, group in pairs:
        judged = [r for r, g in pairs if g == group and not math.isnan(r)]
        mean = sum(judged) / max(1, len(judged))
        std = math.sqrt(sum((r - mean) ** 2 for r in judged) / max(1, len(judged) - 1))
        flat = std < 1e-6 * max([abs(r) for r in judged], default=0) or math.isnan(reward)
        out.append(0.0 if flat or std == 0 else (reward - mean) / (std + 1e-6))
    whole = not rewards.is_floating_point()
    return torch.tensor(out, dtype=torch.float32 if whole else rewards.dtype)


def check_8(run, seed) -> None:
    import torch

    random = torch.Generator().manual_seed(seed)
    for case, rewards, groups in (
        ("one right, one wrong", [1.0, 0.0], [0, 0]),
        ("two right of eight", [1.0, 1, 0, 0, 0, 0, 0, 0], [0] * 8),
        ("two questions, the second of larger numbers", [1.0, 0, 9, 8, 8], [0, 0, 1, 1, 1]),
        ("questions in any order", [1.0, 0, 0, 1, 0, 1], [7, -3, 7, -3, 7, 7]),
        ("a group whose rewards are equal", [1.0, 1, 1, 0], [0, 0, 1, 1]),
        ("equal up to float noise", [0.1 + 0.2, 0.3, 0.3], [0, 0, 0]),
        ("a group of one", [1.0, 1, 0], [0, 1, 1]),
        ("nobody could judge one", [1.0, math.nan, 0, 0], [0, 0, 0, 0]),
        ("nobody could judge any", [math.nan, math.nan, 1, 0], [0, 0, 1, 1]),
        ("one is left of two", [1.0, math.nan, 1, 0], [0, 0, 1, 1]),
        ("a small spread is a spread", [0.5, 0.5002, 0.5, 0.5], [0, 0, 0, 0]),
        ("small rewards", [1e-8, 0, 0, 0], [0, 0, 0, 0]),
        ("large rewards, equal up to float noise", [1e9, 1e9 + 64, 1e9], [0, 0, 0]),
        ("40 at random", torch.rand(40, generator=random, dtype=torch.float64).tolist(),
         torch.randint(6, (40,), generator=random).tolist()),
    ):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            given = torch.tensor(rewards, dtype=dtype), torch.tensor(groups)
            about = f"{case}: rewards {rewards[:9]}, questions {groups[:9]}"
            got, expected = run("group_advantages", *given), slow_advantages(*given)
            same(about, got, expected)
            holds(about, bool((got[expected == 0] == 0).all()), "exactly 0, and not about 0, in "
                  "the docstring's three cases", got.tolist())
    given = torch.tensor([1.0, 0, 0]), torch.tensor([0, 0, 0])
    same("one right of three, eps 0.5", run("group_advantages", *given, 0.5),
         (given[0] - 1 / 3) / (math.sqrt(1 / 3) + 0.5))
    given = torch.tensor([1, 0, 0]), torch.tensor([0, 0, 0])
    same("rewards that are integers", run("group_advantages", *given), slow_advantages(*given))


# ---------------------------------------------------------------------- 9. Clipped objective and KL


def slow_loss(logp, logp_old, logp_ref, advantages, weights, mask, epsilon_low=0.2,
              epsilon_high=0.2, beta=1e-3):
    """Eq. 5 token by token: (loss, statistics as far as the training loop reads them)."""
    import torch

    loss, kls = logp.new_zeros(()), []
    for n, place in mask.nonzero().tolist():
        at = n, place
        ratio, A = (logp[at] - logp_old[at]).exp(), advantages[n]  # Eq. 6
        token = torch.minimum(ratio * A, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * A)
        if logp_ref is not None:
            d = logp_ref[at] - logp[at]
            kls.append(d.detach().exp() - d.detach() - 1)
            token = token - beta * (d.exp() - d - 1)
        loss = loss - weights[n] * token
    kl = torch.stack(kls).mean() if kls else torch.tensor(math.nan)
    zero = torch.zeros(())
    return loss, {"kl": kl, "clip_fraction": zero, "clip_low_fraction": zero,
                  "clip_high_fraction": zero}


def slow_slope(ratio, A, weight, d, low, high, beta):
    """d loss / d logp of one token: rho A where the clip does not hold it, and the KL's part."""
    stopped = (A > 0 and ratio > 1 + high) or (A < 0 and ratio < 1 - low)
    return -weight * ((0.0 if stopped else ratio * A) - beta * (1 - math.exp(d)))


def check_kl(run) -> None:
    import torch

    double = partial(torch.tensor, dtype=torch.float64)
    for d in (0.0, 0.5, -0.5, 3.0, 12.0, -12.0, 1e-4, 1e-9):
        value, slope = run("kl", double([[-1.0 - d]]), double([[-1.0]]))
        got, expected = value.item(), math.expm1(d) - d if abs(d) > 1e-6 else d * d / 2
        holds(f"kl_k3: reference over policy d = {d}", math.isclose(got, expected, rel_tol=1e-6),
              str(expected), got)
        same(f"kl_k3: gradient at d = {d}: 1 - e^d", slope, double([[1 - math.exp(d)]]))
    for d in (2.0**-13, -(2.0**-13)):  # in fp32 e^d - d - 1 has no digit left
        value = run("kl", torch.tensor([[-1.0 - d]]), torch.tensor([[-1.0]]))[0].item()
        holds(f"kl_k3: d = {d} in float32", math.isclose(value, d * d / 2, rel_tol=1e-2),
              f"{d * d / 2:.4g}, as expm1 gives it", value)


def check_9(run, seed) -> None:
    import torch

    check_kl(run)
    double = partial(torch.tensor, dtype=torch.float64)
    cases = [  # ratios, d = logp_ref - logp, advantages, lengths, low, high, beta
        ("first update: ratio 1", [[1.0]], [[0.0]], [1.0], [1], 0.2, 0.2, 0.0),
        ("ratio 1.5, A > 0: clipped", [[1.5]], [[0.0]], [1.0], [1], 0.2, 0.2, 0.0),
        ("ratio 0.5, A > 0: not clipped", [[0.5]], [[0.0]], [1.0], [1], 0.2, 0.2, 0.0),
        ("ratio 0.5, A < 0: clipped", [[0.5]], [[0.0]], [-1.0], [1], 0.2, 0.2, 0.0),
        ("ratio 1.5, A < 0: not clipped", [[1.5]], [[0.0]], [-1.0], [1], 0.2, 0.2, 0.0),
        ("ratio 12, A < 0: not clipped", [[12.0]], [[0.0]], [-1.0], [1], 0.2, 0.2, 0.0),
        ("ratio 1.25, clip range up to 1.3", [[1.25]], [[0.0]], [2.0], [1], 0.2, 0.3, 0.0),
        ("ratio 0.75, clip range from 0.7", [[0.75]], [[0.0]], [-2.0], [1], 0.3, 0.2, 0.0),
        ("the KL alone: A = 0", [[1.0, 1.1]], [[0.5, -0.5]], [0.0], [2], 0.2, 0.2, 0.5),
        ("two rows, padding in the second", [[1.1, 0.9], [1.6, 1.0]], [[0.2, 0.1], [-0.3, 0.0]],
         [0.7, -1.2], [2, 1], 0.2, 0.3, 0.1),
    ]
    random = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=random, dtype=torch.float64)
    cases.append(("6 rows at random", (normal(6, 5) * 0.4).exp().tolist(), normal(6, 5).tolist(),
                  normal(6).tolist(), [5, 1, 3, 2, 4, 5], 0.2, 0.3, 0.2))
    for case, ratios, d, advantages, lengths, low, high, beta in cases:
        ratio = double(ratios)
        old = -1.0 - ratio * 0.1
        logp = old + ratio.log()
        mask = torch.arange(ratio.shape[1]) < torch.tensor(lengths)[:, None]
        weights = 1 / (len(lengths) * double(lengths))
        for reference in ((logp + double(d), None) if beta == 0 else (logp + double(d),)):
            got = run("loss", torch.where(mask, logp, -math.inf), torch.where(mask, old, math.nan),
                      None if reference is None else torch.where(mask, reference, math.nan),
                      double(advantages), weights, mask.double(), low, high, beta)
            expected, statistics = slow_loss(logp, old, reference, double(advantages), weights,
                                             mask, low, high, beta)
            slopes = double([[slow_slope(r, A, w, x, low, high, beta) if keep else 0.0
                              for r, x, keep in zip(*row, strict=True)]
                             for A, w, *row in zip(advantages, weights.tolist(), ratios, d,
                                                   mask.tolist(), strict=True)])
            about = f"{case}: ratios {ratios[:2]}, A {advantages[:2]}, beta {beta}"
            same(f"{about}: loss", got[0], expected)
            same(f"{about}: gradient of logp", got[1], slopes)
            same(f"{about}: gradient of logp_old", got[2], torch.zeros_like(logp))
            same(f"{about}: largest ratio", got[3], ratio[mask].max())
            if reference is not None:
                same(f"{about}: kl of the statistics", got[4].double(),
                     statistics["kl"].double())


# --------------------------------------------------------- 10. Fused log-probs with their backward


def slow_logprobs(hidden, weight, targets, temperature=1.0, chunk=None):
    """All logits at once, and PyTorch's own log_softmax: log-probs and entropies (M,)."""
    logits = hidden.float() @ weight.float().T / temperature
    logp = logits.log_softmax(dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(dim=-1).detach()


def check_10(run, seed) -> None:
    import torch

    random = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=random)
    for case, M, V, D, temperature, chunk, part, size, dtype, frozen in (
        ("1 token, 3 words, width 2", 1, 3, 2, 1.0, 1, 100, 1.0, "float32", False),
        ("2 tokens in one chunk", 2, 3, 2, 1.0, 2, 100, 1.0, "float32", False),
        ("temperature 0.5", 2, 3, 2, 0.5, 2, 100, 1.0, "float32", False),
        ("temperature 2, 5 tokens in chunks of 2", 5, 4, 3, 2.0, 2, 100, 1.0, "float32", False),
        ("the vocabulary in parts of 3 words", 4, 8, 3, 1.0, 3, 3, 1.0, "float32", False),
        ("logits of several hundred", 4, 8, 3, 1.0, 3, 3, 200.0, "float32", False),
        ("logits of about -300 and below", 4, 8, 3, 1.0, 3, 3, -100.0, "float32", False),
        ("a frozen head", 4, 8, 3, 0.7, 3, 3, 1.0, "float32", True),
        ("a bf16 head", 4, 8, 3, 0.7, 3, 3, 1.0, "bfloat16", False),
        ("48 tokens, 300 words, chunks of 4", 48, 300, 2, 0.7, 4, 64, 2.0, "float32", False),
    ):
        dtype = getattr(torch, dtype)
        hidden, weight = (normal(M, D) * size).to(dtype), normal(V, D).to(dtype)
        if size < 0:
            hidden, weight = (hidden / size).abs() + 1, size - weight.abs()
        targets = torch.randint(V, (M,), generator=random)
        targets[0], targets[-1] = 0, V - 1
        upstream = normal(M)
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        logp, entropy = slow_logprobs(h, w, targets, temperature)
        (logp * upstream).sum().backward()
        got = run("logprobs", hidden, weight, targets, temperature, chunk, upstream, 4 * D * part,
                  frozen)
        # logits of size^2 carry so many digits, and 300 addends lose more of them than 8
        slack = 1e-5 * max(1.0, abs(size)) ** 2 * max(1, V // 100)
        same(f"{case}: log-probs", got[0], logp.detach(), slack)
        same(f"{case}: entropies", got[1], entropy, slack)
        wide = 1e-2 if dtype == torch.bfloat16 or size < 0 else 1e-5 * size
        same(f"{case}: gradient of the hidden states", got[2], h.grad, wide)
        same(f"{case}: gradient of the head", got[3],
             torch.zeros_like(weight) if frozen else w.grad, wide)
        if M * V > 10_000:
            holds(f"{case}: numbers in the largest tensor", got[4] <= V * D,
                  f"at most {V} x {D}, the head's own (logits come in {chunk} x {part})", got[4])


# --------------------------------------------------------------------------- 11. LoRA with a gate


def check_new_lora(run, seed) -> None:
    import torch

    for case, out, wide, r, dtype in (("3 -> 2, rank 1", 2, 3, 1, torch.float32),
                                      ("16 -> 4, rank 8", 4, 16, 8, torch.float32),
                                      ("bf16 weights", 4, 16, 8, torch.bfloat16),
                                      ("64 -> 4, rank 64", 4, 64, 64, torch.float32)):
        weight = torch.ones(out, wide, dtype=dtype)
        A, B, trained = run("lora_start", weight, r, seed)
        same(f"{case}: B at the start", B, torch.zeros(out, r))
        same(f"{case}: what is trained", trained, ["A", "B"])
        bound = 1 / math.sqrt(wide)  # Kaiming uniform with a = sqrt(5)
        holds(f"{case}: A at the start", A.shape == (r, wide) and A.dtype == torch.float32
              and A.abs().max() <= bound and A.unique().numel() > 0.99 * A.numel()
              and (A.numel() < 1000 or A.min() < -0.98 * bound and A.max() > 0.98 * bound
                   and abs(A.std().item() * math.sqrt(3) / bound - 1) < 0.05),
              f"float32 {(r, wide)}, Kaiming uniform with a = sqrt(5): within ±{bound:.3f}, and "
              "not constant", A)
        again = run("lora_start", weight, r, seed)[0]
        same(f"{case}: A again, from a generator of the same seed", again, A)
        other = run("lora_start", weight, r, seed + 1)[0]
        holds(f"{case}: A from a generator of another seed", not torch.equal(other, A),
              "other numbers", other)


def check_11(run, seed) -> None:
    import torch

    check_new_lora(run, seed)
    random = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=random)
    weight, A, B = normal(2, 3), normal(1, 3), normal(2, 1)
    x, upstream, bias = normal(2, 2, 3), normal(2, 2, 2), normal(2)
    for gates in (None, torch.zeros(2, 1, 1)):
        same(f"a layer with a bias, gates {gates if gates is None else 0}: the frozen layer's own",
             run("lora", weight, A, B, gates, x, upstream, bias)[0], x @ weight.T + bias)
    bare = x @ weight.T
    same("no gate: the frozen layer alone", run("lora", weight, A, B, None, x, upstream)[0], bare)
    for case, gates, dtype in (
        ("both rows the planner's", [1.0, 1.0], torch.float32),
        ("both rows frozen", [0.0, 0.0], torch.float32),
        ("row 0 the planner's, row 1 frozen", [1.0, 0.0], torch.float32),
        ("row 0 frozen, in bf16", [0.0, 1.0], torch.bfloat16),
    ):
        gate = torch.tensor(gates, dtype=dtype)[:, None, None]
        W, X = weight.to(dtype), x.to(dtype)
        a, b, inputs = (t.clone().requires_grad_() for t in (A, B, X))
        y = (inputs.float() @ W.float().T + gate * 2 * (inputs.float() @ a.T @ b.T)).to(dtype)
        (y * upstream.to(dtype)).sum().backward()
        got = run("lora", W, A, B, gate, X, upstream.to(dtype))
        slack = 5e-2 if dtype == torch.bfloat16 else 1e-5
        same(f"{case}: output W x + gate · 2 · B (A x)", got[0], y.detach(), slack)
        same(f"{case}: precisions of the products on the way", got[4], [str(dtype)])
        frozen = torch.tensor(gates) == 0
        plain = run("lora", W, A, B, None, X, upstream.to(dtype))[0]
        holds(f"{case}: frozen rows are the bare layer's, bit for bit",
              torch.equal(got[0][frozen], plain[frozen]), show(plain[frozen]), got[0][frozen])
        for name, mine, theirs in zip(("A", "B", "x"), got[1:4], (a, b, inputs), strict=True):
            largest = theirs.grad.abs().max().item() if dtype == torch.bfloat16 else 1.0
            same(f"{case}: gradient of {name}", mine, theirs.grad, slack * max(1.0, largest))


# ------------------------------------------------------------------------- 12. The training loop


def check_rows(run) -> None:
    import torch

    lengths = [[2], [1, 3], [4, 1, 2], [2]]  # tokens of the turns of four roll-outs
    for case, rewards, groups in (
        ("one roll-out right, one wrong", [1.0, 0.0], [0, 0]),
        ("two questions", [1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]),
        ("a roll-out that nobody could judge", [1.0, 0.0, math.nan, 0.0], [0, 0, 0, 0]),
    ):
        turns = lengths[:len(rewards)]
        rewards, groups = torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)
        made, advantages = run("rows", turns, rewards, groups)
        A = slow_advantages(rewards, groups)
        same(f"make_rows: {case}: advantages", advantages, A)
        ids = [i for i, own in enumerate(turns) for _ in own]
        same(f"make_rows: {case}: roll-out of each row",
             [row["prompt_ids"][0] for row in made], ids)
        flat = [length for own in turns for length in own]
        same(f"make_rows: {case}: a token list for each turn",
             [row["response_ids"] for row in made], [list(range(n)) for n in flat])
        same(f"make_rows: {case}: log-probs as sampled", [row["logp_old"] for row in made],
             [[-0.5 - i] * n for i, n in zip(ids, flat, strict=True)])
        judged = ~rewards[ids].isnan()
        weights = torch.zeros(len(ids))
        weights[judged] = slow_weights(groups[ids][judged], torch.tensor(ids)[judged],
                                       torch.tensor(flat)[judged])
        for name, expected in (("advantage", A[ids].tolist()), ("weight", weights.tolist()),
                               ("group", groups[ids].tolist())):
            for n, (row, value) in enumerate(zip(made, expected, strict=True)):
                same(f"make_rows: {case}: {name} of row {n}, roll-out {ids[n]}", row[name], value)


def check_gradients(run, seed) -> None:
    import torch

    random = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=random)
    policy, reference, head = normal(5, 3), normal(5, 3), normal(5, 3)
    made = [  # three rows, as a model of 5 words sampled them somewhat earlier
        {"prompt_ids": [g, 1], "response_ids": ids, "logp_old": old, "advantage": A, "weight": w,
         "group": g}
        for g, ids, old, A, w in ((0, [2], [-1.5], 1.0, 0.5),
                                  (0, [3, 4, 0], [-1.5, 0.0, -2.0], -0.8, 0.1),
                                  (1, [1, 1], [-1.5, -1.2], 0.6, 0.2))
    ]
    # a token whose ratio lies between the two ends of the clip, for which they must not be swapped
    first = slow_logprobs(policy[[1]], head, torch.tensor([3]))[0].item()
    made[1]["logp_old"][0] = first - math.log(0.85)
    for case, rows, beta, temperature, tokens in (
        ("one row", made[:1], 0.0, 1.0, 2048), ("two rows of 1 and 3 tokens", made[:2], 0.0, 1.0,
                                                2048),
        ("temperature 0.5", made[:2], 0.0, 0.5, 2048), ("with the KL term", made, 0.3, 0.5, 2048),
        ("each row a micro-batch of its own", made, 0.3, 0.5, 1),
    ):
        settings = {"beta": beta, "temperature": temperature, "micro_batch_tokens": tokens,
                    "epsilon": 0.1, "epsilon_high": 0.3}
        table, loss = policy.clone().requires_grad_(), 0.0
        for row in rows:  # one row at a time, added up
            before = torch.tensor([row["prompt_ids"][-1], *row["response_ids"][:-1]])
            target, length = torch.tensor(row["response_ids"]), len(row["response_ids"])
            logp, ref = (slow_logprobs(t[before], head, target, temperature)[0][None]
                         for t in (table, reference))
            loss = loss + slow_loss(
                logp, torch.tensor([row["logp_old"]]), ref if beta else None,
                torch.tensor([row["advantage"]]), torch.tensor([row["weight"]]),
                torch.ones(1, length), 0.1, 0.3, beta)[0]
        loss.backward()
        got, totals, scored = run("gradients", policy, reference, head, rows, settings)
        same(f"accumulate_gradients: {case}: gradient", got, table.grad)
        same(f"accumulate_gradients: {case}: loss", totals["loss"], loss.item())
        same(f"accumulate_gradients: {case}: who is scored, and is it for a gradient", scored,
             [["pi_ref", False], ["pi_theta", True]][0 if beta else 1:])


def check_12(run, seed) -> None:
    import torch

    check_rows(run)
    check_gradients(run, seed)
    for case, slope, iterations, weight, norm, events in (  # a weight of its own for each number
        ("a gradient of norm 0.5", [0.3, 0.4], 1, [-0.3, -0.4], 0.5, ["before", "step"]),
        ("a gradient of norm 5 is clipped to 1", [3.0, 4.0], 1, [-0.6, -0.8], 5.0,
         ["before", "step"]),
        ("two passes over the same roll-outs", [0.3, 0.4], 2, [-0.6, -0.8], 0.5,
         ["before", "step"] * 2),
    ):
        got = run("update", [torch.tensor([x]) for x in slope], iterations)
        same(f"update: {case}: weights, from 0 at rate 1", torch.cat(got[0]), torch.tensor(weight),
             1e-5)
        same(f"update: {case}: grad_norm", got[1], norm)
        same(f"update: {case}: what happened", got[2:], [[*events, "changed"], ""])
    for number in (math.nan, math.inf):
        got = run("update", [torch.tensor([number, 1.0])], 1)
        same(f"update: a gradient with {number}: error", got[3], "FloatingPointError")
        same(f"update: a gradient with {number}: what happened", got[2], [])
        same(f"update: a gradient with {number}: weights", got[0][0], torch.zeros(2))


CHECKS = {number: globals()[f"check_{number}"] for number in range(1, 13)}


def judged(reply: dict, name: str, arguments: list):
    """The value of a reply. Raises Wrong where the function changed what it was given."""
    for place in reply["changed"]:
        holds(f"{name}: argument {place + 1} after the call", False,
              f"as it was, {json.dumps(arguments[place])[:120]}", "changed in place")
    return decode(reply["value"])
