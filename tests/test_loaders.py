"""Question files, public sets by name, own reward functions. The hub is a server on this machine
that speaks the datasets server's rows API; every item is invented, in the true sets' columns."""

import collections
import csv
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import math
import random
import threading
import warnings
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest

import eval as evaluation
import train

DATA = evaluation.DATA


# --- Invented sets -----------------------------------------------------------------------------


def flashrag(count):
    return [{"id": f"dev_{i}", "question": f"Who tends lighthouse {i}?",
             "golden_answers": [f"Keeper {i}\n", f"Keeper {i}", f"K. {i}"], "metadata": {}}
            for i in range(count)]  # fmt: skip


def gaia(count):
    """Every fourth question is about a file."""
    rows = []
    for i in range(count):
        file = "pier.png" if i % 4 == 3 else ""
        rows.append({"task_id": f"t{i}", "Question": f"How many gulls sat on pier {i}?",
                     "Level": str(1 + i % 3), "Final answer": str(i), "file_name": file,
                     "file_path": file, "Annotator Metadata": {}})  # fmt: skip
    return rows


def gpqa(count):
    rows = []
    for i in range(count):
        rows.append({"Question": f" Which stone is heaviest in box {i}?\n",
                     "Correct Answer": f"granite {i}\n", "Incorrect Answer 1": f"chalk {i}",
                     "Incorrect Answer 2": f" pumice {i}", "Incorrect Answer 3": f"slate {i}",
                     "Subdomain": "Stones"})  # fmt: skip
    rows[0]["Incorrect Answer 2"] = None
    return rows


def medqa(count):
    return [{"question": f"Patient {i} has a fever. What helps?", "answer": "rest",
             "options": {"A": "cake", "B": f"tea {i}", "C": "rest", "D": "a walk"},
             "answer_idx": "C", "meta_info": "step1"} for i in range(count)]  # fmt: skip


AIME = [{"ID": f"2024-I-{i}", "Problem": f"Add {i} and 33.", "Solution": "",
         "Answer": f"{i + 33:03d}"} for i in range(30)]  # fmt: skip
AMC = [{"id": 2 * i, "question": f"Halve {2 * i}.", "answer": float(i), "url": ""}
       for i in range(40)]  # fmt: skip
MATH = [{"prompt": [{"role": "user", "content": f"Double {i}."}], "solution": f"${2 * i}$"}
        for i in range(450)]  # fmt: skip
SETS = {
    "RUC-NLPIR/FlashRAG_datasets/2wikimultihopqa/dev": flashrag(12576),
    "RUC-NLPIR/FlashRAG_datasets/hotpotqa/dev": flashrag(7405),
    "RUC-NLPIR/FlashRAG_datasets/musique/dev": flashrag(250),
    "gaia-benchmark/GAIA/2023_all/validation": gaia(165),
    "Maxwell-Jia/AIME_2024/default/train": AIME,
    "math-ai/amc23/default/test": AMC,
    "Idavidrein/gpqa/gpqa_main/train": gpqa(448),
    "GBaker/MedQA-USMLE-4-options/default/test": medqa(1273),
    "trl-lib/DeepMath-103K/default/train": MATH,
}  # fmt: skip


@functools.cache
def puzzle_list():
    """The public list's columns; the order is ours."""
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(["Rank", "Puzzles", "AMT (s)"])
    puzzles = evaluation.solvable_puzzles()[::-1]
    writer.writerows([i + 1, puzzle, 5.0] for i, puzzle in enumerate(puzzles))
    return table.getvalue().encode()


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def serve(state):
    """A web server on a free port; `state.answer(request)` gives (status, headers, body)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            url = urlsplit(self.path)
            asked = {name: values[0] for name, values in parse_qs(url.query).items()}
            request = SimpleNamespace(path=url.path, asked=asked, headers=dict(self.headers))
            state.requests.append(request)
            status, headers, body = state.answer(request)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            """Not into the test's output."""

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    state.base = f"http://127.0.0.1:{httpd.server_address[1]}"
    return httpd


def type_of(cell):
    """A column's type as the server writes it: of an object, the types of its keys."""
    if isinstance(cell, dict):
        return {key: type_of(value) for key, value in cell.items()}
    if isinstance(cell, list):
        return {"feature": type_of(cell[0]), "_type": "List"}
    return {"dtype": {str: "string", int: "int64", float: "float64"}.get(type(cell)),
            "_type": "Value"}  # fmt: skip


