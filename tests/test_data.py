"""data/: the facts are true, the split is clean, and the built-in backbone can do every job but
the one that Flow-GRPO teaches."""

import collections
import functools
import itertools
import json
import math
import random
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import agentflow
import eval as evaluation
from agentflow import Limits, Reply, Sampling
from data import pretrain
from tools import Ask, make_tools

make_data = pretrain.make_data
ELEMENTS = make_data.read_elements()


def lines(name):
    text = (make_data.FOLDER / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@functools.cache
def held_out_tasks():
    return make_data.make_questions(ELEMENTS, True, make_data.HELD_OUT_COUNTS, 2)


@functools.cache
def backbone(lora_r=None):
    torch.set_grad_enabled(True)
    return agentflow.load_backbone("builtin", "cpu", lora_r=lora_r)


# --- Facts and questions -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_the_facts_are_those_of_the_package_they_come_from():
    mendeleev = pytest.importorskip("mendeleev")
    rows = {element.name: element for element in mendeleev.get_all_elements()}
    assert len(ELEMENTS) == 118 and set(rows) == {row["name"] for row in ELEMENTS}
    for row in ELEMENTS:
        element = rows[row["name"]]
        assert (row["symbol"], row["atomic_number"], row["period"], row["group"]) == (
            element.symbol, element.atomic_number, element.period, element.group_id,
        )
        assert row["discovery_year"] == element.discovery_year


def test_the_library_holds_each_fact_once_as_a_sentence():
    passages = lines("library.jsonl")
    sentences = [make_data.fact_sentence(*fact) for fact in make_data.facts(ELEMENTS)]
    assert [passage["text"] for passage in passages] == sentences
    assert len(set(sentences)) == len(sentences) == 549


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_every_answer_is_right_by_a_second_calculation(name):
    """The oracle reads the question with its own rules and calculates with Python's integers."""
    value = {(words, row["name"]): row[column] for row in ELEMENTS
             for column, words in make_data.ATTRIBUTES.items()}
    apply = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    for row in lines(name):
        asked = row["question"].removeprefix("What is ").removesuffix("?")
        asked = re.sub(r"the ([a-z ]+?) of the element ([A-Z][a-z]+)",
                       lambda m: str(value[m.group(1), m.group(2)]), asked)
        if re.fullmatch(r"[A-Z][a-z]?", asked):  # a symbol
            assert row["answer"] == asked
            continue
        words = asked.split(" ")
        numbers = [int(word) for word in words[::2]]
        operators = words[1::2]
        while "times" in operators:  # times binds first
            i = operators.index("times")
            numbers[i : i + 2] = [numbers[i] * numbers[i + 1]]
            del operators[i]
        total = numbers[0]
        for operator, number in zip(operators, numbers[1:], strict=True):
            total = apply[operator](total, number)
        assert row["answer"] == str(total), row


def test_there_are_enough_questions_and_no_tool_answers_more_than_half():
    """A look-up needs the library, arithmetic the program, a two-step question both: so a single
    tool answers at most the larger of the first two shares, and the model alone none."""
    for name, least in (("train.jsonl", 2000), ("heldout.jsonl", 200)):
        rows = lines(name)
        share = collections.Counter(row["group"] for row in rows)
        assert len(rows) >= least and len({row["question"] for row in rows}) == len(rows)
        assert share["two-step"] / len(rows) >= 1 / 3
        assert max(share["lookup"], share["arithmetic"]) / len(rows) <= 1 / 2


def test_training_and_held_out_questions_share_no_element_and_no_operand():
    words, numbers = {}, {}
    for name in ("train.jsonl", "heldout.jsonl"):
        text = " ".join(row["question"] for row in lines(name))
        words[name] = {row["name"] for row in ELEMENTS if re.search(rf"\b{row['name']}\b", text)}
        numbers[name] = set(re.findall(r"\d+", text))
    assert len(words["heldout.jsonl"]) >= 15
    assert not words["train.jsonl"] & words["heldout.jsonl"]
    assert not numbers["train.jsonl"] & numbers["heldout.jsonl"]


def test_the_files_are_made_again_byte_for_byte(tmp_path, monkeypatch):
    before = {n: (make_data.FOLDER / n).read_bytes() for n in ("train.jsonl", "library.jsonl")}
    (tmp_path / "elements.csv").write_bytes((make_data.FOLDER / "elements.csv").read_bytes())
    monkeypatch.setattr(make_data, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["make_data.py"])
    make_data.main()
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


# --- Transcripts -------------------------------------------------------------------------------


@functools.cache
def some_transcripts():
    supply = pretrain.Transcripts(seed=5)
    supply.use_vocabulary(backbone().tokenizer)
    for _ in range(600):
        supply.add_flow()
    return supply


def test_no_transcript_holds_a_held_out_element_or_operand():
    rows = [(system, user, reply) for heads in some_transcripts().rows.values()
            for system, pairs in heads.items() for user, reply in pairs]
    assert len(rows) > 3000
    hidden = {row["name"] for row in ELEMENTS if make_data.is_held_out(row)}
    for system, user, reply in rows:
        text = f"{user}\n{reply}"
        assert not hidden & set(re.findall(r"[A-Z][a-z]+", text)), text
        numbers = map(int, re.findall(r"\d+", system + text))
        assert not any(map(make_data.held_out_operand, numbers)), text


def test_the_planner_of_the_transcripts_picks_its_tool_uniformly_at_random():
    """Chi-square over six tools against uniform: below 20.5, the 0.999 quantile at 5 degrees."""
    pairs = [pair for rows in some_transcripts().rows["planner"].values() for pair in rows]
    names = collections.Counter(reply.rpartition("Tool Name: ")[2] for _, reply in pairs)
    assert len(names) == 6
    expected = len(pairs) / 6
    assert sum((count - expected) ** 2 / expected for count in names.values()) < 20.5


# --- The built-in backbone ---------------------------------------------------------------------


def test_the_backbone_is_small_and_plain():
    folder = agentflow.BUILTIN
    size = sum(path.stat().st_size for path in folder.iterdir())
    parameters = sum(p.numel() for p in backbone().model.parameters())
    assert size <= 10e6 and parameters < 2e6
    assert backbone().model.config.model_type == "qwen2"


def test_its_tokenizer_loses_nothing_and_copies_names_and_numbers_piecewise():
    tokenizer = backbone().tokenizer
    for text in ("What is 7 times the group of Iron?", "naïve Ω \t\n\n x_1 <b>", "Zzyzx-9000!"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    for row in ELEMENTS:
        assert len(tokenizer.encode(" " + row["name"], add_special_tokens=False)) == 1
    for number in (7, 47, 999):
        assert len(tokenizer.encode(f" {number}", add_special_tokens=False)) == 1


class Scripted:
    """A backbone whose planner reads from `plans` (a function of the Ask); the rest is real."""

    def __init__(self, real, plans):
        self.real, self.plans, self.said = real, plans, []

    def clear(self):
        self.real.clear()

    def submit(self, request):
        if request.ask.module == "planner":
            self.said.append((request, Reply(self.plans(request.ask), [0], [0], [0.0], True)))
        else:
            self.real.submit(request)

    def step(self):
        said, self.said = self.said, []
        return said or self.real.step()

    def prompt_length(self, ask):
        return self.real.prompt_length(ask)


def agent_of(ask: Ask, tasks):
    question = ask.user.partition("\n")[0].removeprefix("Question: ")
    return pretrain.RightAgent(tasks[question])


def accuracy_with(choose_tool):
    tasks = {task.question: task for task in held_out_tasks()}

    def plans(ask):
        agent = agent_of(ask, tasks)
        return agent.plan(ask.user, choose_tool(agent, ask))

    questions = evaluation.load_questions(make_data.FOLDER / "heldout.jsonl")
    result = evaluation.evaluate(
        Scripted(backbone(), plans), questions, make_tools(offline=True), Limits(3), Sampling()
    )
    return result["accuracy"]


def test_an_oracle_planner_with_the_real_frozen_modules_scores_at_least_096():
    assert accuracy_with(lambda agent, ask: agent.right_tool(ask.user)) >= 0.96


@pytest.mark.slow
def test_a_uniform_planner_with_the_real_frozen_modules_scores_at_most_045():
    rng = random.Random(0)
    names = [tool.name for tool in make_tools(offline=True)]
    assert accuracy_with(lambda agent, ask: rng.choice(names)) <= 0.45


def test_each_frozen_module_alone_is_exact_on_held_out_questions():
    """Greedy replies against the right agent's, letter by letter, at least 0.995 for each."""
    for module, rows in pretrain.held_out_rows(held_out_tasks()).items():
        if module == "planner":
            continue
        requests = [agentflow.Request(ask, 0.0, 96, (0, i)) for i, ask in enumerate(rows)]
        replies = backbone().generate(requests)
        pairs = zip(replies, rows.values(), strict=True)
        right = [reply.text == wanted for reply, wanted in pairs]
        assert len(right) > 30, module
        assert sum(right) / len(right) >= 0.995, (module, sum(right), len(right))


def chi_square_p(statistic: float, degrees: int) -> float:
    """P(X >= statistic) of the chi-square distribution: the regularised upper gamma function."""
    return torch.special.gammaincc(
        torch.tensor(degrees / 2, dtype=torch.float64),
        torch.tensor(statistic / 2, dtype=torch.float64),
    ).item()


@pytest.mark.slow
def test_the_untrained_planner_picks_its_tool_uniformly_for_each_kind_of_question():
    """1,000 questions at temperature 1, seed 0: first-turn choices against uniform, the statistic
    summed over the kinds; p > 0.01."""
    assert math.isclose(chi_square_p(11.0705, 5), 0.05, abs_tol=1e-4)  # a value of the tables
    tools = make_tools(offline=True)
    questions = evaluation.load_questions(make_data.FOLDER / "train.jsonl")[:1000]
    rollouts = agentflow.roll_out(
        [question.text for question in questions], 1, backbone(), tools, Limits(1),
        Sampling(temperature=1.0), seed=0, step=0,
    )
    counts = collections.defaultdict(collections.Counter)
    for question, rollout in zip(questions, rollouts, strict=True):
        if rollout.turns[0].result.error != "bad_plan":  # a slip of the tongue at temperature 1
            counts[question.group][rollout.turns[0].plan.tool_name] += 1
    assert sum(chosen.total() for chosen in counts.values()) >= 950, "at most 5 % name no tool"
    statistic = 0.0
    for chosen in counts.values():
        expected = chosen.total() / len(tools)
        statistic += sum((chosen[tool.name] - expected) ** 2 / expected for tool in tools)
    p = chi_square_p(statistic, len(counts) * (len(tools) - 1))
    assert p > 0.01, (p, {kind: dict(chosen) for kind, chosen in counts.items()})


# --- The transcripts for another model ---------------------------------------------------------


def random_llama(folder):
    """A chat model of 2 layers with random weights and the built-in tokenizer, as a folder."""
    tokenizer = backbone().tokenizer
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    ))  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def clock(monkeypatch, seconds_a_look, stop_after=None):
    """Time passes with each look at the clock, so that a run has as many steps on any machine."""
    looks = itertools.count()

    def now():
        look = next(looks)
        if stop_after is not None and look >= stop_after:
            raise KeyboardInterrupt
        return look * seconds_a_look

    monkeypatch.setattr(pretrain, "time", SimpleNamespace(time=now))


