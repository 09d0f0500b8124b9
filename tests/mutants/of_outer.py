# SPDX-License-Identifier: Apache-2.0
"""Bugs in outer optimizers, in numbers of few bits, and in what is on its way."""

from accelfn.base import pending, tree
from accelfn.collectives import averages, both_ways, few_bits, reductions, trees
from accelfn.outer import exchange, fragments
from accelfn.transforms import diloco as module
from accelfn.transforms.diloco import diloco
from accelfn.transforms.local_sgd import local_sgd
from tests.laws import test_diloco as outer
from tests.laws import test_few_bits as bits
from tests.laws import test_local_sgd as averages_of
from tests.laws import test_pending as started
from tests.laws import test_split_copies as copies
from tests.mutants.mutant import Mutant

PAPERS = outer.test_it_is_what_the_papers_say
NEIGHBOURS = averages_of.test_neighbours_meet_more_often
LOCAL = outer.test_a_plain_outer_step_is_local_sgd
ALONE = outer.test_alone_every_update_is_the_inner_optimizer
MESSAGES = bits.test_messages_carry_what_a_collective_does
LOST = outer.test_nothing_is_lost_in_few_bits
EARLY = outer.test_who_looks_early_changes_nothing
AGREE = outer.test_ranks_agree_in_the_end
OTHERS = outer.test_other_ranks_go_on
BYTES = outer.test_its_bytes_are_these
ANCHOR = copies.test_in_few_bits_copies_have_one_anchor
LAYOUT = copies.test_a_period_goes_on_in_any_layout
NEAREST = bits.test_they_are_the_nearest
BETWEEN = bits.test_nothing_is_lost_between
SO_MANY = bits.test_they_take_so_many_bytes
SHOWS = bits.test_what_is_not_finite_shows
STARTED = started.test_it_is_the_reduction
WEIGHT = started.test_a_mean_is_by_weight
LOOKS = started.test_in_a_slot_it_is_waited_for_by_whoever_looks