def rows_answer(request, change=lambda page: page):
    """What the datasets server says: the asked rows of SETS."""
    asked = request.asked
    rows = SETS["/".join([asked["dataset"], asked["config"], asked["split"]])]
    first, count = int(asked["offset"]), int(asked["length"])
    assert 1 <= count <= 100, "the server refuses more than 100"
    page = {
        "features": [{"feature_idx": i, "name": name, "type": type_of(cell)}
                     for i, (name, cell) in enumerate(rows[0].items())],
        "rows": [{"row_idx": first + i, "row": row, "truncated_cells": []}
                 for i, row in enumerate(rows[first : first + count])],
        "num_rows_total": len(rows), "num_rows_per_page": 100, "partial": False,
    }  # fmt: skip
    return 200, {"X-Revision": "abc"}, json.dumps(change(page)).encode()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub, the datasets server and GitHub in one, with a cache of its own and no patience."""
    state = SimpleNamespace(requests=[], files={}, change=lambda page: page, faults=[])

    def answer(request):
        if state.faults:
            return state.faults.pop(0)
        if request.path == "/rows":
            return rows_answer(request, state.change)
        found = [body for end, body in state.files.items() if request.path.endswith(end)]
        return (200, {}, found[0]) if found else (404, {"X-Error-Code": "EntryNotFound"}, b"no")

    state.answer = answer
    httpd = serve(state)
    for name, value in {"HUB": state.base, "ROWS_API": f"{state.base}/rows", "GITHUB": state.base,
                        "BACKOFF": 0.0, "PAUSE": 0.0}.items():
        monkeypatch.setattr(evaluation, name, value)
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path / "cache"))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    state.files["bamboogle/test.jsonl"] = jsonl(flashrag(125))
    state.files["24.csv"] = puzzle_list()
    state.files["nq/train.jsonl"] = jsonl(
        {**row, "question": f"who tends lighthouse {i}"} for i, row in enumerate(flashrag(300)))
    state.cache = tmp_path / "cache" / "data"
    yield state
    httpd.shutdown()
    httpd.server_close()


def fault(status, code="", **headers):
    head = {name.replace("_", "-"): value for name, value in headers.items()}
    body = json.dumps({"error": "so it is"}).encode()
    return status, {**({"X-Error-Code": code} if code else {}), **head}, body


# --- The ten sets ------------------------------------------------------------------------------


def test_the_table_has_the_ten_sets_with_the_papers_items_and_accuracies():
    sets = evaluation.BENCHMARKS
    items = [known.items for known in sets.values()]
    assert items == [125, 100, 100, 100, 127, 30, 40, 100, 100, 100]
    assert [name for name, known in sets.items() if known.gated] == ["gaia", "gpqa"]
    trained = [known.paper[evaluation.PAPER_COLUMNS.index("AgentFlow + Flow-GRPO")]
               for known in sets.values()]
    assert trained == [69.6, 77.2, 57.0, 25.3, 33.1, 40.0, 61.5, 53.0, 47.0, 80.0]
    assert all(len(known.paper) == len(evaluation.PAPER_COLUMNS) for known in sets.values())


def test_a_sample_is_the_same_for_everybody_and_loads_no_row_that_it_does_not_need(hub):
    """100 of HotpotQA's 7,405 rows: the 100 with the smallest SHA-256 of "sample/ROW", sorted."""
    questions = evaluation.load_benchmark("hotpotqa")
    order = sorted(range(7405), key=lambda i: hashlib.sha256(b"sample/%d" % i).hexdigest())
    assert [q.id for q in questions] == [f"hotpotqa/{i}/7405" for i in sorted(order[:100])]
    first = questions[0]
    place = sorted(order[:100])[0]
    assert first.text == f"Who tends lighthouse {place}?" and first.source == "hotpotqa"
    assert first.references == [f"Keeper {place}", f"K. {place}"], "stripped, each once, in order"
    assert (first.kind, first.metric, first.group) == ("text", "em", "HotpotQA")
    assert first.reward(f"<answer>keeper {place}</answer>") == 1.0
    pages = [(int(r.asked["offset"]), int(r.asked["length"])) for r in hub.requests[1:]]
    needed = {i for first, length in pages for i in range(first, first + length)}
    assert {*order[:100]} <= needed and len(pages) < 75, "fewer requests than the set has pages"
    assert sum(length for _, length in pages) < 7405 / 2, "half of the rows are never asked for"


def test_integers_lose_their_padding_and_their_point(hub):
    """AIME has "033" as a text, AMC 27.0 as a number: the references are 33 and 27."""
    aime, amc = (evaluation.load_benchmark(name) for name in ("aime24", "amc23"))
    assert [q.references for q in aime[:2]] == [["33"], ["34"]] and len(aime) == 30
    assert [q.references for q in amc[:3]] == [["0"], ["1"], ["2"]] and len(amc) == 40
    assert aime[0].reward("\\boxed{033}") == 1.0 and amc[27].kind == "math"


def test_options_stand_below_the_question_and_the_right_one_is_followed_through_the_shuffle(
        hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "t-" + "o" * 8)
    questions = evaluation.load_benchmark("gpqa")
    letters = collections.Counter()
    for question in questions:
        number = question.text.partition("box ")[2].partition("?")[0]
        (letter,) = question.references
        options = question.text.splitlines()[1:]
        assert f"{letter}) granite {number}" in options and question.kind == "mc"
        assert question.choices["ABCD".index(letter)] == f"granite {number}"
        assert sorted(options)[0].startswith("A) ")
        letters[letter] += 1
    assert len(questions) == 100 and min(letters[a] for a in "ABCD") > 10, letters
    assert questions == evaluation.load_benchmark("gpqa"), "and the same again"


