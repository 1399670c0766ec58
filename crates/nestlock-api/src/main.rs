//! Compares nestlock's public API with `api.txt`, so that each change is seen in review: `make
//! api`. With `record`, it writes the file.
//!
//! It reads the JSON output of rustdoc. The format is unstable, so the versions of `public-api` and
//! the toolchain must match. On a stable toolchain, `RUSTC_BOOTSTRAP` enables this output.
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

/// The packages whose API is recorded.
const PACKAGES: [&str; 2] = ["nestlock", "nestlock-wire"];

/// Returns one line for each item, sorted, of one package after the other.
fn public_api(root: &Path) -> Result<String, Box<dyn Error>> {
    PACKAGES.iter().map(|package| of(package, root)).collect()
}

fn of(package: &str, root: &Path) -> Result<String, Box<dyn Error>> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // its own target folder: `RUSTC_BOOTSTRAP` would otherwise make other builds start over
    let target = root.join("target/api");
    let status = Command::new(cargo)
        .current_dir(root)
        .env("RUSTC_BOOTSTRAP", "1")
        .args([
            "rustdoc",
            "--quiet",
            "--package",
            package,
            "--lib",
            "--all-features",
            "--target-dir",
        ])
        .arg(&target)
        .args(["--", "-Z", "unstable-options", "--output-format", "json"])
        .status()?;
    if !status.success() {
        return Err("rustdoc failed".into());
    }
    let api = public_api::Builder::from_rustdoc_json(
        target.join(format!("doc/{}.json", package.replace('-', "_"))),
    )
    .omit_blanket_impls(true)
    .omit_auto_trait_impls(true)
    .omit_auto_derived_impls(true)
    .build()?;
    Ok(api.items().map(|item| item.to_string() + "\n").collect())
}
