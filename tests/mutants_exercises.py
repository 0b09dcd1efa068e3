"""Wrong solutions of the exercises: each must be noticed by the check that it is named with.

`edited` takes the project's own function and changes a piece of its text, as a student might have
written it; an answer of zeros and a gradient of zeros are among them wherever that is an answer.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap

import torch

import modules
from tests.mutants import Mutant


def find(module: str, attribute: str):
    """("memory", "Memory.render") -> (the class Memory, "render")."""
    owner = importlib.import_module(module)
    *path, name = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def edited(module: str, attribute: str, *changes: tuple[str, str]):
    """The function with some of its text replaced; each piece must be there."""
    owner, name = find(module, attribute)
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(owner, name))))
    for old, new in (*changes, ("super().__init__()", "nn.Module.__init__(self)")):
        assert old in source or old.startswith("super"), f"{attribute} has no {old!r}"
        source = source.replace(old, new)
    found: dict = {}
    exec(compile(source, f"<{attribute}>", "exec"), vars(importlib.import_module(module)), found)
    return found[name]


def wrong(exercise: int, place: str, name: str, *changes, instead=None) -> Mutant:
    """A mutant by changes of text, or another function instead."""
    module, _, attribute = place.partition(":")
    function = instead or edited(module, attribute, *changes)
    return Mutant(f"{exercise}: {name}", module, attribute, function,
                  f"checks:check_{exercise}")


STEP, MEMORY = "memory:Step.render", "memory:Memory.render"
PLAN, LAST = "modules:parse_plan", "modules:_last_plan"
INDEX, BEST, SEARCH = "tools:BM25.__init__", "tools:BM25.best", "tools:Library_Search_Tool.run"
RUN, VERDICT = "tools:_run_in", "tools:_verdict"
MASK, ATTEND = "agentflow:causal_mask", "agentflow:CachedAttention.attend"
BURST = "agentflow:Backbone._burst"
CHOOSE, DRAW = "agentflow:choose", "agentflow:draw"
WEIGHTS, ADVANTAGES = "flow_grpo:turn_weights", "flow_grpo:group_advantages"
LOSS, KL = "flow_grpo:flow_grpo_loss", "flow_grpo:kl_k3"
FORWARD, BACKWARD = "flow_grpo:LinearLogprobs.forward", "flow_grpo:LinearLogprobs.backward"
NEW_LORA, LORA = "agentflow:LoraLinear.__init__", "agentflow:LoraLinear.forward"
ROWS, GRADIENTS, UPDATE = "train:make_rows", "train:accumulate_gradients", "train:update"


def all_logits_at_once(hidden, weight, targets, temperature=1.0, chunk=None):
    logits = hidden.float() @ weight.float().T / temperature
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1).detach()
    return logp.gather(1, targets[:, None])[:, 0], entropy


def sampled_by_fp32_sums(probabilities, draws):
    sums = probabilities.cumsum(-1)
    return torch.searchsorted(sums, draws.float()[:, None], right=True)[:, 0].clamp(
        max=probabilities.shape[1] - 1)


WRONG_SOLUTIONS = [
    # 1. Memory rendering
    wrong(1, STEP, "an empty text", instead=lambda self, max_result=None: ""),
    wrong(1, STEP, "errors are not shown", ('self.error != "none"', "False")),
    wrong(1, STEP, "CONTINUE is not shown", ("self.stop is not None", "self.stop")),
    wrong(1, STEP, "an empty command is shown", ("if self.command:", "if True:")),
    wrong(1, STEP, "the limit is ignored", ("clip_middle(self.result, max_result)", "self.result")),
    wrong(1, STEP, "a limit of 0 is no limit", ("if max_result is None", "if not max_result")),
    wrong(1, STEP, "seconds are shown",
          ('f"Result: {result}"', 'f"Result: {result} {self.seconds}"')),
    wrong(1, MEMORY, "the last step only", ("for step, limit in shown",
                                            "for step, limit in list(shown)[-1:]")),
    wrong(1, MEMORY, "limits are ignored", ("step.render(limit)", "step.render()")),
    wrong(1, STEP, "head and tail without a note", ("clip_middle(self.result, max_result)",
          "self.result[:max_result // 2] + self.result[-(max_result // 2):]")),
    # 2. Plan parser
    wrong(2, PLAN, "an empty plan", instead=lambda text, tools: modules.Plan()),
    wrong(2, PLAN, "an unknown tool becomes the first one",
          ("tool = _resolve(said, tools)", "tool = _resolve(said, tools) or tools[0]")),
    wrong(2, PLAN, "thinking is read", ("drop_thinking(text)", "text")),
    wrong(2, PLAN, "JSON is not read", ("() if plan else _objects(text)", "()")),
    wrong(2, PLAN, "the error names no tool", ("Use exactly one of: {names}.", "")),
    wrong(2, LAST, "the first plan wins", ("*reversed(groups), merged", "*groups, merged")),
    wrong(2, LAST, "labels of two plans are mixed", ("*reversed(groups), merged", "merged,")),
    wrong(2, LAST, "a plan without a sub-goal",
          ('plan.get("subgoal") and _first_line', 'plan.setdefault("subgoal", "") or _first_line')),
    wrong(2, PLAN, "the justification is dropped", ('plan.get("justification", "")', '""')),
    wrong(2, PLAN, "null in JSON is a text", ("(name, _as_text(value))", "(name, str(value))")),
    wrong(2, PLAN, "keys of JSON as they are", ("_keyed(fields)", "fields")),
    wrong(2, PLAN, "the last JSON object wins",
          ("        if plan := _last_plan(pairs):\n            break",
           "        plan = _last_plan(pairs) or plan")),
    wrong(2, PLAN, "all that follows the tool's label", ('_first_line(plan["tool"])',
                                                         'plan["tool"]')),
    wrong(2, LAST, "the label 'tool' is not known",
          ('plan.get("toolname") or plan.get("tool", "")', 'plan.get("toolname", "")')),
    wrong(2, LAST, "an empty sub-goal is one", ('plan.get("subgoal") and',
                                                '"subgoal" in plan and')),
    # 3. The library search
    wrong(3, INDEX, "all weights are 0", ("idf * f * (K1 + 1)", "0 * f")),
    wrong(3, INDEX, "rare words count no more than others", ("idf * f", "f")),
    wrong(3, INDEX, "a text's length does not count", ("norm[where]", "K1")),
    wrong(3, BEST, "nothing is found", instead=lambda self, query, count, share=0.0: []),
    wrong(3, BEST, "equal scores backwards", ("np.argsort(-scores, kind=\"stable\")",
                                              "np.argsort(scores, kind=\"stable\")[::-1]")),
    wrong(3, BEST, "texts without a match", ("scores[row] > 0 and ", "")),
    wrong(3, BEST, "the share is ignored", (" and scores[row] >= enough", "")),
    wrong(3, SEARCH, "finding nothing is no error", (', "not_found"', "")),
    wrong(3, SEARCH, "long passages push others out", ("clip_middle(self.passages[row], room)",
                                                       "self.passages[row]")),
    wrong(3, SEARCH, "counted from 0", ("start=1", "start=0")),
    wrong(3, SEARCH, "no share", (", share=0.7", "")),
    wrong(3, SEARCH, "a share of 0.5", ("share=0.7", "share=0.5")),
    wrong(3, SEARCH, "passages of 100 characters", ("RESULT_CHARS // 3 - 8", "100")),
    wrong(3, BEST, "equal scores in any order", (', kind="stable"', "")),
    # 4. The sandbox's time limit
    wrong(4, RUN, "no limit", ("max(0.0, timeout - (time.perf_counter() - started))", "30")),
    wrong(4, RUN, "the process is not killed", ("if late or init == 0:", "if False:")),
    wrong(4, RUN, "it always waits for the limit",
          ("waiter.join(max(0.0, timeout - (time.perf_counter() - started)))",
           "time.sleep(timeout)")),
    wrong(4, RUN, "never late", ("late, seconds = waiter.is_alive(),", "late, seconds = False,")),
    wrong(4, RUN, "the time is not taken", ("time.perf_counter() - started\n", "0.0\n")),
    wrong(4, VERDICT, "every run is fine", instead=lambda *given: (None, "none", "", "")),
    wrong(4, VERDICT, "a time-out is a failure", ('"timeout", f"Timed', '"runtime", f"Timed')),
    wrong(4, VERDICT, "what came before is not said", ("if report and message", "if False")),
    wrong(4, RUN, "the process alone is killed",
          ("_kill_everything(process, waiter, init, folder)", "process.kill()")),
    wrong(4, RUN, "its group alone is killed",
          ("_kill_everything(process, waiter, init, folder)",
           "os.killpg(process.pid, signal.SIGKILL)")),
    wrong(4, RUN, "whoever outlives the program is left", ("if late or init == 0:", "if late:")),
    wrong(4, VERDICT, "stderr is dropped", ('.{also}", stderr', '.{also}", ""')),
    wrong(4, VERDICT, "the value is kept", ('return None, "timeout"', 'return value, "timeout"')),
    # 5. Slots and masks of a decode step
    wrong(5, MASK, "everything is visible", ("masked_fill_(~visible, -math.inf)",
                                             "mul_(visible)")),
    wrong(5, MASK, "a token does not see itself", ("<= positions", "< positions")),
    wrong(5, MASK, "the future is visible", ("<= positions", ">= positions")),
    wrong(5, MASK, "the type is fp32", ("dtype=dtype, ", "")),
    wrong(5, MASK, "for two dimensions only", (".unsqueeze(-3)", ".unsqueeze(1)")),
    wrong(5, BURST, "masks always in fp32", ("width, lane.dtype)", "width, torch.float32)")),
    wrong(5, ATTEND, "an answer of zeros", ("self.mask, scaling)", "self.mask, scaling).mul(0)")),
    wrong(5, ATTEND, "written one place too far", ("keys[self.rows, :, self.positions]",
                                                   "keys[self.rows, :, self.positions + 1]")),
    wrong(5, ATTEND, "values are not written",
          ("values[self.rows, :, self.positions] = value.transpose(1, 2)", "pass")),
    wrong(5, ATTEND, "no scaling", ("self.mask, scaling)", "self.mask, 1.0)")),
    wrong(5, BURST, "the first position is one too far",
          ("len(row.ids) - 1 for", "len(row.ids) for")),
    wrong(5, BURST, "positions do not advance", ("self.device) + later)",
                                                 "self.device) + 0 * later)")),
    wrong(5, BURST, "every row sees as far as the longest",
          ("causal_mask(positions, width", "causal_mask(0 * positions + width - 1, width")),
    wrong(5, BURST, "the longest row decides for all", ("torch.tensor(lengths,",
                                                        "torch.tensor([max(lengths)] * B,")),
    # 6. Sampling with log-probs
    wrong(6, CHOOSE, "an answer of zeros", instead=lambda logits, temperatures, draws: (
        torch.zeros(len(logits), dtype=torch.long), torch.zeros(len(logits)))),
    wrong(6, CHOOSE, "no temperature", ("flow_grpo.tempered(logits, temperatures)",
                                        "logits.float()")),
    wrong(6, CHOOSE, "greedy rows are sampled", ("temperatures == 0, ids,", "ids < 0, ids,")),
    wrong(6, CHOOSE, "logits for log-probs", (" - log_total", "")),
    wrong(6, CHOOSE, "never sampled", ("if draws is not None:", "if False:")),
    wrong(6, CHOOSE, "sampled without the temperature",
          ("draw(scaled.softmax(dim=-1), draws)", "draw(logits.float().softmax(dim=-1), draws)")),
    wrong(6, CHOOSE, "probabilities in bf16", ("scaled.softmax(dim=-1)",
                                               "scaled.softmax(dim=-1).bfloat16()")),
    wrong(6, DRAW, "past the last token", instead=lambda p, draws: torch.searchsorted(
        p.cumsum(-1, dtype=draws.dtype), draws[:, None], right=True)[:, 0]),
    wrong(6, DRAW, "always token 0",
          instead=lambda p, draws: torch.zeros(len(p), dtype=torch.long)),
    wrong(6, DRAW, "sums in fp32", instead=sampled_by_fp32_sums),
    wrong(6, DRAW, "one token too far", ("(block * DRAW_BLOCK + token)",
                                         "(block * DRAW_BLOCK + token + 1)")),
    # 7. Turn weights
    wrong(7, WEIGHTS, "an answer of zeros", ("weights = 1.0 /", "weights = 0.0 /")),
    wrong(7, WEIGHTS, "one mean over all tokens",
          ("1.0 / (per_rollout[rollout] * lengths.cpu())",
           "torch.ones(len(lengths)) / lengths.sum()")),
    wrong(7, WEIGHTS, "a long roll-out counts more", (".double() * turns", ".double()")),
    wrong(7, WEIGHTS, "a long plan counts more", (" * lengths.cpu())", ")")),
    wrong(7, WEIGHTS, "questions are not averaged", ("Q * rollouts_in_group", "rollouts_in_group")),
    wrong(7, WEIGHTS, "roll-out 0 is one in all questions",
          ("torch.stack([group_ids.cpu().long(), rollout_ids.cpu().long()], dim=1)",
           "torch.stack([rollout_ids.cpu().long(), rollout_ids.cpu().long()], dim=1)")),
    wrong(7, WEIGHTS, "one key for question and roll-out",
          ("torch.stack([group_ids.cpu().long(), rollout_ids.cpu().long()], dim=1)",
           "torch.stack([group_ids.cpu().long(), 0 * group_ids.cpu().long()], dim=1) + "
           "rollout_ids.cpu().long()[:, None]")),
    wrong(7, WEIGHTS, "in fp64", ("dtype=torch.float32", "dtype=torch.float64")),
    # 8. Group advantages
    wrong(8, ADVANTAGES, "an answer of zeros", ("centred / (std + eps)", "0 * centred")),
    wrong(8, ADVANTAGES, "the deviation of all, ddof 0", ("(count - 1)", "count")),
    wrong(8, ADVANTAGES, "no deviation", ("centred / (std + eps)", "centred")),
    wrong(8, ADVANTAGES, "the whole batch is one group", ("group_ids.cpu().long().unique(",
                                                          "(0 * group_ids.cpu().long()).unique(")),
    wrong(8, ADVANTAGES, "noise becomes an advantage", ("torch.where(flat, 0.0, ",
                                                        "torch.where(count == 1, 0.0, ")),
    wrong(8, ADVANTAGES, "unjudged is wrong", ("~scores.isnan()", "scores == scores.nan_to_num()"),
          ("count = group_sum(judged.double())", "count = group_sum(0 * known + 1)")),
    wrong(8, ADVANTAGES, "eps is ignored", ("(std + eps)", "(std + 1e-6)")),
    wrong(8, ADVANTAGES, "a fixed limit for noise, too large",
          ("std <= FLOAT_NOISE * size + 1e-12", "std < 1e-3")),
    wrong(8, ADVANTAGES, "a fixed limit for noise", ("std <= FLOAT_NOISE * size + 1e-12",
                                                     "std < 1e-6")),
    wrong(8, ADVANTAGES, "halves come back in fp32",
          ("rewards.dtype if rewards.is_floating_point()",
           "rewards.dtype if rewards.dtype in (torch.float32, torch.float64)")),
    wrong(8, ADVANTAGES, "always fp64", ("dtype=dtype)", "dtype=torch.float64)")),
    # 9. Clipped objective and KL
    wrong(9, LOSS, "a loss of zero", ("loss = -(weights.detach()[:, None] * objective).sum()",
                                      "loss = 0 * logp.sum()")),
    wrong(9, LOSS, "a gradient of zero", ("ratio = (logp - logp_old).exp()",
                                          "ratio = (logp.detach() - logp_old).exp() + 0 * logp")),
    wrong(9, LOSS, "old over new", ("(logp - logp_old).exp()", "(logp_old - logp).exp()")),
    wrong(9, LOSS, "the larger of the two", ("torch.minimum(", "torch.maximum(")),
    wrong(9, LOSS, "only the clipped one", ("torch.minimum(ratio * A, clipped * A)",
                                            "clipped * A")),
    wrong(9, LOSS, "no clip", ("torch.minimum(ratio * A, clipped * A)", "ratio * A")),
    wrong(9, LOSS, "one clip range for both sides",
          ("1 + epsilon_high)  #", "1 + epsilon_low)  #")),
    wrong(9, LOSS, "the objective is minimised", ("loss = -(", "loss = (")),
    wrong(9, LOSS, "the KL is rewarded", ("objective - beta * kl", "objective + beta * kl")),
    wrong(9, LOSS, "a mean instead of the weights",
          ("(weights.detach()[:, None] * objective).sum()", "objective.mean()")),
    wrong(9, LOSS, "gradient to pi_old", ("logp_old.detach(), 0.0", "logp_old, 0.0")),
    wrong(9, KL, "zero", instead=lambda logp, logp_ref: 0 * logp),
    wrong(9, LOSS, "padding of the reference is seen",
          ("torch.where(keep, logp_ref.detach(), 0.0)", "logp_ref.detach()"),
          ("torch.where(keep, objective, 0.0)", "objective * mask")),
    wrong(9, LOSS, "ratios are cut at 10", ("(logp - logp_old).exp()",
                                            "(logp - logp_old).exp().clamp(max=10)")),
    wrong(9, KL, "without expm1", ("torch.expm1(difference) - difference",
                                   "difference.exp() - difference - 1")),
    wrong(9, KL, "clamped", ("difference = logp_ref - logp",
                             "difference = (logp_ref - logp).clamp(-10, 10)")),
    wrong(9, KL, "policy over reference", ("logp_ref - logp", "logp - logp_ref")),
    wrong(9, KL, "k1", ("torch.expm1(difference) - difference", "-difference")),
    wrong(9, KL, "k2", ("torch.expm1(difference) - difference", "difference**2 / 2")),
    # 10. Fused log-probs with their backward
    wrong(10, FORWARD, "an answer of zeros", ("logp[part] -= normaliser[part]",
                                              "logp[part] = 0 * normaliser[part]")),
    wrong(10, FORWARD, "no temperature", ("tempered(state @ head.T, temperature)",
                                          "state @ head.T")),
    wrong(10, FORWARD, "the entropy of the wrong sign", ("normaliser[part] - weighted / total",
                                                         "weighted / total - normaliser[part]")),
    wrong(10, FORWARD, "no rescaling between parts", ("shrink = (top - higher).exp()",
                                                      "shrink = (top > -torch.inf).float()")),
    wrong(10, FORWARD, "the largest logit so far is 0",
          ("state.new_full((len(state),), -torch.inf)", "state.new_zeros(len(state))")),
    wrong(10, FORWARD, "the whole head at once", ("in head_slices(weight)",
                                                  "in [(slice(0, len(weight)), weight.float())]")),
    wrong(10, FORWARD, "chunks of 20", ("range(0, M, chunk)", "range(0, M, 20)"),
          ("start + chunk", "start + 20")),
    wrong(10, BACKWARD, "a gradient of zeros", ("mul_(-outer)", "mul_(0)"),
          ("outer * here[:, None]", "0 * outer * here[:, None]")),
    wrong(10, BACKWARD, "only the target's own logit", ("mul_(-outer)", "mul_(0)")),
    wrong(10, BACKWARD, "no temperature in the chain rule",
          ("tempered(grad_logp[part, None], ctx.temperature)", "grad_logp[part, None].float()")),
    wrong(10, BACKWARD, "the last chunk only for the head",
          ("grad_weight[v].addmm_(slope.T, state)", "grad_weight[v] = slope.T @ state")),
    wrong(10, BACKWARD, "what comes from above is ignored",
          ("grad_logp[part, None]", "torch.ones_like(grad_logp[part, None])")),
    wrong(10, "flow_grpo:linear_logprobs", "all logits at once", instead=all_logits_at_once),
    # 11. LoRA with a gate
    wrong(11, NEW_LORA, "B starts at random", ("torch.zeros(", "torch.randn(")),
    wrong(11, NEW_LORA, "A starts at zero too", ("A = torch.empty(", "A = torch.zeros("),
          ("nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=random)", "pass")),
    wrong(11, NEW_LORA, "A from the global generator", (", generator=random", "")),
    wrong(11, NEW_LORA, "another distribution", ("a=math.sqrt(5)", "a=5")),
    wrong(11, NEW_LORA, "A's rows are equal", (
        "nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=random)",
        "nn.init.kaiming_uniform_(A[:1], a=math.sqrt(5), generator=random); A[1:] = A[:1]")),
    wrong(11, LORA, "the bias is lost", ("self.base(x)", "x @ self.base.weight.T")),
    wrong(11, LORA, "an answer of zeros",
          ("return y\n    low", "return y\n    y.zero_()\n    low")),
    wrong(11, LORA, "no adapter", ("self.scale * self.gate.value", "0 * self.gate.value")),
    wrong(11, LORA, "no gate a row", ("self.scale * self.gate.value", "self.scale")),
    wrong(11, LORA, "no scale", ("self.scale * self.gate.value", "self.gate.value")),
    wrong(11, LORA, "B's product in fp32",
          ("y.flatten(0, 1).addmm_(low.flatten(0, 1), self.B.to(x.dtype).T)",
           "y = y + F.linear(low.float(), self.B).to(x.dtype)")),
    wrong(11, LORA, "no gradient to A", ("self.A.to(x.dtype)", "self.A.detach().to(x.dtype)")),
    wrong(11, LORA, "no gradient to the layers below", ("F.linear(x,", "F.linear(x.detach(),")),
    # 12. The training loop
    wrong(12, ROWS, "advantages of zero", ("advantages[i].item()", "0.0")),
    wrong(12, ROWS, "a roll-out's advantage is shared out to its turns",
          ("advantages[i].item()", "advantages[i].item() / len(rollouts[i].turns)")),
    wrong(12, ROWS, "the last turn only", ("for turn in rollout.turns]",
                                           "for turn in rollout.turns[-1:]]")),
    wrong(12, ROWS, "unjudged roll-outs are counted", ("~rewards.isnan()[rollout_ids]",
                                                       "~rewards.isnan()[rollout_ids * 0]")),
    wrong(12, ROWS, "the end token is not trained",
          ("reply.response_ids,", "reply.response_ids[:-1],")),
    wrong(12, GRADIENTS, "a gradient of zero", ("loss.backward()", "pass")),
    wrong(12, GRADIENTS, "each micro-batch is averaged", ("loss.backward()",
                                                          "(loss / len(batch)).backward()")),
    wrong(12, GRADIENTS, "the reference is the policy",
          ("config.temperature, gate=0", "config.temperature, gate=1")),
    wrong(12, GRADIENTS, "scored at temperature 1", ("config.temperature, gate=1", "1.0, gate=1")),
    wrong(12, GRADIENTS, "padding is trained", ("[[1.0] * len(row.response_ids) for row in batch]",
                                                "[[1.0] * width for row in batch]")),
    wrong(12, UPDATE, "no clipping", ("parameters, MAX_GRAD_NORM", "parameters, 1e9")),
    wrong(12, UPDATE, "the weights never change", ("optimizer.step()", "before_step")),
    wrong(12, UPDATE, "NaN is applied", ("not torch.isfinite(norm)", "False")),
    wrong(12, UPDATE, "old keys and values are kept", ("backbone.adapter_changed()", "pass")),
    wrong(12, UPDATE, "a step without a word before", ("before_step()", "pass")),
    wrong(12, GRADIENTS, "epsilon stays at its default",
          ("        epsilon_low=config.epsilon,\n", "")),
    wrong(12, GRADIENTS, "the reference is scored for a gradient", ("with torch.no_grad():",
                                                                    "if True:")),
    wrong(12, GRADIENTS, "the reference is scored for nothing", ("if config.beta:", "if True:")),
    wrong(12, UPDATE, "infinity is applied", ("not torch.isfinite(norm)", "torch.isnan(norm)")),
    wrong(12, UPDATE, "each weight is clipped alone", (
        "torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)",
        "torch.stack([torch.nn.utils.clip_grad_norm_([p], MAX_GRAD_NORM) for p in parameters])"
        ".norm()")),
]
