"""Scores of answers: text by exact match and F1, numbers exactly. They are the training reward."""

import time

import pytest

import eval as evaluation
from tests import cases

RECORDED = cases.read(cases.DEFAULT)


@pytest.mark.parametrize(
    "case", [case for case in RECORDED if case["kind"] == "text"], ids=lambda case: case["id"]
)
def test_recorded_text_case_scores_as_expected(case):
    assert cases.same(cases.run_score(case), case["expected"])


def _score(kind, answer, reference, **how):
    return evaluation.score(kind, answer, reference, extracted=True, **how)


@pytest.mark.parametrize(
    "said, gold",
    [
        ("The Beatles", "beatles"),
        ("“Zürich”, Switzerland!", "zürich switzerland"),
        ("138,535", "138535"),
        ("3.14.", "(3.14)"),
        ("\u22125", "-5"),
        ("U.S.A.", "USA"),
        ("A", "a"),  # nothing is left without articles, so they are kept
        ("The The", "the the"),
        (" Titan   IIIE ", "titan iiie"),
    ],
)
def test_text_that_differs_in_dress_only_matches(said, gold):
    assert _score("text", said, gold) == 1.0


@pytest.mark.parametrize(
    "said, gold",
    [
        ("31.4", "314"),
        ("1.5", "15"),
        ("-5", "5"),
        (".5", "5"),
        ("11", "1"),
        ("not Mark Twain", "Mark Twain"),
        ("Mark", "Mark Twain"),
        ("Paris London Rome", "Paris"),
        ("", "Paris"),
        ("", "The"),
        ("...", "a"),
        ("the", "The The"),
    ],
)
def test_text_that_says_something_else_does_not_match(said, gold):
    assert _score("text", said, gold) == 0.0


def test_f1_counts_common_words_and_takes_the_best_alias():
    """"new york new york" and "new york": 2 common of 4 and 2 words, 2·2/(4+2) = 2/3.
    "barack obama" and "barack hussein obama": 2·2/(2+3) = 0.8; and "obama" alone: 2·1/3."""
    assert _score("text", "New York New York", "New York", metric="f1") == pytest.approx(2 / 3)
    aliases = ["Obama", "Barack Hussein Obama"]
    assert _score("text", "Barack Obama", aliases, metric="f1") == pytest.approx(0.8)
    assert evaluation.text_scores("Barack Obama", aliases) == (0.0, pytest.approx(0.8))


def test_yes_and_no_must_be_exact_under_the_hotpot_rule_only():
    """"yes they are" and "yes": F1 is 2·1/(3+1) = 0.5, and 0 under the rule, in both directions."""
    for said, gold in [("yes, they are", "yes"), ("no", "no one")]:
        assert _score("text", said, gold, metric="f1_hotpot") == 0.0
        assert 0.0 < _score("text", said, gold, metric="f1") < 1.0
    assert _score("text", "Yes.", "yes", metric="f1_hotpot") == 1.0


@pytest.mark.parametrize(
    "said, gold",
    [
        ("33", 33),
        ("33.0", 33),
        ("073", "73"),
        ("+5", "5"),
        ("-0", "0"),
        ("8,000", "8000"),
        ("1{,}234{,}567.50", "1234567.5"),
        ("2/4", "0.5"),
        ("-1/2", "1/-2"),
        ("1/3", "2/6"),
        ("50\\%", "50%"),
        ("$73$", "73."),
        ("**73**", "73"),
        (".5", "0.5"),
        ("\\$1,000", "1000"),
        ("12345678901234567890", "12345678901234567890.0"),
        ("x + 1", "x+1"),
        ("5", ["4", "5"]),
    ],
)
def test_equal_numbers_score(said, gold):
    assert _score("math", said, gold) == 1.0


@pytest.mark.parametrize(
    "said, gold",
    [
        ("1000001", "1000000"),
        ("0.3333333333333333", "1/3"),
        ("12345678901234567890", "12345678901234567891"),
        ("2/3", "2"),
        ("1,2,3", "123"),
        ("10,11", "1011"),
        ("8,000", "8"),
        ("1 or 2", "1"),
        ("5/0", "5"),
        ("5/", "5"),
        ("", "0"),
        ("", ""),
        ("None", "0"),
        ("nan", "0"),
        ("x+1", "x-1"),
        ("--5", "5"),
        (".", "0"),
    ],
)
def test_unequal_numbers_do_not_score(said, gold):
    assert _score("math", said, gold) == 0.0


def test_huge_powers_and_long_numbers_are_compared_as_text_at_once():
    start = time.perf_counter()
    for said in ("9**9**9**9", "10^{10^{10}}", "1e999999999", "9" * 1_000_000, "1/" * 300_000):
        assert _score("math", said, "7") == 0.0
    assert time.perf_counter() - start < 2.0


def test_whole_reply_counts_for_text_but_not_for_math():
    assert evaluation.score("text", "Paris.", "Paris") == 1.0
    assert evaluation.score("text", "<think>London?</think>Paris.", "Paris") == 1.0
    assert evaluation.score("text", "It is Paris.", "Paris") == 0.0
    assert evaluation.score("math", "73", "73") == 0.0
    assert evaluation.score("math", "<answer>73</answer>", "73") == 1.0


@pytest.mark.parametrize("kind", ["text", "math"])
@pytest.mark.parametrize("reference", ["", "answer answer", 0, ["0", ""], None, []])
@pytest.mark.parametrize("reply", [None, "", "<answer></answer>", "<answer> </answer>", "\\fbox{}"])
def test_missing_or_empty_answer_never_scores(kind, reference, reply):
    assert evaluation.score(kind, reply, reference) == 0.0
    assert evaluation.score(kind, None, reference, extracted=True) == 0.0


def test_kinds_and_metrics_that_are_not_there_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="unknown kind 'poem'"):
        evaluation.score("poem", "A", "A")
    with pytest.raises(ValueError, match="unknown metric 'bleu'"):
        evaluation.score("text", "A", "A", metric="bleu")


@pytest.mark.parametrize(
    "answer, response, reward",
    [
        (0.00001, "0.00001", 1),
        (1e20, "100000000000000000000", 1),
        (["7", "seven"], "7.0", 1),  # each alias by its own kind
        (["7", "seven"], "Seven", 1),
        (["7", "seven"], "8", 0),
        (True, "true", 1),
    ],
)
def test_a_reference_from_a_json_file_is_compared_as_what_it_is(answer, response, reward):
    question = evaluation.read_question({"question": "q", "answer": answer}, "file, line 1", 1)
    assert question.reward(f"<answer>{response}</answer>") == reward