def test_a_null_option_is_left_out_and_a_twin_of_the_right_answer_is_right():
    known = evaluation.BENCHMARKS["gpqa"]
    row = gpqa(1)[0]
    record = evaluation.record_of("gpqa", known, row)
    question = evaluation.read_question(record, "row 0", 0)
    assert sorted(question.choices) == ["chalk 0", "granite 0", "slate 0"]
    twins = evaluation.record_of("gpqa", known, {**row, "Incorrect Answer 1": "granite 0 "})
    question = evaluation.read_question(twins, "row 0", 0)
    assert sorted(question.choices[ord(a) - 65] for a in question.references) == ["granite 0"] * 2
    unknown = evaluation.record_of("gpqa", known, {**row, "Correct Answer": None})
    with pytest.raises(ValueError, match="no answer"):
        evaluation.read_question(unknown, "row 0", 0)
    other_case = evaluation.record_of("gpqa", known, {**row, "Incorrect Answer 1": "Granite 0"})
    assert len(evaluation.read_question(other_case, "row 0", 0).references) == 1


def test_options_of_an_object_keep_their_letters(hub):
    question = evaluation.load_benchmark("medqa")[0]
    assert question.choices[2] == "rest" and question.references == ["C"]
    assert question.text.endswith("\nC) rest\nD) a walk")


def test_gaia_runs_the_questions_without_a_file_grouped_by_level(hub, monkeypatch, capsys):
    """165 invented rows, every fourth with a file: 124 are left, which is not the paper's 127."""
    monkeypatch.setenv("HF_TOKEN", "t-" + "o" * 8)
    questions = evaluation.load_benchmark("gaia")
    assert len(questions) == 124 and {q.kind for q in questions} == {"gaia"}
    assert {q.group for q in questions} == {"GAIA level 1", "GAIA level 2", "GAIA level 3"}
    assert "124 questions, the paper runs 127" in capsys.readouterr().err


def test_all_means_all_and_names_may_be_listed(hub, monkeypatch):
    both = evaluation.load_named("bamboogle,aime24,aime24")
    assert len(both) == 155 and len({q.id for q in both}) == 155
    file = "/datasets/RUC-NLPIR/FlashRAG_datasets/resolve/main/bamboogle/test.jsonl"
    assert [request.path for request in hub.requests].count(file) == 1
    with pytest.raises(ValueError, match="aime24,hotpot cannot be read.*2wiki.*to measure"):
        evaluation.load_named("aime24,hotpot")
    hub.requests.clear()
    with pytest.raises(ValueError, match="GAIA is gated"):
        evaluation.load_named("all")
    assert not hub.requests, "the missing token shows before anything is loaded"
    monkeypatch.setenv("HF_TOKEN", "t-" + "o" * 8)
    groups = collections.Counter(q.source for q in evaluation.load_named("all"))
    assert list(groups) == list(evaluation.BENCHMARKS) and groups["2wiki"] == 100


def test_a_set_that_has_grown_is_said_to_be_another_sample(hub, capsys):
    questions = evaluation.load_benchmark("musique")
    assert len(questions) == 100 and questions[0].id.endswith("/250")
    assert "250 rows, not 2417" in capsys.readouterr().err


def test_an_id_that_comes_twice_counts_once(hub, monkeypatch, capsys):
    monkeypatch.setitem(SETS, "Maxwell-Jia/AIME_2024/default/train", [*AIME[:29], AIME[0]])
    assert len(evaluation.load_benchmark("aime24")) == 29
    assert "2024-I-0 comes a second time" in capsys.readouterr().err


def test_a_set_without_any_usable_row_is_refused(hub, monkeypatch):
    nothing = [{**row, "Answer": ""} for row in AIME]
    monkeypatch.setitem(SETS, "Maxwell-Jia/AIME_2024/default/train", nothing)
    with pytest.raises(ValueError, match="no row that can be asked. AIME24, row 0: no answer"):
        evaluation.load_benchmark("aime24")


def test_rows_without_an_answer_are_left_out_with_a_note(hub, monkeypatch, capsys):
    empty = [{**AIME[0], "Answer": None}, *AIME[1:]]
    monkeypatch.setitem(SETS, "Maxwell-Jia/AIME_2024/default/train", empty)
    assert len(evaluation.load_benchmark("aime24")) == 29
    said = capsys.readouterr().err
    assert "1 rows left out" in said and "row 0: no answer" in said


# --- Game of 24 --------------------------------------------------------------------------------


def test_exactly_1362_sets_of_four_numbers_make_24():
    """The number that is known for this game; and for 60 of all 1,820, an oracle that tries every
    order, operation and placing of parentheses."""

    def makes_24(values):
        if len(values) == 1:
            return values[0] == 24
        for a, b in itertools.permutations(range(len(values)), 2):
            rest = [v for i, v in enumerate(values) if i not in (a, b)]
            x, y = values[a], values[b]
            results = [x + y, x - y, x * y] + ([x / y] if y else [])
            if any(makes_24([*rest, result]) for result in results):
                return True
        return False

    puzzles = evaluation.solvable_puzzles()
    assert len(puzzles) == len(set(puzzles)) == 1362
    every = list(itertools.combinations_with_replacement(range(1, 14), 4))
    for numbers in random.Random(0).sample(every, 60):
        assert (" ".join(map(str, numbers)) in puzzles) == makes_24(list(map(Fraction, numbers)))


