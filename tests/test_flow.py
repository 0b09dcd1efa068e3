"""The flow (Algorithm 1, one roll-out), its memory and its driver, on a scripted backbone."""

import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

import agentflow
import memory
import modules
import tools
from agentflow import Limits, Sampling, ScriptedBackbone
from tools import Ask, Job, Tool, ToolResult


class Echo(Tool):
    """Says what it was asked."""

    name = "Echo_Tool"
    description = "Repeats the query."
    parameters = {"query": "str"}

    def run(self, query):
        return ToolResult(f"echo of {query}")
        yield  # a generator, as every tool's run


class Thinker(Tool):
    """Asks the language model."""

    name = "Thinker_Tool"
    description = "Thinks."
    parameters = {"query": "str"}

    def run(self, query):
        reply = yield Ask("tool", "Think.", query)
        return ToolResult(f"thought {reply.text}")


class Trouble(Tool):
    """Fails in the way that it is told to."""

    name = "Trouble_Tool"
    description = "Fails."
    parameters = {"query": "str"}
    job_seconds = 0.2

    def run(self, query):
        if query == "raise":
            raise KeyError("boom")
        if query == "raise in a job":
            yield Job(lambda: 1 / 0)
        if query == "hang":
            yield Job(lambda: time.sleep(3))
        return ToolResult("x" * 1_000_000)


TOOLS = [Echo(), Thinker(), Trouble()]


def plan(tool="Echo_Tool", goal="Find it."):
    return f"Justification: j\nContext: c\nSub-Goal: {goal}\nTool Name: {tool}"


def script(**changed):
    """A right agent's lines for one turn; keywords replace a module's."""
    lines = {
        "analyst": "Summary: s",
        "planner": plan(),
        "executor": 'execution = tool.execute(query="iron")',
        "verifier": "Explanation: e\nConclusion: STOP",
        "generator": "<answer> 26 </answer>",
        "tool": "hm",
        **changed,
    }
    queues = {m: list(t) if isinstance(t, list) else None for m, t in lines.items()}
    return ScriptedBackbone(
        lambda ask: queues[ask.module].pop(0) if queues[ask.module] else lines[ask.module]
    )


def run(backbone, questions=("What is q?",), group=1, max_turns=3, toolset=TOOLS, **more):
    return agentflow.roll_out(
        list(questions), group, backbone, toolset, Limits(max_turns), Sampling(), 0, 1, **more
    )


def test_one_roll_out_asks_the_modules_in_the_order_of_algorithm_1():
    """Two turns: analysis once, then planner, executor, verifier a turn, then the generator."""
    backbone = script(verifier=["Conclusion: CONTINUE", "Conclusion: STOP"])
    (rollout,) = run(backbone)
    assert [ask.module for ask in backbone.asked] == [
        "analyst", "planner", "executor", "verifier", "planner", "executor", "verifier",
        "generator",
    ]
    assert len(rollout.turns) == 2 and rollout.stopped
    assert rollout.generator.text == "<answer> 26 </answer>"


def test_the_verdict_stop_ends_the_flow_and_t_max_bounds_it():
    always = script(verifier="Conclusion: CONTINUE")
    (rollout,) = run(always, max_turns=3)
    assert len(rollout.turns) == 3 and not rollout.stopped
    (rollout,) = run(script(), max_turns=3)
    assert len(rollout.turns) == 1 and rollout.stopped


def test_a_verdict_that_only_mentions_stopping_goes_on():
    (rollout,) = run(script(verifier="We should not stop here; more evidence is needed."))
    assert len(rollout.turns) == 3


def test_two_questions_in_a_row_share_no_memory():
    """The prompts of the second question are those of a run that never saw the first."""
    alone = script()
    run(alone, ["What is second?"])
    after = script()
    run(after, ["What is first?"])
    before = len(after.asked)
    run(after, ["What is second?"])
    assert after.asked[before:] == alone.asked
    assert not any("first" in ask.user for ask in after.asked[before:])


