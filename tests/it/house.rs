//! The project's rules, checked against its sources.

mod examples;
mod order;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// A source file: its path from the repository's root, and its text.
struct Source {
    path: String,
    text: String,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn sources(folder: &str, extension: &str) -> Vec<Source> {
    fn walk(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
        for entry in
            fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, extension, found);
            } else if path.extension().is_some_and(|found| found == extension) {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(&root().join(folder), extension, &mut found);
    found.sort();
    assert!(!found.is_empty(), "no {extension} files in {folder}");
    found
        .into_iter()
        .map(|path| Source {
            text: fs::read_to_string(&path).unwrap(),
            path: path
                .strip_prefix(root())
                .unwrap()
                .to_str()
                .unwrap()
                .replace('\\', "/"),
        })
        .collect()
}

/// Returns the sources of the core: the library and its wire.
fn core() -> Vec<Source> {
    let mut core = sources("src", "rs");
    core.extend(sources("crates/nestlock-wire/src", "rs"));
    core
}

impl Source {
    /// Returns the module: `crate::engine::core` is `engine/core`, `engine/mod.rs` is `engine`, and
    /// `lib.rs` is the empty one.
    fn module(&self) -> &str {
        let file = self.path.trim_start_matches("crates/nestlock-wire/");
        let module = file.trim_start_matches("src/").trim_end_matches(".rs");
        if module == "lib" {
            ""
        } else {
            module.trim_end_matches("/mod")
        }
    }

    /// Returns whether this is a file of unit tests: in a file or folder named `tests`.
    fn is_test(&self) -> bool {
        self.module().split('/').any(|part| part == "tests")
    }

    /// Returns the lines of code that ship: no comments, and no unit tests, which are at the end or
    /// in files of their own.
    fn code(&self) -> Vec<&str> {
        let ships = !self.is_test();
        self.text
            .lines()
            .take_while(|_| ships)
            .take_while(|line| *line != "#[cfg(test)]" || self.module().is_empty())
            .filter(|line| !line.trim_start().starts_with("//"))
            .collect()
    }
}

// --- floors ---

/// The floor of each module. The longest matching name counts.
const FLOORS: [(&str, u8); 31] = [
    ("", 7),
    ("blocking", 7),
    ("client", 7),
    ("guide", 7),
    ("lock", 6),
    ("rlock", 6),
    ("guard", 5),
    ("engine/acquire", 5),
    ("engine/release", 5),
    ("engine/transfer", 5),
    ("engine/together", 5),
    ("engine/inspect", 5),
    ("engine/counts", 5),
    ("engine/latch", 5),
    ("engine/left", 5),
    ("engine/notes", 5),
    ("engine/janitor", 5),
    ("engine/start", 5),
    ("engine/watchdog", 5),
    ("engine", 4),
    ("store", 3),
    ("sync", 0),
    ("meter", 2),
    ("permissions", 2),
    ("hand_over", 2),
    ("owner", 2),
    ("token", 2),
    ("topology", 2),
    ("keys", 2),
    ("options", 2),
    ("error", 2),
];

fn floor(module: &str) -> Option<u8> {
    let fits =
        |name: &str| name == module || !name.is_empty() && module.starts_with(&format!("{name}/"));
    FLOORS
        .iter()
        .filter(|(name, _)| fits(name))
        .max_by_key(|(name, _)| name.len())
        .map(|(_, floor)| *floor)
}

/// Collects the paths that a `use` tree names: `a::{b, c::d}` names `a::b` and `a::c::d`.
fn flatten(tree: &str, base: &str, paths: &mut Vec<String>) {
    let tree = tree.trim();
    if let Some((head, rest)) = tree.split_once('{') {
        let inner = rest.strip_suffix('}').unwrap_or(rest);
        let (mut depth, mut from) = (0, 0);
        for (at, letter) in inner.char_indices().chain([(inner.len(), ',')]) {
            match letter {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    flatten(&inner[from..at], &format!("{base}{}", head.trim()), paths);
                    from = at + 1;
                }
                _ => {}
            }
        }
    } else if !tree.is_empty() {
        paths.push(format!("{base}{tree}"));
    }
}

/// Returns every module of this crate that a file uses, in `use` statements and elsewhere in the
/// code.
fn used_modules(source: &Source, modules: &BTreeSet<String>) -> BTreeSet<String> {
    let (code, mut paths) = (source.code().join("\n"), Vec::new());
    for (at, _) in code.match_indices("use ") {
        let before = code[..at].chars().next_back();
        if before.is_none_or(char::is_whitespace) && code[at..].contains(';') {
            let statement = code[at + 4..].split(';').next().unwrap();
            flatten(
                &statement.split_whitespace().collect::<Vec<_>>().join(" "),
                "",
                &mut paths,
            );
        }
    }
    // Paths in expressions and types.
    for prefix in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(prefix) {
            let name = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == ':';
            let path: String = code[at..]
                .chars()
                .take_while(|letter| name(*letter))
                .collect();
            // A prefix of a `use` tree: handled above.
            if !path.ends_with("::") {
                paths.push(path);
            }
        }
    }
    let parent = if source.path.ends_with("/mod.rs") {
        source.module()
    } else {
        source
            .module()
            .rsplit_once('/')
            .map_or("", |(parent, _)| parent)
    };
    paths
        .iter()
        .filter_map(|path| {
            let full = if let Some(path) = path.strip_prefix("crate::") {
                path.to_owned()
            } else if let Some(path) = path.strip_prefix("self::") {
                format!("{}::{path}", source.module().replace('/', "::"))
            } else if let Some(path) = path.strip_prefix("super::") {
                // In mod.rs, `super` is one level up.
                let above = || parent.rsplit_once('/').map_or("", |(above, _)| above);
                let up = if source.path.ends_with("/mod.rs") {
                    above()
                } else {
                    parent
                };
                format!(
                    "{}{}{path}",
                    up.replace('/', "::"),
                    if up.is_empty() { "" } else { "::" }
                )
            } else {
                return None;
            };
            // Take the longest module that the path begins with. Otherwise lib.rs re-exports the
            // item.
            let parts: Vec<&str> = full.split("::").filter(|part| !part.is_empty()).collect();
            let module = (1..=parts.len())
                .rev()
                .map(|n| parts[..n].join("/"))
                .find(|path| modules.contains(path));
            (!parts.is_empty()).then(|| module.unwrap_or_default())
        })
        .collect()
}

#[test]
fn a_use_tree_is_taken_apart() {
    let mut paths = Vec::new();
    flatten(
        "crate::{ engine::{self, acquire}, error::Result, lock::{Lock, a::{b, c}} }",
        "",
        &mut paths,
    );
    assert_eq!(
        paths,
        [
            "crate::engine::self",
            "crate::engine::acquire",
            "crate::error::Result",
            "crate::lock::Lock",
            "crate::lock::a::b",
            "crate::lock::a::c"
        ]
    );
}

