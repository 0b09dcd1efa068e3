"""Checks the exercises of a folder that `make.py` made, or of the project itself (`.`).

    python exercises/check.py 7 FOLDER                      exercise 7; exit code 0: right, else 1
    python exercises/check.py FOLDER                        all twelve, as a table
    python exercises/check.py --all FOLDER… --csv FILE      a class: a row a folder

The student's code runs in a process of its own (calls.py), which is asked for results and has no
say in the verdict: expected values and comparisons stay here (checks.py). A process that hangs,
ends or breaks is stopped and started anew for the next exercise. That is no protection against
code that means harm: see README.md, "What the grading does not protect against".
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from checks import CHECKS, Wrong, encode, judged, show
from tasks import TASKS

HERE = Path(__file__).resolve().parent
ANSWER_BYTES = 1 << 26  # of one answer; a longer one is an error
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)  # not handed to student code


class Verdict(NamedTuple):
    status: str  # pass | fail | not done | timeout | error
    text: str = ""


class Ended(Exception):
    """There is no answer to judge; the verdict says why."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.verdict = Verdict(status, text)


class Student:
    """The process that runs the student's code, started when it is first asked."""

    def __init__(self, folder: Path, shown: bool) -> None:
        """shown: what the student's code prints goes to the terminal (to stderr)."""
        self.folder, self.shown = folder, shown
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1",
                        "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "calls.py"), str(self.folder)], cwd=self.folder,
            env=environment, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=None if self.shown else subprocess.DEVNULL)
        self.answers: queue.Queue = queue.Queue()
        # A thread, since a process that the student's code left behind may hold the pipe open.
        threading.Thread(target=self._read, args=(self.process.stdout, self.answers), daemon=True
                         ).start()

    @staticmethod
    def _read(pipe, answers: queue.Queue) -> None:
        line = b"\n"
        while line.endswith(b"\n"):  # the last one is empty, cut off, or too long
            line = pipe.readline(ANSWER_BYTES)
            answers.put(line)

    @staticmethod
    def _write(pipe, call: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended: no answer will say so
            pipe.write(call)
            pipe.flush()

    def ask(self, name: str, arguments: list, until: float) -> dict:
        """An answer, as it came. Raises Ended where there is none."""
        if self.process is None:
            self.start()
        call = json.dumps({"name": name, "arguments": arguments}).encode() + b"\n"
        # A thread here too: a process that has stopped reading holds up whoever writes to it.
        threading.Thread(target=self._write, args=(self.process.stdin, call), daemon=True).start()
        try:
            line = self.answers.get(timeout=max(0.01, until - time.monotonic()))
            answer = json.loads(line) if line else None
        except queue.Empty:
            self.stop()
            raise Ended("timeout", "no answer within the time limit: an endless loop?") from None
        except (ValueError, RecursionError):
            self.stop()
            raise Ended("error", "the process sent something that is no answer") from None
        if answer is None:
            code = self.stop()
            raise Ended("error", f"the process ended by itself, exit code {code}, before it had "
                                 "answered")
        return answer

    def stop(self) -> int | None:
        """End the process and its group; its exit code, None where it had to be killed."""
        process, self.process = self.process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
        code = process.poll()
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL) if os.name == "posix" else process.kill()
        process.wait()
        return code


def missing(number: int, folder: Path) -> str:
    """Why there is nothing to import for this exercise; "" where its files are in the folder."""
    files = {block.place.partition(":")[0] for block in TASKS[number].blocks}
    try:
        absent = sorted(file for file in files if not (folder / file).is_file())
        if not absent:
            return ""
        if not folder.is_dir():
            return f"{folder} is no folder: unpack it first"
        deeper = [path for path in sorted(folder.glob("*/")) if (path / absent[0]).is_file()]
        if deeper:
            return f"{folder} is not the folder that was handed out, {deeper[0]} may be"
        if not any(folder.glob("*.py")):
            return f"{folder} is not the folder that was handed out: no Python file is in it"
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}"
    return f"{absent[0]} is not in {folder}"


def ask_student(student: Student, number: int, until: float):
    """`run` as a check calls it: a call's value, or Wrong, or Ended."""

    def run(name: str, *given):
        arguments = encode(list(given))
        reply = student.ask(name, arguments, until)
        if "raised" not in reply:
            return judged(reply, name, arguments)
        said, where = f"{reply['raised']}: {reply['text']}", f"\n  {reply['where']}"
        if stub := re.match(r"NotImplementedError: exercise (\d+): ", said):
            first = "" if int(stub[1]) == number else f"needs exercise {stub[1]} first: "
            raise Ended("not done", f"not done yet: {first}{reply['text']}{where}")
        if name == "load":
            lacks = re.match("ModuleNotFoundError: No module named '(torch|transformers|numpy"
                             "|requests|tqdm)'", said)
            hint = (": activate your environment, or `pip install -r requirements.txt` in it"
                    if lacks else "")
            raise Ended("error", f"{given[0]}.py cannot be imported: {said}{hint}{where}")
        shown = ", ".join(textwrap.shorten(show(value), 60, placeholder=" …") for value in given)
        raise Wrong(f"  case:      {name}({shown})\n  expected:  a value\n"
                    f"  got:       {said}{where}")

    return run


