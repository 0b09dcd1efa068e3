"""Makes the students' version: the project with each solution replaced by a stub.

    python exercises/make.py FOLDER        FOLDER: new or empty, outside of the project

What lies between `# BEGIN SOLUTION k` and `# END SOLUTION k` in the project's own files becomes a
hint and `raise NotImplementedError("exercise k: …")`. Signatures and docstrings stay. What stays
behind: tests, since they hold second versions of the same functions; the silent bugs, which are the
whole project with all solutions; runs, caches and environments.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from tasks import TASKS

PROJECT = Path(__file__).resolve().parent.parent
FILES = ("*.py", "*.md", "*.toml", "requirements*.txt", "LICENSE", ".gitignore")  # at the top
FOLDERS = ("data", "exercises")
LEFT_OUT = ("make.py", "bugs.py", "bugs", "LECTURE.md", "__pycache__", "*.pyc", ".*")
MARKER = re.compile(r"( *)# (BEGIN|END) SOLUTION (\d+)\n")


def stub(number: int, block: int, indent: str) -> str:
    """The lines that stand in a solution's place."""
    todo = TASKS[number].blocks[block]
    first, rest = f"{indent}# ", f"{indent}#   "
    hint = "\n".join(
        textwrap.fill(part, 98, initial_indent=first, subsequent_indent=rest)
        for part in re.split(r" (?=Out[:,]|Helpers?:|See )", todo.hint))
    line = f'{indent}raise NotImplementedError("exercise {number}: {todo.write}")'
    if len(line) > 100:
        line = line.replace("(", f"(\n{indent}    ", 1)
    return f"{hint}\n{line}\n"


def without_solutions(source: str, blocks: dict[int, int]) -> str:
    """The source with stubs; `blocks` counts the places so far. Raises ValueError for markers that
    do not pair up."""
    kept, inside = [], None
    for line in source.splitlines(keepends=True):
        marker = MARKER.fullmatch(line)
        if marker and marker[2] == "BEGIN" and inside is None:
            inside = number = int(marker[3])
            kept.append(stub(number, blocks.setdefault(number, 0), marker[1]))
            blocks[number] += 1
        elif marker and marker[2] == "END" and inside == int(marker[3]):
            inside = None
        elif marker or "# BEGIN SOLUTION" in line or "# END SOLUTION" in line:
            raise ValueError(f"This marker has no partner, or is not alone: {line.strip()}")
        elif inside is None:
            kept.append(line)
    if inside is not None:
        raise ValueError(f"A solution of exercise {inside} has no end.")
    return "".join(kept)


def copy_project(
    folder: Path, rewrite: Callable[[str, str], str], folders: tuple[str, ...] = FOLDERS
) -> None:
    """The project in `folder`, each Python file at its top as rewrite(name, source) gives it."""
    found = [path for pattern in FILES for path in sorted(PROJECT.glob(pattern)) if path.is_file()]
    changed = {path: rewrite(path.name, path.read_text(encoding="utf-8"))
               for path in found if path.suffix == ".py"}
    folder.mkdir(parents=True, exist_ok=True)
    for path in found:
        if path in changed:
            (folder / path.name).write_text(changed[path], encoding="utf-8", newline="\n")
        else:
            shutil.copyfile(path, folder / path.name)
    for name in folders:
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns(*LEFT_OUT))


def not_free(folder: Path) -> str:
    """Why nothing can be written into this folder; "" where it can."""
    if folder == PROJECT or PROJECT in folder.parents:
        return f"{folder} is in the project itself: choose a folder outside."
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        return f"{folder} is there already: choose a new or an empty folder."
    return ""


def make(folder: Path) -> dict[int, int]:
    """Write the students' version into the folder; how many places each exercise has there."""
    blocks: dict[int, int] = {}
    copy_project(folder, lambda name, source: without_solutions(source, blocks))
    return blocks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where to: a new folder")
    folder = parser.parse_args(arguments).folder.expanduser().resolve()
    if problem := not_free(folder):
        parser.exit(2, f"error: {problem}\n")
    try:
        blocks = make(folder)
    except OSError as error:
        parser.exit(2, f"error: {error.filename} cannot be written: {error.strerror}.\n")
    print(f"{folder}: {len(blocks)} exercises, {sum(blocks.values())} places to fill in. "
          f"Begin with `cd {folder}` and `python exercises/check.py .`")
    return 0


if __name__ == "__main__":
    sys.exit(main())
