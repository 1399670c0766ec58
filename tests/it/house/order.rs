//! The order of files: no two import each other, directly or through others.
//!
//! A file uses the files in which what it names is defined: an import through a list of public
//! names leads to the definition. Such a list (`pub use`) uses nothing itself, and neither does
//! `mod`. Unit tests do not count, and calls of methods are not seen.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Arm, Attribute, Field, FieldValue, File, ImplItem, Item, ItemMod, Macro, Meta, Path, Token,
    UseTree, Variant, Visibility,
    punctuated::Punctuated,
    visit::{self, Visit},
};

use super::{Source, root, sources};

/// The names of modules from the root of a crate, or of a path.
type Names = Vec<String>;

/// One name that a `use` statement brings in. The name of `use a::*` is `*`.
#[derive(Clone)]
struct Import {
    path: Names,
    name: String,
    is_public: bool,
}

/// What a file defines and names, outside of its unit tests.
#[derive(Default)]
struct Module {
    defined: BTreeSet<String>,
    imports: Vec<Import>,
    paths: Vec<Names>,
    words: BTreeSet<String>,
    /// How many inline modules are open.
    depth: usize,
}

/// Returns whether an item is compiled for tests only.
fn is_of_tests(attributes: &[Attribute]) -> bool {
    fn needs_test(meta: &Meta) -> bool {
        match meta {
            Meta::Path(path) => path.is_ident("test"),
            Meta::List(list) if list.path.is_ident("all") => list
                .parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated)
                .is_ok_and(|all| all.iter().any(needs_test)),
            _ => false,
        }
    }
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute
                .parse_args::<Meta>()
                .is_ok_and(|meta| needs_test(&meta))
    })
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

impl Module {
    /// Returns whether a name is defined or imported here.
    fn has(&self, name: &str) -> bool {
        self.defined.contains(name) || self.imports.iter().any(|import| import.name == name)
    }

    fn read(text: &str, path: &str) -> Self {
        let file: File = syn::parse_file(text).unwrap_or_else(|error| panic!("{path}: {error}"));
        let mut module = Self::default();
        module.visit_file(&file);
        module
    }

    /// Returns a path as it reads outside of the inline modules in which it stands.
    fn outside(&self, mut path: Names) -> Names {
        for _ in 0..self.depth {
            match path.first().map(String::as_str) {
                Some("super") => _ = path.remove(0),
                _ => break,
            }
        }
        path
    }

    fn import(&mut self, tree: &UseTree, mut base: Names, is_public: bool) {
        let name = match tree {
            UseTree::Path(path) => {
                base.push(path.ident.to_string());
                return self.import(&path.tree, base, is_public);
            }
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(tree, base.clone(), is_public);
                }
                return;
            }
            UseTree::Name(name) if name.ident == "self" => base.last().cloned().unwrap_or_default(),
            UseTree::Name(name) => {
                base.push(name.ident.to_string());
                name.ident.to_string()
            }
            UseTree::Rename(name) => {
                if name.ident != "self" {
                    base.push(name.ident.to_string());
                }
                name.rename.to_string()
            }
            UseTree::Glob(_) => "*".to_owned(),
        };
        let path = self.outside(base);
        self.imports.push(Import {
            path,
            name,
            is_public,
        });
    }

    /// Reads the tokens that a macro is called with, or made of: paths are names between `::`.
    fn tokens(&mut self, tokens: TokenStream) {
        let (mut path, mut colons) = (Names::new(), 0);
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.path(std::mem::take(&mut path));
                    }
                    self.words.insert(name.to_string());
                    path.push(name.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Group(group) => {
                    self.tokens(group.stream());
                    colons = 0;
                }
                _ => colons = 0,
            }
        }
        self.path(path);
    }

    fn path(&mut self, path: Names) {
        if path.len() > 1 {
            let path = self.outside(path);
            self.paths.push(path);
        }
    }
}

