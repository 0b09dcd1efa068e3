"""Find the silent bug: the project with one wrong line, and what a training run with it logged.

    python exercises/bugs.py 1 FOLDER                  writes the project with bug 1 into FOLDER
    python exercises/bugs.py 1 FOLDER train.py:388     is this the line? Exit code 0: yes, else 1

Each of the three runs, learns and raises no error. FOLDER gets log.txt (the terminal) and
metrics.jsonl of forty steps with the bug; which curve looks as it cannot? The answers stand below:
read on only when you have named yours.
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
    clue: str
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
        "Early on, most questions are answered wrong by all of their roll-outs. What does `flat` "
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


def wrong_lines(bug: Bug) -> set[tuple[str, int]]:
    """(file, line number) of every line that the bug changes, in the handed-out version."""
    found = set()
    for file in {file for file, _, _ in bug.edits}:
        source = (make.PROJECT / file).read_text(encoding="utf-8")
        before, after = source.splitlines(), with_bug(file, source, bug).splitlines()
        pairs = enumerate(zip(before, after, strict=True), start=1)
        found |= {(file, number) for number, (old, new) in pairs if old != new}
    return found


def hand_out(number: int, folder: Path) -> None:
    bug = BUGS[number]
    make.copy_project(folder, lambda name, source: with_bug(name, source, bug), ("data",))
    for file in ("log.txt", "metrics.jsonl"):
        text = (LOGS / str(number) / file).read_text(encoding="utf-8")
        (folder / file).write_text(text, encoding="utf-8")
    print(f"{folder}: log.txt and metrics.jsonl are of `python train.py {bug.flags}` with the bug."
          f"\n{bug.clue}\nThen: python exercises/bugs.py {number} {folder} FILE.py:LINE")


def judge(number: int, place: str) -> int:
    file, _, line = place.rpartition(":")
    named = Path(file).name, int(line) if line.isdigit() else 0
    if named in wrong_lines(BUGS[number]):
        print(f"Yes. {BUGS[number].why}")
        return 0
    print(f"No, {place} is as it should be. {BUGS[number].clue}")
    return 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, choices=list(BUGS), help="which bug")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where to, or where it is")
    parser.add_argument("place", metavar="FILE.py:LINE", nargs="?", help="your answer")
    given = parser.parse_args(arguments)
    if given.place:
        return judge(given.number, given.place)
    if problem := make.not_free(given.folder.expanduser().resolve()):
        parser.exit(2, f"error: {problem}\n")
    hand_out(given.number, given.folder.expanduser().resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
