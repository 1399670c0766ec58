//! Each public item of the published crates has an example, or says where one is.
//!
//! An item is public if its modules are, or if a public module exports its name. A method needs
//! none: the example of its type counts for it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use syn::{
    Attribute, Expr, ImplItem, Item, Lit, LitStr, Macro, Meta, TraitItem, Type, UseTree, Visibility,
};

use super::{Source, document, sources};

/// The published crates that have an API, and where their sources are.
const CRATES: [(&str, &str); 5] = [
    ("nestlock", "src"),
    ("nestlock_wire", "crates/nestlock-wire/src"),
    ("nestlock_embedded", "crates/nestlock-embedded/src"),
    ("nestlock_recipes", "crates/nestlock-recipes/src"),
    ("nestlock_macros", "crates/nestlock-macros/src"),
];

/// The sentence of an item whose example is elsewhere, up to the name of that place.
const ELSEWHERE: &str = "For an example, see [`";

/// The words after the three backticks of a block that is compiled.
const COMPILED: [&str; 6] = [
    "",
    "rust",
    "no_run",
    "compile_fail",
    "should_panic",
    "edition2024",
];

/// Returns whether a doc has a block of code that is compiled.
fn has_example(doc: &str) -> bool {
    let fences = doc
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("```"));
    // each second fence ends a block
    fences
        .step_by(2)
        .any(|words| words.split(',').all(|word| COMPILED.contains(&word.trim())))
}

/// Returns the place that the doc names for an example.
fn elsewhere(doc: &str) -> Option<&str> {
    let (_, rest) = doc.split_once(ELSEWHERE)?;
    rest.split_once("`].").map(|(name, _)| name)
}

/// Returns the doc in these attributes, of an item in the file at `path`.
fn doc(attributes: &[Attribute], path: &str) -> String {
    let mut lines = Vec::new();
    for attribute in attributes {
        let Meta::NameValue(pair) = &attribute.meta else {
            continue;
        };
        if !pair.path.is_ident("doc") {
            continue;
        }
        match &pair.value {
            Expr::Lit(text) => {
                if let Lit::Str(text) = &text.lit {
                    lines.push(text.value());
                }
            }
            Expr::Macro(include) => lines.push(included(&include.mac, path)),
            _ => {}
        }
    }
    lines.join("\n")
}

/// Returns the text of `include_str!("..")` in the file at `path`.
fn included(include: &Macro, path: &str) -> String {
    let file: LitStr = include.parse_body().expect("the name of a file");
    let folder = Path::new(path).parent().expect("a folder");
    document(folder.join(file.value()).to_str().unwrap())
}

fn is_hidden(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("doc")
            && attribute
                .parse_args::<syn::Path>()
                .is_ok_and(|word| word.is_ident("hidden"))
    })
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Collects the names that a `use` tree brings in.
fn names(tree: &UseTree, found: &mut BTreeSet<String>) {
    match tree {
        UseTree::Path(path) => names(&path.tree, found),
        UseTree::Group(group) => group.items.iter().for_each(|tree| names(tree, found)),
        UseTree::Name(name) => _ = found.insert(name.ident.to_string()),
        UseTree::Rename(name) => _ = found.insert(name.ident.to_string()),
        UseTree::Glob(_) => {}
    }
}

/// An item with `pub` at the level of a module, or a macro.
struct Found {
    name: String,
    doc: String,
    /// The file, for the message of the test.
    file: String,
    is_in_public_module: bool,
}

/// One crate: what may be public in it, and what may contain an example.
#[derive(Default)]
struct Api {
    found: Vec<Found>,
    /// The names that public modules export.
    exported: BTreeSet<String>,
    /// The docs by name: items, `Type::method`, modules, and the crate.
    docs: BTreeMap<String, Vec<String>>,
}

impl Api {
    fn read(name: &str, folder: &str) -> Self {
        let files = sources(folder, "rs");
        let mut api = Self::default();
        api.module(&files, name, &[folder.to_owned()], true);
        api
    }

