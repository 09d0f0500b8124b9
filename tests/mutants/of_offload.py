# SPDX-License-Identifier: Apache-2.0
"""Bugs in what lies in the host's memory, and is computed with on a device."""

from accelfn.base import lists
from accelfn.checkpoint import elastic
from accelfn.collectives import averages, parts, replicas
from accelfn.definition import layout
from accelfn.engine import shard_home
from accelfn.loop import memory, memory_use
from accelfn.step import skipping, sync_grads
from accelfn.structure import counts
from accelfn.transforms import clip, fsdp, precision
from tests.accelerator import test_offload, test_offloaded_bytes
from tests.mutants.mutant import Mutant
from tests.unit import test_wrap_fsdp

TRAINS = test_offload.test_what_is_offloaded_trains_what_is_not
APART = test_offload.test_states_on_the_host_do_not_meet
LOADS = test_offload.test_what_is_saved_on_the_host_goes_on_anywhere
MOVES = test_offload.test_a_state_goes_to_the_host_and_back
LOOKS = test_offload.test_what_is_on_the_host_is_looked_at_as_on_the_device
CASTS = test_offload.test_what_is_offloaded_is_computed_with_in_few_bits
FEW = test_offloaded_bytes.test_a_device_has_a_few_units_however_many_there_are

MUTANTS = [
    Mutant(
        "parts that are to be offloaded stay on the device",
        TRAINS,
        layout.Layout.of.__func__,
        'torch.device("cpu") if on_host else world.device → world.device',
    ),
    Mutant(
        "what an optimizer makes of a lone number beforehand stays on the host",
        TRAINS,
        counts.beside,
        'value.to("cpu" if on_host else params[name].device) → value',
    ),
    Mutant(
        "whole gradients of micro-batches are refused where parameters lie on the host",
        TRAINS,
        shard_home.ShardHome.put_gradients,
        "dtypes, self._splitter.device) → dtypes)",
    ),
    Mutant(
        "checksums of copies stay where what they are of is",
        TRAINS,
        replicas.sums_of,
        "each.to(readable(world.device)) → each",
    ),
    Mutant(
        "a number of the device is multiplied with what lies on the host",
        TRAINS,
        lists._beside,
        "number.cpu() if any(each.is_cpu for each in tensors) else number → number",
    ),
    Mutant(
        "the norm of what lies on the host is added before that of what does not",
        TRAINS,
        clip._norm_of_shards,
        "norm.to(computes_on(shards[0])) → norm",
    ),
    Mutant(
        "a part without room is given room, and loses its numbers",
        APART,
        shard_home.ShardHome._rehomed,
        ".copy_(part) → .zero_()",
    ),
    Mutant(
        "what is loaded on the host comes by way of the device",
        FEW,
        elastic.Source._resliced,
        "self.device if wanted is None else local(wanted).device → self.device",
    ),
    Mutant(
        "what is read to be cut comes by way of the device",
        FEW,
        elastic.Source._resliced,
        '"cpu", → self.device,',
    ),
    Mutant(
        "a setup that differs by where parts lie leaves them where they are",
        MOVES,
        layout.Layout._key,
        "self.cuts, self.mesh, self.device → self.cuts, self.mesh",
    ),
    Mutant(
        "wholes of what lies on the host are made on the host",
        LOOKS,
        parts._along,
        ".to(ranks.device) → .cpu()",
    ),
    Mutant(
        "the weight of an average stays on the device, and parts on the host",
        test_offload.test_copies_on_the_host_train_apart,
        averages._average_bucket_,
        "seen.to(same[0].device) → seen",
    ),
    Mutant(
        "autocast goes by where a parameter lies, and not by where it is computed with",
        CASTS,
        precision.autocast.loss,
        "param.device.type if is_plain else computes_on(param) → param.device.type",
        args={"cast": test_offload.CASTS[0], "fused": False},
    ),
    Mutant(
        "an update on the host is left out by a flag on the device",
        CASTS,
        skipping._left_to_device,
        'if "offloads" in update.state.setup.facts: → if False:',
        args={"cast": test_offload.CASTS[2], "fused": True},
    ),
    Mutant(
        "infinite gradients are looked for on the device of the first alone",
        test_offload.test_an_infinite_gradient_is_found_wherever_it_lies,
        lists.non_finite,
        "flag.maximum(non_finite(elsewhere).to(device)) if elsewhere else flag → flag",
        args={"name": "bias"},
    ),
    Mutant(
        "gradients of what a loss did not use are zeros on the host",
        test_offload.test_gradients_that_are_reduced_by_hand_come_to_the_host,
        sync_grads._zeros,
        "device=state.world.device → device=param.device",
        args={"engine": test_offload.on_host},
    ),
    Mutant(
        "nothing of a state is told to lie on the host",
        test_offloaded_bytes.test_bytes_are_told_by_where_they_are,
        memory_use._is_offloaded,
        "local(tensor).device.type != computes_on(tensor) → False",
    ),
    Mutant(
        "one rank on a device is told to offload, and does not",
        test_offloaded_bytes.test_one_rank_on_a_device_offloads_nothing_and_is_refused,
        fsdp.wrap_fsdp._check_offload,
        'if kind != "cpu" and not several: → if False:',
    ),
    Mutant(
        "ranks that cannot talk of what lies on the host find out later",
        test_offloaded_bytes.test_a_backend_that_knows_devices_alone_is_refused,
        fsdp.wrap_fsdp._check_offload,
        "if several and not world.connection.joins → if False and not world.connection.joins",
    ),
    Mutant(
        "ranks on the CPU are told to offload, and do not",
        test_wrap_fsdp.test_nothing_is_offloaded_from_the_cpu,
        fsdp.wrap_fsdp._check_offload,
        'if several and kind == "cpu": → if False:',
    ),
    Mutant(
        "an estimate does not tell what lies on the host",
        test_wrap_fsdp.test_what_lies_on_the_host_is_estimated,
        memory._on_host,
        'if "offloads" not in setup.facts or → if True or',
        args={"accumulate": "sharded", "names": 4},
    ),
    Mutant(
        "gradients that wait whole are said to lie on the host",
        test_wrap_fsdp.test_what_lies_on_the_host_is_estimated,
        memory._on_host,
        'each != "gradients" or not are_whole → True',
        args={"accumulate": "whole", "names": 3},
    ),
]
