"""data/pretrain.py: how the built-in backbone was made. Tokenizer, transcripts, training.

A Qwen2 of about a million parameters learns all four modules from synthetic transcripts: a right
agent plays the flow of agentflow.py with the real tools, and every request and reply is a row.
One thing is left out: the planner's tool is drawn uniformly at random, whatever would be right.
So the backbone can do every module's job, and what it lacks is what Flow-GRPO teaches.
No held-out element or operand is in any transcript; the names are seen in plain copying rows.
Most transcripts are about invented elements or invented facts: so the backbone has to read what
the memory says, and learning the periodic table by heart does not help it.

Stage 1  copying spans out of random texts, 8 tokens at first, half as long again when it works;
         then the same behind the heads of real prompts
Stage 2  transcripts of all modules, with copying rows in the mix; names and numbers a little
         blurred, and the mean of the last weights kept

Run:  python data/pretrain.py            (writes data/backbone/; a checkpoint every five minutes)
      python data/pretrain.py --show     (prints one transcript)
      python data/pretrain.py --model smollm2 --output FOLDER   (teaches another model the format)
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import keyword
import os
import random
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]

import make_data  # noqa: E402

import agentflow  # noqa: E402  (the two folders above have to be on the path first)
import flow_grpo  # noqa: E402
from tools import BM25, Ask, Job, Library_Search_Tool, PythonRun, make_tools  # noqa: E402

BACKBONE = FOLDER / "backbone"

# --- A right agent -----------------------------------------------------------------------------

UNKNOWN = "unknown"
CALCULATOR = "Python_Coder_Tool"
LIBRARY = "Library_Search_Tool"
WIKIPEDIA = "https://en.wikipedia.org"  # the address that the executor gives Web_Search_Tool


class RightAgent:
    """Replies of every module to one question, as a right agent would give them.

    It reads what it needs from the request, as the backbone will have to: whether the fact stands
    in the memory, whether the calculation has been done.
    """

    def __init__(self, task: make_data.Task) -> None:
        self.task = task
        self.find = self.fact = self.calculate = ""
        asked = task.question.removeprefix("What is ").removesuffix("?")
        if task.kind != "lookup":
            self.calculate = f"Calculate {asked}."
        if task.fact:
            attribute, name, _ = task.fact
            # What it is for stands beside it in the memory, where the next sub-goal finds it.
            purpose = f" for {asked}" if self.calculate else ""
            self.find = f"Find the {attribute} of the element {name}{purpose}."
            self.fact = make_data.fact_sentence(*task.fact)

    def missing(self, memory: str) -> str:
        """What the next step has to bring: "fact", "calculation" or "" (nothing is missing)."""
        if self.fact and self.fact not in memory:
            return "fact"
        if self.calculate and not re.search(
            rf"Sub-Goal: {re.escape(self.calculate)}\nTool Name: {CALCULATOR}\n"
            rf"Command: .*\nResult: {re.escape(self.task.answer)}(\n|$)",
            memory,
        ):
            return "calculation"
        return ""

    def right_tool(self, memory: str) -> str:
        return LIBRARY if self.missing(memory) == "fact" else CALCULATOR

    def plan(self, memory: str, tool_name: str) -> str:
        """A planner's reply: all of it is right but the tool, which the caller chooses."""
        missing = self.missing(memory)
        goal = self.find if missing == "fact" else self.calculate
        known = self.fact if missing == "calculation" and self.fact else "none"
        return (
            f"Justification: the {missing} is missing.\nContext: {known}\n"
            f"Sub-Goal: {goal}\nTool Name: {tool_name}"
        )

    def reply(self, ask: Ask) -> str:
        """A frozen module's reply."""
        if ask.module == "analyst":
            return self.analysis()
        if ask.module == "executor":
            context, goal = re.match(r"Context: (.*)\nSub-Goal: (.*)", ask.user).groups()
            goal = re.sub(r"(Find .*) for .*", r"\1.", goal)  # the purpose is no part of the search
            query = goal if context in ("", "none") else f"{goal} {context}"
            url = f', url="{WIKIPEDIA}"' if "url: str" in ask.system else ""
            return f'execution = tool.execute(query="{query}"{url})'
        if ask.module == "tool":
            return self.inside_tool(ask)
        missing = self.missing(ask.user)
        if ask.module == "verifier":
            if missing:
                return f"Explanation: the {missing} is missing.\nConclusion: CONTINUE"
            return "Explanation: nothing is missing.\nConclusion: STOP"
        assert ask.module == "generator", f"no right reply is known for {ask.module}"
        return f"<answer> {UNKNOWN if missing else self.task.answer} </answer>"

    def analysis(self) -> str:
        skills, mind = {
            "lookup": ("search", "one fact is enough."),
            "arithmetic": ("calculation", "be exact."),
            "two-step": ("search and calculation", "the fact comes first."),
        }[self.task.kind]
        return (
            f"Summary: {self.calculate or self.find}\nSkills: {skills}\nTools: to be tried\n"
            f"Considerations: {mind}"
        )

    def inside_tool(self, ask: Ask) -> str:
        """The language model inside Base_Generator_Tool and Python_Coder_Tool."""
        if "program" not in ask.system:
            return "I do not know."
        request = ask.user.removeprefix("Request: ")
        if not request.startswith("Calculate "):
            return f'```python\nprint("{UNKNOWN}")\n```'
        formula, _, fact = request.removeprefix("Calculate ").rstrip(".").partition(". ")
        for word, sign in make_data.OPERATORS.items():
            formula = formula.replace(f" {word} ", f" {sign} ")
        given = ""
        if fact:  # the fact's name becomes a variable, so that this too is copying word by word
            name, value = re.fullmatch(r"The .* of the element (\w+) is (\w+)", fact).groups()
            given = f"value = {name} = {value}\n"
            formula = re.sub(rf"the [a-z ]* of the element {name}", name, formula)
        return f"```python\n{given}print( {formula})\n```"  # a space before each word: see PIECE


