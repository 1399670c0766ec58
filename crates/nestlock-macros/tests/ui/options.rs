//! Invalid options.

use nestlock_macros::locked;

struct Locks;

#[locked("name")]
async fn no_client() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = Locks, waits = "2s")]
async fn unknown() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = Locks, wait = "2s", wait = "3s")]
async fn twice() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = Locks, kind = "fare")]
async fn kind() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = Locks, kind = fair)]
async fn kind_without_quotes() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = Locks, wait = "2 seconds")]
async fn unit() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = Locks, wait = 2)]
async fn no_unit() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = Locks, lease = "9ms")]
async fn too_short() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = Locks, wait = "87601h")]
async fn too_long() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = Locks, wait = "18446744073709551615h")]
async fn far_too_long() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = Locks, tries = 2)]
async fn not_red() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = [Locks], kind = "red", tries = 0)]
async fn no_try() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = [Locks], kind = "red", delay = "2ms..1ms")]
async fn backwards() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = [Locks], kind = "red", drift = 0.6)]
async fn drift() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client Locks)]
async fn no_equals_sign() -> Result<(), ()> {
    Ok(())
}

fn main() {}
