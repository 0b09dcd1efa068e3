"""Mathematical equality, options, GAIA, Game of 24 and verdicts: tables, sympy as an oracle, and
hostile input."""

import random
import string
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
import sympy

import eval as evaluation
from tests import cases

SCORED = ("math", "mc", "gaia", "game24", "parse_judge")


@pytest.mark.parametrize(
    "case",
    [case for case in cases.read(cases.DEFAULT) if case["kind"] in SCORED],
    ids=lambda case: case["id"],
)
def test_recorded_case_scores_as_expected(case):
    passed, found = cases.check(case)
    assert passed, found


# --- Mathematics: tables -------------------------------------------------------------------------

EQUAL = [
    (r"\dfrac12", "0.5"), (r"\frac1{2}", "0.5"), (r"\frac{1}2", "1/2"), (r"3\frac{1}{7}", "22/7"),
    ("-2 1/3", "-7/3"), ("1 1/2", "1.5"), (r"\left( 1, 2 \right]", "(1,2]"),
    (r"x \in [1,2)", "[1,2)"), (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)"),
    (r"\pm 3", "3,-3"), (r"x = \pm 3", "3,-3"), (r"2\pm\sqrt{3}", r"2+\sqrt3, 2-\sqrt3"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
    (r"\sqrt[3]{2}", "2^{1/3}"), (r"3\sqrt{2}", r"\sqrt{18}"), (r"2\pi", r"\pi*2"),
    (r"\log_2 8", "3"), (r"\log_{2}(8)", "3"), (r"\binom{5}{2}", "10"), ("5!", "120"),
    (r"1.5\times10^{-3}", "0.0015"), ("1e-3", "0.001"), ("5 or 6", "6 or 5"),
    ("x=1, x=2", "1, 2"), (r"x=1 \text{ or } x=2", r"\{1,2\}"), ("1:2", "1:2"), ("3:30", "3:30"),
    ("101_2", "101_{2}"), (r"0.\overline{3}", "1/3"), (r"0.1\overline{6}", "1/6"),
    ("5 meters", "5 m"), ("$5", "5"), ("5 dollars", r"\$5"), (r"12\text{ cm}^2", "12"),
    ("12 cm^2", r"12\text{ cm}^2"), ("50%", "0.5"), ("50%", "50"), ("0.5", "50%"),
    (r"\text{(13, 5)}", "(13,5)"), ("7", "7.0"), ("10^{-2}", "0.01"), ("2^3^2", "512"),
    ("-2^2", "-4"), ("(-2)^2", "4"), ("y=2x+1", "2x-y+1=0"), ("y = 2x + 1", "2x+1"),
    ("f(x)=x^2", "x^2"), ("x=5", "5"), ("5", "x=5"), ("2+3=5", "5"), ("3 > x", "x<3"),
    (r"1 \le x < 3", "[1,3)"), (r"x \geq 2", r"[2,\infty)"), ("i^2", "-1"), ("2+3i", "3i+2"),
    ("|x|", r"\sqrt{x^2}"), (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"\sin^2 x+\cos^2 x", r"\cos^2 x+\sin^2 x"), (r"\frac{1}{\sqrt2}", r"\frac{\sqrt{2}}{2}"),
    (r"e^{i\pi}", "-1"), ("5 million", "5000000"), ("2 dozen", "24"), ("7 apples", "7"),
    ("1,000", "1000"), ("1,000.5", "1000.5"), ("12,345,678", "12345678"), ("(1,234)", "(1,234)"),
    ("1000,2000", "1,000, 2,000"), ("2^{1000000}", "2^{1000000}"), ("1000!", "1000!"),
    ("((((((1))))))", "1"), ("nan", "nan"), ("inf", r"\infty"), ("0/0", "0/0"), ("x+y", "y+x"),
    ("ab", "a*b"), ("x_1+x_2", "x_2+x_1"), ("even", "even"), ("Yes", "yes"), ("pi", r"\pi"),
    (r"\frac{a}{b}c", r"\frac{ac}{b}"), ("1/2x", "x/2"),
    (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt6}"), (r"\cos(\pi/3)", "0.5"),
    ("(a+b)^2", "a^2+2ab+b^2"), ("(1,2),(3,4)", "(3,4),(1,2)"),
    (r"\{(1,2),(3,4)\}", r"\{(3,4),(1,2)\}"), ("5²", "25"), ("½", "0.5"), ("2½", "2.5"),
    (r"90^{\circ}", "90"), ("90 degrees", r"90^\circ"), ("25 °C", "25"), (r"\$32{,}348", "32348"),
    (r"\frac{3}{4}\text{ hours}", "0.75"), ("The answer is 33", "33"), ("x^{2}+2x", "x^2 + 2 x"),
    ("2x + 3y = 6", "6 = 3y+2x"), (r"\ln(e^2)", "2"), (r"\sqrt{4}", "2"), (r"\sqrt{-4}", "2i"),
    (r"\text{Monday}", "Monday"), (r"\text{A}", "A"), ("p - q", "p-q"), (r"3\cdot 4", "12"),
    ("$x^2$", "x^2"), (".5", "0.5"), ("5.", "5"), ("+5", "5"), ("[1,2]", r"\left[1,2\right]"),
    (r"\langle 1,2\rangle", "(1,2)"), (r"1\text{ and }2", "1,2"),
    (r"\frac{\pi}{4} \text{ radians}", r"\frac{\pi}{4}"), ("a=1,b=2", "1,2"),
    ("(x,y)=(1,2)", "(1,2)"), ("x=1,y=2", "(1,2)"), (r"10\%", "0.1"), (r"\frac{1}{2}\%", "0.005"),
    (r"3 \times 10^{8} m/s", "3*10^8"), ("3e8 m/s", "300000000"), (r"4\pi \text{ cm}^2", r"4\pi"),
    (r"\left\{1,2\right\}", r"\{2, 1\}"), (r"\lfloor 3.7\rfloor", "3"),
]  # fmt: skip
DIFFERENT = [
    ("(1,2)", "(2,1)"), ("3", "4"), ("1,2,3", "123"), ("1000001", "1000000"),
    ("11/2", "1 1/2"), (r"(-\infty,1)\cup(2,\infty)", r"(-\infty,1)\cup(3,\infty)"),
    (r"\pm 3", "{-3,3}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    ("6.283", r"2\pi"), ("x=1 or x=2", "{1,2}"), ("3:30", "3:03"), ("101_2", "101_3"),
    ("5 m", "5 cm"), ("forty-two", "42"), ("approximately 3.14", r"\pi"),
    ("approximately 3.14", "3.14"), ("12 cm", "12 cm^2"), ("5%", "50"), ("(3,4)", "[3,4]"),
    ("--5", "5"), ("5-", "5"), ("y=2x+1", "y=2x+2"), ("x=5", "y=5"), ("2x=10", "10"),
    ("2+3=6", "6"), ("x>2", r"[2,\infty)"), ("2-3i", "2+3i"), ("|x|", "x"), (r"\sqrt{x^2}", "x"),
    ("sin(x)^2+cos(x)^2", "1"), ("e^2", "7.389"), (r"\tan 45^\circ", "1"), ("5 squared", "5"),
    ("7 remainder 2", "7"), ("7 apples", "7 oranges"), ("1,00", "100"), ("1, 234", "1234"),
    ("9^9^9^9", "1"), ("2^{1000000}", "2^{1000001}"), ("(2^{10000})^{10000}", "0"),
    ("100000!", "5"), ("(" * 200 + "1" + ")" * 200, "1"), ("", ""), (" ", "0"), ("None", "0"),
    (r"-\infty", r"\infty"), ("0/0", "1"), ("1/0", r"\infty"), ("xy", "yx"), ("a/b", "b/a"),
    ("2x", "x"), ("x", "X"), ("even", "odd"), ("no", "on"), ("1,1,2", "1,2"), ("1,2,2", "1,1,2"),
    ("²", "2"), ("6:1", "6/1"), ("33 is the answer", "33"), ("0.333", "1/3"),
    ("0.33333333333333333333333333333333333333333333333", "1/3"),
    ("3.0000000000000000000000000000000000000000000000001", "3"), ("1/3", "0.3333"), ("A", "B"),
    ("2 3", "6"), ("23", "2 3"), ("3x4", "12"), ("12_{10}", "12"), ("5,", "5"), ("0x10", "16"),
    ("1_000", "1000"), ("{1,2}", r"\{1,2\}"), ("(0, 1]", "(0,1)"), ("a=1,b=2", "a=2,b=1"),
    ("12 inches", "1 foot"),
]  # fmt: skip


def test_answers_that_say_the_same_are_equal_both_ways():
    for said, gold in EQUAL:
        assert evaluation.math_equal(said, gold), (said, gold)
        assert evaluation.math_equal(gold, said), (gold, said)


def test_answers_that_say_something_else_are_not_equal_either_way():
    for said, gold in DIFFERENT:
        assert not evaluation.math_equal(said, gold), (said, gold)
        assert not evaluation.math_equal(gold, said), (gold, said)


# --- Mathematics: sympy as the oracle ------------------------------------------------------------

X, Y = sympy.symbols("x y")


def random_expression(rng):
    """A number or a formula of one of the kinds that answers have."""
    a, b, c = (sympy.Integer(rng.choice([-7, -3, -2, 2, 3, 5, 6, 11])) for _ in range(3))
    n = sympy.Integer(rng.choice([2, 3, 5, 6, 7, 10]))
    return rng.choice(
        [
            sympy.Rational(a, 1 + abs(b)) + c,
            a * sympy.sqrt(n) / abs(b) + c,
            sympy.sqrt(n) * sympy.sqrt(abs(a)) + b,
            a * sympy.pi / abs(b) + c,
            sympy.Integer(2) ** sympy.Rational(a, 3) * b,
            sympy.log(n) * a + sympy.exp(b / abs(c)),
            (X + a) * (X + b) / (X + 20),
            a * X**2 + b * X * Y + c,
            (X + a) ** 3 - b,
            sympy.sin(a * X) + c,
            (a * X + b * Y) / (X**2 + n),
            sympy.sqrt(X**2 + n) * a,
        ]
    )


def rewritten(rng, expression):
    """The same value, as a text that looks different."""
    form = rng.choice([sympy.expand, sympy.factor, sympy.together, sympy.apart, lambda e: e])
    try:
        changed = form(expression)
    except (NotImplementedError, sympy.PolynomialError):
        changed = expression
    k = sympy.Integer(rng.choice([2, 3, 7]))
    if rng.random() < 0.3:
        changed = sympy.Add(
            sympy.Mul(k, changed, evaluate=False), -changed * (k - 1), evaluate=False
        )
    text = sympy.latex(changed) if rng.random() < 0.6 else str(changed).replace("E", "e")
    dress = ["{}", "${}$", r"\({}\)", r"\boxed{{{}}}", " {} ", "{}.", r"\left({}\right)"]
    return rng.choice(dress).format(text)


def test_a_rewritten_answer_is_equal_and_a_changed_one_never():
    """1,200 pairs. sympy makes the value, its rewriting, and a value that differs by a little."""
    rng = random.Random(0)
    for _ in range(600):
        expression = random_expression(rng)
        one, other = rewritten(rng, expression), rewritten(rng, expression)
        assert evaluation.math_equal(one, other), (one, other)
        step = sympy.Rational(rng.choice([-1, 1]), rng.choice([1, 2, 10, 1000, 10**6]))
        changed = rng.choice(
            [expression + step, expression * (1 + step), -expression, expression + X]
        )
        if sympy.expand(changed - expression) == 0 or changed.equals(expression):
            continue
        wrong = rewritten(rng, changed)
        assert not evaluation.math_equal(one, wrong), (one, wrong)


def test_sets_tuples_intervals_and_matrices_keep_their_own_rules():
    """400 pairs: sets in any order, tuples in theirs, intervals with their ends."""
    rng = random.Random(1)
    for _ in range(100):
        parts = [sympy.latex(random_expression(rng)) for _ in range(3)]
        moved = [parts[1], parts[2], parts[0]]
        same = evaluation.math_equal(parts[0], parts[1]) or evaluation.math_equal(
            parts[1], parts[2]
        )
        braces = r"\{" + ", ".join(parts) + r"\}", r"\left\{" + ",".join(moved) + r"\right\}"
        assert evaluation.math_equal(*braces), braces
        ordered = "(" + ", ".join(parts) + ")", r"\left(" + ",".join(moved) + r"\right)"
        assert evaluation.math_equal(*ordered) == same or same, ordered
        ends = rng.choice("(["), rng.choice(")]")
        other = {"(": "[", "[": "(", ")": "]", "]": ")"}[ends[0]], ends[1]
        inner = f"{parts[0]}, {parts[1]}"
        assert evaluation.math_equal(
            f"{ends[0]}{inner}{ends[1]}", rf"\left{ends[0]}{inner}\right{ends[1]}"
        )
        assert not evaluation.math_equal(
            f"{ends[0]}{inner}{ends[1]}", f"{other[0]}{inner}{other[1]}"
        )
        rows = r"\begin{pmatrix} %s & %s \\ %s & 1 \end{pmatrix}"
        assert evaluation.math_equal(rows % tuple(parts), (rows % tuple(parts)).replace("pm", "bm"))
        assert not evaluation.math_equal(rows % tuple(parts), rows % (*parts[:2], parts[2] + "+1"))


def test_decimals_are_exact_and_nothing_close_passes():
    rng = random.Random(2)
    for _ in range(300):
        top, bottom = rng.randint(-999, 999), rng.choice([2, 4, 5, 8, 16, 25, 125])
        value = Fraction(top, bottom)
        digits = rng.randint(7, 12)
        decimal = f"{float(value):.{digits}f}"
        assert evaluation.math_equal(decimal, rf"\frac{{{top}}}{{{bottom}}}")
        last = decimal[:-1] + str((int(decimal[-1]) + 1) % 10)
        assert not evaluation.math_equal(last, f"{top}/{bottom}"), (last, top, bottom)


# --- Hostile input -------------------------------------------------------------------------------

HOSTILE = [
    "9**9**9**9", "10^{10^{10}}", "2^" * 200 + "2", "(" * 5000, "{" * 5000, r"\frac{" * 3000,
    r"\sqrt{" * 3000 + "2" + "}" * 3000, "1+" * 50_000 + "1", "9" * 100_000, "-" * 100_000,
    "1," * 50_000, r"\text{" * 20_000, r"\boxed{" * 20_000, "=" * 100_000, "<" * 100_000,
    " " * 100_000 + "x", "a " * 50_000, "999!^999!", "1000!*1000!*1000!", "x^x^x^x^x^x^x^x^x^x^x",
    "e^{e^{e^{e^{e^{9}}}}}", r"\binom{1000}{500}^{99}", "1 1/" * 30_000, r"\pm " * 90, "|" * 99_999,
    "exp(exp(exp(exp(9))))", "1e9999", "1e-9999^1e9999", "0." + "3" * 400, "m" * 100_000,
    "answer is " * 10_000, "A. " * 30_000, "B) " * 30_000, "not " * 25_000, "correct " * 12_000,
    r"\begin{pmatrix}" + "1&" * 30_000 + r"\end{pmatrix}", "5 " + "cm " * 30_000, "½" * 50_000,
]  # fmt: skip


def test_hostile_answers_are_wrong_within_two_seconds_and_raise_nothing():
    for text in HOSTILE:
        started = time.perf_counter()
        assert not evaluation.math_equal(text, "7")
        assert not evaluation.math_equal("7", text)
        assert not evaluation.gaia_equal(text, "7") and not evaluation.gaia_equal(text, "7, 8")
        assert not evaluation.game24_equal(text, [1, 2, 3, 4])
        evaluation.chosen_letter(text, ["one", "two", "three", "four"])
        assert evaluation.parse_judge(text) is not True or "A." in text or "correct" in text
        assert time.perf_counter() - started < 2.0, text[:40]


def test_random_texts_equal_themselves_and_raise_nothing():
    rng = random.Random(3)
    pieces = [
        *string.printable,
        "\\frac",
        "\\sqrt",
        "{",
        "}",
        "(",
        ")",
        "12",
        "3.5",
        "x",
        "\\pi",
        "^",
        "\\text{",
        "\\pm",
        ",",
        "=",
        "\\left",
        "[",
        "²",
        "π",
        "\\begin{matrix}",
        "&",
        "\\\\",
    ]
    for _ in range(2000):
        one, two = ("".join(rng.choices(pieces, k=rng.randint(1, 15))) for _ in range(2))
        assert evaluation.math_equal(one, two) == evaluation.math_equal(two, one), (one, two)
        if evaluation.plain_notation(one):
            assert evaluation.math_equal(one, one), one
        evaluation.score("mc", one, "A", choices=["x", "y"], extracted=True)
        evaluation.score("gaia", one, two, extracted=True)
        evaluation.score("game24", one, 24, numbers=[1, 2, 3, 4], extracted=True)
        evaluation.parse_judge(one)


def test_many_threads_get_the_same_verdicts():
    with ThreadPoolExecutor(8) as pool:
        verdicts = pool.map(lambda pair: evaluation.math_equal(*pair), [*EQUAL, *DIFFERENT] * 3)
        assert list(verdicts) == ([True] * len(EQUAL) + [False] * len(DIFFERENT)) * 3


# --- Options -------------------------------------------------------------------------------------

GASES = ["Oxygen", "Nitrogen", "Argon", "Neon"]


@pytest.mark.parametrize(
    "reply, letter",
    [
        ("B", "B"),
        ("(b).", "B"),
        ("**B**", "B"),
        ("Answer: B", "B"),
        ("nitrogen", "B"),
        ("E", None),
        ("The answer is (C).", "C"),
        ("I think the answer is A. Wait, the answer is D.", "D"),
        ("The answer is not A but D.", "D"),
        ("The answer is not A.", None),
        ("It is not argon.", None),
        ("Oxygen or argon", None),
        ("A gas", None),
        ("I am unsure", None),
        ("the gas is neon", "D"),
        ("B. Argon", None),
        ("B) because it is inert", "B"),
        ("Option C is right", "C"),
        ("ANSWER IS D. A is incorrect.", "D"),
        ("The correct option is: $B$", "B"),
        ("", None),
        ("The answer would be \\text{C}", "C"),
        ("The answer is Argon", "C"),
        ("answer: all of them", None),
        ("The answer is a gas", None),
        ("\\boxed{\\text{D}}", "D"),
        ("None of these", None),
    ],
)
def test_a_reply_chooses_what_it_states_and_nothing_is_guessed(reply, letter):
    assert evaluation.chosen_letter(reply, GASES) == letter


def test_references_may_be_a_letter_a_text_or_both():
    for reference in ("B", "B.", "(B)", "Nitrogen", "B. Nitrogen\n"):
        assert evaluation.choice_equal("The answer is B.", reference, GASES)
        assert not evaluation.choice_equal("The answer is C.", reference, GASES)
    assert not evaluation.choice_equal("no idea", "helium", GASES), "a reference that is no option"


# --- GAIA, Game of 24, verdicts ------------------------------------------------------------------


def test_gaias_rule_goes_by_the_type_of_the_reference():
    right = [
        ("1,000", "1000"),
        ("$17.50", "17.5"),
        ("a; B", "A;b"),
        ("St Paul", "st. paul"),
        ("5, 6", "5,6"),
        ("1000, 7", "1000,7"),
        ("-3", "-3.0"),
        ("1,234", "1,234"),
        ("!", "!"),
    ]
    wrong = [
        ("5, 6", "56"),
        ("56", "5, 6"),
        ("6, 5", "5, 6"),
        ("5", "5, 6"),
        ("5, 6, 7", "5, 6"),
        ("", "x"),
        ("inf", "1e400"),
        ("1 234", "1,23"),
        ("seventeen", "17"),
        ("1", "1,000"),
        ("", "."),
        ("x", "!"),
    ]
    for said, gold in right:
        assert evaluation.gaia_equal(said, gold), (said, gold)
    for said, gold in wrong:
        assert not evaluation.gaia_equal(said, gold), (said, gold)


def test_every_expression_of_a_game_is_judged_as_its_exact_value_says():
    """An oracle of its own: all expression trees over 1 3 4 6, valued as fractions while they are
    built; 6 / (1 - 3/4) is the only way to 24."""

    def trees(numbers):
        if len(numbers) == 1:
            yield str(numbers[0]), Fraction(numbers[0])
        for size in range(1, len(numbers)):
            for left, a in trees(numbers[:size]):
                for right, b in trees(numbers[size:]):
                    for sign, value in (
                        ("+", a + b),
                        ("-", a - b),
                        ("*", a * b),
                        ("/", b and a / b),
                    ):
                        if sign != "/" or b:
                            yield f"({left}{sign}{right})", value

    solutions = 0
    for numbers in ([6, 1, 3, 4], [1, 3, 4, 6], [4, 1, 8, 7]):
        for text, value in trees(numbers):
            solutions += value == 24
            assert evaluation.game24_equal(text, numbers) == (value == 24), (text, value)
    assert solutions > 0


@pytest.mark.parametrize(
    "text, right",
    [
        (r"\frac{6}{1-\frac{3}{4}}", True),
        (r"$6 \div (1 - 3 \div 4) = 24$", True),
        ("6/(1-3/4)=25", True),
        ("24 = 6/(1-3/4)", False),
        ("-6/(3/4-1)", False),
        ("6/(1-.75)", False),
        ("13+4+6+1", False),
        ("6(1)(4)", False),
        ("6/(1-3/4))", False),
        ("6/(1-3/4", False),
        ("6/(1-3/4)+", False),
        ("", False),
        ("6/(1-3/4)+0", False),
        ("6 1 3 4", False),
        ("63/(1-4)", False),
        ("6^1+3*4", False),
    ],
)
def test_games_of_24_with_6_1_3_4(text, right):
    assert evaluation.game24_equal(text, [1, 3, 4, 6]) is right


def test_a_judges_words_are_read_as_what_they_say():
    for text, verdict in [
        ("CORRECT", True),
        ("INCORRECT", False),
        ("Verdict: correct", True),
        ("**Verdict:** INCORRECT", False),
        ("not correct", False),
        ("It isn't correct.", False),
        ("The answer is incorrect.", False),
        ("", None),
        ("Yes", True),
        ("no.", False),
        ("A", True),
        ("B", False),
        ("C", False),
        ("Absolutely", None),
        ("Actually this is wrong. B", False),
        ('{"verdict": "CORRECT"}', True),
        ('{"correct": false}', False),
        ("correct: no", False),
        ("CORRECT or INCORRECT?", None),
        ("partially correct", None),
        (None, None),
        ("The correct answer is 5. The reply says 6.\nINCORRECT", False),
        ("I cannot tell.", None),
        ("<think>CORRECT?</think>INCORRECT", False),
        ("Verdict: CORRECT\nWait.\nVerdict: INCORRECT", False),
    ]:
        assert evaluation.parse_judge(text) is verdict, text


def test_what_a_kind_needs_is_asked_for_in_a_sentence():
    with pytest.raises(ValueError, match="mc needs choices"):
        evaluation.score("mc", "A", "A")
    with pytest.raises(ValueError, match="game24 needs numbers"):
        evaluation.score("game24", "1", 24)
