"""Wrong versions of the flow's parts: memory, driver, prompts, rows of the update, reward."""

import torch

import agentflow
import eval as evaluation
import flow_grpo
import modules
import train
from memory import Memory, Step
from tests.mutants import Mutant

right_render = Memory.render
right_step_render = Step.render
right_executor_ask = agentflow.executor_ask
right_flow = agentflow.flow
right_load_rows = train.make_rows
right_update = train.update
right_score_rows = train.score_rows
right_loss = flow_grpo.flow_grpo_loss


# ------------------------------------------------------------------------------------------- flow


class KeptMemory(Memory):
    """State that survives between questions."""

    shared: list = []

    def __init__(self):
        self.steps = self.shared


def never_stops(text):
    return modules.Verdict(False, text)


def stops_on_the_word_anywhere(text):
    return modules.Verdict("stop" in text.lower(), text)


def only_the_last_step(self, max_results=None):
    return self.steps[-1].render() if self.steps else ""


def seconds_rendered(self, max_result=None):
    return right_step_render(self, max_result) + f"\nSeconds: {self.seconds}"


def error_swallowed(self, max_result=None):
    return right_step_render(self, max_result).replace(f"Error: {self.error}\n", "")


def executor_sees_the_question(plan, tool):
    ask = right_executor_ask(plan, tool)
    return agentflow.Ask(ask.module, ask.system, "the secret question " + ask.user)


def newest_result_first(make_ask, memory, limits):
    ask = make_ask(memory.render())
    if limits.max_prompt_length is None or limits.prompt_length(ask) <= limits.max_prompt_length:
        return ask, False
    shown = [len(step.result) for step in memory.steps]
    for last in reversed(range(len(shown))):
        while shown[last] > 0:
            shown[last] //= 2
            ask = make_ask(memory.render(shown))
            if limits.prompt_length(ask) <= limits.max_prompt_length:
                return ask, True
    return ask, True


def tiled(questions, group_size, backbone, tools, limits, sampling, seed, step, ids=None,
          deterministic=False, on_done=lambda index: None):
    """q0 q1 q0 q1 instead of q0 q0 q1 q1."""
    analyses = agentflow.drive(
        [agentflow.analyse(question, tools) for question in questions],
        [(seed, step, number) for number in range(len(questions))], backbone, sampling,
    )
    flows = [
        agentflow.flow(question, analysis, tools, limits)
        for _ in range(group_size)
        for question, analysis in zip(questions, analyses, strict=True)
    ]
    keys = [(seed, step, i) for i in range(len(flows))]
    return agentflow.drive(flows, keys, backbone, sampling)


def frozen_modules_explore(self, ask, key, flow=None):
    return agentflow.Request(ask, self.temperature, 8, key, flow)


# ---------------------------------------------------------------------------------------- training


def turn_row_statistics(rollouts, rewards, group_ids):
    """Mean and deviation over the turns of a question: a long roll-out counts more."""
    rows, advantages = right_load_rows(rollouts, rewards, group_ids)
    turns = torch.tensor([len(rollout.turns) for rollout in rollouts])
    of_turns = flow_grpo.group_advantages(
        rewards.repeat_interleave(turns), group_ids.repeat_interleave(turns)
    )
    for row, advantage in zip(rows, of_turns.tolist(), strict=True):
        row.advantage = advantage
    return rows, advantages


def end_token_not_trained(rollouts, rewards, group_ids):
    rows, advantages = right_load_rows(rollouts, rewards, group_ids)
    for row in rows:
        row.response_ids, row.logp_old = row.response_ids[:-1], row.logp_old[:-1]
    return rows, advantages


def weights_of_each_micro_batch(logp, logp_old, logp_ref, advantages, weights, mask, **settings):
    """The mean over whatever happens to be in this micro-batch."""
    weights = weights / (weights * mask.sum(1)).sum()
    return right_loss(logp, logp_old, logp_ref, advantages, weights, mask, **settings)