def grade(student: Student, number: int, seconds: float) -> Verdict:
    """The verdict on one exercise; whatever the student's code does, there is one."""
    run = ask_student(student, number, time.monotonic() + seconds)
    if problem := missing(number, student.folder):
        return Verdict("error", problem)
    try:
        for file in sorted({block.place.partition(":")[0] for block in TASKS[number].blocks}):
            found = run("load", file.removesuffix(".py"))
            if found != str(student.folder.resolve()):
                return Verdict("error", f"{file} was imported from {found}")
        CHECKS[number](run, 0)
    except Ended as end:
        return end.verdict
    except Wrong as wrong:
        return Verdict("fail", str(wrong))
    # An answer of another form than expected: its parts are foreign data.
    except Exception as error:
        return Verdict("fail", f"  the answer has another form than expected "
                               f"({type(error).__name__}: {error})")
    return Verdict("pass")


def grade_all(folder: Path, seconds: float) -> dict[int, Verdict]:
    """All twelve of a folder, one after the other."""
    student = Student(folder, shown=False)
    verdicts = {}
    try:
        for number in TASKS:
            verdicts[number] = grade(student, number, seconds)
            if verdicts[number].status in ("timeout", "error"):
                student.stop()  # the next one starts in a fresh process
    finally:
        student.stop()
    return verdicts


def reasons(verdicts: dict[int, Verdict]) -> list[str]:
    """Why there were errors and time-outs, each reason once."""
    return list(dict.fromkeys(f"{v.status}: " + v.text.partition("\n")[0]
                              for v in verdicts.values() if v.status in ("error", "timeout")))


def check_one(number: int, folder: Path, seconds: float) -> int:
    student = Student(folder, shown=True)
    try:
        verdict = grade(student, number, seconds)
    finally:
        student.stop()
    print(f"exercise {number}, {TASKS[number].title}: {verdict.status}")
    if verdict.text:
        print(verdict.text)
    return 0 if verdict.status == "pass" else 1


def show_table(folder: Path, seconds: float) -> int:
    print(f"{'no.':>3}  {'minutes':>7}  {'exercise':36}  verdict")
    verdicts = grade_all(folder, seconds)
    for number, verdict in verdicts.items():
        task = TASKS[number]
        print(f"{number:3}  {task.minutes:7}  {task.title:36}  {verdict.status}")
    done = sum(verdict.status == "pass" for verdict in verdicts.values())
    for reason in reasons(verdicts):
        print(reason)
    print(f"{done} of {len(TASKS)} pass. `check.py NUMBER FOLDER` says more about one.")
    return 0 if done == len(TASKS) else 1


def grade_class(folders: list[Path], file: Path, seconds: float) -> int:
    """A row a folder; the file is written anew after each, from what was judged here."""
    lines = [["folder", *TASKS, "total"]]
    times = Counter(folder.name for folder in folders)
    for folder in folders:
        label = folder.name if times[folder.name] == 1 else str(folder)
        verdicts = grade_all(folder, seconds)
        statuses = [verdict.status for verdict in verdicts.values()]
        lines.append([label, *statuses, statuses.count("pass")])
        # A name from another system's archive may hold bytes that are no letters here.
        with open(file, "w", newline="", encoding="utf-8", errors="backslashreplace") as out:
            csv.writer(out).writerows(lines)
        print(f"{label}: {statuses.count('pass')} of {len(TASKS)}", *reasons(verdicts),
              sep="\n  ", flush=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="[NUMBER] FOLDER",
                        help="an exercise from 1 to 12 and a folder; without a number all of them")
    parser.add_argument("--all", nargs="+", metavar="FOLDER", default=[],
                        help="grade these folders, the students' versions")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="where --all writes its table")
    parser.add_argument("--seconds", metavar="S", type=float, default=60.0,
                        help="time limit of one exercise, imports included [60]")
    given = parser.parse_intermixed_args(arguments)
    for stream in (sys.stdout, sys.stderr):  # a folder's name may hold what no console can show
        stream.reconfigure(errors="backslashreplace")

    def fail(text: str):
        parser.exit(2, f"error: {text}\n")

    if given.all and (given.words or not given.csv):
        fail("--all takes folders, and --csv FILE to write to.")
    if not given.all and (not 1 <= len(given.words) <= 2 or given.csv):
        fail("Give a folder, or an exercise's number and a folder. --help shows examples.")
    if not 0 < given.seconds < 1e6:
        fail(f"--seconds must be above 0, not {given.seconds}.")
    try:
        folders = [Path(os.path.abspath(Path(name).expanduser()))
                   for name in given.all or given.words[-1:]]
        # In a class a path that is no folder is a row, and stops nothing.
        known = bool(given.all) or folders[0].is_dir()
    except (OSError, RuntimeError) as error:  # a name that is too long, ~nobody
        fail(f"That is no folder: {error}")
    if given.words in [[str(number)] for number in TASKS] and not folders[0].exists():
        fail(f"Which folder? python exercises/check.py {given.words[0]} FOLDER")
    if not known:
        fail(f"There is no folder {folders[0]}.")
    if len(given.words) == 2 and given.words[0] not in map(str, TASKS):
        fail(f"There is no exercise {given.words[0]}: choose from 1 to {len(TASKS)}.")
    if given.all:
        try:
            open(given.csv, "a").close()  # better refused now than after the first folder
        except OSError as error:
            fail(f"{given.csv} cannot be written: {error.strerror}.")
        return grade_class(folders, given.csv, given.seconds)
    if len(given.words) == 2:
        return check_one(int(given.words[0]), folders[0], given.seconds)
    return show_table(folders[0], given.seconds)


if __name__ == "__main__":
    for name in ("SIGTERM", "SIGHUP"):  # as Ctrl-C: the student's process must not stay behind
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `… | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
