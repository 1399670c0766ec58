//! A slot moves, step by step.

use std::time::Instant;

use super::SpawnedCluster;
use crate::spawned::{
    SpawnError, SpawnedServer,
    guard::{PATIENCE, PAUSE},
    link::Answer,
    link_to,
};

/// Keys that go at once.
const BATCH: &str = "100";

/// A slot on its way from one master to another: [`SpawnedCluster::begin_migration`].
///
/// Both have been told, and no key has moved. The old master answers for what it still has, and `ASK` for other keys of
/// the slot; `TRYAGAIN` is what a command with several keys meets, some of which are away. [`Migration::finish`] ends it;
/// without that, the slot stays between the two.
///
/// ```
/// # use nestlock_embedded::{SpawnedCluster, SpawnError};
/// # fn main() -> Result<(), SpawnError> {
/// let cluster = SpawnedCluster::start(2, 0)?;
/// let migration = cluster.begin_migration(SpawnedCluster::slot_of("{user:7}:cart"), &cluster.nodes()[1])?;
/// migration.move_key("{user:7}:cart")?; // the other keys of {user:7} are still where they were
/// migration.finish()?;
/// # Ok(())
/// # }
/// ```
#[must_use = "the slot stays between two masters until this is finished"]
#[derive(Debug)]
pub struct Migration<'a> {
    cluster: &'a SpawnedCluster,
    slot: u16,
    from: &'a SpawnedServer,
    to: &'a SpawnedServer,
}

impl<'a> Migration<'a> {
    pub(super) fn begin(
        cluster: &'a SpawnedCluster,
        slot: u16,
        from: &'a SpawnedServer,
        to: &'a SpawnedServer,
    ) -> Result<Self, SpawnError> {
        link_to(to)?.call(&format!("CLUSTER SETSLOT {slot} IMPORTING {}", cluster.id(from)?))?;
        link_to(from)?.call(&format!("CLUSTER SETSLOT {slot} MIGRATING {}", cluster.id(to)?))?;
        Ok(Self { cluster, slot, from, to })
    }

    /// The slot.
    #[must_use]
    pub fn slot(&self) -> u16 {
        self.slot
    }

    /// The master that has had the slot.
    #[must_use]
    pub fn from(&self) -> &'a SpawnedServer {
        self.from
    }

    /// The master that gets the slot.
    #[must_use]
    pub fn to(&self) -> &'a SpawnedServer {
        self.to
    }

    /// Moves one key; `false` if the old master does not have it.
    ///
    /// # Errors
    /// [`SpawnError::Refused`]: the new master has such a key already. [`SpawnError::Unreachable`].
    pub fn move_key(&self, key: impl AsRef<[u8]>) -> Result<bool, SpawnError> {
        self.send(&[key.as_ref()])
    }

    /// Moves all keys that the old master has, and returns how many these were.
    ///
    /// # Errors
    /// Those of [`Migration::move_key`]; [`SpawnError::Unsettled`] if there are always more.
    pub fn move_keys(&self) -> Result<usize, SpawnError> {
        let (mut from, mut moved, start) = (link_to(self.from)?, 0, Instant::now());
        loop {
            let keys = from.call(&format!("CLUSTER GETKEYSINSLOT {} {BATCH}", self.slot))?.items();
            let keys = keys.iter().filter_map(|key| if let Answer::Text(key) = key { Some(&**key) } else { None });
            let keys: Vec<&[u8]> = keys.collect();
            if keys.is_empty() {
                return Ok(moved);
            }
            if start.elapsed() > PATIENCE {
                return Err(self.cluster.gives_up("all keys move", "there are always more"));
            }
            self.send(&keys)?;
            moved += keys.len();
        }
    }

    fn send(&self, keys: &[&[u8]]) -> Result<bool, SpawnError> {
        let port = self.to.addr().port().to_string();
        let command = ["MIGRATE", "127.0.0.1", &port, "", "0", "10000", "KEYS"];
        let words: Vec<&[u8]> = command.iter().map(|word| word.as_bytes()).chain(keys.iter().copied()).collect();
        Ok(link_to(self.from)?.call_words(&words)?.text() == "OK")
    }

    /// Moves the keys that are left, gives the slot to the new master, and waits until all nodes that answer agree.
    ///
    /// That wait, some 10 ms, matters: where a slot goes back before, two masters can name each other for long. So they can
    /// where the next master does not know this one's new epoch yet: it would take its own for the highest, and not raise it.
    ///
    /// # Errors
    /// Those of [`Migration::move_keys`]; [`SpawnError::Unsettled`] if the nodes do not agree within 30 s, for instance
    /// since another node has taken over from the new master.
    pub fn finish(self) -> Result<(), SpawnError> {
        let order = format!("CLUSTER SETSLOT {} NODE {}", self.slot, self.cluster.id(self.to)?);
        self.move_keys()?;
        link_to(self.to)?.call(&order)?;
        link_to(self.from)?.call(&order)?;
        for node in self.cluster.nodes() {
            match link_to(node).and_then(|mut link| link.call(&order)) {
                // it is away, or a replica, which follows its master
                Ok(_) | Err(SpawnError::Unreachable { .. } | SpawnError::Refused { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        self.cluster.until(PAUSE, &format!("all agree on slot {}", self.slot), || self.disagreement())
    }

    fn disagreement(&self) -> Option<String> {
        let (to, views) = (self.cluster.id(self.to).ok()?, self.cluster.views());
        let own = views.here().find(|(_, id, _)| *id == to).and_then(|(_, _, view)| Some(view.myself()?.epoch));
        let lags = views.here().find(|(_, _, view)| {
            let moves = view.myself().is_some_and(|node| node.moving.contains(&self.slot));
            moves || view.owner(self.slot).is_none_or(|owner| owner.id != to || Some(owner.epoch) != own)
        });
        lags.map(|(node, _, _)| format!("{} does not", node.addr()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_over_when_all_say_so() {
        let cluster = SpawnedCluster::start(2, 0).unwrap();
        let to = &cluster.nodes()[1];
        let migration = cluster.begin_migration(7, to).unwrap();
        assert_eq!(migration.disagreement(), Some(format!("{} does not", cluster.addrs()[0])));
        // one is not enough, also if it is the new master
        link_to(to).unwrap().call(&format!("CLUSTER SETSLOT 7 NODE {}", cluster.id(to).unwrap())).unwrap();
        let views = cluster.views();
        assert_eq!(views.owner(7), Some(cluster.id(to).unwrap()));
        migration.finish().unwrap();
        let over = Migration { cluster: &cluster, slot: 7, from: &cluster.nodes()[0], to };
        assert_eq!(over.disagreement(), None);
        assert!(cluster.views().unsettled().is_none());
    }
}
