//! The texts of the scripts, as they are in `lua/` now.

use std::{collections::BTreeSet, fs, path::Path};

/// The names of all scripts: `<kind>/<verb>`.
pub fn names() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("lua");
    let kinds = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let kinds = kinds.filter(|path| path.is_dir() && !path.ends_with("parts"));
    let files =
        kinds.flat_map(|kind| fs::read_dir(kind).unwrap()).map(|entry| entry.unwrap().path().with_extension(""));
    let name = |path: &Path| {
        let words: Vec<_> = path.iter().rev().take(2).map(|word| word.to_str().unwrap()).collect();
        format!("{}/{}", words[1], words[0])
    };
    files.map(|path| name(&path)).collect()
}

/// The text of a script, after those of its parts.
pub fn source(script: &str) -> String {
    let read = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("lua").join(format!("{name}.lua"));
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let own = read(script);
    let parts =
        own.lines().find_map(|line| line.strip_prefix("-- Parts ")).into_iter().flat_map(|line| line.split(','));
    parts.map(|part| read(&format!("parts/{}", part.trim()))).collect::<String>() + &own
}
