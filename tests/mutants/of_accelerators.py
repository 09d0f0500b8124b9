# SPDX-License-Identifier: Apache-2.0
"""Bugs that show on an accelerator: waits, tensors elsewhere, draws from another generator."""

from accelfn.base import draws
from accelfn.checkpoint import background, fields, moving
from accelfn.collectives import packed
from accelfn.engine import buffers, elsewhere, engine
from accelfn.engine.module import float8, synced_norm
from accelfn.state import skips
from accelfn.structure import counts, skeleton
from accelfn.testing.simulation import ambient, exchange
from accelfn.transforms import precision, skip
from accelfn.world import device, meeting
from tests.accelerator import (
    test_device,
    test_goes_on,
    test_programs,
    test_streams,
    test_waits,
)
from tests.mutants.mutant import Mutant
from tests.unit import test_launch_function, test_model, test_precision, test_world

_FP16 = {"setup": test_waits.FP16}

MUTANTS = [
    Mutant(
        "the scale of a loss is read at each update",
        test_waits.test_no_steady_step_waits,
        precision.autocast.grads,
        "if not update.num_tried % LOOK_EVERY: → if True:",
        args=_FP16,
    ),
    Mutant(
        "how many updates were skipped is waited for at each",
        test_waits.test_no_steady_step_waits,
        skips.Skips.sent.__func__,
        "host.copy_(count, non_blocking=True) → host.copy_(count)",
        args=_FP16,
    ),
    Mutant(
        "batch statistics make the host decide what is skipped",
        test_waits.test_no_steady_step_waits,
        engine.Engine.can_skip,
        "self._buffers.keep_shapes(grads.buffers) → not grads.buffers",
        args=_FP16,
    ),
    Mutant(
        "batch statistics of all ranks are those of none to CUDA's kernel",
        test_programs.test_what_ranks_share_on_an_accelerator_is_what_they_share_on_the_cpu,
        synced_norm._Normed.backward,
        "mean.new_empty(0) → None",
    ),
    Mutant(
        "torchao casts for autocast on CUDA, by a call that torch warns of",
        test_precision.test_float8_casts_by_itself_on_cuda_too,
        float8._forward,
        'with torch.autocast("cuda", enabled=False): → if True:',
    ),
    Mutant(
        "how many updates were skipped is read before it has arrived",
        test_waits.test_what_is_too_much_in_a_row_is_found_without_waiting_for_it,
        skips.Skips.read,
        "self._arrived.synchronize() → pass",
    ),
    Mutant(
        "an asynchronous save writes what has not arrived",
        test_device.test_a_checkpoint_goes_on_on_any_device,
        background.Buffers.copies_of,
        "arrived.synchronize() → pass",
        args={"asynchronous": True},
    ),
    Mutant(
        "what an optimizer counts is loaded onto the device, and waited for",
        test_goes_on.test_what_goes_on_lies_where_it_lay,
        counts.beside,
        '"cpu" if on_host else params[name].device → params[name].device',
    ),
    Mutant(
        "a count that a fused kernel reads is loaded onto the host",
        test_goes_on.test_what_goes_on_lies_where_it_lay,
        counts.beside,
        'group.get("fused") or group.get("capturable") → group.get("capturable")',
    ),
    Mutant(
        "a count that is on the device by torch's default is loaded onto the host",
        test_goes_on.test_what_goes_on_lies_where_it_lay,
        counts.beside,
        "isinstance(part, ASGD) → False",
    ),
    Mutant(
        "what the caller has on the host is loaded onto the device",
        test_goes_on.test_what_goes_on_lies_where_it_lay,
        fields._with_objects,
        "return saved.to(current.device) → return saved",
    ),
    Mutant(
        "slots stay where they were when a state goes to a device",
        test_goes_on.test_what_goes_to_a_device_lies_as_if_it_had_begun_there,
        moving._moved,
        "leaf.to(device) if is_whole else leaf → leaf",
    ),
    Mutant(
        "a transform's count begins on the CPU",
        test_device.test_what_a_state_has_is_on_its_device,
        skip._none,
        'device=device → device="cpu"',
    ),
    Mutant(
        "what a block draws on a device comes from its own generator",
        test_device.test_draws_on_the_device_come_from_keys_and_leave_its_generator,
        draws.seeded.__init__,
        "accelerator.generators(device) → ()",
    ),
    Mutant(
        "simulated ranks draw the same on a device",
        test_device.test_each_simulated_rank_has_a_generator_of_its_own_on_the_device,
        ambient.seed_rank,
        "draws.generators(device) → [torch.default_generator]",
    ),
    Mutant(
        "the backward pass of a simulated rank on a device runs in a thread of the device",
        test_device.test_the_gradients_of_a_pass_come_from_the_device_s_own_thread,
        ambient.callers_modes,
        "mode=False → mode=True",
    ),
    Mutant(
        "what ranks on a device gave is added up before their streams have written it",
        test_streams.test_ranks_meet_from_streams_of_their_own,
        exchange.Exchange._carry_out,
        "accelerator.wait_for_all(chain.from_iterable(call.sends for call in calls)) → pass",
    ),
    Mutant(
        "ranks on a device take a sum before the stream that adds has written it",
        test_streams.test_ranks_meet_from_streams_of_their_own,
        exchange.Exchange._carry_out,
        "accelerator.wait_for_all(chain.from_iterable(meeting.results)) → pass",
    ),
    Mutant(
        "losses of a device run under the autocast of the CPU",
        test_programs.test_what_ranks_share_on_an_accelerator_is_what_they_share_on_the_cpu,
        precision.autocast.loss,
        'param.device.type if is_plain else computes_on(param) → "cpu"',
    ),
    Mutant(
        "a save behind the training's back waits for each tensor",
        test_waits.test_an_asynchronous_save_waits_once_a_device,
        background.Buffers.copies_of,
        "non_blocking=True → non_blocking=False",
    ),
    Mutant(
        "numbers that ranks add go to the device and are waited for",
        test_waits.test_ranks_of_an_evaluation_send_without_waiting,
        packed._in_a_row,
        "sent(torch.tensor(here, dtype=torch.float64), device)"
        " → torch.tensor(here, dtype=torch.float64).to(device)",
    ),
    Mutant(
        "a device behind the last is taken for one that is there",
        test_device.test_a_world_is_on_the_accelerator_that_torch_sees,
        device.chosen_device,
        "if index >= count: → if index > count:",
    ),
    Mutant(
        "a device without a generator is trained on",
        test_device.test_a_device_without_a_generator_is_refused,
        device.chosen_device,
        "accelerator.generators(chosen) → pass",
    ),
    Mutant(
        "batch statistics of an update that a device skips are kept",
        test_waits.test_what_is_too_much_in_a_row_is_found_without_waiting_for_it,
        buffers.Buffers.commit,
        "torch.where(skip != 0, old, value) → value",
    ),
    Mutant(
        "too many skips in a row are forgotten at the next good update",
        test_waits.test_what_is_too_much_in_a_row_is_found_without_waiting_for_it,
        skip.skip_nonfinite.after_update,
        "torch.where(count > self.max_consecutive, count, more) → more",
    ),
    Mutant(
        "any error of a loss is said to be one of devices",
        test_device.test_a_batch_on_another_device_is_named,
        elsewhere.refuse_elsewhere,
        "if not strange: → if False:",
    ),
    Mutant(
        "buffers of two names are two once they have moved",
        test_model.test_what_is_shared_is_shared_on_any_device,
        skeleton._moved,
        "first.setdefault(id(tensor), made) → made",
    ),
    Mutant(
        "torch_xla's device is one that is not there, and nobody says why",
        test_launch_function.test_what_no_rank_could_do,
        device.check_kind,
        'asked.type == "xla" → False',
        args={"given": {"device": "xla"}, "said": "torch_xla.*TorchTPU"},
    ),
    Mutant(
        "ranks on devices have no backend for what is on the CPU",
        test_world.test_a_device_that_no_backend_joins,
        meeting._backend,
        'f"cpu:gloo,{device.type}:{known[device.type]}" → known[device.type]',
    ),
]