# --- Transcripts -------------------------------------------------------------------------------


class TrainingLibrary(Library_Search_Tool):
    """The library without what is held out, or, for one flow, with invented facts alone."""

    def __init__(self) -> None:
        known = [row for row in make_data.read_elements() if not make_data.is_held_out(row)]
        self.true_passages = [make_data.fact_sentence(*fact) for fact in make_data.facts(known)]
        self.true_index = BM25(self.true_passages)
        self.use(None)

    def use(self, invented: list[tuple[str, str, str]] | None) -> None:
        """Invented facts stand among the true ones, so that a search finds as many passages as it
        does in a run; what is true of an element of that name is taken out."""
        self.passages, self.index = self.true_passages, self.true_index
        if invented:
            name = f"element {invented[0][1]} "
            kept = [passage for passage in self.true_passages if name not in passage]
            self.passages = [make_data.fact_sentence(*fact) for fact in invented] + kept
            self.index = BM25(self.passages)


def run_arithmetic(code: str, **limits):
    """Stands in for the sandbox, which takes 20 ms a run: prints what RightAgent's code prints."""
    name, value, inside = re.fullmatch(
        r"(?:value = (\w+) = (\d+)\n)?print\((.*)\)", code.strip()
    ).groups()
    names = {name: int(value)} if name else {}
    return PythonRun(stdout=str(eval(inside.strip(), {"__builtins__": {}}, names)) + "\n")


def toolset(training: bool) -> list:
    """The tools of a run with the built-in backbone, with or without what is held out."""
    tools = make_tools(offline=True)
    if training:
        tools = [TrainingLibrary() if tool.name == LIBRARY else tool for tool in tools]
    for tool in tools:
        if tool.name == CALCULATOR:
            tool.run_python = run_arithmetic
    return tools


def numeric(facts: list) -> list:
    """The facts whose value can enter a calculation."""
    words = {make_data.ATTRIBUTES[column] for column in make_data.NUMERIC}
    return [fact for fact in facts if fact[0] in words]


def training_task(rng: random.Random, facts: list) -> make_data.Task:
    def operand() -> int:
        return make_data.training_operand(rng)

    kind = rng.random()
    if kind < 0.25:
        return make_data.make_lookup(rng.choice(facts))
    if kind < 0.5:
        return make_data.make_arithmetic(rng, operand)
    return make_data.make_two_step(rng, operand, numeric(facts))


