"""The report of a run: what is in the file, what may not get out of it, and (slow) what a browser
makes of it. The run folder is made by hand, so that every number in it can be worked out."""

import base64
import hashlib
import html.parser
import json
import math
import os
import re
import shutil
import statistics
import zlib

import pytest
import torch

import eval as evaluation
import flow_grpo
import train

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror=\"window.hacked = 1\">"
    "<!-- \u2028 ${1} ' & \\ \ud800"
)
STEP = "Step {0}\nSub-Goal: s{0}\nTool Name: t\nResult: {1}\nVerdict: {2}"
CONFIG = {
    "num_questions": 2, "num_generations": 4, "model": "builtin", "data": "builtin", "max_steps": 9,
    "max_turns": 3, "lora_r": 16, "learning_rate": 1e-3, "beta": 0.01, "epsilon": 0.2,
    "epsilon_high": 0.3, "num_iterations": 1, "seed": 0,
}  # fmt: skip


def turn(place, prompt, ids, output="out", error="none", stop=False):
    """A planner's turn of the log; log-probs −0.1, −0.2, …, the reference's 0.05 above."""
    logp = [round(-0.1 * (i + 1), 5) for i in range(len(ids))]
    return {
        "planner": {"head": "h", "prompt": prompt, "reply": f"plan {place}", "prompt_ids": [1] * 7,
                    "reply_ids": ids, "logp": logp, "logp_ref": [p + 0.05 for p in logp],
                    "entropy": [0.5] * len(ids)},
        "executor": {"head": "h", "prompt": "p", "reply": "call"},
        "tool": {"name": "Python_Coder_Tool", "arguments": {}, "output": output, "error": error,
                 "seconds": 0.25},
        "verifier": {"head": "h", "prompt": "p", "reply": "v", "stop": stop},
        "seconds": 0.5, "code": "print(1)",
    }  # fmt: skip


def rollout(step, group, number, reward, turns, text="plain", failed=None):
    """A line of rollouts/<step>.jsonl, of `turns` turns."""
    steps = [STEP.format(t + 1, text, "STOP" if t == turns - 1 else "CONTINUE")
             for t in range(turns)]  # fmt: skip
    prompts = ["\n".join(["Question: q", *steps[:t]]) for t in range(turns + 1)]
    lengths = [3, 2, 4]
    return {
        "step": step, "group": group, "rollout": number, "id": f"id {text}",
        "question": f"q {text}", "reference": [text],
        "answer": text, "failed": failed, "reward": reward, "advantage": 0.0,
        "analysis": {"head": "h", "prompt": "Question: q", "reply": text},
        "turns": [turn(t, prompts[t], [1385, 201, 2, 9][: lengths[t]], text, "network" if t else
                       "none", t == turns - 1) for t in range(turns)],
        "memory": "\n".join(steps),
        "generator": {"head": "h", "prompt": prompts[-1], "reply": text},
        "prompt": "q", "completion": text,
    }  # fmt: skip


def with_advantages(records):
    """The records with the advantages that the run would have logged."""
    rewards = torch.tensor([math.nan if r["reward"] is None else r["reward"] for r in records],
                           dtype=torch.float64)  # fmt: skip
    groups = torch.tensor([r["group"] for r in records])
    advantages = flow_grpo.group_advantages(rewards, groups).tolist()
    return [{**r, "advantage": round(a, 6)} for r, a in zip(records, advantages, strict=True)]


