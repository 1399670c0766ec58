//! Reads the scripts from `lua/`.

use std::{collections::BTreeSet, fs, path::Path};

/// Returns the names of all scripts: `<kind>/<verb>`.
pub fn names() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("lua");
    let kinds = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let kinds = kinds.filter(|path| path.is_dir() && !path.ends_with("parts"));
    let files = kinds
        .flat_map(|kind| fs::read_dir(kind).unwrap())
        .map(|entry| entry.unwrap().path().with_extension(""));
    let name = |path: &Path| {
        let words: Vec<_> = path
            .iter()
            .rev()
            .take(2)
            .map(|word| word.to_str().unwrap())
            .collect();
        format!("{}/{}", words[1], words[0])
    };
    files.map(|path| name(&path)).collect()
}

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("lua")
        .join(format!("{name}.lua"));
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the text that nestlock sends for a script.
pub fn sent(script: &str) -> String {
    const NUMBERED: &str = include_str!("../../../crates/nestlock-wire/lua/numbered.lua");
    NUMBERED.replace("--SCRIPT", &source(script))
}

/// Returns the RESP reply of the sent script to the request with this number, where the script
/// itself replies `reply`.
pub fn naming(number: &str, reply: &str) -> String {
    let code = |code: i64| {
        format!(
            ":{}\r\n",
            number.parse::<i64>().expect("a number") * 16 + code
        )
    };
    let (kind, rest) = reply.split_at(1);
    match kind {
        ":" => code(rest.trim_end().parse().expect("a code")),
        "_" => code(7),
        "*" => {
            let (parts, rest) = rest.split_once("\r\n").expect("a line");
            format!(
                "*{}\r\n:{number}\r\n{rest}",
                parts.parse::<usize>().expect("a length") + 1
            )
        }
        _ => reply.to_owned(),
    }
}

/// Returns the text of a script behind the texts of its parts.
pub fn source(script: &str) -> String {
    let own = read(script);
    let parts = own
        .lines()
        .find_map(|line| line.strip_prefix("-- Parts "))
        .into_iter()
        .flat_map(|line| line.split(','));
    parts
        .map(|part| read(&format!("parts/{}", part.trim())))
        .collect::<String>()
        + &own
}
