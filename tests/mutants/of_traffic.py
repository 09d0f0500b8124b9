# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a program's traffic is foreseen from: bytes on the wire, lines, seconds."""

from accelfn.testing.simulation import calls, plan, wire
from accelfn.testing.traffic import foresight, link, traffic
from accelfn.transforms import local_sgd
from tests.laws import by_messages, test_traffic
from tests.mutants.mutant import Mutant
from tests.unit import test_traffic as test_chart

MUTANTS = [
    Mutant(
        "L49: what is sent on more ranks is what two of them send",
        test_traffic.test_foreseen_bytes_are_those_that_ranks_send,
        foresight._foreseen,
        "return attrs.evolve(like, ranks=ranks, most → return attrs.evolve(like, ranks=2, most",
    ),
    Mutant(
        "L49: a rank alone is said to send",
        test_traffic.test_foreseen_bytes_are_those_that_ranks_send,
        wire.cost,
        "if what.ranks == 1: → if what.ranks == 0:",
    ),
    Mutant(
        "L49: what is sent before the first update is counted as of the updates too",
        test_traffic.test_foreseen_bytes_are_those_that_ranks_send,
        traffic.Traffic._part,
        "if (e.step is not None) is of_updates → if e.step is not None or of_updates",
    ),
    Mutant(
        "L49: of calls with one label only the last one is counted",
        test_traffic.test_totals_do_not_depend_on_what_tells_them_apart,
        plan.Run.sent,
        "totals.get(key, 0) + num_bytes → num_bytes",
    ),
    Mutant(
        "L49: an all-gather is counted as if each part went to one rank",
        test_traffic.test_a_collective_sends_what_its_messages_are,
        wire._all_gather,
        "num_bytes=hops * what.total → num_bytes=what.total",
        args={"algorithm": "ring", "collective": by_messages.all_gather},
    ),
    Mutant(
        "L49: ranks are counted as giving to themselves what they keep",
        test_traffic.test_a_collective_sends_what_its_messages_are,
        calls.Call.num_bytes_for_others,
        "if i != mine → if True",
        args={"algorithm": "ring", "collective": by_messages.all_to_all},
    ),
    Mutant(
        "L49: the root of a gather is counted as giving to itself",
        test_traffic.test_a_collective_sends_what_its_messages_are,
        calls.Call.num_bytes_for_others,
        'if self.kind == "gather" and is_root: → if False:',
        args={"algorithm": "ring", "collective": by_messages.gather},
    ),
    Mutant(
        "L49: what other ranks have in a broadcast's tensor is counted as sent",
        test_traffic.test_totals_of_a_broadcast_are_the_roots,
        calls.Call.num_bytes_for_others,
        "if self.kind in _FROM_ROOT and not is_root: → if False:",
    ),
    Mutant(
        "L10: local SGD averages more often than is foreseen of it",
        test_traffic.test_local_sgd_sends_what_ddp_sends_divided_by_its_period,
        local_sgd.local_sgd.after_update,
        "if updates >= self.sync_every: → if True:",
    ),
    Mutant(
        "L49: a link of a larger latency is faster",
        test_traffic.test_seconds_are_monotone,
        link.Link.seconds,
        "cost.rounds * self.latency + sent → sent - cost.rounds * self.latency",
    ),
    Mutant(
        "L49: each round of a tree is counted as one of a ring",
        test_traffic.test_seconds_are_those_of_the_books,
        wire._in_a_tree,
        "rounds=depth → rounds=what.ranks - 1",
    ),
    Mutant(
        "L49: a link is given all bytes of all ranks, which have one each",
        test_traffic.test_seconds_are_those_of_the_books,
        wire._reduce_scatter,
        "busiest=hops * n / what.ranks → busiest=hops * n",
    ),
    Mutant(
        "L49: a bucket is sent before its gradients are there",
        test_traffic.test_buckets_are_sent_beside_the_backward_pass,
        traffic._after_backward,
        "max(now, backward * num_bytes / whole) → now",
    ),
    Mutant(
        "L49: what has been cut into parts is taken to lie on a line that falls",
        test_traffic.test_what_is_cut_into_parts_is_foreseen_rightly_or_not_at_all,
        foresight._on_a_line,
        "if slope < 0 or any( → if any(",
    ),
    Mutant(
        "L49: two points are taken to tell where the third is",
        test_traffic.test_what_is_cut_into_parts_is_foreseen_rightly_or_not_at_all,
        foresight._on_a_line,
        "any(y + slope * (n - x) != each for n, each in values.items()) → False",
    ),
    Mutant(
        "L49: calls of some ranks are foreseen as if all made them",
        test_traffic.test_other_calls_on_other_ranks_are_refused_by_name,
        foresight._check_same_calls,
        "if len(entry.ranks) < size: → if False:",
    ),
    Mutant(
        "L49: calls that differ from world to world pass for one",
        test_traffic.test_other_calls_on_other_ranks_are_refused_by_name,
        foresight._check_same_calls,
        "if _known_by(a) != _known_by(b): → if False:",
    ),
    Mutant(
        "the seconds of an update are those of all updates",
        test_chart.test_a_table_has_a_row_a_label_and_a_column_a_world,
        traffic.Traffic.seconds,
        "slowest / max(1, self.updates) → slowest",
    ),
]
