//! For unit tests: the part of dashmap that the engine uses, behind one mutex of shuttle. It clones
//! no key, since the engine counts the references to the hold in a key.

use std::{borrow::Borrow, ops::Deref, rc::Rc, sync::PoisonError};

use shuttle::sync::{Mutex, MutexGuard};

type Pairs<K, V> = Vec<(K, V)>;

#[derive(Debug)]
pub(crate) struct DashMap<K, V>(Mutex<Pairs<K, V>>);

/// A pair of a map. The map stays locked while this lives.
pub(crate) struct Ref<'a, K, V> {
    pairs: Rc<MutexGuard<'a, Pairs<K, V>>>,
    at: usize,
}

impl<K, V> Ref<'_, K, V> {
    pub(crate) fn key(&self) -> &K {
        &self.pairs[self.at].0
    }
}

impl<K, V> Deref for Ref<'_, K, V> {
    type Target = V;

    fn deref(&self) -> &V {
        &self.pairs[self.at].1
    }
}

pub(crate) enum Entry<'a, K, V> {
    Occupied(Occupied<'a, K, V>),
    Vacant(Vacant<'a, K, V>),
}

pub(crate) struct Occupied<'a, K, V>(Ref<'a, K, V>);

pub(crate) struct Vacant<'a, K, V>(MutexGuard<'a, Pairs<K, V>>, K);

impl<'a, K, V> Entry<'a, K, V> {
    /// Inserts a default value if the key is missing. Keeps the map's own key, not the one passed
    /// in.
    pub(crate) fn or_default(self) -> Ref<'a, K, V>
    where
        V: Default,
    {
        match self {
            Self::Occupied(known) => known.0,
            Self::Vacant(place) => place.insert(V::default()),
        }
    }
}

impl<K, V> Occupied<'_, K, V> {
    pub(crate) fn get(&self) -> &V {
        &self.0
    }
}

impl<'a, K, V> Vacant<'a, K, V> {
    pub(crate) fn insert(self, value: V) -> Ref<'a, K, V> {
        let Self(mut pairs, key) = self;
        let at = pairs.len();
        pairs.push((key, value));
        Ref {
            pairs: Rc::new(pairs),
            at,
        }
    }
}

fn place<K: Borrow<Q>, V, Q: Eq + ?Sized>(pairs: &Pairs<K, V>, key: &Q) -> Option<usize> {
    pairs.iter().position(|(known, _)| known.borrow() == key)
}

impl<K: Eq, V> DashMap<K, V> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    fn pairs(&self) -> MutexGuard<'_, Pairs<K, V>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get<Q: Eq + ?Sized>(&self, key: &Q) -> Option<Ref<'_, K, V>>
    where
        K: Borrow<Q>,
    {
        let pairs = self.pairs();
        place(&pairs, key).map(|at| Ref {
            pairs: Rc::new(pairs),
            at,
        })
    }

    pub(crate) fn entry(&self, key: K) -> Entry<'_, K, V> {
        let pairs = self.pairs();
        match place(&pairs, &key) {
            Some(at) => Entry::Occupied(Occupied(Ref {
                pairs: Rc::new(pairs),
                at,
            })),
            None => Entry::Vacant(Vacant(pairs, key)),
        }
    }

    pub(crate) fn insert(&self, key: K, value: V) -> Option<V> {
        let mut pairs = self.pairs();
        if let Some(at) = place(&pairs, &key) {
            return Some(std::mem::replace(&mut pairs[at].1, value));
        }
        pairs.push((key, value));
        None
    }

    pub(crate) fn remove_if<Q: Eq + ?Sized>(
        &self,
        key: &Q,
        gone: impl FnOnce(&K, &V) -> bool,
    ) -> Option<(K, V)>
    where
        K: Borrow<Q>,
    {
        let mut pairs = self.pairs();
        let at = place(&pairs, key)?;
        let (key, value) = &pairs[at];
        gone(key, value).then(|| pairs.swap_remove(at))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Ref<'_, K, V>> {
        let pairs = Rc::new(self.pairs());
        (0..pairs.len()).map(move |at| Ref {
            pairs: Rc::clone(&pairs),
            at,
        })
    }

    pub(crate) fn contains_key<Q: Eq + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        place(&self.pairs(), key).is_some()
    }

    pub(crate) fn len(&self) -> usize {
        self.pairs().len()
    }
}

#[derive(Debug)]
pub(crate) struct DashSet<K>(DashMap<K, ()>);

impl<K: Eq> DashSet<K> {
    pub(crate) fn new() -> Self {
        Self(DashMap::new())
    }

    pub(crate) fn insert(&self, key: K) {
        self.0.insert(key, ());
    }

    pub(crate) fn contains(&self, key: &K) -> bool {
        self.0.contains_key(key)
    }

    pub(crate) fn remove(&self, key: &K) {
        self.0.remove_if(key, |_, ()| true);
    }
}