def test_offline_game_of_24_needs_no_file(hub):
    questions = evaluation.load_benchmark("gameof24", offline=True)
    assert not hub.requests and len(questions) == 100
    assert {q.source for q in questions} == {"gameof24 (enumerated)"}
    assert questions == evaluation.load_benchmark("gameof24", offline=True)
    puzzles = evaluation.solvable_puzzles()
    for question in questions:
        puzzle = " ".join(map(str, question.numbers))
        assert puzzle in puzzles
        assert question.id == f"gameof24/{puzzle.replace(' ', '-')}/1362"
        assert ", ".join(map(str, question.numbers[:3])) in question.text
        assert question.kind == "game24" and question.references == ["24"]


def test_the_public_list_gives_its_rows_900_to_999(hub):
    questions = evaluation.load_benchmark("gameof24")
    listed = [" ".join(map(str, q.numbers)) for q in questions]
    assert listed == evaluation.solvable_puzzles()[::-1][900:1000]
    assert evaluation.load_benchmark("gameof24", offline=True) == questions, "from the cache"


# --- What a server may do ----------------------------------------------------------------------


@pytest.mark.parametrize("status, code", [
    (500, ""), (500, "ResponseNotReady"), (500, "UnexpectedApiError"), (503, ""), (429, ""),
    (500, "AuthCheckHubRequestError"), (502, "")])
def test_what_may_pass_is_tried_again(hub, status, code):
    hub.faults = [fault(status, code), (status, {}, b"<html>busy</html>")]
    assert len(evaluation.load_benchmark("aime24")) == 30
    assert len(hub.requests) == 4, "two faults, the count, the page"


@pytest.mark.parametrize("status, code, says", [
    (401, "ExternalUnauthenticatedError", "accept its terms"),
    (403, "", "accept its terms"),
    (404, "ExternalAuthenticatedError", "accept its terms"),
    (404, "RenamedDatasetError", "new name"),
    (404, "ResponseNotFound", "says 404 ResponseNotFound: so it is"),
    (422, "InvalidParameter", "so it is"),
    (500, "DatasetGenerationError", "DatasetGenerationError"),
    (501, "DatasetWithScriptNotSupportedError", "so it is"),
])
def test_what_is_for_good_is_said_at_once(hub, status, code, says):
    hub.faults = [fault(status, code)]
    with pytest.raises(ValueError, match=says):
        evaluation.load_benchmark("aime24")
    assert len(hub.requests) == 1 and not hub.cache.exists()


def test_a_host_that_stays_down_ends_in_one_sentence(hub):
    hub.faults = [(503, {}, b"<html><body>503 Service Temporarily Unavailable</body></html>")] * 9
    with pytest.raises(ValueError, match="read now: try again later .*says 503") as caught:
        evaluation.load_benchmark("aime24")
    assert len(hub.requests) == evaluation.TRIES and "html" not in str(caught.value)


def test_waits_as_long_as_the_server_says_but_not_for_ever(hub, monkeypatch):
    waits = []
    monkeypatch.setattr(evaluation.time, "sleep", waits.append)
    hub.faults = [fault(429, Retry_After="7"), fault(429, RateLimit='"api";r=0;t=55')]
    evaluation.load_benchmark("aime24")
    assert waits[:2] == [7, 56]
    hub.faults = [fault(429, Retry_After="4000")]
    with pytest.raises(ValueError, match="try again later"):
        evaluation.load_benchmark("amc23")


def test_pages_that_come_short_and_out_of_order_are_put_together(hub):
    def change(page):
        page["rows"] = page["rows"][:7][::-1]
        return page

    hub.change = change
    questions = evaluation.load_benchmark("aime24")
    assert [q.id for q in questions] == [f"aime24/{i}/30" for i in range(30)]
    assert len(hub.requests) == 1 + 5, "30 rows, seven at a time"


@pytest.mark.parametrize("change, says", [
    (lambda page: {**page, "partial": True}, "Only a part"),
    (lambda page: {**page, "rows": []}, "leaves out row 0"),
    (lambda page: {**page, "rows": [{**r, "truncated_cells": ["Problem"]} for r in page["rows"]]},
     "Problem comes cut short"),
    (lambda page: {**page, "rows": [{**r, "row": {"ID": 1, "Text": ""}} for r in page["rows"]]},
     "no column 'Problem'"),
    (lambda page: {"error": "no rows here"}, "another shape"),
    (lambda page: [], "another shape"),
    (lambda page: {**page, "rows": [{"row": r["row"]} for r in page["rows"]]}, "another shape"),
    (lambda page: {**page, "num_rows_total": None}, "another shape"),
    (lambda page: {**page, "num_rows_total": 30 + len(page["rows"])}, "changed while"),
])
def test_a_page_that_cannot_be_trusted_is_refused(hub, change, says):
    hub.change = change
    with pytest.raises(ValueError, match=says):
        evaluation.load_benchmark("aime24")
    assert not hub.cache.exists(), "and nothing of it is kept"