    /// Reads the file of a module, and those of its modules. `names`: the folder of the crate, then
    /// the names of modules.
    fn module(&mut self, files: &[Source], name: &str, names: &[String], is_public: bool) {
        let path = names.join("/");
        let places = [
            format!("{path}/lib.rs"),
            format!("{path}.rs"),
            format!("{path}/mod.rs"),
        ];
        let file = files.iter().find(|file| places.contains(&file.path));
        let file = file.unwrap_or_else(|| panic!("there is none of {places:?}"));
        let parsed =
            syn::parse_file(&file.text).unwrap_or_else(|error| panic!("{}: {error}", file.path));
        self.note(name, doc(&parsed.attrs, &file.path));
        let mut inside = Vec::new();
        self.items(&parsed.items, &file.path, is_public, &mut inside);
        for (child, is_public) in inside {
            let names = [names, std::slice::from_ref(&child)].concat();
            self.module(files, &child, &names, is_public);
        }
    }

    fn note(&mut self, name: &str, doc: String) {
        self.docs.entry(name.to_owned()).or_default().push(doc);
    }

    /// Reads the items of a module. Collects the modules that have files of their own.
    fn items(
        &mut self,
        items: &[Item],
        file: &str,
        is_open: bool,
        inside: &mut Vec<(String, bool)>,
    ) {
        for item in items {
            match item {
                Item::Mod(item) if item.ident != "tests" => {
                    let is_open = is_open && is_public(&item.vis) && !is_hidden(&item.attrs);
                    let name = item.ident.to_string();
                    match &item.content {
                        Some((_, items)) => {
                            self.note(&name, doc(&item.attrs, file));
                            self.items(items, file, is_open, inside);
                        }
                        None => inside.push((name, is_open)),
                    }
                }
                Item::Use(item) if is_open && is_public(&item.vis) && !is_hidden(&item.attrs) => {
                    names(&item.tree, &mut self.exported);
                }
                Item::Impl(item) => self.methods(item, file),
                // a macro may be called with items, such as `pin_project!`
                Item::Macro(item) if item.ident.is_none() => {
                    if let Ok(called_with) = item.mac.parse_body::<syn::File>() {
                        self.items(&called_with.items, file, is_open, inside);
                    }
                }
                item => self.item(item, file, is_open),
            }
        }
    }

    fn item(&mut self, item: &Item, file: &str, is_in_public_module: bool) {
        let (name, attributes, is_public) = match item {
            Item::Struct(item) => (&item.ident, &item.attrs, is_public(&item.vis)),
            Item::Enum(item) => (&item.ident, &item.attrs, is_public(&item.vis)),
            Item::Type(item) => (&item.ident, &item.attrs, is_public(&item.vis)),
            Item::Fn(item) => (&item.sig.ident, &item.attrs, is_public(&item.vis)),
            Item::Trait(item) => (&item.ident, &item.attrs, is_public(&item.vis)),
            Item::Macro(item) => {
                let is_exported = |attribute: &Attribute| attribute.path().is_ident("macro_export");
                let Some(name) = &item.ident else { return };
                (name, &item.attrs, item.attrs.iter().any(is_exported))
            }
            _ => return,
        };
        if let Item::Trait(of) = item {
            for inside in &of.items {
                if let TraitItem::Fn(inside) = inside {
                    let method = format!("{name}::{}", inside.sig.ident);
                    self.note(&method, doc(&inside.attrs, file));
                }
            }
        }
        let doc = doc(attributes, file);
        self.note(&name.to_string(), doc.clone());
        if is_public && !is_hidden(attributes) {
            self.found.push(Found {
                name: name.to_string(),
                doc,
                file: file.to_owned(),
                is_in_public_module,
            });
        }
    }

    fn methods(&mut self, item: &syn::ItemImpl, file: &str) {
        let Type::Path(of) = &*item.self_ty else {
            return;
        };
        let of = &of.path.segments.last().expect("a name").ident;
        for inside in &item.items {
            if let ImplItem::Fn(inside) = inside {
                let method = format!("{of}::{}", inside.sig.ident);
                self.note(&method, doc(&inside.attrs, file));
            }
        }
    }

    /// Returns the public items.
    fn public(&self) -> impl Iterator<Item = &Found> {
        let is_public =
            |item: &&Found| item.is_in_public_module || self.exported.contains(&item.name);
        self.found.iter().filter(is_public)
    }