#[test]
fn a_file_uses_its_own_floor_and_those_below() {
    let files = sources("src", "rs");
    let modules: BTreeSet<String> = files.iter().map(|file| file.module().to_owned()).collect();
    let (mut wrong, mut uses) = (Vec::new(), 0);
    for file in &files {
        let Some(own) = floor(file.module()) else {
            panic!(
                "{}: on no floor; add it to FLOORS here, and to ARCHITECTURE.md",
                file.path
            );
        };
        for used in used_modules(file, &modules) {
            uses += 1;
            // a list of parts re-exports some of a higher floor
            let is_listed = is_list(file.module()) && used.starts_with(file.module());
            if !is_listed && floor(&used).is_some_and(|floor| floor > own) {
                wrong.push(format!(
                    "{} (floor {own}) uses {used} (floor {})",
                    file.path,
                    floor(&used).unwrap()
                ));
            }
        }
    }
    assert!(uses > 50, "the check sees only {uses} uses: it is broken");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Returns whether a module is a part of the engine that ships.
fn is_part(module: &str) -> bool {
    module.starts_with("engine/") && !is_list(module)
}

/// Returns whether a module is only a list of modules. An import from there would hide what is
/// used.
fn is_list(module: &str) -> bool {
    ["engine", "engine/wait"].contains(&module)
}

/// A part of the engine is imported from where it stands, not from the list of parts.
#[test]
fn the_engine_imports_a_part_from_where_it_stands() {
    let files = sources("src", "rs");
    let modules: BTreeSet<String> = files.iter().map(|file| file.module().to_owned()).collect();
    let (mut wrong, mut uses) = (Vec::new(), 0);
    for file in files
        .iter()
        .filter(|file| is_part(file.module()) && !file.is_test())
    {
        for used in used_modules(file, &modules) {
            if is_list(&used) {
                wrong.push(format!("{} imports from {used}", file.path));
            } else if used.starts_with("engine/") {
                uses += 1;
            }
        }
    }
    assert!(uses > 50, "the check sees only {uses} uses: it is broken");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The picture in ARCHITECTURE.md names every crate and every folder of `src`, and no folder that
/// does not exist. A folder next to a file of its name belongs to that file.
#[test]
fn the_picture_has_every_crate_and_folder() {
    let text = document("ARCHITECTURE.md");
    let picture = text.split("```").nth(1).expect("the picture");
    let named: BTreeSet<String> = picture
        .split_whitespace()
        .filter_map(|word| word.trim_end_matches([',', ';']).strip_suffix('/'))
        .map(str::to_owned)
        .collect();
    for folder in &named {
        assert!(
            root().join(folder).is_dir(),
            "ARCHITECTURE.md names {folder}/, which does not exist"
        );
    }
    let mut folders: BTreeSet<String> = sources("src", "rs")
        .iter()
        .filter(|file| !file.is_test())
        .filter_map(|file| file.path.rsplit_once('/'))
        .map(|(folder, _)| folder.to_owned())
        .filter(|folder| !root().join(format!("{folder}.rs")).is_file())
        .collect();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        folders.insert(format!(
            "crates/{}",
            entry.unwrap().file_name().to_str().unwrap()
        ));
    }
    assert!(
        folders.len() > 15,
        "the check sees only {folders:?}: it is broken"
    );
    let missing: Vec<&String> = folders.difference(&named).collect();
    assert!(
        missing.is_empty(),
        "not in the picture of ARCHITECTURE.md: {missing:?}"
    );
}

/// A file has one job and at most 400 lines of code.
#[test]
fn no_file_is_long() {
    let mut long = BTreeMap::new();
    for file in core() {
        let lines = file
            .code()
            .iter()
            .filter(|line| !line.trim().is_empty())
            .count();
        if lines > 400 {
            long.insert(file.path, lines);
        }
    }
    assert!(long.is_empty(), "more than 400 lines of code: {long:?}");
}

/// Returns the name and the lines of code of each function in these lines, which rustfmt has laid
/// out: the brace that ends a function stands below its `fn`. Functions inside others count twice.
fn functions<'a>(code: &[&'a str]) -> Vec<(&'a str, usize)> {
    let mut found = Vec::new();
    for (at, line) in code.iter().enumerate() {
        let indent = line.len() - line.trim_start().len();
        let Some((before, after)) = line.split_once("fn ") else {
            continue;
        };
        let is_item = before
            .split_whitespace()
            .all(|word| word.starts_with("pub") || ["const", "async", "in"].contains(&word));
        if !is_item || line.ends_with(';') || line.ends_with('}') {
            continue;
        }
        let ends = |line: &&&str| line.len() == indent + 1 && line.ends_with('}');
        let lines = code[at..].iter().take_while(|line| !ends(line));
        let lines = lines.filter(|line| !line.trim().is_empty()).count() + 1;
        found.push((after.split(['(', '<']).next().unwrap(), lines));
    }
    found
}

/// A function fits on a screen.
#[test]
fn no_function_is_long() {
    let mut long = Vec::new();
    let mut seen = 0;
    for file in core() {
        for (name, lines) in functions(&file.code()) {
            seen += 1;
            if lines > 60 {
                long.push(format!("{} {name}: {lines}", file.path));
            }
        }
    }
    assert!(seen > 1500, "only {seen} functions were found");
    assert!(long.is_empty(), "more than 60 lines of code: {long:?}");
}

/// A name means one type. Two files may have it only if one stands in for the other without a
/// feature, or in the models for a type of tokio's.
#[test]
fn no_two_types_have_one_name() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in core() {
        for line in file.code() {
            let mut words = line
                .split(|c: char| !c.is_alphanumeric() && c != '_')
                .filter(|word| !word.is_empty())
                .skip_while(|word| ["pub", "crate", "super"].contains(word));
            let item = words.next().unwrap_or_default();
            // an indented alias is an associated type
            let is_type = ["struct", "enum", "trait", "union"].contains(&item)
                || item == "type" && !line.starts_with(' ');
            if let Some(name) = words.next().filter(|_| is_type) {
                let path = file.path.clone();
                places.entry(name.to_owned()).or_default().push(path);
            }
        }
    }
    for files in places.values_mut() {
        files.retain(|path| !["src/meter/nothing.rs", "src/sync/steps.rs"].contains(&&**path));
    }
    places.retain(|_, files| files.len() > 1);
    assert!(places.is_empty(), "one name, two types: {places:?}");
}

