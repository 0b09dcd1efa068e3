"""
The toolset K: what the planner may choose from, and what a tool may ask for while it runs.

Paper: the toolset of the executor and the tool cards of the appendix. Six flat tools: the paper's
five and an offline library search, so that everything also works without a network or a key.
A flow (and a tool inside it) is a generator: it *yields* an `Ask` when it needs the language model
or a `Job` when it needs to block, and is sent the answer. So a tool never holds a model or a thread
pool; whoever drives the flow batches the Asks of hundreds of flows and runs the Jobs beside them.

Run:  python tools.py                                          every tool, and would it work here?
      python tools.py Library_Search_Tool --query "atomic number of Iron"         one tool, once
Left out on purpose: a cache of program results (a program may be random), a block list of Python
modules (they are all bypassed: the sandbox is a process, not a filter), and any guarantee against
code that attacks the kernel itself. `run_python` says what holds and what does not.
"""

import argparse
import ast
import base64
import codecs
import contextlib
import email.utils
import hashlib
import html
import ipaddress
import json
import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlencode, urljoin, urlsplit

import numpy as np
import requests
import urllib3

# ------------------------------------------------------------------------------------------------
# 1. What a flow may yield, and what a tool returns
# ------------------------------------------------------------------------------------------------

ERROR_KINDS = (
    "none",           # the tool did its work
    "bad_arguments",  # refused before anything ran: missing, unknown or of another type
    "timeout",        # stopped at its time limit
    "refused",        # not allowed: a private address, a binary file, another protocol
    "not_found",      # ran well and found nothing
    "rate_limited",   # the service says "slow down": something else than finding nothing
    "network",        # no answer from the other side, or the network is switched off
    "runtime",        # the tool, or the program that it ran, failed
    "missing_key",    # the service wants a key that is not set, or refuses the one that is
    "bad_plan",       # no tool was chosen: the plan could not be read, or names no real tool
    "bad_command",    # no tool was called: the command could not be read, or does not fit the card
)
RESULT_CHARS = 2_000   # of one tool result: what may enter the memory
JOB_SECONDS = 60.0     # after which a blocking job is given up
CACHE_DAYS = 30        # after which a cached page is fetched again
LIBRARY = Path(__file__).parent / "data" / "library.jsonl"


@dataclass(frozen=True)
class Ask:
    """A request to a language model; whoever drives the flow sends back a reply with `.text`."""

    module: str  # who asks: "analyst" | "planner" | "executor" | "verifier" | "generator" | "tool"
    system: str  # the static head of the prompt (instructions, cards): equal for many requests
    user: str    # what changes: question, analysis, memory ...


@dataclass(frozen=True)
class Job:
    """Blocking work (HTTP, the sandbox), run in a thread pool; its return value is sent back."""

    run: Callable[[], Any]


@dataclass
class ToolResult:
    """What a tool hands to the memory: text, the kind of error, and wall seconds.

    The seconds count from the call to the result, the wait for a batched model reply included;
    they are for the logs and never enter a prompt, where they would differ from run to run.
    """

    output: str
    error: str = "none"  # one of ERROR_KINDS
    seconds: float = 0.0
    code: str = ""  # the program that was run: for people and files, no prompt shows it

    def __post_init__(self) -> None:
        assert self.error in ERROR_KINDS, f"{self.error!r} is none of the kinds {ERROR_KINDS}"


_PARSER = threading.Lock()


def parse_python(source: str, mode: str = "exec") -> ast.AST:
    """`ast.parse` for a program with threads. CPython 3.11 counts how deep its parser is in one
    place for all threads, and a thread can be interrupted there: two at once end in a SystemError
    about the recursion depth (gh-106905). Raises what `ast.parse` raises."""
    with _PARSER:
        return ast.parse(source, mode=mode)


def python_literal(text: str) -> Any:
    """`ast.literal_eval` on the same terms."""
    return ast.literal_eval(parse_python(text.lstrip(" \t"), "eval"))


def clip_middle(text: str, limit: int) -> str:
    """Keep head and tail of a text and say how much is missing between: len(result) <= limit.

    Both ends matter: a page says what it is at its head, a program prints its answer at the tail.
    """
    if len(text) <= limit:
        return text
    note = f"\n[... {len(text)} characters left out ...]\n"  # never shorter than the final note
    keep = max(0, limit - len(note))
    if keep == 0:  # no room for a note that makes sense: a plain cut
        return text[:limit]
    head, tail = keep - keep // 2, keep // 2
    note = f"\n[... {len(text) - head - tail} characters left out ...]\n"
    return text[:head] + note + text[len(text) - tail:]


# ------------------------------------------------------------------------------------------------
# 2. The shape of a tool, and the one way to run it
# ------------------------------------------------------------------------------------------------


class ToolError(Exception):
    """What a tool raises to end with a typed error: `raise ToolError("not_found", "No page.")`."""

    def __init__(self, kind: str, message: str) -> None:
        assert kind in ERROR_KINDS, f"{kind!r} is none of the kinds {ERROR_KINDS}"
        super().__init__(message)
        self.kind = kind


class ServerDown(ConnectionError):
    """A server that plays modules or judges cannot be reached, or goes on failing.

    That is nobody's answer: where a tool's own Ask meets it, it is no tool error but goes on up,
    and the roll-out has no reward.
    """


class Refused(ValueError):
    """A server refuses this request, whatever it does with others: the prompt is too long."""


class Tool:
    """A tool card plus `run`. Write your own by setting the fields and `run` in a subclass.

    The planner sees `name` and `description` of every tool, the executor the `card` of the chosen
    one. Both are read on every turn of every roll-out, so each word here is paid for many times.
    """

    name = ""
    description = ""                    # one line for the planner: what for, input, limits
    parameters: dict[str, str] = {}     # name -> type, "= value" marks it optional: "bool = True"
    output = ""                         # what comes back
    demos: tuple[str, ...] = ()         # commands as the executor should write them
    limitations = ""
    best_practices = ""
    needs_network = False
    key: str | None = None              # environment variable without which it cannot work
    job_seconds: float | None = JOB_SECONDS  # None: the tool's jobs bound themselves

    def __init__(self, http: "Http | None" = None) -> None:
        self.http = http or Http()  # the door to the network; shut where none is given

    @property
    def card(self) -> str:
        """The whole card as the executor reads it, a field a line."""
        inputs = ", ".join(f"{name}: {kind}" for name, kind in self.parameters.items())
        demos = [f"Demo: {demo}" for demo in self.demos]
        return "\n".join([
            f"Tool: {self.name}",
            self.description,
            f"Inputs: {inputs}",
            f"Output: {self.output}",
            *demos,
            f"Limits: {self.limitations}",
            f"Advice: {self.best_practices}",
        ])

    def run(self, **arguments):
        """A generator that yields Asks and Jobs and returns a ToolResult (or returns one at once).

        It must not block between two yields: that would stop every flow of the batch. Blocking
        work goes into a Job.
        """
        raise NotImplementedError(f"{type(self).__name__} has no run() yet")


TYPES = {"str": str, "int": int, "float": (int, float), "bool": bool, "list": list}


def check_arguments(parameters: dict[str, str], arguments: dict[str, Any]) -> str | None:
    """The sentence that says what is wrong with the arguments, or None. Nothing is converted."""
    expected = ", ".join(f"{name}: {kind}" for name, kind in parameters.items())
    unknown = [name for name in arguments if name not in parameters]
    if unknown:
        return f"Unknown argument {unknown[0]!r}. Expected: {expected}."
    for name, declared in parameters.items():
        kind, _, default = (part.strip() for part in declared.partition("="))
        if name not in arguments:
            if default:
                continue
            return f"Argument {name!r} is missing. Expected: {expected}."
        value = arguments[name]
        if value is None and default == "None":
            continue
        # subtle: True is an int in Python, and a query of True is surely a slip
        wrong = isinstance(value, bool) and kind != "bool"
        if wrong or not isinstance(value, TYPES.get(kind, object)):
            got = type(value).__name__
            return f"Argument {name!r} must be {kind}, not {got}. Expected: {expected}."
    return None


@dataclass
class _Outcome:
    """What became of a job: its value, or the exception that it raised."""

    value: Any = None
    error: BaseException | None = None