def step_records(step, text="plain"):
    """Two questions: one with spread, an unjudged and a failed roll-out, and a flat one."""
    return with_advantages([
        rollout(step, 0, 0, 1.0, 2, text), rollout(step, 0, 1, 0.25, 3, text),
        rollout(step, 0, 2, None, 1, text), rollout(step, 0, 3, None, 0, failed=f"down {text}"),
        *(rollout(step, 1, i, 0.0, 1 + i % 2, text) for i in range(4)),
    ])  # fmt: skip


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def make_run(tmp_path):
    def make(name="run", text="plain", steps=None, config=None, after=True):
        folder = tmp_path / name
        (folder / "rollouts").mkdir(parents=True)
        (folder / "run_config.json").write_text(json.dumps(CONFIG | (config or {})))
        steps = steps or {1: step_records(1, text), 2: step_records(2, text)}
        for step, records in steps.items():
            write_lines(folder / "rollouts" / f"{step}.jsonl", records)
        (folder / "rollouts" / "heads.json").write_text(json.dumps({"h": f"head {text}"}))
        write_lines(folder / "metrics.jsonl", [
            {"step": step, "reward": 0.5 + 0.1 * step, "kl": 2.0 * step, "alarms":
             ["kl"] if step > 1 else [], "entropy": None, "frac_reward_zero_std": 0.5}
            for step in steps
        ])  # fmt: skip
        said = [{"planner": "same plan", "command": "c", "result": r, "verifier": "v"}
                for r in (f"first {text}", f"other {text}")]  # fmt: skip
        for when, flow in zip(("before", "after")[: 1 + after], said, strict=False):
            write_lines(folder / f"eval_{when}.jsonl", [{
                "id": "h1", "question": f"held out {text}", "reference": ["3"], "group": "g",
                "response": text, "score": float(when == "after"), "tools": ["A_Tool"],
                "errors": ["none"], "flow": [flow], "crashed": None,
            }])  # fmt: skip
        return folder

    return make


