//! Holds nestlock's public API against `api.txt`, so that a change of it is seen in review: `make api`. With `record`, it
//! writes the file.
//!
//! It reads the JSON that rustdoc writes, whose format is unstable: `public-api` must be of the toolchain's age. Where that
//! is no nightly, `RUSTC_BOOTSTRAP` lets rustdoc write it.
#![allow(clippy::print_stdout)]

use std::{
    collections::BTreeSet,
    env,
    error::Error,
    fs,
    path::Path,
    process::{Command, ExitCode},
};

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let file = root.join("api.txt");
    let found = public_api(&root)?;
    if env::args().nth(1).as_deref() == Some("record") {
        fs::write(&file, found)?;
        return Ok(ExitCode::SUCCESS);
    }
    let recorded = fs::read_to_string(&file)?;
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    let (before, now) = (lines(&recorded), lines(&found));
    for line in before.difference(&now) {
        println!("- {line}");
    }
    for line in now.difference(&before) {
        println!("+ {line}");
    }
    if recorded == found {
        println!("the public API is what api.txt says: {} items", now.len());
        return Ok(ExitCode::SUCCESS);
    }
    println!("the public API is not what api.txt says; if that is meant, `make api-record`");
    Ok(ExitCode::FAILURE)
}

/// One line for each item, sorted.
fn public_api(root: &Path) -> Result<String, Box<dyn Error>> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // apart: what RUSTC_BOOTSTRAP touches would be built anew by everybody else
    let target = root.join("target/api");
    let status = Command::new(cargo)
        .current_dir(root)
        .env("RUSTC_BOOTSTRAP", "1")
        .args(["rustdoc", "--quiet", "--package", "nestlock", "--lib", "--all-features", "--target-dir"])
        .arg(&target)
        .args(["--", "-Z", "unstable-options", "--output-format", "json"])
        .status()?;
    if !status.success() {
        return Err("rustdoc failed".into());
    }
    let api = public_api::Builder::from_rustdoc_json(target.join("doc/nestlock.json"))
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .omit_auto_derived_impls(true)
        .build()?;
    Ok(api.items().map(|item| item.to_string() + "\n").collect())
}
