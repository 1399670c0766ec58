//! Errors that the compiler finds after the expansion.

use nestlock_macros::locked;

mod stub;
use stub::nestlock::LockClient;

struct Failure;

#[locked("name", client = LockClient, crate = stub)]
async fn no_way_from_locked_error() -> Result<(), Failure> {
    Ok(())
}

#[locked("name", client = "redis://", crate = stub)]
async fn no_client() -> Result<(), stub::locked::LockedError> {
    Ok(())
}

#[locked("name", client = LockClient, crate = stub)]
async fn no_result() -> Option<()> {
    None
}

#[locked("name", client = LockClient, wait = 2 + 3, crate = stub)]
async fn no_duration() -> Result<(), stub::locked::LockedError> {
    Ok(())
}

#[locked("order:{order}", client = LockClient, crate = stub)]
async fn unknown_variable() -> Result<(), stub::locked::LockedError> {
    Ok(())
}

#[locked("name", client = LockClient, crate = stub)]
async fn wrong_body() -> Result<u8, stub::locked::LockedError> {
    let text: Result<&str, stub::locked::LockedError> = Ok("text");
    text
}

fn main() {}