def planner_heads_kept(backbone, optimizer, rows, config, before_step=lambda: None):
    """The update forgets to say that the planner has changed."""
    backbone.adapter_changed = lambda: None
    try:
        return right_update(backbone, optimizer, rows, config)
    finally:
        del backbone.adapter_changed


def reference_is_the_policy(backbone, rows, temperature, gate):
    return right_score_rows(backbone, rows, temperature, 1)


def every_step_from_the_beginning(questions, step, config):
    return list(range(config.num_questions))


def reward_by_substring(self, response):
    answer = (evaluation.extract_answer(response) or "").lower()
    return float(any(answer in r.lower() or r.lower() in answer for r in self.references))


FLOW = "tests.test_flow:test_"
TRAIN = "tests.test_train:test_"
FLOW_MUTANTS = [
    Mutant("memory kept between questions", "agentflow", "Memory", KeptMemory,
           FLOW + "two_questions_in_a_row_share_no_memory"),
    Mutant("verdict never stops", "agentflow", "parse_verdict", never_stops,
           FLOW + "the_verdict_stop_ends_the_flow_and_t_max_bounds_it"),
    Mutant("the word stop anywhere stops", "agentflow", "parse_verdict", stops_on_the_word_anywhere,
           FLOW + "a_verdict_that_only_mentions_stopping_goes_on"),
    Mutant("memory shows its last step only", "memory", "Memory.render", only_the_last_step,
           FLOW + "a_prompt_of_the_next_turn_begins_with_this_turns_prompt"),
    Mutant("seconds in the prompt", "memory", "Step.render", seconds_rendered,
           FLOW + "seconds_are_recorded_and_never_rendered"),
    Mutant("error signal not in the memory", "memory", "Step.render", error_swallowed,
           FLOW + "the_memory_holds_turn_action_result_error_and_verdict"),
    Mutant("executor sees the question", "agentflow", "executor_ask", executor_sees_the_question,
           FLOW + "the_executor_sees_the_plan_and_the_chosen_card_but_no_memory_and_no_question"),
    Mutant("newest result shortened first", "agentflow", "fit_prompt", newest_result_first,
           FLOW + "a_prompt_over_the_limit_loses_the_middle_of_its_oldest_results_only"),
    Mutant("roll-outs tiled, not grouped", "agentflow", "roll_out", tiled,
           FLOW + "roll_outs_come_back_group_by_group"),
    Mutant("frozen modules explore", "agentflow", "Sampling.request", frozen_modules_explore,
           FLOW + "only_the_planner_explores"),
    Mutant("advantages over turn rows", "train", "make_rows", turn_row_statistics,
           TRAIN + "rows_carry_the_advantage_of_their_roll_out_and_the_weight_of_eq_5"),
    Mutant("end token not trained", "train", "make_rows", end_token_not_trained,
           TRAIN + "rows_carry_the_advantage_of_their_roll_out_and_the_weight_of_eq_5"),
    Mutant("weights made anew for each micro-batch", "flow_grpo", "flow_grpo_loss",
           weights_of_each_micro_batch,
           TRAIN + "micro_batches_and_the_order_of_rows_change_no_gradient"),
    Mutant("planner's cached head outlives the update", "train", "update", planner_heads_kept,
           TRAIN + "after_an_update_the_next_roll_out_is_sampled_from_the_new_weights"),
    Mutant("reference is the present policy", "train", "score_rows", reference_is_the_policy,
           TRAIN + "the_reference_is_the_start_weights_so_the_first_kl_is_zero"),
    Mutant("every step takes the first questions", "train", "questions_of_step",
           every_step_from_the_beginning,
           TRAIN + "every_question_comes_once_an_epoch_in_an_order_of_its_own"),
    Mutant("reward by substring", "eval", "Question.reward", reward_by_substring,
           TRAIN + "the_reward_compares_numbers_as_numbers_and_text_as_text"),
]
