# SPDX-License-Identifier: Apache-2.0
"""The private names of accelfn that tests use, with their modules.

`from tests.internals import NAME` imports NAME from its module, at first use. If private code
moves, only this table changes.
"""

import re
from importlib import import_module

_NAMES = """
accelfn: cli, collectives
accelfn.base: arguments, codec, devices, draws, system, tree
accelfn.base.arguments: check_integer, explain_call_errors, integer, is_integer,
    is_number, truth
accelfn.base.codec: MAX_DEPTH
accelfn.base.draws: key
accelfn.base.tree: wide, Pending, ReadOnly, cut_axes, is_shard, local, room,
    tensor_leaves, tree_leaves, tree_map
accelfn.checkpoint: background, commit, elastic, files, manifest, store
accelfn.checkpoint.background: Talk, Writing, talk_directory
accelfn.checkpoint.commit: Lock, Save
accelfn.checkpoint.files: digests
accelfn.checkpoint.manifest: Manifest, name_of, read_manifest, read_manifests
accelfn.checkpoint.moving: Restore
accelfn.checkpoint.save: FIELDS as SAVED_FIELDS, contents_of, encode_fields, fields_of,
    save_of
accelfn.checkpoint.slices: Slice, assemble, cover
accelfn.checkpoint.store: best_of
accelfn.cli: main, parser
accelfn.collectives: all_gather_list, failures, few_bits, gather_full, gather_text,
    replicas, sum_
accelfn.collectives.failures: naming
accelfn.collectives.few_bits: BLOCK, dequantize, mean_of, num_bytes, part_size,
    quantize, start_mean, start_parts
accelfn.collectives.packed: average_, is_same_text, start_sum_
accelfn.collectives.replicas: check_replicas, checksum
accelfn.collectives.trees: all_gather_objects
accelfn.data: Plan, loaders, plan, reading
accelfn.data.order: read_sampler, order_of_sampler, shuffle_positions
accelfn.data.plan: EvenCut, token_budget
accelfn.deepspeed: flats
accelfn.deepspeed.engine: ModuleOrder, ReduceOrder, Zero, reduce_by_gloo
accelfn.deepspeed.flats: Flats, cut_of, evenly, flat_key, flat_opt_state, flat_params,
    flatten_opt_state, redistribute
accelfn.definition.layout: Layout
accelfn.definition.transform: FACTS, FIELDS, chain, explanation, facts_of, has_field,
    transform
accelfn.engine: ddp as ddp_engine, engine, modules, optimizer
accelfn.engine.engine: engine_of
accelfn.engine.fsdp: gather, gather_by_gloo, reduce_scatter, reduce_scatter_by_gloo
accelfn.engine.optimizer: fused_step
accelfn.launching: agent, script, worker
accelfn.launching.agent: Agent, Crew
accelfn.launching.machines: Machines, NumberedRendezvous, Plan as MachinePlan,
    handler_of
accelfn.launching.script: Ended, Failure, Watch, WholeLines, by_cause, describe_plan,
    launch_script
accelfn.launching.settings: OPTIONS, Settings, configure, edit_settings, read
accelfn.launching.worker: exit_status, run_script
accelfn.loop: run
accelfn.loop.memory: Bytes, Memory
accelfn.loop.run: deliver
accelfn.model.model: materialize
accelfn.model.optimizer: parts_of
accelfn.model_parallel: differentiable
accelfn.model_parallel.attention: Block, join
accelfn.model_parallel.scores: Scores, gather_scores
accelfn.state.results: GradInfo, Lease
accelfn.state.update: Update
accelfn.step: step
accelfn.testing: comparing
accelfn.testing.catalog: CATALOG, Row, row_of
accelfn.testing.equivalence: dyadic_problem
accelfn.testing.laws: PROBLEMS, Subject
accelfn.testing.method_laws: loads_anywhere
accelfn.testing.plugin: register_profiles
accelfn.testing.processes: RankProcess
accelfn.testing.simulation: calls
accelfn.testing.simulation.calls: Sums
accelfn.testing.simulation.group: Algorithm, SimulatedGroup
accelfn.testing.simulation.turns: Turns
accelfn.testing.transform_laws: observe_acts
accelfn.track.tracker: flat
accelfn.transforms: clip
accelfn.transforms.diloco: bucket_names, param_deltas
accelfn.weights: deepspeed
accelfn.weights.accelerate: entries_of
accelfn.weights.device_map: units_of
accelfn.weights.export: WEIGHTS, split_into_files
accelfn.weights.importing: placement
accelfn.world: World, connection, meeting, world
accelfn.world.axes: AXES, choose_axes, neighbor_runs, resolve_axes, rows
accelfn.world.connection: Activity, Connection, RollCall, Standing, WatchedStore,
    open_groups, open_store
accelfn.world.meeting: Launched, Words
accelfn.world.place: Place, _port_of_job, asked_size, read_place
accelfn.world.world: fold_axes
"""
_PLACES = {
    name.rpartition(" as ")[2]: (module, name.partition(" as ")[0])
    for module, names in re.findall(r"^(\S+): ((?:.|\n )+)", _NAMES, re.MULTILINE)
    for name in re.split(r",\s+", names)
}


def __getattr__(name: str) -> object:
    """Import a private name of the package."""
    if name not in _PLACES:
        msg = f"{name!r} is not in the table of tests/internals.py"
        raise AttributeError(msg)
    module, own = _PLACES[name]
    found = import_module(module)
    return (
        getattr(found, own) if hasattr(found, own) else import_module(f"{module}.{own}")
    )