def _bounded(run: Callable[[], Any], seconds: float | None) -> _Outcome:
    """Run a job, catch what it raises, and stop waiting for it after `seconds`.

    A Python thread cannot be killed. A job that hangs is left behind in a daemon thread, which
    does not keep the program from ending; the flow goes on with a typed time-out.
    """
    outcome = _Outcome()

    def work() -> None:
        try:
            outcome.value = run()
        except BaseException as error:  # carried to the flow and raised there, SystemExit too
            outcome.error = error

    if seconds is None:
        work()
        return outcome
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return _Outcome(error=TimeoutError(f"no result within {seconds:g} seconds"))
    return outcome


def text_of(error: BaseException) -> str:
    """str(error), which is foreign code too, and may raise."""
    try:
        return str(error)
    except (Exception, SystemExit) as second:
        return f"(its text raised {type(second).__name__})"


def _drive(tool: Tool, arguments: dict[str, Any]):
    """Advance a tool's generator, with each of its jobs bounded; returns what the tool returned."""
    run = tool.run(**arguments)
    if not hasattr(run, "send"):  # a tool that needs neither model nor job may return at once
        return run
    try:
        need = next(run)
        while True:
            if not isinstance(need, (Ask, Job)):
                raise TypeError(f"the tool asked for {type(need).__name__}: no Ask and no Job")
            if isinstance(need, Ask):
                need = run.send((yield need))
                continue
            # bind this job now: `need` is another one by the time a late thread looks at it
            outcome = yield Job(lambda job=need.run: _bounded(job, tool.job_seconds))
            need = run.throw(outcome.error) if outcome.error else run.send(outcome.value)
    except StopIteration as stop:
        return stop.value
    finally:
        run.close()


def execute(tool: Tool, arguments: dict[str, Any], limit: int = RESULT_CHARS):
    """Check the arguments, run the tool, bound its output: a generator that returns a ToolResult.

    This is the only way in which a flow runs a tool. Whatever goes wrong becomes a typed result:
    the planner reads the text and can do better on its next turn, and no tool ends a flow.
    """
    started = time.perf_counter()
    problem = check_arguments(tool.parameters, arguments)
    for name, value in arguments.items():
        if isinstance(value, str) and not value.strip():
            problem = problem or f"Argument {name!r} is empty."
    if problem:
        return ToolResult(problem, "bad_arguments")
    try:
        result = yield from _drive(tool, arguments)
        if not isinstance(result, ToolResult):
            raise TypeError(f"the tool returned {type(result).__name__}, not a ToolResult")
        result = ToolResult(str(result.output), result.error, code=result.code)
    except ToolError as error:
        result = ToolResult(text_of(error), error.kind)
    except ServerDown:
        raise
    except TimeoutError as error:
        result = ToolResult(f"{tool.name} was stopped: {text_of(error)}.", "timeout")
    # Broad on purpose, and the only place where it is: a tool is foreign code (yours, a service's),
    # and one that fails must cost its roll-out a turn, not the whole training step.
    except (Exception, SystemExit) as error:
        said = f"{tool.name} failed: {type(error).__name__}: {text_of(error)}"
        result = ToolResult(said, "runtime")
    # Without lone surrogates, which "\\ud800" in a site's JSON gives: no tokenizer takes them.
    output = clip_middle(result.output, limit).encode("utf-8", "replace").decode()
    return ToolResult(output, result.error, time.perf_counter() - started, result.code)


# ------------------------------------------------------------------------------------------------
# 3. BM25, for the library and for the chunks of a page
# ------------------------------------------------------------------------------------------------

STOP_WORDS = frozenset(
    "a an and are as at be by did do does for from had has have how in is it its of on or that the "
    "this to was were what when where which who whom whose why will with".split())
K1, B = 1.5, 0.75  # Robertson's usual constants: term saturation, length normalisation


def words(text: str) -> list[str]:
    """Lower-case runs of letters and digits without stop words: what BM25 counts."""
    return [word for word in re.findall(r"[^\W_]+", text.lower()) if word not in STOP_WORDS]


class BM25:
    """Okapi BM25 over a list of texts, with the index term -> (texts that hold it, their weights).

    score(q, d) = Σ_t idf(t) · f · (k1 + 1) / (f + k1 · (1 − b + b · |d| / mean |d|))
    idf(t) = ln(1 + (n − n_t + 0.5) / (n_t + 0.5)), which is never negative.
    Everything but the sum is known when the index is made, so a query costs its own texts only.
    """

    def __init__(self, texts: list[str]) -> None:
        counts = [Counter(words(text)) for text in texts]
        self.size = len(texts)
        lengths = np.array([sum(count.values()) for count in counts], dtype=np.float64)
        norm = K1 * (1 - B + B * lengths / max(lengths.mean() if self.size else 0.0, 1e-9))
        holders: dict[str, list[int]] = {}
        for index, count in enumerate(counts):
            for term in count:
                holders.setdefault(term, []).append(index)
        self.index: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        # BEGIN SOLUTION 3
        for term, rows in holders.items():
            idf = math.log(1 + (self.size - len(rows) + 0.5) / (len(rows) + 0.5))
            where = np.array(rows)
            f = np.array([counts[row][term] for row in rows], dtype=np.float64)
            self.index[term] = (where, idf * f * (K1 + 1) / (f + norm[where]))
        # END SOLUTION 3

    def scores(self, query: str) -> np.ndarray:
        """The score of every text for a query; a word that is asked twice counts once."""
        scores = np.zeros(self.size)
        for term in dict.fromkeys(words(query)):
            if term in self.index:
                rows, weights = self.index[term]
                scores[rows] += weights
        return scores

    def best(self, query: str, count: int, share: float = 0.0) -> list[int]:
        """At most `count` texts, best first, that match at all and reach `share` of the best."""
        # BEGIN SOLUTION 3
        scores = self.scores(query)
        order = np.argsort(-scores, kind="stable")[:count]  # stable: equal scores in text order
        enough = share * scores.max(initial=0.0)
        return [int(row) for row in order if scores[row] > 0 and scores[row] >= enough]
        # END SOLUTION 3


def chunks(text: str, size: int = 200, overlap: int = 20) -> list[str]:
    """Pieces of `size` words, each beginning with the last `overlap` words of the one before."""
    pieces = text.split()
    starts = range(0, max(1, len(pieces) - overlap), size - overlap)
    return [" ".join(pieces[start:start + size]) for start in starts]


def read_library(path: str | Path) -> list[str]:
    """The passages of a JSONL corpus, each as one line `Title: text`.

    Lines are {"id", "title", "text"} or {"id", "contents"} with contents `"title"\\ntext`, as
    search corpora on the web have them. A title that the text names anyway is not said twice.
    Raises ValueError with a sentence that names the file, and the line if there is one.
    """
    passages = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # not splitlines: U+2028
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not in UTF-8"
        raise ValueError(f"The library {path} cannot be read: {reason}. "
                         "Give a JSONL file, or leave Library_Search_Tool out.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            title, text = record.get("title"), record.get("text")
            if text is None:
                title, _, text = record["contents"].partition("\n")
            title = " ".join((title or "").strip().strip('"').split())
            text = " ".join(text.split())
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not a JSON object with title and text, "
                             "or with contents.") from error
        known = title.lower() in text.lower()  # true of an empty title
        passages.append(text if known else f"{title}: {text}")
    if not passages:
        raise ValueError(f"The library {path} holds no passage.")
    return passages


# ------------------------------------------------------------------------------------------------
# 4. The sandbox: model-written Python in a process that can be thrown away
# ------------------------------------------------------------------------------------------------

RUNS_AT_ONCE = max(2, 2 * (os.cpu_count() or 1))
SLOTS = threading.BoundedSemaphore(RUNS_AT_ONCE)  # more at once only make one another time out
CODE_CHARS = 100_000
PASSED_ON = ("LD_LIBRARY_PATH", "SYSTEMROOT")  # of our environment, where Python needs them

