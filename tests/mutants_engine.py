"""Wrong versions of the engine's parts: adapter, keys and values, positions, sampling, slots.

Each wrong version is the right one with one thing turned, where possible around the right function
itself. The list joins the others in tests/test_mutants.py.
"""

import math

import torch
import torch.nn.functional as F

import agentflow
from tests.mutants import Mutant

Backbone = agentflow.Backbone
right_hidden = Backbone._hidden
right_packed_hidden = Backbone.packed_hidden
right_head = Backbone._head
right_known_start = Backbone._known_start
right_retire = Backbone._retire
right_reply = Backbone._reply
right_adapter_changed = Backbone.adapter_changed
right_choose = agentflow.choose
right_draw = agentflow.draw
right_uniforms = agentflow.uniforms
right_row_seed = agentflow.row_seed
right_trie_init = agentflow.TrieAttention.__init__


# ---------------------------------------------------------------------------------------- adapter


def gate_for_the_whole_batch(self, x):
    y = self.base(x)
    if self.gate.value is None:
        return y
    return y + self.scale * F.linear(F.linear(x, self.A), self.B)


def adapter_without_its_scale(self, x):
    y = self.base(x)
    if self.gate.value is None:
        return y
    return y + self.gate.value * F.linear(F.linear(x, self.A), self.B)


def nothing_forgotten(self):
    pass


def everything_forgotten(self):
    self.adapter_version += 1
    self._heads = {}


def same_for_planner_and_frozen(self):
    return self.prompt_ids, self.requests[0].max_tokens


# ---------------------------------------------------------------- positions, masks, keys and values


def late_positions(self, lane, ids, positions, context, gates):
    """Decoding rotates by one position too many; what was prefilled is right."""
    if ids.shape[1] == 1:
        positions = positions + 1
    return right_hidden(self, lane, ids, positions, context, gates)


def everything_visible(positions, width, dtype):
    return torch.zeros(*positions.shape[:-1], 1, positions.shape[-1], width, dtype=dtype)


def one_key_too_many(positions, width, dtype):
    visible = torch.arange(width) <= positions[..., None] + 1
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -math.inf).unsqueeze(-3)


def places_of_the_tokens_themselves(self, prompts, responses, gate):
    """Hidden states at the response tokens, instead of one place before each."""
    prompts = [list(p) + list(r)[:1] for p, r in zip(prompts, responses, strict=True)]
    shifted = [list(r)[1:] + list(r)[-1:] for r in responses]
    return right_packed_hidden(self, prompts, shifted, gate)


def nodes_that_see_their_own_future(self, nodes, device, dtype):
    right_trie_init(self, nodes, device, dtype)
    shapes = [(len(node.tokens), node.start + len(node.tokens)) for node in nodes]
    self.masks = [torch.zeros(1, 1, *shape, dtype=dtype) for shape in shapes]


def nodes_that_see_themselves_alone(self, nodes, device, dtype):
    right_trie_init(self, nodes, device, dtype)
    self.paths = [path[-1:] for path in self.paths]
    self.masks = [None] * len(nodes)


def packed_positions_in_a_row(self, lane, ids, positions, context, gates):
    if isinstance(context, agentflow.TrieAttention):
        positions = torch.arange(ids.shape[1])[None]
    return right_hidden(self, lane, ids, positions, context, gates)


def one_head_for_all(self, lane, row):
    """Static keys and values found by the gate alone, whatever the system text."""
    ids, _ = right_head(self, lane, row)
    own = self._version(row.gate)
    first = next(head for (_, version), head in self._heads.items() if version == own)
    return ids[: first.shape[4]], first


def head_taken_unchecked(self, lane, group):
    _, kv = right_head(self, lane, group[0])
    return kv.shape[4], kv


def last_prompt_taken_unchecked(self, lane, group):
    """Whatever the module said last is taken for the start of what it says now."""
    _, kv = self._last_prompts.get(("executor", group[0].requests[0].flow, group[0].gate))
    if kv is None:
        return right_known_start(self, lane, group)
    return min(kv.shape[4], len(group[0].prompt_ids) - 1), kv


def planners_prompts_kept(self):
    self._heads = {key: head for key, head in self._heads.items() if not key[1]}


def planners_replies_kept(self):
    kept = dict(self._greedy)
    right_adapter_changed(self)
    self._greedy.update(kept)


def phases_that_know_each_other(self):
    pass


def rows_moved_without_their_keys(self, lane):
    before = lane.kv.clone()
    finished = right_retire(self, lane)
    lane.kv.copy_(before)
    return finished