def write_report(folder, capsys):
    """(the page, its index, its groups of roll-outs, what was printed)."""
    assert evaluation.main(["--report", str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    blocks = re.findall(r'<script type="text/plain" class="data">([A-Za-z0-9+/=]+)</script>', page)
    index, *groups = [json.loads(zlib.decompress(base64.b64decode(text))) for text in blocks]
    return page, index, groups, capsys.readouterr().out


# ------------------------------------------------------------------------- what is in the file


def test_hostile_text_stays_data(make_run, capsys):
    """Names, ids, questions, replies, errors: none of it reaches the page as markup, all of it is
    there to be read. Outside of the template the page holds base64 only."""
    folder = make_run("<img src=x onerror=hacked>", HOSTILE)
    page, index, groups, _ = write_report(folder, capsys)

    class Parser(html.parser.HTMLParser):
        elements: list = []

        def handle_starttag(self, tag, attributes):
            self.elements.append((tag, dict(attributes)))

    parser = Parser()
    parser.feed(page)
    scripts = [attributes for tag, attributes in parser.elements if tag == "script"]
    assert scripts == [{"type": "text/plain", "class": "data"}] * 5 + [{}]
    assert "hacked" not in page and "\u2028" not in page
    assert index["name"] == "<img src=x onerror=hacked>"
    assert groups[0][0]["generator"]["reply"] == index["heads"]["h"].removeprefix("head ")
    assert groups[0][0]["turns"][0]["tool"]["output"] == HOSTILE
    assert index["groups"][0]["question"] == f"q {HOSTILE}"


def test_the_policy_lets_the_one_script_run_and_nothing_load(make_run, capsys):
    page, *_ = write_report(make_run(), capsys)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1].split(";")
    allowed = {rule.split()[0]: rule.split()[1:] for rule in policy}
    for part in ("style", "script"):
        inside = re.search(rf"<{part}>(.*?)</{part}>", page, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert allowed.pop(f"{part}-src") == [f"'sha256-{digest}'"]
    assert set(map(tuple, allowed.values())) == {("'none'",)} and "default-src" in allowed
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|innerHTML|insertAdjacent|fetch\(", page)
    addresses = set(re.findall(r"https?://[^\s\"']+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place


def test_weights_and_group_numbers_are_those_of_the_update(make_run, capsys):
    """Group 0 has two judged roll-outs (rewards 1 and 0.25, of 2 and 3 turns); the unjudged and the
    failed one count nowhere. Worked by hand: the first token of the first roll-out weighs
    1 / (2 · 2 · 2 · 3) = 1/24; mean 0.625, std 0.75 / √2."""
    _, index, groups, _ = write_report(make_run(), capsys)
    first, flat = index["groups"][:2]
    assert groups[0][0]["turns"][0]["planner"]["weight"] == pytest.approx(1 / 24)
    assert first["mean"] == 0.625 and first["std"] == pytest.approx(0.75 / 2**0.5)
    assert (first["Q"], first["G"], flat["G"]) == (2, 2, 4) and flat["std"] == 0

    rows = [(group, r, turn["planner"]) for group, rollouts in enumerate(groups[:2])
            for r in rollouts for turn in r["turns"]]  # fmt: skip
    judged = [row for row in rows if row[1]["reward"] is not None]
    assert [row[2]["weight"] for row in rows if row[1]["reward"] is None] == [0]
    weights = flow_grpo.turn_weights(
        torch.tensor([group for group, _, _ in judged]),
        torch.tensor([r["rollout"] for _, r, _ in judged]),
        torch.tensor([len(planner["reply_ids"]) for _, _, planner in judged]),
    )
    assert [planner["weight"] for _, _, planner in judged] == pytest.approx(weights.tolist())
    rewards = torch.tensor([1.0, 0.25, math.nan, math.nan], dtype=torch.float64)
    advantages = flow_grpo.group_advantages(rewards, torch.zeros(4)).tolist()
    own = [0 if r is None else (r - first["mean"]) / (first["std"] + 1e-6)
           for r in first["rewards"]]  # fmt: skip
    assert own == pytest.approx(advantages) and first["advantages"] == pytest.approx(own, abs=1e-6)


def test_part_of_a_step_has_the_sizes_of_the_flags(make_run, capsys):
    """--log_rollouts 2 wrote two of eight: Q and G are those of the run, not of the file."""
    few = {1: step_records(1)[:2]}
    _, index, groups, _ = write_report(make_run(steps=few), capsys)
    assert (index["groups"][0]["Q"], index["groups"][0]["G"]) == (2, 4)
    assert groups[0][0]["turns"][0]["planner"]["weight"] == pytest.approx(1 / (2 * 4 * 2 * 3))
    assert not index["groups"][0]["whole"]


def test_tokens_and_alarms_are_in_words(make_run, capsys):
    """An alarm's words are train.py's own; kl 2 and 4 are over its bound of 1."""
    folder = make_run()
    _, index, _, _ = write_report(folder, capsys)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert index["metrics"][1]["alarms"] == {"kl": train.alarms(rows, True, 8)["kl"]}
    assert "kl is 2" in index["metrics"][1]["alarms"]["kl"] and not index["metrics"][0]["alarms"]
    assert index["tokens"]["201"] == "\n" and set(index["tokens"]) == {"1385", "201", "2", "9"}

    _, index, _, said = write_report(make_run("other", config={"model": "gone/away"}), capsys)
    assert index["tokens"] == {} and "tokenizer of gone/away cannot be loaded" in said


def test_what_does_not_fit_is_left_out_by_whole_groups_and_said(make_run, capsys, monkeypatch):
    """Noise as replies, 20 steps of it: some 3 kB a group that no compression makes smaller."""
    noise = "".join(chr(0x4E00 + (i * i * 7919 + i) % 20000) for i in range(900))
    folder = make_run(steps={step: step_records(step, f"{step}{noise}") for step in range(1, 21)})
    whole, index, groups, said = write_report(folder, capsys)
    assert len(groups) == 40 and "roll-outs are in this report" not in said
    limit = 50_000 + len(whole) * 2 // 3
    monkeypatch.setattr(evaluation, "REPORT_BYTES", limit)
    page, index, groups, said = write_report(folder, capsys)
    assert len(page) <= limit and 4 <= len(groups) < 36
    assert f"{4 * len(groups)} of 160 roll-outs are in this report" in said
    assert any(said.startswith(f"note: {note}") for note in index["notes"])
    assert len(index["groups"]) == 40, "charts, rewards and advantages are of all"
    for group in index["groups"]:
        if group["chunk"] is not None:
            kept = groups[group["chunk"]]
            assert [(r["step"], r["group"]) for r in kept] == [(group["step"], group["group"])] * 4
    there = [g["step"] for g in index["groups"] if g["chunk"] is not None]
    assert len(there) == len(groups) and statistics.mean(there) == pytest.approx(10.5, abs=2)


def test_a_stopped_run_shows_what_there_is(make_run, capsys):
    """No eval_after, half a last line, a damaged file of roll-outs, NaN, no heads."""
    folder = make_run(after=False, config={"lora_r": 0})
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "reward": NaN}\n{"step": 4, "rewa')
    (folder / "rollouts" / "3.jsonl").write_text('{"step": 3}\n')
    (folder / "rollouts" / "heads.json").unlink()
    _, index, groups, said = write_report(folder, capsys)
    assert [row["step"] for row in index["metrics"]] == [1, 2, 3] and len(groups) == 4
    assert index["metrics"][2]["reward"] is None and index["accuracy"]["after"] is None
    for words in ("metrics.jsonl: 1 line(s)", "3.jsonl is damaged", "heads.json", "no eval_after"):
        assert words in said
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("text, words", [
    (None, "is no training run"), (json.dumps(CONFIG), "no roll-outs to show"),
    ("[]", ".model is missing or of another kind"), ("{", "is damaged"),
    (json.dumps(CONFIG | {"model": None}), ".model is missing"),
    (json.dumps(CONFIG).replace('"num_generations": 4', '"num_generations": 1e999'),
     ".num_generations is missing"),
])  # fmt: skip
def test_what_is_no_run_is_one_sentence(text, words, tmp_path, capsys):
    if text is not None:
        (tmp_path / "run_config.json").write_text(text)
    assert evaluation.main(["--report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_report_of_no_name_or_of_a_file_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for name, words in (("", "names no folder"), ("file", "is no training run")):
        assert evaluation.main(["--report", name, "--json", "out.json"]) == 2
        assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def lost(part, *path):
    """A change that takes a part away from a step's first record, or from a turn of it."""
    def change(record):
        for name in path:
            record = record[name]
        del record[part]

    return change


@pytest.mark.parametrize("change", [
    lost("analysis"), lost("generator"), lost("memory"), lost("group"), lost("turns"),
    lost("verifier", "turns", 0), lost("name", "turns", 0, "tool"),
    lambda record: record["turns"][0]["planner"].update(reply_ids=[], logp=[]),
    lambda record: record["turns"][0]["planner"].update(reply_ids=[[1], [2], [3]]),
    lambda record: record["turns"][0]["planner"].update(logp=None),
    lambda record: record["turns"][0]["planner"].update(logp=[-0.1]),
])  # fmt: skip
def test_a_step_that_the_page_could_not_show_is_left_out_and_said(change, make_run, capsys):
    records = step_records(2)
    change(records[0])
    folder = make_run(steps={1: step_records(1), 2: records})
    _, index, groups, said = write_report(folder, capsys)
    assert [group["step"] for group in index["groups"]] == [1, 1]
    assert "note: 2.jsonl is damaged and left out (" in said and len(groups) == 2


def test_numbers_that_no_browser_reads_and_files_of_others_do_no_harm(make_run, capsys):
    folder = make_run()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "reward": 1e999, "kl": -Infinity}\n{"reward": 1}\n"no row"\n')
    for when in ("before", "after"):
        text = (folder / f"eval_{when}.jsonl").read_text()
        (folder / f"eval_{when}.jsonl").write_text(
            text.replace('"errors": ["none"], ', "") + '{"question": "q", "score": "high"}\n')
    (folder / "rollouts" / "heads.json").write_text("null")
    shutil.copy(folder / "rollouts" / "1.jsonl", folder / "rollouts" / "².jsonl")
    shutil.copy(folder / "rollouts" / "1.jsonl", folder / "rollouts" / "01.jsonl")
    (folder / "rollouts" / "7.jsonl").mkdir()
    os.mkfifo(folder / "rollouts" / "8.jsonl")
    _, index, groups, said = write_report(folder, capsys)
    assert index["metrics"][2] == {"step": 3, "reward": None, "kl": None, "alarms": {}}
    assert len(index["metrics"]) == 3 and len(groups) == 4 and len(index["pairs"]) == 1
    for words in ("metrics.jsonl: 2 line(s)", "eval_after.jsonl: 1 line(s)", "heads.json"):
        assert words in said


def test_alarms_of_a_long_run_are_worked_out_where_there_are_any(make_run, capsys, monkeypatch):
    folder, asked = make_run(), []
    write_lines(folder / "metrics.jsonl", [
        {"step": step, "reward": 0.5, "alarms": ["kl"] * (step == 2000)} for step in range(1, 3000)
    ])  # fmt: skip
    monkeypatch.setattr(train, "alarms", lambda history, *_: asked.append(len(history)) or {})
    write_report(folder, capsys)
    assert asked == [2000, 2000]


def test_a_link_in_the_place_of_the_file_beside_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / f"report.html.{os.getpid()}.tmp").symlink_to(tmp_path / "precious")
    train.write_atomically(tmp_path / "report.html", "page")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "report.html").read_text() == "page"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        train.write_atomically(tmp_path / "folder", "page")
    assert not list(tmp_path.glob("*.tmp"))


def test_held_out_items_keep_the_turns_between():
    """What `attempt` records for the last view: a turn each, as the memory has it."""
    from tests.test_eval import scripted

    question = evaluation.Question("1", "what is one?", ["1"], "g")
    limits = evaluation.agentflow.Limits(max_turns=1)
    tools = evaluation.agentflow.make_tools(["Base_Generator_Tool"], True)
    sampling = evaluation.agentflow.Sampling(0.0, 9, 9)
    found = evaluation.evaluate(scripted(), [question], tools, limits, sampling, title="")
    (item,) = found["items"]
    assert item["flow"] == [{
        "planner": "Justification: j\nContext: c\nSub-Goal: s\nTool Name: Base_Generator_Tool",
        "command": 'tool.execute(query="q")', "result": "x", "verifier": "Conclusion: STOP",
    }]  # fmt: skip


# ------------------------------------------------------------------------- what a browser shows

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture
def browser(tmp_path):
    """Chromium, on a page 1,400 wide; `open` loads a file and gives back the driver."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    found = [shutil.which("chromium") or shutil.which("chromium-browser"),
             shutil.which("chromedriver")]  # fmt: skip
    if not all(found):
        pytest.skip("chromium or chromedriver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for flag in (*FLAGS, "--window-size=1400,1000", f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=found[1])
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(20)
    yield driver
    driver.quit()


def load(driver, folder):
    """Opens a report from disk, waits until it is painted: the milliseconds since navigation."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get((folder / "report.html").as_uri())
    ready = "return document.documentElement.dataset.ready"
    return float(WebDriverWait(driver, 20, 0.02).until(lambda d: d.execute_script(ready)))


def settle(driver):
    """Two frames: whatever a click or key changes is drawn."""
    driver.execute_async_script(
        "const done = arguments[0]; setTimeout(() => requestAnimationFrame(() => done()), 60)"
    )


def press(driver, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    for key in keys:
        ActionChains(driver).send_keys(key).perform()
        settle(driver)


def texts(driver, selector):
    """What stands in the elements, hidden ones too, with plain minus signs. toWellFormed: the
    driver itself cannot pass a lone surrogate on."""
    found = "[...document.querySelectorAll(arguments[0])]"
    script = f"return {found}.map((one) => one.textContent.toWellFormed())"
    return [text.replace("−", "-") for text in driver.execute_script(script, selector)]


def last_number(text):
    return float(text.strip().split()[-1].replace("+", ""))


def silent(driver):
    """No error in the console, and not one request beside the file itself."""
    problems = [line["message"] for line in driver.get_log("browser")
                if line["level"] in ("SEVERE", "WARNING")]  # fmt: skip
    assert not problems, problems
    events = [json.loads(line["message"])["message"] for line in driver.get_log("performance")]
    asked = {event["params"]["request"]["url"] for event in events
             if event["method"] == "Network.requestWillBeSent"
             and not event["params"]["documentURL"].startswith("chrome")}  # fmt: skip
    assert asked == {driver.current_url}, asked  # chrome…: the browser's own first page
    assert driver.execute_script("return window.hacked") is None


@pytest.mark.slow
def test_every_view_shows_the_numbers_of_the_run(browser, make_run, capsys, tmp_path):
    """From disk, with hostile text everywhere. Worked by hand for roll-out 1 of the first group:
    A = (1 - 0.625) / (0.75 / √2), w = 1/24, and of its first token log-prob -0.1 and d = 0.05."""
    folder = make_run("<img src=x onerror=hacked>", HOSTILE)
    write_report(folder, capsys)
    load(browser, folder)
    assert browser.title == "<img src=x onerror=hacked>: training run"

    def shot(name):
        browser.save_screenshot(str(tmp_path / f"{name}.png"))

    # a. the strip: a click and a key select a step, its alarm is in words
    assert texts(browser, "#step-number") == ["1 of 2"]
    press(browser, "\ue014")  # arrow right
    assert texts(browser, "#step-number") == ["2 of 2"]
    assert "kl is 2 and more for two steps" in texts(browser, "#alarms")[0]
    assert texts(browser, ".chart[data-metric=kl] b") == ["4"]
    assert texts(browser, ".chart[data-metric='eval/accuracy'] b") == ["0 → 1"]
    press(browser, "\ue012")

    # b. the board, and Eq. 7
    assert len(texts(browser, ".column")) == 4
    advantage = 0.375 / (0.75 / 2**0.5 + 1e-6)
    shown = [last_number(text) for text in texts(browser, "[data-test=advantage]")]
    assert shown == pytest.approx([advantage, -advantage, 0, 0], abs=1e-4)
    assert last_number(texts(browser, "[data-test=mean]")[0]) == 0.625
    assert last_number(texts(browser, "[data-test=std]")[0]) == pytest.approx(0.5303, abs=1e-4)
    assert "2 of 4 could not be judged" in texts(browser, "#board")[0]
    assert "≠" not in texts(browser, "#board")[0], "own and logged advantages agree"
    shot("board")
    press(browser, "\ue015")  # arrow down: the flat group
    assert "All 4 rewards are 0" in texts(browser, "[data-test=flat]")[0]
    press(browser, "\ue013")

    # c. the flow
    browser.find_element("css selector", ".column").click()
    settle(browser)
    assert texts(browser, "#flow .trained > pre") == ["plan 0", "plan 1"]
    assert HOSTILE[:60] in texts(browser, "#flow .generator pre")[0]
    assert "✗ network" in texts(browser, "#flow")[0] and "3 tokens after 7" in texts(
        browser, "#flow")[0]  # fmt: skip
    shot("flow")

    # d. the film: what turn 2 appended, and where the generator's prompt shows it
    press(browser, "3", ".", ".")
    added = texts(browser, "[data-test=appended]")[0]
    assert added.startswith("Step 2\n") and added.endswith("Verdict: STOP")
    assert texts(browser, "[data-test=shown]") == [added]
    shot("memory")

    # e. the tokens: Eq. 5 to 7 of the first one
    press(browser, "4")
    assert texts(browser, "#replies .token")[:2] == ["Justification", "↵"]
    k3 = flow_grpo.kl_k3(torch.tensor([-0.1]).double(), torch.tensor([-0.05]).double()).item()
    expected = {"A": advantage, "w": 1 / 24, "ratio": 1.0, "clip": advantage, "kl": k3}
    for name, value in expected.items():
        text = texts(browser, f"[data-test={name}]")[-1]
        assert last_number(text) == pytest.approx(value, rel=1e-3), (name, text)
    term, slope = map(last_number, texts(browser, "[data-test=term]"))
    assert term == pytest.approx((advantage - 0.01 * k3) / 24, rel=1e-3)
    logp = torch.tensor([[-0.1]], dtype=torch.float64, requires_grad=True)
    loss, _ = flow_grpo.flow_grpo_loss(
        logp, torch.tensor([[-0.1]]), torch.tensor([[-0.05]]), torch.tensor([advantage]),
        torch.tensor([1 / 24]), torch.ones(1, 1), 0.2, 0.3, 0.01,
    )  # fmt: skip
    loss.backward()
    assert term == pytest.approx(-loss.item(), rel=1e-3)
    assert slope == pytest.approx(-logp.grad.item(), rel=1e-3)
    assert "likelier" in texts(browser, "[data-test=push]")[0]
    browser.find_elements("css selector", "#replies .token")[4].click()
    settle(browser)
    assert "Turn 2, token 2 of 2" in texts(browser, "#token h2")[0]
    assert "1 / (2 · 2 · 2 · 2)" in texts(browser, "[data-test=w]")[0]
    press(browser, "t")
    assert "ratio" in browser.execute_script("return document.getElementById('tint').value")
    shot("tokens")
    press(browser, "j", "j", "j")
    assert "This roll-out failed" in texts(browser, "#replies")[0]

    # f. before and after: the results differ, plan and command do not
    press(browser, "5")
    assert len(texts(browser, "[data-test=differs]")) == 2
    cells = texts(browser, "#pairs .differs mark")
    assert [cell[:5] for cell in cells] == ["first", "other"]
    shot("pairs")

    # g. filter, help, dark, narrow
    press(browser, "1", "/", *"onerror zzz")
    assert texts(browser, "#count") == ["0 questions in all steps"]
    press(browser, "\ue00c")
    assert texts(browser, "#count") == ["2 questions in this step"]
    press(browser, "?")
    assert browser.execute_script("return document.getElementById('help').open")
    press(browser, "\ue00c", "d")
    for view in range(1, 6):
        press(browser, str(view))
        shot(f"dark-{view}")
    browser.set_window_size(500, 900)
    for view in range(1, 6):
        press(browser, str(view))
        shot(f"narrow-{view}")
        wide = "const e = document.documentElement; return e.scrollWidth - e.clientWidth"
        assert browser.execute_script(wide) <= 0, "nothing sticks out at the side"
    silent(browser)


@pytest.mark.slow
def test_a_thousand_roll_outs_show_within_two_seconds(browser, make_run, capsys):
    """125 questions of 8 in one step; the best of three, since other work shares the machine."""
    records = with_advantages([
        rollout(1, group, i, float((group + i) % 3 == 0), 1 + (group * i) % 3, f"{group} {i}. " * 9)
        for group in range(125) for i in range(8)
    ])  # fmt: skip
    config = {"num_questions": 125, "num_generations": 8}
    folder = make_run(steps={1: records}, config=config)
    write_report(folder, capsys)
    times = [load(browser, folder) for _ in range(3)]
    marks = "".join(texts(browser, "#list .rewards"))
    assert sum(marks.count(mark) for mark in "●○") == 1000 and len(texts(browser, ".column")) == 8
    silent(browser)
    assert min(times) <= 2000, times
    print(f"1,000 roll-outs: {times} ms")


@pytest.mark.slow
def test_a_word_without_an_end_stays_within_the_page(browser, make_run, capsys):
    folder = make_run(text="w" * 400)
    write_report(folder, capsys)
    load(browser, folder)
    for view in range(1, 6):
        press(browser, str(view))
        wide = "const e = document.documentElement; return e.scrollWidth - e.clientWidth"
        assert browser.execute_script(wide) <= 0, view
    silent(browser)


@pytest.mark.slow
def test_a_stopped_run_and_one_of_all_weights_open(browser, make_run, capsys):
    folder = make_run(after=False, config={"lora_r": 0, "model": "gone/away", "beta": 0})
    for name in ("metrics.jsonl", "eval_before.jsonl"):
        (folder / name).unlink()
    write_report(folder, capsys)
    load(browser, folder)
    press(browser, "2", "3", "4")
    assert "⟨1385⟩" in texts(browser, "#replies")[0]
    press(browser, "5")
    assert "No held-out question was measured yet" in texts(browser, "#pairs")[0]
    assert "no eval_after.jsonl" in texts(browser, "#notes")[0]
    silent(browser)