    fn has_example(&self, name: &str) -> bool {
        let docs = self.docs.get(name);
        docs.is_some_and(|docs| docs.iter().any(|doc| has_example(doc)))
    }
}

/// Returns whether the place that an item of the crate `own` names has an example: in that crate or
/// in nestlock, or in the crate that the name begins with.
fn leads_to_one(apis: &BTreeMap<&str, Api>, own: &str, place: &str) -> bool {
    let within = place.split_once("::");
    if let Some((of, rest)) = within.and_then(|(first, rest)| Some((apis.get(first)?, rest))) {
        return of.has_example(rest);
    }
    let page = place
        .trim_start_matches("crate::")
        .trim_start_matches("guide::");
    [own, "nestlock"]
        .iter()
        .any(|of| apis[of].has_example(page))
}

/// Returns the names of the types, traits and free functions in api.txt of this crate.
fn listed(name: &str) -> BTreeSet<String> {
    let text = document("api.txt");
    let mut listed = BTreeSet::new();
    for line in text.lines() {
        // `pub async fn` counts, fields and variants have no such word
        let words: Vec<&str> = line.split([' ', '(', '<']).collect();
        let at = words
            .iter()
            .position(|word| ["struct", "enum", "trait", "type", "fn"].contains(word));
        let Some(path) = at.and_then(|at| words.get(at + 1)) else {
            continue;
        };
        let parts: Vec<&str> = path.trim_end_matches(':').split("::").collect();
        let (modules, item) = parts.split_at(parts.len() - 1);
        let is_member = modules
            .iter()
            .any(|module| module.starts_with(char::is_uppercase));
        if parts[0] == name && !is_member && !line.starts_with("impl") {
            listed.insert(item[0].to_owned());
        }
    }
    listed
}

#[test]
fn every_public_item_has_or_links_an_example() {
    let apis: BTreeMap<&str, Api> = CRATES
        .iter()
        .map(|(name, folder)| (*name, Api::read(name, folder)))
        .collect();
    let (mut seen, mut lacking) = (0, Vec::new());
    for (own, api) in &apis {
        for item in api.public() {
            seen += 1;
            let is_elsewhere = elsewhere(&item.doc).map(|place| leads_to_one(&apis, own, place));
            if !has_example(&item.doc) && is_elsewhere.is_none() {
                lacking.push(format!("{}: {} has no example", item.file, item.name));
            } else if is_elsewhere == Some(false) {
                lacking.push(format!(
                    "{}: {} names a place without an example",
                    item.file, item.name
                ));
            }
        }
    }
    assert!(seen > 100, "the check sees only {seen} items: it is broken");
    assert!(
        lacking.is_empty(),
        "write one, or \"{ELSEWHERE}X`].\": {lacking:#?}"
    );
}

/// The check above sees the items that the recorded API has.
#[test]
fn the_public_items_are_those_of_the_recorded_api() {
    for (name, folder) in &CRATES[..2] {
        let api = Api::read(name, folder);
        let seen: BTreeSet<String> = api.public().map(|item| item.name.clone()).collect();
        assert_eq!(seen, listed(name), "{name}");
    }
}

#[test]
fn an_example_is_a_block_that_is_compiled() {
    for (doc, is_one) in [
        ("A.\n\n```\nlet a = 1;\n```", true),
        ("A.\n\n```no_run\nlet a = 1;\n```", true),
        ("A.\n\n```rust,no_run\nlet a = 1;\n```", true),
        ("A.\n\n```compile_fail\nlet a: u8 = \"\";\n```", true),
        ("A.\n\n```text\na\n```", false),
        ("A.\n\n```toml\na = 1\n```\n\nB.", false),
        ("A.\n\n```ignore\nlet a = 1;\n```", false),
        ("A.\n\n```text\na\n```\n\n```\nlet a = 1;\n```", true),
        ("A `b`.", false),
    ] {
        assert_eq!(has_example(doc), is_one, "{doc}");
    }
    assert_eq!(elsewhere("A.\n\nFor an example, see [`B`]."), Some("B"));
    assert_eq!(elsewhere("A. See [`B`]."), None);
}