impl<'ast> Visit<'ast> for Module {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_of_tests(attributes(item)) {
            return;
        }
        let name = match item {
            Item::Const(item) => Some(&item.ident),
            Item::Enum(item) => Some(&item.ident),
            Item::Fn(item) => Some(&item.sig.ident),
            Item::Macro(item) => item.ident.as_ref(),
            Item::Mod(item) if item.content.is_some() => Some(&item.ident),
            Item::Static(item) => Some(&item.ident),
            Item::Struct(item) => Some(&item.ident),
            Item::Trait(item) => Some(&item.ident),
            Item::Type(item) => Some(&item.ident),
            Item::Use(item) => {
                let is_public = !matches!(item.vis, Visibility::Inherited);
                return self.import(&item.tree, Names::new(), is_public);
            }
            _ => None,
        };
        self.defined.extend(name.map(ToString::to_string));
        visit::visit_item(self, item);
    }

    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        self.depth += 1;
        visit::visit_item_mod(self, item);
        self.depth -= 1;
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes = match item {
            ImplItem::Const(item) => &item.attrs[..],
            ImplItem::Fn(item) => &item.attrs,
            ImplItem::Type(item) => &item.attrs,
            _ => &[],
        };
        if !is_of_tests(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_field(&mut self, field: &'ast Field) {
        if !is_of_tests(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_variant(&mut self, variant: &'ast Variant) {
        if !is_of_tests(&variant.attrs) {
            visit::visit_variant(self, variant);
        }
    }

    fn visit_field_value(&mut self, field: &'ast FieldValue) {
        if !is_of_tests(&field.attrs) {
            visit::visit_field_value(self, field);
        }
    }

    fn visit_arm(&mut self, arm: &'ast Arm) {
        if !is_of_tests(&arm.attrs) {
            visit::visit_arm(self, arm);
        }
    }

    /// An attribute may name functions and types.
    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta {
            self.tokens(list.tokens.clone());
        }
        visit::visit_attribute(self, attribute);
    }

    /// `pub(in path)` uses nothing of that path.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_path(&mut self, path: &'ast Path) {
        let names: Names = path
            .segments
            .iter()
            .map(|segment| segment.ident.to_string())
            .collect();
        self.words.extend(names.first().cloned());
        self.path(names);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast Macro) {
        self.tokens(item.tokens.clone());
        visit::visit_macro(self, item);
    }
}

/// The files of one crate.
struct Crate(BTreeMap<Names, Module>);

/// Where a path leads: a module, or what is defined in it.
#[derive(Clone)]
struct Target {
    module: Names,
    is_module: bool,
}