/// The files that name something of fred's: without the feature `fred`, nothing else may.
const FREDS: [&str; 8] = [
    "src/client.rs",
    "src/lib.rs",
    "src/store/fred_config.rs",
    "crates/nestlock-wire/src/by_fred/config.rs",
    "crates/nestlock-wire/src/by_fred/connector.rs",
    "crates/nestlock-wire/src/by_fred/errors.rs",
    "crates/nestlock-wire/src/by_fred.rs",
    "crates/nestlock-wire/src/settings.rs",
];

#[test]
fn few_files_name_anything_of_freds() {
    let names = |line: &&str| {
        line.match_indices("fred").any(|(at, _)| {
            let before = line[..at].chars().next_back();
            let is_word = before.is_none_or(|letter| !letter.is_alphanumeric() && letter != '_');
            is_word && line[at + 4..].starts_with("::") || line.ends_with("use fred;")
        })
    };
    let found: Vec<String> = core()
        .into_iter()
        .filter(|file| file.code().iter().any(|line| names(&&**line)))
        .map(|file| file.path)
        .collect();
    assert_eq!(found, FREDS);
}

// --- Rust ---

#[test]
fn every_file_says_what_it_is() {
    for file in core().into_iter().chain(sources("tests", "rs")) {
        let first = file.text.lines().next().unwrap_or("");
        let says = first.starts_with("//! ") || first.starts_with("#![doc = include_str!");
        assert!(says, "{}: begins with {first:?}, not with //!", file.path);
    }
}

#[test]
fn the_library_prints_nothing_and_does_not_panic_by_unwrap() {
    for file in core() {
        for line in file.code() {
            for word in [
                "println!",
                "print!(",
                "eprint!(",
                "dbg!",
                ".unwrap()",
                "todo!",
                "unimplemented!",
            ] {
                assert!(
                    !line.contains(word),
                    "{}: {word} in: {}",
                    file.path,
                    line.trim()
                );
            }
        }
    }
}

/// Returns the lines of a block that begins at `start`, up to the closing brace of the same
/// indentation.
fn block<'a>(lines: &[&'a str], start: usize) -> Vec<&'a str> {
    let indent = lines[start].len() - lines[start].trim_start().len();
    let end = format!("{}}}", " ".repeat(indent));
    let len = lines[start..]
        .iter()
        .position(|line| *line == end)
        .map_or(1, |len| len + 1);
    lines[start..start + len].to_vec()
}

/// L1, R34: a drop does not need the caller's runtime.
#[test]
fn no_drop_spawns_or_blocks() {
    let mut drops = 0;
    for file in core() {
        let lines = file.code();
        for (at, line) in lines.iter().enumerate() {
            if line.starts_with("impl") && line.contains(" Drop for ") {
                drops += 1;
                let body = block(&lines, at);
                assert!(body.len() > 1, "{}: {line}", file.path);
                for inside in body {
                    for word in [
                        "tokio::spawn",
                        "block_on",
                        "Handle::current",
                        "blocking_",
                        "thread::",
                        ".await",
                    ] {
                        // A task on the client's own runtime may await.
                        let own = word == ".await"
                            && block(&lines, at)
                                .iter()
                                .any(|l| l.contains("runtime.spawn("));
                        assert!(
                            own || !inside.contains(word),
                            "{}: {word} in {line}",
                            file.path
                        );
                    }
                }
            }
        }
    }
    assert!(
        drops >= 4,
        "the check sees only {drops} drops: it is broken"
    );
}

#[test]
fn every_public_async_method_says_what_cancelling_it_does() {
    let mut methods = 0;
    for file in core() {
        let lines: Vec<&str> = file
            .text
            .lines()
            .take_while(|line| *line != "#[cfg(test)]")
            .collect();
        let in_public_trait = |at: usize| {
            let opening = lines[..at]
                .iter()
                .rev()
                .find(|line| line.ends_with('{') && !line.starts_with(' '));
            opening.is_some_and(|line| line.starts_with("pub trait "))
        };
        for (at, line) in lines.iter().enumerate() {
            let code = line.trim_start();
            if code.starts_with("pub async fn ")
                || code.starts_with("async fn ") && in_public_trait(at)
            {
                methods += 1;
                let about = |line: &&&str| {
                    line.trim_start().starts_with("///") || line.trim_start().starts_with("#[")
                };
                let docs: Vec<_> = lines[..at].iter().rev().take_while(about).collect();
                // Generic code refers to the method that documents its contract.
                let says = |line: &&&str| {
                    line.contains("# Cancel safety") || line.contains("/// As [`Lock::")
                };
                let says = docs.iter().any(says);
                assert!(says, "{}: no `# Cancel safety` at: {code}", file.path);
            }
        }
    }
    assert!(
        methods >= 20,
        "the check sees only {methods} methods: it is broken"
    );
}

/// Rule 3 of the safety design depends on fred never resending. That is proven for the version in
/// Cargo.lock, and only within one release line.
#[test]
fn fred_is_of_the_line_that_never_re_sends() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let lines: Vec<&str> = manifest
        .lines()
        .filter(|line| line.starts_with("fred = {"))
        .collect();
    assert!(!lines.is_empty());
    for line in lines {
        assert!(
            line.contains("version = \"10.1\"") && line.contains("default-features = false"),
            "{line}"
        );
    }
}

/// There is no second toolchain. Clippy's `incompatible_msrv`, which warns by default, checks the
/// MSRV instead.
#[test]
fn the_oldest_rust_is_said_and_watched() {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    let manifest = read("Cargo.toml");
    let said = manifest
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = \"")?.strip_suffix('"'))
        .unwrap();
    assert!(
        read("README.md").contains(&format!("Rust {said}, and")),
        "README.md does not say Rust {said}"
    );
    for manifest in ["Cargo.toml", "crates/nestlock-embedded/Cargo.toml"] {
        assert!(
            read(manifest).contains("rust-version.workspace = true"),
            "{manifest}"
        );
    }
    for file in sources("src", "rs").iter().chain(&sources("crates", "rs")) {
        assert!(
            !file.text.contains("clippy::incompatible_msrv"),
            "{}: then nothing checks the MSRV",
            file.path
        );
    }
    assert!(!manifest.contains("incompatible_msrv"));
}

// --- Lua ---

/// The declaration of a script by `script!` in `src/lock`.
struct Declared {
    parts: Vec<String>,
    /// For keys and for arguments: the fixed number, and how many more for each lock.
    arity: [(usize, usize); 2],
}