def invented_facts(rng: random.Random, words: list[str]) -> list[tuple[str, str, str]]:
    """Facts about one element that there is not: a made-up name, which is read byte by byte, or
    any word of the vocabulary, a known element among them, with facts that are not true of it."""
    if rng.random() < 0.15:
        syllables = [rng.choice("bcdfghklmnprstvz") + rng.choice("aeiou") for _ in range(3)]
        name = "".join(syllables[: rng.randint(2, 3)]).capitalize() + rng.choice(["n", "um", "x"])
    else:
        name = rng.choice(words)
    return [
        ("symbol", name, rng.choice(words)),
        ("atomic number", name, str(rng.randint(1, 119))),
        ("period", name, str(rng.randint(1, 9))),
        ("group", name, str(rng.randint(1, 19))),
        ("discovery year", name, str(rng.randint(1000, 2030))),
    ]


def transcript(task, tools: list, rng: random.Random) -> list[tuple[str, str, str, str]]:
    """Rows (module, system, user, reply) of one flow.

    What the planner is shown to say and what the flow then does are drawn apart: the row's tool
    is uniform, whatever the state; the flow goes on with the right tool often enough that states
    with a known fact and a done calculation are as common as empty ones.
    """
    names = [tool.name for tool in tools]
    agent = RightAgent(task)
    competence = rng.choice([0.0, 0.5, 0.9])
    limits = agentflow.Limits(max_turns=rng.choice([3, 3, 3, 4]))
    rows = []

    def said(ask: Ask) -> str:
        if ask.module != "planner":
            text = agent.reply(ask)
            rows.append((ask.module, ask.system, ask.user, text))
            return text
        rows.append((ask.module, ask.system, ask.user, agent.plan(ask.user, rng.choice(names))))
        right = rng.random() < competence
        return agent.plan(ask.user, agent.right_tool(ask.user) if right else rng.choice(names))

    analysis = run_inline(agentflow.analyse(task.question, tools), said)
    run_inline(agentflow.flow(task.question, analysis, tools, limits), said)
    return rows


def run_inline(flow, said):
    """Drive one coroutine without threads: Jobs run at once, Asks are answered by `said`."""
    answer = None
    while True:
        try:
            wanted = flow.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(wanted, Job):
            answer = wanted.run()
        else:
            answer = agentflow.Reply(said(wanted), [], [], [], True)


class Transcripts:
    """An endless supply of rows, by module and system text (rows of one head are packed)."""

    def __init__(self, seed: int) -> None:
        elements = make_data.read_elements()
        self.rng = random.Random(seed)
        known = [row for row in elements if not make_data.is_held_out(row)]
        self.known = make_data.facts(known)
        self.words = [text for row in known for text in (row["name"], row["symbol"])]
        self.tools = toolset(training=True)
        self.library = next(tool for tool in self.tools if tool.name == LIBRARY)
        self.rows: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))

    def add_flow(self, invent: float = 0.85) -> None:
        invented = None
        if self.rng.random() < invent:
            invented = invented_facts(self.rng, self.words)
        self.library.use(invented)
        task = training_task(self.rng, invented or self.known)
        rows = transcript(task, self.tools, self.rng)
        text = "\n".join(user + "\n" + reply for _, _, user, reply in rows)
        if any(make_data.held_out_operand(int(number)) for number in re.findall(r"\d+", text)):
            return  # a result happens to be a held-out operand: that number stays unseen
        for module, system, user, reply in rows:
            self.rows[module][system].append((user, reply))

    def heads(self) -> list[str]:
        """The system texts of all modules."""
        while len(self.rows) < len(MIX):
            self.add_flow()
        return sorted({system for heads in self.rows.values() for system in heads})

    def use_vocabulary(self, tokenizer) -> None:
        """From now on any word that is one token may name an invented element, but for the
        held-out names and symbols."""
        hidden = set(tokenizer.convert_ids_to_tokens(held_out_ids(tokenizer)))
        pieces = {token for token in tokenizer.get_vocab() if token.startswith("Ġ")}
        words = {piece[1:] for piece in pieces - hidden if piece[1:].isalpha()}
        self.words = sorted(words - {"print", "value", *keyword.kwlist})  # a name of a variable
        assert set(spare_names()) <= set(self.words), "the tokenizer is of an older vocabulary"

    def take(self, module: str, count: int) -> tuple[str, list[tuple[str, str]]]:
        """`count` rows of one head of a module: the head with most rows waiting."""
        while True:
            heads = self.rows[module]
            if heads:
                system = max(heads, key=lambda head: len(heads[head]))
                if len(heads[system]) >= count:
                    rows = heads[system]
                    heads[system] = []
                    return system, self.rng.sample(rows, count)
            self.add_flow()


