//! What every domain must keep, run over shm and tcp (plain, under TLS, and by engines without threads), sim, verbs where there is a device, and
//! efa by libfabric's providers `tcp` and `shm` where it is installed: each case is one function of a
//! [`Fabric`], which is two engines that can reach each other.

mod cases;
#[path = "../support/certificates.rs"]
#[allow(dead_code)] // other tests need more of it
mod certificates;
mod completions;
#[path = "../support/device.rs"]
#[allow(dead_code)] // other tests need more of it
mod device;
mod fabric;
mod faults;
mod groups;
mod losses;
mod messages;
#[path = "../support/provider.rs"]
mod provider;
mod signals;
mod two_processes;

use std::process::Command;
use std::time::Duration;

use fabric::{Fabric, Kind, Options};

/// One test per domain and case. A case takes the options it wants.
macro_rules! contract {
    ($($(#[$note:meta])* $case:ident($options:expr) in $module:ident;)*) => {
        mod shm { $(#[test] fn $case() { super::run(super::Kind::Shm, $options, super::$module::$case); })* }
        mod tcp { $(#[test] fn $case() { super::run(super::Kind::Tcp, $options, super::$module::$case); })* }
        mod tcp_tls { $(#[test] fn $case() { super::run(super::Kind::TcpTls, $options, super::$module::$case); })* }
        mod shm_driven { $(#[test] fn $case() { super::run(super::Kind::ShmDriven, $options, super::$module::$case); })* }
        mod tcp_driven { $(#[test] fn $case() { super::run(super::Kind::TcpDriven, $options, super::$module::$case); })* }
        mod verbs { $(#[test] fn $case() { super::run(super::Kind::Verbs, $options, super::$module::$case); })* }
        mod efa_tcp { $(#[test] fn $case() { super::run(super::Kind::EfaTcp, $options, super::$module::$case); })* }
        mod efa_shm { $(#[test] fn $case() { super::run_apart(stringify!($case)); })* }
        mod efa_shm_apart { $(#[test] #[ignore = "what the test of this name in `efa_shm` runs"] fn $case() { super::run(super::Kind::EfaShm, $options, super::$module::$case); })* }
        mod sim { $(#[test] fn $case() { super::run(super::Kind::Sim, $options, super::$module::$case); })* }
    };
}

/// Heartbeats at a pace that tests can wait for.
fn lively(interval_ms: u64, timeout_ms: u64) -> Options {
    Options {
        heartbeat_interval: Duration::from_millis(interval_ms),
        heartbeat_timeout: Duration::from_millis(timeout_ms),
        failover_grace: Duration::from_millis(200),
        ..Options::default()
    }
}

fn run(kind: Kind, options: Options, case: fn(&Fabric)) {
    let is_missing = match kind {
        Kind::Verbs | Kind::VerbsUd => device::named().is_none(),
        Kind::EfaTcp | Kind::EfaShm => fabric::provider_of(kind).is_none(),
        Kind::Shm | Kind::Tcp | Kind::TcpTls | Kind::ShmDriven | Kind::TcpDriven | Kind::Sim => {
            false
        }
    };
    if is_missing {
        return;
    }
    let fabric = Fabric::new(kind, options);
    case(&fabric);
    fabric.assert_domain();
}

/// Runs a case over efa by the provider `shm`, in a process of its own: endpoints of it that have met within one
/// process are never closed, and keep their memory for as long as it lives.
fn run_apart(case: &str) {
    if provider::shuffled(provider::SHM).is_none() {
        return;
    }
    let test = format!("efa_shm_apart::{case}");
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    let output = command.args(["--exact", &test, "--ignored", "--nocapture"]).output();
    let output = output.expect("this binary can be started");
    let (said, failed) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let is_run = said.contains("test result: ok. 1 passed");
    assert!(output.status.success() && is_run, "{}\n{said}\n{failed}", output.status);
}

contract! {
    a_write_lands_and_is_counted(super::Options::default()) in cases;
    a_count_is_reached_only_after_the_last_byte(super::Options::default()) in cases;
    pages_land_where_each_side_says(super::Options::default()) in cases;
    a_page_may_be_sent_to_many_places_and_no_pages_are_done(super::Options::default()) in cases;
    a_page_that_may_not_be_written_is_refused(super::Options::default()) in cases;
    counts_before_and_after_the_expectation_are_alike(super::Options::default()) in cases;
    a_cancelled_immediate_never_completes(super::Options::default()) in cases;
    an_expectation_ends_at_its_deadline(super::Options::default()) in cases;
    an_immediate_has_one_waiter(super::Options::default()) in cases;
    a_long_write_is_one_count(super::Options { slice_bytes: 4096, ..super::Options::default() }) in cases;
    an_empty_write_is_counted(super::Options::default()) in cases;
    what_may_not_be_written_is_refused_and_counted(super::Options::default()) in cases;
    nothing_lands_after_a_revocation(super::Options::default()) in cases;
    a_region_registered_later_can_be_written(super::Options::default()) in cases;
    an_old_descriptor_of_memory_that_is_registered_again_is_refused(super::Options::default()) in cases;
    messages_arrive_and_can_be_answered(super::Options::default()) in cases;
    wrong_bytes_are_corrupt_and_not_counted(super::Options { verify: true, ..super::Options::default() }) in cases;
    a_long_write_with_wrong_bytes_is_corrupt(super::Options { verify: true, slice_bytes: 4096, ..super::Options::default() }) in cases;
    a_corrupt_page_does_not_keep_the_others(super::Options { verify: true, ..super::Options::default() }) in cases;
    a_full_queue_says_so_and_recovers(super::Options { operations_max: 4, ..super::Options::default() }) in cases;
    no_more_expectations_wait_than_may(super::Options { operations_max: 4, ..super::Options::default() }) in cases;
    what_cannot_be_sent_is_not_accepted(super::Options::default()) in cases;
    a_drained_group_is_settled(super::Options { send_bytes_per_s_max: 4 << 20, ..super::Options::default() }) in faults;
    a_write_that_is_not_issued_in_time_never_lands(super::Options { send_bytes_per_s_max: 1 << 20, ..super::Options::default() }) in faults;
    nothing_lands_after_a_cut_off(super::Options { send_bytes_per_s_max: 16 << 20, ..super::Options::default() }) in faults;
    a_cut_off_holds_against_connections_that_are_not_made_yet(super::Options::default()) in faults;
    a_lost_peer_ends_what_was_meant_for_it(super::Options { send_bytes_per_s_max: 1 << 20, ..super::Options::default() }) in faults;
    a_former_incarnation_cannot_be_reached(super::Options::default()) in faults;
    a_revocation_waits_for_what_is_under_way(super::Options { slice_bytes: 8 << 20, ..super::Options::default() }) in faults;
    a_cut_off_waits_for_what_is_under_way(super::Options { slice_bytes: 8 << 20, ..super::Options::default() }) in faults;
    a_message_longer_than_the_receivers_buffers_is_refused(super::Options::default()) in messages;
    while_the_application_holds_every_buffer_messages_are_refused(super::Options { message_buffers: 4, ..super::Options::default() }) in messages;
    buffers_that_are_given_back_at_once_are_enough_for_any_burst(super::Options { message_buffers: 4, ..super::Options::default() }) in messages;
    a_wanted_peer_that_falls_silent_is_lost(super::lively(20, 60)) in losses;
    a_wanted_peer_that_was_never_used_is_lost_too(super::lively(20, 10_000)) in losses;
    a_wanted_peer_that_lives_is_kept(super::lively(20, 2_000)) in losses;
    a_peer_that_nobody_wants_may_be_silent(super::lively(10, 30)) in losses;
    a_loss_says_why(super::Options::default()) in losses;
    every_operation_is_told_by_callback_flag_and_future(super::Options::default()) in completions;
    a_scatter_gives_each_member_its_slice(super::Options::default()) in groups;
    a_scatter_may_name_some_members_often_and_others_never(super::Options::default()) in groups;
    a_long_slice_of_a_scatter_is_one_count(super::Options { slice_bytes: 4096, ..super::Options::default() }) in groups;
    a_barrier_is_counted_at_every_member_and_moves_nothing(super::Options::default()) in groups;
    everybody_passes_a_barrier_that_everybody_has_reached(super::Options::default()) in groups;
    a_lost_member_fails_its_own_part_only(super::Options::default()) in groups;
    a_refused_slice_fails_its_own_part_only(super::Options::default()) in groups;
    a_scatter_that_cannot_be_sent_is_not_accepted(super::Options { operations_max: 64, ..super::Options::default() }) in groups;
    a_scatter_is_drained_with_its_group(super::Options { send_bytes_per_s_max: 1 << 20, ..super::Options::default() }) in groups;
    a_signal_is_seen_only_behind_its_data(super::Options::default()) in signals;
    whoever_asks_for_the_cards_order_gets_it_or_is_told_of_the_counter(super::Options::default()) in signals;
    a_signal_is_behind_every_slice_of_its_data(super::Options { slice_bytes: 4096, ..super::Options::default() }) in signals;
    a_transfer_of_which_a_put_is_refused_has_no_signal(super::Options::default()) in signals;
    a_signal_that_may_not_be_stored_is_refused(super::Options::default()) in signals;
    a_batch_of_which_a_peer_is_lost_goes_on_with_the_others(super::Options::default()) in signals;
    a_drained_batch_signals_nothing_afterwards(super::Options { send_bytes_per_s_max: 1 << 20, slice_bytes: 4096, ..super::Options::default() }) in signals;
    a_batch_ends_by_its_deadline(super::Options { send_bytes_per_s_max: 1 << 20, slice_bytes: 4096, ..super::Options::default() }) in signals;
    what_cannot_be_put_with_a_signal_is_not_accepted(super::Options { operations_max: 100, ..super::Options::default() }) in signals;
    a_count_that_is_reached_is_mirrored(super::Options::default()) in signals;
    puts_and_other_writes_do_not_hold_up_each_other(super::Options::default()) in signals;
    the_throttle_paces(super::Options { send_bytes_per_s_max: 8 << 20, ..super::Options::default() }) in faults;
}

/// Those in which connections are made and lost, once more where cards shake hands by datagrams.
macro_rules! by_datagrams {
    ($($case:ident($options:expr) in $module:ident;)*) => {
        mod verbs_ud { $(#[test] fn $case() { super::run(super::Kind::VerbsUd, $options, super::$module::$case); })* }
    };
}

by_datagrams! {
    a_write_lands_and_is_counted(super::Options::default()) in cases;
    messages_arrive_and_can_be_answered(super::Options::default()) in cases;
    nothing_lands_after_a_cut_off(super::Options { send_bytes_per_s_max: 16 << 20, ..super::Options::default() }) in faults;
    a_lost_peer_ends_what_was_meant_for_it(super::Options { send_bytes_per_s_max: 1 << 20, ..super::Options::default() }) in faults;
    a_former_incarnation_cannot_be_reached(super::Options::default()) in faults;
}
