//! Durations as text: `"250ms"`, `"2s"`, `"5m"`, `"1h"`.

use proc_macro2::{Span, TokenStream};
use quote::quote_spanned;
use syn::{Error, Expr, ExprLit, Lit, Result, spanned::Spanned};

/// The longest wait and lease of nestlock: 10 years, in milliseconds.
pub(crate) const TEN_YEARS: u64 = 10 * 365 * 24 * 3600 * 1000;

/// A time: a text, parsed at compile time, or an expression of type `Duration`.
pub(crate) enum Time {
    Millis(u64),
    Expr(Expr),
}

impl Time {
    /// Parses a time. `at_least` is the minimum of a text, in milliseconds.
    pub(crate) fn new(value: Expr, at_least: u64) -> Result<Self> {
        let Some(text) = text(&value)? else {
            return Ok(Self::Expr(value));
        };
        let millis = millis(&text, value.span())?;
        if !(at_least..=TEN_YEARS).contains(&millis) {
            return Err(Error::new(
                value.span(),
                format!("{text:?} is out of range: expected {at_least} ms to 10 years"),
            ));
        }
        Ok(Self::Millis(millis))
    }

    pub(crate) fn tokens(&self) -> TokenStream {
        match self {
            Self::Millis(millis) => duration(*millis),
            Self::Expr(value) => quote_spanned!(value.span()=> #value),
        }
    }
}

/// Returns the text of a string literal. Returns `None` if the expression is not a literal.
pub(crate) fn text(value: &Expr) -> Result<Option<String>> {
    match value {
        Expr::Lit(ExprLit {
            lit: Lit::Str(text),
            ..
        }) => Ok(Some(text.value())),
        Expr::Lit(_) => Err(Error::new(
            value.span(),
            "missing unit: write a string such as \"250ms\", \"2s\", \"5m\" or \"1h\"",
        )),
        _ => Ok(None),
    }
}

pub(crate) fn duration(millis: u64) -> TokenStream {
    quote_spanned!(Span::mixed_site()=> ::core::time::Duration::from_millis(#millis))
}

/// Parses a text as milliseconds.
pub(crate) fn millis(text: &str, span: Span) -> Result<u64> {
    let (number, unit) = text.split_at(
        text.find(|letter: char| !letter.is_ascii_digit())
            .unwrap_or(text.len()),
    );
    let factor = match unit {
        "ms" => Some(1),
        "s" => Some(1000),
        "m" => Some(60 * 1000),
        "h" => Some(3600 * 1000),
        _ => None,
    };
    let millis = factor.and_then(|factor: u64| number.parse::<u64>().ok()?.checked_mul(factor));
    millis.ok_or_else(|| {
        Error::new(
            span,
            format!("{text:?} is not a duration: expected an integer and a unit, such as \"250ms\", \"2s\", \"5m\" or \"1h\""),
        )
    })
}
