//! The migration of a slot, step by step.

use std::time::Instant;

use super::{SpawnedCluster, invalid, not_ours, view::View};
use crate::spawned::{
    SpawnError, SpawnedServer,
    guard::{PATIENCE, PAUSE},
    link::Answer,
    link_to,
};

/// How many keys are moved by one command.
const BATCH: &str = "100";

/// A slot that is migrating from one master to another: see [`SpawnedCluster::begin_migration`].
///
/// At the start, both masters know of the migration, and no key has moved. The old master serves
/// the keys that it still has, and replies with `ASK` for all other keys of the slot. It replies
/// with `TRYAGAIN` if only some keys of a command have moved. [`Migration::finish`] completes the
/// migration; without it, the slot stays between the two masters.
///
/// ```
/// # use nestlock_embedded::{SpawnedCluster, SpawnError};
/// # fn main() -> Result<(), SpawnError> {
/// let cluster = SpawnedCluster::start(2, 0)?;
/// let slot = SpawnedCluster::slot_of("{user:7}:cart");
/// let migration = cluster.begin_migration(slot, &cluster.nodes()[1])?;
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

impl SpawnedCluster {
    /// Moves a slot with its keys to another master, and waits until all nodes agree. Does nothing
    /// if that master owns the slot already.
    ///
    /// # Errors
    /// Those of [`SpawnedCluster::begin_migration`], [`Migration::move_keys`] and
    /// [`Migration::finish`].
    pub fn migrate(&self, slot: u16, to: &SpawnedServer) -> Result<(), SpawnError> {
        if self.master_of(slot)?.addr() == to.addr() {
            return Ok(());
        }
        self.begin_migration(slot, to)?.finish()
    }

    /// Begins to move a slot to another master, but moves no key. A test can then observe the
    /// states in between.
    ///
    /// # Errors
    /// [`SpawnError::Invalid`] if there is no such slot, or `to` is not a master of this cluster,
    /// or owns the slot already. All other errors: a node does not reply, or refuses a command.
    pub fn begin_migration<'a>(
        &'a self,
        slot: u16,
        to: &SpawnedServer,
    ) -> Result<Migration<'a>, SpawnError> {
        let (from, id) = (self.master_of(slot)?, self.id(to)?);
        let Some(to) = self.by_id(id) else {
            return Err(not_ours(to));
        };
        if from.addr() == to.addr() {
            return Err(invalid(format!("{} already owns slot {slot}", to.addr())));
        }
        if View::of(to)?
            .myself()
            .is_none_or(|node| node.master.is_some())
        {
            return Err(invalid(format!("{} is not a master", to.addr())));
        }
        Migration::begin(self, slot, from, to)
    }
}

impl<'a> Migration<'a> {
    fn begin(
        cluster: &'a SpawnedCluster,
        slot: u16,
        from: &'a SpawnedServer,
        to: &'a SpawnedServer,
    ) -> Result<Self, SpawnError> {
        link_to(to)?.call(&format!(
            "CLUSTER SETSLOT {slot} IMPORTING {}",
            cluster.id(from)?
        ))?;
        link_to(from)?.call(&format!(
            "CLUSTER SETSLOT {slot} MIGRATING {}",
            cluster.id(to)?
        ))?;
        Ok(Self {
            cluster,
            slot,
            from,
            to,
        })
    }

    /// Returns the slot.
    #[must_use]
    pub fn slot(&self) -> u16 {
        self.slot
    }