impl Crate {
    fn read<'s>(files: impl IntoIterator<Item = (&'s str, &'s str)>) -> Self {
        let mut modules = BTreeMap::<Names, Module>::new();
        for (path, text) in files {
            let mut names: Names = path
                .trim_end_matches(".rs")
                .split('/')
                .map(str::to_owned)
                .collect();
            if names.iter().any(|name| name == "tests") || names[0] == "bin" {
                continue;
            }
            if names.last().is_some_and(|name| name == "mod")
                || names == ["lib"]
                || names == ["main"]
            {
                names.pop();
            }
            let read = Module::read(text, path);
            let module = modules.entry(names).or_default();
            module.defined.extend(read.defined);
            module.imports.extend(read.imports);
            module.paths.extend(read.paths);
            module.words.extend(read.words);
        }
        Self(modules)
    }

    /// Returns a path from the root of the crate, or `None` if it does not begin in this crate.
    fn absolute(&self, from: &Names, path: &[String]) -> Option<Names> {
        let mut base = from.clone();
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => {
                base.clear();
                rest = &path[1..];
            }
            "self" | "super" => {
                while let Some(first) = rest.first() {
                    match first.as_str() {
                        "super" => _ = base.pop(),
                        "self" => {}
                        _ => break,
                    }
                    rest = &rest[1..];
                }
            }
            first => {
                let child = [&from[..], &[first.to_owned()]].concat();
                if !self.0.contains_key(&child) {
                    return None;
                }
            }
        }
        base.extend_from_slice(rest);
        Some(base)
    }

    /// Returns where a path that stands in a module leads.
    fn resolve(
        &self,
        from: &Names,
        path: &[String],
        seen: &mut Vec<(Names, String)>,
    ) -> Option<Target> {
        if let Some(path) = self.absolute(from, path) {
            return self.walk(&path, seen);
        }
        // its first name may be imported by name, or by a glob
        let Some(import) = self.imported(from, path.first()?, seen) else {
            return self.through_all(from, path, seen);
        };
        let at = self.resolve(from, &import.path, seen)?;
        if at.is_module {
            return self.walk(&[&at.module, &path[1..]].concat(), seen);
        }
        Some(at)
    }

    /// Returns where a path leads whose first name comes from a glob import (`use a::*`).
    fn through_all(
        &self,
        from: &Names,
        path: &[String],
        seen: &mut Vec<(Names, String)>,
    ) -> Option<Target> {
        let imports = self.0[from].imports.iter();
        imports
            .filter(|import| import.name == "*")
            .find_map(|import| {
                let of = self.absolute(from, &import.path)?;
                let first = [&of[..], &path[..1]].concat();
                let is_there = self.0.contains_key(&first)
                    || self.0.get(&of).is_some_and(|module| module.has(&path[0]));
                let path = [&of[..], path].concat();
                is_there.then(|| self.walk(&path, seen)).flatten()
            })
    }

    fn imported(
        &self,
        module: &Names,
        name: &str,
        seen: &mut Vec<(Names, String)>,
    ) -> Option<&Import> {
        let key = (module.clone(), name.to_owned());
        if seen.contains(&key) {
            return None;
        }
        let found = self.0[module]
            .imports
            .iter()
            .find(|import| import.name == name)?;
        seen.push(key);
        Some(found)
    }

    fn walk(&self, path: &[String], seen: &mut Vec<(Names, String)>) -> Option<Target> {
        let mut module = Names::new();
        for (at, name) in path.iter().enumerate() {
            let child = [&module[..], std::slice::from_ref(name)].concat();
            if self.0.contains_key(&child) {
                module = child;
                continue;
            }
            let here = Target {
                module: module.clone(),
                is_module: false,
            };
            if self.0[&module].defined.contains(name) {
                return Some(here);
            }
            if let Some(import) = self.imported(&module, name, seen) {
                let found = self.resolve(&module, &import.path, seen)?;
                if found.is_module {
                    return self.walk(&[&found.module, &path[at + 1..]].concat(), seen);
                }
                return Some(found);
            }
            return self.through_all(&module, &path[at..], seen).or(Some(here));
        }
        Some(Target {
            module,
            is_module: true,
        })
    }

    /// Returns the files that a file uses.
    fn used(&self, name: &Names) -> BTreeSet<Names> {
        let module = &self.0[name];
        let only_listed =
            |import: &&Import| import.is_public && !module.words.contains(&import.name);
        let resolve = |path: &Names| self.resolve(name, path, &mut Vec::new());
        let imports = module
            .imports
            .iter()
            .filter(|import| !only_listed(import))
            .filter_map(|import| resolve(&import.path))
            // a use of an imported module is a path of its own
            .filter(|target| !target.is_module);
        let of_all = module.words.iter().filter(|word| !module.has(word));
        let of_all = of_all
            .filter_map(|word| self.through_all(name, std::slice::from_ref(word), &mut Vec::new()));
        imports
            .chain(module.paths.iter().filter_map(resolve))
            .chain(of_all.filter(|target| !target.is_module))
            .map(|target| target.module)
            .filter(|used| used != name)
            .collect()
    }

    /// Returns the groups of files that import each other, directly or through others.
    fn circles(&self) -> BTreeSet<Vec<String>> {
        let uses: BTreeMap<&Names, BTreeSet<Names>> =
            self.0.keys().map(|name| (name, self.used(name))).collect();
        let reach = |from: &Names| {
            let (mut reached, mut open) = (BTreeSet::new(), vec![from.clone()]);
            while let Some(at) = open.pop() {
                for next in &uses[&at] {
                    if reached.insert(next.clone()) {
                        open.push(next.clone());
                    }
                }
            }
            reached
        };
        let reached: BTreeMap<&Names, BTreeSet<Names>> =
            self.0.keys().map(|name| (name, reach(name))).collect();
        let circle = |name: &&Names| -> Vec<String> {
            let others = reached[name]
                .iter()
                .filter(|other| reached[other].contains(*name));
            others.map(|other| other.join("/")).collect()
        };
        self.0
            .keys()
            .filter(|name| reached[name].contains(*name))
            .map(|name| circle(&name))
            .collect()
    }
}

