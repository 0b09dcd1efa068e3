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
    (r"\dfrac{3}{4}", "0.75"), (r"\frac12", "1/2"), (r"\frac{1}{-2}", "-0.5"),
    (r"-1\frac{1}{4}", "-5/4"), ("11 5/6", "71/6"), ("2½", "5/2"), ("10⁻³", "0.001"),
    ("1e-3", "1/1000"), ("３", "3"), (r"16,\!386.20", "16386.2"), (r"12\,000", "12000"),
    ("1 000", "1000"), ("2 million", "2000000"), (r"\sqrt{8}", r"2\sqrt2"),
    ("2*sqrt(3)", r"\sqrt{12}"), (r"\frac{1}{\sqrt{6}}", r"\frac{\sqrt6}{6}"), ("2pi", r"2\pi"),
    ("2^{2024}", "4^{1012}"), ("(1+i)^2", "2i"), ("(-1)^{n+1}", "-(-1)^n"), ("|x-1|", "|1-x|"),
    (r"\sin^2 x+\cos^2 x", "1"), (r"2 \sin b \cos a", r"\sin(a+b)-\sin(a-b)"),
    (r"\cos\frac{\pi}{3}", "1/2"), (r"\frac{0.5a}{b}", "a/(2b)"),
    (r"\left( \frac{1}{2}, 3 \right)", "(0.5,3)"), (r"\{1,2\}", "{2,1}"), ("5 or 6", "6, 5"),
    (r"2,3,\text{ and }5", "5,3,2"), ("(0;-2;6)", "(0,-2,6)"),
    (r"1\pm\sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"), (r"\{1\pm\sqrt5,-2\}", "-2,1-√5,1+√5"),
    (r"\frac{1\pm\sqrt5}{2}", r"\frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2}"), ("±2", "2,-2"),
    (r"\{1\}\cup\{2,3\}", "{3,2,1}"), (r"-2 \le x < 7", "[-2,7)"), ("x<3", r"(-\infty,3)"),
    ("5 <= x", r"x \geq 5"), (r"\mathbb{R}", r"(-\infty,\infty)"), (r"\emptyset", r"\{\}"),
    (r"\begin{pmatrix}1 & 2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\ 3&4\\ \end{bmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"), ("x = 5", "5"), ("x=1, x=2", "{2,1}"),
    ("(p,q)=(3,2)", "(3,2)"), ("m+n = 2 + 31 = 33", "33"), ("f(3) = 7", "7"),
    (r"\angle ABC = 90^\circ", "90"), (r"x=\frac{10}{3}\approx 3.33", "10/3"),
    ("y=-x/2+3/4", "2x+4y-3=0"), ("5=x", "x=5"), ("x^2+y^2=4", "4-y^2-x^2=0"),
    ("f(x)=2x+1", "2x+1"), (r"15\mbox{ cm}^2", "15"), (r"15\text{ cm}^2", "15 square cm"),
    ("27 miles", "27"), ("90 degrees", r"90^{\circ}"), (r"2\pi\text{ m}", r"2\pi"),
    ("12", "12 cm"), ("60 miles per hour", r"60\text{ mi/h}"), (r"\$5.50", "5.5 dollars"),
    (r"28\%", "28 percent"), ("28%", "0.28"), ("28%", "28"), ("5 million dollars", "5000000"),
    (r"\boxed{\boxed{5}}", "5"), (r"\text{13}", "13"), (r"\[5.\]", "5"), ("**5**", "5"),
    ("The answer is 42", "42"), (r"\text{(C)}", "C"), (r"\text{No solution}", "no solution"),
    ("f(2) < f(1) < f(4)", "f(2)<f(1)<f(4)"),
]  # fmt: skip
DIFFERENT = [
    ("(1,2)", "(2,1)"), ("3", "4"), ("1,2,3", "123"), ("1000001", "1000000"),
    ("11/2", "1 1/2"), (r"(-\infty,1)\cup(2,\infty)", r"(-\infty,1)\cup(3,\infty)"),

    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    ("6.283", r"2\pi"),  ("3:30", "3:03"), ("101_2", "101_3"),
    ("5 m", "5 cm"), ("forty-two", "42"), ("approximately 3.14", r"\pi"),
    ("approximately 3.14", "3.14"), ("12 cm", "12 cm^2"), ("5%", "50"), ("(3,4)", "[3,4]"),
    ("--5", "5"), ("5-", "5"), ("y=2x+1", "y=2x+2"), ("x=5", "y=5"), ("2x=10", "10"),
    ("2+3=6", "6"), ("x>2", r"[2,\infty)"), ("2-3i", "2+3i"), ("|x|", "x"), (r"\sqrt{x^2}", "x"),
     ("e^2", "7.389"), (r"\tan 45^\circ", "1"), ("5 squared", "5"),
    ("7 remainder 2", "7"), ("7 apples", "7 oranges"), ("1,00", "100"), ("1, 234", "1234"),
    ("9^9^9^9", "1"), ("2^{1000000}", "2^{1000001}"), ("(2^{10000})^{10000}", "0"),
    ("100000!", "5"), ("(" * 200 + "1" + ")" * 200, "1"), ("", ""), (" ", "0"), ("None", "0"),
    (r"-\infty", r"\infty"), ("0/0", "1"), ("1/0", r"\infty"), ("xy", "yx"), ("a/b", "b/a"),
    ("2x", "x"), ("x", "X"), ("even", "odd"), ("no", "on"), ("1,1,2", "1,2"), ("1,2,2", "1,1,2"),
    ("²", "2"), ("6:1", "6/1"), ("33 is the answer", "33"), ("0.333", "1/3"),
    ("0.33333333333333333333333333333333333333333333333", "1/3"),
    ("3.0000000000000000000000000000000000000000000000001", "3"), ("1/3", "0.3333"), ("A", "B"),
    ("2 3", "6"), ("23", "2 3"), ("3x4", "12"), ("12_{10}", "12"), ("5,", "5"), ("0x10", "16"),
    ("1_000", "1000"),  ("(0, 1]", "(0,1)"), ("a=1,b=2", "a=2,b=1"),
    ("12 inches", "1 foot"),
    ("3.14", r"\pi"), ("2.828", r"2\sqrt2"), ("3.14159265358979323846264338327950288", r"\pi"),
    (r"e^{\pi\sqrt{163}}", "262537412640768744"), ("2^{2024}", "2^{2024}+1"), ("(1,2)", "[1,2]"),
    ("(1,2)", "(1,2]"), ("(1,2)", "{1,2}"), ("1,1,2", "1,2,2"), ("1 or 2", "1"), (r"\pm 2", "2"),
    ("((1,2),3)", "(1,2,3)"), ("x<5", "x>5"), ("x>5", "x>=5"), ("x>3", "3"), ("[2,3]", "2,3"),
    ("2x+y<4", "2x+y>4"), (r"(-\infty, 3)", r"(\infty, 3)"), ("[0,1]", "[0,1)"), ("5 = 6", "6"),
    ("x = 5 = 6", "6"), ("2x = 10", "10"), ("2x+z = 1", "1"), ("x^2 = 4", "4"), ("-x = 5", "5"),
    ("|x| = 5", "5"), ("x=1,y=2", "x=2,y=1"), ("5x", "5"), ("not 5", "5"), ("5 or more", "5"),
    ("5 is wrong", "5"), ("5 to 6", "6"), ("5, no 6", "6"), ("5 (or 6)", "5"), ("2 3", "23"),
    ("1 2/3", "12/3"), ("3ab", "3"), ("5 cm", "5 m"), ("5 apples", "5 pears"), ("0.5%", "0.5"),
    ("50%", "5"), ("5 million", "5"), ("101_2", "5"), ("5 dozen", "5"), ("no", "no solution"),
    ("8,00", "800"), ("1234,567", "1234567"), ("2,5", "2.5"), ("0,111", "111"), ("8,000", "8"),
    ("(1,234)", "1234"), ("1e3", "13"), ("BAC", "CAB"), ("act", "cat"), ("2024-05-01", "2018"),
    ("1/2/2024", "1/4048"), ("3:30", "1:10"), ("nan", "0"), ("x_1", "x_2"), ("0/0", "0"),
    ("5!!", "5"), ("9**9**9**9", "1"), ("10^{10^{10}}", "7"), (r"\infty", r"-\infty"), ("", "0"),
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
        expressions = [random_expression(rng) for _ in range(3)]
        rotated = [*expressions[1:], expressions[0]]
        parts, moved = ([sympy.latex(one) for one in some] for some in (expressions, rotated))
        braces = r"\{" + ", ".join(parts) + r"\}", r"\left\{" + ",".join(moved) + r"\right\}"
        assert evaluation.math_equal(*braces), braces
        ordered = "(" + ", ".join(parts) + ")", r"\left(" + ",".join(moved) + r"\right)"
        assert evaluation.math_equal(*ordered) == (expressions == rotated), ordered
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
        started = time.thread_time()
        assert not evaluation.math_equal(text, "7")
        assert not evaluation.math_equal("7", text)
        assert not evaluation.gaia_equal(text, "7") and not evaluation.gaia_equal(text, "7, 8")
        assert not evaluation.game24_equal(text, [1, 2, 3, 4])
        evaluation.chosen_letter(text, ["one", "two", "three", "four"])
        assert evaluation.parse_judge(text) is not True or "A." in text or "correct" in text
        assert time.thread_time() - started < 2.0, text[:40]


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


# --- Options ----------------------------------------------------------------------------------

GASES = ["A. Oxygen", "B. Nitrogen", "C. Argon", "D. Neon"]
NUMBERS = ["A. 10", "B. 100", "C. 1", "D. 1000"]
TEN = [f"{chr(65 + place)}. option {place}" for place in range(10)]

CHOSEN = [  # (reply, options, the letter that it ends up with; None: none)
    ("B", GASES, "B"), ("(b)", GASES, "B"), ("B) Nitrogen", GASES, "B"),
    ("B: Nitrogen", GASES, "B"),
    ("nitrogen.", GASES, "B"), (r"\boxed{\textbf{(B)}}", GASES, "B"), ("$B$", GASES, "B"),
    ("answer: b", GASES, "B"), ("The correct answer is **(B) Nitrogen**.", GASES, "B"),
    ("Answer: Nitrogen", GASES, "B"), ("Let me think.\n\nB", GASES, "B"), ("E", GASES, None),
    ("I choose D.", GASES, "D"), ("Therefore, B is correct.", GASES, "B"),
    ("Option A is wrong. Option B is correct.", GASES, "B"), ("The best choice is C.", GASES, "C"),
    ("The answer is B, and C is wrong", GASES, "B"), ("The answer is C, not B", GASES, "C"),
    ("The answer is not A but D.", GASES, "D"), ("Neither A nor B; the answer is C", GASES, "C"),
    ("Is the answer A? No. The answer is B.", GASES, "B"),
    ("The answer is A. No, D: answer D", GASES, "D"),
    ("Answer: A. B is too heavy, the answer cannot be B.", GASES, "A"),
    ("B. Oxygen", GASES, None), ("The answer is A or B.", GASES, None), ("A, B", GASES, None),
    ("Both A and B", GASES, None), ("A\n\nB\n\nC", GASES, None), ("ABCD", GASES, None),
    ("I would not choose D.", GASES, None), ("The answer isn't B", GASES, None),
    ("C is not the correct answer", GASES, None), ("None of the above", GASES, None),
    ("no idea", GASES, None), ("It is not nitrogen.", GASES, None),
    ("nitrogen or argon", GASES, None),
    ("the gas is nitrogen", GASES, "B"), ("A gas that is heavy", GASES, None),
    ("1", NUMBERS, "C"), ("the value is 10", NUMBERS, "A"), ("10.5", NUMBERS, None),
    ("I think the answer is C", TEN, "C"), ("Answer: I", TEN, "I"), ("I am not sure", TEN, None),
]  # fmt: skip


def test_an_option_counts_where_the_reply_ends_up_with_it_and_is_never_guessed():
    for reply, options, letter in CHOSEN:
        for place in range(len(options)):
            right = letter is not None and ord(letter) - 65 == place
            found = evaluation.score("mc", reply, chr(65 + place), choices=options)
            assert found == float(right), (reply, chr(65 + place))


def test_a_reference_may_be_a_letter_or_the_text_and_case_may_tell_options_apart():
    for reference in ("B", "b", "Nitrogen", "B. Nitrogen\n\n", " nitrogen "):
        assert evaluation.score("mc", "B", reference, choices=GASES) == 1.0
        assert evaluation.score("mc", "C", reference, choices=GASES) == 0.0
    twins = ["XX", "Xx", "same", "same"]
    assert evaluation.score("mc", "Xx", "B", choices=twins) == 1.0
    assert evaluation.score("mc", "XX", "B", choices=twins) == 0.0
    assert evaluation.score("mc", "D", "same", choices=twins) == 1.0  # either twin
    assert evaluation.score("mc", "A", "see figure", choices=twins) == 0.0  # no such option


# --- GAIA, Game of 24, verdicts -----------------------------------------------------------------


def test_gaia_compares_a_number_a_list_or_a_text_as_the_reference_is():
    equal = [
        ("$1,234.50", "1234.5"), ("17 %", "17"), ("1,234", "1,234"), ("1234", "1,234"),
        ("1, 234", "1,234"), ("1e3", "1000"), ("a;B", "A, b"), ("red, 3.0", "Red, 3"),
        ("st petersburg", "St. Petersburg"), ("Nan", "Nan"), ("new york", "New-York"),
    ]  # fmt: skip
    different = [
        ("7,9", "79"), ("1,23", "123"), ("b, a", "a, b"), ("a", "a, b"), ("a, b, c", "a, b"),
        ("banana", "Infinity"), ("nan", "5"), ("v15", "v1.5"), ("-5", "5"), ("17 apples", "17"),
        ("", "a"), ("...", "!!!"), ("ab", "a, b"),
    ]  # fmt: skip
    for answer, reference in equal:
        assert evaluation.gaia_equal(answer, reference), (answer, reference)
    for answer, reference in different:
        assert not evaluation.gaia_equal(answer, reference), (answer, reference)


def test_24_needs_each_number_once_and_the_exact_value():
    right = [
        ("(1+2+3)×4 = 24", (1, 2, 3, 4)), ("8/(3-8/3)", (3, 3, 8, 8)), ("4/(1-5/6)", (1, 4, 5, 6)),
        (r"$\frac{4}{1}\times 3\cdot 2$", (1, 2, 3, 4)), ("4(1+2+3)", (1, 2, 3, 4)),
        ("(1+2+3)*4 = 6*4 = 24", (1, 2, 3, 4)), ("24 = [1+2+3] x 4", (1, 2, 3, 4)),
        ("First 1+2=3.\nAnswer: (1 + 2 + 3) * 4 = 24.", (1, 2, 3, 4)), ("6÷(1−3÷4)", (1, 3, 4, 6)),
    ]  # fmt: skip
    wrong = [
        ("7*7/2*1", (7, 7, 2, 1)), ("(6+3)*4/2 = 24", (6, 3, 4, 2)), ("(1+2+3)*4=25", (1, 2, 3, 4)),
        ("4*(3+3)", (1, 2, 3, 4)), ("4*3*2", (1, 2, 3, 4)), ("24*1*1", (2, 4, 1, 1)), ("24",
        (24, 1)),
        ("12*(3-1)", (1, 2, 3, 1)), ("5**2-1*1", (5, 2, 1, 1)), ("5^2-1*1", (5, 2, 1, 1)),
        ("4!*1*1*1", (4, 1, 1, 1)), ("-1+25", (1, 25)), ("+1*2*3*4", (1, 2, 3, 4)),
        ("2*(-3)*(-4)*1", (1, 2, 3, 4)), ("1*2*3*4.0", (1, 2, 3, 4)), ("8*3/(1-1)", (1, 1, 8, 3)),
        ("((1+2+3)*4", (1, 2, 3, 4)), ("1*2*3*4=", (1, 2, 3, 4)), ("1*2*3*4 or 5", (1, 2, 3, 4)),
        ("4//1*3*2", (1, 2, 3, 4)), ("", (1, 2, 3, 4)), ("__import__('os')", (1, 2, 3, 4)),
    ]  # fmt: skip
    for expression, numbers in right:
        assert evaluation.game24_equal(expression, list(numbers)), expression
    for expression, numbers in wrong:
        assert not evaluation.game24_equal(expression, list(numbers)), expression


def test_a_judge_is_read_in_the_place_of_its_verdict_and_else_not_at_all():
    verdicts = {
        True: ["CORRECT", "**Correct.**", "A", "Verdict: **A**", "Absolutely correct. A", "True",
               '{"is_correct": true, "why": "x"}', "Yes, the answers match.", "Not incorrect.",
               "It is correct because it matches the reference answer."],
        False: ["INCORRECT", "It isn't correct", "Actually this is wrong. B", "Correct: No",
                '{"correct": false}', "The correct answer is 5, it says 6. INCORRECT.",
                "Final verdict: not correct", "<think>correct</think>INCORRECT", "no",
                "Judgement: Incorrect\nReason: the correct value is 5", "Is it correct? No.",
                "The reply is not entirely correct."],
        None: ["", "C", "Absolutely, it is.", "partially correct", "correct and incorrect",
        "A or B",
               "I cannot tell whether it is correct",
               "It does not match the correct answer.", None],
    }  # fmt: skip
    for verdict, replies in verdicts.items():
        for reply in replies:
            found = evaluation.parse_judge(reply)
            assert found is verdict, (reply, found)


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
        ("6/(1-3/4)=25", False),
        ("24 = 6/(1-3/4)", True),
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


def test_what_a_kind_needs_is_asked_for_in_a_sentence():
    with pytest.raises(ValueError, match="mc needs choices"):
        evaluation.score("mc", "A", "A")
    with pytest.raises(ValueError, match="game24 needs numbers"):
        evaluation.score("game24", "1", 24)


# --- Half formulas, hacks and hedges --------------------------------------------------------------


def test_half_formulas_are_wrong_and_raise_nothing():
    for text in [r"x\in", r";e\in", r"\sqrt=e\in", r"i\in\approx"]:
        assert not evaluation.math_equal(text, "7")


def test_words_behind_a_number_signs_and_tiny_numbers_count():
    for said, gold, right in [
        ("3 fifths", "3", 0),
        ("5 thousandths", "5", 0),
        ("5 dozens", "5", 0),
        ("5 millions", "5000000", 1),
        ("5 hundred thousand", "500000", 1),
        ("5 hundred thousand", "500", 0),
        ("101 binary", "101", 0),
        ("5 base two", "5", 0),
        ("5 degrees below zero", "5", 0),
        ("5 out of ten", "5", 0),
        ("5 months", "5", 1),
        ("5 months", "5 weeks", 0),
        ("|xy|", "xy", 0),
        (r"\sqrt{x^2y^2}", "xy", 0),
        ("|x/y|", "x/y", 0),
        ("e^{-120}", "e^{-130}", 0),
        ("e^{-200}", "0", 0),
        (r"\sin\pi", "0", 1),
        (r"\sqrt[3]{x}", "x^{1/3}", 1),
        (r"\sqrt{x^3}", r"x\sqrt x", 1),
        (r"\sqrt{xy}", r"\sqrt x\sqrt y", 1),
        (r"\ln(xy)", r"\ln x+\ln y", 1),
        (r"\sqrt{-4}", "2i", 1),
        ("2x", "x", 0),
        (r"\sqrt{x^2}", "x", 0),
        (r"\sqrt{x^2}", "|x|", 1),
    ]:
        assert evaluation.math_equal(said, gold) == bool(right), (said, gold)


def test_no_verdict_is_read_out_of_ordinary_words_and_denials():
    for text in [
        "Verdict: A wrong answer.",
        "Verdict: A different value, so it is wrong.",
        "Verdict: right answer is 7; given 5. INCORRECT",
        "Verdict: true value is 7, so INCORRECT.",
        "Verdict: Correct answer is 7, the given 5 is wrong.",
        "Correct: A) 7, not B",
        "Verdict: INCORRECT. Correct: A",
        "Verdict: INCORRECT\nCorrect: yes is 7",
        "Verdict: CORRECT|INCORRECT",
        "Verdict: Correct/Incorrect",
        'Verdict: "CORRECT" or "INCORRECT"',
        "The answer is not at all correct.",
        "It is not factually correct.",
        "far from correct.",
        "fails to be correct.",
        "cannot be considered correct.",
        "is neither complete nor correct.",
        "I doubt it is correct.",
        "Only the reference answer is correct.",
        "It is incorrect.\nTrue",
        "Reply is wrong.\nThe reference says:\nYes",
    ]:
        assert not evaluation.parse_judge(text), text


def test_denied_and_hedged_letters_are_not_chosen():
    gases = ["Oxygen", "Nitrogen", "Argon", "Neon"]
    for text, letter in [
        ("Option B is incorrect", None),
        ("Option B is wrong", None),
        ("The answer B is wrong", None),
        ("Option B can be ruled out", None),
        ("B is the best distractor", None),
        ("I would never choose B", None),
        ("The answer is A (or B)", None),
        ("A and also B", None),
        ("A|B", None),
        (r"The answer is \(B\)", "B"),
        ("Therefore, B.", "B"),
        ("Hence (B).", "B"),
        ("The answer is B", "B"),
    ]:
        assert evaluation.chosen_letter(text, gases) == letter, text


def test_a_mere_exponent_is_no_number_of_gaia():
    """ "e4" is a chess move; and 1 7 is not 17."""
    assert not evaluation.gaia_equal("e4", "7") and evaluation.gaia_equal("e4", "e4")
    assert not evaluation.gaia_equal("1 7", "17") and evaluation.gaia_equal("\u22125", "-5")


def test_many_final_answers_are_read_in_linear_time():
    started = time.thread_time()
    evaluation.extract_answer("final answer is " * 20_000)
    assert time.thread_time() - started < 1.0
    assert evaluation.extract_answer("Final Answer:\n$$\n7\n$$") == "7"
