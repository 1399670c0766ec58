//! How nestlock fails: the error that ends it, and the exit code for it.

use std::{error::Error, fmt};

/// Exit code for wrong use. clap's own code could be taken for that of the command.
pub(crate) const USAGE: u8 = 64;
/// Exit code if nestlock itself failed.
pub(crate) const FAILED: u8 = 125;

/// The error that ends the program. It is printed, and the exit code is [`FAILED`] or [`USAGE`].
pub(crate) type Failure = Box<dyn Error>;

/// A usage error: the request makes no sense, and the tool is not at fault.
#[derive(Debug)]
pub(crate) struct Unusable(pub(crate) String);

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Unusable {}

/// Returns whether an error is wrong use, whichever server it is for: the tool is not at fault.
pub(crate) fn is_wrong_use(error: &Failure) -> bool {
    use nestlock::Error::{InvalidConfig, InvalidLease, InvalidName, InvalidNote, InvalidOwner};
    let said = error.downcast_ref::<nestlock::Error>();
    error.is::<Unusable>()
        || said.is_some_and(|error| {
            matches!(
                error,
                InvalidConfig { .. }
                    | InvalidLease { .. }
                    | InvalidName { .. }
                    | InvalidNote { .. }
                    | InvalidOwner { .. }
            )
        })
}
