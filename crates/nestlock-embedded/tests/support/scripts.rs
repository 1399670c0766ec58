//! The library's scripts, with their parsed headers.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use sha1::{Digest, Sha1};

/// A line of a header: `KEYS[1]  lock  hash  owner -> hold count`.
#[derive(Debug, Clone)]
pub struct Word {
    /// `1`, or `n`, `n+1`: any number.
    pub index: String,
    pub name: String,
    pub kind: String,
}

#[derive(Debug, Clone)]
pub struct Script {
    /// `reentrant/acquire`
    pub name: String,
    /// The parts and the script's own text.
    pub source: String,
    pub keys: Vec<Word>,
    pub args: Vec<Word>,
    /// The first words of the lines under "Returns".
    pub returns: Vec<String>,
}

impl Script {
    pub fn sha(&self) -> String {
        sha1(&self.source)
    }

    fn read(folder: &Path, path: &Path) -> Self {
        let text = |path: &Path| {
            fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        };
        let source = text(path);
        let name = path
            .strip_prefix(folder)
            .expect("inside")
            .with_extension("");
        let name = name.to_str().expect("a name").replace('\\', "/");
        let mut script = Self {
            name,
            source: String::new(),
            keys: vec![],
            args: vec![],
            returns: vec![],
        };
        let mut returning = false;
        for line in source.lines().map_while(|line| line.strip_prefix("--")) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let indexed = |array: &str| {
                let index = words.first()?.strip_prefix(array)?.strip_suffix(']')?;
                let [_, name, kind, ..] = words[..] else {
                    panic!("{}: cannot parse {line:?}", script.name)
                };
                Some(Word {
                    index: index.into(),
                    name: name.into(),
                    kind: kind.into(),
                })
            };
            script.keys.extend(indexed("KEYS["));
            script.args.extend(indexed("ARGV["));
            if words.first() == Some(&"Parts") {
                let parts = words[1..].iter().map(|part| part.trim_end_matches(','));
                script.source = parts
                    .map(|part| text(&folder.join(format!("parts/{part}.lua"))))
                    .collect();
            } else if words.first() == Some(&"Returns") {
                returning = true;
                script.returns.extend(words.get(1).map(ToString::to_string));
            } else if returning && !line.starts_with("           ") {
                // a line indented further continues the one before
                script
                    .returns
                    .extend(words.first().map(ToString::to_string));
            }
        }
        script.source += &source;
        assert!(
            !script.keys.is_empty() && !script.returns.is_empty(),
            "{}: a header is missing",
            script.name
        );
        script
    }
}

/// The key of a script in the server's cache.
pub fn sha1(source: &str) -> String {
    Sha1::digest(source)
        .iter()
        .fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

/// Every script in `lua`, by name.
pub fn all() -> Vec<Script> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lua");
    let mut paths = vec![];
    walk(&folder, &mut paths);
    paths.sort();
    assert!(!paths.is_empty(), "no scripts in {}", folder.display());
    paths
        .iter()
        .map(|path| Script::read(&folder, path))
        .collect()
}

fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in
        fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
    {
        let path = entry.expect("an entry").path();
        if path.ends_with("parts") {
            // parts are not scripts
        } else if path.is_dir() {
            walk(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "lua") {
            found.push(path);
        }
    }
}