MUTANTS = [
    Mutant(
        "L11: the pseudo-gradient has the other sign",
        PAPERS,
        exchange.moved,
        "_wide(local(a)) - local(params[name]) → local(params[name]) - _wide(local(a))",
    ),
    Mutant(
        "L11: the outer optimizer forgets its momentum",
        PAPERS,
        diloco._stepped,
        'stepped(slot["outer"], stepped) → stepped({}, stepped)',
    ),
    Mutant(
        "L11: the anchor stays where it was for who trains",
        LOCAL,
        diloco._stepped,
        "param.copy_(target) → pass",
    ),
    Mutant(
        "L11: what is mixed is the other share",
        PAPERS,
        diloco._stepped,
        "param.lerp_(target, 1 - self.mix) → param.lerp_(target, self.mix)",
    ),
    Mutant(
        "L11: ranks count alike, whatever they have seen",
        PAPERS,
        diloco.after_update,
        "each + update.weight → each + 1",
    ),
    Mutant(
        "L11: ranks count alike in an exchange that is waited for",
        PAPERS,
        exchange.Exchange.send,
        "each * weight → each",
    ),
    Mutant(
        "L11: what a rank has seen is counted for ever",
        PAPERS,
        diloco._exchanged,
        '{"weights": 0, "sent": state.step} → {"sent": state.step}',
    ),
    Mutant(
        "L11: an exchange is used an update late",
        PAPERS,
        fragments.Timetable.due,
        "updates - sent == self.delay → updates - sent == self.delay + 1",
    ),
    Mutant(
        "L11: all fragments have their turn at once",
        PAPERS,
        fragments.Timetable._first,
        "i * self.sync_every // self.fragments → 0",
    ),
    Mutant(
        "L11: a fragment has a parameter of its neighbour's",
        PAPERS,
        fragments.cut,
        "int(middle * count / whole) → round(middle * count / whole)",
    ),
    Mutant(
        "L11: an exchange in which nobody saw anything moves the anchor",
        PAPERS,
        exchange.Exchange.arrived,
        "if not is_positive(total): → if False:",
    ),
    Mutant(
        "L11: a parameter of a full bucket is not exchanged",
        PAPERS,
        fragments.together,
        "bucket, size = [], 0 → bucket, size = [], 0; continue",
    ),
    Mutant(
        "L11: alone nothing is exchanged",
        PAPERS,
        fragments.Timetable.leaving,
        "if updates and → if updates > 9 and",
    ),
    Mutant(
        "L12: alone it goes away from where it trained",
        ALONE,
        exchange.moved,
        "_wide(local(a)) - local(params[name]) → local(params[name]) - _wide(local(a))",
    ),
    Mutant(
        "L11: what rounding leaves out of a rank's numbers is forgotten",
        LOST,
        exchange._if_seen,
        "new.clone() if weight else old → old",
    ),
    Mutant(
        "L11: what rounding leaves out of the mean is forgotten",
        LOST,
        exchange.Exchange.go_on,
        "+= torch.where(total > 0, rest, 0) → += 0",
    ),
    Mutant(
        "L11: of the mean it is remembered for one rank alone",
        LOST,
        exchange.Exchange.go_on,
        "* self.ranks.size → * 1",
    ),
    Mutant(
        "L11: what is remembered of the mean is another part's",
        LOST,
        exchange.Exchange.go_on,
        "begin = self.ranks.rank * size → begin = 0",
    ),
    Mutant(
        "L11: what is remembered is never sent",
        LOST,
        exchange.Exchange.send,
        "d + local(error[n]) if error else d → d",
    ),
    Mutant(
        "L43: who looks at the anchor is given what a rank holds",
        PAPERS,
        diloco.eval_params,
        '{**params, **slot["anchor"]} → params',
    ),
    Mutant(
        "L43: a copy in flight is of other numbers",
        EARLY,
        tree._map,
        "Pending.of(inner(tree.wait())) → Pending.of(tree_map("
        "lambda t: t + 1 if torch.is_tensor(t) else t, tree.wait()))",
    ),
    Mutant(
        "L43: what is on its way has no tensors, to who counts them",
        LOOKS,
        tree._gather,
        "_gather(tree.wait(), leaves, by_key=by_key) → pass",
    ),
    Mutant(
        "L11: in the end ranks stay where they are",
        AGREE,
        diloco.finalize,
        "local(state.params[name]).copy_(local(each)) → pass",
    ),
    Mutant(
        "L11: in the end what is on its way is dropped",
        PAPERS,
        diloco.finalize,
        "slot = self._landed(state, self._gone_on(state, slot, key), key) →"
        ' slot = {**slot, "flights": {}}',
    ),
    Mutant(
        "L11: in the end what is remembered stays",
        AGREE,
        diloco._averaged,
        'without(slot["error"], names) → slot["error"]',
    ),
    Mutant(
        "L45: other ranks remember what the first did",
        OTHERS,
        diloco.merge,
        'torch.stack([slot["error"][name] for slot in slots]).sum(0) / count →'
        ' first["error"][name]',
    ),
    Mutant(
        "L45: other ranks take the first part of a flight for all",
        OTHERS,
        module.met,
        "torch.cat([coded for coded, _, _ in sums]) → torch.cat([sums[0][0]] * len(sums))",
    ),
    Mutant(
        "L45: what a flight's rounding leaves out is forgotten where other ranks load it",
        OTHERS,
        diloco.merge,
        "error[name] + left[name] → error[name]",
    ),
    Mutant(
        "L10: the weight is sent with each number",
        BYTES,
        exchange.Exchange.send,
        "told = torch.zeros(1, → told = torch.zeros(9,",
    ),
    Mutant(
        "L45: numbers that several ranks hold are rounded beside others",
        ANCHOR,
        fragments.together,
        "or cut != axes → or False",
    ),
    Mutant(
        "L11: a step is twice as large",
        NEAREST,
        few_bits.encoded,
        "largest / most → 2 * largest / most",
    ),
    Mutant(
        "L11: a power of two has a step twice as large",
        NEAREST,
        few_bits.encoded,
        "exponent -= (fraction == 0.5).int() → pass",
    ),
    Mutant(
        "L11: rounding is towards zero",
        NEAREST,
        few_bits.encoded,
        ".round_() → .trunc_()",
    ),
    Mutant(
        "L11: negative numbers of 4 bits lose their sign",
        BETWEEN,
        few_bits._unpacked,
        "(coded << 4).view(torch.int8) >> 4 → ((coded << 4) >> 4).view(torch.int8)",
    ),
    Mutant(
        "L11: two numbers of 4 bits change places",
        NEAREST,
        few_bits._unpacked,
        "torch.stack([low, high], -1) → torch.stack([high, low], -1)",
    ),
    Mutant(
        "L10: the bytes of powers of two are not counted",
        SO_MANY,
        few_bits.num_bytes,
        "+ count // BLOCK → + 0",
    ),
    Mutant(
        "L11: what is not finite is sent as 0",
        SHOWS,
        few_bits.encoded,
        "torch.where(finite, exponent, _NOT_FINITE) → exponent",
    ),
    Mutant(
        "L49: over Gloo a rank sends before it asks",
        MESSAGES,
        both_ways._Messages.__init__,
        "asked = [dist.irecv(got[each], group_src=each, **among) for each in others]"
        " → asked = (dist.irecv(got[each], group_src=each, **among) for each in others)",
    ),
    Mutant(
        "L49: over Gloo a rank's messages are a user's",
        MESSAGES,
        both_ways._Messages.__init__,
        '"tag": _TAG → "tag": 0',
    ),
    Mutant(
        "L49: over Gloo all ranks get one row",
        MESSAGES,
        both_ways._Messages.__init__,
        "dist.isend(given[each] → dist.isend(given[ranks.rank]",
    ),
    Mutant(
        "L49: over Gloo a rank has nothing for itself",
        MESSAGES,
        both_ways._Messages.__init__,
        "got[ranks.rank] = given[ranks.rank] → got[ranks.rank] = 0",
    ),
    Mutant(
        "L49: who waits for messages has not got them",
        MESSAGES,
        both_ways._Messages.wait,
        "in self._works → in ()",
    ),
    Mutant(
        "L49: values may not change while they are on their way",
        STARTED,
        reductions.started,
        "flat = pack(same) → flat = same[0].view(-1) if len(same) == 1 else pack(same)",
    ),
    Mutant(
        "L49: who waits is given what has not arrived",
        STARTED,
        reductions._begun,
        'cast("dist.Work", work).wait() → pass',
    ),
    Mutant(
        "L49: who waits again waits for another",
        STARTED,
        pending.Pending.wait,
        "self._finish = None → pass",
    ),
    Mutant(
        "L49: who waits again for what failed on its way is given nothing, and no error",
        started.test_what_failed_on_its_way_fails_whoever_waits,
        pending.Pending.wait,
        "self._values = self._finish()\n        self._finish = None"
        " → finish, self._finish = self._finish, None\n        self._values = finish()",
    ),
    Mutant(
        "L49: a reduction that was started is a sum",
        STARTED,
        trees.start_reduce,
        "ready, op, label) → ready, 'sum', label)",
    ),
    Mutant(
        "L3: the weight of a mean is not looked at",
        WEIGHT,
        averages._average_bucket_,
        "flat.mul_(seen) → pass",
    ),
    Mutant(
        "L3: a mean of nobody's is no number",
        WEIGHT,
        averages._average_bucket_,
        "_may_be_zero(weight) and not is_positive(flat[-1].real) → False",
    ),
    Mutant(
        "L3: the rest of a large tensor is not averaged",
        WEIGHT,
        averages._buckets,
        "tensor.view(-1).split(most) → tensor.view(-1).split(most)[:1]",
    ),
    Mutant(
        "L3: what was given is averaged in place",
        WEIGHT,
        trees.reduce,
        "[each.clone() for each in map(as_floats, leaves)] → [*map(as_floats, leaves)]",
    ),
    Mutant(
        "L10: neighbours are those that stand apart",
        NEIGHBOURS,
        local_sgd._near,
        ".split(size= → .across(size=",
    ),
    Mutant(
        "L10: of several parts that are due the smallest is averaged",
        NEIGHBOURS,
        local_sgd._near,
        "last = max(due) → last = min(due)",
    ),
    Mutant(
        "L10: parts are averaged by what was seen since all met",
        NEIGHBOURS,
        local_sgd._near,
        'weight = slot["near"][f"{last}"] → weight = slot["weight"]',
    ),
    Mutant(
        "L10: what neighbours saw counts again, at the next of their periods",
        NEIGHBOURS,
        local_sgd._near,
        '{**slot["near"], **within} → slot["near"]',
    ),
]
