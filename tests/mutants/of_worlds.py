# SPDX-License-Identifier: Apache-2.0
"""Bugs in the world: what launchers say of a rank, what a record allows, who tells whom."""

from accelfn.world import (
    axes,
    connection,
    environment,
    mpi,
    place,
    roll_call,
    slurm,
    torchrun,
    world,
)
from tests.laws import test_launched_places
from tests.mutants.mutant import Mutant
from tests.unit import test_axes, test_place, test_roll_call, test_world

MUTANTS = [
    Mutant(
        "a script and its launcher name different axes, and the script's are taken",
        test_axes.test_a_script_and_its_launcher_name_the_same_axes,
        axes.chosen,
        "if _several(asked) != _several(launched): → if False:",
    ),
    Mutant(
        "a script that names the launcher's axes without those of one rank is refused",
        test_axes.test_a_script_and_its_launcher_name_the_same_axes,
        axes.chosen,
        "_several(asked) != _several(launched) → asked != launched",
    ),
    Mutant(
        "ranks of a step on some of a job's machines look for rank 0 where it is not",
        test_place.test_a_step_meets_at_its_own_first_machine,
        slurm._first_machine,
        '"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"'
        ' → "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"',
    ),
    Mutant(
        "two steps that run at once on a machine meet one another",
        test_place.test_slurm,
        slurm._port_of_job,
        'integer(env, "SLURM_JOB_ID") + 1009 * step → integer(env, "SLURM_JOB_ID")',
    ),
    Mutant(
        "the tasks of all machines are those of a few, and ranks are refused",
        test_place.test_slurm,
        slurm._tasks_per_node,
        "[int(found[1])] * int(found[2] or 1) → [int(found[1])]",
    ),
    Mutant(
        "ranks on machines with two numbers in their names have no rank 0 to meet",
        test_place.test_first_machine_of_a_list,
        slurm._first_machine,
        'r"\\1", first[0]) → r"\\1", first[0], count=1)',
        args={"nodes": "rack[0-1]node[02-03],x", "first": "rack0node02"},
    ),
    Mutant(
        "L55: ranks of the first machine wait at its loopback for those of the others",
        test_launched_places.test_a_rank_is_where_its_launcher_says,
        slurm.place_of,
        "THIS_MACHINE if place.local_size == size → THIS_MACHINE if node_rank == 0",
    ),
    Mutant(
        "the script of sbatch on three machines trains alone, and nobody is told",
        test_place.test_several_tasks_that_srun_did_not_start,
        slurm.refuse_unstarted,
        "_started_by_srun(env) <= 1 → not _started_by_srun(env)",
        args={
            "env": {**test_place.SCRIPT, **test_place.STEP},
            "change": {"SLURM_JOB_NUM_NODES": "3"},
            "words": "SLURM_JOB_NUM_NODES=3, but",
        },
    ),
    Mutant(
        "World.single() is refused in the script of sbatch, which is one process",
        test_place.test_several_tasks_that_srun_did_not_start,
        environment.asked_size,
        '"SLURM_STEP_NUM_TASKS" → "SLURM_NTASKS"',
        args={
            "env": test_place.SCRIPT,
            "change": {"SLURM_NTASKS": "2"},
            "words": "SLURM_NTASKS=2, but",
        },
    ),
    Mutant(
        "ranks of an mpirun in a SLURM job take each the one place of srun's task",
        test_place.test_the_innermost_launcher_is_believed,
        environment.read_place,
        "if words.is_meant(env):"
        ' → if words.is_meant(env) and "SLURM_PROCID" not in env:',
    ),
    Mutant(
        "ranks of srun are refused for words that only an mpirun would have said",
        test_place.test_the_innermost_launcher_is_believed,
        mpi.Words.is_meant,
        "return self.local_rank in env → return True",
    ),
    Mutant(
        "ranks that are started by hand all take the first GPU",
        test_place.test_ranks_that_were_started_by_hand_are_of_one_machine,
        torchrun.place_of,
        'if "LOCAL_RANK" in env else rank → if "LOCAL_RANK" in env else 0',
    ),
    Mutant(
        "L55: all ranks of Ray Train are on the first machine",
        test_launched_places.test_a_rank_is_where_its_launcher_says,
        place.machine_of,
        'in ("GROUP_RANK", "NODE_RANK") → in ("GROUP_RANK",)',
    ),
    Mutant(
        "each pod of a PyTorchJob takes a GPU that another pod has",
        test_place.test_a_rank_of_a_cluster,
        torchrun._only_one_of_pod,
        "return 0, 1 → return integer(env, 'RANK'), size",
        args={"env": test_place.PYTORCH_JOB, "where": (2, 3, 0, 1, 2)},
    ),
    Mutant(
        "each pod of a TrainJob trains alone, and nobody is told",
        test_place.test_pods_that_were_to_run_torchrun,
        environment.read_place,
        "torchrun.refuse_unstarted(env) → pass",
        args={"pods": test_place.PODS},
    ),
    Mutant(
        "of an mpirun with seven ranks on two machines some are on the wrong one",
        test_place.test_contradictory_mpi_environment,
        place.machine_of,
        "if left or machine < 0 or place.size % place.local_size:"
        " → if left or machine < 0:",
        args={
            "change": {"OMPI_COMM_WORLD_SIZE": "7"},
            "words": "as many on each.*GROUP_RANK",
        },
    ),
    Mutant(
        "two runs of mpirun on one machine meet one another",
        test_place.test_mpi_on_one_machine,
        mpi._port_of_run,
        "crc32(env[words.job].encode()) → crc32(words.job.encode())",
    ),
    Mutant(
        "a rank takes a GPU that its machine has not",
        test_place.test_contradictory_slurm_environment,
        place.check_place,
        "0 <= place.local_rank < place.local_size"
        " → 0 <= place.local_rank <= place.local_size",
        args={"change": {"SLURM_LOCALID": "2"}, "words": "SLURM_LOCALID=2.*contradict"},
    ),
    Mutant(
        "World.single() under mpirun trains a model on each rank",
        test_place.test_single_does_not_hide_a_world_of_many,
        world.World.single.__func__,
        'if size > 1: → if size > 1 and name == "WORLD_SIZE":',
        args={"env": test_place.OPEN_MPI},
    ),
    Mutant(
        "a record of rank 1 of 1 trains, and is nobody's main rank",
        test_world.test_record_refuses_a_rank_outside,
        world.World.__attrs_post_init__,
        "if not 0 <= self.rank < self.size: → if not 0 <= self.rank <= self.size:",
        args={"rank": 1, "size": 1, "words": "0 to 0"},
    ),
    Mutant(
        "a world of two whose ranks cannot talk is made, and fails in its first step",
        test_world.test_record_of_many_needs_a_group,
        world.World.__attrs_post_init__,
        "if self.size > 1 and self.connection.group is None:"
        " → if self.size > 2 and self.connection.group is None:",
    ),
    Mutant(
        "a world takes the name of a backend for its process group",
        test_world.test_group_is_a_process_group,
        connection.Connection.__init__,
        "not isinstance(group, dist.ProcessGroup) → not hasattr(group, '__class__')",
    ),
    Mutant(
        "a rank that hears of one that waited too looks for no culprit",
        test_roll_call.test_one_that_waited_too_is_not_all_that_is_heard,
        roll_call.RollCall.hear,
        "any(not h.is_waiting for h in heard.values()) → bool(heard)",
    ),
    Mutant(
        "a rank that waited, and raised because of it, is named for the culprit",
        test_roll_call.test_the_first_word_counts,
        roll_call.RollCall.tell,
        "if self._told is not None: → if self._told == how:",
    ),
    Mutant(
        "who fails between two updates is said to have failed in the first of them",
        test_roll_call.test_an_update_that_is_over_is_said_so,
        roll_call.RollCall.tell,
        '"after" if activity.is_between and not is_waiting else "at" → "at"',
    ),
    Mutant(
        "where rank 0 has gone with its store, ranks are blamed that had no say",
        test_roll_call.test_a_store_that_goes_blames_nobody_else,
        roll_call.RollCall._heard,
        "has_answered.is_set() and not has_gone.is_set() → has_answered.is_set()",
    ),
    Mutant(
        "where rank 0 has failed the others cannot tell what became of them",
        test_roll_call.test_who_keeps_the_store_stays_for_the_others,
        roll_call.RollCall.linger,
        "self._told.how != _LEFT → self._told.how == _LEFT",
        args={"how": "raised ValueError: boom"},
    ),
    Mutant(
        "a rank is blamed for what it raised in a world that is over",
        test_roll_call.test_a_world_hears_nothing_of_one_before_it,
        roll_call.RollCall.__init__,
        "self._store.delete_key(str(rank)) → str(rank)",
    ),
    Mutant(
        "a rank goes on while others are still being joined to it",
        test_roll_call.test_no_rank_goes_while_another_is_being_joined,
        roll_call.RollCall.begin,
        "self._await_all(_JOINED, timeout) → self._rank",
    ),
    Mutant(
        "rank 0 goes, with its store, while others wait there for the last one",
        test_roll_call.test_no_rank_goes_while_another_is_being_joined,
        roll_call.RollCall.begin,
        "if self._rank == 0: → if self._rank == self._size:",
    ),
    Mutant(
        "who was never joined to the others is not named",
        test_roll_call.test_who_is_never_joined_is_named,
        roll_call.list_unjoined,
        "if not said.check → if said.check",
    ),
]
