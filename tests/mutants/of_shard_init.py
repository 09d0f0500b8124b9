# SPDX-License-Identifier: Apache-2.0
"""Bugs in how a model is drawn that no process holds whole."""

from accelfn.collectives import replicas
from accelfn.state import beginning
from accelfn.structure import acts, drawn, on_meta
from tests.laws import test_shard_init as laws
from tests.mutants.mutant import Mutant
from tests.unit import test_shard_init as unit

SAME = laws.test_what_is_drawn_is_the_same_in_any_layout
TRAINS = laws.test_it_trains_as_what_was_cut_trains
ITSELF = laws.test_a_module_draws_for_itself
ALIVE = laws.test_no_more_than_parts_and_a_module_is_alive
REFUSED = laws.test_what_a_factory_sets_itself_is_refused

MUTANTS = [
    Mutant(
        "L47: a module draws from whatever generator its rank has",
        SAME,
        drawn._Drawing.by,
        "alike), draws.seeded(key, _CPU), → alike),",
    ),
    Mutant(
        "L47: modules around others are drawn before these",
        SAME,
        drawn.drawn,
        "in reversed(list(bare.module.named_modules())) → "
        "in list(bare.module.named_modules())",
    ),
    Mutant(
        "L47: what an optimizer begins with is nothing, where it is cut",
        TRAINS,
        beginning._in_parts,
        "shards.local(leaf).detach(), room) → 0 * shards.local(leaf).detach(), room)",
    ),
    Mutant(
        "L50: a module's draws depend on how many parameters were drawn before",
        ITSELF,
        drawn.drawn,
        '"init", where) → "init", len(kept))',
    ),
    Mutant(
        "L50: buffers are made anew, without what the factory wrote",
        ITSELF,
        beginning._in_parts,
        "b.to(world.device) → torch.zeros_like(b)",
    ),
    Mutant(
        "L47: what a factory registered stays in memory until it has returned",
        ALIVE,
        on_meta.parameters_on_meta,
        "threading.get_ident(), WeakIdKeyDictionary() → threading.get_ident(), {}",
    ),
    Mutant(
        "L47: what was drawn in parts is put together, and cut once more",
        ALIVE,
        beginning._in_parts,
        "setup=chain(*owners), → setup=chain(),",
    ),
    Mutant(
        "L47: a parameter is drawn by its module, whatever the factory did to it",
        REFUSED,
        drawn._Drawing.by,
        "if sets_alike(setting[name], self.bare.acts[name]) → if setting[name]",
    ),
    Mutant(
        "L47: with which values a parameter was registered is not looked at",
        REFUSED,
        acts.Acts.begins,
        "begun = [(_FULL, first.item()) if same else (_VALUES,)] → begun = []",
    ),
    Mutant(
        "L47: what was to be drawn by torch's functions that leave meta alone is not noted",
        REFUSED,
        acts._Looks.__torch_function__,
        "if asking.f_globals is vars(nn.init): → if False:",
    ),
    Mutant(
        "L47: an operation is told from another by its name alone",
        REFUSED,
        acts.Acts.__torch_dispatch__,
        "act = (str(func), *_numbers(args), *_numbers(kwargs.values()))"
        " → act = (str(func),)",
    ),
    Mutant(
        "ranks compare the parts that they hold together, which are always the same",
        unit.test_ranks_that_draw_differently_are_told,
        replicas.check_values,
        "if sums is None: → if True:",
    ),
    Mutant(
        "a parameter of which a half was set is taken",
        unit.test_what_cannot_be_drawn_is_refused,
        drawn._is_unset,
        "bool(plain.min().isnan()) → bool(plain.isnan().all())",
        args=dict(zip(("model", "said"), unit.REFUSED[3], strict=True)),
    ),
]