# What the child runs before, around and after the program. It imports as little as it can: all of
# `ast`, `json` and `traceback` would double the start-up time, and training starts thousands.
RUNNER = r"""
import _ast, os, sys
mark, namespaces, *caps = sys.argv[1], sys.argv[2] == "1", *map(int, sys.argv[3:])
# All of stdin, so that input() meets its end at once; a byte order mark is no part of a program.
code = sys.stdin.buffer.read().decode("utf-8", "replace").removeprefix("\ufeff")
report, missing, init = os.dup(2), [], 0                   # a private stderr: fd 2 is the program's
work = os.getcwd()                                         # the program's own folder
user, group = (os.getuid(), os.getgid()) if hasattr(os, "getuid") else (-1, -1)  # ours, outside
if "" in sys.path:
    sys.path.remove("")

# 1. Namespaces: no network, no hand on our processes, an init whose death kills all the rest, a
#    file system of our own, and shared memory, semaphores and queues that end with the run. A user
#    namespace is what lets an ordinary user make the others; root needs none, and becomes somebody
#    without rights below.
spaces = {"user": 0x10000000, "network": 0x40000000, "process": 0x20000000, "file": 0x20000,
          "IPC": 0x8000000}
if user == 0:
    del spaces["user"]
try:
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, 9)                                       # die with the thread that started us
    missing += [name + " namespace" for name, flag in spaces.items()
                if not namespaces or libc.unshare(flag)]
    if user and "user namespace" not in missing:
        for file, text in (("setgroups", "deny"), ("uid_map", f"65534 {user} 1"),
                           ("gid_map", f"65534 {group} 1")):
            with open("/proc/self/" + file, "w") as entry:
                entry.write(text)
except (ImportError, OSError, TypeError, AttributeError):  # macOS, Windows, a static Python
    missing = [name + " namespace" for name in spaces]

# 2. Limits, each on its own: one that cannot be set must not skip those after it.
def limit(name, value):
    try:
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    except (AttributeError, ValueError, OSError):
        missing.append(name + " limit")
names = ("CPU", "AS", "FSIZE", "NOFILE", "NPROC", "CORE")
try:
    import resource
    for name, value in zip(names, caps):
        limit(name, value)
except ImportError:
    missing += [name + " limit" for name in names]

# 3. Into the process namespace. The first process in it is its init: when that ends, or is killed
#    from outside, the kernel kills everything inside, whatever session it has fled to.
if "process namespace" not in missing:
    told, tell = os.pipe()
    init = os.fork()
    if init:
        os.write(tell, str(init).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(init, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    init = int(os.read(told, 16))                          # our number as the parent knows us
    os.close(told), os.close(tell)
    libc.prctl(1, 9)
somebody = 2**30 + (init or os.getpid())                   # a user that no other run has

# 4. A file system in which there is only what Python needs, read-only, the program's folder, and
#    its own processes. The old one is gone from it, and so is the right to change any of this.
def mount(source, target, kind=None, flags=0, options=None):
    if libc.mount(source.encode(), target.encode(), kind and kind.encode(), flags,
                  options and options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)

def bind(path, new, read_only=True):
    if os.path.islink(path):
        os.makedirs(os.path.dirname(new + path), exist_ok=True)
        os.symlink(os.readlink(path), new + path)
    elif read_only and os.path.isdir(path) and os.stat(path).st_mode & 5 != 5:
        os.makedirs(new + path, exist_ok=True)             # its owner's alone: what is in it, then,
        for name in os.listdir(path):                      # in a folder that all can enter
            bind(path + "/" + name, new)
    elif os.path.exists(path):
        if os.path.isdir(path):
            os.makedirs(new + path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(new + path), exist_ok=True)
            os.close(os.open(new + path, os.O_CREAT))
        mount(path, new + path, flags=0x1000 | 0x4000)     # bind, with what is mounted below
        if read_only:                                      # and what held before has to stay
            held = os.statvfs(path).f_flag
            mount("none", new + path, flags=0x1000 | 0x20 | 1 | held & 0xC0E | (held & 4096) << 9)

def new_root():
    new = os.path.dirname(work) + "/root"
    mount("none", "/", flags=0x4000 | 1 << 18)             # nothing spreads back
    mount("tmpfs", new, "tmpfs", 6, "size=64m,nr_inodes=8192,mode=755")
    os.mkdir(new + "/tmp"), os.chmod(new + "/tmp", 0o1777)
    bind(work, new, read_only=False)
    paths = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache",
             "/etc/alternatives", "/etc/fonts", "/etc/localtime", "/dev/null", "/dev/zero",
             "/dev/full", "/dev/random", "/dev/urandom"]
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    paths += sorted(filter(os.path.isabs, {sys.prefix, sys.base_prefix, *sys.path, *libraries}))
    for number, path in enumerate(paths):
        known = any((path + "/").startswith(other + "/") for other in paths[:number])
        if path != "/" and not known:
            bind(path, new)
    os.mkdir(new + "/proc")
    mount("proc", new + "/proc", "proc", 14)
    os.chdir(new)
    pivot_root, capset = {"x86_64": (155, 126), "aarch64": (41, 91)}[os.uname().machine]
    if libc.syscall(pivot_root, b".", b".") or libc.umount2(b".", 2):
        raise OSError(ctypes.get_errno(), "pivot_root")
    os.chdir(work)
    nothing = (ctypes.c_uint32 * 6)()                      # no capability, and none by exec
    if user and libc.syscall(capset, (ctypes.c_uint32 * 2)(0x20080522, 0), nothing):
        raise OSError(ctypes.get_errno(), "capset")
if user == 0:
    os.chown(work, somebody, somebody), os.chown(os.path.dirname(work), somebody, somebody)
if not {"user namespace", "process namespace", "file namespace"} & set(missing):
    try:
        new_root()
    except (OSError, KeyError) as error:
        missing.append(f"file namespace ({error})")

# 5. Root becomes a user of this run's own: no limit on processes binds root, and no file is closed.
if user == 0:
    try:
        os.seteuid(somebody)                               # on trial: can it read Python's files?
        for path in (os.__file__, sys.executable, *sys.path):
            if os.path.lexists(path) or path == sys.executable:
                os.close(os.open(path, os.O_RDONLY))
        os.seteuid(0)
        os.setgroups([]), os.setgid(somebody), os.setuid(somebody)
    except OSError as error:
        os.seteuid(0)
        missing.append(f"unprivileged user ({error})")
if init:
    libc.prctl(1, 9), libc.prctl(4, 1)                     # a change of users forgets both
    libc.prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0)))
os.write(report, f"{mark} {init} {missing!r}\n".encode())

# 6. The program, in one namespace as the file __main__ would have it.
main = sys.modules["__main__"] = type(sys)("__main__")
sys.argv = ["program.py"]
sys.stdout.reconfigure(line_buffering=True)                # what was printed survives a kill
if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(100_000)

def short(text):
    return text if len(text) <= 2000 else text[:1000] + " [...] " + text[-1000:]

def explain(error):
    where = ""                                             # all that is read here may be the
    try:                                                   # program's own code, and fail too
        text = str(error.msg if isinstance(error, SyntaxError) else error)
    except BaseException as second:
        text = f"(its text raised {type(second).__name__})"
    try:
        line, step = getattr(error, "lineno", None), error.__traceback__
        while step and not isinstance(error, SyntaxError):
            if step.tb_frame.f_code.co_filename == "program.py":
                line = step.tb_lineno                      # the last frame of the program's own
            step = step.tb_next
        source = code.split("\n")[line - 1].strip() if line and line <= code.count("\n") + 1 else ""
        where = f" (line {line}: {source[:80]})" if source else ""
    except BaseException as second:
        where = f" (its line raised {type(second).__name__})"
    return short(type(error).__name__ + (": " + text if text else "")) + where

value, error_kind, message, exit_code = None, "none", "", 0
try:
    tree = compile(code, "program.py", "exec", 0x400, True)          # 0x400: only parse, no import
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    exec(compile(tree, "program.py", "exec", 0, True), main.__dict__)
    if last is not None:                                   # the last expression's value, as a REPL
        last = compile(_ast.Expression(last.value), "program.py", "eval", 0, True)
        value = eval(last, main.__dict__)
        value = None if value is None else short(repr(value))
except SystemExit as stop:
    exit_code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    if exit_code:
        said = "" if isinstance(stop.code, int) else f": {short(str(stop.code))}"
        error_kind, message = "runtime", f"SystemExit with exit code {exit_code}{said}"
except BaseException as error:                             # whatever it is, it is the program's
    if isinstance(error, MemoryError):
        main.__dict__.clear()                              # room to say so
    value, error_kind, message, exit_code = None, "runtime", explain(error), 1
try:
    sys.stdout.flush()
except (OSError, ValueError, AttributeError):
    sys.stdout = None                                      # it has closed or replaced its own
os.write(report, f"\n{mark} {(value, error_kind, message)!r}\n".encode("utf-8", "replace"))
sys.exit(exit_code & 255)                                  # threads and atexit still run
"""


