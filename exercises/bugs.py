"""Find the silent bug: the project with one wrong line, and what a training run with it logged.

    python exercises/bugs.py 1 FOLDER                  writes the project with bug 1 into FOLDER
    python exercises/bugs.py 1 FOLDER memory.py:60     is this the line? Exit code 0: yes, else 1

Each of the three runs, learns and raises no error. FOLDER gets log.txt (the terminal) and
metrics.jsonl of forty steps with the bug; which number looks as it cannot? A wrong answer gets a
clue. The answers stand below: read on only when you have named yours.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import make

LOGS = Path(__file__).resolve().parent / "bugs"


class Bug(NamedTuple):
    """One wrong version. `edits`: (file, right text, wrong text); any line that differs counts."""

    flags: str  # of the run whose log is handed out
    clue: str  # told after a wrong answer
    why: str
    edits: tuple[tuple[str, str, str], ...]


BUGS: dict[int, Bug] = {
    1: Bug(
        "--max_steps 40 --seed 0",
        "How far has the planner moved from the start weights, and what does that number say?",
        "The reference is scored with the adapter on, so pi_ref is pi_theta: KL is exactly 0 at "
        "every step while adapter/delta_norm grows, and beta does nothing. The reward cannot show "
        "it: beta is small, and a run without the KL term learns as well.",
        (("train.py",
          "logp_ref, _ = score_rows(backbone, batch, config.temperature, gate=0)",
          "logp_ref, _ = score_rows(backbone, batch, config.temperature, gate=1)"),),
    ),
    2: Bug(
        "--max_steps 40 --seed 0 --temperature 0.7",
        "Before the first update pi_theta is pi_old. What must the log then say of step 1?",
        "Tokens are sampled at temperature 0.7 and scored at 1: two policies, whose ratio (Eq. 6) "
        "is no ratio. At step 1, before any update, the sampler's log-probs differ from the "
        "scorer's by 0.0008 on the mean and 0.14 at most, where rounding leaves 1e-6: the alarm "
        "`gap`. Later 0.004 to 0.007, and tokens are clipped that no update has moved. The reward "
        "rises all the same.",
        (("train.py",
          "        hidden, backbone.head_weight(gate), targets, temperature\n",
          "        hidden, backbone.head_weight(gate), targets\n"),),
    ),
    3: Bug(
        "--max_steps 40 --seed 0",
        "Early on, many questions are answered wrong by all of their roll-outs. What does `flat` "
        "say?",
        "Roll-outs stand group by group, q0 q0 … q1 q1 …, and repeat() numbers them q0 q1 … q0 q1 "
        "…, where repeat_interleave() is meant: a group then mixes all questions of the step, so "
        "hardly any is flat (0/8 in the step line, from step 1), and an easy question's roll-outs "
        "are praised for being easy. It still learns, only less: the advantage has the right mean "
        "and far too much noise.",
        (("train.py",
          "group_ids = torch.arange(len(places)).repeat_interleave(config.num_generations)  # (R,)",
          "group_ids = torch.arange(len(places)).repeat(config.num_generations)  # (R,)"),
         ("train.py",
          "    asked = [training.questions[places[group]] for group in group_ids.tolist()]\n",
          "    asked = [training.questions[p] for p in places for _ in range("
          "config.num_generations)]\n")),
    ),
}  # fmt: skip


def with_bug(name: str, source: str, bug: Bug) -> str:
    """A file's text with the bug, where it is that file's. Raises ValueError where the line that
    the bug replaces is not there exactly once."""
    for file, right, wrong in bug.edits:
        if file == name:
            if source.count(right) != 1:
                raise ValueError(f"{file} has changed: {right.strip()!r} is not there once.")
            source = source.replace(right, wrong)
    return source


def wrong_lines(bug: Bug) -> set[tuple[str, str]]:
    """(file, text) of every line that the bug changes, as it stands with the bug."""
    found = set()
    for file in {file for file, _, _ in bug.edits}:
        source = (make.PROJECT / file).read_text(encoding="utf-8")
        before, after = source.splitlines(), with_bug(file, source, bug).splitlines()
        found |= {(file, new.strip()) for old, new in zip(before, after, strict=True) if old != new}
    return found


def hand_out(number: int, folder: Path) -> None:
    bug = BUGS[number]
    make.copy_project(folder, lambda name, source: with_bug(name, source, bug), ("data",))
    for file in ("log.txt", "metrics.jsonl"):
        text = (LOGS / str(number) / file).read_text(encoding="utf-8")
        (folder / file).write_text(text, encoding="utf-8")
    print(f"{folder}: log.txt and metrics.jsonl are of `python train.py {bug.flags}` with the bug."
          f"\nThen, in the project: python exercises/bugs.py {number} {folder} FILE.py:LINE")


def judge(number: int, folder: Path, place: str) -> int:
    """Is this a line of the bug, in the folder as it is now? Lines that were added above it do not
    matter. Raises ValueError for a place that is none."""
    wrong = wrong_lines(BUGS[number])
    lines = {path.name: [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
             for path in sorted(folder.glob("*.py"))}
    if not any(text in lines.get(file, ()) for file, text in wrong):
        raise ValueError(f"{folder} does not hold bug {number}: "
                         f"`python exercises/bugs.py {number} FOLDER` writes one that does.")
    file, _, line = place.rpartition(":")
    file = Path(file).name
    if not (file in lines and line.isdecimal() and 1 <= int(line) <= len(lines[file])):
        raise ValueError(f"{place} is no line of {folder}: name a file there and a line's number, "
                         "as in memory.py:60.")
    if (file, lines[file][int(line) - 1]) in wrong:
        print(f"Yes. {BUGS[number].why}")
        return 0
    print(f"No, {file}:{line} is as it should be. {BUGS[number].clue}")
    return 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", metavar="NUMBER", help="which bug: 1, 2 or 3")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where to, or where it is")
    parser.add_argument("place", metavar="FILE.py:LINE", nargs="?", help="your answer")
    given = parser.parse_args(arguments)
    folder = given.folder.expanduser().resolve()
    try:
        if given.number not in map(str, BUGS):
            raise ValueError(f"There is no bug {given.number}: choose 1, 2 or 3.")
        if given.place is not None:
            return judge(int(given.number), folder, given.place)
        if problem := make.not_free(folder):
            raise ValueError(problem)
        hand_out(int(given.number), folder)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