fn declared() -> BTreeMap<String, Declared> {
    let mut declared = BTreeMap::new();
    for file in sources("src/lock", "rs") {
        let code: String = file
            .code()
            .iter()
            .map(|line| line.trim().to_owned() + " ")
            .collect();
        for declaration in code.split("script!(").skip(1) {
            let (inside, _) = declaration.split_once(");").unwrap();
            let name = inside.split('"').nth(1).unwrap().to_owned();
            let parts = inside.split(['[', ']']).nth(1).unwrap_or_default();
            let parts = parts
                .split(", ")
                .map(|part| part.trim_matches('"').to_owned())
                .filter(|part| !part.is_empty());
            let arity = ["keys", "args"].map(|what| {
                let said = inside
                    .split(&format!("{what} = "))
                    .nth(1)
                    .unwrap()
                    .split(',')
                    .next()
                    .unwrap()
                    .trim();
                let (fixed, each) = said.split_once(" + ").unwrap_or((said, "0 per_lock"));
                (
                    fixed.parse().unwrap(),
                    each.strip_suffix(" per_lock").unwrap().parse().unwrap(),
                )
            });
            let kind = file.module().trim_start_matches("lock/");
            assert!(
                name.starts_with(&format!("{kind}/")),
                "{}: declares {name} of another kind",
                file.path
            );
            assert!(
                declared
                    .insert(
                        name.clone(),
                        Declared {
                            parts: parts.collect(),
                            arity
                        }
                    )
                    .is_none(),
                "{name} is declared twice"
            );
        }
    }
    declared
}

/// Returns the scripts, and the parts that several of them begin with.
fn lua() -> (Vec<Source>, Vec<Source>) {
    sources("lua", "lua")
        .into_iter()
        .partition(|file| !file.path.starts_with("lua/parts/"))
}

/// Returns the parts that the header names.
fn parts(file: &Source) -> Vec<Source> {
    let line = header(file)
        .into_iter()
        .find_map(|line| line.strip_prefix("-- Parts "));
    let names = line
        .into_iter()
        .flat_map(|line| line.split(','))
        .map(str::trim);
    names
        .map(|name| {
            let path = format!("lua/parts/{name}.lua");
            Source {
                text: fs::read_to_string(root().join(&path)).unwrap(),
                path,
            }
        })
        .collect()
}

fn header(file: &Source) -> Vec<&str> {
    file.text
        .lines()
        .take_while(|line| line.starts_with("--"))
        .collect()
}

/// Returns the lines of the parts and those after the header, without comments and blank lines.
fn lua_code(file: &Source) -> Vec<String> {
    parts(file)
        .iter()
        .flat_map(own_code)
        .chain(own_code(file))
        .collect()
}

fn own_code(file: &Source) -> Vec<String> {
    let body = file.text.lines().skip(header(file).len());
    body.map(|line| line.split("--").next().unwrap().trim_end().to_owned())
        .filter(|line| !line.is_empty())
        .collect()
}

/// Returns the arguments that the header documents: `KEYS[1]`, `ARGV[n+1]`, ...
fn documented<'a>(header: &[&'a str], what: &str) -> Vec<&'a str> {
    header
        .iter()
        .filter_map(|line| {
            line.trim_start_matches("--")
                .trim_start()
                .strip_prefix(what)
        })
        .filter_map(|rest| rest.strip_prefix('[')?.split_once(']'))
        .map(|(index, rest)| {
            assert!(
                rest.starts_with(' ') && rest.split_whitespace().count() >= 2,
                "say what {what}[{index}] is"
            );
            index
        })
        .collect()
}

fn indices<'a>(code: &'a str, what: &str) -> BTreeSet<&'a str> {
    code.match_indices(&format!("{what}["))
        .map(|(at, _)| {
            code[at + what.len() + 1..]
                .split(']')
                .next()
                .unwrap()
                .trim()
        })
        .collect()
}

fn assert_header_fits(file: &Source, declared: &Declared) {
    let (header, code, path) = (header(file), lua_code(file), &file.path);
    let name = path.trim_start_matches("lua/").trim_end_matches(".lua");
    assert!(
        header[0].starts_with(&format!("-- {name}: ")),
        "{path}: first line is {:?}",
        header[0]
    );
    assert!(
        header.iter().any(|line| line.starts_with("-- Returns  ")),
        "{path}: no `Returns`"
    );
    assert!(
        header.len() > 3 && header[1] == "--",
        "{path}: a blank line after the first"
    );
    let parts: Vec<_> = parts(file)
        .iter()
        .map(|part| part.path.replace("lua/parts/", "").replace(".lua", ""))
        .collect();
    assert_eq!(
        parts, declared.parts,
        "{path}: parts of the header and of script!(..)"
    );
    for (what, (count, per_lock)) in ["KEYS", "ARGV"].into_iter().zip(declared.arity) {
        let each = match (per_lock, count) {
            (0, _) => vec![],
            (1, 0) => vec!["n".to_owned()],
            (1, fixed) => vec![format!("n+{fixed}")],
            (2, 0) => vec!["2n-1".to_owned(), "2n".to_owned()],
            other => panic!("{path}: {other:?}"),
        };
        let wanted: Vec<String> = (1..=count).map(|n| n.to_string()).chain(each).collect();
        let (listed, used) = (documented(&header, what), code.join("\n"));
        assert_eq!(
            listed, wanted,
            "{path}: {what} of the header and of script!(..)"
        );
        for index in indices(&used, what) {
            let index = index.replace([' ', '*'], "");
            assert!(
                listed.contains(&index.as_str()),
                "{path}: {what}[{index}] is not in the header"
            );
        }
        if per_lock == 0 {
            let used = indices(&used, what);
            assert_eq!(used.len(), count, "{path}: uses {used:?} of {what}");
        }
    }
}

#[test]
fn every_script_is_declared_and_every_declaration_is_a_script() {
    let (scripts, all) = lua();
    let files: BTreeSet<String> = scripts
        .iter()
        .map(|file| {
            file.path
                .trim_start_matches("lua/")
                .trim_end_matches(".lua")
                .to_owned()
        })
        .collect();
    let declared: BTreeSet<String> = declared().into_keys().collect();
    assert_eq!(files, declared);
    for part in all {
        let users = scripts
            .iter()
            .filter(|file| parts(file).iter().any(|used| used.path == part.path))
            .count();
        assert!(users > 1, "{}: a part of {users} scripts", part.path);
    }
}

#[test]
fn every_script_header_fits_its_body_and_its_declaration() {
    let declared = declared();
    for file in lua().0 {
        let name = file
            .path
            .trim_start_matches("lua/")
            .trim_end_matches(".lua");
        assert_header_fits(&file, &declared[name]);
    }
}

