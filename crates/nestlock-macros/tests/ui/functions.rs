//! Functions that cannot be locked.

use nestlock_macros::locked;

struct Locks;

#[locked("name", client = Locks)]
fn not_async() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = Locks)]
fn not_boxed_by_us() -> Box<Result<(), ()>> {
    Box::new(Ok(()))
}

#[locked("name", client = Locks)]
const fn constant() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = Locks)]
extern "C" fn foreign() -> Result<(), ()> {
    Ok(())
}

#[locked("name", client = Locks)]
async fn nothing() {}

#[locked("name", client = Locks)]
async fn opaque() -> Result<Vec<impl Iterator<Item = u8>>, ()> {
    Ok(vec![0..1])
}

trait Jobs {
    #[locked("name", client = Locks)]
    async fn without_a_body(&self) -> Result<(), ()>;
}

impl Locks {
    #[locked(client = self)]
    async fn without_a_name(&self) -> Result<(), ()> {
        Ok(())
    }
}

#[locked("name", client = Locks)]
struct NoFunction;

fn main() {}
