"""The twelve exercises as data: what make.py writes into the stubs and check.py into its table.

The solutions are not here: they are the project's own lines between `# BEGIN SOLUTION k` and
`# END SOLUTION k`. `blocks` has an entry for each such place, in the order in which they stand.
"""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """One place to fill in."""

    place: str  # file:function
    write: str  # the sentence of the NotImplementedError: what to write
    hint: str  # the comment above it: what comes in, what goes out, where to look


class Task(NamedTuple):
    """One exercise, of one or several places."""

    title: str
    minutes: int
    paper: str  # equation or section
    learnt: str
    blocks: tuple[Block, ...]


TASKS: dict[int, Task] = {
    1: Task(
        "Memory rendering", 10, "section 3, f_mem",
        "what the modules see of the past, and why the text may only grow", (
            Block("memory.py:Step.render",
                  "write one step of the memory as lines of text",
                  "In: this step, and how many characters of its result to show (None: all). Out: "
                  "the lines 'Step 1', 'Sub-Goal: …', 'Tool Name: …', 'Command: …' (if there is "
                  "one), 'Error: …' (unless it is none), 'Result: …' (shortened by clip_middle), "
                  "'Verdict: STOP' or 'Verdict: CONTINUE' (once it is known), joined by line ends. "
                  "See section 3: M^{t+1} = f_mem(M^t, a^t, e^t, v^t)."),
            Block("memory.py:Memory.render",
                  "join the rendered steps, each with its own limit",
                  "In: self.steps, and a limit for each or None. Out: the steps' texts, joined by "
                  "line ends; an empty text for an empty memory. See section 3: M^t."),
        )),
    2: Task(
        "Plan parser", 35, "section 3, a^t",
        "a model's reply is untrusted text; a mistake of the model is data and no exception", (
            Block("modules.py:parse_plan",
                  "read context, sub-goal and tool from the planner's reply",
                  "In: the reply, the names of the tools. Labels in lines of their own go before "
                  "JSON, JSON before labels that share a line. Out: a Plan; where nothing can be "
                  "read, or the tool is none of them, its error is a sentence that lists the "
                  "tools. "
                  "Helper: drop_thinking(text), the reply without its thinking. "
                  "Helper: _labelled(text, _PLAN_LABEL), its lines as pairs (label, value); the "
                  "labels are 'context', 'subgoal', 'toolname', 'tool' and 'justification'. "
                  "Helper: _INLINE_LABEL, a pattern for labels that share a line. "
                  "Helper: _objects(text), JSON objects with their places; _keyed(object) and "
                  "_as_text(value), its labels and values. "
                  "Helper: _first_line(value); _resolve(line, tools), the tool that is meant or "
                  "''. See section 3: a^t."),
            Block("modules.py:_last_plan",
                  "find the last complete plan among pairs of label and value",
                  "In: pairs such as ('subgoal', 'halve them'), in the reply's order. Out: the "
                  "fields of the last plan with a sub-goal and a tool (its tool's line under the "
                  "key 'tool'), or None. A label that comes again opens the next plan."),
        )),
    3: Task(
        "A tool: the library search", 25, "section 3, the toolset K; the tool cards",
        "what a tool owes the planner: bounded text, or a typed error that it can act on", (
            Block("tools.py:BM25.__init__",
                  "fill self.index with the texts that hold a term and their BM25 weights",
                  "In: holders (term -> numbers of the texts that hold it), counts (a Counter for "
                  "each text), norm (k1 · (1 − b + b · |d| / mean |d|) of each text), K1. Out: "
                  "self.index[term] = (array of text numbers, array of the sum's addends). The "
                  "formula stands in the class's docstring."),
            Block("tools.py:BM25.best",
                  "choose the best texts by their scores",
                  "In: self.scores(query), one number a text. Out: at most `count` numbers of "
                  "texts, best first, equal ones in the order of the texts; none with a score of "
                  "0, none below `share` of the best score."),
            Block("tools.py:Library_Search_Tool.run",
                  "search the passages and return a ToolResult",
                  "In: the query. Out: a ToolResult with a line '[1] passage' for each of the best "
                  "3 passages that reach 0.7 of the best score, each shortened by clip_middle to "
                  "RESULT_CHARS // 3 - 8 characters; where nothing matches, a sentence and the "
                  "error 'not_found'."),
        )),
    4: Task(
        "The sandbox's time limit", 20, "section 3, e^t; the Python tool's card",
        "why a time limit needs a process that can be killed, and who else must be killed", (
            Block("tools.py:_run_in",
                  "hand the program over, wait for it no longer than the limit, kill what is left",
                  "In: process (reads the program from its stdin, in UTF-8 with '?' for what "
                  "that cannot hold, until it is closed), code, timeout in seconds counted from "
                  "`started`. Out: waiter, a started thread that waits for the process; late "
                  "(bool: was it still running at the limit?); seconds that it ran; init, "
                  "missing = _first_words(err, mark). Where it is late, or init is 0: "
                  "_kill_everything(process, waiter, init, folder). A process that dies before "
                  "it has read all raises BrokenPipeError here: its exit code tells."),
            Block("tools.py:_verdict",
                  "return what a run that hit the limit is told",
                  "In: timeout in seconds; message, what the program's report said (if there was "
                  "a report). Out: (value, error, message, stderr) with no value, the error "
                  "'timeout', and a message 'Timed out after 10 seconds.', then ' Before: …' with "
                  "the report's message, if both are there."),
        )),
    5: Task(
        "Slots and masks of a decode step", 35, "section 3, a^t (how the tokens are computed)",
        "rows of different length in one batch: who writes where, and who sees whom", (
            Block("agentflow.py:causal_mask",
                  "make the mask that is added to the attention's scores",
                  "In: query positions (..., L), the number of keys. Out: (..., 1, L, width) of "
                  "this dtype: 0 where the key's position is not after the query's, else -inf."),
            Block("agentflow.py:CachedAttention.attend",
                  "write the new keys and values into their slots, then attend to the slots",
                  "In: query (B, H, L, D_head), key and value (B, H_kv, L, D_head); self.kv, "
                  "self.rows, self.positions, self.mask. Out: (B, L, H, D_head), by "
                  "masked_attention over the first `width` places (as wide as the mask)."),
            Block("agentflow.py:Backbone._burst",
                  "compute where each row's next tokens go and what they see",
                  "In: rows (each with prompt_ids and the ids written so far; the last of them has "
                  "no keys and values yet), steps. Out: width (places needed by the longest row at "
                  "the burst's end), positions (steps, B, 1), masks (steps, B, 1, 1, width) in "
                  "lane.dtype."),
        )),
    6: Task(
        "Sampling with log-probs", 25, "section 3, pi_theta; the denominator of Eq. 6",
        "sampling and scoring share one distribution; a row owns its random numbers", (
            Block("agentflow.py:choose",
                  "take one token a row, and its log-prob at the temperature",
                  "In: logits (B, V), temperatures (B,), draws (B,) in [0, 1) or None. Out: ids "
                  "(B,), log-probs (B,) in fp32. flow_grpo.tempered owns the temperature (0: the "
                  "most likely token, with the log-prob of temperature 1). See Eq. 6: pi_old."),
            Block("agentflow.py:draw",
                  "turn one uniform number a row into a token",
                  "In: probabilities (B, V), draws (B,) in [0, 1). Out: tokens (B,): the first "
                  "whose cumulated probability is above the number times their sum (which fp32 "
                  "makes about 1); what has no probability is never taken. Cumulate in the draws' "
                  "precision. Helper: first_above."),
        )),
    7: Task(
        "Turn weights", 15, "Eq. 5, the three means",
        "how a loss is averaged decides whose tokens count, and what micro-batches change", (
            Block("flow_grpo.py:turn_weights",
                  "compute the weight of one token of each row",
                  "In: question, roll-out and length of each row (N,). Out: weights (N,), float32: "
                  "1 / (Q · G_q · T_i · |a_i^t|); a roll-out is a pair of question and number. See "
                  "Eq. 5."),
        )),
    8: Task(
        "Group advantages", 20, "Eq. 7",
        "a group is its own baseline; a flat group says nothing", (
            Block("flow_grpo.py:group_advantages",
                  "compare each roll-out's reward with its group's mean and deviation",
                  "In: scores (R,) in float64, NaN where nobody could judge; group_ids (R,); "
                  "rewards, for its dtype (float32 where it holds integers) and device. Out: "
                  "advantages (R,), as the docstring says, with its three cases of exactly 0. See "
                  "Eq. 7."),
        )),
    9: Task(
        "Clipped objective and KL", 25, "Eq. 5 and 6",
        "directions: new over old, reference over policy, and when the clip takes a gradient away",
        (
            Block("flow_grpo.py:flow_grpo_loss",
                  "compute ratio, kl and loss",
                  "In: logp, logp_old (N, L), 0 under the mask; logp_ref (N, L) or None; keep "
                  "(N, L); A (N, 1); weights (N,); epsilon_low, epsilon_high, beta. Out: ratio "
                  "(N, L), kl (N, L), of any value without a reference, and loss (). See Eq. 5 and "
                  "6."),
            Block("flow_grpo.py:kl_k3",
                  "compute the estimate of the KL divergence, token by token",
                  "In: log-probs of the sampled tokens under the policy and under the reference. "
                  "Out: e^d - d - 1 with d = logp_ref - logp, exact to its last digits also where "
                  "d is about 0. See Eq. 5, the KL term."),
        )),
    10: Task(
        "Fused log-probs with their backward", 40, "log pi_theta of Eq. 6",
        "the chain rule by hand, and a softmax over the vocabulary in pieces", (
            Block("flow_grpo.py:LinearLogprobs.forward",
                  "compute log-probs, entropies and normalisers, a chunk of tokens at a time",
                  "In: hidden (M, D), weight (V, D), targets (M,), temperature, chunk (tokens at "
                  "a time). Out, filled in: logp, entropy, normaliser (M,), normaliser = "
                  "logsumexp(logits / temperature). Helpers: head_slices(weight), tempered, "
                  "column_of. A chunk's logits of one slice at a time: no tensor may be larger "
                  "than the head. See Eq. 6: log pi_theta."),
            Block("flow_grpo.py:LinearLogprobs.backward",
                  "add up the gradients of hidden states and head, a chunk at a time",
                  "In: grad_logp (M,), the saved tensors, ctx.temperature, ctx.chunk, to_hidden, "
                  "to_weight. Out, filled in where wanted: grad_hidden (M, D), grad_weight (V, D). "
                  "d logp / d logits = one-hot(target) - softmax(logits); mind the temperature."),
        )),
    11: Task(
        "LoRA with a gate", 15, "section 3: only pi_theta is trained",
        "one set of weights plays planner and frozen modules in the same batch", (
            Block("agentflow.py:LoraLinear.__init__",
                  "make the parameters A and B",
                  "In: base (a linear layer in -> out), r, the random generator. Out: self.A "
                  "(r, in), Kaiming uniform with a = sqrt(5); self.B (out, r); both fp32 and on "
                  "the base's device. The untrained adapter must change nothing."),
            Block("agentflow.py:LoraLinear.forward",
                  "add the adapter's part to the frozen layer's output",
                  "In: x (B, L, in); self.gate.value, None or (B, 1, 1); self.scale = alpha / r. "
                  "Out: y (B, L, out), the frozen layer's output (its bias too) + gate · scale · "
                  "B (A x); without a gate the frozen layer's alone. The products are in x's "
                  "precision."),
        )),
    12: Task(
        "The training loop", 40, "Algorithm 1, Eq. 5 to 7",
        "how roll-outs become rows, rows a gradient, and what must be forgotten after a step", (
            Block("train.py:make_rows",
                  "make a row for every planner turn of every roll-out",
                  "In: rollouts (each with turns, each with planner: a Reply), rewards (R,), NaN "
                  "where nobody could judge, group_ids (R,). Out: (list of Row, advantages (R,)). "
                  "Use flow_grpo.group_advantages and flow_grpo.turn_weights. Unjudged roll-outs: "
                  "weight 0, and not counted. See Eq. 5 and 7."),
            Block("train.py:accumulate_gradients",
                  "score this micro-batch, compute its loss and go backward",
                  "In: batch (list of Row), backbone, config. Out: logp, entropy, logp_old, mask "
                  "(N, L), logp_ref (N, L) or None where beta is 0, loss and statistics; gradients "
                  "are added to the parameters' own. Use score_rows (gate 1: pi_theta, gate 0: "
                  "pi_ref, which takes no gradient), pad, flow_grpo.flow_grpo_loss. See Eq. 5."),
            Block("train.py:update",
                  "clip the gradient, refuse one that is no number, and take the step",
                  "In: parameters with their gradients, MAX_GRAD_NORM, optimizer, before_step. "
                  "Out: norm, the gradient's size before it was clipped (a tensor). Raise "
                  "FloatingPointError for a norm that is not finite, before any weight changes; "
                  "call before_step() before the optimiser's step. See Algorithm 1."),
            Block("train.py:update",
                  "tell the backbone that its planner has changed",
                  "In: backbone. Out: nothing; keys and values that were computed with the old "
                  "weights must not be used again. See Algorithm 1: pi_old is today's planner."),
        )),
}  # fmt: skip