def test_the_analysis_is_made_once_a_question_and_shared_by_its_group():
    backbone = script(analyst="Summary: shared words")
    rollouts = run(backbone, ["What is a?", "What is b?"], group=4)
    assert [ask.module for ask in backbone.asked].count("analyst") == 2
    planners = [ask for ask in backbone.asked if ask.module == "planner"]
    assert len(rollouts) == len(planners) == 8
    assert all("shared words" in ask.user for ask in planners)


def test_roll_outs_come_back_group_by_group():
    rollouts = run(script(), ["What is a?", "What is b?"], group=3)
    assert [rollout.question for rollout in rollouts] == ["What is a?"] * 3 + ["What is b?"] * 3


def test_changing_any_frozen_modules_reply_changes_what_follows():
    """No rule stands in for a module: for each of them, another reply gives another flow."""
    (usual,) = run(script())

    changed = script(analyst="Summary: another")
    run(changed)
    assert all("another" in ask.user for ask in changed.asked if ask.module == "planner")

    (rollout,) = run(script(executor='execution = tool.execute(query="gold")'))
    assert usual.turns[0].result.output == "echo of iron"
    assert rollout.turns[0].result.output == "echo of gold"

    (rollout,) = run(script(verifier="Conclusion: CONTINUE"))
    assert len(rollout.turns) == 3 and len(usual.turns) == 1

    (rollout,) = run(script(generator="<answer> 79 </answer>"))
    assert rollout.generator.text != usual.generator.text

    thinker = {"planner": plan("Thinker_Tool")}
    (one,) = run(script(**thinker, tool="yes"))
    (other,) = run(script(**thinker, tool="no"))
    assert one.turns[0].result.output == "thought yes"
    assert other.turns[0].result.output == "thought no"


def test_the_executor_sees_the_plan_and_the_chosen_card_but_no_memory_and_no_question():
    backbone = script(verifier=["Conclusion: CONTINUE", "Conclusion: STOP"])
    run(backbone, ["What is the secret question?"])
    executor = [ask for ask in backbone.asked if ask.module == "executor"][1]
    assert "Find it." in executor.user and "Echo_Tool" in executor.system
    assert "secret" not in executor.user + executor.system
    assert "Step 1" not in executor.user and "Thinker_Tool" not in executor.system


def test_planner_and_verifier_see_the_memory_and_the_generator_sees_all_of_it():
    backbone = script(verifier=["Conclusion: CONTINUE", "Conclusion: STOP"])
    (rollout,) = run(backbone)
    planners = [ask for ask in backbone.asked if ask.module == "planner"]
    assert "Step 1" not in planners[0].user and "echo of iron" in planners[1].user
    first_verifier = next(ask for ask in backbone.asked if ask.module == "verifier")
    assert "echo of iron" in first_verifier.user and "Verdict" not in first_verifier.user
    generator = backbone.asked[-1]
    assert generator.user.endswith(rollout.memory) and "Step 2" in rollout.memory


def test_a_prompt_of_the_next_turn_begins_with_this_turns_prompt():
    """Append-only: nothing before the memory's end changes, so its keys and values can be kept."""
    backbone = script(verifier="Conclusion: CONTINUE")
    run(backbone, max_turns=4)
    planners = [ask for ask in backbone.asked if ask.module == "planner"]
    verifiers = [ask for ask in backbone.asked if ask.module == "verifier"]
    for asks in (planners, verifiers):
        for earlier, later in zip(asks, asks[1:], strict=False):
            assert later.system == earlier.system and later.user.startswith(earlier.user)


def test_a_tool_that_raises_hangs_or_floods_becomes_a_typed_error_and_the_flow_goes_on():
    """Q·G roll-outs stay, the memory says what happened, and the answer decides the reward."""
    expected = {
        "raise": "runtime", "raise in a job": "runtime", "hang": "timeout", "flood": "none",
    }
    for query, error in expected.items():
        backbone = script(
            planner=plan("Trouble_Tool"), executor=f'execution = tool.execute(query="{query}")'
        )
        started = time.perf_counter()
        rollouts = run(backbone, group=3)
        assert time.perf_counter() - started < 2.5, "a hanging tool must not be waited for"
        assert len(rollouts) == 3
        for rollout in rollouts:
            assert rollout.turns[0].result.error == error
            assert len(rollout.memory) < 4000, "whatever enters the memory is bounded"
            assert ("Error: " + error in rollout.memory) == (error != "none")
            assert rollout.generator.text == "<answer> 26 </answer>"