def test_a_cut_cell_that_nobody_reads_does_no_harm(hub):
    hub.change = lambda page: {**page, "rows": [
        {**row, "truncated_cells": ["Solution"]} for row in page["rows"]]}
    assert len(evaluation.load_benchmark("aime24")) == 30


def test_class_labels_come_back_as_their_names(hub):
    """The cell is a number, the names stand in the features; -1 means that there is none."""

    def change(page):
        label = {"names": [str(i) for i in range(100)], "_type": "ClassLabel"}
        page["features"][3]["type"] = label
        for row in page["rows"]:
            row["row"] = {**row["row"], "Answer": int(row["row"]["Answer"])}
        return page

    hub.change = change
    assert evaluation.load_benchmark("aime24")[4].references == ["37"]


def test_a_page_that_is_too_big_is_asked_for_in_smaller_pieces(hub):
    right = hub.answer

    def answer(request):
        if int(request.asked["length"]) > 10:
            return fault(500, "TooBigContentError")
        return right(request)

    hub.answer = answer
    assert len(evaluation.load_benchmark("aime24")) == 30


def test_nothing_but_html_where_a_file_should_be_is_refused_and_not_kept(hub):
    hub.files["bamboogle/test.jsonl"] = b"<html>maintenance</html>"
    with pytest.raises(ValueError, match="not JSON"):
        evaluation.load_benchmark("bamboogle")
    assert not hub.cache.exists()


# --- Gated sets and the token ------------------------------------------------------------------


def test_a_gated_set_without_a_token_is_one_sentence_and_no_request(hub):
    with pytest.raises(ValueError) as caught:
        evaluation.load_benchmark("gpqa")
    assert str(caught.value) == (
        f"GPQA is gated: accept its terms at {hub.base}/datasets/Idavidrein/gpqa, and set "
        "HF_TOKEN to a token of that account.")
    assert not hub.requests


def test_the_token_goes_to_gated_sets_of_the_hub_only_and_is_written_nowhere(
        hub, monkeypatch, capsys):
    token = "t-" + "k" * 12
    monkeypatch.setenv("HF_TOKEN", token)
    evaluation.load_benchmark("aime24")
    assert not any("Authorization" in r.headers for r in hub.requests), "an open set needs none"
    hub.requests.clear()
    evaluation.load_benchmark("gpqa")
    assert {r.headers["Authorization"] for r in hub.requests} == {f"Bearer {token}"}
    hub.faults = [fault(404, "ExternalAuthenticatedError")]
    with pytest.raises(ValueError, match="accept its terms.*says 404") as caught:
        evaluation.load_benchmark("gaia")
    written = "".join(path.read_text() for path in hub.cache.iterdir())
    said = capsys.readouterr()
    assert token not in written + said.out + said.err + str(caught.value)


def test_a_redirect_to_another_host_is_followed_without_the_token(hub, monkeypatch):
    other = SimpleNamespace(requests=[], answer=rows_answer)
    httpd = serve(other)
    monkeypatch.setenv("HF_TOKEN", "t-" + "k" * 12)

    def answer(request):
        query = "&".join(f"{name}={value}" for name, value in request.asked.items())
        return 302, {"Location": f"{other.base}/rows?{query}"}, b""

    hub.answer = answer
    evaluation.load_benchmark("gpqa")
    httpd.shutdown()
    httpd.server_close()
    assert all("Authorization" in request.headers for request in hub.requests)
    assert other.requests and not any("Authorization" in r.headers for r in other.requests)


def test_a_token_with_a_line_break_in_it_is_refused_without_showing_it(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "t-secret\nX: y")
    with pytest.raises(ValueError, match="HF_TOKEN holds") as caught:
        evaluation.load_benchmark("gpqa")
    assert "secret" not in str(caught.value) and not hub.requests


# --- The cache ---------------------------------------------------------------------------------