def test_the_loss_of_replies_is_hugging_faces_own_cross_entropy(tmp_path):
    """Rows that share a head, in one packed pass without all logits, against a row at a time."""
    made = agentflow.load_backbone(random_llama(tmp_path), "cpu", lora_r=None)
    prompts, responses = pretrain.training_batch(
        pretrain.Transcripts(0), made.tokenizer, "executor", 3
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    losses = []
    for prompt, response in zip(prompts, responses, strict=True):
        logits = theirs(torch.tensor([prompt + response])).logits[0]  # (L, V)
        wanted = torch.tensor(response)
        start = len(prompt) - 1  # a token is predicted one place before its own
        losses.append(F.cross_entropy(logits[start:-1], wanted, reduction="none"))
    loss = pretrain.reply_loss(made, prompts, responses)
    assert torch.allclose(loss, torch.cat(losses).mean(), atol=1e-5)


def test_another_model_is_taught_the_replies_and_its_folder_loads(tmp_path, monkeypatch):
    """From the uniform loss of ln 3,596 = 8.2 nats a token it falls, and what was written is the
    taught model: another reply, and a lower loss on rows that were not trained on."""
    start, folder = random_llama(tmp_path / "start"), tmp_path / "taught"
    made = agentflow.load_backbone(start, "cpu", lora_r=None)
    clock(monkeypatch, seconds_a_look=10.0)  # three looks a step: thirty seconds
    transcripts = pretrain.Transcripts(0)
    losses = pretrain.fine_tune(made, transcripts, folder, seconds=900, peak=3e-3)
    assert len(losses) == 30 and abs(losses[0] - math.log(3596)) < 0.3
    assert max(losses[-6:]) < min(losses[:6]), "the last round against the first"
    before, taught = (agentflow.load_backbone(str(path), "cpu", lora_r=None)
                      for path in (start, folder))
    last = made.model.state_dict()
    assert all(torch.equal(x, last[name]) for name, x in taught.model.state_dict().items())
    rows = pretrain.training_batch(transcripts, made.tokenizer, "tool", 4)
    with torch.no_grad():
        same, other = (pretrain.reply_loss(model, *rows).item() for model in (taught, before))
    assert same < 7 < 8 < other
    request = agentflow.Request(Ask("tool", "Reply.", "Request: Calculate 3 plus 4."), 0.0, 8, (0,))
    assert before.generate([request])[0].text != taught.generate([request])[0].text


def test_a_stop_keeps_the_last_whole_checkpoint(tmp_path, monkeypatch):
    start, folder = random_llama(tmp_path / "start"), tmp_path / "taught"
    made = agentflow.load_backbone(start, "cpu", lora_r=None)
    # A step looks three times; the first checkpoint is written after 600 seconds, three steps.
    clock(monkeypatch, seconds_a_look=70.0, stop_after=12)
    with pytest.raises(KeyboardInterrupt):
        pretrain.fine_tune(made, pretrain.Transcripts(0), folder, seconds=9000, peak=1e-3)
    kept = agentflow.load_backbone(str(folder), "cpu", lora_r=None).model.state_dict()
    first = agentflow.load_backbone(start, "cpu", lora_r=None).model.state_dict()
    last = made.model.state_dict()
    for other in (first, last):
        assert any(not torch.equal(kept[name], other[name]) for name in kept)
    assert not [path for path in folder.iterdir() if path.is_dir()], "nothing half written is left"


@pytest.mark.parametrize("stop_after, last_line", [
    (None, "right replies to 1 held-out requests a module, after: analyst 0.00"),
    (12, "stopped; the last checkpoint is in "), (3, "stopped; there is no checkpoint yet in "),
])  # fmt: skip
def test_the_command_says_what_came_of_it(tmp_path, monkeypatch, capsys, stop_after, last_line):
    start, folder = random_llama(tmp_path / "start"), tmp_path / "taught"
    monkeypatch.setattr("sys.argv", ["pretrain.py", "--model", start, "--output", str(folder),
                                     "--minutes", "21", "--check", "1"])  # fmt: skip
    clock(monkeypatch, seconds_a_look=70.0, stop_after=stop_after)
    pretrain.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("right replies to 1 held-out requests a module, before: analyst")
    assert lines[-1].startswith(last_line)
    assert (folder / "config.json").exists() == (stop_after != 3)


def test_right_replies_are_counted_by_module(tmp_path):
    """The built-in backbone says them letter for letter, random weights none of them."""
    modules = set(pretrain.TUNING_ROWS)
    assert pretrain.right_replies(backbone(), 5) == dict.fromkeys(modules, 1.0)
    made = agentflow.load_backbone(random_llama(tmp_path), "cpu", lora_r=None)
    assert pretrain.right_replies(made, 2) == dict.fromkeys(modules, 0.0)
