//! Invalid names.

use nestlock_macros::locked;

struct Locks {
    id: u64,
}

impl Locks {
    #[locked("order:{self.id}:{}", self.id, client = self)]
    async fn field(&self) -> Result<(), ()> {
        Ok(())
    }
}

#[locked("order:{o.id:03}", client = o)]
async fn field_of_an_argument(_o: Locks) -> Result<(), ()> {
    Ok(())
}

#[locked("order:{f(1)}", client = Locks { id: 1 })]
async fn call() -> Result<(), ()> {
    Ok(())
}

#[locked(client = Locks { id: 1 }, "order")]
async fn late() -> Result<(), ()> {
    Ok(())
}

#[locked("order:{}", client = Locks { id: 1 }, 7)]
async fn late_value() -> Result<(), ()> {
    Ok(())
}

mod stub;

#[locked("order:{}", client = stub::nestlock::LockClient, crate = stub)]
async fn no_value() -> Result<(), stub::locked::LockedError> {
    Ok(())
}

fn main() {}