@dataclass
class PythonRun:
    """What became of a program; `text` says it in words."""

    stdout: str = ""
    value: str | None = None       # repr of the last expression, None if there was none
    error: str = "none"            # "none" | "runtime" | "timeout", as in ToolResult
    message: str = ""              # the last line of the traceback, or how the program ended
    stderr: str = ""               # warnings and the like: no part of the text
    seconds: float = 0.0           # run time; waiting for a free place does not count
    missing: tuple[str, ...] = ()  # protections that this machine did not grant

    @property
    def status(self) -> str:
        return {"none": "ok", "runtime": "error", "timeout": "timeout"}[self.error]

    @property
    def text(self) -> str:
        """The output, else the value, else the error and what had been printed before it."""
        said = self.stdout.strip()
        if self.error == "none":
            return said or self.value or "The program printed nothing."
        return self.message + (f"\nIt had printed:\n{said}" if said else "")


class _Pipe(threading.Thread):
    """Reads a pipe to its end but keeps only head and tail: 300 MB of prints cost a few kB."""

    def __init__(self, pipe, limit: int) -> None:
        super().__init__(daemon=True)
        self.pipe, self.half = pipe, max(1, limit // 2)
        self.head, self.tail, self.total = b"", b"", 0
        self.start()

    def run(self) -> None:
        with self.pipe:
            while data := self.pipe.read1(65_536):  # b"" once every writer has closed its end
                self.total += len(data)
                room = self.half - len(self.head)
                self.head, data = self.head + data[:room], data[room:]
                self.tail = (self.tail + data)[-self.half:]

    def text(self) -> str:
        """What was kept, NUL bytes (which break logs) made visible."""
        lost = self.total - len(self.head) - len(self.tail)
        if lost > 0:
            head, tail = (part.decode("utf-8", "ignore") for part in (self.head, self.tail))
            text = f"{head}\n[... {lost} bytes left out ...]\n{tail}"
        else:
            text = (self.head + self.tail).decode("utf-8", "replace")
        return text.replace("\r\n", "\n").replace("\x00", "\ufffd")


def _kill_everything(process: subprocess.Popen, waiter: threading.Thread, init: int,
                     folder: str) -> None:
    """Kill the child, its process group, and what has left the group."""
    if os.name != "posix":
        process.kill()
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already (macOS: EPERM)
        if init > 0:
            # The kernel does it all: init's death is the death of everyone inside, and our child
            # outside, which waits for it, ends when the last of them is gone.
            os.kill(init, signal.SIGKILL)
            waiter.join(2.0)
        if waiter.is_alive() or init == 0:
            os.killpg(process.pid, signal.SIGKILL)
    # Without a namespace: who has left the group sits in our folder or names it in its environment.
    # Again until a look finds nobody: the dying take a while, and may fork once more before.
    for _ in range(100 if init == 0 and os.path.isdir("/proc/self") else 0):
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # ended meanwhile, or not ours to read
                home = os.readlink(entry / "cwd").startswith(folder)
                if home or folder.encode() in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.01)


def _remove(folder: str) -> None:
    """Remove a run's folder, whatever the program made of it; never raises.

    However deep the program went, nothing recurses, and no level holds a descriptor. Where a path
    grows too long for the system, the rest of it is moved up to the top.
    """
    found = [folder]
    for home in found:  # it grows on the way
        with contextlib.suppress(OSError):
            os.chmod(home, 0o700)  # the program may have taken its own rights away
            with os.scandir(home) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            found.append(_within_reach(entry.path, folder))
                        else:
                            os.unlink(entry.path)
    for home in reversed(found):
        with contextlib.suppress(OSError):
            os.rmdir(home)


def _within_reach(path: str, folder: str) -> str:
    """The path of a folder in it, moved up where its own is long (the system's limit is 4,096)."""
    if len(path) < 2_000:
        return path
    os.chmod(path, 0o700)  # who may not write in a folder may not move it
    top = os.path.join(folder, secrets.token_hex(8))
    os.rename(path, top)
    return top


def run_python(code: str, timeout: float = 10.0, memory_mb: int = 1024, max_output: int = 20_000,
               namespaces: bool = True) -> PythonRun:
    """Run a program once in a fresh Python process and say what it printed.

    timeout in wall seconds of the run, memory_mb of address space for each process, max_output in
    bytes of stdout and of stderr. Nothing that the program does is raised here.

    What holds, on Linux: the program has an empty folder that is removed afterwards, none of our
    environment, no input, and limits on CPU time, memory, file size, open files and processes. At
    the end of the run the whole process group is killed, and those that left it. Root runs it as a
    user without rights. Where the kernel allows namespaces, it has no network, sees no processes
    and no shared memory but its own, and of the file system only what Python needs, read-only, and
    its own folder.
    What could not be had is listed in `missing`.
    What does not hold: memory is bounded a process, and disk a file (and 64 MB of /tmp), not in
    total; no place is kept for it on the CPU; a hole in the kernel is a hole in this. Without
    namespaces it reads every file that you can read, and writes where you can write. On macOS there
    are none, on Windows no limits and no process group either: run there only what you would run
    yourself, or use a virtual machine.
    """
    if not code.strip():
        return PythonRun(error="runtime", message="The program is empty.")
    if len(code) > CODE_CHARS:
        return PythonRun(error="runtime", message=f"More than {CODE_CHARS} characters of code.")
    folder = os.path.realpath(tempfile.mkdtemp(prefix="agentflow-"))
    try:
        with SLOTS:
            return _run_in(folder, code, timeout, memory_mb, max_output, namespaces)
    finally:
        _remove(folder)  # outside of the slot: a million files take a while, and no run waits


@lru_cache(1)
def sandbox_lacks() -> tuple[str, ...]:
    """The protections of run_python that this machine does not grant; tried once."""
    return run_python("0").missing


def sandbox_line() -> str:
    """One line that says which protections hold here."""
    if lacks := sandbox_lacks():
        return (f"sandbox: NOT granted here: {', '.join(lacks)}. Model-written programs run "
                "without; --sandbox strict refuses to.")
    return ("sandbox: programs have a user, a network, processes and files of their own, and "
            "limits on time, memory, file size, open files and processes")


