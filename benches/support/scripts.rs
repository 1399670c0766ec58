//! The two scripts of a reentrant lock, to send them bare.

pub(crate) const ACQUIRE: &str = concat!(
    include_str!("../../lua/parts/owner.lua"),
    include_str!("../../lua/parts/claim.lua"),
    include_str!("../../lua/parts/raises.lua"),
    include_str!("../../lua/reentrant/acquire.lua"),
);
pub(crate) const RELEASE: &str = concat!(
    include_str!("../../lua/parts/fewer.lua"),
    include_str!("../../lua/parts/held.lua"),
    include_str!("../../lua/reentrant/release.lua"),
);
pub(crate) const OWNER: &str = "0a1b2c3d-0000-4000-8000-00000000000a:42";