def held_out_rows(tasks: list[make_data.Task]) -> dict[str, dict[Ask, str]]:
    """module -> {what is asked: the right reply}, over flows of these tasks with the real tools."""
    rows: dict[str, dict[Ask, str]] = defaultdict(dict)
    tools = toolset(training=False)
    for task in tasks:
        for module, system, user, reply in transcript(task, tools, random.Random(task.question)):
            rows[module][Ask(module, system, user)] = reply
    return rows


# --- Tokenizer ---------------------------------------------------------------------------------

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A piece is a word, up to three digits, or a run of signs, each with the space before it; or one
# white space. So a name is one token wherever a space stands before it, and so is an operand; and
# what stands before it is a word, by which a small model finds the place to copy from.
PIECE = r" ?[A-Za-z_]+| ?[0-9]{1,3}| ?[^\sA-Za-z_0-9]+|\s"


def spare_names(count: int = 700) -> list[str]:
    """Words that name nothing, and are tokens of the vocabulary: with so many names, learning by
    heart which ones may follow "the period of" does not pay, and copying does."""
    rng, names = random.Random(7), set()
    while len(names) < count:
        syllables = [rng.choice("bcdfghklmnprstvz") + rng.choice("aeiou") for _ in range(2)]
        names.add("".join(syllables).capitalize() + rng.choice(["n", "um", "x", "r", "lis"]))
    return sorted(names)


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Every piece of `texts` is one token, and any other text falls apart into bytes.

    A byte-level BPE without merges: `ignore_merges` takes a whole piece that is in the vocabulary,
    and nothing is ever unknown.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pieces = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = specials + alphabet + sorted(pieces - set(alphabet))
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def vocabulary_texts(transcripts: Transcripts) -> list[str]:
    """What the vocabulary is read from: many transcripts, every name and symbol there is, and
    every number of up to three digits."""
    for _ in range(1500):
        transcripts.add_flow(invent=0)
    texts = ["system user assistant"]
    for heads in transcripts.rows.values():
        for system, rows in heads.items():
            texts += ["system\n" + system, *(user + "\n" + reply for user, reply in rows)]
    facts = make_data.facts(make_data.read_elements())
    texts += [f" {make_data.fact_sentence(*fact)}" for fact in facts]
    texts += [f" {name}" for name in spare_names()]
    texts += [str(number).zfill(width) for width in (1, 2, 3) for number in range(10**width)]
    texts += [f" {number}" for number in range(1000)]
    return texts


# --- Training ----------------------------------------------------------------------------------


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="agentflow",
    )
    return Qwen2ForCausalLM(config)


def word_ids(tokenizer, words) -> list[int]:
    """The token of each word with the space before it."""
    return tokenizer.convert_tokens_to_ids([f"Ġ{word}" for word in words])


def name_and_number_ids(tokenizer) -> list[int]:
    elements = make_data.read_elements()
    names = [text for row in elements for text in (row["name"], row["symbol"])]
    return word_ids(tokenizer, [*names, *spare_names(), *range(1000)])


def held_out_ids(tokenizer) -> list[int]:
    """The tokens of held-out names, symbols and operands."""
    held_out = [row for row in make_data.read_elements() if make_data.is_held_out(row)]
    words = [text for row in held_out for text in (row["name"], row["symbol"])]
    return word_ids(tokenizer, [*words, *make_data.HELD_OUT_OPERANDS])


@functools.cache
def calculation_ids(tokenizer) -> tuple[list[int], list[int]]:
    """The tokens of signs, in words and in Python, and those of all numbers up to three digits."""
    signs = [sign for pair in make_data.OPERATORS.items() for sign in pair]
    return word_ids(tokenizer, signs), word_ids(tokenizer, range(1000))