#[test]
fn every_script_names_its_arguments_first_and_is_short() {
    let (scripts, parts) = lua();
    for file in &scripts {
        let code = own_code(file);
        // A script fits on a screen. fair/acquire is longer: it judges a queue, takes a place in it
        // and takes back what is refused.
        let most = if file.path == "lua/fair/acquire.lua" {
            100
        } else {
            60
        };
        assert!(code.len() < most, "{}: {} lines", file.path, code.len());
        let first = &lua_code(file)[0];
        let names = first.starts_with("local ")
            && (first.contains(" = ") || first.starts_with("local function "));
        assert!(names, "{}: first statement: {first}", file.path);
    }
    for file in scripts.iter().chain(&parts) {
        let code = own_code(file);
        let per_lock = header(file).iter().any(|line| line.contains("[n]"));
        for (at, line) in code.iter().enumerate().skip(1) {
            // The second line may continue a list of names that does not fit into the first.
            if at == 1
                && line.starts_with("local ")
                && line.contains(" = ARGV[1]")
                && !code[0].contains("ARGV[")
            {
                continue;
            }
            let each = per_lock && (line.contains("ARGV[n + 1]") || line.contains("ARGV[2 * n"));
            let repeats = line.contains("KEYS[") || line.contains("ARGV[") && !each;
            assert!(
                !repeats,
                "{}, statement {at} uses an index: {line}",
                file.path
            );
        }
    }
}

/// Commands that scripts may call: each works in an ACL and in a cluster, and reads one lock's keys
/// only.
const COMMANDS: [&str; 41] = [
    "del",
    "exists",
    "expire",
    "get",
    "getex",
    "hdel",
    "hexists",
    "hget",
    "hgetall",
    "hkeys",
    "hlen",
    "hmget",
    "hrandfield",
    "hset",
    "incr",
    "incrby",
    "lindex",
    "llen",
    "lpos",
    "lpush",
    "lrange",
    "lrem",
    "ltrim",
    "mset",
    "pexpire",
    "pttl",
    "publish",
    "rpush",
    "set",
    "strlen",
    "time",
    "zadd",
    "zcard",
    "zcount",
    "zmscore",
    "zrange",
    "zrangebyscore",
    "zrank",
    "zrem",
    "zremrangebyscore",
    "zscore",
];

/// R109: no managed cluster refuses a script, because every command is a literal. P14: no script
/// scans all keys.
#[test]
fn r109_p14_scripts_call_known_commands_by_name() {
    for file in lua().0 {
        let code = lua_code(&file).join("\n");
        let mut calls = 0;
        for (at, _) in code.match_indices("redis.") {
            let rest = &code[at + 6..];
            let function = rest
                .split(|letter: char| !letter.is_alphanumeric() && letter != '_')
                .next()
                .unwrap();
            match function {
                "call" | "pcall" => {
                    calls += 1;
                    let literal = rest[function.len()..]
                        .strip_prefix("('")
                        .and_then(|rest| rest.split_once('\''));
                    let Some((command, _)) = literal else {
                        panic!(
                            "{}: a command that is not a literal: redis.{}",
                            file.path,
                            &rest[..20.min(rest.len())]
                        );
                    };
                    assert!(
                        COMMANDS.contains(&command),
                        "{}: {command} is not in the list of commands",
                        file.path
                    );
                }
                "error_reply" | "status_reply" => {}
                other => panic!("{}: redis.{other}", file.path),
            }
        }
        assert!(calls > 0, "{}: calls nothing", file.path);
        for word in ["loadstring", "load(", "_G", "setfenv", "getmetatable"] {
            assert!(!code.contains(word), "{}: {word}", file.path);
        }
    }
}

/// P14: the client never requests all keys at once either. Where it must find keys, it scans page
/// by page.
#[test]
fn p14_the_client_never_looks_at_all_keys_at_once() {
    let mut scans = Vec::new();
    for file in core() {
        for line in file.code() {
            for word in [".keys::<", ".scan_", "flushall", "flushdb", "\"KEYS\""] {
                assert!(!line.contains(word), "{}: {line}", file.path);
            }
            if line.contains("\"SCAN\"") {
                scans.push(file.path.clone());
            }
        }
    }
    assert_eq!(scans, ["crates/nestlock-wire/src/link/commands.rs"]);
}

#[test]
fn scripts_have_no_globals() {
    for file in lua().0 {
        let mut locals = BTreeSet::new();
        for line in lua_code(&file) {
            let code = line.trim();
            for after in code.split("for ").skip(1) {
                let names = after
                    .split(" in ")
                    .next()
                    .unwrap()
                    .split('=')
                    .next()
                    .unwrap();
                locals.extend(names.split(',').map(|name| name.trim().to_owned()));
            }
            let mut statements = code.split(" then ").flat_map(|part| part.split(" do "));
            while let Some(statement) = statements.next().map(str::trim) {
                if statement.starts_with("for ") {
                    continue;
                }
                let is_local = statement.starts_with("local ");
                let Some((names, _)) = statement.trim_start_matches("local ").split_once('=')
                else {
                    continue;
                };
                let compares = names.ends_with(['~', '<', '>']) || statement.contains("==");
                let plain = names
                    .trim()
                    .chars()
                    .all(|c| c.is_alphanumeric() || " _,[].".contains(c));
                if !plain
                    || compares && !is_local
                    || names.starts_with("if ")
                    || names.starts_with("return ")
                {
                    continue;
                }
                for name in names
                    .split(',')
                    .map(|name| name.trim().split(['[', '.']).next().unwrap().to_owned())
                {
                    if is_local {
                        locals.insert(name);
                    } else {
                        assert!(
                            locals.contains(&name),
                            "{}: {name} is not local in: {code}",
                            file.path
                        );
                    }
                }
            }
        }
        assert!(
            !locals.is_empty(),
            "{}: the check sees no locals",
            file.path
        );
    }
}

// --- interop ---