def test_a_tools_request_that_fits_no_context_is_a_typed_error_of_the_tool():
    backbone = script(planner=plan("Thinker_Tool"))
    submit = backbone.submit

    def full(request):
        if request.ask.module == "tool":
            raise ValueError("this prompt does not fit")
        submit(request)

    backbone.submit = full
    (rollout,) = run(backbone)
    assert rollout.turns[0].result.error == "runtime"
    assert "does not fit" in rollout.memory and rollout.generator.text


def test_text_that_no_tokenizer_takes_does_not_reach_it():
    """A lone surrogate, as JSON and Python literals can spell it, becomes a question mark."""
    (rollout,) = run(script(
        planner='{"context": "c", "sub_goal": "find \\ud800", "tool_name": "Echo_Tool"}',
        executor='tool.execute(query="\\udfff x")',
    ))
    rollout.memory.encode("utf-8")
    assert rollout.turns[0].result.output == "echo of ? x"


def test_an_unknown_tool_or_an_unreadable_plan_is_a_step_that_lists_the_real_tools():
    for text in (plan("Calculator_Tool"), "I do not know what to do."):
        (rollout,) = run(script(planner=text))
        (turn,) = rollout.turns
        assert turn.result.error == "bad_plan" and turn.executor is None
        assert all(tool.name in rollout.memory for tool in TOOLS)


def test_a_command_that_cannot_be_read_runs_nothing_and_says_what_is_allowed():
    for command in ("nothing to run", 'tool.execute(queri="a")', "tool.execute(query=open('x'))"):
        (rollout,) = run(script(executor=command))
        assert rollout.turns[0].result.error == "bad_command"
        assert rollout.turns[0].arguments is None and "query" in rollout.memory


def test_seconds_are_recorded_and_never_rendered():
    m = memory.Memory()
    m.add(sub_goal="g", tool_name="t", command="c", result="r", seconds=12.345)
    m.conclude(True)
    slow = m.render()
    m.steps[0].seconds = 99.0
    assert m.render() == slow and "12" not in slow and m.steps[0].seconds == 99.0


def test_the_memory_holds_turn_action_result_error_and_verdict():
    m = memory.Memory()
    m.add(
        sub_goal="find", tool_name="T", command='tool.execute(query="a")', result="no",
        error="network",
    )
    m.conclude(False)
    assert m.render() == (
        "Step 1\nSub-Goal: find\nTool Name: T\nCommand: tool.execute(query=\"a\")\n"
        "Error: network\nResult: no\nVerdict: CONTINUE"
    )


def test_a_prompt_over_the_limit_loses_the_middle_of_its_oldest_results_only():
    """Limit 1,500 characters (a token is a character on the script): the first result shrinks,
    the last one, the question and the instructions stay whole; the shortening is counted."""
    answers = ["A" * 300 + "Z" * 300, "B" * 600]
    backbone = script(
        planner=plan("Thinker_Tool"),
        tool=answers,
        verifier=["Conclusion: CONTINUE", "Conclusion: STOP"],
    )
    whole = run(script(
        planner=plan("Thinker_Tool"), tool=list(answers),
        verifier=["Conclusion: CONTINUE", "Conclusion: STOP"],
    ))[0]
    length = len(whole.generator.prompt_ids)
    limits = Limits(3, length - 200, backbone.prompt_length)
    (rollout,) = agentflow.roll_out(["What is q?"], 1, backbone, TOOLS, limits, Sampling(), 0, 1)
    generator = backbone.asked[-1]
    assert backbone.prompt_length(generator) <= length - 200
    assert "B" * 600 in generator.user and "A" * 300 + "Z" * 300 not in generator.user
    assert "A" * 20 in generator.user and "Z" * 20 in generator.user
    assert "characters left out" in generator.user and "Question: What is q?" in generator.user
    assert generator.system == modules.GENERATOR_SYSTEM
    assert rollout.shortened >= 1 and whole.shortened == 0