def copying_rows(tokenizer, rng: random.Random, count: int, length: int, system: str | None):
    """(prompts, responses, scored): `length` random tokens, then four spans out of them.

    A span begins anywhere, so nothing but its first tokens says what to copy: the model has to find
    where they stood and to go on from there. That is what every module does with a name or a
    number of its prompt. (Copying a text from its beginning is easier and teaches less: position
    alone tells what comes next.) A third of the texts are numbers and signs in turn, a
    third of the longer ones use few different tokens: there one token back is not enough.
    system: the head of a real prompt, before the random text as in a chat; None: the text alone. A
    model that has copied without a head only cannot do it behind one.
    scored: which response tokens can be known: not a span's first ones, nor the mark behind it.
    """
    start, end = tokenizer.convert_tokens_to_ids("<|im_start|>"), tokenizer.eos_token_id
    before, after, mark = [start], [end], start
    if system:
        chat = chat_ids(tokenizer, system, "?")
        place = max(i for i, token in enumerate(chat) if token == end) - 1  # where "?" stands
        before, after, mark = chat[:place], chat[place + 1 :], chat[-1]
    prompts, responses, scored = [], [], []
    signs, numbers = calculation_ids(tokenizer)
    for row in range(count):
        tokens = [rng.randrange(3, len(tokenizer)) for _ in range(length)]
        text, cue = tokens, 1
        if row % 3 == 1:  # a calculation: the sign before a number does not say which number it is
            text = [rng.choice(signs if i % 2 else numbers) for i in range(length)]
            cue = 2
        elif row % 3 == 2 and length >= 24:  # few different tokens: nor does one token back here
            text = [rng.choice(tokens[: length // 3]) for _ in range(length)]
            cue = 3
        response, known = [], []
        for _ in range(4):
            first = rng.randrange(max(1, length - 4))
            span = text[first : first + rng.randint(cue + 2, cue + 7)]
            response += [*span, mark]
            known += [*[False] * min(cue, len(span)), *[True] * (len(span) - cue), False]
        prompts.append([*before, *text, *after])
        responses.append(response)
        scored.append(known)
    return prompts, responses, scored


BLUR = 0.6  # at most, in standard deviations of the table's entries


@contextlib.contextmanager
def blurred(backbone, words: list[int]):
    """Within: every word has an embedding a little off its own, drawn anew each time.

    A model that has seen only exact embeddings in transcripts tells the held-out words by theirs,
    and does with them what it does in copying rows, where alone it has met them. Noise leaves it
    one way to copy a word: take whatever stands there. (Reading and writing share one table, so
    the noise is that of the word to be written too; the gradient is the table's own.)
    """
    table = backbone.lm_head_weight
    noise = torch.zeros_like(table)
    scale = torch.rand(()) * BLUR * table.detach()[words].std()
    noise[words] = scale * torch.randn(len(words), table.shape[1])
    with torch.no_grad():
        table += noise
    try:
        yield
    finally:
        with torch.no_grad():
            table -= noise


def loss_of(
    backbone, prompts, responses, scored=None, unseen: list[int] = (), equals: list[int] = ()
) -> tuple[torch.Tensor, int, int]:
    """(summed cross-entropy, right tokens, tokens) of the responses, one packed forward.

    unseen: tokens that are no alternative. No transcript holds a held-out name or operand; left in
    the softmax, each step would teach that none of them is ever the next token.
    equals: tokens drawn uniformly at random in the transcripts. Where one is the target, the loss
    is its expectation over the draw, which teaches the same distribution with less noise.
    """
    hidden = backbone.packed_hidden(prompts, responses, 0)  # (M, D)
    targets = torch.tensor([token for response in responses for token in response])  # (M,)
    if scored:
        keep = torch.tensor([known for row in scored for known in row])  # (M,)
        hidden, targets = hidden[keep], targets[keep]
    logits = hidden @ backbone.lm_head_weight.T  # (M, V), V is small here
    hide = torch.zeros_like(logits, dtype=torch.bool)
    hide[:, list(unseen)] = True
    hide[torch.arange(len(targets)), targets] = False  # the first digits of a long result
    logp = logits.masked_fill(hide, -torch.inf).log_softmax(-1)
    drawn = torch.isin(targets, torch.tensor(list(equals), dtype=torch.long))
    loss = functional.nll_loss(logp[~drawn], targets[~drawn], reduction="sum")
    if drawn.any():
        loss = loss - logp[drawn][:, list(equals)].mean(-1).sum()
    right = (logits.detach().argmax(-1) == targets).sum().item()
    return loss, right, len(targets)


def new_optimizer(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, betas=(0.9, 0.98))


def learn_copying(
    backbone, rng: random.Random, heads: list, longest: int, goal: int, seconds: float
) -> None:
    """Texts grow by half as soon as 90 % of the tokens are right, short ones staying in the mix:
    a jump to texts that are all longer than any before makes the loss explode."""
    optimizer = new_optimizer(backbone.model)
    step, started, recent = 0, time.time(), []
    while time.time() - started < seconds:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 30)
        count = max(8, 1800 // (longest + 20))
        length = rng.randint(6, longest)
        rows = copying_rows(backbone.tokenizer, rng, count, length, rng.choice(heads))
        loss, right, number = loss_of(backbone, *rows)
        (loss / number).backward()
        torch.nn.utils.clip_grad_norm_(backbone.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-9:], right / number]
        if step % 50 == 0:
            print(f"copy step {step} | up to {longest} tokens | loss {loss.item() / number:.3f} "
                  f"| right {right / number:.3f} | {time.time() - started:.0f}s", flush=True)
        if len(recent) == 10 and sum(recent) > 8.8:
            if longest >= goal:
                return
            longest, recent = min(goal, longest + (longest + 1) // 2), []


# Rows of one optimiser step, by module: many of the short ones that copy, few of the long ones
# that are soon learnt (a verifier's prompt is the longest, and its reply one of a few).
MIX = {"analyst": 14, "planner": 18, "executor": 14, "tool": 24, "verifier": 8, "generator": 12}


DECAY_FROM = 0.6  # of the time of stage 2


def chat_ids(tokenizer, system: str, user: str) -> list[int]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )


def training_batch(transcripts: Transcripts, tokenizer, module: str, count: int):
    system, rows = transcripts.take(module, count)
    prompts = [chat_ids(tokenizer, system, user) for user, _ in rows]
    end = [tokenizer.eos_token_id]
    responses = [tokenizer.encode(reply, add_special_tokens=False) + end for _, reply in rows]
    return prompts, responses


def learn_transcripts(backbone, transcripts: Transcripts, seconds: float, peak: float) -> None:
    """AdamW, warm-up, constant, then a linear decay to zero over the last two fifths of the time.

    What is kept is the mean of the weights over the decay: each step's own lean to what its batch
    showed, in copying as in the planner's choice of tools, goes out of it.
    """
    parameters = list(backbone.model.parameters())
    optimizer = new_optimizer(backbone.model)
    rng, started, saved, step, tokens = random.Random(1), time.time(), time.time(), 0, 0
    heads, unseen = transcripts.heads(), held_out_ids(backbone.tokenizer)
    words = name_and_number_ids(backbone.tokenizer)
    equals = word_ids(backbone.tokenizer, [tool.name for tool in transcripts.tools])
    average, averaged = [torch.zeros_like(parameter) for parameter in parameters], 0
    while (passed := (time.time() - started) / seconds) < 1:
        step += 1
        # Slowly at first: large gradients of new text would wash the copying away.
        rate = peak * min(1.0, step / 100, max(0.01, (1 - passed) / (1 - DECAY_FROM)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        report = {}
        for module in [*MIX, "copying"]:
            if module == "copying":
                # As long as a memory gets: short ones alone unlearn copying from further back.
                length, system = rng.randint(*rng.choice([(6, 24), (24, 90)])), rng.choice(heads)
                count = max(6, 1200 // (length + 20))
                rows = copying_rows(backbone.tokenizer, rng, count, length, system)
                known = {}
            else:
                rows = training_batch(transcripts, backbone.tokenizer, module, MIX[module])
                known = {"unseen": unseen, "equals": equals if module == "planner" else ()}
            with blurred(backbone, words):
                loss, right, number = loss_of(backbone, *rows, **known)
                (loss / 2500).backward()  # one constant for all modules: a token counts the same
            tokens += sum(map(len, rows[0])) + sum(map(len, rows[1]))
            report[module] = f"{module} {loss.item() / number:.4f} {right / number:.4f}"
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if passed > DECAY_FROM:
            averaged += 1
            for mean, parameter in zip(average, parameters, strict=True):
                mean.lerp_(parameter.detach(), 1 / averaged)
        if step % 25 == 0:
            print(f"step {step} | {tokens / 1e6:.1f}M tokens | lr {rate:.1e} | "
                  f"{time.time() - started:.0f}s | " + " | ".join(report.values()), flush=True)
        if time.time() - saved > 300:
            save(backbone)
            saved = time.time()
    if averaged:
        with torch.no_grad():
            for parameter, mean in zip(parameters, average, strict=True):
                parameter.copy_(mean)


def save(backbone) -> None:
    backbone.model.save_pretrained(BACKBONE)
    backbone.tokenizer.save_pretrained(BACKBONE)
    # Rewritten in the words that every version of transformers understands.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (BACKBONE / "tokenizer_config.json").write_text(text, encoding="utf-8")
    print(f"saved to data/{BACKBONE.name}/", flush=True)


# --- Another model -----------------------------------------------------------------------------

# Rows of one optimiser step, a module at a time: as many as make some 500 to 1,000 tokens, their
# common head counted once. A planner's and a verifier's prompts end in memories of their own.
TUNING_ROWS = {"analyst": 6, "planner": 6, "executor": 12, "tool": 16, "verifier": 5,
               "generator": 6}  # fmt: skip


def fine_tune(
    backbone, transcripts: Transcripts, folder: Path, seconds: float, peak: float
) -> list[float]:
    """Full weights, cross-entropy on the replies: a chat model learns what its replies look like.

    No blur, no hidden tokens, no copying rows: those mend what a vocabulary of whole words and a
    million parameters bring along, and a model pretrained on text can copy. The planner's tool is
    the one of each transcript, so that here too it comes out drawn at random. AdamW, warm-up over
    ten steps, then a linear decay to zero; a checkpoint in `folder` every ten minutes and at the
    end. Returns the loss of each step, in nats a token.
    """
    optimizer, losses, tokens = new_optimizer(backbone.model), [], 0
    modules = itertools.cycle(TUNING_ROWS)
    started = saved = time.time()
    while (passed := (time.time() - started) / seconds) < 1:
        rate = peak * min(1.0, (len(losses) + 1) / 10, 1 - passed)
        for group in optimizer.param_groups:
            group["lr"] = rate
        module = next(modules)
        rows = training_batch(transcripts, backbone.tokenizer, module, TUNING_ROWS[module])
        loss = reply_loss(backbone, *rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(backbone.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        tokens += sum(map(len, rows[1]))
        print(f"step {len(losses)} | {module} {losses[-1]:.4f} | lr {rate:.1e} | {tokens} reply "
              f"tokens | {time.time() - started:.0f}s", flush=True)
        if time.time() - saved > 600:
            save_folder(backbone, folder)
            saved = time.time()
    save_folder(backbone, folder)
    return losses


def reply_loss(backbone, prompts, responses) -> torch.Tensor:
    """Mean cross-entropy of the responses' tokens, in nats, without ever holding (M, V) logits."""
    hidden = backbone.packed_hidden(prompts, responses, 0)  # (M, D)
    targets = torch.tensor([token for response in responses for token in response])  # (M,)
    logp, _ = flow_grpo.linear_logprobs(
        hidden, backbone.lm_head_weight, targets.to(hidden.device)
    )  # (M,)
    return -logp.mean()


def save_folder(backbone, folder: Path) -> None:
    """A plain Hugging Face folder; each file is written beside its place and then renamed, so that
    a stop leaves the last whole one."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        backbone.model.save_pretrained(beside)
        backbone.tokenizer.save_pretrained(beside)
        for file in Path(beside).iterdir():
            os.replace(file, folder / file.name)
    print(f"saved to {folder}", flush=True)


def right_replies(backbone, count: int) -> dict[str, float]:
    """module -> the share of right greedy replies to `count` requests of held-out flows.

    Right is letter for letter what the right agent says; a plan's tool may be any, since the
    transcripts draw it.
    """
    tasks = make_data.make_questions(
        make_data.read_elements(), True, make_data.HELD_OUT_COUNTS, 2
    )
    random.Random(0).shuffle(tasks)  # they come kind by kind
    tools = [tool.name for tool in toolset(training=False)]
    shares = {}
    for module, rows in held_out_rows(tasks[:count]).items():
        asks = list(rows)[:count]
        requests = [agentflow.Request(ask, 0.0, 96, (0, i)) for i, ask in enumerate(asks)]
        said = [reply.text for reply in backbone.generate(requests)]
        wanted = [rows[ask] for ask in asks]
        if module == "planner":
            said = [text if not agentflow.parse_plan(text, tools).error else "" for text in said]
            said, wanted = ([text.rpartition("Tool Name:")[0] for text in texts]
                            for texts in (said, wanted))
        shares[module] = sum(map(str.__eq__, said, wanted)) / len(asks)
    return shares


def teach(arguments, transcripts: Transcripts) -> None:
    """--model: fine-tune it, and say how many replies are right before and after."""
    def report(when: str, backbone) -> None:
        shares = right_replies(backbone, arguments.check)
        print(f"right replies to {arguments.check} held-out requests a module, {when}: "
              + ", ".join(f"{module} {share:.2f}" for module, share in shares.items()), flush=True)

    folder = Path(arguments.output)
    transcripts.words += spare_names()
    backbone = agentflow.load_backbone(arguments.model, dtype=torch.float32, lora_r=None)
    report("before", backbone)
    try:
        fine_tune(backbone, transcripts, folder, 60 * (arguments.minutes or 25),
                  arguments.learning_rate or 3e-4)
    except KeyboardInterrupt:
        have = (folder / "config.json").is_file()
        said = "the last checkpoint is" if have else "there is no checkpoint yet"
        print(f"\nstopped; {said} in {folder}")
        return
    del backbone  # its kept keys and values are of the old weights; and what was written is checked
    report("after", agentflow.load_backbone(str(folder), dtype=torch.float32, lora_r=None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--show", action="store_true", help="print one transcript and stop")
    parser.add_argument("--copy_minutes", type=float, default=8, help="at most, for stage 1 [8]")
    parser.add_argument("--minutes", type=float, help="of stage 2 [32], or with --model [25]")
    parser.add_argument("--learning_rate", type=float, help="peak, stage 2 [2e-3], --model [3e-4]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="stage 2 from data/backbone/")
    parser.add_argument("--copy", action="store_true", help="with --resume: stage 1b before it")
    parser.add_argument("--model", help="fine-tune this one instead: smollm2, a folder, a hub name")
    parser.add_argument("--output", help="with --model: the folder that is written")
    parser.add_argument("--check", type=int, default=12, help="held-out requests a module [12]")
    arguments = parser.parse_args()
    if bool(arguments.model) != bool(arguments.output):
        parser.error("--model and --output go together: which model, and the folder to write.")
    torch.manual_seed(arguments.seed)  # of the blur
    transcripts = Transcripts(arguments.seed)
    if arguments.show:
        task = make_data.make_two_step(transcripts.rng, lambda: 23, numeric(transcripts.known))
        for module, system, user, reply in transcript(task, transcripts.tools, transcripts.rng):
            print(f"===== {module}\n{system}\n-----\n{user}\n----- says\n{reply}\n")
        return
    if arguments.model:
        teach(arguments, transcripts)
        return
    if arguments.resume:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(BACKBONE)
        model = Qwen2ForCausalLM.from_pretrained(BACKBONE, attn_implementation="agentflow")
    else:
        tokenizer = make_tokenizer(vocabulary_texts(transcripts))
        model = new_model(tokenizer)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(tokenizer)} tokens, {size:,} parameters", flush=True)
    backbone = agentflow.Backbone(model, tokenizer, lora_r=None)
    transcripts.use_vocabulary(tokenizer)
    rng, limit = random.Random(arguments.seed), 30 * arguments.copy_minutes
    if not arguments.resume:
        learn_copying(backbone, rng, [None], longest=8, goal=200, seconds=limit)
        save(backbone)
    if not arguments.resume or arguments.copy:
        learn_copying(backbone, rng, transcripts.heads(), longest=8, goal=160, seconds=limit)
        save(backbone)
    learn_transcripts(
        backbone, transcripts, 60 * (arguments.minutes or 32), arguments.learning_rate or 2e-3
    )
    save(backbone)


if __name__ == "__main__":
    main()