def test_a_set_is_loaded_once_and_then_offline(hub, monkeypatch):
    first = evaluation.load_benchmark("aime24")
    asked = len(hub.requests)
    assert evaluation.load_benchmark("aime24", offline=True) == first
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert evaluation.load_benchmark("aime24") == first and len(hub.requests) == asked
    with pytest.raises(ValueError, match="amc23 is not in the cache .*without --offline"):
        evaluation.load_benchmark("amc23")
    assert len(hub.requests) == asked
    (seal,) = hub.cache.glob("*.sha256")
    digest, name = seal.read_text().split()
    assert digest == hashlib.sha256((hub.cache / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("damage", ["cut", "no checksum", "an empty checksum"])
def test_a_damaged_cache_is_noticed_and_loaded_again(hub, capsys, damage):
    first = evaluation.load_benchmark("aime24")
    (seal,) = hub.cache.glob("*.sha256")
    body = seal.with_suffix(".json")
    if damage == "cut":
        body.write_bytes(body.read_bytes()[:-9])
    elif damage == "no checksum":
        seal.unlink()
    else:
        seal.write_text("")
    with pytest.raises(ValueError, match="not in the cache"):
        evaluation.load_benchmark("aime24", offline=True)
    assert evaluation.load_benchmark("aime24") == first
    assert "is damaged, and loaded again" in capsys.readouterr().err
    assert evaluation.load_benchmark("aime24", offline=True) == first
    assert not list(hub.cache.glob("*.tmp"))


def test_no_cache_reads_anew_and_keeps_nothing(hub):
    evaluation.load_benchmark("aime24", no_cache=True)
    asked = len(hub.requests)
    evaluation.load_benchmark("aime24", no_cache=True)
    assert len(hub.requests) == 2 * asked and not hub.cache.exists()


def test_a_cache_that_cannot_be_written_is_a_sentence(hub, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="AGENTFLOW_CACHE.*--no_cache"):
        evaluation.load_benchmark("aime24")


# --- Training data -----------------------------------------------------------------------------


def test_training_data_is_half_and_half_in_turn_and_only_as_much_as_is_asked_for(hub):
    """90 questions to train on: 45 a set, and a tenth more to hold out, 50 a set. DeepMath's come
    from one page of 100 rows, NQ is one file."""
    questions = evaluation.load_training("nq,deepmath", 90)
    assert [q.source for q in questions] == ["nq", "deepmath"] * 50
    nq, math_one = questions[:2]
    assert nq.text.startswith("who tends lighthouse") and nq.text.endswith("?")
    assert nq.kind == "text" and math_one.kind == "math"
    double = int(math_one.text.split()[1].rstrip("."))
    assert math_one.references == [str(2 * double)] and math_one.reward(f"\\boxed{{{2 * double}}}")
    paths = [r.path.rpartition("/")[2] for r in hub.requests]
    assert paths == ["train.jsonl", "rows", "rows"] and hub.requests[-1].asked["length"] == "50"
    kept = next(hub.cache.glob("deepmath*.json")).read_text()
    assert questions == evaluation.load_training("nq,deepmath", 90) and len(hub.requests) == 3
    assert set(json.loads(kept)["rows"][0][1]) == {"prompt", "solution"}


def test_a_question_of_nq_ends_in_one_question_mark():
    known = evaluation.TRAINING["nq"]
    for asked in ("who tends it", " who tends it ?", "who tends it? ", "who tends it??"):
        row = {"id": "1", "question": asked, "golden_answers": ["x"]}
        assert evaluation.record_of("nq", known, row)["question"].strip() == "who tends it?"
    assert not evaluation.record_of("nq", known, {**row, "question": None})["question"]


def test_deepmath_slices_are_whole_pages_spread_over_the_set():
    places = evaluation.places_to_read("deepmath", 97870, 400)
    pages = {place // 100 for place in places}
    assert len(places) == 400 and len(pages) == 4 and max(pages) - min(pages) > 100
    last = evaluation.places_to_read("deepmath", 450, 450)
    assert last == list(range(450)), "the last page is short"


def test_a_benchmark_is_not_trained_on(hub):
    with pytest.raises(ValueError, match="train on a benchmark.*nq, deepmath"):
        evaluation.load_training("nq,aime24", 10)
    with pytest.raises(ValueError, match="nq,hotpot cannot be read"):
        evaluation.load_training("nq,hotpot", 10)


def test_a_run_on_named_sets_goes_on_with_the_same_questions_and_is_measured_again(
        hub, tmp_path, capsys):
    """Two steps of two questions need four; --resume with six steps must not load twelve."""
    folder = tmp_path / "run"
    common = ["--data", "nq,deepmath", "--num_questions", "2", "--num_generations", "2",
              "--max_turns", "1", "--output_dir", str(folder)]
    assert train.main([*common, "--max_steps", "2"]) == 0
    config = json.loads((folder / "run_config.json").read_text())
    assert config["data_questions"] == 4 and config["data"] == "nq,deepmath"
    assert train.main([*common, "--max_steps", "3", "--resume", "--offline"]) == 0
    again = json.loads((folder / "run_config.json").read_text())
    assert (again["data_hash"], again["data_questions"]) == (config["data_hash"], 4)
    said = capsys.readouterr()
    assert evaluation.main(["--adapter", str(folder)]) == 0
    said = capsys.readouterr()
    assert "changed since" not in said.err and "1 questions" in said.out


# --- Question files ----------------------------------------------------------------------------


def one(record):
    return evaluation.read_question(record, "file, line 1", 1)


def test_options_may_be_a_list_or_an_object_and_the_answer_a_letter_an_index_or_a_text():
    """However it is written, Lyon is B."""
    listed = {"question": "Which?", "choices": ["Paris", "Lyon", "Nice"]}
    for answer in ("B", "b", "(B)", "B)", "B.", 1, "1", "Lyon", "lyon", " Lyon\n", "B. Lyon"):
        question = one({**listed, "answer": answer})
        assert question.references == ["B"], answer
        assert question.kind == "mc" and question.text == "Which?\nA) Paris\nB) Lyon\nC) Nice"
    keyed = {"question": "Which?", "options": {"1": "Paris", "2": "Lyon", "3": None}}
    assert [one({**keyed, "answer": a}).references for a in (2, "2", "Lyon")] == [["B"]] * 3
    marked = {"question": "Which?", "choices": ["A. Paris", "B. Lyon"], "answer": "Lyon"}
    assert one(marked).choices == ("Paris", "Lyon") and one(marked).references == ["B"]
    nulls = {"question": "Which?", "choices": [None, "Paris", "Lyon"], "answer": "C"}
    assert one(nulls).references == ["B"], "what was C stands at B, since nothing was A"
    case = {"question": "Which?", "choices": ["pH", "PH"], "answer": "PH"}
    assert one(case).references == ["B"], "case decides where it can"


@pytest.mark.parametrize("record, says", [
    ({"choices": ["2", "4", "1"], "answer": 2}, "2 may mean more than one"),  # index 2, or "2"
    ({"choices": ["B", "A"], "answer": "A"}, "'A' may mean more than one"),
    ({"choices": ["x", "x"], "answer": "x"}, "'x' may mean more than one"),
    ({"choices": ["x", "y"], "answer": "z"}, "'z' is none of the choices"),
    ({"choices": ["x", "y"], "answer": 2}, "2 is none of the choices"),
    ({"choices": ["x"], "answer": "A"}, "choices must be"),
    ({"choices": "xy", "answer": "A"}, "choices must be"),
    ({"choices": ["x", " "], "answer": "A"}, "choices must be"),
    ({"choices": ["x", ["y"]], "answer": "A"}, "choices must be"),
    ({"choices": ["x"] * 27, "answer": "A"}, "choices must be"),
    ({"choices": ["x", "y"], "kind": "text", "answer": "A"}, "choices and kind mc"),
    ({"kind": "mc", "answer": "A"}, "choices and kind mc"),
    ({"kind": "lookup", "answer": "A"}, "kind is 'lookup'.*group"),
    ({"kind": ["mc"], "answer": "A"}, "kind is"),
    ({"metric": "bleu", "answer": "A"}, "metric is 'bleu'"),
    ({"kind": "game24", "numbers": [1, 2, 3], "answer": "24"}, "numbers is .*four integers"),
    ({"kind": "math"}, "no answer; one of answer"),
    ({"answer": ["", None]}, "no answer"),
])  # fmt: skip
def test_a_record_that_cannot_be_scored_names_row_and_key(record, says):
    with pytest.raises(ValueError, match=says) as caught:
        one({"question": "Which?", **record})
    assert "file, line 1" in str(caught.value)


def test_what_a_record_says_of_its_scoring_is_kept():
    question = one({"question": "q", "answer": "blue sky", "kind": "text", "metric": "f1",
                    "group": 2, "id": 7})
    assert (question.kind, question.metric, question.group, question.id) == ("text", "f1", "2", "7")
    assert question.reward("<answer>blue</answer>") == pytest.approx(2 / 3)
    game = one({"question": "Make 24.", "kind": "game24", "numbers": [4, 5, 6, 10]})
    assert game.numbers == (4, 5, 6, 10) and game.references == ["24"]
    chat = one({"prompt": [{"role": "user", "content": "q"}], "solution": "$5$"})
    assert chat.text == "q" and chat.reward("\\boxed{5}") == 1.0


def test_an_instruction_about_tags_that_is_glued_to_a_question_is_dropped():
    glued = ("Who painted it?When ready, output the final answer enclosed in <answer> and "
             "</answer> tags. Do not generate any content after the </answer> tag.")
    assert one({"question": glued, "answer": "x"}).text == "Who painted it?"
    mine = "Put the <answer> tags in order: b, a."
    assert one({"question": mine, "answer": "x"}).text == mine


def test_every_kind_reaches_the_scorer_with_what_it_needs(monkeypatch):
    asked = []
    monkeypatch.setattr(evaluation, "score", lambda *a, **how: asked.append((*a, how)) or 0.5)
    one({"question": "q", "choices": ["x", "y"], "answer": "y"}).reward("B")
    one({"question": "q", "kind": "game24", "numbers": [1, 2, 3, 4]}).reward("r")
    one({"question": "q", "kind": "gaia", "answer": ["7", "8"]}).reward("r")
    none = {"choices": None, "numbers": None, "metric": None}
    assert asked == [("mc", "B", ["B"], {**none, "choices": ["x", "y"]}),
                     ("game24", "r", ["24"], {**none, "numbers": [1, 2, 3, 4]}),
                     ("gaia", "r", ["7", "8"], none)]


def test_of_a_few_questions_one_is_held_out_all_the_same():
    few = [evaluation.Question(f"q{i}", "q", ["a"]) for i in range(3)]
    training, held_out = evaluation.split_questions(few)
    assert len(training) == 2 and len(held_out) == 1
    assert evaluation.split_questions(few[:1]) == (few[:1], []) or few[:1] == held_out


# --- A reward function of one's own ------------------------------------------------------------


def write(path, code):
    path.write_text(code, encoding="utf-8")
    return f"{path}:judge"


def asked(**more):
    return evaluation.Question("1", "q", ["5"], **more)


@pytest.mark.parametrize("value, expected", [
    ("1", 1.0), ("0.25", 0.25), ("True", 1.0), ("numpy.float32(0.5)", 0.5),
    ("numpy.bool_(True)", 1.0), ("torch.tensor(0.5)", 0.5), ("fractions.Fraction(1, 4)", 0.25)])
def test_any_number_from_0_to_1_is_a_reward(tmp_path, value, expected):
    code = f"import fractions, numpy, torch\ndef judge(response, question):\n    return {value}\n"
    (question,) = evaluation.with_reward([asked()], write(tmp_path / "own.py", code))
    assert question.reward("anything") == expected == question.reward(None)


@pytest.mark.parametrize("code, says", [
    ("def other(r, q): return 1", "has no function 'judge'"),
    ("judge = 5", "has no function 'judge'"),
    ("def judge(:", "cannot be imported .SyntaxError"),
    ("import no_such_package_at_all", "cannot be imported .ModuleNotFoundError"),
    ("raise SystemExit", "cannot be imported .SystemExit"),
    ("def judge(r): return 1", "on a trial the function raised TypeError"),
    ("def judge(r, q): return 1 / 0", "on a trial the function raised ZeroDivisionError"),
    ("def judge(r, q): return float('nan')", "on a trial the function returned nan"),
    ("def judge(r, q): return 'yes'", "on a trial the function returned 'yes'"),
    ("def judge(r, q): return None", "on a trial the function returned None"),
    ("def judge(r, q): return 2", "no number from 0 to 1"),
    ("import numpy\ndef judge(r, q): return numpy.ones(2)", "on a trial"),
])
def test_a_reward_function_that_cannot_work_is_refused_at_the_start(tmp_path, code, says):
    with pytest.raises(ValueError, match=says):
        evaluation.with_reward([asked()], write(tmp_path / "own.py", code))


def test_a_reward_file_that_is_not_there_is_named(tmp_path):
    for spec in (f"{tmp_path}/none.py:judge", "judge", f"{tmp_path}:judge", ""):
        if spec:
            with pytest.raises(ValueError, match="FILE.py:FUNCTION"):
                evaluation.with_reward([asked()], spec)
    assert evaluation.with_reward([asked()], "") == [asked()], "no function: the rule judges"


def test_a_reward_that_fails_on_the_way_is_nan_and_said_once(tmp_path):
    code = "def judge(response, question): return len(response.split()) / (response != 'x')\n"
    code = code.replace("len(response.split())", "0.5")
    (question,) = evaluation.with_reward([asked()], write(tmp_path / "own.py", code))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        assert all(math.isnan(question.reward("x")) for _ in range(3))
    assert len(said) == 1 and "ZeroDivisionError" in str(said[0].message)
    assert question.reward("y") == 0.5


def test_a_reward_function_may_ask_for_the_rule_and_use_dataclasses(tmp_path):
    code = ("from __future__ import annotations\nimport dataclasses\n"
            "@dataclasses.dataclass\nclass Mark:\n    value: float\n"
            "def judge(response, question):\n"
            "    return Mark(0.5 + question.reward(response) / 2).value\n")
    (question,) = evaluation.with_reward([asked()], write(tmp_path / "own.py", code))
    assert question.reward("<answer>5</answer>") == 1.0 and question.reward("6") == 0.5


def test_a_run_with_its_own_reward_counts_failures_and_remembers_the_function(tmp_path, capsys):
    """Every second reply is judged 0.25, the others fail: `rollouts/failed` is half of them."""
    code = ("calls = 0\ndef judge(response, question):\n    global calls\n    calls += 1\n"
            "    if calls % 2 == 0: raise RuntimeError('judge is down')\n    return 0.25\n")
    spec = write(tmp_path / "own.py", code)
    few = tmp_path / "few.jsonl"
    few.write_bytes(b"".join((DATA / "heldout.jsonl").read_bytes().splitlines(True)[:4]))
    folder = tmp_path / "run"
    common = ["--num_questions", "2", "--num_generations", "4", "--eval_data", str(few),
              "--output_dir", str(folder)]
    with pytest.warns(UserWarning, match="judge is down"):
        assert train.main([*common, "--max_steps", "1", "--reward", spec]) == 0
    (metrics,) = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert metrics["rollouts/failed"] == 4 and metrics["reward"] == 0.25
    rewards = [json.loads(line)["reward"] for line in (folder / "rollouts/1.jsonl").open()]
    assert sorted(rewards, key=str) == [0.25] * 4 + [None] * 4
    assert json.loads((folder / "run_config.json").read_text())["reward"] == spec
    assert train.main([*common, "--max_steps", "2", "--resume", "--reward", ""]) == 2
    assert f"started with reward = {spec!r}" in capsys.readouterr().err


def test_the_configs_of_both_commands_have_the_flag():
    for config in (train.Config, evaluation.EvalConfig):
        assert "reward" in {entry.name for entry in dataclasses.fields(config)}
