"""What holds for all tests."""

import os
import signal

import pytest
from hypothesis import settings

from vcluster.processes.forkserver import THREAD_VARIABLES

# Read when NumPy is loaded.  As many BLAS threads as cores in every worker and script are a crowd of threads that spin.
os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))

os.environ["VCLUSTER_HOST_HARDWARE"] = ""       # no test depends on how the user's machine was calibrated

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background so, and children inherit it: the tests of Ctrl-C could never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A few examples by default, many for `pytest -m slow` (cluster/test_many_examples.py).  A crowded machine is slow, not
# wrong; and what CI finds, it finds again.
EXAMPLES = int(os.environ.get("VCLUSTER_EXAMPLES", "25"))
settings.register_profile("here", deadline=None, max_examples=EXAMPLES)
settings.register_profile("ci", deadline=None, max_examples=EXAMPLES, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

SAMPLED = {
    "test_a_block_of_python_runs_and_prints_what_stands_below_it": 4,
    "test_a_device_that_heeds_nothing_is_replaced_and_not_the_cause": 2,
    "test_a_failure_releases_the_others": 2,
    "test_a_killed_device_does_not_change_the_numbers": 2,
    "test_a_layer_on_a_mesh_is_that_of_one_process_forward_and_backward": 3,
    "test_a_mixture_on_a_mesh_is_that_of_one_process_forward_and_backward": 2,
    "test_a_model_under_layouts_runs_as_interpreted_and_as_simulated": 8,
    "test_a_pipeline_is_one_program_three_ways": 20,
    "test_a_ring_does_not_lock_up": 2,
    "test_a_run_that_takes_longer_than_the_deadline_is_broken_off": 2,
    "test_a_script_needs_no_main_guard": 2,
    "test_a_sender_waits_while_its_tag_is_full_and_only_then": 2,
    "test_a_sharded_block_is_that_of_one_process_forward_and_backward": 3,
    "test_a_step_is_simulated_as_it_runs_and_the_same_when_it_is_folded": 3,
    "test_a_strategy_is_one_program_three_ways": 35,
    "test_an_exception_from_a_signal_handler_ends_the_run": 2,
    "test_any_layouts_are_one_program_three_ways_on_any_hardware": 21,
    "test_any_layouts_do": 2,
    "test_any_number_of_messages_to_the_host_lie_there_after_the_run": 2,
    "test_attention_is_that_of_one_process": 3,
    "test_attention_is_that_of_one_process_forward_and_backward": 3,
    "test_collectives_bytes_flops_and_memory_are_those_of_the_plan": 2,
    "test_ctrl_c_stops_the_run_and_the_cluster_goes_on": 2,
    "test_every_algorithm_gives_numpys_answer_and_moves_what_its_closed_form_says": 2,
    "test_every_collective_equals_numpy_on_the_gathered_input": 4,
    "test_every_mesh_and_schedule_trains_as_one_process_does": 3,
    "test_every_mesh_trains_as_one_process_does": 2,
    "test_every_rank_has_the_same_bits_after_an_all_reduce": 2,
    "test_every_repetition_gives_what_numpy_gives": 2,
    "test_every_schedule_gives_the_gradients_of_the_full_batch_by_its_own_actions": 3,
    "test_every_schedule_makes_the_loss_and_the_gradients": 3,
    "test_kill_9_of_the_host_leaves_no_process": 2,
    "test_large_collectives_equal_numpy_wherever_the_arrays_lie": 2,
    "test_members_that_call_different_things_are_told_what_each_called": 2,
    "test_messages_arrive_as_they_were_sent": 2,
    "test_no_way_receives_less_than_the_bound_by_which_ways_are_left_out": 3,
    "test_outputs_of_a_device_outlive_its_death": 2,
    "test_models_are_trained_in_stages": 3,
    "test_pending_operations_take_effect_in_order": 2,
    "test_random_layouts": 2,
    "test_replicas_add_up_to_the_batch": 2,
    "test_stages_are_spread_over_devices": 3,
    "test_stages_make_the_loss_and_the_gradients_of_the_whole": 3,
    "test_the_death_of_a_process_is_told_and_it_is_replaced": 3,
    "test_the_end_of_the_host_leaves_no_process": 2,
    "test_the_timeline_of_a_schedule_has_the_printed_bubbles": 2,
    "test_training_equals_the_full_batch_for_every_number_of_microbatches": 3,
    "test_twenty_clusters_leave_nothing_behind": 2,
    "test_uneven_sizes_are_counted_as_the_messages_that_moved": 2,
}
"""Of the parameters of these sweeps one in so many is for every day; the others are slow, so that `.ci/run` has all."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    seen = dict.fromkeys(SAMPLED, 0)
    for item in items:
        name = getattr(item, "originalname", None)
        if name in SAMPLED and item.get_closest_marker("slow") is None:
            if seen[name] % SAMPLED[name]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1