def slots_freed_when_all_are_done(self, lane):
    if any(row.room() > 0 for row in lane.rows):
        return []
    return right_retire(self, lane)


# --------------------------------------------------------------------------------- ends and replies


def end_token_dropped(self, row, *rest):
    reply = right_reply(self, row, *rest)
    if reply.finished:
        reply.response_ids.pop()
        reply.logp.pop()
    return reply


def text_encoded_again(self, row, *rest):
    reply = right_reply(self, row, *rest)
    reply.response_ids = self.tokenizer.encode(reply.text) + row.ids[-1:]
    return reply


def only_the_tokenizers_end(self):
    return [self.tokenizer.eos_token_id]


# --------------------------------------------------------------------------------------- randomness


def recorded_at_temperature_one(logits, temperatures, draws):
    ids, _ = right_choose(logits, temperatures, draws)
    return ids, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]


def recorded_at_temperature_zero(logits, temperatures, draws):
    ids, logp = right_choose(logits, temperatures, draws)
    return ids, torch.where(temperatures == 0, 0.0, logp)


def first_token_at_least_the_draw(logits, temperatures, draws):
    """>= instead of >: at a draw of 0 the first token comes, however impossible."""
    ids, logp = right_choose(logits, temperatures, draws)
    cumulated = (logits / temperatures[:, None]).softmax(-1).double().cumsum(-1)
    drawn = torch.searchsorted(cumulated, draws[:, None], right=False)[:, 0]
    return torch.where(temperatures == 0, ids, drawn.clamp(max=logits.shape[1] - 1)), logp


def drawn_in_a_block_as_if_it_were_the_first(probabilities, draws):
    """The right block; in it, what the blocks before it hold is not taken off the target."""
    tokens, size = right_draw(probabilities, draws), agentflow.DRAW_BLOCK
    block = tokens // size
    padded = F.pad(probabilities, (0, size)).double()
    places = block[:, None] * size + torch.arange(size)
    inside = padded.gather(1, places.clamp(max=padded.shape[1] - 1)).cumsum(-1)
    token, _ = agentflow.first_above(inside, draws[:, None] * padded.sum(-1, keepdim=True))
    return (block * size + token[:, 0]).clamp(max=probabilities.shape[1] - 1)


def one_draw_a_row(seeds, positions):
    return right_uniforms(seeds, positions * 0)


def key_without_its_turn(key):
    return right_row_seed(tuple(key)[:-1])


def draws_by_slot(seeds, positions):
    """Randomness of the batch: the slot decides, not the row's name."""
    return right_uniforms(torch.arange(seeds.numel()).view(seeds.shape), positions)


