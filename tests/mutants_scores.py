"""Wrong scorers, each of a kind that public scorers have had."""

import re
from fractions import Fraction

import eval as evaluation
from tests.mutants import Mutant

right_value_of = evaluation.value_of
right_same_answer = evaluation.same_answer


def close_enough(a, b):
    """A relative tolerance: 1000001 is 1000000, and 3.14159265 is pi."""
    mp = evaluation.real_numbers()
    a, b = evaluation.as_real(mp, a), evaluation.as_real(mp, b)
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))


def positive_points_only(tree, point, real=False):
    return right_value_of(tree, point % 2, real)


def ends_do_not_count(said, gold):
    ends = {"(]": "()", "[)": "()", "[]": "()"}
    said, gold = (
        evaluation.Answer(ends.get(one.form, one.form), one.parts, one.unit) for one in (said, gold)
    )
    return right_same_answer(said, gold)


def order_never_counts(said, gold):
    if said.form == gold.form != "value" and len(said.parts) > 1:
        return evaluation.same_in_any_order(said.parts, gold.parts)
    return right_same_answer(said, gold)


def first_matches_for_all(first, second):
    return all(any(evaluation.same_answer(a, b) for b in second) for a in first)


def every_equation_is_its_last_side(left, right):
    return True


def unit_dropped(text):
    return re.sub(r"(?<=[\d)])\s*[A-Za-z%].*", "", text), ""


def first_option(text, choices):
    """The first option that contains the text, and A where none does."""
    text = (text or "").strip().lower()
    found = [i for i, option in enumerate(choices) if text in option.lower()]
    return "ABCDEFGHIJ"[found[0] if found else 0]


def list_without_its_length(prediction, reference):
    parts = zip(re.split("[,;]", prediction), re.split("[,;]", reference), strict=False)
    return all(evaluation.gaia_number(a) == evaluation.gaia_number(b) for a, b in parts)


def game_by_float(prediction, numbers):
    used = sorted(map(int, re.findall(r"\d+", prediction.split("=")[0])))
    try:
        return used == sorted(numbers) and int(eval(prediction.split("=")[0])) == 24
    except (SyntaxError, ZeroDivisionError, NameError, TypeError):
        return False


def correct_in_incorrect(text):
    return "correct" in (text or "").lower()


def infinity_for_words(text):
    return Fraction(10**400) if not re.search(r"\d", text) else Fraction(re.sub("[^0-9]", "", text))


MATH = "tests.test_math:test_"
DIFFERENT = MATH + "answers_that_say_something_else_are_not_equal_either_way"
EQUAL = MATH + "answers_that_say_the_same_are_equal_both_ways"
SCORE_MUTANTS = [
    Mutant("numbers within a tolerance", "eval", "same_value", close_enough, DIFFERENT),
    Mutant("positive points only", "eval", "value_of", positive_points_only, DIFFERENT),
    Mutant("interval ends ignored", "eval", "same_answer", ends_do_not_count, DIFFERENT),
    Mutant("tuples in any order", "eval", "same_answer", order_never_counts, DIFFERENT),
    Mutant("one item matches all", "eval", "same_in_any_order", first_matches_for_all, DIFFERENT),
    Mutant("2x = 10 is 10", "eval", "is_label", every_equation_is_its_last_side, DIFFERENT),
    Mutant("units dropped on both sides", "eval", "split_unit", unit_dropped, DIFFERENT),
    Mutant("no unit is ever read", "eval", "split_unit", lambda text: (text, ""), EQUAL),
    Mutant("first option that contains it", "eval", "chosen_letter", first_option,
           MATH + "a_reference_may_be_a_letter_or_the_text_and_case_may_tell_options_apart"),
    Mutant("GAIA lists of any length", "eval", "gaia_equal", list_without_its_length,
           MATH + "gaia_compares_a_number_a_list_or_a_text_as_the_reference_is"),
    Mutant("words are infinite numbers", "eval", "gaia_number", infinity_for_words,
           MATH + "gaia_compares_a_number_a_list_or_a_text_as_the_reference_is"),
    Mutant("24 by rounding down", "eval", "game24_equal", game_by_float,
           MATH + "every_expression_of_a_game_is_judged_as_its_exact_value_says"),
    Mutant("CORRECT inside INCORRECT", "eval", "parse_judge", correct_in_incorrect,
           MATH + "a_judge_is_read_in_the_place_of_its_verdict_and_else_not_at_all"),
]  # fmt: skip