    /// Returns the old master of the slot.
    #[must_use]
    pub fn from(&self) -> &'a SpawnedServer {
        self.from
    }

    /// Returns the new master of the slot.
    #[must_use]
    pub fn to(&self) -> &'a SpawnedServer {
        self.to
    }

    /// Moves one key. Returns `false` if the old master does not have it.
    ///
    /// # Errors
    /// [`SpawnError::Refused`] if the new master has this key already. [`SpawnError::Unreachable`].
    pub fn move_key(&self, key: impl AsRef<[u8]>) -> Result<bool, SpawnError> {
        self.send(&[key.as_ref()])
    }

    /// Moves all keys that the old master has, and returns how many.
    ///
    /// # Errors
    /// Those of [`Migration::move_key`]. [`SpawnError::Unsettled`] if keys are still left after 30
    /// s.
    pub fn move_keys(&self) -> Result<usize, SpawnError> {
        let (mut from, mut moved, start) = (link_to(self.from)?, 0, Instant::now());
        loop {
            let keys = from
                .call(&format!("CLUSTER GETKEYSINSLOT {} {BATCH}", self.slot))?
                .items();
            let keys = keys.iter().filter_map(|key| {
                if let Answer::Text(key) = key {
                    Some(&**key)
                } else {
                    None
                }
            });
            let keys: Vec<&[u8]> = keys.collect();
            if keys.is_empty() {
                return Ok(moved);
            }
            if start.elapsed() > PATIENCE {
                return Err(self
                    .cluster
                    .gives_up("all keys move", "new keys keep appearing"));
            }
            self.send(&keys)?;
            moved += keys.len();
        }
    }

    fn send(&self, keys: &[&[u8]]) -> Result<bool, SpawnError> {
        let port = self.to.addr().port().to_string();
        let command = ["MIGRATE", "127.0.0.1", &port, "", "0", "10000", "KEYS"];
        let words: Vec<&[u8]> = command
            .iter()
            .map(|word| word.as_bytes())
            .chain(keys.iter().copied())
            .collect();
        Ok(link_to(self.from)?.call_words(&words)?.text() == "OK")
    }

    /// Moves the remaining keys, assigns the slot to the new master, and waits until all replying
    /// nodes agree.
    ///
    /// This wait, about 10 ms, matters: if the slot migrates back earlier, two masters can report
    /// each other as the owner for a long time. The same happens if the next master does not know
    /// this one's new epoch yet: it takes its own epoch for the highest, and does not raise it.
    ///
    /// # Errors
    /// Those of [`Migration::move_keys`]. [`SpawnError::Unsettled`] if the nodes do not agree
    /// within 30 s, for example because a replica has taken over from the new master.
    pub fn finish(self) -> Result<(), SpawnError> {
        let order = format!(
            "CLUSTER SETSLOT {} NODE {}",
            self.slot,
            self.cluster.id(self.to)?
        );
        self.move_keys()?;
        link_to(self.to)?.call(&order)?;
        link_to(self.from)?.call(&order)?;
        for node in self.cluster.nodes() {
            match link_to(node).and_then(|mut link| link.call(&order)) {
                // the node is down, or it is a replica, which follows its master
                Ok(_) | Err(SpawnError::Unreachable { .. } | SpawnError::Refused { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        self.cluster
            .until(PAUSE, &format!("all agree on slot {}", self.slot), || {
                self.disagreement()
            })
    }

    fn disagreement(&self) -> Option<String> {
        let (to, views) = (self.cluster.id(self.to).ok()?, self.cluster.views());
        let own = views
            .here()
            .find(|(_, id, _)| *id == to)
            .and_then(|(_, _, view)| Some(view.myself()?.epoch));
        let lags = views.here().find(|(_, _, view)| {
            let moves = view
                .myself()
                .is_some_and(|node| node.moving.contains(&self.slot));
            moves
                || view
                    .owner(self.slot)
                    .is_none_or(|owner| owner.id != to || Some(owner.epoch) != own)
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
        assert_eq!(
            migration.disagreement(),
            Some(format!("{} does not", cluster.addrs()[0]))
        );
        // the claim of the new master alone is not enough
        link_to(to)
            .unwrap()
            .call(&format!(
                "CLUSTER SETSLOT 7 NODE {}",
                cluster.id(to).unwrap()
            ))
            .unwrap();
        let views = cluster.views();
        assert_eq!(views.owner(7), Some(cluster.id(to).unwrap()));
        migration.finish().unwrap();
        let over = Migration {
            cluster: &cluster,
            slot: 7,
            from: &cluster.nodes()[0],
            to,
        };
        assert_eq!(over.disagreement(), None);
        assert!(cluster.views().unsettled().is_none());
    }
}
