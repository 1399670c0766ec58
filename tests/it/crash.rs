//! Processes that die, hang or come back.
#[test]
fn a_worker_process_does_as_it_is_told() {
    if crate::support::child::is_worker() {
        crate::support::child::serve();
    }
}