def test_a_question_that_is_longer_than_the_limit_is_a_sentence():
    backbone = script()
    limits = Limits(3, 100, backbone.prompt_length)
    try:
        agentflow.roll_out(["What is q?" * 50], 1, backbone, TOOLS, limits, Sampling(), 0, 1)
    except ValueError as error:
        assert "--max_prompt_length" in str(error)
    else:
        raise AssertionError("a prompt that cannot fit must say so")


def test_every_call_of_a_step_has_its_own_name_for_random_numbers():
    """(seed, step, question, roll-out, call): no two requests of the planner share one."""
    backbone = script(verifier="Conclusion: CONTINUE")
    keys = []
    submit = backbone.submit
    backbone.submit = lambda request: (keys.append(request.key), submit(request))
    run(backbone, ["What is a?", "What is b?"], group=3, ids=[7, 9])
    flows = [key for key in keys if len(key) == 5]
    assert len(set(flows)) == len(flows)
    assert {key[2] for key in keys} == {7, 9} and {key[:2] for key in keys} == {(0, 1)}


def test_a_question_that_comes_twice_in_a_step_gets_new_roll_outs_the_second_time():
    """Question 3 twice, G = 4: eight streams of random numbers, not four twice."""
    backbone, keys = script(), set()
    submit = backbone.submit
    backbone.submit = lambda request: (keys.add(request.key), submit(request))
    run(backbone, ["What is q?"] * 2, group=4, ids=[3, 3])
    assert {key[2:4] for key in keys if len(key) == 5} == {(3, number) for number in range(8)}


def test_only_the_planner_explores():
    backbone = script(planner=plan("Thinker_Tool"))
    seen = {}
    submit = backbone.submit
    backbone.submit = lambda r: (seen.setdefault(r.ask.module, r.temperature), submit(r))
    agentflow.roll_out(["q?"], 1, backbone, TOOLS, Limits(1), Sampling(temperature=0.5), 0, 1)
    assert seen.pop("planner") == 0.5
    assert set(seen) == {"analyst", "executor", "tool", "verifier", "generator"}
    assert set(seen.values()) == {0.0}


class Sleeper(Tool):
    """Answers after a while: the later the flow, the sooner."""

    name = "Sleeper_Tool"
    description = "Sleeps."
    parameters = {"query": "str"}

    def run(self, query):
        yield Job(lambda: time.sleep(0.02 * (4 - int(query))))
        return ToolResult(f"slept {query}")


def test_deterministic_replies_enter_in_the_order_of_the_flows():
    """Four flows whose tools end in reverse order: in rounds, their verifiers still ask 0 1 2 3."""
    numbers = iter("0123")
    backbone = script(planner=plan("Sleeper_Tool"))
    lines = backbone.replies
    backbone.replies = lambda ask: (
        f'execution = tool.execute(query="{next(numbers)}")' if ask.module == "executor"
        else lines(ask)
    )
    run(backbone, ["q?"], group=4, toolset=[Sleeper()], deterministic=True)
    verifiers = [ask.user for ask in backbone.asked if ask.module == "verifier"]
    results = [user.partition("Result: ")[2] for user in verifiers]
    assert results == ["slept 0", "slept 1", "slept 2", "slept 3"]


def test_blocking_tools_of_many_flows_run_side_by_side():
    """Eight flows that each wait 0.2 s in a tool: far below the 1.6 s of one after another."""

    class Wait(Tool):
        name, description, parameters = "Wait_Tool", "Waits.", {"query": "str"}

        def run(self, query):
            yield Job(lambda: time.sleep(0.2))
            return ToolResult("waited")

    started = time.perf_counter()
    rollouts = run(script(planner=plan("Wait_Tool")), group=8, toolset=[Wait()])
    assert all(rollout.turns[0].result.output == "waited" for rollout in rollouts)
    assert time.perf_counter() - started < 1.0


def test_an_error_of_the_program_itself_is_not_swallowed():
    def broken(ask):
        raise RuntimeError("a bug of ours")

    try:
        run(ScriptedBackbone(broken))
    except RuntimeError as error:
        assert "a bug of ours" in str(error)
    else:
        raise AssertionError("only a model's or a tool's mistake belongs to the roll-out")