def _run_in(folder: str, code: str, timeout: float, memory_mb: int, max_output: int,
            namespaces: bool) -> PythonRun:
    """Start the child in its folder, feed it, wait, kill what is left, and read its report."""
    started = time.perf_counter()
    work = os.path.join(folder, "work")
    os.mkdir(work)
    os.mkdir(os.path.join(folder, "root"))  # where the program's file system is put together
    mark = "run-" + secrets.token_hex(8)  # tells the child's report from what the program prints
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment |= {"PATH": os.defpath, "HOME": work, "TMPDIR": work, "LANG": "C.UTF-8",
                    "MPLCONFIGDIR": work, "MPLBACKEND": "Agg",  # no display to wait for
                    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                    # a set of strings prints in the same order every time: runs can be repeated
                    "PYTHONHASHSEED": "0"}
    cpu = math.ceil(timeout) + 1  # a net under the wall clock, for a child that we lose sight of
    caps = [cpu, memory_mb << 20, 64 << 20, 128, 64, 0]  # CPU, AS, FSIZE, NOFILE, NPROC, CORE
    # Not -I: it is -E (the environment is ours anyway), -s, and -P, and would ignore the hash seed.
    command = [sys.executable, "-s", "-B", "-X", "utf8", "-c", RUNNER, mark,
               str(int(namespaces)), *map(str, caps)]
    process = subprocess.Popen(command, cwd=work, env=environment, start_new_session=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    out, err = _Pipe(process.stdout, max_output), _Pipe(process.stderr, max(16_000, max_output))
    # BEGIN SOLUTION 4
    # Popen.wait(timeout) looks every 50 ms; a thread that blocks in waitpid knows at once.
    waiter = threading.Thread(target=process.wait, daemon=True)
    waiter.start()
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:  # died first: its exit code tells
            process.stdin.write(code.encode("utf-8", "replace"))
        waiter.join(max(0.0, timeout - (time.perf_counter() - started)))
    finally:  # on Ctrl-C too
        late, seconds = waiter.is_alive(), time.perf_counter() - started
        init, missing = _first_words(err, mark)
        if late or init == 0:
            _kill_everything(process, waiter, init, folder)
    # END SOLUTION 4
    for thread in (waiter, out, err):
        thread.join(2.0)  # at once, unless someone has fled with our pipe: then without the rest
    ended = (process.returncode, timeout if late else None)
    value, error, message, stderr = _verdict(err.text(), mark, *ended)
    return PythonRun(out.text(), value, error, message, stderr, seconds,
                     tuple(python_literal(missing)))


def _first_words(err: _Pipe, mark: str) -> tuple[int, str]:
    """(process number of the namespace's init, 0 without one; what is missing), as the child said
    them on stderr before the program ran."""
    header = re.match(rf"{mark} (\d+) (\[.*\])\n".encode(), err.head)
    return (int(header[1]), header[2].decode()) if header else (0, "[]")


def _verdict(stderr: str, mark: str, code: int | None,
             timeout: float | None) -> tuple[str | None, str, str, str]:
    """(value, error, message, stderr): how a run ended, from the child's report or without one.

    The program can forge the report, but gains no more by it than by printing: a report of another
    shape counts for none.
    """
    stderr, _, report = re.sub(rf"\A{mark}.*\n", "", stderr).rpartition(f"\n{mark} ")
    try:
        value, error, message = python_literal(report.split("\n")[0])
        if error not in ("none", "runtime") or not isinstance(message, str) or not isinstance(
                value, str | None):
            raise ValueError
    # None: it was killed, or left by os._exit. The last two: forged, of ten thousand brackets.
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        signed = code is not None and (code < 0 or code > 128)
        how = f"signal {-code if code < 0 else code - 128}" if signed else f"exit code {code}"
        value, error, message = None, "runtime", f"The program ended early with {how}."
        report = ""
    if timeout is not None:  # an error that came before is the better clue: threads may hang on
        # BEGIN SOLUTION 4
        also = f" Before: {message}" if report and message else ""
        return None, "timeout", f"Timed out after {timeout:g} seconds.{also}", stderr
        # END SOLUTION 4
    return value, error, message, stderr


# ------------------------------------------------------------------------------------------------
# 5. HTTP that is polite, bounded, and cannot be turned inwards
# ------------------------------------------------------------------------------------------------

OFFLINE = "The network is switched off in this run (--offline)."
MAX_BYTES = 2_000_000   # of a decoded body; the rest of a page is not read
CONNECT_SECONDS, READ_SECONDS, TOTAL_SECONDS = 5.0, 10.0, 30.0
TRIES, HOPS = 3, 5      # requests for one answer; redirects for one request
HOST_AT_ONCE = 2        # requests to one host
CHARSETS = re.compile(  # of real pages, by Python's names
    r"utf-(8|16|32)(-le|-be)?|ascii|iso8859-\d+|cp\d+|koi8-[rtu]|mac-\w+|tis-620|shift_jis\w*|"
    r"euc_\w+|gb\w+|hz|big5\w*|iso2022_\w+|johab")
AGENT = "AgentFlow-from-scratch/1.0 (educational; contact: {contact}) python-requests"


@dataclass(frozen=True)
class Page:
    """What came back: where from, status, headers, and at most MAX_BYTES of decoded body."""

    url: str
    status: int
    headers: Any  # case-insensitive mapping
    body: bytes

    @property
    def type(self) -> str:
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    def text(self) -> str:
        """The body decoded by the charset of the header, of the page itself, or as UTF-8.

        Not requests' own `.text`, which reads a page without a charset as ISO-8859-1. Nor any codec
        that Python has: punycode and idna are slow without bound, unicode_escape is no charset.
        """
        told = re.search(r"charset=[\"']?([\w-]+)", self.headers.get("Content-Type", ""), re.I)
        meta = re.search(rb"<meta[^>]+charset=[\"']?([\w-]+)", self.body[:2048], re.I)
        name = told[1] if told else meta[1].decode() if meta else "utf-8"
        try:
            name = codecs.lookup(name).name
        except (LookupError, ValueError):  # a charset that Python has never heard of
            name = "utf-8"
        name = name if CHARSETS.fullmatch(name) else "utf-8"
        return self.body.decode(name, "replace").removeprefix("\ufeff")

    def json(self) -> dict:
        """The body as an object; a challenge page with status 200 is a ToolError("network")."""
        try:
            return dict(json.loads(self.body))
        except (ValueError, TypeError, RecursionError) as error:
            raise ToolError("network", f"No JSON but {self.type}: {self.said}") from error

    @property
    def said(self) -> str:
        """The body in one short line, for error messages."""
        return clip_middle(" ".join(self.text().split()), 200)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet; IPv4 inside IPv6 is judged as IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.version == 6:
        nat64 = ip in ipaddress.ip_network("64:ff9b::/96")
        inner = (ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
                 or (nat64 and ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if inner:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast


def check_url(url: str, allow_private: bool = False) -> tuple[SplitResult, str]:
    """The parts of an allowed URL and the address to connect to; raises ToolError("refused").

    Every address that the name resolves to must be public, and the caller connects to the address
    that was checked: a name that resolves to something else a moment later gains nothing. Decimal
    and hexadecimal forms of an address go through the same resolver and meet the same check.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError as error:
        raise ToolError("bad_arguments", f"This is no web address: {url[:200]}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ToolError("refused", "Only full http and https addresses can be read.")
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ToolError("network", f"The host {parts.hostname} was not found.") from error
    addresses = [entry[4][0] for entry in found]
    if not allow_private and not all(is_public(address) for address in addresses):
        raise ToolError("refused", f"{parts.hostname} is not a public address.")
    return parts, addresses[0]


class _Pinned(requests.adapters.HTTPAdapter):
    """Speaks TLS for a host name while connected to its address (certificate and SNI by name), and
    notes a second handle of each connection's socket, by which it can be ended from outside."""

    def __init__(self, host: str | None, sockets: list[socket.socket]) -> None:
        self.tls = {"server_hostname": host, "assert_hostname": host} if host else {}
        self.sockets = sockets
        super().__init__()

    def init_poolmanager(self, *args, **kwargs):
        super().init_poolmanager(*args, **self.tls, **kwargs)
        sockets = self.sockets

        def noting(pool, connection):
            class Noting(connection):
                def _new_conn(self):
                    made = super()._new_conn()
                    sockets.append(made.dup())
                    return made

            return type(pool.__name__, (pool,), {"ConnectionCls": Noting})

        self.poolmanager.pool_classes_by_scheme = {
            "http": noting(urllib3.HTTPConnectionPool, urllib3.connection.HTTPConnection),
            "https": noting(urllib3.HTTPSConnectionPool, urllib3.connection.HTTPSConnection),
        }


@contextlib.contextmanager
def ended_at(end: float, sockets: list[socket.socket]):
    """Shuts the sockets down at `end` (of time.monotonic): a server that drips a byte now and then
    keeps every read within its time-out, and would hold us for hours."""
    def hang_up() -> None:
        for one in sockets:
            with contextlib.suppress(OSError):  # not connected any more
                one.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, end - time.monotonic()), hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        for one in sockets:
            one.close()


def cache_folder() -> Path:
    """$AGENTFLOW_CACHE, by default ~/.cache/agentflow."""
    return Path(os.environ.get("AGENTFLOW_CACHE") or "~/.cache/agentflow").expanduser()


def seconds_to_wait(told: str) -> float | None:
    """Retry-After, which is a number of seconds or a date; None where it is neither."""
    if told.isascii() and told.isdecimal():  # isdigit alone is true of "²"
        return float(told)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(told).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


@lru_cache(1024)
def places_at(host: str) -> threading.BoundedSemaphore:
    """The places of a host, the same for all of this program's requests to it."""
    return threading.BoundedSemaphore(HOST_AT_ONCE)


@dataclass(frozen=True)
class Http:
    """The one door to the network. `offline` keeps it shut: nothing is even resolved."""

    offline: bool = True
    allow_private_hosts: bool = False  # for a classroom's own server
    contact: str = "none given"        # Wikipedia turns away agents that do not say who they are
    cache: Path | None = None          # where pages are kept for CACHE_DAYS; None: nowhere

    def require(self) -> None:
        """Raise the typed error at once when the network is switched off."""
        if self.offline:
            raise ToolError("network", OFFLINE)

    def fetch(self, url: str, **options: Any) -> Page:
        """GET a page, or POST where `json` is given. Blocks: call it from a Job.

        options: `params`, `json`, `headers`, as in requests; `check`: finds the error in an answer
        with status 200. Tries again, a bounded number of times, after a dropped connection, a 429
        or a 5xx, and waits as long as Retry-After says. A host is asked by HOST_AT_ONCE flows at a
        time: more are answered with 429. Raises ToolError with the kind and a sentence for
        everything else than a 2xx.
        """
        self.require()
        # All that decides what comes back; the key and who we are do not, and are not written.
        asked = [url, options.get("params"), options.get("json"), self.allow_private_hosts]
        name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        page = self._cached(name)
        if page is None:
            with places_at(url.partition("://")[2].partition("/")[0]):
                page = self._fetch(url, options)
            self._keep(name, page)
        return page

    def _cached(self, name: str) -> Page | None:
        """A page that was kept; none where there is no cache, or nothing readable in it."""
        file = self.cache and self.cache / f"{name}.json"
        try:
            if not file or time.time() - file.stat().st_mtime > 86_400 * CACHE_DAYS:
                return None
            kept = json.loads(file.read_text(encoding="utf-8"))
            url, kind, body = kept["url"], kept["type"], base64.b64decode(kept["body"])
            whole = isinstance(url, str) and isinstance(kind, str)
            return Page(url, 200, {"Content-Type": kind}, body) if whole else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None  # half a file, or another's: fetched again

    def _keep(self, name: str, page: Page) -> None:
        """Write a page beside its place and rename it: nobody reads half of one."""
        if not self.cache:
            return
        file = self.cache / f"{name}.json"
        kept = {"url": page.url, "type": page.headers.get("Content-Type", ""),
                "body": base64.b64encode(page.body).decode()}
        beside = file.with_suffix(f".{secrets.token_hex(4)}.tmp")
        with contextlib.suppress(OSError):  # full, or not ours to write: the page is at hand
            self.cache.mkdir(parents=True, exist_ok=True)
            try:
                beside.write_text(json.dumps(kept), encoding="utf-8")
                beside.replace(file)
            finally:
                beside.unlink(missing_ok=True)

    def _fetch(self, url: str, options: dict[str, Any]) -> Page:
        """`fetch` without the cache."""
        end = time.monotonic() + TOTAL_SECONDS
        for attempt in range(1, TRIES + 1):
            wait = 0.5 * 2 ** (attempt - 1)
            try:
                page = self._follow(url, end, options)
                problem = status_error(page) or options.get("check", lambda _: None)(page)
                told = seconds_to_wait(page.headers.get("Retry-After", "").strip())
                wait = wait if told is None else told
            # The message of requests' errors holds the whole address: say the kind only.
            except requests.Timeout as error:
                problem = ToolError("timeout", f"{urlsplit(url).hostname} did not answer in time "
                                               f"({type(error).__name__}).")
            # ValueError: what requests lets through of an address or a length that makes no sense.
            except (requests.RequestException, ValueError) as error:
                late = time.monotonic() >= end  # we have hung up
                problem = ToolError("timeout" if late else "network",
                                    f"No answer from {urlsplit(url).hostname} "
                                    f"({'too slow' if late else type(error).__name__}).")
            if problem is None:
                return page
            again = problem.kind in ("rate_limited", "network", "timeout")
            if not again or attempt == TRIES or time.monotonic() + wait > end:
                raise problem
            time.sleep(wait)
        raise AssertionError("the last try has returned or raised")

    def _follow(self, url: str, end: float, options: dict[str, Any]) -> Page:
        """One request and its redirects, each address checked as the first one was."""
        method = "POST" if "json" in options else "GET"
        if "params" in options:
            url = f"{url}?{urlencode(options['params'])}"
        for _ in range(HOPS + 1):
            page = self._request(method, url, end, options)
            target = page.headers.get("Location")
            if page.status not in (301, 302, 303, 307, 308) or not target:
                return page
            if method == "POST":  # it carries a key, which is for the first host alone
                raise ToolError("refused", f"{urlsplit(url).hostname} redirected a POST.")
            url = urljoin(url, target)
        raise ToolError("refused", f"More than {HOPS} redirects.")

    def _request(self, method: str, url: str, end: float, options: dict[str, Any]) -> Page:
        """One request to the address that was checked; the body is read up to its limits."""
        parts, address = check_url(url, self.allow_private_hosts)
        host = f"[{address}]" if ":" in address else address
        numeric = parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host).geturl()
        headers = {"User-Agent": AGENT.format(contact=self.contact), **options.get("headers", {}),
                   "Host": parts.netloc.rpartition("@")[2]}
        sockets: list[socket.socket] = []
        with requests.Session() as session, ended_at(end, sockets):
            session.trust_env = False  # no proxy and no .netrc behind our back
            session.mount("http://", _Pinned(None, sockets))
            session.mount("https://", _Pinned(parts.hostname, sockets))
            with session.request(method, numeric, headers=headers, json=options.get("json"),
                                 timeout=(CONNECT_SECONDS, READ_SECONDS), stream=True,
                                 allow_redirects=False) as response:
                packed = response.headers.get("Content-Encoding", "").strip().lower()
                if packed not in ("", "identity", *urllib3.HTTPResponse.CONTENT_DECODERS):
                    raise ToolError("refused", f"{parts.hostname} packs its answer as "
                                               f"{packed[:40]!r}, which cannot be read here.")
                body = b""
                for chunk in response.iter_content(16_384):  # decoded: a gzip bomb is cut too
                    body += chunk
                    if len(body) >= MAX_BYTES:
                        break
                if time.monotonic() >= end:  # without a length, a body that we cut looks whole
                    raise requests.Timeout("total")
                return Page(url, response.status_code, response.headers, body[:MAX_BYTES])


def status_error(page: Page) -> ToolError | None:
    """The typed error of an HTTP status, None for a 2xx."""
    if 200 <= page.status < 300:
        return None
    kinds = {404: "not_found", 410: "not_found", 429: "rate_limited"}
    kind = kinds.get(page.status, "network" if page.status >= 500 else "refused")
    host = urlsplit(page.url).hostname
    return ToolError(kind, f"{host} answered with status {page.status}: {page.said}")


# What of a page is no text. A browser's reading, in which a tag, a comment or a script that never
# ends goes on to the end of the page: so each alternative, once begun, cannot fail, nothing is read
# twice, and 2 MB of "<a " cost what 2 MB of text cost. (Python's HTMLParser looks for the end anew
# at each "<": minutes.) No tag has 5,000 attributes; the bound keeps the memory of a match small.
ATTRIBUTES = r"""(?:[^>=]+|=+\s*(?:"[^"]*(?:"|\Z)|'[^']*(?:'|\Z))?){0,5000}"""
MARKUP = re.compile(rf"""
    <!--(?:-?>|.*?(?:--!?>|\Z))                          # a comment
  | <(script|style|noscript|template|svg|iframe)(?![^\s/>]){ATTRIBUTES}
        (?:(?<=/)>|>.*?(?:</\1(?![^\s/>])[^>]*>?|\Z)|)   # what these hold is not shown
  | </?([a-z][^\s/>]*){ATTRIBUTES}>?                     # any other tag, begun or ended
  | <[!?/][^>]*>?                                        # a doctype, CDATA, nonsense
    """, re.X | re.S | re.I)
INLINE = ("a", "b", "i", "em", "strong", "span", "sub", "sup", "code", "small", "u", "mark")


def visible(page: str) -> str:
    """The text of an HTML page, a line break where a block begins or ends."""
    text = MARKUP.sub(lambda tag: "\n" if tag[1] or tag[2] and tag[2].lower() not in INLINE else "",
                      page)
    # A number of thousands of digits names no character, and int() refuses it with an exception.
    return html.unescape(re.sub(r"&#\d{20,};?", "\ufffd", text))


def readable(page: Page) -> str:
    """The text of a page, a paragraph a line; ToolError("refused") names a type without text."""
    kind = page.type or ("text/html" if b"<html" in page.body[:1024].lower() else "text/plain")
    plain = kind.startswith("text/") or kind.endswith(("json", "xml", "javascript"))
    if not plain or page.body.startswith(b"%PDF") or b"\x00" in page.body[:1024]:
        raise ToolError("refused", f"This address is no text page but {kind}.")
    text = page.text()
    if "html" in kind:
        text = visible(text)
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


# ------------------------------------------------------------------------------------------------
# 6. The six tools
# ------------------------------------------------------------------------------------------------

# The prompts inside tools. A model of one million parameters and one of seven billion get the same
# words, and every roll-out pays for them: so they are one or two short sentences.
REQUEST = "Request: {query}"
BASE_SYSTEM = "Answer the request briefly. If you do not know, say so."
CODER_SYSTEM = ("Write one short Python program that prints the answer to the request. "
                "Reply with one python code block only.")
PICK_SYSTEM = ("Which of these pages may help with the request? "
               "Reply with the numbers of at most three, best first.")
SUMMARY_SYSTEM = ("Answer the request from this text only, briefly. "
                  "If the text does not say, say so.")


def extract_code(reply: str) -> str:
    """The first Python block of a reply, fenced or not, closed or not; or the whole reply.

    A fence ends only at the start of a line: back-ticks inside a string are part of the program.
    """
    reply = reply.rpartition("</think>")[2]
    blocks = re.findall(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", reply, re.M | re.S)
    for language, code in blocks:
        if language.lower() in ("", "py", "python", "python3"):
            return code
    inline = re.search(r"```(?:python3?|py)?[ \t]+(.*?)(?:```|\Z)", reply, re.S)  # all on one line
    return inline[1] if inline and not blocks else reply


class Base_Generator_Tool(Tool):
    """The frozen language model itself, asked once."""

    name = "Base_Generator_Tool"
    description = ("Answers from the language model's own memory. Input: query. "
                   "May be wrong about rare facts and numbers.")
    parameters = {"query": "str"}
    output = "a short text"
    demos = ('execution = tool.execute(query="Explain what an acid is.")',)
    limitations = "It looks nothing up and calculates nothing."
    best_practices = "Ask one clear question that holds all it needs."

    def run(self, query: str):
        reply = yield Ask("tool", BASE_SYSTEM, REQUEST.format(query=query))
        text = reply.text.strip()
        return ToolResult(text) if text else ToolResult("The model said nothing.", "runtime")


class Python_Coder_Tool(Tool):
    """Words in, a printed answer out: the model writes one program, the sandbox runs it once."""

    name = "Python_Coder_Tool"
    description = ("Writes and runs a short Python program to calculate. "
                   "Input: query in words with all numbers. Knows no facts.")
    parameters = {"query": "str"}
    output = "what the program printed, or its error"
    demos = ('execution = tool.execute(query="Compute 12 * (7 + 5).")',)
    limitations = "One program, a few seconds, no network and no files."
    best_practices = "Say the whole calculation in words or as a formula; do not write code."
    job_seconds = None            # the sandbox has its own clock, and waiting for a place is free
    run_python = staticmethod(run_python)
    timeout = 10.0                # the official tool's

    def run(self, query: str):
        reply = yield Ask("tool", CODER_SYSTEM, REQUEST.format(query=query))
        code = extract_code(reply.text)
        run = yield Job(lambda: self.run_python(code, timeout=self.timeout))
        return ToolResult(run.text, run.error, code=code)


class Google_Search_Tool(Tool):
    """Web search through Serper's API (google.serper.dev)."""

    name = "Google_Search_Tool"
    description = "Searches the web for general or recent facts. Input: query. Needs the network."
    parameters = {"query": "str", "add_citations": "bool = True"}
    output = "results with title, snippet and link"
    demos = ('execution = tool.execute(query="population of Norway")',)
    limitations = "Snippets only; they may be out of date or wrong."
    best_practices = "Search for one fact with a few exact words; read a page with Web_Search_Tool."
    needs_network = True
    key = "SERPER_API_KEY"
    url = "https://google.serper.dev/search"

    def run(self, query: str, add_citations: bool = True):
        self.http.require()
        key = os.environ.get(self.key, "")
        if not key:
            raise ToolError("missing_key", f"{self.name} needs {self.key} in the environment.")
        # The key goes into a header: an address ends up in logs.
        page = yield Job(lambda: self.search(query, key))
        answer = page.json()
        box, lines = answer.get("answerBox") or {}, []
        if box.get("answer") or box.get("snippet"):
            lines.append(f"Answer: {box.get('answer') or box.get('snippet')}")
        for rank, hit in enumerate(answer.get("organic") or [], start=1):
            link = f" ({hit.get('link', '')})" if add_citations else ""
            lines.append(f"[{rank}] {hit.get('title', '')}: {hit.get('snippet', '')}{link}")
        if not lines:
            return ToolResult(f"Google found nothing for {query!r}.", "not_found")
        return ToolResult("\n".join(lines))

    def search(self, query: str, key: str) -> Page:
        """One request; Serper's own ways of saying "no key" and "no credits" get their kinds."""
        try:
            return self.http.fetch(self.url, json={"q": query, "num": 10},
                                   headers={"X-API-KEY": key})
        except ToolError as error:
            if "status 403" in str(error) or "status 401" in str(error):
                raise ToolError("missing_key", f"Serper refuses the {self.key}.") from error
            if "credits" in str(error):  # status 400: it looks like a bad request and is none
                raise ToolError("refused", f"The {self.key} has no credits left.") from error
            raise


class Wikipedia_Search_Tool(Tool):
    """MediaWiki's API: search titles, let the model pick, read the pages."""

    name = "Wikipedia_Search_Tool"
    description = ("Finds and reads Wikipedia pages about a person, place or thing. "
                   "Input: query. Needs the network.")
    parameters = {"query": "str"}
    output = "up to three pages with what they say, and other titles"
    demos = ('execution = tool.execute(query="Marie Curie")',)
    limitations = "Only Wikipedia; no news and no calculation."
    best_practices = "Name the person, place or thing, and the fact that you want."
    needs_network = True
    url = "https://en.wikipedia.org/w/api.php"

    def run(self, query: str):
        self.http.require()
        found = yield Job(lambda: self.api(list="search", srsearch=query, srlimit=10, srprop=""))
        titles = [hit["title"] for hit in found.get("search", [])]
        if not titles:
            return ToolResult(f"Wikipedia has no page for {query!r}.", "not_found")
        listing = "\n".join(f"{number}. {title}" for number, title in enumerate(titles, start=1))
        reply = yield Ask("tool", PICK_SYSTEM, f"{REQUEST.format(query=query)}\nPages:\n{listing}")
        # A number that is no page is no choice; without any choice, the first hit is read.
        numbers = dict.fromkeys(int(number) for number in re.findall(r"\b\d{1,2}\b", reply.text))
        picked = [titles[number - 1] for number in numbers if 1 <= number <= len(titles)][:3]
        picked = picked or titles[:1]
        lines = []
        for rank, title in enumerate(picked, start=1):
            text = yield Job(lambda title=title: self.page(title, query))
            lines.append(f"[{rank}] {clip_middle(text, RESULT_CHARS // (len(picked) + 1))}")
        others = ", ".join(title for title in titles if title not in picked)
        return ToolResult("\n".join(lines) + (f"\nOther pages: {others}" if others else ""))

    def api(self, **parameters) -> dict:
        """The `query` part of an answer. MediaWiki reports its errors with status 200."""
        page = self.http.fetch(self.url, check=self.problem, params={
            "action": "query", "format": "json", "formatversion": 2, **parameters})
        return page.json().get("query", {})

    @staticmethod
    def problem(page: Page) -> ToolError | None:
        """The error that an answer with status 200 reports, None for none."""
        error = page.json().get("error")
        if error is None:
            return None
        code, info = (str(error.get(name, "")) for name in ("code", "info"))
        busy = code in ("maxlag", "ratelimited") or "queue is full" in info or "timed out" in info
        return ToolError("rate_limited" if busy else "refused", f"Wikipedia says: {info}")

    def page(self, title: str, query: str) -> str:
        """`Title (address): text` with the passages of a page that fit the query best."""
        pages = self.api(prop="extracts|info|pageprops", inprop="url", ppprop="disambiguation",
                         explaintext=1, redirects=1, titles=title).get("pages", [])
        page = pages[0] if pages else {"missing": True}
        if page.get("missing"):
            return f"{title}: this page does not exist."
        head = f"{page['title']} ({page.get('fullurl', '')})"
        if "disambiguation" in page.get("pageprops", {}):  # the key counts, its value is empty
            linked = self.api(prop="links", plnamespace=0, pllimit=50, titles=page["title"])
            links = [link["title"] for entry in linked.get("pages", [])
                     for link in entry.get("links", [])]
            return f"{head} may mean: {', '.join(links)}"
        pieces = chunks(page.get("extract", ""), size=60, overlap=10)
        best = sorted(set(BM25(pieces).best(query, count=3)) | {0})  # the first says what it is
        return f"{head}: " + " ... ".join(pieces[index] for index in best)


class Web_Search_Tool(Tool):
    """One page: fetched, made readable, cut into chunks, the best of them summarised."""

    name = "Web_Search_Tool"
    description = ("Reads one web page and answers a query from it. "
                   "Input: query, url. Needs the network and a known address.")
    parameters = {"query": "str", "url": "str"}
    output = "a short answer from the page"
    demos = ('execution = tool.execute(query="opening hours", url="https://example.org/visit")',)
    limitations = "Text pages only; no PDF, no login, no private address."
    best_practices = "Take the address from a search result; never make one up."
    needs_network = True

    def run(self, query: str, url: str):
        self.http.require()
        text, address = yield Job(lambda: self.read(query, url))
        if not text:
            return ToolResult("This page holds no text.", "not_found")
        reply = yield Ask("tool", SUMMARY_SYSTEM, f"{REQUEST.format(query=query)}\nText:\n{text}")
        return ToolResult(f"{reply.text.strip()} ({address})")

    def read(self, query: str, url: str) -> tuple[str, str]:
        """The passages of a page that fit the query best, in the page's order, and its address.
        All of it in the Job: a page of 2 MB takes half a second, for which no other flow waits."""
        page = self.http.fetch(url)
        pieces = chunks(readable(page))
        best = BM25(pieces).best(query, count=10) or range(min(10, len(pieces)))
        return "\n".join(pieces[index] for index in sorted(best)), page.url


class Library_Search_Tool(Tool):
    """Offline search: BM25 over a file of passages."""

    name = "Library_Search_Tool"
    description = ("Looks up facts in the offline library. Input: query with the exact name. "
                   "Calculates nothing.")
    parameters = {"query": "str"}
    output = "up to three passages"
    demos = ('execution = tool.execute(query="atomic number of iron")',)
    limitations = "It holds only its own passages and cannot calculate."
    best_practices = "Name the thing exactly as in the question, and the fact that you want."

    def __init__(self, library: str | Path = LIBRARY) -> None:
        self.passages = read_library(library)
        self.index = BM25(self.passages)

    def run(self, query: str):
        # BEGIN SOLUTION 3
        # Not a Job: a look-up costs microseconds, less than a hop to another thread.
        found = self.index.best(query, count=3, share=0.7)
        if not found:
            return ToolResult("No passage in the library matches this query.", "not_found")
        room = RESULT_CHARS // 3 - 8  # so that three long passages do not push one another out
        lines = [f"[{rank}] {clip_middle(self.passages[row], room)}"
                 for rank, row in enumerate(found, start=1)]
        return ToolResult("\n".join(lines))
        # END SOLUTION 3


TOOLS = (Base_Generator_Tool, Python_Coder_Tool, Google_Search_Tool, Wikipedia_Search_Tool,
         Web_Search_Tool, Library_Search_Tool)  # this order, always: prompts list them so


def make_tools(names: list[str] | None = None, offline: bool = True,
               library: str | Path = LIBRARY, allow_private_hosts: bool = False,
               contact: str = "none given", cache: bool = False,
               strict: bool = False) -> list[Tool]:
    """The toolset of a run: the named tools, or all six, in a fixed order.

    Offline, the network tools stay on offer and answer with the typed error `network`. cache: keep
    web pages in `cache_folder()`. strict: no Python_Coder_Tool without the whole sandbox. Raises
    ValueError with a sentence for an unknown name, a missing key, an unreadable library, or a
    protection that is missing.
    """
    known = [kind.name for kind in TOOLS]
    unknown = [name for name in names or [] if name not in known]
    if unknown or names == []:
        problem = f"{unknown[0]!r} is no tool" if unknown else "A run needs at least one tool"
        raise ValueError(f"{problem}. Choose from: {', '.join(known)}.")
    if not contact.strip() or not contact.isprintable():
        raise ValueError("--contact is a mail address or a page, in one line.")
    pages = cache_folder() / "http" if cache and not offline else None
    try:
        if pages:
            pages.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Web pages cannot be kept in {pages} ({error.strerror}): set "
                         "AGENTFLOW_CACHE to a folder that can be written, or add --no_cache."
                         ) from error
    http = Http(offline, allow_private_hosts, contact, pages)
    tools: list[Tool] = []
    for kind in TOOLS:
        if names is not None and kind.name not in names:
            continue
        if kind.key and not offline and not os.environ.get(kind.key):
            raise ValueError(f"{kind.name} needs {kind.key}. Set it, leave the tool out with "
                             "--tools, or run with --offline.")
        if issubclass(kind, Python_Coder_Tool) and strict and sandbox_lacks():
            raise ValueError("--sandbox strict: this machine does not grant "
                             f"{', '.join(sandbox_lacks())}. Leave {kind.name} out with --tools, "
                             "or run without strict.")
        tools.append(kind(library if issubclass(kind, Library_Search_Tool) else http))
    return tools


def show_tools() -> None:
    """The tools, whether they would work here, and their cards."""
    print("tool                   works offline / online   for what")
    for kind in TOOLS:
        lacks = f"no: {kind.key}" if kind.key and not os.environ.get(kind.key) else "yes"
        if kind is Library_Search_Tool and not LIBRARY.exists():
            lacks = "no: library"
        offline = "no" if kind.needs_network else lacks
        print(f"{kind.name:22} {offline:3} / {lacks:18} {kind.description}")
    run = run_python("print(6*7)")
    print(f"\nrun_python('print(6*7)') -> {run.text!r} in {1000 * run.seconds:.0f} ms")
    print(sandbox_line())
    for kind in TOOLS:
        print(f"\n{kind.card.fget(kind)}")


def python_value(text: str) -> Any:
    """True, 3, [1, 2] as Python writes them; of what else is wrong, argparse says it."""
    try:
        return python_literal(text)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(text) from error


def parse_arguments(parameters: dict[str, str], words: list[str], prog: str) -> dict[str, Any]:
    """A tool's own flags, --name value for each of its inputs, as its arguments."""
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False)
    for name, declared in parameters.items():
        kind, _, default = (part.strip() for part in declared.partition("="))
        read = str if kind == "str" else python_value
        parser.add_argument(f"--{name}", type=read, required=not default, help=declared,
                            default=argparse.SUPPRESS)
    return vars(parser.parse_args(words))