/// Returns the crates of the workspace: the folder of each, and its files.
fn crates() -> Vec<(String, Vec<Source>)> {
    let mut folders = vec!["src".to_owned()];
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if root().join("crates").join(&name).join("src").is_dir() {
            folders.push(format!("crates/{name}/src"));
        }
    }
    folders.sort();
    folders
        .into_iter()
        .map(|folder| {
            let files = sources(&folder, "rs");
            (folder, files)
        })
        .collect()
}

#[test]
fn no_two_files_import_each_other() {
    let (mut uses, mut circles) = (0, Vec::new());
    for (folder, files) in crates() {
        let inside = format!("{folder}/");
        let read = Crate::read(files.iter().map(|file| {
            let path = file.path.strip_prefix(&inside).unwrap();
            (path, &*file.text)
        }));
        uses += read
            .0
            .keys()
            .map(|name| read.used(name).len())
            .sum::<usize>();
        for circle in read.circles() {
            circles.push(format!("{folder}: {}", circle.join(", ")));
        }
    }
    assert!(
        uses > 1_000,
        "the check sees only {uses} uses: it is broken"
    );
    assert!(circles.is_empty(), "{circles:#?}");
}

/// Two files, and whether they import each other.
#[test]
fn a_circle_is_found_however_it_is_imported() {
    let b = "use crate::a::A; pub struct B;";
    for (a, is_circle) in [
        ("use crate::b::B; pub struct A;", true),
        ("use super::b::B; pub struct A;", true),
        ("use crate::B; pub struct A;", true),
        ("use crate::{b::{B as Other}}; pub struct A;", true),
        ("use super::*; use b::B; pub struct A;", true),
        ("use super::*; pub struct A(B);", true),
        ("use super::*; pub struct A(b::B);", true),
        ("use crate::b; pub struct A;", false),
        ("#[derive(crate::b::B)] pub struct A;", true),
        ("pub(in crate::b) struct A;", false),
        ("pub enum A { #[cfg(test)] B(crate::b::B) }", false),
        ("pub struct A(crate::b::B);", true),
        ("pub struct A; fn f() { super::b::B; }", true),
        ("pub struct A; fn f() { g!(crate::b::B) }", true),
        ("use crate::b; pub struct A; fn f() { b::B; }", true),
        ("mod c { use super::super::b::B; } pub struct A;", true),
        ("mod c { use super::b::B; } pub struct A;", false),
        ("pub use crate::b::B; pub struct A;", false),
        ("pub use crate::b::B; pub struct A(B);", true),
        (
            "#[cfg(test)] mod tests { use crate::b::B; } pub struct A;",
            false,
        ),
        (
            "#[cfg(test)] pub(super) mod tests { use crate::b::B; } pub struct A;",
            false,
        ),
        (
            "#[cfg(all(test, unix))] mod tests { use crate::b::B; } pub struct A;",
            false,
        ),
        ("#[cfg(not(test))] use crate::b::B; pub struct A;", true),
        (
            "#[cfg(feature = \"test\")] use crate::b::B; pub struct A;",
            true,
        ),
        ("pub struct A { #[cfg(test)] b: crate::b::B }", false),
        ("// use crate::b::B;\npub struct A;", false),
    ] {
        let lib = "mod a; mod b; pub use self::b::B;";
        let read = Crate::read([("lib.rs", lib), ("a.rs", a), ("b.rs", b)]);
        assert_eq!(!read.circles().is_empty(), is_circle, "{a}");
    }
    // through a third file, and through what stands in the parent
    let of_three = [
        ("main.rs", "mod a;"),
        ("a/mod.rs", "mod b; mod c; use self::b::B; pub struct A;"),
        ("a/b.rs", "use super::c::C; pub struct B;"),
        ("a/c.rs", "use super::A; pub struct C;"),
    ];
    assert_eq!(
        Crate::read(of_three).circles(),
        BTreeSet::from([vec!["a".to_owned(), "a/b".to_owned(), "a/c".to_owned()]])
    );
}