def test_what_a_job_raises_is_raised_in_the_flow_that_asked_for_it():
    """As a backbone's refusal is: a flow may go on, and only what it lets through ends the run."""
    def careful():
        try:
            yield Job(lambda: 1 / 0)
        except ZeroDivisionError:
            return (yield Job(lambda: "went on"))

    def careless(error):
        def fails():
            raise error
        yield Job(fails)

    def through(*flows):
        keys = [(index,) for index in range(len(flows))]
        return agentflow.drive(list(flows), keys, ScriptedBackbone({}), Sampling())

    assert through(careful(), careful()) == ["went on", "went on"]
    with pytest.raises(KeyError, match="mine"):
        through(careful(), careless(KeyError("mine")))
    with pytest.raises(SystemExit):  # no Exception: nobody's answer
        through(careless(SystemExit(3)))


@pytest.mark.parametrize("shell, code, said", [
    (">&-", 0, ""),
    (">/dev/full", 2, "error: [Errno 28] No space left on device\n"),
    ("| true", 141, ""),
])
def test_a_command_line_survives_what_its_output_goes_to(shell, code, said):
    program = ("import sys, time; import agentflow; time.sleep(0.1); "
               "sys.exit(agentflow.run_command(lambda: print('x' * 100_000) or 0))")
    line = f"set -o pipefail; {shlex.quote(sys.executable)} -c {shlex.quote(program)} {shell}"
    run = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60,
                         cwd=Path(agentflow.__file__).parent)
    assert (run.returncode, run.stderr) == (code, said)


def test_the_command_in_the_memory_is_the_call_that_was_made():
    text = modules.command_text({"query": 'say "hi"\n', "deep": True, "count": 3})
    assert text == 'tool.execute(query="say \\"hi\\"\\n", deep=True, count=3)'
    assert modules.parse_command(
        text, {"query": "str", "deep": "bool", "count": "int"}
    ).arguments == {"query": 'say "hi"\n', "deep": True, "count": 3}
    assert modules.command_text(None) == ""


def test_every_error_kind_of_the_flow_is_one_that_the_tools_know():
    assert {"none", "bad_plan", "bad_command", "network"} <= set(tools.ERROR_KINDS)


def with_a_pause(flow, turn, seconds):
    """The same flow, and a tool that takes `seconds` in its turn number `turn`, or behind its last
    one where there are fewer: every flow waits once."""
    answer, verified, waited = None, 0, False
    while True:
        try:
            wanted = flow.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(wanted, Ask) and wanted.module in ("verifier", "generator"):
            verified += 1
            if not waited and (verified == turn or wanted.module == "generator"):
                waited = True
                yield Job(lambda: time.sleep(seconds))
        answer = yield wanted


@pytest.mark.slow
def test_slow_tools_never_stall_the_batch():
    """64 flows that each wait 2 s in a tool, at one random turn: at most 1.15 times what they take
    with instant tools, and 2 s. Both ways in turn, the best of two runs each."""
    backbone = agentflow.load_backbone("builtin", "cpu")
    limits, sampling = Limits(3, None, backbone.prompt_length), Sampling(1.0, 96, 96)
    toolset = tools.make_tools(offline=True)
    questions = [f"What is {n} plus 5?" for n in range(10, 74)]
    analyses = agentflow.drive(
        [agentflow.analyse(question, toolset) for question in questions],
        [(0, 0, i) for i in range(64)], backbone, sampling,
    )

    def seconds(pause):
        backbone.adapter_changed()
        rng = random.Random(0)
        plain = [
            agentflow.flow(question, analysis, toolset, limits)
            for question, analysis in zip(questions, analyses, strict=True)
        ]
        flows = [with_a_pause(flow, rng.randint(1, 3), pause) for flow in plain]
        started = time.perf_counter()
        rollouts = agentflow.drive(flows, [(0, 0, i, 0) for i in range(64)], backbone, sampling)
        assert sum(len(rollout.turns) for rollout in rollouts) > 64
        return time.perf_counter() - started

    instant, slow = zip(*[(seconds(0.0), seconds(2.0)) for _ in range(2)], strict=True)
    assert min(slow) <= 1.15 * min(instant) + 2, (instant, slow)