def main(arguments: list[str] | None = None) -> int:
    """List the tools, or run one of them with the model that is asked inside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False, epilog="The tool's inputs are flags: --query, --url, ...")
    parser.add_argument("tool", nargs="?", choices=[kind.name for kind in TOOLS], metavar="TOOL",
                        help="the one to run; without it, all are listed")
    parser.add_argument("--model", default="builtin", help="asked inside the tool [builtin]")
    parser.add_argument("--corpus", default=str(LIBRARY), help="of Library_Search_Tool, JSONL")
    parser.add_argument("--contact", default="none given", help="said to the sites that are asked")
    parser.add_argument("--offline", action="store_true", help="network tools answer `network`")
    parser.add_argument("--allow_private_hosts", action="store_true", help="a classroom's server")
    parser.add_argument("--no_cache", action="store_true", help="fetch pages again")
    parser.add_argument("--sandbox", default="auto", choices=["auto", "strict"],
                        help="strict: no program unless every protection holds")
    options, rest = parser.parse_known_args(arguments)
    if options.tool is None:
        if rest:
            parser.error(f"unknown argument {rest[0]}")
        show_tools()
        return 0
    import agentflow  # here, as it imports this file

    try:
        (tool,) = make_tools([options.tool], options.offline, options.corpus,
                             options.allow_private_hosts, options.contact, not options.no_cache,
                             options.sandbox == "strict")
        given = parse_arguments(tool.parameters, rest, f"tools.py {tool.name}")
        backbone = agentflow.load_backbone(options.model)
    except (ValueError, OSError) as error:
        return agentflow.fail(error)
    (result,) = agentflow.drive([execute(tool, given)], [(0,)], backbone, agentflow.Sampling())
    if result.code:
        print(f"{result.code.rstrip()}\n---")
    print(result.output)
    if result.error != "none":
        print(f"error: {result.error}", file=sys.stderr)
    return int(result.error != "none")


if __name__ == "__main__":
    import agentflow
    import tools  # this file under its own name: agentflow.py must meet the same classes

    sys.exit(agentflow.run_command(tools.main))