HERE = "tests.test_engine:test_"
ENGINE_MUTANTS = [
    Mutant("gate ignored: one planner row switches the adapter on for all",
           "agentflow", "LoraLinear.forward", gate_for_the_whole_batch,
           HERE + "rows_with_gate_zero_are_the_bare_models_bit_for_bit_in_a_mixed_batch"),
    Mutant("adapter without alpha / r", "agentflow", "LoraLinear.forward",
           adapter_without_its_scale,
           HERE + "planner_rows_are_sampled_from_the_merged_weights"),
    Mutant("stale keys and values of the planner's head after an update", "agentflow",
           "Backbone.adapter_changed", nothing_forgotten,
           HERE + "after_an_update_samples_come_from_the_new_weights_and_frozen_heads_stay_cached"),
    Mutant("an update forgets the frozen heads too", "agentflow",
           "Backbone.adapter_changed", everything_forgotten,
           HERE + "after_an_update_samples_come_from_the_new_weights_and_frozen_heads_stay_cached"),
    Mutant("last turn's keys and values used past where the prompts part", "agentflow",
           "Backbone._known_start", last_prompt_taken_unchecked,
           HERE + "a_prompt_is_prefilled_only_from_where_it_leaves_the_last_one_of_its_flow"),
    Mutant("the planner's last prompt outlives an update", "agentflow",
           "Backbone.adapter_changed", planners_prompts_kept,
           HERE + "an_update_forgets_the_planners_last_prompts_and_keeps_the_others"),
    Mutant("the planner's greedy reply outlives an update", "agentflow",
           "Backbone.adapter_changed", planners_replies_kept,
           HERE + "an_update_forgets_the_planners_greedy_replies"),
    Mutant("replies of the last phase answer this one", "agentflow", "Backbone.clear",
           phases_that_know_each_other,
           HERE + "what_is_cleared_is_no_longer_known"),
    Mutant("a token drawn in its block by the whole draw", "agentflow", "draw",
           drawn_in_a_block_as_if_it_were_the_first,
           HERE + "a_draw_takes_the_first_token_whose_cumulated_probability_is_above_it"),
    Mutant("a greedy planner request answered by the frozen model", "agentflow", "Draft.same",
           same_for_planner_and_frozen,
           HERE + "greedy_requests_with_equal_prompts_but_other_weights_or_limits_stay_apart"),
    Mutant("positions off by one in decoding", "agentflow", "Backbone._hidden", late_positions,
           HERE + "decoding_puts_each_token_at_its_own_position"),
    Mutant("mask that sees padding and later keys", "agentflow", "causal_mask",
           everything_visible, HERE + "decoding_puts_each_token_at_its_own_position"),
    Mutant("mask off by one", "agentflow", "causal_mask", one_key_too_many,
           HERE + "packed_rows_with_a_common_start_equal_row_by_row_forwards"),
    Mutant("packed rows scored one place too late", "agentflow", "Backbone.packed_hidden",
           places_of_the_tokens_themselves,
           HERE + "log_prob_at_temperature_one_half_is_that_of_scoring_at_one_half"),
    Mutant("packed tokens that see their own future", "agentflow", "TrieAttention.__init__",
           nodes_that_see_their_own_future,
           HERE + "packed_rows_with_a_common_start_equal_row_by_row_forwards"),
    Mutant("packed tokens that do not see what rows share", "agentflow", "TrieAttention.__init__",
           nodes_that_see_themselves_alone,
           HERE + "packed_rows_with_a_common_start_equal_row_by_row_forwards"),
    Mutant("positions of the pack, not of the row", "agentflow", "Backbone._hidden",
           packed_positions_in_a_row,
           HERE + "packed_rows_with_a_common_start_equal_row_by_row_forwards"),
    Mutant("one static head for all system texts", "agentflow", "Backbone._head",
           one_head_for_all, HERE + "static_heads_are_computed_once_and_change_no_log_prob"),
    Mutant("static head used past the prompt's own ids", "agentflow", "Backbone._known_start",
           head_taken_unchecked,
           HERE + "a_head_is_used_only_as_far_as_the_prompts_own_ids_agree_with_it"),
    Mutant("rows change slots without their keys and values", "agentflow", "Backbone._retire",
           rows_moved_without_their_keys,
           HERE + "decoding_puts_each_token_at_its_own_position"),
    Mutant("finished rows keep their slots until all are done", "agentflow", "Backbone._retire",
           slots_freed_when_all_are_done, HERE + "a_finished_row_frees_its_slot_at_once"),
    Mutant("end token dropped from the reply", "agentflow", "Backbone._reply", end_token_dropped,
           HERE + "the_end_token_belongs_to_the_reply_though_it_is_also_the_pad_token"),
    Mutant("reply's text encoded again", "agentflow", "Backbone._reply", text_encoded_again,
           HERE + "sampled_ids_come_back_unchanged_where_encoding_the_text_gives_others"),
    Mutant("second end token unknown", "agentflow", "Backbone._stop_ids", only_the_tokenizers_end,
           HERE + "a_second_end_token_that_only_the_models_settings_name_ends_a_reply"),
    Mutant("temperature missing in the recorded log-prob", "agentflow", "choose",
           recorded_at_temperature_one,
           HERE + "log_prob_at_temperature_one_half_is_that_of_scoring_at_one_half"),
    Mutant("greedy log-prob recorded as 0", "agentflow", "choose", recorded_at_temperature_zero,
           HERE + "temperatures_belong_to_rows_and_zero_means_the_likeliest_token"),
    Mutant("token of probability 0 drawn at a draw of 0", "agentflow", "choose",
           first_token_at_least_the_draw,
           HERE + "a_token_of_probability_zero_is_never_drawn_even_at_the_ends"),
    Mutant("uniform number does not depend on the position", "agentflow", "uniforms",
           one_draw_a_row,
           HERE + "uniforms_are_uniform_and_differ_by_position_and_by_every_part_of_the_key"),
    Mutant("turns of a roll-out share their random numbers", "agentflow", "row_seed",
           key_without_its_turn,
           HERE + "uniforms_are_uniform_and_differ_by_position_and_by_every_part_of_the_key"),
    Mutant("randomness belongs to the slot", "agentflow", "uniforms", draws_by_slot,
           HERE + "a_rows_reply_is_the_same_whatever_else_is_in_the_batch_and_in_whatever_slot"),
]  # fmt: skip
