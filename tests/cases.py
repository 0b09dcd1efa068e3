"""Runs recorded cases through the parsers: `python -m tests.cases [FILE.jsonl]`.

A case is one JSON object a line: id, kind, tier (`must` or `should`), the kind's inputs, and
`expected_value` (null: a typed error, or no answer) or `accept`, a list of values of which any
will do. Prints a line for each case that differs and, last, how many passed, failed and were
skipped (kinds that are not known). Exit code 1 if a `must` fails or fewer than 90 % of the
`should` pass, 2 if the file cannot be read.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import eval as evaluation
import modules
import tools

DEFAULT = Path(__file__).with_name("cases.jsonl")


def run_plan(case: dict) -> Any:
    plan = modules.parse_plan(case["input"], case["available_tools"])
    found = {"context": plan.context, "sub_goal": plan.sub_goal, "tool_name": plan.tool_name}
    return None if plan.error else found


def run_command(case: dict) -> Any:
    command = modules.parse_command(case["input"], case["card"])
    return None if command.error else [command.arguments]


def run_verdict(case: dict) -> Any:
    return "STOP" if modules.parse_verdict(case["input"]).stop else "CONTINUE"


def run_answer(case: dict) -> Any:
    return evaluation.extract_answer(case["input"])


def run_score(case: dict) -> Any:
    return evaluation.score(
        case["kind"],
        case["prediction"],
        case["reference"],
        extracted=case["stage"] == "answer",
        choices=case.get("choices"),
        numbers=case.get("numbers"),
        metric=case.get("metric"),
    )


def left_over(badge: str) -> list[str]:
    """Live processes that carry a badge in their environment (a zombie's reads as empty)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if badge.encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def program_faults(case: dict, outside: Path, badge: str) -> list[str]:
    """Runs a case's program in the sandbox, in a thread, and lists the checks that fail.

    outside: a folder that the program should not reach. CANARY in the code is a path there where
    the check is that nothing gets there, and else a name in the program's own folder.
    badge: a text that the program's processes carry in their environment, to find them again.
    """
    checks, canary = case["checks"], outside / "canary"
    escapes = any(name.startswith("canary_absent") for name in checks)
    code = case["input"].replace("CANARY", str(canary) if escapes else "canary.txt")
    times = case.get("repeat_parallel", 1)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    # One of the few variables that are passed on to the program.
    environment = {**case.get("env", {}), "LD_LIBRARY_PATH": badge}
    with mock.patch.dict(os.environ, environment), ThreadPoolExecutor(times) as pool:
        jobs = [pool.submit(tools.run_python, code, case.get("limit_s", 10)) for _ in range(times)]
        runs = [job.result() for job in jobs]
    seconds = time.perf_counter() - started
    time.sleep(checks.get("canary_absent_after_s", 0))
    known = {
        "status": lambda run, wanted: run.status == wanted,
        "stdout": lambda run, wanted: run.stdout.strip() == wanted,
        "stdout_contains": lambda run, wanted: wanted in run.stdout,
        "text_contains": lambda run, wanted: wanted in run.text,
        "text_contains_any": lambda run, wanted: any(one in run.text for one in wanted),
        "text_absent": lambda run, wanted: not any(x in run.text + run.stderr for x in wanted),
        "max_seconds": lambda run, wanted: seconds <= wanted,
        "max_output_chars": lambda run, wanted: len(run.stdout) + len(run.text) <= wanted,
        "truncation_note": lambda run, wanted: "bytes left out" in run.text,
        "canary_absent_after_s": lambda run, wanted: not canary.exists(),
        "canary_absent_outside_workdir": lambda run, wanted: not canary.exists(),
        "no_children_left": lambda run, wanted: not left_over(badge),
        "caller_alive": lambda run, wanted: tools.run_python("print(7)").stdout == "7\n",
    }
    faults = [f"{name} {wanted!r} is not so of {run}" for run in runs
              for name, wanted in checks.items() if not known[name](run, wanted)]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # kB
    return faults + [f"the caller's memory grew by {grown} kB"] * (grown >= 50_000)


def run_program(case: dict) -> Any:
    with tempfile.TemporaryDirectory() as outside:
        return program_faults(case, Path(outside), f"/nowhere/{uuid.uuid4().hex}") or "as expected"


RUNNERS = {
    "parse_plan": run_plan,
    "parse_command": run_command,
    "parse_verdict": run_verdict,
    "parse_answer": run_answer,
    "parse_judge": lambda case: evaluation.parse_judge(case["input"]),
    "python_tool": run_program,
    **dict.fromkeys(("math", "mc", "text", "gaia", "game24"), run_score),
}


def wanted(case: dict) -> list[Any]:
    """All values that are right for a case. Scored kinds have `expected`: a truth or a number."""
    if "checks" in case:
        return ["as expected"]
    if "accept" in case:
        return case["accept"]
    return [case["expected_value"] if "expected_value" in case else case["expected"]]


def same(found: Any, right: Any) -> bool:
    """Scores to 1e-3; everything else exactly, where True is not 1: hence through JSON."""
    if isinstance(found, float) and isinstance(right, (bool, int, float)):
        return abs(found - float(right)) <= 1e-3
    return json.dumps(found, sort_keys=True) == json.dumps(right, sort_keys=True)


def check(case: dict) -> tuple[bool, str]:
    """(passed, what was found). An exception is a failed case, and the other cases still run."""
    try:
        found = RUNNERS[case["kind"]](case)
    except Exception as error:  # whatever a parser raises is what this program is there to report
        return False, f"{type(error).__name__}: {error}"
    return any(same(found, right) for right in wanted(case)), repr(found)


def read(path: str | Path) -> list[dict]:
    """The cases of a file. Raises ValueError with the number of a line that is no JSON object."""
    cases = []
    for number, line in enumerate(Path(path).read_text("utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not a JSON object ({error})") from error
        if not isinstance(case, dict) or "kind" not in case:
            raise ValueError(f"{path}, line {number}: not a JSON object with a 'kind'")
        cases.append(case)
    return cases


def main(arguments: list[str]) -> int:
    try:
        cases = read(arguments[0] if arguments else DEFAULT)
    except (OSError, ValueError) as error:
        print(f"The cases cannot be read: {error}", file=sys.stderr)
        return 2
    results: dict[str, list[bool]] = {"must": [], "should": []}
    skipped: dict[str, int] = {}  # by kind
    for case in cases:
        if case["kind"] not in RUNNERS:
            skipped[case["kind"]] = skipped.get(case["kind"], 0) + 1
            continue
        passed, found = check(case)
        tier = case.get("tier", "must")
        results.setdefault(tier, []).append(passed)
        if not passed:
            right = " or ".join(repr(value) for value in wanted(case))
            print(f"{case.get('id')} ({tier}): got {found}, wanted {right}")
    outcomes = [passed for tier in results.values() for passed in tier]
    passed, should = sum(outcomes), results["should"]
    if skipped:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(skipped.items()))
        print(f"skipped, kinds that are not known: {kinds}")
    print(f"{passed} passed, {len(outcomes) - passed} failed, {sum(skipped.values())} skipped")
    enough = all(results["must"]) and sum(should) >= 0.9 * len(should)
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
