# SPDX-License-Identifier: Apache-2.0
"""How many examples CI draws for a property: what its bugs need, and what it can pay.

A law for which nothing is said here has those of the profile. Where each costs a hundredth
of a second or more, CI draws two times what the law's mutants needed, and 20 at least; where
a bug is rare and each is cheap, CI draws more. `nox -s mutants` hunts with these numbers, and
`nox -s laws` draws 2,000 for every law.
"""

from collections.abc import Callable
from typing import Any

from hypothesis import settings

_NUMBERS = {
    15: (
        "laws.test_callers::test_whatever_has_its_name_is_on_the_disk",
        "laws.test_draws::test_each_part_tells_apart_or_changes_nothing",
    ),
    20: (
        "laws.test_shard_histories::test_states_do_not_meet",
        "laws.test_context::test_what_trained_on_parts_goes_on_anywhere",
        "laws.test_context::test_each_token_counts_once",
        "laws.test_pairs::test_values_flow_from_the_left",
        "laws.test_pairs::test_wrappers_nest",
        "laws.test_callers::test_whatever_is_cut_off_is_there_whole_or_not",
        "laws.test_callers::test_whatever_looks_at_buffers_sees_those_of_rank_0",
        "laws.test_checked::test_checking_changes_nothing",
        "laws.test_collectives::test_texts_arrive_whole",
        "laws.test_compiling::test_compiling_changes_nothing",
        "laws.test_composition::test_slots_are_conserved",
        "laws.test_compression::test_a_cut_run_goes_on_with_what_was_left_out",
        "laws.test_compression::test_a_skipped_update_leaves_what_was_left_out",
        "laws.test_compression::test_bytes_go_down_and_only_the_last_micro_batch_sends",
        "laws.test_compression::test_full_rank_is_the_plain_mean",
        "laws.test_compression::test_nothing_is_lost_where_nothing_counts",
        "laws.test_compression::test_other_ranks_take_over_what_was_left_out",
        "laws.test_compression::test_what_16_bits_can_hold_is_exact",
        "laws.test_compression::test_what_is_left_out_is_not_lost",
        "laws.test_counts::test_a_count_of_samples_is_the_mean",
        "laws.test_counts::test_several_denominators_are_those_of_the_whole_update",
        "laws.test_ddp::test_buckets_change_nothing",
        "laws.test_ddp::test_fused_optimizers_divide_alike",
        "laws.test_ddp::test_one_reduction_an_update",
        "laws.test_dividing::test_sync_grads_gives_what_ddp_gives",
        "laws.test_dtypes::test_any_dtype_and_shape",
        "laws.test_dtypes::test_ranks_are_averaged_by_any_weight",
        "laws.test_equivalence::test_accumulating_by_hand",
        "laws.test_equivalence::test_evaluation_sees_each_sample_once",
        "laws.test_equivalence::test_the_unit_of_weights_does_not_matter",
        "laws.test_equivalence::test_three_ranks",
        "laws.test_equivalence::test_what_would_drift_is_refused",
        "laws.test_exchanging::test_ranks_go_together_again_when_they_agree",
        "laws.test_exchanging::test_replicas_are_checked_at_multiples",
        "laws.test_exchanging::test_what_is_averaged_stays",
        "laws.test_exchanging::test_what_is_neutral_comes_and_goes",
        "laws.test_export::test_what_is_exported_is_imported",
        "laws.test_failing::test_a_state_that_was_updated_says_so",
        "laws.test_faults::test_a_failure_ends_all_and_names_the_culprit",
        "laws.test_faults::test_a_save_in_which_a_rank_fails_leaves_nothing_or_all",
        "laws.test_faults::test_no_rank_holds_half_a_step",
        "laws.test_fully_sharded::test_a_step_is_that_of_the_tutorial",
        "laws.test_gradients::test_means_are_reduced_by_weight",
        "laws.test_gathering::test_lockstep_trains_on_the_mean_over_all",
        "laws.test_gathering::test_uneven_data_need_no_join",
        "laws.test_gathering::test_what_is_left_early_harms_nothing",
        "laws.test_given::test_a_model_that_was_given_raises",
        "laws.test_given::test_a_refused_model_is_as_it_was",
        "laws.test_given::test_what_was_given_keeps_nothing_alive",
        "laws.test_in_backward::test_over_ranks_it_is_the_plain_update",
        "laws.test_in_backward::test_saved_in_one_setup_it_goes_on_in_the_other",
        "laws.test_interleaving::test_any_order_of_ranks_gives_the_same",
        "laws.test_local_sgd::test_a_last_average_is_owed",
        "laws.test_local_sgd::test_every_update_is_ddp_for_sgd",
        "laws.test_local_sgd::test_it_communicates_when_it_says",
        "laws.test_local_sgd::test_what_ema_keeps_is_evaluated_alike",
        "laws.test_memory::test_an_estimate_is_exact",
        "laws.test_optimizers::test_a_checkpoint_is_of_no_trained_set",
        "laws.test_optimizers::test_parts_are_saved_and_copied",
        "laws.test_optimizers::test_schedule_free_is_its_own_modes",
        "laws.test_optimizers::test_schedule_free_over_ranks_and_cuts",
        "laws.test_orders::test_every_order_is_that_of_one_process",
        "laws.test_orders::test_random_samplers_are_functions_of_the_epoch",
        "laws.test_padded_text::test_shares_of_padded_text_train_what_the_whole_batch_trains",
        "laws.test_parameters::test_tied_is_used_twice",
        "laws.test_purity::test_the_same_step_twice_on_ranks",
        "laws.test_randomness::test_ranks_steps_and_micro_batches_draw_apart",
        "laws.test_randomness::test_seeds_and_names_draw_apart",
        "laws.test_ranks_data::test_a_run_goes_on_with_other_numbers_of_ranks",
        "laws.test_ranks_data::test_augmentation_does_not_depend_on_the_world",
        "laws.test_ranks_data::test_draws_are_of_a_place",
        "laws.test_reducing::test_a_users_sum_in_16_bits",
        "laws.test_reducing::test_a_users_sum_is_that_of_all_ranks",
        "laws.test_reducing::test_a_weight_of_one_rank_is_refused",
        "laws.test_reducing::test_draws_in_a_reduce_are_shared",
        "laws.test_replicas::test_a_check_changes_nothing",
        "laws.test_replicas::test_the_next_check_finds_one_element_of_one_rank",
        "laws.test_resume::test_another_number_of_ranks_goes_on",
        "laws.test_resume::test_cut_and_resumed_runs_are_uninterrupted_ones",
        "laws.test_resume::test_ranks_resume_bitwise",
        "laws.test_resume::test_ranks_that_differ_are_averaged",
        "laws.test_resume::test_sums_are_taken_alike_after_a_cut",
        "laws.test_running::test_a_run_that_is_cut_goes_on",
        "laws.test_running::test_ranks_end_together",
        "laws.test_skipping::test_a_device_that_skips_by_itself_does_as_the_host",
        "laws.test_skipping::test_a_scale_that_is_a_power_of_2_changes_no_bit",
        "laws.test_skipping::test_a_skipped_update_is_one_that_was_not",
        "laws.test_skipping::test_looking_changes_nothing",
        "laws.test_skipping::test_one_bad_element_on_one_rank_skips_that_update_on_all",
        "laws.test_skipping::test_too_many_in_a_row_raise_on_every_rank",
        "laws.test_storage::test_a_save_that_is_cut_off_leaves_nothing_or_all",
        "laws.test_storage::test_what_is_loaded_is_saved_alike",
        "laws.test_store::test_all_ranks_leave_after_the_same_update",
        "laws.test_streams::test_a_stream_comes_once",
        "laws.test_streams::test_a_stream_goes_on_where_it_was_cut",
        "laws.test_streams::test_a_stream_is_read_as_if_by_index",
        "laws.test_streams::test_dispatched_is_as_if_each_read",
        "laws.test_streams::test_ranks_with_unequal_streams_see_each_sample_once",
        "laws.test_streams::test_unequal_streams_go_on_where_they_were_cut",
        "laws.test_threads::test_a_second_thread_is_refused",
        "laws.test_threads::test_one_thread_may_draw_within_its_draws",
        "laws.test_sync_batchnorm::test_a_micro_batch_is_that_of_all_ranks",
        "laws.test_sync_batchnorm::test_it_costs_two_collectives_a_layer",
        "laws.test_sync_batchnorm::test_ranks_normalise_as_one",
        "laws.test_sync_batchnorm::test_running_statistics_agree",
        "laws.test_updates::test_the_norm_is_of_the_whole_gradient",
        "unit.test_checkpoint::test_a_save_is_due_when_its_period_is_over",
        "unit.test_checkpoint::test_what_is_kept_of_any_saves",
        "unit.test_transforms_over_ranks::test_gradients_are_left_on_a_rank_under_accumulate",
    ),
    25: (
        "laws.test_layouts::test_another_setup_and_back_changes_nothing",
        "laws.test_layouts::test_the_kit_compares_what_is_split",
        "laws.test_layouts::test_what_is_saved_in_one_layout_is_loaded_in_another",
        "laws.test_memory::test_an_estimate_of_parts_is_exact",
        "laws.test_really_sharded::test_each_rank_has_its_share_and_no_more",
        "laws.test_really_sharded::test_what_crosses_the_ranks_is_units",
        "laws.test_shards::test_an_update_is_skipped_on_all_ranks_or_none",
        "laws.test_shards::test_parts_train_what_the_whole_does",
        "ranks.test_splitting::test_split_models_train_as_on_gloo",
    ),
    30: (
        "laws.test_compression::test_a_total_overflows_no_sooner_than_its_mean",
        "laws.test_ddp::test_gradients_are_the_holders_own",
        "laws.test_random_setups::test_it_trains_what_a_plain_loop_trains",
        "laws.test_reducing::test_sums_that_differ_by_rank_are_refused",
        "laws.test_store::test_a_save_that_fails_fails_on_all_ranks",
        "laws.test_streams::test_elastic_streams_come_once",
    ),
    45: (
        "laws.test_running::test_it_is_the_loop",
        "laws.test_batch_size::test_the_largest_that_fits_on_all_ranks_is_found",
        "laws.test_definitions::test_definitions_that_differ_are_refused",
        "laws.test_exchanging::test_a_period_begins_where_it_was_put_on",
        "laws.test_gradients::test_a_stand_in_is_in_no_buffer",
        "laws.test_failing::test_a_failed_call_costs_itself",
        "laws.test_failing::test_gradients_of_a_failed_update",
        "laws.test_faults::test_a_step_that_raised_can_be_tried_again",
        "laws.test_purity::test_forks_do_not_meet",
    ),
    150: (
        "laws.test_axes::test_calls_along_axes_are_of_the_ranks_that_differ_in_them",
        "laws.test_axes::test_parts_of_a_world_divide_it",
        "laws.test_same_data::test_ranks_with_another_order_are_told",
        "laws.test_dividing::test_the_weight_is_not_rounded",
        "laws.test_ranks_data::test_elastic_runs_see_each_sample_once",
        "laws.test_streams::test_saving_and_peeking_change_nothing",
        "laws.test_updates::test_ema_closed_form",
        "laws.test_collectives::test_all_reduce_is_the_sum",
        "laws.test_compression::test_16_bits_round_each_rank_once_and_the_sum",
        "laws.test_equivalence::test_adding_what_is_a_mean_already",
        "laws.test_equivalence::test_ranks_and_micro_batches_are_neutral_up_to_rounding",
        "laws.test_data_calls::test_any_data_are_read_as_a_list_is_cut",
        "laws.test_gathering::test_split_gives_all_and_changes_nothing",
        "laws.test_launch_calls::test_a_launch_is_what_its_settings_say",
        "laws.test_launch_calls::test_a_rank_is_where_its_launcher_says",
        "laws.test_launch_calls::test_the_cause_of_a_failure_comes_first",
        "laws.test_load_calls::test_a_partial_load_is_what_was_asked_for",
        "laws.test_optimizers::test_equal_parts_are_one_optimizer",
        "laws.test_orders::test_an_index_alone_is_the_one_in_sequence",
        "laws.test_orders::test_buckets_are_sorted_windows",
        "laws.test_orders::test_budgets_are_kept_and_used",
        "laws.test_parameters::test_layouts_change_nothing",
        "laws.test_purity::test_parameters_keep_their_dtype",
        "laws.test_resume::test_saving_changes_nothing",
        "laws.test_storage::test_any_change_of_a_file_is_noticed",
    ),
    200: ("laws.test_random_steps::test_any_step_is_the_loop_by_hand",),
}
NUMBERS = {name: number for number, names in _NUMBERS.items() for name in names}
"""By module and name of the test."""


def at_night() -> bool:
    """Whether there is time for what CI takes samples of: `nox -s laws` has it."""
    return settings.default.max_examples > settings.get_profile("ci").max_examples


def budgeted(test: Callable[..., Any]) -> None:
    """Give a test its number of examples, where those of the profile are CI's.

    Settings are bound where a test is decorated, so this is said to the test itself.
    """
    name = f"{test.__module__.removeprefix('tests.')}::{test.__name__}"
    ci = settings.get_profile("ci").max_examples
    already = hasattr(test, "_hypothesis_internal_settings_applied")
    if name in NUMBERS and settings.default.max_examples == ci and not already:
        settings(settings.default, max_examples=NUMBERS[name])(test)
