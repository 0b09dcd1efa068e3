"""memory.py: the evolving memory M^t of one roll-out.

Paper, section 3: M^{t+1} = f_mem(M^t, a^t, e^t, v^t). f_mem has no parameters: it writes down what
a turn did, and `render()` is what planner, verifier and generator read of it.

Three rules, each of which a fault elsewhere has paid for:
  fresh         every roll-out makes its own Memory; nothing survives a question;
  append-only   text is bounded when it is recorded and never rewritten, so the prompt of turn
                t+1 begins with the tokens of turn t's and their keys and values can be reused;
  reproducible  what varies between two equal runs (seconds) is kept, but never rendered.

Run:  python memory.py      (a two-turn memory, as the planner reads it)
Left out on purpose: summaries by a language model; the paper's memory is deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools import clip_middle

# Bounds in characters, applied when a step is recorded. Without them, one flooding tool would
# push the question out of every later prompt.
MAX_RESULT = 2000
MAX_SUB_GOAL = 500
MAX_COMMAND = 500


@dataclass
class Step:
    """One turn as the memory keeps it: (t, a^t, e^t, v^t) of the paper's f_mem."""

    turn: int  # t, from 1
    sub_goal: str  # from a^t
    tool_name: str  # from a^t; "" when the plan named no tool that there is
    command: str  # from e^t: the call that the executor wrote, "" when nothing was run
    result: str  # from e^t: the tool's output, or the sentence that says what went wrong
    error: str = "none"  # the error signal: the kind of failure, "none" where all is well
    stop: bool | None = None  # v^t: True = STOP, False = CONTINUE, None = not judged yet
    seconds: float = 0.0  # for plan, command and tool; recorded, never rendered

    def render(self, max_result: int | None = None) -> str:
        """The step as text. The verdict is its last line, so concluding a step only appends."""
        # BEGIN SOLUTION 1
        result = self.result if max_result is None else clip_middle(self.result, max_result)
        lines = [
            f"Step {self.turn}",
            f"Sub-Goal: {self.sub_goal}",
            f"Tool Name: {self.tool_name}",
        ]
        if self.command:
            lines.append(f"Command: {self.command}")
        if self.error != "none":
            lines.append(f"Error: {self.error}")
        lines.append(f"Result: {result}")
        if self.stop is not None:
            lines.append(f"Verdict: {'STOP' if self.stop else 'CONTINUE'}")
        return "\n".join(lines)
        # END SOLUTION 1


class Memory:
    """M^t of one roll-out: `add` a step after the tool, `conclude` it after the verifier."""

    def __init__(self) -> None:
        self.steps: list[Step] = []  # M^1 is empty: the question stands in each prompt itself

    def add(
        self,
        *,
        sub_goal: str,
        tool_name: str,
        command: str,
        result: str,
        error: str = "none",
        seconds: float = 0.0,
    ) -> Step:
        """Record what turn t did (a^t and e^t), bounded. Keywords only: six strings in a row
        would be swapped sooner or later."""
        assert not self.steps or self.steps[-1].stop is not None, (
            "conclude() the last step before adding the next: each turn has one verdict"
        )
        step = Step(
            turn=len(self.steps) + 1,
            sub_goal=clip_middle(sub_goal, MAX_SUB_GOAL),
            tool_name=clip_middle(tool_name, MAX_SUB_GOAL),
            command=clip_middle(command, MAX_COMMAND),
            result=clip_middle(result, MAX_RESULT),
            error=error,
            seconds=seconds,
        )
        self.steps.append(step)
        return step

    def conclude(self, stop: bool) -> None:
        """Record v^t for the last step: M^{t+1} is complete."""
        assert self.steps and self.steps[-1].stop is None, (
            "conclude() follows exactly one add(): there is no open step to judge"
        )
        self.steps[-1].stop = stop

    def render(self, max_results: list[int] | None = None) -> str:
        """M^t as the modules read it; "" before the first turn.

        max_results: characters to show of each step's result, where a prompt had to be shortened
            (see `agentflow.fit_prompt`); None shows them as recorded, which is append-only:
            a longer memory's text begins with a shorter one's.
        """
        # BEGIN SOLUTION 1
        limits = max_results or [None] * len(self.steps)
        shown = zip(self.steps, limits, strict=True)
        return "\n".join(step.render(limit) for step, limit in shown)
        # END SOLUTION 1


if __name__ == "__main__":
    memory = Memory()
    memory.add(
        sub_goal="Find the atomic number of the element Iron.",
        tool_name="Library_Search_Tool",
        command='tool.execute(query="atomic number of the element Iron")',
        result="[1] The atomic number of the element Iron is 26.",
        seconds=0.1,
    )
    memory.conclude(stop=False)
    first = memory.render()
    memory.add(
        sub_goal="Calculate 23 times 26.",
        tool_name="Python_Coder_Tool",
        command='tool.execute(query="Calculate 23 times 26.")',
        result="x" * 5000,
        error="timeout",
        seconds=10.0,
    )
    memory.conclude(stop=True)
    print(memory.render(max_results=[2000, 40]))
    print("\nappend-only:", memory.render().startswith(first))