/// The table in `tests/interop/README.md` names every request and the workers that know it.
#[test]
fn every_interop_worker_speaks_the_protocol() {
    let folder = root().join("tests/interop");
    let workers = [
        ("redsync", "redsync/main.go"),
        ("node-redlock", "node/worker.js"),
        ("phpredis", "php/worker.php"),
        ("python-redis-lock", "python/worker.py"),
        ("Redisson", "redisson/Worker.java"),
        ("nestlock", "rust_worker.rs"),
    ];
    let read = |path: &str| {
        fs::read_to_string(folder.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    };
    let (readme, mut requests) = (read("README.md"), 0);
    for line in readme.lines() {
        let cells: Vec<&str> = line.split(" | ").collect();
        let [request, answers, by] = cells[..] else {
            continue;
        };
        let Some(request) = request
            .strip_prefix("| `")
            .and_then(|request| request.split([' ', '`']).next())
        else {
            continue;
        };
        requests += 1;
        for (worker, path) in workers
            .iter()
            .filter(|(worker, _)| by.starts_with("all") || by.contains(worker))
        {
            let text = read(path);
            let words = answers
                .split('`')
                .skip(1)
                .step_by(2)
                .filter_map(|answer| answer.split(' ').next());
            for word in [request].into_iter().chain(words) {
                assert!(text.contains(word), "{worker} does not contain {word}");
            }
        }
    }
    assert!(
        requests >= 7,
        "the check sees only {requests} requests: it is broken"
    );
}

// --- documents ---

/// Words that the field does not use, or that hide the subject of a sentence. What to write in place
/// of each is in the last column.
const REFUSED: [(&str, &str); 11] = [
    ("whoever", "the client, the holder, the caller"),
    ("whom", "name the thing"),
    ("nobody", "no client, no waiter"),
    ("somebody", "another client, another task"),
    ("besides", "also, in addition"),
    ("lest", "so that .. not"),
    ("anew", "again"),
    ("so many", "this many, N"),
    ("as long may", "how long .. may"),
    ("under way", "in flight"),
    ("of its own accord", "by itself"),
];

/// The prose that users and maintainers read is plain English.
#[test]
fn refused_words_are_not_used() {
    let places = [
        ("src", "rs"),
        ("src", "md"),
        ("crates", "rs"),
        ("crates", "md"),
        ("crates", "lua"),
        ("lua", "lua"),
        ("lua", "md"),
        ("examples", "rs"),
        ("docs", "md"),
    ];
    let mut texts: Vec<Source> = places
        .into_iter()
        .flat_map(|(folder, extension)| sources(folder, extension))
        .filter(|file| !file.path.contains("/tests") && !file.path.contains("/target/"))
        .collect();
    for path in [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "RELEASING.md",
        "SECURITY.md",
        "CODE_OF_CONDUCT.md",
        ".github/pull_request_template.md",
    ] {
        texts.push(Source {
            path: path.to_owned(),
            text: document(path),
        });
    }
    assert!(texts.len() > 300, "the check sees {} files", texts.len());
    let mut found = Vec::new();
    for file in &texts {
        // a phrase may be broken over two lines
        let words: Vec<&str> = file
            .text
            .split(|letter: char| !(letter.is_alphanumeric() || letter == '_'))
            .filter(|word| !word.is_empty())
            .collect();
        for (refused, better) in REFUSED {
            let phrase: Vec<&str> = refused.split(' ').collect();
            let is_it = |window: &&[&str]| {
                let mut pairs = window.iter().zip(&phrase);
                pairs.all(|(word, wanted)| word.eq_ignore_ascii_case(wanted))
            };
            if words.windows(phrase.len()).any(|window| is_it(&window)) {
                found.push(format!("{}: {refused:?}; write: {better}", file.path));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

fn document(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the members of all types whose lines `is_wanted`, as `Type::name`: functions, fields and
/// variants.
fn members_of_types(is_wanted: impl Fn(&str) -> bool) -> BTreeSet<String> {
    fn word(text: &str) -> &str {
        let end = text
            .find(|letter: char| !letter.is_alphanumeric() && letter != '_')
            .unwrap_or(text.len());
        &text[..end]
    }
    fn without_visibility(item: &str) -> &str {
        let Some(rest) = item.strip_prefix("pub") else {
            return item;
        };
        rest.strip_prefix('(')
            .and_then(|rest| rest.split_once(") "))
            .map_or(rest, |(_, item)| item)
            .trim_start()
    }
    let mut members = BTreeSet::new();
    for file in core() {
        let lines = file.code();
        for (at, line) in lines.iter().enumerate() {
            let Some((item, _)) = line.split_once('{') else {
                continue;
            };
            let item = without_visibility(item);
            let name = if let Some(about) = item.strip_prefix("impl") {
                // `impl<T> Trait for Type<T>`
                let about = if about.starts_with('<') {
                    about.split_once("> ").map_or(about, |(_, rest)| rest)
                } else {
                    about
                };
                word(about.rsplit(" for ").next().unwrap().trim())
            } else if let Some(about) = ["struct ", "enum ", "trait "]
                .iter()
                .find_map(|kind| item.strip_prefix(kind))
            {
                word(about)
            } else {
                continue;
            };
            for inside in block(&lines, at)
                .iter()
                .skip(1)
                .filter_map(|line| line.strip_prefix("    "))
                .filter(|line| is_wanted(line))
            {
                let inside = ["async ", "const ", "fn "]
                    .iter()
                    .fold(without_visibility(inside), |inside, word| {
                        inside.strip_prefix(word).unwrap_or(inside)
                    });
                if !word(inside).is_empty() {
                    members.insert(format!("{name}::{}", word(inside)));
                }
            }
        }
    }
    members
}

/// Returns the functions outside of types, as `module::name`.
fn functions_of_modules() -> BTreeSet<String> {
    let mut functions = BTreeSet::new();
    for file in core() {
        let module = file.module().rsplit('/').next().unwrap_or_default();
        for line in file.code() {
            // an indented one is a method, or local to another function
            let Some((before, rest)) = line.split_once("fn ").filter(|_| !line.starts_with(' '))
            else {
                continue;
            };
            let is_item = before.split(' ').all(|word| {
                word.is_empty() || word.starts_with("pub") || word == "async" || word == "const"
            });
            if is_item {
                let name = rest
                    .split(|letter: char| !letter.is_alphanumeric() && letter != '_')
                    .next()
                    .unwrap_or_default();
                functions.insert(format!("{module}::{name}"));
            }
        }
    }
    functions
}

/// ARCHITECTURE.md names only what exists: each `Type::name` is a function, field or variant, and
/// each `module::name` a function, in `src` or in the wire.
#[test]
fn what_architecture_names_exists() {
    let (members, functions) = (members_of_types(|_| true), functions_of_modules());
    let seen = members.contains("Lock::acquire") && members.contains("Error::Lost");
    assert!(
        seen && !members.contains("Lock::Lost") && functions.contains("janitor::clean_up"),
        "the check sees the wrong members: it is broken"
    );
    let text = document("ARCHITECTURE.md");
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == ':';
    let (mut named, mut unknown) = (0, Vec::new());
    for path in text
        .split(|letter: char| !is_word(letter))
        .map(|path| path.trim_end_matches(':'))
        .filter(|path| path.contains("::"))
    {
        named += 1;
        if !members.contains(path) && !functions.contains(path) {
            unknown.push(path);
        }
    }
    assert!(
        named > 50,
        "the check sees only {named} names: it is broken"
    );
    assert!(
        unknown.is_empty(),
        "ARCHITECTURE.md names what does not exist: {unknown:?}"
    );
}

/// Each step of a lock and of an unlock in ARCHITECTURE.md names a function that exists.
#[test]
fn each_step_of_lock_and_unlock_names_a_function() {
    let text = document("ARCHITECTURE.md");
    let mut functions = members_of_types(|line| line.contains("fn "));
    functions.extend(functions_of_modules());
    for (heading, least) in [("## One `lock().await`", 8), ("## One `unlock()`", 5)] {
        let section = text
            .split(heading)
            .nth(1)
            .and_then(|rest| rest.split("\n## ").next())
            .unwrap_or_else(|| panic!("ARCHITECTURE.md has no section {heading}"));
        let mut steps: Vec<String> = Vec::new();
        for line in section.lines() {
            if line.starts_with(|letter: char| letter.is_ascii_digit()) {
                steps.push(line.to_owned());
            } else if line.starts_with("  ") {
                // a step of several lines
                steps.last_mut().expect("a step").push_str(line);
            }
        }
        assert!(
            steps.len() >= least,
            "{heading}: the check sees only {} steps: it is broken",
            steps.len()
        );
        for step in steps {
            assert!(
                step.split('`').any(|code| functions.contains(code)),
                "{heading}: no function that exists in: {step}"
            );
        }
    }
}

fn words(text: &str) -> usize {
    text.split_whitespace().count()
}

/// ARCHITECTURE.md is read in one go. What it has no room for is a decision, or the doc of a
/// module.
#[test]
fn the_architecture_and_each_decision_are_short() {
    let architecture = words(&document("ARCHITECTURE.md"));
    assert!(
        architecture <= 1_600,
        "ARCHITECTURE.md has {architecture} words, of at most 1,600"
    );
    for (at, decision) in sources("docs/decisions", "md").iter().enumerate() {
        let (number, words) = (at + 1, words(&decision.text));
        assert!(
            words <= 300,
            "{} has {words} words, of at most 300",
            decision.path
        );
        let is_numbered = decision
            .path
            .starts_with(&format!("docs/decisions/{number:03}-"))
            && decision.text.starts_with(&format!("# {number}. "));
        assert!(
            is_numbered && decision.text.contains("Decision"),
            "{}: not decision {number}, by its path or title, or without the word Decision",
            decision.path
        );
    }
}

/// The `//!` doc of a module says what its file is for, and why it is so. The guide's pages are
/// for users, and may be longer.
#[test]
fn the_doc_of_a_module_is_short() {
    for file in core()
        .iter()
        .filter(|file| !file.module().starts_with("guide"))
    {
        let words: usize = file
            .text
            .lines()
            .map_while(|line| line.strip_prefix("//!"))
            .map(words)
            .sum();
        assert!(
            words <= 200,
            "{}: its `//!` doc has {words} words, of at most 200",
            file.path
        );
    }
}

/// Returns the link definitions of a page: `[label]: target`.
fn definitions(text: &str) -> BTreeMap<&str, &str> {
    text.lines()
        .filter_map(|line| line.strip_prefix('[')?.split_once("]: "))
        .collect()
}

/// Each page of the guide is a module, and the README links to it by name, in rustdoc and in the
/// repository.
#[test]
fn every_page_of_the_guide_is_found() {
    let (guide, readme, links) = (
        document("src/guide/mod.rs"),
        document("README.md"),
        document("src/guide/links.md"),
    );
    let (in_repository, in_rustdoc) = (definitions(&readme), definitions(&links));
    let pages = sources("src/guide", "md");
    assert!(
        pages.len() > 10,
        "the check sees only {} pages: it is broken",
        pages.len()
    );
    for page in pages
        .iter()
        .filter(|page| !page.path.ends_with("/links.md"))
    {
        let name = page
            .path
            .trim_start_matches("src/guide/")
            .trim_end_matches(".md");
        let module = format!("#[doc = include_str!(\"{name}.md\")]\npub mod {name} {{}}");
        assert_eq!(
            guide.matches(&module).count(),
            1,
            "{}: not exactly one module",
            page.path
        );
        assert!(
            guide.contains(&format!("[`{name}`]")),
            "{}: not in the guide's table",
            page.path
        );
        let label = in_repository
            .iter()
            .find(|(_, to)| **to == page.path)
            .map(|(label, _)| *label);
        let label = label.unwrap_or_else(|| panic!("{}: README has no link to it", page.path));
        assert!(
            readme.matches(&format!("[{label}]")).count() > 1,
            "README does not use [{label}]"
        );
        assert_eq!(
            in_rustdoc.get(label).copied(),
            Some(format!("crate::guide::{name}").as_str()),
            "[{label}]"
        );
    }
    assert_eq!(in_repository.len(), in_rustdoc.len());
}

/// The guide's page on services names each command that a client's user needs, but those in scripts,
/// which it names together.
#[test]
fn the_page_on_services_names_each_command() {
    let page = document("src/guide/services.md");
    let every = [
        nestlock::permissions::EVERY_CLIENT,
        nestlock::permissions::CLUSTER,
        nestlock::permissions::SENTINEL,
        nestlock::permissions::REPLICAS,
        nestlock::permissions::FSYNC,
    ];
    let in_scripts = [
        "hset", "hmget", "hlen", "hgetall", "hdel", "del", "pexpire", "pttl",
    ];
    let commands = every.iter().flat_map(|part| part.commands);
    let asked: Vec<_> = commands
        .filter(|command| !in_scripts.contains(command))
        .collect();
    assert!(
        asked.len() > 15,
        "the check sees only {asked:?}: it is broken"
    );
    for command in asked {
        let words = command.replace('|', " ").to_uppercase();
        let is_named = ["`", " server`"]
            .iter()
            .any(|end| page.contains(&format!("`{words}{end}")));
        assert!(is_named, "src/guide/services.md does not name {words}");
    }
}

/// README reads well on its own: its code hides no lines, and no link breaks outside the
/// repository. It is also short.
#[test]
fn the_readme_is_short_and_reads_well_anywhere() {
    let readme = document("README.md");
    let (mut code, mut words) = (false, 0);
    for line in readme.lines() {
        if line.starts_with("```") {
            code = !code;
        } else if code {
            assert!(
                line != "#" && !line.starts_with("# "),
                "README hides a line: {line}"
            );
        } else if !line.starts_with('[') {
            assert!(
                !line.contains("]("),
                "README has a link that is not the guide's: {line}"
            );
            words += line.split_whitespace().count();
        }
    }
    assert!(
        (500..1_000).contains(&words),
        "README has {words} words outside its code"
    );
}

/// Every error has a row in the guide, and the row agrees with the predicates.
#[test]
fn the_guide_has_every_error() {
    let (source, guide) = (document("src/error.rs"), document("src/guide/errors.md"));
    let lines: Vec<&str> = source.lines().collect();
    let start = lines
        .iter()
        .position(|line| *line == "pub enum Error {")
        .expect("the errors");
    let variants: BTreeSet<&str> = block(&lines, start)
        .into_iter()
        .filter_map(|line| {
            line.strip_prefix("    ")
                .filter(|line| line.starts_with(char::is_uppercase))
        })
        .map(|line| line.trim_end_matches([' ', '{', ',']))
        .collect();
    assert!(
        variants.len() > 15,
        "the check sees only {variants:?}: it is broken"
    );
    let named_in = |predicate: &str| -> BTreeSet<&str> {
        let start = lines
            .iter()
            .position(|line| line.contains(&format!("pub fn {predicate}(")))
            .expect("the predicate");
        let body = block(&lines, start).join(" ");
        variants
            .iter()
            .filter(|variant| body.contains(&format!("Self::{variant} ")))
            .copied()
            .collect()
    };
    let mut rows = BTreeMap::new();
    for row in guide.lines().filter_map(|line| line.strip_prefix("| [`")) {
        let (name, rest) = row.split_once("`] | ").expect("a row");
        let cells: Vec<&str> = rest.split('|').map(str::trim).collect();
        assert!(rows.insert(name, cells[2]).is_none(), "{name} has two rows");
    }
    assert_eq!(rows.keys().copied().collect::<BTreeSet<_>>(), variants);
    for predicate in ["is_conflict", "is_transient", "is_lost"] {
        let said = rows
            .iter()
            .filter(|(_, cell)| cell.starts_with(&format!("`{predicate}`")))
            .map(|(name, _)| *name);
        assert_eq!(
            said.collect::<BTreeSet<_>>(),
            named_in(predicate),
            "{predicate}"
        );
    }
}

#[test]
fn the_guide_has_every_option() {
    let (source, guide) = (
        document("src/client.rs"),
        document("src/guide/configuration.md"),
    );
    let lines: Vec<&str> = source.lines().collect();
    // A hidden setter is not a user's option.
    let shown = lines
        .windows(2)
        .filter(|pair| pair[0].trim() != "#[doc(hidden)]")
        .map(|pair| pair[1]);
    let setters: Vec<&str> = shown
        .filter_map(|line| {
            line.strip_prefix("    pub fn ")?
                .split_once("(mut self, ")
                .map(|(name, _)| name.split('<').next().expect("a name"))
        })
        .collect();
    assert!(
        setters.len() >= 10,
        "the check sees only {setters:?}: it is broken"
    );
    for name in setters {
        assert!(
            guide.contains(&format!("| [`{name}`] |")),
            "src/guide/configuration.md has no row for {name}"
        );
    }
}

// --- the catalogue ---

/// Returns the names of all test functions with their modules: `lost_reply::r31_...`.
fn tests() -> BTreeSet<String> {
    let mut tests = BTreeSet::new();
    for file in sources("tests", "rs").into_iter().chain(core()) {
        let path = file.path.replace("crates/nestlock-wire/src/", "src/wire/");
        let module = ["tests/it/", "tests/", "src/"]
            .iter()
            .find_map(|folder| path.strip_prefix(folder));
        let module = module.expect("a folder").trim_end_matches(".rs");
        let module = module.trim_end_matches("/mod").replace('/', "::");
        let lines: Vec<&str> = file.text.lines().map(str::trim_start).collect();
        if module == "contract" {
            // The macro makes a test of each name in its list.
            let list = lines
                .iter()
                .skip_while(|line| !line.contains("@tests"))
                .skip(1);
            let names = list.take_while(|line| {
                line.bytes()
                    .all(|byte| byte == b'_' || byte.is_ascii_alphanumeric())
            });
            tests.extend(names.map(|name| format!("contract::{name}")));
        }
        for (at, line) in lines.iter().enumerate() {
            let Some(rest) = line
                .strip_prefix("async fn ")
                .or_else(|| line.strip_prefix("fn "))
            else {
                continue;
            };
            let is_attribute = |line: &&&str| line.starts_with("#[") || line.starts_with("//");
            let is_test = |line: &&str| {
                line.starts_with("#[test]")
                    || line.starts_with("#[tokio::test")
                    || line.starts_with("#[should_panic")
            };
            if lines[..at]
                .iter()
                .rev()
                .take_while(is_attribute)
                .any(is_test)
            {
                tests.insert(format!("{module}::{}", rest.split('(').next().unwrap()));
            }
        }
    }
    tests
}

/// Returns the ids in a test's name: `r43_f38_release_...` names `R43` and `F38`.
fn ids(test: &str) -> Vec<String> {
    let name = test.rsplit("::").next().unwrap();
    let is_id = |part: &&str| {
        let number = part.strip_prefix(['r', 'h', 's', 'p', 'n', 'l', 'f']);
        number.is_some_and(|number| {
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        })
    };
    name.split('_')
        .take_while(is_id)
        .map(str::to_uppercase)
        .collect()
}

#[test]
fn ids_are_read_off_names() {
    assert_eq!(ids("a::r43_f38_release"), ["R43", "F38"]);
    assert_eq!(ids("a::release_r43"), [] as [&str; 0]);
    assert_eq!(ids("a::s_3"), [] as [&str; 0]);
}

/// Each row of `tests/catalogue.md` is `| R31 | what it is | lost_reply::r31_... |`. Commas or
/// blanks separate several tests.
#[test]
fn the_catalogue_and_the_tests_agree() {
    let catalogue = fs::read_to_string(root().join("tests/catalogue.md")).expect("the table");
    let tests = tests();
    assert!(
        tests.len() > 20,
        "the check sees only {} tests: it is broken",
        tests.len()
    );
    let (mut seen, mut listed) = (BTreeSet::new(), BTreeSet::new());
    for line in catalogue.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, id, what, named, ..] = cells[..] else {
            continue;
        };
        if ids(&format!("{}_", id.to_lowercase())).is_empty() {
            continue; // the table's head, or another table
        }
        assert!(
            what.split(' ').count() > 2 && !what.contains("::"),
            "{id}: say what it is, not {what:?}"
        );
        assert!(seen.insert(id.to_owned()), "{id} is listed twice");
        for test in named
            .split([',', ' '])
            .map(|test| test.trim_matches('`'))
            .filter(|test| test.contains("::"))
        {
            let known = tests
                .iter()
                .any(|known| known == test || known.ends_with(&format!("::{test}")));
            assert!(known, "{id}: there is no test {test}");
            listed.insert(test.rsplit("::").next().unwrap().to_owned());
        }
    }
    let missing: Vec<&String> = tests
        .iter()
        .filter(|test| !ids(test).is_empty() && !listed.contains(test.rsplit("::").next().unwrap()))
        .collect();
    assert!(
        missing.is_empty(),
        "not in tests/catalogue.md: {missing:#?}"
    );
}
